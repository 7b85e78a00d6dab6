"""`megarl weights plan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import prod
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from typer import Option, Typer

from megarl.cli.arguments import ConfigFile, Overrides, PublicModel
from megarl.config import load_config
from megarl.config.errors import ConfigError
from megarl.config.hub import describe_models
from megarl.config.text import printable

if TYPE_CHECKING:
    from megarl.sync.cost import RankCost
    from megarl.sync.plan import Plan

GB = 1e9

# Title, figure, decimals.
FIGURES: tuple[tuple[str, Callable[[RankCost], float], int], ...] = (
    ("sent, same node, GB", lambda cost: cost.node_sent / GB, 3),
    ("sent, between nodes, GB", lambda cost: cost.network_sent / GB, 3),
    ("received, same node, GB", lambda cost: cost.node_received / GB, 3),
    ("received, between nodes, GB", lambda cost: cost.network_received / GB, 3),
    ("kept, same GPU, GB", lambda cost: cost.local / GB, 3),
    ("rounds (buckets)", lambda cost: cost.rounds, 0),
    ("staging memory, GB", lambda cost: cost.staging / GB, 3),
    ("estimate, s", lambda cost: cost.seconds, 3),
)

app = Typer(help="Plan the transfer of weights into the engines.")


@app.command("plan")
def plan_weights(
    path: ConfigFile,
    overrides: Overrides,
    *,
    verify: Annotated[
        bool, Option("--verify", help="prove that each byte is written exactly once, from the right place")
    ] = False,
    ranks: Annotated[bool, Option("--ranks", help="also print the figures of each rank")] = False,
    model: PublicModel = None,
) -> int:
    """Estimate a run's weight transfer in bytes, memory and seconds, from its configuration.

    For comparison it prints the cost to gather whole tensors on all GPUs."""
    from megarl.parallel.layout import Layout
    from megarl.sync.cost import direct_cost, gather_cost
    from megarl.sync.plan import engine_plan
    from megarl.weights.known_models import planning_config
    from megarl.weights.shards import hf_shapes

    config = load_config(path, overrides)
    if model is None:
        config = describe_models(config)
    model_name, hf_config = planning_config(config.model.path, model)
    parallel, dtype = config.parallel, config.model.dtype
    itemsize = {"bf16": 2, "fp32": 4}[dtype]
    try:
        layout = Layout(parallel.tp, parallel.pp, parallel.dp or 1, parallel.ep, parallel.cp, parallel.vpp)
    except ValueError as error:
        raise ConfigError(f"{path}: parallel: {error}") from None
    started = time.perf_counter()
    plan = engine_plan(config, hf_config, layout)
    seconds = time.perf_counter() - started
    shapes = hf_shapes(hf_config)
    bucket = config.rollout.transfer_bucket * 2**20
    direct = direct_cost(plan, itemsize, bucket, config.cluster)
    gather = gather_cost(plan, shapes, itemsize, bucket, config.cluster)

    parameters = sum(map(prod, shapes.values()))
    size = f"{parameters / 1e9:.2f} B parameters, {parameters * itemsize / GB:.2f} GB in {dtype}"
    rollout_ranks = config.parallel.rollout_ranks
    nodes = -(-(layout.world + rollout_ranks) // config.cluster.gpus_per_node)
    experts = f", ep {layout.ep}" if layout.ep > 1 else ""
    tp, engine = config.rollout.engine_tp, config.rollout.engine
    engine_dtype = dtype if config.rollout.weights_dtype == "model" else "fp8 in blocks"
    context = f", cp {layout.cp}" if layout.cp > 1 else ""
    actor = f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp}{context}{experts}"
    print(printable(f"model    {model_name}: {size}"))
    print(f"actor    {actor}: {layout.world} GPUs on {nodes} nodes")
    print(
        f"engines  {(rollout_ranks or layout.world) // tp} of tp {tp} ({engine}), weights in {engine_dtype}"
    )
    print(f"plan     {len(plan.copies):,} copies, made in {seconds:.1f} s\n")

    _print_comparison(direct, gather)
    if ranks:
        print(f"\n{'rank':>6s}" + "".join(f"{title:>29s}" for title, _, _ in FIGURES))
        for rank, cost in direct.items():
            print(f"{rank:6d}" + "".join(f"{figure(cost):29.{decimals}f}" for _, figure, decimals in FIGURES))
    if verify:
        _verify(plan)
    return 0


def _verify(made: Plan) -> None:
    started = time.perf_counter()
    made.verify()
    elements = sum(prod(shard.shape) for shards in made.targets.values() for shard in shards.values())
    seconds = time.perf_counter() - started
    proof = "target elements is written exactly once, from the place that it belongs to"
    print(f"\nproved in {seconds:.1f} s: each of {elements:,} {proof}")


def _print_comparison(direct: Mapping[int, RankCost], gather: Mapping[int, RankCost]) -> None:
    """Print figures per GPU of the plan and a full gather."""
    print(f"{'per GPU':28s}{'the plan: min':>14s}{'mean':>10s}{'max':>10s}", end="")
    print(f"{'full gather: min':>20s}{'mean':>10s}{'max':>10s}")
    for title, figure, decimals in FIGURES:
        line = f"{title:28s}"
        for costs, width in ((direct, 14), (gather, 20)):
            values = [figure(cost) for cost in costs.values()]
            line += f"{min(values):{width}.{decimals}f}{fmean(values):10.{decimals}f}"
            line += f"{max(values):10.{decimals}f}"
        print(line)
    plan_bytes, gather_bytes = (max(cost.received for cost in costs.values()) for costs in (direct, gather))
    plan_seconds, gather_seconds = (
        max(cost.seconds for cost in costs.values()) for costs in (direct, gather)
    )
    if plan_bytes and plan_seconds:
        saving = f"{gather_bytes / plan_bytes:.1f} times fewer bytes into a GPU"
        print(
            f"\nthe plan: {saving}; the slowest GPU is done {gather_seconds / plan_seconds:.1f} times sooner"
        )
