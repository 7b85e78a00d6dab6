"""Partial rollout windows in the plan and the simulation, compared with a loop over steps.

The loop repeatedly fills the slots of a step."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from megarl.config import load_config
from megarl.plan.inputs import PlanInputs, make_plan_inputs
from megarl.plan.simulate import (
    RolloutWork,
    Split,
    make_costs,
    make_log_normal,
    make_rollout_work,
    sample_window,
    simulate,
    simulate_rollout,
)
from megarl.plan.times import Lengths, default_lengths, estimate, mean_cached_tokens, split_into_windows
from megarl.weights.known_models import KNOWN_MODELS

CONFIG = Path(__file__).parents[2] / "configs" / "tppo_32b.yaml"
LENGTHS = Lengths(300.0, 900, 20, window=128)


def plan_32b() -> PlanInputs:
    return make_plan_inputs(load_config(CONFIG), KNOWN_MODELS["Qwen2.5-32B"])


def test_windows_are_the_response() -> None:
    for length, window in ((1.0, 128), (128.0, 128), (129.0, 128), (900.0, 128), (77.0, 0)):
        windows = split_into_windows(length, window)
        assert sum(one.new_tokens for one in windows) == length == windows[-1].length
        assert [one.is_last for one in windows] == [False] * (len(windows) - 1) + [True]
        for before, after in pairwise(windows):
            assert after.prefix_tokens == before.length
        assert all(0 < one.new_tokens <= (window or length) for one in windows)


def successive(lengths: Lengths, places: int, steps: int) -> list[tuple[float, float, bool]]:
    """Return (prefix, new tokens, is last) of each slot in the last three quarters of the steps."""
    chance, draw = random.Random(0), make_log_normal(lengths)
    responses = [[0.0, 0.0]] * places  # tokens so far, tokens in total
    seen = []
    for step in range(steps):
        for place, (there, whole) in enumerate(responses):
            if there >= whole:
                there, whole = 0.0, draw(chance, 1)[0]
            drawn = min(lengths.window, whole - there)
            responses[place] = [there + drawn, whole]
            if step >= steps // 4:
                seen.append((there, drawn, there + drawn >= whole))
    return seen


def test_a_steady_step_is_what_many_steps_come_to() -> None:
    seen = successive(LENGTHS, places=400, steps=80)
    chance, work = (
        random.Random(1),
        RolloutWork(9, 2, 20.0, make_log_normal(LENGTHS), window=128, max_windows=8),
    )
    drawn = [sample_window(work, chance) for _ in range(8000)]
    for begun, new, ends in (
        (
            fmean(one.prefix_tokens for one in LENGTHS.windows),
            fmean(one.new_tokens for one in LENGTHS.windows),
            fmean(one.is_last for one in LENGTHS.windows),
        ),
        (fmean(one.prefix_tokens for one in drawn), fmean(one.lengths[0] for one in drawn), None),
    ):
        assert begun == pytest.approx(fmean(there for there, *_ in seen), rel=0.04)
        assert new == pytest.approx(fmean(tokens for _, tokens, _ in seen), rel=0.04)
        assert ends is None or ends == pytest.approx(fmean(last for *_, last in seen), rel=0.04)
    half_way = fmean(there + tokens / 2 for there, tokens, _ in seen)
    assert mean_cached_tokens(LENGTHS) == pytest.approx(20 + half_way, rel=0.04)
    whole = replace(LENGTHS, window=0)
    assert mean_cached_tokens(whole) == pytest.approx(20 + fmean(whole.quantiles) / 2)


@pytest.mark.slow
def test_a_rollout_of_windows_counts_what_is_new_once() -> None:
    plan = plan_32b()
    lengths = default_lengths(plan)
    assert lengths.window == 8192
    work = make_rollout_work(plan.config, lengths, "queue")
    assert (work.window, work.max_windows) == (8192, 3)
    batch = simulate_rollout(work, make_costs(plan, lengths), 32, random.Random(0))
    responses = plan.config.responses
    assert batch.generated < batch.fresh < batch.tokens
    mean = fmean(one.new_tokens for one in lengths.windows)
    assert batch.generated / responses == pytest.approx(mean, rel=0.05)
    whole = fmean(one.length for one in lengths.windows) + lengths.prompt
    assert batch.tokens / responses == pytest.approx(whole, rel=0.05)
    course = simulate(work, make_costs(plan, lengths), Split.from_plan(plan, 0))
    assert course.idle < 0.05


def test_only_the_critics_update_is_shorter_by_what_goes_on() -> None:
    plan = plan_32b()
    lengths = default_lengths(plan)
    windows, whole = estimate(plan, lengths).parts, estimate(plan, replace(lengths, window=0)).parts
    ended = [one.length + lengths.prompt for one in lengths.windows if one.is_last]
    everything = [one.length + lengths.prompt for one in lengths.windows]
    assert sum(ended) < sum(everything)
    # Attention makes long sequences slightly more expensive per token.
    ratio = (windows["critic_update"] / windows["actor_update"]) / (
        whole["critic_update"] / whole["actor_update"]
    )
    assert ratio == pytest.approx(sum(ended) / sum(everything), rel=0.1)
    assert windows["rollout"] < whole["rollout"]
