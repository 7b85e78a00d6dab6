"""The loss terms, and the weights of their tokens: the one place of denominators.

Every loss term is sum_t w_t * l_t, with counts taken over the whole mini-batch (all micro-batches, all
data-parallel ranks). Statistics are plain sums over tokens. So the terms and statistics of micro-batches and
ranks simply add up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Stats = dict[str, Tensor]
Aggregation = Literal["token", "sample", "constant"]
KLEstimator = Literal["k2", "k3"]

# Statistics that are means over fewer tokens than all that count: the statistic that is the number of theirs.
COUNTED_BY = {"clip_prob_high": "clip_fraction_high", "teacher_mass": "taught"}

# A log-ratio is clamped to +-LOG_RATIO_LIMIT before exp: e^20 = 5e8 is far outside any clip range, and
# nothing overflows.
LOG_RATIO_LIMIT = 20.0

# The least probability of all tokens outside a teacher's top k. Float32 log-probs do not resolve less.
LEAST_REST = 1e-6


def token_weights(
    lengths: Tensor,
    aggregation: Aggregation,
    mini_batches: Tensor | None = None,
    include: Tensor | None = None,
    constant: int = 1,
) -> Tensor:
    """Return the weight of one token of each response in a loss term, float32 [n]; 0 for those that do not
    count.

    token:  1 / (tokens of all counted responses of its mini-batch): every token counts the same (DAPO eq. 8
            and 12, VAPO eq. 7).
    sample: 1 / (tokens of the response * counted responses of its mini-batch): every response counts the
            same (VAPO eq. 6).
    constant: 1 / (`constant` * counted responses of its mini-batch): a response counts by its length,
            whatever the others' are (Dr. GRPO, arXiv 2503.20783; the constant is the length limit).

    lengths: response tokens, int64 [n], of the whole step, not of one rank's share. mini_batches: int64 [n],
    the mini-batch of each; None: all are one. include: bool [n], e.g. not truncated, or correct; None: all. A
    response without tokens never counts.
    """
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
    """Return new - old in float64, clamped; 0, with a gradient of 0, on tokens that do not count, whatever
    these hold."""
    difference = torch.where(counted, new.double(), 0.0) - torch.where(counted, old.double(), 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _weighted_sum(terms: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """Return sum_t w_t * l_t, summed in float64, 0-dim in the dtype of `like` (at least float32)."""
    return (terms * weights.double()).sum().to(torch.promote_types(like.dtype, torch.float32))


def _sums(loss: Tensor, loss_name: str, **sums: Tensor) -> Stats:
    """Return detached copies: a statistic must not share storage with the loss, which Megatron's
    schedule divides in place."""
    prefix = loss_name.split("/")[0]
    named = {loss_name: loss, **{f"{prefix}/{name}": value for name, value in sums.items()}}
    return {name: value.detach().double().clone() for name, value in named.items()}


class Tokens(NamedTuple):
    """What a surrogate sees of the tokens, float64 [T]; advantage and log-probs are 0 where one does not
    count. selected: bool [T], the tokens of high covariance, for clip_cov and kl_cov. likeliest: log pi and
    log pi_old of further tokens at each place, [T, k] each, for dppo_tv and dppo_kl."""

    ratio: Tensor
    advantage: Tensor
    logprobs: Tensor
    clip_low: float
    clip_high: float
    old_logprobs: Tensor
    selected: Tensor | None = None
    likeliest: tuple[Tensor, Tensor] | None = None

    @property
    def low(self) -> float:
        """Return the lower end of the interval of the clip."""
        return 1.0 - self.clip_low

    @property
    def high(self) -> float:
        """Return the upper end of the interval of the clip."""
        return 1.0 + self.clip_high


# Gives J_t, and the tokens whose ratio is too low and too high, bool [T], which are only counted. What it
# takes besides are numbers of its own section of the configuration.
Surrogate = Callable[..., tuple[Tensor, Tensor, Tensor]]


def ppo(t: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return min(r_t A_t, clip(r_t) A_t) (DAPO eq. 8, VAPO eq. 8)."""
    objective = torch.minimum(t.ratio * t.advantage, t.ratio.clamp(t.low, t.high) * t.advantage)
    return objective, (t.ratio < t.low) & (t.advantage < 0), (t.ratio > t.high) & (t.advantage > 0)


def cispo(t: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return clip(r_t) A_t log pi_t, no gradient through the ratio (arXiv 2506.13585, eq. 4 and 5)."""
    objective = t.ratio.clamp(t.low, t.high).detach() * t.advantage * t.logprobs
    return objective, t.ratio < t.low, t.ratio > t.high


def masked(t: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return r_t A_t where r_t is inside the open interval, else 0, whatever the sign of A_t (SAO, arXiv
    2607.07508, eq. 1 to 3; its f(r_t) A_t log pi_t, with f held fixed, has the same gradient)."""
    low, high = t.ratio <= t.low, t.ratio >= t.high
    return torch.where(low | high, 0.0, t.ratio * t.advantage), low, high


def dppo_tv(t: Tokens, ratio_cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return min(r_t, ratio_cap) A_t log pi_t, no gradient through the ratio, and 0 where A_t has moved the
    token far enough: it is likelier than under pi_old, A_t > 0, and the policies' total variation exceeds
    clip_high; or it is less likely, A_t <= 0, and it exceeds clip_low. They are compared over the token,
    those of `likeliest`, and all others as one: DPPO-Binary-TV without any, else DPPO-TopK-TV (arXiv
    2602.04879, as its authors' code has it, sail-sg/Stable-RL)."""
    new, old = (logs.exp() for logs in _told_apart(t))
    return _trusted(t, ratio_cap, (new - old).abs().sum(-1) / 2)


def dppo_kl(t: Tokens, ratio_cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return as `dppo_tv`, by the divergence KL(pi_old || pi) (DPPO-Binary-KL, DPPO-TopK-KL)."""
    new, old = _told_apart(t)
    return _trusted(t, ratio_cap, (old.exp() * (old - new)).sum(-1))


def _told_apart(t: Tokens) -> list[Tensor]:
    """Return log pi and log pi_old, [T, 2 + k], of the token, those of `likeliest`, and all others as one,
    whose probability is at least 1e-8: rounding would leave less than none."""
    both = []
    for own, further in zip((t.logprobs.detach(), t.old_logprobs), t.likeliest or (None, None), strict=True):
        logs = own[:, None] if further is None else torch.cat([own[:, None], further], -1)
        others = (1 - logs.exp().sum(-1, keepdim=True)).clamp(min=1e-8).log()
        both.append(torch.cat([logs, others], -1))
    return both


def _trusted(t: Tokens, ratio_cap: float, divergence: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    moved = t.logprobs.detach() - t.old_logprobs
    low = (divergence > t.clip_low) & (moved < 0) & (t.advantage <= 0)
    high = (divergence > t.clip_high) & (moved > 0) & (t.advantage > 0)
    objective = t.ratio.clamp(max=ratio_cap).detach() * t.advantage * t.logprobs
    return torch.where(low | high, 0.0, objective), low, high


def sapo(t: Tokens, tau_positive: float, tau_negative: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return 4 / tau sigmoid(tau (r_t - 1)) A_t: a gate whose slope is 1 at r_t = 1 and falls off smoothly,
    with a tau for A_t > 0 and one for the others (SAPO, arXiv 2511.20347). Nothing is clipped: what lies
    outside the interval is only counted."""
    tau = torch.where(t.advantage > 0, tau_positive, tau_negative)
    # Not torch.sigmoid, whose last bit depends on where in the tensor a token stands.
    gate = 1 / (1 + torch.exp(tau * (1 - t.ratio)))
    return 4 / tau * gate * t.advantage, t.ratio < t.low, t.ratio > t.high


def clip_cov(t: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return `ppo`, and 0 on the selected tokens (Clip-Cov, arXiv 2505.22617)."""
    assert t.selected is not None
    objective, low, high = ppo(t)
    return objective * ~t.selected, low, high


def kl_cov(t: Tokens, kl_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return r_t A_t, not clipped, less kl_weight |log r_t| on the selected tokens (KL-Cov, arXiv 2505.22617,
    with the estimate of the KL that its authors' code takes, PRIME-RL/Entropy-Mechanism-of-RL)."""
    assert t.selected is not None
    penalty = kl_weight * t.ratio.log().abs() * t.selected
    return t.ratio * t.advantage - penalty, t.ratio < t.low, t.ratio > t.high


# What `algorithm.surrogate` may name (config/schema/algorithm.py repeats the names, as it imports no torch).
SURROGATES: dict[str, Surrogate] = {
    "ppo": ppo,
    "gspo": ppo,  # with the ratio of the whole sequence (`_sequence_ratio`)
    "fipo": ppo,  # with A_t times `future_factors`
    "cispo": cispo,
    "masked": masked,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


@torch.no_grad()
def future_factors(
    difference: Tensor,
    advantage: Tensor,
    sequence_ids: Tensor,
    *,
    half_life: float,
    low: float,
    high: float,
    limit: float,
) -> Tensor:
    """Return f_t = clip(exp F_t, low, high) with F_t = sum over k >= t of 2^(-(k - t) / half_life) log r_k,
    k up to the response's end (FIPO, arXiv 2603.19835, as its authors' code has it): the advantage of what
    led to tokens that have become likelier counts more.

    Tokens of r_k > `limit` are left out of the sum; where A_t < 0, f_t is there within [0.8, 1] (1 where
    `low` is, as by default), so that what is far off already is not pushed further. difference: log r_t,
    float64 [T], 0 where a token does not count; sequence_ids: int [T], each sequence of one piece."""
    beyond, decay, step = difference > math.log(limit), 2 ** (-1 / half_life), 1
    future = torch.where(beyond, 0.0, difference)
    # `future` sums over `step` tokens; each round doubles that.
    while bool((same := sequence_ids[step:] == sequence_ids[:-step]).any()):
        later = torch.where(same, future[step:], 0.0)
        future = torch.cat([future[:-step] + decay**step * later, future[-step:]])
        step *= 2
    factors = future.exp().clamp(low, high)
    return torch.where(beyond & (advantage < 0), factors.clamp(0.8, 1.0), factors)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    entropy: Tensor | None = None,
    *,
    surrogate: str = "ppo",
    options: Mapping[str, float] | None = None,
    dual_clip: float = 0.0,
    sequence_ids: Tensor | None = None,
    selected: Tensor | None = None,
    likeliest: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Stats]:
    """Return sum_t w_t * -J_t and its statistics. J_t is what the surrogate makes of r_t = pi / pi_old, A_t
    and the interval [1 - clip_low, 1 + clip_high] (SURROGATES).

    options       the surrogate's own numbers, by name
    dual_clip     a c > 1: J_t is at least c A_t where A_t < 0 (arXiv 1912.09729, eq. 5); of ppo, gspo, fipo
    sequence_ids  int [T], the sequence of each token: for gspo, whose ratio is `_sequence_ratio`, and for
                  fipo, whose A_t are multiplied by `future_factors`
    selected      bool [T], for clip_cov and kl_cov
    likeliest     for dppo_tv and dppo_kl: log pi and log pi_old of the tokens that were likeliest to pi_old,
                  [T, k] each; the least finite number where one is the token itself

    All tensors are [T]; old_logprobs and advantages carry no gradient. Tokens of weight 0 do not count,
    whatever they hold. Beyond r = e^20, and below e^-20, the gradient is 0.

    entropy: of the policy at each token, only for the statistic.

    Statistics over the tokens of weight > 0: loss, tokens, those without a gradient (cispo: of a clipped
    ratio; sapo, kl_cov: outside the interval) low and high, k3 estimate of KL(pi_old || pi), probability,
    entropy; the probability of the high ones (DAPO figure 3a); fipo's factor, and the selected tokens."""
    counted, options = weights > 0, dict(options or {})
    difference = log_ratio(logprobs, old_logprobs.detach(), counted)
    advantage = torch.where(counted, advantages.detach().double(), 0.0)
    if surrogate == "fipo":
        assert sequence_ids is not None
        factors, options = future_factors(difference, advantage, sequence_ids, **options), {}
        advantage = advantage * factors
    if surrogate == "gspo":
        assert sequence_ids is not None
        ratio = _sequence_ratio(difference, counted, sequence_ids)
    else:
        ratio = difference.exp()
    logprob, old = (torch.where(counted, x.double(), 0.0) for x in (logprobs, old_logprobs.detach()))
    if likeliest is not None:
        further = [torch.where(counted[:, None], x.detach().double(), 0.0) for x in likeliest]
        likeliest = further[0], further[1]
    tokens = Tokens(ratio, advantage, logprob, clip_low, clip_high, old, selected, likeliest)
    objective, too_low, too_high = SURROGATES[surrogate](tokens, **options)
    if dual_clip:
        lowest = torch.where(advantage < 0, dual_clip * advantage, -torch.inf)
        objective = torch.maximum(objective, lowest)
    loss = _weighted_sum(-objective, weights, logprobs)
    with torch.no_grad():
        high = too_high & counted
        sums = {
            "tokens": counted.sum(),
            "clip_fraction_low": (too_low & counted).sum(),
            "clip_fraction_high": high.sum(),
            "clip_prob_high": torch.where(high, logprobs.double(), -torch.inf).exp().sum(),
            "approx_kl": (torch.expm1(difference) - difference).sum(),
            "mean_prob": torch.where(counted, logprobs.double(), -torch.inf).exp().sum(),
        }
        if dual_clip:
            sums["clip_fraction_dual"] = (objective == lowest).sum()
        if surrogate == "fipo":
            sums["future_factor"] = torch.where(counted, factors, 0.0).sum()
        if selected is not None:
            sums["selected"] = (selected & counted).sum()
        if entropy is not None:
            sums["entropy"] = torch.where(counted, entropy.double(), 0.0).sum()
    return loss, _sums(loss, "policy/loss", **sums)


def _sequence_ratio(difference: Tensor, counted: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return s_it = sg(s_i) pi_t / sg(pi_t), [T], s_i = exp(mean of log r over the sequence of the token).

    This is GSPO-token (arXiv 2507.18071, section 4.3; verl's `compute_policy_loss_gspo`). Where a sequence
    has one advantage, the gradient is GSPO's. Where advantages differ by token (a critic's, a teacher's), a
    token gets the gradient of its advantage alone.

    difference: log r_t, [T], 0 where a token does not count."""
    fixed = difference.detach()
    sums = fixed.new_zeros(2, int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0)
    sums = sums.index_add(1, sequence_ids, torch.stack([fixed, counted.to(fixed.dtype)]))
    means = (sums[0] / sums[1].clamp(min=1))[sequence_ids]
    return means.exp() * (difference - fixed).exp()


def nll_loss(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Stats]:
    """Return sum_t w_t * -log pi_t (VAPO eq. 9), before the factor mu of eq. 10.

    weights: `token_weights` with the correct responses as `include`, and their own count as the total. All
    [T]."""
    loss = _weighted_sum(-torch.where(weights > 0, logprobs.double(), 0.0), weights, logprobs)
    return loss, _sums(loss, "policy/nll_loss")


def kl_loss(
    logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, estimator: KLEstimator = "k3"
) -> tuple[Tensor, Stats]:
    """Return sum_t w_t k_t, an estimate of KL(pi || pi_ref), before the factor beta. All [T].

    With d = log pi - log pi_ref of the sampled token:

    k2  d^2 / 2. On-policy its expected gradient is that of KL(pi || pi_ref) (REINFORCE++ with baseline, as in
        OpenRLHF's compute_approx_kl).
    k3  exp(-d) - 1 + d (GRPO). On-policy its expected value is KL(pi || pi_ref), and its expected gradient
        that of the forward KL(pi_ref || pi).

    k1, d itself, is not offered: its expected gradient is 0."""
    difference = log_ratio(ref_logprobs.detach(), logprobs, weights > 0)
    terms = difference.square() / 2 if estimator == "k2" else torch.expm1(difference) - difference
    loss = _weighted_sum(terms, weights, logprobs)
    return loss, _sums(loss, "policy/kl_loss")


def top_k_loss(logprobs: Tensor, teacher_logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Stats]:
    """Return sum_t w_t KL(q_t || pi_t) to a teacher q, over its top k tokens and the rest as one outcome.

    The term is never negative. It is 0 only where the policy gives each of the k tokens the teacher's
    probability. Without the rest the sum is lowest where the policy puts all of its probability on the k
    tokens. verl's forward_kl_topk clamps that sum at 0; SDPO (arXiv 2601.20802) has the rest.

    logprobs, teacher_logprobs: [T, k] of the same tokens; the teacher's are -inf where it has none to say.
    Statistics: loss, tokens, those that are taught, and the teacher's probability of the k tokens."""
    counted = weights > 0
    taught = counted & ~(teacher_logprobs[:, 0] == -torch.inf)
    of_teacher, own = (torch.where(taught[:, None], x.double(), 0.0) for x in (teacher_logprobs, logprobs))
    chances = torch.where(taught[:, None], of_teacher.exp(), 0.0)
    teacher_rest = torch.where(taught, 1 - chances.sum(-1), 0.0).clamp(min=0)
    # Rounding may leave nothing of a small rest. Then it counts as LEAST_REST and keeps its gradient.
    rest = 1 - own.exp().sum(-1)
    rest = rest + (LEAST_REST - rest.detach()).clamp(min=0)
    terms = (chances * (of_teacher - own)).sum(-1)
    terms = terms + torch.xlogy(teacher_rest, teacher_rest) - teacher_rest * rest.log()
    loss = _weighted_sum(terms, weights, logprobs)
    sums = {"tokens": counted.sum(), "taught": taught.sum(), "teacher_mass": chances.sum()}
    return loss, _sums(loss, "policy/teacher_loss", **sums)


def entropy_loss(entropy: Tensor, weights: Tensor) -> tuple[Tensor, Stats]:
    """Return sum_t w_t * -H(pi_t), before its factor: minimised, it keeps the policy's entropy H up. All
    [T]."""
    loss = _weighted_sum(-torch.where(weights > 0, entropy.double(), 0.0), weights, entropy)
    return loss, _sums(loss, "policy/entropy_loss")


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float = 0.0
) -> tuple[Tensor, Stats]:
    """Return sum_t w_t * 1/2 (V_t - returns_t)^2; with clip > 0 the larger of that and the same for V clamped
    to V_old +- clip.

    All tensors are [T]; tokens of weight 0 do not count, whatever they hold. Statistics: loss, tokens, and
    tokens whose clamped term is the larger (no gradient)."""
    counted = weights > 0
    value = torch.where(counted, values.double(), 0.0)
    target = torch.where(counted, returns.detach().double(), 0.0)
    errors = (value - target).square()
    clipped = torch.zeros_like(counted)
    if clip > 0:
        old = torch.where(counted, old_values.detach().double(), 0.0)
        clipped_errors = (torch.clamp(value, old - clip, old + clip) - target).square()
        clipped = clipped_errors > errors
        errors = torch.maximum(errors, clipped_errors)
    loss = _weighted_sum(0.5 * errors, weights, values)
    return loss, _sums(loss, "value/loss", tokens=counted.sum(), clip_fraction=clipped.sum())


def chance_loss(logits: Tensor, successes: Tensor, weights: Tensor) -> tuple[Tensor, Stats]:
    """Return sum_t w_t log(1 + exp((1 - 2 R_t) V_t)), the cross-entropy of the chances sigmoid(V) to outcomes
    R in {0, 1} (SPPO, arXiv 2604.08865).

    All tensors are [T]; tokens of weight 0 do not count, whatever they hold. Statistics: loss, tokens."""
    counted = weights > 0
    value = torch.where(counted, logits.double(), 0.0)
    outcome = torch.where(counted, successes.detach().double(), 0.0)
    against = (1 - 2 * outcome) * value
    # Not torch's softplus, whose last bits depend on where in memory a token stands.
    largest = against.detach().clamp(min=0)
    terms = largest + ((-largest).exp() + (against - largest).exp()).log()
    loss = _weighted_sum(terms, weights, logits)
    return loss, _sums(loss, "value/loss", tokens=counted.sum())


def loss_metrics(sums: Mapping[str, Tensor | float], updates: int = 1) -> dict[str, float]:
    """Return metrics from global sums: the statistics of one or several terms, added over micro-batches,
    ranks and `updates` optimizer steps.

    Losses become means over the updates, the rest means over their tokens (0 if there is none; left out where
    these are the fewer ones of COUNTED_BY)."""
    values = {name: float(value) for name, value in sums.items()}
    metrics = {}
    for name, value in values.items():
        prefix, kind = name.split("/")
        if kind.endswith("loss"):
            metrics[name] = value / max(updates, 1)
        elif kind in COUNTED_BY:
            if count := values[f"{prefix}/{COUNTED_BY[kind]}"]:
                metrics[name] = value / count
        elif kind != "tokens":
            metrics[name] = value / max(values[f"{prefix}/tokens"], 1.0)
    return metrics
