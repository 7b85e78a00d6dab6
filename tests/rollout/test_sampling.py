"""Random numbers, top-k and top-p, and inverse-CDF sampling, against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout import sampling
from megarl.rollout.sampling import (
    SamplingParams,
    choose,
    choose_with_set,
    evaluation_seed,
    keep_top,
    response_seed,
    uniform,
)

SEEDS = st.integers(0, 2**63 - 1)
DRAWN = [777, 793, 105, 347, 195, 353, 104, 742, 16, 831, 250, 300, 740, 702, 444, 127]
DRAWN += [605, 58, 257, 722, 266, 494, 406, 895, 53, 290, 145, 394, 104, 227, 317, 175]
NUCLEUS = [777, 793, 92, 342, 201, 389, 224, 741, 16, 831, 613, 459, 740, 677, 427, 200]
NUCLEUS += [605, 101, 312, 619, 441, 350, 481, 899, 31, 290, 108, 549, 105, 135, 435, 175]
LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12)


def splitmix64(seed: int, index: int) -> float:
    """Compute Vigna's reference with Python's unbounded integers."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return ((z ^ (z >> 31)) >> 11) / 2**53


@given(st.lists(st.tuples(SEEDS, st.integers(0, 2**20)), min_size=1, max_size=20))
def test_uniform_is_splitmix64(pairs):
    seeds, index = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert uniform(seeds, index).tolist() == [splitmix64(s, i) for s, i in pairs]


def slow_keep(probs: list[float], top_k: int, top_p: float) -> set[int]:
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = [i for i in order if not top_k or probs[i] >= probs[order[min(top_k, len(order)) - 1]]]
    mass, total, inside = 0.0, sum(probs[i] for i in kept), []
    for i in kept:
        if inside and mass >= top_p * total and probs[i] < probs[inside[-1]]:
            break
        inside.append(i)
        mass += probs[i]
    return set(inside)


@given(
    st.lists(st.integers(1, 1000), min_size=2, max_size=12, unique=True),
    st.integers(0, 14),
    st.sampled_from([0.05, 0.31, 0.7, 0.95, 1.0]),
)
def test_keep_top_equals_a_loop(weights, top_k, top_p):
    probs = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    kept = keep_top(probs, top_k, top_p)[0]
    assert set(kept.nonzero()[:, 0].tolist()) == slow_keep(probs[0].tolist(), top_k, top_p)
    assert torch.equal(kept[kept > 0], probs[0][kept > 0])


@given(
    LOGITS,
    SEEDS,
    st.integers(0, 50),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0, 3]),
    st.sampled_from([0.6, 1.0]),
)
def test_choose_inverts_the_cdf(logits, seed, index, temperature, top_k, top_p):
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
    token, logprob = choose(torch.tensor([logits]), torch.tensor([seed]), torch.tensor([index]), params)
    scaled = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(0)
    # In float32: a rounding error decides which of nearly equal tokens are kept.
    rounded = (torch.tensor([logits]) / temperature).log_softmax(-1).exp()
    kept = keep_top(rounded, top_k, top_p)[0].double().cumsum(0)
    point = splitmix64(seed, index) * float(kept[-1])
    below = float(kept[token[0] - 1]) if token[0] > 0 else 0.0
    assert below - 1e-5 <= point <= float(kept[token[0]]) + 1e-5
    assert logprob.item() == pytest.approx(math.log(scaled[token[0]]), abs=1e-5)


@settings(deadline=None)
@given(
    st.integers(2, 40),
    st.integers(1, 8),
    SEEDS,
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([0, 5]),
    st.sampled_from([0.3, 0.9, 1.0]),
)
def test_blocks_of_a_large_vocabulary_change_nothing(vocab, block, seed, temperature, top_k, top_p):
    """Sums of whole blocks with a running sum inside one block equal a single running sum."""
    g = torch.Generator().manual_seed(seed % 1000)
    logits = 3 * torch.randn(64, vocab, generator=g)
    logits[:, ::3] = -torch.inf  # some blocks have no possible token
    logits[:, 0] = 0.0
    asked = (
        logits,
        torch.arange(64) + seed // 2,
        torch.arange(64),
        SamplingParams(1, temperature, top_p, top_k),
    )
    whole = choose(*asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "BLOCK", block)
        patch.setattr(sampling, "AT_ONCE", 2)
        assert all(torch.equal(a, b) for a, b in zip(choose(*asked), whole, strict=True))


def test_no_array_of_float64_as_large_as_the_logits():
    """For logits [256, 152,064], a float64 copy would take 300 MB at each token."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                x.numel()
                for x in (out if isinstance(out, (tuple, list)) else [out])
                if getattr(x, "dtype", None) == torch.float64
            )
            return out

    with Watch():
        choose(
            torch.randn(4, 152_064), torch.arange(4), torch.arange(4), SamplingParams(1, top_p=0.7, top_k=50)
        )
    assert 4 <= max(sizes) <= 4 * 152_064 / 8


def test_draws_are_those_of_the_runs_before():
    """Compare with fixed numbers, recorded on 2026-11-21.

    A difference would change every run that is repeated or resumed."""
    g = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(32, 900, generator=g)
    for params, expected in ((SamplingParams(1), DRAWN), (SamplingParams(1, 0.8, 0.6), NUCLEUS)):
        assert choose(logits, torch.arange(32) * 7919, torch.arange(32), params)[0].tolist() == expected


def test_impossible_tokens_are_never_chosen():
    logits = torch.full((4096, 5), -torch.inf)
    logits[:, 1:3] = 0.0
    token, _ = choose(logits, torch.arange(4096), torch.zeros(4096, dtype=torch.int64), SamplingParams(1))
    assert set(token.tolist()) == {1, 2}


def test_frequencies_over_seeds_and_positions():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    n = 40_000
    for seeds, index in (
        (torch.arange(n), torch.zeros(n, dtype=torch.int64)),
        (torch.full((n,), 5), torch.arange(n)),
    ):
        token, _ = choose(probs.log().expand(n, 4), seeds, index, SamplingParams(1))
        counts = torch.bincount(token, minlength=4)
        assert bool(((counts - n * probs).abs() < 5 * (n * probs * (1 - probs)).sqrt()).all())


@settings(max_examples=30)
@given(LOGITS)
def test_temperature_zero_is_greedy(logits):
    token, logprob = choose(
        torch.tensor([logits]), torch.tensor([1]), torch.tensor([0]), SamplingParams(1, temperature=0)
    )
    assert logits[token[0]] == max(logits)
    assert logprob.item() == pytest.approx(max(logits) - math.log(sum(map(math.exp, logits))), abs=1e-5)


def test_seeds_are_stable_and_distinct():
    # Fixed values: a difference would change every run that is repeated or resumed.
    assert (
        response_seed(0, 1, 2, 3)
        == int.from_bytes(
            __import__("hashlib").blake2b(b"megarl.rollout:0:1:2:3", digest_size=8).digest(), "big"
        )
        >> 1
    )
    seeds = {
        response_seed(r, s, u, i)
        for r in range(3)
        for s in range(3)
        for u in (1, 12, 2**60)
        for i in range(3)
    }
    seeds |= {evaluation_seed(r, u, i) for r in range(3) for u in (1, 12, 2**60) for i in range(3)}
    assert len(seeds) == 81 + 27 and all(0 <= s < 2**63 for s in seeds)


@given(
    st.lists(st.integers(1, 1000), min_size=2, max_size=12, unique=True),
    SEEDS,
    st.sampled_from([0.5, 1.0]),
    st.integers(2, 14),
    st.sampled_from([0.3, 0.8, 1.0]),
)
def test_a_set_is_what_top_k_and_top_p_keep(weights, seed, temperature, top_k, top_p):
    """The token is the one of `choose`; its log-prob is renormalised over the set."""
    params = SamplingParams(1, temperature, top_p, top_k)
    logits = torch.tensor([weights], dtype=torch.float64).log()
    arguments = logits.float(), torch.tensor([seed]), torch.tensor([3]), params
    tokens, logprobs, sets = choose_with_set(*arguments)
    assert tokens.tolist() == choose(*arguments)[0].tolist()
    probs = (logits[0] / temperature).softmax(0)
    members = [v for v in sets[0].tolist() if v >= 0]
    assert sets.shape == (1, min(top_k, len(weights))) and sets[0, len(members) :].eq(-1).all()
    assert members == sorted(members, key=lambda v: -float(probs[v]))
    expected = slow_keep(probs.float().tolist(), top_k, top_p)
    # A rounding error decides if the mass up to a token reaches top_p.
    assert len(expected ^ set(members)) <= (top_p < 1)
    total = sum(float(probs[v]) for v in members)
    assert logprobs.item() == pytest.approx(math.log(float(probs[tokens[0]]) / total), abs=1e-5)


def test_a_set_has_no_more_than_top_k_of_tied_tokens():
    logits, seeds = torch.zeros(50, 9), torch.arange(50)
    tokens, logprobs, sets = choose_with_set(
        logits, seeds, torch.zeros_like(seeds), SamplingParams(1, top_k=4)
    )
    assert sets.shape == (50, 4) and (sets >= 0).all() and (sets == tokens[:, None]).any(1).all()
    assert torch.allclose(logprobs, torch.tensor(0.25).log().expand(50))
