"""Weights in place: the transfer writes the parameters of an engine in the rank's own process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megarl.sync.backends.base import UpdatableEngine, WeightBackend
from megarl.sync.plan import Plan
from megarl.sync.transfer import Staging


class InProcessEngine(UpdatableEngine, Protocol):
    """An engine whose weights are tensors of this process."""

    def parameters(self) -> dict[str, Tensor]:
        """Return the weights by the names of the plan's targets. They stay the same objects."""


class InPlaceBackend(WeightBackend[InProcessEngine]):
    """Has the transfer write the engine's own parameters: one bucket, and one more for frozen weights."""

    can_recover = False  # an engine's failure is the rank's

    @property
    def bucket_bytes(self) -> float:
        return math.inf

    def connect(
        self, engine: InProcessEngine, parts: Sequence[Plan], memory: Staging
    ) -> list[dict[str, Tensor]]:
        self.engine, tensors = engine, engine.parameters()
        return [{name: tensors[name] for name in part.targets[self.rank]} for part in parts]

    def send(self, bucket: int, handles: Sequence[bytes | None], version: int) -> None:
        """Do nothing: the transfer has written the parameters."""
