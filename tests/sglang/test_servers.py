"""Real external SGLang servers on a CPU, and megarl's client of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.config.errors import ConfigError, EngineFailure
from megarl.config.schema import Config, DataConfig, ModelConfig, RolloutConfig, ScheduleConfig
from megarl.data.sample import TokenData
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.sglang_pool import ServerPool
from megarl.rollout.engines.sglang_servers import SGLangServers, check_servers
from megarl.rollout.sampling import SamplingParams
from megarl.sync.backends.http import HttpBackend
from megarl.sync.plan import Plan, engine_targets
from megarl.sync.transfer import Staging
from megarl.weights.families import read_config
from tests.docs.test_docs import ROOT
from tests.tiny_models import make_tiny_model

START = 1500  # seconds
pytestmark = pytest.mark.timeout(2400)


class Server:
    """SGLang's HTTP server of a folder, in its own process group."""

    def __init__(self, folder: Path, log: Path, tp: int = 1) -> None:
        self.folder, self.log, self.tp = folder, log, tp
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, *options: str) -> None:
        given = {
            "model-path": self.folder, "load-format": "dummy", "dtype": "float32", "device": "cpu",
            "attention-backend": "torch_native", "sampling-backend": "pytorch", "tp-size": self.tp,
            "max-total-tokens": 4096, "host": "127.0.0.1", "port": self.port, "log-level": "warning",
        }  # fmt: skip
        words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
        words += ["--disable-cuda-graph", "--skip-server-warmup", *options]
        cores = sorted(os.sched_getaffinity(0))
        environment = {
            "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[i % len(cores)]) for i in range(self.tp)),
        }  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.sglang.server",
                    *words,
                    "--disable-cuda-graph",
                    "--skip-server-warmup",
                ],
                env=os.environ | environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + START
        while True:
            try:
                with urlopen(f"{self.url}/health", timeout=60) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < end, f"no server within {START} s"
                time.sleep(1)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("servers") / "tiny"
    return make_tiny_model(place, "qwen3", tied=True, head_dim=16, hidden=64, ffn=96)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(folder, tmp_path_factory.mktemp("log") / "log")
    made.start()
    yield made
    made.kill()


class Client:
    """A client of one server, and the weights that it sends."""

    def __init__(self, server: Server, *, in_flight: Any = "none", **rollout: Any) -> None:
        self.folder = server.folder
        keys = {"max_response_tokens": 60, "engine_timeout": 120.0, "transfer_bucket": 1, **rollout}
        keys.setdefault("urls", (server.url,))
        self.config = Config(
            recipe="dapo",
            run_dir=server.folder / "run",
            steps=4,
            model=ModelConfig(path=server.folder, dtype="fp32"),
            data=DataConfig(max_prompt_tokens=32),
            rollout=RolloutConfig(engine="sglang_url", **keys),
            schedule=ScheduleConfig(in_flight=in_flight),
        )
        self.hf = read_config(server.folder)
        self.engine = SGLangServers(ServerPool(self.config, self.hf, 0, 1, "start"), (1,))
        plan = Plan((), {}, dict(engine_targets(self.config, self.hf, 1)))
        names = list(plan.targets[0])
        self.parts = [plan.part(names[:7]), plan.part(names[7:])]
        self.backend = HttpBackend(self.config, 0, torch.device("cpu"), torch.float32)
        self.buckets = self.backend.connect(self.engine, self.parts, Staging(torch.device("cpu")))
        self.weights = load_file(server.folder / "model.safetensors")

    def start(self) -> None:
        self.engine.start()
        self.wait()

    def wait(self) -> None:
        while not self.engine.ready(10.0):
            pass

    def update(self, version: int, scale: float) -> None:
        self.backend.begin()
        for number, bucket in enumerate(self.buckets):
            for name, tensor in bucket.items():
                tensor.copy_(self.weights[name] * scale)
            self.backend.send(number, [], version)
        self.backend.finish(version)

    def check(
        self, requests: list[GenerationRequest], found: list[TokenData], version: int, scale: float
    ) -> None:
        """Check log-probs against transformers' own model with the weights that were sent."""
        for request, one in zip(requests, found, strict=True):
            assert one.policy_versions.tolist() == [version] * one.num_tokens
            assert one.num_tokens <= (request.max_tokens or 60)
        self.check_versions(requests, found, {version: scale})

    def check_versions(
        self, requests: list[GenerationRequest], found: list[TokenData], scales: dict[int, float]
    ) -> None:
        """Check each token against a model of its version. scales: of the weights, by version"""
        for version, scale in scales.items():
            model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(scale)
                for request, one in zip(requests, found, strict=True):
                    assert one.finish_reason in ("stop", "length") and len(one.tokens) == len(one.logprobs)
                    tokens, prompt = one.tokens.tolist(), request.prompt_tokens
                    logprobs = model(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
                    ours = logprobs[len(prompt) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]
                    differences = (ours - torch.tensor(one.logprobs.tolist())).abs()
                    assert (differences[one.policy_versions == version] < 1e-4).all()


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest((3 + i, 9, 4), i, max_tokens=(None, 3)[i % 2]) for i in range(count)]


def test_weights_and_responses(server: Server) -> None:
    """The server starts with undefined weights; the third version equals the first."""
    client = Client(server)
    check_servers(client.config, client.hf, 1)
    client.start()
    for version, scale in ((0, 1.0), (1, 1.5), (2, 1.0)):
        client.update(version, scale)
        found = client.engine.generate(requests(8), SamplingParams(60))
        client.check(requests(8), found, version, scale)
    greedy = [client.engine.generate(requests(4), SamplingParams(20, 0.0)) for _ in range(2)]
    assert [c.tokens.tolist() for c in greedy[0]] == [c.tokens.tolist() for c in greedy[1]]
    assert client.engine.take_notes() == []
    client.engine.stop()


def test_sampling_sets(server: Server) -> None:
    """A server returns each token's set; its log-prob is renormalised over that."""
    client = Client(server)
    client.start()
    client.update(0, 1.0)
    asked, params = requests(8), SamplingParams(30, 0.8, 0.9, 5, sampling_sets=True)
    found = client.engine.generate(asked, params)
    model = AutoModelForCausalLM.from_pretrained(client.folder, dtype=torch.float32)
    for request, one in zip(asked, found, strict=True):
        assert one.sampling_sets is not None and one.sampling_sets.shape[1] <= 5
        tokens = one.tokens.tolist()
        with torch.no_grad():
            logits = model(torch.tensor([[*request.prompt_tokens, *tokens]])).logits[0] / 0.8
        for row, token, ids, logprob in zip(
            logits[len(request.prompt_tokens) - 1 : -1].double(),
            tokens,
            one.sampling_sets.tolist(),
            one.logprobs.tolist(),
            strict=True,
        ):
            members = [v for v in ids if v >= 0]
            assert token in members and set(members) <= set(row.topk(5).indices.tolist())
            assert logprob == pytest.approx(float(row[token] - row[members].logsumexp(0)), abs=1e-4)
    client.engine.stop()


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_weights_change_while_responses_run(server: Server, mode: str) -> None:
    """Each token has its version and the log-prob of that version's weights over all earlier tokens."""
    client = Client(server, in_flight=mode)
    client.start()
    scales = {0: 1.0, 1: 1.5, 2: 0.8}
    client.update(0, scales[0])
    asked = [GenerationRequest((3 + i, 9, 4), i, max_tokens=60 + 20 * (i % 8)) for i in range(24)]
    client.engine.submit(dict(enumerate(asked)), SamplingParams(400))
    answers: dict[int, TokenData] = {}
    for version in (1, 2):
        while len(answers) < 4 * version:
            answers |= dict(client.engine.poll(60.0))
        client.update(version, scales[version])
    while client.engine.running:
        answers |= dict(client.engine.poll(60.0))
    responses = [answers[i] for i in range(24)]
    client.check_versions(asked, responses, scales)
    assert any(len(set(one.policy_versions.tolist())) > 1 for one in responses)
    assert all(one.policy_versions.tolist() == sorted(one.policy_versions) for one in responses)
    client.engine.stop()


def test_a_server_is_killed_and_comes_back_while_responses_run(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    """The other server answers its requests. When it is back it gets the weights, and then requests."""
    other = Server(folder, tmp_path / "log")
    try:
        other.start()
        client = Client(server, in_flight="retract", urls=(server.url, other.url))
        client.start()
        scales, killed = {0: 1.0, 1: 1.5, 2: 0.8}, client.engine.pool.own_servers[1]
        asked = [GenerationRequest((3 + i, 9, 4), i, max_tokens=60 + 20 * (i % 8)) for i in range(40)]
        answers: dict[int, TokenData] = {}

        def submit(first: int, last: int) -> None:
            client.engine.submit({i: asked[i] for i in range(first, last)}, SamplingParams(400))

        client.update(0, scales[0])
        submit(0, 24)
        while len(answers) < 4:
            answers |= dict(client.engine.poll(60.0))
        assert killed.running
        other.kill()
        client.update(1, scales[1])
        while client.engine.running:
            answers |= dict(client.engine.poll(60.0))
        notes = client.engine.take_notes()
        assert notes and all(note.startswith(f"rollout server {other.url} is left out: ") for note in notes)
        other.start()
        submit(24, 32)
        client.update(2, scales[2])
        assert client.engine.take_notes() == [f"rollout server {other.url} is back, and gets the weights"]
        submit(32, 40)
        assert killed.running
        while client.engine.running:
            answers |= dict(client.engine.poll(60.0))
        client.check_versions(asked, [answers[i] for i in range(40)], scales)
        client.engine.stop()
    finally:
        other.kill()


def test_keep_needs_a_server_without_the_overlap_scheduler(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    client = Client(server, in_flight="keep")
    with pytest.raises(ConfigError, match="start it with --disable-overlap-schedule"):
        check_servers(client.config, client.hf, 1)
    other = Server(folder, tmp_path / "log")
    try:
        other.start("--disable-overlap-schedule")
        client = Client(other, in_flight="keep")
        check_servers(client.config, client.hf, 1)
        client.start()
        client.update(0, 1.0)
        asked = [GenerationRequest((3 + i, 9, 4), i, max_tokens=200) for i in range(8)]
        client.engine.submit(dict(enumerate(asked)), SamplingParams(400))
        time.sleep(0.5)
        client.update(1, 1.5)
        answers: dict[int, TokenData] = {}
        while client.engine.running:
            answers |= dict(client.engine.poll(60.0))
        responses = [answers[i] for i in range(8)]
        assert any(set(one.policy_versions.tolist()) == {0, 1} for one in responses)
        # Tokens before the update are those of its weights.
        client.check_versions(asked, responses, {0: 1.0})
        # New requests match no prefix of the old weights.
        again = [GenerationRequest(request.prompt_tokens, 50 + i) for i, request in enumerate(asked)]
        client.check(again, client.engine.generate(again, SamplingParams(60)), 1, 1.5)
        client.engine.stop()
    finally:
        other.kill()


def test_what_runs_is_aborted(server: Server) -> None:
    client = Client(server)
    client.start()
    client.update(0, 1.0)
    client.engine.submit({i: GenerationRequest((5, 6), i) for i in range(200)}, SamplingParams(400))
    done = client.engine.poll(60.0)
    back = client.engine.abort()
    assert len(done) + len(back) == 200 and client.engine.running == 0
    assert any(c.finish_reason == "abort" and c.tokens.tolist() for _, c in back)
    for _, one in back:
        assert len(one.tokens.tolist()) == len(one.logprobs.tolist()) == len(one.policy_versions.tolist())
    found = client.engine.generate(requests(4), SamplingParams(60))
    client.check(requests(4), found, 0, 1.0)
    client.engine.stop()


def test_a_client_that_was_killed_in_the_middle_is_no_hindrance(server: Server) -> None:
    """It left the server paused between the begin and the end of an update."""
    killed = Client(server)
    killed.start()
    killed.backend.begin()
    client = Client(server)
    check_servers(client.config, client.hf, 1)
    client.start()
    client.update(0, 1.0)
    client.check(requests(4), client.engine.generate(requests(4), SamplingParams(60)), 0, 1.0)
    client.engine.stop()
    killed.engine.stop()


def test_another_model_is_found_out(server: Server, tmp_path: Path) -> None:
    client = Client(server, max_response_tokens=600)
    with pytest.raises(ConfigError, match="has room for 512 tokens"):
        check_servers(client.config, client.hf, 1)
    client = Client(server)
    with pytest.raises(ConfigError, match=r"runs qwen3 .*, not the run's llama"):
        other = client.hf | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        check_servers(client.config, other, 1)
    for vocab, what in ((300, "more than 300"), (320, "307")):
        folder = make_tiny_model(tmp_path / f"v{vocab}" / "tiny", "qwen3", tied=True, vocab=vocab)
        with pytest.raises(ConfigError, match="tensors differ"):
            check_servers(client.config, read_config(folder), 1)
        # From the server's answer alone, as if its folder were on another machine.
        from megarl.rollout.engines import sglang_http

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sglang_http, "_differs", lambda *_: "")
            with pytest.raises(ConfigError, match=f"a vocabulary of {what} tokens, not {vocab}"):
                check_servers(client.config, read_config(folder), 1)


def test_a_run(server: Server, tmp_path: Path) -> None:
    """Two steps of GRPO, then an evaluation; a stop text ends some responses."""
    rows = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "recipe": "grpo", "run_dir": str(tmp_path / "run"), "steps": 2,
        "model": {"path": str(server.folder), "dtype": "fp32"}, "parallel": {"device": "cpu"},
        "data": {"train": [str(tmp_path / "sums.jsonl")], "eval": [str(tmp_path / "sums.jsonl")],
                 "max_prompt_tokens": 64},
        "evaluation": {"every": 2, "samples": 1}, "actor": {"lr": 0.01, "warmup_steps": 0},
        "log": {"report": False, "terminal": "quiet"}, "update": {"mini_batch": 8},
        "rollout": {"engine": "sglang_url", "urls": [server.url], "prompts": 4, "group_size": 4,
                    "max_response_tokens": 24, "stop": ["7"]},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "megarl", "train", "run.json"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["stage"] == "train"]
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["mismatch/logprob_abs_max"] < 1e-3 for record in records)
    assert records[0]["response/length_mean"] < 24, "7 ends a response"
    assert any(json.loads(line)["stage"] == "eval" for line in lines)


def test_a_server_that_is_killed_is_waited_for(server: Server) -> None:
    """After a restart by its owner and a weight update, it answers the outstanding requests."""
    client = Client(server)
    client.start()
    client.update(0, 1.0)
    asked = [GenerationRequest((3 + i, 9), i) for i in range(40)]
    client.engine.submit(dict(enumerate(asked)), SamplingParams(60))
    server.kill()
    ended: dict[int, TokenData] = {}
    with pytest.raises(EngineFailure, match="none of 1 servers is left"):
        while client.engine.running:
            ended |= dict(client.engine.poll(5.0))
    server.start()
    client.engine.restart()
    client.wait()
    client.update(0, 1.0)
    while client.engine.running:
        ended |= dict(client.engine.poll(5.0))
    client.check(asked, [ended[i] for i in range(40)], 0, 1.0)
    client.engine.stop()


def test_a_server_over_two_ranks(folder: Path, tmp_path: Path) -> None:
    """Each of the server's ranks loads its part of the same tensors."""
    server = Server(folder, tmp_path / "log", tp=2)
    try:
        server.start()
        client = Client(server)
        check_servers(client.config, client.hf, 1)
        client.start()
        client.update(0, 1.5)
        client.check(requests(6), client.engine.generate(requests(6), SamplingParams(60)), 0, 1.5)
        client.engine.stop()
    finally:
        server.kill()
