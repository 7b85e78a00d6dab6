"""The policy as the coroutine of an episode sees it: turns, and tools or an environment between them
(docs/episodes.md). What the policy wrote is verified and trained on, what it was shown is context.

The policy's tokens are kept as they were drawn, what it is shown is tokenised once and put behind them, and
both are only ever appended, by `Policy` alone. What an episode draws, and what its calls come to, is written
into a journal: an episode that was aborted, or comes back as its group was not needed yet, is run again from
its beginning and gets from there what it got before."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.agents.tools import Result, State, ToolPool, described, observation
from megarl.config.errors import EngineError
from megarl.config.schema import TurnsConfig
from megarl.data.prompts import Prompt
from megarl.data.response_text import policy_text
from megarl.data.sample import DTYPES, TokenData
from megarl.rewards.verdict import Verdict
from megarl.rollout.episode import EngineClient, EpisodeAborted, generate_turn
from megarl.rollout.sampling import SamplingParams, environment_seed, turn_seed


class EpisodeTruncated(BaseException):
    """The episode has no turn or no token left."""


class ToolError(Exception):
    """A tool has raised, has taken too long or too much memory. The text is fit to be shown to the policy; an
    episode that lets it through has a wrong response."""


class ToolUnavailable(Exception):
    """A tool could not be run, for no fault of the policy: the response is unjudged."""


@dataclass(frozen=True)
class Turn:
    """What the policy wrote in one turn. finish: "stop" (end-of-sequence or a stop text, which the tokens
    hold) or "length" (the turn's own limit or the episode's)"""

    tokens: tuple[int, ...]
    finish: str
    tokenizer: Any

    @property
    def text(self) -> str:
        """Return what was written, without the token that ends the turn."""
        return policy_text(self.tokenizer, self.tokens)


@dataclass
class Policy:
    """The policy as one episode sees it, and all that was written and shown in it.

    client     asks the engine
    seed       of the response; each turn has its own
    params     how tokens are drawn; max_tokens is the most that the policy may write in all turns together
    earlier    tokens of an earlier run of the episode
    tokenizer  needed for the texts of turns and for texts that are shown
    limits     of turns, calls and all tokens
    tools      processes that calls are made in
    shared_prompts  update.share_prompts: nothing may be shown before the first turn
    lenient    whether an episode may depart from its journal when run again; what follows is drawn afresh
    key        of the configuration, that such episodes are of: errors begin with it
    notify     called whenever `in_engine` may have changed
    turns, calls    how many there were; truncated: whether it had no turn or token left
    aborted    whether whatever the episode asks next ends it
    generating  whether a turn is being written
    """

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
    _refused: bool = False  # by EpisodeAborted: the episode has not come to its end
    _observed: list[int] = field(default_factory=list)  # behind the last turn
    _said: list[str] = field(default_factory=list)  # to the environment
    _state: State | None = None
    _waits: list[str] = field(default_factory=list)  # for what

    def __post_init__(self) -> None:
        none: dict[str, Any] = {name: np.empty(0, dtype) for name, dtype in DTYPES.items()}
        self.written = TokenData(finish_reason="stop", **none)
        self._to_replay = list(self.earlier.journal) if self.earlier is not None else []
        if self.earlier is not None and self.earlier.num_tokens and not self._to_replay:  # of one turn
            self._to_replay = [["turn", self.earlier.num_sampled, self.earlier.finish_reason]]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the prompt, and all that was written and shown since."""
        return (*self.prompt.tokens, *self.written.tokens.tolist(), *self._observed)

    @property
    def room(self) -> int:
        """Return how many tokens the policy may still write."""
        total = self.written.num_tokens + len(self._observed)
        left = self.params.max_tokens - self.written.num_sampled
        return min(left, (self.limits.max_tokens or self.params.max_tokens) - total)

    @property
    def waiting(self) -> str:
        """Return what the episode waits for besides the engine; "" if for nothing."""
        return self._waits[0] if self._waits else ""

    @property
    def in_engine(self) -> bool:
        """Return whether it is, or is about to be, in the engine."""
        return self.generating or not self._waits

    @contextmanager
    def wait_for(self, what: str) -> Iterator[None]:
        """Note that the episode waits for something that is not the engine."""
        self._waits.append(what)
        self.notify()
        try:
            yield
        finally:
            self._waits.remove(what)
            self.notify()

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Turn:
        """Return what the policy writes next. `stop`: texts that end the turn, besides `rollout.stop`.

        Raises EpisodeAborted where the rollout ends before, EpisodeTruncated where there is no turn or token
        left; whoever catches these gets them again."""
        self._refuse_if_aborted()
        self._refuse_while_generating("generate")
        if self.turns >= self.limits.max or self.room < 1:
            self.truncated = True
            raise EpisodeTruncated
        room = self.room
        most = room if max_tokens is None else max(1, min(room, max_tokens))
        found = self._replay_turn(most)
        if found is None or found.finish_reason == "abort":
            params = self.params
            if stop:
                params = replace(params, stop=(*params.stop, *stop))
            seed, tokenizer = turn_seed(self.seed, self.turns), self.tokenizer
            self.generating = True
            self.notify()
            try:
                found = await generate_turn(self.client, self.tokens, seed, params, found, most, tokenizer)
            finally:
                self.generating = False
                self.notify()
        if found.num_tokens:
            self.written.append_turn(self._observed, found)
            self.written.journal.append(["turn", found.num_tokens, found.finish_reason])
            self._observed = []
        if found.finish_reason == "abort":
            self.aborted = True
            self._refuse_if_aborted()
        self.turns += 1
        self.truncated = found.finish_reason == "length" and found.num_tokens >= room
        return Turn(tuple(found.tokens.tolist()), found.finish_reason, self.tokenizer)

    def _replay_turn(self, most: int) -> TokenData | None:
        """Return the tokens of the next turn, if an earlier run of the episode has generated any.

        most: tokens that the turn may have now"""
        recorded = self._next("turn")
        if recorded is None:
            return None
        assert self.earlier is not None
        # An observation after the last recorded turn was never among the earlier tokens.
        first = self.written.num_tokens + len(self._observed)
        if self.earlier.tokens[self.written.num_tokens : first].tolist() != self._observed:
            self._to_replay = []
            if not self.lenient:
                raise self._differs("shows the policy something else")
            return None
        # The experts of what comes after the turn are left out: the episode may do something else now.
        whole = self.earlier.first(first + recorded[1], len(self.prompt.tokens))
        versions = whole.policy_versions
        return TokenData(
            whole.tokens[first:],
            whole.logprobs[first:],
            "length" if recorded[2] == "abort" and recorded[1] >= most else recorded[2],
            None if versions is None else versions[first:],
            whole.routed_experts,
        )

    def observe(self, shown: str | Sequence[int]) -> None:
        """Show the policy something: a text, which is tokenised here and in which special tokens are plain
        text, or tokens. It stands before the next turn, and is dropped where there is none."""
        self._refuse_while_generating("observe")
        if not self.turns and self.shared_prompts:
            what = "shows something before the policy's first turn, which makes the prompts of a group differ"
            raise EngineError(f"{self.key}: it {what} (set update.share_prompts to false)")
        if isinstance(shown, str):
            shown = self.tokenizer(shown, add_special_tokens=False, split_special_tokens=True).input_ids
        self._observed += [int(token) for token in shown]

    def reward(self, value: float) -> None:
        """Reward the newest turn: the value is added to the reward of the response, and is credited to the
        turn's last token."""
        if not math.isfinite(value):
            raise EngineError(f"{self.key}: the reward of turn {self.turns - 1} is {value}, not finite")
        if not self.turns:
            raise EngineError(f"{self.key}: a reward before the policy's first turn")
        assert self.written.turn_rewards is not None
        self.written.turn_rewards[-1] += float(value)

    async def call(self, tool: str | Callable[..., Any], /, *arguments: Any, **keywords: Any) -> str:
        """Return what a tool gives, as a text. A plain function runs in a process of its own, within
        `rollout.turns`; an `async` one here, within its seconds.

        Raises ToolError where it raises, or takes too long or too much memory; ToolUnavailable where no
        process could run it; EpisodeAborted where the rollout has ended."""

        def run() -> Awaitable[Result[str]]:
            if inspect.iscoroutinefunction(tool):
                return self._run_here(tool, arguments, keywords)
            path = tool if isinstance(tool, str) else f"{tool.__module__}:{tool.__qualname__}"
            return self._pool.call(path, arguments, keywords, turn_seed(self.seed, -self.calls))

        return str(await self._journaled(getattr(tool, "__name__", str(tool)), run))

    async def reset(self) -> str:
        """Begin the environment; return what it shows. Raises as `call`."""
        self._said, self._state = [], None
        return (await self._step("reset"))[0]

    async def step(self, text: str) -> tuple[str, float, bool]:
        """Have the environment answer a turn: return what it shows, its reward, and whether it has ended.
        Raises as `call`."""
        self._said.append(text)
        return await self._step("step")

    async def _step(self, name: str) -> tuple[str, float, bool]:
        shown, reward, done, state = await self._journaled(name, lambda: self._pool.step(*self._place))
        self._state = state and State(*state)
        return shown, reward, done

    async def verdict(self) -> Verdict:
        """Return what the environment says of the episode, or why it cannot."""

        async def run() -> Result[dict[str, Any]]:
            found = await self._pool.verdict(*self._place)
            return Result({**vars(found), "terms": {}})

        return Verdict(**await self._journaled("verdict", run))

    @property
    def _pool(self) -> ToolPool:
        if self.tools is None:
            raise EngineError(f"{self.key}: there are no processes for tools here")
        return self.tools

    @property
    def _place(self) -> tuple[int, dict[str, Any], int, list[str], State | None]:
        row, seed = row_of(self.prompt), environment_seed(self.seed)
        return self.seed, row, seed, list(self._said), self._state

    async def _run_here(self, tool: Any, arguments: Any, keywords: Any) -> Result[str]:
        limit = asyncio.timeout(self.limits.seconds)
        try:
            async with limit:
                value = await tool(*arguments, **keywords)
            return Result(observation(value, self.limits.observation))
        except Exception as error:  # noqa: BLE001 (a tool's error is for the policy to read)
            text = f"timeout after {self.limits.seconds:g} s" if limit.expired() else described(error)
            return Result(None, observation(text, self.limits.observation))

    async def _journaled(self, name: str, run: Callable[[], Awaitable[Result[Any]]]) -> Any:
        """Return what a call came to, from the journal where it was made before."""
        self._refuse_if_aborted()
        self.calls += 1
        entry = self._next("call", name)
        if entry is None or len(entry) == 2:  # its end was not seen
            entry = ["call", name]
            self.written.journal.append(entry)
            with self.wait_for(name):
                result = await run()
            entry += [result.value, result.error, result.judged]
        else:
            self.written.journal.append(entry)
        _, _, value, error, judged = entry
        if not judged:
            raise ToolUnavailable(f"{name}: {error}")
        if error is not None:
            raise ToolError(error)
        return value

    def _next(self, *expected: Any) -> list[Any] | None:
        """Return the next entry that is to be replayed; None where none is left. Raises EngineError where the
        episode does something else than it did then."""
        if not self._to_replay:
            return None
        entry: list[Any] = self._to_replay.pop(0)
        if entry[: len(expected)] != list(expected):
            raise self._differs(f"wants {' '.join(map(str, expected))} where it was {entry[0]} {entry[1]}")
        return entry

    def _differs(self, what: str) -> EngineError:
        remedy = "an episode must do the same when it is run again with the same answers"
        return EngineError(f"{self.key}: run again on its journal, it {what} ({remedy})")

    def _refuse_if_aborted(self) -> None:
        if self.aborted:
            self._refused = True
            raise EpisodeAborted

    def _refuse_while_generating(self, what: str) -> None:
        if self.generating:
            raise EngineError(
                f"{self.key}: {what} was called while a turn was being written (a response is one "
                "conversation: await one generate before the next, and before observe)"
            )

    async def give_up(self) -> None:
        """Write one token behind the prompt, and nothing that was shown: a response has a token, also one
        that does not count. Raises EpisodeAborted."""
        self._observed = []
        await self.generate(max_tokens=1)

    def result(self, *, ended: bool = True) -> TokenData:
        """Return all tokens after the prompt.

        The finish_reason is "abort" unless the episode has `ended`. It is "abort" too if the episode has
        caught EpisodeAborted and ended for that. A response of one turn without a call has no journal.
        An aborted replay that has not reached the end of the journal returns the earlier tokens."""
        if self._to_replay and self.earlier is not None and not ended:
            return self.earlier
        written = self.written
        written.finish_reason = "length" if self.truncated else "stop"
        if not ended or self._refused:
            written.finish_reason = "abort"
        if written.turn_rewards is not None and not written.turn_rewards.any():
            written.turn_rewards = None
        if written.is_sampled is not None and written.is_sampled.all():
            written.is_sampled = None
        if [entry[::2] for entry in written.journal] == [["turn", written.finish_reason]]:
            written.journal = []
        return written


# A user's coroutine. It returns the verdict, or None if the verifier is to grade the response.
EpisodeFunction = Callable[[Prompt, Policy], Awaitable[Verdict | bool | float | None]]


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as environments and agents see it. Of its other columns those of these names (verl's
    GSM8K has a question and an answer) are not seen."""
    return {
        **prompt.extra,
        "uid": prompt.uid,
        "prompt": prompt.text,
        "question": prompt.question,
        "answer": prompt.answer,
        "data_source": prompt.source,
        "entry": prompt.entry,
    }
