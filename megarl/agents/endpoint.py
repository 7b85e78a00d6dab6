"""An OpenAI-compatible endpoint on loopback, for `rollout.agent`.

Each response is a session, whose history may only grow, as new messages are appended to sampled tokens."""

from __future__ import annotations

import asyncio
import json
import resource
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.agents.chat import EMPTY, Call, check_template, detect_call_format, make_call_id, parse_calls
from megarl.agents.chat_turns import ChatTurns
from megarl.agents.episode import EpisodeFunction, EpisodeTruncated, Policy, make_row
from megarl.agents.tools import describe_error
from megarl.config.errors import ConfigError, EngineError, MegarlError
from megarl.data.prompts import Prompt
from megarl.rewards.verdict import Verdict
from megarl.rollout.episode import EpisodeAborted

if TYPE_CHECKING:
    from aiohttp import web

Agent = Callable[[str, str, dict[str, Any]], Awaitable[Verdict | bool | float | None]]

_MAX_BYTES = 4 << 20  # a history of a million tokens
# Any user can connect. Beyond this, or a quarter of the descriptors, the oldest connection without a valid
# api_key is closed.
_MAX_UNAUTHENTICATED = 4096
_UNAUTHENTICATED_SECONDS = 10.0
# The run determines sampling.
_IGNORED = {
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "user", "metadata", "store", "stream_options",
    "parallel_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key", "reasoning_effort",
}  # fmt: skip
_READ = {"messages", "tools", "tool_choice", "stop", "max_tokens", "max_completion_tokens", "stream"}
# Only the values that apply anyway are accepted.
_FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "echo": (False,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip


class Refused(Exception):
    """A refused request; `ungraded`: the conversations of agent and policy differ."""

    def __init__(self, text: str, code: str = "invalid_request", *, ungraded: bool = False) -> None:
        super().__init__(text)
        self.code, self.ungraded = code, ungraded


def check_installed() -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ConfigError("rollout.agent: needs aiohttp (pip install 'megarl[agents]')") from error


class Endpoint:
    """A worker's server. seconds: maximum time between requests."""

    def __init__(
        self, tokenizer: Any, seconds: float, stop: Sequence[str] = (), variables: Mapping[str, Any] = EMPTY
    ) -> None:
        check_installed()
        check_template(tokenizer, stop=stop, variables=variables)
        self.tokenizer, self.seconds, self.stop, self.variables = tokenizer, seconds, stop, variables
        self.sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._chats: dict[str, ChatTurns] = {}
        self._unauthenticated: dict[web.RequestHandler[Any], asyncio.TimerHandle] = {}
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_unauthenticated = min(_MAX_UNAUTHENTICATED, descriptors // 4)

    async def address(self) -> str:
        from aiohttp import web

        async with self._starting:
            if self._runner is None:
                app = web.Application(client_max_size=_MAX_BYTES)
                app.router.add_post("/s/{session}/v1/chat/completions", self._completions)
                app.router.add_get("/s/{session}/v1/models", self._models)
                runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
                await runner.setup()
                loop = asyncio.get_running_loop()
                # A new context: its tasks are not the first episode's.
                start = loop.create_server(partial(self._accept, runner), "127.0.0.1", 0)
                self._server = await loop.create_task(start, context=Context())
                self._runner = runner
        host, port = self._server.sockets[0].getsockname()
        return f"http://{host}:{port}"

    def _accept(self, runner: web.AppRunner) -> web.RequestHandler[Any]:
        assert runner.server is not None
        while len(self._unauthenticated) >= self._max_unauthenticated:
            self._close(next(iter(self._unauthenticated)))
        handler, loop = runner.server(), asyncio.get_running_loop()
        self._unauthenticated[handler] = loop.call_later(_UNAUTHENTICATED_SECONDS, self._close, handler)
        return handler

    def _close(self, handler: web.RequestHandler[Any]) -> None:
        self._unauthenticated.pop(handler).cancel()
        if handler.transport is not None:
            handler.transport.abort()

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            self._server.close()
            for handler in list(self._unauthenticated):
                self._close(handler)
            await runner.cleanup()

    def chat(self, tools: Sequence[Mapping[str, Any]]) -> ChatTurns:
        """Return a cached ChatTurns. Raises ConfigError for an unsuitable template."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._chats:
            roles = ("tool", "user") if tools else ("user",)
            check_template(self.tokenizer, tools, roles, self.stop, self.variables)
            if tools:
                detect_call_format(self.tokenizer)
            chat_turns = ChatTurns(self.tokenizer, tools, self.variables)
            self._chats = {**dict(list(self._chats.items())[-99:]), key: chat_turns}
        return self._chats[key]

    def episode(self, agent: Agent) -> EpisodeFunction:
        async def episode(prompt: Prompt, policy: Policy) -> Verdict | bool | float | None:
            session = Session(self, policy)
            policy.lenient = True  # agents have their own clocks and threads
            self.sessions[session.key] = session
            try:
                url = f"{await self.address()}/s/{session.key}/v1"
                with policy.wait_for("agent"):
                    return await session.run(agent(url, session.key, make_row(prompt)))
            finally:
                del self.sessions[session.key]

        return episode

    def _session(self, request: web.Request) -> Session | web.Response:
        session = self.sessions.get(request.match_info["session"])
        if session is None:
            return _error(404, Refused("there is no such session, or it has ended", "not_found"))
        if request.headers.get("Authorization") != f"Bearer {session.key}":
            return _error(401, Refused("use the api_key that the agent was given", "invalid_api_key"))
        if (timer := self._unauthenticated.pop(request.protocol, None)) is not None:
            timer.cancel()
        return session

    async def _models(self, request: web.Request) -> web.Response:
        from aiohttp import web

        session = self._session(request)
        if not isinstance(session, Session):
            return session
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "megarl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _completions(self, request: web.Request) -> web.Response:
        from aiohttp import web

        session = self._session(request)
        if not isinstance(session, Session):
            return session
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            return _error(400, Refused(f"the request is not JSON: {error}"))
        try:
            answer = await session.answer(body)
        except Refused as refused:
            return _error(400, refused)
        if not body.get("stream"):
            return web.json_response(answer)
        chunks = _stream_chunks(answer)
        options = body.get("stream_options")
        if not (isinstance(options, dict) and options.get("include_usage")):
            del chunks[-1]
        text = "".join(f"data: {chunk_text}\n\n" for chunk_text in (*map(json.dumps, chunks), "[DONE]"))
        return web.Response(text=text, content_type="text/event-stream")


def _stream_chunks(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    choice = answer["choices"][0]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    common_fields = {key: answer[key] for key in ("id", "created", "model")}
    common_fields["object"] = "chat.completion.chunk"
    chunk_choice = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"], "logprobs": None}
    return [
        {**common_fields, "choices": [chunk_choice]},
        {**common_fields, "choices": [], "usage": answer["usage"]},
    ]


def _error(status: int, refused: Refused) -> web.Response:
    from aiohttp import web

    error = {"message": str(refused), "type": "invalid_request_error", "param": None, "code": refused.code}
    return web.json_response({"error": error}, status=status)


@dataclass
class Session:
    """An agent's conversation with the policy, for one response.

    history  messages as `_message` returns them
    _end     its exception ends the episode, whatever the agent does"""

    endpoint: Endpoint
    policy: Policy
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    history: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    truncated: bool = False
    last_active: float = field(default_factory=time.monotonic)
    chat: ChatTurns | None = None
    _last: tuple[int, ...] = ()
    _answering: asyncio.Lock = field(default_factory=asyncio.Lock)
    _end: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def run(self, agent: Awaitable[Any]) -> Any:
        """Await the agent, and raise the error that ended the episode earlier, if any.

        Raises EpisodeTruncated if the agent fails when no turn or token is left."""
        task, limit = asyncio.ensure_future(_run_agent(agent)), self.endpoint.seconds
        try:
            while not task.done() and not self._end.done():
                if self._answering.locked():
                    self.last_active = time.monotonic()
                seconds_left = self.last_active + limit - time.monotonic()
                if seconds_left <= 0:
                    raise TimeoutError(f"the agent has asked nothing for {limit:g} s (rollout.turns.seconds)")
                start = time.monotonic()
                await asyncio.wait(
                    (task, self._end), timeout=seconds_left, return_when=asyncio.FIRST_COMPLETED
                )
                if time.monotonic() > start + seconds_left + 1.0:  # the loop was blocked by an engine restart
                    self.last_active = time.monotonic()
            if self._end.done():
                self._end.result()
            try:
                return task.result()
            except Exception:
                if self.truncated:
                    raise EpisodeTruncated from None
                raise
        finally:
            task.cancel()
            await asyncio.wait((task,), timeout=limit)
            if not task.done():
                what = f"the agent has not ended {limit:g} s after it was cancelled"
                raise EngineError(f"rollout.agent: {what} (let CancelledError through)")
            if not task.cancelled():
                task.exception()  # mark it as retrieved
            self._stop(EpisodeAborted())
            self._end.exception()
            # A request that the agent did not await is still a turn: finish it, except at the rollout's end,
            # when no engine answers.
            if not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                async with self._answering:
                    pass

    def _stop(self, error: BaseException) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    async def answer(self, body: Any) -> dict[str, Any]:
        if self._end.done():
            raise Refused("the episode has ended", "ended")
        try:
            if self._answering.locked():
                what = "this session is answering another request: a response is one conversation"
                raise Refused(f"{what} (ask one after the other)", "concurrent", ungraded=True)
            async with self._answering:
                try:
                    return await self._answer(body)
                finally:
                    self.last_active = time.monotonic()
        except Refused as refused:
            if refused.ungraded:
                self._stop(RuntimeError(str(refused)))
            raise
        except EpisodeTruncated:
            self.truncated = True
            what = "the episode has no turn or token left (rollout.turns, rollout.max_response_tokens)"
            raise Refused(what, "context_length_exceeded") from None
        except (EpisodeAborted, MegarlError) as error:
            self._stop(error)
            raise Refused("the episode has ended", "ended") from None

    async def _answer(self, body: Any) -> dict[str, Any]:
        if self.truncated:
            raise EpisodeTruncated
        messages, tools, stop, max_tokens = _parse_request(body)
        if self.chat is None:
            self.chat = self.endpoint.chat(tools)
        elif tools != self.chat.tools:
            raise Refused("the tools are not those of this session's first request", ungraded=True)
        chat = self.chat
        new_tokens = self._tokenize_new(chat, messages)
        if new_tokens:
            self.policy.observe(new_tokens)
        self.history = messages
        turn = await self.policy.generate(stop=stop, max_tokens=max_tokens)
        self._last = turn.tokens
        text = turn.text
        calls: list[Call] = []
        if tools and body.get("tool_choice") != "none":
            prefix = chat.text_behind([{"role": "user", "content": "?"}])
            form = detect_call_format(chat.tokenizer)
            text_around, calls = parse_calls(turn.tokens, chat.tokenizer, form, prefix)
            if any(call.error for call in calls):  # the agent handles invalid calls
                calls = []
            text = text_around if calls else text
        for stop_text in stop:
            text = text.partition(stop_text)[0]
        message: dict[str, Any] = {"role": "assistant", "content": (text or None) if calls else text}
        if calls:
            message["tool_calls"] = [
                _tool_call(make_call_id(self.turns, i), call.name, json.dumps(call.arguments))
                for i, call in enumerate(calls)
            ]
        self.history = [*messages, _message(message, len(messages))]
        self.turns += 1
        num_prompt_tokens = len(self.policy.tokens) - len(turn.tokens)
        reason = "length" if turn.finish == "length" else "tool_calls" if calls else "stop"
        return {
            "id": f"chatcmpl-{self.key[:8]}-{self.turns}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
            "usage": {
                "prompt_tokens": num_prompt_tokens,
                "completion_tokens": len(turn.tokens),
                "total_tokens": num_prompt_tokens + len(turn.tokens),
            },
        }

    def _tokenize_new(self, chat: ChatTurns, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        """Tokenise the new messages. Raises Refused unless `messages` extend the history."""
        history_length = len(self.history)
        for i, (recorded, message) in enumerate(zip(self.history, messages, strict=False)):
            if recorded != message:
                keys = {**recorded, **message}
                name = next(key for key in keys if recorded.get(key) != message.get(key))
                values = f"is {_short(message.get(name))}, and was {_short(recorded.get(name))}"
                remedy = "history has to extend what was sampled (send it back as it was)"
                raise Refused(f"messages[{i}].{name} {values}: {remedy}", "history", ungraded=True)
        if len(messages) <= history_length:
            what = f"{len(messages)} messages do not extend this session's {history_length}"
            raise Refused(f"{what} (send its history and new messages)", "history", ungraded=True)
        if messages[-1]["role"] == "assistant":
            raise Refused("the last message is the assistant's: the policy starts its turns itself")
        new_messages, prompt = messages[history_length:], self.policy.prompt.tokens
        try:
            if history_length:
                return chat.after(_rendered(new_messages), self._last)
            tokens = chat.first(_rendered(new_messages))
        except ValueError as error:
            raise Refused(str(error), ungraded=bool(history_length)) from error
        if tokens[: len(prompt)] != tuple(prompt):
            what = "the first messages do not start with the row's prompt"
            raise Refused(f"{what} (send row['question'] as the first message)", ungraded=True)
        return tokens[len(prompt) :]


async def _run_agent(agent: Awaitable[Any]) -> Any:
    """Await the agent; a sys.exit ends only it."""
    try:
        return await agent
    except SystemExit as error:
        raise RuntimeError(describe_error(error)) from error


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _parse_request(body: Any) -> tuple[list[dict[str, Any]], list[Any], tuple[str, ...], int | None]:
    if not isinstance(body, dict):
        raise Refused("the request is no object")
    fields = {key: value for key, value in body.items() if value is not None}
    for key, value in fields.items():
        if key in _FIXED and value not in _FIXED[key]:
            raise Refused(f"{key}: must be {json.dumps(_FIXED[key][0])} here (got {_short(value)})")
        if key not in _FIXED and key not in _READ and key not in _IGNORED:
            raise Refused(f"{key}: is not known here (leave it out)")
    if fields.get("tool_choice", "auto") not in ("auto", "none"):
        raise Refused("tool_choice: must be auto or none here: the policy decides")
    tools, stop = fields.get("tools", []), fields.get("stop", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools: must be a list of objects")
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise Refused("stop: must be a text or a list of texts")
    limits = [fields[key] for key in ("max_tokens", "max_completion_tokens") if key in fields]
    if not all(type(limit) is int and limit >= 1 for limit in limits):  # `true` is an int
        raise Refused("max_tokens: must be an integer >= 1")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages: must be a list of at least one message")
    parsed_messages = [_message(message, i) for i, message in enumerate(messages)]
    return parsed_messages, tools, tuple(stop), min(limits) if limits else None


def _message(message: Any, index: int) -> dict[str, Any]:
    """Return a message with text content and without empty fields. Raises Refused."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(f"messages[{index}]: needs a role")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused(f"messages[{index}].content: only texts can be shown here")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise Refused(f"messages[{index}].content: must be a text or a list of texts")
    role = "system" if message["role"] == "developer" else message["role"]
    parsed_message: dict[str, Any] = {"role": role, "content": content or ""}
    if calls := message.get("tool_calls"):
        try:
            parsed_message["tool_calls"] = [
                {"id": call["id"], "name": call["function"]["name"], "arguments": _arguments(call)}
                for call in calls
            ]
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise Refused(f"messages[{index}].tool_calls: {type(error).__name__}: {error}") from error
    return parsed_message | {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}


def _arguments(call: Any) -> Any:
    arguments = call["function"]["arguments"]
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _rendered(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rendered_messages = []
    for message in map(dict, messages):
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_tool_call(c["id"], c["name"], c["arguments"]) for c in calls]
        rendered_messages.append(message)
    return rendered_messages


def _tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
