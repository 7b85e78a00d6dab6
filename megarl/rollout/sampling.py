"""Choosing tokens: counter-based random numbers and inverse-CDF sampling, so that a token is a function of its logits, the
response's seed and the position alone. Vectorised over rows; nothing here knows of models or caches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.rollout.engine import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64's constants, as signed 64-bit integers
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds: Tensor, index: Tensor) -> Tensor:
    """Element-wise output number `index` (from 0) of splitmix64 started at `seeds`, as float64 in [0, 1).

    seeds and index: int64 of one shape. Integer arithmetic only, so the same on every device."""
    z = seeds + (index + 1) * _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return _shift(z ^ _shift(z, 31), 11).double() * 2.0**-53


def keep_top(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """probs [rows, vocab] with 0 outside the `top_k` largest (0: all) and, of what is left and renormalised, outside the smallest
    set whose mass reaches `top_p` (1: all). Equals of the last kept token are kept. The result is not renormalised."""
    if 0 < top_k < probs.shape[-1]:
        least = probs.topk(top_k, dim=-1).values[:, -1:]
        probs = probs.where(probs >= least, 0.0)
    if top_p < 1.0:
        ordered = probs.sort(dim=-1, descending=True).values
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        kept = before < top_p * ordered.sum(-1, keepdim=True, dtype=torch.float64)
        least = ordered.where(kept, 1.0).amin(-1, keepdim=True)
        probs = probs.where(probs >= least, 0.0)
    return probs


def choose(logits: Tensor, seeds: Tensor, index: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The tokens number `index` of responses with `seeds`, and their log-probabilities.

    logits [rows, vocab]; seeds and index int64 [rows]. Returns tokens int64 [rows] and log-probabilities float32 [rows] under the
    whole temperature-scaled distribution (greedy: temperature 1). Where a row holds NaN, so does its log-probability."""
    logits = logits.float()
    if params.temperature == 0:
        logprobs = torch.log_softmax(logits, dim=-1)
        tokens = logits.argmax(-1)
    else:
        logprobs = torch.log_softmax(logits if params.temperature == 1 else logits / params.temperature, dim=-1)
        cdf = keep_top(logprobs.exp(), params.top_k, params.top_p).cumsum(-1, dtype=torch.float64)
        # Strictly below the total, so that the token found has a positive probability; float64 because a float32 sum over 150,000
        # tokens is off by more than the rare ones' probability.
        point = uniform(seeds, index)[:, None] * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, point, right=True).clamp_(max=logits.shape[-1] - 1)[:, 0]
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
