"""Score responses by a language model behind an OpenAI-compatible endpoint (`reward.judge`).

Calls wait in the caller's event loop, so dozens need no processes. Needs aiohttp, the extra `agents`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import platform
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from megarl.config.errors import ConfigError
from megarl.config.files import OptionalFiles, append_atomic, open_regular
from megarl.config.schema.judge import JudgeConfig
from megarl.rewards.judge_text import Unscored, parse_score, render, response_format, select_text
from megarl.rewards.verdict import Verdict

if TYPE_CHECKING:
    import aiohttp

KEY = "reward.judge"
LONGEST_WAIT = 60.0  # seconds before another call; a server that asks for more is not called again
_CONNECTION = 10.0  # seconds
_LONGEST_REPLY = 4 << 20  # bytes
_TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504, 529}
# Keys that do not change a score, so that scores in run_dir/judge stay valid.
_NOT_IN_SCORES = {
    "url",
    "key_variable",
    "weight",
    "threshold",
    "votes",
    "combine",
    "concurrency",
    "timeout",
} | {*("retries", "max_calls", "max_tokens", "cache")}


@dataclass(frozen=True)
class Opinion:
    """A judge's result for one response.

    score  from 0 to 1; None: ungraded
    error  why it is ungraded
    costs  calls, prompt_tokens, completion_tokens, retries, cached (votes without a call), seconds, and
           ungraded_<reason>: 1"""

    score: float | None
    error: str | None
    costs: dict[str, float]

    def verdict(self, threshold: float) -> Verdict:
        if self.score is None:
            return Verdict(False, error=self.error, graded=False)
        return Verdict(self.score >= threshold, score=self.score)


# A negative count would refill the step's budget.
_TokenCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Usage(msgspec.Struct):
    prompt_tokens: _TokenCount = 0
    completion_tokens: _TokenCount = 0


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


@dataclass
class _Vote:
    """The result of one question with one seed: a score, or why there is none."""

    score: float | None = None
    reason: str = ""
    error: str = ""
    costs: Counter[str] = field(default_factory=Counter)


class _Retry(Unscored):
    """A failure that another call may not have. wait: seconds that the server asks for, or None"""

    def __init__(self, reason: str, text: str, wait: float | None = None) -> None:
        super().__init__(reason, text)
        self.wait = wait


@dataclass
class _Budget:
    """What remains of a step's calls and tokens of this engine."""

    calls: float = math.inf
    tokens: float = math.inf


class ScoreCache:
    """The newest `size` scores by key. With `open` also in files, which a continued run reads.

    A file holds at most `size` scores; the one before it is kept."""

    def __init__(self, size: int) -> None:
        self.size, self._scores = size, OrderedDict[str, float]()
        self._path: Path | None = None
        self._optional, self._written = OptionalFiles(), 0

    def open(self, folder: Path, rank: int) -> None:
        """Read all scores of `folder`; write new ones to this rank's file."""
        if not self.size:
            return
        self._path = folder / f"rank-{rank:05d}.jsonl"
        with self._optional.file(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in sorted(folder.glob("rank-*.jsonl*"), key=lambda path: path.stat().st_mtime):
                self._read(path)

    def _read(self, path: Path) -> None:
        with open_regular(path) as file:
            for line in file:
                try:
                    key, score = msgspec.json.decode(line, type=tuple[str, float])
                except (msgspec.DecodeError, UnicodeDecodeError):  # a killed run may leave half a line
                    continue
                self._keep(key, score)
                self._written += path == self._path

    def _keep(self, key: str, score: float) -> None:
        self._scores[key] = score
        self._scores.move_to_end(key)
        while len(self._scores) > self.size:
            self._scores.popitem(last=False)

    def get(self, key: str) -> float | None:
        return self._scores.get(key)

    def add(self, key: str, score: float) -> None:
        self._keep(key, score)
        if (path := self._path) is None:
            return
        with self._optional.file(path):
            if self._written >= self.size:
                os.replace(path, path.with_name(f"{path.name}.old"))
                self._written = 0
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            with FileIO(os.open(path, flags, 0o600), "ab") as file:
                # The newline ends what a killed run may have left.
                append_atomic(file, b"\n" + json.dumps([key, score]).encode())
            self._written += 1


class Judge:
    """Asks the endpoint of `config`; one for each engine, used in one event loop at a time.

    seed     of the run, from which the calls' seeds derive
    engines  number of judges that share the budget
    engine   index of this judge among them

    Raises ConfigError if the key's environment variable is not set on this node."""

    def __init__(self, config: JudgeConfig, seed: int, engines: int = 1, engine: int = 0) -> None:
        if config.key_variable and not config.read_key():
            what = f"the environment variable {config.key_variable} is not set on {platform.node()}"
            raise ConfigError(
                f"{KEY}.key_variable: {what} (export it on every node, or set this key to null)"
            )
        self.config, self.seed, self.engines, self.engine = config, seed, engines, engine
        self.cache = ScoreCache(config.cache)
        settings = config.model_dump(mode="json", exclude=_NOT_IN_SCORES)
        self._fingerprint = json.dumps([settings, seed], sort_keys=True)
        self._running: dict[str, asyncio.Task[_Vote]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(config.concurrency)
        self._budget = _Budget()
        self.start_step()

    def start_step(self) -> None:
        self._budget = _Budget(
            self._get_share(self.config.max_calls), self._get_share(self.config.max_tokens)
        )

    def _get_share(self, total: int | None) -> float:
        """Return this engine's part of a budget. The first engines share the remainder."""
        if total is None:
            return math.inf
        return total // self.engines + (self.engine < total % self.engines)

    async def close(self) -> None:
        """End running calls and close connections. The judge can be used again."""
        tasks, self._running = [*self._running.values()], {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CONNECTION)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def score(
        self, question: str, reference: str, response: str, *, has_budget: bool = True
    ) -> Opinion:
        """Return the judge's opinion. A failure of any vote leaves the response ungraded.

        A response without text, or whose <think> is not closed, gets the lowest score without a call.

        has_budget: whether the step's budget limits the calls"""
        if not select_text(response, reasoning=self.config.reasoning).strip():
            return Opinion(0.0, None, {})
        start = time.monotonic()
        message, code = render(self.config, question, reference, response)
        results = await asyncio.gather(
            *(self._vote(message, code, number, has_budget) for number in range(self.config.votes))
        )
        costs: Counter[str] = Counter()
        for result in results:
            costs.update(result.costs)
        total = {name: float(value) for name, value in costs.items()} | {"seconds": time.monotonic() - start}
        if failed := next((result for result in results if result.score is None), None):
            return Opinion(None, f"{KEY}: {failed.error}", total | {f"ungraded_{failed.reason}": 1.0})
        shares = [self.config.normalise(result.score) for result in results if result.score is not None]
        return Opinion(combine(self.config, shares), None, total)

    async def _vote(self, message: str, code: str, number: int, has_budget: bool) -> _Vote:
        """Return a vote: from the cache, from an equal call that runs, or from a new one."""
        content = f"{self._fingerprint}\n{number}\n{message}"
        key = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
        if (score := self.cache.get(key)) is not None:
            return _Vote(score, costs=Counter(cached=1))
        # `shield`: the call of an aborted response continues, and its next grading finds the score.
        while (running := self._running.get(key)) is not None:
            result = await asyncio.shield(running)
            if has_budget or result.reason != "budget":
                return _Vote(result.score, result.reason, result.error, Counter(cached=1))
        task = asyncio.create_task(self._ask(message, code, key, has_budget))
        self._running[key] = task
        task.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(task)

    async def _ask(self, message: str, code: str, key: str, has_budget: bool) -> _Vote:
        """Call until there is a reply; return its score or why there is none."""
        vote = _Vote()
        body = self._make_body(message, int(key[:8], 16) & 0x7FFFFFFF)
        for attempt in range(self.config.retries + 1):
            try:
                async with self._places:
                    # Each attempt belongs to the step in which it starts.
                    budget = self._budget if has_budget else _Budget()
                    if budget.calls < 1 or budget.tokens < 1:
                        what = "calls" if budget.calls < 1 else "tokens"
                        raise Unscored("budget", f"the step's {what} are used up ({KEY}.max_{what})")
                    budget.calls -= 1
                    vote.costs["calls"] += 1
                    vote.costs["retries"] += attempt > 0
                    completion = await self._call(body)
                _count_tokens(completion, message, vote.costs, budget)
                vote.score = parse_score(self.config, _read_reply(completion), code)
            except Unscored as failure:
                vote.reason, vote.error = failure.reason, str(failure)
                wait = failure.wait if isinstance(failure, _Retry) else math.inf
                if wait is None:
                    wait = min(LONGEST_WAIT, 0.5 * 2**attempt) * random.uniform(0.5, 1.0)
                if wait > LONGEST_WAIT or attempt == self.config.retries:
                    return vote
                await asyncio.sleep(wait)
            else:
                self.cache.add(key, vote.score)
                return vote
        raise AssertionError("unreachable")

    def _make_body(self, message: str, seed: int) -> bytes:
        fields: dict[str, Any] = {
            **self.config.options,
            "model": self.config.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": self.config.temperature,
            "seed": seed,
            "max_completion_tokens": self.config.max_completion_tokens,
            **response_format(self.config),
        }
        return json.dumps(fields).encode()

    async def _call(self, body: bytes) -> _Completion:
        """Return the endpoint's answer. Raises Unscored; no message holds the key or the endpoint's text."""
        import aiohttp

        headers = {"Content-Type": "application/json"}
        if key := self.config.read_key():
            headers["Authorization"] = f"Bearer {key}"
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
            )
        url, limit = f"{(self.config.url or '').rstrip('/')}/chat/completions", self.config.timeout
        timeout = aiohttp.ClientTimeout(total=limit, sock_connect=min(_CONNECTION, limit))
        try:
            async with self._session.post(
                url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    raise _failed_status(answer.status, answer.headers.get("Retry-After"))
                content = bytearray()
                async for chunk in answer.content.iter_any():
                    content += chunk
                    if len(content) > _LONGEST_REPLY:
                        raise Unscored("protocol", f"an answer has more than {_LONGEST_REPLY} bytes")
        except TimeoutError:
            raise _Retry("timeout", f"no answer within {limit:g} s ({KEY}.timeout)") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _Retry("connection", f"no connection ({type(error).__name__})") from None
        try:
            return msgspec.json.decode(bytes(content), type=_Completion)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise Unscored("protocol", "an answer is no chat completion") from None


def combine(config: JudgeConfig, shares: Sequence[float]) -> float:
    """Return the score of votes from 0 to 1."""
    if config.combine == "mean":
        return math.fsum(shares) / len(shares)
    return float(2 * sum(share >= config.threshold for share in shares) > len(shares))


def _failed_status(status: int, retry_after: str | None) -> Unscored:
    reason = "rate_limit" if status == 429 else "http"
    text = f"the endpoint answers HTTP {status}"
    return (
        _Retry(reason, text, parse_retry_after(retry_after))
        if status in _TRANSIENT
        else Unscored(reason, text)
    )


def parse_retry_after(value: str | None) -> float | None:
    """Return the seconds of a header Retry-After (RFC 9110, 10.2.3: seconds or a date); None: neither."""
    try:
        seconds = float(value) if value is not None else math.nan
    except ValueError:
        try:
            date = parsedate_to_datetime(str(value))
            aware = date if date.tzinfo else date.replace(tzinfo=UTC)
            seconds = (aware - datetime.now(UTC)).total_seconds()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _count_tokens(completion: _Completion, message: str, costs: Counter[str], budget: _Budget) -> None:
    """Add a call's tokens. An endpoint without `usage` is taken to use a token for 4 bytes."""
    usage = completion.usage
    if usage is None:
        reply = completion.choices[0].message.content if completion.choices else None
        usage = _Usage(
            *(math.ceil(len((text or "").encode(errors="replace")) / 4) for text in (message, reply))
        )
    costs["prompt_tokens"] += usage.prompt_tokens
    costs["completion_tokens"] += usage.completion_tokens
    budget.tokens -= usage.prompt_tokens + usage.completion_tokens


def _read_reply(completion: _Completion) -> str:
    """Return a reply's text. Raises Unscored for a refusal or a part of a reply."""
    if not completion.choices:
        raise Unscored("protocol", "an answer has no choice")
    choice = completion.choices[0]
    if choice.message.refusal or choice.finish_reason == "content_filter":
        raise Unscored("refusal", "the model refuses")
    if choice.finish_reason == "length":
        raise Unscored("length", f"a reply is cut off ({KEY}.max_completion_tokens)")
    return choice.message.content or ""


def check_judge(config: JudgeConfig, examples: Sequence[tuple[str, str, str]]) -> None:
    """Ask the judge about made-up responses. examples: (question, reference, response)

    Raises ConfigError, if the key or a package is missing, or a call fails."""
    if not find_spec("aiohttp"):
        raise ConfigError(f"{KEY}.url: needs aiohttp (pip install 'megarl[agents]')")

    async def ask() -> list[Opinion]:
        judge = Judge(config.model_copy(update={"retries": min(1, config.retries)}), seed=0)
        try:
            scores = (judge.score(*example, has_budget=False) for example in examples)
            return await asyncio.gather(*scores)
        finally:
            await judge.close()

    for opinion in asyncio.run(ask()):
        if opinion.error is not None:
            reason = opinion.error.removeprefix(f"{KEY}: ")
            remedy = "correct url, model, key or template, or start the endpoint"
            raise ConfigError(f"{KEY}.url: {config.url}: fails on a made-up response: {reason} ({remedy})")
