"""Value-pretraining rollouts on disk: those of a frozen policy depend on no critic, so that another one is fitted to the same
without sampling them again (VAPO section 4.1)."""

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
# Keys, and sections, that decide what the frozen policy samples and how it is judged: nothing of the critic, and not how many rollouts.
DECIDING = (
    *("seed", "data.shuffle", "model.dtype", "rollout.engine", "rollout.weights_dtype", "rollout.prompts", "rollout.group_size"),
    *("rollout.max_response_tokens", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.stop"),
    *("rollout.dynamic_sampling", "rollout.continue_partial"),
    *("reward.verifier", "reward.correct", "reward.incorrect", "reward.timeout"),
    *("reward.overlong.soft_punishment", "reward.overlong.buffer"),
)
MODEL_FILES = (".json", ".safetensors", ".distcp", ".model", ".jinja")  # what weights and tokenizer are made of


class KeptRollouts:
    """One file per rollout of the frozen policy. All ranks call the methods alike; rank 0 writes, and what one rank cannot read is
    used by none."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], runtime: Runtime) -> None:
        self.runtime, self.folder = runtime, kept_folder(config)
        made_from = settings(config) | hashes(config.model.path, prompts) if runtime.rank == 0 else None
        self.made_from: dict[str, Any] = from_rank_0(runtime, made_from)

    def path(self, number: int) -> Path:
        """The file of rollout `number`, from 1."""
        return self.folder / NAME.format(number)

    def read(self, number: int) -> tuple[tuple[Experience, dict[str, Any]] | None, list[str]]:
        """((experience, state), no line); or None where there is no such file, with a line where it is damaged.

        Raises ConfigError, on every rank, where it was made with another policy, other prompts or other settings."""
        found, problem = None, ""
        other: ConfigError | None = None
        try:
            if self.path(number).exists():
                check_made_from(self.path(number), self.made_from)
                found = read_experience(self.path(number))
        except ConfigError as error:
            other = error
        except DataError as error:
            problem = f"{error}; it is sampled again"
        reports = gather_objects(self.runtime, (found is not None, problem, other))
        for _, _, refused in reports:
            if refused is not None:
                raise refused
        everywhere = all(whole for whole, _, _ in reports)
        return found if everywhere else None, list(dict.fromkeys(line for _, line, _ in reports if line))

    def write(self, number: int, experience: Experience, state: Mapping[str, Any]) -> None:
        """Keeps rollout `number` and the state of the samplers after it. ConfigError, on every rank, where there is no room."""
        failure = None
        if self.runtime.rank == 0:
            try:
                write_experience(self.path(number), experience, state, self.made_from)
            except OSError as error:
                failure = f"{KEY}: {self.path(number)}: cannot be written: {error} (choose another folder)"
        failure = from_rank_0(self.runtime, failure)
        if failure is not None:
            raise ConfigError(failure)


def check_kept(config: Config) -> None:
    """What can be said of the first kept rollout before a rank is started: errors as `check_made_from`, but for the policy and the
    prompts. A damaged one is no error: it is sampled again."""
    path = kept_folder(config) / NAME.format(1)
    if config.has_critic and config.value_pretraining.steps and path.exists():
        with suppress(DataError):
            check_made_from(path, settings(config))


def kept_folder(config: Config) -> Path:
    """Where the rollouts of a run are."""
    return config.value_pretraining.rollouts or config.run_dir / "value_pretraining"


def check_made_from(path: Path, now: Mapping[str, Any]) -> None:
    """Raises ConfigError naming the first thing in `now` that the file was made with another value of, DataError if it is damaged.

    Keys that only one of the two knows (another version of megarl) are not compared."""
    then = read_made_from(path)
    for key, value in now.items():
        if key in then and then[key] != value:
            hashed = key.endswith("(sha256)")
            what = f"other {key.removesuffix(' (sha256)')}" if hashed else f"{key} {then[key]!r}, this run has {value!r}"
            raise ConfigError(f"{KEY}: {path}: was sampled with {what} (set it back, or choose another folder)")


def settings(config: Config) -> dict[str, Any]:
    """The DECIDING keys and their values."""
    return {key: value for key, value in settings_of(config).items() if any(f"{key}.".startswith(f"{name}.") for name in DECIDING)}


def hashes(model: Path, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Of the model's files and of the prompts as they enter the model. Reads all of the weights once, several files at a time."""
    files = sorted(path for path in model.iterdir() if path.suffix in MODEL_FILES)
    with ThreadPoolExecutor() as pool:
        digests = zip(files, pool.map(_digest, files), strict=True)
        weights = hashlib.sha256(repr([(path.name, digest) for path, digest in digests]).encode())
    data = hashlib.sha256()
    for prompt in prompts:
        data.update(repr((prompt.uid, prompt.tokens, prompt.answer)).encode())
    return {"model.path (sha256)": weights.hexdigest(), "data.train (sha256)": data.hexdigest()}


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
