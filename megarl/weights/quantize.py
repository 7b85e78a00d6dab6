"""Block-FP8 on the source's side: scales agreed between all ranks that hold a part of a block, values quantised before they travel.

A block may lie across the border of two source shards. So every rank takes the largest magnitude of its part of each block, one
all-reduce (4 bytes for 16,384 weights) makes it the block's, and after that quantising is local, however the sources are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarl.weights.formats import BLOCK, SUFFIX
from megarl.weights.hf_io import view
from megarl.weights.layout import Box, Region, Shards

E4M3_MAX = 448.0
# Temporaries of quantising are float32: this many elements at once, whatever the size of the tensor.
CHUNK = 1 << 22


class BlockScales:
    """The scales of all quantised Hugging Face tensors, float32, whole on every rank: `tensors` by name, [rows / 128, columns / 128].

    shards: the scales' layout (`fp8_block` gives it). regions: (this rank's tensor name, region of a Hugging Face tensor in it).
    """

    def __init__(self, shards: Shards, regions: list[tuple[str, Region]], device: torch.device) -> None:
        sizes = {name: shard.shape[0] * shard.shape[1] for name, shard in shards.items()}
        self._flat = torch.zeros(sum(sizes.values()), dtype=torch.float32, device=device)
        parts = self._flat.split(list(sizes.values()))
        self.tensors = {name: part.view(shards[name].shape) for name, part in zip(sizes, parts, strict=True)}
        self._regions = regions

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes

    def update(self, sources: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
        """Scales of the present weights: the largest magnitude of a block / 448, so that it becomes FP8's largest number.

        Every rank of `group` calls this. A block of zeros has the smallest normal float32 as its scale, which keeps 0 / scale = 0.
        """
        self._flat.zero_()
        for name, region in self._regions:
            scales = self.tensors[region.hf_name + SUFFIX]
            for part, box in _strips(view(sources[name], region.local_box), region.hf_box):
                (top, bottom), (left, right) = box
                pad = (left % BLOCK, -right % BLOCK, top % BLOCK, -bottom % BLOCK)
                blocks = F.pad(part.abs(), pad).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
                there = scales[top // BLOCK : -(-bottom // BLOCK), left // BLOCK : -(-right // BLOCK)]
                torch.maximum(there, blocks.amax((1, 3)).float(), out=there)
        if dist.is_initialized():
            dist.all_reduce(self._flat, dist.ReduceOp.MAX, group=group)
        self._flat.div_(E4M3_MAX).clamp_(min=torch.finfo(torch.float32).tiny)

    def quantise(self, values: Tensor, hf_name: str, hf_box: Box, out: Tensor) -> None:
        """out = values / scale, rounded to float8_e4m3fn; `values` are `hf_box` of a Hugging Face tensor, both [rows, columns]."""
        scales = self.tensors[hf_name + SUFFIX]
        start = hf_box[0][0]
        for part, ((top, bottom), (left, right)) in _strips(values, hf_box):
            rows = torch.arange(top, bottom, device=part.device) // BLOCK
            columns = torch.arange(left, right, device=part.device) // BLOCK
            scaled = part.float() / scales[rows][:, columns]
            # Rounding of the quotient may pass the largest number by one unit; torch would make that NaN.
            out[top - start : bottom - start].copy_(scaled.clamp_(-E4M3_MAX, E4M3_MAX))


def _strips(values: Tensor, hf_box: Box) -> Iterator[tuple[Tensor, Box]]:
    """Rows of a matrix in pieces of about CHUNK elements, with their Hugging Face boxes; cut at blocks' borders where that is possible."""
    (top, bottom), columns = hf_box
    height = max(1, CHUNK // max(1, values.shape[1]))
    height = max(BLOCK, height // BLOCK * BLOCK)
    first = top
    while first < bottom:
        last = min(bottom, (first // BLOCK) * BLOCK + height)
        yield values[first - top : last - top], ((first, last), columns)
        first = last
