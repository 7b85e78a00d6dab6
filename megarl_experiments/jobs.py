"""Run megarl commands in parallel, each with a log and a time limit."""

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
    """`megarl ARGUMENTS` with output to `log`. The command must take `--follow PID` (`follow_launcher`)."""

    name: str
    arguments: tuple[str, ...]
    log: Path


@dataclass(frozen=True)
class Ended:
    """A finished job. problem: the failure with the log's last line, empty after success."""

    job: Job
    seconds: float
    code: int
    problem: str


def run_jobs(jobs: Iterable[Job], at_most: int, limit: float) -> Generator[Ended]:
    """Start the jobs in order, `at_most` at a time, and yield each when it ends.

    limit: seconds per job. Closing the generator ends the running jobs. Each has its own session, so that
    Ctrl-C reaches only the parent. Call this in the main thread: Linux terminates a job when the thread that
    started it ends (`follow_launcher`)."""
    remaining_jobs = iter(jobs)
    running: list[tuple[Job, subprocess.Popen[bytes], float]] = []  # with start times
    try:
        while True:
            while len(running) < at_most and (job := next(remaining_jobs, None)) is not None:
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
            for entry in list(running):
                job, process, started = entry
                if process.poll() is not None or time.monotonic() - started > limit:
                    running.remove(entry)
                    yield _end(job, process, started, limit)
            time.sleep(POLL)
    finally:
        _stop([process for _, process, _ in running])


def _end(job: Job, process: subprocess.Popen[bytes], started: float, limit: float) -> Ended:
    """End a job that still runs; return its result."""
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
        problem += f": {lines[-1] if lines else 'no output'} (log: {job.log})"
    return Ended(job, time.monotonic() - started, code, problem)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM, and after GRACE seconds SIGKILL."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
