"""The tokens of a mini-batch that Clip-Cov and KL-Cov select (arXiv 2505.22617, section 4).

A token's covariance is cov_t = (A_t - mean A) (log pi_t - mean log pi). Means and selection are over all
replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.algorithms.losses import Tokens, log_ratio, ppo
from megarl.config.schema import AlgorithmConfig
from megarl.data.batch import MicroBatch, TrainBatch
from megarl.parallel.comm import find_among_largest, sum_over_replicas
from megarl.parallel.runtime import Runtime


def select_kl_cov(
    config: AlgorithmConfig,
    batch: TrainBatch,
    mini_batch: Sequence[MicroBatch],
    logprobs: Tensor,
    random_numbers: Tensor,
    runtime: Runtime,
    *,
    share: float,
) -> Tensor:
    """Select the configured share of tokens, at least one, by largest covariance, bool [T].

    logprobs: [T], before the update; random_numbers: [T], decide among equals."""
    token_indices = counted_tokens(batch, mini_batch)
    covariance, count = covariances(batch, token_indices, logprobs, runtime)
    num_selected = max(1, int(share * count))
    is_chosen = find_among_largest(runtime, covariance, random_numbers[token_indices], num_selected)
    return mark_tokens(batch, token_indices[is_chosen])


def select_clip_cov(
    config: AlgorithmConfig,
    batch: TrainBatch,
    mini_batch: Sequence[MicroBatch],
    logprobs: Tensor,
    random_numbers: Tensor,
    runtime: Runtime,
    *,
    share: float,
    low: float,
    high: float,
) -> Tensor:
    """Select at random tokens with low < cov_t < high that PPO does not clip, bool [T].

    Their number is at most the configured share of all tokens, and at least one if there is any."""
    token_indices = counted_tokens(batch, mini_batch)
    covariance, count = covariances(batch, token_indices, logprobs, runtime)
    new, old = logprobs[token_indices].double(), batch[config.old_column][token_indices].double()
    ratio = log_ratio(new, old, torch.ones_like(token_indices, dtype=torch.bool)).exp()
    advantage = batch["advantages"][token_indices].double()
    clipped = ppo(Tokens(ratio, advantage, new, config.clip_low, config.clip_high, old))
    in_bounds = (covariance > low) & (covariance < high)
    token_indices = token_indices[in_bounds & ~clipped.too_low & ~clipped.too_high]
    randoms = random_numbers[token_indices]
    is_chosen = find_among_largest(runtime, randoms, randoms, max(1, int(share * count)))
    return mark_tokens(batch, token_indices[is_chosen])


def counted_tokens(batch: TrainBatch, mini_batch: Sequence[MicroBatch]) -> Tensor:
    """Return the positions of this replica's policy-loss tokens, int64."""
    token_indices = torch.cat([micro_batch.token_indices for micro_batch in mini_batch])
    return token_indices[batch["policy_loss_weights"][token_indices] > 0]


def covariances(
    batch: TrainBatch, token_indices: Tensor, logprobs: Tensor, runtime: Runtime
) -> tuple[Tensor, float]:
    """Return the covariances of some tokens, float64, and their number on all replicas."""
    new, advantage = logprobs[token_indices].double(), batch["advantages"][token_indices].double()
    sums = torch.stack([torch.tensor(float(token_indices.numel())), advantage.sum(), new.sum()])
    count, advantage_sum, logprob_sum = sum_over_replicas(runtime, sums).tolist()
    mean_advantage, mean_logprob = advantage_sum / max(count, 1), logprob_sum / max(count, 1)
    return (advantage - mean_advantage) * (new - mean_logprob), count


def mark_tokens(batch: TrainBatch, tokens: Tensor) -> Tensor:
    """Return which tokens are among these positions, bool [T]."""
    selected = torch.zeros(batch.num_tokens, dtype=torch.bool)
    selected[tokens] = True
    return selected
