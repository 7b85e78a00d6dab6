"""Which sequences share a micro-batch and which rank takes them: plans from lengths alone, the same on every rank."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Micro-batches of indices into `lengths` (tokens) with at most `max_tokens` together; a longer sequence is alone.

    Best fit decreasing. Longest first inside a micro-batch and among micro-batches, so that sequences of like length stand
    together (a portable attention handles them in one call). Which lengths share a micro-batch does not depend on their order."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1 (got {max_tokens})")
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[index], 0))
        if at < len(room):
            free, chosen = room.pop(at)
        else:
            free, chosen = max_tokens, len(bins)
            bins.append([])
        bins[chosen].append(index)
        insort(room, (free - lengths[index], chosen))
    return bins


def balance(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """One list of indices into `costs` per rank, of nearly equal sums: the dearest item left goes to the rank with least so far.

    With at least `ranks` items no rank is without one, else some lists are empty. Deterministic; the indices of a rank ascend."""
    if ranks < 1:
        raise ValueError(f"ranks must be >= 1 (got {ranks})")
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # (cost, items, rank): among equal costs the one with fewer items is next
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, count, rank = loads[0]
        parts[rank].append(index)
        heapq.heapreplace(loads, (total + costs[index], count + 1, rank))
    return [sorted(part) for part in parts]


def cost(lengths: Sequence[int], hidden: int, linear: float = 12.0) -> list[float]:
    """Time of a sequence's forward and backward pass in units of one token's way through the linears: l + l^2 / (linear * hidden).

    `linear` is a layer's matrix parameters / hidden^2: 12 for a GPT-2 layer (4 attention, 8 MLP), 18.6 for Qwen2.5-32B. A token
    takes 2 * linear * hidden^2 FLOPs in the linears and, as causal attention reads half of l, 2 * l * hidden in attention."""
    return [length + length * length / (linear * hidden) for length in lengths]
