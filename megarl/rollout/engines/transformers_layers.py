"""Batch-invariant layers for transformers' models: linear layers, a KV cache, and attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megarl.model.delta_net import convolve, delta_rule, delta_step, gated_norm, gates
from megarl.weights.families import Sizes

ATTENTION = "megarl_rollout"  # name of `attention` in transformers
# Keys of a chunk of attention. CUDA's memory-efficient kernel needs a multiple of 8 for bf16 masks.
COLUMNS = 64
NARROW = 256  # hidden size below which the overhead of a call costs more than its product
LARGEST = 64  # rows of a wide layer's product


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def is_batch_invariant(tensor: Tensor) -> bool:
    """Return whether its products are batch-invariant: in float32 on a CPU."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


class Block(NamedTuple):
    """The shapes in which linear layers multiply. A batch is a whole number of blocks."""

    rows: int
    fewest: int = 1  # blocks in a batch
    # Most rows of a product; the rows of the last one are a power of two. 0: one batched product.
    largest: int = 0

    @staticmethod
    def make(weights: Sequence[Tensor], hidden: int) -> Block:
        """Return the block for a model with these weights, which are overwritten.

        A narrow model multiplies at least two blocks, as MKL has another code path for one. Without batch
        invariance, blocks only limit the number of shapes."""
        if not is_batch_invariant(weights[0]):
            return Block(8)
        return Block(16, 2) if hidden < NARROW else Block(find_fewest_rows(weights), largest=LARGEST)

    def pad(self, rows: int) -> int:
        if not self.largest:
            return max(round_up(rows, self.rows), self.rows * self.fewest)
        tail = rows % self.largest
        return rows - tail + (max(self.rows, 1 << (tail - 1).bit_length()) if tail or not rows else 0)

    def get_capacity(self, rows: int) -> int:
        """Return the rows to allocate, with room for one more block of new responses."""
        return self.pad(rows) + (self.largest or self.pad(0))


def find_fewest_rows(weights: Iterable[Tensor]) -> int:
    """Return the fewest rows of a product whose order of summation is that of LARGEST rows.

    It depends on processor and library, so results on random numbers, which overwrite the weights, are
    compared."""
    generator, fewest_rows = torch.Generator().manual_seed(0), 8
    for weight in {weight.shape: weight for weight in weights}.values():
        weight.normal_(generator=generator)
        rows = torch.randn(1, weight.shape[1], generator=generator).repeat(LARGEST, 1)
        expected, num_rows = F.linear(rows, weight)[0], LARGEST // 2
        while num_rows >= fewest_rows and bool((F.linear(rows[:num_rows], weight) == expected).all()):
            num_rows //= 2
        fewest_rows = max(fewest_rows, 2 * num_rows)
    return fewest_rows


class BlockLinear(nn.Linear):
    block: Block

    def forward(self, input: Tensor) -> Tensor:
        shape, block = (*input.shape[:-1], self.out_features), self.block
        count = input.numel() // self.in_features
        if padding := block.pad(count) - count:
            input = F.pad(input.reshape(-1, self.in_features), (0, 0, 0, padding))
        if block.largest:
            rows = input.reshape(-1, self.in_features)
            outputs = [F.linear(chunk, self.weight, self.bias) for chunk in rows.split(block.largest)]
            out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        else:
            if input.dim() != 3 or input.shape[1] != block.rows:
                input = input.reshape(-1, block.rows, self.in_features)
            out = torch.bmm(input, self.weight.t().expand(len(input), -1, -1))
            if self.bias is not None:
                out += self.bias
        if padding:
            out = out.view(-1, self.out_features)[:count]
        return out if out.shape == shape else out.view(shape)


class KVCache:
    """Keys and values per layer, [rows, kv_heads, columns, dim].

    Position p is in column p. Multi-latent attention has latents and rotated keys, one head each. Linear
    attention has a state per row.

    It is transformers' `past_key_values`, of which attention layers call only `update`."""

    def __init__(self, model: Any, experts: int, set_width: int = 0) -> None:
        config, dtype, device = model.config, model.dtype, model.device
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        widths = (getattr(config, "head_dim", None) or config.hidden_size // heads,) * 2
        if hasattr(config, "kv_lora_rank"):
            kv_heads, widths = 1, (config.kv_lora_rank, config.qk_rope_head_dim)
        self.rows = self.columns = 0
        sizes = Sizes.from_config(config.to_dict())
        layer_heads = [0 if layer in sizes.linear else kv_heads for layer in range(layers)]
        self.kv_heads = kv_heads
        self.keys, self.values = (
            [torch.zeros(0, heads, 0, width, dtype=dtype, device=device) for heads in layer_heads]
            for width in widths
        )
        self.inputs = {
            n: torch.zeros(0, sizes.mixed, sizes.conv - 1, dtype=dtype, device=device) for n in sizes.linear
        }
        state_shape = 0, sizes.value_heads, sizes.key // max(sizes.key_heads, 1), sizes.value_dim
        self.states = {n: torch.zeros(state_shape, device=device) for n in sizes.linear}
        self.tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(0, 0, device=device)
        self.sets = torch.zeros(0, 0, set_width, dtype=torch.int32, device=device)
        routing_shape = layers, config.num_experts_per_tok if experts else 0
        self.chosen = torch.zeros(0, 0, *routing_shape, dtype=torch.int16, device=device)
        self.prefilling, self.start = False, 0
        self.before = self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self._aside: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's keys and values. Return those of all columns.

        key, value: [segments, kv_heads, tokens, dim]; when decoding [blocks, kv_heads, rows, dim]"""
        if self.prefilling:
            self._aside[layer] = key, value
            if not self.start:
                return key, value
            pairs = zip((self.keys[layer], self.values[layer]), (key, value), strict=True)
            key, value = (torch.cat([old[self.before, :, : self.start], new], 2) for old, new in pairs)
            return key, value
        keys, values = self.keys[layer], self.values[layer]
        rows = len(key) * key.shape[2]
        for cache, tensor in ((keys, key), (values, value)):
            dim = tensor.shape[3]
            cache.view(-1, dim).index_copy_(0, self._at, tensor.transpose(1, 2).reshape(-1, dim))
        return keys[:rows, :, : self._seen], values[:rows, :, : self._seen]

    @contextmanager
    def prefill(self, start: int, before: Tensor, lengths: Tensor) -> Iterator[None]:
        """Keep a forward pass's keys and values for `place`.

        start: first column; before: int64 [segments], rows of the cache with the columns before `start`
        lengths: int64 [segments], tokens up to each segment's end"""
        self.prefilling, self.start, self.before, self.lengths = True, start, before, lengths
        try:
            yield
        finally:
            self.prefilling = False

    def keep(self, layer: int, inputs: Tensor, state: Tensor) -> None:
        if self.prefilling:
            self._aside[layer] = inputs, state
            return
        self.inputs[layer][: len(inputs)], self.states[layer][: len(state)] = inputs, state

    def attend(self, position: Tensor, longest: int) -> Tensor:
        """Prepare a decoding step. Return its additive mask, [rows, 1, 1, columns].

        position: int64 [rows], at most `longest`"""
        self._seen = round_up(longest + 1, COLUMNS)
        rows, position = len(position), position[:, None]
        self._at = (self._starts_of_heads[:rows] + position).view(-1)
        mask = torch.zeros(rows, self._seen, dtype=self.keys[0].dtype, device=position.device)
        return mask.masked_fill_(self._numbers[: self._seen] > position, -torch.inf)[:, None, None]

    def place(self, rows: Tensor, source: Tensor, chosen: Tensor | None) -> None:
        """Write the prefilled segments `source` into `rows`, int64 [n] each.

        chosen: experts, [segments, tokens, layers, topk]"""
        for layer, tensors in self._aside.items():
            if layer in self.states:
                self.inputs[layer][rows], self.states[layer][rows] = (tensor[source] for tensor in tensors)
                continue
            for cache, tensor in zip((self.keys[layer], self.values[layer]), tensors, strict=True):
                cache[rows, :, self.start : self.start + tensor.shape[2]] = tensor[source]
        self._aside.clear()
        if chosen is not None:
            self.chosen[rows, self.start : self.start + chosen.shape[1]] = chosen[source]

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        for cache in (*self.keys, *self.values):
            cache[target, :, :columns] = cache[source, :, :columns]
        for state in (*self.inputs.values(), *self.states.values()):
            state[target] = state[source]
        for tensor in (self.tokens, self.logprobs, self.chosen, self.sets):
            tensor[target, :columns] = tensor[source, :columns]

    def reserve(self, rows: int, columns: int) -> None:
        old_rows, old_columns = self.rows, self.columns
        self.rows, self.columns = max(rows, old_rows), max(round_up(columns, COLUMNS), old_columns)

        def grow(old: Tensor, dim: int) -> Tensor:
            shape = [self.rows, *old.shape[1:dim], self.columns, *old.shape[dim + 1 :]]
            # Masked columns weigh 0, but 0 times an uninitialised NaN is NaN.
            tensor = old.new_zeros(shape)
            tensor[:old_rows].narrow(dim, 0, old_columns).copy_(old)
            return tensor

        for caches in (self.keys, self.values):
            for layer, old in enumerate(caches):
                caches[layer] = grow(old, 2)
        for states in (self.inputs, self.states):
            for layer, old in states.items():
                states[layer] = F.pad(old, (0, 0) * (old.dim() - 1) + (0, self.rows - old_rows))
        self.tokens, self.logprobs = grow(self.tokens, 1), grow(self.logprobs, 1)
        self.chosen, self.sets = grow(self.chosen, 1), grow(self.sets, 1)
        heads, device = self.kv_heads, self.tokens.device
        self.starts = torch.arange(self.rows, device=device) * self.columns
        self._starts_of_heads = torch.arange(self.rows * heads, device=device).view(-1, heads) * self.columns
        self._numbers = torch.arange(self.columns, device=device)


class CachedDeltaNet(Qwen3_5GatedDeltaNet):
    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return inputs of the convolution, gates, alpha and beta, [..., tokens, n]."""
        layers = self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b
        channels, gate, alpha, beta = (layer(hidden_states) for layer in layers)
        return channels, gate, alpha, beta

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Any = None, **_: Any
    ) -> Tensor:
        """Take hidden_states [prompts, tokens, hidden]; when decoding [blocks, rows, hidden]."""
        cache, layer, kernel = cache_params, self.layer_idx, self.conv1d.weight
        channels, gate, alpha, beta = self.project(hidden_states)
        decay, beta = gates(alpha, beta, self.A_log, self.dt_bias)
        sizes = self.key_dim, self.key_dim, self.value_dim
        dims = self.head_k_dim, self.head_k_dim, self.head_v_dim

        def split_heads(mixed: Tensor) -> list[Tensor]:
            parts = zip(mixed.split(sizes, -1), dims, strict=True)
            return [part.unflatten(-1, (-1, dim)) for part, dim in parts]

        if cache is None or cache.prefilling:
            if cache is not None:
                # Padding must not change a prompt's state.
                is_padding = torch.arange(alpha.shape[1], device=alpha.device) >= cache.lengths[:, None]
                decay, beta = (x.masked_fill(is_padding[..., None], 0) for x in (decay, beta))
            query, key, value = split_heads(convolve(channels, kernel))
            out, state = delta_rule(query, key, value, decay, beta)
            if cache is not None:
                num_inputs = kernel.shape[2] - 1
                last_positions = cache.lengths[:, None] + torch.arange(num_inputs, device=alpha.device)
                inputs = F.pad(channels.transpose(1, 2), (num_inputs, 0))
                inputs = inputs.gather(2, last_positions[:, None].expand(-1, inputs.shape[1], -1))
                cache.keep(layer, inputs, state)
        else:
            flat_channels, rows = channels.flatten(0, 1), channels.shape[0] * channels.shape[1]
            inputs = torch.cat([cache.inputs[layer][:rows], flat_channels[..., None]], -1)
            query, key, value = split_heads(F.silu((inputs * kernel[:, 0]).sum(-1)))
            state, decay, beta = cache.states[layer][:rows], decay.flatten(0, 1), beta.flatten(0, 1)
            out, state = delta_step(state, query, key, value, decay, beta)
            cache.keep(layer, inputs[..., 1:], state)
            out = out.unflatten(0, channels.shape[:2])
        out = gated_norm(
            out, gate.unflatten(-1, (-1, self.head_v_dim)), self.norm.weight, self.layer_norm_epsilon
        )
        return self.out_proj(out.flatten(2))


class CachedFusedDeltaNet(CachedDeltaNet, Qwen3NextGatedDeltaNet):
    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        projections = self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
        query, key, value, gate, beta, alpha = self.fix_query_key_value_ordering(*projections)
        return torch.cat([x.flatten(2) for x in (query, key, value)], -1), gate.flatten(2), alpha, beta


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface, for values that may be narrower than keys.

    Without a mask: `prefill_attention`. query [rows, heads, q, dim]; key, value [rows, kv_heads, k, dim]
    -> [rows, q, heads, dim]"""
    scale, value_dim = kwargs["scaling"], value.shape[3]
    if value_dim < key.shape[3]:  # torch's fused attention needs equal widths
        value = F.pad(value, (0, key.shape[3] - value_dim))
    if attention_mask is None:
        return prefill_attention(query, key, value, scale).transpose(1, 2)[..., :value_dim], None
    rows, kv_heads, _, dim = key.shape
    blocks, heads, block_size, _ = query.shape
    query = query.transpose(1, 2).reshape(rows, kv_heads, heads // kv_heads, dim)
    if is_batch_invariant(query):
        out = decode_attention(query, key, value, attention_mask, scale)
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scale)
    return out.reshape(blocks, block_size, heads, dim)[..., :value_dim], None


def prefill_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend causally with the queries of the last keys.

    With batch invariance it takes COLUMNS queries at once, so a prefix gives the same sums in any prompt.

    query, result [rows, heads, q, dim]; key, value [rows, kv_heads, k, dim], k - q a multiple of COLUMNS"""
    (rows, heads, queries, dim), (kv_heads, keys) = query.shape, key.shape[1:3]
    start, is_invariant, outputs = keys - queries, is_batch_invariant(query), []
    if is_invariant:  # equal strides with and without a shared beginning
        key, value = key.contiguous(), value.contiguous()
    columns, step = torch.arange(keys, device=key.device), COLUMNS if is_invariant else queries
    for first in range(0, queries, step):
        stop = min(first + step, queries)
        q, kv = query[:, :, first:stop], (key[:, :, : start + stop], value[:, :, : start + stop])
        if not start + first:
            is_grouped = heads != kv_heads
            out = F.scaled_dot_product_attention(q, *kv, is_causal=True, scale=scale, enable_gqa=is_grouped)
        else:  # kernels with a mask have no grouped queries
            mask = columns[: start + stop] <= columns[start + first : start + stop, None]
            q, mask = q.reshape(rows, kv_heads, -1, dim), mask.repeat(heads // kv_heads, 1)
            out = F.scaled_dot_product_attention(q, *kv, attn_mask=mask, scale=scale)
        outputs.append(out.reshape(rows, heads, stop - first, -1))
    return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]


def decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend to keys in chunks of COLUMNS, and add the results in order.

    A fully masked chunk adds zeros, so a row's sums do not depend on the number of columns.

    query [rows, kv_heads, group, dim]; key, value [rows, kv_heads, n * COLUMNS, dim], finite where masked;
    mask, additive, [rows, 1, 1, n * COLUMNS]. The result is shaped as query."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    chunks = key.split(COLUMNS, 2), value.split(COLUMNS, 2), mask.split(COLUMNS, 3)
    results = [flash(query, k, v, attn_mask=m, scale=scale) for k, v, m in zip(*chunks, strict=True)]
    if len(results) == 1:
        return results[0][0]
    logsumexps = torch.stack([total for _, total in results])
    logsumexps += mask[:, 0, 0, ::COLUMNS].T[..., None, None]  # -inf for fully masked chunks
    weights = (logsumexps - logsumexps.amax(0)).exp_()[..., None]
    out, total = results[0][0] * weights[0], weights[0]
    for (chunk_out, _), weight in zip(results[1:], weights[1:], strict=True):
        out = torch.addcmul(out, chunk_out, weight)
        total = total + weight
    return out / total


AttentionInterface.register(ATTENTION, attention)
