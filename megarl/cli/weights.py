"""`megarl weights plan`: what the transfer of a run's weights into its engines moves, and the proof of it, from the configuration alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from statistics import fmean

from megarl.config import load_config
from megarl.config.errors import ConfigError
from megarl.parallel.layout import Layout
from megarl.weights.cost import RankCost, direct_cost, gather_cost, planning_config
from megarl.weights.layout import hf_shapes
from megarl.weights.plan import engine_plan

ITEMSIZE = {"bf16": 2, "fp32": 4}
GB = 1e9
ROWS: tuple[tuple[str, Callable[[RankCost], float], str], ...] = (
    ("sent, same node", lambda cost: cost.node_sent / GB, "GB"),
    ("sent, between nodes", lambda cost: cost.network_sent / GB, "GB"),
    ("received, same node", lambda cost: cost.node_received / GB, "GB"),
    ("received, between nodes", lambda cost: cost.network_received / GB, "GB"),
    ("kept, same GPU", lambda cost: cost.local / GB, "GB"),
    ("rounds (buckets)", lambda cost: cost.rounds, ""),
    ("staging memory", lambda cost: cost.staging / GB, "GB"),
    ("estimate", lambda cost: cost.seconds, "s"),
)


def plan(path: Path, overrides: Sequence[str], *, model: str | None, verify: bool, ranks: bool) -> int:
    """Prints the plan's cost per rank beside that of gathering whole tensors everywhere; PlanError if the proof fails."""
    config = load_config(path, overrides)
    where, hf_config = planning_config(config.model.path, model)
    sizes, itemsize = config.parallel, ITEMSIZE[config.model.dtype]
    try:
        layout = Layout(tp=sizes.tp, pp=sizes.pp, dp=sizes.dp or 1, ep=sizes.ep)
    except ValueError as error:
        raise ConfigError(f"{path}: parallel: {error}") from None
    started = time.perf_counter()
    made = engine_plan(config, hf_config, layout)
    seconds = time.perf_counter() - started
    shapes = hf_shapes(hf_config)
    bucket = config.rollout.transfer_bucket * 2**20
    direct = direct_cost(made, itemsize, bucket, config.cluster)
    gather = gather_cost(made, shapes, itemsize, bucket, config.cluster)
    parameters = sum(map(prod, shapes.values()))
    nodes = -(-layout.world // config.cluster.gpus_per_node)
    tp = config.rollout.engine_tp
    dtype = config.model.dtype if config.rollout.weights_dtype == "model" else "fp8 in blocks"
    print(f"model    {where}: {parameters / 1e9:.2f} B parameters, {parameters * itemsize / GB:.2f} GB in {config.model.dtype}")
    experts = f", ep {layout.ep}" if layout.ep > 1 else ""
    print(f"actor    tp {layout.tp}, pp {layout.pp}, dp {layout.dp}{experts}: {layout.world} GPUs on {nodes} nodes")
    print(f"engines  {layout.world // tp} of tp {tp} ({config.rollout.engine}), weights in {dtype}")
    print(f"plan     {len(made.copies):,} copies, made in {seconds:.1f} s\n")
    print_comparison(direct, gather)
    if ranks:
        print_ranks(direct)
    if verify:
        started = time.perf_counter()
        made.verify()
        elements = sum(prod(shard.shape) for shards in made.targets.values() for shard in shards.values())
        seconds = time.perf_counter() - started
        print(
            f"\nproved in {seconds:.1f} s: each of {elements:,} target elements is written exactly once, from the place that it belongs to"
        )
    return 0


def print_comparison(direct: dict[int, RankCost], gather: dict[int, RankCost]) -> None:
    """Least, mean and most of the ranks, for both ways."""
    print(f"{'per GPU':28s}{'the plan: min':>14s}{'mean':>10s}{'max':>10s}{'full gather: min':>20s}{'mean':>10s}{'max':>10s}")
    for title, of, unit in ROWS:
        cells = []
        for costs, width in ((direct, 14), (gather, 20)):
            values = [of(cost) for cost in costs.values()]
            cells += [
                f"{_number(min(values), unit):>{width}s}",
                f"{_number(fmean(values), unit):>10s}",
                f"{_number(max(values), unit):>10s}",
            ]
        print(f"{f'{title}, {unit}' if unit else title:28s}{''.join(cells)}")
    received, gathered = (max(cost.received for cost in costs.values()) for costs in (direct, gather))
    slowest, slowest_gather = (max(cost.seconds for cost in costs.values()) for costs in (direct, gather))
    if received and slowest:
        less, sooner = gathered / received, slowest_gather / slowest
        print(f"\nthe plan: {less:.1f} times fewer bytes into a GPU; the slowest GPU is done {sooner:.1f} times sooner")


def print_ranks(costs: dict[int, RankCost]) -> None:
    """The plan's figures of every rank."""
    print(f"\n{'rank':>6s}" + "".join(f"{f'{title}, {unit}' if unit else title:>29s}" for title, _, unit in ROWS))
    for rank, cost in costs.items():
        print(f"{rank:6d}" + "".join(f"{_number(of(cost), unit):>29s}" for _, of, unit in ROWS))


def _number(value: float, unit: str) -> str:
    return f"{value:.3f}" if unit else f"{value:.0f}"
