"""The file of each rank's phases: how it is written and read, also after a kill and a resumption."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megarl.observe.runs import load_run, read_jsonl
from megarl.observe.timeline import Timeline, choose_ranks, is_phase, timeline_ranks
from megarl_report.figures import draw_timeline
from tests.report.synthetic_run import write_run, write_timeline


def ticking(*times: float) -> Iterator[float]:
    yield from times


def records(folder: Path, rank: int = 0) -> list[dict[str, object]]:
    return read_jsonl(folder / "timeline" / f"rank-{rank:05d}.jsonl", is_phase).records


def test_phases_follow_each_other_and_know_their_step(tmp_path: Path) -> None:
    # start and end of each phase; `enter` ends the previous phase when the new one starts
    clock = ticking(10.0, 12.0, 12.0, 15.5, 16.0, 17.0, 18.0, 18.25)
    timeline = Timeline(tmp_path, 3, clock=clock.__next__)
    timeline.enter("evaluation")
    timeline.step("train", 1)
    timeline.enter("rollout")
    timeline.add_wait(1.5)
    timeline.enter("wait for weights")
    with timeline.phase("actor_update"):
        timeline.add_wait(7.0)  # more than the phase took: the wait is limited to that
    timeline.close()
    keys = ("step", "phase", "begin", "end", "waited")
    assert [tuple(record[key] for key in keys) for record in records(tmp_path, 3)] == [
        (0, "evaluation", 10.0, 12.0, 0.0),
        (1, "rollout", 12.0, 15.5, 1.5),
        (1, "wait for weights", 16.0, 17.0, 1.0),
        (1, "actor_update", 18.0, 18.25, 0.25),
    ]


def test_a_killed_run_is_continued(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, 0)
    for number in (1, 2, 3):
        timeline.step("train", number)
        timeline.enter("rollout")
    timeline.leave()
    path = tmp_path / "timeline" / "rank-00000.jsonl"
    with path.open("ab") as file:
        file.write(b'{"stage": "train", "step": 4, "pha')  # killed during this write
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]
    again = Timeline(tmp_path, 0)
    again.enter("resume")
    again.truncate_after(2, "train")  # the newest checkpoint is of step 2
    again.step("train", 3)
    again.enter("rollout")
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["phase"]) for line in lines] == [
        (1, "rollout"),
        (2, "rollout"),
        (0, "resume"),
        (3, "rollout"),
    ]
    anew = Timeline(tmp_path, 0)
    anew.clear()
    anew.close()
    assert path.read_bytes() == b""


def test_ranks_are_found_and_chosen(tmp_path: Path) -> None:
    assert timeline_ranks(tmp_path) == []
    for rank in (0, 2, 11):
        Timeline(tmp_path, rank).close()
    assert timeline_ranks(tmp_path) == [0, 2, 11]


@given(st.sets(st.integers(0, 3000), min_size=1), st.integers(2, 16))
def test_the_first_and_the_last_rank_are_chosen(found: set[int], most: int) -> None:
    ranks = sorted(found)
    chosen = choose_ranks(ranks, most)
    assert len(chosen) == len(set(chosen)) == min(most, len(ranks))
    assert chosen == sorted(chosen) and {ranks[0], ranks[-1]} <= set(chosen) <= found


@pytest.mark.parametrize("line", ['{"step": 1, "stage": "train"}', '{"phase": "x", "begin": 1, "end": 2}'])
def test_other_lines_are_no_phases(line: str) -> None:
    assert not is_phase(json.loads(line))


def test_the_figure_of_a_run(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", "dapo", steps=12))
    found = draw_timeline([run])
    assert found is not None and found.table is not None
    texts = re.findall(r"step \d+, [a-z, -]+: [\d.]+ s", found.svg)
    # A step's time includes its evaluation (step 7); the first step is shown only if it is the only one.
    assert texts == ["step 2, after warm-up: 2.4 s", "step 7, slowest: 5.4 s", "step 12, last: 2.4 s"] or (
        len(texts) == 4 and "step 7, slowest: 5.4 s" in texts
    )
    heads, rows = found.table
    assert heads == ["share of the time that it waited", "all phases", "rollout"]
    # Of 12 steps of 2.4 s and an evaluation of 3 s, rank 1 waits 0.05 s in each step.
    assert [cells for cells, _ in rows] == [
        ["all ranks", "0.9%", "0.9%"],
        ["rank 0", "0.0%", "0.0%"],
        ["rank 1", f"{12 * 0.05 / 31.8:.1%}", f"{12 * 0.05 / 31.8:.1%}"],
    ]
    assert draw_timeline([run, run]) is None


def test_of_many_ranks_some_are_shown_and_engines_wait_as_their_first_rank_does(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dapo", steps=5)
    shutil.rmtree(folder / "timeline")
    write_timeline(folder, 5, trainers=12, engines=8)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["parallel"]["rollout_ranks"], config["rollout"]["engine_tp"] = 8, 2
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run = load_run(folder)
    assert run.ranks == 20 and len(run.timeline) == 16 and {0, 19} <= set(run.timeline)
    found = draw_timeline([run])
    assert found is not None and found.table is not None
    cells = {row[0]: row[1:] for row, _ in found.table[1]}
    assert "16 of 20 ranks" in cells and "wait for batch" in found.table[0]
    for rank, waited in {12: 0.5, 14: 0.2, 15: 0.2, 18: 0.2, 19: 0.2}.items():
        if f"rank {rank}" in cells:
            assert cells[f"rank {rank}"][0] == f"{waited / 2.4:.1%}"
    assert cells["rank 0"][0] == f"{0.1 / 2.4:.1%}"  # a rank that waits for a batch is idle
    text = (folder / "timeline" / "rank-00000.jsonl").read_bytes()
    (folder / "timeline" / "rank-00000.jsonl").write_bytes(text[:-30])  # truncated by a kill
    assert draw_timeline([load_run(folder)]) is not None


def test_a_run_without_timelines_has_no_figure(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dapo", steps=3)
    shutil.rmtree(folder / "timeline")
    assert draw_timeline([load_run(folder)]) is None
