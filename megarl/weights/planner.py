"""Making a plan: which rank sends each box of each target, and in which order. From shapes alone, without torch.

A copy is the intersection of a source's and a target's box in Hugging Face coordinates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapreplace
from itertools import zip_longest
from typing import NamedTuple

from megarl.weights.layout import Box, Shards
from megarl.weights.plan import GPUS_PER_NODE, Copy, Plan, PlanError, intersect, shift, volume

Places = dict[int, tuple[str, Box]]  # rank -> (local name, local box)


class _Holders:
    """The ranks that hold one box, and which of them is to send it."""

    def __init__(self, ranks: tuple[int, ...], gpus_per_node: int) -> None:
        self._gpus_per_node = gpus_per_node
        self._node: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            self._node[rank // gpus_per_node].append(rank)
        self._queue = [(0, rank) for rank in sorted(ranks)]  # a heap of (load when last looked at, rank)

    def on_node(self, node: int) -> bool:
        return node in self._node

    def choose(self, target: int, near: dict[int, int], far: dict[int, int], size: int) -> int:
        """The least loaded on the target's node, else the least loaded of all. `near` and `far`: elements that each rank has been
        given to send within its node and to other nodes so far; they use different wires and are balanced apart."""
        neighbours = self._node.get(target // self._gpus_per_node)
        if neighbours:
            source = min(neighbours, key=lambda rank: (near[rank], rank))
            near[source] += size
            return source
        while far[self._queue[0][1]] != self._queue[0][0]:  # loads only grow: an outdated entry sinks, and the top is the smallest
            heapreplace(self._queue, (far[self._queue[0][1]], self._queue[0][1]))
        source = self._queue[0][1]
        far[source] += size
        return source


class _Part(NamedTuple):
    """A box of a target tensor, and who holds it where."""

    holders: _Holders
    places: Places
    size: int
    dst_name: str
    dst_box: Box


Queue = list[tuple[int, _Part]]  # what one target rank still needs: (the rank, a part)


def make_plan(
    sources: Iterable[tuple[int, Shards]],
    targets: Iterable[tuple[int, Shards]],
    *,
    formats: Mapping[str, str] | None = None,
    gpus_per_node: int = GPUS_PER_NODE,
) -> Plan:
    """Plans how `targets` get their bytes from `sources`, both (rank, shards of that rank).

    Where several ranks hold a box (data-parallel replicas, replicated norms), the target's own rank is taken, else one on its node,
    else any; among equals the one that has sent least so far, so that the load is spread. What several targets of a node want from
    another node comes in once, and is passed on within the node. Regions of different sources must be equal or disjoint in Hugging
    Face coordinates. PlanError if a target wants something that no source has.
    """
    source_of, target_of = dict(sources), dict(targets)
    parts = _parts(source_of, target_of, gpus_per_node)
    entrance = _entrances(target_of, parts, gpus_per_node)
    # All targets are served at the same time, a part each in turn, and begin at different layers: else they would queue for one source.
    # What a rank has itself comes first, then what its node has, so that for the rest all of them are at the same point.
    copies: list[Copy] = []
    from_node: list[Queue] = []
    from_afar: list[Queue] = []
    passed_on: list[Queue] = []
    for position, (rank, shards) in enumerate(target_of.items()):
        mine = parts[id(shards)]
        turn = position * len(mine) // len(target_of)
        for queues in (from_node, from_afar, passed_on):
            queues.append([])
        for part in (*mine[turn:], *mine[:turn]):
            first = entrance.get((rank // gpus_per_node, id(part)))
            if rank in part.places:
                copies.append(Copy(rank, *part.places[rank], rank, part.dst_name, part.dst_box))
            elif first is None:
                from_node[-1].append((rank, part))
            elif first == rank:
                from_afar[-1].append((rank, part))
            else:
                passed_on[-1].append((rank, part))
    near: dict[int, int] = defaultdict(int)
    far: dict[int, int] = defaultdict(int)
    for rank, part in (*_in_turn(from_node), *_in_turn(from_afar)):
        source = part.holders.choose(rank, near, far, part.size)
        copies.append(Copy(source, *part.places[source], rank, part.dst_name, part.dst_box))
    relays = tuple(
        Copy(entrance[rank // gpus_per_node, id(part)], part.dst_name, part.dst_box, rank, part.dst_name, part.dst_box)
        for rank, part in _in_turn(passed_on)
    )
    return Plan(tuple(copies), source_of, target_of, formats or {}, gpus_per_node, relays)


def _in_turn(queues: list[Queue]) -> Iterator[tuple[int, _Part]]:
    """The first of each queue, then the second of each, and so on."""
    return (entry for row in zip_longest(*queues) for entry in row if entry is not None)


def _parts(source_of: dict[int, Shards], target_of: dict[int, Shards], gpus_per_node: int) -> dict[int, list[_Part]]:
    """What each target is made of, by the identity of its shards: ranks with the same shards share them."""
    everywhere = _places(source_of)
    holders: dict[tuple[int, ...], _Holders] = {}
    covers: dict[tuple[str, Box], list[tuple[Box, Places]]] = {}
    parts: dict[int, list[_Part]] = {}
    for shards in target_of.values():
        if id(shards) in parts:
            continue
        parts[id(shards)] = mine = []
        for name, shard in shards.items():
            for region in shard.regions:
                key = (region.hf_name, region.hf_box)
                if key not in covers:
                    covers[key] = _cover(*key, everywhere)
                for common, places in covers[key]:
                    ranks = tuple(places)
                    if ranks not in holders:
                        holders[ranks] = _Holders(ranks, gpus_per_node)
                    dst_box = shift(common, region.hf_box, region.local_box)
                    mine.append(_Part(holders[ranks], places, volume(common), name, dst_box))
    return parts


def _entrances(target_of: dict[int, Shards], parts: dict[int, list[_Part]], gpus_per_node: int) -> dict[tuple[int, int], int]:
    """(node, identity of a part that nobody on the node holds) -> the rank there that gets it from another node; its neighbours with
    the same shards get it from that rank. Neighbours take about the same number of bytes."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, shards in target_of.items():
        groups[rank // gpus_per_node, id(shards)].append(rank)
    entrance = {}
    for (node, shards_id), ranks in groups.items():
        load = dict.fromkeys(ranks, 0)
        for part in parts[shards_id]:
            if not part.holders.on_node(node):
                first = min(load, key=load.__getitem__)
                load[first] += part.size
                entrance[node, id(part)] = first
    return entrance


def _places(sources: dict[int, Shards]) -> dict[str, dict[Box, Places]]:
    """Hugging Face name -> box -> rank -> (local name, local box): who holds which part of each tensor."""
    places: dict[str, dict[Box, Places]] = defaultdict(lambda: defaultdict(dict))
    shared: dict[tuple[str, int], tuple[str, Box]] = {}  # one object for all replicas, by which `_cover` knows them
    for rank, shards in sources.items():
        for name, shard in shards.items():
            for region in shard.regions:
                place = shared.setdefault((name, id(region)), (name, region.local_box))
                places[region.hf_name][region.hf_box].setdefault(rank, place)
    return places


def _cover(hf_name: str, wanted: Box, places: dict[str, dict[Box, Places]]) -> list[tuple[Box, Places]]:
    """Cuts a wanted box into (part, where it is); PlanError if the sources do not cover it once."""
    parts = []
    for box, ranks in places.get(hf_name, {}).items():
        common = intersect(box, wanted)
        if common is not None:
            moved = {id(place): (place[0], shift(common, box, place[1])) for place in ranks.values()}
            parts.append((common, {rank: moved[id(place)] for rank, place in ranks.items()}))
    if sum(volume(part) for part, _ in parts) != volume(wanted):
        raise PlanError(f"{hf_name}: the sources do not hold {wanted} exactly once")
    return sorted(parts, key=lambda part: part[0])
