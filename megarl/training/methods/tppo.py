"""T-PPO's advantages of windows (algorithms/methods/tppo.py)."""

from __future__ import annotations

from megarl.algorithms.methods.tppo import extended_gae, window_tail
from megarl.config.schema import Config
from megarl.data.batch import TrainBatch
from megarl.parallel.runtime import Runtime
from megarl.training.columns import (
    Tables,
    add_returns,
    gae_statistics,
    policy_lambda,
    token_rewards,
    write_advantages,
)


def add_window_gae(config: Config, batch: TrainBatch, runtime: Runtime) -> tuple[dict[str, float], Tables]:
    """Write advantages and returns [T] of windows of responses, as `add_gae` does of whole ones.

    For lambda, an unfinished response counts as half a window longer. Its window's tail has no advantage."""
    algorithm, unfinished, sampled_mask = config.algorithm, batch.unfinished, batch.sampled_mask
    half_window = (config.rollout.window or 0) // 2
    lam = policy_lambda(algorithm, batch.response_lengths + unfinished * half_window)
    rewards, metrics = token_rewards(algorithm, batch, runtime)
    advantages = extended_gae(
        rewards,
        batch["values"],
        sampled_mask,
        batch.cu_seqlens,
        lam,
        unfinished,
        algorithm.gamma,
        algorithm.window_tail,
    )
    statistics, lambda_table = gae_statistics(config, batch, advantages, lam, runtime)
    tail = window_tail(sampled_mask, batch.cu_seqlens, unfinished, algorithm.window_tail)
    write_advantages(algorithm, batch, advantages, runtime, left_out=tail)
    value_metrics, tables = add_returns(algorithm, batch, runtime, rewards)
    return metrics | statistics | value_metrics, {**lambda_table, **tables}
