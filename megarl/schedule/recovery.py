"""Resume, checkpoints and preemption of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from megarl.config.errors import Interrupted
from megarl.config.schema import PRETRAINING
from megarl.parallel.comm import any_flags, gather_objects
from megarl.parallel.runtime import set_generator_states
from megarl.parallel.signals import StopRequest
from megarl.schedule.listeners import Listeners
from megarl.schedule.preflight import versions
from megarl.schedule.run import Run, Step
from megarl.training.checkpoint import choose_checkpoint, moved_schedule
from megarl.training.saving import CheckpointWriter
from megarl.training.sharded import load_checkpoint


@dataclass
class Progress:
    steps: int = 0
    done: bool = False

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.done = state["steps"], state["done"]


class Recovery:
    """Resumes and saves a run. Every rank makes the same calls.

    A run leaves after a step, or within one before weights have changed, losing its samples."""

    def __init__(
        self, run: Run, stateful: Mapping[str, Stateful], listeners: Listeners, stop: StopRequest
    ) -> None:
        self.run, self.stateful, self.listeners, self.stop = run, stateful, listeners, stop
        self.every, self.longest_step = run.config.checkpoint.every, 0.0  # steps; seconds
        with listeners.phase("choose a checkpoint"):
            self.checkpoint, self._skipped = choose_checkpoint(run.runtime, run.config.run_dir)
            listeners.on_start(fresh=self.checkpoint is None)
        self.writer = CheckpointWriter(
            run.runtime,
            run.config,
            run.models,
            versions(),
            run.residency.onload_for_checkpoint,
            run.source.join,
            run.source.share,
            listeners.event,
            run.remote,
        )
        self._spent = 0.0
        self._last_saved: tuple[str, int] | None = None
        self._last_step: tuple[str, int, dict[str, Any]] | None = None
        self._since = time.monotonic()

    def resume(self) -> int:
        """Load the checkpoint, drop later records; return the finished main steps."""
        for line in self._skipped:
            self.listeners.event(line)
        checkpoint, run = self.checkpoint, self.run
        stage, step = (
            (run.config.main_stage, 0) if checkpoint is None else (checkpoint.stage, checkpoint.step)
        )
        if checkpoint is not None:
            with self.listeners.phase("resume", Step(stage, step)):
                state = load_checkpoint(checkpoint, run.models, run.residency.onload_for_checkpoint)
                run.source.load_state_dict(state["samplers"])
                for name, component in self.stateful.items():
                    component.load_state_dict(state[name])
                if len(state["generators"]) == run.runtime.world:
                    set_generator_states(state["generators"][run.runtime.rank])
                self.listeners.rewind(stage, step)
            self.listeners.event(f"continues from {checkpoint.path}")
            if schedule_warning := moved_schedule(run.config, checkpoint):
                self.listeners.event(schedule_warning)
            if checkpoint.manifest["versions"] != versions():
                self.listeners.event(
                    "package versions differ from the checkpoint's (manifest.json, versions.json): "
                    "results may differ by rounding errors"
                )
        self._last_saved, self._last_step = (stage, step), (stage, step, {})
        self._since = time.monotonic()
        return 0 if checkpoint is None else checkpoint.done

    def take_seconds(self) -> float:
        seconds, self._spent = self._spent, 0.0
        return seconds

    def after_step(self, stage: str, step: int, *, last: bool) -> None:
        """Start the step's checkpoint if due. Raises Interrupted to leave."""
        self.longest_step = max(self.longest_step, time.monotonic() - self._since)
        self._since = time.monotonic()
        # A copy: the run may leave during the next step.
        state = {name: component.state_dict() for name, component in self.stateful.items()}
        self._last_step = stage, step, {"samplers": self.run.source.snapshot(), **state}
        with self.listeners.phase("checkpoint"):
            if self.every and (step % self.every == 0 or last):
                self._save()
            if stage == PRETRAINING or not last:
                self.check(self.longest_step + self.writer.seconds)

    def check(self, seconds: float = 0.0, *, weights_changed: bool = False) -> None:
        """Continue writing a checkpoint. Raises Interrupted if asked to leave or short of `seconds`.

        weights_changed: since the last step, so the run cannot leave"""
        if not (self.writer.unfinished if weights_changed else self.every):
            return
        should_stop = not weights_changed and self.stop.should_stop(seconds)
        busy, should_stop = any_flags(self.run.runtime, (self.writer.busy, should_stop))
        if not busy:
            started = time.perf_counter()
            self.writer.advance()
            self._spent += time.perf_counter() - started
        if not should_stop or self._last_step is None:
            return
        stage, step, _ = self._last_step
        if (stage, step) != self._last_saved:
            self._save(now=True)
        self.writer.finish()
        reason = next(text for text in gather_objects(self.run.runtime, self.stop.reason, str | None) if text)
        progress_text = f"step {step} of {stage} is saved in {self.run.config.run_dir}"
        if not step:
            progress_text = "before the first step, nothing is lost"
        raise Interrupted(f"{reason}: {progress_text}; the same command continues")

    def finish(self) -> None:
        with self.listeners.phase("checkpoint"):
            self.writer.finish()

    def _save(self, now: bool = False) -> None:
        assert self._last_step is not None
        started = time.perf_counter()
        stage, step, state = self._last_step
        model_names = self.run.critic_names if stage == PRETRAINING else tuple(self.run.models)
        self.writer.save(stage, step, model_names, state, now=now)
        self._last_saved = stage, step
        self._spent += time.perf_counter() - started
