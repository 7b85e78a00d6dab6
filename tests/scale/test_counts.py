"""What a rank sends while it starts and while it waits does not grow with the number of ranks
(docs/scale.md)."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scale.idle import NEWS, TICKS

ROOT = Path(__file__).parents[2]
Counts = dict[str, Any]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int, int], list[Counts]]:
    """Every rank's counts at a layout, by rank."""

    def run(tp: int, pp: int, dp: int) -> list[Counts]:
        folder = tmp_path_factory.mktemp("idle")
        command = [sys.executable, "-m", "tests.scale.idle", str(folder), *map(str, (tp, pp, dp))]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(tp * pp * dp)]

    return run


@pytest.mark.slow
def test_a_rank_says_no_more_among_many(counts: Callable[[int, int, int], list[Counts]]) -> None:
    few, many = counts(2, 2, 2), counts(4, 4, 2)
    assert len(few) == 8 and len(many) == 32
    assert all(rank["forked"] for rank in (*few, *many)), "each rank has imported everything for itself"

    def largest(ranks: list[Counts], moment: str, what: str) -> int:
        return max(rank[moment].get(what, 0) for rank in ranks)

    def usual(ranks: list[Counts], moment: str, what: str) -> float:
        """Of the ranks but the first, by way of which all messages go."""
        return statistics.median(rank[moment].get(what, 0) for rank in ranks[1:])

    # Requests to the store: a number for each of Megatron's groups, not for each of their members.
    assert largest(many, "start", "store_requests") <= 1.25 * largest(few, "start", "store_requests") <= 200
    # A tick in which nothing has ended: its own word to rank 0, what rank 0 says to all, and passing that on.
    for what in ("messages", "bytes"):
        assert usual(many, "ticks", what) <= 1.1 * usual(few, "ticks", what) + 8 * TICKS
    assert usual(many, "ticks", "bytes") / TICKS < 4096
    # What one rank has to say is sent to each once (counted where it is sent and where it is received), not
    # once for each rank, as where all are padded to the longest.
    assert NEWS <= statistics.mean(rank["news"]["bytes"] for rank in many) <= 2.1 * NEWS + 4096
