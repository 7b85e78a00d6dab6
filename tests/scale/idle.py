"""Ranks that join a job, wait for responses, and deliver a batch, and count what that costs: python -m
tests.scale.idle FOLDER TP PP DP [EACH [RESPONSES TOKENS]]

Prints the same row as tests/scale/simulated.py, of real ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import megarl.parallel.cpu_platform
import megarl.schedule.replay  # noqa: F401 (ranks are forked, and have it from here)
from megarl.config.schema import ParallelConfig
from megarl.parallel import runtime as parallel
from megarl.parallel.comm import barrier, gather_objects
from megarl.parallel.launch import count_local_ranks, launch
from tests.scale.counted import traffic
from tests.scale.drawn import count
from tests.scale.simulated import summary

IMPORTED_BY = os.getpid()
WAITED = 12.0  # seconds of a rollout in which nothing ends
DEFAULTS = ("1", "512", "2000")  # ranks of an engine, responses, tokens
NEWS = 100_000  # bytes that one rank has to say


def rank(arguments: Sequence[str]) -> int:
    """On each rank: writes FOLDER/RANK.json."""
    folder, (tp, pp, dp, each, responses, tokens) = Path(arguments[0]), map(int, arguments[1:])
    runtime = parallel.start(ParallelConfig(tp=tp, pp=pp, dp=dp, device="cpu", timeout=120), seed=0)
    counts: dict[str, Any] = {"forked": os.getpid() != IMPORTED_BY, "start": dict(traffic())}
    sizes = {"seconds": WAITED, "responses": responses, "tokens": tokens}
    counts |= count(runtime, runtime.layout, each, traffic, partial(barrier, runtime), **sizes)  # type: ignore[arg-type]
    before = traffic()
    news = bytes(NEWS) if runtime.rank == runtime.world - 1 else b""
    assert len(gather_objects(runtime, news, bytes)[-1]) == NEWS
    counts["news"] = dict(traffic() - before)
    (folder / f"{runtime.rank}.json").write_text(json.dumps(counts))
    barrier(runtime)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    given = [*sys.argv[1:], *DEFAULTS[len(sys.argv) - 5 :]]
    layout = ParallelConfig(tp=int(given[1]), pp=int(given[2]), dp=int(given[3]), device="cpu")
    code = launch(partial(rank, given), layout, Path(given[0]))
    if not code:
        found = [
            json.loads((Path(given[0]) / f"{r}.json").read_text()) for r in range(count_local_ranks(layout))
        ]
        print(json.dumps(summary(found, int(given[4]), WAITED, int(given[5])), indent=1))
    sys.exit(code)
