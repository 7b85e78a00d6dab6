"""Environments of OpenEnv servers: megarl_tasks.openenv:OpenEnvironment (docs/episodes.md).

Speaks the messages of openenv-core 0.3 over its WebSocket, by aiohttp (extra `agents`): what the package
itself needs conflicts with our pins. A connection is a session of the server's, with an environment of its
own."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from functools import cache
from typing import Any

from megarl.rewards.verdict import Verdict

try:
    from aiohttp import ClientSession, ClientWebSocketResponse
except ImportError as error:  # said before the run, when the class is looked up
    raise ImportError("it needs aiohttp (pip install 'megarl[agents]')") from error


class OpenEnvironment:
    """An environment at a server, which it may share with others.

    url          http://host:port
    action       field of the action that what the policy says is sent as; "": the policy writes the action
                 itself, as a JSON object
    observation  field of the observation that the policy is shown; "": all of it, as JSON
    turn_rewards whether a step's reward is credited to its turn. Else their sum is the verdict's score alone
    seconds      longest answer; a server that takes longer has failed, for no fault of the policy

    Raises ConnectionError, or what the server says, where it does not do its part."""

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str = "",
        turn_rewards: bool = False,
        seconds: float = 20.0,
    ) -> None:
        self.action, self.observation, self.turn_rewards = action, observation, turn_rewards
        self.server, self.total = _Server(url, seconds), 0.0

    def __del__(self) -> None:
        self.server.leave()

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Begin, with a seed below 2^32 and what the row's `reset`, if there is one, names."""
        data = {"seed": seed % 2**32, **(row.get("reset") or {})}
        return self._shown(self.server.ask({"type": "reset", "data": data}))

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return what there is to see. What the server says is no action is for the policy to read."""
        data: Any = {self.action: text}
        if not self.action:
            try:
                data = json.loads(text)
            except (ValueError, RecursionError) as error:
                return f"error: this is not JSON: {error}", 0.0, False
            if not isinstance(data, dict):
                return "error: an action is a JSON object", 0.0, False
        try:
            said = self.server.ask({"type": "step", "data": data})
        except InvalidAction as error:
            return f"error: {error}", 0.0, False
        reward = float(said.get("reward") or 0.0)
        self.total += reward
        return self._shown(said), reward if self.turn_rewards else 0.0, bool(said.get("done"))

    def verdict(self) -> Verdict:
        """Return the sum of the rewards as a score, right from 1 on."""
        return Verdict(self.total >= 1, score=self.total)

    def _shown(self, said: dict[str, Any]) -> str:
        seen = said["observation"]
        if not self.observation:
            return json.dumps(seen, ensure_ascii=False)
        if self.observation not in seen:
            raise KeyError(f"observation: there is no {self.observation!r} (there is: {', '.join(seen)})")
        value = seen[self.observation]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class InvalidAction(Exception):
    """The server says that an action is none."""


class _Server:
    """One session. Its loop, which all sessions of a process share, runs in a thread: between two questions
    the server wants its pings answered."""

    def __init__(self, url: str, seconds: float) -> None:
        self.url, self.seconds = url.rstrip("/"), seconds
        self._session: ClientSession | None = None
        self._socket: ClientWebSocketResponse | None = None
        self._said: asyncio.Queue[str | None] = asyncio.Queue()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the data of the answer to a message. Raises InvalidAction, ConnectionError, TimeoutError,
        and RuntimeError with what else the server says is wrong."""
        return asyncio.run_coroutine_threadsafe(self._answer(message), _loop()).result()

    async def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.seconds):
                if self._socket is None:
                    await self._connect()
                assert self._socket is not None
                await self._socket.send_json(message)
                text = await self._said.get()
        except TimeoutError:
            raise TimeoutError(f"{self.url} has not answered within {self.seconds:g} s") from None
        if text is None:
            raise ConnectionError(f"{self.url} has closed the connection")
        answer = json.loads(text)
        data: dict[str, Any] = answer["data"]
        if answer["type"] != "error":
            return data
        errors = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in data.get("errors", ()))
        what = "; ".join((data["message"], *errors))
        if data.get("code") == "VALIDATION_ERROR" and message["type"] == "step":
            raise InvalidAction(what)
        raise RuntimeError(f"{self.url}: {data.get('code')}: {what}")

    async def _connect(self) -> None:
        self._session = ClientSession()
        self._socket = await self._session.ws_connect(f"{self.url}/ws", max_msg_size=100 << 20)
        self._listening = asyncio.create_task(_listen(self._socket, self._said))

    def leave(self) -> None:
        """End the session, if there is one."""
        if self._session is not None:
            asyncio.run_coroutine_threadsafe(_left(self._session, self._socket), _loop())


async def _listen(socket: ClientWebSocketResponse, said: asyncio.Queue[str | None]) -> None:
    async for message in socket:
        said.put_nowait(str(message.data))
    said.put_nowait(None)


async def _left(session: ClientSession, socket: ClientWebSocketResponse | None) -> None:
    if socket is not None:
        with suppress(ConnectionError):  # it has left first
            await socket.send_json({"type": "close"})
        await socket.close()
    await session.close()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
