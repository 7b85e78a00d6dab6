"""Offload tensors to host memory and load them back, in place: views stay valid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, UntypedStorage

from megarl.config.errors import DeviceMemoryError, first_line

# torch rounds pinned memory up to a power of two.
CHUNK = 64 * 2**20
Contents = Literal["kept", "constant", "zero"]


class HostPool:
    """Chunks of host memory for all groups, pinned for a GPU."""

    def __init__(self, device: torch.device, chunk: int = CHUNK) -> None:
        self.chunk, self._pinned = chunk, device.type == "cuda"
        self._free: list[Tensor] = []
        self.nbytes = 0

    def take(self, count: int) -> list[Tensor]:
        """Return uninitialised uint8 chunks. Raises DeviceMemoryError if host memory is full."""
        while len(self._free) < count:
            try:
                chunk = torch.empty(self.chunk, dtype=torch.uint8, pin_memory=self._pinned)
            except RuntimeError as error:  # has the text of a full GPU
                what = f"is full after this rank offloaded {self.nbytes / 2**30:.2f} GiB"
                remedy = "give the job more memory, or each node fewer ranks, or set residency.keep"
                raise DeviceMemoryError(f"host memory: {what}: {first_line(error)} ({remedy})") from error
            self._free.append(chunk)
            self.nbytes += self.chunk
        return [self._free.pop() for _ in range(count)]

    def give(self, chunks: Iterable[Tensor]) -> None:
        self._free += chunks


class OffloadGroup:
    """Tensors whose device memory can be offloaded.

    tensors   called each time, as optimizer states exist only after a step; other devices' are ignored
    contents  kept: restored; constant: restored from one copy that stays valid; zero: filled with 0"""

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        pool: HostPool,
        contents: Contents = "kept",
    ) -> None:
        self._tensors, self._device, self._pool, self._contents = tensors, device, pool, contents
        self._away: list[tuple[UntypedStorage, int]] | None = None
        self._chunks: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Return device bytes when loaded."""
        if self._away is None:
            return sum(storage.nbytes() for storage in self._storages())
        return sum(size for _, size in self._away)

    def offload(self) -> None:
        """Move the tensors to host memory. Kernels that wrote them must be on the current stream."""
        storage_sizes = [(storage, storage.nbytes()) for storage in self._storages()]
        if self._contents != "zero" and not self._chunks:
            self._chunks = self._pool.take(-(-sum(size for _, size in storage_sizes) // self._pool.chunk))
            for part, host_part in self._parts(storage_sizes):
                host_part.copy_(part, non_blocking=True)
        for storage, _ in storage_sizes:
            storage.resize_(0)
        self._away = storage_sizes

    def onload(self) -> None:
        """Load the tensors again. After torch.OutOfMemoryError they stay offloaded."""
        assert self._away is not None, "it is on the device"
        storage_sizes = self._away
        try:
            for storage, size in storage_sizes:
                storage.resize_(size)
        except torch.OutOfMemoryError:
            for storage, _ in storage_sizes:
                storage.resize_(0)
            raise
        if self._contents == "zero":
            for storage, _ in storage_sizes:
                _bytes(storage).zero_()
        for part, host_part in self._parts(storage_sizes):
            part.copy_(host_part, non_blocking=True)
        if self._contents == "kept":
            self._pool.give(self._chunks)
            self._chunks = []
        self._away = None

    def _storages(self) -> Iterator[UntypedStorage]:
        """Yield each storage once."""
        yielded: set[int] = set()
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.nbytes() and storage._cdata not in yielded:
                yielded.add(storage._cdata)
                yield storage

    def _parts(self, away: list[tuple[UntypedStorage, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the storages' parts with their chunks."""
        chunk, offset = self._pool.chunk, 0
        for storage, size in away if self._chunks else ():
            storage_bytes, start = _bytes(storage), 0
            while start < size:
                chunk_index, chunk_start = divmod(offset, chunk)
                length = min(size - start, chunk - chunk_start)
                yield (
                    storage_bytes[start : start + length],
                    self._chunks[chunk_index][chunk_start : chunk_start + length],
                )
                start, offset = start + length, offset + length


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
