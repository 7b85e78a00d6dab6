"""The plan of a weight transfer, (source rank, tensor, box) -> (target rank, tensor, box), computed and proved from shapes alone.

Both sides are described in Hugging Face coordinates; a copy is an intersection of two boxes there. Imports without torch, so that a
laptop plans a job of 1,024 GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megarl.weights.layout import Box, Shard, Shards


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
    """All copies of a transfer, in an order that every rank computes alike, with the layouts that they connect."""

    copies: tuple[Copy, ...]
    sources: dict[int, Shards]
    targets: dict[int, Shards]

    def summary(self, itemsize: int) -> dict[int, Traffic]:
        """Traffic of every rank that takes part, for elements of `itemsize` bytes."""
        sent: dict[int, int] = defaultdict(int)
        received: dict[int, int] = defaultdict(int)
        local: dict[int, int] = defaultdict(int)
        for copy in self.copies:
            size = copy.size * itemsize
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
        located: dict[tuple[int, Box], tuple[str, Box]] = {}  # by (shard object, box): shards of replicas are often one object

        def locate(side: dict[int, Shards], rank: int, name: str, box: Box) -> tuple[str, Box]:
            shard = side.get(rank, {}).get(name)
            if shard is None:
                raise PlanError(f"rank {rank}, {name}: a copy names a tensor that is not in the layout")
            key = (id(shard), box)
            if key not in located:
                located[key] = _to_hf(shard, box, f"rank {rank}, {name}")
            return located[key]

        for copy in self.copies:
            source = locate(self.sources, copy.src_rank, copy.src_name, copy.src_box)
            target = locate(self.targets, copy.dst_rank, copy.dst_name, copy.dst_box)
            if source != target:
                raise PlanError(f"rank {copy.dst_rank}, {copy.dst_name}: {target} would be written with {source}")
            written[copy.dst_rank, copy.dst_name].append(copy.dst_box)
        proved = set()
        for rank, shards in self.targets.items():
            for name, shard in shards.items():
                boxes = (*sorted(written[rank, name]), *shard.padding)
                if (shard.shape, boxes) not in proved:
                    _prove_tiling(shard.shape, boxes, f"rank {rank}, {name}")
                    proved.add((shard.shape, boxes))


def make_plan(sources: Iterable[tuple[int, Shards]], targets: Iterable[tuple[int, Shards]]) -> Plan:
    """Plans how `targets` get their bytes from `sources`, both (rank, shards of that rank).

    Where several ranks hold a box (data-parallel replicas, replicated norms), the target's own rank is taken, else the one that has
    sent least so far, so that the load is spread. Regions of different sources must be equal or disjoint in Hugging Face
    coordinates. PlanError if a target wants something that no source has.
    """
    source_of, target_of = dict(sources), dict(targets)
    holders = _holders(source_of)
    sent: dict[int, int] = defaultdict(int)
    pieces: dict[tuple[str, Box], list[tuple[Box, dict[int, tuple[str, Box]]]]] = {}
    copies = []
    for rank, shards in target_of.items():
        for name, shard in shards.items():
            for region in shard.regions:
                key = (region.hf_name, region.hf_box)
                if key not in pieces:
                    pieces[key] = _cover(region.hf_name, region.hf_box, holders)
                for common, held_by in pieces[key]:
                    source = rank if rank in held_by else min(held_by, key=lambda holder: (sent[holder], holder))
                    if source != rank:
                        sent[source] += volume(common)
                    dst_box = _shift(common, region.hf_box, region.local_box)
                    src_name, src_box = held_by[source]
                    copies.append(Copy(source, src_name, src_box, rank, name, dst_box))
    return Plan(tuple(copies), source_of, target_of)


def volume(box: Box) -> int:
    """Number of elements of a box."""
    return prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The common box, or None if it is empty."""
    common = tuple((max(start, other), min(stop, end)) for (start, stop), (other, end) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _holders(sources: dict[int, Shards]) -> dict[str, dict[Box, dict[int, tuple[str, Box]]]]:
    """Hugging Face name -> box -> rank -> (local name, local box): who holds which part of each tensor."""
    holders: dict[str, dict[Box, dict[int, tuple[str, Box]]]] = defaultdict(lambda: defaultdict(dict))
    for rank, shards in sources.items():
        for name, shard in shards.items():
            for region in shard.regions:
                holders[region.hf_name][region.hf_box].setdefault(rank, (name, region.local_box))
    return holders


def _cover(
    hf_name: str, wanted: Box, holders: dict[str, dict[Box, dict[int, tuple[str, Box]]]]
) -> list[tuple[Box, dict[int, tuple[str, Box]]]]:
    """Cuts a wanted box into (part, rank -> (local name, local box of the part)); PlanError if the sources do not cover it once."""
    parts = []
    for box, ranks in holders.get(hf_name, {}).items():
        common = intersect(box, wanted)
        if common is not None:
            parts.append((common, {rank: (name, _shift(common, box, local)) for rank, (name, local) in ranks.items()}))
    if sum(volume(part) for part, _ in parts) != volume(wanted):
        raise PlanError(f"{hf_name}: the sources do not hold {wanted} exactly once")
    return sorted(parts, key=lambda part: part[0])


def _shift(box: Box, origin: Box, destination: Box) -> Box:
    """A box within `origin`, moved to where `destination` lies."""
    return tuple((a - o + d, b - o + d) for (a, b), (o, _), (d, _) in zip(box, origin, destination, strict=True))


def _to_hf(shard: Shard, box: Box, where: str) -> tuple[str, Box]:
    """Hugging Face coordinates of a box of a local tensor; PlanError unless it lies within one region."""
    for region in shard.regions:
        if len(box) == len(region.local_box) and intersect(box, region.local_box) == box:
            return region.hf_name, _shift(box, region.local_box, region.hf_box)
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
