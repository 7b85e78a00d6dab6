"""Rollouts. All engine ranks call them in the same order, and get the same samples."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import zmq.asyncio
from torch import Tensor

from megarl.config.errors import DataError, EngineError, MegarlError
from megarl.config.schema import Config
from megarl.data.batch import RolloutBatch
from megarl.data.prompts import ProblemSet, Prompt
from megarl.data.sample import SampleGroup
from megarl.data.teacher_prompts import make_teacher_prompt, pad_teacher_prompts
from megarl.parallel.comm import broadcast_from_rank_0
from megarl.parallel.runtime import Ranks
from megarl.rollout import messages as m
from megarl.rollout.collector import make_method_columns, make_rollout_batch
from megarl.rollout.controller import Controller, GroupRequest, StepGroups
from megarl.rollout.engines.base import RolloutEngine
from megarl.rollout.in_flight import InFlightController
from megarl.rollout.metrics import make_records, select_groups_to_show
from megarl.rollout.sampling import SamplingParams, evaluation_seed
from megarl.rollout.state import load_state, pack_journal
from megarl.rollout.windows import WindowController
from megarl.rollout.worker import Worker
from megarl.sync.weight_sync import Failures

if TYPE_CHECKING:
    from megarl.rewards.pool import VerifierPool


Decide = Callable[[Controller], Awaitable[StepGroups]]


def raise_failure(failures: Failures) -> None:
    raise next(filter(None, failures))


class RolloutRank:
    """One rank's part in rollouts.

    recover       restarts failed engines, see WeightSync; called on all engine ranks
    take_prompts  returns the next n prompts; called on the first rank
    seconds       of the last rollout: generate, verify, gather (waiting), idle (see Dispatcher)"""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        engine: RolloutEngine,
        verifier: VerifierPool,
        tokenizer: Any,
        recover: Callable[[Failures], None] = raise_failure,
        take_prompts: Callable[[int], Sequence[Prompt]] = lambda n: (),
    ) -> None:
        self.config, self.ranks, self.engine, self.tokenizer = config, ranks, engine, tokenizer
        self.worker = Worker(config, ranks.rank, ranks.world, engine, verifier, tokenizer, recover)
        self.seconds = dict.fromkeys(("generate", "verify", "gather", "idle"), 0.0)
        self._loop, self._context = asyncio.new_event_loop(), zmq.asyncio.Context()
        self.controller: Controller | None = None
        if ranks.rank == 0:
            hub = self._run(self._listen(ranks.world))
            controller_class = get_controller_class(config)
            self.controller = controller_class(config, hub, ranks.world, take_prompts)
            self.address = hub.address
        self.address = broadcast_from_rank_0(ranks, self.address if self.controller else "", str)
        self._run(self._connect())

    def _run(self, job: Awaitable[Any]) -> Any:
        try:
            return self._loop.run_until_complete(job)
        except KeyboardInterrupt:
            # Cancel leftover tasks quietly before the sockets close.
            self._loop.set_exception_handler(lambda _loop, _context: None)
            for _ in range(3):  # an interrupted task raises the interrupt again
                if pending_tasks := asyncio.all_tasks(self._loop):
                    for task in pending_tasks:
                        task.cancel()
                    with suppress(KeyboardInterrupt):
                        self._loop.run_until_complete(asyncio.wait(pending_tasks, timeout=1.0))
            raise
        except SystemExit as error:  # the event loop lets it through
            what = f"one of its tasks has called sys.exit({error})"
            raise EngineError(f"{self.worker.key}: {what} (raise an error there)") from error

    async def _listen(self, ranks: int) -> m.Hub:
        return m.Hub(self._context, m.own_address(), ranks)

    async def _connect(self) -> None:
        self.link = m.Link(self._context, self.address, self.ranks.rank, here=self.controller is not None)
        await self.link.send(m.RankReady())
        if self.controller is not None:
            await self.controller.hub.wait_for_ranks(self.ranks.world, self.config.parallel.timeout)

    def collect(self, step: int) -> RolloutBatch:
        """Collect a step's groups, with this rank's tokens."""
        limit, shown_groups = self.config.log.samples, list[SampleGroup]()

        async def decide(controller: Controller) -> StepGroups:
            groups, metrics, error_counts = await controller.collect(step)
            shown_groups.extend(await controller.fetch(select_groups_to_show(groups, limit)))
            return groups, metrics, error_counts

        groups, metrics, error_counts = self._run_rollout(decide, ())
        batch = self._make_batch(step, groups, shown_groups)
        batch.metrics, batch.errors = metrics, error_counts
        return batch

    def _make_batch(
        self, step: int, groups: Sequence[SampleGroup], shown_groups: Sequence[SampleGroup]
    ) -> RolloutBatch:
        batch = make_rollout_batch(groups, compared=self.config.algorithm.advantage_method.compares_group)
        if step > 0:  # value pretraining needs only rewards
            batch.columns |= make_method_columns(groups, self.config)
        if step > 0 and self.config.has_self_teacher:
            batch["teacher_prompts"] = make_teacher_prompts(self.config, groups, self.tokenizer, self.ranks)
        batch.records = make_records(step, shown_groups, self.tokenizer, self.config.log.samples)
        for sample in batch.samples:
            self.worker.graded.pop(sample.id, None)
        return batch

    def generate(
        self, requests: Sequence[GroupRequest], params: SamplingParams, *, whole: bool = False
    ) -> list[SampleGroup]:
        """Return one group per request, without reward terms. whole: rank 0 gets all tokens"""
        fetched_groups = list[SampleGroup]()

        async def decide(controller: Controller) -> StepGroups:
            groups = await controller.generate(requests, params)
            fetched_groups.extend(await controller.fetch(groups) if whole else ())
            return groups, {}, {}

        groups, _, _ = self._run_rollout(decide, [request.prompt for request in requests])
        for sample in (sample for group in groups for sample in group.samples):
            self.worker.graded.pop(sample.id, None)
        return fetched_groups or groups

    def evaluate(
        self, sets: Sequence[ProblemSet], params: SamplingParams | None = None
    ) -> list[tuple[ProblemSet, list[SampleGroup]]]:
        """Sample and grade answers to the sets' problems; rank 0 gets the tokens.

        Seeds do not depend on other sets. Raises DataError without problems."""
        if not any(problem_set.problems for problem_set in sets):
            raise DataError("data.eval: there is no problem to evaluate on (name a file that holds some)")
        params = params or make_evaluation_params(self.config)
        groups = iter(self.generate(make_evaluation_requests(sets, self.config.seed), params, whole=True))
        return [(problem_set, list(islice(groups, len(problem_set.problems)))) for problem_set in sets]

    def collect_in_flight(
        self,
        first: m.CollectRollout,
        transfer: Callable[[int], None],
        store: Callable[[int, RolloutBatch, int], m.RolloutStored],
        on_keep_alive: Callable[[], None],
    ) -> None:
        """Collect ordered steps while weights change, until an order asks for something else.

        transfer  brings a weight version into the engines
        store     stores a step's batch; the third argument is the last step whose batch nobody needs
        on_keep_alive  called at each sign of life of the controller; the others are called on all ranks"""
        limit, shown_groups = self.config.log.samples, list[SampleGroup]()
        is_stored, started, prompts = asyncio.Event(), 0.0, list[Prompt]()  # prompts: with texts, on rank 0

        async def decide(controller: Controller) -> StepGroups:
            assert isinstance(controller, InFlightController)

            async def send(order: m.CollectRollout, result: StepGroups) -> None:
                shown_groups[:] = await controller.fetch(select_groups_to_show(result[0], limit))
                outcome = self._make_outcome(*result, known=False)
                outcome.idle = controller.take_idle_seconds()
                message = m.StoreRollout(order.number, outcome, controller.done, controller.take_forgotten())
                prompts[:] = [group.prompt for group in result[0]]
                is_stored.clear()
                await controller.pass_on(message)
                # The stored state must be that of this moment: no group may be in the next batch yet.
                await is_stored.wait()
                controller.hub.reset_silence()  # a restart before it may have taken long

            await controller.serve(first, send)
            return [], {}, {}

        async def store_batch(message: m.StoreRollout) -> None:
            nonlocal started
            groups = self._take_groups(message.outcome, prompts or message.outcome.prompts)
            batch = self._make_batch(message.number, groups, shown_groups)
            batch.metrics, batch.errors = {**message.outcome.stats}, message.outcome.errors
            for sample_id in message.forget:
                self.worker.graded.pop(sample_id, None)
            now, seconds = time.perf_counter(), self.worker.take_seconds()
            seconds |= {"rollout": now - started, "idle": message.outcome.idle}
            batch.metrics |= {f"inside/{part}": value for part, value in seconds.items()}
            started = now
            await self._answer_order(store(message.number, batch, message.done))
            is_stored.set()

        async def join_transfer(version: int) -> None:
            await self._answer_order(m.TransferReady(version))
            transfer(version)

        self.worker.transfer, self.worker.store = join_transfer, store_batch
        self.worker.on_keep_alive = on_keep_alive
        self.engine.should_end_poll = self._has_order  # trainers wait for the answer to an order
        started = time.perf_counter()
        try:
            self._run_rollout(decide, ())
        finally:
            self.worker.on_keep_alive, self.engine.should_end_poll = None, lambda: False

    async def _answer_order(self, answer: m.Message) -> None:
        if self.controller is not None:
            self.controller.orders_underway -= 1
            await self.controller.hub.send(m.TRAINER, answer)

    def _has_order(self) -> bool:
        """Return whether the worker, or the controller before it, has an order to follow."""
        if self.controller is None:
            return m.has_message(self.link.socket)
        is_underway = self.controller.orders_underway and m.has_message(self.link.socket)
        return is_underway or m.has_message(self.controller.hub.socket)

    def _run_rollout(self, decide: Decide, known: Sequence[Prompt]) -> StepGroups:
        """Run a rollout. All ranks raise the controller's MegarlError.

        known: the groups' prompts, if all ranks know them; else empty"""
        start_time = time.perf_counter()
        result = self._run(self._serve(decide))
        failure = result if isinstance(result, MegarlError) else None
        outcome: m.RolloutOutcome | None = None
        if result is not None and failure is None:
            outcome = self._make_outcome(*result, known=bool(known))
            known = [group.prompt for group in result[0]]
        result_type = tuple[MegarlError | None, m.RolloutOutcome | None]
        failure, outcome = broadcast_from_rank_0(self.ranks, (failure, outcome), result_type)
        if failure is not None:
            raise failure
        assert outcome is not None
        seconds = self.worker.seconds if self.worker.leads else outcome.seconds
        gather_seconds = time.perf_counter() - start_time - seconds["generate"] - seconds["verify"]
        self.seconds = {**seconds, "gather": max(0.0, gather_seconds), "idle": outcome.idle}
        return self._take_groups(outcome, known or outcome.prompts), {**outcome.stats}, outcome.errors

    def _take_groups(self, outcome: m.RolloutOutcome, prompts: Sequence[Prompt]) -> list[SampleGroup]:
        """Return the groups, with this rank's tokens."""
        data_by_id = {i: sample.data for i, sample in self.worker.graded.items() if sample.data is not None}
        columns = zip(prompts, outcome.samples, outcome.policy_versions, strict=True)
        return [SampleGroup(*group_columns).with_data(data_by_id) for group_columns in columns]

    async def _serve(self, decide: Decide) -> StepGroups | MegarlError | None:
        """Run this rank's worker, on rank 0 also `decide`."""
        if self.controller is None:
            await self.worker.serve(self.link)
            return None
        worker_task = asyncio.create_task(self.worker.serve(self.link))
        decision_task = asyncio.create_task(decide_and_end(self.controller, decide))
        try:
            await asyncio.gather(worker_task, decision_task)
        finally:
            for task in (worker_task, decision_task):
                task.cancel()
        return decision_task.result()

    def _make_outcome(
        self, groups: list[SampleGroup], stats: dict[str, float], errors: dict[str, int], *, known: bool
    ) -> m.RolloutOutcome:
        assert self.controller is not None
        prompts = [
            Prompt(group.prompt.uid, "", group.prompt.tokens, "", group.prompt.source)
            for group in (() if known else groups)
        ]
        samples = [group.with_data({}).samples for group in groups]
        versions = [group.policy_version for group in groups]
        idle = self.controller.dispatcher.idle_seconds
        return m.RolloutOutcome(prompts, samples, versions, {**stats}, errors, self.worker.seconds, idle)

    def next_order(self, seconds: float) -> m.Order | None:
        """Return the trainers' next order, on every rank; None after `seconds`."""

        async def wait() -> m.Order | None:
            if self.controller is not None:
                return await self.controller.next_order(seconds)
            message = await self.link.receive(seconds)
            return message if isinstance(message, m.Order) else None

        order: m.Order | None = self._run(wait())
        return order

    def answer(self, message: m.Message) -> None:
        if self.controller is not None:
            self._run(self.controller.hub.send(m.TRAINER, message))

    def snapshot(self) -> dict[str, Any]:
        """Return references to this rank's state, for `join_shares`."""
        controller, worker = self.controller, self.worker
        graded, partials = {i: sample.data for i, sample in worker.graded.items()}, dict(worker.partials)
        if self.config.schedule.in_flight != "none":  # without tokens: batches follow each other closely
            graded, partials = {}, {}
        if controller is None:
            return {
                "graded": {i: data and pack_journal(data) for i, data in graded.items()},
                "partials": {i: pack_journal(data) for i, data in partials.items()},
            }
        surplus, returned = list(controller.surplus), list(controller.returned)
        if isinstance(controller, InFlightController):
            surplus, returned = [], controller.pending_requests()
        return {
            "graded": graded,
            "partials": partials,
            "surplus": surplus,
            "returned": returned,
            "lengths": dict(controller.lengths),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `join_shares`, with any number of engines."""
        ranks_per_engine, worker = self.config.rollout.engine_tp, self.worker
        loaded_state = load_state(state, worker.rank, self.ranks.world // ranks_per_engine, ranks_per_engine)
        worker.graded, worker.partials = loaded_state.graded, loaded_state.partials
        if (controller := self.controller) is not None:
            controller.surplus, controller.returned = loaded_state.surplus, loaded_state.returned
            controller.next_id, controller.lengths = loaded_state.next_id, loaded_state.lengths

    def close(self) -> None:
        if self._loop.is_closed():
            return

        async def end() -> None:
            self.link.close()
            await self.worker.runner.disconnect()
            if self.controller is not None:
                self.controller.hub.close()

        self._run(end())
        self.worker.runner.close()
        self.worker.threads.shutdown()
        self._context.term()
        self._loop.close()


def make_evaluation_params(config: Config) -> SamplingParams:
    evaluation, rollout = config.evaluation, config.rollout
    return SamplingParams(
        rollout.max_response_tokens, evaluation.temperature, evaluation.top_p, 0, rollout.stop
    )


def make_evaluation_requests(sets: Sequence[ProblemSet], seed: int) -> list[GroupRequest]:
    """Return a request per problem. A problem that occurs again gets further seeds."""
    requests = []
    for problem_set in sets:
        k, times_sampled = problem_set.samples, Counter[int]()
        for problem in problem_set.problems:
            first_index = times_sampled[problem.uid] * k
            seeds = [evaluation_seed(seed, problem.uid, first_index + i) for i in range(k)]
            requests.append(GroupRequest(problem, seeds))
            times_sampled[problem.uid] += 1
    return requests


def make_teacher_prompts(
    config: Config, groups: Sequence[SampleGroup], tokenizer: Any, ranks: Ranks
) -> Tensor:
    """Return the teacher's prompt of each response, which rank 0 makes: others lack the texts."""
    prompts = list[list[int]]()
    if ranks.rank == 0:
        # One token more than allowed shows that a prompt is too long.
        limit = config.teacher.max_context_tokens + 1
        prompts = [make_teacher_prompt(group.prompt, config.teacher, tokenizer)[:limit] for group in groups]
    prompts = broadcast_from_rank_0(ranks, prompts, list[list[int]])
    sizes = [len(group.samples) for group in groups]
    return pad_teacher_prompts(prompts).repeat_interleave(torch.tensor(sizes), 0)


def get_controller_class(config: Config) -> type[Controller]:
    if config.schedule.in_flight != "none":
        return InFlightController
    return WindowController if config.rollout.window is not None else Controller


async def decide_and_end(controller: Controller, decide: Decide) -> StepGroups | MegarlError:
    groups: list[SampleGroup] = []
    try:
        groups, metrics, error_counts = await decide(controller)
    except MegarlError as error:
        return error
    finally:
        await controller.end(groups)
    return groups, metrics, error_counts
