"""The key/value cache of the transformers engine, and the attention that reads it.

Rows are right-aligned: every row's newest token stands in the same column, a row's first token in its own `start` column, so that
one step of all rows is written with one copy and a row's mask never changes while it lives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION = "megarl_rollout"  # the name under which `attention` is registered with transformers


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [rows, heads, q, dim], key and value [rows, kv_heads, k, dim] -> [rows, q, heads, dim].

    In decoding (q = 1) the query heads that share a key head are attended as if they were queries of one head, so that grouped
    keys are never repeated. Without a mask (prefill) attention is causal."""
    rows, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    scale = kwargs["scaling"]
    if length == 1:
        grouped = query.view(rows, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scale)
        return out.view(rows, 1, heads, dim), None
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=heads != kv_heads)
    return out.transpose(1, 2), None


class KVCache:
    """Keys and values per layer [rows, kv_heads, columns, dim], and the mask [rows, columns] (0 from `start` on, else -inf).

    Passed to transformers' forward as `past_key_values`: its attention layers call `update` only. While `prefilling`, keys and values are
    kept aside for `place`; otherwise the one new column is written at `column`."""

    def __init__(self, layers: int, rows: int, kv_heads: int, dim: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        # Zeros, not empty: masked columns get weight 0, and 0 times an uninitialised NaN is NaN.
        self.keys = [torch.zeros(rows, kv_heads, columns, dim, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros_like(k) for k in self.keys]
        self.mask = torch.full((rows, columns), -torch.inf, dtype=dtype, device=device)
        self.column = 0  # columns in use: the next token goes here
        self.first = 0  # no live row starts before this column
        self.rows = 0  # live rows: 0..rows-1
        self.prefilling = False
        self._aside: list[tuple[Tensor, Tensor]] = []

    @property
    def columns(self) -> int:
        return self.mask.shape[1]

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What an attention layer attends to, its new keys and values [rows, kv_heads, new, dim] included."""
        if self.prefilling:
            self._aside.append((key, value))
            return key, value
        rows, column = self.rows, self.column
        keys, values = self.keys[layer], self.values[layer]
        keys[:rows, :, column] = key[:, :, 0]
        values[:rows, :, column] = value[:, :, 0]
        return keys[:rows, :, self.first : column + 1], values[:rows, :, self.first : column + 1]

    def decode_mask(self) -> Tensor:
        """Additive mask [rows, 1, 1, columns in use + 1] of the next step, whose token already counts as there."""
        return self.mask[: self.rows, None, None, self.first : self.column + 1]

    def place(self, lengths: Tensor, source: Tensor) -> None:
        """Appends one row per entry of `source`: prompt source[i] of the prefill just run, lengths[source[i]] tokens long, ending before
        `column` (the caller made room). lengths: int64 [prompts]; source: int64 [new rows]."""
        width = self._aside[0][0].shape[2]
        new = slice(self.rows, self.rows + source.numel())
        left = self.column - width
        # Right-padded prompts become right-aligned; what lies before a prompt's start is masked.
        at = torch.arange(width, device=lengths.device) - (width - lengths)[:, None]
        mask = torch.zeros(at.shape, dtype=self.mask.dtype, device=at.device).masked_fill_(at < 0, -torch.inf)
        self.mask[new] = -torch.inf
        self.mask[new, left : self.column] = mask[source]
        self.mask[new, self.column :] = 0
        index = at.clamp_(min=0)[:, None, :, None]
        for layer, pair in enumerate(self._aside):
            for cache, fresh in zip((self.keys[layer], self.values[layer]), pair, strict=True):
                aligned = fresh.gather(2, index.expand(-1, fresh.shape[1], -1, fresh.shape[3]))
                cache[new, :, left : self.column] = aligned[source]
        self._aside.clear()
        self.rows += source.numel()

    def move(self, source: Tensor, target: Tensor, rows: int) -> None:
        """Copies rows `source` over rows `target`, after which only the first `rows` rows live."""
        used = slice(self.first, self.column)
        for cache in (*self.keys, *self.values):
            cache[target, :, used] = cache[source, :, used]
        self.mask[target] = self.mask[source]
        self.rows = rows

    def relayout(self, column: int, columns: int) -> None:
        """Moves the live content, so that the next token's column becomes `column`, in a cache of `columns` columns."""
        used = self.column - self.first
        first = column - used
        for caches in (self.keys, self.values):
            for layer, old in enumerate(caches):
                fresh = old.new_zeros(old.shape[0], old.shape[1], columns, old.shape[3])
                fresh[: self.rows, :, first:column] = old[: self.rows, :, self.first : self.column]
                caches[layer] = fresh
        mask = torch.full((self.mask.shape[0], columns), -torch.inf, dtype=self.mask.dtype, device=self.mask.device)
        mask[: self.rows, first:column] = self.mask[: self.rows, self.first : self.column]
        mask[: self.rows, column:] = 0
        self.mask, self.first, self.column = mask, first, column
