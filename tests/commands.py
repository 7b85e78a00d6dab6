"""`megarl` commands for slow tests, forked from a process that has imported everything.

`python -m megarl` spends seven seconds of CPU on imports. Most tests need less for everything else.
A forked command is a separate process too, with a pid, ranks, signals and an exit code. It does not show
import output or interpreter start, and all forked commands have the same hash seed. Tests of these
start `python -m megarl`. So do some runs that are compared bitwise with another run. These are two killed
runs of test_resume.py, one run of test_recipes.py and one of test_ahead.py. `make chaos` does so, too.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Self

from tests.ranks import FORK, end_with_the_tests


class Command:
    """A running command, with the methods of subprocess.Popen that tests use. Its pipes are text.

    stdout, stderr   a file or subprocess.PIPE; stderr also subprocess.STDOUT
    forked_jobs      whether the jobs that `megarl ablate` and `megarl demo` start are forked too"""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdout: IO[Any] | int,
        stderr: IO[Any] | int,
        start_new_session: bool = False,
        forked_jobs: bool = False,
        context: Any = FORK,
    ) -> None:
        self.arguments = list(arguments)
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        write_ends: list[int] = []  # pipe ends that only the command needs
        out = self._end_of_pipe("stdout", write_ends) if stdout == subprocess.PIPE else _number(stdout)
        if stderr == subprocess.STDOUT:
            err = out
        else:
            err = self._end_of_pipe("stderr", write_ends) if stderr == subprocess.PIPE else _number(stderr)
        given = _Given(
            self.arguments,
            str(cwd),
            dict(env),
            list(sys.path),
            _File(out),
            _File(err),
            start_new_session,
            forked_jobs,
        )
        self.process = context.Process(target=_be_command, args=(given,))
        self.process.start()
        for number in write_ends:
            os.close(number)
        assert self.process.pid is not None
        self.pid = self.process.pid

    def _end_of_pipe(self, name: str, write_ends: list[int]) -> int:
        read, write = os.pipe()
        setattr(self, name, open(read, encoding="utf-8", errors="replace"))  # noqa: SIM115
        write_ends.append(write)
        return write

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.arguments, timeout)
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both pipes to their ends and wait for the command."""
        texts = {"stdout": "", "stderr": ""}

        def read(name: str, stream: IO[str]) -> None:
            with stream:
                texts[name] = stream.read()

        streams = [(name, getattr(self, name)) for name in texts if getattr(self, name) is not None]
        readers = [threading.Thread(target=read, args=one, daemon=True) for one in streams]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts["stdout"], texts["stderr"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_command(
    arguments: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    timeout: float,
    forked_jobs: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and capture its output, as subprocess.run does."""
    command = Command(
        arguments,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        forked_jobs=forked_jobs,
    )
    try:
        out, err = command.communicate(timeout)
    finally:
        command.kill()
    return subprocess.CompletedProcess(command.arguments, command.wait(), out, err)


def start_python(arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start `python -m megarl`, which imports everything itself and has another hash seed."""
    return subprocess.Popen([sys.executable, "-m", "megarl", *arguments], text=True, **options)


class _File:
    """An open file for the process that is being started, where its number may differ."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_file, (DupFd(self.number),)


def _receive_file(file: Any) -> _File:
    return _File(file.detach())


@dataclass(frozen=True)
class _Given:
    """Arguments of a command. path: sys.path of the tests."""

    arguments: list[str]
    cwd: str
    environment: dict[str, str]
    path: list[str]
    out: _File
    err: _File
    new_session: bool
    forked_jobs: bool


def _number(file: IO[Any] | int) -> int:
    return file if isinstance(file, int) else file.fileno()


def _be_command(given: _Given) -> None:
    """Run the command in the forked process."""
    end_with_the_tests()
    for reset in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGALRM):
        signal.signal(reset, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if given.new_session:
        os.setsid()
    out, err = given.out.number, given.err.number
    os.dup2(out, 1)
    os.dup2(err, 2)
    for number in {out, err} - {1, 2}:
        os.close(number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    tempfile.tempdir = None  # TMPDIR may differ
    os.chdir(given.cwd)
    os.environ.clear()
    os.environ.update(given.environment)
    first = [one for one in given.environment.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [*first, *(one for one in given.path if one not in first)]
    sys.argv = ["megarl", *given.arguments]
    import torch

    from megarl.cli import run

    torch.set_num_threads(int(given.environment.get("OMP_NUM_THREADS", "1")))
    if given.forked_jobs:
        _fork_jobs()
    atexit._clear()  # multiprocessing would skip the command's handlers: they are called below
    try:
        sys.exit(run())
    finally:
        atexit._run_exitfuncs()


def _fork_jobs() -> None:
    """Have megarl_experiments.jobs fork its jobs from this process."""
    from megarl_experiments import jobs

    class Job(Command):
        def __init__(self, command: list[str], *, stdin: int, env: dict[str, str], **files: Any) -> None:
            arguments = command[command.index("megarl") + 1 :]
            super().__init__(arguments, cwd=Path.cwd(), env=env, context=get_context("fork"), **files)

    names: Any = SimpleNamespace(**vars(subprocess) | {"Popen": Job})
    jobs.subprocess = names
