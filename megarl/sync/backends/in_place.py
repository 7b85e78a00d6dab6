"""Let the transfer write the parameters of an engine in the rank's process."""

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
        """Return the weights by the plan's names. They stay the same objects."""


class InPlaceBackend(WeightBackend[InProcessEngine]):
    """Has one bucket, and one for frozen weights."""

    can_recover = False  # its process is the rank

    @property
    def bucket_bytes(self) -> float:
        return math.inf

    def connect(
        self, engine: InProcessEngine, parts: Sequence[Plan], memory: Staging
    ) -> list[dict[str, Tensor]]:
        self.engine, tensors = engine, engine.parameters()
        return [{name: tensors[name] for name in part.targets[self.rank]} for part in parts]

    def send(self, bucket: int, handles: Sequence[bytes | None], version: int) -> None:
        """Do nothing."""
