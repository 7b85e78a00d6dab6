"""A protocol, written before its runs: rows to compare, tasks, seeds and tests.

A row is one row of a paper's table minus another, on one task of megarl_tasks/family.py, paired by seed.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from megarl.config.errors import ConfigError
from megarl.config.load import Settings, read_yaml
from megarl.config.schema.section import Section
from megarl_experiments import paired
from megarl_experiments.result import LEVEL, Curve
from megarl_experiments.tables import AblationTable, find_file, load_table, read_section
from megarl_tasks.family import Knobs, longest_right

TASK = "megarl_tasks.family:write_family"
FRESH = 100  # lower seeds are only for tuning
POWER = 0.8  # wanted probability of detection
VERDICTS = ("holds", "opposite", "equivalent", "undecided")
Arm = tuple[str, str, int]  # task, row of the table, seed


class Task(Section):
    """A task with its warm start."""

    what: str = Field(min_length=1)
    knobs: Knobs = Knobs()
    # rollout.max_response_tokens / longest right response to a training prompt
    limit: float = Field(gt=0)
    overrides: tuple[str, ...] = ()  # of all runs; a table row's take precedence
    warm_start: Path | None = None  # replaces the protocol's
    # Estimates, until the folder has finished runs.
    seconds: float | None = None
    warm_start_seconds: float | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Return the knobs that differ from their defaults."""
        return self.knobs.model_dump(mode="json", exclude_defaults=True)

    @property
    def max_response_tokens(self) -> int:
        return math.ceil(self.limit * longest_right(self.knobs))


class SharedTasks(Section):
    """Tasks that several protocols share."""

    tasks: dict[str, Task] = Field(min_length=1)


class ProtocolRow(Section):
    """One row of the table minus another."""

    row: str
    against: str
    task: str
    claims: Literal["worse", "better"]  # the paper's result
    # Smallest difference of interest, for power and equivalence.
    bound: float = Field(gt=0, lt=1)
    why: str = Field(min_length=1)  # why this task needs the technique

    def arms(self, curves: Mapping[Arm, Curve]) -> tuple[dict[int, Curve], dict[int, Curve]]:
        """Return seed -> curve of `row` and of `against`."""
        row_curves, against_curves = (
            {seed: curve for (task, name, seed), curve in curves.items() if (task, name) == (self.task, arm)}
            for arm in (self.row, self.against)
        )
        return row_curves, against_curves


class Protocol(Section):
    """A protocol's file. Its paths are relative to it."""

    name: str
    folder: Path
    title: str
    table: Path  # rows' files and papers' points
    warm_start: Path  # replaces the table's
    first_seed: int = Field(FRESH, ge=FRESH)
    seeds: int = Field(ge=2)  # from first_seed
    # A run's score: mean accuracy of the last `last` evaluations, or of all after step 0 (`curve`).
    statistic: Literal["last", "curve"]
    last: int = Field(3, ge=1)
    shared: Path | None = None  # a file of SharedTasks, whose keys `tasks` override
    tasks: dict[str, Task] = Field(min_length=1)
    rows: tuple[ProtocolRow, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Protocol:
        for row in self.rows:
            if row.task not in self.tasks:
                task_names = ", ".join(self.tasks)
                raise ValueError(f"rows: {row.row}: no such task: {row.task} (one of {task_names})")
            if row.row == row.against:
                raise ValueError(f"rows: {row.row}: against: must be another row")
        if len({row.row for row in self.rows}) < len(self.rows):
            raise ValueError("rows: the same row stands there twice")
        return self

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.yaml"

    @property
    def tried(self) -> Path:
        """Return the log of all settings run with tuning seeds."""
        return self.path.with_name(f"{self.name.removesuffix('.protocol')}.tried.jsonl")

    @property
    def fresh_seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def level(self) -> float:
        """Return the strictest of Holm's levels."""
        return LEVEL / len(self.rows)

    def score(self, curve: Curve, statistic: str | None = None) -> float:
        """Return a run's score."""
        if (statistic or self.statistic) == "last":
            return statistics.fmean([curve[step] for step in sorted(curve)][-self.last :])
        return statistics.fmean(accuracy for step, accuracy in curve.items() if step > 0)

    def setting(self, row: ProtocolRow, overrides: Sequence[str] = ()) -> dict[str, Any]:
        """Return all settings that a row's differences depend on, except code and seeds."""
        task = self.tasks[row.task]
        common = {"against": row.against, "task": row.task, **task.given, "limit": task.limit}
        score = f"{self.statistic} {self.last}" if self.statistic == "last" else self.statistic
        warm_start = (task.warm_start or self.warm_start).name
        common |= {"warm_start": warm_start, "overrides": [*task.overrides, *overrides]}
        return {**common, "score": score}

    def tables(self) -> dict[str, AblationTable]:
        """Return the paper's table on each task. Raises ConfigError if it lacks a row."""
        table = load_table(str(self.folder / self.table))
        for name in (name for row in self.rows for name in (row.row, row.against)):
            if name not in {row.name for row in table.rows}:
                raise ConfigError(f"{self.path}: rows: {name}: no such row in {self.table}")
        table_by_task = {}
        for name, task in self.tasks.items():
            common = (f"rollout.max_response_tokens={task.max_response_tokens}", *task.overrides)
            rows = [row.model_copy(update={"overrides": (*common, *row.overrides)}) for row in table.rows]
            # Protocols share the warm start of tasks with equal names and keys.
            key = task.given | ({"warm_start": task.warm_start.name} if task.warm_start else {})
            digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]
            start = f"{name}-{digest}"
            update: dict[str, Any] = {"name": f"{self.name}/{start}", "start": start, "rows": tuple(rows)}
            update |= {"task": TASK, "knobs": task.given}
            update |= {"seconds": task.seconds, "warm_start_seconds": task.warm_start_seconds}
            update["warm_start"] = self.folder.absolute() / (task.warm_start or self.warm_start)
            table_by_task[name] = table.model_copy(update=update)
        return table_by_task


def is_protocol(name: str) -> bool:
    """Return whether a name or path is a protocol's."""
    return name.endswith((".protocol", ".protocol.yaml"))


def load_protocol(name: str) -> Protocol:
    """Read a protocol by its name or path. Raises ConfigError."""
    path = find_file(name, "protocol", ".yaml")
    values: Settings = {"name": path.name.removesuffix(".yaml"), "folder": path.parent}
    content = read_yaml(path)
    if isinstance(shared := content.get("shared"), str) and isinstance(content.get("tasks"), dict):
        tasks = read_section(SharedTasks, path.parent / shared, {}).model_dump(exclude_unset=True)["tasks"]
        values["tasks"] = {
            task: {**tasks.get(task, {}), **override} if isinstance(override, dict) else override
            for task, override in content["tasks"].items()
        }
    return read_section(Protocol, path, values)


@dataclass(frozen=True)
class RowOutcome:
    """A row's result, without p until all seeds have run: nobody can stop at a good moment."""

    row: ProtocolRow
    seeds: range  # the protocol's
    differences: Mapping[int, float]  # by seed
    paper: float | None = None  # points of `row` minus `against`
    other: float | None = None  # mean difference of the other statistic
    mean: float | None = None
    low: float | None = None  # 1 - LEVEL interval, uncorrected
    high: float | None = None
    detectable: float | None = None  # smallest difference that these seeds detect
    p: float | None = None
    holm: float | None = None
    equivalence: float | None = None  # p of two one-sided tests

    @property
    def is_within_bound(self) -> bool:
        """Return whether the interval is within the bound."""
        bound = self.row.bound
        return self.low is not None and self.high is not None and -bound < self.low <= self.high < bound

    @property
    def verdict(self) -> str:
        """Return one of VERDICTS, or the number of finished seeds."""
        if self.mean is None:
            return "not run yet"
        if self.holm is None:
            tuned = self.differences.keys().isdisjoint(self.seeds)
            plural = "s" if len(self.differences) > 1 else ""
            total = f"tuning seed{plural}" if tuned else f"of {len(self.seeds)} seeds"
            return f"{len(self.differences)} {total}"
        if self.holm < LEVEL:
            return "holds" if (self.mean < 0) == (self.row.claims == "worse") else "opposite"
        return "equivalent" if self.is_within_bound else "undecided"

    @property
    def qualified_verdict(self) -> str:
        """Return the verdict with its caveat."""
        if self.verdict == "undecided":
            size = "none, too few seeds" if self.detectable is None else f"{self.detectable:.3f}"
            return f"undecided (detectable: {size})"
        is_small = self.is_within_bound and self.verdict in ("holds", "opposite")
        return f"{self.verdict} (but within the bound)" if is_small else self.verdict


def measure_row(row: ProtocolRow, seeds: range, differences: Mapping[int, float], level: float) -> RowOutcome:
    """Compute a row's interval and, if all `seeds` have run, its uncorrected tests."""
    outcome, values, n = RowOutcome(row, seeds, differences), [*differences.values()], len(differences)
    if not values:
        return outcome
    outcome = replace(outcome, mean=statistics.fmean(values))
    if n < 2:
        return outcome
    deviation = statistics.stdev(values)
    low, high, _ = paired.paired_t(values, LEVEL)
    outcome = replace(outcome, low=low, high=high)
    if {*differences} != {*seeds}:
        return outcome
    detectable = paired.smallest_detectable(n, level, POWER) * deviation if deviation else math.inf
    return replace(
        outcome,
        detectable=detectable if math.isfinite(detectable) else None,
        p=paired.sign_flip_p(values),
        equivalence=paired.equivalence_p(values, row.bound),
    )


def correct_by_holm(outcomes: Sequence[RowOutcome]) -> list[RowOutcome]:
    """Apply Holm's correction. Unfinished rows count as p = 1, so that no verdict changes later."""
    ps = paired.holm([1.0 if outcome.p is None else outcome.p for outcome in outcomes])
    return [
        outcome if outcome.p is None else replace(outcome, holm=p)
        for outcome, p in zip(outcomes, ps, strict=True)
    ]


def decide_rows(
    protocol: Protocol, curves: Mapping[Arm, Curve], papers: Mapping[str, float | None]
) -> list[RowOutcome]:
    """Return each row's outcome. papers: points of the table's rows."""
    outcomes = []
    for row in protocol.rows:
        row_curves, against_curves = row.arms(curves)
        common_seeds = sorted(row_curves.keys() & against_curves.keys())
        differences = {
            seed: protocol.score(row_curves[seed]) - protocol.score(against_curves[seed])
            for seed in common_seeds
        }
        outcome = measure_row(row, protocol.fresh_seeds, differences, protocol.level)
        if common_seeds:
            other_statistic = "curve" if protocol.statistic == "last" else "last"
            other_differences = [
                protocol.score(row_curves[seed], other_statistic)
                - protocol.score(against_curves[seed], other_statistic)
                for seed in common_seeds
            ]
            outcome = replace(outcome, other=statistics.fmean(other_differences))
        points, against_points = papers[row.row], papers[row.against]
        if points is not None and against_points is not None:
            outcome = replace(outcome, paper=points - against_points)
        outcomes.append(outcome)
    return correct_by_holm(outcomes)


@dataclass(frozen=True)
class Power:
    """Seeds that a row needs for probability POWER, from tuning seeds. None: unknown, or over 2,000.

    Differences are tested at the strictest of Holm's levels, equivalence at LEVEL / 2."""

    row: ProtocolRow
    tuned: int  # tuning seeds
    deviation: float | None = None  # standard deviation
    for_difference: int | None = None  # to detect `bound`
    for_equivalence: int | None = None  # to show equivalence if there is no difference
    detectable: float | None = None  # smallest difference that the seeds detect


def estimate_power(protocol: Protocol, tried: Sequence[Mapping[str, Any]]) -> list[Power]:
    """Return each row's power from `read_tried` entries with the protocol's settings and no overrides."""
    powers, level = [], protocol.level
    for row in protocol.rows:
        setting = json.loads(json.dumps(protocol.setting(row)))
        logged_differences = [
            one["differences"] for one in tried if (one["row"], one["setting"]) == (row.row, setting)
        ]
        values = [d for differences in logged_differences for d in differences.values() if d is not None]
        one = Power(row, len(values))
        if len(values) > 1 and (deviation := statistics.stdev(values)) > 0:
            bound_in_deviations = row.bound / deviation
            detectable = paired.smallest_detectable(protocol.seeds, level, POWER) * deviation
            difference_power = partial(paired.power, effect=bound_in_deviations, alpha=level)
            equivalence_power = partial(paired.equivalence_power, bound=bound_in_deviations, alpha=LEVEL / 2)
            one = replace(
                one,
                deviation=deviation,
                for_difference=paired.seeds_needed(difference_power, POWER),
                for_equivalence=paired.seeds_needed(equivalence_power, POWER),
                detectable=detectable if math.isfinite(detectable) else None,
            )
        powers.append(one)
    return powers


def log_tried(
    protocol: Protocol, outcomes: Sequence[RowOutcome], overrides: Sequence[str], code: str
) -> None:
    """Append new differences of tuning seeds to the protocol's log, one line per row."""
    entries, lines = read_tried(protocol.tried), []
    for outcome in outcomes:
        row_setting = {"row": outcome.row.row, "setting": protocol.setting(outcome.row, overrides)}
        row_setting = json.loads(json.dumps(row_setting))
        differences = {str(seed): difference for seed, difference in outcome.differences.items()}
        logged_differences = [
            old["differences"].items()
            for old in entries
            if row_setting == {key: old[key] for key in row_setting}
        ]
        if differences and not any(differences.items() <= old for old in logged_differences):
            when = datetime.now(UTC).isoformat(timespec="seconds")
            lines.append(
                json.dumps({"when": when, "code": code, **row_setting, "differences": differences}) + "\n"
            )
    try:
        with open(protocol.tried, "a", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        problem = f"cannot be written: {error.strerror} (it must record each setting that is tried)"
        raise ConfigError(f"{protocol.tried}: {problem}") from None


def read_tried(path: Path) -> list[dict[str, Any]]:
    """Return the log's last entry per row and setting, with all seeds' differences.

    Raises ConfigError for a malformed line."""
    entries: dict[str, dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            key = json.dumps([entry["row"], entry["setting"]], sort_keys=True)
            old_entry = entries.pop(key, {"differences": {}})
            entries[key] = {**entry, "differences": {**old_entry["differences"], **entry["differences"]}}
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}: line {number}: not a log entry. Repair or remove it.") from None
    return [*entries.values()]
