"""A plan's copies as rounds of messages whose staging memory is bounded: the same on every rank, from the plan alone, without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from megarl.weights.formats import format_bytes
from megarl.weights.layout import Box
from megarl.weights.plan import Copy, Plan

ALIGN = 16  # pieces begin at multiples of this many bytes, so that each can be viewed as its dtype


def staged(size: int) -> int:
    """Staging memory of a piece of `size` bytes."""
    return -(-size // ALIGN) * ALIGN


@dataclass
class Message:
    """What one pair of ranks exchanges in one round: pieces one after the other in `size` bytes of staging memory."""

    peer: int
    pieces: list[Copy] = field(default_factory=list)
    size: int = 0

    def add(self, piece: Copy, size: int) -> None:
        self.pieces.append(piece)
        self.size += size


@dataclass
class Round:
    """Messages of one rank that are in flight together; `size` is the staging memory that they need, in bytes. `relays`: whether their
    bytes are sent from target tensors."""

    relays: bool
    sends: dict[int, Message] = field(default_factory=dict)
    receives: dict[int, Message] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(message.size for message in (*self.sends.values(), *self.receives.values()))


class Placed(NamedTuple):
    """A piece of a copy between two ranks, its round, and its staging memory at each end in bytes."""

    number: int
    piece: Copy
    size: int
    relayed: bool


def placed(plan: Plan, itemsize: int, bucket_bytes: int) -> Iterator[Placed]:
    """Every piece that travels, with its round; no rank stages more than `bucket_bytes` (but at least one element) in a round, half of it
    for what it sends and half for what it receives, as both happen at once.

    Every rank goes through the whole plan in the same way, so that both ends of a message agree on its round, order and size. A piece
    goes into the first round in which both ends have room after their earlier pieces; rounds of a rank are worked off in order and a
    round waits only for ranks that are in it, so the lowest unfinished round can always be finished: no deadlock.
    """
    limit = max(ALIGN, bucket_bytes // 2 // ALIGN * ALIGN)
    first = 0
    for relayed, copies in ((False, plan.copies), (True, plan.relays)):
        # (Rank, whether it sends) -> (the last round in which it does, bytes of it). What is passed on came in an earlier round.
        last: dict[tuple[int, bool], tuple[int, int]] = defaultdict(lambda first=first: (first, 0))  # type: ignore[misc]
        for copy in copies:
            if copy.src_rank == copy.dst_rank:
                continue
            source, target = (copy.src_rank, True), (copy.dst_rank, False)
            width = format_bytes(plan.formats, copy.dst_name, itemsize)
            for piece in split(copy, limit // width):
                size = staged(piece.size * width)
                number = max(last[source][0], last[target][0])
                used = [last[end][1] if last[end][0] == number else 0 for end in (source, target)]
                if max(used) + size > limit:
                    number, used = number + 1, [0, 0]
                last[source], last[target] = (number, used[0] + size), (number, used[1] + size)
                yield Placed(number, piece, size, relayed)
        first = max((number for number, _ in last.values()), default=first - 1) + 1


def rounds_of(plan: Plan, rank: int, itemsize: int, bucket_bytes: int) -> list[Round]:
    """One rank's rounds, in order."""
    rounds: dict[int, Round] = {}
    for number, piece, size, relayed in placed(plan, itemsize, bucket_bytes):
        if rank not in (piece.src_rank, piece.dst_rank):
            continue
        round_ = rounds.setdefault(number, Round(relayed))
        if piece.src_rank == rank:
            round_.sends.setdefault(piece.dst_rank, Message(piece.dst_rank)).add(piece, size)
        else:
            round_.receives.setdefault(piece.src_rank, Message(piece.src_rank)).add(piece, size)
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
