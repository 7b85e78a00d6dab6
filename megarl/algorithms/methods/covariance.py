"""Clip-Cov and KL-Cov (arXiv 2505.22617): tokens of high covariance are masked or penalised.

megarl/training/methods/covariance.py selects them in the whole mini-batch."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.losses import Objective, Tokens, ppo


def clip_cov(t: Tokens) -> Objective:
    """Return PPO's objective, and 0 on the selected tokens."""
    assert t.selected is not None
    objective, too_low, too_high, _ = ppo(t)
    return Objective(objective * ~t.selected, too_low, too_high, _statistics(t))


def kl_cov(t: Tokens, kl_weight: float) -> Objective:
    """Return r_t A_t, unclipped, minus kl_weight |log r_t| on the selected tokens.

    The KL estimate is that of PRIME-RL/Entropy-Mechanism-of-RL."""
    assert t.selected is not None
    penalty = kl_weight * t.ratio.log().abs() * t.selected
    return Objective(t.ratio * t.advantage - penalty, t.ratio < t.low, t.ratio > t.high, _statistics(t))


def _statistics(t: Tokens) -> dict[str, Tensor]:
    assert t.selected is not None and t.counted is not None
    return {"selected": (t.selected & t.counted).sum()}
