"""Rollouts on separate ranks (`parallel.rollout_ranks`), while the trainers train.

The first trainer sends orders to the controller. Batches go through run_dir/rollouts: a checkpoint needs
unused ones. Step k always samples with the weights after step k - 1 - `schedule.ahead` (at least 0).
Weights are transferred before the actor changes again."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio

from megarl.config.errors import CheckpointError
from megarl.config.files import OptionalFiles, mark_required
from megarl.config.schema import PRETRAINING, TRAIN, Config
from megarl.data.batch import RolloutBatch
from megarl.observe.timeline import Timeline
from megarl.parallel.comm import broadcast_from_rank_0, run_on_rank_0
from megarl.parallel.runtime import Runtime
from megarl.rollout import messages as m
from megarl.schedule.models import load_tokenizer
from megarl.schedule.profiler import Profiler
from megarl.schedule.rollouts import (
    FOLDER,
    list_rollout_files,
    manifest_path,
    pretraining_folder,
    read_manifest,
    read_rollout,
    rollouts_folder,
)
from megarl.schedule.source import BatchSource, Generation
from megarl.schedule.watchdog import Watchdog
from megarl.sync.weight_sync import WeightSync, make_weight_sync
from megarl.training.checkpoint import BATCHES
from megarl.weights.megatron import open_model

WAIT = 5.0  # seconds between exchanges
POLL = 0.005
ADDRESS = "controller"
VISIBLE = 60.0  # seconds until a shared file must be visible


class ControllerLink:
    """The first trainer's connection to the controller."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._loop, self._context = asyncio.new_event_loop(), zmq.asyncio.Context()
        self._link: m.Link | None = None

    def send(self, order: m.Order) -> None:
        if self._link is not None:
            self._loop.run_until_complete(self._link.send(order))

    def receive(self, seconds: float) -> m.Message | None:
        """Return the next answer (without texts except on rank 0), or None. Collective."""
        answer = None
        if self.runtime.rank == 0:
            answer = self._loop.run_until_complete(self._receive(seconds))
        short_answer = answer
        if isinstance(answer, m.EvaluationScores):
            short_answer = msgspec.structs.replace(answer, answers=[])
        result: m.Message | None = broadcast_from_rank_0(self.runtime, short_answer, m.Answer | None)
        return answer or result

    async def _receive(self, seconds: float) -> m.Message | None:
        store, deadline = self.runtime.store, time.monotonic() + seconds
        assert store is not None
        while self._link is None:
            if store.has(ADDRESS):
                self._link = m.Link(self._context, store.get(ADDRESS), m.TRAINER)
                await self._link.send(m.SendDataReports())
            elif time.monotonic() > deadline:
                return None
            await asyncio.sleep(POLL)
        return await self._link.receive(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        async def close_link() -> None:
            if self._link is not None:
                self._link.close()

        self._loop.run_until_complete(close_link())
        self._context.term()
        self._loop.close()


class RemoteGeneration(BatchSource):
    """Orders and reads rollouts, on trainers without engines.

    finished, ordered  the last such step
    pending            weight version to transfer"""

    def __init__(self, config: Config, runtime: Runtime, weight_sync: WeightSync) -> None:
        assert runtime.store is not None
        self.config, self.runtime, self.weight_sync = config, runtime, weight_sync
        self.ahead = config.schedule.lead
        self.steps = config.steps
        self._link = ControllerLink(runtime)
        self.finished = self.ordered = 0
        self.pending: int | None = None
        self._orders_after_transfer: list[m.Order] = []
        self._answers: list[Any] = []
        self._last = PRETRAINING, 0
        self.reports = self._wait_for_answer(m.DataReports).reports

    @property
    def depths(self) -> dict[str, Callable[[], int | str]]:
        return {"steps to be sampled": lambda: self.ordered - self.finished}

    def _wait_for_answer(self, kind: Any, *place: Any) -> Any:
        while True:
            for i, answer in enumerate(self._answers):
                if isinstance(answer, kind) and (not place or (answer.stage, answer.number) == place):
                    return self._answers.pop(i)
            self._receive(WAIT)

    def _receive(self, seconds: float) -> bool:
        started = time.perf_counter()
        answer = self._link.receive(seconds)
        self._waited += time.perf_counter() - started
        if answer is None:
            return False
        self._answers.append(answer)
        if isinstance(answer, m.RolloutStored) and answer.stage != PRETRAINING:
            self.finished = answer.number
        return True

    def _send(self, order: m.Order) -> None:
        if isinstance(order, m.ReuseStoredRollout) or (
            isinstance(order, m.CollectRollout) and order.stage == TRAIN
        ):
            self.ordered = order.number
        self._link.send(order)

    def publish(self, version: int) -> dict[str, float]:
        """Transfer the actor's weights and return metrics; with ahead >= 2 perhaps later."""
        self.pending = version
        return self.transfer() if self.can_transfer(wait=self.ahead < 2) else {}

    def can_transfer(self, *, wait: bool) -> bool:
        while self.pending is not None and self.finished < self.ordered:
            if not self._receive(WAIT if wait else 0.0) and not wait:
                return False
        return self.pending is not None

    def transfer(self) -> dict[str, float]:
        assert self.pending is not None
        self._send(m.TransferWeights(self.pending))
        self._wait_for_engines()
        metrics = self.weight_sync.sync(self.pending).metrics()
        self.pending, orders, self._orders_after_transfer = None, self._orders_after_transfer, []
        for order in orders:
            self._send(order)
        return metrics

    def _wait_for_engines(self) -> None:
        """Return when the engines' ranks join the transfer. They are idle here, and do so at once."""

    def order_first_steps(self, done: int, checkpoint: Path | None) -> None:
        """Order the steps after `done`, or reuse a checkpoint's."""
        self.finished = self.ordered = done
        if self.runtime.rank == 0:  # later rollouts belong to another start
            remove_rollouts(rollouts_folder(self.config), done + 1)
        for number in range(done + 1, self.steps + 1):
            rollout_dir = None if checkpoint is None else checkpoint / BATCHES / FOLDER.format(number)
            if rollout_dir is not None and broadcast_from_rank_0(self.runtime, rollout_dir.exists(), bool):
                self._send(m.ReuseStoredRollout(str(rollout_dir), number))
            elif number <= done + 1 + self.ahead:
                self._send(m.CollectRollout(TRAIN, number, done))
            else:
                break

    def order_next_step(self, done: int, unfinished: int | None) -> None:
        """Order the next rollout. unfinished: step of an incomplete checkpoint, which needs later ones"""
        number, last_unneeded = done + 1 + self.ahead, done if unfinished is None else min(done, unfinished)
        if self.ordered < number <= self.steps:
            order = m.CollectRollout(TRAIN, number, last_unneeded)
            self._orders_after_transfer.append(order) if self.pending is not None else self._send(order)

    def rollout(self, stage: str, number: int) -> RolloutBatch:
        self._last = stage, number
        if stage == PRETRAINING:
            self._send(m.CollectRollout(stage, number, 0))
        answer = self._wait_for_answer(m.RolloutStored, stage, number)
        wait_for_file(self._manifest(stage, number), VISIBLE)
        batch, _ = read_rollout(self._folder(stage), number, self.runtime)
        batch.metrics |= answer.metrics
        if stage != PRETRAINING:
            staleness = (number - 1 - batch["policy_version"]).float()
            batch.metrics["staleness/mean"] = float(staleness.mean())
            batch.metrics["staleness/max"] = float(staleness.max())
        batch.errors, batch.events = answer.errors, answer.events
        return batch

    def _folder(self, stage: str) -> Path:
        return (pretraining_folder if stage == PRETRAINING else rollouts_folder)(self.config)

    def _manifest(self, stage: str, number: int) -> Path:
        return manifest_path(self._folder(stage), number)

    def evaluate(self, step: int) -> tuple[dict[str, float], Any]:
        self._send(m.RunEvaluation(step))
        answer = self._wait_for_answer(m.EvaluationScores)
        return answer.stats, answer.answers

    def snapshot(self) -> dict[str, Any]:
        """Return the manifest (with samplers' state) of the last rollout in flight."""
        stage, number = self._last
        last_step = number if stage == PRETRAINING else min(number + self.ahead, self.steps)
        return {"batch": self._manifest(stage, last_step)}

    def join(self, shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        manifest = wait_for_file(shares[0]["batch"], self.config.watchdog.limit)
        return dict(read_manifest(manifest)["state"]["samplers"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._send(m.LoadState(json.dumps(state)))

    def rewind(self, step: int, stage: str) -> None:
        """Drop later records on the engines' ranks."""
        self._send(m.RewindTo(step, stage))

    def files(self, step: int) -> list[Path]:
        limit, last_step = self.config.watchdog.limit, min(step + self.ahead, self.steps)
        manifests = (self._manifest(TRAIN, n) for n in range(step + 1, last_step + 1))
        return list_stored_files(wait_for_file(manifest, limit) for manifest in manifests)

    def wait_for_files(self, step: int) -> None:
        while self.finished < min(step + self.ahead, self.ordered):
            self._receive(WAIT)

    def close(self) -> None:
        self._send(m.Shutdown())
        self._link.close()


def wait_for_file(path: Path, seconds: float) -> Path:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path}: has not appeared within {seconds:g} s (run_dir must be visible on all nodes)"
            )
        time.sleep(POLL)
    return path


def list_stored_files(manifests: Iterable[Path]) -> list[Path]:
    return [path for manifest in manifests for path in list_rollout_files(manifest)]


def remove_rollouts(folder: Path, first: int, last: float = math.inf) -> None:
    for path in folder.glob(FOLDER.replace("{:06d}", "*")):
        if first <= int(path.name.rpartition("-")[2]) <= last:
            shutil.rmtree(path)


class EngineRank:
    def __init__(self, config: Config, runtime: Runtime) -> None:
        self.config, self.runtime, self.dispensable = config, runtime, OptionalFiles()
        tokenizer = load_tokenizer(config.model.path)
        self.generation = Generation(config, runtime, tokenizer, lambda f: self.weight_sync.recover(f))
        hf_config = open_model(config.model.path).config
        self.weight_sync = make_weight_sync(config, runtime, hf_config, None, self.generation.engine)
        self.profiler = Profiler(config, runtime, hf_config["num_hidden_layers"], self.dispensable)
        self.timeline = Timeline(config.run_dir, runtime.rank, self.dispensable)

    def serve(self, watchdog: Watchdog) -> None:
        generation, timeline, is_first = self.generation, self.timeline, self.runtime.engines.rank == 0
        rollout_rank = generation.rollout_rank
        self.watchdog = watchdog
        watchdog.depths |= generation.depths
        if is_first:
            assert self.runtime.store is not None
            self.runtime.store.set(ADDRESS, rollout_rank.address)

        def enter_phase(phase: str, *place: Any) -> None:
            watchdog.phase(phase, *place)
            if place:
                timeline.step(*place)
            timeline.enter(phase)

        timeline.enter("wait for orders")
        while True:
            # Restart the clock: trainers' watchdogs limit this wait.
            watchdog.phase("wait for orders")
            match rollout_rank.next_order(WAIT):
                case None:
                    continue
                case m.SendDataReports():
                    rollout_rank.answer(m.DataReports(dict(generation.reports)))
                case m.TransferWeights(version):
                    self._join_transfer(version)
                    enter_phase("weight_transfer", TRAIN, version)
                    with self.profiler.phase("weight_transfer"):
                        self.weight_sync.sync(version)
                case m.CollectRollout() as order:
                    self._collect(order, enter_phase)
                case m.ReuseStoredRollout(source, number):
                    rollout_rank.answer(self._reuse(Path(source), number))
                case m.RewindTo(step, stage):
                    timeline.truncate_after(step, stage) if step else timeline.clear()
                case m.LoadState(state):
                    generation.load_state_dict(json.loads(state))
                case m.RunEvaluation(step):
                    enter_phase("evaluation")
                    stats, answers = generation.evaluate(step)
                    rollout_rank.answer(m.EvaluationScores(stats, list(answers) if is_first else []))
                case m.Shutdown():
                    timeline.close()
                    return
            timeline.add_wait(generation.take_waited())
            timeline.enter("wait for orders")

    def _collect(self, order: m.CollectRollout, enter_phase: Callable[..., None]) -> None:
        stage, number, started = order.stage, order.number, time.perf_counter()
        enter_phase("rollout", stage, number)
        with self.profiler.step(stage, number), self.profiler.phase("rollout"):
            batch = self.generation.rollout(stage, number)
        metrics = {name: v for name, v in batch.metrics.items() if name.startswith("inside/")}
        metrics["inside/rollout"] = time.perf_counter() - started
        events = batch.events + self.weight_sync.take_events() + self.dispensable.take()
        if stage == PRETRAINING:
            metrics["rollout/reused"] = batch.metrics["rollout/reused"]
        elif self.runtime.engines.rank == 0 and not self.config.checkpoint.rollouts:
            remove_rollouts(rollouts_folder(self.config), 0, order.done)
        stored = m.RolloutStored(stage, number, metrics, batch.errors, events)
        self.generation.rollout_rank.answer(stored)

    def _join_transfer(self, version: int) -> None:
        """Answer trainers that wait for this rank to join a transfer. Here they do not."""

    def _reuse(self, source: Path, number: int) -> m.RolloutStored:
        folder = rollouts_folder(self.config)
        target, partial = folder / FOLDER.format(number), folder / f".{FOLDER.format(number)}"

        def copy() -> None:
            with mark_required(target):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                shutil.rmtree(partial, ignore_errors=True)
                shutil.copytree(source, partial)
                partial.rename(target)

        run_on_rank_0(self.runtime.engines, copy)
        state = read_manifest(manifest_path(source.parent, number))["state"]
        return m.RolloutStored(TRAIN, number, {"inside/rollout": 0.0}, state["errors"], [])

    def close(self) -> None:
        self.generation.close()
