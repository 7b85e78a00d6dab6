"""What ends a run early, numbers that are not finite and a verifier that fails on every answer, and alarms
about metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch

from megarl.config.errors import ConfigError, NumericalError
from megarl.config.files import write_whole
from megarl.config.schema import GuardConfig
from megarl.parallel.comm import any_rank
from megarl.schedule.run import Run, Step


class Guards:
    """Counts of steps in a row, which end the run when there are too many.

    windows      steps that may draw one response (`rollout.window`): in those before, longer ones than they
                 have had time for have not ended, and lengths say nothing
    skipped      steps in a row whose updates were not applied
    unverified   steps in a row without a verdict
    length       mean response length of the last step that had one, in tokens
    highest      metrics that may collapse: their highest value so far
    collapsed    those of them that were below their share of it in the last step"""

    def __init__(self, config: GuardConfig, windows: int = 1) -> None:
        self.config, self.windows = config, windows
        self.skipped = self.unverified = 0
        self.length: float | None = None
        self.highest: dict[str, float] = {}
        self.collapsed: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        kept = {name: getattr(self, name) for name in ("skipped", "unverified", "length")}
        return {**kept, "highest": dict(self.highest), "collapsed": sorted(self.collapsed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set what `state_dict` returned."""
        self.skipped, self.length = state["skipped"], state["length"]
        self.unverified = state.get("unverified", 0)
        self.highest = dict(state.get("highest", {}))
        self.collapsed = set(state.get("collapsed", ()))

    def failed(self, error: NumericalError) -> str:
        """Count a step whose rest is skipped; return the line about it. Raises `error` after too many."""
        self.skipped += 1
        if self.skipped > self.config.skipped_steps or error.fatal:
            raise error
        count = f"{self.skipped} of at most {self.config.skipped_steps} in a row"
        return f"{error}; the rest of the step is skipped ({count})"

    def judged(self, metrics: Mapping[str, float], errors: Mapping[str, int]) -> list[str]:
        """Count a step in which no answer got a verdict, and return the line about it, or about responses
        that were not judged. errors: the verifier's errors and how often each occurred."""
        share = metrics.get("reward/unverified")
        if share is not None:  # recipe sft has no answers
            self.unverified = self.unverified + 1 if share == 1 else 0
        often = max(errors, key=lambda error: errors[error], default="see the steps before")
        if share != 1:
            unjudged = metrics.get("reward/unjudged", 0.0)
            left_out = f"{unjudged:.1%} of the responses were not judged and are left out"
            return [f"{left_out}; the verifier's most frequent failure: {often}"] if unjudged else []
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

    def passed(self, metrics: Mapping[str, float], number: int) -> list[str]:
        """Count step `number`, which was not skipped; return a line for each threshold that it has
        crossed."""
        self.skipped = 0
        if number < self.windows:
            metrics = {name: value for name, value in metrics.items() if name != "response/length_mean"}
        limits, growth, lines = self.config, self.config.length_growth, []
        entropy, length = metrics.get("policy/entropy"), metrics.get("response/length_mean")
        if entropy is not None and limits.entropy_low is not None and entropy < limits.entropy_low:
            low = f"{entropy:.4g} is below guard.entropy_low {limits.entropy_low:g}"
            lines.append(f"alarm: policy/entropy {low}: the policy collapses")
        if growth is not None and length is not None and self.length and length > growth * self.length:
            more = f"{length:.4g} is more than guard.length_growth {growth:g} x {self.length:.4g}"
            lines.append(f"alarm: response/length_mean {more}, the step before: responses explode")
        for key, limit, share in (
            ("policy/entropy", "entropy_collapse", limits.entropy_collapse),
            ("response/length_mean", "length_collapse", limits.length_collapse),
        ):
            if (value := metrics.get(key)) is None:
                continue
            highest = self.highest[key] = max(value, self.highest.get(key, value))
            collapsed = share is not None and value < share * highest
            if collapsed and key not in self.collapsed:  # once, and not in each of the steps that stay there
                below = f"{value:.4g} has fallen below guard.{limit} {share:g} x {highest:.4g}"
                lines.append(f"alarm: {key} {below}, the highest of the run: it collapses")
            (self.collapsed.add if collapsed else self.collapsed.discard)(key)
        for key in ("policy/clip_fraction_low", "policy/clip_fraction_high"):
            if limits.clip_fraction is not None and metrics.get(key, 0.0) > limits.clip_fraction:
                above = f"{metrics[key]:.4g} is above guard.clip_fraction {limits.clip_fraction:g}"
                lines.append(f"alarm: {key} {above}: updates leave the trust region")
        self.length = self.length if length is None else length
        return lines


def keep_failed_batch(run: Run, step: Step, phase: str, error: NumericalError) -> NumericalError:
    """Write the batch of a phase that failed to run_dir/failed, one file a rank, and return the error with
    where it is."""
    folder, experience = run.config.run_dir / "failed", step.local.experience
    parts = {name: getattr(experience, name) for name in ("tokens", "cu_seqlens", "response_mask")}
    path = folder / f"{step.stage}-{step.number:06d}-rank{run.runtime.rank}.pt"
    content, missing = BytesIO(), True
    torch.save({**parts, **experience.columns}, content)  # which to a file hides a disk's errors
    with run.dispensable.file(path):
        folder.mkdir(exist_ok=True)
        write_whole(path, content.getvalue())
        missing = False
    # All ranks wait here: the launcher ends the other ranks when one ends, also while they write.
    place = "could not be written to" if any_rank(run.runtime, missing) else "is in"
    located = NumericalError(f"step {step.number}, phase {phase}: {error}; the batch {place} {folder}")
    located.fatal = error.fatal
    return located
