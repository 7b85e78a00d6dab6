"""Where every shard of an SGLang tensor-parallel rank lies in Hugging Face coordinates: its fused, sharded layout, from the same tables.

A further layout beside Megatron's (layout.py), so that plans, proofs and transfers into SGLang are the same code. Proved bit for bit
against SGLang 0.5.23 on a CPU at TP 1 and 2 for Qwen2 and Qwen3; the copies of key/value heads that a GPU build makes when there are
fewer of them than ranks, and experts, follow its source and are unverified. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megarl.config.errors import ConfigError
from megarl.weights.families import Pair, Shape, Sizes
from megarl.weights.layout import Box, Region, Shard, Shards, full_box, whole_model

VOCABULARY_MULTIPLE = 64
CPU_FFN_MULTIPLE = 32  # SGLang's CPU engine pads the feed-forward columns of a rank to a multiple of this


class _Cut(NamedTuple):
    """A rank's part of a dimension: indices start to stop, padded to `width`."""

    start: int
    stop: int
    width: int


class _Cuts(NamedTuple):
    """How one rank's tensors are cut: rows of q, of k and v, feed-forward columns (of an expert's), rows of the vocabulary."""

    q: _Cut
    kv: _Cut
    ffn: _Cut
    expert_ffn: _Cut
    vocab: _Cut


def sglang_shards(hf_config: Mapping[str, Any], tp: int, tp_rank: int, *, cpu: bool = False) -> Shards:
    """The parameters of one rank of an SGLang engine, by SGLang's names.

    qkv_proj = [q; k; v] of the rank's heads, gate_up_proj = [gate; up], columns of o_proj and down_proj, rows of the padded vocabulary,
    norms and routers whole. With tied embeddings there is no lm_head. Experts: `experts.w13_weight.{e}` [2 * ffn / tp, hidden] and
    `experts.w2_weight.{e}` stand for row e of SGLang's stacked tensors. cpu: SGLang's CPU engine, which pads heads and columns where
    they do not divide. ConfigError, naming `rollout.engine_tp`, if the model cannot be divided so.
    """
    sizes = Sizes.of(hf_config)
    cuts = _cuts(sizes, tp, tp_rank, cpu)
    return dict(_shard(pair, layer, expert, sizes, cuts) for pair, layer, expert in whole_model(hf_config))


def _cuts(sizes: Sizes, tp: int, rank: int, cpu: bool) -> _Cuts:
    heads, kv_heads, ffn, expert_ffn = sizes.heads, sizes.kv_heads, sizes.ffn, sizes.expert_ffn
    if cpu:
        if heads % tp or kv_heads % tp:
            kv_heads = _multiple(kv_heads, tp)
            heads = kv_heads * (sizes.heads // sizes.kv_heads)
        ffn, expert_ffn = _multiple(ffn, CPU_FFN_MULTIPLE * tp), _multiple(expert_ffn, CPU_FFN_MULTIPLE * tp)
    for what, number in (("attention heads", heads), ("feed-forward columns", expert_ffn if sizes.experts else ffn)):
        if number % tp:
            raise ConfigError(f"rollout.engine_tp: {tp} does not divide the model's {number} {what} (choose one that does)")
    if max(tp, kv_heads) % min(tp, kv_heads):
        raise ConfigError(f"rollout.engine_tp: {tp} is neither a divisor nor a multiple of the model's {kv_heads} key/value heads")
    # Fewer key/value heads than ranks: each is copied to as many ranks as share it.
    kv_rank, kv_ranks = (rank, tp) if kv_heads >= tp else (rank // (tp // kv_heads), kv_heads)
    vocab = _multiple(sizes.vocab, VOCABULARY_MULTIPLE)
    if vocab % tp:
        vocab = _multiple(sizes.vocab, VOCABULARY_MULTIPLE * tp)
    return _Cuts(
        q=_cut(sizes.q, heads * sizes.head_dim, tp, rank),
        kv=_cut(sizes.kv, kv_heads * sizes.head_dim, kv_ranks, kv_rank),
        ffn=_cut(sizes.ffn, ffn, tp, rank),
        expert_ffn=_cut(sizes.expert_ffn, expert_ffn, tp, rank),
        vocab=_cut(sizes.vocab, vocab, tp, rank),
    )


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _cut(size: int, padded: int, ranks: int, rank: int) -> _Cut:
    width = padded // ranks
    start = min(rank * width, size)
    return _Cut(start, min(start + width, size), width)


def _shard(pair: Pair, layer: int, expert: int, sizes: Sizes, cuts: _Cuts) -> tuple[str, Shard]:
    """SGLang's name and one rank's shard of what a pair of the table describes."""
    hf = [(name.format(l=layer, e=expert), dims, sizes.shape(dims)) for name, dims in pair.hf]
    name, dims, shape = hf[0]
    match pair.operation:
        case "replicated":
            return name, Shard(shape, (Region(name, full_box(shape), full_box(shape)),))
        case "row":
            return _renamed(name, pair.per_expert), _stacked([(name, shape, _of(dims.split()[1], cuts))], axis=1)
        case "vocabulary" | "column" | "qkv":
            pieces = [(name, shape, _of(dims.split()[0], cuts)) for name, dims, shape in hf]
            return _renamed(name, pair.per_expert), _stacked(pieces, axis=0)


def _of(dim: str, cuts: _Cuts) -> _Cut:
    """The cut of a dimension that the table names."""
    cut: _Cut = getattr(cuts, dim)
    return cut


def _renamed(name: str, per_expert: bool) -> str:
    """SGLang's name of the tensor whose first part is the Hugging Face tensor `name`."""
    if per_expert:
        experts, _, rest = name.partition(".experts.")
        expert, _, part = rest.partition(".")
        return f"{experts}.experts.{'w2' if part.startswith('down') else 'w13'}_weight.{expert}"
    return name.replace("self_attn.q_proj", "self_attn.qkv_proj").replace("mlp.gate_proj", "mlp.gate_up_proj")


def _stacked(pieces: list[tuple[str, Shape, _Cut]], axis: int) -> Shard:
    """A rank's parts of several tensors one after the other along `axis`, each with its padding behind it."""
    regions: list[Region] = []
    padding: list[Box] = []
    shape, at = pieces[0][1], 0

    def box(like: Shape, start: int, stop: int) -> Box:
        return tuple((start, stop) if dimension == axis else (0, size) for dimension, size in enumerate(like))

    for name, like, cut in pieces:
        real = at + cut.stop - cut.start
        if real > at:
            regions.append(Region(name, box(like, cut.start, cut.stop), box(like, at, real)))
        if real < at + cut.width:
            padding.append(box(like, real, at + cut.width))
        at += cut.width
    return Shard((*shape[:axis], at, *shape[axis + 1 :]), tuple(regions), tuple(padding))
