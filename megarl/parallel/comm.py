"""The few collectives that phases use outside Megatron: gathered objects, summed statistics, columns from the last stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.runtime import Runtime


def gather_objects(runtime: Runtime, value: Any) -> list[Any]:
    """Every rank's `value`, by rank, on every rank. For small or compact objects (pickled, over gloo)."""
    if runtime.world == 1:
        return [value]
    gathered: list[Any] = [None] * runtime.world
    dist.all_gather_object(gathered, value, group=runtime.cpu_group)
    return gathered


def sum_stats(runtime: Runtime, sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Adds up statistics over the data-parallel replicas, each counted once, in rank order. Ranks that do not speak may have none."""
    mine = {k: float(v) for k, v in sums.items()} if runtime.speaks else {}
    total: dict[str, float] = {}
    for theirs in gather_objects(runtime, mine):
        for key, value in theirs.items():
            total[key] = total.get(key, 0.0) + value
    return total


def sum_over_replicas(runtime: Runtime, sums: Tensor) -> Tensor:
    """Element-wise sum of a float64 tensor over the data-parallel replicas, each counted once, on every rank."""
    total = sums.double().cpu() if runtime.speaks else torch.zeros(sums.shape, dtype=torch.float64)
    if runtime.world > 1:
        total = total.clone()
        dist.all_reduce(total, group=runtime.cpu_group)
    return total


def max_over_ranks(runtime: Runtime, value: float) -> float:
    """The largest `value` of all ranks, on every rank."""
    return max(gather_objects(runtime, float(value)))


def from_last_stage(columns: dict[str, Tensor] | None, names: Sequence[str], entries: int, runtime: Runtime) -> dict[str, Tensor]:
    """Float32 columns [entries] that only the last pipeline stage has, on the host of every stage."""
    if runtime.layout.pp == 1:
        assert columns is not None
        return columns
    from megatron.core import parallel_state

    if columns is None:
        stacked = torch.empty(len(names), entries, dtype=torch.float32, device=runtime.device)
    else:
        stacked = torch.stack([columns[name].to(runtime.device, torch.float32) for name in names])
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(stacked, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return dict(zip(names, stacked.cpu(), strict=True))


def any_of(runtime: Runtime, flags: Sequence[bool]) -> list[bool]:
    """For each flag: True on every rank if it is true on at least one."""
    if runtime.world == 1:
        return list(flags)
    cells = torch.tensor([float(flag) for flag in flags])
    dist.all_reduce(cells, op=dist.ReduceOp.MAX, group=runtime.cpu_group)
    return [bool(cell) for cell in cells]


def any_rank(runtime: Runtime, flag: bool) -> bool:
    """True on every rank if `flag` is true on at least one."""
    return any_of(runtime, (flag,))[0]


def barrier(runtime: Runtime) -> None:
    """Every rank waits for every other, at most `parallel.timeout` seconds."""
    any_rank(runtime, False)
