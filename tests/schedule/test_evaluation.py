"""Sets of held-out problems: which are evaluated after which step, in a plan and in runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megarl.observe.runs import load_run
from megarl.observe.terminal import format_evaluation
from megarl_report.report import make_headline, tabulate_sources
from tests.ranks import RankPool
from tests.schedule.jobs import train
from tests.schedule.test_resume import TIMES, make_config, write_task


@given(st.integers(1, 12), st.integers(0, 5), st.none() | st.integers(1, 5))
def test_when_a_set_is_evaluated(steps: int, every: int, own: int | None) -> None:
    config = make_config(Path("x"), Path("run"), steps=steps, evaluation={"every": every})
    interval = own or every or steps
    expected = {0, steps, *range(interval, steps, interval)}
    assert {step for step in range(steps + 1) if config.evaluates(step, own)} == expected


def recorded(run_dir: Path) -> tuple[list[dict[str, Any]], str]:
    """Return a run's records without values that depend on the clock, and its responses."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in record.items() if not k.startswith((*TIMES, "memory"))} for record in records]
    return kept, (run_dir / "evaluations.jsonl").read_text()


def test_a_run_evaluates_each_set_at_its_own_steps(
    ranks: Callable[..., RankPool], tmp_path: Path, monkeypatch: Any
) -> None:
    """The schedule is the same when a run continues from a checkpoint between two evaluations."""
    write_task(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for name, some in (("easy", rows[:4]), ("hard", rows[4:7]), ("rare", rows[7:9])):
        lines = (json.dumps({**row, "data_source": f"of {name}"}) + "\n" for row in some)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    entries = [
        tmp_path / "easy.jsonl",
        {"path": tmp_path / "hard.jsonl", "name": "hard", "samples": 2},
        {"path": tmp_path / "rare.jsonl", "name": "rare", "samples": 3, "every": 3},
    ]
    config = make_config(
        tmp_path,
        tmp_path / "run",
        steps=4,
        data={"eval": entries},
        evaluation={"every": 2, "samples": 1},
        checkpoint={"every": 2, "export_hf": False},
    )
    ranks(1, 1, 1).run(train, config=config)
    straight = records, answers = recorded(config.run_dir)
    evaluations = {record["step"]: record for record in records if record["stage"] == "eval"}
    found = {
        step: {name for name in ("of_easy", "hard", "rare") if f"eval/{name}/avg" in record}
        for step, record in evaluations.items()
    }
    whole = {"of_easy", "hard", "rare"}
    assert found == {0: whole, 2: whole - {"rare"}, 3: {"rare"}, 4: whole}
    for step in (0, 2, 4):  # the headline covers the same problems each time
        record = evaluations[step]
        assert (record["eval/problems"], record["eval/of_easy/problems"], record["eval/hard/k"]) == (7, 4, 2)
        mean = (4 * record["eval/of_easy/avg"] + 3 * record["eval/hard/avg"]) / 7
        assert abs(record["eval/avg"] - mean) < 1e-8 and "eval/pass" not in record
    assert not {"eval/avg", "eval/problems", "eval/k"} & evaluations[3].keys()
    sets = [(answer["step"], answer["set"]) for answer in map(json.loads, answers.splitlines())]
    assert [sets.count((3, name)) for name in (None, "hard", "rare")] == [0, 0, 6]
    assert [sets.count((4, name)) for name in (None, "hard", "rare")] == [4, 6, 6]

    assert format_evaluation(evaluations[3]).startswith("rare  ")
    assert [line.split()[0] for line in format_evaluation(evaluations[4]).splitlines()[1:]] == sorted(
        found[4]
    )
    run = load_run(config.run_dir)
    assert [cells[0] for cells, _ in tabulate_sources(run)["rows"]] == sorted(whole)
    assert make_headline(run)[2].startswith("step 0 to 4, avg over 7 problems")

    shutil.rmtree(config.run_dir / "checkpoints" / "step-000004")
    ranks(1, 1, 1).run(train, config=config)
    assert recorded(config.run_dir) == straight
