"""The rollout of a step: prompts in, verified groups of responses out.

`RolloutSampler` draws prompts and keeps what a step leaves to the next, `GroupCollector` decides which groups
a step trains on (dynamic sampling), `RolloutWorker` generates over all engines. The first rank of each
engine, its leader, takes the same decisions as the other leaders, since they all see the same facts of each
response; its tokens stay where they were drawn. The other ranks of an engine wait for the outcome.
"""

from __future__ import annotations

import math
import pickle
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megarl.config.errors import ConfigError, DataError, EngineError, EngineFailure, MegarlError
from megarl.config.schema import Config, DynamicSamplingConfig
from megarl.data.prompts import ProblemSet, Prompt
from megarl.observe.run_log import Sample
from megarl.parallel.comm import exchange, from_rank_0, gather_on_0
from megarl.parallel.runtime import Ranks, leaders_of
from megarl.rewards.shaping import soft_overlong_punishment
from megarl.rollout.balance import share_out
from megarl.rollout.batch import (
    Body,
    EvaluationResult,
    Group,
    Response,
    RolloutBatch,
    prompt_from_state,
    prompt_state,
    response_stats,
    routing_from_state,
    routing_state,
    source_stats,
)
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.sampling import Completion, Request, SamplingParams, evaluation_seed, response_seed
from megarl.rollout.weight_sync import Failures

if TYPE_CHECKING:
    from megarl.rewards.pool import Item, VerifierPool

SAME = 1e-6  # rewards of a smaller standard deviation count as one: group_advantages adds this to it
TICK = 0.25  # seconds after which leaders exchange what has ended: none waits for a whole response
WORD = 10.0  # seconds after which the other ranks of an engine hear that a rollout still runs


@dataclass
class Partial:
    """A response that an earlier step began. pickled: its Completion, of `size` bytes, on the rank `owner`
    alone (its number among those that have engines)."""

    owner: int
    size: int
    pickled: bytes | None


@dataclass
class GroupRequest:
    """A prompt, a seed for each of its responses, and the partial responses that an earlier step began.
    expected: tokens of a response, which says who begins first; 0 where nothing is known."""

    prompt: Prompt
    seeds: Sequence[int]
    partial: Sequence[Partial | None] = ()
    expected: float = 0.0


class RolloutSampler:
    """Collects a step's groups, and evaluates.

    worker  of this rank
    draw    the next n prompts of the training data, the same on every leader

    With an engine that streams, prompts are drawn ahead as long as groups are missing, and groups are
    accepted in the order of their prompts. Once there are enough, what still runs is aborted: its prompts
    come first in the next step, with `rollout.continue_partial` together with their partial responses.
    Only leaders draw prompts, and know of what a step leaves to the next.
    """

    def __init__(self, worker: RolloutWorker, draw: Callable[[int], Sequence[Prompt]] = lambda n: ()) -> None:
        self.worker, self.draw, self.config = worker, draw, worker.config
        self.surplus: list[Group] = []
        self.returned: list[GroupRequest] = []
        self.lengths: dict[int, float] = {}  # by prompt, the mean of its newest group's responses, tokens

    def collect(self, step: int) -> RolloutBatch:
        """Collect `rollout.prompts` groups for a step. reward/*, response/* and reflection/* count all
        responses of this step, whether their groups were accepted or not, so that dynamic sampling does not
        hide the policy's accuracy.

        Raises DataError at the limit of generation batches where the configuration says so, and what engine
        and verifiers raise; on every rank."""
        found: RolloutBatch = self.worker.on_leaders(lambda: self._collect(step))
        return found

    def _collect(self, step: int) -> RolloutBatch:
        rollout, worker, streams = self.config.rollout, self.worker, self.worker.engine.streams
        # In value pretraining (steps below 0) no policy is trained that could use the engine's routing.
        routing = rollout.routing_replay and step > 0
        drawn_as = rollout.temperature, rollout.top_p, rollout.top_k, rollout.stop
        params = SamplingParams(rollout.max_response_tokens, *drawn_as, routing=routing)
        collector = GroupCollector(rollout.prompts, rollout.dynamic_sampling, self.surplus)
        drawn: Counter[int] = Counter()

        def draw_next() -> list[GroupRequest]:
            n = collector.refill(worker.ahead, worker.running) if streams else collector.next_batch()
            return self._draw(n, step, drawn)

        worker.reset()
        while requests := draw_next():
            worker.submit(requests, params)
            while worker.running:
                worker.tick()
                while groups := worker.take(collector.missing if streams else None):
                    collector.offer(groups)  # of which some may be rejected: then there is more to take
                if streams and not collector.missing:
                    self.returned = worker.abort(rollout.continue_partial) + self.returned
                elif streams:
                    worker.submit(draw_next(), params)
        for group in collector.offered:
            lengths = [r.length for r in group.responses]
            self.lengths[group.prompt.uid] = sum(lengths) / len(lengths)
        groups, self.surplus = collector.result()
        # Nothing was offered where the surplus of the step before was enough.
        responses = [r for group in collector.offered or groups for r in group.responses]
        errors = Counter(r.error for r in responses if r.error is not None)
        unjudged = [r.error for r in responses if not r.judged]
        if len(unjudged) > self.config.reward.max_unjudged * len(responses):
            share = f"{len(unjudged)} of {len(responses)} responses of a step were not judged"
            limit = f"more than {self.config.reward.max_unjudged:g} of them"
            raise ConfigError(f"reward.max_unjudged: {share}, {limit}: {unjudged[0]}")
        of_sources = source_stats(collector.offered or groups)
        stats = {
            **collector.stats(),
            **response_stats(responses),
            **of_sources,
            "rollout/moved": worker.moved,
        }
        return RolloutBatch(step, groups, stats, worker.seconds, dict(errors))

    def samples(self, found: RolloutBatch, limit: int) -> dict[int, Sample]:
        """Return on rank 0 at most `limit` responses of the first groups, by their row of the batch; nothing
        on the others, which call this too."""
        shown = self.worker.with_bodies(found.shown(limit)) if limit else []
        if not shown or self.worker.engines.rank:
            return {}
        return replace(found, groups=shown).samples(self.worker.tokenizer, limit)

    def _draw(self, prompts: int, step: int, drawn: Counter[int]) -> list[GroupRequest]:
        """Return requests for the next prompts: first those that an earlier step returned. A prompt drawn
        again in one step gets further seeds."""
        requests, self.returned = self.returned[:prompts], self.returned[prompts:]
        if len(requests) < prompts:
            requests += [GroupRequest(prompt, ()) for prompt in self.draw(prompts - len(requests))]
        size = self.config.rollout.group_size
        for i, request in enumerate(requests):
            uid, seeds = request.prompt.uid, request.seeds
            if not request.partial:
                first = drawn[uid] * size
                seeds = [response_seed(self.config.seed, step, uid, first + j) for j in range(size)]
            expected = self.lengths.get(uid, 0.0)
            requests[i] = GroupRequest(request.prompt, seeds, request.partial, expected)
            drawn[uid] += 1
        return requests

    def evaluate(self, sets: Sequence[ProblemSet], params: SamplingParams | None = None) -> EvaluationResult:
        """Sample and verify as many answers to each problem as its set wants, whatever other sets there are.
        DataError without a problem."""
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
        self.worker.reset()
        groups = iter(self.worker.with_bodies(self.worker.generate(requests, params)))
        return EvaluationResult([(one, list(islice(groups, len(one.problems)))) for one in sets])

    def snapshot(self) -> dict[str, Any]:
        """Return this rank's share of what the next step needs besides the weights and the prompts' order, of
        which `join_snapshots` makes a whole: rank 0 knows what there is, each leader has its own bodies and
        partial responses. References only: groups and requests never change once they are made."""
        share: dict[str, Any] = {
            "bodies": {
                (g, i): response.body
                for g, group in enumerate(self.surplus)
                for i, response in enumerate(group.responses)
                if response.body is not None
            },
            "begun": {
                (q, i): partial.pickled
                for q, request in enumerate(self.returned)
                for i, partial in enumerate(request.partial)
                if partial is not None and partial.pickled is not None
            },
        }
        if self.worker.engines.rank == 0:
            share |= {"surplus": list(self.surplus), "returned": list(self.returned)}
            share["lengths"] = dict(self.lengths)
        return share

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `join_snapshots` gave. What lay on a leader then is shared out evenly, whatever
        the number of leaders is now."""
        self.surplus, self.returned = [], []
        self.lengths = dict(state.get("lengths", ()))
        if self.worker.leaders is None:
            return
        for i, group in enumerate(state["surplus"]):
            owner, here = self.worker.owner(i)
            self.surplus.append(Group.from_state(group, owner, here=here))
        for i, request in enumerate(state.get("returned", ())):
            owner, here = self.worker.owner(i)
            partial: list[Partial | None] = []
            for c in request["begun"]:
                routing = c and {"routing": routing_from_state(c.get("routing"))}
                whole = pickle.dumps(Completion(**c | routing)) if c else b""
                partial.append(Partial(owner, len(whole), whole if here else None) if c else None)
            prompt = prompt_from_state(request["prompt"])
            self.returned.append(GroupRequest(prompt, request["seeds"], partial))


def join_snapshots(shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the snapshots that all ranks' samplers took after the same step as one: lists, dicts, numbers
    and texts. On rank 0, in any thread."""
    bodies = {place: body for share in shares for place, body in share["bodies"].items()}
    begun = {place: pickle.loads(data) for share in shares for place, data in share["begun"].items()}
    surplus = [
        replace(group, responses=[replace(r, body=bodies[g, i]) for i, r in enumerate(group.responses)])
        for g, group in enumerate(shares[0]["surplus"])
    ]
    returned = []
    for q, request in enumerate(shares[0]["returned"]):
        partial = [begun.get((q, i)) for i in range(len(request.partial))]
        rows = [c and vars(c) | {"routing": routing_state(c.routing)} for c in partial]
        returned.append({"prompt": prompt_state(request.prompt), "seeds": list(request.seeds), "begun": rows})
    whole = [group.state_dict() for group in surplus]
    return {"surplus": whole, "returned": returned, "lengths": list(shares[0]["lengths"].items())}


class GroupCollector:
    """Decides which groups a rollout step trains on. They come in generation batches or, from an engine that
    streams, one by one (`refill`):

        while n := collector.next_batch():
            collector.offer(<groups of the next n prompts, in their order>)
        groups, surplus = collector.result()

    prompts  groups wanted
    surplus  accepted groups left over from the step before, which are taken first

    Every decision follows from the groups offered, in their order, and from nothing else.
    """

    def __init__(self, prompts: int, dynamic: DynamicSamplingConfig, surplus: Iterable[Group] = ()) -> None:
        self.prompts, self.dynamic = prompts, dynamic
        self.accepted = list(surplus)
        self.offered: list[Group] = []  # of this step, in order
        self.rejected: list[Group] = []
        self.batches = 0
        self.submitted = 0  # prompts, where the engine streams

    @property
    def missing(self) -> int:
        """Return how many groups are still to be accepted."""
        return max(0, self.prompts - len(self.accepted))

    def next_batch(self) -> int:
        """Return the prompts of the next generation batch; 0 when the step has what it needs or has reached
        its limit.

        Raises DataError (ConfigError where the verifier always failed) at the limit where the configuration
        says stop."""
        if not self.missing:
            return 0
        if self.batches >= self.dynamic.max_batches:
            self._check_limit()
            return 0
        self.batches += 1
        if self.batches == 1:
            return self._first
        return min(self.prompts, max(self.missing, self._estimate(self.missing, ())))

    def refill(self, ahead: Sequence[Group], running: int) -> int:
        """Return how many prompts to submit beside those that run. Never more run at once than `prompts` (or
        the first batch), and a step has at most `prompts` * max_batches. How many run ahead depends on time;
        which groups are accepted does not. Raises as `next_batch`.

        ahead    groups that are complete but not offered, as one before them still runs
        running  prompts whose groups are not complete"""
        missing = self.missing - sum(map(self._accepts, ahead))
        if missing <= 0:
            return 0
        if not self.submitted:
            self.submitted = self._first
            return self.submitted
        left = self.prompts * self.dynamic.max_batches - self.submitted
        if self.dynamic.enabled and left <= 0 and not running and not ahead:
            self._check_limit()
        if not self.dynamic.enabled or left <= 0 or not (self.offered or ahead):
            return 0
        more = max(0, min(left, min(self._estimate(missing, ahead), self.prompts) - running))
        self.submitted += more
        return more

    @property
    def _first(self) -> int:
        return math.ceil(self.missing * self.dynamic.oversample) if self.dynamic.enabled else self.missing

    def _differs(self, group: Group) -> bool:
        return group.mixed if self.dynamic.by == "accuracy" else group.spread > SAME

    def _accepts(self, group: Group) -> bool:
        return not self.dynamic.enabled or self._differs(group)

    def _estimate(self, missing: int, ahead: Sequence[Group]) -> int:
        """Estimate the prompts for `missing` accepted groups, by Laplace's rule: careful after few."""
        kept = len(self.offered) - len(self.rejected) + sum(map(self._differs, ahead))
        return math.ceil(missing * (len(self.offered) + len(ahead) + 2) / (kept + 1))

    def _check_limit(self) -> None:
        if self.dynamic.at_limit != "stop":
            return
        count = len(self.offered)
        errors = {response.error for group in self.offered for response in group.responses}
        if errors and None not in errors:
            first = min(map(str, errors))
            raise ConfigError(f"reward.verifier: it failed on every answer of {count} prompts: {first}")
        wanted = "right and wrong answers" if self.dynamic.by == "accuracy" else "rewards that differ"
        raise DataError(
            f"rollout.dynamic_sampling.max_batches: after {self.dynamic.max_batches} generation batches "
            f"({count} prompts) only {len(self.accepted)} of {self.prompts} groups have {wanted} "
            "(raise it, choose other prompts, or set rollout.dynamic_sampling.at_limit to continue)"
        )

    def offer(self, groups: Sequence[Group]) -> None:
        """Accept or reject complete groups, in the order of their prompts."""
        self.offered += groups
        for group in groups:
            (self.accepted if self._accepts(group) else self.rejected).append(group)

    def result(self) -> tuple[list[Group], list[Group]]:
        """Return the `prompts` groups to train on, and the surplus for the next step (at most `prompts`; the
        rest is dropped). Where too few were accepted, the first rejected ones follow the accepted."""
        groups = (self.accepted + self.rejected)[: self.prompts]
        return groups, self.accepted[self.prompts : 2 * self.prompts]

    def stats(self) -> dict[str, float]:
        """Return rollout/*: counts over the groups offered in this step. kept + all right + all wrong =
        prompts, with or without filtering; by score the latter two count those that are not kept, and a group
        of right and wrong answers with one reward is in none of the three. waste: the share of their tokens
        that are neither trained on nor kept for the next step."""
        groups, surplus = self.result()
        used = {id(group) for group in (*groups, *surplus)}
        tokens = [sum(r.length for r in group.responses) for group in self.offered]
        waste = sum(n for group, n in zip(self.offered, tokens, strict=True) if id(group) not in used)
        alike = [group for group in self.offered if not self._differs(group)]
        right = sum(group.correct == len(group.responses) for group in alike)
        wrong = sum(group.correct == 0 for group in alike)
        stats = {
            "rollout/groups_kept": len(self.offered) - len(alike),
            "rollout/groups_all_right": right,
            "rollout/groups_all_wrong": wrong,
            "rollout/batches": self.batches or math.ceil(len(self.offered) / self.prompts),
            "rollout/prompts": len(self.offered),
            "rollout/tokens": sum(tokens),
            "rollout/waste": waste / max(sum(tokens), 1),
            "rollout/surplus": len(surplus),
        }
        shares = (("all_right", right), ("all_wrong", wrong)) if self.offered else ()
        return stats | {f"rollout/share_{name}": count / len(self.offered) for name, count in shares}


def words_pattern(words: Sequence[str]) -> re.Pattern[str] | None:
    """Return what finds one of `words` in a text, in any case, with any space between a word's parts, and not
    inside a longer word of Latin letters (Chinese has no space between words); None without a word."""
    found = "|".join(r"\s+".join(map(re.escape, word.split())) for word in words)
    return re.compile(rf"(?<![A-Za-z0-9_])(?:{found})(?![A-Za-z0-9_])", re.IGNORECASE) if words else None


def raise_failure(failures: Failures) -> None:
    """Raise the first failure, as engines cannot be started again: the default of `recover`."""
    raise next(filter(None, failures))


class RolloutWorker:
    """One rank's part in generating: splits requests over the engines, generates, verifies, and puts the
    groups of all engines together on every leader.

    A response is submitted and numbered (`_requests`), waits for an engine (`_waiting`, `_begun`), is
    generated and verified by the leader of that engine (`_own`), its facts are exchanged (`_arrived`, the
    same on every leader but for bodies), and it is taken once its group is whole.

    engines  the ranks that have engines
    leaders  the first rank of each engine; None on the others. All methods but `generate` and `on_leaders`
             are the leaders'
    recover  brings engines that failed back, see WeightSync; called on all ranks that have engines
    seconds  of this rank since `reset`: generate, verify, gather (waiting for slower ranks included); and
             idle, in which an engine had nothing to do while another had, the mean over engines
    moved    responses since `reset` that another engine took than the one whose they were
    """

    def __init__(
        self,
        config: Config,
        engines: Ranks,
        engine: RolloutEngine,
        verifier: VerifierPool,
        tokenizer: Any,
        recover: Callable[[Failures], None] = raise_failure,
    ) -> None:
        self.config, self.engines, self.engine = config, engines, engine
        self.verifier, self.tokenizer, self.recover = verifier, tokenizer, recover
        self.each = config.rollout.engine_tp
        self.leaders = leaders_of(engines, self.each, config.parallel.timeout)
        self.reflection = words_pattern(config.log.reflection_words)
        self.reset()

    def reset(self) -> None:
        """Forget all requests, and begin to count seconds."""
        self.seconds = dict.fromkeys(("generate", "verify", "gather", "idle"), 0.0)
        self.moved = 0
        self._ended = [0] * (self.engines.world // self.config.rollout.engine_tp)  # by engine, since `reset`
        self._params, self._terms = SamplingParams(0), True
        self._version = -1
        self._error: MegarlError | None = None
        self._spoken = time.monotonic()
        self._clear()

    def _clear(self) -> None:
        # Responses have numbers, the same on every leader.
        self._count = 0
        # By the number of the first response, until the group is taken.
        self._requests: dict[int, GroupRequest] = {}
        self._arrived: dict[int, Response] = {}
        self._own: dict[int, tuple[Prompt, Completion | None]] = {}  # this rank's, until they are verified
        self._finished: list[tuple[int, Completion]] = []  # by an earlier step, and yet to be verified
        # The same on every leader: the responses that wait, by the engine whose they are; of each the request
        # and its index; the engine of each that was begun; and by engine how many have just ended.
        self._waiting: list[list[int]] = [[] for _ in self._ended]
        self._rows: dict[int, tuple[GroupRequest, int]] = {}
        self._begun: dict[int, int] = {}
        self._newly_ended = [0] * len(self._ended)
        if self.engine.running:  # after an error
            self.engine.abort()

    def owner(self, number: int) -> tuple[int, bool]:
        """Return the rank that holds the number-th thing where they are shared out, and whether it is this
        one."""
        assert self.leaders is not None
        engine = number % self.leaders.world
        return engine * self.each, engine == self.leaders.rank

    def on_leaders(self, job: Callable[[], Any]) -> Any:
        """Return what `job`, called on all leaders, returns there, on every rank; on the others without the
        bodies. They wait as long as it takes, hear every `WORD` seconds that it still runs, and recover
        engines with the leaders. An error is raised on every rank."""
        if self.leaders is not None:
            try:
                found = job()
            except MegarlError as error:
                found = error
                self._tell("failed", error)
                raise
            self._tell("done", found)
            return found
        while True:
            word, value = from_rank_0(self.engines, None)
            if word == "recover":
                try:
                    self.recover(value)
                except MegarlError as error:
                    if not error.on_every_rank:  # else the leaders say so next
                        raise
            elif word == "failed":
                raise value
            elif word == "done":
                return value

    def _tell(self, word: str, value: Any = None) -> None:
        """Say to the ranks that are no leaders what becomes of them; all leaders call this alike."""
        self._spoken = time.monotonic()
        if self.each > 1:
            from_rank_0(self.engines, (word, value))

    def generate(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[Group]:
        """Return one group per request, in their order, without the terms of the reward; the same on every
        rank but for bodies."""

        def on_leader() -> list[Group]:
            self.submit(requests, params, terms=False)
            while self.running:
                self.tick()
            return self.take()

        found: list[Group] = self.on_leaders(on_leader)
        return found

    def submit(self, requests: Sequence[GroupRequest], params: SamplingParams, *, terms: bool = True) -> None:
        """Let the responses wait for an engine, and begin those that can. Ordered by prompt, they are cut
        into equal stretches, one for each engine, so that a prompt is prefilled on one engine or on
        neighbours; in a stretch the longest expected come first. What an earlier step began is begun on the
        engine of its stretch. terms: whether the terms of the reward are wanted, or only what the verifier
        says."""
        assert self.leaders is not None
        self._params, self._terms = params, terms
        first, rows = self._count, [(request, i) for request in requests for i in range(len(request.seeds))]
        for request in requests:
            self._requests[self._count] = request
            self._count += len(request.seeds)
        own: dict[int, Request] = {}
        number, count = self.leaders.rank, self.leaders.world
        partials = self._move([request.partial[i] if request.partial else None for request, i in rows])
        for engine, waiting in enumerate(self._waiting):
            new = []
            for row in range(engine * len(rows) // count, (engine + 1) * len(rows) // count):
                request, i = rows[row]
                if not request.partial or request.partial[i] is None:
                    self._rows[first + row] = request, i
                    new.append(first + row)
                    continue
                self._begun[first + row] = engine
                if engine != number:
                    continue
                partial = partials[row]
                self._own[first + row] = request.prompt, partial
                if partial.finish != "abort":
                    self._finished.append((first + row, partial))
                else:
                    own[first + row] = Request(request.prompt.tokens, request.seeds[i], partial)
            waiting += sorted(new, key=lambda n: -self._rows[n][0].expected)
        self._begin(own)

    def _begin(self, own: dict[int, Request]) -> None:
        """Give waiting responses to engines that have room, alike on every leader; this one's engine gets
        `own` too. An engine may have `rollout.in_flight` at once, and as many more as it has just ended, so
        that it does not run dry before the next tick."""
        assert self.leaders is not None
        at_once = self.config.rollout.in_flight
        most = float(self.config.rollout.max_batch if at_once is None else at_once)
        if not most or len(self._waiting) == 1:
            most = math.inf
        running = [0] * len(self._waiting)
        for engine in self._begun.values():
            running[engine] += 1
        limits = [most + just for just in self._newly_ended]
        for engine, given in enumerate(share_out(self._waiting, running, limits, self._ended)):
            self.moved += len(set(given).difference(self._waiting[engine]))
            for number in given:
                self._begun[number] = engine
                request, i = self._rows.pop(number)
                if engine == self.leaders.rank:
                    self._own[number] = request.prompt, None
                    own[number] = Request(request.prompt.tokens, request.seeds[i])
        self._waiting = [[number for number in those if number in self._rows] for those in self._waiting]
        if not own:
            return
        try:
            self.engine.submit(own, self._params)
        except MegarlError as error:
            self._error = error  # exchanged by the next tick: no rank may be left waiting

    def _move(self, partials: Sequence[Partial | None]) -> dict[int, Completion]:
        """Return the partial responses of this rank's rows, which come from where they lie: row r of n goes
        to the engine whose stretch holds it."""
        assert self.leaders is not None
        outgoing: dict[int, list[bytes]] = {}
        incoming: dict[int, list[tuple[int, int]]] = {}  # by leader, (row, bytes)
        found = {}
        for row, partial in enumerate(partials):
            if partial is None:
                continue
            holder = partial.owner // self.each
            to = ((row + 1) * self.leaders.world - 1) // len(partials)
            if to == self.leaders.rank != holder:
                incoming.setdefault(holder, []).append((row, partial.size))
            elif partial.pickled is not None and to == holder:
                found[row] = pickle.loads(partial.pickled)
            elif partial.pickled is not None:
                outgoing.setdefault(to, []).append(partial.pickled)
        if not outgoing and not incoming:
            return found
        arrived = exchange(
            self.leaders,
            {to: torch.frombuffer(b"".join(parts), dtype=torch.uint8) for to, parts in outgoing.items()},
            {holder: sum(size for _, size in rows) for holder, rows in incoming.items()},
        )
        for holder, rows_ in incoming.items():
            data, at = arrived[holder].numpy().tobytes(), 0
            for row, size in rows_:
                found[row] = pickle.loads(data[at : at + size])
                at += size
        return found

    @property
    def running(self) -> int:
        """Return the number of prompts whose groups are not complete."""
        return sum(self._group(first) is None for first in self._requests)

    @property
    def ahead(self) -> list[Group]:
        """Return the groups that are complete, behind one that is not."""
        return [group for first in self._requests if (group := self._group(first)) is not None]

    def _group(self, first: int) -> Group | None:
        """Return the group whose responses begin with number `first`; None while one of them is missing."""
        request = self._requests[first]
        numbers = range(first, first + len(request.seeds))
        if not all(number in self._arrived for number in numbers):
            return None
        return Group(request.prompt, [self._arrived[number] for number in numbers], self._version)

    def take(self, most: int | None = None) -> list[Group]:
        """Return, once, the groups up to the first that is not complete, at most `most`."""
        groups: list[Group] = []
        while self._requests and (most is None or len(groups) < most):
            first = next(iter(self._requests))
            group = self._group(first)
            if group is None:
                break
            groups.append(group)
            del self._requests[first]
        return groups

    def tick(self) -> None:
        """Generate for a while, verify what has ended, exchange its facts, and give engines with room more to
        do. All leaders raise an error of any."""
        assert self.leaders is not None
        begin = time.perf_counter()
        ended, self._finished = self._finished, []
        pending, self._error = self._error, None
        error: MegarlError | None = None
        failure: EngineFailure | None = None
        end = time.monotonic() + TICK
        try:
            if pending is not None:
                raise pending
            while self.engine.running and (left := end - time.monotonic()) > 0:
                ended += self.engine.poll(left)
            if any(completion.finish == "abort" for _, completion in ended):
                raise EngineError("rollout: generation was aborted, the batch is not complete")
        except EngineFailure as problem:
            failure = problem
        except MegarlError as problem:
            error = problem
        version, responses = self.engine.weight_version, dict[int, Response]()
        generated = time.perf_counter()
        try:
            responses = self._verified(ended, version)
        except MegarlError as problem:
            error = problem
        verified = time.perf_counter()
        busy = generated - begin
        everyone = gather_on_0(self.leaders, (error, version, responses, failure, busy))
        # What rank 0 says to all is as long as the news, however many engines have none.
        word = self._sum_up(everyone) if everyone is not None else None
        error, arrived, failures, idle, speak = from_rank_0(self.leaders, word)
        self.seconds["generate"] += busy
        self.seconds["verify"] += verified - generated
        self.seconds["gather"] += time.perf_counter() - verified
        self.seconds["idle"] += idle
        if speak:
            self._tell("wait")
        if error is not None:
            raise error
        self._version = version
        self._arrived |= arrived | responses  # this rank's own with their bodies
        self._newly_ended = [0] * len(self._ended)
        for number in arrived:
            self._newly_ended[self._begun.pop(number)] += 1
        self._ended = [sum(both) for both in zip(self._ended, self._newly_ended, strict=True)]
        if failures:
            self._tell("recover", failures)
            self.recover(failures)
        self._begin({})

    def _sum_up(self, everyone: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return on rank 0 what all leaders have to know of what each has said: an error, the responses that
        have ended, the failures by rank (none where there is none), for how long engines were idle while one
        was not, and whether to speak to the others."""
        errors, versions, arrived, failures, busy = zip(*everyone, strict=True)
        error = next(filter(None, errors), None)
        if error is None and len(set(versions)) > 1:
            different = f"the ranks' engines have different weight versions: {list(versions)}"
            error = EngineError(f"rollout: {different}")
        speak = time.monotonic() - self._spoken > WORD
        idle = max(busy) - sum(busy) / len(busy)
        responses = {n: r for theirs in arrived for n, r in theirs.items()}
        return error, responses, self._by_rank(failures), idle, speak

    def _by_rank(self, failures: Sequence[EngineFailure | None]) -> Failures:
        """Return the failures of all ranks that have engines, of which only leaders meet any; [] for none."""
        if not any(failures):
            return []
        found: Failures = [None] * self.engines.world
        found[:: self.each] = failures
        return found

    def _verified(self, ended: Sequence[tuple[int, Completion]], version: int) -> dict[int, Response]:
        """Return this rank's responses by number, with rewards. version: of the engine's weights."""
        if not ended:
            return {}
        texts = self.tokenizer.batch_decode([c.tokens for _, c in ended], skip_special_tokens=True)
        reward, overlong, longest = self.config.reward, self.config.reward.overlong, self._params.max_tokens
        items: list[Item] = []
        for (number, c), text in zip(ended, texts, strict=True):
            judged = text, self._own.pop(number)[0].reference
            with_terms = self._terms and bool(reward.terms)
            items.append((*judged, len(c.tokens), longest, c.finish == "length") if with_terms else judged)
        responses = {}
        verdicts = self.verifier.verify(items)
        for (number, completion), text, verdict in zip(ended, texts, verdicts, strict=True):
            length, penalty = len(completion.tokens), 0.0
            if overlong.soft_punishment:
                penalty = soft_overlong_punishment(length, longest, overlong.buffer)
            terms = sum(reward.terms[name].weight * value for name, value in verdict.terms.items())
            versions = np.array(completion.versions, dtype=np.int32)
            body = Body(
                tokens=np.array(completion.tokens, dtype=np.int32),
                logprobs=np.array(completion.logprobs, dtype=np.float32),
                versions=versions if (versions != version).any() else None,
                routing=completion.routing,
            )
            responses[number] = Response.of(
                body,
                self.engines.rank,
                finish="length" if completion.finish == "length" else "stop",
                correct=verdict.correct,
                extracted=verdict.extracted,
                error=verdict.error,
                reward=reward.weight * verdict.reward(reward.correct, reward.incorrect) + terms + penalty,
                penalty=penalty,
                score=verdict.score,
                terms=dict(verdict.terms),
                judged=verdict.judged,
                reflects=self.reflection.search(text) is not None if self.reflection else None,
            )
        return responses

    def abort(self, keep: bool) -> list[GroupRequest]:
        """End what runs and forget what was not taken; return the requests of that, in their order. keep:
        with their partial responses, to be continued, which stay where they are."""
        assert self.leaders is not None
        ended: dict[int, Completion] = {}
        failure = None
        try:
            ended = dict([*self._finished, *self.engine.abort()])
        except EngineFailure as error:
            failure = error
        partial = {n: c for n, c in ended.items() if c.tokens}
        partial |= {n: c for n, (_, c) in self._own.items() if c is not None and n not in ended}
        for first, request in self._requests.items():  # what has arrived, of a group that is not complete
            for n in range(first, first + len(request.seeds)):
                if n in self._arrived and (body := self._arrived[n].body) is not None:
                    partial[n] = self._as_completion(body, self._arrived[n].finish)
        held = {n: pickle.dumps(c) for n, c in partial.items()} if keep else {}
        owner = self.engines.rank
        everyone = gather_on_0(
            self.leaders, (failure, {n: Partial(owner, len(c), None) for n, c in held.items()})
        )
        word = None
        if everyone is not None:
            failures = self._by_rank([failure for failure, _ in everyone])
            word = failures, {n: p for _, theirs in everyone for n, p in theirs.items()}
        failures, kept = from_rank_0(self.leaders, word)
        if failures:
            self._tell("recover", failures)
            self.recover(failures)
        kept |= {n: Partial(owner, len(c), c) for n, c in held.items()}
        returned = []
        for first, request in self._requests.items():
            numbers = range(first, first + len(request.seeds))
            parts = [kept.get(n) for n in numbers] if keep else ()
            returned.append(GroupRequest(request.prompt, request.seeds, parts))
        self._clear()
        return returned

    def _as_completion(self, body: Body, finish: Any) -> Completion:
        """Return a verified response as the engine gave it."""
        versions = [self._version] * body.tokens.size if body.versions is None else body.versions.tolist()
        return Completion(body.tokens.tolist(), body.logprobs.tolist(), finish, versions, body.routing)

    def with_bodies(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with all their bodies on rank 0; on the others as they are. All ranks call this
        alike."""
        here = {
            (g, i): r.body for g, group in enumerate(groups) for i, r in enumerate(group.responses) if r.body
        }
        everyone = gather_on_0(self.leaders, here) if self.leaders is not None else None
        if everyone is None:
            return list(groups)
        bodies = {place: body for theirs in everyone for place, body in theirs.items()}
        return [
            replace(group, responses=[replace(r, body=bodies[g, i]) for i, r in enumerate(group.responses)])
            for g, group in enumerate(groups)
        ]
