"""Where every Megatron shard lies in Hugging Face coordinates: regions, computed from sizes alone.

`local[local_box] == hf[hf_box]` for every region of a shard. Loading, exporting, plans of transfers and their proofs know nothing else,
so that a further layout (an engine's fused shards, say) is one more function that returns `Shards`. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def check_layout(hf_config: Mapping[str, Any], tp: int, pp: int) -> None:
    """ConfigError, naming `parallel.tp` or `parallel.pp`, if the model cannot be divided so; CheckpointError for an unknown family."""
    family_of(hf_config)
    sizes = Sizes.of(hf_config)
    dividable = {"attention heads": sizes.heads, "key/value heads": sizes.kv_heads, "feed-forward columns": sizes.ffn}
    for what, number in dividable.items():
        if number % tp:
            good = [str(t) for t in range(1, sizes.kv_heads + 1) if not any(n % t for n in dividable.values())]
            raise ConfigError(f"parallel.tp: {tp} does not divide the model's {number} {what} (possible: {', '.join(good)})")
    if sizes.layers % pp:
        good = [str(p) for p in range(1, sizes.layers + 1) if sizes.layers % p == 0]
        raise ConfigError(f"parallel.pp: {pp} does not divide the model's {sizes.layers} layers (possible: {', '.join(good)})")


def hf_shapes(hf_config: Mapping[str, Any], *, critic: bool = False) -> dict[str, Shape]:
    """Every tensor of the Hugging Face model, in the model's order: with `score.weight` instead of `lm_head.weight` for a critic,
    with neither for an actor with tied embeddings."""
    sizes = Sizes.of(hf_config)
    head = (VALUE_HEAD,) if critic else () if is_tied(hf_config) else (OUTPUT,)
    layers = [(pair, layer) for layer in range(sizes.layers) for pair in family_of(hf_config).layer]
    pairs = [(EMBEDDING, 0), *layers, *((pair, 0) for pair in (FINAL_NORM, *head))]
    return {name.format(l=layer): sizes.shape(dims) for pair, layer in pairs for name, dims in pair.hf}


def hf_shards(hf_config: Mapping[str, Any], *, critic: bool = False) -> Shards:
    """The identity layout: the whole model under its Hugging Face names (the transformers engine, an export)."""
    return {
        name: Shard(shape, (Region(name, full_box(shape), full_box(shape)),)) for name, shape in hf_shapes(hf_config, critic=critic).items()
    }


def megatron_shards(hf_config: Mapping[str, Any], layout: Layout, *, tp_rank: int, pp_rank: int, critic: bool = False) -> Shards:
    """The parameters of one Megatron rank under the table's names, with the stage's own layer indices.

    With tied embeddings the last of several stages holds a copy of the embedding as `output_layer.weight`; a critic has
    `value_head.weight` [1, hidden] on the last stage and no output layer. Data-parallel ranks hold the same.
    """
    check_layout(hf_config, layout.tp, layout.pp)
    sizes = Sizes.of(hf_config)
    mine = stage_layers(sizes.layers, layout.pp, pp_rank)
    first, last = pp_rank == 0, pp_rank == layout.pp - 1
    tied = is_tied(hf_config)
    pairs = [(EMBEDDING, 0)] if first else []
    pairs += [(pair, layer) for layer in mine for pair in family_of(hf_config).layer]
    if last:
        pairs.append((FINAL_NORM, 0))
        if critic:
            pairs.append((VALUE_HEAD, 0))
        elif not tied:
            pairs.append((OUTPUT, 0))
        elif not first:
            pairs.append((TIED_OUTPUT, 0))
    return {pair.megatron.format(l=layer - mine.start): _shard(pair, layer, sizes, layout.tp, tp_rank) for pair, layer in pairs}


def megatron_layout(hf_config: Mapping[str, Any], layout: Layout, *, critic: bool = False) -> list[tuple[int, Shards]]:
    """(rank, shards) of every rank of a Megatron job; data-parallel replicas share one object."""
    places = [(tp, pp) for pp in range(layout.pp) for tp in range(layout.tp)]
    shards = {(tp, pp): megatron_shards(hf_config, layout, tp_rank=tp, pp_rank=pp, critic=critic) for tp, pp in places}
    coords = [layout.coords(rank) for rank in range(layout.world)]
    return [(rank, shards[place.tp, place.pp]) for rank, place in enumerate(coords)]


def _shard(pair: Pair, layer: int, sizes: Sizes, tp: int, tp_rank: int) -> Shard:
    """One parameter of one tensor-parallel rank."""
    hf = [(name.format(l=layer), sizes.shape(dims)) for name, dims in pair.hf]
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
