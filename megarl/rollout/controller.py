"""The controller: samples prompts on engines until a step has enough groups."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby

from megarl.config import errors
from megarl.config.errors import EngineError, WaitTimeout
from megarl.config.schema import Config, RolloutConfig
from megarl.data.prompts import Prompt
from megarl.data.sample import Sample, SampleGroup
from megarl.rollout import messages as m
from megarl.rollout.collector import GroupCollector
from megarl.rollout.metrics import compute_step_metrics
from megarl.rollout.sampling import SamplingParams, response_seed

TakePrompts = Callable[[int], Sequence[Prompt]]
StepGroups = tuple[list[SampleGroup], dict[str, float], dict[str, int]]  # groups, metrics, errors
PRIOR = 8  # finished responses credited to each engine: early speeds vary


@dataclass
class GroupRequest:
    prompt: Prompt
    seeds: Sequence[int]
    expected: float = 0.0  # mean tokens of the prompt's previous group; 0: unknown
    first_id: int | None = None
    engine_by_response: Sequence[int | None] = ()  # None: no tokens are kept

    @property
    def partials(self) -> list[tuple[int, int]]:
        if self.first_id is None:
            return []
        engines = enumerate(self.engine_by_response)
        return [(engine, self.first_id + i) for i, engine in engines if engine is not None]


@dataclass
class Slot:
    request: GroupRequest
    id: int
    index: int
    engine: int | None = None
    sample: Sample | None = None


@dataclass
class EngineLoad:
    servers: int = 1
    queue: list[Slot] = field(default_factory=list)
    waiting_for_tool: int = 0
    finished: int = 0
    newly_finished: int = 0  # by the newest messages
    busy_seconds: float = 0.0


class Controller:
    """Runs rollouts by messages to workers, on the first engine rank.

    With continuous batching, prompts start while groups are missing. Then the rest is aborted, and comes
    first in the next step."""

    def __init__(self, config: Config, hub: m.Hub, ranks: int, take_prompts: TakePrompts) -> None:
        self.config, self.hub, self.take_prompts = config, hub, take_prompts
        self.continuous_batching = config.rollout.capabilities.continuous_batching
        self.ranks_per_engine = config.rollout.engine_tp
        self.engines = ranks // self.ranks_per_engine
        self.surplus: list[SampleGroup] = []
        self.returned: list[GroupRequest] = []
        self.lengths: dict[int, float] = {}  # by uid: GroupRequest.expected
        self.orders: list[m.Order] = []
        self.orders_underway = 0  # passed on to workers, and not followed yet by the first one
        self.newest_transfer = -1  # version of the last transfer that was passed on
        self.next_id = 1
        self.start_rollout(SamplingParams(0))

    def start_rollout(self, params: SamplingParams, *, terms: bool = True, window: int = 0) -> None:
        """Reset the state of one rollout."""
        self._params, self._terms, self._window = params, terms, window
        self.dispatcher = Dispatcher(self.config, self.engines)
        self._times_sampled: Counter[int] = Counter()
        self._answers: list[m.SamplesAborted | m.TokenDataReply] = []
        self._is_aborting = False
        self._failures: dict[int, str] = {}
        self.hub.reset_silence()

    async def collect(self, step: int) -> StepGroups:
        """Collect `rollout.prompts` groups for a step.

        Metrics include rejected groups, to show the policy's accuracy."""
        rollout = self.config.rollout
        self.start_rollout(make_sampling_params(rollout, step))
        collector = GroupCollector(rollout.prompts, rollout.dynamic_sampling, self.surplus)
        while requests := self._next_requests(step, collector):
            await self.dispatch(requests)
            while self.dispatcher.slots:
                await self.handle_messages()
                while groups := self.dispatcher.take_groups(
                    collector.missing if self.continuous_batching else None
                ):
                    collector.offer(groups)
                if self.continuous_batching and collector.missing:
                    await self.dispatch(self._next_requests(step, collector))
                elif self.continuous_batching:
                    self.returned = await self._abort() + self.returned
        return self._finish_step(collector)

    def _finish_step(self, collector: GroupCollector) -> StepGroups:
        for group in collector.offered:
            lengths = [r.num_sampled for r in group.samples]
            self.lengths[group.prompt.uid] = sum(lengths) / len(lengths)
        groups, self.surplus = collector.result()
        stats = collector.stats() | {"rollout/moved": self.dispatcher.rebalanced}
        metric_groups = collector.offered or groups
        metrics, error_counts = compute_step_metrics(metric_groups, self.config.reward.max_ungraded)
        return groups, stats | metrics, error_counts

    def _next_requests(self, step: int, collector: GroupCollector) -> list[GroupRequest]:
        if not self.continuous_batching:
            return self.take_requests(collector.next_batch(), step)
        groups = [group for _, group in self.dispatcher.groups()]
        complete_groups = [group for group in groups if group is not None]
        return self.take_requests(collector.refill(complete_groups, len(groups) - len(complete_groups)), step)

    def take_requests(self, prompts: int, step: int) -> list[GroupRequest]:
        """Return the next requests, aborted ones first. Repeated prompts get other seeds."""
        requests, self.returned = self.returned[:prompts], self.returned[prompts:]
        if len(requests) < prompts:
            requests += [GroupRequest(prompt, ()) for prompt in self.take_prompts(prompts - len(requests))]
        group_size = self.config.rollout.group_size
        for i, request in enumerate(requests):
            uid, seeds = request.prompt.uid, request.seeds
            if request.first_id is None:
                first_index = self._times_sampled[uid] * group_size
                seeds = [
                    response_seed(self.config.seed, step, uid, first_index + j) for j in range(group_size)
                ]
            requests[i] = replace(request, seeds=seeds, expected=self.lengths.get(uid, 0.0))
            self._times_sampled[uid] += 1
        return requests

    async def generate(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[SampleGroup]:
        self.start_rollout(params, terms=False)
        await self.dispatch(requests)
        return await self.wait_for_groups()

    async def wait_for_groups(self) -> list[SampleGroup]:
        while any(slot.sample is None for slot in self.dispatcher.slots.values()):
            await self.handle_messages()
        return self.dispatcher.take_groups()

    async def dispatch(self, requests: Sequence[GroupRequest]) -> None:
        numbered_requests = []
        for request in requests:
            if request.first_id is None:
                request = replace(request, first_id=self.next_id)
                self.next_id += len(request.seeds)
            numbered_requests.append(request)
        continued_slots = self.dispatcher.add(numbered_requests)
        for engine, slots in enumerate(self.dispatcher.assign()):
            await self._start(engine, [*continued_slots[engine], *slots])

    async def _start(self, engine: int, slots: Sequence[Slot]) -> None:
        if not slots:
            return
        prompts = {id(slot.request.prompt): slot.request.prompt for slot in slots}
        positions = {key: i for i, key in enumerate(prompts)}
        is_multi_turn = self.config.rollout.is_multi_turn
        message = m.StartSamples(
            self._params,
            self._terms,
            self._window,
            [m.pack_prompt(prompt, whole=is_multi_turn) for prompt in prompts.values()],
            [
                (slot.id, positions[id(slot.request.prompt)], slot.index, slot.request.seeds[slot.index])
                for slot in slots
            ],
        )
        await self.hub.send(engine * self.ranks_per_engine, message)

    async def handle_messages(self) -> None:
        """Act on messages and start responses. Raises ranks' errors except EngineFailure."""
        messages = await self.hub.receive(m.KEEP_ALIVE_SECONDS)
        for load in self.dispatcher.engines:
            load.newly_finished = 0
        for rank, message in messages:
            engine = rank // self.ranks_per_engine
            match message:
                case m.SamplesFinished(version, samples, busy_seconds):
                    self.dispatcher.finish(engine, version, samples, busy_seconds)
                case m.ToolWaitCount(count):
                    self.dispatcher.engines[engine].waiting_for_tool = count
                case m.RankFailed("EngineFailure", text, version):
                    if version >= self.newest_transfer:  # else that transfer restarts the engine
                        self._failures[rank] = text
                case m.RankFailed(error, text):
                    raise errors.error_class(error)(text)
                case m.SamplesAborted() | m.TokenDataReply():
                    self._answers.append(message)
                case _ if isinstance(message, m.Order):
                    self.orders.append(message)
        await self.hub.keep_alive()
        if (silent_rank := self.hub.find_silent_rank(self.config.parallel.timeout)) is not None:
            raise WaitTimeout(self._describe_silence(silent_rank))
        if self._is_aborting:
            return
        await self._recover()
        if messages:
            await self.dispatch([])

    async def _recover(self) -> None:
        failures, self._failures = sorted(self._failures.items()), {}
        if failures:
            await self.hub.send_all(m.RestartEngines(failures))

    def _describe_silence(self, rank: int) -> str:
        engine = rank // self.ranks_per_engine
        what = "it has no response to generate"
        for slot in self.dispatcher.slots.values():
            if slot.engine == engine and slot.sample is None:
                uid = slot.request.prompt.uid
                what = f"its first running response is number {slot.index} to prompt {uid}"
                break
        silence = f"has sent nothing for {self.config.parallel.timeout:g} s (parallel.timeout)"
        return f"rollout: {m.rank_name(rank)} {silence}; {what}"

    async def _ask(self, questions: Mapping[int, m.Message]) -> list[m.SamplesAborted | m.TokenDataReply]:
        self._answers = []
        for engine, question in questions.items():
            await self.hub.send(engine * self.ranks_per_engine, question)
        while len(self._answers) < len(questions):
            await self.handle_messages()
        return self._answers

    async def _abort(self) -> list[GroupRequest]:
        """Abort all responses. Return requests whose groups were not taken, in order."""
        keep_partials, self._is_aborting = self.config.rollout.continue_partial, True
        ids_by_engine: dict[int, list[int]] = {}
        for slot in self.dispatcher.slots.values():
            if slot.engine is not None and (keep_partials or slot.sample is None):
                ids_by_engine.setdefault(slot.engine, []).extend([slot.id] if keep_partials else [])
        # Engines drop the tokens of samples that are not listed.
        for engine, sample_id in chain.from_iterable(request.partials for request in self.returned):
            ids_by_engine.setdefault(engine, []).append(sample_id)
        answers = await self._ask({engine: m.AbortSamples(ids) for engine, ids in ids_by_engine.items()})
        kept_ids = {i for answer in answers if isinstance(answer, m.SamplesAborted) for i in answer.ids}
        self._is_aborting = False
        await self._recover()
        requests = []
        for request, _ in self.dispatcher.groups():
            if not keep_partials:
                requests.append(GroupRequest(request.prompt, request.seeds))
                continue
            assert request.first_id is not None
            ids = range(request.first_id, request.first_id + len(request.seeds))
            engines = [self.dispatcher.slots[i].engine if i in kept_ids else None for i in ids]
            requests.append(replace(request, engine_by_response=engines))
        self.dispatcher.clear()  # `fetch` handles messages too, and must not start waiting responses
        return requests

    async def fetch(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        ids_by_engine: dict[int, list[int]] = {}
        for sample in (sample for group in groups for sample in group.samples):
            ids_by_engine.setdefault(sample.owner // self.ranks_per_engine, []).append(sample.id)
        answers = await self._ask({engine: m.SendTokenData(ids) for engine, ids in ids_by_engine.items()})
        items = [answer.data.items() for answer in answers if isinstance(answer, m.TokenDataReply)]
        data_by_id = dict(chain.from_iterable(items))
        return [group.with_data(data_by_id) for group in groups]

    async def end(self, groups: Sequence[SampleGroup]) -> None:
        ids_by_rank: dict[int, list[int]] = {}
        for sample in (sample for group in (*groups, *self.surplus) for sample in group.samples):
            ids_by_rank.setdefault(sample.owner, []).append(sample.id)
        for engine, sample_id in chain.from_iterable(request.partials for request in self.returned):
            ids_by_rank.setdefault(engine * self.ranks_per_engine, []).append(sample_id)
        for rank in range(self.engines * self.ranks_per_engine):
            await self.hub.send(rank, m.EndRollout(ids_by_rank.get(rank, [])))

    async def next_order(self, seconds: float) -> m.Order | None:
        """Wait for the trainers' next order, and forward it to other ranks."""
        if not self.orders:
            messages = await self.hub.receive(seconds)
            self.orders += [message for _, message in messages if isinstance(message, m.Order)]
        if not self.orders:
            return None
        order = self.orders.pop(0)
        for rank in range(1, self.engines * self.ranks_per_engine):
            await self.hub.send(rank, order)
        return order


class Dispatcher:
    """The controller's tables of responses and engines."""

    def __init__(self, config: Config, engines: int) -> None:
        rollout = config.rollout
        self.slots: dict[int, Slot] = {}
        self.version = -1
        self.engines = [EngineLoad(len(rollout.urls[e::engines]) or 1) for e in range(engines)]
        self.rebalanced = 0  # responses on unplanned engines
        self.weights_change = config.schedule.in_flight != "none"
        limit = rollout.max_batch if rollout.in_flight is None else rollout.in_flight
        self._limit = math.inf if not limit or engines == 1 else float(limit)  # 0 means no limit

    @property
    def idle_seconds(self) -> float:
        """Return the busiest engine's busy_seconds minus the mean."""
        busy_seconds = [engine.busy_seconds for engine in self.engines]
        return max(busy_seconds) - sum(busy_seconds) / len(busy_seconds)

    def add(self, requests: Sequence[GroupRequest]) -> list[list[Slot]]:
        """Plan the engines of new requests. Return continued slots by engine.

        A partial response continues where its tokens are. New slots are divided in the prompts' order, so
        that few engines prefill the same prompt."""
        new_slots: list[Slot] = []
        continued_slots: list[list[Slot]] = [[] for _ in self.engines]
        for request in requests:
            assert request.first_id is not None
            for i, e in enumerate(request.engine_by_response or [None] * len(request.seeds)):
                slot = self.slots[request.first_id + i] = Slot(request, request.first_id + i, i, e)
                (new_slots if e is None else continued_slots[e]).append(slot)
        engines, count = len(self.engines), len(new_slots)
        for e, engine in enumerate(self.engines):
            share = new_slots[e * count // engines : (e + 1) * count // engines]
            engine.queue += sorted(share, key=lambda slot: -slot.request.expected)
        return continued_slots

    def assign(self) -> list[list[Slot]]:
        """Assign waiting responses to engines with room. Return them by engine.

        Newly finished ones add room, so that no engine runs dry between messages."""
        unfinished_by_engine = Counter(slot.engine for slot in self.slots.values() if slot.sample is None)
        running = [
            max(0, unfinished_by_engine[e] - engine.waiting_for_tool) for e, engine in enumerate(self.engines)
        ]
        limits = [self._limit * engine.servers + engine.newly_finished for engine in self.engines]
        queues = [[slot.id for slot in engine.queue] for engine in self.engines]
        shares = share_out(queues, running, limits, [engine.finished for engine in self.engines])
        for e, (queue, share) in enumerate(zip(queues, shares, strict=True)):
            self.rebalanced += len(set(share).difference(queue))
            for i in share:
                self.slots[i].engine = e
        for engine in self.engines:
            engine.queue = [slot for slot in engine.queue if slot.engine is None]
        return [[self.slots[i] for i in share] for share in shares]

    def finish(self, engine: int, version: int, samples: Sequence[Sample], busy_seconds: float) -> None:
        """Record samples. Raises EngineError if engines have different weights."""
        if self.version not in (-1, version) and not self.weights_change:
            problem = f"different weight versions: {sorted((self.version, version))}"
            raise EngineError(f"rollout: the ranks' engines have {problem}")
        self.version = version
        load = self.engines[engine]
        load.newly_finished += len(samples)
        load.finished += len(samples)
        load.busy_seconds = busy_seconds
        for sample in samples:
            self.slots[sample.id].sample = sample

    def groups(self) -> Iterator[tuple[GroupRequest, SampleGroup | None]]:
        """Yield each request and its group; None if incomplete."""
        for _, request_slots in groupby(self.slots.values(), key=lambda slot: slot.request.first_id):
            slots = list(request_slots)
            samples = [slot.sample for slot in slots if slot.sample is not None]
            request, is_complete = slots[0].request, len(samples) == len(slots)
            yield request, SampleGroup(request.prompt, samples, self.version) if is_complete else None

    def take_groups(self, most: int | None = None, *, in_order: bool = True) -> list[SampleGroup]:
        """Take complete groups. in_order: only those before the first incomplete one"""
        groups: list[SampleGroup] = []
        for _, group in self.groups():
            if len(groups) == most or (in_order and group is None):
                break
            if group is not None:
                groups.append(group)
        for sample in (sample for group in groups for sample in group.samples):
            del self.slots[sample.id]
        return groups

    @property
    def num_groups(self) -> int:
        return len({slot.request.first_id for slot in self.slots.values()})

    def clear(self) -> None:
        self.slots.clear()
        for engine in self.engines:
            engine.queue.clear()


def share_out(
    queues: Sequence[Sequence[int]], running: Sequence[int], limits: Sequence[float], finished: Sequence[int]
) -> list[list[int]]:
    """Return the waiting responses that each engine starts now.

    A response goes to the engine that would run dry first at its speed. An engine takes from the front of
    its queue, then from the end of the longest one, whose neighbours may share a prompt.

    limits: most responses at once; finished: a measure of speed"""
    speeds = [PRIOR + count for count in finished]
    counts = [0] * len(queues)
    # At equal times, non-empty queues come first.
    heap = [
        (n / speed, not queue, e)
        for e, (n, speed, queue) in enumerate(zip(running, speeds, queues, strict=True))
    ]
    heapq.heapify(heap)
    num_waiting = sum(map(len, queues))
    while num_waiting and heap:
        _, _, e = heapq.heappop(heap)
        if running[e] + counts[e] >= limits[e]:
            continue
        counts[e] += 1
        num_waiting -= 1
        is_exhausted = counts[e] >= len(queues[e])
        heapq.heappush(heap, ((running[e] + counts[e]) / speeds[e], is_exhausted, e))
    shares = [list(queue[:count]) for queue, count in zip(queues, counts, strict=True)]
    remaining_queues = [list(queue[count:]) for queue, count in zip(queues, counts, strict=True)]
    for share, count in zip(shares, counts, strict=True):
        while len(share) < count:
            longest_queue = max(remaining_queues, key=len)
            missing = min(count - len(share), len(longest_queue))
            share += longest_queue[-missing:]
            del longest_queue[-missing:]
    return shares


def make_sampling_params(rollout: RolloutConfig, step: int) -> SamplingParams:
    # Value pretraining (steps below 0) trains no policy, so nothing replays routing or sampling sets.
    return SamplingParams(
        *(rollout.max_response_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.stop),
        routing=rollout.routing_replay and step > 0,
        sampling_sets=rollout.sampling_replay and step > 0,
    )
