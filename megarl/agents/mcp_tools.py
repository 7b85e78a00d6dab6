"""Tools of MCP servers in `rollout.tools` (docs/episodes.md).

An entry `mcp:python shop.py` has tools such as `mcp:python shop.py#price`."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megarl
from megarl.config.errors import ConfigError, first_line
from megarl.rewards.process import START_LIMIT, plain_environment

if TYPE_CHECKING:
    from mcp import Client

MCP = "mcp:"

# The mcp package starts servers in new sessions, which would outlive this process.
_GUARDED = "import sys; sys.path.append(sys.argv[1]); from megarl.rewards.process import guard; guard()"


class ServerError(Exception):
    """A server's tool failed; gone: because the connection ended."""

    def __init__(self, text: str, *, gone: bool = False) -> None:
        super().__init__(text)
        self.gone = gone


@cache
def list_tools(entry: str) -> dict[str, dict[str, Any]]:
    """Return a server's schemas by `entry#tool`. Raises ConfigError."""

    async def fetch_tools() -> list[Any]:
        async with asyncio.timeout(START_LIMIT), _open_client(entry) as client:
            tools, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if (cursor := page.next_cursor) is None:
                    return tools

    logging.getLogger("mcp").addHandler(logging.NullHandler())  # it logs invalid messages to stderr
    try:
        tools = asyncio.run(fetch_tools())
    except TimeoutError:
        raise ConfigError(f"rollout.tools: {entry}: no answer within {START_LIMIT:g} s") from None
    schemas_by_path = {}
    for tool in tools:
        if "#" in tool.name:
            raise ConfigError(f"rollout.tools: {entry}: # in the name of tool {tool.name!r} (rename it)")
        schema = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        schemas_by_path[f"{entry}#{tool.name}"] = {"type": "function", "function": schema}
    if not schemas_by_path:
        raise ConfigError(f"rollout.tools: {entry}: the server has no tools (leave it out)")
    return schemas_by_path


def connect_tool(path: str) -> Callable[..., str]:
    """Return a function that calls `entry#tool` and may raise ServerError. Raises ConfigError."""
    entry, _, name = path.rpartition("#")
    connection = _connect(entry)
    return lambda **arguments: connection.call(name, arguments)


class _Connection:
    """A connection in a thread. ToolPool limits its time."""

    def __init__(self, entry: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready: Future[Client] = Future()
        self._ended: Future[Any] = Future()
        threading.Thread(target=self._loop.run_until_complete, args=[self._keep(entry)], daemon=True).start()
        self._client = self._ready.result()

    async def _keep(self, entry: str) -> None:
        try:
            async with _open_client(entry) as client:
                self._ready.set_result(client)
                await asyncio.Event().wait()
        except BaseException as error:  # noqa: BLE001 (raised by `__init__`)
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self._ended.set_result(None)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        coroutine = self._client.call_tool(name, arguments)
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        wait((future, self._ended), return_when=FIRST_COMPLETED)
        try:
            if not future.done():
                raise ServerError("the connection to the server has ended", gone=True)
            result = future.result()
        except MCPError as error:
            raise ServerError(str(error), gone=error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT)) from error
        except ServerError:
            raise
        except Exception as error:
            raise ServerError(f"{type(error).__name__}: {error}", gone=True) from error
        text = _result_text(result)
        if result.is_error:
            raise ServerError(text)
        return text


_connect = cache(_Connection)


def _result_text(result: Any) -> str:
    """Join texts and structured content, unless it repeats them."""
    texts = [_text(block) for block in result.content]
    data = result.structured_content
    if data is not None:
        # Servers wrap values that are not objects as {"result": ...}, and send lists as texts.
        value = data["result"] if data.keys() == {"result"} else data
        items = value if isinstance(value, list) else [value]
        for repeated in ([data], [value], items):
            if len(texts) == len(repeated) and all(map(_is_same, texts, repeated)):
                break
        else:
            texts.append(json.dumps(data, ensure_ascii=False))
    return "\n".join(texts)


def _is_same(text: str, value: Any) -> bool:
    """Compare a text, plain or as JSON, with a value."""
    try:
        return text == value or json.loads(text) == value
    except (ValueError, RecursionError):
        return False


def _text(block: Any) -> str:
    text = getattr(block, "text", None)
    if text is None:
        text = getattr(getattr(block, "resource", None), "text", None)
    return text if isinstance(text, str) else f"[{block.type}]"


@asynccontextmanager
async def _open_client(entry: str) -> AsyncIterator[Client]:
    """Connect. Raises ConfigError, with the server's last line of stderr."""
    try:
        from mcp import Client, StdioServerParameters, stdio_client
    except ImportError as error:
        raise ConfigError(f"rollout.tools: {entry} needs mcp (pip install 'megarl[mcp]')") from error

    command = entry.removeprefix(MCP).strip()
    with tempfile.TemporaryFile("w+") as log:
        try:
            server: Any = command
            if not command.startswith(("http://", "https://")):
                if not (words := shlex.split(command)):
                    raise ValueError("no command")
                server = stdio_client(
                    StdioServerParameters(
                        command=sys.executable,
                        args=["-P", "-c", _GUARDED, str(Path(megarl.__file__).parents[1]), *words],
                        env=plain_environment() | {"HOME": str(Path.home())},
                    ),
                    log,
                )
            async with Client(server) as client:
                yield client
        except Exception as error:
            log.seek(0)
            lines = log.read().strip().splitlines()
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            reason = lines[-1] if lines else f"{type(error).__name__}: {first_line(error)}"
            what = f"no MCP server answers: {reason} (write mcp:COMMAND, or mcp:URL)"
            raise ConfigError(f"rollout.tools: {entry}: {what}") from error
