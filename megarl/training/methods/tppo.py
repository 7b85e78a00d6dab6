"""T-PPO's advantages of windows (algorithms/methods/tppo.py)."""

from __future__ import annotations

from megarl.algorithms.methods.tppo import extended_gae, window_tail
from megarl.config.schema import Config
from megarl.data.experience import Experience
from megarl.parallel.runtime import Runtime
from megarl.training.columns import (
    Tables,
    add_returns,
    gae_statistics,
    policy_lambda,
    token_rewards,
    write_advantages,
)


def add_window_gae(
    config: Config, experience: Experience, runtime: Runtime
) -> tuple[dict[str, float], Tables]:
    """Write advantages and returns [T] of windows of responses, as `add_gae` does of whole ones.

    For lambda, an unfinished response counts as half a window longer than it is. The tail of its window
    (`algorithm.window_tail`) has no advantage, and whitening leaves it out.
    """
    algorithm, unfinished, drawn = config.algorithm, experience.unfinished, experience.drawn
    half = (config.rollout.window or 0) // 2
    lam = policy_lambda(algorithm, experience.response_lengths + unfinished * half)
    rewards, metrics = token_rewards(algorithm, experience, runtime)
    advantages = extended_gae(
        rewards,
        experience["values"],
        drawn,
        experience.cu_seqlens,
        lam,
        unfinished,
        algorithm.gamma,
        algorithm.window_tail,
    )
    measured, lambdas = gae_statistics(config, experience, advantages, lam, runtime)
    tail = window_tail(drawn, experience.cu_seqlens, unfinished, algorithm.window_tail)
    write_advantages(algorithm, experience, advantages, runtime, left_out=tail)
    value_metrics, tables = add_returns(algorithm, experience, runtime, rewards)
    return metrics | measured | value_metrics, {**lambdas, **tables}
