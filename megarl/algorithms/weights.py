"""Token weights: the one place of denominators. Every loss term is sum_t w_t * l_t, with counts taken over the whole
mini-batch (all micro-batches, all data-parallel ranks), so that the terms of micro-batches and ranks simply add up."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "sample"]


def _included(response_mask: Tensor, sequence_ids: Tensor, include: Tensor | None) -> Tensor:
    return response_mask if include is None else response_mask & include[sequence_ids]


def counts(response_mask: Tensor, sequence_ids: Tensor, include: Tensor | None = None) -> Tensor:
    """This rank's counts, int64 [2]: included response tokens, and responses that have at least one.

    Summed over micro-batches and data-parallel ranks they are `total_tokens` and `total_responses` of `token_weights`.

    response_mask: bool [T]. sequence_ids: int64 [T]. include: bool [n], which responses count; None: all.
    """
    ids = sequence_ids[_included(response_mask, sequence_ids, include)]
    return torch.stack([torch.tensor(ids.numel(), device=ids.device), (torch.bincount(ids) > 0).sum()])


def token_weights(
    response_mask: Tensor,
    sequence_ids: Tensor,
    aggregation: Aggregation,
    total_tokens: float,
    total_responses: float,
    include: Tensor | None = None,
) -> Tensor:
    """Weight of each token in a loss term, float32 [T]; 0 outside the included responses.

    token:  1 / total_tokens, every token counts the same (DAPO eq. 8, VAPO eq. 7).
    sample: 1 / (tokens of the response * total_responses), every response counts the same (VAPO eq. 6).

    The totals are global: `counts`, summed over the micro-batches and ranks of the mini-batch with the same `include`.
    A total of 0 gives weights of 0. A response must not be divided between calls.

    response_mask: bool [T]. sequence_ids: int64 [T]. include: bool [n], e.g. not truncated, or correct; None: all.
    """
    if aggregation not in ("token", "sample"):
        raise ValueError(f"aggregation: must be token or sample (got {aggregation!r})")
    mask = _included(response_mask, sequence_ids, include)
    weights = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    if (total_tokens if aggregation == "token" else total_responses) == 0:
        return weights
    if aggregation == "token":
        weights[mask] = 1.0 / total_tokens
    else:
        ids = sequence_ids[mask]
        tokens = torch.bincount(ids)[ids]
        weights[mask] = (1.0 / (tokens.double() * total_responses)).float()
    return weights
