"""Tools of real MCP servers over pipes and HTTP: results, and servers that hang, die or are missing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.agents import mcp_tools
from megarl.agents.chat import ChatTurns, schemas, tool_calls
from megarl.agents.tools import Result, ToolPool
from megarl.config.errors import ConfigError
from tests.agents.talk import QWEN25, ScriptedPolicy, merging_tokenizer, prompt_of

SERVER = '''
import os, sys, time
from pathlib import Path
from mcp.server import MCPServer
from mcp_types import ImageContent

server = MCPServer("shop")


@server.tool()
def price(fruit: str, count: int = 1) -> int:
    """Look up a price."""
    print("what a server writes into its log", file=sys.stderr)
    return {"apple": 3, "pear": 4}[fruit] * count


@server.tool()
def misbehave(how: str, file: str = "") -> str:
    """Does what it should not."""
    if how == "refuse": raise ValueError("not for sale")
    if file:
        with open(file, "a") as out: print(os.getpid(), file=out)
    if how == "hang": time.sleep(600)
    if how == "exit": os._exit(3)
    if how == "nonsense": os.write(1, b"nonsense\\\\n")
    if how == "once" and len(Path(file).read_text().split()) == 1: os._exit(3)
    return how


@server.tool()
def large(size: int) -> str:
    """Much."""
    return "é" * size


@server.tool()
def picture() -> list:
    """A picture, and what it shows."""
    return [ImageContent(type="image", data="", mime_type="image/png"), "a pear"]


@server.tool()
def pid() -> int:
    """Its process."""
    return os.getpid()


if __name__ == "__main__":
    server.run()
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mcp") / "server of shops.py"
    path.write_text(SERVER)
    return f"mcp:{sys.executable} '{path}'"


def call(server: str, *calls: tuple[str, dict[str, Any]], **settings: Any) -> list[Result[str]]:
    """Call tools of a server one after the other in a pool of one process."""
    return call_paths(*((f"{server}#{name}", given) for name, given in calls), **settings)


def call_paths(*calls: tuple[str, dict[str, Any]], **settings: Any) -> list[Result[str]]:
    """Call tools one after the other in a pool of one process; each call names its server, too."""

    async def job() -> list[Result[str]]:
        # The servers are in temporary folders and write there for the test, so the sandbox is off.
        pool = ToolPool(**{"workers": 1, "seconds": 60.0, "sandbox": "off", **settings})
        try:
            return [await pool.call(path, [], given) for path, given in calls]
        finally:
            pool.close()
            await asyncio.sleep(0)

    return asyncio.run(job())


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pid: int) -> None:
    async def wait() -> None:
        async with asyncio.timeout(60):
            while not gone(pid):
                await asyncio.sleep(0.05)

    asyncio.run(wait())


@pytest.mark.slow
def test_what_a_server_says(server: str) -> None:
    """Check schemas and results of its tools; its errors are graded results that the policy reads."""
    found = schemas([server])
    assert list(found) == [f"{server}#{name}" for name in ("price", "misbehave", "large", "picture", "pid")]
    told = found[f"{server}#price"]["function"]
    assert (told["name"], told["description"]) == ("price", "Look up a price.")
    assert told["parameters"]["required"] == ["fruit"]
    assert told["parameters"]["properties"]["count"] == {"default": 1, "title": "Count", "type": "integer"}
    price, refused, unknown, wrong, large, picture, *pids = call(
        server,
        ("price", {"fruit": "pear", "count": 2}),
        ("misbehave", {"how": "refuse"}),
        ("cost", {}),
        ("price", {"fruit": 3}),
        ("large", {"size": 1_000_000}),
        ("picture", {}),
        ("pid", {}),
        ("pid", {}),
        observation_bytes=1001,
    )
    assert price == Result("8") and picture == Result("[image]\na pear")
    assert refused.graded and refused.error and refused.error.startswith("Error executing tool misbehave")
    assert unknown == Result(error="Unknown tool: cost")
    assert wrong.graded and wrong.error and "Input should be a valid string" in wrong.error
    assert large.value and large.value.endswith("é\n[cut at 1001 bytes]") and len(large.value.encode()) < 1002
    assert pids[0] == pids[1] and pids[0].value
    wait_until_gone(int(pids[0].value))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("hang", Result(error="timeout after 3 s")),
        ("exit", Result(error="Connection closed", graded=False)),
        ("once", Result("once")),
        ("nonsense", Result("nonsense")),
    ],
)
def test_servers_that_misbehave(server: str, tmp_path: Path, how: str, expected: Result[str]) -> None:
    """A failed call is tried once more with a new server; later calls work, and no process is left."""
    file = tmp_path / "pids"
    limit = 3.0 if how == "hang" else 60.0
    found, after = call(
        server, ("misbehave", {"how": how, "file": str(file)}), ("price", {"fruit": "pear"}), seconds=limit
    )
    assert (found, after) == (expected, Result("4"))
    pids = [int(pid) for pid in file.read_text().split()]
    assert len(pids) == (1 if how == "nonsense" else 2)
    for pid in pids:
        wait_until_gone(pid)


@pytest.mark.slow
def test_a_server_that_was_killed_between_calls(server: str) -> None:
    async def job() -> list[Result[str]]:
        pool = ToolPool(workers=1, seconds=60.0, sandbox="off")
        first = await pool.call(f"{server}#pid")
        assert first.value
        os.kill(int(first.value), signal.SIGKILL)
        second = await pool.call(f"{server}#pid")
        for process in pool.pids:  # kills the server's parent
            os.kill(process, signal.SIGKILL)
        pool.close()
        await asyncio.sleep(0)
        return [first, second]

    first, second = asyncio.run(job())
    assert second.graded and second.value and second != first
    wait_until_gone(int(second.value))


NO_SERVERS = {
    "mcp:": "no MCP server answers: ValueError: no command (write mcp:COMMAND, or mcp:URL)",
    "mcp:echo 'a": "no MCP server answers: ValueError: No closing quotation (write",
    "mcp:no-such-command x": "no MCP server answers: FileNotFoundError: ",
    "mcp:sh -c 'echo no key >&2; exit 3'": "no MCP server answers: no key (write",
    "mcp:echo hello": "no MCP server answers: ",
    "mcp:http://127.0.0.1:9/mcp": "no MCP server answers: ConnectError: ",
}


@pytest.mark.slow
def test_what_is_no_server(capfd: pytest.CaptureFixture[str]) -> None:
    """Before the run it is a one-line error; during the run the call is ungraded."""
    said = {}
    for entry, why in NO_SERVERS.items():
        with pytest.raises(ConfigError) as caught:
            schemas([entry])
        said[entry] = str(caught.value)
        assert said[entry].startswith(f"rollout.tools: {entry}: {why}") and "\n" not in said[entry]
    assert capfd.readouterr() == ("", "")
    calls = [(f"{entry}#x", {}) for entry in NO_SERVERS]
    assert call_paths(*calls) == [Result(error=error, graded=False) for error in said.values()]


@pytest.mark.slow
def test_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "START_LIMIT", 2.0)
    with pytest.raises(ConfigError, match=r"^rollout\.tools: mcp:sleep 600: no answer within 2 s$"):
        schemas(["mcp:sleep 600"])


@pytest.mark.slow
def test_names_that_clash(server: str) -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.tools: several tools are named price \(rename one\)$"):
        schemas([server, f"{__name__}:price"])


def price(fruit: str) -> int:
    """Look up another price.

    Args:
        fruit: its name
    """
    return len(fruit)


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        ({"type": "text", "text": "a pear"}, "a pear"),
        ({"type": "text", "text": ""}, ""),
        ({"type": "resource", "resource": SimpleNamespace(text="")}, ""),
        ({"type": "resource", "resource": SimpleNamespace(blob="AAAA")}, "[resource]"),
        ({"type": "image", "data": ""}, "[image]"),
    ],
)
def test_parts_of_a_result(block: dict[str, Any], shown: str) -> None:
    """An empty text is a part too."""
    assert mcp_tools._text(SimpleNamespace(**block)) == shown


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError) as caught:
        schemas(["mcp:true"])
    assert str(caught.value) == "rollout.tools: mcp:true needs mcp (pip install 'megarl[mcp]')"


@pytest.mark.slow
def test_an_episode_calls_them(server: str) -> None:
    found = schemas([server])
    tokenizer = merging_tokenizer(QWEN25)
    chat = ChatTurns(tokenizer, list(found.values()))
    calls = [{"name": "price", "arguments": {"fruit": fruit}} for fruit in ("pear", "plum")]
    script = ["".join(f"<tool_call>{json.dumps(one)}</tool_call>" for one in calls), "4"]
    policy = ScriptedPolicy(prompt_of(chat.first([{"role": "user", "content": "?"}])), tokenizer, script)

    async def run() -> None:
        policy.tools = ToolPool(workers=2, seconds=60.0, sandbox="off")
        try:
            paths = {one["function"]["name"]: path for path, one in found.items()}
            await tool_calls(chat, paths)(policy.prompt, policy)
        finally:
            policy.tools.close()
            await asyncio.sleep(0)

    asyncio.run(run())
    text = tokenizer.decode(policy.tokens)
    assert "<tool_response>\n4\n</tool_response>" in text and policy.calls == 2
    assert "<tool_response>\nerror: Error executing tool price" in text


@pytest.fixture
def over_http(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """Serve the same tools at an address, in a thread; yield the entry and a function that stops it."""
    import uvicorn

    module: dict[str, Any] = {"__name__": "server"}
    exec(SERVER, module)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(module["server"].streamable_http_app(), log_level="error")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: running.run(sockets=[listening]), daemon=True)
    thread.start()

    def stop() -> None:
        running.should_exit = running.force_exit = True
        thread.join(60)
        listening.close()
        assert not thread.is_alive()

    yield f"mcp:http://127.0.0.1:{listening.getsockname()[1]}/mcp", stop
    stop()


@pytest.mark.slow
def test_over_http(over_http: tuple[str, Any]) -> None:
    """Results are as over pipes; a call after the server has stopped is ungraded."""
    url, stop = over_http
    assert f"{url}#price" in schemas([url])

    async def job() -> list[Result[str]]:
        pool = ToolPool(workers=1, seconds=60.0, sandbox="off")
        try:
            found = [await pool.call(f"{url}#price", [], {"fruit": "pear"})]
            found.append(await pool.call(f"{url}#misbehave", [], {"how": "refuse"}))
            await asyncio.to_thread(stop)
            found.append(await pool.call(f"{url}#price", [], {"fruit": "pear"}))
            return found
        finally:
            pool.close()
            await asyncio.sleep(0)

    price, refused, down = asyncio.run(job())
    assert price == Result("4") and refused.graded and refused.error
    assert down.error and not down.graded


@pytest.mark.parametrize(
    ("content", "structured", "shown"),
    [
        (["returned 2 item(s)."], {"items": [1, 2]}, 'returned 2 item(s).\n{"items": [1, 2]}'),
        (['{"items": [1, 2]}'], {"items": [1, 2]}, '{"items": [1, 2]}'),
        (['{\n  "items": [\n1, 2]}'], {"items": [1, 2]}, '{\n  "items": [\n1, 2]}'),
        ([], {"items": []}, '{"items": []}'),
        (["5"], {"result": 5}, "5"),
        (["a"], {"result": "a"}, "a"),
        (["a", "7"], {"result": ["a", "7"]}, "a\n7"),
        (["two"], {"result": ["a", "b"]}, 'two\n{"result": ["a", "b"]}'),
        (["[" * 5000], {"result": 1}, "[" * 5000 + '\n{"result": 1}'),
        (["plain"], None, "plain"),
        ([], None, ""),
    ],
)
def test_structured_content_is_shown_once(content: list[str], structured: Any, shown: str) -> None:
    blocks = [SimpleNamespace(type="text", text=text) for text in content]
    assert mcp_tools._result_text(SimpleNamespace(content=blocks, structured_content=structured)) == shown
