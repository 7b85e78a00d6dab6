"""What ends a run early: numbers that are not finite, a verifier that fails on every answer, a request to
save and leave. Also alarms about metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from megarl.config.errors import ConfigError, Interrupted, NumericalError
from megarl.config.schema import GuardConfig
from megarl.parallel.comm import any_of, gather_objects
from megarl.parallel.signals import StopRequest
from megarl.schedule.run import Run
from megarl.training.checkpoint import PRETRAINING
from megarl.training.saving import CheckpointWriter

State = Callable[[], Mapping[str, Any]]


class Guards:
    """Counts of steps in a row, which end the run when there are too many.

    skipped      steps in a row whose updates were not applied
    unverified   steps in a row without a verdict
    length       mean response length of the last step that had one, in tokens"""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.skipped = self.unverified = 0
        self.length: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"skipped": self.skipped, "unverified": self.unverified, "length": self.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set what `state_dict` returned."""
        self.skipped, self.length = state["skipped"], state["length"]
        self.unverified = state.get("unverified", 0)

    def failed(self, error: NumericalError) -> str:
        """Count a step whose rest is skipped; return the line about it. Raises `error` after too many."""
        self.skipped += 1
        if self.skipped > self.config.skipped_steps or error.fatal:
            raise error
        count = f"{self.skipped} of at most {self.config.skipped_steps} in a row"
        return f"{error}; the rest of the step is skipped ({count})"

    def judged(self, metrics: Mapping[str, float], errors: Mapping[str, int]) -> list[str]:
        """Count a step in which no answer got a verdict, and return the line about it. errors: the verifier's
        errors and how often each occurred."""
        share = metrics.get("reward/unverified")
        if share is not None:  # recipe sft has no answers
            self.unverified = self.unverified + 1 if share == 1 else 0
        if share != 1:
            return []
        often = max(errors, key=lambda error: errors[error], default="see the steps before")
        count = f"{self.unverified} of at most {self.config.unverified_steps} steps in a row"
        return [f"the verifier failed on every answer, most often: {often} ({count})"]

    def check_judged(self) -> None:
        """Raise ConfigError after `guard.unverified_steps` steps in a row without a verdict."""
        if self.unverified >= self.config.unverified_steps:
            raise ConfigError(
                f"reward.verifier: it failed on every answer of {self.unverified} steps in a row, "
                "so that nothing is learned (the last step's events say how; mend it, "
                "or raise guard.unverified_steps)"
            )

    def passed(self, metrics: Mapping[str, float]) -> list[str]:
        """Count a step that was not skipped; return a line for each threshold that it has crossed."""
        self.skipped = 0
        limits, growth, lines = self.config, self.config.length_growth, []
        entropy, length = metrics.get("policy/entropy"), metrics.get("response/length_mean")
        if entropy is not None and limits.entropy_low is not None and entropy < limits.entropy_low:
            low = f"{entropy:.4g} is below guard.entropy_low {limits.entropy_low:g}"
            lines.append(f"alarm: policy/entropy {low}: the policy collapses")
        if growth is not None and length is not None and self.length and length > growth * self.length:
            more = f"{length:.4g} is more than guard.length_growth {growth:g} x {self.length:.4g}"
            lines.append(f"alarm: response/length_mean {more}, the step before: responses explode")
        for key in ("policy/clip_fraction_low", "policy/clip_fraction_high"):
            if limits.clip_fraction is not None and metrics.get(key, 0.0) > limits.clip_fraction:
                above = f"{metrics[key]:.4g} is above guard.clip_fraction {limits.clip_fraction:g}"
                lines.append(f"alarm: {key} {above}: updates leave the trust region")
        self.length = self.length if length is None else length
        return lines


class PreemptionHandler:
    """Saves checkpoints when they are due, and saves and leaves when the run is pre-empted. Every rank calls
    it alike.

    A run leaves after a step, or within one before any weight has changed: its samples are dropped."""

    def __init__(self, run: Run, writer: CheckpointWriter, stop: StopRequest) -> None:
        self.run, self.writer, self.stop = run, writer, stop
        self.enabled = run.config.checkpoint.every > 0
        self.longest_step = 0.0  # seconds
        self._spent = 0.0
        self._last_saved: tuple[str, int] | None = None
        self._last_step: tuple[str, int, State] | None = None
        self._since = time.monotonic()

    def start(self, stage: str, step: int) -> None:
        """Begin after `step`, of which there is a checkpoint, or at the beginning of the run."""
        self._last_saved, self._last_step = (stage, step), (stage, step, dict)
        self._since = time.monotonic()

    def take_seconds(self) -> float:
        """Return the seconds that checkpoints have taken of this rank's time since the last call."""
        spent, self._spent = self._spent, 0.0
        return spent

    def after_step(self, stage: str, step: int, state: State, *, due: bool, last: bool) -> None:
        """Save the step where that is `due`, and leave where the run was told to; nothing is put off after
        the `last` step.

        state: gives what a checkpoint of the step needs besides the models; called at any later time. Raises
        Interrupted on every rank where the run leaves, CheckpointError as CheckpointWriter."""
        self.longest_step = max(self.longest_step, time.monotonic() - self._since)
        self._since = time.monotonic()
        self._last_step = stage, step, state
        if self.enabled and due:
            self._save()
        if not last:
            self.check(self.longest_step + self.writer.seconds)

    def check(self, seconds: float = 0.0, *, changed: bool = False) -> None:
        """Move the checkpoint that is being written forward. Unless a weight has `changed` since the last
        step, leave where the run was told to, or has less than `seconds` left: nothing is lost but this
        step's work so far. Raises as `after_step`."""
        if not (self.writer.unfinished if changed else self.enabled):
            return
        should_stop = not changed and self.stop.should_stop(seconds)
        busy, should_stop = any_of(self.run.runtime, (self.writer.busy, should_stop))
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
        reason = next(text for text in gather_objects(self.run.runtime, self.stop.reason) if text)
        saved = f"step {step} of {stage} is saved in {self.run.config.run_dir}"
        if not step:
            saved = "before the first step, nothing is lost"
        raise Interrupted(f"{reason}: {saved}; the same command continues")

    def _save(self, now: bool = False) -> None:
        assert self._last_step is not None
        started = time.perf_counter()
        stage, step, state = self._last_step
        parts = ("critic",) if stage == PRETRAINING else tuple(self.run.models)
        self.writer.save(stage, step, parts, state, now=now)
        self._last_saved = stage, step
        self._spent += time.perf_counter() - started
