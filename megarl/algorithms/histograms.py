"""Distributions of one step as sums over fixed bins, to be added up over ranks and steps: lambda by length,
value error by position, trainer against engine."""

from __future__ import annotations

import torch
from torch import Tensor

LENGTH_BINS = 24  # equal parts of 1 ... the longest possible response
POSITION_BINS = 25  # equal parts of each response
# Between the bins of a difference of log-probabilities: half decades from 1e-6 to 10 on either side of 0.
DIFFERENCE_EDGES = tuple(
    sign * 10 ** (-6 + half / 2)
    for sign, halves in ((-1, range(14, -1, -1)), (1, range(15)))
    for half in halves
)


def lambda_by_length(lengths: Tensor, lam: Tensor, longest: int) -> Tensor:
    """Return (responses, sum of their lambda) of each part of 1 ... longest tokens, float64 [2, LENGTH_BINS].

    lengths: int64 [n], response tokens; a response longer than `longest` counts in the last bin. lam: [n]."""
    bins = (((lengths - 1) * LENGTH_BINS) // longest).clamp(0, LENGTH_BINS - 1)
    lam = lam.double()
    return torch.zeros(2, LENGTH_BINS, dtype=torch.float64, device=lam.device).index_add_(
        1, bins, torch.stack([torch.ones_like(lam), lam])
    )


def error_by_position(values: Tensor, returns: Tensor, response_mask: Tensor, lengths: Tensor) -> Tensor:
    """Return (tokens, sum of V - R, sum of |V - R|) of each part of the responses, float64 [3,
    POSITION_BINS].

    Token p of a response of l tokens is in part floor(p * POSITION_BINS / l). values, returns: [T];
    response_mask: bool [T]; lengths: int64 [n], response tokens, in the order in which the responses lie in
    [T]."""
    own = torch.repeat_interleave(lengths, lengths)
    position = torch.arange(own.numel(), device=lengths.device) - torch.repeat_interleave(
        lengths.cumsum(0) - lengths, lengths
    )
    error = (values.double() - returns.double())[response_mask]
    sums = torch.stack([torch.ones_like(error), error, error.abs()])
    return torch.zeros(3, POSITION_BINS, dtype=torch.float64, device=error.device).index_add_(
        1, position * POSITION_BINS // own, sums
    )


def difference_histogram(trainer_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Count tokens by trainer minus engine log-probability, float64 [len(DIFFERENCE_EDGES) + 1]: bin i holds
    edge i-1 < difference <= edge i.

    All inputs [T]; tokens outside the mask do not count."""
    difference = (trainer_logprobs.double() - engine_logprobs.double())[mask]
    edges = torch.tensor(DIFFERENCE_EDGES, dtype=torch.float64, device=difference.device)
    return torch.bincount(torch.bucketize(difference, edges), minlength=len(DIFFERENCE_EDGES) + 1).double()
