"""Draft models on a real SGLang engine on a CPU: samples do not change, and the draft's weights stay."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.rollout.sampling import SamplingParams
from tests.ranks import RankPool
from tests.sglang import jobs
from tests.sglang.test_engine import begin, check_samples, check_weights
from tests.tiny_models import make_tiny_model

SIZES: dict[str, Any] = {"vocab": 307, "hidden": 64, "ffn": 96}
pytestmark = pytest.mark.timeout(1800)


def make_eagle(folder: Path, target: Path) -> Path:
    """Write an untrained EAGLE head of a Llama model: a layer over embeddings and hidden states."""
    torch.manual_seed(0)
    config = json.loads((target / "config.json").read_text())
    layer = {k: v for k, v in load_file(target / "model.safetensors").items() if ".layers.0." in k}
    tensors = {name.removeprefix("model."): tensor.clone() for name, tensor in layer.items()}
    tensors.pop("layers.0.input_layernorm.weight")
    hidden = config["hidden_size"]
    tensors |= {
        "fc.weight": torch.randn(hidden, 2 * hidden) / math.sqrt(hidden),
        "fc.bias": torch.zeros(hidden),
    }
    folder.mkdir()
    for file in target.glob("*token*"):
        shutil.copy(file, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def start(pool: RankPool, target: Path, draft: Path, algorithm: str, **options: Any) -> None:
    given = {
        "custom_weight_loader": ["megarl.rollout.engines.sglang_inside.load_shards", jobs.DUMP],
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft),
        **options,
    }
    begin(pool, "draft", target, engine_options=given, max_response_tokens=48)


def read_draft(pool: RankPool, folder: Path) -> dict[str, torch.Tensor]:
    pool.run(jobs.dump_draft, name="draft", path=folder / "draft{rank}.safetensors")
    return load_file(folder / "draft0.safetensors")


def count_accepted(
    model: Any, prompt: tuple[int, ...], response: list[int], steps: int = 3
) -> tuple[int, int]:
    """Return a response's accepted drafts and passes, by a loop with Hugging Face's model as the draft.

    SGLang shows drafts a sequence without its first token."""
    tokens, known, accepted, passes = [*prompt, *response], len(prompt) + 1, 0, 0
    while known < len(tokens):
        draft = tokens[1:known]
        for _ in range(steps):
            with torch.no_grad():
                draft.append(int(model(torch.tensor([draft])).logits[0, -1].argmax()))
        proposed, place = draft[known - 1 :], 0
        while place < steps and known + place < len(tokens) and proposed[place] == tokens[known + place]:
            place += 1
        accepted, passes, known = accepted + place, passes + 1, known + place + 1
    return accepted, passes


def check_accepted(pool: RankPool, draft: Path) -> None:
    """Compare the engine's counts with the loop's. The engine may accept tokens beyond a response's limit.

    The prefix cache must be empty: it shares the draft's entry of a prompt's last token, which depends on the
    first token of the response."""
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    [(responses, _)] = pool.run(jobs.sample, name="draft", params=SamplingParams(24, 0.0), count=1)
    for prompt, response in zip(jobs.PROMPTS, responses, strict=True):
        accepted, passes = count_accepted(model, prompt, response.tokens.tolist())
        assert response.verifications == passes
        assert accepted <= response.accepted_drafts <= accepted + 3
    assert sum(response.accepted_drafts for response in responses) > 0


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE"])
def test_a_draft_changes_no_sample_and_no_transfer_changes_it(
    algorithm: str, ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    """Tokens are those of the transformers engine, log-probs the trainer's, at several temperatures.

    The engine accepts what a loop accepts. The draft's weights stay its folder's."""
    target = make_tiny_model(tmp_path / "target", "llama", tied=False, **SIZES)
    draft = target if algorithm == "STANDALONE" else make_eagle(tmp_path / "eagle", target)
    pool = ranks(1, 1, 1)
    start(pool, target, draft, algorithm)
    try:
        weights = []
        for version in (0, 1):
            dump = tmp_path / str(version)
            dump.mkdir()
            pool.run(jobs.deliver, name="draft", version=version, dump=dump)
            check_weights(dump, 1)
            if algorithm == "STANDALONE":
                check_accepted(pool, draft)
            for params in (SamplingParams(48), SamplingParams(24, 0.7, 0.8, 10), SamplingParams(24, 0.0)):
                check_samples(pool, "draft", dump, params, version)
            weights.append(read_draft(pool, dump))
            pool.run(jobs.update, name="draft")
        shared = {"lm_head.weight", "model.embed_tokens.weight"} if algorithm == "EAGLE" else set[str]()
        assert weights[0].keys() == weights[1].keys()
        for name in weights[0].keys() - shared:
            assert torch.equal(weights[0][name], weights[1][name]), name
        own = load_file(draft / "model.safetensors")
        stem = "" if algorithm == "EAGLE" else "model."
        for name in ("layers.0.mlp.down_proj.weight", "layers.0.post_attention_layernorm.weight"):
            assert torch.equal(weights[1][f"model.{name}"], own[f"{stem}{name}"]), name
    finally:
        if pool.alive:
            pool.run(jobs.stop, name="draft")


def test_the_distribution_of_a_token_is_the_models(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    """Pearson's chi-square of the third token of 600 responses to a prompt.

    Expected counts are sums of Hugging Face's probabilities, given the responses' first two tokens."""
    target = make_tiny_model(tmp_path / "target", "llama", tied=False, vocab=29, hidden=64, ffn=96)
    pool = ranks(1, 1, 1)
    start(pool, target, target, "STANDALONE")
    try:
        pool.run(jobs.deliver, name="draft", version=0, dump=tmp_path)
        [(responses, ours)] = pool.run(
            jobs.sample, name="draft", params=SamplingParams(3), count=600, asked=[(3, 9, 4)]
        )
        assert sum(r.accepted_drafts for r in responses) > 0
        theirs = torch.tensor([x for r in responses for x in r.logprobs.tolist()])
        assert (theirs - ours).abs().max() <= 1e-4
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        full = [r.tokens.tolist() for r in responses if r.num_tokens == 3]
        with torch.no_grad():
            logits = model(torch.tensor([[3, 9, 4, *tokens[:2]] for tokens in full])).logits[:, -1]
        expected = logits.double().softmax(-1).sum(0).numpy()
        observed = np.bincount([tokens[2] for tokens in full], minlength=29)
        statistic = float(((observed - expected) ** 2 / expected).sum())
        assert statistic < 28 + 5 * math.sqrt(2 * 28), statistic  # 5 standard deviations above the mean
    finally:
        if pool.alive:
            pool.run(jobs.stop, name="draft")


def test_the_example_trains(tmp_path: Path) -> None:
    """A step of examples/draft.yaml reports the accepted length, and its log-probs are the trainer's."""
    from megarl_tasks.arithmetic import write_demo

    write_demo(tmp_path, 0)
    overrides = [f"model.path={tmp_path}/model", f"data.train=[{tmp_path}/train.jsonl]", "evaluation.every=0"]
    overrides += [
        f"data.eval=[{tmp_path}/eval.jsonl]",
        f"run_dir={tmp_path}/run",
        "steps=1",
        "log.report=false",
    ]
    overrides += [f"rollout.engine_options.speculative_draft_model_path={tmp_path}/model"]
    overrides += ["rollout.prompts=4", "rollout.group_size=4", "update.mini_batch=16", "actor.warmup_steps=0"]
    overrides += ["rollout.dynamic_sampling.enabled=false", "evaluation.max_problems=4"]
    command = [sys.executable, "-m", "megarl", "train", "examples/draft.yaml", *overrides]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    [step] = [record for record in records if record.get("stage") == "train" or "rollout/tokens" in record]
    assert 1 <= step["rollout/accept_length"] <= 4
