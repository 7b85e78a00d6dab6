"""The gated delta rule, in chunks and token by token, compared with the paper's recurrence in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.model.delta_net import CHUNK, convolve, delta_rule, delta_step, gates
from megarl.plan import sizes

KEY_HEADS, HEADS, DK, DV = 2, 6, 8, 5


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Compute equation 10 of arXiv 2412.06464, one token and head at a time.

    The state is S (alpha (I - beta k k^T)) + beta v k^T, and the query reads it."""
    outputs = torch.zeros_like(value)
    for row in range(value.shape[0]):
        for head in range(HEADS):
            state = value.new_zeros(DV, DK)
            for t in range(value.shape[1]):
                q, k = (x[row, t, head // (HEADS // KEY_HEADS)] for x in (query, key))
                q, k = F.normalize(q, dim=0) / DK**0.5, F.normalize(k, dim=0)
                alpha, b = decay[row, t, head].exp(), beta[row, t, head]
                erased = torch.eye(DK, dtype=value.dtype) - b * torch.outer(k, k)
                state = state @ (alpha * erased) + b * torch.outer(value[row, t, head], k)
                outputs[row, t, head] = state @ q
    return outputs


def drawn(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    query, key, value, decay, beta = (
        torch.randn(2, tokens, *shape, generator=generator, dtype=torch.float64)
        for shape in ((KEY_HEADS, DK), (KEY_HEADS, DK), (HEADS, DV), (HEADS,), (HEADS,))
    )
    return [query, key, value, -decay.abs(), beta.sigmoid()]


@pytest.mark.parametrize("tokens", [1, 7, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_chunks_are_the_recurrence(tokens: int) -> None:
    exact = [x.requires_grad_() for x in drawn(tokens)]
    single = [x.detach().float().requires_grad_() for x in exact]
    expected, (found, state) = recurrence(*exact), delta_rule(*single)
    assert (found - expected).abs().max() <= 1e-5
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    gradients = torch.autograd.grad((found * weights.float()).sum(), single)
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1)
    own, outputs = torch.zeros(2, HEADS, DK, DV), []
    for t in range(tokens):
        output, own = delta_step(own, *(x.detach()[:, t] for x in single))
        outputs.append(output)
    assert (torch.stack(outputs, 1) - expected).abs().max() <= 1e-5
    assert (own - state).abs().max() <= 1e-5


@pytest.mark.parametrize("tokens", [16, 48, CHUNK, 2 * CHUNK])
def test_a_row_is_the_same_to_the_bit_in_any_company(tokens: int) -> None:
    """A row's bits do not depend on the batch's composition.

    Sizes are such that every matrix of a batch starts at a cache line."""
    generator = torch.Generator().manual_seed(tokens)
    query, key, value, decay, beta = (
        torch.randn(7, tokens, *shape, generator=generator)
        for shape in ((2, 16), (2, 16), (4, 8), (4,), (4,))
    )
    given = [query, key, value, -decay.abs(), beta.sigmoid()]
    outputs, states = delta_rule(*given)
    for row in range(7):
        output, state = delta_rule(*(x[row : row + 1] for x in given))
        assert torch.equal(output[0], outputs[row]) and torch.equal(state[0], states[row])


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_gates_are_the_same_to_the_bit_however_many_tokens_there_are(heads: int) -> None:
    """Torch's softplus and sigmoid would fail: they compute the remainder of a vector differently."""
    generator = torch.Generator().manual_seed(0)
    alpha, beta = (4 * torch.randn(512, heads, generator=generator) for _ in range(2))
    rate, bias = (torch.randn(heads, generator=generator) for _ in range(2))
    together = gates(alpha, beta, rate, bias)
    for tokens in (1, 3, 7, 8, 16, 24, 40):
        for begin in range(0, 512 - tokens, tokens):
            here = slice(begin, begin + tokens)
            alone = gates(alpha[here].clone(), beta[here].clone(), rate, bias)
            assert all(torch.equal(one, all[here]) for one, all in zip(alone, together, strict=True))
    exact = -rate.double().exp() * F.softplus(alpha.double() + bias), beta.double().sigmoid()
    for found, expected in zip(together, exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-12)


def test_tokens_that_write_and_forget_nothing_leave_the_state() -> None:
    query, key, value, decay, beta = (x.float() for x in drawn(100))
    out, state = delta_rule(query[:, :40], key[:, :40], value[:, :40], decay[:, :40], beta[:, :40])
    decay[:, 40:], beta[:, 40:] = 0, 0
    padded, same = delta_rule(query, key, value, decay, beta)
    assert (padded[:, :40] - out).abs().max() <= 1e-6
    assert (same - state).abs().max() <= 1e-6


def test_the_convolution_looks_back_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 9, 3, generator=generator), torch.randn(3, 1, 4, generator=generator)
    expected = torch.zeros(9, 3)
    for t in range(9):
        for back in range(min(4, t + 1)):
            expected[t] += x[0, t - back] * weight[:, 0, 3 - back]
    assert (convolve(x, weight)[0] - F.silu(expected)).abs().max() <= 1e-6


def test_the_plan_knows_the_chunk() -> None:
    assert sizes.CHUNK == CHUNK
