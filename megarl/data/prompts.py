"""Prompts, and the order in which they are taken: epoch after epoch, from the run's seed, with a state that
can be saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from megarl.config.errors import CheckpointError


@dataclass(frozen=True)
class Prompt:
    """One problem. `uid` is stable across runs and machines (a hash of its text): seeds are derived from
    it."""

    uid: int
    text: str
    tokens: tuple[int, ...]
    answer: str
    source: str = ""
    extra: dict[str, object] = field(default_factory=dict)


def prompt_uid(text: str, answer: str) -> int:
    """Return 63 bits that identify a problem: a hash of its text, before any template, and its reference
    answer."""
    digest = blake2b(f"{len(text)}:{text}{answer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def epoch_order(num_prompts: int, seed: int, epoch: int) -> list[int]:
    """Return a permutation of range(num_prompts) that depends on the three numbers alone, on no library's
    generator."""

    def key(index: int) -> bytes:
        return blake2b(b"%d:%d:%d" % (seed, epoch, index), digest_size=16).digest()

    return sorted(range(num_prompts), key=key)


class PromptSampler:
    """Hands out the indices 0 .. num_prompts - 1, each once an epoch; without `shuffle` in their own order.

    Raises ValueError if there is no prompt."""

    def __init__(self, num_prompts: int, seed: int = 0, shuffle: bool = True) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts must be >= 1 (got {num_prompts})")
        self.num_prompts, self.seed, self.shuffle = num_prompts, seed, shuffle
        self._start_epoch(0)

    def _start_epoch(self, epoch: int, position: int = 0) -> None:
        self.epoch, self.position = epoch, position
        self._order = list(range(self.num_prompts))
        if self.shuffle:
            self._order = epoch_order(self.num_prompts, self.seed, epoch)

    def take(self, n: int) -> list[int]:
        """Return the next `n` indices. `n` may be larger than an epoch; an index then comes again."""
        taken: list[int] = []
        while len(taken) < n:
            if self.position == self.num_prompts:
                self._start_epoch(self.epoch + 1)
            part = self._order[self.position : self.position + n - len(taken)]
            self.position += len(part)
            taken += part
        return taken

    def state(self) -> dict[str, Any]:
        """Return the state that `load_state` continues from, as JSON holds it."""
        return {name: getattr(self, name) for name in ("num_prompts", "seed", "shuffle", "epoch", "position")}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where the sampler of `state` stood. Raises CheckpointError if that one drew from other
        prompts or with another seed."""
        for name, key in (("num_prompts", "data.train"), ("seed", "seed"), ("shuffle", "data.shuffle")):
            if state.get(name) != getattr(self, name):
                raise CheckpointError(
                    f"{key}: the checkpoint's prompts were drawn with {name} {state.get(name)}, "
                    f"this run has {getattr(self, name)} (resume with the same data and seed)"
                )
        epoch, position = state.get("epoch"), state.get("position")
        if not (isinstance(epoch, int) and isinstance(position, int)) or not (
            epoch >= 0 and 0 <= position <= self.num_prompts
        ):
            raise CheckpointError(
                f"data.train: the checkpoint's sampler stands at epoch {epoch}, position {position}, "
                "which cannot be"
            )
        self._start_epoch(epoch, position)
