"""Advantages on packed batches: by group (DAPO), and GAE with length-adaptive lambda (VAPO).

Sums are in float64, exact enough for 20,000 tokens of lambda = 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# A window has about GAE_WINDOW tokens, so that it fits into the cache. GAE_STEPS are its fewest and most
# tokens of one response. Shorter rows are slow to copy, longer rows pad short responses (benchmarks/gae.py).
GAE_WINDOW = 2**18
GAE_STEPS = (32, 256)

LENGTH_BINS = 24  # equal parts of 1 ... longest response
POSITION_BINS = 25  # of each response


class Responses(NamedTuple):
    """All replicas' responses of a step, for advantages per response.

    rewards    [n]
    group_ids  int [n], by prompt, in any order
    counted    bool [n], in the policy loss
    parts      [n, k], unweighted parts of the rewards; None if unused
    weights    of the k parts"""

    rewards: Tensor
    group_ids: Tensor
    counted: Tensor | None = None
    parts: Tensor | None = None
    weights: Sequence[float] = ()


class CentredRewards(NamedTuple):
    """Rewards minus their group's mean, float64 [n].

    group  int64 [n], 0, 1, ...
    sizes  int64 [groups], responses per group"""

    rewards: Tensor
    group: Tensor
    sizes: Tensor


def centre_by_group(r: Responses) -> CentredRewards:
    group: Tensor
    sizes: Tensor
    _, group, sizes = torch.unique(r.group_ids, return_inverse=True, return_counts=True)
    zeros = torch.zeros(sizes.numel(), dtype=torch.float64, device=r.rewards.device)
    rewards = r.rewards.double()
    return CentredRewards(rewards - (zeros.index_add(0, group, rewards) / sizes)[group], group, sizes)


def group_advantages(r: Responses) -> Tensor:
    """Return (R_i - mean(R)) / (std(R) + 1e-6) within the group (DAPO eq. 9), float64 [n].

    std has the divisor n - 1. Groups of one response, or of equal rewards, get 0."""
    centred, group, sizes = centre_by_group(r)
    zeros = torch.zeros(sizes.numel(), dtype=torch.float64, device=r.rewards.device)
    variance = zeros.index_add(0, group, centred.square()) / (sizes - 1).clamp(min=1)
    return centred / (variance.sqrt() + 1e-6)[group]


def length_adaptive_lambda(lengths: Tensor, alpha: float, floor: float = 0.0) -> Tensor:
    """Return lambda = 1 - 1 / (alpha * l) (VAPO eq. 5), float64 [n], clamped to [floor, 1].

    Unclamped it is negative for l < 1 / alpha. In float32, lambda^t would be off by 1e-4 for large t.

    lengths: response tokens, int [n]."""
    return (1.0 - 1.0 / (alpha * lengths.double())).clamp(floor, 1.0)


def response_lengths(response_mask: Tensor, cu_seqlens: Tensor) -> Tensor | None:
    """Return the tokens of each response, int64 [n]; None if observations interrupt or follow one.

    Bisection allocates no integers per token."""
    low, end = cu_seqlens[:-1], cu_seqlens[1:]
    falling_edges = response_mask[:-1] & ~response_mask[1:]
    falling_edges[end[(end > 0) & (end < response_mask.numel())] - 1] = False
    if bool(falling_edges.any()):
        return None
    high = end
    while bool((is_searching := low < high).any()):
        middle = (low + high) // 2
        is_sampled = response_mask[middle.clamp(max=response_mask.numel() - 1)]
        high = torch.where(is_searching & is_sampled, middle, high)
        low = torch.where(is_searching & ~is_sampled, middle + 1, low)
    return end - high


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    lam: float | Tensor,
    gamma: float = 1.0,
    after: Tensor | None = None,
) -> Tensor:
    """Compute generalised advantages (VAPO eq. 3, with a discount).

        A_t = delta_t + gamma * lambda * A_{t+1},  delta_t = R_t + gamma * V(s_{t+1}) - V(s_t)

    t counts sampled tokens. Observations between turns belong to the next turn's first state, without V, R
    or discount.

    Args:
        rewards, values: float [T]; unused outside the mask
        response_mask: bool [T], sampled tokens
        cu_seqlens: int64 [n+1]
        lam: a number, or [n]
        after: [n], V after each response; None: 0

    Returns:
        float32 [T], float64 if rewards or values are; 0 outside the mask

    The recurrence runs over all responses at once. Only windows are padded."""
    num_tokens = rewards.numel()
    unsorted_lengths = response_lengths(response_mask, cu_seqlens)
    if unsorted_lengths is None:  # drop observations, so that each response is contiguous
        positions = response_mask.nonzero().squeeze(-1)
        ends = torch.searchsorted(positions, cu_seqlens)
        advantages = gae(
            rewards[positions], values[positions], response_mask[positions], ends, lam, gamma, after
        )
        return advantages.new_zeros(num_tokens).index_copy_(0, positions, advantages)
    lengths, order = unsorted_lengths.sort(descending=True, stable=True)
    lam = torch.as_tensor(lam, dtype=torch.float64, device=rewards.device).expand(lengths.shape)
    ends, decays = cu_seqlens[1:][order], gamma * lam[order]
    next_advantage = torch.zeros_like(decays)
    next_value = torch.zeros_like(decays) if after is None else after.double()[order]
    # The extra entry is for `_Window.write`.
    dtype = torch.promote_types(torch.result_type(rewards, values), torch.float32)
    out = torch.zeros(num_tokens + 1, dtype=dtype, device=rewards.device)
    longest, num_done = int(lengths[0]) if lengths.numel() else 0, 0
    while num_done < longest:
        num_alive = int(torch.searchsorted(-lengths, -num_done))
        steps = min(max(GAE_WINDOW // num_alive, GAE_STEPS[0]), GAE_STEPS[1], longest - num_done)
        window = _Window(ends[:num_alive] - num_done, lengths[:num_alive] - num_done, steps, num_tokens)
        value, advantage = window.read(values), window.read(rewards)
        advantage -= value
        advantage[:-1].add_(value[1:], alpha=gamma)
        advantage[-1].add_(next_value[:num_alive], alpha=gamma)
        decay, a_next = decays[:num_alive], next_advantage[:num_alive]
        for a_t in reversed(advantage.unbind(0)):
            a_t.addcmul_(decay, a_next)
            a_next = a_t
        next_advantage, next_value = advantage[0].clone(), value[0].clone()
        window.write(advantage, out)
        num_done += steps
    return out[:num_tokens]


class _Window:
    """The `steps` tokens before `ends` of responses with `left` tokens there, in descending order.

    Responses with `steps` tokens or more are copied as rows, ten times faster than by token. Positions before
    the start of shorter ones hold arbitrary values, which no token uses, and are written to out[T]."""

    def __init__(self, ends: Tensor, left: Tensor, steps: int, total: int) -> None:
        num_full = int(torch.searchsorted(-left, -steps, right=True))
        self.steps = steps
        self.starts = ends[:num_full] - steps
        offsets = torch.arange(-steps, 0, device=ends.device)
        positions = torch.where(offsets < -left[num_full:, None], total, ends[num_full:, None] + offsets)
        self.at, self.source = positions.view(-1), positions.view(-1).clamp(max=total - 1)

    def read(self, x: Tensor) -> Tensor:
        """Return float64 [steps, responses], contiguous in time-major order."""
        rows = x.unfold(0, self.steps, 1).index_select(0, self.starts)
        if self.at.numel():
            rows = torch.cat([rows, x.index_select(0, self.source).view(-1, self.steps)])
        return rows.t().to(torch.float64, memory_format=torch.contiguous_format, copy=True)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write x, float64 [steps, responses], to `out`."""
        rows = x.to(out.dtype).t().contiguous()
        num_full = self.starts.numel()
        out.unfold(0, self.steps, 1).index_copy_(0, self.starts, rows[:num_full])
        out.index_copy_(0, self.at, rows[num_full:].reshape(-1))


def returns(advantages: Tensor, values: Tensor, response_mask: Tensor) -> Tensor:
    """Return the value targets A_t + V(s_t), [T], 0 outside the mask.

    Monte-Carlo returns if lambda = 1 (decoupled GAE, VAPO section 4.1)."""
    return torch.where(response_mask, advantages + values, 0.0)


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Return count, sum and sum of squares of x [T] within mask [T], float64 [3], to sum over ranks."""
    values = x[mask].double()
    count = torch.tensor(float(values.numel()), dtype=torch.float64, device=x.device)
    return torch.stack([count, values.sum(), values.dot(values)])


def mean_and_variance(total: Tensor) -> tuple[float, float, float]:
    """Return count, mean and sample variance from global `moments`; 0 if undefined."""
    count, value_sum, square_sum = total.tolist()
    if count == 0:
        return 0.0, 0.0, 0.0
    mean = value_sum / count
    return count, mean, max(square_sum - count * mean * mean, 0.0) / max(count - 1, 1)


def whiten(advantages: Tensor, mask: Tensor, count: float, mean: float, var: float) -> Tensor:
    """Return (A - mean) / sqrt(var + 1e-8), [T], or A if count < 2; 0 outside the mask."""
    whitened = (advantages.double() - mean) / (var + 1e-8) ** 0.5 if count > 1 else advantages
    return torch.where(mask, whitened, 0.0).to(advantages.dtype)


def gae_sums(advantages: Tensor, response_mask: Tensor, lam: Tensor, floor: float = 0.0) -> Tensor:
    """Return `moments`, responses, sum of lambda, and responses with lambda <= floor, float64 [6].

    To sum over ranks. lam: of the policy's advantages, [n]."""
    lam = lam.double()
    response_sums = torch.stack([torch.ones_like(lam).sum(), lam.sum(), (lam <= floor).double().sum()])
    return torch.cat([moments(advantages, response_mask), response_sums])


def gae_metrics(sums: Tensor) -> dict[str, float]:
    _, mean, variance = mean_and_variance(sums[:3])
    num_responses, lam_sum, num_clamped = sums[3:].tolist()
    num_responses = max(num_responses, 1.0)
    return {
        "gae/lambda_mean": lam_sum / num_responses,
        "gae/lambda_clamped": num_clamped / num_responses,
        "gae/advantage_mean": mean,
        "gae/advantage_std": variance**0.5,
    }


def lambda_by_length(lengths: Tensor, lam: Tensor, longest: int) -> Tensor:
    """Return responses and sum of lambda per bin of length, float64 [2, LENGTH_BINS].

    The last bin includes longer responses. lengths: int64 [n], response tokens; lam: [n]."""
    bins = (((lengths - 1) * LENGTH_BINS) // longest).clamp(0, LENGTH_BINS - 1)
    lam = lam.double()
    sums = torch.zeros(2, LENGTH_BINS, dtype=torch.float64, device=lam.device)
    return sums.index_add_(1, bins, torch.stack([torch.ones_like(lam), lam]))


def error_by_position(values: Tensor, returns: Tensor, response_mask: Tensor, lengths: Tensor) -> Tensor:
    """Return tokens and sums of V - R and |V - R| per bin of `sums_by_position`, float64 [3, bins].

    values, returns: [T]."""
    error = values.double() - returns.double()
    return sums_by_position(response_mask, lengths, error, error.abs())


def sums_by_position(response_mask: Tensor, lengths: Tensor, *columns: Tensor) -> Tensor:
    """Return tokens and sum of each column per bin, float64 [1 + columns, POSITION_BINS].

    Token p of a response of l is in bin floor(p * POSITION_BINS / l). Observations do not count.
    columns: [T] each; response_mask: bool [T]; lengths: int64 [n], response tokens, in pack order."""
    length = torch.repeat_interleave(lengths, lengths)
    start = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    bins = (torch.arange(length.numel(), device=lengths.device) - start) * POSITION_BINS // length
    rows = torch.stack(
        [column[response_mask].double() for column in (torch.ones_like(response_mask), *columns)]
    )
    sums = torch.zeros(len(rows), POSITION_BINS, dtype=torch.float64, device=rows.device)
    return sums.index_add_(1, bins, rows)
