"""The policy as an episode's coroutine sees it (docs/episodes.md).

A resumed episode runs from its start, and replays its journal of turns and call results."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.agents.tools import Result, State, ToolPool, describe_error, format_observation
from megarl.config.errors import EngineError
from megarl.config.schema import TurnsConfig
from megarl.data.prompts import Prompt
from megarl.data.response_text import policy_text
from megarl.data.sample import DTYPES, TokenData
from megarl.rewards.verdict import Verdict
from megarl.rollout.episode import EngineClient, EpisodeAborted, generate_turn
from megarl.rollout.sampling import SamplingParams, environment_seed, turn_seed

TICK = 1.0  # seconds between looks at the event loop's delay


class EpisodeTruncated(BaseException):
    """The episode has no turn or token left."""


class ToolError(Exception):
    """A tool raised or exceeded a limit. Uncaught, it makes the response wrong."""


class ToolUnavailable(Exception):
    """A tool failed, but not because of the policy: the response is ungraded."""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy.

    finish: "length" or "stop"; tokens include the end-of-sequence token or stop text."""

    tokens: tuple[int, ...]
    finish: str
    tokenizer: Any

    @property
    def text(self) -> str:
        """Text without end-of-turn token."""
        return policy_text(self.tokenizer, self.tokens)


@dataclass
class Policy:
    """The policy in one episode.

    seed            of the response; turns derive theirs
    params          max_tokens limits the sampled tokens of all turns together
    earlier         tokens of an earlier run
    shared_prompts  update.share_prompts: nothing may be shown before the first turn
    lenient         if a replay shows other tokens, sample anew from there
    notify          called when `in_engine` may have changed
    aborted         the next request ends the episode"""

    prompt: Prompt
    client: EngineClient
    seed: int
    params: SamplingParams
    earlier: TokenData | None = None
    tokenizer: Any = None
    limits: TurnsConfig = field(default_factory=TurnsConfig)
    tools: ToolPool | None = None
    shared_prompts: bool = False
    lenient: bool = False
    key: str = "rollout.episode"
    notify: Callable[[], None] = lambda: None
    turns: int = 0
    calls: int = 0
    truncated: bool = False
    aborted: bool = False
    generating: bool = False
    _raised_aborted: bool = False  # incomplete, even if the episode catches it
    _observed: list[int] = field(default_factory=list)  # after the last turn
    _texts: list[str] = field(default_factory=list)  # given to the environment
    _state: State | None = None
    _waits: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        empty_arrays: dict[str, Any] = {name: np.empty(0, dtype) for name, dtype in DTYPES.items()}
        self.written = TokenData(finish_reason="stop", **empty_arrays)
        self._to_replay = list(self.earlier.journal) if self.earlier is not None else []
        if self.earlier is not None and self.earlier.num_tokens and not self._to_replay:
            self._to_replay = [["turn", self.earlier.num_sampled, self.earlier.finish_reason]]

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt.tokens, *self.written.tokens.tolist(), *self._observed)

    @property
    def room(self) -> int:
        """Tokens that may still be sampled."""
        total_tokens = self.written.num_tokens + len(self._observed)
        sampled_left = self.params.max_tokens - self.written.num_sampled
        return min(sampled_left, (self.limits.max_tokens or self.params.max_tokens) - total_tokens)

    @property
    def waiting(self) -> str:
        """Name of the awaited tool, environment or agent, or ""."""
        return self._waits[0] if self._waits else ""

    @property
    def in_engine(self) -> bool:
        """True if it is, or soon will be, in the engine."""
        return self.generating or not self._waits

    @contextmanager
    def wait_for(self, what: str) -> Iterator[None]:
        self._waits.append(what)
        self.notify()
        try:
            yield
        finally:
            self._waits.remove(what)
            self.notify()

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Turn:
        """Sample the next turn. stop: texts that end it, in addition to `rollout.stop`.

        Raises EpisodeAborted if the rollout ends first, EpisodeTruncated if no turn or token is left."""
        self._refuse_if_aborted()
        self._refuse_while_generating("generate")
        if self.turns >= self.limits.max or self.room < 1:
            self.truncated = True
            raise EpisodeTruncated
        room = self.room
        limit = room if max_tokens is None else max(1, min(room, max_tokens))
        data = self._replay_turn(limit)
        if data is None or data.finish_reason == "abort":
            params = self.params
            if stop:
                params = replace(params, stop=(*params.stop, *stop))
            seed, tokenizer = turn_seed(self.seed, self.turns), self.tokenizer
            self.generating = True
            self.notify()
            try:
                data = await generate_turn(self.client, self.tokens, seed, params, data, limit, tokenizer)
            finally:
                self.generating = False
                self.notify()
        if data.num_tokens:
            self.written.append_turn(self._observed, data)
            self.written.journal.append(["turn", data.num_tokens, data.finish_reason])
            self._observed = []
        if data.finish_reason == "abort":
            self.aborted = True
            self._refuse_if_aborted()
        self.turns += 1
        self.truncated = data.finish_reason == "length" and data.num_tokens >= room
        return Turn(tuple(data.tokens.tolist()), data.finish_reason, self.tokenizer)

    def _replay_turn(self, max_tokens: int) -> TokenData | None:
        """Return the next turn's tokens if an earlier run sampled any. max_tokens: its present limit."""
        entry = self._next_entry("turn")
        if entry is None:
            return None
        assert self.earlier is not None
        # Earlier tokens lack observations after the last turn.
        last = self.written.num_tokens
        start = last + len(self._observed)
        is_sampled = self.earlier.is_sampled
        is_same = self.earlier.tokens[last:start].tolist() == self._observed
        if is_sampled is not None:  # an observation of another length would shift the turn to other tokens
            is_observed, starts_turn = ~is_sampled[last:start], is_sampled[start : start + 1]
            is_same = bool(is_same and is_observed.all() and starts_turn.all())
        if not is_same:
            self._to_replay = []
            if not self.lenient:
                raise self._replay_error("shows the policy something else")
            return None
        # Without later tokens' experts, as the episode may differ from there.
        data = self.earlier.first(start + entry[1], len(self.prompt.tokens))
        versions = data.policy_versions
        return TokenData(
            data.tokens[start:],
            data.logprobs[start:],
            "length" if entry[2] == "abort" and entry[1] >= max_tokens else entry[2],
            None if versions is None else versions[start:],
            data.routed_experts,
            sampling_sets=None if data.sampling_sets is None else data.sampling_sets[start:],
        )

    def observe(self, shown: str | Sequence[int]) -> None:
        """Show text, whose special tokens become plain text, or tokens before the next turn."""
        self._refuse_while_generating("observe")
        if not self.turns and self.shared_prompts:
            what = "shows something before the policy's first turn, which makes the prompts of a group differ"
            raise EngineError(f"{self.key}: it {what} (set update.share_prompts to false)")
        if isinstance(shown, str):
            shown = self.tokenizer(shown, add_special_tokens=False, split_special_tokens=True).input_ids
        self._observed += [int(token) for token in shown]

    def reward(self, value: float) -> None:
        """Add to the newest turn's reward, at its last token."""
        if not math.isfinite(value):
            raise EngineError(f"{self.key}: the reward of turn {self.turns - 1} is {value}, not finite")
        if not self.turns:
            raise EngineError(f"{self.key}: a reward before the policy's first turn")
        assert self.written.turn_rewards is not None
        self.written.turn_rewards[-1] += float(value)

    async def call(self, tool: str | Callable[..., Any], /, *arguments: Any, **keywords: Any) -> str:
        """Call a tool, in a process or (`async` functions) here.

        Raises ToolError, ToolUnavailable and EpisodeAborted."""

        def run() -> Awaitable[Result[str]]:
            if inspect.iscoroutinefunction(tool):
                return self._run_here(tool, arguments, keywords)
            path = tool if isinstance(tool, str) else f"{tool.__module__}:{tool.__qualname__}"
            return self._pool.call(path, arguments, keywords, turn_seed(self.seed, -self.calls))

        return str(await self._call_or_replay(getattr(tool, "__name__", str(tool)), run))

    async def reset(self) -> str:
        self._texts, self._state = [], None
        return (await self._step("reset"))[0]

    async def step(self, text: str) -> tuple[str, float, bool]:
        self._texts.append(text)
        return await self._step("step")

    async def _step(self, name: str) -> tuple[str, float, bool]:
        observation, reward, done, state = await self._call_or_replay(
            name, lambda: self._pool.step(*self._environment_arguments)
        )
        self._state = state and State(*state)
        return observation, reward, done

    async def verdict(self) -> Verdict:
        async def run() -> Result[dict[str, Any]]:
            verdict = await self._pool.verdict(*self._environment_arguments)
            return Result({**vars(verdict), "terms": {}})

        return Verdict(**await self._call_or_replay("verdict", run))

    @property
    def _pool(self) -> ToolPool:
        if self.tools is None:
            raise EngineError(f"{self.key}: there are no tool processes here")
        return self.tools

    @property
    def _environment_arguments(self) -> tuple[int, dict[str, Any], int, list[str], State | None]:
        row, seed = make_row(self.prompt), environment_seed(self.seed)
        return self.seed, row, seed, list(self._texts), self._state

    async def _run_here(self, tool: Any, arguments: Any, keywords: Any) -> Result[str]:
        limit = asyncio.timeout(self.limits.seconds)
        try:
            async with limit, extend_when_blocked(limit):
                value = await tool(*arguments, **keywords)
            return Result(format_observation(value, self.limits.observation))
        except Exception as error:  # noqa: BLE001 (the policy may read a tool's error)
            text = f"timeout after {self.limits.seconds:g} s" if limit.expired() else describe_error(error)
            return Result(None, format_observation(text, self.limits.observation))

    async def _call_or_replay(self, name: str, run: Callable[[], Awaitable[Result[Any]]]) -> Any:
        self._refuse_if_aborted()
        self.calls += 1
        entry = self._next_entry("call", name)
        if entry is None or len(entry) == 2:  # the earlier run ended during the call
            entry = ["call", name]
            self.written.journal.append(entry)
            with self.wait_for(name):
                result = await run()
            entry += [result.value, result.error, result.graded]
        else:
            self.written.journal.append(entry)
        _, _, value, error, graded = entry
        if not graded:
            raise ToolUnavailable(f"{name}: {error}")
        if error is not None:
            raise ToolError(error)
        return value

    def _next_entry(self, *expected: Any) -> list[Any] | None:
        """Return the next journal entry. Raises EngineError if it is another."""
        if not self._to_replay:
            return None
        entry: list[Any] = self._to_replay.pop(0)
        if entry[: len(expected)] != list(expected):
            wanted = " ".join(map(str, expected))
            raise self._replay_error(f"wants {wanted} where it was {entry[0]} {entry[1]}")
        return entry

    def _replay_error(self, what: str) -> EngineError:
        remedy = "an episode must do the same when it is run again with the same answers"
        return EngineError(f"{self.key}: run again on its journal, it {what} ({remedy})")

    def _refuse_if_aborted(self) -> None:
        if self.aborted:
            self._raised_aborted = True
            raise EpisodeAborted

    def _refuse_while_generating(self, what: str) -> None:
        if self.generating:
            raise EngineError(
                f"{self.key}: {what} was called while a turn was being written (a response is one "
                "conversation: await one generate before the next, and before observe)"
            )

    async def give_up(self) -> None:
        """Discard shown tokens and sample one, since every response needs one."""
        self._observed = []
        await self.generate(max_tokens=1)

    def result(self, *, ended: bool = True) -> TokenData:
        """Return all tokens after the prompt.

        finish_reason is "abort" if the episode has not `ended`, or caught EpisodeAborted. An unfinished
        replay returns the earlier tokens."""
        if self._to_replay and self.earlier is not None and not ended:
            return self.earlier
        data = self.written
        data.finish_reason = "length" if self.truncated else "stop"
        if not ended or self._raised_aborted:
            data.finish_reason = "abort"
        if data.turn_rewards is not None and not data.turn_rewards.any():
            data.turn_rewards = None
        if data.is_sampled is not None and data.is_sampled.all():
            data.is_sampled = None
        if [entry[::2] for entry in data.journal] == [["turn", data.finish_reason]]:
            data.journal = []
        return data


@asynccontextmanager
async def extend_when_blocked(limit: asyncio.Timeout) -> AsyncIterator[None]:
    """Extend a limit by the time in which the event loop is blocked, as by a weight transfer."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def tick(due: float) -> None:
        nonlocal timer
        late, when = loop.time() - due, limit.when()
        if late > TICK and when is not None and not limit.expired():
            limit.reschedule(when + late)
        timer = loop.call_later(TICK, tick, loop.time() + TICK)

    timer = loop.call_later(TICK, tick, loop.time() + TICK)
    try:
        yield
    finally:
        timer.cancel()


# None: the verifier grades the response.
EpisodeFunction = Callable[[Prompt, Policy], Awaitable[Verdict | bool | float | None]]


def make_row(prompt: Prompt) -> dict[str, Any]:
    """Return the row for environments and agents.

    The prompt's fields override extra ones, such as verl's question and answer."""
    return {
        **prompt.extra,
        "uid": prompt.uid,
        "prompt": prompt.text,
        "question": prompt.question,
        "answer": prompt.answer,
        "data_source": prompt.source,
        "entry": prompt.entry,
    }
