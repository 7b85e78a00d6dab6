"""megarl's replacements of SGLang's kernels on a CPU, against transformers' Qwen3.5 and torch.

Batched prompts run in two parts and then token by token; the reference runs each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from megarl.rollout.engines.sglang_kernels import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    build_tree_kernel_efficient_cpu,
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
    fill_bonus_tokens_cpu,
    fused_gdn_gating_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_sigmoid_mul_cpu,
    verify_tree_greedy_cpu,
)

KEY_HEADS, HEADS, DK, DV, CHANNELS, WIDTH = 2, 6, 8, 5, 7, 4
LENGTHS, NEW = (70, 3, 1, 130), 5  # tokens of prompts, and of responses
SLOTS = torch.tensor([4, 1, 5, 2], dtype=torch.int32)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def part(whole: list[Tensor], first: int, last: int) -> Tensor:
    """Join tokens `first` to `last` of each prompt that has them."""
    return torch.cat([x[first : min(last, n)] for x, n in zip(whole, LENGTHS, strict=True) if n > first])


def places(first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return the slots of these prompts, and their bounds in `part`."""
    lengths = [min(last, n) - first for n in LENGTHS if n > first]
    mine = torch.tensor([n > first for n in LENGTHS])
    return SLOTS[mine], torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def token(whole: list[Tensor], t: int) -> Tensor:
    """Return token `t` of each response."""
    return torch.stack([x[n + t] for x, n in zip(whole, LENGTHS, strict=True)])


def test_the_convolution_goes_on(generator: torch.Generator) -> None:
    weight = torch.randn(CHANNELS, WIDTH, generator=generator)
    whole = [torch.randn(n + NEW, CHANNELS, generator=generator) for n in LENGTHS]
    padded = [F.pad(x.T[None], (WIDTH - 1, 0)) for x in whole]
    expected = [F.silu(F.conv1d(x, weight[:, None], groups=CHANNELS))[0].T for x in padded]
    states = torch.full((6, CHANNELS, WIDTH - 1), torch.nan)  # values of earlier requests
    for first, last in ((0, 2), (2, 1000)):
        slots, bounds = places(first, last)
        out = causal_conv1d_fn_cpu(
            part(whole, first, last).T,
            weight,
            None,
            activation="silu",
            conv_states=states,
            has_initial_state=torch.full(slots.shape, first > 0),
            cache_indices=slots,
            query_start_loc=bounds,
            seq_lens_cpu=None,
        )
        assert torch.allclose(out.T, part(expected, first, last), atol=1e-6)
    for t in range(NEW):
        out = causal_conv1d_update_cpu(
            token(whole, t), states, weight, None, "silu", conv_state_indices=SLOTS
        )
        assert torch.allclose(out, token(expected, t), atol=1e-6)


def test_the_delta_rule_goes_on(generator: torch.Generator) -> None:
    shapes = ((KEY_HEADS, DK), (KEY_HEADS, DK), (HEADS, DV), (HEADS,), (HEADS,))
    whole = [[torch.randn(n + NEW, *shape, generator=generator) for n in LENGTHS] for shape in shapes]
    rate, bias = torch.randn(2, HEADS, generator=generator)
    expected = []
    for query, key, value, alpha, beta in zip(*whole, strict=True):
        shared = [x.repeat_interleave(HEADS // KEY_HEADS, 1)[None] for x in (query, key)]
        decay = -rate.exp() * F.softplus(alpha + bias)
        rule: Any = theirs.torch_recurrent_gated_delta_rule
        rest = (value[None], decay[None], beta.sigmoid()[None], None, False)
        expected.append(rule(*shared, *rest, use_qk_l2norm_in_kernel=True)[0][0])
    states = torch.randn(6, HEADS, DV, DK, generator=generator)
    states[SLOTS.long()] = 0  # as SGLang initialises new requests
    others = states[[0, 3]].clone()
    for first, last in ((0, 66), (66, 1000)):
        slots, bounds = places(first, last)
        query, key, value, alpha, beta = (part(x, first, last) for x in whole)
        decay, written = fused_gdn_gating_cpu(rate, alpha, beta, bias)
        out, *_ = chunk_gated_delta_rule_cpu(
            q=query[None],
            k=key[None],
            v=value[None],
            g=decay,
            beta=written,
            initial_state=states,
            initial_state_indices=slots,
            cu_seqlens=bounds,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
        )
        assert torch.allclose(out[0], part(expected, first, last), atol=1e-5)
    for t in range(NEW):
        query, key, value, alpha, beta = (token(x, t) for x in whole)
        out = fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=rate,
            dt_bias=bias,
            q=query[None],
            k=key[None],
            v=value[None],
            a=alpha,
            b=beta,
            initial_state_source=states,
            initial_state_indices=SLOTS,
            cu_seqlens=torch.arange(5),
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
        )
        assert torch.allclose(out[0], token(expected, t), atol=1e-5)
    assert torch.equal(states[[0, 3]], others)


def test_what_is_projected_is_taken_apart(generator: torch.Generator) -> None:
    """SGLang's order: queries, keys, values and gates of all heads; beta, then alpha."""
    sizes = (KEY_HEADS * DK, KEY_HEADS * DK, HEADS * DV, HEADS * DV)
    projected = [torch.randn(3, size, generator=generator) for size in (*sizes, HEADS, HEADS)]
    mixed, gate, beta, alpha = fused_qkvzba_split_reshape_cat_contiguous_cpu(
        torch.cat(projected[:4], -1), torch.cat(projected[4:], -1), KEY_HEADS, HEADS, DK, DV
    )
    assert torch.equal(mixed, torch.cat(projected[:3], -1))
    assert torch.equal(gate, projected[3].view(3, HEADS, DV))
    assert torch.equal(beta, projected[4]) and torch.equal(alpha, projected[5])


def test_gated_attention(generator: torch.Generator) -> None:
    """Each head has its queries, then its gates; norm weights are offsets from 1."""
    heads, kv_heads, head_dim = 3, 2, 4
    queries, gates = torch.randn(2, 5, heads, head_dim, generator=generator)
    keys = torch.randn(5, kv_heads, head_dim, generator=generator)
    weights = 0.1 * torch.randn(2, head_dim, generator=generator)
    norms = [theirs.Qwen3_5RMSNorm(head_dim, eps=1e-6) for _ in weights]
    for norm, weight in zip(norms, weights, strict=True):
        norm.weight.data.copy_(weight)
    q, k, gate = fused_qk_gemma_rmsnorm_with_gate_cpu(
        torch.cat([queries, gates], -1).flatten(1), keys.flatten(1), *weights, 1e-6, head_dim, heads
    )
    assert torch.allclose(q, norms[0](queries).flatten(1), atol=1e-6)
    assert torch.allclose(k, norms[1](keys).flatten(1), atol=1e-6)
    assert torch.equal(gate, gates.flatten(1))
    out = q.clone()
    fused_sigmoid_mul_cpu(out, gate)
    assert torch.equal(out, q * gate.sigmoid())


def verify(drafts: list[list[int]], target: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Describe chains and verify them, as SGLang does."""
    candidates, requests, width = torch.tensor(drafts), len(drafts), len(drafts[0])
    positions = torch.empty(requests * width, dtype=torch.long)
    index, following, sibling = torch.full((3, requests, width), -1)
    lengths = torch.arange(5, 5 + requests)
    build_tree_kernel_efficient_cpu(
        torch.empty(0), torch.empty(0), lengths, torch.empty(0), positions, index, following, sibling,
        1, width - 1, width, 1,
    )  # fmt: skip
    assert positions.view(requests, width).tolist() == [
        list(range(length, length + width)) for length in lengths.tolist()
    ]
    predict = torch.zeros(requests * width, dtype=torch.int32)
    accepted = torch.full((requests, width), -1, dtype=torch.int32)
    counts = torch.empty(requests, dtype=torch.int32)
    verify_tree_greedy_cpu(
        predicts=predict,
        accept_index=accepted,
        accept_token_num=counts,
        candidates=candidates,
        retrive_index=index,
        retrive_next_token=following,
        retrive_next_sibling=sibling,
        target_predict=torch.tensor(target),
    )
    return predict, accepted, counts


def test_a_chain_is_accepted_up_to_its_first_other_token(generator: torch.Generator) -> None:
    """Against a loop: follow the chain while its next token is the one that the target samples."""
    drafts = torch.randint(2, (40, 4), generator=generator).tolist()
    target = torch.randint(2, (40, 4), generator=generator).tolist()
    predict, accepted, counts = verify(drafts, target)
    bonus = torch.empty(40, dtype=torch.int32)
    fill_bonus_tokens_cpu(predict[accepted], counts + 1, bonus, 4)
    for i, (draft, tokens) in enumerate(zip(drafts, target, strict=True)):
        expected, place = [tokens[0]], 0
        while place < 3 and draft[place + 1] == tokens[place]:
            place += 1
            expected.append(tokens[place])
        assert counts[i] == place
        rows = accepted[i, : place + 1].tolist()
        assert predict[rows].tolist() == expected and bonus[i] == expected[-1]
        assert accepted[i, place + 1 :].tolist() == [-1] * (3 - place)


def test_cache_slots_of_chains() -> None:
    pool = torch.arange(100, dtype=torch.int32).view(5, 20)
    requests, lengths = torch.tensor([3, 1]), torch.tensor([4, 7])
    for slots in (torch.empty(6, dtype=torch.long), torch.empty(6, dtype=torch.long)):
        assign_draft_cache_locs_contiguous_cpu(requests, pool, lengths, slots, 20, 1, 3)
        assert slots.tolist() == [64, 65, 66, 27, 28, 29]
        assign_extend_cache_locs_cpu(requests, pool, lengths, lengths + 3, slots, 20)
        assert slots.tolist() == [64, 65, 66, 27, 28, 29]
