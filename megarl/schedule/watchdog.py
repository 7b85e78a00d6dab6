"""A thread per rank that ends a hanging run with a report about all ranks.

It uses files instead of collectives: heartbeat/rank-*.json has a rank's phase, hang-*.txt the report."""

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from megarl.config.errors import StorageError
from megarl.config.files import MAKE_ROOM, describe_error, mark_required, write_atomic
from megarl.config.schema import WatchdogConfig
from megarl.parallel.launch import HUNG, write_error_file

FOLDER = "heartbeat"
BEAT, REPORT, STACK = "rank-{:05d}.json", "report-{:05d}.json", "stack-{:05d}.txt"
WIDTH = 512  # bytes of a heartbeat; overwriting it in place keeps it complete
REPORT_REQUESTED = "report-asked"
PATIENCE = 3  # periods in which ranks must report
# Frames of these files wait for other ranks.
WAITS = (
    "torch/distributed/distributed_c10d.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
    "/selectors.py",  # event loops wait for messages
)
LIBRARIES = ("torch/", "/asyncio/")


class Watchdog:
    def __init__(self, run_dir: Path, rank: int, world: int, config: WatchdogConfig) -> None:
        self.run_dir, self.folder = run_dir, run_dir / FOLDER
        self.rank, self.world, self.config = rank, world, config
        self.depths: dict[str, Callable[[], int | str]] = {}
        process = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
        self._state: dict[str, Any] = {**process, "stage": "start", "step": 0, "phase": "start"}
        self._phase_started, self._phases, self._beats = time.monotonic(), 0, 0
        self._collective: str | None = None
        self._reported = False
        self._lock, self._end = threading.Lock(), threading.Event()
        self._main = threading.get_ident()
        self._last_beat, self._beat_error = time.monotonic(), ""
        self._next_rank = (rank + 1) % world
        self._next_beat, self._next_changed = -1, time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        with mark_required(self.folder / BEAT.format(self.rank)):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            requested = [REPORT_REQUESTED] if self.rank == 0 else []
            for name in (REPORT.format(self.rank), STACK.format(self.rank), *requested):
                (self.folder / name).unlink(missing_ok=True)
            self._file = os.open(self.folder / BEAT.format(self.rank), os.O_WRONLY | os.O_CREAT, 0o600)
            # faulthandler works without the interpreter lock, which a stuck rank may hold.
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
        with self._lock:
            new_state = {"phase": name, "stage": stage, "step": step}
            self._state |= {key: value for key, value in new_state.items() if value is not None}
            self._phase_started = time.monotonic()
            self._phases += 1
        self._beat()

    def _beat(self) -> None:
        """Write the heartbeat. A failing disk may recover; `_watch` limits the time."""
        with self._lock:
            self._beats += 1
            text = json.dumps(
                {**self._state, "phases": self._phases, "beat": self._beats, "time": round(time.time(), 3)}
            )
            try:
                if os.pwrite(self._file, text.ljust(WIDTH - 1).encode() + b"\n", 0) == WIDTH:
                    self._last_beat = time.monotonic()
                else:
                    self._beat_error = "it is cut off"
            except OSError as error:
                self._beat_error = describe_error(error)

    def _watch(self) -> None:
        while not self._end.wait(self.config.period):
            self._collective = find_wait(sys._current_frames().get(self._main)) or self._collective
            self._beat()
            with suppress(OSError):  # a failing disk must not end the watch
                if (self.folder / REPORT_REQUESTED).exists() and not self._reported:
                    self._reported = True
                    self._report()
            limit = self.config.limits.get(self._state["phase"], self.config.limit)
            seconds = time.monotonic() - self._phase_started
            if seconds > limit:
                self._fire(
                    f"phase {self._state['phase']} has taken {seconds:.0f} s, its limit is {limit:g} s"
                )
            elif (silent_seconds := time.monotonic() - self._last_beat) > self.config.silence / 2:
                path = self.folder / BEAT.format(self.rank)
                line = (
                    f"{path}: cannot be written for {silent_seconds:.0f} s: {self._beat_error} ({MAKE_ROOM})"
                )
                self._leave(f"rank {self.rank}: {line}", StorageError.code)
            elif self._next_is_silent():
                silence = f"watchdog.silence, {self.config.silence:g} s"
                self._fire(f"rank {self._next_rank} has given no sign of life for {silence}")

    def _next_is_silent(self) -> bool:
        beat = read_beat(self.folder, self._next_rank) or {}
        now, beat_number = time.monotonic(), beat.get("beat", -1)
        if beat_number != self._next_beat:
            self._next_beat, self._next_changed = beat_number, now
        if now - self._next_changed <= self.config.silence:
            return False
        if beat_number == -1 and self._phases == 0:
            return False  # it may still be starting
        return beat.get("phase") not in ("end", "failed")

    def _report(self) -> None:
        frames = sys._current_frames()
        waits_in = find_wait(frames.get(self._main))
        depths = {name: depth() for name, depth in list(self.depths.items())}
        stacks = []
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            if frame is None:
                stacks.append(f"thread {thread.name}: has just ended\n")
            elif thread.name != "watchdog":
                stacks.append(f"thread {thread.name}:\n{''.join(traceback.format_stack(frame))}")
        with self._lock:
            report = Report(
                **{key: self._state[key] for key in ("rank", "host", "pid", "stage", "step", "phase")},
                phases=self._phases,
                seconds=round(time.monotonic() - self._phase_started, 1),
                waits_in=waits_in,
                last_collective=self._collective,
                depths=depths,
                stack="\n".join(stacks),
            )
        path = self.folder / REPORT.format(self.rank)
        write_atomic(path, json.dumps(asdict(report)))

    def _fire(self, reason: str) -> None:
        """Report the hang and end, even if the report fails."""
        try:
            line = self._write_report(reason)
        except OSError as error:
            line = f"the run hangs: {reason}; no report could be written to {self.run_dir}: {error}"
        self._leave(line, HUNG)

    def _leave(self, line: str | None, code: int) -> None:
        try:
            if line is not None and not write_error_file(line, code):
                print(f"megarl: {line}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    def _write_report(self, reason: str) -> str | None:
        self._report()
        try:
            os.close(os.open(self.folder / REPORT_REQUESTED, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            self._end.wait(2 * (PATIENCE + 1) * self.config.period)
            return None
        self._reported = True
        paths = {rank: self.folder / REPORT.format(rank) for rank in range(self.world)}
        deadline = time.monotonic() + PATIENCE * self.config.period
        while time.monotonic() < deadline and not all(path.exists() for path in paths.values()):
            time.sleep(0.05)
        texts = {rank: _read(path) for rank, path in paths.items()}
        reports = {rank: Report(**json.loads(text)) for rank, text in texts.items() if text}
        beats = {rank: read_beat(self.folder, rank) for rank in range(self.world)}
        silent_ranks = [rank for rank in beats if rank not in reports]
        self._request_stacks([beats[rank] for rank in silent_ranks])
        culprit = find_culprit(reports, beats)
        parts = [f"culprit: {culprit}", f"why now: {reason}", "", *map(str, reports.values())]
        parts += [f"rank {rank}: no answer; last heartbeat: {beats[rank]}" for rank in silent_ranks]
        for rank, report in reports.items():
            parts.append(f"\n==== rank {rank}, {report.host}, pid {report.pid}\n{report.stack}")
        for rank in silent_ranks:
            stack = _read(self.folder / STACK.format(rank))
            parts.append(f"\n==== rank {rank}\n{stack or 'no stack: the process did not react to a signal'}")
        path = self.run_dir / time.strftime("hang-%Y%m%d-%H%M%S.txt")
        write_atomic(path, "\n".join(parts) + "\n")
        return f"the run hangs: {culprit}; {reason}; every rank's place is in {path}"

    def _request_stacks(self, beats: Sequence[Mapping[str, Any] | None]) -> None:
        """Have silent local ranks write their stacks in a signal handler."""
        local = [beat["pid"] for beat in beats if beat is not None and beat["host"] == self._state["host"]]
        running = [pid for pid in local if Path(f"/proc/{pid}").exists()]
        for pid in running:
            os.kill(pid, signal.SIGUSR2)
        if running:
            time.sleep(1.0)


def read_beat(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        beat = json.loads((folder / BEAT.format(rank)).read_bytes())
    except (OSError, ValueError):
        return None
    return beat if isinstance(beat, dict) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


@dataclass(frozen=True)
class Report:
    """last_collective: the last one in which the watchdog saw the main thread."""

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

    def __str__(self) -> str:
        depths = ", ".join(f"{depth} {name}" for name, depth in self.depths.items()) or "nothing known"
        return (
            f"rank {self.rank}: {self.stage} step {self.step}, phase {self.phase} for {self.seconds:.0f} s; "
            f"waits in: {self.waits_in or 'no collective'}; "
            f"last collective seen: {self.last_collective or 'none'}; waiting: {depths}"
        )

    @property
    def innermost(self) -> str:
        lines = [line.strip() for line in self.stack.split("\n\n")[0].splitlines()]
        frame_lines = [line for line in lines if line.startswith("File ")]
        return frame_lines[-1] if frame_lines else "an unknown place"


def find_wait(frame: FrameType | None) -> str | None:
    name = None
    while frame is not None:
        is_wait = any(frame.f_code.co_filename.endswith(path) for path in WAITS)
        if is_wait and frame.f_code.co_name != "wrapper":
            name = frame.f_code.co_name
        elif name and not is_wait and not any(part in frame.f_code.co_filename for part in LIBRARIES):
            code = frame.f_code
            return f"{name}, called in {Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return name


def find_culprit(reports: Mapping[int, Report], beats: Mapping[int, Mapping[str, Any] | None]) -> str:
    """Describe the rank that does not answer, else works while others wait, else is behind."""
    for rank, beat in beats.items():
        if rank not in reports:
            last_phase = "has never reported its phase"
            if beat:
                last_phase = f"was last seen in phase {beat['phase']} of {beat['stage']} step {beat['step']}"
            reasons = "it is stopped, holds the interpreter, or its machine is gone"
            return f"rank {rank} does not answer ({reasons}) and {last_phase}"
    waiting = [report for report in reports.values() if report.waits_in is not None]
    working = [report for report in reports.values() if report.waits_in is None]
    if waiting and working:
        culprit = min(working, key=lambda report: report.phases)
        waiting_text = f"{len(waiting)} rank{'s wait' if waiting[1:] else ' waits'} in {waiting[0].waits_in}"
        return (
            f"rank {culprit.rank} is in phase {culprit.phase}, at {culprit.innermost}, while {waiting_text}"
        )
    laggard = min(reports.values(), key=lambda report: report.phases)
    if laggard.phases < max(report.phases for report in reports.values()):
        where = laggard.waits_in or laggard.innermost
        return f"rank {laggard.rank} is behind the others, in phase {laggard.phase} ({where})"
    if not waiting:
        return f"rank {laggard.rank} and all others are in phase {laggard.phase}, at {laggard.innermost}"
    return f"all ranks wait for each other in {laggard.waits_in}: the connection between them is at fault"
