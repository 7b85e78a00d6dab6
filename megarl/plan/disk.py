"""Bytes of checkpoints on disk."""

from __future__ import annotations

from math import lcm

from megarl.parallel.layout import Layout
from megarl.plan.inputs import PlanInputs
from megarl.plan.sizes import FP32
from megarl.plan.tensors import count_trained

# Bytes of a sampled token, in memory and on disk.
SAMPLED = 4 + 4 + 8 + 1 + 4


def checkpoint_bytes(plan: PlanInputs, *, pretraining: bool = False) -> float:
    """Return the bytes of weights and optimizer state, without padding.

    pretraining: without the actor"""
    total = 0.0
    models = (*plan.trained, *["critic"] * (plan.config.critic.count - 1))
    for model in models[1:] if pretraining else models:
        shape, trained_params = plan.shape(model), count_trained(plan, model, Layout(), 0).all
        all_params = shape.count_params(Layout(), 0, critic=model == "critic").all
        total += (all_params if plan.lora(model).rank is None else trained_params) * shape.itemsize
        total += trained_params * 3 * FP32
        if model in plan.muon_models:  # one momentum; float32 weights if in bfloat16
            matrices = sum(map(sum, shape.matrices(Layout(), 0)))
            total -= matrices * (1 if shape.itemsize < FP32 else 2) * FP32
    if plan.config.teacher.weights == "average" and not pretraining:
        total += plan.actor.count_params(Layout(), 0).all * FP32
    return total


def count_checkpoints(plan: PlanInputs) -> tuple[int, int]:
    """Return the most checkpoints on disk at once: of a run, and of its value pretraining.

    One is written before the oldest is deleted (`prune`). Stopped runs' are not counted."""
    config, settings = plan.config, plan.config.checkpoint
    if not settings.every:
        return 0, 0
    pretraining_steps = config.value_pretraining.steps if config.has_critic else 0
    run_count, pretraining_count = -(-config.steps // settings.every), -(-pretraining_steps // settings.every)
    if not settings.keep:
        return run_count, pretraining_count
    newest_count = settings.keep + 1
    kept_count = min(run_count, newest_count)
    if settings.keep_every:
        kept_count += (run_count - kept_count) * settings.every // lcm(settings.every, settings.keep_every)
    return kept_count, min(pretraining_count, newest_count - min(run_count, newest_count))


def routed_bytes(plan: PlanInputs) -> int:
    sizes = plan.actor.sizes
    if not (plan.config.rollout.routing_replay and sizes.experts):
        return 0
    return sizes.layers * int(plan.actor.config["num_experts_per_tok"]) * (1 if sizes.experts < 256 else 2)


def sampling_set_bytes(plan: PlanInputs) -> int:
    """Return the most bytes of a token's sampling set, int32 ids; top_p leaves fewer than top_k."""
    return FP32 * plan.config.rollout.top_k * plan.config.rollout.sampling_replay


def stored_batch_bytes(plan: PlanInputs) -> float:
    """Return the most bytes of a batch, as samples and packed."""
    return plan.step_tokens(plan.longest) * (SAMPLED + 2 * (routed_bytes(plan) + sampling_set_bytes(plan)))


def count_stored_batches(plan: PlanInputs) -> int:
    """Count the batches in run_dir/rollouts between engines' and trainers' ranks."""
    return 1 + plan.config.schedule.lead if plan.config.parallel.rollout_ranks else 0


def disk_bytes(plan: PlanInputs) -> float:
    """Return the most bytes on disk. Rollouts kept by checkpoint.rollouts are not counted."""
    run_count, pretraining_count = count_checkpoints(plan)
    checkpoints = run_count * checkpoint_bytes(plan)
    checkpoints += pretraining_count * checkpoint_bytes(plan, pretraining=True)
    return checkpoints + count_stored_batches(plan) * stored_batch_bytes(plan)
