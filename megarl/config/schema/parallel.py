"""Section `parallel`."""

from __future__ import annotations

from typing import Literal

from megarl.config.schema.section import Section, field


class ParallelConfig(Section):
    """data-parallel size = (devices - rollout_ranks) / (tp * pp * cp)"""

    tp: int = field(1, "tensor-parallel size", "devices", ge=1)
    pp: int = field(1, "pipeline-parallel size", "devices", ge=1)
    dp: int | None = field(
        None, "data-parallel size; null: what the launcher gives (1 where megarl launches)", "devices", ge=1
    )
    cp: int = field(1, "context-parallel size: ranks over which each sequence is split", "devices", ge=1)
    ep: int = field(1, "ranks of a stage (tp x cp x dp) that share a mixture's experts", "devices", ge=1)
    rollout_ranks: int = field(
        0,
        "ranks that only run engines, numbered after the training ranks; 0: all ranks do both",
        "devices",
        ge=0,
    )
    vpp: int = field(
        1,
        "virtual stages of each pipeline rank: the interleaved schedule",
        "stages",
        "arXiv 2104.04473",
        ge=1,
    )
    overlap_warmup_flush: bool = field(
        False,
        "also overlap sends and receives with computation during warm-up and flush; needs vpp > 1",
        "",
        "Megatron's overlap_p2p_comm_warmup_flush",
    )
    sequence_parallel: bool | None = field(None, "Megatron's sequence parallelism; null: on whenever tp > 1")
    overlap_grad_reduce: bool | None = field(
        None, "reduce gradients over data-parallel ranks during the backward pass; null: if dp x cp > 4"
    )
    overlap_param_gather: bool | None = field(
        None, "gather updated weights during the next forward pass; null: if dp x cp > 4"
    )
    grad_dtype: Literal["fp32", "bf16"] = field(
        "fp32",
        "dtype of gradient accumulation and reduction; bf16: half of the memory and traffic, and gradients "
        "of replicas are still summed in fp32",
        source="Megatron's reduce_scatter_with_fp32_accumulation",
    )
    overlap_bucket: int | None = field(
        None, "weights per bucket of these overlaps; null: 40 million, or dp million if more", "weights", ge=1
    )
    device: Literal["auto", "cuda", "cpu"] = field("auto", "auto: cuda if available")
    threads: int = field(1, "torch threads per process on a CPU", "threads", ge=1)
    timeout: float = field(600.0, "longest wait in one collective before the run stops", "seconds", gt=0)
    restarts: int = field(0, "restarts after a rank died or hung, where megarl launches", "restarts", ge=0)
