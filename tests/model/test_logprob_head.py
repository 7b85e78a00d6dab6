"""The chunked log-prob head compared with log_softmax in float64."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.model.logprob_head import vocab_parallel_logprobs, vocab_parallel_top_k


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    table = (hidden @ weight.T / temperature).log_softmax(-1)
    return table.gather(-1, labels[:, None])[:, 0], -(table.exp() * table).sum(-1)


def on_one_rank(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    words: int,
    chunk: int,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = {"vocab_start": 0, "vocab_shard_size": words, "chunk": chunk}
    return vocab_parallel_logprobs(hidden, weight, labels, temperature=temperature, **sizes)


@torch.no_grad()
def rounding(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    factors: torch.Tensor,
    entropy_factors: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bound float32's error in log-probs and entropies, and in the gradients of `hidden` and `weight`.

    Each number may have four rounding errors of the largest sum behind the token's logits."""
    table = (hidden @ weight.T / temperature).log_softmax(-1)
    probs, surprise = table.exp(), table - (table.exp() * table).sum(-1, keepdim=True)
    largest = (hidden.abs() @ weight.abs().T / temperature).amax(-1)
    of_logits = 4 * 2**-23 * largest
    own = torch.zeros_like(table).scatter_(-1, labels[:, None], 1.0)
    factors, entropy_factors = factors[:, None] / temperature, entropy_factors[:, None] / temperature
    d_logits = (factors * (own - probs)).abs() + (entropy_factors * probs * surprise).abs()
    moved = (factors * probs).abs() + (entropy_factors * probs).abs() * (1 + surprise.abs())
    of_d_logits = of_logits[:, None] * moved + 4 * 2**-23 * d_logits + 2**-126  # the smallest normal float32
    return of_logits, of_d_logits @ weight.abs(), of_d_logits.T @ hidden.abs()


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 23),
    words=st.integers(1, 37),
    padding=st.integers(0, 3),
    chunk=st.integers(1, 30),
    hot=st.booleans(),
    seed=st.integers(0, 99),
)
@example(
    tokens=13, words=31, padding=3, chunk=1, hot=True, seed=6
)  # with logits of 200, an error of 0.002 in a gradient of 108
def test_equals_log_softmax(tokens: int, words: int, padding: int, chunk: int, hot: bool, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    temperature = 0.6 if hot else 1.0
    # Large logits overflow unless the maximum is subtracted before exp.
    hidden = (20 * torch.randn(tokens, 5, generator=g)).requires_grad_()
    weight = torch.randn(words + padding, 5, generator=g).requires_grad_()
    labels = torch.randint(0, words, (tokens,), generator=g)
    factors, entropy_factors = torch.randn(2, tokens, generator=g)
    if seed % 2:  # as if the entropy were unused
        entropy_factors = entropy_factors * 0.0
    found, entropy = on_one_rank(hidden, weight, labels, words, chunk, temperature)
    loss = (found * factors).sum()
    (loss if seed % 2 else loss + (entropy * entropy_factors).sum()).backward()
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    expected, expected_entropy = plain(exact_hidden, exact_weight[:words], labels, temperature)
    (expected * factors + expected_entropy * entropy_factors).sum().backward()
    of_logits, of_hidden, of_weight = rounding(
        exact_hidden, exact_weight[:words], labels, temperature, factors, entropy_factors
    )
    assert ((found - expected).abs() <= of_logits).all()
    assert ((entropy - expected_entropy).abs() <= of_logits).all()
    assert ((hidden.grad - exact_hidden.grad).abs() <= of_hidden).all()
    assert ((weight.grad - exact_weight.grad)[:words].abs() <= of_weight).all()
    assert not weight.grad[words:].any(), "padding rows are no words"


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 23),
    words=st.integers(4, 37),
    limit=st.integers(4, 40),
    k=st.integers(1, 4),
    chunk=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_several_labels_and_the_likeliest_equal_log_softmax(
    tokens: int, words: int, limit: int, k: int, chunk: int, seed: int
) -> None:
    """Each position has the sampled token and k others, which may include it; the top-k tokens match too."""
    g = torch.Generator().manual_seed(seed)
    hidden = (5 * torch.randn(tokens, 5, generator=g)).requires_grad_()
    weight = torch.randn(words + 2, 5, generator=g).requires_grad_()
    others = torch.rand(tokens, words, generator=g).argsort(-1)[:, :k]
    labels = torch.cat([torch.randint(0, words, (tokens, 1), generator=g), others], 1)
    factors, entropy_factors = torch.randn(tokens, 1 + k, generator=g), torch.randn(tokens, generator=g)
    found, entropy = on_one_rank(hidden, weight, labels, words, chunk, 0.6)
    ((found * factors).sum() + (entropy * entropy_factors).sum()).backward()
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    table = (exact_hidden @ exact_weight[:words].T / 0.6).log_softmax(-1)
    exact_entropy = -(table.exp() * table).sum(-1)
    ((table.gather(-1, labels) * factors).sum() + (exact_entropy * entropy_factors).sum()).backward()
    assert torch.allclose(found.double(), table.gather(-1, labels), rtol=1e-5, atol=1e-4)
    assert torch.allclose(hidden.grad.double(), exact_hidden.grad, rtol=1e-4, atol=1e-4)
    assert torch.allclose(weight.grad.double(), exact_weight.grad, rtol=1e-4, atol=1e-3)
    sizes = {"vocab_start": 0, "vocab_shard_size": words, "chunk": chunk}
    logprobs, likeliest = vocab_parallel_top_k(hidden, weight, k, limit, temperature=0.6, **sizes)
    expected = table[:, :limit].topk(k, -1)
    assert torch.equal(likeliest, expected.indices)
    assert torch.allclose(logprobs.double(), expected.values, rtol=1e-5, atol=1e-4)


def test_chunks_change_nothing() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(50, 8, generator=g), torch.randn(33, 8, generator=g)
    labels = torch.randint(0, 33, (50,), generator=g)
    whole = on_one_rank(hidden, weight, labels, 33, chunk=50)
    for chunk in (1, 7, 49):
        parts = on_one_rank(hidden, weight, labels, 33, chunk)
        assert all(torch.allclose(a, b, atol=5e-6) for a, b in zip(whole, parts, strict=True))


def test_bf16_weights_cost_no_more_than_their_own_rounding() -> None:
    """Logits are not rounded to bf16, which would change log-probs by 0.04.

    The reference uses the same bf16 numbers in float64."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(48, 512, generator=g).bfloat16().requires_grad_()
    weight = (0.12 * torch.randn(700, 512, generator=g)).bfloat16().requires_grad_()
    labels = torch.randint(0, 700, (48,), generator=g)
    found, entropy = on_one_rank(hidden, weight, labels, 700, chunk=256)
    found.sum().backward()
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    expected, expected_entropy = plain(exact_hidden, exact_weight, labels, 1.0)
    expected.sum().backward()
    assert (found.double() - expected).abs().max() < 2e-5
    assert (entropy.double() - expected_entropy).abs().max() < 2e-5
    for tensor, exact in ((hidden, exact_hidden), (weight, exact_weight)):
        # Gradients are bf16, with a rounding error of 2^-9.
        assert (tensor.grad.double() - exact.grad).norm() < 4e-3 * exact.grad.norm()


def test_no_array_of_all_logits() -> None:
    """The largest tensor in forward and backward is a chunk's logits or as large as an input."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            outputs = out if isinstance(out, (tuple, list)) else [out]
            sizes.extend(x.numel() for x in outputs if isinstance(x, torch.Tensor))
            return out

    tokens, words, chunk = 512, 1000, 16
    hidden = torch.randn(tokens, 8).requires_grad_()
    weight = torch.randn(words, 8).requires_grad_()
    labels = torch.randint(0, words, (tokens,))
    with Watch():
        logprobs, _ = on_one_rank(hidden, weight, labels, words, chunk)
        logprobs.sum().backward()
    assert weight.numel() <= max(sizes) <= max(chunk * words, hidden.numel()) < tokens * words / 8
    expected, hidden.grad = hidden.grad, None
    frozen, _ = weight.detach(), sizes.clear()
    with Watch():
        logprobs, _ = on_one_rank(hidden, frozen, labels, words, chunk)
        logprobs.sum().backward()
    assert torch.equal(hidden.grad, expected)
    assert weight.numel() not in sizes, "a frozen weight has no gradient"
    sizes.clear()
    labels = torch.randint(0, words, (tokens, 1 + 5))
    shard = {"vocab_start": 0, "vocab_shard_size": words, "temperature": 1.0, "chunk": chunk}
    with Watch():
        on_one_rank(hidden, weight, labels, words, chunk)[0].sum().backward()
        vocab_parallel_top_k(hidden, weight, 5, words, **shard)
    assert max(sizes) <= max(chunk * words, hidden.numel())


def test_a_vocabulary_split_over_ranks_one_of_them_without_any(ranks) -> None:  # type: ignore[no-untyped-def]
    """Log-probs, entropy, sums of squares, gradients and top-k tokens match over two ranks.

    The second rank has only padding, or 13 words."""
    for first in (33, 20):
        answers = ranks(2, 1, 1).run(on_ranks, shards=[first, 33 - first], padding=2)
        for found, expected in answers:
            assert all(
                torch.allclose(a.double(), b, rtol=1e-5, atol=1e-5)
                for a, b in zip(found, expected, strict=True)
            )


def on_ranks(runtime, shards: list[int], padding: int):  # type: ignore[no-untyped-def]
    """Return this rank's part of the results, and of those of float64 log_softmax over all words."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    g = torch.Generator().manual_seed(0)
    hidden, weight, labels = (
        torch.randn(50, 8, generator=g),
        torch.randn(sum(shards), 8, generator=g),
        torch.rand(50, 33, generator=g).argsort(-1)[:, :4],
    )
    factors = torch.randn(50, generator=g)
    words, first = shards[runtime.tp_rank], sum(shards[: runtime.tp_rank])
    shard = torch.cat([weight[first : first + words], torch.ones(padding, 8)]).requires_grad_()
    mine = hidden.clone().requires_grad_()
    group = parallel_state.get_tensor_model_parallel_group()
    sizes = {"vocab_start": first, "vocab_shard_size": words, "temperature": 0.7, "chunk": 7, "group": group}
    found = vocab_parallel_logprobs(mine, shard, labels, sums_squares=True, **sizes)
    (found[0].sum(1) * factors + found[1] * factors.flip(0)).sum().backward()
    dist.all_reduce(mine.grad, group=group)
    whole_hidden, whole_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    table = (whole_hidden @ whole_weight.T / 0.7).log_softmax(-1)
    squares = (2 * table).logsumexp(-1).exp()  # exp(lse(2z) - 2 lse(z))
    expected = table.gather(1, labels), -(table.exp() * table).sum(-1), squares
    (expected[0].sum(1) * factors + expected[1] * factors.flip(0)).sum().backward()
    grad = torch.cat([whole_weight.grad[first : first + words], torch.zeros(padding, 8)])
    likeliest = [x.double() for x in vocab_parallel_top_k(mine, shard, 5, 30, **sizes)]
    return [x.detach() for x in (*found, mine.grad, shard.grad, *likeliest)], [
        x.detach().double() for x in (*expected, whole_hidden.grad, grad, *table[:, :30].topk(5, -1))
    ]
