"""Objects that ranks exchange by way of rank 0, of any length; and the sockets that a rank holds open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil

from megarl.parallel.comm import INLINE, any_of, from_rank_0, gather_objects, gather_on_0
from megarl.parallel.runtime import Runtime
from tests.ranks import RankPool

# Pickled, some messages end just before and behind what travels at once.
LENGTHS = (0, INLINE - 40, INLINE, INLINE + 1, 70_000)


def message(rank: int, length: int) -> Any:
    """Return what a rank sends: rank 1 None, the others messages of different lengths."""
    return None if rank == 1 else {"rank": rank, "text": bytes([rank]) * (length + rank)}


def exchange(runtime: Runtime) -> dict[str, Any]:
    messages = [message(runtime.rank, length) for length in LENGTHS]
    listening = [one for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return {
        "all": [gather_objects(runtime, sent) for sent in messages],
        "on 0": [gather_on_0(runtime, sent) for sent in messages],
        "from 0": [from_rank_0(runtime, sent) for sent in messages],
        "any": any_of(runtime, (runtime.rank == 3, False, True)),
        "listening": len(listening),
    }


def test_every_rank_gets_what_each_has_sent(ranks: Callable[..., RankPool]) -> None:
    expected = [[message(rank, length) for rank in range(4)] for length in LENGTHS]
    for rank, found in enumerate(ranks(2, 2, 1).run(exchange)):
        assert found["all"] == expected
        assert found["on 0"] == (expected if rank == 0 else [None] * len(LENGTHS))
        assert found["from 0"] == [messages[0] for messages in expected]
        assert found["any"] == [True, False, True]
        # One gloo device for all of Megatron's groups, each of which has a thread that wakes a hundred times
        # a second.
        assert found["listening"] == 1
