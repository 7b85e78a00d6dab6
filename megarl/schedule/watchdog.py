"""A thread on each rank that tells the others where the rank is, and ends the run with a report when a phase takes too long.

It uses no collective, only files: run_dir/heartbeat/rank-00000.json is where a rank is now, run_dir/hang-*.txt what hung.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megarl.config.schema import WatchdogConfig
from megarl.parallel.launch import HUNG, leave_word
from megarl.schedule.hang import Report, collective_of, format_stack, write_report

FOLDER = "heartbeat"
WIDTH = 512  # bytes of a heartbeat, which is overwritten in place: a reader sees the old one or the new one
ASKED = "report-asked"  # this file makes every rank report
PATIENCE = 3  # periods that ranks get to report


class Watchdog:
    """This rank's, for the length of the `with` block. depths: name -> how much waits there, for reports; may be added to at any time."""

    def __init__(self, run_dir: Path, rank: int, world: int, config: WatchdogConfig) -> None:
        self.run_dir, self.folder = run_dir, run_dir / FOLDER
        self.rank, self.world, self.config = rank, world, config
        self.depths: dict[str, Callable[[], int]] = {}
        self._where: dict[str, Any] = {
            "rank": rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "stage": "start",
            "step": 0,
            "phase": "start",
        }
        self._entered, self._phases, self._beats = time.monotonic(), 0, 0
        self._collective: str | None = None
        self._asked_before = False
        self._lock, self._end = threading.Lock(), threading.Event()
        self._main = threading.get_ident()
        self._next_rank = (rank + 1) % world
        self._next_beat, self._next_seen = -1, time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in (report_name(self.rank), stack_name(self.rank), *([ASKED] if self.rank == 0 else [])):
            (self.folder / name).unlink(missing_ok=True)
        self._file = os.open(self.folder / beat_name(self.rank), os.O_WRONLY | os.O_CREAT, 0o600)
        # In C, without the interpreter's lock, for a rank that holds it and so cannot run this thread.
        self._stack = open(self.folder / stack_name(self.rank), "w", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=self._stack, all_threads=True)
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.phase("end" if error is None else "failed")
        self._end.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR2)
        self._stack.close()
        os.close(self._file)

    def phase(self, name: str, stage: str | None = None, step: int | None = None) -> None:
        """The main thread begins a phase; `stage` and `step` stay as they were where they are not given."""
        with self._lock:
            self._where |= {"phase": name} | ({} if stage is None else {"stage": stage}) | ({} if step is None else {"step": step})
            self._entered = time.monotonic()
            self._phases += 1
        self._beat()

    def _beat(self) -> None:
        with self._lock:
            self._beats += 1
            text = json.dumps({**self._where, "phases": self._phases, "beat": self._beats, "time": round(time.time(), 3)})
            os.pwrite(self._file, text.ljust(WIDTH - 1).encode() + b"\n", 0)

    def _watch(self) -> None:
        while not self._end.wait(self.config.period):
            self._collective = collective_of(sys._current_frames().get(self._main)) or self._collective
            with suppress(OSError):  # a disk that fails must not end the watch; a rank whose heartbeat stands still is noticed by others
                self._beat()
                if (self.folder / ASKED).exists() and not self._asked_before:
                    self._asked_before = True
                    self._report()
            limit = self.config.limits.get(self._where["phase"], self.config.limit)
            taken = time.monotonic() - self._entered
            if taken > limit:
                self._fire(f"phase {self._where['phase']} has taken {taken:.0f} s, its limit is {limit:g} s")
            elif self._next_is_silent():
                self._fire(f"rank {self._next_rank} has given no sign of life for watchdog.silence, {self.config.silence:g} s")

    def _next_is_silent(self) -> bool:
        """Each rank looks after the next, by a clock of its own: two machines' need not agree."""
        beat = (read_beat(self.folder, self._next_rank) or {}).get("beat", -1)
        now = time.monotonic()
        if beat != self._next_beat:
            self._next_beat, self._next_seen = beat, now
        if now - self._next_seen <= self.config.silence:
            return False
        if beat == -1 and self._phases == 0:
            return False  # it may not have started yet
        return bool((read_beat(self.folder, self._next_rank) or {}).get("phase") not in ("end", "failed"))

    def _report(self) -> None:
        """This rank's part of a report."""
        frames = sys._current_frames()
        main = frames.get(self._main)
        depths = {name: depth() for name, depth in list(self.depths.items())}
        with self._lock:
            here = Report(
                **{key: self._where[key] for key in ("rank", "host", "pid", "stage", "step", "phase")},
                phases=self._phases,
                seconds=round(time.monotonic() - self._entered, 1),
                waits_in=collective_of(main),
                last_collective=self._collective,
                depths=depths,
                stack="\n".join(
                    format_stack(thread.name, frames.get(thread.ident or 0))
                    for thread in threading.enumerate()
                    if thread.name != "watchdog"
                ),
            )
        aside = self.folder / f".{report_name(self.rank)}"
        aside.write_text(here.to_json(), encoding="utf-8")
        os.replace(aside, self.folder / report_name(self.rank))

    def _fire(self, why: str) -> None:
        """Ends this process, whatever becomes of the report."""
        try:
            line = self._report_of_all(why)
        except OSError as error:  # a disk that is full or gone may be why the run hangs
            line = f"the run hangs: {why}; no report could be written to {self.run_dir}: {error}"
        try:
            if line is not None and not leave_word(line):
                print(f"megarl: {line}", file=sys.stderr, flush=True)
        finally:
            os._exit(HUNG)

    def _report_of_all(self, why: str) -> str | None:
        """The first rank to get here writes the report for all and gives the line about it. Raises OSError."""
        self._report()
        try:
            os.close(os.open(self.folder / ASKED, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            self._end.wait(2 * (PATIENCE + 1) * self.config.period)
            return None
        self._asked_before = True
        end = time.monotonic() + PATIENCE * self.config.period
        while time.monotonic() < end and not all((self.folder / report_name(rank)).exists() for rank in range(self.world)):
            time.sleep(0.05)
        reports = read_reports(self.folder, self.world)
        self._ask_the_silent(reports)
        stacks = {rank: _text(self.folder / stack_name(rank)) for rank in range(self.world) if rank not in reports}
        beats = {rank: read_beat(self.folder, rank) for rank in range(self.world)}
        path, culprit = write_report(self.run_dir, why, reports, beats, stacks)
        return f"the run hangs: {culprit}; {why}; every rank's place is in {path}"

    def _ask_the_silent(self, reports: Mapping[int, Report]) -> None:
        """Ranks on this machine whose watchdog says nothing may still write their stack in a signal's handler."""
        asked = False
        for rank in range(self.world):
            beat = read_beat(self.folder, rank)
            if rank not in reports and beat is not None and beat["host"] == self._where["host"] and Path(f"/proc/{beat['pid']}").exists():
                os.kill(beat["pid"], signal.SIGUSR2)
                asked = True
        if asked:
            time.sleep(1.0)


def beat_name(rank: int) -> str:
    """Where a rank says where it is."""
    return f"rank-{rank:05d}.json"


def report_name(rank: int) -> str:
    """A rank's part of a hang's report."""
    return f"report-{rank:05d}.json"


def stack_name(rank: int) -> str:
    """What faulthandler writes."""
    return f"stack-{rank:05d}.txt"


def read_beat(folder: Path, rank: int) -> dict[str, Any] | None:
    """A rank's heartbeat; None where there is none that can be read."""
    try:
        beat = json.loads((folder / beat_name(rank)).read_bytes())
    except (OSError, ValueError):
        return None
    return beat if isinstance(beat, dict) else None


def read_reports(folder: Path, world: int) -> dict[int, Report]:
    """The parts that ranks have written."""
    return {rank: Report.from_json(text) for rank in range(world) if (text := _text(folder / report_name(rank)))}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
