"""Proof after a transfer that each target holds the actor's weights, bit for bit: a 64-bit hash per tensor from both sides.

hash = sum of bits[i, j] * a[i] * b[j] mod 2^64 over the elements, with a and b odd and pseudo-random in the Hugging Face coordinates i
and j. A sum does not care how a tensor is cut, so sources hash the pieces that they hold, nothing is gathered, and one number per
target tensor travels. An element that differs always shows, as odd numbers have inverses; so do rows or columns that changed places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.errors import TransferError
from megarl.weights.hf_io import view
from megarl.weights.layout import Box
from megarl.weights.plan import Copy, Plan, to_hf

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22  # elements that are int64 at once


def fingerprint(values: Tensor, box: Box) -> Tensor:
    """The hash of `values`, which are `box` of a tensor: int64 [], to be added (mod 2^64) to those of its other boxes."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows = max(1, CHUNK // max(1, values[:1].numel()))
    weights = [_weights(start, stop, axis, values.device) for axis, (start, stop) in enumerate(box)]
    for first in range(0, values.shape[0], rows):
        part = values[first : first + rows].view(BITS[values.dtype.itemsize]).to(torch.int64)
        for weight in (*reversed(weights[1:]), weights[0][first : first + rows]):
            part = (part * weight).sum(-1)
        total += part
    return total


def _weights(start: int, stop: int, axis: int, device: torch.device) -> Tensor:
    """Odd pseudo-random numbers of the indices start to stop of an axis: multiplications and shifts as in splitmix64's finaliser."""
    x = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device) * 0x1E3779B97F4A7C15 + axis * 0x3C6EF372FE94F82A
    x = (x ^ (x >> 30)) * 0x3F58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x14D049BB133111EB
    return (x ^ (x >> 31)) | 1


class Fingerprints:
    """Compares the targets of a plan with its sources after a transfer.

    written: the tensor, in the target's dtype, that a copy's source amounts to. `group`: every rank of it calls `check`.
    """

    def __init__(
        self, plan: Plan, rank: int, written: Callable[[Copy], Tensor], group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._plan, self._rank, self._written, self._group, self._device = plan, rank, written, group, device
        self._names = [(target, name) for target, shards in plan.targets.items() for name in shards]
        self._index = {key: index for index, key in enumerate(self._names)}
        self._mine = [copy for copy in plan.direct() if copy.src_rank == rank]

    @torch.no_grad()
    def check(self, targets: Mapping[str, Tensor]) -> None:
        """TransferError on every rank, naming tensors, if a target is not what its sources hold. `targets`: this rank's."""
        difference = torch.zeros(len(self._names), dtype=torch.int64, device=self._device)
        known: dict[tuple[str, int, str | None], Tensor] = {}  # replicas of an engine are sent the same pieces
        for copy in self._mine:
            kind = self._plan.formats.get(copy.dst_name)
            key = (copy.src_name, id(copy.src_box), kind)
            if key not in known:
                _, hf_box = to_hf(self._plan.sources[self._rank][copy.src_name], copy.src_box, copy.src_name)
                known[key] = fingerprint(self._written(copy), hf_box)
            difference[self._index[copy.dst_rank, copy.dst_name]] += known[key]
        for name, shard in self._plan.targets.get(self._rank, {}).items():
            parts = [(region.local_box, region.hf_box) for region in shard.regions] + [(box, box) for box in shard.padding]
            for local_box, box in parts:  # padding is zero, and adds nothing
                difference[self._index[self._rank, name]] -= fingerprint(view(targets[name], local_box), box)
        if dist.is_initialized():
            dist.all_reduce(difference, group=self._group)
        wrong = [self._names[index] for index in difference.nonzero().flatten().tolist()]
        if wrong:
            shown, more = ", ".join(f"{name} of rank {rank}" for rank, name in wrong[:3]), ", ..." if len(wrong) > 3 else ""
            raise TransferError(f"weight transfer: fingerprints of {len(wrong)} engine tensors are not the actor's: {shown}{more}")
