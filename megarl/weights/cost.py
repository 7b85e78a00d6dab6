"""What a weight transfer costs each rank: bytes per class of link, rounds, staging memory, seconds at given speeds. Without torch.

The same for the way that it replaces: every rank gathers whole tensors, bucket by bucket, and cuts out its part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from megarl.config.schema import ClusterConfig
from megarl.weights.families import Shape
from megarl.weights.formats import format_bytes
from megarl.weights.layout import Box
from megarl.weights.plan import Plan, volume
from megarl.weights.rounds import placed


class RankCost(NamedTuple):
    """Bytes of one rank by class of link, its rounds (or buckets), its staging memory in bytes, and its seconds."""

    local: int
    node_sent: int
    node_received: int
    network_sent: int
    network_received: int
    rounds: int
    staging: int
    seconds: float

    @property
    def sent(self) -> int:
        return self.node_sent + self.network_sent

    @property
    def received(self) -> int:
        return self.node_received + self.network_received


class _Links:
    """Bytes that a rank puts on its links."""

    def __init__(self) -> None:
        self.node_sent = self.node_received = self.network_sent = self.network_received = 0

    def send(self, nbytes: int, same_node: bool) -> None:
        if same_node:
            self.node_sent += nbytes
        else:
            self.network_sent += nbytes

    def receive(self, nbytes: int, same_node: bool) -> None:
        if same_node:
            self.node_received += nbytes
        else:
            self.network_received += nbytes

    def seconds(self, cluster: ClusterConfig) -> float:
        """Both directions of a link work at once, links within a node and between nodes one after the other."""
        within = max(self.node_sent, self.node_received) / cluster.node_speed
        return (within + max(self.network_sent, self.network_received) / cluster.network_speed) / 1e9


@dataclass
class _Turn:
    """One rank in one round."""

    links: _Links = field(default_factory=_Links)
    peers: set[int] = field(default_factory=set)
    staging: int = 0


def direct_cost(plan: Plan, itemsize: int, bucket_bytes: int, cluster: ClusterConfig) -> dict[int, RankCost]:
    """Each rank's cost of carrying out a plan; an element of the model's dtype has `itemsize` bytes.

    Seconds: until a rank is through its last round, when each round waits for the ranks that it exchanges messages with.
    """
    local = dict.fromkeys(sorted({*plan.sources, *plan.targets}), 0)
    for copy in plan.copies:
        if copy.src_rank == copy.dst_rank:
            local[copy.dst_rank] += copy.size * format_bytes(plan.formats, copy.dst_name, itemsize)
    links = {rank: _Links() for rank in local}
    rounds: dict[int, dict[int, _Turn]] = defaultdict(lambda: defaultdict(_Turn))
    for number, piece, size, _ in placed(plan, itemsize, bucket_bytes):
        source, target = piece.src_rank, piece.dst_rank
        same_node = source // plan.gpus_per_node == target // plan.gpus_per_node
        nbytes = piece.size * format_bytes(plan.formats, piece.dst_name, itemsize)
        at_source, at_target = rounds[number][source], rounds[number][target]
        for count in (links[source], at_source.links):
            count.send(nbytes, same_node)
        for count in (links[target], at_target.links):
            count.receive(nbytes, same_node)
        for turn, peer in ((at_source, target), (at_target, source)):
            turn.peers.add(peer)
            turn.staging += size
    clock = {rank: size / cluster.copy_speed / 1e9 for rank, size in local.items()}
    taken, staging = dict.fromkeys(local, 0), dict.fromkeys(local, 0)
    for _, turns in sorted(rounds.items()):
        start = {rank: max(clock[rank], *(clock[peer] for peer in turn.peers)) for rank, turn in turns.items()}
        for rank, turn in turns.items():
            clock[rank] = start[rank] + turn.links.seconds(cluster)
            taken[rank] += 1
            staging[rank] = max(staging[rank], turn.staging)
    return {rank: _cost(local[rank], links[rank], taken[rank], staging[rank], clock[rank]) for rank in local}


def _cost(local: int, links: _Links, rounds: int, staging: int, seconds: float) -> RankCost:
    return RankCost(local, links.node_sent, links.node_received, links.network_sent, links.network_received, rounds, staging, seconds)


def gather_cost(plan: Plan, shapes: Mapping[str, Shape], itemsize: int, bucket_bytes: int, cluster: ClusterConfig) -> dict[int, RankCost]:
    """Each rank's cost of gathering all of `shapes` from the plan's sources, counted at its best: nobody is sent what it holds, each
    byte enters a node once, over all its adapters alike, and goes round in the node, so that a rank sends what it receives."""
    whole = sum(prod(shape) for shape in shapes.values()) * itemsize
    held: dict[int, set[tuple[str, Box]]] = defaultdict(set)
    for rank, shards in plan.sources.items():
        held[rank] = {(region.hf_name, region.hf_box) for shard in shards.values() for region in shard.regions if region.hf_name in shapes}
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in sorted({*plan.sources, *plan.targets}):
        nodes[rank // plan.gpus_per_node].append(rank)
    buckets = _buckets((prod(shape) * itemsize for shape in shapes.values()), bucket_bytes)
    costs = {}
    for ranks in nodes.values():
        together = set[tuple[str, Box]]().union(*(held[rank] for rank in ranks))
        entering = (whole - _bytes(together, itemsize)) // len(ranks)
        for rank in ranks:
            own, links = _bytes(held[rank], itemsize), _Links()
            for same_node, nbytes in ((True, whole - own - entering), (False, entering)):
                links.send(nbytes, same_node)
                links.receive(nbytes, same_node)
            seconds = own / cluster.copy_speed / 1e9 + links.seconds(cluster)
            costs[rank] = _cost(own, links, len(buckets), max(buckets), seconds)
    return costs


def _bytes(boxes: Iterable[tuple[str, Box]], itemsize: int) -> int:
    return sum(volume(box) for _, box in boxes) * itemsize


def _buckets(tensors: Iterable[int], limit: int) -> list[int]:
    """Sizes of buckets of whole tensors, in their order; a tensor larger than the limit is a bucket of its own."""
    buckets: list[int] = []
    for size in tensors:
        if buckets and buckets[-1] + size <= limit:
            buckets[-1] += size
        else:
            buckets.append(size)
    return buckets
