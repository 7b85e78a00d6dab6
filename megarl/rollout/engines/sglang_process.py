"""The leader's handle of an SGLang process (sglang_host.py)."""

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

POLL = 0.2
KILL_WAIT = 30.0  # seconds for killed processes to end
LOG_LINES = 4  # in an error message


class EngineProcess:
    """Runs the process and exchanges messages with it. After an EngineFailure end it.

    limit        seconds of silence while the engine has work
    start_limit  seconds until it is ready
    """

    module = "megarl.rollout.engines.sglang_host"

    def __init__(
        self, arguments: Mapping[str, Any], environment: Mapping[str, str], limit: float, start_limit: float
    ) -> None:
        self.arguments, self.environment = dict(arguments), dict(environment)
        self.limit, self.start_limit = limit, start_limit
        self.children: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self) -> None:
        # SGLang leaves files in TMPDIR, and sockets, whose paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="megarl-sglang-"))
        rank_socket, engine_socket = socket.socketpair()
        with (self.folder / "log").open("wb") as log, engine_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.module, str(engine_socket.fileno()), str(os.getpid())],
                env={**self.environment, "TMPDIR": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[engine_socket.fileno()],
                start_new_session=True,  # Ctrl-C must not reach it; `end` kills the group
            )
        self._connection = Connection(rank_socket.detach())
        self._silent = 0.0  # seconds waited since the last message
        self._done: list[tuple[int, Any]] = []
        self._answers: list[str] = []  # the newest call's error or ""
        self._ready = False
        self.children = []
        self._send(self.arguments)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ready(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._ready and (seconds_left := deadline - time.monotonic()) > 0:
            self._wait(seconds_left, self.start_limit, "it was not ready")
        return self._ready

    def call(self, name: str, *arguments: Any) -> None:
        """Call a method of sglang_host.Calls. Raises EngineFailure with SGLang's error."""
        self._silent, self._answers = 0.0, []
        self._send(("call", name, arguments))
        while not self._answers:
            self._wait(self.limit, self.limit, f"{name} was not answered")
        if problem := self._answers[0]:
            raise EngineFailure(f"SGLang: {name}: {problem}")

    def submit(
        self, requests: Sequence[tuple[int, Sequence[int], int, int, int]], params: Mapping[str, Any]
    ) -> None:
        self._silent = 0.0
        self._send(("submit", requests, params))

    def abort(self) -> None:
        self._send(("abort",))

    def poll(self, seconds: float) -> list[tuple[int, Any]]:
        """Return new answers; wait at most `seconds` for the first."""
        deadline = time.monotonic() + seconds
        while not self._done and (seconds_left := deadline - time.monotonic()) > 0:
            self._wait(seconds_left, self.limit, "no token came")
        while self._connection.poll(0):
            self._read()
        results, self._done = self._done, []
        return results

    def end(self) -> None:
        """Kill the engine's processes, and wait for their end."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # a group outlives its first process
        self._process.wait()
        self._connection.close()
        deadline = time.monotonic() + KILL_WAIT
        while any(map(psutil.pid_exists, self.children)) and time.monotonic() < deadline:
            time.sleep(0.02)  # until then they keep device memory
        shutil.rmtree(self.folder, ignore_errors=True)
        self._process, self._ready = None, False

    def _wait(self, seconds: float, limit: float, what: str) -> None:
        """Wait for a message, at most `seconds` or POLL. limit: seconds of silence"""
        assert self._process is not None
        start_time = time.monotonic()
        if self._connection.poll(min(seconds, POLL)):
            self._read()
            return
        if self._process.poll() is not None:
            raise self._connection_lost()
        self._silent += time.monotonic() - start_time
        if self._silent >= limit:
            raise self._failure(f"{what} for {limit:.0f} s")

    def _read(self) -> None:
        try:
            kind, *content = self._connection.recv()
        except (EOFError, OSError):
            raise self._connection_lost() from None
        self._silent = 0.0
        if kind == "done":
            self._done += content[0]
        elif kind == "answer":
            self._answers.append(content[0])
        elif kind == "ready":
            self._ready, self.children = True, content[0]

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._connection_lost() from None

    def _connection_lost(self) -> EngineFailure:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return self._failure("it closed its connection")
        return self._failure(f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")

    def _failure(self, what: str) -> EngineFailure:
        lines = [line.strip() for line in (self.folder / "log").read_text(errors="replace").splitlines()]
        last_lines = [line for line in lines if line][-LOG_LINES:]
        log_text = f"; its last lines: {' | '.join(last_lines)[-600:]}" if last_lines else ""
        return EngineFailure(f"SGLang, process {self.pid}: {what}{log_text}")
