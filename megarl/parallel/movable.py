"""Offload tensors to host memory and load them back. Their storages are emptied and filled in place, so that
every view of them stays valid; the contents go through pinned host memory that all tensor groups share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, UntypedStorage

from megarl.config.errors import DeviceMemoryError, first_line

# A power of two, to which torch rounds up whatever pinned memory it is asked for.
CHUNK = 64 * 2**20
Contents = Literal["kept", "constant", "zero"]


class HostPool:
    """Host memory in chunks, pinned where the device is a GPU: allocated when there are too few, then handed
    out again and again."""

    def __init__(self, device: torch.device, chunk: int = CHUNK) -> None:
        self.chunk, self._pinned = chunk, device.type == "cuda"
        self._free: list[Tensor] = []
        self.nbytes = 0  # of all chunks, in use or not

    def take(self, count: int) -> list[Tensor]:
        """Return `count` chunks, uint8, with undefined contents. Raises DeviceMemoryError where the host has
        no room for them."""
        while len(self._free) < count:
            try:
                chunk = torch.empty(self.chunk, dtype=torch.uint8, pin_memory=self._pinned)
            except RuntimeError as error:  # CUDA's words for it are those of a full GPU
                held = f"the {self.nbytes / 2**30:.2f} GiB that this rank has offloaded"
                remedy = "give the job more memory, or each node fewer ranks, or set residency.keep"
                raise DeviceMemoryError(
                    f"host memory: no room beside {held}: {first_line(error)} ({remedy})"
                ) from error
            self._free.append(chunk)
            self.nbytes += self.chunk
        return [self._free.pop() for _ in range(count)]

    def give(self, chunks: Iterable[Tensor]) -> None:
        """Take chunks back."""
        self._free += chunks


class Movable:
    """The device memory behind some tensors, which can be offloaded.

    tensors   lists the tensors, anew at each call, as an optimizer's states exist only after its first step;
              those on other devices are left alone
    contents  kept: restored; constant: restored from one copy, as nobody writes them; zero: filled with 0"""

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
        """Return the bytes that it takes, or would take, on the device."""
        if self._away is None:
            return sum(storage.nbytes() for storage in self._storages())
        return sum(size for _, size in self._away)

    def offload(self) -> None:
        """Copy the tensors to host memory and free theirs. The copies run on the current stream: the kernels
        that wrote the tensors must have been launched on it."""
        away = [(storage, storage.nbytes()) for storage in self._storages()]
        if self._contents != "zero" and not self._chunks:
            self._chunks = self._pool.take(-(-sum(size for _, size in away) // self._pool.chunk))
            for part, host in self._parts(away):
                host.copy_(part, non_blocking=True)
        for storage, _ in away:
            storage.resize_(0)
        self._away = away

    def onload(self) -> None:
        """Allocate the device memory again and fill it. After a torch.OutOfMemoryError it is offloaded as
        before."""
        assert self._away is not None, "it is on the device"
        away = self._away
        try:
            for storage, size in away:
                storage.resize_(size)
        except torch.OutOfMemoryError:
            for storage, _ in away:
                storage.resize_(0)
            raise
        if self._contents == "zero":
            for storage, _ in away:
                _bytes(storage).zero_()
        for part, host in self._parts(away):
            part.copy_(host, non_blocking=True)
        if self._contents == "kept":
            self._pool.give(self._chunks)
            self._chunks = []
        self._away = None

    def _storages(self) -> Iterator[UntypedStorage]:
        """Yield each storage once, however many of the tensors are views of it."""
        seen: set[int] = set()
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.nbytes() and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage

    def _parts(self, away: list[tuple[UntypedStorage, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each part of the storages with its place on the host: one after the other over the chunks."""
        chunk, at = self._pool.chunk, 0
        for storage, size in away if self._chunks else ():
            whole, start = _bytes(storage), 0
            while start < size:
                number, first = divmod(at, chunk)
                length = min(size - start, chunk - first)
                yield whole[start : start + length], self._chunks[number][first : first + length]
                start, at = start + length, at + length


def _bytes(storage: UntypedStorage) -> Tensor:
    """Return a storage as a tensor, uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
