"""Bytes of a rollout engine on a GPU: weights, KV cache, weight transfer."""

from __future__ import annotations

from megarl.config.drafts import draft_bytes
from megarl.parallel.layout import Layout
from megarl.plan.inputs import PlanInputs


def engine_weight_bytes(plan: PlanInputs) -> float:
    """Return the bytes of an engine's weights on a GPU."""
    if not plan.config.rollout.capabilities.sharded:
        return plan.actor.parameters * plan.actor.itemsize
    return int(sum(plan.actor.engine_tensors(plan.engine_tp, plan.config.rollout.weights_dtype)))


def kv_cache_bytes(plan: PlanInputs) -> float:
    rollout = plan.config.rollout
    if not rollout.capabilities.continuous_batching:  # others use the rest of engine_memory
        return rollout.max_batch * (plan.longest * plan.actor.cache_bytes(1) + plan.actor.state_bytes(1))
    weights = engine_weight_bytes(plan)
    draft, _ = draft_bytes(rollout)
    remaining_bytes = rollout.engine_memory * plan.device.memory - weights - draft / plan.engine_tp
    # A server's memory is unknown: assume a cache at least as large as the weights.
    return max(weights if rollout.capabilities.remote else 0.0, remaining_bytes)


def kv_cache_tokens(plan: PlanInputs) -> float:
    """Return the tokens in an engine's KV cache if all responses have full length.

    Linear attention's states share it."""
    tp = plan.engine_tp
    _, draft = draft_bytes(plan.config.rollout)
    token_bytes = plan.actor.cache_bytes(tp) + draft / tp
    return kv_cache_bytes(plan) / (token_bytes + plan.actor.state_bytes(tp) / plan.longest)


def transferred_bytes(plan: PlanInputs) -> float:
    """Return the bytes that a weight transfer writes to an engine rank.

    Frozen weights are sent once, unless the engine frees them."""
    weights = engine_weight_bytes(plan)
    if "engine.weights" not in plan.keep:
        return weights
    optimizer = plan.config.actor
    changing_params = plan.actor.count_params(Layout(), 0, optimizer=optimizer).all
    if optimizer.lora.rank is not None:
        changing_params, _ = plan.actor.count_lora(optimizer.lora, 1)
    return weights * changing_params / plan.actor.parameters


def transfer_buffer_bytes(plan: PlanInputs) -> float:
    """Return a GPU's bytes for a weight transfer's messages and buckets."""
    rollout, lora = plan.config.rollout, plan.config.actor.lora
    bucket = float(rollout.transfer_bucket * 2**20)
    if lora.rank is not None:  # weights are merged when sent
        bucket += plan.actor.count_lora(lora, plan.layout.tp)[1] * plan.actor.itemsize
    if not rollout.capabilities.continuous_batching:
        return bucket
    # SGLang's buffer must hold the largest tensor.
    largest = max(plan.actor.engine_tensors(plan.engine_tp, rollout.weights_dtype))
    return bucket + min(engine_weight_bytes(plan), max(bucket, largest))
