"""The controller: decides which prompts are sampled, on which engine, and when a step has enough groups.

It runs on the first rank with an engine, beside that rank's worker (worker.py), and talks to all workers by
messages (messages.py). dispatch.py has its table of responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from megarl.config import errors
from megarl.config.errors import ConfigError, WaitTimeout
from megarl.config.schema import Config, RolloutConfig
from megarl.data.prompts import Prompt
from megarl.data.sample import SampleGroup
from megarl.rollout import messages as m
from megarl.rollout.collector import GroupCollector
from megarl.rollout.dispatch import Dispatcher, GroupRequest, Slot
from megarl.rollout.responses import length_error, response_stats, source_stats
from megarl.rollout.sampling import SamplingParams, response_seed

DrawPrompts = Callable[[int], Sequence[Prompt]]
StepGroups = tuple[list[SampleGroup], dict[str, float], dict[str, int]]  # groups, metrics, errors


class Controller:
    """Runs rollouts from what workers report.

    With continuous batching, prompts are sampled ahead while groups are missing, and the rest is aborted once
    there are enough. Aborted prompts come first in the next step; with `rollout.continue_partial` their
    responses continue.

    ranks      ranks with engines; `rollout.engine_tp` of them make one engine
    draw       returns the next n prompts of the training data
    surplus    accepted groups that the next step trains on
    returned   requests that the next step samples first
    lengths    mean response length of each prompt's newest group, tokens, by uid
    next_id    id of the next sample
    orders     orders of the trainers that wait
    """

    def __init__(self, config: Config, hub: m.Hub, ranks: int, draw: DrawPrompts) -> None:
        self.config, self.hub, self.draw = config, hub, draw
        self.continuous_batching = config.rollout.capabilities.continuous_batching
        self.ranks_per_engine = config.rollout.engine_tp
        self.engines = ranks // self.ranks_per_engine
        self.surplus: list[SampleGroup] = []
        self.returned: list[GroupRequest] = []
        self.lengths: dict[int, float] = {}
        self.orders: list[m.Order] = []
        self.next_id = 1
        self.start_rollout(SamplingParams(0))

    def start_rollout(self, params: SamplingParams, *, terms: bool = True, window: int = 0) -> None:
        """Forget the rollout before.

        terms: whether rewards include `reward.terms`; window: most new tokens of a response; 0: no limit"""
        self._params, self._terms, self._window = params, terms, window
        self.dispatcher = Dispatcher(self.config, self.engines)
        self._times_sampled: Counter[int] = Counter()  # prompts of this rollout, by uid
        self._answers: list[m.SamplesAborted | m.TokenDataReply] = []
        self._is_aborting = False
        self._failures: dict[int, str] = {}  # of engines, by rank
        self.hub.reset_silence()

    async def collect(self, step: int) -> StepGroups:
        """Collect `rollout.prompts` groups for a step. Return them, metrics, and the verifiers' errors.

        reward/*, response/* and reflection/* count all responses of the step, whether dynamic sampling
        accepts their groups or not, so that they show the policy's accuracy.

        Raises DataError at the limit of generation batches where the configuration says so, and the errors
        of engines and verifiers."""
        rollout = self.config.rollout
        self.start_rollout(sampling_params(rollout, step))
        collector = GroupCollector(rollout.prompts, rollout.dynamic_sampling, self.surplus)
        while requests := self._next_requests(step, collector):
            await self.dispatch(requests)
            while self.dispatcher.slots:
                await self.handle_messages()
                self._offer_groups(collector)
                if self.continuous_batching and collector.missing:
                    await self.dispatch(self._next_requests(step, collector))
                elif self.continuous_batching:
                    self.returned = await self._abort() + self.returned
        for group in collector.offered:
            lengths = [r.num_sampled for r in group.samples]
            self.lengths[group.prompt.uid] = sum(lengths) / len(lengths)
        groups, self.surplus = collector.result()
        # Nothing was offered where the surplus of the step before was enough.
        stats = collector.stats() | {"rollout/moved": self.dispatcher.rebalanced}
        return with_metrics(groups, collector.offered or groups, stats, self.config.reward.max_unjudged)

    def _offer_groups(self, collector: GroupCollector) -> None:
        """Offer complete groups. The collector may reject some, so it may take more than it misses."""
        while groups := self.dispatcher.take_groups(collector.missing if self.continuous_batching else None):
            collector.offer(groups)

    def _next_requests(self, step: int, collector: GroupCollector) -> list[GroupRequest]:
        """Return requests for as many further prompts as the collector wants."""
        if not self.continuous_batching:
            return self.take_requests(collector.next_batch(), step)
        groups = [group for _, group in self.dispatcher.groups()]
        complete = [group for group in groups if group is not None]
        return self.take_requests(collector.refill(complete, len(groups) - len(complete)), step)

    def take_requests(self, prompts: int, step: int) -> list[GroupRequest]:
        """Return requests for the next prompts: first those that an earlier step returned. A prompt drawn
        again in one step gets further seeds."""
        requests, self.returned = self.returned[:prompts], self.returned[prompts:]
        if len(requests) < prompts:
            requests += [GroupRequest(prompt, ()) for prompt in self.draw(prompts - len(requests))]
        size = self.config.rollout.group_size
        for i, request in enumerate(requests):
            uid, seeds = request.prompt.uid, request.seeds
            if request.first is None:
                first = self._times_sampled[uid] * size
                seeds = [response_seed(self.config.seed, step, uid, first + j) for j in range(size)]
            requests[i] = replace(request, seeds=seeds, expected=self.lengths.get(uid, 0.0))
            self._times_sampled[uid] += 1
        return requests

    async def generate(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[SampleGroup]:
        """Return one group per request, in their order, without the terms of the reward."""
        self.start_rollout(params, terms=False)
        await self.dispatch(requests)
        return await self.finished_groups()

    async def finished_groups(self) -> list[SampleGroup]:
        """Wait for all responses and return their groups."""
        while any(slot.sample is None for slot in self.dispatcher.slots.values()):
            await self.handle_messages()
        return self.dispatcher.take_groups()

    async def dispatch(self, requests: Sequence[GroupRequest]) -> None:
        """Add requests, number their responses, and start those that have room on an engine."""
        numbered = []
        for request in requests:
            if request.first is None:
                request = replace(request, first=self.next_id)
                self.next_id += len(request.seeds)
            numbered.append(request)
        continued = self.dispatcher.add(numbered)
        for engine, slots in enumerate(self.dispatcher.assign()):
            await self._start(engine, [*continued[engine], *slots])

    async def _start(self, engine: int, slots: Sequence[Slot]) -> None:
        """Have an engine's leader start responses. Each prompt is sent once."""
        if not slots:
            return
        prompts = {id(slot.request.prompt): slot.request.prompt for slot in slots}
        place = {key: i for i, key in enumerate(prompts)}
        whole = self.config.rollout.acts
        message = m.StartSamples(
            self._params,
            self._terms,
            self._window,
            [m.pack_prompt(prompt, whole=whole) for prompt in prompts.values()],
            [
                (slot.id, place[id(slot.request.prompt)], slot.index, slot.request.seeds[slot.index])
                for slot in slots
            ],
        )
        await self._send(engine, message)

    async def _send(self, engine: int, message: m.Message) -> None:
        await self.hub.send(engine * self.ranks_per_engine, message)

    async def handle_messages(self) -> None:
        """Wait for messages and act on each. Note results and answers, have all ranks with engines recover
        from a failure of one, and give engines with room more work (not while aborting). Raises the error of
        any rank."""
        messages = await self.hub.receive(m.KEEP_ALIVE_SECONDS)
        for load in self.dispatcher.engines:
            load.newly_finished = 0
        for rank, message in messages:
            engine = rank // self.ranks_per_engine
            match message:
                case m.SamplesFinished(version, samples, busy):
                    self.dispatcher.finish(engine, version, samples, busy)
                case m.ToolWaitCount(count):
                    self.dispatcher.engines[engine].waiting_for_tool = count
                case m.RankFailed("EngineFailure", text):
                    self._failures[rank] = text
                case m.RankFailed(error, text):
                    raise errors.error_class(error)(text)
                case m.SamplesAborted() | m.TokenDataReply():
                    self._answers.append(message)
                case _ if isinstance(message, m.Order):
                    self.orders.append(message)
        await self.hub.keep_alive()
        if (silent := self.hub.find_silent_rank(self.config.parallel.timeout)) is not None:
            raise WaitTimeout(self._silence(silent))
        if self._is_aborting:
            return
        await self._recover()
        if messages:
            await self.dispatch([])

    async def _recover(self) -> None:
        """Have all ranks with engines start those again that have failed."""
        failures, self._failures = sorted(self._failures.items()), {}
        if failures:
            await self.hub.send_all(m.RestartEngines(failures))

    def _silence(self, rank: int) -> str:
        """Return an error message about a rank that sends nothing."""
        limit = f"has said nothing for {self.config.parallel.timeout:g} s (parallel.timeout)"
        what = "it has no response to draw"
        engine = rank // self.ranks_per_engine
        slot = next((one for one in self.dispatcher.slots.values() if one.is_running_on(engine)), None)
        if slot is not None:
            uid = slot.request.prompt.uid
            what = f"the first that it draws is response number {slot.index} to prompt {uid}"
        return f"rollout: {m.rank_name(rank)} {limit}; {what}"

    async def _ask(self, questions: Mapping[int, m.Message]) -> list[m.SamplesAborted | m.TokenDataReply]:
        """Return the answers of engines' leaders to what each is asked."""
        self._answers = []
        for engine, question in questions.items():
            await self._send(engine, question)
        while len(self._answers) < len(questions):
            await self.handle_messages()
        return self._answers

    async def _abort(self) -> list[GroupRequest]:
        """Abort what runs. Return the requests that were not taken, in their order; with
        `rollout.continue_partial` they continue where they are."""
        keep, self._is_aborting = self.config.rollout.continue_partial, True
        wanted: dict[int, list[int]] = {}
        for slot in self.dispatcher.slots.values():
            if slot.engine is not None and (keep or slot.sample is None):
                wanted.setdefault(slot.engine, []).extend([slot.id] if keep else [])
        for engine, number in held_partials(self.returned):  # it drops what is not named
            wanted.setdefault(engine, []).append(number)
        answers = await self._ask({engine: m.AbortSamples(numbers) for engine, numbers in wanted.items()})
        held = {number for answer in answers if isinstance(answer, m.SamplesAborted) for number in answer.ids}
        self._is_aborting = False
        await self._recover()
        returned = []
        for request, _ in self.dispatcher.groups():
            if not keep:
                returned.append(GroupRequest(request.prompt, request.seeds))
                continue
            assert request.first is not None
            numbers = range(request.first, request.first + len(request.seeds))
            holders = [self.dispatcher.slots[n].engine if n in held else None for n in numbers]
            returned.append(GroupRequest(request.prompt, request.seeds, first=request.first, holders=holders))
        self.dispatcher.clear()  # `fetch` handles messages too, and must not start responses that wait
        return returned

    async def fetch(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """Return the groups with the tokens of all their samples."""
        wanted: dict[int, list[int]] = {}
        for sample in (sample for group in groups for sample in group.samples):
            wanted.setdefault(sample.owner // self.ranks_per_engine, []).append(sample.id)
        answers = await self._ask({engine: m.SendTokenData(ids) for engine, ids in wanted.items()})
        replies = [answer.data.items() for answer in answers if isinstance(answer, m.TokenDataReply)]
        data_by_id = dict(chain.from_iterable(replies))
        return [group.with_data(data_by_id) for group in groups]

    async def end(self, groups: Sequence[SampleGroup]) -> None:
        """End the rollout on all ranks. They keep the tokens of `groups` and those of the next step."""
        keep: dict[int, list[int]] = {}
        for sample in (sample for group in (*groups, *self.surplus) for sample in group.samples):
            keep.setdefault(sample.owner, []).append(sample.id)
        for engine, sample_id in held_partials(self.returned):
            keep.setdefault(engine * self.ranks_per_engine, []).append(sample_id)
        for rank in range(self.engines * self.ranks_per_engine):
            await self.hub.send(rank, m.EndRollout(keep.get(rank, [])))

    async def next_order(self, seconds: float) -> m.Order | None:
        """Return the trainers' next order, within `seconds`, and pass it on to the other ranks."""
        if not self.orders:
            said = await self.hub.receive(seconds)
            self.orders += [message for _, message in said if isinstance(message, m.Order)]
        if not self.orders:
            return None
        order = self.orders.pop(0)
        for rank in range(1, self.engines * self.ranks_per_engine):
            await self.hub.send(rank, order)
        return order


def sampling_params(rollout: RolloutConfig, step: int) -> SamplingParams:
    """Return how the responses of a step are sampled."""
    # No policy is trained in value pretraining (steps below 0), so nothing replays the engine's routing.
    return SamplingParams(
        *(rollout.max_response_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.stop),
        routing=rollout.routing_replay and step > 0,
    )


def held_partials(requests: Sequence[GroupRequest]) -> list[tuple[int, int]]:
    """Return the engine and the id of each partial sample that continues with these requests."""
    return [
        (holder, request.first + i)
        for request in requests
        if request.first is not None
        for i, holder in enumerate(request.holders)
        if holder is not None
    ]


def with_metrics(
    groups: list[SampleGroup],
    counted: Sequence[SampleGroup],
    stats: Mapping[str, float],
    max_unjudged: float,
) -> StepGroups:
    """Return a step's groups, metrics with those of the finished responses of `counted`, and errors.

    Raises ConfigError where more than the share `max_unjudged` of them has no verdict."""
    finished = [
        replace(group, samples=finished_samples)
        for group in counted
        if (finished_samples := [sample for sample in group.samples if not sample.is_partial])
    ]
    responses = [r for group in finished for r in group.samples]
    unjudged = [r.error for r in responses if not r.judged]
    if len(unjudged) > max_unjudged * len(responses):
        share = f"{len(unjudged)} of {len(responses)} responses of a step were not judged"
        raise ConfigError(f"reward.max_unjudged: {share}, more than {max_unjudged:g} of them: {unjudged[0]}")
    all_stats = {
        **stats,
        **(response_stats(responses) if responses else {}),
        **length_error(finished),
        **source_stats(finished),
    }
    errors_found = Counter(r.error for r in responses if r.error is not None)
    return groups, all_stats, dict(errors_found)
