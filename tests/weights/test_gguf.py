"""GGUF files beside the models that they were written from: the writer here follows llama.cpp's own
conversion, and quantised numbers are those of the package gguf."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.cli.main import main
from megarl.config.errors import CheckpointError
from megarl.weights.gguf import GGUFFile, gguf_to_hf
from tests.families import Family
from tests.tiny_models import CHAT_TEMPLATE, make_tiny_model
from tests.weights.folders import folder_tensors

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
# Where llama.cpp keeps what Hugging Face calls so.
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(
    folder: Path,
    path: Path,
    family: Family = "llama",
    kind: str = "F32",
    change: Any = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a Hugging Face folder as a GGUF file. kind: of matrices. change: called with the writer's keys
    before they are written. extra: more tensors."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: t.float().numpy() for name, t in folder_tensors(folder).items()}
    arch = ARCHITECTURES[family]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "vocab_size": config["vocab_size"],
    }
    if experts := config.get("num_experts", config.get("num_local_experts")):
        keys |= {
            "expert_count": experts,
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    if change is not None:
        change(keys)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("mistral tiny" if family == "mistral" else "tiny")
    for key, value in keys.items():
        name = key if key.startswith("split.") else f"{arch}.{key}"
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    writer.add_float32(f"{arch}.rope.freq_base", 10000.0 if not extra else 500000.0)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    tokens.append('!"')  # a merge, which the tokenizer must have
    tokens += [f"<unused{i}>" for i in range(config["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 5 else 1 for i in range(len(tokens))])
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    stacked: dict[str, dict[int, np.ndarray]] = {}
    for name, array in tensors.items():
        if name in OUTSIDE:
            add(writer, OUTSIDE[name], array, kind)
            continue
        _, _, layer, rest = name.split(".", 3)
        module, _, suffix = rest.rpartition(".")
        if ".experts." in module:
            _, _, expert, part = module.split(".")
            into = stacked.setdefault(f"blk.{layer}.{NAMES[f'mlp.{part}']}_exps.weight", {})
            into[int(expert)] = array
            continue
        if arch == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if "q_proj" in module else "num_key_value_heads"]
            # convert_hf_to_gguf.py, LlamaModel.permute
            shape = (heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = np.ascontiguousarray(array.reshape(shape).swapaxes(1, 2).reshape(array.shape))
        add(writer, f"blk.{layer}.{NAMES[module]}.{suffix}", array, kind)
    for name, experts_of in stacked.items():
        add(writer, name, np.stack([experts_of[i] for i in sorted(experts_of)]), kind)
    for name, array in (extra or {}).items():
        add(writer, name, array, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: Any, name: str, array: np.ndarray, kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
    if quantisation == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, array)
    else:
        writer.add_tensor(name, gguf.quantize(array, quantisation), raw_dtype=quantisation)


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", True),
        ("llama", False),
        ("mistral", False),
        ("qwen2", True),
        ("qwen3", False),
        ("qwen3_moe", False),
    ],
)
def test_a_file_in_float32_gives_the_same_bits_and_answers(
    family: Family, tied: bool, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", family, tied=tied, head_dim=None if family == "qwen2" else 8)
    path = write_gguf(folder, tmp_path / "model.gguf", family)
    gguf_to_hf(path, tmp_path / "out", dtype=torch.float32, verify=True)
    expected, found = folder_tensors(folder), folder_tensors(tmp_path / "out")
    if tied:
        expected.pop("lm_head.weight", None)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    ids = torch.tensor([[5, 9, 33, 70, 12]])
    models = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (folder, tmp_path / "out")
    )
    first, second = (model(ids).logits for model in models)
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_quantised_files_give_the_numbers_that_they_hold(kind: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", hidden=64, head_dim=16, ffn=96)
    gguf_to_hf(write_gguf(folder, tmp_path / "model.gguf", kind=kind), tmp_path / "out", dtype=torch.float32)
    quantisation = gguf.GGMLQuantizationType[kind]
    found = folder_tensors(tmp_path / "out")
    for name, tensor in folder_tensors(folder).items():
        expected = tensor
        if tensor.ndim > 1:
            expected = torch.from_numpy(
                gguf.dequantize(gguf.quantize(tensor.numpy(), quantisation), quantisation)
            ).reshape(tensor.shape)
        assert torch.equal(found[name], expected), name


def test_tokenizer_template_and_ends_come_along(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama")
    gguf_to_hf(write_gguf(folder, tmp_path / "model.gguf"), tmp_path / "out")
    before, after = (AutoTokenizer.from_pretrained(f) for f in (folder, tmp_path / "out"))
    for text in ("12+30=?", "Answer: 42", "a\nb <|im_start|>", "#!\\"):
        assert before(text)["input_ids"] == after(text)["input_ids"]
    turn = [{"role": "user", "content": "What is 23 + 45?"}]
    texts = (t.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for t in (before, after))
    assert len({*texts}) == 1
    assert (after.eos_token_id, after.pad_token_id, after.bos_token_id) == (1, 0, 2)
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (written["eos_token_id"], written["bos_token_id"]) == (1, 2)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]


def llama3_factors(head_dim: int, factor: float) -> np.ndarray:
    """What llama.cpp's conversion writes (LlamaModel.generate_extra_tensors), number by number."""
    found = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * 500000.0 ** (i / head_dim)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


def test_scaled_rotations_of_llama_3_are_kept(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", heads=4, head_dim=64)
    extra = {"rope_freqs.weight": llama3_factors(64, 32.0)}
    gguf_to_hf(write_gguf(folder, tmp_path / "model.gguf", extra=extra), tmp_path / "out")
    rope = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert rope == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    extra["rope_freqs.weight"][-1] = 5
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight: are not those of llama3's rope scaling"):
        GGUFFile(write_gguf(folder, tmp_path / "other.gguf", extra=extra))


def test_without_the_package_the_line_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["convert", "from-gguf", str(tmp_path / "a.gguf"), str(tmp_path / "out")]) == 2
    assert "the package gguf is not installed (pip install 'megarl[gguf]')" in capsys.readouterr().err


def test_what_cannot_be_read_is_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama")
    whole = write_gguf(folder, tmp_path / "whole.gguf").read_bytes()

    def said(path: Path) -> str:
        capsys.readouterr()
        assert main(["convert", "from-gguf", str(path), str(tmp_path / "never")]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and str(path) in line and not (tmp_path / "never").exists()
        return line

    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    def made(name: str, **keys: Any) -> Path:
        return write_gguf(folder, tmp_path / name, change=lambda k: k.update(keys))

    assert "no such file" in said(tmp_path / "none.gguf")
    assert "not a file" in said(folder)
    assert "not a GGUF file" in said(file("empty.gguf", b""))
    assert "not a GGUF file" in said(folder / "config.json")
    for length in (5, 100, 3000, len(whole) // 2, len(whole) - 100):
        assert "truncated or damaged" in said(file(f"{length}.gguf", whole[:length]))
    other = whole.replace(b"llama", b"gemma")
    assert "general.architecture: 'gemma' is not read (known: llama, qwen2" in said(file("gemma.gguf", other))
    assert "split.count" in said(made("part.gguf", **{"split.count": 3}))
    assert "rope.scaling.type: 'yarn'" in said(made("yarn.gguf", **{"rope.scaling.type": "yarn"}))
    assert "sliding_window: 16" in said(made("window.gguf", **{"attention.sliding_window": 16}))
    assert "shape (48, 32), but" in said(made("ffn.gguf", feed_forward_length=40))
    assert "blk.2.attn_norm.weight: is missing" in said(made("layers.gguf", block_count=3))
    surplus = {"blk.0.attn_q.bias": np.zeros(32, dtype=np.float32)}
    path = write_gguf(folder, tmp_path / "surplus.gguf", extra=surplus)
    assert "blk.0.attn_q.bias: a llama model has no such tensor" in said(path)
