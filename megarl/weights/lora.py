"""LoRA adapters on their way out of Megatron: merged into their weights, and as a folder of PEFT's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import LoraConfig
from megarl.parallel.layout import Layout
from megarl.weights.families import model_weights, read_config, table_names
from megarl.weights.plan import make_plan
from megarl.weights.shards import Box, Region, hf_shards, megatron_layout
from megarl.weights.tensor_files import Processes, new_folder, write_json, write_tensors
from megarl.weights.transfer import Merged, Source, Transfer

PREFIX = "base_model.model."  # of PEFT's names, before the model's own


def merged(
    tensors: Mapping[str, Tensor],
    hf_config: Mapping[str, Any],
    layout: Layout,
    rank: int,
    lora: LoraConfig,
    *,
    critic: bool = False,
) -> Mapping[str, Source]:
    """Return a rank's weights under the table's names, those with adapters as Merged: the part of B A that
    belongs to a shard is on its own rank. tensors: all its parameters."""
    found: dict[str, Source] = {**model_weights(tensors)}
    if lora.rank is None:
        return found
    named = table_names(tensors)
    weights = megatron_layout(hf_config, layout, critic=critic)[rank][1]
    halves = megatron_layout(hf_config, layout, lora=lora)[rank][1]

    def part(name: str, region: Region, axis: int) -> Tensor:
        """Return the rows of B (axis 0) or the columns of A that make this region of a weight."""
        wanted = region.hf_box[axis]
        for own in halves[name].regions:
            hf, local = own.hf_box[axis], own.local_box[axis]
            if hf[0] <= wanted[0] and wanted[1] <= hf[1]:
                start = local[0] + wanted[0] - hf[0]
                return named[name].detach().narrow(axis, start, wanted[1] - wanted[0])
        raise ValueError(f"{name}: rank {rank} does not hold {wanted} of {region.hf_name}")

    for name, shard in weights.items():
        parts: list[tuple[Box, Tensor, Tensor]] = []
        for region in shard.regions:
            half = f"{name.removesuffix('weight')}lora.{region.hf_name.split('.')[-2]}"
            if f"{half}_a" in halves:
                parts.append((region.local_box, part(f"{half}_a", region, 1), part(f"{half}_b", region, 0)))
        if parts:
            found[name] = Merged(named[name], parts, lora.scale)
    return found


def export_peft(
    out: Path,
    source: Path,
    layout: Layout,
    rank: int,
    tensors: Mapping[str, Tensor],
    lora: LoraConfig,
    *,
    bucket_bytes: int = 256 << 20,
    control: dist.ProcessGroup | None = None,
) -> None:
    """Write the adapters that all ranks of `layout` hold together as a folder that PEFT loads; every rank
    calls this. source: the folder of the model; tensors: this rank's parameters; control: as
    `export_hf`, also in what is raised."""
    processes, config = Processes(control), read_config(source)
    halves = {name: tensor for name, tensor in table_names(tensors).items() if ".lora." in name}
    shards = hf_shards(config, lora=lora)
    plan = make_plan(megatron_layout(config, layout, lora=lora), [(0, shards)])
    plan.verify()
    first = next(iter(tensors.values()))
    target: dict[str, Tensor] = {}
    if rank == 0:
        target = {
            name: torch.empty(shard.shape, dtype=first.dtype, device=first.device)
            for name, shard in shards.items()
        }
    Transfer(plan, rank, halves, target, bucket_bytes, dtype=first.dtype).run()
    # Where PEFT joins experts' gate and up it doubles rank and alpha, which is right for alpha / rank alone.
    joins = any(".experts." in name for name in shards)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": lora.rank,
        "lora_alpha": lora.scale * (lora.rank or 1) if joins else lora.alpha,
        "use_rslora": lora.rank_stabilized and not joins,
        "target_modules": sorted({name.split(".")[-3] for name in shards}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }

    def write() -> None:
        named = {PREFIX + name: tensor for name, tensor in target.items()}
        write_tensors(folder / "adapter_model.safetensors", named)
        write_json(folder / "adapter_config.json", described)

    size = sum(tensor.nbytes for tensor in target.values())
    with new_folder(out, size, processes) as folder:
        processes.first(write)
