"""The losses of a micro-batch, put together from `megarl.algorithms.losses` as the configuration says. Each
is a function of the model's output and the micro-batch, which `TrainableModel.update_mini_batches` calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.losses import chance_loss, entropy_loss, kl_loss, nll_loss, policy_loss, value_loss
from megarl.config.schema import AlgorithmConfig
from megarl.data.experience import Experience
from megarl.training.batch import MicroBatch
from megarl.training.model import Loss, Stats


def actor_loss(config: AlgorithmConfig, experience: Experience) -> Loss:
    """Return the policy loss + mu * positive-example NLL (VAPO eq. 10) + beta * KL - factor * entropy. It
    reads policy_loss_weights, old_logprobs (or engine_logprobs in their place), advantages, and where their
    factor is not 0 nll_loss_weights and ref_logprobs."""
    sequence_ids = experience.sequence_ids

    def loss(output: Any, batch: MicroBatch) -> tuple[Tensor, Stats]:
        logprobs, entropy = output
        weights = batch.column(experience, "policy_loss_weights")
        total, stats = policy_loss(
            logprobs,
            batch.column(experience, config.old_column),
            batch.column(experience, "advantages"),
            weights,
            config.clip_low,
            config.clip_high,
            entropy.detach(),
            surrogate=config.surrogate,
            dual_clip=config.dual_clip,
            sequence_ids=sequence_ids[batch.token_indices].to(weights.device),
        )
        if config.nll_weight:
            nll, nll_stats = nll_loss(logprobs, batch.column(experience, "nll_loss_weights"))
            total, stats = total + config.nll_weight * nll, stats | nll_stats
        if config.kl_weight:
            kl, kl_stats = kl_loss(logprobs, batch.column(experience, "ref_logprobs"), weights)
            total, stats = total + config.kl_weight * kl, stats | kl_stats
        if config.entropy_weight:
            bonus, entropy_stats = entropy_loss(entropy, weights)
            total, stats = total + config.entropy_weight * bonus, stats | entropy_stats
        return total, stats

    return loss


def critic_loss(config: AlgorithmConfig, experience: Experience) -> Loss:
    """Return the squared error to the returns, of a critic of the prompt the cross-entropy to them. It reads
    value_loss_weights, values, returns."""

    def loss(output: Any, batch: MicroBatch) -> tuple[Tensor, Stats]:
        old, target = batch.column(experience, "values"), batch.column(experience, "returns")
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
