"""Offload tensors to host memory and load them back. Their storages are emptied and filled in place, so that
every view of them stays valid; the contents go through pinned host memory that all tensor groups share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, UntypedStorage

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
        """Return `count` chunks, uint8, with undefined contents."""
        while len(self._free) < count:
            self._free.append(torch.empty(self.chunk, dtype=torch.uint8, pin_memory=self._pinned))
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


class ProcessPeak:
    """The most memory that this process had since `reset`: of pages that it shares with others, as forked
    ranks do with their launcher, its share (PSS in Linux's words, which elsewhere is not known)."""

    RESET = Path("/proc/self/clear_refs")

    def __init__(self) -> None:
        self._known = os.access(self.RESET, os.W_OK)
        self._most, self._of_others = 0, 0  # at the last look, bytes: what was resident, others' share of it

    def reset(self) -> None:
        """Begin to count anew."""
        if self._known:
            self.RESET.write_text("5")  # proc(5): the peak resident size becomes the present one

    def measure(self) -> dict[str, float]:
        """Return {"all": bytes}; {} where it is not known."""
        if not self._known:
            return {}
        most = _kilobytes(Path("/proc/self/status"), "VmHWM") * 1024
        if not 0.95 * self._most < most < 1.05 * self._most:  # a look at every page takes milliseconds a GB
            rollup = Path("/proc/self/smaps_rollup")
            self._most, self._of_others = most, (_kilobytes(rollup, "Rss") - _kilobytes(rollup, "Pss")) * 1024
        return {"all": float(most - self._of_others)}


def _kilobytes(path: Path, key: str) -> int:
    lines = path.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def empty_cache(device: torch.device) -> None:
    """Give memory that torch caches back to the device, for the engine's processes; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    """Return the bytes of the device that no process uses; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def reset_device_peak(device: torch.device) -> None:
    """Reset the peak-memory counter; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def device_peak(device: torch.device) -> dict[str, float]:
    """Return bytes since `reset_device_peak`: the most that this process's tensors took (""), that torch held
    for them ("reserved"), and what all processes take of the device now ("device"). Empty on a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "": float(torch.cuda.max_memory_allocated(device)),
        "reserved": float(torch.cuda.max_memory_reserved(device)),
        "device": float(total - free),
    }
