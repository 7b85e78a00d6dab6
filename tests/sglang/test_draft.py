"""Draft models on a real SGLang engine on a CPU: samples do not change, and the draft's weights stay."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

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


def mean_accepted(pool: RankPool, params: SamplingParams) -> float:
    [(responses, _)] = pool.run(jobs.sample, name="draft", params=params)
    return 1 + sum(r.accepted_drafts for r in responses) / sum(r.verifications for r in responses)


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE"])
def test_a_draft_changes_no_sample_and_no_transfer_changes_it(
    algorithm: str, ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    """Tokens are those of the transformers engine, log-probs the trainer's, at several temperatures.

    The STANDALONE draft begins as a copy of the model: greedily all of it is accepted, and less of it after
    the model was trained. Its weights are its folder's before and after transfers."""
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
            for params in (SamplingParams(48), SamplingParams(24, 0.7, 0.8, 10), SamplingParams(24, 0.0)):
                check_samples(pool, "draft", dump, params, version)
            weights.append(read_draft(pool, dump))
            accepted = mean_accepted(pool, SamplingParams(24, 0.0))
            assert 1 <= accepted <= 4
            if algorithm == "STANDALONE":
                assert accepted > 3.5 if version == 0 else accepted < 4
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
    """Pearson's chi-square of the third token over 600 responses to a prompt, against the trainer's own
    probabilities: expected counts are sums over the responses' first tokens."""
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
        # Second tokens given first ones: the model's probabilities, from Hugging Face's model.
        from transformers import AutoModelForCausalLM

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
