"""A protocol: which comparisons are made, on which task, with how many fresh seeds, and how each is judged.
It is written before the runs; afterwards each of its rows has one verdict, which nothing but the runs
decides.

A row is two arms on one task, with a technique and without it, paired by seed.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from megarl.ablation import paired, runs
from megarl.ablation.result import Curve
from megarl.ablation.runs import AblationTable
from megarl.config.errors import ConfigError
from megarl.config.load import PACKAGE, config_file
from megarl.config.schema import Section

SUFFIX = ".protocol.yaml"
FRESH = 100  # seeds below are for tuning, and never part of a result
VERDICTS = {
    "holds": "a difference in the paper's direction after Holm's correction",
    "opposite": "a difference in the other direction after Holm's correction",
    "equivalent": "within the bound that was named before",
    "undecided": "neither; a difference of the size beside it would have been found",
}


class Task(Section):
    """What rows run on. What is left out is the table's."""

    task: str | None = Field(None, pattern=r"^[\w.]+:\w+$")  # `module:function` of (folder, seed, **knobs)
    knobs: dict[str, Any] = Field({})  # keyword arguments of that function
    base: Path | None = None  # configuration at demo scale, relative to the protocol's file
    warm_start: Path | None = None  # likewise
    overrides: tuple[str, ...] = ()  # settings of all arms on this task, e.g. steps=30
    row_overrides: dict[str, tuple[str, ...]] = Field({})  # settings of one row of the table, after those


class ProtocolRow(Section):
    """One comparison: a row of the table minus another one."""

    row: str
    against: str
    task: str
    claims: Literal["worse", "better"]  # what the paper says of `row` beside `against`
    # Smallest difference of interest: power is computed for it, and what lies within it counts as equivalent.
    bound: float = Field(gt=0, lt=1)

    @property
    def key(self) -> str:
        return f"{self.row} against {self.against} on {self.task}"


class Protocol(Section):
    """What was decided before the runs. Files are relative to the protocol's own."""

    name: str
    folder: Path
    title: str
    table: Path  # the rows' files and the papers' points
    first_seed: int = FRESH
    seeds: int = Field(ge=2)  # so many from first_seed on
    # A run's score: the mean accuracy of its last `last` evaluations, or of all after step 0 (`curve`).
    statistic: Literal["last", "curve"]
    last: int = Field(3, ge=1)
    alpha: float = Field(0.05, gt=0, lt=0.5)  # over all rows, after the correction
    power: float = Field(0.8, gt=0, lt=1)
    correction: Literal["holm"] = "holm"
    tried: Path  # .jsonl: every setting that was run with tuning seeds
    tasks: dict[str, Task] = Field(min_length=1)
    rows: tuple[ProtocolRow, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Protocol:
        if self.first_seed < FRESH:
            raise ValueError(f"first_seed: must be at least {FRESH} (seeds below are for tuning)")
        for row in self.rows:
            if row.task not in self.tasks:
                raise ValueError(
                    f"rows: {row.row}: no such task: {row.task} (one of {', '.join(self.tasks)})"
                )
            if row.row == row.against:
                raise ValueError(f"rows: {row.row}: against: must be another row")
        if len({row.key for row in self.rows}) < len(self.rows):
            raise ValueError("rows: the same comparison stands there twice")
        return self

    @property
    def fresh_seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def level(self) -> float:
        """Return alpha of the strictest of Holm's steps: what a single row has for sure."""
        return self.alpha / len(self.rows)

    def score(self, curve: Curve, statistic: str | None = None) -> float:
        """Return a run's score, by the statistic decided before or by the other one."""
        if (statistic or self.statistic) == "last":
            return statistics.fmean([curve[step] for step in sorted(curve)][-self.last :])
        return statistics.fmean(accuracy for step, accuracy in curve.items() if step > 0)

    def setting(self, task: str) -> dict[str, Any]:
        """Return a task's settings as JSON holds them, without what is left out."""
        return self.tasks[task].model_dump(mode="json", exclude_defaults=True)

    def tables(self) -> dict[str, AblationTable]:
        """Return for each task the table with that task, its bases and its overrides. Raises ConfigError for
        a row that the table lacks, and for knobs that the task's function does not take."""
        table, path = runs.load_table(str(self.folder / self.table)), self.folder / f"{self.name}.yaml"
        known = [row.name for row in table.rows]
        for name in (name for row in self.rows for name in (row.row, row.against)):
            if name not in known:
                raise ConfigError(f"{path}: rows: {name}: no such row in {self.table}")
        found = {}
        for name, task in self.tasks.items():
            if unknown := {*task.row_overrides} - {*known}:
                raise ConfigError(f"{path}: tasks.{name}.row_overrides: {min(unknown)}: no such row")
            rows = tuple(
                row.model_copy(
                    update={
                        "overrides": (*row.overrides, *task.overrides, *task.row_overrides.get(row.name, ()))
                    }
                )
                for row in table.rows
            )
            # Files of the protocol are made absolute; the table's own stay relative to the table.
            files = {"base": task.base, "warm_start": task.warm_start}
            given = {key: (self.folder / file).absolute() for key, file in files.items() if file}
            start = [task.task or table.task, task.knobs, task.warm_start and str(task.warm_start)]
            own = bool(task.task or task.knobs or task.warm_start)
            digest = hashlib.sha256(json.dumps(start, sort_keys=True).encode()).hexdigest()[:10]
            update = {"name": f"{self.name}/{name}", "task": start[0], "knobs": task.knobs, "rows": rows}
            found[name] = table.model_copy(update={**update, **given, "start": digest if own else ""})
            try:
                inspect.signature(runs.task_writer(found[name].task)).bind(Path(), 0, **task.knobs)
            except TypeError as error:
                raise ConfigError(f"{path}: tasks.{name}.knobs: {error}") from None
        return found


def is_protocol(name: str) -> bool:
    """Tell a protocol's name or path from a table's."""
    return name.endswith((".protocol", SUFFIX))


def load_protocol(name: str) -> Protocol:
    """Read a protocol given as NAME.protocol or by its path. Raises ConfigError `file: key: what is wrong`,
    or for an unknown name."""
    folder = Path("configs/ablations")
    path = Path(name) if name.endswith(SUFFIX) else config_file(folder / f"{name}.yaml")
    if not name.endswith(SUFFIX) and not path.is_file():
        files = {*(PACKAGE / folder).glob(f"*{SUFFIX}"), *folder.glob(f"*{SUFFIX}")}
        known = ", ".join(sorted({file.name.removesuffix(".yaml") for file in files}))
        raise ConfigError(f"TABLE: {name}: no such protocol (one of {known}, or the path of a {SUFFIX} file)")
    given = {"name": path.name.removesuffix(".yaml"), "folder": path.parent}
    return runs.read_section(Protocol, path, given)


@dataclass(frozen=True)
class Outcome:
    """A row as measured. Before all its seeds are there it has no p and no verdict: who looks earlier must
    not be able to stop when the numbers please."""

    row: ProtocolRow
    wanted: int  # seeds
    alpha: float
    paper: float | None  # points: the row's minus its neighbour's
    differences: Mapping[int, float]  # by seed, of the statistic decided before
    other: float | None = None  # mean difference of the statistic that does not decide
    deviation: float | None = None  # of the differences
    low: float | None = None  # interval of 1 - alpha of their mean, uncorrected
    high: float | None = None
    found: float | None = None  # smallest difference that these seeds find; None where they cannot find any
    p: float | None = None
    holm: float | None = None
    equivalence: float | None = None  # p of two one-sided tests
    equivalence_holm: float | None = None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.differences.values()) if self.differences else None

    @property
    def complete(self) -> bool:
        return len(self.differences) == self.wanted

    @property
    def verdict(self) -> str:
        """Return a key of VERDICTS, or how far the row is."""
        mean, low, high = self.mean, self.low, self.high
        if mean is None or low is None or high is None or self.holm is None:
            return f"{len(self.differences)} of {self.wanted} seeds" if self.differences else "not run yet"
        if self.holm < self.alpha:
            return "holds" if (mean < 0) == (self.row.claims == "worse") else "opposite"
        within = -self.row.bound < low and high < self.row.bound
        corrected = self.equivalence_holm is not None and self.equivalence_holm < self.alpha
        return "equivalent" if within and corrected else "undecided"

    @property
    def said(self) -> str:
        """Return the verdict with what a reader must know beside it."""
        if self.verdict == "undecided":
            size = "none, with so few seeds" if self.found is None else f"{self.found:.3f}"
            return f"undecided (would have found: {size})"
        bound = self.row.bound
        small = self.low is not None and self.high is not None and -bound < self.low and self.high < bound
        return self.verdict + (
            " (but within the bound)" if self.verdict in ("holds", "opposite") and small else ""
        )


def judge(outcomes: Sequence[Outcome], level: float, power: float) -> list[Outcome]:
    """Fill in interval, tests, corrections and what could have been found.

    A row whose seeds are not all there counts as p = 1 in Holm's correction, so that what holds before the
    others are there still holds then. level: alpha of Holm's first step; power: of what could have been
    found.
    """
    judged = []
    for one in outcomes:
        values, mean, n = [*one.differences.values()], one.mean, len(one.differences)
        if mean is not None and n > 1:
            deviation = statistics.stdev(values)
            error = deviation / math.sqrt(n)
            half = paired.t_quantile(1 - one.alpha, n - 1) * error
            one = replace(one, deviation=deviation, low=mean - half, high=mean + half)
            if one.complete:
                found = paired.smallest_found(n, level, power) * deviation if deviation else math.nan
                one = replace(
                    one,
                    found=found if math.isfinite(found) else None,
                    p=paired.sign_flip_p(values),
                    equivalence=paired.equivalence_p(mean, error, n - 1, one.row.bound),
                )
        judged.append(one)
    holm = paired.holm([1.0 if one.p is None else one.p for one in judged])
    both = paired.holm([1.0 if one.equivalence is None else one.equivalence for one in judged])
    return [
        one if one.p is None else replace(one, holm=p, equivalence_holm=q)
        for one, p, q in zip(judged, holm, both, strict=True)
    ]


def plan_power(protocol: Protocol, spread: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return for each row what the protocol's seeds can find, from the differences of tuning seeds (by the
    row's key), all at the strictest of Holm's steps: seeds needed to find a difference of `bound`, seeds
    needed to show equivalence where there is none, smallest difference that the protocol's seeds find. None:
    unknown, or more than 2,000 seeds."""
    plan: list[dict[str, Any]] = []
    level, wanted = protocol.level, protocol.power
    for row in protocol.rows:
        facts: dict[str, Any] = {"row": row.key, "bound": row.bound, "deviation": None, "tuning_seeds": 0}
        facts |= {"for_difference": None, "for_equivalence": None, "finds": None}
        values = spread.get(row.key, ())
        if len(values) > 1 and (deviation := statistics.stdev(values)) > 0:
            size = row.bound / deviation

            def finds(n: int, size: float = size) -> float:
                return paired.power(n, size, level)

            def shows(n: int, size: float = size) -> float:
                return paired.equivalence_power(n, size, level)

            smallest = paired.smallest_found(protocol.seeds, level, wanted) * deviation
            facts |= {
                "deviation": deviation,
                "tuning_seeds": len(values),
                "for_difference": paired.seeds_needed(finds, wanted),
                "for_equivalence": paired.seeds_needed(shows, wanted),
                "finds": smallest if math.isfinite(smallest) else None,
            }
        plan.append(facts)
    return plan


def note_tried(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Append settings that are tried with tuning seeds, one line each, with the time."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps({"when": when, **entry}) + "\n" for entry in entries)
    except OSError as error:
        what = f"tried: cannot be written: {error.strerror} (every setting tried must be on record)"
        raise ConfigError(f"{path}: {what}") from None


def read_tried(path: Path) -> list[dict[str, Any]]:
    """Return the settings tried, one entry for each comparison and setting: the last one, with all its seeds.
    Raises ConfigError where a line is not JSON."""
    found: dict[str, dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            key = json.dumps([entry["row"], entry["setting"]], sort_keys=True)
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}: line {number}: not a setting that was tried (mend it)") from None
        before = found.pop(key, {"seeds": {}})
        found[key] = {**entry, "seeds": {**before["seeds"], **entry["seeds"]}}
    return [*found.values()]


def markdown(
    protocol: Protocol,
    outcomes: Sequence[Outcome],
    plan: Sequence[Mapping[str, Any]],
    tried: Sequence[Mapping[str, Any]],
    said: Sequence[str] = (),
) -> str:
    """Return the rows with their verdicts, how they were judged, the power known before, and what was
    tried."""
    heads, rows = cells(protocol, outcomes)
    powers = [
        [
            one["row"],
            f"{one['bound']:g}",
            *("-" if one[key] is None else f"{one[key]:.3f}" for key in ("deviation",)),
            *(str(one[key] or "-") for key in ("tuning_seeds", "for_difference", "for_equivalence")),
            "-" if one["finds"] is None else f"{one['finds']:.3f}",
        ]
        for one in plan
    ]
    power_heads = ["row", "bound", "standard deviation of the differences", "from tuning seeds"]
    power_heads += ["seeds to find it", "seeds to show equivalence", f"{protocol.seeds} seeds find"]
    settings = []
    for one in tried:
        values = [value for value in one["seeds"].values() if value is not None]
        mean = f"{statistics.fmean(values):+.3f}" if values else "not finished"
        text = json.dumps(one["setting"]).replace("|", "\\|")
        settings.append([one["when"][:10], one["row"], f"`{text}`", ", ".join(one["seeds"]), mean])
    tried_heads = ["first or last run", "row", "setting", "seeds", "mean difference"]
    parts = [_grid(heads, rows), "\n".join(f"- {line}" for line in [*said, *rules(protocol, outcomes)])]
    parts += ["Power, known before the runs:", _grid(power_heads, powers)]
    parts += [f"Settings tried on seeds below {FRESH}: {len(settings) or 'none yet'}."]
    return "\n\n".join([*parts, *([_grid(tried_heads, settings)] if settings else [])]) + "\n"


def cells(protocol: Protocol, outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the table of verdicts, as text."""
    other = "all evaluations" if protocol.statistic == "last" else "last evaluations"
    heads = ["row", "task", "paper: points, claim", "difference", "p, Holm", "bound"]
    heads += ["p of equivalence, Holm", f"difference over {other}", "seeds", "verdict"]

    def number(value: float | None) -> str:
        return "" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"

    rows = []
    for one in outcomes:
        paper = ("-" if one.paper is None else f"{one.paper:+g}") + f", {one.row.claims}"
        interval = f" [{one.low:+.3f}, {one.high:+.3f}]" if one.low is not None else ""
        rows.append(
            [
                *(f"{one.row.row} - {one.row.against}", one.row.task, paper),
                "" if one.mean is None else f"{one.mean:+.3f}{interval}",
                *(number(one.holm), f"{one.row.bound:g}", number(one.equivalence_holm)),
                "" if one.other is None else f"{one.other:+.3f}",
                *(f"{len(one.differences)}", one.said),
            ]
        )
    return heads, rows


def rules(protocol: Protocol, outcomes: Sequence[Outcome]) -> list[str]:
    """Return how the rows are judged, one sentence each."""
    last, curve = (
        f"the mean of the last {protocol.last} evaluations",
        "the mean of all evaluations after step 0",
    )
    decides, other = (last, curve) if protocol.statistic == "last" else (curve, last)
    counts = [sum(one.verdict == verdict for one in outcomes) for verdict in VERDICTS]
    decided = ", ".join(f"{n} {verdict}" for n, verdict in zip(counts, VERDICTS, strict=True))
    seeds = protocol.fresh_seeds
    return [
        f"{sum(counts[:3])} of {len(outcomes)} rows are decided ({decided}).",
        f"Score of a run: {decides}, as decided before; {other}, beside it, decides nothing.",
        f"Seeds {seeds[0]} to {seeds[-1]}, in pairs: both runs share task, warm start and order of prompts. "
        f"Interval: {1 - protocol.alpha:.0%} of the paired t-test, uncorrected. p: signs flipped, two-sided.",
        f"Equivalent: that interval lies within the bound and two one-sided tests say so. Both p are "
        f"corrected by Holm over the {len(outcomes)} rows, each for itself, at {protocol.alpha:g}.",
        f"Would have found: the difference that these seeds, with the spread they had, find with a chance of "
        f"{protocol.power:.0%} at p < {protocol.level:.4f}, the first of Holm's steps.",
    ]


def terminal(outcomes: Sequence[Outcome], width: int = 41) -> str:
    """Return the forest plot as text: o the difference, = its interval, | no difference, ( ) the bound."""
    ends = [
        abs(end)
        for one in outcomes
        for end in (one.low, one.high, one.mean, one.row.bound)
        if end is not None
    ]
    scale = max(ends, default=1.0) * 1.05

    def place(value: float) -> int:
        return round((value / scale + 1) / 2 * (width - 1))

    wide = max((len(one.row.row) for one in outcomes), default=0)
    lines = []
    for one in outcomes:
        line = [" "] * width
        if one.low is not None and one.high is not None:
            for i in range(place(one.low), place(one.high) + 1):
                line[i] = "="
        line[place(-one.row.bound)], line[place(one.row.bound)], line[place(0)] = "(", ")", "|"
        if one.mean is not None:
            line[place(one.mean)] = "o"
        difference = "" if one.mean is None else f"{one.mean:+.3f}"
        paper = "" if one.paper is None else f"paper {one.paper:+g}"
        lines.append(f"{one.row.row:{wide}} {''.join(line)} {difference:6}  {paper:9}  {one.said}".rstrip())
    return "\n".join([*lines, f"{'':{wide}} {-scale:<+{width // 2}.3f}{scale:>+{width - width // 2}.3f}"])


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows))
