"""`megarl` as a user's shell starts it, and its ranks as other processes see them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.commands import Command, run_command, start_python

LIMIT = 150.0  # seconds for any one wait; two ranks start within 20 on an idle machine


def megarl(
    *arguments: str, cwd: Path, limit: float = 240.0, forked: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end. forked: see tests/commands.py."""
    if forked:
        return run_command(arguments, cwd=cwd, env=environment(), timeout=limit, forked_jobs=True)
    command = [sys.executable, "-m", "megarl", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=limit, check=False, env=environment()
    )


def environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }


def wait_for(what: str, found: Callable[[], bool], limit: float = LIMIT) -> None:
    """Poll until `found()`; raise AssertionError after `limit` seconds."""
    end = time.monotonic() + limit
    while not found():
        assert time.monotonic() < end, f"waited {limit:.0f} s for {what}"
        time.sleep(0.1)


class Job:
    """A training run in the background with its output in files.

    All processes that it started are ended when the `with` block ends.
    """

    def __init__(self, config: Path, *overrides: str, forked: bool = True) -> None:
        self.folder = config.parent
        self.output, self.errors = self.folder / "stdout.txt", self.folder / "stderr.txt"
        arguments = ["train", str(config), *overrides]
        start = Command if forked else start_python
        with open(self.output, "wb") as out, open(self.errors, "wb") as err:
            self.process = start(
                arguments,
                cwd=self.folder,
                env=environment(),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.started: set[psutil.Process] = set()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (
            [*self.started, psutil.Process(self.process.pid)]
            if self.process.poll() is None
            else list(self.started)
        ):
            if process.is_running():
                process.kill()
        self.process.wait(30)

    def ranks(self, wanted: int) -> list[psutil.Process]:
        """Wait for `wanted` rank processes and return them in the order of their ranks."""
        found: dict[int, psutil.Process] = {}

        def all_there() -> bool:
            assert self.process.poll() is None, self.errors.read_text()
            for child in psutil.Process(self.process.pid).children():
                self.started.add(child)
                try:
                    if (name := re.fullmatch(r"megarl rank (\d+)", child.name())) is not None:
                        found[int(name[1])] = child
                except psutil.NoSuchProcess:
                    continue
            return len(found) == wanted

        wait_for(f"{wanted} ranks", all_there)
        return [found[rank] for rank in sorted(found)]

    def wait_for_steps(self) -> None:
        """Wait until the run has finished a training step and started its verifiers."""
        metrics = self.folder / "run" / "metrics.jsonl"

        def trained() -> bool:
            assert self.process.poll() is None, self.errors.read_text()
            return metrics.exists() and '"stage": "train"' in metrics.read_text()

        wait_for("the first step", trained)
        self.started |= set(psutil.Process(self.process.pid).children(recursive=True))

    def end(self, sent: signal.Signals | None = None) -> tuple[int, str]:
        """Send `sent` to the launcher, and return its exit code and standard error.

        Every process that it started must be gone by then.
        """
        if sent is not None:
            self.process.send_signal(sent)
        code = self.process.wait(LIMIT)
        wait_for(
            "the ranks and their verifiers to go",
            lambda: not any(p.is_running() and p.status() != "zombie" for p in self.alive()),
        )
        return code, self.errors.read_text()

    def alive(self) -> list[psutil.Process]:
        return [
            process for process in self.started if psutil.pid_exists(process.pid) and process.is_running()
        ]
