"""Rollouts as a rank with an engine calls them: all such ranks call the same methods in the same order, and
get the same facts. Inside, the first of them decides (controller.py), and each does its part (worker.py)."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import numpy as np
import zmq.asyncio

from megarl.config.errors import DataError, EngineError, MegarlError
from megarl.config.schema import Config
from megarl.data.prompts import ProblemSet, Prompt
from megarl.observe.run_log import SampleRecord
from megarl.parallel.comm import from_rank_0
from megarl.parallel.runtime import Ranks
from megarl.rollout import messages as m
from megarl.rollout.controller import Controller, with_bodies
from megarl.rollout.dispatch import GroupRequest
from megarl.rollout.engines.base import RolloutEngine
from megarl.rollout.responses import (
    Body,
    EvaluationResult,
    Facts,
    Group,
    RolloutBatch,
    prompt_from_state,
    prompt_state,
    routing_from_state,
    routing_state,
)
from megarl.rollout.sampling import Completion, SamplingParams, evaluation_seed
from megarl.rollout.worker import Worker
from megarl.sync.weight_sync import Failures

if TYPE_CHECKING:
    from megarl.rewards.pool import VerifierPool


class RolloutShare(TypedDict, total=False):
    """What a rank other than the first adds to a snapshot (`RolloutRank.snapshot`), by response."""

    drawn: dict[int, Body | None]
    partials: dict[int, Completion]


class GroupFacts(msgspec.Struct, array_like=True):
    """A group without bodies. tokens: of its prompt, int32, and its data_source; empty where all ranks have
    the prompt"""

    uid: int
    tokens: bytes
    source: str
    version: int
    facts: list[Facts]


class RolloutOutcome(msgspec.Struct, array_like=True):
    """What all ranks hear of a rollout once it has ended."""

    groups: list[GroupFacts]
    stats: dict[str, int | float]
    errors: dict[str, int]
    seconds: dict[str, float]  # of the controller's rank
    idle: float


Decide = Callable[[Controller], Awaitable[tuple[Any, list[Group]]]]


def raise_failure(failures: Failures) -> None:
    """Raise the first failure, as engines cannot be started again: the default of `recover`."""
    raise next(filter(None, failures))


class RolloutRank:
    """One rank's part in rollouts.

    ranks    those that have engines
    recover  restarts engines that have failed, see WeightSync; called on all of them
    draw     the next n prompts of the training data; only the first rank calls it
    seconds  of the rollout that was the last: generate, verify, gather (waiting for others); and idle, see
             Controller. Of the first rank where this one has no engine to itself
    address  of the controller
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        engine: RolloutEngine,
        verifier: VerifierPool,
        tokenizer: Any,
        recover: Callable[[Failures], None] = raise_failure,
        draw: Callable[[int], Sequence[Prompt]] = lambda n: (),
    ) -> None:
        self.config, self.ranks, self.engine, self.tokenizer = config, ranks, engine, tokenizer
        self.worker = Worker(config, ranks.rank, ranks.world, engine, verifier, tokenizer, recover)
        self.seconds = dict.fromkeys(("generate", "verify", "gather", "idle"), 0.0)
        self._loop, self._context = asyncio.new_event_loop(), zmq.asyncio.Context()
        self._shown: list[Group] = []
        self.controller: Controller | None = None
        if ranks.rank == 0:
            hub = self._run(self._listen(ranks.world))
            self.controller = Controller(config, hub, ranks.world, engine.streams, draw)
            self.address = hub.address
        self.address = from_rank_0(ranks, self.address if self.controller else "", str)
        self._run(self._connect())

    def _run(self, job: Awaitable[Any]) -> Any:
        try:
            return self._loop.run_until_complete(job)
        except KeyboardInterrupt:
            # What it leaves of a rollout is ended while connections are there, and says nothing of that.
            self._loop.set_exception_handler(lambda _loop, _context: None)
            for _ in range(3):  # whoever waits for the task that met it meets it once more
                if left := asyncio.all_tasks(self._loop):
                    for task in left:
                        task.cancel()
                    with suppress(KeyboardInterrupt):
                        self._loop.run_until_complete(asyncio.wait(left, timeout=1.0))
            raise
        except SystemExit as error:  # which a loop lets through from any task
            what = f"a task of its own has called sys.exit({error})"
            raise EngineError(f"{self.worker.key}: {what} (raise an error there)") from error

    async def _listen(self, ranks: int) -> m.Hub:
        return m.Hub(self._context, m.address_here(), ranks)

    async def _connect(self) -> None:
        self.link = m.Link(self._context, self.address, self.ranks.rank, here=self.controller is not None)
        await self.link.send(m.Hello())
        if self.controller is not None:
            await self.controller.hub.meet(self.ranks.world, self.config.parallel.timeout)

    def collect(self, step: int, shown: int = 0) -> RolloutBatch:
        """Collect the groups of a step, see Controller.collect. An error is raised on every rank.

        shown: how many responses `samples` gives afterwards"""

        async def decide(controller: Controller) -> tuple[RolloutBatch, list[Group]]:
            batch = await controller.collect(step)
            self._shown = await controller.fetch(batch.shown(shown))
            return batch, batch.groups

        _, outcome, groups = self._together(decide, ())
        found = RolloutBatch(step, groups, outcome.stats, self.seconds, outcome.errors)
        for response in found.responses:
            self.worker.drawn.pop(response.number, None)  # what is left is the next step's
        return found

    def samples(self, found: RolloutBatch, limit: int) -> dict[int, SampleRecord]:
        """Return on rank 0 at most `limit` responses of the first groups, by their row of the batch; nothing
        on the others."""
        return replace(found, groups=self._shown).samples(self.tokenizer, limit) if self._shown else {}

    def generate(
        self, requests: Sequence[GroupRequest], params: SamplingParams, *, whole: bool = False
    ) -> list[Group]:
        """Return one group per request, in their order, without the terms of the reward. whole: with all
        bodies on rank 0"""

        async def decide(controller: Controller) -> tuple[list[Group], list[Group]]:
            groups = await controller.generate(requests, params)
            return await controller.fetch(groups) if whole else groups, groups

        fetched, _, groups = self._together(decide, [request.prompt for request in requests])
        for response in (r for group in groups for r in group.responses):
            self.worker.drawn.pop(response.number, None)
        return fetched if whole and fetched is not None else groups

    def evaluate(self, sets: Sequence[ProblemSet], params: SamplingParams | None = None) -> EvaluationResult:
        """Sample and verify as many answers to each problem as its set wants, whatever other sets there are;
        their texts are on rank 0. DataError without a problem."""
        if not any(one.problems for one in sets):
            raise DataError("data.eval: there is no problem to evaluate on (name a file that holds some)")
        evaluation, rollout = self.config.evaluation, self.config.rollout
        params = params or SamplingParams(
            rollout.max_response_tokens, evaluation.temperature, evaluation.top_p, 0, rollout.stop
        )
        requests = []
        for one in sets:
            k, drawn = one.samples, Counter[int]()
            for problem in one.problems:
                first = drawn[problem.uid] * k
                seeds = [evaluation_seed(self.config.seed, problem.uid, first + i) for i in range(k)]
                requests.append(GroupRequest(problem, seeds))
                drawn[problem.uid] += 1
        groups = iter(self.generate(requests, params, whole=True))
        return EvaluationResult([(one, list(islice(groups, len(one.problems)))) for one in sets])

    def _together(self, decide: Decide, prompts: Sequence[Prompt]) -> tuple[Any, RolloutOutcome, list[Group]]:
        """Run a rollout on all ranks: the controller decides, the workers sample and grade.

        decide: what the controller does. It returns a result, and the groups that all ranks get
        prompts: of these groups, where all ranks know them; else empty

        Return the result on rank 0, the outcome, and the groups with those bodies that lie on this rank.
        Raise an error of the controller on every rank."""
        started = time.perf_counter()
        decided = self._run(self._serve(decide))
        failure = decided if isinstance(decided, MegarlError) else None
        result, groups = decided if isinstance(decided, tuple) else (None, [])
        outcome = (
            self._make_outcome(result, groups, known=bool(prompts))
            if self.controller and not failure
            else None
        )
        kind = tuple[MegarlError | None, RolloutOutcome | None]
        failure, outcome = from_rank_0(self.ranks, (failure, outcome), kind)
        if failure is not None:
            raise failure
        assert outcome is not None
        seconds = self.worker.seconds if self.worker.leads else outcome.seconds
        waited = time.perf_counter() - started - seconds["generate"] - seconds["verify"]
        self.seconds = {**seconds, "gather": max(0.0, waited), "idle": outcome.idle}
        known = prompts or [group.prompt for group in groups]
        return result, outcome, self._make_groups(outcome, known)

    async def _serve(self, decide: Decide) -> tuple[Any, list[Group]] | MegarlError | None:
        """Run this rank's worker until the rollout has ended, on rank 0 beside the controller. Return what
        the controller has decided, or its error; None on other ranks."""
        if self.controller is None:
            await self.worker.serve(self.link)
            return None
        serving = asyncio.create_task(self.worker.serve(self.link))
        deciding = asyncio.create_task(decide_and_end(self.controller, decide))
        try:
            await asyncio.gather(serving, deciding)
        finally:
            for task in (serving, deciding):
                task.cancel()
        return deciding.result()

    def _make_outcome(self, result: Any, groups: Sequence[Group], *, known: bool) -> RolloutOutcome:
        """Return what rank 0 sends to all ranks. known: whether they know the groups' prompts."""
        assert self.controller is not None
        stats, errors = (result.stats, result.errors) if isinstance(result, RolloutBatch) else ({}, {})
        facts = [
            GroupFacts(
                group.prompt.uid,
                b"" if known else m.pack(group.prompt.tokens, np.int32),
                "" if known else group.prompt.source,
                group.version,
                [response.facts for response in group.responses],
            )
            for group in groups
        ]
        idle = self.controller.dispatcher.idle_seconds
        return RolloutOutcome(facts, stats, errors, self.worker.seconds, idle)

    def _make_groups(self, outcome: RolloutOutcome, known: Sequence[Prompt]) -> list[Group]:
        """Return the groups of an outcome, with the bodies that lie on this rank. known: their prompts, if
        this rank knows them."""
        bodies = {number: response.body for number, response in self.worker.drawn.items() if response.body}
        groups = []
        for i, one in enumerate(outcome.groups):
            prompt = known[i] if known else m.Question(one.uid, one.tokens, "", "", source=one.source).prompt
            responses = [facts.response() for facts in one.facts]
            groups.append(with_bodies(Group(prompt, responses, one.version), bodies))
        return groups

    def next_order(self, seconds: float) -> m.Order | None:
        """Return the trainers' next order, on every rank; None where there is none within `seconds`."""

        async def wait() -> m.Order | None:
            if self.controller is not None:
                return await self.controller.next_order(seconds)
            message = await self.link.receive(seconds)
            return message if isinstance(message, m.ORDERS) else None

        order: m.Order | None = self._run(wait())
        return order

    def answer(self, message: m.Message) -> None:
        """Tell the trainers something, for the first rank."""
        if self.controller is not None:
            self._run(self.controller.hub.send(m.TRAINER, message))

    def snapshot(self) -> dict[str, Any]:
        """Return this rank's share of what the next step needs, besides the weights and the prompts' order;
        references only, to what never changes once it is made. `joined` makes one state of all shares."""
        drawn = {number: response.body for number, response in self.worker.drawn.items()}
        share: dict[str, Any] = {"drawn": drawn, "partials": dict(self.worker.partials)}
        made = self.controller
        if made is None:
            share["drawn"] = {number: body and _packed(body) for number, body in drawn.items()}
            share["partials"] = {number: _packed(partial) for number, partial in share["partials"].items()}
        else:
            share |= {"surplus": list(made.surplus), "returned": list(made.returned)}
            share["lengths"] = dict(made.lengths)
        return share

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `joined` gave. What was drawn then is shared out evenly among the engines,
        however many there are now."""
        each, worker = self.config.rollout.engine_tp, self.worker
        engines, count = self.ranks.world // each, 1
        surplus: list[Group] = []
        returned: list[GroupRequest] = []
        worker.drawn, worker.partials = {}, {}
        for i, entry in enumerate(state["surplus"]):
            owner = i % engines * each
            group = Group.from_state(entry, owner)
            for response in group.responses:
                response.number, count = count, count + 1
                if owner == worker.rank:
                    worker.drawn[response.number] = response
            surplus.append(group)
        for i, entry in enumerate(state.get("returned", ())):
            engine, prompt, seeds = i % engines, prompt_from_state(entry["prompt"]), entry["seeds"]
            if not entry["begun"]:
                returned.append(GroupRequest(prompt, seeds))
                continue
            for j, c in enumerate(entry["begun"]):
                if c and engine * each == worker.rank:
                    routing = {"routing": routing_from_state(c.get("routing"))}
                    worker.partials[count + j] = Completion(**c | routing)
            holders = [engine if c else None for c in entry["begun"]]
            returned.append(GroupRequest(prompt, seeds, first=count, holders=holders))
            count += len(seeds)
        if (made := self.controller) is not None:
            made.surplus, made.returned, made.count = surplus, returned, count
            made.lengths = dict(state.get("lengths", ()))

    def close(self) -> None:
        """Let go of the connections. May be called again."""
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


async def decide_and_end(controller: Controller, decide: Decide) -> tuple[Any, list[Group]] | MegarlError:
    """Return what a rollout's decisions come to, or their error, and end the rollout on all workers."""
    groups: list[Group] = []
    try:
        result, groups = await decide(controller)
    except MegarlError as error:
        return error
    finally:
        await controller.end(groups)
    return result, groups


def _packed(response: Any) -> Any:
    """Return a Body or Completion whose journal is one JSON text: it may hold integers of any size."""
    return _with_journal(response, [json.dumps(response.journal)]) if response.journal else response


def _unpacked(response: Any) -> Any:
    """Undo `_packed`."""
    return _with_journal(response, json.loads(response.journal[0])) if response.journal else response


def _with_journal(response: Any, journal: list[Any]) -> Any:
    if isinstance(response, Body):
        return msgspec.structs.replace(response, journal=journal)
    return replace(response, journal=journal)


def joined(shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state that the shares of all ranks make, the first rank's first: lists, dicts, numbers and
    texts only."""
    if not shares:
        return {}
    bodies, partials = dict(shares[0]["drawn"]), dict(shares[0]["partials"])
    for share in shares[1:]:
        bodies |= {number: body and _unpacked(body) for number, body in share["drawn"].items()}
        partials |= {number: _unpacked(partial) for number, partial in share["partials"].items()}
    rows = []
    for request in shares[0]["returned"]:
        begun: list[Any] = []
        if request.first is not None:
            begun = [partials.get(request.first + i) for i in range(len(request.seeds))]
        rows.append(
            {
                "prompt": prompt_state(request.prompt),
                "seeds": list(request.seeds),
                "begun": [c and vars(c) | {"routing": routing_state(c.routing)} for c in begun],
            }
        )
    surplus = [with_bodies(group, bodies).state_dict() for group in shares[0]["surplus"]]
    return {"surplus": surplus, "returned": rows, "lengths": list(shares[0]["lengths"].items())}
