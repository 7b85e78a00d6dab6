"""The servers of one client (sglang_servers.py), and which of them gets the next request.

All coroutines run on the client's thread."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.config.errors import ConfigError, EngineFailure
from megarl.config.schema import Config
from megarl.rollout.engines.sglang_http import (
    QUESTION,
    Done,
    ModelInfo,
    Unanswered,
    call,
    gather,
    identify,
)

if TYPE_CHECKING:
    import aiohttp

PULSE = 5.0  # seconds between signs of life of a server that generates
T = TypeVar("T")


class Server:
    """A server as one client sees it.

    loading  this client is sending it weights
    running  ids of its unfinished requests
    why      reason for which it was left out
    gone     resolves, with the reason, when it is no longer usable
    """

    def __init__(self, url: str) -> None:
        self.url, self.tp, self.why = url, 1, ""
        self.loading = False
        self.running: set[str] = set()
        self.gone: asyncio.Future[str] | None = None
        self.watch: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """Return whether it has the present weights and gets requests."""
        return self.gone is not None and not self.gone.done()


class ServerPool:
    """The servers at `rollout.urls` as one client uses them.

    own           those that this client supplies with weights
    others        those of other clients
    router        in front of all, if there is one
    notes         lines for the user about servers that were left out or are back
    version_name  of the present weights, as servers report it
    limit         seconds for a call that takes long; question: for one that is answered at once
    session       of the client's calls, from its start on

    rank, ranks  number of this rank among those with engines, and how many there are
    """

    session: aiohttp.ClientSession

    def __init__(self, config: Config, hf_config: Mapping[str, Any], rank: int, ranks: int) -> None:
        self.config, self.hf_config = config, hf_config
        rollout, tp = config.rollout, config.rollout.engine_tp
        mine = set(rollout.urls[rank // tp :: ranks // tp]) if rank % tp == 0 else set[str]()
        servers = [Server(url) for url in rollout.urls] if mine else []
        self.own = [server for server in servers if server.url in mine]
        self.others = [server for server in servers if server.url not in mine]
        self.router = Server(rollout.router) if rollout.router and mine else None
        # Another run may replace the servers' weights too: versions carry a hash of this run's folder.
        self.run = hashlib.sha256(str(config.run_dir.absolute()).encode()).hexdigest()[:8]
        self.limit, self.question = rollout.engine_timeout, min(QUESTION, rollout.engine_timeout)
        self.version_name = ""
        self.notes: list[str] = []

    @property
    def servers(self) -> Sequence[Server]:
        """Return all servers, the router last."""
        return (*self.own, *self.others, *([self.router] if self.router else ()))

    async def ask(self, server: Server, path: str, limit: float, kind: type[T], body: Any = None) -> T:
        """Make a call of a server, see `call`."""
        return await call(self.session, server.url + path, limit, kind, body)

    async def command(self, server: Server, path: str, limit: float, body: Any) -> None:
        """Make a call that a server answers with its success. Raises Unanswered if it failed."""
        done = await self.ask(server, path, limit, Done, body)
        if not done.success:
            raise Unanswered(f"{path}: {done.message}")

    async def problem(self, server: Server) -> str | None:
        """Return why a server is not there; None if it is."""
        try:
            await self.ask(server, "/model_info", self.question, ModelInfo)
        except Unanswered as problem:
            return f"{server.url}: {problem}"
        return None

    async def is_current(self, server: Server) -> bool:
        """Return whether a server is there and has the present weights."""
        try:
            info = await self.ask(server, "/model_info", self.question, ModelInfo)
        except Unanswered:
            return False
        return info.weight_version == self.version_name

    def choose(self, *, direct: bool) -> Server:
        """Return the server for the next request: the router, or the one with the fewest requests.

        Raises EngineFailure if no server is left."""
        if not direct and self.router and self.router.usable:
            return self.router
        for servers in (self.own, self.others):
            if usable := [server for server in servers if server.usable]:
                return min(usable, key=lambda server: len(server.running))
        raise EngineFailure(f"rollout.urls: none of {len(self.config.rollout.urls)} servers is left")

    def open(self, server: Server) -> None:
        """Take a server that has the present weights."""
        server.loading, server.why = False, ""
        server.gone = asyncio.get_running_loop().create_future()
        server.watch = asyncio.get_running_loop().create_task(self._watch(server))

    def close(self, server: Server, why: str) -> None:
        """Stop using a server. Its requests are sent to other servers."""
        server.loading = False
        if server.watch is not None:
            server.watch.cancel()
        if server.gone is not None and not server.gone.done():
            server.gone.set_result(why)

    def leave_out(self, server: Server, why: str) -> None:
        """Close a server, and note why unless that is known."""
        if server.usable or (server.loading and why != server.why):
            self.notes.append(f"rollout server {server.url} is left out: {why}")
        server.why = why
        self.close(server, why)

    async def _watch(self, server: Server) -> None:
        """Leave a server out that has work, and for `engine_timeout` seconds no sign of life."""
        path, heard = "/health" if server is self.router else "/health_generate", time.monotonic()
        while True:
            await asyncio.sleep(PULSE)
            if server.running:
                try:
                    await self.ask(server, path, self.question, type(None))
                except Unanswered as problem:
                    if time.monotonic() - heard < self.limit:
                        continue
                    server.watch = None  # or it would cancel itself
                    self.leave_out(server, f"no sign of life for {self.limit:g} s: {problem}")
                    return
            heard = time.monotonic()

    # Weights

    async def begin_update(self, server: Server) -> None:
        """Prepare a server for new weights; leave it out if it does not answer."""
        limit, server.loading = self.limit, True
        # One that somebody has started anew meanwhile may be another model's.
        known = server.usable and await self.is_current(server)
        try:
            if not known:
                server.tp = (await identify(self.session, server.url, self.config, self.hf_config)).tp_size
            # What somebody else may ask is ended, or waits: nothing is answered by half of the weights.
            await self.ask(server, "/pause_generation", limit, type(None), {"mode": "abort"})
            try:
                await self.command(server, "/begin_weight_update", limit, {})
            except Unanswered as problem:
                if "already open" not in str(problem):
                    raise
                # Of a client that was killed in the middle.
                await self.command(server, "/end_weight_update", limit, {})
                await self.command(server, "/begin_weight_update", limit, {})
        except (Unanswered, ConfigError) as problem:
            self.leave_out(server, str(problem))
            return
        if not known and (server.usable or server.why):
            self.notes.append(f"rollout server {server.url} is back, and gets the weights")

    async def post_weights(self, payload: str, version: int | None) -> None:
        """Send a bucket to all servers that are loading, see HttpBackend."""
        loading = [server for server in self.own if server.loading]
        name = None if version is None else self.name_version(version)
        names = {"flush_cache": name is not None, "weight_version": name}
        bodies = {
            tp: json.dumps({"serialized_named_tensors": [payload] * tp, **names}).encode()
            for tp in {server.tp for server in loading}
        }

        async def send(server: Server) -> None:
            try:
                await self.command(server, "/update_weights_from_tensor", self.limit, bodies[server.tp])
            except Unanswered as problem:
                self.leave_out(server, str(problem))

        await gather(send(server) for server in loading)

    def name_version(self, version: int) -> str:
        """Return the name of a version of the weights, as servers report it."""
        return f"megarl-{self.run}-{version}"

    async def end_update(self, version: int) -> None:
        """Take the servers that have all of the weights. Raises EngineFailure where none has them."""
        self.version_name = self.name_version(version)
        await gather(self._finish(server) for server in self.own if server.loading)
        # Those of other clients have got theirs by now, or are found out by their first answer.
        for server in (*self.others, *([self.router] if self.router else ())):
            self.close(server, "it has new weights")
            self.open(server)
        self.choose(direct=True)

    async def _finish(self, server: Server) -> None:
        try:
            await self.command(server, "/end_weight_update", self.limit, {})
            await self.ask(server, "/continue_generation", self.question, type(None), {})
            if not await self.is_current(server):
                raise Unanswered(f"its weights are not of version {self.version_name}")
        except Unanswered as problem:
            self.leave_out(server, str(problem))
            return
        self.close(server, "it has new weights")
        self.open(server)
