"""The examples of docs/episodes.md run."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.agents.chat import ChatTurns, play, schemas, tool_calls
from megarl.agents.endpoint import Endpoint
from megarl.agents.tools import ToolPool, import_environment
from megarl.config.load import parse_yaml
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
from tests.docs.test_docs import ROOT, blocks, written

FILES = written("episodes.md")
SHOP_SERVER = "mcp:python shop_server.py"
USER = {"role": "user", "content": "1 + 2?"}
# Speaks the protocol with the standard library only, in place of an environment of verifiers.
OUTSIDE = """
import json, sys, urllib.request
given = json.load(sys.stdin)
body = {"messages": [{"role": "user", "content": given["row"]["question"]}]}
headers = {"Authorization": "Bearer " + given["api_key"], "Content-Type": "application/json"}
request = urllib.request.Request(given["base_url"] + "/chat/completions", json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request, timeout=20))
print(0.5 * (answer["choices"][0]["message"]["content"] == given["row"]["answer"]))
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)


def example(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def policy_of(script: list[str], template: str = CHATML, tools: Any = ()) -> ScriptedPolicy:
    tokenizer = merging_tokenizer(template)
    prompt = prompt_of(ChatTurns(tokenizer, tools).first([USER]), "1 + 2?")
    return ScriptedPolicy(prompt, tokenizer, script)


def test_its_configurations_name_its_examples() -> None:
    named = [parse_yaml(text, "episodes.md")["rollout"] for text in blocks(ROOT / "docs/episodes.md", "yaml")]
    for rollout in named:
        rollout.pop("turns", None)
        arguments = rollout.get("environment_arguments")
        assert arguments is None or import_environment(rollout["environment"], arguments)
        for value in (value for value in rollout.values() if value is not arguments):
            for path in value if isinstance(value, list) else [value]:
                assert path == SHOP_SERVER or callable(example(path))
    keys = ["episode", "tools", "tools", *2 * ["environment", "environment_arguments"], "agent"]
    assert [key for rollout in named for key in rollout] == keys


def test_calculator() -> None:
    policy = policy_of([" Call: calc(1 + 2)", " Call: calc(one)", " Answer: 3"])
    policy.tools.functions = {"calculator:calc": example("calculator:calc")}  # type: ignore[union-attr]
    assert asyncio.run(example("calculator:solve")(policy.prompt, policy)) is True
    text = policy.tokenizer.decode(policy.tokens)
    assert "Call: calc(1 + 2)<|im_end|>\nResult: 3\n" in text and "\nResult: error: AttributeError" in text
    assert asyncio.run(example("calculator:solve")(policy.prompt, policy_of(["3"]))) is False


def test_twice() -> None:
    policy = policy_of(["3", "4"])
    assert asyncio.run(example("twice:twice")(policy.prompt, policy)) is None
    assert policy.tokenizer.decode(policy.tokens).endswith(
        "\n3<|im_end|>\n<|im_start|>user\nCheck your answer, and give it again.<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>"
    )


def test_shop() -> None:
    tools = schemas(["shop:price"])
    script = ['<tool_call>{"name": "price", "arguments": {"fruit": "pear"}}</tool_call>', "4"]
    policy = policy_of(script, QWEN25, tools.values())
    policy.tools.functions = {"shop:price": example("shop:price")}  # type: ignore[union-attr]
    episode = tool_calls(ChatTurns(policy.tokenizer, tools.values()), {"price": "shop:price"})
    assert asyncio.run(episode(policy.prompt, policy)) is None  # type: ignore[arg-type]
    text = policy.tokenizer.decode(policy.tokens)
    assert "Look up the price of a fruit." in text and "<tool_response>\n4\n</tool_response>" in text


@pytest.mark.slow
def test_shop_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together with a function, in real processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    tools = schemas(["shop:price", SHOP_SERVER])
    calls = [{"name": name, "arguments": {"fruit": "pear"}} for name in ("price", "stock")]
    script = ["".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls), "none"]
    policy = policy_of(script, QWEN25, tools.values())
    episode = tool_calls(
        ChatTurns(policy.tokenizer, tools.values()),
        {tool["function"]["name"]: path for path, tool in tools.items()},
    )

    async def run() -> None:
        policy.tools = ToolPool(workers=1, seconds=60.0)
        try:
            await episode(policy.prompt, policy)
            assert await policy.call(f"{SHOP_SERVER}#stock", fruit="apple") == "12"
        finally:
            policy.tools.close()
            await asyncio.sleep(0)

    asyncio.run(run())
    text = policy.tokenizer.decode(policy.tokens)
    assert "Say how many of a fruit there are." in text
    assert "<tool_response>\n4\n</tool_response><tool_response>\n0\n</tool_response>" in text


def test_guess() -> None:
    guess, row = example("guess:Guess")(), {"question": "Which number from 1 to 100 is it?"}
    assert guess.reset(row, 7) == row["question"]
    low, high = 1, 100
    for _ in range(7):
        shown, _, done = guess.step(str((low + high) // 2))
        if done:
            break
        low, high = ((low + high) // 2 + 1, high) if shown == "higher" else (low, (low + high) // 2 - 1)
    assert guess.verdict()
    again = example("guess:Guess")()
    again.reset(row, 7)
    assert again.number == guess.number and not again.verdict()


@pytest.mark.parametrize("chat", [True, False])
def test_guess_is_played(chat: bool) -> None:
    """With a chat template the environment's output is a user turn; without one it is plain text."""
    policy = policy_of(["1", "100", "nothing"])
    policy.tools.environment = example("guess:Guess")  # type: ignore[union-attr]
    episode = play(ChatTurns(policy.tokenizer) if chat else None)
    verdict = asyncio.run(episode(policy.prompt, policy))
    assert not verdict.correct and verdict.graded and policy.truncated
    text = policy.tokenizer.decode(policy.result().tokens)
    said = "1<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n100<|im_end|>"
    assert text.startswith(said if chat else "1<|im_end|>higher100<|im_end|>lower")
    assert trained_on(policy) == policy.said


def agent_of(policy: ScriptedPolicy, agent: Any) -> Any:
    async def run() -> Any:
        endpoint = Endpoint(policy.tokenizer, 30.0)
        try:
            return await endpoint.episode(agent)(policy.prompt, policy)  # type: ignore[arg-type]
        finally:
            await endpoint.close()

    return asyncio.run(run())


def test_agent() -> None:
    policy = policy_of(["2", "3 it is"])
    assert agent_of(policy, example("agent:agent")) is True
    asked = "<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n3 it is<|im_end|>"
    assert policy.tokenizer.decode(policy.tokens).endswith(asked)


def test_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = importlib.import_module("outside")
    (tmp_path / "script.py").write_text(OUTSIDE)
    monkeypatch.setattr(outside, "ENVIRONMENT", Path(sys.executable).parent)
    monkeypatch.setattr(outside, "SCRIPT", tmp_path / "script.py")
    policy = policy_of(["3"])
    assert agent_of(policy, outside.agent) == 0.5
    assert policy.said == [(*encode(policy.tokenizer, "3"), END)]
    (tmp_path / "script.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="ended with 3"):
        agent_of(policy_of(["3"]), outside.agent)
