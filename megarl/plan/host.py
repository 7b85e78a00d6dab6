"""Bytes of host memory, with GPUs or with all ranks on CPUs."""

from __future__ import annotations

from megarl.config.phases import ROLLOUT, select_phases
from megarl.plan.disk import checkpoint_bytes, routed_bytes, sampling_set_bytes, stored_batch_bytes
from megarl.plan.inputs import PlanInputs
from megarl.plan.memory import phase_buffers
from megarl.plan.sizes import FP32, GIB
from megarl.plan.tensors import count_muon_elements, count_params, count_trained, group_bytes

# Our estimates:
HOST_PROCESS = 4 * GIB  # of a rank and its engine, without tensors
VERIFIER = 0.3 * GIB
# Measured on CPUs: the launcher, and a forked rank without tensors.
LAUNCHER, FORKED = 0.5 * GIB, 0.15 * GIB
# Bytes of a response's metadata on every rank (docs/scale.md).
KNOWN = 80


def node_bytes(plan: PlanInputs) -> dict[str, float]:
    config, world = plan.config, plan.layout.world
    gpus, rollout_ranks = config.cluster.gpus_per_node, config.parallel.rollout_ranks
    trainers, rollout_ranks_here = min(gpus, world), min(max(0, gpus - world), rollout_ranks)
    saves, verifies = config.checkpoint.every and not plan.replay, config.has_engine and not plan.replay
    sampled = sampled_bytes(plan) * rollout_ranks_here / rollout_ranks if rollout_ranks else 0.0
    verifiers = config.reward.workers * (rollout_ranks_here if rollout_ranks else trainers)
    saved_share = trainers / world
    return {
        "pinned buffers": offloaded_bytes(plan) * trainers,
        "rollouts": step_batch_bytes(plan) * trainers + sampled,
        "checkpoint staging": checkpoint_bytes(plan) * saved_share if saves else 0.0,
        "gathered optimizer": gathered_optimizer_bytes(plan) * trainers if config.checkpoint.every else 0.0,
        "processes": HOST_PROCESS * (trainers + rollout_ranks_here),
        "verifiers": verifiers * VERIFIER if verifies else 0.0,
    } | {name: size * trainers for name, size in average_weight_bytes(plan).items()}


def average_weight_bytes(plan: PlanInputs) -> dict[str, float]:
    """Count a rank's average weights (`teacher.weights`) on the host; {} without them."""
    if not plan.config.has_self_teacher or plan.config.teacher.weights != "average":
        return {}
    counts = [count_params(plan, "actor", stage) for stage in plan.stages]
    return {"average weights": FP32 * max(count.all for count in counts)}


def offloaded_bytes(plan: PlanInputs) -> float:
    """Return a rank's most offloaded bytes at once.

    Gradients return as zeros, engine weights from the actor."""
    copied_groups = {
        name for name in plan.groups if not name.startswith("engine.") and not name.endswith(".gradients")
    }
    return max(
        sum(
            group_bytes(plan, name, stage, every=True)
            for name in sorted(copied_groups - resident - plan.keep)
        )
        for resident in plan.residents
        for stage in plan.stages
    )


def gathered_optimizer_bytes(plan: PlanInputs) -> float:
    """Return a rank's bytes while a model is saved or loaded.

    Replicas gather their shard's optimizer, three float32 numbers a parameter. Megatron has two more copies
    of one, and the rank's part of all three."""
    layout, params = plan.layout, 0
    for model in plan.trained:
        for stage in plan.stages:
            muon = count_muon_elements(plan, model, stage)
            adam_params = count_trained(plan, model, layout, stage).all - (muon.shared + muon.experts)
            params = max(params, adam_params)
    return params * FP32 * (3 + 2 + 3 / (layout.dp * layout.cp))


def sampled_bytes(plan: PlanInputs) -> float:
    """Return all ranks' bytes of undelivered responses, as samples and packed.

    With weights in flight, all batches before the staleness bound may run."""
    batches = 1 + plan.config.schedule.lead if plan.in_flight else 1
    return batches * stored_batch_bytes(plan)


def step_batch_bytes(plan: PlanInputs) -> float:
    """Return the most bytes of a step's batch on a rank.

    It has its replica's tokens, an equal part of sampled responses or files, and all metadata. Without an
    engine, all ranks read the whole batch."""
    config, tokens = plan.config, plan.step_tokens(plan.longest)
    # Count columns of responses by token, to cover micro-batches' 16-byte indices.
    columns = frozenset[str]().union(*(phase.writes for phase in select_phases(config))) - {"tokens"}
    bytes_per_token = 8 + 1 + FP32 * len(columns)
    if not config.has_engine:
        return tokens * bytes_per_token
    # Top-k tokens and log-probs, twice more while packed; experts and sampling sets, once more.
    top_k = (config.teacher.top_k or 0) + config.algorithm.dppo.top_k
    bytes_per_token += 3 * 2 * FP32 * top_k + 2 * (routed_bytes(plan) + sampling_set_bytes(plan))
    rank_bytes = tokens / plan.layout.dp * bytes_per_token + stored_batch_bytes(plan) / plan.layout.world
    return rank_bytes + config.responses * KNOWN


def cpu_bytes(plan: PlanInputs) -> dict[str, float]:
    rollout_ranks, ranks = plan.config.parallel.rollout_ranks, plan.layout.stage
    parts = dict.fromkeys(("weights", "gradients", "optimizer", "engines' weights"), 0.0)
    for name in sorted(plan.groups - {"engine.kv_cache"}):
        model, _, part = name.partition(".")
        if model == "engine":
            parts["engines' weights"] = group_bytes(plan, name, 0) * (rollout_ranks or plan.layout.world)
        else:
            stages = range(plan.layout.pp)
            parts[part] += ranks * sum(group_bytes(plan, name, stage, every=True) for stage in stages)
    parts |= {name: size * plan.layout.world for name, size in average_weight_bytes(plan).items()}
    return parts | {"processes": LAUNCHER + FORKED * (plan.layout.world + rollout_ranks)}


def cpu_bytes_by_phase(plan: PlanInputs) -> dict[str, dict[str, float]]:
    """Return CPU ranks' bytes in addition to `cpu_bytes`, by phase and purpose.

    Processes keep freed activations: glibc returns few blocks below 32 MiB. A checkpoint is a phase."""
    config, world = plan.config, plan.layout.world
    tokens = cpu_micro_batch_tokens(plan)
    activations = world * max(
        sum(phase_buffers(plan, phase, stage, tokens).values())
        for phase in plan.phases
        for stage in range(plan.layout.pp)
    )
    batch = step_batch_bytes(plan) * world + (sampled_bytes(plan) if config.parallel.rollout_ranks else 0.0)
    parts_by_phase: dict[str, dict[str, float]] = {}
    for phase in plan.phases:
        parts = {"activations": activations, "batch": batch}
        if phase.updates_weights and plan.overlaps:
            # Gloo sums a copy of Megatron's gradient buffer.
            stages = range(plan.layout.pp)
            sums = max(group_bytes(plan, f"{phase.model}.gradients", stage) for stage in stages)
            parts["summed gradients"] = sums * world
        if phase.name == ROLLOUT and not config.rollout.capabilities.continuous_batching:
            parts["KV cache"] = _cpu_kv_cache_bytes(plan)
        parts_by_phase[phase.name] = parts
    if config.checkpoint.every:
        # The run continues during the write.
        for parts in parts_by_phase.values() if config.checkpoint.background and not plan.replay else ():
            parts["copy of a checkpoint"] = checkpoint_bytes(plan)
        parts_by_phase["checkpoint"] = {"gathered optimizer": gathered_optimizer_bytes(plan) * world}
    return parts_by_phase


def _cpu_kv_cache_bytes(plan: PlanInputs) -> float:
    engines = plan.config.parallel.rollout_ranks or plan.layout.world
    batch_size = min(plan.config.rollout.max_batch, -(-plan.config.responses // engines))
    bytes_per_response = plan.longest * plan.actor.cache_bytes(1) + plan.actor.state_bytes(1)
    return batch_size * bytes_per_response * engines


def cpu_micro_batch_tokens(plan: PlanInputs) -> int:
    """Return a rank's largest micro-batch, often below the budget on CPUs."""
    config = plan.config
    responses = max(config.mini_batch, config.critic.mini_batch or 0)
    sequences = -(-responses // plan.layout.dp)
    tokens = sequences * plan.longest
    if config.update.share_prompts:
        prompts = -(-sequences // config.rollout.group_size)
        tokens = prompts * config.data.max_prompt_tokens + sequences * config.rollout.max_extent
    return min(plan.pack, tokens)
