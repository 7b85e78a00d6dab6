"""Compare Transformer Engine's layers in bf16 and FP8 with portable layers of the same weights.

Log-probabilities and gradients must agree within rounding errors. A pack has several sequences, so that thd
attention is tested."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from megarl.model.fp8 import RECIPES, device_problem
from megarl.parallel.runtime import Runtime
from tests.gpu.scene import WEIGHTS, Scene, get_sizes, round_products

SIZES = get_sizes("Qwen2.5-7B", num_hidden_layers=2, vocab_size=16000)
# Bounds: mean difference of log-probabilities, nats; relative difference of all gradients together.
# bf16 has 8 bits of precision, e4m3 4, e5m2 3. The logits of random weights have a standard deviation of
# about 1. FP8's bound on log-probabilities is 1.25 times the error of rounding to e4m3 in plain torch.
BF16, FP8_GRADIENTS = (0.03, 0.05), 0.25

pytest.importorskip(
    "transformer_engine.pytorch", reason="needs Transformer Engine (docs/gpu.md)", exc_type=ImportError
)


def results(runtime: Runtime, folder: Path, **model: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and one vector of all gradients of a second pass.

    In the first pass the recipe `delayed` has no scales."""
    scene = Scene(runtime, folder, SIZES, model=model)
    local = scene.local(6, 300)
    for _ in range(2):
        logprobs, gradients = scene.logprobs(local), scene.gradients(local)
    del scene
    gc.collect()  # free its device and pinned memory for the next scene
    return logprobs, torch.cat([gradients[name].flatten() for name in sorted(gradients)])


@pytest.fixture(scope="module")
def portable(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, torch.Tensor]:
    return results(runtime, tmp_path_factory.mktemp("portable"), layers="portable")


@pytest.fixture(scope="module")
def rounding(
    runtime: Runtime,
    portable: tuple[torch.Tensor, torch.Tensor],
    tmp_path_factory: pytest.TempPathFactory,
) -> float:
    """Mean error, nats, of portable layers with matrix product inputs rounded to e4m3."""
    scene = Scene(runtime, tmp_path_factory.mktemp("rounded"), SIZES, model={"layers": "portable"})
    round_products(scene.actor.model)
    return float((scene.logprobs(scene.local(6, 300)) - portable[0]).abs().mean())


def check(
    found: tuple[torch.Tensor, torch.Tensor],
    expected: tuple[torch.Tensor, torch.Tensor],
    bounds: tuple[float, float],
) -> None:
    logprobs, gradients = (
        float((found[0] - expected[0]).abs().mean()),
        float((found[1] - expected[1]).norm() / expected[1].norm()),
    )
    print(f"log-probs {logprobs:.2e} of {bounds[0]}, gradients {gradients:.2e} of {bounds[1]}")
    assert logprobs <= bounds[0]
    assert gradients <= bounds[1]


def test_bf16(runtime: Runtime, portable: tuple[torch.Tensor, torch.Tensor], tmp_path: Path) -> None:
    check(results(runtime, tmp_path, layers="te"), portable, BF16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8(
    recipe: str,
    runtime: Runtime,
    portable: tuple[torch.Tensor, torch.Tensor],
    rounding: float,
    tmp_path: Path,
) -> None:
    problem = device_problem(recipe, torch.cuda.get_device_capability(), torch.version.cuda or "0.0")
    if problem:
        pytest.skip(f"{recipe} {problem}")
    fp8 = {"format": "hybrid" if recipe in ("delayed", "tensorwise") else "e4m3", "recipe": recipe}
    found = results(runtime, tmp_path, layers="te", fp8=fp8)
    assert not torch.equal(found[0], portable[0])
    check(found, portable, (1.25 * rounding, FP8_GRADIENTS))


def test_a_checkpoint_is_for_both(runtime: Runtime, tmp_path: Path) -> None:
    """Portable layers load a checkpoint of Transformer Engine's layers with its optimizer state."""
    from megarl.training.sharded import load_trainable
    from megarl.weights.families import rename_to_table
    from tests.checkpoints import save_model

    scenes = [
        Scene(runtime, tmp_path / kind, get_sizes("tiny", hidden_size=64), model={"layers": kind})
        for kind in ("te", "portable")
    ]
    scenes[0].update(scenes[0].local(4, 32))
    (tmp_path / "checkpoint").mkdir()
    save_model(scenes[0].actor, tmp_path / "checkpoint")
    load_trainable(scenes[1].actor, tmp_path / "checkpoint")
    for scene in scenes:
        scene.offload.onload("old_logprobs", WEIGHTS)
    ours, theirs = (rename_to_table(dict(scene.actor.model.named_parameters())) for scene in scenes)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
