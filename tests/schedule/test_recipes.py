"""Every recipe on real ranks: its records, equal runs for equal seeds, equal samples at any layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from megarl.config.phases import PHASES, Phase, check_phases
from megarl.data.batch import TrainBatch, join, read_batch
from megarl.observe.runs import load_run
from megarl.schedule.phases import FUNCTIONS, enforce_columns
from megarl.schedule.run import Step
from tests.schedule.demo import make_warm_model, train
from tests.schedule.test_offload import ORDERS

UNREPEATABLE = ("time/", "inside/", "throughput/", "memory_all/")
OF_A_RANK = ("mismatch/", "transfer/", "memory/")  # depends on the layout


def make_reward_model(source: Path, folder: Path) -> Path:
    """Write a one-label sequence classifier with a random head and the body and tokenizer of `source`."""
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    model.score.weight.data.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_reward_model(warm: Path, tmp_path: Path) -> None:
    """Its scores equal transformers' and are part of every trained response's reward, on each replica.

    With a critic it also scores the rollouts of value pretraining.
    """
    scorer = make_reward_model(warm / "sft" / "hf", tmp_path / "scorer")
    options = [f"reward.model.path={scorer}", "reward.model.weight=0.5", "residency.offload=true"]
    dapo = ["parallel.tp=1", "parallel.dp=2", "checkpoint.rollouts=true", "log.samples=8"]
    records = train(warm, "dapo", tmp_path / "dapo", *options, *dapo)
    [first, _] = [record for record in records if record["stage"] == "train"]
    files = sorted((tmp_path / "dapo/rollouts/step-000001").glob("*.safetensors"))
    batch = join([read_batch(file) for file in files])
    assert sorted(batch["row"].tolist()) == list(range(batch.num_sequences)) and len(files) == 2
    model = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float32)
    ends = batch.cu_seqlens.tolist()
    with torch.no_grad():
        rows = [batch.tokens[a:b][None] for a, b in pairwise(ends)]
        scores = torch.cat([model(row).logits[:, 0] for row in rows])
    assert scores.std() > 1e-3
    assert first["reward/model_mean"] == pytest.approx(float(scores.mean()), abs=1e-4)
    assert first["reward/model_std"] == pytest.approx(float(scores.std(correction=0)), abs=1e-4)
    samples = [sample for sample in load_run(tmp_path / "dapo").samples if sample.step == 1]
    rewards = (batch["rewards"] + 0.5 * scores).tolist()
    assert samples
    for sample in samples:
        assert sample.reward is not None and min(abs(sample.reward - reward) for reward in rewards) < 1e-4
        assert sample.reward not in (1.0, -1.0)

    # First it is one of the rewards that GDPO normalises, then it is only measured.
    for weight, punished in ((0.5, "false"), (0.0, "true")):
        more = [f"reward.model.weight={weight}", f"reward.overlong.soft_punishment={punished}", "steps=1"]
        records = train(warm, "gdpo", tmp_path / f"gdpo-{weight}", *options, *more)
        [record] = [record for record in records if record["stage"] == "train"]
        assert record["reward/model_std"] > 0 and record["policy/grad_norm"] > 0

    records = train(warm, "vapo", tmp_path / "vapo", *options, "value_pretraining.steps=1")
    assert [r["stage"] for r in records].count("value_pretraining") == 1
    for record in records:
        if record["stage"] != "eval":
            assert math.isfinite(record["reward/model_mean"]) and record["time/reward_model"] > 0


def make_teacher(warm: Path, folder: Path, layers: int) -> Any:
    """Write a random model of another size than the policy to `folder`, and return it."""
    torch.manual_seed(layers)
    sizes = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    config = AutoConfig.from_pretrained(warm / "sft" / "hf", **sizes, intermediate_size=96)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(warm / "sft" / "hf").save_pretrained(folder)
    return model


def first_batch(run_dir: Path) -> TrainBatch:
    files = sorted((run_dir / "rollouts/step-000001").glob("*.safetensors"))
    return join([read_batch(file) for file in files])


@pytest.mark.slow
def test_a_teacher(warm: Path, tmp_path: Path) -> None:
    """The log-probs of a teacher of another size equal transformers' on every layout."""
    model = make_teacher(warm, tmp_path / "teacher", 3)
    common = [f"teacher.path={tmp_path / 'teacher'}", "checkpoint.rollouts=true", "residency.offload=true"]
    for name, layout in {"dp": ["parallel.tp=1", "parallel.dp=2"], "tp": ["parallel.tp=2"]}.items():
        records = train(warm, "dapo", tmp_path / name, *common, *layout)
        [first, _] = [record for record in records if record["stage"] == "train"]
        batch = first_batch(tmp_path / name)
        ends, mask, graded = batch.cu_seqlens.tolist(), batch.response_mask, torch.zeros(batch.num_tokens)
        with torch.no_grad():
            for a, b in pairwise(ends):
                logprobs = model(batch.tokens[a:b][None]).logits[0, :-1].log_softmax(-1)
                graded[a + 1 : b] = logprobs.gather(1, batch.tokens[a + 1 : b, None])[:, 0]
        kl = float((batch["engine_logprobs"] - graded)[mask].double().mean())
        assert kl > 1 and first["policy/teacher_kl"] == pytest.approx(kl, abs=1e-3)


@pytest.mark.slow
def test_teachers_by_source(warm: Path, tmp_path: Path) -> None:
    """Two teachers of different sizes alternate on the device, and every third prompt has none.

    Checked against transformers: the log-ratio of the sampled tokens, and the KL over the most likely tokens
    and the rest, for the policy before its update.
    """
    models = [make_teacher(warm, tmp_path / name, layers) for name, layers in (("a", 2), ("b", 4))]
    policy = AutoModelForCausalLM.from_pretrained(warm / "sft" / "hf", dtype=torch.float32)
    rows = [json.loads(line) for line in (warm / "train.jsonl").read_text().splitlines()]
    rows = [row | {"data_source": ("of/a", "b", "none")[number % 3]} for number, row in enumerate(rows)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = f"teacher.by_source={{of/a: {tmp_path / 'a'}, b: {tmp_path / 'b'}}}"
    common = [sources, "checkpoint.rollouts=true", f"data.train=[{tmp_path / 'train.jsonl'}]"]
    common += ["residency.offload=true", "update.mini_batch=32", "steps=1"]

    def judged_by(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens[None]).logits[0, :-1].log_softmax(-1)

    def means(batch: TrainBatch, number: Callable[..., list[torch.Tensor]]) -> list[float]:
        """Return the fraction of response tokens with a teacher, and means over those tokens."""
        found, ends = [], batch.cu_seqlens.tolist()
        for (a, b), teacher in zip(pairwise(ends), batch["teachers"].tolist(), strict=True):
            if teacher >= 0:
                tables = judged_by(models[teacher], batch.tokens[a:b]), judged_by(policy, batch.tokens[a:b])
                found.append(
                    torch.stack(number(*tables, batch.tokens[a + 1 : b]))[:, batch.response_mask[a + 1 : b]]
                )
        assert set(batch["teachers"].tolist()) == {-1, 0, 1}
        every = torch.cat(found, 1)
        return [every.shape[1] / int(batch.response_mask.sum()), *every.double().mean(1).tolist()]

    def of_sampled(theirs: torch.Tensor, own: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        return [(own - theirs).gather(1, tokens[:, None])[:, 0]]

    def of_likeliest(theirs: torch.Tensor, own: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
        logprobs, tokens = theirs.topk(5, -1)
        of_own, mass = own.gather(1, tokens), logprobs.exp().sum(-1)
        rest = (1 - mass) * ((1 - mass) / (1 - of_own.exp().sum(-1))).log()
        return [(logprobs.exp() * (logprobs - of_own)).sum(-1) + rest, mass]

    layouts = (
        ["parallel.tp=1", "parallel.dp=2", "update.share_prompts=true"],
        ["parallel.tp=1", "parallel.pp=2", "teacher.top_k=5"],
    )
    for name, options in zip(("dp", "top_k"), layouts, strict=True):
        records = train(warm, "dapo", tmp_path / name, *common, *options)
        [first] = [record for record in records if record["stage"] == "train"]
        if name == "dp":
            taught, kl = means(first_batch(tmp_path / name), of_sampled)
            assert first["policy/teacher_kl"] == pytest.approx(kl, abs=1e-3) and kl > 1
        else:
            taught, kl, mass = means(first_batch(tmp_path / name), of_likeliest)
            assert first["policy/teacher_loss"] == pytest.approx(kl * taught, rel=1e-3) and kl > 0.1
            assert first["policy/teacher_mass"] == pytest.approx(mass, rel=1e-4) and 0.1 < mass < 0.9
        assert first["policy/taught"] == pytest.approx(taught) and 0.2 < taught < 0.9


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_warm_model(tmp_path_factory.mktemp("demo"))


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_column_is_written_before_it_is_read(order: tuple[Phase, ...]) -> None:
    check_phases(order)
    written: set[str] = set()
    for first in range(len(order)):
        if order[first].writes - written:  # the reward model only adds to an existing column
            written |= order[first].writes
            with pytest.raises(ValueError, match="which no earlier phase writes"):
                check_phases(order[:first] + order[first + 1 :])


def test_every_declared_phase_has_its_function() -> None:
    assert {phase.name for phase in PHASES} == set(FUNCTIONS)


def test_a_phase_is_held_to_its_declaration() -> None:
    """Undeclared reads and writes are refused, and declared columns that are not written."""
    phase = Phase("values", reads=frozenset({"tokens", "rewards"}), writes=frozenset({"values"}))
    step = Step("train", 1)
    step.batch = TrainBatch.build([[1], [2]], [[3], [4]])
    step.batch["rewards"], step.batch["correct"] = torch.ones(2), torch.ones(2, dtype=torch.bool)

    def run(work: Callable[[], object]) -> None:
        with enforce_columns(phase, step):
            work()

    def add(name: str) -> None:
        step.batch[name] = step.batch["rewards"] * 2

    def add_to_a_new_batch() -> None:
        add("values")
        step.batch = step.batch.select([1, 0])
        step.batch["returns"] = step.batch["values"]

    run(lambda: add("values"))
    assert type(step.batch.columns) is dict and step.batch["values"].tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="phase values reads column correct, which it does not declare"):
        run(lambda: step.batch["correct"])
    assert type(step.batch.columns) is dict
    for work in (lambda: add("returns"), add_to_a_new_batch):
        with pytest.raises(
            ValueError, match=r"phase values writes (column )?returns, which it does not declare"
        ):
            run(work)
    step.batch = TrainBatch.build([[1], [2]], [[3], [4]])
    with pytest.raises(ValueError, match="phase values has not written values, which it declares"):
        run(lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("grpo", ["algorithm.kl_weight=0.01"], ["policy/kl_loss"]),
        (
            "dapo",
            [
                "reward.overlong.filter=true",
                "rollout.dynamic_sampling.oversample=2",
                "parallel.tp=1",
                "parallel.pp=2",
                "algorithm.mismatch.weight=token",
                "algorithm.mismatch.mask=sequence",
            ],
            ["rollout/groups_kept", "mismatch/kl", "mismatch/truncated", "mismatch/masked"],
        ),
        (
            "ppo",
            ["rollout.group_size=1", "rollout.prompts=32", "parallel.tp=1", "value_pretraining.steps=0"],
            ["value/loss"],
        ),
        (
            "vapo",
            ["value_pretraining.steps=2", "algorithm.kl_weight=0.01", "update.share_prompts=true"],
            ["policy/nll_loss", "gae/lambda_mean", "value/explained_variance"],
        ),
        (
            "tppo",
            [
                "value_pretraining.steps=2",
                "update.share_prompts=true",
                "parallel.tp=1",
                "parallel.dp=2",
                "checkpoint.rollouts=true",
            ],
            ["policy/nll_loss", "gae/lambda_mean", "value/explained_variance", "rollout/continued"],
        ),
        (
            "sao",
            [
                "rollout.group_size=1",
                "rollout.prompts=32",
                "value_pretraining.steps=2",
                "critic.epochs=2",
                "algorithm.nll_weight=0",
            ],
            ["policy/clip_fraction_low", "policy/clip_fraction_high", "value/explained_variance"],
        ),
        (
            "reinforce_pp",
            ["parallel.tp=1", "parallel.dp=2", "algorithm.kl_reward=0.01", "algorithm.entropy_weight=0.01"],
            ["policy/kl_reward", "policy/entropy_loss"],
        ),
        (
            "rloo",
            [
                "algorithm.kl_reward=0.01",
                "algorithm.kl_weight=0.01",
                "algorithm.kl_estimator=k2",
                "algorithm.dual_clip=3",
                "algorithm.mismatch.weight=token",
                "algorithm.entropy_weight=0.01",
            ],
            ["policy/kl_reward", "policy/kl_loss", "policy/clip_fraction_dual", "mismatch/truncated"],
        ),
        (
            "clip_cov",
            ["parallel.tp=1", "parallel.dp=2", "parallel.overlap_param_gather=true"],
            ["policy/selected", "policy/clip_fraction_high"],
        ),
        (
            "kl_cov",
            [
                "parallel.tp=1",
                "parallel.pp=2",
                "algorithm.covariance.share=0.05",
                "update.share_prompts=true",
            ],
            ["policy/selected"],
        ),
        ("dppo", [], ["policy/clip_fraction_low", "policy/clip_fraction_high"]),
        (
            "dppo",
            [
                *("parallel.tp=1", "parallel.pp=2", "algorithm.old_logprobs=trainer"),
                *("algorithm.dppo.top_k=5", "algorithm.clip_low=0.001", "algorithm.clip_high=0.001"),
            ],
            ["policy/clip_fraction_low", "policy/clip_fraction_high"],
        ),
        (
            "asyppo",
            ["parallel.tp=1", "parallel.dp=2", "critic.mini_batch=16", "algorithm.lambda_policy=0.95"],
            ["value/loss", "value/spread", "policy/agreed", "policy/disputed", "policy/entropy_loss"],
        ),
        ("fipo", ["parallel.tp=1"], ["policy/future_factor", "policy/clip_fraction_dual"]),
        (
            "gdpo",
            [
                "parallel.tp=1",
                "parallel.dp=2",
                "reward.terms.form.function=megarl.rewards.shaping:boxed_or_answer_line",
                "reward.terms.form.weight=0.5",
            ],
            ["reward/term_form", "reward/overlong_penalty"],
        ),
        (
            "sppo",
            [
                "parallel.tp=1",
                "parallel.dp=2",
                "rollout.prompts=32",
                "rollout.group_size=1",
                "value_pretraining.steps=2",
                "critic.mini_batch=8",
                "algorithm.nll_weight=0",
            ],
            ["value/loss", "value/explained_variance"],
        ),
        (
            "spo",
            [
                "parallel.tp=1",
                "parallel.dp=2",
                "rollout.prompts=32",
                "rollout.group_size=1",
                "reward.overlong.filter=true",
            ],
            ["value/explained_variance", "tracker/known"],
        ),
        (
            "gspo",
            ["parallel.tp=1", "parallel.pp=2", "update.share_prompts=true"],
            ["policy/approx_kl"],
        ),
    ],
)
def test_recipe(recipe: str, overrides: list[str], expected: list[str], warm: Path, tmp_path: Path) -> None:
    records = train(warm, recipe, tmp_path / "run", *overrides)
    stages = [record["stage"] for record in records]
    assert stages.count("train") == 2
    assert stages.count("eval") == 2
    pretrains = recipe in ("vapo", "tppo", "sao", "sppo")
    assert stages.count("value_pretraining") == (2 if pretrains else 0)
    last = [record for record in records if record["stage"] == "train"][-1]
    for name in (
        "policy/loss",
        "policy/entropy",
        "policy/grad_norm",
        "policy/lr",
        "reward/accuracy",
        "response/length_mean",
        *expected,
    ):
        assert math.isfinite(last[name]), name
    shares = "update.share_prompts=true" in overrides
    assert (0 < last.get("train/shared_tokens", 0.0) < 1) == shares
    if "algorithm.dppo.top_k=5" in overrides:
        assert last["time/old_top_k"] > 0 and last["policy/clip_fraction_high"] > 0
    if recipe in ("sao", "dppo") and "algorithm.old_logprobs=trainer" not in overrides:
        assert "time/old_logprobs" not in last and abs(last["policy/approx_kl"]) < 0.1
    else:
        assert last["mismatch/logprob_abs_max"] <= 1e-4
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "critic_pretrained").is_dir() == pretrains
    if recipe == "tppo":  # log-probs, values and the actor's update use all; the critic finished responses
        files = (tmp_path / "run/rollouts/step-000002").glob("*.safetensors")
        batch = join([read_batch(file) for file in files])
        ended = batch.lengths[~batch["unfinished"]].sum()
        assert last["train/tokens"] == 3 * batch.num_tokens + ended < 4 * batch.num_tokens


@pytest.mark.slow
def test_two_critics_smaller_than_the_actor(warm: Path, tmp_path: Path) -> None:
    """The critics have one layer, half the actor's width and its tokenizer.

    One run offloads them and the other keeps them on the device; numbers and critics are equal.
    """
    actor = AutoConfig.from_pretrained(warm / "sft" / "hf")
    small = {"num_hidden_layers": 1, "hidden_size": actor.hidden_size // 2, "num_labels": 1}
    keys = {**actor.to_dict(), **small, "layer_types": ["full_attention"], "pad_token_id": 0}
    torch.manual_seed(2)
    critic = AutoModelForSequenceClassification.from_config(type(actor)(**keys), dtype=torch.float32)
    critic.save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(warm / "sft" / "hf").save_pretrained(tmp_path / "small")
    options = [f"critic.path={tmp_path}/small", "value_pretraining.steps=1", "algorithm.lambda_policy=0.95"]
    runs = []
    for name, offload in (("turns", "true"), ("stay", "false")):
        own = ["parallel.tp=1", "parallel.dp=2", f"residency.offload={offload}"]
        runs.append(
            [r for r in train(warm, "asyppo", tmp_path / name, *options, *own) if r["stage"] == "train"]
        )
        weights = [
            AutoModelForSequenceClassification.from_pretrained(tmp_path / name / f"critic{n}_pretrained")
            for n in ("", "_2")
        ]
        for model in weights:
            shape = model.config.num_hidden_layers, model.config.hidden_size
            assert shape == (1, actor.hidden_size // 2)
        first, second = (model.score.weight for model in weights)
        assert not torch.equal(first, second)
    for one, other in zip(*runs, strict=True):
        assert one["value/spread"] > 0
        assert {k: one[k] for k in one if k.startswith(("value/", "policy/"))} == {
            k: other[k] for k in other if k.startswith(("value/", "policy/"))
        }


@pytest.mark.slow
def test_a_seed_gives_the_same_run_and_the_layout_the_same_responses(warm: Path, tmp_path: Path) -> None:
    def numbers(name: str, *overrides: str, forked: bool = True) -> list[dict]:
        records = train(warm, "dapo", tmp_path / name, *overrides, forked=forked)
        return [{k: v for k, v in record.items() if not k.startswith(UNREPEATABLE)} for record in records]

    first, again = numbers("first"), numbers("again", forked=False)  # with another hash seed
    assert first == again
    assert (tmp_path / "first/hf/model.safetensors").read_bytes() == (
        tmp_path / "again/hf/model.safetensors"
    ).read_bytes()
    for name in ("samples.jsonl", "distributions.jsonl"):
        assert (tmp_path / "first" / name).read_text() == (tmp_path / "again" / name).read_text()
    other = numbers("other", "parallel.tp=1", "parallel.dp=2")
    sampled = [
        [next(r for r in run if r["stage"] == "train"), next(r for r in run if r["stage"] == "eval")]
        for run in (first, other)
    ]
    for mine, theirs in zip(*sampled, strict=True):
        for name in mine:
            if name.startswith(("reward/", "response/", "rollout/", "eval/")):
                assert mine[name] == theirs[name], name
            elif isinstance(mine[name], float) and not name.startswith(OF_A_RANK):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    # A group's advantages do not depend on the layout or on the replica that stores a response.
    shown = [[s for s in load_run(tmp_path / name).samples if s.step == 1] for name in ("first", "other")]
    assert shown[0] == shown[1] and all(
        s.tokens and s.advantages and len(s.tokens) == len(s.advantages) for s in shown[1]
    )
    tokens = [
        sum(load_run(tmp_path / name).distributions[0]["mismatch"]["tokens"]) for name in ("first", "other")
    ]
    assert tokens[0] == tokens[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["parallel.dp=2", "parallel.pp=2", "parallel.rollout_ranks=1"])
def test_sampling_replay(warm: Path, tmp_path: Path, layout: str) -> None:
    """Engine and trainer agree within each token's sampling set, with a reference model for the KL.

    With the optimal token baseline, whose probabilities are those of the sets. Checked against transformers.
    """
    options = ["rollout.top_k=4", "rollout.top_p=0.9", "rollout.sampling_replay=true", "steps=1"]
    options += ["algorithm.advantage=otb", "algorithm.kl_weight=0.01", "checkpoint.rollouts=true"]
    records = train(warm, "dapo", tmp_path / "run", *options, "parallel.tp=1", layout)
    [record] = [record for record in records if record["stage"] == "train"]
    assert record["mismatch/logprob_abs_max"] < 1e-4 and record["policy/grad_norm"] > 0
    model = AutoModelForCausalLM.from_pretrained(warm / "sft" / "hf", dtype=torch.float32)
    batch = first_batch(tmp_path / "run")
    sets, largest = batch["sampling_sets"], 0.0
    assert sets.shape[1] <= 4
    with torch.no_grad():
        for a, b in pairwise(batch.cu_seqlens.tolist()):
            logits = model(batch.tokens[a:b][None]).logits[0, :-1].double()
            for t in range(a + 1, b):
                if batch.response_mask[t]:
                    members = sets[t][sets[t] >= 0].long()
                    row = logits[t - a - 1]
                    exact = row[batch.tokens[t]] - row[members].logsumexp(0)
                    largest = max(largest, abs(float(exact - batch["engine_logprobs"][t])))
    assert largest < 1e-4
