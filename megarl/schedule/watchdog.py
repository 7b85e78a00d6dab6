"""A thread on each rank that tells the others where the rank is, and ends the run with a report when a phase
takes too long.

It uses no collective, only files: run_dir/heartbeat/rank-00000.json is where a rank is now,
run_dir/hang-*.txt the report about a hang: where every rank stands, and which one keeps the others waiting.
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
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from megarl.config.errors import StorageError
from megarl.config.files import MAKE_ROOM, essential, why, write_whole
from megarl.config.schema import WatchdogConfig
from megarl.parallel.launch import HUNG, write_error_file

FOLDER = "heartbeat"
# Of each rank: where it is, its part of a report, and the stack that faulthandler writes.
BEAT, REPORT, STACK = "rank-{:05d}.json", "report-{:05d}.json", "stack-{:05d}.txt"
WIDTH = 512  # bytes of a heartbeat, which is overwritten in place: a reader sees the old one or the new one
REPORT_REQUESTED = "report-asked"  # a file that makes every rank report
PATIENCE = 3  # periods that ranks get to report
# Frames of these files wait for other ranks; the frame that called them says what for.
WAITS = (
    "torch/distributed/distributed_c10d.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
    "/selectors.py",  # of an event loop: the controller of rollouts and its workers wait there for messages
)
LIBRARIES = ("torch/", "/asyncio/")  # whose frames say nothing of who waits


class Watchdog:
    """Watches this rank while the `with` block lasts.

    depths: name -> how much waits in a queue, or what, for reports; may be added to at any time."""

    def __init__(self, run_dir: Path, rank: int, world: int, config: WatchdogConfig) -> None:
        self.run_dir, self.folder = run_dir, run_dir / FOLDER
        self.rank, self.world, self.config = rank, world, config
        self.depths: dict[str, Callable[[], int | str]] = {}
        process = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
        self._where: dict[str, Any] = {**process, "stage": "start", "step": 0, "phase": "start"}
        self._entered, self._phases, self._beats = time.monotonic(), 0, 0
        self._collective: str | None = None
        self._reported = False
        self._lock, self._end = threading.Lock(), threading.Event()
        self._main = threading.get_ident()
        self._beaten, self._unwritten = time.monotonic(), ""  # the last whole heartbeat; why there is none
        self._next_rank = (rank + 1) % world
        self._next_beat, self._next_seen = -1, time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        with essential(self.folder / BEAT.format(self.rank)):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            requested = [REPORT_REQUESTED] if self.rank == 0 else []
            for name in (REPORT.format(self.rank), STACK.format(self.rank), *requested):
                (self.folder / name).unlink(missing_ok=True)
            self._file = os.open(self.folder / BEAT.format(self.rank), os.O_WRONLY | os.O_CREAT, 0o600)
            # In C, without the interpreter's lock, for a rank that holds it and so cannot run this thread.
            self._stack = open(self.folder / STACK.format(self.rank), "w", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=self._stack, all_threads=True)
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.phase("end" if error is None else "failed")
        self._end.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR2)
        self._stack.close()
        os.close(self._file)

    def phase(self, name: str, stage: str | None = None, step: int | None = None) -> None:
        """Note that the main thread begins a phase. `stage` and `step` stay as they were unless given."""
        with self._lock:
            given = {"phase": name, "stage": stage, "step": step}
            self._where |= {key: value for key, value in given.items() if value is not None}
            self._entered = time.monotonic()
            self._phases += 1
        self._beat()

    def _beat(self) -> None:
        """Write the heartbeat. A disk that fails ends nothing here: it may come back, and what is overwritten
        in place needs no room. See `_watch` for one that does not."""
        with self._lock:
            self._beats += 1
            text = json.dumps(
                {**self._where, "phases": self._phases, "beat": self._beats, "time": round(time.time(), 3)}
            )
            try:
                if os.pwrite(self._file, text.ljust(WIDTH - 1).encode() + b"\n", 0) == WIDTH:
                    self._beaten = time.monotonic()
                else:
                    self._unwritten = "it is cut off"
            except OSError as error:
                self._unwritten = why(error)

    def _watch(self) -> None:
        while not self._end.wait(self.config.period):
            self._collective = collective_of(sys._current_frames().get(self._main)) or self._collective
            self._beat()
            with suppress(OSError):  # a disk that fails must not end the watch
                if (self.folder / REPORT_REQUESTED).exists() and not self._reported:
                    self._reported = True
                    self._report()
            limit = self.config.limits.get(self._where["phase"], self.config.limit)
            taken = time.monotonic() - self._entered
            if taken > limit:
                self._fire(f"phase {self._where['phase']} has taken {taken:.0f} s, its limit is {limit:g} s")
            elif (silent := time.monotonic() - self._beaten) > self.config.silence / 2:
                # Before the others take this rank for dead, and report a hang.
                path = self.folder / BEAT.format(self.rank)
                line = f"{path}: cannot be written for {silent:.0f} s: {self._unwritten} ({MAKE_ROOM})"
                self._leave(f"rank {self.rank}: {line}", StorageError.code)
            elif self._next_is_silent():
                silence = f"watchdog.silence, {self.config.silence:g} s"
                self._fire(f"rank {self._next_rank} has given no sign of life for {silence}")

    def _next_is_silent(self) -> bool:
        """Return whether the next rank has had no heartbeat for too long, by this machine's clock alone."""
        beat = read_beat(self.folder, self._next_rank) or {}
        now, number = time.monotonic(), beat.get("beat", -1)
        if number != self._next_beat:
            self._next_beat, self._next_seen = number, now
        if now - self._next_seen <= self.config.silence:
            return False
        if number == -1 and self._phases == 0:
            return False  # it may not have started yet
        return beat.get("phase") not in ("end", "failed")

    def _report(self) -> None:
        """Write this rank's part of a report."""
        frames = sys._current_frames()
        waits_in = collective_of(frames.get(self._main))
        depths = {name: depth() for name, depth in list(self.depths.items())}
        stacks = []
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            if frame is None:
                stacks.append(f"thread {thread.name}: has just ended\n")
            elif thread.name != "watchdog":
                stacks.append(f"thread {thread.name}:\n{''.join(traceback.format_stack(frame))}")
        with self._lock:
            here = Report(
                **{key: self._where[key] for key in ("rank", "host", "pid", "stage", "step", "phase")},
                phases=self._phases,
                seconds=round(time.monotonic() - self._entered, 1),
                waits_in=waits_in,
                last_collective=self._collective,
                depths=depths,
                stack="\n".join(stacks),
            )
        path = self.folder / REPORT.format(self.rank)
        write_whole(path, json.dumps(asdict(here)))

    def _fire(self, reason: str) -> None:
        """Report the hang and end this process, whatever becomes of the report."""
        try:
            line = self._report_of_all(reason)
        except OSError as error:  # a disk that is full or gone may be why the run hangs
            line = f"the run hangs: {reason}; no report could be written to {self.run_dir}: {error}"
        self._leave(line, HUNG)

    def _leave(self, line: str | None, code: int) -> None:
        """Say why, and end this process."""
        try:
            if line is not None and not write_error_file(line, code):
                print(f"megarl: {line}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    def _report_of_all(self, reason: str) -> str | None:
        """Write run_dir/hang-<time>.txt for all ranks; return the line about it, None if another rank does
        it."""
        self._report()
        try:
            os.close(os.open(self.folder / REPORT_REQUESTED, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            self._end.wait(2 * (PATIENCE + 1) * self.config.period)
            return None
        self._reported = True
        paths = {rank: self.folder / REPORT.format(rank) for rank in range(self.world)}
        end = time.monotonic() + PATIENCE * self.config.period
        while time.monotonic() < end and not all(path.exists() for path in paths.values()):
            time.sleep(0.05)
        texts = {rank: _text(path) for rank, path in paths.items()}
        reports = {rank: Report(**json.loads(text)) for rank, text in texts.items() if text}
        beats = {rank: read_beat(self.folder, rank) for rank in range(self.world)}
        silent = [rank for rank in beats if rank not in reports]
        # Ranks on this machine whose watchdog is silent may still write their stack in a signal's handler.
        signalled = False
        for rank in silent:
            beat = beats[rank]
            if beat is None or beat["host"] != self._where["host"]:
                continue
            if Path(f"/proc/{beat['pid']}").exists():
                os.kill(beat["pid"], signal.SIGUSR2)
                signalled = True
        if signalled:
            time.sleep(1.0)
        line = culprit(reports, beats)
        parts = [f"culprit: {line}", f"why now: {reason}", ""]
        for rank, report in reports.items():
            depths = ", ".join(f"{depth} {name}" for name, depth in report.depths.items()) or "nothing known"
            parts.append(
                f"rank {rank}: {report.stage} step {report.step}, "
                f"phase {report.phase} for {report.seconds:.0f} s; "
                f"waits in: {report.waits_in or 'no collective'}; "
                f"last collective seen: {report.last_collective or 'none'}; waiting: {depths}"
            )
        parts += [f"rank {rank}: no answer; last heartbeat: {beats[rank]}" for rank in silent]
        for rank, report in reports.items():
            parts.append(f"\n==== rank {rank}, {report.host}, pid {report.pid}\n{report.stack}")
        for rank in silent:
            stack = _text(self.folder / STACK.format(rank))
            parts.append(
                f"\n==== rank {rank}\n{stack or 'no stack: the process did not answer a signal either'}"
            )
        path = self.run_dir / time.strftime("hang-%Y%m%d-%H%M%S.txt")
        write_whole(path, "\n".join(parts) + "\n")
        return f"the run hangs: {line}; {reason}; every rank's place is in {path}"


def read_beat(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return a rank's heartbeat; None where there is none that can be read."""
    try:
        beat = json.loads((folder / BEAT.format(rank)).read_bytes())
    except (OSError, ValueError):
        return None
    return beat if isinstance(beat, dict) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


@dataclass(frozen=True)
class Report:
    """A rank's part of the report about a hang.

    phases            begun so far
    seconds           in the present phase
    waits_in          the collective in which the main thread waits, if it does
    last_collective   the last one in which the watchdog saw it
    depths            what waits in the rank's queues
    stack             of all threads"""

    rank: int
    host: str
    pid: int
    stage: str
    step: int
    phase: str
    phases: int
    seconds: float
    waits_in: str | None
    last_collective: str | None
    depths: dict[str, int | str]
    stack: str

    @property
    def innermost(self) -> str:
        """Return the line at which the main thread stands."""
        lines = [line.strip() for line in self.stack.split("\n\n")[0].splitlines()]
        places = [line for line in lines if line.startswith("File ")]
        return places[-1] if places else "nobody knows where"


def collective_of(frame: FrameType | None) -> str | None:
    """Return the wait for other ranks in which a thread with this innermost frame stands, as `all_reduce,
    called in file.py:12 function`; None where it does not wait."""
    name = None
    while frame is not None:
        inside = any(frame.f_code.co_filename.endswith(path) for path in WAITS)
        if inside and frame.f_code.co_name != "wrapper":
            name = frame.f_code.co_name
        elif name and not inside and not any(one in frame.f_code.co_filename for one in LIBRARIES):
            code = frame.f_code
            return f"{name}, called in {Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return name


def culprit(reports: Mapping[int, Report], beats: Mapping[int, Mapping[str, Any] | None]) -> str:
    """Return a line about the rank that the others wait for: one that does not answer; else one that is not
    waiting while others are; else one that is behind."""
    for rank, beat in beats.items():
        if rank not in reports:
            seen = "never said where it was"
            if beat:
                seen = f"was last seen in phase {beat['phase']} of {beat['stage']} step {beat['step']}"
            reasons = "it is stopped, holds the interpreter, or its machine is gone"
            return f"rank {rank} does not answer ({reasons}) and {seen}"
    waiting = [report for report in reports.values() if report.waits_in is not None]
    working = [report for report in reports.values() if report.waits_in is None]
    if waiting and working:
        first = min(working, key=lambda report: report.phases)
        others = f"{len(waiting)} rank{'s wait' if waiting[1:] else ' waits'} in {waiting[0].waits_in}"
        return f"rank {first.rank} is in phase {first.phase}, at {first.innermost}, while {others}"
    behind = min(reports.values(), key=lambda report: report.phases)
    if behind.phases < max(report.phases for report in reports.values()):
        where = behind.waits_in or behind.innermost
        return f"rank {behind.rank} is behind the others, in phase {behind.phase} ({where})"
    if not waiting:
        return f"rank {behind.rank} and all others are in phase {behind.phase}, at {behind.innermost}"
    return f"all ranks wait for each other in {behind.waits_in}: what connects them is at fault"
