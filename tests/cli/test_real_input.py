"""The main job on real input: AIME 2024 in the DAPO project's schema, and GSM8K.

The model is a tiny random Qwen2.

Its accuracy is 0. The tests check that every row is read, prompted, answered, verified and counted.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.cli.processes import megarl
from tests.tiny_models import make_tiny_model

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
AIME, GSM8K = DATA / "aime-2024.parquet", DATA / "gsm8k_test_200.jsonl"
CONFIG = """\
recipe: dapo
run_dir: run
steps: 2
model: {{path: model, dtype: fp32}}
parallel: {{tp: 2, device: cpu}}
data: {{train: [{aime}], eval: [{aime}], max_prompt_tokens: 2016}}
rollout:
  prompts: 8
  group_size: 2
  max_response_tokens: 32
  dynamic_sampling: {{max_batches: 2, at_limit: continue}}
reward: {{overlong: {{buffer: 16}}}}
update: {{mini_batch: 8}}
evaluation: {{samples: 2}}
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    make_tiny_model(folder / "model", "qwen2", max_positions=2048)
    (folder / "aime.yaml").write_text(CONFIG.format(aime=AIME))
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def aime() -> dict[str, str]:
    """Return the answer of each problem in the file, read without megarl."""
    if not AIME.exists():
        pytest.skip(f"{AIME} is not on this machine")
    rows = pq.read_table(AIME).to_pylist()
    assert len(rows) == 960
    return {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in rows}


def check_answers(answers: list[dict[str, Any]], problems: dict[str, str], k: int) -> None:
    """Check that each problem was put into the chat template, answered k times, verified and found wrong."""
    assert Counter(a["uid"] for a in answers) == dict.fromkeys({a["uid"] for a in answers}, k)
    asked = {a["prompt"]: a["answer"] for a in answers}
    assert asked == {
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n": answer
        for text, answer in problems.items()
    }
    assert len(answers) == k * len(problems)
    for answer in answers:
        assert 0 < answer["length"] <= 32 and (answer["length"] == 32 or not answer["truncated"])
        assert answer["error"] is None and answer["correct"] is False
    assert len({a["response"] for a in answers}) > 0.9 * len(answers), (
        "each answer was sampled with a seed of its own"
    )


def test_evaluation_on_aime(folder: Path) -> None:
    problems = aime()
    done = megarl("eval", "aime.yaml", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "data: 30 of 960 rows used, 930 duplicates, 0 unusable\n30 problems x 2 answers by model\n"
        in done.stdout
    )
    out = folder / "run" / "eval"
    check_answers(lines(out / "answers.jsonl"), problems, k=2)
    assert json.loads((out / "data.json").read_text())["eval"] == {
        "rows": {str(AIME): 960},
        "kept": 30,
        "duplicates": 930,
        "rejected": [],
        "warned": [],
    }
    scores = json.loads((out / "scores.json").read_text())
    assert (scores["policy"], scores["problems"], scores["samples"]) == ("model", 30, 2)
    assert scores["answers"].pop("without_answer") <= 60
    assert scores["answers"].pop("truncated") <= 60
    assert scores["answers"] == {"all": 60, "right": 0, "unverified": 0, "ungraded": 0}
    # Wilson's interval for 0 of 30 with t = 2.045
    none = {
        "mean": 0.0,
        "low": 0.0,
        "high": pytest.approx(0.1224, abs=1e-4),
    }
    assert scores["scores"] == dict.fromkeys(("avg@2", "pass@1", "pass@2", "majority@2"), none)
    table = lines(out / "problems.jsonl")
    assert {row["answer"] for row in table} == set(problems.values()) and len(table) == 30
    for name in scores["scores"]:
        assert any(name in line and "0.0000 to 0.1224" in line for line in done.stdout.splitlines()), (
            "the table shows what the file says"
        )
    assert "the 20 hardest of 30 problems (all: problems.jsonl)" in done.stdout


def test_training_on_aime(folder: Path) -> None:
    problems = aime()
    done = megarl("train", "aime.yaml", "log.terminal=plain", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "data: 30 of 960 rows used, 930 duplicates, 0 unusable" in done.stdout
    run = folder / "run"
    assert json.loads((run / "data.json").read_text())["train"]["rows"] == {str(AIME): 960}
    records = lines(run / "metrics.jsonl")
    assert [(r["stage"], r["step"]) for r in records] == [
        ("eval", 0),
        ("train", 1),
        ("train", 2),
        ("eval", 2),
    ]
    for record in records:
        if record["stage"] == "eval":
            assert (record["eval/avg"], record["eval/problems"], record["eval/k"]) == (0, 30, 2)
        else:
            # Two generation batches of 8 prompts without a mixed group: the limit is reached, and the step
            # continues with these.
            assert (
                record["rollout/batches"],
                record["rollout/prompts"],
                record["rollout/groups_all_wrong"],
            ) == (2, 16, 16)
            assert record["reward/accuracy"] == 0 and record["reward/unverified"] == 0
    evaluations = lines(run / "evaluations.jsonl")
    for step in (0, 2):
        check_answers([answer for answer in evaluations if answer["step"] == step], problems, k=2)
    assert all(sample["answer"] in problems.values() for sample in lines(run / "samples.jsonl"))
    assert (run / "report.html").stat().st_size > 10_000


def test_the_trained_model_is_evaluated(folder: Path) -> None:
    aime()
    if not (folder / "run" / "hf").is_dir():
        pytest.skip("test_training_on_aime has not left a model")
    done = megarl(
        "eval",
        "aime.yaml",
        "--checkpoint",
        "run/hf",
        "--out",
        "after",
        "evaluation.max_problems=3",
        cwd=folder,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "3 problems x 2 answers by run/hf" in done.stdout
        and len(lines(folder / "after" / "answers.jsonl")) == 6
    )


def test_evaluation_on_gsm8k(folder: Path) -> None:
    if not GSM8K.exists():
        pytest.skip(f"{GSM8K} is not on this machine")
    wanted = {row["question"]: row["answer"].split("#### ")[1].replace(",", "") for row in lines(GSM8K)}
    ask = 'data.prompt_format="{prompt}\\nThe last line of your response must be Answer: $Answer"'
    arguments = ("eval", "aime.yaml", f"data.eval=[{GSM8K}]", ask, "evaluation.samples=1", "--out", "gsm8k")
    done = megarl(*arguments, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "data: 200 of 200 rows used, 0 duplicates, 0 unusable\n200 problems x 1 answers by model\n"
        in done.stdout
    )
    asked = {
        f"{question}\nThe last line of your response must be Answer: $Answer": answer
        for question, answer in wanted.items()
    }
    check_answers(lines(folder / "gsm8k" / "answers.jsonl"), asked, k=1)
