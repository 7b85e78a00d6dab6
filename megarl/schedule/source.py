"""Where a run's batches come from: responses that engines draw (schedule/generation.py, schedule/ahead.py)
or have drawn (schedule/replay.py), or pairs that are given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch

from megarl.config.schema import Config
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.data.prompts import PromptSampler, ReadReport, read_pairs


class BatchSource(ABC):
    """What the trainer asks for batches. Every rank that trains has one and calls it alike. The methods with
    a body are for sources that wait for an engine.

    reports  what was read of the data files
    share    the type of `snapshot`'s value, as it goes to rank 0"""

    reports: Mapping[str, ReadReport]
    share: Any = dict[str, Any]

    @abstractmethod
    def rollout(self, stage: str, number: int) -> RolloutBatch:
        """Return the batch of a step."""

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Return this rank's share of where the source stands after the batch that it gave last, as data that
        never changes; a checkpoint of the step may ask for it while the next step runs."""

    @abstractmethod
    def join(self, shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return all ranks' snapshots as one, as JSON holds it; called on rank 0, in any thread."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `join` gave. Raises CheckpointError where the data files have changed."""

    @abstractmethod
    def close(self) -> None:
        """End what the source has started."""

    def evaluate(self, step: int) -> tuple[dict[str, float], Iterable[dict[str, Any]]]:
        """Answer the held-out problems that are due after a step; return eval/* and every answer, decoded on
        demand. A source without an engine is not asked."""
        raise NotImplementedError

    @property
    def depths(self) -> Mapping[str, Callable[[], int | str]]:
        """Return what may wait in the source, for reports about a hang."""
        return {}

    def take_waited(self) -> float:
        """Return the seconds, since the last call, in which this rank waited for the source or other ranks'
        engines."""
        return 0.0


class SupervisedPairs(BatchSource):
    """Given pairs of prompt and response, the same on every rank. Every response counts as right."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        report, key = ReadReport(), config.supervised.response_key
        self.reports, self.batch = {"train": report}, config.supervised.batch
        self.pairs = read_pairs(config.data.train, config.data, key, tokenizer, report)
        content = sha256(repr(self.pairs).encode()).hexdigest()
        self.sampler = PromptSampler(len(self.pairs), config.seed, config.data.shuffle, content)

    def rollout(self, stage: str, number: int) -> RolloutBatch:
        """Take the next pairs."""
        chosen = [self.pairs[i] for i in self.sampler.take(self.batch)]
        pairs = [prompt for prompt, _ in chosen], [response for _, response in chosen]
        batch = RolloutBatch.of(TrainBatch.build(*pairs))
        batch["correct"] = torch.ones(len(chosen), dtype=torch.bool)
        batch["truncated"] = torch.zeros(len(chosen), dtype=torch.bool)
        return batch

    def snapshot(self) -> dict[str, Any]:
        return {"pairs": self.sampler.state()}

    def join(self, shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return dict(shares[0])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state(state["pairs"])

    def close(self) -> None:
        """End nothing: there are only lists."""
