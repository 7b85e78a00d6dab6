"""Estimate each rank's cost of a weight transfer, and of a full gather. Imports without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from megarl.config.schema import ClusterConfig
from megarl.sync.plan import Plan, schedule_pieces
from megarl.weights.boxes import Box, pack, volume
from megarl.weights.families import Shape


class RankCost(NamedTuple):
    """A rank's bytes by link, rounds (or buckets), staging bytes and seconds."""

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
class _RankRound:
    nbytes: list[int] = field(default_factory=lambda: [0] * 4)
    peers: set[int] = field(default_factory=set)
    staging: int = 0


def _seconds(nbytes: Sequence[int], cluster: ClusterConfig) -> float:
    # Both directions of a link run at once, the two kinds of links one after the other.
    return (max(nbytes[:2]) / cluster.node_speed + max(nbytes[2:]) / cluster.network_speed) / 1e9


def direct_cost(plan: Plan, itemsize: int, bucket_bytes: int, cluster: ClusterConfig) -> dict[int, RankCost]:
    """Return each rank's cost of a transfer. itemsize: of the model's dtype.

    A rank's round starts when its peers have finished earlier rounds."""
    local_bytes = {rank: traffic.local for rank, traffic in plan.summary(itemsize).items()}
    link_bytes = {rank: [0] * 4 for rank in local_bytes}
    rounds: dict[int, dict[int, _RankRound]] = defaultdict(lambda: defaultdict(_RankRound))
    for number, piece, size, _ in schedule_pieces(plan, itemsize, bucket_bytes):
        source, target = piece.src_rank, piece.dst_rank
        between_nodes = source // plan.gpus_per_node != target // plan.gpus_per_node
        nbytes = plan.nbytes(piece, itemsize)
        for rank, peer, received in ((source, target, 0), (target, source, 1)):
            link = 2 * between_nodes + received
            round_ = rounds[number][rank]
            round_.nbytes[link] += nbytes
            round_.peers.add(peer)
            round_.staging += size
            link_bytes[rank][link] += nbytes
    clock = {rank: size / cluster.copy_speed / 1e9 for rank, size in local_bytes.items()}
    staging: dict[int, list[int]] = {rank: [] for rank in local_bytes}
    for _, rank_rounds in sorted(rounds.items()):
        start = {
            rank: max(clock[member] for member in (rank, *round_.peers))
            for rank, round_ in rank_rounds.items()
        }
        for rank, round_ in rank_rounds.items():
            clock[rank] = start[rank] + _seconds(round_.nbytes, cluster)
            staging[rank].append(round_.staging)
    costs = {}
    for rank, stagings in staging.items():
        node_sent, node_received, sent, received = link_bytes[rank]
        links = node_sent, node_received, sent, received
        largest_staging = max(stagings, default=0)
        costs[rank] = RankCost(local_bytes[rank], *links, len(stagings), largest_staging, clock[rank])
    return costs


def gather_cost(
    plan: Plan, shapes: Mapping[str, Shape], itemsize: int, bucket_bytes: int, cluster: ClusterConfig
) -> dict[int, RankCost]:
    """Return each rank's lowest possible cost of gathering all `shapes` from the plan's sources.

    Each byte enters a node once, evenly over its ranks, and then passes around in a ring."""

    def nbytes(boxes: Iterable[tuple[str, Box]]) -> int:
        return sum(volume(box) for _, box in boxes) * itemsize

    boxes_by_rank: dict[int, set[tuple[str, Box]]] = defaultdict(set)
    for rank, shards in plan.sources.items():
        regions = (region for shard in shards.values() for region in shard.regions)
        boxes_by_rank[rank] = {
            (region.hf_name, region.hf_box) for region in regions if region.hf_name in shapes
        }
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in sorted({*plan.sources, *plan.targets}):
        nodes[rank // plan.gpus_per_node].append(rank)
    sizes = {name: prod(shape) * itemsize for name, shape in shapes.items()}
    buckets = [sum(sizes[name] for name in names) for names in pack(sizes, bucket_bytes)]
    total_bytes = sum(buckets)
    costs = {}
    for ranks in nodes.values():
        node_boxes = set[tuple[str, Box]]().union(*(boxes_by_rank[rank] for rank in ranks))
        network_bytes = (total_bytes - nbytes(node_boxes)) // len(ranks)
        for rank in ranks:
            local_bytes = nbytes(boxes_by_rank[rank])
            node_bytes = total_bytes - local_bytes - network_bytes
            links = (node_bytes, node_bytes, network_bytes, network_bytes)
            seconds = local_bytes / cluster.copy_speed / 1e9 + _seconds(links, cluster)
            costs[rank] = RankCost(local_bytes, *links, len(buckets), max(buckets), seconds)
    return costs
