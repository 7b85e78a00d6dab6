"""The protocol of a rollout engine: what the scheduler and the samplers may ask, whatever generates the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from megarl.weights.plan import Plan
from megarl.weights.transfer import Staging

TAGS = ("weights", "kv_cache")  # what can sleep


@dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


@dataclass
class Completion:
    """tokens: the response's ids, end-of-sequence included when it was reached; logprobs: of each of them, under the
    distribution that was sampled from (after temperature, before top-p and top-k), float32; versions: the weights that each of them
    was sampled from.

    finish: "stop" (end-of-sequence or a stop text), "length" (max_tokens reached) or "abort"."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length", "abort"] = "abort"
    versions: list[int] = field(default_factory=list)

    def extended(self, tokens: list[int], logprobs: list[float], finish: Literal["stop", "length", "abort"], version: int) -> Completion:
        """What it has become after some more tokens of one version."""
        return Completion(self.tokens + tokens, self.logprobs + logprobs, finish, self.versions + [version] * len(tokens))


@dataclass(frozen=True)
class Request:
    """One response to one prompt. The same seed gives the same response, whatever else is in the batch. `begun`: what there is of it."""

    prompt: tuple[int, ...]
    seed: int
    begun: Completion | None = None


class RolloutEngine(Protocol):
    """Lives on one or several ranks of the training job; each of them has such an object and calls the methods of updates, sleep, wake,
    start and stop. The first of them, the leader, alone is given requests, and alone can meet an EngineFailure.

    streams: whether requests end one by one, so that more can be submitted while some run, and what is left over be aborted."""

    weight_version: int
    streams: bool

    def start(self) -> None:
        """Allocates the model with undefined weights; an update must follow before `submit`."""

    def ready(self, seconds: float) -> bool:
        """Whether the start has ended; waits for it, at most `seconds`."""

    def restart(self) -> None:
        """After an EngineFailure. An update must follow, with which unfinished requests go on, from the same seeds."""

    def is_one_of(self, ranks: Sequence[int]) -> bool:
        """Whether this engine is that of one of these ranks."""

    def buckets(self, plan: Plan, memory: Staging) -> list[tuple[Plan, dict[str, Tensor]]]:
        """The plan of a weight transfer in parts, each with this rank's tensors that it writes. Where these are not the engine's own, all
        parts share `memory`, which is there during a delivery: each is delivered before the next is written."""

    def handle(self, bucket: int) -> Any:
        """How the engine finds what this rank has written."""

    def begin_update(self) -> None:
        """Before the first delivery."""

    def deliver(self, bucket: int, handles: Sequence[Any], version: int) -> None:
        """After all ranks have written the bucket; `handles` of all of them, by rank."""

    def end_update(self, version: int) -> None:
        """After the last delivery: caches that depend on the old weights are dropped, `weight_version` becomes `version`."""

    def submit(self, requests: Mapping[int, Request], params: SamplingParams) -> None:
        """Begins generating; the keys are given back by `poll`."""

    def poll(self, seconds: float) -> list[tuple[int, Completion]]:
        """What has ended. Waits at most `seconds` for the first to end, unless the engine does not stream: then all end now."""

    @property
    def running(self) -> int:
        """Requests that have not come back."""

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """One completion per request, in the order of the requests."""

    def abort(self) -> list[tuple[int, Completion]]:
        """Ends what runs, and gives it back with finish "abort"."""

    def sleep(self, tags: Sequence[str] = TAGS) -> None:
        """Frees the device memory that the tags name; `wake` must follow before `submit`, and an update where they name weights."""

    def wake(self, tags: Sequence[str] = TAGS) -> None:
        """Undoes `sleep`."""

    def stop(self) -> None:
        """Ends the engine and frees everything."""
