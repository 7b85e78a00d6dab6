"""Transformer Engine's layers and portable ones: other names of parameters, one table, one checkpoint. Transformer Engine's names are
derived from megatron-core's own map between its two layer specs, which it writes checkpoints by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.parallel.layout import Layout
from megarl.parallel.runtime import Runtime
from megarl.weights.families import TE_ALIASES, read_config, table_names
from megarl.weights.layout import megatron_layout
from tests.parallel import jobs
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model


def names(runtime: Runtime, folder: Path, critic: bool) -> dict[str, Any]:
    """Of the portable model's parameters, of what its checkpoint holds, and Megatron's map from the former to Transformer Engine's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megarl.model.builder import build_actor, build_critic, read_hf_config
    from megarl.training.sharded import model_state

    model = (build_critic if critic else build_actor)(jobs.make_config(folder), read_hf_config(folder), runtime)
    fused = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.sharded_state_dict_keys_map
    return {
        "portable": [name for name, _ in model.named_parameters()],
        "checkpoint": {value.key for value in model_state(model).values()},
        "fused": dict(fused),
    }


@pytest.mark.parametrize(("family", "critic"), [("qwen2", False), ("qwen3", True), ("llama", False), ("qwen3_moe", False)])
def test_one_table_and_one_checkpoint_for_both(family: Any, critic: bool, ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    kind = "token" if critic else None
    folder = make_tiny_model(tmp_path, family, classification=kind)
    [found] = ranks(1, 1, 1).run(names, folder=folder, critic=critic)
    fused = {short: long for short, long in found["fused"].items() if family != "qwen3_moe" or short != "pre_mlp_layernorm."}
    assert {f"{long}weight": f"{short}weight" for short, long in found["fused"].items()} == TE_ALIASES

    def in_te(name: str) -> str:
        for short, long in fused.items():
            name = name.replace(f".{short}", f".{long}")
        return name

    theirs = [in_te(name) for name in found["portable"]]
    assert sum(name != mine for name, mine in zip(theirs, found["portable"], strict=True)) == 2 * len(fused), "two layers"
    for wrapped in (theirs, [f"module.module.{name}" for name in theirs]):
        mapped = table_names(dict(zip(wrapped, found["portable"], strict=True)))
        assert mapped == {name: name for name in found["portable"]}
    assert set(mapped) == set(megatron_layout(read_config(folder), Layout(), critic=critic)[0][1])
    collapsed = {name.replace("layers.0.", "layers.").replace("layers.1.", "layers.") for name in theirs if "experts" not in name}
    assert {key for key in found["checkpoint"] if "experts" not in key} == collapsed
