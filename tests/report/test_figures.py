"""The figures of distributions.jsonl: what is added up, and what the page shows of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.observe.run_log import Record
from megarl.observe.runs import RecordedRun, load_run
from megarl_report.figures import (
    SECTIONS,
    add_tables,
    collect_tables,
    draw_entropy,
    draw_figure,
    draw_lambda,
    draw_mismatch,
    draw_rewards,
    draw_value_error,
    sum_thirds,
)
from megarl_report.plots import Drawing

from .synthetic_run import write_run


@settings(deadline=None)
@given(st.integers(0, 40))
def test_thirds_are_sums_of_the_first_and_last_steps(steps: int) -> None:
    records = [{"step": n, "stage": "train", "t": {"a": [float(n), 1.0]}} for n in range(1, steps + 1)]
    found = sum_thirds(records, "t", "train")
    assert sum_thirds(records, "t", "eval") == sum_thirds(records, "other", "train") == []
    assert len(found) == min(1, steps) + (steps >= 3)
    for part in found:
        assert part.table["a"] == [sum(range(part.first, part.last + 1)), part.last - part.first + 1]
    if steps >= 3:
        assert found[0].first == 1 and found[1].last == steps and found[0].last < found[1].first
        assert found[0].table["a"][1] == found[1].table["a"][1] == -(-steps // 3)


def test_other_shapes_are_not_added() -> None:
    assert add_tables([{"a": [1, 2]}, {"a": [1, 2, 3]}, {"b": [1]}, {"a": [None, 5]}]) == {"a": [1.0, 7]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = {
        name: write_run(folder / name, "vapo", steps=9, seed=seed) for name, seed in (("zero", 0), ("one", 1))
    }
    return {**made, "dapo": write_run(folder / "dapo", "dapo", steps=9)}


def colours(drawing: Drawing | None) -> set[str]:
    assert drawing is not None
    return set(re.findall(r"var\((--s\d)\)", drawing.svg))


def test_parts_of_the_reward_have_a_curve_each() -> None:
    parts_of = {"reward/term_a_b": 0.25, "reward/term_c": 0.75, "reward/mean": 1.0}
    records: list[Record] = [{"step": n, "stage": "train", **parts_of} for n in range(1, 15)]
    drawn = draw_rewards([RecordedRun("x", records)])
    assert drawn is not None and len(colours(drawn)) == 2
    assert ">a b 0.25<" in drawn.svg and ">c 0.75<" in drawn.svg and ">mean" not in drawn.svg
    graded = draw_rewards([RecordedRun("x", [record | {"reward/score": 0.5} for record in records])])
    assert graded is not None and len(colours(graded)) == 3 and ">verifier's score 0.5<" in graded.svg
    assert draw_rewards([RecordedRun("x", [{"step": 1, "stage": "train", "reward/mean": 1.0}])]) is None


def test_one_run_shows_early_beside_late(runs: dict[str, Path]) -> None:
    run = load_run(runs["zero"])
    figures = draw_lambda([run]), draw_value_error([run]), draw_mismatch([run]), draw_entropy([run])
    for figure in figures:
        assert figure is not None and [text for _, text in figure.legend] == ["steps 1 to 3", "steps 7 to 9"]
        assert colours(figure) == {"--s1", "--s9"}
    records = [r["value_error"] for r in run.distributions if r["step"] >= 7]
    last = sum(r["absolute"][-1] for r in records) / sum(r["tokens"][-1] for r in records)
    assert figures[1] and f">|V-R| {last:.3g}<" in figures[1].svg
    records = [r["entropy"] for r in run.distributions if r["step"] >= 7]
    entropy = sum(r["entropy"][-1] for r in records) / sum(r["tokens"][-1] for r in records)
    assert figures[3] and f">{entropy:.3g}<" in figures[3].svg
    assert figures[2] and all(f">{text}<" in figures[2].svg for text in ("1e-5", "-1e-5", "0.1", "-10"))


def test_seeds_are_added_and_runs_lie_over_each_other(runs: dict[str, Path]) -> None:
    seeds = [load_run(runs["zero"]), load_run(runs["one"])]
    for part, at in zip(collect_tables(seeds, "lambda"), (slice(0, 3), slice(6, 9)), strict=True):
        expected = [sum(r["lambda"]["responses"][10] for r in run.distributions[at]) for run in seeds]
        assert part[2]["responses"][10] == sum(expected) > 0
    both = [*seeds, load_run(runs["dapo"])]
    assert colours(draw_mismatch(both)) == {"--s0", "--s1"} and colours(draw_value_error(both)) == {"--s0"}
    [waste] = [spec for spec in SECTIONS["Policy update and sampling"] if spec.title == "Filter waste"]
    assert draw_figure(waste, seeds) is None and draw_figure(waste, both) is not None
    assert colours(draw_entropy(both)) == {"--s0", "--s1"}
    assert draw_lambda(both[2:]) is draw_value_error(both[2:]) is None


def test_figures_without_their_data_are_left_out() -> None:
    """Where no response reflects there is nothing to compare, and where no token is clipped no mean."""
    records = [
        {"step": 1, "stage": "train", "reflection/share": 0.0, "policy/clip_fraction_high": 0.0},
        {"step": 2, "stage": "train", "reflection/share": 0.5, "reflection/accuracy": 0.2},
    ]
    specs = {spec.title: spec for specs in SECTIONS.values() for spec in specs}
    names = (
        "Responses with reflection",
        "Accuracy with and without reflection",
        "Probability of up-clipped tokens",
        "Length of right and wrong responses",
        "Entropy by position",
    )
    for count, drawn in ((1, []), (2, list(names[:2]))):
        run = RecordedRun("run", records[:count])
        assert [name for name in names if draw_figure(specs[name], [run])] == drawn
