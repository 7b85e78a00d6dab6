"""The tokens that Clip-Cov and KL-Cov select, against loops, for any split into micro-batches.

tests/parallel/test_invariance.py checks that ranks agree on them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.losses import token_weights
from megarl.config.methods import load_function
from megarl.config.schema import AlgorithmConfig
from megarl.schedule.phases import sample_uniforms
from tests.algorithms.loops import Batch, batches, make_batch
from tests.training.test_actor_loss import ALONE, whole

SETTINGS = {"clip_low": 0.2, "clip_high": 0.28, "covariance": {"low": 0.2, "high": 1.5}}


def select(batch: Batch, surrogate: str, share: float, parts: int = 1) -> list[int]:
    """Return the selected tokens; tokens without a loss weight have NaN log-probs."""
    e, micro = batch.experience, whole(batch)
    e["policy_loss_weights"] = e.spread(token_weights(e.response_lengths, "token", include=batch.include))
    e["group_ids"] = torch.arange(e.num_sequences)
    e["response_index"] = torch.zeros(e.num_sequences, dtype=torch.int64)
    covariance = {**SETTINGS["covariance"], "share": share}
    config = AlgorithmConfig(**{**SETTINGS, "surrogate": surrogate, "covariance": covariance})
    pieces = [replace(micro, token_indices=at) for at in micro.token_indices.tensor_split(parts)]
    logprobs = torch.where(e["policy_loss_weights"] > 0, e["logprobs"], torch.nan)
    draws = sample_uniforms(e, seed=3, step=2, update=1)
    select_tokens = load_function(config.policy_loss.selector)
    options = config.arguments(config.policy_loss.selector_options)
    return select_tokens(config, e, pieces, logprobs, draws, ALONE, **options).nonzero().squeeze(-1).tolist()


def covariances(batch: Batch) -> dict[int, float]:
    """Return (A - mean A) (log p - mean log p) of each token that counts."""
    logprobs, advantages = (batch.experience[name].tolist() for name in ("logprobs", "advantages"))
    spans = zip(batch.spans, batch.include.tolist(), strict=True)
    tokens = [t for (start, end), kept in spans if kept for t in range(start, end)]
    mean_a = sum(advantages[t] for t in tokens) / max(len(tokens), 1)
    mean_p = sum(logprobs[t] for t in tokens) / max(len(tokens), 1)
    return {t: (advantages[t] - mean_a) * (logprobs[t] - mean_p) for t in tokens}


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([1e-4, 0.1, 0.5, 1.0]), st.integers(1, 4))
def test_kl_cov_takes_the_largest(batch: Batch, share: float, parts: int) -> None:
    found = covariances(batch)
    largest = sorted(found.values(), reverse=True)[: max(1, int(share * len(found)))]
    chosen = select(batch, "kl_cov", share, parts)
    # Compare values: if only two tokens count, their covariances are equal.
    assert sorted((found[t] for t in chosen), reverse=True) == pytest.approx(largest, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([1e-4, 0.1, 1.0]), st.integers(1, 4))
def test_clip_cov_takes_some_of_those_between_the_bounds(batch: Batch, share: float, parts: int) -> None:
    """It selects the configured fraction of all tokens, none that PPO clips, in any micro-batch."""
    e, found = batch.experience, covariances(batch)
    ratios = (e["logprobs"] - e["old_logprobs"]).exp().tolist()
    advantages = e["advantages"].tolist()
    clipped = {t for t in found if ratios[t] > 1.28 and advantages[t] > 0}
    clipped |= {t for t in found if ratios[t] < 0.8 and advantages[t] < 0}
    between = {t for t, value in found.items() if 0.2 < value < 1.5} - clipped
    chosen = select(batch, "clip_cov", share, parts)
    assert set(chosen) <= between
    assert len(chosen) == min(len(between), max(1, int(share * len(found))))
    assert chosen == select(batch, "clip_cov", share)


def test_draws_are_those_of_the_response_and_differ_otherwise() -> None:
    """The numbers do not depend on the order of the responses; another seed, step or update changes them."""
    e = make_batch([(2, 40), (1, 30), (4, 20)], 1).experience
    e["group_ids"], e["response_index"] = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
    draws = sample_uniforms(e, 0, 1, 1)
    e["draws"] = draws
    turned = e.select([2, 0, 1])
    assert torch.equal(sample_uniforms(turned, 0, 1, 1), turned["draws"])
    others = [sample_uniforms(e, *numbers) for numbers in ((1, 1, 1), (0, 2, 1), (0, 1, 2))]
    assert len(torch.stack([draws, *others]).unique()) == 4 * e.num_tokens
    assert float(draws.mean()) == pytest.approx(0.5, abs=0.1)
