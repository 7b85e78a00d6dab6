"""Token weights against the formulas; they do not depend on the division into mini-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.losses import token_weights
from tests.algorithms.loops import Batch, batches, loop_weights, make_batch


def lengths_of(batch: Batch) -> torch.Tensor:
    return torch.tensor([end - start for start, end in batch.spans])


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from(["token", "sample"]), st.booleans())
def test_equal_the_formula_and_sum_to_one(batch, aggregation, filtered):
    include = batch.include if filtered else None
    weights = batch.experience.spread(token_weights(lengths_of(batch), aggregation, include=include))
    expected = loop_weights(
        batch, aggregation, (batch.include if filtered else torch.ones_like(batch.include)).tolist()
    )
    assert weights.dtype == torch.float32
    torch.testing.assert_close(
        weights.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert float(weights.double().sum()) == pytest.approx(
        1.0 if not filtered or batch.include.any() else 0.0, rel=1e-6
    )


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 12), st.sampled_from(["token", "sample"]))
def test_each_mini_batch_has_the_weights_that_it_has_alone(data, responses, aggregation):
    """Any assignment of responses to mini-batches, including empty mini-batches and empty responses."""
    draw = st.lists(st.integers(0, 30), min_size=responses, max_size=responses)
    lengths = torch.tensor(data.draw(draw))
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=responses, max_size=responses)))
    include = torch.tensor(data.draw(st.lists(st.booleans(), min_size=responses, max_size=responses)))
    weights = token_weights(lengths, aggregation, ids, include)
    for number in range(5):
        own = ids == number
        assert torch.equal(weights[own], token_weights(lengths[own], aggregation, include=include[own]))
        total = float((weights * lengths)[own].double().sum())
        assert total == pytest.approx(float((include & own & (lengths > 0)).any()), rel=1e-6)
    assert not weights[~include | (lengths == 0)].any()


@pytest.mark.parametrize("aggregation", ["token", "sample"])
def test_nothing_included_gives_zero_and_not_nan(aggregation):
    batch = make_batch([(2, 3), (1, 1)], 0, [False, False])
    assert token_weights(lengths_of(batch), aggregation, include=batch.include).tolist() == [0, 0]
    assert token_weights(torch.zeros(0, dtype=torch.int64), aggregation).tolist() == []


def test_a_response_without_tokens_is_not_counted():
    assert token_weights(torch.tensor([0, 1, 0]), "sample").tolist() == [0, 1, 0]


def test_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="aggregation: must be token, sample or constant"):
        token_weights(torch.tensor([1]), "batch")
