"""Sources of batches: engines, a finished run's files, or given pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from hashlib import sha256
from typing import Any, TypedDict

import torch

from megarl.config.schema import PRETRAINING, Config
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.data.generated import list_entry_verifiers
from megarl.data.prompt_sampler import PromptSampler
from megarl.data.prompts import (
    Prompt,
    ReadReport,
    checksum_prompts,
    read_pairs,
    read_problem_sets,
    read_prompts,
)
from megarl.parallel.comm import barrier, gather_shares_to_rank_0
from megarl.parallel.device_memory import empty_cache
from megarl.parallel.runtime import Runtime
from megarl.rewards.pool import VerifierPool
from megarl.rollout.engines.base import RolloutEngine, load_engine_class
from megarl.rollout.episode import load_prompt_options
from megarl.rollout.rank import RolloutRank
from megarl.rollout.state import RolloutShare, join_shares
from megarl.schedule.rollouts import RolloutStore, pretraining_rollouts, read_rollout, rollouts_folder
from megarl.schedule.scores import EvaluationResult
from megarl.sync.weight_sync import Failures


class BatchSource(ABC):
    """Gives the trainer batches. Every rank makes the same calls.

    reports: about data files; share: the type of `snapshot`'s value"""

    reports: Mapping[str, ReadReport]
    share: Any = dict[str, Any]
    _waited = 0.0

    @abstractmethod
    def rollout(self, stage: str, number: int) -> RolloutBatch:
        """Return a step's batch."""

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Return a copy of this rank's position: a checkpoint may read it during the next step."""

    def join(self, shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge all ranks' snapshots into JSON data. Runs on rank 0, in any thread."""
        return dict(shares[0])

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a value of `join`. Raises CheckpointError if data files have changed."""

    def close(self) -> None:  # noqa: B027 (sources of files have nothing to stop)
        """Stop engines and verifiers."""

    def evaluate(self, step: int) -> tuple[dict[str, float], Iterable[dict[str, Any]]]:
        """Answer due held-out problems; return eval/* and answers, decoded lazily."""
        raise NotImplementedError

    @property
    def depths(self) -> Mapping[str, Callable[[], int | str]]:
        return {}

    def take_waited(self) -> float:
        waited, self._waited = self._waited, 0.0
        return waited


class GenerationShare(TypedDict):
    rollout: RolloutShare


class Generation(BatchSource):
    """Samples and evaluates with this rank's engine. recover: see WeightSync."""

    share = GenerationShare

    def __init__(
        self, config: Config, runtime: Runtime, tokenizer: Any, recover: Callable[[Failures], None]
    ) -> None:
        self.config, self.runtime, self.tokenizer = config, runtime, tokenizer
        options = load_prompt_options(config, tokenizer)
        self.sets, reports = read_problem_sets(config.data, config.evaluation, tokenizer, **options)
        self.prompts, report = read_prompts(config.data.train, config.data, tokenizer, self.sets, **options)
        self.reports = {"train": report, **reports}
        self.prompt_sampler = PromptSampler(
            len(self.prompts), config.seed, config.data.shuffle, checksum_prompts(self.prompts)
        )
        reward = config.reward
        self.verifiers = VerifierPool(
            reward.verifier,
            reward.workers,
            reward.timeout,
            reward.memory,
            reward.terms,
            list_entry_verifiers(config.data),
            reward.sandbox,
        )
        self.engine = load_engine_class(config).build(config, tokenizer, runtime)
        start_engine(self.engine, runtime)
        self.rollout_rank = RolloutRank(
            config, runtime.engines, self.engine, self.verifiers, tokenizer, recover, self._take_prompts
        )
        if (judge := self.rollout_rank.worker.judge) is not None:
            judge.cache.open(config.run_dir / "judge", runtime.engines.rank)
        self.rollouts = RolloutStore(
            rollouts_folder(config), runtime.engines, "checkpoint.rollouts", "make room, or set it to false"
        )

    def _take_prompts(self, number: int) -> list[Prompt]:
        return [self.prompts[i] for i in self.prompt_sampler.take(number)]

    @property
    def depths(self) -> dict[str, Callable[[], int | str]]:
        worker = self.rollout_rank.worker
        return {
            "responses in the engine": lambda: worker.running,
            "is the oldest response": lambda: worker.oldest,
            **worker.runner.depths,
            "answers at the verifiers": lambda: self.verifiers.waiting,
        }

    @cached_property
    def pretraining_rollouts(self) -> RolloutStore:
        """Return the store; the first access is collective."""
        return pretraining_rollouts(self.config, self.prompts, self.runtime.engines)

    def rollout(self, stage: str, number: int) -> RolloutBatch:
        """Sample and grade groups until the batch is full (DAPO eq. 11)."""
        is_pretraining, events = stage == PRETRAINING, list[str]()
        if is_pretraining:
            stored_rollout, events = self.pretraining_rollouts.read(number)
            if stored_rollout is not None:
                batch, state = stored_rollout
                # Continue as if this batch had been sampled now.
                self.load_state_dict(state["samplers"])
                batch.metrics = {"rollout/reused": 1.0, **batch.metrics}
                return batch
        batch = self.rollout_rank.collect(-number if is_pretraining else number)  # separate seeds
        batch.events = events
        self._waited += self.rollout_rank.seconds["gather"]
        self.store(stage, number, batch)
        batch.metrics |= {f"inside/{part}": seconds for part, seconds in self.rollout_rank.seconds.items()}
        if is_pretraining:
            batch.metrics["rollout/reused"] = 0.0
        return batch

    def store(self, stage: str, number: int, batch: RolloutBatch) -> None:
        if stage != PRETRAINING and not self.runtime.rollout_ranks:
            if self.config.checkpoint.rollouts:
                self.rollouts.write(number, batch, {"stats": batch.metrics})
            return
        shares = gather_shares_to_rank_0(self.runtime.engines, self.snapshot(), self.share)
        state = {
            "stats": batch.metrics,
            "samplers": self.join(shares) if shares else {},
            "samples": {str(row): asdict(record) for row, record in batch.records.items()},
            "errors": batch.errors,
        }
        store = self.pretraining_rollouts if stage == PRETRAINING else self.rollouts
        store.write(number, batch, state)

    def evaluate(self, step: int) -> tuple[dict[str, float], Iterable[dict[str, Any]]]:
        due_sets = [
            problem_set for problem_set in self.sets if self.config.evaluates(step, problem_set.every)
        ]
        result = EvaluationResult(self.rollout_rank.evaluate(due_sets))
        self._waited += self.rollout_rank.seconds["gather"]
        return result.stats(), result.answers(self.tokenizer)

    def snapshot(self) -> dict[str, Any]:
        return {"prompts": self.prompt_sampler.state(), "rollout": self.rollout_rank.snapshot()}

    def join(self, shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rollout = join_shares([share["rollout"] for share in shares])
        return {"prompts": shares[0]["prompts"], "rollout": rollout}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prompt_sampler.load_state(state["prompts"])
        self.rollout_rank.load_state_dict(state["rollout"])

    def close(self) -> None:
        self.rollout_rank.close()
        self.engine.stop()
        self.verifiers.close()


def start_engine(engine: RolloutEngine, runtime: Runtime) -> None:
    """Start the engine after all ranks have freed unused device memory.

    SGLang refuses GPUs with different free shares, and sizes its KV cache by free memory."""
    empty_cache(runtime.device)
    barrier(runtime.engines)
    engine.start()


class RecordedRollouts(BatchSource):
    def __init__(self, config: Config, runtime: Runtime) -> None:
        self.folder, self.runtime, self.reports = rollouts_folder(config), runtime, {}

    def rollout(self, stage: str, number: int) -> RolloutBatch:
        return read_rollout(self.folder, number, self.runtime)[0]

    def snapshot(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state: rollouts are read by step."""


class SupervisedPairs(BatchSource):
    """Given pairs of prompt and response, the same on every rank."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        report, key = ReadReport(), config.supervised.response_key
        self.reports, self.batch = {"train": report}, config.supervised.batch
        self.pairs = read_pairs(config.data.train, config.data, key, tokenizer, report)
        checksum = sha256(repr(self.pairs).encode()).hexdigest()
        self.sampler = PromptSampler(len(self.pairs), config.seed, config.data.shuffle, checksum)

    def rollout(self, stage: str, number: int) -> RolloutBatch:
        chosen_pairs = [self.pairs[i] for i in self.sampler.take(self.batch)]
        columns = [prompt for prompt, _ in chosen_pairs], [response for _, response in chosen_pairs]
        batch = RolloutBatch.from_train_batch(TrainBatch.build(*columns))
        batch["correct"] = torch.ones(len(chosen_pairs), dtype=torch.bool)
        batch["truncated"] = torch.zeros(len(chosen_pairs), dtype=torch.bool)
        return batch

    def snapshot(self) -> dict[str, Any]:
        return {"pairs": self.sampler.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state(state["pairs"])
