"""The coroutine of a worker that keeps the engine busy, and the client by which episodes use it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor

from megarl.config.errors import EngineError, EngineFailure
from megarl.data.sample import TokenData
from megarl.rollout.engines.base import GenerationRequest, RolloutEngine
from megarl.rollout.sampling import SamplingParams

DECODE_SECONDS = 0.1  # an engine in this process decodes so long before other coroutines run
YIELD_SECONDS = 0.001  # for these coroutines: messages take several wake-ups
POLL_SECONDS = 0.2  # an engine in other processes is polled so long at once


class EngineClient:
    """What coroutines on the leader's event loop ask of its engine. `run` passes it on.

    threads    wait for an engine in other processes. Not the loop's default threads: an episode's own calls
               (`asyncio.to_thread`) may hold all of these while they wait for the engine
    busy       seconds in which the engine had work
    recovered  set when the engine has started again after a failure
    """

    def __init__(self, engine: RolloutEngine, threads: Executor) -> None:
        self.engine, self.threads = engine, threads
        self.busy = 0.0
        self.recovered = asyncio.Event()
        self._count = 0
        self._new: dict[SamplingParams, dict[int, GenerationRequest]] = {}
        self._answers: dict[int, asyncio.Future[TokenData]] = {}
        self._has_requests = asyncio.Event()
        self._polling = asyncio.Lock()

    async def generate(
        self,
        tokens: tuple[int, ...],
        seed: int,
        params: SamplingParams,
        prefix: TokenData | None = None,
        max_tokens: int | None = None,
    ) -> TokenData:
        """Return what the engine generates after `tokens`, with `prefix`, which it continues.

        Its finish_reason is "abort" if `abort` has ended it. max_tokens: see GenerationRequest."""
        key, self._count = self._count, self._count + 1
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        self._new.setdefault(params, {})[key] = GenerationRequest(tokens, seed, prefix, max_tokens)
        self._has_requests.set()
        return await answer

    async def keep_busy(self, report: Callable[[EngineFailure], Awaitable[None]]) -> None:
        """Run for ever. After a failure, `report` it and wait until the engine has started again."""
        while True:
            try:
                await self.run()
            except EngineFailure as failure:
                self.recovered.clear()
                await report(failure)
                await self.recovered.wait()

    async def run(self) -> None:
        """Give requests to the engine, and its answers to those who asked, for ever.

        Requests made at one time are submitted together. Raises what the engine raises. After an
        EngineFailure it may be called again."""
        loop = asyncio.get_running_loop()
        while True:
            await self._has_requests.wait()
            await asyncio.sleep(0)  # collects all requests that are made now
            started = time.perf_counter()
            async with self._polling:
                while self._new:
                    params = next(iter(self._new))
                    self.engine.submit(self._new.pop(params), params)
                if not self.engine.running:
                    self._has_requests.clear()
                    continue
                if self.engine.supports_continuous_batching:
                    ended = await loop.run_in_executor(self.threads, self.engine.poll, POLL_SECONDS)
                else:
                    ended = self.engine.poll(DECODE_SECONDS)
            if any(data.finish_reason == "abort" for _, data in ended):
                raise EngineError("rollout: generation was aborted, the batch is not complete")
            self.busy += time.perf_counter() - started
            self._set_answers(ended)
            await asyncio.sleep(0 if self.engine.supports_continuous_batching else YIELD_SECONDS)

    def _set_answers(self, ended: Sequence[tuple[int, TokenData]]) -> None:
        for key, data in ended:
            answer = self._answers.pop(key)
            if not answer.done():  # the caller may have been cancelled meanwhile
                answer.set_result(data)

    @property
    def has_abandoned(self) -> bool:
        """Return whether the engine still generates for a caller that was cancelled."""
        return any(answer.cancelled() for answer in self._answers.values())

    async def abort(self) -> None:
        """End all requests. Callers get what exists of their responses.

        Raises EngineFailure if the engine fails. Then callers get nothing."""
        loop = asyncio.get_running_loop()
        async with self._polling:
            self._new.clear()
            try:
                self._set_answers(await loop.run_in_executor(self.threads, self.engine.abort))
            finally:
                self._set_answers([(key, TokenData()) for key in list(self._answers)])
