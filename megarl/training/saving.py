"""Writes the checkpoints of a run: copies are made between two steps, each rank writes its own beside the next step, rank 0 makes them one.

Whoever dies while a checkpoint is written leaves a folder that is not one: its manifest, with the size and the SHA-256 of every file,
is written last, and only then does the folder get its name.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megarl.config.errors import CheckpointError
from megarl.config.files import fsync
from megarl.config.schema import Config
from megarl.parallel.comm import from_rank_0, gather_on_0
from megarl.parallel.runtime import Runtime, generator_states
from megarl.training.checkpoint import FOLDER, FORMAT, MANIFEST, folder_name, needs_nothing, prune, seal, settings_of
from megarl.training.learner import Learner
from megarl.training.sharded import cannot_be_written, stage_learner
from megarl.training.staging import Staged, Stager
from megarl.training.state_file import write_state

# Seconds after which the writing thread gives the interpreter back to the step, which loses it with every operation of torch: by
# Python's own rule, 5 ms, a step of many small operations all but stands still.
TURN = 2e-4
PATIENCE = 0.8  # of parallel.timeout, for which the other ranks wait
Entries = dict[str, tuple[int, str]]  # file -> (bytes, SHA-256)


@dataclass
class _Write:
    """One checkpoint on its way to the disk, as one rank sees it."""

    final: Path
    parts: dict[str, Staged]
    state: Callable[[], Mapping[str, Any]] | None
    manifest: dict[str, Any]
    files: Entries = field(default_factory=dict)
    failure: str | None = None
    thread: threading.Thread | None = None

    @property
    def aside(self) -> Path:
        return self.final.with_name(f".{self.final.name}.partial")

    def start(self, work: Callable[[], None]) -> None:
        """Begins `work` in a thread. Its failure is kept: nobody could catch it there."""

        def run() -> None:
            usual = sys.getswitchinterval()
            sys.setswitchinterval(TURN)
            try:
                work()
            except Exception as error:  # noqa: BLE001 (whatever it is, `advance` raises it on every rank)
                self.failure = _first_line(error)
            finally:
                sys.setswitchinterval(usual)

        self.thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self.thread.start()

    def join(self, limit: float) -> None:
        """Waits for the thread; one that takes longer has failed."""
        if self.thread is not None:
            self.thread.join(limit)
            if self.thread.is_alive():
                self.failure = f"writing took longer than checkpoint.timeout, {limit:g} s"

    def own(self) -> None:
        """This rank's files."""
        for name, staged in self.parts.items():
            self.add(staged.write(self.aside / name))
        if self.state is not None:
            self.add(write_state(self.aside, self.state()))

    def add(self, paths: list[Path]) -> None:
        """Enters files into the manifest, once they are on disk."""
        for path in paths:
            fsync(path)
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            self.files[str(path.relative_to(self.aside))] = path.stat().st_size, digest


class CheckpointWriter:
    """Every rank has one and calls it alike. `seconds`: the longest that a save has kept the run from its work so far."""

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        learners: Mapping[str, Learner],
        versions: Mapping[str, str],
        prepare: Callable[[str], None] = needs_nothing,
    ) -> None:
        """prepare: see load_checkpoint."""
        self.runtime, self.config, self.learners, self.versions, self.prepare = runtime, config, learners, dict(versions), prepare
        self.seconds = 0.0
        self._stagers = {name: Stager(runtime) for name in learners}
        self._write: _Write | None = None

    def save(self, stage: str, step: int, parts: tuple[str, ...], state: Callable[[], Mapping[str, Any]], *, now: bool = False) -> None:
        """Begins the checkpoint of `step`, after the one before is whole; with `now`, or without `checkpoint.background`, finishes it.

        parts: the learners that belong to it; state: what the next step needs besides them, the same on every rank; called at any time
        until the checkpoint is whole. Raises CheckpointError on every rank where it, or the one before, cannot be written."""
        started = time.perf_counter()
        self.finish()
        final = self.config.run_dir / FOLDER / folder_name(stage, step)
        layout = {key: size for key, size in asdict(self.runtime.layout).items() if isinstance(size, int)}
        manifest = {"format": FORMAT, "stage": stage, "step": step, "layout": layout, "settings": settings_of(self.config)}
        generators = gather_on_0(self.runtime, generator_states())

        def complete() -> Mapping[str, Any]:
            return {**state(), "generators": generators}

        write = _Write(final, {}, complete if self.runtime.rank == 0 else None, {**manifest, "versions": self.versions})
        self._on_rank_0(write, lambda: _begin(write.aside, parts))
        try:
            for name in parts:
                self.prepare(name)
                write.parts[name] = stage_learner(self.learners[name], self._stagers[name])
        except CheckpointError as error:
            raise CheckpointError(f"{final}: {error}") from None
        self._write = write
        write.start(write.own)
        if now or not self.config.checkpoint.background:
            self.finish()
        self.seconds = max(self.seconds, time.perf_counter() - started)

    @property
    def pending(self) -> int:
        """Bytes of copies that wait to be written."""
        return sum(staged.bytes for staged in self._write.parts.values()) if self._write is not None else 0

    @property
    def busy(self) -> bool:
        """Whether this rank still writes at a checkpoint that is not whole."""
        return self._write is not None and self._write.thread is not None and self._write.thread.is_alive()

    @property
    def unfinished(self) -> bool:
        """Whether a checkpoint has been begun and is not whole; the same on every rank."""
        return self._write is not None

    def advance(self) -> Path | None:
        """To be called once no rank is busy: has rank 0 make the parts one; a second time: gives the checkpoint, which is then whole.

        Raises CheckpointError on every rank where one could not write; nothing but what was there before is left then."""
        write = self._write
        if write is None:
            return None
        told = gather_on_0(self.runtime, (write.failure, write.files, {name: s.results for name, s in write.parts.items()}))
        bad = from_rank_0(self.runtime, [f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(told or []) if text is not None])
        if bad:
            self._write = None
            if self.runtime.rank == 0:
                shutil.rmtree(write.aside, ignore_errors=True)
            raise CheckpointError(f"{write.final}: {cannot_be_written(bad[0])}")
        if write.parts:
            if told is not None:
                write.start(partial(_unite, write, write.parts, [(files, results) for _, files, results in told], self.config))
            write.parts = {}
            return None
        self._write = None
        return write.final

    def finish(self) -> Path | None:
        """As `advance` to the end, waiting for each rank at most `checkpoint.timeout`; None where there is nothing to be finished."""
        final = None
        while self._write is not None:
            self._write.join(min(self.config.checkpoint.timeout, PATIENCE * self.runtime.timeout))
            final = self.advance()
        return final

    def _on_rank_0(self, write: _Write, action: Callable[[], None]) -> None:
        """Runs `action` on rank 0 while the others wait; its failure is a CheckpointError everywhere, and removes what was written."""
        failure = None
        if self.runtime.rank == 0:
            try:
                action()
            except (OSError, RuntimeError) as error:
                failure = f"{write.final}: {cannot_be_written(_first_line(error))}"
                shutil.rmtree(write.aside, ignore_errors=True)
        failure = from_rank_0(self.runtime, failure)
        if failure is not None:
            raise CheckpointError(failure)


def save_checkpoint(
    runtime: Runtime, config: Config, step: int, learners: Mapping[str, Learner], state: Mapping[str, Any], versions: Mapping[str, str]
) -> Path:
    """Writes one checkpoint of the main stage and waits for it; every rank calls this. Errors as CheckpointWriter."""
    writer = CheckpointWriter(runtime, config, learners, versions)
    writer.save("train", step, tuple(learners), lambda: state, now=True)
    return config.run_dir / FOLDER / folder_name("train", step)


def _begin(aside: Path, parts: tuple[str, ...]) -> None:
    if aside.exists():  # a save that was interrupted
        shutil.rmtree(aside)
    for part in parts:
        (aside / part).mkdir(parents=True)


def _unite(write: _Write, parts: dict[str, Staged], told: list[tuple[Entries, dict[str, Any]]], config: Config) -> None:
    """Rank 0's part, with what all ranks have written."""
    for name, staged in parts.items():
        write.add(staged.finish(write.aside / name, [results[name] for _, results in told]))
    files = dict(sorted({**write.files, **{name: entry for theirs, _ in told for name, entry in theirs.items()}}.items()))
    (write.aside / MANIFEST).write_text(seal({**write.manifest, "files": files}), encoding="utf-8")
    for path in (write.aside / MANIFEST, *(folder for folder in write.aside.iterdir() if folder.is_dir()), write.aside):
        fsync(path)
    if write.final.exists():  # damaged, or the run would have continued from it
        shutil.rmtree(write.final)
    write.aside.rename(write.final)
    fsync(write.final.parent)
    prune(config.run_dir, config.checkpoint)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
