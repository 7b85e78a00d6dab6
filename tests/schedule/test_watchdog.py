"""Hang reports of processes that share only a folder: the slow rank, and each rank's phase."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from megarl.config import phases
from megarl.parallel.launch import HUNG
from megarl.schedule import recovery, trainer
from megarl.schedule.watchdog import Report, find_culprit, read_beat

ROOT = Path(__file__).parents[2]
RANK = """
import sys, time
from pathlib import Path
from megarl.config.schema import WatchdogConfig
from megarl.schedule.watchdog import Watchdog

def stand_still():
    time.sleep(600)

rank, limit, silence = int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
# Together: the limits and the silence of this test begin when both are there.
(Path(sys.argv[1]) / f"ready-{rank}").touch()
while not (Path(sys.argv[1]) / f"ready-{1 - rank}").exists():
    time.sleep(0.01)
config = WatchdogConfig(limit=600, limits={"rollout": limit}, silence=silence, period=0.2)
with Watchdog(Path(sys.argv[1]), rank, 2, config) as watchdog:
    watchdog.depths["answers"] = lambda: 7
    watchdog.phase("rollout", "train", 12)
    stand_still()
"""


@contextmanager
def two_ranks(folder: Path, limit: float, silence: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Run two processes that stop in phase `rollout`; they are ended after the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RANK, str(folder)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(limit), str(silence)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        end = time.monotonic() + 200
        while any((read_beat(folder / "heartbeat", rank) or {}).get("phase") != "rollout" for rank in (0, 1)):
            assert time.monotonic() < end and all(process.poll() in (None, HUNG) for process in started)
            time.sleep(0.05)
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=30)


@pytest.mark.slow
def test_a_stopped_rank_is_found_by_its_neighbour(tmp_path: Path) -> None:
    with two_ranks(tmp_path, limit=600, silence=6) as processes:
        os.kill(processes[1].pid, signal.SIGSTOP)
        _, said = processes[0].communicate(timeout=200)
        assert processes[0].returncode == HUNG
        assert psutil.Process(processes[1].pid).status() == psutil.STATUS_STOPPED
    (report,) = tmp_path.glob("hang-*.txt")
    assert "the run hangs: rank 1 does not answer" in said and str(report) in said and said.count("\n") == 1
    text = report.read_text()
    assert text.startswith("culprit: rank 1 does not answer")
    assert "was last seen in phase rollout of train step 12" in text
    assert "rank 0: train step 12, phase rollout for" in text
    assert "7 answers" in text and "in stand_still" in text


@pytest.mark.slow
def test_a_phase_over_its_limit_is_reported_with_every_stack(tmp_path: Path) -> None:
    with two_ranks(tmp_path, limit=6, silence=600) as processes:
        codes = [process.wait(200) for process in processes]
    assert codes == [HUNG, HUNG]
    (report,) = tmp_path.glob("hang-*.txt")  # written by one of the two
    text = report.read_text()
    assert "why now: phase rollout has taken" in text and text.count("in stand_still") >= 2
    assert all(f"rank {rank}: train step 12, phase rollout for" in text for rank in (0, 1))


@pytest.mark.slow
def test_a_run_that_hangs_ends_though_its_folder_is_gone(tmp_path: Path) -> None:
    with two_ranks(tmp_path, limit=6, silence=600) as processes:
        (tmp_path / "heartbeat").rename(tmp_path / "away")
        (tmp_path / "heartbeat").write_text("")
        said = [process.communicate(timeout=200)[1] for process in processes]
        codes = [process.returncode for process in processes]
    assert codes == [HUNG, HUNG]
    assert all(
        "phase rollout has taken" in text and "no report could be written" in text and text.count("\n") == 1
        for text in said
    )


def made(rank: int, phases: int, waits_in: str | None, phase: str = "actor_update") -> Report:
    stack = f'thread MainThread:\n  File "x.py", line {rank}, in work\n\nthread checkpoint:\n'
    return Report(rank, "node", 1, "train", 3, phase, phases, 5.0, waits_in, None, {}, stack)


def test_the_culprit_is_the_one_that_the_others_wait_for() -> None:
    beats = {rank: {"phase": "rollout", "stage": "train", "step": 3} for rank in range(3)}
    waiting = [made(rank, 9, "all_reduce, called in comm.py:1 any_of") for rank in range(3)]
    assert find_culprit({0: waiting[0], 2: waiting[2]}, beats).startswith("rank 1 does not answer")
    assert find_culprit({0: waiting[0], 2: waiting[2]}, {**beats, 1: None}).endswith(
        "has never reported its phase"
    )
    busy = {0: waiting[0], 1: made(1, 9, None), 2: waiting[2]}
    assert find_culprit(busy, beats) == (
        'rank 1 is in phase actor_update, at File "x.py", line 1, in work, '
        "while 2 ranks wait in all_reduce, called in comm.py:1 any_of"
    )
    behind = {0: waiting[0], 1: waiting[1], 2: made(2, 8, "broadcast", "values")}
    assert find_culprit(behind, beats) == "rank 2 is behind the others, in phase values (broadcast)"
    assert "the connection between them is at fault" in find_culprit(dict(enumerate(waiting)), beats)


def test_reports_survive_json() -> None:
    report = made(1, 9, None)
    assert Report(**json.loads(json.dumps(asdict(report)))) == report


def test_limits_can_be_set_for_all_that_a_run_does_and_for_nothing_else() -> None:
    names = {*(phase.name for phase in phases.PHASES), "start"}
    sources = [Path(module.__file__).read_text() for module in (trainer, recovery)]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "phase":
            names |= {
                part.value
                for part in call.args[:2]
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            }
    exported = {f"export {name}" for name in ("actor", "critic", "critic_2")}
    assert set(phases.WATCHED) == names | exported
