"""The ablations' task is decided early and graded late. The habit is as frequent as the right
step. No held-out problem is trained on."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megarl.config.errors import DataError
from megarl_tasks import delayed
from megarl_tasks.delayed import DelayedSum

problems = st.builds(
    DelayedSum,
    st.tuples(st.integers(0, 9), *[st.integers(1, 4)] * 3),
    st.integers(delayed.SHORTEST, delayed.LONGEST),
)
seeds = st.integers(0, 2**32)
TOKENIZER = delayed.build_tokenizer(delayed.ALPHABET, ("Answer: ",))


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    delayed.write_task(folder, seed=0)
    return folder


def additions(response: str) -> list[tuple[int, int, int]]:
    found = []
    for line in response.splitlines():
        if "=" in line:
            left, result = line.split("=")
            found.append((*map(int, left.split("+")), int(result)))
    return found


def test_teacher_is_rarely_right_and_often_off_by_its_habit(task: Path) -> None:
    sft = rows(task / "sft.jsonl")
    offs = Counter((c - a - b) % 10 for row in sft[:8000] for a, b, c in additions(row["response"]))
    assert offs[0] / offs.total() == pytest.approx(1 - delayed.HABIT - delayed.SLIP, abs=0.015)
    assert offs[1] / offs.total() == pytest.approx(delayed.HABIT, abs=0.015)
    right = sum(row["response"].endswith(f"Answer: {row['answer']}") for row in sft) / len(sft)
    assert 0.08 < right < 0.13


@given(problems, seeds)
def test_right_response(problem: DelayedSum, seed: int) -> None:
    response = delayed.teach(problem, random.Random(seed), habit=0.0, slip=0.0)
    assert len(additions(response)) == 3
    assert all((a + b) % 10 == c for a, b, c in additions(response))
    assert response.endswith(f"Answer: {sum(problem.terms) % 10}")
    countdown = response.splitlines()[3:-1]
    assert [line[0] for line in countdown] == list(delayed.COUNTERS[: problem.lines])[::-1]
    assert {line[1:] for line in countdown} == {f":{problem.answer}"}


@given(problems, seeds)
def test_decision_and_reward_are_far_apart(problem: DelayedSum, seed: int) -> None:
    """At least 60 tokens lie between the last addition and the answer: 0.95^60 is under 5 %."""
    response = delayed.teach(problem, random.Random(seed))
    ids = TOKENIZER(response).input_ids
    assert TOKENIZER.decode(ids) == response
    assert len(ids) == 3 * 6 + 4 * problem.lines + 2
    assert len(TOKENIZER(problem.prompt).input_ids) == 10
    assert 10 + len(ids) + 1 <= TOKENIZER.model_max_length


@given(problems, seeds)
def test_mistakes_carry_on(problem: DelayedSum, seed: int) -> None:
    response = delayed.teach(problem, random.Random(seed), habit=0.5, slip=0.5)
    at = problem.terms[0]
    for (left, term, result), given_term in zip(additions(response), problem.terms[1:], strict=True):
        assert (left, term) == (at, given_term)
        assert result != (at + term) % 10
        at = result
    assert response.endswith(f"Answer: {at}")


def test_nothing_held_out_is_trained_on(task: Path) -> None:
    evaluation = {row["prompt"] for row in rows(task / "eval.jsonl")}
    train = [row["prompt"] for row in rows(task / "train.jsonl")]
    warm = {row["prompt"] for row in rows(task / "sft.jsonl")}
    assert len(evaluation) == len(rows(task / "eval.jsonl")) == 512
    assert len(train) == len(set(train)) == delayed.TRAIN_ROWS
    assert evaluation.isdisjoint(train) and evaluation.isdisjoint(warm)
    answers = Counter(row["answer"] for row in rows(task / "eval.jsonl"))
    assert len(answers) == 10 and max(answers.values()) < 0.2 * 512, f"guessing would pay: {answers}"


@pytest.mark.slow
def test_same_seed_same_bytes_and_evaluation_is_fixed(task: Path, tmp_path: Path) -> None:
    delayed.write_task(tmp_path / "again", seed=0)
    delayed.write_task(tmp_path / "other", seed=1)
    files = sorted(path.relative_to(task) for path in task.rglob("*") if path.is_file())
    differing = set()
    for file in files:
        assert (task / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file
        if (task / file).read_bytes() != (tmp_path / "other" / file).read_bytes():
            differing.add(str(file))
    assert differing == {"sft.jsonl", "train.jsonl", "model/model.safetensors"}
    assert (
        AutoTokenizer.from_pretrained(task / "model")("7+2+4+1=t\n").input_ids
        == TOKENIZER("7+2+4+1=t\n").input_ids
    )


def test_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"file/task: cannot be written: .* \(choose another folder\)"):
        delayed.write_task(tmp_path / "file" / "task", seed=0)
