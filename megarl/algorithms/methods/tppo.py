"""T-PPO (arXiv 2506.15050): generalised advantages of windows of unfinished responses.

It follows the authors' implementation (verl pull request 3728).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages import gae


def extended_gae(
    rewards: Tensor,
    values: Tensor,
    drawn: Tensor,
    cu_seqlens: Tensor,
    lam: float | Tensor,
    unfinished: Tensor,
    gamma: float = 1.0,
    tail: int = 0,
) -> Tensor:
    """Return the advantages of windows of responses (EGAE), as `gae`.

    An unfinished response continues behind its window. The value there is taken to be that of the state
    before: V(s_l) = V(s_{l-1}), so that delta_{l-1} = R_{l-1} + (gamma - 1) V(s_{l-1}). The last `tail`
    tokens of such a window get 0.

    Args:
        drawn: bool [T], the tokens sampled in this step, the last ones of each response.
        unfinished: bool [n].
        others: as in `gae`.
    """
    own, after = drawn.nonzero().squeeze(-1), None
    if own.numel():
        last = own[(torch.searchsorted(own, cu_seqlens[1:]) - 1).clamp(min=0)]
        after = torch.where(unfinished, values[last].double(), 0.0)
    advantages = gae(rewards, values, drawn, cu_seqlens, lam, gamma, after)
    return advantages.masked_fill(window_tail(drawn, cu_seqlens, unfinished, tail), 0.0)


def window_tail(drawn: Tensor, cu_seqlens: Tensor, unfinished: Tensor, tail: int) -> Tensor:
    """Return the last `tail` tokens of the windows of unfinished responses, bool [T]."""
    behind = drawn.flip(0).cumsum(0).flip(0)  # of a token, those of this and all later windows from it on
    ends = torch.cat([behind, behind.new_zeros(1)])[cu_seqlens[1:]]
    left = behind - torch.repeat_interleave(ends, cu_seqlens.diff())
    return drawn & (left <= tail) & torch.repeat_interleave(unfinished, cu_seqlens.diff())
