"""A run's folder as the report reads it: metrics, samples, configuration, versions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from megarl.config.errors import DataError
from megarl.observe.distributions import read_distributions
from megarl.observe.events import read_events
from megarl.observe.jsonl import Record
from megarl.observe.metrics import read_metrics
from megarl.observe.samples import Sample, read_samples

Points = dict[int, float]


def kept_share(record: Mapping[str, Any]) -> dict[str, float] | None:
    """Shares of the sampled groups that were mixed, all right and all wrong; None where the record does not say.

    Takes counts as well as shares: only their proportions matter."""
    names = ("kept", "all_right", "all_wrong")
    found = [record.get(f"rollout/groups_{name}") for name in names]
    counts = [float(count) for count in found if count is not None]
    if len(counts) < len(names) or sum(counts) <= 0:
        return None
    return {name: count / sum(counts) for name, count in zip(names, counts, strict=True)}


@dataclass(frozen=True)
class Run:
    """What a run's folder holds. `config` and `versions` are empty where their files are missing."""

    name: str
    records: list[Record]
    samples: list[Sample]
    config: dict[str, Any]
    versions: dict[str, str]
    unreadable: int
    distributions: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)

    @cached_property
    def by_stage(self) -> dict[str, dict[int, Record]]:
        """stage -> step -> record; where a step was written twice, the later line counts."""
        stages: dict[str, dict[int, Record]] = {}
        for record in self.records:
            stages.setdefault(record["stage"], {})[record["step"]] = record
        return {stage: dict(sorted(steps.items())) for stage, steps in stages.items()}

    def points(self, stage: str, key: str) -> Points:
        """step -> value of one metric in one stage; empty where it was never recorded."""
        return {step: record[key] for step, record in self.by_stage.get(stage, {}).items() if isinstance(record.get(key), int | float)}

    def keys(self, stage: str, prefix: str) -> list[str]:
        """The metrics of a stage whose names start with `prefix`, in the order of their first appearance."""
        return list(dict.fromkeys(k for record in self.by_stage.get(stage, {}).values() for k in record if k.startswith(prefix)))

    @property
    def seconds(self) -> float:
        """The sum of all recorded steps, evaluations included where they say how long they took."""
        return sum(record.get("time/step") or 0.0 for steps in self.by_stage.values() for record in steps.values())

    def setting(self, *keys: str, default: Any = None) -> Any:
        """One value of the configuration; `default` where the run has none."""
        node: Any = self.config
        for key in keys:
            if not isinstance(node, Mapping) or key not in node:
                return default
            node = node[key]
        return node


def families(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs whose configurations differ in nothing but seed and folder, together; in the order of their first ones."""
    found: dict[str, list[Run]] = {}
    for number, run in enumerate(runs):
        rest = {key: value for key, value in run.config.items() if key not in ("seed", "run_dir")}
        key = json.dumps(rest, sort_keys=True, default=str) if rest else str(number)  # what has no configuration is like nothing else
        found.setdefault(key, []).append(run)
    return list(found.values())


def mean_course(courses: Sequence[Points]) -> tuple[Points, dict[int, tuple[float, float]]]:
    """(mean, (least, most)) at the steps that all courses have; of a single one itself and nothing."""
    if len(courses) == 1:
        return courses[0], {}
    steps = sorted(set(courses[0]).intersection(*courses[1:]))
    values = {step: [course[step] for course in courses] for step in steps}
    return {step: sum(v) / len(v) for step, v in values.items()}, {step: (min(v), max(v)) for step, v in values.items()}


def layout_text(parallel: Mapping[str, Any]) -> str:
    """`TP 2 x PP 1 x DP 1` from the `parallel` section of a configuration; degrees of 1 beyond these three are left out."""
    degrees = [("TP", "tp"), ("PP", "pp"), ("DP", "dp")] + [(k.upper(), k) for k in ("cp", "ep") if (parallel.get(k) or 1) > 1]
    return " x ".join(f"{label} {parallel.get(key) or 1}" for label, key in degrees)


def load_run(run_dir: Path) -> Run:
    """Reads a run's folder. Raises DataError if it has no metrics.jsonl or its config.yaml or versions.json is damaged."""
    run_dir = Path(run_dir)
    metrics = read_metrics(run_dir)
    samples, lost = read_samples(run_dir)
    distributions, cut = read_distributions(run_dir)
    events, damaged = read_events(run_dir)
    config, versions = run_dir / "config.yaml", run_dir / "versions.json"
    return Run(
        name=run_dir.resolve().name,
        records=metrics.records,
        samples=samples,
        config=mapping(config, yaml.safe_load, yaml.YAMLError),
        versions=mapping(versions, json.loads, ValueError),
        unreadable=len(metrics.unreadable) + lost + cut + damaged,
        distributions=distributions,
        events=events,
    )


def mapping(path: Path, parse: Any, damage: type[Exception]) -> dict[str, Any]:
    """The mapping that a small file holds; empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (damage, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be parsed (restore it, or remove it to leave it out)") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds no mapping (restore it, or remove it to leave it out)")
    return content
