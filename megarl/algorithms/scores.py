"""avg@k, pass@k, majority@k, confidence intervals, and explained variance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def avg_at_k(correct: Sequence[bool]) -> float:
    """Return the share of right answers; 0 without answers."""
    return sum(map(bool, correct)) / len(correct) if correct else 0.0


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 - C(n-c, k) / C(n, k), the unbiased pass@k of n answers, c of them right.

    Chen et al. 2021, arXiv 2107.03374, eq. 1. Raises ValueError unless 0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n (got n={n}, c={c}, k={k})")
    failure = 1.0
    for i in range(k):
        failure *= max(n - c - i, 0) / (n - i)
    return 1.0 - failure


def majority_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    """Return the share of right results among the most frequent answers, tied ones included.

    answers: normalised; None does not vote. correct: may differ between equal answers."""
    if len(answers) != len(correct):
        raise ValueError(f"majority@k: {len(answers)} answers, but {len(correct)} verdicts")
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    highest_count = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == highest_count]
    correct_votes = Counter(answer for answer, flag in zip(answers, correct, strict=True) if flag)
    return sum(correct_votes[answer] for answer in winners) / (highest_count * len(winners))


def ks_up_to(n: int) -> list[int]:
    """Return the k of pass@k for n answers: powers of two, and n."""
    return sorted({*(2**i for i in range(n.bit_length())), n})


def binary_interval(mean: float, count: int) -> tuple[float, float]:
    """Return `interval` of `count` scores of 0 or 1."""
    right = round(mean * count)
    return interval([1.0] * right + [0.0] * (count - right), 1)


def interval(scores: Sequence[float], samples: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean score over problems; (0, 1) for a single problem.

    scores: one per problem, in [0, 1], from `samples` answers each. Raises ValueError if empty.

    Wilson's interval (1927) with Student's t of n - 1, for the effective sample size m (1 - m) / (s^2 / n),
    between n and n * samples (Korn and Graubard 1998). m and s^2: mean and sample variance over n problems,
    the unit, as answers to one are dependent (Miller 2024, arXiv 2411.00640). Unlike a bootstrap's, its width
    is never 0."""
    n = len(scores)
    if not n:
        raise ValueError("a confidence interval needs at least one score")
    if n == 1:
        return 0.0, 1.0
    mean = math.fsum(scores) / n
    spread = mean * (1.0 - mean)
    variance = math.fsum((score - mean) ** 2 for score in scores) / (n - 1)
    size = float(n)
    if spread > 0:
        size = n * samples if variance <= 0 else min(max(spread * n / variance, n), n * samples)
    t = _student(n - 1)
    centre = (mean + t * t / (2 * size)) / (1 + t * t / size)
    half_width = t * math.sqrt(max(spread, 0.0) / size + t * t / (4 * size * size)) / (1 + t * t / size)
    # Rounding must not exclude the mean.
    return (min(max(0.0, centre - half_width), mean), max(min(1.0, centre + half_width), mean))


def _student(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t: exact below 3, else by Abramowitz and Stegun 26.7.5.

    The expansion is at most 0.12 % low."""
    if freedom < 3:
        return (12.706204736, 4.302652730)[freedom - 1]
    z = 1.959963985
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**i for i, term in enumerate(terms))


def variance_sums(returns: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return tokens, then sum and sum of squares of returns and of returns - values, float64 [5].

    To sum over ranks. All [T]; mask: bool."""
    target = returns[mask].double()
    error = target - values[mask].double()
    count = torch.tensor(float(target.numel()), dtype=torch.float64, device=target.device)
    return torch.stack([count, target.sum(), target.dot(target), error.sum(), error.dot(error)])


def explained_variance(sums: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns) from `variance_sums`; 0 for constant returns."""
    count, *value_sums = map(float, sums.tolist())
    if count == 0:
        return 0.0
    mean, mean_square, mean_error, mean_square_error = (x / count for x in value_sums)
    variance = mean_square - mean * mean
    # Rounding error of equal returns.
    if variance <= 1e-12 * mean_square:
        return 0.0
    return 1.0 - max(mean_square_error - mean_error * mean_error, 0.0) / variance
