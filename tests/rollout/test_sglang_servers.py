"""The client of external SGLang servers, against HTTP servers with the same API (servers.py).

tests/sglang/test_servers.py has a real SGLang server."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.config import load_config
from megarl.config.check import check_config
from megarl.config.errors import ConfigError, EngineError, EngineFailure
from megarl.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    ScheduleConfig,
)
from megarl.data.sample import TokenData
from megarl.parallel.layout import Layout
from megarl.plan.fit import find_problem
from megarl.plan.inputs import make_plan_inputs
from megarl.plan.memory import gpu_needs
from megarl.plan.tensors import group_bytes
from megarl.plan.text import lines
from megarl.plan.times import default_lengths, estimate, rollout_seconds
from megarl.rollout.engines import sglang_pool, sglang_servers
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.sglang_pool import ServerPool
from megarl.rollout.engines.sglang_servers import SGLangServers, check_servers
from megarl.rollout.sampling import SamplingParams
from megarl.sync.backends.http import HttpBackend
from megarl.sync.plan import Plan, engine_plan, engine_targets
from megarl.sync.transfer import Staging
from megarl.weights.families import read_config
from megarl.weights.known_models import KNOWN_MODELS
from megarl.weights.shards import hf_shapes
from tests.commands import run_command
from tests.docs.test_docs import ROOT
from tests.in_flight import find_problems
from tests.rollout.servers import WAIT, Router, Server, make_engine
from tests.tiny_models import make_tiny_model

PARAMS = SamplingParams(12)
UPDATE = (
    "/pause_generation",
    "/update_weight_version",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/continue_generation",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("urls") / "tiny", "qwen3", tied=True, head_dim=16)


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., list[Server]]]:
    """Start `count` servers; close them after the test."""
    made: list[Server] = []

    def start(count: int = 2) -> list[Server]:
        made.extend(Server(folder) for _ in range(count))
        for server in made:
            server.start()
        return made

    yield start
    for server in made:
        server.close()


def configured(folder: Path, servers: list[Server], in_flight: Any = "none", **rollout: Any) -> Config:
    keys: dict[str, Any] = {
        "max_response_tokens": 40,
        "transfer_bucket": 1,
        "engine_timeout": WAIT,
        "engine_start_timeout": WAIT,
    }
    keys |= rollout
    urls = tuple(server.url for server in servers)
    return Config(
        recipe="dapo",
        run_dir=folder / "run",
        steps=4,
        model=ModelConfig(path=folder, dtype="fp32"),
        data=DataConfig(max_prompt_tokens=32),
        parallel=ParallelConfig(device="cpu", timeout=WAIT * 2),
        rollout=RolloutConfig(engine="sglang_url", urls=urls, **keys),
        schedule=ScheduleConfig(in_flight=in_flight),
    )


class Trained:
    """A client, its plan, weights that change with each version, and a reference engine with them."""

    def __init__(self, folder: Path, servers: list[Server], rank: int = 0, ranks: int = 1, **rollout: Any):
        self.config = configured(folder, servers, **rollout)
        hf = read_config(folder)
        self.engine = SGLangServers(ServerPool(self.config, hf, rank, ranks, "start"), (1,))
        self.plan = Plan((), {}, dict(engine_targets(self.config, hf, ranks)))
        self.weights = load_file(folder / "model.safetensors")
        self.reference = make_engine(folder)
        self.backend = HttpBackend(self.config, rank, torch.device("cpu"), torch.float32)
        parts = [self.plan.part(names) for names in self.backend.split(self.plan)]
        self.memory = Staging(torch.device("cpu"))
        self.buckets = self.backend.connect(self.engine, parts, self.memory)
        self.engine.start()
        while not self.engine.ready(0.1):
            pass

    def value(self, name: str, version: int) -> torch.Tensor:
        return self.weights[name] * (1 + version / 4)

    def update(self, version: int) -> list[str]:
        self.backend.begin()
        for number, bucket in enumerate(self.buckets):
            for name, tensor in bucket.items():
                tensor.copy_(self.value(name, version))
            self.backend.send(number, [None], version)
        self.backend.finish(version)
        for name, parameter in self.reference.parameters().items():
            parameter.detach().copy_(self.value(name, version))
        self.reference.end_update(version)
        return self.engine.take_notes()

    def check_weights(self, server: Server, version: int) -> None:
        assert server.weights.keys() == self.weights.keys()
        for name, tensor in server.weights.items():
            assert torch.equal(tensor, self.value(name, version)), name
        assert not server.session_open and not server.paused

    def check(
        self, requests: list[GenerationRequest], found: list[TokenData], params: SamplingParams = PARAMS
    ) -> None:
        """Check responses against the reference: current weights, same seeds, whichever server answered."""
        for ours, theirs in zip(found, self.reference.generate(requests, params), strict=True):
            assert (ours.tokens.tolist(), ours.finish_reason) == (
                theirs.tokens.tolist(),
                theirs.finish_reason,
            )
            assert ours.policy_versions.tolist() == [self.engine.weight_version] * len(ours.tokens.tolist())
            assert ours.logprobs.tolist() == pytest.approx(theirs.logprobs.tolist(), abs=1e-5)


@pytest.fixture
def train(folder: Path) -> Iterator[Callable[..., Trained]]:
    made: list[Trained] = []

    def start(servers: list[Server], **options: Any) -> Trained:
        made.append(Trained(folder, servers, **options))
        return made[-1]

    yield start
    for one in made:
        one.engine.stop()


def asked(count: int = 12) -> list[GenerationRequest]:
    return [
        GenerationRequest((3 + i, 9, 4), seed=100 + i, max_tokens=(None, 5, 9)[i % 3]) for i in range(count)
    ]


def test_responses_are_those_of_the_weights_that_were_sent(serve, train) -> None:
    """After each update, every server has bitwise the sent weights; responses keep their own token limits."""
    servers = serve()
    client = train(servers)
    for version in (0, 1):
        for server in servers:
            server.asked.clear()
        client.update(version)
        for server in servers:
            client.check_weights(server, version)
            assert server.paths(*UPDATE)[-6:] == list(UPDATE)
        client.check(asked(), client.engine.generate(asked(), PARAMS))
        assert all(server.paths("/generate") for server in servers), "both have had something to do"
    warm = SamplingParams(30, 0.7, 0.9, 20, stop=("5",))
    client.check(asked(), client.engine.generate(asked(), warm), warm)
    greedy = SamplingParams(30, 0.0)
    client.check(asked(), client.engine.generate(asked(), greedy), greedy)


def test_a_large_model_goes_in_buckets(tmp_path: Path) -> None:
    """A bucket holds at most 1 MiB or one tensor; the last one flushes the cache and sets the version."""
    folder = make_tiny_model(tmp_path / "wide", "llama", hidden=128, ffn=1100, layers=3, vocab=2500)
    server = Server(folder)
    server.start()
    client = Trained(folder, [server])
    sizes = [[tensor.nbytes for tensor in bucket.values()] for bucket in client.buckets]
    assert len(sizes) > 3 and all(sum(bucket) <= 2**20 or len(bucket) == 1 for bucket in sizes)
    assert sum(map(len, sizes)) == len(client.weights)
    client.update(3)
    client.check_weights(server, 3)
    sent = [body for path, body in server.asked if path == "/update_weights_from_tensor"]
    assert [body["flush_cache"] for body in sent] == [False] * (len(sizes) - 1) + [True]
    versions = [body["weight_version"] for body in sent]
    assert versions == [None] * (len(sizes) - 1) + [client.engine.name_version(3)]
    client.engine.stop()
    server.close()


def test_a_routers_bias_goes_in_float32(tmp_path: Path) -> None:
    """Tensors of a bf16 model with 7 experts are aligned to their dtype in a bucket and do not overlap."""
    folder = make_tiny_model(tmp_path / "model", "glm4_moe", experts=7, dtype=torch.bfloat16)
    server = Server(folder)  # receives no request
    config = configured(folder, [server])
    config = config.model_copy(update={"model": ModelConfig(path=folder, dtype="bf16")})
    plan = engine_plan(config, read_config(folder), Layout())
    engine = SGLangServers(ServerPool(config, read_config(folder), 0, 1, "start"), (1,))
    backend = HttpBackend(config, 0, torch.device("cpu"), torch.bfloat16)
    parts = [plan.part(part) for part in backend.split(plan)]
    [bucket] = backend.connect(engine, parts, Staging(torch.device("cpu")))
    server.close()
    weights = load_file(folder / "model.safetensors")
    for name, tensor in bucket.items():
        tensor.copy_(weights[name])
    assert bucket.keys() == weights.keys()
    assert all(t.dtype == weights[n].dtype and torch.equal(t, weights[n]) for n, t in bucket.items())


def test_a_connection_that_closes_in_the_middle_is_asked_again(serve, train) -> None:
    servers = serve()
    client = train(servers)
    client.update(0)
    servers[1].closes = 2
    client.check(asked(), client.engine.generate(asked(), PARAMS))
    assert servers[1].closes == 0 and client.engine.take_notes() == []


def test_one_that_always_closes_is_left_out_once(serve, train) -> None:
    servers = serve()
    client = train(servers)
    client.update(0)
    servers[1].closes = 10**6
    client.check(asked(30), client.engine.generate(asked(30), PARAMS))
    (note,) = client.engine.take_notes()
    assert note.startswith(f"rollout server {servers[1].url} is left out: /generate: ")


def test_a_dead_server_is_left_out_and_comes_back_with_the_weights(serve, train) -> None:
    """Its requests go to the other server; until it has the current weights, it gets none."""
    servers = serve()
    client = train(servers)
    client.update(0)
    died = threading.Event()
    servers[1].hold()

    def dies() -> None:
        servers[1].loop.create_task(servers[1].die())
        died.set()

    servers[1].on_generate = lambda: servers[1].loop.call_later(0.1, dies) if not died.is_set() else None
    client.check(asked(), client.engine.generate(asked(), PARAMS))
    assert died.is_set()
    (note,) = client.engine.take_notes()
    assert note.startswith(f"rollout server {servers[1].url} is left out: ")
    assert len(client.update(1)) <= 1, "it is still not there"
    client.check(asked(), client.engine.generate(asked(), PARAMS))

    servers[1].asked.clear()
    servers[1].release()
    servers[1].come_back()
    client.check(asked(), client.engine.generate(asked(), PARAMS))
    assert servers[1].asked == [], "it has not got the weights yet"
    assert client.update(2) == [f"rollout server {servers[1].url} is back, and gets the weights"]
    client.check_weights(servers[1], 2)
    client.check(asked(), client.engine.generate(asked(), PARAMS))
    assert servers[1].paths("/generate")


def test_answers_of_other_weights_are_not_taken(serve, train) -> None:
    """A server that restarts between two requests is detected by its first response's weight version."""
    servers = serve()
    client = train(servers)
    client.update(0)
    servers[1].stop()
    servers[1].come_back()
    client.check(asked(), client.engine.generate(asked(), PARAMS))
    (note,) = client.engine.take_notes()
    assert "with weights of version default, not megarl-" in note


def test_an_earlier_starts_version_is_another(serve, train) -> None:
    """A run that continues reaches a number again. A server may still have the lost step's weights."""
    servers = serve()
    client = train(servers)
    lost_step = client.engine.name_version(0)
    client.engine.pool.start = "again"
    client.update(0)
    servers[1].model_info["weight_version"] = lost_step
    client.check(asked(), client.engine.generate(asked(), PARAMS))
    (note,) = client.engine.take_notes()
    assert f"with weights of version {lost_step}, not megarl-" in note


def test_one_that_was_started_anew_between_two_updates_is_looked_at(serve, train) -> None:
    """The update detects restarted servers that had no request in between, and checks them again."""
    servers = serve()
    client = train(servers)
    client.update(0)
    for server in servers:
        server.stop()
        server.come_back()
    servers[1].vocabulary = 99
    servers[1].asked.clear()
    back, left = sorted(client.update(1), key=lambda note: "left out" in note)
    assert back == f"rollout server {servers[0].url} is back, and gets the weights"
    assert left.startswith(f"rollout server {servers[1].url} is left out: ") and "99 tokens" in left
    client.check_weights(servers[0], 1)
    assert not servers[1].paths(*UPDATE[:-1])
    client.check(asked(), client.engine.generate(asked(), PARAMS))


@pytest.mark.parametrize("what", ["token", "null", "text"])
def test_nonsense_is_not_taken(serve, train, what: str) -> None:
    servers = serve()
    client = train(servers)
    client.update(0)
    said = servers[1].said

    def nonsense(made: TokenData, finish: str) -> dict[str, Any]:
        answer = said(made, finish)
        if what == "token":
            answer["output_ids"][0] = 10**6
        elif what == "null":
            answer["meta_info"]["output_token_logprobs"][0][0] = None
        else:
            answer = {"error": "what?"}
        return answer

    servers[1].said = nonsense  # type: ignore[method-assign]
    client.check(asked(), client.engine.generate(asked(), PARAMS))
    (note,) = client.engine.take_notes()
    assert servers[1].url in note


def test_a_server_without_a_sign_of_life_is_left_out(serve, train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_pool, "PULSE", 0.05)
    servers = serve()
    client = train(servers, engine_timeout=4.0)
    client.update(0)
    servers[1].hold()
    servers[1].silent = True
    client.check(asked(), client.engine.generate(asked(), PARAMS))
    (note,) = client.engine.take_notes()
    assert "no sign of life for 4 s: /health_generate was not answered within 4 s" in note


def test_a_slow_server_is_waited_for(serve, train, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response takes 6 s, longer than engine_timeout (3 s), while health checks are answered."""
    monkeypatch.setattr(sglang_pool, "PULSE", 0.05)
    monkeypatch.setattr(sglang_servers, "TOKEN", 10.0)
    servers = serve(1)
    client = train(servers, engine_timeout=3.0)
    client.update(0)
    servers[0].hold()
    client.engine.submit(dict(enumerate(asked())), PARAMS)
    assert client.engine.poll(6.0) == []
    servers[0].release()
    found: dict[int, TokenData] = {}
    while client.engine.running:
        found |= dict(client.engine.poll(5.0))
    client.check(asked(), [found[i] for i in range(12)])
    assert client.engine.take_notes() == []


def test_without_any_server_the_engine_fails_and_starts_again(serve, train) -> None:
    servers = serve()
    client = train(servers)
    client.update(0)
    servers[0].hold()
    servers[1].hold()
    client.engine.submit(dict(enumerate(asked())), PARAMS)
    for server in servers:
        server.stop()
    with pytest.raises(EngineFailure, match="none of 2 servers is left"):
        while True:
            client.engine.poll(1.0)
    assert client.engine.running == 12
    assert len(client.engine.take_notes()) == 2
    client.engine.restart()
    assert not client.engine.ready(0.1)
    servers[0].release()
    servers[0].come_back()
    while not client.engine.ready(0.1):
        pass
    client.update(0)
    found: dict[int, TokenData] = {}
    while client.engine.running:
        found |= dict(client.engine.poll(5.0))
    client.check(asked(), [found[i] for i in range(12)])


def test_a_start_has_a_limit(serve, folder: Path) -> None:
    servers = serve(1)
    servers[0].stop()
    config = configured(folder, servers, engine_start_timeout=0.1)
    engine = SGLangServers(ServerPool(config, read_config(folder), 0, 1, "start"), (1,))
    engine.start()
    with pytest.raises(EngineFailure, match=r"no server for 0.1 s: http://127.0.0.1:.*/model_info"):
        while not engine.ready(0.1):
            pass
    engine.stop()


def test_what_is_aborted_comes_back_as_far_as_it_is(serve, train) -> None:
    servers = serve()
    client = train(servers)
    client.update(0)
    for server in servers:
        server.hold()
    requests = dict(enumerate(asked(6)))
    client.engine.submit(requests, PARAMS)
    while sum(len(server.waiting) for server in servers) < 6:
        client.engine.poll(0.05)
    back = dict(client.engine.abort())
    assert client.engine.running == 0 and client.engine.poll(0) == []
    whole = client.reference.generate(list(requests.values()), PARAMS)
    for number, completion in back.items():
        assert (
            completion.finish_reason == "abort"
            and completion.tokens.tolist() == whole[number].tokens.tolist()[:2]
        )
    for server in servers:
        server.release()
        server.asked.clear()
    again = {
        n: GenerationRequest(r.prompt_tokens, r.seed, back[n], r.max_tokens) for n, r in requests.items()
    }
    found = client.engine.generate(list(again.values()), PARAMS)
    sent = [body for server in servers for path, body in server.asked if path == "/generate"]
    for number, completion in enumerate(found):
        begun = back[number]
        assert completion.tokens.tolist()[: len(begun.tokens.tolist())] == begun.tokens.tolist()
        (body,) = [
            b for b in sent if b["input_ids"] == [*requests[number].prompt_tokens, *begun.tokens.tolist()]
        ]
        most = requests[number].max_tokens or PARAMS.max_tokens
        assert body["sampling_params"]["max_new_tokens"] == most - len(begun.tokens.tolist())
        assert body["sampling_params"]["sampling_seed"] == requests[number].seed


def test_an_abort_does_not_wait_for_a_dead_server(serve, train) -> None:
    servers = serve(1)
    client = train(servers)
    client.update(0)
    servers[0].hold()
    client.engine.submit(dict(enumerate(asked(3))), PARAMS)
    while len(servers[0].waiting) < 3:
        client.engine.poll(0.05)
    servers[0].stop()
    assert [c.finish_reason for _, c in client.engine.abort()] == ["abort"] * 3
    assert client.engine.running == 0


def test_a_request_that_is_refused_ends_the_run(serve, train) -> None:
    servers = serve(1)
    client = train(servers)
    client.update(0)
    with pytest.raises(EngineError, match="do not fit the model's 512 positions"):
        client.engine.submit({0: GenerationRequest((5,) * 501, 1)}, PARAMS)
    assert not client.engine.running


def test_a_client_that_was_killed_in_the_middle_is_no_hindrance(serve, train) -> None:
    servers = serve(1)
    servers[0].session_open = servers[0].paused = True
    client = train(servers)
    client.update(0)
    client.check_weights(servers[0], 0)


def test_a_server_that_fails_in_an_update_is_left_out_of_it(serve, train) -> None:
    servers = serve()
    client = train(servers)
    client.update(0)
    load = servers[1].load
    servers[1].load = lambda body: servers[1].done(False, "no room")  # type: ignore[method-assign]
    (note,) = client.update(1)
    assert "no room" in note
    client.check(asked(), client.engine.generate(asked(), PARAMS))
    servers[1].load = load  # type: ignore[method-assign]
    assert client.update(2) == [f"rollout server {servers[1].url} is back, and gets the weights"]
    client.check_weights(servers[1], 2)


def test_a_wrong_server_that_comes_back_is_not_taken(serve, train) -> None:
    servers = serve()
    client = train(servers)
    client.update(0)
    servers[1].stop()
    client.update(1)
    servers[1].come_back()
    servers[1].vocabulary = 99
    servers[1].asked.clear()
    (note,) = client.update(2)
    assert "has a vocabulary of 99 tokens, not 307" in note
    client.check(asked(), client.engine.generate(asked(), PARAMS))
    assert not servers[1].paths(*UPDATE[:-1])


def test_the_router_is_asked_and_its_servers_get_the_weights(serve, train) -> None:
    """Also after it forwards requests to a server without the weights, and after the router itself stops."""
    servers = serve()
    router = Router(servers)
    router.start()
    try:
        client = train(servers, router=router.url)
        client.update(0)
        for server in servers:
            client.check_weights(server, 0)
            server.asked.clear()
        client.check(asked(), client.engine.generate(asked(), PARAMS))
        assert len(router.paths("/generate")) == 12
        assert sum(len(server.paths("/generate")) for server in servers) == 12
        for server in servers:
            server.hold()
        client.engine.submit(dict(enumerate(asked(6))), PARAMS)
        while sum(len(server.waiting) for server in servers) < 6:
            client.engine.poll(0.05)
        assert [completion.finish_reason for _, completion in client.engine.abort()] == ["abort"] * 6
        for server in servers:
            server.release()
        servers[1].stop()
        servers[1].come_back()
        client.check(asked(), client.engine.generate(asked(), PARAMS))
        (note,) = client.engine.take_notes()
        assert "with weights of version default" in note
        assert client.update(1) == [f"rollout server {servers[1].url} is back, and gets the weights"]
        router.stop()
        client.check(asked(), client.engine.generate(asked(), PARAMS))
    finally:
        router.close()


@pytest.mark.parametrize("loads_half", [True, False])
def test_a_router_brings_no_answer_of_weights_that_an_update_has_missed(
    serve, train, loads_half: bool
) -> None:
    """A router forwards to a server that an update has left out, with half of the weights or the old ones.

    The next update makes it generate again, before it has the weights."""
    servers = serve()
    router = Router(servers)
    router.start()
    try:
        client = train(servers, router=router.url, in_flight="retract")
        client.update(0)
        client.check(asked(), client.engine.generate(asked(), PARAMS))
        load = servers[1].load

        def fail(body: dict[str, Any]) -> Any:
            if loads_half:
                load({**body, "weight_version": None})
            return servers[1].done(False, "no room")

        servers[1].load = fail  # type: ignore[method-assign]
        (note,) = client.update(1)
        assert "no room" in note
        if not loads_half:
            servers[1].model_info["weight_version"] = client.engine.name_version(0)
        servers[1].paused = servers[1].session_open = False
        servers[1].asked.clear()
        client.check(asked(), client.engine.generate(asked(), PARAMS))
        assert servers[1].paths("/generate"), "the router has asked it"
    finally:
        router.close()


@pytest.mark.parametrize("is_in_flight", [True, False])
def test_a_server_that_reports_no_versions_of_tokens(serve, train, is_in_flight: bool) -> None:
    """A custom build's number does not say whether it reports them."""
    servers = serve(1)
    servers[0].server_info["version"] = "custom"
    said = servers[0].said

    def answer(made: TokenData, finish: str) -> dict[str, Any]:
        reply = said(made, finish)
        del reply["meta_info"]["weight_versions"]
        return reply

    servers[0].said = answer  # type: ignore[method-assign]
    client = train(servers, in_flight="retract" if is_in_flight else "none")
    client.update(0)
    if not is_in_flight:
        client.check(asked(), client.engine.generate(asked(), PARAMS))
        return
    with pytest.raises(ConfigError, match=r"^schedule.in_flight: this SGLang does not report each token's"):
        client.engine.generate(asked(), PARAMS)


def test_ranks_share_clients_and_clients_share_out_servers(serve, folder: Path) -> None:
    """Four ranks, two per client, three servers: each server gets its weights from one client."""
    servers = serve(3)
    clients = [Trained(folder, servers, rank, 4, engine_tp=2) for rank in (0, 2, 1)]
    first, second, idle = clients
    urls = [server.url for server in servers]
    assert [server.url for server in first.engine.pool.own_servers] == [urls[0], urls[2]]
    assert [server.url for server in second.engine.pool.own_servers] == [urls[1]]
    assert idle.engine.pool.own_servers == [] and idle.buckets == [{}]
    assert sum(tensor.nbytes for tensor in idle.buckets[0].values()) == 0
    for client in clients:  # phase by phase, like the ranks of a job
        client.backend.begin()
    for client in clients:
        for name, tensor in client.buckets[0].items():
            tensor.copy_(client.value(name, 1))
        client.backend.send(0, [], 1)
        client.backend.finish(1)
    for server in servers:
        first.check_weights(server, 1)
        assert server.paths("/update_weights_from_tensor") == ["/update_weights_from_tensor"]
    for name, parameter in second.reference.parameters().items():
        parameter.detach().copy_(second.value(name, 1))
    second.reference.end_update(1)
    servers[1].stop()  # the client's only server; the other client's servers answer its requests
    second.check(asked(), second.engine.generate(asked(), PARAMS))
    for client in clients:
        client.engine.stop()


def test_no_server_is_paused_while_another_is_awaited(serve, train, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = serve()
    client = train(servers, in_flight="retract")
    client.update(0)
    servers[1].stop()
    client.update(1)
    servers[1].come_back()
    answer, paused = servers[1].answer, list[bool]()

    async def answer_late(request: Any, path: str, body: Any) -> Any:
        while path == "/model_info" and len(paused) < 100:
            await asyncio.sleep(0.001)
            paused.append(servers[0].paused)
        return await answer(request, path, body)

    monkeypatch.setattr(servers[1], "answer", answer_late)
    client.update(2)
    assert len(paused) >= 100 and not any(paused)
    client.check_weights(servers[1], 2)


def test_an_update_of_another_clients_server_aborts_and_continues(serve, folder: Path) -> None:
    """A client whose server is dead uses another client's, whose updates it does not make."""
    servers = serve()
    clients = [Trained(folder, servers, rank, 2, in_flight="abort") for rank in (0, 1)]

    def update(version: int) -> None:
        for client in clients:  # phase by phase, like the ranks of a job
            client.backend.begin()
        for client in clients:
            for name, tensor in client.buckets[0].items():
                tensor.copy_(client.value(name, version))
            client.backend.send(0, [], version)
            client.backend.finish(version)

    update(0)
    servers[1].hold()
    servers[0].stop()
    engine = clients[0].engine
    engine.submit(dict(enumerate(asked(3))), PARAMS)
    while len(servers[1].waiting) < 3:
        assert engine.poll(0.05) == []
    update(1)
    servers[1].release()
    responses: dict[int, TokenData] = {}
    while engine.running:
        responses |= dict(engine.poll(5.0))
    for data in responses.values():
        assert data.policy_versions.tolist() == [0, 0] + [1] * (data.num_tokens - 2)
        assert data.finish_reason != "abort" and data.num_tokens > 2
    for client in clients:
        client.engine.stop()


def test_ranks_of_several_nodes_may_share_a_client(folder: Path) -> None:
    """Rollout ranks may follow any number of training ranks; each client's first rank gets all tensors."""
    config = configured(folder, [], engine_tp=4)
    config = config.model_copy(update={"parallel": ParallelConfig(rollout_ranks=8)})
    targets = engine_targets(config, read_config(folder), 6)
    assert [rank for rank, _ in targets] == list(range(6, 14))
    whole = hf_shapes(read_config(folder)).keys()
    assert [shards.keys() == whole for _, shards in targets] == [True, False, False, False] * 2
    assert [len(shards) for _, shards in targets] == [len(whole), 0, 0, 0] * 2


WRONG: dict[str, tuple[Callable[[Server], Any], str]] = {
    "another architecture": (
        lambda s: s.model_info.update(model_type="llama", architectures=["LlamaForCausalLM"]),
        "runs llama ['LlamaForCausalLM'], not the run's qwen3 ['Qwen3ForCausalLM']",
    ),
    "another size": (
        lambda s: s.model_info.update(model_path=str(s.folder.parent / "wide")),
        "whose tensors differ from those of",
    ),
    "another name": (
        lambda s: s.model_info.update(model_path="org/Other-7B"),
        "runs org/Other-7B, and model.path is",
    ),
    "another vocabulary": (lambda s: setattr(s, "vocabulary", 300), "a vocabulary of 300 tokens, not 307"),
    "a larger vocabulary": (lambda s: setattr(s, "vocabulary", 400), "more than 307 tokens, not 307"),
    "a short context": (lambda s: setattr(s, "max_model_len", 64), "has room for 64 tokens, but prompt"),
    "a small cache": (
        lambda s: s.server_info.update(max_total_num_tokens=71),
        "has room for 71 tokens, but prompt and response need 32 + 40",
    ),
    "an old one": (lambda s: s.server_info.update(version="0.5.15"), "is SGLang 0.5.15 (update it"),
    "replicas": (lambda s: s.server_info.update(dp_size=2), "has data-parallel replicas"),
    "no tokenizer": (lambda s: s.server_info.update(skip_tokenizer_init=True), "has no tokenizer"),
    "drafts": (lambda s: s.server_info.update(speculative_algorithm="EAGLE"), "speculative decoding"),
    "own sampling": (
        lambda s: s.model_info.update(preferred_sampling_params={"min_p": 0.1}),
        "has its own sampling parameters",
    ),
    "something else": (
        lambda s: s.server_info.pop("version"),
        "/server_info was answered with an unexpected body",
    ),
    "nobody": (lambda s: s.stop(), "/model_info: ClientConnectorError"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_server_is_found_before_the_run(serve, folder: Path, what: str) -> None:
    servers = serve()
    make_tiny_model(folder.parent / "wide", "qwen3", tied=True, hidden=48)
    config = configured(folder, servers, stop=("x",))
    check_servers(config, read_config(folder), 1)
    spoil, message = WRONG[what]
    spoil(servers[1])
    with pytest.raises(ConfigError) as caught:
        check_servers(config, read_config(folder), 1)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"rollout.urls: {servers[1].url}: ")


def test_a_server_may_say_the_models_name(serve, folder: Path) -> None:
    """Its model path is on another machine. Without stop texts and tools, it needs no tokenizer."""
    (server,) = serve(1)
    server.model_info.update(model_path="/elsewhere/x", served_model_name="org/tiny")
    server.server_info.update(skip_tokenizer_init=True)
    check_servers(configured(folder, [server]), read_config(folder), 1)
    acting = configured(folder, [server], tools=("math:sqrt",))
    with pytest.raises(ConfigError, match="has no tokenizer"):
        check_servers(acting, read_config(folder), 1)


def test_too_few_servers(serve, folder: Path) -> None:
    servers = serve()
    check_servers(configured(folder, servers), read_config(folder), 2)
    with pytest.raises(
        ConfigError, match=r"rollout.urls: 2 of the 8 servers needed, .* \(name more, .*engine_tp=4\)"
    ):
        check_servers(configured(folder, servers), read_config(folder), 8)


def test_a_router_that_is_not_there(serve, folder: Path) -> None:
    config = configured(folder, serve(1), router="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"rollout.router: http://127.0.0.1:9: /health: "):
        check_servers(config, read_config(folder), 1)


@pytest.mark.parametrize(
    ("rollout", "problem"),
    [
        ({"urls": ()}, "rollout.urls: rollout.engine sglang_url needs the servers' URLs"),
        ({"urls": ("10.0.0.5:30000",)}, "rollout.urls: must be http://host:port, without a path (got '10.0"),
        ({"urls": ("http://a:1/v1",)}, "rollout.urls: must be http://host:port, without a path (got 'http"),
        ({"urls": ("http://a:1", "http://a:1")}, "rollout.urls: http://a:1: is named twice"),
        ({"router": "http://a:1"}, "rollout.urls: http://a:1: is named twice, or is the router's"),
        ({"router": "a"}, "rollout.router: must be http://host:port"),
        ({"routing_replay": True}, "rollout.routing_replay: is not for rollout.engine sglang_url"),
        ({"engine_options": {"x": 1}}, "rollout.engine_options: is not for rollout.engine sglang_url"),
        (
            {"weights_dtype": "fp8_block"},
            "rollout.weights_dtype: must be model for rollout.engine",
        ),
        ({"engine": "sglang"}, "rollout.urls: has no effect with rollout.engine sglang"),
        ({"engine_timeout": 1e4}, "rollout.engine_timeout: must be < parallel.timeout"),
    ],
)
def test_contradictions(rollout: dict[str, Any], problem: str) -> None:
    keys = {"engine": "sglang_url", "urls": ("http://a:1",), **rollout}
    config = Config(
        recipe="dapo",
        run_dir=Path("run"),
        steps=1,
        model=ModelConfig(path=Path("m")),
        data=DataConfig(train=("x.jsonl",)),
        rollout=RolloutConfig(**keys),
    )
    with pytest.raises(ConfigError) as caught:
        check_config(config, "x.yaml")
    assert str(caught.value).startswith(f"x.yaml: {problem}")


def test_a_plan_counts_nothing_of_the_servers_on_the_ranks() -> None:
    """A plan counts a transfer bucket but no engine memory on the ranks; more servers generate faster."""
    path, urls = ROOT / "configs" / "dapo_32b.yaml", ",".join(f"http://a:{n}" for n in range(1, 17))
    own, few, many = (
        make_plan_inputs(load_config(path, more), KNOWN_MODELS["Qwen2.5-32B"])
        for more in (
            [],
            ["rollout.engine=sglang_url", "rollout.urls=[http://a:1]"],
            ["rollout.engine=sglang_url", f"rollout.urls=[{urls}]"],
        )
    )
    for plan in (few, many):
        assert group_bytes(plan, "engine.weights", 0) == group_bytes(plan, "engine.kv_cache", 0) == 0
        assert find_problem(plan) is None
        rollout, transfer = ({n.phase: n for n in gpu_needs(plan)}[p] for p in ("rollout", "weight_transfer"))
        before = {need.phase: need for need in gpu_needs(own)}
        assert rollout.total < before["rollout"].total / 4
        assert transfer.total < before["weight_transfer"].total
    lengths = default_lengths(many)
    assert rollout_seconds(many, lengths) < rollout_seconds(few, lengths) / 8
    text = list(lines(many, "x", lengths, estimate(many, lengths)))
    assert any(line.startswith("engines  16 of tp 1 (sglang_url)") for line in text)


def megarl(folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = run_command(words, cwd=folder, env=environment, timeout=400)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"dp": 2}, {"dp": 1, "rollout_ranks": 1}], ids=str)
def test_a_run_over_servers_of_which_one_dies(
    serve, folder: Path, tmp_path: Path, parallel: dict[str, int]
) -> None:
    """Run three steps with two ranks: a server for each, or both for one rank, one step off-policy.

    Log-probs equal the trainer's in each step, so the weights have arrived. One server dies and is reported.
    The evaluation afterwards uses it again."""
    servers = serve()
    rows = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "recipe": "grpo", "run_dir": str(tmp_path / "run"), "steps": 3,
        "model": {"path": str(folder), "dtype": "fp32"}, "parallel": {"device": "cpu", **parallel},
        "data": {"train": [str(tmp_path / "sums.jsonl")], "eval": [str(tmp_path / "sums.jsonl")],
                 "max_prompt_tokens": 64},
        "evaluation": {"every": 0, "samples": 1},
        "log": {"report": False, "terminal": "quiet"}, "update": {"mini_batch": 8},
        "actor": {"lr": 0.01, "warmup_steps": 0}, "schedule": {"ahead": parallel.get("rollout_ranks", 0)},
        "rollout": {"engine": "sglang_url", "urls": [server.url for server in servers], "prompts": 4,
                    "group_size": 4, "max_response_tokens": 24},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(config))
    count = iter(range(10**6))

    def dies() -> None:
        if next(count) == 12:
            servers[1].loop.create_task(servers[1].die())

    servers[1].on_generate = dies
    megarl(tmp_path, "train", "run.json")
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    records = [record for record in map(json.loads, text.splitlines()) if record["stage"] == "train"]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["mismatch/logprob_abs_max"] < 1e-4 for record in records)
    events = [line for record in records for line in record.get("events", ())]
    assert any(line.startswith(f"rollout server {servers[1].url} is left out: ") for line in events), events

    servers[1].on_generate = lambda: None
    servers[1].come_back()
    for server in servers:
        server.asked.clear()
    megarl(tmp_path, "eval", "run.json", "parallel.rollout_ranks=0", "schedule.ahead=0")
    assert all("/update_weights_from_tensor" in server.paths(*UPDATE) for server in servers)
    assert sum(len(server.paths("/generate")) for server in servers) >= len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_servers_leave_and_join_while_weights_are_in_flight(
    serve, folder: Path, tmp_path: Path, mode: str
) -> None:
    """A server that leaves gives its requests back. One that joins late gets the current version."""
    servers = serve()
    rows = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(8) for b in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "recipe": "grpo", "run_dir": str(tmp_path / "run"), "steps": 8,
        "model": {"path": str(folder), "dtype": "fp32"},
        "parallel": {"device": "cpu", "dp": 1, "rollout_ranks": 1},
        "data": {"train": [str(tmp_path / "sums.jsonl")], "max_prompt_tokens": 64},
        "log": {"report": False, "terminal": "quiet"}, "update": {"mini_batch": 8},
        "actor": {"lr": 0.01, "warmup_steps": 0},
        "schedule": {"in_flight": mode, "max_staleness": 3},
        "checkpoint": {"every": 1, "keep": 0, "rollouts": True},
        "rollout": {"engine": "sglang_url", "urls": [server.url for server in servers], "prompts": 4,
                    "group_size": 4, "max_response_tokens": 24},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(config))
    count, returned = iter(range(10**6)), threading.Event()

    def dies() -> None:
        if next(count) == 12:
            servers[1].loop.create_task(servers[1].die())

    def let_it_return() -> None:
        if servers[1].runner is None and servers[1].asked and not returned.is_set():
            returned.set()
            threading.Thread(target=servers[1].come_back).start()

    servers[1].on_generate = dies
    servers[0].on_generate = let_it_return
    megarl(tmp_path, "train", "run.json")
    assert find_problems(tmp_path / "run") == []
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    events = [line for record in records for line in record.get("events", ())]
    assert any(line.startswith(f"rollout server {servers[1].url} is left out: ") for line in events), events
    assert any(line.endswith("is back, and gets the weights") for line in events), events
