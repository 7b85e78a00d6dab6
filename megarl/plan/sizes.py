"""What a model and a GPU are to the planner: parameters by rank, bytes of activations, figures of data sheets. Exact where the
family's table says it, quick enough to search over layouts, and without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal

from megarl.config.errors import ConfigError
from megarl.config.schema import ClusterConfig
from megarl.parallel.layout import Layout, padded_vocab
from megarl.weights.families import EMBEDDING, FINAL_NORM, OUTPUT, Pair, Sizes, family_of, is_tied
from megarl.weights.layout import sglang_shards

GIB = 2**30
BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Held:
    """Parameters of one rank: those that all data-parallel replicas share, experts, and those that are float32 whatever the dtype."""

    shared: int
    experts: int = 0
    single: int = 0

    @property
    def all(self) -> int:
        return self.shared + self.experts + self.single


@dataclass(frozen=True, eq=False)
class Shape:
    """A model to plan with. config: its config.json; dtype: of its weights."""

    config: Mapping[str, Any]
    dtype: str

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes.of(self.config)

    @property
    def itemsize(self) -> int:
        return BYTES[self.dtype]

    def held(self, layout: Layout, pp_rank: int, *, critic: bool = False) -> Held:
        """Count what a rank of this pipeline stage holds; all tensor-parallel ranks hold the same, padding of the vocabulary
        included."""
        sizes, tp = self.sizes, layout.tp
        dense, experts = 0, 0
        for pair in family_of(self.config).layer:
            if pair.per_expert:
                experts += _local(pair, sizes, 1) * (sizes.experts // layout.ep)
            else:
                dense += _local(pair, sizes, tp)
        layers = sizes.layers // layout.pp
        first, last = pp_rank == 0, pp_rank == layout.pp - 1
        tied = is_tied(self.config) and not critic
        shared = (
            dense * layers
            + (_local(EMBEDDING, sizes, tp) if first else 0)
            + (_local(FINAL_NORM, sizes, tp) if last else 0)
        )
        if last and not critic and not (tied and first):
            shared += _local(OUTPUT, sizes, tp)
        return Held(shared, experts * layers, sizes.hidden if critic and last else 0)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model, without padding."""
        return self.held(Layout(), 0).all

    @cached_property
    def active(self) -> int:
        """Parameters of matrices that a token goes through, the output layer included and the embedding left out."""
        sizes = self.sizes
        attention = sizes.hidden * (2 * sizes.q + 2 * sizes.kv)
        chosen = int(self.config.get("num_experts_per_tok", 0)) if sizes.experts else 0
        mlp = (
            sizes.hidden * (sizes.experts + 3 * sizes.expert_ffn * chosen)
            if chosen
            else 3 * sizes.hidden * sizes.ffn
        )
        return sizes.layers * (attention + mlp) + sizes.vocab * sizes.hidden

    def cache_bytes(self, tp: int) -> int:
        """Keys and values of one token on one rank of an engine; a key/value head that is not cut is repeated."""
        heads = max(1, self.sizes.kv_heads // tp)
        return 2 * self.sizes.layers * heads * self.sizes.head_dim * self.itemsize

    def engine_bytes(self, tp: int, weights: str, whole: bool) -> int:
        """An engine's weights on one of its ranks. weights: rollout.weights_dtype; whole: the transformers engine, which is not sharded."""
        if whole:
            return self.parameters * self.itemsize
        return int(sum(_engine_tensors(self, tp, weights)))

    def engine_tensor(self, tp: int, weights: str) -> float:
        """Bytes of the largest tensor of an SGLang engine on one of its ranks."""
        return max(_engine_tensors(self, tp, weights))


@lru_cache(maxsize=64)
def _engine_tensors(shape: Shape, tp: int, weights: str) -> tuple[float, ...]:
    sizes = []
    for name, shard in sglang_shards(shape.config, tp, 0).items():
        matrix = (
            len(shard.shape) == 2
            and ".layers." in name
            and "router" not in name
            and ".gate.weight" not in name
        )
        # One float8 an element and one float32 a block of 128 x 128.
        sizes.append(
            prod(shard.shape) * (1 + 4 / 128**2 if weights == "fp8_block" and matrix else shape.itemsize)
        )
    return tuple(sizes)


def _local(pair: Pair, sizes: Sizes, tp: int) -> int:
    """Elements of one tensor-parallel rank's part of a pair."""
    shapes = [sizes.shape(dims) for _, dims in pair.hf]
    if pair.operation == "vocabulary":
        ((vocab, hidden),) = shapes
        return padded_vocab(vocab, tp) // tp * hidden
    whole = sum(prod(shape) for shape in shapes)
    return whole if pair.operation == "replicated" else whole // tp


# Activations. `portable` is counted tensor by tensor and held against measurement (tests/plan/test_activations.py). `te` is derived
# from which tensors Transformer Engine's fused layers and FlashAttention save; it has not been measured.

Recompute = Literal["none", "selective", "full"]
SINGLE = 4  # bytes of a float32


@dataclass(frozen=True)
class Activations:
    """Activations of one model at one tensor-parallel size. All figures but `head_fixed` are bytes a token.

    between      the hidden state between two layers: what full recomputation keeps of a layer
    layer        what a layer keeps with the recomputation that was asked for
    one_layer    what a layer keeps without any
    work         what the backward pass of a layer needs besides
    head, head_fixed   the most in the last stage's head, forward or backward; the latter whatever the tokens
    forward      the most in a layer without gradients
    """

    between: float
    layer: float
    one_layer: float
    work: float
    head: float
    head_fixed: float
    forward: float
    recompute: Recompute

    def training(self, tokens: float, layers: int, in_flight: int, last: bool) -> float:
        """The most in forward and backward: `layers` of this stage, `in_flight` micro-batches of `tokens` begun and not yet done."""
        kept = tokens * self.layer * layers * in_flight
        again = self.one_layer if self.recompute == "full" else 0.0
        inside = tokens * (again + self.work)
        return kept + (max(inside, tokens * self.head + self.head_fixed) if last else inside)

    def forward_only(self, tokens: float, last: bool) -> float:
        """The most in a forward pass alone."""
        return tokens * (max(self.forward, self.head) if last else self.forward)


def activations(
    shape: Shape,
    tp: int,
    *,
    recompute: Recompute,
    chunk: int,
    layers: str,
    sequence_parallel: bool,
    critic: bool = False,
    vocab_shard_size: int = 0,
) -> Activations:
    """Count the activations of a model. chunk: words whose logits exist at once; vocab_shard_size: words of this rank."""
    sizes, b = shape.sizes, shape.itemsize
    split = tp if sequence_parallel else 1
    h, heads = sizes.hidden / split, sizes.heads / tp
    q, kv = sizes.q / tp, 2 * sizes.kv / tp
    # Feed-forward columns of a token on a rank. A token's chosen experts are on other ranks, but as many tokens come from
    # there (expert parallelism does not change it; an uneven router does).
    f = (shape.config["num_experts_per_tok"] * sizes.expert_ffn if sizes.experts else sizes.ffn) / tp
    count = _portable if layers == "portable" else _te
    norm, attention, mlp = count(b, h, q, kv, f, heads, sizes.head_dim)
    if family_of(shape.config).has("q_layernorm.weight"):
        attention += b * (3 * q + 1.5 * kv + q + kv) if layers == "portable" else b * (q + kv / 2)
    one_layer = norm + attention + mlp
    # Recomputed attention keeps q, k, v as they come instead of padded, and neither its output nor its sums.
    selective = one_layer + b * (2 * q + 1.5 * kv) - (b * (2 * q + kv) + SINGLE * heads)
    layer = {"none": one_layer, "full": b * h, "selective": selective}[recompute]
    whole = sizes.hidden  # the heads gather what sequence parallelism has divided
    upcast = SINGLE - b  # norms compute in float32, and keep what they made of a bf16 input
    final_norm = h * (3 * b + 2 * upcast)
    if critic:
        head, fixed = final_norm + h * SINGLE + SINGLE, 0.0
    else:
        # A chunk's logits are there while the next one's are made: logits and their exponentials forward, their gradient backward.
        chunk, several = min(chunk, vocab_shard_size), vocab_shard_size > chunk
        forward = chunk * (3 if several else 2) * SINGLE
        backward = whole * SINGLE + chunk * (2 if several else 1) * SINGLE
        gathered = whole * b if sequence_parallel and tp > 1 else 0.0
        head, fixed = (
            final_norm + whole * b - h * b + gathered + max(forward, backward),
            float(vocab_shard_size * sizes.hidden * b),
        )
    work = b * (2 * f + h)
    forward_layer = b * (h + q + kv + 5 * f)
    return Activations(b * h, layer, one_layer, work, head, fixed, forward_layer, recompute)


def _portable(
    b: int, h: float, q: float, kv: float, f: float, heads: float, head_dim: int
) -> tuple[float, float, float]:
    """(norms, attention, feed-forward). Norms: input, normalised input (both float32) and output, twice. Attention: padded q, k, v and its
    output, sums; output once more as the projection's input; cosine and sine, for q and for k. Feed-forward: gate and up, silu, the up
    part again, their product."""
    norms = 2 * (2 * SINGLE * h + b * h) + 2 * SINGLE
    return norms, b * (2 * q + kv) + SINGLE * heads + b * q + 4 * b * head_dim, 5 * b * f


def _te(
    b: int, h: float, q: float, kv: float, f: float, heads: float, head_dim: int
) -> tuple[float, float, float]:
    """(norms, attention, feed-forward). Fused norm and linear: input, output, statistics, twice; the residual's masks. Attention: q, k, v
    as they come, q and k rotated, output, sums. Feed-forward: gate and up, their product."""
    return (
        2 * (2 * b * h + 2 * SINGLE) + 2 * h,
        b * (q + kv) + b * (q + kv / 2) + b * q + SINGLE * heads,
        3 * b * f,
    )


@dataclass(frozen=True)
class Device:
    """memory: bytes; tflops: dense bf16; memory_speed, host_speed: GB/s of its own memory, and to and from the host, in one direction."""

    name: str
    memory: float
    tflops: float
    memory_speed: float
    host_speed: float


# Data sheets: H100 SXM5, H200 SXM, H800 SXM, A100 SXM4 80 GB. What nvidia-smi shows is a little less than the round number.
DEVICES = {
    "H100": Device("H100", 79.2 * GIB, 989.0, 3350.0, 55.0),
    "H200": Device("H200", 139.8 * GIB, 989.0, 4800.0, 55.0),
    "H800": Device("H800", 79.2 * GIB, 989.0, 3350.0, 55.0),
    "A100": Device("A100", 79.2 * GIB, 312.0, 2039.0, 25.0),
}


def device_of(cluster: ClusterConfig, measured: float | None = None) -> Device:
    """The GPU that `cluster` describes: one of the table by name, with the figures that it states itself. measured: bytes of memory
    that a real one was found to have."""
    known = DEVICES.get(cluster.gpu)
    wanted = {
        "gpu_memory": cluster.gpu_memory and cluster.gpu_memory * GIB,
        "gpu_tflops": cluster.gpu_tflops,
        "gpu_memory_speed": cluster.gpu_memory_speed,
        "host_speed": cluster.host_speed,
    }
    table = (known.memory, known.tflops, known.memory_speed, known.host_speed) if known else (None,) * 4
    figures = {
        key: given if given is not None else default
        for (key, given), default in zip(wanted.items(), table, strict=True)
    }
    missing = [f"cluster.{key}" for key, value in figures.items() if value is None]
    if missing:
        raise ConfigError(
            f"cluster.gpu: {cluster.gpu} is not in the table ({', '.join(DEVICES)}): set {', '.join(missing)} as well"
        )
    memory, tflops, memory_speed, host_speed = (float(value or 0.0) for value in figures.values())
    return Device(cluster.gpu, measured or memory, tflops, memory_speed, host_speed)
