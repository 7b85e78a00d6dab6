"""Columns and metrics between the forward passes and the updates: advantages and returns, statistics of the
policy, the mismatch with the engine. The formulas are in `megarl.algorithms`; here they are applied to a
batch, and sums go over all replicas.
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
    sums_by_position,
    whiten,
)
from megarl.algorithms.evaluation import explained_variance, variance_sums
from megarl.algorithms.mismatch import difference_histogram, mismatch_factors, mismatch_metrics, mismatch_sums
from megarl.config.schema import AlgorithmConfig, MismatchConfig
from megarl.data.experience import Experience
from megarl.parallel.comm import max_over_ranks, sum_over_replicas
from megarl.parallel.runtime import Runtime
from megarl.training.batch import LocalBatch

Tables = dict[str, dict[str, list[float]]]  # of distributions.jsonl: table -> row -> one sum per bin


def add_group_advantages(batch: Experience, local: LocalBatch) -> None:
    """Write this replica's advantages [T]. The groups are those of the whole batch."""
    advantages = group_advantages(batch["rewards"], batch["group_ids"])
    local.experience["advantages"] = local.experience.spread(advantages[local.rows])


def add_gae(
    config: AlgorithmConfig, experience: Experience, longest: int, runtime: Runtime
) -> tuple[dict[str, float], Tables]:
    """Write advantages and returns [T] from rewards and values, each with its own lambda (VAPO section 4.1).
    Return gae/* and what `add_returns` does, with a table of lambda by response length (at most `longest`
    tokens)."""
    mask, lengths = experience.response_mask, experience.response_lengths
    if config.lambda_policy == "length_adaptive":  # VAPO eq. 5
        lam = length_adaptive_lambda(lengths, config.alpha)
    else:
        lam = torch.full((experience.num_sequences,), float(config.lambda_policy), dtype=torch.float64)
    advantages = _gae(experience, lam, config.gamma)
    metrics = gae_metrics(sum_over_replicas(runtime, gae_sums(advantages, mask, lam)))
    if config.whiten:
        sums = sum_over_replicas(runtime, moments(advantages, mask))
        advantages = whiten(advantages, mask, *mean_and_variance(sums))
    experience["advantages"] = advantages
    by_length = sum_over_replicas(runtime, lambda_by_length(lengths, lam, longest)).tolist()
    value_metrics, tables = add_returns(config, experience, runtime)
    return metrics | value_metrics, {
        "lambda": dict(zip(("responses", "lambda"), by_length, strict=True)),
        **tables,
    }


def add_returns(
    config: AlgorithmConfig, experience: Experience, runtime: Runtime
) -> tuple[dict[str, float], Tables]:
    """Write returns [T], the critic's targets: Monte-Carlo returns where lambda_critic is 1. Return
    value/explained_variance, and a table of values against returns by position (`error_by_position`)."""
    mask, values = experience.response_mask, experience["values"]
    targets = returns(_gae(experience, config.lambda_critic, config.gamma), values, mask)
    experience["returns"] = targets
    variance = sum_over_replicas(runtime, variance_sums(targets, values, mask))
    errors = error_by_position(values, targets, mask, experience.response_lengths)
    by_position = sum_over_replicas(runtime, errors).tolist()
    table = dict(zip(("tokens", "error", "absolute"), by_position, strict=True))
    return {"value/explained_variance": explained_variance(variance)}, {"value_error": table}


def _gae(experience: Experience, lam: float | Tensor, gamma: float) -> Tensor:
    # The reward stands on the last token of the response.
    rewards = torch.zeros(experience.num_tokens)
    rewards[experience.cu_seqlens[1:] - 1] = experience["rewards"]
    return gae(rewards, experience["values"], experience.response_mask, experience.cu_seqlens, lam, gamma)


def policy_statistics(experience: Experience, runtime: Runtime) -> tuple[dict[str, float], Tables]:
    """Return the mean entropy and the mean probability of the step's response tokens, and a table of entropy
    by position (`sums_by_position`)."""
    mask = experience.response_mask
    probabilities = experience["old_logprobs"][mask].double().exp()
    sums = torch.stack([mask.sum().double(), experience["entropy"][mask].double().sum(), probabilities.sum()])
    tokens, entropy, probability = sum_over_replicas(runtime, sums).tolist()
    metrics = {"policy/entropy": entropy / max(tokens, 1), "policy/mean_prob": probability / max(tokens, 1)}
    by_position = sums_by_position(mask, experience.response_lengths, experience["entropy"])
    table = dict(zip(("tokens", "entropy"), sum_over_replicas(runtime, by_position).tolist(), strict=True))
    return metrics, {"entropy": table}


def mismatch(experience: Experience, version: int, runtime: Runtime) -> tuple[dict[str, float], Tables]:
    """Return mismatch/*: how far the engine's log-probs are from the trainer's, over responses that were
    drawn with the present weights, `version`; and how many of these tokens are in each bin of
    `difference_histogram`.

    Dynamic sampling's surplus of the step before was drawn with older weights, and is left out."""
    trainer, engine = experience["old_logprobs"], experience["engine_logprobs"]
    drawn_now = experience.response_mask & (experience["policy_version"] == version)[experience.sequence_ids]
    sums, largest = mismatch_sums(trainer, engine, drawn_now)
    metrics = mismatch_metrics(sum_over_replicas(runtime, sums), max_over_ranks(runtime, float(largest)))
    counts = sum_over_replicas(runtime, difference_histogram(trainer, engine, drawn_now))
    return metrics, {"mismatch": {"tokens": counts.tolist()}}


def correct_mismatch(config: MismatchConfig, experience: Experience, runtime: Runtime) -> dict[str, float]:
    """Multiply policy_loss_weights [T] by `mismatch_factors`; return the shares of response tokens that were
    truncated and masked. Does nothing where both options are off.

    So it reaches the policy loss and the KL term, which are means over what the trainer's policy would
    sample, and not the positive-example loss, which imitates. Surplus of older weights is corrected too: its
    ratio holds their change."""
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
    experience["policy_loss_weights"] = experience["policy_loss_weights"] * factors
    tokens, truncated, masked = sum_over_replicas(runtime, counts).tolist()
    return {"mismatch/truncated": truncated / max(tokens, 1.0), "mismatch/masked": masked / max(tokens, 1.0)}
