"""The papers' formulas as loops over Python floats (float64), token by token, and the ragged batches that
they are compared on.

Nothing here is shared with megarl.algorithms, so that an error there cannot be repeated here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from megarl.data.experience import Experience


@dataclass
class Batch:
    """An Experience whose columns are float64, and its spans: (first response token, end) of each
    sequence."""

    experience: Experience
    spans: list[tuple[int, int]]
    include: Tensor

    @property
    def total(self) -> int:
        return self.experience.num_tokens


def make_batch(shapes: list[tuple[int, int]], seed: int, include: list[bool] | None = None) -> Batch:
    """shapes: (prompt, response) tokens. Columns are random; a third of the log-ratios is exactly 0, as in a
    first update."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return torch.randn(total, generator=generator, dtype=torch.float64) * scale + shift

    total = sum(p + r for p, r in shapes)
    logprobs = -normal(1.5).abs()
    moved = (torch.rand(total, generator=generator) > 1 / 3).double()
    columns = {
        "logprobs": logprobs,
        "old_logprobs": logprobs - normal(0.4) * moved,
        "ref_logprobs": logprobs - normal(0.4),
        "advantages": normal(),
        "rewards": normal(),
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
        "entropy": normal().abs(),
    }
    experience = Experience.build([[1] * p for p, _ in shapes], [[2] * r for _, r in shapes])
    for name, column in columns.items():
        experience[name] = column
    ends = experience.cu_seqlens[1:].tolist()
    spans = [(end - r, end) for end, (_, r) in zip(ends, shapes, strict=True)]
    flags = include if include is not None else (torch.rand(len(shapes), generator=generator) > 0.5).tolist()
    return Batch(experience, spans, torch.tensor(flags, dtype=torch.bool))


@st.composite
def batches(draw: st.DrawFn, longest: int = 24) -> Batch:
    """1 to 7 sequences with prompts of 1-5 tokens and responses of 1 to `longest`; any subset of them is
    included."""
    n = draw(st.integers(1, 7))
    shapes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, longest)), min_size=n, max_size=n))
    include = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return make_batch(shapes, draw(st.integers(0, 2**31)), include)


def loop_gae(
    rewards: list[float], values: list[float], spans: list[tuple[int, int]], lams: list[float], gamma: float
) -> list[float]:
    """VAPO eq. 3 as its recurrence: A_t = delta_t + gamma lambda A_{t+1}, delta_t = R_t + gamma V_{t+1} -
    V_t."""
    out = [0.0] * len(values)
    for (start, end), lam in zip(spans, lams, strict=True):
        for t in range(end - 1, start - 1, -1):
            last = t == end - 1
            delta = rewards[t] + (0.0 if last else gamma * values[t + 1]) - values[t]
            out[t] = delta + (0.0 if last else gamma * lam * out[t + 1])
    return out


def sum_gae(
    rewards: list[float], values: list[float], spans: list[tuple[int, int]], lams: list[float], gamma: float
) -> list[float]:
    """VAPO eq. 3 as its sum: A_t = sum_l (gamma lambda)^l delta_{t+l}."""
    out = [0.0] * len(values)
    for (start, end), lam in zip(spans, lams, strict=True):
        deltas = [
            rewards[t] + (gamma * values[t + 1] if t + 1 < end else 0.0) - values[t]
            for t in range(start, end)
        ]
        for t in range(start, end):
            out[t] = math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t - start :]))
    return out


def loop_weights(batch: Batch, aggregation: str, include: list[bool]) -> list[float]:
    """1/N (VAPO eq. 7) or 1/(G |o_i|) (eq. 6) on the included responses."""
    kept = [span for span, flag in zip(batch.spans, include, strict=True) if flag]
    tokens = sum(end - start for start, end in kept)
    out = [0.0] * batch.total
    for start, end in kept:
        for t in range(start, end):
            out[t] = 1.0 / tokens if aggregation == "token" else 1.0 / ((end - start) * len(kept))
    return out


@dataclass
class Term:
    """A loss, its gradient by the new quantity at each token, and the size sum_t |w_t l_t| against which
    errors are measured."""

    loss: float
    gradient: list[float]
    size: float


def collect(weights: list[float], values: list[tuple[float, float]]) -> Term:
    """`values`: (loss, derivative) of each token."""
    terms = [w * loss for w, (loss, _) in zip(weights, values, strict=True)]
    gradient = [w * slope for w, (_, slope) in zip(weights, values, strict=True)]
    return Term(math.fsum(terms), gradient, math.fsum(map(abs, terms)))


def loop_policy(batch: Batch, weights: list[float], low: float, high: float) -> tuple[Term, dict[str, float]]:
    """DAPO eq. 8: -min(r A, clip(r, 1-low, 1+high) A), and the statistics."""
    x = {k: batch.experience[k].tolist() for k in ("logprobs", "old_logprobs", "advantages", "entropy")}
    means = ["clip_fraction_low", "clip_fraction_high", "approx_kl", "mean_prob", "entropy"]
    values, stats = [], dict.fromkeys(["tokens", *means, "clip_prob_high"], 0.0)
    for w, new, old, a, h in zip(
        weights, x["logprobs"], x["old_logprobs"], x["advantages"], x["entropy"], strict=True
    ):
        r = math.exp(new - old)
        clipped = min(max(r, 1 - low), 1 + high)
        active = clipped * a < r * a
        values.append((-clipped * a, 0.0) if active else (-r * a, -r * a))
        if w > 0:
            stats["tokens"] += 1
            stats["clip_fraction_low"] += active and r < 1
            stats["clip_fraction_high"] += active and r > 1
            stats["clip_prob_high"] += math.exp(new) if active and r > 1 else 0.0
            stats["approx_kl"] += r - 1 - (new - old)
            stats["mean_prob"] += math.exp(new)
            stats["entropy"] += h
    return collect(weights, values), stats


def loop_nll(batch: Batch, weights: list[float]) -> Term:
    """VAPO eq. 9."""
    return collect(weights, [(-new, -1.0) for new in batch.experience["logprobs"].tolist()])


def loop_kl(batch: Batch, weights: list[float]) -> Term:
    """GRPO's estimate: q - log q - 1, q = pi_ref / pi."""
    pairs = zip(batch.experience["logprobs"].tolist(), batch.experience["ref_logprobs"].tolist(), strict=True)
    return collect(
        weights, [(math.exp(ref - new) - (ref - new) - 1, 1 - math.exp(ref - new)) for new, ref in pairs]
    )


def loop_value(batch: Batch, weights: list[float], clip: float) -> tuple[Term, float]:
    """Half the squared error, or the larger one of it and the clipped value's; and the number of clipped
    tokens."""
    x = [batch.experience[k].tolist() for k in ("values", "old_values", "returns")]
    values, clipped_tokens = [], 0
    for w, (v, old, target) in zip(weights, zip(*x, strict=True), strict=True):
        plain, bounded = 0.5 * (v - target) ** 2, 0.5 * (min(max(v, old - clip), old + clip) - target) ** 2
        clipped = clip > 0 and bounded > plain
        clipped_tokens += clipped and w > 0
        values.append((bounded, 0.0) if clipped else (plain, v - target))
    return collect(weights, values), float(clipped_tokens)
