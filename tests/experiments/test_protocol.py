"""Protocols: synthetic curves to verdicts, table and forest plot; power from tuning seeds; refusals.

The command is tested with simulated curves instead of runs, and so are the shipped protocols.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megarl.cli.main import main
from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError
from megarl_experiments import command, paired
from megarl_experiments.forest import cells, markdown, terminal, write
from megarl_experiments.jobs import Ended, Job
from megarl_experiments.protocol import (
    VERDICTS,
    Protocol,
    ProtocolRow,
    RowOutcome,
    correct_by_holm,
    decide_rows,
    estimate_power,
    load_protocol,
    log_tried,
    measure_row,
    read_tried,
)
from megarl_experiments.tables import load_table
from megarl_tasks import arithmetic, family
from tests.experiments.test_tables import changes, leaves

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# True differences and noise of six rows of the paper's table; a seed shifts all its runs together.
EFFECTS = {
    "without value pretraining": (-0.20, 0.05),
    "without length-adaptive GAE": (-0.08, 0.05),
    "without clip-higher": (0.10, 0.05),  # the paper says worse
    "without token-level loss": (0.0, 0.02),
    "without positive-example LM loss": (-0.02, 0.15),
    "without group sampling": (0.0, 0.0),  # a switch without effect: runs are bitwise equal
}
EXPECTED = ["holds", "holds", "opposite", "equivalent", "undecided", "equivalent"]
PAPERS = {row.name: row.paper for row in load_table(str(CONFIGS / "ablations/vapo.table.yaml")).rows}
ROW = ProtocolRow(row="a", against="b", task="sums", claims="worse", bound=0.05, why="Because.")


def protocol(**given: Any) -> Protocol:
    content = {
        "name": "vapo.protocol", "folder": CONFIGS / "ablations", "title": "Synthetic <results>",
        "table": "vapo.table.yaml", "warm_start": "ablation_family_sft.yaml",
        "seeds": 20, "statistic": "last", "last": 2,
        "tasks": {"sums": {"what": "Sums.", "limit": 1.0}},
        "rows": [ROW.model_copy(update={"row": row, "against": "VAPO"}) for row in EFFECTS],
    }  # fmt: skip
    return Protocol.model_validate({**content, **given})


def synthetic(seeds: Iterable[int]) -> dict[tuple[str, str, int], dict[int, float]]:
    """Return curves of five evaluations.

    Each rises from the seed's start value to the seed's end value plus the row's effect.
    """
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


def judged(drawn: Iterable[list[float]], level: float = 0.05, wanted: int | None = None) -> list[RowOutcome]:
    found = []
    for values in drawn:
        seeds = range(wanted or len(values))
        found.append(measure_row(ROW, seeds, dict(enumerate(values)), level))
    return correct_by_holm(found)


class TestVerdicts:
    def test_from_curves_to_verdicts(self) -> None:
        plan = protocol()
        outcomes = decide_rows(plan, synthetic(plan.fresh_seeds), PAPERS)
        assert [one.verdict for one in outcomes] == EXPECTED
        assert [one.paper for one in outcomes] == [-49, -15, -14, -7, -6, -5]

    def test_numbers_of_a_row_against_a_loop(self) -> None:
        plan = protocol()
        curves = synthetic(plan.fresh_seeds)
        row = decide_rows(plan, curves, PAPERS)[1]
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
        assert row.detectable == pytest.approx(
            statistics.stdev(differences) * paired.smallest_detectable(20, 0.05 / 6, 0.8), rel=1e-6
        )
        swapped = decide_rows(protocol(statistic="curve"), curves, PAPERS)[1]
        assert (swapped.mean, swapped.other) == (pytest.approx(row.other), pytest.approx(row.mean))

    def test_no_verdict_before_the_last_seed(self) -> None:
        plan = protocol()
        early = decide_rows(plan, synthetic(range(100, 119)), PAPERS)
        assert {one.verdict for one in early} == {"19 of 20 seeds"}
        assert all(one.p is None and one.holm is None and one.low is not None for one in early)
        assert {one.verdict for one in decide_rows(plan, synthetic(range(20)), PAPERS)} == {"20 tuning seeds"}
        assert {one.verdict for one in decide_rows(plan, {}, PAPERS)} == {"not run yet"}
        assert "0 of 6 rows are decided" in markdown(plan, early, [], [], "")

    def test_a_row_that_is_not_there_counts_as_p_1(self) -> None:
        """A verdict of `holds` with half of the rows stays valid with all of them."""
        plan, curves = protocol(), synthetic(range(100, 120))
        half = {key: curve for key, curve in curves.items() if key[1] in ("VAPO", *[*EFFECTS][:3])}
        part, whole = decide_rows(plan, half, PAPERS), decide_rows(plan, curves, PAPERS)
        assert [one.verdict for one in part] == [*EXPECTED[:3], *["not run yet"] * 3]
        for one, other in zip(part[:3], whole[:3], strict=True):
            assert one.holm is not None and other.holm is not None and one.holm >= other.holm

    @given(st.lists(st.floats(-0.5, 0.5), min_size=6, max_size=10))
    def test_the_other_way_round(self, differences: list[float]) -> None:
        """Swapping a row and its neighbour negates the differences and nothing else."""
        [one], [other] = judged([differences]), judged([[-d for d in differences]])
        assert (one.p, one.equivalence, one.detectable) == (other.p, other.equivalence, other.detectable)
        assert one.low == pytest.approx(-(other.high or 0.0)) and one.mean == pytest.approx(
            -(other.mean or 0)
        )
        turned = {"holds": "opposite", "opposite": "holds"}
        assert other.verdict == turned.get(one.verdict, one.verdict)
        if one.is_within_bound:  # a 95 % interval within the bound is stricter than two tests at 5 %
            assert one.equivalence is not None and one.equivalence < 0.025 + 1e-9

    def test_the_bound_is_part_of_the_verdict(self) -> None:
        """A detected difference within the bound is reported as such.

        A row whose interval exceeds the bound is not equivalent.
        """
        small = [-0.02 + 0.001 * (seed % 3) for seed in range(10)]
        wide = [0.07 * (-1) ** seed for seed in range(10)]
        found = judged([small, wide, [0.0] * 10])
        assert [one.qualified_verdict.partition(" (detect")[0] for one in found] == [
            "holds (but within the bound)", "undecided", "equivalent"]  # fmt: skip
        [few] = judged([[-0.3 - s / 100 for s in range(5)]])
        assert few.qualified_verdict == "undecided (detectable: none, too few seeds)"

    @pytest.mark.slow
    def test_rows_without_effects_are_seldom_called_different(self) -> None:
        """Nine rows without effect, 10 seeds: about 5 % of tables may have a false difference (Holm)."""
        rng, alarms = random.Random(5), 0
        for _ in range(200):
            outcomes = judged([rng.gauss(0, 0.05) for _ in range(10)] for _ in range(9))
            alarms += any(one.verdict in ("holds", "opposite") for one in outcomes)
        assert alarms / 200 < 0.09

    def test_what_would_have_been_found_is_found(self) -> None:
        """Rows with the true difference that 12 seeds detect with probability 0.8."""
        rng, size = random.Random(2), paired.smallest_detectable(12, 0.01, 0.8)
        drawn = [[rng.gauss(-size, 1) for _ in range(12)] for _ in range(300)]
        found = sum(paired.sign_flip_p(differences) < 0.01 for differences in drawn)
        assert found / 300 == pytest.approx(0.8, abs=0.07)


class TestTuning:
    def test_power_from_what_was_tried(self, tmp_path: Path) -> None:
        plan = protocol(folder=tmp_path)
        assert {(one.tuned, one.deviation) for one in estimate_power(plan, [])} == {(0, None)}
        tuned = decide_rows(plan, synthetic(range(5)), PAPERS)
        log_tried(plan, tuned, (), "c0de")
        powers = estimate_power(plan, read_tried(plan.tried))
        for one, power in zip(tuned[:5], powers[:5], strict=True):
            deviation, n = statistics.stdev(one.differences.values()), power.for_difference
            assert power.deviation == pytest.approx(deviation) and power.tuned == 5 and n is not None
            reached = [paired.power(k, 0.05 / deviation, 0.05 / 6) for k in (n - 1, n)]
            assert reached[0] < 0.8 <= reached[1]
            assert power.detectable is not None and (power.detectable <= 0.05) == (n <= 20)
        assert powers[5].deviation is None  # identical runs carry no information on the spread
        # Entries of another task, command line or score do not count for this protocol.
        for other in ({"limit": 2.0}, {"limit": 1.0, "warm_start": "ablation_sft.yaml"}):
            changed = protocol(folder=tmp_path, tasks={"sums": {"what": "Sums.", **other}})
            assert {one.tuned for one in estimate_power(changed, read_tried(plan.tried))} == {0}
        changed = protocol(folder=tmp_path, last=3)
        assert {one.tuned for one in estimate_power(changed, read_tried(plan.tried))} == {0}

    def test_a_task_with_a_warm_start_of_its_own(self) -> None:
        own = {"what": "Sums.", "limit": 1.0, "warm_start": "ablation_sft.yaml"}
        tables = protocol(tasks={"sums": {"what": "Sums.", "limit": 1.0}, "far": own}).tables()
        files = {name: (table.folder / table.warm_start).name for name, table in tables.items()}
        assert files == {"sums": "ablation_family_sft.yaml", "far": "ablation_sft.yaml"}
        other = protocol(tasks={"sums": own}).tables()["sums"]
        assert other.start != tables["sums"].start  # and so another folder

    def test_every_setting_once_with_all_its_seeds(self, tmp_path: Path) -> None:
        plan = protocol(folder=tmp_path, rows=[ROW])
        assert read_tried(plan.tried) == [] and plan.tried == tmp_path / "vapo.tried.jsonl"

        def note(differences: dict[int, float], *overrides: str) -> None:
            log_tried(plan, [RowOutcome(ROW, range(100, 120), differences)], overrides, "c0de")

        note({}, "steps=9")  # no differences yet
        note({0: 0.5}, "steps=9")
        for _ in range(2):
            note({0: 0.1, 1: 0.2}, "steps=3")
            note({1: 0.2}, "steps=3")
        note({2: 0.3}, "steps=9")
        assert len(plan.tried.read_text().splitlines()) == 3
        found = [(one["setting"]["overrides"], one["differences"]) for one in read_tried(plan.tried)]
        assert found == [(["steps=3"], {"0": 0.1, "1": 0.2}), (["steps=9"], {"0": 0.5, "2": 0.3})]
        # Overrides tried on the command line and then written to the file count as the protocol's settings.
        task = {"what": "Sums.", "limit": 1.0, "overrides": ["steps=3"]}
        moved = protocol(folder=tmp_path, rows=[ROW], tasks={"sums": task})
        assert [one.tuned for one in estimate_power(moved, read_tried(plan.tried))] == [2]
        plan.tried.write_text("{}\n")
        with pytest.raises(ConfigError, match=r"tried\.jsonl: line 1: not a log entry"):
            read_tried(plan.tried)


class TestShown:
    def test_all_of_it(self, tmp_path: Path) -> None:
        plan = protocol()
        curves = synthetic(plan.fresh_seeds)
        outcomes = decide_rows(plan, curves, PAPERS)
        write(plan, outcomes, curves, estimate_power(plan, []), "Said & done.", tmp_path)
        assert (tmp_path / "forest.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        page = (tmp_path / "report.html").read_text()
        assert page.count("<svg") == 1 + 6 and "Synthetic &lt;results&gt;" in page and "Said &amp;" in page
        assert all(f">{verdict}<" in page for verdict in EXPECTED)
        lines = terminal(outcomes).splitlines()
        assert len(lines) == 7 and all(
            verdict in line for verdict, line in zip(EXPECTED, lines, strict=False)
        )
        assert all("o" in line and "paper -" in line for line in lines[:6])
        # A difference below 0 is left of the middle.
        assert lines[0].index("o", 33) < lines[0].index("|") < lines[2].rindex("o", 0, 75)
        record = json.loads((tmp_path / "table.json").read_text())
        assert [row["verdict"] for row in record["rows"]] == EXPECTED
        heads, rows = cells(plan, outcomes)
        assert all(len(row) == len(heads) for row in rows)
        text = (tmp_path / "table.md").read_text()
        assert "5 of 6 rows are decided (2 holds, 1 opposite, 2 equivalent, 1 undecided)" in text
        assert "- Said & done." in text and "Sums." in text
        assert all(verdict in text for verdict in VERDICTS)

    def test_what_was_tried(self, tmp_path: Path) -> None:
        plan = protocol(folder=tmp_path)
        log_tried(plan, decide_rows(plan, synthetic([0, 1]), PAPERS), ["algorithm.surrogate=a|b"], "c0de")
        text = markdown(
            plan, decide_rows(plan, {}, PAPERS), estimate_power(plan, []), read_tried(plan.tried), ""
        )
        assert text.count('overrides: ["algorithm.surrogate=a\\|b"] | 0, 1 |') == 6
        assert "Settings tried on seeds below 100: 6." in text

    def test_nothing_run_yet(self, tmp_path: Path) -> None:
        outcomes = decide_rows(protocol(), {}, PAPERS)
        write(protocol(), outcomes, {}, [], "", tmp_path)
        assert "not run yet" in (tmp_path / "report.html").read_text() and "not run yet" in terminal(outcomes)


FAR = "{what: Far., knobs: {lines: [1, 30]}, limit: 1.0, overrides: [steps=10]}"
PROTOCOL = f"""\
title: Test protocol
table: {CONFIGS}/ablations/vapo.table.yaml
warm_start: {CONFIGS}/ablations/ablation_family_sft.yaml
seeds: 7
statistic: curve
tasks:
  near: {{what: Near., limit: 1.0, seconds: 240, warm_start_seconds: 60}}
  far: {FAR}
rows:
  - {{row: without value pretraining, against: VAPO, task: near, claims: worse, bound: 0.05, why: Both.}}
  - {{row: without clip-higher, against: VAPO, task: far, claims: worse, bound: 0.05, why: Both.}}
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "test.protocol.yaml"
    path.write_text(PROTOCOL)
    return path


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the runs, and replace training by random curves.

    Without value pretraining the curves are 0.2 lower.
    """
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
    monkeypatch.setattr(family, "SFT_ROWS", 20)
    monkeypatch.setattr(family, "TRAIN_ROWS", 20)
    monkeypatch.setattr(arithmetic, "EVAL_ROWS", 20)
    return names


class TestCommand:
    @pytest.mark.slow
    def test_tuned_then_run_in_pieces(
        self, path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        ablate = ["ablate", str(path), "--folder", "out"]
        log = path.parent / "test.tried.jsonl"
        assert main([*ablate, "algorithm.alpha=0.25", "--seeds", "0"]) == 0
        assert len(ran) == 2 + 4  # warm starts of two tasks, two arms each
        out = capsys.readouterr().out
        assert "without clip-higher - VAPO on far: 2 runs (2 of unknown length)\n  power: unknown" in out
        assert "without value pretraining - VAPO on near: 2 runs, 8 min of one core\n" in out
        assert "; warm starts: 2 runs, 60 s of one core (1 of unknown length)\n" in out
        assert "without value pretraining on near: 0.000 at 0, " in out
        assert main([*ablate, "--seeds", "0"]) == 2  # other settings, without --fresh
        assert "was run with other settings: algorithm.alpha 0.25, now 0.5 (give" in capsys.readouterr().err
        assert main([*ablate, "--seeds", "0", "1", "--rows", "without_clip_higher", "--fresh"]) == 0
        assert len(ran) == 6 + 1 + 4
        assert main([*ablate, "--seeds", "0", "1", "--fresh"]) == 0
        assert len(ran) == 11 + 1 + 4
        tried = read_tried(log)
        settings = [["algorithm.alpha=0.25"]] * 2 + [[]] * 2
        assert [[o for o in one["setting"]["overrides"] if o != "steps=10"] for one in tried] == settings
        assert tried[2]["setting"]["lines"] == [1, 30] and len(tried[2]["differences"]) == 2
        assert "2 tuning seeds" in (path.parent / "out/test.protocol/tuning/table.md").read_text()

        ran.clear()
        capsys.readouterr()
        assert main([*ablate, "--most", "0"]) == 0 and not ran  # only prints the cost
        out = capsys.readouterr().out
        assert (
            "without value pretraining - VAPO on near: 14 runs, 7 min of one core\n  power: standard" in out
        )
        assert "total, shared arms once: 28 runs, 14 min of one core; warm starts: 14 runs, 7 min" in out
        assert main([*ablate, "--most", "18"]) == 75  # 14 warm starts, 4 of 28 runs
        assert len(ran) == 18 and "run the same command to continue" in capsys.readouterr().out
        assert main([*ablate, "--hours", "1e-9"]) == 75 and len(ran) == 18
        place = path.parent / "place.md"
        marks = "<!-- megarl ablate test.protocol: begin -->\n<!-- megarl ablate test.protocol: end -->"
        place.write_text(marks)
        assert main([*ablate, "--into", "place.md"]) == 0
        assert len(ran) == len({*ran}) == 42  # nothing twice
        record = json.loads((path.parent / "out/test.protocol/table.json").read_text())
        assert [row["verdict"] for row in record["rows"]] == ["holds", "equivalent"]
        assert record["rows"][0]["paper"] == -49 and record["power"][0]["tuned"] == 2
        assert "2 of 2 rows are decided" in place.read_text()
        assert (path.parent / "images/ablations_test_protocol.png").is_file()
        assert len(read_tried(log)) == 4  # a final run is no tuning

        # Another warm start is refused, or repeated with all runs that use it; its cost is printed first.
        family = f"{CONFIGS}/ablations/ablation_family_sft.yaml"
        (path.parent / "sft.yaml").write_text(f"base: {family}\nsteps: 299\n")
        path.write_text(PROTOCOL.replace(family, "sft.yaml"))
        capsys.readouterr()
        assert main([*ablate, "--most", "0", "--fresh"]) == 0
        assert "warm starts: 14 runs, 7 min of one core" in capsys.readouterr().out
        assert main(ablate) == 2 and "steps 300, now 299" in capsys.readouterr().err

        # Other knobs make another task, and the old one stays; another limit is refused for each run.
        folders = {folder.name for folder in (path.parent / "out/warm_start").iterdir()}
        assert {name.split("-")[0] for name in folders} == {"near", "far"}
        path.write_text(PROTOCOL.replace("[1, 30]", "[1, 31]"))
        assert main([*ablate, "--most", "3"]) == 75
        assert len({folder.name for folder in (path.parent / "out/warm_start").iterdir()} - folders) == 1
        assert all("far-" in name for name in ran[42:]) and len(ran) == 45
        path.write_text(PROTOCOL.replace("limit: 1.0, overrides", "limit: 1.1, overrides"))
        capsys.readouterr()
        assert main(ablate) == 2 and len(ran) == 45
        assert "was run with other settings: rollout.max_response_tokens" in capsys.readouterr().err

    CASES = {
        "nosuch.protocol": "TABLE: nosuch.protocol: no such protocol "
        "(one of critic_lambda.protocol, dapo.protocol, vapo.protocol",
        "{path} --seeds 3 100": "--seeds: a protocol takes only tuning seeds, below 100",
        "{path} steps=3": "steps=3: a protocol's final run has fixed settings",
        "{path} --base x.yaml": "--base: a protocol's final run",
        "{path} --most -1": "--hours and --most: must be greater than 0",
        "{path} --hours 0": "--hours and --most: must be greater than 0",
        "{path} --rows vapo": "--rows: vapo: no such row (one of without_value_pretraining, without_clip",
        "{path} --seeds 1 --rows without_clip_higher seed=3": "command line: seed=3: megarl ablate sets it",
    }

    @pytest.mark.parametrize("arguments", CASES)
    def test_refused(self, path: Path, arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["ablate", *arguments.format(path=path).split()]) == 2
        out, err = capsys.readouterr()
        assert err.removeprefix("megarl: ").startswith(self.CASES[arguments]) and err.count("\n") == 1
        assert not out and not (path.parent / "runs").exists()

    DAMAGED: dict[tuple[str, str], str] = {
        ("seeds: 7", "seeds: 7\nfirst_seed: 5"): "first_seed: Input should be greater than or equal to 100",
        ("statistic: curve", ""): "statistic: Field required",
        ("task: near", "task: nowhere"): "rows: without value pretraining: no such task: nowhere",
        ("against: VAPO, task: near", "against: VOPA, task: near"): "rows: VOPA: no such row in ",
        ("row: without clip-higher", "row: without value pretraining"): "rows: the same row stands there",
        ("lines: [1, 30]", "line: [1, 30]"): "tasks.far.knobs.line: Extra inputs are not permitted",
        ("lines: [1, 30]", "width: 50"): "tasks.far.knobs: lines, width, ramble_lines: prompt and response",
        ("bound: 0.05", "bound: 0"): "rows.0.bound: Input should be greater than 0",
    }  # fmt: skip

    @pytest.mark.parametrize(("old", "new"), DAMAGED)
    def test_damaged(self, path: Path, old: str, new: str) -> None:
        path.write_text(PROTOCOL.replace(old, new))
        with pytest.raises(ConfigError) as caught:
            load_protocol(str(path)).tables()
        assert str(caught.value).startswith(f"{path}: {self.DAMAGED[old, new]}")

    def test_tasks_of_several_protocols(self, path: Path) -> None:
        """A shared file of tasks: a protocol adds settings, and an error names the right file."""
        shared = path.with_name("test.tasks.yaml")
        shared.write_text("tasks:\n  far: {what: Far., knobs: {lines: [1, 30]}, limit: 1.0}\n")
        path.write_text(
            PROTOCOL.replace(f"far: {FAR}", "far: {overrides: [steps=10]}") + f"shared: {shared.name}\n"
        )
        given = {"name": "test.protocol", "folder": path.parent, "shared": shared.name}
        assert load_protocol(str(path)) == Protocol.model_validate({**yaml.safe_load(PROTOCOL), **given})
        shared.write_text(shared.read_text().replace("lines:", "line:"))
        with pytest.raises(ConfigError) as caught:
            load_protocol(str(path))
        assert str(caught.value).startswith(f"{shared}: tasks.far.knobs.line: Extra inputs")
        shared.write_text("tasks:\n  near: {what: Near., limit: 1.0}\n")
        with pytest.raises(ConfigError) as caught:
            load_protocol(str(path))
        assert str(caught.value).startswith(f"{path}: tasks.far.what: Field required")


SHIPPED = {name: load_protocol(f"{name}.protocol") for name in ("vapo", "dapo")}
ROWS = [(name, row) for name, plan in SHIPPED.items() for row in plan.rows]


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{name}-{row.row}" for name, row in ROWS])
def test_rows_differ_as_the_papers_do(name: str, row: ProtocolRow) -> None:
    """Two rows differ only in the keys in which the 32B files differ, at the same cost.

    The claimed direction is that of the paper's points.
    """
    table = SHIPPED[name].tables()[row.task]
    rows = {one.name: one for one in table.rows}
    own, its = rows[row.row], rows[row.against]
    configs = [table.config(one, ()) for one in (own, its)]
    for config in configs:
        check_config(config, row.row)
    here, at_32b = changes(*configs), changes(*(load_config(table.folder / one.config) for one in (own, its)))
    assert here and set(here) == set(at_32b)
    assert all(here[key] == value for key, value in at_32b.items() if key != "rollout.prompts")
    one, other = map(leaves, configs)
    sizes = ("steps", "update.mini_batch", "update.epochs", "rollout.max_response_tokens")
    assert all(one[key] == other[key] for key in sizes) and configs[0].evaluation == configs[1].evaluation
    assert configs[0].responses == configs[1].responses
    assert own.paper is not None and its.paper is not None
    assert row.claims == ("better" if own.paper > its.paper else "worse")


def test_every_technique_has_its_row() -> None:
    for name, of_all in (("vapo", "VAPO"), ("dapo", "")):
        assert {row.row for row in SHIPPED[name].rows} == {row.name for row in load_table(name).rows} - {
            of_all
        }
        assert SHIPPED[name].seeds >= 20


def test_the_undecided_row_is_asked_again_as_it_was() -> None:
    first, again = SHIPPED["vapo"], load_protocol("critic_lambda.protocol")
    [row] = again.rows
    assert row in first.rows and not {*first.fresh_seeds} & {*again.fresh_seeds}
    before, now = (plan.tables()["long"] for plan in (first, again))
    assert before.start == now.start
    for name in (row.row, row.against):
        [[one], [other]] = [[own for own in table.rows if own.name == name] for table in (before, now)]
        assert before.config(one, ()) == now.config(other, ())


def test_tasks_are_what_they_are_for() -> None:
    vapo, dapo = SHIPPED["vapo"].tasks, SHIPPED["dapo"].tasks
    for name in vapo.keys() & dapo.keys():  # one task, and one warm start
        same = {"overrides": (), "seconds": None}
        assert vapo[name].model_copy(update=same) == dapo[name].model_copy(update=same)
        starts = {plan.tables()[name].start for plan in SHIPPED.values()}
        assert len(starts) == 1
    for name, task in (vapo | dapo).items():
        limit, knobs = task.max_response_tokens, task.knobs
        assert limit + 16 <= family.POSITIONS, "prompt and response"
        if name != "cut":
            assert limit >= family.longest_right(knobs)
        else:
            assert knobs.eval_lines is not None
            held_out = knobs.model_copy(update={"lines": knobs.eval_lines})
            assert family.longest_right(knobs) > limit >= family.longest_right(held_out)
    for plan in SHIPPED.values():  # DAPO and VAPO: 512 prompts x 16, in mini-batches of 512
        config = plan.tables()["explore"].config(plan.tables()["explore"].rows[0], ())
        assert config.responses / config.update.mini_batch == 16
