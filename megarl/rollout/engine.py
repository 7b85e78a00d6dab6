"""The protocol of a rollout engine: what the scheduler and the samplers may ask, whatever generates the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """One response to one prompt. The same seed gives the same response, whatever else is in the batch."""

    prompt: tuple[int, ...]
    seed: int


@dataclass
class Completion:
    """tokens: the response's ids, end-of-sequence included when it was reached; logprobs: of each of them, under the
    distribution that was sampled from (after temperature, before top-p and top-k), float32.

    finish: "stop" (end-of-sequence or a stop text), "length" (max_tokens reached) or "abort"."""

    tokens: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]


class RolloutEngine(Protocol):
    """Lives on one or several ranks of the training job; every method is called by each of these ranks."""

    weight_version: int

    def start(self) -> None:
        """Allocates the model with undefined weights; `update_weights` must follow before `generate`."""

    def parameters(self) -> dict[str, Tensor]:
        """This rank's own weight tensors, by the engine's names, to be written by a weight transfer."""

    def begin_update(self) -> None:
        """Before the tensors of `parameters` are written."""

    def end_update(self, version: int) -> None:
        """After they were written: caches that depend on the old weights are dropped, `weight_version` becomes `version`."""

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """One completion per request, in the order of the requests."""

    def abort(self) -> None:
        """Ends a running `generate` (from another thread); its unfinished completions come back with finish "abort"."""

    def sleep(self) -> None:
        """Frees the device memory of weights and KV cache; `wake` and a weight update must follow before `generate`."""

    def wake(self) -> None:
        """Undoes `sleep`."""

    def stop(self) -> None:
        """Ends the engine and frees everything."""
