"""VESPO (arXiv 2602.10693): a smooth weight of the whole response's importance ratio."""

from __future__ import annotations

import torch

from megarl.algorithms.losses import LOG_RATIO_LIMIT, Objective, Tokens, sum_by_sequence


def vespo(
    t: Tokens, c1_positive: float, c2_positive: float, c1_negative: float, c2_negative: float
) -> Objective:
    """Return phi(W) A_t log pi_t without gradient through phi(W) = W^c1 exp(c2 (1 - W)) (appendix I).

    W is the product of the ratios of the response's tokens, not normalised by length, and log W is within
    +-20. c1 and c2 are those of the sign of A_t. The ratio is to the policy that sampled, as in the paper.
    The authors' repository takes the ratio to the old policy, times weights of the rollout."""
    assert t.log_ratio is not None and t.counted is not None and t.sequence_ids is not None
    sums = sum_by_sequence(t.log_ratio.detach()[None], t.sequence_ids)[0]
    log_w = sums.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[t.sequence_ids]
    is_positive = t.advantage >= 0
    c1 = torch.where(is_positive, c1_positive, c1_negative)
    c2 = torch.where(is_positive, c2_positive, c2_negative)
    weight = (c1 * log_w + c2 * (1 - log_w.exp())).exp()
    statistics = {"kernel": torch.where(t.counted, weight, 0.0).sum()}
    return Objective(weight * t.advantage * t.logprobs, t.ratio < t.low, t.ratio > t.high, statistics)
