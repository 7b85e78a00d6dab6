"""Pack sequences into micro-batches and balance them over ranks by length."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Divide into micro-batches of at most `max_tokens`, or one longer sequence, as indices.

    Best fit decreasing: longest first within and among micro-batches, since portable attention handles
    similar adjacent lengths in one call."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1 (got {max_tokens})")
    batches: list[list[int]] = []
    open_batches: list[tuple[int, int]] = []  # (free tokens, micro-batch), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        slot = bisect_left(open_batches, (lengths[index], 0))
        if slot < len(open_batches):
            free_tokens, batch = open_batches.pop(slot)
        else:
            free_tokens, batch = max_tokens, len(batches)
            batches.append([])
        batches[batch].append(index)
        insort(open_batches, (free_tokens - lengths[index], batch))
    return batches


def pack_groups(
    prompts: Sequence[int], responses: Sequence[int], groups: Sequence[int], max_tokens: int
) -> list[list[list[int]]]:
    """Return micro-batches in which each prompt stands once before its responses.

    A micro-batch is a list of families: indices of responses after one copy of their prompt. A group that
    exceeds `max_tokens` has several families.

    prompts, responses: tokens of each sequence's parts; groups: each sequence's number, equal for
    the same prompt"""
    members_by_group: dict[int, list[int]] = {}
    for index, group_id in enumerate(groups):
        members_by_group.setdefault(group_id, []).append(index)
    families: list[list[int]] = []
    sizes: list[int] = []
    for group in members_by_group.values():
        free_tokens = -1
        for index in sorted(group, key=lambda i: -responses[i]):
            if responses[index] > free_tokens:
                families.append([])
                sizes.append(prompts[index])
                free_tokens = max_tokens - prompts[index]
            families[-1].append(index)
            sizes[-1] += responses[index]
            free_tokens -= responses[index]
    return [[families[i] for i in batch] for batch in pack(sizes, max_tokens)]


def assign_cp_ranks(cu_seqlens: Tensor, cp: int) -> tuple[Tensor, Tensor]:
    """Return each token's context-parallel rank and position there, int64 [t] each.

    Sequences must have a multiple of 2 * cp tokens. To balance causal attention, rank r gets chunks r and
    2 * cp - 1 - r, as in Transformer Engine's thd_get_partitioned_indices."""
    chunk_sizes = cu_seqlens.diff() // (2 * cp)
    starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    sizes = torch.repeat_interleave(chunk_sizes, cu_seqlens.diff())
    positions = torch.arange(int(cu_seqlens[-1])) - starts
    chunk_index = positions // sizes
    rank = torch.minimum(chunk_index, 2 * cp - 1 - chunk_index)
    return rank, starts // cp + positions % sizes + torch.where(chunk_index < cp, 0, sizes)


def balance(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return one ascending list of indices into `costs` per rank, with nearly equal sums.

    Greedy: most expensive item first, to the least loaded rank. Every rank gets one if possible."""
    if ranks < 1:
        raise ValueError(f"ranks must be >= 1 (got {ranks})")
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # (cost, items, rank); ties: fewer items first
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, count, rank = loads[0]
        parts[rank].append(index)
        heapq.heapreplace(loads, (total + costs[index], count + 1, rank))
    return [sorted(part) for part in parts]


def balance_groups(
    prompts: Sequence[float], responses: Sequence[float], groups: Sequence[int], ranks: int
) -> list[list[int]]:
    """Balance as `balance`, but charge a rank once for a prompt that its responses share.

    All groups are kept intact, or all are split into halves, quarters and so on: whichever gives the
    smallest maximum cost. Arguments are those of `pack_groups`, as costs."""
    members_by_group: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members_by_group.setdefault(group, []).append(index)
    best_shares, highest_cost, num_parts = balance([], ranks), inf, 1
    while num_parts < 2 * max(map(len, members_by_group.values()), default=0):
        units = [
            portion
            for group in members_by_group.values()
            for n in range(num_parts)
            if (portion := group[n::num_parts])
        ]
        costs = [prompts[unit[0]] + sum(responses[i] for i in unit) for unit in units]
        shares = [sorted(i for unit in share for i in units[unit]) for share in balance(costs, ranks)]
        loads = []
        for share in shares:
            index_by_group = {groups[i]: i for i in share}
            loads.append(sum(prompts[i] for i in index_by_group.values()) + sum(responses[i] for i in share))
        if max(loads) < highest_cost:
            best_shares, highest_cost = shares, max(loads)
        num_parts *= 2
    return best_shares


def cost(lengths: Sequence[int], even: float) -> list[float]:
    """Return each sequence's compute l + l^2 / even, in units of one token's linear layers.

    even: see `even_length`."""
    return [length + length * length / even for length in lengths]


def even_length(*models: tuple[int, int]) -> float:
    """Return the length l at which causal attention and linear layers cost equal FLOPs.

    models: (matrix parameters P, query width w = heads * head_dim, summed over layers) each.

    Linear layers take 2 P l, attention 2 w l^2 (scores and weighted sums), so l = P / w."""
    return sum(parameters for parameters, _ in models) / sum(width for _, width in models)
