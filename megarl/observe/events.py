"""events.jsonl: what happened to a run rather than in one of its steps: starts, restarts, what ended it. Never shortened on a restart."""

from __future__ import annotations

import time
from pathlib import Path

from megarl.observe.jsonl import JsonLines, JsonlWriter, Record, read_jsonl

EVENTS_FILE = "events.jsonl"


class EventLog:
    """append=True continues the file of an earlier run. Raises ConfigError if the folder cannot be written."""

    def __init__(self, run_dir: Path, append: bool = False) -> None:
        self._writer = JsonlWriter(run_dir / EVENTS_FILE, append)

    def write(self, text: str) -> None:
        """One event, with the time of the clock (seconds since 1970)."""
        self._writer.write({"time": round(time.time(), 1), "event": text})

    def close(self) -> None:
        self._writer.close()


def read_events(run_dir: Path) -> tuple[list[Record], int]:
    """The events of a run in the order of their times, with the watchdog's reports of hangs, and the number of lines that could not be
    read."""
    path, lines = Path(run_dir) / EVENTS_FILE, JsonLines([], [])
    if path.exists():
        lines = read_jsonl(path, lambda record: isinstance(record.get("time"), int | float) and isinstance(record.get("event"), str))
    hangs = [{"time": hang.stat().st_mtime, "event": f"hang, {_first_line(hang)} ({hang.name})"} for hang in run_dir.glob("hang-*.txt")]
    return sorted([*lines.records, *hangs], key=lambda record: record["time"]), len(lines.unreadable)


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().strip()
