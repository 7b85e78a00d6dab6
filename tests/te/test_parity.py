"""The parity gate on Transformer Engine's layers, which have norms within their products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.harness import prepare
from tests.ranks import RankPool
from tests.schedule.jobs import train_with_swapped
from tests.schedule.test_parity import GATE_UP, NORMS, config_of
from tests.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    ("swapped", "words"),
    [
        ((), ""),
        (GATE_UP, "in layer 2 (of 0 to 3), MLP with the norm before it: by "),
        (NORMS, "in layer 1 (of 0 to 3), attention with the norm before it: by "),
    ],
)
def test_the_layer_is_named(
    swapped: tuple[str, ...], words: str, ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    prepare(tmp_path)
    make_tiny_model(tmp_path / "deep", "qwen3", layers=4)
    config = config_of(tmp_path, tmp_path / "run", model={"layers": "te"}, parallel={"tp": 2})
    for line, updated in ranks(2, 1, 1).run(train_with_swapped, config=config, swapped=swapped):
        assert words in line and bool(line) == bool(swapped), line
        assert updated == ([] if swapped else ["actor", "critic"])
