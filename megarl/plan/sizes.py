"""What a model and a GPU are to the planner: parameters of each rank, bytes of activations, data sheets.

Parameters are exact, from the family's table. Quick enough to search over layouts, and without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
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
    family_of,
    is_frozen,
    is_tied,
)
from megarl.weights.shards import float32_tensors, sglang_shards, sizes_of

GIB = 2**30
BYTES = {"bf16": 2, "fp32": 4}
SINGLE = 4  # bytes of a float32
CHUNK = 64  # tokens of a chunk of linear attention (model/delta_net.py, which imports torch)


@dataclass(frozen=True)
class Held:
    """Parameters of one rank: those that all data-parallel replicas share, experts, and those in float32."""

    shared: int
    experts: int
    single: int

    @property
    def all(self) -> int:
        return self.shared + self.experts + self.single


@dataclass(frozen=True, eq=False)
class Shape:
    """A model to plan with. config: its config.json; dtype: of its weights."""

    config: Mapping[str, Any]
    dtype: str
    _held: dict[Any, Held] = field(default_factory=dict)
    _quantised: dict[Any, int] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes.of(self.config)

    @property
    def itemsize(self) -> int:
        return BYTES[self.dtype]

    def count_params(
        self, layout: Layout, pp_rank: int, *, critic: bool = False, optimizer: OptimizerConfig | None = None
    ) -> Held:
        """Count the parameters of a rank of this pipeline stage, padding of the vocabulary included. All
        tensor-parallel ranks have the same number. A critic's value head is in float32.
        optimizer: count only what it trains."""
        lora = optimizer and optimizer.lora.rank and optimizer.lora
        trained = optimizer and (optimizer.frozen, optimizer.frozen_layers, lora)
        key = (layout.tp, layout.pp, layout.ep, pp_rank, critic, trained)
        if key not in self._held:  # a search asks for the same ones over and over
            self._held[key] = self._count(layout, pp_rank, critic, optimizer)
        return self._held[key]

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Return the parameters of a layer, each for the kinds of layers that have it."""
        return family_of(self.config).layer

    def _layers(self, layout: Layout, pp_rank: int) -> list[int]:
        """Return the layers of a pipeline stage; where pp does not divide them (a published run's), as many
        as the others have."""
        return layout.layers(self.sizes.layers, pp_rank)[: self.sizes.layers // layout.pp]

    def _local(self, pair: Pair, tp: int, lora: LoraConfig | None = None) -> int:
        """Count the elements that one of `tp` ranks has of a parameter. lora: it is one of its adapters."""
        sizes = self.sizes if lora is None else sizes_of(self.config, lora)
        shapes = [sizes.shape(dims) for _, dims in pair.hf]
        if pair.operation == "vocabulary":
            ((vocab, hidden),) = shapes
            return padded_vocab(vocab, tp) // tp * hidden
        whole = sum(map(prod, shapes))
        return whole if pair.operation == "replicated" else whole // tp

    def largest_tensor(self, tp: int) -> int:
        """Count the elements of the largest parameter on one of `tp` ranks."""
        pairs = (EMBEDDING, *self.pairs)
        return max(self._local(pair, 1 if pair.per_expert else tp) for pair in pairs)

    def adapted(self, lora: LoraConfig, tp: int) -> tuple[int, int]:
        """Count the elements of weights with LoRA adapters on one of `tp` ranks: of all, of the largest."""
        held, sizes = list[tuple[int, int]](), self.sizes
        for pair in (pair for pair in self.pairs if adapters(pair, lora)):
            copies = sizes.count(pair, range(sizes.layers)) * (sizes.experts if pair.per_expert else 1)
            held.append((copies, self._local(pair, 1 if pair.per_expert else tp)))
        return sum(map(prod, held)), max((size for _, size in held), default=0)

    def quantised(self, layout: Layout, pp_rank: int, ends_in_bf16: bool) -> int:
        """Count the parameters that a rank of this pipeline stage multiplies in FP8: the matrices of its
        layers, but for routers. ends_in_bf16: not those of the model's first and last layer."""
        key = (layout.tp, layout.pp, layout.vpp, layout.ep, pp_rank, ends_in_bf16)
        if key in self._quantised:
            return self._quantised[key]
        sizes = self.sizes
        layers = set(layout.layers(sizes.layers, pp_rank))
        if ends_in_bf16:
            layers -= {0, sizes.layers - 1}
        elements = 0
        for pair in self.pairs:
            if ".router." in pair.megatron or any(len(sizes.shape(dims)) < 2 for _, dims in pair.hf):
                continue
            copies = sizes.count(pair, layers) * (sizes.experts // layout.ep if pair.per_expert else 1)
            elements += copies * self._local(pair, 1 if pair.per_expert else layout.tp)
        self._quantised[key] = elements
        return elements

    def matrices(self, layout: Layout, pp_rank: int) -> tuple[list[int], list[int]]:
        """Return the elements that a rank of this pipeline stage has of each matrix of its layers, which
        Muon turns: of those that all replicas share, and of experts."""
        sizes, found, own = self.sizes, (list[int](), list[int]()), self._layers(layout, pp_rank)
        for pair in self.pairs:
            if all(len(sizes.shape(dims)) == 2 for _, dims in pair.hf):
                copies = sizes.count(pair, own) * (sizes.experts // layout.ep if pair.per_expert else 1)
                found[pair.per_expert].extend(
                    [self._local(pair, 1 if pair.per_expert else layout.tp)] * copies
                )
        return found

    def muon_flops(self, layout: Layout, pp_rank: int) -> float:
        """Return the operations of one iteration by which Muon turns the matrices of this pipeline stage,
        each whole: of m x n, m <= n, X X^T, its square, and what both make of X (arXiv 2502.16982)."""
        sizes, total, own = self.sizes, 0.0, self._layers(layout, pp_rank)
        for pair in self.pairs:
            shapes = [sizes.shape(dims) for _, dims in pair.hf]
            if all(len(shape) == 2 for shape in shapes):
                m, n = sorted((sum(shape[0] for shape in shapes), shapes[0][1]))
                copies = sizes.count(pair, own) * (sizes.experts // layout.ep if pair.per_expert else 1)
                total += copies * (4 * m * m * n + 2 * m**3)
        return total

    def joined(self, layout: Layout, pp_rank: int) -> int:
        """Count the parameters of gate and up projections, which are apart in a checkpoint and one on a rank
        of this pipeline stage."""
        elements, sizes = 0, self.sizes
        own = self._layers(layout, pp_rank)
        for pair in self.pairs:
            if pair.megatron.endswith("linear_fc1.weight"):
                copies = sizes.count(pair, own) * (sizes.experts // layout.ep if pair.per_expert else 1)
                elements += copies * self._local(pair, 1 if pair.per_expert else layout.tp)
        return elements

    def _count(self, layout: Layout, pp_rank: int, critic: bool, optimizer: OptimizerConfig | None) -> Held:
        sizes, local = self.sizes, self._local
        own, top = self._layers(layout, pp_rank), sizes.layers - 1
        first, last = pp_rank == 0, pp_rank == layout.pp - 1
        if optimizer is not None and optimizer.lora.rank is not None:
            lora = optimizer.lora
            halves = [half for pair in self.pairs for half in adapters(pair, lora)]
            shared, each = (
                sum(sizes.count(h, own) * local(h, tp, lora) for h in halves if h.per_expert is per_expert)
                for per_expert, tp in ((False, layout.tp), (True, 1))
            )
            return Held(shared, each * (sizes.experts // layout.ep), sizes.hidden if critic and last else 0)

        def counts(pair: Pair, layer: int = 0) -> bool:
            return optimizer is None or not is_frozen(pair, layer, optimizer)

        # Frozen layers are the lowest: what is trained in any is trained in the uppermost.
        pairs = [pair for pair in self.pairs if counts(pair, top)]
        if optimizer is not None:
            own = [n for n in layout.layers(sizes.layers, pp_rank) if n >= optimizer.frozen_layers]
        single = sum(sizes.count(p, own) * local(p, 1) for p in pairs if p.float32 == "everywhere")
        shared, each = (
            sum(sizes.count(pair, own) * local(pair, tp) for pair in pairs if pair.per_expert is per_expert)
            for per_expert, tp in ((False, layout.tp), (True, 1))
        )
        shared, experts = shared - single, each * (sizes.experts // layout.ep)
        tied = is_tied(self.config)
        if first and counts(EMBEDDING):
            shared += local(EMBEDDING, layout.tp)
        if last:
            shared += local(FINAL_NORM, layout.tp)
        if last and not critic and not (first and tied) and counts(TIED_OUTPUT if tied else OUTPUT):
            shared += local(OUTPUT, layout.tp)
        return Held(shared, experts, single + (sizes.hidden if critic and last else 0))

    @cached_property
    def parameters(self) -> int:
        """Return the number of parameters of the whole model, without padding."""
        return self.count_params(Layout(), 0).all

    @cached_property
    def active(self) -> int:
        """Count the parameters of matrices that a token goes through: the output layer, not the embedding."""
        sizes = self.sizes
        chosen = int(self.config.get("num_experts_per_tok", 0)) if sizes.experts else 0
        dense = sizes.dense if chosen else sizes.layers
        columns = sizes.experts + 3 * (sizes.expert_ffn * chosen + sizes.shared_ffn)
        mlps = dense * 3 * sizes.ffn + (sizes.layers - dense) * columns
        attention = sum(m * n for m, n in self.attention_matrices)
        of_linear = sizes.hidden * (sizes.mixed + 2 * sizes.value + 2 * sizes.value_heads)
        mixing = (sizes.layers - len(sizes.linear)) * attention + len(sizes.linear) * of_linear
        return mixing + sizes.hidden * (mlps + sizes.vocab)

    @cached_property
    def attention_matrices(self) -> list[tuple[int, int]]:
        """Return (in, out) of the matrices of a layer's attention, where that is not linear; q, k and v
        are one."""
        found = []
        for pair in self.pairs:
            if pair.megatron.rpartition(".layers.{l}.")[2].startswith("self_attention.linear_"):
                shapes = [self.sizes.shape(dims) for _, dims in pair.hf]
                if len(shapes[0]) == 2:
                    found.append((shapes[0][1], sum(rows for rows, _ in shapes)))
        return found

    @cached_property
    def routed_share(self) -> float:
        """Return the share of the experts that a token goes through; 1 without any."""
        return int(self.config["num_experts_per_tok"]) / self.sizes.experts if self.sizes.experts else 1.0

    @cached_property
    def expert_share(self) -> float:
        """Return the share of the parameters that are experts."""
        return self.count_params(Layout(), 0).experts / self.parameters

    def cache_bytes(self, tp: int) -> int:
        """Return the bytes of one token's keys and values on one rank of an engine. A key/value head is not
        cut: where there are fewer of them than ranks, each is held by several. Multi-latent attention's are
        latents, and the part of a key that is rotated, once for all heads, on every rank."""
        if self.sizes.latent:
            return self.sizes.layers * self.sizes.latent * self.itemsize
        heads, layers = max(1, self.sizes.kv_heads // tp), self.sizes.layers - len(self.sizes.linear)
        return 2 * layers * heads * self.sizes.head_dim * self.itemsize

    def state_bytes(self, tp: int) -> float:
        """Return the bytes of what one rank of an engine keeps of a response, however long it is: the states
        of linear attention, in float32, and the newest inputs of its convolutions."""
        sizes = self.sizes
        if not sizes.linear:
            return 0.0
        state = SINGLE * sizes.value * sizes.key // sizes.key_heads
        return len(sizes.linear) * (state + self.itemsize * sizes.mixed * (sizes.conv - 1)) / tp

    @lru_cache(maxsize=64)  # noqa: B019 (a planner has a few models, and ends)
    def engine_tensors(self, tp: int, weights: str) -> tuple[float, ...]:
        """Return the bytes of each tensor of an SGLang engine on a rank. weights: rollout.weights_dtype."""
        single = float32_tensors(self.config, sglang=True)

        def width(name: str, shape: tuple[int, ...]) -> float:
            if name in single:
                return SINGLE
            matrix = len(shape) == 2 and ".layers." in name
            if weights != "fp8_block" or not matrix or "router" in name or ".gate.weight" in name:
                return self.itemsize
            return 1 + 4 / 128**2  # a float8 for each element, a float32 for each block of 128 x 128

        shards = sglang_shards(self.config, tp, 0)
        return tuple(prod(shard.shape) * width(name, shard.shape) for name, shard in shards.items())


# Activations. `portable` is counted tensor by tensor and held against measurement
# (tests/plan/test_activations.py). `te` is what Transformer Engine's modules keep, and experts what Megatron
# passes on, both held against them on a device that is not there
# (tests/rehearsal/test_peaks.py); no GPU has measured them.

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Activations:
    """Activations of one model at one tensor-parallel size. All figures but `head_fixed` are bytes a token.

    layer        what a layer keeps with the recomputation that was asked for
    one_layer    what a layer keeps without any
    work         what the backward pass of a layer needs besides
    hidden       what is passed on to the next stage
    head         the most in the last stage's head, forward or backward
    head_fixed   what that head needs besides, however many tokens there are
    forward      the most in a layer without gradients
    moved        what norms, attention and activation functions write in a layer, in the weights' type
    recomputed   with recompute full: layers of a rank that are recomputed; None: all
    selected     with recompute selective: what the backward pass of a layer has of it again
    dense        of the layers without experts, where some come before the others, which are these"""

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
        """Return the most in forward and backward of a stage with so many layers.
        in_flight: micro-batches of `tokens` whose backward pass is still to come; last: the last stage;
        outputs: hidden states that are kept for other stages (`passed_on`); dense: how many of the layers,
        the first ones, have no experts."""
        full = self.recompute == "full"
        whole = layers - min(layers, self.recomputed or layers) if full else 0
        first, others = self.dense or self, self
        lowest = min(dense, layers - whole)
        kept = first.layer * lowest + first.one_layer * (dense - lowest)
        kept += others.layer * (layers - whole - lowest) + others.one_layer * (whole - dense + lowest)
        kept = tokens * (kept * in_flight + self.hidden * outputs)
        # The highest layers are the first to go back: what they kept makes room for a lower one's recompute.
        again, kinds = full and not whole, [first] * (dense > 0) + [others] * (dense < layers)
        inside = tokens * max((k.one_layer if again else k.selected) + k.work for k in kinds)
        return kept + (max(inside, tokens * self.head + self.head_fixed) if last else inside)

    def forward_only(self, tokens: float, last: bool, dense: int = 0) -> float:
        """Return the most in a forward pass alone."""
        inside = max(self.forward, self.dense.forward) if self.dense and dense else self.forward
        return tokens * (max(inside, self.head) if last else inside)


def fullest(sizes: Sequence[int], ranks: int) -> int:
    """Return the most that one of so many ranks has of things that are shared out whole, the largest first,
    each to the rank that has least, as Megatron shares out the matrices that Muon turns."""
    loads = [0] * ranks
    for size in sorted(sizes, reverse=True):
        heapreplace(loads, loads[0] + size)
    return max(loads)


def in_flight(layout: Layout, stage: int) -> float:
    """Return the most micro-batches whose activations a pipeline stage keeps at once.

    With virtual stages it keeps those of chunks, each a part of 1 / vpp of the stage: on the first one 1 +
    (pp - 1) / (pp * vpp) times as many as without (arXiv 2104.04473, section 2.2)."""
    later = layout.pp - stage - 1
    if layout.vpp == 1:
        return later + 1
    # Megatron's warm-up (schedules.py:get_pp_rank_microbatches), and one forward before the first backward.
    return (2 * later + (layout.vpp - 1) * layout.pp + 1) / layout.vpp


def passed_on(layout: Layout, begun: float, last: bool) -> float:
    """Return the hidden states that a stage keeps for others. Without virtual stages it frees them when they
    are sent. With them Megatron's schedule holds what each chunk but the model's last has passed on until it
    goes back, and a stage receives messages before it needs them: as measured at pp 2, about those of pp
    micro-batches in either direction.
    begun: micro-batches whose backward pass is still to come (`in_flight`)."""
    return begun * layout.vpp - last + 2 * layout.pp if layout.vpp > 1 else 0.0


@dataclass(frozen=True)
class Passes:
    """How a rank goes forward and back through a model.

    chunk       vocabulary entries whose logits exist at once
    recomputed  layers of a rank with model.recompute_layers
    modules     model.recompute_modules
    router      in what a mixture's router computes
    trains_head whether the output layer is trained"""

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


def activations(shape: Shape, passes: Passes, *, critic: bool, mixture: bool = True) -> Activations:
    """Count the activations of a model, for each token of a context-parallel rank's share. mixture: of the
    layers with experts, where there are any."""
    sizes, b, tp, cp = shape.sizes, shape.itemsize, passes.tp, passes.cp
    layers, recompute, modules, fp8 = passes.layers, passes.recompute, passes.modules, passes.fp8
    h, heads = sizes.hidden / (tp if passes.sequence_parallel else 1), sizes.heads / tp
    q, kv = sizes.q / tp, 2 * sizes.kv / tp
    # Feed-forward columns of a token on a rank, and those of its copies that go to its experts. These are on
    # other ranks, but as many tokens come from there (expert parallelism does not change it; an uneven router
    # does).
    experts = sizes.experts if mixture else 0
    chosen = shape.config["num_experts_per_tok"] if experts else 0
    f, copies = sizes.ffn / tp, chosen * sizes.hidden / tp
    if experts:
        f = (chosen * sizes.expert_ffn + sizes.shared_ffn) / tp
    if layers == "portable":
        # Twice: input, normalised input (both float32), output.
        norms = 2 * (2 * SINGLE * h + b * h) + 2 * SINGLE
        # Padded q, k, v; sums; output, also the projection's input; cosine and sine for q and k.
        attention = b * (2 * q + kv) + SINGLE * heads + b * q + 4 * b * sizes.head_dim
        mlp = 5 * b * f  # gate and up, silu, the up part again, their product
        qk_norms = b * (3 * q + 1.5 * kv + q + kv)
        output_norms = 2 * 2 * SINGLE * h + 2 * SINGLE  # input, normalised input
    else:
        # Fused norm and linear, twice: input, output, statistics.
        norms = 2 * (2 * b * h + 2 * SINGLE)
        # q and k rotated, v; output, also the projection's input; sums. (As they come q and k are needed by
        # their norms alone.)
        attention = b * (q + kv) + b * q + SINGLE * heads
        mlp = 3 * b * f  # gate and up, their product
        qk_norms = b * (q + kv / 2)
        output_norms = 2 * b * h + 2 * SINGLE
    family = family_of(shape.config)
    if family.is_latent:
        attention = _latent_attention(shape, passes)
    if family.has("k_layernorm.weight"):
        attention += qk_norms
    if family.has("_bda.output_norm.weight"):
        norms += output_norms
    share, delta = len(sizes.linear) / sizes.layers, 0.0
    if sizes.linear:
        # Beside it attention keeps its output, the gate's sigmoid, and their product.
        attention += (SINGLE + b) * q
        delta = _delta_net(shape, tp)
    mlp += b * copies  # what the experts take, in their order
    if experts:  # a router's scores in the order of the experts, and whom they go to
        mlp += experts * (BYTES[passes.router] + 1) / tp
        if family.has("shared_experts.gate_weight"):  # what it multiplies
            mlp += b * h
    mixed = attention + share * (delta - attention)  # layers are counted alike
    one_layer = norms + mixed + mlp
    # Besides what is kept: q and k as they come, and the residual's sums.
    moved = one_layer - b * copies + (0.0 if layers == "portable" else b * (q + kv / 2) + 2 * h)
    if fp8:
        # A product in FP8 keeps its input as the backward pass wants it: the norms' outputs (of a mixture the
        # router has one as it is), the experts' input and that of the second half of an MLP are a byte each;
        # the projection's is one besides the output that attention keeps.
        one_layer += q - (b - 1) * (h * (1 if experts else 2) + copies + f)
    # Recomputed attention keeps q, k, v as they come instead of padded, and neither its output nor its sums;
    # Transformer Engine's projection keeps the output.
    attention_again = -SINGLE * heads  # (of linear attention, nothing)
    if layers == "portable":
        attention_again += b * (sizes.out / tp - 2 * q if family.is_latent else 0.5 * kv)
    elif fp8:
        attention_again -= b * q
    gathered_keys = cp > 1 and layers == "portable"
    if gathered_keys:
        # Attention over gathered keys is always recomputed. (v as it comes lies in what q and k were made of,
        # which their norms keep anyway.)
        counted = family.has("k_layernorm.weight")
        one_layer += (1 - share) * (attention_again - (b * (q + kv) if counted else 0.0))
        moved = one_layer - b * copies
    # A recomputed MLP keeps its input: in portable layers the normalised one, which Transformer Engine's
    # fused layer makes again too; in FP8 that, and the second product's input, are a byte each.
    selected = 0.0
    if "mlp" in modules:
        selected = mlp + (0.0 if layers == "portable" else b * h + SINGLE) - (b - 1) * (h + f) * fp8
    again = (1 - share) * attention_again
    selective = one_layer - selected + again * ("attention" in modules and not gathered_keys)
    layer = {"none": one_layer, "full": b * h, "selective": selective}[recompute]
    head, fixed = _head(shape, passes, critic)
    # Around the experts: copies as sent, as received and in their order, the experts' outputs one by one and
    # together; a layer's backward pass has as many gradients.
    work = b * (max(2 * f, 4 * copies) + h)
    if layers == "portable":
        passing = b * (h + q + kv + 5 * max(f, copies))
    else:  # fused: gate and up and their product, beside the input that sequence parallelism gathers
        gathered = sizes.hidden if passes.sequence_parallel else 0
        passing = b * (h + q + kv + max(3 * f, 5 * copies) + gathered)
    if cp > 1:
        # Attention, backward, when the layer's MLP has been through: in portable layers keys and values of
        # all context-parallel ranks, as gathered and by bucket, queries and outputs, and gradients of all;
        # Transformer Engine passes keys, values and their gradients on in buffers of one rank's share.
        attended = 4 * b * (cp * kv + q) if layers == "portable" else b * (4 * kv + 2 * q)
        work = max(work, attended - mlp)
    if sizes.linear:
        # Backward through a chunked rule: gradients of its matrices, and of what they are made of.
        work = max(work, delta / 2 - mlp)
        passing = max(passing, delta / 2)
    if recompute != "selective":
        selected = 0.0
    if recompute == "full":  # the largest layer is recomputed as well
        one_layer += max(attention, delta) - mixed if share else 0.0
    dense = activations(shape, passes, critic=critic, mixture=False) if sizes.dense and mixture else None
    return Activations(
        *(layer, one_layer, work, b * h, head, fixed, passing, moved, recompute, passes.recomputed, selected),
        dense,
    )


def _latent_attention(shape: Shape, passes: Passes) -> float:
    """Count what a layer of multi-latent attention keeps."""
    sizes, b, tp = shape.sizes, shape.itemsize, passes.tp
    q, out, heads = sizes.q / tp, sizes.out / tp, sizes.heads / tp
    latents, rotated = sizes.kv_rank + sizes.q_rank, sizes.latent - sizes.kv_rank
    if passes.layers == "portable":
        # Padded q, k and v and the output, all as wide as keys; sums; the projection's input; cosine and sine
        # for q and k; of latents' norms input, normalised input (both float32) and output.
        return b * (4 * q + out + 4 * rotated) + SINGLE * heads + (2 * SINGLE + b) * latents / tp
    # q, k and v, also as wide; output; the projection's input; sums; norms' inputs and outputs.
    return b * (4 * q + out) + SINGLE * heads + 2 * b * latents / tp


def _delta_net(shape: Shape, tp: int) -> float:
    """Count what a layer of linear attention keeps."""
    sizes, b = shape.sizes, shape.itemsize
    heads, values, channels = sizes.value_heads / tp, sizes.value / tp, sizes.mixed / tp
    keys = heads * sizes.key / sizes.key_heads
    # In float32: five matrices of a chunk's tokens by themselves; queries and keys, as they are, decayed,
    # written and solved for; values likewise, and as normalised, with the gate; a state for each chunk. The
    # convolution's input, output and what SiLU makes of it; the output before and behind its norm.
    single = SINGLE * (5 * CHUNK * heads + 6 * keys + 5 * values + keys * sizes.value_dim / CHUNK)
    return single + b * (3 * channels + 4 * values)


def _head(shape: Shape, passes: Passes, critic: bool) -> tuple[float, float]:
    """Count what the last stage's head needs, with the norm before it: for each token, and however many there
    are."""
    sizes, b, tp = shape.sizes, shape.itemsize, passes.tp
    h = sizes.hidden / (tp if passes.sequence_parallel else 1)
    # Norms compute in float32, and keep what they made of a bf16 input.
    norm = h * (3 * b + 2 * (SINGLE - b))
    if critic:
        return norm + h * SINGLE + SINGLE, 0.0
    # A chunk's logits are there while the next one's are made: logits and their exponentials forward, their
    # gradient backward.
    whole = sizes.hidden  # the head gathers what sequence parallelism has divided
    shard = padded_vocab(sizes.vocab, tp) // tp
    chunk, several = min(passes.chunk, shard), shard > passes.chunk
    forward = chunk * (3 if several else 2) * SINGLE
    backward = whole * SINGLE + chunk * (2 if several else 1) * SINGLE
    gathered = whole * b if passes.sequence_parallel and tp > 1 else 0.0
    needed = norm + whole * b - h * b + gathered + max(forward, backward)
    return needed, float(shard * sizes.hidden * b * passes.trains_head)


def quantised_bytes(recipe: str, device: Device) -> float:
    """Return the bytes of the FP8 copies that Transformer Engine keeps of a parameter (2.20: Float8Tensor,
    MXFP8Tensor and Float8BlockwiseQTensor): rows, and for the gradient of the input columns, each with the
    scales of its blocks. With one scale for all a device that needs no transposed copy has rows alone."""
    if recipe == "mxfp8":
        return 2 * (1 + 1 / 32)
    if recipe == "blockwise":
        return 2 * (1 + SINGLE / 128**2)
    return 2.0 if device.transposes else 1.0


@dataclass(frozen=True)
class Device:
    """A GPU. memory: bytes; tflops: dense bf16; memory_speed: GB/s; host_speed: GB/s, in one direction;
    transposes: whether its FP8 products ask for transposed copies of matrices, as those before Blackwell."""

    name: str
    memory: float
    tflops: float
    memory_speed: float
    host_speed: float
    transposes: bool = True


# Data sheets: H100 SXM5, H200 SXM, H800 SXM, H20 SXM, GB200 NVL72, A100 SXM4 80 GB. What
# nvidia-smi shows is a little less than the round number.
DEVICES = {
    "H100": Device("H100", 79.2 * GIB, 989.0, 3350.0, 55.0),
    "H200": Device("H200", 139.8 * GIB, 989.0, 4800.0, 55.0),
    "H800": Device("H800", 79.2 * GIB, 989.0, 3350.0, 55.0),
    "H20": Device("H20", 95.6 * GIB, 148.0, 4000.0, 55.0),
    "GB200": Device("GB200", 185.0 * GIB, 2500.0, 8000.0, 225.0, transposes=False),
    "A100": Device("A100", 79.2 * GIB, 312.0, 2039.0, 25.0),
}


def device_of(cluster: ClusterConfig, measured: float | None = None) -> Device:
    """Return the GPU that `cluster` describes: one of the table by name, with the figures that it states.
    measured: bytes of memory that a real one was found to have. Raises ConfigError where figures are
    missing."""
    memory = None if cluster.gpu_memory is None else cluster.gpu_memory * GIB
    figures = {
        "gpu_memory": memory,
        "gpu_tflops": cluster.gpu_tflops,
        "gpu_memory_speed": cluster.gpu_memory_speed,
        "host_speed": cluster.host_speed,
    }
    transposes = True
    if cluster.gpu in DEVICES:
        _, *known, transposes = astuple(DEVICES[cluster.gpu])
        table = dict(zip(figures, known, strict=True))
        figures = {key: table[key] if value is None else value for key, value in figures.items()}
    missing = [f"cluster.{key}" for key, value in figures.items() if value is None]
    if missing:
        raise ConfigError(
            f"cluster.gpu: {cluster.gpu} is not in the table ({', '.join(DEVICES)}): "
            f"set {', '.join(missing)} as well"
        )
    total, tflops, memory_speed, host_speed = (value or 0.0 for value in figures.values())
    return Device(cluster.gpu, measured or total, tflops, memory_speed, host_speed, transposes)
