"""Loss terms and token weights. All denominators are computed here.

A term is sum_t w_t * l_t, with denominators of the whole mini-batch. Statistics are sums over tokens. So both
add up over micro-batches and data-parallel ranks.

Unless noted, tensors are [T], and tokens of weight 0 do not count."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Stats = dict[str, Tensor]
Aggregation = Literal["token", "sample", "constant"]
KLEstimator = Literal["k2", "k3"]

# Statistic -> the statistic that counts its tokens, if not `tokens`.
COUNTED_BY = {"clip_prob_high": "clip_fraction_high", "teacher_mass": "taught", "teacher_kl": "taught"}

# Bound of log-ratios, against overflow. e^20 = 5e8 is outside any clip range.
LOG_RATIO_LIMIT = 20.0

# Lower bound of the probability outside a teacher's top k. Float32 log-probs do not resolve less.
LEAST_REST = 1e-6


def token_weights(
    lengths: Tensor,
    aggregation: Aggregation,
    mini_batches: Tensor | None = None,
    include: Tensor | None = None,
    constant: int = 1,
) -> Tensor:
    """Return the weight of each response's tokens, float32 [n]; 0 if uncounted.

    With N counted responses of L tokens in all in the mini-batch:

    token     1 / L: tokens count equally (DAPO eq. 8 and 12, VAPO eq. 7)
    sample    1 / (N * tokens of the response): responses count equally (VAPO eq. 6)
    constant  1 / (N * `constant`): a response counts by its length. Dr. GRPO (arXiv 2503.20783) takes the
              length limit

    Args:
        lengths: response tokens, int64 [n], of the whole step, not of one rank; 0 is uncounted
        mini_batches: int64 [n]; None: a single one
        include: bool [n], responses to count; None: all"""
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation: must be token, sample or constant (got {aggregation!r})")
    lengths = lengths if include is None else torch.where(include, lengths, 0)
    counted = lengths > 0
    ids = torch.zeros_like(lengths) if mini_batches is None else mini_batches
    totals = lengths.new_zeros(int(ids.max()) + 1 if ids.numel() else 0)
    totals.index_add_(0, ids, lengths if aggregation == "token" else counted.long())
    denominators = totals[ids]
    if aggregation != "token":
        denominators = denominators * (lengths if aggregation == "sample" else constant)
    return torch.where(counted, 1.0 / denominators.double(), 0.0).float()


def log_ratio(new: Tensor, old: Tensor, counted: Tensor) -> Tensor:
    """Return new - old in float64, clamped; 0 without gradient on uncounted tokens, even for NaN."""
    difference = torch.where(counted, new.double(), 0.0) - torch.where(counted, old.double(), 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _weighted_sum(terms: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """Sum in float64. Return 0-dim in the dtype of `like`, at least float32."""
    return (terms * weights.double()).sum().to(torch.promote_types(like.dtype, torch.float32))


def _sums(loss: Tensor, loss_name: str, **sums: Tensor) -> Stats:
    """Return detached copies: Megatron's schedule divides the loss in place."""
    prefix = loss_name.split("/")[0]
    stats = {loss_name: loss, **{f"{prefix}/{name}": value for name, value in sums.items()}}
    return {name: value.detach().double().clone() for name, value in stats.items()}


class Tokens(NamedTuple):
    """The tokens of a policy loss, float64 [T]; 0 if uncounted, except the ratio.

    ratio           r_t = pi / pi_old
    selected        bool [T], by the method's `selector`
    top_k_logprobs  log pi and log pi_old of pi_old's top-k tokens at each position, [T, k] each
    log_ratio       log r_t, clamped, [T]
    counted         bool [T]
    sequence_ids    int [T]
    dual_clip       c > 1: J_t >= c A_t where A_t < 0 (arXiv 1912.09729, eq. 5); 0: off"""

    ratio: Tensor
    advantage: Tensor
    logprobs: Tensor
    clip_low: float
    clip_high: float
    old_logprobs: Tensor
    selected: Tensor | None = None
    top_k_logprobs: tuple[Tensor, Tensor] | None = None
    log_ratio: Tensor | None = None
    counted: Tensor | None = None
    sequence_ids: Tensor | None = None
    dual_clip: float = 0.0

    @property
    def low(self) -> float:
        """Lower end of the clip interval."""
        return 1.0 - self.clip_low

    @property
    def high(self) -> float:
        """Upper end of the clip interval."""
        return 1.0 + self.clip_high


class Objective(NamedTuple):
    """A surrogate's result.

    objective   J_t, float64 [T], to be maximised
    too_low     bool [T], tokens of clip_fraction_low
    too_high    bool [T], tokens of clip_fraction_high
    statistics  sums over tokens, for metrics policy/<name>; or over responses, if the name ends with
                _responses, with their number as `responses`"""

    objective: Tensor
    too_low: Tensor
    too_high: Tensor
    statistics: Mapping[str, Tensor] = MappingProxyType({})


# (tokens, **options) -> objective. config/methods.py has the table.
Surrogate = Callable[..., Objective]


def sum_by_sequence(columns: Tensor, sequence_ids: Tensor) -> Tensor:
    """Sum columns [k, T] over each sequence's tokens, [k, n].

    A micro-batch holds whole sequences, also under context parallelism, whose ranks share their log-probs."""
    count = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    return columns.new_zeros(len(columns), count).index_add(1, sequence_ids, columns)


def ppo(t: Tokens) -> Objective:
    """Return min(r_t A_t, clip(r_t) A_t) (DAPO eq. 8, VAPO eq. 8), optionally with the dual clip."""
    objective = torch.minimum(t.ratio * t.advantage, t.ratio.clamp(t.low, t.high) * t.advantage)
    too_low, too_high = (t.ratio < t.low) & (t.advantage < 0), (t.ratio > t.high) & (t.advantage > 0)
    if not t.dual_clip:
        return Objective(objective, too_low, too_high)
    lower_bound = torch.where(t.advantage < 0, t.dual_clip * t.advantage, -torch.inf)
    objective = torch.maximum(objective, lower_bound)
    return Objective(objective, too_low, too_high, {"clip_fraction_dual": (objective == lower_bound).sum()})


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    entropy: Tensor | None = None,
    *,
    surrogate: Surrogate = ppo,
    options: Mapping[str, float] | None = None,
    dual_clip: float = 0.0,
    sequence_ids: Tensor | None = None,
    selected: Tensor | None = None,
    top_k_logprobs: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Stats]:
    """Return sum_t w_t * -J_t and its statistics.

    The ratio has no gradient beyond e^20 and e^-20. approx_kl is the k3 estimate of KL(pi_old || pi),
    clip_prob_high the probability of tokens clipped from above (DAPO figure 3a).

    Args:
        old_logprobs, advantages: used without gradient
        clip_low, clip_high: of the interval [1 - clip_low, 1 + clip_high]
        entropy: only for the statistic
        surrogate, options: function for J_t, and its arguments
        dual_clip, sequence_ids, selected: as in `Tokens`
        top_k_logprobs: likewise; the least finite number where one is the sampled token"""
    counted = weights > 0
    difference = log_ratio(logprobs, old_logprobs.detach(), counted)
    logprob, old_logprob = (torch.where(counted, x.double(), 0.0) for x in (logprobs, old_logprobs.detach()))
    if top_k_logprobs is not None:
        top_k = [torch.where(counted[:, None], x.detach().double(), 0.0) for x in top_k_logprobs]
        top_k_logprobs = top_k[0], top_k[1]
    tokens = Tokens(
        ratio=difference.exp(),
        advantage=torch.where(counted, advantages.detach().double(), 0.0),
        logprobs=logprob,
        clip_low=clip_low,
        clip_high=clip_high,
        old_logprobs=old_logprob,
        selected=selected,
        top_k_logprobs=top_k_logprobs,
        log_ratio=difference,
        counted=counted,
        sequence_ids=sequence_ids,
        dual_clip=dual_clip,
    )
    result = surrogate(tokens, **(options or {}))
    loss = _weighted_sum(-result.objective, weights, logprobs)
    return loss, _sums(loss, "policy/loss", **_policy_statistics(tokens, result, logprobs, entropy))


@torch.no_grad()
def _policy_statistics(
    t: Tokens, result: Objective, logprobs: Tensor, entropy: Tensor | None
) -> dict[str, Tensor]:
    """Sum over the counted tokens."""
    assert t.counted is not None and t.log_ratio is not None
    too_high, difference = result.too_high & t.counted, t.log_ratio
    sums = {
        "tokens": t.counted.sum(),
        "clip_fraction_low": (result.too_low & t.counted).sum(),
        "clip_fraction_high": too_high.sum(),
        "clip_prob_high": torch.where(too_high, logprobs.double(), -torch.inf).exp().sum(),
        "approx_kl": (torch.expm1(difference) - difference).sum(),
        "mean_prob": torch.where(t.counted, logprobs.double(), -torch.inf).exp().sum(),
        **result.statistics,
    }
    if entropy is not None:
        sums["entropy"] = torch.where(t.counted, entropy.double(), 0.0).sum()
    return sums


def nll_loss(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Stats]:
    """Return sum_t w_t * -log pi_t (VAPO eq. 9), before the factor mu of eq. 10.

    weights: `token_weights` with the correct responses as `include`."""
    loss = _weighted_sum(-torch.where(weights > 0, logprobs.double(), 0.0), weights, logprobs)
    return loss, _sums(loss, "policy/nll_loss")


def kl_loss(
    logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, estimator: KLEstimator = "k3"
) -> tuple[Tensor, Stats]:
    """Return sum_t w_t k_t, an estimate of KL(pi || pi_ref), before the factor beta.

    With d = log pi - log pi_ref of the sampled token, and expectations on-policy:

    k2  d^2 / 2; expected gradient: that of KL(pi || pi_ref) (REINFORCE++ with baseline, OpenRLHF's
        compute_approx_kl)
    k3  exp(-d) - 1 + d (GRPO); expected value: KL(pi || pi_ref); expected gradient: that of KL(pi_ref || pi)

    k1, d itself, has the expected gradient 0."""
    difference = log_ratio(ref_logprobs.detach(), logprobs, weights > 0)
    terms = difference.square() / 2 if estimator == "k2" else torch.expm1(difference) - difference
    loss = _weighted_sum(terms, weights, logprobs)
    return loss, _sums(loss, "policy/kl_loss")


def top_k_loss(
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    weights: Tensor,
    alpha: float = 0.0,
    importance: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Return sum_t w_t D(q_t, pi_t) to a teacher q, over its top k tokens and the rest as one outcome.

    D is KL(q || pi) for alpha 0, KL(pi || q) for alpha 1. Between them it is
    alpha KL(q || m) + (1 - alpha) KL(pi || m), with m = alpha q + (1 - alpha) pi (SDPO, arXiv 2601.20802).

    Without the rest (verl's forward_kl_topk, unlike SDPO, arXiv 2601.20802) the minimum would put all
    probability on the k tokens.

    logprobs, teacher_logprobs: [T, k] of the same tokens; the teacher's are -inf where there is none.
    importance: [T], further factor of each term, without gradient."""
    counted = weights > 0
    taught = counted & ~(teacher_logprobs[:, 0] == -torch.inf)
    log_q, log_pi = (torch.where(taught[:, None], x.double(), 0.0) for x in (teacher_logprobs, logprobs))
    q = torch.where(taught[:, None], log_q.exp(), 0.0)
    q_rest = torch.where(taught, 1 - q.sum(-1), 0.0).clamp(min=0)
    # Rounding may leave less than LEAST_REST. Raise it to that, keeping its gradient.
    pi_rest = 1 - log_pi.exp().sum(-1)
    pi_rest = pi_rest + (LEAST_REST - pi_rest.detach()).clamp(min=0)
    if alpha == 0:
        terms = (q * (log_q - log_pi)).sum(-1)
        terms = terms + torch.xlogy(q_rest, q_rest) - q_rest * pi_rest.log()
    else:
        log_q = torch.cat([log_q, q_rest.clamp(min=LEAST_REST).log()[:, None]], 1)
        log_pi = torch.cat([log_pi, pi_rest.log()[:, None]], 1)
        terms = torch.where(taught, _divergence(log_pi, log_q, alpha), 0.0)
    if importance is not None:
        terms = torch.where(taught, importance.detach().double() * terms, 0.0)
    loss = _weighted_sum(terms, weights, logprobs)
    sums = {"tokens": counted.sum(), "taught": taught.sum(), "teacher_mass": q.sum()}
    return loss, _sums(loss, "policy/teacher_loss", **sums)


def _divergence(log_pi: Tensor, log_q: Tensor, alpha: float) -> Tensor:
    """Return D of `top_k_loss` [T] for alpha > 0. log_pi, log_q: all outcomes, [T, k + 1]"""
    if alpha == 1:
        return (log_pi.exp() * (log_pi - log_q)).sum(-1)
    log_mixture = torch.logaddexp(log_pi + math.log1p(-alpha), log_q + math.log(alpha))
    from_policy, from_teacher = ((x.exp() * (x - log_mixture)).sum(-1) for x in (log_pi, log_q))
    return (1 - alpha) * from_policy + alpha * from_teacher


def importance_weights(logprobs: Tensor, old_logprobs: Tensor, weights: Tensor, cap: float) -> Tensor:
    """Return min(pi / pi_old, cap), float64 [T], without gradient (SDPO's is_clip)."""
    return log_ratio(logprobs, old_logprobs, weights > 0).exp().clamp(max=cap).detach()


def sampled_teacher_loss(
    logprobs: Tensor, teacher_logprobs: Tensor, weights: Tensor, importance: Tensor
) -> tuple[Tensor, Stats]:
    """Return sum_t w_t c_t, an estimate of KL(pi_t || q_t) to a teacher q from the sampled token.

    c = importance (log pi - log q). The gradient is c times that of log pi, and its expectation on-policy is
    the gradient of the KL (SDPO, arXiv 2601.20802).

    teacher_logprobs: [T], -inf without a teacher."""
    counted = weights > 0
    taught = counted & (teacher_logprobs > -torch.inf)
    log_pi = torch.where(taught, logprobs.double(), 0.0)
    difference = log_ratio(logprobs, teacher_logprobs, taught).detach()
    terms = importance.detach().double() * difference * (1 + log_pi - log_pi.detach())
    loss = _weighted_sum(torch.where(taught, terms, 0.0), weights, logprobs)
    sums = {"tokens": counted.sum(), "taught": taught.sum(), "teacher_kl": difference.sum()}
    return loss, _sums(loss, "policy/teacher_loss", **sums)


def entropy_loss(entropy: Tensor, weights: Tensor) -> tuple[Tensor, Stats]:
    """Return sum_t w_t * -H(pi_t), before its factor."""
    loss = _weighted_sum(-torch.where(weights > 0, entropy.double(), 0.0), weights, entropy)
    return loss, _sums(loss, "policy/entropy_loss")


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float = 0.0
) -> tuple[Tensor, Stats]:
    """Return sum_t w_t * 1/2 (V_t - returns_t)^2.

    With clip > 0, a term is the larger of this and the same with V clamped to V_old +- clip (PPO).
    clip_fraction counts tokens whose clamped term is larger, which have no gradient."""
    counted = weights > 0
    value = torch.where(counted, values.double(), 0.0)
    target = torch.where(counted, returns.detach().double(), 0.0)
    errors = (value - target).square()
    is_clipped = torch.zeros_like(counted)
    if clip > 0:
        old_value = torch.where(counted, old_values.detach().double(), 0.0)
        clipped_errors = (torch.clamp(value, old_value - clip, old_value + clip) - target).square()
        is_clipped = clipped_errors > errors
        errors = torch.maximum(errors, clipped_errors)
    loss = _weighted_sum(0.5 * errors, weights, values)
    return loss, _sums(loss, "value/loss", tokens=counted.sum(), clip_fraction=is_clipped.sum())


def chance_loss(logits: Tensor, successes: Tensor, weights: Tensor) -> tuple[Tensor, Stats]:
    """Return sum_t w_t log(1 + exp((1 - 2 R_t) V_t)), the cross-entropy of sigmoid(V) to R in {0, 1}.

    SPPO (arXiv 2604.08865)."""
    counted = weights > 0
    value = torch.where(counted, logits.double(), 0.0)
    outcome = torch.where(counted, successes.detach().double(), 0.0)
    exponent = (1 - 2 * outcome) * value
    # Not torch's softplus: its last bits depend on a token's position in memory.
    shift = exponent.detach().clamp(min=0)
    terms = shift + ((-shift).exp() + (exponent - shift).exp()).log()
    loss = _weighted_sum(terms, weights, logits)
    return loss, _sums(loss, "value/loss", tokens=counted.sum())


def loss_metrics(sums: Mapping[str, Tensor | float], updates: int = 1) -> dict[str, float]:
    """Return metrics from global sums of statistics over `updates` optimizer steps.

    Losses are means over updates, others over tokens or responses; without any 0, or missing if in
    COUNTED_BY."""
    values = {name: float(value) for name, value in sums.items()}
    metrics = {}
    for name, value in values.items():
        prefix, statistic = name.split("/")
        if statistic.endswith("loss"):
            metrics[name] = value / max(updates, 1)
        elif statistic in COUNTED_BY:
            if count := values[f"{prefix}/{COUNTED_BY[statistic]}"]:
                metrics[name] = value / count
        elif statistic not in ("tokens", "responses"):
            unit = "responses" if statistic.endswith("_responses") else "tokens"
            metrics[name] = value / max(values[f"{prefix}/{unit}"], 1.0)
    return metrics
