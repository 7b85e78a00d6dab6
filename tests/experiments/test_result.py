"""An ablation's comparisons against hand counts; rate of false verdicts; table and figures."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from megarl_experiments.curves import band, write_page, write_png
from megarl_experiments.result import (
    Comparison,
    Result,
    RowResult,
    compare,
    correct_by_holm,
    markdown,
)


class TestComparison:
    def test_by_hand(self) -> None:
        """Differences 1 to 5: mean 3, standard error sqrt(2.5 / 5), t = 4.2426, p of t(4) = 0.013236."""
        found = compare({s: 0.5 * s + s + 1 for s in range(5)}, {s: 0.5 * s for s in range(5)}, "x")
        assert found is not None and (found.seeds, found.mean) == (5, 3.0)
        assert found.error == pytest.approx(math.sqrt(0.5)) and found.p == pytest.approx(0.0132356, abs=1e-6)
        assert (found.low, found.high) == (
            pytest.approx(3 - 2.7764 * math.sqrt(0.5), abs=1e-4),
            pytest.approx(4.96325, abs=1e-4),
        )

    def test_only_seeds_that_both_have(self) -> None:
        found = compare({0: 1.0, 1: 2.0, 7: 100.0}, {0: 0.5, 1: 1.0, 8: -100.0}, "x")
        assert found is not None and (found.seeds, found.mean) == (2, 0.75)
        assert compare({0: 1.0}, {1: 1.0}, "x") is None

    def test_holm_as_in_r(self) -> None:
        """p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm") gives 0.03 0.06 0.06 0.02."""
        given_ = [Comparison("x", 5, 0.1, p=p) for p in (0.01, 0.04, 0.03, 0.005)]
        assert [c.holm for c in correct_by_holm([*given_, Comparison("x", 1, 0.1)])] == [
            *map(pytest.approx, (0.03, 0.06, 0.06, 0.02)),
            None,
        ]

    @pytest.mark.parametrize(
        ("mean", "p", "holm", "verdict"),
        [
            (-0.1, 0.001, 0.008, "worse"), (0.1, 0.001, 0.008, "better"),
            (-0.1, 0.02, 0.16, "worse, not after Holm"), (-0.1, 0.2, 1.0, "within the spread"),
            (0.1, None, None, "no spread to judge by"), (0.0, None, None, "the same"),
        ],
    )  # fmt: skip
    def test_verdicts(self, mean: float, p: float | None, holm: float | None, verdict: str) -> None:
        assert Comparison("x", 5, mean, p=p, holm=holm).verdict == verdict

    def test_a_table_without_effects_seldom_has_a_verdict(self) -> None:
        """Holm's correction keeps the rate of tables with a false verdict near 5 %: 8 equal rows, 5 seeds.

        The uncorrected test alone gives a false verdict in far more tables.
        """
        rng = random.Random(0)
        alarms = single = 0
        for _ in range(300):
            # the warm start of a seed shifts all its runs
            shared = {seed: rng.gauss(0.8, 0.05) for seed in range(5)}
            reference, *rows = (
                {seed: score + rng.gauss(0, 0.02) for seed, score in shared.items()} for _ in range(9)
            )
            found = correct_by_holm([c for row in rows if (c := compare(row, reference, "x"))])
            alarms += any(c.verdict in ("worse", "better") for c in found)
            single += any("not after Holm" in c.verdict or c.verdict in ("worse", "better") for c in found)
        assert alarms / 300 < 0.08 < single / 300


def result(kinds: tuple[str, ...] = ("full",), seeds: int = 5) -> Result:
    """Return three rows: the second is worse by 0.1 plus noise in every seed, the third has fewer seeds."""
    rng = random.Random(1)

    def row(name: str, paper: float, gain: float, seeds: int) -> RowResult:
        curves = {
            s: {t: 0.3 + gain * t / 60 + rng.gauss(0, 0.004) for t in (0, 30, 60)} for s in range(seeds)
        }
        return RowResult(name, paper, curves, dict.fromkeys(curves, 70.0))

    rows = (
        row("full <system>", 60, 0.6, seeds),
        row("without a", 11, 0.5, seeds),
        row("without b", 33, 0.6, max(seeds - 2, 0)),
    )
    return Result("A table", "full <system>", kinds, 1, rows, {"notes": ["Said."]})


class TestTable:
    def test_scores_are_means_of_the_last_evaluations(self) -> None:
        row = RowResult("x", None, {0: {10: 0.5, 0: 0.1, 20: 0.7}, 1: {0: 0.2}, 2: {}})
        assert row.scores(1) == {0: 0.7, 1: 0.2}
        assert row.scores(2) == {0: pytest.approx(0.6), 1: 0.2}

    def test_comparisons_with_the_full_system_and_with_the_row_above(self) -> None:
        found = result(("full", "previous"))
        assert {name: c.against for name, c in found.comparisons("full").items()} == dict.fromkeys(
            ("without a", "without b"), "full <system>"
        )
        assert {name: c.against for name, c in found.comparisons("previous").items()} == {
            "without a": "full <system>", "without b": "without a"}  # fmt: skip
        assert found.comparisons("full")["without a"].verdict == "worse"
        assert found.comparisons("previous")["without b"].verdict == "better"
        assert found.comparisons("full")["without b"].seeds == 3

    def test_markdown(self) -> None:
        text = markdown(result())
        rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
        assert [row[0].strip() for row in rows[2:]] == ["full <system>", "without a", "without b"]
        assert len({len(row) for row in rows}) == 1
        assert rows[3][1].strip() == "11" and rows[3][-1].strip() == "worse" and "(n = 5)" in rows[3][2]
        assert "13 runs of 70 s" in text and "Said." in text and "2 with the full system" in text

    def test_json_and_nothing_run_yet(self) -> None:
        record = json.loads(json.dumps(result(("full", "previous")).record()))
        assert record["rows"][1]["comparisons"]["full"]["verdict"] == "worse"
        assert record["rows"][1]["scores"]["4"] == record["rows"][1]["curves"]["4"]["60"]
        empty = Result("A table", "x", ("full",), 1, (RowResult("x", 5, {}), RowResult("y", None, {})))
        assert "| y | - | - |" in markdown(empty)


class TestFigures:
    def test_band(self) -> None:
        """Mean and sample standard deviation at steps that every run evaluated."""
        assert band({0: {0: 0.1, 10: 0.5, 20: 1.0}, 1: {0: 0.3, 10: 0.5}}) == (
            [0, 10],
            [0.2, 0.5],
            [pytest.approx(math.sqrt(0.02)), 0.0],
        )
        assert band({}) == ([], [], [])

    @pytest.mark.parametrize("seeds", [0, 1, 5])
    def test_page_and_picture(self, tmp_path: Path, seeds: int) -> None:
        found = result(("full", "previous"), seeds)
        write_page(found, tmp_path / "x.html")
        write_png(found, tmp_path / "x.png")
        text = (tmp_path / "x.html").read_text()
        assert (
            "full &lt;system&gt;" in text
            and "<system>" not in text
            and "http" not in text.replace("http-equiv", "")
        )
        assert text.count("<svg") == sum(bool(row.curves) for row in found.rows)
        assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
