"""SGLang servers that somebody else runs (`rollout.urls`), by SGLang's public HTTP calls. Written against
SGLang 0.5.23; needs aiohttp, the extra `agents`.

Weights go by `update_weights_from_tensor`, each bucket as Hugging Face's tensors in the request's own body,
between `pause_generation`, `begin_weight_update`, `end_weight_update` and `continue_generation`. Of SGLang's
ways it alone needs nothing but the URL, on a CPU as on a GPU: a payload by handle would need one machine,
`update_weights_from_disk` a folder that both see, `update_weights_from_distributed` a process group with each
server, which ends with the first of them that dies. It costs a body of 4/3 of the weights' bytes, once for
every tensor-parallel rank of the server. What servers answer is JSON, checked by type; nothing of it is
unpickled.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from packaging.version import InvalidVersion, Version

from megarl.config.errors import ConfigError, EngineError, EngineFailure, MegarlError
from megarl.config.schema import Config
from megarl.parallel.runtime import Runtime
from megarl.rollout.chat_turns import end_tokens
from megarl.rollout.engines.engine import RolloutEngine, check_positions
from megarl.rollout.engines.sglang import TAGS, completion_of
from megarl.rollout.sampling import Completion, Request, SamplingParams
from megarl.weights.families import read_config
from megarl.weights.shards import hf_shapes

if TYPE_CHECKING:
    import aiohttp

OLDEST = "0.5.23"  # the version that was tried; before it there are no weight-update sessions
CONNECTION = 5.0  # seconds to a connection
QUESTION = 30.0  # seconds for what a server answers at once; its own check of its health takes up to 20
PULSE = 5.0  # seconds between signs of life of a server that generates
TOKEN = 1.0  # seconds that one token may take, the wait for its turn included, beside engine_timeout
TRIES = 3  # of one request at a server that is there and has the right weights
_RANGE = re.compile(r"valid range is \[0, (\d+)\)")
T = TypeVar("T")


class Unanswered(Exception):
    """A server has not answered, or not what was asked: the call, and what became of it.

    code  of its HTTP answer; 0: there was none"""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class _ModelInfo(msgspec.Struct):
    model_path: str
    weight_version: str
    served_model_name: str = ""
    is_generation: bool = True
    model_type: str | None = None
    architectures: list[str] | None = None
    preferred_sampling_params: Any = None


class _ServerInfo(msgspec.Struct):
    version: str
    max_total_num_tokens: int
    tp_size: int = 1
    dp_size: int = 1
    skip_tokenizer_init: bool = False
    disaggregation_mode: str = "null"
    speculative_algorithm: str | None = None


class _Card(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Done(msgspec.Struct):
    success: bool
    message: str = ""


class _Span(msgspec.Struct):
    version: str


class _Meta(msgspec.Struct):
    finish_reason: dict[str, Any]
    weight_version: str
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    weight_versions: list[_Span] = []


class _Generated(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] = []


async def _call(session: aiohttp.ClientSession, url: str, limit: float, kind: type[T], body: Any = None) -> T:
    """GET a URL, or POST `body` (JSON, encoded already or not) to it, and return its answer as `kind`. Raises
    Unanswered after `limit` seconds, for every other status than 200 and for an answer of another form."""
    import aiohttp

    path = "/" + url.split("/", 3)[-1]
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        async with session.request(
            "GET" if body is None else "POST",
            url,
            data=data,
            headers={"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=limit, sock_connect=CONNECTION),
            allow_redirects=False,
        ) as answer:
            content = await answer.read()
    except aiohttp.ConnectionTimeoutError:
        raise Unanswered(f"{path}: no connection within {CONNECTION:g} s") from None
    except TimeoutError:
        raise Unanswered(f"{path} was not answered within {limit:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise Unanswered(f"{path}: {type(error).__name__}: {error}") from None
    if answer.status != 200:
        said = content[:300].decode(errors="replace")
        raise Unanswered(f"{path} was answered {answer.status}: {said}", answer.status)
    try:
        return msgspec.json.decode(content, type=kind) if kind is not type(None) else kind()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unanswered(f"{path} was answered with something else: {error}") from None


async def _session() -> aiohttp.ClientSession:
    """Return a session whose connections serve once: a server closes those that are idle, and a request may
    just have been sent through one. It asks no proxy."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


async def _identify(
    session: aiohttp.ClientSession, url: str, config: Config, hf_config: Mapping[str, Any]
) -> _ServerInfo:
    """Return what a server says of itself. Raises ConfigError unless it runs the run's model, with room for
    its prompts and responses, in a way in which its weights can be replaced; Unanswered where it is not
    there."""
    limit = min(QUESTION, config.rollout.engine_timeout)
    model = await _call(session, f"{url}/model_info", limit, _ModelInfo)
    server = await _call(session, f"{url}/server_info", limit, _ServerInfo)
    models = await _call(session, f"{url}/v1/models", limit, _Models)
    try:
        is_old = Version(server.version) < Version(OLDEST)
    except InvalidVersion:
        is_old = False  # somebody's own build
    longest = config.data.max_prompt_tokens + config.rollout.max_extent
    room = min([server.max_total_num_tokens, *(card.max_model_len or longest for card in models.data)])
    ours = hf_config.get("model_type"), hf_config.get("architectures")
    theirs = model.model_type, model.architectures
    differs = model.is_generation and _differs(model, config.model.path, hf_config)
    problem = ""
    if is_old:
        problem = f"is SGLang {server.version} (update it to {OLDEST} or later)"
    elif not model.is_generation or ours != theirs:
        problem = f"runs {theirs[0]} {theirs[1]}, not the run's {ours[0]} {ours[1]} (start it on model.path)"
    elif differs:
        problem = differs
    elif room < longest:
        needed = f"{config.data.max_prompt_tokens} + {config.rollout.max_extent}"
        problem = f"has room for {room} tokens, a prompt and its response are up to {needed} (give it more)"
    elif server.dp_size > 1:
        problem = "has data-parallel replicas, whose weights cannot be replaced (start one server for each)"
    elif server.disaggregation_mode != "null" or server.speculative_algorithm:
        problem = "has prefill or drafts of its own (start it without disaggregation and speculation)"
    elif server.skip_tokenizer_init and (config.rollout.stop or config.rollout.acts):
        problem = "has no tokenizer, and responses end at texts (start it without --skip-tokenizer-init)"
    elif model.preferred_sampling_params:
        problem = "samples in a way of its own (start it without --preferred-sampling-params)"
    else:
        wanted = hf_config["vocab_size"]
        found = await _vocabulary(session, url, wanted, limit)
        if found != str(wanted):
            problem = f"has a vocabulary of {found} tokens, not {wanted} (start it on model.path)"
    if problem:
        raise ConfigError(f"rollout.urls: {url}: {problem}")
    return server


def _differs(model: _ModelInfo, ours: Path, hf_config: Mapping[str, Any]) -> str:
    """Return how a server's model differs in size; weights of another size would end it. Its folder tells
    where that is here too, else its name."""
    folder = Path(model.model_path)
    if (folder / "config.json").is_file():
        try:
            same = hf_shapes(read_config(folder)) == hf_shapes(hf_config)
        except MegarlError:
            same = False
        what = f"runs {folder}, whose tensors differ from those of {ours} (start it on that)"
        return "" if same else what
    if ours.name in (folder.name, Path(model.served_model_name).name):
        return ""
    remedy = f"start it on that model, or with --served-model-name {ours.name} if it is the same"
    return f"runs {model.model_path}, and model.path is {ours} ({remedy})"


async def _vocabulary(session: aiohttp.ClientSession, url: str, expected: int, limit: float) -> str:
    """Return how many tokens a server's model has, by what it says to a token beyond."""
    # A client that was killed in the middle of an update has left it waiting.
    await _call(session, f"{url}/continue_generation", limit, type(None), {})
    one = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
    beyond = one | {"return_logprob": True, "token_ids_logprob": [expected]}
    try:
        await _call(session, f"{url}/generate", limit, _Generated, beyond)
    except Unanswered as answer:
        if answer.code == 400 and (said := _RANGE.search(str(answer))):
            return said[1]
        raise
    return f"more than {expected}"


def check_servers(config: Config, hf_config: Mapping[str, Any], engines: int) -> None:
    """Ask all servers who they are. Raises ConfigError where one is not there, is not what the run needs, or
    where there are fewer than `engines`, the ranks that each talk to their own."""
    rollout = config.rollout
    if len(rollout.urls) < engines:
        tp = rollout.engine_tp * -(-engines // len(rollout.urls))
        what = f"{len(rollout.urls)} for {engines} ranks with clients of their own"
        raise ConfigError(f"rollout.urls: {what} (name more, or let ranks share: rollout.engine_tp={tp})")

    async def ask(session: aiohttp.ClientSession, url: str, key: str) -> None:
        try:
            if key == "rollout.router":
                await _call(session, f"{url}/health", min(QUESTION, rollout.engine_timeout), type(None))
            else:
                await _identify(session, url, config, hf_config)
        except Unanswered as problem:
            raise ConfigError(f"{key}: {url}: {problem} (start it, or leave it out)") from None

    async def ask_all() -> None:
        async with await _session() as session:
            await _all(ask(session, url, "rollout.urls") for url in rollout.urls)
            if rollout.router:
                await ask(session, rollout.router, "rollout.router")

    asyncio.run(ask_all())


class _Server:
    """A server as one client sees it.

    usable   it may be asked: it has the present weights, as far as this client knows
    loading  this client is bringing it weights
    running  ids of the requests that it is answering
    why      it was left out
    gone     its result is why it is not usable any more
    """

    def __init__(self, url: str) -> None:
        self.url, self.tp, self.why = url, 1, ""
        self.usable = self.loading = False
        self.running: set[str] = set()
        self.gone: asyncio.Future[str] | None = None
        self.watch: asyncio.Task[None] | None = None


class SGLangServers(RolloutEngine):
    """A RolloutEngine whose responses come from servers at `rollout.urls`. The ranks with engines share one
    client for each `rollout.engine_tp` of them, its leader's. Each client keeps some of the servers supplied
    with weights, and asks these, or through `rollout.router`; where none of its own is left it asks the
    others'.

    A server that does not answer, or answers with other weights, is left out and what it was asked is asked
    elsewhere, with the same seeds. At each weight update all are tried again: one that has come back is taken
    once it has all of the weights. An EngineFailure is met where no server is left.

    rank, ranks  number of this rank among those with engines, and how many they are
    eos_ids      tokens that end a response, besides those that the servers know
    """

    streams = True

    @classmethod
    def build(cls, config: Config, tokenizer: Any, runtime: Runtime) -> SGLangServers:
        mine, ranks = runtime.rank - runtime.first_engine, runtime.rollout_ranks or runtime.world
        return cls(config, read_config(config.model.path), mine, ranks, end_tokens(tokenizer))

    @classmethod
    def check_engines(
        cls, config: Config, hf_config: Mapping[str, Any], device: torch.device, engines: int
    ) -> None:
        """Ask all servers, see `check_servers`."""
        check_servers(config, hf_config, engines)

    def __init__(
        self, config: Config, hf_config: Mapping[str, Any], rank: int, ranks: int, eos_ids: Sequence[int]
    ) -> None:
        self.config, self.hf_config, self.rank, self.eos_ids = config, hf_config, rank, tuple(eos_ids)
        rollout, tp = config.rollout, config.rollout.engine_tp
        self.weight_version, self.version_name = -1, ""
        mine = set(rollout.urls[rank // tp :: ranks // tp]) if rank % tp == 0 else set[str]()
        servers = [_Server(url) for url in rollout.urls] if mine else []
        self.own = [server for server in servers if server.url in mine]
        self.others = [server for server in servers if server.url not in mine]
        self.router = _Server(rollout.router) if rollout.router and mine else None
        # Versions of this run are told from those of another one that has the servers' weights replaced.
        self._run = hashlib.sha256(str(config.run_dir.absolute()).encode()).hexdigest()[:8]
        self._limit, self._question = rollout.engine_timeout, min(QUESTION, rollout.engine_timeout)
        self._outstanding: dict[int, tuple[Request, SamplingParams]] = {}
        self._tasks: dict[int, asyncio.Task[Completion]] = {}
        self._ended: queue.SimpleQueue[tuple[int, asyncio.Task[Completion]]] = queue.SimpleQueue()
        self._count = itertools.count()
        self._notes: list[str] = []
        self._failure: EngineFailure | None = None
        self._has_weights = self._aborting = False
        self._loop: asyncio.AbstractEventLoop | None = None

    # Start and end

    def start(self) -> None:
        """Begin to wait for servers, on a thread of its own."""
        self._deadline = time.monotonic() + self.config.rollout.engine_start_timeout
        if not self.own or self._loop is not None:
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang servers", daemon=True)
        self._thread.start()
        # Each request under way is a connection.
        self._room = asyncio.Semaphore(self.config.rollout.max_batch * len(self.own))
        self._session = self._do(_session())

    def _do(self, job: Coroutine[Any, Any, T]) -> T:
        """Do something on the client's thread. Each of its calls has a limit."""
        assert self._loop is not None, "only the leader, once started, talks to servers"
        return asyncio.run_coroutine_threadsafe(job, self._loop).result()

    def ready(self, seconds: float) -> bool:
        """See RolloutEngine: whether there is a server. Raises EngineFailure where there is none for so long
        as an engine may take to start."""
        end = time.monotonic() + seconds
        while self.own:
            found = self._do(_all(self._is_there(server) for server in (*self.own, *self.others)))
            if any(problem is None for problem in found):
                break
            if time.monotonic() > self._deadline:
                limit = self.config.rollout.engine_start_timeout
                raise EngineFailure(f"rollout.urls: no server for {limit:g} s: {next(filter(None, found))}")
            if (left := end - time.monotonic()) <= 0:
                return False
            time.sleep(min(left, 1.0))
        return True

    async def _is_there(self, server: _Server) -> str | None:
        try:
            await self._ask(server, "/model_info", self._question, _ModelInfo)
        except Unanswered as problem:
            return f"{server.url}: {problem}"
        return None

    def restart(self) -> None:
        """See RolloutEngine: forget what is known of the servers, and wait for one."""
        self._has_weights, self._failure, self.weight_version = False, None, -1
        self._deadline = time.monotonic() + self.config.rollout.engine_start_timeout
        if self.own:
            self._do(self._forget("it is tried again"))

    async def _forget(self, why: str) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        for server in self._servers():
            self._close(server, why)

    def stop(self) -> None:
        """Let go of the servers, which go on. One whose weights are being replaced may generate again."""
        if self._loop is None:
            return
        loading = [server for server in self.own if server.loading]
        self._do(self._forget("the run has ended"))
        for server, path in itertools.product(loading, ("/end_weight_update", "/continue_generation")):
            with suppress(Unanswered):  # it may be gone itself
                self._do(self._ask(server, path, self._question, type(None), {}))
        self._do(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None
        self._outstanding.clear()
        self._has_weights = False

    def take_notes(self) -> list[str]:
        """Return which servers were left out and which came back, since the last call."""
        notes, self._notes = self._notes, []
        return notes

    # Servers

    def _servers(self) -> Iterable[_Server]:
        return (*self.own, *self.others, *([self.router] if self.router else ()))

    async def _ask(self, server: _Server, path: str, limit: float, kind: type[T], body: Any = None) -> T:
        return await _call(self._session, server.url + path, limit, kind, body)

    async def _command(self, server: _Server, path: str, limit: float, body: Any) -> None:
        """Have a server do something that it says it has done. Raises Unanswered where it has not."""
        done = await self._ask(server, path, limit, _Done, body)
        if not done.success:
            raise Unanswered(f"{path}: {done.message}")

    def _open(self, server: _Server) -> None:
        """Take a server that has the present weights."""
        server.usable, server.loading, server.why = True, False, ""
        server.gone = asyncio.get_running_loop().create_future()
        server.watch = asyncio.get_running_loop().create_task(self._watch(server))

    def _close(self, server: _Server, why: str) -> None:
        """Ask a server nothing more, and have what it was asked be asked elsewhere."""
        server.usable = server.loading = False
        if server.watch is not None:
            server.watch.cancel()
        if server.gone is not None and not server.gone.done():
            server.gone.set_result(why)

    def _leave_out(self, server: _Server, why: str) -> None:
        if server.usable or (server.loading and why != server.why):
            self._notes.append(f"rollout server {server.url} is left out: {why}")
        server.why = why
        self._close(server, why)

    async def _watch(self, server: _Server) -> None:
        """Leave a server out that has work, and for `engine_timeout` seconds no sign of life."""
        path, heard = "/health" if server is self.router else "/health_generate", time.monotonic()
        while True:
            await asyncio.sleep(PULSE)
            if server.running:
                try:
                    await self._ask(server, path, self._question, type(None))
                except Unanswered as problem:
                    if time.monotonic() - heard < self._limit:
                        continue
                    server.watch = None  # or it would cancel itself
                    self._leave_out(server, f"no sign of life for {self._limit:g} s: {problem}")
                    return
            heard = time.monotonic()

    # Weights

    def begin_update(self) -> None:
        """See RolloutEngine. Tries all servers of this client, those that were left out too."""
        self._has_weights = False
        if self.own:
            self._do(_all(self._begin_update(server) for server in self.own))

    async def _begin_update(self, server: _Server) -> None:
        limit, server.loading = self._limit, True
        # One that somebody has started anew meanwhile may be another model's.
        known = server.usable and await self._is_current(server)
        try:
            if not known:
                server.tp = (await _identify(self._session, server.url, self.config, self.hf_config)).tp_size
            # What somebody else may ask is ended, or waits: nothing is answered by half of the weights.
            await self._ask(server, "/pause_generation", limit, type(None), {"mode": "abort"})
            try:
                await self._command(server, "/begin_weight_update", limit, {})
            except Unanswered as problem:
                if "already open" not in str(problem):
                    raise
                # Of a client that was killed in the middle.
                await self._command(server, "/end_weight_update", limit, {})
                await self._command(server, "/begin_weight_update", limit, {})
        except (Unanswered, ConfigError) as problem:
            self._leave_out(server, str(problem))
            return
        if not known and (server.usable or server.why):
            self._notes.append(f"rollout server {server.url} is back, and gets the weights")

    @property
    def is_updating(self) -> bool:
        """Return whether a server of this client takes part in the update."""
        return any(server.loading for server in self.own)

    def post_weights(self, payload: str, version: int | None) -> None:
        """Send a bucket to the servers of this client, to all of them at once, see HttpBackend."""
        loading = [server for server in self.own if server.loading]
        last = version is not None
        names = {"flush_cache": last, "weight_version": None if version is None else self._name(version)}
        bodies = {
            tp: json.dumps({"serialized_named_tensors": [payload] * tp, **names}).encode()
            for tp in {server.tp for server in loading}
        }

        async def send(server: _Server) -> None:
            try:
                await self._command(server, "/update_weights_from_tensor", self._limit, bodies[server.tp])
            except Unanswered as problem:
                self._leave_out(server, str(problem))

        self._do(_all(send(server) for server in loading))

    def _name(self, version: int) -> str:
        return f"megarl-{self._run}-{version}"

    def end_update(self, version: int) -> None:
        """See RolloutEngine. Raises EngineFailure where no server has the weights."""
        self.version_name = self._name(version)
        if self.own:
            self._do(self._end_update())
        self._has_weights, self.weight_version = True, version
        self._begin(self._outstanding)

    async def _end_update(self) -> None:
        await _all(self._finish(server) for server in self.own if server.loading)
        # Those of other clients have got theirs by now, or are found out by their first answer.
        for server in (*self.others, *([self.router] if self.router else ())):
            self._close(server, "it has new weights")
            self._open(server)
        self._choose(direct=True)

    async def _finish(self, server: _Server) -> None:
        try:
            await self._command(server, "/end_weight_update", self._limit, {})
            await self._ask(server, "/continue_generation", self._question, type(None), {})
            if not await self._is_current(server):
                raise Unanswered(f"its weights are not of version {self.version_name}")
        except Unanswered as problem:
            self._leave_out(server, str(problem))
            return
        self._close(server, "it has new weights")
        self._open(server)

    async def _is_current(self, server: _Server) -> bool:
        """Return whether a server is there and has the present weights."""
        try:
            info = await self._ask(server, "/model_info", self._question, _ModelInfo)
        except Unanswered:
            return False
        return info.weight_version == self.version_name

    # Responses

    def submit(self, requests: Mapping[int, Request], params: SamplingParams) -> None:
        """Begin generating. The keys must be free. Raises EngineError without weights and for a request that
        does not fit the model."""
        if not requests:
            return
        if not self._has_weights:
            raise EngineError("rollout engine: submit was called before an update of its weights")
        positions = self.hf_config.get("max_position_embeddings", math.inf)
        check_positions(requests.values(), params, positions)
        asked = {number: (request, params) for number, request in requests.items()}
        self._outstanding |= asked
        self._begin(asked)

    def _begin(self, asked: Mapping[int, tuple[Request, SamplingParams]]) -> None:
        async def begin() -> None:
            for number, (request, params) in asked.items():
                task = asyncio.get_running_loop().create_task(self._generate(request, params))
                self._tasks[number] = task
                task.add_done_callback(lambda task, number=number: self._ended.put((number, task)))  # type: ignore[misc]

        if asked:
            self._do(begin())

    async def _generate(self, request: Request, params: SamplingParams) -> Completion:
        """Ask until there is an answer. Raises EngineFailure once there is nobody to ask."""
        tries: Counter[str] = Counter()
        direct = self.router is None
        async with self._room:
            while not self._aborting:
                server = self._choose(direct=direct)
                try:
                    return await self._answer(server, request, params)
                except (Unanswered, EngineFailure) as problem:
                    if server is self.router:  # the servers say themselves what is wrong
                        direct = True
                        continue
                    if isinstance(problem, Unanswered) and problem.code == 400:
                        raise EngineError(f"rollout.urls: {server.url}: {problem}") from None
                    tries[server.url] += 1
                    again = server.usable and tries[server.url] < TRIES and await self._is_current(server)
                    if not again:
                        self._leave_out(server, str(problem))
            return replace(request.partial or Completion(), finish="abort")

    def _choose(self, *, direct: bool) -> _Server:
        """Return whom to ask next: the router, else the one with least to do. EngineFailure where nobody is
        left."""
        if not direct and self.router and self.router.usable:
            return self.router
        for servers in (self.own, self.others):
            if usable := [server for server in servers if server.usable]:
                return min(usable, key=lambda server: len(server.running))
        raise EngineFailure(f"rollout.urls: none of {len(self.config.rollout.urls)} servers is left")

    async def _answer(self, server: _Server, request: Request, params: SamplingParams) -> Completion:
        left = request.limit(params) - request.begun
        rid = f"megarl-{self._run}-{self.rank}-{next(self._count)}"
        body = {
            "rid": rid,
            "input_ids": request.text,
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": left,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k or -1,
                "sampling_seed": request.seed,
                "stop": list(params.stop) or None,
                "stop_token_ids": list(self.eos_ids),
            },
        }
        assert server.gone is not None
        limit = self._limit + TOKEN * left
        asking = asyncio.ensure_future(self._ask(server, "/generate", limit, _Generated, body))
        server.running.add(rid)
        try:
            both: set[asyncio.Future[Any]] = {asking, server.gone}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise Unanswered(server.gone.result())
            found = asking.result()
        finally:
            asking.cancel()
            server.running.discard(rid)
        meta = found.meta_info
        logprobs = [entry[0] for entry in meta.output_token_logprobs]
        finish = str(meta.finish_reason.get("type"))
        if finish == "abort" and not self._aborting:
            raise Unanswered(f"/generate was aborted there: {meta.finish_reason.get('message')}")
        versions = {meta.weight_version, *(span.version for span in meta.weight_versions)}
        answered = " and ".join(sorted(versions))
        answer = found.output_ids, logprobs, finish, answered, None
        return completion_of(request, answer, self.weight_version, self.hf_config, name=self.version_name)

    @property
    def running(self) -> int:
        return len(self._outstanding)

    def poll(self, seconds: float) -> list[tuple[int, Completion]]:
        """See RolloutEngine. Raises EngineFailure where no server is left, EngineError where one refuses a
        request."""
        ended: list[tuple[int, Completion]] = []
        end = time.monotonic() + seconds
        while self._outstanding and self._failure is None:
            try:
                number, task = self._ended.get(timeout=0 if ended else max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            if self._tasks.get(number) is not task or task.cancelled():
                continue  # of before a restart
            if isinstance(error := task.exception(), EngineFailure):
                self._failure = error  # raised by the next call: the good answers of this one are not lost
            elif error is not None:
                raise error
            else:
                ended.append((number, task.result()))
                del self._tasks[number], self._outstanding[number]
        if self._failure is not None and not ended:
            raise self._failure
        return ended

    def abort(self) -> list[tuple[int, Completion]]:
        """See RolloutEngine. What a server does not give back in time comes back as it was."""
        if not self._outstanding:
            return []
        self._do(self._abort())
        ended = []
        for number, (request, _) in self._outstanding.items():
            task = self._tasks.pop(number, None)
            given_back = task is not None and not task.cancelled() and task.exception() is None
            begun = replace(request.partial or Completion(), finish="abort")
            ended.append((number, task.result() if given_back and task is not None else begun))
        self._outstanding.clear()
        return ended

    async def _abort(self) -> None:
        """End all requests: those that wait here, and, asked again and again, those at servers."""
        self._aborting, end = True, time.monotonic() + self._limit

        async def abort(server: _Server, rid: str) -> None:
            with suppress(Unanswered):  # the request itself, which is waited for, tells what is wrong
                await self._ask(server, "/abort_request", self._question, type(None), {"rid": rid})

        try:
            while left := [task for task in self._tasks.values() if not task.done()]:
                if time.monotonic() > end:
                    for task in left:
                        task.cancel()
                    await asyncio.wait(left)
                    break
                calls = [(server, rid) for server in self._servers() for rid in server.running]
                if self.router:  # it tells nobody
                    behind = [one for one in (*self.own, *self.others) if one.usable]
                    calls += [(server, rid) for server in behind for rid in self.router.running]
                await _all(abort(server, rid) for server, rid in calls if server is not self.router)
                await asyncio.wait(left, timeout=0.5)
        finally:
            self._aborting = False

    def sleep(self, tags: Sequence[str] = TAGS) -> None:
        """Free nothing: the servers' memory is not the ranks'."""

    def wake(self, tags: Sequence[str] = TAGS) -> None:
        """Do nothing, see `sleep`."""


async def _all(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    return list(await asyncio.gather(*jobs))
