"""What outlives a step of its rollout. Whole batches on disk, a safetensors file each: those of every step,
for `megarl replay` (checkpoint.rollouts), and those of value pretraining, whose policy stands still, so that
another critic can be fitted to the same ones (VAPO section 4.1). And a few responses for people, with each
token's advantage and value.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megarl.config.errors import ConfigError, DataError
from megarl.config.schema import Config
from megarl.data.experience import Experience, read_experience, read_made_from, write_experience
from megarl.data.prompts import Prompt
from megarl.observe.run_log import Sample
from megarl.parallel.comm import from_rank_0, gather_objects, gather_on_0
from megarl.parallel.runtime import Ranks, Runtime
from megarl.training.checkpoint import settings_of, sha256_of

KEY = "value_pretraining.rollouts"
NAME = "step-{:06d}.safetensors"
# Keys, and sections, on which the frozen policy's samples and their rewards depend: nothing of the critic,
# and not the number of rollouts.
DECIDING = (
    *("seed", "data.shuffle", "model.dtype", "rollout.engine", "rollout.weights_dtype", "rollout.prompts"),
    *("rollout.group_size", "rollout.max_response_tokens", "rollout.temperature", "rollout.top_p"),
    *("rollout.top_k", "rollout.stop", "rollout.dynamic_sampling", "rollout.continue_partial"),
    *("reward.verifier", "reward.correct", "reward.incorrect", "reward.timeout", "reward.weight"),
    "reward.terms",
    *("reward.overlong.soft_punishment", "reward.overlong.buffer"),
)
MODEL_FILES = (".json", ".safetensors", ".distcp", ".model", ".jinja")  # of weights and tokenizer

STEPS_WITH_TOKENS = 100  # about so many steps of a run: samples.jsonl stays small however long it is
TOKENS_SHOWN = 512  # of a response: its first and its last half of them
DIGITS = 4  # significant ones of a token's numbers
WHOLE_CHARACTER = 4  # a character's UTF-8 has at most so many bytes, and so many tokens


class RolloutStore:
    """A folder of rollouts. The ranks call the methods alike: their first writes; a file that one of them
    cannot read is used by none.

    key, remedy  the config key, and what helps where there is no room, for messages
    made_from    settings that are stored with each file, and that a file must have been made with to be read
    """

    def __init__(
        self, folder: Path, ranks: Ranks, key: str, remedy: str, made_from: Mapping[str, Any] | None = None
    ) -> None:
        self.folder, self.ranks, self.key, self.remedy = folder, ranks, key, remedy
        self.made_from = made_from or {}

    def read(self, number: int) -> tuple[tuple[Experience, dict[str, Any]] | None, list[str]]:
        """Return ((experience, state), []); or (None, lines) where there is no file, or a damaged one, which
        a line names.

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
        reports = gather_objects(self.ranks, (found is not None, problem, refused))
        for _, _, theirs in reports:
            if theirs is not None:
                raise theirs
        everywhere = all(whole for whole, _, _ in reports)
        return found if everywhere else None, list(dict.fromkeys(line for _, line, _ in reports if line))

    def write(self, number: int, experience: Experience, state: Mapping[str, Any]) -> None:
        """Write a rollout with `state` (JSON). Raises ConfigError on every rank where it cannot be
        written."""
        path, failure = self.folder / NAME.format(number), None
        if self.ranks.rank == 0:
            try:
                write_experience(path, experience, state, self.made_from)
            except OSError as error:
                failure = f"{self.key}: {path}: cannot be written: {error} ({self.remedy})"
        failure = from_rank_0(self.ranks, failure)
        if failure is not None:
            raise ConfigError(failure)


def read_step_rollout(run_dir: Path, number: int) -> tuple[Experience, dict[str, Any]]:
    """Return batch and statistics of a step's rollout. Raises DataError if the file is missing or damaged."""
    batch, state = read_experience(run_dir / "rollouts" / NAME.format(number))
    return batch, state["stats"]


def pretraining_rollouts(config: Config, prompts: Sequence[Prompt], ranks: Ranks) -> RolloutStore:
    """Return the store of value pretraining's rollouts, made from the settings that decide them, the model's
    files and the prompts. Every rank calls this; rank 0 reads all of the model's files."""
    made_from: dict[str, Any] = {}
    if ranks.rank == 0:
        files = sorted(path for path in config.model.path.iterdir() if path.suffix in MODEL_FILES)
        with ThreadPoolExecutor() as pool:
            digests = [
                (path.name, text) for path, text in zip(files, pool.map(sha256_of, files), strict=True)
            ]
        data = hashlib.sha256()
        for prompt in prompts:
            data.update(repr((prompt.uid, prompt.tokens, prompt.answer)).encode())
        made_from = _deciding(config) | {
            "model.path (sha256)": hashlib.sha256(repr(digests).encode()).hexdigest(),
            "data.train (sha256)": data.hexdigest(),
        }
    made_from = from_rank_0(ranks, made_from)
    return RolloutStore(pretraining_folder(config), ranks, KEY, "choose another folder", made_from)


def check_pretraining_rollouts(config: Config) -> None:
    """Check, before a rank is started, that the first stored rollout was made with this configuration. The
    model's files and the prompts are compared later. A damaged file is no error: it is sampled again."""
    path = pretraining_folder(config) / NAME.format(1)
    if config.has_critic and config.value_pretraining.steps and path.exists():
        with suppress(DataError):
            check_made_from(path, _deciding(config))


def check_made_from(path: Path, now: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first setting in `now` that the file was made with another value of,
    DataError where the file is damaged. Keys that only one of the two has (from another version of megarl)
    are not compared."""
    then = read_made_from(path)
    for key, value in now.items():
        if key in then and then[key] != value:
            what = f"{key} {then[key]!r}, this run has {value!r}"
            if key.endswith("(sha256)"):
                what = f"other {key.removesuffix(' (sha256)')}"
            raise ConfigError(
                f"{KEY}: {path}: was sampled with {what} (set it back, or choose another folder)"
            )


def rollouts_folder(config: Config) -> Path:
    """Return where the rollouts of the main stage's steps are."""
    return config.run_dir / "rollouts"


def pretraining_folder(config: Config) -> Path:
    """Return where the rollouts of value pretraining are."""
    return config.value_pretraining.rollouts or config.run_dir / "value_pretraining"


def _deciding(config: Config) -> dict[str, Any]:
    settings = settings_of(config).items()
    return {key: v for key, v in settings if any(f"{key}.".startswith(f"{name}.") for name in DECIDING)}


def has_tokens(number: int, steps: int) -> bool:
    """Return whether the samples of step `number` of `steps` get their tokens."""
    return number % -(-steps // STEPS_WITH_TOKENS) == 0 or number in (1, steps)


def with_tokens(
    samples: Mapping[int, Sample], batch: Experience, local: Experience, tokenizer: Any, runtime: Runtime
) -> list[Sample]:
    """Return a step's samples, by their row of `batch`, with their tokens, advantages and values. Every rank
    calls this with its replica's share of the batch, `local`; rank 0 gets them complete."""
    parts = gather_on_0(runtime, token_worth(local, batch, samples) if runtime.is_replica_leader else {})
    if parts is None:
        return list(samples.values())
    found = {row: columns for part in parts for row, columns in part.items()}
    complete = []
    for row, sample in samples.items():
        ids = batch.tokens[response_indices(batch, row)].tolist()
        worth = {name: column.tolist() for name, column in found.get(row, {}).items()}
        if advantages := worth.get("advantages"):
            mean = math.fsum(advantages) / len(advantages)
            sample = replace(
                sample, advantage_mean=mean, advantage_min=min(advantages), advantage_max=max(advantages)
            )
        half, left_out = TOKENS_SHOWN // 2, len(ids) - TOKENS_SHOWN
        shown: dict[str, Any]
        if left_out <= 0:
            texts = token_texts(tokenizer, ids)
            shown = {name: _rounded(column) for name, column in worth.items()}
        else:
            gap = f"\n[... {left_out} tokens left out ...]\n"
            texts = [*token_texts(tokenizer, ids[:half]), gap, *token_texts(tokenizer, ids[-half:])]
            shown = {name: [*_rounded(c[:half]), None, *_rounded(c[-half:])] for name, c in worth.items()}
        complete.append(replace(sample, tokens=texts, **shown))
    return complete


def _rounded(column: list[float]) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in column]


def token_worth(local: Experience, batch: Experience, rows: Iterable[int]) -> dict[int, dict[str, Tensor]]:
    """Return row of `batch` -> {"advantages", "values"}, float32 [response tokens], for the rows and columns
    that are in `local`, a replica's share."""
    places = list(zip(local["group_ids"].tolist(), local["response_index"].tolist(), strict=True))
    names = [name for name in ("advantages", "values") if name in local]
    found = {}
    for row in rows:
        place = (int(batch["group_ids"][row]), int(batch["response_index"][row]))
        if place in places:
            tokens = response_indices(local, places.index(place))
            found[row] = {name: local[name][tokens].float() for name in names}
    return found


def response_indices(experience: Experience, row: int) -> Tensor:
    """Return the indices of a response's tokens, int64."""
    start, end = experience.cu_seqlens[row : row + 2].tolist()
    return start + experience.response_mask[start:end].nonzero().squeeze(-1)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. A character that several tokens make up stands at the first of them."""
    texts: list[str] = tokenizer.batch_decode([[token] for token in ids], skip_special_tokens=False)
    at = 0
    while at < len(texts):
        if "\ufffd" in texts[at]:
            for end in range(at + 2, min(at + WHOLE_CHARACTER, len(ids)) + 1):
                whole = tokenizer.decode(list(ids[at:end]), skip_special_tokens=False)
                if "\ufffd" not in whole:
                    texts[at:end] = [whole] + [""] * (end - at - 1)
                    at = end - 1
                    break
        at += 1
    return texts
