"""FIPO (arXiv 2603.19835, as its authors' code): weigh a token by its successors' probability ratios."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.algorithms.losses import Objective, Tokens, ppo


def fipo(t: Tokens, half_life: float, low: float, high: float, limit: float) -> Objective:
    """Return PPO's objective with advantages times `future_factors`."""
    assert t.log_ratio is not None and t.counted is not None and t.sequence_ids is not None
    factors = future_factors(
        *(t.log_ratio, t.advantage, t.sequence_ids), half_life=half_life, low=low, high=high, limit=limit
    )
    objective = ppo(t._replace(advantage=t.advantage * factors))
    factor_sum = torch.where(t.counted, factors, 0.0).sum()
    return objective._replace(statistics={**objective.statistics, "future_factor": factor_sum})


@torch.no_grad()
def future_factors(
    log_ratio: Tensor,
    advantage: Tensor,
    sequence_ids: Tensor,
    *,
    half_life: float,
    low: float,
    high: float,
    limit: float,
) -> Tensor:
    """Return f_t = clip(exp F_t, low, high), F_t = sum over k >= t of 2^(-(k - t) / half_life) log r_k.

    k ends with the response. The sum omits tokens with r_k > `limit`. Such a token with A_t < 0 has f_t
    within [0.8, 1] (1 if `low` is 1, the default), so that it is not pushed further.

    Args:
        log_ratio: log r_t, float64 [T], 0 on uncounted tokens.
        advantage: A_t, float64 [T].
        sequence_ids: int [T]; the tokens of a sequence are contiguous."""
    is_above_limit, decay, step = log_ratio > math.log(limit), 2 ** (-1 / half_life), 1
    future = torch.where(is_above_limit, 0.0, log_ratio)
    # `future` sums over `step` tokens. Each round doubles `step`.
    while bool((is_same_sequence := sequence_ids[step:] == sequence_ids[:-step]).any()):
        shifted = torch.where(is_same_sequence, future[step:], 0.0)
        future = torch.cat([future[:-step] + decay**step * shifted, future[-step:]])
        step *= 2
    factors = future.exp().clamp(low, high)
    return torch.where(is_above_limit & (advantage < 0), factors.clamp(0.8, 1.0), factors)
