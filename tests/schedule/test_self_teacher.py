"""Self-distillation on real ranks: the teacher is the actor with a demonstration in its prompt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.config.schema import Config
from megarl.data.batch import TrainBatch, join, read_batch
from tests.schedule.test_resume import make_config, train, write_task

TEMPLATE = "{question} {demonstration} "
SDPO = {"average_rate": 0.3, "demonstration": "sibling", "ratio_cap": 2.0, "weights": "average"}
PRESETS: dict[str, dict[str, Any]] = {
    "sdpo": {"weights": "average", "average_rate": 0.3, "top_k": 20, "alpha": 0.5, "ratio_cap": 2.0},
    "opsd": {"weights": "initial", "demonstration": "answer", "top_k": 20},
    "sdft": {"weights": "average", "average_rate": 0.3, "demonstration": "answer", "ratio_cap": 2.0},
    "current": {"weights": "current", "demonstration": "extra_info.hint"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_task(tmp_path_factory.mktemp("self_teacher"))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows = [row | {"extra_info": {"hint": "1+1=2"} if i % 2 else {}} for i, row in enumerate(rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def configure(folder: Path, run_dir: Path, teacher: Mapping[str, Any], **keys: Any) -> Config:
    sampling = {
        "dynamic_sampling": {"enabled": False},
        "group_size": 4,
        "prompts": 6,
        "max_response_tokens": 8,
    }
    common = {"template": TEMPLATE, "max_context_tokens": 40, "alone": True}
    return make_config(
        folder,
        run_dir,
        teacher={**common, **teacher},
        rollout=sampling,
        checkpoint={"rollouts": True},
        **keys,
    )


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def first_batch(run_dir: Path) -> TrainBatch:
    files = sorted((run_dir / "rollouts/step-000001").glob("*.safetensors"))
    return join([read_batch(file) for file in files])


def expected_kl(folder: Path, batch: TrainBatch, answers: bool) -> tuple[float, float]:
    """Return the taught share of tokens and the mean log pi - log q, by transformers on plain texts."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    answer_by_question = {row["question"]: row["answer"] for row in rows}
    order = batch["row"].argsort().tolist()
    spans, groups = list(pairwise(batch.cu_seqlens.tolist())), batch["group_ids"].tolist()
    sequences = {row: batch.tokens[slice(*spans[row])] for row in order}
    prompts = batch.prompt_lengths.tolist()
    special = set(tokenizer.all_special_ids)

    def context(row: int) -> list[int] | None:
        prompt = sequences[row][: prompts[row]]
        if answers:
            question = tokenizer.decode(prompt, skip_special_tokens=True).strip()
            text = TEMPLATE.format(question=question, demonstration=answer_by_question[question])
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        others = [
            other
            for other in order
            if groups[other] == groups[row] and other != row and batch["correct"][other]
        ]
        if not others:
            return None
        shown = sequences[others[0]][prompts[others[0]] :].tolist()
        while shown and shown[-1] in special:
            shown.pop()
        question = tokenizer.decode(prompt, skip_special_tokens=True).strip()
        ends = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (f"{question} ", " ")]
        return [*ends[0], *shown, *ends[1]]

    taught, total, count = 0, 0.0, 0
    for row in order:
        sequence, before = sequences[row], context(row)
        response = sequence[prompts[row] :]
        count += len(response)
        if before is None:
            continue
        tokens = torch.tensor([*before, *response.tolist()])
        with torch.no_grad():
            own, theirs = (
                model(t[None]).logits[0, -len(response) - 1 : -1].log_softmax(-1).gather(1, response[:, None])
                for t in (sequence, tokens)
            )
        total += float((own - theirs).double().sum())
        taught += len(response)
    return taught / count, total / taught


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "answers"), [({"tp": 2}, True), ({"tp": 1, "dp": 2}, False)], ids=["tp", "dp"]
)
def test_the_teacher_equals_transformers(
    folder: Path, tmp_path: Path, layout: dict[str, int], answers: bool
) -> None:
    """Its log-probs are those of transformers over context and response, aligned to the responses.

    A sibling's response may be on the other replica; answers are with the prompts, on every layout."""
    teacher = {**SDPO, "demonstration": "answer" if answers else "sibling"}
    config = configure(folder, tmp_path / "run", teacher, steps=1, parallel=layout, update={"mini_batch": 24})
    train(config)
    [record] = read_records(config.run_dir)
    taught, kl = expected_kl(folder, first_batch(config.run_dir), answers)
    assert record["policy/taught"] == pytest.approx(taught) and (taught == 1) == answers
    assert record["policy/teacher_kl"] == pytest.approx(kl, abs=2e-5)
    assert record["teacher/missing"] + record["teacher/responses"] == 24 and abs(kl) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_each_method_takes_a_step(folder: Path, tmp_path: Path, name: str) -> None:
    config = configure(folder, tmp_path / name, PRESETS[name], steps=2)
    train(config)
    for record in read_records(config.run_dir):
        assert record["policy/grad_norm"] > 0 and 0 < record["policy/taught"] <= 1
        assert (record["teacher/missing"] > 0) == (PRESETS[name].get("demonstration") != "answer")


@pytest.mark.slow
def test_a_teacher_with_weights_in_flight(folder: Path, tmp_path: Path) -> None:
    """Batches that arrive in flight bring the texts of their prompts."""
    config = configure(
        folder,
        tmp_path / "run",
        PRESETS["opsd"],
        steps=3,
        parallel={"tp": 1, "dp": 1, "rollout_ranks": 1},
        schedule={"in_flight": "retract"},
    )
    train(config)
    for record in read_records(config.run_dir):
        assert record["teacher/missing"] == 0 and record["policy/taught"] == 1


@pytest.mark.slow
def test_a_resumed_average_is_bitwise_equal(folder: Path, tmp_path: Path) -> None:
    """A run that continues from step 2, here or at another layout, reads the average of its checkpoint."""
    whole = configure(folder, tmp_path / "whole", SDPO, steps=4)
    train(whole)
    for name, layout in {"again": {"tp": 1}, "tp": {"tp": 2}}.items():
        again = configure(folder, tmp_path / name, SDPO, steps=4, parallel=layout)
        (again.run_dir / "checkpoints").mkdir(parents=True)
        shutil.copytree(
            whole.run_dir / "checkpoints" / "step-000002", again.run_dir / "checkpoints" / "step-000002"
        )
        train(again)
        expected, found = (
            {record["step"]: record for record in read_records(run.run_dir)} for run in (whole, again)
        )
        for step in (3, 4):
            for key in ("policy/teacher_kl", "policy/teacher_loss", "policy/grad_norm"):
                tolerance = 0.0 if name == "again" else 1e-4
                assert found[step][key] == pytest.approx(expected[step][key], rel=tolerance, abs=0), key


@pytest.mark.slow
def test_long_prompts_are_left_out(folder: Path, tmp_path: Path) -> None:
    config = configure(folder, tmp_path / "run", {**SDPO, "max_context_tokens": 2}, steps=1)
    train(config)
    [record] = read_records(config.run_dir)
    assert record["teacher/too_long"] > 0 and record["teacher/responses"] == 0
    assert record["policy/taught"] == 0 and record["policy/grad_norm"] == 0
