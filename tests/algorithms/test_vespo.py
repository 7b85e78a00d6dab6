"""VESPO against a loop of the paper's formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from megarl.algorithms.losses import policy_loss
from megarl.algorithms.methods.vespo import vespo
from tests.algorithms.loops import Batch, batches, loop_weights
from tests.algorithms.test_losses import run, weights_of
from tests.methods import refusal

CONSTANTS = {"c1_positive": 2.0, "c2_positive": 3.0, "c1_negative": 3.0, "c2_negative": 2.0}


@settings(max_examples=40, deadline=None)
@given(batches())
def test_equals_the_formula(batch: Batch) -> None:
    """The gradient is -phi(W) A_t w_t, with W of the counted response that the token is in."""
    e = batch.experience
    weights = loop_weights(batch, "token", batch.include.tolist())
    loss, gradient, stats = run("vespo", e, weights_of(e, batch.include, "token"))
    new, old, advantages = (e[name].tolist() for name in ("logprobs", "old_logprobs", "advantages"))
    terms, slopes, kernel = [], [0.0] * batch.total, []
    for start, end in batch.spans:
        ratio = math.prod(math.exp(new[t] - old[t]) for t in range(start, end))
        for t in range(start, end):
            if weights[t]:
                c1, c2 = (2, 3) if advantages[t] >= 0 else (3, 2)
                phi = ratio**c1 * math.exp(c2 * (1 - ratio))
                slopes[t] = -weights[t] * phi * advantages[t]
                terms.append(slopes[t] * new[t])
                kernel.append(phi)
    size = math.fsum(map(abs, terms))
    assert float(loss) == pytest.approx(math.fsum(terms), abs=1e-6 * size)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=1e-12)
    assert float(stats["policy/kernel"]) == pytest.approx(math.fsum(kernel), rel=1e-9)


def kernel(ratio: float, advantage: float) -> float:
    """Return phi(W) of a response of two tokens, from the loss's gradient."""
    old = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    new = (old + math.log(ratio) / 2).requires_grad_()
    loss, _ = policy_loss(
        *(new, old, torch.full((2,), advantage), torch.ones(2), 0.2, 0.2),
        surrogate=vespo,
        options=CONSTANTS,
        sequence_ids=torch.zeros(2, dtype=torch.int64),
    )
    [gradient] = torch.autograd.grad(loss, new)
    assert float(gradient[0]) == float(gradient[1])
    return float(gradient[0]) / -advantage


def test_the_kernel_is_one_on_policy_and_has_the_papers_maxima() -> None:
    assert kernel(1.0, 1.0) == kernel(1.0, -1.0) == 1.0
    assert kernel(2 / 3, 1.0) == pytest.approx(1.208, abs=5e-4)
    assert kernel(3 / 2, -1.0) == pytest.approx(1.242, abs=5e-4)
    for sign, best in ((1.0, 2 / 3), (-1.0, 3 / 2)):
        assert kernel(best, sign) > max(kernel(0.98 * best, sign), kernel(1.02 * best, sign))


def test_far_responses_have_a_small_finite_weight() -> None:
    for sign in (1.0, -1.0):
        assert 0 <= kernel(1e-12, sign) < 1e-12
        assert kernel(1e12, sign) == 0


def test_the_ratio_must_be_to_the_policy_that_sampled() -> None:
    """Another correction of the mismatch would count it twice."""
    expected = "algorithm.old_logprobs: must be engine for algorithm.surrogate vespo, whose ratio is to"
    assert expected in refusal("vespo", "algorithm.old_logprobs=trainer")
    assert "algorithm.mismatch: has nothing to correct" in refusal("vespo", "algorithm.mismatch.weight=token")
