"""Qwen3.5: gated delta nets between layers of gated attention. Log-probabilities and gradients against
Hugging Face's over every kind of parallelism, sequences that know nothing of each other, and checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5ForTokenClassification,
    Qwen3_5TextConfig,
)

from megarl.config.errors import CheckpointError
from megarl.model.hf_config import check_buildable
from megarl.weights.families import read_config
from megarl.weights.hf import HFFolder
from tests.parallel import jobs
from tests.parallel.test_glm4_moe import fill_gradients
from tests.parallel.test_invariance import VOCAB, make_batch
from tests.parallel.test_parity import hf_logprobs, sequences
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model, make_tokenizer

Ranks = Callable[..., RankPool]
SLOW = pytest.mark.slow
# tp, pp, dp, ep, cp, and virtual stages: the chunks of a virtual one have a single layer, of one kind.
LAYOUTS = [
    (1, 1, 1),
    (2, 2, 1),
    pytest.param((2, 1, 1), marks=SLOW),
    pytest.param((1, 2, 1), marks=SLOW),
    pytest.param((1, 1, 2), marks=SLOW),
    (1, 1, 1, 1, 2),
    pytest.param((2, 1, 1, 1, 2), marks=SLOW),
    pytest.param((1, 2, 1, 1, 1, 2), marks=SLOW),
]
# Every other layer has full attention; in the second model the last alone, as in published ones.
MODELS: list[dict[str, Any]] = [
    {"head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 12},
    {"tied": True, "kv_heads": 4, "full_attention_interval": 4, "linear_num_key_heads": 4}
    | {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3, "linear_value_head_dim": 6},
]


def tiny(folder: Path, **options: Any) -> Path:
    return make_tiny_model(folder, "qwen3_5_text", **{"layers": 4, **options})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logprobs_equal_hugging_face(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    prompts, responses = sequences(101)
    prompts[5] = prompts[5] * 9  # several chunks of the delta rule
    for number, options in enumerate(MODELS):
        folder = tiny(tmp_path / str(number), vocab=101, **options)
        expected, entropy = hf_logprobs(folder, prompts, responses, 1.0)
        arguments = {"folder": folder, "prompts": prompts, "responses": responses}
        for sequence_parallel in (None, False) if layout[0] > 1 else (None,):
            found = ranks(*layout).run(jobs.logprobs, sequence_parallel=sequence_parallel, **arguments)
            for logprobs, entropies in found:
                assert (logprobs - expected).abs().max() <= 1e-5, options
                assert (entropies - entropy).abs().max() <= 1e-5, options


def hf_gradients(folder: Path, batch: Any) -> dict[str, Tensor]:
    """Of the mean negative log-probability of all responses' tokens, by the files' names. In float64, but for
    the delta rule, which transformers computes in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    fill_gradients(model, batch)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_equal_hugging_face(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    batch = make_batch()
    batch.tokens = batch.tokens.clamp(min=1)  # Hugging Face gives the padding token, 0, no gradient
    batch["correct"] = torch.ones(8, dtype=torch.bool)
    batch["advantages"] = torch.zeros(batch.num_tokens)
    options: dict[str, Any] = {"nll_weight": 1.0, "budget": 34}
    if layout[0] > 1:
        options["sequence_parallel"] = layout[1] > 1
    for number, model in enumerate(MODELS):
        folder = tiny(tmp_path / str(number), vocab=VOCAB, **model)
        theirs = hf_gradients(folder, batch)
        found = ranks(*layout).run(
            jobs.gradients, folder=folder, batch=batch, which="actor", options=options
        )[0]
        norm = torch.cat([x.flatten() for x in theirs.values()]).norm()
        assert found["norm"] == pytest.approx(float(norm), rel=1e-4)
        for name, gradient in theirs.items():
            difference = (found["gradients"][name] - gradient).abs().max()
            assert difference <= 1e-5 * norm, (model, name, difference / norm)


@pytest.mark.parametrize("layout", [(1, 1, 1), pytest.param((2, 1, 1), marks=SLOW)], ids=str)
def test_values_equal_hugging_face(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    prompts, responses = sequences(101)
    folder = tiny(tmp_path, vocab=101, classification="token")
    config = Qwen3_5TextConfig.from_pretrained(folder)  # else transformers takes it for a model of images
    model = Qwen3_5ForTokenClassification.from_pretrained(folder, config=config, dtype=torch.float32)
    expected = []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits
            expected.append(logits[0, len(prompt) - 1 : -1, 0])
    for found in ranks(*layout).run(jobs.values, folder=folder, prompts=prompts, responses=responses):
        assert (found - torch.cat(expected)).abs().max() <= 1e-5


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 1, 1, 2)], ids=str)
def test_no_state_of_one_response_reaches_another(
    layout: tuple[int, ...], ranks: Ranks, tmp_path: Path
) -> None:
    """Of sequences in one pack, some of which share a padded row's bucket, one after the other is changed:
    the log-probabilities of the others stay the same to the bit, and its own change."""
    folder = tiny(tmp_path, vocab=101, **MODELS[0])
    prompts, responses = sequences(101)
    pool, ends = ranks(*layout), torch.tensor([0, *map(len, responses)]).cumsum(0)

    def logprobs() -> Tensor:
        found = pool.run(jobs.logprobs, folder=folder, prompts=prompts, responses=responses)
        return found[0][0]

    before = logprobs()
    for changed in range(len(prompts)):
        own = slice(ends[changed], ends[changed + 1])
        kept, prompts[changed] = prompts[changed], [(t + 1) % 101 for t in prompts[changed]]
        after, prompts[changed] = logprobs(), kept
        others = torch.ones(len(before), dtype=torch.bool)
        others[own] = False
        assert torch.equal(after[others], before[others]), changed
        assert not torch.equal(after[own], before[own]), changed


@pytest.mark.slow
def test_a_checkpoint_of_one_layout_is_read_at_another(ranks: Ranks, tmp_path: Path) -> None:
    """Weights and both of Adam's moments, to the bit."""
    arguments: dict[str, Any] = {"folder": tiny(tmp_path / "model", vocab=VOCAB), "batch": make_batch()}
    arguments |= {"which": "actor", "checkpoint": tmp_path / "checkpoint"}
    arguments["checkpoint"].mkdir()
    saved = ranks(2, 2, 1).run(jobs.optimizer_around_a_checkpoint, read=False, **arguments)[0]
    assert any("A_log" in name and tensor.any() for name, tensor in saved.items())
    for layout in ((1, 1, 1), (1, 2, 2), (1, 2, 1, 1, 1, 2)):
        read = ranks(*layout).run(jobs.optimizer_around_a_checkpoint, read=True, **arguments)[0]
        assert read.keys() == saved.keys()
        different = [name for name in saved if not torch.equal(saved[name], read[name])]
        assert not different, (layout, different[:3])


def test_the_language_model_of_a_published_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What docs/families.md says to do with one makes a folder that can be trained, bit for bit."""
    source, out = tmp_path / "published", tmp_path / "text"
    text = read_config(tiny(tmp_path / "tiny", vocab=307, tied=True))
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(source)
    make_tokenizer(307).save_pretrained(source)
    GenerationConfig(eos_token_id=[1]).save_pretrained(source)
    with pytest.raises(CheckpointError, match="model_type: 'qwen3_5' is a model of images and text"):
        read_config(source)
    page = (Path(__file__).parents[2] / "docs/families.md").read_text()
    program = dedent(page.partition("Qwen3.5-9B-text <<'EOF'\n")[2].partition("  EOF\n")[0])
    monkeypatch.setattr(sys, "argv", ["-", str(source), str(out)])
    exec(compile(program, "docs/families.md", "exec"), {})
    check_buildable(out)
    assert HFFolder(out).extra == () and (out / "tokenizer.json").is_file()
    prefix = "model.language_model."
    published = load_file(source / "model.safetensors")
    own = {n.replace(prefix, "model."): x for n, x in published.items() if n.startswith(prefix)}
    saved = load_file(out / "model.safetensors")
    assert saved.keys() == own.keys() and all(torch.equal(saved[name], own[name]) for name in own)
