"""Find, check and prune checkpoints on disk, which training/saving.py writes.

run_dir/checkpoints/step-000012/ contains

    actor/, critic/, critic_2/     weights and optimizers (training/sharded.py)
    state.json, state.safetensors  samplers, generators, counters
    rollouts/                      rollouts of later steps (schedule.ahead)
    manifest.json                  size and SHA-256 of every other file, written last

Value pretraining's pretraining-000012/ has no actor. Imports no Megatron: preflight uses this
module."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config.errors import CheckpointError, ConfigError
from megarl.config.files import describe_error, is_inside, read_json
from megarl.config.hub import pinned
from megarl.config.methods import method_options
from megarl.config.schema import PRETRAINING, CheckpointConfig, Config
from megarl.config.schema.section import Section, fields
from megarl.parallel.comm import broadcast_from_rank_0, gather_objects
from megarl.parallel.runtime import Runtime

FOLDER, MANIFEST = "checkpoints", "manifest.json"
FORMAT = 2
# A finished checkpoint, or an unfinished one: .NAME.partial
NAME = re.compile(r"(\.?)(pretraining|step)-(\d{6,})(\.partial)?")
SEAL = "sha256"
BATCHES = "rollouts"
STATE, NUMBERS = "state.json", "state.safetensors"
LONG = 32
MARK = "$numbers"  # {MARK: name of the tensor}


def _is_list_of_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(entry, list) and list(map(type, entry)) == [int, str] for entry in value.values()
    )


# Required keys: a right checksum does not make a manifest trustworthy.
MANIFEST_PARTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stage": (lambda value: isinstance(value, str), "a text"),
    "step": (lambda value: type(value) is int and value >= 0, "a whole number"),
    "settings": (lambda value: isinstance(value, dict), "an object of settings"),
    "files": (_is_list_of_files, "an object of [bytes, SHA-256]"),
}
# Keys that may differ when a run continues, because they do not decide the result.
FREE = (
    *("run_dir", "steps", "parallel", "cluster", "residency", "log", "guard", "watchdog", "evaluation"),
    *("checkpoint", "data.eval", "model.layers", "model.attention", "model.recompute"),
    *("model.recompute_layers", "model.recompute_modules"),
    *("reward.workers", "model.grouped_experts", "model.permute_fusion", "rollout.routing_compare"),
    *("rollout.max_batch", "rollout.engine_memory", "rollout.engine_timeout", "rollout.engine_start_timeout"),
    *("rollout.engine_failures", "rollout.transfer_bucket", "rollout.fingerprint", "rollout.engine_tp"),
    *("rollout.weights", "schedule.max_staleness"),
    *("rollout.urls", "rollout.router", "rollout.in_flight", "rollout.turns.hold", "rollout.turns.calls"),
    *("reward.max_ungraded", "reward.sandbox", "rollout.turns.sandbox"),
    *("reward.judge.url", "reward.judge.key_variable", "reward.judge.concurrency", "reward.judge.timeout"),
    *("reward.judge.retries", "reward.judge.max_calls", "reward.judge.max_tokens", "reward.judge.cache"),
    *("update.tokens_per_micro_batch", "update.logprob_chunk", "value_pretraining.rollouts"),
)
# Not free: in bf16 the sum of the micro-batches' gradients differs.
BOUND = ("parallel.grad_dtype",)
_MODEL_DEFAULTS = {"frozen": [], "frozen_layers": 0, "lora.rank": None, "optimizer": "adam"}
ADDED: dict[str, Any] = {f"actor.{key}": value for key, value in _MODEL_DEFAULTS.items()}
ADDED |= {f"critic.{key}": value for key, value in _MODEL_DEFAULTS.items()}
ADDED |= {"rollout.routing_replay": False, "rollout.sampling_replay": False, "rollout.window": None}
ADDED |= {"teacher.path": None, "teacher.by_source": {}, "teacher.top_k": None}
ADDED |= {"teacher.weights": None, "teacher.ratio_cap": None, "teacher.alpha": 0.0, "teacher.alone": False}
ADDED |= {"algorithm.lambda_floor": 0.0, "algorithm.window_tail": 0, "schedule.in_flight": "none"}
ADDED |= {"algorithm.dppo.top_k": 0, "critic.count": 1}
ADDED |= {"algorithm.agreement.mask": 0.0, "algorithm.agreement.filter": 0.0}
ADDED |= {f"algorithm.{option.key}": option.default for option, _, _ in method_options()}
ADDED |= {"reward.judge.model": ""}


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def pretraining(self) -> bool:
        return self.stage == PRETRAINING

    @property
    def stage(self) -> str:
        return str(self.manifest["stage"])

    @property
    def done(self) -> int:
        return 0 if self.pretraining else self.step

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.manifest["settings"])

    def state(self) -> dict[str, Any]:
        return read_state(self.path)

    def damage(self, part: int = 0, parts: int = 1) -> list[str]:
        """Return a line for each damaged file of this share."""
        lines = []
        for name in sorted(self.manifest["files"])[part::parts]:
            try:
                digest = hash_file(self.path / name)
            except OSError as error:
                lines.append(f"{self.path / name}: cannot be read: {error.strerror}")
                continue
            if digest != self.manifest["files"][name][1]:
                lines.append(f"{self.path / name}: is damaged: its SHA-256 differs")
        return lines


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_name(stage: str, step: int) -> str:
    return f"{'pretraining' if stage == PRETRAINING else 'step'}-{step:06d}"


def seal(manifest: Mapping[str, Any]) -> str:
    return json.dumps({**manifest, SEAL: _checksum(manifest)}, indent=1) + "\n"


def _checksum(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != SEAL}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def list_fixed_settings(config: Config) -> dict[str, Any]:
    """Return the settings that a continued run must keep."""
    settings = _list_fixed_keys(config)
    for key, folder in config.model_folders.items():
        settings[f"{key}/config.json"] = hash_file(folder / "config.json")
    return settings


def _list_fixed_keys(config: Config) -> dict[str, Any]:
    return {
        key: _plain(attrgetter(key)(config))
        for key, _ in fields(Config)
        if key in BOUND or not any(f"{key}.".startswith(f"{free}.") for free in FREE)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Section):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        name = pinned(value)  # the hub's cache may move
        return str(value.absolute() if name == value else name)
    return value


def _pin_texts(value: Any) -> Any:
    """Pin the paths of settings that an older version wrote."""
    if isinstance(value, list):
        return [_pin_texts(item) for item in value]
    if isinstance(value, dict):
        return {key: _pin_texts(item) for key, item in value.items()}
    return str(pinned(Path(value))) if isinstance(value, str) and "/snapshots/" in value else value


def check_continues(config: Config, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for the first key whose value differs from the checkpoint's.

    Keys that only one version of megarl has are not compared, except ADDED."""
    settings, saved_settings = list_fixed_settings(config), ADDED | checkpoint.settings
    saved_settings = {key: _pin_texts(value) for key, value in saved_settings.items()}
    if saved_settings.get("rollout.dynamic_sampling.at_limit") == "stop":  # no step has reached the limit
        for key in ("at_limit", "max_batches"):
            del settings[f"rollout.dynamic_sampling.{key}"]
    for key, saved_value in saved_settings.items():
        if key in settings and settings[key] != saved_value:
            what = f"is {settings[key]!r}, the run there has {saved_value!r}"
            if key.endswith("/config.json"):
                what = "has changed since the run began"
            remedy = "set it back, or choose another run_dir"
            raise ConfigError(f"{key}: {what}, so it cannot continue from {checkpoint.path} ({remedy})")
    if config.steps < checkpoint.done:
        what = f"{config.steps}, but {checkpoint.path} has done {checkpoint.done} already (raise it)"
        raise ConfigError(f"steps: {what}")


def moved_schedule(config: Config, checkpoint: Checkpoint) -> str | None:
    """Return a warning if a new `steps` changes the learning rate."""
    saved_steps = checkpoint.manifest.get("steps", config.steps)
    schedules = {"actor": config.actor.schedule}
    if config.has_critic:
        schedules["critic"] = config.critic.schedule
    keys = [f"{name}.schedule {kind}" for name, kind in schedules.items() if kind != "constant"]
    if saved_steps == config.steps or not keys:
        return None
    return f"steps: {config.steps}, no longer {saved_steps}: the learning rate jumps ({', '.join(keys)})"


def check_same_adapters(config: Config, checkpoint: Checkpoint) -> None:
    settings = _list_fixed_keys(config)  # an evaluation may lack the other models
    for key, saved_value in (ADDED | checkpoint.settings).items():
        if key.startswith("actor.lora.") and settings[key] != saved_value:
            what = f"the actor in {checkpoint.path} was trained with {saved_value!r}"
            remedy = "give the run's own configuration"
            raise ConfigError(f"{key}: is {settings[key]!r}, and {what} ({remedy})")


def find_checkpoint(run_dir: Path, but: Collection[Path] = ()) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest complete checkpoint not in `but`, and a line per newer incomplete one."""
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
    folder = run_dir / FOLDER
    matches = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return [
        ((match[2] == "step", int(match[3])), path)
        for match, path in matches
        if match and bool(match[1]) == bool(match[4])
    ]


def has_finished(run_dir: Path) -> bool:
    return any(not path.name.startswith(".") for _, path in _all(run_dir))


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint. Raises CheckpointError if it is incomplete."""
    if path.name.startswith("."):
        raise CheckpointError(f"{path}: its writing was interrupted")
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        what = f"format {manifest.get('format')}, this megarl reads {FORMAT}"
        raise CheckpointError(f"{path / MANIFEST}: {what}")
    if manifest.get(SEAL) != _checksum(manifest):
        raise CheckpointError(f"{path / MANIFEST}: is damaged: its SHA-256 differs")
    for key, (is_valid, expected_type) in MANIFEST_PARTS.items():
        if not is_valid(manifest.get(key)):
            raise CheckpointError(f"{path / MANIFEST}: {key}: {expected_type} is expected")
    for name, (size, _) in manifest["files"].items():
        file = path / name
        if "\0" in name or ".." in file.parts or not is_inside(file, path):
            raise CheckpointError(f"{path / MANIFEST}: names {name!r}, which lies outside the folder")
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file}: has {file.stat().st_size} bytes of {size}")
    return Checkpoint(path, manifest)


def find_damage(checkpoint: Checkpoint, runtime: Runtime) -> list[str]:
    reports = gather_objects(runtime, checkpoint.damage(runtime.rank, runtime.world), list[str])
    return [line for report in reports for line in report]


def choose_checkpoint(runtime: Runtime, run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return `find_checkpoint` on every rank, with checksums verified.

    Raises CheckpointError if all are damaged: a fresh start would lose the run's records."""
    damaged_paths: list[Path] = []
    lines: list[str] = []
    while True:
        # Rank 0 chooses: ranks could see different files.
        found, skipped = None, list[str]()
        if runtime.rank == 0:
            checkpoint, skipped = find_checkpoint(run_dir, damaged_paths)
            found = (checkpoint.path, json.dumps(checkpoint.manifest)) if checkpoint else None
        message_type = tuple[tuple[Path, str] | None, list[str]]
        found, skipped = broadcast_from_rank_0(runtime, (found, skipped), message_type)
        checkpoint = None if found is None else Checkpoint(found[0], json.loads(found[1]))
        lines += [line for line in skipped if line not in lines]
        if checkpoint is None and damaged_paths:
            what = "all of its checkpoints are damaged (restore one, or choose another folder)"
            raise CheckpointError(f"run_dir: {run_dir}: {what}: {lines[0].removesuffix(' (skipped)')}")
        if checkpoint is None:
            return None, lines
        damage = find_damage(checkpoint, runtime)
        if not damage:
            return checkpoint, lines
        damaged_paths.append(checkpoint.path)
        lines.append(f"{damage[0]}{f', and {len(damage) - 1} files more' if damage[1:] else ''} (skipped)")


def prune(run_dir: Path, keep: CheckpointConfig) -> list[str]:
    """Remove checkpoints older than the `keep` newest complete ones (0: keep all), even unfinished ones.

    Every `keep_every`-th step stays. Return a line for each failed removal."""
    complete_keys = []
    for sort_key, path in sorted(_all(run_dir), reverse=True):
        try:
            open_checkpoint(path)
        except CheckpointError:
            continue
        complete_keys.append(sort_key)
    if not complete_keys:
        return []
    failures = []
    oldest = complete_keys[-1] if not keep.keep else complete_keys[: keep.keep][-1]
    for (is_step, step), path in _all(run_dir):
        is_finished_step = is_step and not path.name.startswith(".")
        is_kept = is_finished_step and keep.keep_every and step % keep.keep_every == 0
        if (is_step, step) < oldest and not is_kept:
            try:
                # First: an interrupted removal must not look complete.
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path)
            except OSError as error:  # another process uses it
                if path.exists():
                    failures.append(f"{path}: cannot be removed: {describe_error(error)}")
    return failures


def write_state(folder: Path, state: Mapping[str, Any]) -> list[Path]:
    """Write dicts, lists, numbers and texts exactly; return the files. Raises OSError.

    Long lists of numbers go into safetensors. Other types become texts."""
    tensors: dict[str, Tensor] = {}
    tree = _split(state, tensors)
    (folder / STATE).write_text(json.dumps(tree, default=str), encoding="utf-8")
    save_file(tensors, folder / NUMBERS)
    return [folder / STATE, folder / NUMBERS]


def read_state(folder: Path) -> dict[str, Any]:
    """Read the files of `write_state`. Raises CheckpointError."""
    tree = read_json(folder / STATE)
    try:
        tensors = load_file(folder / NUMBERS)
        state: dict[str, Any] = _join(tree, tensors)
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / NUMBERS}: cannot be read: {error}") from None
    return state


def _split(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Mapping):
        parts = {key: _split(item, tensors) for key, item in value.items()}
        return {MARK: parts} if MARK in value else parts  # a user's column may have that name
    if not isinstance(value, list | tuple):
        return value
    types = set(map(type, value)) if len(value) >= LONG else set()
    if types not in ({int}, {float}):
        return [_split(item, tensors) for item in value]
    name = str(len(tensors))
    wide_dtype, narrow_dtype = (
        (torch.int64, torch.int32) if types == {int} else (torch.float64, torch.float32)
    )
    numbers = torch.from_numpy(np.array(value, int if types == {int} else float))
    narrow_numbers = numbers.to(narrow_dtype)
    tensors[name] = narrow_numbers if torch.equal(narrow_numbers.to(wide_dtype), numbers) else numbers
    return {MARK: name}


def _join(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if MARK in tree and not isinstance(tree[MARK], dict):
            return tensors[tree[MARK]].tolist()
        tree = tree.get(MARK, tree)
        return {key: _join(item, tensors) for key, item in tree.items()}
    return [_join(item, tensors) for item in tree] if isinstance(tree, list) else tree
