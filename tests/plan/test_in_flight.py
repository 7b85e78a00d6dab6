"""The simulation of weights in flight, compared with bounds and with steps between rollouts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cli.main import main
from megarl.config import load_config
from megarl.plan.disk import count_stored_batches, disk_bytes
from megarl.plan.host import node_bytes, sampled_bytes
from megarl.plan.in_flight import simulate_in_flight
from megarl.plan.inputs import PlanInputs, make_plan_inputs
from megarl.plan.search import replace_keys
from megarl.plan.simulate import (
    Costs,
    RolloutWork,
    Split,
    Timeline,
    make_costs,
    make_log_normal,
    make_rollout_work,
    simulate,
)
from megarl.plan.splits import compare_splits, find_best_split
from megarl.plan.times import Lengths, default_lengths, estimate
from megarl.weights.known_models import KNOWN_MODELS
from tests.plan.test_simulate import ROOT, decode

PROMPTS, GROUP, PROMPT_TOKENS = 16, 4, 20.0


def equal(rng: random.Random, count: int) -> list[float]:
    return [100.0] * count


def long_tail(rng: random.Random, count: int) -> list[float]:
    """One response in 16 is 8 times as long as the mean."""
    return [800.0 if rng.random() < 1 / 16 else 53.3 for _ in range(count)]


def run(
    lengths: object = equal,
    *,
    seconds: float = 8.0,
    staleness: int = 4,
    at_once: int = 16,
    kept_share: float = 1.0,
    keeps_cache: bool = True,
    engines: int = 2,
    seed: int = 0,
) -> tuple[Timeline, RolloutWork, Costs]:
    work = RolloutWork(PROMPTS, GROUP, PROMPT_TOKENS, lengths, kept_share=kept_share)  # type: ignore[arg-type]
    costs = Costs(decode, 0.0, at_once, lambda tokens: {"actor_update": seconds}, 0.1, 1e-3)
    split = Split(engines, 1, max_staleness=staleness, keeps_cache=keeps_cache)
    return simulate_in_flight(work, costs, split, seed), work, costs


def rollout_work(lengths: Sequence[float], at_once: int, engines: int) -> float:
    """Return the engines' seconds for a batch, if they are always full."""
    context = PROMPT_TOKENS + sum(n * n for n in lengths) / sum(lengths) / 2
    step = decode(at_once, at_once * context)
    return PROMPTS * GROUP * fmean(lengths) * step / at_once / engines


@pytest.mark.parametrize("seconds", [1.0, 5.0, 9.0, 20.0])
def test_equal_lengths_reach_the_longer_of_generation_and_training(seconds: float) -> None:
    found, work, costs = run(seconds=seconds)
    bound = max(rollout_work([100.0], 16, 2), seconds) + 0.1
    assert bound * 0.98 < found.step < bound * 1.05
    ahead = simulate(work, costs, Split(2, 1, 1))
    assert found.step <= 1.05 * ahead.step
    assert found.dropped == 0


def test_a_long_tail_gains() -> None:
    found, work, costs = run(long_tail, seconds=3.0)
    ahead = fmean(simulate(work, costs, Split(2, 1, 1), seed).step for seed in range(5))
    assert found.step < 0.8 * ahead


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from([0.5, 1.0]),
    st.floats(0.2, 20),
    st.booleans(),
    st.integers(1, 30),
)
def test_staleness_is_bounded_and_batches_are_complete(
    seed: int, staleness: int, kept_share: float, seconds: float, keeps_cache: bool, at_once: int
) -> None:
    given_ = {
        "staleness": staleness,
        "kept_share": kept_share,
        "keeps_cache": keeps_cache,
        "at_once": at_once,
    }
    lengths = make_log_normal(Lengths(60, 600, 0, 1.0))
    found, *_ = run(lengths, seconds=seconds, seed=seed, **given_)  # type: ignore[arg-type]
    assert 0 <= found.max_staleness <= staleness
    assert all(-1e-6 <= mean <= most + 1e-6 for mean, most in found.staleness)
    # Each batch has all groups: with equal lengths their tokens are known.
    same, *_ = run(seconds=seconds, seed=seed, **given_)  # type: ignore[arg-type]
    assert set(same.tokens) == {PROMPTS * GROUP * (100 + PROMPT_TOKENS)}
    for name, spans in found.rows.items():
        assert all(a.end <= b.begin + 1e-6 for a, b in pairwise(spans)), name


def test_old_groups_are_dropped_and_a_high_bound_keeps_them() -> None:
    """With short steps, the longest responses take more steps than the bound."""
    tight, *_ = run(long_tail, seconds=0.5, staleness=1, at_once=64, engines=4)
    loose, *_ = run(long_tail, seconds=0.5, staleness=100, at_once=64, engines=4)
    assert tight.dropped > 0 and loose.dropped == 0
    assert loose.max_staleness > 1


def test_a_seed_gives_the_same_steps() -> None:
    lengths = make_log_normal(Lengths(60, 600, 0, 1.0))
    first, again, other = (run(lengths, kept_share=0.5, seed=seed)[0] for seed in (3, 3, 4))
    assert first == again and first.ends != other.ends


def test_a_kept_cache_saves_the_prefill() -> None:
    kept, again = (run(seconds=1.0, keeps_cache=keeps)[0] for keeps in (True, False))
    assert kept.step < again.step
    phases = [{span.phase for span in found.rows["engine 0"]} for found in (kept, again)]
    assert phases[1] - phases[0] == {"prefill_again"}


@pytest.fixture(scope="module")
def plan() -> PlanInputs:
    config = load_config(ROOT / "configs/vapo_7b.yaml", ["rollout.prompts=32", "update.mini_batch=512"])
    return make_plan_inputs(config, KNOWN_MODELS["Qwen2.5-7B"])


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_in_flight_is_estimated_as_it_is_simulated(plan: PlanInputs, dp: int) -> None:
    keys = {"parallel__dp": dp, "parallel__rollout_ranks": 8 - 2 * dp, "rollout__prompts": 128}
    made = replace_keys(plan, **keys, schedule__in_flight="retract", schedule__max_staleness=4)
    lengths = default_lengths(made)
    found, work = estimate(made, lengths), make_rollout_work(made.config, lengths, "queue")
    course = simulate_in_flight(work, make_costs(made, lengths), Split.from_plan(made, 0))
    assert found.total == pytest.approx(course.step, rel=0.08)
    assert found.total < sum(found.parts.values())


def test_the_best_split_in_flight_is_compared_and_recommended(
    plan: PlanInputs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = default_lengths(plan)
    work = make_rollout_work(plan.config, lengths, "queue")
    best = find_best_split(plan, work, lengths, 8, in_flight=True)
    assert best is not None and best.in_flight and best.config.schedule.ahead == 0
    splits = compare_splits(plan, work, lengths)
    assert [split.plan.in_flight for split in splits] == [False, False, False, True]
    # The configuration itself may be in flight, with its own bound.
    keys = {"in_flight": "keep", "max_staleness": 2}
    own = replace_keys(best, **{f"schedule__{name}": value for name, value in keys.items()})
    first, *_ = compare_splits(own, work, lengths)
    assert first.name.endswith("in flight, staleness <= 2") and first.timeline.max_staleness <= 2
    monkeypatch.chdir(ROOT)
    assert main(["plan", "configs/vapo_7b.yaml", "rollout.prompts=32", "--simulate"]) == 0
    printed = capsys.readouterr().out
    assert "generate, in flight, staleness <= 4" in printed
    assert "schedule.in_flight=retract schedule.max_staleness=4" in printed.splitlines()[-1]


def test_scales_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("megarl.plan.splits.SCALES", (4, 8))
    changes = ["rollout.prompts=32", "rollout.group_size=4", "update.mini_batch=128"]
    assert main(["plan", "configs/vapo_7b.yaml", *changes, "--simulate", "--scale"]) == 0
    *_, four, eight = capsys.readouterr().out.splitlines()
    assert four.split()[0] == "4" and eight.split()[0] == "8" and "in flight" in eight
    assert main(["plan", "configs/vapo_7b.yaml", "--scale"]) == 2
    assert "--scale: has no effect without --simulate" in capsys.readouterr().err


def test_batches_in_flight_are_counted_on_engine_nodes(plan: PlanInputs) -> None:
    apart = replace_keys(plan, parallel__dp=2, parallel__rollout_ranks=4)
    ahead = replace_keys(apart, schedule__ahead=1)
    in_flight = [
        replace_keys(apart, schedule__in_flight="retract", schedule__max_staleness=bound) for bound in (1, 4)
    ]
    rollouts = [node_bytes(made)["rollouts"] for made in (ahead, *in_flight)]
    assert [count_stored_batches(made) for made in (plan, ahead, *in_flight)] == [0, 2, 2, 3]
    assert disk_bytes(in_flight[1]) - disk_bytes(plan) == pytest.approx(sampled_bytes(in_flight[1]))
    assert (rollouts[2] - rollouts[0]) == pytest.approx(2 * (rollouts[1] - rollouts[0])) and rollouts[
        1
    ] > rollouts[0]
