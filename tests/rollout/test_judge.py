"""A judge in the rollouts of a real engine: verdicts, terms, ungraded samples, metrics, aborted responses."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from megarl.config.errors import ConfigError
from megarl.config.schema import JUDGE, Config
from megarl.data.prompts import ProblemSet, Prompt
from megarl.data.sample import Sample, TokenData
from megarl.rewards.judge import Judge
from megarl.rewards.pool import VerifierPool
from megarl.rewards.verdict import GradedResponse, Verdict
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.grading import Grader
from megarl.rollout.rank import RolloutRank
from tests.engines import load_folder
from tests.judge_server import Endpoint, get_code, serve, split_quotes
from tests.rollout.conftest import TINIEST, state_of, threads
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", **TINIEST)
    engine = TransformersEngine(folder, eos_ids=range(1, 40), max_batch=8)
    engine.start()
    load_folder(engine, version=3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"{a}+{b}=?" for a in range(1, 4) for b in range(1, 4)]
    prompts = [
        Prompt(100 + i, t, tuple(tokenizer(t).input_ids), str(i), question=t) for i, t in enumerate(texts)
    ]
    return engine, tokenizer, prompts


def make_config(endpoint: Endpoint, **reward: Any) -> Config:
    judge = {"url": endpoint.url, "model": "judge", "retries": 0, **reward.pop("judge", {})}
    return Config(
        recipe="dapo",
        run_dir="runs/x",
        steps=1,
        model={"path": "models/x"},
        rollout={
            "prompts": 4,
            "group_size": 3,
            "max_response_tokens": 12,
            "dynamic_sampling": {"enabled": False},
        },
        reward={"max_ungraded": 1.0, "judge": judge, **reward},
        seed=5,
    )


def by_length(body: dict[str, Any]) -> str:
    """Score the number of characters of the response, up to 9; no score for those that are divisible by 5."""
    length = len(split_quotes(body)[1]["response"])
    return "I cannot tell." if length % 5 == 0 else f"Score {get_code(body)}: {min(length, 9)}"


class EvenLength:
    """Call answers of an even length right."""

    def verify(self, items: Sequence[tuple[Any, ...]]) -> list[Verdict]:
        return [Verdict(len(item[0]) % 2 == 0) for item in items]


def collect(world: Any, config: Config, verifier: Any, act: Any = lambda rank: rank.collect(1)) -> Any:
    engine, tokenizer, prompts = world
    endless = itertools.cycle(prompts)
    rank = RolloutRank(
        config,
        threads(1)[0],
        engine,
        verifier,
        tokenizer,
        take_prompts=lambda n: list(itertools.islice(endless, n)),
    )
    try:
        return act(rank)
    finally:
        rank.close()


def decode_texts(batch: Any, tokenizer: Any) -> list[tuple[Sample, str]]:
    pairs = [pair for group in batch.groups for pair in group.texts(tokenizer)]
    assert len(pairs) == 12
    return pairs


def test_a_judge_as_a_term(world: Any) -> None:
    with serve(by_length) as endpoint:
        config = make_config(endpoint, judge={"weight": 0.5, "concurrency": 3})
        batch, state = collect(world, config, EvenLength(), lambda rank: (rank.collect(1), state_of(rank)))
        assert endpoint.most <= 3
    counted, agreements, calls = [], [], 0
    for sample, text in decode_texts(batch, world[1]):
        shown = text.rpartition("</think>")[2].strip("\n")
        calls += bool(shown.strip())
        if sample.graded:
            score = sample.terms[JUDGE]
            counted.append(sample)
            agreements.append((len(text) % 2 == 0) == (score >= 0.5))
            assert sample.reward == pytest.approx((1 if sample.correct else -1) + 0.5 * score)
        else:
            assert sample.error == "reward.judge: the last line of a reply is no score line"
            assert sample.judge["ungraded_parse"] == 1 and not sample.terms
    metrics = batch.metrics
    assert 0 < len(counted) < 12, "the random model should give some of both"
    assert metrics["reward/ungraded"] == (12 - len(counted)) / 12
    assert metrics["reward/judge_ungraded_parse"] == 12 - len(counted)
    assert metrics["reward/judge_agreement"] == pytest.approx(sum(agreements) / len(agreements))
    assert metrics["reward/term_judge"] == pytest.approx(sum(s.terms[JUDGE] for s in counted) / len(counted))
    assert metrics["reward/judge_calls"] + metrics["reward/judge_cached"] == calls
    assert metrics["reward/judge_calls"] == len(endpoint.bodies)
    assert metrics["reward/judge_prompt_tokens"] == 100 * len(endpoint.bodies)
    assert json.dumps(state)  # a checkpoint can hold it


def brevity(response: GradedResponse) -> float:
    """Return the verdict's score, to show that a term sees it."""
    return float(response.verdict.score or 0.0)


def test_a_judge_as_the_verifier_and_a_term_that_sees_its_verdict(world: Any) -> None:
    term = {"function": f"{__name__}:brevity", "weight": 0.0}
    with serve(by_length) as endpoint:
        config = make_config(endpoint, verifier=JUDGE, terms={"seen": term}, judge={"threshold": 0.6})
        with VerifierPool(JUDGE, 1, 60.0, terms=config.reward.terms) as pool:
            batch = collect(world, config, pool)
    for sample, _ in decode_texts(batch, world[1]):
        if sample.graded:
            assert sample.score is not None and sample.correct == (sample.score >= 0.6)
            assert sample.terms == {"seen": sample.score}
            assert sample.reward == pytest.approx(2 * sample.score - 1)
    assert "reward/judge_agreement" not in batch.metrics and batch.metrics["reward/score"] > 0


def test_evaluations_ask_a_verifier_only(world: Any) -> None:
    def evaluate(rank: RolloutRank) -> Any:
        return rank.evaluate([ProblemSet(world[2][:3], 1)])

    with serve(by_length) as endpoint:
        collect(world, make_config(endpoint), EvenLength(), evaluate)
        assert not endpoint.bodies  # a term
        # An evaluation has no budget.
        config = make_config(endpoint, verifier=JUDGE, judge={"max_calls": 1})
        with VerifierPool(JUDGE) as pool:
            [(_, groups)] = collect(world, config, pool, evaluate)
            assert not pool.pids  # no process is needed
    assert len(endpoint.bodies) == sum(bool(s.judge) for group in groups for s in group.samples) > 1


def test_nothing_graded_ends_the_run_with_the_judges_error(world: Any) -> None:
    with serve(lambda body: (402, {}, {})) as endpoint:
        config = make_config(endpoint, max_ungraded=0.1)
        with pytest.raises(ConfigError, match=r"^reward\.max_ungraded: .*reward\.judge: .* HTTP 402"):
            collect(world, config, EvenLength())


def test_an_aborted_response_is_not_graded_and_its_call_is_not_lost(tmp_path: Path, world: Any) -> None:
    """`take_queue` returns responses that wait for the judge; the call continues and fills the cache."""
    gate, asked = threading.Event(), threading.Event()

    def wait(body: dict[str, Any]) -> str:
        asked.set()
        gate.wait(60)
        return f"Score {get_code(body)}: 7"

    async def act(grader: Grader, judge: Judge) -> list[Sample]:
        reported: list[Sample] = []

        async def report(samples: list[Sample]) -> None:
            reported.extend(samples)

        running = asyncio.create_task(grader.run(report))
        await asyncio.sleep(0)
        data = TokenData([50, 51, 52], [-1.0] * 3, "stop")
        sample, prompt = Sample.from_data(data, 0, id=7, finish_reason="stop"), world[2][0]
        grader.add(sample, prompt, None)
        await asyncio.to_thread(asked.wait, 60)
        taken = await grader.take_queue()
        gate.set()
        while not judge.cache.get(next(iter(judge._running), "")) and judge._running:
            await asyncio.sleep(0.01)
        assert taken == [sample] and not reported
        grader.add(sample, prompt, None)
        async with asyncio.timeout(60):
            while not reported:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        await judge.close()
        return reported

    with serve(wait) as endpoint, ThreadPoolExecutor(1) as pool:
        config = make_config(endpoint, verifier=JUDGE)
        judge = Judge(config.reward.judge, 0)
        grader = Grader(config, SimpleNamespace(verify=lambda items: []), world[1], pool, judge)
        [sample] = asyncio.run(act(grader, judge))
        assert len(endpoint.bodies) == 1
    assert sample.score == 0.7 and sample.judge["cached"] == 1


def grade_one(world: Any, config: Config, prompt: Prompt, judge: Any) -> Sample:
    async def act(grader: Grader) -> Sample:
        reported: list[Sample] = []

        async def report(samples: list[Sample]) -> None:
            reported.extend(samples)

        running = asyncio.create_task(grader.run(report))
        await asyncio.sleep(0)
        grader.with_terms, grader.max_tokens = True, 12
        data = TokenData([50, 51, 52], [-1.0] * 3, "length")
        grader.add(Sample.from_data(data, 0, id=7, finish_reason="length"), prompt, None)
        async with asyncio.timeout(60):
            while not reported and not running.done():
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        await judge.close()
        return reported[0]

    with ThreadPoolExecutor(1) as pool:
        return asyncio.run(act(Grader(config, EvenLength(), world[1], pool, judge)))


def test_a_judge_that_only_measures_leaves_no_response_ungraded(world: Any) -> None:
    with serve(lambda body: (402, {}, {})) as endpoint:
        config = make_config(endpoint, judge={"weight": 0.0})
        sample = grade_one(world, config, world[2][0], Judge(config.reward.judge, 0))
    assert sample.graded and sample.judge["ungraded_http"] == 1 and JUDGE not in sample.terms


def test_an_unexpected_error_leaves_the_response_ungraded(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Judge, *_: Any, **options: Any) -> None:
        raise KeyError("x")

    monkeypatch.setattr(Judge, "score", fail)
    with serve(by_length) as endpoint:
        config = make_config(endpoint)
        sample = grade_one(world, config, world[2][0], Judge(config.reward.judge, 0))
    assert not sample.graded and sample.judge == {"ungraded_unexpected": 1.0}
    assert sample.error is not None and sample.error.startswith("reward.judge: unexpected KeyError in fail")


def test_a_thought_that_the_prompt_has_opened_is_not_judged(world: Any) -> None:
    text = "1+1=?<think>"
    tokens = tuple(world[1](text).input_ids)
    assert world[1].decode(tokens).endswith("<think>")
    with serve(by_length) as endpoint:
        config = make_config(endpoint, verifier=JUDGE)
        prompt = Prompt(1, text, tokens, "2", question="1+1=?")
        sample = grade_one(world, config, prompt, Judge(config.reward.judge, 0))
        assert not endpoint.bodies
    assert sample.graded and sample.score == 0.0 and not sample.judge
