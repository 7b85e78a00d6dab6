"""The protocol of rollout engines, each with a row in config/engines.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from megarl.config.engines import ENGINES
from megarl.config.errors import EngineError
from megarl.config.schema import Config
from megarl.data.sample import TokenData
from megarl.parallel.runtime import Runtime
from megarl.rollout.sampling import SamplingParams


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one response, which depends on its seed and not on the batch."""

    prompt_tokens: tuple[int, ...]
    seed: int
    prefix: TokenData | None = None  # the response's first tokens
    max_tokens: int | None = None  # including `prefix`; None: as SamplingParams

    @property
    def prefix_length(self) -> int:
        return self.prefix.num_tokens if self.prefix is not None else 0

    @property
    def context(self) -> tuple[int, ...]:
        if self.prefix is None:
            return self.prompt_tokens
        return (*self.prompt_tokens, *self.prefix.tokens.tolist())

    def left(self, params: SamplingParams) -> int:
        return self.limit(params) - self.prefix_length

    def limit(self, params: SamplingParams) -> int:
        return params.max_tokens if self.max_tokens is None else self.max_tokens


class RolloutEngine(ABC):
    """An engine on one or several ranks, which all call start, stop, updates, sleep and wake.

    Only the leader, their first, gets requests and raises EngineFailure."""

    weight_version: int = -1  # before the first update
    # An engine that decodes in the rank asks it after each step, and ends its poll early.
    should_end_poll: Callable[[], bool] = staticmethod(lambda: False)

    # Required methods; sync/backends may call further ones.

    @classmethod
    @abstractmethod
    def build(cls, config: Config, tokenizer: Any, runtime: Runtime) -> RolloutEngine:
        """Make the engine of a rank, not started."""

    @abstractmethod
    def start(self) -> None:
        """Begin the start. An update must follow before `submit`."""

    @abstractmethod
    def end_update(self, version: int) -> None:
        """Drop caches of old weights and set `weight_version`, after the last bucket."""

    @abstractmethod
    def submit(self, requests: Mapping[int, GenerationRequest], params: SamplingParams) -> None:
        """Begin more requests. `poll` returns them by key."""

    @abstractmethod
    def poll(self, seconds: float) -> list[tuple[int, TokenData]]:
        """Return finished responses.

        With continuous batching, wait at most `seconds` for the first; else generate for `seconds`."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Count the requests not yet returned."""

    @abstractmethod
    def abort(self) -> list[tuple[int, TokenData]]:
        """End and return all requests, unfinished ones with finish_reason "abort"."""

    @classmethod
    def check_machine(cls, config: Config, device: str) -> None:
        """Raise ConfigError if this machine cannot run it. device: cpu or cuda"""
        return None

    @classmethod
    def check_engines(
        cls, config: Config, hf_config: Mapping[str, Any], device: torch.device, engines: int
    ) -> None:
        """Raise ConfigError if these engines cannot run the model."""
        return None

    @classmethod
    def machine_note(cls, device: str) -> str | None:
        return None

    def ready(self, seconds: float) -> bool:
        """Return whether the engine has started; wait at most `seconds`."""
        return True

    def restart(self) -> None:
        """Restart after an EngineFailure. Unfinished requests continue after an update."""
        raise EngineError("rollout engine: it has no process that could be restarted")

    def stop(self) -> None:
        return None

    def begin_update(self) -> None:
        """Refuse requests until `end_update`. Weights in no bucket stay."""
        return None

    def sleep(self, tags: Sequence[str]) -> None:
        """Free the device memory of "weights" or "kv_cache".

        Before `submit`, `wake` must follow, and an update if weights were freed."""
        return None

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the memory of the tags again."""
        return None

    def take_notes(self) -> list[str]:
        """Return new messages for the user."""
        return []

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[TokenData]:
        """Return a response per request, for tests and benchmarks."""
        self.submit(dict(enumerate(requests)), params)
        responses: dict[int, TokenData] = {}
        while self.running:
            responses |= self.poll(1.0)
        return [responses[i] for i in range(len(requests))]


def load_engine_class(config: Config) -> type[RolloutEngine]:
    module, _, name = ENGINES[config.rollout.engine].implementation.partition(":")
    engine_class: type[RolloutEngine] = getattr(import_module(module), name)
    return engine_class


def check_positions(requests: Iterable[GenerationRequest], params: SamplingParams, positions: float) -> None:
    """Raise EngineError if a request does not fit the model's positions."""
    for request in requests:
        context_length, max_new_tokens = len(request.context), request.left(params)
        if max_new_tokens < 1 or context_length + max_new_tokens > positions:
            raise EngineError(
                f"rollout: a prompt of {context_length} tokens and {max_new_tokens} response tokens "
                f"do not fit the model's {positions} positions "
                "(lower rollout.max_response_tokens or data.max_prompt_tokens)"
            )
