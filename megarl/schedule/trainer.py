"""The training loop. Read this file first: `Trainer.train` is the whole run, `Trainer.step` one step.

config/phases.py declares the phases, schedule/phases.py has their code."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint.stateful import Stateful

from megarl.config.errors import DeviceMemoryError, NumericalError
from megarl.config.phases import WEIGHT_TRANSFER, Phase, check_phases, select_phases
from megarl.config.schema import PRETRAINING
from megarl.model.builder import warn_unfused_attention
from megarl.parallel.comm import barrier, broadcast_from_rank_0
from megarl.parallel.signals import StopRequest
from megarl.schedule.guards import Guards, keep_failed_batch
from megarl.schedule.listeners import make_listeners
from megarl.schedule.models import export_model
from megarl.schedule.phases import run_phase
from megarl.schedule.recovery import Progress, Recovery
from megarl.schedule.run import Run, Step
from megarl.schedule.watchdog import Watchdog


class Trainer:
    """Trains on this rank. Every rank makes the same calls.

    fresh_stages  stages in which no step has succeeded since this start"""

    def __init__(self, run: Run, stop: StopRequest | None = None, watchdog: Watchdog | None = None) -> None:
        self.run, self.config = run, run.config
        self.stage, self.phases = self.config.main_stage, select_phases(self.config)
        for stage in (self.stage, PRETRAINING):
            check_phases(select_phases(self.config, stage, first_step=True))
        self.fresh_stages = {self.stage, PRETRAINING}
        self.guards = Guards(self.config.guard, self.config.rollout.windows)
        self.has_passed_step = False
        self.pretraining = Progress()
        self.listeners = make_listeners(run, watchdog)
        stateful: dict[str, Stateful] = {"guards": self.guards, "value_pretraining": self.pretraining}
        stateful |= run.method_states
        self.recovery = Recovery(run, stateful, self.listeners, stop or StopRequest(()))
        if watchdog is not None:
            pending = {"bytes of a checkpoint": lambda: self.recovery.writer.pending}
            watchdog.depths |= {**run.source.depths, **pending}

    def train(self) -> None:
        run, config, checkpoint = self.run, self.config, self.recovery.checkpoint
        pretraining = config.value_pretraining
        with self.listeners.run():
            pretrains = pretraining.steps > 0 and (checkpoint is None or checkpoint.pretraining)
            for critic in run.critics if pretrains else ():
                # Before resume(): a checkpoint holds only the position in the schedule.
                critic.start_schedule(pretraining.steps, constant_lr=pretraining.lr or config.critic.lr)
            finished_steps = self.recovery.resume()
            for phase in self.phases:
                if phase.name == WEIGHT_TRANSFER:
                    run.residency.onload(phase.name, phase.on_gpu)
                    run.publish(finished_steps)
            if checkpoint is None:
                self.evaluate(0)
            if pretrains and run.critics:
                self.pretrain_values()
            if run.remote is not None:
                run.remote.order_first_steps(
                    finished_steps, checkpoint.path if finished_steps and checkpoint else None
                )
            for number in range(finished_steps + 1, config.steps + 1):
                self.step(Step(self.stage, number))
                self.evaluate(number)
                if run.remote is not None:
                    run.remote.order_next_step(number, self.recovery.writer.step)
                self.recovery.after_step(self.stage, number, last=number == config.steps)
            self.recovery.finish()
            if config.checkpoint.export_hf:
                self.export("actor", config.run_dir / "hf", changed=finished_steps < config.steps)
                if config.actor.lora.rank is not None:
                    folder, changed = config.run_dir / "lora", finished_steps < config.steps
                    self.export("actor", folder, changed=changed, adapters=True)

    def pretrain_values(self) -> None:
        """Fit the critic to the frozen policy's returns (VAPO section 4.1)."""
        config, progress = self.config.value_pretraining, self.pretraining
        while not progress.done:
            step = Step(PRETRAINING, progress.steps + 1)
            self.step(step)
            explained = step.metrics.get("value/explained_variance", -math.inf)  # a skipped step has none
            is_fitted = explained >= config.explained_variance
            progress.steps, progress.done = step.number, is_fitted or step.number == config.steps
            if is_fitted:
                reason = f"explained variance {explained:.3f}"
                self.listeners.event(f"value pretraining ends at step {step.number}: {reason}")
            self.recovery.after_step(PRETRAINING, step.number, last=progress.done)
        for critic in self.run.critics:
            critic.start_schedule(self.config.steps)
        for name in self.run.critic_names:
            self.export(name, self.config.run_dir / f"{name}_pretrained", changed=True)

    def step(self, step: Step) -> None:
        """Run a step's phases. After a non-finite number only the weight transfer still runs.

        Raises an error after too many bad steps in a row."""
        phases = select_phases(self.config, step.stage, first_step=step.stage in self.fresh_stages)
        with self.listeners.step(step):
            try:
                self.run_phases(step, phases)
            except NumericalError as error:
                step.events.append(self.guards.count_failure(error))
                step.metrics["guard/skipped"] = 1.0
                # Engines expect this version even if weights are unchanged.
                transfer_phases = [phase for phase in phases if phase.name == WEIGHT_TRANSFER]
                self.run_phases(step, transfer_phases, weights_changed=True)
            else:
                self.fresh_stages.discard(step.stage)
                if not self.has_passed_step and (line := warn_unfused_attention(self.config.model)):
                    step.events.append(line)
                self.has_passed_step = True
                alarms = self.guards.count_success(step.metrics, step.number)
                step.events += alarms
                step.metrics |= {"guard/skipped": 0.0, "guard/alarms": float(len(alarms))}
            step.events += self.guards.count_ungraded(step.metrics, step.verifier_errors)
            step.metrics["time/checkpoint"] = self.recovery.take_seconds()
        self.guards.check_graded()

    def run_phases(self, step: Step, phases: Sequence[Phase], *, weights_changed: bool = False) -> None:
        run = self.run
        for phase in phases:
            self.recovery.check(weights_changed=weights_changed)
            weights_changed |= phase.updates_weights
            try:
                if run.remote is not None and run.remote.pending is not None:
                    with self.listeners.phase("weight_transfer", step):
                        step.metrics |= run.transfer_pending(wait=phase.updates("actor"))
                with run.offload.explain_out_of_memory(phase.name):
                    if phase.on_gpu and run.offload.enabled:
                        with self.listeners.phase("residency", step):
                            run.residency.onload(phase.name, phase.on_gpu)
                    with self.listeners.phase(phase.name, step):
                        run_phase(phase, run, step)
            except NumericalError as error:
                raise keep_failed_batch(run, step, phase.name, error) from None
            except DeviceMemoryError as error:
                raise DeviceMemoryError(f"step {step.number}, {error}") from error

    def evaluate(self, number: int) -> None:
        config = self.config
        if not config.has_engine or not any(
            config.evaluates(number, entry.every) for entry in config.data.eval
        ):
            return
        started = time.perf_counter()
        with self.listeners.phase("evaluation"):
            self.run.transfer_pending(wait=True)
            self.run.residency.onload("evaluation", {"engine.weights", "engine.kv_cache"})
            stats, answers = self.run.source.evaluate(number)
        seconds = time.perf_counter() - started
        self.listeners.on_evaluation(number, {**stats, "time/evaluation": seconds}, answers)

    def export(self, which: str, out: Path, *, changed: bool, adapters: bool = False) -> None:
        """Export a model, unless an earlier start has and weights have not `changed`."""
        if broadcast_from_rank_0(self.run.runtime, out.exists(), bool):
            if not changed:
                return
            if self.run.runtime.rank == 0:
                shutil.rmtree(out)
            barrier(self.run.runtime)
        with self.listeners.phase(f"export {which}"):
            self.run.residency.onload_model("export", which, "weights")
            model, config = self.run.models[which], self.config
            export_model(model, config, self.run.runtime, out, adapters=adapters)
            barrier(self.run.runtime)
        description = f"adapters of the {which}" if adapters else which
        self.listeners.event(f"{description} written to {out}", keep=False)
