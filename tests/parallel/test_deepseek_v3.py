"""DeepSeek-V3 and Moonlight: multi-latent attention. Log-probabilities and gradients against Hugging Face's
over every kind of parallelism, with latents of queries and without, with YaRN and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Config
from megarl.data.experience import Experience
from megarl.rollout.engines.sglang import SGLangEngine
from megarl.weights.families import read_config
from tests.parallel import jobs
from tests.parallel.test_glm4_moe import LAYOUTS, hf_gradients
from tests.parallel.test_invariance import VOCAB, make_batch
from tests.parallel.test_parity import hf_logprobs, sequences
from tests.ranks import RankPool
from tests.tiny_models import YARN, make_tiny_model

Ranks = Callable[..., RankPool]
# Moonlight, with an epsilon that its latents do not have; DeepSeek-V3, with groups of experts; a layer like
# the others first, values as wide as keys.
MODELS: list[dict[str, Any]] = [
    {"q_lora_rank": None, "rms_norm_eps": 1e-3},
    {"experts": 12, "active": 4, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    {"first_k_dense_replace": 0, "tied": True, "v_head_dim": 12},
]


def tiny(folder: Path, **options: Any) -> Path:
    return make_tiny_model(folder, "deepseek_v3", **{"layers": 4, "experts": 8, "active": 3, **options})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logprobs_equal_hugging_face(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    prompts, responses = sequences(101)
    for number, options in enumerate(MODELS):
        folder = tiny(tmp_path / str(number), vocab=101, **options)
        expected, entropy = hf_logprobs(folder, prompts, responses, 1.0)
        found = ranks(*layout).run(jobs.logprobs, folder=folder, prompts=prompts, responses=responses)
        for logprobs, entropies in found:
            assert (logprobs - expected).abs().max() <= 1e-5, options
            assert (entropies - entropy).abs().max() <= 1e-5, options


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_equal_hugging_face(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    batch = make_batch()
    batch.tokens = batch.tokens.clamp(min=1)  # Hugging Face gives the padding token, 0, no gradient
    batch["correct"] = torch.ones(8, dtype=torch.bool)
    batch["advantages"] = torch.zeros(batch.num_tokens)
    arguments: dict[str, Any] = {"batch": batch, "which": "actor"}
    arguments["options"] = {"nll_weight": 1.0, "budget": 34}
    for number, options in enumerate(MODELS):
        folder = tiny(tmp_path / str(number), vocab=VOCAB, **options)
        theirs = hf_gradients(folder, batch)
        found = ranks(*layout).run(jobs.gradients, folder=folder, **arguments)[0]
        norm = torch.cat([x.flatten() for x in theirs.values()]).norm()
        assert found["norm"] == pytest.approx(float(norm), rel=1e-4)
        for name, gradient in theirs.items():
            assert (found["gradients"][name] - gradient).abs().max() <= 1e-5 * norm, (options, name)


@pytest.mark.parametrize("layout", [(1, 1, 1), pytest.param((2, 1, 1), marks=pytest.mark.slow)], ids=str)
def test_recomputing_and_sharing_prompts_change_no_gradient(
    layout: tuple[int, ...], ranks: Ranks, tmp_path: Path
) -> None:
    prompts, responses = sequences(101)
    groups = [2, 2, 1, 1, 0, 1]
    batch = Experience.build([prompts[group] for group in groups], responses)
    batch["group_ids"] = torch.tensor(groups)
    batch["correct"], batch["truncated"] = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)
    batch["rewards"] = torch.ones(6)
    batch["advantages"], batch["old_logprobs"] = torch.zeros(2, batch.num_tokens)
    arguments: dict[str, Any] = {"folder": tiny(tmp_path, vocab=101), "batch": batch, "which": "actor"}
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
    """Its `get_rope_cpu` (0.5.23) has nothing else: a model without it is given YaRN that stretches by 1."""
    settings: dict[str, Any] = {"recipe": "dapo", "run_dir": "run", "steps": 1, "model": {"path": "x"}}
    config = Config(**settings, rollout={"engine": "sglang"})
    for name, device, keys, told in (
        ("yarn", "cpu", {"rope_parameters": YARN}, None),
        ("plain", "cpu", {}, {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512}),
        ("cuda", "cuda:0", {}, None),
    ):
        hf_config = read_config(tiny(tmp_path / name, **keys))
        given = SGLangEngine(config, hf_config, 0, torch.device(device), (1,))._arguments()
        assert json.loads(given["json_model_override_args"]).get("rope_parameters") == told
