"""Sizes of public models, so that a laptop can plan a run without their weights. From the config.json of each model's public repository."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.weights.families import read_config

# layers, hidden, heads, key/value heads, head_dim, feed-forward columns, vocabulary, tied embeddings
_DENSE: dict[str, tuple[str, int, int, int, int, int, int, int, bool]] = {
    "Qwen2.5-0.5B": ("qwen2", 24, 896, 14, 2, 64, 4864, 151936, True),
    "Qwen2.5-1.5B": ("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, True),
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
}
# The same, and experts, experts per token, feed-forward columns of an expert.
_MIXTURES: dict[str, tuple[str, int, int, int, int, int, int, int, bool, int, int, int]] = {
    "Qwen3-30B-A3B": ("qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, False, 128, 8, 768),
    "Qwen3-235B-A22B": ("qwen3_moe", 94, 4096, 64, 4, 128, 12288, 151936, False, 128, 8, 1536),
}
_KEYS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
KNOWN_MODELS: dict[str, dict[str, Any]] = {name: dict(zip(_KEYS, sizes, strict=False)) for name, sizes in (_DENSE | _MIXTURES).items()}


def planning_config(path: Path, name: str | None = None) -> tuple[str, Mapping[str, Any]]:
    """(where it is from, config.json) of the model to plan with: a known one by `name`, else the folder's, else a known one that is named
    like the folder (a suffix such as -Instruct aside). ConfigError if there is none."""
    if name is None and (path / "config.json").is_file():
        return str(path / "config.json"), read_config(path)
    wanted = path.name if name is None else name
    found = max((known for known in KNOWN_MODELS if f"{wanted}-".lower().startswith(f"{known}-".lower())), key=len, default=None)
    if found is None:
        key = f"model.path: {path}: no config.json there, and {wanted!r}" if name is None else f"--model: {name!r}"
        raise ConfigError(f"{key} is not a known model (known: {', '.join(KNOWN_MODELS)})")
    return f"the known sizes of {found}", KNOWN_MODELS[found]
