"""The prompt of a teacher that is the actor with a demonstration, and its batch."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.schema import DataConfig, TeacherConfig
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.data.prompts import Prompt, read_prompts
from megarl.data.teacher_prompts import PADDING, SIBLING, make_teacher_prompt, pad_teacher_prompts
from megarl.training.self_teacher import AverageWeights, make_teacher_batch
from tests.tiny_models import make_tokenizer

ALONE: Any = SimpleNamespace(world=1)


def read_one(folder: Path, template: str) -> tuple[Prompt, Any]:
    tokenizer = make_tokenizer(307)
    row = {
        "prompt": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "2+3=?"},
        ],
        "answer": "5",
        "extra_info": {"hint": "{x} 1+1", "empty": " "},
    }
    if template == "raw":
        row["prompt"] = "2+3=?"
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = DataConfig(
        train=[folder / "rows.jsonl"], template=template, max_prompt_tokens=200, prompt_key="prompt"
    )
    [prompt], _ = read_prompts(data.train, data, tokenizer)
    return prompt, tokenizer


@pytest.mark.parametrize("template", ["chat", "raw"])
def test_the_demonstration_is_in_the_last_user_message(tmp_path: Path, template: str) -> None:
    prompt, tokenizer = read_one(tmp_path, template)

    def make(demonstration: str) -> list[int]:
        config = TeacherConfig(demonstration=demonstration, template="{question} is {demonstration}?")
        return make_teacher_prompt(prompt, config, tokenizer)

    def expect(shown: str) -> list[int]:
        text = prompt.text.replace("2+3=?", f"2+3=? is {shown}?")
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    assert make("answer")[-len(expect("5")) :] == expect("5")
    assert make("extra_info.hint")[-len(expect("{x} 1+1")) :] == expect("{x} 1+1")
    assert make("extra_info.empty") == make("extra_info.absent") == []
    for question in (" ", "2+3=?\ue000"):  # the mark of a sibling is in no question
        prompt = replace(prompt, text=f"be brief{question}", question=question)
        assert make("answer") == make("sibling") == []
    prompt, tokenizer = read_one(tmp_path, template)
    shown = make("sibling")
    assert shown.count(SIBLING) == 1 and min(token for token in shown if token != SIBLING) >= 0


def test_responses_follow_the_teachers_prompts() -> None:
    """A sibling is the first other correct response, without special tokens at its end."""
    batch = TrainBatch.build([[1, 2]] * 3 + [[3]] * 2, [[10, 11, 0], [12, 0], [13], [14, 0], [15]])
    batch.rows = torch.arange(5)
    rollout = RolloutBatch.from_train_batch(batch)
    rollout["correct"] = torch.tensor([True, False, True, False, True])
    rollout["group_ids"] = torch.tensor([0, 0, 0, 1, 1])
    prompts = [[7, SIBLING, 8]] * 3 + [[9, SIBLING]] * 2
    rollout["teacher_prompts"] = pad_teacher_prompts(prompts)
    assert rollout["teacher_prompts"][4].tolist() == [9, SIBLING, PADDING]
    found = make_teacher_batch(rollout, batch, TeacherConfig(), [0], ALONE)
    starts = found.batch.cu_seqlens.tolist()
    sequences = [found.batch.tokens[a:b].tolist() for a, b in pairwise(starts)]
    assert sequences == [[7, 13, 8, 10, 11, 0], [7, 10, 11, 8, 12, 0], [7, 10, 11, 8, 13], [9, 15, 14, 0]]
    assert torch.equal(batch.tokens[found.indices], found.batch.tokens[found.batch.response_mask])
    counts = {"missing": 1, "too_long": 0, "tokens": 21, "responses": 4}
    assert found.metrics == {f"teacher/{name}": count for name, count in counts.items()}
    short = make_teacher_batch(rollout, batch, TeacherConfig(max_context_tokens=3), [0], ALONE)
    assert short.metrics["teacher/too_long"] == 2 and short.metrics["teacher/responses"] == 2


def test_the_average_is_float32() -> None:
    """Updates below bfloat16's resolution add up."""
    model: Any = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    model.weight.data.fill_(1.0)
    average = AverageWeights(model, 0.001)
    model.weight.data.fill_(2.0)
    expected = 1.0
    for _ in range(3):
        average.update(model)
        expected = 0.999 * expected + 0.001 * 2.0
    assert average.weights["weight"].flatten().tolist() == pytest.approx([expected] * 2)
    average.write(model)
    assert model.weight.dtype == torch.bfloat16 and float(model.weight[0, 0]) == 1.0
