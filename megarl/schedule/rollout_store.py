"""Rollouts on disk, one safetensors file each: those of every step, for `megarl replay` (checkpoint.rollouts), and those of
value pretraining, whose policy stands still, so that another critic can be fitted to the same ones (VAPO section 4.1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError, DataError
from megarl.config.schema import Config
from megarl.data.experience import Experience, read_experience, read_made_from, write_experience
from megarl.data.prompts import Prompt
from megarl.parallel.comm import from_rank_0, gather_objects
from megarl.parallel.runtime import Runtime
from megarl.training.checkpoint import settings_of

KEY = "value_pretraining.rollouts"
NAME = "step-{:06d}.safetensors"
# Keys, and sections, on which the frozen policy's samples and their rewards depend: nothing of the critic, and not the
# number of rollouts.
DECIDING = (
    *("seed", "data.shuffle", "model.dtype", "rollout.engine", "rollout.weights_dtype", "rollout.prompts"),
    *(
        "rollout.group_size",
        "rollout.max_response_tokens",
        "rollout.temperature",
        "rollout.top_p",
        "rollout.top_k",
    ),
    *("rollout.stop", "rollout.dynamic_sampling", "rollout.continue_partial"),
    *("reward.verifier", "reward.correct", "reward.incorrect", "reward.timeout"),
    *("reward.overlong.soft_punishment", "reward.overlong.buffer"),
)
MODEL_FILES = (
    ".json",
    ".safetensors",
    ".distcp",
    ".model",
    ".jinja",
)  # what weights and tokenizer are made of


class RolloutStore:
    """A folder of rollouts. All ranks call the methods alike: rank 0 writes; a file that one rank cannot read is used by
    none.

    key, remedy  the config key, and what helps where there is no room, for messages
    made_from    settings that are stored with each file, and that a file must have been made with to be read
    """

    def __init__(
        self, folder: Path, runtime: Runtime, key: str, remedy: str, made_from: Mapping[str, Any]
    ) -> None:
        self.folder, self.runtime, self.key, self.remedy = folder, runtime, key, remedy
        self.made_from = made_from

    def read(self, number: int) -> tuple[tuple[Experience, dict[str, Any]] | None, list[str]]:
        """Return ((experience, state), []); or (None, lines) where there is no file, or a damaged one, which a line names.

        Raises ConfigError on every rank where the file was made with other settings."""
        path, found, problem = self.folder / NAME.format(number), None, ""
        refused: ConfigError | None = None
        try:
            if path.exists():
                check_made_from(path, self.made_from)
                found = read_experience(path)
        except ConfigError as error:
            refused = error
        except DataError as error:
            problem = f"{error}; it is sampled again"
        reports = gather_objects(self.runtime, (found is not None, problem, refused))
        for _, _, theirs in reports:
            if theirs is not None:
                raise theirs
        everywhere = all(whole for whole, _, _ in reports)
        return found if everywhere else None, list(dict.fromkeys(line for _, line, _ in reports if line))

    def write(self, number: int, experience: Experience, state: Mapping[str, Any]) -> None:
        """Write rollout `number` with `state`, which must hold JSON. Raises ConfigError on every rank where it cannot be
        written."""
        path, failure = self.folder / NAME.format(number), None
        if self.runtime.rank == 0:
            try:
                write_experience(path, experience, state, self.made_from)
            except OSError as error:
                failure = f"{self.key}: {path}: cannot be written: {error} ({self.remedy})"
        failure = from_rank_0(self.runtime, failure)
        if failure is not None:
            raise ConfigError(failure)


def step_rollouts(config: Config, runtime: Runtime) -> RolloutStore:
    """Return the store of the main stage's rollouts, run_dir/rollouts."""
    remedy = "make room, or set it to false"
    return RolloutStore(config.run_dir / "rollouts", runtime, "checkpoint.rollouts", remedy, {})


def read_step_rollout(run_dir: Path, number: int) -> tuple[Experience, dict[str, Any]]:
    """Return the batch and the statistics of a step's rollout. DataError where the file is missing or damaged."""
    batch, state = read_experience(run_dir / "rollouts" / NAME.format(number))
    return batch, state["stats"]


def pretraining_rollouts(config: Config, prompts: Sequence[Prompt], runtime: Runtime) -> RolloutStore:
    """Return the store of value pretraining's rollouts; every rank calls this. Reads all of the model's files once."""
    made_from = _deciding(config) | _hashes(config.model.path, prompts) if runtime.rank == 0 else None
    made_from = from_rank_0(runtime, made_from)
    assert made_from is not None
    return RolloutStore(_folder(config), runtime, KEY, "choose another folder", made_from)


def check_pretraining_rollouts(config: Config) -> None:
    """Check, before a rank is started, that the first stored rollout was made with this configuration. The model's files
    and the prompts are compared later. A damaged file is no error: it is sampled again."""
    path = _folder(config) / NAME.format(1)
    if config.has_critic and config.value_pretraining.steps and path.exists():
        with suppress(DataError):
            check_made_from(path, _deciding(config))


def check_made_from(path: Path, now: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first setting in `now` that the file was made with another value of, DataError where the
    file is damaged. Keys that only one of the two has (from another version of megarl) are not compared."""
    then = read_made_from(path)
    for key, value in now.items():
        if key in then and then[key] != value:
            hashed = key.endswith("(sha256)")
            what = (
                f"other {key.removesuffix(' (sha256)')}"
                if hashed
                else f"{key} {then[key]!r}, this run has {value!r}"
            )
            raise ConfigError(
                f"{KEY}: {path}: was sampled with {what} (set it back, or choose another folder)"
            )


def _folder(config: Config) -> Path:
    return config.value_pretraining.rollouts or config.run_dir / "value_pretraining"


def _deciding(config: Config) -> dict[str, Any]:
    settings = settings_of(config)
    return {
        key: v for key, v in settings.items() if any(f"{key}.".startswith(f"{name}.") for name in DECIDING)
    }


def _hashes(model: Path, prompts: Sequence[Prompt]) -> dict[str, str]:
    """Hash the model's files, several at a time, and the prompts as they enter the model."""

    def digest(path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    files = sorted(path for path in model.iterdir() if path.suffix in MODEL_FILES)
    with ThreadPoolExecutor() as pool:
        digests = [(path.name, text) for path, text in zip(files, pool.map(digest, files), strict=True)]
    data = hashlib.sha256()
    for prompt in prompts:
        data.update(repr((prompt.uid, prompt.tokens, prompt.answer)).encode())
    weights = hashlib.sha256(repr(digests).encode()).hexdigest()
    return {"model.path (sha256)": weights, "data.train (sha256)": data.hexdigest()}
