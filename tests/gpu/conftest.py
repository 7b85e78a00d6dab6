"""The GPU suite, which `make gpu` runs on a machine with one GPU. Without CUDA its tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and "cpu" not in item.path.stem:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device (make gpu, docs/gpu.md)"))


@pytest.fixture(scope="session")
def runtime() -> Iterator[object]:
    """Start this process as a job of one rank on the GPU."""
    from megarl.config.schema import ParallelConfig
    from megarl.parallel import runtime as parallel

    yield parallel.start(ParallelConfig(device="cuda"), seed=0)
    parallel.stop()
