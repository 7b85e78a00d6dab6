"""Compute advantages, returns and metrics between the forward passes and the updates.

Metrics are over all replicas. The formulas are in `megarl.algorithms`."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages import (
    Responses,
    error_by_position,
    gae,
    gae_metrics,
    gae_sums,
    lambda_by_length,
    length_adaptive_lambda,
    mean_and_variance,
    moments,
    returns,
    sums_by_position,
    whiten,
)
from megarl.algorithms.mismatch import difference_histogram, mismatch_factors, mismatch_metrics, mismatch_sums
from megarl.algorithms.scores import explained_variance, variance_sums
from megarl.config.methods import load_function
from megarl.config.schema import AlgorithmConfig, Config, MismatchConfig, RewardConfig
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.parallel.comm import max_over_ranks, sum_over_replicas
from megarl.parallel.runtime import Runtime
from megarl.training.batch import gather_responses

Tables = dict[str, dict[str, list[float]]]


def add_group_advantages(
    config: Config, rollout: RolloutBatch, batch: TrainBatch, runtime: Runtime
) -> dict[str, float]:
    """Write this replica's advantages [T], by the configured method from all responses of the step."""
    rewards = rollout["rewards"]
    per_token_rewards, metrics = token_rewards(config.algorithm, batch, runtime)
    if config.algorithm.kl_reward:
        rewards = gather_responses(batch.totals(per_token_rewards), rollout, batch, runtime).to(rewards.dtype)
    parts, weights = reward_parts(config.reward, rollout, batch, runtime)
    in_loss = responses_in_loss(config.reward, rollout)
    method = config.algorithm.advantage_method
    responses = Responses(rewards, rollout["group_ids"], in_loss, parts, weights)
    options = config.algorithm.arguments(method.options)
    advantages = load_function(method.function)(responses, **options).float()
    write_advantages(config.algorithm, batch, batch.spread(advantages[batch.rows]), runtime)
    return metrics


def reward_parts(
    config: RewardConfig, rollout: RolloutBatch, batch: TrainBatch, runtime: Runtime
) -> tuple[Tensor | None, list[float]]:
    """Return the parts of all responses' rewards [n, k] and their weights; None and [] without parts.

    The sum of turn rewards is one more part, of weight 1."""
    if "reward_parts" not in rollout:
        return None, []
    parts, weights = rollout["reward_parts"], [*config.parts.values()]
    if "turn_rewards" not in batch:
        return parts, weights
    turn_sums = gather_responses(batch.totals(batch["turn_rewards"]), rollout, batch, runtime)
    return torch.cat([parts, turn_sums[:, None].to(parts.dtype)], 1), [*weights, 1.0]


def responses_in_loss(config: RewardConfig, rollout: RolloutBatch) -> Tensor:
    """Return which responses count in the policy loss, bool [n]."""
    in_loss = rollout.response_lengths > 0
    return in_loss & ~rollout["truncated"] if config.overlong.filter else in_loss


def expected_reward(config: RewardConfig, chance: Tensor) -> Tensor:
    return config.weight * ((1 - chance) * config.incorrect + chance * config.correct)


def add_return_advantages(config: AlgorithmConfig, batch: TrainBatch, runtime: Runtime) -> dict[str, float]:
    """Set each token's advantage [T] to the discounted sum of rewards from that token on.

    REINFORCE++, arXiv 2501.03262, eq. 7 and 8 (with `whiten`)."""
    rewards, metrics = token_rewards(config, batch, runtime)
    mask = batch.response_mask
    rewards_to_go = gae(rewards, torch.zeros_like(rewards), mask, batch.cu_seqlens, 1.0, config.gamma)
    write_advantages(config, batch, rewards_to_go, runtime)
    return metrics


def token_rewards(
    config: AlgorithmConfig, batch: TrainBatch, runtime: Runtime
) -> tuple[Tensor, dict[str, float]]:
    """Return turn_rewards - kl_reward * (log pi_old - log pi_ref), [T] (VAPO eq. 1), and policy/kl_reward.

    The metric covers tokens sampled in this step."""
    rewards = turn_rewards(batch)
    if not config.kl_reward:
        return rewards, {}
    mask, sampled = batch.response_mask, batch.sampled_mask
    kl = torch.where(mask, batch[config.old_column] - batch["ref_logprobs"], 0.0)
    sums = torch.stack([sampled.sum().double(), kl[sampled].double().sum()])
    tokens, total = sum_over_replicas(runtime, sums).tolist()
    return rewards - config.kl_reward * kl, {"policy/kl_reward": total / max(tokens, 1)}


def turn_rewards(batch: TrainBatch) -> Tensor:
    """Return rewards [T]: each turn's at its last token, and the outcome's at the last sampled token."""
    rewards, outcome = torch.zeros(batch.num_tokens), batch["rewards"]
    if "turn_rewards" in batch:
        rewards += batch["turn_rewards"]
        outcome = (outcome.double() - batch.totals(rewards)).to(outcome.dtype)
    outcome = outcome.masked_fill(batch.unfinished, 0)  # not graded yet
    response_positions = batch.response_mask.nonzero().squeeze(-1)
    last_index = torch.searchsorted(response_positions, batch.cu_seqlens[1:]) - 1
    nonempty = batch.response_lengths > 0
    rewards[response_positions[last_index[nonempty]]] += outcome[nonempty]
    return rewards


def write_advantages(
    config: AlgorithmConfig,
    batch: TrainBatch,
    advantages: Tensor,
    runtime: Runtime,
    left_out: Tensor | None = None,
) -> None:
    """Write advantages [T]; with `whiten`, normalised over all replicas' tokens in the policy loss.

    left_out: bool [T], excluded from whitening."""
    if config.whiten:
        mask = batch["policy_loss_weights"] > 0
        if left_out is not None:
            mask = mask & ~left_out
        sums = sum_over_replicas(runtime, moments(advantages, mask))
        advantages = whiten(advantages, mask, *mean_and_variance(sums))
    batch["advantages"] = advantages


def add_gae(config: Config, batch: TrainBatch, runtime: Runtime) -> tuple[dict[str, float], Tables]:
    """Write advantages and returns [T], each with its own lambda (VAPO section 4.1)."""
    algorithm = config.algorithm
    lam = policy_lambda(algorithm, batch.response_lengths)
    rewards, metrics = token_rewards(algorithm, batch, runtime)
    advantages = gae(rewards, batch["values"], batch.response_mask, batch.cu_seqlens, lam, algorithm.gamma)
    statistics, lambda_table = gae_statistics(config, batch, advantages, lam, runtime)
    write_advantages(algorithm, batch, advantages, runtime)
    value_metrics, tables = add_returns(algorithm, batch, runtime, rewards)
    return metrics | statistics | value_metrics, {**lambda_table, **tables}


def policy_lambda(config: AlgorithmConfig, lengths: Tensor) -> Tensor:
    """Return the policy's lambda per response, float64 [n] (VAPO eq. 5)."""
    if config.lambda_policy == "length_adaptive":
        return length_adaptive_lambda(lengths, config.alpha, config.lambda_floor)
    return torch.full((len(lengths),), float(config.lambda_policy), dtype=torch.float64)


def gae_statistics(
    config: Config, batch: TrainBatch, advantages: Tensor, lam: Tensor, runtime: Runtime
) -> tuple[dict[str, float], Tables]:
    lengths, max_length = batch.response_lengths, config.rollout.max_response_tokens
    nonempty = lengths > 0  # a response whose grading failed has no token
    sums = gae_sums(advantages, batch.sampled_mask, lam[nonempty], config.algorithm.lambda_floor)
    metrics = gae_metrics(sum_over_replicas(runtime, sums))
    bins = lambda_by_length(lengths[nonempty], lam[nonempty], max_length)
    by_length = sum_over_replicas(runtime, bins).tolist()
    return metrics, {"lambda": dict(zip(("responses", "lambda"), by_length, strict=True))}


def add_teacher(
    weight: float, old: Tensor, teacher: Tensor, batch: TrainBatch, runtime: Runtime
) -> dict[str, float]:
    """Add weight (log pi_teacher - log pi_old) to the advantages [T] of sampled tokens with a teacher.

    On-policy distillation (Thinking Machines, 2025), without a gradient through the log-ratio.

    old, teacher: log-probs [T]; the teacher's are -inf without a teacher.
    Return policy/teacher_kl, nats per token, and policy/taught (docs/algorithms.md)."""
    sampled = batch.sampled_mask
    mask = sampled & (teacher > -torch.inf)
    kl = torch.where(mask, old - teacher, 0.0)
    batch["advantages"] = batch["advantages"] - weight * kl
    sums = torch.stack([sampled.sum().double(), mask.sum().double(), kl.double().sum()])
    tokens, taught, total = sum_over_replicas(runtime, sums).tolist()
    return {"policy/teacher_kl": total / max(taught, 1), "policy/taught": taught / max(tokens, 1)}


def add_returns(
    config: AlgorithmConfig, batch: TrainBatch, runtime: Runtime, rewards: Tensor
) -> tuple[dict[str, float], Tables]:
    """Write returns [T], the critic's targets; 0 for unfinished responses. rewards: [T]."""
    unfinished = batch.unfinished
    mask = batch.response_mask & ~torch.repeat_interleave(unfinished, batch.lengths)
    lengths, values = batch.response_lengths.masked_fill(unfinished, 0), batch["values"]
    advantages = gae(rewards, values, mask, batch.cu_seqlens, config.lambda_critic, config.gamma)
    targets = returns(advantages, values, mask)
    batch["returns"] = targets
    variance = sum_over_replicas(runtime, variance_sums(targets, values, mask))
    errors = error_by_position(values, targets, mask, lengths)
    by_position = sum_over_replicas(runtime, errors).tolist()
    table = dict(zip(("tokens", "error", "absolute"), by_position, strict=True))
    return {"value/explained_variance": explained_variance(variance)}, {"value_error": table}


def policy_statistics(batch: TrainBatch, runtime: Runtime) -> tuple[dict[str, float], Tables]:
    mask = batch.sampled_mask
    probabilities = batch["old_logprobs"][mask].double().exp()
    sums = torch.stack([mask.sum().double(), batch["entropy"][mask].double().sum(), probabilities.sum()])
    tokens, entropy, probability = sum_over_replicas(runtime, sums).tolist()
    metrics = {"policy/entropy": entropy / max(tokens, 1), "policy/mean_prob": probability / max(tokens, 1)}
    by_position = sums_by_position(mask, batch.sampled_lengths, batch["entropy"])
    table = dict(zip(("tokens", "entropy"), sum_over_replicas(runtime, by_position).tolist(), strict=True))
    return metrics, {"entropy": table}


def mismatch(
    batch: TrainBatch, trainer: Tensor, version: int | None, runtime: Runtime
) -> tuple[dict[str, float], Tables]:
    """Return mismatch/* of the engine's log-probs against `trainer` [T], and their histogram.

    version: of the weights whose tokens count; None: all tokens"""
    engine, on_policy_mask = batch["engine_logprobs"], batch.sampled_mask
    # With `prefix_tokens`, `sampled_mask` leaves out the tokens of earlier steps.
    if "prefix_tokens" not in batch and version is not None:
        on_policy_mask = on_policy_mask & (batch["policy_version"] == version)[batch.sequence_ids]
    sums, largest = mismatch_sums(trainer, engine, on_policy_mask)
    metrics = mismatch_metrics(sum_over_replicas(runtime, sums), max_over_ranks(runtime, float(largest)))
    counts = sum_over_replicas(runtime, difference_histogram(trainer, engine, on_policy_mask))
    return metrics, {"mismatch": {"tokens": counts.tolist()}}


def correct_mismatch(config: MismatchConfig, batch: TrainBatch, runtime: Runtime) -> dict[str, float]:
    """Multiply policy_loss_weights [T] by `mismatch_factors`; uncorrected_weights keeps the old ones.

    The policy loss and the KL term use the new ones: they estimate a mean over the policy from samples.
    Entropy and top-k terms sum over the distribution, and use the old ones."""
    if not config.enabled:
        return {}
    factors, counts = mismatch_factors(
        batch["old_logprobs"],
        batch["engine_logprobs"],
        batch.sampled_mask,
        batch.sequence_ids,
        weight=config.weight,
        cap=config.cap,
        keep=config.mask,
        bounds=(config.mask_low, config.mask_high),
    )
    weights = batch["policy_loss_weights"]
    batch["uncorrected_weights"], batch["policy_loss_weights"] = weights, weights * factors
    tokens, truncated, masked = sum_over_replicas(runtime, counts).tolist()
    return {"mismatch/truncated": truncated / max(tokens, 1.0), "mismatch/masked": masked / max(tokens, 1.0)}
