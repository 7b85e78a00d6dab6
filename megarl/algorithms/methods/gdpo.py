"""GDPO (arXiv 2601.05242): normalise each part of the reward separately."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages import Responses, group_advantages, mean_and_variance, moments, whiten


def per_reward_advantages(r: Responses) -> Tensor:
    """Return advantages, float64 [n], 0 for uncounted responses.

    S_i = sum_k w_k (R_ik - mean(R_k)) / (std(R_k) + 1e-6) within the group
    A_i = (S_i - mean(S)) / sqrt(var(S) + 1e-8) over the batch's counted responses

    As in NVlabs/GDPO for TRL, S is whitened over responses, not tokens."""
    assert r.parts is not None and r.counted is not None
    total = torch.zeros(len(r.parts), dtype=torch.float64, device=r.parts.device)
    for weight, part in zip(r.weights, r.parts.double().unbind(1), strict=True):
        total += weight * group_advantages(Responses(part, r.group_ids))
    return whiten(total, r.counted, *mean_and_variance(moments(total, r.counted)))
