"""A rollout whose responses are there at once, and its way to the replicas that train on it: the code of a
run, with nothing but an engine, a verifier and a tokenizer that do no work."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from megarl.config.schema import LogConfig, ParallelConfig, RewardConfig, RolloutConfig
from megarl.data.prompts import Prompt
from megarl.parallel.delivery import deliver, row_bytes
from megarl.parallel.layout import Layout
from megarl.parallel.runtime import Ranks
from megarl.rewards.verdict import Verdict
from megarl.rollout.batch import RolloutBatch
from megarl.rollout.sampler import GroupRequest, RolloutWorker
from megarl.rollout.sampling import Completion, Request, SamplingParams

GROUP = 16  # responses to a prompt
PROMPT = 50  # tokens


class Drawn:
    """An engine that is at work and has finished nothing (busy), or has what is asked of it at once."""

    weight_version, streams = 0, True

    def __init__(self, seconds: float, tokens: int) -> None:
        self.seconds, self.tokens = seconds, tokens
        self.busy, self.made = True, dict[int, Completion]()

    def submit(self, requests: Mapping[int, Request], params: SamplingParams) -> None:
        for number, request in requests.items():
            # From a half to one and a half of the mean.
            length = random.Random(request.seed).randint(self.tokens // 2, 3 * self.tokens // 2)
            self.made[number] = Completion([7] * length, [-1.0] * length, "stop", [0] * length)

    @property
    def running(self) -> int:
        return len(self.made) + self.busy

    def poll(self, seconds: float) -> list[tuple[int, Completion]]:
        time.sleep(min(seconds, self.seconds))
        ended, self.made = list(self.made.items()), {}
        return ended

    def abort(self) -> list[tuple[int, Completion]]:
        return []


class Right:
    """A verifier, and a tokenizer."""

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
    ticks: int,
    seconds: float,
    responses: int,
    tokens: int,
) -> dict[str, Any]:
    """What this rank sends and gets (`traffic`) in so many ticks of `seconds` in which nothing ends, and in a
    step: a rollout that ends at once, decided, and its tokens delivered.

    each: ranks of an engine; meet: waits for all ranks; responses: of the batch, each of `tokens` on
    average"""

    def start() -> Counter[str]:
        meet()  # nobody is behind, ...
        counted = traffic()
        meet()  # ... and nobody ahead
        return counted

    config: Any = SimpleNamespace(
        reward=RewardConfig(),
        rollout=RolloutConfig(engine="sglang", engine_tp=each),
        log=LogConfig(),
        parallel=ParallelConfig(timeout=600),
    )
    engine, right = Drawn(seconds, tokens), Right()
    worker = RolloutWorker(config, ranks, engine, right, right)  # type: ignore[arg-type]

    def tick(times: int) -> None:
        worker.on_leaders(lambda: [worker.tick() for _ in range(times)] and None)

    tick(1)  # connects ranks
    found: dict[str, Any] = {}
    before = traffic()
    tick(ticks)
    found["ticks"] = dict(traffic() - before)
    engine.busy = False
    chance = random.Random(0)
    requests = [
        GroupRequest(Prompt(i, "", (3,) * PROMPT, ""), [chance.getrandbits(60) for _ in range(GROUP)])
        for i in range(responses // GROUP)
    ]
    before = start()
    groups = worker.generate(requests, SamplingParams(2 * tokens))
    batch = RolloutBatch(1, groups, {}, {}, {}).to_step_batch()
    found["facts"] = dict(traffic() - before)
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
