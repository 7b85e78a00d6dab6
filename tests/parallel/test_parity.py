"""Megatron against Hugging Face on the same weights, for every family and layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from megarl.data.experience import Experience
from tests.parallel import jobs
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)]
FAST = ((1, 1, 1), (2, 2, 1))
FAMILIES = [
    ("qwen2", {}),
    ("qwen2", {"tied": True}),
    ("qwen3", {"head_dim": 12}),
    ("qwen3", {"tied": True}),
    ("llama", {"rope": "llama3"}),
    ("mistral", {"head_dim": 12}),
    ("glm4", {"head_dim": 12}),
    ("glm4", {"tied": True, "attention_bias": False, "partial_rotary_factor": 0.25, "head_dim": 16}),
]


def sequences(vocab: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses of very different lengths, a response of one token among them."""
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


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[] if layout in FAST else pytest.mark.slow) for layout in LAYOUTS],
    ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format,
)
def test_logprobs_equal_hugging_face(
    layout: tuple[int, int, int], ranks: Callable[[int, int, int], RankPool], tmp_path: Path
) -> None:
    tp, pp, dp = layout
    for number, (family, options) in enumerate(FAMILIES):
        # A vocabulary that tp does not divide, and more layers than stages.
        folder = make_tiny_model(tmp_path / str(number), family, vocab=307, layers=2 * pp, **options)
        prompts, responses = sequences(307)
        temperature = 1.0 if number % 2 else 0.7
        expected, entropy = hf_logprobs(folder, prompts, responses, temperature)
        for sequence_parallel in (None, False) if tp > 1 else (None,):
            arguments = {
                "folder": folder,
                "prompts": prompts,
                "responses": responses,
                "temperature": temperature,
            }
            for found, found_entropy in ranks(tp, pp, dp).run(
                jobs.logprobs, sequence_parallel=sequence_parallel, **arguments
            ):
                assert (found - expected).abs().max() <= 1e-5, (family, options, sequence_parallel)
                assert (found_entropy - entropy).abs().max() <= 1e-5


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (2, 2, 1)], ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format)
def test_values_equal_hugging_face(
    layout: tuple[int, int, int], ranks: Callable[[int, int, int], RankPool], tmp_path: Path
) -> None:
    """A reward model with one label becomes a critic whose values are that model's scores."""
    tp, pp, dp = layout
    prompts, responses = sequences(101)
    for family, tied in (("qwen2", True), ("glm4", False)):
        folder = make_tiny_model(
            tmp_path / family, family, vocab=101, layers=2 * pp, tied=tied, classification="token"
        )
        model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
        expected = []
        for prompt, response in zip(prompts, responses, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits
                expected.append(logits[0, len(prompt) - 1 : -1, 0])
        for found in ranks(tp, pp, dp).run(jobs.values, folder=folder, prompts=prompts, responses=responses):
            assert (found - torch.cat(expected)).abs().max() <= 1e-5, family

    # A sequence classifier scores the last token of what it is given: the state in which the last response
    # token was chosen.
    folder = make_tiny_model(
        tmp_path / "sequence", "qwen3", vocab=101, layers=2 * pp, classification="sequence"
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        scores = torch.cat(
            [model(torch.tensor([p + r[:-1]])).logits[:, 0] for p, r in zip(prompts, responses, strict=True)]
        )
    last = torch.tensor([len(r) for r in responses]).cumsum(0) - 1
    for found in ranks(tp, pp, dp).run(jobs.values, folder=folder, prompts=prompts, responses=responses):
        assert (found[last] - scores).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "layout",
    [(1, 1, 1), (2, 1, 1), (1, 1, 2), pytest.param((2, 2, 1), marks=pytest.mark.slow)],
    ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format,
)
def test_a_reward_models_scores_equal_hugging_face(
    layout: tuple[int, int, int], ranks: Callable[[int, int, int], RankPool], tmp_path: Path
) -> None:
    """Of whole responses, packed, in the order of the batch whichever replica has scored them."""
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


def two_turns(vocab: int) -> Experience:
    """Responses of two turns with an observation between, one of them of one turn; the first turn is
    rewarded, too."""
    g = torch.Generator().manual_seed(8)
    sizes = [(3, 4, 5, 6), (6, 1, 2, 1), (2, 9, 0, 0), (4, 2, 7, 3)]  # prompt, turn, observation, turn
    # Hugging Face gives the padding token, 0, no gradient.
    draw = [[torch.randint(1, vocab, (n,), generator=g).tolist() for n in row] for row in sizes]
    batch = Experience.build([p for p, *_ in draw], [[*a, *o, *b] for _, a, o, b in draw])
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
    layout: tuple[int, int, int], ranks: Callable[[int, int, int], RankPool], tmp_path: Path
) -> None:
    """Values, advantages, returns, losses and gradients: the models in float64 over whole sequences, the
    formulas over the policy's tokens, one by one."""
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
            # The critic's head has no bias with us.
            theirs = {name: p.grad for name, p in model.named_parameters() if name != "score.bias"}
            assert theirs.keys() <= found["gradients"].keys()
            norm = torch.cat([x.flatten() for x in theirs.values()]).norm()
            for name, gradient in theirs.items():
                assert (found["gradients"][name] - gradient).abs().max() <= 1e-5 * norm, (which, name)
