"""What a configuration holds and what a run of it needs, on any machine: `megarl config show|check|docs`,
`megarl plan` and `megarl weights plan`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.config import Config, check_config, dump_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.load import dump_yaml
from megarl.config.phases import AHEAD_PRESET, PRESETS
from megarl.config.schema import fields, held_section_of

KINDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
    type(None): "null",
}
GB = 1e9


def show(path: Path, overrides: Sequence[str]) -> int:
    """Print the resolved configuration as YAML."""
    print(dump_config(load_config(path, overrides)), end="")
    return 0


def check(path: Path, overrides: Sequence[str]) -> int:
    """Check keys, types and contradictions, and the tasks of reasoning-gym; the model's folder and the data
    files too, where the folder is on this machine."""
    from megarl.data.gym import check_tasks, gym_entries

    config = load_config(path, overrides)
    check_config(config, str(path))
    if not config.model.path.is_dir():
        check_tasks(gym_entries(config.data))
        absent = f"model.path {config.model.path} is not on this machine, so the layout was not checked"
        print(f"{path}: the configuration holds; {absent}")
        return 0
    from megarl.schedule.preflight import preflight

    preflight(config, str(path))
    print(f"{path}: the configuration holds")
    return 0


def docs() -> int:
    """Print every field: key, meaning; kind, unit, default, what recipes set it to, source."""

    def yaml(value: Any) -> str:
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(yaml, value))}]"
        return dump_yaml({"": value}).partition(":")[2].strip()

    for key, field in documented():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        kind = " or ".join(_kinds(field.annotation)) + (f", in {extra['unit']}" if extra.get("unit") else "")
        default = "required" if field.is_required() else f"default {yaml(field.default)}"
        by_recipe = []
        for recipe, preset in (PRESETS | {"with schedule.ahead": AHEAD_PRESET}).items():
            value: Any = preset
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                by_recipe.append(f"{recipe} {yaml(value)}")
        default += f" ({', '.join(by_recipe)})" if by_recipe else ""
        print(f"{key}\n    {field.description}\n    {kind}; {default}; source: {extra.get('source')}")
    return 0


def documented() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every field of the schema with its dotted key; of sections in a list and of those with names of
    the user's too, as `data.eval[].name` and `reward.terms.<name>.weight`."""

    def below(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
        for key, field in fields(model, prefix):
            yield key, field
            held = held_section_of(field)
            if held is not None:
                yield from below(
                    held, f"{key}[]." if get_origin(field.annotation) is tuple else f"{key}.<name>."
                )

    yield from below(Config)


def _kinds(annotation: Any) -> list[str]:
    """Return the types of a field in plain English; choices as they are written."""
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return [str(choice) for choice in members]
    if origin is tuple and get_origin(members[0]) is Literal:
        return [f"list of some of {', '.join(_kinds(members[0]))}"]
    if origin is tuple and issubclass(members[0], BaseModel):
        return ["list of paths, or of sections"]
    if origin is tuple:
        count = "" if members[-1] is ... else f"{len(members)} "
        return [f"list of {count}{KINDS[members[0]]}s"]
    if origin is dict:
        return ["section of your own keys"]
    if members:
        return [kind for member in members for kind in _kinds(member)]
    return [KINDS[annotation]]


def plan(
    path: Path,
    overrides: Sequence[str],
    model: str | None,
    mean_length: float | None,
    everything: bool,
    best: bool,
    simulate: bool = False,
    length_deviation: float | None = None,
    lengths: Path | None = None,
    kept: float | None = None,
    balance: Any = "queue",
) -> int:
    """Print memory, times and layouts, or the overrides of the best layout alone, or a simulated step. Return
    2 where the
    configuration does not fit, after the line with which `megarl train` would stop. Where a run would be on
    this machine's CPU, print what it needs of that."""
    from megarl.parallel.machine import driver_version, memory_here
    from megarl.plan import text
    from megarl.plan.memory import plan_of
    from megarl.plan.search import Found, search
    from megarl.plan.times import default_lengths, estimate, with_deviation
    from megarl.weights.cost import planning_config

    config = load_config(path, overrides)
    check_config(config, str(path))
    for option, value, most in (
        ("--mean-length", mean_length, None),
        ("--length-deviation", length_deviation, None),
        ("--kept", kept, 1.0),
    ):
        if value is not None and not 0 < value <= (most or value):
            above = f" and at most {most:g}" if most else ""
            raise ConfigError(f"{option}: must be above 0{above} (got {value:g})")
    if simulate and not config.has_engine:
        raise ConfigError(f"{path}: recipe: sft draws no responses (--simulate is for the others)")
    where, described = planning_config(config.model.path, model)
    here = config.parallel.device == "auto" and config.model.layers != "te" and driver_version() is None
    if config.parallel.device == "cpu" or (here and model is None and config.model.path.is_dir()):
        if simulate:
            raise ConfigError(f"{path}: --simulate: its times are those of GPUs (add parallel.device=cuda)")
        portable = config.model.model_copy(update={"layers": "portable"})
        made, memory = plan_of(config.model_copy(update={"model": portable}), described), memory_here()
        print("\n".join(text.on_cpu(made, where, memory)))
        problem, near = made.problem_on_cpu(memory), made.warning_on_cpu(memory)
        if problem or near:
            print(f"\nmegarl: {path}: {problem or near}", file=sys.stderr)
        return 2 if problem else 0
    made = plan_of(config, described)
    drawn = default_lengths(made)
    if mean_length is not None:
        drawn = replace(drawn, mean=mean_length)
    if length_deviation is not None:
        drawn = with_deviation(drawn, length_deviation)
    if simulate:
        from megarl.plan.simulate import compare, recorded, work_of

        source, draw = "log-normal", None
        if lengths is not None:
            drawn, draw, source = recorded(lengths, drawn)
        work = work_of(config, drawn, balance, kept, draw)
        print("\n".join(text.simulated(compare(made, work, drawn), work, drawn, source)))
        return 0
    seconds, problem = estimate(made, drawn), made.problem()
    current = Found(made, None if problem else seconds, problem)
    if best:
        print("\n".join(text.best(search(made, drawn), current, path)))
        return 0
    print("\n".join(text.lines(made, where, drawn, seconds)))
    print()
    print("\n".join(text.layouts(search(made, drawn), current, everything=everything)))
    if problem:
        print(f"\nmegarl: {path}: {problem}", file=sys.stderr)
    return 2 if problem else 0


def plan_weights(path: Path, overrides: Sequence[str], model: str | None, verify: bool, ranks: bool) -> int:
    """Print what a weight transfer costs each rank, beside gathering whole tensors everywhere. Raises
    PlanError if the proof (`verify`) fails."""
    from megarl.parallel.layout import Layout
    from megarl.weights.cost import RankCost, direct_cost, gather_cost, planning_config
    from megarl.weights.layout import hf_shapes
    from megarl.weights.plan import engine_plan

    config = load_config(path, overrides)
    where, hf_config = planning_config(config.model.path, model)
    sizes, dtype = config.parallel, config.model.dtype
    itemsize = {"bf16": 2, "fp32": 4}[dtype]
    try:
        layout = Layout(sizes.tp, sizes.pp, sizes.dp or 1, sizes.ep, sizes.cp, sizes.vpp)
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
    size = f"{parameters / 1e9:.2f} B parameters, {parameters * itemsize / GB:.2f} GB in {dtype}"
    apart = config.parallel.rollout_ranks
    nodes = -(-(layout.world + apart) // config.cluster.gpus_per_node)
    experts = f", ep {layout.ep}" if layout.ep > 1 else ""
    tp, engine = config.rollout.engine_tp, config.rollout.engine
    engine_dtype = dtype if config.rollout.weights_dtype == "model" else "fp8 in blocks"
    context = f", cp {layout.cp}" if layout.cp > 1 else ""
    actor = f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp}{context}{experts}"
    print(f"model    {where}: {size}")
    print(f"actor    {actor}: {layout.world} GPUs on {nodes} nodes")
    print(f"engines  {(apart or layout.world) // tp} of tp {tp} ({engine}), weights in {engine_dtype}")
    print(f"plan     {len(made.copies):,} copies, made in {seconds:.1f} s\n")

    rows: tuple[tuple[str, Callable[[RankCost], float], int], ...] = (  # title, figure, its decimals
        ("sent, same node, GB", lambda cost: cost.node_sent / GB, 3),
        ("sent, between nodes, GB", lambda cost: cost.network_sent / GB, 3),
        ("received, same node, GB", lambda cost: cost.node_received / GB, 3),
        ("received, between nodes, GB", lambda cost: cost.network_received / GB, 3),
        ("kept, same GPU, GB", lambda cost: cost.local / GB, 3),
        ("rounds (buckets)", lambda cost: cost.rounds, 0),
        ("staging memory, GB", lambda cost: cost.staging / GB, 3),
        ("estimate, s", lambda cost: cost.seconds, 3),
    )
    print(f"{'per GPU':28s}{'the plan: min':>14s}{'mean':>10s}{'max':>10s}", end="")
    print(f"{'full gather: min':>20s}{'mean':>10s}{'max':>10s}")
    for title, of, decimals in rows:
        line = f"{title:28s}"
        for costs, width in ((direct, 14), (gather, 20)):
            values = [of(cost) for cost in costs.values()]
            line += f"{min(values):{width}.{decimals}f}{fmean(values):10.{decimals}f}"
            line += f"{max(values):10.{decimals}f}"
        print(line)
    received, gathered = (max(cost.received for cost in costs.values()) for costs in (direct, gather))
    slowest, slowest_gather = (max(cost.seconds for cost in costs.values()) for costs in (direct, gather))
    if received and slowest:
        fewer = f"{gathered / received:.1f} times fewer bytes into a GPU"
        print(f"\nthe plan: {fewer}; the slowest GPU is done {slowest_gather / slowest:.1f} times sooner")
    if ranks:
        print(f"\n{'rank':>6s}" + "".join(f"{title:>29s}" for title, _, _ in rows))
        for rank, cost in direct.items():
            print(f"{rank:6d}" + "".join(f"{of(cost):29.{decimals}f}" for _, of, decimals in rows))
    if verify:
        started = time.perf_counter()
        made.verify()
        elements = sum(prod(shard.shape) for shards in made.targets.values() for shard in shards.values())
        seconds = time.perf_counter() - started
        proof = "target elements is written exactly once, from the place that it belongs to"
        print(f"\nproved in {seconds:.1f} s: each of {elements:,} {proof}")
    return 0
