"""One generation batch over all ranks: split the requests, generate, verify, gather, and put the groups together on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megarl.config.errors import EngineError, MegarlError
from megarl.config.schema import RewardConfig
from megarl.data.prompts import Prompt
from megarl.rewards.shaping import soft_overlong_punishment
from megarl.rewards.verdict import Verdict
from megarl.rollout.engine import Completion, Request, RolloutEngine, SamplingParams
from megarl.rollout.groups import Group, Response


class Verifier(Protocol):
    """What a wave needs of a VerifierPool."""

    def verify(self, items: Sequence[tuple[str, str]]) -> list[Verdict]: ...


@dataclass
class WaveRunner:
    """rank, world: this engine's place among the engines that share the work; gather: every rank's object, by rank, on every rank.

    seconds adds up this rank's time per part: generate, verify, gather (waiting for slower ranks included)."""

    rank: int
    world: int
    engine: RolloutEngine
    verifier: Verifier
    tokenizer: Any
    gather: Callable[[Any], list[Any]]
    reward: RewardConfig
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("generate", "verify", "gather"), 0.0))

    def run(self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], params: SamplingParams) -> list[Group]:
        """One group per prompt, in their order, with a response per seed; the same on every rank.

        The responses, ordered by prompt, are cut into `world` equal stretches, so that a prompt is prefilled on one rank or on
        neighbours. An error on any rank is raised on all of them, as none may be left waiting."""
        pairs = [(prompt, seed) for prompt, own in zip(prompts, seeds, strict=True) for seed in own]
        mine = pairs[self.rank * len(pairs) // self.world : (self.rank + 1) * len(pairs) // self.world]
        try:
            payload: dict[str, Any] = self._answer(mine, params)
        except MegarlError as error:
            payload = {"error": error}
        begin = time.perf_counter()
        payloads = self.gather(payload)
        self.seconds["gather"] += time.perf_counter() - begin
        for other in payloads:
            if "error" in other:
                raise other["error"]
        if len({p["version"] for p in payloads}) > 1:
            raise EngineError(f"rollout: the ranks' engines have different weight versions: {[p['version'] for p in payloads]}")
        responses = [r for p in payloads for r in self._responses(p, params)]
        groups, at = [], 0
        for prompt, own in zip(prompts, seeds, strict=True):
            groups.append(Group(prompt, responses[at : at + len(own)], payloads[0]["version"]))
            at += len(own)
        return groups

    def _answer(self, pairs: Sequence[tuple[Prompt, int]], params: SamplingParams) -> dict[str, Any]:
        """This rank's responses and verdicts as flat arrays, which pickle to little more than their bytes."""
        begin = time.perf_counter()
        completions = self.engine.generate([Request(prompt.tokens, seed) for prompt, seed in pairs], params)
        if any(c.finish == "abort" for c in completions):
            raise EngineError("rollout: generation was aborted, the batch is not complete")
        generated = time.perf_counter()
        # A rank may have nothing to do (fewer responses than ranks), and batch_decode makes one empty text of an empty list.
        texts = self.tokenizer.batch_decode([c.tokens for c in completions], skip_special_tokens=True) if completions else []
        verdicts = self.verifier.verify([(text, prompt.answer) for text, (prompt, _) in zip(texts, pairs, strict=True)])
        self.seconds["generate"] += generated - begin
        self.seconds["verify"] += time.perf_counter() - generated
        return {
            "version": self.engine.weight_version,
            **_pack(completions),
            "verdicts": [(v.correct, v.extracted, v.error) for v in verdicts],
        }

    def _responses(self, payload: dict[str, Any], params: SamplingParams) -> list[Response]:
        ends = payload["lengths"].cumsum()[:-1]
        tokens, logprobs = np.split(payload["tokens"], ends), np.split(payload["logprobs"], ends)
        responses = []
        for i, (correct, extracted, error) in enumerate(payload["verdicts"]):
            penalty = 0.0
            if self.reward.overlong.soft_punishment:
                penalty = soft_overlong_punishment(int(payload["lengths"][i]), params.max_tokens, self.reward.overlong.buffer)
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
                )
            )
        return responses


def _pack(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    return {
        "lengths": np.array([len(c.tokens) for c in completions], dtype=np.int64),
        "tokens": np.array([t for c in completions for t in c.tokens], dtype=np.int32),
        "logprobs": np.array([p for c in completions for p in c.logprobs], dtype=np.float32),
        "truncated": np.array([c.finish == "length" for c in completions], dtype=bool),
    }
