"""Seeded sampling, and seeds. SGLang's processes import this file, so it imports nothing of megarl.

A token depends only on its logits and seed: it is the inverse CDF at a counter-based random number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK = 1024  # columns of one running sum
AT_ONCE = 16  # blocks converted to float64
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64's constants, as signed 64-bit integers
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    stop: tuple[str, ...] = ()
    routing: bool = False
    sampling_sets: bool = False  # record each token's; needs 1 < top_k


def stop_window(stop: Sequence[str]) -> int:
    """Return how many newest tokens may contain a stop text; 0 without any."""
    return max((len(text.encode()) + 8 for text in stop), default=0)


def routing_array(chosen: np.ndarray, tokens: int, experts: int) -> np.ndarray:
    """Return routed experts of prompt and response, uint8 or int16 [tokens, layers, topk].

    Missing entries are the dtype's maximum: no engine feeds the last token to the model.

    chosen: integers [t, layers, topk], t <= tokens"""
    dtype: Any = np.uint8 if experts < 256 else np.int16
    routing = np.full((tokens, *chosen.shape[1:]), np.iinfo(dtype).max, dtype=dtype)
    routing[: len(chosen)] = chosen
    return routing


def _hash(salt: str, *numbers: int) -> int:
    text = ":".join([salt, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def response_seed(run_seed: int, step: int, prompt_uid: int, index: int) -> int:
    return _hash("megarl.rollout", run_seed, step, prompt_uid, index)


def turn_seed(seed: int, turn: int) -> int:
    return _hash("megarl.turn", seed, turn) if turn else seed


def environment_seed(seed: int) -> int:
    return _hash("megarl.environment", seed)


def evaluation_seed(run_seed: int, problem_uid: int, index: int) -> int:
    """Return an answer's seed, equal at every step."""
    return _hash("megarl.evaluation", run_seed, problem_uid, index)


def shuffle_seed(run_seed: int, step: int) -> int:
    return _hash("megarl.shuffle", run_seed, step)


def selection_seed(run_seed: int, step: int, update: int, group: int, index: int) -> int:
    return _hash("megarl.selection", run_seed, step, update, group, index)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift int64 right, filling with zeros (torch's shift is arithmetic)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds: Tensor, index: Tensor) -> Tensor:
    """Return output number `index` (from 0) of splitmix64 with `seeds`, as float64 in [0, 1).

    Integer arithmetic gives equal results on every device. seeds, index: int64 of one shape"""
    z = seeds + (index + 1) * _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return _shift(z ^ _shift(z, 31), 11).double() * 2.0**-53


def _search(weights: Tensor, share: Tensor | float, *, right: bool) -> Tensor:
    """Return the first column whose running sum exceeds (`right`) or reaches `share` of the row's sum.

    Sums are float64, as float32's error exceeds rare tokens' probability. They run over blocks, then within
    one, to save memory.

    weights: [rows, n]; share: [rows, 1]. Returns int64 [rows, 1]; with `right` their weights are positive."""
    size = weights.shape[1]
    if size <= BLOCK:
        cdf = weights.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(cdf, share * cdf[:, -1:], right=right).clamp_(max=size - 1)
    num_blocks, full_columns = -(-size // BLOCK), size // BLOCK * BLOCK
    chunks = [
        chunk.unflatten(1, (-1, BLOCK)) for chunk in weights[:, :full_columns].split(AT_ONCE * BLOCK, dim=1)
    ]
    block_sums = torch.cat(
        [chunk.sum(-1, dtype=torch.float64) for chunk in (*chunks, weights[:, None, full_columns:])], dim=1
    )[:, :num_blocks]
    cumulative_sums = block_sums.cumsum(-1)
    threshold = share * cumulative_sums[:, -1:]
    block = torch.searchsorted(cumulative_sums, threshold, right=right).clamp_(max=num_blocks - 1)
    offsets = torch.arange(BLOCK, device=weights.device)
    columns = block * BLOCK + offsets
    block_weights = weights.gather(1, columns.clamp(max=size - 1)).where(columns < size, 0.0)
    preceding_sum = torch.nn.functional.pad(cumulative_sums, (1, 0)).gather(1, block)
    offset = torch.searchsorted(
        preceding_sum + block_weights.cumsum(-1, dtype=torch.float64), threshold, right=right
    )
    # A block's two sums may differ by a rounding error.
    last_offset = ((block_weights > 0) * offsets).amax(-1, keepdim=True)
    return block * BLOCK + torch.minimum(offset, last_offset)


def keep_top(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set probs [rows, vocab] to 0 outside the `top_k` largest (0: all), then outside the top-p set.

    Ties with the last one are kept. The result is not renormalised."""
    if 0 < top_k < probs.shape[-1]:
        threshold = probs.topk(top_k, dim=-1).values[:, -1:]
        probs = probs.where(probs >= threshold, 0.0)
    if top_p < 1.0:
        sorted_probs = probs.sort(dim=-1, descending=True).values
        threshold = sorted_probs.gather(-1, _search(sorted_probs, top_p, right=False))
        probs = probs.where(probs >= threshold, 0.0)
    return probs


def choose(logits: Tensor, seeds: Tensor, index: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Sample token number `index` of responses.

    Args:
        logits: [rows, vocab]; seeds and index: int64 [rows]

    Returns tokens int64 [rows], and their log-probs float32 [rows] under the whole distribution after
    temperature (greedy: temperature 1), NaN in rows with NaN logits. See `choose_with_set`."""
    logits = logits.float()
    if params.temperature == 0:
        logprobs = torch.log_softmax(logits, dim=-1)
        tokens = logits.argmax(-1)
    else:
        logprobs = torch.log_softmax(
            logits if params.temperature == 1 else logits / params.temperature, dim=-1
        )
        # The share is below 1, so that the token has a positive probability.
        share = uniform(seeds, index)[:, None]
        tokens = _search(keep_top(logprobs.exp(), params.top_k, params.top_p), share, right=True)[:, 0]
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def choose_with_set(
    logits: Tensor, seeds: Tensor, index: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample as `choose`, and return the sets that tokens were sampled from, int32 [rows, top_k].

    A set has the ids that top-k and top-p keep, the most probable first, then -1. Of ids that tie with the
    last of top-k, only some are kept. Log-probs are renormalised over the set, see `choose` for arguments."""
    logprobs = torch.log_softmax(logits.float() / params.temperature, dim=-1)
    kept = keep_top(logprobs.exp(), params.top_k, params.top_p)
    probs, ids = kept.topk(min(params.top_k, kept.shape[-1]), dim=-1)
    weights = torch.zeros_like(kept).scatter_(-1, ids, probs)
    tokens = _search(weights, uniform(seeds, index)[:, None], right=True)
    normaliser = logprobs.gather(-1, ids).masked_fill(probs == 0, -torch.inf).logsumexp(-1)
    sets = ids.masked_fill(probs == 0, -1).int()
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0] - normaliser, sets
