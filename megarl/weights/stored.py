"""Tensors as they lie in files: reading a box of one touches only its own bytes, and writing is hashed on the way.

A safetensors tensor and a chunk of a distributed checkpoint are the same thing here: row-major bytes at an offset of a file.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.config.errors import CheckpointError
from megarl.weights.families import Shape
from megarl.weights.layout import Box, full_box
from megarl.weights.plan import intersect, shift, volume

BLOCK = 2 << 20  # bytes that are read, converted, hashed and written at a time: what a processor's cache may hold
WAITING = 8  # blocks that may wait to be hashed
IOV_MAX = 1024  # buffers that one preadv takes (Linux)


class Stored(NamedTuple):
    """A row-major tensor in a file."""

    path: Path
    offset: int  # bytes
    shape: Shape
    dtype: torch.dtype


class Piece(NamedTuple):
    """A box of a stored tensor and where it lies in another tensor; both boxes have the same extents."""

    stored: Stored
    src: Box
    dst: Box


class Made(NamedTuple):
    """A tensor to be made of pieces, all of `dtype`; what no piece covers is zero."""

    name: str
    shape: Shape
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self, box: Box) -> Tensor:
        """`tensor[box]` on the CPU; only its own bytes are read. CheckpointError names the file that has them no longer."""
        extents = tuple(stop - start for start, stop in box)
        tensor = torch.empty(extents, dtype=self.dtype)
        inside = [(piece, common) for piece in self.pieces if (common := intersect(piece.dst, box)) is not None]
        if sum(volume(common) for _, common in inside) < prod(extents):
            tensor.zero_()
        out = as_bytes(tensor)
        for piece, common in inside:
            source = shift(common, piece.dst, piece.src)
            _read_box(piece.stored, source, out, extents, shift(common, box, full_box(extents)), self.name)
        return tensor

    def read_as(self, box: Box, dtype: torch.dtype) -> Tensor:
        """`tensor[box]` in another dtype; CheckpointError if a number is beyond its range."""
        block = self.read(box)
        converted = block.to(dtype)
        if dtype == torch.float16 and bool((block.isfinite() & ~converted.isfinite()).any()):
            where = f"{self.pieces[0].stored.path}: {self.name}"
            raise CheckpointError(f"{where}: has numbers beyond the range of float16 (choose bf16 or fp32)")
        return converted

    def blocks(self) -> Iterator[Box]:
        """Boxes of whole rows that tile the tensor in order, each of about BLOCK bytes."""
        rows = self.shape[0]
        step = max(1, BLOCK * rows // max(1, self.nbytes))
        for first in range(0, rows, step):
            yield ((first, min(first + step, rows)), *full_box(self.shape[1:]))


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def made(name: str, shape: Shape, pieces: Iterable[Piece]) -> Made:
    """Of pieces whose dtypes must agree. CheckpointError names the first file and tensor that differs."""
    given = tuple(pieces)
    first = given[0].stored
    for piece in given:
        if piece.stored.dtype != first.dtype:
            kinds = f"one part is {dtype_name(piece.stored.dtype)}, another is {dtype_name(first.dtype)}"
            raise CheckpointError(f"{piece.stored.path}: {name}: {kinds}")
    return Made(name, shape, first.dtype, given)


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json writes it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _run(shape: Shape, box: Box) -> int:
    """Elements of a box that follow one another in memory."""
    run = 1
    for size, (start, stop) in zip(reversed(shape), reversed(box), strict=True):
        run *= stop - start
        if stop - start != size:
            break
    return run


def _starts(shape: Shape, box: Box, run: int) -> list[int]:
    """Where each run of `run` elements of a box begins, in row-major order; `run` is the size of some of its last dimensions."""
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    outer, size = len(shape), 1
    while size < run:
        outer -= 1
        size *= box[outer][1] - box[outer][0]
    inner = sum(start * stride for (start, _), stride in zip(box[outer:], strides[outer:], strict=True))
    ranges = [range(start * stride, stop * stride, stride) for (start, stop), stride in zip(box[:outer], strides[:outer], strict=True)]
    return [inner + sum(index) for index in product(*ranges)]


def _read_box(stored: Stored, src: Box, out: memoryview, out_shape: Shape, dst: Box, name: str) -> None:
    """`out[dst] = stored[src]`, with as few calls as the two layouts allow and no copy in between."""
    item = stored.dtype.itemsize
    reach, room = _run(stored.shape, src), _run(out_shape, dst)
    run = min(reach, room)
    targets = _starts(out_shape, dst, run)
    together = min(reach // run, IOV_MAX)  # runs that follow one another in the file
    try:
        file = os.open(stored.path, os.O_RDONLY)
        try:
            for number, start in enumerate(_starts(stored.shape, src, run * (reach // run))):
                first = number * (reach // run)
                for at in range(first, first + reach // run, together):
                    views = [out[t * item : (t + run) * item] for t in targets[at : min(at + together, first + reach // run)]]
                    _read_into(file, views, stored.offset + (start + (at - first) * run) * item)
        finally:
            os.close(file)
    except EOFError:
        raise CheckpointError(f"{stored.path}: {name}: the file ends before the tensor does") from None
    except OSError as error:
        raise CheckpointError(f"{stored.path}: {name}: cannot be read ({error.strerror})") from error


def _read_into(file: int, views: list[memoryview], offset: int) -> None:
    """Fills the views from the file; a call reads 2 GiB at most."""
    while views:
        count = os.preadv(file, views, offset)
        if count == 0:
            raise EOFError
        offset += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]


class HashedFile:
    """A file that is written once from front to back. `close` makes it durable and gives its SHA-256.

    Hashing runs beside the writing. What cannot be written is a CheckpointError that names the file and `writing`, a tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writing = ""
        self.error: CheckpointError | None = None  # what torch.save, which writes through this, hides behind an error of its own
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by `close` or `__exit__`)
        self._digest = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1)
        self._hashing: deque[Future[None]] = deque()
        self._small = bytearray()
        self._position = 0

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._hasher.shutdown()
        self._file.close()

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position

    def write(self, data: bytes | memoryview) -> int:
        """All of it; the memory may change afterwards. What is small is gathered: torch.save writes some dozens of pieces a tensor."""
        self._small += data
        self._position += len(data)
        if len(self._small) >= BLOCK:
            self.flush()
        return len(data)

    def write_tensor(self, tensor: Made, dtype: torch.dtype, advance: Callable[[int], None]) -> None:
        """The tensor's bytes, block by block, of which `advance` is told. CheckpointError where a number does not fit `dtype`."""
        for box in tensor.blocks():
            block = tensor.read_as(box, dtype)
            self.flush()
            self._write_kept(as_bytes(block))
            self._position += block.nbytes
            advance(block.nbytes)

    def flush(self) -> None:
        """Writes what was gathered."""
        if self._small:
            small, self._small = self._small, bytearray()
            self._write_kept(small)

    def close(self) -> str:
        """The SHA-256 of what is on disk now."""
        self.flush()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._refused(error) from error
        self._settle(0)
        self._file.close()
        return self._digest.hexdigest()

    def _write_kept(self, data: bytearray | memoryview) -> None:
        """Writes memory that nobody changes afterwards: it is hashed later."""
        view = memoryview(data)
        for start in range(0, len(view), BLOCK):
            left = view[start : start + BLOCK]
            self._hashing.append(self._hasher.submit(self._digest.update, left))
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError as error:
                raise self._refused(error) from error
            self._settle(WAITING)

    def _refused(self, error: OSError) -> CheckpointError:
        self.error = CheckpointError(f"{self.path}: {self.writing}: cannot be written ({error.strerror})")
        return self.error

    def _settle(self, waiting: int) -> None:
        """Waits until at most so many pieces are not hashed yet."""
        while len(self._hashing) > waiting:
            self._hashing.popleft().result()
