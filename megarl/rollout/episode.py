"""Episodes, which generate a response each, and their engine's client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from msgspec import structs

from megarl.config.errors import EngineError, EngineFailure
from megarl.config.schema import Config
from megarl.data.prompts import Prompt
from megarl.data.response_text import check_end_of_turn
from megarl.data.sample import TokenData
from megarl.rewards.verdict import Verdict
from megarl.rollout.engines.base import GenerationRequest, RolloutEngine
from megarl.rollout.sampling import SamplingParams, stop_window

DECODE_SECONDS = 0.1  # longest poll of an engine in this process, which blocks other coroutines
YIELD_SECONDS = 0.001  # pause after such a poll: sleep(0) is too short to pass a message on
POLL_SECONDS = 0.2  # longest poll of an engine in other processes
IN_FLIGHT_SECONDS = 0.02  # the same with weights in flight, as trainers wait for a poll's end


class EpisodeAborted(BaseException):
    """The rollout is over; a later one may continue this response.

    Not an Exception, so that user code for tools' errors does not catch it."""


class EngineClient:
    """Passes requests of coroutines to the engine. Only the engine's first rank gets any.

    threads: run the polls, because user code may occupy the event loop's default threads."""

    def __init__(
        self,
        engine: RolloutEngine,
        threads: Executor,
        *,
        continuous_batching: bool,
        weights_change: bool = False,
    ) -> None:
        self.engine, self.threads, self.continuous_batching = engine, threads, continuous_batching
        self._poll_seconds = DECODE_SECONDS
        if continuous_batching:
            self._poll_seconds = IN_FLIGHT_SECONDS if weights_change else POLL_SECONDS
        self.busy = 0.0  # seconds in which the engine had work
        self.recovered = asyncio.Event()
        self._count = 0
        self._new: dict[SamplingParams, dict[int, GenerationRequest]] = {}
        self._answers: dict[int, asyncio.Future[TokenData]] = {}
        self._has_requests = asyncio.Event()
        self._polling = asyncio.Lock()

    async def generate(
        self, tokens: tuple[int, ...], seed: int, params: SamplingParams, prefix: TokenData | None, most: int
    ) -> TokenData:
        """Continue `prefix`. Return it with the new tokens. most: limit of both together"""
        key, self._count = self._count, self._count + 1
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        self._new.setdefault(params, {})[key] = GenerationRequest(tokens, seed, prefix, most)
        self._has_requests.set()
        return await answer

    async def keep_busy(self, report: Callable[[EngineFailure], Awaitable[None]]) -> None:
        """Submit requests and return the engine's answers, for ever."""
        while True:
            await self._has_requests.wait()
            await asyncio.sleep(0)  # to submit concurrent requests together
            try:
                await self._poll_once()
            except EngineFailure as failure:
                self.recovered.clear()
                await report(failure)
                await self.recovered.wait()
            else:
                await asyncio.sleep(0 if self.continuous_batching else YIELD_SECONDS)

    async def _poll_once(self) -> None:
        start_time = time.perf_counter()
        async with self._polling:
            while self._new:
                params = next(iter(self._new))
                self.engine.submit(self._new.pop(params), params)
            if not self.engine.running:
                self._has_requests.clear()
                return
            if self.continuous_batching:
                loop = asyncio.get_running_loop()
                responses = await loop.run_in_executor(self.threads, self.engine.poll, self._poll_seconds)
            else:
                responses = self.engine.poll(self._poll_seconds)
        if any(data.finish_reason == "abort" for _, data in responses):
            raise EngineError("rollout: generation was aborted, the batch is not complete")
        self.busy += time.perf_counter() - start_time
        self._set_answers(responses)

    async def call_between_polls(self, call: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Call a function that uses the engine, while nothing else does."""
        async with self._polling:
            await call(*arguments)

    def _set_answers(self, ended: Sequence[tuple[int, TokenData]]) -> None:
        for key, data in ended:
            answer = self._answers.pop(key)
            if not answer.done():
                answer.set_result(data)

    @property
    def has_abandoned(self) -> bool:
        """Return whether the caller of an unfinished request was cancelled."""
        return any(answer.cancelled() for answer in self._answers.values())

    async def abort(self) -> None:
        """Abort all requests. Callers get partial responses; empty ones if it raises EngineFailure."""
        loop = asyncio.get_running_loop()
        async with self._polling:
            self._new.clear()
            try:
                self._set_answers(await loop.run_in_executor(self.threads, self.engine.abort))
            finally:
                self._set_answers([(key, TokenData()) for key in list(self._answers)])


@dataclass
class EpisodeInputs:
    prompt: Prompt
    client: EngineClient
    seed: int
    params: SamplingParams
    prefix: TokenData | None
    window: int  # most new tokens of the episode (`rollout.window`); 0: no limit
    notify: Callable[[], None]  # called when `in_engine` may have changed


class Episode(Protocol):
    prompt: Prompt
    seed: int
    turns: int
    calls: int  # of tools and environments
    aborted: bool  # the next request raises EpisodeAborted
    windowed: bool
    generating: bool

    @property
    def prefix_tokens(self) -> int:
        """Return the number of tokens from earlier steps, with `rollout.window`; else 0."""

    @property
    def waiting(self) -> str:
        """Name the tool or the like that it waits for; "" if none."""

    @property
    def in_engine(self) -> bool:
        """Return whether it occupies the engine, or is about to."""

    async def run(self) -> Verdict | None:
        """Generate the response. Return its verdict; None: the verifier grades it.

        Raises EpisodeAborted if the rollout ends first."""

    def result(self, *, ended: bool = True) -> TokenData:
        """Return all tokens. finish_reason is "abort" if not `ended`, unless an earlier step finished it."""


class EpisodeRunner(Protocol):
    key: str  # configuration key, for error messages

    @property
    def depths(self) -> Mapping[str, Callable[[], int | str]]:
        """Return functions whose values the watchdog reports, by name: the length of a queue, for example."""
        return {}

    def start(self, inputs: EpisodeInputs) -> Episode:
        """Make an episode, not yet running."""

    def supervise(self, rank: int) -> AbstractContextManager[object]:
        """Watch the event loop during user code."""
        return nullcontext()

    def forget(self, seed: int) -> None:
        """Discard the environment of the episode with this seed, if there is one."""
        return None

    async def disconnect(self) -> None:
        """Close the endpoint that agents connect to, if there is one."""
        return None

    def close(self) -> None:
        return None


def load_runner(config: Config, tokenizer: Any) -> EpisodeRunner:
    """Return the configured runner. Raises ConfigError."""
    if config.rollout.is_multi_turn:
        from megarl.agents.runner import AgentRunner

        return AgentRunner(config, tokenizer)
    if config.data.template == "chat":
        check_end_of_turn(tokenizer, config.rollout.stop, config.data.chat_template_kwargs)
    return SingleTurnRunner(tokenizer)


def load_prompt_options(config: Config, tokenizer: Any) -> dict[str, Any]:
    """Return the arguments `tools` and `opening` for read_prompts. Raises ConfigError."""
    if not config.rollout.is_multi_turn:
        return {"tools": [], "opening": ()}
    from megarl.agents.runner import prompt_options

    return prompt_options(config, tokenizer)


class SingleTurnRunner(EpisodeRunner):
    key = "rollout.episode"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def start(self, inputs: EpisodeInputs) -> SingleTurn:
        return SingleTurn(**vars(inputs), tokenizer=self.tokenizer)


@dataclass
class SingleTurn(EpisodeInputs):
    tokenizer: Any
    turns: int = 0
    calls: int = 0
    aborted: bool = False
    windowed: bool = False
    generating: bool = False
    waiting = ""
    in_engine = True
    _data: TokenData | None = None

    @property
    def prefix_tokens(self) -> int:
        return self.prefix.num_tokens if self.prefix is not None and self.window else 0

    async def run(self) -> None:
        if self.aborted:
            raise EpisodeAborted
        max_tokens, prefix = self.params.max_tokens, self.prefix
        if prefix is not None and (prefix.finish_reason != "abort" or prefix.num_tokens >= max_tokens):
            finish_reason = "length" if prefix.finish_reason == "abort" else prefix.finish_reason
            data = structs.replace(prefix, finish_reason=finish_reason)
        else:
            limit = min(max_tokens, self.window + self.prefix_tokens) if self.window else max_tokens
            data = await self._generate(limit)
        # A copy, because finish_reason may change below.
        self._data = data.first(data.num_tokens, len(self.prompt.tokens))
        if data.finish_reason == "abort":
            self.aborted = True
            raise EpisodeAborted
        self.turns = 1
        if data.finish_reason == "length" and data.num_tokens < max_tokens:  # cut by the engine's own limit
            self._data.finish_reason = "stop"

    async def _generate(self, limit: int) -> TokenData:
        self.generating = True
        try:
            data = await generate_turn(
                self.client, self.prompt.tokens, self.seed, self.params, self.prefix, limit, self.tokenizer
            )
        finally:
            self.generating = False
        if self.window and data.finish_reason == "length" and data.num_tokens < self.params.max_tokens:
            self.windowed = True
            return structs.replace(data, finish_reason="abort")
        return data

    def result(self, *, ended: bool = True) -> TokenData:
        if self._data is not None:
            return self._data
        return self.prefix or TokenData()


async def generate_turn(
    client: EngineClient,
    tokens: tuple[int, ...],
    seed: int,
    params: SamplingParams,
    prefix: TokenData | None,
    max_tokens: int,
    tokenizer: Any,
) -> TokenData:
    """Generate one turn after `tokens`, with each token's policy version.

    Args:
        prefix: the turn's first tokens, from an aborted request
        max_tokens: including `prefix`"""
    data = await client.generate(tokens, seed, params, prefix, max_tokens)
    for start in _list_prefix_ends(data, prefix) if params.stop else ():
        data = _cut_at_stop(data, start, params.stop, tokenizer, len(tokens))
    if not data.num_tokens and prefix is not None:
        data = prefix
    if data.policy_versions is None:
        # The transformers engine reports no versions. Its current weights sampled the new tokens.
        versions = np.full(data.num_tokens, client.engine.weight_version)
        if prefix is not None and prefix.policy_versions is not None:
            versions[: prefix.num_tokens] = prefix.policy_versions
        data = structs.replace(data, policy_versions=versions)
    return data


def _list_prefix_ends(data: TokenData, prefix: TokenData | None) -> list[int]:
    """Return where a request may have been sent again: after `prefix`, and where the version changes."""
    ends = [] if prefix is None else [prefix.num_tokens]
    if data.policy_versions is not None:
        ends += (np.flatnonzero(np.diff(data.policy_versions)) + 1).tolist()
    return sorted(set(ends))


def _cut_at_stop(
    found: TokenData, prefix: int, stop: Sequence[str], tokenizer: Any, context: int
) -> TokenData:
    """Cut a turn at a stop text that begins in its first `prefix` tokens and ends after them.

    These tokens are in SGLang's prompt, which is not searched. context: tokens before the turn"""
    window = stop_window(stop)
    for end in range(prefix + 1, min(prefix + window, found.num_tokens) + 1):
        newest_tokens = found.tokens[max(0, end - window) : end].tolist()
        text = tokenizer.decode(newest_tokens, skip_special_tokens=False)
        if any(stop_text in text for stop_text in stop):
            return structs.replace(found.first(end, context), finish_reason="stop")
    return found
