"""LoRA adapters (arXiv 2106.09685) for Megatron's frozen linears: y = W x + scale * B A x.

weights/families.py:adapters lists them. A starts as in PEFT, uniform in +-1/sqrt(in), and B at zero. A
depends only on seed and name, so that every layout starts from the same adapters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.config.schema import LoraConfig
from megarl.parallel.runtime import Runtime
from megarl.weights.boxes import view
from megarl.weights.families import Pair, Sizes, adapters, get_family
from megarl.weights.shards import get_sizes, pair_shard


class Adapters(torch.nn.Module):
    """This rank's part of the adapters of the Hugging Face matrices in one linear.

    Parameters are like `q_proj_a` [rank, in] and `q_proj_b` [out, rank].

    rows     this rank's rows of each matrix in the linear, with or without adapters
    groups   query groups (or key heads of linear attention) on this rank, if they group rows; else 0
    gates    rows of a group's first matrix that follow the other matrices' rows; z of qkvz
    input_is_split  True: row-parallel, False: column-parallel, None: whole"""

    def __init__(
        self,
        scale: float,
        rows: dict[str, int],
        groups: int,
        gates: int,
        input_is_split: bool | None,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.scale, self.rows, self.groups, self.gates, self.enabled = scale, rows, groups, gates, True
        self.input_is_split, self.sequence_parallel = input_is_split, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        parameters = dict(self.named_parameters(recurse=False))
        names = [name for name in self.rows if f"{name}_a" in parameters]
        ax = F.linear(x, torch.cat([parameters[f"{name}_a"] for name in names])) * self.scale
        if self.input_is_split:  # row-parallel
            reduce = reduce_from_tensor_model_parallel_region
            ax = reduce_scatter_to_sequence_parallel_region(ax) if self.sequence_parallel else reduce(ax)
        elif self.input_is_split is not None:  # column-parallel
            if self.sequence_parallel:
                ax = gather_from_sequence_parallel_region(ax, tensor_parallel_output_grad=True)
            else:
                ax = copy_to_tensor_model_parallel_region(ax)
        parts = dict(zip(names, ax.chunk(len(names), -1), strict=True))
        outputs = [
            F.linear(parts[name], parameters[f"{name}_b"])
            if name in parts
            else ax.new_zeros(*ax.shape[:-1], rows)
            for name, rows in self.rows.items()
        ]
        if self.groups:
            outputs = [output.unflatten(-1, (self.groups, -1)) for output in outputs]
            if self.gates:
                outputs[0], gates = outputs[0].tensor_split([-self.gates], -1)
                outputs.append(gates)
            return torch.cat(outputs, -1).flatten(-2)
        return torch.cat(outputs, -1)


def attach_adapters(
    chunk: Any, hf_config: Mapping[str, Any], lora: LoraConfig, seed: int, runtime: Runtime
) -> None:
    """Add adapters to linears, as a child module `lora` and a hook."""
    sizes, layout = get_sizes(hf_config, lora), runtime.layout
    adapted = [pair for pair in get_family(hf_config).layer if adapters(pair, lora)]
    local_experts = sizes.experts // layout.ep
    for layer, pair in product(chunk.decoder.layers, adapted):
        if not sizes.has(pair, layer.layer_number - 1):
            continue
        path = pair.megatron.removeprefix("decoder.layers.{l}.").removesuffix(".weight")
        modules = []
        for expert in range(local_experts) if pair.per_expert else (0,):
            layer_and_expert = layer.layer_number - 1, layout.ep_rank(runtime.rank) * local_experts + expert
            modules.append(_make_adapters(pair, layer_and_expert, sizes, lora, seed, chunk.config, runtime))
        if pair.per_expert and chunk.config.moe_grouped_gemm:
            linear = layer.get_submodule(path.replace("local_experts.{e}.", ""))
            linear.lora = torch.nn.ModuleList(modules)
            linear.register_forward_hook(_add_grouped)
            continue
        for expert, module in enumerate(modules):
            linear = layer.get_submodule(path.format(e=expert))
            linear.lora = module
            linear.register_forward_hook(_add)


def _make_adapters(
    pair: Pair,
    place: tuple[int, int],
    sizes: Sizes,
    lora: LoraConfig,
    seed: int,
    config: TransformerConfig,
    runtime: Runtime,
) -> Adapters:
    """Make one linear's adapters. place: layer and expert."""
    tp, tp_rank = (1, 0) if pair.per_expert else (runtime.layout.tp, runtime.tp_rank)
    rows: dict[str, int] = {}
    for region in pair_shard(sizes, pair, *place, tp, tp_rank).regions:
        module_name, (start, stop) = region.hf_name.split(".")[-2], region.hf_box[0]
        rows[module_name] = rows.get(module_name, 0) + stop - start
    groups, gates = 0, 0
    if pair.operation == "qkv":
        groups = (sizes.key_heads if pair.kind == "linear" else sizes.kv_heads) // tp
        gates = sizes.value // sizes.key_heads if pair.hf[0][1].startswith("qkvz") else 0
    input_is_split = pair.operation == "row" if tp > 1 and pair.operation != "replicated" else None
    adapter_module = Adapters(lora.scale, rows, groups, gates, input_is_split, config.sequence_parallel)
    for matrix in adapters(pair, lora):
        shard, ((name, dims),) = pair_shard(sizes, matrix, *place, tp, tp_rank), matrix.hf
        values = torch.zeros(shard.shape, dtype=config.params_dtype)
        if matrix.megatron.endswith("_a"):
            digest = hashlib.sha256(f"{seed} {name.format(l=place[0], e=place[1])}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            shape = sizes.shape(dims)
            full_matrix = (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])
            for region in shard.regions:
                view(values, region.local_box).copy_(view(full_matrix, region.hf_box))
        parameter: Any = torch.nn.Parameter(values)
        if matrix.operation != "replicated":
            dim = 1 if matrix.operation == "row" else 0
            set_tensor_model_parallel_attributes(parameter, is_parallel=tp > 1, dim=dim, stride=1)
        elif tp > 1:
            # Megatron sums marked gradients.
            parameter.sequence_parallel = config.sequence_parallel
        adapter_module.register_parameter(matrix.megatron.rsplit(".", 1)[1], parameter)
    return adapter_module


def _add(linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return (output[0] + linear.lora(inputs[0]), output[1]) if linear.lora.enabled else output


def _add_grouped(linear: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Add to a grouped linear's output. inputs: x, ordered by expert, and rows per expert."""
    if not linear.lora[0].enabled:
        return output
    parts = inputs[0].split([int(rows) for rows in inputs[1]])
    outputs = [expert(part) for expert, part in zip(linear.lora, parts, strict=True)]
    return output[0] + torch.cat(outputs), output[1]


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Disable the adapters, which gives the reference model."""
    modules = [module for module in model.modules() if isinstance(module, Adapters)]
    for module in modules:
        module.enabled = False
    try:
        yield
    finally:
        for module in modules:
            module.enabled = True
