"""The terminal view: aligned plain lines, a live view on any terminal, correct numbers.

`megarl watch` shows a run from its folder while another process writes it."""

from __future__ import annotations

import io
import json
import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megarl.config.errors import DataError
from megarl.observe.terminal import (
    ASCII_BLOCKS,
    BLOCKS,
    Follower,
    RunHeader,
    TerminalView,
    format_count,
    format_duration,
    format_evaluation,
    resample,
    sparkline,
    watch,
)
from tests.report.synthetic_run import train_record

FACTS = RunHeader("demo", "vapo", "qwen3-tiny", "TP 2 x PP 1 x DP 1", "cpu", 20, 4)


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def drive(view: TerminalView, clock: Clock, first: int = 1, last: int = 20) -> None:
    """Make the view's calls of a short run with 2 s per step."""
    rng = random.Random(0)
    with view:
        for step in range(1, 5):
            clock.now += 1
            view.step(
                {
                    "step": step,
                    "stage": "value_pretraining",
                    "value/loss": 1 / step,
                    "value/explained_variance": 0.05 * step,
                }
            )
        for step in range(first, last + 1):
            view.phase("rollout")
            clock.now += 1.5
            view.phase("actor_update")
            clock.now += 0.5
            view.step(train_record(step, 20, "vapo", rng))
            if step % 10 == 0:
                view.step(
                    {
                        "step": step,
                        "stage": "eval",
                        "eval/avg": step / 25,
                        "eval/pass": 0.9,
                        "eval/k": 4,
                        "eval/problems": 512,
                    }
                )
                view.event(f"checkpoint [red]{step}[/red] written\nin a folder")
            clock.now += 7 if step == last else 0


def plain(width: int = 200, every: int = 1) -> list[str]:
    out, clock = io.StringIO(), Clock()
    drive(TerminalView("plain", FACTS, Console(file=out, width=width), every, clock), clock)
    return out.getvalue().splitlines()


def test_plain_lines_are_aligned_and_complete() -> None:
    lines = plain(width=60)
    assert lines[0] == "megarl demo | vapo | qwen3-tiny | TP 2 x PP 1 x DP 1 | cpu | 20 steps"
    train = [line for line in lines if line.startswith("train")]
    assert [int(line[6:8]) for line in train] == list(range(1, 21))
    for name in ("acc", "reward", "len", "ent", "clip", "ev", "lr", "gnorm", "kept", "tok/s", "left"):
        assert len({line.index(f"  {name} ") for line in train}) == 1, name
    assert train[9].endswith("left 20.0s")  # ten steps of 2 s remain
    assert [line for line in lines if line.startswith("eval")] == [
        "eval  10/20  0.400 avg  0.900 pass  - majority  (k 4, 512 problems)",
        "eval  20/20  0.800 avg  0.900 pass  - majority  (k 4, 512 problems)",
    ]
    assert "      checkpoint [red]10[/red] written in a folder" in lines
    assert sum(line.startswith("value 1/4  vloss  1.0000  ev +0.05") for line in lines) == 1


def test_plain_lines_can_be_fewer() -> None:
    steps = [int(line[6:8]) for line in plain(every=8) if line.startswith("train")]
    assert steps == [1, 8, 16, 20]


def test_numbers_that_are_missing_keep_their_column() -> None:
    out = io.StringIO()
    view = TerminalView("plain", FACTS, Console(file=out, width=200))
    record = train_record(1, 20, "vapo", random.Random(0))
    view.step(record)
    view.step({**record, "step": 2, "policy/grad_norm": None, "alarms": ["policy/grad_norm: nan"]})
    first, second, alarm = out.getvalue().splitlines()
    assert re.search(r"gnorm +- ", second) and second.index("kept") == first.index("kept")
    assert alarm.strip() == "train step 2: not finite: policy/grad_norm: nan"


def live(width: int, terminal: bool) -> str:
    out, clock = io.StringIO(), Clock()
    drive(
        TerminalView(
            "live", FACTS, Console(file=out, width=width, height=40, force_terminal=terminal), clock=clock
        ),
        clock,
    )
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_live_view_shows_the_run(width: int, terminal: bool) -> None:
    text = live(width, terminal)
    final = text[text.rindex("╭") :]
    assert max(len(line) for line in final.splitlines()) <= width
    for expected in (
        "megarl demo",
        "train 20/20",
        "actor_update 7.50s",
        "explained variance",
        "groups kept",
        "checkpoint [red]20[/red]",
    ):
        assert expected in final
    for name in ("accuracy", "length", "entropy"):
        assert re.search(rf"{name} +[{BLOCKS}]+ .* to ", final), name
    record = train_record(20, 20, "vapo", random.Random(0))
    for key, number in (("response/length_right", r"\d+\.\d"), ("reflection/share", r"0\.\d{3}")):
        assert key in record and re.search(rf" {number} / {number} ", final), key
    assert width < 80 or not re.search(r"\d…", final)  # a name may be truncated, a number may not


def test_live_view_of_a_terminal_without_unicode() -> None:
    raw, clock = io.BytesIO(), Clock()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    facts = RunHeader("dämo", "vapo", "qwen3-tiny", "TP 2", "cpu", 20, 4)
    drive(
        TerminalView("live", facts, Console(file=stream, width=90, force_terminal=True), clock=clock), clock
    )
    text = raw.getvalue().decode("ascii")
    assert "d?mo" in text and re.search(
        rf"accuracy +[{re.escape(ASCII_BLOCKS)}]+ ", re.sub(r"\x1b\[[0-9;]*m", "", text)
    )


def test_modes() -> None:
    assert TerminalView("auto", FACTS, Console(file=io.StringIO())).mode == "plain"
    assert TerminalView("auto", FACTS, Console(file=io.StringIO(), force_terminal=True)).mode == "live"
    out, clock = io.StringIO(), Clock()
    view = TerminalView("quiet", FACTS, Console(file=out, force_terminal=True), clock=clock)
    drive(view, clock)
    assert out.getvalue() == ""


def test_time_left_of_a_resumed_run_counts_its_own_steps_only() -> None:
    out, clock = io.StringIO(), Clock()
    view = TerminalView("plain", FACTS, Console(file=out, width=200), clock=clock)
    clock.now += 3
    view.step(train_record(15, 20, "vapo", random.Random(0)))
    assert out.getvalue().rstrip().endswith("left 15.0s")


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 60))
def test_sparkline_reaches_from_lowest_to_highest(points: list[float], width: int) -> None:
    line = sparkline(points, width)
    shown = resample(points, width)
    assert len(line) == len(shown) <= width
    levels = [BLOCKS.index(c) for c in line]
    assert levels[shown.index(min(shown))] == 0
    for (a, x), (b, y) in pairwise(zip(levels, shown, strict=True)):
        assert a == b or (a < b) == (x < y)
    if max(shown) > min(shown):
        assert max(levels) == len(BLOCKS) - 1
    assert (
        math.isclose(sum(shown) / len(shown), sum(points) / len(points), abs_tol=1e-6) or len(points) % width
    )


@settings(deadline=None)
@given(st.floats(0, 1e15))
def test_compact_numbers_are_short_and_near(value: float) -> None:
    text = format_count(value)
    factor = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert len(text) <= 5
    assert float(text.rstrip("kMGT")) * factor == pytest.approx(value, rel=0.006, abs=0.5)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.824, "0.82s"),
        (9.996, "10.0s"),
        (59.97, "1:00"),
        (75.2, "1:15"),
        (3700, "1:01:40"),
        (90000, "1d 1:00"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


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
    # at the run's pace, not at that of reading
    assert "left 2:00" in next(line for line in lines if line.startswith("train 2/4"))


def test_one_that_goes_on_is_followed(run_dir: Path) -> None:
    """New records are shown, a half-written line once it is complete, and the view ends with the run."""
    todo = [
        lambda: write(run_dir, WHOLE[:2]),
        lambda: write(run_dir, WHOLE[2:3], end=""),
        lambda: write(run_dir, [], end="\n"),
        lambda: write(run_dir, WHOLE[3:]),
    ]
    output = shown(run_dir, wait=lambda _: todo.pop(0)())
    assert not todo
    assert [line.split()[1] for line in output.splitlines() if line.startswith("train")] == [
        "1/4",
        "2/4",
        "3/4",
        "4/4",
    ]


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
    """Another process that only has the folder, as over ssh."""
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
    assert follower.read_new() == (False, [])
    write(tmp_path, WHOLE[:1])
    assert follower.read_new() == (False, WHOLE[:1])
    assert follower.read_new() == (False, [])


def test_data_sources_follow_an_evaluation() -> None:
    record = {
        "eval/avg": 0.5,
        "eval/k": 1,
        "eval/problems": 30,
        "eval/gsm/avg": 0.25,
        "eval/gsm/problems": 20,
    }
    record |= {"eval/ungraded": 0, "eval/gsm/ungraded": 2}
    record |= {"eval/aime24/avg": 1.0, "eval/aime24/problems": 10, "eval/length_mean": 5.0}
    assert format_evaluation(record).splitlines() == [
        "0.500 avg  (k 1, 30 problems)",
        "      aime24  1.000 avg  (10 problems)",
        "      gsm     0.250 avg  (20 problems, 2 ungraded)",
    ]
    own = {f"eval/aime/{what}": 0.5 for what in ("avg", "pass", "majority")}
    own |= {"eval/aime/k": 32, "eval/aime/problems": 10}
    assert format_evaluation(own) == "aime  0.500 avg  0.500 pass  0.500 majority  (k 32, 10 problems)"
    mixed = {"eval/avg": 0.25, "eval/problems": 30, **own}
    assert format_evaluation(mixed).splitlines()[0] == "0.250 avg  (30 problems)"
