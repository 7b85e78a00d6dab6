"""The part of `make chaos` that is short enough for every change.

Runs are killed in an update, in a tool's call, or when off-policy. Others are asked to stop, get a damaged
file, or have a full disk. All runs are forked; tests/schedule/test_resume.py kills runs as a user starts
them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.harness import measure, prepare, undisturbed_run

CHOSEN = (
    "kill -9 of a rank: in a tool's call",
    "SIGTERM",
    "newest checkpoint: a bit flipped",  # first a kill -9 of a rank in actor_update
    "disk full during a checkpoint",
    "disk full: samples.jsonl",
    "ahead 2, kill -9 of the engine: rollout",
    "ahead 2, kill -9 of the trainer: actor_update",
    "in flight, kill -9 of the engine: weight_transfer",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("chaos")
    prepare(folder)
    yield folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_a_run_survives(folder: Path, name: str) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    row = measure(fault, folder, undisturbed_run(folder, fault), forked=True)
    assert row.green, row
