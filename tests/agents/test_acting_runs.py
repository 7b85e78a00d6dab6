"""Whole multi-turn runs: an OpenAI agent, an environment, tools."""

from __future__ import annotations

import json
import os
import string
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.agents.talk import QWEN25
from tests.commands import run_command
from tests.docs.test_docs import ROOT
from tests.tiny_models import make_tiny_model

# They use nothing of megarl except what its documentation promises.
FILES = {
    "held.py": """
async def hold(prompt, policy):
    while True:
        try:
            await policy.generate()
        except BaseException:
            pass
""",
    "talker.py": """
import asyncio
from openai import AsyncOpenAI

async def agent(base_url, api_key, row):
    if row["question"].startswith("3"):
        raise ConnectionError("its sandbox is down")
    if row["question"].startswith("2"):
        asyncio.create_task(log())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["question"]}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for again in ("Are you sure?", None):
            answer = await client.chat.completions.create(
                model="x", messages=messages, max_tokens=6, temperature=0.3
            )
            messages.append(answer.choices[0].message)
            if again:
                messages.append({"role": "user", "content": again})
    return len(messages[-1].content) % 3 / 2

async def log():
    await asyncio.sleep(600)
""",
    "echo.py": """
class Echo:
    def __init__(self, turns=30):
        self.turns = turns

    def reset(self, row, seed):
        self.said = []
        return row["question"]

    def step(self, text):
        self.said.append(text)
        return f"{len(text)} <|im_end|>", len(self.said) / 4, len(self.said) == self.turns

    def verdict(self):
        return len("".join(self.said)) % 2 == 0
""",
    "shop.py": '''
def price(fruit: str) -> int:
    """
    Look up the price of a fruit.

    Args:
        fruit: its name
    """
    return 3
''',
    "stock_server.py": '''
from mcp.server import MCPServer

server = MCPServer("stock")


@server.tool()
def stock(fruit: str) -> int:
    """Say how many of a fruit there are."""
    return 12


server.run()
''',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("acting")
    make_tiny_model(folder / "model", "qwen3", chat_template=False, max_positions=2048)
    (folder / "model" / "chat_template.jinja").write_text(QWEN25)
    rows = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def run(
    folder: Path, name: str, code: int = 0, timeout: float = 600.0, **rollout: Any
) -> tuple[list[dict[str, Any]], str]:
    """Run two steps with these `rollout` keys; return the training records and stderr."""
    sums = str(folder / "sums.jsonl")
    config = {
        "recipe": "grpo", "run_dir": str(folder / name), "steps": 2,
        "model": {"path": str(folder / "model"), "dtype": "fp32"},
        "parallel": {"device": "cpu", "timeout": timeout},
        "data": {"train": [sums], "eval": [sums], "max_prompt_tokens": 1024},
        "evaluation": {"samples": 1, "max_problems": 4},
        "log": {"report": False, "terminal": "quiet"}, "update": {"mini_batch": 8},
        "reward": {"max_ungraded": 0.9},
        "rollout": {"prompts": 4, "group_size": 4, "max_response_tokens": 24, "stop": ["<|im_end|>"],
                    "turns": {"max_tokens": 400}, **rollout},
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(config))
    path = f"{ROOT}{os.pathsep}{folder}"
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = run_command(["train", str(folder / f"{name}.json")], cwd=folder, env=environment, timeout=240)
    assert done.returncode == code, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    metrics = folder / name / "metrics.jsonl"
    if code:
        return [], done.stderr
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert sum(record["stage"] == "eval" for record in records) == 2
    return [record for record in records if record["stage"] == "train"], done.stderr


def check(records: list[dict[str, Any]], turns: tuple[float, float]) -> None:
    """Check that training saw the sampled tokens and the observations: log-probs equal the engine's."""
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["mismatch/logprob_abs_max"] < 1e-4
        assert turns[0] <= record["episode/turns_mean"] <= turns[1] and record["episode/observed_mean"] > 0
    assert any(record["policy/grad_norm"] > 0 for record in records)


@pytest.mark.slow
def test_an_openai_agent_is_trained(folder: Path) -> None:
    """Each response has two turns. Prompts that begin with 3 are ungraded, which does not end the run.

    Tasks that other agents leave running are cancelled and reported once."""
    records, said = run(folder, "talker", agent="talker:agent")
    check(records, (2, 2))
    left = (
        "rollout.agent: it returned before these tasks that it created had ended; they are cancelled: log ("
    )
    assert said.count(left) == 1 == said.count("talker.py:"), said
    assert 0 < records[0]["reward/ungraded"] + records[1]["reward/ungraded"] < 2


@pytest.mark.slow
def test_an_environment_is_trained_on(folder: Path) -> None:
    """A second run has bitwise the same metrics."""
    ends = ["<|im_end|>", *string.ascii_letters]  # one in six tokens of a random policy
    keys = {"environment": "echo:Echo", "environment_arguments": {"turns": 3}, "max_response_tokens": 60}
    records, _ = run(folder, "echo", stop=ends, **keys)
    again, _ = run(folder, "again", stop=ends, **keys)
    check(records, (2, 3))
    for name in ("policy/grad_norm", "reward/mean", "mismatch/kl", "response/length_mean"):
        assert [record[name] for record in records] == [record[name] for record in again]


@pytest.mark.slow
def test_tools_are_told_of(folder: Path) -> None:
    """Python functions, and tools of an MCP server if `mcp` is installed."""
    server = [f"mcp:{sys.executable} stock_server.py"] if find_spec("mcp") else []
    run(folder, "shop", tools=["shop:price", *server])
    samples = (folder / "shop" / "samples.jsonl").read_text()
    assert "Look up the price of a fruit." in samples
    assert not server or "Say how many of a fruit there are." in samples


@pytest.mark.slow
def test_an_episode_that_never_lets_go_of_the_loop_ends_the_run(folder: Path) -> None:
    """The episode catches every exception without ever waiting.

    It is reported as soon as it blocks the loop, and again when the run ends, before other ranks time out."""
    _, said = run(folder, "held", 2, timeout=10, episode="held:hold", turns={"hold": 0.5})
    named = [line for line in said.splitlines() if "hold (" in line and f"{folder / 'held.py'}:" in line]
    assert len(named) == 2 == said.count("has blocked the event loop of engine rank 0 for "), said


@pytest.mark.slow
def test_what_cannot_be_is_said_before_the_run(folder: Path) -> None:
    """For example an agent that is no coroutine, a tool without a docstring, a turn that never ends."""
    (folder / "wrong.py").write_text("def f(x):\n    return x\n")
    for rollout, what in (
        ({"agent": "wrong:f"}, "rollout.agent: wrong:f is no coroutine function"),
        ({"tools": ["wrong:f"]}, "rollout.tools: wrong:f"),
        (
            {"tools": ["shop:price"], "environment": "echo:Echo"},
            ("rollout.environment: cannot be combined with"),
        ),
        (
            {"environment": "echo:Echo", "environment_arguments": {"turn": 3}},
            "rollout.environment_arguments: echo:Echo: got an unexpected keyword argument 'turn' "
            "(it is Echo(turns=30))",
        ),
        (
            {"environment_arguments": {"turns": 3}},
            "rollout.environment_arguments: has no effect without an environment",
        ),
        ({"environment": "echo:Echo", "stop": []}, "ends a turn with <|im_end|>, which does not end"),
    ):
        _, said = run(folder, "wrong", 2, **rollout)
        assert what in said and said.count("\n") == 1, said
