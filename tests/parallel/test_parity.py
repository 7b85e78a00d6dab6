"""Megatron compared with Hugging Face on the same weights, for all families and layouts.

The families are those of tests/families.py. Then reward scores, and updates from several turns."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from megarl.data.batch import TrainBatch
from megarl.weights.families import FAMILIES
from tests.families import ROWS, Layout
from tests.parallel import jobs
from tests.parallel.test_invariance import VOCAB, make_batch
from tests.ranks import RankPool
from tests.tiny_models import EXPERT_BIAS, make_tiny_model, model_class
from tests.weights.folders import folder_tensors

Ranks = Callable[..., RankPool]


def tiny(folder: Path, family: Any, **options: Any) -> Path:
    """Make a model of four layers: two for each of two stages, or one for each virtual stage."""
    return make_tiny_model(folder, family, **{"layers": 4, "experts": 8, "active": 3, **options})


def sequences(vocab: int) -> tuple[list[list[int]], list[list[int]]]:
    """Make prompts and responses of very different lengths, including a response of one token."""
    generator = torch.Generator().manual_seed(5)
    sizes = [(3, 9), (11, 1), (1, 30), (7, 16), (2, 2), (20, 5)]
    draw = [[torch.randint(0, vocab, (n,), generator=generator).tolist() for n in pair] for pair in sizes]
    return [p for p, _ in draw], [r for _, r in draw]


def hf_logprobs(
    folder: Path, prompts: list[list[int]], responses: list[list[int]], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found, entropies = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = (
                model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
                / temperature
            )
        table = logits.log_softmax(-1)
        found.append(table.gather(-1, torch.tensor(response)[:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(found), torch.cat(entropies)


@torch.no_grad()
def hf_values(
    folder: Path, family: str, prompts: list[list[int]], responses: list[list[int]]
) -> torch.Tensor:
    config = AutoConfig.from_pretrained(folder)  # else transformers loads Qwen3.5 as an image model
    model = model_class(family, "token").from_pretrained(folder, config=config, dtype=torch.float32)
    rows = zip(prompts, responses, strict=True)
    return torch.cat([model(torch.tensor([p + r])).logits[0, len(p) - 1 : -1, 0] for p, r in rows])


def hf_gradients(folder: Path, family: str, batch: TrainBatch) -> dict[str, Tensor]:
    """Compute gradients of the mean negative log-probability of all response tokens, by the files' names.

    Uses float64, except for Qwen3.5's delta rule, which transformers computes in float32."""
    # Grouped GEMMs of experts have no float64 version.
    kind = {"experts_implementation": "eager"} if FAMILIES[family].is_moe else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **kind)
    loss, ends = torch.zeros((), dtype=torch.float64), batch.cu_seqlens.tolist()
    for start, stop in itertools.pairwise(ends):
        tokens, mask = batch.tokens[start:stop], batch.response_mask[start:stop]
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        loss -= logprobs.gather(-1, tokens[1:, None])[mask[1:], 0].sum()
    (loss / batch.response_mask.sum()).backward()
    found = {}
    for name, parameter in model.named_parameters():
        layer, of_experts, kind_of = name.rpartition(".experts.")
        if not of_experts:
            found[name] = parameter.grad
        parts = ("gate_proj", "up_proj") if kind_of == "gate_up_proj" else (kind_of,)
        for expert, gradient in enumerate(parameter.grad) if of_experts else ():
            for part, own in zip(parts, gradient.chunk(len(parts)), strict=True):
                found[f"{layer}.experts.{expert}.{part}.weight"] = own
    return found


def over_families(quantity: str) -> pytest.MarkDecorator:
    """Parametrize over every family at each of its layouts, slow unless the family's row lists it as fast.

    Values: the first family with a list of layouts runs at all of them, the others at the first two and the
    fast ones. All critics have the same head and the actor's layers, whose log-probabilities are compared
    everywhere."""
    cases, seen = [], set()
    for family, row in ROWS.items():
        if quantity == "values" and not row.critics:
            continue
        layouts, fast = row.layouts, row.fast.get(quantity, ())
        if quantity == "values" and layouts in seen:
            layouts = tuple(dict.fromkeys((*layouts[:2], *fast)))
        seen.add(row.layouts)
        for layout in layouts:
            marks = () if layout in fast else pytest.mark.slow
            cases.append(pytest.param(family, layout, marks=marks, id=f"{family}-{layout}"))
    return pytest.mark.parametrize(("family", "layout"), cases)


def nll_batch() -> TrainBatch:
    """Make a batch whose loss is the mean negative log-probability of all response tokens."""
    batch = make_batch()
    batch.tokens = batch.tokens.clamp(min=1)  # Hugging Face gives the padding token, 0, no gradient
    batch["correct"] = torch.ones(8, dtype=torch.bool)
    batch["advantages"] = torch.zeros(batch.num_tokens)
    return batch


Theirs = Callable[[str, str], list[tuple[dict[str, Any], Any]]]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    """Return `theirs(quantity, family)`, which computes and caches Hugging Face's results.

    It returns a job's arguments and the result for each of the family's models, once for all layouts."""
    root = tmp_path_factory.mktemp("theirs")

    @functools.cache
    def of(quantity: str, family: str) -> list[tuple[dict[str, Any], Any]]:
        kind, vocab = "token" if quantity == "values" else None, 307  # tp does not divide it
        prompts, responses = sequences(vocab)
        # several chunks of the delta rule, and more than the tokens of a micro-batch
        prompts[5] = prompts[5] * 9
        found = []
        for number, options in enumerate(ROWS[family].models):
            folder = root / f"{quantity} of {family} {number}"
            if quantity == "gradients":
                tiny(folder, family, vocab=VOCAB, **options)
                batch = nll_batch()
                found.append(({"folder": folder, "batch": batch}, hf_gradients(folder, family, batch)))
                continue
            tiny(folder, family, vocab=vocab, classification=kind, **options)
            given: dict[str, Any] = {"folder": folder, "prompts": prompts, "responses": responses}
            if quantity == "values":
                found.append((given, hf_values(folder, family, prompts, responses)))
            else:
                given["temperature"] = 1.0 if number % 2 else 0.7
                found.append((given, hf_logprobs(**given)))
        return found

    return of


@pytest.mark.shows("log-probs")
@over_families("log-probs")
def test_logprobs_equal_hugging_face(family: str, layout: Layout, theirs: Theirs, ranks: Ranks) -> None:
    # Megatron's experts require sequence parallelism under tensor parallelism.
    either = layout[0] > 1 and not FAMILIES[family].is_moe
    for number, (given, (expected, entropy)) in enumerate(theirs("log-probs", family)):
        for sequence_parallel in (None, False) if either else (None,):
            answers = ranks(*layout).run(jobs.logprobs, sequence_parallel=sequence_parallel, **given)
            for found, found_entropy in answers:
                assert (found - expected).abs().max() <= 1e-5, (number, sequence_parallel)
                assert (found_entropy - entropy).abs().max() <= 1e-5, (number, sequence_parallel)


@pytest.mark.shows("gradients")
@over_families("gradients")
def test_gradients_equal_hugging_face(family: str, layout: Layout, theirs: Theirs, ranks: Ranks) -> None:
    """The norm for clipping matches too. A router's bias has no gradient."""
    options: dict[str, Any] = {"nll_weight": 1.0, "budget": 34}
    if layout[0] > 1 and not FAMILIES[family].is_moe:
        options["sequence_parallel"] = layout[1] > 1
    for number, (given, expected) in enumerate(theirs("gradients", family)):
        found = ranks(*layout).run(jobs.gradients, which="actor", options=options, **given)[0]
        norm = torch.cat([x.flatten() for x in expected.values()]).norm()
        assert found["norm"] == pytest.approx(float(norm), rel=1e-4), number
        for name, gradient in expected.items():
            difference = (found["gradients"][name] - gradient).abs().max()
            assert difference <= 1e-5 * norm, (number, name, difference / norm)
        biases = {name for name in folder_tensors(given["folder"]) if name.endswith(EXPERT_BIAS)}
        assert found["gradients"].keys() - expected.keys() == biases
        assert not any(found["gradients"][name].any() for name in biases)


@pytest.mark.shows("critic")
@over_families("values")
def test_values_equal_hugging_face(family: str, layout: Layout, theirs: Theirs, ranks: Ranks) -> None:
    """A reward model with one label becomes a critic whose values are that model's scores."""
    for number, (given, expected) in enumerate(theirs("values", family)):
        for found in ranks(*layout).run(jobs.values, **given):
            assert (found - expected).abs().max() <= 1e-5, number


@pytest.mark.slow
@pytest.mark.shows("checkpoints")
@pytest.mark.parametrize(
    ("family", "which"),
    [
        (family, which)
        for family, row in ROWS.items()
        for which in ("actor", "critic")
        if row.critics or which == "actor"
    ],
)
def test_a_checkpoint_of_one_layout_is_read_at_another(
    family: str, which: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Weights, router biases and both of Adam's moments are bitwise equal."""
    kind = "token" if which == "critic" else None
    arguments: dict[str, Any] = {"folder": tiny(tmp_path / "model", family, vocab=VOCAB, classification=kind)}
    arguments |= {"which": which, "batch": make_batch()}
    for written, others in ROWS[family].checkpoints:
        arguments["checkpoint"] = tmp_path / str(written)
        arguments["checkpoint"].mkdir()
        saved = ranks(*written).run(jobs.optimizer_around_a_checkpoint, read=False, **arguments)[0]
        # All are nonzero, except what nothing trains and the moments of experts that no token chose.
        nothing = {name for name, tensor in saved.items() if not tensor.any()}
        idle = {name for name in nothing if ".mlp.experts." in name and not name.startswith("weights ")}
        assert len(idle) < len(saved) / 10
        assert all(name.endswith((EXPERT_BIAS, "score.bias")) for name in nothing - idle), nothing
        assert not any(name.startswith("weights ") and name.endswith(EXPERT_BIAS) for name in nothing)
        for layout in others:
            read = ranks(*layout).run(jobs.optimizer_around_a_checkpoint, read=True, **arguments)[0]
            assert read.keys() == saved.keys()
            different = [name for name in saved if not torch.equal(saved[name], read[name])]
            assert not different, (written, layout, different[:3])


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (2, 2, 1)], ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format)
def test_values_of_a_sequence_classifier_equal_hugging_face(
    layout: tuple[int, int, int], ranks: Ranks, tmp_path: Path
) -> None:
    """It scores the last token of its input: the state in which the last response token was chosen."""
    prompts, responses = sequences(101)
    folder = tiny(tmp_path, "qwen3", vocab=101, classification="sequence")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        scores = torch.cat(
            [model(torch.tensor([p + r[:-1]])).logits[:, 0] for p, r in zip(prompts, responses, strict=True)]
        )
    last = torch.tensor([len(r) for r in responses]).cumsum(0) - 1
    for found in ranks(*layout).run(jobs.values, folder=folder, prompts=prompts, responses=responses):
        assert (found[last] - scores).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "layout",
    [(1, 1, 1), (2, 1, 1), (1, 1, 2), pytest.param((2, 2, 1), marks=pytest.mark.slow)],
    ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format,
)
def test_a_reward_models_scores_equal_hugging_face(
    layout: tuple[int, int, int], ranks: Ranks, tmp_path: Path
) -> None:
    """Packed full responses are scored in the order of the batch, whichever replica scores them."""
    prompts, responses = sequences(101)
    prompts, responses = prompts[:4] * 2, responses[:4] + responses[:4][::-1]
    for family in ("qwen3", "llama"):
        folder = make_tiny_model(
            tmp_path / family, family, vocab=101, layers=2 * layout[1], classification="sequence"
        )
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            rows = zip(prompts, responses, strict=True)
            expected = torch.cat([model(torch.tensor([p + r])).logits[:, 0] for p, r in rows])
        assert expected.unique().numel() == 8
        arguments = {"folder": folder, "prompts": prompts, "responses": responses}
        for group_ids in (None, [0, 1, 2, 3] * 2):
            for found, packed in ranks(*layout).run(jobs.reward_scores, group_ids=group_ids, **arguments):
                assert (found - expected).abs().max() <= 1e-5
                assert max(packed) > 1, "several sequences of one pack"


def two_turns(vocab: int) -> TrainBatch:
    """Make responses of two turns with an observation between, and one of a single turn.

    The first of two turns is rewarded, too."""
    g = torch.Generator().manual_seed(8)
    sizes = [(3, 4, 5, 6), (6, 1, 2, 1), (2, 9, 0, 0), (4, 2, 7, 3)]  # prompt, turn, observation, turn
    # Hugging Face gives the padding token, 0, no gradient.
    draw = [[torch.randint(1, vocab, (n,), generator=g).tolist() for n in row] for row in sizes]
    batch = TrainBatch.build([p for p, *_ in draw], [[*a, *o, *b] for _, a, o, b in draw])
    mask = [s for p, a, o, b in sizes for s in [False] * p + [True] * a + [False] * o + [True] * b]
    batch.response_mask = torch.tensor(mask)
    batch["rewards"] = torch.tensor([1.0, -0.5, 0.75, -1.0])
    batch["correct"] = torch.tensor([True, False, True, False])
    batch["truncated"] = torch.zeros(4, dtype=torch.bool)
    batch["group_ids"] = torch.arange(4)
    batch["turn_rewards"] = torch.zeros(batch.num_tokens)
    for start, (prompt, turn, _, last) in zip(batch.cu_seqlens.tolist(), sizes, strict=False):
        batch["turn_rewards"][start + prompt + turn - 1] = 0.25 if last else 0.0
    old = -4.1 + 0.3 * torch.randn(batch.num_tokens, generator=g)
    batch["old_logprobs"] = torch.where(batch.response_mask, old, 0.0)
    batch["engine_logprobs"] = batch["old_logprobs"]
    return batch


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1)], ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format)
def test_two_turns_are_learned_from_as_hugging_face_would(
    layout: tuple[int, int, int], ranks: Ranks, tmp_path: Path
) -> None:
    """Values, advantages, returns, losses and gradients match a float64 reference.

    The reference runs the models over full sequences and the formulas over one policy token at a time."""
    vocab, gamma, lam, mu = 61, 0.97, 0.9, 0.1
    folder = make_tiny_model(tmp_path / "actor", "qwen3", vocab=vocab, layers=2, tied=True)
    critic_folder = make_tiny_model(
        tmp_path / "critic", "qwen3", vocab=vocab, layers=2, classification="token"
    )
    batch, double = two_turns(vocab), torch.float64
    actor = AutoModelForCausalLM.from_pretrained(folder, dtype=double)
    critic = AutoModelForTokenClassification.from_pretrained(critic_folder, dtype=double)
    tokens, ends = batch.tokens.tolist(), batch.cu_seqlens.tolist()
    own = [[t for t in range(a, b) if batch.response_mask[t]] for a, b in itertools.pairwise(ends)]
    count, right = sum(map(len, own)), sum(len(own[i]) for i in range(4) if batch["correct"][i])
    expected = {n: torch.zeros(batch.num_tokens, dtype=double) for n in ("values", "advantages", "returns")}
    losses = {n: torch.zeros((), dtype=double) for n in ("policy/loss", "policy/nll_loss", "value/loss")}
    for i, places in enumerate(own):
        start, sequence = ends[i], torch.tensor([tokens[ends[i] : ends[i + 1]]])
        logprobs = actor(sequence).logits[0].log_softmax(-1)
        values = critic(sequence).logits[0, :, 0]
        rewards = {t: float(batch["turn_rewards"][t]) for t in places}
        rewards[places[-1]] += float(batch["rewards"][i]) - sum(rewards.values())
        later, value_after, to_come = 0.0, 0.0, 0.0
        for t in reversed(places):
            value = values[t - start - 1]
            number = value.item()
            later = rewards[t] + gamma * value_after - number + gamma * lam * later
            value_after, to_come = number, rewards[t] + gamma * to_come
            expected["values"][t], expected["advantages"][t] = number, later
            expected["returns"][t] = to_come
            losses["value/loss"] += (value - to_come).square() / 2 / count
            logprob = logprobs[t - start - 1, tokens[t]]
            ratio = (logprob - float(batch["old_logprobs"][t])).exp()
            losses["policy/loss"] -= torch.minimum(ratio * later, ratio.clamp(0.8, 1.28) * later) / count
            if batch["correct"][i]:
                losses["policy/nll_loss"] -= logprob / right
    (losses["policy/loss"] + mu * losses["policy/nll_loss"]).backward()
    losses["value/loss"].backward()

    options: dict[str, Any] = {"gamma": gamma, "lambda_policy": lam, "lambda_critic": 1.0, "budget": 40}
    policy = {"clip_low": 0.2, "clip_high": 0.28, "nll_weight": mu}
    pool = ranks(*layout)
    filled = pool.run(jobs.advantages_of_turns, folder=critic_folder, batch=batch, options=options)[0]
    for name, column in expected.items():
        assert (filled[name] - column).abs().max() <= 1e-5, name
        assert not filled[name][~batch.response_mask].any()
    learners: list[tuple[str, Any, Path, dict[str, Any], list[str]]] = [
        ("actor", actor, folder, policy, ["policy/loss", "policy/nll_loss"]),
        ("critic", critic, critic_folder, {}, ["value/loss"]),
    ]
    for which, model, of, more, names in learners:
        for shared in (False, True):
            found = pool.run(
                jobs.gradients,
                folder=of,
                batch=filled,
                which=which,
                options={**options, **more, "share_prompts": shared},
            )[0]
            for name in names:
                assert found["sums"][name] == pytest.approx(float(losses[name]), rel=1e-5, abs=1e-7), name
            # Megarl's critic head has no bias.
            theirs = {name: p.grad for name, p in model.named_parameters() if name != "score.bias"}
            assert theirs.keys() <= found["gradients"].keys()
            norm = torch.cat([x.flatten() for x in theirs.values()]).norm()
            for name, gradient in theirs.items():
                assert (found["gradients"][name] - gradient).abs().max() <= 1e-5 * norm, (which, name)
