"""The plan of a weight transfer, (source rank, tensor, box) -> (target rank, tensor, box), and its proof, from shapes alone.

Both sides are described in Hugging Face coordinates; a copy is an intersection of two boxes there. Imports without torch, so that a
laptop plans a job of 1,024 GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from megarl.weights.formats import format_bytes
from megarl.weights.layout import Box, Shard, Shards

GPUS_PER_NODE = 8


class PlanError(ValueError):
    """A plan that would leave a target byte unwritten, write it twice, or write it from the wrong place."""


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
        """Number of elements."""
        return volume(self.dst_box)


class Traffic(NamedTuple):
    """Bytes of one rank: sent to others, received from others, kept (copied on the rank itself)."""

    sent: int
    received: int
    local: int


@dataclass(frozen=True)
class Plan:
    """All copies of a transfer, in an order that every rank computes alike, with the layouts that they connect.

    `relays` are carried out after `copies`, from one target to another on its node: `src_name` and `src_box` are those of a target,
    to which a copy has brought the bytes. `formats`: target tensors that are not of the model's dtype, by name (see formats.py).
    Rank r is on node r // gpus_per_node.
    """

    copies: tuple[Copy, ...]
    sources: dict[int, Shards]
    targets: dict[int, Shards]
    formats: Mapping[str, str] = field(default_factory=dict)
    gpus_per_node: int = GPUS_PER_NODE
    relays: tuple[Copy, ...] = ()

    def direct(self) -> Iterator[Copy]:
        """All copies as if each came from the source that holds its bytes. PlanError if a relay takes what no copy brings."""
        yield from self.copies
        brought = {(copy.dst_rank, copy.dst_name, copy.dst_box): copy for copy in self.copies} if self.relays else {}
        for relay in self.relays:
            copy = brought.get((relay.src_rank, relay.src_name, relay.src_box))
            if copy is None:
                raise PlanError(f"rank {relay.dst_rank}, {relay.dst_name}: rank {relay.src_rank} is to pass on what it does not get")
            yield relay._replace(src_rank=copy.src_rank, src_name=copy.src_name, src_box=copy.src_box)

    def summary(self, itemsize: int) -> dict[int, Traffic]:
        """Traffic of every rank that takes part; an element of the model's dtype has `itemsize` bytes."""
        sent: dict[int, int] = defaultdict(int)
        received: dict[int, int] = defaultdict(int)
        local: dict[int, int] = defaultdict(int)
        for copy in (*self.copies, *self.relays):
            size = copy.size * format_bytes(self.formats, copy.dst_name, itemsize)
            if copy.src_rank == copy.dst_rank:
                local[copy.dst_rank] += size
            else:
                sent[copy.src_rank] += size
                received[copy.dst_rank] += size
        return {rank: Traffic(sent[rank], received[rank], local[rank]) for rank in sorted({*self.sources, *self.targets})}

    def verify(self) -> None:
        """Proves that every byte of every target is written exactly once, with the Hugging Face bytes that belong there.

        Three facts are checked, none of which uses how the plan was made: the two boxes of each copy are the same box in Hugging
        Face coordinates; the boxes written to a target tensor are disjoint; together with its padding they are as large as the
        tensor. PlanError names the first tensor for which one is false.
        """
        written: dict[tuple[int, str], list[Box]] = defaultdict(list)
        # By identity, as the copies keep the objects alive: shards and boxes of replicas are often the same objects.
        located: dict[tuple[int, int], tuple[str, Box]] = {}
        same: set[tuple[int, int, int, int]] = set()

        def find(side: dict[int, Shards], rank: int, name: str) -> Shard:
            shard = side.get(rank, {}).get(name)
            if shard is None:
                raise PlanError(f"rank {rank}, {name}: a copy names a tensor that is not in the layout")
            return shard

        def locate(shard: Shard, rank: int, name: str, box: Box) -> tuple[str, Box]:
            key = (id(shard), id(box))
            if key not in located:
                located[key] = to_hf(shard, box, f"rank {rank}, {name}")
            return located[key]

        for copy in self.direct():
            from_, to = find(self.sources, copy.src_rank, copy.src_name), find(self.targets, copy.dst_rank, copy.dst_name)
            pair = (id(from_), id(copy.src_box), id(to), id(copy.dst_box))
            if pair not in same:
                source = locate(from_, copy.src_rank, copy.src_name, copy.src_box)
                target = locate(to, copy.dst_rank, copy.dst_name, copy.dst_box)
                if source != target:
                    raise PlanError(f"rank {copy.dst_rank}, {copy.dst_name}: {target} would be written with {source}")
                same.add(pair)
            written[copy.dst_rank, copy.dst_name].append(copy.dst_box)
        proved = set()
        for rank, shards in self.targets.items():
            for name, shard in shards.items():
                boxes = (*sorted(written[rank, name]), *shard.padding)
                if (shard.shape, boxes) not in proved:
                    _prove_tiling(shard.shape, boxes, f"rank {rank}, {name}")
                    proved.add((shard.shape, boxes))


def volume(box: Box) -> int:
    """Number of elements of a box."""
    return prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The common box, or None if it is empty."""
    common = tuple((max(start, other), min(stop, end)) for (start, stop), (other, end) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def shift(box: Box, origin: Box, destination: Box) -> Box:
    """A box within `origin`, moved to where `destination` lies."""
    return tuple((a - o + d, b - o + d) for (a, b), (o, _), (d, _) in zip(box, origin, destination, strict=True))


def to_hf(shard: Shard, box: Box, where: str) -> tuple[str, Box]:
    """Hugging Face coordinates of a box of a local tensor; PlanError unless it lies within one region."""
    for region in shard.regions:
        if len(box) == len(region.local_box) and intersect(box, region.local_box) == box:
            return region.hf_name, shift(box, region.local_box, region.hf_box)
    raise PlanError(f"{where}: {box} does not lie within one region")


def _prove_tiling(shape: tuple[int, ...], boxes: Sequence[Box], where: str) -> None:
    """PlanError unless the boxes lie within `shape`, are disjoint, and fill it."""
    for index, box in enumerate(boxes):
        if any(start < 0 or stop > size for (start, stop), size in zip(box, shape, strict=True)):
            raise PlanError(f"{where}: {box} is outside of the shape {shape}")
        for other in boxes[:index]:
            if intersect(box, other) is not None:
                raise PlanError(f"{where}: {other} and {box} overlap: some bytes would be written twice")
    missing = prod(shape) - sum(volume(box) for box in boxes)
    if missing:
        raise PlanError(f"{where}: {missing} elements would never be written")
