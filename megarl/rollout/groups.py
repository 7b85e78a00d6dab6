"""Groups of responses to one prompt, and dynamic sampling: which groups a step trains on. Pure logic, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megarl.config.errors import DataError
from megarl.config.schema import DynamicSamplingConfig
from megarl.data.prompts import Prompt


@dataclass
class Response:
    """tokens int32 [l] and logprobs float32 [l] as the engine gave them; extracted and error as in Verdict; reward as it enters the
    advantages, penalty (soft overlong punishment, <= 0) included."""

    tokens: np.ndarray
    logprobs: np.ndarray
    finish: Literal["stop", "length"]
    correct: bool
    extracted: str | None
    error: str | None
    reward: float
    penalty: float

    @property
    def truncated(self) -> bool:
        return self.finish == "length"


@dataclass
class Group:
    """All responses to one prompt; `version`: the weights that they were sampled from."""

    prompt: Prompt
    responses: list[Response]
    version: int

    @property
    def correct(self) -> int:
        return sum(r.correct for r in self.responses)

    @property
    def mixed(self) -> bool:
        """0 < correct < group size (DAPO eq. 11): the group has a group-relative signal."""
        return 0 < self.correct < len(self.responses)

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, numbers and texts only; exact (a float32 survives as a float64)."""
        responses = [{**vars(r), "tokens": r.tokens.tolist(), "logprobs": r.logprobs.tolist()} for r in self.responses]
        return {"prompt": {**vars(self.prompt), "tokens": list(self.prompt.tokens)}, "responses": responses, "version": self.version}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Group:
        """Undoes `state_dict`."""
        prompt = Prompt(**{**state["prompt"], "tokens": tuple(state["prompt"]["tokens"])})
        arrays = [(np.array(r["tokens"], dtype=np.int32), np.array(r["logprobs"], dtype=np.float32)) for r in state["responses"]]
        responses = [Response(**{**r, "tokens": t, "logprobs": p}) for r, (t, p) in zip(state["responses"], arrays, strict=True)]
        return Group(prompt, responses, state["version"])


class GroupCollector:
    """Collects the groups of one rollout step, one generation batch (wave) after another:

        while n := collector.wave(): collector.offer(<groups of the next n prompts, in their order>)
        groups, surplus = collector.result()

    prompts: groups wanted; surplus: accepted groups left over from the step before, which are taken first; oversample: size of the
    first wave / groups that are missing then. Every decision follows from the groups offered, in their order, and from nothing else."""

    def __init__(self, prompts: int, dynamic: DynamicSamplingConfig, surplus: Iterable[Group] = (), oversample: float = 1.0) -> None:
        self.prompts, self.dynamic, self.oversample = prompts, dynamic, oversample
        self.accepted = list(surplus)
        self.offered: list[Group] = []  # of this step, in order
        self.rejected: list[Group] = []
        self.batches = 0

    @property
    def missing(self) -> int:
        return max(0, self.prompts - len(self.accepted))

    def wave(self) -> int:
        """Prompts of the next generation batch; 0 when the step has what it needs or has reached its limit.

        Raises DataError at the limit where the configuration says stop."""
        if not self.missing:
            return 0
        if not self.batches:
            return math.ceil(self.missing * self.oversample) if self.dynamic.enabled else self.missing
        if self.batches < self.dynamic.max_batches:
            # Laplace's estimate of the acceptance rate: never 0, and careful after few prompts.
            rate = (len(self.offered) - len(self.rejected) + 1) / (len(self.offered) + 2)
            return min(self.prompts, max(self.missing, math.ceil(self.missing / rate)))
        if self.dynamic.at_limit == "stop":
            raise DataError(
                f"rollout.dynamic_sampling.max_batches: after {self.batches} generation batches ({len(self.offered)} prompts) only "
                f"{len(self.accepted)} of {self.prompts} groups have right and wrong answers "
                "(raise it, choose other prompts, or set rollout.dynamic_sampling.at_limit to continue)"
            )
        return 0

    def offer(self, groups: Sequence[Group]) -> None:
        """One generation batch, in the order of its prompts."""
        self.batches += 1
        self.offered += groups
        for group in groups:
            (self.accepted if group.mixed or not self.dynamic.enabled else self.rejected).append(group)

    def result(self) -> tuple[list[Group], list[Group]]:
        """The `prompts` groups to train on, and the surplus for the next step (at most `prompts`; what is beyond is dropped). Where too few
        were accepted, the first rejected ones follow the accepted."""
        groups = (self.accepted + self.rejected)[: self.prompts]
        return groups, self.accepted[self.prompts : 2 * self.prompts]

    def stats(self) -> dict[str, float]:
        """rollout/*: counts over the groups offered in this step. kept + all right + all wrong = prompts, with or without filtering."""
        size = [len(group.responses) for group in self.offered]
        right = sum(group.correct == n for group, n in zip(self.offered, size, strict=True))
        wrong = sum(group.correct == 0 for group in self.offered)
        return {
            "rollout/groups_kept": len(self.offered) - right - wrong,
            "rollout/groups_all_right": right,
            "rollout/groups_all_wrong": wrong,
            "rollout/batches": self.batches,
            "rollout/prompts": len(self.offered),
            "rollout/tokens": sum(r.tokens.size for group in self.offered for r in group.responses),
            "rollout/surplus": len(self.result()[1]),
        }
