"""A run seen from its folder while another process writes it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megarl.config.errors import DataError
from megarl.observe.watch import Follower, watch

CONFIG = """\
recipe: vapo
steps: 4
model: {path: models/tiny}
parallel: {tp: 2, pp: 1, dp: 2, device: cpu}
data: {eval: [e.jsonl]}
algorithm: {advantage: gae}
value_pretraining: {steps: 2}
"""


def record(stage: str, step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "stage": stage, "reward/accuracy": 0.5, "time/step": 60.0, **more}


WHOLE = [
    record("value_pretraining", 1),
    *(record("train", step, events=[f"event {step}"] if step == 2 else []) for step in range(1, 5)),
    {"step": 4, "stage": "eval", "eval/avg": 0.75, "eval/k": 1, "eval/problems": 8},
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def write(run_dir: Path, records: list[dict[str, Any]], end: str = "\n") -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write("\n".join(json.dumps(one) for one in records) + end)


def shown(run_dir: Path, wait: Callable[[float], None] = time.sleep, once: bool = False) -> str:
    screen = Console(file=io.StringIO(), width=200, force_terminal=False)
    watch(run_dir, once=once, console=screen, wait=wait)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_a_finished_run_is_shown_and_left(run_dir: Path) -> None:
    write(run_dir, WHOLE)
    lines = shown(run_dir).splitlines()
    assert "vapo | tiny | TP 2 x PP 1 x DP 2 | cpu | 4 steps" in lines[0]
    assert [line.split()[1] for line in lines if line.startswith("train")] == ["1/4", "2/4", "3/4", "4/4"]
    assert any("event 2" in line for line in lines) and "0.750 avg" in lines[-1]
    assert "left 2:00" in next(line for line in lines if line.startswith("train 2/4"))  # at the run's own pace, not that of reading


def test_one_that_goes_on_is_followed(run_dir: Path) -> None:
    """What comes between two looks is shown, a line that is half written once it is whole, and the end ends it."""
    todo = [
        lambda: write(run_dir, WHOLE[:2]),
        lambda: write(run_dir, WHOLE[2:3], end=""),
        lambda: write(run_dir, [], end="\n"),
        lambda: write(run_dir, WHOLE[3:]),
    ]
    output = shown(run_dir, wait=lambda _: todo.pop(0)())
    assert not todo
    assert [line.split()[1] for line in output.splitlines() if line.startswith("train")] == ["1/4", "2/4", "3/4", "4/4"]


def test_one_that_goes_back_is_shown_anew(run_dir: Path) -> None:
    write(run_dir, WHOLE[:4])

    def goes_back(_: float) -> None:
        rest = WHOLE[:2] if first else WHOLE[2:]
        if first:
            (run_dir / "metrics.jsonl").unlink()
            first.clear()
        write(run_dir, rest)

    first = [True]
    output = shown(run_dir, wait=goes_back)
    assert "went back to a checkpoint" in output
    assert [line.split()[1] for line in output.splitlines() if line.startswith("train")] == [
        "1/4",
        "2/4",
        "3/4",
        "1/4",
        "2/4",
        "3/4",
        "4/4",
    ]


def test_once_leaves_at_once(run_dir: Path) -> None:
    assert "4 steps" in shown(run_dir, once=True)  # nothing recorded yet
    write(run_dir, WHOLE[:3])
    assert "train 2/4" in shown(run_dir, once=True)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.yaml"):
        watch(tmp_path)


def test_the_command_beside_a_process_that_writes(run_dir: Path) -> None:
    """As over ssh: another process, which gets nothing but the folder."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "megarl", "watch", str(run_dir)]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for one in WHOLE:
            write(run_dir, [one])
            time.sleep(0.05)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0 and "train 4/4" in output, output


def test_a_follower_reads_each_line_once(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "metrics.jsonl")
    assert follower.look() == (False, [])
    write(tmp_path, WHOLE[:1])
    assert follower.look() == (False, WHOLE[:1])
    assert follower.look() == (False, [])
