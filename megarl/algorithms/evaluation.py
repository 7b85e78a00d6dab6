"""Scores of repeated answers (avg@k, pass@k, majority@k) and the explained variance of a value model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def avg_at_k(correct: Sequence[bool]) -> float:
    """Share of right ones among the k answers to one problem; 0 if there is none."""
    return sum(map(bool, correct)) / len(correct) if correct else 0.0


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased probability that k answers drawn from n, of which c are right, hold a right one: 1 - C(n-c, k) / C(n, k).

    ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n (got n={n}, c={c}, k={k})")
    failure = 1.0
    for i in range(k):
        failure *= max(n - c - i, 0) / (n - i)
    return 1.0 - failure


def majority_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    """Whether the most frequent of the k answers to one problem is right: 1 or 0, or their share when several are as frequent.

    answers: normalised, so that equal answers compare equal; None (no answer was found) does not vote. correct: what the
    verifier said of each; should it differ between equal answers, their share of right ones counts. The order does not matter.
    """
    if len(answers) != len(correct):
        raise ValueError(f"majority@k: {len(answers)} answers, but {len(correct)} verdicts")
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    first = [answer for answer, count in votes.items() if count == most]
    right = Counter(answer for answer, flag in zip(answers, correct, strict=True) if flag)
    return sum(right[answer] for answer in first) / (most * len(first))


def variance_sums(returns: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """What `explained_variance` needs, float64 [5], to be summed over ranks: tokens, and sum and sum of squares of the
    returns and of the errors returns - values. All [T]; mask: bool."""
    target = returns[mask].double()
    error = target - values[mask].double()
    count = torch.tensor(float(target.numel()), dtype=torch.float64, device=target.device)
    return torch.stack([count, target.sum(), target.dot(target), error.sum(), error.dot(error)])


def explained_variance(sums: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) from the global `variance_sums`; 0 where the returns do not vary."""
    count, *rest = map(float, sums.tolist())
    if count == 0:
        return 0.0
    total, squares, error, error_squares = (x / count for x in rest)
    variance = squares - total * total
    # Of equal returns the difference of two float64 sums leaves a rounding error, not 0.
    if variance <= 1e-12 * squares:
        return 0.0
    return 1.0 - max(error_squares - error * error, 0.0) / variance
