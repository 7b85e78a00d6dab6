"""Section `model`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import field_validator

from megarl.config.schema.section import Section, as_list, field, section


class Fp8Config(Section):
    """FP8 matrix products in the layers of the trainer's models.

    Weights stay in model.dtype. Embedding, heads, norms and attention do not use FP8."""

    format: Literal["none", "hybrid", "e4m3"] = field(
        "none", "none: model.dtype; hybrid: e4m3, and e5m2 for gradients of activations; e4m3: for everything"
    )
    recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = field(
        "tensorwise",
        "scales from the current tensor, earlier tensors (delayed), blocks of 1 x 128 and 128 x 128, "
        "or blocks of 32 values (mxfp8, Blackwell)",
    )
    first_last_layers_bf16: bool = field(
        False, "first and last layer in model.dtype; not with recipe delayed"
    )


class ModelConfig(Section):
    path: Path = field(
        ...,
        "folder to start from: Hugging Face's (config.json, *.safetensors, tokenizer) or a converted one; "
        "or a model of the hub, owner/name or owner/name@revision",
    )
    dtype: Literal["bf16", "fp32"] = field(
        "bf16", "dtype of weights and activations; optimizer states and gradients are fp32"
    )
    layers: Literal["auto", "portable", "te"] = field(
        "auto", "Transformer Engine's layers or plain torch; auto: te where CUDA and Transformer Engine are"
    )
    attention: Literal["auto", "flash", "fused", "unfused"] = field(
        "auto",
        "kernels of Transformer Engine's layers: FlashAttention 2 or 3, cuDNN's (fused), or plain products; "
        "auto: cuDNN's, where it has none for a shape FlashAttention's, else plain products",
        source="Megatron's attention_backend",
    )
    fp8: Fp8Config = section(Fp8Config)
    grouped_experts: bool = field(
        False,
        "all experts of a rank in one grouped product of Transformer Engine, instead of one after the other",
    )
    router_dtype: Literal["fp32", "model"] = field(
        "fp32",
        "dtype of a mixture's router: product, scores and expert weights; its parameters have model.dtype",
        source="Megatron's moe_router_dtype, which it advises for many experts",
    )
    permute_fusion: bool = field(
        False,
        "tokens are put in the order of their experts, and back, by Transformer Engine's kernels",
        source="Megatron's moe_permute_fusion",
    )
    recompute: Literal["none", "selective", "full"] = field(
        "none", "activation recomputation of Megatron: of recompute_modules, or of whole layers"
    )
    recompute_modules: tuple[Literal["attention", "mlp"], ...] = field(
        ("attention",),
        "modules that recompute selective recomputes in each layer (mlp: dense models only)",
        source="Megatron's recompute_modules core_attn and mlp",
    )
    recompute_layers: int | None = field(
        None,
        "number of lowest layers of each (virtual) pipeline stage that recompute full recomputes; the others "
        "keep their activations; null: all",
        "layers",
        ge=1,
    )
    max_positions: int | None = field(
        None, "longest prompt + response; null: the model's own", "tokens", ge=2
    )

    _modules_as_list = field_validator("recompute_modules", mode="before")(as_list)
