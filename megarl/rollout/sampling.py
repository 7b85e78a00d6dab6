"""Choosing tokens: counter-based random numbers and inverse-CDF sampling, so that a token is a function of its logits, the
response's seed and the position alone. Vectorised over rows; nothing here knows of models or caches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.rollout.engine import SamplingParams

BLOCK = 1024  # columns whose running sum is made at once
AT_ONCE = 16  # blocks that are float64 at once, to be summed
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


def _search(weights: Tensor, share: Tensor | float, *, right: bool) -> Tensor:
    """Per row of weights [rows, n], the first column up to which the sum exceeds (`right`) or reaches `share` ([rows, 1]) of the whole;
    int64 [rows, 1]. With `right` its weight is positive.

    Sums are float64: a float32 sum over 150,000 tokens is off by more than the rare ones' probability. That is no more than a sum for each
    block of columns, and a running sum within one of them: an array [rows, n] of float64 would be 300 MB at each token."""
    size = weights.shape[1]
    if size <= BLOCK:
        cdf = weights.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(cdf, share * cdf[:, -1:], right=right).clamp_(max=size - 1)
    blocks, whole = -(-size // BLOCK), size // BLOCK * BLOCK
    parts = [part.unflatten(1, (-1, BLOCK)) for part in weights[:, :whole].split(AT_ONCE * BLOCK, dim=1)]
    sums = torch.cat([part.sum(-1, dtype=torch.float64) for part in (*parts, weights[:, None, whole:])], dim=1)[:, :blocks]
    ends = sums.cumsum(-1)
    point = share * ends[:, -1:]
    block = torch.searchsorted(ends, point, right=right).clamp_(max=blocks - 1)
    inside = torch.arange(BLOCK, device=weights.device)
    columns = block * BLOCK + inside
    there = weights.gather(1, columns.clamp(max=size - 1)).where(columns < size, 0.0)
    before = torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    found = torch.searchsorted(before + there.cumsum(-1, dtype=torch.float64), point, right=right)
    # The two sums of a block may differ in their last bit.
    last = ((there > 0) * inside).amax(-1, keepdim=True)
    return block * BLOCK + torch.minimum(found, last)


def keep_top(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """probs [rows, vocab] with 0 outside the `top_k` largest (0: all) and, of what is left and renormalised, outside the smallest
    set whose mass reaches `top_p` (1: all). Equals of the last kept token are kept. The result is not renormalised."""
    if 0 < top_k < probs.shape[-1]:
        least = probs.topk(top_k, dim=-1).values[:, -1:]
        probs = probs.where(probs >= least, 0.0)
    if top_p < 1.0:
        ordered = probs.sort(dim=-1, descending=True).values
        least = ordered.gather(-1, _search(ordered, top_p, right=False))
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
        # A point strictly below the total, so that the token found has a positive probability.
        point = uniform(seeds, index)[:, None]
        tokens = _search(keep_top(logprobs.exp(), params.top_k, params.top_p), point, right=True)[:, 0]
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
