"""The lease of a folder: one command at a time may write, even if an owner dies, stops or is silent."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.errors import ConfigError, Interrupted, LeaseError
from megarl.parallel import lease as module
from megarl.parallel.lease import MARGIN, Lease, hold_lease, renew_held

WAIT = 60.0  # seconds, a generous limit for brief waits


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def take(folder: Path, **options: Any) -> Any:
    return hold_lease(folder, "megarl test", **{"limit": 60.0, "remedy": "wait for it", **options})


def forked(work: Callable[[], None]) -> int:
    """Return the id of a child that runs `work` and exits with code 0, or 9 if that raises."""
    if (child := os.fork()) == 0:
        code = 9
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def holder(folder: Path, limit: float = 60.0) -> int:
    """Return the id of a child that has the lease and writes into the folder all the time."""

    def work() -> None:
        with take(folder, limit=limit) as lease, lease.kept():
            for number in range(100_000):
                (folder / "written").write_text(str(number))
                time.sleep(0.01)

    child = forked(work)
    until(lambda: (folder / "written").exists())
    return child


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def ended(child: int) -> int:
    """Wait for a child; return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_second_is_refused_until_the_first_has_left(folder: Path) -> None:
    with take(folder), pytest.raises(ConfigError) as refused, take(folder, key="run_dir"):
        pass
    line = str(refused.value)
    here = re.escape(f"{module.socket.gethostname()} (pid {os.getpid()}")
    assert re.match(rf"run_dir: {folder}: megarl test runs there since [-\d]+ [:\d]+ on {here}", line)
    assert re.search(r"gave its last sign of life \d+ s ago \(wait for it\)$", line)
    assert not list(folder.iterdir())
    (folder / "lease-000007.released").touch()
    with take(folder):
        assert [path.name for path in folder.iterdir()] == ["lease-000008.json"]
    assert [path.name for path in folder.iterdir()] == ["lease-000008.released"]


def test_waits_for_the_first(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with take(folder):
            (folder / "written").touch()
            until(lambda: (folder / "heard").exists())

    said: list[str] = []

    def hear() -> bool:
        said.append(capfd.readouterr().err)
        if "; waits at most 60 s for it" in "".join(said):
            (folder / "heard").touch()
        return False

    child = forked(work)
    until(lambda: (folder / "written").exists())
    with take(folder, wait=WAIT, stop=hear):
        assert ended(child) == 0
    assert (folder / "heard").exists()


def test_told_to_stop_while_it_waits(folder: Path) -> None:
    with take(folder), pytest.raises(Interrupted, match="stopped, while megarl test runs there"):  # noqa: SIM117
        with take(folder, wait=3600.0, stop=lambda: True):
            pass


def test_of_many_at_once_one_has_it(folder: Path) -> None:
    go = time.time() + 1.0

    def work() -> None:
        time.sleep(max(0.0, go - time.time()))
        with take(folder):
            fellows = [path for path in folder.iterdir() if path.name.startswith("owner-")]
            own = folder / f"owner-{os.getpid()}"
            own.touch()
            time.sleep(0.3)
            assert not fellows
            own.unlink()

    children = [forked(work) for _ in range(8)]
    codes = [ended(child) for child in children]
    # Late children were refused, or got the lease after the previous owner had left.
    assert set(codes) <= {0, 9} and 0 in codes
    assert not list(folder.glob("owner-*"))


def test_after_kill_9_the_next_has_it_at_once(folder: Path) -> None:
    end(holder(folder, limit=3600.0))  # far too long to wait for its silence
    with take(folder):
        pass


def test_a_process_that_is_left_of_the_first_keeps_it(folder: Path) -> None:
    """The launcher is dead, but a rank that it forked is alive."""
    folder.mkdir()

    def launcher() -> None:
        with take(folder, limit=3600.0):
            rank = forked(lambda: time.sleep(WAIT))
            (folder / "rank").write_text(str(rank))
            time.sleep(WAIT)

    child = forked(launcher)
    until(lambda: (folder / "rank").exists() and (folder / "rank").read_text() != "")
    rank = int((folder / "rank").read_text())
    end(child)
    with pytest.raises(ConfigError, match="megarl test runs there"), take(folder):
        pass
    os.kill(rank, signal.SIGKILL)
    with take(folder):
        pass


def test_a_stopped_owner_is_dead_before_the_next_has_it(folder: Path) -> None:
    """A stopped owner keeps the lease until a kernel timer kills it; once resumed it would write again."""
    child = holder(folder, limit=3600.0)
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(ConfigError, match="megarl test runs there"), take(folder, limit=3600.0):
        pass
    end(child)
    (folder / "written").unlink()
    child = holder(folder, limit=3.0)
    os.kill(child, signal.SIGSTOP)
    written = (folder / "written").read_text()
    with take(folder, wait=WAIT):
        assert os.waitstatus_to_exitcode(os.waitpid(child, os.WNOHANG)[1]) == -signal.SIGKILL
        assert (folder / "written").read_text() == written


def of_another_machine(folder: Path, silent: float, machines: int = 1) -> Path:
    """Make a lease of a process on another machine that was renewed `silent` seconds ago."""
    for earlier in folder.glob("lease-*"):
        earlier.unlink()
    with take(folder):
        (path,) = folder.glob("lease-*.json")
        owner = json.loads(path.read_text()) | {"machine": "another", "host": "node7", "machines": machines}
    path.write_text(json.dumps(owner))
    os.utime(path, (time.time() - silent,) * 2)
    return path


@pytest.mark.parametrize("machines", [1, 2])
def test_one_of_another_machine_is_taken_over_when_it_is_silent(folder: Path, machines: int) -> None:
    of_another_machine(folder, 60.0 + MARGIN - 30.0, machines)
    with pytest.raises(ConfigError, match=r"on node7 .*last sign of life \d\d s ago"), take(folder):
        pass
    of_another_machine(folder, 60.0 + MARGIN + 1.0, machines)
    with take(folder):
        pass


def test_one_of_several_machines_is_not_gone_with_its_processes_here(folder: Path) -> None:
    path = of_another_machine(folder, 0.0, machines=2)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": module._machine()}))
    with pytest.raises(ConfigError, match="on node7"), take(folder):
        pass


@pytest.mark.parametrize("text", ["", '{"command": "megarl tr', "[]"])
def test_half_written_one(folder: Path, text: str) -> None:
    """A command is writing it, or died meanwhile."""
    folder.mkdir()
    path = folder / "lease-000004.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="another command runs there"), take(folder):
        pass
    os.utime(path, (time.time() - 60.0 - MARGIN - 1.0,) * 2)
    with take(folder):
        assert [one.name for one in folder.iterdir()] == ["lease-000005.json"]


def test_whoever_loses_it_ends_at_once(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEWALS", 300)  # checks every 0.2 s, with no limit during the test
    child = holder(folder)
    (path,) = folder.glob("lease-*")
    path.unlink()
    assert ended(child) == LeaseError.code
    line = capfd.readouterr().err
    assert line.startswith(f"megarl: {folder}: its lease lease-000001.json is gone: another command has ")


def test_it_is_lost_while_ranks_run(folder: Path) -> None:
    """The launcher, which starts no thread before it forks, checks the lease whenever it checks its ranks."""
    with pytest.raises(LeaseError, match="has taken it over"), take(folder) as lease:
        renew_held()
        lease.path.unlink()
        module._held_leases[lease].renewed -= lease.limit / module.RENEWALS  # the next renewal is due
        with pytest.raises(LeaseError, match="is gone"):
            renew_held()


def test_a_file_system_that_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed renewals are tolerated until the lease is almost over."""

    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with take(folder) as lease:
        monkeypatch.setattr(module.os, "utime", refuse)
        lease.renew()
        module._held_leases[lease].renewed -= 0.9 * lease.limit
        with pytest.raises(LeaseError, match="could not be renewed for 54 s: Input/output error"):
            lease.renew()


def test_another_process_of_the_job_keeps_it_too(folder: Path) -> None:
    """The other process is a rank that was not forked from the owner."""
    with take(folder) as lease:
        again = Lease(lease.path, lease.limit)
        held = module._held_leases.pop(lease)  # as in another process
        with again.kept():
            held.file.close()
            with pytest.raises(ConfigError, match="megarl test runs there"), take(folder):
                pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="file/run: cannot be written: Not a directory"),
        take(tmp_path / "file" / "run"),
    ):
        pass
