"""The tokens of a step's batch, from the ranks that drew them to the replicas that train on them, once.

Each owner sends what a replica is to have to one of its ranks, every time the same one, different owners to
different ones; the ranks of a replica then pass these pieces round in a ring. So a rank receives its
replica's share and nothing else, an owner sends what it drew once, and no rank sends more than what it drew
and its share together, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.parallel.comm import exchange
from megarl.parallel.runtime import Ranks

WHOLE = ("routing",)  # columns of the prompt's tokens too; the others are 0 there
MASK = "response_mask"


def deliver(
    ranks: Ranks, batch: RolloutBatch, shares: Sequence[Sequence[int]], replicas: Sequence[Sequence[int]]
) -> TrainBatch:
    """Return the sequences `shares[d]` of a batch, in that order and with all columns, on each of the ranks
    `replicas[d]`, which are of `ranks` as the batch's owners are; elsewhere no sequence. Owners and receivers
    call this alike, with the same shares and replicas."""
    assert batch.owners is not None
    kinds = [(name, c.dtype, tuple(c.shape[1:])) for name, c in _sent(batch).items()]
    sizes = row_bytes(batch).tolist()
    owner_of = batch.owners.tolist()
    number = {owner: i for i, owner in enumerate(sorted(set(owner_of)))}
    place = {row: i for i, row in enumerate(batch.rows.tolist())}
    mine = next((d for d, members in enumerate(replicas) if ranks.rank in members), None)
    here = replicas[mine].index(ranks.rank) if mine is not None else 0

    outgoing: dict[int, Tensor] = {}
    held: dict[int, Tensor] = {}  # by owner: first what need not be sent
    for share, members in zip(shares, replicas, strict=True):
        if rows := [row for row in share if owner_of[row] == ranks.rank]:
            entry = members[number[ranks.rank] % len(members)]
            kept = held if entry == ranks.rank else outgoing
            kept[entry] = _encode(batch, [place[row] for row in rows])
    if mine is None:
        exchange(ranks, outgoing, {})
        return _decode(batch, [], {}, kinds)

    share, ring = shares[mine], replicas[mine]
    # pieces[i]: rows that come to the i-th rank of the replica, owner after owner.
    pieces: list[list[int]] = [[] for _ in ring]
    for row in sorted(
        share, key=lambda row: owner_of[row]
    ):  # stable: an owner's rows are in the share's order
        pieces[number[owner_of[row]] % len(ring)].append(row)
    incoming: dict[int, int] = {}
    for row in pieces[here]:
        incoming[owner_of[row]] = incoming.get(owner_of[row], 0) + sizes[row]
    owners = sorted(incoming)
    incoming.pop(ranks.rank, None)
    held |= exchange(ranks, outgoing, incoming)
    blobs = {here: _joined([held[owner] for owner in owners])}
    after, before = ring[(here + 1) % len(ring)], ring[here - 1]
    for turn in range(1, len(ring)):
        passed, wanted = (here - turn + 1) % len(ring), (here - turn) % len(ring)
        size = sum(sizes[row] for row in pieces[wanted])
        blobs[wanted] = exchange(ranks, {after: blobs[passed]}, {before: size})[before]
    found: dict[int, np.ndarray] = {}
    for i, rows in enumerate(pieces):
        at, data = 0, blobs[i].numpy()
        for row in rows:
            found[row] = data[at : at + sizes[row]]
            at += sizes[row]
    return _decode(batch, share, found, kinds)


def row_bytes(batch: RolloutBatch) -> Tensor:
    """Return the bytes of each sequence on its way, int64 [n]: its tokens as int32, and what is said of each
    of them."""
    sizes = 4 * batch.lengths
    for name, column in _sent(batch).items():
        entry = column.element_size() * int(np.prod(column.shape[1:], dtype=np.int64))
        sizes = sizes + entry * (batch.lengths - (0 if name in WHOLE else batch.prompt_lengths))
    return sizes


def _sent(batch: RolloutBatch) -> dict[str, Tensor]:
    """Return the columns [T] that are sent, the same on every rank: the mask only where it does not follow
    from the lengths."""
    return batch.own.columns | ({MASK: batch.own.response_mask} if batch.has_observations else {})


def _encode(batch: RolloutBatch, places: Sequence[int]) -> Tensor:
    """Return sequences that lie here as bytes, each its tokens (int32) and then its columns."""
    own, columns, parts = batch.own, _sent(batch), []
    starts, prompts = own.cu_seqlens.tolist(), batch.prompt_lengths[batch.rows].tolist()
    for place in places:
        start, end = starts[place : place + 2]
        parts.append(own.tokens[start:end].to(torch.int32))
        for name, column in columns.items():
            parts.append(column[start if name in WHOLE else start + prompts[place] : end])
    return _joined([part.contiguous().flatten().view(torch.uint8) for part in parts])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts]) if parts else torch.empty(0, dtype=torch.uint8)


def _decode(
    batch: RolloutBatch,
    rows: Sequence[int],
    found: dict[int, np.ndarray],
    kinds: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
) -> TrainBatch:
    """Undo `_encode` for the bytes of each of `rows`, and pack them in this order, with the columns [n]."""
    index = torch.tensor(rows, dtype=torch.int64)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), batch.lengths[index].cumsum(0)])
    total = int(cu_seqlens[-1])
    tokens, mask = torch.empty(total, dtype=torch.int64), torch.zeros(total, dtype=torch.bool)
    columns = {name: torch.zeros((total, *shape), dtype=kind) for name, kind, shape in kinds}
    starts, prompts = cu_seqlens.tolist(), batch.prompt_lengths[index].tolist()
    for row, start, end, prompt in zip(rows, starts, starts[1:], prompts, strict=False):
        mask[start + prompt : end] = True
        data, at = found[row], 4 * (end - start)
        tokens[start:end] = torch.from_numpy(data[:at].view(np.int32).astype(np.int64))
        for name, column in columns.items():
            part = column[start if name in WHOLE else start + prompt : end]
            size = part.numel() * part.element_size()
            part.view(-1).view(torch.uint8).copy_(torch.from_numpy(data[at : at + size]))
            at += size
    mask = columns.pop(MASK, mask)
    columns |= {name: column[index] for name, column in batch.columns.items()}
    return TrainBatch(tokens, cu_seqlens, mask, columns)
