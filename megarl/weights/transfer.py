"""Carrying out a plan: point-to-point messages in rounds of bounded staging memory, over gloo or NCCL. The hot path is `Transfer.run`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.errors import WaitTimeout
from megarl.weights.fingerprint import Fingerprints
from megarl.weights.formats import FP8, FP32, SUFFIX
from megarl.weights.hf_io import view
from megarl.weights.layout import Box
from megarl.weights.plan import Copy, Plan, Traffic, to_hf
from megarl.weights.quantize import BlockScales
from megarl.weights.rounds import Round, rounds_of, staged

FORMAT_DTYPES = {FP8: torch.float8_e4m3fn, FP32: torch.float32}


@dataclass(frozen=True)
class TransferStats:
    """What one run did on this rank: bytes sent to and received from other ranks, bytes copied on the rank itself, seconds."""

    bytes_sent: int
    bytes_received: int
    bytes_local: int
    seconds: float

    def plus(self, other: TransferStats) -> TransferStats:
        """Both runs, one after the other."""
        return TransferStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl: bytes, seconds (inside/), and GB/s of the larger direction (throughput/)."""
        speed = max(self.bytes_sent, self.bytes_received) / max(self.seconds, 1e-9) / 1e9
        return {
            "transfer/bytes_sent": float(self.bytes_sent),
            "transfer/bytes_received": float(self.bytes_received),
            "transfer/bytes_local": float(self.bytes_local),
            "inside/transfer": self.seconds,
            "throughput/transfer": speed,
        }


class _Moves:
    """Writes to tensors of this rank, carried out together."""

    def __init__(self) -> None:
        self._groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        self._quantised: list[tuple[BlockScales, Tensor, str, Box, Tensor]] = []

    def copy(self, to: Tensor, from_: Tensor) -> None:
        """Lists of one dtype each, as a device needs them to copy all tensors of a list at once."""
        tos, froms = self._groups[to.dtype, from_.dtype]
        tos.append(to)
        froms.append(from_)

    def quantise(self, scales: BlockScales, from_: Tensor, hf_name: str, hf_box: Box, to: Tensor) -> None:
        self._quantised.append((scales, from_, hf_name, hf_box, to))

    def run(self) -> None:
        for to, from_ in self._groups.values():
            torch._foreach_copy_(to, from_)
        for scales, values, hf_name, hf_box, out in self._quantised:
            scales.quantise(values, hf_name, hf_box, out)


class Staging:
    """Device memory that transfers use one after the other: as much as the neediest of them asks for, taken at the first need. `release`
    empties the storage in place, so that views of it stay good."""

    def __init__(self, device: torch.device) -> None:
        self._needed = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """What it takes at this moment."""
        return self._memory.untyped_storage().nbytes()

    def reserve(self, size: int) -> None:
        """Somebody who shares it will need so many bytes."""
        self._needed = max(self._needed, size)

    def take(self) -> Tensor:
        """The memory, uint8 [bytes]; the same tensor from call to call, unless more was reserved in between."""
        if self._memory.numel() < self._needed:
            self._memory = torch.empty(self._needed, dtype=torch.uint8, device=self._memory.device)
        elif self.nbytes < self._needed:
            self._memory.untyped_storage().resize_(self._needed)
        return self._memory

    def release(self) -> None:
        """Gives it back until the next `take`. Nothing may be under way on it."""
        self._memory.untyped_storage().resize_(0)


@dataclass
class _Bound:
    """A round whose boxes have become views of real tensors; `wire`: (peer, bytes) of whole messages."""

    pack: _Moves = field(default_factory=_Moves)
    unpack: _Moves = field(default_factory=_Moves)
    send_wire: list[tuple[int, Tensor]] = field(default_factory=list)
    receive_wire: list[tuple[int, Tensor]] = field(default_factory=list)


class Transfer:
    """A plan bound to this rank's tensors, to be run as often as the weights change.

    `dtype` is the dtype of target tensors without a format of their own, by default that of this rank's (a rank without such targets
    must be told); sources of another dtype are converted, or quantised, before they are sent, so that no more bytes travel than the
    target needs. `bucket_bytes` bounds the staging memory of a rank, sends and receives together; `staging` is that memory where
    several transfers share one. Every rank of the plan constructs and runs its own Transfer; ranks that the plan does not name may
    do so too. All tensors of a rank are on one device. If the memory of a tensor moves between runs (offloading), the next run
    notices. `group` is the process group of the messages, by default the whole job's; on NCCL it must have been used once by all
    its ranks, and where targets are quantised or checked all its ranks take part.
    ValueError if names, shapes or dtypes of the tensors are not the plan's.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        source_tensors: Mapping[str, Tensor],
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
        self._device = next((t.device for tensors in (source_tensors, target_tensors) for t in tensors.values()), torch.device("cpu"))
        self._scales = self._make_scales()
        self._weights, self._targets = source_tensors, target_tensors
        self._sources = {**source_tensors, **self._scales.tensors} if self._scales else source_tensors
        self._check()
        self._local = [copy for copy in plan.copies if copy.src_rank == copy.dst_rank == rank]
        self._rounds = rounds_of(plan, rank, dtype.itemsize, bucket_bytes)
        self._staging_size = max((round_.size for round_ in self._rounds), default=0)
        self._staging = staging or Staging(self._device)
        self._staging.reserve(self._staging_size)
        self._packed: Tensor | None = None  # the staging memory that the rounds' views are of
        self._addresses: tuple[int, ...] | None = None
        self._bound: list[_Bound] = []
        self._here, self._padding = _Moves(), list[Tensor]()
        self._fingerprints: Fingerprints | None = None
        self._traffic = plan.summary(dtype.itemsize).get(rank, Traffic(0, 0, 0))

    @property
    def target_bytes(self) -> int:
        """Of this rank's target tensors."""
        return sum(tensor.nbytes for tensor in self._targets.values())

    @property
    def staging_bytes(self) -> int:
        """Staging memory of this rank: at most `bucket_bytes`, and no more than the largest round needs."""
        return self._staging_size

    @torch.no_grad()
    def run(self) -> TransferStats:
        """Writes this rank's part of every target. WaitTimeout if a peer does not answer within the process group's limit."""
        start = time.perf_counter()
        self._bind()
        if self._scales:
            self._scales.update(self._weights, self._group)
        if self._padding:
            torch._foreach_zero_(self._padding)
        self._here.run()
        for index, bound in enumerate(self._bound):
            bound.pack.run()
            self._exchange(index, bound)
            bound.unpack.run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return TransferStats(*self._traffic, seconds=time.perf_counter() - start)

    def check(self) -> None:
        """Compares every target with its sources by fingerprints; TransferError on every rank if one differs. After `run`."""
        if self._fingerprints is None:
            self._fingerprints = Fingerprints(self._plan, self._rank, self._written, self._group, self._device)
        self._fingerprints.check(self._targets)

    def release(self) -> None:
        """Gives the staging memory back; the next run takes it again."""
        self._staging.release()

    def _make_scales(self) -> BlockScales | None:
        """The scales that the plan's targets need; the same on every rank."""
        different = {id(shards): shards for shards in self._plan.targets.values()}.values()
        parts = [(name, region) for shards in different for name, shard in shards.items() for region in shard.regions]
        needed = {region.hf_name.removesuffix(SUFFIX) + SUFFIX for name, region in parts if name in self._plan.formats}
        if not needed:
            return None
        everywhere = next(iter(self._plan.sources.values()))
        shards = {name: shard for name, shard in everywhere.items() if name in needed}
        mine = self._plan.sources.get(self._rank, {})
        regions = [(name, region) for name, shard in mine.items() for region in shard.regions if region.hf_name + SUFFIX in shards]
        return BlockScales(shards, regions, self._device)

    def _move(self, moves: _Moves, copy: Copy, to: Tensor) -> None:
        """Adds what a copy's source amounts to in the target's dtype."""
        from_ = view(self._sources[copy.src_name], copy.src_box)
        if self._scales and self._plan.formats.get(copy.dst_name) == FP8:
            shard = self._plan.sources[self._rank][copy.src_name]
            moves.quantise(self._scales, from_, *to_hf(shard, copy.src_box, copy.src_name), to)
        else:
            moves.copy(to, from_)

    def _written(self, copy: Copy) -> Tensor:
        """What a copy of this rank's writes to its target."""
        shape = [stop - start for start, stop in copy.dst_box]
        out = torch.empty(shape, dtype=self._target_dtype(copy.dst_name), device=self._device)
        moves = _Moves()
        self._move(moves, copy, out)
        moves.run()
        return out

    def _target_dtype(self, name: str) -> torch.dtype:
        return FORMAT_DTYPES[self._plan.formats[name]] if name in self._plan.formats else self._dtype

    def _exchange(self, index: int, bound: _Bound) -> None:
        sends = [(peer, dist.P2POp(dist.isend, wire, peer, self._group)) for peer, wire in bound.send_wire]
        receives = [(peer, dist.P2POp(dist.irecv, wire, peer, self._group)) for peer, wire in bound.receive_wire]
        if not sends and not receives:
            return
        peers = sorted({peer for peer, _ in (*sends, *receives)})
        try:
            for work in dist.batch_isend_irecv([op for _, op in (*sends, *receives)]):
                work.wait()
        except RuntimeError as error:
            where = f"weight transfer, round {index + 1} of {len(self._bound)}"
            raise WaitTimeout(f"{where}: rank {self._rank} waited in vain for one of the ranks {peers} ({error})") from error

    def _bind(self) -> None:
        """Turns boxes into views of the tensors, unless they still lie where they lay at the last run."""
        addresses = tuple(tensor.data_ptr() for tensors in (self._weights, self._targets) for tensor in tensors.values())
        packed = self._staging.take()
        if addresses == self._addresses and packed is self._packed:
            return
        self._here = _Moves()
        for copy in self._local:
            self._move(self._here, copy, view(self._targets[copy.dst_name], copy.dst_box))
        shards = self._plan.targets.get(self._rank, {})
        self._padding = [view(self._targets[name], box) for name, shard in shards.items() for box in shard.padding]
        self._bound = [self._bind_round(round_, packed) for round_ in self._rounds]
        self._packed, self._addresses = packed, addresses

    def _bind_round(self, round_: Round, staging: Tensor) -> _Bound:
        bound = _Bound()
        offset = 0
        for messages, wires in ((round_.sends, bound.send_wire), (round_.receives, bound.receive_wire)):
            for message in messages.values():
                wires.append((message.peer, staging[offset : offset + message.size]))
                for piece in message.pieces:
                    dtype = self._target_dtype(piece.dst_name)
                    nbytes = piece.size * dtype.itemsize
                    packed = staging[offset : offset + nbytes].view(dtype).view([stop - start for start, stop in piece.dst_box])
                    if messages is round_.sends and round_.relays:
                        bound.pack.copy(packed, view(self._targets[piece.src_name], piece.src_box))
                    elif messages is round_.sends:
                        self._move(bound.pack, piece, packed)
                    else:
                        bound.unpack.copy(view(self._targets[piece.dst_name], piece.dst_box), packed)
                    offset += staged(nbytes)
        return bound

    def _check(self) -> None:
        """ValueError if the tensors are not those of the plan: a wrong name or shape must not be found half-way."""
        for what, tensors, shards in (
            ("source", self._sources, {n: s for n, s in self._plan.sources.get(self._rank, {}).items() if not n.endswith(SUFFIX)}),
            ("target", self._targets, self._plan.targets.get(self._rank, {})),
        ):
            for name, shard in shards.items():
                if name not in tensors or tuple(tensors[name].shape) != shard.shape:
                    found = tuple(tensors[name].shape) if name in tensors else "nothing"
                    raise ValueError(f"rank {self._rank}: {what} tensor {name}: the plan expects {shard.shape}, there is {found}")
                if what == "target" and tensors[name].dtype != self._target_dtype(name):
                    raise ValueError(f"rank {self._rank}: target tensor {name} is {tensors[name].dtype}, not {self._target_dtype(name)}")
