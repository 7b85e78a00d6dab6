"""Fixtures that several rooms use."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from multiprocessing import forkserver

import pytest
from hypothesis import HealthCheck, settings

from tests.ranks import RankPool

# No test may depend on seconds: hypothesis by default fails an example above 0.2 s, and a strategy that draws slowly.
settings.register_profile("any machine", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell that starts the tests in the background has Ctrl-C ignored in them, and in the commands that they start: here it is not.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., RankPool]]:
    """`ranks(tp, pp, dp)`, or `ranks(tp, pp, dp, ep)`: the session's ranks of that layout, started at first use."""
    pools: dict[tuple[int, ...], RankPool] = {}

    def pool(tp: int, pp: int, dp: int, ep: int = 1) -> RankPool:
        layout = (tp, pp, dp, ep)
        if layout not in pools or not pools[layout].alive:
            pools[layout] = RankPool(*layout)
        return pools[layout]

    yield pool
    for started in pools.values():
        started.close()


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests need ranks go to one process of the tests, so that each layout's ranks are started once."""
    forking = {"ranks", "RankPool", "FORK", "in_a_fork"}
    with_ranks = {item.path for item in items if forking & {*getattr(item, "fixturenames", ()), *vars(getattr(item, "module", item))}}
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ranks" if item.path in with_ranks else item.path.stem))


def pytest_sessionfinish() -> None:
    forkserver._forkserver._stop()  # waits for it, so that nothing is left behind, and `time` counts what it and its ranks took
