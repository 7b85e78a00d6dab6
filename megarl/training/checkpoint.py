"""Checkpoints on disk: a folder per step that is complete or not there, which of them a run continues from, and whether it may.

run_dir/checkpoints/step-000012/ holds actor/ and critic/ (see training/sharded.py), state.json (samplers, counters) and
manifest.json, which is written last: it lists every other file with its size. No torch is needed to find and judge one.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.errors import CheckpointError, ConfigError
from megarl.config.files import fsync, read_json
from megarl.config.schema import Config

if TYPE_CHECKING:
    from megarl.model.builder import Actor
    from megarl.parallel.runtime import Runtime
    from megarl.training.learner import Learner

FOLDER, MANIFEST, STATE = "checkpoints", "manifest.json", "state.json"
FORMAT = 1
NAME = re.compile(r"step-(\d{6,})|\.step-(\d{6,})\.partial")  # finished, and being written

# Keys that may differ when a run continues: how far it goes, what is shown, and how the work is laid out. All others decide the result.
FREE = (
    "run_dir",
    "steps",
    "parallel",
    "cluster",
    "residency",
    "log",
    "evaluation",
    "checkpoint",
    "data.eval",
    "model.layers",
    "model.recompute",
    "reward.workers",
    "rollout.max_batch",
    "rollout.engine_memory",
    "rollout.engine_timeout",
    "rollout.engine_start_timeout",
    "rollout.engine_failures",
    "rollout.transfer_bucket",
    "update.tokens_per_micro_batch",
    "update.logprob_chunk",
    "value_pretraining.rollouts",
)


@dataclass(frozen=True)
class Checkpoint:
    """A complete one. settings, versions: as they were when it was written."""

    path: Path
    step: int
    settings: dict[str, Any]
    versions: dict[str, str]

    def state(self) -> dict[str, Any]:
        """What is not tensors: the `state` that `save_checkpoint` was given."""
        return read_json(self.path / STATE)


def settings_of(config: Config) -> dict[str, Any]:
    """What a run must share with the one that it continues: every key that is not FREE, dotted, and a hash of the models' config.json."""
    found = {key: value for key, value in _leaves(config.model_dump(), "") if not any(f"{key}.".startswith(f"{free}.") for free in FREE)}
    for key, folder in (("model.path", config.model.path), ("critic.path", config.critic.path)):
        if folder is not None:
            found[f"{key}/config.json"] = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    return found


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _plain(value)


def _plain(value: Any) -> Any:
    """As JSON gives it back; a path does not depend on the folder in which megarl was started."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value.absolute()) if isinstance(value, Path) else value


def check_continues(config: Config, checkpoint: Checkpoint) -> None:
    """Raises ConfigError naming the first key whose value is not the one that the checkpoint was written with.

    Keys that only one of the two knows (another version of megarl) are not compared."""
    now = settings_of(config)
    for key, then in checkpoint.settings.items():
        if key in now and now[key] != then:
            what = "has changed since the run began" if key.endswith("/config.json") else f"is {now[key]!r}, the run there has {then!r}"
            raise ConfigError(f"{key}: {what}, so it cannot continue from {checkpoint.path} (set it back, or choose another run_dir)")
    if config.steps < checkpoint.step:
        raise ConfigError(f"steps: {config.steps}, but {checkpoint.path} has done {checkpoint.step} already (raise it)")


def find_checkpoint(run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint of a run's folder, and one line for each newer one that is incomplete."""
    skipped: list[str] = []
    for _, path in sorted(_all(run_dir), reverse=True):
        try:
            return open_checkpoint(path), skipped
        except CheckpointError as error:
            skipped.append(f"{error} (skipped)")
    return None, skipped


def _all(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder), finished or not."""
    folder = run_dir / FOLDER
    found = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return [(int(match[1] or match[2]), path) for match, path in found if match]


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint's folder. Raises CheckpointError saying what is missing."""
    if path.name.startswith("."):
        raise CheckpointError(f"{path}: its writing was interrupted")
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST}: format {manifest.get('format')}, this megarl reads {FORMAT}")
    for name, size in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file}: has {file.stat().st_size} bytes of {size}")
    return Checkpoint(path, manifest["step"], manifest["settings"], manifest["versions"])


def _nothing(_: str) -> None:
    """What need not be brought onto the device is there."""


def save_checkpoint(
    runtime: Runtime,
    config: Config,
    step: int,
    learners: Mapping[str, Learner],
    state: Mapping[str, Any],
    versions: Mapping[str, str],
    prepare: Callable[[str], None] = _nothing,
) -> Path:
    """Writes the checkpoint of `step`; every rank calls this. `state` must hold JSON and be the same on every rank. `prepare` is told the
    name of each learner before its weights and optimizer are needed.

    It appears under its name only when it is complete and on disk; then older ones than the `checkpoint.keep` newest go.
    CheckpointError on every rank where it cannot be written; nothing is left behind then."""
    from megarl.training.sharded import save_learner

    final = config.run_dir / FOLDER / f"step-{step:06d}"
    aside = final.with_name(f".{final.name}.partial")
    _on_rank_0(runtime, partial(_begin, aside, tuple(learners)), aside)
    for name, learner in learners.items():
        prepare(name)
        try:
            save_learner(learner, aside / name)
        except CheckpointError as error:
            if runtime.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(f"{final}: {error}") from None
    manifest = {"format": FORMAT, "step": step, "settings": settings_of(config), "versions": dict(versions)}
    _on_rank_0(runtime, partial(_finish, aside, final, state, manifest), aside)
    _on_rank_0(runtime, partial(_prune, config.run_dir, config.checkpoint.keep), aside)
    return final


def load_checkpoint(checkpoint: Checkpoint, learners: Mapping[str, Learner], prepare: Callable[[str], None] = _nothing) -> dict[str, Any]:
    """Fills the learners, whatever layout wrote it, and gives the `state`; every rank calls this. `prepare`: as in `save_checkpoint`.
    CheckpointError where it is damaged."""
    from megarl.training.sharded import load_learner

    for name, learner in learners.items():
        prepare(name)
        try:
            load_learner(learner, checkpoint.path / name)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path / name}: {error}") from None
    return checkpoint.state()


def load_actor(folder: Path, model: Actor) -> None:
    """Fills a bare actor, without an optimizer, from a distributed checkpoint of it (a checkpoint's actor/), whatever layout wrote it;
    every rank calls this. CheckpointError where it is damaged."""
    from megarl.training.sharded import load_model

    try:
        load_model(model, folder)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _on_rank_0(runtime: Runtime, action: Callable[[], None], aside: Path) -> None:
    """Runs `action` on rank 0 while the others wait; its failure is a CheckpointError everywhere, and removes what was written."""
    from megarl.parallel.comm import gather_objects

    failure = None
    if runtime.rank == 0:
        try:
            action()
        except OSError as error:
            failure = f"{aside.parent}: the checkpoint cannot be written: {error} (make room, or set checkpoint.every to 0)"
            shutil.rmtree(aside, ignore_errors=True)
    failure = gather_objects(runtime, failure)[0]
    if failure is not None:
        raise CheckpointError(failure)


def _begin(aside: Path, parts: tuple[str, ...]) -> None:
    if aside.exists():  # a save that was interrupted
        shutil.rmtree(aside)
    for part in parts:
        (aside / part).mkdir(parents=True)


def _finish(aside: Path, final: Path, state: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    # A prompt's extra columns may be of types that JSON does not know; they are carried along, nothing depends on them.
    (aside / STATE).write_text(json.dumps(state, default=str), encoding="utf-8")
    files = [path for path in sorted(aside.rglob("*")) if path.is_file()]
    for path in files:
        fsync(path)
    sizes = {str(path.relative_to(aside)): path.stat().st_size for path in files}
    (aside / MANIFEST).write_text(json.dumps({**manifest, "files": sizes}, indent=1) + "\n", encoding="utf-8")
    for path in (aside / MANIFEST, *(folder for folder in aside.iterdir() if folder.is_dir()), aside):
        fsync(path)
    if final.exists():  # damaged, or the run would have continued from it
        shutil.rmtree(final)
    aside.rename(final)
    fsync(final.parent)


def _prune(run_dir: Path, keep: int) -> None:
    """Removes finished and half-written ones that are older than the `keep` newest complete ones (0: all are kept)."""
    complete = []
    for step, path in sorted(_all(run_dir), reverse=True):
        try:
            open_checkpoint(path)
        except CheckpointError:
            continue
        complete.append(step)
    oldest = complete[-1] if not keep else complete[:keep][-1]
    for step, path in _all(run_dir):
        if step < oldest:
            (path / MANIFEST).unlink(missing_ok=True)  # first, so that a removal that is interrupted leaves nothing that looks complete
            shutil.rmtree(path)
