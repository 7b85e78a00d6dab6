"""Overlapping gradient reduction and weight gathering with computation changes only rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch

from tests.families import Family
from tests.parallel.jobs import read_without_a_call, updates_with_overlap
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

FAMILIES = tuple(get_args(Family))
SMALL = 1000  # weights in a bucket, so that a tiny model has several buckets


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "family", "tied"),
    [
        ((1, 1, 2), "qwen3", True),
        ((1, 2, 2), "qwen2", True),
        ((1, 1, 4), "qwen3", False),
        ((1, 2, 2), "qwen3_moe", False),
        ((1, 1, 4), "qwen3_5_text", False),
    ],
    ids=lambda value: "tp{}-pp{}-dp{}".format(*value) if isinstance(value, tuple) else None,
)
def test_overlaps_change_nothing(
    layout: tuple[int, int, int],
    family: str,
    tied: bool,
    ranks: Callable[[int, int, int], RankPool],
    tmp_path: Path,
) -> None:
    make_tiny_model(tmp_path / "model", family, tied=tied)
    found = {}
    for which, switches in {
        "off": {},
        "reduce": {"overlap_grad_reduce": True},
        "both": {"overlap_param_gather": True},
    }.items():
        (tmp_path / which).mkdir()
        options = {**switches, "overlap_bucket": SMALL} if switches else {}
        found[which] = ranks(*layout).run(
            updates_with_overlap, folder=tmp_path / "model", checkpoint=tmp_path / which, **options
        )
    for rank, plain in enumerate(found["off"]):
        assert all(plain["alike"])
        assert max(plain["norms"]) > 0
        for which in ("reduce", "both"):
            ours = found[which][rank]
            # More than two replicas are summed in another order, and the norm over other shards.
            torch.testing.assert_close(
                torch.tensor(ours["norms"]), torch.tensor(plain["norms"]), rtol=1e-5, atol=0
            )
            for name, weight in plain["weights"].items():
                torch.testing.assert_close(
                    ours["weights"][name],
                    weight,
                    rtol=0,
                    atol=2e-6,
                    msg=lambda text, name=name: f"{name}: {text}",
                )
                assert torch.equal(ours["back"][name], ours["weights"][name]), name
    # The last stages have one bucket: Megatron splits those of the first stage only, which are reduced
    # last.
    assert all(ours[0]["buckets"] > 2 for ours in (found["reduce"], found["both"]))
    # Without the last gather, replicas differ only after the first of two updates.
    assert found["both"][0]["alike"] == [False, True, False, True]
    assert all(found["reduce"][0]["alike"])


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_read_by_calling_their_modules(
    family: str, ranks: Callable[[int, int, int], RankPool], tmp_path: Path
) -> None:
    """Modules wait for their weights' gather in a hook before their call, which Megarl's layers need too.

    A gather over gloo is often so fast that a missing wait goes unnoticed. The output layer's weight is
    waited for separately."""
    make_tiny_model(tmp_path / "model", family, tied=False)
    [found] = ranks(1, 1, 1).run(read_without_a_call, folder=tmp_path / "model")
    assert found == ["chunks.0.output_layer.weight"]
