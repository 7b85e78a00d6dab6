"""Agents without any code of megarl's, through the OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from msgspec import structs

from megarl.agents.chat import opening_tokens
from megarl.agents.endpoint import Endpoint
from megarl.agents.episode import EpisodeTruncated
from megarl.config.errors import ConfigError, EngineError
from megarl.data.sample import TokenData
from megarl.rollout.episode import EpisodeAborted
from tests.agents.talk import (
    CHATML,
    END,
    QWEN25,
    ScriptedPolicy,
    encode,
    merging_tokenizer,
    prompt_of,
    trained_on,
)

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


async def openai_agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """An agent that uses only the openai package."""
    from openai import AsyncOpenAI

    messages: list[Any] = [{"role": "system", "content": "Use the tool."}]
    messages.append({"role": "user", "content": row["question"]})
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            answer = await client.chat.completions.create(
                model="gpt-5", messages=messages, tools=[TOOL], temperature=0.7
            )
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(message.content == row["answer"])
            for call in message.tool_calls:
                numbers = json.loads(call.function.arguments)
                result = str(numbers["a"] + numbers["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def policy_of(script: Sequence[Any], template: str = CHATML, first: str | None = None) -> ScriptedPolicy:
    tokenizer = merging_tokenizer(template)
    if first is None:
        return ScriptedPolicy(prompt_of(opening_tokens(tokenizer), "one"), tokenizer, script)
    return ScriptedPolicy(prompt_of(encode(tokenizer, first), "one"), tokenizer, script)


def run(policy: ScriptedPolicy, agent: Any, seconds: float = 20.0) -> Any:
    async def running() -> Any:
        endpoint = Endpoint(policy.tokenizer, seconds)
        try:
            return await endpoint.episode(agent)(policy.prompt, policy)
        finally:
            await endpoint.close()
            assert not endpoint.sessions

    return asyncio.run(running())


def asking(
    *bodies: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[Any, list[tuple[int, Any]]]:
    """Make an agent that sends these requests one after the other; return it and the list of its answers."""
    answers: list[tuple[int, Any]] = []

    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> bool:
        bearer = headers or {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=bearer) as client:
            for body in bodies:
                async with client.post(f"{base_url}/chat/completions", json=body) as answer:
                    answers.append((answer.status, await answer.json()))
        return True

    return agent, answers


def user(*texts: str) -> list[dict[str, str]]:
    """Make alternating messages of user and assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_an_openai_agent_is_captured():
    policy = policy_of([f"an {CALL}", "3"], QWEN25)
    tokenizer = policy.tokenizer
    assert run(policy, openai_agent) == 1.0
    assert policy.said == [(*encode(tokenizer, f"an {CALL}"), END), (*encode(tokenizer, "3"), END)]
    assert trained_on(policy) == policy.said
    again = ScriptedPolicy(policy.prompt, tokenizer, [], earlier=policy.result())
    again.limits = policy.limits
    assert run(again, openai_agent) == 1.0 and not again.said and again.result() == policy.result()
    text = tokenizer.decode(policy.tokens)
    assert text.startswith("<|im_start|>system\nUse the tool.") and '"name": "add"' in text
    assert f"<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nan {CALL}<|im_end|>\n" in text
    assert text.endswith(
        "<|im_start|>user<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    )


def test_a_stream_is_one_piece():
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> Any:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            asked = {"model": "x", "messages": user("one"), "tools": [TOOL]}
            usage = {"include_usage": True}
            async with client.chat.completions.stream(**asked, stream_options=usage) as stream:
                answer = await stream.get_final_completion()
            whole = await client.chat.completions.create(model="x", messages=[
                *asked["messages"], answer.choices[0].message,
                {"role": "tool", "tool_call_id": "c00000000", "content": "3"},
            ], tools=[TOOL])  # fmt: skip
            assert whole.usage.total_tokens > answer.usage.total_tokens > 0
            return answer.choices[0]

    choice = run(policy_of([f"an {CALL}", "3"], QWEN25), agent)
    (call,) = choice.message.tool_calls
    assert choice.message.content == "an" and choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})


def test_turns_that_no_encoder_writes():
    """Invalid UTF-8, and letters spelled without their merged token, stay as sampled."""
    drawn = [
        [200, *range(60, 66), END],
        [*encode(merging_tokenizer(), "o"), *encode(merging_tokenizer(), "ne"), END],
    ]
    policy = policy_of([*drawn, "two"], first="<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n")
    first = policy.tokenizer.decode(drawn[0][:-1])
    bodies = [{"messages": user("one", first, "two", "one", "an")[:n]} for n in (1, 3, 5)]
    agent, answers = asking(*bodies)
    assert run(policy, agent) is True
    assert [status for status, _ in answers] == [200] * 3
    assert [list(tokens) for tokens in policy.said[:2]] == drawn and trained_on(policy) == policy.said
    assert policy.shown[0] == ()
    usage = answers[1][1]["usage"]
    assert usage["completion_tokens"] == len(drawn[1])
    assert usage["prompt_tokens"] == len(policy.prompt.tokens) + len(drawn[0]) + len(policy.shown[1])


def test_what_is_asked_for_reaches_the_policy():
    policy = policy_of(["an one two", "two"])
    body = {"messages": user("one"), "stop": [" two"], "max_tokens": 9, "max_completion_tokens": 7, "n": 1,
            "temperature": 0, "response_format": {"type": "text"}, "tools": None}  # fmt: skip
    agent, answers = asking(body)
    assert run(policy, agent) is True
    ((_, params, most),) = policy.client.asked
    assert params.stop == (" two",) and most == 7
    ((status, answer),) = answers
    message = {"role": "assistant", "content": "an one"}
    assert status == 200 and answer["object"] == "chat.completion"
    assert answer["choices"] == [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"n": 2}, "n: must be 1 here (got 2)"),
        ({"logit_bias": {"3": 1}}, "logit_bias: must be {} here"),
        ({"guided_json": {}}, "guided_json: is not known here"),
        ({"tool_choice": "required"}, "tool_choice: must be auto or none"),
        ({"stop": ""}, "stop: must be a text"),
        ({"max_tokens": 0}, "max_tokens: must be an integer >= 1"),
        ({"max_tokens": True}, "max_tokens: must be an integer >= 1"),
        ({"max_completion_tokens": 7.0}, "max_tokens: must be an integer >= 1"),
        ({"messages": []}, "messages: must be a list"),
        ({"messages": [{"content": "x"}]}, "messages[0]: needs a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only texts can be shown"),
        ({"messages": user("one", "two")}, "the last message is the assistant's"),
    ],
)
def test_requests_that_cannot_be_answered(body, what):
    """The agent gets an error and can send another request."""
    policy = policy_of(["two"])
    agent, answers = asking({"messages": user("one"), **body}, {"messages": user("one")})
    assert run(policy, agent) is True
    assert answers[0][0] == 400 and what in answers[0][1]["error"]["message"]
    assert answers[1][0] == 200 and len(policy.said) == 1


@pytest.mark.parametrize(
    ("again", "what"),
    [
        (user("one", "TWO", "one"), 'messages[1].content is "TWO", and was "two": history has to extend'),
        (user("an", "two", "one"), 'messages[0].content is "an", and was "one"'),
        (user("one"), "1 messages do not extend this session's 2"),
        (user("one", "two"), "2 messages do not extend"),
    ],
)
def test_history_must_extend_what_was_sampled(again, what):
    """The episode fails even if the agent catches the error: the policy's own continuation is unknown."""
    policy = policy_of(["two", "one"])
    agent, answers = asking({"messages": user("one")}, {"messages": again})
    with pytest.raises(RuntimeError) as error:
        run(policy, agent)
    assert what in str(error.value) and len(policy.said) == 1
    assert [status for status, _ in answers] == [200] or what in answers[1][1]["error"]["message"]


def test_a_prompt_of_the_rows_must_be_the_agents():
    policy = policy_of(["two"], first="<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n")
    agent, _ = asking({"messages": user("two")})
    with pytest.raises(RuntimeError, match="do not start with the row's prompt"):
        run(policy, agent)


def test_one_request_at_a_time():
    policy, waits = policy_of(["two"]), asyncio.Event()
    says = policy.generate

    async def generate(*args: Any, **kwargs: Any) -> Any:
        await waits.wait()
        return await says(*args, **kwargs)

    policy.generate = generate  # type: ignore[method-assign]

    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> bool:
        one, _ = asking({"messages": user("one")})
        async with asyncio.TaskGroup() as group:
            group.create_task(one(base_url, api_key, row))
            await asyncio.sleep(0.2)
            other, _ = asking({"messages": user("one")})
            try:
                await other(base_url, api_key, row)
            finally:
                waits.set()
        return True

    with pytest.raises(RuntimeError, match="is answering another request"):
        run(policy, agent)
    assert len(policy.said) == 1  # the request that was being answered is still a turn


def test_strangers_are_not_let_in():
    agent, answers = asking({"messages": user("one")}, headers={"Authorization": "Bearer x"})
    policy = policy_of(["two"])
    assert run(policy, agent) is True and answers[0][0] == 401 and not policy.said

    async def lost(base_url: str, api_key: str, row: dict[str, Any]) -> bool:
        headers = {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            async with client.get(f"{base_url}/models") as answer:
                assert (await answer.json())["data"][0]["id"] == "policy"
            async with client.get(base_url.replace(api_key, "other") + "/models") as answer:
                assert answer.status == 404
            async with client.post(f"{base_url}/chat/completions", data=b"{") as answer:
                assert answer.status == 400 and "not JSON" in await answer.text()
            async with client.post(f"{base_url}/chat/completions", data=b" " * (5 << 20)) as answer:
                assert answer.status == 413
        return True

    assert run(policy_of([]), lost) is True


def test_no_turn_left_is_truncated_unless_the_agent_goes_on():
    bodies = [{"messages": user("one")}, {"messages": user("one", "two", "one")}]
    agent, answers = asking(*bodies)
    assert run(policy_of(["two"]), agent) is True
    assert answers[1][0] == 400 and answers[1][1]["error"]["code"] == "context_length_exceeded"

    async def fails(*args: Any) -> None:
        await agent(*args)
        raise KeyError("choices")

    with pytest.raises(EpisodeTruncated):
        run(policy_of(["two"]), fails)


def test_who_asks_again_without_a_turn_left_gets_the_same_error():
    """Clients retry. The policy used up its turns, so the response counts."""
    one, two = {"messages": user("one")}, {"messages": user("one", "two", "one")}
    agent, answers = asking(one, two, two, {"messages": user("one", "two", "an")})
    assert run(policy_of(["two"]), agent) is True
    codes = [answer.get("error", {}).get("code") for _, answer in answers]
    assert codes == [None, *["context_length_exceeded"] * 3]


def test_an_agent_that_does_nothing_or_fails():
    async def sleeps(*_: Any) -> None:
        await asyncio.sleep(600)

    with pytest.raises(
        TimeoutError, match=r"the agent has asked nothing for 0.1 s \(rollout.turns.seconds\)"
    ):
        run(policy_of([]), sleeps, seconds=0.1)

    async def fails(*_: Any) -> None:
        raise ZeroDivisionError("its own")

    with pytest.raises(ZeroDivisionError, match="its own"):
        run(policy_of([]), fails)

    async def waits_while_the_loop_stands_still(*_: Any) -> bool:
        asyncio.get_running_loop().call_soon(time.sleep, 1.5)  # as while engines restart
        await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        return True

    assert run(policy_of([]), waits_while_the_loop_stands_still, seconds=0.3) is True

    async def stays(*_: Any) -> None:
        while True:
            try:
                await asyncio.sleep(0.5)
                return
            except asyncio.CancelledError:
                pass

    with pytest.raises(EngineError, match=r"has not ended 0\.1 s after it was cancelled"):
        run(policy_of([]), stays, seconds=0.1)


def test_an_abort_ends_the_agent():
    ended = []

    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        try:
            await asking({"messages": user("one")})[0](base_url, api_key, row)
            await asyncio.sleep(600)
        finally:
            ended.append(True)

    policy = policy_of([])

    async def aborted(*_: Any, **__: Any) -> None:
        raise EpisodeAborted

    policy.generate = aborted  # type: ignore[method-assign,assignment]
    with pytest.raises(EpisodeAborted):
        run(policy, agent)
    assert ended

    async def cancelled() -> None:
        policy = policy_of(["two"])
        endpoint = Endpoint(policy.tokenizer, 20.0)
        task = asyncio.ensure_future(endpoint.episode(agent)(policy.prompt, policy))
        while not policy.said:
            await asyncio.sleep(0.01)
        assert policy.waiting == "agent"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not endpoint.sessions and not policy.waiting
        await endpoint.close()

    asyncio.run(cancelled())
    assert len(ended) == 2


def test_an_agent_is_ended_though_its_request_is_never_answered():
    """For example if an error has ended the rollout, so that the engine stops generating."""
    policy, asked = policy_of([]), asyncio.Event()

    async def generate(**_: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    policy.generate = generate  # type: ignore[method-assign,assignment]

    async def ended() -> None:
        endpoint = Endpoint(policy.tokenizer, 20.0)
        agent, _ = asking({"messages": user("one")})
        task = asyncio.ensure_future(endpoint.episode(agent)(policy.prompt, policy))
        await asked.wait()
        task.cancel()
        done, _ = await asyncio.wait((task,), timeout=5.0)
        assert done and task.cancelled() and not endpoint.sessions
        await endpoint.close()

    asyncio.run(ended())


def test_an_agent_that_differs_when_it_is_run_again_goes_on_anew():
    policy = policy_of(["two", "one"])
    said = [{"messages": user(*texts)} for texts in (["one"], ["one", "two", "an"], ["one", "two", "ans"])]
    run(policy, asking(*said[:2])[0])
    again = ScriptedPolicy(policy.prompt, policy.tokenizer, ["an"], earlier=policy.result())
    again.limits = policy.limits
    agent, answers = asking(said[0], said[2])
    assert run(again, agent) is True
    assert [answer["choices"][0]["message"]["content"] for _, answer in answers] == ["two", "an"]
    assert trained_on(again) == [policy.said[0], again.said[0]]
    written = structs.replace(
        policy.result(), routed_experts=np.zeros((len(policy.tokens), 1, 2), dtype=np.uint8)
    )
    ends_before = ScriptedPolicy(policy.prompt, policy.tokenizer, ["an"], earlier=written)
    run(ends_before, asking(said[0])[0])
    routing = ends_before.result().routed_experts
    assert routing is not None and len(routing) == len(ends_before.tokens) < len(policy.tokens)


def test_an_agent_that_wants_less_when_it_is_run_again_gets_what_there_is():
    """The prefix already has that length, and an engine must generate at least one token."""
    policy = policy_of([])
    tokens = encode(policy.tokenizer, "an one two")
    begun = TokenData(tokens, [-1.0] * len(tokens), "abort", [3] * len(tokens))
    policy = ScriptedPolicy(policy.prompt, policy.tokenizer, [], earlier=begun)
    policy.observe = lambda shown: None  # type: ignore[method-assign]
    agent, answers = asking({"messages": user("one"), "max_tokens": 2})
    assert run(policy, agent) is True and not policy.said
    assert (
        answers[0][1]["choices"][0]["finish_reason"] == "length" and policy.result().tokens.tolist() == tokens
    )


def test_templates_are_checked_first():
    with pytest.raises(ConfigError, match="writes today's date"):
        Endpoint(merging_tokenizer("{{ strftime_now('%d') }}" + CHATML), 20.0)
    agent, _ = asking({"messages": user("one"), "tools": [TOOL]})
    with pytest.raises(ConfigError, match="does not show tools to the policy"):
        run(policy_of(["two"]), agent)
