"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens per matrix product
EPSILON = 1e-6  # in the norms of queries and keys


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Apply a causal convolution and SiLU: x [rows, tokens, channels], weight [channels, 1, width]."""
    width = weight.shape[2]
    out = F.conv1d(F.pad(x.transpose(1, 2), (width - 1, 0)), weight, groups=len(weight))
    return F.silu(out).transpose(1, 2)


def gates(alpha: Tensor, beta: Tensor, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay of the state and the strength beta of the write, float32 [..., heads] each.

    log_rate, bias: A_log and dt_bias [heads]."""
    # torch's softplus and sigmoid round a CPU tensor's last elements differently, so a token's value would
    # depend on the tokens after it.
    softplus = -F.logsigmoid(-(alpha.float() + bias))
    return -log_rate.float().exp() * softplus, F.logsigmoid(beta.float()).exp()


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to the state S [dk, dv] of each head (equation 10, transposed):

        S_t = e^g_t (S_t-1 - beta_t k_t k_t^T S_t-1) + beta_t k_t v_t^T,   o_t = S_t^T q_t / sqrt(dk)

    with queries and keys of norm 1. Within a chunk the recurrence is a triangular system (section 3.3).

    Args:
        query, key: [rows, t, key heads, dk]
        value: [rows, t, heads, dv]
        decay (g), beta: float32 [rows, t, heads]; a token with g = beta = 0 leaves S unchanged
        state: initial S, zero if None
    Returns outputs like value, and the final S, float32 [rows, heads, dk, dv]."""
    tokens, dtype = value.shape[1], value.dtype
    heads_per_key = value.shape[2] // key.shape[2]
    query, key = (_unit(x).repeat_interleave(heads_per_key, 2) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    chunk = min(CHUNK, tokens)
    query, key, value, decay, beta = (
        F.pad(x.float().transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, -tokens % chunk))
        .contiguous()  # else a batch of one row is multiplied in transposed form, with other rounding
        .unflatten(2, (-1, chunk))
        for x in (query, key, value, decay, beta)
    )  # [rows, heads, chunks, chunk, ...]
    decay = decay.cumsum(-1)
    is_later = torch.ones(chunk, chunk, dtype=torch.bool, device=value.device).triu(1)
    pair_decay = (decay[..., :, None] - decay[..., None, :]).masked_fill(is_later, -torch.inf).exp()
    decay_since_start, decay_until_end = decay.exp()[..., None], (decay[..., -1:] - decay).exp()[..., None]
    scaled_key = beta[..., None] * key
    # Per chunk: what its tokens write into an empty state, and what they remove from the incoming one.
    system = scaled_key @ key.mT * pair_decay
    rhs = torch.cat([beta[..., None] * value, scaled_key * decay_since_start], -1)
    writes, removals = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True).split(
        [value.shape[-1], key.shape[-1]], -1
    )
    scores, query, key, chunk_decay = (
        query @ key.mT * pair_decay,
        query * decay_since_start,
        key * decay_until_end,
        decay_since_start[..., -1:, :],
    )
    if state is None:
        state = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for n in range(value.shape[2]):
        change = writes[:, :, n] - removals[:, :, n] @ state
        outputs.append(query[:, :, n] @ state + scores[:, :, n] @ change)
        state = state * chunk_decay[:, :, n] + key[:, :, n].mT @ change
    return torch.cat(outputs, 2)[:, :, :tokens].transpose(1, 2).to(dtype), state


def delta_step(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply `delta_rule` to one token of each row and return outputs and state.

    Shapes are those of `delta_rule` without t. Sums have a fixed size, so results are batch-invariant."""
    heads_per_key = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(heads_per_key, 1)[..., None] for x in (_unit(query), _unit(key)))
    state = state * decay.exp()[..., None, None]
    change = beta[..., None] * (value.float() - (state * key).sum(-2))
    state = state + key * change[..., None, :]
    return (state * query).sum(-2).mul(query.shape[-2] ** -0.5).to(value.dtype), state


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalise each head's output and multiply it by its gate's SiLU: [..., dv] each."""
    normalised = F.rms_norm(x.float(), weight.shape, eps=epsilon).to(x.dtype)
    return (weight * normalised * F.silu(gate.float())).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
