"""`megarl config` and `megarl plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer import Option, Typer

from megarl.cli.arguments import ConfigFile, Overrides, PublicModel
from megarl.config import Config, check_config, dump_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.hub import RECORD, describe_models, local_inputs
from megarl.config.load import dump_yaml
from megarl.config.phases import GROUPS, resident_groups, select_phases, select_stages
from megarl.config.recipes import AHEAD_PRESET, IN_FLIGHT_PRESET, PRESETS
from megarl.config.schema import PRETRAINING
from megarl.config.schema.section import entry_model, fields
from megarl.config.text import printable

if TYPE_CHECKING:
    from megarl.plan.inputs import PlanInputs
    from megarl.plan.simulate import Balance
    from megarl.plan.times import Lengths

KINDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
    type(None): "null",
}

PAGE_OF_KEYS = """# Keys of a configuration

All keys with their defaults, printed by `megarl config docs --markdown`. [configuration.md](configuration.md)
explains how the layers of a configuration are combined. Defaults of recipes are in parentheses."""

app = Typer(help="Print, validate or explain a configuration.")


@app.command()
def show(path: ConfigFile, overrides: Overrides) -> int:
    """Print the configuration with bases, preset, defaults and overrides resolved."""
    print(dump_config(load_config(path, overrides)), end="")
    return 0


@app.command()
def check(path: ConfigFile, overrides: Overrides) -> int:
    """Find contradictions between keys, and check that the model and the data fit them.

    If the model's folder is not on this machine, only the keys and generated tasks are checked."""
    from megarl.data.generated import check_tasks, gym_entries

    config = load_config(path, overrides)
    check_config(config, str(path))
    try:
        config = local_inputs(config, None, config.run_dir / RECORD, cached_only=True)
    except ConfigError as problem:
        print(f"{path}: the configuration is valid; without a download its files were not checked: {problem}")
        return 0
    if not config.model.path.is_dir():
        check_tasks(gym_entries(config.data))
        note = f"model.path {config.model.path} is not on this machine, so the layout was not checked"
        print(printable(f"{path}: the configuration is valid; {note}"))
        return 0
    from megarl.schedule.preflight import preflight

    preflight(config, str(path))
    print(printable(f"{path}: the configuration is valid"))
    return 0


@app.command()
def phases(path: ConfigFile, overrides: Overrides) -> int:
    """Print the phases of a step, in order, and what is on the GPU in each."""
    config = load_config(path, overrides)
    check_config(config, str(path))
    print("\n\n".join(describe_stage(config, stage) for stage in select_stages(config)))
    return 0


def describe_stage(config: Config, stage: str) -> str:
    stage_phases = select_phases(config, stage, first_step=True)
    steps = f"at most {config.value_pretraining.steps}" if stage == PRETRAINING else config.steps
    rows = [("phase", "on the GPU")]
    for phase, resident in zip(stage_phases, resident_groups(config, stage_phases), strict=True):
        rows.append((phase.name, " ".join(group for group in GROUPS if group in resident) or "-"))
    width = max(len(name) for name, _ in rows)
    lines = [f"stage {stage}, {steps} steps", *(f"  {name:{width}}  {groups}" for name, groups in rows)]
    for phase in stage_phases:
        if phase.first_step_only:
            lines.append(f"{phase.name}: only in the first step after each start")
    if ranks := config.parallel.rollout_ranks:
        lines.append(f"rollout: on {ranks} separate ranks (parallel.rollout_ranks), with the engine")
    return "\n".join(lines)


@app.command()
def docs(
    markdown: Annotated[bool, Option("--markdown", help="print Markdown tables, as in docs/keys.md")] = False,
) -> int:
    """List every key with its meaning, unit, default and the source of the default."""
    descriptions = [describe_key(key, field) for key, field in documented()]
    if markdown:
        print("\n".join(key_tables(descriptions)))
        return 0
    for row in descriptions:
        default = row.default if row.default.startswith("required") else f"default {row.default}"
        print(f"{row.key}\n    {row.meaning}\n    {row.values}; {default}; source: {row.source}")
    return 0


class KeyDescription(NamedTuple):
    key: str
    meaning: str
    values: str  # type and unit
    default: str  # with those of recipes
    source: str


def key_tables(described: Iterable[KeyDescription]) -> Iterator[str]:
    """Yield the lines of docs/keys.md, one table a section."""
    yield PAGE_OF_KEYS
    for section, rows in groupby(described, lambda row: row.key.rpartition(".")[0].partition(".")[0]):
        yield f"\n## {section or 'The run'}\n"
        yield "| key | meaning | value | default | source |"
        yield "|---|---|---|---|---|"
        for row in rows:
            cells = [cell.replace("|", "\\|").replace("<", "&lt;") for cell in row[1:]]
            yield f"| {' | '.join([f'`{row.key}`', *cells])} |"


def describe_key(key: str, field: FieldInfo) -> KeyDescription:
    def to_yaml(value: Any) -> str:
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(to_yaml, value))}]"
        if isinstance(value, str) and "\n" in value:  # in one line, which YAML would fold
            return json.dumps(value, ensure_ascii=False)
        return dump_yaml({"": value}).partition(":")[2].strip()

    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    values = " or ".join(_kinds(field.annotation)) + (f", in {extra['unit']}" if extra.get("unit") else "")
    recipe_defaults = []
    schedules = {
        "with schedule.ahead or in_flight": AHEAD_PRESET,
        "with schedule.in_flight": IN_FLIGHT_PRESET,
    }
    for recipe, preset in (PRESETS | schedules).items():
        value: Any = preset
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            recipe_defaults.append(f"{recipe} {to_yaml(value)}")
    default = "required" if field.is_required() else to_yaml(field.default)
    default += f" ({', '.join(recipe_defaults)})" if recipe_defaults else ""
    return KeyDescription(key, str(field.description), values, default, str(extra.get("source")))


def documented() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every field by dotted key, e.g. `data.eval[].name` and `reward.terms.<name>.weight`."""

    def walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
        for key, field in fields(model, prefix):
            yield key, field
            entry_section = entry_model(field)
            if entry_section is not None:
                yield from walk(
                    entry_section, f"{key}[]." if get_origin(field.annotation) is tuple else f"{key}.<name>."
                )

    yield from walk(Config)


def _kinds(annotation: Any) -> list[str]:
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
    path: ConfigFile,
    overrides: Overrides,
    *,
    model: PublicModel = None,
    mean_length: Annotated[
        float | None,
        Option(metavar="TOKENS", help="mean length of responses; default: a third of the longest"),
    ] = None,
    length_deviation: Annotated[
        float | None,
        Option(
            metavar="TOKENS",
            help="standard deviation of response lengths; default: that of a log-normal with sigma 0.6",
        ),
    ] = None,
    turns: Annotated[
        int | None,
        Option(metavar="N", help="turns of an episode; default: a quarter of rollout.turns.max"),
    ] = None,
    observed: Annotated[
        float | None,
        Option(
            metavar="TOKENS",
            help="tokens that an episode observes between two turns; default: all turns together fill a "
            "third of the room that rollout.turns.max_tokens leaves",
        ),
    ] = None,
    tool_seconds: Annotated[
        float | None, Option(metavar="SECONDS", help="time of a tool between two turns; default: 1")
    ] = None,
    everything: Annotated[bool, Option("--all", help="list every layout")] = False,
    best: Annotated[
        bool,
        Option("--best", help="print only the overrides of the quickest layout, as a command and as YAML"),
    ] = False,
    simulate: Annotated[
        bool,
        Option(
            "--simulate",
            help="simulate steps with sampled lengths: which ranks wait, and the best split of ranks",
        ),
    ] = False,
    lengths: Annotated[
        Path | None,
        Option(
            metavar="RUN",
            help="with --simulate: lengths of this run's last steps, from its rollouts or metrics.jsonl",
        ),
    ] = None,
    kept: Annotated[
        float | None,
        Option(
            metavar="SHARE", help="with --simulate: share of groups that dynamic sampling keeps; default: 0.5"
        ),
    ] = None,
    balance: Annotated[
        Literal["equal", "queue", "longest"] | None,
        Option(help="with --simulate: how requests are divided among engines; default: queue"),
    ] = None,
    scale: Annotated[
        bool, Option("--scale", help="with --simulate: the best split for 8 to 1,024 GPUs, one line each")
    ] = False,
) -> int:
    """Print memory of GPUs, nodes and disk, time of a step, layouts that fit.

    For a run on this machine's CPU, print its memory needs. If the configuration does not fit, print the
    error of `megarl train`; the exit code is 2."""
    from megarl.parallel.machine import driver_version
    from megarl.plan.inputs import make_plan_inputs
    from megarl.plan.times import replace_deviation
    from megarl.weights.known_models import planning_config

    config = load_config(path, overrides)
    check_config(config, str(path))
    for option, value, maximum in (
        ("--mean-length", mean_length, config.rollout.max_response_tokens if config.has_engine else None),
        ("--length-deviation", length_deviation, None),
        ("--turns", turns, None),
        ("--observed", observed, None),
        ("--tool-seconds", tool_seconds, None),
        ("--kept", kept, 1.0),
    ):
        if value is not None and not 0 < value <= (maximum or value):
            upper_bound = f" and at most {maximum:g}" if maximum else ""
            raise ConfigError(f"{option}: must be above 0{upper_bound} (got {value:g})")
    settings = (("--lengths", lengths), ("--kept", kept), ("--balance", balance), ("--scale", scale or None))
    for option, setting in settings:
        if setting is not None and not simulate:
            raise ConfigError(f"{option}: has no effect without --simulate (add it, or leave this out)")
    if simulate and not config.has_engine:
        raise ConfigError(f"{path}: recipe: sft generates no responses (use --simulate with another recipe)")
    if model is None:
        config = describe_models(config)
    model_name, hf_config = planning_config(config.model.path, model)
    runs_on_cpu = (
        config.parallel.device == "auto" and config.model.layers != "te" and driver_version() is None
    )
    if config.parallel.device == "cpu" or (runs_on_cpu and model is None and config.model.path.is_dir()):
        if simulate:
            raise ConfigError(f"{path}: --simulate: its times are those of GPUs (add parallel.device=cuda)")
        return _print_on_cpu(make_plan_inputs(config, hf_config, cpu=True), model_name, path)
    inputs = make_plan_inputs(config, hf_config)
    assumed_lengths = _assume_lengths(inputs, path, mean_length, turns, observed, tool_seconds)
    if length_deviation is not None:
        assumed_lengths = replace_deviation(assumed_lengths, length_deviation)
    if simulate:
        _print_simulated(inputs, assumed_lengths, lengths, kept, balance or "queue", scale=scale)
        return 0
    return _print_plan(inputs, assumed_lengths, model_name, path, everything=everything, best=best)


def _assume_lengths(
    made: PlanInputs,
    path: Path,
    mean: float | None,
    turns: int | None,
    observed: float | None,
    idle: float | None,
) -> Lengths:
    from megarl.plan.times import default_lengths

    options = {"mean": mean, "turns": turns, "observed": observed, "idle": idle}
    replacements: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if replacements.keys() - {"mean"} and not made.config.rollout.is_multi_turn:
        what = "have no effect on responses of one turn (set rollout.episode, tools, environment or agent)"
        raise ConfigError(f"{path}: --turns, --observed, --tool-seconds: {what}")
    return replace(default_lengths(made), **replacements)


def _print_plan(
    made: PlanInputs, lengths: Lengths, where: str, path: Path, *, everything: bool, best: bool
) -> int:
    from megarl.plan import text
    from megarl.plan.fit import find_problem
    from megarl.plan.search import Candidate, search
    from megarl.plan.times import estimate

    seconds, problem = estimate(made, lengths), find_problem(made)
    current = Candidate(made, None if problem else seconds, problem)
    if best:
        print("\n".join(text.best(search(made, lengths), current, path)))
        return 0
    print(printable("\n".join(text.lines(made, where, lengths, seconds))))
    print()
    print("\n".join(text.layouts(search(made, lengths), current, everything=everything)))
    if problem:
        print()
        print(printable(f"megarl: {path}: {problem}"), file=sys.stderr)
    return 2 if problem else 0


def _print_on_cpu(made: PlanInputs, where: str, path: Path) -> int:
    from megarl.parallel.machine import measure_usable_memory
    from megarl.plan.fit import find_cpu_problem, find_cpu_warning
    from megarl.plan.text import on_cpu

    memory = measure_usable_memory()
    print(printable("\n".join(on_cpu(made, where, memory))))
    problem, warning = find_cpu_problem(made, memory), find_cpu_warning(made, memory)
    if problem or warning:
        print()
        print(printable(f"megarl: {path}: {problem or warning}"), file=sys.stderr)
    return 2 if problem else 0


def _print_simulated(
    made: PlanInputs,
    lengths: Lengths,
    run: Path | None,
    kept: float | None,
    balance: Balance,
    *,
    scale: bool,
) -> None:
    from megarl.plan.simulate import make_rollout_work, recorded
    from megarl.plan.splits import compare_scales, compare_splits
    from megarl.plan.text import scaled, simulated

    source, sample_lengths = "log-normal", None
    if run is not None:
        lengths, sample_lengths, source = recorded(run, lengths)
    work = make_rollout_work(made.config, lengths, balance, kept, sample_lengths)
    if scale:
        if work.window:
            raise ConfigError(
                "--scale: weights in flight are not simulated with rollout.window (set it to null)"
            )
        for line in scaled(compare_scales(made, work, lengths), work, lengths, source):
            print(line, flush=True)
        return
    print("\n".join(simulated(compare_splits(made, work, lengths), work, lengths, source)))
