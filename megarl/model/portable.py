"""Layers in plain torch, for devices without Transformer Engine or apex."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from megarl.data.packing import assign_cp_ranks
from megarl.model.delta_net import convolve, delta_rule, gated_norm, gates
from megarl.weights.families import Sizes

MAX_PADDING = 0.10  # largest share of padding in a bucket
MASK = 2**22  # query-key pairs of one attention mask

# Start and length of each sequence's shared prompt, int64 [n] each; length 0: none.
Prompts = tuple[Tensor, Tensor]


@dataclass
class Bucket:
    """Sequences of similar length, as one padded batch [rows, width]."""

    rows: int
    width: int
    start: int  # its first position in the padded order of all buckets
    prompt: slice | None = None  # padded positions of the prompt that all rows share
    # Under context parallelism: first and end query column, number of visible keys.
    blocks: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class AttentionPlan:
    """Indices that convert packed tokens to padded batches and back.

    The causal mask hides padding, which is on the right.

    padded_from_packed  int64 [padded]  token at each position (padding: the row's last)
    packed_from_padded  int64 [tokens]  padded position of each token

    Under context parallelism, tokens and rows are this rank's, and keys those of whole sequences:
    keys       int64 [cp * padded]  index of each key in all ranks' tokens
    positions  int64 [padded]       position of each query in its sequence"""

    buckets: list[Bucket]
    padded_from_packed: Tensor
    packed_from_padded: Tensor
    keys: Tensor | None = None
    positions: Tensor | None = None

    def to(self, device: torch.device) -> AttentionPlan:
        return AttentionPlan(
            self.buckets,
            self.padded_from_packed.to(device),
            self.packed_from_padded.to(device),
            None if self.keys is None else self.keys.to(device),
            None if self.positions is None else self.positions.to(device),
        )


def plan_attention(
    cu_seqlens: Tensor, device: torch.device, cp: int = 1, cp_rank: int = 0, prompts: Prompts | None = None
) -> AttentionPlan:
    """Put sequences into buckets by length, longest first, with at most MAX_PADDING padding.

    Sequences with a shared prompt come last, in separate buckets per prompt.
    cu_seqlens: of the whole pack, on the host"""
    local_cu_seqlens = cu_seqlens // cp
    lengths, order = local_cu_seqlens.diff().sort(descending=True, stable=True)
    family_ids = [0] * len(lengths)  # of sequences that share a prompt; 0: none
    if prompts is not None:
        family_by_sequence = torch.where(prompts[1] > 0, prompts[0] + 1, 0)
        order = order[family_by_sequence[order].argsort(stable=True)]
        lengths, family_ids = local_cu_seqlens.diff()[order], family_by_sequence[order].tolist()
    starts = local_cu_seqlens[:-1][order]
    buckets: list[Bucket] = []
    token_indices: list[Tensor] = []
    key_indices: list[Tensor] = []
    packed_from_padded = torch.empty(int(local_cu_seqlens[-1]), dtype=torch.int64)
    offset = 0
    for first, end in _divide_by_length(lengths.tolist(), family_ids):
        rows, width, row_lengths = end - first, int(lengths[first]), lengths[first:end, None]
        column = torch.arange(width)
        token_index = starts[first:end, None] + torch.minimum(column, row_lengths - 1)
        padded_position = offset + torch.arange(rows * width).view(rows, width)
        is_token = column < row_lengths
        packed_from_padded[token_index[is_token]] = padded_position[is_token]
        token_indices.append(token_index.flatten())
        if cp > 1:
            last_key = cp * row_lengths - 1
            key_indices.append(
                (cp * starts[first:end, None] + torch.arange(cp * width).minimum(last_key)).flatten()
            )
        buckets.append(Bucket(rows, width, offset))
        if prompts is not None and family_ids[first]:
            # The sequence with the prompt is in an earlier bucket, so its padded position is known.
            prompt_start = int(packed_from_padded[family_ids[first] - 1])
            buckets[-1].prompt = slice(prompt_start, prompt_start + int(prompts[1][order[first]]))
        offset += rows * width
    plan = AttentionPlan(buckets, torch.cat(token_indices), packed_from_padded)
    if cp > 1:
        _plan_keys(plan, torch.cat(key_indices), cu_seqlens, cp, cp_rank)
    return plan.to(device)


def _divide_by_length(lengths: Sequence[int], family_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first and end of each bucket's sequences, which are sorted by family, longest first.

    Empty sequences are left out."""
    first = 0
    while first < len(lengths):
        if not lengths[first]:
            first += 1
            continue
        end, num_tokens = first, 0
        while (
            end < len(lengths)
            and family_ids[end] == family_ids[first]
            and num_tokens + lengths[end] >= (1 - MAX_PADDING) * lengths[first] * (end - first + 1)
        ):
            num_tokens += lengths[end]
            end += 1
        yield first, end
        first = end


def _plan_keys(plan: AttentionPlan, key_indices: Tensor, cu_seqlens: Tensor, cp: int, cp_rank: int) -> None:
    """Add what context parallelism needs to a plan. key_indices: int64 [cp * padded], in the pack"""
    rank, local_position = assign_cp_ranks(cu_seqlens, cp)
    local_tokens = int(cu_seqlens[-1]) // cp
    plan.keys = (rank * local_tokens + local_position)[key_indices]
    sequence_positions = torch.arange(len(rank)) - torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    plan.positions = sequence_positions[rank == cp_rank][plan.padded_from_packed]
    for bucket in plan.buckets:
        columns = plan.positions[bucket.start :][: bucket.rows * bucket.width].view(bucket.rows, bucket.width)
        block_width = max(1, MASK // (bucket.rows * cp * bucket.width))
        for first in range(0, bucket.width, block_width):
            stop = min(first + block_width, bucket.width)
            bucket.blocks.append((first, stop, int(columns[:, first:stop].max()) + 1))


class _Pad(torch.autograd.Function):
    """Copy packed tokens to padded positions; the gradient takes one position per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: AttentionPlan) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.padded_from_packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.index_select(0, ctx.plan.packed_from_padded), None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: AttentionPlan) -> Tensor:
        ctx.plan, ctx.rows = plan, x.shape[0]
        return x.index_select(0, plan.packed_from_padded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        padded = grad.new_zeros(ctx.rows, *grad.shape[1:])
        return padded.index_copy_(0, ctx.plan.packed_from_padded, grad), None


class _AttendOverRanks(torch.autograd.Function):
    """Causal attention of this rank's queries to all context-parallel ranks' keys and values.

    Only this rank's tensors [t, heads, d] are saved. The backward pass gathers all keys and values again,
    attends block by block, and reduce-scatters their gradients."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, group: Any
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.plan, ctx.group = plan, group
        q, kv = _gather(query, key, value, plan, group)
        output = torch.empty_like(q)
        for output_block, *block in _blocks(plan, output, q, kv):
            output_block.copy_(_attend_block(*block))
        return output.index_select(0, plan.packed_from_padded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, (query, key, value) = ctx.plan, ctx.saved_tensors
        q, kv = _gather(query, key, value, plan, ctx.group)
        d_output = torch.zeros_like(q).index_copy_(0, plan.packed_from_padded, grad)
        d_q, d_kv = torch.empty_like(q), torch.zeros_like(kv)
        blocks = zip(_blocks(plan, d_output, q, kv), _blocks(plan, d_output, d_q, d_kv), strict=True)
        for (d_block, queries, block_kv, positions), (_, d_queries, d_block_kv, _) in blocks:
            queries, block_kv = queries.detach().requires_grad_(), block_kv.detach().requires_grad_()
            with torch.enable_grad():
                attended = _attend_block(queries, block_kv, positions)
            grad_queries, grad_kv = torch.autograd.grad(attended, (queries, block_kv), d_block)
            d_queries.copy_(grad_queries)
            d_block_kv.add_(grad_kv)
        d_gathered = torch.zeros_like(kv[: ctx.group.size() * len(grad)]).index_add_(0, plan.keys, d_kv)
        d_local = tensor_parallel.reduce_scatter_to_sequence_parallel_region(d_gathered, group=ctx.group)
        return d_q.index_select(0, plan.packed_from_padded), *d_local.chunk(2, dim=-1), None, None


def _gather(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, group: Any
) -> tuple[Tensor, Tensor]:
    """Return this rank's queries, and all keys and values [.., groups, 2 d], padded."""
    assert plan.keys is not None
    kv = torch.cat((key, value), dim=-1)
    gathered = tensor_parallel.gather_from_sequence_parallel_region(kv, group=group)
    return query.index_select(0, plan.padded_from_packed), gathered.index_select(0, plan.keys)


def _blocks(plan: AttentionPlan, output: Tensor, q: Tensor, both: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of each block, and its query positions [rows, 1, queries, 1].

    output and q [rows, queries, heads, d], both [rows, keys, groups, 2 d]."""
    assert plan.positions is not None
    cp = len(both) // len(q)
    for bucket in plan.buckets:
        stop, shape = bucket.start + bucket.rows * bucket.width, (bucket.rows, bucket.width)
        local_views = [x[bucket.start : stop].unflatten(0, shape) for x in (output, q, plan.positions)]
        bucket_kv = both[cp * bucket.start : cp * stop].unflatten(0, (bucket.rows, cp * bucket.width))
        for first, end, num_keys in bucket.blocks:
            output_block, queries, positions = (x[:, first:end] for x in local_views)
            yield output_block, queries, bucket_kv[:, :num_keys], positions[:, None, :, None]


def _attend_block(queries: Tensor, seen: Tensor, positions: Tensor) -> Tensor:
    keys, values = seen.transpose(1, 2).chunk(2, dim=-1)
    mask = torch.arange(seen.shape[1], device=seen.device) <= positions
    gqa = queries.shape[2] != seen.shape[2]
    attended = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=gqa
    )
    return attended.transpose(1, 2)


def _attend_behind(
    prompt_keys: Tensor, prompt_values: Tensor, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Attend to a shared prompt [p, groups, d] and causally to the row itself.

    queries [rows, heads, width, d], keys and values [rows, groups, width, d] -> [rows, heads, width, d]."""
    rows, _, width, _ = keys.shape
    prompt_width = prompt_keys.shape[0]
    keys, values = (
        torch.cat([prompt.transpose(0, 1).expand(rows, -1, -1, -1), suffix], dim=2)
        for prompt, suffix in ((prompt_keys, keys), (prompt_values, values))
    )
    block_width, outputs = max(1, MASK // (prompt_width + width)), []
    for first in range(0, width, block_width):
        stop = min(first + block_width, width)
        positions = torch.arange(prompt_width + first, prompt_width + stop, device=keys.device)[:, None]
        mask = torch.arange(prompt_width + stop, device=keys.device) <= positions
        visible_kv = keys[:, :, : prompt_width + stop], values[:, :, : prompt_width + stop]
        gqa = queries.shape[1] != keys.shape[1]
        outputs.append(
            F.scaled_dot_product_attention(
                queries[:, :, first:stop], *visible_kv, attn_mask=mask, enable_gqa=gqa
            )
        )
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]


class PackedPlan(PackedSeqParams):
    """Packed sequences for portable layers: cu_seqlens and an attention plan.

    angles: float32 [t, 1, width], of this rank's tokens, for multi-latent attention.
    `qkv_format` is not "thd", so that Megatron rotates by token, not by sequence."""

    plan: AttentionPlan
    angles: Tensor | None = None

    @staticmethod
    def make(
        cu_seqlens: Tensor,
        device: torch.device,
        cp: int = 1,
        cp_rank: int = 0,
        prompts: Prompts | None = None,
    ) -> PackedPlan:
        """Plan the attention of a pack."""
        max_seqlen = int(cu_seqlens.diff().max())
        ends = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
        packed = PackedPlan(qkv_format="packed", max_seqlen_q=max_seqlen, max_seqlen_kv=max_seqlen, **ends)
        packed.plan = plan_attention(cu_seqlens, device, cp, cp_rank, prompts)
        return packed


class PackedAttention(MegatronModule):
    """Causal self-attention of packs: q [t, 1, heads, d], k and v [t, 1, groups, d] -> [t, 1, heads * d].

    In multi-latent attention inputs lack the second dimension, and values may be narrower than keys."""

    def __init__(self, config: Any, pg_collection: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config)
        self.group, self.scale = pg_collection.cp, softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedPlan | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None, "portable attention takes packed sequences only"
        plan = packed_seq_params.plan
        query, key, value = (x if x.ndim == 3 else x.squeeze(1) for x in (query, key, value))
        width, value_width = query.shape[-1], value.shape[-1]
        if self.scale is not None and not math.isclose(self.scale, width**-0.5):
            query = query * (self.scale * width**0.5)
        if value_width < width:  # torch's memory-efficient attention needs equal widths
            value = F.pad(value, (0, width - value_width))
        if plan.keys is not None:
            attended = _AttendOverRanks.apply(query, key, value, plan, self.group)
            return attended[..., :value_width].flatten(1).unsqueeze(1)
        q, k, v = (_Pad.apply(x, plan) for x in (query, key, value))
        outputs = []
        for bucket in plan.buckets:
            bucket_slice = slice(bucket.start, bucket.start + bucket.rows * bucket.width)
            shape = (bucket.rows, bucket.width)
            queries, keys, values = (x[bucket_slice].unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
            if bucket.prompt is None:
                attended = F.scaled_dot_product_attention(
                    queries, keys, values, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
                )
            else:
                attended = _attend_behind(k[bucket.prompt], v[bucket.prompt], queries, keys, values)
            outputs.append(attended[..., :value_width].transpose(1, 2).flatten(2).flatten(0, 1))
        output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return _Unpad.apply(output, plan).unsqueeze(1)


class LatentAttention(MLASelfAttention):
    """Multi-latent attention with rotary angles from the pack (`PackedPlan`).

    Portable layers replicate both projections to latents on all tensor-parallel ranks. Megatron's local spec
    splits them, with wrong input gradients under sequence parallelism (megatron-core 0.16.1 and 0.18.2)."""

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        self.rotary_pos_emb = AnglesOfPack()
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if isinstance(linear := getattr(self, name, None), ColumnParallelLinear):
                rows = config.tensor_model_parallel_size * linear.weight.shape[0]
                setattr(self, name, WholeLinear(config, linear.weight.new_empty(rows, config.hidden_size)))

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        # megatron-core 0.19 would add a norm before linear_q_proj for queries without latents.
        return vars(submodules)


class AnglesOfPack(torch.nn.Module):
    """A rotary embedding for multi-latent attention that returns the pack's angles."""

    def get_rotary_seq_len(self, _context: Any, _block: Any, _hidden: Any, _config: Any, packed: Any) -> Any:
        return packed.angles

    def forward(self, angles: Tensor, packed_seq: bool) -> Tensor:
        return angles


class WholeLinear(torch.nn.Module):
    """A replicated linear layer; Megatron sums its gradient over tensor-parallel ranks."""

    def __init__(self, config: Any, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class GatedAttention(SelfAttention):
    """Megatron's gated attention without torch.compile, which needs a C++ compiler on a CPU."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x * gate.reshape(x.shape).float().sigmoid()).to(x.dtype)


class Held(torch.nn.Module):
    """A weight that is read by calling the module.

    Only then does Megatron's forward hook wait for the parameter gather."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self) -> Tensor:
        return self.weight


class GatedDeltaNet(MegatronModule):
    """Linear attention of packs by the gated delta rule (Qwen3.5): [t, 1, hidden] -> [t, 1, hidden].

    Rows of in_proj and channels of the convolution are grouped by key head, so heads are never split. A
    group has query and key, then values, beta, alpha and output gates of the heads that share the key.
    Under context parallelism each rank processes whole sequences with part of the heads (Ulysses, arXiv
    2309.14509)."""

    def __init__(self, config: Any, sizes: Sizes, pg_collection: Any, **_: Any) -> None:
        super().__init__(config)
        self.group, self.tp = pg_collection.cp, pg_collection.tp
        self.heads, self.shared = sizes.key_heads // self.tp.size(), sizes.value_heads // sizes.key_heads
        self.key_dim, self.value_dim = sizes.key // sizes.key_heads, sizes.value_dim
        options = {"config": config, "bias": False, "tp_group": self.tp}
        self.in_proj = ColumnParallelLinear(
            sizes.hidden,
            sizes.mixed + sizes.value + 2 * sizes.value_heads,
            init_method=config.init_method,
            gather_output=False,
            **options,
        )
        self.out_proj = RowParallelLinear(
            sizes.value,
            sizes.hidden,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **options,
        )
        channels, value_heads = sizes.mixed // self.tp.size(), self.heads * self.shared
        dtype = config.params_dtype
        self.conv1d = Held(torch.empty(channels, 1, sizes.conv, dtype=dtype))
        self.A_log, self.dt_bias = (
            torch.nn.Parameter(torch.zeros(value_heads, dtype=dtype)) for _ in range(2)
        )
        self.out_norm = Held(torch.ones(self.value_dim, dtype=dtype))
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedPlan | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert packed_seq_params is not None, "linear attention takes packed sequences only"
        plan, cp = packed_seq_params.plan, self.group.size()
        mixed = self.in_proj(hidden_states)[0].squeeze(1).unflatten(-1, (self.heads, -1))
        mixed, gate = mixed.tensor_split([-self.shared * self.value_dim], -1)
        if plan.keys is None:
            out = _Unpad.apply(self._attend(_Pad.apply(mixed, plan), plan, 0), plan)
        else:
            # [t, heads, n] of this rank's tokens -> [cp * t, heads / cp, n] of all, rank by rank
            heads_by_rank = mixed.unflatten(1, (cp, -1)).transpose(0, 1).flatten(0, 1)
            gathered = tensor_parallel.all_to_all(self.group, heads_by_rank.contiguous())
            out = self._attend(gathered.index_select(0, plan.keys), plan, self.group.rank())
            padded_positions = torch.arange(len(plan.keys), device=out.device)
            # Padding repeats a row's last token; take its first position.
            first_positions = torch.full((len(gathered),), len(padded_positions), device=out.device)
            first_positions.scatter_reduce_(0, plan.keys, padded_positions, "amin")
            out = tensor_parallel.all_to_all(self.group, out.index_select(0, first_positions))
            out = out.unflatten(0, (cp, -1)).transpose(0, 1).flatten(1, 2)
        # Tensor-parallel ranks have different heads, so sum the weight's gradient over them.
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.out_norm(), self.tp)
        out = gated_norm(out, gate.reshape(out.shape), weight, self.config.layernorm_epsilon)
        return self.out_proj(out.flatten(1).unsqueeze(1))

    def _attend(self, mixed: Tensor, plan: AttentionPlan, part: int) -> Tensor:
        """Attend with the heads of context-parallel rank `part`: [padded, heads, n] -> [padded, value
        heads, dv]."""
        heads, cp, outputs = mixed.shape[1], self.heads // mixed.shape[1], []
        weight = self.conv1d().chunk(cp)[part]
        rate, bias = (x.chunk(cp)[part] for x in (self.A_log, self.dt_bias))
        sizes = self.key_dim, self.key_dim, self.shared * self.value_dim
        for bucket in plan.buckets:
            rows, width = bucket.rows, cp * bucket.width
            projections = mixed[cp * bucket.start :][: rows * width].unflatten(0, (rows, width))
            channels, beta, alpha = projections.split([sum(sizes), self.shared, self.shared], -1)
            query, key, value = (
                convolve(channels.flatten(2), weight).unflatten(-1, (heads, -1)).split(sizes, -1)
            )
            value = value.reshape(rows, width, -1, self.value_dim)
            attended, _ = delta_rule(query, key, value, *gates(alpha.flatten(2), beta.flatten(2), rate, bias))
            outputs.append(attended.flatten(0, 1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> Any:
        state: dict[str, Tensor] = {}
        self._save_to_state_dict(state, "", keep_vars=True)
        state["conv1d.weight"] = self.conv1d.weight
        axes = dict.fromkeys(state, 0)
        state["out_norm.weight"] = self.out_norm.weight  # the same on every rank
        sharded_state = make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets)
        for name in ("in_proj", "out_proj"):
            sharded_state |= sharded_state_dict_default(
                getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata
            )
        return sharded_state


class RMSNorm(torch.nn.Module):
    """RMSNorm whose gradient Megatron sums under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps, self.zero_centred = eps, config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_centred:
            return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class AddToResidual(torch.nn.Module):
    """Normalise a block's output and add it to the residual, in place of Megatron's bias-dropout-add.

    The families with such norms have neither bias nor dropout there."""

    def __init__(self, config: Any, norm: Any) -> None:
        super().__init__()
        self.output_norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Any:
        return self._add

    def _add(self, output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        return residual + self.output_norm(output[0])
