"""A pretrained model of 135 million parameters, with its tokenizer and chat template: what is computed is
what transformers computes, and a run makes sense from the first answer to the export.

Its ranks take gigabytes, and end with each test: `make test-real` runs nothing beside it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.algorithms.scores import interval
from megarl.config import load_config
from megarl.data.batch import TrainBatch
from megarl.plan.host import LAUNCHER, cpu_bytes, cpu_bytes_by_phase
from megarl.plan.inputs import make_plan_inputs
from megarl.weights.families import read_config
from megarl_tasks.pretrained import write_task
from tests.cli.processes import megarl
from tests.parallel import jobs
from tests.parallel.test_parity import hf_logprobs
from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Share of the demo's held-out sums that the untrained model has right at temperature 1: 25 of 200, with its
# 95 % interval.
RIGHT = (0.086, 0.178)


Asked = tuple[Path, list[list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def asked(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """The task's folder; some of its prompts as the model reads them, and right answers."""
    folder = tmp_path_factory.mktemp("task")
    write_task(folder, 0)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    rows = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()[:4]]
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in rows
    ]
    responses = [tokenizer(f"The sum is\nAnswer: {row['answer']}<|im_end|>")["input_ids"] for row in rows]
    return folder, prompts, responses


@pytest.mark.parametrize("layout", [(1, 1, 2), (3, 1, 1)], ids=["dp 2", "tp 3"])
def test_logprobs_and_gradients_are_those_of_transformers(
    layout: tuple[int, int, int],
    smollm2: Path,
    asked: Asked,
) -> None:
    """In float32, the gradients of the policy's loss where nothing has been updated yet: -sum(advantage *
    log-probability) / tokens, those of transformers in float64."""
    _, prompts, responses = asked
    expected, _ = hf_logprobs(smollm2, prompts, responses, 1.0)
    with closing(RankPool(*layout)) as pool:
        for found, _ in pool.run(jobs.logprobs, folder=smollm2, prompts=prompts, responses=responses):
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()

        batch = TrainBatch.build(prompts, responses)
        mask = batch.response_mask
        advantages = torch.randn(int(mask.sum()), generator=torch.Generator().manual_seed(3))
        for name, values in (("old_logprobs", found.float()), ("advantages", advantages)):
            batch[name] = torch.zeros(batch.num_tokens)
            batch[name][mask] = values
        batch["correct"] = batch["truncated"] = torch.zeros(len(prompts), dtype=torch.bool)
        answer = pool.run(
            jobs.gradients, folder=smollm2, batch=batch, which="actor", options={"budget": 512}
        )[0]

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float64)
    # torch would leave the padding token's row out, which is also <|im_end|>, one of the prompts' tokens.
    model.get_input_embeddings().padding_idx = None
    begin = 0
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
        loss = -(advantages.double()[begin : begin + len(response)] * chosen).sum() / len(expected)
        loss.backward()
        begin += len(response)
    own = dict(model.named_parameters())
    found = answer["gradients"]
    assert found.keys() <= own.keys() and len(found) >= len(own)
    for name, gradient in found.items():
        theirs = own[name].grad
        # Those of transformers in float32 are up to 1e-4 from them, too; sums over three ranks are others.
        assert (gradient - theirs).norm() <= 5e-4 * theirs.norm(), name


def test_engine_trainer_and_export_agree(
    smollm2: Path,
    asked: Asked,
    tmp_path: Path,
) -> None:
    _, prompts, _ = asked
    out = tmp_path / "out"
    with closing(RankPool(1, 1, 2)) as pool:
        answers = pool.run(jobs.rollout_after_update, folder=smollm2, out=out, prompts=prompts)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for answer in answers:
        assert (answer["engine"] - answer["trainer"]).abs().max() <= 1e-4
        assert answer["greedy"] == answers[0]["greedy"]
    for prompt, tokens in zip(prompts, answers[0]["greedy"], strict=True):
        with torch.no_grad():
            generated = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=1, pad_token_id=0
            )
        assert generated[0, len(prompt) :].tolist() == tokens


def test_a_run(smollm2: Path, asked: Asked, tmp_path: Path) -> None:
    """VAPO at dp 2: value pretraining, two steps, an evaluation before and after, an export that answers; and
    its memory, which was planned."""
    task, _, _ = asked
    file = "configs/demos/smollm2_vapo.yaml"
    overrides = [
        f"run_dir={tmp_path / 'run'}",
        f"model.path={smollm2}",
        f"data.train=[{task / 'train.jsonl'}]",
        f"data.eval=[{task / 'eval.jsonl'}]",
        "steps=2",
        "rollout.prompts=4",
        "rollout.group_size=4",
        "rollout.max_response_tokens=24",
        "update.mini_batch=8",
        "evaluation.max_problems=48",
        "evaluation.every=0",
        "log.terminal=plain",
    ]
    # Not forked: its memory is compared with the plan.
    done = megarl("train", file, *overrides, cwd=ROOT, limit=1500.0, forked=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = next(record for record in records if record["stage"] == "eval")
    right = round(48 * first["eval/avg"])
    low, high = interval([1.0] * right + [0.0] * (48 - right), 1)
    assert low <= RIGHT[1] and high >= RIGHT[0]
    steps = [record for record in records if record["stage"] == "train"]
    assert len(steps) == 2 and all(record["policy/grad_norm"] > 0 for record in steps)
    plan = make_plan_inputs(load_config(ROOT / file, overrides), read_config(smollm2))
    held = sum(cpu_bytes(plan).values())
    for phase, parts in cpu_bytes_by_phase(plan).items():
        found = steps[-1][f"memory_all/{phase}"] + LAUNCHER
        assert 0.85 <= (held + sum(parts.values())) / found <= 1.15, (phase, found)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    moved = [
        float((own - other).abs().max())
        for own, other in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert 0 < max(moved) < 1e-3
