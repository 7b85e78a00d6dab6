"""Evaluation scores, explained variance and trainer-engine mismatch against enumeration and plain formulas."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import evaluation, mismatch
from tests.algorithms.loops import batches


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    subsets = list(itertools.combinations(correct, k))
    assert evaluation.pass_at_k(len(correct), sum(correct), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    assert evaluation.pass_at_k(len(correct), sum(correct), 1) == pytest.approx(evaluation.avg_at_k(correct))


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses(n, c, k):
    with pytest.raises(ValueError, match="pass@k needs"):
        evaluation.pass_at_k(n, c, k)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([None, "1", "2", "3"]), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_majority_is_the_mean_over_ways_to_break_ties(answers, random):
    correct = [a == "2" for a in answers]
    votes = [a for a in answers if a is not None]
    expected = statistics.fmean(a == "2" for a in statistics.multimode(votes)) if votes else 0.0
    assert evaluation.majority_at_k(answers, correct) == pytest.approx(expected)
    pairs = list(zip(answers, correct, strict=True))
    random.shuffle(pairs)
    assert evaluation.majority_at_k([a for a, _ in pairs], [c for _, c in pairs]) == pytest.approx(expected)


def test_majority_by_hand():
    assert evaluation.majority_at_k(["7", "7", "8", None, None, None], [True, True, False, False, False, False]) == 1.0
    assert evaluation.majority_at_k(["7", "8"], [True, False]) == 0.5
    assert evaluation.majority_at_k(["7", "7"], [True, False]) == 0.5
    assert evaluation.majority_at_k([None, None], [False, False]) == 0.0
    assert evaluation.avg_at_k([]) == 0.0
    with pytest.raises(ValueError, match="2 answers, but 1 verdicts"):
        evaluation.majority_at_k(["1", "2"], [True])


@settings(max_examples=50, deadline=None)
@given(batches())
def test_explained_variance_from_parts(batch):
    e = batch.experience
    parts = [e.select([i]) for i in range(e.num_sequences)]
    total = sum(evaluation.variance_sums(p["returns"], p["values"], p.response_mask) for p in parts)
    target, value = e["returns"][e.response_mask].tolist(), e["values"][e.response_mask].tolist()
    variance = statistics.pvariance(target)
    expected = 1 - statistics.pvariance([t - v for t, v in zip(target, value, strict=True)]) / variance if len(target) > 1 else 0.0
    assert evaluation.explained_variance(total) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_explained_variance_at_its_ends():
    mask = torch.ones(4, dtype=torch.bool)
    returns = torch.tensor([1.0, -1.0, 1.0, -1.0])

    def of(returns: torch.Tensor, values: torch.Tensor, mask: torch.Tensor = mask) -> float:
        return evaluation.explained_variance(evaluation.variance_sums(returns, values, mask))

    assert of(returns, returns + 3) == 1.0
    assert of(returns, torch.zeros(4)) == 0.0
    assert of(returns, -returns) == -3.0
    for n in range(1, 50):  # sums of 0.1 and of 0.01 round differently
        assert of(torch.full((n,), 0.1, dtype=torch.float64), torch.arange(n), torch.ones(n, dtype=torch.bool)) == 0.0
    assert of(returns, returns, torch.zeros(4, dtype=torch.bool)) == 0.0


@settings(max_examples=50, deadline=None)
@given(batches())
def test_mismatch_from_parts(batch):
    e = batch.experience
    parts = [
        mismatch.mismatch_sums(p["logprobs"], p["old_logprobs"], p.response_mask)
        for p in map(e.select, [[i] for i in range(e.num_sequences)])
    ]
    metrics = mismatch.mismatch_metrics(sum(p[0] for p in parts), max(p[1] for p in parts))
    gaps = (e["logprobs"] - e["old_logprobs"])[e.response_mask].tolist()
    assert metrics == pytest.approx(
        {
            "mismatch/logprob_abs_mean": statistics.fmean(map(abs, gaps)),
            "mismatch/logprob_abs_max": max(map(abs, gaps)),
            "mismatch/ratio_mean": statistics.fmean(map(math.exp, gaps)),
        },
        rel=1e-9,
    )
    weights = mismatch.truncated_importance_weights(e["logprobs"], e["old_logprobs"], e.response_mask, 1.1)
    assert weights[e.response_mask].tolist() == pytest.approx([min(math.exp(gap), 1.1) for gap in gaps], rel=1e-6)
    assert not weights[~e.response_mask].any()


def test_mismatch_of_nothing_and_of_garbage_outside():
    x, none = torch.full((2,), torch.nan), torch.zeros(2, dtype=torch.bool)
    assert mismatch.mismatch_metrics(*mismatch.mismatch_sums(x, x, none)) == {
        "mismatch/logprob_abs_mean": 0.0,
        "mismatch/logprob_abs_max": 0.0,
        "mismatch/ratio_mean": 1.0,
    }
    assert mismatch.truncated_importance_weights(x, x, none, 2.0).tolist() == [0, 0]
    with pytest.raises(ValueError, match="cap: must be > 0"):
        mismatch.truncated_importance_weights(x, x, none, 0.0)
