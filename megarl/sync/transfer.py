"""Run a transfer plan: rounds of point-to-point messages over gloo or NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarl.config.errors import TransferError, WaitTimeout
from megarl.sync.plan import (
    BLOCK,
    FP8,
    FP32,
    SCALE_SUFFIX,
    Copy,
    Plan,
    Round,
    Traffic,
    align,
    build_rounds,
    to_hf,
)
from megarl.weights.boxes import Box, view
from megarl.weights.lora import CHUNK, Merged, Source, read
from megarl.weights.shards import Region

FORMAT_DTYPES = {FP8: torch.float8_e4m3fn, FP32: torch.float32}
E4M3_MAX = 448.0
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TransferStats:
    bytes_sent: int
    bytes_received: int
    bytes_local: int
    seconds: float
    bytes_kept: int = 0  # of skipped frozen tensors
    backend_bytes: int = 0  # that weight backends sent to servers or wrote, of all ranks
    backend_seconds: float = 0.0

    def __add__(self, other: TransferStats) -> TransferStats:
        return TransferStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self) -> dict[str, float]:
        """Return bytes, seconds, and GB/s of the larger direction (throughput/)."""
        speed = max(self.bytes_sent, self.bytes_received) / max(self.seconds, 1e-9) / 1e9
        return {
            "transfer/bytes_sent": float(self.bytes_sent),
            "transfer/bytes_received": float(self.bytes_received),
            "transfer/bytes_local": float(self.bytes_local),
            "transfer/bytes_kept": float(self.bytes_kept),
            "transfer/backend_bytes": float(self.backend_bytes),
            "inside/transfer": self.seconds,
            "inside/transfer_backend": self.backend_seconds,
            "throughput/transfer": speed,
        }


class Staging:
    """Device memory that transfers share, allocated at first use."""

    def __init__(self, device: torch.device) -> None:
        self._needed = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self._memory.untyped_storage().nbytes()

    def reserve(self, size: int) -> None:
        self._needed = max(self._needed, size)

    def take(self) -> Tensor:
        """Return the memory, uint8 [bytes]: the same tensor until more is reserved."""
        if self._memory.numel() < self._needed:
            self._memory = torch.empty(self._needed, dtype=torch.uint8, device=self._memory.device)
        elif self.nbytes < self._needed:
            self._memory.untyped_storage().resize_(self._needed)
        return self._memory

    def release(self) -> None:
        """Free the memory until the next `take`; its views work again then. No operation may be using it."""
        self._memory.untyped_storage().resize_(0)


class _Writes:
    def __init__(self) -> None:
        # By (target dtype, source dtype): one kernel copies a list's tensors.
        self._copies: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        # Writes of quantised and merged tensors, after the copies.
        self.computed: list[Callable[[], object]] = []

    def copy(self, to: Tensor, from_: Tensor) -> None:
        targets, sources = self._copies.setdefault((to.dtype, from_.dtype), ([], []))
        targets.append(to)
        sources.append(from_)

    def run(self) -> None:
        for targets, sources in self._copies.values():
            torch._foreach_copy_(targets, sources)
        for compute in self.computed:
            compute()


@dataclass
class _BoundRound:
    pack: _Writes = field(default_factory=_Writes)
    unpack: _Writes = field(default_factory=_Writes)
    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    receives: list[tuple[int, Tensor]] = field(default_factory=list)


class Transfer:
    """A plan bound to this rank's tensors.

    All ranks of the plan run it together. A rank's tensors are on one device, and may move between runs.
    Sources are converted or quantised before sending.

    bucket_bytes  limit of staging memory
    dtype         of targets without a format
    group         process group. With NCCL, all its ranks must have used it before. If targets are quantised
                  or checked, all its ranks must take part in the transfer

    Raises ValueError for tensors that do not fit the plan."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        source_tensors: Mapping[str, Source],
        target_tensors: Mapping[str, Tensor],
        bucket_bytes: int,
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        staging: Staging | None = None,
    ) -> None:
        self._plan, self._rank, self._dtype, self._group = plan, rank, dtype, group
        tensors = (*source_tensors.values(), *target_tensors.values())
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._scales = BlockScales(plan, rank, self._device)
        self._weights, self.targets = source_tensors, target_tensors
        self._sources: dict[str, Source] = {**source_tensors, **self._scales.tensors}
        self._check_tensors()
        self._local = [copy for copy in plan.copies if copy.src_rank == copy.dst_rank == rank]
        self._rounds = build_rounds(plan, rank, dtype.itemsize, bucket_bytes)
        self._staging = staging or Staging(self._device)
        self._staging.reserve(max((round_.size for round_ in self._rounds), default=0))
        self._packed: Tensor | None = None
        self._addresses: tuple[int, ...] | None = None
        self._bound: list[_BoundRound] = []
        self._local_writes, self._padding = _Writes(), list[Tensor]()
        self._traffic = plan.summary(dtype.itemsize).get(rank, Traffic(0, 0, 0))

    def _check_tensors(self) -> None:
        sources, targets = (side.get(self._rank, {}) for side in (self._plan.sources, self._plan.targets))
        sources = {name: shard for name, shard in sources.items() if not name.endswith(SCALE_SUFFIX)}
        writable: dict[str, Source] = {**self.targets}
        for role, tensors, shards in (("source", self._sources, sources), ("target", writable, targets)):
            for name, shard in shards.items():
                where = f"rank {self._rank}: {role} tensor {name}"
                if name not in tensors or tuple(tensors[name].shape) != shard.shape:
                    actual_shape = tuple(tensors[name].shape) if name in tensors else "nothing"
                    raise ValueError(f"{where}: the plan expects {shard.shape}, there is {actual_shape}")
                dtype = self._target_dtype(name)
                if role == "target" and tensors[name].dtype != dtype:
                    raise ValueError(f"{where} is {tensors[name].dtype}, not {dtype}")

    @property
    def target_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.targets.values())

    @torch.no_grad()
    def run(self) -> TransferStats:
        """Transfer the weights. Raises WaitTimeout if a peer does not answer."""
        start = time.perf_counter()
        self._bind()
        self._scales.update(self._weights, self._group)
        if self._padding:
            torch._foreach_zero_(self._padding)
        self._local_writes.run()
        for round_number, bound_round in enumerate(self._bound, start=1):
            bound_round.pack.run()
            messages = [
                dist.P2POp(dist.isend, buffer, peer, self._group) for peer, buffer in bound_round.sends
            ]
            messages += [
                dist.P2POp(dist.irecv, buffer, peer, self._group) for peer, buffer in bound_round.receives
            ]
            try:
                for work in dist.batch_isend_irecv(messages):
                    work.wait()
            except RuntimeError as error:
                peers = sorted({peer for peer, _ in (*bound_round.sends, *bound_round.receives)})
                where = f"weight transfer, round {round_number} of {len(self._bound)}"
                message = f"{where}: rank {self._rank} got no answer from one of the ranks {peers} ({error})"
                raise WaitTimeout(message) from error
            bound_round.unpack.run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return TransferStats(*self._traffic, seconds=time.perf_counter() - start)

    def _bind(self) -> None:
        """Turn boxes into views, if a tensor has moved since the last run."""
        tensors = (*self._weights.values(), *self.targets.values())
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        staging = self._staging.take()
        if addresses == self._addresses and staging is self._packed:
            return
        self._local_writes = _Writes()
        for copy in self._local:
            self._add_write(self._local_writes, copy, view(self.targets[copy.dst_name], copy.dst_box))
        shards = self._plan.targets.get(self._rank, {})
        self._padding = [
            view(self.targets[name], box) for name, shard in shards.items() for box in shard.padding
        ]
        self._bound = [self._bind_round(round_, staging) for round_ in self._rounds]
        self._packed, self._addresses = staging, addresses

    def _bind_round(self, round_: Round, staging: Tensor) -> _BoundRound:
        bound_round = _BoundRound()
        offset = 0
        for pieces_by_peer, buffers in (
            (round_.sends, bound_round.sends),
            (round_.receives, bound_round.receives),
        ):
            for peer, pieces in pieces_by_peer.items():
                message_start = offset
                for piece in pieces:
                    dtype = self._target_dtype(piece.dst_name)
                    nbytes = piece.size * dtype.itemsize
                    shape = [stop - start for start, stop in piece.dst_box]
                    packed_piece = staging[offset : offset + nbytes].view(dtype).view(shape)
                    if pieces_by_peer is round_.receives:
                        bound_round.unpack.copy(
                            view(self.targets[piece.dst_name], piece.dst_box), packed_piece
                        )
                    elif round_.relays:  # the source is a target that an earlier round has filled
                        bound_round.pack.copy(packed_piece, view(self.targets[piece.src_name], piece.src_box))
                    else:
                        self._add_write(bound_round.pack, piece, packed_piece)
                    offset += align(nbytes)
                buffers.append((peer, staging[message_start:offset]))
        return bound_round

    def _add_write(self, writes: _Writes, copy: Copy, to: Tensor) -> None:
        source, box = self._sources[copy.src_name], copy.src_box
        if self._plan.formats.get(copy.dst_name) == FP8:
            hf_location = to_hf(self._plan.sources[self._rank][copy.src_name], box, copy.src_name)
            writes.computed.append(lambda: self._scales.quantise(read(source, box), *hf_location, to))
        elif isinstance(source, Merged):
            writes.computed.append(lambda: to.copy_(source.read(box)))
        else:
            writes.copy(to, view(source, box))

    def _target_dtype(self, name: str) -> torch.dtype:
        return FORMAT_DTYPES[self._plan.formats[name]] if name in self._plan.formats else self._dtype

    @cached_property
    def _hash_plan(self) -> tuple[dict[tuple[int, str], int], list[Copy]]:
        names = [(target, name) for target, shards in self._plan.targets.items() for name in shards]
        source_copies = [copy for copy in self._plan.direct() if copy.src_rank == self._rank]
        return {key: index for index, key in enumerate(names)}, source_copies

    @torch.no_grad()
    def check(self) -> None:
        """Compare every target with its sources after `run`. All ranks call this.

        Sends 64 bits per target. Raises TransferError on every rank, with the differing tensors."""
        index_by_target, source_copies = self._hash_plan
        difference = torch.zeros(len(index_by_target), dtype=torch.int64, device=self._device)
        hashes: dict[tuple[str, int, str | None], Tensor] = {}  # replicas get the same pieces
        for copy in source_copies:
            key = (copy.src_name, id(copy.src_box), self._plan.formats.get(copy.dst_name))
            if key not in hashes:
                shape = [stop - start for start, stop in copy.dst_box]
                values = torch.empty(shape, dtype=self._target_dtype(copy.dst_name), device=self._device)
                writes = _Writes()
                self._add_write(writes, copy, values)
                writes.run()
                shard = self._plan.sources[self._rank][copy.src_name]
                hashes[key] = fingerprint(values, to_hf(shard, copy.src_box, copy.src_name)[1])
            difference[index_by_target[copy.dst_rank, copy.dst_name]] += hashes[key]
        for name, shard in self._plan.targets.get(self._rank, {}).items():
            box_pairs = [(region.local_box, region.hf_box) for region in shard.regions]
            box_pairs += [(box, box) for box in shard.padding]  # zeros have the hash 0
            for local_box, box in box_pairs:
                difference[index_by_target[self._rank, name]] -= fingerprint(
                    view(self.targets[name], local_box), box
                )
        if dist.is_initialized():
            dist.all_reduce(difference, group=self._group)
        names = list(index_by_target)
        mismatches = [names[position] for position in difference.nonzero().flatten().tolist()]
        if mismatches:
            examples = ", ".join(f"{name} of rank {rank}" for rank, name in mismatches[:3])
            examples += ", ..." if mismatches[3:] else ""
            problem = f"fingerprints of {len(mismatches)} engine tensors are not the actor's: {examples}"
            raise TransferError(f"weight transfer: {problem}")


def fingerprint(values: Tensor, box: Box) -> Tensor:
    """Return the hash of a box, int64 []. The hash of a tensor is the sum over its boxes.

    hash = sum of bits[i, j] * a[i] * b[j] mod 2^64, where i and j are Hugging Face coordinates. a and b are
    pseudo-random and odd. Odd factors are invertible, so one wrong element always changes the hash."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    chunk_rows = max(1, CHUNK // max(1, values[:1].numel()))
    factors = []
    for axis, (start, stop) in enumerate(box):  # the finaliser of splitmix64
        x = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=values.device) * 0x1E3779B97F4A7C15
        x += axis * 0x3C6EF372FE94F82A
        x = (x ^ (x >> 30)) * 0x3F58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x14D049BB133111EB
        factors.append((x ^ (x >> 31)) | 1)
    for first_row in range(0, values.shape[0], chunk_rows):
        chunk = values[first_row : first_row + chunk_rows].view(BITS[values.dtype.itemsize]).to(torch.int64)
        for factor in (*reversed(factors[1:]), factors[0][first_row : first_row + chunk_rows]):
            chunk = (chunk * factor).sum(-1)
        total += chunk
    return total


class BlockScales:
    """A plan's block FP8 scales, float32 [rows / 128, columns / 128] by tensor, complete on every rank.

    A block may span source shards, so an all-reduce combines the largest magnitudes of its parts."""

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        targets = {id(shards): shards for shards in plan.targets.values()}.values() if plan.formats else ()
        shards = [
            shard
            for target_shards in targets
            for name, shard in target_shards.items()
            if name in plan.formats
        ]
        quantised_names = {
            region.hf_name.removesuffix(SCALE_SUFFIX) for shard in shards for region in shard.regions
        }
        scale_names = {hf_name + SCALE_SUFFIX for hf_name in quantised_names}
        source_shards = next(iter(plan.sources.values()), {})
        shapes = {name: shard.shape for name, shard in source_shards.items() if name in scale_names}
        sizes = [rows * columns for rows, columns in shapes.values()]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        parts = self._flat.split(sizes) if sizes else ()  # views, so that one all-reduce suffices
        self.tensors = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        self._regions: list[tuple[str, Region]] = [
            (name, region)
            for name, shard in plan.sources.get(rank, {}).items()
            for region in shard.regions
            if region.hf_name + SCALE_SUFFIX in shapes
        ]

    def update(self, sources: Mapping[str, Source], group: dist.ProcessGroup | None) -> None:
        """Compute the scales: a block's largest magnitude / 448 (the largest FP8). Collective.

        Zeros get the smallest normal float32, so that 0 / scale is 0."""
        if not self.tensors:
            return
        self._flat.zero_()
        for name, region in self._regions:
            scales = self.tensors[region.hf_name + SCALE_SUFFIX]
            for strip, box in _strips(read(sources[name], region.local_box), region.hf_box):
                (top, bottom), (left, right) = box
                pad = (left % BLOCK, -right % BLOCK, top % BLOCK, -bottom % BLOCK)
                blocks = F.pad(strip.abs(), pad).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
                block_scales = scales[top // BLOCK : -(-bottom // BLOCK), left // BLOCK : -(-right // BLOCK)]
                torch.maximum(block_scales, blocks.amax((1, 3)).float(), out=block_scales)
        if dist.is_initialized():
            dist.all_reduce(self._flat, dist.ReduceOp.MAX, group=group)
        self._flat.div_(E4M3_MAX).clamp_(min=torch.finfo(torch.float32).tiny)

    def quantise(self, values: Tensor, hf_name: str, hf_box: Box, out: Tensor) -> None:
        """Quantise values [rows, columns] of `hf_box` into out, float8_e4m3fn."""
        scales = self.tensors[hf_name + SCALE_SUFFIX]
        start = hf_box[0][0]
        for strip, ((top, bottom), (left, right)) in _strips(values, hf_box):
            rows = torch.arange(top, bottom, device=strip.device) // BLOCK
            columns = torch.arange(left, right, device=strip.device) // BLOCK
            scaled = strip.float() / scales[rows][:, columns]
            # Rounding may exceed the largest FP8 by one ulp, which torch would convert to NaN.
            out[top - start : bottom - start].copy_(scaled.clamp_(-E4M3_MAX, E4M3_MAX))


def _strips(values: Tensor, hf_box: Box) -> Iterator[tuple[Tensor, Box]]:
    """Yield strips of about CHUNK elements, with their boxes. Strips end at block boundaries."""
    (top, bottom), columns = hf_box
    height = max(1, CHUNK // max(1, values.shape[1]))
    height = max(BLOCK, height // BLOCK * BLOCK)
    start = top
    while start < bottom:
        stop = min(bottom, (start // BLOCK) * BLOCK + height)
        yield values[start - top : stop - top], ((start, stop), columns)
        start = stop
