"""Pass@k advantages against a count over all subsets of k responses."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from megarl.algorithms.advantages import Responses
from megarl.algorithms.methods.pass_at_k import pass_at_k
from tests.methods import refusal

GROUPS = [(n, c, k) for n in (1, 2, 5, 8) for c in range(n + 1) for k in range(1, n + 1)]


def advantages(size: int, right: int, k: int) -> list[float]:
    rewards = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
    return pass_at_k(Responses(rewards, torch.zeros(size, dtype=torch.int64)), k).tolist()


@pytest.mark.parametrize(("size", "right", "k"), GROUPS)
def test_equals_the_mean_over_subsets(size: int, right: int, k: int) -> None:
    """An advantage is the mean of the normalised rewards of the subsets that the response is in."""
    subsets = list(combinations(range(size), k))
    reward = {subset: float(any(i < right for i in subset)) for subset in subsets}
    mean = math.fsum(reward.values()) / len(subsets)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in reward.values()) / len(subsets))
    expected = []
    for i in range(size):
        own = [reward[subset] for subset in subsets if i in subset]
        expected.append((math.fsum(own) / len(own) - mean) / (deviation + 1e-6))
    assert advantages(size, right, k) == pytest.approx(expected, rel=1e-9, abs=1e-8)


@pytest.mark.parametrize(
    ("size", "right", "k"), [(16, 3, 4), (64, 1, 8), (64, 60, 8), (32, 32, 4), (32, 0, 4)]
)
def test_they_sum_to_zero(size: int, right: int, k: int) -> None:
    found = advantages(size, right, k)
    assert math.fsum(found) == pytest.approx(0.0, abs=1e-8) and all(map(math.isfinite, found))
    assert any(found) == (0 < right <= size - k)


def test_k_of_one_is_grpo_with_the_populations_standard_deviation() -> None:
    rewards = [1.0] * 3 + [0.0] * 5
    mean, deviation = 3 / 8, math.sqrt(3 / 8 * 5 / 8)
    expected = [(r - mean) / (deviation + 1e-6) for r in rewards]
    assert advantages(8, 3, 1) == pytest.approx(expected, rel=1e-12)


def test_groups_are_separate_and_may_be_smaller_than_k() -> None:
    rewards, ids = torch.tensor([1.0, 0, 0, 0, 0, 1, 0.5]), torch.tensor([4, 9, 4, 4, 4, 9, 7])
    found = pass_at_k(Responses(rewards, ids), 3)
    alone = pass_at_k(Responses(rewards[ids == 4], ids[ids == 4]), 3)
    assert torch.equal(found[ids == 4], alone) and alone.any()
    assert found[ids != 4].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "reward.incorrect=-1",
            "reward.incorrect: must be 0 for algorithm.advantage pass_at_k, which",
        ),
        ("reward.correct=2", "reward.correct: must be 1 for algorithm.advantage pass_at_k, which"),
        ("reward.overlong.soft_punishment=true", "algorithm.advantage: pass_at_k counts right responses, so"),
        ("reward.weight=0", "algorithm.advantage: pass_at_k counts right responses, so"),
        ("rollout.environment=a:b", "algorithm.advantage: pass_at_k counts right responses and reads no"),
        ("algorithm.pass_at_k.k=16", "algorithm.pass_at_k.k: must be < rollout.group_size 16, as subsets"),
        ("algorithm.advantage=group", "algorithm.pass_at_k.k: has no effect with algorithm.advantage group"),
    ],
)
def test_unsuitable_keys_are_named(override: str, message: str) -> None:
    more = ["algorithm.pass_at_k.k=4"] if override == "algorithm.advantage=group" else []
    assert message in refusal("pass_at_k", override, *more)
