"""LoRA adapters compared with the model that they are merged into.

Other tests compare that model's gradients with Hugging Face. With W + s B A in place of W, the chain rule
gives dA = s B^T dW and dB = s dW A^T."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from megarl.config.errors import CheckpointError
from megarl.weights.megatron import MegatronFolder
from tests.parallel import jobs
from tests.parallel.test_invariance import VOCAB, make_batch
from tests.parallel.test_parity import hf_logprobs, sequences
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

Ranks = Callable[..., RankPool]
SLOW = pytest.mark.slow
ALL = {"rank": 3, "alpha": 6.0}
FEW = {
    "rank": 4,
    "alpha": 8.0,
    "rank_stabilized": True,
    "targets": ["q_proj", "v_proj", "up_proj", "down_proj"],
}
FUSED = {"rank": 2, "targets": ["k_proj", "gate_up_proj"]}
LINEAR = {"rank": 2, "targets": ["q_proj", "in_proj_qkvz", "out_proj"]}
DOWN = {"rank": 2, "targets": ["down_proj"]}  # nothing before a layer's MLP has a gradient


def scale_of(lora: dict[str, Any]) -> float:
    """Return the scale as PEFT documents it."""
    alpha, rank = lora.get("alpha", 32.0), lora["rank"]
    return alpha / math.sqrt(rank) if lora.get("rank_stabilized") else alpha / rank


def draw_adapters(folder: Path, lora: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Make random nonzero A and B for the matrices that PEFT's target_modules would name."""
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    found = {}
    for name, weight in sorted(weights.items()):
        module = name.split(".")[-2] if "." in name else ""
        targeted = module in lora.get("targets", [module])
        if (
            ".layers." in name
            and re.search("_proj$|_mqa$|^in_proj_", module)
            and name.endswith(".weight")
            and targeted
        ):
            stem, (rows, columns) = name.removesuffix("weight"), weight.shape
            found[f"{stem}lora_A.weight"] = 0.2 * torch.randn(lora["rank"], columns, generator=generator)
            found[f"{stem}lora_B.weight"] = 0.2 * torch.randn(rows, lora["rank"], generator=generator)
    return found


def merge(folder: Path, adapters: dict[str, torch.Tensor], lora: dict[str, Any], out: Path) -> Path:
    """Copy the folder with the weights W + s B A, computed in float64."""
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    for name in adapters:
        if name.endswith("lora_A.weight"):
            stem = name.removesuffix("lora_A.weight")
            delta = adapters[f"{stem}lora_B.weight"].double() @ adapters[name].double()
            weights[f"{stem}weight"] = (weights[f"{stem}weight"].double() + scale_of(lora) * delta).float()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def projected(
    whole: dict[str, torch.Tensor], adapters: dict[str, torch.Tensor], lora: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Project the gradients of the merged weights onto A and B."""
    found = {}
    for name, a in adapters.items():
        if name.endswith("lora_A.weight"):
            stem = name.removesuffix("lora_A.weight")
            b, gradient = adapters[f"{stem}lora_B.weight"].double(), whole[f"{stem}weight"].double()
            found[name] = scale_of(lora) * b.T @ gradient
            found[f"{stem}lora_B.weight"] = scale_of(lora) * gradient @ a.double().T
    return found


def absolute(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return absolute values. Sums of products of these bound the rounding error of the sums themselves."""
    return {name: tensor.abs() for name, tensor in tensors.items()}


def total_norm(tensors: dict[str, torch.Tensor]) -> float:
    """Return the norm of all tensors together."""
    return float(torch.cat([tensor.double().flatten() for tensor in tensors.values()]).norm())


@pytest.mark.shows("LoRA")
@pytest.mark.parametrize(
    ("family", "which", "lora", "layout", "model"),
    [
        ("qwen3", "actor", ALL, (2, 1, 1), {}),
        ("qwen2", "critic", FEW, (1, 2, 1), {"recompute": "full"}),
        ("glm4", "actor", FUSED, (2, 1, 1), {"sequence_parallel": False}),
        ("qwen2", "critic", DOWN, (1, 1, 1), {"recompute": "selective", "recompute_modules": ["mlp"]}),
        pytest.param("qwen3_5_text", "actor", ALL, (2, 1, 1), {}, marks=SLOW),
        ("qwen3_5_moe_text", "actor", ALL, (2, 1, 1, 2), {}),
        pytest.param("qwen3_next", "actor", LINEAR, (2, 1, 1, 2), {}, marks=SLOW),
        pytest.param("qwen3", "actor", ALL, (1, 1, 1), {}, marks=SLOW),
        pytest.param("llama", "actor", FEW, (2, 2, 1), {"recompute": "selective"}, marks=SLOW),
        pytest.param("mistral", "critic", ALL, (2, 1, 2), {"recompute": "full"}, marks=SLOW),
        pytest.param("qwen2", "actor", ALL, (1, 1, 1, 1, 2), {}, marks=SLOW),
        pytest.param("glm4", "critic", {"rank": 3, "alpha": 6.0}, (2, 1, 1), {}, marks=SLOW),
        pytest.param("qwen3_moe", "actor", ALL, (2, 1, 1), {}, marks=SLOW),
        pytest.param("qwen3_moe", "actor", FEW, (1, 2, 2, 2), {}, marks=SLOW),
        pytest.param("glm4_moe", "actor", ALL, (2, 1, 1, 2), {}, marks=SLOW),
        pytest.param("deepseek_v3", "actor", ALL, (2, 1, 1, 2), {}, marks=SLOW),
        pytest.param("qwen3_5_text", "critic", FEW, (1, 2, 1), {"recompute": "full"}, marks=SLOW),
        pytest.param("qwen3_5_text", "actor", ALL, (1, 1, 1, 1, 2), {}, marks=SLOW),
        pytest.param("qwen3_next", "critic", ALL, (1, 2, 1), {}, marks=SLOW),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_merged_weights(
    family: Any,
    which: str,
    lora: dict[str, Any],
    layout: tuple[int, ...],
    model: dict[str, Any],
    ranks: Ranks,
    tmp_path: Path,
) -> None:
    kind: Any = "token" if which == "critic" else None
    folder = make_tiny_model(
        tmp_path / "model", family, vocab=VOCAB, layers=2, tied=which == "actor", classification=kind
    )
    adapters = draw_adapters(folder, lora)
    merged = merge(folder, adapters, lora, tmp_path / "merged")
    arguments: dict[str, Any] = {"batch": make_batch(), "which": which}
    [whole] = ranks(1, 1, 1).run(jobs.gradients, folder=merged, options={"budget": 10_000}, **arguments)
    options: dict[str, Any] = {"budget": 48, "optimizer": {"lora": lora}, "model": dict(model)}
    options["sequence_parallel"] = options["model"].pop("sequence_parallel", None)
    found = ranks(*layout).run(jobs.gradients, folder=folder, adapters=adapters, options=options, **arguments)
    expected = projected(whole["gradients"], adapters, lora)
    if which == "critic":
        expected["score.weight"] = whole["gradients"]["score.weight"].double()
    ours = found[0]["gradients"]
    # The reference projects the merged weights' gradients with their rounding errors. Sums of absolute
    # values bound these errors, since the terms of the projection may cancel.
    # absolute values bound them: the projection itself may cancel.
    largest = projected(absolute(whole["gradients"]), absolute(adapters), lora)
    difference = total_norm({name: ours[name].double() - gradient for name, gradient in expected.items()})
    assert difference <= 1e-5 * total_norm({**expected, **largest})
    assert all(not gradient.any() for name, gradient in ours.items() if name not in expected)
    norm = total_norm(expected)
    for rank in found:
        assert rank["norm"] == pytest.approx(norm, rel=1e-5), "the norm that clips the gradient"
        for name, total in whole["sums"].items():
            assert rank["sums"][name] == pytest.approx(total, rel=1e-4, abs=1e-5), name


def fused(name: str) -> str:
    """Map q, k and v, or gate and up, to the name of their common Megatron parameter."""
    return re.sub("gate_proj|up_proj", "gate_up_proj", re.sub("[qkv]_proj", "qkv_proj", name))


@pytest.mark.parametrize(
    ("family", "lora", "layout"),
    [
        ("qwen3", ALL, (2, 1, 1)),
        ("glm4", FUSED, (1, 2, 1)),
        pytest.param("qwen3_5_text", ALL, (2, 1, 1), marks=SLOW),
        pytest.param("qwen3_next", ALL, (2, 1, 1), marks=SLOW),
        pytest.param("qwen2", FEW, (1, 1, 1), marks=SLOW),
        pytest.param("llama", ALL, (2, 2, 1), marks=SLOW),
        pytest.param("qwen3_moe", ALL, (2, 1, 1), marks=SLOW),
    ],
    ids=str,
)
def test_the_model_the_engine_and_both_exports_are_the_merged_model(
    family: Any, lora: dict[str, Any], layout: tuple[int, int, int], ranks: Ranks, tmp_path: Path
) -> None:
    """Initially (B = 0) and with adapters disabled, log-probs are bitwise those of the model alone.

    Parameters without adapters are sent to an engine only once."""
    folder = make_tiny_model(tmp_path / "model", family, vocab=VOCAB, layers=2, tied=True)
    adapters = draw_adapters(folder, lora)
    merged = merge(folder, adapters, lora, tmp_path / "merged")
    prompts, responses = sequences(VOCAB)
    (out := tmp_path / "out").mkdir()
    arguments: dict[str, Any] = {"prompts": prompts, "responses": responses, "out": out}
    found = ranks(*layout).run(jobs.with_adapters, folder=folder, lora=lora, given=adapters, **arguments)
    expected, _ = hf_logprobs(merged, prompts, responses, 1.0)
    weights, before = load_file(merged / "model.safetensors"), load_file(folder / "model.safetensors")
    doubled = {name: 2 * half if "lora_B" in name else half for name, half in adapters.items()}
    grown = load_file(merge(folder, doubled, lora, tmp_path / "grown") / "model.safetensors")
    exported = load_file(out / "hf" / "model.safetensors")
    for rank in found:
        assert torch.equal(rank["first"], rank["alone"]) and torch.equal(rank["off"], rank["alone"])
        assert (rank["given"] - expected).abs().max() <= 1e-5 < (rank["off"] - expected).abs().max()
        for name, tensor in rank["engine"].items():
            assert torch.equal(tensor, exported[name]), name
            torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-6, msg=name)
            torch.testing.assert_close(rank["grown"][name], grown[name], rtol=1e-5, atol=1e-6, msg=name)
        changed = {fused(name) for name in before if not torch.equal(before[name], weights[name])}
        kept = [tensor.nbytes for name, tensor in rank["engine"].items() if fused(name) not in changed]
        assert rank["kept"] == sum(kept)
    described = json.loads((out / "lora" / "adapter_config.json").read_text(encoding="utf-8"))
    assert described["target_modules"] == sorted({name.split(".")[-3] for name in adapters})
    assert (described["r"], described["lora_alpha"]) == (lora["rank"], lora.get("alpha", 32.0))
    assert described["use_rslora"] == lora.get("rank_stabilized", False)
    written = load_file(out / "lora" / "adapter_model.safetensors")
    assert written.keys() == {f"base_model.model.{name}" for name in adapters}
    for name, half in adapters.items():
        assert torch.equal(written[f"base_model.model.{name}"], half), name


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen3", ALL),
        pytest.param("llama", FEW, marks=SLOW),
        pytest.param("glm4", FUSED, marks=SLOW),
        pytest.param("qwen3_5_text", ALL, marks=SLOW),
        pytest.param("qwen3_next", LINEAR, marks=SLOW),
        pytest.param("qwen3_moe", ALL, marks=SLOW),
        pytest.param("qwen3_moe", {"rank": 4, "alpha": 8.0, "rank_stabilized": True}, marks=SLOW),
    ],
    ids=str,
)
def test_peft_loads_the_folder(family: Any, lora: dict[str, Any], ranks: Ranks, tmp_path: Path) -> None:
    """PEFT's model of the exported folder has the same log-probs as Megarl's.

    Experts are one tensor in transformers 5; PEFT joins their adapters when it reads the folder."""
    peft = pytest.importorskip("peft", reason="make install has it")
    folder = make_tiny_model(tmp_path / "model", family, vocab=VOCAB, layers=2)
    prompts, responses = sequences(VOCAB)
    (out := tmp_path / "out").mkdir()
    arguments: dict[str, Any] = {"prompts": prompts, "responses": responses, "out": out}
    given = draw_adapters(folder, lora)
    [found] = ranks(1, 1, 1).run(jobs.with_adapters, folder=folder, lora=lora, given=given, **arguments)
    alone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(alone, out / "lora")
    model.merge_and_unload().save_pretrained(tmp_path / "theirs")
    expected, _ = hf_logprobs(tmp_path / "theirs", prompts, responses, 1.0)
    assert (found["given"] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("family", "which", "lora", "written", "read"),
    [
        ("qwen3", "actor", ALL, (2, 1, 1), [(1, 2, 1)]),
        pytest.param("glm4", "critic", FUSED, (1, 1, 2), [(2, 1, 1)], marks=SLOW),
        pytest.param("qwen3_5_text", "actor", ALL, (2, 1, 1), [(1, 2, 1)], marks=SLOW),
        pytest.param("qwen3_next", "critic", ALL, (2, 1, 2), [(1, 1, 1)], marks=SLOW),
        pytest.param("qwen2", "critic", FEW, (1, 2, 2), [(2, 2, 1), (1, 1, 1)], marks=SLOW),
        pytest.param("glm4", "actor", FUSED, (2, 1, 1), [(1, 2, 2)], marks=SLOW),
        pytest.param("qwen3_moe", "actor", ALL, (1, 2, 2, 2), [(2, 1, 1, 2), (1, 1, 1)], marks=SLOW),
    ],
    ids=str,
)
def test_adapters_alone_are_trained_and_saved(
    family: Any,
    which: str,
    lora: dict[str, Any],
    written: tuple[int, ...],
    read: list[tuple[int, ...]],
    ranks: Ranks,
    tmp_path: Path,
) -> None:
    """Only the adapters have gradients and optimizer state and are saved.

    They start equal on every layout and continue from a checkpoint: bitwise on its layout, nearly so on
    others. With four ranks, communication overlaps with computation."""
    critic = which == "critic"
    kind: Any = "token" if critic else None
    folder = make_tiny_model(
        tmp_path / "model", family, vocab=VOCAB, layers=2, tied=not critic, classification=kind
    )
    (checkpoint := tmp_path / "checkpoint").mkdir()

    def run(layout: tuple[int, ...], read: bool) -> list[dict[str, Any]]:
        overlap = math.prod(layout[:3]) == 4
        settings: dict[str, Any] = {"which": which, "optimizer": {"lora": lora}, "read": read}
        arguments: dict[str, Any] = {"folder": folder, "checkpoint": checkpoint, "overlap": overlap}
        return ranks(*layout).run(jobs.partly_frozen, **settings, **arguments)

    first = run(written, read=False)
    original, saved, last = first[0]["weights"]
    beside = {name for name in original if ".lora_" in name or name == "score.weight"}
    assert {name for name in beside if ".lora_" in name} == set(draw_adapters(folder, lora))
    for name, tensor in original.items():
        idle = ".experts." in name  # no token may have been routed there
        assert torch.equal(tensor, last[name]) == (name not in beside) or (name in beside and idle), name
        bound = tensor.shape[-1] ** -0.5
        assert "lora_A" not in name or 0.9 * bound < tensor.abs().max() <= bound
        assert "lora_B" not in name or not tensor.any()
    names = {
        name.removeprefix("optimizer.state.exp_avg.")
        for name, entry in FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    assert all(".lora." in name or "value_head" in name for name in names)
    with pytest.raises(CheckpointError, match="has LoRA adapters alone, and no model"):
        MegatronFolder(checkpoint, source=folder)
    for number, layout in enumerate([written, *read]):
        found = run(layout, read=True) if number else first
        for rank in found:
            assert rank["trained"] == rank["buffered"] and rank["steps"] == {2.0}
            assert not any(rank["left"]), "what is frozen leaves the device as well"
        begin, between, after = found[0]["weights"]
        for name, tensor in saved.items():
            assert torch.equal(begin[name], original[name]), name
            assert torch.equal(between[name], tensor), name
            if layout == written:
                assert torch.equal(after[name], last[name]), name
            else:
                torch.testing.assert_close(after[name], last[name], rtol=0, atol=1e-4)
