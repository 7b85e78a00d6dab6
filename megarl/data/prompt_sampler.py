"""Order of prompts, the same in every process and library version."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from megarl.config.errors import CheckpointError


def epoch_order(num_prompts: int, seed: int, epoch: int) -> list[int]:
    """Return a permutation of range(num_prompts) that depends on the arguments alone."""

    def key(index: int) -> bytes:
        return blake2b(b"%d:%d:%d" % (seed, epoch, index), digest_size=16).digest()

    return sorted(range(num_prompts), key=key)


class PromptSampler:
    """Sample prompt indices without replacement, epoch after epoch. Raises ValueError without prompts.

    content: checksum of the prompts, for resumed runs"""

    def __init__(self, num_prompts: int, seed: int = 0, shuffle: bool = True, content: str = "") -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts must be >= 1 (got {num_prompts})")
        self.num_prompts, self.seed, self.shuffle, self.content = num_prompts, seed, shuffle, content
        self._start_epoch(0)

    def _start_epoch(self, epoch: int, position: int = 0) -> None:
        self.epoch, self.position = epoch, position
        self._order = list(range(self.num_prompts))
        if self.shuffle:
            self._order = epoch_order(self.num_prompts, self.seed, epoch)

    def take(self, n: int) -> list[int]:
        """Return the next indices, which may span epochs."""
        indices: list[int] = []
        while len(indices) < n:
            if self.position == self.num_prompts:
                self._start_epoch(self.epoch + 1)
            chunk = self._order[self.position : self.position + n - len(indices)]
            self.position += len(chunk)
            indices += chunk
        return indices

    def state(self) -> dict[str, Any]:
        names = ("num_prompts", "seed", "shuffle", "content", "epoch", "position")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises CheckpointError if it is invalid or of other prompts, seed or shuffle."""
        for name, key in (("num_prompts", "data.train"), ("seed", "seed"), ("shuffle", "data.shuffle")):
            if state.get(name) != getattr(self, name):
                raise CheckpointError(
                    f"{key}: the checkpoint's prompts were sampled with {name} {state.get(name)}, "
                    f"this run has {getattr(self, name)} (resume with the same data and seed)"
                )
        if state.get("content", self.content) != self.content:  # older checkpoints have none
            what = "the usable rows, or their order, are not those of the checkpoint"
            why = "put the files back; rows of reasoning-gym depend on its version and on data.eval too"
            raise CheckpointError(f"data.train: {what} ({why})")
        epoch, position = state.get("epoch"), state.get("position")
        if (
            isinstance(epoch, int)
            and isinstance(position, int)
            and epoch >= 0 <= position <= self.num_prompts
        ):
            self._start_epoch(epoch, position)
        else:
            what = f"the checkpoint's sampler has the invalid epoch {epoch}, position {position}"
            raise CheckpointError(f"data.train: {what}")
