"""Rollouts on ranks of their own (`parallel.rollout_ranks`), beside the trainers' steps (`schedule.ahead`).

The trainers give orders (`GenerationApart`), which the ranks with engines carry out one after the other
(`EngineRank`): take the weights of a version, draw the responses of a step, evaluate. They are messages
from the first trainer to the controller of rollouts, which passes them on to its ranks, and answers. A batch
goes through run_dir/rollouts: it is written in any case, since a checkpoint holds what is in flight.

With ahead = a the responses of step k are drawn with the weights after step k - 1 - a (not below 0), always
with these: what is drawn does not depend on time. Version v is transferred once the engines have drawn step
v + a, at the latest before the actor changes again, so that nobody has to keep older weights.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio

from megarl.config.errors import CheckpointError, StorageError
from megarl.config.files import Dispensable, essential
from megarl.config.schema import PRETRAINING, TRAIN, Config
from megarl.data.batch import RolloutBatch
from megarl.observe.timeline import Timeline
from megarl.parallel.comm import from_rank_0
from megarl.parallel.runtime import Runtime
from megarl.rollout import messages as m
from megarl.schedule.models import load_tokenizer
from megarl.schedule.profiler import Profiler
from megarl.schedule.rollouts import (
    FOLDER,
    pretraining_folder,
    read_manifest,
    read_rollout,
    rollout_files,
    rollouts_folder,
    stored,
)
from megarl.schedule.source import BatchSource, Generation
from megarl.schedule.watchdog import Watchdog
from megarl.sync.weight_sync import WeightSync, make_weight_sync
from megarl.training.checkpoint import BATCHES
from megarl.weights.megatron import open_model

SLICE = (
    5.0  # seconds that the first trainer waits for an answer before it tells the others that there is none
)
LOOK = 0.005  # seconds between two looks for a file, or for the controller
ADDRESS = "controller"  # key of the store, by which the first trainer finds the controller of rollouts
VISIBLE = 60.0  # seconds within which a file that one node has written must be there on the others


class ControllerLink:
    """The connection of the first trainer to the controller of rollouts; what it hears, all trainers hear."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._loop, self._context = asyncio.new_event_loop(), zmq.asyncio.Context()
        self._link: m.Link | None = None

    def send(self, order: m.Order) -> None:
        """Give an order; all trainers call this alike."""
        if self._link is not None:
            self._loop.run_until_complete(self._link.send(order))

    def hear(self, seconds: float) -> m.Message | None:
        """Return the next answer on all trainers, within about `seconds`; what is long, on the first alone.
        None where there is none, and before the controller is there."""
        found = None
        if self.runtime.rank == 0:
            found = self._loop.run_until_complete(self._next(seconds))
        brief = msgspec.structs.replace(found, answers=[]) if isinstance(found, m.EvaluationScores) else found
        heard: m.Message | None = from_rank_0(self.runtime, brief, m.Answer | None)
        return found or heard

    async def _next(self, seconds: float) -> m.Message | None:
        store, end = self.runtime.store, time.monotonic() + seconds
        assert store is not None
        while self._link is None:
            if store.has(ADDRESS):
                self._link = m.Link(self._context, store.get(ADDRESS), m.TRAINER)
                await self._link.send(m.SendDataReports())
            elif time.monotonic() > end:
                return None
            await asyncio.sleep(LOOK)
        return await self._link.receive(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Let go of the connection, once all orders are sent."""

        async def end() -> None:
            if self._link is not None:
                self._link.close()

        self._loop.run_until_complete(end())
        self._context.term()
        self._loop.close()


class GenerationApart(BatchSource):
    """What trainers without engines have in place of a `Generation`: has the ranks with engines draw, and
    reads what they have drawn. Every trainer has one and calls it alike.

    Its waits are limited by the watchdog, as parts of a phase (watchdog.limit).

    reports, problems  as of Generation; the number of problems
    drawn, ordered     the last step whose responses have been drawn, and are to be drawn
    pending            the version that is still to be transferred"""

    def __init__(self, config: Config, runtime: Runtime, weight_sync: WeightSync) -> None:
        assert runtime.store is not None
        self.config, self.runtime, self.weight_sync = config, runtime, weight_sync
        self.ahead, self.steps = config.schedule.ahead, config.steps
        self._link = ControllerLink(runtime)
        self.drawn = self.ordered = 0
        self.pending: int | None = None
        self._due: list[m.Order] = []  # that the pending version comes before
        self._answers: list[Any] = []
        self._waited = 0.0
        self._last = PRETRAINING, 0  # stage and number of the rollout that was asked for last
        self.reports = self._hear(m.DataReports).reports

    @property
    def depths(self) -> dict[str, Callable[[], int | str]]:
        """Return what may wait for the engines, for reports about a hang."""
        return {"steps to be drawn": lambda: self.ordered - self.drawn}

    def _hear(self, kind: Any, *place: Any) -> Any:
        """Wait for an answer, about a step where that is given, and return it."""
        while True:
            for i, answer in enumerate(self._answers):
                if isinstance(answer, kind) and (not place or (answer.stage, answer.number) == place):
                    return self._answers.pop(i)
            self._listen(SLICE)

    def _listen(self, seconds: float) -> bool:
        """Take the next answer, and return whether there was one."""
        started = time.perf_counter()
        answer = self._link.hear(seconds)
        self._waited += time.perf_counter() - started
        if answer is None:
            return False
        self._answers.append(answer)
        if isinstance(answer, m.RolloutStored) and answer.stage != PRETRAINING:
            self.drawn = answer.number
        return True

    def _order(self, order: m.Order) -> None:
        if isinstance(order, m.ReuseStoredRollout) or (
            isinstance(order, m.CollectRollout) and order.stage == TRAIN
        ):
            self.ordered = order.number
        self._link.send(order)

    def publish(self, version: int) -> dict[str, float]:
        """Have the actor's present weights transferred: now, or with ahead 2 as soon as the engines have
        drawn what they are at (`due`). Return the transfer's metrics, if there was one."""
        self.pending = version
        return self.transfer() if self.due(wait=self.ahead < 2) else {}

    def due(self, *, wait: bool) -> bool:
        """Return whether a version is pending and the engines have drawn all that they were told to; with
        `wait` once they have."""
        while self.pending is not None and self.drawn < self.ordered:
            if not self._listen(SLICE if wait else 0.0) and not wait:
                return False
        return self.pending is not None

    def transfer(self) -> dict[str, float]:
        """Transfer the version that is due; return the transfer's metrics. The actor's weights must be on the
        device."""
        assert self.pending is not None
        self._order(m.TransferWeights(self.pending))
        metrics = self.weight_sync.sync(self.pending).metrics()
        self.pending, due, self._due = None, self._due, []
        for order in due:
            self._order(order)
        return metrics

    def begin(self, done: int, checkpoint: Path | None) -> None:
        """Have the steps drawn that come after `done`, with the weights that were published last. checkpoint:
        that a run continues from, which holds those that were drawn ahead of it (but at the end of a run that
        is now to go further)."""
        self.drawn = self.ordered = done
        if self.runtime.rank == 0:  # what was drawn after the checkpoint is no step of this run
            remove(rollouts_folder(self.config), done + 1)
        for number in range(done + 1, min(done + 1 + self.ahead, self.steps) + 1):
            kept = None if checkpoint is None else checkpoint / BATCHES / FOLDER.format(number)
            if kept is not None and from_rank_0(self.runtime, kept.exists(), bool):
                self._order(m.ReuseStoredRollout(str(kept), number))
            else:
                self._order(m.CollectRollout(TRAIN, number, done))

    def draw_next(self, done: int, unfinished: int | None) -> None:
        """Have the step drawn for which the weights after step `done` are meant. unfinished: the step of a
        checkpoint that is not whole yet, and needs the batches after it."""
        number, kept = done + 1 + self.ahead, done if unfinished is None else min(done, unfinished)
        if number <= self.steps:
            order = m.CollectRollout(TRAIN, number, kept)
            self._due.append(order) if self.pending is not None else self._order(order)

    def rollout(self, stage: str, number: int) -> RolloutBatch:
        """Return a step's rollout once it has been drawn. Value pretraining is in turn: it is drawn now."""
        self._last = stage, number
        if stage == PRETRAINING:
            self._order(m.CollectRollout(stage, number, 0))
        told = self._hear(m.RolloutStored, stage, number)
        visible(self._path(stage, number), VISIBLE)
        # Its files are shared out among the trainers, who deliver it.
        batch, _ = read_rollout(self._folder(stage), number, self.runtime)
        staleness = (number - 1 - batch["policy_version"]).float() if stage != PRETRAINING else None
        metrics = batch.metrics | told.metrics
        if staleness is not None:
            metrics |= {"staleness/mean": float(staleness.mean()), "staleness/max": float(staleness.max())}
        batch.metrics, batch.errors, batch.events = metrics, told.errors, told.events
        return batch

    def _folder(self, stage: str) -> Path:
        return (pretraining_folder if stage == PRETRAINING else rollouts_folder)(self.config)

    def _path(self, stage: str, number: int) -> Path:
        return stored(self._folder(stage), number)

    def evaluate(self, step: int) -> tuple[dict[str, float], Any]:
        """Have the problems answered with the weights that were published last; see Generation.evaluate."""
        self._order(m.RunEvaluation(step))
        told = self._hear(m.EvaluationScores)
        return told.stats, told.answers

    def take_waited(self) -> float:
        """Return the seconds, since the last call, in which this rank waited for the engines."""
        waited, self._waited = self._waited, 0.0
        return waited

    def snapshot(self) -> dict[str, Any]:
        """Return the batch that says where the samplers stand: that of the last rollout that is in flight."""
        stage, number = self._last
        last = number if stage == PRETRAINING else min(number + self.ahead, self.steps)
        return {"batch": self._path(stage, last)}

    def join(self, shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what that batch says, once it is there; on rank 0, in a thread."""
        manifest = visible(shares[0]["batch"], self.config.watchdog.limit)
        return dict(read_manifest(manifest)["state"]["samplers"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `join` gave."""
        self._order(m.LoadState(json.dumps(state)))

    def continue_after(self, step: int, stage: str) -> None:
        """Have the others drop what they have recorded after a step; 0 where the run begins anew."""
        self._order(m.RewindTo(step, stage))

    def files(self, step: int) -> list[Path]:
        """Return the batches that a checkpoint after `step` holds, once they are there; called in a
        thread."""
        limit, last = self.config.watchdog.limit, min(step + self.ahead, self.steps)
        manifests = [visible(self._path(TRAIN, number), limit) for number in range(step + 1, last + 1)]
        return [path for manifest in manifests for path in rollout_files(manifest)]

    def wait_for_files(self, step: int) -> None:
        """Wait until those have been drawn; all trainers call this."""
        while self.drawn < min(step + self.ahead, self.ordered):
            self._listen(SLICE)

    def close(self) -> None:
        """Let the ranks with engines go."""
        self._order(m.Shutdown())
        self._link.close()


def visible(path: Path, seconds: float) -> Path:
    """Return a path once there is a file. Raises CheckpointError after so many seconds."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{path}: has not appeared within {seconds:g} s (run_dir must be seen by all nodes)"
            )
        time.sleep(LOOK)
    return path


def remove(folder: Path, first: int, last: float = math.inf) -> None:
    """Remove the batches of steps `first` to `last`."""
    for path in folder.glob(FOLDER.replace("{:06d}", "*")):
        if first <= int(path.name.rpartition("-")[2]) <= last:
            shutil.rmtree(path)


class EngineRank:
    """What lives for the whole run on a rank that has an engine and does not train."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        self.config, self.runtime, self.dispensable = config, runtime, Dispensable()
        tokenizer = load_tokenizer(config.model.path)
        self.generation = Generation(config, runtime, tokenizer, lambda f: self.weight_sync.recover(f))
        hf_config = open_model(config.model.path).config
        self.layers = hf_config["num_hidden_layers"]
        self.weight_sync = make_weight_sync(config, runtime, hf_config, None, self.generation.engine)

    def serve(self, watchdog: Watchdog) -> None:
        """Carry out the trainers' orders until they let this rank go."""
        config, runtime, generation = self.config, self.runtime, self.generation
        profiler = Profiler(config, runtime, self.layers, self.dispensable)
        timeline = Timeline(config.run_dir, runtime.rank, self.dispensable)
        watchdog.depths |= generation.depths
        ranks, folder, trainers = runtime.engines, rollouts_folder(config), generation.rollout_rank
        if ranks.rank == 0:
            assert runtime.store is not None
            runtime.store.set(ADDRESS, trainers.address)

        def enter(phase: str, *place: Any) -> None:
            watchdog.phase(phase, *place)
            if place:
                timeline.step(*place)
            timeline.enter(phase)

        timeline.enter("wait for orders")
        while True:
            watchdog.phase("wait for orders")  # again and again: the trainers' watchdogs limit their steps
            match trainers.next_order(SLICE):
                case None:
                    continue
                case m.SendDataReports():
                    trainers.answer(m.DataReports(dict(generation.reports)))
                case m.TransferWeights(version):
                    enter("weight_transfer", TRAIN, version)
                    with profiler.phase("weight_transfer"):
                        self.weight_sync.sync(version)
                case m.CollectRollout(stage, number, done):
                    enter("rollout", stage, number)
                    started = time.perf_counter()
                    with profiler.step(stage, number), profiler.phase("rollout"):
                        found = generation.rollout(stage, number)
                    metrics = {name: v for name, v in found.metrics.items() if name.startswith("inside/")}
                    metrics["inside/rollout"] = time.perf_counter() - started
                    events = found.events + self.weight_sync.take_events() + self.dispensable.take()
                    if stage == PRETRAINING:
                        metrics["rollout/reused"] = found.metrics["rollout/reused"]
                    elif ranks.rank == 0 and not config.checkpoint.rollouts:
                        remove(folder, 0, done)
                    trainers.answer(m.RolloutStored(stage, number, metrics, found.errors, events))
                case m.ReuseStoredRollout(source, number):
                    failure, place = None, folder / FOLDER.format(number)
                    try:
                        if ranks.rank == 0:
                            aside = folder / f".{FOLDER.format(number)}"
                            with essential(place):
                                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                                shutil.rmtree(aside, ignore_errors=True)
                                shutil.copytree(source, aside)
                                aside.rename(place)
                    except StorageError as error:
                        failure = error
                    if (failure := from_rank_0(ranks, failure, StorageError | None)) is not None:
                        raise failure
                    state = read_manifest(stored(Path(source).parent, number))["state"]
                    trainers.answer(
                        m.RolloutStored(TRAIN, number, {"inside/rollout": 0.0}, state["errors"], [])
                    )
                case m.RewindTo(step, stage):
                    timeline.truncate_after(step, stage) if step else timeline.clear()
                case m.LoadState(state):
                    generation.load_state_dict(json.loads(state))
                case m.RunEvaluation(step):
                    enter("evaluation")
                    stats, answers = generation.evaluate(step)
                    trainers.answer(m.EvaluationScores(stats, list(answers) if ranks.rank == 0 else []))
                case m.Shutdown():
                    timeline.close()
                    return
            timeline.waited(generation.take_waited())
            timeline.enter("wait for orders")

    def close(self) -> None:
        """End the engine and the verifiers."""
        self.generation.close()
