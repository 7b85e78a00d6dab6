"""Save the checkpoints that are due, and leave where the run was told to: after steps and between phases."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from megarl.config.errors import Interrupted
from megarl.parallel.comm import any_of, gather_objects
from megarl.parallel.signals import StopRequest
from megarl.schedule.run import Run
from megarl.training.checkpoint import PRETRAINING
from megarl.training.saving import CheckpointWriter


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
        self._last_step: tuple[str, int, Mapping[str, Any]] | None = None
        self._since = time.monotonic()

    def start(self, stage: str, step: int) -> None:
        """Begin after `step`, of which there is a checkpoint, or at the beginning of the run."""
        self._last_saved, self._last_step = (stage, step), (stage, step, {})
        self._since = time.monotonic()

    def take_seconds(self) -> float:
        """Return the seconds that checkpoints have taken of this rank's time since the last call."""
        spent, self._spent = self._spent, 0.0
        return spent

    def after_step(self, stage: str, step: int, state: Mapping[str, Any], *, due: bool, last: bool) -> None:
        """Save the step where that is `due`, and leave where the run was told to; nothing is put off after
        the `last` step.

        state: what a checkpoint of the step needs besides the models, as CheckpointWriter.save takes it. It
        is kept until the next step has ended, as the run may be told to leave before that. Raises Interrupted
        on every rank where the run leaves, CheckpointError as CheckpointWriter."""
        self.longest_step = max(self.longest_step, time.monotonic() - self._since)
        self._since = time.monotonic()
        self._last_step = stage, step, state
        if self.enabled and due:
            self._save()
        if not last:
            self.check(self.longest_step + self.writer.seconds)

    def check(self, seconds: float = 0.0, *, weights_changed: bool = False) -> None:
        """Move the checkpoint that is being written forward. Unless `weights_changed` since the last
        step, leave where the run was told to, or has less than `seconds` left: nothing is lost but this
        step's work so far. Raises as `after_step`."""
        if not (self.writer.unfinished if weights_changed else self.enabled):
            return
        should_stop = not weights_changed and self.stop.should_stop(seconds)
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
