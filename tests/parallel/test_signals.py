"""A wish to leave is noted, by signal or by the clock, and nothing else happens."""

from __future__ import annotations

import os
import signal
import time

import pytest

from megarl.parallel.signals import END_TIME, StopRequest


def test_signals_are_noted_and_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequest([signal.SIGUSR1]) as stop:
        assert not stop.should_stop(1e9)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.should_stop() and stop.reason == "stopped by SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before


def test_time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest([], limit=1000, margin=100)
    assert not stop.should_stop(600) and stop.should_stop(1200) and "time limit" in str(stop.reason)
    monkeypatch.setenv(END_TIME, str(int(time.time()) + 1000))  # as Slurm sets it
    assert not StopRequest([], margin=100).should_stop(600)
    assert StopRequest([], margin=100).should_stop(1200)
    assert not StopRequest([], limit=5000).should_stop(1200)  # the configuration's comes first
    monkeypatch.setenv(END_TIME, "never")
    assert not StopRequest([]).should_stop(1e9)
