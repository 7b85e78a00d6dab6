"""The difference between the engine's and the trainer's log-probabilities for the same weights and tokens,
and factors of the policy loss's token weights: they correct for it (truncated importance sampling) or leave
out tokens that are too far off (masking)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.algorithms.losses import LOG_RATIO_LIMIT, log_ratio

Level = Literal["none", "token", "sequence"]

# Between the bins of a difference of log-probabilities: half decades from 1e-6 to 10 on either side of 0.
DIFFERENCE_EDGES = tuple(
    sign * 10 ** (-6 + half / 2)
    for sign, halves in ((-1, range(14, -1, -1)), (1, range(15)))
    for half in halves
)


def mismatch_sums(trainer_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums of the differences, float64 [4], and the largest |difference|, float64 0-dim. All inputs
    [T].

    The sums are of tokens, |difference|, r = pi_trainer / pi_engine and r - 1 - log r, to be summed over
    ranks; the largest is to be maximised over ranks. Differences are bounded by 20."""
    difference = log_ratio(trainer_logprobs.detach(), engine_logprobs.detach(), mask)[mask]
    absolute = difference.abs()
    count = torch.tensor(float(absolute.numel()), dtype=torch.float64, device=absolute.device)
    largest = absolute.max() if absolute.numel() else torch.zeros_like(count)
    kl = torch.expm1(difference) - difference
    return torch.stack([count, absolute.sum(), difference.exp().sum(), kl.sum()]), largest


def mismatch_metrics(sums: Tensor, largest: Tensor | float) -> dict[str, float]:
    """Return the metrics mismatch/* from the global results of `mismatch_sums`; kl: the k3 estimate of
    KL(pi_engine || pi_trainer). Without a token: no difference, ratio 1."""
    count, absolute, ratio, kl = sums.tolist()
    return {
        "mismatch/logprob_abs_mean": absolute / max(count, 1.0),
        "mismatch/logprob_abs_max": float(largest),
        "mismatch/ratio_mean": ratio / count if count else 1.0,
        "mismatch/kl": kl / max(count, 1.0),
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
    """Return factors of the token weights, float32 [T], 0 outside `mask`, and counts, float64 [3], to be
    summed over ranks: tokens, those whose ratio was above the cap, those that were left out. No gradient.

    With r_t = pi_trainer / pi_engine:

    weight  token: min(r_t, cap)
            sequence: min(prod_t r_t, cap) over the response, the importance weight of all of it
    keep    token: 0 where r_t is outside `bounds`
            sequence: 0 for a response whose geometric mean of r_t is outside, whatever its length

    Both at once: the product. A factor changes no denominator: what stays in the loss weighs what it weighed
    before, so that a batch of which little can be trusted moves the policy little. log r_t, and the logarithm
    of the product, are bounded by 20.

    trainer_logprobs, engine_logprobs: [T]. mask: bool [T]. sequence_ids: int64 [T]; responses must be whole.
    """
    if not cap > 0:
        raise ValueError(f"cap: must be > 0 (got {cap})")
    difference = log_ratio(trainer_logprobs.detach(), engine_logprobs.detach(), mask)
    sequences = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    zeros = torch.zeros(sequences, dtype=torch.float64, device=difference.device)
    sums = zeros.index_add(0, sequence_ids, difference)
    factors, capped = mask.double(), torch.zeros_like(mask)
    if weight != "none":
        products = sums.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = (difference if weight == "token" else products[sequence_ids]).exp()
        factors, capped = factors * ratio.clamp(max=cap), mask & (ratio > cap)
    kept = mask
    if keep != "none":
        means = sums / zeros.index_add(0, sequence_ids, mask.double()).clamp(min=1)
        ratio = (difference if keep == "token" else means[sequence_ids]).exp()
        kept = mask & (ratio >= bounds[0]) & (ratio <= bounds[1])
    counts = torch.stack([mask.sum(), capped.sum(), (mask & ~kept).sum()]).double()
    return torch.where(kept, factors, 0.0).float(), counts


def difference_histogram(trainer_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Count tokens by trainer minus engine log-probability, float64 [len(DIFFERENCE_EDGES) + 1]: bin i holds
    edge i-1 < difference <= edge i.

    All inputs [T]; tokens outside the mask do not count."""
    difference = (trainer_logprobs.double() - engine_logprobs.double())[mask]
    edges = torch.tensor(DIFFERENCE_EDGES, dtype=torch.float64, device=difference.device)
    return torch.bincount(torch.bucketize(difference, edges), minlength=len(DIFFERENCE_EDGES) + 1).double()
