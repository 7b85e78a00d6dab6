"""The shared ranks of tests (tests/ranks.py) end with the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool, in_a_fork

ROOT = Path(__file__).parents[2]


def own(runtime: Any) -> tuple[int, int]:
    """Return the process ids of this rank and of its parent."""
    return os.getpid(), os.getppid()


def say_and_be_killed() -> None:
    ranks = RankPool(1, 1, 2).run(own)
    print(*{pid for pids in ranks for pid in pids}, in_a_fork(os.getpid), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_none_is_left_where_the_tests_are_killed() -> None:
    """Stopped ranks and their parent do not wait for each other.

    Ctrl-C kills pytest-xdist's processes in this way."""
    code = "from tests.parallel.test_ranks import say_and_be_killed; say_and_be_killed()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        left = [int(word) for word in tests.stdout.readline().split()]
        assert tests.wait(60) == -signal.SIGKILL and len(left) == 4
    end = time.monotonic() + 60
    while there := [pid for pid in left if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > end:
            for pid in there:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"still there a minute later: {there}")
        time.sleep(0.1)
