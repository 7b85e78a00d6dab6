"""Count a model's bytes on a rank of a pipeline stage."""

from __future__ import annotations

from functools import lru_cache
from operator import mul
from typing import NamedTuple

from megarl.parallel.layout import Layout
from megarl.plan.engines import engine_weight_bytes, kv_cache_bytes
from megarl.plan.inputs import PlanInputs
from megarl.plan.sizes import (
    FP32,
    Activations,
    ParamCount,
    Passes,
    Shape,
    count_activations,
    fp8_bytes_per_param,
    max_share,
)

SCALAR_HEAD_MODELS = ("critic", "reward")


def count_params(plan: PlanInputs, model: str, stage: int, shape: Shape | None = None) -> ParamCount:
    """Count a rank's parameters and adapters. shape: of a teacher."""
    shape = shape or plan.shape(model)
    base_params = shape.count_params(plan.layout, stage, critic=model in SCALAR_HEAD_MODELS)
    if model not in ("actor", "critic") or plan.lora(model).rank is None:
        return base_params
    adapter_params = count_trained(plan, model, plan.layout, stage)
    return ParamCount(
        base_params.shared + adapter_params.shared,
        base_params.experts + adapter_params.experts,
        base_params.float32,
    )


def count_trained(plan: PlanInputs, model: str, layout: Layout, stage: int) -> ParamCount:
    optimizer = plan.optimizer(model)
    return plan.shape(model).count_params(layout, stage, critic=model == "critic", optimizer=optimizer)


def group_bytes(plan: PlanInputs, name: str, stage: int, *, every: bool = False) -> float:
    """Count the bytes of a tensor group, such as actor.weights.

    Of several critics or teachers, the largest counts, as one is on the GPU at a time. All count with `every`
    or if never offloaded."""
    model, _, part = name.partition(".")
    if model == "engine":
        if plan.config.rollout.capabilities.remote:
            return 0.0  # servers have separate GPUs
        return engine_weight_bytes(plan) if part == "weights" else kv_cache_bytes(plan)
    every = every or name in plan.keep
    critics = plan.config.critic.count if model == "critic" and every else 1
    if part == "weights":
        sizes = _weight_bytes(plan, model, stage, critics)
        return sum(sizes) if every else max(sizes)
    if part == "gradients":
        return float(critics * _gradient_bytes(plan, model, stage))
    return critics * _optimizer_bytes(plan, model, stage)


def _weight_bytes(plan: PlanInputs, model: str, stage: int, critics: int) -> list[float]:
    itemsize = plan.shape(model).itemsize
    has_teachers = model == "teacher" and plan.teachers
    shapes = plan.teachers if has_teachers else (plan.shape(model),) * critics
    counts = [count_params(plan, model, stage, shape) for shape in shapes]
    padding = count_muon_elements(plan, model, stage).padding * itemsize
    return [
        float((count.shared + count.experts) * itemsize + count.float32 * FP32) + padding for count in counts
    ]


def _gradient_bytes(plan: PlanInputs, model: str, stage: int) -> int:
    trained = count_trained(plan, model, plan.layout, stage)
    padding = count_muon_elements(plan, model, stage).padding
    return (trained.shared + trained.experts + padding) * plan.gradient_size + trained.float32 * FP32


def _optimizer_bytes(plan: PlanInputs, model: str, stage: int) -> float:
    """Count a rank's optimizer state, and float32 weights of a bfloat16 model.

    Megatron shards them over data- and context-parallel ranks, experts' over their replicas."""
    layout, muon = plan.layout, count_muon_elements(plan, model, stage)
    trained = count_trained(plan, model, layout, stage)
    replicas = layout.dp * layout.cp
    sharded = (trained.shared - muon.shared) / replicas
    sharded += (trained.experts - muon.experts) / (layout.stage // layout.ep)
    float32 = trained.float32 / replicas
    moments = (sharded + float32) * 2 * FP32 + muon.largest_share * FP32
    if plan.shape(model).itemsize < FP32:
        return moments + (sharded + muon.largest_share) * FP32
    return moments


class MuonElements(NamedTuple):
    """Elements of a rank's matrices that Muon orthogonalises.

    padding        of Megatron's buffers, so that each matrix is in one replica's share
    largest_share  of a replica"""

    shared: int
    experts: int
    padding: int
    largest_share: int


def count_muon_elements(plan: PlanInputs, model: str, stage: int) -> MuonElements:
    if model not in plan.muon_models:
        return MuonElements(0, 0, 0, 0)
    return _count_muon_elements(plan.shape(model), plan.layout, stage)


@lru_cache(maxsize=256)
def _count_muon_elements(shape: Shape, layout: Layout, stage: int) -> MuonElements:
    # Count several buckets as one.
    matrix_sizes = shape.matrices(layout, stage)
    replica_counts = layout.dp * layout.cp, layout.stage // layout.ep
    shares = [
        max_share(sizes, replicas) for sizes, replicas in zip(matrix_sizes, replica_counts, strict=True)
    ]
    shared, experts = sum(matrix_sizes[0]), sum(matrix_sizes[1])
    padding = sum(map(mul, shares, replica_counts)) - (shared + experts)
    return MuonElements(shared, experts, padding, sum(shares))


def muon_scratch_bytes(plan: PlanInputs, model: str) -> float:
    """Count Newton-Schulz's bytes for the largest matrix.

    In float32: shards and gathered matrix (with tensor parallelism), normalised matrix. In the model's dtype:
    two iterates."""
    if model not in plan.muon_models:
        return 0.0
    shape = plan.shape(model)
    largest = max(max(sizes, default=0) for sizes in shape.matrices(Layout(), 0))
    return largest * (2 * FP32 * (plan.layout.tp > 1) + FP32 + 2 * shape.itemsize)


def count_bucket_params(plan: PlanInputs, model: str, stage: int) -> float:
    """Count the largest bucket's parameters. Only a first stage with overlap has several."""
    parallel, layout = plan.config.parallel, plan.layout
    trained = count_trained(plan, model, layout, stage)
    largest_tensor = plan.shape(model).largest_tensor(layout.tp)
    # A virtual stage also has the embedding or output layer.
    single_bucket = max(
        trained.shared / layout.vpp + largest_tensor * (1 - 1 / layout.vpp), trained.experts / layout.vpp
    )
    if stage or not plan.overlaps:
        return single_bucket
    bucket_size = parallel.overlap_bucket or max(40_000_000, 1_000_000 * layout.dp)
    return min(single_bucket, bucket_size + largest_tensor)  # a bucket ends with the tensor that fills it


def gradient_sum_bytes(plan: PlanInputs, model: str, stage: int) -> tuple[float, float]:
    """Return bytes to sum gradients over replicas: during the backward pass, and after it.

    Every replica's bf16 buckets are summed in float32. The optimizer reads its share in float32."""
    if plan.gradient_size == FP32:
        return 0.0, 0.0
    layout = plan.layout
    trained, replicas = count_trained(plan, model, layout, stage), layout.dp * layout.cp
    expert_replicas = layout.stage // layout.ep
    fewest_replicas = expert_replicas if trained.experts else replicas
    bucket_bytes = count_bucket_params(plan, model, stage) * (plan.gradient_size + FP32 / fewest_replicas)
    share = trained.shared / replicas + trained.experts / expert_replicas
    # These buckets are complete before the backward pass ends.
    sums_early = plan.overlaps and (stage == 0 or layout.vpp > 1)
    return bucket_bytes if sums_early else 0.0, max(bucket_bytes, share * FP32)


def fp8_copy_bytes(plan: PlanInputs, model: str, stage: int, *, forward_only: bool = False) -> float:
    """Count the bytes of Transformer Engine's cached FP8 copies of weights.

    The first pass after an update or onload makes them; an offload frees them. forward_only: passes without
    gradients make only rows."""
    fp8 = plan.config.model.fp8
    if not plan.in_fp8:
        return 0.0
    elements = plan.shape(model).count_fp8(plan.layout, stage, fp8.first_last_layers_bf16)
    bytes_per_param = fp8_bytes_per_param(fp8.recipe, plan.device)
    return elements * (max(1.0, bytes_per_param / 2) if forward_only else bytes_per_param)


def resident_bytes(
    plan: PlanInputs, groups: frozenset[str], stage: int, *, forward_only: bool = False
) -> dict[str, float]:
    """Count the bytes of tensor groups, and of FP8 copies."""
    parts = {name: group_bytes(plan, name, stage) for name in sorted(groups)}
    for model in sorted(name.removesuffix(".weights") for name in groups if name.endswith(".weights")):
        rows_only = forward_only and f"{model}.weights" not in plan.keep
        if model != "engine" and (copies := fp8_copy_bytes(plan, model, stage, forward_only=rows_only)):
            parts[f"{model}.fp8_copies"] = copies
    return parts


def model_activations(plan: PlanInputs, model: str) -> Activations:
    return _activations(plan.shape(model), plan.passes, model in SCALAR_HEAD_MODELS)


@lru_cache(maxsize=256)
def _activations(shape: Shape, passes: Passes, critic: bool) -> Activations:
    return count_activations(shape, passes, critic=critic)
