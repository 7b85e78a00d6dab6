"""A multi-turn run from the engine to the samples.

An untrained tiny model, in an episode that always calls the calculator.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from megarl.agents.episode import Policy
from megarl.data.prompts import Prompt
from megarl.observe.runs import load_run
from megarl_report.report import write_report
from megarl_tasks.arithmetic import write_demo
from tests.schedule.demo import train


async def episode(prompt: Prompt, policy: Policy) -> bool:
    """Add 1 to the digits that the policy writes; correct if there are at least two."""
    turn = await policy.generate(max_tokens=5)
    digits = re.sub(r"\D", "", turn.text) or "0"
    result = await policy.call("megarl_tasks.calculator:calc", f"{int(digits)} + 1")
    policy.observe(f"\n{result}\n")
    await policy.generate(max_tokens=5)
    return len(digits) > 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["vapo", "dapo"])
def test_a_run_of_calls(recipe: str, tmp_path: Path) -> None:
    """Tool output is marked as observed in the samples, and no length counts it."""
    write_demo(tmp_path, 0)
    run_dir = tmp_path / recipe
    records = train(
        tmp_path,
        recipe,
        run_dir,
        f"model.path={tmp_path / 'model'}",
        "rollout.episode=tests.schedule.test_acting:episode",
        "rollout.turns.max_tokens=24",
        "rollout.max_response_tokens=12",
        "reward.overlong.buffer=2",
        *(["value_pretraining.steps=1"] if recipe == "vapo" else []),
    )
    steps = [record for record in records if record["stage"] == "train"]
    assert len(steps) == 2
    for record in steps:
        assert record["episode/calls_mean"] == 1 and record["episode/turns_mean"] == 2
        assert 2 <= record["response/length_mean"] <= 10 and record["episode/observed_mean"] >= 3
        assert math.isfinite(record["policy/grad_norm"]) and 0 < record["reward/accuracy"] < 1
    run = load_run(run_dir)
    with_tokens = [sample for sample in run.samples if sample.tokens and sample.stage == "train"]
    assert with_tokens
    for sample in with_tokens:
        assert sample.turns is not None and sample.observed is not None and sample.tokens is not None
        (_, before), (who, shown), _ = sample.turns
        digits = re.sub(r"\D", "", before) or "0"
        assert (who, shown) == ("observed", f"\n{int(digits) + 1}\n") and sample.correct == (len(digits) > 1)
        assert "".join(t for t, o in zip(sample.tokens, sample.observed, strict=True) if o) == shown
        assert sample.length == sample.observed.count(False)
        assert sample.advantages is not None
        assert all((a is None) == o for a, o in zip(sample.advantages, sample.observed, strict=True))
    answers = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert all([who for who, _ in answer["turns"]] == ["policy", "observed", "policy"] for answer in answers)
    html = write_report([run_dir], tmp_path / "report.html").read_text()
    assert "Calls and turns of an episode" in html and html.count('<pre class="observed">') >= 4
