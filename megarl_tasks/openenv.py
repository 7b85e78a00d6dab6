"""Environments of OpenEnv servers: megarl_tasks.openenv:OpenEnvironment (docs/episodes.md).

Speaks the protocol of openenv-core 0.3 itself, whose requirements conflict with megarl's."""

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
except ImportError as error:  # reported before the run
    raise ImportError("it needs aiohttp (pip install 'megarl[agents]')") from error


class OpenEnvironment:
    """A server's environment. Raises if the server fails.

    url           http://host:port
    action        field for the policy's text; "": the policy writes JSON
    observation   field to show; "": all, as JSON
    turn_rewards  credit rewards to turns; otherwise only their sum counts, as score
    seconds       time limit per answer; a timeout is not the policy's fault"""

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
        self.server.close()

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Start with the seed modulo 2^32 and the row's `reset` as arguments."""
        data = {"seed": seed % 2**32, **(row.get("reset") or {})}
        return self._observation(self.server.ask({"type": "reset", "data": data}))

    def step(self, text: str) -> tuple[str, float, bool]:
        """Act. A refused action gives an observation `error: ...`."""
        data: Any = {self.action: text}
        if not self.action:
            try:
                data = json.loads(text)
            except (ValueError, RecursionError) as error:
                return f"error: this is not JSON: {error}", 0.0, False
            if not isinstance(data, dict):
                return "error: an action is a JSON object", 0.0, False
        try:
            answer = self.server.ask({"type": "step", "data": data})
        except InvalidAction as error:
            return f"error: {error}", 0.0, False
        reward = float(answer.get("reward") or 0.0)
        self.total += reward
        return self._observation(answer), reward if self.turn_rewards else 0.0, bool(answer.get("done"))

    def verdict(self) -> Verdict:
        """Grade by the sum of rewards."""
        return Verdict(self.total >= 1, score=self.total)

    def _observation(self, answer: dict[str, Any]) -> str:
        fields = answer["observation"]
        if not self.observation:
            return json.dumps(fields, ensure_ascii=False)
        if self.observation not in fields:
            raise KeyError(f"observation: there is no {self.observation!r} (there is: {', '.join(fields)})")
        value = fields[self.observation]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class InvalidAction(Exception):
    """The server refused an action."""


class _Server:
    """A session. All share a thread's event loop, which answers pings between requests."""

    def __init__(self, url: str, seconds: float) -> None:
        self.url, self.seconds = url.rstrip("/"), seconds
        self._session: ClientSession | None = None
        self._socket: ClientWebSocketResponse | None = None
        self._answers: asyncio.Queue[str | None] = asyncio.Queue()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer's data.

        Raises InvalidAction, ConnectionError, TimeoutError or RuntimeError."""
        return asyncio.run_coroutine_threadsafe(self._answer(message), _loop()).result()

    async def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.seconds):
                if self._socket is None:
                    await self._connect()
                assert self._socket is not None
                await self._socket.send_json(message)
                text = await self._answers.get()
        except TimeoutError:
            raise TimeoutError(f"{self.url} has not answered within {self.seconds:g} s") from None
        if text is None:
            raise ConnectionError(f"{self.url} has closed the connection")
        answer = json.loads(text)
        data: dict[str, Any] = answer["data"]
        if answer["type"] != "error":
            return data
        errors = (f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in data.get("errors", ()))
        what = "; ".join((data["message"], *errors))
        if data.get("code") == "VALIDATION_ERROR" and message["type"] == "step":
            raise InvalidAction(what)
        raise RuntimeError(f"{self.url}: {data.get('code')}: {what}")

    async def _connect(self) -> None:
        self._session = ClientSession()
        self._socket = await self._session.ws_connect(f"{self.url}/ws", max_msg_size=100 << 20)
        self._listening = asyncio.create_task(_listen(self._socket, self._answers))

    def close(self) -> None:
        if self._session is not None:
            asyncio.run_coroutine_threadsafe(_close_session(self._session, self._socket), _loop())


async def _listen(socket: ClientWebSocketResponse, answers: asyncio.Queue[str | None]) -> None:
    async for message in socket:
        answers.put_nowait(str(message.data))
    answers.put_nowait(None)


async def _close_session(session: ClientSession, socket: ClientWebSocketResponse | None) -> None:
    if socket is not None:
        with suppress(ConnectionError):
            await socket.send_json({"type": "close"})
        await socket.close()
    await session.close()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
