"""Dr. GRPO (arXiv 2503.20783): no division by the group's standard deviation."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.advantages import Responses, centre_by_group


def group_mean(r: Responses) -> Tensor:
    """Return R_i - mean(R) within the group, float64 [n]."""
    return centre_by_group(r).rewards
