"""A step of each method that has a file in configs/methods and no recipe; recipes: test_recipes.py."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megarl.config import load_config
from tests.methods import methods_without_recipe
from tests.schedule.demo import ROOT, make_warm_model, train

# Sections of a preset that a method needs; sizes, data and model are the demo's.
PARTS = {"algorithm": ..., "reward": {"correct", "incorrect"}}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_warm_model(tmp_path_factory.mktemp("demo"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for _, name in methods_without_recipe()])
def test_a_step(name: str, warm: Path, tmp_path: Path) -> None:
    preset = load_config(ROOT / "configs/methods" / f"{name}.yaml")
    overrides = [f"{key}={json.dumps(value)}" for key, value in preset.model_dump(include=PARTS).items()]
    layout = ["parallel.tp=1", "parallel.dp=2", "rollout.prompts=4", "rollout.group_size=16"]
    layout += ["reward.overlong.soft_punishment=false", "data.eval=[]", "checkpoint.export_hf=false"]
    records = train(warm, preset.recipe, tmp_path / "run", "steps=1", *layout, *overrides)
    [record] = [record for record in records if record["stage"] == "train"]
    assert math.isfinite(record["policy/loss"]) and record["policy/grad_norm"] > 0
