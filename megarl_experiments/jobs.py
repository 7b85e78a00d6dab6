"""Run commands of megarl side by side on this machine: each is a process with a log and a time limit, and
ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

POLL = 0.1  # seconds
GRACE = 10.0  # seconds between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Job:
    """`megarl ARGUMENTS`, its output in a file. The command must know `--follow PID` (see
    `follow_launcher`)."""

    name: str
    arguments: tuple[str, ...]
    log: Path


@dataclass(frozen=True)
class Ended:
    """A job that has ended. problem: what went wrong, with the last line of its log; empty where the exit
    code is 0."""

    job: Job
    seconds: float
    code: int
    problem: str


def run_jobs(jobs: Iterable[Job], at_most: int, limit: float) -> Generator[Ended]:
    """Start the jobs in their order, `at_most` at a time, and yield each as it ends. limit: seconds, after
    which one is ended.

    Closing the generator, and any exception (Ctrl-C), ends what still runs. Each job has a session of its
    own, so that a terminal's Ctrl-C reaches only the parent. To be used from the main thread: Linux ends a
    job with the *thread* that started it."""
    waiting = iter(jobs)
    running: list[tuple[Job, subprocess.Popen[bytes], float]] = []  # with the times of their starts
    try:
        while True:
            while len(running) < at_most and (job := next(waiting, None)) is not None:
                with open(job.log, "wb") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-P", "-m", "megarl", *job.arguments, "--follow", str(os.getpid())],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        env={"OMP_NUM_THREADS": "1", **os.environ},
                    )
                running.append((job, process, time.monotonic()))
            if not running:
                return
            for one in list(running):
                job, process, started = one
                if process.poll() is not None or time.monotonic() - started > limit:
                    running.remove(one)
                    yield _end(job, process, started, limit)
            time.sleep(POLL)
    finally:
        _stop([process for _, process, _ in running])


def _end(job: Job, process: subprocess.Popen[bytes], started: float, limit: float) -> Ended:
    """End a job that still runs, as its time is up, and return how it ended."""
    code = process.poll()
    problem = ""
    if code is None:
        _stop([process])
        code, problem = process.returncode, f"ended after {limit:.0f} s, its time limit"
    elif code:
        problem = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    if problem:
        log = job.log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        problem += f": {lines[-1] if lines else 'it said nothing'} (log: {job.log})"
    return Ended(job, time.monotonic() - started, code, problem)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to all, and SIGKILL to the process groups of those that are still there after GRACE
    seconds."""
    for process in processes:
        process.terminate()
    end = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
