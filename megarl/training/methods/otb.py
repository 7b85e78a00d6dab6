"""The optimal token baseline over all replicas (algorithms/methods/otb.py)."""

from __future__ import annotations

import torch

from megarl.algorithms.advantages import gae
from megarl.algorithms.methods.otb import baseline_sums, gradient_energy, sampled_positions, token_baselines
from megarl.config.schema import Config
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.parallel.comm import sum_over_replicas
from megarl.parallel.runtime import Runtime
from megarl.training.columns import token_rewards, write_advantages


def add_optimal_token_advantages(
    config: Config, rollout: RolloutBatch, batch: TrainBatch, runtime: Runtime
) -> dict[str, float]:
    """Write this replica's advantages [T]: rewards to go minus the group's baseline at the same position.

    Positions count sampled tokens only. Replicas sum 16 bytes per group and position."""
    rewards, metrics = token_rewards(config.algorithm, batch, runtime)
    mask, cu_seqlens = batch.response_mask, batch.cu_seqlens
    returns = gae(rewards, torch.zeros_like(rewards), mask, cu_seqlens, 1.0, 1.0)
    energy = gradient_energy(batch["old_logprobs"], batch["squared_probs"], mask, cu_seqlens)
    groups = rollout["group_ids"].unique(return_inverse=True)[1]
    lengths = rollout.response_lengths
    num_groups, width = int(groups.max()) + 1, max(int(lengths.max()), 1)
    slots = groups[batch.rows][batch.sequence_ids] * width + sampled_positions(mask, cu_seqlens)
    sums = sum_over_replicas(runtime, baseline_sums(returns, energy, slots, num_groups * width))
    # Responses by group and length; those longer than t have a token at position t.
    by_length = torch.bincount(groups * (width + 1) + lengths, minlength=num_groups * (width + 1))
    reversed_counts = by_length.view(num_groups, width + 1).flip(1).cumsum(1)
    counts = reversed_counts.flip(1)[:, 1:].flatten()
    baselines = token_baselines(sums, counts)[slots]
    advantages = torch.where(mask, returns - baselines, 0.0).to(returns.dtype)
    write_advantages(config.algorithm, batch, advantages, runtime)
    return metrics
