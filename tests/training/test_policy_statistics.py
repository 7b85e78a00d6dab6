"""Statistics of the policy before its update, against loops over Python floats."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from megarl.algorithms.advantages import POSITION_BINS
from megarl.training.columns import policy_statistics
from tests.algorithms.loops import Batch, batches
from tests.training.test_actor_loss import ALONE


@settings(max_examples=40, deadline=None)
@given(batches(longest=60))
def test_policy_statistics(batch: Batch) -> None:
    """Means over the response tokens, and entropy by position in the response."""
    e = batch.experience
    metrics, tables = policy_statistics(e, ALONE)
    entropy, old = e["entropy"].tolist(), e["old_logprobs"].tolist()
    tokens = [t for start, end in batch.spans for t in range(start, end)]
    assert metrics == pytest.approx(
        {
            "policy/entropy": math.fsum(entropy[t] for t in tokens) / len(tokens),
            "policy/mean_prob": math.fsum(math.exp(old[t]) for t in tokens) / len(tokens),
        }
    )
    counts, sums = [0.0] * POSITION_BINS, [0.0] * POSITION_BINS
    for start, end in batch.spans:
        for t in range(start, end):
            part = (t - start) * POSITION_BINS // (end - start)
            counts[part] += 1
            sums[part] += entropy[t]
    assert tables["entropy"]["tokens"] == counts and tables["entropy"]["entropy"] == pytest.approx(sums)
