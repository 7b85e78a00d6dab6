"""GSPO (arXiv 2507.18071): PPO's loss with one ratio per sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.losses import Objective, Tokens, ppo, sum_by_sequence


def gspo(t: Tokens) -> Objective:
    """Return PPO's objective with each token's `sequence_ratio` (GSPO eq. 5)."""
    assert t.log_ratio is not None and t.counted is not None and t.sequence_ids is not None
    return ppo(t._replace(ratio=sequence_ratio(t.log_ratio, t.counted, t.sequence_ids)))


def sequence_ratio(log_ratio: Tensor, counted: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return s_it = sg(s_i) pi_t / sg(pi_t), [T], with s_i = exp(mean of log r over the token's sequence).

    GSPO-token (section 4.3; verl's `compute_policy_loss_gspo`). With one advantage per sequence the gradient
    is GSPO's. With advantages by token (critic, teacher), each token follows its own.

    Args:
        log_ratio: log r_t, [T], 0 on uncounted tokens.
        counted: bool [T].
        sequence_ids: int [T]."""
    detached = log_ratio.detach()
    sums = sum_by_sequence(torch.stack([detached, counted.to(detached.dtype)]), sequence_ids)
    means = (sums[0] / sums[1].clamp(min=1))[sequence_ids]
    return means.exp() * (log_ratio - detached).exp()
