"""Test cases of each model family, one row each: its tiny models and their layouts.

These suites iterate over the rows: parallel/test_parity.py, parallel/test_engine_agreement.py,
weights/test_convert.py and te/test_layouts.py. Features of a single family have separate tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import (
    DeepseekV3Config,
    Glm4Config,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

Family = Literal[
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "llama",
    "mistral",
    "glm4",
    "glm4_moe",
    "deepseek_v3",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
]
Layout = tuple[int, ...]  # tp, pp, dp, ep, cp, vpp; trailing sizes of 1 are omitted
Options = dict[str, Any]  # arguments of make_tiny_model
BF16, FP16 = torch.bfloat16, torch.float16
# Like DeepSeek-V3's (factor 40, both mscale 1), with fewer positions.
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
YARN |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}

ONE: Layout = (1, 1, 1)
DENSE: tuple[Layout, ...] = (
    *(ONE, (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 2, 1, 1, 1, 2)),
    *((1, 1, 1, 1, 2), (1, 1, 1, 1, 4), (2, 2, 1, 1, 2), (1, 2, 1, 1, 4)),
)
# For dense families other than Qwen3: each kind of parallelism, alone or with another. How layers are
# sharded is the same for all of them.
ALIKE: tuple[Layout, ...] = (
    *(ONE, (2, 2, 1), (1, 1, 2), (1, 2, 1, 1, 1, 2)),
    *((1, 1, 1, 1, 2), (2, 2, 1, 1, 2)),
)
# Experts sharded over TP neighbours, replicas, both, and neither; with and without pipeline parallelism. Each
# pair of sizes is above 1 together, except CP with PP or DP. tests/parallel/test_experts.py has more.
MIXTURE: tuple[Layout, ...] = (
    *(ONE, (2, 1, 1), (1, 2, 1), (2, 1, 1, 2), (1, 1, 2, 2), (2, 2, 1, 2), (2, 1, 2, 4)),
    *((2, 1, 2, 2), (1, 2, 2, 2), (1, 1, 1, 2, 2), (2, 1, 1, 2, 2), (1, 2, 1, 1, 1, 2)),
)
# The second stage has no dense layer, and the first chunk of a virtual stage only dense layers.
UNEVEN: tuple[Layout, ...] = (
    *(ONE, (2, 1, 1, 2), (2, 2, 1, 2), (1, 1, 2, 2), (1, 2, 1, 1, 1, 2), (2, 1, 1, 2, 2)),
)
# Each chunk of a virtual stage is a single layer, all of one kind.
LINEAR: tuple[Layout, ...] = (
    *(ONE, (2, 2, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1, 1, 1, 2)),
    *((1, 1, 1, 1, 2), (2, 1, 1, 1, 2)),
)
LINEAR_MIXTURE: tuple[Layout, ...] = (
    *(ONE, (2, 2, 1, 2), (2, 1, 1, 2), (1, 1, 2, 2), (1, 2, 1, 1, 1, 2)),
    *((1, 1, 1, 2, 2), (2, 1, 1, 2, 2)),
)
# Every other layer has full attention, and three value heads share one key head.
DELTA_NET: Options = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
WITHOUT_CP: tuple[Layout, ...] = (ONE, (2, 2, 1))


@dataclass(frozen=True)
class Row:
    """A family's test cases.

    config: transformers' configuration class.
    switches: its keys other than sizes (`requires` in megarl/weights/families.py).
    """

    config: Any
    switches: Options = field(default_factory=dict)
    models: tuple[Options, ...] = ({},)  # compared with Hugging Face's models
    layouts: tuple[Layout, ...] = DENSE  # layouts of that comparison
    critics: bool = True  # whether transformers can build a token classifier
    # Layouts of the fast tests: log-probs on one rank and several, gradients and values only on several.
    fast: dict[str, tuple[Layout, ...]] = field(default_factory=lambda: {"log-probs": WITHOUT_CP})
    # A layout that writes a checkpoint, and layouts that read it.
    checkpoints: tuple[tuple[Layout, tuple[Layout, ...]], ...] = (
        ((2, 2, 1), (ONE, (1, 2, 2), (1, 2, 1, 1, 1, 2))),
    )
    # Layouts and models whose weights are sent to an engine after an update.
    sent: tuple[tuple[Layout, Options], ...] = (((2, 1, 1), {}),)
    # Converted to a checkpoint sharded for (tp, pp, ep), and back: odd shapes, each dtype, each head.
    converted: tuple[tuple[Options, tuple[int, int, int]], ...] = (({}, (2, 2, 1)),)


ROWS: dict[str, Row] = {
    "qwen2": Row(
        Qwen2Config,
        models=({}, {"tied": True}),
        layouts=ALIKE,
        fast={"log-probs": WITHOUT_CP, "values": ((2, 2, 1),)},
        sent=(((2, 1, 1), {"tied": True}), ((1, 1, 2), {})),
        converted=(
            ({"dtype": BF16, "hidden": 56, "heads": 14, "kv_heads": 2, "vocab": 307}, (2, 1, 1)),
            ({"dtype": FP16, "tied": True, "vocab": 263, "layers": 4}, (1, 4, 1)),
            ({"classification": "token", "dtype": BF16}, (2, 2, 1)),
        ),
    ),
    "qwen3": Row(
        Qwen3Config,
        switches={"attention_bias": False},
        models=({"head_dim": 12}, {"tied": True}),
        fast={"log-probs": (ONE, (2, 1, 1))},
        sent=((ONE, {"tied": True}), ((1, 2, 1), {"tied": True})),
        converted=(
            ({"tied": True, "head_dim": 12, "vocab": 307, "max_shard_bytes": 20_000}, (2, 2, 1)),
            ({"classification": "sequence", "tied": True}, (1, 2, 1)),
        ),
    ),
    "qwen3_moe": Row(
        Qwen3MoeConfig,
        switches={"attention_bias": False},
        models=({"head_dim": 12}, {"norm_topk_prob": False, "tied": True}),
        layouts=MIXTURE,
        fast={
            "log-probs": (ONE, (1, 1, 2, 2), (1, 2, 1)),
            "values": ((2, 1, 1, 2),),
        },
        checkpoints=(
            ((2, 2, 1, 2), (ONE, (1, 2, 2, 2), (2, 1, 2, 2))),
            ((2, 1, 2, 4), (ONE, (1, 2, 2, 2), (2, 1, 2, 2))),
        ),
        sent=(((2, 1, 1, 2), {}),),
        converted=(
            ({"dtype": BF16, "vocab": 101, "max_shard_bytes": 20_000}, (2, 2, 3)),
            ({"tied": True, "head_dim": 6}, (1, 1, 1)),
            ({"classification": "token"}, (1, 1, 2)),
        ),
    ),
    "llama": Row(
        LlamaConfig,
        switches={"attention_bias": False},
        models=({"rope": "llama3"},),
        layouts=ALIKE,
        fast={"log-probs": (ONE, (1, 1, 1, 1, 2))},
        sent=(((2, 2, 1), {"rope": "llama3"}),),
        converted=(
            ({"rope": "llama3", "head_dim": 10, "dtype": BF16, "heads": 8, "kv_heads": 4}, (4, 1, 1)),
        ),
    ),
    "mistral": Row(
        MistralConfig,
        switches={"sliding_window": None},
        models=({"head_dim": 12},),
        fast={"log-probs": (ONE,)},
        layouts=ALIKE,
        sent=(((1, 2, 1), {"kv_heads": 1}),),
        converted=(({"head_dim": 12, "dtype": BF16, "vocab": 101}, (1, 2, 1)),),
    ),
    "glm4": Row(
        Glm4Config,
        models=(
            {"head_dim": 12},
            {"tied": True, "attention_bias": False, "partial_rotary_factor": 0.25, "head_dim": 16},
        ),
        layouts=ALIKE,
        fast={"log-probs": (ONE, (1, 1, 1, 1, 2)), "values": ((2, 1, 1),)},
        sent=(((2, 1, 1), {"head_dim": 12}),),
        converted=(
            ({"dtype": BF16, "head_dim": 12, "vocab": 307, "max_shard_bytes": 20_000}, (2, 2, 1)),
            ({"tied": True, "attention_bias": False, "layers": 4}, (1, 4, 1)),
            ({"classification": "token"}, (2, 1, 1)),
        ),
    ),
    "glm4_moe": Row(
        Glm4MoeConfig,
        # As published; the two layers of a model differ in kind.
        switches={
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
        },
        # GLM-4.5 with every switch that the table covers; Air, without q and k norms; grouped experts, with
        # no dense first layer.
        models=(
            {"head_dim": 12, "n_shared_experts": 2},
            {"use_qk_norm": False, "attention_bias": False, "tied": True, "routed_scaling_factor": 1.0},
            {"experts": 12, "active": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
        ),
        layouts=UNEVEN,
        fast={"log-probs": (ONE, (2, 1, 1, 2))},
        checkpoints=(((2, 2, 1, 2), (ONE, (1, 2, 2, 2), (1, 2, 1, 1, 1, 2))),),
        sent=(((2, 1, 1, 2), {}),),
        converted=(
            ({"dtype": BF16, "layers": 4, "n_shared_experts": 2, "max_shard_bytes": 20_000}, (2, 2, 3)),
            ({"tied": True, "use_qk_norm": False, "first_k_dense_replace": 0}, (1, 2, 2)),
            ({"classification": "token", "layers": 4}, (2, 2, 2)),
        ),
    ),
    "deepseek_v3": Row(
        DeepseekV3Config,
        # The widths of a head's parts, of the latents and of the rotated part all differ.
        switches={
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.446,
            "num_nextn_predict_layers": 0,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "scoring_func": "sigmoid",  # this and the next key are for SGLang, as published
            "topk_method": "noaux_tc",
        },
        # Moonlight, with another epsilon than its latent norms; DeepSeek-V3, with grouped experts; no dense
        # first layer and values as wide as keys.
        models=(
            {"q_lora_rank": None, "rms_norm_eps": 1e-3},
            {"experts": 12, "active": 4, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
            {"first_k_dense_replace": 0, "tied": True, "v_head_dim": 12},
        ),
        layouts=UNEVEN,
        fast={"log-probs": (ONE, (2, 2, 1, 2)), "gradients": ((2, 2, 1, 2),)},
        checkpoints=(((2, 2, 1, 2), (ONE, (1, 2, 2, 2), (1, 2, 1, 1, 1, 2))),),
        sent=(((2, 1, 1, 2), {}),),
        converted=(
            ({"dtype": BF16, "layers": 4, "max_shard_bytes": 20_000}, (2, 2, 3)),
            ({"tied": True, "q_lora_rank": None, "first_k_dense_replace": 0}, (1, 2, 2)),
            ({"classification": "token", "layers": 4}, (2, 1, 2)),
        ),
    ),
    "qwen3_5_text": Row(
        Qwen3_5TextConfig,
        switches=DELTA_NET,
        # In the second model only the last layer has full attention, as in published models.
        models=(
            {"head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 12},
            {"tied": True, "kv_heads": 4, "full_attention_interval": 4, "linear_num_key_heads": 4}
            | {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3, "linear_value_head_dim": 6},
        ),
        layouts=LINEAR,
        fast={
            "log-probs": (ONE, (2, 1, 1)),
            "gradients": ((1, 1, 1, 1, 2),),
            "values": (ONE,),
        },
        sent=(((2, 1, 1), {"head_dim": 16}),),
        converted=(
            ({"dtype": BF16, "head_dim": 16, "vocab": 101, "max_shard_bytes": 20_000}, (2, 2, 1)),
            ({"tied": True, "layers": 4, "full_attention_interval": 4}, (1, 4, 1)),
            ({"classification": "token"}, (2, 1, 1)),
        ),
    ),
    "qwen3_5_moe_text": Row(
        Qwen3_5MoeTextConfig,
        switches={**DELTA_NET, "shared_expert_intermediate_size": 20},  # a width that occurs nowhere else
        # In the second model only the last layer has full attention, as in published models.
        models=(
            {"head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 12},
            {"tied": True, "kv_heads": 4, "full_attention_interval": 4, "linear_num_key_heads": 4}
            | {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3},
        ),
        layouts=LINEAR_MIXTURE,
        critics=False,
        fast={"log-probs": (ONE, (2, 2, 1, 2))},
        checkpoints=(((2, 2, 1, 2), (ONE, (1, 2, 2, 2), (1, 2, 1, 1, 1, 2))),),
        sent=(((2, 1, 1, 2), {"head_dim": 16}),),
        converted=(({"dtype": BF16, "head_dim": 16, "vocab": 101, "max_shard_bytes": 20_000}, (2, 2, 3)),),
    ),
    "qwen3_next": Row(
        Qwen3NextConfig,
        switches={**DELTA_NET, "shared_expert_intermediate_size": 20},
        # The second does not divide the scores of the selected experts by their sum.
        models=(
            {"linear_num_key_heads": 4, "linear_num_value_heads": 12, "tied": True},
            {"norm_topk_prob": False, "linear_num_key_heads": 4}
            | {"linear_num_value_heads": 4, "linear_value_head_dim": 6},
        ),
        layouts=LINEAR_MIXTURE,
        fast={
            "log-probs": (ONE, (1, 1, 1, 2, 2)),
            "gradients": ((2, 1, 1, 2),),
        },
        checkpoints=(((2, 2, 1, 2), (ONE, (1, 2, 2, 2), (1, 2, 1, 1, 1, 2))),),
        sent=(((1, 2, 1), {}),),
        converted=(
            ({"dtype": BF16, "tied": True, "vocab": 101, "max_shard_bytes": 20_000}, (2, 2, 2)),
            ({"classification": "token"}, (1, 2, 2)),
        ),
    ),
}
