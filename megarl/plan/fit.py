"""Find whether a run fits, and which key to change."""

from __future__ import annotations

from bisect import bisect
from dataclasses import replace

from megarl.plan.engines import kv_cache_tokens
from megarl.plan.host import cpu_bytes, cpu_bytes_by_phase, node_bytes
from megarl.plan.inputs import PlanInputs
from megarl.plan.memory import Need, gpu_needs, needs_outside_steps
from megarl.plan.sizes import GIB

RESPONSE = 256  # least bytes of a distributed response
NEAR = 0.9  # warn from this share of a machine's memory
# What to change, by the largest part.
CPU_CHANGES = {
    "activations": "lower update.tokens_per_micro_batch or rollout.max_response_tokens",
    "batch": "lower rollout.prompts or rollout.max_response_tokens",
    "summed gradients": "start fewer ranks",
    "KV cache": "lower rollout.max_batch",
    "copy of a checkpoint": "set checkpoint.background=false or checkpoint.every=0",
    "gathered optimizer": "set checkpoint.every=0",
}


def largest_micro_batch(plan: PlanInputs) -> int:
    """Return the largest token budget that fits, in steps of 1,024; 0 if none does."""
    memory = plan.device.memory
    bytes_outside_steps = max(need.total for need in needs_outside_steps(plan))

    def is_too_large(tokens: int) -> bool:
        return bytes_outside_steps > memory or any(
            need.total > memory for need in gpu_needs(plan, tokens, plan.phases)
        )

    if is_too_large(plan.longest):
        return 0
    budgets = range(plan.longest // 1024 * 1024 + 1024, 2**24 + 1, 1024)
    num_fitting = bisect(budgets, False, key=is_too_large)
    return budgets[num_fitting - 1] if num_fitting else plan.longest


def find_problem(plan: PlanInputs, room: float = 0.0) -> str | None:
    """Return why a run does not fit and what to change, or None.

    room: bytes of each GPU to leave free"""
    rollout, memory = plan.config.rollout, plan.device.memory
    for need in gpu_needs(plan):
        if need.total + room > memory:
            parts = sorted(need.parts.items(), key=lambda pair: -pair[1])[:4]
            parts_text = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
            return (
                f"phase {need.phase} needs {need.total / GIB:.1f} GiB of the {memory / GIB:.1f} of each "
                f"{plan.device.name} (stage {need.stage}: {parts_text}); {_suggest_change(plan, need)}"
            )
    cache_tokens = kv_cache_tokens(plan)
    is_cache_too_small = cache_tokens < plan.longest and not rollout.capabilities.remote
    if plan.config.has_engine and not plan.replay and is_cache_too_small:
        return (
            f"the KV cache of an engine holds {cache_tokens:,.0f} tokens, one sequence has up to "
            f"{plan.longest:,} (raise rollout.engine_tp or rollout.engine_memory "
            f"{rollout.engine_memory:g}, or lower rollout.max_response_tokens)"
        )
    host_bytes, host_memory = sum(node_bytes(plan).values()), plan.config.cluster.host_memory * GIB
    if host_bytes > host_memory:
        return (
            f"a node needs {host_bytes / GIB:.0f} GiB of memory and has {host_memory / GIB:.0f} "
            "(cluster.host_memory; lower rollout.prompts, or use more nodes)"
        )
    return None


def _suggest_change(plan: PlanInputs, need: Need) -> str:
    if plan.config.residency.offload is False:
        return "set residency.offload=true"
    if plan.keep & set(need.parts):
        return f"take {', '.join(sorted(plan.keep))} out of residency.keep"
    if need.phase == "rollout":
        key = "engine_memory" if plan.config.rollout.capabilities.continuous_batching else "max_batch"
        return f"lower rollout.{key}"
    if need.phase == "construction":
        return "raise parallel.tp or parallel.pp"
    if need.phase == "checkpoint":
        return "raise parallel.tp or parallel.pp, or set checkpoint.every=0"
    if need.phase == "weight_transfer":
        return "raise parallel.tp, parallel.pp or rollout.engine_tp"
    budget = largest_micro_batch(plan)
    if plan.longest <= budget < plan.config.update.tokens_per_micro_batch:
        return f"lower update.tokens_per_micro_batch to {budget}"
    if plan.config.model.recompute != "full":
        return "set model.recompute=full"
    if plan.config.model.recompute_layers:
        model = plan.config.model.model_copy(update={"recompute_layers": None})
        all_layers = replace(plan, config=plan.config.model_copy(update={"model": model}))
        if max(need.total for need in gpu_needs(all_layers)) <= plan.device.memory:
            return f"raise model.recompute_layers {plan.config.model.recompute_layers}, or set it to null"
    return "raise parallel.tp or parallel.pp, or lower rollout.max_response_tokens"


def find_cpu_problem(plan: PlanInputs, memory: float) -> str | None:
    """Return why a run on CPUs cannot fit, like `find_problem`."""
    parts = cpu_bytes(plan)
    constant_bytes = sum(parts.values())
    # A save surely needs three of these five numbers a parameter.
    save_bytes = sum(cpu_bytes_by_phase(plan).get("checkpoint", {}).values()) * 3 / 5
    response_bytes = plan.config.responses * RESPONSE
    if response_bytes + constant_bytes + save_bytes > memory >= constant_bytes + save_bytes:
        return (
            f"{plan.config.responses:,} responses a step need at least {response_bytes / GIB:,.1f} GiB "
            f"of this machine's {memory / GIB:.1f} (lower "
            f"{'rollout.prompts' if plan.config.has_engine else 'supervised.batch'})"
        )
    if constant_bytes + save_bytes <= memory:
        return None
    parts_text = ", ".join(
        f"{name} {size / GIB:.1f}"
        for name, size in [*parts.items(), *([("a checkpoint", save_bytes)] if save_bytes else [])]
    )
    remedy = "use a smaller model, or a machine with more memory"
    if plan.engine_tp == 1 and plan.layout.world > 1 and parts["engines' weights"]:
        remedy = f"start fewer ranks, each of which has a whole engine, {remedy}"
    if constant_bytes <= memory:
        remedy = f"set checkpoint.every=0, or {remedy}"
    return (
        f"{plan.layout.world} ranks on this machine's CPU need {(constant_bytes + save_bytes) / GIB:.1f} GiB "
        f"of its {memory / GIB:.1f} ({parts_text}); {remedy}"
    )


def find_cpu_warning(plan: PlanInputs, memory: float, free: float | None = None) -> str | None:
    """Return a warning if a run on CPUs needs nearly all memory, or more than is free."""
    phase, parts = max(cpu_bytes_by_phase(plan).items(), key=lambda pair: sum(pair[1].values()))
    total = sum(cpu_bytes(plan).values()) + sum(parts.values())
    if free is not None and free < total <= NEAR * memory:
        free_text = f"{free / GIB:.1f} of this machine's {memory / GIB:.1f} are free now"
        return (
            f"the run may need up to {total / GIB:.1f} GiB in phase {phase}, and {free_text}: "
            "the kernel ends what takes too much (end other programs first)"
        )
    if total <= NEAR * memory:
        return None
    part = max(parts, key=parts.__getitem__)
    what = f"up to {total / GIB:.1f} GiB of this machine's {memory / GIB:.1f} in phase {phase}"
    return (
        f"the run may need {what}, {parts[part] / GIB:.1f} of it {part}: the kernel ends what takes too "
        f"much ({CPU_CHANGES[part]})"
    )
