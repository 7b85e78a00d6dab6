"""Rollouts on separate ranks whose weights change while responses run (`schedule.in_flight`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.config.schema import PRETRAINING, TRAIN, Config
from megarl.data.batch import RolloutBatch
from megarl.parallel.comm import gather_objects
from megarl.parallel.runtime import Ranks, Runtime
from megarl.rollout import messages as m
from megarl.schedule.ahead import EngineRank, RemoteGeneration, list_stored_files, remove_rollouts
from megarl.schedule.rollouts import manifest_path, read_manifest, rollouts_folder
from megarl.sync.weight_sync import WeightSync

SHARE = "staleness/share_"


class InFlightGeneration(RemoteGeneration):
    """Never waits for a rollout to transfer weights.

    A checkpoint has the batches that are stored when its step ends. Running responses are sampled again."""

    def __init__(self, config: Config, runtime: Runtime, weight_sync: WeightSync) -> None:
        super().__init__(config, runtime, weight_sync)
        self._newest_by_step: dict[int, int] = {}  # the last stored step at the end of each step

    def can_transfer(self, *, wait: bool) -> bool:
        return self.pending is not None

    def _wait_for_engines(self) -> None:
        """Wait for running polls, or an engine's restart, which may outlast a collective's limit."""
        self._wait_for_answer(m.TransferReady)

    def snapshot(self) -> dict[str, Any]:
        stage, number = self._last
        if stage == PRETRAINING:
            return super().snapshot()
        self._newest_by_step[number] = max(self.finished, number)
        return {"batch": self._manifest(stage, self._newest_by_step[number])}

    def files(self, step: int) -> list[Path]:
        newest = self._newest_by_step.get(step, step)
        return list_stored_files(self._manifest(TRAIN, n) for n in range(step + 1, newest + 1))

    def wait_for_files(self, step: int) -> None:
        """Return: they are stored."""


class InFlightRank(EngineRank):
    def _join_transfer(self, version: int) -> None:
        self.generation.rollout_rank.answer(m.TransferReady(version))

    def _collect(self, order: m.CollectRollout, enter_phase: Callable[..., None]) -> None:
        if order.stage == PRETRAINING:
            super()._collect(order, enter_phase)
            return
        rollout_rank, engines = self.generation.rollout_rank, self.runtime.engines

        def transfer(version: int) -> None:
            enter_phase("weight_transfer", TRAIN, version)
            self.weight_sync.sync(version)
            enter_phase("rollout", TRAIN, version + 1)

        def store(number: int, batch: RolloutBatch, done: int) -> m.RolloutStored:
            batch.metrics |= measure_staleness(batch, number, engines)
            self.generation.store(TRAIN, number, batch)
            if engines.rank == 0 and not self.config.checkpoint.rollouts:
                # A checkpoint of step `done` needs the state in that step's manifest.
                remove_rollouts(rollouts_folder(self.config), 0, done - 1)
            enter_phase("rollout", TRAIN, number + 1)
            inside = {name: value for name, value in batch.metrics.items() if name.startswith("inside/")}
            events = self.weight_sync.take_events() + self.dispensable.take()
            return m.RolloutStored(TRAIN, number, inside, batch.errors, events)

        enter_phase("rollout", TRAIN, order.number)
        rollout_rank.collect_in_flight(order, transfer, store, lambda: self.watchdog.phase("rollout"))

    def _reuse(self, source: Path, number: int) -> m.RolloutStored:
        """Copy a checkpoint's batch. Report it if it is older than a bound that was lowered since."""
        stored, bound = super()._reuse(source, number), self.config.schedule.max_staleness
        stats = read_manifest(manifest_path(source.parent, number))["state"]["stats"]
        oldest = max((int(name.removeprefix(SHARE)) for name in stats if name.startswith(SHARE)), default=0)
        if oldest > bound:
            what = f"step {number} trains on tokens up to {oldest} versions old, which the checkpoint holds"
            stored.events.append(f"{what}; schedule.max_staleness is now {bound}")
        return stored


def measure_staleness(batch: RolloutBatch, number: int, ranks: Ranks) -> dict[str, float]:
    """Return staleness/share_<n>: the share of tokens that weights n versions older sampled. Collective."""
    versions = batch.local["token_versions"][batch.local.response_mask]
    local_counts = Counter((number - 1 - versions).tolist())
    counts: Counter[int] = Counter()
    for theirs in gather_objects(ranks, dict(local_counts), dict[int, int]):
        counts.update(theirs)
    total = max(1, counts.total())
    return {f"{SHARE}{n}": count / total for n, count in sorted(counts.items())}
