"""Run Python that a policy wrote, each program in a fresh confined process.

The expected results of tests stay outside that process, which is how an answer cannot read or fake them."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import megarl
from megarl.rewards.plain_values import UnknownValueError, decode
from megarl.rewards.process import START_LIMIT
from megarl.rewards.sandbox import remove_tree

MAX_OUTPUT = 1 << 20  # bytes beyond twice the expected output
_REPLY_LIMIT = 10.0  # seconds beyond a program's limit
_BOOT = "import sys; sys.path[:] = sys.argv[3:]; from megarl.rewards.zygote import main; main()"
# The order of sets must not decide a result; threads of numpy would need much address space.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8"}


class ProgramError(Exception):
    """No program can run here."""


class Limits(NamedTuple):
    """Limits of one process.

    cpu, wall   seconds of computation, and by the clock
    memory_mib  data memory, MiB"""

    cpu: float
    wall: float
    memory_mib: int


class Output(NamedTuple):
    """What a process wrote.

    text    None: too much, or not UTF-8
    code    exit code; negative: ended by that signal"""

    text: str | None
    code: int
    timed_out: bool


class Programs:
    """The process that starts programs, started at the first of them.

    allow_unconfined: run programs even where the kernel cannot confine them"""

    def __init__(self, *, allow_unconfined: bool = False) -> None:
        self._allow_unconfined = allow_unconfined
        self._zygote: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        if self._zygote is not None:
            self._control.close()
            self._zygote.kill()
            self._zygote.wait()
            self._zygote = None
            with suppress(OSError):
                remove_tree(self._folder)

    def start(self) -> None:
        """Start the process, if it does not run. Raises ProgramError."""
        if self._zygote is not None and self._zygote.poll() is None:
            return
        self.close()
        self._control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = Path(tempfile.mkdtemp(prefix="megarl-program-"))
        home = {name: os.environ[name] for name in ("PYTHONHOME", "LD_LIBRARY_PATH") if name in os.environ}
        if "LD_LIBRARY_PATH" in home:  # an empty or relative entry is the folder that programs write to
            entries = home["LD_LIBRARY_PATH"].split(":")
            home["LD_LIBRARY_PATH"] = (
                ":".join(entry for entry in entries if os.path.isabs(entry)) or "/nowhere"
            )
        # Without site, which imports more than programs need, and with no editable installation's finder.
        paths = [path or os.getcwd() for path in sys.path] + [str(Path(megarl.__file__).parents[1])]
        self._zygote = subprocess.Popen(
            [
                *(sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", _BOOT),
                *(str(other_end.fileno()), str(self._folder), *paths),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[other_end.fileno()],
            env=_ENVIRONMENT | home,
        )
        other_end.close()
        self._control.settimeout(START_LIMIT)
        try:
            answer = self._control.recv(1 << 12)
        except TimeoutError:
            answer = b""
        if answer == b"":
            self.close()
            raise ProgramError("the process that starts programs died at its start")
        if not json.loads(answer) and not self._allow_unconfined:
            self.close()
            missing = "this machine has not both Landlock and seccomp, so a program could read your files"
            raise ProgramError(f"{missing} (Linux 5.13 or newer; or allow it by reward.sandbox=off)")

    def run(self, source: str, stdin: str, limits: Limits, expected: int = 0) -> Output:
        """Run a script. expected: bytes of output. Raises ProgramError."""
        stdin_file = _memory_file(stdin)
        try:
            processes = [("program", [_memory_file(json.dumps({"source": source})), stdin_file])]
            return self._run(processes, limits, 2 * expected + MAX_OUTPUT)
        except OSError:
            os.close(stdin_file)
            raise

    def call(
        self, source: str, name: str, calls: Sequence[list[Any]], limits: Limits, expected: int = 0
    ) -> list[Any]:
        """Call a function with each list of arguments, in one process. expected: characters of the results

        Returns a list for each call that ended: [value], or [] if it raised. Raises ProgramError."""
        setup = {"source": source, "fn_name": name, "calls": calls}
        size = 2 * (len(json.dumps(calls)) + expected) + MAX_OUTPUT
        output = self._run([("function", [_memory_file(json.dumps(setup))])], limits, size)
        return [_value(line) for line in _lines(output)]

    def test(
        self,
        source: str,
        before: str,
        tests: Sequence[str],
        candidate: str | None,
        limits: Limits,
        first: int = 0,
    ) -> list[bool]:
        """Run the tests from number `first` in a separate process, which calls the answer in another.

        Returns one entry for each test that ended. Raises ProgramError."""
        setup = {"before": before, "tests": tests, "candidate": candidate, "first": first}
        requests, replies = os.pipe(), os.pipe()
        processes = [
            ("answer", [_memory_file(json.dumps({"source": source})), requests[0], replies[1]]),
            ("tests", [_memory_file(json.dumps(setup)), replies[0], requests[1]]),
        ]
        return [line == "true" for line in _lines(self._run(processes, limits, MAX_OUTPUT))]

    def _run(self, processes: Sequence[tuple[str, list[int]]], limits: Limits, size: int) -> Output:
        """Start processes, of which the last writes to one more descriptor, which is read up to `size`."""
        read_end, write_end = os.pipe()
        processes[-1][1].append(write_end)
        descriptors = [descriptor for _, own in processes for descriptor in own]
        request = {
            "processes": [(role, len(own)) for role, own in processes],
            "seconds": limits.wall,
            "cpu_seconds": max(1, int(-(-limits.cpu // 1))),
            "memory": limits.memory_mib << 20,
            "unconfined": self._allow_unconfined,
        }
        try:
            try:
                self.start()
                socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            end = time.monotonic() + limits.wall + _REPLY_LIMIT
            output = _read(read_end, size, end)
            if output is None:
                self._control.send(b"stop")
            self._control.settimeout(max(1.0, end - time.monotonic()))
            reply = json.loads(self._control.recv(1 << 12))
        except (OSError, ValueError) as error:  # ValueError: it died, and the message is empty
            self.close()
            problem = f"{type(error).__name__}: {error}"
            raise ProgramError(f"the process that starts programs died ({problem})") from None
        finally:
            os.close(read_end)
        try:
            text = None if output is None else output.decode()
        except UnicodeDecodeError:
            text = None
        return Output(text, reply["code"], reply["timed_out"])


def _memory_file(text: str) -> int:
    data = text.encode(errors="surrogatepass")
    descriptor = os.memfd_create("megarl-program", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _read(descriptor: int, size: int, end: float) -> bytes | None:
    """Read until the pipe closes; None: more than `size` bytes. Raises TimeoutError after `end`."""
    blocks, total = list[bytes](), 0
    while select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (block := os.read(descriptor, 1 << 16)):
            return b"".join(blocks)
        blocks.append(block)
        total += len(block)
        if total > size:
            return None
    raise TimeoutError("its program was not ended in time")


def _lines(output: Output) -> list[str]:
    """Return the complete lines."""
    return (output.text or "").split("\n")[:-1]


def _value(line: str) -> list[Any]:
    try:
        message = json.loads(line)
        return [decode(message[0])] if isinstance(message, list) and len(message) == 1 else []
    except (UnknownValueError, ValueError, TypeError, RecursionError, OverflowError):
        return []
