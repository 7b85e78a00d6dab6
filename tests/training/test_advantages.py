"""A step's advantages, computed from columns on one and two replicas, against float64 loops."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Config, RewardConfig, RewardTerm
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.parallel.runtime import Runtime
from tests.parallel.jobs import make_config
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

BETA, GAMMA = 0.3, 0.9
ACTORS: dict[Path, Any] = {}  # actors of this rank by the model's folder
WEIGHTS = [0.5, -2.0]  # of the two parts of the reward
# Case -> algorithm.*
CASES: dict[str, dict[str, Any]] = {
    "DAPO": {"advantage": "group"},
    "Dr. GRPO": {"advantage": "group_mean"},
    "RLOO with KL": {"advantage": "leave_one_out", "kl_reward": BETA},
    "GDPO": {"advantage": "per_reward"},
    "SPO": {"advantage": "tracked", "tracker_rho": 0.9},
    "REINFORCE++": {"advantage": "return", "kl_reward": BETA, "whiten": True, "gamma": GAMMA},
    "REINFORCE++ with baseline": {"advantage": "group_mean", "whiten": True},
    "PPO with KL": {"advantage": "gae", "kl_reward": BETA, "lambda_policy": 0.8, "lambda_critic": 1.0},
    "DAPO with a teacher": {"advantage": "group", "teacher": 0.7},
    "PPO with KL and a teacher": {
        "advantage": "gae",
        "kl_reward": BETA,
        "lambda_policy": 0.8,
        "lambda_critic": 1.0,
        "teacher": 0.7,
    },
    "SAO with a teacher": {"advantage": "return", "old_logprobs": "engine", "teacher": 0.7, "whiten": True},
    "SPPO": {"advantage": "prompt_value"},
    "OTB": {"advantage": "otb"},
    "OTB with KL": {"advantage": "otb", "kl_reward": BETA},
    "SAO with KL": {"advantage": "return", "kl_reward": BETA, "old_logprobs": "engine"},
    # Overlong filtering excludes truncated responses from the loss and from the statistics of advantages.
    "GDPO, filtered": {"advantage": "per_reward", "overlong": True},
    "SPO, filtered": {"advantage": "tracked", "tracker_rho": 0.9, "overlong": True},
    "REINFORCE++ with baseline, filtered": {"advantage": "group_mean", "whiten": True, "overlong": True},
    "PPO, filtered": {"advantage": "gae", "lambda_policy": 0.8, "whiten": True, "overlong": True},
}


def make_batch(turns: bool = False, truncated: bool = False) -> TrainBatch:
    """Return three interleaved groups of 4 responses with different lengths.

    Args:
        turns: give most responses several turns, with rewards per turn.
        truncated: mark every fifth response as truncated.
    """
    g = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 14, (12,), generator=g).tolist()
    batch = TrainBatch.build([[3, 4]] * 12, [[5] * n for n in lengths])
    batch["group_ids"] = torch.arange(12) % 3
    batch["rewards"] = torch.randn(12, generator=g)
    batch["prompt_uids"] = 10**18 + batch["group_ids"]
    batch["reward_parts"] = torch.randn(12, 2, generator=g)
    batch["correct"], batch["number"] = batch["rewards"] > 0, torch.arange(12)
    batch["truncated"] = (batch["number"] % 5 == 0) & truncated
    if turns:
        sampled = torch.rand(batch.num_tokens, generator=g) < 0.6
        sampled[batch.cu_seqlens[1:] - 1] = True
        batch.response_mask &= sampled
        ends = batch.response_mask & ~batch.response_mask.roll(-1)
        batch["turn_rewards"] = torch.where(ends, torch.randn(batch.num_tokens, generator=g), 0.0)
    for name in ("old_logprobs", "ref_logprobs", "engine_logprobs", "values", "teacher"):
        column = torch.randn(batch.num_tokens, generator=g)
        batch[name] = torch.where(batch.response_mask, column, 0.0)
    # A sum of squared probabilities is at least that of the sampled token's.
    squares = batch["old_logprobs"].exp().square() + torch.rand(batch.num_tokens, generator=g)
    batch["squared_probs"] = torch.where(batch.response_mask, squares, 0.0)
    untaught = batch.spread((batch["number"] % 4 == 3).float()) > 0  # these responses have no teacher
    batch["teacher"] = batch["teacher"].masked_fill(untaught, -torch.inf)
    return batch


def get_actor(config: Config, folder: Path, runtime: Runtime) -> Any:
    """Return this rank's actor, built once: only its sizes are read, equal in every case."""
    from megarl.model.builder import build_actor
    from megarl.model.hf_config import read_hf_config

    if folder not in ACTORS:
        ACTORS[folder] = build_actor(config, read_hf_config(folder), runtime)
    return ACTORS[folder]


def advantages_of(runtime: Runtime, folder: Path, algorithm: dict[str, Any], turns: bool) -> Any:
    """Return advantages (and returns) by response number for this rank's share, and the metrics."""
    from megarl.config.phases import select_phases
    from megarl.training import columns
    from megarl.training.batch import make_train_batch
    from megarl.training.methods.otb import add_optimal_token_advantages
    from megarl.training.methods.spo import add_tracked_advantages, make_tracker
    from megarl.training.methods.sppo import add_prompt_advantages

    weight = algorithm.get("teacher", 0.0)
    algorithm = {key: value for key, value in algorithm.items() if key != "teacher"}
    config = make_config(folder, mini_batch=6, **algorithm)
    model = get_actor(config, folder, runtime)
    batch = make_batch(turns, algorithm.get("overlong", False))
    rollout = RolloutBatch.from_train_batch(batch)
    experience = make_train_batch(rollout, config, 6, 1, [model], runtime)
    if config.has_prompt_critic:
        metrics = add_prompt_advantages(config, experience, runtime)
    elif config.has_critic:
        metrics, _ = columns.add_gae(config, experience, runtime)
    elif config.algorithm.advantage == "per_reward":
        term = RewardTerm(function="module:function", weight=WEIGHTS[1])
        reward = RewardConfig(weight=WEIGHTS[0], terms={"form": term}, overlong=config.reward.overlong)
        config = config.model_copy(update={"reward": reward})
        metrics = columns.add_group_advantages(config, rollout, experience, runtime)
    elif config.algorithm.advantage == "tracked":
        tracker = make_tracker(config.algorithm)
        arguments = config, rollout, experience, runtime, tracker
        assert add_tracked_advantages(*arguments)["tracker/known"] == 0
        metrics = add_tracked_advantages(*arguments)  # the next step, with the same responses
        assert metrics["tracker/known"] == 1
    elif config.algorithm.advantage == "otb":
        metrics = add_optimal_token_advantages(config, rollout, experience, runtime)
    elif config.algorithm.advantage == "return":
        metrics = columns.add_return_advantages(config.algorithm, experience, runtime)
    else:
        metrics = columns.add_group_advantages(config, rollout, experience, runtime)
    if weight:
        old, teacher = experience[config.algorithm.old_column], experience["teacher"]
        metrics |= columns.add_teacher(weight, old, teacher, experience, runtime)
    names = [name for name in ("advantages", "returns") if name in experience]
    assert select_phases(config)[-1].name == "weight_transfer"
    spans = zip(experience["number"].tolist(), experience.cu_seqlens.tolist(), strict=False)
    ends = experience.cu_seqlens[1:].tolist()
    mask = experience.response_mask
    assert all(not experience[name][~mask].any() for name in names)
    found = {
        number: {name: experience[name][start:end][mask[start:end]].tolist() for name in names}
        for (number, start), end in zip(spans, ends, strict=True)
    }
    return found, metrics


def normalise(values: list[float], kept: list[bool]) -> list[float]:
    """Subtract the mean of the kept values and divide by their standard deviation; others become 0."""
    own = [x for x, keep in zip(values, kept, strict=True) if keep]
    mean, deviation = statistics.fmean(own), statistics.stdev(own)
    return [(x - mean) / deviation if keep else 0.0 for x, keep in zip(values, kept, strict=True)]


def one_by_one(
    parts: list[list[float]], weights: list[float], groups: list[int], kept: list[bool]
) -> list[float]:
    """GDPO: normalise each part of the rewards within the group, then their sum within the batch."""
    sums = []
    for own, group in zip(parts, groups, strict=True):
        total = 0.0
        for k, weight in enumerate(weights):
            others = [theirs[k] for theirs, g in zip(parts, groups, strict=True) if g == group]
            total += weight * (own[k] - statistics.fmean(others)) / (statistics.stdev(others) + 1e-6)
        sums.append(total)
    return normalise(sums, kept)


def second_visit(
    scores: list[float], correct: list[bool], groups: list[int], rho: float, kept: list[bool]
) -> list[float]:
    """SPO: subtract the expected reward from each reward, then normalise within the batch.

    A correct response has reward 1, a wrong one -1, plus other rewards. The expectation is that of the
    group's Beta distribution after one update with these responses.
    """
    less = []
    for score, group in zip(scores, groups, strict=True):
        answers = [right for right, g in zip(correct, groups, strict=True) if g == group]
        a, b = 0.5 * rho + sum(answers), 0.5 * rho + len(answers) - sum(answers)
        less.append(score - (a - b) / (a + b))
    return normalise(less, kept)


def loop(algorithm: dict[str, Any], turns: bool) -> dict[int, dict[str, list[float]]]:
    """Compute the same from the formulas, for each response and each sampled token."""
    batch = make_batch(turns)
    kept = [not (algorithm.get("overlong") and i % 5 == 0) for i in range(12)]
    old = batch["engine_logprobs" if "old_logprobs" in algorithm else "old_logprobs"].tolist()
    ref, values = batch["ref_logprobs"].tolist(), batch["values"].tolist()
    scores, groups = batch["rewards"].tolist(), batch["group_ids"].tolist()
    ends = batch.cu_seqlens.tolist()
    mask, zeros = batch.response_mask.tolist(), torch.zeros(batch.num_tokens)
    of_turns = (batch["turn_rewards"] if turns else zeros).tolist()
    spans = [[t for t in range(start, end) if mask[t]] for start, end in itertools.pairwise(ends)]
    beta, gamma = algorithm.get("kl_reward", 0.0), algorithm.get("gamma", 1.0)
    rewards = [
        [
            -beta * (old[t] - ref[t])
            + of_turns[t]
            + (scores[i] - math.fsum(of_turns[t] for t in span)) * (t == span[-1])
            for t in span
        ]
        for i, span in enumerate(spans)
    ]
    squares = batch["squared_probs"].tolist()
    totals = [math.fsum(tokens) for tokens in rewards]
    of_parts = one_by_one(
        [
            [*parts, math.fsum(of_turns[t] for t in span)]
            for parts, span in zip(batch["reward_parts"].tolist(), spans, strict=True)
        ],
        [*WEIGHTS, 1.0] if turns else WEIGHTS,
        groups,
        kept,
    )
    rho = algorithm.get("tracker_rho", 1.0)
    of_tracker = second_visit(scores, batch["correct"].tolist(), groups, rho, kept)
    found: dict[int, dict[str, list[float]]] = {}
    for i, span in enumerate(spans):
        group = [totals[j] for j in range(12) if groups[j] == groups[i]]
        mean, n = statistics.fmean(group), len(span)
        kind = algorithm["advantage"]
        if kind == "prompt_value":  # a correct response is worth 1, a wrong one -1
            chance = 1 / (1 + math.exp(-values[span[0]]))
            found[i] = {
                "advantages": [scores[i] - (2 * chance - 1)] * n,
                "returns": [float(batch["correct"][i])] + [0.0] * (n - 1),
            }
        elif kind == "otb":
            found[i] = {"advantages": []}
            for k in range(n):
                alike = [j for j in range(12) if groups[j] == groups[i] and len(spans[j]) > k]
                energies = [
                    math.fsum(1 - 2 * math.exp(old[t]) + squares[t] for t in spans[j][: k + 1]) for j in alike
                ]
                ahead_of = [math.fsum(rewards[j][k:]) for j in alike]
                top = math.fsum(g * w for g, w in zip(ahead_of, energies, strict=True))
                baseline = top / (math.fsum(energies) + 1e-8) if len(alike) > 1 else 0.0
                found[i]["advantages"].append(math.fsum(rewards[i][k:]) - baseline)
        elif kind in ("return", "gae"):
            v = [values[t] if kind == "gae" else 0.0 for t in span] + [0.0]
            deltas = [rewards[i][k] + gamma * v[k + 1] - v[k] for k in range(n)]
            lam = algorithm.get("lambda_policy", 1.0)

            def ahead(lam: float, deltas: list[float] = deltas, n: int = n) -> list[float]:
                return [
                    math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)
                ]

            found[i] = {"advantages": ahead(lam)}
            if kind == "gae":
                found[i]["returns"] = [a + b for a, b in zip(ahead(1.0), v, strict=False)]
        else:
            others = (math.fsum(group) - totals[i]) / (len(group) - 1)
            value = {
                "group": (totals[i] - mean) / (statistics.stdev(group) + 1e-6),
                "group_mean": totals[i] - mean,
                "leave_one_out": totals[i] - others,
                "per_reward": of_parts[i],
                "tracked": of_tracker[i],
            }[kind]
            found[i] = {"advantages": [value] * n}
    if algorithm.get("whiten"):
        everything = [(x, kept[i]) for i in range(12) for x in found[i]["advantages"]]
        whitened = iter(normalise(*map(list, zip(*everything, strict=True))))
        for i in range(12):
            found[i]["advantages"] = [next(whitened) for _ in found[i]["advantages"]]
    teacher, weight = batch["teacher"].tolist(), algorithm.get("teacher", 0.0)
    for i, span in enumerate(spans):
        graded = [weight * (teacher[t] - old[t]) if weight and i % 4 != 3 else 0.0 for t in span]
        found[i]["advantages"] = [a + b for a, b in zip(found[i]["advantages"], graded, strict=True)]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("advantages") / "model", "qwen3", vocab=61, layers=2)


@pytest.mark.parametrize("turns", [False, True], ids=["one turn", "turns"])
@pytest.mark.parametrize("case", CASES)
def test_equal_the_loop_on_every_layout(
    case: str, turns: bool, ranks: Callable[[int, int, int], RankPool], folder: Path
) -> None:
    expected = loop(CASES[case], turns)
    for layout in ((1, 1, 1), (1, 1, 2), (1, 2, 1)):
        found: dict[int, dict[str, list[float]]] = {}
        answers = ranks(*layout).run(advantages_of, folder=folder, algorithm=CASES[case], turns=turns)
        for shares, metrics in answers:
            found |= shares
            assert metrics == pytest.approx(answers[0][1], rel=1e-12)
        if "teacher" in CASES[case]:
            lengths = make_batch(turns).response_lengths
            taught = float(lengths[torch.arange(12) % 4 != 3].sum() / lengths.sum())
            assert answers[0][1]["policy/taught"] == pytest.approx(taught)
        assert found.keys() == expected.keys()
        for number, columns in expected.items():
            for name, column in columns.items():
                assert found[number][name] == pytest.approx(column, rel=1e-6, abs=1e-6), (
                    layout,
                    number,
                    name,
                )


def agreement_of(runtime: Runtime, folder: Path, batch: TrainBatch) -> Any:
    """Return advantages and loss weights by response number for this rank's share, and the metrics."""
    from megarl.training.batch import make_train_batch
    from megarl.training.methods.asyppo import add_agreement

    config = make_config(folder, mini_batch=6, overlong=True, agreement={"mask": 0.3, "filter": 0.2})
    model = get_actor(config, folder, runtime)
    experience = make_train_batch(RolloutBatch.from_train_batch(batch), config, 6, 1, [model], runtime)
    of_policy = experience["policy_loss_weights"].clone()
    metrics = add_agreement(config.algorithm.agreement, experience, runtime)
    assert torch.equal(experience["policy_loss_weights"], of_policy)
    names = "advantages", "policy_loss_weights", "entropy_weights"
    of_responses = [experience[name].split(experience.lengths.tolist()) for name in names]
    return dict(zip(experience["number"].tolist(), zip(*of_responses, strict=True), strict=True)), metrics


@pytest.mark.parametrize("alike", [False, True])
def test_agreement_equals_the_loop_on_every_layout(
    alike: bool, ranks: Callable[[int, int, int], RankPool], folder: Path
) -> None:
    """AsyPPO masks advantages where two critics agree most, and entropy where they agree least.

    These are three tenths and two tenths of the whole step's tokens, and none if agreement is equal on all
    tokens. Tokens of filtered overlong responses are not counted.
    """
    batch = make_batch()
    g = torch.Generator().manual_seed(8)
    of_critics = torch.tensor([[0.0, 1.0]]) if alike else torch.randn(batch.num_tokens, 2, generator=g)
    batch["critic_values"] = of_critics * batch.response_mask[:, None]
    batch["advantages"] = torch.where(batch.response_mask, torch.randn(batch.num_tokens, generator=g), 0.0)
    batch["truncated"] = batch["number"] % 5 == 0
    counted = batch.response_mask & (batch.spread(batch["truncated"].float()) == 0)
    pairs, mask = batch["critic_values"].tolist(), counted.tolist()
    apart = {t: abs(a - b) / 2 for t, (a, b) in enumerate(pairs) if mask[t]}
    order = sorted(apart, key=lambda t: apart[t])
    agreed, disputed = int(0.3 * len(order)), int(0.2 * len(order))
    least, most = (set(), set()) if alike else (set(order[:agreed]), set(order[-disputed:]))
    ends, given = batch.cu_seqlens.tolist(), batch["advantages"].tolist()
    for layout in ((1, 1, 1), (1, 1, 2), (1, 2, 1)):
        found: dict[int, Any] = {}
        for shares, metrics in ranks(*layout).run(agreement_of, folder=folder, batch=batch):
            found |= shares
            assert metrics == pytest.approx(
                {
                    "value/spread": statistics.fmean(apart.values()),
                    "policy/agreed": len(least) / len(order),
                    "policy/disputed": len(most) / len(order),
                }
            )
        for number, (start, end) in enumerate(itertools.pairwise(ends)):
            advantages, weights, of_entropy = (column.tolist() for column in found[number])
            for t in range(start, end):
                assert advantages[t - start] == (0.0 if t in least else pytest.approx(given[t]))
                assert of_entropy[t - start] == (0.0 if t in most else weights[t - start])


WINDOW = 4
WINDOWED: dict[str, Any] = {
    "advantage": "gae",
    "lambda_policy": "length_adaptive",
    "lambda_floor": 0.3,
    "alpha": 0.25,
    "window_tail": 1,
    "whiten": True,
    "kl_reward": BETA,
}


def make_windows() -> TrainBatch:
    """Return a batch in which the last 1 to 4 tokens of a response are new; every third is unfinished."""
    batch = make_batch()
    batch["prefix_tokens"] = (batch.response_lengths - 1 - torch.arange(12) % WINDOW).clamp(min=0)
    batch["unfinished"] = torch.arange(12) % 3 == 2
    batch["rewards"] = batch["rewards"].masked_fill(batch["unfinished"], 0.0)
    batch["correct"] &= ~batch["unfinished"]
    batch["entropy"] = torch.where(batch.response_mask, batch["old_logprobs"].abs(), 0.0)
    batch["policy_version"] = torch.zeros(12, dtype=torch.int64)
    return batch


def windows_of(runtime: Runtime, folder: Path) -> Any:
    """Return advantages and returns by response number for this rank's share, and the metrics."""
    from megarl.training import columns
    from megarl.training.batch import make_train_batch
    from megarl.training.methods.tppo import add_window_gae

    config = make_config(folder, mini_batch=6, **WINDOWED)
    rollout = config.rollout.model_copy(update={"window": WINDOW})
    config = config.model_copy(update={"rollout": rollout})
    model = get_actor(config, folder, runtime)
    experience = make_train_batch(
        RolloutBatch.from_train_batch(make_windows()), config, 6, 1, [model], runtime
    )
    metrics, tables = add_window_gae(config, experience, runtime)
    for more, more_tables in (
        columns.policy_statistics(experience, runtime),
        columns.mismatch(experience, experience["old_logprobs"], 5, runtime),
    ):
        metrics, tables = metrics | more, tables | more_tables
    found = {}
    for row, number in enumerate(experience["number"].tolist()):
        start, end = experience.cu_seqlens[row : row + 2].tolist()
        span = slice(start + 2, end)
        found[number] = {name: experience[name][span].tolist() for name in ("advantages", "returns")}
    return found, metrics, tables


def test_windows_equal_the_loop_on_every_layout(
    ranks: Callable[[int, int, int], RankPool], folder: Path
) -> None:
    """T-PPO from its formulas, for each response and token; the statistics cover the same tokens."""
    batch = make_windows()
    values, engine = batch["values"].tolist(), batch["engine_logprobs"].tolist()
    old, ends = batch["old_logprobs"].tolist(), batch.cu_seqlens.tolist()
    kl = (batch["old_logprobs"] - batch["ref_logprobs"]).tolist()
    expected: dict[int, dict[str, list[float]]] = {}
    lambdas, counted, drawn, errors = [], [], [], []
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        start += 2
        goes_on, reward = i % 3 == 2, batch["rewards"][i].item()
        first, length = start + int(batch["prefix_tokens"][i]), end - start
        lam = max(0.3, 1 - 1 / (0.25 * (length + goes_on * WINDOW // 2)))
        lambdas.append(lam)
        advantage, later = [0.0] * length, 0.0
        for t in range(end - 1, first - 1, -1):
            if t == end - 1:
                delta = (values[t] if goes_on else reward) - BETA * kl[t] - values[t]
            else:
                delta = values[t + 1] - BETA * kl[t] - values[t]
            later = delta + lam * later
            advantage[t - start] = 0.0 if goes_on and t == end - 1 else later
        returns = [0.0 if goes_on else reward - BETA * math.fsum(kl[t:end]) for t in range(start, end)]
        expected[i] = {"advantages": advantage, "returns": returns}
        counted += advantage[first - start : length - goes_on]
        drawn += range(first, end)
        errors += [] if goes_on else zip(values[start:end], returns, strict=True)
    mean, deviation = statistics.fmean(counted), statistics.stdev(counted)
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        first, last = int(batch["prefix_tokens"][i]), end - start - 2 - (i % 3 == 2)
        advantage = expected[i]["advantages"]
        advantage[first:last] = [(x - mean) / deviation for x in advantage[first:last]]
    for layout in ((1, 1, 1), (1, 1, 2), (1, 2, 1)):
        answers = ranks(*layout).run(windows_of, folder=folder)
        found = {number: columns for shares, *_ in answers for number, columns in shares.items()}
        assert found.keys() == expected.keys()
        for number, columns in expected.items():
            for name, column in columns.items():
                assert found[number][name] == pytest.approx(column, rel=1e-5, abs=1e-6), (
                    layout,
                    number,
                    name,
                )
        for _, metrics, tables in answers:
            assert metrics["gae/lambda_mean"] == pytest.approx(statistics.fmean(lambdas))
            assert metrics["gae/lambda_clamped"] == pytest.approx(lambdas.count(0.3) / 12) != 0
            assert metrics["policy/kl_reward"] == pytest.approx(statistics.fmean(kl[t] for t in drawn))
            assert metrics["policy/entropy"] == pytest.approx(statistics.fmean(abs(old[t]) for t in drawn))
            probability = statistics.fmean(math.exp(old[t]) for t in drawn)
            assert metrics["policy/mean_prob"] == pytest.approx(probability)
            difference = statistics.fmean(abs(old[t] - engine[t]) for t in drawn)
            assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(difference)
            residual = statistics.pvariance([r - v for v, r in errors])
            explained = 1 - residual / statistics.pvariance([r for _, r in errors])
            assert metrics["value/explained_variance"] == pytest.approx(explained)
            assert sum(tables["entropy"]["tokens"]) == len(drawn) == sum(tables["mismatch"]["tokens"])
            assert sum(tables["value_error"]["tokens"]) == len(errors)
