"""Columns and metrics between the forward passes and the updates: advantages and returns, statistics of the
policy, the mismatch with the engine. The formulas are in `megarl.algorithms`; here they are applied to a
batch, and sums go over all replicas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages import (
    SuccessTracker,
    error_by_position,
    extended_gae,
    gae,
    gae_metrics,
    gae_sums,
    group_advantages,
    lambda_by_length,
    length_adaptive_lambda,
    mean_and_variance,
    moments,
    per_reward_advantages,
    returns,
    sums_by_position,
    whiten,
    window_tail,
)
from megarl.algorithms.mismatch import difference_histogram, mismatch_factors, mismatch_metrics, mismatch_sums
from megarl.algorithms.scores import explained_variance, variance_sums
from megarl.config.schema import AgreementConfig, AlgorithmConfig, Config, MismatchConfig, RewardConfig
from megarl.data.experience import Experience, StepBatch
from megarl.parallel.comm import among_smallest, max_over_ranks, sum_over_replicas
from megarl.parallel.runtime import Runtime
from megarl.training.batch import LocalBatch

Tables = dict[str, dict[str, list[float]]]  # of distributions.jsonl: table -> row -> one sum per bin


def add_group_advantages(
    config: AlgorithmConfig, batch: Experience | StepBatch, local: LocalBatch, runtime: Runtime
) -> dict[str, float]:
    """Write this replica's advantages [T], each response's own at all of its tokens; return policy/kl_reward
    where there is one. The groups are those of the whole batch, and compare whole rewards: of several turns
    their sum."""
    experience, rewards = local.experience, batch["rewards"]
    of_tokens, metrics = token_rewards(config, experience, runtime)
    if config.kl_reward:  # the KL of the whole response
        rewards = local.gather(experience.totals(of_tokens), batch, runtime).to(rewards.dtype)
    assert config.advantage in ("group", "group_mean", "leave_one_out")
    advantages = group_advantages(rewards, batch["group_ids"], config.advantage)
    _write_advantages(config, experience, experience.spread(advantages[local.rows]), runtime)
    return metrics


def add_per_reward_advantages(
    config: Config, batch: Experience | StepBatch, local: LocalBatch, runtime: Runtime
) -> None:
    """Write this replica's advantages [T] from the parts of the rewards (GDPO), each response's own at all of
    its tokens. What turns have got of their own is one more part, of weight 1."""
    experience, parts = local.experience, batch["reward_parts"]
    weights = [*config.reward.parts.values()]
    if "turn_rewards" in experience:
        of_turns = local.gather(experience.totals(experience["turn_rewards"]), batch, runtime)
        parts, weights = torch.cat([parts, of_turns[:, None].to(parts.dtype)], 1), [*weights, 1.0]
    counted = responses_in_loss(config.reward, batch)
    advantages = per_reward_advantages(parts, weights, batch["group_ids"], counted)
    _write_advantages(config.algorithm, experience, experience.spread(advantages[local.rows]), runtime)


def add_tracked_advantages(
    config: Config,
    batch: Experience | StepBatch,
    local: LocalBatch,
    runtime: Runtime,
    tracker: SuccessTracker,
) -> dict[str, float]:
    """Write this replica's advantages [T]: each response's reward less what the tracker expects of its
    prompt, normalised over the batch's responses (SPO, arXiv 2509.13232). Then have the tracker see the
    answers.

    Return value/explained_variance of its chances, and tracker/known, the share of responses to prompts that
    had been answered before."""
    answered, prompts, correct = batch.response_lengths > 0, batch["prompt_uids"], batch["correct"]
    chances = tracker.chances(prompts)
    known = [uid in tracker.counts for uid in prompts[answered].tolist()]
    advantages = batch["rewards"].double() - expected_reward(config.reward, chances)
    counted = responses_in_loss(config.reward, batch)
    advantages = whiten(advantages, counted, *mean_and_variance(moments(advantages, counted)))
    tracker.observe(prompts[answered], correct[answered])
    experience = local.experience
    _write_advantages(
        config.algorithm, experience, experience.spread(advantages[local.rows].float()), runtime
    )
    explained = explained_variance(variance_sums(correct.double(), chances, answered))
    return {"value/explained_variance": explained, "tracker/known": sum(known) / max(len(known), 1)}


def responses_in_loss(config: RewardConfig, batch: Experience | StepBatch) -> Tensor:
    """Return which responses count in the policy loss, bool [n]: those with tokens, without the truncated
    ones that overlong filtering leaves out."""
    counted = batch.response_lengths > 0
    return counted & ~batch["truncated"] if config.overlong.filter else counted


def expected_reward(config: RewardConfig, chance: Tensor) -> Tensor:
    """Return what an answer earns on average from the verifier that is right with this chance, [n]."""
    return config.weight * ((1 - chance) * config.incorrect + chance * config.correct)


def add_return_advantages(
    config: AlgorithmConfig, experience: Experience, runtime: Runtime
) -> dict[str, float]:
    """Write as advantages [T] the discounted rewards from each token on (REINFORCE++, arXiv 2501.03262, eq.
    7 and 8, with `whiten`); return policy/kl_reward where there is one."""
    rewards, metrics = token_rewards(config, experience, runtime)
    mask = experience.response_mask
    ahead = gae(rewards, torch.zeros_like(rewards), mask, experience.cu_seqlens, 1.0, config.gamma)
    _write_advantages(config, experience, ahead, runtime)
    return metrics


def token_rewards(
    config: AlgorithmConfig, experience: Experience, runtime: Runtime
) -> tuple[Tensor, dict[str, float]]:
    """Return the reward of each token [T], as `turn_rewards` gives it, less beta (log pi_old - log pi_ref) at
    every one where kl_reward is beta (VAPO eq. 1); and policy/kl_reward, the mean of that difference over
    the tokens that the step has drawn."""
    rewards = turn_rewards(experience)
    if not config.kl_reward:
        return rewards, {}
    mask, drawn = experience.response_mask, experience.drawn
    kl = torch.where(mask, experience[config.old_column] - experience["ref_logprobs"], 0.0)
    sums = torch.stack([drawn.sum().double(), kl[drawn].double().sum()])
    tokens, total = sum_over_replicas(runtime, sums).tolist()
    return rewards - config.kl_reward * kl, {"policy/kl_reward": total / max(tokens, 1)}


def turn_rewards(experience: Experience) -> Tensor:
    """Return rewards [T] whose sum over a response is its reward: a turn's own on its last token, the rest,
    the outcome's, on the last token that the policy sampled."""
    rewards, outcome = torch.zeros(experience.num_tokens), experience["rewards"]
    if "turn_rewards" in experience:
        rewards += experience["turn_rewards"]
        outcome = (outcome.double() - experience.totals(rewards)).to(outcome.dtype)
    outcome = outcome.masked_fill(experience.unfinished, 0)  # which has none yet
    # The last True of each sequence that has one.
    own = experience.response_mask.nonzero().squeeze(-1)
    last = torch.searchsorted(own, experience.cu_seqlens[1:]) - 1
    some = experience.response_lengths > 0
    rewards[own[last[some]]] += outcome[some]
    return rewards


def _write_advantages(
    config: AlgorithmConfig, experience: Experience, advantages: Tensor, runtime: Runtime
) -> None:
    """Write advantages [T]; with `whiten`, normalise them over all replicas' tokens in the policy loss.

    Those are the tokens of this step, without what overlong filtering and mismatch masks leave out. The tail
    of unfinished windows (`window_tail`) does not count either."""
    if config.whiten:
        mask = experience["policy_loss_weights"] > 0
        if config.window_tail:
            unfinished = experience.unfinished
            drawn = experience.drawn
            mask = mask & ~window_tail(drawn, experience.cu_seqlens, unfinished, config.window_tail)
        sums = sum_over_replicas(runtime, moments(advantages, mask))
        advantages = whiten(advantages, mask, *mean_and_variance(sums))
    experience["advantages"] = advantages


def add_gae(
    config: AlgorithmConfig, experience: Experience, longest: int, runtime: Runtime, window: int = 0
) -> tuple[dict[str, float], Tables]:
    """Write advantages and returns [T] from rewards and values, each with its own lambda (VAPO section 4.1);
    of windows of at most `window` tokens EGAE (T-PPO), for whose lambda an unfinished response is taken to be
    half a window longer than it is. Return gae/* and what `add_returns` does, with a table of lambda by
    response length (at most `longest` tokens)."""
    mask, lengths, unfinished = experience.drawn, experience.response_lengths, experience.unfinished
    if config.lambda_policy == "length_adaptive":  # VAPO eq. 5
        expected = lengths + unfinished * (window // 2)
        lam = length_adaptive_lambda(expected, config.alpha, config.lambda_floor)
    else:
        lam = torch.full((experience.num_sequences,), float(config.lambda_policy), dtype=torch.float64)
    rewards, metrics = token_rewards(config, experience, runtime)
    advantages = extended_gae(
        rewards,
        experience["values"],
        mask,
        experience.cu_seqlens,
        lam,
        unfinished,
        config.gamma,
        config.window_tail,
    )
    some = lengths > 0  # a response that nobody has judged has no token
    metrics |= gae_metrics(
        sum_over_replicas(runtime, gae_sums(advantages, mask, lam[some], config.lambda_floor))
    )
    _write_advantages(config, experience, advantages, runtime)
    by_length = sum_over_replicas(runtime, lambda_by_length(lengths[some], lam[some], longest)).tolist()
    value_metrics, tables = add_returns(config, experience, runtime, rewards)
    return metrics | value_metrics, {
        "lambda": dict(zip(("responses", "lambda"), by_length, strict=True)),
        **tables,
    }


def add_agreement(config: AgreementConfig, experience: Experience, runtime: Runtime) -> dict[str, float]:
    """Set the advantages [T] to 0 at that share of the step's tokens on whose values, critic_values [T, m],
    the critics agree most, and with a filter write entropy_weights [T]: the token weights before any mismatch
    correction, but 0 at the share on which they agree least (AsyPPO, arXiv 2510.01656). Denominators stay as
    they are.

    How far apart they are is their standard deviation in float32. Of tokens that are alike in it all are
    taken or none, so that a share is at most what it says. Return value/spread, its mean, and the shares
    policy/agreed and policy/disputed."""
    weights = experience["policy_loss_weights"]
    counted = weights > 0
    spread = experience["critic_values"].double().std(-1, correction=0).float()
    keys = spread.view(torch.int32)[counted]  # floats that are not negative are ordered as their bits are
    sums = torch.stack([counted.sum().double(), spread[counted].double().sum()])
    tokens, total = sum_over_replicas(runtime, sums).tolist()
    metrics, taken = {"value/spread": total / max(tokens, 1)}, {}
    for name, share, order in (
        ("agreed", config.mask, keys),
        ("disputed", config.filter, torch.iinfo(keys.dtype).max - keys),
    ):
        taken[name] = counted.clone()
        taken[name][counted] = among_smallest(runtime, order, int(share * tokens))
        count = float(sum_over_replicas(runtime, taken[name].sum()))
        metrics[f"policy/{name}"] = count / max(tokens, 1)
    experience["advantages"] = experience["advantages"].masked_fill(taken["agreed"], 0.0)
    if config.filter:
        if "uncorrected_weights" in experience:
            weights = experience["uncorrected_weights"]
        experience["entropy_weights"] = weights.masked_fill(taken["disputed"], 0.0)
    return metrics


def add_teacher(
    weight: float, old: Tensor, teacher: Tensor, experience: Experience, runtime: Runtime
) -> dict[str, float]:
    """Add weight (log pi_teacher - log pi_old) to the advantages [T] of the tokens that the step has drawn
    and that have a teacher; `old` and `teacher` are log-probs [T], the teacher's -inf where there is none.
    Return policy/teacher_kl, the mean of log pi_old - log pi_teacher over these tokens, which estimates the
    reverse KL from the policy to its teacher, in nats a token, and policy/taught, their share of all.

    On-policy distillation (Thinking Machines, 2025): a token's own log-ratio, without what follows it, and no
    gradient through it. (The gradient of the log-ratio itself is 0 on average: nothing would be learned.)"""
    drawn = experience.drawn
    mask = drawn & (teacher > -torch.inf)
    kl = torch.where(mask, old - teacher, 0.0)
    experience["advantages"] = experience["advantages"] - weight * kl
    sums = torch.stack([drawn.sum().double(), mask.sum().double(), kl.double().sum()])
    tokens, taught, total = sum_over_replicas(runtime, sums).tolist()
    return {"policy/teacher_kl": total / max(taught, 1), "policy/taught": taught / max(tokens, 1)}


def add_prompt_advantages(config: Config, experience: Experience, runtime: Runtime) -> dict[str, float]:
    """Write advantages [T], each response's own at all of its tokens: its reward less what the critic expects
    of its prompt (SPPO, arXiv 2604.08865: R - sigmoid(V) for R in {0, 1}); and what `add_prompt_returns`
    does."""
    metrics, chances = add_prompt_returns(experience, runtime)
    advantages = experience["rewards"].double() - expected_reward(config.reward, chances)
    _write_advantages(config.algorithm, experience, experience.spread(advantages.float()), runtime)
    return metrics


def add_prompt_returns(experience: Experience, runtime: Runtime) -> tuple[dict[str, float], Tensor]:
    """Write returns [T], the targets of a critic that reads prompts alone: at the first token of a response 1
    if it is right. Return value/explained_variance of its chances of that, sigmoid(V), and these, float64
    [n]; 1/2 where nobody has judged."""
    some = experience.response_lengths > 0
    first = (experience.cu_seqlens[:-1] + experience.prompt_lengths)[some]
    chances = torch.full((experience.num_sequences,), 0.5, dtype=torch.float64)
    chances[some] = experience["values"][first].double().sigmoid()
    right = experience["correct"].double()
    experience["returns"] = torch.zeros(experience.num_tokens).index_copy_(0, first, right[some].float())
    variance = sum_over_replicas(runtime, variance_sums(right, chances, some))
    return {"value/explained_variance": explained_variance(variance)}, chances


def add_returns(
    config: AlgorithmConfig, experience: Experience, runtime: Runtime, rewards: Tensor
) -> tuple[dict[str, float], Tables]:
    """Write returns [T], the critic's targets: Monte-Carlo returns of `rewards` [T] where lambda_critic is 1;
    0 in responses that go on in the next step. Return value/explained_variance, and a table of values against
    returns by position (`error_by_position`)."""
    goes_on = experience.unfinished
    mask = experience.response_mask & ~torch.repeat_interleave(goes_on, experience.lengths)
    lengths, values = experience.response_lengths.masked_fill(goes_on, 0), experience["values"]
    errors_ahead = gae(rewards, values, mask, experience.cu_seqlens, config.lambda_critic, config.gamma)
    targets = returns(errors_ahead, values, mask)
    experience["returns"] = targets
    variance = sum_over_replicas(runtime, variance_sums(targets, values, mask))
    errors = error_by_position(values, targets, mask, lengths)
    by_position = sum_over_replicas(runtime, errors).tolist()
    table = dict(zip(("tokens", "error", "absolute"), by_position, strict=True))
    return {"value/explained_variance": explained_variance(variance)}, {"value_error": table}


def policy_statistics(experience: Experience, runtime: Runtime) -> tuple[dict[str, float], Tables]:
    """Return the mean entropy and the mean probability of the tokens that the step has drawn, and a table of
    entropy by position (`sums_by_position`)."""
    mask = experience.drawn
    probabilities = experience["old_logprobs"][mask].double().exp()
    sums = torch.stack([mask.sum().double(), experience["entropy"][mask].double().sum(), probabilities.sum()])
    tokens, entropy, probability = sum_over_replicas(runtime, sums).tolist()
    metrics = {"policy/entropy": entropy / max(tokens, 1), "policy/mean_prob": probability / max(tokens, 1)}
    by_position = sums_by_position(mask, experience.drawn_lengths, experience["entropy"])
    table = dict(zip(("tokens", "entropy"), sum_over_replicas(runtime, by_position).tolist(), strict=True))
    return metrics, {"entropy": table}


def mismatch(
    experience: Experience, trainer: Tensor, version: int, runtime: Runtime
) -> tuple[dict[str, float], Tables]:
    """Return mismatch/*: how far the engine's log-probs are from the trainer's [T], over responses that were
    drawn with the present weights, `version`; and how many of these tokens are in each bin of
    `difference_histogram`.

    Dynamic sampling's surplus of the step before was drawn with older weights, and is left out; so are
    earlier windows."""
    engine, drawn_now = experience["engine_logprobs"], experience.drawn
    if "begun" not in experience:
        drawn_now = drawn_now & (experience["policy_version"] == version)[experience.sequence_ids]
    sums, largest = mismatch_sums(trainer, engine, drawn_now)
    metrics = mismatch_metrics(sum_over_replicas(runtime, sums), max_over_ranks(runtime, float(largest)))
    counts = sum_over_replicas(runtime, difference_histogram(trainer, engine, drawn_now))
    return metrics, {"mismatch": {"tokens": counts.tolist()}}


def correct_mismatch(config: MismatchConfig, experience: Experience, runtime: Runtime) -> dict[str, float]:
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
        experience["old_logprobs"],
        experience["engine_logprobs"],
        experience.drawn,
        experience.sequence_ids,
        weight=config.weight,
        cap=config.cap,
        keep=config.mask,
        bounds=(config.mask_low, config.mask_high),
    )
    weights = experience["policy_loss_weights"]
    experience["uncorrected_weights"], experience["policy_loss_weights"] = weights, weights * factors
    tokens, truncated, masked = sum_over_replicas(runtime, counts).tolist()
    return {"mismatch/truncated": truncated / max(tokens, 1.0), "mismatch/masked": masked / max(tokens, 1.0)}
