"""Options and buffer layouts for Muon on Megatron's distributed optimizer."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig

from megarl.config.schema import MuonConfig
from megarl.model.builder import ModelChunks


def muon_buffer_layouts(model: ModelChunks, buckets: DistributedDataParallelConfig) -> list[dict[str, Any]]:
    """Return each chunk's layout for DDP: a matrix lies in one shard, so Muon orthogonalises it locally."""
    from megatron.core.optimizer import layer_wise_optimizer as layer_wise

    layer_wise.tag_params_for_buffer_routing(model.chunks)
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    has_buckets = buckets.overlap_grad_reduce and parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    # DDP's default size.
    bucket_size = (buckets.bucket_size or max(40_000_000, 1_000_000 * replicas)) if has_buckets else None
    compute_layout = layer_wise.LayerWiseDistributedOptimizer.compute_full_param_layout
    expert_replicas = parallel_state.get_expert_data_parallel_world_size()
    trained_parameters = [[p for p in chunk.parameters() if p.requires_grad] for chunk in model.chunks]
    return [
        {"full_param_layout": compute_layout(parameters, bucket_size, replicas, buckets, expert_replicas)}
        for parameters in trained_parameters
    ]


def muon_options(muon: MuonConfig, in_bf16: bool) -> dict[str, Any]:
    """Return Muon's settings under Megatron's names.

    in_bf16: the weights, and so the factors of Newton-Schulz, are bfloat16.
    Queries, keys and values share a Megatron parameter, but are orthogonalised separately."""
    return {
        "use_layer_wise_distributed_optimizer": True,
        "muon_momentum": muon.momentum,
        "muon_nesterov": True,
        "muon_num_ns_steps": muon.steps,
        "muon_coefficient_type": "simple",
        "muon_scale_mode": "spectral",
        "muon_extra_scale_factor": muon.scale,
        "muon_tp_mode": "duplicated",
        "muon_fp32_matmul_prec": "medium" if in_bf16 else "highest",
    }
