"""Grade responses in worker processes, so that a verifier may hang, die or use too much memory.

Failures that an answer can cause make it wrong, else a policy would learn to write such answers."""

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
from megarl.rewards.sandbox import CALCULATE, NETWORK, OFF, STRICT, Supervised
from megarl.rewards.verdict import (
    GradedResponse,
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
# These need no network or programs.
_CALCULATING = ("megarl", "megarl_tasks", "megarl_verifier")
_BUSY = 0.5  # share of the limit as CPU time that makes a timeout the answer's fault

# Response, reference; for reward terms also `length`, `longest` and `truncated` of `GradedResponse`.
Item = tuple[str, str | Reference] | tuple[str, str | Reference, int, int, bool]


# A Verdict in a worker's message.
_Sent = tuple[bool, str | None, str | None, float | None, dict[str, float], bool]


class VerifierPool:
    """`workers` processes that run a verifier and then reward terms.

    timeout     seconds per answer, terms included
    memory_mib  data memory of one worker, MiB
    entry_verifiers  verifiers that References name, such as those of generated rows
    sandbox     for the user's verifiers and terms; megarl's own use CALCULATE

    The first `verify` starts the processes. Not thread-safe. Raises ConfigError if a verifier or term does
    not exist."""

    def __init__(
        self,
        verifier_name: str,
        workers: int = 1,
        timeout: float = 10.0,
        memory_mib: int = 2048,
        terms: Mapping[str, RewardTerm] = MappingProxyType({}),
        entry_verifiers: Sequence[str] = (),
        sandbox: str = STRICT,
    ) -> None:
        if workers < 1 or timeout <= 0 or memory_mib < 64:
            actual = f"{workers}, {timeout}, {memory_mib}"
            raise ValueError(f"workers >= 1, timeout > 0 and memory_mib >= 64 expected (got {actual})")
        self.timeout = timeout
        self._settings: dict[str, Any] = {
            "verifier": verifier_path(verifier_name),
            "terms": {name: (term.function, term.arguments) for name, term in terms.items()},
            "memory_mib": memory_mib,
            "entry_verifiers": list(entry_verifiers),
        }
        verifiers = [_load_functions(self._settings)[0], *map(get_verifier, entry_verifiers)]
        starts_programs = any(hasattr(one, "with_limits") for one in verifiers)
        paths = [self._settings["verifier"], *entry_verifiers, *(term.function for term in terms.values())]
        all_calculate = all(path.partition(":")[0].partition(".")[0] in _CALCULATING for path in paths)
        if starts_programs and all_calculate and sandbox == NETWORK:
            sandbox = STRICT  # megarl's own need no network
        self._settings |= {"timeout": timeout, "sandbox": sandbox}
        self._sandbox = CALCULATE if all_calculate and not starts_programs else sandbox
        self._workers: list[_Worker | None] = [None] * workers
        self._failed_starts = 0
        self._has_graded = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._loop is None:
            return
        for worker in filter(None, self._workers):
            worker.end()
        self._workers = [None] * len(self._workers)
        tasks = asyncio.all_tasks(self._loop)

        async def settle() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)

        self._loop.run_until_complete(settle())
        self._loop.close()
        self._loop = None

    @property
    def pids(self) -> list[int]:
        return [
            worker.pid
            for worker in self._workers
            if worker is not None and worker.pid is not None and worker.alive
        ]

    @property
    def waiting(self) -> int:
        """Answers at workers; readable from any thread."""
        return sum(len(worker.batch) for worker in list(self._workers) if worker is not None)

    def verify(self, items: Sequence[Item]) -> list[Verdict]:
        """Return one verdict per item, in order.

        An answer is wrong after a timeout with much CPU time, or a second timeout or death. So one kill or
        stop from outside changes no verdict. If no worker starts, raises WaitTimeout or ConfigError before
        anything was graded; later it leaves the rest ungraded."""
        if self._loop is None:
            # With SGLang, new_event_loop would use uvloop.
            self._loop = asyncio.SelectorEventLoop()
        try:
            return self._loop.run_until_complete(self._verify(items))
        except BaseException:
            # Or the next call would get these answers.
            self.close()
            raise

    async def _verify(self, items: Sequence[Item]) -> list[Verdict]:
        verdicts: list[Verdict | None] = [None] * len(items)
        pending_items = deque(range(len(items)))
        retried_items: set[int] = set()
        workers = len(self._workers)
        max_batch = max(1, min(_MAX_BATCH, len(items) // (4 * workers)))

        start_errors: list[Exception] = []

        async def grade_batches(slot: int) -> None:
            while pending_items:
                worker = self._workers[slot]
                if worker is None or not worker.alive:
                    try:
                        worker = await self._start(slot)
                    except (WaitTimeout, ConfigError) as problem:
                        if not self._has_graded:
                            raise
                        start_errors.append(problem)
                        return
                worker.send_batch(
                    [pending_items.popleft() for _ in range(min(max_batch, len(pending_items)))], items
                )
                while worker.batch:
                    start = time.monotonic()
                    try:
                        verdict = _read_verdict(await worker.receive(self.timeout))
                    except (TimeoutError, EOFError, ValueError, TypeError) as problem:
                        is_timeout = isinstance(problem, TimeoutError)
                        is_answers_fault = (
                            is_timeout and worker.calculated_since(start) >= _BUSY * self.timeout
                        )
                        item, exit_reason = worker.batch[0], worker.end()
                        if is_answers_fault or item in retried_items:
                            error = (
                                f"timeout after {self.timeout:g} s"
                                if is_timeout
                                else f"verifier died ({exit_reason})"
                            )
                            verdicts[worker.batch.popleft()] = Verdict(False, error=error)
                        retried_items.add(item)
                        pending_items.extendleft(reversed(worker.batch))
                        worker.batch.clear()
                    else:
                        self._has_graded = True
                        verdicts[worker.batch.popleft()] = verdict

        slots = range(min(workers, len(items)))
        while pending_items and len(start_errors) < len(slots):
            await asyncio.gather(*(grade_batches(slot) for slot in slots))
        for item in pending_items:
            verdicts[item] = Verdict(False, error=str(start_errors[-1]), graded=False)
        return cast(list[Verdict], verdicts)

    async def _start(self, slot: int) -> _Worker:
        while True:
            if (old_worker := self._workers[slot]) is not None:
                old_worker.end()
            self._workers[slot] = worker = None
            try:
                worker = self._workers[slot] = _Worker(self._sandbox)
                problem = await worker.connect(self._settings)
            except (OSError, EOFError) as error:  # OSError includes TimeoutError
                reason = f"{type(error).__name__}: {error}"
                if worker is not None:
                    reason = f"{worker.end()}; {worker.last_line}"
                self._failed_starts += 1
                if isinstance(error, TimeoutError) and (
                    not self._has_graded or self._failed_starts >= FAILED_STARTS
                ):
                    timeout_text = f"a worker process was not ready within {START_LIMIT:g} s ({reason})"
                    raise WaitTimeout(f"reward.verifier: {timeout_text}") from None
                if self._failed_starts >= FAILED_STARTS:
                    death_text = f"{FAILED_STARTS} worker processes died at their start ({reason})"
                    raise ConfigError(f"reward.verifier: {death_text}") from None
                continue
            if problem is not None:
                raise ConfigError(problem)
            self._failed_starts = 0
            return worker


class _Worker(LimitedProcess):
    def __init__(self, sandbox: str) -> None:
        super().__init__(__name__, sandbox)
        self.batch: deque[int] = deque()

    def send_batch(self, batch: Iterable[int], items: Sequence[Item]) -> None:
        self.batch.extend(batch)
        self._given, self._cpu = time.monotonic(), self.cpu_seconds()
        self.send([items[i] for i in self.batch])

    def calculated_since(self, start: float) -> float:
        """Return a lower bound of the present item's CPU seconds, as if earlier ones computed all the time.

        start: time.monotonic() when it became the batch's first."""
        return self.cpu_seconds() - self._cpu - (start - self._given)


def _read_verdict(message: Any) -> Verdict:
    verdict = Verdict(*msgspec.convert(message, _Sent))
    if not all(map(math.isfinite, (verdict.score or 0.0, *verdict.terms.values()))):
        raise ValueError("a score or a term is not finite")
    return verdict


def grade(
    verifier: Verifier, terms: Mapping[str, Term], response: str, reference: str | Reference, *size: Any
) -> Verdict:
    """Grade a response; compute terms if `size` (length, longest, truncated) is given.

    Out of memory or stack, it is wrong; after other exceptions, ungraded."""
    where, answer = "", reference if isinstance(reference, str) else reference.answer
    try:
        if isinstance(reference, str):
            result: object = verifier(response, reference)
        else:
            result = get_verifier(reference.verifier)(response, reference.entry)
        verdict = as_verdict(result, "verifier")
        if not size or verdict.error is not None:
            return verdict
        length, longest, truncated = size
        graded_response, values = GradedResponse(response, answer, length, longest, truncated, verdict), {}
        for name, term in terms.items():
            where = f"reward.terms.{name}: "
            values[name] = finite(term(graded_response), "it returned", "not a number")
        return replace(verdict, terms=values)
    except (MemoryError, RecursionError) as error:
        what = "memory" if isinstance(error, MemoryError) else "stack"
        return Verdict(False, error=f"{where}{'it' if where else 'verifier'} ran out of {what}")
    except UnusableError as problem:
        return Verdict(False, error=f"{where}{problem}", graded=False)
    except Exception as error:  # noqa: BLE001 (a verifier's bug must not end the run: it is recorded)
        return Verdict(False, error=f"{where}{type(error).__name__}: {error}".split("\n")[0], graded=False)


def _load_functions(settings: Mapping[str, Any]) -> tuple[Verifier, dict[str, Term]]:
    terms = {name: get_term(name, *term) for name, term in settings["terms"].items()}
    return get_verifier(settings["verifier"]), terms


def work(process: Supervised) -> None:
    serve(process, _prepare_grading)


def _prepare_grading(settings: dict[str, Any]) -> Callable[[Any], Iterator[Any]]:
    verifier, terms = _load_functions(settings)
    for name in settings["entry_verifiers"]:
        get_verifier(name)
    if (with_limits := getattr(verifier, "with_limits", None)) is not None:
        limits = (settings[name] for name in ("timeout", "memory_mib"))
        verifier = with_limits(*limits, allow_unconfined=settings["sandbox"] == OFF)

    def grade_batch(batch: Any) -> Iterator[Any]:
        for response, reference, *size in batch:
            if isinstance(reference, list):
                reference = Reference(*reference)
            verdict = grade(verifier, terms, response, reference, *size)
            texts = short(verdict.extracted), short(verdict.error)
            yield [verdict.correct, *texts, verdict.score, verdict.terms, verdict.graded]

    return grade_batch
