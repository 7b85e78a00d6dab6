"""Histograms against loops over Python floats, on ragged batches, whole and in parts."""

from __future__ import annotations

import math
from bisect import bisect_left

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import (
    LENGTH_BINS,
    POSITION_BINS,
    error_by_position,
    lambda_by_length,
    sums_by_position,
)
from megarl.algorithms.mismatch import DIFFERENCE_EDGES, difference_histogram
from megarl.data.batch import TrainBatch

NUMBERS = st.floats(-12, 12, width=32)


@st.composite
def experiences(draw: st.DrawFn) -> TrainBatch:
    """Generate 1 to 6 sequences with four columns of numbers.

    Prompts have 0 to 3 tokens and responses 1 to 70.
    """
    lengths = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70)), min_size=1, max_size=6))
    batch = TrainBatch.build([[7] * p for p, _ in lengths], [[8] * r for _, r in lengths])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    for name in ("values", "returns", "trainer", "engine"):
        scale = 10.0 ** torch.randint(-8, 2, (batch.num_tokens,), generator=generator)
        batch[name] = (torch.randn(batch.num_tokens, generator=generator) * scale).float()
    batch["lambda"] = torch.rand(len(lengths), generator=generator, dtype=torch.float64)
    return batch


def tables(batch: TrainBatch, longest: int = 64) -> list[torch.Tensor]:
    """Return the histograms of a batch, with the trainer's column in place of entropy."""
    return [
        lambda_by_length(batch.response_lengths, batch["lambda"], longest),
        error_by_position(batch["values"], batch["returns"], batch.response_mask, batch.response_lengths),
        difference_histogram(batch["trainer"], batch["engine"], batch.response_mask),
        sums_by_position(batch.response_mask, batch.response_lengths, batch["trainer"]),
    ]


@settings(max_examples=100, deadline=None)
@given(experiences(), st.integers(1, 80))
def test_against_loops(batch: TrainBatch, longest: int) -> None:
    lam = [[0.0] * LENGTH_BINS for _ in range(2)]
    errors = [[0.0] * POSITION_BINS for _ in range(3)]
    entropy = [[0.0] * POSITION_BINS for _ in range(2)]
    differences = [0.0] * (len(DIFFERENCE_EDGES) + 1)
    columns = {name: column.tolist() for name, column in batch.columns.items()}
    for row, (start, end) in enumerate(
        zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False)
    ):
        response = [t for t in range(start, end) if batch.response_mask[t]]
        part = min((len(response) - 1) * LENGTH_BINS // longest, LENGTH_BINS - 1)
        lam[0][part] += 1
        lam[1][part] += columns["lambda"][row]
        for position, t in enumerate(response):
            error = columns["values"][t] - columns["returns"][t]
            numbers = (1.0, error, abs(error), 1.0, columns["trainer"][t])
            for sums, number in zip(errors + entropy, numbers, strict=True):
                sums[math.floor(position / len(response) * POSITION_BINS + 1e-9)] += number
            differences[bisect_left(DIFFERENCE_EDGES, columns["trainer"][t] - columns["engine"][t])] += 1
    for found, expected in zip(tables(batch, longest), (lam, errors, differences, entropy), strict=True):
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(experiences(), st.data())
def test_replicas_sums_are_those_of_the_whole(batch: TrainBatch, data: st.DataObject) -> None:
    owner = data.draw(st.lists(st.integers(0, 1), min_size=batch.num_sequences, max_size=batch.num_sequences))
    shares = [
        batch.select([i for i, mine in enumerate(owner) if mine == rank]) for rank in (0, 1) if rank in owner
    ]
    for whole, *parts in zip(tables(batch), *map(tables, shares), strict=True):
        torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-12, atol=1e-12)


def test_edges_and_what_is_beyond_them() -> None:
    assert len(DIFFERENCE_EDGES) == 30 and list(DIFFERENCE_EDGES) == sorted(DIFFERENCE_EDGES)
    assert (
        DIFFERENCE_EDGES[0] == -10
        and DIFFERENCE_EDGES[-1] == 10
        and DIFFERENCE_EDGES[15] == pytest.approx(1e-6)
    )
    difference = torch.tensor([0.0, -100.0, 100.0, 5e-7, 2e-6, -2e-6])
    counts = difference_histogram(difference, torch.zeros(6), torch.tensor([True] * 6)).tolist()
    assert {i: n for i, n in enumerate(counts) if n} == {0: 1, 14: 1, 15: 2, 16: 1, 30: 1}
    responses, lam = lambda_by_length(
        torch.tensor([1, 24, 999]), torch.tensor([0.25, 0.5, 0.75]), 24
    ).tolist()
    assert responses == [1.0] + [0.0] * 22 + [2.0] and lam[-1] == 1.25
    assert not difference_histogram(difference, torch.zeros(6), torch.tensor([False] * 6)).any()
