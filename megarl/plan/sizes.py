"""Count a rank's parameters and activations. Imports no torch, to start quickly."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from heapq import heapreplace
from math import prod
from typing import Any, Literal

from megarl.config.errors import ConfigError
from megarl.config.schema import ClusterConfig, LoraConfig, OptimizerConfig
from megarl.parallel.layout import Layout, padded_vocab
from megarl.weights.families import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    TIED_OUTPUT,
    Pair,
    Sizes,
    adapters,
    get_family,
    is_frozen,
    is_tied,
)
from megarl.weights.shards import float32_tensors, get_sizes, sglang_shards

GIB = 2**30
BYTES = {"bf16": 2, "fp32": 4}
FP32 = 4
CHUNK = 64  # tokens; a copy from model/delta_net.py, which needs torch


@dataclass(frozen=True)
class ParamCount:
    """Parameters of a rank. shared: neither experts' nor float32."""

    shared: int
    experts: int
    float32: int

    @property
    def all(self) -> int:
        return self.shared + self.experts + self.float32


@dataclass(frozen=True, eq=False)
class Shape:
    config: Mapping[str, Any]
    dtype: str
    _param_counts: dict[Any, ParamCount] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes.from_config(self.config)

    @cached_property
    def itemsize(self) -> int:
        return BYTES[self.dtype]

    def count_params(
        self, layout: Layout, pp_rank: int, *, critic: bool = False, optimizer: OptimizerConfig | None = None
    ) -> ParamCount:
        """Count a rank's parameters, with a padded vocabulary.

        critic: with a float32 value head; optimizer: count only parameters that it trains"""
        lora = optimizer and optimizer.lora.rank and optimizer.lora
        optimizer_key = optimizer and (optimizer.frozen, optimizer.frozen_layers, lora)
        key = (layout.tp, layout.pp, layout.ep, pp_rank, critic, optimizer_key)
        if key not in self._param_counts:
            self._param_counts[key] = self._count(layout, pp_rank, critic, optimizer)
        return self._param_counts[key]

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        return get_family(self.config).layer

    def _layers(self, layout: Layout, pp_rank: int) -> list[int]:
        """Return at most layers // pp layers: in some published runs pp does not divide them."""
        return layout.layers(self.sizes.layers, pp_rank)[: self.sizes.layers // layout.pp]

    def _count_copies(self, pair: Pair, layout: Layout, layers: Collection[int]) -> int:
        """Count a parameter's tensors in a rank's layers."""
        sizes = self.sizes
        copies = len(layers) if sizes.is_uniform else sum(sizes.has(pair, layer) for layer in layers)
        return copies * (sizes.experts // layout.ep) if pair.per_expert else copies

    def _count_local(self, pair: Pair, tp: int, lora: LoraConfig | None = None) -> int:
        """Count a rank's elements of a parameter."""
        sizes = self.sizes if lora is None else get_sizes(self.config, lora)
        tp = 1 if pair.per_expert else tp
        shapes = [sizes.shape(dims) for _, dims in pair.hf]
        if pair.operation == "vocabulary":
            ((vocab, hidden),) = shapes
            return padded_vocab(vocab, tp) // tp * hidden
        elements = sum(map(prod, shapes))
        return elements if pair.operation == "replicated" else elements // tp

    def largest_tensor(self, tp: int) -> int:
        return max(self._count_local(pair, tp) for pair in (EMBEDDING, *self.pairs))

    def count_lora(self, lora: LoraConfig, tp: int) -> tuple[int, int]:
        """Count a rank's elements of weights with adapters: of all, of the largest."""
        layers = range(self.sizes.layers)
        copies_and_sizes = [
            (self._count_copies(pair, Layout(), layers), self._count_local(pair, tp))
            for pair in self.pairs
            if adapters(pair, lora)
        ]
        return sum(map(prod, copies_and_sizes)), max((size for _, size in copies_and_sizes), default=0)

    @lru_cache(maxsize=256)  # noqa: B019 (a planner has few models, and ends)
    def count_fp8(self, layout: Layout, pp_rank: int, ends_in_bf16: bool) -> int:
        """Count a rank's FP8 parameters: layers' matrices except routers.

        ends_in_bf16: except the first and last layer"""
        sizes = self.sizes
        layers = set(layout.layers(sizes.layers, pp_rank))
        if ends_in_bf16:
            layers -= {0, sizes.layers - 1}
        elements = 0
        for pair in self.pairs:
            if ".router." in pair.megatron or any(len(sizes.shape(dims)) < 2 for _, dims in pair.hf):
                continue
            elements += self._count_copies(pair, layout, layers) * self._count_local(pair, layout.tp)
        return elements

    def matrices(self, layout: Layout, pp_rank: int) -> tuple[list[int], list[int]]:
        """Return the sizes of Muon's matrices: shared ones, experts."""
        sizes, matrix_sizes, layers = self.sizes, (list[int](), list[int]()), self._layers(layout, pp_rank)
        for pair in self.pairs:
            if all(len(sizes.shape(dims)) == 2 for _, dims in pair.hf):
                copies = self._count_copies(pair, layout, layers)
                matrix_sizes[pair.per_expert].extend([self._count_local(pair, layout.tp)] * copies)
        return matrix_sizes

    def muon_flops(self, layout: Layout, pp_rank: int) -> float:
        """Count a Newton-Schulz iteration's FLOPs for a stage (arXiv 2502.16982).

        For m x n with m <= n: X X^T, its square, and their product with X."""
        sizes, total, layers = self.sizes, 0.0, self._layers(layout, pp_rank)
        for pair in self.pairs:
            shapes = [sizes.shape(dims) for _, dims in pair.hf]
            if all(len(shape) == 2 for shape in shapes):
                m, n = sorted((sum(shape[0] for shape in shapes), shapes[0][1]))
                total += self._count_copies(pair, layout, layers) * (4 * m * m * n + 2 * m**3)
        return total

    def count_gate_up(self, layout: Layout, pp_rank: int) -> int:
        """Count gate and up parameters, separate in checkpoints."""
        layers = self._layers(layout, pp_rank)
        return sum(
            self._count_copies(pair, layout, layers) * self._count_local(pair, layout.tp)
            for pair in self.pairs
            if pair.megatron.endswith("linear_fc1.weight")
        )

    def _count(
        self, layout: Layout, pp_rank: int, critic: bool, optimizer: OptimizerConfig | None
    ) -> ParamCount:
        sizes, count_local, tp = self.sizes, self._count_local, layout.tp
        is_first, is_last = pp_rank == 0, pp_rank == layout.pp - 1
        layers = self._layers(layout, pp_rank)
        lora = optimizer.lora if optimizer is not None and optimizer.lora.rank is not None else None

        def is_counted(pair: Pair, layer: int = 0) -> bool:
            return optimizer is None or not is_frozen(pair, layer, optimizer)

        if lora is not None:
            pairs = [adapter for pair in self.pairs for adapter in adapters(pair, lora)]
        else:
            # Frozen layers are the lowest: the top layer trains all that any layer trains.
            pairs = [pair for pair in self.pairs if is_counted(pair, sizes.layers - 1)]
            if optimizer is not None:
                layers = [n for n in layout.layers(sizes.layers, pp_rank) if n >= optimizer.frozen_layers]
        shared, experts = (
            sum(
                self._count_copies(pair, layout, layers) * count_local(pair, tp, lora)
                for pair in pairs
                if pair.per_expert is per_expert
            )
            for per_expert in (False, True)
        )
        value_head = sizes.hidden if critic and is_last else 0
        if lora is not None:
            return ParamCount(shared, experts, value_head)
        float32 = sum(
            self._count_copies(pair, layout, layers) * count_local(pair, 1)
            for pair in pairs
            if pair.float32 == "everywhere"
        )
        shared -= float32
        tied = is_tied(self.config)
        if is_first and is_counted(EMBEDDING):
            shared += count_local(EMBEDDING, tp)
        if is_last:
            shared += count_local(FINAL_NORM, tp)
        if is_last and not critic and not (is_first and tied) and is_counted(TIED_OUTPUT if tied else OUTPUT):
            shared += count_local(OUTPUT, tp)
        return ParamCount(shared, experts, float32 + value_head)

    @cached_property
    def parameters(self) -> int:
        """Count the model's parameters, without padding."""
        return self.count_params(Layout(), 0).all

    @cached_property
    def active(self) -> int:
        """Count matrix elements that a token uses, except the embedding."""
        sizes = self.sizes
        top_k = int(self.config.get("num_experts_per_tok", 0)) if sizes.experts else 0
        dense = sizes.dense if top_k else sizes.layers
        columns = sizes.experts + 3 * (sizes.expert_ffn * top_k + sizes.shared_ffn)
        mlps = dense * 3 * sizes.ffn + (sizes.layers - dense) * columns
        attention = sum(m * n for m, n in self.attention_matrices)
        linear_attention = sizes.hidden * (sizes.mixed + 2 * sizes.value + 2 * sizes.value_heads)
        attentions = (sizes.layers - len(sizes.linear)) * attention + len(sizes.linear) * linear_attention
        return attentions + sizes.hidden * (mlps + sizes.vocab)

    @cached_property
    def attention_matrices(self) -> list[tuple[int, int]]:
        """Return (in, out) of softmax attention's matrices; q, k, v are one."""
        matrices = []
        for pair in self.pairs:
            if pair.megatron.rpartition(".layers.{l}.")[2].startswith("self_attention.linear_"):
                shapes = [self.sizes.shape(dims) for _, dims in pair.hf]
                if len(shapes[0]) == 2:
                    matrices.append((shapes[0][1], sum(rows for rows, _ in shapes)))
        return matrices

    @cached_property
    def routed_share(self) -> float:
        return int(self.config["num_experts_per_tok"]) / self.sizes.experts if self.sizes.experts else 1.0

    @cached_property
    def expert_share(self) -> float:
        return self.count_params(Layout(), 0).experts / self.parameters

    def cache_bytes(self, tp: int) -> int:
        """Return a token's bytes in the KV cache of an engine's rank.

        Ranks copy key/value heads if these are fewer. Multi-latent attention caches latents and rotated key
        parts once, on every rank."""
        if self.sizes.latent:
            return self.sizes.layers * self.sizes.latent * self.itemsize
        heads, layers = max(1, self.sizes.kv_heads // tp), self.sizes.layers - len(self.sizes.linear)
        return 2 * layers * heads * self.sizes.head_dim * self.itemsize

    def state_bytes(self, tp: int) -> float:
        """Return bytes of linear attention's float32 states and last convolution inputs."""
        sizes = self.sizes
        if not sizes.linear:
            return 0.0
        state = FP32 * sizes.value * sizes.key // sizes.key_heads
        return len(sizes.linear) * (state + self.itemsize * sizes.mixed * (sizes.conv - 1)) / tp

    @lru_cache(maxsize=64)  # noqa: B019 (a planner has few models, and ends)
    def engine_tensors(self, tp: int, weights: str) -> tuple[float, ...]:
        """Return the bytes of an SGLang rank's tensors. weights: rollout.weights_dtype."""
        float32 = float32_tensors(self.config, sglang=True)

        def element_bytes(name: str, shape: tuple[int, ...]) -> float:
            if name in float32:
                return FP32
            is_matrix = len(shape) == 2 and ".layers." in name
            if weights != "fp8_block" or not is_matrix or "router" in name or ".gate.weight" in name:
                return self.itemsize
            return 1 + 4 / 128**2  # a float32 per 128 x 128 block

        shards = sglang_shards(self.config, tp, 0)
        return tuple(prod(shard.shape) * element_bytes(name, shard.shape) for name, shard in shards.items())


Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Activations:
    """Activations of a tensor-parallel rank, bytes per token (`head_fixed`: bytes).

    layer        kept by a layer, as configured
    one_layer    the same, without recomputation
    work         scratch memory of a layer's backward pass
    hidden       sent to the next stage
    head         peak of the head
    head_fixed   independent of tokens
    forward      peak of a layer without gradients
    moved        written by a layer's norms, attention and activation functions
    recomputed   with recompute=full: a rank's recomputed layers; None: all
    selected     with recompute=selective: recomputed in a layer's backward pass
    dense        first layers, without experts; None: all are equal"""

    layer: float
    one_layer: float
    work: float
    hidden: float
    head: float
    head_fixed: float
    forward: float
    moved: float
    recompute: Recompute
    recomputed: int | None = None
    selected: float = 0.0
    dense: Activations | None = None

    def training(
        self, tokens: float, layers: int, in_flight: float, last: bool, outputs: float = 0.0, dense: int = 0
    ) -> float:
        """Return a stage's peak bytes in forward and backward passes.

        in_flight: micro-batches of `tokens` that await their backward pass
        outputs: see `count_kept_outputs`
        dense: layers without experts"""
        recomputes = self.recompute == "full"
        # num_stored: highest layers, not recomputed; dense_recomputed: recomputed layers without experts
        num_stored = layers - min(layers, self.recomputed or layers) if recomputes else 0
        dense_kind, main_kind = self.dense or self, self
        dense_recomputed = min(dense, layers - num_stored)
        dense_stored, main_stored = dense - dense_recomputed, num_stored - (dense - dense_recomputed)
        kept_bytes = dense_kind.layer * dense_recomputed + dense_kind.one_layer * dense_stored
        kept_bytes += (
            main_kind.layer * (layers - num_stored - dense_recomputed) + main_kind.one_layer * main_stored
        )
        kept_bytes = tokens * (kept_bytes * in_flight + self.hidden * outputs)
        # Backward frees the highest layers first: room to recompute a lower one.
        is_top_recomputed = recomputes and not num_stored
        layer_kinds = [dense_kind] * (dense > 0) + [main_kind] * (dense < layers)
        layer_peak = tokens * max(
            (kind.one_layer if is_top_recomputed else kind.selected) + kind.work for kind in layer_kinds
        )
        return kept_bytes + (max(layer_peak, tokens * self.head + self.head_fixed) if last else layer_peak)

    def forward_only(self, tokens: float, last: bool, dense: int = 0) -> float:
        layer_peak = max(self.forward, self.dense.forward) if self.dense and dense else self.forward
        return tokens * (max(layer_peak, self.head) if last else layer_peak)


def max_share(sizes: Sequence[int], ranks: int) -> int:
    """Divide like Megatron's Muon: largest first, to the emptiest rank. Return the largest total."""
    loads = [0] * ranks
    for size in sorted(sizes, reverse=True):
        heapreplace(loads, loads[0] + size)
    return max(loads)


def count_in_flight(layout: Layout, stage: int) -> float:
    """Count the most micro-batches that a stage keeps: arXiv 2104.04473, section 2.2."""
    later_stages = layout.pp - stage - 1
    if layout.vpp == 1:
        return later_stages + 1
    # Megatron's warm-up (get_pp_rank_microbatches), and one forward.
    return (2 * later_stages + (layout.vpp - 1) * layout.pp + 1) / layout.vpp


def count_kept_outputs(layout: Layout, in_flight: float, last: bool) -> float:
    """Count the hidden states that a stage keeps for other stages.

    With virtual stages Megatron keeps each chunk's output, except the last, until its backward pass. About
    pp micro-batches arrive early in each direction (measured at pp 2)."""
    return in_flight * layout.vpp - last + 2 * layout.pp if layout.vpp > 1 else 0.0


@dataclass(frozen=True)
class Passes:
    """How a rank computes passes of a model.

    chunk        vocabulary entries whose logits exist at once
    recomputed   a rank's layers by model.recompute_layers"""

    tp: int
    chunk: int
    layers: str
    recompute: Recompute
    sequence_parallel: bool
    cp: int = 1
    recomputed: int | None = None
    modules: Sequence[str] = ("attention",)
    router: str = "fp32"
    fp8: bool = False
    trains_head: bool = True

    @property
    def is_portable(self) -> bool:
        return self.layers == "portable"

    @property
    def gathers_keys(self) -> bool:
        """True if each rank has all keys of its sequences. Transformer Engine passes them around."""
        return self.cp > 1 and self.is_portable


@dataclass(frozen=True)
class _Widths:
    """A rank's elements of one token's tensors.

    hidden   hidden state; a share of it with sequence parallelism
    q, kv    queries; keys and values together
    ffn      columns of the MLP, or of a token's experts and the shared ones
    copies   hidden states sent to experts; a balanced rank receives the same number
    experts  number of experts; 0: none"""

    hidden: float
    q: float
    kv: float
    ffn: float
    copies: float
    experts: int


def _get_widths(shape: Shape, passes: Passes, has_experts: bool) -> _Widths:
    sizes, tp = shape.sizes, passes.tp
    hidden = sizes.hidden / (tp if passes.sequence_parallel else 1)
    attention = hidden, sizes.q / tp, 2 * sizes.kv / tp
    if not (has_experts and sizes.experts):
        return _Widths(*attention, ffn=sizes.ffn / tp, copies=0.0, experts=0)
    top_k = shape.config["num_experts_per_tok"]
    ffn, copies = (top_k * sizes.expert_ffn + sizes.shared_ffn) / tp, top_k * sizes.hidden / tp
    return _Widths(*attention, ffn, copies, sizes.experts)


def count_activations(shape: Shape, passes: Passes, *, critic: bool, has_experts: bool = True) -> Activations:
    """Count activations for each token of a context-parallel rank."""
    sizes, b, w = shape.sizes, shape.itemsize, _get_widths(shape, passes, has_experts)
    norms, attention, mlp = _count_layer_parts(shape, passes, w)
    delta = _delta_net(shape, passes.tp) if sizes.linear else 0.0
    linear_share = len(sizes.linear) / sizes.layers
    mean_attention = attention + linear_share * (delta - attention)
    one_layer = norms + mean_attention + mlp
    # Written but not kept: unrotated q and k, residual sums.
    moved = one_layer - b * w.copies + (0.0 if passes.is_portable else b * (w.q + w.kv / 2) + 2 * w.hidden)
    if passes.fp8:
        # FP8 products keep inputs at one byte an element, routers in bf16. Attention keeps its output in
        # bf16, and in FP8 as the projection's input.
        one_layer += w.q - (b - 1) * (w.hidden * (1 if w.experts else 2) + w.copies + w.ffn)
    attention_change = _count_recomputed_attention(shape, passes, w)
    if passes.gathers_keys:
        # Attention over gathered keys is always recomputed, linear attention never. QK norms keep the tensor
        # of q, k and v.
        norms_keep_qkv = get_family(shape.config).has("k_layernorm.weight")
        one_layer += (1 - linear_share) * (attention_change - (b * (w.q + w.kv) if norms_keep_qkv else 0.0))
        moved = one_layer - b * w.copies
    layer, selected = one_layer, 0.0
    if passes.recompute == "full":
        layer = b * w.hidden
    elif passes.recompute == "selective":
        selected = _count_recomputed_mlp(shape, passes, w, mlp) if "mlp" in passes.modules else 0.0
        layer = one_layer - selected
        if "attention" in passes.modules and not passes.gathers_keys:
            layer += (1 - linear_share) * attention_change
    work, forward = _count_scratch(shape, passes, w, mlp, delta)
    head, head_fixed = _head(shape, passes, critic)
    if passes.recompute == "full" and linear_share:  # larger kind of layer
        one_layer += max(attention, delta) - mean_attention
    dense = None
    if sizes.dense and has_experts:
        dense = count_activations(shape, passes, critic=critic, has_experts=False)
    return Activations(
        layer,
        one_layer,
        work,
        hidden=b * w.hidden,
        head=head,
        head_fixed=head_fixed,
        forward=forward,
        moved=moved,
        recompute=passes.recompute,
        recomputed=passes.recomputed,
        selected=selected,
        dense=dense,
    )


def _count_recomputed_attention(shape: Shape, passes: Passes, w: _Widths) -> float:
    """Return the change of a layer's kept bytes if its softmax attention is recomputed.

    Recomputed attention keeps unpadded q, k, v. Transformer Engine's projection keeps the output."""
    sizes, b, tp = shape.sizes, shape.itemsize, passes.tp
    change = -FP32 * (sizes.heads / tp)
    if passes.is_portable:
        is_latent = get_family(shape.config).is_latent
        change += b * (sizes.out / tp - 2 * w.q if is_latent else 0.5 * w.kv)
    elif passes.fp8:
        change -= b * w.q
    return change


def _count_recomputed_mlp(shape: Shape, passes: Passes, w: _Widths, mlp: float) -> float:
    """Return the bytes that a layer saves if its MLP is recomputed. mlp: bytes that it keeps otherwise

    A recomputed MLP keeps its input: portable layers the normalised one, Transformer Engine's fused layer the
    one before the norm. In FP8 both products' inputs take one byte an element."""
    b = shape.itemsize
    fused_input = 0.0 if passes.is_portable else b * w.hidden + FP32
    return mlp + fused_input - (b - 1) * (w.hidden + w.ffn) * passes.fp8


def _count_layer_parts(shape: Shape, passes: Passes, w: _Widths) -> tuple[float, float, float]:
    """Count bytes that a layer's norms, softmax attention and MLP keep."""
    sizes, b, tp, family = shape.sizes, shape.itemsize, passes.tp, get_family(shape.config)
    h, q, kv, f, heads = w.hidden, w.q, w.kv, w.ffn, sizes.heads / tp
    if passes.is_portable:
        # Twice: input and normalised input (float32), output.
        norms = 2 * (2 * FP32 * h + b * h) + 2 * FP32
        # Padded q, k, v; softmax sums; output; q's and k's cosine and sine.
        attention = b * (2 * q + kv) + FP32 * heads + b * q + 4 * b * sizes.head_dim
        mlp = 5 * b * f  # gate and up, silu, up again, product
        qk_norms = b * (3 * q + 1.5 * kv + q + kv)
        output_norms = 2 * 2 * FP32 * h + 2 * FP32  # input, normalised input
    else:
        # Fused norm and linear, twice: input, output, statistics.
        norms = 2 * (2 * b * h + 2 * FP32)
        # Rotated q and k, v; output; softmax sums. Only norms keep unrotated q and k.
        attention = b * (q + kv) + b * q + FP32 * heads
        mlp = 3 * b * f  # gate and up, product
        qk_norms = b * (q + kv / 2)
        output_norms = 2 * b * h + 2 * FP32
    if family.is_latent:
        attention = _latent_attention(shape, passes)
    if family.has("k_layernorm.weight"):
        attention += qk_norms
    if family.has("_bda.output_norm.weight"):
        norms += output_norms
    if sizes.linear:  # ungated output, gate, product
        attention += (FP32 + b) * q
    mlp += b * w.copies  # sorted input of the experts
    if w.experts:  # the router's scores, and a byte each for its choice
        mlp += w.experts * (BYTES[passes.router] + 1) / tp
        if family.has("shared_experts.gate_weight"):  # its input
            mlp += b * h
    return norms, attention, mlp


def _count_scratch(shape: Shape, passes: Passes, w: _Widths, mlp: float, delta: float) -> tuple[float, float]:
    """Count a layer's scratch memory: backward pass, forward pass without gradients.

    mlp, delta: kept by MLP and linear attention"""
    sizes, b, cp = shape.sizes, shape.itemsize, passes.cp
    h, q, kv, f, copies = w.hidden, w.q, w.kv, w.ffn, w.copies
    # Copies sent, received, sorted; experts' outputs, also combined; gradients.
    work = b * (max(2 * f, 4 * copies) + h)
    if passes.is_portable:
        forward = b * (h + q + kv + 5 * max(f, copies))
    else:  # fused: gate and up, product, gathered input
        gathered_input = sizes.hidden if passes.sequence_parallel else 0
        forward = b * (h + q + kv + max(3 * f, 5 * copies) + gathered_input)
    if cp > 1:
        # Attention's backward pass follows the MLP's. Portable layers have all ranks' keys and values twice
        # (gathered, by bucket), queries, outputs, and gradients. Transformer Engine passes keys, values and
        # gradients from rank to rank.
        attention_work = 4 * b * (cp * kv + q) if passes.is_portable else b * (4 * kv + 2 * q)
        work = max(work, attention_work - mlp)
    if sizes.linear:  # gradients of the rule's matrices and inputs
        work = max(work, delta / 2 - mlp)
        forward = max(forward, delta / 2)
    return work, forward


def _latent_attention(shape: Shape, passes: Passes) -> float:
    sizes, b, tp = shape.sizes, shape.itemsize, passes.tp
    q, out, heads = sizes.q / tp, sizes.out / tp, sizes.heads / tp
    latents, rotated = sizes.kv_rank + sizes.q_rank, sizes.latent - sizes.kv_rank
    if passes.is_portable:
        # q, k, v and output, padded to keys' width; the projection's input; cosine and sine; softmax sums;
        # the latents' norms: input and normalised input (float32), output.
        return b * (4 * q + out + 4 * rotated) + FP32 * heads + (2 * FP32 + b) * latents / tp
    # The same, without cosine and sine; norms' inputs and outputs.
    return b * (4 * q + out) + FP32 * heads + 2 * b * latents / tp


def _delta_net(shape: Shape, tp: int) -> float:
    sizes, b = shape.sizes, shape.itemsize
    heads, values, channels = sizes.value_heads / tp, sizes.value / tp, sizes.mixed / tp
    keys = heads * sizes.key / sizes.key_heads
    # float32: five token-by-token matrices of a chunk; six versions of keys and queries; five of values; a
    # state per chunk. Weights' type: the convolution's input, output, SiLU; the output around its norm.
    float32 = FP32 * (5 * CHUNK * heads + 6 * keys + 5 * values + keys * sizes.value_dim / CHUNK)
    return float32 + b * (3 * channels + 4 * values)


def _head(shape: Shape, passes: Passes, critic: bool) -> tuple[float, float]:
    """Count bytes of head and norm: per token, and fixed."""
    sizes, b, tp = shape.sizes, shape.itemsize, passes.tp
    h = sizes.hidden / (tp if passes.sequence_parallel else 1)
    # Norms keep their float32 input.
    norm = h * (3 * b + 2 * (FP32 - b))
    if critic:
        return norm + h * FP32 + FP32, 0.0
    # A chunk's logits exist until the next chunk's are computed: logits and exponentials, then gradients.
    hidden = sizes.hidden
    shard = padded_vocab(sizes.vocab, tp) // tp
    chunk, has_several_chunks = min(passes.chunk, shard), shard > passes.chunk
    forward = chunk * (3 if has_several_chunks else 2) * FP32
    backward = hidden * FP32 + chunk * (2 if has_several_chunks else 1) * FP32
    gathered_hidden = hidden * b if passes.sequence_parallel and tp > 1 else 0.0
    peak = norm + hidden * b - h * b + gathered_hidden + max(forward, backward)
    return peak, float(shard * sizes.hidden * b * passes.trains_head)


def fp8_bytes_per_param(recipe: str, device: Device) -> float:
    """Return the bytes of Transformer Engine's FP8 copies of a parameter.

    It has a copy by rows, and one by columns for the input's gradient, with scales (2.20: Float8Tensor,
    MXFP8Tensor, Float8BlockwiseQTensor). Per-tensor scaling needs only the first on some devices."""
    if recipe == "mxfp8":
        return 2 * (1 + 1 / 32)
    if recipe == "blockwise":
        return 2 * (1 + FP32 / 128**2)
    return 2.0 if device.transposes else 1.0


@dataclass(frozen=True)
class Device:
    """Data sheet of a GPU.

    memory        bytes
    tflops        dense bf16
    memory_speed  GB/s
    host_speed    GB/s in one direction
    transposes    FP8 products need transposed copies (before Blackwell)"""

    name: str
    memory: float
    tflops: float
    memory_speed: float
    host_speed: float
    transposes: bool = True


# Data sheets: SXM cards, GB200 NVL72, A100 80 GB. Memory as nvidia-smi shows it.
DEVICES = {
    "H100": Device("H100", 79.2 * GIB, 989.0, 3350.0, 55.0),
    "H200": Device("H200", 139.8 * GIB, 989.0, 4800.0, 55.0),
    "H800": Device("H800", 79.2 * GIB, 989.0, 3350.0, 55.0),
    "H20": Device("H20", 95.6 * GIB, 148.0, 4000.0, 55.0),
    "GB200": Device("GB200", 185.0 * GIB, 2500.0, 8000.0, 225.0, transposes=False),
    "A100": Device("A100", 79.2 * GIB, 312.0, 2039.0, 25.0),
}


def find_device(cluster: ClusterConfig, measured: float | None = None) -> Device:
    """Return the GPU of `cluster`, with configured figures. Raises ConfigError where some are missing.

    measured: memory, bytes"""
    memory = None if cluster.gpu_memory is None else cluster.gpu_memory * GIB
    figures = {
        "gpu_memory": memory,
        "gpu_tflops": cluster.gpu_tflops,
        "gpu_memory_speed": cluster.gpu_memory_speed,
        "host_speed": cluster.host_speed,
    }
    configured: dict[str, Any] = {
        key.removeprefix("gpu_"): value for key, value in figures.items() if value is not None
    }
    if cluster.gpu in DEVICES:
        device = replace(DEVICES[cluster.gpu], **configured)
    elif missing := [f"cluster.{key}" for key, value in figures.items() if value is None]:
        what = f"{cluster.gpu} is not in the table ({', '.join(DEVICES)})"
        raise ConfigError(f"cluster.gpu: {what}: set {', '.join(missing)} as well")
    else:
        device = Device(cluster.gpu, **configured)
    return replace(device, memory=measured) if measured else device
