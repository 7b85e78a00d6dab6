"""Token weights against the formulas, and their independence of how the batch is divided."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.weights import counts, token_weights
from tests.algorithms.loops import Batch, batches, loop_weights, make_batch


def of(batch: Batch, aggregation: str, include: torch.Tensor | None) -> torch.Tensor:
    e = batch.experience
    tokens, responses = counts(e.response_mask, e.sequence_ids, include).tolist()
    return token_weights(e.response_mask, e.sequence_ids, aggregation, tokens, responses, include)


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from(["token", "sample"]), st.booleans())
def test_equal_the_formula_and_sum_to_one(batch, aggregation, filtered):
    include = batch.include if filtered else None
    weights = of(batch, aggregation, include)
    expected = loop_weights(batch, aggregation, (batch.include if filtered else torch.ones_like(batch.include)).tolist())
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
    assert float(weights.double().sum()) == pytest.approx(1.0 if not filtered or batch.include.any() else 0.0, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from(["token", "sample"]), st.randoms(use_true_random=False))
def test_parts_have_the_weights_of_the_whole(batch, aggregation, random):
    """Sequences are shuffled and dealt to 3 parts (ranks or micro-batches), of which some may be empty."""
    e = batch.experience
    e["whole"], e["include"] = of(batch, aggregation, batch.include), batch.include
    order = list(range(e.num_sequences))
    random.shuffle(order)
    parts = [e.select(order[i::3]) for i in range(3)]
    total = sum(counts(p.response_mask, p.sequence_ids, p["include"]) for p in parts)
    assert torch.equal(total, counts(e.response_mask, e.sequence_ids, batch.include))
    for p in parts:
        weights = token_weights(p.response_mask, p.sequence_ids, aggregation, *total.tolist(), p["include"])
        assert torch.equal(weights, p["whole"])


@pytest.mark.parametrize("aggregation", ["token", "sample"])
def test_nothing_included_gives_zero_and_not_nan(aggregation):
    batch = make_batch([(2, 3), (1, 1)], 0, [False, False])
    assert counts(batch.experience.response_mask, batch.experience.sequence_ids, batch.include).tolist() == [0, 0]
    assert torch.equal(of(batch, aggregation, batch.include), torch.zeros(7))


def test_a_response_without_tokens_is_not_counted():
    mask, ids = torch.tensor([False, True, False]), torch.tensor([0, 1, 2])
    assert counts(mask, ids).tolist() == [1, 1]


def test_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="aggregation: must be token or sample"):
        token_weights(torch.tensor([True]), torch.tensor([0]), "batch", 1, 1)
