"""Features that only DeepSeek-V3 and Moonlight have.

They are recomputation and shared prompts in multi-latent attention, and SGLang on a CPU. The row in
tests/families.py covers log-probabilities, gradients, values and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Config
from megarl.data.batch import TrainBatch
from megarl.rollout.engines.sglang import SGLangEngine
from megarl.weights.families import read_config
from tests.families import YARN
from tests.parallel import jobs
from tests.parallel.test_parity import sequences, tiny
from tests.ranks import RankPool

Ranks = Callable[..., RankPool]


@pytest.mark.parametrize("layout", [(1, 1, 1), pytest.param((2, 1, 1), marks=pytest.mark.slow)], ids=str)
def test_recomputing_and_sharing_prompts_change_no_gradient(
    layout: tuple[int, ...], ranks: Ranks, tmp_path: Path
) -> None:
    prompts, responses = sequences(101)
    groups = [2, 2, 1, 1, 0, 1]
    batch = TrainBatch.build([prompts[group] for group in groups], responses)
    batch["group_ids"] = torch.tensor(groups)
    batch["correct"], batch["truncated"] = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)
    batch["rewards"] = torch.ones(6)
    batch["advantages"], batch["old_logprobs"] = torch.zeros(2, batch.num_tokens)
    arguments: dict[str, Any] = {
        "folder": tiny(tmp_path, "deepseek_v3", vocab=101),
        "batch": batch,
        "which": "actor",
    }
    expected = None
    for shared in (False, True):
        for recompute in ("none", "full", "selective"):
            options = {"nll_weight": 1.0, "budget": 10_000, "share_prompts": shared}
            options["model"] = {"recompute": recompute}
            found = ranks(*layout).run(jobs.gradients, **arguments, options=options)[0]
            whole = torch.cat([gradient.flatten() for _, gradient in sorted(found["gradients"].items())])
            expected = whole if expected is None else expected
            assert (whole - expected).norm() <= 1e-6 * expected.norm(), (shared, recompute)
    assert batch.num_tokens - found["computed"] > 20


def test_sglang_on_a_cpu_rotates_by_yarn(tmp_path: Path) -> None:
    """SGLang's `get_rope_cpu` (0.5.23) supports only YaRN, so other models get YaRN with factor 1."""
    settings: dict[str, Any] = {"recipe": "dapo", "run_dir": "run", "steps": 1, "model": {"path": "x"}}
    config = Config(**settings, rollout={"engine": "sglang"})
    for name, device, keys, told in (
        ("yarn", "cpu", {"rope_parameters": YARN}, None),
        ("plain", "cpu", {}, {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512}),
        ("cuda", "cuda:0", {}, None),
    ):
        hf_config = read_config(tiny(tmp_path / name, "deepseek_v3", **keys))
        given = SGLangEngine(config, hf_config, 0, torch.device(device), (1,))._arguments()
        assert json.loads(given["json_model_override_args"]).get("rope_parameters") == told
