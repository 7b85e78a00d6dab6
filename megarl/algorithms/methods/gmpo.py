"""GMPO (arXiv 2507.20673): the geometric mean of a response's ratios."""

from __future__ import annotations

import torch

from megarl.algorithms.losses import Objective, Tokens, sum_by_sequence


def gmpo(t: Tokens) -> Objective:
    """Return A exp(mean over the response of d_t), with d_t = log r_t clipped on one side.

    d_t is at most clip_high if A > 0, else at least -clip_low: both are logarithms. With sample-level
    aggregation the loss is the mean over responses, as in the authors' code, verl and TRL."""
    assert t.log_ratio is not None and t.counted is not None and t.sequence_ids is not None
    is_positive = t.advantage > 0
    clipped = torch.where(is_positive, t.log_ratio.clamp(max=t.clip_high), t.log_ratio.clamp(min=-t.clip_low))
    sums = sum_by_sequence(torch.stack([clipped, t.counted.to(clipped.dtype)]), t.sequence_ids)
    geometric_means = (sums[0] / sums[1].clamp(min=1)).exp()
    too_low = (t.log_ratio < -t.clip_low) & ~is_positive
    too_high = (t.log_ratio > t.clip_high) & is_positive
    return Objective(t.advantage * geometric_means[t.sequence_ids], too_low, too_high)
