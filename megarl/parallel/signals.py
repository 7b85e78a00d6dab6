"""Requests to save and leave. Imports quickly, so that no signal is lost meanwhile."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Self

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
END_TIME = "SLURM_JOB_END_TIME"  # Slurm's, seconds since 1970


class StopRequest:
    """Treats `signals` in the block as requests to leave at the next safe point.

    limit   seconds until this process must end; None: Slurm's limit
    margin  seconds to leave earlier"""

    def __init__(
        self, signals: Sequence[signal.Signals], limit: float | None = None, margin: float = 0.0
    ) -> None:
        end_text = os.environ.get(END_TIME, "") if limit is None else str(time.time() + limit)
        self.end = float(end_text) - margin if end_text.replace(".", "", 1).isdigit() else None
        self.reason: str | None = None
        self._signals = {number: signal.getsignal(number) for number in signals}

    def __enter__(self) -> Self:
        for number in self._signals:
            signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._signals.items():
            signal.signal(number, handler)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        self.reason = f"stopped by {signal.Signals(number).name}"

    def should_stop(self, seconds: float = 0.0) -> bool:
        """Return whether to leave before work that takes `seconds`."""
        if self.reason is None and self.end is not None and time.time() + seconds > self.end:
            self.reason = "stopped, as the time limit is near"
        return self.reason is not None


def follow_launcher(parent: int | None = None) -> None:
    """Get SIGTERM when the parent ends, even if killed. Exit if it is not `parent` (pid) any more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent is not None and os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)
