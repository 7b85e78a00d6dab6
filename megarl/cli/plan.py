"""What a run needs, from its configuration alone, on any machine: `megarl plan` and `megarl weights plan`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from statistics import fmean

from megarl.config import check_config, load_config
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


def plan(
    path: Path, overrides: Sequence[str], model: str | None, mean_length: float | None, everything: bool
) -> int:
    """Print memory, times and layouts. Return 2 where the configuration does not fit, after the line with
    which `megarl train` would stop."""
    from megarl.plan.memory import plan_of
    from megarl.plan.text import layouts, lines
    from megarl.plan.times import Lengths, default_lengths, estimate, search

    config = load_config(path, overrides)
    check_config(config, str(path))
    where, described = planning_config(config.model.path, model)
    made = plan_of(config, described)
    lengths = default_lengths(made)
    if mean_length is not None:
        lengths = Lengths(mean_length, config.rollout.max_response_tokens)
    print("\n".join(lines(made, where, lengths, estimate(made, lengths))))
    print()
    print("\n".join(layouts(search(made, lengths), made, everything=everything)))
    problem = made.problem()
    if problem:
        print(f"\nmegarl: {path}: {problem}", file=sys.stderr)
    return 2 if problem else 0


def plan_weights(path: Path, overrides: Sequence[str], model: str | None, verify: bool, ranks: bool) -> int:
    """Print what a weight transfer costs each rank, beside gathering whole tensors everywhere. Raises
    PlanError if the proof (`verify`) fails."""
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
    size = f"{parameters / 1e9:.2f} B parameters, {parameters * itemsize / GB:.2f} GB in {config.model.dtype}"
    nodes = -(-layout.world // config.cluster.gpus_per_node)
    experts = f", ep {layout.ep}" if layout.ep > 1 else ""
    tp, engine = config.rollout.engine_tp, config.rollout.engine
    dtype = config.model.dtype if config.rollout.weights_dtype == "model" else "fp8 in blocks"
    actor = f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp}{experts}"
    print(f"model    {where}: {size}")
    print(f"actor    {actor}: {layout.world} GPUs on {nodes} nodes")
    print(f"engines  {layout.world // tp} of tp {tp} ({engine}), weights in {dtype}")
    print(f"plan     {len(made.copies):,} copies, made in {seconds:.1f} s\n")
    _print_comparison(direct, gather)
    if ranks:
        print(f"\n{'rank':>6s}" + "".join(f"{_title(title, unit):>29s}" for title, _, unit in ROWS))
        for rank, cost in direct.items():
            print(f"{rank:6d}" + "".join(f"{_number(of(cost), unit):>29s}" for _, of, unit in ROWS))
    if verify:
        started = time.perf_counter()
        made.verify()
        elements = sum(prod(shard.shape) for shards in made.targets.values() for shard in shards.values())
        proof = (
            f"each of {elements:,} target elements is written exactly once, from the place that it belongs to"
        )
        print(f"\nproved in {time.perf_counter() - started:.1f} s: {proof}")
    return 0


def _print_comparison(direct: dict[int, RankCost], gather: dict[int, RankCost]) -> None:
    """Print minimum, mean and maximum over the ranks, of both ways."""
    columns = ((direct, "the plan: min", 14), (gather, "full gather: min", 20))
    heads = [f"{title:>{width}s}{'mean':>10s}{'max':>10s}" for _, title, width in columns]
    print(f"{'per GPU':28s}{''.join(heads)}")
    for title, of, unit in ROWS:
        line = f"{_title(title, unit):28s}"
        for costs, _, width in columns:
            values = [of(cost) for cost in costs.values()]
            line += f"{_number(min(values), unit):>{width}s}{_number(fmean(values), unit):>10s}"
            line += f"{_number(max(values), unit):>10s}"
        print(line)
    received, gathered = (max(cost.received for cost in costs.values()) for costs in (direct, gather))
    slowest, slowest_gather = (max(cost.seconds for cost in costs.values()) for costs in (direct, gather))
    if received and slowest:
        less, sooner = gathered / received, slowest_gather / slowest
        fewer = f"{less:.1f} times fewer bytes into a GPU"
        print(f"\nthe plan: {fewer}; the slowest GPU is done {sooner:.1f} times sooner")


def _title(title: str, unit: str) -> str:
    return f"{title}, {unit}" if unit else title


def _number(value: float, unit: str) -> str:
    return f"{value:.3f}" if unit else f"{value:.0f}"
