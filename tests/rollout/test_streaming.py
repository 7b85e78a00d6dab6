"""Which groups dynamic sampling accepts does not depend on the order in which responses finish.

Also: invalid responses of SGLang."""

from __future__ import annotations

import asyncio
import base64
import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from megarl.agents.episode import Policy
from megarl.config.errors import EngineError, EngineFailure
from megarl.config.schema import Config
from megarl.data.prompts import Prompt
from megarl.data.sample import TokenData
from megarl.rewards.verdict import Verdict
from megarl.rollout import messages as m
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.sglang import SGLangEngine
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.rank import RolloutRank
from megarl.rollout.sampling import SamplingParams
from megarl.sync.weight_sync import Failures
from tests.engines import load_folder
from tests.rollout.conftest import TINIEST, state_of, threads
from tests.tiny_models import make_tiny_model
from tests.weights.folders import described


class OutOfOrder(TransformersEngine):
    """A transformers engine that returns finished responses a few at a time, in random order.

    An abort returns half of a response, or all of it, which no later request may continue."""

    chance = random.Random(0)
    fail_after = 0  # number of polls; 0: never

    def submit(self, requests: Mapping[int, GenerationRequest], params: SamplingParams) -> None:
        if not hasattr(self, "ready_made"):
            self.ready_made: dict[int, TokenData] = {}
        super().submit({number: replace(one, prefix=None) for number, one in requests.items()}, params)
        wholes = dict(super().poll(math.inf))
        for number, request in requests.items():
            whole = wholes[number]
            whole.policy_versions = np.full(whole.num_tokens, self.weight_version)
            if request.prefix is not None:
                assert whole.first(request.prefix_length, 0).tokens.tolist() == request.prefix.tokens.tolist()
                assert len(request.prefix.tokens) < len(whole.tokens)
                whole.policy_versions[: request.prefix_length] = request.prefix.policy_versions
            self.ready_made[number] = whole

    def poll(self, seconds: float) -> list[tuple[int, TokenData]]:
        self.fail_after -= 1
        if self.fail_after == 0:
            raise EngineFailure("it died")
        some = self.chance.sample(
            sorted(self.ready_made), min(len(self.ready_made), self.chance.randint(1, 5))
        )
        return [(number, self.ready_made.pop(number)) for number in some]

    @property
    def running(self) -> int:
        return len(getattr(self, "ready_made", {}))

    def abort(self) -> list[tuple[int, TokenData]]:
        ended = []
        for number, whole in self.ready_made.items():
            if number % 3 == 0:
                ended.append((number, whole))
                continue
            half = len(whole.tokens) // 2
            versions = [self.weight_version] * half
            ended.append(
                (number, TokenData(whole.tokens[:half], whole.logprobs[:half], policy_versions=versions))
            )
        self.ready_made.clear()
        return ended


class OddText:
    def verify(self, items: Sequence[tuple[str, str]]) -> list[Verdict]:
        return [Verdict(correct=sum(map(ord, text)) % 3 == 0) for text, _ in items]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", **TINIEST)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [Prompt(i, f"{i}+1=?", tuple(tokenizer(f"{i}+1=?").input_ids), "") for i in range(200)]
    return folder, tokenizer, prompts


def collect(
    world: Any,
    order: int,
    steps: int = 4,
    fail_after: int = 0,
    ranks: int = 1,
    shown: int = 0,
    **rollout: Any,
) -> tuple[list[Any], list[Failures]]:
    """Return the groups of each step (uid and tokens of responses, merged over ranks), and the failures."""
    settings = {
        "engine": "sglang",  # OutOfOrder stands for its continuous batching
        "prompts": 5,
        "group_size": 3,
        "max_response_tokens": 8,
        "dynamic_sampling": {"enabled": True, "max_batches": 4, "oversample": 1.5},
        **rollout,
    }
    config = Config(
        recipe="dapo",
        run_dir="runs/x",
        steps=1,
        model={"path": world[0]},
        rollout=settings,
        seed=5,
        log={"samples": shown},
    )
    failures: list[Failures] = []
    runtimes = threads(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        found = list(
            pool.map(
                lambda rank: collect_one(
                    world,
                    config,
                    runtimes[rank],
                    order + 10 * rank,
                    steps,
                    fail_after * (not rank),
                    failures,
                ),
                range(ranks),
            )
        )
    together = []
    for of_ranks in zip(*found, strict=True):
        step = []
        for groups in zip(*of_ranks, strict=True):
            assert len({uid for uid, _ in groups}) == 1
            responses = []
            for bodies in zip(*(responses for _, responses in groups), strict=True):
                (body,) = (body for body in bodies if body is not None)  # exactly one rank has it
                responses.append((body.tokens.tolist(), body.policy_versions is None))
            step.append((groups[0][0], responses))
        together.append(step)
    return together, failures


def collect_one(
    world: Any,
    config: Config,
    runtime: Any,
    order: int,
    steps: int,
    fail_after: int,
    failures: list[Failures],
) -> list[Any]:
    """Return the groups of each step on one rank: their uid and the data of their responses."""
    torch.set_num_threads(1)
    folder, tokenizer, prompts = world
    engine = OutOfOrder(folder, eos_ids=range(1, 60))
    engine.start()
    load_folder(engine, version=7)
    engine.chance, engine.fail_after = random.Random(order), fail_after
    left = iter(prompts)
    recover = failures.append if runtime.rank == 0 else lambda _: None
    rank = RolloutRank(
        config, runtime, engine, OddText(), tokenizer, recover, lambda n: [next(left) for _ in range(n)]
    )
    steps_ = []
    for step in range(steps):
        engine.weight_version = 7 + step
        batch = rank.collect(step)
        state = state_of(rank)
        if rank.controller is not None:
            rank.controller.returned = []
        rank.load_state_dict(state)
        steps_.append([(g.prompt.uid, [r.data for r in g.samples]) for g in batch.groups])
        assert batch.metrics["rollout/prompts"] >= 5
        versions = batch.local.columns.get("token_versions")
        assert versions is None or set(versions.unique().tolist()) <= {0, *range(7, 8 + step)}
        assert batch.rows.tolist() == (batch.owners == runtime.rank).nonzero().squeeze(-1).tolist()
    rank.close()
    return steps_


def test_what_is_accepted_does_not_depend_on_what_ends_first(world: Any) -> None:
    first, _ = collect(world, order=0)
    for order in range(1, 5):
        assert collect(world, order)[0] == first
    uids = [uid for step in first for uid, _ in step]
    # Prompts stay in order; none is lost or used twice.
    assert uids == sorted(uids) and len(uids) == len(set(uids))


def test_partial_responses_go_on_in_the_next_step(world: Any) -> None:
    steps, _ = collect(world, order=3, continue_partial=True)
    assert [uid for uid, _ in steps[0]] == [uid for uid, _ in collect(world, order=0)[0][0]]
    uids = [uid for step in steps for uid, _ in step]
    assert uids == sorted(uids) and len(uids) == len(set(uids))
    mixed = [not fresh for step in steps[1:] for _, responses in step for _, fresh in responses]
    assert any(mixed), "no response went on under new weights"


def test_partial_responses_are_kept_until_they_are_drawn_again(world: Any) -> None:
    """A run resumed with less oversampling finishes its step before it has continued all of them."""
    folder, tokenizer, prompts = world
    engine = OutOfOrder(folder, eos_ids=range(1, 60))
    engine.start()
    load_folder(engine, version=7)
    runtime, left, state, kept = threads(1)[0], iter(prompts), {}, 0
    for step in range(8):
        dynamic = {"enabled": True, "oversample": 1.5 if step % 2 else 8.0}
        settings = {"prompts": 2, "group_size": 3, "max_response_tokens": 8, "continue_partial": True}
        rollout = {"engine": "sglang", **settings, "dynamic_sampling": dynamic}
        config = Config(recipe="dapo", run_dir="runs/x", steps=1, model={"path": folder}, rollout=rollout)
        take = lambda n: [next(left) for _ in range(n)]  # noqa: E731
        rank = RolloutRank(config, runtime, engine, OddText(), tokenizer, take_prompts=take)
        assert rank.controller is not None
        rank.load_state_dict(state or state_of(rank))
        before = rank.controller.returned
        rank.collect(step)
        for request in rank.controller.returned:
            held = [sample_id for engine, sample_id in request.partials if engine == 0]
            assert set(held) <= rank.worker.partials.keys()
            kept += bool(held) and any(request is one for one in before)
        state = state_of(rank)
        rank.close()
    assert kept, "all of them were drawn again at once"


async def twice(prompt: Prompt, policy: Policy) -> None:
    """Generate three tokens, observe two, generate the rest."""
    await policy.generate(max_tokens=3)
    policy.observe(prompt.tokens[:2])
    await policy.generate()


def test_episodes_of_two_turns_go_on_where_they_stopped(world: Any) -> None:
    """An abort in either turn does not change the tokens."""
    settings: dict[str, Any] = {
        "continue_partial": True,
        "episode": f"{__name__}:twice",
        "turns": {"max_tokens": 12},
    }
    found = [collect(world, order, **settings)[0] for order in range(4)]
    drawn = [
        {(uid, i): tokens for step in steps for uid, each in step for i, (tokens, _) in enumerate(each)}
        for steps in found
    ]
    for others in drawn[1:]:
        assert all(others[key] == tokens for key, tokens in drawn[0].items() if key in others)
        assert len(drawn[0].keys() & others.keys()) > len(drawn[0]) // 2
    assert any(not fresh for steps in found for step in steps for _, each in step for _, fresh in each)


@pytest.mark.parametrize(("keep", "ranks"), [(False, 2), (True, 3)])
def test_over_several_engines(world: Any, ranks: int, keep: bool) -> None:
    """Responses stay on the rank that sampled them, also after a checkpoint.

    OutOfOrder checks that a prefix belongs to its own response."""
    alone, _ = collect(world, order=2, continue_partial=keep)
    found, _ = collect(world, order=2, ranks=ranks, continue_partial=keep)
    if not keep:
        assert found == alone
    uids = [uid for step in found for uid, _ in step]
    assert uids == sorted(uids) and len(uids) == len(set(uids))

    def continued(steps: list[Any]) -> bool:
        return any(not fresh for step in steps for _, responses in step for _, fresh in responses)

    if keep:  # thread scheduling decides which responses are aborted: expect some in at least one run
        runs = (collect(world, order, ranks=ranks, continue_partial=True)[0] for order in range(3, 20))
        assert continued(found) or any(map(continued, runs))
    else:
        assert not continued(found)


def test_nothing_begins_behind_an_abort(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the abort no response starts, or the engine would generate during training.

    At that time responses still wait for an engine and tokens are fetched."""
    aborted, fetched, begun = False, 0, 0
    send = m.Hub.send

    async def noted(hub: m.Hub, number: int, message: m.Message) -> None:
        nonlocal aborted, fetched, begun
        aborted = isinstance(message, m.AbortSamples) or (aborted and not isinstance(message, m.EndRollout))
        fetched += aborted and isinstance(message, m.SendTokenData)
        begun += aborted and isinstance(message, m.StartSamples)
        await send(hub, number, message)

    monkeypatch.setattr(m.Hub, "send", noted)
    wasteful = {"enabled": True, "oversample": 4.0}
    collect(world, order=1, ranks=2, shown=4, in_flight=1, dynamic_sampling=wasteful)
    assert fetched and not begun


def test_a_failure_costs_nothing_but_time(world: Any) -> None:
    disturbed, failures = collect(world, order=0, fail_after=6)
    assert disturbed == collect(world, order=0)[0]
    assert [[type(f) for f in each] for each in failures] == [[EngineFailure]]


async def thinks_better_of_it(prompt: Prompt, policy: Policy) -> bool:
    """Generate three tokens, then start another turn and cancel it."""
    await policy.generate(max_tokens=3)
    asked = asyncio.create_task(policy.generate())
    while not policy.generating:
        await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    return True


class DiesWhenDropping(OutOfOrder):
    """An engine that still runs cancelled requests when a rollout ends, and fails when they are aborted."""

    dies = dead = False

    def submit(self, requests: Mapping[int, GenerationRequest], params: SamplingParams) -> None:
        super().submit(requests, params)
        endless = {n for n, request in requests.items() if request.limit(params) > 3}
        self.endless = getattr(self, "endless", set()) | endless

    def poll(self, seconds: float) -> list[tuple[int, TokenData]]:
        if self.dead:
            raise EngineFailure("it died")
        held = {n: self.ready_made.pop(n) for n in self.endless & self.ready_made.keys()}
        ended = super().poll(seconds) if self.ready_made else []
        self.ready_made |= held
        return ended

    def abort(self) -> list[tuple[int, TokenData]]:
        aborted, self.dead = super().abort(), self.dies
        if self.dead:
            raise EngineFailure("it died")
        return aborted


def test_an_engine_that_dies_when_requests_are_dropped_is_started_again_by_all(world: Any) -> None:
    """The failure occurs at the end of a rollout and is recovered in the next one, also on the other rank."""
    episode = {"episode": f"{__name__}:thinks_better_of_it", "max_response_tokens": 9}
    rollout: dict[str, Any] = {"engine": "sglang", "prompts": 4, "group_size": 2, **episode}
    config = Config(recipe="ppo", run_dir="runs/x", steps=1, model={"path": world[0]}, rollout=rollout)
    runtimes, prompts = threads(2), iter(world[2])

    def one(number: int) -> tuple[list[int], list[list[str]]]:
        torch.set_num_threads(1)
        engine = DiesWhenDropping(world[0])
        engine.start()
        load_folder(engine, version=7)
        engine.dies = number == 1
        told: list[list[str]] = []

        def recover(failures: Failures) -> None:
            told.append([str(failure) for failure in failures])
            engine.dead = engine.dies = False

        rank = RolloutRank(
            config, runtimes[number], engine, OddText(), world[1], recover, lambda n: [*islice(prompts, n)]
        )
        found = [len(rank.collect(step).samples) for step in range(2)]
        rank.close()
        return found, told

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, range(2)))
    assert found == [([8, 8], [["None", "it died"]])] * 2


NO_DRAFTS = (0, 0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("ValueError: no", "SGLang: generate: ValueError: no"),
        (([5, 6], [-1.0, -2.0], "stop", [("3", 2)], None, None, NO_DRAFTS), "weights of version 3, not 4"),
        (([5, 6], [-1.0], "stop", [("4", 2)], None, None, NO_DRAFTS), "2 tokens with 1 log-probabilities"),
        (([], [], "stop", [], None, None, NO_DRAFTS), "0 tokens"),
        (([5], [-1.0], "error", [("4", 1)], None, None, NO_DRAFTS), "ended by error"),
        (
            ([5, 307], [-1.0, -2.0], "stop", [("4", 2)], None, None, NO_DRAFTS),
            "outside of the vocabulary of 307",
        ),
        (([5], [float("nan")], "stop", [("4", 1)], None, None, NO_DRAFTS), "not a finite number"),
        (([5], [float("-inf")], "stop", [("4", 1)], None, None, NO_DRAFTS), "not a finite number"),
        (([5, 6], [-1.0, -2.0], "stop", [("4", 1)], None, None, NO_DRAFTS), "of which weights' versions"),
        (([5], [0.5], "length", [("4", 1)], None, None, NO_DRAFTS), "not a finite number below 0"),
    ],
)
def test_nonsense_is_found(answer: Any, message: str, tmp_path: Path) -> None:
    rollout = {"engine": "sglang", "engine_tp": 2}
    config = Config(recipe="dapo", run_dir=tmp_path, steps=1, model={"path": tmp_path}, rollout=rollout)
    engine = SGLangEngine(config, {"vocab_size": 307}, 3, torch.device("cpu"), (1,))  # never started
    engine.weight_version = 4
    request, params = GenerationRequest((7,), 0), SamplingParams(20)
    good = engine._token_data(request, ([5], [-1.0], "stop", [("4", 1)], None, None, NO_DRAFTS), params)
    assert good == TokenData([5], [-1.0], "stop", [4])
    request = GenerationRequest(
        (7,), 0, TokenData([9], [-1.0], "abort", [4], accepted_drafts=1, verifications=2)
    )
    answered = ([5], [-1.0], "stop", [("4", 1)], None, None, (3, 4))
    continued = engine._token_data(request, answered, params)
    assert (continued.accepted_drafts, continued.verifications) == (4, 6)
    with pytest.raises(EngineFailure, match=message):
        engine._token_data(request, answer, params)


def test_the_experts_of_an_answer(tmp_path: Path) -> None:
    """SGLang encodes experts as int32 [tokens - 1, layers, topk]; here for a continued response.

    Invalid values raise an error."""
    rollout = {"engine": "sglang", "engine_tp": 2, "routing_replay": True}
    config = Config(recipe="dapo", run_dir=tmp_path, steps=1, model={"path": tmp_path}, rollout=rollout)
    mixture = described("qwen3_moe", 2, 16, 4, 2, 7, 307, moe_intermediate_size=5, num_experts=300)
    mixture["num_experts_per_tok"] = 3
    engine = SGLangEngine(config, mixture, 3, torch.device("cpu"), (1,))  # never started
    engine.weight_version = 4
    begun = TokenData([9, 9], [-1.0, -1.0], "abort", [3, 3])
    request = GenerationRequest((7, 8), 0, begun)
    chosen = np.random.default_rng(0).integers(0, 300, (5, 2, 3), dtype=np.int32)

    def answered(experts: np.ndarray | None, finish: str = "stop") -> TokenData:
        encoded = None if experts is None else base64.b64encode(experts.tobytes()).decode()
        answer = [5, 6], [-1.0, -2.0], finish, [("4", 2)], encoded, None, NO_DRAFTS
        return engine._token_data(request, answer, SamplingParams(20, routing=True))

    routing = answered(chosen).routed_experts
    assert routing is not None and routing.dtype == np.int16 and routing.shape == (6, 2, 3)
    assert (routing[:5] == chosen).all() and (routing[5] == 32767).all()
    assert answered(None, "abort").routed_experts is None
    for wrong, message in (
        (chosen[:4], "24 chosen experts for 6 tokens, not 30"),
        (chosen + 1000, "an expert outside of 0 to 299"),
        (None, "0 chosen experts for 6 tokens"),
    ):
        with pytest.raises(EngineFailure, match=message):
            answered(wrong)


def test_only_an_engine_that_was_started_again_is_sent_its_requests_again(tmp_path: Path) -> None:
    """An engine that was not restarted still has its requests and would sample them twice."""
    config = Config(
        recipe="dapo", run_dir=tmp_path, steps=1, model={"path": tmp_path}, rollout={"engine": "sglang"}
    )
    engine = SGLangEngine(config, {"model_type": "qwen3"}, 0, torch.device("cpu"), (1,))  # never started
    sent: list[int] = []
    quiet = dict.fromkeys(("call", "end", "start"), lambda *_: None)
    process: Any = SimpleNamespace(submit=lambda rows, _: sent.extend(row[0] for row in rows), **quiet)
    engine.process = process
    engine.end_update(1)
    engine.submit({5: GenerationRequest((7, 8), 5)}, SamplingParams(20))
    engine.end_update(2)
    assert sent == [5]
    engine._failure = EngineFailure("a bad answer")
    with pytest.raises(EngineFailure, match="a bad answer"):  # so that the update restarts it
        engine.begin_update()
    engine.restart()
    engine.begin_update()
    engine.end_update(2)
    assert sent == [5, 5]
    engine.end_update(3)
    assert sent == [5, 5] and engine.running == 1


def test_the_sampling_sets_of_an_answer(tmp_path: Path) -> None:
    """New sets are appended to those of a prefix, and padded. Sets without their token raise an error."""
    rollout = {"engine": "sglang", "engine_tp": 2}
    config = Config(recipe="dapo", run_dir=tmp_path, steps=1, model={"path": tmp_path}, rollout=rollout)
    engine = SGLangEngine(config, {"vocab_size": 307}, 3, torch.device("cpu"), (1,))  # never started
    engine.weight_version = 4
    begun = TokenData([9], [-1.0], "abort", [3], sampling_sets=np.array([[9, 2, 8]], np.int32))
    params = SamplingParams(20, top_k=3, sampling_sets=True)

    def answered(sets: Any) -> TokenData:
        answer = [5, 6], [-1.0, -2.0], "stop", [("4", 2)], None, sets, NO_DRAFTS
        return engine._token_data(GenerationRequest((7,), 0, begun), answer, params)

    found = answered([[5], [4, 6]]).sampling_sets
    assert found is not None and found.tolist() == [[9, 2, 8], [5, -1, -1], [4, 6, -1]]
    for wrong, message in (
        ([[5]], "1 sampling sets for 2 tokens"),
        (None, "0 sampling sets for 2 tokens"),
        ([[5], [4, 7]], "token 6, which is not in its sampling set"),
        ([[5, 307], [6]], "a sampling set with a token outside of the vocabulary of 307"),
    ):
        with pytest.raises(EngineFailure, match=message):
            answered(wrong)


def test_each_request_brings_its_own_limit(tmp_path: Path) -> None:
    """The limit excludes a prefix's tokens; requests longer than the model's positions are refused."""
    config = Config(
        recipe="dapo", run_dir=tmp_path, steps=1, model={"path": tmp_path}, rollout={"engine": "sglang"}
    )
    model = {"model_type": "qwen3", "vocab_size": 307, "max_position_embeddings": 30}
    engine = SGLangEngine(config, model, 0, torch.device("cpu"), (1,))  # never started
    sent: list[Any] = []
    engine.process = SimpleNamespace(submit=lambda rows, params: sent.extend(rows))  # type: ignore[assignment]
    engine._has_weights = True
    begun = TokenData([9, 9], [-1.0, -1.0], "abort", [3, 3])
    asked = {
        0: GenerationRequest((7, 8), 5),
        1: GenerationRequest((7, 8), 6, max_tokens=4),
        2: GenerationRequest((7, 8), 7, begun, max_tokens=3),
    }
    engine.submit(asked, SamplingParams(20))
    assert sent == [(0, [7, 8], 2, 5, 20), (1, [7, 8], 2, 6, 4), (2, [7, 8, 9, 9], 2, 7, 1)]
    for number, limit in enumerate((2, 29)):
        with pytest.raises(EngineError, match="do not fit the model's 30 positions"):
            engine.submit({9 + number: GenerationRequest((7, 8), 7, begun, limit)}, SamplingParams(20))
    assert engine.running == 3
