"""Pack sequences into micro-batches, and balance them over ranks.

The results depend on lengths alone, so every rank computes the same."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return micro-batches of at most `max_tokens`, as indices into `lengths` (tokens).

    A longer sequence is alone.

    Best fit decreasing. Longest first inside a micro-batch and among micro-batches: sequences of similar
    length stand together, and portable attention handles them in one call. The order of `lengths` does not
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


def pack_groups(
    prompts: Sequence[int], responses: Sequence[int], groups: Sequence[int], max_tokens: int
) -> list[list[list[int]]]:
    """Return micro-batches in which a prompt stands once before the responses to it.

    Each micro-batch is a list of such families, and a family a list of indices into `responses`. Families are
    packed as by `pack`.

    prompts, responses: tokens of each sequence's prompt, and of all behind it; groups: equal where the prompt
    is. Responses that do not fit behind one prompt go behind a copy of it."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    families: list[list[int]] = []
    sizes: list[int] = []
    for alike in members.values():
        free = -1
        for index in sorted(alike, key=lambda i: -responses[i]):
            if responses[index] > free:
                families.append([])
                sizes.append(prompts[index])
                free = max_tokens - prompts[index]
            families[-1].append(index)
            sizes[-1] += responses[index]
            free -= responses[index]
    return [[families[i] for i in batch] for batch in pack(sizes, max_tokens)]


def cut(cu_seqlens: Tensor, cp: int) -> tuple[Tensor, Tensor]:
    """Return the context-parallel rank of each token of a pack, and its place there, int64 [t] each.

    Each sequence, of a multiple of 2 * cp tokens, is cut into 2 * cp chunks. Rank r has chunks r and
    2 * cp - 1 - r of every sequence, so that each rank has the same number of causal pairs. Transformer
    Engine's thd_get_partitioned_indices gives the same."""
    chunk = cu_seqlens.diff() // (2 * cp)
    starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    sizes = torch.repeat_interleave(chunk, cu_seqlens.diff())
    positions = torch.arange(int(cu_seqlens[-1])) - starts
    number = positions // sizes
    rank = torch.minimum(number, 2 * cp - 1 - number)
    return rank, starts // cp + positions % sizes + torch.where(number < cp, 0, sizes)


def balance(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return one list of indices into `costs` per rank, of nearly equal sums.

    The most expensive item that is left goes to the rank with the least so far. With at least `ranks` items
    every rank has one, else some lists are empty. Deterministic; the indices of a rank ascend."""
    if ranks < 1:
        raise ValueError(f"ranks must be >= 1 (got {ranks})")
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # (cost, items, rank): of equal costs fewer items first
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, count, rank = loads[0]
        parts[rank].append(index)
        heapq.heapreplace(loads, (total + costs[index], count + 1, rank))
    return [sorted(part) for part in parts]


def balance_groups(
    prompts: Sequence[float], responses: Sequence[float], groups: Sequence[int], ranks: int
) -> list[list[int]]:
    """Return one list of indices per rank, as `balance` does, with the prompts of groups shared.

    A rank computes the prompt of a group once for all of the group's responses that it has.

    prompts, responses: the cost of each sequence's prompt, and of its response behind it. Groups are kept
    whole, or cut in halves, quarters and so on, whichever makes the slowest rank the quickest."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    best, slowest, parts = balance([], ranks), inf, 1
    while parts < 2 * max(map(len, members.values()), default=0):
        units = [some for group in members.values() for n in range(parts) if (some := group[n::parts])]
        costs = [prompts[unit[0]] + sum(responses[i] for i in unit) for unit in units]
        shares = [sorted(i for unit in share for i in units[unit]) for share in balance(costs, ranks)]
        loads = []
        for share in shares:
            first = {groups[i]: i for i in share}
            loads.append(sum(prompts[i] for i in first.values()) + sum(responses[i] for i in share))
        if max(loads) < slowest:
            best, slowest = shares, max(loads)
        parts *= 2
    return best


def cost(lengths: Sequence[int], even: float) -> list[float]:
    """Return the time of each sequence's forward and backward pass, l + l^2 / even.

    The unit is one token's linear layers. even: the length, in tokens, at which causal attention costs the
    same FLOPs as the linear layers (see `even_length`)."""
    return [length + length * length / even for length in lengths]


def even_length(*models: tuple[int, int]) -> float:
    """Return the argument `even` of `cost` for models that each sequence passes equally often.

    models: (matrix parameters, query width) of each.

    Matrix parameters P: of all layers together. Query width w: heads * head_dim, summed over the layers. l
    tokens take 2 P l FLOPs in the linears. Causal attention reads half of the square: 2 w l^2 in scores and
    weighted sums. The two are equal at l = P / w: 95,232 tokens for Qwen2.5-32B, with 18.6 hidden^2
    parameters a layer and w = hidden."""
    return sum(parameters for parameters, _ in models) / sum(width for _, width in models)
