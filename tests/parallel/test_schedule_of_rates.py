"""The learning rate at each rollout step, against the formula."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel import jobs
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model


def test_value_pretraining_has_a_rate_of_its_own(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=61)
    [(pretraining, main)] = ranks(1, 1, 1).run(jobs.learning_rates, folder=folder, steps=10)
    assert pretraining == [1e-4] * 3
    # Two steps of warm-up to 1e-2, then linear to a tenth at step 10.
    expected = [5e-3, 1e-2] + [1e-2 - 9e-3 * k / 8 for k in range(1, 9)]
    assert main == pytest.approx(expected, rel=1e-6)
