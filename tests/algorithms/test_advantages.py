"""Advantages against float64 loops of the papers' formulas; they do not depend on order or packing."""

from __future__ import annotations

import json
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import advantages as adv
from megarl.algorithms.advantages import Responses
from megarl.algorithms.methods.dr_grpo import group_mean
from megarl.algorithms.methods.gdpo import per_reward_advantages
from megarl.algorithms.methods.otb import (
    baseline_sums,
    gradient_energy,
    sampled_positions,
    token_baselines,
)
from megarl.algorithms.methods.rloo import leave_one_out
from megarl.algorithms.methods.spo import SuccessTracker
from megarl.algorithms.methods.tppo import extended_gae
from tests.algorithms.loops import batches, loop_gae, make_batch, sum_extended_gae, sum_gae

LAMBDAS = [0.0, 0.5, 0.95, 1.0]


@settings(deadline=None)
@given(st.integers(1, 20_480), st.floats(0.01, 2.0))
def test_the_powers_of_length_adaptive_lambda_sum_to_alpha_times_length(length, alpha):
    """VAPO eq. 4, solved by eq. 5; lambda = 0 gives the smallest sum, 1."""
    lam = float(adv.length_adaptive_lambda(torch.tensor([length]), alpha))
    count = 40 * max(1, int(alpha * length))  # lambda^count < e^-39
    total = (1 - lam**count) / (1 - lam)
    assert total == pytest.approx(max(alpha * length, 1.0), rel=1e-9)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.one_of(st.sampled_from([1.0, -1.0]), st.floats(-10, 10, width=32))),
        min_size=1,
        max_size=30,
    )
)
def test_group_advantages_equal_the_formula(rows):
    """DAPO eq. 9, Dr. GRPO's formula, and RLOO's as written: minus the mean of the other rewards."""
    ids, rewards = torch.tensor([g for g, _ in rows]), torch.tensor([r for _, r in rows])
    groups = {g: [r for h, r in rows if h == g] for g, _ in rows}
    expected = []
    for g, r in rows:
        members = groups[g]
        flat = len(set(members)) == 1
        expected.append(0.0 if flat else (r - statistics.fmean(members)) / (statistics.stdev(members) + 1e-6))
    result = adv.group_advantages(Responses(rewards, ids))
    torch.testing.assert_close(result, torch.tensor(expected).double(), rtol=1e-6, atol=1e-7)
    means = [r - statistics.fmean(groups[g]) for g, r in rows]
    found = group_mean(Responses(rewards, ids))
    torch.testing.assert_close(found, torch.tensor(means).double(), rtol=1e-6, atol=1e-6)
    others = [r - (sum(groups[g]) - r) / (len(groups[g]) - 1) if len(groups[g]) > 1 else 0.0 for g, r in rows]
    found = leave_one_out(Responses(rewards, ids))
    torch.testing.assert_close(found, torch.tensor(others).double(), rtol=1e-6, atol=1e-5)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(rows)))
    torch.testing.assert_close(
        adv.group_advantages(Responses(rewards[order], ids[order])), result[order], rtol=1e-6, atol=1e-12
    )


@pytest.mark.parametrize("method", [group_mean, leave_one_out])
def test_group_advantages_of_float64_are_exact(method):
    """Groups of 2 to 8: most of their factors G / (G - 1) are not exact in float32."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.repeat_interleave(torch.arange(7), torch.arange(2, 9))
    rewards = torch.randn(len(ids), dtype=torch.float64, generator=generator)
    found = method(Responses(rewards, ids))
    for i, group in enumerate(ids):
        others = [
            float(r) for j, r in enumerate(rewards) if ids[j] == group and (method is group_mean or i != j)
        ]
        assert abs(float(found[i]) - (float(rewards[i]) - statistics.fmean(others))) < 1e-14


def test_group_advantages_by_hand():
    """+1, -1, -1, -1: mean -1/2, sample standard deviation 1. Single and equal rewards give exactly 0."""
    rewards, ids = torch.tensor([1.0, 0.1, -1, 0.1, -1, 5, -1, 0.1]), torch.tensor([7, 2, 7, 2, 7, 0, 7, 2])
    result = adv.group_advantages(Responses(rewards, ids))
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5], dtype=torch.float64)
    torch.testing.assert_close(result[[0, 2, 4, 6]], expected, rtol=2e-6, atol=0)
    assert result[[1, 3, 5, 7]].tolist() == [0, 0, 0, 0]
    assert adv.group_advantages(Responses(torch.tensor([1, 0]), torch.tensor([0, 0]))).dtype == torch.float64


def per_reward(rewards, weights, ids, counted):
    """Return GDPO's advantages of rewards in parts."""
    return per_reward_advantages(Responses(rewards.sum(1), ids, counted, rewards, weights))


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda k: st.lists(
            st.tuples(
                st.integers(0, 3),
                st.booleans(),
                st.lists(
                    st.sampled_from([1.0, 0.0, 0.25, -0.5, 3.0]) | st.floats(-10, 10, width=32),
                    min_size=k,
                    max_size=k,
                ),
            ),
            min_size=1,
            max_size=30,
        )
    ),
    st.lists(st.sampled_from([1.0, 0.5, -0.25, 2.0]), min_size=4, max_size=4),
)
def test_per_reward_advantages_equal_the_formula(rows, weights):
    """GDPO's two normalisations, for each response and reward.

    An uncounted response forms a separate group, as in `make_rollout_batch`.
    """
    rows = [(g if counted else 10 + i, counted, r) for i, (g, counted, r) in enumerate(rows)]
    sums = []
    for g, _, rewards in rows:
        total = 0.0
        for k, reward in enumerate(rewards):
            members = [r[k] for h, _, r in rows if h == g]
            if len(set(members)) > 1:
                deviation = statistics.stdev(members) + 1e-6
                total += weights[k] * (reward - statistics.fmean(members)) / deviation
        sums.append(total)
    kept = [s for s, (_, counted, _) in zip(sums, rows, strict=True) if counted]
    expected = [
        (s - statistics.fmean(kept)) / (statistics.variance(kept) + 1e-8) ** 0.5 if len(kept) > 1 else s
        for s in sums
    ]
    expected = [a if counted else 0.0 for a, (_, counted, _) in zip(expected, rows, strict=True)]
    ids, counted = torch.tensor([g for g, _, _ in rows]), torch.tensor([c for _, c, _ in rows])
    rewards = torch.tensor([r for _, _, r in rows], dtype=torch.float64)
    own = weights[: rewards.shape[1]]
    result = per_reward(rewards, own, ids, counted)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(rows)))
    again = per_reward(rewards[order], own, ids[order], counted[order])
    torch.testing.assert_close(again, result[order], rtol=1e-6, atol=1e-9)
    assert per_reward(rewards.float(), own, ids, counted).dtype == torch.float64


def test_rewards_whose_sums_are_alike_are_told_apart():
    """The example of GDPO's introduction: equal advantages by sums, different ones by each reward.

    The sums of two rewards are (0, 1) and (0, 2). Scaling a reward has no effect except for epsilon.
    """
    rewards = torch.tensor([[0.0, 0], [1, 0], [0, 0], [1, 1]], dtype=torch.float64)
    ids, all_of_them = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
    sums = adv.group_advantages(Responses(rewards.sum(1), ids))
    assert float(sums[1]) == pytest.approx(float(sums[3]), rel=1e-5)
    found = per_reward(rewards, [1, 1], ids, all_of_them)
    assert float(found[3]) == pytest.approx(2 * float(found[1]), rel=1e-5)
    scaled = per_reward(rewards * torch.tensor([100.0, 1]), [1, 1], ids, all_of_them)
    torch.testing.assert_close(scaled, found, rtol=1e-5, atol=0)


UIDS = st.integers(0, 2**63 - 1) | st.just(7)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.tuples(UIDS, st.booleans()), max_size=12), max_size=6),
    st.sampled_from([0.875, 0.96, 1.0, 0.1]),
    st.randoms(use_true_random=False),
)
def test_the_tracker_equals_the_formula(steps, rho, random):
    """A prompt's success rate is a weighted share of all its responses, and survives JSON bitwise.

    Responses of the prompt's n-th last step count rho^n. Half a response of either kind is the prior.
    """
    tracker = SuccessTracker(rho)
    history: dict[int, list[list[bool]]] = {}
    for answers in steps:
        order = random.sample(answers, len(answers))
        tracker.observe(torch.tensor([p for p, _ in order]), torch.tensor([r for _, r in order]))
        for prompt in {p for p, _ in answers}:
            history.setdefault(prompt, []).append([right for p, right in answers if p == prompt])
    expected = []
    for visits in history.values():
        n = len(visits)
        right = 0.5 * rho**n + sum(rho ** (n - 1 - i) * sum(visit) for i, visit in enumerate(visits))
        every = rho**n + sum(rho ** (n - 1 - i) * len(visit) for i, visit in enumerate(visits))
        expected.append(right / every)
    unknown = next(uid for uid in range(len(history) + 1) if uid not in history)
    prompts = torch.tensor([*history, unknown], dtype=torch.int64)
    chances = tracker.chances(prompts)
    assert chances.tolist() == pytest.approx([*expected, 0.5], rel=1e-12)
    again = SuccessTracker(rho)
    again.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    assert torch.equal(again.chances(prompts), chances) and again.state_dict() == tracker.state_dict()


def test_a_state_of_the_tracker_does_not_change_with_later_steps():
    """A checkpoint may be written while the next step runs."""
    tracker = SuccessTracker(0.5)
    tracker.observe(torch.tensor([3]), torch.tensor([True]))
    state = tracker.state_dict()
    tracker.observe(torch.tensor([3, 4]), torch.tensor([True, False]))
    assert state == {"prompts": [3], "right": [1.25], "wrong": [0.25]}


def test_length_adaptive_lambda():
    lam = adv.length_adaptive_lambda(torch.tensor([0, 1, 19, 20, 40, 20480]), alpha=0.05)
    assert lam.tolist() == pytest.approx([0, 0, 0, 0, 0.5, 1 - 1 / 1024], abs=1e-15)
    floored = adv.length_adaptive_lambda(torch.tensor([1, 399, 400, 4000]), alpha=0.05, floor=0.95)
    assert floored.tolist() == pytest.approx([0.95, 0.95, 0.95, 0.995], abs=1e-15)


@settings(max_examples=80, deadline=None)
@given(
    batches(),
    st.sampled_from(LAMBDAS),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_gae_equals_the_sum_of_the_paper(batch, lam, gamma, dtype):
    e = batch.experience
    rewards, values = e["rewards"].to(dtype), e["values"].to(dtype)
    lams = [lam] * e.num_sequences
    expected = torch.tensor(
        sum_gae(rewards.tolist(), values.tolist(), batch.spans, lams, gamma), dtype=torch.float64
    )
    result = adv.gae(rewards, values, e.response_mask, e.cu_seqlens, lam, gamma)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-9)
    loop = torch.tensor(
        loop_gae(rewards.tolist(), values.tolist(), batch.spans, lams, gamma), dtype=torch.float64
    )
    torch.testing.assert_close(loop, expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 700)), min_size=1, max_size=8),
    st.integers(0, 999),
    st.sampled_from([1.0, 0.99]),
)
def test_gae_over_several_windows_with_a_lambda_for_each_response(shapes, seed, gamma):
    """Responses cover 0 to 3 windows; some have no prompt or no token."""
    batch = make_batch(shapes, seed)
    e = batch.experience
    lam = torch.rand(len(shapes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 0.1
    expected = loop_gae(e["rewards"].tolist(), e["values"].tolist(), batch.spans, lam.tolist(), gamma)
    result = adv.gae(e["rewards"], e["values"], e.response_mask, e.cu_seqlens, lam, gamma)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.95, 0.9995, 1.0, "adaptive"])
def test_gae_of_20k_tokens(lam):
    """lambda^t underflows for 0.95, and for 1 a sum has 20,000 terms."""
    batch = make_batch([(3, 20480), (100, 1), (7, 19999), (1, 300), (2, 128)], 1)
    e = batch.experience
    lengths = e.response_lengths
    lams = (
        adv.length_adaptive_lambda(lengths, 0.05)
        if lam == "adaptive"
        else torch.full((5,), lam, dtype=torch.float64)
    )
    rewards, values = e["rewards"].float(), e["values"].float()
    expected = torch.tensor(
        loop_gae(rewards.tolist(), values.tolist(), batch.spans, lams.tolist(), 1.0), dtype=torch.float64
    )
    result = adv.gae(rewards, values, e.response_mask, e.cu_seqlens, lams).double()
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-9)


def test_gae_of_more_responses_than_fit_into_one_block():
    n = adv.GAE_WINDOW // adv.GAE_STEPS[0] + 300
    batch = make_batch([(1, 1 + (i * 7919) % 9) for i in range(n)], 2)
    e = batch.experience
    expected = loop_gae(e["rewards"].tolist(), e["values"].tolist(), batch.spans, [0.9] * n, 1.0)
    result = adv.gae(e["rewards"], e["values"], e.response_mask, e.cu_seqlens, 0.9)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(batches(longest=200), st.randoms(use_true_random=False))
def test_gae_does_not_depend_on_order_or_packing_bit_for_bit(batch, random):
    e = batch.experience
    e["lam"] = torch.rand(
        e.num_sequences, generator=torch.Generator().manual_seed(e.num_tokens), dtype=torch.float64
    )
    e["whole"] = adv.gae(e["rewards"], e["values"], e.response_mask, e.cu_seqlens, e["lam"])
    order = list(range(e.num_sequences))
    random.shuffle(order)
    for part in (e.select(order), e.select(order[::2]), e.select(order[:1])):
        alone = adv.gae(part["rewards"], part["values"], part.response_mask, part.cu_seqlens, part["lam"])
        assert torch.equal(alone, part["whole"])


@settings(max_examples=30, deadline=None)
@given(batches())
def test_returns_of_lambda_one_are_monte_carlo(batch):
    """They equal the future reward for any values; tokens outside the responses are NaN and not read."""
    e = batch.experience
    rewards, values = (
        torch.where(e.response_mask, e[k], torch.tensor(torch.nan)) for k in ("rewards", "values")
    )
    targets = adv.returns(
        adv.gae(rewards, values, e.response_mask, e.cu_seqlens, 1.0), values, e.response_mask
    )
    expected = torch.zeros(e.num_tokens, dtype=torch.float64)
    for start, end in batch.spans:
        for t in range(start, end):
            expected[t] = e["rewards"][t:end].sum()
    torch.testing.assert_close(targets, expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    batches(),
    st.data(),
    st.sampled_from(LAMBDAS),
    st.sampled_from([1.0, 0.9]),
    st.integers(0, 3),
)
def test_extended_gae_equals_the_sum_of_the_paper(batch, data, lam, gamma, tail):
    """Windows are the last tokens of responses, some unfinished; other tokens are NaN and not read."""
    e, windows = batch.experience, []
    mask = torch.zeros_like(e.response_mask)
    for start, end in batch.spans:
        windows.append((data.draw(st.integers(start, end - 1)), end))
        mask[windows[-1][0] : end] = True
    goes_on = data.draw(st.lists(st.booleans(), min_size=len(windows), max_size=len(windows)))
    lams = [lam * 0.9**i for i in range(len(windows))]
    lam_each = torch.tensor(lams, dtype=torch.float64)
    e["prefix_tokens"] = torch.tensor([a - b for (a, _), (b, _) in zip(windows, batch.spans, strict=True)])
    assert e.sampled_mask.equal(mask)
    assert e.sampled_lengths.tolist() == [end - start for start, end in windows]
    rewards, values = (torch.where(mask, e[name], torch.nan) for name in ("rewards", "values"))
    found = extended_gae(rewards, values, mask, e.cu_seqlens, lam_each, torch.tensor(goes_on), gamma, tail)
    loop = e["rewards"].tolist(), e["values"].tolist(), windows, goes_on, lams, gamma, tail
    expected = sum_extended_gae(*loop)
    torch.testing.assert_close(found.tolist(), expected, rtol=1e-6, atol=1e-9)
    none = torch.zeros(len(windows), dtype=torch.bool)
    plain = adv.gae(rewards, values, mask, e.cu_seqlens, lam_each, gamma)
    given = rewards, values, mask, e.cu_seqlens, lam_each, none, gamma, tail
    assert extended_gae(*given).equal(plain)


def test_extended_gae_by_hand():
    """Three tokens of an unfinished response, lambda 1/2: delta 1, 2, 0; and three of a finished one.

    V after the last token of the first is V(s_2).
    """
    values, rewards = torch.tensor([1.0, 2.0, 4.0] * 2), torch.tensor([0.0] * 5 + [1.0])
    mask, ends, goes_on = (
        torch.ones(6, dtype=torch.bool),
        torch.tensor([0, 3, 6]),
        torch.tensor([True, False]),
    )
    found = extended_gae(rewards, values, mask, ends, 0.5, goes_on)
    assert found.tolist() == [2.0, 2.0, 0.0, 1.25, 0.5, -3.0]
    assert extended_gae(rewards, values, mask, ends, 0.5, goes_on, tail=2).tolist()[:3] == [2.0, 0.0, 0.0]
    nothing = extended_gae(rewards, values, ~mask, ends, 0.5, goes_on)
    assert nothing.tolist() == [0.0] * 6


def test_one_token_response():
    mask, cu = torch.tensor([False, True]), torch.tensor([0, 2])
    assert adv.gae(torch.tensor([9.0, 1.0]), torch.tensor([9.0, 0.25]), mask, cu, 0.95).tolist() == [0, 0.75]


def test_gae_of_nothing():
    empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    assert adv.gae(empty, empty, none, torch.tensor([0]), 0.95).shape == (0,)
    assert adv.gae(
        torch.ones(2), torch.ones(2), torch.zeros(2, dtype=torch.bool), torch.tensor([0, 2]), 1.0
    ).tolist() == [0, 0]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=5))
def test_response_lengths_of_any_mask(rows):
    """Returns the lengths, or None if a sequence is not [False ... False True ... True]."""
    mask = torch.tensor([flag for row in rows for flag in row], dtype=torch.bool)
    cu_seqlens = torch.tensor([0] + [len(row) for row in rows]).cumsum(0)
    if all(row == sorted(row) for row in rows):
        assert adv.response_lengths(mask, cu_seqlens).tolist() == [sum(row) for row in rows]
    else:
        assert adv.response_lengths(mask, cu_seqlens) is None


@settings(max_examples=80, deadline=None)
@given(
    # For each response: prompt tokens, and (observed, then sampled) tokens of each turn. An episode may start
    # or end with observed tokens.
    st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=5)),
        min_size=1,
        max_size=7,
    ),
    st.integers(0, 2**31),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_gae_goes_from_turn_to_turn(shapes, seed, gamma, dtype):
    """A turn's last state is followed by the next turn's first; observed tokens are never read.

    The same sampled tokens without a gap give bitwise equal advantages.
    """
    turns = [[False] * p + [s for o, n in of for s in [False] * o + [True] * n] for p, of in shapes]
    mask = torch.tensor([flag for row in turns for flag in row])
    ends = torch.tensor([0, *map(len, turns)]).cumsum(0)
    g = torch.Generator().manual_seed(seed)
    rewards, values = (
        torch.randn(len(mask), generator=g, dtype=torch.float64).to(dtype).where(mask, torch.nan)
        for _ in range(2)
    )
    lam = torch.rand(len(shapes), generator=g, dtype=torch.float64)
    expected = torch.zeros(len(mask), dtype=torch.float64)
    reward_ahead = torch.zeros(len(mask), dtype=torch.float64)
    for i in range(len(shapes)):
        next_value = next_advantage = to_come = 0.0
        for t in range(int(ends[i + 1]) - 1, int(ends[i]) - 1, -1):
            if mask[t]:
                delta = float(rewards[t]) + gamma * next_value - float(values[t])
                next_advantage = delta + gamma * float(lam[i]) * next_advantage
                to_come = float(rewards[t]) + to_come
                next_value = float(values[t])
                expected[t], reward_ahead[t] = next_advantage, to_come
    found = adv.gae(rewards, values, mask, ends, lam, gamma)
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, **close)
    targets = adv.returns(adv.gae(rewards, values, mask, ends, 1.0), values, mask)
    torch.testing.assert_close(targets.double(), reward_ahead, **close)
    lengths = torch.tensor([sum(row) for row in turns])
    alone = adv.gae(
        rewards[mask],
        values[mask],
        torch.ones(int(mask.sum()), dtype=torch.bool),
        torch.cat([ends[:1], lengths.cumsum(0)]),
        lam,
        gamma,
    )
    assert torch.equal(found[mask], alone) and not found[~mask].any()
    if dtype == torch.float64:
        by_position = adv.error_by_position(values, values - 1, mask, lengths)
        counts = torch.zeros(adv.POSITION_BINS, dtype=torch.float64)
        for n in lengths.tolist():
            for p in range(n):
                counts[p * adv.POSITION_BINS // n] += 1
        torch.testing.assert_close(by_position, counts.expand(3, -1))


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from([0.0, 1000.0]))
def test_moments_add_up_and_whiten(batch, shift):
    e = batch.experience
    x = e["advantages"] + shift
    parts = [e.select([i]) for i in range(e.num_sequences)]
    total = sum(adv.moments(p["advantages"] + shift, p.response_mask) for p in parts)
    kept = x[e.response_mask]
    count, mean, var = adv.mean_and_variance(total)
    assert count == kept.numel()
    assert mean == pytest.approx(float(kept.mean()), rel=1e-9, abs=1e-9)
    white = adv.whiten(x, e.response_mask, count, mean, var)
    assert torch.equal(white[~e.response_mask], torch.zeros(e.num_tokens - int(count), dtype=torch.float64))
    if count > 1:
        assert var == pytest.approx(float(kept.var()), rel=1e-6, abs=1e-8)
        torch.testing.assert_close(
            white[e.response_mask], (kept - kept.mean()) / (kept.var() + 1e-8).sqrt(), rtol=1e-4, atol=1e-4
        )
    else:
        assert torch.equal(white[e.response_mask], kept)


def test_moments_of_nothing():
    none = adv.moments(torch.ones(3), torch.zeros(3, dtype=torch.bool))
    assert adv.mean_and_variance(none) == (0, 0, 0)
    assert adv.gae_metrics(torch.zeros(6, dtype=torch.float64))["gae/lambda_mean"] == 0


def test_gae_metrics():
    x, mask, lam = (
        torch.tensor([1.0, 9.0, 3.0]),
        torch.tensor([True, False, True]),
        torch.tensor([0.0, 0.5, 1.0, 0.9]),
    )
    parts = adv.gae_sums(x, mask, lam[:1]) + adv.gae_sums(x[:0], mask[:0], lam[1:])
    expected = {
        "gae/lambda_mean": 0.6,
        "gae/lambda_clamped": 0.25,
        "gae/advantage_mean": 2.0,
        "gae/advantage_std": 2**0.5,
    }
    assert adv.gae_metrics(parts) == pytest.approx(expected)


def test_the_energy_of_a_token_is_the_squared_norm_of_its_gradient() -> None:
    """The reference is |onehot - p|^2, summed token by token; observations have none."""
    g = torch.Generator().manual_seed(0)
    probs = (3 * torch.randn(9, 7, generator=g, dtype=torch.float64)).softmax(-1)
    tokens, cu_seqlens = torch.randint(0, 7, (9,), generator=g), torch.tensor([0, 4, 4, 9])
    mask = torch.tensor([False, True, True, True, False, True, False, True, True])
    logprobs = probs.gather(1, tokens[:, None])[:, 0].log()
    found = gradient_energy(logprobs, probs.square().sum(-1), mask, cu_seqlens)
    squares = (torch.nn.functional.one_hot(tokens, 7) - probs).square().sum(-1)
    expected = torch.zeros(9, dtype=torch.float64)
    for start, end in ((0, 4), (4, 9)):
        total = 0.0
        for t in range(start, end):
            if mask[t]:
                total += float(squares[t])
                expected[t] = total
    assert torch.allclose(found, expected, atol=1e-12)
    assert sampled_positions(mask, cu_seqlens)[mask].tolist() == [0, 1, 2, 0, 1, 2]
    certain = torch.tensor([-6e-8] * 9), torch.ones(9) - 2e-7  # float32 numbers, rounded
    assert (gradient_energy(*certain, mask, cu_seqlens) >= 0).all()


def test_weighted_deviations_from_the_token_baseline_sum_to_zero() -> None:
    """At each position sum_i W (G - B) = 0; a position of one response has the baseline 0."""
    g = torch.Generator().manual_seed(1)
    lengths = [3, 5, 5, 2]
    slots = torch.cat([torch.arange(length) for length in lengths])
    returns = torch.randn(len(slots), generator=g)
    energy = torch.rand(len(slots), generator=g, dtype=torch.float64) + 0.1
    counts = torch.tensor([sum(length > t for length in lengths) for t in range(6)])
    baselines = token_baselines(baseline_sums(returns, energy, slots, 6), counts)
    weighted = torch.zeros(6, dtype=torch.float64).index_add(0, slots, energy * (returns - baselines[slots]))
    assert weighted.abs().max() < 1e-6
    alone = token_baselines(baseline_sums(returns[:3], energy[:3], slots[:3], 3), torch.ones(3))
    assert alone.tolist() == [0.0] * 3
