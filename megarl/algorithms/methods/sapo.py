"""SAPO (arXiv 2511.20347): a smooth gate in place of the clip."""

from __future__ import annotations

import torch

from megarl.algorithms.losses import Objective, Tokens


def sapo(t: Tokens, tau_positive: float, tau_negative: float) -> Objective:
    """Return 4 / tau sigmoid(tau (r_t - 1)) A_t, with tau_positive for A_t > 0, else tau_negative.

    The gate's slope is 1 at r_t = 1."""
    tau = torch.where(t.advantage > 0, tau_positive, tau_negative)
    # Not torch.sigmoid: its last bit depends on a token's position in the tensor.
    gate = 1 / (1 + torch.exp(tau * (1 - t.ratio)))
    return Objective(4 / tau * gate * t.advantage, t.ratio < t.low, t.ratio > t.high)
