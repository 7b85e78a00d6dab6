"""Servers with the part of SGLang's HTTP API that megarl uses and a real model.

Tests make them close connections, hang, die and come back."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web
from torch import Tensor
from transformers import AutoTokenizer

from megarl.data.sample import TokenData
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.sampling import SamplingParams

# Globals in a pickled tensor that SGLang 0.5.23 allows (SafeUnpickler, srt/utils/common.py).
ALLOWED = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("collections", "OrderedDict"),
}
WAIT = 60.0  # seconds that a test waits for an event before it fails


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in ALLOWED, f"{module}.{name} would be refused"
        return super().find_class(module, name)


def make_engine(folder: Path) -> TransformersEngine:
    engine = TransformersEngine(folder, eos_ids=(1,), tokenizer=AutoTokenizer.from_pretrained(folder))
    engine.start()
    return engine


class Http:
    """An aiohttp server in its own thread. It can die with its connections and restart at its address."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port, self.runner = 0, None
        self.asked: list[tuple[str, Any]] = []  # path and body
        self.open: dict[int, web.Request] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, job: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(job, self.loop).result(WAIT)

    def start(self) -> None:
        async def begin() -> None:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", self.handle)
            self.runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self.runner.setup()
            site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]

        self.run(begin())

    async def die(self) -> None:
        runner, self.runner = self.runner, None
        for request in list(self.open.values()):
            if request.transport:
                request.transport.abort()
            if request.task:
                request.task.cancel()
        if runner:
            await runner.cleanup()

    def stop(self) -> None:
        self.run(self.die())

    def close(self) -> None:
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.method == "POST" and request.can_read_body else None
        self.asked.append((request.path, body))
        self.open[id(request)] = request
        try:
            return await self.answer(request, request.path, body)
        finally:
            del self.open[id(request)]

    async def answer(self, request: web.Request, path: str, body: Any) -> web.StreamResponse:
        raise NotImplementedError

    def paths(self, *wanted: str) -> list[str]:
        return [path for path, _ in self.asked if path in wanted]


class Server(Http):
    """A server with SGLang's API. It reports model_info, server_info and max_model_len.

    closes   number of next generations that end with a closed connection
    go       event that generations wait for
    silent   health checks are not answered
    on_generate  called at each generation
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.closes, self.silent = 0, False
        self.go = asyncio.Event()
        self.go.set()
        self.on_generate: Callable[[], Any] = lambda: None
        self.vocabulary, self.max_model_len = 0, 512
        self.begin_life()

    def begin_life(self) -> None:
        """Reset the state and load the folder's model with random weights."""
        self.engine = make_engine(self.folder)
        for parameter in self.engine.parameters().values():
            parameter.detach().normal_()
        self.engine.end_update(0)
        config = self.engine.model.config
        self.vocabulary = config.vocab_size
        self.model_info = {
            "model_path": str(self.folder), "served_model_name": "x", "is_generation": True,
            "model_type": config.model_type, "architectures": config.architectures,
            "weight_version": "default", "preferred_sampling_params": None, "more": {"that": "comes"},
        }  # fmt: skip
        self.server_info = {
            "version": "0.5.23", "tp_size": 1, "dp_size": 1, "max_total_num_tokens": 4096,
            "skip_tokenizer_init": False, "disaggregation_mode": "null", "speculative_algorithm": None,
        }  # fmt: skip
        self.session_open = self.paused = False
        self.waiting: dict[str, asyncio.Event] = {}

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.engine.parameters())

    async def answer(self, request: web.Request, path: str, body: Any) -> web.StreamResponse:
        match path:
            case "/model_info":
                return web.json_response(self.model_info)
            case "/server_info":
                return web.json_response(self.server_info)
            case "/v1/models":
                return web.json_response({"data": [{"id": "x", "max_model_len": self.max_model_len}]})
            case "/health" | "/health_generate":
                while self.silent:
                    await asyncio.sleep(0.05)
                return web.Response()
            case "/pause_generation":
                assert body["mode"] in ("abort", "retract", "in_place")
                self.paused = True
                for event in self.waiting.values() if body["mode"] == "abort" else ():
                    event.set()
                return web.json_response({"status": "ok"})
            case "/continue_generation":
                self.paused = False
                return web.json_response({"status": "ok"})
            case "/update_weight_version":
                assert self.paused and not body["abort_all_requests"]
                self.model_info["weight_version"] = body["new_version"]
                return self.done(True, "")
            case "/begin_weight_update":
                return self.done(
                    not self.session_open, "a weight-update session is already open", is_open=True
                )
            case "/end_weight_update":
                return self.done(self.session_open, "no weight-update session is open", is_open=False)
            case "/update_weights_from_tensor":
                return self.load(body)
            case "/abort_request":
                if body["rid"] in self.waiting:
                    self.waiting[body["rid"]].set()
                return web.Response()
            case "/generate":
                return await self.generate(request, body)
        return web.Response(status=404)

    def done(self, success: bool, message: str, is_open: bool | None = None) -> web.Response:
        if success and is_open is not None:
            self.session_open = is_open
        said = {"success": success, "message": "Success" if success else message}
        return web.json_response(said, status=200 if success else 400)

    def load(self, body: dict[str, Any]) -> web.Response:
        if not self.session_open or not self.paused:
            return self.done(False, "update_weights_from_tensor must run between begin and end")
        payloads = body["serialized_named_tensors"]
        assert len(payloads) == self.server_info["tp_size"]
        tensors = Unpickler(io.BytesIO(base64.b64decode(payloads[-1], validate=True))).load()
        mine = self.weights
        for name, tensor in tensors:
            assert mine[name].shape == tensor.shape and mine[name].dtype == tensor.dtype, name
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, "more was sent than the tensor"
        return self.adopt(dict(tensors), body)

    def adopt(self, tensors: dict[str, Tensor], body: dict[str, Any]) -> web.Response:
        for name, tensor in tensors.items():
            self.weights[name].detach().copy_(tensor)
        if body["weight_version"] is not None:
            self.model_info["weight_version"] = body["weight_version"]
        if body["flush_cache"]:
            self.engine.end_update(0)
        return self.done(True, "")

    async def generate(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        """Answer like the transformers engine with the same seed; an abort returns the first two tokens."""
        wanted, sampling = body.get("token_ids_logprob"), body["sampling_params"]
        if wanted and not max(wanted) < self.vocabulary:
            what = f"out-of-vocabulary token id {wanted[0]}; valid range is [0, {self.vocabulary})."
            return web.json_response({"error": {"message": what}}, status=400)
        self.on_generate()
        if self.closes > 0:
            self.closes -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        rid = body.get("rid", "of nobody")
        stopped = self.waiting[rid] = asyncio.Event()
        waits = [asyncio.ensure_future(event.wait()) for event in (self.go, stopped)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            while self.paused and not stopped.is_set():
                await asyncio.sleep(0.005)
        finally:
            for wait in waits:
                wait.cancel()
            del self.waiting[rid]
        count = 2 if stopped.is_set() else sampling["max_new_tokens"]
        params = SamplingParams(
            count,
            sampling.get("temperature", 1.0),
            sampling.get("top_p", 1.0),
            max(0, sampling.get("top_k", -1)),
            tuple(sampling.get("stop") or ()),
        )
        seed = sampling.get("sampling_seed", 0)
        made = self.engine.generate([GenerationRequest(tuple(body["input_ids"]), seed)], params)[0]
        finish = "abort" if stopped.is_set() else made.finish_reason
        return web.json_response(self.said(made, finish))

    def said(self, made: TokenData, finish: str) -> dict[str, Any]:
        version, pairs = (
            self.model_info["weight_version"],
            zip(made.logprobs.tolist(), made.tokens.tolist(), strict=True),
        )
        return {
            "text": "what nobody reads", "output_ids": made.tokens.tolist(),
            "meta_info": {
                "finish_reason": {"type": finish}, "weight_version": version,
                "weight_versions": [{"version": version, "start": 0, "end": len(made.tokens)}],
                "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            },
        }  # fmt: skip

    def hold(self) -> None:
        """Make generations wait until `release`."""
        self.loop.call_soon_threadsafe(self.go.clear)

    def release(self) -> None:
        self.loop.call_soon_threadsafe(self.go.set)

    def come_back(self) -> None:
        """Restart at the same address, with other weights."""
        self.begin_life()
        self.start()


class Router(Http):
    """Forwards generations to the servers round-robin, and has no other call but /health."""

    def __init__(self, servers: list[Server]) -> None:
        super().__init__()
        self.servers, self.turn = servers, 0

    async def answer(self, request: web.Request, path: str, body: Any) -> web.StreamResponse:
        if path == "/health":
            return web.Response()
        assert path == "/generate"
        self.turn += 1
        server = self.servers[self.turn % len(self.servers)]
        try:
            async with ClientSession() as session, session.post(server.url + path, json=body) as answer:
                return web.Response(body=await answer.read(), status=answer.status)
        except OSError as error:
            return web.Response(status=502, text=str(error))
