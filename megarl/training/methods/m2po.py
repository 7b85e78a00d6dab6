"""The tokens of a mini-batch that M2PO masks (arXiv 2510.01161, algorithm 1), over all replicas.

The authors' code instead clips at one ratio for each micro-batch. AReaL ignores the advantage's sign, and
does not count masked tokens in the denominator. Ours follows the paper."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.algorithms.losses import log_ratio
from megarl.config.schema import AlgorithmConfig
from megarl.data.batch import MicroBatch, TrainBatch
from megarl.parallel.comm import find_among_largest, sum_over_replicas
from megarl.parallel.runtime import Runtime
from megarl.training.methods.covariance import counted_tokens, mark_tokens


def select_m2po(
    config: AlgorithmConfig,
    batch: TrainBatch,
    mini_batch: Sequence[MicroBatch],
    logprobs: Tensor,
    random_numbers: Tensor,
    runtime: Runtime,
    *,
    threshold: float,
) -> Tensor:
    """Select tokens by largest (log r)^2, until the mean of the others is <= threshold, bool [T].

    Only tokens count that moved in their advantage's direction: A > 0 and r > 1, or A < 0 and r < 1.
    logprobs: [T], before the update; random_numbers: [T], decide among equals."""
    token_indices = counted_tokens(batch, mini_batch)
    new, old = logprobs[token_indices].double(), batch[config.old_column][token_indices].double()
    difference = log_ratio(new, old, torch.ones_like(token_indices, dtype=torch.bool))
    moved_along = difference * batch["advantages"][token_indices].double() > 0
    token_indices, squares = token_indices[moved_along], difference[moved_along].square()
    is_masked = find_excess(squares, random_numbers[token_indices], threshold, runtime)
    return mark_tokens(batch, token_indices[is_masked])


def find_excess(squares: Tensor, random_numbers: Tensor, threshold: float, runtime: Runtime) -> Tensor:
    """Return which numbers of this replica are the largest of all, without which the mean is <= threshold.

    The sum of (square - threshold) over all numbers up to a bound is <= 0 for small bounds, and positive from
    one of the numbers on. A bisection over the bits of that number sums once per bit."""
    keys = squares.view(torch.int64)  # bits of floats >= 0 have the floats' order
    excess = squares - threshold

    def sum_up_to(key: int) -> tuple[float, int]:
        is_below = keys <= key
        sums = torch.stack([excess[is_below].sum(), is_below.sum().double()])
        total, count = sum_over_replicas(runtime, sums).tolist()
        return total, int(count)

    keys_of_floats = range(int(torch.tensor(torch.inf, dtype=torch.float64).view(torch.int64)) + 1)
    if sum_up_to(keys_of_floats[-1])[0] <= 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    first_key = bisect_left(keys_of_floats, True, key=lambda key: sum_up_to(key)[0] > 0)
    below, count_below = sum_up_to(first_key - 1)
    _, count = sum_up_to(first_key)
    first_excess = float(torch.tensor(first_key).view(torch.float64)) - threshold
    num_masked = count - count_below - int(-below / first_excess)  # of the numbers equal to the first one
    is_masked, is_equal = keys > first_key, keys == first_key
    randoms = random_numbers[is_equal]
    is_masked[is_equal] = find_among_largest(runtime, randoms, randoms, num_masked)
    return is_masked
