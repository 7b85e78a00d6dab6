"""Files of models: boxes of stored tensors, hashed writing, and folders that appear only when they are whole.

A safetensors tensor and a chunk of a distributed checkpoint are the same thing here: row-major bytes at an
offset of a file. Folders are made by one process or by several together.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from itertools import product
from math import prod
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.errors import CheckpointError, MegarlError
from megarl.config.files import fsync, stays_inside
from megarl.parallel.comm import gather_over
from megarl.weights.boxes import Box, full_box
from megarl.weights.families import Shape

T = TypeVar("T")
BLOCK = 2 << 20  # bytes to read, convert, hash and write at a time: they stay in a processor's cache
SMALL = 64 << 10  # bytes up to which a thread of its own for hashing does not pay
# Files of a model's folder that belong to any other form of the model as well.
CARRIED = (
    *("config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer*", "vocab*", "merges*", "chat_template*", "*.model", "*.tiktoken"),
    "additional_chat_templates/*.jinja",
)


class FileTensor(NamedTuple):
    """A row-major tensor at `offset` bytes of a file."""

    path: Path
    offset: int
    shape: Shape
    dtype: torch.dtype

    def read(self, box: Box, name: str, out: Tensor | None = None) -> Tensor:
        """Return `tensor[box]` on the CPU, or fill the contiguous `out` with it; only its own bytes are read.
        Raises CheckpointError, naming the file and the tensor `name`, where the bytes are no longer there."""
        extents = tuple(stop - start for start, stop in box)
        tensor = torch.empty(extents, dtype=self.dtype) if out is None else out
        memory = as_bytes(tensor)
        # Bytes follow one another from the last dimension that is not whole.
        axis = max((axis for axis, size in enumerate(extents) if size != self.shape[axis]), default=0)
        run = prod(extents[axis:]) * self.dtype.itemsize
        strides = [prod(self.shape[dim + 1 :]) * self.dtype.itemsize for dim in range(axis + 1)]
        starts = product(*(range(start, stop) for start, stop in box[:axis]), (box[axis][0],))
        try:
            with open(self.path, "rb", buffering=0) as file:
                for number, start in enumerate(starts):
                    at = self.offset + sum(map(mul, start, strides))
                    left = memory[number * run : (number + 1) * run]
                    while left:
                        count = os.preadv(file.fileno(), [left], at)
                        if count == 0:
                            raise damaged(self.path, name, "the file ends before the tensor does")
                        left, at = left[count:], at + count
        except OSError as error:
            raise damaged(self.path, name, f"cannot be read ({error.strerror})") from error
        return tensor


def damaged(path: Path, name: str, problem: str) -> CheckpointError:
    """Return the error for a tensor (or key) of a file."""
    return CheckpointError(f"{path}: {name}: {problem}")


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def blocks(shape: Shape, itemsize: int) -> Iterator[Box]:
    """Yield boxes of whole rows that tile a tensor in order, each of about BLOCK bytes."""
    step = max(1, BLOCK // max(1, prod(shape[1:]) * itemsize))
    for first in range(0, shape[0], step):
        yield ((first, min(first + step, shape[0])), *full_box(shape[1:]))


class HashedFile(FileIO):
    """A new file that is written once from front to back, and hashed by a thread beside that. Errors of
    writing are CheckpointErrors that name the file and `writing`, a tensor."""

    def __init__(self, path: Path) -> None:
        self._digest = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1)
        self._hashing = self._hasher.submit(lambda: None)  # of the data before
        self.path, self.writing = path, ""
        self.error: CheckpointError | None = None  # for torch.save, which hides it behind an error of its own
        super().__init__(path, "wb")

    def close(self) -> None:
        self._hasher.shutdown()
        super().close()

    def write(self, data: Any) -> int:
        """Write all of it; what is larger than SMALL must not change afterwards, as it is hashed later."""
        self._hashing.result()
        if len(data) > SMALL:
            self._hashing = self._hasher.submit(self._digest.update, data)
        else:
            self._digest.update(data)
        left = memoryview(data)
        with self._named_errors():
            while left:
                left = left[super().write(left) :]
        return len(data)

    def finish(self) -> str:
        """Return the SHA-256 of what is on disk now."""
        with self._named_errors():
            os.fsync(self.fileno())
        self._hashing.result()
        return self._digest.hexdigest()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = damaged(self.path, self.writing, f"cannot be written ({error.strerror})")
            raise self.error from error


class Processes:
    """The processes that make a folder together: this one alone, or those of the default process group.
    group: of gloo, with the same ranks, where the default group is NCCL."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        together = dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        self._group = group
        self.folder: Path | None = None  # that is being made, for errors of writing that name no file

    def run(self, action: Callable[[], T]) -> T:
        """Return this process's result of `action`; CheckpointError on every process if it failed on one."""
        problem, result = None, None
        try:
            result = action()
        except MegarlError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{error.filename or self.folder}: cannot be written ({error.strerror})"
        problems = [text for text in self.gather(problem, str | None) if text is not None]
        if problems:
            raise CheckpointError(problems[0])
        return cast(T, result)

    def first(self, action: Callable[[], None]) -> None:
        """Run `action` on the first process while the others wait."""
        self.run(action if self.rank == 0 else lambda: None)

    def gather(self, value: T, kind: Any) -> list[T]:
        """Return every process's `value`, of type `kind`, by rank."""
        return [value] if self.world == 1 else gather_over(self._group, value, kind)


@contextmanager
def new_folder(out: Path, size: int, processes: Processes) -> Iterator[Path]:
    """Yield a temporary folder beside `out` that takes its name at the end, when it is on disk. If anything
    fails before, nothing is left behind.
    size: bytes that are going to be written. Raises CheckpointError where `out` exists, somebody else is
    making it, or there is no room."""
    folder = out.with_name(f".{out.name}.partial")
    lock: list[int] = []  # only in the first process
    processes.folder = out

    def start() -> None:
        if out.exists() or out.is_symlink():
            raise CheckpointError(f"{out}: already exists (choose another folder, or remove it)")
        if folder.exists():  # of a process that was killed, unless one holds it
            os.close(_lock(folder))
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        lock.append(_lock(folder))
        free = shutil.disk_usage(folder).free
        if free < size:
            wanted = f"{readable(size)} are to be written"
            raise CheckpointError(f"{out}: {wanted}, but {readable(free)} are free there")

    def publish() -> None:
        fsync(folder)
        folder.rename(out)
        fsync(out.parent)

    try:
        processes.first(start)
        yield folder
        processes.first(publish)
    except BaseException:
        if lock:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        for descriptor in lock:
            os.close(descriptor)


def _lock(folder: Path) -> int:
    """Return a descriptor that keeps other processes from making the folder until it is closed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        message = f"{folder}: another process is writing there (wait for it, or choose another folder)"
        raise CheckpointError(message) from None
    except OSError:  # a network's file system may know no such locks
        pass
    return descriptor


def readable(size: float) -> str:
    """Return bytes as people read them: MB below a GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def carried_files(source: Path) -> list[Path]:
    """Return what an exported folder takes from its source. Raises CheckpointError for a link that leads out
    of the folder: a copy would give another file of the user away."""
    found = sorted({path for pattern in CARRIED for path in source.glob(pattern) if path.is_file()})
    for path in found:
        if not stays_inside(path, source):
            remedy = "put the file itself there"
            raise CheckpointError(f"{path}: leads out of the folder, to {os.path.realpath(path)} ({remedy})")
    return found


def carry_along(source: Path, folder: Path, config: Mapping[str, Any] | None = None) -> None:
    """Copy everything of a model's folder that is not weights, and wait until it is on disk.
    config: config.json, where it is not the source's. Raises CheckpointError naming what cannot be copied, or
    as `carried_files`."""
    for path in carried_files(source):
        copy = folder / path.relative_to(source)
        try:
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
            fsync(copy)
            fsync(copy.parent)
        except OSError as error:
            raise CheckpointError(f"{copy}: cannot be copied from {path} ({error.strerror})") from error
    if config is not None:
        write_json(folder / "config.json", config)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, onto the disk. Raises CheckpointError where that is not possible."""
    try:
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error
    fsync(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON, and wait until it is on disk."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    fsync(path)
