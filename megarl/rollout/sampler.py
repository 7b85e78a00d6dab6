"""The rollout of a step: prompts in, verified groups of responses out.

`RolloutSampler` draws prompts and keeps what a step leaves to the next, `GroupCollector` decides which groups
a step trains on (dynamic sampling), `RolloutWorker` generates over all ranks. All ranks call them alike and
take the same decisions, since they see the same gathered groups.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config.errors import ConfigError, DataError, EngineError, EngineFailure, MegarlError
from megarl.config.schema import Config, DynamicSamplingConfig
from megarl.data.prompts import Prompt
from megarl.parallel.comm import gather_objects
from megarl.parallel.runtime import Ranks
from megarl.rewards.shaping import soft_overlong_punishment
from megarl.rollout.balance import share_out
from megarl.rollout.batch import (
    EvaluationResult,
    Group,
    Response,
    RolloutBatch,
    prompt_from_state,
    prompt_state,
    response_stats,
    routing_from_state,
    routing_state,
)
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.sampling import Completion, Request, SamplingParams, evaluation_seed, response_seed
from megarl.rollout.weight_sync import Failures

if TYPE_CHECKING:
    from megarl.rewards.pool import Item, VerifierPool

SAME = 1e-6  # rewards of a smaller standard deviation count as one: group_advantages adds this to it
TICK = 0.25  # seconds after which ranks exchange what has ended: none waits for a whole response


@dataclass
class GroupRequest:
    """A prompt, a seed for each of its responses, and the partial responses that an earlier step began.
    expected: tokens of a response, which says who begins first; 0 where nothing is known."""

    prompt: Prompt
    seeds: Sequence[int]
    partial: Sequence[Completion | None] = ()
    expected: float = 0.0


class RolloutSampler:
    """Collects a step's groups, and evaluates.

    worker  of this rank
    draw    the next n prompts of the training data, the same on every rank

    With an engine that streams, prompts are drawn ahead as long as groups are missing, and groups are
    accepted in the order of their prompts. Once there are enough, what still runs is aborted: its prompts
    come first in the next step, with `rollout.continue_partial` together with their partial responses.
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
        and verifiers raise."""
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
            lengths = [r.tokens.size for r in group.responses]
            self.lengths[group.prompt.uid] = sum(lengths) / len(lengths)
        groups, self.surplus = collector.result()
        # Nothing was offered where the surplus of the step before was enough.
        responses = [r for group in collector.offered or groups for r in group.responses]
        errors = Counter(r.error for r in responses if r.error is not None)
        stats = {**collector.stats(), **response_stats(responses), "rollout/moved": worker.moved}
        return RolloutBatch(step, groups, stats, worker.seconds, dict(errors))

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

    def evaluate(
        self, problems: Sequence[Prompt], k: int | None = None, params: SamplingParams | None = None
    ) -> EvaluationResult:
        """Sample and verify k answers (`evaluation.samples`) to each problem. DataError without one."""
        if not problems:
            raise DataError("data.eval: there is no problem to evaluate on (name a file that holds some)")
        evaluation, rollout = self.config.evaluation, self.config.rollout
        k = k or evaluation.samples
        params = params or SamplingParams(
            rollout.max_response_tokens, evaluation.temperature, evaluation.top_p, 0, rollout.stop
        )
        drawn: Counter[int] = Counter()
        requests = []
        for problem in problems:
            first = drawn[problem.uid] * k
            seeds = [evaluation_seed(self.config.seed, problem.uid, first + i) for i in range(k)]
            requests.append(GroupRequest(problem, seeds))
            drawn[problem.uid] += 1
        self.worker.reset()
        return EvaluationResult(k, self.worker.generate(requests, params))

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return a function that gives, at any later time, what the next step needs besides the weights and
        the prompts' order; lists and dicts only. Groups and requests never change once they are made."""
        surplus, returned, lengths = list(self.surplus), list(self.returned), dict(self.lengths)

        def state() -> dict[str, Any]:
            requests = [
                {
                    "prompt": prompt_state(request.prompt),
                    "seeds": list(request.seeds),
                    "begun": [
                        completion and vars(completion) | {"routing": routing_state(completion.routing)}
                        for completion in request.partial
                    ],
                }
                for request in returned
            ]
            groups = [group.state_dict() for group in surplus]
            return {"surplus": groups, "returned": requests, "lengths": list(lengths.items())}

        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what a `snapshot` gave."""
        self.surplus = [Group.from_state(group) for group in state["surplus"]]
        self.lengths = dict(state.get("lengths", ()))
        self.returned = []
        for request in state.get("returned", ()):
            partial = [
                Completion(**c | {"routing": routing_from_state(c.get("routing"))}) if c else None
                for c in request["begun"]
            ]
            prompt = prompt_from_state(request["prompt"])
            self.returned.append(GroupRequest(prompt, request["seeds"], partial))


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
        tokens = [sum(r.tokens.size for r in group.responses) for group in self.offered]
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
    groups of all ranks together on every rank.

    A response is submitted and numbered (`_requests`), waits for an engine (`_waiting`, `_begun`),
    is generated and verified by the rank that has the engine (`_own`), exchanged (`_arrived`, the same on
    every rank), and taken once its group is whole.

    engines  the ranks that have engines
    recover  brings engines that failed back, see WeightSync
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
        self._clear()

    def _clear(self) -> None:
        # Responses have numbers, the same on every rank.
        self._count = 0
        # By the number of the first response, until the group is taken.
        self._requests: dict[int, GroupRequest] = {}
        self._arrived: dict[int, Response] = {}
        self._own: dict[int, tuple[Prompt, Completion | None]] = {}  # this rank's, until they are verified
        self._finished: list[tuple[int, Completion]] = []  # by an earlier step, and yet to be verified
        # The same on every rank: the responses that wait, by the engine whose they are; of each the request
        # and its index; the engine of each that was begun; and by engine how many have just ended.
        self._waiting: list[list[int]] = [[] for _ in self._ended]
        self._rows: dict[int, tuple[GroupRequest, int]] = {}
        self._begun: dict[int, int] = {}
        self._newly_ended = [0] * len(self._ended)
        if self.engine.running:  # after an error
            self.engine.abort()

    def generate(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[Group]:
        """Return one group per request, in their order, without the terms of the reward; the same on every
        rank."""
        self.submit(requests, params, terms=False)
        while self.running:
            self.tick()
        return self.take()

    def submit(self, requests: Sequence[GroupRequest], params: SamplingParams, *, terms: bool = True) -> None:
        """Let the responses wait for an engine, and begin those that can. Ordered by prompt, they are cut
        into equal stretches, one for each engine, so that a prompt is prefilled on one engine or on
        neighbours; in a stretch the longest expected come first. What an earlier step began is begun on the
        engine of its stretch. terms: whether the terms of the reward are wanted, or only what the verifier
        says."""
        self._params, self._terms = params, terms
        first, rows = self._count, [(request, i) for request in requests for i in range(len(request.seeds))]
        for request in requests:
            self._requests[self._count] = request
            self._count += len(request.seeds)
        own: dict[int, Request] = {}
        number, count = self._engine, len(self._waiting)
        for engine, waiting in enumerate(self._waiting):
            new = []
            for row in range(engine * len(rows) // count, (engine + 1) * len(rows) // count):
                request, i = rows[row]
                partial = request.partial[i] if request.partial else None
                if partial is None:
                    self._rows[first + row] = request, i
                    new.append(first + row)
                    continue
                self._begun[first + row] = engine
                if engine != number:
                    continue
                self._own[first + row] = request.prompt, partial
                if partial.finish != "abort":
                    self._finished.append((first + row, partial))
                else:
                    own[first + row] = Request(request.prompt.tokens, request.seeds[i], partial)
            waiting += sorted(new, key=lambda n: -self._rows[n][0].expected)
        self._begin(own)

    @property
    def _engine(self) -> int:
        """Return the number of the engine whose leader this rank is; -1 where it is none's."""
        number, part = divmod(self.engines.rank, self.config.rollout.engine_tp)
        return -1 if part else number

    def _begin(self, own: dict[int, Request]) -> None:
        """Give waiting responses to engines that have room, alike on every rank; this rank's engine gets
        `own` too. An engine may have `rollout.in_flight` at once, and as many more as it has just ended, so
        that it does not run dry before the next tick."""
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
                if engine == self._engine:
                    self._own[number] = request.prompt, None
                    own[number] = Request(request.prompt.tokens, request.seeds[i])
        self._waiting = [[number for number in those if number in self._rows] for those in self._waiting]
        if not own:
            return
        try:
            self.engine.submit(own, self._params)
        except MegarlError as error:
            self._error = error  # exchanged by the next tick: no rank may be left waiting

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
        """Generate for a while, verify what has ended, exchange it, and give engines with room more to do.
        All ranks raise an error of any."""
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
        busy = generated - begin if self._engine >= 0 else None
        everyone = gather_objects(self.engines, (error, version, responses, failure, busy))
        self.seconds["generate"] += generated - begin
        self.seconds["verify"] += verified - generated
        self.seconds["gather"] += time.perf_counter() - verified
        errors, versions, arrived, failures, all_busy = zip(*everyone, strict=True)
        seconds = [s for s in all_busy if s is not None]
        self.seconds["idle"] += max(seconds) - sum(seconds) / len(seconds)
        if any(errors):
            raise next(filter(None, errors))
        if len(set(versions)) > 1:
            raise EngineError(f"rollout: the ranks' engines have different weight versions: {list(versions)}")
        self._version = version
        self._newly_ended = [0] * len(self._ended)
        for theirs in arrived:
            self._arrived |= theirs
            for number in theirs:
                self._newly_ended[self._begun.pop(number)] += 1
        self._ended = [sum(both) for both in zip(self._ended, self._newly_ended, strict=True)]
        if any(failures):
            self.recover(list(failures))
        self._begin({})

    def _verified(self, ended: Sequence[tuple[int, Completion]], version: int) -> dict[int, Response]:
        """Return this rank's responses by number, with rewards. version: of the engine's weights."""
        if not ended:
            return {}
        texts = self.tokenizer.batch_decode([c.tokens for _, c in ended], skip_special_tokens=True)
        reward, overlong, longest = self.config.reward, self.config.reward.overlong, self._params.max_tokens
        items: list[Item] = []
        for (number, c), text in zip(ended, texts, strict=True):
            judged = text, self._own.pop(number)[0].answer
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
            responses[number] = Response(
                tokens=np.array(completion.tokens, dtype=np.int32),
                logprobs=np.array(completion.logprobs, dtype=np.float32),
                finish="length" if completion.finish == "length" else "stop",
                correct=verdict.correct,
                extracted=verdict.extracted,
                error=verdict.error,
                reward=reward.weight * verdict.reward(reward.correct, reward.incorrect) + terms + penalty,
                penalty=penalty,
                score=verdict.score,
                terms=dict(verdict.terms),
                versions=versions if (versions != version).any() else None,
                reflects=self.reflection.search(text) is not None if self.reflection else None,
                routing=completion.routing,
            )
        return responses

    def abort(self, keep: bool) -> list[GroupRequest]:
        """End what runs and forget what was not taken; return the requests of that, in their order. keep:
        with their partial responses, to be continued."""
        ended: dict[int, Completion] = {}
        failure = None
        try:
            ended = dict([*self._finished, *self.engine.abort()])
        except EngineFailure as error:
            failure = error
        partial = {n: c for n, c in ended.items() if c.tokens}
        partial |= {n: c for n, (_, c) in self._own.items() if c is not None and n not in ended}
        everyone = gather_objects(self.engines, (failure, partial if keep else {}))
        if any(failures := [failure for failure, _ in everyone]):
            self.recover(failures)
        partial = {n: c for _, theirs in everyone for n, c in theirs.items()}
        returned = []
        for first, request in self._requests.items():
            numbers = range(first, first + len(request.seeds))
            parts = [partial.get(n) or self._as_completion(n) for n in numbers] if keep else ()
            returned.append(GroupRequest(request.prompt, request.seeds, parts))
        self._clear()
        return returned

    def _as_completion(self, number: int) -> Completion | None:
        """Return a response that has arrived, of a group that is not complete, as the engine gave it."""
        r = self._arrived.get(number)
        if r is None:
            return None
        versions = [self._version] * r.tokens.size if r.versions is None else r.versions.tolist()
        return Completion(r.tokens.tolist(), r.logprobs.tolist(), r.finish, versions, r.routing)
