"""Processes with limits of time and memory, and a minimal environment.

`LimitedProcess` is the parent's side, `serve` the process's. They exchange lines of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from megarl.config.errors import ConfigError
from megarl.rewards.sandbox import Supervised, restrict

START_LIMIT = 60.0  # seconds; importing sympy from a busy network file system is slow
FAILED_STARTS = 3
# The process did not cause these signals: its own memory limit stops it before the kernel's OOM killer would.
FROM_OUTSIDE = {f"signal {number:d}" for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)}
# Other environment variables (ranks, devices, API keys) must not reach such a process.
_KEPT_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TMPDIR")
# Results must not depend on a set's order.
_OWN_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
# The child has the parent's search path.
_BOOT = (
    "import sys; sandbox, sys.path[:] = sys.argv[1], sys.argv[2:]; "
    "from megarl.rewards.sandbox import supervise; process = supervise(sandbox); "
    "from {} import work; work(process)"
)
_PARENT_CHECK = 5.0  # seconds
_END_LIMIT = 10.0  # seconds
# Address space beyond the data limit, for libraries and shared memory.
_MAPPED = 1 << 30


class LimitedProcess:
    """A supervised process that runs `module`'s `work(process)`, which calls `serve`.

    longest: maximum bytes of its messages"""

    def __init__(self, module: str, sandbox: str, longest: int = 1 << 20) -> None:
        self.last_line, self._longest = "", longest
        self.pid: int | None = None
        self._ready = self._ended = self._killed = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._transports: list[asyncio.BaseTransport] = []
        self.process = subprocess.Popen(
            # Inherit -B: a file size limit would cut bytecode files.
            [
                *(sys.executable, *(["-B"] if sys.dont_write_bytecode else [])),
                *("-c", _BOOT.format(module), sandbox),
                *(entry or os.getcwd() for entry in sys.path),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            env=plain_environment(),
        )

    @property
    def alive(self) -> bool:
        return not self._ended and self.process.poll() is None

    def cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def connect(self, settings: dict[str, Any]) -> str | None:
        """Wait until the process is ready. If it cannot start, return the reason. Raises as `receive`."""
        self._loop = loop = asyncio.get_running_loop()
        self._answers = asyncio.StreamReader(limit=self._longest)
        protocol = asyncio.StreamReaderProtocol(self._answers)
        source, _ = await loop.connect_read_pipe(lambda: protocol, self.process.stdout)
        self._transports.append(source)
        self._sink, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self.process.stdin)
        self._transports.append(self._sink)
        self.send(settings)
        self.pid = await self.receive(START_LIMIT)
        problem = await self.receive(START_LIMIT)
        self._ready = True
        return cast(str | None, problem)

    def send(self, message: Any) -> None:
        self._sink.write(json.dumps(message).encode() + b"\n")

    async def receive(self, limit: float) -> Any:
        """Return the next message.

        Raises TimeoutError after `limit` seconds, EOFError, and ValueError for invalid JSON."""
        try:
            async with asyncio.timeout(limit):
                line = await self._answers.readline()
        except TimeoutError:
            # If this process (the parent) was suspended, the answer may have arrived meanwhile.
            async with asyncio.timeout(0.01):
                line = await self._answers.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        try:
            return json.loads(line)
        except RecursionError:
            raise ValueError("a message is nested too deeply") from None

    async def finish(self) -> str:
        """Do as `end`, but do not block the event loop while waiting."""
        if not self._ended:
            if self._transports and self._answers.at_eof():
                await self._wait_async(_END_LIMIT)
            self._kill()
            await self._wait_async(_END_LIMIT)
        return self.end()

    def end(self) -> str:
        """Kill the process and its descendants; return how it ended."""
        if not self._ended:
            if self._transports and self._answers.at_eof():
                # It is ending: wait for its exit code.
                self._wait(_END_LIMIT)
            self._kill()
            self._wait(_END_LIMIT)
            if not self._ready:
                self._stderr.seek(0)
                lines = self._stderr.read().decode(errors="replace").strip().splitlines()
                self.last_line = lines[-1] if lines else "it wrote no reason"
            if self._transports and not self._loop.is_closed():
                for transport in self._transports:
                    if isinstance(transport, asyncio.WriteTransport) and not transport.is_closing():
                        transport.abort()  # `close` waits until all is read
                    transport.close()
            else:  # no transport closes them
                for pipe in (self.process.stdin, self.process.stdout):
                    assert pipe is not None
                    pipe.close()
            self._stderr.close()
            self._ended = True
        code = self.process.returncode
        if code is None or self._killed:
            return "killed"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _kill(self) -> None:
        self._killed = self._killed or self.process.poll() is None
        self.process.terminate()  # the supervisor kills the rest

    def _wait(self, limit: float) -> None:
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.process.kill()  # stuck in the kernel

    async def _wait_async(self, limit: float) -> None:
        end = time.monotonic() + limit
        while self.process.poll() is None and time.monotonic() < end:
            await asyncio.sleep(0.005)


def serve(process: Supervised, prepare: Callable[[dict[str, Any]], Callable[[Any], Iterator[Any]]]) -> None:
    """Write `null` (ready) or an error, then answer messages until the input ends.

    `prepare(settings)`, before `restrict`, returns the answering function or raises ConfigError."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    settings = json.loads(source.readline())
    # User code's output must not mix with messages; stderr reports a failed start.
    null_device = os.open(os.devnull, os.O_RDWR)
    os.dup2(null_device, 0)
    os.dup2(null_device, 1)
    limit = settings["memory_mib"] << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_AS, (limit + _MAPPED, limit + _MAPPED))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def write(message: Any) -> None:
        sink.write(json.dumps(message).encode() + b"\n")
        sink.flush()

    try:
        answer_message = prepare(settings)
    except ConfigError as error:
        write(str(error))
        return
    os.dup2(null_device, 2)
    restrict(process)
    write(None)
    for line in source:
        for answer in answer_message(json.loads(line)):
            write(answer)


def guard() -> None:
    """Run the command in `sys.argv`; it and its descendants end with the parent."""
    follow_parent()
    sys.exit(subprocess.call(sys.argv[2:]))


def plain_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ} | _OWN_ENVIRONMENT


def follow_parent() -> None:
    """Start a thread that ends this process and its group after the parent.

    The end of standard input is no sure sign: another child of the parent may keep the pipe open."""
    parent = os.getppid()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
