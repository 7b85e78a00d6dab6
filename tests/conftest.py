"""Fixtures that several rooms use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int, int, int], RankPool]]:
    """`ranks(tp, pp, dp)`: the session's ranks of that layout, started at first use."""
    pools: dict[tuple[int, int, int], RankPool] = {}

    def pool(tp: int, pp: int, dp: int) -> RankPool:
        layout = (tp, pp, dp)
        if layout not in pools or not pools[layout].alive:
            pools[layout] = RankPool(*layout)
        return pools[layout]

    yield pool
    for started in pools.values():
        started.close()
