"""Requirements of FP8 recipes on device, model sizes and pack lengths.

Imports neither Megatron nor Transformer Engine, so that a laptop can check a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch

from megarl.config.errors import ConfigError
from megarl.config.schema import Config
from megarl.weights.families import Sizes


@dataclass(frozen=True)
class Recipe:
    """Requirements of a recipe (Transformer Engine: pytorch/quantization.py, pytorch/utils.py)."""

    multiple: int  # divides the sides of a rank's matrices, and the tokens that it quantises
    capability: tuple[int, int] = (8, 9)  # lowest compute capability
    before: tuple[int, int] = (99, 0)  # lowest capability that is not supported
    cuda: tuple[int, int] = (12, 1)  # lowest CUDA version of torch


RECIPES = {
    "delayed": Recipe(16),
    "tensorwise": Recipe(16),
    # Sequence parallelism must gather whole 128 x 128 blocks.
    "blockwise": Recipe(128, capability=(9, 0), cuda=(12, 9)),
    "mxfp8": Recipe(32, capability=(10, 0), before=(12, 0), cuda=(12, 8)),
}


def pack_multiple(config: Any) -> int:
    """Return the number that must divide a pack's tokens, for a Megatron TransformerConfig.

    Context parallelism makes two chunks per rank, sequence parallelism splits them, FP8 quantises each part.
    """
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    multiple = ranks * (RECIPES[config.fp8_recipe].multiple if config.fp8 else 1)
    cp = config.context_parallel_size
    return cp * lcm(2, multiple) if cp > 1 else multiple


def fp8_options(config: Config) -> dict[str, Any]:
    """Return Megatron's options for FP8."""
    fp8 = config.model.fp8
    if fp8.format == "none":
        return {}
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "first_last_layers_bf16": fp8.first_last_layers_bf16,
        # Replicas do different numbers of passes, so a maximum over data-parallel ranks would hang.
        "tp_only_amax_red": True,
    }


def check_sizes(config: Config, hf_config: Mapping[str, Any], key: str = "model.path") -> None:
    """Raise ConfigError if a rank's matrix has unsuitable sides. key: config key of the model."""
    fp8, sizes, tp = config.model.fp8, Sizes.from_config(hf_config), config.parallel.tp
    if fp8.format == "none":
        return
    if fp8.first_last_layers_bf16 and sizes.layers < 3:
        raise ConfigError(
            f"model.fp8.first_last_layers_bf16: {key} has {sizes.layers} layers, none is left for FP8 "
            "(set it to false)"
        )
    sides = {
        "hidden_size": sizes.hidden,
        "the width of attention": sizes.q // tp,
        "the height of q, k and v": (sizes.q + 2 * sizes.kv) // tp,
    }
    if sizes.latent:
        del sides["the height of q, k and v"]
        sides |= {"the width of attention": sizes.out // tp, "the height of q": sizes.q // tp}
        sides |= {"kv_lora_rank": sizes.kv_rank, "the height of kv_a_proj_with_mqa": sizes.latent}
        sides |= {"the height of kv_b_proj": sizes.kv_up // tp, "q_lora_rank": sizes.q_rank}
    if sizes.experts:  # experts are not split by tensor parallelism (parallel/layout.py)
        sides["moe_intermediate_size"] = sizes.expert_ffn
    if sizes.shared_ffn:
        sides["the width of shared experts"] = sizes.shared_ffn // tp
    if not sizes.experts or sizes.dense:
        sides["intermediate_size"] = sizes.ffn // tp
    multiple = RECIPES[fp8.recipe].multiple
    for name, size in sides.items():
        if size % multiple:
            raise ConfigError(
                f"model.fp8.recipe: {fp8.recipe} needs multiples of {multiple}, but {name} of {key} is "
                f"{size} on a rank of parallel.tp {tp} (lower parallel.tp, or choose another recipe)"
            )


def check_device(recipe: str, device: torch.device) -> None:
    """Raise ConfigError if the GPU or torch's CUDA does not support the recipe.

    The query allocates memory on the device, so call it after the rank has chosen one."""
    capability = torch.cuda.get_device_capability(device)
    problem = device_problem(recipe, capability, torch.version.cuda or "0.0")
    if problem:
        raise ConfigError(
            f"model.fp8.recipe: {recipe} {problem} (choose another recipe, or set model.fp8.format=none)"
        )


def device_problem(recipe: str, capability: tuple[int, int], cuda: str) -> str:
    """Return the device's unmet requirement, or "". cuda: like "12.9"."""
    needs = RECIPES[recipe]
    if capability < needs.capability:
        return f"needs compute capability {_dotted(needs.capability)}, this device has {_dotted(capability)}"
    if capability >= needs.before:
        newer = f"compute capability {_dotted(needs.before)} and newer"
        return f"does not exist for {newer}, this device has {_dotted(capability)}"
    major, minor, *_ = cuda.split(".")
    if (int(major), int(minor)) < needs.cuda:
        return f"needs CUDA {_dotted(needs.cuda)}, torch was built with {cuda}"
    return ""


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
