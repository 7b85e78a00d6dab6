"""Weight backends broadcast, disk and delta against servers with SGLang's API (servers.py).

tests/sglang/test_weight_backends.py has real SGLang servers."""

from __future__ import annotations

import asyncio
import base64
import io
import resource
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import load_file

from megarl.config import load_config
from megarl.config.check import check_config
from megarl.config.errors import ConfigError, EngineFailure, TransferError
from megarl.config.schema.rollout import WeightsConfig
from megarl.rollout.engines.sglang_pool import ServerPool
from megarl.rollout.engines.sglang_servers import SGLangServers
from megarl.sync.backends import BACKENDS
from megarl.sync.delta import LOADER, REPORT, Receiver
from megarl.sync.plan import Plan, engine_targets
from megarl.sync.transfer import Staging
from megarl.weights.families import read_config
from tests.docs.test_docs import ROOT
from tests.rollout.servers import WAIT, Server, Unpickler
from tests.rollout.test_sglang_servers import configured
from tests.tiny_models import make_tiny_model

OTHERS = ("broadcast", "disk", "delta")


class FullServer(Server):
    """A server with all weight calls.

    dies_at  path of the call at which it dies
    loses    it forgets an update's tensors, as if they had arrived damaged"""

    dies_at = ""
    loses = False

    def begin_life(self) -> None:
        super().begin_life()
        self.server_info["custom_weight_loader"] = [LOADER]
        self.groups: dict[str, Any] = {}
        self.receiver = Receiver()

    async def answer(self, request: web.Request, path: str, body: Any) -> web.StreamResponse:
        if path == self.dies_at:
            self.dies_at = ""
            self.loop.create_task(self.die())
            await asyncio.sleep(WAIT)
        match path:
            case "/init_weights_update_group":
                self.groups[body["group_name"]] = await asyncio.to_thread(join, body)
                return self.done(True, "")
            case "/update_weights_from_distributed":
                assert self.session_open and self.paused and body["load_format"] == "flattened_bucket"
                tensors = await asyncio.to_thread(receive, self.groups[body["group_name"]], body)
                return self.adopt(tensors, body)
            case "/update_weights_from_disk":
                assert self.paused and not self.session_open and body["load_format"] == "safetensors"
                files = sorted(Path(body["model_path"]).glob("*.safetensors"))
                self.model_info["model_path"] = self.model_info["served_model_name"] = body["model_path"]
                return self.adopt({k: v for file in files for k, v in load_file(file).items()}, body)
            case "/update_weights_from_tensor" if body.get("load_format") == LOADER:
                return self.load_delta(body)
            case "/weights_checker":
                names = {REPORT + self.receiver.report: "0"}
                if body["skip_tensor_list"] != ["."]:
                    names |= {name: str(float(t.double().sum())) for name, t in self.weights.items()}
                return web.json_response({"success": True, "message": "", "ranks": [{"checksums": names}]})
        return await super().answer(request, path, body)

    def load_delta(self, body: dict[str, Any]) -> web.Response:
        import json

        payload = base64.b64decode(body["serialized_named_tensors"][-1])
        [(text, data)] = Unpickler(io.BytesIO(payload)).load()
        header = json.loads(text)
        if self.loses:
            self.loses, self.receiver = False, Receiver()
        names = self.receiver.apply(header, data.numpy())
        tensors = {
            name: torch.from_numpy(self.receiver.tensors[name])
            .view(getattr(torch, header["formats"][name][0]))
            .view(header["formats"][name][1])
            for name in names
        }
        return self.adopt(tensors, body)


def join(body: dict[str, Any]) -> Any:
    """Join a group as SGLang does, as its only other rank."""
    store: Any = dist.TCPStore(
        body["master_address"], body["master_port"], is_master=False, timeout=timedelta(seconds=WAIT)
    )
    for prefix in (body["group_name"], f"{body['group_name']}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], timedelta(seconds=WAIT)
    assert (body["rank_offset"], body["world_size"], body["backend"]) == (1, 2, "gloo")
    return gloo(store, 1, 2, options)


def receive(group: Any, body: dict[str, Any]) -> dict[str, torch.Tensor]:
    formats = [
        (name, getattr(torch, dtype), torch.Size(shape))
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True)
    ]
    message = torch.empty(
        sum(dtype.itemsize * shape.numel() for _, dtype, shape in formats), dtype=torch.uint8
    )
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([message], options).wait()
    tensors, start = {}, 0
    for name, dtype, shape in formats:
        end = start + dtype.itemsize * shape.numel()
        tensors[name] = message[start:end].view(dtype).view(shape)
        start = end
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("backends") / "tiny"
    return make_tiny_model(place, "qwen3", tied=True, head_dim=16, ffn=1100, vocab=2500, hidden=128)


@pytest.fixture
def servers(folder: Path) -> Iterator[list[FullServer]]:
    made = [FullServer(folder) for _ in range(2)]
    for server in made:
        server.start()
    yield made
    for server in made:
        server.close()


class Client:
    """A client whose version v has the folder's weights, with some elements changed."""

    def __init__(self, folder: Path, servers: list[FullServer], backend: str, run_dir: Path, **rollout: Any):
        keys = {"weights": WeightsConfig(backend=backend), "fingerprint": True, **rollout}  # type: ignore[arg-type]
        config = configured(folder, list(servers), **keys)
        self.config = config.model_copy(update={"run_dir": run_dir})
        hf = read_config(folder)
        self.engine = SGLangServers(ServerPool(self.config, hf, 0, 1, "start"), (1,))
        plan = Plan((), {}, dict(engine_targets(self.config, hf, 1)))
        backend_class = BACKENDS[self.config.rollout.weight_backend]
        self.backend = backend_class(self.config, 0, torch.device("cpu"), torch.float32)
        parts = [plan.part(names) for names in self.backend.split(plan)]
        assert len(parts) > 2
        self.buckets = self.backend.connect(self.engine, parts, Staging(torch.device("cpu")))
        self.weights = load_file(folder / "model.safetensors")
        self.engine.start()
        while not self.engine.ready(0.1):
            pass

    def value(self, name: str, version: int) -> torch.Tensor:
        value = self.weights[name].clone()
        value.view(-1)[:: 100 + version] += version
        return value

    def update(self, version: int) -> list[str]:
        self.backend.begin()
        for number, bucket in enumerate(self.buckets):
            for name, tensor in bucket.items():
                tensor.copy_(self.value(name, version))
            self.backend.send(number, [self.backend.handle(number)], version)
        self.backend.finish(version)
        return self.engine.take_notes()

    def check(self, servers: list[FullServer], version: int) -> None:
        for server in servers:
            for name, tensor in server.weights.items():
                assert torch.equal(tensor, self.value(name, version)), name
            assert not server.session_open and not server.paused
            assert server.model_info["weight_version"] == self.engine.name_version(version)

    def take_bytes(self) -> int:
        sent, self.backend.bytes_sent = self.backend.bytes_sent, 0
        return sent

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())


@pytest.fixture
def connect(folder: Path, servers: list[FullServer], tmp_path: Path) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def start(backend: str, **rollout: Any) -> Client:
        clients.append(Client(folder, servers, backend, tmp_path / "run", **rollout))
        return clients[-1]

    yield start
    for client in clients:
        client.engine.stop()


@pytest.mark.parametrize("backend", OTHERS)
def test_servers_have_the_weights_bitwise(backend: str, servers: list[FullServer], connect: Any) -> None:
    client = connect(backend)
    sent = []
    for version in range(3):
        assert client.update(version) == []
        client.check(servers, version)
        sent.append(client.take_bytes())
    whole = {"broadcast": 2 * client.nbytes, "disk": client.nbytes, "delta": 2 * client.nbytes * 4 / 3}[
        backend
    ]
    assert sent[0] == pytest.approx(whole, rel=0.05)
    assert max(sent[1:]) < 0.2 * whole if backend == "delta" else sent[1:] == sent[:1] * 2


@pytest.mark.parametrize("backend", OTHERS)
def test_a_restarted_server_gets_everything(backend: str, servers: list[FullServer], connect: Any) -> None:
    """Also one that is restarted between updates, or is away for an update."""
    client = connect(backend)
    client.update(0)
    servers[1].stop()
    servers[1].come_back()
    back = f"rollout server {servers[1].url} is back, and gets the weights"
    assert client.update(1) == [back]
    client.check(servers, 1)
    servers[1].stop()
    (note,) = client.update(2)
    assert note.startswith(f"rollout server {servers[1].url} is left out: ")
    client.check(servers[:1], 2)
    servers[1].come_back()
    assert client.update(3) == [back]
    client.check(servers, 3)
    client.take_bytes()
    client.update(4)
    client.check(servers, 4)
    assert backend != "delta" or client.take_bytes() < 0.4 * client.nbytes


@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ("broadcast", "/init_weights_update_group"),
        ("broadcast", "/update_weights_from_distributed"),
        ("disk", "/update_weights_from_disk"),
        ("delta", "/update_weights_from_tensor"),
        ("delta", "/weights_checker"),
    ],
)
def test_a_server_that_dies_in_a_call_is_left_out(
    backend: str, path: str, servers: list[FullServer], connect: Any
) -> None:
    client = connect(backend)
    servers[1].dies_at = path
    (note,) = client.update(0)
    assert note.startswith(f"rollout server {servers[1].url} is left out: ")
    client.check(servers[:1], 0)
    servers[1].come_back()
    client.update(1)
    client.check(servers, 1)


def test_a_server_that_hangs_in_a_broadcast_is_left_out(servers: list[FullServer], connect: Any) -> None:
    client = connect("broadcast", engine_timeout=3.0)
    client.update(0)
    answer = servers[1].answer

    async def hang(request: web.Request, path: str, body: Any) -> web.StreamResponse:
        if path == "/update_weights_from_distributed":
            await asyncio.sleep(WAIT)
        return await answer(request, path, body)

    servers[1].answer = hang  # type: ignore[method-assign]
    (note,) = client.update(1)
    assert note.startswith(f"rollout server {servers[1].url} is left out: ")
    client.check(servers[:1], 1)
    del servers[1].answer
    client.update(2)
    client.check(servers, 2)


def test_no_server_left_is_an_engine_failure(servers: list[FullServer], connect: Any) -> None:
    client = connect("broadcast")
    for server in servers:
        server.dies_at = "/update_weights_from_distributed"
    with pytest.raises(EngineFailure, match="none of 2 servers is left"):
        client.update(0)
    for server in servers:
        server.come_back()
    client.backend.recover()
    client.update(0)
    client.check(servers, 0)


def test_a_server_that_lost_its_copy_gets_everything(servers: list[FullServer], connect: Any) -> None:
    """Its report shows that the delta had nothing to change."""
    client = connect("delta")
    client.update(0)
    servers[1].loses = True
    client.take_bytes()
    assert client.update(1) == []
    client.check(servers, 1)
    assert client.take_bytes() > client.nbytes
    client.update(2)
    client.check(servers, 2)
    assert client.take_bytes() < 0.4 * client.nbytes


def test_the_folder_has_complete_updates_alone(
    servers: list[FullServer], connect: Any, tmp_path: Path
) -> None:
    """At most two updates stay. An unfinished one goes, and SGLang's new model name is accepted.

    Another run's updates in the same folder stay as they are."""
    client = connect("disk", weights=WeightsConfig(backend="disk", folder=tmp_path / "shared"))
    folder = tmp_path / "shared" / client.engine.run_name
    (folder / ".partial" / "x").mkdir(parents=True)
    (tmp_path / "shared" / "megarl-other" / "update-000000").mkdir(parents=True)
    for version in range(4):
        client.update(version)
    assert sorted(path.name for path in folder.iterdir()) == ["update-000002", "update-000003"]
    assert (tmp_path / "shared" / "megarl-other" / "update-000000").exists()
    [model] = (folder / "update-000003").iterdir()
    assert model.name == client.config.model.path.name
    found = {name: t for file in model.glob("*.safetensors") for name, t in load_file(file).items()}
    assert all(torch.equal(found[name], client.value(name, 3)) for name in client.weights)
    client.engine.restart()
    assert all("left out" not in note for note in client.update(4)), "servers are identified again"
    client.check(servers, 4)


def test_a_folder_that_cannot_be_written_is_named(connect: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    client = connect("disk", weights=WeightsConfig(backend="disk", folder=tmp_path / "file" / "x"))
    with pytest.raises(TransferError, match=r"^rollout\.weights\.folder: .* cannot be written: Not a dir"):
        client.update(0)


def test_a_full_disk_is_named(connect: Any, tmp_path: Path) -> None:
    client = connect("disk", weights=WeightsConfig(backend="disk", folder=tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(TransferError, match=r"^rollout\.weights\.folder: .*: .* File too large"):
            client.update(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_servers_with_different_weights_are_found(servers: list[FullServer], connect: Any) -> None:
    client = connect("broadcast")
    adopt = servers[1].adopt

    def wrong(tensors: dict[str, torch.Tensor], body: dict[str, Any]) -> web.Response:
        return adopt({name: tensor + (name == "model.norm.weight") for name, tensor in tensors.items()}, body)

    servers[1].adopt = wrong  # type: ignore[method-assign]
    with pytest.raises(TransferError, match=r"have different weights: model\.norm\.weight$"):
        client.update(0)


@pytest.mark.parametrize("engine", ["transformers", "sglang", "sglang_url"])
@pytest.mark.parametrize("backend", ["colocated", "http", *OTHERS])
def test_an_engine_refuses_backends_of_others(engine: str, backend: str) -> None:
    keys = [f"rollout.engine={engine}", f"rollout.weights.backend={backend}"]
    if engine == "sglang_url":
        keys.append("rollout.urls=[http://127.0.0.1:1]")
    config = load_config(ROOT / "configs/vapo_7b.yaml", keys)
    problem = rf"rollout\.weights\.backend: {backend} is not for rollout\.engine {engine} \(use "
    if (backend == "colocated") == (engine != "sglang_url"):
        check_config(config, "config.yaml")
        assert config.rollout.weight_backend in BACKENDS
    else:
        with pytest.raises(ConfigError, match=problem):
            check_config(config, "config.yaml")
