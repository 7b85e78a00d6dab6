"""What a step computes over its batch beside the models: advantages and returns, the mismatch with the engine, statistics.
Each writes columns of an Experience or returns metrics, with sums over all replicas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages import (
    error_by_position,
    gae,
    gae_metrics,
    gae_sums,
    group_advantages,
    lambda_by_length,
    length_adaptive_lambda,
    mean_and_variance,
    moments,
    returns,
    whiten,
)
from megarl.algorithms.evaluation import explained_variance, variance_sums
from megarl.algorithms.mismatch import difference_histogram, mismatch_factors, mismatch_metrics, mismatch_sums
from megarl.config.schema import AlgorithmConfig, MismatchConfig
from megarl.data.experience import Experience
from megarl.parallel.comm import max_over_ranks, sum_over_replicas
from megarl.parallel.runtime import Runtime

MODEL_PHASES = (
    "old_logprobs",
    "reference_logprobs",
    "values",
    "critic_update",
    "actor_update",
    "supervised_update",
)


def add_group_advantages(batch: Experience) -> None:
    """Write advantages [T] from rewards and group_ids. `batch` must hold whole groups: before it is divided."""
    batch["advantages"] = batch.spread(group_advantages(batch["rewards"], batch["group_ids"]))


def add_gae(config: AlgorithmConfig, experience: Experience, runtime: Runtime) -> dict[str, float]:
    """Write advantages and returns [T] from rewards and values, each with its own lambda (VAPO section 4.1); return gae/*
    and value/explained_variance."""
    lam, mask = response_lambdas(config, experience), experience.response_mask
    advantages = _gae(experience, lam, config.gamma)
    metrics = gae_metrics(sum_over_replicas(runtime, gae_sums(advantages, mask, lam)))
    if config.whiten:
        advantages = whiten(
            advantages, mask, *mean_and_variance(sum_over_replicas(runtime, moments(advantages, mask)))
        )
    experience["advantages"] = advantages
    return metrics | add_returns(config, experience, runtime)


def response_lambdas(config: AlgorithmConfig, experience: Experience) -> Tensor:
    """Return each response's lambda for the policy's advantages, float64 [n] (VAPO eq. 5 where it is length-adaptive)."""
    if config.lambda_policy == "length_adaptive":
        return length_adaptive_lambda(experience.response_lengths, config.alpha)
    return torch.full((experience.num_sequences,), float(config.lambda_policy), dtype=torch.float64)


def add_returns(config: AlgorithmConfig, experience: Experience, runtime: Runtime) -> dict[str, float]:
    """Write returns [T], the critic's targets: Monte-Carlo returns where lambda_critic is 1. Return
    value/explained_variance."""
    mask, values = experience.response_mask, experience["values"]
    experience["returns"] = returns(_gae(experience, config.lambda_critic, config.gamma), values, mask)
    sums = sum_over_replicas(runtime, variance_sums(experience["returns"], values, mask))
    return {"value/explained_variance": explained_variance(sums)}


def _gae(experience: Experience, lam: float | Tensor, gamma: float) -> Tensor:
    # The reward stands on the last token of the response.
    rewards = torch.zeros(experience.num_tokens)
    rewards[experience.cu_seqlens[1:] - 1] = experience["rewards"]
    return gae(rewards, experience["values"], experience.response_mask, experience.cu_seqlens, lam, gamma)


def lambda_table(
    config: AlgorithmConfig, experience: Experience, longest: int, runtime: Runtime
) -> dict[str, list[float]]:
    """Return {"responses", "lambda"} by response length (`lambda_by_length`) over all replicas."""
    sums = lambda_by_length(experience.response_lengths, response_lambdas(config, experience), longest)
    responses, lam = sum_over_replicas(runtime, sums).tolist()
    return {"responses": responses, "lambda": lam}


def value_error_table(experience: Experience, runtime: Runtime) -> dict[str, list[float]]:
    """Return {"tokens", "error", "absolute"} of values against returns by position (`error_by_position`) over all
    replicas."""
    mask, lengths = experience.response_mask, experience.response_lengths
    sums = error_by_position(experience["values"], experience["returns"], mask, lengths)
    tokens, error, absolute = sum_over_replicas(runtime, sums).tolist()
    return {"tokens": tokens, "error": error, "absolute": absolute}


def policy_statistics(experience: Experience, runtime: Runtime) -> dict[str, float]:
    """Return the mean entropy and the mean probability of the sampled tokens, over all response tokens of the step."""
    mask = experience.response_mask
    probabilities = experience["old_logprobs"][mask].double().exp()
    sums = torch.stack([mask.sum().double(), experience["entropy"][mask].double().sum(), probabilities.sum()])
    tokens, entropy, probability = sum_over_replicas(runtime, sums).tolist()
    return {"policy/entropy": entropy / max(tokens, 1), "policy/mean_prob": probability / max(tokens, 1)}


def mismatch(experience: Experience, version: int, runtime: Runtime) -> dict[str, float]:
    """Return mismatch/*: how far the engine's log-probs are from the trainer's, over responses that were drawn with the
    present weights, `version`. Dynamic sampling's surplus of the step before was drawn with older ones."""
    drawn_now = _drawn_with(experience, version)
    sums, largest = mismatch_sums(experience["old_logprobs"], experience["engine_logprobs"], drawn_now)
    return mismatch_metrics(sum_over_replicas(runtime, sums), max_over_ranks(runtime, float(largest)))


def mismatch_histogram(experience: Experience, version: int, runtime: Runtime) -> dict[str, list[float]]:
    """Return {"tokens"}: how many of the same tokens are in each bin of `difference_histogram`, over all replicas."""
    drawn_now = _drawn_with(experience, version)
    counts = difference_histogram(experience["old_logprobs"], experience["engine_logprobs"], drawn_now)
    return {"tokens": sum_over_replicas(runtime, counts).tolist()}


def _drawn_with(experience: Experience, version: int) -> Tensor:
    return experience.response_mask & (experience["policy_version"] == version)[experience.sequence_ids]


def correct_mismatch(config: MismatchConfig, experience: Experience, runtime: Runtime) -> dict[str, float]:
    """Multiply policy_weights [T] by `mismatch_factors`; return the shares of response tokens that were truncated and masked.
    Does nothing where both options are off.

    So it reaches the policy loss and the KL term, which are means over what the trainer's policy would sample, and not the
    positive-example loss, which imitates. Surplus of older weights is corrected too: its ratio holds their change."""
    if not config.enabled:
        return {}
    factors, counts = mismatch_factors(
        experience["old_logprobs"],
        experience["engine_logprobs"],
        experience.response_mask,
        experience.sequence_ids,
        weight=config.weight,
        cap=config.cap,
        keep=config.mask,
        bounds=(config.mask_low, config.mask_high),
    )
    experience["policy_weights"] = experience["policy_weights"] * factors
    tokens, truncated, masked = sum_over_replicas(runtime, counts).tolist()
    return {"mismatch/truncated": truncated / max(tokens, 1.0), "mismatch/masked": masked / max(tokens, 1.0)}


def throughput(metrics: dict[str, float]) -> dict[str, float]:
    """Return tokens per second of the whole job: response tokens generated, and tokens put through forward and update."""
    rates = {}
    if metrics.get("time/rollout") and "rollout/tokens" in metrics and not metrics.get("rollout/reused"):
        rates["throughput/rollout_tokens"] = metrics["rollout/tokens"] / metrics["time/rollout"]
    seconds = sum(metrics.get(f"time/{name}", 0.0) for name in MODEL_PHASES)
    if seconds and "train/tokens" in metrics:
        rates["throughput/train_tokens"] = metrics["train/tokens"] / seconds
    return rates
