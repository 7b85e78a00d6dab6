"""Collectives outside Megatron."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.errors import MegarlError, MessageError
from megarl.parallel.objects import decode, encode
from megarl.parallel.runtime import Ranks, Runtime
from megarl.parallel.secret import SIZE, sign, verify

T = TypeVar("T")
LONGEST = 2**33  # bytes of a message
INLINE = 512  # bytes sent with the length
_TAG = 7  # of no other point-to-point message
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of the next message


def gather_objects(ranks: Ranks, value: T, kind: Any) -> list[T]:
    """Return every rank's `value`, by rank, on every rank. For small objects, over gloo.

    They go through rank 0, as an all-gather sends ranks^2 padded messages."""
    group = ranks.cpu_group
    blobs = _collect(group, encode(value))
    message = None
    if blobs is not None:
        index_by_blob: dict[bytes, int] = {}
        indices = [index_by_blob.setdefault(blob, len(index_by_blob)) for blob in blobs]
        message = encode(([*index_by_blob], indices))
    distinct_blobs, indices = decode(_spread(group, message), tuple[list[bytes], list[int]], "rank 0")
    return [decode(distinct_blobs[index], kind, f"rank {rank}") for rank, index in enumerate(indices)]


def gather_to_rank_0(ranks: Ranks, value: T, kind: Any) -> list[T] | None:
    """Return every rank's `value`, by rank, on rank 0; else None."""
    blobs = _collect(ranks.cpu_group, encode(value))
    if blobs is None:
        return None
    return [decode(blob, kind, f"rank {rank}") for rank, blob in enumerate(blobs)]


def gather_shares_to_rank_0(ranks: Ranks, share: T, kind: Any) -> list[T] | None:
    """Gather like `gather_to_rank_0`, without copying rank 0's share."""
    shares = gather_to_rank_0(ranks, share if ranks.rank else None, kind | None)
    return None if shares is None else [share, *cast(list[T], shares[1:])]


def broadcast_from_rank_0(ranks: Ranks, value: T, kind: Any) -> T:
    blob = _spread(ranks.cpu_group, encode(value) if ranks.rank == 0 else None)
    return cast(T, decode(blob, kind, "rank 0"))


def run_on_rank_0(ranks: Ranks, action: Callable[[], T], kind: Any = NoneType) -> T:
    """Return rank 0's result of `action` on every rank. All ranks raise its MegarlError."""
    result, failure = None, None
    if ranks.rank == 0:
        try:
            result = action()
        except MegarlError as error:
            failure = error
    outcome_type = tuple[kind | None, MegarlError | None]
    result, failure = broadcast_from_rank_0(ranks, (result, failure), outcome_type)
    if failure is not None:
        raise failure
    return cast(T, result)


def exchange(ranks: Ranks, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> dict[int, Tensor]:
    """Exchange bytes (uint8) with some ranks, which must all call this in the same order.

    outgoing  rank -> bytes to send; empty ones are not sent
    incoming  rank -> number of bytes that it sends"""
    received = {rank: torch.empty(size, dtype=torch.uint8) for rank, size in incoming.items()}
    group, works = ranks.cpu_group, []
    for rank, tensor in received.items():
        if tensor.numel():
            works.append(dist.irecv(tensor, group=group, tag=_TAG, group_src=rank))
    for rank, tensor in outgoing.items():
        if tensor.numel():
            works.append(dist.isend(tensor, group=group, tag=_TAG, group_dst=rank))
    for work in works:
        assert work is not None
        work.wait()
    return received


def _collect(group: dist.ProcessGroup, blob: bytes) -> list[bytes] | None:
    """Return all bytes on rank 0: gather heads, then receive the remaining bytes of long messages."""
    world = dist.get_world_size(group)
    if world == 1:
        return [blob]
    this_rank, number = group.rank(), _next_number(group)  # torch's get_rank is wrong for the job's group
    head = _head(blob, "gather", this_rank, number)
    heads = [torch.empty_like(head) for _ in range(world)] if this_rank == 0 else None
    dist.gather(head, heads, group=group, group_dst=0)
    if heads is None:
        if len(blob) > INLINE:
            dist.send(_tensor(blob[INLINE:]), group=group, tag=_TAG, group_dst=0)
        return None
    blobs = [blob]
    for rank, head in enumerate(heads[1:], 1):
        signature, message, num_left = _read_head(head, rank)
        if num_left:
            tail = torch.empty(num_left, dtype=torch.uint8)
            dist.recv(tail, group=group, tag=_TAG, group_src=rank)
            message += tail.numpy().tobytes()
        verify(signature, f"a message of rank {rank}", "gather", rank, number, message)
        blobs.append(message)
    return blobs


def _spread(group: dist.ProcessGroup, blob: bytes | None) -> bytes:
    if dist.get_world_size(group) == 1:
        assert blob is not None
        return blob
    number = _next_number(group)
    if blob is None:
        head = torch.empty(8 + SIZE + INLINE, dtype=torch.uint8)
    else:
        head = _head(blob, "broadcast", 0, number)
    dist.broadcast(head, group=group, group_src=0)
    signature, message, num_left = _read_head(head, 0)
    if num_left:
        tail = torch.empty(num_left, dtype=torch.uint8) if blob is None else _tensor(blob[INLINE:])
        dist.broadcast(tail, group=group, group_src=0)
        message += tail.numpy().tobytes()
    if blob is None:
        verify(signature, "a message of rank 0", "broadcast", 0, number, message)
    return message


def _next_number(group: dist.ProcessGroup) -> int:
    """Return a group's next message number, against replayed messages."""
    number = _numbers.get(group, 0)
    _numbers[group] = number + 1
    return number


def _head(blob: bytes, kind: str, rank: int, number: int) -> Tensor:
    """Return length, signature and first bytes of a message, uint8 [8 + SIZE + INLINE]."""
    signature = sign(kind, rank, number, blob)
    return _tensor(len(blob).to_bytes(8, "little") + signature + blob[:INLINE].ljust(INLINE, b"\0"))


def _read_head(head: Tensor, rank: int) -> tuple[bytes, bytes, int]:
    """Return signature, first bytes, and number of bytes to come."""
    data = head.numpy().tobytes()
    length, first_bytes = int.from_bytes(data[:8], "little"), data[8 + SIZE :]
    if length > LONGEST:
        raise MessageError(f"a message of rank {rank}: {length} bytes, the longest has {LONGEST}")
    return data[8 : 8 + SIZE], first_bytes[: min(length, INLINE)], max(0, length - INLINE)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def sum_stats(runtime: Runtime, sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Sum statistics over replicas, each counted once, in rank order."""
    local_sums = {k: float(v) for k, v in sums.items()} if runtime.is_replica_leader else {}
    totals: dict[str, float] = {}
    for rank_sums in gather_objects(runtime, local_sums, dict[str, float]):
        for key, value in rank_sums.items():
            totals[key] = totals.get(key, 0.0) + value
    return totals


def sum_over_replicas(runtime: Runtime, sums: Tensor) -> Tensor:
    """Return the float64 sum over replicas, each counted once, on every rank."""
    total = sums.to("cpu", torch.float64, copy=True)
    if runtime.world > 1:
        dist.all_reduce(total if runtime.is_replica_leader else total.zero_(), group=runtime.cpu_group)
    return total


def find_among_largest(runtime: Runtime, first: Tensor, then: Tensor, wanted: int) -> Tensor:
    """Return which entries of this replica are among the `wanted` largest of all, bool [m].

    They are sorted by `first`, then `then`: [m], the same on every rank of a replica."""
    keys = np.stack([first.double().numpy(), then.double().numpy()])
    candidates = keys[:, np.lexsort(keys[::-1])[::-1][:wanted]]
    if runtime.world > 1:
        local_candidates = candidates if runtime.is_replica_leader else candidates[:, :0].copy()
        candidates = np.concatenate(gather_objects(runtime, local_candidates, np.ndarray), axis=1)
    largest = candidates[:, np.lexsort(candidates[::-1])[::-1][:wanted]]
    if not largest.size:
        return torch.zeros(first.shape, dtype=torch.bool)
    (least_first, least_then), (first_keys, then_keys) = largest[:, -1], keys
    return torch.from_numpy(
        (first_keys > least_first) | (first_keys == least_first) & (then_keys >= least_then)
    )


def find_among_smallest(runtime: Runtime, keys: Tensor, wanted: int) -> Tensor:
    """Return which keys of this replica are among the `wanted` smallest of all, bool [m].

    keys: int32 [m], not negative, too many to gather: a bisection sums once per bit"""
    bounds = range(torch.iinfo(keys.dtype).max)
    bound = bisect_right(bounds, wanted, key=lambda x: int(sum_over_replicas(runtime, (keys < x).sum()))) - 1
    return keys < bound


def sum_over_ranks(ranks: Ranks, counts: Tensor) -> Tensor:
    if ranks.world > 1:
        dist.all_reduce(counts, group=ranks.cpu_group)
    return counts


def max_over_ranks(ranks: Ranks, value: float) -> float:
    return max(gather_objects(ranks, float(value), float))


def broadcast_from_last_stage(
    columns: dict[str, Tensor] | None, names: Sequence[str], entries: int, runtime: Runtime
) -> dict[str, Tensor]:
    """Return the last stage's float32 columns [entries] on every stage's host."""
    if runtime.layout.pp == 1:
        assert columns is not None
        return columns
    from megatron.core import parallel_state

    if columns is None:
        stacked = torch.empty(len(names), entries, dtype=torch.float32, device=runtime.device)
    else:
        stacked = torch.stack([columns[name].to(runtime.device, torch.float32) for name in names])
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(stacked, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return dict(zip(names, stacked.cpu(), strict=True))


def any_flags(ranks: Ranks, flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether any rank has it set."""
    if ranks.world == 1:
        return list(flags)
    cells = torch.tensor(flags, dtype=torch.uint8)
    gathered = [torch.empty_like(cells) for _ in range(ranks.world)] if ranks.rank == 0 else None
    dist.gather(cells, gathered, group=ranks.cpu_group, group_dst=0)
    if gathered is not None:
        cells = torch.stack(gathered).amax(0)
    dist.broadcast(cells, group=ranks.cpu_group, group_src=0)
    return [bool(cell) for cell in cells]


def any_rank(ranks: Ranks, flag: bool) -> bool:
    return any_flags(ranks, (flag,))[0]


def barrier(ranks: Ranks) -> None:
    """Wait for all ranks, at most `parallel.timeout`."""
    any_rank(ranks, False)
