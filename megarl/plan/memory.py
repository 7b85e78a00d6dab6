"""Count a GPU's bytes in each phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.config.phases import ROLLOUT, WEIGHT_TRANSFER, Phase
from megarl.plan.engines import transfer_buffer_bytes
from megarl.plan.inputs import PlanInputs
from megarl.plan.sizes import FP32, GIB, count_in_flight, count_kept_outputs
from megarl.plan.tensors import (
    count_bucket_params,
    count_muon_elements,
    count_trained,
    gradient_sum_bytes,
    group_bytes,
    model_activations,
    muon_scratch_bytes,
    resident_bytes,
)

# Our estimates:
OVERHEAD = 4 * GIB  # of CUDA contexts and communicators
FRAGMENTATION = 1.05  # allocated bytes for a byte of activations
# Bytes of each top-k token, measured in an update.
TOP_K_ENTRY = 60


@dataclass(frozen=True)
class Need:
    """Bytes of a phase by part, on a GPU of pipeline stage `stage`."""

    phase: str
    parts: dict[str, float]
    stage: int

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def gpu_needs(
    plan: PlanInputs, tokens: float | None = None, phases: Sequence[Phase] | None = None
) -> Iterator[Need]:
    """Yield each phase's need; without `phases`, also of construction and a checkpoint.

    tokens: of a micro-batch; None: `plan.pack`"""
    for phase in plan.phases if phases is None else phases:
        yield _largest(phase_need(plan, phase, stage, tokens) for stage in plan.stages)
    if phases is None:
        yield from needs_outside_steps(plan)


def needs_outside_steps(plan: PlanInputs) -> Iterator[Need]:
    model_stages = [(model, stage) for model in plan.trained for stage in plan.stages]
    yield _largest(construction_need(plan, *model_stage) for model_stage in model_stages)
    if plan.config.checkpoint.every:
        loads = (True,) if plan.replay else (False, True)
        yield _largest(
            checkpoint_need(plan, *model_stage, load=load) for model_stage in model_stages for load in loads
        )


def _largest(needs: Iterator[Need]) -> Need:
    return max(needs, key=lambda need: need.total)


def phase_need(plan: PlanInputs, phase: Phase, stage: int, tokens: float | None = None) -> Need:
    groups = phase.on_gpu | plan.keep
    if plan.config.parallel.rollout_ranks:
        engine_groups = frozenset(name for name in groups if name.startswith("engine."))
        groups = engine_groups if phase.name == ROLLOUT else groups - engine_groups
    buffers = phase_buffers(plan, phase, stage, plan.pack if tokens is None else tokens)
    # An update's FP8 copies last until the weight transfer. Only updates have a `head`.
    forward_only = not (phase.name == WEIGHT_TRANSFER or "head" in buffers)
    resident = resident_bytes(plan, groups, stage, forward_only=forward_only)
    return Need(phase.name, resident | buffers | {"contexts": OVERHEAD}, stage)


def phase_buffers(plan: PlanInputs, phase: Phase, stage: int, tokens: float) -> dict[str, float]:
    if phase.name == WEIGHT_TRANSFER:
        return {"transfer buckets": transfer_buffer_bytes(plan)}
    if phase.model is None:
        return {}  # an engine's memory is in its groups
    layout, sizes = plan.layout, plan.shape(phase.model).sizes
    activations, layers = model_activations(plan, phase.model), sizes.layers // layout.pp
    # First layers, without experts.
    dense_layers = 0
    if activations.dense:
        dense_layers = sum(layer < sizes.dense for layer in layout.layers(sizes.layers, stage)[:layers])
    tokens, is_last = tokens / layout.cp, stage == layout.pp - 1
    top_k_bytes = TOP_K_ENTRY * tokens * _count_top_k(plan, phase) * is_last * FRAGMENTATION
    if not phase.updates_weights:
        forward_bytes = activations.forward_only(tokens, is_last, dense_layers)
        return {"activations": forward_bytes * FRAGMENTATION + top_k_bytes}
    in_flight_batches = count_in_flight(layout, stage)
    outputs = count_kept_outputs(layout, in_flight_batches, is_last)
    with_head, without_head = (
        activations.training(tokens, layers, in_flight_batches, head, outputs, dense_layers)
        for head in (is_last, False)
    )
    head = (with_head - without_head) * FRAGMENTATION + top_k_bytes
    parts = {"activations": without_head * FRAGMENTATION, "head": head}
    bytes_in_backward, bytes_after_backward = gradient_sum_bytes(plan, phase.model, stage)
    # After the backward pass, activations' memory is reused.
    if extra_sums := max(bytes_in_backward, bytes_after_backward - sum(parts.values())):
        parts["summed gradients"] = extra_sums
    scratch = muon_scratch_bytes(plan, phase.model)
    if extra_scratch := max(0.0, scratch + bytes_after_backward - sum(parts.values())):
        parts["Muon's matrices"] = extra_scratch
    return parts


def _count_top_k(plan: PlanInputs, phase: Phase) -> int:
    policy, teacher = plan.config.algorithm.dppo.top_k, plan.config.teacher.top_k or 0
    rollout = plan.config.rollout
    # Ids of sampling sets are further candidates, as top-k tokens are.
    sets = rollout.top_k if rollout.sampling_replay else 0
    teachers = ("teacher_advantages", "teacher_logprobs")
    top_k = dict.fromkeys(("old_logprobs", "parity", "reference_logprobs", *teachers), sets)
    top_k |= {"old_top_k": policy, "teacher_top_k": teacher, "actor_update": policy + teacher + sets}
    return top_k.get(phase.name, 0)


def construction_need(plan: PlanInputs, model: str, stage: int) -> Need:
    """Return the need of a trained model's construction, before any engine starts.

    DistributedDataParallel copies weights into buffers, then the optimizer makes float32 weights."""
    actor_groups = {name for name in plan.keep if model == "critic" and name.startswith("actor.")}
    parts = {name: group_bytes(plan, name, stage) for name in sorted(actor_groups)}
    for part in ("weights", "gradients"):
        parts[f"{model}.{part}"] = group_bytes(plan, f"{model}.{part}", stage)
    trained, itemsize = count_trained(plan, model, plan.layout, stage), plan.shape(model).itemsize
    copied_bytes = float((trained.shared + trained.experts) * itemsize)
    # Of Adam's three float32 numbers and Muon's two, only the weight exists yet.
    muon = count_muon_elements(plan, model, stage).largest_share
    float32_weights = (group_bytes(plan, f"{model}.optimizer", stage) - 2 * FP32 * muon) / 3 + FP32 * muon
    float32_weights *= itemsize < FP32
    parts["copied weights"] = max(copied_bytes, float32_weights)
    return Need("construction", {**parts, "contexts": OVERHEAD}, stage)


def checkpoint_need(plan: PlanInputs, model: str, stage: int, *, load: bool = False) -> Need:
    """Return the need to save a model's checkpoint, or with `load` to load it.

    Saving gathers a bucket's float32 weights, then each moment, through a flat buffer. Loading joins all
    layers' gate and up projections before the model copies them."""
    groups = frozenset({f"{model}.weights", f"{model}.optimizer"}) | plan.keep
    if plan.config.parallel.rollout_ranks:
        groups = frozenset(name for name in groups if not name.startswith("engine."))
    shape, layout = plan.shape(model), plan.layout
    gathered_bytes = count_bucket_params(plan, model, stage) * FP32 * (2 + 1 / (layout.dp * layout.cp))
    joined_bytes = float(shape.count_gate_up(layout, stage) * shape.itemsize)
    joined_bytes *= plan.lora(model).rank is None
    buffers = {"joined weights": joined_bytes} if load else {"gathered bucket": gathered_bytes}
    resident = resident_bytes(plan, groups, stage)
    if (load or model == "critic") and f"{model}.weights" not in plan.keep:
        resident.pop(f"{model}.fp8_copies", None)  # no pass since the onload
    return Need("checkpoint", {**resident, **buffers, "contexts": OVERHEAD}, stage)
