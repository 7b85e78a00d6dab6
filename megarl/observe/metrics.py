"""metrics.jsonl: one JSON object per step, the record from which everything else about a run is drawn.

TensorBoard and Weights & Biases get the same numbers when they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megarl.observe.jsonl import JsonLines, JsonlWriter, Record, is_step, precedes, read_jsonl
from megarl.observe.trackers import TensorBoardTracker, Tracker, WandbTracker

METRICS_FILE = "metrics.jsonl"
STAGES = ("sft", "value_pretraining", "train", "eval")
DIGITS = 9


class MetricsLog:
    """Writes a run's metrics. append=True continues the file of an earlier run, False starts it anew.

    Raises ConfigError if the folder cannot be written, or if a tracker that was asked for is not installed."""

    def __init__(self, run_dir: Path, tensorboard: bool = False, wandb: bool = False, append: bool = False) -> None:
        self.trackers: list[Tracker] = []
        if tensorboard:
            self.trackers.append(TensorBoardTracker(run_dir))
        if wandb:
            self.trackers.append(WandbTracker(run_dir, append))
        self._writer = JsonlWriter(run_dir / METRICS_FILE, append)

    def write(self, record: Mapping[str, Any]) -> Record:
        """Writes one record and returns it as written, which is what the terminal view is to show.

        `record` needs "step" (int) and "stage" (one of STAGES). Values are texts, numbers, 0-dimensional tensors, or lists
        and mappings of these. A number that is not finite becomes null and is named in the record's "alarms"; an optional
        "events" (list of texts) is shown by the report. Raises ValueError if step or stage is missing."""
        if not isinstance(record.get("step"), Integral) or record.get("stage") not in STAGES:
            raise ValueError(
                f"a metrics record needs an int `step` and a `stage` of {STAGES} (got {record.get('step')}, {record.get('stage')})"
            )
        alarms = [str(text) for text in record.get("alarms", ())]
        written = {name: plain(value, name, alarms) for name, value in record.items() if name != "alarms"}
        if alarms:
            written["alarms"] = alarms
        self._writer.write(written)
        scalars = {name: float(v) for name, v in written.items() if isinstance(v, int | float) and name != "step"}
        for tracker in self.trackers:
            tracker.log(written["step"], written["stage"], scalars)
        return written

    def truncate_after(self, step: int, stage: str = "train") -> int:
        """Drops what was written after `step` of `stage`, from where the run continues; returns the number of lines dropped."""
        for tracker in self.trackers:
            tracker.continue_from(step)
        return self._writer.keep(lambda record: precedes(record, step, stage))

    def close(self) -> None:
        self._writer.close()
        for tracker in self.trackers:
            tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def plain(value: Any, name: str, alarms: list[str]) -> Any:
    """`value` as JSON can hold it: numbers as Python's own, floats rounded to 9 significant digits; `name: value` of what
    is not finite is added to `alarms`."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{name}.{key}", alarms) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{i}]", alarms) for i, item in enumerate(value)]
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    if not math.isfinite(number):
        alarms.append(f"{name}: {number}")
        return None
    return float(f"{number:.{DIGITS}g}")


def read_metrics(run_dir: Path) -> JsonLines:
    """The records of run_dir/metrics.jsonl; `unreadable` has the numbers of lines that were cut by a killed run.

    A line without step and known stage counts as unreadable. Raises DataError if there is no such file."""
    return read_jsonl(Path(run_dir) / METRICS_FILE, is_step)
