"""Carrying out a plan: point-to-point messages in rounds of bounded staging memory, over gloo or NCCL.

The hot path is `Transfer.run`. Block FP8 is quantised before it travels, and fingerprints prove the result.
"""

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
    rounds_of,
    staged,
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
    """Bytes that one run sent, received and copied on this rank, and its seconds.

    bytes_kept: of the engine's tensors that were skipped, because they hold frozen weights"""

    bytes_sent: int
    bytes_received: int
    bytes_local: int
    seconds: float
    bytes_kept: int = 0

    def plus(self, other: TransferStats) -> TransferStats:
        """Return the sum of both runs, one after the other."""
        return TransferStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self) -> dict[str, float]:
        """Return bytes, seconds (inside/) and GB/s of the larger direction (throughput/) as metrics."""
        speed = max(self.bytes_sent, self.bytes_received) / max(self.seconds, 1e-9) / 1e9
        return {
            "transfer/bytes_sent": float(self.bytes_sent),
            "transfer/bytes_received": float(self.bytes_received),
            "transfer/bytes_local": float(self.bytes_local),
            "transfer/bytes_kept": float(self.bytes_kept),
            "inside/transfer": self.seconds,
            "throughput/transfer": speed,
        }


class Staging:
    """Device memory that transfers use one after the other: as much as the largest needs, from the first use.
    `release` empties the storage in place, so that views of it stay good."""

    def __init__(self, device: torch.device) -> None:
        self._needed = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes at this moment."""
        return self._memory.untyped_storage().nbytes()

    def reserve(self, size: int) -> None:
        """Announce that one of its users will need `size` bytes."""
        self._needed = max(self._needed, size)

    def take(self) -> Tensor:
        """Return the memory, uint8 [bytes]: the same tensor each time, unless more was reserved meanwhile."""
        if self._memory.numel() < self._needed:
            self._memory = torch.empty(self._needed, dtype=torch.uint8, device=self._memory.device)
        elif self.nbytes < self._needed:
            self._memory.untyped_storage().resize_(self._needed)
        return self._memory

    def release(self) -> None:
        """Give the memory back until the next `take`. Nothing may be under way on it."""
        self._memory.untyped_storage().resize_(0)


class _Moves:
    """Writes to tensors of this rank that run together: copies, and values that are quantised or merged."""

    def __init__(self) -> None:
        # Lists of one pair of dtypes each, as a device needs them to copy all tensors of a list at once.
        self._copies: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
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
class _Bound:
    """A round whose boxes have become views of tensors; sends and receives are (peer, bytes) of messages."""

    pack: _Moves = field(default_factory=_Moves)
    unpack: _Moves = field(default_factory=_Moves)
    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    receives: list[tuple[int, Tensor]] = field(default_factory=list)


class Transfer:
    """A plan bound to this rank's tensors, to be run as often as the weights change.

    Every rank of the plan constructs and runs its own Transfer; ranks that the plan does not name may do so
    too. All tensors of a rank are on one device; where one has moved in memory since the last run
    (offloading), the next run notices.

    bucket_bytes  limit of a rank's staging memory, sends and receives together
    dtype         of target tensors without a format. Default: that of this rank's targets, so a rank without
                  targets must give it. Sources are converted or quantised before they are sent
    group         of the messages; default: the whole job. On NCCL all its ranks must have used it once. All
                  its ranks take part if targets are quantised or checked
    staging       the staging memory, where several transfers share one

    Raises ValueError if names, shapes or dtypes of the tensors are not the plan's."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        source_tensors: Mapping[str, Source],
        target_tensors: Mapping[str, Tensor],
        bucket_bytes: int,
        *,
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        staging: Staging | None = None,
    ) -> None:
        if dtype is None:
            plain = [tensor.dtype for name, tensor in target_tensors.items() if name not in plan.formats]
            if not plain:
                raise ValueError(f"rank {rank} has no target tensors: the dtype of the others' must be given")
            dtype = plain[0]
        self._plan, self._rank, self._dtype, self._group = plan, rank, dtype, group
        tensors = (*source_tensors.values(), *target_tensors.values())
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._scales = BlockScales(plan, rank, self._device)
        self._weights, self._targets = source_tensors, target_tensors
        self._sources: dict[str, Source] = {**source_tensors, **self._scales.tensors}
        self._check_tensors()
        self._local = [copy for copy in plan.copies if copy.src_rank == copy.dst_rank == rank]
        self._rounds = rounds_of(plan, rank, dtype.itemsize, bucket_bytes)
        self._staging = staging or Staging(self._device)
        self._staging.reserve(max((round_.size for round_ in self._rounds), default=0))
        self._packed: Tensor | None = None  # the staging memory that the rounds' views are of
        self._addresses: tuple[int, ...] | None = None
        self._bound: list[_Bound] = []
        self._here, self._padding = _Moves(), list[Tensor]()
        self._traffic = plan.summary(dtype.itemsize).get(rank, Traffic(0, 0, 0))

    def _check_tensors(self) -> None:
        """Raise ValueError if the tensors are not those of the plan: it must not be found half-way."""
        sources, targets = (side.get(self._rank, {}) for side in (self._plan.sources, self._plan.targets))
        sources = {name: shard for name, shard in sources.items() if not name.endswith(SCALE_SUFFIX)}
        given: dict[str, Source] = {**self._targets}
        for what, tensors, shards in (("source", self._sources, sources), ("target", given, targets)):
            for name, shard in shards.items():
                where = f"rank {self._rank}: {what} tensor {name}"
                if name not in tensors or tuple(tensors[name].shape) != shard.shape:
                    found = tuple(tensors[name].shape) if name in tensors else "nothing"
                    raise ValueError(f"{where}: the plan expects {shard.shape}, there is {found}")
                dtype = self._target_dtype(name)
                if what == "target" and tensors[name].dtype != dtype:
                    raise ValueError(f"{where} is {tensors[name].dtype}, not {dtype}")

    @property
    def targets(self) -> Mapping[str, Tensor]:
        """Return this rank's target tensors."""
        return self._targets

    @property
    def target_bytes(self) -> int:
        """Return the bytes of this rank's target tensors."""
        return sum(tensor.nbytes for tensor in self._targets.values())

    @torch.no_grad()
    def run(self) -> TransferStats:
        """Write this rank's part of every target; WaitTimeout if a peer does not answer in time."""
        start = time.perf_counter()
        self._bind()
        self._scales.update(self._weights, self._group)
        if self._padding:
            torch._foreach_zero_(self._padding)
        self._here.run()
        for number, bound in enumerate(self._bound, start=1):
            bound.pack.run()
            messages = [dist.P2POp(dist.isend, wire, peer, self._group) for peer, wire in bound.sends]
            messages += [dist.P2POp(dist.irecv, wire, peer, self._group) for peer, wire in bound.receives]
            try:
                for work in dist.batch_isend_irecv(messages):
                    work.wait()
            except RuntimeError as error:
                peers = sorted({peer for peer, _ in (*bound.sends, *bound.receives)})
                where = f"weight transfer, round {number} of {len(self._bound)}"
                message = f"{where}: rank {self._rank} waited in vain for one of the ranks {peers} ({error})"
                raise WaitTimeout(message) from error
            bound.unpack.run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return TransferStats(*self._traffic, seconds=time.perf_counter() - start)

    def _bind(self) -> None:
        """Turn boxes into views of the tensors, unless they still lie where they lay at the last run."""
        tensors = (*self._weights.values(), *self._targets.values())
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        packed = self._staging.take()
        if addresses == self._addresses and packed is self._packed:
            return
        self._here = _Moves()
        for copy in self._local:
            self._move(self._here, copy, view(self._targets[copy.dst_name], copy.dst_box))
        shards = self._plan.targets.get(self._rank, {})
        self._padding = [
            view(self._targets[name], box) for name, shard in shards.items() for box in shard.padding
        ]
        self._bound = [self._bind_round(round_, packed) for round_ in self._rounds]
        self._packed, self._addresses = packed, addresses

    def _bind_round(self, round_: Round, staging: Tensor) -> _Bound:
        bound = _Bound()
        offset = 0
        for messages, wires in ((round_.sends, bound.sends), (round_.receives, bound.receives)):
            for peer, pieces in messages.items():
                first = offset
                for piece in pieces:
                    dtype = self._target_dtype(piece.dst_name)
                    nbytes = piece.size * dtype.itemsize
                    shape = [stop - start for start, stop in piece.dst_box]
                    packed = staging[offset : offset + nbytes].view(dtype).view(shape)
                    if messages is round_.receives:
                        bound.unpack.copy(view(self._targets[piece.dst_name], piece.dst_box), packed)
                    elif round_.relays:
                        bound.pack.copy(packed, view(self._targets[piece.src_name], piece.src_box))
                    else:
                        self._move(bound.pack, piece, packed)
                    offset += staged(nbytes)
                wires.append((peer, staging[first:offset]))
        return bound

    def _move(self, moves: _Moves, copy: Copy, to: Tensor) -> None:
        """Add the write of a copy's source to `to`, in the target's dtype."""
        source, box = self._sources[copy.src_name], copy.src_box
        if self._plan.formats.get(copy.dst_name) == FP8:
            place = to_hf(self._plan.sources[self._rank][copy.src_name], box, copy.src_name)
            moves.computed.append(lambda: self._scales.quantise(read(source, box), *place, to))
        elif isinstance(source, Merged):
            moves.computed.append(lambda: to.copy_(source.read(box)))
        else:
            moves.copy(to, view(source, box))

    def _target_dtype(self, name: str) -> torch.dtype:
        return FORMAT_DTYPES[self._plan.formats[name]] if name in self._plan.formats else self._dtype

    @cached_property
    def _hashed(self) -> tuple[dict[tuple[int, str], int], list[Copy]]:
        """Return the place of every target in the sums of `check`, and the copies that this rank hashes."""
        names = [(target, name) for target, shards in self._plan.targets.items() for name in shards]
        mine = [copy for copy in self._plan.direct() if copy.src_rank == self._rank]
        return {key: index for index, key in enumerate(names)}, mine

    @torch.no_grad()
    def check(self) -> None:
        """Compare every target with its sources by fingerprints, after `run`.

        Each side adds up 64-bit hashes of its pieces, so only one number per target tensor is sent. Raises
        TransferError on every rank, with the names of tensors that differ."""
        index, mine = self._hashed
        difference = torch.zeros(len(index), dtype=torch.int64, device=self._device)
        known: dict[tuple[str, int, str | None], Tensor] = {}  # engine replicas are sent the same pieces
        for copy in mine:
            key = (copy.src_name, id(copy.src_box), self._plan.formats.get(copy.dst_name))
            if key not in known:
                shape = [stop - start for start, stop in copy.dst_box]
                written = torch.empty(shape, dtype=self._target_dtype(copy.dst_name), device=self._device)
                moves = _Moves()
                self._move(moves, copy, written)
                moves.run()
                shard = self._plan.sources[self._rank][copy.src_name]
                known[key] = fingerprint(written, to_hf(shard, copy.src_box, copy.src_name)[1])
            difference[index[copy.dst_rank, copy.dst_name]] += known[key]
        for name, shard in self._plan.targets.get(self._rank, {}).items():
            parts = [(region.local_box, region.hf_box) for region in shard.regions]
            parts += [(box, box) for box in shard.padding]  # zero, and adds nothing
            for local_box, box in parts:
                difference[index[self._rank, name]] -= fingerprint(view(self._targets[name], local_box), box)
        if dist.is_initialized():
            dist.all_reduce(difference, group=self._group)
        names = list(index)
        wrong = [names[place] for place in difference.nonzero().flatten().tolist()]
        if wrong:
            shown = ", ".join(f"{name} of rank {rank}" for rank, name in wrong[:3])
            more = ", ..." if wrong[3:] else ""
            problem = f"fingerprints of {len(wrong)} engine tensors are not the actor's: {shown}{more}"
            raise TransferError(f"weight transfer: {problem}")


def fingerprint(values: Tensor, box: Box) -> Tensor:
    """Return the hash of a box of a tensor: int64 [], to be added to the hashes of its other boxes.

    hash = sum of bits[i, j] * a[i] * b[j] mod 2^64 over the elements, with a and b odd and pseudo-random in
    the Hugging Face coordinates i and j. A sum does not care how a tensor is cut. An element that differs
    always shows, as odd numbers have inverses; so do rows or columns that changed places."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows = max(1, CHUNK // max(1, values[:1].numel()))
    factors = []
    for axis, (start, stop) in enumerate(box):  # multiplications and shifts as in splitmix64's finaliser
        x = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=values.device) * 0x1E3779B97F4A7C15
        x += axis * 0x3C6EF372FE94F82A
        x = (x ^ (x >> 30)) * 0x3F58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x14D049BB133111EB
        factors.append((x ^ (x >> 31)) | 1)
    for first in range(0, values.shape[0], rows):
        part = values[first : first + rows].view(BITS[values.dtype.itemsize]).to(torch.int64)
        for factor in (*reversed(factors[1:]), factors[0][first : first + rows]):
            part = (part * factor).sum(-1)
        total += part
    return total


class BlockScales:
    """The scales of the Hugging Face tensors that a plan's targets need in block FP8; none for other plans.
    tensors: by name, float32 [rows / 128, columns / 128], whole on every rank. A block may lie across the
    border of two source shards, so every rank takes the largest magnitude of its part of each block, and one
    all-reduce makes it the block's; after that quantising is local, however the sources are cut."""

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        targets = {id(shards): shards for shards in plan.targets.values()}.values() if plan.formats else ()
        shards = [shard for mine in targets for name, shard in mine.items() if name in plan.formats]
        quantised = {
            region.hf_name.removesuffix(SCALE_SUFFIX) for shard in shards for region in shard.regions
        }
        needed = {hf_name + SCALE_SUFFIX for hf_name in quantised}
        everywhere = next(iter(plan.sources.values()), {})
        shapes = {name: shard.shape for name, shard in everywhere.items() if name in needed}
        sizes = [rows * columns for rows, columns in shapes.values()]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        parts = self._flat.split(sizes) if sizes else ()  # views, so that one all-reduce takes all
        self.tensors = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        self._regions: list[tuple[str, Region]] = [
            (name, region)
            for name, shard in plan.sources.get(rank, {}).items()
            for region in shard.regions
            if region.hf_name + SCALE_SUFFIX in shapes
        ]

    def update(self, sources: Mapping[str, Source], group: dist.ProcessGroup | None) -> None:
        """Take the scales of the present weights: a block's largest magnitude / 448, which is FP8's largest.
        Every rank of `group` calls this. A block of zeros has the smallest normal float32 as its scale, which
        keeps 0 / scale = 0."""
        if not self.tensors:
            return
        self._flat.zero_()
        for name, region in self._regions:
            scales = self.tensors[region.hf_name + SCALE_SUFFIX]
            for part, box in _strips(read(sources[name], region.local_box), region.hf_box):
                (top, bottom), (left, right) = box
                pad = (left % BLOCK, -right % BLOCK, top % BLOCK, -bottom % BLOCK)
                blocks = F.pad(part.abs(), pad).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
                there = scales[top // BLOCK : -(-bottom // BLOCK), left // BLOCK : -(-right // BLOCK)]
                torch.maximum(there, blocks.amax((1, 3)).float(), out=there)
        if dist.is_initialized():
            dist.all_reduce(self._flat, dist.ReduceOp.MAX, group=group)
        self._flat.div_(E4M3_MAX).clamp_(min=torch.finfo(torch.float32).tiny)

    def quantise(self, values: Tensor, hf_name: str, hf_box: Box, out: Tensor) -> None:
        """Write values / scale, rounded to float8_e4m3fn, to `out`; values [rows, columns] are `hf_box`."""
        scales = self.tensors[hf_name + SCALE_SUFFIX]
        start = hf_box[0][0]
        for part, ((top, bottom), (left, right)) in _strips(values, hf_box):
            rows = torch.arange(top, bottom, device=part.device) // BLOCK
            columns = torch.arange(left, right, device=part.device) // BLOCK
            scaled = part.float() / scales[rows][:, columns]
            # Rounding of the quotient may pass the largest number by one unit; torch would make that NaN.
            out[top - start : bottom - start].copy_(scaled.clamp_(-E4M3_MAX, E4M3_MAX))


def _strips(values: Tensor, hf_box: Box) -> Iterator[tuple[Tensor, Box]]:
    """Yield rows of a matrix in pieces of about CHUNK elements, with their boxes, cut between blocks."""
    (top, bottom), columns = hf_box
    height = max(1, CHUNK // max(1, values.shape[1]))
    height = max(BLOCK, height // BLOCK * BLOCK)
    first = top
    while first < bottom:
        last = min(bottom, (first // BLOCK) * BLOCK + height)
        yield values[first - top : last - top], ((first, last), columns)
        first = last
