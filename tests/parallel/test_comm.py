"""Words between ranks, by way of rank 0, of any length; and what a rank holds open for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil

from megarl.parallel.comm import INLINE, any_of, from_rank_0, gather_objects, gather_on_0
from megarl.parallel.runtime import Runtime
from tests.ranks import RankPool

LENGTHS = (
    0,
    INLINE - 40,
    INLINE,
    INLINE + 1,
    70_000,
)  # pickled, some end just before and behind what travels at once


def word(rank: int, length: int) -> Any:
    """What a rank says; rank 1 says nothing, the others are of different lengths."""
    return None if rank == 1 else {"rank": rank, "text": bytes([rank]) * (length + rank)}


def talk(runtime: Runtime) -> dict[str, Any]:
    words = [word(runtime.rank, length) for length in LENGTHS]
    listening = [one for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return {
        "all": [gather_objects(runtime, said) for said in words],
        "on 0": [gather_on_0(runtime, said) for said in words],
        "from 0": [from_rank_0(runtime, said) for said in words],
        "any": any_of(runtime, (runtime.rank == 3, False, True)),
        "listening": len(listening),
    }


def test_every_rank_hears_what_each_has_said(ranks: Callable[..., RankPool]) -> None:
    expected = [[word(rank, length) for rank in range(4)] for length in LENGTHS]
    for rank, heard in enumerate(ranks(2, 2, 1).run(talk)):
        assert heard["all"] == expected
        assert heard["on 0"] == (expected if rank == 0 else [None] * len(LENGTHS))
        assert heard["from 0"] == [words[0] for words in expected]
        assert heard["any"] == [True, False, True]
        # One gloo device for all of Megatron's groups, each of which has a thread that wakes a hundred times
        # a second.
        assert heard["listening"] == 1
