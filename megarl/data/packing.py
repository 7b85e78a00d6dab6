"""Plans of which sequences share a micro-batch and which rank takes them, from lengths alone: the same on
every rank."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return micro-batches of at most `max_tokens`, as indices into `lengths` (tokens). A longer sequence is
    alone.

    Best fit decreasing. Longest first inside a micro-batch and among micro-batches: sequences of similar
    length stand together, and a portable attention handles them in one call. The order of `lengths` does not
    change which lengths share a micro-batch."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1 (got {max_tokens})")
    batches: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, micro-batch), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fit = bisect_left(free, (lengths[index], 0))
        if fit < len(free):
            tokens, batch = free.pop(fit)
        else:
            tokens, batch = max_tokens, len(batches)
            batches.append([])
        batches[batch].append(index)
        insort(free, (tokens - lengths[index], batch))
    return batches


def balance(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return one list of indices into `costs` per rank, of nearly equal sums.

    The most expensive item that is left goes to the rank with the least so far. With at least `ranks` items
    every rank has one, else some lists are empty. Deterministic; the indices of a rank ascend."""
    if ranks < 1:
        raise ValueError(f"ranks must be >= 1 (got {ranks})")
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [
        (0.0, 0, rank) for rank in range(ranks)
    ]  # (cost, items, rank): of equal costs fewer items come first
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, count, rank = loads[0]
        parts[rank].append(index)
        heapq.heapreplace(loads, (total + costs[index], count + 1, rank))
    return [sorted(part) for part in parts]


def cost(lengths: Sequence[int], even: float) -> list[float]:
    """Return the time of each sequence's forward and backward pass, l + l^2 / even, in units of one token's
    linears.

    even: the length, in tokens, at which causal attention takes as many FLOPs as the linears (see
    `even_length`)."""
    return [length + length * length / even for length in lengths]


def even_length(*models: tuple[int, int]) -> float:
    """Return `cost`'s `even` for models that each sequence passes equally often, given as (matrix parameters,
    query width).

    Matrix parameters P: of all layers together. Query width w: heads * head_dim, summed over the layers. l
    tokens take 2 P l FLOPs in the linears. Causal attention reads half of the square: 2 w l^2 in scores and
    weighted sums. The two are equal at l = P / w: 95,232 tokens for Qwen2.5-32B, with 18.6 hidden^2
    parameters a layer and w = hidden."""
    return sum(parameters for parameters, _ in models) / sum(width for _, width in models)
