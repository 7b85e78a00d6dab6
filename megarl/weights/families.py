"""Tables of model families: the Hugging Face tensors in each Megatron parameter.

Imports without torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from reprlib import repr as _short
from typing import Any, Literal, TypeVar

from megarl.config.errors import CheckpointError
from megarl.config.files import check_files, read_json
from megarl.config.schema import LoraConfig, OptimizerConfig

T = TypeVar("T")
Shape = tuple[int, ...]

# A tensor-parallel rank's part of a tensor. Experts are never cut.
#   column      rows of each Hugging Face tensor, stacked (gate over up)
#   halves      the same for gate and up in one Hugging Face tensor
#   qkv         by query group: queries, key, value. Linear attention: by key head
#   row         columns
#   vocabulary  rows, padded with zeros to a multiple of the ranks
Operation = Literal["replicated", "column", "halves", "qkv", "row", "vocabulary"]
# (Megatron's name, operation, "NAME: DIMENSIONS", ...)
Row = tuple[str, Operation, *tuple[str, ...]]

# A malformed config.json must not exhaust memory.
MAX_SIZE, MAX_LAYERS, MAX_EXPERTS = 2**24, 10_000, 4096
# transformers 5 writes the second key for Qwen3.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model. Tables name its integer fields as dimensions."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    q: int
    kv: int
    experts: int = 0  # 0: dense model
    expert_ffn: int = 0
    shared_ffn: int = 0  # all shared experts together
    dense: int = 0  # leading dense layers of a mixture
    gate_up: int = 0
    out: int = 0  # heads * width of a value
    q_rank: int = 0  # multi-latent attention: query latent; 0: none
    kv_rank: int = 0  # key/value latent
    latent: int = 0  # kv_rank + rotated part of the key
    kv_up: int = 0
    rank: int = 0  # of LoRA adapters
    one: int = 1
    gated_q: int = 0  # with gates
    linear: frozenset[int] = frozenset()  # layers with linear attention
    key_heads: int = 0
    value_heads: int = 0
    value_dim: int = 0  # of one head
    key: int = 0  # of all heads
    value: int = 0  # of all heads
    conv: int = 0  # kernel size of the convolution
    mixed: int = 0  # queries, keys and values
    qkvz: int = 0  # mixed and gates, by key head
    ba: int = 0  # beta and alpha, by key head

    @staticmethod
    def from_config(hf_config: Mapping[str, Any]) -> Sizes:
        """Read config.json. Raises CheckpointError with the first invalid key."""
        get = partial(_get_size, hf_config)
        heads, hidden = get("num_attention_heads"), get("hidden_size")
        kv_heads = get("num_key_value_heads", heads)
        head_dim = get("head_dim", hidden // heads)
        if heads % kv_heads:
            raise _bad("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads = {heads}")
        # An unknown family's sizes are those of a dense model.
        family = FAMILIES.get(str(hf_config.get("model_type")), FAMILIES["llama"])
        is_moe = family.is_moe
        experts_key = next((key for key in EXPERT_KEYS if hf_config.get(key) is not None), EXPERT_KEYS[0])
        shared_ffn = 0
        if family.has("shared_experts.gate_weight"):
            shared_ffn = get("shared_expert_intermediate_size")
        elif family.has("shared_experts.linear_fc1.weight"):
            shared_ffn = get("n_shared_experts") * get("moe_intermediate_size")
        has_dense_layers = any(pair.kind == "dense" for pair in family.layer)
        layers = get("num_hidden_layers", most=MAX_LAYERS)
        attention_sizes: dict[str, Any] = {"out": heads * head_dim}
        if family.is_latent:
            head_dim, attention_sizes = _get_latent_sizes(hf_config, heads)
        linear_sizes = _get_linear_sizes(hf_config, layers) if family.is_linear else {}
        # Qwen3.5's mixtures have no intermediate_size.
        default_ffn = get("moe_intermediate_size") if is_moe and not has_dense_layers else None
        ffn = get("intermediate_size", default_ffn)
        return Sizes(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=ffn,
            vocab=get("vocab_size"),
            q=heads * head_dim,
            kv=kv_heads * head_dim,
            experts=get(experts_key, most=MAX_EXPERTS) if is_moe else 0,
            expert_ffn=get("moe_intermediate_size") if is_moe else 0,
            shared_ffn=shared_ffn,
            dense=get("first_k_dense_replace", most=layers - 1, least=0) if has_dense_layers else 0,
            gate_up=2 * ffn,
            gated_q=2 * heads * head_dim,
            **attention_sizes,
            **linear_sizes,
        )

    def shape(self, dims: str) -> Shape:
        """Resolve dimensions: `"q hidden"` -> (heads * head_dim, hidden)."""
        return tuple(getattr(self, dim) for dim in dims.split())

    def has(self, pair: Pair, layer: int) -> bool:
        match pair.kind:
            case "dense" | "mixture":
                return (pair.kind == "dense") == (layer < self.dense)
            case "attention" | "linear":
                return (pair.kind == "linear") == (layer in self.linear)
        return True

    @property
    def is_uniform(self) -> bool:
        return not self.dense and not self.linear


def _get_size(
    hf_config: Mapping[str, Any], key: str, default: int | None = None, most: int = MAX_SIZE, least: int = 1
) -> int:
    """Return an integer from `least` to `most`, or raise CheckpointError."""
    value = hf_config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        expected = "a positive integer" if least == 1 else f"an integer from {least}"
        limit_text = f" up to {most:,}" if isinstance(value, int) and value > most else ""
        raise _bad(key, f"must be {expected}{limit_text} (got {_short(value)})")
    return value


def _get_latent_sizes(hf_config: Mapping[str, Any], heads: int) -> tuple[int, dict[str, Any]]:
    """Return head_dim and further sizes."""
    get = partial(_get_size, hf_config)
    rope_dim, value_dim, kv_rank = get("qk_rope_head_dim"), get("v_head_dim"), get("kv_lora_rank")
    nope_dim = get("qk_nope_head_dim")
    return nope_dim + rope_dim, {
        "q_rank": get("q_lora_rank") if is_on("q_lora_rank", hf_config) else 0,
        "kv_rank": kv_rank,
        "latent": kv_rank + rope_dim,
        "kv_up": heads * (nope_dim + value_dim),
        "out": heads * value_dim,
    }


def _get_linear_sizes(hf_config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    get = partial(_get_size, hf_config)
    key_heads, value_heads = get("linear_num_key_heads"), get("linear_num_value_heads")
    key, value_dim = key_heads * get("linear_key_head_dim"), get("linear_value_head_dim")
    value = value_heads * value_dim
    if value_heads % key_heads:
        what = f"{key_heads} does not divide linear_num_value_heads = {value_heads}"
        raise _bad("linear_num_key_heads", what)
    return {
        "linear": _find_linear_layers(hf_config, layers, get("full_attention_interval", 4)),
        "key_heads": key_heads,
        "value_heads": value_heads,
        "value_dim": value_dim,
        "key": key,
        "value": value,
        "conv": get("linear_conv_kernel_dim"),
        "mixed": 2 * key + value,
        "qkvz": 2 * (key + value),
        "ba": 2 * value_heads,
    }


@dataclass(frozen=True)
class Pair:
    """A Megatron parameter and the (name, dimensions) of its Hugging Face tensors.

    `{l}` and `{e}` are layer and expert: global in Hugging Face names, per rank in Megatron's.

    switch   config key that removes it if null or false ("not KEY": if anything else)
    kind     layers that have it
    unfused  a norm that Transformer Engine does not fuse into the next linear
    float32  where it is float32 whatever the model's dtype"""

    megatron: str
    operation: Operation
    hf: tuple[tuple[str, str], ...]
    switch: str = ""
    kind: Literal["every", "dense", "mixture", "attention", "linear"] = "every"
    unfused: bool = False
    float32: Literal["nowhere", "everywhere", "sglang"] = "nowhere"

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.megatron


def _rows(megatron: str, hf: str, *rows: Row) -> tuple[Pair, ...]:
    """megatron, hf: the module's names in a layer, ending in a dot."""
    pairs = []
    for name, operation, *tensors in rows:
        names_and_dims = (text.split(": ") for text in tensors)
        hf_tensors = tuple((f"model.layers.{{l}}.{hf}{hf_name}", dims) for hf_name, dims in names_and_dims)
        pairs.append(Pair(f"decoder.layers.{{l}}.{megatron}{name}", operation, hf_tensors))
    return tuple(pairs)


_layer = partial(_rows, "", "")
_attention = partial(_rows, "self_attention.", "self_attn.")
_delta_net = partial(_rows, "self_attention.", "linear_attn.")


def _replace_each(pairs: Iterable[Pair], **changes: Any) -> tuple[Pair, ...]:
    return tuple(replace(pair, **changes) for pair in pairs)


def _describe_mlp(megatron: str, hf: str, ffn: str) -> tuple[Pair, ...]:
    return _rows(
        megatron,
        hf,
        ("linear_fc1.weight", "column", f"gate_proj.weight: {ffn} hidden", f"up_proj.weight: {ffn} hidden"),
        ("linear_fc2.weight", "row", f"down_proj.weight: hidden {ffn}"),
    )


def _describe_attention(q: str) -> tuple[Pair, ...]:
    queries = f"q_proj.weight: {q} hidden"
    return _attention(
        ("linear_qkv.weight", "qkv", queries, "k_proj.weight: kv hidden", "v_proj.weight: kv hidden"),
        ("linear_proj.weight", "row", "o_proj.weight: hidden q"),
    )


EMBEDDED = ("model.embed_tokens.weight", "vocab hidden")
EMBEDDING = Pair("embedding.word_embeddings.weight", "vocabulary", (EMBEDDED,))
FINAL_NORM = Pair("decoder.final_layernorm.weight", "replicated", (("model.norm.weight", "hidden"),))
OUTPUT = Pair("output_layer.weight", "vocabulary", (("lm_head.weight", "vocab hidden"),))
# With tied embeddings, the last of several stages copies the embedding.
TIED_OUTPUT = Pair("output_layer.weight", "vocabulary", (EMBEDDED,))
VALUE_HEAD = Pair("value_head.weight", "replicated", (("score.weight", "one hidden"),))

INPUT_NORM, MLP_NORM = _layer(
    ("input_layernorm.weight", "replicated", "input_layernorm.weight: hidden"),
    ("pre_mlp_layernorm.weight", "replicated", "post_attention_layernorm.weight: hidden"),
)
ATTENTION_LAYER = (INPUT_NORM, *_describe_attention("q"), MLP_NORM)
(QKV_BIAS,) = _attention(("linear_qkv.bias", "qkv", "q_proj.bias: q", "k_proj.bias: kv", "v_proj.bias: kv"))
QK_NORMS = _attention(
    ("q_layernorm.weight", "replicated", "q_norm.weight: head_dim"),
    ("k_layernorm.weight", "replicated", "k_norm.weight: head_dim"),
)
# Multi-latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
_Q, *_LATENT_Q, _KV_DOWN, _KV_NORM, _KV_UP, _OUT = _attention(
    ("linear_q_proj.weight", "column", "q_proj.weight: q hidden"),
    ("linear_q_down_proj.weight", "replicated", "q_a_proj.weight: q_rank hidden"),
    ("q_layernorm.weight", "replicated", "q_a_layernorm.weight: q_rank"),
    ("linear_q_up_proj.weight", "column", "q_b_proj.weight: q q_rank"),
    ("linear_kv_down_proj.weight", "replicated", "kv_a_proj_with_mqa.weight: latent hidden"),
    ("kv_layernorm.weight", "replicated", "kv_a_layernorm.weight: kv_rank"),
    ("linear_kv_up_proj.weight", "column", "kv_b_proj.weight: kv_up kv_rank"),
    ("linear_proj.weight", "row", "o_proj.weight: hidden out"),
)
LATENT_ATTENTION = (
    replace(INPUT_NORM, unfused=True),
    replace(_Q, switch="not q_lora_rank"),
    *_replace_each(_LATENT_Q, switch="q_lora_rank"),
    *(_KV_DOWN, _KV_NORM, _KV_UP, _OUT, MLP_NORM),
)
DENSE_MLP = _describe_mlp("mlp.", "mlp.", "ffn")
DENSE_LAYER = (*ATTENTION_LAYER, *DENSE_MLP)
FUSED_DENSE_LAYER = (
    *ATTENTION_LAYER,
    *_layer(("mlp.linear_fc1.weight", "halves", "mlp.gate_up_proj.weight: gate_up hidden")),
    DENSE_MLP[1],
)
# Output norms, named after Megatron's bias-dropout-add (bda).
OUTPUT_NORMS = _layer(
    ("self_attn_bda.output_norm.weight", "replicated", "post_self_attn_layernorm.weight: hidden"),
    ("mlp_bda.output_norm.weight", "replicated", "post_mlp_layernorm.weight: hidden"),
)
# Named as in SequentialMLP. `get_table_name` translates TEGroupedMLP's names.
EXPERTS = (
    *_layer(("mlp.router.weight", "replicated", "mlp.gate.weight: experts hidden")),
    *_describe_mlp("mlp.experts.local_experts.{e}.", "mlp.experts.{e}.", "expert_ffn"),
)
GATED_SHARED_EXPERT = (
    *_describe_mlp("mlp.shared_experts.", "mlp.shared_expert.", "shared_ffn"),
    *_layer(("mlp.shared_experts.gate_weight", "replicated", "mlp.shared_expert_gate.weight: one hidden")),
)
# Selects experts without weighting them. Never trained.
(EXPERT_BIAS,) = _replace_each(
    _layer(("mlp.router.expert_bias", "replicated", "mlp.gate.e_score_correction_bias: experts")),
    kind="mixture",
    float32="everywhere",
)
DENSE_THEN_MIXTURES = (
    *_replace_each(DENSE_MLP, kind="dense"),
    replace(EXPERTS[0], kind="mixture", float32="sglang"),
    EXPERT_BIAS,
    *_replace_each(EXPERTS[1:], kind="mixture"),
    *_replace_each(_describe_mlp("mlp.shared_experts.", "mlp.shared_experts.", "shared_ffn"), kind="mixture"),
)
# Concatenated sections.
SECTIONS = {"gate_up": ("ffn", "ffn"), "mixed": ("key", "key", "value")}
GATED_ATTENTION = (*_describe_attention("gated_q"), *QK_NORMS)
# Gated DeltaNet (arXiv 2412.06464). b: beta; a: alpha; z: output gate.
DELTA_NET = _delta_net(
    (
        "in_proj.weight",
        "qkv",
        "in_proj_qkv.weight: mixed hidden",
        "in_proj_b.weight: value_heads hidden",
        "in_proj_a.weight: value_heads hidden",
        "in_proj_z.weight: value hidden",
    ),
    ("conv1d.weight", "qkv", "conv1d.weight: mixed one conv"),
    ("A_log", "column", "A_log: value_heads"),
    ("dt_bias", "column", "dt_bias: value_heads"),
    ("out_norm.weight", "replicated", "norm.weight: value_dim"),
    ("out_proj.weight", "row", "out_proj.weight: hidden value"),
)
# Qwen3-Next's files have two input projections, ordered by key head.
FUSED_DELTA_NET = (
    *_delta_net(
        ("in_proj.weight", "qkv", "in_proj_qkvz.weight: qkvz hidden", "in_proj_ba.weight: ba hidden"),
    ),
    *DELTA_NET[1:],
)


def _describe_hybrid(delta_net: tuple[Pair, ...]) -> tuple[Pair, ...]:
    linear = (replace(p, float32="sglang") if p.megatron.endswith("A_log") else p for p in delta_net)
    return (
        INPUT_NORM,
        *_replace_each(GATED_ATTENTION, kind="attention"),
        *_replace_each(linear, kind="linear"),
        MLP_NORM,
    )


@dataclass(frozen=True)
class Family:
    """A model family.

    prefix              of architectures, such as "Qwen2"
    requires            config keys and values, unless absent or null
    rotary_pairs        rotations pair neighbours, not halves of a head
    partial_rotary      `partial_rotary_factor` may be below 1
    sglang_unties       SGLang has an output layer despite tied embeddings
    sglang_flat         SGLang's attention names lack `self_attn`
    zero_centred        norms scale by 1 + weight, except those of linear attention
    other_heads         further architectures"""

    model_type: str
    prefix: str
    layer: tuple[Pair, ...]
    requires: tuple[tuple[str, Any], ...] = ()
    rotary_pairs: bool = False
    partial_rotary: bool = False
    sglang_unties: bool = False
    sglang_flat: bool = False
    zero_centred: bool = False
    other_heads: tuple[str, ...] = ()

    def has(self, parameter: str) -> bool:
        """Return whether a layer has a parameter with this ending."""
        return any(pair.megatron.endswith(parameter) for pair in self.layer)

    @cached_property
    def is_latent(self) -> bool:
        return self.has("self_attention.linear_kv_up_proj.weight")

    @cached_property
    def is_moe(self) -> bool:
        return any(pair.per_expert for pair in self.layer)

    @cached_property
    def is_linear(self) -> bool:
        return any(pair.kind == "linear" for pair in self.layer)


def adapters(pair: Pair, lora: LoraConfig) -> tuple[Pair, ...]:
    """Return a parameter's LoRA adapters: A [rank, in] and B [out, rank] of each matrix.

    B is cut like the matrix's rows, A like its columns; an uncut one is replicated."""
    adapter_pairs: list[Pair] = []
    for name, dims in pair.hf if lora.rank is not None else ():
        *_, module, suffix = name.split(".")
        is_matrix = suffix == "weight" and re.search(r"_proj(_\w+)?$", module)
        if not is_matrix or module not in (lora.targets or (module,)):
            continue
        (rows, columns), stem = dims.split(), name.removesuffix("weight")
        adapter_name = f"{pair.megatron.removesuffix('weight')}lora.{module}"
        is_row_parallel = pair.operation == "row"
        a_operation: Operation = "row" if is_row_parallel else "replicated"
        b_operation: Operation = "replicated" if is_row_parallel else pair.operation
        a = (stem + "lora_A.weight", f"rank {columns}")
        b = (stem + "lora_B.weight", f"{rows} rank")
        adapter_pairs.append(Pair(f"{adapter_name}_a", a_operation, (a,), kind=pair.kind))
        adapter_pairs.append(Pair(f"{adapter_name}_b", b_operation, (b,), kind=pair.kind))
    return tuple(adapter_pairs)


def is_frozen(pair: Pair, layer: int, optimizer: OptimizerConfig) -> bool:
    """Return whether training never changes a parameter of layer `layer`.

    Frozen attention includes the norm before it, which Transformer Engine fuses into the first matrix."""
    if pair == EXPERT_BIAS:
        return True
    if optimizer.lora.rank is not None:
        return pair != VALUE_HEAD
    if pair.hf == (EMBEDDED,):
        return "embeddings" in optimizer.frozen
    _, in_layer, name = pair.megatron.partition(".layers.{l}.")
    in_attention_block = name.startswith(("input_layernorm.", "self_attention.", "self_attn_bda."))
    is_frozen_attention = "attention" in optimizer.frozen and in_attention_block
    return bool(in_layer) and (is_frozen_attention or layer < optimizer.frozen_layers)


DTYPE_NAMES = ("float32", "bfloat16", "float16", "float64", "auto")
# Required keys. model/hf_config.py refuses types that it cannot build.
ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ROPE_NUMBERS = ("rope_theta", *ROPE_NEEDS["llama3"], "mscale", "mscale_all_dim", "beta_fast", "beta_slow")

# model/builder.py builds no others.
SWIGLU = (("hidden_act", "silu"), ("use_sliding_window", False))
HYBRID = (*SWIGLU, ("attention_bias", False), ("attn_output_gate", True), ("output_gate_type", "silu"))
# No published model has dense layers between mixtures.
ALL_MIXTURES: tuple[tuple[str, Any], ...] = (("mlp_only_layers", []), ("decoder_sparse_step", 1))
_hybrid_family = partial(Family, partial_rotary=True, sglang_flat=True, zero_centred=True)

FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen2", "Qwen2", (*DENSE_LAYER, QKV_BIAS), SWIGLU),
        Family("qwen3", "Qwen3", (*DENSE_LAYER, *QK_NORMS), (*SWIGLU, ("attention_bias", False))),
        Family(
            "qwen3_moe",
            "Qwen3Moe",
            (*ATTENTION_LAYER, *QK_NORMS, *EXPERTS),
            (*SWIGLU, ("attention_bias", False), *ALL_MIXTURES),
        ),
        Family("llama", "Llama", DENSE_LAYER, (*SWIGLU, ("attention_bias", False), ("mlp_bias", False))),
        Family("mistral", "Mistral", DENSE_LAYER, (*SWIGLU, ("sliding_window", None))),
        Family(
            "glm4",
            "Glm4",
            # 9B has these biases, 32B does not.
            (*FUSED_DENSE_LAYER, replace(QKV_BIAS, switch="attention_bias"), *OUTPUT_NORMS),
            SWIGLU,
            rotary_pairs=True,
            partial_rotary=True,
        ),
        Family(
            "glm4_moe",
            "Glm4Moe",
            (
                *ATTENTION_LAYER,
                replace(QKV_BIAS, switch="attention_bias"),
                *_replace_each(QK_NORMS, switch="use_qk_norm"),
                *DENSE_THEN_MIXTURES,
            ),
            # Megatron always normalises sigmoid scores of several experts.
            (*SWIGLU, ("norm_topk_prob", True)),
            partial_rotary=True,
            sglang_unties=True,
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3",
            # SGLang keeps router weights in the model's dtype.
            (
                *LATENT_ATTENTION,
                *(replace(p, float32="nowhere") if p.float32 == "sglang" else p for p in DENSE_THEN_MIXTURES),
            ),
            (
                *SWIGLU,
                ("norm_topk_prob", True),
                ("attention_bias", False),
                ("rope_interleave", True),
                ("scoring_func", "sigmoid"),
                ("topk_method", "noaux_tc"),
                ("moe_layer_freq", 1),
            ),
        ),
        _hybrid_family(
            "qwen3_5_text",
            "Qwen3_5",
            (*_describe_hybrid(DELTA_NET), *DENSE_MLP),
            HYBRID,
            other_heads=("Qwen3_5TextForSequenceClassification",),
        ),
        _hybrid_family(
            "qwen3_5_moe_text",
            "Qwen3_5Moe",
            (*_describe_hybrid(DELTA_NET), *EXPERTS, *GATED_SHARED_EXPERT),
            # transformers always normalises, and has no dense layers.
            (*HYBRID, ("norm_topk_prob", True), *ALL_MIXTURES),
        ),
        _hybrid_family(
            "qwen3_next",
            "Qwen3Next",
            (*_describe_hybrid(FUSED_DELTA_NET), *EXPERTS, *GATED_SHARED_EXPERT),
            (*HYBRID, *ALL_MIXTURES),
        ),
    )
}

COMPOSITE = ("qwen3_5", "qwen3_5_moe")

# Transformer Engine's spec fuses these norms into the next linears.
TE_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def get_table_name(name: str) -> str:
    """Return a Megatron parameter's name in the tables, for any wrapper and layer spec."""
    name = re.sub(r"^(module\.)+", "", name)
    for alias, table_suffix in TE_ALIASES.items():
        if name.endswith("." + alias):
            return name.removesuffix(alias) + table_suffix
    return re.sub(
        r"\.experts\.(linear_fc[12])\.(weight|lora)\.?(\d+)", r".experts.local_experts.\3.\1.\2", name
    )


def rename_to_table(tensors: Mapping[str, T]) -> dict[str, T]:
    return {get_table_name(name): tensor for name, tensor in tensors.items()}


def model_weights(tensors: Mapping[str, T]) -> dict[str, T]:
    """Rename tensors like `rename_to_table`, without LoRA adapters."""
    return {name: tensor for name, tensor in rename_to_table(tensors).items() if ".lora." not in name}


def get_family(hf_config: Mapping[str, Any]) -> Family:
    """Return a model's family, without switched-off parameters. Raises CheckpointError if unknown."""
    model_type = hf_config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if model_type in COMPOSITE:
        remedy = "save its language model alone: docs/families.md, Qwen3.5"
        raise _bad("model_type", f"{model_type!r} is a model of images and text ({remedy})")
    if family is None:
        raise _bad("model_type", f"{model_type!r} is not a known family (known: {', '.join(FAMILIES)})")
    suffixes = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
    heads = [*(family.prefix + suffix for suffix in suffixes), *family.other_heads]
    architectures = hf_config.get("architectures") or heads[:1]
    if not isinstance(architectures, list) or not architectures:
        raise _bad("architectures", f"must be a list of names (got {architectures!r})")
    if architectures[0] not in heads:
        raise _bad("architectures", f"{architectures[0]!r} is not supported (known: {', '.join(heads)})")
    for key, required_value in family.requires:
        value = hf_config.get(key)
        if value is not None and value != required_value:
            raise _bad(key, f"{value!r} is not supported for {model_type} (only {required_value!r} is)")
    layer = tuple(pair for pair in family.layer if not pair.switch or is_on(pair.switch, hf_config))
    return family if layer == family.layer else replace(family, layer=layer)


def is_on(switch: str, hf_config: Mapping[str, Any]) -> bool:
    key = switch.removeprefix("not ")
    value = hf_config.get(key, True)
    return (value is not None and value is not False) is (key == switch)


def is_tied(hf_config: Mapping[str, Any]) -> bool:
    return bool(hf_config.get("tie_word_embeddings", False))


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises CheckpointError with the file and the first unsupported key."""
    check_files(folder)
    hf_config = read_json(folder / "config.json", "no such file (a Hugging Face model folder is expected)")
    try:
        _check_description(hf_config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}/{error}") from None
    return hf_config


def _bad(key: str, problem: str) -> CheckpointError:
    return CheckpointError(f"config.json: {key}: {problem}")


def _check_description(hf_config: Mapping[str, Any]) -> None:
    if hf_config.get("auto_map"):
        remedy = f"remove the key if the model is a plain {hf_config.get('model_type')}"
        raise _bad("auto_map", f"asks for code that lies in the folder, which is never run ({remedy})")
    family, sizes = get_family(hf_config), Sizes.from_config(hf_config)
    for key, (check, description, nullable) in VALUES.items():
        value = hf_config.get(key)
        if key == "layer_types" and family.is_linear:
            continue
        if key in hf_config and not (check(value) or (value is None and nullable)):
            raise _bad(key, f"must be {description} (got {_short(value)})")
    if family.is_latent:
        _check_latent(hf_config, sizes)
    elif sizes.head_dim % 2:
        raise _bad("head_dim", f"must be even for rotary embeddings (got {sizes.head_dim})")
    if (quantization := hf_config.get("quantization_config")) is not None:
        quant_method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        what = f"a quantised folder ({_short(quant_method)}) is not read"
        raise _bad("quantization_config", f"{what} (convert its weights to bf16, and remove the key)")
    pad = hf_config.get("pad_token_id")
    if isinstance(pad, int) and not -sizes.vocab <= pad < sizes.vocab:
        raise _bad("pad_token_id", f"is outside the vocabulary of {sizes.vocab} (got {_short(pad)})")
    top_k: Any = hf_config.get("num_experts_per_tok")
    if family.is_moe and not (_is_count(top_k) and top_k <= sizes.experts):
        raise _bad("num_experts_per_tok", f"must be 1 to {sizes.experts}, the experts (got {_short(top_k)})")
    if family.has("router.expert_bias"):
        _check_groups(hf_config, sizes, top_k)
    _check_partial_rotary(family, sizes, "", hf_config)
    for key in ("rope_scaling", "rope_parameters"):
        _check_rope(family, sizes, key, hf_config.get(key) or {})


def _check_rope(family: Family, sizes: Sizes, key: str, rope: Mapping[str, Any]) -> None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if str(rope_type) not in ROPE_NEEDS:
        raise _bad(f"{key}.rope_type", f"{_short(rope_type)} is not known (known: {', '.join(ROPE_NEEDS)})")
    for name in ROPE_NEEDS[str(rope_type)]:
        if name not in rope:
            raise _bad(f"{key}.{name}", f"is missing, and rope_type {rope_type} needs it")
    for name, value in rope.items():
        if name in ROPE_NUMBERS and not _is_positive(value):
            raise _bad(f"{key}.{name}", f"must be a number > 0 (got {_short(value)})")
        if isinstance(value, Mapping):
            raise _bad(f"{key}.{name}", f"{_short(value)} is not supported (all layers share one setting)")
    _check_partial_rotary(family, sizes, f"{key}.", rope)
    if rope_type == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        low = _short(rope["low_freq_factor"])
        raise _bad(f"{key}.low_freq_factor", f"must be below high_freq_factor (got {low})")


def _find_linear_layers(hf_config: Mapping[str, Any], layers: int, interval: int) -> frozenset[int]:
    """Without `layer_types`, every `interval`-th layer has full attention."""
    layer_types, known_types = hf_config.get("layer_types"), ("full_attention", "linear_attention")
    if layer_types is None:
        layer_types = [known_types[(layer + 1) % interval > 0] for layer in range(layers)]
    is_list = isinstance(layer_types, list) and len(layer_types) == layers
    if not (is_list and all(layer_type in known_types for layer_type in layer_types)):
        what = f"must be a list of {layers}, each of them {known_types[0]} or {known_types[1]}"
        raise _bad("layer_types", f"{what} (got {_short(layer_types)})")
    return frozenset(layer for layer, layer_type in enumerate(layer_types) if layer_type == known_types[1])


def _check_partial_rotary(family: Family, sizes: Sizes, place: str, keys: Mapping[str, Any]) -> None:
    factor = keys.get("partial_rotary_factor")
    if factor is None or factor == 1:
        return
    key = f"{place}partial_rotary_factor"
    if not family.partial_rotary:
        raise _bad(key, f"must be 1, as heads are rotated whole (got {_short(factor)})")
    if not (_is_positive(factor) and factor < 1 and sizes.head_dim * factor % 2 == 0):
        what = f"must leave an even number of a head's {sizes.head_dim} to be rotated"
        raise _bad(key, f"{what} (got {_short(factor)})")


def _check_latent(hf_config: Mapping[str, Any], sizes: Sizes) -> None:
    rope_dim, value_dim = sizes.latent - sizes.kv_rank, sizes.out // sizes.heads
    head_dim = hf_config.get("head_dim")
    if rope_dim % 2:
        raise _bad("qk_rope_head_dim", f"must be even for rotary embeddings (got {rope_dim})")
    if head_dim not in (None, rope_dim):
        what = f"must be qk_rope_head_dim = {rope_dim}, by which transformers rotates, or be left out"
        raise _bad("head_dim", f"{what} (got {_short(head_dim)})")
    if sizes.kv_heads != sizes.heads:
        what = f"must be num_attention_heads = {sizes.heads}, as each has keys of its own"
        raise _bad("num_key_value_heads", f"{what} (got {sizes.kv_heads})")
    if value_dim > sizes.head_dim:
        raise _bad("v_head_dim", f"must be at most {sizes.head_dim}, the width of a key (got {value_dim})")


def _check_groups(hf_config: Mapping[str, Any], sizes: Sizes, active: int) -> None:
    """Check the groups of experts, among which a router selects first.

    transformers and SGLang score a group by its best two experts, Megatron by its best
    `num_experts_per_tok / topk_group`, so this must be 2."""
    groups, top_groups = (hf_config.get(key, 1) for key in ("n_group", "topk_group"))
    if not (_is_count(groups) and sizes.experts % groups == 0):
        raise _bad("n_group", f"must divide the {sizes.experts} experts (got {_short(groups)})")
    if not (_is_count(top_groups) and top_groups <= groups):
        raise _bad("topk_group", f"must be 1 to {groups}, the groups (got {_short(top_groups)})")
    if groups > 1 and (active != 2 * top_groups or sizes.experts < 2 * groups):
        what = f"with {groups} groups num_experts_per_tok must be 2 for each that is chosen"
        raise _bad("topk_group", f"{what}, and a group have 2 experts (got {top_groups} and {active})")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e38


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_positive(value) and value <= MAX_SIZE


def _is_full_attention(value: Any) -> bool:
    return isinstance(value, list) and all(layer_type == "full_attention" for layer_type in value)


# Optional keys: (check, description, nullable).
Check = tuple[Callable[[Any], bool], str, bool]
_FLAG: Check = (lambda value: isinstance(value, bool), "true or false", False)
_OBJECT: Check = (lambda value: isinstance(value, dict), "null or an object", True)
_DTYPE: Check = (lambda value: value in DTYPE_NAMES, f"null or one of {', '.join(DTYPE_NAMES)}", True)
VALUES: dict[str, Check] = {
    "max_position_embeddings": (_is_count, "a positive integer", False),
    "rms_norm_eps": (lambda value: _is_positive(value) and value < 1, "a number between 0 and 1", False),
    "rope_theta": (_is_positive, "a number > 0", False),
    "layer_types": (_is_full_attention, "full_attention throughout", True),
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "tie_word_embeddings": _FLAG,
    "norm_topk_prob": _FLAG,
    "routed_scaling_factor": (_is_positive, "a number > 0", False),
    "num_nextn_predict_layers": (lambda value: _is_count(value) or value == 0, "a number of layers", True),
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
}
