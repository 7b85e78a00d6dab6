"""Compute log-probabilities, entropy and top k from hidden states with a vocab-parallel head.

Logits exist for `chunk` vocabulary entries at a time: all of them would take gigabytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_start: int,
    vocab_shard_size: int,
    temperature: float,
    chunk: int,
    group: Group = None,
    sums_squares: bool = False,
) -> tuple[Tensor, ...]:
    """Return log pi(label), float32 like `labels`, and the entropy of pi, float32 [tokens].

    With `sums_squares`, also sum_v pi(v)^2, float32 [tokens], without a gradient.
    pi = softmax(hidden @ weight.T / temperature).

    hidden  [tokens, hidden size], equal on all ranks of `group`; its gradient is this rank's share
    weight  [vocab_shard_size + padding, hidden size], this rank's shard, perhaps empty
    labels  int64 [tokens] or [tokens, m]; a token's labels after the first must differ
    chunk   entries whose logits exist at once, in two float32 arrays [tokens, chunk]; three if the entropy
            has a gradient"""
    local = (labels if labels.dim() > 1 else labels[:, None]) - vocab_start
    logprobs, entropy, *squares = _LogProbs.apply(
        hidden, weight, local, vocab_shard_size, temperature, chunk, group, sums_squares
    )
    return logprobs.view(labels.shape), entropy, *squares


@torch.no_grad()
def vocab_parallel_top_k(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    limit: int,
    *,
    vocab_start: int,
    vocab_shard_size: int,
    temperature: float,
    chunk: int,
    group: Group = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs, float32 [tokens, k], and ids, int64 [tokens, k], of the top k below `limit`.

    Probabilities are over the whole vocabulary."""
    maximum = hidden.new_full((hidden.shape[0],), -torch.inf, dtype=torch.float32)
    total = torch.zeros_like(maximum)
    top_logits = hidden.new_full((hidden.shape[0], k), -torch.inf, dtype=torch.float32)
    tokens = torch.zeros_like(top_logits, dtype=torch.int64)
    for part in _chunks(vocab_shard_size, chunk):
        logits, first_token = _logits(hidden, weight[part], temperature), vocab_start + part.start
        total *= _raise(maximum, logits.amax(-1))
        total += (logits - maximum[:, None]).exp_().sum(-1)
        logits = logits[:, : max(0, limit - first_token)]
        values, columns = logits.topk(min(k, logits.shape[1]), -1)
        top_logits, indices = torch.cat([top_logits, values], -1).topk(k, -1)
        tokens = torch.cat([tokens, first_token + columns], -1).gather(-1, indices)
    if group is not None:
        global_maximum = maximum.clone()
        dist.all_reduce(global_maximum, op=dist.ReduceOp.MAX, group=group)
        total *= _raise(maximum, global_maximum)
        dist.all_reduce(total, group=group)
        gathered_tensors = [[torch.empty_like(x) for _ in range(group.size())] for x in (top_logits, tokens)]
        for shards, local in zip(gathered_tensors, (top_logits, tokens), strict=True):
            dist.all_gather(shards, local, group=group)
        top_logits, indices = torch.cat(gathered_tensors[0], -1).topk(k, -1)
        tokens = torch.cat(gathered_tensors[1], -1).gather(-1, indices)
    return top_logits - (maximum + total.log())[:, None], tokens


class _LogProbs(torch.autograd.Function):
    """Save one log-normaliser per token, and compute the logits again in the backward pass.

    A chunk stays in the cache, so this costs less than reading and writing all logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        local: Tensor,
        vocab_shard_size: int,
        temperature: float,
        chunk: int,
        group: Group,
        sums_squares: bool,
    ) -> tuple[Tensor, ...]:
        # Per token: running maximum m, sums of exp(x - m) and exp(x - m) * x, this rank's labels' logits;
        # squares: sum of exp(x - m)^2.
        maximum = hidden.new_full((hidden.shape[0],), -torch.inf, dtype=torch.float32)
        sums = hidden.new_zeros(2 + local.shape[1], hidden.shape[0], dtype=torch.float32)
        squares = torch.zeros_like(maximum)
        for part in _chunks(vocab_shard_size, chunk):
            logits = _logits(hidden, weight[part], temperature)
            column, in_chunk = _find(local, part)
            sums[2:] += torch.where(in_chunk, logits.gather(-1, column), 0.0).T
            factor = _raise(maximum, logits.amax(-1))
            sums[:2] *= factor
            shifted = (logits - maximum[:, None]).exp_()
            sums[0] += shifted.sum(-1)
            if sums_squares:
                squares = squares * factor.square() + torch.linalg.vecdot(shifted, shifted)
            sums[1] += shifted.mul_(logits).sum(-1)
        if group is not None:
            global_maximum = maximum.clone()
            dist.all_reduce(global_maximum, op=dist.ReduceOp.MAX, group=group)
            factor = _raise(maximum, global_maximum)
            sums[:2] *= factor
            dist.all_reduce(sums, group=group)
            if sums_squares:
                squares = squares * factor.square()
                dist.all_reduce(squares, group=group)
        log_normaliser = maximum + sums[0].log()
        logprobs = (sums[2:] - log_normaliser).T.contiguous()
        entropy = log_normaliser - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, local, log_normaliser, entropy)
        ctx.vocab_shard_size, ctx.temperature, ctx.chunk = vocab_shard_size, temperature, chunk
        ctx.set_materialize_grads(False)
        if not sums_squares:
            return logprobs, entropy
        squared_probs = squares / sums[0].square()
        ctx.mark_non_differentiable(squared_probs)
        return logprobs, entropy, squared_probs

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *_squares: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, local, log_normaliser, entropy = ctx.saved_tensors
        grad = torch.zeros_like(local, dtype=torch.float32) if grad_logprobs is None else grad_logprobs
        grad = grad / ctx.temperature
        total = grad.sum(-1, keepdim=True)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = None
        if ctx.needs_input_grad[1]:  # False if the weight is frozen
            grad_weight = torch.empty_like(weight)
            grad_weight[ctx.vocab_shard_size :] = 0.0
        for part in _chunks(ctx.vocab_shard_size, ctx.chunk):
            # d logprob / d logits = onehot(label) - softmax
            d_logits = _logits(hidden, weight[part], ctx.temperature)
            d_logits.sub_(log_normaliser[:, None])
            if grad_entropy is None:
                d_logits.exp_().mul_(-total)
            else:  # d entropy / d logits = -softmax * (log softmax + entropy)
                factor = (d_logits + entropy[:, None]).mul_((grad_entropy / ctx.temperature)[:, None])
                d_logits.exp_().mul_(-(factor.add_(total)))
            column, in_chunk = _find(local, part)
            label_grad = torch.where(in_chunk, grad, 0.0)
            # Add the first label separately: a GPU adds equal entries in any order.
            for labels in (slice(0, 1), slice(1, None)):
                d_logits.scatter_add_(-1, column[:, labels], label_grad[:, labels])
            d_logits = d_logits.to(hidden.dtype)
            grad_hidden += _product(d_logits, weight[part])
            if grad_weight is not None:
                torch.mm(d_logits.T, hidden, out=grad_weight[part])
        return grad_hidden.to(hidden.dtype), grad_weight, *[None] * 6


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = _product(hidden, weight.T)
    return logits.div_(temperature) if temperature != 1.0 else logits


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32: bf16 rounds large logits too coarsely."""
    if a.dtype == torch.float32:
        return a @ b
    if a.device.type == "cpu":  # torch.mm on a CPU has no out_dtype
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


def _find(local: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    column = local - part.start
    size = part.stop - part.start
    return column.clamp(0, size - 1), (column >= 0) & (column < size)


def _raise(maximum: Tensor, other: Tensor) -> Tensor:
    """Raise `maximum` to at least `other`; return the factor that rescales sums of exp(x - maximum)."""
    old_maximum = maximum.clone()
    return (old_maximum - torch.maximum(old_maximum, other, out=maximum)).exp_()
