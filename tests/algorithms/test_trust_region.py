"""Trust-region masking against a loop of the paper's formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.losses import loss_metrics, policy_loss
from megarl.algorithms.methods.trust_region import trust_region
from tests.algorithms.loops import Batch, batches, loop_weights
from tests.algorithms.test_losses import LIMIT, weights_of
from tests.methods import refusal

# Options for tests/parallel/test_invariance.py, with which some responses are accepted.
FOR_RANDOM_RATIOS = {"trust_region": {"max_kl": 0.3}}


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([(0.05, 0.0), (0.0, 0.04), (0.3, 0.04), (1e-9, 0.0), (9.0, 9.0)]))
def test_equals_the_formula(batch: Batch, bounds: tuple[float, float]) -> None:
    """The loss is -(1/N) sum_i M_i sum_t r_t A_t / L, with L the constant of the aggregation.

    N counts rejected responses, whose gradient is 0."""
    e, (max_kl, mean_kl) = batch.experience, bounds
    weights = loop_weights(batch, "constant", batch.include.tolist(), LIMIT)
    logprobs = e["logprobs"].clone().requires_grad_()
    loss, stats = policy_loss(
        *(logprobs, e["old_logprobs"], e["advantages"], weights_of(e, batch.include, "constant"), 0.2, 0.2),
        surrogate=trust_region,
        options={"max_kl": max_kl, "mean_kl": mean_kl},
        sequence_ids=e.sequence_ids,
    )
    [gradient] = torch.autograd.grad(loss, logprobs)
    new, old, advantages = (e[name].tolist() for name in ("logprobs", "old_logprobs", "advantages"))
    slopes, accepted = [0.0] * batch.total, 0
    for (start, end), counts in zip(batch.spans, batch.include.tolist(), strict=True):
        d = [new[t] - old[t] for t in range(start, end)]
        largest = max(x * x / 2 for x in d)
        mean = math.fsum(math.exp(x) - 1 - x for x in d) / len(d)
        if counts and (not max_kl or largest <= max_kl) and (not mean_kl or mean <= mean_kl):
            accepted += 1
            for t, x in zip(range(start, end), d, strict=True):
                slopes[t] = -math.exp(x) * advantages[t] / (sum(batch.include.tolist()) * LIMIT)
                assert weights[t] == pytest.approx(1 / (sum(batch.include.tolist()) * LIMIT))
    assert float(loss.detach()) == pytest.approx(math.fsum(slopes), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=1e-12)
    included = sum(batch.include.tolist())
    assert loss_metrics(stats)["policy/accepted_responses"] == pytest.approx(accepted / max(included, 1))


def test_it_needs_a_bound_and_the_policy_that_sampled() -> None:
    assert "max_kl: must be > 0 if mean_kl is 0" in refusal("trust_region", "algorithm.trust_region.max_kl=0")
    expected = "algorithm.old_logprobs: must be engine for algorithm.surrogate trust_region, whose ratio is"
    assert expected in refusal("trust_region", "algorithm.old_logprobs=trainer")
