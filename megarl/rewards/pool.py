"""Verification in processes of its own: a verifier that hangs, dies or eats memory costs one answer a
recorded failure. What an answer can bring about (time, memory, a crash) makes it wrong, else a policy would
learn to write such answers; what it cannot (a process that is killed once or does not start, a function
that raises, a service that is down) leaves it unjudged.

One event loop talks to all workers. A worker answers item after item, so that the limit holds for each item,
while a batch of items travels in one message, JSON on one line. `VerifierPool` is the parent's side, `work`
the worker's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import msgspec

from megarl.config.errors import ConfigError, WaitTimeout
from megarl.rewards.process import FAILED_STARTS, START_LIMIT, LimitedProcess, serve
from megarl.rewards.sandbox import CALCULATE, STRICT, Supervised
from megarl.rewards.verdict import (
    Judged,
    Reference,
    Term,
    UnusableError,
    Verdict,
    Verifier,
    as_verdict,
    finite,
    get_term,
    get_verifier,
    short,
    verifier_path,
)

if TYPE_CHECKING:  # a worker needs no pydantic
    from megarl.config.schema import RewardTerm

_MAX_BATCH = 64
# Packages whose verifiers and terms only calculate: their processes need no network and no programs.
_CALCULATING = ("megarl", "megarl_tasks", "megarl_verifier")
_BUSY = 0.5  # share of the limit that an answer has spent calculating if the time-out is its own fault

# Response text and reference; where the terms of the reward are wanted too, then `length`, `longest`
# and `truncated` of `Judged`.
Item = tuple[str, str | Reference] | tuple[str, str | Reference, int, int, bool]


# The fields of a Verdict, as a worker sends them.
_Sent = tuple[bool, str | None, str | None, float | None, dict[str, float], bool]


class VerifierPool:
    """`workers` processes that judge answers with the verifier `verifier_name` (see get_verifier), and then
    compute the terms of the reward.

    timeout     seconds that one answer may take, its terms included
    memory_mib  data memory of one worker, MiB; a verifier that needs more gets a MemoryError (recorded)
    own         verifiers that References name: a worker imports them before its first answer, which has a
    limit
    sandbox     what verifiers and terms of the user may reach, as `reward.sandbox` says; megarl's own may
    reach nothing in any case

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
        sandbox: str = STRICT,
    ) -> None:
        if workers < 1 or timeout <= 0 or memory_mib < 64:
            given = f"{workers}, {timeout}, {memory_mib}"
            raise ValueError(f"workers >= 1, timeout > 0 and memory_mib >= 64 expected (got {given})")
        self.timeout = timeout
        self._settings: dict[str, Any] = {
            "verifier": verifier_path(verifier_name),  # its worker need not look for it
            "terms": {name: (term.function, term.arguments) for name, term in terms.items()},
            "timeout": timeout,
            "memory_mib": memory_mib,
            "own": list(own),
        }
        _functions(self._settings)
        paths = [self._settings["verifier"], *own, *(term.function for term in terms.values())]
        ours = all(path.partition(":")[0].partition(".")[0] in _CALCULATING for path in paths)
        self._sandbox = CALCULATE if ours else sandbox
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
        return [one.pid for one in self._workers if one is not None and one.pid is not None and one.alive]

    @property
    def waiting(self) -> int:
        """Answers that workers have and have not judged yet; may be asked from another thread."""
        return sum(len(worker.batch) for worker in list(self._workers) if worker is not None)

    def verify(self, items: Sequence[Item]) -> list[Verdict]:
        """Return one verdict per item, in their order.

        An answer that takes longer than the limit has Verdict.error "timeout after 10 s" and is wrong; so is
        one whose worker died with it ("verifier died (signal 11)") twice, the second time as the first answer
        of a new worker. A time-out counts at once if the worker was calculating, and otherwise must happen
        twice too: a worker that was killed or stopped from outside once changes no verdict. Where no worker
        can be started, raises WaitTimeout or ConfigError before anything was judged; later, what is left is
        unjudged."""
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

        failed: list[Exception] = []

        async def judge(slot: int) -> None:
            """Have the worker of this slot, or the one that replaces it, judge batches until nothing is
            left, or until none can be started."""
            while todo:
                worker = self._workers[slot]
                if worker is None or not worker.alive:
                    try:
                        worker = await self._start(slot)
                    except (WaitTimeout, ConfigError) as problem:
                        if not self._has_judged:
                            raise
                        failed.append(problem)
                        return
                worker.give([todo.popleft() for _ in range(min(at_most, len(todo)))], items)
                while worker.batch:
                    began = time.monotonic()
                    try:
                        verdict = _read_verdict(await worker.receive(self.timeout))
                    except (TimeoutError, EOFError, ValueError, TypeError) as problem:
                        late = isinstance(problem, TimeoutError)
                        own = late and worker.calculated_since(began) >= _BUSY * self.timeout
                        item, how = worker.batch[0], worker.end()
                        if own or item in lost:
                            error = f"timeout after {self.timeout:g} s" if late else f"verifier died ({how})"
                            verdicts[worker.batch.popleft()] = Verdict(False, error=error)
                        lost.add(item)
                        todo.extendleft(reversed(worker.batch))
                        worker.batch.clear()
                    else:
                        self._has_judged = True
                        verdicts[worker.batch.popleft()] = verdict

        slots = range(min(workers, len(items)))
        while todo and len(failed) < len(slots):
            # One that could not start a worker left its answers to the others.
            await asyncio.gather(*(judge(slot) for slot in slots))
        for item in todo:
            verdicts[item] = Verdict(False, error=str(failed[-1]), judged=False)
        return cast(list[Verdict], verdicts)

    async def _start(self, slot: int) -> _Worker:
        """Start a worker, and others if it dies at its start or takes too long; what was in its slot ends."""
        while True:
            if (old := self._workers[slot]) is not None:
                old.end()
            self._workers[slot] = worker = None
            try:
                worker = self._workers[slot] = _Worker(self._sandbox)
                problem = await worker.connect(self._settings)
            except (OSError, EOFError) as error:  # OSError: TimeoutError is one, and a machine that is full
                reason = f"{type(error).__name__}: {error}"
                if worker is not None:
                    reason = f"{worker.end()}; {worker.last_line}"
                self._failed_starts += 1
                # A starved machine starts slowly, through no fault of the answers: they wait.
                if isinstance(error, TimeoutError) and (
                    not self._has_judged or self._failed_starts >= FAILED_STARTS
                ):
                    late = f"a worker process was not ready within {START_LIMIT:g} s ({reason})"
                    raise WaitTimeout(f"reward.verifier: {late}") from None
                if self._failed_starts >= FAILED_STARTS:
                    died = f"{FAILED_STARTS} worker processes died at their start ({reason})"
                    raise ConfigError(f"reward.verifier: {died}") from None
                continue
            if problem is not None:
                raise ConfigError(problem)
            self._failed_starts = 0
            return worker


class _Worker(LimitedProcess):
    """One process, and the items that it has not answered yet."""

    def __init__(self, sandbox: str) -> None:
        super().__init__(__name__, sandbox)
        self.batch: deque[int] = deque()

    def give(self, batch: Iterable[int], items: Sequence[Item]) -> None:
        """Put the items `batch` on their way."""
        self.batch.extend(batch)
        self._given, self._cpu = time.monotonic(), self.cpu_seconds()
        self.send([items[i] for i in self.batch])

    def calculated_since(self, began: float) -> float:
        """Return the least CPU time that the present item has taken, seconds.

        began  time.monotonic() when it became the first of the batch: the items before it took no more CPU
               time than time"""
        return self.cpu_seconds() - self._cpu - (began - self._given)


def _read_verdict(message: Any) -> Verdict:
    """Return the verdict that a worker has sent. Raises ValueError for anything else."""
    verdict = Verdict(*msgspec.convert(message, _Sent))
    if not all(map(math.isfinite, (verdict.score or 0.0, *verdict.terms.values()))):
        raise ValueError("a score or a term is not finite")
    return verdict


def judge(
    verifier: Verifier, terms: Mapping[str, Term], response: str, reference: str | Reference, *size: Any
) -> Verdict:
    """Return the verdict of the verifier, or of the reference's own, with the values of the terms where
    `size` (length, longest, truncated) is given. Whatever one of them raises or returns wrongly is a verdict
    with an error, and without terms: of nothing, as nobody has judged, unless memory or the stack ran out,
    which an answer can bring about."""
    at, answer = "", reference if isinstance(reference, str) else reference.answer
    try:
        if isinstance(reference, str):
            result: object = verifier(response, reference)
        else:
            result = get_verifier(reference.verifier)(response, reference.entry)
        verdict = as_verdict(result, "verifier")
        if not size or verdict.error is not None:
            return verdict
        length, longest, truncated = size
        judged, values = Judged(response, answer, length, longest, truncated, verdict), {}
        for name, term in terms.items():
            at = f"reward.terms.{name}: "
            values[name] = finite(term(judged), "it returned", "not a number")
        return replace(verdict, terms=values)
    except (MemoryError, RecursionError) as error:
        what = "memory" if isinstance(error, MemoryError) else "stack"
        return Verdict(False, error=f"{at}{'it' if at else 'verifier'} ran out of {what}")
    except UnusableError as problem:
        return Verdict(False, error=f"{at}{problem}", judged=False)
    except Exception as error:  # noqa: BLE001 (a verifier's bug must not end the run: it is recorded)
        return Verdict(False, error=f"{at}{type(error).__name__}: {error}".split("\n")[0], judged=False)


def _functions(settings: Mapping[str, Any]) -> tuple[Verifier, dict[str, Term]]:
    terms = {name: get_term(name, *term) for name, term in settings["terms"].items()}
    return get_verifier(settings["verifier"]), terms


def work(process: Supervised) -> None:
    """Be a worker."""
    serve(process, _judging)


def _judging(settings: dict[str, Any]) -> Callable[[Any], Iterator[Any]]:
    verifier, terms = _functions(settings)
    for name in settings["own"]:
        get_verifier(name)

    def verdicts(batch: Any) -> Iterator[Any]:
        for response, reference, *size in batch:
            if isinstance(reference, list):
                reference = Reference(*reference)
            verdict = judge(verifier, terms, response, reference, *size)
            texts = short(verdict.extracted), short(verdict.error)
            yield [verdict.correct, *texts, verdict.score, verdict.terms, verdict.judged]

    return verdicts
