"""Between two phases: checkpoints on their way to the disk move on, and a run that is to leave saves and leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from megarl.config.errors import Interrupted
from megarl.parallel.comm import any_of, gather_objects
from megarl.parallel.signals import StopRequest
from megarl.schedule.run import Run
from megarl.training.saving import CheckpointWriter

State = Callable[[], Mapping[str, Any]]


class SafePoints:
    """Every rank has one and calls it alike.

    A run leaves after a step, or within one as long as no weight has changed in it: what the step has sampled is dropped then."""

    def __init__(self, run: Run, writer: CheckpointWriter, stop: StopRequest) -> None:
        self.run, self.writer, self.stop = run, writer, stop
        self.saves = run.config.checkpoint.every > 0
        self.longest = 0.0  # seconds, of a step
        self._spent = 0.0
        self._saved: tuple[str, int] | None = None
        self._done: tuple[str, int, State] | None = None
        self._since = time.monotonic()

    def begins(self, stage: str, step: int) -> None:
        """The run stands after `step`, of which it has a checkpoint, or at its beginning."""
        self._saved, self._done = (stage, step), (stage, step, dict)
        self._since = time.monotonic()

    def take_seconds(self) -> float:
        """What checkpoints have taken of this rank's time since the last call."""
        spent, self._spent = self._spent, 0.0
        return spent

    def after_step(self, stage: str, step: int, state: State, *, due: bool, last: bool) -> None:
        """A step is done; `state` gives what a checkpoint of it needs besides the learners, at any later time. Saves where it is `due`;
        after the `last` step nothing is left that could be put off.

        Raises Interrupted on every rank where the run is to leave now, and CheckpointError as CheckpointWriter."""
        self.longest, self._since = max(self.longest, time.monotonic() - self._since), time.monotonic()
        self._done = stage, step, state
        if self.saves and due:
            self._save()
        if not last:
            self.within_step(self.longest + self.writer.seconds)

    def within_step(self, seconds: float = 0.0) -> None:
        """No weight has changed since the last step: to leave here costs nothing but this step's work so far. Errors as `after_step`."""
        if not self.saves:
            return
        busy, wanted = any_of(self.run.runtime, (self.writer.busy, self.stop.wanted(seconds)))
        if not busy:
            self._advance()
        if wanted and self._done is not None:
            self._leave()

    def during_updates(self) -> None:
        """Weights are changing: only the checkpoint of the step before moves on."""
        if self.writer.unfinished and not any_of(self.run.runtime, (self.writer.busy,))[0]:
            self._advance()

    def _advance(self) -> None:
        began = time.perf_counter()
        self.writer.advance()
        self._spent += time.perf_counter() - began

    def _save(self, now: bool = False) -> None:
        assert self._done is not None
        began = time.perf_counter()
        stage, step, state = self._done
        parts = ("critic",) if stage == "value_pretraining" else tuple(self.run.learners)
        self.writer.save(stage, step, parts, state, now=now)
        self._saved = stage, step
        self._spent += time.perf_counter() - began

    def _leave(self) -> None:
        assert self._done is not None
        stage, step, _ = self._done
        if (stage, step) != self._saved:
            self._save(now=True)
        self.writer.finish()
        reason = next(text for text in gather_objects(self.run.runtime, self.stop.reason) if text)
        saved = f"step {step} of {stage} is saved in {self.run.config.run_dir}" if step else "before the first step, nothing is lost"
        raise Interrupted(f"{reason}: {saved}; the same command continues")
