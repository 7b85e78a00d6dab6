"""Read config.json through transformers, and check that the model can be built.

Imports no Megatron: preflight uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.config.errors import CheckpointError
from megarl.weights.families import FAMILIES, Sizes, get_family, is_on, is_tied, read_config


def read_hf_config(folder: Path) -> PretrainedConfig:
    """Read the configuration without running the folder's code. Raises CheckpointError."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json (model.path must be a Hugging Face folder)")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 (each check of a value has its own; some end in a TypeError)
        what = str(error) or type(error).__name__
        raise CheckpointError(f"{path}: not a configuration that transformers takes: {what}") from None


def check_buildable(folder: Path) -> None:
    """Raise CheckpointError `config.json: key: problem` if the builder would refuse the model."""
    raw_config, hf = read_config(folder), read_hf_config(folder)
    sizes = Sizes.from_config(raw_config)
    values_by_key: dict[str, tuple[Any, Any]] = {
        "num_hidden_layers": (sizes.layers, hf.num_hidden_layers),
        "num_key_value_heads": (sizes.kv_heads, hf.num_key_value_heads),
        "tie_word_embeddings": (is_tied(raw_config), hf.tie_word_embeddings),
    }
    if get_family(raw_config).is_latent:
        values_by_key["v_head_dim"] = (sizes.out // sizes.heads, hf.v_head_dim)
    else:
        values_by_key["head_dim"] = (sizes.head_dim, head_dim(hf))
    for key, value in get_family(raw_config).requires:
        attribute = getattr(hf, key, None)
        values_by_key[key] = (value, value if attribute is None else attribute)
    switches = {pair.switch.removeprefix("not ") for pair in FAMILIES[hf.model_type].layer}
    for key in switches - {""}:
        values_by_key[key] = (is_on(key, raw_config), getattr(hf, key) not in (None, False))
    try:
        for key, (megarl_value, hf_value) in values_by_key.items():
            if megarl_value != hf_value:  # missing, and our defaults differ
                difference = f"transformers takes {json.dumps(hf_value)}, not {json.dumps(megarl_value)}"
                raise CheckpointError(f"config.json: {key}: is missing, and {difference} (add it)")
        if not bool(rope_frequencies(hf).isfinite().all()):
            problem = "gives frequencies that are not finite (is it, or a factor, very small?)"
            raise CheckpointError(f"config.json: rope_theta: {problem}")
        normalised = get_family(raw_config).is_moe and getattr(hf, "norm_topk_prob", True)
        if normalised and hf.num_experts_per_tok == 1:
            what = "true with num_experts_per_tok 1 would leave the router without a gradient"
            raise CheckpointError(f"config.json: norm_topk_prob: {what}")
    except CheckpointError as error:
        raise CheckpointError(f"{folder}/{error}") from None


def rope_frequencies(hf: PretrainedConfig) -> Tensor:
    """Return the inverse rotary frequencies, float32 [rotated width / 2].

    Raises CheckpointError for a rope_type that cannot be computed or scales attention too."""
    rope = hf.rope_parameters
    rope_type = rope.get("rope_type", "default")
    if rope_type == "default":
        dim = int(head_dim(hf) * rope.get("partial_rotary_factor", 1.0))
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](hf)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"config.json: rope_type: {rope_type!r} cannot be computed: {what} (are its factors there?)"
        ) from None
    if factor != 1.0:
        raise CheckpointError(
            f"config.json: rope_type: {rope_type!r} scales attention by {factor}, which is not implemented"
        )
    return frequencies.float()


def yarn_softmax(hf: PretrainedConfig) -> tuple[float, float]:
    """Return YaRN's s and a: multi-latent attention scales its softmax by (0.1 a ln s + 1)^2.

    (1, 0) without YaRN (arXiv 2309.00071, section 3.4)."""
    rope = hf.rope_parameters
    is_scaled = rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim")
    return (rope["factor"], rope["mscale_all_dim"]) if is_scaled else (1.0, 0.0)


def head_dim(hf: PretrainedConfig) -> int:
    """Return a head's width; in multi-latent attention, its rotated part's."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
