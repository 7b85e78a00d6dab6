"""One rank of a large job without the others.

Its process groups are torch's `fake` ones, whose collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megarl.parallel import cpu_platform
from megarl.parallel.layout import Layout
from megarl.parallel.runtime import Runtime

CPU = torch.device("cpu")


@contextmanager
def rank_of(layout: Layout, rank: int, device: torch.device = CPU) -> Iterator[Runtime]:
    """Make this process `rank` of a job with that layout, on the CPU or a fake device (fake_tensors.py).

    Code in this context must not depend on the contents of messages."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if device == CPU:
        cpu_platform.install()
    from megatron.core import parallel_state, tensor_parallel

    group = dist.new_group
    dist.new_group = lambda *ranks, backend=None, **options: group(*ranks, backend="fake", **options)  # type: ignore[assignment]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
        )
        if device == CPU:
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        assert dist.group.WORLD is not None
        yield Runtime(layout, rank, device, 60.0, dist.group.WORLD)
    finally:
        dist.new_group = group
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
