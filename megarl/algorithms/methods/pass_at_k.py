"""Pass@k training (arXiv 2508.10751): the advantage of a response in random subsets of k of its group."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages import Responses, centre_by_group


def pass_at_k(r: Responses, k: int) -> Tensor:
    """Return the analytical advantages, float64 [n].

    With N responses, c of them right, pass@k is R = 1 - C(N - c, k) / C(N, k), and S = sqrt(R (1 - R)):

    right  (1 - R) / (S + 1e-6)
    wrong  (1 - R - C(N - c - 1, k - 1) / C(N - 1, k - 1)) / (S + 1e-6)

    A response is right if its reward is at least 1. k is at most N, which may be smaller than
    `rollout.group_size` where responses could not be graded. verl's `grpo_passk` is another method
    (arXiv 2503.19595)."""
    _, group, sizes = centre_by_group(r)
    is_right = r.rewards >= 1
    total = sizes.double()
    wrong = total - total.new_zeros(sizes.numel()).index_add(0, group, is_right.double())
    subset = total.clamp(max=k)
    failure = share_of_subsets(wrong, total, subset)
    scale = (failure * (1 - failure)).clamp(min=0).sqrt() + 1e-6
    of_right = failure / scale
    of_wrong = (failure - share_of_subsets(wrong - 1, total - 1, subset - 1)) / scale
    return torch.where(is_right, of_right[group], of_wrong[group])


def share_of_subsets(part: Tensor, whole: Tensor, size: Tensor) -> Tensor:
    """Return C(part, size) / C(whole, size), the share of subsets that are in the part; 0 if none is."""
    fits = part >= size
    part = torch.where(fits, part, whole)
    logs = [torch.lgamma(n + 1) - torch.lgamma(n - size + 1) for n in (part, whole)]
    return torch.where(fits, (logs[0] - logs[1]).exp(), 0.0)
