"""Another user of the machine can connect to the endpoint on loopback, and gets nothing there."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from megarl.agents import endpoint as endpoints
from megarl.agents.endpoint import Endpoint
from tests.agents.test_endpoint import policy_of, user


@pytest.fixture
def few_files() -> Iterator[None]:
    """A process may have 1,024 files, as most systems have it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def ask(url: str, key: str) -> int:
    headers, body = {"Authorization": f"Bearer {key}"}, {"messages": user("one")}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{url}/chat/completions", json=body) as answer,
    ):
        return answer.status


def attacked(attack: Any, turns: int = 1) -> tuple[Endpoint, Any]:
    """Return the endpoint, and what `attack(endpoint, url, key)` returns in place of an agent."""
    policy = policy_of(["an"] * turns)

    async def running() -> Any:
        endpoint = Endpoint(policy.tokenizer, 60.0)

        async def agent(base_url: str, api_key: str, row: Any) -> Any:
            return await attack(endpoint, base_url, api_key)

        try:
            return endpoint, await endpoint.episode(agent)(policy.prompt, policy)
        finally:
            await endpoint.close()

    return asyncio.run(running())


def place(url: str) -> tuple[str, int]:
    host, port = url.split("/")[2].split(":")
    return host, int(port)


@pytest.mark.parametrize("sent", [b"", b"POST /s/x/v1/chat/completions HTTP/1.1\r\nHost: x\r\nX: "])
def test_half_open_connections(few_files: None, sent: bytes) -> None:
    """Of 300 the oldest are closed: there is room for the agent, and there are files for the run."""

    async def attack(endpoint: Endpoint, url: str, key: str) -> tuple[int, int]:
        held = []
        for _ in range(300):
            held.append(socket.create_connection(place(url), timeout=5))
            held[-1].sendall(sent)
            held[-1].setblocking(False)
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        still_open = sum(map(is_open, held))
        status = await ask(url, key)
        for one in held:
            one.close()
        return still_open, status

    _, (still_open, status) = attacked(attack)
    assert still_open <= 256 and status == 200


def is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_UNAUTHENTICATED_SECONDS", 0.3)

    async def attack(endpoint: Endpoint, url: str, key: str) -> tuple[float, list[int]]:
        reader, writer = await asyncio.open_connection(*place(url))
        began = time.monotonic()
        writer.write(b"POST / HTTP/1.1\r\nHost: ")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 10)
        lasted = time.monotonic() - began
        writer.close()
        # One connection for two requests of the agent's: it lasts longer than a stranger's.
        statuses = []
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:
            body = {"messages": user("one")}
            for _ in range(2):
                async with client.post(f"{url}/chat/completions", json=body) as answer:
                    message = (await answer.json())["choices"][0]["message"]
                    statuses.append(answer.status)
                body = {"messages": [*body["messages"], message, *user("two")]}
                await asyncio.sleep(0.6)
        return lasted, statuses

    _, (lasted, statuses) = attacked(attack, turns=2)
    assert 0.2 < lasted < 5 and statuses == [200, 200]


def test_nobody_is_served_without_the_key() -> None:
    async def attack(endpoint: Endpoint, url: str, key: str) -> list[int]:
        base = url.rpartition("/s/")[0]
        guesses = [await ask(f"{base}/s/{guess}/v1", guess) for guess in ("", "x", "..", key[:-1])]
        guesses += [await ask(url, guess) for guess in ("", "x", key[:-1], key.swapcase())]
        assert len(key) >= 32 and place(url)[0] == "127.0.0.1"
        assert not endpoint.sessions[key].history
        return guesses

    _, statuses = attacked(attack, turns=0)
    assert statuses == [404] * 4 + [401] * 4


def test_a_large_request_is_refused() -> None:
    async def attack(endpoint: Endpoint, url: str, key: str) -> tuple[int, int]:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:
            async with client.post(f"{url}/chat/completions", data=b"[" * (5 << 20)) as answer:
                large = answer.status
            async with client.post(f"{url}/chat/completions", data=b"[" * (1 << 20)) as answer:
                return large, answer.status

    assert attacked(attack, turns=0)[1] == (413, 400)
