"""JSON lines on disk, one record a line, as a run that may be killed at any moment writes them.

A line exists once its newline does: readers tell which lines they could not read, writers mend a cut end before they go on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megarl.config.errors import ConfigError, DataError

Record = dict[str, Any]

# In which order the stages of one run follow each other; evaluations belong to the stage that they interrupt.
STAGE_ORDER = {"sft": 0, "value_pretraining": 1, "train": 2}


@dataclass(frozen=True)
class JsonLines:
    """The records of a file, in their order, and the numbers (from 1) of the lines that were none."""

    records: list[Record]
    unreadable: list[int]


def parse(line: bytes) -> Record | None:
    """The object that a line holds; None where the line is cut or foreign."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_jsonl(path: Path, valid: Callable[[Record], bool] = bool) -> JsonLines:
    """All records of `path` that are `valid`; any other line that is not blank counts as unreadable.

    Raises DataError if the file cannot be opened."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror} (is this the folder of a run?)") from error
    found = JsonLines([], [])
    for number, line in enumerate(content.split(b"\n"), start=1):
        record = parse(line)
        if record is not None and valid(record):
            found.records.append(record)
        elif line.strip():
            found.unreadable.append(number)
    return found


def is_step(record: Mapping[str, Any]) -> bool:
    """Whether a record says to which step of which stage it belongs."""
    return isinstance(record.get("step"), int) and record.get("stage") in (*STAGE_ORDER, "eval")


def precedes(record: Mapping[str, Any], step: int, stage: str) -> bool:
    """Whether `record` was written at or before `step` of `stage`, and so belongs to a run that continues from there.

    The stages count their steps separately; an evaluation carries the step of training (0 before and during value pretraining)."""
    if not is_step(record):
        return False
    if record["stage"] == "eval":
        return bool(record["step"] <= (0 if stage == "value_pretraining" else step))
    mine, theirs = STAGE_ORDER[record["stage"]], STAGE_ORDER[stage]
    return mine < theirs or (mine == theirs and bool(record["step"] <= step))


class JsonlWriter:
    """Appends records to a file; each is on its way to the disk when `write` returns.

    append=False starts the file anew; append=True continues it, without a cut last line if there is one.
    Raises ConfigError if the file cannot be opened."""

    def __init__(self, path: Path, append: bool) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if append and path.exists():
                _mend_end(path)
            self._file = path.open("ab" if append else "wb")
        except OSError as error:
            raise ConfigError(f"run_dir: {path}: cannot be written: {error.strerror} (choose another run_dir)") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record. Raises ValueError if it holds NaN or infinity, which JSON does not know."""
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def keep(self, wanted: Callable[[Record], bool]) -> int:
        """Drops the lines whose record is not `wanted`, and the unreadable ones, all at once; returns how many were dropped."""
        self._file.flush()
        lines = [line for line in self.path.read_bytes().split(b"\n") if line.strip()]
        kept = [line for line in lines if (record := parse(line)) is not None and wanted(record)]
        if len(kept) == len(lines):
            return 0
        replacement = self.path.with_suffix(".rewritten")
        with replacement.open("wb") as file:
            file.write(b"".join(line + b"\n" for line in kept))
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        os.replace(replacement, self.path)
        self._file = self.path.open("ab")
        return len(lines) - len(kept)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _mend_end(path: Path) -> None:
    """Makes the file end with a newline: a last line that lacks only that gets it, a cut one goes."""
    content = path.read_bytes()
    start = content.rfind(b"\n") + 1
    if start == len(content):
        return
    with path.open("r+b") as file:
        if parse(content[start:]) is None:
            file.truncate(start)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
