"""GMPO against a loop of the paper's formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from tests.algorithms.loops import Batch, batches, loop_weights
from tests.algorithms.test_losses import HIGH, LOW, run, weights_of
from tests.methods import refusal


@settings(max_examples=40, deadline=None)
@given(batches())
def test_equals_the_formula(batch: Batch) -> None:
    """The loss is -mean over n responses of A G with G = exp(mean d'). Clipped tokens have no gradient.

    That of the others is -A G / (|o| n)."""
    e = batch.experience
    sequences = torch.randn(e.num_sequences, generator=torch.Generator().manual_seed(1)).double()
    e["advantages"] = e.spread(sequences)
    weights = loop_weights(batch, "sample", batch.include.tolist())
    loss, gradient, stats = run("gmpo", e, weights_of(e, batch.include, "sample"))
    new, old = e["logprobs"].tolist(), e["old_logprobs"].tolist()
    count = sum(batch.include.tolist())
    terms, slopes, clipped = [], [0.0] * batch.total, 0
    for (start, end), a in zip(batch.spans, sequences.tolist(), strict=True):
        if not weights[start]:
            continue
        d = [new[t] - old[t] for t in range(start, end)]
        kept = [min(x, HIGH) if a > 0 else max(x, -LOW) for x in d]
        mean = math.exp(math.fsum(kept) / len(kept))
        terms.append(-a * mean / count)
        for t, x, y in zip(range(start, end), d, kept, strict=True):
            slopes[t] = -a * mean / (len(d) * count) if x == y else 0.0
            clipped += x != y
    assert float(loss) == pytest.approx(math.fsum(terms), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=1e-12)
    assert float(stats["policy/clip_fraction_low"] + stats["policy/clip_fraction_high"]) == clipped


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.advantage=gae"],
            "algorithm.advantage: must give each response one advantage for",
        ),
        (
            ["teacher.path=t"],
            "teacher.top_k: a teacher's advantages differ by token, which",
        ),
    ],
)
def test_advantages_by_token_are_refused(overrides: list[str], message: str) -> None:
    assert message in refusal("gmpo", *overrides)
