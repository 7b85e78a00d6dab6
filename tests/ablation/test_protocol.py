"""Protocols: synthetic results from curves to verdicts, table and forest plot; power from tuning seeds; what
is refused; and the command in pieces, its runs replaced by curves that are drawn."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from megarl.ablation import command, paired
from megarl.ablation.command import measure
from megarl.ablation.figures import write_forest
from megarl.ablation.jobs import Ended, Job
from megarl.ablation.protocol import (
    VERDICTS,
    Outcome,
    Protocol,
    cells,
    judge,
    load_protocol,
    markdown,
    note_tried,
    plan_power,
    read_tried,
    terminal,
)
from megarl.ablation.result import RowResult
from megarl.ablation.runs import load_table
from megarl.cli.main import main
from megarl.config import load_config
from megarl.config.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# True differences and noise of six rows of the paper's table; a seed moves all its runs together.
EFFECTS = {
    "without value pretraining": (-0.20, 0.05),
    "without length-adaptive GAE": (-0.08, 0.05),
    "without clip-higher": (0.10, 0.05),  # the paper says worse
    "without token-level loss": (0.0, 0.02),
    "without positive-example LM loss": (-0.02, 0.15),
    "without group sampling": (0.0, 0.0),  # a switch that changes nothing: runs equal to the bit
}
EXPECTED = ["holds", "holds", "opposite", "equivalent", "undecided", "equivalent"]


def protocol(**given: Any) -> Protocol:
    every = {"against": "VAPO", "task": "sums", "claims": "worse", "bound": 0.05}
    rows = [{"row": row, **every} for row in EFFECTS]
    content = {
        "name": "vapo.protocol", "folder": CONFIGS / "ablations", "title": "Synthetic <results>",
        "table": "vapo.table.yaml", "seeds": 20, "statistic": "last", "last": 2, "tried": "x.jsonl",
        "tasks": {"sums": {}}, "rows": rows,
    }  # fmt: skip
    return Protocol.model_validate({**content, **given})


def synthetic(seeds: Iterable[int]) -> dict[tuple[str, str, int], dict[int, float]]:
    """Curves of five evaluations: all rise from a seed's own beginning to its own end plus the row's
    effect."""
    curves = {}
    for seed in seeds:
        rng = random.Random(seed)
        start, end = rng.gauss(0.1, 0.02), rng.gauss(0.5, 0.1)
        for row, (effect, noise) in {"VAPO": (0.0, 0.0), **EFFECTS}.items():
            last = end + rng.gauss(effect, noise)
            curves["sums", row, seed] = {
                step: start + (last - start) * min(1, step / 15) for step in range(0, 25, 5)
            }
    return curves


PAPERS = {row.name: row.paper for row in load_table(str(CONFIGS / "ablations/vapo.table.yaml")).rows}


class TestVerdicts:
    def test_from_curves_to_verdicts(self) -> None:
        plan = protocol()
        outcomes = measure(plan, synthetic(plan.fresh_seeds), PAPERS)
        assert [one.verdict for one in outcomes] == EXPECTED
        assert [one.paper for one in outcomes] == [-49, -15, -14, -7, -6, -5]

    def test_numbers_of_a_row_against_a_loop(self) -> None:
        plan = protocol()
        curves = synthetic(plan.fresh_seeds)
        row = measure(plan, curves, PAPERS)[1]
        differences, others = [], []
        for seed in range(100, 120):
            own, its = (curves["sums", name, seed] for name in (row.row.row, "VAPO"))
            differences.append((own[15] + own[20] - its[15] - its[20]) / 2)
            others.append(sum(own[s] - its[s] for s in (5, 10, 15, 20)) / 4)
        assert [*row.differences.values()] == pytest.approx(differences)
        mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(20)
        assert (row.mean, row.other) == (pytest.approx(mean), pytest.approx(statistics.fmean(others)))
        assert (row.low, row.high) == (
            pytest.approx(mean - 2.0930 * error, abs=1e-5),  # t(19) as printed in tables
            pytest.approx(mean + 2.0930 * error, abs=1e-5),
        )
        assert row.p == paired.sign_flip_p(differences) and row.holm is not None and row.holm > row.p
        assert row.found == pytest.approx(
            statistics.stdev(differences) * paired.smallest_found(20, 0.05 / 6, 0.8), rel=1e-6
        )

    def test_no_verdict_before_the_last_seed(self) -> None:
        plan = protocol()
        early = measure(plan, synthetic(range(100, 119)), PAPERS)
        assert {one.verdict for one in early} == {"19 of 20 seeds"}
        assert all(one.p is None and one.holm is None and one.low is not None for one in early)
        assert {one.verdict for one in measure(plan, {}, PAPERS)} == {"not run yet"}
        assert "0 of 6 rows are decided" in markdown(plan, early, [], [])

    def test_a_row_that_is_not_there_counts_as_p_1(self) -> None:
        """What holds with half of the rows still holds with all of them."""
        plan, curves = protocol(), synthetic(range(100, 120))
        half = {key: curve for key, curve in curves.items() if key[1] in ("VAPO", *[*EFFECTS][:3])}
        part, whole = measure(plan, half, PAPERS), measure(plan, curves, PAPERS)
        assert [one.verdict for one in part] == [*EXPECTED[:3], *["not run yet"] * 3]
        for one, other in zip(part[:3], whole[:3], strict=True):
            assert one.holm is not None and other.holm is not None and one.holm >= other.holm

    def test_the_bound_is_part_of_the_verdict(self) -> None:
        """A difference that is found and lies within the bound is said so; an interval that touches the bound
        is not equivalent."""
        row = protocol().rows[0]
        small = {seed: -0.02 + 0.001 * (seed % 3) for seed in range(10)}
        wide = {seed: 0.07 * (-1) ** seed for seed in range(10)}
        found = judge([Outcome(row, 10, 0.05, None, d) for d in (small, wide)], 0.025, 0.8)
        assert [one.said.partition(" (would")[0] for one in found] == [
            "holds (but within the bound)",
            "undecided",
        ]
        few = judge([Outcome(row, 5, 0.05, None, {s: -0.3 - s / 100 for s in range(5)})], 0.05, 0.8)
        assert few[0].said == "undecided (would have found: none, with so few seeds)"

    def test_rows_without_effects_are_seldom_called_different(self) -> None:
        """Nine rows like their neighbour, 10 seeds: a table with a false difference in at most 5 % (Holm)."""
        rng, row, alarms = random.Random(5), protocol().rows[0], 0
        for _ in range(200):
            drawn = [{s: rng.gauss(0, 0.05) for s in range(10)} for _ in range(9)]
            outcomes = judge([Outcome(row, 10, 0.05, None, d) for d in drawn], 0.05 / 9, 0.8)
            alarms += any(one.verdict in ("holds", "opposite") for one in outcomes)
        assert alarms / 200 < 0.09

    def test_what_would_have_been_found_is_found(self) -> None:
        """Rows whose true difference is what 12 seeds find with a chance of 80 %."""
        rng, size = random.Random(2), paired.smallest_found(12, 0.01, 0.8)
        drawn = [[rng.gauss(-size, 1) for _ in range(12)] for _ in range(300)]
        found = sum(paired.sign_flip_p(differences) < 0.01 for differences in drawn)
        assert found / 300 == pytest.approx(0.8, abs=0.07)


class TestPower:
    def test_from_tuning_seeds(self) -> None:
        plan = protocol()
        tuned = measure(plan, synthetic(range(5)), PAPERS)
        power = plan_power(plan, {one.row.key: [*one.differences.values()] for one in tuned})
        for one, facts in zip(tuned[:5], power[:5], strict=True):
            deviation = statistics.stdev(one.differences.values())
            assert facts["deviation"] == pytest.approx(deviation) and facts["tuning_seeds"] == 5
            n = facts["for_difference"]
            reached = [paired.power(k, 0.05 / deviation, 0.05 / 6) for k in (n - 1, n)]
            assert reached[0] < 0.8 <= reached[1]
            assert (facts["finds"] <= 0.05) == (n <= 20)
        assert power[5]["deviation"] is None  # runs that are all the same say nothing of the spread
        assert {one["deviation"] for one in plan_power(plan, {})} == {None}


class TestShown:
    def test_table_forest_and_page(self, tmp_path: Path) -> None:
        plan = protocol()
        outcomes = measure(plan, synthetic(plan.fresh_seeds), PAPERS)
        rows = [RowResult(name, None, {100: {0: 0.1, 5: 0.2}}) for name in ("a", "b")]
        write_forest(plan, outcomes, [(rows[0], rows[1])], ["Said & done."], tmp_path)
        assert (tmp_path / "forest.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        page = (tmp_path / "report.html").read_text()
        assert page.count("<svg") == 2 and "Synthetic &lt;results&gt;" in page and "Said &amp; done." in page
        for verdict in {*EXPECTED}:
            assert f">{verdict}<" in page
        lines = terminal(outcomes).splitlines()
        assert len(lines) == 7 and all(
            one.verdict in line for one, line in zip(outcomes, lines, strict=False)
        )
        assert all(line.count("o") > 0 and "paper -" in line for line in lines[:6])
        # The difference stands left of the middle where it is below 0.
        assert lines[0].index("o", 33) < lines[0].index("|") < lines[2].rindex("o", 0, 75)

    def test_markdown(self) -> None:
        plan = protocol()
        outcomes = measure(plan, synthetic(plan.fresh_seeds), PAPERS)
        tried = [{"when": "2026-11-22", "row": "x", "setting": {"a": "b|c"}, "seeds": {"0": -0.1}}]
        text = markdown(plan, outcomes, plan_power(plan, {}), tried, ["Said."])
        heads, rows = cells(plan, outcomes)
        assert all(len(row) == len(heads) for row in rows)
        assert "5 of 6 rows are decided (2 holds, 1 opposite, 2 equivalent, 1 undecided)" in text
        assert "- Said." in text and "b\\|c" in text and "-0.100" in text
        assert all(verdict in text for verdict in VERDICTS)

    def test_nothing_run_yet(self, tmp_path: Path) -> None:
        outcomes = measure(protocol(), {}, PAPERS)
        write_forest(protocol(), outcomes, [], [], tmp_path)
        assert "not run yet" in (tmp_path / "report.html").read_text() and "not run yet" in terminal(outcomes)


class TestTried:
    def test_every_setting_once_with_all_its_seeds(self, tmp_path: Path) -> None:
        path = tmp_path / "tried.jsonl"
        assert read_tried(path) == []
        first, second = {"row": "a", "setting": {"lr": 1}}, {"row": "a", "setting": {"lr": 2}}
        note_tried(path, [{**first, "seeds": {"0": None, "1": None}}, {**second, "seeds": {"0": None}}])
        note_tried(path, [{**first, "seeds": {"0": -0.1}}])
        found = read_tried(path)
        assert [(one["setting"], one["seeds"]) for one in found] == [
            ({"lr": 2}, {"0": None}), ({"lr": 1}, {"0": -0.1, "1": None})]  # fmt: skip
        path.write_text("{}\n")
        with pytest.raises(ConfigError, match=r"tried\.jsonl: line 1: not a setting"):
            read_tried(path)


TASK = """\
import json
def write(folder, seed, shift=0):
    (folder / "model").mkdir(parents=True)
    for name in ("model/config.json", "sft.jsonl", "train.jsonl", "eval.jsonl"):
        (folder / name).write_text(json.dumps([name, seed, shift]) + "\\n")
"""
PROTOCOL = f"""\
title: Test protocol
table: {CONFIGS}/ablations/vapo.table.yaml
seeds: 8
statistic: curve
tried: test.tried.jsonl
tasks:
  near: {{task: "drawn_task:write"}}
  far: {{task: "drawn_task:write", knobs: {{shift: 2}}, overrides: [steps=10]}}
rows:
  - {{row: without value pretraining, against: VAPO, task: near, claims: worse, bound: 0.05}}
  - {{row: without clip-higher, against: VAPO, task: far, claims: worse, bound: 0.05}}
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "drawn_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "test.protocol.yaml"
    path.write_text(PROTOCOL)
    return path


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs, whose curves are drawn in place of training: without value pretraining 0.2 less."""
    names: list[str] = []

    def drawn(jobs: Iterable[Job], at_most: int, limit: float) -> Generator[Ended]:
        for job in jobs:
            names.append(job.name)
            config = load_config(job.arguments[1])
            if config.recipe == "sft":
                (config.run_dir / "hf").mkdir()
                (config.run_dir / "hf" / "config.json").write_text("{}")
            else:
                rng = random.Random(f"{config.seed} {config.run_dir}")
                top = 0.5 - 0.2 * (config.value_pretraining.steps == 0) + rng.gauss(0, 0.01)
                steps = range(0, config.steps + 1, config.evaluation.every)
                records = [{"stage": "eval", "step": s, "eval/avg": top * s / config.steps} for s in steps]
                (config.run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
            yield Ended(job, 30.0, 0, "")

    monkeypatch.setattr(command, "run_jobs", drawn)
    return names


class TestCommand:
    def test_tuned_then_run_in_pieces(
        self, path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        ablate = ["ablate", str(path), "--folder", "out"]
        other = ["ablate", str(path), "algorithm.alpha=0.25", "--seeds", "0", "--folder", "other"]
        assert main(other) == 0
        assert len(ran) == 2 + 4  # warm starts of two tasks, two arms each
        assert main([*other[:2], "algorithm.alpha=0.75", *other[3:]]) == 2  # other settings, without --fresh
        assert main([*other[:2], "algorithm.alpha=0.75", *other[3:], "--fresh"]) == 0
        assert len(ran) == 2 + 4 + 4
        ran.clear()
        capsys.readouterr()
        assert main([*ablate, "--seeds", "0", "1", "2"]) == 0
        out = capsys.readouterr().out
        assert "power of without value pretraining against VAPO on near: not known" in out
        assert len(ran) == 6 + 12
        tried = read_tried(path.parent / "test.tried.jsonl")
        settings = [["algorithm.alpha=0.25"], ["algorithm.alpha=0.75"], []]
        assert [one["setting"]["command"] for one in tried] == [s for s in settings for _ in range(2)]
        assert tried[1]["setting"]["knobs"] == {"shift": 2}
        assert all(isinstance(d, float) for one in tried for d in one["seeds"].values())
        assert "3 of 8 seeds" in (path.parent / "out/test.protocol/tuning/table.md").read_text()

        ran.clear()
        assert main([*ablate, "--most", "0"]) == 0 and not ran  # only what it costs
        assert "16 runs x 30 s" in capsys.readouterr().out
        assert main([*ablate, "--most", "20"]) == 75  # 16 warm starts, 4 of 32 runs
        out = capsys.readouterr().out
        assert len(ran) == 20 and "28 runs are left" in out
        line = next(line for line in out.splitlines() if line.startswith("power of without value"))
        assert "over 3 tuning seeds; for 0.05, " in line and "8 seeds find 0.0" in line
        assert "cost of without value pretraining against VAPO on near: 16 runs x 30 s = 8 min" in out
        assert "cost of all, arms that rows share once: 32 runs x 30 s = 16 min" in out
        assert main([*ablate, "--hours", "0.001"]) == 75  # less than a run takes is known after the first one
        begun = len(ran)
        assert 20 < begun < 48
        place = path.parent / "place.md"
        marks = "<!-- megarl ablate test.protocol: begin -->\n<!-- megarl ablate test.protocol: end -->"
        place.write_text(marks)
        assert main([*ablate, "--into", "place.md"]) == 0
        assert len(ran) == len({*ran}) == 48  # nothing twice
        record = json.loads((path.parent / "out/test.protocol/table.json").read_text())
        assert [row["verdict"] for row in record["rows"]] == ["holds", "equivalent"]
        assert record["rows"][0]["paper"] == -49 and record["power"][0]["tuning_seeds"] == 3
        assert "2 of 2 rows are decided" in place.read_text() and "tuning" in place.read_text()
        assert (path.parent / "images/ablations_test_protocol.png").is_file()
        folders = {run.parent.name for run in (path.parent / "out/warm_start").glob("*/seed-100")}
        assert len(folders) == 2  # tasks with other knobs are kept apart
        assert len(read_tried(path.parent / "test.tried.jsonl")) == 6  # a final run is no tuning

        capsys.readouterr()
        path.write_text(PROTOCOL.replace("VAPO, task: far, claims: worse", "VAPO, task: far, claims: better"))
        assert main(ablate) == 2
        assert "rows: changed since its first run with fresh seeds" in capsys.readouterr().err

    CASES = {
        "nosuch.protocol": "TABLE: nosuch.protocol: no such protocol (one of dapo.protocol, vapo.protocol",
        "{path} --seeds 3 100": "--seeds: of a protocol, only tuning seeds, below 100",
        "{path} steps=3": "steps=3: a protocol's final run has its settings only",
        "{path} --base x.yaml": "--base: a protocol's final run",
        "{path} --most -1": "--hours and --most: must be greater than 0",
        "{path} --hours 0": "--hours and --most: must be greater than 0",
        "{path} --rows vapo": "--rows: vapo: no such row (one of without_value_pretraining, without_clip",
        "{path} seed=3 --seeds 1": "command line: seed=3: each run has its own",
    }

    @pytest.mark.parametrize("arguments", CASES)
    def test_refused(self, path: Path, arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["ablate", *arguments.format(path=path).split()]) == 2
        out, err = capsys.readouterr()
        assert err.removeprefix("megarl: ").startswith(self.CASES[arguments]) and err.count("\n") == 1
        assert not out and not (path.parent / "runs").exists()

    DAMAGED: dict[tuple[str, str], str] = {
        ("seeds: 8", "seeds: 8\nfirst_seed: 5"): "first_seed: must be at least 100 (seeds below are",
        ("statistic: curve", ""): "statistic: Field required",
        ("task: near", "task: nowhere"): "rows: without value pretraining: no such task: nowhere",
        ("against: VAPO, task: near", "against: VOPA, task: near"): "rows: VOPA: no such row in ",
        ("shift: 2", "shaft: 2"): "tasks.far.knobs: got an unexpected keyword argument 'shaft'",
        ("overrides:", "row_overrides: {nobody: []}, overrides:"): "tasks.far.row_overrides: nobody: no",
        ("bound: 0.05", "bound: 0"): "rows.0.bound: Input should be greater than 0",
    }  # fmt: skip

    @pytest.mark.parametrize(("old", "new"), DAMAGED)
    def test_damaged(self, path: Path, old: str, new: str) -> None:
        path.write_text(PROTOCOL.replace(old, new))
        with pytest.raises(ConfigError) as caught:
            load_protocol(str(path)).tables()
        assert str(caught.value).startswith(f"{path}: {self.DAMAGED[old, new]}")


@pytest.mark.parametrize("name", ["vapo", "dapo"])
def test_the_shipped_protocols(name: str) -> None:
    plan = load_protocol(f"{name}.protocol")
    known = {row.name: row.paper for row in load_table(name).rows}
    for row in plan.rows:
        above, below = known[row.row], known[row.against]
        assert above is not None and below is not None and (above < below) == (row.claims == "worse")
    names = {table.name for table in plan.tables().values()}
    assert names == {f"{name}.protocol/{task}" for task in plan.tasks}
    assert plan.seeds >= 20 and plan.first_seed >= 100
    others = {row for row in known if row not in {one.row for one in plan.rows}}
    assert others == ({"VAPO"} if name == "vapo" else {"naive GRPO"})
