"""How many parameters a rank holds, by kind, from the family's table: exact, and quick enough to search over layouts. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from megarl.parallel.layout import Layout, padded_vocab
from megarl.weights.families import EMBEDDING, FINAL_NORM, OUTPUT, Pair, Sizes, family_of, is_tied
from megarl.weights.layout import sglang_shards

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
        """What a rank of this pipeline stage holds; all tensor-parallel ranks hold the same, padding of the vocabulary included."""
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
        shared = dense * layers + (_local(EMBEDDING, sizes, tp) if first else 0) + (_local(FINAL_NORM, sizes, tp) if last else 0)
        if last and not critic and not (tied and first):
            shared += _local(OUTPUT, sizes, tp)
        return Held(shared, experts * layers, sizes.hidden if critic and last else 0)

    @cached_property
    def parameters(self) -> int:
        """Of the whole model, without padding."""
        return self.held(Layout(), 0).all

    @cached_property
    def active(self) -> int:
        """Parameters of matrices that a token goes through, the output layer included and the embedding left out."""
        sizes = self.sizes
        attention = sizes.hidden * (2 * sizes.q + 2 * sizes.kv)
        chosen = int(self.config.get("num_experts_per_tok", 0)) if sizes.experts else 0
        mlp = sizes.hidden * (sizes.experts + 3 * sizes.expert_ffn * chosen) if chosen else 3 * sizes.hidden * sizes.ffn
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
        matrix = len(shard.shape) == 2 and ".layers." in name and "router" not in name and ".gate.weight" not in name
        # One float8 an element and one float32 a block of 128 x 128.
        sizes.append(prod(shard.shape) * (1 + 4 / 128**2 if weights == "fp8_block" and matrix else shape.itemsize))
    return tuple(sizes)


def _local(pair: Pair, sizes: Sizes, tp: int) -> int:
    """Elements of one tensor-parallel rank's part of a pair."""
    shapes = [sizes.shape(dims) for _, dims in pair.hf]
    if pair.operation == "vocabulary":
        ((vocab, hidden),) = shapes
        return padded_vocab(vocab, tp) // tp * hidden
    whole = sum(prod(shape) for shape in shapes)
    return whole if pair.operation == "replicated" else whole // tp
