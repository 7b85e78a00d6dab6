"""A rank's part in rollouts: what it does while the controller (controller.py) decides. The first rank of an
engine, its leader, runs episodes on it, has them verified, and keeps what was written; the controller hears
facts. The engine's other ranks wait, and take part in weight transfers where engines are started again."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from megarl.config.errors import EngineError, EngineFailure, MegarlError, WaitTimeout
from megarl.config.schema import Config
from megarl.data.prompts import Prompt
from megarl.data.response_text import policy_texts
from megarl.rewards.shaping import soft_overlong_punishment
from megarl.rewards.verdict import Verdict, short
from megarl.rollout import messages as m
from megarl.rollout.engines.base import EngineClient, RolloutEngine
from megarl.rollout.episode import Episode, EpisodeAborted, load_runner
from megarl.rollout.responses import Body, Response
from megarl.rollout.sampling import Completion
from megarl.sync.weight_sync import Failures

if TYPE_CHECKING:
    from megarl.rewards.pool import Item, VerifierPool


@dataclass
class Written:
    """An episode that has ended, or its window (finish "abort"). verdict: its own; None: the verifier is to
    judge; begun: tokens that earlier steps drew"""

    number: int
    prompt: Prompt
    completion: Completion
    verdict: Verdict | None
    turns: int
    calls: int
    begun: int = 0

    @property
    def goes_on(self) -> bool:
        """Return whether only its window has ended."""
        return self.completion.finish == "abort"

    @property
    def length(self) -> int:
        """Return the policy's tokens."""
        sampled = self.completion.sampled
        return len(self.completion.tokens) if sampled is None else sum(sampled)


class Worker:
    """Does what the controller says, over `link`, from the begin of a rollout to its end.

    rank      its number among those with engines; leads: whether it is the first of its engine
    key       of the configuration, that says how responses are made: errors begin with it
    ranks     how many have engines
    recover   restarts engines that have failed, see WeightSync; called on all ranks with engines
    drawn     responses with their bodies that are still wanted, by number
    partials  of responses that go on in a later rollout
    seconds   of the present rollout: generate, verify
    threads   where engine and verifier are waited for, see EngineClient
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        ranks: int,
        engine: RolloutEngine,
        verifier: VerifierPool,
        tokenizer: Any,
        recover: Callable[[Failures], None],
    ) -> None:
        self.config, self.rank, self.ranks, self.engine = config, rank, ranks, engine
        self.verifier, self.tokenizer, self.recover = verifier, tokenizer, recover
        self.leads = rank % config.rollout.engine_tp == 0
        self.runner = load_runner(config, tokenizer)
        self.key = self.runner.key
        self.reflection = words_pattern(config.log.reflection_words)
        self.drawn: dict[int, Response] = {}
        self.partials: dict[int, Completion] = {}
        self.seconds: dict[str, float] = {}
        self.threads = ThreadPoolExecutor(2, "rollout")
        self._running: dict[int, tuple[Episode, int, float]] = {}  # with its index, and since when

    @property
    def running(self) -> int:
        """Return the number of responses that have not ended."""
        return len(self._running)

    @property
    def oldest(self) -> str:
        """Return the response that was begun first, for reports about a hang."""
        for episode, index, since in list(self._running.values())[:1]:
            what = f"response {index} to prompt {episode.prompt.uid}, turn {episode.turns}"
            waits = f", in {episode.waiting}," if episode.waiting else ""
            return f"{what}{waits} on engine rank {self.rank}, for {time.monotonic() - since:.0f} s"
        return "none"

    async def serve(self, link: m.Link) -> None:
        """Do what the controller says until the rollout has ended. Errors of this rank are sent to the
        controller, which raises them; what `recover` raises, alike on all ranks, is raised here."""
        self.link, self.client = link, EngineClient(self.engine, self.threads)
        self.seconds = dict.fromkeys(("generate", "verify"), 0.0)
        self._ended: list[Written] = []  # to be verified
        self._some_ended, self._recovered = asyncio.Event(), asyncio.Event()
        self._seats_changed = asyncio.Event()
        self._verifying = asyncio.Lock()
        self._episodes: dict[int, asyncio.Task[None]] = {}
        if self.engine.running:  # after an error
            with suppress(EngineFailure):  # which the engine's next call meets again, as all others do theirs
                self.engine.abort()
        self._tasks: list[asyncio.Task[None]] = []
        try:
            with self.runner.supervise(self.rank) if self.leads else nullcontext():
                async with asyncio.TaskGroup() as group:
                    self._group = group
                    if self.leads:
                        jobs = self._generate, self._verify, self._tell_unseated
                        self._tasks += map(group.create_task, map(self._reporting_errors, jobs))
                    await self._obey()
                    for task in self._tasks:
                        task.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._cancel(self._episodes.values())  # where an error ended the rollout
            self.seconds["generate"] = self.client.busy
            self._running.clear()

    async def _cancel(self, tasks: Iterable[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
        """Cancel tasks, and return those that have not ended `rollout.turns.seconds` after that."""
        left = set(tasks)
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=self.config.rollout.turns.seconds)
        return left

    async def _obey(self) -> None:
        heard, limit = time.monotonic(), self.config.parallel.timeout
        while True:
            message = await self.link.receive(m.ALIVE)
            if time.monotonic() - self.link.told > m.ALIVE:
                await self.link.send(m.Alive())
            if message is not None:
                heard = time.monotonic()
            elif time.monotonic() - heard > limit:
                silence = f"nothing for {limit:g} s (parallel.timeout)"
                raise WaitTimeout(f"rollout: engine rank {self.rank} has heard from the controller {silence}")
            match message:
                case m.Begin():
                    self._start_episodes(message)
                case m.Abort(numbers):  # beside signs of life: engine, verdicts and episodes take their time
                    ending = self._reporting_errors(self._abort, numbers)
                    self._tasks.append(self._group.create_task(ending))
                case m.Fetch(numbers):
                    there = {n: body for n in numbers if (body := self.drawn[n].body) is not None}
                    bodies = {n: structs.replace(body, journal=[]) for n, body in there.items()}
                    await self.link.send(m.Bodies(bodies))
                case m.Recover(failures):
                    by_rank: Failures = [None] * self.ranks
                    for rank, why in failures:
                        by_rank[rank] = EngineFailure(why)
                    self.recover(by_rank)
                    heard = time.monotonic()
                    if by_rank[self.rank] is not None:
                        self._recovered.set()
                case m.End(keep):
                    kept = set(keep)
                    self.drawn = {n: response for n, response in self.drawn.items() if n in kept}
                    self.partials = {n: partial for n, partial in self.partials.items() if n in kept}
                    if self.client.abandoned:
                        with suppress(EngineFailure):  # as in `serve`: the others have ended this rollout
                            await self.client.abort()
                    return

    async def _reporting_errors(self, job: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Do something, and send its error to the controller."""
        try:
            await job(*arguments)
        except MegarlError as error:
            await self.link.send(m.Failed(type(error).__name__, str(error)))

    def _start_episodes(self, message: m.Begin) -> None:
        self._params, self._terms = message.params, message.terms
        prompts = [question.prompt for question in message.questions]
        for work in message.work:
            prompt = prompts[work.question]
            episode = self.runner.start(
                prompt,
                self.client,
                work.seed,
                message.params,
                self.partials.pop(work.number, None),
                message.window,
                self._seats_changed.set,
            )
            self._running[work.number] = episode, work.index, time.monotonic()
            running = asyncio.create_task(self._reporting_errors(self._run, work.number, episode))
            self._episodes[work.number] = running
            # Not in the group itself, which would wait for an episode that cannot be cancelled for ever.
            self._tasks.append(self._group.create_task(_end_of(running)))

    async def _run(self, number: int, episode: Episode) -> None:
        """Run one episode until it ends or is aborted."""
        try:
            verdict = await episode.run()
            completion = episode.result()
            if completion.finish == "abort" or not completion.tokens:  # user code has caught EpisodeAborted
                raise EpisodeAborted
            self._queue_for_grading(number, episode, completion, verdict)
        except (EpisodeAborted, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not episode.aborted:
                raise
            written = episode.result(ended=False)
            if written.tokens:
                self.partials[number] = written
            if episode.windowed:
                self._queue_for_grading(number, episode, written, None)
        finally:
            self._episodes.pop(number, None)
            self._running.pop(number, None)
            self._seats_changed.set()
            if not (number in self.partials and self.config.rollout.continue_partial):
                self.runner.forget(episode.seed)

    def _queue_for_grading(
        self, number: int, episode: Episode, completion: Completion, verdict: Verdict | None
    ) -> None:
        counts = episode.turns, episode.calls, episode.prefix_tokens
        self._ended.append(Written(number, episode.prompt, completion, verdict, *counts))
        self._some_ended.set()

    async def _tell_unseated(self) -> None:
        """Tell the controller how many episodes do not wait for the engine, which has room for others then:
        when there are that many more or less that it matters."""
        told = 0
        while self.config.rollout.acts and self.ranks > self.config.rollout.engine_tp:
            await self._seats_changed.wait()
            self._seats_changed.clear()
            unseated = sum(not episode.in_engine for episode, *_ in self._running.values())
            if abs(unseated - told) > len(self._running) // 16:
                told = unseated
                await self.link.send(m.Unseated(told))

    async def _generate(self) -> None:
        """Keep the engine going. Where it fails, the controller has all ranks start it again."""
        while True:
            try:
                await self.client.run()
            except EngineFailure as failure:
                self._recovered.clear()
                await self.link.send(m.Failed(type(failure).__name__, str(failure)))
                await self._recovered.wait()

    async def _verify(self) -> None:
        """Verify what has ended, all at once that there is, and tell the facts."""
        loop = asyncio.get_running_loop()
        while True:
            await self._some_ended.wait()
            self._some_ended.clear()
            async with self._verifying:
                ended, self._ended = self._ended, []
                if not ended:
                    continue
                started, version = time.perf_counter(), self.engine.weight_version
                responses = await loop.run_in_executor(self.threads, self._verified, ended, version)
                self.seconds["verify"] += time.perf_counter() - started
                self.drawn |= {response.number: response for response in responses}
                facts = [response.facts for response in responses]
                await self.link.send(m.Ended(version, facts, self.client.busy))

    def _verified(self, ended: Sequence[Written], version: int) -> list[Response]:
        """Return the responses, with rewards; of one that goes on it is 0. An episode that has judged itself
        is not verified; the terms of the reward see the verifier's judgement all the same, and their failure
        counts as with others. version: of the engine's weights."""
        spoken = [turns_of(one.completion) for one in ended]
        texts = iter(policy_texts(self.tokenizer, [turn for turns in spoken for turn in turns]))
        said = ["\n".join(islice(texts, len(turns))) for turns in spoken]
        reward, overlong, longest = self.config.reward, self.config.reward.overlong, self._params.max_tokens
        with_terms = self._terms and bool(reward.terms)
        items: list[Item] = []
        for one, text in zip(ended, said, strict=True):
            if (one.verdict is None or with_terms) and not one.goes_on:
                judged = text, one.prompt.reference
                size = one.length, longest, one.completion.finish == "length"
                items.append((*judged, *size) if with_terms else judged)
        verdicts, responses = iter(self.verifier.verify(items)), []
        for one, text in zip(ended, said, strict=True):
            completion, own, verdict, total, penalty = one.completion, one.verdict, Verdict(False), 0.0, 0.0
            if not one.goes_on:
                verdict = next(verdicts) if own is None or with_terms else own
                # Where there are no terms, as one of them or the verifier has failed, that is the verdict.
                if own is not None and (verdict.error is None or own.error is not None or not own.judged):
                    verdict = replace(own, terms=verdict.terms)
                if overlong.soft_punishment:
                    penalty = soft_overlong_punishment(one.length, longest, overlong.buffer)
                terms = sum(reward.terms[name].weight * value for name, value in verdict.terms.items())
                total = reward.weight * verdict.reward(reward.correct, reward.incorrect) + terms + penalty
                total += math.fsum(completion.rewards or ())
            body = Body.of(vars(completion), completion.routing, completion.journal)
            if np.all(body.versions == version):
                body.versions = None
            responses.append(
                Response.of(
                    body,
                    self.rank,
                    number=one.number,
                    finish="window" if one.goes_on else completion.finish,
                    correct=verdict.correct,
                    extracted=short(verdict.extracted),
                    error=short(verdict.error),
                    reward=total,
                    penalty=penalty,
                    score=verdict.score,
                    terms=dict(verdict.terms),
                    judged=verdict.judged,
                    turns=one.turns,
                    calls=one.calls,
                    begun=one.begun,
                    reflects=self.reflection.search(text) is not None if self.reflection else None,
                )
            )
        return responses

    async def _abort(self, numbers: Sequence[int]) -> None:
        """End what runs, and keep what there is of these responses."""
        failure: EngineFailure | None = None
        for episode, *_ in self._running.values():  # first of all: none asks the engine for more meanwhile
            episode.aborted = True
        try:
            await self.client.abort()
        except EngineFailure as error:
            failure = error
        if self._episodes:
            # Generating episodes have their tokens by now and stop by themselves; cancel the others.
            for number, (episode, *_) in list(self._running.items()):
                if episode.waiting or not episode.generating:
                    self._episodes[number].cancel()
            limit = self.config.rollout.turns.seconds
            _, left = await asyncio.wait(self._episodes.values(), timeout=limit)
            if left:
                what = f"{len(left)} episodes have not ended {limit:g} s after they were told to"
                remedy = "let EpisodeAborted and CancelledError through"
                raise EngineError(f"{self.key}: {what}: {self.oldest} ({remedy})")
        async with self._verifying:  # until the facts of what is being verified are sent
            version = self.engine.weight_version
            ended = {one.number: one.completion for one in self._ended}
            self._ended = []
        for number in numbers:
            if number in self.drawn:  # its group was not taken: it goes back, and is verified with that later
                ended[number] = as_completion(self.drawn.pop(number), version)
        wanted = set(numbers)
        self.partials = {n: c for n, c in (self.partials | ended).items() if n in wanted}
        if failure is not None:
            self._recovered.clear()
            await self.link.send(m.Failed(type(failure).__name__, str(failure)))
        await self.link.send(m.Aborted(list(self.partials)))


async def _end_of(task: asyncio.Task[None]) -> None:
    """Wait for a task's end, and raise its error."""
    await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


def as_completion(response: Response, version: int) -> Completion:
    """Return a verified response as its episode gave it. version: of the weights of a body without any."""
    body = response.body
    assert body is not None
    columns = body.lists
    columns["versions"] = columns["versions"] or [version] * body.tokens.size
    finish: Any = "abort" if response.finish == "window" else response.finish
    return Completion(**columns, finish=finish, routing=body.routing, journal=body.journal)


def turns_of(completion: Completion) -> list[list[int]]:
    """Return the tokens of each of the policy's turns; those between which nothing was shown are one."""
    if completion.sampled is None:
        return [completion.tokens]
    pairs = groupby(zip(completion.tokens, completion.sampled, strict=True), key=lambda pair: pair[1])
    return [[token for token, _ in turn] for sampled, turn in pairs if sampled]


def words_pattern(words: Sequence[str]) -> re.Pattern[str] | None:
    """Return what finds one of `words` in a text, in any case, with any space between a word's parts, and not
    inside a longer word of Latin letters (Chinese has no space between words); None without a word."""
    found = "|".join(r"\s+".join(map(re.escape, word.split())) for word in words)
    return re.compile(rf"(?<![A-Za-z0-9_])(?:{found})(?![A-Za-z0-9_])", re.IGNORECASE) if words else None
