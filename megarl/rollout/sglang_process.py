"""A rank's hold on the process of its SGLang engine: start, messages, limits on every wait, and the end of all that belongs to it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from megarl.config.errors import EngineFailure

GLANCE = 0.2  # seconds between looks at whether the process is alive, while waiting
KILLED = 30.0  # seconds for the kernel to end what was killed
LOG_LINES = 4  # of the engine's own log, in an error


class EngineProcess:
    """arguments: of sglang.Engine; environment: of the process; limit: seconds without a sign of life from an engine that has
    work; start_limit: seconds until it is ready. Whatever goes wrong is an EngineFailure; the process is then to be ended."""

    module = "megarl.rollout.sglang_host"

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str], limit: float, start_limit: float) -> None:
        self.arguments, self.environment = dict(arguments), dict(environment)
        self.limit, self.start_limit = limit, start_limit
        self.children: list[int] = []  # process ids of SGLang's own processes
        self._process: subprocess.Popen[bytes] | None = None
        self._calls = 0
        self._ready = False

    def start(self) -> None:
        """Begins the start; `ready` awaits its end."""
        # SGLang leaves sockets and files in the folder for temporary files: one of our own, short enough for a socket's name.
        self.folder = Path(tempfile.mkdtemp(prefix="megarl-sglang-"))
        ours, theirs = socket.socketpair()
        with (self.folder / "log").open("wb") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(theirs.fileno()), str(os.getpid())],
                env={**self.environment, "TMPDIR": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the rank's to answer; and the group is what `end` kills
            )
        self._connection = Connection(ours.detach())
        self._silent = 0.0  # seconds spent waiting since the last message
        self._done: list[tuple[int, Any]] = []
        self._answers: dict[int, str | None] = {}
        self._ready = False
        self.children = []
        self._send(self.arguments)

    @property
    def pid(self) -> int:
        """Of the process that holds the engine."""
        assert self._process is not None
        return self._process.pid

    def ready(self, seconds: float) -> bool:
        """Whether the engine takes requests; waits for it, at most `seconds`."""
        end = time.monotonic() + seconds
        while not self._ready and (left := end - time.monotonic()) > 0:
            self._wait(left, self.start_limit, "it was not ready")
        return self._ready

    def call(self, name: str, *arguments: Any) -> None:
        """A method of sglang_host.Calls; EngineFailure with what SGLang said where it failed."""
        self._calls += 1
        self._silent = 0.0
        self._send(("call", self._calls, name, arguments))
        while self._calls not in self._answers:
            self._wait(self.limit, self.limit, f"{name} was not answered")
        problem = self._answers.pop(self._calls)
        if problem is not None:
            raise EngineFailure(f"SGLang: {name}: {problem}")

    def submit(self, requests: Sequence[tuple[int, Sequence[int], int, int]], params: Mapping[str, Any]) -> None:
        """See sglang_host.Host."""
        self._silent = 0.0
        self._send(("submit", requests, params))

    def abort(self) -> None:
        """Ends what is running; it comes back with what there is of it."""
        self._send(("abort",))

    def poll(self, seconds: float) -> list[tuple[int, Any]]:
        """What has been answered since the last call; waits at most `seconds` for the first."""
        begin = time.monotonic()
        while not self._done and (left := begin + seconds - time.monotonic()) > 0:
            self._wait(left, self.limit, "no token came")
        while self._connection.poll(0):
            self._read()
        done, self._done = self._done, []
        return done

    def _wait(self, seconds: float, limit: float, what: str) -> None:
        """For one message, at most `seconds`, or a moment; EngineFailure after `limit` seconds of silence, however many calls they took."""
        begin = time.monotonic()
        if self._connection.poll(min(seconds, GLANCE)):
            self._read()
            return
        assert self._process is not None
        if self._process.poll() is not None:
            raise self._gone()
        self._silent += time.monotonic() - begin
        if self._silent >= limit:
            raise EngineFailure(f"SGLang, process {self.pid}: {what} for {limit:.0f} s{self._log()}")

    def _read(self) -> None:
        try:
            word, *rest = self._connection.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        self._silent = 0.0
        if word == "done":
            self._done += rest[0]
        elif word == "answer":
            self._answers[rest[0]] = rest[1]
        elif word == "ready":
            self._ready, self.children = True, rest[0]

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._gone() from None

    def _gone(self) -> EngineFailure:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return EngineFailure(f"SGLang, process {self.pid}: it closed its connection{self._log()}")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return EngineFailure(f"SGLang, process {self.pid}: {how}{self._log()}")

    def _log(self) -> str:
        """The end of what SGLang itself wrote; of a traceback the last lines are the telling ones."""
        lines = [line.strip() for line in (self.folder / "log").read_text(errors="replace").splitlines()]
        told = [line for line in lines if line][-LOG_LINES:]
        return f"; its last lines: {' | '.join(told)[-600:]}" if told else ""

    def end(self) -> None:
        """Ends the engine and everything that it has started, and waits for that; again: nothing."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the group lives as long as one of its processes
        self._process.wait()
        self._connection.close()
        deadline = time.monotonic() + KILLED
        while any(psutil.pid_exists(child) for child in self.children) and time.monotonic() < deadline:
            time.sleep(0.02)  # they hold device memory until they are gone
        shutil.rmtree(self.folder, ignore_errors=True)
        self._process, self._ready = None, False
