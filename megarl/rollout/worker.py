"""A rank's worker: runs the episodes that the controller assigns to its engine.

On an engine's other ranks it only takes part in restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from megarl.config.errors import EngineError, EngineFailure, MegarlError, WaitTimeout
from megarl.config.schema import Config
from megarl.data.sample import Sample, TokenData
from megarl.rewards.judge import Judge
from megarl.rewards.verdict import Verdict
from megarl.rollout import messages as m
from megarl.rollout.engines.base import RolloutEngine
from megarl.rollout.episode import EngineClient, Episode, EpisodeAborted, EpisodeInputs, load_runner
from megarl.rollout.grading import Grader
from megarl.sync.weight_sync import Failures

if TYPE_CHECKING:
    from megarl.rewards.pool import VerifierPool


@dataclass
class RunningEpisode:
    episode: Episode
    index: int
    started: float
    task: asyncio.Task[None]


class Worker:
    """Follows the controller's messages. recover: see RolloutRank

    With weights in flight, a rollout also has:
    transfer  brings a version of the weights into the engines; called on all engine ranks
    store     stores a step's batch; called on all engine ranks
    on_keep_alive  called at each sign of life of the controller, as such a rollout has no limit of time"""

    transfer: Callable[[int], Awaitable[None]]
    store: Callable[[m.StoreRollout], Awaitable[None]]
    on_keep_alive: Callable[[], None] | None = None

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
        self.graded: dict[int, Sample] = {}
        self.partials: dict[int, TokenData] = {}
        self.seconds: dict[str, float] = {}
        self.threads = ThreadPoolExecutor(2, "rollout")
        self.judge: Judge | None = None
        if config.reward.judge.url is not None and self.leads:
            tp = config.rollout.engine_tp
            self.judge = Judge(config.reward.judge, config.seed, engines=ranks // tp, engine=rank // tp)
        self._running: dict[int, RunningEpisode] = {}

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def oldest(self) -> str:
        for entry in list(self._running.values())[:1]:
            what = f"response {entry.index} to prompt {entry.episode.prompt.uid}, turn {entry.episode.turns}"
            wait_text = f", in {entry.episode.waiting}," if entry.episode.waiting else ""
            return (
                f"{what}{wait_text} on engine rank {self.rank}, for {time.monotonic() - entry.started:.0f} s"
            )
        return "none"

    async def serve(self, link: m.Link) -> None:
        """Follow the controller until the rollout ends.

        Errors go to the controller, except those of `recover`, which all ranks raise."""
        batching = self.config.rollout.capabilities.continuous_batching
        self.link = link
        self.client = EngineClient(
            self.engine,
            self.threads,
            continuous_batching=batching,
            weights_change=self.config.schedule.in_flight != "none",
        )
        self.grader = Grader(self.config, self.verifier, self.tokenizer, self.threads, self.judge)
        if self.judge is not None:
            self.judge.start_step()
        self._tool_waits_changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._seconds_taken: dict[str, float] = {}
        if self.engine.running:
            with suppress(EngineFailure):  # the engine's next call raises it again
                self.engine.abort()
        try:
            with self.runner.supervise(self.rank) if self.leads else nullcontext():
                async with asyncio.TaskGroup() as group:
                    self._group = group
                    if self.leads:
                        self._start_task(self.client.keep_busy, self._report_failure)
                        self._start_task(self.grader.run, self._report_graded)
                        self._start_task(self._report_tool_waits)
                    await self._follow_controller()
                    for task in list(self._tasks):
                        task.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._cancel_episodes()
            if self.judge is not None:
                await self.judge.close()
            self.seconds = self._count_seconds()
            self._running.clear()

    def _count_seconds(self) -> dict[str, float]:
        return {"generate": self.client.busy, "verify": self.grader.seconds}

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of a running rollout since the last call."""
        before, self._seconds_taken = self._seconds_taken, self._count_seconds()
        return {name: seconds - before.get(name, 0.0) for name, seconds in self._seconds_taken.items()}

    def _start_task(self, job: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        self._track(self._group.create_task(self._send_errors(job, *arguments)))

    def _track(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_errors(self, job: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        try:
            await job(*arguments)
        except MegarlError as error:
            await self.link.send(m.RankFailed(type(error).__name__, str(error)))

    async def _follow_controller(self) -> None:
        """Act on messages until `EndRollout`."""
        last_heard, limit = time.monotonic(), self.config.parallel.timeout
        while True:
            message = await self.link.receive(m.KEEP_ALIVE_SECONDS)
            if time.monotonic() - self.link.last_sent > m.KEEP_ALIVE_SECONDS:
                await self.link.send(m.KeepAlive())
            if message is not None:
                last_heard = time.monotonic()
            elif time.monotonic() - last_heard > limit:
                silence = f"nothing from the controller for {limit:g} s (parallel.timeout)"
                raise WaitTimeout(f"rollout: engine rank {self.rank} has received {silence}")
            match message:
                case m.StartSamples():
                    self._start_episodes(message)
                case m.AbortSamples(ids):  # a task, as `KeepAlive` must continue
                    self._start_task(self._abort, ids)
                case m.SendTokenData(ids):
                    await self._send_token_data(ids)
                case m.RestartEngines(failures):
                    self._recover(failures)
                    last_heard = time.monotonic()
                case m.KeepAlive() if self.on_keep_alive is not None:
                    self.on_keep_alive()
                case m.TransferWeights(version):
                    await self.client.call_between_polls(self.transfer, version)
                    self.client.recovered.set()  # the transfer has restarted an engine that had failed
                    last_heard = time.monotonic()
                case m.StoreRollout():
                    await self.store(message)
                    if self.judge is not None:
                        self.judge.start_step()
                    last_heard = time.monotonic()
                case m.EndRollout(keep):
                    await self._end(set(keep))
                    return

    def _start_episodes(self, message: m.StartSamples) -> None:
        self.grader.max_tokens, self.grader.with_terms = message.params.max_tokens, message.terms
        prompts = [m.unpack_prompt(prompt) for prompt in message.prompts]
        for sample_id, position, index, seed in message.samples:
            prefix, notify = self.partials.pop(sample_id, None), self._tool_waits_changed.set
            inputs = prompts[position], self.client, seed, message.params, prefix, message.window, notify
            episode = self.runner.start(EpisodeInputs(*inputs))
            task = asyncio.create_task(self._send_errors(self._run, sample_id, episode))
            self._running[sample_id] = RunningEpisode(episode, index, time.monotonic(), task)
            # The group would wait for ever for a task that ignores cancel.
            self._track(self._group.create_task(_wait_for(task)))

    async def _run(self, sample_id: int, episode: Episode) -> None:
        try:
            verdict = await episode.run()
            data = episode.result()
            if data.finish_reason == "abort" or not data.num_tokens:  # user code has caught EpisodeAborted
                raise EpisodeAborted
            self._queue_for_grading(sample_id, episode, data, verdict)
        except (EpisodeAborted, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not episode.aborted:
                raise
            data = episode.result(ended=False)
            if data.num_tokens:
                self.partials[sample_id] = data
            if episode.windowed:
                self._queue_for_grading(sample_id, episode, data, None)
        finally:
            self._running.pop(sample_id, None)
            self._tool_waits_changed.set()
            if not (sample_id in self.partials and self.config.rollout.continue_partial):
                self.runner.forget(episode.seed)

    def _queue_for_grading(
        self, sample_id: int, episode: Episode, data: TokenData, verdict: Verdict | None
    ) -> None:
        # Else equal to the group's.
        weights_change = self.config.schedule.in_flight != "none"
        if not weights_change and np.all(data.policy_versions == self.engine.weight_version):
            data = structs.replace(data, policy_versions=None)
        sample = Sample.from_data(
            data,
            self.rank,
            id=sample_id,
            finish_reason="window" if data.finish_reason == "abort" else data.finish_reason,
            turns=episode.turns,
            calls=episode.calls,
            prefix_tokens=episode.prefix_tokens,
        )
        self.grader.add(sample, episode.prompt, verdict)

    async def _cancel_episodes(self) -> None:
        tasks = [entry.task for entry in self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self.config.rollout.turns.seconds)

    async def _report_failure(self, failure: EngineFailure) -> None:
        error, version = type(failure).__name__, self.engine.weight_version
        await self.link.send(m.RankFailed(error, str(failure), version))

    async def _report_graded(self, samples: Sequence[Sample]) -> None:
        self.graded |= {sample.id: sample for sample in samples}
        metadata = [structs.replace(sample, data=None) for sample in samples]
        await self.link.send(m.SamplesFinished(self.engine.weight_version, metadata, self.client.busy))

    async def _report_tool_waits(self) -> None:
        """Report waiting episodes, so that the engine gets more work."""
        num_reported = 0
        while self.config.rollout.is_multi_turn and self.ranks > self.config.rollout.engine_tp:
            await self._tool_waits_changed.wait()
            self._tool_waits_changed.clear()
            num_waiting = sum(not entry.episode.in_engine for entry in self._running.values())
            if abs(num_waiting - num_reported) > len(self._running) // 16:
                num_reported = num_waiting
                await self.link.send(m.ToolWaitCount(num_reported))

    async def _send_token_data(self, ids: Iterable[int]) -> None:
        data_by_id = {i: data for i in ids if (data := self.graded[i].data) is not None}
        await self.link.send(
            m.TokenDataReply({i: structs.replace(data, journal=[]) for i, data in data_by_id.items()})
        )

    def _recover(self, failures: Sequence[tuple[int, str]]) -> None:
        failure_by_rank: Failures = [None] * self.ranks
        for rank, reason in failures:
            failure_by_rank[rank] = EngineFailure(reason)
        self.recover(failure_by_rank)
        if failure_by_rank[self.rank] is not None:
            self.client.recovered.set()

    async def _abort(self, ids: Sequence[int]) -> None:
        """Abort all episodes. Keep these samples' tokens."""
        failure: EngineFailure | None = None
        for entry in self._running.values():  # first, so that none makes another request
            entry.episode.aborted = True
        try:
            await self.client.abort()
        except EngineFailure as error:
            failure = error
        await self._wait_for_episodes()
        ungraded_samples, version = await self.grader.take_queue(), self.engine.weight_version
        data_by_id = self.partials | {sample.id: make_prefix(sample, version) for sample in ungraded_samples}
        for i in ids:
            if i in self.graded:  # its group was not taken: it is graded again
                data_by_id[i] = make_prefix(self.graded.pop(i), version)
        kept_ids = set(ids)
        self.partials = {i: data for i, data in data_by_id.items() if i in kept_ids}
        if failure is not None:
            self.client.recovered.clear()
            await self._report_failure(failure)
        await self.link.send(m.SamplesAborted(list(self.partials)))

    async def _wait_for_episodes(self) -> None:
        """Wait for generating episodes to end, and cancel others."""
        tasks = [entry.task for entry in self._running.values()]
        if not tasks:
            return
        for entry in list(self._running.values()):
            if entry.episode.waiting or not entry.episode.generating:
                entry.task.cancel()
        limit = self.config.rollout.turns.seconds
        _, pending_tasks = await asyncio.wait(tasks, timeout=limit)
        if pending_tasks:
            what = f"{len(pending_tasks)} episodes have not ended {limit:g} s after they were aborted"
            remedy = "let EpisodeAborted and CancelledError through"
            raise EngineError(f"{self.key}: {what}: {self.oldest} ({remedy})")

    async def _end(self, keep: set[int]) -> None:
        self.graded = {i: sample for i, sample in self.graded.items() if i in keep}
        self.partials = {i: data for i, data in self.partials.items() if i in keep}
        if self.client.has_abandoned:
            with suppress(EngineFailure):
                await self.client.abort()


async def _wait_for(task: asyncio.Task[None]) -> None:
    await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


def make_prefix(sample: Sample, version: int) -> TokenData:
    """Return a sample's tokens as a prefix. version: the default policy version"""
    assert sample.data is not None
    if sample.data.policy_versions is not None:
        return sample.data
    versions = np.full(sample.data.num_tokens, version)
    return structs.replace(sample.data, policy_versions=versions)
