"""Qwen3.5's mixtures and Qwen3-Next: gated delta nets, mixtures, and a shared expert with a gate.
Log-probabilities and gradients against Hugging Face's over every kind of parallelism, checkpoints, and the
folders that are published."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForTokenClassification,
    GenerationConfig,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from megarl.config.errors import CheckpointError
from megarl.model.hf_config import check_buildable
from megarl.weights.families import read_config
from megarl.weights.hf import HFFolder
from megarl.weights.megatron import conversion_layout, hf_to_megatron, megatron_to_hf
from tests.parallel import jobs
from tests.parallel.test_glm4_moe import hf_gradients
from tests.parallel.test_invariance import VOCAB, make_batch
from tests.parallel.test_parity import hf_logprobs, sequences
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model, make_tokenizer
from tests.weights.folders import folder_tensors

Ranks = Callable[..., RankPool]
SLOW = pytest.mark.slow
# tp, pp, dp, ep, cp, and virtual stages: the chunks of a virtual one have a single layer, of one kind.
LAYOUTS = [
    (1, 1, 1),
    (2, 2, 1, 2),
    pytest.param((2, 1, 1, 2), marks=SLOW),
    pytest.param((2, 1, 1), marks=SLOW),
    pytest.param((1, 1, 2, 2), marks=SLOW),
    (1, 1, 1, 2, 2),
    pytest.param((2, 1, 1, 2, 2), marks=SLOW),
    pytest.param((1, 2, 1, 1, 1, 2), marks=SLOW),
]
# Every other layer has full attention; in the second model the last alone, as in published ones. The fourth
# does not divide the scores of the experts that it chooses by their sum.
MODELS: list[dict[str, Any]] = [
    {"family": "qwen3_5_moe_text", "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 12},
    {"family": "qwen3_5_moe_text", "tied": True, "kv_heads": 4, "full_attention_interval": 4}
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3},
    {"family": "qwen3_next", "linear_num_key_heads": 4, "linear_num_value_heads": 12, "tied": True},
    {"family": "qwen3_next", "norm_topk_prob": False, "linear_num_key_heads": 4}
    | {"linear_num_value_heads": 4, "linear_value_head_dim": 6},
]


def tiny(folder: Path, **options: Any) -> Path:
    return make_tiny_model(folder, **{"layers": 4, "experts": 8, "active": 3, **options})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logprobs_equal_hugging_face(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    prompts, responses = sequences(101)
    prompts[5] = prompts[5] * 9  # several chunks of the delta rule
    for number, options in enumerate(MODELS):
        folder = tiny(tmp_path / str(number), vocab=101, **options)
        expected, entropy = hf_logprobs(folder, prompts, responses, 1.0)
        found = ranks(*layout).run(jobs.logprobs, folder=folder, prompts=prompts, responses=responses)
        for logprobs, entropies in found:
            assert (logprobs - expected).abs().max() <= 1e-5, options
            assert (entropies - entropy).abs().max() <= 1e-5, options


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_equal_hugging_face(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    """In float64, but for the delta rule, which transformers computes in float32."""
    batch = make_batch()
    batch.tokens = batch.tokens.clamp(min=1)  # Hugging Face gives the padding token, 0, no gradient
    batch["correct"] = torch.ones(8, dtype=torch.bool)
    batch["advantages"] = torch.zeros(batch.num_tokens)
    options: dict[str, Any] = {"nll_weight": 1.0, "budget": 34}
    for number, model in enumerate(MODELS[::2] if layout == (1, 1, 1) else MODELS):
        folder = tiny(tmp_path / str(number), vocab=VOCAB, **model)
        theirs = hf_gradients(folder, batch)
        found = ranks(*layout).run(
            jobs.gradients, folder=folder, batch=batch, which="actor", options=options
        )[0]
        norm = torch.cat([x.flatten() for x in theirs.values()]).norm()
        assert found["norm"] == pytest.approx(float(norm), rel=1e-4)
        assert found["gradients"].keys() == theirs.keys()
        for name, gradient in theirs.items():
            difference = (found["gradients"][name] - gradient).abs().max()
            assert difference <= 1e-5 * norm, (model, name, difference / norm)


@pytest.mark.parametrize("layout", [pytest.param((1, 1, 1), marks=SLOW), (2, 1, 1, 2)], ids=str)
def test_values_equal_hugging_face(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    prompts, responses = sequences(101)
    folder = tiny(tmp_path, family="qwen3_next", vocab=101, classification="token")
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits
            expected.append(logits[0, len(prompt) - 1 : -1, 0])
    for found in ranks(*layout).run(jobs.values, folder=folder, prompts=prompts, responses=responses):
        assert (found - torch.cat(expected)).abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_a_checkpoint_of_one_layout_is_read_at_another(family: Any, ranks: Ranks, tmp_path: Path) -> None:
    """Weights and both of Adam's moments, to the bit."""
    arguments: dict[str, Any] = {"folder": tiny(tmp_path / "model", family=family, vocab=VOCAB)}
    arguments |= {"batch": make_batch(), "which": "actor", "checkpoint": tmp_path / "checkpoint"}
    arguments["checkpoint"].mkdir()
    saved = ranks(2, 2, 1, 2).run(jobs.optimizer_around_a_checkpoint, read=False, **arguments)[0]
    assert any("shared_expert_gate" in name and tensor.any() for name, tensor in saved.items())
    for layout in ((1, 1, 1), (1, 2, 2, 2), (1, 2, 1, 1, 1, 2)):
        read = ranks(*layout).run(jobs.optimizer_around_a_checkpoint, read=True, **arguments)[0]
        assert read.keys() == saved.keys()
        different = [name for name in saved if not torch.equal(saved[name], read[name])]
        assert not different, (layout, different[:3])


def test_the_language_model_of_a_published_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Published folders have all experts of a layer in two tensors. What docs/families.md says to do with one
    keeps these, and makes a folder that can be trained and converted, bit for bit."""
    source, out = tmp_path / "published", tmp_path / "text"
    text = read_config(tiny(tmp_path / "tiny", family="qwen3_5_moe_text", vocab=307))
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=vision))
    model.to(torch.bfloat16).save_pretrained(source, save_original_format=False)
    make_tokenizer(307).save_pretrained(source)
    GenerationConfig(eos_token_id=[1]).save_pretrained(source)
    with pytest.raises(CheckpointError, match="model_type: 'qwen3_5_moe' is a model of images and text"):
        read_config(source)
    page = (Path(__file__).parents[2] / "docs/families.md").read_text()
    program = dedent(page.partition("Qwen3.5-9B-text <<'EOF'\n")[2].partition("  EOF\n")[0])
    monkeypatch.setattr(sys, "argv", ["-", str(source), str(out)])
    exec(compile(program, "docs/families.md", "exec"), {})
    check_buildable(out)
    assert HFFolder(out).extra == ()
    prefix, wanted = "model.language_model.", {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stem, stacked, kind = name.replace(prefix, "model.").rpartition(".experts.")
        if not name.startswith((prefix, "lm_head.")):
            continue
        if not stacked:
            wanted[name.replace(prefix, "model.")] = tensor
        for expert, whole in enumerate(tensor) if stacked else ():
            parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(kind, (kind,))
            for part, own in zip(parts, whole.chunk(len(parts)), strict=True):
                wanted[f"{stem}.experts.{expert}.{part}.weight"] = own
    hf_to_megatron(out, tmp_path / "megatron", conversion_layout(2, 1, 2), verify=True)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", verify=True)
    back = folder_tensors(tmp_path / "back")
    assert back.keys() == wanted.keys() and all(torch.equal(back[name], wanted[name]) for name in back)


def test_stacked_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", family="qwen3_next", vocab=101)
    tensors, stem = load_file(folder / "model.safetensors"), "model.layers.0.mlp.experts"
    whole = torch.stack([tensors.pop(f"{stem}.{expert}.down_proj.weight") for expert in range(8)])
    for wrong, message in (
        (whole[:7], f"{stem}.7.down_proj.weight: no file has this tensor"),
        (whole[:, :-1], rf"{stem}.0.down_proj.weight: shape \(31, 24\), but config.json asks for \(32, 24\)"),
        (whole.double(), f"{stem}.0.down_proj.weight: dtype F64 is not supported"),
    ):
        given = {**tensors, f"{stem}.down_proj": wrong.contiguous()}
        save_file(given, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            HFFolder(folder)
    save_file(
        {**tensors, f"{stem}.down_proj": whole}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    part = HFFolder(folder).read(f"{stem}.5.down_proj.weight", ((3, 7), (2, 11)))
    assert torch.equal(part, whole[5, 3:7, 2:11])


def test_layers_that_predict_further_are_left_out(tmp_path: Path) -> None:
    """As transformers leaves them out, whose published Qwen3-Next has them beside the model."""
    folder = tiny(tmp_path / "model", family="qwen3_next", vocab=101)
    tensors = load_file(folder / "model.safetensors")
    more = {
        "mtp.fc.weight": torch.ones(32, 64),
        "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2),
    }
    save_file({**tensors, **more}, folder / "model.safetensors", metadata={"format": "pt"})
    assert sorted(HFFolder(folder).extra) == sorted(more)
    hf_to_megatron(folder, tmp_path / "megatron", conversion_layout(1, 1, 1))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert folder_tensors(tmp_path / "back").keys() == tensors.keys()
