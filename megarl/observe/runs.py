"""Read a run's folder, for commands such as `megarl watch`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.errors import ConfigError, DataError
from megarl.config.files import open_regular
from megarl.config.load import parse_yaml
from megarl.config.schema import PRETRAINING, SUPERVISED, TRAIN
from megarl.observe import run_log
from megarl.observe.run_log import Record, SampleRecord, is_step, parse_record
from megarl.observe.timeline import FOLDER, NAME, choose_ranks, is_phase, timeline_ranks

RANKS = 16  # maximum of timelines to read
Points = dict[int, float]
HANG_LINE = 1 << 16  # bytes read of a hang report


class JsonLines(NamedTuple):
    """Records, and numbers (from 1) of unreadable lines."""

    records: list[Record]
    unreadable: list[int]


def read_jsonl(path: Path, valid: Callable[[Record], bool]) -> JsonLines:
    """Read `valid` records; other non-blank lines are unreadable. Raises DataError."""
    try:
        with open_regular(path) as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror} (is this the folder of a run?)") from error
    json_lines = JsonLines([], [])
    for number, line in enumerate(lines, start=1):
        if (record := parse_record(line)) is not None and valid(record):
            json_lines.records.append(record)
        elif line.strip():
            json_lines.unreadable.append(number)
    return json_lines


def read_metrics(run_dir: Path) -> JsonLines:
    """Read metrics.jsonl; lines without step or stage are unreadable."""
    return read_jsonl(run_dir / run_log.METRICS_FILE, is_step)


@dataclass(frozen=True)
class RecordedRun:
    """Contents of a run's folder.

    unreadable  number of lines
    events      {"time": seconds since 1970, "event": text}
    timeline    rank -> phases, of some of the `ranks`"""

    name: str
    records: list[Record]
    samples: list[SampleRecord] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    unreadable: int = 0
    distributions: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    timeline: dict[int, list[Record]] = field(default_factory=dict)
    ranks: int = 0

    @cached_property
    def by_stage(self) -> dict[str, dict[int, Record]]:
        """Stage -> step -> record, the last of a repeated step."""
        stages: dict[str, dict[int, Record]] = {}
        for record in self.records:
            stages.setdefault(record["stage"], {})[record["step"]] = record
        return {stage: dict(sorted(steps.items())) for stage, steps in stages.items()}

    @property
    def main_stage(self) -> str:
        """The stage whose times and memory are shown."""
        return next((stage for stage in (TRAIN, SUPERVISED, PRETRAINING) if stage in self.by_stage), TRAIN)

    @property
    def seconds(self) -> float:
        records = (record for steps in self.by_stage.values() for record in steps.values())
        return sum(record.get("time/step") or 0.0 for record in records)

    def points(self, stage: str, key: str) -> Points:
        steps = self.by_stage.get(stage, {}).items()
        return {step: record[key] for step, record in steps if isinstance(record.get(key), int | float)}

    def setting(self, *keys: str, default: Any = None) -> Any:
        node: Any = self.config
        for key in keys:
            if not isinstance(node, Mapping) or key not in node:
                return default
            node = node[key]
        return node


def load_run(run_dir: Path) -> RecordedRun:
    """Read a run. Raises DataError if metrics.jsonl is missing or a file is damaged."""

    def read(name: str, valid: Callable[[Record], bool]) -> JsonLines:
        path = run_dir / name
        return read_jsonl(path, valid) if path.exists() else JsonLines([], [])

    defaults = {f.name: f.default for f in fields(SampleRecord)}
    required_fields = {name for name, default in defaults.items() if default is MISSING}
    metrics = read_metrics(run_dir)
    samples = read(run_log.SAMPLES_FILE, lambda record: required_fields <= record.keys())
    distributions = read(run_log.DISTRIBUTIONS_FILE, is_step)
    events = read(
        run_log.EVENTS_FILE,
        lambda r: isinstance(r.get("time"), int | float) and isinstance(r.get("event"), str),
    )
    files = (metrics, samples, distributions, events)
    config, ranks = read_mapping(run_dir / "config.yaml"), timeline_ranks(run_dir)
    timeline = read_timeline(run_dir, choose_ranks(ranks, RANKS), config, len(ranks))
    hangs = []  # of the watchdog
    for path in run_dir.glob("hang-*.txt"):
        with open_regular(path) as file:
            first_line = file.readline(HANG_LINE).decode(errors="replace").strip()
        line = f"hang, {first_line} ({path.name})"
        hangs.append({"time": path.stat().st_mtime, "event": line})
    return RecordedRun(
        name=run_dir.resolve().name,
        records=metrics.records,
        samples=[
            SampleRecord(**{k: v for k, v in record.items() if k in defaults}) for record in samples.records
        ],
        config=config,
        versions=read_mapping(run_dir / "versions.json"),
        unreadable=sum(len(file.unreadable) for file in files),
        distributions=distributions.records,
        events=sorted([*events.records, *hangs], key=lambda record: record["time"]),
        timeline=timeline,
        ranks=len(ranks),
    )


def read_timeline(
    run_dir: Path, ranks: Sequence[int], config: Mapping[str, Any], world: int
) -> dict[int, list[Record]]:
    """Read the phases of these ranks of `world`.

    Only an engine's first rank records waits for work, so they are copied to its others."""

    def read_phases(rank: int) -> list[Record]:
        path = run_dir / FOLDER / NAME.format(rank)
        return read_jsonl(path, is_phase).records if path.exists() else []

    phases_by_rank = {rank: read_phases(rank) for rank in ranks}
    tp = (config.get("rollout") or {}).get("engine_tp") or 1
    rollout_ranks = (config.get("parallel") or {}).get("rollout_ranks") or 0
    first_engine_rank = world - rollout_ranks if rollout_ranks else 0
    for rank, phases in phases_by_rank.items():
        leader = rank - (rank - first_engine_rank) % tp
        if rank < first_engine_rank or leader == rank:
            continue
        waits_by_phase = {
            (p["stage"], p["step"], p["phase"]): p["waited"]
            for p in phases_by_rank.get(leader) or read_phases(leader)
        }
        for phase in phases:
            if phase["phase"] in ("rollout", "evaluation"):
                waited = waits_by_phase.get((phase["stage"], phase["step"], phase["phase"]), 0.0)
                phase["waited"] = min(waited, phase["end"] - phase["begin"])
    return {rank: phases for rank, phases in phases_by_rank.items() if phases}


def read_mapping(path: Path) -> dict[str, Any]:
    """Read YAML or JSON; {} if missing. Raises DataError if it is no mapping."""
    if not path.exists():
        return {}
    try:
        with open_regular(path) as file:
            text = file.read().decode("utf-8")
        content = json.loads(text) if path.suffix == ".json" else parse_yaml(text, str(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, ConfigError) as error:
        raise DataError(f"{path}: cannot be parsed (restore it, or remove it to leave it out)") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds no mapping (restore it, or remove it to leave it out)")
    return content


def compute_group_shares(record: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the shares of groups kept, all right and all wrong."""
    counts = {name: record.get(f"rollout/groups_{name}") for name in ("kept", "all_right", "all_wrong")}
    total = sum(count or 0.0 for count in counts.values())
    if None in counts.values() or total <= 0:
        return None
    return {name: float(count or 0.0) / total for name, count in counts.items()}


def format_layout(parallel: Mapping[str, Any]) -> str:
    """Format as `TP 2 x PP 1 x DP 1`, with CP and EP if above 1."""
    dimensions = ["tp", "pp", "dp", *(key for key in ("cp", "ep") if (parallel.get(key) or 1) > 1)]
    return " x ".join(f"{key.upper()} {parallel.get(key) or 1}" for key in dimensions)
