"""Weight backends bring transferred weights into an engine (docs/extending.md)."""

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
    """The methods of RolloutEngine that a weight sync calls."""

    def ready(self, seconds: float) -> bool: ...
    def restart(self) -> None: ...
    def begin_update(self) -> None: ...
    def end_update(self, version: int) -> None: ...
    def sleep(self, tags: Sequence[str]) -> None: ...
    def wake(self, tags: Sequence[str]) -> None: ...
    def take_notes(self) -> list[str]: ...


E = TypeVar("E", bound=UpdatableEngine)


class Place(NamedTuple):
    """A tensor's place in a bucket's memory. start: its first byte."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, memory: Tensor) -> Tensor:
        end = self.start + math.prod(self.shape) * self.dtype.itemsize
        return memory[self.start : end].view(self.dtype).view(self.shape)


class WeightBackend(ABC, Generic[E]):
    """Brings one rank's part of the weights into its engine.

    Ranks without an engine call only `split`. All ranks of an engine call the same methods in the same order.
    Only its leader can raise EngineFailure.

    keeps_frozen   an engine keeps frozen weights until it restarts
    can_recover    a failed engine can restart
    reports_notes  updates may have notes (`take_notes`)
    alignment      of a bucket's tensors, bytes
    bytes_sent     sent or written since the weight sync last read it"""

    keeps_frozen: ClassVar[bool] = True
    can_recover: ClassVar[bool] = True
    reports_notes: ClassVar[bool] = False
    alignment: ClassVar[int] = 16
    engine: E

    def __init__(self, config: Config, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        """rank: in the job; device: of targets; dtype: of targets without a format in the plan"""
        self.config, self.rank, self.device, self.dtype = config, rank, device, dtype
        self.bytes_sent = 0

    @property
    def bucket_bytes(self) -> float:
        """Return the largest size of a bucket with several tensors."""
        return self.config.rollout.transfer_bucket * 2**20

    def split(self, plan: Plan, frozen: Collection[str] = ()) -> list[list[str]]:
        """Split targets' names into buckets, identically on every rank.

        frozen: never change; their buckets come first, and later syncs may skip them"""
        leader_shards = plan.targets[min(plan.targets)]
        sizes = {
            name: self._size(self.place(plan, name, shard.shape)) for name, shard in leader_shards.items()
        }
        frozen_sizes = {name: size for name, size in sizes.items() if name in frozen}
        changing_sizes = {name: size for name, size in sizes.items() if name not in frozen}
        return pack(frozen_sizes, self.bucket_bytes) + pack(changing_sizes, self.bucket_bytes)

    @abstractmethod
    def connect(self, engine: E, parts: Sequence[Plan], memory: Staging) -> list[dict[str, Tensor]]:
        """Connect to this rank's engine. Return the tensors that a transfer writes here, by bucket.

        parts: by bucket; memory: for all buckets, as each is sent before the next is written"""

    def begin(self) -> None:
        """Begin an update. The engine refuses requests until `finish`."""
        self.engine.begin_update()

    def handle(self, bucket: int) -> bytes | None:
        """Return a handle of this rank's part of a bucket, for the engine's leader."""
        return None

    @abstractmethod
    def send(self, bucket: int, handles: Sequence[bytes | None], version: int) -> None:
        """Bring a bucket into the engine, after all ranks have written theirs.

        When all ranks have returned, its memory may be overwritten. handles: by rank of the job"""

    def finish(self, version: int) -> None:
        """End the update. The engine drops state of old weights, and adopts `version`."""
        self.engine.end_update(version)

    def recover(self) -> None:
        """Restart a failed engine. An update with all weights follows."""
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
    """Return all buckets' tensors as views of one memory."""
    memory.reserve(max(size for _, size in places))
    buffer = memory.take()
    return [{name: place.view(buffer) for name, place in bucket.items()} for bucket, _ in places]
