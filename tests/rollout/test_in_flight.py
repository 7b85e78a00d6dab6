"""Weights that change while responses run (`schedule.in_flight`): engines, and the controller's rules."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import numpy as np
import pytest
import torch
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.agents.chat import opening_tokens
from megarl.agents.endpoint import Endpoint
from megarl.agents.episode import Policy
from megarl.config.errors import EngineFailure
from megarl.config.schema import Config, TurnsConfig
from megarl.data.batch import RolloutBatch
from megarl.data.prompts import Prompt
from megarl.data.sample import Sample, SampleGroup, TokenData
from megarl.rollout import messages as m
from megarl.rollout.controller import StepGroups
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.episode import EngineClient
from megarl.rollout.in_flight import InFlightController
from megarl.rollout.rank import RolloutRank
from megarl.rollout.sampling import SamplingParams
from tests.agents.talk import CHATML, merging_tokenizer
from tests.rollout.conftest import LIMIT, TINIEST, threads
from tests.rollout.test_streaming import OddText
from tests.tiny_models import make_tiny_model

PARAMS = SamplingParams(24)
SCALES = (1.0, 1.4, 0.7, 1.2)  # of the folder's weights, by version


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3", **TINIEST)


def set_weights(engine: TransformersEngine, version: int) -> None:
    tensors = load_file(engine.folder / "model.safetensors")
    engine.begin_update()
    for name, parameter in engine.parameters().items():
        parameter.copy_(tensors[name] * SCALES[version])
    engine.end_update(version)


def generate(folder: Path, updates: dict[int, int], *, keeps_cache: bool = False) -> dict[int, TokenData]:
    """Generate six responses. updates: decoding steps before a version -> that version"""
    engine = TransformersEngine(folder, max_batch=4)  # two responses wait for rows
    engine.keeps_cache = keeps_cache
    engine.start()
    set_weights(engine, 0)
    engine.submit({i: GenerationRequest((3 + i, 9, 4), i) for i in range(6)}, PARAMS)
    responses: dict[int, TokenData] = {}
    steps = 0
    while engine.running:
        if steps in updates:
            set_weights(engine, updates[steps])
        responses |= dict(engine.poll(0.0))  # one decoding step
        steps += 1
    return responses


def compute_logprobs(folder: Path, context: list[int], tokens: list[int], version: int) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SCALES[version])
        logits = model(torch.tensor([[*context, *tokens]])).logits[0, len(context) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def test_each_token_has_its_version_and_its_logprob(folder: Path) -> None:
    """After `retract` a token's log-prob is that of a forward pass of its version over all earlier tokens."""
    responses = generate(folder, {5: 1, 12: 2})
    seen = set()
    for i, response in responses.items():
        assert response.num_tokens == 24
        versions = response.policy_versions
        assert versions is not None and versions.tolist() == sorted(versions)
        seen.add(tuple(sorted(set(versions.tolist()))))
        for version in set(versions.tolist()):
            expected = compute_logprobs(folder, [3 + i, 9, 4], response.tokens.tolist(), version).numpy()
            mask = versions == version
            assert np.allclose(response.logprobs[mask], expected[mask], atol=1e-5), (i, version)
    assert (0, 1, 2) in seen, "some response has tokens of all versions"


def test_keep_reads_the_old_cache(folder: Path) -> None:
    """The first tokens are those of `retract`. Later ones depend on keys and values of older weights."""
    kept, retracted = generate(folder, {5: 1}, keeps_cache=True), generate(folder, {5: 1})
    differs = False
    for i in range(4):
        assert np.array_equal(kept[i].policy_versions, retracted[i].policy_versions)
        old = kept[i].policy_versions == 0
        assert 0 < old.sum() < 24 and np.array_equal(kept[i].tokens[old], retracted[i].tokens[old])
        differs |= not np.allclose(kept[i].logprobs, retracted[i].logprobs)
    assert differs


async def play_with_tool(prompt: Prompt, policy: Policy, wait: Callable[[], Awaitable[None]]) -> None:
    async def look_up() -> str:
        await wait()
        return "12"

    await policy.generate(max_tokens=12)
    policy.observe(await policy.call(look_up))
    await policy.generate(max_tokens=8)


async def play_as_agent(prompt: Prompt, policy: Policy, wait: Callable[[], Awaitable[None]]) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> bool:
        messages: list[Any] = [{"role": "user", "content": "one"}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
            for limit in (12, 8):
                body = {"messages": messages, "max_tokens": limit}
                async with session.post(f"{base_url}/chat/completions", json=body) as answer:
                    reply = await answer.json()
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "two"}]
                await wait()
        return True

    endpoint = Endpoint(policy.tokenizer, LIMIT)
    try:
        await endpoint.episode(agent)(prompt, policy)
    finally:
        await endpoint.close()


@pytest.mark.parametrize("play", [play_with_tool, play_as_agent])
def test_tokens_of_episodes_have_their_versions(folder: Path, play: Any) -> None:
    """Weights change in the first turn, and once more before the second one."""
    tokenizer, engine = merging_tokenizer(CHATML), TransformersEngine(folder, max_batch=4)
    engine.start()
    set_weights(engine, 0)
    steps = list[int]()
    engine.should_end_poll = lambda: steps.append(1) is None  # a poll is one decoding step
    prompt_tokens = opening_tokens(tokenizer) if play is play_as_agent else (3, 9, 4)
    prompt = Prompt(0, "one", tuple(prompt_tokens), "one")

    async def run() -> TokenData:
        async def update(version: int) -> None:
            set_weights(engine, version)

        async def change_weights() -> None:
            while len(steps) < 5:
                await asyncio.sleep(0)
            await client.call_between_polls(update, 1)

        async def wait() -> None:
            await client.call_between_polls(update, 2)

        client = EngineClient(engine, threads, continuous_batching=False, weights_change=True)
        limits = TurnsConfig(max_tokens=200)
        policy = Policy(prompt, client, 5, SamplingParams(40), None, tokenizer, limits, lenient=True)
        async with asyncio.TaskGroup() as group:
            busy = group.create_task(client.keep_busy(AsyncMock()))
            group.create_task(change_weights())
            await play(prompt, policy, wait)
            busy.cancel()
        return policy.result()

    with ThreadPoolExecutor(1) as threads:
        data = asyncio.run(asyncio.wait_for(run(), LIMIT))
    assert data.is_sampled is not None and data.policy_versions is not None
    ends = np.flatnonzero(np.diff(data.is_sampled)) + 1
    parts = zip(np.split(data.is_sampled, ends), np.split(data.policy_versions, ends), strict=True)
    turns = [set(versions.tolist()) for is_sampled, versions in parts if is_sampled[0]]
    assert turns == [{0, 1}, {2}]
    assert Sample.from_data(data, 0, finish_reason="stop").oldest_version == 0
    for version in range(3):
        expected = compute_logprobs(folder, [*prompt.tokens], data.tokens.tolist(), version).numpy()
        mask = data.is_sampled & (data.policy_versions == version)
        assert np.allclose(data.logprobs[mask], expected[mask], atol=1e-5), version


@given(st.dictionaries(st.integers(1, 30), st.integers(1, 3), max_size=3), st.booleans())
@settings(max_examples=3, deadline=None)
def test_updates_at_fixed_token_counts_give_the_same_twice(
    folder: Path, updates: dict[int, int], keeps_cache: bool
) -> None:
    updates = dict(zip(sorted(updates), sorted(updates.values()), strict=True))  # versions only grow
    first, second = (generate(folder, updates, keeps_cache=keeps_cache) for _ in range(2))
    assert first == second


def test_an_order_ends_a_poll(folder: Path) -> None:
    engine = TransformersEngine(folder, max_batch=6)
    engine.start()
    set_weights(engine, 0)
    engine.submit({i: GenerationRequest((3 + i, 9, 4), i) for i in range(6)}, PARAMS)
    answers = iter([False] * 9)
    engine.should_end_poll = lambda: next(answers, True)
    assert engine.poll(600.0) == [] and engine.running == 6
    partials = engine.abort()
    assert {data.num_tokens for _, data in partials} == {10}


class HeldEngine(TransformersEngine):
    """An engine that finishes `allowed` more responses, one after the other.

    is_held: a poll lasts until an order ends it. is_polling: such a poll waits now. ended: number of polls
    that an order has ended"""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, max_batch=1)
        self.is_held, self.allowed, self.ended, self.is_polling = False, 0, 0, threading.Event()

    def poll(self, seconds: float) -> list[tuple[int, TokenData]]:
        deadline = time.monotonic() + LIMIT
        while self.is_held and not self.should_end_poll():
            self.is_polling.set()
            assert time.monotonic() < deadline, "no order has ended the poll"
            time.sleep(0.001)
        self.is_polling.clear()
        self.ended += self.is_held
        responses = super().poll(0.0) if self.allowed and not self.is_held else []
        self.allowed -= len(responses)
        return responses


class Trainers:
    """The trainers' end of the connection to the first rank.

    passed_on: orders that the first rank has passed on, and whether one is then underway to its worker"""

    def __init__(self, rank: RolloutRank) -> None:
        assert isinstance(rank.controller, InFlightController)
        self.controller, self._context = rank.controller, zmq.asyncio.Context()
        self.link = m.Link(self._context, rank.address, m.TRAINER)
        self.passed_on, pass_on = list[tuple[type, bool]](), self.controller.pass_on

        async def watch(order: m.TransferWeights | m.StoreRollout) -> None:
            await pass_on(order)
            self.passed_on.append((type(order), self.controller.orders_underway == 1 and rank._has_order()))

        self.controller.pass_on = watch  # type: ignore[method-assign]

    async def receive(self) -> m.Message | None:
        answer = await self.link.receive(LIMIT)
        assert self.controller.orders_underway == 0, "the first rank has followed the order"
        return answer

    async def wait_until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not is_true():
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.link.send(m.Shutdown())
        self.link.close()
        self._context.term()


def run_ranks(folder: Path, engines: list[HeldEngine], train: Any, log: list[tuple[str, int]]) -> None:
    """Run `train` with trainers and the ranks' engines; log what each rank does. Two steps of one group."""
    config = Config(
        recipe="dapo",
        run_dir=Path("runs/x"),
        steps=2,
        model={"path": folder},  # type: ignore[arg-type]
        rollout={  # type: ignore[arg-type]
            "prompts": 1,
            "group_size": 2,
            "max_response_tokens": 8,
            "dynamic_sampling": {"enabled": False},
        },
        parallel={"rollout_ranks": len(engines), "timeout": LIMIT},  # type: ignore[arg-type]
        schedule={"in_flight": "retract", "max_staleness": 2},  # type: ignore[arg-type]
    )
    runtimes = threads(len(engines))
    tokenizer, ranks = AutoTokenizer.from_pretrained(folder), dict[int, RolloutRank]()
    numbers: Iterator[int] = iter(range(10**6))

    def take_prompts(n: int) -> list[Prompt]:
        return [Prompt(next(numbers), "", (3, 9, 4), "") for _ in range(n)]

    def start_rank(i: int) -> None:
        engines[i].start()
        set_weights(engines[i], 0)
        inputs = config, runtimes[i], engines[i], OddText(), tokenizer
        ranks[i] = RolloutRank(*inputs, lambda _: log.append(("restart", i)), take_prompts)

    def collect_on_rank(i: int) -> None:
        def transfer(version: int) -> None:
            set_weights(engines[i], version)
            log.append((f"version {version}", i))

        def store(number: int, batch: RolloutBatch, done: int) -> m.RolloutStored:
            log.append((f"step {number}", i))
            return m.RolloutStored("train", number, {}, {}, [])

        try:
            ranks[i].collect_in_flight(m.CollectRollout("train", 1, 0), transfer, store, lambda: None)
        finally:
            ranks[i].close()

    with ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(start_rank, range(len(engines))))
        running = [pool.submit(collect_on_rank, i) for i in range(len(engines))]
        asyncio.run(train(ranks[0]))
        for future in running:
            future.result(LIMIT)


def test_orders_end_polls_on_all_ranks(folder: Path) -> None:
    """Ranks whose engines would poll without end follow a transfer, and store a batch."""
    engines, log = [HeldEngine(folder) for _ in range(2)], list[tuple[str, int]]()

    async def train(rank: RolloutRank) -> None:
        trainers, (first, second) = Trainers(rank), engines
        try:
            # The four responses of two steps: two of them are on each engine.
            await trainers.link.send(m.CollectRollout("train", 2, 0))
            await trainers.wait_until(lambda: [engine.running for engine in engines] == [2, 2])
            first.is_held = second.is_held = True
            await trainers.wait_until(lambda: all(engine.is_polling.is_set() for engine in engines))
            ended = [engine.ended for engine in engines]
            await trainers.link.send(m.TransferWeights(1))
            assert await trainers.receive() == m.TransferReady(1)
            await trainers.wait_until(lambda: len(log) == 2)
            assert sorted(log) == [("version 1", 0), ("version 1", 1)]
            assert all(engine.ended > before for engine, before in zip(engines, ended, strict=True))
            # The second rank is held again when the first one finishes the batch of step 1.
            second.is_held, second.allowed = False, 1
            slots = trainers.controller.dispatcher.slots
            await trainers.wait_until(lambda: any(slot.sample for slot in list(slots.values())))
            second.is_held = True
            await trainers.wait_until(second.is_polling.is_set)
            ended_before = second.ended
            first.is_held, first.allowed = False, 2
            answer = await trainers.receive()
            assert isinstance(answer, m.RolloutStored) and answer.number == 1
            await trainers.wait_until(lambda: ("step 1", 1) in log)
            assert second.ended > ended_before
            second.is_held, second.allowed = False, 1
            answer = await trainers.receive()
            assert isinstance(answer, m.RolloutStored) and answer.number == 2
            kinds = (m.TransferWeights, m.StoreRollout, m.StoreRollout)
            assert trainers.passed_on == [(kind, True) for kind in kinds]
        finally:
            first.is_held = second.is_held = False
            await trainers.close()

    run_ranks(folder, engines, train, log)


class FailingEngine(HeldEngine):
    """An engine that fails in the poll that an order ends, until it gets weights."""

    has_failed = False

    def poll(self, seconds: float) -> list[tuple[int, TokenData]]:
        was_held, responses = self.is_held, super().poll(seconds)
        if was_held or self.has_failed:
            self.is_held, self.has_failed = False, True
            raise EngineFailure("it died")
        return responses

    def end_update(self, version: int) -> None:
        super().end_update(version)
        self.has_failed = False


def test_a_transfer_restarts_a_failed_engine_once(folder: Path) -> None:
    """The engine fails when the transfer is already on its way, and its report comes after it."""
    engines, log = [HeldEngine(folder), FailingEngine(folder)], list[tuple[str, int]]()

    async def train(rank: RolloutRank) -> None:
        trainers, second = Trainers(rank), engines[1]
        try:
            await trainers.wait_until(lambda: [engine.running for engine in engines] == [1, 1])
            second.is_held = True
            await trainers.wait_until(second.is_polling.is_set)
            await trainers.link.send(m.TransferWeights(1))
            assert await trainers.receive() == m.TransferReady(1)
            for engine in engines:
                engine.allowed = 1
            answer = await trainers.receive()
            assert isinstance(answer, m.RolloutStored)
            await trainers.wait_until(lambda: ("step 1", 1) in log)
            assert not any(name == "restart" for name, _ in log)
        finally:
            await trainers.close()

    run_ranks(folder, engines, train, log)


def test_an_abort_returns_what_there_is(folder: Path) -> None:
    """A continued response is the uninterrupted one."""
    engine = TransformersEngine(folder, max_batch=4)
    engine.start()
    set_weights(engine, 0)
    requests = [GenerationRequest((3 + i, 9, 4), i) for i in range(6)]
    whole = engine.generate(requests, PARAMS)
    engine.submit(dict(enumerate(requests)), PARAMS)
    for _ in range(7):
        engine.poll(0.0)
    partial = dict(engine.abort())
    assert engine.running == 0 and len(partial) == 6
    assert {data.finish_reason for data in partial.values()} == {"abort"}
    assert sum(data.num_tokens > 0 for data in partial.values()) == 4
    continued = [
        GenerationRequest(request.prompt_tokens, i, partial[i] if partial[i].num_tokens else None)
        for i, request in enumerate(requests)
    ]
    assert [data.tokens.tolist() for data in engine.generate(continued, PARAMS)] == [
        data.tokens.tolist() for data in whole
    ]


class Hub:
    """Messages of one engine that finishes responses in the order that a test chooses."""

    def __init__(self, choose: Any, events: list[Any]) -> None:
        self.choose, self.events = choose, events
        self.running: dict[int, int] = {}  # sample id -> version of its first token
        self.version = 0
        self.stored: list[m.StoreRollout] = []
        self.sent_orders: list[m.Order] = []
        self.last_heard = {0: 0.0}

    def reset_silence(self) -> None: ...
    def find_silent_rank(self, limit: float) -> None: ...
    async def keep_alive(self) -> None: ...

    async def send_all(self, message: m.Message) -> None:
        if isinstance(message, m.TransferWeights):
            self.version = message.version

    async def send(self, number: int, message: m.Message) -> None:
        if isinstance(message, m.StartSamples):
            self.running |= dict.fromkeys((sample[0] for sample in message.samples), self.version)
        elif isinstance(message, m.AbortSamples):
            self.running.clear()
            self.events.append(m.SamplesAborted([]))

    async def receive(self, seconds: float) -> list[tuple[int, m.Message]]:
        """Finish some responses, or train on the next batch."""
        if self.events:
            event = self.events.pop(0)
            return [(m.TRAINER if isinstance(event, m.Order) else 0, event)]
        finished = self.choose(sorted(self.running))
        versions = [(i, self.running.pop(i)) for i in finished]
        samples = [
            Sample(0, 5, "stop", correct=i % 2 == 0, reward=float(i % 2), oldest_version=version, id=i)
            for i, version in versions
        ]
        return [(0, m.SamplesFinished(self.version, samples, 0.0))]


def collect(
    choose: Any, steps: int, staleness: int, delays: list[int], *, dynamic: bool, every: int = 100
) -> list[tuple[int, StepGroups]]:
    """Run the controller with trainers that finish step k `delays[k]` messages after its batch is there.

    At each batch, every prompt that was taken is in one batch or still to be sampled.

    every: steps between evaluations"""
    config = Config(
        recipe="dapo",
        run_dir=Path("runs/x"),
        steps=steps,
        model={"path": "x"},  # type: ignore[arg-type]
        rollout={"prompts": 3, "group_size": 2, "dynamic_sampling": {"enabled": dynamic}},  # type: ignore[arg-type]
        parallel={"rollout_ranks": 1},  # type: ignore[arg-type]
        schedule={"in_flight": "retract", "max_staleness": staleness},  # type: ignore[arg-type]
    )
    hub, taken = Hub(choose, []), list[Prompt]()

    def take_prompts(n: int) -> list[Prompt]:
        prompts = [Prompt(len(taken) + i, "", (1,), "") for i in range(n)]
        taken.extend(prompts)
        return prompts

    controller = InFlightController(config, hub, 1, take_prompts)  # type: ignore[arg-type]
    lead = config.schedule.lead
    stored: list[tuple[int, StepGroups]] = []
    hub.events += [m.CollectRollout("train", n, 0) for n in range(2, 2 + lead)]

    async def store(order: m.CollectRollout, result: StepGroups) -> None:
        stored.append((order.number, result))
        uids = [group.prompt.uid for _, (groups, _, _) in stored for group in groups]
        uids += [request.prompt.uid for request in controller.pending_requests()]
        assert dynamic or sorted(uids) == list(range(len(taken)))
        if len(stored) == steps:
            hub.events.append(m.Shutdown())
            return
        trained = len(stored)
        after = delays[trained % len(delays)]
        hub.events += [*[m.KeepAlive()] * after, m.TransferWeights(trained)]
        hub.events += [m.RunEvaluation(trained)] * (trained % every == 0)
        if trained + 1 + lead <= steps:
            hub.events.append(m.CollectRollout("train", trained + 1 + lead, 0))

    async def serve(order: m.Order | None) -> None:
        """Follow orders like EngineRank."""
        while not isinstance(order, m.Shutdown):
            if isinstance(order, m.CollectRollout):
                await controller.serve(order, store)
            elif isinstance(order, m.TransferWeights):
                await hub.send_all(order)
            order = await controller.next_order(0.0)

    asyncio.run(asyncio.wait_for(serve(m.CollectRollout("train", 1, 0)), 60))
    return stored


@given(
    st.integers(1, 6),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([1, 2, 3, 100]),
    st.data(),
)
@settings(max_examples=25, deadline=None)
def test_no_batch_has_tokens_that_are_too_old(
    staleness: int, delays: list[int], dynamic: bool, every: int, data: st.DataObject
) -> None:
    """In any order of finished responses each step gets its groups once, and none is too old."""

    def choose(running: list[int]) -> list[int]:
        if not running:
            return []
        return data.draw(st.lists(st.sampled_from(running), min_size=1, max_size=4, unique=True))

    stored = collect(choose, 8, staleness, delays, dynamic=dynamic, every=every)
    assert [number for number, _ in stored] == list(range(1, 9))
    uids: list[int] = []
    for number, (groups, stats, _) in stored:
        assert len(groups) == 3 and all(len(group.samples) == 2 for group in groups)
        assert all(number - 1 - group.oldest_version <= staleness for group in groups)
        uids += [group.prompt.uid for group in groups]
        assert stats["rollout/dropped"] >= 0
    assert len(uids) == len(set(uids)), "no group is trained on twice"


def test_a_group_that_is_too_old_is_sampled_again() -> None:
    """The first response never finishes before the others are eight steps further."""
    calls = iter(range(10**6))

    def choose(running: list[int]) -> list[int]:
        return running[1:3] if next(calls) < 40 and len(running) > 2 else running[:2]

    stored = collect(choose, 12, 1, [0], dynamic=False)
    dropped = [stats["rollout/dropped"] for _, (_, stats, _) in stored]
    assert sum(dropped) > 0
    trained = {group.prompt.uid for _, (groups, _, _) in stored for group in groups}
    assert 0 in trained, "the prompt of the dropped group comes again"


def test_the_oldest_version_of_a_group() -> None:
    samples = [Sample(0, 1, "stop", oldest_version=version) for version in (3, None, 2)]
    assert SampleGroup(Prompt(0, "", (1,), ""), samples, 4).oldest_version == 2


def test_started_groups_have_a_limit_when_few_are_accepted() -> None:
    """Each ordered step has at most `max_batches`, although no group is accepted."""
    running_counts = []

    def choose(running: list[int]) -> list[int]:
        running_counts.append(len(running))
        return running

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleGroup, "is_mixed", property(lambda group: False))
        stored = collect(choose, 6, 4, [0], dynamic=True)
    assert [number for number, _ in stored] == list(range(1, 7))
    # 3 prompts x 2 responses x 10 generation batches for each of 3 ordered steps
    assert max(running_counts) <= 3 * 2 * 10 * 3


@pytest.mark.parametrize("boundary", [2, 3, 4])
def test_a_stop_text_across_an_update_ends_the_response(boundary: int) -> None:
    """SGLang does not search the tokens that a request is sent again with."""
    from megarl.rollout.episode import generate_turn

    letters = "xa</b>yz"
    data = TokenData(
        list(range(8)), [-1.0] * 8, "length", policy_versions=[0] * boundary + [1] * (8 - boundary)
    )

    class Client:
        async def generate(self, *arguments: Any) -> TokenData:
            return data

    tokenizer = SimpleNamespace(decode=lambda tokens, **_: "".join(letters[i] for i in tokens))
    params = SamplingParams(8, stop=("</b>",))
    turn = asyncio.run(generate_turn(Client(), (7,), 0, params, None, 8, tokenizer))  # type: ignore[arg-type]
    assert (turn.num_tokens, turn.finish_reason) == (6, "stop")
