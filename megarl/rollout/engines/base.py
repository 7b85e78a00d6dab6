"""What every rollout engine is, and the client by which a worker's coroutines use one.

A new engine needs: a subclass of RolloutEngine in a separate file, and its row in config/engines.py, from
which checks, planner and weight transfers read its capabilities. docs/extending.md has an example.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import torch

from megarl.config.errors import EngineError
from megarl.config.schema import Config
from megarl.parallel.runtime import Runtime
from megarl.rollout.sampling import Completion, Request, SamplingParams

SLICE = 0.1  # seconds for which an engine in this process decodes before others have their turn
TURN = 0.001  # seconds of theirs: messages come through several wake-ups
WAIT = 0.2  # seconds for which an engine in processes of its own is listened to at once


class RolloutEngine(ABC):
    """An engine over one or several ranks of the training job, each of which has such an object. All of them
    call the methods of start, stop, updates, sleep and wake. The first of them, the leader, alone is given
    requests, and alone can meet an EngineFailure.

    weight_version  version of the weights that it generates with
    streams         whether requests end one by one: more can be submitted while some run, others be aborted;
                    such an engine has processes of its own, and `poll` waits for them
    """

    weight_version: int
    streams: bool

    @classmethod
    @abstractmethod
    def build(cls, config: Config, tokenizer: Any, runtime: Runtime) -> RolloutEngine:
        """Make the engine of a rank. It is not started."""

    @classmethod
    def check_machine(cls, config: Config, device: str) -> None:
        """Raise ConfigError where this machine cannot run the engine. device: cpu or cuda"""
        return None

    @classmethod
    def check_engines(
        cls, config: Config, hf_config: Mapping[str, Any], device: torch.device, engines: int
    ) -> None:
        """Raise ConfigError where this number of engines cannot run the model."""
        return None

    @classmethod
    def machine_note(cls, device: str) -> str | None:
        """Return a line about this machine that a user should see before a run."""
        return None

    @abstractmethod
    def start(self) -> None:
        """Begin the start with undefined weights; an update must follow before `submit`."""

    @abstractmethod
    def ready(self, seconds: float) -> bool:
        """Return whether the start has ended; wait for it, at most `seconds`."""

    @abstractmethod
    def restart(self) -> None:
        """Start anew after an EngineFailure; unfinished requests continue after the next update."""

    @abstractmethod
    def stop(self) -> None:
        """End the engine and free everything."""

    def begin_update(self) -> None:
        """Prepare for new weights, and refuse requests until `end_update`. Called before the first bucket;
        what no bucket brings stays."""
        return None

    @abstractmethod
    def end_update(self, version: int) -> None:
        """Drop what depends on the old weights and set `weight_version`. Called after the last bucket."""

    @abstractmethod
    def submit(self, requests: Mapping[int, Request], params: SamplingParams) -> None:
        """Begin generating, beside what runs; `poll` gives the keys back. Requests of other params have their
        turn too."""

    @abstractmethod
    def poll(self, seconds: float) -> list[tuple[int, Completion]]:
        """Return what has ended; wait at most `seconds` for the first. Without streaming all end now."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Return the number of requests that have not come back."""

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Return one completion per request, in the order of the requests, for tests and benchmarks."""
        self.submit(dict(enumerate(requests)), params)
        ended: dict[int, Completion] = {}
        while self.running:
            ended |= self.poll(1.0)
        return [ended[i] for i in range(len(requests))]

    @abstractmethod
    def abort(self) -> list[tuple[int, Completion]]:
        """End everything that runs and return it, with finish "abort" unless it has just ended."""

    def take_notes(self) -> list[str]:
        """Return what a user should hear of and no call has raised, since the last call, a line each."""
        return []

    @abstractmethod
    def sleep(self, tags: Sequence[str]) -> None:
        """Free the device memory of the tags ("weights", "kv_cache"). `wake` must follow before `submit`, and
        an update where the tags name weights."""

    @abstractmethod
    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the memory of the tags again; weights are undefined until an update."""


def check_positions(requests: Iterable[Request], params: SamplingParams, positions: float) -> None:
    """Raise EngineError where what a request has and what it may still get do not fit the model's
    positions."""
    for request in requests:
        there, left = len(request.text), request.limit(params) - request.begun
        if left < 1 or there + left > positions:
            raise EngineError(
                f"rollout: a prompt of {there} tokens and {left} response tokens do not fit the model's "
                f"{positions} positions (lower rollout.max_response_tokens or data.max_prompt_tokens)"
            )


class EngineClient:
    """What coroutines on the leader's event loop ask of its engine. While `run` runs, requests come back.

    threads  where an engine in processes of its own is waited for. Not the loop's, all of which an episode's
             own calls (`asyncio.to_thread`) may hold while they wait for the engine
    busy     seconds in which the engine had something to do"""

    def __init__(self, engine: RolloutEngine, threads: Executor) -> None:
        self.engine, self.threads = engine, threads
        self.busy = 0.0
        self._count = 0
        self._new: dict[SamplingParams, dict[int, Request]] = {}
        self._answers: dict[int, asyncio.Future[Completion]] = {}
        self._wanted = asyncio.Event()
        self._polling = asyncio.Lock()

    async def generate(
        self,
        tokens: tuple[int, ...],
        seed: int,
        params: SamplingParams,
        begun: Completion | None = None,
        max_tokens: int | None = None,
    ) -> Completion:
        """Return what the engine writes behind `tokens`, `begun` included, which it goes on with; with finish
        "abort" where that was ended by `abort`. max_tokens: see Request."""
        key, self._count = self._count, self._count + 1
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        self._new.setdefault(params, {})[key] = Request(tokens, seed, begun, max_tokens)
        self._wanted.set()
        return await answer

    async def run(self) -> None:
        """Give requests to the engine, those made at one time together, and answers to those who asked, for
        ever. Raises what the engine raises; after an EngineFailure it may be called again."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wanted.wait()
            await asyncio.sleep(0)  # all that is asked now
            started = time.perf_counter()
            async with self._polling:
                while self._new:
                    params = next(iter(self._new))
                    self.engine.submit(self._new.pop(params), params)
                if not self.engine.running:
                    self._wanted.clear()
                    continue
                if self.engine.streams:
                    ended = await loop.run_in_executor(self.threads, self.engine.poll, WAIT)
                else:
                    ended = self.engine.poll(SLICE)
            if any(completion.finish == "abort" for _, completion in ended):
                raise EngineError("rollout: generation was aborted, the batch is not complete")
            self.busy += time.perf_counter() - started
            self._settle(ended)
            await asyncio.sleep(0 if self.engine.streams else TURN)

    def _settle(self, ended: Sequence[tuple[int, Completion]]) -> None:
        for key, completion in ended:
            answer = self._answers.pop(key)
            if not answer.done():  # who asked may have been cancelled meanwhile
                answer.set_result(completion)

    @property
    def abandoned(self) -> bool:
        """Return whether the engine is still to write what nobody waits for any more."""
        return any(answer.cancelled() for answer in self._answers.values())

    async def abort(self) -> None:
        """End everything that was asked for: it comes back as far as it is. Raises EngineFailure where the
        engine fails; then it comes back with nothing."""
        loop = asyncio.get_running_loop()
        async with self._polling:
            self._new.clear()
            try:
                self._settle(await loop.run_in_executor(self.threads, self.engine.abort))
            finally:
                self._settle([(key, Completion()) for key in list(self._answers)])
