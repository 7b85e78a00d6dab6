"""MaxRL's advantages against a loop, and their expected gradient over all outcomes of a group."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import Responses
from megarl.algorithms.methods.maxrl import relative_rewards
from tests.methods import refusal


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.25, 1.0])), min_size=1, max_size=30))
def test_equals_the_formula(rows: list[tuple[int, float]]) -> None:
    ids, rewards = torch.tensor([g for g, _ in rows]), torch.tensor([r for _, r in rows]).double()
    expected = []
    for g, r in rows:
        members = [other for group, other in rows if group == g]
        mean = math.fsum(members) / len(members)
        expected.append((r - mean) / mean if mean > 0 else 0.0)
    found = relative_rewards(Responses(rewards, ids))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    for g in set(ids.tolist()):
        assert float(found[ids == g].sum()) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("p", [0.1, 0.6])
def test_the_expected_gradient_is_that_of_the_truncated_logarithm(size: int, p: float) -> None:
    """The mean over all 2^N outcomes of (1/N) sum_i A_i d log P(R_i) / dp is sum_(k<N) (1 - p)^(k - 1)."""
    expected = 0.0
    for outcome in product((0.0, 1.0), repeat=size):
        right = sum(outcome)
        rewards = torch.tensor(outcome, dtype=torch.float64)
        advantages = relative_rewards(Responses(rewards, torch.zeros(size, dtype=torch.int64)))
        scores = [1 / p if r else -1 / (1 - p) for r in outcome]
        gradient = math.fsum(a * s for a, s in zip(advantages.tolist(), scores, strict=True)) / size
        expected += p**right * (1 - p) ** (size - right) * gradient
    assert expected == pytest.approx(math.fsum((1 - p) ** (k - 1) for k in range(1, size)), abs=1e-12)


def test_groups_without_a_success_have_no_advantage() -> None:
    rewards, ids = torch.tensor([0.0, 0, -1, 1, 0, 1]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert relative_rewards(Responses(rewards, ids)).tolist() == [0, 0, 0, 0, -1, 1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "reward.incorrect=-1",
            "reward.incorrect: must be >= 0 for algorithm.advantage maxrl, which",
        ),
        (
            "reward.overlong.soft_punishment=true",
            "reward.overlong.soft_punishment: may make rewards negative",
        ),
        (
            "algorithm.kl_reward=0.1",
            "algorithm.kl_reward: may make rewards negative, and",
        ),
        (
            "reward.terms={short: {function: 'a:b'}}",
            "reward.terms.short.weight: may make rewards negative, and",
        ),
        (
            "rollout.group_size=1",
            "rollout.group_size: must be >= 2 for algorithm.advantage maxrl, which",
        ),
    ],
)
def test_unsuitable_keys_are_named(override: str, message: str) -> None:
    assert message in refusal("maxrl", override)
