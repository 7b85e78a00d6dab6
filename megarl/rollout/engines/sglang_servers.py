"""External SGLang servers (`rollout.urls`), by their public HTTP calls, see docs/sglang.md."""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from msgspec import structs

from megarl.config.errors import EngineError, EngineFailure
from megarl.config.schema import Config
from megarl.data.response_text import end_tokens
from megarl.data.sample import TokenData
from megarl.parallel.comm import broadcast_from_rank_0
from megarl.parallel.runtime import Runtime
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.sglang import SGLangRequests, end_at_limit
from megarl.rollout.engines.sglang_http import (
    Generated,
    Unanswered,
    check_servers,
    gather,
    open_session,
)
from megarl.rollout.engines.sglang_pool import Server, ServerPool
from megarl.rollout.sampling import SamplingParams
from megarl.weights.families import read_config

TOKEN = 1.0  # seconds per token, with waits in the server's queue, beyond engine_timeout
TRIES = 3  # of a request at a server with the right weights
T = TypeVar("T")


class SGLangServers(SGLangRequests):
    """An engine on servers at `rollout.urls`, see EngineCapabilities.remote."""

    @classmethod
    def build(cls, config: Config, tokenizer: Any, runtime: Runtime) -> SGLangServers:
        rank, ranks = runtime.rank - runtime.first_engine, runtime.rollout_ranks or runtime.world
        start = broadcast_from_rank_0(runtime.engines, secrets.token_hex(4), str)
        hf_config = read_config(config.model.path)
        return cls(ServerPool(config, hf_config, rank, ranks, start), end_tokens(tokenizer))

    @classmethod
    def check_engines(
        cls, config: Config, hf_config: Mapping[str, Any], device: torch.device, engines: int
    ) -> None:
        check_servers(config, hf_config, engines)

    def __init__(self, pool: ServerPool, eos_ids: Sequence[int]) -> None:
        super().__init__(pool.config, pool.hf_config, eos_ids)
        self.pool = pool
        self._tasks: dict[int, asyncio.Task[TokenData]] = {}
        self._ended: queue.SimpleQueue[tuple[int, asyncio.Task[TokenData]]] = queue.SimpleQueue()
        self._count = itertools.count()
        self._aborting = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._deadline = time.monotonic() + self.config.rollout.engine_start_timeout
        if not self.pool.own_servers or self._loop is not None:
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang servers", daemon=True)
        self._thread.start()
        # Each running request has a connection.
        self._room = asyncio.Semaphore(self.config.rollout.max_batch * len(self.pool.own_servers))
        self.pool.session = self._do(open_session())

    def _do(self, job: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None, "only the leader, once started, talks to servers"
        return asyncio.run_coroutine_threadsafe(job, self._loop).result()

    def ready(self, seconds: float) -> bool:
        """Return whether a server answers. Raises EngineFailure after `engine_start_timeout`."""
        end_time = time.monotonic() + seconds
        while self.pool.own_servers:
            servers = (*self.pool.own_servers, *self.pool.other_servers)
            problems = self._do(gather(self.pool.problem(server) for server in servers))
            if any(problem is None for problem in problems):
                break
            if time.monotonic() > self._deadline:
                limit = self.config.rollout.engine_start_timeout
                raise EngineFailure(
                    f"rollout.urls: no server for {limit:g} s: {next(filter(None, problems))}"
                )
            if (seconds_left := end_time - time.monotonic()) <= 0:
                return False
            time.sleep(min(seconds_left, 1.0))
        return True

    def restart(self) -> None:
        self._has_weights, self._failure, self.weight_version = False, None, -1
        self._deadline = time.monotonic() + self.config.rollout.engine_start_timeout
        if self.pool.own_servers:
            self._do(self._forget("it is tried again"))

    async def _forget(self, why: str) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        for server in self.pool.servers:
            self.pool.close(server, why)

    def stop(self) -> None:
        """Close the client. Servers stay up; after a partial update they generate with mixed weights."""
        if self._loop is None:
            return
        loading_servers = [server for server in self.pool.own_servers if server.loading]
        self._do(self._forget("the run has ended"))
        for server, path in itertools.product(
            loading_servers, ("/end_weight_update", "/continue_generation")
        ):
            with suppress(Unanswered):
                self._do(self.pool.ask(server, path, self.pool.question, type(None), {}))
        self._do(self.pool.session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None
        self._outstanding.clear()
        self._has_weights = False

    def take_notes(self) -> list[str]:
        notes, self.pool.notes = self.pool.notes, []
        return notes

    def begin_update(self) -> None:
        self.refuse_after_failure()
        self._has_weights = False
        if self.pool.own_servers:
            self._do(self.pool.begin_update())

    @property
    def has_sessions(self) -> bool:
        return self.pool.has_sessions

    @has_sessions.setter
    def has_sessions(self, has_sessions: bool) -> None:
        self.pool.has_sessions = has_sessions

    @property
    def updating_servers(self) -> Sequence[Server]:
        return self.pool.updating_servers

    def update_options(self, version: int | None) -> dict[str, Any]:
        return self.pool.update_options(version)

    @property
    def run_name(self) -> str:
        return f"megarl-{self.pool.run}"

    def name_version(self, version: int) -> str:
        return self.pool.name_version(version)

    def post(self, path: str, body_by_url: Mapping[str, Mapping[str, Any]]) -> dict[str, Future[None]]:
        """See ServersEngine."""
        assert self._loop is not None
        encoded = {id(body): json.dumps(body).encode() for body in body_by_url.values()}
        return {
            server.url: asyncio.run_coroutine_threadsafe(
                self.pool.command(server, path, self.pool.limit, encoded[id(body_by_url[server.url])]),
                self._loop,
            )
            for server in self.pool.own_servers
            if server.url in body_by_url
        }

    def leave_out(self, url: str, why: str) -> None:
        async def leave_out() -> None:
            for server in self.pool.own_servers:
                if server.url == url:
                    self.pool.leave_out(server, why)

        self._do(leave_out())

    def read_checksums(self, skip: Sequence[str]) -> dict[str, list[dict[str, str]]]:
        """Read checksums from updating servers. Those that do not answer are left out."""
        return self._do(self.pool.read_checksums(skip)) if self.updating_servers else {}

    def end_update(self, version: int) -> None:
        self.weight_version = version  # first, as answers may come at once
        if self.pool.own_servers:
            self._do(self.pool.end_update(version))
        self._has_weights = True
        lost = {number: one for number, one in self._outstanding.items() if number not in self._tasks}
        self._send(lost)  # by a restart

    def _send(self, requests: Mapping[int, tuple[GenerationRequest, SamplingParams]]) -> None:
        async def begin() -> None:
            for number, (request, params) in requests.items():
                task = asyncio.get_running_loop().create_task(self._generate(request, params))
                self._tasks[number] = task
                task.add_done_callback(lambda task, number=number: self._ended.put((number, task)))  # type: ignore[misc]

        if requests:
            self._do(begin())

    async def _generate(self, request: GenerationRequest, params: SamplingParams) -> TokenData:
        """Try servers until one answers. Raises EngineFailure if none is left."""
        tries_by_url: Counter[str] = Counter()
        direct = self.pool.router is None
        async with self._room:
            while not self._aborting:
                server = self.pool.choose(direct=direct)
                try:
                    data = end_at_limit(await self._answer(server, request, params), request, params)
                    if data.finish_reason != "abort" or self._aborting:
                        return data
                    request = replace(request, prefix=data)  # an update has aborted it
                except (Unanswered, EngineFailure) as problem:
                    if server is self.pool.router:  # servers show the cause
                        direct = True
                        continue
                    if isinstance(problem, Unanswered) and problem.code == 400:
                        raise EngineError(f"rollout.urls: {server.url}: {problem}") from None
                    tries_by_url[server.url] += 1
                    should_retry = (
                        server.usable
                        and tries_by_url[server.url] < TRIES
                        and await self.pool.is_current(server)
                    )
                    if not should_retry:
                        self.pool.leave_out(server, str(problem))
            return structs.replace(request.prefix or TokenData(), finish_reason="abort")

    async def _answer(self, server: Server, request: GenerationRequest, params: SamplingParams) -> TokenData:
        max_new_tokens = request.left(params)
        rid = f"megarl-{self.pool.run}-{self.pool.rank}-{next(self._count)}"
        body = {
            "rid": rid,
            "input_ids": request.context,
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k or -1,
                "sampling_seed": request.seed,
                "stop": list(params.stop) or None,
                "stop_token_ids": list(self.eos_ids),
            },
        }
        if params.sampling_sets:
            body["return_sampling_mask"] = True
        if self.pause_mode == "in_place":  # else prefixes of older weights would match
            body["cache_salt"] = self.pool.version_name
        assert server.gone is not None
        oldest, limit = self.weight_version, self.pool.limit + TOKEN * max_new_tokens
        answer_future = asyncio.ensure_future(self.pool.ask(server, "/generate", limit, Generated, body))
        server.running.add(rid)
        try:
            futures: set[asyncio.Future[Any]] = {answer_future, server.gone}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not answer_future.done():
                raise Unanswered(server.gone.result())
            response = answer_future.result()
        finally:
            answer_future.cancel()
            server.running.discard(rid)
        meta = response.meta_info
        logprobs, sets = [entry[0] for entry in meta.output_token_logprobs], None
        if params.sampling_sets:
            logprobs, sets = meta.output_token_sampling_logprobs, meta.output_token_sampling_mask
        finish = str(meta.finish_reason.get("type"))
        is_updating = self.pause_mode == "abort" and (server.loading or server not in self.pool.own_servers)
        if finish == "abort" and not self._aborting and not is_updating:
            raise Unanswered(f"/generate was aborted there: {meta.finish_reason.get('message')}")
        tokens = response.output_ids
        versions = [(span.version, span.end) for span in meta.weight_versions]
        answer = tokens, logprobs, finish, versions or meta.weight_version, None, sets, (0, 0)
        return self._token_data(request, answer, params, names=self.pool.name_version(""), oldest=oldest)

    def poll(self, seconds: float) -> list[tuple[int, TokenData]]:
        """See RolloutEngine. Raises EngineError if a server refuses a request."""
        responses, deadline = list[tuple[int, TokenData]](), time.monotonic() + seconds
        while self._outstanding and self._failure is None:
            try:
                number, task = self._ended.get(
                    timeout=0 if responses else max(0.0, deadline - time.monotonic())
                )
            except queue.Empty:
                break
            if self._tasks.get(number) is not task or task.cancelled():
                continue
            if isinstance(error := task.exception(), EngineFailure):
                self._failure = error  # the next call raises it
            elif error is not None:
                raise error
            else:
                responses.append((number, task.result()))
                del self._tasks[number], self._outstanding[number]
        if not responses:
            self.refuse_after_failure()
        return responses

    def abort(self) -> list[tuple[int, TokenData]]:
        """See RolloutEngine. A request that no server returns in time keeps its prefix."""
        if not self._outstanding:
            return []
        self._do(self._abort())
        responses = []
        for number, (request, _) in self._outstanding.items():
            task = self._tasks.pop(number, None)
            has_result = task is not None and not task.cancelled() and task.exception() is None
            partial_data = structs.replace(request.prefix or TokenData(), finish_reason="abort")
            responses.append((number, task.result() if has_result and task is not None else partial_data))
        self._outstanding.clear()
        return responses

    async def _abort(self) -> None:
        self._aborting, deadline = True, time.monotonic() + self.pool.limit

        async def abort(server: Server, rid: str) -> None:
            with suppress(Unanswered):  # the awaited request shows the cause
                await self.pool.ask(server, "/abort_request", self.pool.question, type(None), {"rid": rid})

        try:
            while pending_tasks := [task for task in self._tasks.values() if not task.done()]:
                if time.monotonic() > deadline:
                    for task in pending_tasks:
                        task.cancel()
                    await asyncio.wait(pending_tasks)
                    break
                calls = [(server, rid) for server in self.pool.servers for rid in server.running]
                if self.pool.router:  # it does not forward aborts
                    routed_servers = [server for server in self.pool.servers if server.usable]
                    calls += [(server, rid) for server in routed_servers for rid in self.pool.router.running]
                await gather(abort(server, rid) for server, rid in calls if server is not self.pool.router)
                await asyncio.wait(pending_tasks, timeout=0.5)
        finally:
            self._aborting = False
