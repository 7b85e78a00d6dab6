"""Export a model or its LoRA adapters by a transfer to rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import LoraConfig
from megarl.parallel.layout import Layout
from megarl.sync.plan import FP32, make_plan
from megarl.sync.transfer import Transfer
from megarl.weights.families import read_config, rename_to_table
from megarl.weights.hf import SCORE_BIAS, divide_into_files, export_config, write_index
from megarl.weights.lora import Source
from megarl.weights.shards import float32_tensors, hf_shards, megatron_layout
from megarl.weights.tensor_files import Processes, carry_along, new_folder, write_json, write_tensors

PREFIX = "base_model.model."  # of PEFT's names


def export_hf(
    out: Path,
    source: Path,
    layout: Layout,
    rank: int,
    tensors: Mapping[str, Source],
    *,
    critic: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 << 30,
    bucket_bytes: int = 256 << 20,
    control: dist.ProcessGroup | None = None,
) -> None:
    """Write the model into a Hugging Face folder. Every rank calls this.

    source   folder that the run started from, whose other files are copied
    tensors  by the names of families.py
    critic   export a one-label token classifier
    dtype    default: that of the first tensor. A router's bias stays float32
    control  gloo group, if the default group is NCCL

    Rank 0 needs device memory for a bucket and a file. Raises CheckpointError on every rank, and leaves no
    files, if `out` exists or cannot be written."""
    processes, config = Processes(control), read_config(source)
    shards = hf_shards(config, critic=critic)
    sources = megatron_layout(config, layout, critic=critic)
    first_tensor = next(iter(tensors.values()))
    default_dtype: torch.dtype = first_tensor.dtype if dtype is None else dtype
    float32_names = float32_tensors(config)
    dtype_by_name = {name: torch.float32 if name in float32_names else default_dtype for name in shards}
    sizes = {name: prod(shard.shape) * dtype_by_name[name].itemsize for name, shard in shards.items()}
    files = divide_into_files(sizes, max_shard_bytes)

    def finish() -> None:
        write_index(folder, files, sum(sizes.values()) + (default_dtype.itemsize if critic else 0))
        carry_along(source, folder, export_config(config, critic, default_dtype))

    with new_folder(out, sum(sizes.values()), processes) as folder:
        for file, names in files.items():
            file_shards = {name: shards[name] for name in names}
            plan = make_plan(
                sources, [(0, file_shards)], formats=dict.fromkeys(float32_names & file_shards.keys(), FP32)
            )
            plan.verify()
            target: dict[str, Tensor] = {}
            for name, shard in file_shards.items() if rank == 0 else ():
                dtype = dtype_by_name[name]
                target[name] = torch.empty(shard.shape, dtype=dtype, device=first_tensor.device)
            Transfer(plan, rank, tensors, target, bucket_bytes, dtype=default_dtype).run()
            if "score.weight" in file_shards:
                names.append(SCORE_BIAS)
                target[SCORE_BIAS] = torch.zeros(1, dtype=default_dtype)
            processes.first(partial(write_tensors, folder / file, target))
            del target
        processes.first(finish)


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
    """Write the adapters into a folder for PEFT. See `export_hf`."""
    processes, config = Processes(control), read_config(source)
    adapter_tensors = {name: tensor for name, tensor in rename_to_table(tensors).items() if ".lora." in name}
    shards = hf_shards(config, lora=lora)
    plan = make_plan(megatron_layout(config, layout, lora=lora), [(0, shards)])
    plan.verify()
    first_tensor = next(iter(tensors.values()))
    target: dict[str, Tensor] = {}
    if rank == 0:
        target = {
            name: torch.empty(shard.shape, dtype=first_tensor.dtype, device=first_tensor.device)
            for name, shard in shards.items()
        }
    Transfer(plan, rank, adapter_tensors, target, bucket_bytes, dtype=first_tensor.dtype).run()
    # PEFT fuses gate and up of experts, with twice the rank and alpha. That preserves alpha / rank, but not
    # rank-stabilized LoRA's alpha / sqrt(rank).
    fuses_experts = any(".experts." in name for name in shards)
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": lora.rank,
        "lora_alpha": lora.scale * (lora.rank or 1) if fuses_experts else lora.alpha,
        "use_rslora": lora.rank_stabilized and not fuses_experts,
        "target_modules": sorted({name.split(".")[-3] for name in shards}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }

    def write() -> None:
        named_tensors = {PREFIX + name: tensor for name, tensor in target.items()}
        write_tensors(folder / "adapter_model.safetensors", named_tensors)
        write_json(folder / "adapter_config.json", adapter_config)

    size = sum(tensor.nbytes for tensor in target.values())
    with new_folder(out, size, processes) as folder:
        processes.first(write)
