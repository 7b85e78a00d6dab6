"""Where every Megatron shard lies in Hugging Face coordinates: regions, computed from sizes alone.

`local[local_box] == hf[hf_box]` for every region of a shard. Loading, exporting, plans of transfers and their proofs know nothing else,
so that a further layout (an engine's fused shards, say) is one more function that returns `Shards`. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from megarl.config.errors import ConfigError
from megarl.parallel.layout import Layout, padded_vocab
from megarl.weights.families import EMBEDDING, FINAL_NORM, OUTPUT, TIED_OUTPUT, VALUE_HEAD, Pair, Shape, Sizes, family_of, is_tied

Box = tuple[tuple[int, int], ...]  # (start, stop) of every dimension


class Region(NamedTuple):
    """Part of a local tensor and the part of a Hugging Face tensor that lies there; both boxes have the same extents."""

    hf_name: str
    hf_box: Box
    local_box: Box


class Shard(NamedTuple):
    """A local tensor: its regions and its padding (zeros that no Hugging Face tensor has) cover it exactly once."""

    shape: Shape
    regions: tuple[Region, ...]
    padding: tuple[Box, ...] = ()


Shards = dict[str, Shard]  # of one rank, by local tensor name


def full_box(shape: Shape) -> Box:
    """The box that covers a whole tensor."""
    return tuple((0, size) for size in shape)


def stage_layers(layers: int, pp: int, pp_rank: int) -> range:
    """Global indices of the layers on a pipeline stage (an even split); layer `l` is the stage's local layer `l - range.start`."""
    per_stage = layers // pp
    return range(pp_rank * per_stage, (pp_rank + 1) * per_stage)


def check_layout(hf_config: Mapping[str, Any], tp: int, pp: int, ep: int = 1) -> None:
    """ConfigError, naming `parallel.tp`, `parallel.pp` or `parallel.ep`, if the model cannot be divided so; CheckpointError for an
    unknown family."""
    moe = family_of(hf_config).is_moe
    sizes = Sizes.of(hf_config)
    dividable = {"attention heads": sizes.heads, "key/value heads": sizes.kv_heads}
    if not moe:
        dividable["feed-forward columns"] = sizes.ffn
    for what, number in dividable.items():
        if number % tp:
            good = [str(t) for t in range(1, sizes.kv_heads + 1) if not any(n % t for n in dividable.values())]
            raise ConfigError(f"parallel.tp: {tp} does not divide the model's {number} {what} (possible: {', '.join(good)})")
    if sizes.layers % pp:
        raise ConfigError(f"parallel.pp: {pp} does not divide the model's {sizes.layers} layers (possible: {_divisors(sizes.layers)})")
    if ep > 1 and not moe:
        raise ConfigError(f"parallel.ep: {ep}, but a {hf_config.get('model_type')} model has no experts (set it to 1)")
    if ep > 1 and sizes.experts % ep:
        raise ConfigError(f"parallel.ep: {ep} does not divide the model's {sizes.experts} experts (possible: {_divisors(sizes.experts)})")


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _in_layers(pairs: Iterable[Pair], layers: Iterable[int], experts: range) -> Iterator[tuple[Pair, int, int]]:
    """(pair, layer, expert) of every parameter of these layers and experts, layer by layer, a layer's experts one after the other."""
    once, each = ([pair for pair in pairs if pair.per_expert is per_expert] for per_expert in (False, True))
    for layer in layers:
        yield from ((pair, layer, 0) for pair in once)
        yield from ((pair, layer, expert) for expert in experts for pair in each)


def whole_model(hf_config: Mapping[str, Any], *, critic: bool = False) -> list[tuple[Pair, int, int]]:
    """(pair, layer, expert) of every parameter of a model that is not divided, in the model's order."""
    return [(pair, layer, expert) for _, pair, layer, expert in parameters(hf_config, Layout(), pp_rank=0, critic=critic)]


def hf_shapes(hf_config: Mapping[str, Any], *, critic: bool = False) -> dict[str, Shape]:
    """Every tensor of the Hugging Face model, in the model's order: with `score.weight` instead of `lm_head.weight` for a critic,
    with neither for an actor with tied embeddings."""
    sizes, places = Sizes.of(hf_config), whole_model(hf_config, critic=critic)
    return {name.format(l=layer, e=expert): sizes.shape(dims) for pair, layer, expert in places for name, dims in pair.hf}


def hf_shards(hf_config: Mapping[str, Any], *, critic: bool = False) -> Shards:
    """The identity layout: the whole model under its Hugging Face names (the transformers engine, an export)."""
    return {
        name: Shard(shape, (Region(name, full_box(shape), full_box(shape)),)) for name, shape in hf_shapes(hf_config, critic=critic).items()
    }


def megatron_shards(
    hf_config: Mapping[str, Any], layout: Layout, *, tp_rank: int, pp_rank: int, ep_rank: int = 0, critic: bool = False
) -> Shards:
    """The parameters of one Megatron rank under the table's names, with the stage's own layer and the rank's own expert indices.

    With tied embeddings the last of several stages holds a copy of the embedding as `output_layer.weight`; a critic has
    `value_head.weight` [1, hidden] on the last stage and no output layer. Data-parallel ranks hold the same, but for experts: those of
    `ep_rank` (see `Layout.ep_rank`).
    """
    return _rank_shards(hf_config, layout, tp_rank, pp_rank, ep_rank, critic, pair_shard)


def megatron_layout(hf_config: Mapping[str, Any], layout: Layout, *, critic: bool = False) -> list[tuple[int, Shards]]:
    """(rank, shards) of every rank of a Megatron job; ranks that hold the same share one object, of the whole or of a shard."""
    make = cache(pair_shard)
    rank_shards = cache(lambda tp, pp, ep: _rank_shards(hf_config, layout, tp, pp, ep, critic, make))
    coords = [layout.coords(rank) for rank in range(layout.world)]
    return [(rank, rank_shards(place.tp, place.pp, layout.ep_rank(rank))) for rank, place in enumerate(coords)]


def parameters(
    hf_config: Mapping[str, Any], layout: Layout, *, pp_rank: int, ep_rank: int = 0, critic: bool = False
) -> list[tuple[str, Pair, int, int]]:
    """(name, pair, global layer, global expert) of every parameter of a Megatron rank, in the model's order."""
    check_layout(hf_config, layout.tp, layout.pp, layout.ep)
    sizes = Sizes.of(hf_config)
    layers = stage_layers(sizes.layers, layout.pp, pp_rank)
    share = sizes.experts // layout.ep
    experts = range(ep_rank * share, (ep_rank + 1) * share)
    first, last = pp_rank == 0, pp_rank == layout.pp - 1
    tied = is_tied(hf_config)
    places = [(EMBEDDING, 0, 0)] if first else []
    places += _in_layers(family_of(hf_config).layer, layers, experts)
    if last:
        places.append((FINAL_NORM, 0, 0))
        if critic:
            places.append((VALUE_HEAD, 0, 0))
        elif not tied:
            places.append((OUTPUT, 0, 0))
        elif not first:
            places.append((TIED_OUTPUT, 0, 0))
    return [(pair.megatron.format(l=layer - layers.start, e=expert - experts.start), pair, layer, expert) for pair, layer, expert in places]


def _rank_shards(
    hf_config: Mapping[str, Any], layout: Layout, tp_rank: int, pp_rank: int, ep_rank: int, critic: bool, make: Callable[..., Shard]
) -> Shards:
    sizes = Sizes.of(hf_config)
    named = parameters(hf_config, layout, pp_rank=pp_rank, ep_rank=ep_rank, critic=critic)
    # An expert is not cut over tensor-parallel ranks.
    return {
        name: make(pair, layer, expert, sizes, *((1, 0) if pair.per_expert else (layout.tp, tp_rank)))
        for name, pair, layer, expert in named
    }


def pair_shard(pair: Pair, layer: int, expert: int, sizes: Sizes, tp: int, tp_rank: int) -> Shard:
    """One parameter of one tensor-parallel rank, of a global layer and expert."""
    hf = [(name.format(l=layer, e=expert), sizes.shape(dims)) for name, dims in pair.hf]
    match pair.operation:
        case "replicated":
            ((name, shape),) = hf
            return Shard(shape, (Region(name, full_box(shape), full_box(shape)),))
        case "row":
            ((name, (rows, columns)),) = hf
            width = columns // tp
            box = ((0, rows), (tp_rank * width, (tp_rank + 1) * width))
            return Shard((rows, width), (Region(name, box, full_box((rows, width))),))
        case "vocabulary":
            ((name, shape),) = hf
            return _vocabulary(name, shape, tp, tp_rank)
        case "column":
            return _stack([(name, tp_rank * (shape[0] // tp), shape[0] // tp) for name, shape in hf], hf[0][1][1:])
        case "qkv":
            groups = sizes.kv_heads // tp
            blocks = []
            for group in range(tp_rank * groups, (tp_rank + 1) * groups):
                for name, shape in hf:
                    rows = shape[0] // sizes.kv_heads
                    blocks.append((name, group * rows, rows))
            return _stack(blocks, hf[0][1][1:])


def _stack(blocks: Sequence[tuple[str, int, int]], rest: Shape) -> Shard:
    """Blocks of rows (Hugging Face name, first row, number of rows) one under the other; `rest` is the shape of one row."""
    regions, row = [], 0
    for name, start, rows in blocks:
        regions.append(Region(name, ((start, start + rows), *full_box(rest)), ((row, row + rows), *full_box(rest))))
        row += rows
    return Shard((row, *rest), tuple(regions))


def _vocabulary(name: str, shape: Shape, tp: int, tp_rank: int) -> Shard:
    """Rows of the vocabulary. The padding is at the end, so it may fill the last rank or ranks altogether."""
    vocab, hidden = shape
    rows = padded_vocab(vocab, tp) // tp
    start = min(tp_rank * rows, vocab)
    real = min(start + rows, vocab) - start
    regions = (Region(name, ((start, start + real), (0, hidden)), ((0, real), (0, hidden))),) if real else ()
    padding = (((real, rows), (0, hidden)),) if real < rows else ()
    return Shard((rows, hidden), regions, padding)
