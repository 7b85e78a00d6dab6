"""Dynamic sampling: which groups a step keeps, against a plain implementation; state through JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from megarl.config.errors import ConfigError, DataError
from megarl.config.schema import AlgorithmConfig, DynamicSamplingConfig
from megarl.data.prompts import Prompt
from megarl.data.sample import DTYPES, Sample, SampleGroup, TokenData
from megarl.rollout import messages as m
from megarl.rollout.collector import GroupCollector, make_rollout_batch
from megarl.rollout.grading import make_words_pattern
from megarl.rollout.metrics import make_records, response_stats
from megarl.rollout.sampling import SamplingParams
from megarl.rollout.state import SAMPLE_KEYS, group_from_state, group_state
from tests.rollout.conftest import delivered

SIZE = 3


def group(uid: int, correct: int, version: int = 0, reflects: bool | None = None) -> SampleGroup:
    responses = [
        Sample.from_data(
            TokenData(
                np.arange(2 + i, dtype=np.int32), np.array([-0.1, *[-1 / 3] * (1 + i)], dtype=np.float32)
            ),
            0,
            finish_reason="stop" if i else "length",
            correct=i < correct,
            extracted=str(i) if i else None,
            error=None if i else "timeout after 10 s",
            reward=1.0 if i < correct else -1.3,
            overlong_penalty=0.0,
            reflects=reflects,
        )
        for i in range(SIZE)
    ]
    return SampleGroup(Prompt(uid, f"p{uid}", (uid, uid + 1), "7", extra={"row": uid}), responses, version)


def drive(collector: GroupCollector, outcomes: list[int]) -> list[int]:
    """Offer groups with `outcomes` correct answers, then mixed ones; return the sizes of the batches."""
    batches, at = [], 0
    while n := collector.next_batch():
        collector.offer([group(i, outcomes[i] if i < len(outcomes) else 1) for i in range(at, at + n)])
        at += n
        batches.append(n)
    return batches


@given(
    outcomes=st.lists(st.integers(0, SIZE), max_size=60),
    prompts=st.integers(1, 12),
    limit=st.integers(1, 6),
    surplus=st.integers(0, 15),
    oversample=st.sampled_from([1.0, 1.5, 3.0]),
)
def test_accepts_mixed_groups_in_prompt_order(outcomes, prompts, limit, surplus, oversample):
    left = [group(1000 + i, 1, version=-1) for i in range(surplus)]
    collector = GroupCollector(
        prompts, DynamicSamplingConfig(enabled=True, max_batches=limit, oversample=oversample), left
    )
    batches = drive(collector, outcomes)
    offered = [outcomes[i] if i < len(outcomes) else 1 for i in range(sum(batches))]
    mixed = [i for i, correct in enumerate(offered) if 0 < correct < SIZE]
    other = [i for i, correct in enumerate(offered) if correct in (0, SIZE)]
    order = [1000 + i for i in range(surplus)] + mixed
    groups, kept = collector.result()
    assert [g.prompt.uid for g in groups] == (order + other)[:prompts] and len(groups) == prompts
    assert [g.prompt.uid for g in kept] == order[prompts : 2 * prompts]
    assert len(batches) <= limit and all(n <= max(prompts, -(-prompts * oversample // 1)) for n in batches)
    if len(batches) < limit:
        assert len(order) >= prompts
    wasted = len(offered) - sum(g.prompt.uid < 1000 for g in (*groups, *kept))
    shares = {"all_right": offered.count(SIZE), "all_wrong": offered.count(0)} if offered else {}
    assert collector.stats() == {
        **{f"rollout/share_{name}": pytest.approx(n / len(offered)) for name, n in shares.items()},
        "rollout/groups_kept": len(mixed),
        "rollout/groups_all_right": offered.count(SIZE),
        "rollout/groups_all_wrong": offered.count(0),
        "rollout/batches": len(batches),
        "rollout/prompts": len(offered),
        "rollout/tokens": len(offered) * (2 + 3 + 4),
        "rollout/waste": pytest.approx(wasted / max(len(offered), 1)),
        "rollout/surplus": len(kept),
    }


@given(st.lists(st.integers(0, SIZE), max_size=40), st.integers(1, 12))
def test_without_dynamic_sampling_one_generation_is_the_batch(outcomes, prompts):
    collector = GroupCollector(prompts, DynamicSamplingConfig(enabled=False, oversample=2.0))
    assert drive(collector, outcomes) == [prompts]
    groups, surplus = collector.result()
    assert [g.prompt.uid for g in groups] == list(range(prompts)) and not surplus


@given(
    rewards=st.lists(
        st.lists(st.sampled_from([-1.0, 0.1, 0.1 + 1e-8, 0.3, 1.0]), min_size=SIZE, max_size=SIZE),
        max_size=30,
    ),
    correct=st.lists(st.integers(0, SIZE), min_size=30, max_size=30),
    by=st.sampled_from(["accuracy", "score"]),
)
def test_what_must_differ(rewards, correct, by):
    """By score, only rewards decide; rewards that differ by rounding errors count as equal."""
    groups = []
    for i, row in enumerate(rewards):
        one = group(i, correct[i])
        one.samples = [structs.replace(r, reward=reward) for r, reward in zip(one.samples, row, strict=True)]
        groups.append(one)
    collector = GroupCollector(99, DynamicSamplingConfig(enabled=True, by=by))
    collector.offer(groups)
    differ = [
        max(row) - min(row) > 0.01 if by == "score" else g.is_mixed
        for row, g in zip(rewards, groups, strict=True)
    ]
    assert [g.prompt.uid for g in collector.accepted] == [i for i, found in enumerate(differ) if found]
    stats = collector.stats()
    assert stats["rollout/groups_kept"] == sum(differ)
    alike = [g.num_correct for g, found in zip(groups, differ, strict=True) if not found]
    assert stats["rollout/groups_all_right"] == alike.count(SIZE)
    assert stats["rollout/groups_all_wrong"] == alike.count(0)


def test_by_score_the_limit_speaks_of_rewards():
    config = DynamicSamplingConfig(enabled=True, max_batches=1, at_limit="stop", by="score")
    with pytest.raises(DataError, match="only 0 of 2 groups have rewards that differ"):
        drive(GroupCollector(2, config), [0, SIZE])
    assert drive(GroupCollector(2, config), [1, 2]) == [2]


def test_refills_are_sized_by_the_acceptance_rate():
    # 8 wanted. 2 of the first 8 are mixed: rate (2 + 1) / (8 + 2), so ceil(6 / 0.3) = 20, limited to 8.
    outcomes = [1, 1] + [0] * 6 + [1] * 4 + [SIZE] * 4
    collector = GroupCollector(8, DynamicSamplingConfig(enabled=True))
    # After 16 prompts 6 are mixed: ceil(2 / (7 / 18)) = 6.
    assert drive(collector, outcomes) == [8, 8, 6]
    assert len(collector.result()[1]) == 4


def test_the_limit_stops_with_a_message_where_asked():
    config = DynamicSamplingConfig(enabled=True, max_batches=2, at_limit="stop")
    limit = r"max_batches: after 2 generation batches \(8 prompts\) only 1 of 4 groups"
    with pytest.raises(DataError, match=limit):
        drive(GroupCollector(4, config), [0, 1, 0, 0, SIZE, 0, 0, 0])
    # The batch is full at the limit, so there is no error.
    assert drive(GroupCollector(4, config), [0, 1, 1, 0, 1, 0, 1]) == [4, 4]


@pytest.mark.parametrize(
    ("error", "graded", "kind", "message"),
    [
        ("TypeError: no", False, ConfigError, "reward.verifier: it failed on every answer of 8 prompts: T"),
        ("rollout.agent: KeyError: 'x'", False, ConfigError, "rollout.agent: KeyError: 'x' (and no response"),
        ("rollout.tools: a tool failed: no", True, DataError, "rollout.dynamic_sampling.max_batches: after"),
    ],
)
def test_the_limit_names_who_has_failed(error, graded, kind, message):
    """The verifier is blamed if nothing was graded and the error names no other key.

    Graded failures, which the policy caused, end the run as wrong answers do."""
    config = DynamicSamplingConfig(enabled=True, max_batches=2, at_limit="stop")
    collector = GroupCollector(4, config)
    failed = [structs.replace(response, error=error, graded=graded) for response in group(0, 0).samples]
    with pytest.raises(kind) as caught:
        while n := collector.next_batch():
            collector.offer([replace(group(i, 0), samples=failed) for i in range(n)])
    assert str(caught.value).startswith(message) and error in str(caught.value)


def test_the_accepted_length_counts_all_verifications():
    """Two responses accept 3 drafts in 2 passes, and 0 in 1: one draft a pass, plus the token of the pass."""
    first, second, *rest = group(0, 1).samples
    assert "rollout/accept_length" not in response_stats([first, second, *rest])
    with_drafts = structs.replace(first, accepted_drafts=3, verifications=2)
    without = structs.replace(second, verifications=1)
    assert response_stats([with_drafts, without, *rest])["rollout/accept_length"] == 2.0


def test_lengths_and_reflection_by_hand():
    """The first of three responses (2, 3 and 4 tokens) is correct; means over no responses are left out."""
    plain = group(0, 1).samples
    stats = response_stats(plain)
    assert (stats["response/length_right"], stats["response/length_wrong"]) == (2, 3.5)
    assert not any(name.startswith("reflection/") for name in stats)  # no words configured
    both = [structs.replace(r, reflects=flag) for r, flag in zip(plain, (True, False, True), strict=True)]
    found = {name: value for name, value in response_stats(both).items() if name.startswith("reflection/")}
    expected = {"share": 2 / 3, "accuracy": 1 / 2, "accuracy_without": 0.0}
    assert found == pytest.approx({f"reflection/{name}": value for name, value in expected.items()})
    for flag in (True, False):
        wrong = response_stats([structs.replace(r, reflects=flag) for r in group(0, 0).samples])
        assert wrong["response/length_wrong"] == 3 and "response/length_right" not in wrong
        names = [name for name in wrong if name.startswith("reflection/")]
        assert names == ["reflection/share"] and wrong["reflection/share"] == float(flag)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so x = 2. Wait, no", True),
        ("WAIT", True),
        ("wait\nagain", True),
        ("we waited, awaiting nothing", False),
        ("wait_for_it wait2", False),
        ("Let me  check\nthis", True),
        ("let\nme check", True),
        ("let me checkmate", False),
        ("I double-check.", True),
        ("a double check", False),
        ("我觉得等等不对", True),
        ("c+ d", False),
        ("in c++ it is", True),
        ("", False),
    ],
)
def test_reflection_words(text, found):
    """Latin words match as whole words in any case, with any space inside a phrase; signs match literally."""
    pattern = make_words_pattern(("wait", "let me check", "double-check", "等等", "c++"))
    assert (pattern.search(text) is not None) == found


def test_no_words_find_nothing():
    assert make_words_pattern(()) is None


@pytest.mark.parametrize("kind", [np.uint8, np.int16])
def test_routing_survives_json_and_is_a_column(kind):
    """Responses without routing, as in an older checkpoint's surplus, have no expert at any token."""
    routed, free = group(5, 2), group(6, 1)
    lengths = [len(routed.prompt.tokens) + r.num_sampled for r in routed.samples]
    for i, response in enumerate(routed.samples):
        response.data.routed_experts = np.full((lengths[i], 3, 2), i, dtype=kind)
    again = group_from_state(json.loads(json.dumps(group_state(routed))))
    for a, b in zip(again.samples, routed.samples, strict=True):
        assert a.data.routed_experts.dtype == kind
        assert np.array_equal(a.data.routed_experts, b.data.routed_experts)
    experience = delivered(make_rollout_batch([free, again]))
    column, starts = experience["routing"].numpy(), experience.cu_seqlens.tolist()
    assert column.shape == (experience.num_tokens, 3, 2) and column.dtype == kind
    assert (column[: starts[SIZE]] == np.iinfo(kind).max).all()
    for i in range(SIZE):
        assert (column[starts[SIZE + i] : starts[SIZE + i + 1]] == i).all()
    assert "routing" not in delivered(make_rollout_batch([free]))


def test_sampling_sets_survive_json_and_are_a_column():
    """Sets of different widths are padded; responses without sets, and prompts, have none."""
    recorded, free = group(5, 2), group(6, 1)
    for i, response in enumerate(recorded.samples):
        sets = np.full((response.num_sampled, 1 + i), i, np.int32)
        sets[0, 1:] = -1
        data = structs.replace(response.data, sampling_sets=sets)
        fields = {name: getattr(response, name) for name in SAMPLE_KEYS}
        recorded.samples[i] = Sample.from_data(data, 0, **fields)
    again = group_from_state(json.loads(json.dumps(group_state(recorded))))
    for a, b in zip(again.samples, recorded.samples, strict=True):
        assert a.set_width == b.set_width and np.array_equal(a.data.sampling_sets, b.data.sampling_sets)
    experience = delivered(make_rollout_batch([free, again]))
    column, starts = experience["sampling_sets"].numpy(), experience.cu_seqlens.tolist()
    assert column.shape == (experience.num_tokens, SIZE) and column.dtype == np.int32
    assert (column[: starts[SIZE]][experience.response_mask[: starts[SIZE]].numpy()] == -1).all()
    for i, response in enumerate(recorded.samples):
        found = column[starts[SIZE + i + 1] - response.num_sampled : starts[SIZE + i + 1]]
        assert (found[:, : i + 1] == response.data.sampling_sets).all() and (found[:, i + 1 :] == -1).all()
    assert "sampling_sets" not in delivered(make_rollout_batch([free]))


def test_turns_and_observations_have_rows_of_sampling_sets():
    empty = {name: np.empty(0, dtype) for name, dtype in DTYPES.items()}
    whole = TokenData(finish_reason="stop", **empty)
    for tokens, sets in (([4, 5], [[4, 9], [5, -1]]), ([6], [[6, 2, 3]])):
        turn = TokenData(tokens, [-1.0] * len(tokens), "stop", [0] * len(tokens))
        turn.sampling_sets = np.array(sets, np.int32)
        whole.append_turn([7], turn)
    none = [-1, -1, -1]
    assert whole.tokens.tolist() == [7, 4, 5, 7, 6]
    assert whole.sampling_sets.tolist() == [none, [4, 9, -1], [5, -1, -1], none, [6, 2, 3]]
    assert whole.first(2, 0).sampling_sets.tolist() == [none, [4, 9, -1]]


def of_turns(uid: int, reward: bool = True) -> SampleGroup:
    """Make two-turn responses of s(ampled) and o(bserved) tokens: s o s, s s o s, s s s o s."""
    made = group(uid, 2)
    for i, response in enumerate(made.samples):
        tokens = np.arange(3 + i, dtype=np.int32)
        sampled = tokens != i + 1
        rewards = np.where(tokens == i, 0.25, 0.0).astype(np.float32) if reward else None
        logprobs, versions = np.full(3 + i, -0.5, dtype=np.float32), (7 * sampled).astype(np.int32)
        data = TokenData(tokens, logprobs, policy_versions=versions, is_sampled=sampled, turn_rewards=rewards)
        fields = {name: getattr(response, name) for name in SAMPLE_KEYS}
        made.samples[i] = Sample.from_data(data, 0, **fields | {"turns": 2, "calls": 1})
    return made


def test_what_was_observed_is_not_the_policys():
    """Lengths count sampled tokens; versions and rewards of observed tokens are ignored.

    Single-turn responses have no episode metrics."""
    made, plain = of_turns(3), group(4, 1)
    assert [(r.num_sampled, r.num_tokens, r.oldest_version) for r in made.samples] == [
        (2, 3, 7),
        (3, 4, 7),
        (4, 5, 7),
    ]
    stats = response_stats(made.samples)
    assert stats["response/length_mean"] == 3 and stats["response/length_max"] == 4
    found = {name: value for name, value in stats.items() if name.startswith("episode/")}
    assert found == {"episode/turns_mean": 2, "episode/calls_mean": 1, "episode/observed_mean": 1}
    assert not any(name.startswith("episode/") for name in response_stats(plain.samples))
    for groups in ([plain, made], [group_from_state(json.loads(json.dumps(group_state(made)))), plain]):
        batch = make_rollout_batch(groups)
        own = batch.local
        for name in ("lengths", "response_lengths", "prompt_lengths"):
            assert torch.equal(getattr(batch, name), getattr(own, name)), name
        assert batch.has_observations and (batch.prompt_lengths == 2).all()
        assert not own["engine_logprobs"][~own.response_mask].any()
        assert not own["token_versions"][~own.response_mask].any()
        for i, row in enumerate(range(own.num_sequences)[3:] if groups[0] is plain else range(3)):
            start = int(own.cu_seqlens[row]) + 2
            end = int(own.cu_seqlens[row + 1])
            assert own.response_mask[start:end].tolist() == [t != i + 1 for t in range(3 + i)]
            assert own["turn_rewards"][start:end].tolist() == [0.25 * (t == i) for t in range(3 + i)]
    none = make_rollout_batch([of_turns(3, reward=False), plain])
    assert "turn_rewards" not in none.local and none.has_observations
    assert not make_rollout_batch([plain]).has_observations


@pytest.mark.parametrize(
    ("advantage", "counts"), [("gae", [2, 0, 0, 0, 3, 4]), ("group", [0, 0, 0, 0, 3, 4])]
)
def test_one_response_alone_counts_where_none_is_compared(advantage, counts):
    """For example a T-PPO window in a batch without the other responses of its prompt."""
    groups = [group(1, 1), group(2, 1)]
    for number, only in zip((0, 1), ({0}, {1, 2}), strict=True):
        graded = [structs.replace(r, graded=i in only) for i, r in enumerate(groups[number].samples)]
        groups[number] = replace(groups[number], samples=graded)
    compared = AlgorithmConfig(advantage=advantage).advantage_method.compares_group
    batch = make_rollout_batch(groups, compared=compared)
    assert batch.response_lengths.tolist() == counts
    assert batch["rewards"].tolist() == pytest.approx([1.0 * (counts[0] > 0), 0, 0, 0, -1.3, -1.3])


def test_samples_and_tokens_survive_the_wire():
    for one in (*of_turns(1).samples, *of_turns(2, reward=False).samples, *group(3, 1).samples):
        sent = msgspec.msgpack.encode(structs.replace(one, data=None))
        assert msgspec.msgpack.decode(sent, type=Sample) == structs.replace(one, data=None)
        told = m.decode_message("rank 1", m.encode_message(m.TokenDataReply({5: one.data})))
        assert isinstance(told, m.TokenDataReply) and told.data[5] == one.data
        for name, column in structs.asdict(one.data).items():
            assert column is None or getattr(column, "dtype", 0) == getattr(
                getattr(told.data[5], name), "dtype", 0
            )
        nothing = structs.asdict(one.data.first(0, 2)).items()
        columns = [column for name, column in nothing if name != "finish_reason"]
        assert not any(len(column) if hasattr(column, "__len__") else column for column in columns)


def test_state_survives_json_exactly():
    before = group(5, 2, version=11, reflects=True)
    after = group_from_state(json.loads(json.dumps(group_state(before))))
    assert after.prompt == before.prompt and after.policy_version == 11
    for a, b in zip(after.samples, before.samples, strict=True):
        assert a.data.tokens.dtype == np.int32 and a.data.logprobs.dtype == np.float32
        assert np.array_equal(a.data.tokens, b.data.tokens)
        assert np.array_equal(a.data.logprobs, b.data.logprobs)
        assert structs.replace(a, data=None) == structs.replace(b, data=None)
    old = group_state(before)  # a checkpoint from before these fields existed
    for response in old["responses"]:
        for name in ("reflects", "routing", "sampled", "rewards", "turns", "calls"):
            del response[name]
    assert [r.reflects for r in group_from_state(old).samples] == [None] * SIZE


class Words:
    """A tokenizer that decodes token 7 to "7 "."""

    eos_token_id = pad_token_id = chat_template = None
    name_or_path = ""

    def batch_decode(self, rows: list[list[int]], **_: object) -> list[str]:
        return ["".join(f"{token} " for token in row) for row in rows]


def test_samples_know_whose_each_part_is():
    """The parts join to the response; without observations there are no parts."""
    groups = [of_turns(3), group(4, 1)]
    found = make_records(1, groups, Words(), 6)
    for i in range(SIZE):
        turns = found[i].turns
        assert turns is not None and [who for who, _ in turns] == ["policy", "observed", "policy"]
        assert "".join(text for _, text in turns) == found[i].response
        assert turns[1][1] == f"{i + 1} "
    assert found[SIZE].turns is None
    silent = of_turns(5).samples[0]
    silent.data.is_sampled[:] = True
    assert silent.turn_texts(Words()) is None


def test_a_rows_other_columns_reach_whoever_draws() -> None:
    """Integers of any size, half of a surrogate pair, and values that JSON does not have."""
    extra = {"n": 10**30, "half": "\ud800", "day": date(2026, 11, 25), "raw": b"x", "a": {"b": [1, None]}}
    prompt = Prompt(7, "a", (1, 2), "3", "sums", extra, "q", "e")
    sent = m.encode_message(
        m.StartSamples(SamplingParams(1), True, 0, [m.pack_prompt(prompt, whole=True)], [])
    )
    begin = m.decode_message("the controller", sent)
    assert isinstance(begin, m.StartSamples)
    assert m.unpack_prompt(begin.prompts[0]) == replace(
        prompt, extra=extra | {"day": "2026-11-25", "raw": "b'x'"}
    )
