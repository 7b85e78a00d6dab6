"""Ranks that join a job and wait for responses, and count what that costs: python -m tests.scale.idle FOLDER
TP PP DP"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

import megarl.parallel.cpu_platform
import megarl.schedule.replay  # noqa: F401 (ranks are forked, and have it from here)
from megarl.config.schema import LogConfig, ParallelConfig, RewardConfig, RolloutConfig
from megarl.parallel import runtime as parallel
from megarl.parallel.comm import barrier, gather_objects
from megarl.parallel.launch import launch
from megarl.rollout.sampler import RolloutWorker
from tests.scale.counted import traffic

IMPORTED_BY = os.getpid()
TICKS = 5
NEWS = 100_000  # bytes that one rank has to say


class Busy:
    """An engine that is at work and has finished nothing."""

    running, weight_version = 1, 0

    def poll(self, seconds: float) -> list[Any]:
        time.sleep(seconds)
        return []


def rank(arguments: Sequence[str]) -> int:
    """On each rank: writes FOLDER/RANK.json."""
    folder, tp, pp, dp = Path(arguments[0]), *map(int, arguments[1:])
    runtime = parallel.start(ParallelConfig(tp=tp, pp=pp, dp=dp, device="cpu", timeout=120), seed=0)
    counts: dict[str, Any] = {"forked": os.getpid() != IMPORTED_BY, "start": dict(traffic())}
    config: Any = SimpleNamespace(reward=RewardConfig(), rollout=RolloutConfig(), log=LogConfig())
    worker = RolloutWorker(config, runtime, Busy(), None, None)  # type: ignore[arg-type]
    worker.tick()  # connects ranks
    before = traffic()
    for _ in range(TICKS):
        worker.tick()
    counts["ticks"] = dict(traffic() - before)
    before = traffic()
    assert (
        len(gather_objects(runtime, bytes(NEWS) if runtime.rank == runtime.world - 1 else None)[-1]) == NEWS
    )
    counts["news"] = dict(traffic() - before)
    (folder / f"{runtime.rank}.json").write_text(json.dumps(counts))
    barrier(runtime)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    layout = ParallelConfig(tp=int(sys.argv[2]), pp=int(sys.argv[3]), dp=int(sys.argv[4]), device="cpu")
    sys.exit(launch(partial(rank, sys.argv[1:]), layout, Path(sys.argv[1])))
