"""The actor's whole loss against float64 loops: its terms, their factors, mismatch correction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.losses import token_weights
from megarl.config.schema import AlgorithmConfig, TeacherConfig
from megarl.data.batch import MicroBatch
from megarl.parallel.layout import Layout
from megarl.parallel.runtime import Runtime
from megarl.training.columns import correct_mismatch
from megarl.training.objectives import actor_loss
from tests.algorithms.loops import (
    OPTIONS,
    Batch,
    batches,
    loop_entropy,
    loop_kl,
    loop_nll,
    loop_policy,
    loop_teacher,
    loop_weights,
)
from tests.algorithms.test_mismatch import loop_factors

NO_GROUP: Any = None
ALONE = Runtime(Layout(), rank=0, device=torch.device("cpu"), timeout=60.0, cpu_group=NO_GROUP)


def whole(batch: Batch) -> MicroBatch:
    """Return all response tokens as one micro-batch."""
    slots = batch.experience.response_mask.nonzero().squeeze(-1)
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(none, none, None, none, none, slots, none)


def loss_of(config: AlgorithmConfig, batch: Batch, teacher: TeacherConfig | None = None) -> float:
    e, micro = batch.experience, whole(batch)
    logprobs = e["logprobs"]
    beside = []
    if config.dppo.top_k:  # token 2 is sampled, and is in the top k at every fourth position
        same = torch.arange(e.num_tokens) % 4 == 0
        e["old_top_tokens"] = torch.tensor([[7, 8, 9]]).repeat(e.num_tokens, 1).int()
        e["old_top_tokens"][same, 0] = 2
        of_both = [e[f"further_{name}"].clone() for name in ("logprobs", "old_logprobs")]
        for further, name in zip(of_both, ("logprobs", "old_logprobs"), strict=True):
            further[same, 0] = e[name][same]
        beside, e["old_top_logprobs"] = of_both[:1], of_both[1]
    if teacher is not None:
        beside.append(e["several"])
    if beside:
        micro.candidates = torch.zeros(0)
        logprobs = torch.cat([logprobs[:, None], *beside], 1)
    loss, _ = actor_loss(config, e, teacher=teacher)(
        (logprobs[micro.token_indices], e["entropy"][micro.token_indices]), micro
    )
    return float(loss)


def add_columns(batch: Batch) -> tuple[list[float], list[float]]:
    """Add policy_loss_weights and nll_loss_weights as a step does, and return the loops' values of them."""
    e = batch.experience
    e["policy_loss_weights"] = e.spread(token_weights(e.response_lengths, "token"))
    e["nll_loss_weights"] = e.spread(token_weights(e.response_lengths, "token", include=batch.include))
    everything = [True] * e.num_sequences
    return loop_weights(batch, "token", everything), loop_weights(batch, "token", batch.include.tolist())


@settings(max_examples=60, deadline=None)
@given(
    batches(),
    st.sampled_from([0.0, 0.1, 2.0]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([None, 0.0, 0.2]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["k2", "k3"]),
)
def test_is_the_weighted_sum_of_its_terms(
    batch: Batch, mu: float, beta: float, disputed: float | None, taught: bool, dppo: bool, estimator: str
) -> None:
    """VAPO eq. 10: L_PPO + mu L_NLL, plus GRPO's beta KL, an entropy term, and the KL to a teacher.

    The NLL covers only the correct responses.

    Args:
        disputed: AsyPPO's fraction of tokens without an entropy term; None disables that term.
        dppo: use DPPO's loss with the top-k tokens.
    """
    policy_loss_weights, nll_loss_weights = add_columns(batch)
    eta, of_entropy = 0.0 if disputed is None else 0.4, policy_loss_weights
    options: dict[str, Any] = {"entropy_weight": eta, "agreement": {"filter": disputed or 0.0}}
    if dppo:
        options |= {"surrogate": "dppo_kl", "dppo": {**OPTIONS["dppo_kl"], "top_k": 3}}
    config = AlgorithmConfig(
        clip_low=0.2, clip_high=0.28, nll_weight=mu, kl_weight=beta, kl_estimator=estimator, **options
    )
    if disputed:
        left_out = torch.arange(batch.total) % 3 == 1
        of_entropy = [0.0 if out else w for w, out in zip(policy_loss_weights, left_out, strict=True)]
        e = batch.experience
        e["entropy_weights"] = e["policy_loss_weights"].masked_fill(left_out, 0.0)
    policy, nll, kl, entropy = (
        loop_policy(batch, policy_loss_weights, 0.2, 0.28, config.surrogate, further=dppo)[0],
        loop_nll(batch, nll_loss_weights),
        loop_kl(batch, policy_loss_weights, estimator),
        loop_entropy(batch, of_entropy),
    )
    size = policy.size + mu * nll.size + beta * kl.size + eta * entropy.size
    expected, teacher = policy.loss + mu * nll.loss + beta * kl.loss + eta * entropy.loss, None
    if taught:
        teacher, (term, _) = TeacherConfig(top_k=3, weight=0.7), loop_teacher(batch, policy_loss_weights)
        size, expected = size + 0.7 * term.size, expected + 0.7 * term.loss
    assert loss_of(config, batch, teacher) == pytest.approx(expected, abs=1e-6 * size)


@settings(max_examples=40, deadline=None)
@given(
    batches(), st.sampled_from(["none", "token", "sequence"]), st.sampled_from(["none", "token", "sequence"])
)
def test_mismatch_reaches_policy_and_kl_alone(batch: Batch, weight: str, mask: str) -> None:
    """Entropy, a teacher's top-k term and the positive-example loss keep their weights."""
    policy_loss_weights, nll_loss_weights = add_columns(batch)
    e = batch.experience
    e["engine_logprobs"] = torch.where(e.response_mask, e["old_logprobs"] + 0.3 * e["values"], 0.0)
    options = {"weight": weight, "mask": mask, "cap": 1.2, "mask_low": 0.8, "mask_high": 1.25}
    config = AlgorithmConfig(nll_weight=0.1, kl_weight=0.3, entropy_weight=0.4, mismatch=options)
    teacher = TeacherConfig(top_k=3, weight=0.7)
    metrics = correct_mismatch(config.mismatch, e, ALONE)
    # loop_factors compares logprobs with old_logprobs, so fill these with the trainer's old and the engine's
    # log-probs.
    compared = Batch(e.select(range(e.num_sequences)), batch.spans, batch.include)
    compared.experience["logprobs"], compared.experience["old_logprobs"] = (
        e["old_logprobs"],
        e["engine_logprobs"],
    )
    factors, (tokens, truncated, masked) = loop_factors(compared, weight, 1.2, mask, (0.8, 1.25))
    weights = [w * factor for w, factor in zip(policy_loss_weights, factors, strict=True)]
    terms = (
        (1.0, loop_policy(batch, weights, 0.2, 0.2)[0]),
        (0.1, loop_nll(batch, nll_loss_weights)),
        (0.3, loop_kl(batch, weights)),
        (0.4, loop_entropy(batch, policy_loss_weights)),
        (0.7, loop_teacher(batch, policy_loss_weights)[0]),
    )
    expected, size = (
        sum(factor * x for factor, x in of)
        for of in (
            [(factor, term.loss) for factor, term in terms],
            [(factor, term.size) for factor, term in terms],
        )
    )
    assert loss_of(config, batch, teacher) == pytest.approx(expected, abs=2e-6 * size)
    off = weight == mask == "none"
    assert metrics == (
        {} if off else {"mismatch/truncated": truncated / tokens, "mismatch/masked": masked / tokens}
    )
