"""Disaggregated rollouts: the order of the engines' commands, and whole runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.errors import ConfigError, EngineError, EngineFailure
from megarl.config.schema import ParallelConfig, RolloutConfig
from megarl.parallel import secret
from megarl.parallel.runtime import layout_for
from megarl.parallel.secret import SignedStore
from megarl.rollout import messages as m
from megarl.schedule import ahead
from megarl.schedule.ahead import ControllerLink, RemoteGeneration
from megarl.sync import weight_sync
from megarl.sync.transfer import TransferStats
from megarl.sync.weight_sync import WeightSync
from tests.schedule.demo import make_warm_model, train
from tests.schedule.test_profiler import events

ALONE: Any = SimpleNamespace(rank=0, world=1, cpu_group=None)


def test_orders_come_in_order_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages pass through real encrypted sockets, only between processes with this job's key."""
    monkeypatch.setattr(secret, "_secret", bytes(range(32)))
    monkeypatch.setattr(ahead, "broadcast_from_rank_0", lambda ranks, value, kind: value)
    store = SignedStore(dist.HashStore())
    link = ControllerLink(SimpleNamespace(store=store, **vars(ALONE)))  # type: ignore[arg-type]
    assert link.receive(0.0) is None  # nothing is connected yet
    context, loop = zmq.asyncio.Context(), asyncio.new_event_loop()
    run = loop.run_until_complete

    async def listen() -> m.Hub:
        return m.Hub(context, "127.0.0.1", 2)

    hub = run(listen())
    store.set(ahead.ADDRESS, hub.address)
    assert link.receive(0.2) is None
    state = json.dumps({"lengths": list(range(10_000)), "text": "x" * 1_000_000})
    for order in (m.CollectRollout("train", 1, 0), m.LoadState(state)):
        link.send(order)
    heard: list[Any] = []
    while len(heard) < 3:
        heard += run(hub.receive(5.0))
    assert heard == [
        (m.TRAINER, order)
        for order in (m.SendDataReports(), m.CollectRollout("train", 1, 0), m.LoadState(state))
    ]
    run(hub.send(m.TRAINER, m.EvaluationScores({"eval/k": 2, "eval/avg": 0.5}, [{"index": 0}])))
    answer = link.receive(5.0)
    assert answer == m.EvaluationScores({"eval/k": 2, "eval/avg": 0.5}, [{"index": 0}])
    with pytest.raises(EngineError, match="3 bytes that are no message"):
        m.decode_message("engine rank 3", b"abc")

    async def stranger() -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(secret, "_secret", bytes(32))
            other = m.Link(context, hub.address, 1)
        await other.send(m.KeepAlive())
        found = await hub.receive(0.5)
        other.close()
        return bool(found)

    assert not run(stranger())
    link.close()
    hub.close()
    context.destroy(linger=0)
    loop.close()


class Engines:
    """Record the commands to engines and answer them: each poll for an answer executes one command."""

    def __init__(self) -> None:
        self.orders: list[m.Order] = []
        self.log: list[tuple[Any, ...]] = []
        self.version = -1

    def link(self, runtime: Any) -> Any:
        answers: list[Any] = [m.DataReports({})]

        def hear(seconds: float) -> Any:
            if not answers and self.orders:
                order = self.orders.pop(0)
                if isinstance(order, m.CollectRollout):
                    self.log.append(("draw", order.number, self.version))
                    answers.append(m.RolloutStored(order.stage, order.number, {}, {}, []))
            return answers.pop(0) if answers else None

        return SimpleNamespace(send=self.orders.append, receive=hear)

    def sync(self, version: int) -> TransferStats:
        """Engines join a transfer when they reach its command; no command may precede it."""
        assert self.orders == [m.TransferWeights(version)], (
            "trainers wait in a transfer for engines that still draw"
        )
        self.orders.clear()
        self.version = version
        self.log.append(("sync", version))
        return TransferStats(0, 0, 0, 0.0)


def meet(there: RemoteGeneration, *, wait: bool) -> None:
    if there.can_transfer(wait=wait):
        there.transfer()


@given(st.integers(0, 2), st.integers(1, 8), st.integers(0, 7), st.data())
def test_each_step_is_drawn_with_its_own_version(steps_ahead: int, steps: int, done: int, data: Any) -> None:
    """Step k is sampled with the weights after step k - 1 - ahead, at any speed of sampling and training."""
    done = min(done, steps - 1)
    engines = Engines()
    config: Any = SimpleNamespace(
        schedule=SimpleNamespace(lead=steps_ahead), steps=steps, run_dir=Path("nowhere")
    )
    runtime: Any = SimpleNamespace(store=dist.HashStore(), **vars(ALONE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "ControllerLink", engines.link)
        patch.setattr(ahead, "broadcast_from_rank_0", lambda ranks, value, kind: value)
        there = RemoteGeneration(config, runtime, SimpleNamespace(sync=engines.sync))  # type: ignore[arg-type]
        there.publish(done)
        there.order_first_steps(done, None)
        for number in range(done + 1, steps + 1):
            there._wait_for_answer(m.RolloutStored, "train", number)
            for _ in range(data.draw(st.integers(0, 3))):  # phases before the actor's update
                meet(there, wait=False)
            meet(there, wait=True)  # the weights are about to change
            assert there.pending is None
            there.publish(number)
            if data.draw(st.booleans()):
                meet(there, wait=True)  # an evaluation
            there.order_next_step(number, None)
            if data.draw(st.booleans()):
                there.wait_for_files(number)  # for a checkpoint
                assert there.finished >= min(number + steps_ahead, there.ordered)
    drawn = {number: version for what, number, *version in engines.log if what == "draw"}
    assert drawn == {number: [max(done, number - 1 - steps_ahead)] for number in range(done + 1, steps + 1)}


def test_ranks_that_only_generate_are_behind_the_trainers() -> None:
    assert layout_for(ParallelConfig(tp=2, rollout_ranks=3), 7).dp == 2
    with pytest.raises(ConfigError, match="leave no trainer"):
        layout_for(ParallelConfig(rollout_ranks=4), 4)
    with pytest.raises(ConfigError, match=r"3 launched processes that train \(2 only generate\)"):
        layout_for(ParallelConfig(tp=2, rollout_ranks=2), 5)


def test_an_engine_that_is_started_anew_gets_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers have changed the actor meanwhile and keep training; the copy must not wait for them."""
    calls: list[Any] = []
    met: list[Any] = []

    def gather_objects(ranks: Any, value: Any, kind: Any) -> list[Any]:
        met.append(ranks)
        return [value] * ranks.world

    monkeypatch.setattr(weight_sync, "gather_objects", gather_objects)

    class Engine:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: calls.append(name) or True

    class Backend(Engine):
        can_recover, reports_notes = True, False

        def handle(self, bucket: int) -> int:
            return bucket

        def send(self, bucket: int, published: Any, version: int) -> None:
            calls.append((bucket, list(published), version, memory.tolist()))

    memory, weights = torch.zeros(2), torch.tensor([1.0, 2.0])

    def run() -> TransferStats:
        memory.copy_(weights)
        return TransferStats(0, 0, 0, 0.0)

    transfer: Any = SimpleNamespace(targets={"w": memory}, run=run, target_bytes=8)
    engines = SimpleNamespace(rank=0, world=1)
    runtime: Any = SimpleNamespace(
        rollout_ranks=1, first_engine=1, engines=engines, job=SimpleNamespace(rank=1, world=2)
    )
    config = RolloutConfig(engine="sglang", engine_failures=1, fingerprint=False)
    sync = WeightSync(config, runtime, Engine(), Backend(), [transfer])  # type: ignore[arg-type]
    sync.sync(4)
    memory.zero_()
    weights.zero_()
    calls.clear()
    met.clear()
    sync.recover([EngineFailure("died")])
    assert met and all(ranks is engines for ranks in met)
    assert [call for call in calls if isinstance(call, tuple)] == [(0, [None, 0], 4, [1.0, 2.0])]
    assert calls[0] == "recover" and sync.complete
    assert "engine of rank 1 failed" in sync.take_events()[0]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_warm_model(tmp_path_factory.mktemp("warm"), steps=40)


def numbers(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    clock = ("time/", "inside/", "throughput/", "memory", "transfer/", "staleness/")
    return [{k: v for k, v in record.items() if not k.startswith(clock)} for record in records]


@pytest.mark.slow
def test_apart_and_in_turn_is_what_it_was(warm: Path, tmp_path: Path) -> None:
    """Dedicated rollout ranks change only where responses are sampled; so does a second engine."""
    file = warm / "eval.jsonl"
    sets = f"data.eval=[{file}, {{path: {file}, name: often, every: 2, samples: 2}}]"
    keys = ("steps=3", "parallel.tp=1", "evaluation.max_problems=4", sets)
    together = train(warm, "dapo", tmp_path / "together", *keys)
    apart = train(warm, "dapo", tmp_path / "apart", *keys, "parallel.rollout_ranks=2")
    assert numbers(apart) == numbers(together)
    evaluated = [(r["step"], "eval/avg" in r, "eval/often/avg" in r) for r in apart if r["stage"] == "eval"]
    assert evaluated == [(0, True, True), (2, False, True), (3, True, True)]
    assert (tmp_path / "apart/hf/model.safetensors").read_bytes() == (
        tmp_path / "together/hf/model.safetensors"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dapo", "vapo", "tppo", "sao"])
def test_two_runs_ahead_are_one(warm: Path, tmp_path: Path, recipe: str) -> None:
    """One step can also be replayed on one rank.

    Recipes: with dynamic sampling, with a critic, with windows, and with the engine's log-probs."""
    keys = ("steps=3", "parallel.tp=1", "parallel.rollout_ranks=1", "schedule.ahead=1", "checkpoint.every=1")
    keys += ("checkpoint.rollouts=true", "checkpoint.keep=0")
    if recipe in ("vapo", "tppo", "sao"):
        keys += ("value_pretraining.steps=1",)
    if recipe == "sao":
        keys += ("rollout.prompts=32", "rollout.group_size=1")
    # A trace's content does not depend on the recipe.
    profiled = ("log.profile=1",) if recipe == "dapo" else ()
    one = train(warm, recipe, tmp_path / "one", *keys, *profiled)
    # Only vapo also gets another hash seed.
    other = train(warm, recipe, tmp_path / "other", *keys, forked=recipe != "vapo")
    assert numbers(one) == numbers(other)
    if profiled:
        traces = [events(path) for path in sorted((tmp_path / "one/profile").glob("train-000002-rank-*.gz"))]
        phases = [{event["name"] for event in trace} & {"rollout", "actor_update"} for trace in traces]
        assert phases == [{"rollout", "actor_update"}, {"rollout"}]  # the second rank only generates
        assert all("train step 2" in {event["name"] for event in trace} for trace in traces)
    staleness = [record["staleness/max"] for record in one if record["stage"] == "train"]
    # Staleness of the oldest token; with windows, that is the first token's.
    assert staleness == ([0.0, 1.0, 2.0] if recipe == "tppo" else [0.0, 1.0, 1.0])
    from tests.schedule.demo import megarl

    again = megarl("replay", tmp_path / "one", "--step", 3)
    assert "0 differ" not in again.stdout and " numbers equal to the last recorded digit" in again.stdout
    assert json.loads((tmp_path / "one" / "data.json").read_text())["train"]
