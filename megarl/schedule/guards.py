"""What a run does about numbers that are not finite and answers without a verdict, and which of the other numbers it warns of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.errors import ConfigError, NumericalError
from megarl.config.schema import GuardConfig


class Guards:
    """skipped: steps in a row whose updates were not applied; unverified: steps in a row without a verdict; length: mean
    response length of the last step that had one."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.skipped = self.unverified = 0
        self.length: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"skipped": self.skipped, "unverified": self.unverified, "length": self.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undoes `state_dict`."""
        self.skipped, self.unverified, self.length = state["skipped"], state.get("unverified", 0), state["length"]

    def failed(self, error: NumericalError) -> str:
        """Counts a step whose rest is skipped, and gives the line about it. Raises `error` with the last one that is allowed."""
        self.skipped += 1
        if self.skipped > self.config.skipped_steps or error.fatal:
            raise error
        return f"{error}; the rest of the step is skipped ({self.skipped} of at most {self.config.skipped_steps} in a row)"

    def judged(self, metrics: Mapping[str, float], errors: Mapping[str, int]) -> list[str]:
        """Counts a step whose answers all went without a verdict, and gives the line about it. errors: how often the
        verifier failed with what."""
        share = metrics.get("reward/unverified")
        if share is not None:  # recipe sft has no answers
            self.unverified = self.unverified + 1 if share == 1 else 0
        if share != 1:
            return []
        often = max(errors, key=lambda error: errors[error], default="see the steps before")
        limit = self.config.unverified_steps
        return [f"the verifier failed on every answer, most often: {often} ({self.unverified} of at most {limit} steps in a row)"]

    def check_judged(self) -> None:
        """Raises ConfigError after so many steps in a row as `guard.unverified_steps` allows."""
        if self.unverified >= self.config.unverified_steps:
            raise ConfigError(
                f"reward.verifier: it failed on every answer of {self.unverified} steps in a row, so that nothing is learned "
                "(the last step's events say how; mend it, or raise guard.unverified_steps)"
            )

    def passed(self, metrics: Mapping[str, float]) -> list[str]:
        """Counts a step that went well, and gives a line for each threshold that its metrics have crossed."""
        self.skipped = 0
        lines = [f"alarm: {line}" for line in self._alarms(metrics)]
        self.length = metrics.get("response/length_mean", self.length)
        return lines

    def _alarms(self, metrics: Mapping[str, float]) -> Iterator[str]:
        limits, length = self.config, metrics.get("response/length_mean")
        entropy = metrics.get("policy/entropy")
        if entropy is not None and limits.entropy_low is not None and entropy < limits.entropy_low:
            yield f"policy/entropy {entropy:.4g} is below guard.entropy_low {limits.entropy_low:g}: the policy collapses"
        if limits.length_growth is not None and length is not None and self.length and length > limits.length_growth * self.length:
            yield (
                f"response/length_mean {length:.4g} is more than guard.length_growth {limits.length_growth:g} x {self.length:.4g}, "
                "the step before: responses explode"
            )
        for key in ("policy/clip_fraction_low", "policy/clip_fraction_high"):
            if limits.clip_fraction is not None and metrics.get(key, 0.0) > limits.clip_fraction:
                yield f"{key} {metrics[key]:.4g} is above guard.clip_fraction {limits.clip_fraction:g}: updates leave the trust region"
