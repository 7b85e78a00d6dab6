"""T-PPO (arXiv 2506.15050, authors' code: verl pull request 3728): GAE on windows of responses."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages import gae


def extended_gae(
    rewards: Tensor,
    values: Tensor,
    sampled: Tensor,
    cu_seqlens: Tensor,
    lam: float | Tensor,
    unfinished: Tensor,
    gamma: float = 1.0,
    tail: int = 0,
) -> Tensor:
    """Return the advantages of windows (EGAE), as `gae`.

    After an unfinished response's window V(s_l) = V(s_{l-1}), so that
    delta_{l-1} = R_{l-1} + (gamma - 1) V(s_{l-1}). The window's last `tail` tokens get 0.

    Args:
        sampled: bool [T], tokens sampled in this step, the last of each response.
        unfinished: bool [n]."""
    positions, last_values = sampled.nonzero().squeeze(-1), None
    if positions.numel():
        last_positions = positions[(torch.searchsorted(positions, cu_seqlens[1:]) - 1).clamp(min=0)]
        last_values = torch.where(unfinished, values[last_positions].double(), 0.0)
    advantages = gae(rewards, values, sampled, cu_seqlens, lam, gamma, last_values)
    return advantages.masked_fill(window_tail(sampled, cu_seqlens, unfinished, tail), 0.0)


def window_tail(sampled: Tensor, cu_seqlens: Tensor, unfinished: Tensor, tail: int) -> Tensor:
    """Return the last `tail` tokens of unfinished responses' windows, bool [T]."""
    pack_remaining = sampled.flip(0).cumsum(0).flip(0)  # sampled tokens from here to the end of the pack
    remaining_at_ends = torch.cat([pack_remaining, pack_remaining.new_zeros(1)])[cu_seqlens[1:]]
    remaining = pack_remaining - torch.repeat_interleave(remaining_at_ends, cu_seqlens.diff())
    return sampled & (remaining <= tail) & torch.repeat_interleave(unfinished, cu_seqlens.diff())
