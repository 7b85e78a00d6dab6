"""Advantages and returns as columns of an Experience, with the global statistics that they need."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages import (
    gae,
    gae_metrics,
    gae_sums,
    group_advantages,
    length_adaptive_lambda,
    mean_and_variance,
    moments,
    returns,
    whiten,
)
from megarl.algorithms.evaluation import explained_variance, variance_sums
from megarl.algorithms.histograms import error_by_position, lambda_by_length
from megarl.config.schema import AlgorithmConfig
from megarl.data.experience import Experience
from megarl.parallel.comm import sum_over_replicas
from megarl.parallel.runtime import Runtime


def add_group_advantages(batch: Experience) -> None:
    """Writes advantages [T] from rewards and group_ids. `batch` must hold whole groups: it runs before the batch is divided."""
    batch["advantages"] = batch.spread(group_advantages(batch["rewards"], batch["group_ids"]))


def add_gae(config: AlgorithmConfig, experience: Experience, runtime: Runtime) -> dict[str, float]:
    """Writes advantages and returns [T] from rewards and values, each with its own lambda (VAPO section 4.1); gives gae/*."""
    lam, mask = response_lambdas(config, experience), experience.response_mask
    advantages = _gae(experience, lam, config.gamma)
    metrics = gae_metrics(sum_over_replicas(runtime, gae_sums(advantages, mask, lam)))
    if config.whiten:
        advantages = whiten(advantages, mask, *mean_and_variance(sum_over_replicas(runtime, moments(advantages, mask))))
    experience["advantages"] = advantages
    return metrics | add_returns(config, experience, runtime)


def response_lambdas(config: AlgorithmConfig, experience: Experience) -> Tensor:
    """Each response's lambda of the policy's advantages, float64 [n]."""
    if config.lambda_policy == "length_adaptive":
        return length_adaptive_lambda(experience.response_lengths, config.alpha)
    return torch.full((experience.num_sequences,), float(config.lambda_policy), dtype=torch.float64)


def add_returns(config: AlgorithmConfig, experience: Experience, runtime: Runtime) -> dict[str, float]:
    """Writes returns [T], the critic's targets; with lambda_critic = 1 they are Monte-Carlo returns. Gives value/explained_variance."""
    mask, values = experience.response_mask, experience["values"]
    experience["returns"] = returns(_gae(experience, config.lambda_critic, config.gamma), values, mask)
    sums = sum_over_replicas(runtime, variance_sums(experience["returns"], values, mask))
    return {"value/explained_variance": explained_variance(sums)}


def lambda_table(config: AlgorithmConfig, experience: Experience, longest: int, runtime: Runtime) -> dict[str, list[float]]:
    """{"responses", "lambda"}: `lambda_by_length` over all replicas."""
    sums = lambda_by_length(experience.response_lengths, response_lambdas(config, experience), longest)
    responses, lam = sum_over_replicas(runtime, sums).tolist()
    return {"responses": responses, "lambda": lam}


def value_error_table(experience: Experience, runtime: Runtime) -> dict[str, list[float]]:
    """{"tokens", "error", "absolute"}: `error_by_position` over all replicas. Reads values and returns."""
    sums = error_by_position(experience["values"], experience["returns"], experience.response_mask, experience.response_lengths)
    tokens, error, absolute = sum_over_replicas(runtime, sums).tolist()
    return {"tokens": tokens, "error": error, "absolute": absolute}


def _gae(experience: Experience, lam: float | Tensor, gamma: float) -> Tensor:
    # The reward stands on the last token of the response.
    rewards = torch.zeros(experience.num_tokens)
    rewards[experience.cu_seqlens[1:] - 1] = experience["rewards"]
    return gae(rewards, experience["values"], experience.response_mask, experience.cu_seqlens, lam, gamma)
