"""Measure and correct the difference between the engine's and the trainer's log-probs."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.algorithms.losses import LOG_RATIO_LIMIT, log_ratio

Level = Literal["none", "token", "sequence"]

# Half decades from 1e-6 to 10 on both sides of 0.
DIFFERENCE_EDGES = tuple(
    sign * 10 ** (-6 + half / 2)
    for sign, halves in ((-1, range(14, -1, -1)), (1, range(15)))
    for half in halves
)


def mismatch_sums(trainer_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums over tokens, float64 [4], and the largest |log r|, float64 0-dim.

    With r = pi_trainer / pi_engine and |log r| bounded by 20, sums are tokens, |log r|, r, and r - 1 - log r.
    Reduce over ranks by sum and maximum. All inputs [T]."""
    difference = log_ratio(trainer_logprobs.detach(), engine_logprobs.detach(), mask)[mask]
    absolute = difference.abs()
    count = torch.tensor(float(absolute.numel()), dtype=torch.float64, device=absolute.device)
    largest = absolute.max() if absolute.numel() else torch.zeros_like(count)
    kl = torch.expm1(difference) - difference
    return torch.stack([count, absolute.sum(), difference.exp().sum(), kl.sum()]), largest


def mismatch_metrics(sums: Tensor, largest: Tensor | float) -> dict[str, float]:
    """Return metrics from global `mismatch_sums`.

    kl is the k3 estimate of KL(pi_engine || pi_trainer)."""
    count, absolute_sum, ratio_sum, kl_sum = sums.tolist()
    return {
        "mismatch/logprob_abs_mean": absolute_sum / max(count, 1.0),
        "mismatch/logprob_abs_max": float(largest),
        "mismatch/ratio_mean": ratio_sum / count if count else 1.0,
        "mismatch/kl": kl_sum / max(count, 1.0),
    }


def mismatch_factors(
    trainer_logprobs: Tensor,
    engine_logprobs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    weight: Level = "none",
    cap: float = 2.0,
    keep: Level = "none",
    bounds: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """Return factors of the token weights, float32 [T], and counts, float64 [3], without gradients.

    With r_t = pi_trainer / pi_engine, a factor is the product of

    weight  token: min(r_t, cap)
            sequence: min(prod_t r_t, cap) over the response
    keep    token: 0 if r_t is outside `bounds`, else 1
            sequence: 0 if the response's geometric mean of r_t is outside, else 1

    Factors are 0 outside `mask`, and denominators do not change. log r_t and the log of the product are
    bounded by 20. Counts, to sum over ranks: tokens, tokens above the cap, dropped tokens.

    trainer_logprobs, engine_logprobs: [T]. mask: bool [T]. sequence_ids: int64 [T]; responses must be whole.
    """
    if not cap > 0:
        raise ValueError(f"cap: must be > 0 (got {cap})")
    difference = log_ratio(trainer_logprobs.detach(), engine_logprobs.detach(), mask)
    sequences = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    zeros = torch.zeros(sequences, dtype=torch.float64, device=difference.device)
    sums = zeros.index_add(0, sequence_ids, difference)
    factors, is_capped = mask.double(), torch.zeros_like(mask)
    if weight != "none":
        products = sums.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = (difference if weight == "token" else products[sequence_ids]).exp()
        factors, is_capped = factors * ratio.clamp(max=cap), mask & (ratio > cap)
    is_kept = mask
    if keep != "none":
        means = sums / zeros.index_add(0, sequence_ids, mask.double()).clamp(min=1)
        ratio = (difference if keep == "token" else means[sequence_ids]).exp()
        is_kept = mask & (ratio >= bounds[0]) & (ratio <= bounds[1])
    counts = torch.stack([mask.sum(), is_capped.sum(), (mask & ~is_kept).sum()]).double()
    return torch.where(is_kept, factors, 0.0).float(), counts


def difference_histogram(trainer_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Count tokens by trainer minus engine log-prob, float64 [len(DIFFERENCE_EDGES) + 1].

    Bin i has edge i-1 < difference <= edge i. All inputs [T]."""
    difference = (trainer_logprobs.double() - engine_logprobs.double())[mask]
    edges = torch.tensor(DIFFERENCE_EDGES, dtype=torch.float64, device=difference.device)
    return torch.bincount(torch.bucketize(difference, edges), minlength=len(DIFFERENCE_EDGES) + 1).double()
