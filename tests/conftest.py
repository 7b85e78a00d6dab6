"""Fixtures that several packages use."""

from __future__ import annotations

import functools
import gc
import importlib.util
import re
import signal
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.family_table import SHOWN, shown_by
from tests.ranks import RankPool

# No test may depend on seconds: hypothesis by default fails an example above 0.2 s, and a strategy that draws
# slowly. 50 examples where a test names no number, instead of 100.
if importlib.util.find_spec("hypothesis"):  # `make gpu` does without
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "any machine",
        settings.default,
        max_examples=50,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("any machine")

# A shell that starts the tests in the background has Ctrl-C ignored in them, and in the commands that they
# start: here it is not.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., RankPool]]:
    """`ranks(tp, pp, dp)`, or `ranks(tp, pp, dp, ep, cp, vpp)`: the session's ranks of that layout, started
    at first use."""
    pools: dict[tuple[int, ...], RankPool] = {}

    def pool(tp: int, pp: int, dp: int, ep: int = 1, cp: int = 1, vpp: int = 1) -> RankPool:
        layout = (tp, pp, dp, ep, cp, vpp)
        if layout not in pools or not pools[layout].alive:
            pools[layout] = RankPool(*layout)
        return pools[layout]

    yield pool
    for started in pools.values():
        started.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # before any is deselected, for tests/docs/test_family_table.py
    config.stash[SHOWN] = shown_by(items)


def pytest_collection_finish() -> None:
    # What imports have made stays. Full garbage collections would go through it: a tenth of the CPU time.
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests go file by file to the processes of the tests, those of all files that need ranks to one, which
    starts each layout's ranks once. (xdist's own --dist loadgroup cannot: 3.8.0 writes a test's group where
    pytest 9.2 does not read it.) In tests/te nearly all need ranks: there the other process would wait."""
    from xdist.scheduler import LoadFileScheduling

    class OneForRanks(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            alone = file.startswith("tests/te/") or not _needs_ranks(config.rootpath / file)
            return file if alone else "ranks"

    return OneForRanks(config, log)


@functools.cache
def _needs_ranks(file: Path) -> bool:
    words = r"\bRankPool\b|\btests\.ranks\b|\branks: Any\b|\branks\(\d"
    return re.search(words, file.read_text(encoding="utf-8")) is not None


def pytest_sessionfinish() -> None:
    # waits for it, so that nothing is left behind, and `time` counts what it and its ranks took
    forkserver._forkserver._stop()
