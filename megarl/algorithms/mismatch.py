"""How far the engine's log-probabilities are from the trainer's, for the same weights and tokens, and importance weights
that would correct for it."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.losses import LOG_RATIO_LIMIT


def _log_ratio(trainer_logprobs: Tensor, engine_logprobs: Tensor) -> Tensor:
    return (trainer_logprobs.detach().double() - engine_logprobs.detach().double()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def mismatch_sums(trainer_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(float64 [3]: tokens, sum of |difference|, sum of pi_trainer / pi_engine, to be summed over ranks;
    float64 0-dim: largest |difference|, to be maximised over ranks). All inputs [T]; differences are bounded by 20."""
    log_ratio = _log_ratio(trainer_logprobs[mask], engine_logprobs[mask])
    absolute = log_ratio.abs()
    count = torch.tensor(float(absolute.numel()), dtype=torch.float64, device=absolute.device)
    largest = absolute.max() if absolute.numel() else torch.zeros_like(count)
    return torch.stack([count, absolute.sum(), log_ratio.exp().sum()]), largest


def mismatch_metrics(sums: Tensor, largest: Tensor | float) -> dict[str, float]:
    """The metrics mismatch/* from the global results of `mismatch_sums`. Of no token: no difference, ratio 1."""
    count, absolute, ratio = sums.tolist()
    return {
        "mismatch/logprob_abs_mean": absolute / max(count, 1.0),
        "mismatch/logprob_abs_max": float(largest),
        "mismatch/ratio_mean": ratio / count if count else 1.0,
    }


def truncated_importance_weights(trainer_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    """min(pi_trainer / pi_engine, cap), float32 [T], 0 outside the mask: factors of a loss's token weights that correct for
    responses drawn by an engine whose probabilities differ (truncated importance sampling). No gradient.

    cap: largest weight, > 0; about 2 is usual.
    """
    if not cap > 0:
        raise ValueError(f"cap: must be > 0 (got {cap})")
    trainer = torch.where(mask, trainer_logprobs, 0.0)
    engine = torch.where(mask, engine_logprobs, 0.0)
    return torch.where(mask, _log_ratio(trainer, engine).exp().clamp(max=cap), 0.0).float()
