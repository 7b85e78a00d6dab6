"""The loss terms, and the weights of their tokens: the one place of denominators.

Every loss term is sum_t w_t * l_t, with counts taken over the whole mini-batch (all micro-batches, all
data-parallel ranks). Statistics are plain sums over tokens. So the terms and statistics of micro-batches and
ranks simply add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Stats = dict[str, Tensor]
Aggregation = Literal["token", "sample", "constant"]

# Statistics that are means over fewer tokens than all that count: the statistic that is the number of theirs.
COUNTED_BY = {"clip_prob_high": "clip_fraction_high"}

# A log-ratio is clamped to +-LOG_RATIO_LIMIT before exp: e^20 = 5e8 is far outside any clip range, and
# nothing overflows.
LOG_RATIO_LIMIT = 20.0


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
    """What a surrogate sees of the tokens, float64 [T]; advantage and log-prob are 0 where one does not
    count. low, high: the interval of the clip, 1 - clip_low and 1 + clip_high."""

    ratio: Tensor
    advantage: Tensor
    logprobs: Tensor
    low: float
    high: float


# Gives J_t, and the tokens whose ratio is too low and too high, bool [T], which are only counted.
Surrogate = Callable[[Tokens], tuple[Tensor, Tensor, Tensor]]


def ppo(t: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return min(r_t A_t, clip(r_t) A_t) (DAPO eq. 8, VAPO eq. 8)."""
    objective = torch.minimum(t.ratio * t.advantage, t.ratio.clamp(t.low, t.high) * t.advantage)
    return objective, (t.ratio < t.low) & (t.advantage < 0), (t.ratio > t.high) & (t.advantage > 0)


def cispo(t: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return clip(r_t) A_t log pi_t, no gradient through the ratio (arXiv 2506.13585, eq. 4 and 5)."""
    objective = t.ratio.clamp(t.low, t.high).detach() * t.advantage * t.logprobs
    return objective, t.ratio < t.low, t.ratio > t.high


def masked(t: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return r_t A_t where r_t is in the interval, else 0: the gradient ends on both sides, whatever the sign
    of A_t (SAO, arXiv 2607.07508)."""
    low, high = t.ratio < t.low, t.ratio > t.high
    return torch.where(low | high, 0.0, t.ratio * t.advantage), low, high


# What `algorithm.surrogate` may name (config/schema.py has the names once more, as it imports no torch).
SURROGATES: dict[str, Surrogate] = {"ppo": ppo, "gspo": ppo, "cispo": cispo, "masked": masked}
BY_SEQUENCE = {"gspo"}  # whose ratio is the sequence's


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
    dual_clip: float = 0.0,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Return sum_t w_t * -J_t and its statistics. J_t is what the surrogate makes of r_t = pi / pi_old, A_t
    and the interval [1 - clip_low, 1 + clip_high] (SURROGATES).

    dual_clip     a c > 1: J_t is at least c A_t where A_t < 0 (arXiv 1912.09729, eq. 5); of ppo and gspo
    sequence_ids  int [T], the sequence of each token, for gspo: its ratio is that of the sequence, exp(mean
                  of its tokens' log r), for each of its tokens (arXiv 2507.18071, eq. 5 to 7)

    All tensors are [T]; old_logprobs and advantages carry no gradient. Tokens of weight 0 do not count,
    whatever they hold. Beyond r = e^20, and below e^-20, the gradient is 0.

    entropy: of the policy at each token, only for the statistic.

    Statistics over the tokens of weight > 0: loss, tokens, those without a gradient (cispo: of a clipped
    ratio) low and high, k3 estimate of KL(pi_old || pi), probability, entropy; and the probability of the
    high ones (DAPO figure 3a)."""
    counted = weights > 0
    difference = log_ratio(logprobs, old_logprobs.detach(), counted)
    advantage = torch.where(counted, advantages.detach().double(), 0.0)
    if surrogate in BY_SEQUENCE:
        assert sequence_ids is not None
        ratio = _sequence_means(difference, counted, sequence_ids).exp()
    else:
        ratio = difference.exp()
    logprob = torch.where(counted, logprobs.double(), 0.0)
    tokens = Tokens(ratio, advantage, logprob, 1.0 - clip_low, 1.0 + clip_high)
    objective, too_low, too_high = SURROGATES[surrogate](tokens)
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
        if entropy is not None:
            sums["entropy"] = torch.where(counted, entropy.double(), 0.0).sum()
    return loss, _sums(loss, "policy/loss", **sums)


def _sequence_means(x: Tensor, counted: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return at each token [T] the mean of x over the counted tokens of its sequence."""
    sums = x.new_zeros(2, int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0)
    sums = sums.index_add(1, sequence_ids, torch.stack([x, counted.to(x.dtype)]))
    return (sums[0] / sums[1].clamp(min=1))[sequence_ids]


def nll_loss(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Stats]:
    """Return sum_t w_t * -log pi_t (VAPO eq. 9), before the factor mu of eq. 10.

    weights: `token_weights` with the correct responses as `include`, and their own count as the total. All
    [T]."""
    loss = _weighted_sum(-torch.where(weights > 0, logprobs.double(), 0.0), weights, logprobs)
    return loss, _sums(loss, "policy/nll_loss")


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Stats]:
    """Return sum_t w_t * (q - 1 - log q), q = pi_ref / pi: the k3 estimate of KL(pi || pi_ref) (GRPO), before
    the factor beta. All [T]."""
    difference = log_ratio(ref_logprobs.detach(), logprobs, weights > 0)
    loss = _weighted_sum(torch.expm1(difference) - difference, weights, logprobs)
    return loss, _sums(loss, "policy/kl_loss")


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
