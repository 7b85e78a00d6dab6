"""The protocol of weight backends.

A backend names the tensors that a transfer writes on an engine's ranks, and brings them into the engine,
bucket by bucket. A new one is a subclass in a separate file and a row in `BACKENDS` (backends/__init__.py).
docs/extending.md has an example.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megarl.config.schema import Config
from megarl.sync.plan import Plan
from megarl.sync.transfer import FORMAT_DTYPES, Staging
from megarl.weights.boxes import pack


class UpdatableEngine(Protocol):
    """What every backend and the weight sync call of an engine, see RolloutEngine."""

    def ready(self, seconds: float) -> bool: ...
    def restart(self) -> None: ...
    def begin_update(self) -> None: ...
    def end_update(self, version: int) -> None: ...
    def sleep(self, tags: Sequence[str]) -> None: ...
    def wake(self, tags: Sequence[str]) -> None: ...
    def take_notes(self) -> list[str]: ...


E = TypeVar("E", bound=UpdatableEngine)


class Place(NamedTuple):
    """Where a tensor lies in the memory of a bucket. start: its first byte."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor as a view of `memory`, uint8 [bytes]."""
        end = self.start + math.prod(self.shape) * self.dtype.itemsize
        return memory[self.start : end].view(self.dtype).view(self.shape)


class WeightBackend(ABC, Generic[E]):
    """One rank's part in bringing weights into its engine.

    Every rank of a job has one. On ranks without an engine only `split` is called. All ranks of an engine
    call the same methods in the same order; its leader alone can raise an EngineFailure.

    engine         of this rank, after `connect`
    keeps_frozen   an engine that has not been restarted still has its frozen weights at the next sync
    can_recover    an engine that failed can be started again, and then gets all weights
    reports_notes  an update may end well for the rank and still have notes for the user (`take_notes`)
    alignment      bytes: tensors of a bucket begin at multiples of this
    """

    keeps_frozen: ClassVar[bool] = True
    can_recover: ClassVar[bool] = True
    reports_notes: ClassVar[bool] = False
    alignment: ClassVar[int] = 16
    engine: E

    def __init__(self, config: Config, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        """Args:
        rank: number in the job, with which the plan names this rank
        device: of the tensors that a transfer writes
        dtype: of the target tensors for which the plan names no format"""
        self.config, self.rank, self.device, self.dtype = config, rank, device, dtype

    @property
    def bucket_bytes(self) -> float:
        """Return the limit of a bucket's size. A larger tensor fills a bucket alone."""
        return self.config.rollout.transfer_bucket * 2**20

    def split(self, plan: Plan, frozen: Collection[str] = ()) -> list[list[str]]:
        """Split the target tensors into buckets, by name; the same on every rank.

        frozen: tensors that never change. Their buckets come first and hold nothing else, because later
        syncs may skip them."""
        leader = plan.targets[min(plan.targets)]
        sizes = {name: self._size(self.place(plan, name, shard.shape)) for name, shard in leader.items()}
        kept = {name: size for name, size in sizes.items() if name in frozen}
        changing = {name: size for name, size in sizes.items() if name not in frozen}
        return pack(kept, self.bucket_bytes) + pack(changing, self.bucket_bytes)

    @abstractmethod
    def connect(self, engine: E, parts: Sequence[Plan], memory: Staging) -> list[dict[str, Tensor]]:
        """Connect to this rank's engine and return the tensors that a transfer writes here, by bucket.

        parts: the plan of each bucket; memory: shared by all buckets, for tensors that are not the engine's
        own. A bucket is sent before the next one is written."""

    def begin(self) -> None:
        """Begin an update. The engine refuses requests until `finish`."""
        self.engine.begin_update()

    def handle(self, bucket: int) -> bytes | None:
        """Return where the engine's leader finds this rank's part of a bucket."""
        return None

    @abstractmethod
    def send(self, bucket: int, handles: Sequence[bytes | None], version: int) -> None:
        """Bring a bucket into the engine, after all ranks have written theirs.

        handles: by rank of the job, what `handle` returned there. The bucket's memory may be written again
        when this has returned on all ranks."""

    def finish(self, version: int) -> None:
        """End the update: the engine drops what depends on the old weights, and carries `version`."""
        self.engine.end_update(version)

    def recover(self) -> None:
        """Start the engine again after an EngineFailure. An update with all weights follows."""
        self.engine.restart()

    def place(self, plan: Plan, name: str, shape: tuple[int, ...], start: int = 0) -> Place:
        """Return the place of a target tensor that begins at `start`."""
        dtype = FORMAT_DTYPES[plan.formats[name]] if name in plan.formats else self.dtype
        return Place(start, shape, dtype)

    def places(self, part: Plan) -> tuple[dict[str, Place], int]:
        """Return the places of this rank's tensors of a bucket, and the bytes that they need together."""
        places: dict[str, Place] = {}
        start = 0
        for name, shard in part.targets[self.rank].items():
            places[name] = self.place(part, name, shard.shape, start)
            start += self._size(places[name])
        return places, start

    def _size(self, place: Place) -> int:
        """Return the bytes of a tensor, rounded up to the alignment."""
        return -(-math.prod(place.shape) * place.dtype.itemsize // self.alignment) * self.alignment


def stage(places: Sequence[tuple[dict[str, Place], int]], memory: Staging) -> list[dict[str, Tensor]]:
    """Return the tensors of all buckets as views of one staging memory."""
    memory.reserve(max(size for _, size in places))
    taken = memory.take()
    return [{name: place.view(taken) for name, place in bucket.items()} for bucket, _ in places]
