"""Chat templates and tool calls of episodes: token in, token out.

A conversation is rendered by the tokenizer's template once. What the policy writes stays the tokens that were
drawn, and what it is shown next is what the template writes behind an assistant's turn: it is tokenised alone
and appended. That is right for templates that only append, so the others are found before the run."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, zip_longest
from types import MappingProxyType
from typing import Any

from megarl.agents.chat_turns import ChatTurns
from megarl.agents.episode import EpisodeFunction, EpisodeTruncated, Policy, ToolError
from megarl.agents.mcp_tools import MCP, list_tools
from megarl.agents.tools import schema
from megarl.config.errors import ConfigError, first_line
from megarl.data.chat_template import Message
from megarl.data.limits import memory_limit
from megarl.data.prompts import Prompt
from megarl.data.response_text import check_end, policy_text
from megarl.rewards.verdict import Verdict

_MOST_CALLS = 16  # in one turn; a policy that repeats itself would keep the tools busy for hours
_CALL_BEGINS, _CALL_ENDS = "<tool_call>", "</tool_call>"
_THOUGHTS_END = "</think>"
_SPACE, _SEPARATORS = re.compile(r"\s*"), re.compile(r"[; \n\t,]*")
_JSON = json.JSONDecoder()
_JSON_CALL = re.compile(r"\[?\s*\{\s*\"(?:name|type|function)\"")
NONE: Mapping[str, Any] = MappingProxyType({})


def opening(tokenizer: Any, variables: Mapping[str, Any] = NONE) -> tuple[int, ...]:
    """Return the token that every conversation begins with, the prompt of agents that bring messages of their
    own. Raises ConfigError where there is none."""
    chat, user = ChatTurns(tokenizer, variables=variables), {"role": "user", "content": "Why?"}
    begun = [chat.first([user])[:1], chat.first([{"role": "user", "content": "1 + 1"}])[:1]]
    with suppress(ValueError):  # of a template without a system's turn
        begun.append(chat.first([{"role": "system", "content": "Be brief."}, user])[:1])
    if len(set(begun)) > 1 or not begun[0]:
        what = "begins conversations with different tokens, so that an agent's have no prompt in common"
        raise ConfigError(f"data.template: the chat template {what} (let it begin with a special token)")
    return begun[0]


def check_template(
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] = (),
    shown: Collection[str] = ("user",),
    stop: Collection[str] = (),
    variables: Mapping[str, Any] = NONE,
) -> None:
    """Raise ConfigError, which says what the template changes and where, unless it only appends.

    Conversations of 1 to 4 turns are rendered, with thoughts in the assistant's, and also without where the
    template has no case for them, and compared with what the policy would have before it. White space is not
    compared: templates strip contents, and the policy's own stays in its context.

    shown: the roles of what the policy is shown; stop: rollout.stop, texts that end a turn;
    variables: data.chat_template_kwargs"""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("data.template: the tokenizer has no chat template (add one to the model's folder)")
    source = tokenizer.chat_template
    if "strftime_now" in (source if isinstance(source, str) else str(source)):
        what = "writes today's date, so that a run that goes on tomorrow has other prompts"
        raise ConfigError(
            f"data.template: the chat template {what} (put a constant in place of strftime_now)"
        )
    try:
        with memory_limit():
            chat = ChatTurns(tokenizer, tools, variables)
            _check_conversations(chat, shown)
            check_end(chat, stop)
    except ValueError as error:
        raise ConfigError(f"data.template: {error} (use a template that only appends)") from error


def _check_conversations(chat: ChatTurns, shown: Collection[str]) -> None:
    """Raise ConfigError, or ValueError with what the template does wrong."""
    for told in chat.tools:  # of an MCP server they are a stranger's words
        if chat.named and (found := chat.named.search(json.dumps(told, ensure_ascii=False))):
            name = told.get("function", told).get("name")
            what = f"tool {name!r}: {found[0]} in its schema would be read as a control token"
            raise ConfigError(f"rollout.tools, or an agent's: {what} (reword it, or leave the tool out)")
    asked = [{"role": "user", "content": "question 0"}]
    if chat.tools and chat.render(asked) == ChatTurns(chat.tokenizer, variables=chat.variables).render(asked):
        what = "does not tell the policy of tools"
        raise ConfigError(f"data.template: the chat template {what} (use one that renders `tools`)")
    knows_thoughts = "think>" in str(
        chat.tokenizer.chat_template
    )  # then some write empty ones where there are none
    for role in sorted(shown):
        for thinks in (True,) if knows_thoughts else (True, False):
            _check_appends(chat, role, thinks)


def _check_appends(chat: ChatTurns, role: str, thinks: bool) -> None:
    messages: list[Message] = [{"role": "user", "content": "question 0"}]
    text = chat.render(messages)
    _, opens, opened = text[len(chat.render(messages, generate=False)) :].partition("<think>")
    opened = opens + opened  # thoughts that the template begins, or leaves empty, for the policy
    for turn in range(1, 5):
        thought = f"{'' if opened else '<think>'}\nthought {turn}\n</think>\n\n" if thinks else ""
        written = f"{'' if '</think>' in opened else thought}answer {turn}"
        spoken = {"role": "assistant", "content": opened + written}
        new: list[Message] = [{"role": role, "content": f"shown {turn}"}]
        if role == "tool":  # two calls of one turn
            new = [{**new[0], "name": "f", "tool_call_id": f"call{turn}{i:04}"} for i in range(2)]
        text += written + chat.text_behind(new)
        messages += [spoken, *new]
        now = chat.render(messages)
        letters = [[i for i, letter in enumerate(one) if not letter.isspace()] for one in (text, now)]
        pairs = zip_longest(*letters)
        differs = ((i, j) for i, j in pairs if i is None or j is None or text[i] != now[j])
        for at, then in differs:
            at, then = len(text) if at is None else at, len(now) if then is None else then
            begins = [(text.find(message["content"]), i) for i, message in enumerate(messages)]
            before = [i for begin, i in begins if 0 <= begin <= at]
            where = f"{messages[before[-1]]['role']} message {before[-1]}" if before else "the beginning"
            was, becomes = (one[max(0, k - 8) : k + 24] for one, k in ((text, at), (now, then)))
            what = (
                f"in a conversation of {len(messages)} messages, {where} changes: {was!r} becomes {becomes!r}"
            )
            remedy = "use a template that only appends; chat_template.jinja in the model's folder is it"
            raise ConfigError(f"data.template: the chat template rewrites what was there: {what} ({remedy})")


@dataclass(frozen=True)
class Call:
    """A call of a tool that the policy has written. Where it is none, `error` says why."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None


def call_format(tokenizer: Any) -> str:
    """Return how a policy of this tokenizer writes calls: by `response_template`, which transformers parses;
    else `hermes`, JSON in <tool_call>, or `json`, an object that is the whole turn, whichever its chat
    template speaks of. Raises ConfigError where it speaks of none."""
    if getattr(tokenizer, "response_template", None):
        return "response_template"
    source = str(tokenizer.chat_template)
    if re.search(r"""<tool_call>(?:\\n|\s)*\{\s*\\*["']name""", source):
        return "hermes"
    if re.search(r"""\\?["']parameters\\?["']\s*:""", source):
        return "json"
    what = (
        'speaks of no format of calls that is known: <tool_call>{...}</tool_call> or {"name", "parameters"}'
    )
    raise ConfigError(f"rollout.tools: the chat template {what} (give the tokenizer a response_template)")


def parse_calls(tokens: Sequence[int], tokenizer: Any, form: str, prefix: str = "") -> tuple[str, list[Call]]:
    """Return what the policy said besides calls, and its calls in their order. Never raises for what the
    policy wrote.

    form: see `call_format`; prefix: how the template begins an assistant's turn"""
    if form == "response_template":
        try:
            message = tokenizer.parse_response(list(tokens), prefix=prefix)
        except Exception as error:  # noqa: BLE001 (whatever it raises about what the policy wrote)
            return policy_text(tokenizer, tokens), [_failed(first_line(error))]
        found = [one.get("function") for one in message.get("tool_calls") or ()]
        return str(message.get("content") or ""), [_call(one) for one in found]
    text = policy_text(tokenizer, tokens)
    if form == "hermes":
        return _hermes_calls(text)
    assert form == "json"
    begin = _thoughts_end(text)
    at, said = _skip(_SPACE, text, begin), text[:begin].strip()
    if not _JSON_CALL.match(text, at):
        return text, []
    calls: list[Call] = []
    while (at := _skip(_SEPARATORS, text, at)) < len(text):
        try:
            value, at = _JSON.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            return said, [*calls, _failed(f"not JSON: {error}")]
        calls += [_call(one) for one in (value if isinstance(value, list) else [value])]
    return said, calls


def _hermes_calls(text: str) -> tuple[str, list[Call]]:
    """Return what stands around `<tool_call>JSON</tool_call>`, and these calls. A tag within JSON is text."""
    begin = _thoughts_end(text)
    said, calls = [text[:begin]], list[Call]()
    while (tag := text.find(_CALL_BEGINS, begin)) >= 0:
        said.append(text[begin:tag])
        behind = tag + len(_CALL_BEGINS)
        try:
            value, behind = _json_behind(text, tag)
            behind = _skip(_SPACE, text, behind)
            if behind < len(text) and not text.startswith((_CALL_ENDS, _CALL_BEGINS), behind):
                raise ValueError("something follows it")
            calls.append(_call(value))
            begin = behind + len(_CALL_ENDS) * text.startswith(_CALL_ENDS, behind)
        except (ValueError, RecursionError) as error:
            calls.append(_failed(f"not JSON: {error}"))
            end = text.find(_CALL_ENDS, behind)
            begin = len(text) if end < 0 else end + len(_CALL_ENDS)
    said.append(text[begin:])
    return "\n".join(filter(None, map(str.strip, said))), calls


def _thoughts_end(text: str) -> int:
    """Return where the thoughts of a turn end, 0 without thoughts. Tags in thoughts are no calls.

    That is behind the first `</think>`, unless it stands in the JSON of a call."""
    end = text.find(_THOUGHTS_END)
    tag = text.find(_CALL_BEGINS)
    if 0 <= tag < end and not text.lstrip().startswith("<think>"):
        with suppress(ValueError, RecursionError):
            if _json_behind(text, tag)[1] > end:
                return 0
    return 0 if end < 0 else end + len(_THOUGHTS_END)


def _json_behind(text: str, tag: int) -> tuple[Any, int]:
    """Return the JSON value behind a tag, and where it ends. Raises ValueError and RecursionError."""
    return _JSON.raw_decode(text, _skip(_SPACE, text, tag + len(_CALL_BEGINS)))


def _skip(characters: re.Pattern[str], text: str, at: int) -> int:
    """Return where the run of such characters at `at` ends."""
    found = characters.match(text, at)
    return found.end() if found else at


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
    """Return what a template tells of the functions `module:function`, and of the tools of MCP servers, by
    path. Raises ConfigError as megarl.agents.tools.schema and megarl.agents.mcp_tools.list_tools, and where one
    has the name of another."""
    found: dict[str, dict[str, Any]] = {}
    for path in tools:
        found |= list_tools(path) if path.startswith(MCP) else {path: schema(path)}
    names = [one["function"]["name"] for one in found.values()]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"rollout.tools: several tools are called {', '.join(sorted(twice))} (rename one)")
    return found


def tool_calls(chat: ChatTurns, paths: Mapping[str, str]) -> EpisodeFunction:
    """Return the episode of `rollout.tools`: the policy answers; while it calls tools they are run, those of
    one turn at once, and it is shown what they give, in the order of its calls. An answer without calls is
    the end.

    paths: of the tools that `chat` tells of, by name"""
    form = call_format(chat.tokenizer)
    beginning = chat.text_behind([{"role": "user", "content": "?"}])

    async def episode(prompt: Prompt, policy: Policy) -> None:
        for turns in count():
            turn = await policy.generate()
            _, calls = parse_calls(turn.tokens, chat.tokenizer, form, beginning)
            if (
                not calls or turn.finish == "length"
            ):  # the end was cut off: what it called may be another thing
                return
            running = (_run(policy, paths, i, call) for i, call in enumerate(calls))
            shown: list[Message] = []
            for call, result in zip(
                calls, await asyncio.gather(*running, return_exceptions=True), strict=True
            ):
                if isinstance(result, BaseException):
                    raise result
                shown.append(
                    {
                        "role": "tool",
                        "name": call.name or "unknown",
                        "tool_call_id": call_id(turns, len(shown)),
                        "content": result,
                    }
                )
            policy.observe(chat.after(shown, turn.tokens))

    return episode


async def _run(policy: Policy, paths: Mapping[str, str], number: int, call: Call) -> str:
    """Return what a call gives, or the error that the policy is shown instead."""
    if call.error is not None:
        return call.error
    if number >= _MOST_CALLS:
        return f"error: only the first {_MOST_CALLS} calls of a turn are run"
    if call.name not in paths:
        return f"error: there is no tool {call.name!r} (there is: {', '.join(paths)})"
    try:
        return str(await policy.call(paths[call.name], **call.arguments))
    except ToolError as error:
        return f"error: {error}"


def play(chat: ChatTurns | None) -> EpisodeFunction:
    """Return the episode of `rollout.environment`: each turn of the policy is answered, as by a user where
    `chat` is given, until the environment says that this is the end; its verdict is the response's."""

    async def episode(prompt: Prompt, policy: Policy) -> Verdict:
        written: Sequence[int] = ()
        done, shown = False, await policy.reset()
        if shown in (prompt.question, prompt.text):
            shown = ""
        with suppress(EpisodeTruncated):  # what was reached until then counts
            while not done:
                if shown:
                    said = [{"role": "user", "content": shown}]
                    policy.observe(chat.after(said, written) if chat else shown)
                turn = await policy.generate()
                written = turn.tokens
                shown, reward, done = await policy.step(turn.text)
                policy.reward(reward)
        return await policy.verdict()

    return episode


def call_id(turn: int, number: int) -> str:
    """Return the name of a call: nine characters, as Mistral's templates want them."""
    return f"c{turn % 10000:04}{number % 10000:04}"
