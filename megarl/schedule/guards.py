"""What a run does about numbers that are not finite, and which of the others it warns of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.errors import NumericalError
from megarl.config.schema import GuardConfig


class Guards:
    """skipped: steps in a row whose updates were not applied; length: mean response length of the last step that had one."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.skipped = 0
        self.length: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"skipped": self.skipped, "length": self.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undoes `state_dict`."""
        self.skipped, self.length = state["skipped"], state["length"]

    def failed(self, error: NumericalError) -> str:
        """Counts a step whose rest is skipped, and gives the line about it. Raises `error` with the last one that is allowed."""
        self.skipped += 1
        if self.skipped > self.config.skipped_steps or error.fatal:
            raise error
        return f"{error}; the rest of the step is skipped ({self.skipped} of at most {self.config.skipped_steps} in a row)"

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
