"""A run from its first step to its end. Read this file first: `Trainer.train` is the whole run,
`Trainer.step` a step.

The phases and their order are declared in config/phases.py; what each does is in schedule/phases.py.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError, DeviceMemoryError, MegarlError, NumericalError, StorageError
from megarl.config.phases import (
    PARITY,
    WEIGHT_TRANSFER,
    Phase,
    check_phases,
    pretraining_phases,
    training_phases,
    with_parity,
)
from megarl.observe.prometheus import Exporter
from megarl.observe.run_log import RunLog
from megarl.observe.terminal import RunFacts, TerminalView
from megarl.observe.timeline import Timeline
from megarl.parallel.comm import barrier, from_rank_0, gather_objects
from megarl.parallel.runtime import set_generator_states
from megarl.parallel.signals import StopRequest
from megarl.schedule.guards import Guards, keep_failed_batch
from megarl.schedule.phases import FUNCTIONS, enforced, throughput
from megarl.schedule.preemption import PreemptionHandler
from megarl.schedule.preflight import versions
from megarl.schedule.profiler import Profiler
from megarl.schedule.rollouts import has_tokens, with_tokens
from megarl.schedule.run import Run, Step
from megarl.schedule.watchdog import Watchdog
from megarl.training.checkpoint import PRETRAINING, choose_checkpoint
from megarl.training.saving import CheckpointWriter
from megarl.training.sharded import load_checkpoint

PLAIN_LINES = 100  # a log file gets about so many lines of steps


class Trainer:
    """Trains on this rank. Rank 0 writes and shows; the other ranks only work."""

    def __init__(self, run: Run, stop: StopRequest | None = None, watchdog: Watchdog | None = None) -> None:
        self.run, self.config, self.runtime, self.watchdog = run, run.config, run.runtime, watchdog
        config, layout, log = self.config, self.runtime.layout, self.config.log
        self.folder, self.is_rank_0 = config.run_dir, self.runtime.rank == 0
        self.stage = config.main_stage
        self.phases = training_phases(config)
        check_phases(self.phases)
        check_phases(pretraining_phases(config))
        self.guards = Guards(config.guard)
        # Stages of which no step since this start has compared the engine with the trainer.
        self.uncompared = {"train", PRETRAINING} if config.guard.parity != "none" else set[str]()
        self.profiler = Profiler(config, self.runtime, run.hf.num_hidden_layers, run.dispensable)
        self.pretraining_progress: dict[str, Any] = {"steps": 0, "done": False}
        virtual = f" (VPP {layout.vpp})" if layout.vpp > 1 else ""
        self.facts = RunFacts(
            name=self.folder.name,
            recipe=config.recipe,
            model=f"{run.hf.model_type} {run.hf.num_hidden_layers} layers x {run.hf.hidden_size}",
            layout=f"TP {layout.tp} x PP {layout.pp}{virtual} x DP {layout.dp}"
            + (f" x CP {layout.cp}" if layout.cp > 1 else ""),
            device=str(self.runtime.device.type),
            steps=config.steps,
            value_pretraining_steps=config.value_pretraining.steps if config.has_critic else 0,
        )
        every = -(-config.steps // PLAIN_LINES)
        self.view = TerminalView(log.terminal if self.is_rank_0 else "quiet", self.facts, every=every)
        self.timeline = Timeline(self.folder, self.runtime.rank, run.dispensable)
        self._enter("choose a checkpoint")
        self.checkpoint, self.skipped_checkpoints = choose_checkpoint(self.runtime, self.folder)
        self.writer = CheckpointWriter(
            self.runtime, config, run.models, versions(), run.onload_for_checkpoint, run.source
        )
        self.preemption = PreemptionHandler(run, self.writer, stop or StopRequest(()))
        if watchdog is not None:
            watchdog.depths |= run.source.depths
            watchdog.depths["bytes of a checkpoint"] = lambda: self.writer.pending
        append = self.checkpoint is not None
        if not append:
            self.timeline.clear()
            run.source.continue_after(0, self.stage)
        self.log: RunLog | None = None  # of rank 0

        def open_log() -> None:
            exporter = Exporter(log.prometheus, log.prometheus_host) if log.prometheus else None
            self.log = RunLog(
                self.folder, append, log.samples, log.tensorboard, log.wandb, exporter, run.dispensable
            )

        self._on_rank_0(open_log)

    def train(self) -> None:
        """Train to the last step, from the newest checkpoint. Errors are also written to events.jsonl."""
        config, run = self.config, self.run
        try:
            with self.view:
                for name, report in run.data_reports.items():
                    for line in report.lines():
                        self.view.event(f"{name} {line}")
                done = self.resume()
                if config.has_engine:
                    run.onload("weight_transfer", {"actor.weights", "engine.weights"})
                    run.publish(done)
                    if self.checkpoint is None:
                        self.evaluate(0)
                    if self.checkpoint is None or self.checkpoint.pretraining:
                        self.pretrain_values()
                run.source.begin(done, self.checkpoint.path if done and self.checkpoint else None)
                for number in range(done + 1, config.steps + 1):
                    last = number == config.steps
                    with self.profiler.step(self.stage, number):
                        self.step(Step(self.stage, number), self.phases)
                    self.evaluate(number)
                    run.source.draw_next(number, self.writer.step)
                    self.save(self.stage, number, last=last)
                self._enter("checkpoint")
                self.writer.finish()
                if config.checkpoint.export_hf:
                    self.export("actor", self.folder / "hf", changed=done < config.steps)
        except MegarlError as error:
            if self.log is not None:
                for line in (*run.dispensable.take(), str(error)):
                    self.log.write_event(line)
            raise
        self.timeline.close()
        self._record_unwritten(gather_objects(self.runtime, run.dispensable.take()))
        self._on_rank_0(self.log.close if self.log is not None else lambda: None)

    def resume(self) -> int:
        """Go back to the newest complete checkpoint, where there is one, and drop what was recorded after it.
        Return the steps of the main stage that are done."""
        for line in self.skipped_checkpoints:
            self._event(line)
        checkpoint, critic, config = self.checkpoint, self.run.critic, self.config.value_pretraining
        if critic is not None and config.steps and (checkpoint is None or checkpoint.pretraining):
            critic.start_schedule(config.steps, constant_lr=config.lr or self.config.critic.lr)
        if checkpoint is None:
            self.preemption.start(self.stage, 0)
            return 0
        step, stage, done = checkpoint.step, checkpoint.stage, checkpoint.done
        self._enter("resume", stage, step)
        state = load_checkpoint(checkpoint, self.run.models, self.run.onload_for_checkpoint)
        self.run.source.load_state_dict(state["samplers"])
        self.guards.load_state_dict(state["guards"])
        self.pretraining_progress = state["value_pretraining"]
        if len(state["generators"]) == self.runtime.world:
            set_generator_states(state["generators"][self.runtime.rank])
        self.preemption.start(stage, step)
        self.timeline.truncate_after(step, stage)
        self.run.source.continue_after(step, stage)
        self._on_rank_0(lambda: self.log and self.log.truncate_after(step, stage))
        self._event(f"continues from {checkpoint.path}")
        if checkpoint.manifest["versions"] != versions():
            self._event(
                "versions have changed since (manifest.json, versions.json): "
                "what follows may differ in its last bits"
            )
        return done

    def pretrain_values(self) -> None:
        """Fit the critic to the frozen policy's returns (VAPO section 4.1): until the step limit, or until a
        fresh rollout's explained variance is good enough."""
        config, critic = self.config.value_pretraining, self.run.critic
        if critic is None or not config.steps:
            return
        while not self.pretraining_progress["done"]:
            number = self.pretraining_progress["steps"] + 1
            step = Step(PRETRAINING, number)
            self.step(step, pretraining_phases(self.config))
            explained = step.metrics.get("value/explained_variance", -math.inf)  # a skipped step has none
            enough = explained >= config.explained_variance
            self.pretraining_progress = {"steps": number, "done": enough or number == config.steps}
            if enough:
                self._event(f"value pretraining ends at step {number}: explained variance {explained:.3f}")
            self.save(PRETRAINING, number, last=self.pretraining_progress["done"])
        critic.start_schedule(self.config.steps)
        self.export("critic", self.folder / "critic_pretrained", changed=True)

    def step(self, step: Step, phases: Sequence[Phase]) -> None:
        """Run the phases of a step and record it. After a number that is not finite the rest is skipped."""
        run, metrics = self.run, step.metrics
        self.timeline.step(step.stage, step.number)
        megatron_seconds = run.megatron_seconds()
        if step.stage in self.uncompared:
            phases = with_parity(phases)
        try:
            self.run_phases(step, phases)
        except NumericalError as error:
            step.events.append(self.guards.failed(error))
            metrics["guard/skipped"] = 1.0
            if step.stage == "train":
                # The engine must have the weights of this step's number, changed or not.
                self.run_phases(step, (WEIGHT_TRANSFER,), weights_changed=True)
        else:
            self.uncompared.discard(step.stage)
            alarms = self.guards.passed(metrics)
            step.events += alarms
            metrics |= {"guard/skipped": 0.0, "guard/alarms": float(len(alarms))}
        step.events += self.guards.judged(metrics, step.verifier_errors)
        samples = list(step.samples.values())
        shows = self.config.log.samples and self.config.has_engine
        if shows and has_tokens(step.number, self.facts.total(step.stage)):
            samples = with_tokens(step.samples, step.local, run.tokenizer, self.runtime)
        # Of each memory figure the largest of all ranks: the device that is the first to be full. Of the
        # processes on a CPU, which share a machine, the sum.
        memory = {name: size for name, size in metrics.items() if name.startswith("memory")}
        memory["memory/host"] = float(run.host.nbytes)
        all_ranks = gather_objects(self.runtime, (memory, run.dispensable.take()))
        for name in memory:
            of_ranks = [theirs[name] for theirs, _ in all_ranks]
            metrics[name] = sum(of_ranks) if name.startswith("memory_all/") else max(of_ranks)
        self._record_unwritten([lines for _, lines in all_ranks])
        metrics["time/checkpoint"] = self.preemption.take_seconds()  # mostly of the steps before
        metrics["time/step"] = time.perf_counter() - step.started
        metrics["inside/megatron"] = run.megatron_seconds() - megatron_seconds
        metrics |= throughput(metrics)
        for line in step.events:
            self.view.event(line)
        self._record(step.stage, step.number, metrics | ({"events": step.events} if step.events else {}))
        if self.log is not None:
            self.log.write_samples(
                [replace(sample, step=step.number, stage=step.stage) for sample in samples]
            )
            if step.distributions:
                self.log.write_distributions(step.number, step.stage, step.distributions)
        self.guards.check_judged()

    def run_phases(self, step: Step, phases: Sequence[Phase], *, weights_changed: bool = False) -> None:
        """Run phases in their order. Before each one: leave if the run was told to end (as long as no weight
        has changed in this step), have engines elsewhere take the weights that they wait for, then have the
        phase's tensor groups on the device."""
        offload = self.run.offload
        for phase in phases:
            self.preemption.check(weights_changed=weights_changed)
            weights_changed |= phase.updates_weights
            try:
                if self.run.source.pending is not None:
                    with self._timed(step, "weight_transfer"):
                        step.metrics |= self.run.meet(wait="actor.gradients" in phase.on_gpu)
                with offload.explained(phase.name):
                    if phase.on_gpu and offload.enabled:
                        with self._timed(step, "residency"):
                            self.run.onload(phase.name, phase.on_gpu)
                    # A run that was interrupted has one more of these, and else the same record.
                    once = phase.name == PARITY.name
                    measured = nullcontext() if once else offload.measured(phase.name, step.metrics)
                    with self._timed(step, phase.name), measured, enforced(phase, step):
                        FUNCTIONS[phase.name](self.run, step)
            except NumericalError as error:
                raise keep_failed_batch(self.run, step, phase.name, error) from None
            except DeviceMemoryError as error:
                raise DeviceMemoryError(f"step {step.number}, {error}") from error

    def evaluate(self, number: int) -> None:
        """Answer the held-out problems that are due after a step with the engine, and record the scores."""
        config = self.config
        due = any(config.evaluates(number, entry.every) for entry in config.data.eval)
        if not config.has_engine or not due:
            return
        self._enter("evaluation")
        started = time.perf_counter()
        self.run.meet(wait=True)
        self.run.onload("evaluation", {"engine.weights", "engine.kv_cache"})
        stats, answers = self.run.source.evaluate(number)
        self.timeline.waited(self.run.source.take_waited())
        self.timeline.leave()
        spent = time.perf_counter() - started
        self._record("eval", number, {**stats, "time/evaluation": spent}, answers)

    def save(self, stage: str, number: int, *, last: bool) -> None:
        """Begin a checkpoint after a step where one is due; leave where the run was told to end."""
        self._enter("checkpoint")
        every = self.config.checkpoint.every
        state = {
            "samplers": self.run.source.snapshot(),
            "guards": self.guards.state_dict(),
            "value_pretraining": self.pretraining_progress,
        }
        due = bool(every) and (number % every == 0 or last)
        self.preemption.after_step(stage, number, state, due=due, last=last and stage == self.stage)

    def export(self, which: str, out: Path, *, changed: bool) -> None:
        """Write a model as a Hugging Face folder. A run that was continued may have written it already; it is
        written again only where the weights have `changed` since."""
        if from_rank_0(self.runtime, out.exists()):
            if not changed:
                return
            if self.is_rank_0:
                shutil.rmtree(out)
            barrier(self.runtime)
        self._enter(f"export {which}")
        self.run.onload("export", {f"{which}.weights"})
        self.run.export(which, out)
        barrier(self.runtime)
        self.view.event(f"{which} written to {out}")

    def _enter(self, phase: str, stage: str | None = None, step: int | None = None) -> None:
        """Tell the terminal, the watchdog and the timeline what the run does from now on."""
        self.view.phase(phase)
        self.timeline.enter(phase)
        if self.watchdog is not None:
            self.watchdog.phase(phase, stage, step)

    @contextmanager
    def _timed(self, step: Step, name: str) -> Iterator[None]:
        self._enter(name, step.stage, step.number)
        started = time.perf_counter()
        with self.profiler.phase(name):
            yield
        self.timeline.waited(self.run.source.take_waited())
        self.timeline.leave()
        step.metrics[f"time/{name}"] = step.metrics.get(f"time/{name}", 0.0) + time.perf_counter() - started

    def _event(self, line: str) -> None:
        """Show and record an event of the run; those of a step stand in its record."""
        self.view.event(line)
        if self.log is not None:
            self.log.write_event(line)

    def _record(
        self, stage: str, number: int, metrics: Mapping[str, Any], answers: Iterable[dict[str, Any]] = ()
    ) -> None:
        """Record and show a step or an evaluation. Raises StorageError on every rank where rank 0 cannot."""

        def write() -> None:
            if self.log is not None:
                self.view.step(self.log.write_metrics({"step": number, "stage": stage, **metrics}))
                self.log.write_answers(number, answers)

        self._on_rank_0(write)

    def _record_unwritten(self, of_ranks: Iterable[list[str]]) -> None:
        """Record what the ranks have said, each on its own, of files that they do without."""
        if self.log is not None:
            for line in (line for lines in of_ranks for line in lines):
                self.log.write_event(line)

    def _on_rank_0(self, write: Callable[[], Any]) -> None:
        """Have rank 0 write what the run cannot do without. Raises on every rank what it meets there."""
        failure = None
        try:
            if self.is_rank_0:
                write()
        except (ConfigError, StorageError) as error:
            failure = error
        if (failure := from_rank_0(self.runtime, failure)) is not None:
            raise failure
