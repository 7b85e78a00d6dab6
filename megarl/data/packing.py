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


def cost(lengths: Sequence[int], even: float) -> list[float]:
    """Time of a sequence's forward and backward pass in units of one token's way through the linears: l + l^2 / even.

    even: the length at which causal attention takes as many FLOPs as the linears, tokens; `even_length` knows it."""
    return [length + length * length / even for length in lengths]


def even_length(*models: tuple[int, int]) -> float:
    """`cost`'s length for models that a sequence goes through equally often, each given as (matrix parameters, query width).

    Matrix parameters P: of all layers together. Query width w: heads * head_dim, summed over the layers. l tokens take 2 P l FLOPs
    in the linears and, as causal attention reads half of the square, 2 w l^2 in scores and weighted sums: equal at l = P / w.
    95,232 tokens for Qwen2.5-32B: 18.6 hidden^2 parameters a layer, and w = hidden."""
    return sum(parameters for parameters, _ in models) / sum(width for _, width in models)
