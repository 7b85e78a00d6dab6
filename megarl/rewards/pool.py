"""Verification in processes of its own: a verifier that hangs, dies or eats memory costs one answer a
recorded failure. What an answer can bring about (time, memory, a crash) makes it wrong, else a policy would
learn to write such answers; what it cannot (a process that is killed or does not start, a function that
raises, a service that is down) leaves it unjudged.

One event loop talks to all workers. A worker answers item after item, so that the limit holds for each item,
while a batch of items travels in one message, JSON on one line. `VerifierPool` is the parent's side, `work`
the worker's.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, cast

from megarl.config.errors import ConfigError, WaitTimeout
from megarl.rewards.verdict import (
    Judged,
    Reference,
    Term,
    Verdict,
    Verifier,
    get_term,
    get_verifier,
    verifier_path,
)

if TYPE_CHECKING:  # a worker needs no pydantic
    from megarl.config.schema import RewardTerm

_START_LIMIT = 60.0  # seconds; importing sympy from a busy network file system is slow
_MAX_BATCH = 64
_FAILED_STARTS = 3
# What an interpreter needs to start. The launcher's and the user's variables (ranks, devices, keys) are no
# business of a verifier.
_KEPT_ENVIRONMENT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TMPDIR")
# Verdicts must not depend on the process that gives them, and the order of a Python set does.
_OWN_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
# megarl, what lies beside it and the user's module are found where this process finds them, in its order.
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from megarl.rewards.pool import work; work()"
_MAX_TEXT = 1000  # characters of an extracted answer or an error that travel back
_GRACE = 2.0  # seconds after the limit of an item at which a worker whose parent has died ends by itself
_PARENT_CHECK = 5.0  # seconds
# Address space beyond the data memory: the interpreter, its libraries and what they map. Bounds shared
# memory, which is not data.
_MAPPED = 1 << 30


# How a process ends that did not do it itself. (The kernel, short of memory, kills so too; a verifier's own
# memory has a limit.)
FROM_OUTSIDE = {f"signal {number:d}" for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)}

# Response text and reference; where the terms of the reward are wanted too, then `length`, `longest`
# and `truncated` of `Judged`.
Item = tuple[str, str | Reference] | tuple[str, str | Reference, int, int, bool]


class VerifierPool:
    """`workers` processes that judge answers with the verifier `verifier_name` (see get_verifier), and then
    compute the terms of the reward.

    timeout     seconds that one answer may take, its terms included
    memory_mib  data memory of one worker, MiB; a verifier that needs more gets a MemoryError (recorded)
    own         verifiers that References name: a worker imports them before its first answer, which has a
    limit

    The processes are started by the first `verify` and end with `close`, with the `with` block, or when this
    process dies. Not thread-safe. Raises ConfigError at once if the verifier or a term does not exist."""

    def __init__(
        self,
        verifier_name: str,
        workers: int = 1,
        timeout: float = 10.0,
        memory_mib: int = 2048,
        terms: Mapping[str, RewardTerm] = MappingProxyType({}),
        own: Sequence[str] = (),
    ) -> None:
        if workers < 1 or timeout <= 0 or memory_mib < 64:
            given = f"{workers}, {timeout}, {memory_mib}"
            raise ValueError(f"workers >= 1, timeout > 0 and memory_mib >= 64 expected (got {given})")
        self.timeout = timeout
        self._settings = {
            "verifier": verifier_path(verifier_name),  # its worker need not look for it
            "terms": {name: (term.function, term.arguments) for name, term in terms.items()},
            "timeout": timeout,
            "memory_mib": memory_mib,
            "own": list(own),
        }
        _functions(self._settings)
        self._workers: list[_Worker | None] = [None] * workers
        self._failed_starts = 0
        self._has_judged = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers. A later `verify` starts new ones."""
        if self._loop is None:
            return
        for worker in filter(None, self._workers):
            worker.end()
        self._workers = [None] * len(self._workers)
        tasks = asyncio.all_tasks(self._loop)

        async def settle() -> None:
            """Let cancelled tasks and closed pipes come to their end."""
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)

        self._loop.run_until_complete(settle())
        self._loop.close()
        self._loop = None

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [one.process.pid for one in self._workers if one is not None and one.process.poll() is None]

    @property
    def waiting(self) -> int:
        """Answers that workers have and have not judged yet; may be asked from another thread."""
        return sum(len(worker.batch) for worker in list(self._workers) if worker is not None)

    def verify(self, items: Sequence[Item]) -> list[Verdict]:
        """Return one verdict per item, in their order.

        An answer that takes longer than the limit has Verdict.error "timeout after 10 s" and is wrong; so is
        one whose worker crashed ("verifier died (signal 11)"), and it is unjudged where the worker was killed
        ("verifier died (signal 9)"). Either must happen twice, and leaves the other answers alone: a worker
        that was killed or stopped from outside once changes no verdict. Where no worker can be started,
        raises WaitTimeout or ConfigError before anything was judged; later, what is left is unjudged."""
        if self._loop is None:
            # Not new_event_loop: the process may have another policy (SGLang's is uvloop).
            self._loop = asyncio.SelectorEventLoop()
        try:
            return self._loop.run_until_complete(self._verify(items))
        except BaseException:
            # Workers that still hold a batch of this call would answer it into the next one.
            self.close()
            raise

    async def _verify(self, items: Sequence[Item]) -> list[Verdict]:
        verdicts: list[Verdict | None] = [None] * len(items)
        todo = deque(range(len(items)))
        lost: set[int] = set()  # answers that have cost a worker
        workers = len(self._workers)
        at_most = max(1, min(_MAX_BATCH, len(items) // (4 * workers)))

        async def judge(slot: int) -> None:
            """Have the worker of this slot, or the one that replaces it, judge batches until nothing is
            left."""
            while todo:
                worker = self._workers[slot]
                if worker is None or not worker.alive:
                    try:
                        worker = await self._start(slot)
                    except (WaitTimeout, ConfigError) as problem:
                        if not self._has_judged:
                            raise
                        for item in todo:
                            verdicts[item] = Verdict(False, error=str(problem), judged=False)
                        todo.clear()
                        return
                worker.give([todo.popleft() for _ in range(min(at_most, len(todo)))], items)
                while worker.batch:
                    try:
                        verdict = Verdict(*await worker.receive(self.timeout))
                    except (TimeoutError, EOFError) as problem:
                        late, how = isinstance(problem, TimeoutError), worker.end()
                        item = worker.batch[0]
                        if item in lost:
                            error = f"timeout after {self.timeout:g} s" if late else f"verifier died ({how})"
                            judged = late or how not in FROM_OUTSIDE
                            verdicts[worker.batch.popleft()] = Verdict(False, error=error, judged=judged)
                        lost.add(item)
                        todo.extendleft(reversed(worker.batch))
                        worker.batch.clear()
                    else:
                        self._has_judged = True
                        verdicts[worker.batch.popleft()] = verdict

        await asyncio.gather(*(judge(slot) for slot in range(min(workers, len(items)))))
        return cast(list[Verdict], verdicts)

    async def _start(self, slot: int) -> _Worker:
        """Start a worker, and others if it dies at its start; what was in its slot ends."""
        while True:
            if (old := self._workers[slot]) is not None:
                old.end()
            worker = self._workers[slot] = _Worker()
            try:
                problem = await worker.connect(self._settings)
            except (TimeoutError, EOFError) as error:
                reason = f"{worker.end()}; {worker.last_line}"
                if isinstance(error, TimeoutError):
                    late = f"a worker process was not ready within {_START_LIMIT:g} s ({reason})"
                    raise WaitTimeout(f"reward.verifier: {late}") from None
                self._failed_starts += 1
                if self._failed_starts >= _FAILED_STARTS:
                    died = f"{_FAILED_STARTS} worker processes died at their start ({reason})"
                    raise ConfigError(f"reward.verifier: {died}") from None
                continue
            if problem is not None:
                raise ConfigError(problem)
            self._failed_starts = 0
            return worker


class _Worker:
    """One process, its pipes, and the items that it has not answered yet."""

    def __init__(self) -> None:
        self.batch: deque[int] = deque()
        self.last_line = ""
        self._ready = self._ended = self._killed = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._transports: list[asyncio.BaseTransport] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *(entry or os.getcwd() for entry in sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            env=plain_environment(),
        )

    @property
    def alive(self) -> bool:
        return not self._ended and self.process.poll() is None

    async def connect(self, settings: dict[str, Any]) -> str | None:
        """Wait until the process is ready; return the reason why it cannot be. Raises as `receive`."""
        loop = asyncio.get_running_loop()
        self._answers = asyncio.StreamReader(limit=1 << 20)
        protocol = asyncio.StreamReaderProtocol(self._answers)
        source, _ = await loop.connect_read_pipe(lambda: protocol, self.process.stdout)
        self._transports.append(source)
        self._sink, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self.process.stdin)
        self._transports.append(self._sink)
        self._send(settings)
        problem = await self.receive(_START_LIMIT)
        self._ready = True
        return cast(str | None, problem)

    def give(self, batch: Iterable[int], items: Sequence[Item]) -> None:
        """Put the items `batch` on their way; never waits for the process to read."""
        self.batch.extend(batch)
        self._send([items[i] for i in self.batch])

    def _send(self, message: Any) -> None:
        self._sink.write(json.dumps(message).encode() + b"\n")

    async def receive(self, limit: float) -> Any:
        """Return the next message. Raises TimeoutError after `limit` seconds, EOFError if there will be
        none."""
        try:
            async with asyncio.timeout(limit):
                line = await self._answers.readline()
        except TimeoutError:
            async with asyncio.timeout(0.01):  # if it was this process that slept, the answer is here
                line = await self._answers.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)

    def end(self) -> str:
        """Kill this process (its own pid only), close its pipes and say how it ended."""
        if not self._ended:
            if self._transports and self._answers.at_eof():
                # It closed its pipe, so it is about to be gone, and its own way of ending is the news. One
                # that is killed here was not killed from outside.
                self._wait(10.0)
            self._killed = self.process.poll() is None
            self.process.kill()
            self._wait(10.0)
            if not self._ready:
                self._stderr.seek(0)
                lines = self._stderr.read().decode(errors="replace").strip().splitlines()
                self.last_line = lines[-1] if lines else "it wrote no reason"
            for transport in self._transports:
                if isinstance(transport, asyncio.WriteTransport) and not transport.is_closing():
                    transport.abort()  # `close` would first wait for what was not read
                transport.close()
            self._stderr.close()
            self._ended = True
        code = self.process.returncode
        if code is None or self._killed:
            return "killed"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _wait(self, limit: float) -> None:
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            return  # killed next, or stuck in the kernel after SIGKILL: the run goes on without it


def judge(
    verifier: Verifier, terms: Mapping[str, Term], response: str, reference: str | Reference, *size: Any
) -> Verdict:
    """Return the verdict of the verifier, or of the reference's own, with the values of the terms where
    `size` (length, longest, truncated) is given. Whatever one of them raises or returns wrongly is a verdict
    with an error, and without terms: of nothing, as nobody has judged, unless memory or the stack ran out,
    which an answer can bring about. A bare number is a score, and right from 1 on."""
    at, answer = "", reference if isinstance(reference, str) else reference.answer
    try:
        if isinstance(reference, str):
            result: object = verifier(response, reference)
        else:
            result = get_verifier(reference.verifier)(response, reference.entry)
        if isinstance(result, bool):
            verdict = Verdict(result)
        elif isinstance(result, tuple):
            if len(result) != 2:
                raise _UnusableError(f"verifier returned a tuple of {len(result)}, not (right, answer)")
            verdict = Verdict(bool(result[0]), result[1])
        elif not isinstance(result, Verdict):
            score = _finite(result, "verifier returned", "not bool, number, (right, answer) or Verdict")
            verdict = Verdict(score >= 1, score=score)
        else:
            verdict = Verdict(
                bool(result.correct), result.extracted, result.error, judged=bool(result.judged)
            )
            if result.score is not None:
                score = _finite(result.score, "verifier returned a score:", "not a number")
                verdict = replace(verdict, score=score)
        if not size or verdict.error is not None:
            return verdict
        length, longest, truncated = size
        judged, values = Judged(response, answer, length, longest, truncated, verdict), {}
        for name, term in terms.items():
            at = f"reward.terms.{name}: "
            values[name] = _finite(term(judged), "it returned", "not a number")
        return replace(verdict, terms=values)
    except (MemoryError, RecursionError) as error:
        what = "memory" if isinstance(error, MemoryError) else "stack"
        return Verdict(False, error=f"{at}{'it' if at else 'verifier'} ran out of {what}")
    except _UnusableError as problem:
        return Verdict(False, error=f"{at}{problem}", judged=False)
    except Exception as error:  # noqa: BLE001 (a verifier's bug must not end the run: it is recorded)
        return Verdict(False, error=f"{at}{type(error).__name__}: {error}".split("\n")[0], judged=False)


class _UnusableError(Exception):
    """What a function of the user has returned is no use."""


def _finite(value: object, what: str, wanted: str) -> float:
    if not isinstance(value, Real):  # numpy's numbers are
        raise _UnusableError(f"{what} {type(value).__name__}, {wanted}")
    if not math.isfinite(number := float(value)):
        raise _UnusableError(f"{what} {number}, which is not finite")
    return number


def _functions(settings: Mapping[str, Any]) -> tuple[Verifier, dict[str, Term]]:
    terms = {name: get_term(name, *term) for name, term in settings["terms"].items()}
    return get_verifier(settings["verifier"]), terms


def work() -> None:
    """Be a worker: read the settings, answer `null` (ready) or the reason why this process cannot start, and
    judge batches until input ends."""
    follow_parent()
    # Signals for the job (Ctrl-C, Slurm's warning) are the trainer's business, which needs its verifiers to
    # save and stop.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    settings = json.loads(source.readline())
    # What a verifier prints must not get into the messages; stderr stays for a failing start.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    limit = settings["memory_mib"] << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_AS, (limit + _MAPPED, limit + _MAPPED))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        verifier, terms = _functions(settings)
        for name in settings["own"]:
            get_verifier(name)
    except ConfigError as error:  # goes to the parent, which raises it
        _write(sink, str(error))
        return
    os.dup2(nowhere, 2)
    _write(sink, None)
    for batch in source:
        for response, reference, *size in json.loads(batch):
            if isinstance(reference, list):
                reference = Reference(*reference)
            # The parent kills a worker that overruns. If the parent is dead nobody does: SIGALRM's default
            # action ends it.
            signal.setitimer(signal.ITIMER_REAL, settings["timeout"] + _GRACE)
            verdict = judge(verifier, terms, response, reference, *size)
            signal.setitimer(signal.ITIMER_REAL, 0)
            texts = (
                None if text is None else str(text)[:_MAX_TEXT] for text in (verdict.extracted, verdict.error)
            )
            _write(sink, [verdict.correct, *texts, verdict.score, verdict.terms, verdict.judged])


def _write(sink: IO[bytes], message: Any) -> None:
    sink.write(json.dumps(message).encode() + b"\n")
    sink.flush()


def plain_environment() -> dict[str, str]:
    """Return the environment of a process whose results must depend on its input alone."""
    return {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ} | _OWN_ENVIRONMENT


def follow_parent() -> None:
    """Have a thread end this process once its parent is gone.

    The end of its input does not say so: a forked child of the parent may outlive it with the pipe open."""
    parent = os.getppid()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK)
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
