"""The terminal view: plain lines that stay aligned, a live view that draws on anything, numbers that mean what they say."""

from __future__ import annotations

import io
import math
import random
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megarl.observe.terminal import RunFacts, TerminalView
from megarl.observe.terminal_format import ASCII_BLOCKS, BLOCKS, compact, duration, resample, sparkline

from .synthetic_run import train_record

FACTS = RunFacts("demo", "vapo", "qwen3-tiny", "TP 2 x PP 1 x DP 1", "cpu", 20, 4)


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def drive(view: TerminalView, clock: Clock, first: int = 1, last: int = 20) -> None:
    """The calls of a short run, 2 s a step."""
    rng = random.Random(0)
    with view:
        for step in range(1, 5):
            clock.now += 1
            view.step({"step": step, "stage": "value_pretraining", "value/loss": 1 / step, "value/explained_variance": 0.05 * step})
        for step in range(first, last + 1):
            view.phase("rollout")
            clock.now += 1.5
            view.phase("actor_update")
            clock.now += 0.5
            view.step(train_record(step, 20, "vapo", rng))
            if step % 10 == 0:
                view.step({"step": step, "stage": "eval", "eval/avg": step / 25, "eval/pass": 0.9, "eval/k": 4, "eval/problems": 512})
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
    assert train[9].endswith("left 20.0s")  # ten steps of 2 s are left
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
    drive(TerminalView("live", FACTS, Console(file=out, width=width, height=40, force_terminal=terminal), clock=clock), clock)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_live_view_shows_the_run(width: int, terminal: bool) -> None:
    text = live(width, terminal)
    final = text[text.rindex("╭") :]
    assert max(len(line) for line in final.splitlines()) <= width
    for expected in ("megarl demo", "train 20/20", "actor_update 7.50s", "explained variance", "groups kept", "checkpoint [red]20[/red]"):
        assert expected in final
    for name in ("accuracy", "length", "entropy"):
        assert re.search(rf"{name} +[{BLOCKS}]+ .* to ", final), name


def test_live_view_of_a_terminal_without_unicode() -> None:
    raw, clock = io.BytesIO(), Clock()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    facts = RunFacts("dämo", "vapo", "qwen3-tiny", "TP 2", "cpu", 20, 4)
    drive(TerminalView("live", facts, Console(file=stream, width=90, force_terminal=True), clock=clock), clock)
    text = raw.getvalue().decode("ascii")
    assert "d?mo" in text and re.search(rf"accuracy +[{re.escape(ASCII_BLOCKS)}]+ ", re.sub(r"\x1b\[[0-9;]*m", "", text))


def test_modes() -> None:
    assert TerminalView("auto", FACTS, Console(file=io.StringIO())).mode == "plain"
    assert TerminalView("auto", FACTS, Console(file=io.StringIO(), force_terminal=True)).mode == "live"
    out, clock = io.StringIO(), Clock()
    view = TerminalView("quiet", FACTS, Console(file=out, force_terminal=True), clock=clock)
    drive(view, clock)
    view.close()
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
    assert math.isclose(sum(shown) / len(shown), sum(points) / len(points), abs_tol=1e-6) or len(points) % width


@settings(deadline=None)
@given(st.floats(0, 1e15))
def test_compact_numbers_are_short_and_near(value: float) -> None:
    text = compact(value)
    factor = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert len(text) <= 5
    assert float(text.rstrip("kMGT")) * factor == pytest.approx(value, rel=0.006, abs=0.5)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.824, "0.82s"), (9.996, "10.0s"), (59.97, "1:00"), (75.2, "1:15"), (3700, "1:01:40"), (90000, "1d 1:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
