"""CISPO (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

from megarl.algorithms.losses import Objective, Tokens


def cispo(t: Tokens) -> Objective:
    """Return clip(r_t) A_t log pi_t, without gradient through the ratio (eq. 4 and 5)."""
    objective = t.ratio.clamp(t.low, t.high).detach() * t.advantage * t.logprobs
    return Objective(objective, t.ratio < t.low, t.ratio > t.high)
