"""The protocol of weight backends, which bring transferred weights into an engine, bucket by bucket.

A new backend is a subclass in a separate file and a row in `BACKENDS`. docs/extending.md has an example.
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
    """The methods of an engine that backends and the weight sync call, see RolloutEngine."""

    def ready(self, seconds: float) -> bool: ...
    def restart(self) -> None: ...
    def begin_update(self) -> None: ...
    def end_update(self, version: int) -> None: ...
    def sleep(self, tags: Sequence[str]) -> None: ...
    def wake(self, tags: Sequence[str]) -> None: ...
    def take_notes(self) -> list[str]: ...


E = TypeVar("E", bound=UpdatableEngine)


class Place(NamedTuple):
    """The place of a tensor in a bucket's memory. start: its first byte."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, memory: Tensor) -> Tensor:
        end = self.start + math.prod(self.shape) * self.dtype.itemsize
        return memory[self.start : end].view(self.dtype).view(self.shape)


class WeightBackend(ABC, Generic[E]):
    """Brings one rank's part of the weights into its engine.

    Every rank of a job has one, but ranks without an engine call only `split`. All ranks of an engine call
    the same methods in the same order. Only its leader can raise EngineFailure.

    keeps_frozen   an engine keeps its frozen weights until it restarts
    can_recover    a failed engine can restart, and then gets all weights
    reports_notes  a successful update may have notes for the user (`take_notes`)
    alignment      of the tensors of a bucket, in bytes"""

    keeps_frozen: ClassVar[bool] = True
    can_recover: ClassVar[bool] = True
    reports_notes: ClassVar[bool] = False
    alignment: ClassVar[int] = 16
    engine: E

    def __init__(self, config: Config, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        """rank: of the job; device: of the tensors that a transfer writes;
        dtype: of target tensors without a format in the plan"""
        self.config, self.rank, self.device, self.dtype = config, rank, device, dtype

    @property
    def bucket_bytes(self) -> float:
        """Return the largest size of a bucket. A larger tensor fills a bucket alone."""
        return self.config.rollout.transfer_bucket * 2**20

    def split(self, plan: Plan, frozen: Collection[str] = ()) -> list[list[str]]:
        """Split the names of the target tensors into buckets, identically on every rank.

        frozen: tensors that never change. Their buckets come first, and later syncs may skip them."""
        leader = plan.targets[min(plan.targets)]
        sizes = {name: self._size(self.place(plan, name, shard.shape)) for name, shard in leader.items()}
        kept = {name: size for name, size in sizes.items() if name in frozen}
        changing = {name: size for name, size in sizes.items() if name not in frozen}
        return pack(kept, self.bucket_bytes) + pack(changing, self.bucket_bytes)

    @abstractmethod
    def connect(self, engine: E, parts: Sequence[Plan], memory: Staging) -> list[dict[str, Tensor]]:
        """Connect to this rank's engine and return the tensors that a transfer writes here, by bucket.

        A bucket is sent before the next one is written.

        parts: the plan of each bucket; memory: shared by all buckets, unless the engine owns the tensors"""

    def begin(self) -> None:
        """Begin an update. The engine refuses requests until `finish`."""
        self.engine.begin_update()

    def handle(self, bucket: int) -> bytes | None:
        """Return a handle with which the engine's leader finds this rank's part of a bucket."""
        return None

    @abstractmethod
    def send(self, bucket: int, handles: Sequence[bytes | None], version: int) -> None:
        """Bring a bucket into the engine, after all ranks have written theirs.

        The bucket's memory may be overwritten when all ranks have returned.

        handles: results of `handle` by rank of the job"""

    def finish(self, version: int) -> None:
        """End the update: the engine drops all state of the old weights, and adopts `version`."""
        self.engine.end_update(version)

    def recover(self) -> None:
        """Start the engine again after an EngineFailure. An update with all weights follows."""
        self.engine.restart()

    def place(self, plan: Plan, name: str, shape: tuple[int, ...], start: int = 0) -> Place:
        dtype = FORMAT_DTYPES[plan.formats[name]] if name in plan.formats else self.dtype
        return Place(start, shape, dtype)

    def places(self, part: Plan) -> tuple[dict[str, Place], int]:
        places: dict[str, Place] = {}
        start = 0
        for name, shard in part.targets[self.rank].items():
            places[name] = self.place(part, name, shard.shape, start)
            start += self._size(places[name])
        return places, start

    def _size(self, place: Place) -> int:
        return -(-math.prod(place.shape) * place.dtype.itemsize // self.alignment) * self.alignment


def stage(places: Sequence[tuple[dict[str, Place], int]], memory: Staging) -> list[dict[str, Tensor]]:
    """Return the tensors of all buckets as views of one staging memory."""
    memory.reserve(max(size for _, size in places))
    taken = memory.take()
    return [{name: place.view(taken) for name, place in bucket.items()} for bucket, _ in places]
