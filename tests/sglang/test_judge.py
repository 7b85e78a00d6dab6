"""A judge behind a real SGLang server on a CPU, of a tiny model that writes noise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from megarl.config.schema import JudgeConfig
from megarl.rewards.judge import Judge, Opinion
from tests.sglang.test_servers import Server
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("judge")
    folder = make_tiny_model(
        place / "tiny", "qwen3", tied=True, head_dim=16, hidden=64, ffn=96, max_positions=4096
    )
    made = Server(folder, place / "log")
    # Else noise may be whitespace of a JSON object without end.
    made.start("--served-model-name", "tiny-judge", "--constrained-json-disable-any-whitespace")
    yield made
    made.kill()


def ask(server: Server, **settings: Any) -> list[Opinion]:
    config = JudgeConfig(url=f"{server.url}/v1", model="tiny-judge", timeout=300.0, **settings)

    async def run() -> list[Opinion]:
        judge = Judge(config, seed=0)
        try:
            answers = ("4", "It is <|im_end|> four.", "Score: 10")
            return await asyncio.gather(*(judge.score("What is 2 + 2?", "4", answer) for answer in answers))
        finally:
            await judge.close()

    return asyncio.run(run())


def test_noise_is_ungraded(server: Server) -> None:
    for opinion in ask(server, max_completion_tokens=16):
        assert opinion.score is None
        assert opinion.costs["calls"] == 1 and opinion.costs["prompt_tokens"] > 100
        assert opinion.costs.keys() & {"ungraded_length", "ungraded_parse"}, opinion


def test_a_schema_forces_a_score(server: Server) -> None:
    """Even noise is then a score; equal requests give equal scores."""
    opinions = ask(server, format="json", max_completion_tokens=64)
    scores = [opinion.score for opinion in opinions]
    assert all(score is not None and 0 <= score <= 1 and (10 * score).is_integer() for score in scores), (
        opinions
    )
    assert [opinion.score for opinion in ask(server, format="json", max_completion_tokens=64)] == scores
    votes = ask(server, format="json", max_completion_tokens=64, votes=3, temperature=1.0)
    assert all(opinion.score is not None and opinion.costs["calls"] == 3 for opinion in votes)
