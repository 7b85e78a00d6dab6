"""Verification in processes of its own: a verifier that hangs, dies or eats memory costs one answer a recorded failure.

One thread drives all workers through non-blocking pipes. A worker answers item after item, so the limit holds for each
item, while a batch of items travels in one message.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, cast

from megarl.config.errors import ConfigError, WaitTimeout
from megarl.rewards.registry import get_verifier
from megarl.rewards.verdict import Verdict
from megarl.rewards.worker import HEADER, encode

_START_LIMIT = 60.0  # seconds; importing sympy from a busy network file system is slow
_MAX_BATCH = 64
_FAILED_STARTS = 3
# What an interpreter needs to start. The launcher's and the user's variables (ranks, devices, keys) are no business of a verifier.
_KEPT_ENVIRONMENT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TMPDIR")
# Verdicts must not depend on the process that gives them, and the order of a Python set does.
_OWN_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class VerifierPool:
    """`workers` processes that judge answers with the verifier `verifier_name` (see get_verifier).

    timeout     seconds that one answer may take
    memory_mib  data memory of one worker, MiB; a verifier that needs more gets a MemoryError, recorded with its answer

    The processes are started by the first `verify` and end with `close`, with the `with` block, or when this process dies.
    Not thread-safe. Raises ConfigError at once if the verifier does not exist."""

    def __init__(self, verifier_name: str, workers: int = 1, timeout: float = 10.0, memory_mib: int = 2048) -> None:
        if workers < 1 or timeout <= 0 or memory_mib < 64:
            raise ValueError(f"workers >= 1, timeout > 0 and memory_mib >= 64 expected (got {workers}, {timeout}, {memory_mib})")
        get_verifier(verifier_name)
        self.timeout = timeout
        self._settings = {"verifier": verifier_name, "timeout": timeout, "memory_mib": memory_mib}
        self._size = workers
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._lost: set[int] = set()  # answers of this call that have cost a worker

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers. A later `verify` starts new ones."""
        while self._workers:
            worker = self._workers.pop()
            if not worker.ended:
                worker.end()

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [worker.process.pid for worker in self._workers if worker.process.poll() is None]

    @property
    def waiting(self) -> int:
        """Answers that workers have and have not judged yet; may be asked from another thread."""
        return sum(len(worker.batch) for worker in list(self._workers))

    def verify(self, items: Sequence[tuple[str, str]]) -> list[Verdict]:
        """One verdict per (response text, reference answer), in their order.

        An answer that takes longer than the limit has Verdict.error "timeout after 10 s", one whose worker died
        "verifier died (signal 9)"; both count as wrong and leave the other answers alone. Either must happen twice: a worker that was
        killed or stopped from outside changes no verdict. Raises WaitTimeout or ConfigError if workers cannot be started."""
        self._lost.clear()
        verdicts: list[Verdict | None] = [None] * len(items)
        todo = deque(range(len(items)))
        batch = max(1, min(_MAX_BATCH, len(items) // (4 * self._size)))
        try:
            while todo or any(worker.batch for worker in self._workers):
                self._replace_dead(min(self._size, len(items)))
                for worker in self._workers:
                    if worker.ready and not worker.batch and todo:
                        worker.give([todo.popleft() for _ in range(min(batch, len(todo)))], items, self.timeout)
                self._exchange()
                for worker in self._workers:
                    self._collect(worker, verdicts, todo)
        except BaseException:
            # Workers that still hold a batch of this call would answer it into the next one.
            self.close()
            raise
        return cast(list[Verdict], verdicts)

    def _replace_dead(self, wanted: int) -> None:
        """Idle workers that have gone are replaced at no answer's cost."""
        for worker in self._workers:
            if not worker.busy and (worker.closed or worker.process.poll() is not None):
                worker.end()
        self._workers = [worker for worker in self._workers if not worker.ended]
        while len(self._workers) < wanted:
            self._workers.append(_Worker.start(self._settings))

    def _exchange(self) -> None:
        """Waits until bytes can move or the nearest limit is reached, and moves them."""
        now = time.monotonic()
        nearest = min((worker.deadline for worker in self._workers if worker.busy), default=now)
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                if worker.busy:
                    selector.register(worker.stdout, selectors.EVENT_READ, worker.receive)
                    if worker.outbox:
                        selector.register(worker.stdin, selectors.EVENT_WRITE, worker.send)
            for key, _ in selector.select(max(0.0, nearest - now) + 0.001):
                key.data()

    def _collect(self, worker: _Worker, verdicts: list[Verdict | None], todo: deque[int]) -> None:
        """Takes over what `worker` has answered; ends it if it is dead or over its limit, which costs its present
        item, the second time."""
        if worker.busy and time.monotonic() > worker.deadline:
            worker.receive()  # if it was this process that slept, the answer is here
        messages = worker.messages()
        for message in messages:
            if worker.ready:
                verdicts[worker.batch.popleft()] = Verdict(*message)
            elif message is not None:
                raise ConfigError(message)
            worker.ready, self._failed_starts = True, 0
        if messages:
            worker.deadline = time.monotonic() + self.timeout
        late = worker.busy and time.monotonic() > worker.deadline
        if not late and not (worker.closed and worker.busy):
            return
        reason = worker.end()
        if not worker.ready:
            self._start_failed(late, f"{reason}; {worker.last_words}")
        elif worker.batch:
            error = f"timeout after {self.timeout:g} s" if late else f"verifier died ({reason})"
            if worker.batch[0] in self._lost:
                verdicts[worker.batch.popleft()] = Verdict(False, error=error)
            else:
                self._lost.add(worker.batch[0])
            todo.extendleft(reversed(worker.batch))
            worker.batch.clear()

    def _start_failed(self, late: bool, reason: str) -> None:
        if late:
            raise WaitTimeout(f"reward.verifier: a worker process was not ready within {_START_LIMIT:g} s ({reason})")
        self._failed_starts += 1
        if self._failed_starts >= _FAILED_STARTS:
            raise ConfigError(f"reward.verifier: {_FAILED_STARTS} worker processes died at their start ({reason})")


@dataclass(eq=False)
class _Worker:
    """One process, the bytes on their way to and from it, and the items that it has not answered yet."""

    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    deadline: float
    outbox: memoryview
    inbox: bytearray = field(default_factory=bytearray)
    batch: deque[int] = field(default_factory=deque)
    ready: bool = False
    closed: bool = False
    ended: bool = False
    last_words: str = ""

    @staticmethod
    def start(settings: dict[str, Any]) -> _Worker:
        # megarl and the user's module are found where this process finds them, whatever put them on its path.
        paths = [entry or os.getcwd() for entry in sys.path]
        boot = "import sys; sys.path.extend(p for p in sys.argv[1:] if p not in sys.path); from megarl.rewards.worker import main; main()"
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ} | _OWN_ENVIRONMENT
        process = subprocess.Popen(
            [sys.executable, "-c", boot, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            env=environment,
        )
        worker = _Worker(process, stderr, time.monotonic() + _START_LIMIT, memoryview(encode(settings)))
        os.set_blocking(worker.stdin, False)
        os.set_blocking(worker.stdout, False)
        return worker

    @property
    def stdin(self) -> int:
        return cast(IO[bytes], self.process.stdin).fileno()

    @property
    def stdout(self) -> int:
        return cast(IO[bytes], self.process.stdout).fileno()

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited from it."""
        return not self.ready or bool(self.batch)

    def give(self, batch: list[int], items: Sequence[tuple[str, str]], timeout: float) -> None:
        """Puts the items `batch` on their way; the limit of the first starts now."""
        self.batch.extend(batch)
        self.outbox = memoryview(encode([items[i] for i in batch]))
        self.deadline = time.monotonic() + timeout

    def send(self) -> None:
        try:
            self.outbox = self.outbox[os.write(self.stdin, self.outbox) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.closed = True
            self.outbox = memoryview(b"")

    def receive(self) -> None:
        try:
            data = os.read(self.stdout, 1 << 16)
        except BlockingIOError:
            return
        self.inbox += data
        self.closed = self.closed or not data

    def messages(self) -> list[Any]:
        """The complete messages that have arrived."""
        found = []
        at = 0
        while len(self.inbox) >= at + HEADER.size:
            (size,) = HEADER.unpack_from(self.inbox, at)
            end = at + HEADER.size + size
            if len(self.inbox) < end:
                break
            found.append(json.loads(self.inbox[at + HEADER.size : end]))
            at = end
        del self.inbox[:at]
        return found

    def end(self) -> str:
        """Kills this process (its own pid only), closes its files and says how it ended."""
        if self.closed:
            # It closed its pipe by itself, so it is about to be gone, and its own way of ending is the news.
            self._wait(1.0)
        self.process.kill()
        self._wait(10.0)
        if not self.ready:
            self.stderr.seek(0)
            self.last_words = (self.stderr.read().decode(errors="replace").strip().splitlines() or ["it wrote no reason"])[-1]
        for file in (self.process.stdin, self.process.stdout, self.stderr):
            cast(IO[bytes], file).close()
        self.closed = self.ended = True
        code = self.process.returncode
        return "killed" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def _wait(self, limit: float) -> None:
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            return  # killed next, or stuck in the kernel after SIGKILL: the run goes on without it
