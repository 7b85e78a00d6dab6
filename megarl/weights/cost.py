"""What a weight transfer costs each rank, and the sizes of public models to plan with. Imports without torch.

Costs are bytes per class of link, rounds, staging memory, and seconds at given speeds; the same for the way
that the plan replaces, in which every rank gathers whole tensors, bucket by bucket, and cuts out its part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.errors import ConfigError
from megarl.config.schema import ClusterConfig
from megarl.weights.families import Shape, read_config
from megarl.weights.layout import Box
from megarl.weights.plan import Plan, placed, volume


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
class _Links:
    """Bytes that a rank has [sent, received] within its node and between nodes, in all or in one round."""

    node: list[int] = field(default_factory=lambda: [0, 0])
    network: list[int] = field(default_factory=lambda: [0, 0])
    peers: set[int] = field(default_factory=set)
    staging: int = 0

    def add(self, same_node: bool, sent: int, received: int) -> None:
        link = self.node if same_node else self.network
        link[0] += sent
        link[1] += received

    def seconds(self, cluster: ClusterConfig) -> float:
        """Return seconds: both directions of a link work at once, the two kinds one after the other."""
        return (max(self.node) / cluster.node_speed + max(self.network) / cluster.network_speed) / 1e9

    def cost(self, local: int, rounds: int, staging: int, seconds: float) -> RankCost:
        (node_sent, node_received), (sent, received) = self.node, self.network
        return RankCost(local, node_sent, node_received, sent, received, rounds, staging, seconds)


def direct_cost(plan: Plan, itemsize: int, bucket_bytes: int, cluster: ClusterConfig) -> dict[int, RankCost]:
    """Return each rank's cost of carrying out a plan; an element of the model's dtype has `itemsize` bytes.

    Seconds: until a rank is through its last round, when each round waits for the ranks that it exchanges
    messages with.
    """
    ranks = sorted({*plan.sources, *plan.targets})
    local, taken, staging = (dict.fromkeys(ranks, 0) for _ in range(3))
    for copy in plan.copies:
        if copy.src_rank == copy.dst_rank:
            local[copy.dst_rank] += plan.nbytes(copy, itemsize)
    total = {rank: _Links() for rank in ranks}
    rounds: dict[int, dict[int, _Links]] = defaultdict(lambda: defaultdict(_Links))
    for number, piece, size, _ in placed(plan, itemsize, bucket_bytes):
        source, target = piece.src_rank, piece.dst_rank
        same_node = source // plan.gpus_per_node == target // plan.gpus_per_node
        nbytes = plan.nbytes(piece, itemsize)
        for rank, peer, sent, received in ((source, target, nbytes, 0), (target, source, 0, nbytes)):
            turn = rounds[number][rank]
            total[rank].add(same_node, sent, received)
            turn.add(same_node, sent, received)
            turn.peers.add(peer)
            turn.staging += size
    clock = {rank: size / cluster.copy_speed / 1e9 for rank, size in local.items()}
    for _, turns in sorted(rounds.items()):
        start = {
            rank: max(clock[rank], *(clock[peer] for peer in turn.peers)) for rank, turn in turns.items()
        }
        for rank, turn in turns.items():
            clock[rank] = start[rank] + turn.seconds(cluster)
            taken[rank] += 1
            staging[rank] = max(staging[rank], turn.staging)
    return {
        rank: links.cost(local[rank], taken[rank], staging[rank], clock[rank])
        for rank, links in total.items()
    }


def gather_cost(
    plan: Plan, shapes: Mapping[str, Shape], itemsize: int, bucket_bytes: int, cluster: ClusterConfig
) -> dict[int, RankCost]:
    """Return each rank's cost of gathering all of `shapes` from the plan's sources, counted at its best.

    Nobody is sent what it holds, each byte enters a node once, over all its adapters alike, and goes round in
    the node, so that a rank sends what it receives.
    """

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
        entering = (whole - nbytes(set[tuple[str, Box]]().union(*(held[rank] for rank in ranks)))) // len(
            ranks
        )
        for rank in ranks:
            own = nbytes(held[rank])
            within = whole - own - entering
            links = _Links([within, within], [entering, entering])
            seconds = own / cluster.copy_speed / 1e9 + links.seconds(cluster)
            costs[rank] = links.cost(own, len(buckets), max(buckets), seconds)
    return costs


# Public models, from the config.json of each model's repository: layers, hidden size, heads, key/value heads,
# head_dim, feed-forward columns, vocabulary, tied embeddings; of a mixture also experts, experts per token,
# columns of an expert.
_KNOWN: dict[str, tuple[str | int | bool, ...]] = {
    "Qwen2.5-0.5B": ("qwen2", 24, 896, 14, 2, 64, 4864, 151936, True),
    "Qwen2.5-1.5B": ("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, True),
    "Qwen2.5-3B": ("qwen2", 36, 2048, 16, 2, 128, 11008, 151936, True),
    "Qwen2.5-7B": ("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, False),
    "Qwen2.5-14B": ("qwen2", 48, 5120, 40, 8, 128, 13824, 152064, False),
    "Qwen2.5-32B": ("qwen2", 64, 5120, 40, 8, 128, 27648, 152064, False),
    "Qwen2.5-72B": ("qwen2", 80, 8192, 64, 8, 128, 29568, 152064, False),
    "Qwen3-0.6B": ("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, True),
    "Qwen3-1.7B": ("qwen3", 28, 2048, 16, 8, 128, 6144, 151936, True),
    "Qwen3-4B": ("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, True),
    "Qwen3-8B": ("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False),
    "Qwen3-14B": ("qwen3", 40, 5120, 40, 8, 128, 17408, 151936, False),
    "Qwen3-32B": ("qwen3", 64, 5120, 64, 8, 128, 25600, 151936, False),
    "Llama-3.2-1B": ("llama", 16, 2048, 32, 8, 64, 8192, 128256, True),
    "Llama-3.2-3B": ("llama", 28, 3072, 24, 8, 128, 8192, 128256, True),
    "Llama-3.1-8B": ("llama", 32, 4096, 32, 8, 128, 14336, 128256, False),
    "Llama-3.1-70B": ("llama", 80, 8192, 64, 8, 128, 28672, 128256, False),
    "Qwen3-30B-A3B": ("qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, False, 128, 8, 768),
    "Qwen3-235B-A22B": ("qwen3_moe", 94, 4096, 64, 4, 128, 12288, 151936, False, 128, 8, 1536),
}
_KEYS = (
    *(
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("intermediate_size", "vocab_size", "tie_word_embeddings"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    name: dict(zip(_KEYS, sizes, strict=False)) for name, sizes in _KNOWN.items()
}


def planning_config(path: Path, name: str | None = None) -> tuple[str, Mapping[str, Any]]:
    """Return (where it is from, config.json) of the model to plan with; ConfigError if there is none.

    It is a known one by `name`, else the folder's, else a known one that is named like the folder (a suffix
    such as -Instruct aside).
    """
    if name is None and (path / "config.json").is_file():
        return str(path / "config.json"), read_config(path)
    wanted = path.name if name is None else name
    found = max(
        (known for known in KNOWN_MODELS if f"{wanted}-".lower().startswith(f"{known}-".lower())),
        key=len,
        default=None,
    )
    if found is None:
        key = (
            f"model.path: {path}: no config.json there, and {wanted!r}"
            if name is None
            else f"--model: {name!r}"
        )
        raise ConfigError(f"{key} is not a known model (known: {', '.join(KNOWN_MODELS)})")
    return f"the known sizes of {found}", KNOWN_MODELS[found]
