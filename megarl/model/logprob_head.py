"""Log-probabilities and entropy from hidden states, over a vocabulary that is split across tensor-parallel ranks.

Logits exist for `chunk` tokens at a time, forward and backward, so that the [tokens, vocabulary] array never does
(20k tokens x 152k words would be 12 GiB in float32). The same head serves old, reference and actor log-probs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


class _LogProbs(torch.autograd.Function):
    """Forward keeps one number a token (the log-normaliser); backward computes the logits again, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, first_word: int, words: int, temperature: float, chunk: int, group: Group
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        # Per token: maximum, sum of exp(x - maximum), sum of exp(x - maximum) * x, logit of the label (0 where another rank has it).
        maximum = hidden.new_empty(count, dtype=torch.float32)
        sums = hidden.new_zeros(3, count, dtype=torch.float32)
        local = labels - first_word
        mine = (local >= 0) & (local < words)
        local = local.clamp(0, max(words - 1, 0))
        for part in _chunks(count, chunk):
            logits = _logits(hidden[part], weight, words, temperature)
            maximum[part] = logits.amax(-1)
            sums[2, part] = torch.where(mine[part], logits.gather(-1, local[part, None]).squeeze(-1), 0.0)
            shifted = (logits - maximum[part, None]).exp_()
            sums[0, part] = shifted.sum(-1)
            sums[1, part] = (shifted.mul_(logits)).sum(-1)
        if group is not None:
            local_maximum = maximum.clone()
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            sums[:2] *= (local_maximum - maximum).exp()
            dist.all_reduce(sums, group=group)
        log_normaliser = maximum + sums[0].log()
        logprobs = sums[2] - log_normaliser
        entropy = log_normaliser - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, local, mine, log_normaliser)
        ctx.words, ctx.temperature, ctx.chunk = words, temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, mine, log_normaliser = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _chunks(hidden.shape[0], ctx.chunk):
            logits = _logits(hidden[part], weight, ctx.words, ctx.temperature)
            # d logprob / d logits = onehot(label) - softmax
            d_logits = logits.sub_(log_normaliser[part, None]).exp_().neg_()
            d_logits.scatter_add_(-1, local[part, None], mine[part, None].to(d_logits.dtype))
            d_logits *= (grad[part] / ctx.temperature)[:, None]
            d_logits = d_logits.to(hidden.dtype)
            grad_hidden[part] = d_logits @ weight[: ctx.words]
            grad_weight[: ctx.words] += d_logits.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _logits(hidden: Tensor, weight: Tensor, words: int, temperature: float) -> Tensor:
    """float32 [tokens, words]; padding rows of the vocabulary shard (beyond `words`) take no part."""
    logits = (hidden @ weight[:words].T).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


def vocab_parallel_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, first_word: int, words: int, temperature: float, chunk: int, group: Group = None
) -> tuple[Tensor, Tensor]:
    """log pi(label) and the entropy of pi = softmax(hidden @ weight.T / temperature), float32 [tokens] each.

    hidden  [tokens, hidden size], the same on every rank of `group`; its gradient is this rank's part, to be summed over `group`
    weight  [words + padding, hidden size], this rank's shard: words first_word .. first_word + words of the vocabulary
    labels  int64 [tokens]
    The entropy carries no gradient.
    """
    return _LogProbs.apply(hidden, weight, labels, first_word, words, temperature, chunk, group)
