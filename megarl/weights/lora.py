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
        """Return the weight's address. Adapters are views, and may move."""
        return self.weight.data_ptr()

    def read(self, box: Box) -> Tensor:
        """Compute a copy of a box, in strips of about CHUNK elements."""
        out = view(self.weight, box).clone()
        for place, a, b in self.parts:
            common = intersect(place, box)
            if common is None:
                continue
            (top, bottom), columns = shift(common, place, full_box((len(b), a.shape[1])))
            a = view(a, (full_box(a.shape)[0], columns)).float()
            into = view(out, shift(common, box, full_box(tuple(out.shape))))
            height = max(1, CHUNK // a.shape[1])
            for first in range(top, bottom, height):
                last = min(first + height, bottom)
                strip = into[first - top : last - top]
                strip.copy_(torch.addmm(strip.float(), b.detach()[first:last].float(), a, alpha=self.scale))
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
    """Return a rank's weights by the table's names, Merged if they have adapters.

    tensors: the rank's parameters and adapters"""
    sources: dict[str, Source] = {**model_weights(tensors)}
    if lora.rank is None:
        return sources
    named = rename_to_table(tensors)
    weights = megatron_layout(hf_config, layout, critic=critic)[rank][1]
    halves = megatron_layout(hf_config, layout, lora=lora)[rank][1]

    def part(name: str, region: Region, axis: int) -> Tensor:
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
            sources[name] = Merged(named[name], parts, lora.scale)
    return sources
