"""The order in which prompts are taken: epoch after epoch, from the run's seed, with a state that can be saved."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from megarl.config.errors import CheckpointError


def epoch_order(num_prompts: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(num_prompts) that depends on the three numbers alone: on no library's generator, no version."""

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
        self._enter(0)

    def _enter(self, epoch: int, position: int = 0) -> None:
        self.epoch, self.position = epoch, position
        self._order = epoch_order(self.num_prompts, self.seed, epoch) if self.shuffle else list(range(self.num_prompts))

    def take(self, n: int) -> list[int]:
        """The next `n` indices; n may be larger than an epoch, and then an index comes again."""
        taken: list[int] = []
        while len(taken) < n:
            if self.position == self.num_prompts:
                self._enter(self.epoch + 1)
            part = self._order[self.position : self.position + n - len(taken)]
            self.position += len(part)
            taken += part
        return taken

    def state(self) -> dict[str, Any]:
        """What `load_state` needs to go on from here, as JSON holds it."""
        return {
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on where the sampler of `state` stood. Raises CheckpointError if that one drew from other prompts or another seed."""
        for name, key in (("num_prompts", "data.train"), ("seed", "seed"), ("shuffle", "data.shuffle")):
            if state.get(name) != getattr(self, name):
                raise CheckpointError(
                    f"{key}: the checkpoint's prompts were drawn with {name} {state.get(name)}, this run has {getattr(self, name)} "
                    f"(resume with the same data and seed)"
                )
        epoch, position = state.get("epoch"), state.get("position")
        if not isinstance(epoch, int) or not isinstance(position, int) or epoch < 0 or not 0 <= position <= self.num_prompts:
            raise CheckpointError(f"data.train: the checkpoint's sampler stands at epoch {epoch}, position {position}, which cannot be")
        self._enter(epoch, position)
