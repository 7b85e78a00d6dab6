"""Build a micro-batch's losses from `megarl.algorithms.losses` and the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.losses import (
    Stats,
    chance_loss,
    entropy_loss,
    importance_weights,
    kl_loss,
    nll_loss,
    policy_loss,
    sampled_teacher_loss,
    top_k_loss,
    value_loss,
)
from megarl.config.methods import load_function
from megarl.config.schema import AlgorithmConfig, TeacherConfig
from megarl.data.batch import MicroBatch, TrainBatch
from megarl.training.model import Loss


def actor_loss(
    config: AlgorithmConfig,
    batch: TrainBatch,
    selected: Tensor | None = None,
    teacher: TeacherConfig | None = None,
) -> Loss:
    """Return the actor's loss: the policy loss, and the terms whose factor is not 0 (`further_terms`).

    They are mu * positive-example NLL (VAPO eq. 10), beta * KL to the initial policy, minus factor * entropy,
    and c * the divergence from a teacher, by its top-k tokens or the sampled one.

    The phase actor_update declares the columns that they read (config/phases.py).

    selected: bool [T], chosen by the policy loss's selector."""
    surrogate, sequence_ids = load_function(config.policy_loss.function), batch.sequence_ids
    options = config.arguments(config.policy_loss.options)

    def loss(output: Any, micro_batch: MicroBatch) -> tuple[Tensor, Stats]:
        logprobs, entropy = output
        top_k_logprobs = teacher_token_logprobs = None
        if micro_batch.candidates is not None:
            logprobs, old_token_logprobs, teacher_token_logprobs = logprobs.tensor_split(
                (1, 1 + config.dppo.top_k), 1
            )
            logprobs = logprobs[:, 0]
            if config.dppo.top_k:
                top_k_logprobs = compared_top_k(batch, micro_batch, old_token_logprobs)
        weights = micro_batch.column(batch, "policy_loss_weights")
        total, stats = policy_loss(
            logprobs,
            micro_batch.column(batch, config.old_column),
            micro_batch.column(batch, "advantages"),
            weights,
            config.clip_low,
            config.clip_high,
            entropy.detach(),
            surrogate=surrogate,
            options=options,
            dual_clip=config.dual_clip,
            sequence_ids=sequence_ids[micro_batch.token_indices].to(weights.device),
            selected=None if selected is None else selected[micro_batch.token_indices].to(weights.device),
            top_k_logprobs=top_k_logprobs,
        )
        columns = logprobs, entropy, teacher_token_logprobs
        for factor, (term, term_stats) in further_terms(config, batch, micro_batch, *columns, teacher):
            total, stats = total + factor * term, stats | term_stats
        return total, stats

    return loss


def compared_top_k(batch: TrainBatch, micro_batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return log pi (`logprobs`) and log pi_old of pi_old's top-k tokens, [r, k] each.

    The sampled token gets the lowest finite value in both, because a trust region counts it separately."""
    sampled_tokens = batch.tokens[micro_batch.token_indices].to(logprobs.device)
    is_sampled = micro_batch.column(batch, "old_top_tokens") == sampled_tokens[:, None]
    old_logprobs = micro_batch.column(batch, "old_top_logprobs")
    lowest = torch.finfo(old_logprobs.dtype).min
    return logprobs.masked_fill(is_sampled, lowest), old_logprobs.masked_fill(is_sampled, lowest)


def further_terms(
    config: AlgorithmConfig,
    batch: TrainBatch,
    micro_batch: MicroBatch,
    logprobs: Tensor,
    entropy: Tensor,
    teacher_token_logprobs: Tensor | None,
    teacher: TeacherConfig | None,
) -> Iterator[tuple[float, tuple[Tensor, Stats]]]:
    """Yield factor, loss and statistics of each further term whose factor is not 0.

    logprobs, entropy: of the policy, [r]
    teacher_token_logprobs: log pi of the teacher's top-k tokens, [r, k]"""

    def column(name: str) -> Tensor:
        return micro_batch.column(batch, name)

    is_corrected = "uncorrected_weights" in batch
    weights_column = "uncorrected_weights" if is_corrected else "policy_loss_weights"
    if config.nll_weight:
        yield config.nll_weight, nll_loss(logprobs, column("nll_loss_weights"))
    if config.kl_weight:
        reference, weights = column("ref_logprobs"), column("policy_loss_weights")
        yield config.kl_weight, kl_loss(logprobs, reference, weights, config.kl_estimator)
    if config.entropy_weight:
        entropy_column = "entropy_weights" if config.agreement.filter else weights_column
        yield config.entropy_weight, entropy_loss(entropy, column(entropy_column))
    if teacher is None or teacher.effect == "advantages":
        return
    importance, cap = None, teacher.ratio_cap
    if cap is not None:
        old_logprobs = column(config.old_column)
        importance = importance_weights(logprobs, old_logprobs, column(weights_column), cap)
    if teacher.top_k:
        assert teacher_token_logprobs is not None
        terms = teacher_token_logprobs, column("teacher_logprobs"), column(weights_column)
        yield teacher.weight, top_k_loss(*terms, teacher.alpha, importance)
    elif importance is not None:
        weights = column("policy_loss_weights")
        yield teacher.weight, sampled_teacher_loss(logprobs, column("teacher_logprobs"), weights, importance)


def list_candidates(batch: TrainBatch) -> Tensor | None:
    """Return `MicroBatch.candidates`: pi_old's, then a teacher's top-k tokens, int32 [T, k]."""
    names = [name for name in ("old_top_tokens", "teacher_tokens") if name in batch]
    return torch.cat([batch[name] for name in names], 1) if names else None


def critic_loss(config: AlgorithmConfig, batch: TrainBatch, number: int = 0) -> Loss:
    """Return the critic's loss: value_loss, or chance_loss of prompts. number: of several critics (AsyPPO)"""

    def loss(output: Any, micro_batch: MicroBatch) -> tuple[Tensor, Stats]:
        old_values, target = micro_batch.column(batch, "values"), micro_batch.column(batch, "returns")
        if "critic_values" in batch:
            old_values = micro_batch.column(batch, "critic_values")[:, number]
        weights = micro_batch.column(batch, "value_loss_weights")
        if config.advantage == "prompt_value":
            return chance_loss(output, target, weights)
        return value_loss(output, old_values, target, weights, config.value_clip)

    return loss


def supervised_loss(batch: TrainBatch) -> Loss:
    """Return the positive-example loss (VAPO eq. 9) alone."""

    def loss(output: Any, micro_batch: MicroBatch) -> tuple[Tensor, Stats]:
        logprobs, entropy = output
        value, stats = nll_loss(logprobs, micro_batch.column(batch, "nll_loss_weights"))
        count = torch.tensor(float(logprobs.numel()), dtype=torch.float64)
        return value, {**stats, "policy/tokens": count, "policy/entropy": entropy.detach().double().sum()}

    return loss
