"""Portable layers: plain torch in the places where Megatron's own layer spec needs Transformer Engine or
apex.

Packed attention over `scaled_dot_product_attention` and an RMSNorm that knows sequence parallelism. They run
on any device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megarl.data.experience import cut

MAX_PADDING = 0.10  # of a bucket's tokens, before shorter sequences get a bucket of their own
MASK = 2**24  # pairs of queries and keys that are masked at once under context parallelism


@dataclass
class Bucket:
    """Sequences of like length, attended to as one padded batch [rows, width]."""

    rows: int
    width: int
    start: int  # first of its rows * width positions in the padded order of all buckets
    # Under context parallelism: queries from column to column, and the keys of a row that they may see.
    blocks: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class AttentionPlan:
    """How packed tokens become padded batches and back. The causal mask alone hides right padding, so no mask
    is built.

    padded_from_packed  int64 [padded]  the token at each padded position (the row's last one on padding)
    packed_from_padded  int64 [tokens]  the padded position of each token

    Under context parallelism `tokens` are this rank's, rows hold this rank's part of a sequence, and a row's
    keys are cp times as many, the whole sequence's:
    keys       int64 [cp * padded]  where each is among the ranks' tokens, one rank's after another's
    positions  int64 [padded]       of each query in its sequence
    """

    buckets: list[Bucket]
    padded_from_packed: Tensor
    packed_from_padded: Tensor
    keys: Tensor | None = None
    positions: Tensor | None = None


def plan_attention(cu_seqlens: Tensor, device: torch.device, cp: int = 1, cp_rank: int = 0) -> AttentionPlan:
    """Put sequences into buckets by length, longest first, so that padding stays below MAX_PADDING.
    cu_seqlens: of the whole pack, on the host; the plan is for `device`, and for one of `cp` ranks."""
    local = cu_seqlens // cp
    lengths, order = local.diff().sort(descending=True, stable=True)
    starts, sizes = local[:-1][order], lengths.tolist()
    buckets: list[Bucket] = []
    gather: list[Tensor] = []
    whole: list[Tensor] = []
    packed_from_padded = torch.empty(int(local[-1]), dtype=torch.int64)
    first, offset = 0, 0
    while first < len(sizes) and sizes[first] > 0:
        width, last, real = sizes[first], first, 0
        while last < len(sizes) and real + sizes[last] >= (1 - MAX_PADDING) * width * (last - first + 1):
            real += sizes[last]
            last += 1
        rows, column, row_lengths = last - first, torch.arange(width), lengths[first:last, None]
        index = starts[first:last, None] + torch.minimum(column, row_lengths - 1)
        position = offset + torch.arange(rows * width).view(rows, width)
        is_token = column < row_lengths
        packed_from_padded[index[is_token]] = position[is_token]
        gather.append(index.flatten())
        if cp > 1:
            last_key = cp * row_lengths - 1
            whole.append(
                (cp * starts[first:last, None] + torch.arange(cp * width).minimum(last_key)).flatten()
            )
        buckets.append(Bucket(rows, width, offset))
        offset += rows * width
        first = last
    padded = torch.cat(gather)
    plan = AttentionPlan(buckets, padded.to(device), packed_from_padded.to(device))
    if cp > 1:
        rank, place = cut(cu_seqlens, cp)
        plan.keys = (rank * int(local[-1]) + place)[torch.cat(whole)].to(device)
        in_sequence = torch.arange(len(rank)) - torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
        positions = in_sequence[rank == cp_rank][padded]
        for bucket in buckets:
            columns = positions[bucket.start :][: bucket.rows * bucket.width].view(bucket.rows, bucket.width)
            step = max(1, MASK // (bucket.rows * cp * bucket.width))
            for first in range(0, bucket.width, step):
                stop = min(first + step, bucket.width)
                bucket.blocks.append((first, stop, int(columns[:, first:stop].max()) + 1))
        plan.positions = positions.to(device)
    return plan


class _Pad(torch.autograd.Function):
    """Moves packed tokens to padded positions. Each has one real position: the gradient is a gather too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: AttentionPlan) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.padded_from_packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.index_select(0, ctx.plan.packed_from_padded), None


class _Unpad(torch.autograd.Function):
    """Moves padded positions to packed tokens; padding receives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: AttentionPlan) -> Tensor:
        ctx.plan, ctx.rows = plan, x.shape[0]
        return x.index_select(0, plan.packed_from_padded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        padded = grad.new_zeros(ctx.rows, *grad.shape[1:])
        return padded.index_copy_(0, ctx.plan.packed_from_padded, grad), None


class PackedPlan(PackedSeqParams):
    """Packed sequences for portable layers: cu_seqlens and the attention plan, made once per micro-batch for
    all layers.

    `qkv_format` is not "thd", so that Megatron rotates q and k by one row of angles per token instead of
    sequence by sequence."""

    plan: AttentionPlan

    @staticmethod
    def of(cu_seqlens: Tensor, device: torch.device, cp: int = 1, cp_rank: int = 0) -> PackedPlan:
        """Plan the attention of a pack, on one of `cp` ranks."""
        longest = int(cu_seqlens.diff().max())
        ends = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
        packed = PackedPlan(qkv_format="packed", max_seqlen_q=longest, max_seqlen_kv=longest, **ends)
        packed.plan = plan_attention(cu_seqlens, device, cp, cp_rank)
        return packed


class PackedAttention(MegatronModule):
    """Causal self-attention of packs: q [t, 1, heads, d], k and v [t, 1, groups, d] -> [t, 1, heads * d]."""

    def __init__(self, config: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__(config)
        self.group = pg_collection.cp

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
        if plan.keys is None:
            return self._attend(plan, query, key, value)
        attend = partial(self._attend_gathered, plan)
        if torch.is_grad_enabled() and self.config.recompute_granularity is None:
            # The backward pass gathers again: a rank keeps its own keys and values. (With recomputation
            # Megatron's checkpoint around this one does so.)
            return tensor_parallel.checkpoint(attend, False, query, key, value)
        return attend(query, key, value)

    def _attend(self, plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (_Pad.apply(x.squeeze(1), plan) for x in (query, key, value))
        outputs = []
        for bucket in plan.buckets:
            part = slice(bucket.start, bucket.start + bucket.rows * bucket.width)
            shape = (bucket.rows, bucket.width)
            queries, keys, values = (x[part].unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
            attended = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
        output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return _Unpad.apply(output, plan).unsqueeze(1)

    def _attend_gathered(self, plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to the keys and values of all context-parallel ranks; their gradients go back to these."""
        assert plan.keys is not None and plan.positions is not None
        q, cp = _Pad.apply(query.squeeze(1), plan), self.group.size()
        local = torch.cat((key, value), dim=-1).squeeze(1)
        gathered = tensor_parallel.gather_from_sequence_parallel_region(local, group=self.group)
        both = gathered.index_select(0, plan.keys)
        outputs = []
        for bucket in plan.buckets:
            part = slice(bucket.start, bucket.start + bucket.rows * bucket.width)
            queries = q[part].unflatten(0, (bucket.rows, bucket.width)).transpose(1, 2)
            seen = both[cp * part.start : cp * part.stop].unflatten(0, (bucket.rows, cp * bucket.width))
            keys, values = seen.transpose(1, 2).chunk(2, dim=-1)
            positions = plan.positions[part].view(bucket.rows, 1, bucket.width, 1)
            attended = [
                F.scaled_dot_product_attention(
                    queries[:, :, first:stop],
                    keys[:, :, :last],
                    values[:, :, :last],
                    attn_mask=torch.arange(last, device=q.device) <= positions[:, :, first:stop],
                    enable_gqa=queries.shape[1] != keys.shape[1],
                )
                for first, stop, last in bucket.blocks
            ]
            outputs.append(torch.cat(attended, dim=2).transpose(1, 2).flatten(2).flatten(0, 1))
        return _Unpad.apply(torch.cat(outputs), plan).unsqueeze(1)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm, whose weight's gradient Megatron sums under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class AddToResidual(torch.nn.Module):
    """Normalises what attention or a feed-forward block has made and adds it to the residual, in the place of
    Megatron's bias-dropout-add: the families that have such norms have neither bias nor dropout there.
    norm: the class that the layers' other norms are of."""

    def __init__(self, config: Any, norm: Any) -> None:
        super().__init__()
        self.output_norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Any:
        return self._add

    def _add(self, output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        return residual + self.output_norm(output[0])
