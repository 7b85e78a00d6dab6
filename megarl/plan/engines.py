"""Bytes of a rollout engine on one of its GPUs: weights, KV cache, and what a weight transfer needs."""

from __future__ import annotations

from megarl.parallel.layout import Layout
from megarl.plan.inputs import PlanInputs


def engine_weight_bytes(plan: PlanInputs) -> float:
    """Return the bytes of an engine's weights on one rank, or of a server's at a URL on one of its GPUs."""
    if not plan.config.rollout.capabilities.sharded:
        return plan.actor.parameters * plan.actor.itemsize
    return int(sum(plan.actor.engine_tensors(plan.engine_tp, plan.config.rollout.weights_dtype)))


def kv_cache_bytes(plan: PlanInputs) -> float:
    """Return the bytes of an engine's KV cache on one rank."""
    rollout = plan.config.rollout
    if (
        not rollout.capabilities.continuous_batching
    ):  # as much as a batch fills; other engines take the rest of their share
        return rollout.max_batch * (plan.longest * plan.actor.cache_bytes(1) + plan.actor.state_bytes(1))
    weights = engine_weight_bytes(plan)
    left = rollout.engine_memory * plan.device.memory - weights
    # The room of a server is its own, and check_servers asks for it. It is at least that of the weights.
    return max(weights if rollout.capabilities.remote else 0.0, left)


def kv_cache_tokens(plan: PlanInputs) -> float:
    """Return the tokens of an engine's KV cache, which also holds the states of linear attention. All
    responses are taken to have the greatest length."""
    tp = plan.engine_tp
    return kv_cache_bytes(plan) / (plan.actor.cache_bytes(tp) + plan.actor.state_bytes(tp) / plan.longest)


def transferred_bytes(plan: PlanInputs) -> float:
    """Return the bytes that a weight transfer writes to one rank of an engine. Frozen weights are in the
    first one only, unless the engine frees its weights in between."""
    weights = engine_weight_bytes(plan)
    if "engine.weights" not in plan.keep:
        return weights
    optimizer = plan.config.actor
    changing = plan.actor.count_params(Layout(), 0, optimizer=optimizer).all
    if optimizer.lora.rank is not None:
        changing, _ = plan.actor.count_lora(optimizer.lora, 1)
    return weights * changing / plan.actor.parameters


def transfer_buffer_bytes(plan: PlanInputs) -> float:
    """Return the bytes on a GPU of the messages of a weight transfer and of the engine's buckets."""
    rollout, lora = plan.config.rollout, plan.config.actor.lora
    bucket = float(rollout.transfer_bucket * 2**20)
    if lora.rank is not None:  # a weight is merged with its adapters when it is sent
        bucket += plan.actor.count_lora(lora, plan.layout.tp)[1] * plan.actor.itemsize
    if not rollout.capabilities.continuous_batching:
        return bucket
    # SGLang's ranks and servers receive whole tensors: the buffer holds at least the largest.
    largest = max(plan.actor.engine_tensors(plan.engine_tp, rollout.weights_dtype))
    return bucket + min(engine_weight_bytes(plan), max(bucket, largest))
