"""The scheduler: the only place that knows the order. Runs the stages of a run and the phases of each step, times them, records them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.config.errors import DeviceMemoryError, NumericalError
from megarl.observe.jsonl import JsonlWriter
from megarl.observe.metrics import MetricsLog
from megarl.observe.samples import SampleLog
from megarl.observe.terminal import RunFacts, TerminalView
from megarl.parallel.comm import barrier, gather_objects
from megarl.schedule.kept_rollouts import KeptRollouts
from megarl.schedule.phases import Phase
from megarl.schedule.preflight import versions
from megarl.schedule.recipes import VALUE_PRETRAINING, check_columns, training_phases
from megarl.schedule.residency import check_residency
from megarl.schedule.run import Run, Step
from megarl.training.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from megarl.training.statistics import throughput

EVALUATIONS = "evaluations.jsonl"
PLAIN_LINES = 100  # a log file gets about so many lines of steps


class Scheduler:
    """Runs `run` from its first step to its end. Rank 0 writes and shows; the other ranks only work."""

    def __init__(self, run: Run) -> None:
        self.run, self.config, self.runtime = run, run.config, run.runtime
        self.folder = Path(run.config.run_dir)
        self.phases = training_phases(run.config)
        for phases in (self.phases, VALUE_PRETRAINING):
            check_columns(phases)
            check_residency(phases)
        self.writes = self.runtime.rank == 0
        log = run.config.log
        every = -(-run.config.steps // PLAIN_LINES)
        self.view = TerminalView(log.terminal if self.writes else "quiet", self._facts(), every=every)
        # Rank 0 chooses the checkpoint for all, so that no two ranks can see different ones.
        found = gather_objects(self.runtime, find_checkpoint(self.folder) if self.writes else None)[0]
        self.checkpoint, self.skipped = found
        self.pretraining_steps = 0
        append = self.checkpoint is not None
        self.metrics = MetricsLog(self.folder, log.tensorboard, log.wandb, append) if self.writes else None
        self.samples = SampleLog(self.folder, log.samples, append) if self.writes else None

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
        with self.view:
            self._report_data()
            done = self._resume()
            if self.config.recipe != "sft":
                self.run.make_resident("weight_transfer", {"actor.weights", "engine.weights"})
                self.run.transfer_weights(done)
                if self.checkpoint is None:
                    self._evaluate(0)
                    self._pretrain_values()
            for number in range(done + 1, self.config.steps + 1):
                self._step(Step(self.run, "sft" if self.config.recipe == "sft" else "train", number, number), self.phases)
                every = self.config.evaluation.every
                if self.config.recipe != "sft" and (number == self.config.steps or (every and number % every == 0)):
                    self._evaluate(number)
                self._save(number)
            if self.config.checkpoint.export_hf:
                self._export_actor(self.folder / "hf", moved=done < self.config.steps)
        self.close()

    def close(self) -> None:
        """Closes what is written to."""
        for log in (self.metrics, self.samples):
            if log is not None:
                log.close()

    def _resume(self) -> int:
        """Goes back to the newest complete checkpoint, if there is one, and forgets what was recorded after it. Gives the steps done."""
        for line in self.skipped:
            self.view.event(line)
        if self.checkpoint is None:
            return 0
        step, stage = self.checkpoint.step, "sft" if self.config.recipe == "sft" else "train"
        state = load_checkpoint(self.checkpoint, self.run.learners, self._bring_learner)
        self.run.load_state_dict(state["samplers"])
        self.pretraining_steps = state["value_pretraining_steps"]
        if self.metrics is not None and self.samples is not None:
            self.metrics.truncate_after(step, stage)
            self.samples.truncate_after(step, stage)
            if (self.folder / EVALUATIONS).exists():
                with JsonlWriter(self.folder / EVALUATIONS, append=True) as answers:
                    answers.keep(lambda record: record["step"] <= step)
        self.view.event(f"continues from {self.checkpoint.path}")
        if self.checkpoint.versions != versions():
            self.view.event("versions have changed since (manifest.json, versions.json): what follows may differ in its last bits")
        return step

    def _save(self, number: int) -> None:
        every = self.config.checkpoint.every
        if not every or (number % every and number != self.config.steps):
            return
        self.view.phase("checkpoint")
        state = {"samplers": self.run.state_dict(), "value_pretraining_steps": self.pretraining_steps}
        save_checkpoint(self.runtime, self.config, number, self.run.learners, state, versions(), self._bring_learner)

    def _bring_learner(self, name: str) -> None:
        self.run.make_resident("checkpoint", {f"{name}.weights", f"{name}.optimizer"})

    def _report_data(self) -> None:
        for name, report in self.run.data_reports.items():
            for line in report.lines():
                self.view.event(f"{name} {line}")

    def _step(self, step: Step, phases: tuple[Phase, ...]) -> None:
        megatron, residency = self.run.megatron_seconds(), self.run.residency
        for phase in phases:
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
        self._gather_memory(step.metrics)
        step.metrics["time/step"] = time.perf_counter() - step.started
        step.metrics["inside/megatron"] = self.run.megatron_seconds() - megatron
        step.metrics |= throughput(step.metrics)
        for line in step.events:
            self.view.event(line)
        self._record(step.stage, step.number, step.metrics | ({"events": step.events} if step.events else {}))
        if self.samples is not None and step.rollout is not None:
            samples = step.rollout.samples(self.run.tokenizer, self.config.log.samples)
            self.samples.write(replace(sample, step=step.number, stage=step.stage) for sample in samples)

    @contextmanager
    def _timed(self, step: Step, name: str) -> Iterator[None]:
        self.view.phase(name)
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
        if self.metrics is not None:
            self.view.step(self.metrics.write({"step": number, "stage": stage, **metrics}))

    def _kept(self, step: Step, phase: str, error: NumericalError) -> NumericalError:
        """The batch goes to disk, one file a rank, before the run stops."""
        folder = self.folder / "failed"
        folder.mkdir(exist_ok=True)
        path = folder / f"{step.stage}-{step.number:06d}-rank{self.runtime.rank}.pt"
        local = step.local.experience
        torch.save({"tokens": local.tokens, "cu_seqlens": local.cu_seqlens, "response_mask": local.response_mask, **local.columns}, path)
        barrier(self.runtime)  # a launcher that sees one rank end would end the others while they write
        return NumericalError(f"step {step.number}, phase {phase}: {error}; the batch is in {folder}")

    def _pretrain_values(self) -> None:
        """VAPO section 4.1: until the step limit, or until a fresh rollout's explained variance is good enough."""
        config, critic = self.config.value_pretraining, self.run.critic
        if critic is None or not config.steps:
            return
        critic.start_schedule(config.steps, constant_lr=config.lr or self.config.critic.lr)
        kept = KeptRollouts(self.config, self.run.prompts, self.runtime)
        for number in range(1, config.steps + 1):
            step = Step(self.run, "value_pretraining", number, -number, kept=kept)
            self._step(step, VALUE_PRETRAINING)
            self.pretraining_steps = number
            if step.metrics["value/explained_variance"] >= config.explained_variance:
                self.view.event(
                    f"value pretraining ends at step {number}: explained variance {step.metrics['value/explained_variance']:.3f}"
                )
                break
        critic.start_schedule(self.config.steps)
        self._export("critic", self.folder / "critic_pretrained")

    def _evaluate(self, number: int) -> None:
        if not self.run.problems:
            return
        self.view.phase("evaluation")
        self.run.make_resident("evaluation", {"engine.weights", "engine.kv_cache"})
        started = time.perf_counter()
        result = self.run.sampler.evaluate(self.run.problems)
        self._record("eval", number, {**result.stats(), "time/evaluation": time.perf_counter() - started})
        if self.writes:
            with open(self.folder / EVALUATIONS, "a", encoding="utf-8") as file:
                for answer in result.answers(self.run.tokenizer):
                    file.write(json.dumps({"step": number, **answer}, ensure_ascii=False) + "\n")

    def _export_actor(self, out: Path, moved: bool) -> None:
        """The final actor. A run that was continued has one already: it is the same one, unless steps were added (`moved`)."""
        if self.checkpoint is not None and gather_objects(self.runtime, out.exists())[0]:
            if not moved:
                return
            if self.writes:
                shutil.rmtree(out)
            barrier(self.runtime)
        self._export("actor", out)

    def _export(self, which: str, out: Path) -> None:
        self.view.phase(f"export {which}")
        self.run.make_resident("export", {f"{which}.weights"})
        self.run.export(which, out)
        barrier(self.runtime)
        self.view.event(f"{which} written to {out}")
