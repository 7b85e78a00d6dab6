"""Rollouts on disk, for replay, value pretraining (VAPO section 4.1) and separate rollout ranks.

A rollout is a folder with a safetensors file per rank, and a manifest, written last. Any
layout can read it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.config.errors import ConfigError, DataError
from megarl.config.files import describe_error, fsync, write_atomic
from megarl.config.schema import Config
from megarl.data.batch import RolloutBatch, TrainBatch, join, read_batch, write_batch
from megarl.data.prompts import Prompt, checksum_prompts
from megarl.observe.run_log import SampleRecord
from megarl.parallel.comm import broadcast_from_rank_0, gather_objects, gather_to_rank_0, run_on_rank_0
from megarl.parallel.runtime import Ranks
from megarl.training.checkpoint import ADDED, hash_file, list_fixed_settings

KEY = "value_pretraining.rollouts"
FOLDER = "step-{:06d}"
MANIFEST = "manifest.json"
# Columns [T] of a file; all others are [n].
TOKEN_COLUMNS = ("engine_logprobs", "token_versions", "turn_rewards", "routing", "sampling_sets")
SAMPLING_KEYS = (
    *("seed", "data.shuffle", "model.dtype", "rollout.engine", "rollout.weights_dtype", "rollout.prompts"),
    "rollout.engine_options",
    *("rollout.group_size", "rollout.max_response_tokens", "rollout.temperature", "rollout.top_p"),
    *("rollout.top_k", "rollout.stop", "rollout.dynamic_sampling", "rollout.continue_partial"),
    *("rollout.episode", "rollout.tools", "rollout.environment", "rollout.environment_arguments"),
    *("rollout.agent", "rollout.turns"),
    *("reward.verifier", "reward.correct", "reward.incorrect", "reward.timeout", "reward.weight"),
    "reward.terms",
    "reward.judge",
    *("reward.overlong.soft_punishment", "reward.overlong.buffer"),
)
# A rank's columns [n], and an empty batch with the types of columns [T].
ReadRows = tuple[dict[str, Tensor], TrainBatch]
MODEL_FILES = (".json", ".safetensors", ".distcp", ".model", ".jinja")


class RolloutStore:
    """A folder of rollouts. Methods are collective, and raise the same errors on all ranks.

    key, remedy  for messages
    made_from    settings, which must be equal to read a rollout"""

    def __init__(
        self, folder: Path, ranks: Ranks, key: str, remedy: str, made_from: Mapping[str, Any] | None = None
    ) -> None:
        self.folder, self.ranks, self.key, self.remedy = folder, ranks, key, remedy
        self.made_from = made_from or {}

    def read(self, number: int) -> tuple[tuple[RolloutBatch, dict[str, Any]] | None, list[str]]:
        """Return ((batch, state), []), or (None, lines about a damaged rollout)."""
        if not broadcast_from_rank_0(self.ranks, manifest_path(self.folder, number).exists(), bool):
            return None, []
        try:
            return read_rollout(self.folder, number, self.ranks, self.made_from), []
        except DataError as error:
            return None, [f"{error}; it is sampled again"]

    def write(self, number: int, batch: RolloutBatch, state: Mapping[str, Any]) -> None:
        """Write a rollout. state: JSON, rank 0's counts. Raises ConfigError."""
        folder, rank = self.folder / FOLDER.format(number), self.ranks.rank
        file_name, sha256 = f"rank-{rank:05d}.safetensors", ""

        @contextmanager
        def writing(path: Path) -> Iterator[None]:
            failure = None
            try:
                yield
            except OSError as error:
                failure = f"{path}: cannot be written: {describe_error(error)}"
            failures = gather_objects(self.ranks, failure, str | None)
            if any(failures):
                raise ConfigError(f"{self.key}: {next(filter(None, failures))} ({self.remedy})")

        with writing(folder):
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True, mode=0o700)
        with writing(folder / file_name):
            if len(batch.rows):
                columns = {name: column[batch.rows] for name, column in batch.columns.items()}
                columns |= {"row": batch.rows, "prompt_length": batch.prompt_lengths[batch.rows]}
                local_batch = replace(batch.local, columns=batch.local.columns | columns)
                sha256 = write_batch(folder / file_name, local_batch)
        file_digests = gather_to_rank_0(self.ranks, (file_name, sha256), tuple[str, str])
        with writing(folder / MANIFEST):
            if file_digests is not None:
                files = {name: digest for name, digest in file_digests if digest}
                content = {"made_from": self.made_from, "files": files, "state": state}
                text = json.dumps(content, default=str)  # a prompt's columns may have any type
                digest = hashlib.sha256(text.encode()).hexdigest()
                write_atomic(folder / MANIFEST, f"{digest}\n{text}\n")
                fsync(folder)


def manifest_path(folder: Path, number: int) -> Path:
    return folder / FOLDER.format(number) / MANIFEST


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        digest, text = path.read_text(encoding="utf-8").splitlines()
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise DataError(f"{path}: is damaged (its checksum differs)")
        content = dict(json.loads(text))
        if not all(Path(name).name == name for name in dict(content.get("files", {}))):
            raise DataError(f"{path}: names a file outside its folder")
        return content
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: is damaged ({error})") from None


def read_rollout(
    folder: Path, number: int, ranks: Ranks, made_from: Mapping[str, Any] | None = None
) -> tuple[RolloutBatch, dict[str, Any]]:
    """Return a rollout's batch and state. Each rank gets the tokens of the files it reads.

    Raises on every rank: DataError for damage, ConfigError for another `made_from`."""
    path = manifest_path(folder, number)

    def read() -> str:
        manifest = read_manifest(path)
        check_made_from(path, manifest["made_from"], made_from or {})
        return json.dumps(manifest)  # as text: a prompt's integers may have any size

    manifest = json.loads(run_on_rank_0(ranks, read, str))
    names, problem, local, row_columns = [*manifest["files"]][ranks.rank :: ranks.world], None, None, None
    try:
        local, row_columns = _read_files({path.parent / name: manifest["files"][name] for name in names})
    except DataError as error:
        problem = error
    rows = None if local is None or row_columns is None else (row_columns, local.select([]))
    result_type = tuple[DataError | None, ReadRows | None]
    problems, rows_by_rank = zip(*gather_objects(ranks, (problem, rows), result_type), strict=True)
    if problem := next(filter(None, problems), None):
        raise problem
    batch, state = _merge_rows(rows_by_rank, local, ranks.rank), manifest["state"]
    batch.metrics = dict(state["stats"])
    batch.records = {int(row): SampleRecord(**record) for row, record in state.get("samples", {}).items()}
    return batch, state


def _read_files(files: Mapping[Path, str]) -> tuple[TrainBatch | None, dict[str, Tensor] | None]:
    """Return the sequences of files in order of rows, and their columns [n]; None without files.

    files: path -> checksum. Raises DataError."""
    if not files:
        return None, None
    batch = join([read_batch(path, digest) for path, digest in files.items()])
    batch = batch.select(batch["row"].argsort())
    row_names = [name for name in batch.columns if name not in TOKEN_COLUMNS]
    columns = {name: batch.columns.pop(name) for name in row_names}
    columns.setdefault("prompt_length", batch.prompt_lengths)  # missing in old files
    if "begun" in columns:
        columns["prefix_tokens"] = columns.pop("begun")  # its name before 0.3
    return batch, columns | {"length": batch.lengths, "response_length": batch.response_lengths}


def _merge_rows(
    rows_by_rank: Sequence[ReadRows | None], local: TrainBatch | None, this_rank: int
) -> RolloutBatch:
    """Return the batch of all ranks' rows. local: this rank's sequences; None: it has read none"""
    columns_by_owner = {rank: rows[0] for rank, rows in enumerate(rows_by_rank) if rows is not None}
    owners = [torch.full_like(columns["row"], rank) for rank, columns in columns_by_owner.items()]
    order = torch.cat([columns["row"] for columns in columns_by_owner.values()]).argsort()
    merged = {
        name: torch.cat([columns[name] for columns in columns_by_owner.values()])[order]
        for name in next(iter(columns_by_owner.values()))
    }
    rows = merged.pop("row")
    return RolloutBatch(
        lengths=merged.pop("length"),
        response_lengths=merged.pop("response_length"),
        prompt_lengths=merged.pop("prompt_length"),
        owners=torch.cat(owners)[order],
        columns=merged,
        rows=rows[:0] if local is None else columns_by_owner[this_rank]["row"],
        local=local if local is not None else next(rows[1] for rows in rows_by_rank if rows is not None),
    )


def list_rollout_files(manifest: Path) -> list[Path]:
    files = [manifest.parent / name for name in read_manifest(manifest)["files"]]
    for path in files:
        if not path.exists():
            raise DataError(f"{path}: no such file, but {manifest} lists it")
    return [*files, manifest]


def pretraining_rollouts(config: Config, prompts: Sequence[Prompt], ranks: Ranks) -> RolloutStore:
    """Return the store of value pretraining; collective."""
    made_from: dict[str, Any] = {}
    if ranks.rank == 0:
        files = sorted(path for path in config.model.path.iterdir() if path.suffix in MODEL_FILES)
        with ThreadPoolExecutor() as pool:
            digests = [
                (path.name, digest) for path, digest in zip(files, pool.map(hash_file, files), strict=True)
            ]
        made_from = sampling_settings(config) | {
            "model.path (sha256)": hashlib.sha256(repr(digests).encode()).hexdigest(),
            "data.train (sha256)": checksum_prompts(prompts),
        }
    made_from = json.loads(broadcast_from_rank_0(ranks, json.dumps(made_from, default=str), str))
    return RolloutStore(pretraining_folder(config), ranks, KEY, "choose another folder", made_from)


def check_pretraining_rollouts(config: Config) -> None:
    """Check the first rollout's settings, without model and prompts."""
    path = manifest_path(pretraining_folder(config), 1)
    if config.has_critic and config.value_pretraining.steps and path.exists():
        with suppress(DataError):
            check_made_from(path, read_manifest(path)["made_from"], sampling_settings(config))


def check_made_from(path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first setting that differs.

    Keys of one side only, from another version, are ignored, except ADDED."""
    then = ADDED | dict(then)
    for key, value in now.items():
        if key in then and then[key] != value:
            what = f"{key} {then[key]!r}, this run has {value!r}"
            if key.endswith("(sha256)"):
                what = f"other {key.removesuffix(' (sha256)')}"
            raise ConfigError(
                f"{KEY}: {path}: was sampled with {what} (set it back, or choose another folder)"
            )


def rollouts_folder(config: Config) -> Path:
    return config.run_dir / "rollouts"


def pretraining_folder(config: Config) -> Path:
    return config.value_pretraining.rollouts or config.run_dir / "value_pretraining"


def sampling_settings(config: Config) -> dict[str, Any]:
    settings = list_fixed_settings(config).items()
    return {key: v for key, v in settings if any(f"{key}.".startswith(f"{name}.") for name in SAMPLING_KEYS)}
