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
        shape, trained = plan.shape(model), count_trained(plan, model, Layout(), 0).all
        whole = shape.count_params(Layout(), 0, critic=model == "critic").all
        total += (whole if plan.lora(model).rank is None else trained) * shape.itemsize
        total += trained * 3 * FP32
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
    pretrained = config.value_pretraining.steps if config.has_critic else 0
    written, before = -(-config.steps // settings.every), -(-pretrained // settings.every)
    if not settings.keep:
        return written, before
    newest = settings.keep + 1
    kept = min(written, newest)
    if settings.keep_every:
        kept += (written - kept) * settings.every // lcm(settings.every, settings.keep_every)
    return kept, min(before, newest - min(written, newest))


def disk_bytes(plan: PlanInputs) -> float:
    written, before = count_checkpoints(plan)
    return written * checkpoint_bytes(plan) + before * checkpoint_bytes(plan, pretraining=True)
