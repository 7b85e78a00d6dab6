"""Ranks whose parts of a checkpoint do not make a whole are told so, all of them, before anything is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parallel.jobs import stage_parts
from tests.ranks import RankPool


@pytest.mark.parametrize(
    ("length", "offset", "said"),
    [
        (4, 2, ""),
        (2, 0, "two ranks would write the same part"),
        (3, 1, "overlapping chunks"),
        (6, 2, "invalid fill tensor-volume"),
    ],
    ids=["whole", "twice", "overlapping", "a hole"],
)
def test_parts_must_make_a_whole(
    length: int, offset: int, said: str, ranks: Callable[[int, int, int], RankPool]
) -> None:
    first, second = ranks(1, 1, 2).run(stage_parts, length=length, offset=offset)
    assert first == second and said in first and bool(said) == bool(first)
