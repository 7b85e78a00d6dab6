"""Generation over all ranks: split the requests over the engines, generate, verify, gather, and put the groups together on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megarl.config.errors import EngineError, EngineFailure, MegarlError
from megarl.config.schema import RewardConfig
from megarl.data.prompts import Prompt
from megarl.rewards.verdict import Verdict, soft_overlong_punishment
from megarl.rollout.delivery import Failures
from megarl.rollout.engine import Completion, Request, RolloutEngine, SamplingParams
from megarl.rollout.groups import Group, Response

TICK = 0.25  # seconds after which ranks tell each other what has ended, so that none waits in a collective for a whole response


class Verifier(Protocol):
    """What a wave needs of a VerifierPool."""

    def verify(self, items: Sequence[tuple[str, str]]) -> list[Verdict]: ...


@dataclass
class Asked:
    """A prompt whose responses are being made, `begun` as far as they are from an earlier step."""

    prompt: Prompt
    seeds: Sequence[int]
    begun: Sequence[Completion | None] = ()

    def begun_at(self, index: int) -> Completion | None:
        return self.begun[index] if self.begun else None


def give_up(failures: Failures) -> None:
    """Where engines cannot be started anew."""
    raise next(failure for failure in failures if failure is not None)


@dataclass
class WaveRunner:
    """rank, world: this rank among those that share the work, `tp` of which are one engine; gather: every rank's object, by rank, on every
    rank; recover: brings engines back that failed, see Delivery.

    seconds adds up this rank's time per part: generate, verify, gather (waiting for slower ranks included)."""

    rank: int
    world: int
    engine: RolloutEngine
    verifier: Verifier
    tokenizer: Any
    gather: Callable[[Any], list[Any]]
    reward: RewardConfig
    tp: int = 1
    recover: Callable[[Failures], None] = give_up
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("generate", "verify", "gather"), 0.0))

    def __post_init__(self) -> None:
        self._asked: dict[int, Asked] = {}  # by the number of the first response, until the group is taken
        self._arrived: dict[int, Response] = {}
        self._numbers = 0
        self._mine: dict[int, tuple[Prompt, Completion | None]] = {}  # this rank's, until they are verified
        self._waiting: list[tuple[int, Completion]] = []  # what an earlier step had finished, and is yet to be verified
        self._params = SamplingParams(0)
        self._version = -1
        self._error: MegarlError | None = None

    def run(self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], params: SamplingParams) -> list[Group]:
        """One group per prompt, in their order, with a response per seed; the same on every rank."""
        self.submit([Asked(prompt, own) for prompt, own in zip(prompts, seeds, strict=True)], params)
        while self._running:
            self.tick()
        return self.take()

    def submit(self, asked: Sequence[Asked], params: SamplingParams) -> None:
        """Begins the responses. Ordered by prompt, they are cut into equal stretches, one for each engine, so that a prompt is prefilled on
        one engine or on neighbours."""
        self._params = params
        rows = [(group, i) for group in asked for i in range(len(group.seeds))]
        first, engine, engines = self._numbers, self.rank // self.tp, self.world // self.tp
        self._numbers += len(rows)
        at = first
        for group in asked:
            self._asked[at] = group
            at += len(group.seeds)
        if self.rank % self.tp:
            return
        requests = {}
        for row in range(engine * len(rows) // engines, (engine + 1) * len(rows) // engines):
            group, i = rows[row]
            begun = group.begun_at(i)
            self._mine[first + row] = group.prompt, begun
            if begun is not None and begun.finish != "abort":
                self._waiting.append((first + row, begun))
            else:
                requests[first + row] = Request(group.prompt.tokens, group.seeds[i], begun)
        try:
            self.engine.submit(requests, params)
        except MegarlError as error:
            self._error = error  # told to the others by the next tick: none may be left waiting

    @property
    def _running(self) -> bool:
        return len(self._arrived) < self._numbers

    @property
    def running(self) -> int:
        """Prompts whose groups are not complete."""
        return sum(not self._complete(first) for first in self._asked)

    @property
    def ahead(self) -> list[Group]:
        """Groups that are complete, behind one that is not."""
        return [self._group(first) for first in self._asked if self._complete(first)]

    def _complete(self, first: int) -> bool:
        return all(first + i in self._arrived for i in range(len(self._asked[first].seeds)))

    def _group(self, first: int) -> Group:
        asked = self._asked[first]
        return Group(asked.prompt, [self._arrived[first + i] for i in range(len(asked.seeds))], self._version)

    def take(self, most: int | None = None) -> list[Group]:
        """The complete groups up to the first that is not, in the order of their prompts, at most `most`; each is given once."""
        groups: list[Group] = []
        while self._asked and (most is None or len(groups) < most) and self._complete(first := next(iter(self._asked))):
            groups.append(self._group(first))
            del self._asked[first]
        return groups

    def tick(self) -> None:
        """A while of generating, after which every rank knows what has ended. An error on any rank is raised on all of them."""
        begin = time.perf_counter()
        ended, payload = self._collect()
        generated = time.perf_counter()
        if ended:
            payload |= self._answer(ended)
        verified = time.perf_counter()
        payloads = self.gather(payload)
        self.seconds["generate"] += generated - begin
        self.seconds["verify"] += verified - generated
        self.seconds["gather"] += time.perf_counter() - verified
        for other in payloads:
            if "error" in other:
                raise other["error"]
        failures = [p.get("failure") for p in payloads]
        versions = [p["version"] for p in payloads]
        if len(set(versions)) > 1:
            raise EngineError(f"rollout: the ranks' engines have different weight versions: {versions}")
        self._version = versions[0]
        for other in payloads:
            if "numbers" in other:
                self._arrived |= zip(other["numbers"], self._responses(other), strict=True)
        if any(failures):
            self.recover(failures)

    def _collect(self) -> tuple[list[tuple[int, Completion]], dict[str, Any]]:
        """What has ended on this rank's engine within a tick; and what there is to say if it failed."""
        payload: dict[str, Any] = {}
        ended, self._waiting = self._waiting, []
        end = time.monotonic() + TICK
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            while self.engine.running and (left := end - time.monotonic()) > 0:
                ended += self.engine.poll(left)
            if any(completion.finish == "abort" for _, completion in ended):
                raise EngineError("rollout: generation was aborted, the batch is not complete")
        except EngineFailure as failure:
            payload["failure"] = failure
        except MegarlError as problem:
            payload["error"] = problem
        payload["version"] = self.engine.weight_version
        return ended, payload

    def _answer(self, ended: Sequence[tuple[int, Completion]]) -> dict[str, Any]:
        """This rank's responses and verdicts as flat arrays, which pickle to little more than their bytes."""
        completions = [completion for _, completion in ended]
        texts = self.tokenizer.batch_decode([c.tokens for c in completions], skip_special_tokens=True)
        try:
            verdicts = self.verifier.verify([(text, self._mine.pop(n)[0].answer) for text, (n, _) in zip(texts, ended, strict=True)])
        except MegarlError as error:
            return {"error": error}
        return {
            "numbers": [number for number, _ in ended],
            **_pack(completions),
            "verdicts": [(v.correct, v.extracted, v.error) for v in verdicts],
        }

    def abort(self, keep: bool) -> list[Asked]:
        """Ends what runs and forgets what was not taken; gives the prompts of that back, in their order. keep: with what there is of their
        responses, to be gone on with."""
        left: list[tuple[int, Completion]] = []
        failure = None
        try:
            left = [*self._waiting, *self.engine.abort()]
        except EngineFailure as error:
            failure = error
        begun = {n: c for n, c in left if c.tokens} | {n: b for n, (_, b) in self._mine.items() if b is not None and n not in dict(left)}
        told = self.gather({"failure": failure, "begun": begun if keep else {}})
        if any(failures := [other["failure"] for other in told]):
            self.recover(failures)
        everything = {n: c for other in told for n, c in other["begun"].items()}
        returned = []
        for first, asked in self._asked.items():
            parts = [everything.get(n) or self._kept(n) for n in range(first, first + len(asked.seeds))]
            returned.append(Asked(asked.prompt, asked.seeds, parts if keep else ()))
        self._asked, self._arrived, self._mine, self._waiting, self._numbers = {}, {}, {}, [], 0
        return returned

    def _kept(self, number: int) -> Completion | None:
        """A response of a group that is not complete, as the engine gave it."""
        if number not in self._arrived:
            return None
        r = self._arrived[number]
        versions = [self._version] * r.tokens.size if r.versions is None else r.versions.tolist()
        return Completion(r.tokens.tolist(), r.logprobs.tolist(), r.finish, versions)

    def _responses(self, payload: dict[str, Any]) -> list[Response]:
        ends = payload["lengths"].cumsum()[:-1]
        tokens, logprobs, versions = (np.split(payload[name], ends) for name in ("tokens", "logprobs", "versions"))
        responses = []
        for i, (correct, extracted, error) in enumerate(payload["verdicts"]):
            penalty = 0.0
            if self.reward.overlong.soft_punishment:
                penalty = soft_overlong_punishment(int(payload["lengths"][i]), self._params.max_tokens, self.reward.overlong.buffer)
            responses.append(
                Response(
                    tokens=tokens[i],
                    logprobs=logprobs[i],
                    finish="length" if payload["truncated"][i] else "stop",
                    correct=correct,
                    extracted=extracted,
                    error=error,
                    reward=(self.reward.correct if correct else self.reward.incorrect) + penalty,
                    penalty=penalty,
                    versions=versions[i] if (versions[i] != self._version).any() else None,
                )
            )
        return responses


def _pack(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    return {
        "lengths": np.array([len(c.tokens) for c in completions], dtype=np.int64),
        "tokens": np.array([t for c in completions for t in c.tokens], dtype=np.int32),
        "logprobs": np.array([p for c in completions for p in c.logprobs], dtype=np.float32),
        "versions": np.array([v for c in completions for v in c.versions], dtype=np.int32),
        "truncated": np.array([c.finish == "length" for c in completions], dtype=bool),
    }
