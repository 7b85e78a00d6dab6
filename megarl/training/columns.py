"""Columns and metrics between the forward passes and the updates: advantages and returns, statistics of the
policy, the mismatch with the engine. The formulas are in `megarl.algorithms`; here they are applied to a
batch, and sums go over all replicas.
"""

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

Tables = dict[str, dict[str, list[float]]]  # of distributions.jsonl: table -> row -> one sum per bin


def add_group_advantages(
    config: Config, rollout: RolloutBatch, batch: TrainBatch, runtime: Runtime
) -> dict[str, float]:
    """Write this replica's advantages [T], each response's own at all of its tokens.

    The configured method computes them from all responses of the step (`Responses`). Rewards are of whole
    responses: of several turns their sum. Return policy/kl_reward if the reward has a KL term.
    """
    rewards = rollout["rewards"]
    of_tokens, metrics = token_rewards(config.algorithm, batch, runtime)
    if config.algorithm.kl_reward:  # the KL of the whole response
        rewards = gather_responses(batch.totals(of_tokens), rollout, batch, runtime).to(rewards.dtype)
    parts, weights = reward_parts(config.reward, rollout, batch, runtime)
    counted = responses_in_loss(config.reward, rollout)
    compute_advantages = load_function(config.algorithm.advantage_method.function)
    advantages = compute_advantages(Responses(rewards, rollout["group_ids"], counted, parts, weights))
    write_advantages(config.algorithm, batch, batch.spread(advantages[batch.rows]), runtime)
    return metrics


def reward_parts(
    config: RewardConfig, rollout: RolloutBatch, batch: TrainBatch, runtime: Runtime
) -> tuple[Tensor | None, list[float]]:
    """Return the parts of all responses' rewards [n, k] and their weights; None and [] without parts.

    The sum of the turns' own rewards is one more part, of weight 1.
    """
    if "reward_parts" not in rollout:
        return None, []
    parts, weights = rollout["reward_parts"], [*config.parts.values()]
    if "turn_rewards" not in batch:
        return parts, weights
    of_turns = gather_responses(batch.totals(batch["turn_rewards"]), rollout, batch, runtime)
    return torch.cat([parts, of_turns[:, None].to(parts.dtype)], 1), [*weights, 1.0]


def responses_in_loss(config: RewardConfig, rollout: RolloutBatch) -> Tensor:
    """Return which responses count in the policy loss, bool [n].

    Those are the responses with tokens, without the truncated ones that overlong filtering leaves out.
    """
    counted = rollout.response_lengths > 0
    return counted & ~rollout["truncated"] if config.overlong.filter else counted


def expected_reward(config: RewardConfig, chance: Tensor) -> Tensor:
    """Return the mean reward from the verifier of an answer that is right with this chance, [n]."""
    return config.weight * ((1 - chance) * config.incorrect + chance * config.correct)


def add_return_advantages(config: AlgorithmConfig, batch: TrainBatch, runtime: Runtime) -> dict[str, float]:
    """Write as advantages [T] the discounted rewards from each token on (REINFORCE++, arXiv 2501.03262, eq.
    7 and 8, with `whiten`); return policy/kl_reward where there is one."""
    rewards, metrics = token_rewards(config, batch, runtime)
    mask = batch.response_mask
    ahead = gae(rewards, torch.zeros_like(rewards), mask, batch.cu_seqlens, 1.0, config.gamma)
    write_advantages(config, batch, ahead, runtime)
    return metrics


def token_rewards(
    config: AlgorithmConfig, batch: TrainBatch, runtime: Runtime
) -> tuple[Tensor, dict[str, float]]:
    """Return the reward of each token [T], as `turn_rewards` gives it, less beta (log pi_old - log pi_ref) at
    every one where kl_reward is beta (VAPO eq. 1); and policy/kl_reward, the mean of that difference over
    the tokens that the step has drawn."""
    rewards = turn_rewards(batch)
    if not config.kl_reward:
        return rewards, {}
    mask, drawn = batch.response_mask, batch.drawn
    kl = torch.where(mask, batch[config.old_column] - batch["ref_logprobs"], 0.0)
    sums = torch.stack([drawn.sum().double(), kl[drawn].double().sum()])
    tokens, total = sum_over_replicas(runtime, sums).tolist()
    return rewards - config.kl_reward * kl, {"policy/kl_reward": total / max(tokens, 1)}


def turn_rewards(batch: TrainBatch) -> Tensor:
    """Return rewards [T] whose sum over a response is its reward: a turn's own on its last token, the rest,
    the outcome's, on the last token that the policy sampled."""
    rewards, outcome = torch.zeros(batch.num_tokens), batch["rewards"]
    if "turn_rewards" in batch:
        rewards += batch["turn_rewards"]
        outcome = (outcome.double() - batch.totals(rewards)).to(outcome.dtype)
    outcome = outcome.masked_fill(batch.unfinished, 0)  # which has none yet
    # The last True of each sequence that has one.
    own = batch.response_mask.nonzero().squeeze(-1)
    last = torch.searchsorted(own, batch.cu_seqlens[1:]) - 1
    some = batch.response_lengths > 0
    rewards[own[last[some]]] += outcome[some]
    return rewards


def write_advantages(
    config: AlgorithmConfig,
    batch: TrainBatch,
    advantages: Tensor,
    runtime: Runtime,
    left_out: Tensor | None = None,
) -> None:
    """Write advantages [T]; with `whiten`, normalise them over all replicas' tokens in the policy loss.

    Those are the tokens of this step, without what overlong filtering and mismatch masks leave out.

    Args:
        left_out: bool [T], further tokens that whitening leaves out.
    """
    if config.whiten:
        mask = batch["policy_loss_weights"] > 0
        if left_out is not None:
            mask = mask & ~left_out
        sums = sum_over_replicas(runtime, moments(advantages, mask))
        advantages = whiten(advantages, mask, *mean_and_variance(sums))
    batch["advantages"] = advantages


def add_gae(config: Config, batch: TrainBatch, runtime: Runtime) -> tuple[dict[str, float], Tables]:
    """Write advantages and returns [T], each with its own lambda (VAPO section 4.1).

    Return gae/* and the results of `add_returns`, with a table of lambda by response length.
    """
    algorithm = config.algorithm
    lam = policy_lambda(algorithm, batch.response_lengths)
    rewards, metrics = token_rewards(algorithm, batch, runtime)
    advantages = gae(
        *(
            rewards,
            batch["values"],
            batch.response_mask,
            batch.cu_seqlens,
            lam,
            algorithm.gamma,
        )
    )
    measured, lambdas = gae_statistics(config, batch, advantages, lam, runtime)
    write_advantages(algorithm, batch, advantages, runtime)
    value_metrics, tables = add_returns(algorithm, batch, runtime, rewards)
    return metrics | measured | value_metrics, {**lambdas, **tables}


def policy_lambda(config: AlgorithmConfig, lengths: Tensor) -> Tensor:
    """Return lambda of the policy's advantages, float64 [n], of responses of these lengths (VAPO eq. 5)."""
    if config.lambda_policy == "length_adaptive":
        return length_adaptive_lambda(lengths, config.alpha, config.lambda_floor)
    return torch.full((len(lengths),), float(config.lambda_policy), dtype=torch.float64)


def gae_statistics(
    config: Config, batch: TrainBatch, advantages: Tensor, lam: Tensor, runtime: Runtime
) -> tuple[dict[str, float], Tables]:
    """Return gae/* of advantages [T] before whitening, and a table of lambda [n] by response length."""
    lengths, longest = batch.response_lengths, config.rollout.max_response_tokens
    some = lengths > 0  # an ungraded response has no token
    sums = gae_sums(advantages, batch.drawn, lam[some], config.algorithm.lambda_floor)
    metrics = gae_metrics(sum_over_replicas(runtime, sums))
    by_length = sum_over_replicas(runtime, lambda_by_length(lengths[some], lam[some], longest)).tolist()
    return metrics, {"lambda": dict(zip(("responses", "lambda"), by_length, strict=True))}


def add_teacher(
    weight: float, old: Tensor, teacher: Tensor, batch: TrainBatch, runtime: Runtime
) -> dict[str, float]:
    """Add weight (log pi_teacher - log pi_old) to the advantages [T] of the tokens that the step has drawn
    and that have a teacher; `old` and `teacher` are log-probs [T], the teacher's -inf where there is none.
    Return policy/teacher_kl, the mean of log pi_old - log pi_teacher over these tokens, which estimates the
    reverse KL from the policy to its teacher, in nats a token, and policy/taught, their share of all.

    On-policy distillation (Thinking Machines, 2025): a token's own log-ratio, without what follows it, and no
    gradient through it. (The gradient of the log-ratio itself is 0 on average: nothing would be learned.)"""
    drawn = batch.drawn
    mask = drawn & (teacher > -torch.inf)
    kl = torch.where(mask, old - teacher, 0.0)
    batch["advantages"] = batch["advantages"] - weight * kl
    sums = torch.stack([drawn.sum().double(), mask.sum().double(), kl.double().sum()])
    tokens, taught, total = sum_over_replicas(runtime, sums).tolist()
    return {"policy/teacher_kl": total / max(taught, 1), "policy/taught": taught / max(tokens, 1)}


def add_returns(
    config: AlgorithmConfig, batch: TrainBatch, runtime: Runtime, rewards: Tensor
) -> tuple[dict[str, float], Tables]:
    """Write returns [T], the critic's targets: Monte-Carlo returns of `rewards` [T] where lambda_critic is 1;
    0 in responses that go on in the next step. Return value/explained_variance, and a table of values against
    returns by position (`error_by_position`)."""
    goes_on = batch.unfinished
    mask = batch.response_mask & ~torch.repeat_interleave(goes_on, batch.lengths)
    lengths, values = batch.response_lengths.masked_fill(goes_on, 0), batch["values"]
    errors_ahead = gae(rewards, values, mask, batch.cu_seqlens, config.lambda_critic, config.gamma)
    targets = returns(errors_ahead, values, mask)
    batch["returns"] = targets
    variance = sum_over_replicas(runtime, variance_sums(targets, values, mask))
    errors = error_by_position(values, targets, mask, lengths)
    by_position = sum_over_replicas(runtime, errors).tolist()
    table = dict(zip(("tokens", "error", "absolute"), by_position, strict=True))
    return {"value/explained_variance": explained_variance(variance)}, {"value_error": table}


def policy_statistics(batch: TrainBatch, runtime: Runtime) -> tuple[dict[str, float], Tables]:
    """Return the mean entropy and the mean probability of the tokens that the step has drawn, and a table of
    entropy by position (`sums_by_position`)."""
    mask = batch.drawn
    probabilities = batch["old_logprobs"][mask].double().exp()
    sums = torch.stack([mask.sum().double(), batch["entropy"][mask].double().sum(), probabilities.sum()])
    tokens, entropy, probability = sum_over_replicas(runtime, sums).tolist()
    metrics = {"policy/entropy": entropy / max(tokens, 1), "policy/mean_prob": probability / max(tokens, 1)}
    by_position = sums_by_position(mask, batch.drawn_lengths, batch["entropy"])
    table = dict(zip(("tokens", "entropy"), sum_over_replicas(runtime, by_position).tolist(), strict=True))
    return metrics, {"entropy": table}


def mismatch(
    batch: TrainBatch, trainer: Tensor, version: int, runtime: Runtime
) -> tuple[dict[str, float], Tables]:
    """Return mismatch/*: how far the engine's log-probs are from the trainer's [T], over responses that were
    drawn with the present weights, `version`; and how many of these tokens are in each bin of
    `difference_histogram`.

    Dynamic sampling's surplus of the step before was drawn with older weights, and is left out; so are
    earlier windows."""
    engine, drawn_now = batch["engine_logprobs"], batch.drawn
    if "begun" not in batch:
        drawn_now = drawn_now & (batch["policy_version"] == version)[batch.sequence_ids]
    sums, largest = mismatch_sums(trainer, engine, drawn_now)
    metrics = mismatch_metrics(sum_over_replicas(runtime, sums), max_over_ranks(runtime, float(largest)))
    counts = sum_over_replicas(runtime, difference_histogram(trainer, engine, drawn_now))
    return metrics, {"mismatch": {"tokens": counts.tolist()}}


def correct_mismatch(config: MismatchConfig, batch: TrainBatch, runtime: Runtime) -> dict[str, float]:
    """Multiply policy_loss_weights [T] by `mismatch_factors`, and write what they were as
    uncorrected_weights; return the shares of response tokens that were truncated and masked. Does nothing
    where both options are off.

    The factors correct for which token was sampled. They apply to the policy loss and the KL term, which
    estimate a mean over the trainer's policy from sampled tokens. The entropy and a teacher's top-k term sum
    over the whole distribution, and the positive-example loss imitates: they keep their weights. verl and
    slime do not weight the entropy either. Surplus of older weights is corrected too: its ratio holds their
    change."""
    if not config.enabled:
        return {}
    factors, counts = mismatch_factors(
        batch["old_logprobs"],
        batch["engine_logprobs"],
        batch.drawn,
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
