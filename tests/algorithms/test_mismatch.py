"""Trainer-engine mismatch: metrics, importance weights and masks against loops, whole and in parts."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import mismatch
from tests.algorithms.loops import Batch, batches, make_batch

LEVELS = st.sampled_from(["none", "token", "sequence"])
BOUNDS = (0.8, 1.3)
LIMIT = 20.0


def loop_factors(
    batch: Batch, weight: str, cap: float, keep: str, bounds: tuple[float, float]
) -> tuple[list[float], list[int]]:
    """Return each token's factor, and the numbers of tokens, of truncated and of masked ones."""
    new, old = (batch.experience[name].tolist() for name in ("logprobs", "old_logprobs"))
    factors, counts = [0.0] * batch.total, [0, 0, 0]
    for start, end in batch.spans:
        gaps = [new[t] - old[t] for t in range(start, end)]
        product, mean = (
            math.exp(max(-LIMIT, min(LIMIT, math.fsum(gaps)))),
            math.exp(math.fsum(gaps) / len(gaps)),
        )
        for t, gap in zip(range(start, end), gaps, strict=True):
            ratio = {"none": 1.0, "token": math.exp(gap), "sequence": product}[weight]
            judged = {"none": 1.0, "token": math.exp(gap), "sequence": mean}[keep]
            out = keep != "none" and not bounds[0] <= judged <= bounds[1]
            factors[t] = 0.0 if out else ratio if weight == "none" else min(ratio, cap)
            counts[0] += 1
            counts[1] += weight != "none" and ratio > cap
            counts[2] += out
    return factors, counts


def factors_of(batch: Batch, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    e = batch.experience
    return mismatch.mismatch_factors(
        e["logprobs"], e["old_logprobs"], e.response_mask, e.sequence_ids, **options
    )


@settings(max_examples=50, deadline=None)
@given(batches())
def test_metrics_from_parts(batch):
    e = batch.experience
    parts = [
        mismatch.mismatch_sums(p["logprobs"], p["old_logprobs"], p.response_mask)
        for p in map(e.select, [[i] for i in range(e.num_sequences)])
    ]
    metrics = mismatch.mismatch_metrics(sum(p[0] for p in parts), max(p[1] for p in parts))
    gaps = (e["logprobs"] - e["old_logprobs"])[e.response_mask].tolist()
    expected = {
        "mismatch/logprob_abs_mean": statistics.fmean(map(abs, gaps)),
        "mismatch/logprob_abs_max": max(map(abs, gaps)),
        "mismatch/ratio_mean": statistics.fmean(map(math.exp, gaps)),
        "mismatch/kl": statistics.fmean(math.exp(gap) - 1 - gap for gap in gaps),
    }
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(batches(), LEVELS, LEVELS, st.sampled_from([0.5, 1.1, 2.0]))
def test_factors_equal_the_loop(batch, weight, keep, cap):
    factors, counts = factors_of(batch, weight=weight, cap=cap, keep=keep, bounds=BOUNDS)
    expected, expected_counts = loop_factors(batch, weight, cap, keep, BOUNDS)
    assert factors.dtype == torch.float32
    assert factors.tolist() == pytest.approx(expected, rel=1e-6)
    assert counts.tolist() == expected_counts


@settings(max_examples=50, deadline=None)
@given(batches(), LEVELS, LEVELS, st.randoms(use_true_random=False))
def test_factors_do_not_depend_on_the_division(batch, weight, keep, random):
    """Three ranks, some possibly empty: factors are bitwise equal, and the counts add up."""
    options = {"weight": weight, "cap": 1.1, "keep": keep, "bounds": BOUNDS}
    e = batch.experience
    e["factors"], counts = factors_of(batch, **options)
    order = list(range(e.num_sequences))
    random.shuffle(order)
    total = torch.zeros(3, dtype=torch.float64)
    for part in (e.select(order[i::3]) for i in range(3)):
        factors, own = mismatch.mismatch_factors(
            part["logprobs"], part["old_logprobs"], part.response_mask, part.sequence_ids, **options
        )
        assert torch.equal(factors, part["factors"])
        total += own
    assert torch.equal(total, counts)


def test_importance_weights_are_unbiased():
    """The mean over the engine's samples of product weights times f is the trainer's mean of f.

    Enumerated with a vocabulary of 3 and sequences of 2 tokens.
    """
    engine, trainer = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.3, 0.4])
    value = torch.tensor([[1.0, -2.0, 0.5], [0.3, 4.0, -1.0], [2.0, 0.0, 1.5]])
    found = 0.0
    for first in range(3):
        for second in range(3):
            tokens = torch.tensor([first, second])
            mask, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
            factors, _ = mismatch.mismatch_factors(
                trainer[tokens].log(), engine[tokens].log(), mask, ids, weight="sequence", cap=100.0
            )
            found += float(engine[first] * engine[second] * factors[0] * value[first, second])
    assert found == pytest.approx(float((trainer[:, None] * trainer[None] * value).sum()), rel=1e-5)


def test_a_huge_ratio_is_bounded():
    batch = make_batch([(1, 3)], 0)
    batch.experience["logprobs"] = batch.experience["old_logprobs"] + 1e4
    for level in ("token", "sequence"):
        factors, counts = factors_of(batch, weight=level, cap=2.0)
        assert factors[1:].tolist() == [2.0] * 3 and counts.tolist() == [3, 3, 0]
        assert not factors_of(batch, keep=level, bounds=BOUNDS)[0].any()


def test_nothing_and_garbage_outside():
    x, none = torch.full((2,), torch.nan), torch.zeros(2, dtype=torch.bool)
    assert mismatch.mismatch_metrics(*mismatch.mismatch_sums(x, x, none)) == {
        "mismatch/logprob_abs_mean": 0.0,
        "mismatch/logprob_abs_max": 0.0,
        "mismatch/ratio_mean": 1.0,
        "mismatch/kl": 0.0,
    }
    ids = torch.zeros(2, dtype=torch.int64)
    factors, counts = mismatch.mismatch_factors(x, x, none, ids, weight="sequence", keep="sequence")
    assert factors.tolist() == [0, 0] and counts.tolist() == [0, 0, 0]
    empty = torch.zeros(0)
    assert mismatch.mismatch_factors(empty, empty, none[:0], ids[:0], weight="token")[0].tolist() == []
    with pytest.raises(ValueError, match="cap: must be > 0"):
        mismatch.mismatch_factors(x, x, none, ids, cap=0.0)
