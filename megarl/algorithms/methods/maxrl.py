"""MaxRL (arXiv 2602.02710): rewards relative to the group's success rate."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages import Responses, centre_by_group


def relative_rewards(r: Responses) -> Tensor:
    """Return (R_i - mean(R)) / mean(R) within the group, float64 [n]; 0 if mean(R) <= 0.

    p is the prompt's success rate, N the group's size. With rewards of 0 and 1 the expected gradient is that
    of the first N - 1 terms of log p = -sum_k (1 - p)^k / k. The authors' code and prime-rl disagree on a
    1e-6 in the denominator. Here it is left out, as in the paper."""
    centred, group, sizes = centre_by_group(r)
    rewards = r.rewards.double()
    means = (rewards.new_zeros(sizes.numel()).index_add(0, group, rewards) / sizes)[group]
    return torch.where(means > 0, centred / means, 0.0)
