"""Files of runs, checkpoints and model folders: JSON objects, indices that run no code, bytes that are on
disk, and what becomes of a run whose disk is full.

What a run writes is one of two kinds. Without an `essential` file it ends, in one line. What is `Dispensable`
it goes on without, and says so once. Neither leaves half a file under its name (`whole_file`), or half a line
(`append_whole`).
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

from megarl.config.errors import CheckpointError, StorageError

# A disk that is full, or gone. Other errors of the system may be a defect of ours.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
MAKE_ROOM = "make room; the same command continues from what is whole"

PARTS = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
HARMLESS = {
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(("torch.distributed.checkpoint.metadata", name) for name in PARTS),
}


def read_json(path: Path, absent: str = "is missing") -> dict[str, Any]:
    """Read a JSON object from a file. Raises CheckpointError naming the file if it is missing (`absent` says
    what that means) or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: {absent}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a JSON object is expected, not a {type(content).__name__}")
    return content


class _Harmless(pickle.Unpickler):
    """Unpickles what torch writes into the index of a distributed checkpoint, and nothing that can do
    anything."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and re.fullmatch(r"Size|b?float\w*|u?int\d+|bool|complex\d+", name)
        if dtype or (module, name) in HARMLESS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no business there")


def check_index(path: Path) -> None:
    """Check the index of a distributed checkpoint, a pickle that torch reads without a question.

    Raises CheckpointError where it is damaged, or names anything but what torch itself writes: reading it
    could run foreign code."""
    try:
        with open(path, "rb") as file:
            _Harmless(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing") from None
    except Exception as error:  # noqa: BLE001 (a damaged pickle raises anything)
        raise CheckpointError(f"{path}: not a readable index of a checkpoint ({error})") from None


def fsync(path: Path) -> None:
    """Wait until a file or a folder's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def why(error: OSError) -> str:
    """Return what the system says, e.g. `No space left on device`."""
    return error.strerror or str(error) or type(error).__name__


@contextmanager
def essential(path: Path) -> Iterator[None]:
    """Write in the block what a run cannot do without. Raises StorageError for an OSError there."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {why(error)} ({MAKE_ROOM})") from error


def unforeseen(error: OSError) -> StorageError | None:
    """Return what a disk that is full, or gone, is to be called wherever it was met; None for any other error
    of the system."""
    if error.errno not in NO_ROOM:
        return None
    file = error.filename or "a file"
    done = "read or written" if error.errno in (errno.EIO, errno.ESTALE) else "written"
    return StorageError(f"{file}: cannot be {done}: {why(error)} ({MAKE_ROOM})")


class Dispensable:
    """What a run writes and can do without. One in each process: it says once of each file that it cannot be
    written, and keeps that line for the run's events until it is taken."""

    def __init__(self) -> None:
        self._said: set[Path] = set()
        self._lines: list[str] = []

    @contextmanager
    def file(self, path: Path) -> Iterator[None]:
        """Write it in the block, and go on after it whatever the disk says."""
        try:
            yield
        except OSError as error:
            if path not in self._said:
                self._said.add(path)
                remedy = "make room: what comes later is written then"
                self._lines.append(
                    f"{path}: cannot be written: {why(error)}; the run goes on without it ({remedy})"
                )
                print(f"megarl: {self._lines[-1]}", file=sys.stderr, flush=True)

    def take(self) -> list[str]:
        """Return the lines since the last call."""
        lines, self._lines = self._lines, []
        return lines


def append_whole(file: FileIO, data: bytes) -> None:
    """Append all of it to a file that has no buffer, or nothing: what a disk that is full has taken of it is
    cut off again. (A buffer would keep the rest, and add it to whatever is written next.) Raises OSError."""
    end, left = os.fstat(file.fileno()).st_size, memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        os.ftruncate(file.fileno(), end)
        raise


@contextmanager
def whole_file(path: Path) -> Iterator[BufferedWriter]:
    """Yield a file that takes its name once it is complete and on disk, in place of one that is there. If
    anything fails before, that one stays, and nothing is left beside it. What a link leads to is replaced,
    not the link; a device or a pipe is written to."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            yield file
        return
    aside = path.with_name(f".{path.name}.partial")
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):  # of a folder that is gone, too; the first error is the one to be seen
            aside.unlink()
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a `whole_file`. Raises OSError."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    with whole_file(path) as file:
        file.write(data)
