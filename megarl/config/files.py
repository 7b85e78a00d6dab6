"""Files of runs, checkpoints and model folders: how they are opened, and written whole or not at all.

What a run writes is one of two kinds. Without an `essential` file it ends, in one line. What is `Dispensable`
it goes on without, and says so once. Neither leaves half a file under its name (`whole_file`), or half a line
(`append_whole`).
"""

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

# A disk that is full, or gone. Other errors of the system may be a defect of ours.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
MAKE_ROOM = "make room; the same command continues from what is whole"


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError where it cannot be opened or is no regular file.

    A pipe in the place of a file would keep the caller waiting for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def stays_inside(path: Path, folder: Path) -> bool:
    """Return whether a file of a model's folder lies in it once links are followed.

    A folder of the Hugging Face cache (models--OWNER--NAME/snapshots/REVISION) consists of links to the files
    in `blobs`, beside `snapshots`: these belong to it."""
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    repository = root.parent.parent
    is_cached = root.parent.name == "snapshots" and repository.name.startswith("models--")
    return real.is_relative_to(root) or (is_cached and real.parent == repository / "blobs")


def read_json(path: Path, absent: str = "is missing") -> dict[str, Any]:
    """Read a JSON object from a file. Raises CheckpointError naming the file if it is missing (`absent` says
    what that means) or holds something else."""
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
    """Raise CheckpointError for a pipe or device in a model's folder.

    Other libraries open its files, and would wait for a writer, or read without end."""
    for path in [*folder.glob("*"), *folder.glob("*templates/*")]:
        with suppress(OSError):  # a link to nothing is missed by who wants to read it
            kind = path.stat().st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                raise CheckpointError(f"{path}: not a regular file (a model's folder holds files alone)")


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
        with open_new(aside) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):  # of a folder that is gone, too; the first error is the one to be seen
            aside.unlink()
        raise


def open_new(path: Path) -> BufferedWriter:
    """Open a new file for writing. Raises OSError.

    A file of that name, which a killed process may have left, is removed first; so is a link."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o666), "wb")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a `whole_file`. Raises OSError."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    with whole_file(path) as file:
        file.write(data)
