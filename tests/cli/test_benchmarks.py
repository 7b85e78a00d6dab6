"""The output and history of the benchmarks."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def test_a_phase_that_did_not_run_has_no_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    step = importlib.import_module("step")
    times = {"time/rollout": 0.5, "time/actor_update": 0.25, "time/checkpoint": 0.0, "time/step": 1.0}
    record = {
        **times,
        "rollout/tokens": 1000,
        "train/tokens": 2000,
        "inside/generate": 0.5,
        "inside/megatron": 0.25,
    }
    step.print_phases("megarl", [record], importlib.import_module("measure").Verdicts())
    lines = {
        line.split()[0]: line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  ")
    }
    assert lines["rollout"][1:] == ["0.5000", "s", "50.0", "%", "2,000", "tokens/s"]
    assert lines["actor_update"][1:] == ["0.2500", "s", "25.0", "%", "8,000", "tokens/s"]
    assert lines["checkpoint"][1:] == ["0.0000", "s", "0.0", "%", "did", "not", "run"]


def test_trainers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one trainer runs at a time; each has a child in a separate session, as ranks do."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    step: Any = importlib.import_module("step")
    monkeypatch.setattr(step, "FOLDER", tmp_path)
    works = (
        "import os, sys, time\n"
        "if os.fork():\n"
        "    os.wait()\n"
        "os.setsid()\n"
        "while True:\n"
        "    time.sleep(0.05)\n"
        "    open(sys.argv[1], 'a').write('x')\n"
    )
    trainers = []
    try:
        for name in "ab":
            command = [sys.executable, "-c", works, tmp_path / name]
            trainers.append(step.Trainer.start(name, tmp_path / name, command, 1))
            trainers[-1].take_turn()
        for _ in range(3):
            for trainer, other in (trainers, trainers[::-1]):
                before = other.progress.stat().st_size
                trainer.take_turn()
                assert other.progress.stat().st_size == before
    finally:
        for trainer in trainers:
            trainer.send(signal.SIGKILL)
            trainer.process.wait()
    assert all(len(trainer.seconds) == 4 for trainer in trainers)


def test_ratios_are_of_rounds_and_to_the_better_of_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    step, measure = importlib.import_module("step"), importlib.import_module("measure")
    seconds = {"megarl": [1.0, 2.0, 4.0], "TRL, 1": [9.0, 9.0, 9.0], "TRL, 2": [4.0, 4.0, 8.0]}
    step.compare(seconds, measure.Verdicts())
    out = capsys.readouterr().out
    assert "ratios of 3 rounds: quartiles 0.250, 0.500, 0.500" in out
    assert "not met | step, time / TRL's, median of the rounds' ratios: 0.5 x | target: at most 0.33 x" in out


def test_what_has_become_worse_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared with the median of earlier runs on the same kind of machine, in its worse direction."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    history, measure = importlib.import_module("history"), importlib.import_module("measure")

    def run(seconds: float, speed: float) -> list[dict[str, Any]]:
        verdicts = measure.Verdicts()
        verdicts.at_most("time of TRL's", seconds, 0.33, " x")
        verdicts.at_least("tokens a second", speed, 1e4)
        verdicts.holds("the same bits", True)
        return list(history.records("step", capsys.readouterr().out.splitlines(), 2.25))

    usual = [*run(0.5, 2000.0), *run(0.7, 2200.0), *run(0.51, 1950.0)]
    assert [(one["what"], one["figure"], one["at"]) for one in usual[:2]] == [
        ("time of TRL's", 0.5, "most"), ("tokens a second", 2000.0, "least"),
    ]  # fmt: skip
    assert not list(history.worse([*usual, *run(0.56, 1850.0)]))
    slower = list(history.worse([*usual, *run(0.57, 1800.0)]))
    assert [line.split(":")[0] for line in slower] == [
        "worse   | step, time of TRL's", "worse   | step, tokens a second",
    ]  # fmt: skip
    assert "0.57 at" in slower[0] and "load 2.2, 0.51 in the 3 runs before" in slower[0]
    for other in ({"machine": "another"}, {"arguments": "--steps 8"}):
        assert not list(history.worse([*usual, *({**one, **other} for one in run(5.0, 1.0))]))
    assert not list(history.worse(run(1.0, 1.0)))
    # The last of eight runs is compared with the five before; older ones do not count.
    eight = [record for seconds in (0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5) for record in run(seconds, 2000.0)]
    assert not list(history.worse([*eight, *run(0.54, 2000.0)])) and list(history.worse(eight[:6]))


@pytest.mark.slow
def test_a_run_appends_to_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a real benchmark twice in a repository with a committed history.

    A longer history does not mark the commit "-dirty"; any other change does.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    history, bench = importlib.import_module("history"), importlib.import_module("run")
    file, code = tmp_path / "history.jsonl", tmp_path / "code.py"
    file.touch()
    code.touch()

    def git(*arguments: str) -> str:
        known = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
        command = ["git", "-C", str(tmp_path), *known, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    for arguments in (["init"], ["add", "."], ["commit", "-m", "begin"]):
        git(*arguments)
    monkeypatch.setattr(history, "FILE", file)
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "packing"])
    assert bench.main() == 0
    code.write_text("pass")
    assert bench.main() == 0
    found, head = history.read(), git("rev-parse", "--short", "HEAD")
    assert [one["commit"] for one in found] == [head] * 3 + [f"{head}-dirty"] * 3
    assert {one["what"] for one in found} == {
        "packing, token budget left empty", "packing, slowest rank / mean", "packing, time to plan",
    }  # fmt: skip
    assert all(one["machine"] == history.machine_kind() and one["load"] >= 0 for one in found)
    file.write_text("")
    assert history.commit() == f"{head}-dirty"
    code.write_text("")
    assert history.commit() == head


@pytest.mark.slow
def test_the_rollout_benchmark_measures_both_orders_of_sums() -> None:
    """It patches internals of the engine, which may have changed."""
    benchmark = Path(__file__).resolve().parents[2] / "benchmarks" / "rollout.py"
    few = ["--repeats", "1", "--prompts", "2", "--group", "2", "--max-batch", "4", "--max-tokens", "8"]
    run = subprocess.run([sys.executable, benchmark, *few], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "an order of sums that company does not change" in run.stdout
