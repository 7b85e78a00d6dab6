"""The SGLang servers of one client. All coroutines run on the client's thread (sglang_servers.py)."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.config.errors import ConfigError, EngineFailure
from megarl.config.schema import Config
from megarl.rollout.engines.sglang_http import (
    PAUSE_MODES,
    QUESTION,
    Checksums,
    Done,
    ModelInfo,
    Unanswered,
    call,
    gather,
    identify,
)

if TYPE_CHECKING:
    import aiohttp

PULSE = 5.0  # seconds between health checks
T = TypeVar("T")


class Server:
    """A server's state. `why`: the reason why it was last left out, or ""; `loading`: an update is open."""

    def __init__(self, url: str) -> None:
        self.url, self.tp = url, 1
        self.why = ""
        self.loading = False
        self.is_known = False  # has run, with its weights, since the last update
        self.running: set[str] = set()
        self.gone: asyncio.Future[str] | None = None  # why it became unusable
        self.watch: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """Return whether it takes requests."""
        return self.gone is not None and not self.gone.done()


class ServerPool:
    """A client's servers.

    own_servers    servers that this client updates
    other_servers  servers that other clients update; used if own servers are unusable
    limit          timeout of a slow call, seconds
    question       timeout of a quick call, seconds
    run, start     names of the run and of this start of it
    pause_mode     how an update pauses running requests (PAUSE_MODES)
    """

    session: aiohttp.ClientSession  # set by the client's start

    def __init__(
        self, config: Config, hf_config: Mapping[str, Any], rank: int, ranks: int, start: str
    ) -> None:
        self.config, self.hf_config, self.rank = config, hf_config, rank
        rollout, tp = config.rollout, config.rollout.engine_tp
        own_urls = set(rollout.urls[rank // tp :: ranks // tp]) if rank % tp == 0 else set[str]()
        servers = [Server(url) for url in rollout.urls] if own_urls else []
        self.own_servers = [server for server in servers if server.url in own_urls]
        self.other_servers = [server for server in servers if server.url not in own_urls]
        self.router = Server(rollout.router) if rollout.router and own_urls else None
        self.run = hashlib.sha256(str(config.run_dir.absolute()).encode()).hexdigest()[:8]
        self.start = start
        self.pause_mode = PAUSE_MODES[config.schedule.in_flight]
        self.limit, self.question = rollout.engine_timeout, min(QUESTION, rollout.engine_timeout)
        self.version_name = ""  # of the present weights
        self.notes: list[str] = []
        self.has_sessions = True  # updates open a session; the weight backend decides

    @property
    def servers(self) -> Sequence[Server]:
        return (*self.own_servers, *self.other_servers, *([self.router] if self.router else ()))

    async def ask(self, server: Server, path: str, limit: float, kind: type[T], body: Any = None) -> T:
        return await call(self.session, server.url + path, limit, kind, body)

    async def command(self, server: Server, path: str, limit: float, body: Any) -> None:
        result = await self.ask(server, path, limit, Done, body)
        if not result.success:
            raise Unanswered(f"{path}: {result.message}")

    async def problem(self, server: Server) -> str | None:
        """Return the reason why a server does not answer; None if it answers."""
        try:
            await self.ask(server, "/model_info", self.question, ModelInfo)
        except Unanswered as problem:
            return f"{server.url}: {problem}"
        return None

    async def is_current(self, server: Server) -> bool:
        try:
            info = await self.ask(server, "/model_info", self.question, ModelInfo)
        except Unanswered:
            return False
        return info.weight_version == self.version_name

    def choose(self, *, direct: bool) -> Server:
        """Return the router or the least busy server. Raises EngineFailure without any."""
        if not direct and self.router and self.router.usable:
            return self.router
        for servers in (self.own_servers, self.other_servers):
            if usable_servers := [server for server in servers if server.usable]:
                return min(usable_servers, key=lambda server: len(server.running))
        raise EngineFailure(f"rollout.urls: none of {len(self.config.rollout.urls)} servers is left")

    def open(self, server: Server) -> None:
        server.loading, server.why = False, ""
        server.gone = asyncio.get_running_loop().create_future()
        server.watch = asyncio.get_running_loop().create_task(self._watch(server))

    def close(self, server: Server, why: str) -> None:
        server.loading = False
        if server.watch is not None:
            server.watch.cancel()
        if server.gone is not None and not server.gone.done():
            server.gone.set_result(why)

    def leave_out(self, server: Server, why: str) -> None:
        if server.usable or (server.loading and why != server.why):
            self.notes.append(f"rollout server {server.url} is left out: {why}")
        server.why = why
        self.close(server, why)

    async def _watch(self, server: Server) -> None:
        """Leave the server out if it has requests and answers no health check for `engine_timeout`."""
        path, last_heard = "/health" if server is self.router else "/health_generate", time.monotonic()
        while True:
            await asyncio.sleep(PULSE)
            if server.running and not server.loading:  # a paused server generates nothing
                try:
                    await self.ask(server, path, self.question, type(None))
                except Unanswered as problem:
                    if time.monotonic() - last_heard < self.limit:
                        continue
                    server.watch = None  # else `close` would cancel this task
                    self.leave_out(server, f"no sign of life for {self.limit:g} s: {problem}")
                    return
            last_heard = time.monotonic()

    async def begin_update(self) -> None:
        """Begin an update of this client's servers. None is paused while another is awaited."""
        await gather(self._identify(server) for server in self.own_servers)
        await gather(self._pause(server) for server in self.updating_servers)

    async def _identify(self, server: Server) -> None:
        server.loading = True
        # A restarted server may have another model.
        server.is_known = server.usable and await self.is_current(server)
        try:
            if not server.is_known:
                server.tp = (await identify(self.session, server.url, self.config, self.hf_config)).tp_size
        except (Unanswered, ConfigError) as problem:
            self.leave_out(server, str(problem))

    async def _pause(self, server: Server) -> None:
        """Pause a server, as no request may be answered by partly updated weights."""
        mode = self.pause_mode if server.is_known and self.pause_mode else "abort"
        # Also a server that fails within a bucket must not answer under the old version.
        body = {"new_version": self.name_version("updating"), "abort_all_requests": False}
        try:
            await self.ask(server, "/pause_generation", self.limit, type(None), {"mode": mode})
            await self.command(server, "/update_weight_version", self.limit, body)
            if self.has_sessions:
                await self._open_session(server)
        except Unanswered as problem:
            self.leave_out(server, str(problem))
            return
        if not server.is_known and (server.usable or server.why):
            self.notes.append(f"rollout server {server.url} is back, and gets the weights")

    async def _open_session(self, server: Server) -> None:
        try:
            await self.command(server, "/begin_weight_update", self.limit, {})
        except Unanswered as problem:
            if "already open" not in str(problem):
                raise
            # A killed client left its session open.
            await self.command(server, "/end_weight_update", self.limit, {})
            await self.command(server, "/begin_weight_update", self.limit, {})

    @property
    def updating_servers(self) -> list[Server]:
        return [server for server in self.own_servers if server.loading]

    def update_options(self, version: int | None) -> dict[str, Any]:
        """Return the options of a bucket. version: only with the update's last bucket"""
        # A flush needs a server without running requests.
        is_flushed = version is not None and self.pause_mode != "in_place"
        name = None if version is None else self.name_version(version)
        return {"flush_cache": is_flushed, "weight_version": name}

    async def read_checksums(self, skip: Sequence[str]) -> dict[str, list[dict[str, str]]]:
        checksums_by_url: dict[str, list[dict[str, str]]] = {}

        async def read(server: Server) -> None:
            body = {"action": "checksum", "selector": "target", "skip_tensor_list": list(skip)}
            try:
                answer = await self.ask(server, "/weights_checker", self.limit, Checksums, body)
                checksums_by_url[server.url] = [rank.checksums for rank in answer.ranks]
            except Unanswered as problem:
                self.leave_out(server, str(problem))

        await gather(read(server) for server in self.updating_servers)
        return checksums_by_url

    def name_version(self, version: int | str) -> str:
        """Return a name that only this start of this run gives: others may replace the weights."""
        return f"megarl-{self.run}-{self.start}-{version}"

    async def end_update(self, version: int) -> None:
        """Finish the update, and open the servers that have all weights. Raises EngineFailure if none has."""
        self.version_name = self.name_version(version)
        await gather(self._finish(server) for server in self.own_servers if server.loading)
        # Other clients update these at the same time. The version in each answer shows whether they did.
        for server in (*self.other_servers, *([self.router] if self.router else ())):
            self._reopen(server)
        self.choose(direct=True)

    def _reopen(self, server: Server) -> None:
        """Let a server take requests. With weights in flight its running ones continue."""
        if server.usable and self.pause_mode is not None:
            server.loading, server.why = False, ""
            return
        self.close(server, "it has new weights")
        self.open(server)

    async def _finish(self, server: Server) -> None:
        try:
            if self.has_sessions:
                await self.command(server, "/end_weight_update", self.limit, {})
            await self.ask(server, "/continue_generation", self.question, type(None), {})
            if not await self.is_current(server):
                raise Unanswered(f"its weights are not of version {self.version_name}")
        except Unanswered as problem:
            self.leave_out(server, str(problem))
            return
        self._reopen(server)
