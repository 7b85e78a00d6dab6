"""Windows of responses (`rollout.window`): unfinished responses continue in the next step.

New responses replace finished ones. The result does not depend on timing, on the number of engines, or on a
checkpoint between two steps."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from megarl.config.schema import Config
from megarl.data.prompts import Prompt
from megarl.data.sample import TokenData
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.rank import RolloutRank
from megarl.rollout.sampling import SamplingParams, response_seed
from tests.engines import load_folder
from tests.rollout.conftest import TINIEST, delivered, state_of, threads
from tests.rollout.test_streaming import OddText, OutOfOrder
from tests.tiny_models import make_tiny_model

PROMPTS, GROUP, WINDOW, LONGEST = 3, 3, 4, 14
EOS = range(1, 30)  # a response has about ten tokens


class Seen(NamedTuple):
    """A response of one step, as seen by one rank."""

    uid: int
    finish: str
    begun: int
    correct: bool
    reward: float
    body: TokenData | None


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", **TINIEST)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [Prompt(i, f"{i}+1=?", tuple(tokenizer(f"{i}+1=?").input_ids), "") for i in range(200)]
    return folder, tokenizer, prompts


def make_config(folder: Path, **rollout: Any) -> Config:
    settings = {"prompts": PROMPTS, "group_size": GROUP, "max_response_tokens": LONGEST, "window": WINDOW}
    model = {"path": folder}
    return Config(
        recipe="tppo", run_dir="runs/x", steps=1, model=model, rollout={**settings, **rollout}, seed=5
    )


def draw(
    world: Any, steps: int = 9, ranks: int = 1, order: int | None = None, reload: int = 0, **rollout: Any
) -> tuple[list[list[Seen]], list[dict[str, float]], list[Any]]:
    """Return for each step its responses, with the tokens that one rank has, its metrics, and its batch.

    The batch is None if there are several ranks. `order`: None uses the transformers engine, a number makes
    responses finish in a random order. `reload`: the step after which a new RolloutRank resumes."""
    if order is not None:
        rollout["engine"] = "sglang"  # OutOfOrder stands for its continuous batching
    config, runtimes = make_config(world[0], **rollout), threads(ranks)

    def one(rank: int) -> list[Any]:
        torch.set_num_threads(1)
        kind = TransformersEngine if order is None else OutOfOrder
        engine = kind(world[0], eos_ids=EOS)
        engine.start()
        load_folder(engine, version=0)
        if order is not None:
            engine.chance = random.Random(order + 10 * rank)
        left = iter(world[2])

        def make() -> RolloutRank:
            taken = lambda n: [next(left) for _ in range(n)]  # noqa: E731
            return RolloutRank(config, runtimes[rank], engine, OddText(), world[1], take_prompts=taken)

        made, found = make(), []
        for step in range(1, steps + 1):
            engine.weight_version = step - 1
            batch = made.collect(step)
            rows = [
                Seen(g.prompt.uid, r.finish_reason, r.prefix_tokens, r.correct, r.reward, r.data)
                for g in batch.groups
                for r in g.samples
            ]
            found.append((rows, batch.metrics, delivered(batch) if ranks == 1 else None))
            if step == reload:
                state = state_of(made)
                made.close()
                made = make()
                made.load_state_dict(state)
        made.close()
        return found

    with ThreadPoolExecutor(ranks) as pool:
        of_ranks = list(pool.map(one, range(ranks)))
    steps_ = []
    for each in zip(*(found for found in of_ranks), strict=True):
        rows = []
        for seen in zip(*(rows for rows, *_ in each), strict=True):
            (body,) = (one.body for one in seen if one.body is not None)
            rows.append(seen[0]._replace(body=body))
        steps_.append(rows)
    return steps_, [stats for _, stats, _ in of_ranks[0]], [batch for *_, batch in of_ranks[0]]


def shown(steps: list[list[Seen]]) -> list[Any]:
    """Convert arrays to lists, so that steps can be compared."""
    return [
        [(*one[:-1], one.body.tokens.tolist(), one.body.logprobs.tolist()) for one in rows if one.body]
        for rows in steps
    ]


def responses_of(steps: list[list[Seen]]) -> dict[tuple[int, ...], list[tuple[int, Seen]]]:
    """Return the windows of each response with their steps, in order, matched by the tokens of the prefix."""
    found: dict[tuple[int, ...], list[tuple[int, Seen]]] = {}
    for number, rows in enumerate(steps, start=1):
        for one in rows:
            assert one.body is not None
            tokens = (one.uid, *one.body.tokens.tolist())
            found[tokens] = [*found.pop(tokens[: one.begun + 1], []), (number, one)] if one.begun else [
                *found.get(tokens, []), (number, one)
            ]  # fmt: skip
    return found


@pytest.fixture(scope="module")
def drawn(world: Any, gather_by_runtime: None) -> Any:
    return draw(world)


def test_no_response_is_lost_and_every_place_is_filled(drawn: Any) -> None:
    steps, stats, _ = drawn
    assert all(len(rows) == PROMPTS * GROUP for rows in steps)
    for rows, following in pairwise(steps):
        going_on = [one for one in rows if one.finish == "window"]
        again = following[: len(going_on)]  # first, in the same order
        assert [one.uid for one in again] == [one.uid for one in going_on]
        for before, after in zip(going_on, again, strict=True):
            assert after.begun == before.body.tokens.size
            assert (after.body.tokens[: after.begun] == before.body.tokens).all()
            assert (after.body.logprobs[: after.begun] == before.body.logprobs).all()
        assert not any(one.begun for one in following[len(going_on) :])
    for rows, of_step in zip(steps, stats, strict=True):
        ended = [one for one in rows if one.finish != "window"]
        for one in rows:
            new = one.body.tokens.size - one.begun
            assert one.begun % WINDOW == 0 and 0 < new <= WINDOW
            assert (new == WINDOW and one.reward == 0 and not one.correct) or one.finish != "window"
        assert of_step["rollout/unfinished"] == pytest.approx(1 - len(ended) / len(rows))
        assert of_step["rollout/continued"] == sum(one.begun > 0 for one in rows) / len(rows)
        assert of_step["rollout/tokens"] == sum(one.body.tokens.size - one.begun for one in rows)
        if ended:
            assert of_step["reward/accuracy"] == np.mean([one.correct for one in ended])
            assert of_step["response/length_max"] == max(one.body.tokens.size for one in ended)
        else:
            assert "reward/accuracy" not in of_step
    assert {one.finish for rows in steps for one in rows} == {"stop", "length", "window"}
    assert any(one.begun == 3 * WINDOW for rows in steps for one in rows)


def test_windows_together_are_the_response(world: Any, drawn: Any) -> None:
    """The tokens of all windows equal one generation from the prompt and the seed.

    The seed depends on the step that took the prompt and on the index in the group. Prompts come in order
    and none is skipped."""
    steps, *_ = drawn
    engine = TransformersEngine(world[0], eos_ids=EOS)
    engine.start()
    load_folder(engine, version=0)
    first: dict[int, int] = {}  # by prompt, the step that has its first response
    for number, rows in enumerate(steps, start=1):
        for one in rows:
            first.setdefault(one.uid, number)
    assert sorted(first) == list(range(len(first)))
    checked = 0
    for windows in responses_of(steps).values():
        number, last = windows[-1]
        if last.finish == "window":
            assert number == len(steps)
            continue
        assert [step for step, _ in windows] == list(range(windows[0][0], number + 1))
        drawn_in = {first[last.uid], first[last.uid] - 1} - {0}  # responses may start a step later
        requests = [
            GenerationRequest(world[2][last.uid].tokens, response_seed(5, step, last.uid, index))
            for step in drawn_in
            for index in range(GROUP)
        ]
        wholes = [c.tokens.tolist() for c in engine.generate(requests, SamplingParams(LONGEST))]
        assert last.body.tokens.tolist() in wholes
        checked += 1
    assert checked > 2 * PROMPTS * GROUP


def test_the_batch_tells_windows_apart(drawn: Any) -> None:
    steps, _, batches = drawn
    assert "prefix_tokens" not in batches[0] or not batches[0]["prefix_tokens"].any()
    for number, (rows, batch) in enumerate(zip(steps, batches, strict=True)):
        if "prefix_tokens" not in batch:
            assert all(not one.begun and one.finish != "window" for one in rows)
            continue
        assert batch["prefix_tokens"].tolist() == [one.begun for one in rows]
        assert batch["unfinished"].tolist() == [one.finish == "window" for one in rows]
        assert batch["rewards"].tolist() == [one.reward for one in rows]
        expected = []
        for one, length in zip(rows, batch.lengths.tolist(), strict=True):
            prompt = length - one.body.tokens.size
            expected += [False] * (prompt + one.begun) + [True] * (one.body.tokens.size - one.begun)
        assert batch.sampled_mask.tolist() == expected
        if "token_versions" in batch:  # only tokens of this step have the newest version
            versions = batch["token_versions"]
            assert set(versions[batch.sampled_mask].tolist()) == {number}
            assert (versions[batch.response_mask & ~batch.sampled_mask] < number).all()


@pytest.mark.parametrize("order", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_nothing_depends_on_what_ends_first(world: Any, order: int) -> None:
    assert shown(draw(world, order=order)[0]) == shown(draw(world, order=5)[0])


def test_over_several_engines(world: Any, drawn: Any) -> None:
    assert shown(draw(world, ranks=2)[0]) == shown(drawn[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_holds_what_goes_on(world: Any, drawn: Any, ranks: int) -> None:
    assert shown(draw(world, ranks=ranks, reload=3)[0]) == shown(drawn[0])
