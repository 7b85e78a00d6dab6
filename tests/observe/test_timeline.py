"""The file of each rank's phases: what is written, what a killed and a continued run leave, what is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.observe.runs import read_jsonl
from megarl.observe.timeline import Timeline, chosen_ranks, is_phase, timeline_ranks


def ticking(*times: float) -> Iterator[float]:
    yield from times


def records(folder: Path, rank: int = 0) -> list[dict[str, object]]:
    return read_jsonl(folder / "timeline" / f"rank-{rank:05d}.jsonl", is_phase).records


def test_phases_follow_each_other_and_know_their_step(tmp_path: Path) -> None:
    # begin, end of each phase; `enter` ends the one before at its own time
    clock = ticking(10.0, 12.0, 12.0, 15.5, 16.0, 17.0, 18.0, 18.25)
    timeline = Timeline(tmp_path, 3, clock=clock.__next__)
    timeline.enter("evaluation")
    timeline.step("train", 1)
    timeline.enter("rollout")
    timeline.waited(1.5)
    timeline.enter("wait for weights")
    with timeline.phase("actor_update"):
        timeline.waited(7.0)  # more than the phase took: a rank cannot have waited longer
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
        file.write(b'{"stage": "train", "step": 4, "pha')  # killed while it wrote
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
    chosen = chosen_ranks(ranks, most)
    assert len(chosen) == len(set(chosen)) == min(most, len(ranks))
    assert chosen == sorted(chosen) and {ranks[0], ranks[-1]} <= set(chosen) <= found


@pytest.mark.parametrize("line", ['{"step": 1, "stage": "train"}', '{"phase": "x", "begin": 1, "end": 2}'])
def test_other_lines_are_no_phases(line: str) -> None:
    assert not is_phase(json.loads(line))
