"""distributions.jsonl and events.jsonl: what is written is what is read, what is added up, and what the page shows of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.observe.distribution_figures import draw_lambda, draw_mismatch, draw_value_error, parts
from megarl.observe.distributions import DistributionLog, added, read_distributions, thirds
from megarl.observe.events import EventLog, read_events
from megarl.observe.figures import draw_waste
from megarl.observe.metrics import MetricsLog
from megarl.observe.plots import Drawing
from megarl.observe.report import render
from megarl.observe.runs import load_run

from .synthetic_run import write_run


def test_written_and_read_and_cut_back(tmp_path: Path) -> None:
    log = DistributionLog(tmp_path)
    for stage, step in (("value_pretraining", 1), ("train", 1), ("train", 2), ("train", 3)):
        log.write(step, stage, {"mismatch": {"tokens": [1.0, step / 3]}})
    assert log.truncate_after(1) == 2
    log.close()
    with (tmp_path / "distributions.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "stage": "tr')
    records, lost = read_distributions(tmp_path)
    assert [(r["stage"], r["step"]) for r in records] == [("value_pretraining", 1), ("train", 1)] and lost == 1
    assert records[1]["mismatch"] == {"tokens": [1.0, 0.333333333]}
    assert read_distributions(tmp_path / "nowhere") == ([], 0)
    DistributionLog(tmp_path, append=True).close()
    assert read_distributions(tmp_path) == (records, 0)


@settings(deadline=None)
@given(st.integers(0, 40))
def test_thirds_are_sums_of_the_first_and_last_steps(steps: int) -> None:
    records = [{"step": n, "stage": "train", "t": {"a": [float(n), 1.0]}} for n in range(1, steps + 1)]
    found = thirds(records, "t", "train")
    assert thirds(records, "t", "eval") == thirds(records, "other", "train") == []
    assert len(found) == min(1, steps) + (steps >= 3)
    for part in found:
        assert part.table["a"] == [sum(range(part.first, part.last + 1)), part.last - part.first + 1]
    if steps >= 3:
        assert found[0].first == 1 and found[1].last == steps and found[0].last < found[1].first
        assert found[0].table["a"][1] == found[1].table["a"][1] == -(-steps // 3)


def test_other_shapes_are_not_added() -> None:
    assert added([{"a": [1, 2]}, {"a": [1, 2, 3]}, {"b": [1]}, {"a": [None, 5]}]) == {"a": [1.0, 7]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = {name: write_run(folder / name, "vapo", steps=9, seed=seed) for name, seed in (("zero", 0), ("one", 1))}
    return {**made, "dapo": write_run(folder / "dapo", "dapo", steps=9)}


def colours(drawing: Drawing | None) -> set[str]:
    assert drawing is not None
    return set(re.findall(r"var\((--s\d)\)", drawing.svg))


def test_one_run_shows_early_beside_late(runs: dict[str, Path]) -> None:
    run = load_run(runs["zero"])
    figures = draw_lambda([run]), draw_value_error([run]), draw_mismatch([run])
    for figure in figures:
        assert figure is not None and [text for _, text in figure.legend] == ["steps 1 to 3", "steps 7 to 9"]
        assert colours(figure) == {"--s1", "--s9"}
    records = [r["value_error"] for r in run.distributions if r["step"] >= 7]
    last = sum(r["absolute"][-1] for r in records) / sum(r["tokens"][-1] for r in records)
    assert figures[1] and f">|V-R| {last:.3g}<" in figures[1].svg
    assert figures[2] and all(f">{text}<" in figures[2].svg for text in ("1e-5", "-1e-5", "0.1", "-10"))


def test_seeds_are_added_and_runs_lie_over_each_other(runs: dict[str, Path]) -> None:
    seeds = [load_run(runs["zero"]), load_run(runs["one"])]
    for part, at in zip(parts(seeds, "lambda"), (slice(0, 3), slice(6, 9)), strict=True):
        expected = [sum(r["lambda"]["responses"][10] for r in run.distributions[at]) for run in seeds]
        assert part[2]["responses"][10] == sum(expected) > 0
    both = [*seeds, load_run(runs["dapo"])]
    assert colours(draw_mismatch(both)) == {"--s0", "--s1"} and colours(draw_value_error(both)) == {"--s0"}
    assert draw_waste(seeds) is None and draw_waste(both) is not None
    assert draw_lambda(both[2:]) is draw_value_error(both[2:]) is None


def test_events_survive_a_restart_and_are_shown(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write({"step": 1, "stage": "train", "reward/accuracy": 0.5})
    for append, text in ((False, "rank 3 <died>"), (True, "continues from step-000001")):
        events = EventLog(tmp_path, append)
        events.write(text)
        events.close()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"time": "yesterday", "event": "foreign"}\n')
    found, lost = read_events(tmp_path)
    assert [event["event"] for event in found] == ["rank 3 <died>", "continues from step-000001"] and lost == 1
    (tmp_path / "hang-20261121-100000.txt").write_text("culprit: rank 1 is behind\nwhy now: ...")
    (tmp_path / "events.jsonl").write_text(json.dumps(found[0] | {"time": 0}) + "\n" + json.dumps(found[1]) + "\n")
    html = render([load_run(tmp_path)])
    assert "hang, culprit: rank 1 is behind (hang-20261121-100000.txt)" in html
    assert "1970-01-01 00:00 UTC" in html and "rank 3 &lt;died&gt;" in html and "continues from step-000001" in html
