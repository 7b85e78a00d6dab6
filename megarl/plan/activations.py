"""Bytes of activations: what a layer keeps for its backward pass, what a head works with, and the most at any time.

`portable` is counted tensor by tensor and held against measurement (tests/plan/test_activations.py). `te` is derived from which tensors
Transformer Engine's fused layers and FlashAttention save; it has not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.plan.sizes import Shape
from megarl.weights.families import family_of

Recompute = Literal["none", "selective", "full"]
SINGLE = 4  # bytes of a float32


@dataclass(frozen=True)
class Activations:
    """Of one model at one tensor-parallel size. All figures but `head_fixed` are bytes a token.

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

    def looking(self, tokens: float, last: bool) -> float:
        """The most in a forward pass alone."""
        return tokens * (max(self.forward, self.head) if last else self.forward)


def activations(
    shape: Shape, tp: int, *, recompute: Recompute, chunk: int, layers: str, sequence_parallel: bool, critic: bool = False, words: int = 0
) -> Activations:
    """chunk: words of logits that exist at once; words: of this rank's part of the vocabulary."""
    sizes, b = shape.sizes, shape.itemsize
    split = tp if sequence_parallel else 1
    h, heads = sizes.hidden / split, sizes.heads / tp
    q, kv = sizes.q / tp, 2 * sizes.kv / tp
    f, f_work = _columns(shape, tp)
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
        chunk, several = min(chunk, words), words > chunk
        forward = chunk * (3 if several else 2) * SINGLE
        backward = whole * SINGLE + chunk * (2 if several else 1) * SINGLE
        gathered = whole * b if sequence_parallel and tp > 1 else 0.0
        head, fixed = final_norm + whole * b - h * b + gathered + max(forward, backward), float(words * sizes.hidden * b)
    work = b * (2 * f_work + h)
    looking = b * (h + q + kv + 5 * f_work)
    return Activations(b * h, layer, one_layer, work, head, fixed, looking, recompute)


def _columns(shape: Shape, tp: int) -> tuple[float, float]:
    """Feed-forward columns that a token has on a rank, twice: kept, and in the part whose backward pass runs. A token's chosen experts are
    on other ranks, but as many tokens come from there (ep does not change it; an uneven router does)."""
    sizes = shape.sizes
    if not sizes.experts:
        return sizes.ffn / tp, sizes.ffn / tp
    chosen = shape.config["num_experts_per_tok"] * sizes.expert_ffn / tp
    return chosen, chosen


def _portable(b: int, h: float, q: float, kv: float, f: float, heads: float, head_dim: int) -> tuple[float, float, float]:
    """(norms, attention, feed-forward). Norms: input, normalised input (both float32) and output, twice. Attention: padded q, k, v and its
    output, sums; output once more as the projection's input; cosine and sine, for q and for k. Feed-forward: gate and up, silu, the up
    part again, their product."""
    norms = 2 * (2 * SINGLE * h + b * h) + 2 * SINGLE
    return norms, b * (2 * q + kv) + SINGLE * heads + b * q + 4 * b * head_dim, 5 * b * f


def _te(b: int, h: float, q: float, kv: float, f: float, heads: float, head_dim: int) -> tuple[float, float, float]:
    """(norms, attention, feed-forward). Fused norm and linear: input, output, statistics, twice; the residual's masks. Attention: q, k, v
    as they come, q and k rotated, output, sums. Feed-forward: gate and up, their product."""
    return 2 * (2 * b * h + 2 * SINGLE) + 2 * h, b * (q + kv) + b * (q + kv / 2) + b * q + SINGLE * heads, 3 * b * f
