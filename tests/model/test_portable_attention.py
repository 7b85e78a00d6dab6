"""Packed attention: buckets of like length give what each sequence alone gives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.model.portable import MAX_PADDING, PackedAttention, PackedPlan, plan_attention


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
    packed = PackedPlan.of(make_cu_seqlens(lengths), torch.device("cpu"))
    attention = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(attention)
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
