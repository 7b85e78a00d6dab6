"""Check Transformer Engine's real modules as Megatron builds them for megarl.

Tested are names, shapes, parameter attributes, checkpoints, recipes and the optimizer, and ranks of the 32B
run at their real widths. The compiled half is that of tests/te/compiled; no forward pass runs."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import Config
from megarl.parallel.internals import changed
from megarl.parallel.layout import Layout
from megarl.weights.families import rename_to_table
from megarl.weights.known_models import KNOWN_MODELS
from megarl.weights.shards import megatron_layout
from tests.rehearsal.pretended import rank_of
from tests.tiny_models import make_config

pytestmark = pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="transformer-engine is not installed: make rehearse"
)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
EXPERTS = {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
FAMILIES = {
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "llama": {},
    "mistral": {},
    "glm4": {"head_dim": 64},
    "qwen3_moe": EXPERTS,
}
RECIPES = {
    "tensorwise": "Float8CurrentScaling",
    "delayed": "DelayedScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
RECOMPUTE = ("none", "selective", "full")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: make rehearse-gpu")


def settings(
    recompute: str = "full",
    fp8: str | None = None,
    layers: str = "te",
    grouped: bool = False,
    permute: bool = False,
    **parallel: Any,
) -> Config:
    eight = {"format": "hybrid", "recipe": fp8, "first_last_layers_bf16": fp8 != "delayed"} if fp8 else {}
    model = {"path": Path("x"), "dtype": "bf16", "recompute": recompute, "layers": layers, "fp8": eight}
    model |= {"grouped_experts": grouped, "permute_fusion": permute}
    return Config(
        recipe="vapo", run_dir=Path("x"), steps=1, model=model, parallel={"device": "cpu", **parallel}
    )


def build(kind: str, config: Config, hf: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from megarl.model import builder

    # The check of FP8 recipes is tested elsewhere.
    monkeypatch.setattr(builder, "check_device", lambda *_: None)
    return getattr(builder, f"build_{kind}")(config, hf, runtime)


def as_laid_out(model: Any, hf: Any, runtime: Any, kind: str) -> None:
    """Check names and shapes against the table that loading, export and the engine's plan use."""
    wanted = megatron_layout(hf.to_dict(), runtime.layout, critic=kind == "critic")[runtime.rank][1]
    found = {
        name: tuple(value.shape) for name, value in rename_to_table(dict(model.named_parameters())).items()
    }
    assert found == {name: tuple(shard.shape) for name, shard in wanted.items()}


def well_marked(model: Any, *, sequence: bool) -> None:
    """Check the parameters' attributes.

    A parameter that is split over tensor-parallel ranks has its dimension. With sequence parallelism, a
    replicated one is marked `sequence_parallel`, so that its gradients are summed over these ranks."""
    for name, parameter in model.named_parameters():
        whole = "norm" in name or "router" in name or "value_head" in name
        if ".experts." in name:
            assert parameter.allreduce is False, name
        if whole:
            assert not getattr(parameter, "tensor_model_parallel", False), name
            heads = "q_layernorm" in name or "k_layernorm" in name  # Megatron finds these by name
            assert heads or bool(getattr(parameter, "sequence_parallel", False)) == sequence, name
        else:
            row = ".linear_proj." in name or ".linear_fc2." in name
            assert (parameter.tensor_model_parallel, parameter.partition_dim) == (True, 1 if row else 0), name


def from_transformer_engine(model: Any) -> None:
    """Check that all linear layers, norms and attention are Transformer Engine's."""
    parts = [
        module
        for module in model.chunks[0].decoder.modules()
        if any(word in type(module).__name__ for word in ("Linear", "Norm", "DotProduct"))
    ]
    others = {
        type(part)
        for part in parts
        if not any(base.__module__.startswith("transformer_engine") for base in type(part).__mro__)
    }
    assert parts and not others
    assert all(
        module.fuse_wgrad_accumulation for module in parts if hasattr(module, "fuse_wgrad_accumulation")
    )


@pytest.mark.parametrize("attention", ["flash", "fused", "unfused"])
def test_attention_may_take_the_kernels_that_were_asked_for(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {kernels: f"NVTE_{kernels.upper()}_ATTN" for kernels in ("flash", "fused", "unfused")}
    for name in names.values():  # Megatron sets them; monkeypatch restores the earlier values
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    config = settings()
    config = config.model_copy(update={"model": config.model.model_copy(update={"attention": attention})})
    hf = make_config("qwen2", **SIZES)
    with rank_of(Layout(tp=1, pp=1, dp=1, ep=1), rank=0) as runtime:
        for kind in ("actor", "critic"):
            build(kind, config, hf, runtime, monkeypatch)
    allowed = {kernels for kernels, name in names.items() if os.environ[name] == "1"}
    assert allowed == {attention}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2])
def test_layers(family: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are correct with each kind of recomputation, FP8 recipe, and grouped experts.

    Checkpoints have the same names as those of portable layers."""
    from megatron.core import fp8_utils

    from megarl.training.sharded import EXTRA, model_state

    hf = make_config(family, **SIZES, **FAMILIES[family])
    cases: list[tuple[str, str | None, bool]] = [(kind, None, False) for kind in RECOMPUTE]
    if family in ("qwen2", "qwen3_moe"):
        cases += [("full", recipe, False) for recipe in RECIPES]
    if family == "qwen3_moe":
        cases.append(("none", None, True))
    with rank_of(Layout(tp=tp, pp=1, dp=2 // tp, ep=1), rank=1) as runtime:
        for kind in ("actor", "critic"):
            plain = build(kind, settings(layers="portable", tp=tp), hf, runtime, monkeypatch)
            names = {value.key for value in model_state(plain)["0"].values()}
            for recompute, recipe, grouped in cases:
                config = settings(recompute, recipe, grouped=grouped, tp=tp)
                model = build(kind, config, hf, runtime, monkeypatch)
                as_laid_out(model, hf, runtime, kind)
                well_marked(model, sequence=tp > 1)
                from_transformer_engine(model)
                found = {value.key for value in model_state(model)["0"].values()}
                assert {name for name in found if EXTRA not in name} == names
                assert any(EXTRA in name for name in found) == (recipe == "delayed")
                if recipe:
                    assert type(fp8_utils.get_fp8_recipe(model.config)).__name__.endswith(RECIPES[recipe])


@needs_triton
def test_fused_permutation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron gets the option, and the kernels match Megatron's operations in Triton's interpreter."""
    import subprocess
    import sys

    hf = make_config("qwen3_moe", **SIZES, **EXPERTS)
    with rank_of(Layout(tp=1, pp=1, dp=2, ep=2), rank=1) as runtime:
        for permute in (False, True):
            model = build("actor", settings(permute=permute, ep=2), hf, runtime, monkeypatch)
            [dispatcher, *_] = [layer.mlp.token_dispatcher for layer in model.chunks[0].decoder.layers]
            assert dispatcher.config.moe_permute_fusion == permute
    program = Path(__file__).with_name("permutation.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and done.stdout.split("\n")[-2] == "equal", done.stdout + done.stderr


def test_the_optimizer_is_transformer_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron selects FusedAdam, and the tensor groups contain its FP32 weights.

    Moments are created by the first step."""
    from megarl.parallel.offload_group import HostPool
    from megarl.training.model import TrainableModel
    from megarl.training.tensor_groups import tensor_groups

    hf, config = make_config("qwen2", **SIZES), settings()
    with rank_of(Layout(tp=1, pp=1, dp=1, ep=1), 0) as runtime:
        model = build("actor", config, hf, runtime, monkeypatch)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.02)
        learner = TrainableModel("actor", model, config.actor, 10, runtime, config.parallel)
        [part] = learner.optimizers
        assert type(part.optimizer).__name__ == "FusedAdam" and type(part.optimizer).__module__.startswith(
            "transformer_engine"
        )
        size = sum(parameter.numel() for parameter in model.parameters())
        held = {
            name: group.nbytes for name, group in tensor_groups(learner, HostPool(runtime.device)).items()
        }
        assert (
            held["actor.weights"] >= 2 * size
            and held["actor.gradients"] >= 4 * size
            and held["actor.optimizer"] >= 4 * size
        )


@pytest.mark.parametrize("rank", [0, 3, 37, 127])
def test_ranks_of_the_32b_run(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are correct on the first, a middle and the last stage of tp 8, pp 4, dp 4, with FP8.

    The widths are those of configs/vapo_32b.yaml, with 8 of 64 layers."""
    known = {key: value for key, value in KNOWN_MODELS["Qwen2.5-32B"].items() if key in SIZES}
    hf = make_config("qwen2", **{**known, "num_hidden_layers": 8, "max_position_embeddings": 32768})
    layout = Layout(tp=8, pp=4, dp=4, ep=1)
    with rank_of(layout, rank) as runtime:
        for kind in ("actor", "critic"):
            model = build(kind, settings(fp8="tensorwise", tp=8, pp=4, dp=4), hf, runtime, monkeypatch)
            as_laid_out(model, hf, runtime, kind)
            well_marked(model, sequence=True)
            from_transformer_engine(model)
            del model


def test_the_table_of_internals() -> None:
    assert [*changed("megatron-core"), *changed("transformer-engine")] == []
