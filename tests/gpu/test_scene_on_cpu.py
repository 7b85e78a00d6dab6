"""Test the GPU suite's Scene on a CPU with a tiny model; only CUDA is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megarl.parallel.runtime import Runtime
from tests.gpu.scene import ENGINE, UPDATE, Scene, colocated, get_sizes, round_products
from tests.ranks import RankPool


def scenes(runtime: Runtime, folder: Path) -> dict[str, Any]:
    scene = Scene(runtime, folder, get_sizes("tiny"), model={"dtype": "fp32"}, actor={"lr": 1e-2})
    local = scene.local(8, 32)
    before = scene.logprobs(local)
    gradients = scene.gradients(local)
    found = colocated(scene)
    after = scene.logprobs(local)
    round_products(scene.actor.model)
    rounded = scene.logprobs(local) - after
    return {**found, "rounded": rounded, "before": before, "after": after, "gradients": gradients}


def test_a_colocated_scene(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    [found] = ranks(1, 1, 1).run(scenes, folder=tmp_path)
    assert found["present"] == [set(ENGINE), set(UPDATE)] * 2
    assert max(float(difference.max()) for difference in found["differences"]) <= 1e-4
    assert found["answers"][0] != found["answers"][1]
    assert found["host"] > 0
    assert found["before"].mean() < found["after"].mean(), "two updates towards these responses"
    assert all(gradient.abs().sum() > 0 for gradient in found["gradients"].values())
    assert torch.isfinite(found["before"]).all()
    assert 0 < found["rounded"].abs().mean() < 0.5, "what FP8 would round is rounded"
