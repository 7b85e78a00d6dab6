"""Share memory with SGLang on the ranks' own devices: a file on a CPU, CUDA IPC on a GPU.

The engine's leader passes handles of a bucket to the engine's processes, which copy their shares."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.sync.backends.base import UpdatableEngine, WeightBackend, stage
from megarl.sync.plan import Plan
from megarl.sync.transfer import Staging


class ProcessEngine(UpdatableEngine, Protocol):
    """An engine in separate processes on its ranks' machine."""

    def load_shared(self, handles: Sequence[bytes | None], version: int, *, last: bool) -> None:
        """Make the engine's processes load a bucket, and wait for them.

        handles: of the engine's ranks, in order; last: the update's last bucket"""


class SharedMemoryBackend(WeightBackend[ProcessEngine]):
    alignment = 256

    def connect(
        self, engine: ProcessEngine, parts: Sequence[Plan], memory: Staging
    ) -> list[dict[str, Tensor]]:
        self.engine = engine
        places = [self.places(part) for part in parts]
        # By bucket, in the format of sglang_inside.load_shards.
        self._described: list[dict[str, Any]] = [
            {
                "tensors": {
                    name: (place.start, list(place.shape), str(place.dtype).removeprefix("torch."))
                    for name, place in bucket.items()
                },
                "complete": [],
            }
            for bucket, _ in places
        ]
        self._described[-1]["complete"] = [name for bucket, _ in places for name in bucket]
        if self.device.type == "cpu":
            self._memory = self._open_file(max(size for _, size in places))
            return [
                {name: place.view(self._memory) for name, place in bucket.items()} for bucket, _ in places
            ]
        tensors = stage(places, memory)
        self._memory = memory.take()
        return tensors

    def _open_file(self, size: int) -> Tensor:
        """Return a file's memory, which other processes can open while this object exists."""
        self._file = os.memfd_create("megarl-weights")
        weakref.finalize(self, os.close, self._file)
        os.truncate(self._file, size)
        return torch.from_file(f"/proc/self/fd/{self._file}", shared=True, size=size, dtype=torch.uint8)

    def handle(self, bucket: int) -> bytes:
        """Return the handle of this rank's part. A CUDA handle is valid for one load."""
        description = self._described[bucket]
        if self.device.type == "cpu":
            description = description | {
                "path": f"/proc/{os.getpid()}/fd/{self._file}",
                "size": self._memory.numel(),
            }
            memory = torch.empty(0, dtype=torch.uint8)
        else:
            # torch keeps a wrapper per share until the storage is freed, so share a short-lived alias.
            memory = torch.from_dlpack(self._memory)
        return bytes(ForkingPickler.dumps([(json.dumps(description), memory)]))

    def send(self, bucket: int, handles: Sequence[bytes | None], version: int) -> None:
        engine_handles = list(handles[self.rank : self.rank + self.config.rollout.engine_tp])
        self.engine.load_shared(engine_handles, version, last=bucket == len(self._described) - 1)
