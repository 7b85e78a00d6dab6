"""SAO's policy loss (arXiv 2607.07508)."""

from __future__ import annotations

import torch

from megarl.algorithms.losses import Objective, Tokens


def masked(t: Tokens) -> Objective:
    """Return r_t A_t where r_t is inside the open interval, else 0 (eq. 1 to 3).

    The paper's f(r_t) A_t log pi_t, with f detached, has the same gradient."""
    too_low, too_high = t.ratio <= t.low, t.ratio >= t.high
    return Objective(torch.where(too_low | too_high, 0.0, t.ratio * t.advantage), too_low, too_high)
