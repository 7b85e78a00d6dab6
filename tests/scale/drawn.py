"""A rollout whose responses are there at once, and its way to the replicas that train on it: the code of a
run, with nothing but an engine, a verifier and a tokenizer that do no work."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from megarl.config.schema import (
    DataConfig,
    LogConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    ScheduleConfig,
    UpdateConfig,
)
from megarl.data.prompts import Prompt
from megarl.data.sample import TokenData
from megarl.parallel.delivery import deliver, row_bytes
from megarl.parallel.layout import Layout
from megarl.parallel.runtime import Ranks
from megarl.rewards.verdict import Verdict
from megarl.rollout.collector import make_rollout_batch
from megarl.rollout.controller import GroupRequest
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.rank import RolloutRank
from megarl.rollout.sampling import SamplingParams

GROUP = 16  # responses to a prompt
PROMPT = 50  # tokens


class Drawn:
    """An engine that has what is asked of it after `held` seconds."""

    weight_version = 0

    def __init__(self, tokens: int) -> None:
        self.tokens, self.held, self.made = tokens, 0.0, dict[int, TokenData]()

    def submit(self, requests: Mapping[int, GenerationRequest], params: SamplingParams) -> None:
        self.ready = time.monotonic() + self.held
        for number, request in requests.items():
            # From a half to one and a half of the mean.
            length = random.Random(request.seed).randint(self.tokens // 2, 3 * self.tokens // 2)
            self.made[number] = TokenData([7] * length, [-1.0] * length, "stop", [0] * length)

    @property
    def running(self) -> int:
        return len(self.made)

    def poll(self, seconds: float) -> list[tuple[int, TokenData]]:
        time.sleep(min(seconds, max(0.0, self.ready - time.monotonic())))
        if time.monotonic() < self.ready:
            return []
        ended, self.made = list(self.made.items()), {}
        return ended

    def abort(self) -> list[tuple[int, TokenData]]:
        return []


class Right:
    """A verifier, and a tokenizer."""

    eos_token_id = pad_token_id = chat_template = None
    name_or_path = "none"

    def verify(self, items: Sequence[Any]) -> list[Verdict]:
        return [Verdict(True, "42")] * len(items)

    def batch_decode(self, rows: Sequence[Any], **_: Any) -> list[str]:
        return [""] * len(rows)


def count(
    ranks: Ranks,
    layout: Layout,
    each: int,
    traffic: Callable[[], Counter[str]],
    meet: Callable[[], object] = lambda: None,
    *,
    seconds: float,
    responses: int,
    tokens: int,
) -> dict[str, Any]:
    """What this rank sends and gets (`traffic`) in `seconds` more of a rollout in which nothing ends, and in
    a step: a rollout that ends at once, decided, and its tokens delivered.

    each: ranks of an engine; meet: waits for all ranks; responses: of the batch, each of `tokens` on
    average"""

    def start() -> Counter[str]:
        meet()  # nobody is behind, ...
        counted = traffic()
        meet()  # ... and nobody ahead
        return counted

    config: Any = SimpleNamespace(
        data=DataConfig(template="raw"),
        reward=RewardConfig(),
        rollout=RolloutConfig(engine="sglang", engine_tp=each),
        log=LogConfig(),
        parallel=ParallelConfig(timeout=600),
        update=UpdateConfig(),
        schedule=ScheduleConfig(),
    )
    engine, right = Drawn(tokens), Right()
    rank = RolloutRank(config, ranks, engine, right, right)  # type: ignore[arg-type]
    chance = random.Random(0)
    requests = [
        GroupRequest(Prompt(i, "", (3,) * PROMPT, ""), [chance.getrandbits(60) for _ in range(GROUP)])
        for i in range(responses // GROUP)
    ]

    def short(held: float) -> Counter[str]:
        """One response for each engine."""
        engine.held, before = held, start()
        each_one = [replace(request, seeds=request.seeds[:1]) for request in requests]
        rank.generate((each_one * ranks.world)[: ranks.world // each], SamplingParams(2 * tokens))
        return start() - before

    short(0.0)  # connects ranks
    at_once, began = short(0.0), time.monotonic()
    waited = short(seconds)
    found: dict[str, Any] = {"waiting": {what: waited[what] - at_once[what] for what in waited}}
    found["waiting"]["seconds"] = time.monotonic() - began  # more than asked, on few cores
    engine.held = 0.0
    before = start()
    groups = rank.generate(requests, SamplingParams(2 * tokens))
    batch = make_rollout_batch(groups)
    found["facts"] = dict(start() - before)
    rank.close()
    order = chance.sample(range(responses), responses)
    shares = [order[d :: layout.dp] for d in range(layout.dp)]
    of_replicas: list[list[int]] = [[] for _ in shares]
    for rank in range(layout.world):
        of_replicas[layout.coords(rank).dp].append(rank)
    mine = shares[layout.coords(ranks.rank).dp]
    found["share"] = int(row_bytes(batch)[mine].sum())
    found["drawn"] = int(row_bytes(batch)[batch.rows].sum())
    before = start()
    local = deliver(ranks, batch, shares, of_replicas)
    found["delivery"] = dict(traffic() - before)
    assert local.lengths.tolist() == batch.lengths[mine].tolist() and int(local.tokens[-1]) == 7
    return found
