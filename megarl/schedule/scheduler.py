"""The scheduler: the only place that knows the order. Runs the stages of a run and the phases of each step, times them, records them."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.config.errors import DeviceMemoryError, MegarlError, NumericalError
from megarl.observe.run_log import JsonlWriter, RunLog, Sample
from megarl.observe.terminal import RunFacts, TerminalView
from megarl.parallel.comm import barrier, from_rank_0, gather_objects
from megarl.parallel.runtime import set_generator_states
from megarl.parallel.signals import StopRequest
from megarl.schedule.guards import Guards
from megarl.schedule.kept_rollouts import KeptRollouts
from megarl.schedule.phases import Phase
from megarl.schedule.preflight import versions
from megarl.schedule.recipes import VALUE_PRETRAINING, check_columns, training_phases
from megarl.schedule.residency import check_residency
from megarl.schedule.run import Run, Step
from megarl.schedule.safe_points import SafePoints
from megarl.schedule.sampled import has_tokens, with_tokens
from megarl.schedule.watchdog import Watchdog
from megarl.training.checkpoint import PRETRAINING, choose_checkpoint, load_checkpoint
from megarl.training.saving import CheckpointWriter
from megarl.training.statistics import throughput

EVALUATIONS = "evaluations.jsonl"
PLAIN_LINES = 100  # a log file gets about so many lines of steps


class Scheduler:
    """Runs `run` from its first step to its end. Rank 0 writes and shows; the other ranks only work."""

    def __init__(self, run: Run, stop: StopRequest | None = None, watchdog: Watchdog | None = None) -> None:
        self.run, self.config, self.runtime, self.watchdog = run, run.config, run.runtime, watchdog
        self.folder = Path(run.config.run_dir)
        self.phases = training_phases(run.config)
        for phases in (self.phases, VALUE_PRETRAINING):
            check_columns(phases)
            check_residency(phases)
        self.writes = self.runtime.rank == 0
        log = run.config.log
        every = -(-run.config.steps // PLAIN_LINES)
        self.view = TerminalView(log.terminal if self.writes else "quiet", self._facts(), every=every)
        self._enter("choose a checkpoint")
        self.checkpoint, self.skipped = choose_checkpoint(self.runtime, self.folder)
        self.writer = CheckpointWriter(self.runtime, self.config, run.learners, versions(), self._bring_learner)
        self.points = SafePoints(run, self.writer, stop or StopRequest(()))
        self.guards = Guards(self.config.guard)
        self.main_stage = "sft" if self.config.recipe == "sft" else "train"
        self.pretraining: dict[str, Any] = {"steps": 0, "done": False}
        if watchdog is not None:
            watchdog.depths |= {**run.depths(), "bytes of a checkpoint": lambda: self.writer.pending}
        append = self.checkpoint is not None
        self.log = RunLog(self.folder, append, log.samples, log.tensorboard, log.wandb) if self.writes else None

    def _facts(self) -> RunFacts:
        config, layout, hf = self.config, self.runtime.layout, self.run.hf
        return RunFacts(
            name=self.folder.name,
            recipe=config.recipe,
            model=f"{hf.model_type} {hf.num_hidden_layers} layers x {hf.hidden_size}",
            layout=f"TP {layout.tp} x PP {layout.pp} x DP {layout.dp}",
            device=str(self.runtime.device.type),
            steps=config.steps,
            value_pretraining_steps=config.value_pretraining.steps if config.has_critic else 0,
        )

    def execute(self) -> None:
        """The whole run, or what is left of it after the checkpoint."""
        try:
            self._execute()
        except MegarlError as error:
            if self.log is not None:
                with suppress(OSError):  # a full disk may be the error itself, which is to reach the user
                    self.log.write_event(str(error))
            raise
        self.close()

    def _execute(self) -> None:
        with self.view:
            self._report_data()
            done = self._resume()
            if self.config.recipe != "sft":
                self.run.make_resident("weight_transfer", {"actor.weights", "engine.weights"})
                self.run.transfer_weights(done)
                if self.checkpoint is None:
                    self._evaluate(0)
                if self.checkpoint is None or self.checkpoint.pretraining:
                    self._pretrain_values()
            for number in range(done + 1, self.config.steps + 1):
                self._step(Step(self.run, self.main_stage, number, number), self.phases)
                every = self.config.evaluation.every
                if self.config.recipe != "sft" and (number == self.config.steps or (every and number % every == 0)):
                    self._evaluate(number)
                self._done(self.main_stage, number, last=number == self.config.steps)
            self._enter("checkpoint")
            self.writer.finish()
            if self.config.checkpoint.export_hf:
                self._export_anew("actor", self.folder / "hf", moved=done < self.config.steps)

    def close(self) -> None:
        """Closes what is written to."""
        if self.log is not None:
            self.log.close()

    def _resume(self) -> int:
        """Goes back to the newest complete checkpoint, if there is one, and forgets what was recorded after it. Gives the steps done."""
        for line in self.skipped:
            self._event(line)
        if self.checkpoint is None:
            self.points.begins(self.main_stage, 0)
            if self.writes:
                (self.folder / EVALUATIONS).unlink(missing_ok=True)  # of a run that was ended before its first checkpoint
            return 0
        step, stage, done = self.checkpoint.step, self.checkpoint.stage, self.checkpoint.done
        self._enter("resume", stage, step)
        if self.checkpoint.pretraining:
            self._pretraining_schedule()
        state = load_checkpoint(self.checkpoint, self.run.learners, self._bring_learner)
        self.run.load_state_dict(state["samplers"])
        self.guards.load_state_dict(state["guards"])
        self.pretraining = state["value_pretraining"]
        if len(state["generators"]) == self.runtime.world:
            set_generator_states(state["generators"][self.runtime.rank])
        self.points.begins(stage, step)
        if self.log is not None:
            self.log.truncate_after(step, stage)
        if self.writes and (self.folder / EVALUATIONS).exists():
            with closing(JsonlWriter(self.folder / EVALUATIONS, append=True)) as answers:
                answers.keep(lambda record: record["step"] <= done)
        self._event(f"continues from {self.checkpoint.path}")
        if self.checkpoint.manifest["versions"] != versions():
            self._event("versions have changed since (manifest.json, versions.json): what follows may differ in its last bits")
        return done

    def _event(self, line: str) -> None:
        """Of the run, not of a step, whose events stand in its record."""
        self.view.event(line)
        if self.log is not None:
            self.log.write_event(line)

    def _enter(self, phase: str, stage: str | None = None, step: int | None = None) -> None:
        """Everything that a run does is a phase, for whoever looks on and for the watchdog."""
        self.view.phase(phase)
        if self.watchdog is not None:
            self.watchdog.phase(phase, stage, step)

    def _done(self, stage: str, number: int, *, last: bool) -> None:
        """A step is done: it may be time for a checkpoint, or to leave."""
        self._enter("checkpoint")
        every = self.config.checkpoint.every
        samplers, guards, pretraining = self.run.snapshot(), self.guards.state_dict(), dict(self.pretraining)

        def state() -> dict[str, Any]:
            return {"samplers": samplers(), "guards": guards, "value_pretraining": pretraining}

        due = bool(every) and (number % every == 0 or last)
        self.points.after_step(stage, number, state, due=due, last=last and stage == self.main_stage)

    def _bring_learner(self, name: str) -> None:
        self.run.make_resident("checkpoint", {f"{name}.weights", f"{name}.optimizer"})

    def _report_data(self) -> None:
        for name, report in self.run.data_reports.items():
            for line in report.lines():
                self.view.event(f"{name} {line}")

    def _step(self, step: Step, phases: tuple[Phase, ...]) -> None:
        megatron = self.run.megatron_seconds()
        try:
            self._phases(step, phases)
        except NumericalError as error:
            step.events.append(self.guards.failed(error))
            step.metrics["guard/skipped"] = 1.0
            if step.stage == "train":  # the engine is to have the weights of this step's number, changed or not
                self._phases(step, phases[-1:], changed=True)
        else:
            alarms = self.guards.passed(step.metrics)
            step.events += alarms
            step.metrics |= {"guard/skipped": 0.0, "guard/alarms": float(len(alarms))}
        step.events += self.guards.judged(step.metrics, step.rollout.errors if step.rollout else {})
        samples = self._samples(step)
        self._gather_memory(step.metrics)
        step.metrics["time/checkpoint"] = self.points.take_seconds()  # of the steps before, mostly
        step.metrics["time/step"] = time.perf_counter() - step.started
        step.metrics["inside/megatron"] = self.run.megatron_seconds() - megatron
        step.metrics |= throughput(step.metrics)
        for line in step.events:
            self.view.event(line)
        self._record(step.stage, step.number, step.metrics | ({"events": step.events} if step.events else {}))
        if self.log is not None:
            self.log.write_samples(samples)
            if step.distributions:
                self.log.write_distributions(step.number, step.stage, step.distributions)
        self.guards.check_judged()

    def _samples(self, step: Step) -> list[Sample]:
        steps = self.config.value_pretraining.steps if step.stage == PRETRAINING else self.config.steps
        found = with_tokens(step) if step.samples and has_tokens(step.number, steps) else step.samples.values()
        return [replace(sample, step=step.number, stage=step.stage) for sample in found]

    def _phases(self, step: Step, phases: tuple[Phase, ...], changed: bool = False) -> None:
        """changed: whether a weight may have, since the step before."""
        residency = self.run.residency
        for phase in phases:
            if changed:
                self.points.during_updates()
            else:
                self.points.within_step()
            changed |= any(tenant.endswith(".gradients") for tenant in phase.resident)
            try:
                with residency.explained(phase.name):
                    if phase.resident and residency.moving:
                        with self._timed(step, "residency"):
                            self.run.make_resident(phase.name, phase.resident)
                    with self._timed(step, phase.name), residency.measured(phase.name, step.metrics):
                        phase.run(step)
            except NumericalError as error:
                raise self._kept(step, phase.name, error) from None
            except DeviceMemoryError as error:
                raise DeviceMemoryError(f"step {step.number}, {error}") from error

    @contextmanager
    def _timed(self, step: Step, name: str) -> Iterator[None]:
        self._enter(name, step.stage, step.number)
        started = time.perf_counter()
        yield
        step.metrics[f"time/{name}"] = step.metrics.get(f"time/{name}", 0.0) + time.perf_counter() - started

    def _gather_memory(self, metrics: dict[str, float]) -> None:
        """Of memory*/<phase> the largest of all ranks: the device that is the first to be full."""
        mine = {name: size for name, size in metrics.items() if name.startswith("memory")}
        mine["memory/host"] = float(self.run.host.nbytes)
        theirs = gather_objects(self.runtime, mine)
        metrics |= {name: max(found[name] for found in theirs) for name in mine}

    def _record(self, stage: str, number: int, metrics: Mapping[str, Any]) -> None:
        if self.log is not None:
            self.view.step(self.log.write_metrics({"step": number, "stage": stage, **metrics}))

    def _kept(self, step: Step, phase: str, error: NumericalError) -> NumericalError:
        """The batch goes to disk, one file a rank, before the run stops."""
        folder = self.folder / "failed"
        folder.mkdir(exist_ok=True)
        path = folder / f"{step.stage}-{step.number:06d}-rank{self.runtime.rank}.pt"
        local = step.local.experience
        torch.save({"tokens": local.tokens, "cu_seqlens": local.cu_seqlens, "response_mask": local.response_mask, **local.columns}, path)
        barrier(self.runtime)  # a launcher that sees one rank end would end the others while they write
        kept = NumericalError(f"step {step.number}, phase {phase}: {error}; the batch is in {folder}")
        kept.fatal = error.fatal
        return kept

    def _pretrain_values(self) -> None:
        """VAPO section 4.1: until the step limit, or until a fresh rollout's explained variance is good enough."""
        config, critic = self.config.value_pretraining, self.run.critic
        if critic is None or not config.steps:
            return
        if self.checkpoint is None:
            self._pretraining_schedule()
        kept = KeptRollouts(self.config, self.run.prompts, self.runtime)
        while not self.pretraining["done"]:
            number = self.pretraining["steps"] + 1
            step = Step(self.run, PRETRAINING, number, -number, kept=kept)
            self._step(step, VALUE_PRETRAINING)
            explained = step.metrics.get("value/explained_variance", -math.inf)  # a step that was skipped has none
            self.pretraining = {"steps": number, "done": explained >= config.explained_variance or number == config.steps}
            if explained >= config.explained_variance:
                self._event(f"value pretraining ends at step {number}: explained variance {explained:.3f}")
            self._done(PRETRAINING, number, last=self.pretraining["done"])
        critic.start_schedule(self.config.steps)
        self._export_anew("critic", self.folder / "critic_pretrained", moved=True)

    def _pretraining_schedule(self) -> None:
        config, critic = self.config.value_pretraining, self.run.critic
        assert critic is not None
        critic.start_schedule(config.steps, constant_lr=config.lr or self.config.critic.lr)

    def _evaluate(self, number: int) -> None:
        if not self.run.problems:
            return
        self._enter("evaluation")
        self.run.make_resident("evaluation", {"engine.weights", "engine.kv_cache"})
        started = time.perf_counter()
        result = self.run.sampler.evaluate(self.run.problems)
        self._record("eval", number, {**result.stats(), "time/evaluation": time.perf_counter() - started})
        if self.writes:
            with open(self.folder / EVALUATIONS, "a", encoding="utf-8") as file:
                for answer in result.answers(self.run.tokenizer):
                    file.write(json.dumps({"step": number, **answer}, ensure_ascii=False) + "\n")

    def _export_anew(self, which: str, out: Path, moved: bool) -> None:
        """A run that was continued may have the folder already: it is the same one, unless steps were done since (`moved`)."""
        if from_rank_0(self.runtime, out.exists()):
            if not moved:
                return
            if self.writes:
                shutil.rmtree(out)
            barrier(self.runtime)
        self._enter(f"export {which}")
        self.run.make_resident("export", {f"{which}.weights"})
        self.run.export(which, out)
        barrier(self.runtime)
        self.view.event(f"{which} written to {out}")
