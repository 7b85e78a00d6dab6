"""M2PO's loss, and the tokens that it masks, against loops, for any split into micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.losses import token_weights
from megarl.config.schema import AlgorithmConfig
from megarl.training.methods.m2po import find_excess, select_m2po
from tests.algorithms.loops import Batch, batches, loop_weights, make_batch
from tests.algorithms.test_losses import run, weights_of
from tests.methods import refusal
from tests.training.test_actor_loss import ALONE, whole


def remove_largest(values: list[float], threshold: float) -> list[float]:
    """Remove the largest until the mean of the others is at most the threshold; return the removed ones."""
    kept, removed = sorted(values), []
    while kept and math.fsum(kept) / len(kept) > threshold:
        removed.append(kept.pop())
    return removed


def select(batch: Batch, threshold: float, parts: int = 1) -> list[int]:
    """Return the masked tokens; tokens without a loss weight have NaN log-probs."""
    e, micro = batch.experience, whole(batch)
    e["policy_loss_weights"] = e.spread(token_weights(e.response_lengths, "token", include=batch.include))
    e["engine_logprobs"] = e["old_logprobs"]
    pieces = [replace(micro, token_indices=at) for at in micro.token_indices.tensor_split(parts)]
    logprobs = torch.where(e["policy_loss_weights"] > 0, e["logprobs"], torch.nan)
    random_numbers = torch.rand(e.num_tokens, generator=torch.Generator().manual_seed(2)).double()
    config = AlgorithmConfig(surrogate="m2po", old_logprobs="engine")
    found = select_m2po(config, e, pieces, logprobs, random_numbers, ALONE, threshold=threshold)
    return found.nonzero().squeeze(-1).tolist()


@settings(max_examples=80, deadline=None)
@given(batches(), st.sampled_from([1e-6, 0.04, 0.2, 10.0]), st.integers(1, 4))
def test_masks_the_largest_that_moved_along(batch: Batch, threshold: float, parts: int) -> None:
    e = batch.experience
    names = "logprobs", "old_logprobs", "advantages"
    new, old, advantages = (e[name].tolist() for name in names)
    spans = zip(batch.spans, batch.include.tolist(), strict=True)
    squares = {}
    for t in (t for (start, end), counts in spans if counts for t in range(start, end)):
        ratio = math.exp(new[t] - old[t])
        if (advantages[t] > 0 and ratio > 1) or (advantages[t] < 0 and ratio < 1):
            squares[t] = (new[t] - old[t]) ** 2
    chosen = select(batch, threshold, parts)
    assert sorted((squares[t] for t in chosen), reverse=True) == remove_largest(
        [*squares.values()], threshold
    )
    assert chosen == select(batch, threshold)


def test_equal_numbers_are_chosen_at_random() -> None:
    """Two zeros and two of the four numbers of 0.1 have a mean of 0.05; with a third it is 0.06."""
    values = torch.tensor([0.1, 0.0, 0.1, 0.1, 0.0, 0.1, 5.0], dtype=torch.float64)
    random_numbers = torch.tensor([0.3, 0.9, 0.1, 0.8, 0.9, 0.2, 0.5], dtype=torch.float64)
    found = find_excess(values, random_numbers, 0.05, ALONE)
    assert found.tolist() == [True, False, False, True, False, False, True]
    assert find_excess(values[:0], values[:0], 0.05, ALONE).tolist() == []


def test_nothing_is_masked_on_policy() -> None:
    batch = make_batch([(2, 6), (1, 3)], 7, [True, True])
    batch.experience["old_logprobs"] = batch.experience["logprobs"]
    assert select(batch, 0.04) == []


@settings(max_examples=40, deadline=None)
@given(batches())
def test_the_loss_equals_the_formula(batch: Batch) -> None:
    """The loss is -sum of r_t A_t over unmasked tokens / all tokens."""
    e = batch.experience
    weights = loop_weights(batch, "token", batch.include.tolist())
    loss, gradient, stats = run("m2po", e, weights_of(e, batch.include, "token"))
    names = "logprobs", "old_logprobs", "advantages", "selected"
    rows = zip(weights, *(e[name].tolist() for name in names), strict=True)
    slopes = [0.0 if masked else -w * math.exp(new - old) * a for w, new, old, a, masked in rows]
    assert float(loss) == pytest.approx(math.fsum(slopes), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=1e-12)
    counted = e.spread(batch.include.double()) > 0
    assert float(stats["policy/selected"]) == int((e["selected"] & counted).sum())


def test_the_ratio_must_be_to_the_policy_that_sampled() -> None:
    expected = "algorithm.old_logprobs: must be engine for algorithm.surrogate m2po, whose ratio is to"
    assert expected in refusal("m2po", "algorithm.old_logprobs=trainer")
