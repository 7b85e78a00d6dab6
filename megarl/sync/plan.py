"""Plan a weight transfer: slices that ranks exchange, and their rounds. Imports without torch.

A copy is the intersection of two boxes in Hugging Face coordinates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import heapreplace
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

from megarl.config.errors import ConfigError
from megarl.config.schema import Config, OptimizerConfig
from megarl.parallel.layout import Layout
from megarl.weights.boxes import Box, full_box, intersect, shift, volume
from megarl.weights.families import Shape, adapters, get_family, is_frozen
from megarl.weights.shards import (
    Region,
    Shard,
    Shards,
    float32_tensors,
    hf_shapes,
    hf_shards,
    megatron_layout,
    sglang_shards,
    whole_model,
)

GPUS_PER_NODE = 8
ALIGN = 16  # bytes; aligned pieces can be viewed as any dtype

# Formats of targets without the model's dtype. Block FP8 is SGLang's: in each block of 128 x 128, the
# original is `weight` (float8_e4m3fn) * `weight_scale_inv` (float32).
FP8, FP32 = "float8_e4m3fn", "float32"
FORMAT_BYTES = {FP8: 1, FP32: 4}
BLOCK = 128
SCALE_SUFFIX = "_scale_inv"


class PlanError(ValueError):
    """The plan does not write each target byte exactly once."""


class Copy(NamedTuple):
    """`target[dst_box] = source[src_box]`; both boxes have the same extents."""

    src_rank: int
    src_name: str
    src_box: Box
    dst_rank: int
    dst_name: str
    dst_box: Box

    @property
    def size(self) -> int:
        return volume(self.dst_box)


class Traffic(NamedTuple):
    """Bytes of one rank. local: copied on the rank itself."""

    sent: int
    received: int
    local: int


@dataclass(frozen=True)
class Plan:
    """All copies, in the same order on every rank. Rank r is on node r // gpus_per_node."""

    copies: tuple[Copy, ...]
    sources: dict[int, Shards]
    targets: dict[int, Shards]
    formats: Mapping[str, str] = field(default_factory=dict)  # by name; others have the model's dtype
    gpus_per_node: int = GPUS_PER_NODE
    # Run after `copies`, between targets of a node.
    relays: tuple[Copy, ...] = ()

    def nbytes(self, copy: Copy, itemsize: int) -> int:
        """Return the bytes that a copy writes. itemsize: of the model's dtype."""
        return copy.size * self.target_itemsize(copy, itemsize)

    def part(self, names: Collection[str]) -> Plan:
        targets = {
            rank: {name: shard for name, shard in shards.items() if name in names}
            for rank, shards in self.targets.items()
        }
        copies, relays = (
            tuple(c for c in moves if c.dst_name in names) for moves in (self.copies, self.relays)
        )
        return replace(self, copies=copies, relays=relays, targets=targets)

    def target_itemsize(self, copy: Copy, itemsize: int) -> int:
        """Return bytes per target element."""
        return FORMAT_BYTES[self.formats[copy.dst_name]] if copy.dst_name in self.formats else itemsize

    def direct(self) -> Iterator[Copy]:
        """Yield all copies, with relays as copies from the original source."""
        yield from self.copies
        copies = {(c.dst_rank, c.dst_name, c.dst_box): c for c in self.copies} if self.relays else {}
        for relay in self.relays:
            copy = copies.get((relay.src_rank, relay.src_name, relay.src_box))
            if copy is None:
                where = f"rank {relay.dst_rank}, {relay.dst_name}"
                raise PlanError(f"{where}: rank {relay.src_rank} relays bytes that it does not receive")
            yield relay._replace(src_rank=copy.src_rank, src_name=copy.src_name, src_box=copy.src_box)

    def summary(self, itemsize: int) -> dict[int, Traffic]:
        counts = {rank: [0, 0, 0] for rank in sorted({*self.sources, *self.targets})}
        for copy in (*self.copies, *self.relays):
            size = self.nbytes(copy, itemsize)
            if copy.src_rank == copy.dst_rank:
                counts[copy.dst_rank][2] += size
            else:
                counts[copy.src_rank][0] += size
                counts[copy.dst_rank][1] += size
        return {rank: Traffic(*count) for rank, count in counts.items()}

    def verify(self) -> None:
        """Prove that every target byte is written exactly once, from the right place.

        Raises PlanError with the first tensor at fault."""
        boxes_by_target: dict[tuple[int, str], list[Box]] = defaultdict(list)
        # By identity: replicas share shards and boxes, which the plan keeps alive.
        hf_boxes: dict[tuple[int, int], tuple[str, Box]] = {}

        def locate(side: dict[int, Shards], rank: int, name: str, box: Box) -> tuple[str, Box]:
            shard = side.get(rank, {}).get(name)
            if shard is None:
                raise PlanError(f"rank {rank}, {name}: a copy names a tensor that is not in the layout")
            key = (id(shard), id(box))
            if key not in hf_boxes:
                hf_boxes[key] = to_hf(shard, box, f"rank {rank}, {name}")
            return hf_boxes[key]

        for copy in self.direct():
            source = locate(self.sources, copy.src_rank, copy.src_name, copy.src_box)
            target = locate(self.targets, copy.dst_rank, copy.dst_name, copy.dst_box)
            if source != target:
                where = f"rank {copy.dst_rank}, {copy.dst_name}"
                raise PlanError(f"{where}: {target} would be written with {source}")
            boxes_by_target[copy.dst_rank, copy.dst_name].append(copy.dst_box)
        proved_tilings = set()
        for rank, shards in self.targets.items():
            for name, shard in shards.items():
                boxes = (*sorted(boxes_by_target[rank, name]), *shard.padding)
                if (shard.shape, boxes) not in proved_tilings:
                    _prove_tiling(shard.shape, boxes, f"rank {rank}, {name}")
                    proved_tilings.add((shard.shape, boxes))


def to_hf(shard: Shard, box: Box, where: str) -> tuple[str, Box]:
    """Convert a local box to Hugging Face name and box. Raises PlanError unless one region contains it."""
    for region in shard.regions:
        if len(box) == len(region.local_box) and intersect(box, region.local_box) == box:
            return region.hf_name, shift(box, region.local_box, region.hf_box)
    raise PlanError(f"{where}: {box} does not lie within one region")


def _prove_tiling(shape: Shape, boxes: Sequence[Box], where: str) -> None:
    for index, box in enumerate(boxes):
        if any(start < 0 or stop > size for (start, stop), size in zip(box, shape, strict=True)):
            raise PlanError(f"{where}: {box} is outside of the shape {shape}")
        for earlier_box in boxes[:index]:
            if intersect(box, earlier_box) is not None:
                overlap = f"{earlier_box} and {box} overlap"
                raise PlanError(f"{where}: {overlap}: some bytes would be written twice")
    num_missing = prod(shape) - sum(volume(box) for box in boxes)
    if num_missing:
        raise PlanError(f"{where}: {num_missing} elements would never be written")


Places = dict[int, tuple[str, Box]]


class _Owners:
    def __init__(self, ranks: tuple[int, ...], gpus_per_node: int) -> None:
        self.by_node: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            self.by_node[rank // gpus_per_node].append(rank)
        self.heap = [(0, rank) for rank in sorted(ranks)]  # (load, rank)


class _Part(NamedTuple):
    owners: _Owners
    places: Places
    size: int
    dst_name: str
    dst_box: Box

    def copy(self, source: int, target: int) -> Copy:
        return Copy(source, *self.places[source], target, self.dst_name, self.dst_box)


Queue = list[tuple[int, _Part]]


def make_plan(
    sources: Iterable[tuple[int, Shards]],
    targets: Iterable[tuple[int, Shards]],
    *,
    formats: Mapping[str, str] | None = None,
    gpus_per_node: int = GPUS_PER_NODE,
) -> Plan:
    """Plan a transfer from `sources` to `targets`, both (rank, its shards).

    A box comes from the target's own rank if possible, else from its node, else from the rank that sends
    least. Bytes for several targets of a node cross the network once.

    Regions of different sources must be equal or disjoint. Raises PlanError if they lack a box."""
    source_shards, target_shards = dict(sources), dict(targets)
    parts = _collect_parts(source_shards, target_shards, gpus_per_node)
    receivers = _choose_receivers(parts, target_shards, gpus_per_node)
    copies: list[Copy] = []  # first those on a rank itself
    # By target: parts from its node, from other nodes, and from a receiver on its node.
    node_queues, network_queues, relay_queues = ([Queue() for _ in target_shards] for _ in range(3))
    for position, (rank, shards) in enumerate(target_shards.items()):
        target_parts = parts[id(shards)]
        # Targets start at different layers, or all would wait for one source.
        offset = position * len(target_parts) // len(target_shards)
        for part in (*target_parts[offset:], *target_parts[:offset]):
            receiver = receivers.get((rank // gpus_per_node, id(part)))
            if rank in part.places:
                copies.append(part.copy(rank, rank))
            elif receiver is None:
                node_queues[position].append((rank, part))
            elif receiver == rank:
                network_queues[position].append((rank, part))
            else:
                relay_queues[position].append((rank, part))
    copies += _copy_within_nodes(_interleave(node_queues), gpus_per_node)
    copies += _copy_between_nodes(_interleave(network_queues))
    relays = []
    for rank, part in _interleave(relay_queues):
        place = (part.dst_name, part.dst_box)
        relays.append(Copy(receivers[rank // gpus_per_node, id(part)], *place, rank, *place))
    return Plan(tuple(copies), source_shards, target_shards, formats or {}, gpus_per_node, tuple(relays))


def _interleave(queues: list[Queue]) -> Iterator[tuple[int, _Part]]:
    """Yield the targets' first parts, then their second ones, and so on."""
    return (entry for row in zip_longest(*queues) for entry in row if entry is not None)


def _copy_within_nodes(queue: Iterable[tuple[int, _Part]], gpus_per_node: int) -> Iterator[Copy]:
    """Yield copies from the ranks of the target's node that have sent least so far."""
    loads: dict[int, int] = defaultdict(int)
    for rank, part in queue:
        owners = part.owners.by_node[rank // gpus_per_node]
        source = min(owners, key=lambda owner: (loads[owner], owner))
        loads[source] += part.size
        yield part.copy(source, rank)


def _copy_between_nodes(queue: Iterable[tuple[int, _Part]]) -> Iterator[Copy]:
    """Yield copies from the ranks that have sent least over the network so far."""
    loads: dict[int, int] = defaultdict(int)
    for rank, part in queue:
        # Loads only grow: update outdated entries until the top one is current.
        heap = part.owners.heap
        while loads[heap[0][1]] != heap[0][0]:
            heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        source = heap[0][1]
        loads[source] += part.size
        yield part.copy(source, rank)


def _choose_receivers(
    parts: Mapping[int, Sequence[_Part]], target_shards: Mapping[int, Shards], gpus_per_node: int
) -> dict[tuple[int, int], int]:
    receivers: dict[tuple[int, int], int] = {}
    replicas: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, shards in target_shards.items():
        replicas[rank // gpus_per_node, id(shards)].append(rank)
    for (node, shards_id), ranks in replicas.items():
        load_by_rank = dict.fromkeys(ranks, 0)
        for part in parts[shards_id]:
            if node not in part.owners.by_node:
                receiver = min(load_by_rank, key=load_by_rank.__getitem__)
                load_by_rank[receiver] += part.size
                receivers[node, id(part)] = receiver
    return receivers


def _collect_parts(
    source_shards: dict[int, Shards], target_shards: dict[int, Shards], gpus_per_node: int
) -> dict[int, list[_Part]]:
    """Return parts by the id of a target's shards, which replicas share."""
    # Hugging Face name -> box -> places. Replicas share one place object, whose box is shifted once.
    places_by_box: dict[str, dict[Box, Places]] = defaultdict(lambda: defaultdict(dict))
    shared_places: dict[tuple[str, int], tuple[str, Box]] = {}
    for rank, shards in source_shards.items():
        for name, shard in shards.items():
            for region in shard.regions:
                place = shared_places.setdefault((name, id(region)), (name, region.local_box))
                places_by_box[region.hf_name][region.hf_box].setdefault(rank, place)
    owners = cache(lambda ranks: _Owners(ranks, gpus_per_node))

    @cache
    def cover(hf_name: str, wanted: Box) -> list[tuple[Box, Places]]:
        overlaps = []
        for box, ranks in places_by_box.get(hf_name, {}).items():
            overlap = intersect(box, wanted)
            if overlap is not None:
                shifted_places = {
                    id(place): (place[0], shift(overlap, box, place[1])) for place in ranks.values()
                }
                overlaps.append((overlap, {rank: shifted_places[id(place)] for rank, place in ranks.items()}))
        if sum(volume(part) for part, _ in overlaps) != volume(wanted):
            raise PlanError(f"{hf_name}: the sources do not hold {wanted} exactly once")
        return sorted(overlaps, key=lambda part: part[0])

    parts: dict[int, list[_Part]] = {}
    for shards in target_shards.values():
        if id(shards) in parts:
            continue
        parts[id(shards)] = target_parts = []
        for name, shard in shards.items():
            for region in shard.regions:
                for overlap, places in cover(region.hf_name, region.hf_box):
                    dst_box = shift(overlap, region.hf_box, region.local_box)
                    target_parts.append(_Part(owners(tuple(places)), places, volume(overlap), name, dst_box))
    return parts


@dataclass
class Round:
    """Messages of one rank in flight together: pieces by peer, in staging order."""

    relays: bool
    size: int = 0  # bytes of staging memory
    sends: dict[int, list[Copy]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[Copy]] = field(default_factory=lambda: defaultdict(list))


def align(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def schedule_pieces(plan: Plan, itemsize: int, bucket_bytes: int) -> Iterator[tuple[int, Copy, int, bool]]:
    """Yield (round, piece, its staged bytes, is a relay) of every piece sent between ranks.

    The order is the same on all ranks.
    In a round a rank stages at most `bucket_bytes` / 2 (at least one element) for sends, and for receives. A
    piece goes into the first round with room at both ends after their earlier pieces. There is no deadlock:
    ranks wait only for peers of the round, so the lowest unfinished one can finish."""
    limit = max(ALIGN, bucket_bytes // 2 // ALIGN * ALIGN)
    first_round = 0
    for is_relay, copies in ((False, plan.copies), (True, plan.relays)):
        # (rank, is_sender) -> (last round, its bytes)
        last_rounds: dict[tuple[int, bool], tuple[int, int]] = {}
        for copy in copies:
            if copy.src_rank == copy.dst_rank:
                continue
            source, target = (copy.src_rank, True), (copy.dst_rank, False)
            width = plan.target_itemsize(copy, itemsize)
            for piece in split(copy, limit // width):
                size = align(piece.size * width)
                end_rounds = [last_rounds.get(end, (first_round, 0)) for end in (source, target)]
                round_number = max(end_rounds)[0]
                used_bytes = [nbytes if round_ == round_number else 0 for round_, nbytes in end_rounds]
                if max(used_bytes) + size > limit:
                    round_number, used_bytes = round_number + 1, [0, 0]
                last_rounds[source] = round_number, used_bytes[0] + size
                last_rounds[target] = round_number, used_bytes[1] + size
                yield round_number, piece, size, is_relay
        last_round = max((round_ for round_, _ in last_rounds.values()), default=first_round - 1)
        first_round = last_round + 1


def build_rounds(plan: Plan, rank: int, itemsize: int, bucket_bytes: int) -> list[Round]:
    rounds: dict[int, Round] = {}
    for round_number, piece, size, is_relay in schedule_pieces(plan, itemsize, bucket_bytes):
        if rank not in (piece.src_rank, piece.dst_rank):
            continue
        round_ = rounds.setdefault(round_number, Round(is_relay))
        round_.size += size
        if piece.src_rank == rank:
            round_.sends[piece.dst_rank].append(piece)
        else:
            round_.receives[piece.src_rank].append(piece)
    return [rounds[round_number] for round_number in sorted(rounds)]


def split(copy: Copy, limit: int) -> Iterator[Copy]:
    """Cut a copy into pieces of at most `limit` elements (at least one), if possible by whole rows."""
    if copy.size <= limit:
        yield copy
        return
    axis = next(axis for axis, (start, stop) in enumerate(copy.dst_box) if stop - start > 1)
    length = copy.dst_box[axis][1] - copy.dst_box[axis][0]
    piece_length = max(1, limit // (copy.size // length))
    for piece_start in range(0, length, piece_length):
        piece_stop = min(piece_start + piece_length, length)
        src_box, dst_box = (
            (*box[:axis], (box[axis][0] + piece_start, box[axis][0] + piece_stop), *box[axis + 1 :])
            for box in (copy.src_box, copy.dst_box)
        )
        yield from split(copy._replace(src_box=src_box, dst_box=dst_box), limit)


def engine_ranks(config: Config, trainers: int) -> range:
    """Return ranks with engines: the trainers, or the `parallel.rollout_ranks` after them.

    Raises ConfigError if `rollout.engine_tp` does not divide them."""
    tp, rollout_ranks = config.rollout.engine_tp, config.parallel.rollout_ranks
    first_rank, world = (trainers, rollout_ranks) if rollout_ranks else (0, trainers)
    if world % tp:
        trainer_keys = "parallel.tp * parallel.pp * parallel.dp * parallel.cp"
        keys = "parallel.rollout_ranks" if rollout_ranks else trainer_keys
        raise ConfigError(f"rollout.engine_tp: {tp} does not divide the {world} devices ({keys})")
    if first_rank % tp and not config.rollout.capabilities.remote:
        ranks = f"the {first_rank} training ranks, so an engine could span two nodes"
        remedy = "change it or the number of training ranks"
        raise ConfigError(f"rollout.engine_tp: {tp} does not divide {ranks} ({remedy})")
    return range(first_rank, first_rank + world)


def engine_targets(
    config: Config, hf_config: Mapping[str, Any], trainers: int, *, cpu: bool = False
) -> list[tuple[int, Shards]]:
    """Return (rank, shards) of every rank with an engine. cpu: SGLang's CPU engine.

    The r-th rank has part r % engine_tp of engine r // engine_tp; for servers at URLs, its first rank has
    all. Raises ConfigError if engine_tp does not divide the ranks or the model."""
    ranks, tp, engine = engine_ranks(config, trainers), config.rollout.engine_tp, config.rollout.capabilities
    if engine.sharded:
        shards = [sglang_shards(hf_config, tp, rank, cpu=cpu) for rank in range(tp)]
    elif engine.remote:
        shards = [hf_shards(hf_config), *({} for _ in range(tp - 1))]
    else:
        shards = [hf_shards(hf_config)]
    return [(rank, shards[index % tp]) for index, rank in enumerate(ranks)]


def engine_plan(config: Config, hf_config: Mapping[str, Any], layout: Layout, *, cpu: bool = False) -> Plan:
    sources = megatron_layout(hf_config, layout)
    targets = engine_targets(config, hf_config, layout.world, cpu=cpu)
    float32_names = float32_tensors(hf_config, sglang=config.rollout.capabilities.sharded)
    formats = dict.fromkeys(float32_names, FP32)
    if config.rollout.weights_dtype == "fp8_block":
        if get_family(hf_config).is_latent:
            what = f"fp8_block is not supported for a {hf_config.get('model_type')} model"
            raise ConfigError(f"rollout.weights_dtype: {what} (leave it out)")
        sources, targets, fp8_formats = fp8_block(sources, targets, hf_shapes(hf_config))
        formats |= fp8_formats
    return make_plan(sources, targets, formats=formats, gpus_per_node=config.cluster.gpus_per_node)


def frozen_targets(plan: Plan, hf_config: Mapping[str, Any], optimizer: OptimizerConfig) -> frozenset[str]:
    """Return the targets with only frozen weights, or their scales. Weights with LoRA are not frozen."""
    frozen_names = {
        name.format(l=layer, e=expert)
        for pair, layer, expert in whole_model(hf_config)
        if is_frozen(pair, layer, optimizer) and not adapters(pair, optimizer.lora)
        for name, _ in pair.hf
    }
    shards = {id(shards): shards for shards in plan.targets.values()}.values()
    # Of all ranks, as one rank may hold only padding.
    sources_by_target: dict[str, set[str]] = defaultdict(set)
    for target_shards in shards:
        for name, shard in target_shards.items():
            sources_by_target[name] |= {region.hf_name.removesuffix(SCALE_SUFFIX) for region in shard.regions}
    return frozenset(name for name, hf_names in sources_by_target.items() if hf_names <= frozen_names)


def fp8_block(
    sources: Sequence[tuple[int, Shards]], targets: Sequence[tuple[int, Shards]], shapes: Mapping[str, Shape]
) -> tuple[list[tuple[int, Shards]], list[tuple[int, Shards]], dict[str, str]]:
    """Return sources and targets with scales for projections, and targets' formats.

    The scales of x are x_scale_inv [ceil(rows / 128), ceil(columns / 128)], complete on every source. Raises
    ConfigError unless targets consist of whole blocks, as SGLang requires."""

    def is_linear(hf_name: str) -> bool:
        return hf_name.endswith("_proj.weight")

    scales: Shards = {}
    for name, shape in shapes.items():
        if is_linear(name):
            blocks = _to_blocks(full_box(shape))
            region = Region(name + SCALE_SUFFIX, blocks, blocks)
            scales[name + SCALE_SUFFIX] = Shard(tuple(stop for _, stop in blocks), (region,))
    formats: dict[str, str] = {}
    sources_with_scales: dict[int, Shards] = {}  # ranks with the same shards must still share one object
    quantised_targets: dict[int, Shards] = {}
    for _, shards in targets:
        if id(shards) in quantised_targets:
            continue
        quantised_targets[id(shards)] = target_shards = {}
        for name, shard in shards.items():
            target_shards[name] = shard
            if shard.regions and all(is_linear(region.hf_name) for region in shard.regions):
                scale_name = _scale_name(name)
                target_shards[scale_name] = _build_scales(name, shard, shapes)
                formats |= {name: FP8, scale_name: FP32}
    for _, shards in sources:
        sources_with_scales.setdefault(id(shards), {**shards, **scales})
    return (
        [(rank, sources_with_scales[id(shards)]) for rank, shards in sources],
        [(rank, quantised_targets[id(shards)]) for rank, shards in targets],
        formats,
    )


def _scale_name(name: str) -> str:
    # In SGLang all experts' scales are one parameter: w13_weight.7 has w13_weight_scale_inv.7.
    stem, _, expert = name.rpartition(".")
    return f"{stem}{SCALE_SUFFIX}.{expert}" if expert.isdigit() else name + SCALE_SUFFIX


def _build_scales(name: str, shard: Shard, shapes: Mapping[str, Shape]) -> Shard:
    key = "rollout.weights_dtype: fp8_block"
    if shard.padding:
        raise ConfigError(f"{key}: the engine pads {name} {shard.shape} (choose a smaller rollout.engine_tp)")
    regions = []
    for hf_name, hf_box, local_box in shard.regions:
        shape = shapes[hf_name]
        for (start, stop), size, (local_start, _) in zip(hf_box, shape, local_box, strict=True):
            if start % BLOCK or local_start % BLOCK or (stop % BLOCK and stop != size):
                raise ConfigError(
                    f"{key}: {name} of an engine's rank begins or ends within a block of {BLOCK}: it holds "
                    f"{start} to {stop} of {size} of {hf_name} {shape} "
                    "(choose another rollout.engine_tp, or model)"
                )
        regions.append(Region(hf_name + SCALE_SUFFIX, _to_blocks(hf_box), _to_blocks(local_box)))
    return Shard(tuple(-(-size // BLOCK) for size in shard.shape), tuple(regions))


def _to_blocks(box: Box) -> Box:
    return tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in box)
