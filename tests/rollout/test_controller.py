"""Rollouts of a real model over several ranks give the same batches however the work is split.

Ranks are threads that exchange messages over sockets and gather at a barrier."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import math
import re
import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megarl.agents.episode import Policy
from megarl.algorithms.advantages import Responses
from megarl.config.errors import ConfigError, DataError, EngineError, WaitTimeout
from megarl.config.methods import ADVANTAGES, load_function
from megarl.config.schema import Config
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.data.prompts import ProblemSet, Prompt
from megarl.data.sample import TokenData
from megarl.rewards.pool import VerifierPool
from megarl.rewards.verdict import Verdict
from megarl.rollout.collector import reward_part
from megarl.rollout.controller import Controller, Dispatcher, GroupRequest
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.messages import Hub, Link, RankReady
from megarl.rollout.metrics import make_records, select_groups_to_show
from megarl.rollout.rank import RolloutRank
from megarl.rollout.sampling import SamplingParams, response_seed
from megarl.rollout.state import group_from_state, group_state, join_shares
from megarl.schedule.scores import EvaluationResult
from megarl.training.batch import loss_weights
from tests.engines import load_folder
from tests.rollout.conftest import TINIEST, delivered, state_of, threads
from tests.tiny_models import make_tiny_model


class OddText:
    """Call a text correct if the checksum of text and answer is even; some verdicts have errors.

    A random model thus has some correct responses."""

    def verify(self, items: Sequence[tuple[str, str]]) -> list[Verdict]:
        sums = [zlib.crc32((text + answer).encode()) for text, answer in items]
        return [
            Verdict(s % 2 == 0, str(s % 5) if s % 7 else None, "died" if s % 11 == 0 and s % 2 else None)
            for s in sums
        ]


class Failing(OddText):
    """OddText that leaves about a third of the answers ungraded: those with a checksum divisible by 3."""

    def verify(self, items: Sequence[tuple[str, str]]) -> list[Verdict]:
        verdicts = super().verify(items)
        fails = [zlib.crc32((answer + text).encode()) % 3 == 0 for text, answer in items]
        failed = Verdict(False, error="ConnectionRefusedError: nobody is there", graded=False)
        return [failed if f else verdict for f, verdict in zip(fails, verdicts, strict=True)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a tiny engine per rank (4), their tokenizer, and 9 prompts."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", **TINIEST)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engines = []
    for rank in range(4):
        engine = TransformersEngine(folder, eos_ids=range(1, 40), max_batch=5 + 3 * rank)
        engine.start()
        load_folder(engine, version=3)
        engines.append(engine)
    texts = [f"{a}+{b}=?" for a in range(1, 4) for b in range(1, 4)]
    prompts = [Prompt(100 + i, t, tuple(tokenizer(t).input_ids), str(i)) for i, t in enumerate(texts)]
    return engines, tokenizer, prompts


def spoken(tokenizer, tokens: list[int]) -> str:
    """Decode without <pad> and <eos>; other special tokens stay in the text."""
    return tokenizer.decode([token for token in tokens if token not in (0, 1)])


def config(**sections) -> Config:
    rollout = {"prompts": 4, "group_size": 3, "max_response_tokens": 12, **sections.pop("rollout", {})}
    return Config(
        recipe="dapo",
        run_dir="runs/x",
        steps=1,
        model={"path": "models/x"},
        rollout=rollout,
        seed=5,
        **sections,
    )


def run_ranks(
    world, settings_: Config, ranks: int, steps: int, act=None, **options
) -> list[list[RolloutBatch]]:
    """Return the batches of each rank, or its exception. `act(rank)` replaces the collection of steps."""
    engines, tokenizer, prompts = world
    runtimes = threads(ranks)
    results: list[Any] = [None] * ranks

    def one(rank: int) -> None:
        torch.set_num_threads(1)
        endless = itertools.cycle(prompts)
        verifier = options.get("verifiers", [OddText()] * ranks)[rank]
        rollouts = RolloutRank(
            settings_,
            runtimes[rank],
            engines[rank],
            verifier,
            tokenizer,
            take_prompts=lambda n: list(itertools.islice(endless, n)),
        )
        try:
            results[rank] = act(rollouts) if act else [rollouts.collect(step) for step in range(steps)]
        except Exception as error:  # noqa: BLE001 (the tests look at it)
            results[rank] = error
        rollouts.close()

    running = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    return results


def evaluate(rank: RolloutRank, *arguments: Any) -> EvaluationResult:
    return EvaluationResult(rank.evaluate(*arguments))


def facts(batch: RolloutBatch) -> Any:
    """Return what must be equal: metadata of responses, metrics without `rollout/moved`, and errors."""
    rows = [
        (
            g.prompt.uid,
            g.policy_version,
            [(r.num_sampled, r.finish_reason, r.correct, r.extracted, r.error, r.reward) for r in g.samples],
        )
        for g in batch.groups
    ]
    return rows, {k: v for k, v in batch.metrics.items() if k != "rollout/moved"}, batch.errors


def bodies(batches: Sequence[RolloutBatch]) -> list[Any]:
    """Return tokens and log-probs of each response; exactly one rank must have them."""
    held = [
        [r.data for r in responses if r.data is not None]
        for responses in zip(*(b.samples for b in batches), strict=True)
    ]
    assert {len(each) for each in held} == {1}
    return [(body.tokens.tolist(), body.logprobs.tobytes()) for (body,) in held]


@settings(max_examples=6, deadline=None)
@given(
    split=st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (4, 2)]),
    prompts=st.integers(1, 6),
    group=st.integers(2, 4),
    dynamic=st.booleans(),
    limit=st.integers(1, 4),
    soft=st.booleans(),
    in_flight=st.sampled_from([None, 0, 1, 2, 5]),
)
def test_any_split_of_the_work_gives_the_same_run(
    world, split, prompts, group, dynamic, limit, soft, in_flight
):
    """`split` is the number of ranks and of ranks per engine. Each response's tokens are on one rank only."""
    ranks, each = split
    settings_ = config(
        rollout={
            "engine": "sglang",
            "engine_tp": each,
            "prompts": prompts,
            "group_size": group,
            "in_flight": in_flight,
            "dynamic_sampling": {"enabled": dynamic, "max_batches": limit},
        },
        reward={"overlong": {"soft_punishment": soft, "buffer": 6}},
    )
    single = settings_.model_copy(update={"rollout": settings_.rollout.model_copy(update={"engine_tp": 1})})
    alone = run_ranks(world, single, 1, steps=3)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.rollout.messages.KEEP_ALIVE_SECONDS", 0.01)  # idle ranks get many keep-alives
        found = run_ranks(world, settings_, ranks, steps=3)
    for batches in found:
        assert [facts(batch) for batch in batches] == [facts(batch) for batch in alone]
    for step, batch in enumerate(alone):
        assert bodies([batches[step] for batches in found]) == bodies([batch])


def test_engines_of_different_speeds_give_the_same_run(world, monkeypatch):
    """With one of three engines slow, the others take over its waiting responses.

    The batch is bitwise equal to that of one engine."""
    monkeypatch.setattr("megarl.rollout.episode.DECODE_SECONDS", 0.02)
    work = {"prompts": 12, "group_size": 4, "max_response_tokens": 12}
    one_engine = run_ranks(world, config(rollout=work), 1, steps=2)[0]
    alone = [facts(batch) for batch in one_engine]
    slow, poll = world[0][0], world[0][0].poll

    def one_step(seconds: float) -> list[tuple[int, TokenData]]:
        ended = poll(0.0)
        time.sleep(seconds)
        return ended

    idle: list[float] = []

    def two_steps(rank: RolloutRank) -> list[RolloutBatch]:
        batches = [rank.collect(step) for step in range(2)]
        idle.append(rank.seconds["idle"])
        return batches

    monkeypatch.setattr(slow, "poll", one_step)
    spread = run_ranks(world, config(rollout={**work, "in_flight": 3}), 3, steps=2, act=two_steps)
    for batches in spread:
        assert [facts(batch) for batch in batches] == alone
        moved = [batch.metrics["rollout/moved"] for batch in batches]
        assert all(moved) and moved == [batch.metrics["rollout/moved"] for batch in spread[0]]
    for step, batch in enumerate(one_engine):
        assert bodies([batches[step] for batches in spread]) == bodies([batch])
    assert min(idle) > 0
    equal_parts = run_ranks(world, config(rollout={**work, "in_flight": 0}), 3, steps=2)
    assert [facts(batch) for batch in equal_parts[1]] == alone
    assert [batch.metrics["rollout/moved"] for batch in equal_parts[1]] == [0, 0]


class Gate:
    """A tool whose calls return once `total` of them wait, on any event loops."""

    def __init__(self, total: int) -> None:
        self.total, self.lock = total, threading.Lock()
        self.asked: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def passed(self) -> str:
        opened = asyncio.Event()
        with self.lock:
            self.asked.append((asyncio.get_running_loop(), opened))
            for loop, event in self.asked if len(self.asked) == self.total else ():
                loop.call_soon_threadsafe(event.set)
        await opened.wait()
        return "open"


async def through_the_gate(prompt: Prompt, policy: Policy) -> None:
    await policy.generate(max_tokens=3)
    policy.observe(await policy.call(gate.passed))
    await policy.generate(max_tokens=3)


def test_responses_that_wait_for_a_tool_are_no_work_for_an_engine(world):
    """`in_flight` counts only responses in an engine, so all 24 reach the tool.

    It answers when all have called it. The batch equals that of a single engine."""
    global gate
    settings_ = config(
        rollout={
            "group_size": 6,
            "in_flight": 2,
            "episode": f"{__name__}:through_the_gate",
            "turns": {"seconds": 50, "max_tokens": 40},
        }
    )
    batches = []
    for ranks in (1, 2, 3):
        gate = Gate(24)
        batches.append(run_ranks(world, settings_, ranks, steps=1))
        assert len(gate.asked) == 24
    for found in batches:
        assert facts(found[0][0]) == facts(batches[0][0][0])
        assert bodies([each for (each,) in found]) == bodies([batches[0][0][0]])
        assert all((r.turns, r.calls) == (2, 1) for r in found[0][0].samples)


@pytest.mark.parametrize(("in_flight", "each"), [(None, 4), (2, 2)])
def test_a_client_of_two_servers_is_given_work_for_both(world, in_flight, each):
    """One client has two of the three servers, the other has one."""
    servers = {"engine": "sglang_url", "urls": [f"http://a:{port}" for port in (1, 2, 3)]}
    settings_ = config(rollout={**servers, "max_batch": 4, "in_flight": in_flight})
    dispatcher = Dispatcher(settings_, 2)
    dispatcher.add([GroupRequest(prompt, range(3), first_id=3 * i) for i, prompt in enumerate(world[2][:8])])
    assert [len(slots) for slots in dispatcher.assign()] == [2 * each, each]


def test_the_longest_begin_first(world, monkeypatch):
    """Order prompts by the mean length of their previous responses, also after a resume."""
    settings_ = config(rollout={"prompts": 9, "max_response_tokens": 40})
    begun: list[int] = []
    submit = world[0][0].submit
    monkeypatch.setattr(
        world[0][0],
        "submit",
        lambda own, params: (begun.extend(r.seed for r in own.values()), submit(own, params)),
    )

    def two_epochs(rank: RolloutRank) -> list[RolloutBatch]:
        first = rank.collect(0)
        state = state_of(rank)
        rank.controller.lengths = {}
        rank.load_state_dict(state)
        return [first, rank.collect(1)]

    first, second = run_ranks(world, settings_, 1, 0, act=two_epochs)[0]
    took = {g.prompt.uid: np.mean([r.num_sampled for r in g.samples]) for g in first.groups}
    in_order = [response_seed(5, 0, g.prompt.uid, j) for g in first.groups for j in range(3)]
    longest_first = sorted(second.groups, key=lambda g: -took[g.prompt.uid])
    assert longest_first != second.groups == sorted(second.groups, key=lambda g: g.prompt.uid)
    assert begun == in_order + [response_seed(5, 1, g.prompt.uid, j) for g in longest_first for j in range(3)]


def test_rewards_flags_and_statistics(world):
    settings_ = config(
        reward={"overlong": {"soft_punishment": True, "buffer": 6}, "correct": 1.0, "incorrect": 0.0},
        log={"reflection_words": ["e", "7"]},
    )
    batch = run_ranks(world, settings_, 1, steps=1)[0][0]
    _, tokenizer, _ = world
    items = [
        (spoken(tokenizer, r.data.tokens.tolist()), g.prompt.answer) for g in batch.groups for r in g.samples
    ]
    verdicts = OddText().verify(items)
    penalties = []
    for r, verdict in zip(batch.samples, verdicts, strict=True):
        n = r.num_sampled
        penalties.append(0.0 if n <= 6 else (6 - n) / 6)
        assert r.is_truncated == (n == 12 and r.data.tokens[-1] not in range(1, 40))
        assert (r.correct, r.extracted, r.error) == (verdict.correct, verdict.extracted, verdict.error)
        assert r.reward == pytest.approx(float(verdict.correct) + penalties[-1])
    assert min(penalties) < 0 and {r.is_truncated for r in batch.samples} == {True, False}
    lengths = [r.num_sampled for r in batch.samples]
    words = [bool({"e", "7"} & set(re.findall(r"\w+", text, re.ASCII))) for text, _ in items]
    assert [r.reflects for r in batch.samples] == words and {*words} == {True, False}
    right = [v.correct for v in verdicts]

    def mean(numbers, chosen) -> float:
        return np.mean([number for number, flag in zip(numbers, chosen, strict=True) if flag])

    expected = {
        "response/length_right": mean(lengths, right),
        "response/length_wrong": mean(lengths, [not flag for flag in right]),
        "reflection/share": np.mean(words),
        "reflection/accuracy": mean(right, words),
        "reflection/accuracy_without": mean(right, [not flag for flag in words]),
        "reward/mean": np.mean([r.reward for r in batch.samples]),
        "reward/accuracy": np.mean([v.correct for v in verdicts]),
        "reward/truncated": np.mean([r.is_truncated for r in batch.samples]),
        "reward/unverified": np.mean([v.error is not None for v in verdicts]),
        "reward/overlong_penalty": np.mean(penalties),
        "response/length_mean": np.mean(lengths),
        "response/length_min": min(lengths),
        "response/length_max": max(lengths),
    }
    assert {k: batch.metrics[k] for k in expected} == pytest.approx(expected)
    assert "reward/score" not in batch.metrics  # the verifier gives no scores
    died = sum(v.error is not None for v in verdicts)
    assert batch.errors == ({"died": died} if died else {})


class Graded(OddText):
    """A verifier with a score in hundredths per text: correct above 0.5, an error without a score at 0.5."""

    def verify(self, items: Sequence[tuple[str, str]]) -> list[Verdict]:
        scores = [zlib.crc32((text + answer).encode()) % 101 / 100 for text, answer in items]
        return [
            Verdict(False, error="died") if score == 0.5 else Verdict(score > 0.5, score=score)
            for score in scores
        ]


def test_scores_are_rewards(world):
    settings_ = config(reward={"correct": 3.0, "incorrect": -2.0, "overlong": {"soft_punishment": False}})
    batch = run_ranks(world, settings_, 1, steps=1, verifiers=[Graded()])[0][0]
    scores = [0.0 if r.score is None else r.score for r in batch.samples]
    assert len(set(scores)) > 5
    assert [r.reward for r in batch.samples] == pytest.approx([5 * score - 2 for score in scores])
    assert [r.correct for r in batch.samples] == [score > 0.5 for score in scores]
    assert batch.metrics["reward/score"] == pytest.approx(np.mean(scores))
    assert batch.metrics["reward/mean"] == pytest.approx(5 * np.mean(scores) - 2)
    result = run_ranks(
        world,
        settings_,
        1,
        0,
        act=lambda s: evaluate(s, [ProblemSet(world[2][:2], 2)]),
        verifiers=[Graded()],
    )[0]
    answers = list(result.answers(world[1]))
    assert result.stats()["eval/score"] == pytest.approx(np.mean([a["score"] or 0.0 for a in answers]))
    plain = run_ranks(world, settings_, 1, 0, act=lambda s: evaluate(s, [ProblemSet(world[2][:2], 2)]))[0]
    assert "eval/score" not in plain.stats() and {a["score"] for a in plain.answers(world[1])} == {None}


class WithTerms(OddText):
    """A verifier that returns two terms per text, computed from the sizes in each item, as the pool does."""

    def verify(self, items: Sequence[tuple[Any, ...]]) -> list[Verdict]:
        verdicts = super().verify([item[:2] for item in items])
        return [
            replace(v, terms={"brevity": 1 - item[2] / item[3], "cut": float(item[4])})
            if item[2:] and v.error is None
            else v
            for v, item in zip(verdicts, items, strict=True)
        ]


def test_terms_are_added_by_their_weights(world):
    terms = {
        "brevity": {"function": "m:f", "weight": 0.5},
        "cut": {"function": "m:g", "weight": -2.0},
    }
    settings_ = config(reward={"weight": 3.0, "terms": terms, "overlong": {"soft_punishment": False}})
    batches = run_ranks(world, settings_, 1, steps=3, verifiers=[WithTerms()])[0]
    responses, failed = [r for batch in batches for r in batch.samples], 0
    for r in responses:
        value = 3.0 if r.correct else -3.0
        if r.error is None:
            value += 0.5 * (1 - r.num_sampled / 12) - 2.0 * r.is_truncated
            assert r.terms == {"brevity": 1 - r.num_sampled / 12, "cut": float(r.is_truncated)}
        failed += r.error is not None
        assert r.reward == pytest.approx(value)
    assert failed and {r.is_truncated for r in responses} == {True, False}
    rows = batches[0].samples  # the first step has no surplus from an earlier one
    means = {f"reward/term_{name}": np.mean([r.terms.get(name, 0.0) for r in rows]) for name in terms}
    assert {name: batches[0].metrics[name] for name in means} == pytest.approx(means)
    again = [group_from_state(json.loads(json.dumps(group_state(g)))) for g in batches[0].groups]
    assert [r.terms for g in again for r in g.samples] == [r.terms for r in rows]
    assert list(settings_.reward.parts) == ["verifier", "terms.brevity", "terms.cut"]
    for r in rows:
        score, brevity, cut = (reward_part(r, name) for name in settings_.reward.parts)
        assert score == r.correct and r.reward == pytest.approx(6.0 * score - 3.0 + 0.5 * brevity - 2.0 * cut)
    evaluated = run_ranks(
        world,
        settings_,
        1,
        0,
        act=lambda s: evaluate(s, [ProblemSet(world[2][:2], 2)]),
        verifiers=[WithTerms()],
    )[0]
    assert all(r.terms == {} for g in evaluated.headline.groups for r in g.samples)


def test_a_batch_is_build_with_the_columns(world):
    batch = run_ranks(world, config(), 1, steps=1)[0][0]
    experience = delivered(batch)
    prompts = [g.prompt.tokens for g in batch.groups for _ in g.samples]
    built = TrainBatch.build(prompts, [r.data.tokens.tolist() for r in batch.samples])
    for name in ("tokens", "cu_seqlens", "response_mask"):
        packed, expected = getattr(experience, name), getattr(built, name)
        assert torch.equal(packed, expected) and packed.dtype == expected.dtype
    mask, logprobs = experience.response_mask, experience["engine_logprobs"]
    assert torch.equal(logprobs[mask], torch.cat([torch.from_numpy(r.data.logprobs) for r in batch.samples]))
    assert not logprobs[~mask].any() and bool((logprobs[mask] < 0).all())
    for column, name in (("rewards", "reward"), ("correct", "correct"), ("truncated", "is_truncated")):
        assert experience[column].tolist() == [getattr(r, name) for r in batch.samples]
    assert experience["group_ids"].tolist() == [g for g in range(4) for _ in range(3)]
    assert experience["response_index"].tolist() == [0, 1, 2] * 4
    samples = make_records(1, select_groups_to_show(batch.groups, 4), world[1], 4)
    assert len(samples) == 4 and set(samples) <= set(range(6)) and {0, 1, 2} <= set(samples)
    for row, sample in samples.items():
        response, group = batch.samples[row], batch.groups[row // 3]
        seen = (sample.length, sample.reward, sample.prompt)
        assert seen == (response.num_sampled, response.reward, group.prompt.text)
        assert sample.response == spoken(world[1], response.data.tokens.tolist())
        assert (sample.group_size, sample.group_right) == (3, sum(r.correct for r in group.samples))


def test_a_resumed_sampler_goes_on_as_if_nothing_had_happened(world):
    settings_ = config(rollout={"dynamic_sampling": {"enabled": True, "max_batches": 3}})

    def through_json(rank: RolloutRank) -> list[RolloutBatch]:
        batches = []
        for step in range(5):
            batches.append(rank.collect(step))
            state = state_of(rank)
            rank.controller.surplus = []
            rank.load_state_dict(state)
        return batches

    straight = run_ranks(world, settings_, 1, steps=5)[0]
    resumed = run_ranks(world, settings_, 1, steps=0, act=through_json)[0]
    assert [facts(b) for b in resumed] == [facts(b) for b in straight]
    assert any(b.metrics["rollout/surplus"] for b in straight[:-1])
    for a, b in zip(resumed, straight, strict=True):
        assert torch.equal(delivered(a)["engine_logprobs"], delivered(b)["engine_logprobs"])


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_snapshot_stays_as_it_was_while_the_next_step_is_drawn(world, ranks):
    """A run that is asked to stop during a step saves the snapshot of the previous step."""
    settings_ = config(rollout={"dynamic_sampling": {"enabled": True, "max_batches": 3}})

    def taken(rank: RolloutRank) -> list[tuple[dict[str, Any], Any]]:
        shares = []
        for step in range(3):
            rank.collect(step)
            shares.append((rank.snapshot(), copy.deepcopy(rank.snapshot())))
        return shares

    by_rank = run_ranks(world, settings_, ranks, steps=0, act=taken)
    surplus = []
    for of_ranks in zip(*by_rank, strict=True):
        later, at_once = (join_shares(shares) for shares in zip(*of_ranks, strict=True))
        assert json.dumps(later) == json.dumps(at_once)
        surplus += later["surplus"]
    assert surplus


def test_a_prompt_drawn_twice_in_a_step_gets_other_responses(world):
    twice = config(rollout={"prompts": 18, "max_response_tokens": 30})
    batch = run_ranks(world, twice, 1, steps=1)[0][0]
    for first, second in zip(batch.groups[:9], batch.groups[9:], strict=True):
        assert first.prompt.uid == second.prompt.uid
        again = {tuple(r.data.tokens) for r in second.samples if r.num_sampled > 2}
        assert again.isdisjoint(tuple(r.data.tokens) for r in first.samples)


def test_an_error_of_one_rank_is_raised_on_all(world):
    engines, _, _ = world

    def broken(rank: RolloutRank) -> None:
        if rank.ranks.rank == 2:
            rank.worker.engine = TransformersEngine(engines[2].folder)  # never started
        rank.collect(0)

    errors = run_ranks(world, config(), 3, steps=0, act=broken)
    assert [type(e) for e in errors] == [EngineError] * 3 and all("not started" in str(e) for e in errors)
    shared = config(rollout={"engine": "sglang", "engine_tp": 2})
    errors = run_ranks(world, shared, 4, steps=0, act=broken)  # rank 2 leads the second engine
    assert [type(e) for e in errors] == [EngineError] * 4 and all("not started" in str(e) for e in errors)


def test_a_silent_rank_is_reported_with_what_is_waited_for(world, monkeypatch):
    """An engine hangs until the controller has detected the silence; every rank raises the error."""
    engine, found_out, silence = world[0][1], threading.Event(), Controller._describe_silence
    poll = engine.poll

    def hangs(seconds: float) -> list[tuple[int, TokenData]]:
        assert found_out.wait(60), "the controller has not found out within 60 s"
        return poll(seconds)

    def told(self: Controller, rank: int) -> str:
        found_out.set()
        return silence(self, rank)

    # Long enough for rank 1 to read the controller's messages after its engine continues.
    monkeypatch.setattr("megarl.rollout.messages.KEEP_ALIVE_SECONDS", 0.5)
    monkeypatch.setattr(engine, "poll", hangs)
    monkeypatch.setattr(Controller, "_describe_silence", told)
    what = "rollout: engine rank 1 has sent nothing for 6 s (parallel.timeout); "
    what += "its first running response is number 0 to prompt 102"
    for error in run_ranks(world, config(parallel={"timeout": 6}), 2, steps=1):
        assert isinstance(error, WaitTimeout) and str(error) == what
    engine.abort()


def test_a_controller_that_is_not_heard_of_is_reported(world, monkeypatch):
    ended = threading.Event()

    def act(rank: RolloutRank) -> None:
        if rank.controller is not None:
            assert ended.wait(60), "the other rank still waits after 60 s"
            return
        try:
            rank.collect(0)
        finally:
            ended.set()

    monkeypatch.setattr("megarl.rollout.messages.KEEP_ALIVE_SECONDS", 0.01)
    first, second = run_ranks(world, config(parallel={"timeout": 1}), 2, steps=0, act=act)
    what = "rollout: engine rank 1 has received nothing from the controller for 1 s (parallel.timeout)"
    assert first is None and isinstance(second, WaitTimeout) and str(second) == what


def test_a_rank_that_never_connects_is_named():
    async def meet() -> None:
        context = zmq.asyncio.Context()
        hub = Hub(context, "", 2)
        link = Link(context, hub.address, 0, here=True)
        try:
            await link.send(RankReady())
            await hub.wait_for_ranks(2, 0.5)
        finally:
            link.close()
            hub.close()
            context.term()

    with pytest.raises(WaitTimeout, match=r"rollout: engine rank 1 has not connected within 0\.5 s"):
        asyncio.run(meet())


def test_ranks_with_different_weights_are_found(world):
    engines, _, _ = world
    engines[1].end_update(4)
    try:
        errors = run_ranks(world, config(), 2, steps=1)
    finally:
        engines[1].end_update(3)
    assert all(isinstance(e, EngineError) and "different weight versions: [3, 4]" in str(e) for e in errors)


def test_evaluation(world):
    settings_ = config(evaluation={"top_p": 0.9})
    _, tokenizer, problems = world
    alone, *_ = run_ranks(world, settings_, 1, 0, act=lambda s: evaluate(s, [ProblemSet(problems, 5)]))
    for result in run_ranks(world, settings_, 3, 0, act=lambda s: evaluate(s, [ProblemSet(problems, 5)])):
        assert result.table() == alone.table() and result.stats() == alone.stats()
    answers = list(alone.answers(tokenizer))
    verdicts = OddText().verify([(a["response"], a["answer"]) for a in answers])
    assert len(answers) == 9 * 5 and [a["index"] for a in answers[:6]] == [0, 1, 2, 3, 4, 0]
    assert [(a["correct"], a["extracted"], a["error"]) for a in answers] == [
        (v.correct, v.extracted, v.error) for v in verdicts
    ]
    by_problem = np.array([v.correct for v in verdicts]).reshape(9, 5)
    stats = alone.stats()
    assert stats["eval/avg"] == pytest.approx(by_problem.mean()) and 0 < stats["eval/avg"] < 1
    assert stats["eval/pass"] == pytest.approx(by_problem.any(1).mean())
    assert stats["eval/majority"] == pytest.approx(np.mean([row["majority"] for row in alone.table()]))
    assert stats["eval/length_mean"] == pytest.approx(np.mean([a["length"] for a in answers]))
    assert (stats["eval/k"], stats["eval/problems"]) == (5, 9)
    params = SamplingParams(6, temperature=0)
    greedy = run_ranks(world, settings_, 1, 0, act=lambda s: evaluate(s, [ProblemSet(problems, 2)], params))[
        0
    ]
    assert all(
        np.array_equal(g.samples[0].data.tokens, g.samples[1].data.tokens) for g in greedy.headline.groups
    )
    again = run_ranks(
        world, settings_, 1, 0, act=lambda s: evaluate(s, [ProblemSet(problems + problems[:2], 5)])
    )[0].headline.groups
    pairs = zip(again[0].samples, again[9].samples, strict=True)
    assert any(not np.array_equal(a.data.tokens, b.data.tokens) for a, b in pairs)


def test_data_sources_have_figures_of_their_own(world):
    """Rollouts and evaluations report metrics per data source, but not if there is only one source."""
    _, tokenizer, problems = world
    named = [replace(p, source=("gsm 8k", "aime", "")[i % 3]) for i, p in enumerate(problems)]
    result = run_ranks(world, config(), 1, 0, act=lambda s: evaluate(s, [ProblemSet(named, 4)]))[0]
    stats, answers = result.stats(), list(result.answers(tokenizer))
    assert list(result.by_name()) == ["aime", "gsm_8k", "unnamed"]
    for source, name in (("gsm 8k", "gsm_8k"), ("aime", "aime"), ("", "unnamed")):
        own = {p.uid for p in named if p.source == source}
        some = [a for a in answers if a["uid"] in own]
        assert stats[f"eval/{name}/problems"] == len(own)
        assert stats[f"eval/{name}/avg"] == pytest.approx(np.mean([a["correct"] for a in some]))
        assert stats[f"eval/{name}/length_mean"] == pytest.approx(np.mean([a["length"] for a in some]))
    assert stats["eval/problems"] == len(named)
    plain = run_ranks(world, config(), 1, 0, act=lambda s: evaluate(s, [ProblemSet(problems, 4)]))[0].stats()
    assert plain == {key: value for key, value in stats.items() if key.count("/") == 1}

    model, *_ = world
    batches = [run[0] for run in run_ranks((model, tokenizer, named), config(), 2, steps=1)]
    for batch in batches:
        for name, source in (("gsm_8k", "gsm 8k"), ("aime", "aime")):
            # Only the controller's rank has all responses of a prompt.
            own = [r for g in batches[0].groups if g.prompt.source == source for r in g.samples]
            assert batch.metrics[f"source/{name}/responses"] == len(own)
            if own:
                accuracy, length = (
                    np.mean([getattr(r, what) for r in own]) for what in ("correct", "num_sampled")
                )
                assert batch.metrics[f"source/{name}/accuracy"] == pytest.approx(accuracy)
                assert batch.metrics[f"source/{name}/length"] == pytest.approx(length)


@pytest.mark.parametrize("advantage", ["group", "group_mean", "leave_one_out"])
@pytest.mark.parametrize("aggregation", ["token", "sample", "constant"])
def test_ungraded_responses_leave_the_signal_of_the_others_as_it_is(world, advantage, aggregation):
    """The reference for advantages is a float64 loop over the graded responses.

    Token weights must equal those of a batch without the ungraded responses."""
    keys = {"algorithm": {"advantage": advantage, "aggregation": aggregation}, "reward": {"max_ungraded": 1}}
    settings_ = config(rollout={"prompts": 8, "group_size": 5}, **keys)
    (found,) = run_ranks(world, settings_, 1, steps=1, verifiers=[Failing()])[0]
    step = found
    kept = [(g, r) for g, group in enumerate(found.groups) for r in group.samples if r.graded]
    sizes = Counter(g for g, _ in kept)
    assert len(set(sizes.values())) >= 2 and len(kept) < 40, "groups of different sizes are wanted"
    rows = [i for i, r in enumerate(found.samples) if r.graded]
    rows = [i for i, (g, _) in zip(rows, kept, strict=True) if sizes[g] > 1]
    others = sorted(set(range(40)) - set(rows))
    assert step.response_lengths[rows].tolist() == [found.samples[i].num_sampled for i in rows]
    assert not step.response_lengths[others].any() and len(step.lengths) == 40
    own = step.local
    assert own.response_mask.sum() == step.response_lengths.sum()
    assert own.lengths.tolist() == step.lengths.tolist()
    prompts = [len(group.prompt.tokens) for group in found.groups for _ in group.samples]
    assert [step.lengths[i] for i in others] == [prompts[i] for i in others]

    compute = load_function(ADVANTAGES[advantage].function)
    advantages = compute(Responses(step["rewards"].double(), step["group_ids"]))
    for i in rows:
        group = found.groups[i // 5]
        rewards = [r.reward for r in group.samples if r.graded]
        own_reward, mean = found.samples[i].reward, sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        expected = {
            "group": (own_reward - mean) / (deviation + 1e-6),
            "group_mean": own_reward - mean,
            "leave_one_out": own_reward - (sum(rewards) - own_reward) / (len(rewards) - 1),
        }[advantage]
        assert float(advantages[i]) == pytest.approx(expected, abs=1e-12)

    ids = torch.arange(40) % 2
    weights = loss_weights(step, ids, ids, settings_)
    index = torch.tensor(rows)
    columns = {name: column[index] for name, column in step.columns.items()}
    alone = replace(
        step, columns=columns, lengths=step.lengths[index], response_lengths=step.response_lengths[index]
    )
    for name, expected in loss_weights(alone, ids[index], ids[index], settings_).items():
        assert torch.equal(weights[name][index], expected) and not weights[name][others].any()

    graded = [r for r in found.samples if r.graded]
    assert found.metrics["reward/ungraded"] == pytest.approx(1 - len(graded) / 40)
    assert found.metrics["reward/accuracy"] == pytest.approx(np.mean([r.correct for r in graded]))
    assert found.errors["ConnectionRefusedError: nobody is there"] == 40 - len(graded)


def test_too_many_ungraded_responses_end_the_run_on_every_rank(world):
    for error in run_ranks(world, config(rollout={"prompts": 8}), 2, 1, verifiers=[Failing(), Failing()]):
        assert isinstance(error, ConfigError) and "\n" not in str(error)
        assert re.match(r"reward\.max_ungraded: \d+ of 24 responses of a step were not graded", str(error))
        assert str(error).endswith("of them: ConnectionRefusedError: nobody is there")


def test_groups_with_fewer_than_two_graded_responses_are_not_kept(world):
    """Dynamic sampling replaces such groups by new ones."""
    dynamic = {"enabled": True, "max_batches": 20, "by": "score"}
    keys = {"rollout": {"prompts": 4, "dynamic_sampling": dynamic}, "reward": {"max_ungraded": 1}}
    (found,) = run_ranks(world, config(**keys), 1, steps=1, verifiers=[Failing()])[0]
    assert len(found.groups) == 4 and found.metrics["rollout/prompts"] > 4
    assert all(len(group.counted) >= 2 for group in found.groups)


def test_ungraded_problems_count_in_no_score(world):
    _, tokenizer, problems = world
    result = run_ranks(
        world, config(), 1, 0, verifiers=[Failing()], act=lambda s: evaluate(s, [ProblemSet(problems, 2)])
    )[0]
    answers = list(result.answers(tokenizer))
    failed = {a["uid"] for a in answers if not a["graded"]}
    graded = [a for a in answers if a["uid"] not in failed]
    stats = result.stats()
    assert 0 < len(failed) < 9
    assert (stats["eval/ungraded"], stats["eval/problems"]) == (len(failed), 9 - len(failed))
    assert stats["eval/avg"] == pytest.approx(np.mean([a["correct"] for a in graded]))
    assert result.headline.scores()["avg@2"]["mean"] == pytest.approx(stats["eval/avg"])
    assert result.headline.counts()["ungraded"] == sum(not a["graded"] for a in answers)


def test_sets_of_problems(world):
    """Each set has its own number of samples per problem, independent of the other sets.

    It counts in the headline unless it has its own evaluation interval (`every`)."""
    _, tokenizer, problems = world
    sets = [
        ProblemSet(problems[:5], 4),
        ProblemSet(problems[3:], 2, "hard"),
        ProblemSet(problems[:2], 8, "rare", every=3),
    ]
    alone = [run_ranks(world, config(), 1, 0, act=lambda s, one=one: evaluate(s, [one]))[0] for one in sets]
    for result in run_ranks(world, config(), 2, 0, act=lambda s: evaluate(s, sets)):
        assert result.table() == [row for one in alone for row in one.table()]
    (result,) = run_ranks(world, config(), 1, 0, act=lambda s: evaluate(s, sets))
    answers = list(result.answers(tokenizer))
    assert answers == [answer for one in alone for answer in one.answers(tokenizer)]
    assert Counter(a["set"] for a in answers) == {None: 20, "hard": 12, "rare": 16}
    table, stats = result.table(), result.stats()
    common = [row["avg"] for row in table if row["set"] != "rare"]
    assert (stats["eval/avg"], stats["eval/problems"]) == (pytest.approx(np.mean(common)), 11)
    assert not {"eval/k", "eval/pass", "eval/majority"} & stats.keys()
    assert list(result.by_name()) == ["hard", "rare", "unnamed"]
    for name, k in (("hard", 2), ("rare", 8), ("unnamed", 4)):
        own = [row for row in table if (row["set"] or "unnamed") == name]
        assert stats[f"eval/{name}/pass"] == pytest.approx(np.mean([row["pass"] for row in own]))
        assert stats[f"eval/{name}/problems"] == len(own) and stats.get(f"eval/{name}/k") == k
    (rare,) = run_ranks(world, config(), 1, 0, act=lambda s: evaluate(s, sets[2:]))
    assert rare.stats() == {key: value for key, value in stats.items() if key.startswith("eval/rare/")}


def test_evaluation_needs_a_problem(world):
    error = run_ranks(world, config(), 1, 0, act=lambda s: evaluate(s, [ProblemSet([], 2)]))[0]
    assert isinstance(error, DataError) and str(error).startswith("data.eval:")


def test_with_the_real_verifier_pool(world):
    dynamic = {"enabled": True, "max_batches": 2}
    settings_ = config(rollout={"dynamic_sampling": dynamic})
    with VerifierPool("dapo") as pool:
        batch = run_ranks(world, settings_, 1, steps=1, verifiers=[pool])[0][0]
        assert batch.metrics["reward/accuracy"] == 0
        assert batch.metrics["rollout/groups_all_wrong"] == batch.metrics["rollout/prompts"] == 8
        # At the limit, the batch is filled with rejected groups.
        assert len(batch.groups) == 4 and {r.reward for r in batch.samples} == {-1.0}
        strict = config(rollout={"dynamic_sampling": {**dynamic, "at_limit": "stop"}})
        assert isinstance(run_ranks(world, strict, 1, steps=1, verifiers=[pool])[0], DataError)
