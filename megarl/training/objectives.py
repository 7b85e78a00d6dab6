"""The losses of a micro-batch, put together from `megarl.algorithms.losses` as the configuration says. Each
is a function of the model's output and the micro-batch, which `TrainableModel.update_mini_batches` calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.losses import (
    chance_loss,
    entropy_loss,
    kl_loss,
    nll_loss,
    policy_loss,
    top_k_loss,
    value_loss,
)
from megarl.config.methods import load_function
from megarl.config.schema import AlgorithmConfig, TeacherConfig
from megarl.data.experience import Experience
from megarl.training.batch import MicroBatch
from megarl.training.model import Loss, Stats


def actor_loss(
    config: AlgorithmConfig,
    experience: Experience,
    selected: Tensor | None = None,
    teacher: TeacherConfig | None = None,
) -> Loss:
    """Return the policy loss + mu * positive-example NLL (VAPO eq. 10) + beta * KL - factor * entropy + c *
    KL to a teacher's likeliest tokens. It reads policy_loss_weights, old_logprobs (or engine_logprobs in
    their place), advantages, and where their factor is not 0 nll_loss_weights and ref_logprobs;
    with algorithm.mismatch, uncorrected_weights, and with algorithm.agreement.filter, entropy_weights.

    selected: bool [T], the tokens that the policy loss's selector chose in the mini-batch of an update.
    With algorithm.dppo.top_k, old_top_logprobs and old_top_tokens are read, with teacher.top_k
    teacher_logprobs, [T, k] each; micro-batches then have what `other_tokens` gives as `others`."""
    sequence_ids, old_k = experience.sequence_ids, config.dppo.top_k
    surrogate = load_function(config.policy_loss.function)

    def loss(output: Any, batch: MicroBatch) -> tuple[Tensor, Stats]:
        logprobs, entropy = output
        likeliest = None
        if batch.others is not None:
            logprobs, of_old, of_teacher = logprobs.tensor_split((1, 1 + old_k), 1)
            logprobs = logprobs[:, 0]
        if old_k:  # the sampled token is one of its own
            sampled = experience.tokens[batch.token_indices].to(of_old.device)
            same = batch.column(experience, "old_top_tokens") == sampled[:, None]
            old = batch.column(experience, "old_top_logprobs")
            least = torch.finfo(old.dtype).min
            likeliest = of_old.masked_fill(same, least), old.masked_fill(same, least)
        weights = uncorrected = batch.column(experience, "policy_loss_weights")
        if "uncorrected_weights" in experience:
            uncorrected = batch.column(experience, "uncorrected_weights")
        total, stats = policy_loss(
            logprobs,
            batch.column(experience, config.old_column),
            batch.column(experience, "advantages"),
            weights,
            config.clip_low,
            config.clip_high,
            entropy.detach(),
            surrogate=surrogate,
            options=config.policy_loss_options,
            dual_clip=config.dual_clip,
            sequence_ids=sequence_ids[batch.token_indices].to(weights.device),
            selected=None if selected is None else selected[batch.token_indices].to(weights.device),
            likeliest=likeliest,
        )
        if config.nll_weight:
            nll, nll_stats = nll_loss(logprobs, batch.column(experience, "nll_loss_weights"))
            total, stats = total + config.nll_weight * nll, stats | nll_stats
        if config.kl_weight:
            ref = batch.column(experience, "ref_logprobs")
            kl, kl_stats = kl_loss(logprobs, ref, weights, config.kl_estimator)
            total, stats = total + config.kl_weight * kl, stats | kl_stats
        if config.entropy_weight:
            filtered = config.agreement.filter > 0
            bonus, entropy_stats = entropy_loss(
                entropy, batch.column(experience, "entropy_weights") if filtered else uncorrected
            )
            total, stats = total + config.entropy_weight * bonus, stats | entropy_stats
        if teacher is not None and teacher.top_k:
            judged = batch.column(experience, "teacher_logprobs")
            kl, kl_stats = top_k_loss(of_teacher, judged, uncorrected)
            total, stats = total + teacher.weight * kl, stats | kl_stats
        return total, stats

    return loss


def other_tokens(experience: Experience) -> Tensor | None:
    """Return the tokens whose log-probs `actor_loss` wants at each place beside the sampled one's, int32 [T,
    k]: pi_old's likeliest and a teacher's; None without any."""
    names = [name for name in ("old_top_tokens", "teacher_tokens") if name in experience]
    return torch.cat([experience[name] for name in names], 1) if names else None


def critic_loss(config: AlgorithmConfig, experience: Experience, number: int = 0) -> Loss:
    """Return the squared error to the returns, of a critic of the prompt the cross-entropy to them. It reads
    value_loss_weights, returns, and values or, of the critic `number` of several, critic_values."""

    def loss(output: Any, batch: MicroBatch) -> tuple[Tensor, Stats]:
        old, target = batch.column(experience, "values"), batch.column(experience, "returns")
        if "critic_values" in experience:
            old = batch.column(experience, "critic_values")[:, number]
        weights = batch.column(experience, "value_loss_weights")
        if config.advantage == "prompt_value":
            return chance_loss(output, target, weights)
        return value_loss(output, old, target, weights, config.value_clip)

    return loss


def supervised_loss(experience: Experience) -> Loss:
    """Return the positive-example loss alone (VAPO eq. 9), all responses right. It reads nll_loss_weights."""

    def loss(output: Any, batch: MicroBatch) -> tuple[Tensor, Stats]:
        logprobs, entropy = output
        value, stats = nll_loss(logprobs, batch.column(experience, "nll_loss_weights"))
        count = torch.tensor(float(logprobs.numel()), dtype=torch.float64)
        return value, {**stats, "policy/tokens": count, "policy/entropy": entropy.detach().double().sum()}

    return loss
