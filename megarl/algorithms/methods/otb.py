"""Optimal token baseline (arXiv 2602.07078): of least variance at each position of a group."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8


def gradient_energy(logprobs: Tensor, squared_probs: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return W_t = sum over s <= t of 1 - 2 p_s + sum_v p_s(v)^2 within a response, float64 [T].

    Each term is |onehot - p_s|^2, the squared norm of the token's gradient to its logits.

    logprobs: of the sampled tokens, under the old policy [T]; squared_probs: sum_v p(v)^2 [T];
    mask: sampled tokens, bool [T], where the result is not 0"""
    energy = 1 - 2 * logprobs.double().exp() + squared_probs.double()
    energy = torch.where(mask, energy.clamp(min=0), 0.0)  # float32 numbers may round it below 0
    return torch.where(mask, _running_sum(energy, cu_seqlens), 0.0)


def sampled_positions(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return each sampled token's number among the sampled tokens of its response, from 0, int64 [T]."""
    return (_running_sum(mask.long(), cu_seqlens) - 1).clamp(min=0)


def baseline_sums(returns: Tensor, energy: Tensor, slots: Tensor, size: int) -> Tensor:
    """Return the sums of G W and of W, float64 [2, size].

    returns: G, rewards to go [T]; energy: W [T]; slots: int64 [T], equal for tokens that share a baseline"""
    sums = torch.zeros(2, size, dtype=torch.float64)
    return sums.index_add_(1, slots, torch.stack([returns.double() * energy, energy]))


def token_baselines(sums: Tensor, counts: Tensor) -> Tensor:
    """Return B = sum(G W) / (sum(W) + 1e-8), float64 [size].

    B is 0 where fewer than two responses have a token.

    sums: of `baseline_sums`; counts: int64 [size], responses with a token there"""
    return torch.where(counts > 1, sums[0] / (sums[1] + EPSILON), 0.0)


def _running_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the running sum of values [T] within each sequence."""
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    return sums[1:] - torch.repeat_interleave(sums[cu_seqlens[:-1]], cu_seqlens.diff())
