"""Groups of responses to one prompt, and dynamic sampling: which groups a step trains on. Pure logic, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megarl.config.errors import ConfigError, DataError
from megarl.config.schema import DynamicSamplingConfig
from megarl.data.prompts import Prompt


@dataclass
class Response:
    """tokens int32 [l] and logprobs float32 [l] as the engine gave them; extracted and error as in Verdict; reward as it enters the
    advantages, penalty (soft overlong punishment, <= 0) included; versions int32 [l]: of the weights that each token was sampled from,
    where that is not the group's version for all of them."""

    tokens: np.ndarray
    logprobs: np.ndarray
    finish: Literal["stop", "length"]
    correct: bool
    extracted: str | None
    error: str | None
    reward: float
    penalty: float
    versions: np.ndarray | None = None

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
        responses = [
            {
                **vars(r),
                "tokens": r.tokens.tolist(),
                "logprobs": r.logprobs.tolist(),
                "versions": None if r.versions is None else r.versions.tolist(),
            }
            for r in self.responses
        ]
        return {"prompt": prompt_state(self.prompt), "responses": responses, "version": self.version}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Group:
        """Undoes `state_dict`."""
        responses = []
        for r in state["responses"]:
            versions = r.get("versions")
            arrays = {
                "tokens": np.array(r["tokens"], dtype=np.int32),
                "logprobs": np.array(r["logprobs"], dtype=np.float32),
                "versions": None if versions is None else np.array(versions, dtype=np.int32),
            }
            responses.append(Response(**{**r, **arrays}))
        return Group(prompt_from_state(state["prompt"]), responses, state["version"])


def prompt_state(prompt: Prompt) -> dict[str, Any]:
    """As JSON holds it."""
    return {**vars(prompt), "tokens": list(prompt.tokens)}


def prompt_from_state(state: Mapping[str, Any]) -> Prompt:
    """Undoes `prompt_state`."""
    return Prompt(**{**state, "tokens": tuple(state["tokens"])})


class GroupCollector:
    """Collects the groups of one rollout step, one generation batch (wave) after another, or, from an engine that streams, one by one:

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
        self.asked = 0  # prompts, where the engine streams

    @property
    def missing(self) -> int:
        return max(0, self.prompts - len(self.accepted))

    def wave(self) -> int:
        """Prompts of the next generation batch; 0 when the step has what it needs or has reached its limit.

        Raises DataError (ConfigError where the verifier always failed) at the limit where the configuration says stop."""
        if not self.missing:
            return 0
        if self.batches >= self.dynamic.max_batches:
            self._check_limit()
            return 0
        wanted = self._first if not self.batches else min(self.prompts, max(self.missing, self._needed(self.missing, ())))
        self.batches += 1
        return wanted

    def refill(self, ahead: Sequence[Group], running: int) -> int:
        """Prompts to submit beside those that run. ahead: groups that are complete but not offered, as one before them still runs; running:
        prompts whose groups are not complete. Never more run at once than `prompts` (or the first batch), and in a step there are no
        more than `prompts` * max_batches.

        How many run ahead depends on time; which groups are accepted does not.
        Raises DataError (ConfigError where the verifier always failed) at the limit where the configuration says stop."""
        missing = self.missing - sum(group.mixed or not self.dynamic.enabled for group in ahead)
        if missing <= 0:
            return 0
        if not self.asked:
            self.asked = self._first
            return self.asked
        left = self.prompts * self.dynamic.max_batches - self.asked
        if self.dynamic.enabled and left <= 0 and not running and not ahead:
            self._check_limit()
        if not self.dynamic.enabled or left <= 0 or not (self.offered or ahead):
            return 0
        more = max(0, min(left, min(self._needed(missing, ahead), self.prompts) - running))
        self.asked += more
        return more

    @property
    def _first(self) -> int:
        return math.ceil(self.missing * self.oversample) if self.dynamic.enabled else self.missing

    def _needed(self, missing: int, ahead: Sequence[Group]) -> int:
        """Prompts for so many accepted groups, by Laplace's estimate of the rate: never 0, and careful after few prompts."""
        kept = len(self.offered) - len(self.rejected) + sum(group.mixed for group in ahead)
        return math.ceil(missing * (len(self.offered) + len(ahead) + 2) / (kept + 1))

    def _check_limit(self) -> None:
        if self.dynamic.at_limit == "stop":
            errors = {response.error for group in self.offered for response in group.responses}
            if errors and None not in errors:
                raise ConfigError(f"reward.verifier: it failed on every answer of {len(self.offered)} prompts: {min(map(str, errors))}")
            raise DataError(
                f"rollout.dynamic_sampling.max_batches: after {self.dynamic.max_batches} generation batches ({len(self.offered)} prompts) "
                f"only {len(self.accepted)} of {self.prompts} groups have right and wrong answers "
                "(raise it, choose other prompts, or set rollout.dynamic_sampling.at_limit to continue)"
            )

    def offer(self, groups: Sequence[Group]) -> None:
        """Complete groups, in the order of their prompts."""
        self.offered += groups
        for group in groups:
            (self.accepted if group.mixed or not self.dynamic.enabled else self.rejected).append(group)

    def result(self) -> tuple[list[Group], list[Group]]:
        """The `prompts` groups to train on, and the surplus for the next step (at most `prompts`; what is beyond is dropped). Where too few
        were accepted, the first rejected ones follow the accepted."""
        groups = (self.accepted + self.rejected)[: self.prompts]
        return groups, self.accepted[self.prompts : 2 * self.prompts]

    def stats(self) -> dict[str, float]:
        """rollout/*: counts over the groups offered in this step. kept + all right + all wrong = prompts, with or without filtering.
        waste: the share of their tokens that are neither trained on nor kept for the next step."""
        size = [len(group.responses) for group in self.offered]
        groups, surplus = self.result()
        used = {id(group) for group in (*groups, *surplus)}
        tokens = [sum(r.tokens.size for r in group.responses) for group in self.offered]
        waste = sum(n for group, n in zip(self.offered, tokens, strict=True) if id(group) not in used)
        right = sum(group.correct == n for group, n in zip(self.offered, size, strict=True))
        wrong = sum(group.correct == 0 for group in self.offered)
        return {
            "rollout/groups_kept": len(self.offered) - right - wrong,
            "rollout/groups_all_right": right,
            "rollout/groups_all_wrong": wrong,
            "rollout/batches": self.batches or math.ceil(len(self.offered) / self.prompts),
            "rollout/prompts": len(self.offered),
            "rollout/tokens": sum(tokens),
            "rollout/waste": waste / max(sum(tokens), 1),
            "rollout/surplus": len(surplus),
        }
