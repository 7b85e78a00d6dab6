"""Read boxes of tensors, hash files while writing, publish complete folders."""

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
from megarl.config.files import fsync, is_inside
from megarl.parallel.comm import gather_objects
from megarl.weights.boxes import Box, full_box
from megarl.weights.families import Shape

T = TypeVar("T")
BLOCK = 2 << 20  # bytes of a read, hash or write, to fit the CPU's cache
SMALL = 64 << 10  # bytes that a thread would hash slower
CARRIED = (
    *("config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer*", "vocab*", "merges*", "chat_template*", "*.model", "*.tiktoken"),
    "additional_chat_templates/*.jinja",
)


class FileTensor(NamedTuple):
    """A row-major tensor at byte `offset` of a file."""

    path: Path
    offset: int
    shape: Shape
    dtype: torch.dtype

    def read(self, box: Box, name: str, out: Tensor | None = None) -> Tensor:
        """Read only `tensor[box]`, into the contiguous `out` or a new tensor on the CPU.

        Raises CheckpointError if the file no longer has it."""
        extents = tuple(stop - start for start, stop in box)
        tensor = torch.empty(extents, dtype=self.dtype) if out is None else out
        memory = as_bytes(tensor)
        # Contiguous from the last cut dimension.
        axis = max((axis for axis, size in enumerate(extents) if size != self.shape[axis]), default=0)
        run_bytes = prod(extents[axis:]) * self.dtype.itemsize
        strides = [prod(self.shape[dim + 1 :]) * self.dtype.itemsize for dim in range(axis + 1)]
        starts = product(*(range(start, stop) for start, stop in box[:axis]), (box[axis][0],))
        try:
            with open(self.path, "rb", buffering=0) as file:
                for run_index, start in enumerate(starts):
                    position = self.offset + sum(map(mul, start, strides))
                    buffer = memory[run_index * run_bytes : (run_index + 1) * run_bytes]
                    while buffer:
                        count = os.preadv(file.fileno(), [buffer], position)
                        if count == 0:
                            raise tensor_error(self.path, name, "the file ends before the tensor does")
                        buffer, position = buffer[count:], position + count
        except OSError as error:
            raise tensor_error(self.path, name, f"cannot be read ({error.strerror})") from error
        return tensor


def tensor_error(path: Path, name: str, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: {name}: {problem}")


def as_bytes(tensor: Tensor) -> memoryview:
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def blocks(shape: Shape, itemsize: int) -> Iterator[Box]:
    """Yield boxes of whole rows, of about BLOCK bytes, that tile a tensor."""
    step = max(1, BLOCK // max(1, prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], step):
        yield ((start, min(start + step, shape[0])), *full_box(shape[1:]))


class HashedFile(FileIO):
    """A new file, hashed in a thread while written.

    A failed write raises CheckpointError with the tensor `writing`."""

    def __init__(self, path: Path) -> None:
        self._digest = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1)
        self._hashing = self._hasher.submit(lambda: None)
        self.path, self.writing = path, ""
        self.error: CheckpointError | None = None  # torch.save hides it
        super().__init__(path, "wb")

    def close(self) -> None:
        self._hasher.shutdown()
        super().close()

    def write(self, data: Any) -> int:
        """Write all data. If larger than SMALL it is hashed later, so it must not change."""
        self._hashing.result()
        if len(data) > SMALL:
            self._hashing = self._hasher.submit(self._digest.update, data)
        else:
            self._digest.update(data)
        buffer = memoryview(data)
        with self._named_errors():
            while buffer:
                buffer = buffer[super().write(buffer) :]
        return len(data)

    def finish(self) -> str:
        with self._named_errors():
            os.fsync(self.fileno())
        self._hashing.result()
        return self._digest.hexdigest()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = tensor_error(self.path, self.writing, f"cannot be written ({error.strerror})")
            raise self.error from error


class Processes:
    """Processes that make a folder: the default group, or this one alone.

    group: gloo group of the same ranks, if the default is NCCL"""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        is_distributed = dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        self.cpu_group: Any = dist.group.WORLD if group is None else group
        self.folder: Path | None = None  # for errors without a file

    def run(self, action: Callable[[], T]) -> T:
        """Return this process's result. A failure raises CheckpointError everywhere."""
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
        self.run(action if self.rank == 0 else lambda: None)

    def gather(self, value: T, kind: Any) -> list[T]:
        return [value] if self.world == 1 else gather_objects(self, value, kind)


@contextmanager
def new_folder(out: Path, size: int, processes: Processes) -> Iterator[Path]:
    """Yield a temporary folder, renamed to `out` when on disk, removed on failure.

    Raises CheckpointError if `out` exists or is being written, or the disk lacks `size` bytes."""
    folder = out.with_name(f".{out.name}.partial")
    lock: list[int] = []
    processes.folder = out

    def start() -> None:
        if out.exists() or out.is_symlink():
            raise CheckpointError(f"{out}: already exists (choose another folder, or remove it)")
        if folder.exists():  # a killed process's, unless locked
            os.close(_lock(folder))
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        lock.append(_lock(folder))
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < size:
            size_text = f"{readable(size)} are to be written"
            raise CheckpointError(f"{out}: {size_text}, but {readable(free_bytes)} are free there")

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
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        message = f"{folder}: another process is writing there (wait for it, or choose another folder)"
        raise CheckpointError(message) from None
    except OSError:  # some network file systems cannot
        pass
    return descriptor


def readable(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def carried_files(source: Path) -> list[Path]:
    """Return the files that an export copies.

    Raises CheckpointError for links out of the folder, which would leak files."""
    paths = sorted({path for pattern in CARRIED for path in source.glob(pattern) if path.is_file()})
    for path in paths:
        if not is_inside(path, source):
            remedy = "put the file itself there"
            raise CheckpointError(f"{path}: leads out of the folder, to {os.path.realpath(path)} ({remedy})")
    return paths


def carry_along(source: Path, folder: Path, config: Mapping[str, Any] | None = None) -> None:
    """Copy `carried_files` to disk. config: replaces config.json. Raises CheckpointError."""
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
    """Write a safetensors file to disk, or raise CheckpointError."""
    try:
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error
    fsync(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    fsync(path)
