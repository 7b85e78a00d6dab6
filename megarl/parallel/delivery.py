"""Send a step's tokens from the ranks that sampled them to the replicas that train on them.

An owner sends a replica's share to one of its ranks, which pass pieces around in a ring. So a rank sends at
most its own tokens plus that share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.parallel.comm import exchange
from megarl.parallel.runtime import Ranks

WITH_PROMPT = ("routing",)  # columns that include the prompt
MASK = "response_mask"


def deliver(
    ranks: Ranks, batch: RolloutBatch, shares: Sequence[Sequence[int]], replicas: Sequence[Sequence[int]]
) -> TrainBatch:
    """Return the sequences `shares[d]`, in that order, on the ranks `replicas[d]`; none on other ranks.

    All owners and receivers must call this with the same shares and replicas, numbered as in `ranks`."""
    assert batch.owners is not None
    kinds = [(name, c.dtype, tuple(c.shape[1:])) for name, c in _sent_columns(batch).items()]
    sizes = row_bytes(batch).tolist()
    owners = batch.owners.tolist()
    owner_index = {owner: i for i, owner in enumerate(sorted(set(owners)))}
    local_index = {row: i for i, row in enumerate(batch.rows.tolist())}
    replica = next((d for d, members in enumerate(replicas) if ranks.rank in members), None)

    outgoing: dict[int, Tensor] = {}
    received: dict[int, Tensor] = {}  # by owner
    for share, members in zip(shares, replicas, strict=True):
        if rows := [row for row in share if owners[row] == ranks.rank]:
            entry_rank = members[owner_index[ranks.rank] % len(members)]
            messages = received if entry_rank == ranks.rank else outgoing
            messages[entry_rank] = _encode(batch, [local_index[row] for row in rows])
    if replica is None:
        exchange(ranks, outgoing, {})
        return _decode(batch, [], {}, kinds)

    share, ring = shares[replica], replicas[replica]
    # pieces[i]: rows of the replica's i-th rank.
    pieces: list[list[int]] = [[] for _ in ring]
    for row in sorted(share, key=lambda row: owners[row]):  # stable: keeps an owner's order
        pieces[owner_index[owners[row]] % len(ring)].append(row)
    incoming: dict[int, int] = {}
    for row in pieces[ring.index(ranks.rank)]:
        incoming[owners[row]] = incoming.get(owners[row], 0) + sizes[row]
    senders = sorted(incoming)
    incoming.pop(ranks.rank, None)
    received |= exchange(ranks, outgoing, incoming)
    blob = _concatenate([received[owner] for owner in senders])
    blobs = _pass_around(ranks, ring, blob, [sum(sizes[row] for row in rows) for rows in pieces])
    data_by_row: dict[int, np.ndarray] = {}
    for i, rows in enumerate(pieces):
        offset, data = 0, blobs[i].numpy()
        for row in rows:
            data_by_row[row] = data[offset : offset + sizes[row]]
            offset += sizes[row]
    return _decode(batch, share, data_by_row, kinds)


def _pass_around(ranks: Ranks, ring: Sequence[int], blob: Tensor, sizes: Sequence[int]) -> dict[int, Tensor]:
    """Return every rank's blob by its index in the ring. sizes: bytes of each

    In each step a rank sends the blob that it received last to the next rank."""
    index = ring.index(ranks.rank)
    blobs = {index: blob}
    receiver, sender = ring[(index + 1) % len(ring)], ring[index - 1]
    for step in range(1, len(ring)):
        send_index, receive_index = (index - step + 1) % len(ring), (index - step) % len(ring)
        outgoing, incoming = {receiver: blobs[send_index]}, {sender: sizes[receive_index]}
        blobs[receive_index] = exchange(ranks, outgoing, incoming)[sender]
    return blobs


def row_bytes(batch: RolloutBatch) -> Tensor:
    """Return encoded bytes per sequence, int64 [n]."""
    sizes = 4 * batch.lengths
    for name, column in _sent_columns(batch).items():
        token_bytes = column.element_size() * int(np.prod(column.shape[1:], dtype=np.int64))
        sizes = sizes + token_bytes * (batch.lengths - (0 if name in WITH_PROMPT else batch.prompt_lengths))
    return sizes


def _sent_columns(batch: RolloutBatch) -> dict[str, Tensor]:
    """Return the columns to send; the mask only if lengths do not imply it."""
    return batch.local.columns | ({MASK: batch.local.response_mask} if batch.has_observations else {})


def _encode(batch: RolloutBatch, indices: Sequence[int]) -> Tensor:
    """Encode this rank's sequences `indices`: of each its tokens (int32), then columns."""
    local, columns, parts = batch.local, _sent_columns(batch), []
    starts, prompt_lengths = local.cu_seqlens.tolist(), batch.prompt_lengths[batch.rows].tolist()
    for index in indices:
        start, end = starts[index : index + 2]
        parts.append(local.tokens[start:end].to(torch.int32))
        for name, column in columns.items():
            parts.append(column[start if name in WITH_PROMPT else start + prompt_lengths[index] : end])
    return _concatenate([part.contiguous().flatten().view(torch.uint8) for part in parts])


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts]) if parts else torch.empty(0, dtype=torch.uint8)


def _decode(
    batch: RolloutBatch,
    rows: Sequence[int],
    data_by_row: dict[int, np.ndarray],
    kinds: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
) -> TrainBatch:
    """Decode and pack the sequences of `rows`, in this order."""
    index = torch.tensor(rows, dtype=torch.int64)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), batch.lengths[index].cumsum(0)])
    num_tokens = int(cu_seqlens[-1])
    tokens, mask = torch.empty(num_tokens, dtype=torch.int64), torch.zeros(num_tokens, dtype=torch.bool)
    columns = {name: torch.zeros((num_tokens, *shape), dtype=dtype) for name, dtype, shape in kinds}
    starts, prompt_lengths = cu_seqlens.tolist(), batch.prompt_lengths[index].tolist()
    for row, start, end, prompt_length in zip(rows, starts, starts[1:], prompt_lengths, strict=False):
        mask[start + prompt_length : end] = True
        data, offset = data_by_row[row], 4 * (end - start)
        tokens[start:end] = torch.from_numpy(data[:offset].view(np.int32).astype(np.int64))
        for name, column in columns.items():
            values = column[start if name in WITH_PROMPT else start + prompt_length : end]
            size = values.numel() * values.element_size()
            values.view(-1).view(torch.uint8).copy_(torch.from_numpy(data[offset : offset + size]))
            offset += size
    mask = columns.pop(MASK, mask)
    columns |= {name: column[index] for name, column in batch.columns.items()}
    return TrainBatch(tokens, cu_seqlens, mask, columns)
