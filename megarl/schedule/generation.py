"""What draws responses on a rank with an engine, and brings weights to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from transformers import AutoTokenizer

from megarl.config.schema import PRETRAINING, Config
from megarl.data.batch import RolloutBatch
from megarl.data.generated import own_verifiers
from megarl.data.prompts import Prompt, PromptSampler, content_of, read_problem_sets, read_prompts
from megarl.observe.run_log import SampleRecord
from megarl.parallel.comm import barrier, shares_on_0
from megarl.parallel.device_memory import empty_cache
from megarl.parallel.runtime import Runtime
from megarl.rewards.pool import VerifierPool
from megarl.rollout.engines.base import RolloutEngine, load_engine_class
from megarl.rollout.episode import load_prompt_options
from megarl.rollout.rank import RolloutRank
from megarl.rollout.state import RolloutShare, join_shares
from megarl.schedule.rollouts import RolloutStore, pretraining_rollouts, rollouts_folder
from megarl.schedule.scores import EvaluationResult
from megarl.schedule.source import BatchSource
from megarl.sync.weight_sync import Failures


def load_tokenizer(folder: Path) -> Any:
    """Load the model's tokenizer."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def start_engine(engine: RolloutEngine, runtime: Runtime) -> None:
    """Start the engine once all ranks have given back what they do not use of the device: SGLang refuses GPUs
    of which unlike shares are free, and makes its KV cache as large as what is free."""
    empty_cache(runtime.device)
    barrier(runtime.engines)
    engine.start()


class GenerationShare(TypedDict):
    """What a rank other than the first adds to a snapshot."""

    rollout: RolloutShare


class Generation(BatchSource):
    """Draws a step's responses with the engines' present weights, and evaluates. Every rank with an engine
    has one and calls it alike.

    recover  restarts engines that have failed, see WeightSync
    reports  what was read of the data files
    sets     of problems for evaluation"""

    share = GenerationShare

    def __init__(
        self, config: Config, runtime: Runtime, tokenizer: Any, recover: Callable[[Failures], None]
    ) -> None:
        self.config, self.runtime, self.tokenizer = config, runtime, tokenizer
        self._waited = 0.0
        shown = load_prompt_options(config, tokenizer)
        self.sets, reports = read_problem_sets(config.data, config.evaluation, tokenizer, **shown)
        self.prompts, report = read_prompts(config.data.train, config.data, tokenizer, self.sets, **shown)
        self.reports = {"train": report, **reports}
        self.prompt_sampler = PromptSampler(
            len(self.prompts), config.seed, config.data.shuffle, content_of(self.prompts)
        )
        reward = config.reward
        self.verifiers = VerifierPool(
            reward.verifier,
            reward.workers,
            reward.timeout,
            reward.memory,
            reward.terms,
            own_verifiers(config.data),
            reward.sandbox,
        )
        self.engine = load_engine_class(config).build(config, tokenizer, runtime)
        start_engine(self.engine, runtime)
        self.rollout_rank = RolloutRank(
            config, runtime.engines, self.engine, self.verifiers, tokenizer, recover, self._draw
        )
        # Every step's rollout on disk.
        self.rollouts = RolloutStore(
            rollouts_folder(config), runtime.engines, "checkpoint.rollouts", "make room, or set it to false"
        )

    def _draw(self, number: int) -> list[Prompt]:
        return [self.prompts[i] for i in self.prompt_sampler.take(number)]

    @property
    def depths(self) -> dict[str, Callable[[], int | str]]:
        """Return what may wait here, for reports about a hang."""
        worker = self.rollout_rank.worker
        return {
            "responses in the engine": lambda: worker.running,
            "is what was begun first": lambda: worker.oldest,
            **worker.runner.depths,
            "answers at the verifiers": lambda: self.verifiers.waiting,
        }

    @cached_property
    def pretraining_rollouts(self) -> RolloutStore:
        """Return value pretraining's rollouts on disk. The first access is collective."""
        return pretraining_rollouts(self.config, self.prompts, self.runtime.engines)

    def rollout(self, stage: str, number: int) -> RolloutBatch:
        """Sample groups of responses, verify them, and go on until the batch of effective prompts is full
        (DAPO eq. 11).

        Value pretraining, where the policy stands still, keeps its rollouts on disk and reads them the next
        time."""
        pretraining, events = stage == PRETRAINING, list[str]()
        if pretraining:
            stored, events = self.pretraining_rollouts.read(number)
            if stored is not None:
                return self._reuse(*stored, events)
        batch = self.rollout_rank.collect(-number if pretraining else number)  # separate seeds
        batch.events = events
        self._waited += self.rollout_rank.seconds["gather"]
        self._store(stage, number, batch)
        batch.metrics |= {f"inside/{part}": seconds for part, seconds in self.rollout_rank.seconds.items()}
        if pretraining:
            batch.metrics["rollout/reused"] = 0.0
        return batch

    def _reuse(self, batch: RolloutBatch, state: Mapping[str, Any], events: list[str]) -> RolloutBatch:
        """Return a stored rollout as if it had been sampled now: the next samples do not change."""
        self.load_state_dict(state["samplers"])
        batch.records = {int(row): SampleRecord(**record) for row, record in state.get("samples", {}).items()}
        batch.metrics, batch.events = {"rollout/reused": 1.0, **state["stats"]}, events
        return batch

    def _store(self, stage: str, number: int, batch: RolloutBatch) -> None:
        """Write a rollout to disk: in value pretraining, for trainers on other ranks, or if configured."""
        if stage != PRETRAINING and not self.runtime.rollout_ranks:
            if self.config.checkpoint.rollouts:
                self.rollouts.write(number, batch, {"stats": batch.metrics})
            return
        shares = shares_on_0(self.runtime.engines, self.snapshot(), self.share)
        state = {
            "stats": batch.metrics,
            "samplers": self.join(shares) if shares else {},
            "samples": {str(row): asdict(record) for row, record in batch.records.items()},
            "errors": batch.errors,
        }
        store = self.pretraining_rollouts if stage == PRETRAINING else self.rollouts
        store.write(number, batch, state)

    def evaluate(self, step: int) -> tuple[dict[str, float], Iterable[dict[str, Any]]]:
        """Answer the held-out problems that are due after a step; return eval/* and every answer, decoded on
        demand."""
        due = [one for one in self.sets if self.config.evaluates(step, one.every)]
        result = EvaluationResult(self.rollout_rank.evaluate(due))
        self._waited += self.rollout_rank.seconds["gather"]
        return result.stats(), result.answers(self.tokenizer)

    def take_waited(self) -> float:
        """Return the seconds, since the last call, in which this rank's engine was done and others were
        not."""
        waited, self._waited = self._waited, 0.0
        return waited

    def snapshot(self) -> dict[str, Any]:
        """Return this rank's share of where the samplers stand now, which the next draw needs besides the
        weights; `join` makes a whole of all ranks' shares. Cheap: references to what never changes."""
        return {"prompts": self.prompt_sampler.state(), "rollout": self.rollout_rank.snapshot()}

    def join(self, shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return all ranks' snapshots as one, on rank 0, in any thread: JSON."""
        rollout = join_shares([share["rollout"] for share in shares])
        return {"prompts": shares[0]["prompts"], "rollout": rollout}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `join` gave. Raises CheckpointError where the data files have changed."""
        self.prompt_sampler.load_state(state["prompts"])
        self.rollout_rank.load_state_dict(state["rollout"])

    def close(self) -> None:
        """End the engine and the verifiers."""
        self.rollout_rank.close()
        self.engine.stop()
        self.verifiers.close()
