"""Carrying out a plan: point-to-point messages in rounds of bounded staging memory, over gloo or NCCL. The hot path is `Transfer.run`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.errors import WaitTimeout
from megarl.weights.hf_io import view
from megarl.weights.layout import Box
from megarl.weights.plan import Copy, Plan, Traffic


@dataclass(frozen=True)
class TransferStats:
    """What one run did on this rank: bytes sent to and received from other ranks, bytes copied on the rank itself, seconds."""

    bytes_sent: int
    bytes_received: int
    bytes_local: int
    seconds: float


@dataclass
class _Message:
    """What one pair of ranks exchanges in one round: pieces one after the other in `staging`."""

    peer: int
    pieces: list[Copy] = field(default_factory=list)
    size: int = 0  # elements

    def add(self, piece: Copy) -> None:
        self.pieces.append(piece)
        self.size += piece.size


@dataclass
class _Round:
    """Messages of this rank that are in flight together; `size` is the staging memory that they need, in elements."""

    sends: dict[int, _Message] = field(default_factory=dict)
    receives: dict[int, _Message] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(message.size for message in (*self.sends.values(), *self.receives.values()))


@dataclass
class _Bound:
    """A round whose boxes have become views of real tensors. Lists of equal length; `wire` are (peer, bytes) of whole messages."""

    packed: list[Tensor]
    pack_from: list[Tensor]
    received: list[Tensor]
    unpack_to: list[Tensor]
    send_wire: list[tuple[int, Tensor]]
    receive_wire: list[tuple[int, Tensor]]


class Transfer:
    """A plan bound to this rank's tensors, to be run as often as the weights change.

    `dtype` is the dtype of every target tensor, by default that of this rank's (a rank without targets must be told); sources of
    another dtype are converted before they are sent, so that no more bytes travel than the target needs. `bucket_bytes` bounds the
    staging memory of a rank, sends and receives together. Every rank of the plan constructs and runs its own Transfer; ranks that the
    plan does not name may do so too. All tensors of a rank are on one device. If the memory of a tensor moves between runs
    (offloading), the next run notices. `group` is the process group of the messages, by default the whole job's; on NCCL it must have
    been used once by all its ranks. ValueError if names, shapes or dtypes of the tensors are not the plan's.
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
    ) -> None:
        if dtype is None:
            if not target_tensors:
                raise ValueError(f"rank {rank} has no target tensors: the dtype of the others' must be given")
            dtype = next(iter(target_tensors.values())).dtype
        self._rank, self._dtype, self._group = rank, dtype, group
        self._sources, self._targets = source_tensors, target_tensors
        self._check(plan)
        self._local = [copy for copy in plan.copies if copy.src_rank == copy.dst_rank == rank]
        self._padding = [(name, box) for name, shard in plan.targets.get(rank, {}).items() for box in shard.padding]
        self._rounds = _rounds(plan.copies, rank, max(1, bucket_bytes // dtype.itemsize))
        self._staging_size = max((round_.size for round_ in self._rounds), default=0)
        self._staging: Tensor | None = None
        self._addresses: tuple[int, ...] | None = None
        self._bound: list[_Bound] = []
        self._here: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        self._traffic = plan.summary(dtype.itemsize).get(rank, Traffic(0, 0, 0))

    @property
    def staging_bytes(self) -> int:
        """Staging memory of this rank: at most `bucket_bytes`, and no more than the largest round needs."""
        return self._staging_size * self._dtype.itemsize

    @torch.no_grad()
    def run(self) -> TransferStats:
        """Writes this rank's part of every target. WaitTimeout if a peer does not answer within the process group's limit."""
        start = time.perf_counter()
        self._bind()
        to, from_, padding = self._here
        if padding:
            torch._foreach_zero_(padding)
        if to:
            torch._foreach_copy_(to, from_)
        for index, bound in enumerate(self._bound):
            if bound.packed:
                torch._foreach_copy_(bound.packed, bound.pack_from)
            self._exchange(index, bound)
            if bound.received:
                torch._foreach_copy_(bound.unpack_to, bound.received)
        if self._staging is not None and self._staging.is_cuda:
            torch.cuda.synchronize(self._staging.device)
        return TransferStats(*self._traffic, seconds=time.perf_counter() - start)

    def release(self) -> None:
        """Gives the staging memory back; the next run takes it again."""
        self._staging, self._addresses, self._bound = None, None, []

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
        addresses = tuple(tensor.data_ptr() for tensors in (self._sources, self._targets) for tensor in tensors.values())
        if addresses == self._addresses:
            return
        if self._staging is None:
            device = next((t.device for tensors in (self._sources, self._targets) for t in tensors.values()), torch.device("cpu"))
            self._staging = torch.empty(self._staging_size, dtype=self._dtype, device=device)
        self._here = (
            [view(self._targets[copy.dst_name], copy.dst_box) for copy in self._local],
            [view(self._sources[copy.src_name], copy.src_box) for copy in self._local],
            [view(self._targets[name], box) for name, box in self._padding],
        )
        self._bound = [self._bind_round(round_, self._staging) for round_ in self._rounds]
        self._addresses = addresses

    def _bind_round(self, round_: _Round, staging: Tensor) -> _Bound:
        bound = _Bound([], [], [], [], [], [])
        offset = 0
        for messages, staged, wires in (
            (round_.sends, bound.packed, bound.send_wire),
            (round_.receives, bound.received, bound.receive_wire),
        ):
            for message in messages.values():
                wires.append((message.peer, staging[offset : offset + message.size].view(torch.uint8)))
                for piece in message.pieces:
                    shape = [stop - start for start, stop in piece.dst_box]
                    staged.append(staging[offset : offset + piece.size].view(shape))
                    offset += piece.size
        bound.pack_from = [view(self._sources[p.src_name], p.src_box) for m in round_.sends.values() for p in m.pieces]
        bound.unpack_to = [view(self._targets[p.dst_name], p.dst_box) for m in round_.receives.values() for p in m.pieces]
        return bound

    def _check(self, plan: Plan) -> None:
        """ValueError if the tensors are not those of the plan: a wrong name or shape must not be found half-way."""
        for what, tensors, shards in (
            ("source", self._sources, plan.sources.get(self._rank, {})),
            ("target", self._targets, plan.targets.get(self._rank, {})),
        ):
            for name, shard in shards.items():
                if name not in tensors or tuple(tensors[name].shape) != shard.shape:
                    found = tuple(tensors[name].shape) if name in tensors else "nothing"
                    raise ValueError(f"rank {self._rank}: {what} tensor {name}: the plan expects {shard.shape}, there is {found}")
                if what == "target" and tensors[name].dtype != self._dtype:
                    raise ValueError(f"rank {self._rank}: target tensor {name} is {tensors[name].dtype}, not {self._dtype}")


def _rounds(copies: Iterable[Copy], rank: int, limit: int) -> list[_Round]:
    """This rank's rounds. Every rank goes through the whole plan in the same way, so that both ends of a message agree on its round,
    order and size; no rank stages more than `limit` elements in a round.

    A piece goes into the first round in which both ends have room after their earlier pieces; rounds of a rank are worked off in
    order and a round waits only for ranks that are in it, so the lowest unfinished round can always be finished: no deadlock.
    """
    place: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))  # rank -> (its current round, elements in it)
    rounds: dict[int, _Round] = defaultdict(_Round)
    for copy in copies:
        source, target = copy.src_rank, copy.dst_rank
        if source == target:
            continue
        for piece in split(copy, limit):
            size = piece.size
            number = max(place[source][0], place[target][0])
            used = {end: place[end][1] if place[end][0] == number else 0 for end in (source, target)}
            if max(used.values()) + size > limit:
                number, used = number + 1, {source: 0, target: 0}
            place[source] = (number, used[source] + size)
            place[target] = (number, used[target] + size)
            if source == rank:
                rounds[number].sends.setdefault(target, _Message(target)).add(piece)
            elif target == rank:
                rounds[number].receives.setdefault(source, _Message(source)).add(piece)
    return [rounds[number] for number in sorted(rounds)]


def split(copy: Copy, limit: int) -> Iterator[Copy]:
    """Cuts a copy into pieces of at most `limit` elements (at least one), by rows as far as rows are small enough."""
    if copy.size <= limit:
        yield copy
        return
    axis = next(axis for axis, (start, stop) in enumerate(copy.dst_box) if stop - start > 1)
    length = copy.dst_box[axis][1] - copy.dst_box[axis][0]
    per_piece = max(1, limit // (copy.size // length))
    for first in range(0, length, per_piece):
        last = min(first + per_piece, length)
        src_box, dst_box = (_cut(box, axis, first, last) for box in (copy.src_box, copy.dst_box))
        yield from split(copy._replace(src_box=src_box, dst_box=dst_box), limit)


def _cut(box: Box, axis: int, first: int, last: int) -> Box:
    start = box[axis][0]
    return (*box[:axis], (start + first, start + last), *box[axis + 1 :])
