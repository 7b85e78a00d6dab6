"""Guards against non-finite numbers and ungraded steps, and alarms about metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch

from megarl.config.errors import ConfigError, NumericalError
from megarl.config.files import write_atomic
from megarl.config.schema import GuardConfig
from megarl.parallel.comm import any_rank
from megarl.schedule.run import Run, Step

# Lengths differ if the log of their ratio exceeds this many standard errors.
STANDARD_ERRORS = 3.0


class Guards:
    """Counts consecutive bad steps, which end the run, and compares metrics with earlier steps.

    windows     most steps that sample one response (`rollout.window`). In earlier steps lengths are ignored,
                because long responses are still unfinished
    skipped     consecutive steps with a non-finite number
    unverified  consecutive steps in which every response had an error
    length      moving average of the response length, weight 1/2 for the newest, and its standard error
    growth      consecutive steps above `guard.length_growth`: number, sums of means and of squared errors
    highest     highest value of each metric that may collapse
    highest_length_error  standard error of the highest length
    collapsed   metrics, as of the last step"""

    def __init__(self, config: GuardConfig, windows: int = 1) -> None:
        self.config, self.windows = config, windows
        self.skipped = self.unverified = 0
        self.length: tuple[float, float] | None = None
        self.growth, self.highest_length_error = (0, 0.0, 0.0), 0.0
        self.highest: dict[str, float] = {}
        self.collapsed: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        return {
            "skipped": self.skipped,
            "unverified": self.unverified,
            "length": self.length,
            "longer": self.growth,
            "longest": self.highest_length_error,
            "highest": dict(self.highest),
            "collapsed": sorted(self.collapsed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped, length = state["skipped"], state["length"]
        self.length = (length, 0.0) if isinstance(length, float) else length and tuple(length)
        self.growth = tuple(state.get("longer", (0, 0.0, 0.0)))
        self.highest_length_error = state.get("longest", 0.0)
        self.unverified = state.get("unverified", 0)
        self.highest = dict(state.get("highest", {}))
        self.collapsed = set(state.get("collapsed", ()))

    def count_failure(self, error: NumericalError) -> str:
        self.skipped += 1
        if self.skipped > self.config.skipped_steps or error.fatal:
            raise error
        count = f"{self.skipped} of at most {self.config.skipped_steps} in a row"
        return f"{error}; the rest of the step is skipped ({count})"

    def count_ungraded(self, metrics: Mapping[str, float], errors: Mapping[str, int]) -> list[str]:
        """Count consecutive steps in which every response has an error. Return event lines.

        reward/unverified is the share of responses with an error, reward/ungraded that without a grade."""
        share = metrics.get("reward/unverified")
        if share is not None:  # recipe sft has no answers
            self.unverified = self.unverified + 1 if share == 1 else 0
        frequent_error = max(errors, key=lambda error: errors[error], default="see the steps before")
        if share != 1:
            ungraded = metrics.get("reward/ungraded", 0.0)
            ungraded_text = f"{ungraded:.1%} of the responses could not be graded and are left out"
            return [f"{ungraded_text}; the most frequent failure: {frequent_error}"] if ungraded else []
        count = f"{self.unverified} of at most {self.config.unverified_steps} steps in a row"
        return [f"every response has an error; the most frequent: {frequent_error} ({count})"]

    def check_graded(self) -> None:
        if self.unverified >= self.config.unverified_steps:
            raise ConfigError(
                f"guard.unverified_steps: every response of {self.unverified} steps in a row had an error, "
                "so nothing is learned (fix the errors in the last step's events, or raise the limit)"
            )

    def count_success(self, metrics: Mapping[str, float], number: int) -> list[str]:
        """Reset the count of skipped steps. Return alarms about the metrics of step `number`."""
        self.skipped, limits, lines = 0, self.config, list[str]()
        entropy = metrics.get("policy/entropy")
        length = None if number < self.windows else metrics.get("response/length_mean")
        error = metrics.get("response/length_error", 0.0)  # unknown with one prompt
        if entropy is not None and limits.entropy_low is not None and entropy < limits.entropy_low:
            entropy_text = f"{entropy:.4g} is below guard.entropy_low {limits.entropy_low:g}"
            lines.append(f"alarm: policy/entropy {entropy_text}: the policy collapses")
        if limits.length_growth is not None and length is not None:
            lines += self._check_growth(length, error, limits.length_growth)
        if entropy is not None:
            limit = "entropy_collapse", limits.entropy_collapse
            lines += self._check_collapse("policy/entropy", entropy, None, *limit)
        if length is not None:
            limit = "length_collapse", limits.length_collapse
            lines += self._check_collapse("response/length_mean", length, error, *limit)
        for key in ("policy/clip_fraction_low", "policy/clip_fraction_high"):
            if limits.clip_fraction is not None and metrics.get(key, 0.0) > limits.clip_fraction:
                clip_text = f"{metrics[key]:.4g} is above guard.clip_fraction {limits.clip_fraction:g}"
                lines.append(f"alarm: {key} {clip_text}: updates leave the trust region")
        return lines

    def _check_collapse(
        self, key: str, value: float, error: float | None, limit: str, share: float | None
    ) -> list[str]:
        """Return an alarm if a metric falls below `share` of its highest value, unless that may be noise.

        error: standard error of a length; None: any fall counts"""
        if value >= self.highest.get(key, value):
            self.highest[key] = value
            self.highest_length_error = self.highest_length_error if error is None else error
        highest = self.highest[key]
        if share is None or value >= share * highest:
            self.collapsed.discard(key)
            return []
        is_noise = error is not None and not _differ((value, error), (highest, self.highest_length_error))
        if key in self.collapsed or is_noise:
            return []
        self.collapsed.add(key)
        collapse_text = f"{value:.4g} has fallen below guard.{limit} {share:g} x {highest:.4g}"
        return [f"alarm: {key} {collapse_text}, the highest of the run: it collapses"]

    def _check_growth(self, length: float, error: float, growth: float) -> list[str]:
        """Return an alarm if lengths grow. If growth may be noise, average it with the next steps first."""
        baseline, lines = self.length, list[str]()
        if baseline is not None and length > growth * baseline[0] > 0:
            steps, total, squares = self.growth
            self.growth = steps, total, squares = steps + 1, total + length, squares + error**2
            mean = total / steps
            if not _differ((mean, math.sqrt(squares) / steps), baseline):
                return []
            growth_text = f"{mean:.4g} is more than guard.length_growth {growth:g} x {baseline[0]:.4g}"
            lines.append(f"alarm: response/length_mean {growth_text}, the steps before: responses explode")
            baseline = None
        self.growth = 0, 0.0, 0.0
        average = baseline and ((length + baseline[0]) / 2, math.hypot(error, baseline[1]) / 2)
        self.length = average or (length, error)
        return lines


def _differ(one: tuple[float, float], other: tuple[float, float]) -> bool:
    (a, a_error), (b, b_error) = one, other
    if not a or not b:
        return a != b
    return abs(math.log(a / b)) > STANDARD_ERRORS * math.hypot(a_error / a, b_error / b)


def keep_failed_batch(run: Run, step: Step, phase: str, error: NumericalError) -> NumericalError:
    """Write the batch to run_dir/failed, and add the place to the error."""
    folder, batch = run.config.run_dir / "failed", step.batch
    columns = {name: getattr(batch, name) for name in ("tokens", "cu_seqlens", "response_mask")}
    path = folder / f"{step.stage}-{step.number:06d}-rank{run.runtime.rank}.pt"
    content, is_missing = BytesIO(), True
    torch.save({**columns, **batch.columns}, content)  # to memory: torch hides a disk's errors
    with run.dispensable.file(path):
        folder.mkdir(exist_ok=True)
        write_atomic(path, content.getvalue())
        is_missing = False
    # Wait for all ranks: when one ends, the launcher ends the others.
    location = "could not be written to" if any_rank(run.runtime, is_missing) else "is in"
    located = NumericalError(f"step {step.number}, phase {phase}: {error}; the batch {location} {folder}")
    located.fatal = error.fatal
    return located
