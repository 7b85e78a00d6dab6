"""Evaluation scores, confidence intervals and explained variance, against enumeration and formulas."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.scores import (
    _student,
    avg_at_k,
    explained_variance,
    interval,
    ks_up_to,
    majority_at_k,
    pass_at_k,
    variance_sums,
)
from megarl.data.prompts import Prompt
from megarl.data.sample import Sample, SampleGroup
from megarl.schedule.scores import Scores
from tests.algorithms.loops import batches


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    subsets = list(itertools.combinations(correct, k))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(
        sum(map(any, subsets)) / len(subsets), abs=1e-12
    )
    assert pass_at_k(len(correct), sum(correct), 1) == pytest.approx(avg_at_k(correct))


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses(n, c, k):
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, c, k)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([None, "1", "2", "3"]), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_majority_is_the_mean_over_ways_to_break_ties(answers, random):
    correct = [a == "2" for a in answers]
    votes = [a for a in answers if a is not None]
    expected = statistics.fmean(a == "2" for a in statistics.multimode(votes)) if votes else 0.0
    assert majority_at_k(answers, correct) == pytest.approx(expected)
    pairs = list(zip(answers, correct, strict=True))
    random.shuffle(pairs)
    assert majority_at_k([a for a, _ in pairs], [c for _, c in pairs]) == pytest.approx(expected)


def test_majority_by_hand():
    assert majority_at_k(["7", "7", "8", None, None, None], [True, True, False, False, False, False]) == 1.0
    assert majority_at_k(["7", "8"], [True, False]) == 0.5
    assert majority_at_k(["7", "7"], [True, False]) == 0.5
    assert majority_at_k([None, None], [False, False]) == 0.0
    assert avg_at_k([]) == 0.0
    with pytest.raises(ValueError, match="2 answers, but 1 verdicts"):
        majority_at_k(["1", "2"], [True])


@settings(max_examples=50, deadline=None)
@given(batches())
def test_explained_variance_from_parts(batch):
    e = batch.experience
    parts = [e.select([i]) for i in range(e.num_sequences)]
    total = sum(variance_sums(p["returns"], p["values"], p.response_mask) for p in parts)
    target, value = e["returns"][e.response_mask].tolist(), e["values"][e.response_mask].tolist()
    variance = statistics.pvariance(target)
    expected = (
        1 - statistics.pvariance([t - v for t, v in zip(target, value, strict=True)]) / variance
        if len(target) > 1
        else 0.0
    )
    assert explained_variance(total) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_explained_variance_at_its_ends():
    mask = torch.ones(4, dtype=torch.bool)
    returns = torch.tensor([1.0, -1.0, 1.0, -1.0])

    def of(returns: torch.Tensor, values: torch.Tensor, mask: torch.Tensor = mask) -> float:
        return explained_variance(variance_sums(returns, values, mask))

    assert of(returns, returns + 3) == 1.0
    assert of(returns, torch.zeros(4)) == 0.0
    assert of(returns, -returns) == -3.0
    for n in range(1, 50):  # sums of 0.1 and of 0.01 round differently
        assert (
            of(torch.full((n,), 0.1, dtype=torch.float64), torch.arange(n), torch.ones(n, dtype=torch.bool))
            == 0.0
        )
    assert of(returns, returns, torch.zeros(4, dtype=torch.bool)) == 0.0


def _wilson_by_bisection(mean: float, size: float, t: float) -> tuple[float, float]:
    """Compute Wilson's interval from its definition: the p with the mean t standard errors of p away."""

    def bound(outer: float) -> float:
        inner = mean
        for _ in range(200):
            p = (inner + outer) / 2
            if abs(mean - p) <= t * math.sqrt(p * (1 - p) / size):
                inner = p
            else:
                outer = p
        return inner

    return bound(0.0), bound(1.0)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (29, 2.04523), (1000, 1.96234)],
)
def test_student_quantiles_are_the_tables(freedom, quantile):
    assert _student(freedom) == pytest.approx(quantile, rel=1.3e-3)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 60), st.data())
def test_of_right_or_wrong_problems_it_is_wilsons_interval(n, data):
    c = data.draw(st.integers(0, n))
    low, high = interval([1.0] * c + [0.0] * (n - c), 1)
    assert (low, high) == pytest.approx(_wilson_by_bisection(c / n, n, _student(n - 1)), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=30))
def test_problems_are_the_unit(right):
    scores = [c / 8 for c in right]
    mean, variance, n = statistics.fmean(scores), statistics.variance(scores), len(scores)
    size = (
        min(max(mean * (1 - mean) / (variance / n), n), 8 * n) if variance else 8 * n if 0 < mean < 1 else n
    )
    low, high = interval(scores, 8)
    assert (low, high) == pytest.approx(_wilson_by_bisection(mean, size, _student(n - 1)), abs=1e-9)
    assert 0 <= low <= mean <= high <= 1 and low < high


def test_intervals_at_their_ends():
    assert interval([0.3], 32) == (0.0, 1.0)
    assert interval([1.0] * 30, 32) == (pytest.approx(30 / (30 + 2.04523**2), abs=1e-4), 1.0)
    assert interval([0.0] * 30, 32) == (0.0, pytest.approx(1 - 30 / (30 + 2.04523**2), abs=1e-4))
    same = interval([0.5] * 4, 32)
    assert same[0] < 0.5 < same[1], "problems that happen to score alike are not certainty"
    with pytest.raises(ValueError, match="at least one score"):
        interval([], 1)


@pytest.mark.parametrize("n, k", [(10, 8), (30, 32), (30, 1), (200, 8)])
@pytest.mark.parametrize("a, b", [(1.0, 1.0), (0.3, 0.7), (0.1, 0.1), (30.0, 3.0)])
def test_the_interval_covers_the_truth_as_often_as_it_says(n, k, a, b):
    """Problem difficulties follow a beta distribution of known mean, correct responses a binomial one."""
    draw = np.random.default_rng(n * k)
    trials = 800
    truth = a / (a + b)
    hits = 0
    for _ in range(trials):
        low, high = interval((draw.binomial(k, draw.beta(a, b, n)) / k).tolist(), k)
        hits += low <= truth <= high
    # Three standard errors of a count at 95 % are 2.3 points; heavy tails with few problems cost about one
    # more.
    assert hits / trials > 0.92


def test_the_k_of_pass_at_k():
    assert [ks_up_to(n) for n in (1, 2, 5, 8, 32)] == [
        [1],
        [1, 2],
        [1, 2, 4, 5],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 16, 32],
    ]


def _result(rows: list[list[tuple[str | None, bool]]]) -> Scores:
    groups = []
    for uid, row in enumerate(rows):
        prompt = Prompt(uid=uid, text=f"problem {uid}", tokens=(1,), answer="1")
        groups.append(
            SampleGroup(prompt, [Sample(0, 2, "stop", right, vote, None, 0.0, 0.0) for vote, right in row], 0)
        )
    return Scores(groups)


@pytest.mark.parametrize("right, expected", [(True, 1.0), (False, 0.0)])
def test_scores_of_one_problem_and_one_answer(right, expected):
    result = _result([[("1" if right else None, right)]])
    assert result.scores() == {
        name: {"mean": expected, "low": 0.0, "high": 1.0} for name in ("avg@1", "pass@1", "majority@1")
    }
    assert result.counts() == {
        "all": 1,
        "right": int(right),
        "without_answer": int(not right),
        "truncated": 0,
        "unverified": 0,
        "ungraded": 0,
    }


def test_scores_against_a_count_by_hand():
    rows = [
        [("1", True), ("1", True), ("2", False)],
        [(None, False)] * 3,
        [("1", True), ("3", False), ("3", False)],
    ]
    result = _result(rows)
    means = {name: score["mean"] for name, score in result.scores().items()}
    assert means == pytest.approx(
        {"avg@3": 3 / 9, "pass@1": 3 / 9, "pass@2": (1 + 0 + 2 / 3) / 3, "pass@3": 2 / 3, "majority@3": 1 / 3}
    )
    first, none, last = result.table()
    assert (first["right"], first["vote"], first["votes"]) == (2, "1", 2)
    assert (none["right"], none["vote"], none["votes"]) == (0, None, 0)
    assert (last["vote"], last["votes"], last["majority"], last["pass_at"]["2"]) == (
        "3",
        2,
        0.0,
        pytest.approx(2 / 3),
    )
    found = result.means("eval")
    assert found["eval/pass"] == pytest.approx(2 / 3) and found["eval/majority"] == pytest.approx(1 / 3)
    mixed = _result([rows[0], rows[1][:1]])
    assert mixed.k is None and mixed.scores().keys() == {"avg"}
    assert mixed.scores()["avg"]["mean"] == pytest.approx(1 / 3) == mixed.means("eval")["eval/avg"]
    assert "eval/pass" not in mixed.means("eval")
