"""`megarl ablate`: refusals and jobs that fail or exceed a limit.

A real run is also killed, interrupted and resumed, and its table recomputed.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megarl.cli.main import main
from megarl_experiments.jobs import Job, run_jobs
from tests import commands
from tests.cli.processes import environment, wait_for

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TABLE = f"""\
title: Test table
base: {CONFIGS}/demos/vapo.yaml
warm_start: sft.yaml
task: megarl_tasks.arithmetic:write_demo
full: VAPO
rows:
  - {{name: VAPO, config: {CONFIGS}/vapo_32b.yaml, paper: 60}}
  - {{name: without clip-higher, config: {CONFIGS}/ablations/vapo_without_clip_higher.yaml, paper: 46}}
  - {{name: broken, config: {CONFIGS}/vapo_32b.yaml, overrides: [data.max_prompt_tokens=1]}}
"""
SHORT = (
    "steps=2",
    "value_pretraining.steps=1",
    "value_pretraining.epochs=1",
    "evaluation.every=1",
    "evaluation.max_problems=64",
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "sft.yaml").write_text(f"base: {CONFIGS}/demos/sft.yaml\nsteps: 40\n")
    path = tmp_path / "test.table.yaml"
    path.write_text(TABLE)
    return path


class TestRefusals:
    CASES: dict[str, str] = {
        "nosuch": "TABLE: nosuch: no such table (one of critic, critic_free, dapo, tppo, vapo, or the path",
        "gone.table.yaml": "gone.table.yaml: no such file",
        "{table} --rows vapo nosuch": (
            "--rows: nosuch: no such row (one of vapo, without_clip_higher, broken)"
        ),
        "{table} --seeds 1 1": "--seeds: must be different",
        "{table} --seeds -1": "--seeds: must be different",
        "{table} --jobs 0": "--jobs and --limit: must be greater than 0",
        "{table} seed=3": "command line: seed=3: megarl ablate sets it",
        "{table} run_dir=x": "command line: run_dir=x: megarl ablate sets it",
        "{table} rollout.groupsize=3": "command line: rollout.groupsize: unknown key",
        "{table} rollout.group_size=7": (
            "{configs}/demos/vapo.yaml, row vapo: update.mini_batch: must divide the 224 responses"
        ),
        "{table} --base gone.yaml": "{cwd}/gone.yaml: no such file",
        "{table} --into gone.md": "--into: gone.md: cannot be read",
        "{table} --into sft.yaml": "--into: sft.yaml: has no place for the table",
        "{table} --folder sft.yaml": "sft.yaml: cannot be written",
    }

    @pytest.mark.parametrize("arguments", CASES)
    def test_one_line(
        self,
        table: Path,
        arguments: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["ablate", *arguments.format(table=table).split()]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        expected = self.CASES[arguments].format(configs=CONFIGS, cwd=tmp_path)
        assert err.removeprefix("megarl: ").startswith(expected)
        assert not (tmp_path / "runs").exists()

    def test_a_task_that_is_not_there(self, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
        table.write_text(TABLE.replace(":write_demo", ":nosuch"))
        assert main(["ablate", str(table)]) == 2
        assert "task: megarl_tasks.arithmetic:nosuch: module" in capsys.readouterr().err

    def test_a_foreign_folder_is_left_alone(
        self, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        mine = tmp_path / "out" / "warm_start" / "seed-0" / "sft"
        mine.mkdir(parents=True)
        (mine / "thesis.txt").write_text("precious")
        assert main(["ablate", str(table), "--seeds", "0", "--folder", str(tmp_path / "out")]) == 2
        assert f"{mine}: exists and was not made by megarl ablate" in capsys.readouterr().err
        assert (mine / "thesis.txt").read_text() == "precious"


@pytest.mark.slow  # each job imports torch and Megatron
class TestJobs:
    def test_a_failure_is_told_with_its_last_line_and_the_others_go_on(self, tmp_path: Path) -> None:
        jobs = [Job(str(i), ("train", f"{tmp_path}/gone{i}.yaml"), tmp_path / f"{i}.txt") for i in range(3)]
        ended = list(run_jobs(jobs, 2, 120))
        assert sorted(one.job.name for one in ended) == ["0", "1", "2"]
        for one in ended:
            file = f"{tmp_path}/gone{one.job.name}.yaml"
            assert (one.code, one.problem) == (
                2,
                f"exit code 2: megarl: {file}: no such file (log: {one.job.log})",
            )

    def test_the_time_limit(self, table: Path, tmp_path: Path) -> None:
        job = Job("slow", ("train", str(CONFIGS / "demos/sft.yaml")), tmp_path / "log.txt")
        [one] = run_jobs([job], 1, 0.3)
        assert one.code == -signal.SIGTERM
        assert one.problem.startswith("ended after 0 s, its time limit: ") and one.seconds < 30

    def test_closing_ends_what_runs(self, tmp_path: Path) -> None:
        jobs = [
            Job("fails", ("train", "gone.yaml"), tmp_path / "a.txt"),
            Job("long", ("train", str(CONFIGS / "demos/sft.yaml")), tmp_path / "b.txt"),
        ]
        before = set(psutil.Process().children())
        running = run_jobs(jobs, 2, 120)
        assert next(running).job.name == "fails"
        started = set(psutil.Process().children()) - before
        assert len(started) == 1
        running.close()
        assert not any(process.is_running() for process in started)


class Command:
    """`megarl ablate` in the background, with its output in a file."""

    def __init__(self, table: Path, *arguments: str) -> None:
        self.output = table.parent / f"out-{time.monotonic_ns()}.txt"
        command = [
            "ablate",
            str(table),
            *SHORT,
            "--seeds",
            "0",
            "1",
            "--folder",
            "runs",
            "--jobs",
            "2",
        ]
        with open(self.output, "wb") as out:
            self.process = commands.Command(
                [*command, *arguments],
                cwd=table.parent,
                env=environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                forked_jobs=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def finished(self) -> list[str]:
        return [
            line.partition("] ")[2].partition(":")[0]
            for line in self.text.splitlines()
            if "accuracy" in line and "] " in line
        ]

    def wait_for(self, what: str, found: Callable[[], bool]) -> set[psutil.Process]:
        """Wait until `found()` is true and return the processes that the command has started by then."""

        def there() -> bool:
            assert self.process.poll() is None, self.text
            return found()

        # warm starts and first runs; each process imports torch and Megatron
        wait_for(what, there, limit=600.0)
        return set(psutil.Process(self.process.pid).children(recursive=True))

    def end(self, sent: signal.Signals | None, started: set[psutil.Process]) -> int:
        if sent is not None:
            self.process.send_signal(sent)
        code = self.process.wait(600)
        wait_for(
            "the runs to go", lambda: not any(p.is_running() and p.status() != "zombie" for p in started)
        )
        return code


@contextmanager
def ablate(table: Path, *arguments: str) -> Iterator[Command]:
    command = Command(table, *arguments)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()


def final(folder: Path) -> float:
    """Return the accuracy of a run's last evaluation, from its metrics."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["eval/avg"] for record in records if record["stage"] == "eval" and record["step"] == 2][-1]


@pytest.mark.slow
@pytest.mark.timeout(2400)  # about 15 runs, one after the other
def test_killed_interrupted_and_resumed(table: Path) -> None:
    out = table.parent / "runs" / "test"
    place = table.parent / "page.md"
    place.write_text(
        "Before.\n<!-- megarl ablate test: begin -->\nold\n<!-- megarl ablate test: end -->\nAfter.\n"
    )

    with ablate(table, "steps=100000") as command:  # runs that do not finish by themselves
        started = command.wait_for("two runs", lambda: len(list(out.rglob("metrics.jsonl"))) == 2)
        with ablate(table) as second:  # the folder is in use
            assert second.end(None, set()) == 2
            assert "megarl ablate runs there since" in second.text
        assert command.end(signal.SIGKILL, started) == -signal.SIGKILL

    with ablate(table) as command:
        started = command.wait_for("the first run", lambda: bool(command.finished()))
        assert command.end(signal.SIGINT, started) == 130
        assert command.text.endswith("megarl: interrupted\n") and "Traceback" not in command.text
        assert "2 of 2 are finished already" in command.text  # the warm starts
        first = command.finished()
    marked = [path.parent for path in out.rglob("ablation.json") if "seconds" in path.read_text()]
    written = {path / "metrics.jsonl": (path / "metrics.jsonl").stat().st_mtime_ns for path in marked}
    assert len(written) >= len(first) >= 1

    with ablate(table, "--into", "page.md") as command:
        assert command.end(None, set()) == 2, command.text  # the broken row
    assert "Traceback" not in command.text
    failed = [line for line in command.text.splitlines() if "FAILED" in line]
    assert len(failed) == 2 and all(
        "broken, seed" in line and "exit code 2: megarl: " in line and "log.txt)" in line for line in failed
    )
    assert not set(first) & set(command.finished()), "a finished run was run again"
    assert {path: path.stat().st_mtime_ns for path in written} == written

    record = json.loads((out / "table.json").read_text())
    rows = {row["name"]: row for row in record["rows"]}
    scores = {
        "VAPO": [final(out / "vapo" / f"seed-{s}") for s in (0, 1)],
        "without clip-higher": [final(out / "without_clip_higher" / f"seed-{s}") for s in (0, 1)],
    }
    for name, values in scores.items():
        assert list(rows[name]["scores"].values()) == values
        assert rows[name]["mean"] == pytest.approx(statistics.fmean(values)) and rows[name][
            "std"
        ] == pytest.approx(statistics.stdev(values))
    assert rows["broken"]["scores"] == {}
    differences = [a - b for a, b in zip(scores["without clip-higher"], scores["VAPO"], strict=True)]
    compared = rows["without clip-higher"]["comparisons"]["full"]
    assert compared["mean"] == pytest.approx(statistics.fmean(differences))
    assert compared["error"] == pytest.approx(statistics.stdev(differences) / math.sqrt(2))
    assert (out / "accuracy.png").is_file() and "<svg" in (out / "report.html").read_text()
    page = place.read_text()
    assert page.startswith("Before.\n<!-- megarl ablate test: begin -->\n") and page.endswith(
        "<!-- megarl ablate test: end -->\nAfter.\n"
    )
    assert (
        (out / "table.md").read_text() in page
        and "old" not in page
        and (table.parent / "images/ablations_test.png").is_file()
    )

    # All runs that can finish have finished. Nothing runs again, other settings are refused, and --fresh
    # repeats only the runs whose settings changed.
    with ablate(table, "--rows", "vapo", "without_clip_higher") as command:
        assert command.end(None, set()) == 0 and not command.finished()
    table.write_text(TABLE.replace("paper: 46", "paper: 46, overrides: [algorithm.alpha=0.25]"))
    with ablate(table, "--rows", "vapo", "without_clip_higher") as command:
        assert command.end(None, set()) == 2
        assert "was run with other settings: algorithm.alpha 0.5, now 0.25 (give --fresh" in command.text
    with ablate(table, "--rows", "vapo", "without_clip_higher", "--fresh") as command:
        assert command.end(None, set()) == 0
        assert sorted(command.finished()) == ["without clip-higher, seed 0", "without clip-higher, seed 1"]
