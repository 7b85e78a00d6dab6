"""Chat templates and tool calls of episodes: tokens in, tokens out.

New messages are appended to sampled tokens, so `check_template` rejects templates that do more."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any

from megarl.agents.chat_turns import ChatTurns
from megarl.agents.episode import EpisodeFunction, EpisodeTruncated, Policy, ToolError
from megarl.agents.mcp_tools import MCP, list_tools
from megarl.agents.tools import build_schema
from megarl.config.errors import ConfigError, first_line
from megarl.data.chat_template import Message, require_template
from megarl.data.limits import memory_limit
from megarl.data.prompts import Prompt
from megarl.data.response_text import check_end, policy_text
from megarl.rewards.verdict import Verdict

_MAX_CALLS = 16  # in one turn; a repetitive policy would block the tools
_CALL_BEGINS, _CALL_ENDS = "<tool_call>", "</tool_call>"
_THOUGHTS_END = "</think>"
_SPACE, _SEPARATORS = re.compile(r"\s*"), re.compile(r"[; \n\t,]*")
_JSON = json.JSONDecoder()
_JSON_CALL = re.compile(r"\[?\s*\{\s*\"(?:name|type|function)\"")
EMPTY: Mapping[str, Any] = MappingProxyType({})


def opening_tokens(tokenizer: Any, variables: Mapping[str, Any] = EMPTY) -> tuple[int, ...]:
    """Return the first token of all conversations. Raises ConfigError if it differs."""
    chat, user = ChatTurns(tokenizer, variables=variables), {"role": "user", "content": "Why?"}
    first_tokens = [chat.first([user])[:1], chat.first([{"role": "user", "content": "1 + 1"}])[:1]]
    with suppress(ValueError):  # some templates refuse system messages
        first_tokens.append(chat.first([{"role": "system", "content": "Be brief."}, user])[:1])
    if len(set(first_tokens)) > 1 or not first_tokens[0]:
        what = "starts conversations with different tokens, so an agent's conversations share no prompt"
        raise ConfigError(f"data.template: the chat template {what} (let it start with a special token)")
    return first_tokens[0]


def check_template(
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] = (),
    shown: Collection[str] = ("user",),
    stop: Collection[str] = (),
    variables: Mapping[str, Any] = EMPTY,
) -> None:
    """Raise ConfigError with the first difference if a chat template does more than append.

    Renders 1 to 4 turns with thoughts, and without if the template has no case for them. Ignores white space,
    which templates strip.

    shown      roles of messages for the policy
    variables  data.chat_template_kwargs"""
    require_template(tokenizer, "add one to the model's folder")
    if "strftime_now" in str(tokenizer.chat_template):
        what = "writes today's date, so prompts change when a run is resumed on another day"
        raise ConfigError(f"data.template: the chat template {what} (replace strftime_now by a constant)")
    try:
        with memory_limit():
            chat = ChatTurns(tokenizer, tools, variables)
            _check_conversations(chat, shown)
            check_end(chat, stop)
    except ValueError as error:
        raise ConfigError(f"data.template: {error} (use a template that only appends)") from error


def _check_conversations(chat: ChatTurns, shown: Collection[str]) -> None:
    for schema in chat.tools:  # do not trust an MCP server's schemas
        if chat.named and (match := chat.named.search(json.dumps(schema, ensure_ascii=False))):
            name = schema.get("function", schema).get("name")
            what = f"tool {name!r}: {match[0]} in its schema would be read as a control token"
            raise ConfigError(f"rollout.tools, or an agent's: {what} (reword it, or leave the tool out)")
    messages = [{"role": "user", "content": "question 0"}]
    if chat.tools and chat.render(messages) == ChatTurns(chat.tokenizer, variables=chat.variables).render(
        messages
    ):
        what = "does not show tools to the policy"
        raise ConfigError(f"data.template: the chat template {what} (use one that renders `tools`)")
    # A template with a case for thoughts may write empty ones.
    has_thoughts = "think>" in str(chat.tokenizer.chat_template)
    for role in sorted(shown):
        for thinks in (True,) if has_thoughts else (True, False):
            _check_appends(chat, role, thinks)


def _check_appends(chat: ChatTurns, role: str, thinks: bool) -> None:
    messages: list[Message] = [{"role": "user", "content": "question 0"}]
    text = chat.render(messages)
    _, think_tag, opening = text[len(chat.render(messages, generate=False)) :].partition("<think>")
    opening = think_tag + opening  # thoughts that the template starts for the policy
    for turn in range(1, 5):
        thought = f"{'' if opening else '<think>'}\nthought {turn}\n</think>\n\n" if thinks else ""
        answer = f"{'' if '</think>' in opening else thought}answer {turn}"
        assistant = {"role": "assistant", "content": opening + answer}
        new_messages: list[Message] = [{"role": role, "content": f"shown {turn}"}]
        if role == "tool":
            new_messages = [
                {**new_messages[0], "name": "f", "tool_call_id": f"call{turn}{i:04}"} for i in range(2)
            ]
        text += answer + chat.text_behind(new_messages)
        messages += [assistant, *new_messages]
        rendered_text = chat.render(messages)
        if (difference := _find_difference(text, rendered_text)) is None:
            continue
        index, rendered_index = difference
        starts = [(text.find(message["content"]), i) for i, message in enumerate(messages)]
        message_indices = [i for start, i in starts if 0 <= start <= index]
        where = "the beginning"
        if message_indices:
            where = f"{messages[message_indices[-1]]['role']} message {message_indices[-1]}"
        old_excerpt = text[max(0, index - 8) : index + 24]
        new_excerpt = rendered_text[max(0, rendered_index - 8) : rendered_index + 24]
        what = f"in a conversation of {len(messages)} messages, {where} changes"
        raise ConfigError(
            f"data.template: the chat template rewrites history: {what}: "
            f"{old_excerpt!r} becomes {new_excerpt!r} "
            "(change chat_template.jinja in the model's folder so that it only appends)"
        )


def _find_difference(one: str, other: str) -> tuple[int, int] | None:
    """Return where two texts first differ in more than white space; None: nowhere."""
    # The end of a text counts as one more letter.
    letter_indices = [
        [*(i for i, letter in enumerate(text) if not letter.isspace()), len(text)] for text in (one, other)
    ]
    pairs = zip(*letter_indices, strict=False)
    return next(((i, j) for i, j in pairs if one[i : i + 1] != other[j : j + 1]), None)


@dataclass(frozen=True)
class Call:
    """A tool call; `error`: why it is invalid."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None


def detect_call_format(tokenizer: Any) -> str:
    """Return the format of tool calls (docs/episodes.md). Raises ConfigError."""
    if getattr(tokenizer, "response_template", None):
        return "response_template"
    source = str(tokenizer.chat_template)
    if re.search(r"""<tool_call>(?:\\n|\s)*\{\s*\\*["']name""", source):
        return "hermes"
    if re.search(r"""\\?["']parameters\\?["']\s*:""", source):
        return "json"
    what = 'describes no known format of calls, <tool_call>{...}</tool_call> or {"name", "parameters"}'
    raise ConfigError(f"rollout.tools: the chat template {what} (give the tokenizer a response_template)")


def parse_calls(tokens: Sequence[int], tokenizer: Any, form: str, prefix: str = "") -> tuple[str, list[Call]]:
    """Return the text around tool calls, and the calls. No text makes it raise.

    prefix: how the template starts a turn"""
    if form == "response_template":
        try:
            message = tokenizer.parse_response(list(tokens), prefix=prefix)
        except Exception as error:  # noqa: BLE001 (the policy's text may break the parser)
            return policy_text(tokenizer, tokens), [_failed(first_line(error))]
        functions = [call_data.get("function") for call_data in message.get("tool_calls") or ()]
        return str(message.get("content") or ""), [_call(call_data) for call_data in functions]
    text = policy_text(tokenizer, tokens)
    if form == "hermes":
        return _hermes_calls(text)
    assert form == "json"
    begin = _end_of_thoughts(text)
    position, thoughts = _skip(_SPACE, text, begin), text[:begin].strip()
    if not _JSON_CALL.match(text, position):
        return text, []
    calls: list[Call] = []
    while (position := _skip(_SEPARATORS, text, position)) < len(text):
        try:
            value, position = _JSON.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            return thoughts, [*calls, _failed(f"not JSON: {error}")]
        calls += [_call(call_data) for call_data in (value if isinstance(value, list) else [value])]
    return thoughts, calls


def _hermes_calls(text: str) -> tuple[str, list[Call]]:
    """Parse `<tool_call>JSON</tool_call>`. A tag within JSON is text."""
    begin = _end_of_thoughts(text)
    texts_around, calls = [text[:begin]], list[Call]()
    while (tag := text.find(_CALL_BEGINS, begin)) >= 0:
        texts_around.append(text[begin:tag])
        position = tag + len(_CALL_BEGINS)
        try:
            value, position = _json_behind(text, tag)
            position = _skip(_SPACE, text, position)
            if position < len(text) and not text.startswith((_CALL_ENDS, _CALL_BEGINS), position):
                raise ValueError("something follows it")
            calls.append(_call(value))
            begin = position + len(_CALL_ENDS) * text.startswith(_CALL_ENDS, position)
        except (ValueError, RecursionError) as error:
            calls.append(_failed(f"not JSON: {error}"))
            end = text.find(_CALL_ENDS, position)
            begin = len(text) if end < 0 else end + len(_CALL_ENDS)
    texts_around.append(text[begin:])
    return "\n".join(filter(None, map(str.strip, texts_around))), calls


def _end_of_thoughts(text: str) -> int:
    """Return the end of the first `</think>`, or 0 if there is none outside a call's JSON."""
    end = text.find(_THOUGHTS_END)
    tag = text.find(_CALL_BEGINS)
    if 0 <= tag < end and not text.lstrip().startswith("<think>"):
        with suppress(ValueError, RecursionError):
            if _json_behind(text, tag)[1] > end:
                return 0
    return 0 if end < 0 else end + len(_THOUGHTS_END)


def _json_behind(text: str, tag: int) -> tuple[Any, int]:
    """Return the JSON after a tag, and its end. Raises ValueError and RecursionError."""
    return _JSON.raw_decode(text, _skip(_SPACE, text, tag + len(_CALL_BEGINS)))


def _skip(characters: re.Pattern[str], text: str, at: int) -> int:
    match = characters.match(text, at)
    return match.end() if match else at


def _call(value: Any) -> Call:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _failed('it needs {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return _failed(f"its arguments are not JSON: {error}", value["name"])
    if not isinstance(arguments, dict):
        return _failed("its arguments are no object", value["name"])
    return Call(value["name"], arguments)


def _failed(why: str, name: str = "") -> Call:
    return Call(name, {}, f"error: this is no call of a tool: {why}")


def schemas(tools: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the schemas of functions and MCP servers' tools, by path. Raises ConfigError."""
    schemas_by_path: dict[str, dict[str, Any]] = {}
    for path in tools:
        schemas_by_path |= list_tools(path) if path.startswith(MCP) else {path: build_schema(path)}
    names = [schema["function"]["name"] for schema in schemas_by_path.values()]
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise ConfigError(
            f"rollout.tools: several tools are named {', '.join(sorted(duplicates))} (rename one)"
        )
    return schemas_by_path


def tool_calls(chat: ChatTurns, paths: Mapping[str, str]) -> EpisodeFunction:
    """Return the episode of `rollout.tools`, which runs a turn's calls concurrently.

    paths: by tool name"""
    form = detect_call_format(chat.tokenizer)
    prefix = chat.text_behind([{"role": "user", "content": "?"}])

    async def episode(prompt: Prompt, policy: Policy) -> None:
        for turn_index in count():
            turn = await policy.generate()
            _, calls = parse_calls(turn.tokens, chat.tokenizer, form, prefix)
            if not calls or turn.finish == "length":  # perhaps a partial call
                return
            coroutines = (_run(policy, paths, i, call) for i, call in enumerate(calls))
            results = await asyncio.gather(*coroutines, return_exceptions=True)
            messages: list[Message] = []
            for i, (call, result) in enumerate(zip(calls, results, strict=True)):
                if isinstance(result, BaseException):
                    raise result
                message = {"role": "tool", "name": call.name or "unknown"}
                messages.append({**message, "tool_call_id": make_call_id(turn_index, i), "content": result})
            policy.observe(chat.after(messages, turn.tokens))

    return episode


async def _run(policy: Policy, paths: Mapping[str, str], number: int, call: Call) -> str:
    if call.error is not None:
        return call.error
    if number >= _MAX_CALLS:
        return f"error: only the first {_MAX_CALLS} calls of a turn are run"
    if call.name not in paths:
        return f"error: there is no tool {call.name!r} (there is: {', '.join(paths)})"
    try:
        return str(await policy.call(paths[call.name], **call.arguments))
    except ToolError as error:
        return f"error: {error}"


def play(chat: ChatTurns | None) -> EpisodeFunction:
    """Return the episode of `rollout.environment`, which grades it."""

    async def episode(prompt: Prompt, policy: Policy) -> Verdict:
        tokens: Sequence[int] = ()
        done, observation = False, await policy.reset()
        if observation in (prompt.question, prompt.text):
            observation = ""
        with suppress(EpisodeTruncated):
            while not done:
                if observation:
                    messages = [{"role": "user", "content": observation}]
                    policy.observe(chat.after(messages, tokens) if chat else observation)
                turn = await policy.generate()
                tokens = turn.tokens
                observation, reward, done = await policy.step(turn.text)
                policy.reward(reward)
        return await policy.verdict()

    return episode


def make_call_id(turn: int, number: int) -> str:
    """Make an id of nine characters, as Mistral's templates require."""
    return f"c{turn % 10000:04}{number % 10000:04}"
