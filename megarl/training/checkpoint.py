"""Checkpoints on disk: a folder per step that is complete or not there, which of them a run continues from, and whether it may.

run_dir/checkpoints/step-000012/ holds actor/ and critic/ (see training/sharded.py), state.json and state.safetensors (samplers,
generators, counters) and manifest.json, which is written last: it lists every other file with its size and SHA-256. A checkpoint of
value pretraining is pretraining-000012/ and has no actor, which stands still. No torch is needed to find and judge one.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.errors import CheckpointError, ConfigError
from megarl.config.files import read_json
from megarl.config.schema import CheckpointConfig, Config

if TYPE_CHECKING:
    from megarl.model.builder import Actor
    from megarl.parallel.runtime import Runtime
    from megarl.training.learner import Learner

FOLDER, MANIFEST = "checkpoints", "manifest.json"
FORMAT = 2
NAME = re.compile(r"(\.?)(pretraining|step)-(\d{6,})(\.partial)?")  # finished, and being written: .NAME.partial
PRETRAINING = "value_pretraining"  # the stage; any other is the main one
SEAL = "sha256"  # of the manifest without this key

# Keys that may differ when a run continues: how far it goes, what is shown, and how the work is laid out. All others decide the result.
FREE = (
    "run_dir",
    "steps",
    "parallel",
    "cluster",
    "residency",
    "log",
    "guard",
    "watchdog",
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
    """A complete one, by the sizes of its files. manifest: as it was written, with `settings`, `versions`, `layout` and `files`."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def pretraining(self) -> bool:
        """Whether it is one of value pretraining."""
        return self.stage == PRETRAINING

    @property
    def stage(self) -> str:
        return str(self.manifest["stage"])

    @property
    def done(self) -> int:
        """Steps of the main stage that it stands after."""
        return 0 if self.pretraining else self.step

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.manifest["settings"])

    def state(self) -> dict[str, Any]:
        """What is not tensors: the `state` that `CheckpointWriter.save` was given."""
        from megarl.training.state_file import read_state

        return read_state(self.path)

    def damage(self, part: int = 0, parts: int = 1) -> list[str]:
        """A line for each file, of this share of them, whose content is not what was written. Reads each of them once."""
        lines = []
        for name in sorted(self.manifest["files"])[part::parts]:
            try:
                with open(self.path / name, "rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                lines.append(f"{self.path / name}: cannot be read: {error.strerror}")
                continue
            if found != self.manifest["files"][name][1]:
                lines.append(f"{self.path / name}: its content is not what was written (SHA-256)")
        return lines


def folder_name(stage: str, step: int) -> str:
    """Of a finished checkpoint."""
    return f"{'pretraining' if stage == PRETRAINING else 'step'}-{step:06d}"


def seal(manifest: Mapping[str, Any]) -> str:
    """The text of a manifest, with a checksum of its own."""
    return json.dumps({**manifest, SEAL: _checksum(manifest)}, indent=1) + "\n"


def _checksum(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != SEAL}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


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
    if config.steps < checkpoint.done:
        raise ConfigError(f"steps: {config.steps}, but {checkpoint.path} has done {checkpoint.done} already (raise it)")


def find_checkpoint(run_dir: Path, but: Collection[Path] = ()) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint of a run's folder, those of `but` left out, and one line for each newer one that is incomplete."""
    skipped: list[str] = []
    for _, path in sorted(_all(run_dir), reverse=True):
        if path in but:
            continue
        try:
            return open_checkpoint(path), skipped
        except CheckpointError as error:
            skipped.append(f"{error} (skipped)")
    return None, skipped


def _all(run_dir: Path) -> list[tuple[tuple[bool, int], Path]]:
    """((main stage?, step), folder) of each, finished or not."""
    folder = run_dir / FOLDER
    found = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return [((match[2] == "step", int(match[3])), path) for match, path in found if match and bool(match[1]) == bool(match[4])]


def has_finished(run_dir: Path) -> bool:
    """Whether a checkpoint was ever finished there, be it damaged by now."""
    return any(not path.name.startswith(".") for _, path in _all(run_dir))


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint's folder. Raises CheckpointError saying what is missing."""
    if path.name.startswith("."):
        raise CheckpointError(f"{path}: its writing was interrupted")
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST}: format {manifest.get('format')}, this megarl reads {FORMAT}")
    if manifest.get(SEAL) != _checksum(manifest):
        raise CheckpointError(f"{path / MANIFEST}: its content is not what was written (SHA-256)")
    for name, (size, _) in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file}: has {file.stat().st_size} bytes of {size}")
    return Checkpoint(path, manifest)


def choose_checkpoint(runtime: Runtime, run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """As `find_checkpoint`, but with the content of every file compared with its checksum, shared out over the ranks; the same on every
    rank. It costs one reading of the checkpoint, by all ranks together, before it is loaded."""
    from megarl.parallel.comm import from_rank_0, gather_objects

    damaged: list[Path] = []
    lines: list[str] = []
    while True:
        # Rank 0 chooses for all, so that no two ranks can see different ones.
        found, skipped = from_rank_0(runtime, find_checkpoint(run_dir, damaged) if runtime.rank == 0 else None)
        lines += [line for line in skipped if line not in lines]
        if found is None:
            return None, lines
        wrong = [line for theirs in gather_objects(runtime, found.damage(runtime.rank, runtime.world)) for line in theirs]
        if not wrong:
            return found, lines
        damaged.append(found.path)
        lines.append(f"{wrong[0]}{f', and {len(wrong) - 1} files more' if wrong[1:] else ''} (skipped)")


def needs_nothing(_: str) -> None:
    """What need not be brought onto the device is there."""


def load_checkpoint(
    checkpoint: Checkpoint, learners: Mapping[str, Learner], prepare: Callable[[str], None] = needs_nothing
) -> dict[str, Any]:
    """Fills the learners that it holds, whatever layout wrote it, and gives the `state`; every rank calls this. `prepare` is told the name
    of each before its weights and optimizer are needed. CheckpointError where it is damaged."""
    from megarl.training.sharded import load_learner

    for name, learner in learners.items():
        if checkpoint.pretraining and name == "actor":
            continue
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


def prune(run_dir: Path, keep: CheckpointConfig) -> None:
    """Removes finished and half-written ones that are older than the `keep` newest complete ones (0: all are kept), but for those of every
    `keep_every`-th step."""
    complete = []
    for order, path in sorted(_all(run_dir), reverse=True):
        try:
            open_checkpoint(path)
        except CheckpointError:
            continue
        complete.append(order)
    oldest = complete[-1] if not keep.keep else complete[: keep.keep][-1]
    for (main, step), path in _all(run_dir):
        kept = main and keep.keep_every and step % keep.keep_every == 0 and not path.name.startswith(".")
        if (main, step) < oldest and not kept:
            (path / MANIFEST).unlink(missing_ok=True)  # first, so that a removal that is interrupted leaves nothing that looks complete
            shutil.rmtree(path)
