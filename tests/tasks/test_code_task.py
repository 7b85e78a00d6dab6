"""The functions of `make demo TASK=code`: right, seeded, held out, and graded by the verifier."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

from megarl.rewards import VerifierPool
from megarl_tasks.code_task import EVAL_ROWS, PHRASES, SHOWN, TRAIN_ROWS, problems, write_task


def test_the_teachers_functions_pass_and_others_do_not() -> None:
    rng = random.Random(0)
    some = list(islice(problems(rng), 60))
    assert {problem.source for problem in some} == set(PHRASES)
    items = []
    for problem in some:
        names, tests = ", ".join(problem.names), problem.tests(rng)
        for expression in (problem.expression, f"{problem.expression} + 1"):
            items.append((f"```python\ndef f({names}):\n    return {expression}\n```", tests))
    with VerifierPool("megarl_tasks.code_verifier:verify", 1) as pool:
        scores = [verdict.score for verdict in pool.verify(items)]
    assert scores == [1.0, 0.0] * len(some)


def test_no_held_out_function_is_trained_on(tmp_path: Path) -> None:
    write_task(tmp_path, 0)
    asked = {}
    for name, count in (("train", TRAIN_ROWS), ("eval", EVAL_ROWS)):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == count and {row["data_source"] for row in rows} == set(PHRASES)
        asked[name] = {row["prompt"][-1]["content"] for row in rows}
        assert len(asked[name]) == count and SHOWN[1]["content"] not in asked[name]
    assert not asked["train"] & asked["eval"]
    first = (tmp_path / "train.jsonl").read_bytes()
    write_task(tmp_path, 0)
    assert (tmp_path / "train.jsonl").read_bytes() == first
    write_task(tmp_path, 1)
    assert (tmp_path / "train.jsonl").read_bytes() != first
