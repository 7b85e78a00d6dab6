"""Requests to stop, by a signal or a time limit, are only recorded."""

from __future__ import annotations

import atexit
import errno
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cli import ranks, train
from megarl.cli.ranks import run_rank
from megarl.config.errors import ConfigError, DeviceMemoryError, Interrupted, MegarlError
from megarl.config.schema import ParallelConfig, RolloutConfig
from megarl.parallel import runtime
from megarl.parallel.launch import LOST, launch
from megarl.parallel.lease import Lease, hold_lease
from megarl.parallel.signals import END_TIME, StopRequest
from tests.gpu.scene import TINY
from tests.ranks import in_a_fork


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
    assert not StopRequest([], limit=5000).should_stop(1200)  # the configured limit comes first
    monkeypatch.setenv(END_TIME, "never")
    assert not StopRequest([]).should_stop(1e9)


def tell_the_launcher_and_be_lost() -> int:
    """Exit as a lost rank, once the launcher has passed SIGTERM on to this rank."""
    told: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: told.append(number))
    os.kill(os.getppid(), signal.SIGTERM)
    end = time.monotonic() + 60
    while not told and time.monotonic() < end:
        time.sleep(0.01)
    return LOST[0] if told else 3


def launch_and_be_told(folder: Path) -> tuple[int, str | None]:
    with StopRequest([signal.SIGUSR1, signal.SIGTERM]) as stop:
        code = launch(tell_the_launcher_and_be_lost, ParallelConfig(device="cpu"), folder, grace=60.0)
        return code, stop.reason


def test_who_launches_knows_that_it_was_told_to_stop_though_a_rank_was_lost(tmp_path: Path) -> None:
    """A lost rank's exit code alone would restart the ranks."""
    assert in_a_fork(launch_and_be_told, tmp_path) == (LOST[0], "stopped by SIGTERM")


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (Interrupted("told to end"), False),
        (DeviceMemoryError("full"), True),
        (OSError(errno.ENOSPC, "No space left on device", "/run/new"), True),
        (ConfigError("no room for rollouts"), False),
    ],
    ids=["every rank leaves", "one rank fails", "a full disk that nobody foresaw", "all engines fail"],
)
def test_only_a_rank_that_fails_alone_leaves_without_the_others(
    error: MegarlError | OSError,
    failed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rank is the first with an engine, which reports an error of all engines.

    Trainers may not get that error."""
    left: list[bool] = []
    at_exit: list[int] = []

    def stop(*, failed: bool) -> bool:  # as on NCCL
        left.append(failed)
        return not failed

    monkeypatch.setattr(runtime, "start", lambda *_, **__: SimpleNamespace(rank=3, first_engine=3))
    monkeypatch.setattr(runtime, "stop", stop)
    monkeypatch.setattr(atexit, "register", lambda _, code: at_exit.append(code))

    def job(_: Any) -> None:
        raise error

    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config: Any = SimpleNamespace(
        parallel=None, seed=0, model=SimpleNamespace(path=tmp_path), rollout=RolloutConfig(engine="sglang")
    )
    with hold_lease(tmp_path / "run", "megarl test", remedy="") as lease:
        code = error.code if isinstance(error, MegarlError) else 2
        assert run_rank(config, job, lease, tmp_path, launched=False) == code
    assert left == [failed]
    assert at_exit == [code] * failed
    (line,) = capsys.readouterr().err.splitlines()
    said = str(error) if isinstance(error, MegarlError) else "/run/new: cannot be written: No space left on"
    assert line.startswith(f"megarl: {'rank 3: ' * failed}{said}")


def test_a_rank_that_kept_its_groups_ends_with_its_code_before_pythons_end() -> None:
    if (child := os.fork()) == 0:
        atexit.register(os._exit, 3)  # like torch's exit handler, which might wait
        atexit.register(ranks._leave, 7)
        atexit._run_exitfuncs()
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_ranks_that_are_started_anew_keep_the_jobs_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []
    monkeypatch.setattr(train, "_train", lambda config, stop, lease, *, launched: seen.append(stop.end) or 0)
    checkpoint = SimpleNamespace(every=1, time_limit=1000.0, time_margin=0.0)
    config: Any = SimpleNamespace(checkpoint=checkpoint)
    assert train._train_launched(config, 123.0, Lease(Path("lease"), 1.0)) == 0 and seen == [123.0]
