"""An ablation table and its runs on disk."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from megarl.config import Config, dump_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.load import PACKAGE, config_file, read_yaml, set_key
from megarl.config.schema import EVALUATION, SUPERVISED
from megarl.config.schema.section import Section
from megarl.observe.runs import read_metrics
from megarl.parallel.lease import replace_folder
from megarl.schedule.identity import PATHS, checksum_code, checksum_inputs, list_settings
from megarl_experiments.jobs import Job

SUFFIX = ".table.yaml"
AnySection = TypeVar("AnySection", bound=Section)
MARK = "ablation.json"  # in each run's folder; gets `seconds` on success
PLAN = "planned.yaml"
LOG = "log.txt"
SET_HERE = ("seed", *PATHS)  # differ between runs
ONE_PROCESS = (
    *("parallel.tp=1", "parallel.pp=1", "parallel.dp=1"),
    *("log.report=false", "log.terminal=plain", "checkpoint.every=0"),
)


class AblationRow(Section):
    """A row of an ablation table."""

    name: str = Field(min_length=1)
    config: Path  # based on a 32B file
    paper: float | None = None  # AIME 2024 avg@32 points
    overrides: tuple[str, ...] = ()  # at demo scale

    @property
    def slug(self) -> str:
        """Return the name on the command line and in paths."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")


class AblationTable(Section):
    """A paper's table. Its paths are relative to the table's file."""

    name: str
    folder: Path
    title: str
    base: Path  # at demo scale
    warm_start: Path  # supervised run
    # `module:function` (folder, seed, **knobs) that writes model/ and three .jsonl files
    task: str = Field(pattern=r"^[\w.]+:\w+$")
    full: str  # the row of the whole system
    # Compare each row with the full system, or the row above.
    against: tuple[Literal["full", "previous"], ...] = Field(("full",), min_length=1)
    last: int = Field(1, ge=1)  # last evaluations, whose mean is a run's score
    rows: tuple[AblationRow, ...] = Field(min_length=1)
    # A protocol sets these per task.
    knobs: dict[str, Any] = Field({})  # keyword arguments of `task`
    start: str = ""  # the task's name and a digest of its knobs
    seconds: float | None = None
    warm_start_seconds: float | None = None

    @model_validator(mode="after")
    def _distinct(self) -> AblationTable:
        slugs = [row.slug for row in self.rows]
        if len(set(slugs)) < len(slugs):
            raise ValueError("rows: two rows have the same name")
        if self.full not in {row.name for row in self.rows}:
            raise ValueError(f"full: no row is named {self.full!r}")
        return self

    def config(self, row: AblationRow, overrides: Sequence[str]) -> Config:
        """Return the row's configuration: its files over `base`, then its overrides and these."""
        base = self.folder / self.base
        return load_config(self.folder / row.config, (*row.overrides, *overrides), base=base)


def load_table(name: str, base: Path | None = None) -> AblationTable:
    """Read a table by its name or path; `base` replaces the table's base. Raises ConfigError."""
    path = find_file(name, "table", SUFFIX)
    base_value = {} if base is None else {"base": base.absolute()}
    name = path.name.removesuffix(SUFFIX)
    return read_section(AblationTable, path, {"name": name, "folder": path.parent, **base_value})


def find_file(name: str, kind: str, ending: str) -> Path:
    """Find a .KIND.yaml file by path, or by name in configs/ablations. Raises ConfigError."""
    folder = Path("configs/ablations")
    path = Path(name) if name.endswith(".yaml") else config_file(folder / f"{name}{ending}")
    if not name.endswith(".yaml") and not path.is_file():
        files = [file for root in (PACKAGE / folder, folder) for file in root.glob(f"*.{kind}.yaml")]
        names = ", ".join(sorted({file.name.removesuffix(ending) for file in files}))
        what = f"no such {kind} (one of {names}, or the path of a .{kind}.yaml file)"
        raise ConfigError(f"TABLE: {name}: {what}")
    return path


def read_section(kind: type[AnySection], path: Path, given: dict[str, Any]) -> AnySection:
    """Read a section from a file and `given`. Raises ConfigError `file: key: problem`."""
    try:
        return kind.model_validate({**read_yaml(path), **given})
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        key = ".".join(map(str, first_error["loc"]))
        problem = first_error["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}: {key + ': ' if key else ''}{problem}") from None


@dataclass(frozen=True)
class Options:
    """The options of `megarl ablate`."""

    folder: Path
    seeds: Sequence[int]
    rows: Sequence[str]  # slugs; empty: all
    jobs: int
    limit: float  # seconds per run
    fresh: bool
    overrides: Sequence[str]  # for all rows
    hours: float | None = None  # no run starts later
    most: int | None = None  # runs to start

    def seed_folder(self, table: AblationTable, seed: int) -> Path:
        """Return the folder of a seed's task and warm start, shared by rows and tables."""
        return self.folder / "warm_start" / table.start / f"seed-{seed}"


@dataclass(frozen=True)
class Planned:
    """A run in `config.run_dir`: a seed's warm start, or a row with a seed."""

    table: AblationTable
    title: str  # "warm start" or the row's name
    seed: int
    config: Config
    row: str = ""  # the row's slug

    @property
    def name(self) -> str:
        return f"{self.title}{self.table.start and f' on {self.table.start}'}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        return self.config.run_dir

    def job(self) -> Job:
        """Replace the run's folder, and return the command that fills it."""
        replace_folder(self.folder)
        write_json(self.folder / MARK, {"inputs": checksum_inputs(self.config), "code": checksum_code()})
        (self.folder / PLAN).write_text(dump_config(self.config), encoding="utf-8")
        return Job(self.name, ("train", str(self.folder / PLAN)), self.folder / LOG)

    def mark(self) -> dict[str, Any]:
        return read_mark(self.folder)

    def usual_seconds(self) -> float | None:
        """Estimate seconds: the median of similar finished runs, else the table's value."""
        runs_folder, pattern = (
            (self.folder.parent, "seed-*") if self.row else (self.folder.parents[1], "seed-*/sft")
        )
        for runs in (runs_folder.glob(pattern), runs_folder.parent.glob(f"*/{pattern}")):
            seconds = [read_mark(run).get("seconds") for run in runs if (run / MARK).is_file()]
            if known_seconds := [s for s in seconds if s is not None]:
                return statistics.median(known_seconds)
        return self.table.seconds if self.row else self.table.warm_start_seconds

    def seconds(self) -> float | None:
        """Return the wall time of a finished run, else None.

        Raises ConfigError if something else made the folder."""
        if not self.folder.exists() or not any(self.folder.iterdir()):
            return None
        if not (self.folder / MARK).is_file():
            what = "exists and was not made by megarl ablate (choose another --folder)"
            raise ConfigError(f"{self.folder}: {what}")
        seconds = self.mark().get("seconds")
        if seconds is None:
            return None
        hf_config = self.folder / "hf" / "config.json"
        is_finished = (
            hf_config.is_file() if self.config.recipe == SUPERVISED else self.config.steps in self.curve()
        )
        return seconds if is_finished else None

    def curve(self) -> dict[int, float]:
        """Return step -> accuracy on the held-out problems."""
        scores = (record for record in read_metrics(self.folder).records if record["stage"] == EVALUATION)
        return {record["step"]: record["eval/avg"] for record in scores if record.get("eval/avg") is not None}

    def changed(self) -> str:
        """Describe settings and inputs that differ from the finished run's; empty if none."""
        try:
            old_settings, new_settings = (
                list_settings(load_config(self.folder / PLAN)),
                list_settings(self.config),
            )
        except ConfigError as error:
            return str(error)
        keys = [
            key for key in {**old_settings, **new_settings} if old_settings.get(key) != new_settings.get(key)
        ]
        if not keys and self.mark().get("inputs") != checksum_inputs(self.config):
            return "its model or data"
        return "; ".join(f"{key} {old_settings.get(key)}, now {new_settings.get(key)}" for key in keys)


def read_mark(folder: Path) -> dict[str, Any]:
    """Return a run's MARK file; empty if its writer was killed."""
    try:
        return dict(json.loads((folder / MARK).read_text(encoding="utf-8")))
    except ValueError:
        return {}


def warm_start(table: AblationTable, settings: Options, seed: int) -> Planned:
    """Plan a seed's supervised run, from which all rows start."""
    folder = settings.seed_folder(table, seed)
    overrides = (
        *ONE_PROCESS,
        "checkpoint.export_hf=true",
        set_key("seed", seed),
        set_key("data.train", [folder / "task" / "sft.jsonl"]),
        set_key("model.path", folder / "task" / "model"),
        set_key("run_dir", folder / "sft"),
    )
    config = load_config(table.folder / table.warm_start, overrides)
    return Planned(table, "warm start", seed, config)


def row_run(table: AblationTable, settings: Options, row: AblationRow, seed: int) -> Planned:
    folder = settings.seed_folder(table, seed)
    overrides = (
        *ONE_PROCESS,
        *("checkpoint.export_hf=false", "log.samples=0"),
        *settings.overrides,
        set_key("seed", seed),
        set_key("data.train", [folder / "task" / "train.jsonl"]),
        set_key("data.eval", [folder / "task" / "eval.jsonl"]),
        set_key("model.path", folder / "sft" / "hf"),
        set_key("run_dir", settings.folder / table.name / row.slug / f"seed-{seed}"),
    )
    return Planned(table, row.name, seed, table.config(row, overrides), row.slug)


def task_writer(name: str) -> Callable[..., None]:
    """Import `module:function`. Raises ConfigError if it does not exist."""
    module, _, attribute = name.partition(":")
    try:
        writer: Callable[..., None] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"task: {name}: {error} (it must be module:function)") from None
    return writer


def make_task(table: AblationTable, settings: Options, seed: int) -> None:
    """Write a task. Raises ConfigError if a different one exists, unless --fresh."""
    task = settings.seed_folder(table, seed) / "task"
    new_task = task.with_name("task.new")
    shutil.rmtree(new_task, ignore_errors=True)
    task_writer(table.task)(new_task, seed, **table.knobs)

    def read_contents(folder: Path) -> dict[Path, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder): path.read_bytes() for path in files}

    if task.exists() and read_contents(task) != read_contents(new_task):
        if not settings.fresh:
            problem = f"differs from the task that {table.task} makes today"
            raise ConfigError(f"{task}: {problem} (give --fresh to start over, or another --folder)")
        shutil.rmtree(task)
    if task.exists():
        shutil.rmtree(new_task)
    else:
        new_task.rename(task)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
