"""Gradients of mixtures of experts over expert, tensor, pipeline, data and context parallelism.

The family's row in tests/families.py covers checkpoints and the comparison with Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel import jobs
from tests.parallel.test_invariance import VOCAB, make_batch, relative_difference
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

Ranks = Callable[..., RankPool]
Layout = tuple[int, ...]  # tp, pp, dp, ep, and cp if it is not 1
SLOW = pytest.mark.slow
# Experts are shared by neighbours under TP, by replicas, by both, and by neither; with and without a
# pipeline.
LAYOUTS: list[Layout] = [
    *((2, 2, 1, 2), (1, 2, 2, 2), (2, 1, 2, 4), (2, 1, 2, 2), (2, 2, 1, 1), (1, 1, 4, 2)),
    *((1, 1, 1, 2, 2), (1, 1, 2, 4, 2), (2, 1, 1, 2, 2)),
]
NAMES = str
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "VAPO": ("actor", {"clip_high": 0.28, "aggregation": "token", "nll_weight": 0.1}),
    "value": ("critic", {}),
}


def mixture(folder: Path, **options: Any) -> Path:
    return make_tiny_model(folder, "qwen3_moe", **{"layers": 2, "experts": 8, "active": 3, **options})


@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=[] if name == "VAPO" else SLOW) for name in LOSSES]
)
def test_gradients_of_mixtures_do_not_depend_on_the_layout(loss: str, ranks: Ranks, tmp_path: Path) -> None:
    """Replicas may have one or three micro-batches of ragged sequences, and all must reach the experts.

    tests/parallel/test_invariance.py has the other loss terms, which do not depend on the layers."""
    which, options = LOSSES[loss]
    kind = "token" if which == "critic" else None
    folder = mixture(tmp_path / "model", vocab=VOCAB, classification=kind)
    arguments: dict[str, Any] = {"folder": folder, "batch": make_batch(), "which": which}
    expected = ranks(1, 1, 1).run(jobs.gradients, **arguments, options={**options, "budget": 10_000})[0]
    for part in ("mlp.gate.weight", "mlp.experts.7.down_proj.weight"):
        names = [name for name in expected["gradients"] if name.endswith(f"layers.1.{part}")]
        assert all(expected["gradients"][name].norm() > 0 for name in names) and names
    # Together the critic's layouts have every size above 1; the actor's are below.
    for layout in [(2, 1, 1, 2)] if loss == "VAPO" else [(2, 2, 1, 2), (1, 1, 2, 2), (1, 1, 1, 2, 2)]:
        found = ranks(*layout).run(jobs.gradients, **arguments, options={**options, "budget": 34})[0]
        assert relative_difference(found["gradients"], expected["gradients"]) <= 1e-5, layout
        exact = torch.cat([x.flatten() for x in found["gradients"].values()]).double().norm()
        assert found["norm"] == pytest.approx(float(exact), rel=1e-5), layout
        for name, value in expected["sums"].items():
            assert found["sums"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (layout, name)


@pytest.mark.slow
def test_gradients_of_vapo_in_every_layout(ranks: Ranks, tmp_path: Path) -> None:
    """Layouts alternate with and without recomputation; both kinds have TP, PP, DP, EP and CP above 1."""
    folder = mixture(tmp_path / "model", vocab=VOCAB)
    arguments: dict[str, Any] = {"folder": folder, "batch": make_batch(), "which": "actor"}
    options = LOSSES["VAPO"][1]
    expected = ranks(1, 1, 1).run(jobs.gradients, **arguments, options={**options, "budget": 10_000})[0]
    for number, layout in enumerate(LAYOUTS):
        model = {"model": {"recompute": ("full", "none")[number % 2]}}
        found = ranks(*layout).run(jobs.gradients, **arguments, options={**options, **model, "budget": 34})
        assert relative_difference(found[0]["gradients"], expected["gradients"]) <= 1e-5, layout
