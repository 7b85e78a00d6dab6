"""An environment at a server that speaks OpenEnv's messages, in a pool's process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest
from aiohttp import web

from megarl.agents.tools import Answer, Result, ToolPool, import_environment
from megarl.config.errors import ConfigError
from megarl.rewards.verdict import Verdict

PATH = "megarl_tasks.openenv:OpenEnvironment"


class Server:
    """Says back what it is told, as the server of openenv-core 0.3.0 does; "right" is rewarded and ends.

    open: its sessions; ponged: whether a client has answered a ping that came between two questions"""

    def __init__(self) -> None:
        self.open, self.asked = 0, list[dict[str, Any]]()
        self.ponged = asyncio.Event()

    async def session(self, request: Any) -> Any:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        self.open += 1
        try:
            async for message in socket:
                if message.type == web.WSMsgType.PONG:
                    self.ponged.set()
                    continue
                told = json.loads(message.data)
                self.asked.append(told)
                if told["type"] == "close" or told["data"].get("message") == "close":
                    break
                if told["data"].get("message") == "slow":
                    await asyncio.sleep(0.5)
                if (answer := self.answer(told["type"], told["data"])) is not None:
                    await socket.send_json(answer)
                    await socket.ping()
        finally:
            self.open -= 1
            await socket.close()
        return socket

    def answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any] | None:
        text = f"seed {data['seed']}" if kind == "reset" else data.get("message")
        if text == "hang":
            return None
        if text == "raise":
            return {"type": "error", "data": {"message": "no such file", "code": "EXECUTION_ERROR"}}
        if not isinstance(text, str):
            errors = [{"loc": ["message"], "msg": "Field required"}]
            invalid = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
            return {"type": "error", "data": invalid}
        right = text == "right"
        seen = {"said": text, "size": len(text)}
        reward = None if kind == "reset" else 0.75 if right else 0.25
        return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": right}}


def play(job: Callable[[Server, ToolPool], Awaitable[Any]], **arguments: Any) -> Any:
    """Do something with a server and a pool of one process."""

    async def whole() -> Any:
        server, app = Server(), web.Application()
        app.router.add_get("/ws", server.session)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        given = {"url": "http://{}:{}/".format(*runner.addresses[0][:2]), **arguments}
        pool = ToolPool(workers=1, seconds=60.0, environment=PATH, arguments=given, sandbox="network")
        try:
            return await job(server, pool)
        finally:
            pool.close()
            await runner.cleanup()

    return asyncio.run(whole())


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.01)


def test_an_episode() -> None:
    """A session each, which ends with its verdict; pings are answered while the policy writes."""

    async def job(server: Server, pool: ToolPool) -> tuple[list[Any], Verdict]:
        row = {"reset": {"task": 3}}
        steps = [await pool.step(1, row, 2**40 + 7, [])]
        async with asyncio.timeout(60):
            await server.ponged.wait()
        other = await pool.step(2, {"reset": None}, 5, [])  # as parquet has it where another row has one
        assert server.open == 2 and other.value and other.value.observation == "seed 5"
        steps += [await pool.step(1, row, 2**40 + 7, ["one", "right"][:n]) for n in (1, 2)]
        verdict = await pool.verdict(1, row, 2**40 + 7, ["one", "right"])
        await until(lambda: server.open == 1)
        kinds = [told["type"] for told in server.asked]
        assert kinds == ["reset", "reset", "step", "step", "close"]
        assert server.asked[0]["data"] == {"seed": 7, "task": 3}
        return [step.value for step in steps], verdict

    steps, verdict = play(job, observation="said")
    assert steps == [Answer("seed 7", 0.0, False), Answer("one", 0.0, False), Answer("right", 0.0, True)]
    assert verdict == Verdict(True, score=1.0)
    steps, verdict = play(job, observation="said", turn_rewards=True)
    assert [step.reward for step in steps] == [0.0, 0.25, 0.75] and verdict.score == 1.0


def test_actions_that_the_policy_writes() -> None:
    """As JSON; what is none, or none to the server, is told to the policy, and the episode goes on."""

    async def job(server: Server, pool: ToolPool) -> tuple[list[Any], Verdict]:
        said = ['{"message": "right"', "[1]", '{"text": "right"}', '{"message": "right"}']
        steps = [await pool.step(1, {}, 7, said[:n]) for n in range(1, 5)]
        assert [told["data"] for told in server.asked[1:]] == [{"text": "right"}, {"message": "right"}]
        return [step.value for step in steps], await pool.verdict(1, {}, 7, said)

    (broken, none, invalid, right), verdict = play(job, action="")
    assert broken.observation.startswith("error: this is not JSON: ") and not broken.done
    assert none.observation == "error: an action is a JSON object"
    assert invalid.observation == "error: Invalid message; message: Field required" and not invalid.done
    assert right == Answer('{"said": "right", "size": 5}', 0.0, True) and verdict.score == 0.75


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("close", "ConnectionError: http://{} has closed the connection"),
        pytest.param("hang", "TimeoutError: http://{} has not answered within 8 s", marks=pytest.mark.slow),
        ("raise", "RuntimeError: http://{}: EXECUTION_ERROR: no such file"),
    ],
)
def test_a_server_that_fails_in_the_middle(said: str, why: str) -> None:
    """The response is ungraded. Other episodes and the process continue."""

    async def job(server: Server, pool: ToolPool) -> Result[Answer]:
        before = await pool.step(2, {}, 1, ["one"])
        assert (await pool.step(1, {}, 7, ["one"])).error is None
        pids = pool.pids
        failed = await pool.step(1, {}, 7, ["one", said])
        assert (await pool.step(2, {}, 1, ["one"])) == before and pool.pids == pids
        if said != "hang":
            assert not (await pool.verdict(1, {}, 7, ["one", said])).graded
        await until(lambda: server.open == 1)
        return failed

    failed = play(job, seconds=8.0 if said == "hang" else 20.0)
    begin, end = why.split("http://{}")
    assert failed.error and not failed.graded
    assert failed.error.startswith(f"{PATH}: {begin}http://127.0.0.1:") and failed.error.endswith(end)


def test_sessions_that_nobody_goes_on_with() -> None:
    """They end, also where the process is starting, or at a step, when the episode is aborted."""

    async def job(server: Server, pool: ToolPool) -> None:
        async def aborted(key: int, said: list[str]) -> None:
            asked, task = len(server.asked), asyncio.create_task(pool.step(key, {}, 7, said))
            await until(
                lambda: (
                    bool(psutil.Process().children()) if not asked else len(server.asked) > asked + len(said)
                )
            )
            task.cancel()
            pool.forget(key)

        await aborted(1, [])
        await pool.step(2, {}, 7, ["one"])
        await pool.step(3, {}, 7, [])
        assert server.open == 2
        pool.forget(2)
        await until(lambda: server.open == 1)
        await aborted(4, ["slow"])
        assert (await pool.step(3, {}, 7, ["one"])).value
        await until(lambda: server.open == 1)
        assert [told["type"] for told in server.asked].count("reset") == 3

    play(job)


def test_a_server_that_is_not_there() -> None:
    async def job(_: Server, pool: ToolPool) -> Result[Answer]:
        return await pool.step(1, {}, 7, [])

    failed = play(job, url="http://127.0.0.1:9")
    assert failed.error and "127.0.0.1:9" in failed.error and not failed.graded
    missing = play(job, observation="text")
    assert missing.error and "there is no 'text' (there is: said, size)" in missing.error
    assert not missing.graded


def test_the_extra_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megarl_tasks.openenv", raising=False)
    assert import_environment(PATH, {"url": "http://127.0.0.1:9"}).__name__ == "OpenEnvironment"
    with pytest.raises(ConfigError, match=r"^rollout\.environment_arguments: .* missing a required .*'url'"):
        import_environment(PATH, {})
    monkeypatch.delitem(sys.modules, "megarl_tasks.openenv")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ConfigError, match=r"it needs aiohttp \(pip install 'megarl\[agents\]'\)"):
        import_environment(PATH)
