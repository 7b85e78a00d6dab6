"""Trust-region masking (arXiv 2512.23075): leave out responses whose policy has moved too far."""

from __future__ import annotations

import torch

from megarl.algorithms.losses import Objective, Tokens, sum_by_sequence


def trust_region(t: Tokens, max_kl: float, mean_kl: float) -> Objective:
    """Return r_t A_t in accepted responses, else 0. Denominators count all responses.

    A response is accepted if its largest KL of a token is <= max_kl and its mean KL <= mean_kl; 0: no such
    bound. KL(old policy || policy) at a token is estimated from the sampled one, as in the paper without full
    logits. The estimate is (log r_t)^2 / 2 for the largest, and r_t - 1 - log r_t for the mean."""
    assert t.log_ratio is not None and t.counted is not None and t.sequence_ids is not None
    difference = t.log_ratio.detach()
    estimate = difference.exp() - 1 - difference
    sums, counts = sum_by_sequence(torch.stack([estimate, t.counted.to(estimate.dtype)]), t.sequence_ids)
    largest = torch.zeros_like(sums).scatter_reduce(0, t.sequence_ids, difference.square() / 2, "amax")
    is_rejected = torch.zeros_like(sums, dtype=torch.bool)  # NaN is not rejected, so that it is not hidden
    for kl, bound in ((largest, max_kl), (sums / counts.clamp(min=1), mean_kl)):
        if bound:
            is_rejected |= kl > bound
    has_tokens = counts > 0
    statistics = {"responses": has_tokens.sum(), "accepted_responses": (has_tokens & ~is_rejected).sum()}
    rejected = is_rejected[t.sequence_ids]
    too_low, too_high = rejected & (t.ratio < 1), rejected & (t.ratio > 1)
    return Objective(t.ratio * t.advantage * ~rejected, too_low, too_high, statistics)
