"""What a weight transfer costs each rank. Imports without torch.

Costs are bytes per class of link, rounds, staging memory, and seconds at given speeds. They are compared with
a full gather, in which every rank gets whole tensors, bucket by bucket, and cuts out its part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from megarl.config.schema import ClusterConfig
from megarl.sync.plan import Plan, placed
from megarl.weights.boxes import Box, volume
from megarl.weights.families import Shape


class RankCost(NamedTuple):
    """Bytes of one rank by class of link, its rounds (or buckets), bytes of staging memory, and seconds."""

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


@dataclass
class _Turn:
    """What a rank does in one round of messages."""

    moved: list[int] = field(default_factory=lambda: [0] * 4)  # bytes, as in RankCost from node_sent on
    peers: set[int] = field(default_factory=set)
    staging: int = 0


def _seconds(moved: Sequence[int], cluster: ClusterConfig) -> float:
    """Return seconds: both directions of a link work at once, the two kinds one after the other."""
    return (max(moved[:2]) / cluster.node_speed + max(moved[2:]) / cluster.network_speed) / 1e9


def direct_cost(plan: Plan, itemsize: int, bucket_bytes: int, cluster: ClusterConfig) -> dict[int, RankCost]:
    """Return each rank's cost of a transfer by a plan.

    itemsize: bytes of an element of the model's dtype. Seconds count to the end of a rank's last round, where
    each round waits for the ranks that it exchanges messages with."""
    local = {rank: traffic.local for rank, traffic in plan.summary(itemsize).items()}
    total = {rank: [0] * 4 for rank in local}
    rounds: dict[int, dict[int, _Turn]] = defaultdict(lambda: defaultdict(_Turn))
    for number, piece, size, _ in placed(plan, itemsize, bucket_bytes):
        source, target = piece.src_rank, piece.dst_rank
        between_nodes = source // plan.gpus_per_node != target // plan.gpus_per_node
        nbytes = plan.nbytes(piece, itemsize)
        for rank, peer, received in ((source, target, 0), (target, source, 1)):
            link = 2 * between_nodes + received
            turn = rounds[number][rank]
            turn.moved[link] += nbytes
            turn.peers.add(peer)
            turn.staging += size
            total[rank][link] += nbytes
    clock = {rank: size / cluster.copy_speed / 1e9 for rank, size in local.items()}
    staging: dict[int, list[int]] = {rank: [] for rank in local}  # of each of its rounds
    for _, turns in sorted(rounds.items()):
        start = {
            rank: max(clock[rank], *(clock[peer] for peer in turn.peers)) for rank, turn in turns.items()
        }
        for rank, turn in turns.items():
            clock[rank] = start[rank] + _seconds(turn.moved, cluster)
            staging[rank].append(turn.staging)
    costs = {}
    for rank, stagings in staging.items():
        node_sent, node_received, sent, received = total[rank]
        most, seconds = max(stagings, default=0), clock[rank]
        costs[rank] = RankCost(
            local[rank], node_sent, node_received, sent, received, len(stagings), most, seconds
        )
    return costs


def gather_cost(
    plan: Plan, shapes: Mapping[str, Shape], itemsize: int, bucket_bytes: int, cluster: ClusterConfig
) -> dict[int, RankCost]:
    """Return each rank's cost of gathering all of `shapes` from the plan's sources, at best.

    A rank receives only bytes that it does not hold. Each byte enters a node once, over all adapters evenly.
    Within the node it is passed in a ring, so that a rank sends as many bytes as it receives."""

    def nbytes(boxes: Iterable[tuple[str, Box]]) -> int:
        return sum(volume(box) for _, box in boxes) * itemsize

    held: dict[int, set[tuple[str, Box]]] = defaultdict(set)
    for rank, shards in plan.sources.items():
        regions = (region for shard in shards.values() for region in shard.regions)
        held[rank] = {(region.hf_name, region.hf_box) for region in regions if region.hf_name in shapes}
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in sorted({*plan.sources, *plan.targets}):
        nodes[rank // plan.gpus_per_node].append(rank)
    buckets: list[int] = []  # of whole tensors, in their order; one that is larger than the limit has its own
    for size in (prod(shape) * itemsize for shape in shapes.values()):
        if buckets and buckets[-1] + size <= bucket_bytes:
            buckets[-1] += size
        else:
            buckets.append(size)
    whole = sum(buckets)
    costs = {}
    for ranks in nodes.values():
        there = set[tuple[str, Box]]().union(*(held[rank] for rank in ranks))
        entering = (whole - nbytes(there)) // len(ranks)
        for rank in ranks:
            own = nbytes(held[rank])
            within = whole - own - entering
            moved = (within, within, entering, entering)
            seconds = own / cluster.copy_speed / 1e9 + _seconds(moved, cluster)
            costs[rank] = RankCost(own, *moved, len(buckets), max(buckets), seconds)
    return costs
