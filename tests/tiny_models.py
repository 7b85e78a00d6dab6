"""Tiny random Hugging Face folders of every family, with a working tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForTokenClassification,
)
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoePreTrainedModel

from tests.families import ROWS, Family

HYBRID = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # with linear-attention layers
MODELS = {
    None: AutoModelForCausalLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}
EXPERT_BIAS = "e_score_correction_bias"
PAD, EOS, BOS, START, END = "<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>"
SPECIALS = (PAD, EOS, BOS, START, END)
CHARACTERS = "0123456789+-*/=? \nAnswer:WitdbcfghklmopquvxyzSTHE,.!()$\\{}<>|_"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{{ '<eos>' if m['role'] == 'assistant' else '<|im_end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_tokenizer(vocab: int, *, chat_template: bool = True) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer: one token per byte if `vocab` has room for all 256.

    Then any text round-trips. Otherwise it has one token per character of a small alphabet and drops others.
    pad is 0, eos 1; bos is never added. It is byte-level in either case, because `transformers` 5 forces
    Qwen2's byte-level tokenizer on every folder of that family.
    """
    ids = {special: i for i, special in enumerate(SPECIALS)}
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(encode.alphabet())
    if vocab < len(SPECIALS) + len(alphabet):
        alphabet = [encode.pre_tokenize_str(character)[0][0] for character in dict.fromkeys(CHARACTERS)]
    for character in alphabet[: vocab - len(SPECIALS)]:
        ids[character] = len(ids)
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = encode
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=PAD,
        additional_special_tokens=[START, END],
        clean_up_tokenization_spaces=False,
    )
    if chat_template:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def make_config(
    family: Family, *, tied: bool = False, rope: Literal["default", "llama3"] = "default", **sizes: Any
) -> Any:
    """Return the `transformers` config of a tiny model; `sizes` are config keys."""
    rope_parameters = (
        {"rope_theta": 10000.0, "rope_type": "default"}
        if rope == "default"
        else {"rope_theta": 500000.0, **LLAMA3_ROPE}
    )
    row = ROWS[family]
    return row.config(
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        **{"rope_parameters": rope_parameters, **row.switches, **sizes},
    )


class Glm4MoeForTokenClassification(GenericForTokenClassification, Glm4MoePreTrainedModel):  # type: ignore[misc]
    """GLM-4.5's token classifier, missing in transformers, built like DeepSeek-V3's."""


def model_class(family: str, classification: str | None) -> Any:
    """Return the class of a family's models; transformers has no auto class for these token classifiers."""
    by_name = {"qwen3_5_text": Qwen3_5ForTokenClassification, "glm4_moe": Glm4MoeForTokenClassification}
    return by_name.get(family, MODELS["token"]) if classification == "token" else MODELS[classification]


def make_tiny_model(
    folder: Path,
    family: Family,
    *,
    tied: bool = False,
    vocab: int = 307,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 48,
    experts: int = 6,
    active: int = 2,
    norm_topk_prob: bool = True,
    max_positions: int = 512,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    classification: Literal["sequence", "token"] | None = None,
    rope: Literal["default", "llama3"] = "default",
    rope_style: Literal["classic", "parameters"] = "classic",
    chat_template: bool = True,
    max_shard_bytes: int | None = None,
    **keys: Any,
) -> Path:
    """Write config.json, safetensors, tokenizer and generation_config.json into `folder` and return it.

    Every weight, bias and norm weight is random (std 0.1 around its usual value), so that no error hides
    behind zeros. Only the `score.bias` of a token classifier is zero, because a value head has none.

    Args:
        head_dim: may differ from hidden / heads (not for qwen2).
        experts, active: for mixtures; an expert is half as wide as `ffn`.
        rope_style: "classic" writes rope_theta and rope_scaling as in published models, "parameters" writes
            the format of transformers 5.
        max_shard_bytes: splits the weights into several files with an index.
        keys: further keys of config.json.
    """
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family == "deepseek_v3" else kv_heads,
        "max_position_embeddings": max_positions,
    }
    if head_dim is not None and family not in ("qwen2", "deepseek_v3"):
        sizes["head_dim"] = head_dim
    elif family in ("qwen3", "qwen3_moe", "glm4", "glm4_moe", *HYBRID):
        sizes["head_dim"] = hidden // heads
    if family in ("qwen3_moe", "glm4_moe", "deepseek_v3", *HYBRID[1:]):
        sizes |= {
            "num_experts" if family.startswith("qwen3") else "n_routed_experts": experts,
            "num_experts_per_tok": active,
            "norm_topk_prob": norm_topk_prob,
            "moe_intermediate_size": ffn // 2,
        }
    if family == "qwen3_5_moe_text":  # as published
        del sizes["intermediate_size"], sizes["norm_topk_prob"]
    if classification:
        sizes["num_labels"] = 1
    config = make_config(family, tied=tied, rope=rope, **sizes, **keys)
    found = model_class(family, classification)
    model: Any = found.from_config(config) if hasattr(found, "from_config") else found(config)
    randomise(model, seed)
    biases = {name: bias.clone() for name, bias in model.named_buffers() if name.endswith(EXPERT_BIAS)}
    model = model.to(dtype)
    for name, bias in biases.items():  # published models keep these in float32
        setattr(model.get_submodule(name.rpartition(".")[0]), EXPERT_BIAS, bias)
    config.dtype = dtype
    folder = Path(folder)
    model.save_pretrained(folder, **({"max_shard_size": max_shard_bytes} if max_shard_bytes else {}))
    if rope_style == "classic":
        use_classic_rope(folder / "config.json")
    make_tokenizer(vocab, chat_template=chat_template).save_pretrained(folder)
    GenerationConfig(eos_token_id=[1], pad_token_id=0, bos_token_id=2).save_pretrained(folder)
    return folder


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill the model with random weights of std 0.1, norm weights around 1; a seed gives the same weights."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        centred = model.config.model_type in HYBRID and "linear_attn" not in name
        centre = 1.0 if "norm" in name and not centred else 0.0
        parameter.copy_(centre + 0.1 * torch.randn(parameter.shape, generator=generator))
        if name == "score.bias":
            parameter.zero_()
    for name, buffer in model.named_buffers():
        if name.endswith(EXPERT_BIAS):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def use_classic_rope(path: Path) -> None:
    """Rewrite transformers 5's rope_parameters into the rope_theta and rope_scaling of published models."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2) + "\n")
