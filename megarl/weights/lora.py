"""Merge LoRA adapters into weights on reading, by pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.config.schema import LoraConfig
from megarl.parallel.layout import Layout
from megarl.weights.boxes import Box, full_box, intersect, shift, view
from megarl.weights.families import model_weights, rename_to_table
from megarl.weights.shards import Region, megatron_layout

CHUNK = 1 << 22  # elements of temporary tensors


@dataclass(frozen=True)
class Merged:
    """A weight with LoRA adapters: W + scale * B A, computed in float32 and rounded to W's dtype.

    parts: boxes of the weight, with views of their A [rank, columns] and B [rows, rank]"""

    weight: Tensor
    parts: Sequence[tuple[Box, Tensor, Tensor]]
    scale: float

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def data_ptr(self) -> int:
        """Return the address of the weight. Adapters need none, as `read` uses them anew at each call."""
        return self.weight.data_ptr()

    def read(self, box: Box) -> Tensor:
        """Compute a copy of a box, in strips of about CHUNK elements."""
        out = view(self.weight, box).clone()
        for part_box, a, b in self.parts:
            overlap = intersect(part_box, box)
            if overlap is None:
                continue
            (top, bottom), columns = shift(overlap, part_box, full_box((len(b), a.shape[1])))
            a = view(a, (full_box(a.shape)[0], columns)).float()
            target = view(out, shift(overlap, box, full_box(tuple(out.shape))))
            height = max(1, CHUNK // a.shape[1])
            for start in range(top, bottom, height):
                stop = min(start + height, bottom)
                strip = target[start - top : stop - top]
                strip.copy_(torch.addmm(strip.float(), b.detach()[start:stop].float(), a, alpha=self.scale))
        return out


Source = Tensor | Merged


def read(source: Source, box: Box) -> Tensor:
    """Return a view of a tensor, or a copy of a merged weight."""
    return source.read(box) if isinstance(source, Merged) else view(source, box)


def merged(
    tensors: Mapping[str, Tensor],
    hf_config: Mapping[str, Any],
    layout: Layout,
    rank: int,
    lora: LoraConfig,
    *,
    critic: bool = False,
) -> Mapping[str, Source]:
    """Return a rank's weights by their names in families.py, as Merged if they have adapters.

    tensors: the rank's parameters and adapters"""
    sources: dict[str, Source] = {**model_weights(tensors)}
    if lora.rank is None:
        return sources
    named_tensors = rename_to_table(tensors)
    weights = megatron_layout(hf_config, layout, critic=critic)[rank][1]
    adapter_shards = megatron_layout(hf_config, layout, lora=lora)[rank][1]

    def slice_adapter(name: str, region: Region, axis: int) -> Tensor:
        bounds = region.hf_box[axis]
        for adapter_region in adapter_shards[name].regions:
            hf_bounds, local_bounds = adapter_region.hf_box[axis], adapter_region.local_box[axis]
            if hf_bounds[0] <= bounds[0] and bounds[1] <= hf_bounds[1]:
                start = local_bounds[0] + bounds[0] - hf_bounds[0]
                return named_tensors[name].detach().narrow(axis, start, bounds[1] - bounds[0])
        raise ValueError(f"{name}: rank {rank} does not hold {bounds} of {region.hf_name}")

    for name, shard in weights.items():
        parts: list[tuple[Box, Tensor, Tensor]] = []
        for region in shard.regions:
            adapter_name = f"{name.removesuffix('weight')}lora.{region.hf_name.split('.')[-2]}"
            if f"{adapter_name}_a" in adapter_shards:
                a = slice_adapter(f"{adapter_name}_a", region, 1)
                b = slice_adapter(f"{adapter_name}_b", region, 0)
                parts.append((region.local_box, a, b))
        if parts:
            sources[name] = Merged(named_tensors[name], parts, lora.scale)
    return sources
