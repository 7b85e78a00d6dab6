"""Weight backends against two real SGLang servers on a CPU: all give the servers the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.errors import ConfigError
from megarl.config.schema import Config, DataConfig, ModelConfig, RolloutConfig
from megarl.config.schema.rollout import WeightsConfig
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.sglang_pool import ServerPool
from megarl.rollout.engines.sglang_servers import SGLangServers, check_servers
from megarl.rollout.sampling import SamplingParams
from megarl.sync.backends import BACKENDS
from megarl.sync.delta import LOADER
from megarl.sync.plan import Plan, engine_targets
from megarl.sync.transfer import Staging
from megarl.weights.families import read_config
from tests.sglang.test_servers import Server
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(2400)
OTHERS = ("broadcast", "disk", "delta")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("backends") / "tiny"
    return make_tiny_model(place, "qwen3", tied=True, head_dim=16, hidden=64, ffn=96)


@pytest.fixture(scope="module")
def servers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    made = [Server(folder, tmp_path_factory.mktemp("log") / str(i)) for i in range(2)]
    try:
        for server in made:
            server.start("--custom-weight-loader", LOADER)
        yield made
    finally:
        for server in made:
            server.kill()


class Client:
    """A client of some servers with one backend. Version v has the folder's weights times `scale(v)`."""

    def __init__(self, servers: list[Server], backend: str, run_dir: Path, **rollout: Any) -> None:
        folder = servers[0].folder
        keys = {"max_response_tokens": 60, "engine_timeout": 60.0, "fingerprint": True, **rollout}
        self.config = Config(
            recipe="dapo",
            run_dir=run_dir,
            steps=4,
            model=ModelConfig(path=folder, dtype="fp32"),
            data=DataConfig(max_prompt_tokens=32),
            rollout=RolloutConfig(
                engine="sglang_url",
                urls=tuple(server.url for server in servers),
                weights=WeightsConfig(backend=backend),  # type: ignore[arg-type]
                **keys,
            ),
        )
        hf = read_config(folder)
        check_servers(self.config, hf, 1)
        self.engine = SGLangServers(ServerPool(self.config, hf, 0, 1, "start"), (1,))
        plan = Plan((), {}, dict(engine_targets(self.config, hf, 1)))
        names = list(plan.targets[0])
        parts = [plan.part(names[:7]), plan.part(names[7:])]
        backend_class = BACKENDS[self.config.rollout.weight_backend]
        self.backend = backend_class(self.config, 0, torch.device("cpu"), torch.float32)
        self.buckets = self.backend.connect(self.engine, parts, Staging(torch.device("cpu")))
        self.weights = load_file(folder / "model.safetensors")
        self.engine.start()
        while not self.engine.ready(10.0):
            pass

    def update(self, version: int, scale: float) -> list[str]:
        self.backend.begin()
        for number, bucket in enumerate(self.buckets):
            for name, tensor in bucket.items():
                # An update of norms and a few elements of others leaves most bytes as they are.
                tensor.copy_(self.weights[name])
                tensor.view(-1)[:7] *= scale
                if tensor.dim() == 1:
                    tensor *= scale
            self.backend.send(number, [self.backend.handle(number)], version)
        self.backend.finish(version)
        return self.engine.take_notes()

    def read_weights(self, server: Server) -> list[dict[str, str]]:
        """Return SGLang's checksums of all its parameters."""
        usable = [one for one in self.engine.pool.own_servers if one.usable]
        for one in usable:
            one.loading = True
        ranks = self.engine.read_checksums(["rotary_emb"])[server.url]
        for one in usable:
            one.loading = False
        return [{name: value for name, value in rank.items() if "." in name} for rank in ranks]

    def sample(self) -> list[tuple[list[int], list[float]]]:
        """Sample greedily: with both servers each gets some of the requests."""
        asked = [GenerationRequest((3 + i, 9, 4), i, max_tokens=(None, 9)[i % 2]) for i in range(8)]
        found = self.engine.generate(asked, SamplingParams(40, 0.0))
        assert all(set(one.policy_versions.tolist()) == {self.engine.weight_version} for one in found)
        return [(one.tokens.tolist(), one.logprobs.tolist()) for one in found]


@pytest.fixture(scope="module")
def expected(servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> dict[float, Any]:
    """Return weights and responses after updates through `http`, by scale."""
    client = Client(servers, "http", tmp_path_factory.mktemp("http"))
    found = {}
    for version, scale in enumerate((1.0, 1.5)):
        assert client.update(version, scale) == []
        weights = [client.read_weights(server) for server in servers]
        assert weights[0] == weights[1]
        found[scale] = weights[0], client.sample()
    assert found[1.0][0] != found[1.5][0]
    client.engine.stop()
    return found


def check(client: Client, servers: list[Server], expected: tuple[Any, Any]) -> None:
    for server in servers:
        assert client.read_weights(server) == expected[0]
    for ours, theirs in zip(client.sample(), expected[1], strict=True):
        assert ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], abs=1e-5)


@pytest.mark.parametrize("backend", OTHERS)
def test_weights_and_responses_are_those_of_http(
    backend: str, servers: list[Server], expected: dict[float, Any], tmp_path: Path
) -> None:
    """Parameters are bitwise equal, log-probs up to the batches that requests were in."""
    client = Client(servers, backend, tmp_path)
    sent = []
    for version, scale in enumerate((1.5, 1.0, 1.5)):
        assert client.update(version, scale) == []
        check(client, servers, expected[scale])
        sent.append(client.backend.bytes_sent)
        client.backend.bytes_sent = 0
    assert sent[1] < 0.2 * sent[0] if backend == "delta" else sent[1] == sent[0]
    client.engine.stop()


def update_without_second(client: Client, servers: list[Server]) -> None:
    """Kill the second server, and send version 1 to the other."""
    servers[1].kill()
    (note,) = client.update(1, 1.5)
    assert note.startswith(f"rollout server {servers[1].url} is left out: ")


@pytest.mark.parametrize("backend", OTHERS)
def test_a_restarted_server_gets_the_current_version(
    backend: str, servers: list[Server], expected: dict[float, Any], tmp_path: Path
) -> None:
    """While it is away the other server gets the weights; the client waits for nothing."""
    client = Client(servers, backend, tmp_path)
    client.update(0, 1.0)
    update_without_second(client, servers)
    check(client, servers[:1], expected[1.5])
    servers[1].start("--custom-weight-loader", LOADER)
    assert client.update(2, 1.0) == [f"rollout server {servers[1].url} is back, and gets the weights"]
    check(client, servers, expected[1.0])
    client.engine.stop()


@pytest.mark.parametrize("backend", OTHERS)
def test_a_server_that_dies_within_an_update_is_left_out(
    backend: str, servers: list[Server], expected: dict[float, Any], tmp_path: Path
) -> None:
    client = Client(servers, backend, tmp_path)
    client.update(0, 1.0)
    begin, client.backend.begin = client.backend.begin, lambda: None  # type: ignore[method-assign]
    begin()
    update_without_second(client, servers)
    check(client, servers[:1], expected[1.5])
    servers[1].start("--custom-weight-loader", LOADER)
    client.backend.begin = begin  # type: ignore[method-assign]
    client.update(2, 1.0)
    check(client, servers, expected[1.0])
    client.engine.stop()


def test_damaged_deltas_are_sent_again(
    servers: list[Server], expected: dict[float, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers refuse a delta with a wrong checksum, report it, and get everything."""
    from megarl.sync import delta

    client = Client(servers, "delta", tmp_path)
    client.update(0, 1.0)
    encode = delta.encode

    def damage(old: Any, new: Any, width: int) -> Any:
        return encode(old, new, width) and encode(old, ~new, width)

    client.backend.bytes_sent = 0
    with monkeypatch.context() as patch:
        patch.setattr(delta, "encode", damage)
        assert client.update(1, 1.5) == []
    assert client.backend.bytes_sent > sum(tensor.nbytes for tensor in client.weights.values())
    check(client, servers, expected[1.5])
    client.backend.bytes_sent = 0
    client.update(2, 1.0)
    assert client.backend.bytes_sent < 0.2 * sum(tensor.nbytes for tensor in client.weights.values())
    check(client, servers, expected[1.0])
    client.engine.stop()


def test_a_server_without_our_loader_is_refused_for_deltas(servers: list[Server], tmp_path: Path) -> None:
    servers[0].kill()
    servers[0].start()
    try:
        with pytest.raises(ConfigError, match=r"does not load deltas .start it with --custom-weight-loader"):
            Client(servers, "delta", tmp_path)
    finally:
        servers[0].kill()
        servers[0].start("--custom-weight-loader", LOADER)
