"""Token weights: the one place of denominators.

Every loss term is sum_t w_t * l_t, with counts taken over the whole mini-batch (all micro-batches, all
data-parallel ranks), so that the terms of micro-batches and ranks simply add up."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "sample"]


def token_weights(
    lengths: Tensor,
    aggregation: Aggregation,
    mini_batches: Tensor | None = None,
    include: Tensor | None = None,
) -> Tensor:
    """Return the weight of one token of each response in a loss term, float32 [n]; 0 for those that do not
    count.

    token:  1 / (tokens of all counted responses of its mini-batch): every token counts the same (DAPO eq. 8
            and 12, VAPO eq. 7).
    sample: 1 / (tokens of the response * counted responses of its mini-batch): every response counts the
            same (VAPO eq. 6).

    lengths: response tokens, int64 [n], of the whole step, not of one rank's share. mini_batches: int64 [n],
    the mini-batch of each; None: all are one. include: bool [n], e.g. not truncated, or correct; None: all. A
    response without tokens never counts.
    """
    if aggregation not in ("token", "sample"):
        raise ValueError(f"aggregation: must be token or sample (got {aggregation!r})")
    lengths = lengths if include is None else torch.where(include, lengths, 0)
    counted = lengths > 0
    ids = torch.zeros_like(lengths) if mini_batches is None else mini_batches
    totals = lengths.new_zeros(int(ids.max()) + 1 if ids.numel() else 0)
    totals.index_add_(0, ids, lengths if aggregation == "token" else counted.long())
    denominators = totals[ids] if aggregation == "token" else lengths * totals[ids]
    return torch.where(counted, 1.0 / denominators.double(), 0.0).float()
