"""One declarative table per model family: which Megatron parameter is made of which Hugging Face tensors.

Loading, exporting, converting and the live transfer are all derived from these tables; adding a family is
adding a table. Imports without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from reprlib import repr as _short  # no longer than a line has room for
from typing import Any, Literal, TypeVar

from megarl.config.errors import CheckpointError
from megarl.config.files import check_files, read_json
from megarl.config.schema import LoraConfig, OptimizerConfig

T = TypeVar("T")
Shape = tuple[int, ...]

# How a Megatron tensor is cut over tensor-parallel ranks; the functions are in shards.py.
#   replicated  every rank holds all of it
#   column      a rank's rows of each Hugging Face tensor, stacked (gate over up)
#   halves      a rank's rows of either half of one Hugging Face tensor, stacked (gate over up in one tensor)
#   qkv         as column, but per query group: [queries of a group, its key, its value], group after group;
#               of linear attention per key head: [query, key, values, ... of a head], head after head
#   row         a rank's columns
#   vocabulary  a rank's rows, padded with zero rows to a multiple of the tensor-parallel size
# A pair with `{e}` in its names stands for one expert: whole on each rank that has it, never cut.
Operation = Literal["replicated", "column", "halves", "qkv", "row", "vocabulary"]

# Beyond every model, and small enough that a nonsensical config.json does not fill the memory.
MAX_SIZE, MAX_LAYERS, MAX_EXPERTS = 2**24, 10_000, 4096
# The number of experts in config.json; transformers 5 writes the second one for Qwen3's.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model; the fields that are integers are the dimensions that a table may name."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    q: int  # rows of q_proj: heads * head_dim
    kv: int  # rows of k_proj and of v_proj: kv_heads * head_dim
    experts: int = 0  # 0: a dense model
    expert_ffn: int = 0
    shared_ffn: int = 0  # columns of the experts that every token goes through, which are one matrix
    dense: int = 0  # the first layers, which are dense where the others are mixtures
    gate_up: int = 0  # rows of a gate_up_proj: 2 * ffn
    out: int = 0  # columns of o_proj: heads * the width of a value
    # Of multi-latent attention: widths of what queries, and keys and values, are made of (0: queries are made
    # of the hidden states), of the latter with the part of a key that is rotated, and rows of kv_b_proj.
    q_rank: int = 0
    kv_rank: int = 0
    latent: int = 0
    kv_up: int = 0
    rank: int = 0  # of LoRA adapters, which config.json does not know
    one: int = 1
    gated_q: int = 0  # rows of a q_proj that has a head's gate behind each query: 2 * q
    # Linear attention: its layers, which are the others of a model; their heads, several of values to one of
    # keys; the width of the convolution over tokens, and its channels: of queries, keys and values.
    linear: frozenset[int] = frozenset()
    key_heads: int = 0
    value_heads: int = 0
    value_dim: int = 0  # of a head
    key: int = 0  # of all heads together
    value: int = 0
    conv: int = 0
    mixed: int = 0
    qkvz: int = 0  # rows of projections that are by key head: mixed + value, and 2 * value_heads
    ba: int = 0

    @staticmethod
    def of(hf_config: Mapping[str, Any]) -> Sizes:
        """Read a Hugging Face config.json; CheckpointError names a key that is not a positive integer."""

        def get(key: str, default: int | None = None, most: int = MAX_SIZE, least: int = 1) -> int:
            value = hf_config.get(key)
            value = default if value is None else value
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                kind = "a positive integer" if least == 1 else f"an integer from {least}"
                beyond = f" up to {most:,}" if isinstance(value, int) and value > most else ""
                raise _bad(key, f"must be {kind}{beyond} (got {_short(value)})")
            return value

        heads = get("num_attention_heads")
        hidden = get("hidden_size")
        kv_heads = get("num_key_value_heads", heads)
        head_dim = get("head_dim", hidden // heads)
        if heads % kv_heads:
            raise _bad("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads = {heads}")
        family = FAMILIES.get(str(hf_config.get("model_type")))
        moe = family is not None and family.is_moe
        experts = next((key for key in EXPERT_KEYS if hf_config.get(key) is not None), EXPERT_KEYS[0])
        shared = 0
        if family is not None and family.has("shared_experts.gate_weight"):
            shared = get("shared_expert_intermediate_size")
        elif family is not None and family.has("shared_experts.linear_fc1.weight"):
            shared = get("n_shared_experts") * get("moe_intermediate_size")
        differ = family is not None and any(pair.kind == "dense" for pair in family.layer)
        layers = get("num_hidden_layers", most=MAX_LAYERS)
        of_latents: dict[str, Any] = {}
        if family is not None and family.is_latent:
            rotated, value, kv_rank = get("qk_rope_head_dim"), get("v_head_dim"), get("kv_lora_rank")
            head_dim = get("qk_nope_head_dim") + rotated
            of_latents = {
                "q_rank": get("q_lora_rank") if is_on("q_lora_rank", hf_config) else 0,
                "kv_rank": kv_rank,
                "latent": kv_rank + rotated,
                "kv_up": heads * (head_dim - rotated + value),
                "out": heads * value,
            }
        linear: dict[str, Any] = {}
        if family is not None and family.is_linear:
            key_heads, value_heads = get("linear_num_key_heads"), get("linear_num_value_heads")
            key, value_dim = key_heads * get("linear_key_head_dim"), get("linear_value_head_dim")
            value = value_heads * value_dim
            if value_heads % key_heads:
                what = f"{key_heads} does not divide linear_num_value_heads = {value_heads}"
                raise _bad("linear_num_key_heads", what)
            linear = {
                "linear": _linear_layers(hf_config, layers, get("full_attention_interval", 4)),
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
        # Qwen3.5's mixtures say nothing of dense layers, which they do not have.
        ffn = get("intermediate_size", get("moe_intermediate_size") if moe and not differ else None)
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
            experts=get(experts, most=MAX_EXPERTS) if moe else 0,
            expert_ffn=get("moe_intermediate_size") if moe else 0,
            shared_ffn=shared,
            dense=get("first_k_dense_replace", most=layers - 1, least=0) if differ else 0,
            gate_up=2 * ffn,
            gated_q=2 * heads * head_dim,
            **{"out": heads * head_dim, **of_latents},
            **linear,
        )

    def shape(self, dims: str) -> Shape:
        """Return the numbers for a table's dimensions: `"q hidden"` -> (heads * head_dim, hidden)."""
        return tuple(getattr(self, dim) for dim in dims.split())

    def has(self, pair: Pair, layer: int) -> bool:
        """Return whether a layer has a parameter of the table's layers."""
        match pair.kind:
            case "dense" | "mixture":
                return (pair.kind == "dense") == (layer < self.dense)
            case "attention" | "linear":
                return (pair.kind == "linear") == (layer in self.linear)
        return True

    @property
    def alike(self) -> bool:
        """Return whether all layers have the same parameters."""
        return not self.dense and not self.linear

    def count(self, pair: Pair, layers: Collection[int]) -> int:
        """Return how many of these layers have a parameter of the table's layers."""
        return len(layers) if self.alike else sum(self.has(pair, layer) for layer in layers)


@dataclass(frozen=True)
class Pair:
    """A Megatron parameter and the Hugging Face tensors in it, each with its dimensions. `{l}` is the index
    of the layer and `{e}` that of the expert: global ones in Hugging Face names, those within the rank in
    Megatron's.

    switch   the key of config.json that takes the parameter away where it is false or null; with "not "
             before it, where it is neither
    kind     of the layers that have it, where the first ones are dense and the others mixtures, or
             some have full attention and the others linear attention
    apart    of a norm that Transformer Engine fuses into no linear, as it does other families' of this name
    float32  where it is in float32 whatever the model's dtype: in Megatron, transformers and SGLang, or in
             SGLang alone
    """

    megatron: str
    operation: Operation
    hf: tuple[tuple[str, str], ...]
    switch: str = ""
    kind: Literal["every", "dense", "mixture", "attention", "linear"] = "every"
    apart: bool = False
    float32: Literal["nowhere", "everywhere", "sglang"] = "nowhere"

    @property
    def per_expert(self) -> bool:
        """Return whether each expert has one."""
        return "{e}" in self.megatron


def _layer(name: str, operation: Operation, *hf: tuple[str, str]) -> Pair:
    tensors = tuple(("model.layers.{l}." + hf_name, dims) for hf_name, dims in hf)
    return Pair("decoder.layers.{l}." + name, operation, tensors)


EMBEDDED = ("model.embed_tokens.weight", "vocab hidden")
EMBEDDING = Pair("embedding.word_embeddings.weight", "vocabulary", (EMBEDDED,))
FINAL_NORM = Pair("decoder.final_layernorm.weight", "replicated", (("model.norm.weight", "hidden"),))
OUTPUT = Pair("output_layer.weight", "vocabulary", (("lm_head.weight", "vocab hidden"),))
# The last pipeline stage's own copy of tied embeddings; with one stage there is no such parameter.
TIED_OUTPUT = Pair("output_layer.weight", "vocabulary", (EMBEDDED,))
VALUE_HEAD = Pair("value_head.weight", "replicated", (("score.weight", "one hidden"),))

ATTENTION_LAYER = (
    _layer("input_layernorm.weight", "replicated", ("input_layernorm.weight", "hidden")),
    _layer(
        "self_attention.linear_qkv.weight",
        "qkv",
        ("self_attn.q_proj.weight", "q hidden"),
        ("self_attn.k_proj.weight", "kv hidden"),
        ("self_attn.v_proj.weight", "kv hidden"),
    ),
    _layer("self_attention.linear_proj.weight", "row", ("self_attn.o_proj.weight", "hidden q")),
    _layer("pre_mlp_layernorm.weight", "replicated", ("post_attention_layernorm.weight", "hidden")),
)
# Multi-latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are made of one narrow
# vector a token, and so may queries be. A part of each head is rotated, of the keys one for all heads.
LATENT_ATTENTION = (
    replace(ATTENTION_LAYER[0], apart=True),
    replace(
        _layer("self_attention.linear_q_proj.weight", "column", ("self_attn.q_proj.weight", "q hidden")),
        switch="not q_lora_rank",
    ),
    *(
        replace(pair, switch="q_lora_rank")
        for pair in (
            _layer(
                "self_attention.linear_q_down_proj.weight",
                "replicated",
                ("self_attn.q_a_proj.weight", "q_rank hidden"),
            ),
            _layer(
                "self_attention.q_layernorm.weight",
                "replicated",
                ("self_attn.q_a_layernorm.weight", "q_rank"),
            ),
            _layer(
                "self_attention.linear_q_up_proj.weight", "column", ("self_attn.q_b_proj.weight", "q q_rank")
            ),
        )
    ),
    _layer(
        "self_attention.linear_kv_down_proj.weight",
        "replicated",
        ("self_attn.kv_a_proj_with_mqa.weight", "latent hidden"),
    ),
    _layer(
        "self_attention.kv_layernorm.weight", "replicated", ("self_attn.kv_a_layernorm.weight", "kv_rank")
    ),
    _layer(
        "self_attention.linear_kv_up_proj.weight", "column", ("self_attn.kv_b_proj.weight", "kv_up kv_rank")
    ),
    _layer("self_attention.linear_proj.weight", "row", ("self_attn.o_proj.weight", "hidden out")),
    ATTENTION_LAYER[-1],
)
DOWN = _layer("mlp.linear_fc2.weight", "row", ("mlp.down_proj.weight", "hidden ffn"))
DENSE_MLP = (
    _layer(
        "mlp.linear_fc1.weight",
        "column",
        ("mlp.gate_proj.weight", "ffn hidden"),
        ("mlp.up_proj.weight", "ffn hidden"),
    ),
    DOWN,
)
DENSE_LAYER = (*ATTENTION_LAYER, *DENSE_MLP)
FUSED_DENSE_LAYER = (
    *ATTENTION_LAYER,
    _layer("mlp.linear_fc1.weight", "halves", ("mlp.gate_up_proj.weight", "gate_up hidden")),
    DOWN,
)
QKV_BIAS = _layer(
    "self_attention.linear_qkv.bias",
    "qkv",
    ("self_attn.q_proj.bias", "q"),
    ("self_attn.k_proj.bias", "kv"),
    ("self_attn.v_proj.bias", "kv"),
)
QK_NORMS = (
    _layer("self_attention.q_layernorm.weight", "replicated", ("self_attn.q_norm.weight", "head_dim")),
    _layer("self_attention.k_layernorm.weight", "replicated", ("self_attn.k_norm.weight", "head_dim")),
)
# Norms of what attention and feed-forward add to the residual ("sandwich norms"), beside those before them;
# Megatron's names are those of the places where it adds.
OUTPUT_NORMS = (
    _layer("self_attn_bda.output_norm.weight", "replicated", ("post_self_attn_layernorm.weight", "hidden")),
    _layer("mlp_bda.output_norm.weight", "replicated", ("post_mlp_layernorm.weight", "hidden")),
)
# Megatron's names of experts that are modules of their own (SequentialMLP), which every layer spec has; where
# they are one module (TEGroupedMLP) they are called experts.linear_fc1.weight{e}: see `table_name`.
EXPERTS = (
    _layer("mlp.router.weight", "replicated", ("mlp.gate.weight", "experts hidden")),
    _layer(
        "mlp.experts.local_experts.{e}.linear_fc1.weight",
        "column",
        ("mlp.experts.{e}.gate_proj.weight", "expert_ffn hidden"),
        ("mlp.experts.{e}.up_proj.weight", "expert_ffn hidden"),
    ),
    _layer(
        "mlp.experts.local_experts.{e}.linear_fc2.weight",
        "row",
        ("mlp.experts.{e}.down_proj.weight", "hidden expert_ffn"),
    ),
)
SHARED_EXPERTS = (
    _layer(
        "mlp.shared_experts.linear_fc1.weight",
        "column",
        ("mlp.shared_experts.gate_proj.weight", "shared_ffn hidden"),
        ("mlp.shared_experts.up_proj.weight", "shared_ffn hidden"),
    ),
    _layer(
        "mlp.shared_experts.linear_fc2.weight",
        "row",
        ("mlp.shared_experts.down_proj.weight", "hidden shared_ffn"),
    ),
)
# One whose output is multiplied by the sigmoid of a gate.
GATED_SHARED_EXPERT = (
    *(
        replace(pair, hf=tuple((name.replace("_experts.", "_expert."), dims) for name, dims in pair.hf))
        for pair in SHARED_EXPERTS
    ),
    _layer("mlp.shared_experts.gate_weight", "replicated", ("mlp.shared_expert_gate.weight", "one hidden")),
)
# What is added to the router's scores where it chooses, and not where it weighs. Pretraining balanced the
# experts with it; nothing here changes it.
EXPERT_BIAS = replace(
    _layer("mlp.router.expert_bias", "replicated", ("mlp.gate.e_score_correction_bias", "experts")),
    kind="mixture",
    float32="everywhere",
)


# Dense layers before mixtures whose routers have a bias, and experts for every token.
DENSE_THEN_MIXTURES = (
    *(replace(pair, kind="dense") for pair in DENSE_MLP),
    replace(EXPERTS[0], kind="mixture", float32="sglang"),
    EXPERT_BIAS,
    *(replace(pair, kind="mixture") for pair in (*EXPERTS[1:], *SHARED_EXPERTS)),
)
# What the rows of a Hugging Face matrix are made of, one after the other, where that is several things.
SECTIONS = {"gate_up": ("ffn", "ffn"), "mixed": ("key", "key", "value")}
# Attention whose output is multiplied by the sigmoid of a gate, in layers beside linear attention.
GATED_ATTENTION = (
    replace(
        ATTENTION_LAYER[1],
        hf=(("model.layers.{l}.self_attn.q_proj.weight", "gated_q hidden"), *ATTENTION_LAYER[1].hf[1:]),
    ),
    ATTENTION_LAYER[2],
    *QK_NORMS,
)
# The gated delta net (arXiv 2412.06464) of model/portable.py, which has a projection where the files have
# four: of queries, keys and values, of beta, of alpha, and of the output's gate.
DELTA_NET = (
    _layer(
        "self_attention.in_proj.weight",
        "qkv",
        ("linear_attn.in_proj_qkv.weight", "mixed hidden"),
        ("linear_attn.in_proj_b.weight", "value_heads hidden"),
        ("linear_attn.in_proj_a.weight", "value_heads hidden"),
        ("linear_attn.in_proj_z.weight", "value hidden"),
    ),
    _layer("self_attention.conv1d.weight", "qkv", ("linear_attn.conv1d.weight", "mixed one conv")),
    replace(_layer("self_attention.A_log", "column", ("linear_attn.A_log", "value_heads")), float32="sglang"),
    _layer("self_attention.dt_bias", "column", ("linear_attn.dt_bias", "value_heads")),
    _layer("self_attention.out_norm.weight", "replicated", ("linear_attn.norm.weight", "value_dim")),
    _layer("self_attention.out_proj.weight", "row", ("linear_attn.out_proj.weight", "hidden value")),
)
# In Qwen3-Next's files those are two, and lie by key head as well.
FUSED_DELTA_NET = (
    _layer(
        "self_attention.in_proj.weight",
        "qkv",
        ("linear_attn.in_proj_qkvz.weight", "qkvz hidden"),
        ("linear_attn.in_proj_ba.weight", "ba hidden"),
    ),
    *DELTA_NET[1:],
)


def _hybrid(delta_net: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """Return what is before the MLP in layers of which each has linear attention, or gated attention."""
    return (
        ATTENTION_LAYER[0],
        *(replace(pair, kind="attention") for pair in GATED_ATTENTION),
        *(replace(pair, kind="linear") for pair in delta_net),
        ATTENTION_LAYER[3],
    )


@dataclass(frozen=True)
class Family:
    """A model family, with `model_type` and `prefix` as in config.json ("qwen2", "Qwen2ForCausalLM").
    requires: config keys that must be absent, null or of this value, as others would mean parameters that the
    table does not have.
    rotary_pairs: rotary embeddings turn neighbouring numbers of a head, instead of one of each half.
    partial_rotary: config.json may say what share of a head they turn, its first numbers
    (`partial_rotary_factor`).
    sglang_unties: SGLang's model has an output layer of its own where embeddings are tied, too.
    sglang_flat: SGLang's layers have the matrices of attention themselves, without `self_attn`.
    zero_centred: the weights of norms are what is added to 1, but for those of linear attention.
    other_heads: names of its classes besides `prefix` + ForCausalLM and the like."""

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
        """Return whether its layers have a Megatron parameter whose name ends so."""
        return any(pair.megatron.endswith(parameter) for pair in self.layer)

    @cached_property
    def is_latent(self) -> bool:
        """Return whether its attention is multi-latent."""
        return self.has("self_attention.linear_kv_up_proj.weight")

    @cached_property
    def is_moe(self) -> bool:
        """Return whether its layers are mixtures of experts."""
        return any(pair.per_expert for pair in self.layer)

    @cached_property
    def is_linear(self) -> bool:
        """Return whether it has layers of linear attention."""
        return any(pair.kind == "linear" for pair in self.layer)


def adapters(pair: Pair, lora: LoraConfig) -> tuple[Pair, ...]:
    """Return the LoRA adapters of a parameter: for each Hugging Face matrix in it that gets some A [rank, in]
    and B [out, rank], under PEFT's names. B is cut over tensor-parallel ranks as the matrix is by rows, and
    lies as its rows do, or A as it is by columns; the other half is whole on every rank."""
    halves: list[Pair] = []
    for name, dims in pair.hf if lora.rank is not None else ():
        *_, module, kind = name.split(".")
        is_matrix = kind == "weight" and re.search(r"_proj(_\w+)?$", module)
        if not is_matrix or module not in (lora.targets or (module,)):
            continue
        (rows, columns), stem = dims.split(), name.removesuffix("weight")
        own = f"{pair.megatron.removesuffix('weight')}lora.{module}"
        by_columns = pair.operation == "row"
        a = (stem + "lora_A.weight", f"rank {columns}")
        b = (stem + "lora_B.weight", f"{rows} rank")
        halves.append(Pair(f"{own}_a", "row" if by_columns else "replicated", (a,), kind=pair.kind))
        halves.append(Pair(f"{own}_b", "replicated" if by_columns else pair.operation, (b,), kind=pair.kind))
    return tuple(halves)


def is_frozen(pair: Pair, layer: int, optimizer: OptimizerConfig) -> bool:
    """Return whether a model's optimizer leaves this parameter of global layer `layer` as it is. With LoRA
    adapters that is all of the model but a critic's head; a router's bias nobody trains.

    attention   the whole self-attention block: the norm before it (Transformer Engine fuses that with the
                block's first matrix), q, k, v with their biases and norms, the output projection and its norm
    embeddings  the word embeddings, and the actor's output layer where it shares their weights"""
    if pair == EXPERT_BIAS:
        return True
    if optimizer.lora.rank is not None:
        return pair != VALUE_HEAD
    if pair.hf == (EMBEDDED,):
        return "embeddings" in optimizer.frozen
    _, in_layer, name = pair.megatron.partition(".layers.{l}.")
    block = name.startswith(("input_layernorm.", "self_attention.", "self_attn_bda."))
    attention = "attention" in optimizer.frozen and block
    return bool(in_layer) and (attention or layer < optimizer.frozen_layers)


# Names of dtypes in config.json. What the tensors have is in their files; hf.py names those that can be read.
KINDS = ("float32", "bfloat16", "float16", "float64", "auto")
# Every rope_type of these families with what it cannot do without (which of them can be built:
# megarl/model/hf_config.py), and what must be a number in any.
ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ROPE_NUMBERS = ("rope_theta", *ROPE_NEEDS["llama3"], "mscale", "mscale_all_dim", "beta_fast", "beta_slow")

# What every family here is built as (megarl/model/builder.py): SwiGLU layers with full attention.
SWIGLU = (("hidden_act", "silu"), ("use_sliding_window", False))
HYBRID = (*SWIGLU, ("attention_bias", False), ("attn_output_gate", True), ("output_gate_type", "silu"))

FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen2", "Qwen2", (*DENSE_LAYER, QKV_BIAS), SWIGLU),
        Family("qwen3", "Qwen3", (*DENSE_LAYER, *QK_NORMS), (*SWIGLU, ("attention_bias", False))),
        Family(
            "qwen3_moe",
            "Qwen3Moe",
            (*ATTENTION_LAYER, *QK_NORMS, *EXPERTS),
            # Every layer a mixture: published models have no dense layers in between.
            (*SWIGLU, ("attention_bias", False), ("mlp_only_layers", []), ("decoder_sparse_step", 1)),
        ),
        Family("llama", "Llama", DENSE_LAYER, (*SWIGLU, ("attention_bias", False), ("mlp_bias", False))),
        # The first of them (Mistral-7B-v0.1) and Ministral have sliding windows.
        Family("mistral", "Mistral", DENSE_LAYER, (*SWIGLU, ("sliding_window", None))),
        Family(
            "glm4",
            "Glm4",
            # 9B has biases on q, k and v, 32B has none.
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
                *(replace(norm, switch="use_qk_norm") for norm in QK_NORMS),
                *DENSE_THEN_MIXTURES,
            ),
            # Megatron's router divides sigmoid scores by their sum, whenever there are several.
            (*SWIGLU, ("norm_topk_prob", True)),
            partial_rotary=True,
            sglang_unties=True,
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3",
            # SGLang has the weight of a router in the model's dtype.
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
        Family(
            "qwen3_5_text",
            "Qwen3_5",
            (*_hybrid(DELTA_NET), *DENSE_MLP),
            HYBRID,
            partial_rotary=True,
            sglang_flat=True,
            zero_centred=True,
            other_heads=("Qwen3_5TextForSequenceClassification",),
        ),
        Family(
            "qwen3_5_moe_text",
            "Qwen3_5Moe",
            (*_hybrid(DELTA_NET), *EXPERTS, *GATED_SHARED_EXPERT),
            # transformers always normalises, and takes no layer for a dense one.
            (*HYBRID, ("norm_topk_prob", True), ("mlp_only_layers", []), ("decoder_sparse_step", 1)),
            partial_rotary=True,
            sglang_flat=True,
            zero_centred=True,
        ),
        Family(
            "qwen3_next",
            "Qwen3Next",
            (*_hybrid(FUSED_DELTA_NET), *EXPERTS, *GATED_SHARED_EXPERT),
            (*HYBRID, ("mlp_only_layers", []), ("decoder_sparse_step", 1)),
            partial_rotary=True,
            sglang_flat=True,
            zero_centred=True,
        ),
    )
}

# Published folders of a family that have a part for images, too.
COMPOSITE = ("qwen3_5", "qwen3_5_moe")

# Transformer Engine's layer spec fuses the norms into the linears that follow them.
TE_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def table_name(name: str) -> str:
    """Return the table's name of a Megatron parameter, whatever wrappers and layer spec it comes from."""
    name = re.sub(r"^(module\.)+", "", name)
    for alias, ours in TE_ALIASES.items():
        if name.endswith("." + alias):
            return name.removesuffix(alias) + ours
    return re.sub(
        r"\.experts\.(linear_fc[12])\.(weight|lora)\.?(\d+)", r".experts.local_experts.\3.\1.\2", name
    )


def table_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return named tensors under the table's names."""
    return {table_name(name): tensor for name, tensor in tensors.items()}


def model_weights(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return a model's named tensors under the table's names, without those of LoRA adapters."""
    return {name: tensor for name, tensor in table_names(tensors).items() if ".lora." not in name}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json, with the parameters that its switches leave; CheckpointError if no
    table describes it."""
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
    for key, value in family.requires:
        found = hf_config.get(key)
        if found is not None and found != value:
            raise _bad(key, f"{found!r} is not supported for {model_type} (only {value!r} is)")
    layer = tuple(pair for pair in family.layer if not pair.switch or is_on(pair.switch, hf_config))
    return family if layer == family.layer else replace(family, layer=layer)


def is_on(switch: str, hf_config: Mapping[str, Any]) -> bool:
    """Return whether config.json leaves a parameter with this switch (see `Pair`)."""
    key = switch.removeprefix("not ")
    value = hf_config.get(key, True)
    return (value is not None and value is not False) is (key == switch)


def is_tied(hf_config: Mapping[str, Any]) -> bool:
    """Return whether the output layer shares the embedding's weights."""
    return bool(hf_config.get("tie_word_embeddings", False))


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model folder's config.json; CheckpointError names the file and the key that is not supported.
    Keys that do not matter here are left to transformers (megarl/model/hf_config.py)."""
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
    family, sizes = family_of(hf_config), Sizes.of(hf_config)
    for key, (fits, meant, may_be_null) in VALUES.items():
        value = hf_config.get(key)
        if key == "layer_types" and family.is_linear:
            continue  # `Sizes.of` has read them
        if key in hf_config and not (fits(value) or (value is None and may_be_null)):
            raise _bad(key, f"must be {meant} (got {_short(value)})")
    if family.is_latent:
        _check_latent(hf_config, sizes)
    elif sizes.head_dim % 2:
        raise _bad("head_dim", f"must be even for rotary embeddings (got {sizes.head_dim})")
    if (quantised := hf_config.get("quantization_config")) is not None:
        kind = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        remedy = "convert its weights to bf16, and remove the key"
        raise _bad("quantization_config", f"a quantised folder ({_short(kind)}) is not read ({remedy})")
    pad = hf_config.get("pad_token_id")
    if isinstance(pad, int) and not -sizes.vocab <= pad < sizes.vocab:
        raise _bad("pad_token_id", f"is outside the vocabulary of {sizes.vocab} (got {_short(pad)})")
    active: Any = hf_config.get("num_experts_per_tok")
    if family.is_moe and not (_is_count(active) and active <= sizes.experts):
        raise _bad("num_experts_per_tok", f"must be 1 to {sizes.experts}, the experts (got {_short(active)})")
    if family.has("router.expert_bias"):
        _check_groups(hf_config, sizes, active)
    _check_rotated(family, sizes, "", hf_config)
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf_config.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if str(kind) not in ROPE_NEEDS:
            raise _bad(f"{key}.rope_type", f"{_short(kind)} is not known (known: {', '.join(ROPE_NEEDS)})")
        for name in ROPE_NEEDS[str(kind)]:
            if name not in rope:
                raise _bad(f"{key}.{name}", f"is missing, and rope_type {kind} needs it")
        for name, value in rope.items():
            if name in ROPE_NUMBERS and not _is_positive(value):
                raise _bad(f"{key}.{name}", f"must be a number > 0 (got {_short(value)})")
            if isinstance(value, Mapping):
                raise _bad(f"{key}.{name}", f"{_short(value)} is not supported (layers are rotated alike)")
        _check_rotated(family, sizes, f"{key}.", rope)
        if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
            low = _short(rope["low_freq_factor"])
            raise _bad(f"{key}.low_freq_factor", f"must be below high_freq_factor (got {low})")


def _linear_layers(hf_config: Mapping[str, Any], layers: int, interval: int) -> frozenset[int]:
    """Return which layers have linear attention: all but every `interval`-th where config.json does not say
    (as transformers has it)."""
    kinds, known = hf_config.get("layer_types"), ("full_attention", "linear_attention")
    if kinds is None:
        kinds = [known[(layer + 1) % interval > 0] for layer in range(layers)]
    if not (isinstance(kinds, list) and len(kinds) == layers and all(kind in known for kind in kinds)):
        what = f"must be a list of {layers}, each of them {known[0]} or {known[1]}"
        raise _bad("layer_types", f"{what} (got {_short(kinds)})")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == known[1])


def _check_rotated(family: Family, sizes: Sizes, place: str, keys: Mapping[str, Any]) -> None:
    """Check the share of a head that is rotated, which config.json has in one place or the other."""
    share = keys.get("partial_rotary_factor")
    if share is None or share == 1:
        return
    key = f"{place}partial_rotary_factor"
    if not family.partial_rotary:
        raise _bad(key, f"must be 1, as heads are rotated whole (got {_short(share)})")
    if not (_is_positive(share) and share < 1 and sizes.head_dim * share % 2 == 0):
        what = f"must leave an even number of a head's {sizes.head_dim} to be rotated"
        raise _bad(key, f"{what} (got {_short(share)})")


def _check_latent(hf_config: Mapping[str, Any], sizes: Sizes) -> None:
    """Check the widths of multi-latent attention's heads."""
    rotated, given, value = sizes.latent - sizes.kv_rank, hf_config.get("head_dim"), sizes.out // sizes.heads
    if rotated % 2:
        raise _bad("qk_rope_head_dim", f"must be even for rotary embeddings (got {rotated})")
    if given not in (None, rotated):
        what = f"must be qk_rope_head_dim = {rotated}, by which transformers rotates, or be left out"
        raise _bad("head_dim", f"{what} (got {_short(given)})")
    if sizes.kv_heads != sizes.heads:
        what = f"must be num_attention_heads = {sizes.heads}, as each has keys of its own"
        raise _bad("num_key_value_heads", f"{what} (got {sizes.kv_heads})")
    if value > sizes.head_dim:
        raise _bad("v_head_dim", f"must be at most {sizes.head_dim}, the width of a key (got {value})")


def _check_groups(hf_config: Mapping[str, Any], sizes: Sizes, active: int) -> None:
    """Check the groups of experts among which a router chooses first. transformers and SGLang rank a group by
    its two best experts, Megatron by as many as would be chosen of each group that is."""
    groups, chosen = (hf_config.get(key, 1) for key in ("n_group", "topk_group"))
    if not (_is_count(groups) and sizes.experts % groups == 0):
        raise _bad("n_group", f"must divide the {sizes.experts} experts (got {_short(groups)})")
    if not (_is_count(chosen) and chosen <= groups):
        raise _bad("topk_group", f"must be 1 to {groups}, the groups (got {_short(chosen)})")
    if groups > 1 and (active != 2 * chosen or sizes.experts < 2 * groups):
        what = f"with {groups} groups num_experts_per_tok must be 2 for each that is chosen"
        raise _bad("topk_group", f"{what}, and a group have 2 experts (got {chosen} and {active})")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e38


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_positive(value) and value <= MAX_SIZE


# Keys that may be left out: what each must be where it is there, and whether null means left out.
VALUES: dict[str, tuple[Callable[[Any], bool], str, bool]] = {
    "max_position_embeddings": (_is_count, "a positive integer", False),
    "rms_norm_eps": (lambda value: _is_positive(value) and value < 1, "a number between 0 and 1", False),
    "rope_theta": (_is_positive, "a number > 0", False),
    "layer_types": (
        lambda value: isinstance(value, list) and all(kind == "full_attention" for kind in value),
        "full_attention throughout",
        True,
    ),
    "rope_scaling": (lambda value: isinstance(value, dict), "null or an object", True),
    "rope_parameters": (lambda value: isinstance(value, dict), "null or an object", True),
    "tie_word_embeddings": (lambda value: isinstance(value, bool), "true or false", False),
    "norm_topk_prob": (lambda value: isinstance(value, bool), "true or false", False),
    "routed_scaling_factor": (_is_positive, "a number > 0", False),
    "num_nextn_predict_layers": (
        lambda value: _is_count(value) or value == 0,
        "a number of layers",
        True,
    ),
    "dtype": (lambda value: value in KINDS, f"null or one of {', '.join(KINDS)}", True),
    "torch_dtype": (lambda value: value in KINDS, f"null or one of {', '.join(KINDS)}", True),
}
