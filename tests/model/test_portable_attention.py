"""Packed attention: buckets of similar lengths give the results of each sequence alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.model.portable import MAX_PADDING, PackedAttention, PackedPlan, plan_attention


def unscaled() -> PackedAttention:
    """Make an attention that needs neither Megatron's configuration nor its groups."""
    attention = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(attention)
    attention.scale = None
    return attention


def make_cu_seqlens(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=40))
def test_plan_covers_every_token_once(lengths: list[int]) -> None:
    cu_seqlens = make_cu_seqlens(lengths)
    plan = plan_attention(cu_seqlens, torch.device("cpu"))
    places = plan.packed_from_padded
    assert places.unique().numel() == sum(lengths), "two tokens share a place"
    assert torch.equal(plan.padded_from_packed[places], torch.arange(sum(lengths)))
    padded = sum(bucket.rows * bucket.width for bucket in plan.buckets)
    assert padded == plan.padded_from_packed.numel() <= sum(lengths) / (1 - MAX_PADDING) + 1e-9


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.sampled_from([(4, 4), (4, 2), (6, 1)]))
def test_equals_one_by_one(lengths: list[int], heads: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(len(lengths))
    total, width = sum(lengths), 8
    query, key, value = (
        torch.randn(total, 1, n, width, generator=g).requires_grad_() for n in (heads[0], heads[1], heads[1])
    )
    packed = PackedPlan.make(make_cu_seqlens(lengths), torch.device("cpu"))
    attention = unscaled()
    found = attention(query, key, value, None, packed_seq_params=packed)
    factors = torch.randn(found.shape, generator=g)
    grads = torch.autograd.grad((found * factors).sum(), (query, key, value))

    rows = []
    for part in torch.arange(total).split(lengths):
        q, k, v = (x[part, 0].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(heads[0] // heads[1], 0) for x in (k, v))
        mask = torch.ones(len(part), len(part), dtype=torch.bool).tril()
        rows.append(
            (F.softmax((q @ k.mT / width**0.5).masked_fill(~mask, -torch.inf), -1) @ v)
            .transpose(0, 1)
            .flatten(1)
        )
    expected = torch.cat(rows)[:, None]
    assert torch.allclose(found, expected, atol=1e-5)
    for mine, exact in zip(
        grads, torch.autograd.grad((expected * factors).sum(), (query, key, value)), strict=True
    ):
        assert torch.allclose(mine, exact, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=5)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([(4, 4), (6, 2)]),
    st.sampled_from([1, 60, 2**22]),
)
def test_a_shared_prompt_is_attended_to_by_each_response(
    families: list[tuple[int, list[int]]], heads: tuple[int, int], at_once: int
) -> None:
    """Outputs and gradients match those with a copy of the prompt before each response.

    The number of pairs that are masked at once does not matter."""
    g = torch.Generator().manual_seed(1 + len(families))
    # For each sequence: its tokens in the pack, the start of its prompt, and the prompt tokens it shares.
    lengths, begins, skipped, columns, total = [], [], [], [], 0
    for prompt, responses in families:
        begin = total
        for n, response in enumerate(responses):
            own = prompt + response if n == 0 else response
            lengths.append(own)
            begins.append(begin)
            skipped.append(prompt if n else 0)
            before = list(range(begin, begin + prompt)) if n else []
            columns.append((before, list(range(total, total + own))))
            total += own
    query, key, value = (
        torch.randn(total, 1, n, 8, generator=g).requires_grad_() for n in (heads[0], heads[1], heads[1])
    )
    prompts = (torch.tensor(begins), torch.tensor(skipped))
    packed = PackedPlan.make(make_cu_seqlens(lengths), torch.device("cpu"), prompts=prompts)
    assert packed.plan.packed_from_padded.unique().numel() == total
    attention = unscaled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.model.portable.MASK", at_once)
        found = attention(query, key, value, None, packed_seq_params=packed)
    factors = torch.randn(found.shape, generator=g)
    grads = torch.autograd.grad((found * factors).sum(), (query, key, value))

    rows = []
    for before, own in columns:
        q = query[own, 0].transpose(0, 1)
        k, v = (x[before + own, 0].transpose(0, 1) for x in (key, value))
        k, v = (x.repeat_interleave(heads[0] // heads[1], 0) for x in (k, v))
        seen = torch.arange(len(before + own)) <= len(before) + torch.arange(len(own))[:, None]
        weights = F.softmax((q @ k.mT / 8**0.5).masked_fill(~seen, -torch.inf), -1)
        rows.append((weights @ v).transpose(0, 1).flatten(1))
    expected = torch.cat(rows)[:, None]
    assert torch.allclose(found, expected, atol=1e-5)
    exact = torch.autograd.grad((expected * factors).sum(), (query, key, value))
    for mine, own_grad in zip(grads, exact, strict=True):
        assert torch.allclose(mine, own_grad, atol=1e-5)
