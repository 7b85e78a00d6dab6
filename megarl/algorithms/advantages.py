"""Advantages: from the group's rewards (DAPO, Dr. GRPO, RLOO, GDPO), and generalised advantage estimation
with decoupled and length-adaptive lambda (VAPO), on packed batches; and how lambda, the value error and
entropy are distributed.

Sums are taken in float64, so that 20,000 tokens of lambda = 1 lose nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

GroupBaseline = Literal["group", "group_mean", "leave_one_out"]

# A window of the recurrence has about GAE_WINDOW tokens, which stay in the cache with what is computed from
# them: 256 tokens of 1,024 responses, fewer of more. GAE_STEPS are its fewest and most tokens of one
# response: rows of fewer are slow to copy, and with more a window reaches far beyond the start of short
# responses. Measured with benchmarks/gae.py.
GAE_WINDOW = 2**18
GAE_STEPS = (32, 256)
GAE_ROWS = 8192

LENGTH_BINS = 24  # equal parts of 1 ... the longest possible response
POSITION_BINS = 25  # equal parts of each response


def group_advantages(rewards: Tensor, group_ids: Tensor, kind: GroupBaseline = "group") -> Tensor:
    """Return the advantage of each response within its group, [n], float32 (float64 for float64):

    group          (R_i - mean(R)) / (std(R) + 1e-6) (DAPO eq. 9); std is the sample standard deviation
    group_mean     R_i - mean(R) (Dr. GRPO, arXiv 2503.20783)
    leave_one_out  R_i - mean of the others' R = G / (G - 1) (R_i - mean(R)) (RLOO, arXiv 2402.14740)

    A group of one response, or of equal rewards, gets 0.

    rewards: [n]. group_ids: int [n], any numbers in any order; groups may differ in size."""
    group: Tensor
    sizes: Tensor
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    zeros = torch.zeros(sizes.numel(), dtype=torch.float64, device=rewards.device)
    exact = rewards.double()
    centred = exact - (zeros.index_add(0, group, exact) / sizes)[group]
    if kind == "group":
        variance = zeros.index_add(0, group, centred.square()) / (sizes - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + 1e-6)[group]
    elif kind == "leave_one_out":
        centred = centred * (sizes.double() / (sizes - 1).clamp(min=1))[group]
    return centred.to(torch.promote_types(rewards.dtype, torch.float32))


def per_reward_advantages(
    rewards: Tensor, weights: Sequence[float], group_ids: Tensor, counted: Tensor
) -> Tensor:
    """Return the advantage of each response by several rewards, of which each is normalised by itself, [n],
    float32 (float64 for float64), 0 where not `counted` (GDPO, arXiv 2601.05242, as NVlabs/GDPO has it for
    TRL: over responses, not tokens):

    S_i = sum_k w_k (R_ik - mean(R_k)) / (std(R_k) + 1e-6) within the group, as `group_advantages`
    A_i = (S_i - mean(S)) / sqrt(var(S) + 1e-8) over all counted responses of the batch, as `whiten`

    rewards: [n, k], without the weights, which normalising would take away. counted: bool [n]."""
    columns = rewards.double().unbind(1)
    total = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    for weight, column in zip(weights, columns, strict=True):
        total += weight * group_advantages(column, group_ids)
    normalised = whiten(total, counted, *mean_and_variance(moments(total, counted)))
    return normalised.to(torch.promote_types(rewards.dtype, torch.float32))


class SuccessTracker:
    """How likely an answer to each prompt is right, from the answers that it has had: Beta(a, b), which
    forgets (Single-stream Policy Optimization, arXiv 2509.13232; verl-recipe's spo_ray_trainer.py with a
    constant rho and no offline samples).

    The chance is a / (a + b). A step with r right and w wrong answers to a prompt makes it rho a + r and
    rho b + w, so that about the last 1 / (1 - rho) answers count.

    counts  uid of a prompt -> (a, b); any other's are PRIOR"""

    PRIOR = (0.5, 0.5)

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self.counts: dict[int, tuple[float, float]] = {}

    def chances(self, prompts: Tensor) -> Tensor:
        """Return the chance of a right answer to each prompt, float64 [n]. prompts: int64 [n], uids."""
        counts = [self.counts.get(uid, self.PRIOR) for uid in prompts.tolist()]
        return torch.tensor([a / (a + b) for a, b in counts], dtype=torch.float64)

    def observe(self, prompts: Tensor, correct: Tensor) -> None:
        """Take in a step's answers, in any order. prompts: int64 [n], uids; correct: bool [n]."""
        answers: dict[int, list[int]] = {}
        for uid, right in zip(prompts.tolist(), correct.tolist(), strict=True):
            answers.setdefault(uid, [0, 0])[0 if right else 1] += 1
        for uid, (right, wrong) in answers.items():
            a, b = self.counts.get(uid, self.PRIOR)
            self.counts[uid] = (self.rho * a + right, self.rho * b + wrong)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: lists of numbers, which later steps do not change."""
        right, wrong = ([count[i] for count in self.counts.values()] for i in (0, 1))
        return {"prompts": list(self.counts), "right": right, "wrong": wrong}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        counts = zip(state["right"], state["wrong"], strict=True)
        self.counts = dict(zip(state["prompts"], counts, strict=True))


def length_adaptive_lambda(lengths: Tensor, alpha: float, floor: float = 0.0) -> Tensor:
    """Return lambda = 1 - 1 / (alpha * l) (VAPO eq. 5), float64 [n], clamped to [floor, 1]: the formula is
    negative for l < 1 / alpha. (T-PPO has a floor of 0.95.)

    lengths: response lengths in tokens, int [n]. float64 because rounding lambda to float32 moves lambda^t, t
    in the thousands, by 1e-4."""
    return (1.0 - 1.0 / (alpha * lengths.double())).clamp(floor, 1.0)


def response_lengths(response_mask: Tensor, cu_seqlens: Tensor) -> Tensor | None:
    """Return the tokens of each response, int64 [n], where each is all of its sequence from some token on
    (possibly none); None where one is not: an episode of several turns has observations between them.

    By bisection, which reads a few entries of the mask for each sequence and makes no token-sized integers.
    """
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    falls = response_mask[:-1] & ~response_mask[1:]
    falls[end[(end > 0) & (end < response_mask.numel())] - 1] = False
    if bool(falls.any()):
        return None
    high = end
    while bool((searching := begin < high).any()):
        middle = (begin + high) // 2
        inside = response_mask[middle.clamp(max=response_mask.numel() - 1)]
        high = torch.where(searching & inside, middle, high)
        begin = torch.where(searching & ~inside, middle + 1, begin)
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
    """Return A_t = delta_t + gamma * lambda * A_{t+1}, delta_t = R_t + gamma * V(s_{t+1}) - V(s_t) (VAPO eq.
    3, with a discount).

    t counts the tokens of a response that the policy sampled. Where it has several turns, s_{t+1} of a turn's
    last token is the state before the next turn's first token, which holds what was observed between them: an
    observation is the environment's transition, costs no discount, and has no V and no R of its own. V after
    the last token of a response is `after`. Returns [T], float32 (float64 if an input is), 0 outside the
    mask, whose rewards and values are not used.

    rewards, values: float [T]. response_mask: bool [T]. cu_seqlens: int64 [n+1]. lam: one number, or [n], one
    for each response. after: [n]; None: 0.

    The recurrence runs backwards in time for all responses at once: sorted by length, those that are still
    alive are the first ones, and windows of their tokens, counted from the end, are gathered time-major. No
    padding exists beyond a window; besides the result only windows are allocated."""
    total = rewards.numel()
    lengths_of_all = response_lengths(response_mask, cu_seqlens)
    if lengths_of_all is None:  # without all that was not sampled; what is left is of one piece
        sampled = response_mask.nonzero().squeeze(-1)
        ends = torch.searchsorted(sampled, cu_seqlens)
        of_sampled = gae(rewards[sampled], values[sampled], response_mask[sampled], ends, lam, gamma, after)
        return of_sampled.new_zeros(total).index_copy_(0, sampled, of_sampled)
    all_lengths, order = lengths_of_all.sort(descending=True, stable=True)
    lam = torch.as_tensor(lam, dtype=torch.float64, device=rewards.device).expand(all_lengths.shape)
    last_values = lam.new_zeros(all_lengths.shape) if after is None else after.double()
    # One entry more than tokens: a window reaches back beyond the start of short responses, and its values
    # there are written to the extra entry.
    dtype = torch.promote_types(torch.result_type(rewards, values), torch.float32)
    out = torch.zeros(total + 1, dtype=dtype, device=rewards.device)
    for first in range(0, all_lengths.numel(), GAE_ROWS):
        rows = slice(first, first + GAE_ROWS)
        lengths, ends, decays = all_lengths[rows], cu_seqlens[1:][order][rows], gamma * lam[order][rows]
        longest = int(lengths[0])
        next_advantage = torch.zeros(lengths.shape, dtype=torch.float64, device=ends.device)
        next_value = last_values[order][rows]
        done = 0
        while done < longest:
            alive = int(torch.searchsorted(-lengths, -done))
            steps = min(max(GAE_WINDOW // alive, GAE_STEPS[0]), GAE_STEPS[1], longest - done)
            window = _Window(ends[:alive] - done, lengths[:alive] - done, steps, total)
            value, advantage = window.read(values), window.read(rewards)
            advantage -= value
            advantage[:-1].add_(value[1:], alpha=gamma)
            advantage[-1].add_(next_value[:alive], alpha=gamma)
            decay, later = decays[:alive], next_advantage[:alive]
            for now in reversed(advantage.unbind(0)):
                now.addcmul_(decay, later)
                later = now
            next_advantage, next_value = advantage[0].clone(), value[0].clone()
            window.write(advantage, out)
            done += steps
    return out[:total]


def extended_gae(
    rewards: Tensor,
    values: Tensor,
    drawn: Tensor,
    cu_seqlens: Tensor,
    lam: float | Tensor,
    unfinished: Tensor,
    gamma: float = 1.0,
    tail: int = 0,
) -> Tensor:
    """Return the advantages of windows of responses, as `gae`, where a response that is `unfinished` goes on
    behind its window: the value there is taken to be that of the state before, V(s_l) = V(s_{l-1}), so that
    delta_{l-1} = R_{l-1} + (gamma - 1) V(s_{l-1}) (EGAE of T-PPO, arXiv 2506.15050, as its authors'
    implementation has it, verl pull request 3728). The last `tail` tokens of such a window get 0.

    drawn: bool [T], the tokens that a step has drawn, the last ones of each response. unfinished: bool [n].
    The rest as in `gae`."""
    own, after = drawn.nonzero().squeeze(-1), None
    if own.numel():
        last = own[(torch.searchsorted(own, cu_seqlens[1:]) - 1).clamp(min=0)]
        after = torch.where(unfinished, values[last].double(), 0.0)
    advantages = gae(rewards, values, drawn, cu_seqlens, lam, gamma, after)
    return advantages.masked_fill(window_tail(drawn, cu_seqlens, unfinished, tail), 0.0)


def window_tail(drawn: Tensor, cu_seqlens: Tensor, unfinished: Tensor, tail: int) -> Tensor:
    """Return the last `tail` tokens of the windows of unfinished responses, bool [T]."""
    behind = drawn.flip(0).cumsum(0).flip(0)  # of a token, those of this and all later windows from it on
    ends = torch.cat([behind, behind.new_zeros(1)])[cu_seqlens[1:]]
    left = behind - torch.repeat_interleave(ends, cu_seqlens.diff())
    return drawn & (left <= tail) & torch.repeat_interleave(unfinished, cu_seqlens.diff())


class _Window:
    """The last `steps` tokens before `ends` of some responses, which have `left` tokens there, in descending
    order.

    Responses with at least `steps` tokens are copied as whole rows, ten times faster than token by token. For
    shorter ones, tokens before their start are read as anything (nothing flows from there to later tokens)
    and written to out[T]."""

    def __init__(self, ends: Tensor, left: Tensor, steps: int, total: int) -> None:
        whole = int(torch.searchsorted(-left, -steps, right=True))
        self.steps = steps
        self.starts = ends[:whole] - steps
        back = torch.arange(-steps, 0, device=ends.device)
        at = torch.where(back < -left[whole:, None], total, ends[whole:, None] + back)
        self.at, self.source = at.view(-1), at.view(-1).clamp(max=total - 1)

    def read(self, x: Tensor) -> Tensor:
        """Return float64 [steps, responses], contiguous in time-major order."""
        rows = x.unfold(0, self.steps, 1).index_select(0, self.starts)
        if self.at.numel():
            rows = torch.cat([rows, x.index_select(0, self.source).view(-1, self.steps)])
        return rows.t().to(torch.float64, memory_format=torch.contiguous_format, copy=True)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write x, float64 [steps, responses], to its tokens in `out`."""
        rows = x.to(out.dtype).t().contiguous()
        whole = self.starts.numel()
        out.unfold(0, self.steps, 1).index_copy_(0, self.starts, rows[:whole])
        out.index_copy_(0, self.at, rows[whole:].reshape(-1))


def returns(advantages: Tensor, values: Tensor, response_mask: Tensor) -> Tensor:
    """Return the value targets A_t + V(s_t), [T], 0 outside the responses. With advantages of lambda = 1 they
    are the Monte-Carlo returns (decoupled GAE, VAPO section 4.1)."""
    return torch.where(response_mask, advantages + values, 0.0)


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Return (count, sum, sum of squares) of x [T] where mask [T] is True, float64 [3], to be summed over
    ranks."""
    kept = x[mask].double()
    count = torch.tensor(float(kept.numel()), dtype=torch.float64, device=x.device)
    return torch.stack([count, kept.sum(), kept.dot(kept)])


def mean_and_variance(total: Tensor) -> tuple[float, float, float]:
    """Return (count, mean, sample variance) from the global `moments`; the mean of nothing and the variance
    of one are 0."""
    count, first, second = total.tolist()
    if count == 0:
        return 0.0, 0.0, 0.0
    mean = first / count
    return count, mean, max(second - count * mean * mean, 0.0) / max(count - 1, 1)


def whiten(advantages: Tensor, mask: Tensor, count: float, mean: float, var: float) -> Tensor:
    """Return (A - mean) / sqrt(var + 1e-8), [T], 0 outside the mask, from global moments: `whiten(a, m,
    *mean_and_variance(total))`.

    Fewer than two tokens have no spread and are left as they are."""
    whitened = (advantages.double() - mean) / (var + 1e-8) ** 0.5 if count > 1 else advantages
    return torch.where(mask, whitened, 0.0).to(advantages.dtype)


def gae_sums(advantages: Tensor, response_mask: Tensor, lam: Tensor, floor: float = 0.0) -> Tensor:
    """Return the sums that `gae_metrics` needs, float64 [6], to be summed over ranks: `moments` of the
    advantages; responses, the sum of their lambda, and how many are at the lower clamp (lambda = floor; 0:
    from l <= 1 / alpha).

    lam: lambda of the policy's advantages, float64 [n] from `length_adaptive_lambda`. A fixed lambda must be
    expanded to [n]."""
    lam = lam.double()
    responses = torch.stack([torch.ones_like(lam).sum(), lam.sum(), (lam <= floor).double().sum()])
    return torch.cat([moments(advantages, response_mask), responses])


def gae_metrics(sums: Tensor) -> dict[str, float]:
    """Return the metrics gae/* from the global `gae_sums`. advantage_std is of the advantages that were
    given, whitened or not."""
    _, mean, variance = mean_and_variance(sums[:3])
    responses, lam, clamped = sums[3:].tolist()
    responses = max(responses, 1.0)
    return {
        "gae/lambda_mean": lam / responses,
        "gae/lambda_clamped": clamped / responses,
        "gae/advantage_mean": mean,
        "gae/advantage_std": variance**0.5,
    }


def lambda_by_length(lengths: Tensor, lam: Tensor, longest: int) -> Tensor:
    """Return (responses, sum of their lambda) of each part of 1 ... longest tokens, float64 [2, LENGTH_BINS].

    lengths: int64 [n], response tokens; a response longer than `longest` counts in the last bin. lam: [n]."""
    bins = (((lengths - 1) * LENGTH_BINS) // longest).clamp(0, LENGTH_BINS - 1)
    lam = lam.double()
    sums = torch.zeros(2, LENGTH_BINS, dtype=torch.float64, device=lam.device)
    return sums.index_add_(1, bins, torch.stack([torch.ones_like(lam), lam]))


def error_by_position(values: Tensor, returns: Tensor, response_mask: Tensor, lengths: Tensor) -> Tensor:
    """Return (tokens, sum of V - R, sum of |V - R|) of each part of the responses, float64 [3,
    POSITION_BINS]. values, returns: [T]; the rest as in `sums_by_position`."""
    error = values.double() - returns.double()
    return sums_by_position(response_mask, lengths, error, error.abs())


def sums_by_position(response_mask: Tensor, lengths: Tensor, *columns: Tensor) -> Tensor:
    """Return (tokens, sum of each column) of each part of the responses, float64 [1 + columns,
    POSITION_BINS].

    Token p of a response of l tokens is in part floor(p * POSITION_BINS / l); observations do not count.
    columns: [T] each; response_mask: bool [T]; lengths: int64 [n], response tokens, in the order in which the
    responses lie in [T]."""
    own = torch.repeat_interleave(lengths, lengths)
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    bins = (torch.arange(own.numel(), device=lengths.device) - starts) * POSITION_BINS // own
    rows = torch.stack(
        [column[response_mask].double() for column in (torch.ones_like(response_mask), *columns)]
    )
    sums = torch.zeros(len(rows), POSITION_BINS, dtype=torch.float64, device=rows.device)
    return sums.index_add_(1, bins, rows)
