"""Published folders of Qwen3.5's mixtures and Qwen3-Next.

Their rows in tests/families.py cover log-probabilities, gradients, values and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from megarl.config.errors import CheckpointError
from megarl.weights.families import read_config
from megarl.weights.hf import HFFolder
from megarl.weights.megatron import conversion_layout, hf_to_megatron, megatron_to_hf
from tests.parallel.test_parity import tiny
from tests.parallel.test_qwen3_5 import take_language_model
from tests.tiny_models import make_tokenizer
from tests.weights.folders import folder_tensors


def test_the_language_model_of_a_published_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program of docs/families.md makes a folder that can be trained and converted, bitwise.

    Published folders have all experts of a layer in two tensors, which it keeps."""
    source, out = tmp_path / "published", tmp_path / "text"
    text = read_config(tiny(tmp_path / "tiny", "qwen3_5_moe_text", vocab=307))
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=vision))
    model.to(torch.bfloat16).save_pretrained(source, save_original_format=False)
    make_tokenizer(307).save_pretrained(source)
    GenerationConfig(eos_token_id=[1]).save_pretrained(source)
    with pytest.raises(CheckpointError, match="model_type: 'qwen3_5_moe' is a model of images and text"):
        read_config(source)
    take_language_model(source, out, monkeypatch)
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
    folder = tiny(tmp_path / "model", "qwen3_next", vocab=101)
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
    """Conversion skips the multi-token prediction layers of Qwen3-Next folders, as transformers does."""
    folder = tiny(tmp_path / "model", "qwen3_next", vocab=101)
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
