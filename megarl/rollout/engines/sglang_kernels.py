"""Kernels in plain torch for SGLang 0.5.23 on CPUs without AMX.

Docstrings name the callers. SGLang's processes import this before sglang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.model.delta_net import convolve, delta_rule, delta_step, gated_norm, gates


def assign_req_to_token_pool_cpu(
    requests: Tensor, pool: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, pool_len: int
) -> None:
    """Write requests' new cache slots, concatenated in `slots`, into their rows of `pool`.

    srt/mem_cache/allocation.py, assign_req_to_token_pool_func"""
    offset = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        pool[row, start:end] = slots[offset : offset + end - start].to(pool.dtype)
        offset += end - start


# Linear attention (model/delta_net.py). A batch concatenates requests. Each request has a slot in two pools:
# the newest inputs of its convolution [slots, channels, width - 1], and the state of the delta rule,
# transposed [slots, heads, dv, dk].


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Any,
) -> Tensor:
    """Convolve prompts, x [channels, tokens], weight [channels, width].

    gdn_backend.py, GDNAttnBackend._convolve_prefill"""
    out = torch.empty_like(x)
    has_state = has_initial_state.tolist()
    for i, (slot, span) in enumerate(_requests(cache_indices, query_start_loc)):
        state = conv_states[slot] if has_state[i] else torch.zeros_like(conv_states[slot])
        inputs = torch.cat([state.to(x.dtype), x[:, span]], 1)
        out[:, span] = convolve(inputs.T[None], weight[:, None])[0, state.shape[1] :].T
        conv_states[slot] = inputs[:, -state.shape[1] :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: Tensor, conv_states: Tensor, weight: Tensor, bias: None, activation: str, *, conv_state_indices: Tensor
) -> Tensor:
    """Convolve a token per request, x [requests, channels]. GDNAttnBackend.forward_decode"""
    inputs = torch.cat([conv_states[conv_state_indices].to(x.dtype), x[..., None]], 2)
    conv_states[conv_state_indices] = inputs[..., 1:].to(conv_states.dtype)
    return convolve(inputs.mT, weight[:, None])[:, -1]


def fused_gdn_gating_cpu(rate: Tensor, alpha: Tensor, beta: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return `gates` of prompts, [1, tokens, heads] each. GDNAttnBackend._prefill_gates"""
    decay, write_strength = gates(alpha, beta, rate, bias)
    return decay[None], write_strength[None]


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None, None]:
    """Apply `delta_rule` to prompts, [1, tokens, heads, ...] each. TritonGDNKernel.extend"""
    out = torch.empty_like(v)
    for slot, span in _requests(initial_state_indices, cu_seqlens):
        query, key, value, decay, write_strength = (part[:, span] for part in (q, k, v, g, beta))
        old_state = initial_state[None, slot].mT.float()
        out[:, span], state = delta_rule(query, key, value, decay, write_strength, old_state)
        initial_state[slot] = state[0].mT.to(initial_state.dtype)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """Apply `delta_step` to a token per request, [1, requests, heads, ...]. TritonGDNKernel.decode"""
    state = initial_state_source[initial_state_indices].mT.float()
    out, state = delta_step(state, q[0], k[0], v[0], *gates(a, b, A_log, dt_bias))
    initial_state_source[initial_state_indices] = state.mT.to(initial_state_source.dtype)
    return out[None]


def _requests(slots: Tensor, bounds: Tensor) -> Iterator[tuple[int, slice]]:
    for slot, interval in zip(slots.tolist(), pairwise(bounds.tolist()), strict=True):
        yield slot, slice(*interval)


# Layers of srt/models/qwen3_5.py.


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, heads: int, dk: int, dv: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs of the convolution, gates [tokens, heads, dv], beta and alpha.

    Qwen3_5GatedDeltaNet.forward"""
    value_size = heads * dv
    mixed, gate = qkvz.split([2 * key_heads * dk + value_size, value_size], -1)
    beta, alpha = ba.chunk(2, -1)
    return mixed.contiguous(), gate.unflatten(-1, (heads, dv)), beta.contiguous(), alpha.contiguous()


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float, head_dim: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalised queries and keys, and the gates, which follow each head's queries in `q_gate`.

    Qwen3_5AttentionDecoderLayer.forward_prepare_fused_gate"""

    def normalise(x: Tensor, weight: Tensor) -> Tensor:
        out = F.rms_norm(x.float(), (head_dim,), eps=epsilon) * (1 + weight.float())
        return out.to(x.dtype).flatten(1)

    q, gate = q_gate.unflatten(-1, (heads, 2 * head_dim)).chunk(2, -1)
    return normalise(q, q_weight), normalise(k.unflatten(-1, (-1, head_dim)), k_weight), gate.flatten(1)


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Gate attention's output in place. Qwen3_5AttentionDecoderLayer.self_attention"""
    x.mul_(gate.sigmoid())


def forward_gated_norm(module: Any, x: Tensor, z: Tensor) -> Tensor:
    """Apply the gated norm.

    sglang/kernels/ops/attention/fla: layernorm_gated.py, RMSNorm.forward; fused_norm_gate.py,
    FusedRMSNormGated.forward"""
    return gated_norm(x, z, module.weight, module.eps)


def add_shared_expert(hidden: Tensor, gate_weight: Tensor, shared: Tensor, routed: Tensor) -> None:
    """Add the shared expert's gated output to `routed`, [tokens, hidden] each.

    srt/models/qwen2_moe.py, fused_gate_sigmoid_mul_add"""
    routed.add_((hidden @ gate_weight).sigmoid()[:, None] * shared)


# Speculative decoding by chains: a request's tokens in a row, the last accepted one and those of the draft.


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, pool: Tensor, lengths: Tensor, slots: Tensor, pool_len: int, topk: int, steps: int
) -> None:
    """Read the cache slots of `steps` draft tokens after each request's tokens into `slots`.

    kernels/ops/speculative/cache_locs.py, assign_draft_cache_locs_contiguous_func"""
    columns = lengths[:, None] + torch.arange(topk * steps)
    slots.copy_(pool[requests[:, None], columns].flatten())


def assign_extend_cache_locs_cpu(
    requests: Tensor, pool: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, pool_len: int
) -> None:
    """Read the cache slots of positions `starts` to `ends` into `slots`.

    kernels/ops/speculative/cache_locs.py, assign_extend_cache_locs_func"""
    rows = zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True)
    slots.copy_(torch.cat([pool[row, start:end] for row, start, end in rows]))


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    chosen: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    steps: int,
    width: int,
    mask_mode: int,
) -> None:
    """Describe chains: each token follows the one before it, and has no sibling.

    kernels/ops/speculative/spec_tree.py, build_tree_kernel_efficient_func. With topk 1 attention needs no
    mask."""
    if topk != 1:
        raise NotImplementedError("trees of drafts on a CPU (set speculative_eagle_topk to 1)")
    offsets = torch.arange(width)
    positions.copy_((lengths[:, None] + offsets).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.where(offsets < width - 1, offsets + 1, -1).expand_as(next_token))
    next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept the first drafts of each chain that equal the target's tokens, and the target's next token.

    kernels/ops/speculative/spec_tree.py, verify_tree_greedy_func"""
    matches = (candidates[:, 1:] == target_predict[:, :-1]).long().cumprod(1)
    accept_token_num.copy_(matches.sum(1))
    predicts.copy_(target_predict.flatten())
    depth = accept_index.shape[1]
    is_accepted = torch.arange(depth) <= accept_token_num[:, None]
    accept_index.copy_(torch.where(is_accepted, retrive_index[:, :depth], -1))


def copy_all_layer_kv_cache_cpu(buffers: Tensor, strides: Tensor, target: Tensor, source: Tensor) -> None:
    """Move cache slots of accepted tokens: a chain's are in place. kernels/ops/kvcache/cache_move.py"""
    if not torch.equal(target, source):
        raise NotImplementedError("cache slots of a tree of drafts on a CPU")


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    """Read the last accepted token of each request. kernels/ops/speculative/eagle.py"""
    bonus.copy_(tokens.view(-1, stride).gather(1, lengths[:, None].long() - 1)[:, 0])


# OPS are added to torch.ops.sgl_kernel. convert_weight_packed must be missing there, because SGLang takes it
# as a sign of AMX (srt/utils/common.py).
MODULES: dict[str, dict[str, Callable[..., Any]]] = {
    "sgl_kernel": {
        "assign_req_to_token_pool_cpu": assign_req_to_token_pool_cpu,
        "assign_draft_cache_locs_contiguous_cpu": assign_draft_cache_locs_contiguous_cpu,
        "assign_extend_cache_locs_cpu": assign_extend_cache_locs_cpu,
        "build_tree_kernel_efficient_cpu": build_tree_kernel_efficient_cpu,
        "verify_tree_greedy_cpu": verify_tree_greedy_cpu,
        "copy_all_layer_kv_cache_cpu": copy_all_layer_kv_cache_cpu,
        "fill_bonus_tokens_cpu": fill_bonus_tokens_cpu,
    },
    "sgl_kernel.mamba": {
        "causal_conv1d_fn_cpu": causal_conv1d_fn_cpu,
        "causal_conv1d_update_cpu": causal_conv1d_update_cpu,
        "chunk_gated_delta_rule_cpu": chunk_gated_delta_rule_cpu,
    },
}
OPS: dict[str, Callable[..., Any]] = {
    "fused_gdn_gating_cpu": fused_gdn_gating_cpu,
    "fused_sigmoid_gating_delta_rule_update_cpu": fused_sigmoid_gating_delta_rule_update_cpu,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": fused_qkvzba_split_reshape_cat_contiguous_cpu,
    "fused_qk_gemma_rmsnorm_with_gate_cpu": fused_qk_gemma_rmsnorm_with_gate_cpu,
    "fused_sigmoid_mul_cpu": fused_sigmoid_mul_cpu,
}
