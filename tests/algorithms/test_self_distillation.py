"""Losses of self-distillation against float64 loops over the formulas (SDPO, OPSD, SDFT)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.algorithms.losses import importance_weights, sampled_teacher_loss, top_k_loss

VOCAB, TOKENS = 7, 5


def make_logits() -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of the policy, and log-probs of the teacher and the old policy, [TOKENS, VOCAB]."""
    g = torch.Generator().manual_seed(3)
    policy, teacher, old = (torch.randn(TOKENS, VOCAB, generator=g, dtype=torch.float64) for _ in range(3))
    return policy.requires_grad_(), teacher.log_softmax(-1), old.log_softmax(-1)


def divergence(pi: list[float], q: list[float], alpha: float) -> float:
    """Return the divergence of two distributions, by a plain loop."""

    def kl(p: list[float], r: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(p, r, strict=True))

    if alpha in (0.0, 1.0):
        return kl(pi, q) if alpha else kl(q, pi)
    mixture = [alpha * b + (1 - alpha) * a for a, b in zip(pi, q, strict=True)]
    return alpha * kl(q, mixture) + (1 - alpha) * kl(pi, mixture)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("k", [2, VOCAB])
def test_the_divergence_equals_the_loop(alpha: float, k: int) -> None:
    """Over the teacher's top k and the rest; with k the vocabulary it is the full sum, and 0 at q = pi."""
    logits, teacher, old = make_logits()
    weights = torch.tensor([0.1, 0.0, 0.3, 0.2, 0.4], dtype=torch.float64)
    top = teacher.topk(k, -1)
    log_pi = logits.log_softmax(-1)
    of_teacher = top.values.clone()
    of_teacher[3] = -torch.inf
    labels = torch.tensor([0, 1, 2, 3, 4])
    sampled, sampled_old = (x.gather(1, labels[:, None])[:, 0] for x in (log_pi, old))
    importance = importance_weights(sampled, sampled_old, weights, 1.5)
    loss, stats = top_k_loss(log_pi.gather(1, top.indices), of_teacher, weights, alpha, importance)
    expected = 0.0
    for t in (0, 2, 4):  # the others have no weight or no teacher
        pi, q = log_pi[t].exp().tolist(), teacher[t].exp().tolist()
        tokens = top.indices[t].tolist()
        shown = [
            [p[i] for i in tokens] + ([1 - sum(p[i] for i in tokens)] if k < VOCAB else []) for p in (pi, q)
        ]
        ratio = min(math.exp(float(sampled[t] - sampled_old[t])), 1.5)
        expected += float(weights[t]) * ratio * divergence(*shown, alpha)
    assert float(loss) == pytest.approx(expected, rel=1e-6) and float(stats["policy/taught"]) == 3
    own = log_pi.detach().topk(k, -1)
    at_teacher = logits.detach().clone().requires_grad_()
    loss = top_k_loss(at_teacher.log_softmax(-1).gather(1, own.indices), own.values, weights, alpha)[0]
    (gradient,) = torch.autograd.grad(loss, at_teacher)
    assert abs(float(loss)) < 1e-9 and gradient.abs().max() < 1e-9


def test_the_sampled_form_is_the_full_gradient_on_average() -> None:
    """Averaged over all tokens by pi, its gradient and value are those of KL(pi || q)."""
    logits, teacher, _ = make_logits()
    log_pi = logits.log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(VOCAB):
        sampled = log_pi[:, token]
        weights = log_pi[:, token].exp().detach()
        importance = importance_weights(sampled, sampled, weights, 2.0)
        total = total + sampled_teacher_loss(sampled, teacher[:, token], weights, importance)[0]
    full = (log_pi.exp() * (log_pi - teacher)).sum()
    gradients = [torch.autograd.grad(term, logits, retain_graph=True)[0] for term in (total, full)]
    assert float(total.detach()) == pytest.approx(float(full.detach()), rel=1e-9)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_the_sampled_form_equals_the_loop() -> None:
    """The gradient is w min(r, cap) (log pi - log q), and none goes into the teacher."""
    log_pi = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.2, -4.0, -0.5, -3.0], dtype=torch.float64)
    teacher = torch.tensor([-0.7, -2.5, -torch.inf, -1.0], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    importance = importance_weights(log_pi, old, weights, 2.0)
    loss, stats = sampled_teacher_loss(log_pi, teacher, weights, importance)
    loss.backward()
    expected = [0.5 * math.exp(0.2) * -0.3, 0.25 * 2.0 * 0.5, 0.0, 0.0]
    assert log_pi.grad is not None and log_pi.grad.tolist() == pytest.approx(expected)
    assert float(loss.detach()) == pytest.approx(sum(expected)) and teacher.grad is None
    assert float(stats["policy/taught"]) == 2
    assert float(stats["policy/teacher_kl"]) == pytest.approx(-0.3 + 0.5)
    same = sampled_teacher_loss(log_pi, log_pi.detach(), weights, importance)[0]
    assert float(same.detach()) == 0
