"""Folders that appear under their name only when they are whole and on disk, made by one process or by several together."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from megarl.config.errors import CheckpointError, MegarlError
from megarl.config.files import fsync
from megarl.parallel.comm import gather_over

T = TypeVar("T")
# Files of a model's folder that belong to any other form of the model as well, beside config.json.
CARRIED = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*.model",
    "*.tiktoken",
)


class Team:
    """The processes that make a folder together: this one alone, or those of the default process group.

    `group`: of gloo, with the same ranks, where the default group is NCCL; a line of text per step goes through it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        together = dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        self._group = group
        self.place: Path | None = None  # the folder that is being made, for errors of writing that name no file

    def run(self, action: Callable[[], T]) -> T:
        """This process's result of `action`. CheckpointError on every process if it failed on one of them."""
        problem, result = None, None
        try:
            result = action()
        except MegarlError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{error.filename or self.place}: cannot be written ({error.strerror})"
        problems = [text for text in self.gather(problem) if text is not None]
        if problems:
            raise CheckpointError(problems[0])
        return cast(T, result)

    def first(self, action: Callable[[], None]) -> None:
        """Runs `action` on the first process while the others wait."""
        self.run(action if self.rank == 0 else lambda: None)

    def gather(self, value: T) -> list[T]:
        """Every process's `value`, by rank."""
        return [value] if self.world == 1 else gather_over(self._group, value)


@contextmanager
def aside(out: Path, size: int, team: Team) -> Iterator[Path]:
    """A folder beside `out` that takes its name at the end, when it is on disk; whatever happens before leaves nothing behind.

    size: bytes that are going to be written. CheckpointError where `out` exists, somebody else is making it, or there is no room.
    """
    folder = out.with_name(f".{out.name}.partial")
    lock: list[int] = []  # only in the first process
    team.place = out

    def start() -> None:
        if out.exists() or out.is_symlink():
            raise CheckpointError(f"{out}: already exists (choose another folder, or remove it)")
        if folder.exists():  # of a process that was killed, unless one holds it
            os.close(_hold(folder))
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        lock.append(_hold(folder))
        free = shutil.disk_usage(folder).free
        if free < size:
            raise CheckpointError(f"{out}: {readable(size)} are to be written, but {readable(free)} are free there")

    def publish() -> None:
        fsync(folder)
        folder.rename(out)
        fsync(out.parent)

    try:
        team.first(start)
        yield folder
        team.first(publish)
    except BaseException:
        if lock:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        for descriptor in lock:
            os.close(descriptor)


def readable(size: float) -> str:
    """Bytes as people read them: MB below a GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def _hold(folder: Path) -> int:
    """A descriptor of the folder that keeps every other process from making one there, until it is closed or its process has died."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(f"{folder}: another process is writing there (wait for it, or choose another folder)") from None
    except OSError:  # a network's file system may know no such locks
        pass
    return descriptor


def carry_along(source: Path, folder: Path, config: Mapping[str, Any] | None = None) -> None:
    """Copies everything of a model's folder that is not weights, durably. `config`: config.json, where it is not the source's."""
    for path in sorted({path for pattern in ("config.json", *CARRIED) for path in source.glob(pattern) if path.is_file()}):
        try:
            shutil.copyfile(path, folder / path.name)
            fsync(folder / path.name)
        except OSError as error:
            raise CheckpointError(f"{folder / path.name}: cannot be copied from {path} ({error.strerror})") from error
    if config is not None:
        write_json(folder / "config.json", config)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Indented, and on disk."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    fsync(path)
