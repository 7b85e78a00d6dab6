"""Map shards of Megatron and SGLang to Hugging Face coordinates. Imports without torch.

For each region, `local[local_box] == hf[hf_box]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import gcd
from typing import Any, NamedTuple

from megarl.config.errors import ConfigError
from megarl.config.schema import Config, LoraConfig, ModelConfig, OptimizerConfig
from megarl.parallel.layout import Layout, padded_vocab
from megarl.weights.boxes import Box, full_box
from megarl.weights.families import (
    EMBEDDED,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    SECTIONS,
    TIED_OUTPUT,
    VALUE_HEAD,
    Pair,
    Shape,
    Sizes,
    adapters,
    get_family,
    is_tied,
)

VOCABULARY_MULTIPLE = 64  # SGLang's padding
CPU_FFN_MULTIPLE = 32  # per rank in SGLang's CPU engine


# Projections (regular expressions) that SGLang fuses. Multi-latent attention skips the first.
FUSED = (
    ("[qkv]_proj", "qkv_proj"),
    ("(gate|up)_proj", "gate_up_proj"),
    ("in_proj_(qkv|z)", "in_proj_qkvz"),
    ("in_proj_[ba]", "in_proj_ba"),
)


class Region(NamedTuple):
    """A box of a local tensor, and its place in a Hugging Face tensor."""

    hf_name: str
    hf_box: Box
    local_box: Box


class Shard(NamedTuple):
    """A local tensor, covered once by regions and padding (zeros)."""

    shape: Shape
    regions: tuple[Region, ...]
    padding: tuple[Box, ...] = ()


Shards = dict[str, Shard]  # by local tensor name


class _Part(NamedTuple):
    """Indices along an axis, padded with zeros to `width`."""

    name: str
    start: int
    stop: int
    width: int


def _concatenate(parts: Sequence[_Part], shape: Shape, axis: int = 0) -> Shard:
    """Concatenate padded parts along `axis`. shape: of a tensor, equal except along `axis`."""
    regions: list[Region] = []
    padding: list[Box] = []
    offset = 0

    def box(start: int, stop: int) -> Box:
        return (*full_box(shape[:axis]), (start, stop), *full_box(shape[axis + 1 :]))

    for name, start, stop, width in parts:
        end = offset + stop - start
        if end > offset:
            regions.append(Region(name, box(start, stop), box(offset, end)))
        if end < offset + width:
            padding.append(box(end, offset + width))
        offset += width
    return Shard((*shape[:axis], offset, *shape[axis + 1 :]), tuple(regions), tuple(padding))


def _list_divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def check_layout(hf_config: Mapping[str, Any], tp: int, pp: int, ep: int = 1, vpp: int = 1) -> None:
    """Raise ConfigError if `parallel` cannot divide the model."""
    is_moe = get_family(hf_config).is_moe
    sizes = Sizes.from_config(hf_config)
    dividable = {"attention heads": sizes.heads, "key/value heads": sizes.kv_heads}
    if not is_moe or sizes.dense:
        dividable["feed-forward columns"] = sizes.ffn
    if sizes.key_heads:
        dividable["key heads of linear attention"] = sizes.key_heads
    if sizes.shared_ffn:
        dividable["columns of shared experts"] = sizes.shared_ffn
    if sizes.latent:  # for model/portable.py's attention
        dividable |= {"rows of kv_a_proj_with_mqa": sizes.latent}
        dividable |= {"rows of q_a_proj": sizes.q_rank} if sizes.q_rank else {}
    experts = {"experts": sizes.experts} if is_moe else {}
    layers = {"layers": sizes.layers}
    stage_layers = {"layers of a pipeline stage": sizes.layers // pp}
    keys = (("tp", tp, dividable), ("pp", pp, layers), ("vpp", vpp, stage_layers), ("ep", ep, experts))
    for key, size, numbers in keys:
        for what, number in numbers.items():
            if number % size:
                possible = f"possible: {_list_divisors(gcd(*numbers.values()))}"
                problem = f"{size} does not divide the model's {number} {what} ({possible})"
                raise ConfigError(f"parallel.{key}: {problem}")
    if ep > 1 and not is_moe:
        model_type = hf_config.get("model_type")
        raise ConfigError(f"parallel.ep: {ep}, but a {model_type} model has no experts (set it to 1)")
    if sizes.dense and max(Layout(pp=pp, vpp=vpp).layers(sizes.layers, 0)) < sizes.dense:
        # Megatron's optimizer of experts exists on all stages or none.
        what = f"{pp} gives the first stage none of the mixtures that follow {sizes.dense} dense layers"
        raise ConfigError(f"parallel.pp: {what} (lower it)")


def check_frozen(hf_config: Mapping[str, Any], optimizer: OptimizerConfig, model: str) -> None:
    layers, frozen = Sizes.from_config(hf_config).layers, optimizer.frozen_layers
    if frozen > layers:
        remedy = f"at most {layers}, with which the final norm and the head still learn"
        raise ConfigError(f"{model}.frozen_layers: {frozen}, but the model has {layers} layers ({remedy})")


def check_lora(hf_config: Mapping[str, Any], lora: LoraConfig, key: str) -> None:
    if lora.rank is None:
        return
    untargeted_lora = lora.model_copy(update={"targets": ()})
    pairs = [pair for pair in get_family(hf_config).layer if adapters(pair, untargeted_lora)]
    names = dict.fromkeys(name.split(".")[-2] for pair in pairs for name, _ in pair.hf)
    if unknown := [name for name in lora.targets if name not in names]:
        what = f"a {hf_config.get('model_type')} model has no {unknown[0]}"
        raise ConfigError(f"{key}.lora.targets: {what} (it has {', '.join(names)})")


def check_muon(hf_config: Mapping[str, Any], optimizer: OptimizerConfig, layout: Layout, key: str) -> None:
    """Raise ConfigError if Muon does not support the model or its layout.

    With one replica, LayerWiseDistributedOptimizer mistakes tensor-parallel ranks with the same experts for
    different owners. Multi-latent and linear attention are untested."""
    if optimizer.optimizer != "muon":
        return
    family, is_single_replica = get_family(hf_config), layout.dp * layout.cp == 1 < layout.stage // layout.ep
    if family.is_latent or family.is_linear:
        what = f"muon is not supported for a {family.model_type} model"
        raise ConfigError(f"{key}.optimizer: {what} (set it to adam)")
    if family.is_moe and is_single_replica:
        what = f"muon of experts under tensor parallelism (tp {layout.tp}) needs more than one replica"
        raise ConfigError(f"{key}.optimizer: {what} (raise parallel.dp, or set it to adam)")


def check_linear(hf_config: Mapping[str, Any], config: Config) -> None:
    if not get_family(hf_config).is_linear:
        return
    heads = Sizes.from_config(hf_config).key_heads // config.parallel.tp
    if heads % config.parallel.cp:
        what = f"does not divide the {heads} key heads of linear attention on a rank"
        raise ConfigError(f"parallel.cp: {config.parallel.cp} {what} (possible: {_list_divisors(heads)})")
    unsupported_settings = {
        "model.layers: te": (config.model.layers == "te", "set it to portable"),
        "model.fp8.format": (config.model.fp8.format != "none", "set it to none"),
        "model.grouped_experts": (config.model.grouped_experts, "set it to false"),
        "model.permute_fusion": (config.model.permute_fusion, "set it to false"),
        "update.share_prompts": (config.update.share_prompts, "set it to false"),
        "rollout.weights_dtype": (config.rollout.weights_dtype != "model", "set it to model"),
    }
    for key, (is_set, remedy) in unsupported_settings.items():
        if is_set:
            what = f"is not supported for linear attention, which {hf_config.get('model_type')} has"
            raise ConfigError(f"{key}: {what} ({remedy})")
    if config.rollout.capabilities.sharded:
        full_attention_interval(hf_config)


def full_attention_interval(hf_config: Mapping[str, Any]) -> int:
    """Return n if exactly every n-th layer has full attention.

    Raises ConfigError for other orders, which SGLang does not support."""
    sizes = Sizes.from_config(hf_config)
    interval = next((n for n in range(sizes.layers) if n not in sizes.linear), sizes.layers) + 1
    if sizes.linear != {n for n in range(sizes.layers) if (n + 1) % interval}:
        what = "SGLang has full attention in every n-th layer, but this model's layer_types are different"
        raise ConfigError(f"rollout.engine: {what} (set it to transformers)")
    return interval


def check_recomputed(hf_config: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise ConfigError if a mixture of experts recomputes its MLP selectively.

    The router would rerun with another pack's state, which its layer sets (model/routing.py)."""
    if model.recompute == "selective" and "mlp" in model.recompute_modules and get_family(hf_config).is_moe:
        what = "mlp is for dense models, and this is a mixture of experts"
        raise ConfigError(f"model.recompute_modules: {what} (leave it out, or set model.recompute=full)")


# Hugging Face


def whole_model(
    hf_config: Mapping[str, Any], *, critic: bool = False, lora: LoraConfig | None = None
) -> list[tuple[Pair, int, int]]:
    """Return (pair, layer, expert) of all parameters (with `lora`, of adapters)."""
    named_parameters = parameters(hf_config, Layout(), 0, 0, critic=critic, lora=lora)
    return [(pair, layer, expert) for _, pair, layer, expert in named_parameters]


def get_sizes(hf_config: Mapping[str, Any], lora: LoraConfig | None) -> Sizes:
    return replace(Sizes.from_config(hf_config), rank=(lora and lora.rank) or 0)


def hf_shapes(
    hf_config: Mapping[str, Any], *, critic: bool = False, lora: LoraConfig | None = None
) -> dict[str, Shape]:
    """Return the Hugging Face tensors' shapes (with `lora`, of adapters), in order.

    A critic has `score.weight` instead of `lm_head.weight`; an actor with tied embeddings has neither."""
    sizes, shapes = get_sizes(hf_config, lora), dict[str, Shape]()
    for pair, layer, expert in whole_model(hf_config, critic=critic, lora=lora):
        shapes |= {name.format(l=layer, e=expert): sizes.shape(dims) for name, dims in pair.hf}
    return shapes


def float32_tensors(hf_config: Mapping[str, Any], *, sglang: bool = False) -> frozenset[str]:
    """Name the tensors that are always float32 (sglang: in SGLang)."""
    scopes = ("everywhere", "sglang") if sglang else ("everywhere",)
    return frozenset(
        name.format(l=layer)
        for pair, layer, _ in whole_model(hf_config)
        if pair.float32 in scopes
        for name, _ in pair.hf
    )


def hf_shards(
    hf_config: Mapping[str, Any], *, critic: bool = False, lora: LoraConfig | None = None
) -> Shards:
    """Return the identity layout by Hugging Face names (with `lora`, of adapters)."""
    shapes = hf_shapes(hf_config, critic=critic, lora=lora)
    return {name: _concatenate([_Part(name, 0, shape[0], shape[0])], shape) for name, shape in shapes.items()}


# Megatron


def parameters(
    hf_config: Mapping[str, Any],
    layout: Layout,
    pp_rank: int,
    ep_rank: int,
    *,
    critic: bool = False,
    lora: LoraConfig | None = None,
) -> list[tuple[str, Pair, int, int]]:
    """Return (name, pair, global layer, global expert) of a rank's parameters (with `lora`, of adapters).

    Names have the layer's index in the stage and the expert's on the rank. With tied embeddings, the last of
    several stages copies the embedding as `output_layer.weight`. A critic has `value_head.weight`
    [1, hidden] there."""
    check_layout(hf_config, layout.tp, layout.pp, layout.ep, layout.vpp)
    sizes = Sizes.from_config(hf_config)
    per_rank = sizes.experts // layout.ep
    layers = {layer: local_index for local_index, layer in enumerate(layout.layers(sizes.layers, pp_rank))}
    experts = range(ep_rank * per_rank, (ep_rank + 1) * per_rank)
    is_first, is_last = pp_rank == 0, pp_rank == layout.pp - 1
    pairs = get_family(hf_config).layer
    if lora is not None:
        is_first = is_last = False
        pairs = tuple(adapter_pair for pair in pairs for adapter_pair in adapters(pair, lora))
    shared_pairs, expert_pairs = (
        [pair for pair in pairs if pair.per_expert is per_expert] for per_expert in (False, True)
    )
    rank_pairs = [(EMBEDDING, 0, 0)] if is_first else []
    for layer in layers:
        rank_pairs += [(pair, layer, 0) for pair in shared_pairs if sizes.has(pair, layer)]
        rank_pairs += [
            (pair, layer, expert) for expert in experts for pair in expert_pairs if sizes.has(pair, layer)
        ]
    if is_last:
        rank_pairs.append((FINAL_NORM, 0, 0))
        if critic:
            rank_pairs.append((VALUE_HEAD, 0, 0))
        elif not is_tied(hf_config):
            rank_pairs.append((OUTPUT, 0, 0))
        elif not is_first:
            rank_pairs.append((TIED_OUTPUT, 0, 0))
    return [
        (pair.megatron.format(l=layers.get(layer, 0), e=expert - experts.start), pair, layer, expert)
        for pair, layer, expert in rank_pairs
    ]


def megatron_layout(
    hf_config: Mapping[str, Any], layout: Layout, *, critic: bool = False, lora: LoraConfig | None = None
) -> list[tuple[int, Shards]]:
    """Return (rank, shards by the table's names). Equal shards are one object."""
    sizes = get_sizes(hf_config, lora)
    shard = cache(partial(pair_shard, sizes))

    @cache
    def rank_shards(tp_rank: int, pp_rank: int, ep_rank: int) -> Shards:
        shards = {}
        for name, pair, layer, expert in parameters(
            hf_config, layout, pp_rank, ep_rank, critic=critic, lora=lora
        ):
            tp_and_rank = (1, 0) if pair.per_expert else (layout.tp, tp_rank)
            shards[name] = shard(pair, layer, expert, *tp_and_rank)
        return shards

    coords_and_ep = [(layout.coords(rank), layout.ep_rank(rank)) for rank in range(layout.world)]
    return [(rank, rank_shards(coords.tp, coords.pp, ep)) for rank, (coords, ep) in enumerate(coords_and_ep)]


def pair_shard(sizes: Sizes, pair: Pair, layer: int, expert: int, tp: int, tp_rank: int) -> Shard:
    """Return a parameter's shard. layer, expert: global indices."""
    hf_tensors = [(name.format(l=layer, e=expert), sizes.shape(dims)) for name, dims in pair.hf]
    axis = 1 if pair.operation == "row" else 0
    match pair.operation:
        case "replicated":
            parts = [_Part(name, 0, shape[0], shape[0]) for name, shape in hf_tensors]
        case "row" | "column":
            parts = []
            for name, shape in hf_tensors:
                width = shape[axis] // tp
                parts.append(_Part(name, tp_rank * width, (tp_rank + 1) * width, width))
        case "halves":
            ((name, shape),) = hf_tensors
            width = shape[0] // 2 // tp
            starts = (tp_rank * width, shape[0] // 2 + tp_rank * width)
            parts = [_Part(name, start, start + width, width) for start in starts]
        case "vocabulary":  # padding may fill whole ranks
            ((name, shape),) = hf_tensors
            width = padded_vocab(shape[0], tp) // tp
            start = min(tp_rank * width, shape[0])
            parts = [_Part(name, start, min(start + width, shape[0]), width)]
        case "qkv":
            parts, groups = [], sizes.key_heads if pair.kind == "linear" else sizes.kv_heads
            named_dims = [
                (name, dims[0].split()[0]) for (name, _), (_, *dims) in zip(hf_tensors, pair.hf, strict=True)
            ]
            for group in range(tp_rank * groups // tp, (tp_rank + 1) * groups // tp):
                group_parts = [
                    part for name, dim in named_dims for part in _cut_group(sizes, name, dim, group, groups)
                ]
                if named_dims[0][1] == "qkvz":  # Megatron's gates are last
                    group_parts.append(group_parts.pop(1))
                parts += group_parts
    return _concatenate(parts, hf_tensors[0][1], axis)


def _cut_group(sizes: Sizes, name: str, dim: str, group: int, groups: int) -> list[_Part]:
    """Return a query group's or key head's rows, in Megatron's order."""
    if dim == "gated_q":  # file: query, gate, query, ...; Megatron: queries first
        rows, width = sizes.gated_q // groups, sizes.head_dim
        begin, end = group * rows, (group + 1) * rows
        starts = [
            first for section_offset in (0, width) for first in range(begin + section_offset, end, 2 * width)
        ]
        return [_Part(name, start, start + width, width) for start in starts]
    if dim == "qkvz":  # per key head: query, key, values, gates
        rows, width = sizes.qkvz // groups, sizes.value // groups
        begin, gates, end = group * rows, (group + 1) * rows - width, (group + 1) * rows
        return [_Part(name, begin, gates, gates - begin), _Part(name, gates, end, width)]
    parts, first = [], 0
    for section in SECTIONS.get(dim, (dim,)):
        size = getattr(sizes, section)
        rows = size // groups
        parts.append(_Part(name, first + group * rows, first + (group + 1) * rows, rows))
        first += size
    return parts


# SGLang. Copies of key/value heads (fewer than ranks) occur on GPUs only, and are untested.


def sglang_shards(hf_config: Mapping[str, Any], tp: int, tp_rank: int, *, cpu: bool = False) -> Shards:
    """Return a rank's parameters in an SGLang engine, by SGLang's names.

    Cut: qkv_proj = [q; k; v] by heads, gate_up_proj = [gate; up], columns of o_proj and down_proj, rows of
    the padded vocabulary.
    Whole: norms, routers, projections to latents (fused_qkv_a_proj_with_mqa = [q_a; kv_a]).
    Experts: `experts.w13_weight.{e}` [2 * ffn / tp, hidden] and `experts.w2_weight.{e}` are row e of stacked
    tensors.

    cpu: pad heads and columns, like SGLang's CPU engine

    Raises ConfigError if `rollout.engine_tp` cannot divide the model."""
    sizes = Sizes.from_config(hf_config)
    cuts, flat = _sglang_cuts(sizes, tp, tp_rank, cpu), get_family(hf_config).sglang_flat

    @cache
    def shard_pair(pair: Pair) -> list[tuple[str, Shard]]:
        axis = 1 if pair.operation == "row" else 0
        parts_by_name: dict[str, list[_Part]] = {}
        for name, dims in pair.hf:
            section_start = 0
            for section in SECTIONS.get(dims.split()[axis], (dims.split()[axis],)):
                size = getattr(sizes, section)
                start, stop, width = cuts.get(section, (0, size, size))
                part = _Part(name, section_start + start, section_start + stop, width)
                parts_by_name.setdefault(_sglang_name(pair, name, flat), []).append(part)
                section_start += size
        shape = sizes.shape(pair.hf[0][1])
        return [(name, _concatenate(parts, shape, axis)) for name, parts in parts_by_name.items()]

    shards: Shards = {}
    for pair, layer, expert in whole_model(hf_config):
        for name, shard in shard_pair(pair):
            regions = tuple(
                Region(hf_name.format(l=layer, e=expert), hf_box, local_box)
                for hf_name, hf_box, local_box in shard.regions
            )
            shards[name.format(l=layer, e=expert)] = Shard(shard.shape, regions, shard.padding)
    for layer in range(sizes.layers if sizes.q_rank else 0):
        stem = f"model.layers.{layer}.self_attn."
        names = [f"{stem}{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa")]
        rows = [shards.pop(name).shape[0] for name in names]
        parts = [_Part(name, 0, width, width) for name, width in zip(names, rows, strict=True)]
        shards[f"{stem}fused_qkv_a_proj_with_mqa.weight"] = _concatenate(parts, (rows[0], sizes.hidden))
    if is_tied(hf_config) and get_family(hf_config).sglang_unties:
        shards[OUTPUT.hf[0][0]] = shards[EMBEDDED[0]]
    return shards


def _sglang_name(pair: Pair, name: str, flat: bool) -> str:
    if pair.per_expert:
        stacked_name = "w2" if "down_proj" in name else "w13"
        return f"{name.partition('.experts.')[0]}.experts.{stacked_name}_weight.{{e}}"
    for projection, fused_projection in FUSED[pair.operation != "qkv" :]:
        name = re.sub(rf"\b{projection}\b", fused_projection, name)
    return name.replace(".self_attn", "") if flat else name


def _sglang_cuts(sizes: Sizes, tp: int, rank: int, cpu: bool) -> dict[str, tuple[int, int, int]]:
    """Return (start, stop, padded width) by cut dimension."""
    heads, kv_heads = sizes.heads, sizes.kv_heads
    ffn, expert_ffn, shared_ffn = sizes.ffn, sizes.expert_ffn, sizes.shared_ffn

    def multiple(number: int, of: int) -> int:
        return -(-number // of) * of

    def cut(size: int, padded: int, ranks: int = tp, rank: int = rank) -> tuple[int, int, int]:
        width = padded // ranks
        start = min(rank * width, size)
        return start, min(start + width, size), width

    if cpu:
        if (heads % tp or kv_heads % tp) and not sizes.latent:
            kv_heads = multiple(kv_heads, tp)
            heads = kv_heads * (sizes.heads // sizes.kv_heads)
        ffn, expert_ffn = multiple(ffn, CPU_FFN_MULTIPLE * tp), multiple(expert_ffn, CPU_FFN_MULTIPLE * tp)
        if sizes.linear:
            shared_ffn = multiple(shared_ffn, CPU_FFN_MULTIPLE * tp)
        elif shared_ffn:
            shared_ffn = expert_ffn * (shared_ffn // sizes.expert_ffn)
    columns = (ffn,) if not sizes.experts else (expert_ffn, ffn) if sizes.dense else (expert_ffn,)
    counts = [("attention heads", heads), *(("feed-forward columns", c) for c in (*columns, shared_ffn))]
    for what, number in (*counts, ("key heads of linear attention", sizes.key_heads)):
        if number % tp:
            problem = f"does not divide the model's {number} {what} (choose one that does)"
            raise ConfigError(f"rollout.engine_tp: {tp} {problem}")
    if max(tp, kv_heads) % min(tp, kv_heads):
        problem = f"neither a divisor nor a multiple of the model's {kv_heads} key/value heads"
        raise ConfigError(f"rollout.engine_tp: {tp} is {problem}")
    # Ranks share key/value heads if these are fewer.
    kv_rank, kv_ranks = (rank, tp) if kv_heads >= tp else (rank // (tp // kv_heads), kv_heads)
    vocab = multiple(sizes.vocab, VOCABULARY_MULTIPLE)
    if vocab % tp:
        vocab = multiple(sizes.vocab, VOCABULARY_MULTIPLE * tp)
    return {
        "q": cut(sizes.q, heads * sizes.head_dim),
        "kv": cut(sizes.kv, kv_heads * sizes.head_dim, kv_ranks, kv_rank),
        "out": cut(sizes.out, sizes.out // sizes.heads * heads),
        "kv_up": cut(sizes.kv_up, sizes.kv_up),
        "ffn": cut(sizes.ffn, ffn),
        "expert_ffn": cut(sizes.expert_ffn, expert_ffn),
        "shared_ffn": cut(sizes.shared_ffn, shared_ffn),
        "vocab": cut(sizes.vocab, vocab),
        "gated_q": cut(sizes.gated_q, 2 * heads * sizes.head_dim),
        **{
            name: cut(getattr(sizes, name), getattr(sizes, name))
            for name in ("key", "value", "value_heads", "qkvz", "ba")
        },
    }
