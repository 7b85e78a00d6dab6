"""The controller of rollouts: the only place that decides what is drawn, where, what is accepted, and when it
is enough. It runs on the first rank that has an engine, beside that rank's worker (worker.py), and talks to
all workers by messages (messages.py)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from megarl.config import errors
from megarl.config.errors import ConfigError, EngineError, WaitTimeout
from megarl.config.schema import Config
from megarl.data.prompts import Prompt
from megarl.rollout import messages as m
from megarl.rollout.balance import share_out
from megarl.rollout.collector import GroupCollector
from megarl.rollout.responses import (
    Body,
    Group,
    Response,
    RolloutBatch,
    length_error,
    response_stats,
    source_stats,
)
from megarl.rollout.sampling import SamplingParams, response_seed


@dataclass
class GroupRequest:
    """A prompt, and a seed for each of its responses.

    expected  mean length of the prompt's newest group, tokens; the longest begin first; 0: not known
    first     the number of its first response, where an earlier rollout has given them numbers
    holders   by response, the engine whose leader holds what an earlier rollout wrote of it; None: nothing"""

    prompt: Prompt
    seeds: Sequence[int]
    expected: float = 0.0
    first: int | None = None
    holders: Sequence[int | None] = ()


@dataclass
class Row:
    """A response of a request whose group has not been taken.

    index     its number among those of the prompt
    engine    that draws it, drew it, or holds what an earlier rollout wrote of it; None: it waits for one
    response  once it has ended"""

    request: GroupRequest
    index: int
    engine: int | None = None
    response: Response | None = None

    @property
    def runs(self) -> bool:
        return self.engine is not None and self.response is None


class Controller:
    """Decides, from what workers say.

    streams   see RolloutEngine: prompts are drawn ahead as long as groups are missing. Once there are enough,
              what still runs is aborted: its prompts come first in the next step, with
              `rollout.continue_partial` together with what was written
    engines   how many there are, each of `ranks_per_engine` ranks
    draw      the next n prompts of the training data
    surplus, returned, lengths   what a step leaves to the next: accepted groups; prompts that were drawn and
              not used; by prompt, the mean of its newest group's responses, tokens
    moved, idle   of the present rollout: responses that another engine drew than an equal division would say;
              seconds in which an engine had nothing to do while another had, the mean over engines
    orders    of the trainers, that are yet to be carried out
    """

    def __init__(
        self, config: Config, hub: m.Hub, ranks: int, streams: bool, draw: Callable[[int], Sequence[Prompt]]
    ) -> None:
        self.config, self.hub, self.streams, self.draw = config, hub, streams, draw
        self.ranks_per_engine = config.rollout.engine_tp
        self.engines = ranks // self.ranks_per_engine
        # Of each client of somebody else's servers how many are its own; of any other engine 1.
        self._servers = [len(config.rollout.urls[e :: self.engines]) or 1 for e in range(self.engines)]
        self.surplus: list[Group] = []
        self.returned: list[GroupRequest] = []
        self.lengths: dict[int, float] = {}
        self.orders: list[m.Order] = []
        self.count = 1  # the number of the next response
        self._reset()

    def _reset(self) -> None:
        self.moved, self.idle, self.version = 0, 0.0, -1
        self._params, self._terms, self._window = SamplingParams(0), True, 0
        # By the number of the first response, in the order of the prompts, until the group is taken; and the
        # rows of these requests by their own numbers.
        self._requests: dict[int, GroupRequest] = {}
        self._rows: dict[int, Row] = {}
        # Responses that no engine has begun, by the engine that an equal division gives them to.
        self._waiting: list[list[int]] = [[] for _ in range(self.engines)]
        self._unseated = [0] * self.engines  # of those that run, how many do not wait for the engine
        # By engine: how many have ended, how many of them with the newest messages, seconds of work.
        self._ended, self._just_ended = [0] * self.engines, [0] * self.engines
        self._busy = [0.0] * self.engines
        self._answers: list[m.Aborted | m.Bodies] = []  # to what was asked last
        self._aborting = False
        self._failures: dict[int, str] = {}  # of engines, by the rank that met it
        self.hub.expect()

    async def collect(self, step: int) -> RolloutBatch:
        """Collect `rollout.prompts` groups for a step. reward/*, response/* and reflection/* count all
        responses of this step, whether their groups were accepted or not, so that dynamic sampling does not
        hide the policy's accuracy.

        With `rollout.window` the groups are those parts of groups whose responses the step has drawn tokens
        of: reward/*, response/* and reflection/* then count those that have ended.

        Raises DataError at the limit of generation batches where the configuration says so, and what engines
        and verifiers raise."""
        self._reset()
        rollout = self.config.rollout
        # In value pretraining (steps below 0) no policy is trained that could use the engine's routing.
        routing = rollout.routing_replay and step > 0
        drawn_as = rollout.temperature, rollout.top_p, rollout.top_k, rollout.stop
        self._params = SamplingParams(rollout.max_response_tokens, *drawn_as, routing=routing)
        if rollout.window is not None and step > 0:  # value pretraining wants whole responses
            groups, stats = await self._collect_windows(step, rollout.window)
            return self._batch(step, groups, groups, stats)
        collector = GroupCollector(rollout.prompts, rollout.dynamic_sampling, self.surplus)
        times_drawn: Counter[int] = Counter()

        def next_requests() -> list[GroupRequest]:
            running = sum(group is None for group in map(self._group, self._requests))
            complete = [group for group in map(self._group, self._requests) if group is not None]
            n = collector.refill(complete, running) if self.streams else collector.next_batch()
            return self._draw(n, step, times_drawn)

        while requests := next_requests():
            await self._submit(requests)
            while self._requests:
                await self._handle_messages()
                while groups := self._pop_complete(collector.missing if self.streams else None):
                    collector.offer(groups)  # of which some may be rejected: then there is more to take
                if self.streams and not collector.missing:
                    self.returned = await self._abort() + self.returned
                elif self.streams:
                    await self._submit(next_requests())
        for group in collector.offered:
            lengths = [r.length for r in group.responses]
            self.lengths[group.prompt.uid] = sum(lengths) / len(lengths)
        groups, self.surplus = collector.result()
        # Nothing was offered where the surplus of the step before was enough.
        return self._batch(step, groups, collector.offered or groups, collector.stats())

    async def _collect_windows(self, step: int, window: int) -> tuple[list[Group], dict[str, float]]:
        """Draw the next tokens of as many responses as a step has: first of those that have not ended in the
        step before, then of new ones, prompt after prompt (T-PPO's successive batching). What is drawn does
        not depend on time. Return them by their prompts, and rollout/*."""
        self._window, size = window, self.config.rollout.group_size
        waiting, self.returned = self.returned, []
        wanted = self.config.responses
        prompts = max(0, math.ceil((wanted - len(waiting)) / size))
        for request in self._draw(prompts, step, Counter()):
            waiting += [GroupRequest(request.prompt, [seed]) for seed in request.seeds]
        requests, rest = waiting[:wanted], waiting[wanted:]
        await self._submit(requests)
        rows = list(self._rows.items())
        while any(row.response is None for _, row in rows):
            await self._handle_messages()
        responses = [group.responses[0] for group in self._pop_complete(None)]
        groups: list[Group] = []
        for request, (number, row), response in zip(requests, rows, responses, strict=True):
            if not groups or groups[-1].prompt.uid != request.prompt.uid:
                groups.append(Group(request.prompt, [], self.version))
            groups[-1].responses.append(response)
            if response.unfinished:
                self.returned.append(replace(request, first=number, holders=[row.engine]))
        drawn = sum(r.length - r.begun for r in responses)
        stats = {
            "rollout/prompts": len(groups),
            "rollout/tokens": drawn,
            "rollout/continued": sum(r.begun > 0 for r in responses) / len(responses),
            "rollout/unfinished": len(self.returned) / len(responses),
        }
        self.returned += rest
        return groups, stats

    def _batch(
        self, step: int, groups: list[Group], counted: Sequence[Group], stats: Mapping[str, float]
    ) -> RolloutBatch:
        """Return a step's batch, with statistics of the responses of `counted` that have ended."""
        ended = [
            replace(group, responses=some)
            for group in counted
            if (some := [r for r in group.responses if not r.unfinished])
        ]
        responses = [r for group in ended for r in group.responses]
        problems = Counter(r.error for r in responses if r.error is not None)
        unjudged = [r.error for r in responses if not r.judged]
        if len(unjudged) > self.config.reward.max_unjudged * len(responses):
            share = f"{len(unjudged)} of {len(responses)} responses of a step were not judged"
            limit = f"more than {self.config.reward.max_unjudged:g} of them"
            raise ConfigError(f"reward.max_unjudged: {share}, {limit}: {unjudged[0]}")
        stats = {
            **stats,
            **(response_stats(responses) if responses else {}),
            **length_error(ended),
            **source_stats(ended),
            "rollout/moved": self.moved,
        }
        return RolloutBatch(step, groups, stats, {}, dict(problems))

    def _draw(self, prompts: int, step: int, times_drawn: Counter[int]) -> list[GroupRequest]:
        """Return requests for the next prompts: first those that an earlier step returned. A prompt drawn
        again in one step gets further seeds."""
        requests, self.returned = self.returned[:prompts], self.returned[prompts:]
        if len(requests) < prompts:
            requests += [GroupRequest(prompt, ()) for prompt in self.draw(prompts - len(requests))]
        size = self.config.rollout.group_size
        for i, request in enumerate(requests):
            uid, seeds = request.prompt.uid, request.seeds
            if request.first is None:
                first = times_drawn[uid] * size
                seeds = [response_seed(self.config.seed, step, uid, first + j) for j in range(size)]
            requests[i] = replace(request, seeds=seeds, expected=self.lengths.get(uid, 0.0))
            times_drawn[uid] += 1
        return requests

    async def generate(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[Group]:
        """Return one group per request, in their order, without the terms of the reward."""
        self._reset()
        self._params, self._terms = params, False
        await self._submit(requests)
        while not all(map(self._group, self._requests)):
            await self._handle_messages()
        return self._pop_complete(None)

    async def _submit(self, requests: Sequence[GroupRequest]) -> None:
        """Let the responses wait for an engine, and begin those that can. Ordered by prompt, they are cut
        into equal stretches, one for each engine, so that a prompt is prefilled on one engine or on
        neighbours; in a stretch the longest expected come first. What an earlier rollout began goes on where
        it lies."""
        fresh: list[int] = []
        held: list[list[int]] = [[] for _ in self._waiting]
        for request in requests:
            if request.first is None:
                request = replace(request, first=self.count)
                self.count += len(request.seeds)
            assert request.first is not None
            self._requests[request.first] = request
            for i, holder in enumerate(request.holders or [None] * len(request.seeds)):
                number = request.first + i
                self._rows[number] = Row(request, i, holder)
                (fresh if holder is None else held[holder]).append(number)
        for engine, waiting in enumerate(self._waiting):
            part = fresh[engine * len(fresh) // self.engines : (engine + 1) * len(fresh) // self.engines]
            waiting += sorted(part, key=lambda number: -self._rows[number].request.expected)
        await self._give_out(held)

    async def _give_out(self, resumed: Sequence[list[int]]) -> None:
        """Give responses that wait to engines that have room, beside those that are `resumed`, by engine. An
        engine, or server, may have `rollout.in_flight` at once, beside those that wait for a tool, an
        environment or an agent, and as many more as it has just ended, so that it does not run dry before it
        hears of the next."""
        at_once = self.config.rollout.in_flight
        most = float(self.config.rollout.max_batch if at_once is None else at_once)
        if not most or self.engines == 1:  # 0 is no limit
            most = math.inf
        running = Counter(row.engine for row in self._rows.values() if row.runs)
        seated = [max(0, running[engine] - away) for engine, away in enumerate(self._unseated)]
        limits = [most * n + just for n, just in zip(self._servers, self._just_ended, strict=True)]
        shared = share_out(self._waiting, seated, limits, self._ended)
        for engine, (held, given) in enumerate(zip(resumed, shared, strict=True)):
            self.moved += len(set(given).difference(self._waiting[engine]))
            if not held and not given:
                continue
            places: dict[int, int] = {}  # of questions in the message, by their prompts' identity
            questions: list[m.Question] = []
            work: list[m.Work] = []
            for number in (*held, *given):
                row = self._rows[number]
                row.engine, prompt = engine, row.request.prompt
                if id(prompt) not in places:
                    places[id(prompt)] = len(questions)
                    questions.append(m.Question.of(prompt, whole=self.config.rollout.acts))
                work.append(m.Work(number, places[id(prompt)], row.index, row.request.seeds[row.index]))
            await self._tell(engine, m.Begin(self._params, self._terms, self._window, questions, work))
        if any(shared):
            self._waiting = [
                [number for number in numbers if self._rows[number].engine is None]
                for numbers in self._waiting
            ]

    async def _tell(self, engine: int, message: m.Message) -> None:
        await self.hub.send(engine * self.ranks_per_engine, message)

    async def _handle_messages(self) -> None:
        """Wait for messages, and act on each: note facts and answers, have all ranks with engines recover
        from a failure of one, give engines with room more to do (not while aborting). Raises the error of
        any rank."""
        said = await self.hub.receive(m.ALIVE)
        self._just_ended = [0] * self.engines
        for rank, message in said:
            engine = rank // self.ranks_per_engine
            match message:
                case m.Ended(version, facts, busy):
                    if self.version not in (-1, version):
                        versions = sorted((self.version, version))
                        different = f"the ranks' engines have different weight versions: {versions}"
                        raise EngineError(f"rollout: {different}")
                    self.version = version
                    self._just_ended[engine] += len(facts)
                    self._ended[engine] += len(facts)
                    self._busy[engine] = busy
                    for fact in facts:
                        self._rows[fact.number].response = fact.response()
                case m.Unseated(count):
                    self._unseated[engine] = count
                case m.Failed("EngineFailure", text):
                    self._failures[rank] = text
                case m.Failed(error, text):
                    raise errors.error_class(error)(text)
                case m.Aborted() | m.Bodies():
                    self._answers.append(message)
                case _ if isinstance(message, m.ORDERS):
                    self.orders.append(message)
        self.idle = max(self._busy) - sum(self._busy) / self.engines
        await self.hub.keep_alive()
        if (silent := self.hub.silent(self.config.parallel.timeout)) is not None:
            raise WaitTimeout(self._silence(silent))
        if self._aborting:
            return
        await self._recover()
        if said:
            await self._give_out([[] for _ in self._waiting])

    async def _recover(self) -> None:
        """Have all ranks with engines start those again that have failed."""
        failures, self._failures = sorted(self._failures.items()), {}
        if failures:
            await self.hub.send_all(m.Recover(failures))

    def _silence(self, rank: int) -> str:
        """Return what there is to say of a rank that says nothing."""
        limit = f"has said nothing for {self.config.parallel.timeout:g} s (parallel.timeout)"
        for row in self._rows.values():
            if row.runs and row.engine == rank // self.ranks_per_engine:
                what = f"response number {row.index} to prompt {row.request.prompt.uid}"
                return f"rollout: {m.name_of(rank)} {limit}; the first that it draws is {what}"
        return f"rollout: {m.name_of(rank)} {limit}; it has no response to draw"

    def _group(self, first: int) -> Group | None:
        """Return the group whose responses begin with number `first`; None while one of them is missing."""
        request = self._requests[first]
        found = [self._rows[first + i].response for i in range(len(request.seeds))]
        responses = [response for response in found if response is not None]
        if len(responses) < len(found):
            return None
        return Group(request.prompt, responses, self.version)

    def _pop_complete(self, most: int | None) -> list[Group]:
        """Remove and return the groups up to the first that is not complete, at most `most`."""
        groups: list[Group] = []
        while self._requests and (most is None or len(groups) < most):
            first = next(iter(self._requests))
            group = self._group(first)
            if group is None:
                break
            groups.append(group)
            del self._requests[first]
            for i in range(len(group.responses)):
                del self._rows[first + i]
        return groups

    async def _ask(self, questions: Mapping[int, m.Message]) -> list[m.Aborted | m.Bodies]:
        """Return the answers of engines' leaders to what each is asked."""
        self._answers = []
        for engine, question in questions.items():
            await self._tell(engine, question)
        while len(self._answers) < len(questions):
            await self._handle_messages()
        return self._answers

    async def _abort(self) -> list[GroupRequest]:
        """End what runs; return the requests that were not taken, in their order, with
        `rollout.continue_partial` to go on where they are."""
        keep, self._aborting = self.config.rollout.continue_partial, True
        wanted: dict[int, list[int]] = {}
        for number, row in self._rows.items():
            if row.engine is not None and (keep or row.runs):
                wanted.setdefault(row.engine, []).extend([number] if keep else [])
        for engine, number in self._held():  # an engine keeps what this names, and nothing else
            wanted.setdefault(engine, []).append(number)
        answers = await self._ask({engine: m.Abort(numbers) for engine, numbers in wanted.items()})
        held = {number for answer in answers if isinstance(answer, m.Aborted) for number in answer.held}
        self._aborting = False
        await self._recover()
        returned = []
        for first, request in self._requests.items():
            if not keep:
                returned.append(GroupRequest(request.prompt, request.seeds))
                continue
            numbers = range(first, first + len(request.seeds))
            holders = [self._rows[number].engine if number in held else None for number in numbers]
            returned.append(GroupRequest(request.prompt, request.seeds, first=first, holders=holders))
        self._requests.clear()
        self._rows.clear()
        # What no engine has begun is not to be begun now, as whoever answers `fetch` has room for it.
        self._waiting = [[] for _ in self._waiting]
        return returned

    def _held(self) -> list[tuple[int, int]]:
        """Return the responses that go on once their prompts are drawn again: engine and number of each."""
        return [
            (holder, request.first + i)
            for request in self.returned
            if request.first is not None
            for i, holder in enumerate(request.holders)
            if holder is not None
        ]

    async def fetch(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with all their bodies."""
        wanted: dict[int, list[int]] = {}
        for response in (r for group in groups for r in group.responses):
            wanted.setdefault(response.owner // self.ranks_per_engine, []).append(response.number)
        answers = await self._ask({engine: m.Fetch(numbers) for engine, numbers in wanted.items()})
        sent = [answer.bodies for answer in answers if isinstance(answer, m.Bodies)]
        bodies = {number: body for some in sent for number, body in some.items()}
        return [with_bodies(group, bodies) for group in groups]

    async def end(self, groups: Sequence[Group]) -> None:
        """Tell all ranks that the rollout has ended, and what they are to keep: the bodies of `groups` and of
        what the next step needs."""
        keep: dict[int, list[int]] = {}
        for response in (r for group in (*groups, *self.surplus) for r in group.responses):
            keep.setdefault(response.owner, []).append(response.number)
        for engine, number in self._held():
            keep.setdefault(engine * self.ranks_per_engine, []).append(number)
        for rank in range(self.engines * self.ranks_per_engine):
            await self.hub.send(rank, m.End(keep.get(rank, [])))

    async def next_order(self, seconds: float) -> m.Order | None:
        """Return the trainers' next order, within `seconds`, and pass it on to the other ranks."""
        if not self.orders:
            said = await self.hub.receive(seconds)
            self.orders += [message for _, message in said if isinstance(message, m.ORDERS)]
        if not self.orders:
            return None
        order = self.orders.pop(0)
        for rank in range(1, self.engines * self.ranks_per_engine):
            await self.hub.send(rank, order)
        return order


def with_bodies(group: Group, bodies: Mapping[int, Body]) -> Group:
    """Return a group with those of its bodies, by the number of their response, that are in `bodies`."""
    return replace(
        group, responses=[msgspec.structs.replace(r, body=bodies.get(r.number)) for r in group.responses]
    )
