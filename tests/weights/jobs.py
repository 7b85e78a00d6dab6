"""What ranks do in the tests of transfer and export: messages between real processes."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.config.errors import CheckpointError
from megarl.parallel.layout import Layout
from megarl.parallel.runtime import Runtime
from megarl.weights.hf import HFFolder, export_hf, load_into
from megarl.weights.layout import Shards, hf_shards, megatron_layout
from megarl.weights.plan import make_plan, rounds_of
from megarl.weights.transfer import Staging, Transfer


def read(shards: Shards, folder: HFFolder, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {name: torch.full(shard.shape, torch.nan, dtype=dtype) for name, shard in shards.items()}
    load_into(tensors, shards, folder)
    return tensors


def transfer(runtime: Runtime, folder: Path, layouts: list[tuple[Layout, Layout | None]], bucket: int, dtype: torch.dtype) -> list[str]:
    """For each pair: weights in the first layout (fp32) are sent to the second one (None: the whole model on every rank) as `dtype`,
    changed, moved in memory, and sent again, through staging memory that all share. Returns what was found wrong on this rank."""
    hf = HFFolder(folder)
    wrong = []
    staging = Staging(runtime.device)
    for layout, target_layout in layouts:
        sources = megatron_layout(hf.config, layout)
        whole = [(rank, hf_shards(hf.config)) for rank in range(runtime.world)]
        targets = whole if target_layout is None else megatron_layout(hf.config, target_layout)
        plan = make_plan(sources, targets)
        plan.verify()
        held = read(plan.sources.get(runtime.rank, {}), hf, torch.float32)
        mine = plan.targets.get(runtime.rank, {})
        written = {name: torch.full(shard.shape, torch.nan, dtype=dtype) for name, shard in mine.items()}
        moving = Transfer(plan, runtime.rank, held, written, bucket, dtype=dtype, staging=staging)
        expected = read(mine, hf, torch.float32)
        for factor in (1.0, -3.0):
            for tensor in held.values():
                tensor.data = tensor.data * factor  # a new place in memory, as after offloading
            stats = moving.run()
            largest = max((round_.size for round_ in rounds_of(plan, runtime.rank, dtype.itemsize, bucket)), default=0)
            if not largest <= staging.nbytes <= bucket:
                wrong.append(f"{layout}: {staging.nbytes} bytes of staging are there for {largest}")
            staging.release()
            if staging.nbytes:
                wrong.append(f"{layout}: staging was not given back")
            for name, tensor in written.items():
                if not torch.equal(tensor, (expected[name] * factor).to(dtype)):
                    wrong.append(f"{layout} -> {target_layout}: {name} after factor {factor}")
            traffic = plan.summary(dtype.itemsize).get(runtime.rank)
            if traffic and (stats.bytes_sent, stats.bytes_received, stats.bytes_local) != tuple(traffic):
                wrong.append(f"{layout}: {stats} is not the plan's {traffic}")
    return wrong


def export(runtime: Runtime, folder: Path, out: Path, layout: Layout, critic: bool, max_shard_bytes: int) -> str:
    """Loads and exports in one layout; the message of a CheckpointError, or nothing."""
    hf = HFFolder(folder, critic=critic)
    shards = megatron_layout(hf.config, layout, critic=critic)[runtime.rank][1]
    tensors = read(shards, hf, torch.float32)
    try:
        export_hf(out, folder, layout, runtime.rank, tensors, critic=critic, max_shard_bytes=max_shard_bytes, bucket_bytes=3000)
    except CheckpointError as error:
        return str(error)
    return ""
