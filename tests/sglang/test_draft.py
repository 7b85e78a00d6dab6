"""Draft models on a real SGLang engine on a CPU: samples do not change, and the draft's weights stay."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
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

SIZES: dict[str, Any] = {"hidden": 64, "ffn": 96}
VOCAB = 43  # small, so that the distribution of a token is known from some hundred responses
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


@pytest.fixture(scope="module")
def standalone(
    ranks: Callable[..., RankPool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RankPool, Path]]:
    """Yield a rank with an engine whose draft is the model before training, and that model's folder."""
    target = make_tiny_model(
        tmp_path_factory.mktemp("standalone") / "target", "llama", tied=False, vocab=VOCAB, **SIZES
    )
    pool = ranks(1, 1, 1)
    start(pool, target, target, "STANDALONE")
    yield pool, target
    if pool.alive:
        pool.run(jobs.stop, name="draft")


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


def test_a_draft_changes_no_sample_and_no_transfer_changes_it(
    standalone: tuple[RankPool, Path], tmp_path: Path
) -> None:
    """Tokens are those of the transformers engine, log-probs the trainer's, at several temperatures.

    The engine accepts what a loop accepts. The draft's weights stay its folder's."""
    pool, target = standalone
    check_transfers(pool, tmp_path, target, is_eagle=False)


def test_an_eagle_head_changes_no_sample_and_no_transfer_changes_it(
    ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    """The same of EAGLE, whose draft shares the embeddings and the head of the model."""
    target = make_tiny_model(tmp_path / "target", "llama", tied=False, vocab=307, **SIZES)
    draft = make_eagle(tmp_path / "eagle", target)
    pool = ranks(1, 1, 1)
    start(pool, target, draft, "EAGLE")
    try:
        check_transfers(pool, tmp_path, draft, is_eagle=True)
    finally:
        if pool.alive:
            pool.run(jobs.stop, name="draft")


def check_transfers(pool: RankPool, folder: Path, draft: Path, *, is_eagle: bool) -> None:
    """Check samples and weights of the model and its draft, before and after an update."""
    weights = []
    for version in (0, 1):
        dump = folder / str(version)
        dump.mkdir()
        pool.run(jobs.deliver, name="draft", version=version, dump=dump)
        check_weights(dump, 1)
        if not is_eagle:
            check_accepted(pool, draft)
        for params in (SamplingParams(48), SamplingParams(24, 0.7, 0.8, 10), SamplingParams(24, 0.0)):
            check_samples(pool, "draft", dump, params, version)
        weights.append(read_draft(pool, dump))
        pool.run(jobs.update, name="draft")
    shared = {"lm_head.weight", "model.embed_tokens.weight"} if is_eagle else set[str]()
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0].keys() - shared:
        assert torch.equal(weights[0][name], weights[1][name]), name
    own = load_file(draft / "model.safetensors")
    stem = "" if is_eagle else "model."
    for name in ("layers.0.mlp.down_proj.weight", "layers.0.post_attention_layernorm.weight"):
        assert torch.equal(weights[1][f"model.{name}"], own[f"{stem}{name}"]), name


def test_the_distribution_of_a_token_is_the_models(standalone: tuple[RankPool, Path], tmp_path: Path) -> None:
    """Pearson's chi-square of the third token of 900 responses to a prompt.

    Expected counts are sums of Hugging Face's probabilities, given the responses' first two tokens."""
    pool, _ = standalone
    pool.run(jobs.deliver, name="draft", version=2, dump=tmp_path)
    [(responses, ours)] = pool.run(
        jobs.sample, name="draft", params=SamplingParams(3), count=900, asked=[(3, 9, 4)]
    )
    assert sum(r.accepted_drafts for r in responses) > 0
    theirs = torch.tensor([x for r in responses for x in r.logprobs.tolist()])
    assert (theirs - ours).abs().max() <= 1e-4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    full = [r.tokens.tolist() for r in responses if r.num_tokens == 3]
    with torch.no_grad():
        logits = model(torch.tensor([[3, 9, 4, *tokens[:2]] for tokens in full])).logits[:, -1]
    expected = logits.double().softmax(-1).sum(0).numpy()
    observed = np.bincount([tokens[2] for tokens in full], minlength=VOCAB)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = VOCAB - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), statistic  # 5 standard deviations above the mean


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
