"""RLOO (arXiv 2402.14740)."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.advantages import Responses, centre_by_group


def leave_one_out(r: Responses) -> Tensor:
    """Return R_i - mean of the others' R = G / (G - 1) (R_i - mean(R)), float64 [n]; 0 in a group of one."""
    centred, group, sizes = centre_by_group(r)
    scale = sizes.double() / (sizes - 1).clamp(min=1)
    return centred * scale[group]
