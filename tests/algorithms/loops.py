"""The papers' formulas as loops over Python floats (float64), token by token, and ragged test batches.

megarl.algorithms is not used here, so an error there cannot be repeated here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from megarl.data.batch import TrainBatch


@dataclass
class Batch:
    """A TrainBatch with float64 columns; spans: (first response token, end) of each sequence."""

    experience: TrainBatch
    spans: list[tuple[int, int]]
    include: Tensor

    @property
    def total(self) -> int:
        return self.experience.num_tokens


def make_batch(shapes: list[tuple[int, int]], seed: int, include: list[bool] | None = None) -> Batch:
    """Return a batch with random columns; a third of the log-ratios is exactly 0, as in a first update.

    Args:
        shapes: (prompt, response) tokens of each sequence.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return torch.randn(total, generator=generator, dtype=torch.float64) * scale + shift

    total = sum(p + r for p, r in shapes)
    logprobs = -normal(1.5).abs()
    moved = (torch.rand(total, generator=generator) > 1 / 3).double()
    columns = {
        "logprobs": logprobs,
        "old_logprobs": (logprobs - normal(0.4) * moved).clamp(max=-1e-3),  # probabilities below 1
        "ref_logprobs": logprobs - normal(0.4),
        "advantages": normal(),
        "rewards": normal(),
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
        "entropy": normal().abs(),
        "successes": (normal() > 0).double(),
    }
    experience = TrainBatch.build([[1] * p for p, _ in shapes], [[2] * r for _, r in shapes])
    for name, column in columns.items():
        experience[name] = column
    ends = experience.cu_seqlens[1:].tolist()
    spans = [(end - r, end) for end, (_, r) in zip(ends, shapes, strict=True)]
    flags = include if include is not None else (torch.rand(len(shapes), generator=generator) > 0.5).tolist()
    experience["selected"] = torch.rand(total, generator=generator) < 0.3
    # Log-probs of three tokens at each position, the policy's and a teacher's; every third sequence has none.
    experience["several"] = torch.randn(total, 6, generator=generator, dtype=torch.float64).log_softmax(-1)[
        :, :3
    ]
    of_teacher = torch.randn(total, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    untaught = experience.sequence_ids % 3 == 2
    experience["teacher_logprobs"] = of_teacher[:, :3].masked_fill(untaught[:, None], -torch.inf)
    # Three further tokens get a part of the remaining probability; the first may be the sampled one.
    several, same = normal().new_zeros(total, 4).normal_(generator=generator), torch.arange(total) % 4 == 0
    for name, moved_by in (("logprobs", 0.0), ("old_logprobs", 0.3)):
        drawn = several + moved_by * torch.randn(total, 4, generator=generator, dtype=torch.float64)
        left = torch.log1p(-columns[name].clamp(max=-1e-6).exp())
        further = (left[:, None] + drawn.log_softmax(-1))[:, :3]
        further[same, 0] = torch.finfo(torch.float32).min
        experience[f"further_{name}"] = further
    return Batch(experience, spans, torch.tensor(flags, dtype=torch.bool))


@st.composite
def batches(draw: st.DrawFn, longest: int = 24) -> Batch:
    """Generate 1 to 7 sequences, of which any subset is included.

    Prompts have 1-5 tokens and responses 1 to `longest`.
    """
    n = draw(st.integers(1, 7))
    shapes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, longest)), min_size=n, max_size=n))
    include = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return make_batch(shapes, draw(st.integers(0, 2**31)), include)


def loop_gae(
    rewards: list[float], values: list[float], spans: list[tuple[int, int]], lams: list[float], gamma: float
) -> list[float]:
    """VAPO eq. 3 as a recurrence: A_t = delta_t + gamma lambda A_{t+1}.

    delta_t = R_t + gamma V_{t+1} - V_t.
    """
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
    """VAPO eq. 3 as a sum: A_t = sum_l (gamma lambda)^l delta_{t+l}."""
    out = [0.0] * len(values)
    for (start, end), lam in zip(spans, lams, strict=True):
        deltas = [
            rewards[t] + (gamma * values[t + 1] if t + 1 < end else 0.0) - values[t]
            for t in range(start, end)
        ]
        for t in range(start, end):
            out[t] = math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t - start :]))
    return out


def sum_extended_gae(
    rewards: list[float],
    values: list[float],
    windows: list[tuple[int, int]],
    unfinished: list[bool],
    lams: list[float],
    gamma: float,
    tail: int,
) -> list[float]:
    """T-PPO's EGAE as a sum over the window, with l its end.

    A_t = delta_t + gamma lambda delta_{t+1} + ... + (gamma lambda)^(l-1-t) delta_{l-1}.
    For an unfinished response V(s_l) = V(s_{l-1}), and its last `tail` tokens have no advantage.
    """
    out = [0.0] * len(values)
    for (start, end), goes_on, lam in zip(windows, unfinished, lams, strict=True):
        after = [*values[start + 1 : end], values[end - 1] if goes_on else 0.0]
        deltas = [
            r + gamma * v - w for r, v, w in zip(rewards[start:end], after, values[start:end], strict=True)
        ]
        for t in range(start, end - tail * goes_on):
            out[t] = math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t - start :]))
    return out


def loop_weights(batch: Batch, aggregation: str, include: list[bool], constant: int = 1) -> list[float]:
    """1/N (VAPO eq. 7), 1/(G |o_i|) (eq. 6) or 1/(G constant) (Dr. GRPO) for the included responses."""
    kept = [span for span, flag in zip(batch.spans, include, strict=True) if flag]
    tokens = sum(end - start for start, end in kept)
    out = [0.0] * batch.total
    for start, end in kept:
        for t in range(start, end):
            divisor = {"token": tokens, "sample": (end - start) * len(kept), "constant": constant * len(kept)}
            out[t] = 1.0 / divisor[aggregation]
    return out


@dataclass
class Term:
    """A loss and its gradient.

    gradient: by the new quantity or quantities at each token.
    size: sum_t |w_t l_t|, the scale of the allowed error.
    """

    loss: float
    gradient: list[Any]
    size: float


def collect(weights: list[float], values: list[tuple[float, float]]) -> Term:
    """Sum weighted losses; `values`: (loss, derivative) of each token."""
    terms = [w * loss for w, (loss, _) in zip(weights, values, strict=True)]
    gradient = [w * slope for w, (_, slope) in zip(weights, values, strict=True)]
    return Term(math.fsum(terms), gradient, math.fsum(map(abs, terms)))


# Options of the surrogates that have any, in the range of make_batch's numbers.
OPTIONS = {
    "dppo_tv": {"ratio_cap": 1.3},
    "dppo_kl": {"ratio_cap": 1.3},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.6},
    "kl_cov": {"kl_weight": 0.7},
    "fipo": {"half_life": 3.0, "low": 0.7, "high": 1.3, "limit": 1.6},
}


def loop_policy(
    batch: Batch,
    weights: list[float],
    low: float,
    high: float,
    kind: str = "ppo",
    dual: float = 0.0,
    further: bool = False,
) -> tuple[Term, dict[str, float]]:
    """DAPO eq. 8: -min(r A, clip(r, 1-low, 1+high) A), and the statistics; or another surrogate's formula.

    gspo: GSPO-token, arXiv 2507.18071 section 4.3. cispo: arXiv 2506.13585 eq. 4. masked: SAO. ppo with dual
    clip: arXiv 1912.09729 eq. 5. dppo_tv, dppo_kl: arXiv 2602.04879, with or without further tokens.
    sapo: arXiv 2511.20347. clip_cov, kl_cov: arXiv 2505.22617, with the given selected tokens.
    fipo: arXiv 2603.19835.
    """
    columns = ("logprobs", "old_logprobs", "advantages", "entropy", "selected")
    columns += ("further_logprobs", "further_old_logprobs")
    x = {k: batch.experience[k].tolist() for k in columns}
    names = ["tokens", "clip_fraction_low", "clip_fraction_high", "approx_kl", "mean_prob", "entropy"]
    more = {"fipo": ["future_factor"], "clip_cov": ["selected"], "kl_cov": ["selected"]}.get(kind, [])
    stats = dict.fromkeys([*names, "clip_prob_high", *more] + ["clip_fraction_dual"] * (dual > 0), 0.0)
    o = OPTIONS.get(kind, {})
    loss, slope = [0.0] * batch.total, [0.0] * batch.total  # slope: derivative of the whole weighted loss
    for start, end in batch.spans:
        counted = [t for t in range(start, end) if weights[t] > 0]
        log_ratios = {t: x["logprobs"][t] - x["old_logprobs"][t] for t in counted}
        mean = math.fsum(log_ratios.values()) / max(len(counted), 1)
        for t in counted:
            a, new, w = x["advantages"][t], x["logprobs"][t], weights[t]
            r = math.exp(mean if kind == "gspo" else log_ratios[t])
            clipped = min(max(r, 1 - low), 1 + high)
            outside = r != clipped
            if kind == "cispo":
                loss[t], d_new = -clipped * a * new, -clipped * a
            elif kind == "masked":
                loss[t], d_new = (0.0, 0.0) if outside else (-r * a, -r * a)
            elif kind in ("dppo_tv", "dppo_kl"):
                ps, mus = [math.exp(new)], [math.exp(x["old_logprobs"][t])]
                if further:
                    ps += [math.exp(y) for y in x["further_logprobs"][t] if y > -1e30]
                    mus += [math.exp(y) for y in x["further_old_logprobs"][t] if y > -1e30]
                pairs = list(zip([*ps, 1 - math.fsum(ps)], [*mus, 1 - math.fsum(mus)], strict=True))
                divergence = math.fsum(abs(p - mu) for p, mu in pairs) / 2
                if kind == "dppo_kl":
                    divergence = math.fsum(mu * math.log(mu / p) for p, mu in pairs)
                outside = (
                    divergence > high and ps[0] > mus[0] if a > 0 else divergence > low and ps[0] < mus[0]
                )
                capped = min(r, o["ratio_cap"])
                loss[t], d_new = (0.0, 0.0) if outside else (-capped * a * new, -capped * a)
            elif kind == "sapo":
                tau = o["tau_positive"] if a > 0 else o["tau_negative"]
                gate = 1 / (1 + math.exp(-tau * (r - 1)))
                loss[t], d_new = -4 / tau * gate * a, -4 * gate * (1 - gate) * r * a
            elif kind == "kl_cov":
                loss[t], d_new = -r * a, -r * a
                if x["selected"][t]:
                    stats["selected"] += 1
                    loss[t] += o["kl_weight"] * abs(log_ratios[t])
                    d_new += o["kl_weight"] * ((log_ratios[t] > 0) - (log_ratios[t] < 0))
            else:
                if kind == "fipo":
                    ahead = [
                        0.5 ** ((k - t) / o["half_life"]) * log_ratios[k]
                        for k in counted
                        if k >= t and math.exp(log_ratios[k]) <= o["limit"]
                    ]
                    factor = min(max(math.exp(math.fsum(ahead)), o["low"]), o["high"])
                    if a < 0 and r > o["limit"]:
                        factor = min(max(factor, 0.8), 1.0)
                    stats["future_factor"] += factor
                    a *= factor
                outside = clipped * a < r * a
                loss[t], d_new = (-clipped * a, 0.0) if outside else (-r * a, -r * a)
                if dual and a < 0 and -r * a > dual * -a:
                    loss[t], d_new = dual * -a, 0.0
                    stats["clip_fraction_dual"] += 1
                if kind == "clip_cov" and x["selected"][t]:
                    loss[t], d_new = 0.0, 0.0
                    stats["selected"] += 1
            slope[t] = w * d_new
            stats["tokens"] += 1
            stats["clip_fraction_low"] += outside and r < 1
            stats["clip_fraction_high"] += outside and r > 1
            stats["clip_prob_high"] += math.exp(new) if outside and r > 1 else 0.0
            stats["approx_kl"] += math.exp(log_ratios[t]) - 1 - log_ratios[t]
            stats["mean_prob"] += math.exp(new)
            stats["entropy"] += x["entropy"][t]
    terms = [w * value for w, value in zip(weights, loss, strict=True)]
    return Term(math.fsum(terms), slope, math.fsum(map(abs, terms))), stats


def loop_entropy(batch: Batch, weights: list[float]) -> Term:
    """-H, which a step minimises."""
    return collect(weights, [(-entropy, -1.0) for entropy in batch.experience["entropy"].tolist()])


def loop_nll(batch: Batch, weights: list[float]) -> Term:
    """VAPO eq. 9."""
    return collect(weights, [(-new, -1.0) for new in batch.experience["logprobs"].tolist()])


def loop_kl(batch: Batch, weights: list[float], estimator: str = "k3") -> Term:
    """GRPO's estimate (k3): q - log q - 1, q = pi_ref / pi; or OpenRLHF's k2: (log q)^2 / 2."""
    pairs = zip(batch.experience["logprobs"].tolist(), batch.experience["ref_logprobs"].tolist(), strict=True)
    if estimator == "k2":
        return collect(weights, [((new - ref) ** 2 / 2, new - ref) for new, ref in pairs])
    return collect(
        weights, [(math.exp(ref - new) - (ref - new) - 1, 1 - math.exp(ref - new)) for new, ref in pairs]
    )


def loop_teacher(batch: Batch, weights: list[float]) -> tuple[Term, dict[str, float]]:
    """sum_i q_i (log q_i - log pi_i) over a few tokens i per position plus all others as one; statistics."""
    terms, sizes, gradient, taught, mass = [], [], [], 0, 0.0
    several, of_teacher = (batch.experience[name].tolist() for name in ("several", "teacher_logprobs"))
    for w, own, theirs in zip(weights, several, of_teacher, strict=True):
        q, p = [math.exp(x) for x in theirs], [math.exp(x) for x in own]
        if theirs[0] == -math.inf:
            gaps, slope = [0.0], [0.0] * len(own)
        else:
            q_rest, p_rest = 1 - math.fsum(q), 1 - math.fsum(p)
            pairs = zip([*q, q_rest], [*p, p_rest], strict=True)
            gaps = [chance * math.log(chance / other) for chance, other in pairs]
            slope = [-chance + q_rest * other / p_rest for chance, other in zip(q, p, strict=True)]
        terms.append(w * math.fsum(gaps))
        sizes.append(w * math.fsum(map(abs, gaps)))
        gradient.append([w * one for one in slope])
        taught += w > 0 and theirs[0] != -math.inf
        mass += math.fsum(q) * (w > 0)
    sums = {"tokens": float(sum(w > 0 for w in weights)), "taught": float(taught), "teacher_mass": mass}
    return Term(math.fsum(terms), gradient, math.fsum(sizes)), sums


def loop_value(batch: Batch, weights: list[float], clip: float) -> tuple[Term, float]:
    """Return half the squared error, or the clipped value's if larger, and the number of clipped tokens."""
    x = [batch.experience[k].tolist() for k in ("values", "old_values", "returns")]
    values, clipped_tokens = [], 0
    for w, (v, old, target) in zip(weights, zip(*x, strict=True), strict=True):
        plain, bounded = 0.5 * (v - target) ** 2, 0.5 * (min(max(v, old - clip), old + clip) - target) ** 2
        clipped = clip > 0 and bounded > plain
        clipped_tokens += clipped and w > 0
        values.append((bounded, 0.0) if clipped else (plain, v - target))
    return collect(weights, values), float(clipped_tokens)


def loop_chance(batch: Batch, weights: list[float]) -> Term:
    """SPPO's cross-entropy, -(R log p + (1 - R) log(1 - p)) with p = sigmoid(V); its gradient is p - R."""
    values, outcomes = batch.experience["values"].tolist(), batch.experience["successes"].tolist()
    terms, gradient = [], []
    for value, outcome, weight in zip(values, outcomes, weights, strict=True):
        chance = 1 / (1 + math.exp(-value))
        terms.append(-weight * math.log(chance if outcome else 1 - chance))
        gradient.append(weight * (chance - outcome))
    return Term(math.fsum(terms), gradient, math.fsum(map(abs, terms)))
