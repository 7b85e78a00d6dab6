"""Bytes of checkpoints on disk."""

from __future__ import annotations

from math import lcm

from megarl.parallel.layout import Layout
from megarl.plan.inputs import PlanInputs
from megarl.plan.sizes import FP32
from megarl.plan.tensors import count_trained


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


def disk_bytes(plan: PlanInputs) -> float:
    run_count, pretraining_count = count_checkpoints(plan)
    return run_count * checkpoint_bytes(plan) + pretraining_count * checkpoint_bytes(plan, pretraining=True)
