"""The loss terms, and the weights of their tokens: the one place of denominators.

Every loss term is sum_t w_t * l_t, with counts taken over the whole mini-batch (all micro-batches, all
data-parallel ranks). Statistics are plain sums over tokens. So the terms and statistics of micro-batches and
ranks simply add up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Stats = dict[str, Tensor]
Aggregation = Literal["token", "sample"]

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
) -> Tensor:
    """Return the weight of one token of each response in a loss term, float32 [n]; 0 for those that do not
    count.

    token:  1 / (tokens of all counted responses of its mini-batch): every token counts the same (DAPO eq. 8
            and 12, VAPO eq. 7).
    sample: 1 / (tokens of the response * counted responses of its mini-batch): every response counts the
            same (VAPO eq. 6).

    lengths: response tokens, int64 [n], of the whole step, not of one rank's share. mini_batches: int64 [n],
    the mini-batch of each; None: all are one. include: bool [n], e.g. not truncated, or correct; None: all. A
    response without tokens never counts.
    """
    if aggregation not in ("token", "sample"):
        raise ValueError(f"aggregation: must be token or sample (got {aggregation!r})")
    lengths = lengths if include is None else torch.where(include, lengths, 0)
    counted = lengths > 0
    ids = torch.zeros_like(lengths) if mini_batches is None else mini_batches
    totals = lengths.new_zeros(int(ids.max()) + 1 if ids.numel() else 0)
    totals.index_add_(0, ids, lengths if aggregation == "token" else counted.long())
    denominators = totals[ids] if aggregation == "token" else lengths * totals[ids]
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


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    entropy: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Return sum_t w_t * -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), r_t = pi / pi_old (DAPO
    eq. 8, VAPO eq. 8), and its statistics.

    All tensors are [T]; old_logprobs and advantages carry no gradient. Tokens of weight 0 do not count,
    whatever they hold. Beyond r = e^20, and below e^-20, the gradient is 0.

    entropy: of the policy at each token, only for the statistic.

    Statistics over the tokens of weight > 0: loss, tokens, clipped ones (where the clipped term is the
    smaller) low and high, k3 estimate of KL(pi_old || pi), probability, entropy; and the probability of those
    clipped high (DAPO figure 3a)."""
    counted = weights > 0
    difference = log_ratio(logprobs, old_logprobs.detach(), counted)
    ratio = difference.exp()
    advantage = torch.where(counted, advantages.detach().double(), 0.0)
    objective = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage)
    loss = _weighted_sum(-objective, weights, logprobs)
    with torch.no_grad():
        high = (ratio > 1.0 + clip_high) & (advantage > 0)
        sums = {
            "tokens": counted.sum(),
            "clip_fraction_low": ((ratio < 1.0 - clip_low) & (advantage < 0)).sum(),
            "clip_fraction_high": high.sum(),
            "clip_prob_high": torch.where(high, logprobs.double(), -torch.inf).exp().sum(),
            "approx_kl": (torch.expm1(difference) - difference).sum(),
            "mean_prob": torch.where(counted, logprobs.double(), -torch.inf).exp().sum(),
        }
        if entropy is not None:
            sums["entropy"] = torch.where(counted, entropy.double(), 0.0).sum()
    return loss, _sums(loss, "policy/loss", **sums)


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
