"""DPPO (arXiv 2602.04879; sail-sg/Stable-RL): a trust region on probabilities instead of ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.losses import Objective, Tokens


def dppo_tv(t: Tokens, ratio_cap: float) -> Objective:
    """Return `_objective` by the total variation: DPPO-Binary-TV, or DPPO-TopK-TV."""
    new, old = (logprobs.exp() for logprobs in _compared_logprobs(t))
    return _objective(t, ratio_cap, (new - old).abs().sum(-1) / 2)


def dppo_kl(t: Tokens, ratio_cap: float) -> Objective:
    """Return `_objective` by KL(pi_old || pi): DPPO-Binary-KL, or DPPO-TopK-KL."""
    new, old = _compared_logprobs(t)
    return _objective(t, ratio_cap, (old.exp() * (old - new)).sum(-1))


def _compared_logprobs(t: Tokens) -> list[Tensor]:
    """Return log pi and log pi_old, [T, 2 + k], of the token, the top-k tokens, and all others.

    The others' probability is at least 1e-8, since rounding could make it negative."""
    logprobs_by_policy = []
    top_k_by_policy = t.top_k_logprobs or (None, None)
    for token_logprobs, top_k in zip((t.logprobs.detach(), t.old_logprobs), top_k_by_policy, strict=True):
        logprobs = token_logprobs[:, None]
        if top_k is not None:
            logprobs = torch.cat([logprobs, top_k], -1)
        other_logprobs = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=1e-8).log()
        logprobs_by_policy.append(torch.cat([logprobs, other_logprobs], -1))
    return logprobs_by_policy


def _objective(t: Tokens, ratio_cap: float, divergence: Tensor) -> Objective:
    """Return min(r_t, ratio_cap) A_t log pi_t without gradient through the ratio; 0 outside the region.

    A token is outside if its probability moved in the direction of A_t and the divergence [T] exceeds
    clip_high (A_t > 0) or clip_low (A_t <= 0)."""
    change = t.logprobs.detach() - t.old_logprobs
    too_low = (divergence > t.clip_low) & (change < 0) & (t.advantage <= 0)
    too_high = (divergence > t.clip_high) & (change > 0) & (t.advantage > 0)
    objective = t.ratio.clamp(max=ratio_cap).detach() * t.advantage * t.logprobs
    return Objective(torch.where(too_low | too_high, 0.0, objective), too_low, too_high)
