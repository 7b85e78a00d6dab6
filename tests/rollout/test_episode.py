"""Episodes that do what they should not: the response is not judged, and the rollout goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megarl.config.errors import ConfigError
from megarl.config.schema import Config
from megarl.data.prompts import Prompt
from megarl.rewards.verdict import Verdict
from megarl.rollout.episode import Policy
from megarl.rollout.rank import RolloutRank
from megarl.rollout.sampling import Completion, SamplingParams
from megarl.rollout.transformers_engine import TransformersEngine
from tests.engines import load_folder
from tests.rollout.conftest import TINIEST, threads
from tests.tiny_models import make_tiny_model


async def cancels_itself(prompt: Prompt, policy: Policy) -> None:
    await policy.generate()
    raise asyncio.CancelledError


async def returns_a_list(prompt: Prompt, policy: Policy) -> Any:
    await policy.generate()
    return [1]


async def raises(prompt: Prompt, policy: Policy) -> None:
    await policy.generate(max_tokens=2)
    raise KeyError("row")


async def says_nothing(prompt: Prompt, policy: Policy) -> bool:
    return True


async def shows_too_much(prompt: Prompt, policy: Policy) -> None:
    policy.observe([5] * 30)
    await policy.generate()


async def raises_in_a_group(prompt: Prompt, policy: Policy) -> None:
    await policy.generate(max_tokens=2)
    async with asyncio.TaskGroup() as group:
        group.create_task(raises(prompt, policy))


async def without_room_in_a_group(prompt: Prompt, policy: Policy) -> None:
    """Truncated, which is for the verifier to judge."""
    await policy.generate(max_tokens=2)
    policy.observe([5] * 30)
    async with asyncio.TaskGroup() as group:
        group.create_task(policy.generate())


class Right:
    def verify(self, items: list[Any]) -> list[Verdict]:
        return [Verdict(True) for _ in items]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", **TINIEST)


def drawn(folder: Path, episode: str, most: float = 1.0) -> list[Any]:
    """The responses of a step."""
    settings = {"prompts": 2, "group_size": 2, "max_response_tokens": 8, "episode": f"{__name__}:{episode}"}
    config = Config(
        recipe="grpo",
        run_dir="runs/x",
        steps=1,
        model={"path": folder},
        rollout=settings,
        reward={"max_unjudged": most},
    )
    engine = TransformersEngine(folder)
    engine.start()
    load_folder(engine, version=1)
    prompts = iter([Prompt(i, "", (5, 6 + i), "") for i in range(9)])
    rank = RolloutRank(
        config,
        threads(1)[0],
        engine,
        Right(),  # type: ignore[arg-type]
        AutoTokenizer.from_pretrained(folder),
        draw=lambda n: [next(prompts) for _ in range(n)],
    )
    try:
        return rank.collect(1).responses
    finally:
        rank.close()


@pytest.mark.parametrize(
    ("episode", "error", "length"),
    [
        ("cancels_itself", "cancelled by itself", 8),
        ("returns_a_list", "it returned list", 8),
        ("raises", "KeyError: 'row'", 2),
        ("says_nothing", "before the policy had written anything", 1),
        ("shows_too_much", "before the policy had written anything", 1),
        ("raises_in_a_group", "ExceptionGroup", 4),
    ],
)
def test_nobody_has_judged(folder: Path, episode: str, error: str, length: int) -> None:
    for response in drawn(folder, episode):
        assert not response.judged and not response.correct
        assert response.error.startswith("rollout.episode: ") and error in response.error
        assert response.length == response.extent == length


def test_what_ran_out_of_room_in_a_group_is_truncated(folder: Path) -> None:
    for response in drawn(folder, "without_room_in_a_group"):
        assert response.judged and response.correct and response.truncated and response.length == 2


def test_the_run_ends_where_too_many_are_not_judged(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward.max_unjudged: 4 of 4 .*KeyError: 'row'"):
        drawn(folder, "raises", most=0.5)


def test_who_waits_is_not_seated() -> None:
    """Of two calls until both have ended; in the engine it has a seat, whatever else it waits for."""
    seen: list[tuple[str, bool]] = []
    opened = asyncio.Event()

    class Client:
        engine = None

        async def generate(self, *_: Any, **__: Any) -> Completion:
            seen.append((policy.waiting, policy.seated))
            return Completion([5], [0.0], "stop", [1])

    async def first() -> str:
        while policy.calls < 2:
            await asyncio.sleep(0)
        return "1"

    async def second() -> str:
        await opened.wait()
        return "2"

    async def act() -> None:
        calls = asyncio.gather(policy.call(first), policy.call(second))
        while policy.calls < 2 or len(policy.written.journal[0]) < 5:
            await asyncio.sleep(0)
        seen.append((policy.waiting, policy.seated))
        await policy.generate()
        opened.set()
        await calls
        seen.append((policy.waiting, policy.seated))

    told: list[bool] = []
    client: Any = Client()
    policy = Policy(Prompt(1, "", (3,), ""), client, 0, SamplingParams(9))
    policy.turned = lambda: told.append(policy.seated)
    asyncio.run(asyncio.wait_for(act(), 60))
    assert seen == [("second", False), ("second", True), ("", True)]
    assert told == [False, False, False, True, False, True]
