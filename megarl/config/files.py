"""Open files safely and write them atomically.

A run stops if a file in `mark_required` cannot be written, and continues without one of `OptionalFiles`."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter, FileIO
from pathlib import Path
from typing import Any

from megarl.config.errors import CheckpointError, StorageError

# The disk is full or gone. Other OSErrors may be defects of megarl.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
MAKE_ROOM = "make room; the same command continues from what is whole"


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError, e.g. for a pipe, which would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a file in a model's folder is inside it after following links.

    Links of the Hugging Face cache (models--OWNER--NAME/snapshots/REVISION) to its folder `blobs` count as
    inside."""
    real_path, real_folder = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    repository = real_folder.parent.parent
    is_cached = real_folder.parent.name == "snapshots" and repository.name.startswith("models--")
    return real_path.is_relative_to(real_folder) or (is_cached and real_path.parent == repository / "blobs")


def read_json(path: Path, absent: str = "is missing") -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError if it is missing (with `absent`) or invalid."""
    try:
        with open_regular(path) as file:
            content = json.loads(file.read().decode("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: {absent}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a JSON object is expected, not a {type(content).__name__}")
    return content


def check_files(folder: Path) -> None:
    """Raise CheckpointError for a pipe or device in a model's folder, where other libraries would block."""
    for path in [*folder.glob("*"), *folder.glob("*templates/*")]:
        with suppress(OSError):  # readers report a broken link
            mode = path.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CheckpointError(f"{path}: not a regular file (a model's folder holds files alone)")


def fsync(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_error(error: OSError) -> str:
    """Return the system's message, e.g. `No space left on device`."""
    return error.strerror or str(error) or type(error).__name__


@contextmanager
def mark_required(path: Path) -> Iterator[None]:
    """Raise an OSError in the block as StorageError, for files that a run needs."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {describe_error(error)} ({MAKE_ROOM})") from error


def to_storage_error(error: OSError) -> StorageError | None:
    """Return this rank's StorageError if the disk is full or gone, else None."""
    if error.errno not in NO_ROOM:
        return None
    file = error.filename or "a file"
    action = "read or written" if error.errno in (errno.EIO, errno.ESTALE) else "written"
    storage_error = StorageError(f"{file}: cannot be {action}: {describe_error(error)} ({MAKE_ROOM})")
    storage_error.on_every_rank = False
    return storage_error


class OptionalFiles:
    """Optional files of a run. One object per process reports each unwritable file once."""

    def __init__(self) -> None:
        self._reported: set[Path] = set()
        self._lines: list[str] = []

    @contextmanager
    def file(self, path: Path) -> Iterator[None]:
        """Suppress and report an OSError in the block."""
        try:
            yield
        except OSError as error:
            if path not in self._reported:
                self._reported.add(path)
                what = f"cannot be written: {describe_error(error)}; the run continues without it"
                self._lines.append(f"{path}: {what} (make room; later data is written then)")
                print(f"megarl: {self._lines[-1]}", file=sys.stderr, flush=True)

    def take(self) -> list[str]:
        """Return the reports since the last call, for the run's events."""
        lines, self._lines = self._lines, []
        return lines


def append_atomic(file: FileIO, data: bytes) -> None:
    """Append all of `data` or nothing. Raises OSError.

    The file is unbuffered, since a buffer would keep the rest and write it later."""
    old_size, remaining = os.fstat(file.fileno()).st_size, memoryview(data)
    try:
        while remaining:
            remaining = remaining[file.write(remaining) :]
    except OSError:
        os.ftruncate(file.fileno(), old_size)
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[BufferedWriter]:
    """Yield a file that replaces `path` once it is complete and on disk. After an error the old one stays.

    A link's target is replaced, not the link. Devices and pipes are written directly."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            yield file
        return
    partial_path = path.with_name(f".{path.name}.partial")
    try:
        with open_new(partial_path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial_path, path)
    except BaseException:
        with suppress(OSError):  # the first error matters
            partial_path.unlink()
        raise


def open_new(path: Path) -> BufferedWriter:
    """Replace a file or link by a new file, and open it for writing. Raises OSError."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o666), "wb")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write an `atomic_file`. Raises OSError."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    with atomic_file(path) as file:
        file.write(data)
