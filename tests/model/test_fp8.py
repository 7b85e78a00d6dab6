"""FP8's requirements are checked before a run, on a machine without a GPU.

They concern keys, matrix sizes, devices and the lengths of micro-batches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config import load_config
from megarl.config.check import check_config
from megarl.config.errors import ConfigError
from megarl.config.schema import Config, ModelConfig
from megarl.data.batch import TrainBatch
from megarl.model.builder import choose_layers
from megarl.model.fp8 import RECIPES, check_sizes, device_problem, fp8_options, pack_multiple
from megarl.schedule.preflight import preflight
from megarl.training.micro_batch import make_micro_batches
from megarl.weights.known_models import KNOWN_MODELS
from tests.tiny_models import make_tiny_model

CONFIGS = Path(__file__).parents[2] / "configs"


def make_config(tp: int = 1, **model: Any) -> Config:
    settings = {"path": Path("x"), **model}
    return Config(
        recipe="dapo",
        run_dir=Path("x"),
        steps=1,
        model=settings,
        parallel={"tp": tp},
        data={"train": [Path("x")]},
    )


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        (["model.dtype=fp32"], "model.fp8.format: hybrid needs model.dtype bf16"),
        (["model.layers=portable"], "model.fp8.format: hybrid needs Transformer Engine's layers"),
        (["parallel.device=cpu"], "model.fp8.format: hybrid needs a GPU"),
        (
            ["model.fp8.recipe=delayed"],
            "model.fp8.first_last_layers_bf16: recipe delayed scales all layers or none",
        ),
        (
            ["model.fp8.format=none"],
            "model.fp8.first_last_layers_bf16: has no effect while model.fp8.format is none",
        ),
    ],
)
def test_contradictions(keys: list[str], complaint: str) -> None:
    file = CONFIGS / "vapo_32b.yaml"
    check_config(load_config(file, []), "x.yaml")
    with pytest.raises(ConfigError, match=complaint):
        check_config(load_config(file, keys), "x.yaml")


def test_refused_on_a_machine_without_it(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2")
    with pytest.raises(ConfigError, match=r"model.fp8.format: needs a CUDA device and transformer-engine"):
        preflight(make_config(path=folder, fp8={"format": "hybrid"}), "x.yaml")
    with pytest.raises(ConfigError, match=r"model.fp8.format: needs a CUDA device"):
        choose_layers(ModelConfig(path=folder, fp8={"format": "hybrid"}), torch.device("cpu"))


@pytest.mark.parametrize("name", ["Qwen2.5-32B", "Qwen3-32B", "Qwen3-30B-A3B"])
def test_published_models_fit_every_recipe_at_tp_2(name: str) -> None:
    for recipe in RECIPES:
        check_sizes(make_config(2, fp8={"format": "e4m3", "recipe": recipe}), KNOWN_MODELS[name])


@pytest.mark.parametrize(
    ("name", "tp", "recipe", "side"),
    [
        ("Qwen2.5-0.5B", 2, "blockwise", "the width of attention"),
        ("Qwen2.5-7B", 4, "mxfp8", ""),
        ("Qwen2.5-7B", 4, "blockwise", ""),
        ("Qwen2.5-72B", 8, "blockwise", "intermediate_size"),
        ("Qwen2.5-72B", 8, "tensorwise", ""),
        ("GLM-4-9B", 2, "blockwise", "intermediate_size"),
        ("GLM-4-32B", 4, "blockwise", ""),
        ("DeepSeek-V3", 8, "mxfp8", ""),
        ("Moonlight-16B-A3B", 1, "blockwise", "the height of kv_a_proj_with_mqa"),
    ],
)
def test_sizes(name: str, tp: int, recipe: str, side: str) -> None:
    """The first side that is no multiple is reported, with sizes counted by hand.

    0.5B has 14 heads of 64, so 448 on a rank; 72B has 29568 / 8 = 3696 = 16 * 231; GLM-4-9B has 13696 / 2 =
    6848 = 64 * 107. Moonlight's latents have 576 rows."""
    config = make_config(tp, fp8={"format": "hybrid", "recipe": recipe})
    if not side:
        check_sizes(config, KNOWN_MODELS[name])
        return
    with pytest.raises(
        ConfigError,
        match=f"model.fp8.recipe: {recipe} needs multiples of {RECIPES[recipe].multiple}, but {side} of",
    ):
        check_sizes(config, KNOWN_MODELS[name])


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "problem"),
    [
        ("tensorwise", (8, 0), "12.9", "compute capability 8.9"),
        ("tensorwise", (9, 0), "12.4", ""),
        ("delayed", (8, 9), "12.0", "CUDA 12.1"),
        ("blockwise", (9, 0), "12.8", "CUDA 12.9"),
        ("blockwise", (9, 0), "13.0", ""),
        ("mxfp8", (9, 0), "13.0", "compute capability 10.0"),
        ("mxfp8", (10, 3), "13.0", ""),
        ("mxfp8", (12, 0), "13.0", "compute capability 12.0 and newer"),
    ],
)
def test_devices(recipe: str, capability: tuple[int, int], cuda: str, problem: str) -> None:
    found = device_problem(recipe, capability, cuda)
    assert (problem in found) if problem else not found


def test_options_are_megatrons_own() -> None:
    """The installed megatron-core checks the options when it makes a TransformerConfig."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = fp8_options(
        make_config(fp8={"format": "hybrid", "recipe": "blockwise", "first_last_layers_bf16": True})
    )
    made = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, bf16=True, params_dtype=torch.bfloat16, **options
    )
    assert (made.fp8, made.fp8_recipe, made.first_last_layers_bf16) == ("hybrid", "blockwise", True)
    assert (made.num_layers_at_start_in_bf16, made.num_layers_at_end_in_bf16, made.tp_only_amax_red) == (
        1,
        1,
        True,
    )
    assert fp8_options(make_config()) == {}


def test_a_layer_is_left() -> None:
    config = make_config(fp8={"format": "hybrid", "first_last_layers_bf16": True})
    check_sizes(config, {**KNOWN_MODELS["Qwen2.5-7B"], "num_hidden_layers": 3})
    with pytest.raises(ConfigError, match=r"model.fp8.first_last_layers_bf16: model.path has 2 layers"):
        check_sizes(config, {**KNOWN_MODELS["Qwen2.5-7B"], "num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("fp8", "recipe", "tp", "cp", "sequence_parallel", "expected"),
    [
        (None, "delayed", 4, 1, True, 4),
        (None, "delayed", 1, 4, False, 8),
        (None, "delayed", 2, 2, True, 4),
        ("e4m3", "delayed", 4, 1, False, 16),
        ("e4m3", "mxfp8", 1, 1, False, 32),
        ("hybrid", "blockwise", 2, 1, True, 256),
        ("hybrid", "blockwise", 2, 3, True, 768),
    ],
)
def test_packs_are_filled_up(
    fp8: str | None, recipe: str, tp: int, cp: int, sequence_parallel: bool, expected: int
) -> None:
    """Micro-batches are padded with a separate sequence that belongs to no response.

    Other sequences do not change. tests/parallel/test_context.py covers context parallelism."""
    config = SimpleNamespace(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=None,
        sequence_parallel=sequence_parallel,
        fp8=fp8,
        fp8_recipe=recipe,
    )
    assert pack_multiple(config) == expected
    if cp > 1:
        return
    seen: list[torch.Tensor] = []

    def packed(cu_seqlens: torch.Tensor, prompts: object) -> SimpleNamespace:
        assert prompts is None, "no prompt is shared"
        seen.append(cu_seqlens)
        return SimpleNamespace()

    model: Any = SimpleNamespace(config=config, device=torch.device("cpu"), pack=packed)
    experience = TrainBatch.build([[3, 4]] * 5, [[5] * n for n in (1, 7, 30, 2, 11)])
    batches = make_micro_batches(experience, range(5), 40, model)
    assert sum(len(batch.labels) for batch in batches) == 51
    for batch, cu_seqlens in zip(batches, seen, strict=True):
        assert batch.tokens.shape[1] % expected == 0
        assert int(cu_seqlens[-1]) == batch.tokens.shape[1]
        assert torch.equal(batch.tokens[0, batch.logit_indices + 1], experience.tokens[batch.token_indices])
    assert sum(batch.tokens.shape[1] for batch in batches) < 61 + expected * len(batches)
