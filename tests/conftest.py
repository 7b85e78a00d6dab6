"""Fixtures for several test packages."""

from __future__ import annotations

import functools
import gc
import importlib.util
import re
import signal
import zlib
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.family_table import SHOWN, shown_by
from tests.ranks import RankPool

# No test may depend on time: by default hypothesis fails an example above 0.2 s, and a slow strategy. Tests
# without an explicit number get 50 examples instead of 100.
if importlib.util.find_spec("hypothesis"):  # not installed for `make gpu`
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "any machine",
        settings.default,
        max_examples=50,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("any machine")

# If a shell starts the tests in the background, they and their commands ignore Ctrl-C: restore the default.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., RankPool]]:
    """Return `ranks(tp, pp, dp)` or `ranks(tp, pp, dp, ep, cp, vpp)`.

    It returns the session's ranks of that layout, started at first use.
    """
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
    # before any test is deselected, for tests/docs/test_family_table.py
    config.stash[SHOWN] = shown_by(items)


def pytest_collection_finish() -> None:
    # Imports create many objects. Full garbage collections would traverse them: a tenth of the CPU time.
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rank-groups",
        type=int,
        default=1,
        help="number of groups of the files that need ranks; each group runs on one worker (default: 1)",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests file by file, but all files that need ranks to one worker.

    That worker starts each layout's ranks only once. Where nearly all files need ranks, another worker would
    be idle: there `--rank-groups` makes several groups, as in tests/te always. xdist's --dist loadgroup
    cannot do it: 3.8.0 writes a test's group where pytest 9.2 does not read it.
    """
    from xdist.scheduler import LoadFileScheduling

    groups = config.getoption("--rank-groups")

    class OneForRanks(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            alone = file.startswith("tests/te/") or not _needs_ranks(config.rootpath / file)
            return file if alone else f"ranks {zlib.crc32(file.encode()) % groups}"

    return OneForRanks(config, log)


@functools.cache
def _needs_ranks(file: Path) -> bool:
    words = r"\bRankPool\b|\btests\.ranks\b|\branks: Any\b|\branks\(\d"
    return re.search(words, file.read_text(encoding="utf-8")) is not None


def pytest_sessionfinish() -> None:
    # waits for the fork server, so that no process remains and `time` includes it and its ranks
    forkserver._forkserver._stop()
