"""Losses, gradients and statistics against float64 loops of the papers, for any micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import losses
from megarl.algorithms.losses import token_weights
from megarl.algorithms.methods.gspo import gspo
from megarl.algorithms.methods.sao import masked
from megarl.config.methods import ADVANTAGES, POLICY_LOSSES, load_function
from megarl.data.batch import TrainBatch
from tests.algorithms.loops import (
    OPTIONS,
    Batch,
    Term,
    batches,
    loop_chance,
    loop_entropy,
    loop_kl,
    loop_nll,
    loop_policy,
    loop_teacher,
    loop_value,
    loop_weights,
    make_batch,
)

LOW, HIGH, CLIP, DUAL, LIMIT = 0.2, 0.28, 0.5, 1.5, 30
AGGREGATIONS = st.sampled_from(["token", "sample", "constant"])
TOP_K = ("dppo_tv, top k", "dppo_kl, top k")
# Test name -> surrogate, dual clip, and whether it sees further tokens.
SURROGATES: dict[str, tuple[Any, ...]] = {
    **{name: (name[:7], 0.0, True) for name in TOP_K},
    "policy": ("ppo", 0.0),
    "dual": ("ppo", DUAL),
    "gspo": ("gspo", 0.0),
    "cispo": ("cispo", 0.0),
    "masked": ("masked", 0.0),
    **{kind: (kind, 0.0) for kind in ("dppo_tv", "dppo_kl", "sapo", "clip_cov", "kl_cov")},
    "fipo": ("fipo", DUAL),
}
# Of these, test_NAME.py has the formula. The other tests here are the same for all.
OF_OTHER_FILES = sorted(set(POLICY_LOSSES) - {kind for kind, *_ in SURROGATES.values()})
SURROGATES |= {name: (name, 0.0) for name in OF_OTHER_FILES}
INPUTS = {
    **dict.fromkeys(SURROGATES, ("logprobs", "old_logprobs", "advantages")),
    **dict.fromkeys(
        TOP_K, ("logprobs", "old_logprobs", "advantages", "further_logprobs", "further_old_logprobs")
    ),
    "entropy": ("entropy",),
    "nll": ("logprobs",),
    "kl": ("logprobs", "ref_logprobs"),
    "kl, k2": ("logprobs", "ref_logprobs"),
    "teacher": ("several", "teacher_logprobs"),
    "value": ("values", "old_values", "returns"),
    "chance": ("values", "successes"),
}
Loss = Callable[[TrainBatch, Tensor], tuple[Tensor, losses.Stats]]


def surrogate(name: str) -> Loss:
    kind, dual, *further = SURROGATES[name]
    row = POLICY_LOSSES[kind]
    defaults = {option.key.partition(".")[2]: option.default for option in row.options}
    return lambda e, w: losses.policy_loss(
        *(e["logprobs"], e["old_logprobs"], e["advantages"], w, LOW, HIGH),
        entropy=e["entropy"],
        surrogate=load_function(row.function),
        options=OPTIONS.get(kind, defaults),
        dual_clip=dual,
        sequence_ids=e.sequence_ids,
        selected=e["selected"].bool() if row.selector else None,
        top_k_logprobs=(e["further_logprobs"], e["further_old_logprobs"]) if further else None,
    )


LOSSES: dict[str, Loss] = {
    **{name: surrogate(name) for name in SURROGATES},
    "entropy": lambda e, w: losses.entropy_loss(e["entropy"], w),
    "nll": lambda e, w: losses.nll_loss(e["logprobs"], w),
    "kl": lambda e, w: losses.kl_loss(e["logprobs"], e["ref_logprobs"], w),
    "kl, k2": lambda e, w: losses.kl_loss(e["logprobs"], e["ref_logprobs"], w, "k2"),
    "teacher": lambda e, w: losses.top_k_loss(e["several"], e["teacher_logprobs"], w),
    "value": lambda e, w: losses.value_loss(e["values"], e["old_values"], e["returns"], w, CLIP),
    "chance": lambda e, w: losses.chance_loss(e["values"], e["successes"], w),
}
TERMS = pytest.mark.parametrize("term", list(LOSSES))
OF_THIS_FILE = sorted(set(LOSSES) - set(OF_OTHER_FILES))


def run(term: str, experience: TrainBatch, weights: Tensor) -> tuple[Tensor, Tensor, losses.Stats]:
    """Return the loss, its gradient by the new log-probs or values, and the statistics."""
    new = experience[INPUTS[term][0]].detach().clone().requires_grad_()
    e = TrainBatch(
        experience.tokens,
        experience.cu_seqlens,
        experience.response_mask,
        experience.columns | {INPUTS[term][0]: new},
    )
    loss, stats = LOSSES[term](e, weights)
    loss.backward()
    return loss.detach(), new.grad, stats


def weights_of(e: TrainBatch, include: Tensor, aggregation: str) -> Tensor:
    return e.spread(token_weights(e.response_lengths, aggregation, include=include, constant=LIMIT))


def reference(term: str, batch: Batch, weights: list[float]) -> tuple[Term, dict[str, float]]:
    if term in SURROGATES:
        expected, stats = loop_policy(batch, weights, LOW, HIGH, *SURROGATES[term])
        return expected, {f"policy/{k}": v for k, v in stats.items()}
    if term == "value":
        expected, clipped = loop_value(batch, weights, CLIP)
        return expected, {"value/clip_fraction": clipped, "value/tokens": float(sum(w > 0 for w in weights))}
    if term == "teacher":
        expected, stats = loop_teacher(batch, weights)
        return expected, {f"policy/{k}": v for k, v in stats.items()}
    if term == "chance":
        return loop_chance(batch, weights), {"value/tokens": float(sum(w > 0 for w in weights))}
    if term == "kl, k2":
        return loop_kl(batch, weights, "k2"), {}
    return {"nll": loop_nll, "kl": loop_kl, "entropy": loop_entropy}[term](batch, weights), {}


@pytest.mark.parametrize("term", OF_THIS_FILE)
@settings(max_examples=20, deadline=None)
@given(
    batch=batches(),
    aggregation=AGGREGATIONS,
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_the_formula(term, batch, aggregation, dtype):
    """Loss, gradient at every token, and statistics. The loop reads the same rounded numbers."""
    e = batch.experience
    for name, column in e.columns.items():
        e[name] = column.to(dtype)
    loss, gradient, stats = run(term, e, weights_of(e, batch.include, aggregation))
    expected, sums = reference(term, batch, loop_weights(batch, aggregation, batch.include.tolist(), LIMIT))
    assert loss.dtype == dtype
    assert float(loss) == pytest.approx(expected.loss, abs=1e-6 * expected.size)
    torch.testing.assert_close(
        gradient.double(), torch.tensor(expected.gradient, dtype=torch.float64), rtol=1e-6, atol=1e-12
    )
    names = {**dict.fromkeys(SURROGATES, "policy/loss"), "value": "value/loss", "chance": "value/loss"}
    loss_name = names.get(term, f"policy/{term.partition(',')[0]}_loss")
    assert {k: float(v) for k, v in stats.items()} == pytest.approx(
        sums | {loss_name: expected.loss}, rel=1e-6, abs=1e-6 * expected.size
    )


@TERMS
@settings(max_examples=12, deadline=None)
@given(
    batch=batches(),
    aggregation=AGGREGATIONS,
    random=st.randoms(use_true_random=False),
)
def test_micro_batches_and_ranks_add_up(term, batch, aggregation, random):
    """Three parts in shuffled order; some are empty or have no included response."""
    e = batch.experience
    e["at"], e["weights"] = torch.arange(e.num_tokens), weights_of(e, batch.include, aggregation)
    loss, gradient, stats = run(term, e, e["weights"])
    order = list(range(e.num_sequences))
    random.shuffle(order)
    parts = [e.select(order[i::3]) for i in range(3)]
    runs = [run(term, p, p["weights"]) for p in parts]
    torch.testing.assert_close(sum(r[0] for r in runs), loss, rtol=1e-9, atol=1e-12)
    for part, (_, part_gradient, _) in zip(parts, runs, strict=True):
        assert torch.equal(part_gradient, gradient[part["at"]])
    for name, value in stats.items():
        torch.testing.assert_close(sum(r[2][name] for r in runs), value, rtol=1e-9, atol=1e-9)


@TERMS
@pytest.mark.parametrize("garbage", [torch.inf, -torch.inf, torch.nan, 1e30])
def test_garbage_on_tokens_of_weight_zero_changes_nothing(term, garbage):
    batch = make_batch([(3, 5), (2, 1), (1, 9)], 3, [True, False, True])
    e = batch.experience
    weights = weights_of(e, batch.include, "token")
    clean = run(term, e, weights)
    for name in (*INPUTS[term], "entropy"):
        counted = (weights > 0).view(-1, *[1] * (e[name].dim() - 1))
        e[name] = torch.where(counted, e[name], garbage)
    dirty = run(term, e, weights)
    assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[1], clean[1])
    assert {k: float(v) for k, v in dirty[2].items()} == {k: float(v) for k, v in clean[2].items()}
    of_none = dirty[1][weights == 0]
    assert torch.equal(of_none, torch.zeros_like(of_none))


@TERMS
def test_garbage_on_tokens_that_count_is_not_hidden(term):
    batch = make_batch([(3, 5)], 4, [True])
    e = batch.experience
    e[INPUTS[term][0]][4] = torch.nan
    assert not torch.isfinite(run(term, e, weights_of(e, batch.include, "token"))[0])


@TERMS
def test_no_included_response_gives_zero(term):
    """With no correct response for the NLL, or all filtered: loss 0, gradient 0, metrics 0."""
    batch = make_batch([(3, 5), (1, 1)], 5, [False, False])
    loss, gradient, stats = run(term, batch.experience, weights_of(batch.experience, batch.include, "token"))
    assert float(loss) == 0 and torch.equal(gradient, torch.zeros_like(gradient))
    assert set(losses.loss_metrics(stats).values()) == {0.0}


@TERMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_share_nothing_with_the_loss(term, dtype):
    """Megatron's schedule divides the loss in place, which must not change the statistics."""
    batch = make_batch([(3, 5), (1, 1)], 6, [True, True])
    e = batch.experience
    for name, column in e.columns.items():
        e[name] = column.to(dtype)
    e[INPUTS[term][0]].requires_grad_()
    loss, stats = LOSSES[term](e, weights_of(e, batch.include, "token"))
    before = {k: float(v) for k, v in stats.items()}
    loss.detach().div_(8)
    assert {k: float(v) for k, v in stats.items()} == before
    assert (
        not any(v.requires_grad or v.shape for v in stats.values())
        and loss.shape == ()
        and loss.requires_grad
    )


HELD = {"dppo_tv", "dppo_kl", *TOP_K}


# Losses that treat the ratio or a factor as constant are left out. kl_cov has a kink at ratio 1, and gspo has
# a separate test below.
@pytest.mark.parametrize("term", sorted(set(OF_THIS_FILE) - {"cispo", "fipo", "kl_cov", "gspo"} - HELD))
def test_gradcheck(term):
    batch = make_batch([(2, 6), (1, 3)], 7, [True, True])
    e = batch.experience
    weights = weights_of(e, batch.include, "sample")
    # Finite differences need a loss without a kink nearby. A log-ratio of exactly 0 is none (both branches
    # agree); a clip boundary is one.
    new = e[INPUTS[term][0]].clone().requires_grad_()

    def loss(x: Tensor) -> Tensor:
        columns = e.columns | {INPUTS[term][0]: x}
        return LOSSES[term](TrainBatch(e.tokens, e.cu_seqlens, e.response_mask, columns), weights)[0]

    assert torch.autograd.gradcheck(loss, (new,))


@pytest.mark.parametrize("aggregation", ["sample", "token"])
def test_gspo_of_one_advantage_a_sequence_is_gspo(aggregation: str) -> None:
    """The gradient equals that of the mean ratio's objective (arXiv 2507.18071, eq. 5 to 7)."""
    batch = make_batch([(2, 6), (1, 3)], 7, [True, True])
    e = batch.experience
    weights = weights_of(e, batch.include, aggregation)
    e["advantages"] = e.spread(torch.tensor([0.7, -1.3], dtype=torch.float64))
    of_response = [(slice(2, 8), 0.7), (slice(9, 12), -1.3)]

    def objective(new: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for span, advantage in of_response:
            s = (new - e["old_logprobs"])[span].mean().exp()
            kept = torch.minimum(s * advantage, s.clamp(1 - LOW, 1 + HIGH) * advantage)
            total = total - weights[span].double().sum() * kept
        return total

    new = e["logprobs"].clone().requires_grad_()
    expected = objective(new)
    (gradient,) = torch.autograd.grad(expected, new)
    loss, found, _ = run("gspo", e, weights)
    assert gradient.any()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-7, atol=0)
    torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-12)


def test_gspo_gives_each_token_its_own_advantage() -> None:
    """On-policy, advantages (+1, -1) move the two tokens in opposite directions.

    The clip depends on the sign of the token's advantage."""
    weights, ids = torch.tensor([0.5, 0.5]), torch.zeros(2, dtype=torch.int64)

    def gradient(advantages: list[float], moved: float) -> list[float]:
        old = torch.tensor([-1.0, -2.0], dtype=torch.float64)
        new = (old + moved).requires_grad_()
        loss, _ = losses.policy_loss(
            *(new, old, torch.tensor(advantages, dtype=torch.float64), weights, 3e-4, 4e-4),
            surrogate=gspo,
            sequence_ids=ids,
        )
        loss.backward()
        assert new.grad is not None
        return new.grad.tolist()

    assert gradient([1.0, -1.0], 0.0) == [-0.5, 0.5]
    assert gradient([1.0, -1.0], 1e-3) == pytest.approx([0.0, 0.5 * math.exp(1e-3)])
    assert gradient([1.0, -1.0], -1e-3) == pytest.approx([-0.5 * math.exp(-1e-3), 0.0])


def test_the_mask_of_sao_leaves_the_bounds_out() -> None:
    """Its interval is open (arXiv 2607.07508, eq. 3)."""
    ratio = torch.tensor([0.5, 0.75, 1.0, 2.0], dtype=torch.float64)
    t = losses.Tokens(ratio, torch.ones(4), ratio.log(), 0.5, 1.0, torch.zeros(4))
    objective, low, high, _ = masked(t)
    assert objective.tolist() == [0.0, 0.75, 1.0, 0.0]
    assert (low.tolist(), high.tolist()) == ([True, False, False, False], [False, False, False, True])


def expected_gradient(estimator: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean gradient of a KL estimate by the logits, and of the reverse and the forward KL.

    The policy and the reference are distributions over five tokens. The mean is over the policy."""
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=g, dtype=torch.float64).requires_grad_()
    ref = torch.randn(5, generator=g, dtype=torch.float64).log_softmax(-1)
    logs = logits.log_softmax(-1)
    one = torch.ones(1)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(5):
        sampled, of_ref = logs[token : token + 1], ref[token : token + 1]
        term = (
            (sampled - of_ref).sum()
            if estimator == "k1"
            else losses.kl_loss(sampled, of_ref, one, estimator)[0]
        )
        total = total + logs[token].exp().detach() * term
    directions = (logs.exp() * (logs - ref)).sum(), (ref.exp() * (ref - logs)).sum()
    return tuple(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (total, *directions))


def test_k2_has_the_gradient_of_the_reverse_kl() -> None:
    found, reverse, forward = expected_gradient("k2")
    torch.testing.assert_close(found, reverse, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found, forward, rtol=0.1)


def test_k3_has_the_gradient_of_the_forward_kl() -> None:
    found, reverse, forward = expected_gradient("k3")
    torch.testing.assert_close(found, forward, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found, reverse, rtol=0.1)


def test_k1_as_a_loss_would_teach_nothing() -> None:
    found, reverse, _ = expected_gradient("k1")
    torch.testing.assert_close(found, torch.zeros_like(reverse), rtol=0, atol=1e-12)


def top_k_term(logits: Tensor, teacher: Tensor, k: int) -> Tensor:
    """Return top_k_loss of one position."""
    return losses.top_k_loss(logits.log_softmax(-1)[None, :k], teacher[None, :k], torch.ones(1))[0]


@pytest.mark.parametrize("k", [1, 3, 6])
def test_top_k_is_least_at_the_teacher(k: int) -> None:
    """At the teacher's probabilities the term and its gradient by all logits are 0.

    Elsewhere it is positive and at most the whole KL; with k = vocabulary size it equals the KL."""
    g = torch.Generator().manual_seed(5)
    teacher = torch.randn(6, generator=g, dtype=torch.float64).log_softmax(-1).sort(descending=True).values
    at_teacher = teacher.clone().requires_grad_()
    loss = top_k_term(at_teacher, teacher, k)
    (gradient,) = torch.autograd.grad(loss, at_teacher)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-9)
    for _ in range(20):
        logits = 2 * torch.randn(6, generator=g, dtype=torch.float64)
        whole = float((teacher.exp() * (teacher - logits.log_softmax(-1))).sum())
        found = float(top_k_term(logits, teacher, k))
        assert 0 < found <= whole + 1e-9
        if k == 6:
            assert found == pytest.approx(whole, rel=1e-9)


def test_top_k_does_not_reward_probability_on_its_tokens() -> None:
    """A policy with more probability on the k tokens than the teacher loses some of it.

    This holds even where rounding leaves no probability for the other tokens."""
    teacher = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    for rest in (1e-2, 1e-9):
        share = torch.tensor([0.625 * (1 - rest), 0.375 * (1 - rest), rest / 2, rest / 2])
        logits = share.double().log().requires_grad_()
        (gradient,) = torch.autograd.grad(top_k_term(logits, teacher, 2), logits)
        assert gradient[2] < 0 and gradient[3] < 0  # descent raises the other tokens' probability


@pytest.mark.parametrize("jump", [30.0, -30.0, 1e4, -1e4])
def test_a_huge_log_ratio_is_bounded(jump):
    new = torch.tensor([-1.0], requires_grad=True)
    weights, one = torch.ones(1), torch.ones(1)
    for loss, _ in (
        losses.policy_loss(new, new.detach() - jump, -one, weights, LOW, HIGH),
        losses.kl_loss(new, new.detach() + jump, weights),
    ):
        loss.backward()
        assert torch.isfinite(loss) and abs(float(loss.detach())) < 1e9
    assert torch.isfinite(new.grad).all()


def test_clip_higher_by_hand():
    """r = 1.25 with A = 1 is clipped at 1.2 for epsilon_high 0.2 and free for 0.28.

    r = 0.7 with A = -1 is clipped at 0.8.
    """
    ratio, advantage, weights = torch.tensor([1.25, 0.7]), torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5])
    old = torch.full((2,), -1.0)
    _, narrow = losses.policy_loss(old + ratio.log(), old, advantage, weights, 0.2, 0.2)
    _, wide = losses.policy_loss(old + ratio.log(), old, advantage, weights, 0.2, 0.28)
    assert float(narrow["policy/loss"]) == pytest.approx((-1.2 + 0.8) / 2)
    assert float(wide["policy/loss"]) == pytest.approx((-1.25 + 0.8) / 2)
    assert [float(s["policy/clip_fraction_high"]) for s in (narrow, wide)] == [1, 0]
    assert [float(s["policy/clip_fraction_low"]) for s in (narrow, wide)] == [1, 1]
    # The clipped token's probability under the new policy; no mean if no token is clipped.
    assert losses.loss_metrics(narrow)["policy/clip_prob_high"] == pytest.approx(1.25 * math.exp(-1))
    assert "policy/clip_prob_high" not in losses.loss_metrics(wide)


def test_metrics_from_sums():
    sums = {
        "policy/tokens": 40.0,
        "policy/loss": torch.tensor(3.0),
        "policy/nll_loss": 1.0,
        "policy/clip_fraction_low": 4,
        "policy/clip_fraction_high": 2.0,
        "policy/clip_prob_high": torch.tensor(0.3),
        "policy/entropy": torch.tensor(20.0),
        "value/tokens": 10.0,
        "value/loss": 8.0,
        "value/clip_fraction": 1.0,
    }
    assert losses.loss_metrics(sums, updates=4) == pytest.approx(
        {
            "policy/loss": 0.75,
            "policy/nll_loss": 0.25,
            "policy/clip_fraction_low": 0.1,
            "policy/clip_fraction_high": 0.05,
            "policy/clip_prob_high": 0.15,
            "policy/entropy": 0.5,
            "value/loss": 2.0,
            "value/clip_fraction": 0.1,
        }
    )


def test_every_row_has_a_function_and_a_formula() -> None:
    for row in POLICY_LOSSES.values():
        assert callable(load_function(row.function))
        assert not row.selector or callable(load_function(row.selector))
    for row in ADVANTAGES.values():
        assert not row.function or callable(load_function(row.function))
    for name in OF_OTHER_FILES:
        assert (Path(__file__).parent / f"test_{name}.py").is_file()


def test_statistics_of_responses_are_divided_by_their_number() -> None:
    sums = {"policy/tokens": 10.0, "policy/responses": 4.0, "policy/accepted_responses": 3.0}
    assert losses.loss_metrics(sums) == {"policy/accepted_responses": 0.75}
