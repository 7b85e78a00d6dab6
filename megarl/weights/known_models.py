"""Sizes of public models to plan with. Imports without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.weights.families import read_config

# Values of `_KEYS`, without multi-token prediction.
_KNOWN: dict[str, tuple[str | int | bool | None, ...]] = {
    "Qwen2.5-0.5B": ("qwen2", 24, 896, 14, 2, 64, 4864, 151936, True),
    "Qwen2.5-1.5B": ("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, True),
    "Qwen2.5-Coder-0.5B": ("qwen2", 24, 896, 14, 2, 64, 4864, 151936, True),
    "Qwen2.5-Coder-1.5B": ("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, True),
    "Qwen2.5-3B": ("qwen2", 36, 2048, 16, 2, 128, 11008, 151936, True),
    "Qwen2.5-7B": ("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, False),
    "Qwen2.5-14B": ("qwen2", 48, 5120, 40, 8, 128, 13824, 152064, False),
    "Qwen2.5-32B": ("qwen2", 64, 5120, 40, 8, 128, 27648, 152064, False),
    "Qwen2.5-72B": ("qwen2", 80, 8192, 64, 8, 128, 29568, 152064, False),
    "Qwen3-0.6B": ("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, True),
    "Qwen3-1.7B": ("qwen3", 28, 2048, 16, 8, 128, 6144, 151936, True),
    "Qwen3-4B": ("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, True),
    "Qwen3-8B": ("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False),
    "Qwen3-14B": ("qwen3", 40, 5120, 40, 8, 128, 17408, 151936, False),
    "Qwen3-32B": ("qwen3", 64, 5120, 64, 8, 128, 25600, 151936, False),
    "Llama-3.2-1B": ("llama", 16, 2048, 32, 8, 64, 8192, 128256, True),
    "Llama-3.2-3B": ("llama", 28, 3072, 24, 8, 128, 8192, 128256, True),
    "Llama-3.1-8B": ("llama", 32, 4096, 32, 8, 128, 14336, 128256, False),
    "Llama-3.1-70B": ("llama", 80, 8192, 64, 8, 128, 28672, 128256, False),
    "Mistral-7B": ("mistral", 32, 4096, 32, 8, 128, 14336, 32768, False),  # v0.3
    "Mistral-Nemo": ("mistral", 40, 5120, 32, 8, 128, 14336, 131072, False),
    "Mistral-Small-24B": ("mistral", 40, 5120, 32, 8, 128, 32768, 131072, False),
    "Magistral-Small": ("mistral", 40, 5120, 32, 8, 128, 32768, 131072, False),  # 2506
    "GLM-4-9B": ("glm4", 40, 4096, 32, 2, 128, 13696, 151552, False),  # 0414, like all GLM-4 here
    "GLM-Z1-9B": ("glm4", 40, 4096, 32, 2, 128, 13696, 151552, False),
    "GLM-4-32B": ("glm4", 61, 6144, 48, 2, 128, 23040, 151552, False),
    "GLM-Z1-32B": ("glm4", 61, 6144, 48, 2, 128, 23040, 151552, False),
    "Qwen3-30B-A3B": ("qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, False, 128, 8, 768),
    "Qwen3-235B-A22B": ("qwen3_moe", 94, 4096, 64, 4, 128, 12288, 151936, False, 128, 8, 1536),
    "GLM-4.5-Air": ("glm4_moe", 46, 4096, 96, 8, 128, 10944, 151552, False, 128, 8, 1408),
    "GLM-4.5": ("glm4_moe", 92, 5120, 96, 8, 128, 12288, 151552, False, 160, 8, 1536),
    "GLM-4.6": ("glm4_moe", 92, 5120, 96, 8, 128, 12288, 151552, False, 160, 8, 1536),
    "Moonlight-16B-A3B": ("deepseek_v3", 27, 2048, 16, 16, 64, 11264, 163840, False, 64, 6, 1408),
    "DeepSeek-V3": ("deepseek_v3", 61, 7168, 128, 128, 64, 18432, 129280, False, 256, 8, 2048),
    "DeepSeek-R1": ("deepseek_v3", 61, 7168, 128, 128, 64, 18432, 129280, False, 256, 8, 2048),
    "Qwen3.5-9B": ("qwen3_5_text", 32, 4096, 16, 4, 256, 12288, 248320, False),  # text part only
    "Qwen3.5-27B": ("qwen3_5_text", 64, 5120, 24, 4, 256, 17408, 248320, False),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe_text", 40, 2048, 16, 2, 256, None, 248320, False, 256, 8, 512),
    "Qwen3.5-122B-A10B": ("qwen3_5_moe_text", 48, 3072, 32, 2, 256, None, 248320, False, 256, 8, 1024),
    "Qwen3.5-397B-A17B": ("qwen3_5_moe_text", 60, 4096, 32, 2, 256, None, 248320, False, 512, 10, 1024),
    "Qwen3-Next-80B-A3B": ("qwen3_next", 48, 2048, 16, 2, 256, 5120, 151936, False, 512, 10, 512),
}
_KEYS = (
    *("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "tie_word_embeddings"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    name: dict(zip(_KEYS, sizes, strict=False)) for name, sizes in _KNOWN.items()
}
for _name in ("GLM-4-32B", "GLM-Z1-32B"):
    KNOWN_MODELS[_name]["attention_bias"] = False
for _name, _dense in (("GLM-4.5-Air", 1), ("GLM-4.5", 3), ("GLM-4.6", 3)):
    KNOWN_MODELS[_name] |= {"first_k_dense_replace": _dense, "n_shared_experts": 1}
    KNOWN_MODELS[_name] |= {"attention_bias": True, "use_qk_norm": _name != "GLM-4.5-Air"}
for _name, _heads in (
    *(("Qwen3.5-9B", 32), ("Qwen3.5-27B", 48), ("Qwen3-Next-80B-A3B", 32)),
    *(("Qwen3.5-35B-A3B", 32), ("Qwen3.5-122B-A10B", 64), ("Qwen3.5-397B-A17B", 64)),
):
    KNOWN_MODELS[_name] |= {"linear_num_key_heads": 16, "linear_num_value_heads": _heads}
    KNOWN_MODELS[_name] |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    KNOWN_MODELS[_name] |= {"linear_conv_kernel_dim": 4, "full_attention_interval": 4}
    if _expert := KNOWN_MODELS[_name].get("moe_intermediate_size"):
        KNOWN_MODELS[_name]["shared_expert_intermediate_size"] = _expert
for _name, _dense, _shared, _rank in (
    ("Moonlight-16B-A3B", 1, 2, None),
    ("DeepSeek-V3", 3, 1, 1536),
    ("DeepSeek-R1", 3, 1, 1536),
):
    KNOWN_MODELS[_name] |= {"first_k_dense_replace": _dense, "n_shared_experts": _shared}
    KNOWN_MODELS[_name] |= {"q_lora_rank": _rank, "kv_lora_rank": 512}
    KNOWN_MODELS[_name] |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def planning_config(path: Path, name: str | None = None) -> tuple[str, Mapping[str, Any]]:
    """Return (origin, config.json) of the model to plan. Raises ConfigError if there is none.

    First the known model `name`, then the folder's config.json, then the known model with the folder's name,
    less a suffix."""
    if name is None and (path / "config.json").is_file():
        return str(path / "config.json"), read_config(path)
    model_name = path.name.partition("@")[0] if name is None else name  # without a revision of the hub
    matches = [
        known_name
        for known_name in KNOWN_MODELS
        if f"{model_name}-".lower().startswith(f"{known_name}-".lower())
    ]
    if not matches:
        key = f"--model: {name!r}"
        if name is None:
            key = f"model.path: {path}: no config.json there, and {model_name!r}"
        raise ConfigError(f"{key} is not a known model (known: {', '.join(KNOWN_MODELS)})")
    longest = max(matches, key=len)
    return f"the known sizes of {longest}", KNOWN_MODELS[longest]
