"""FP8 in Transformer Engine's layers: every recipe against bf16, packs filled up, layers left in bf16,
delayed scaling's history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.model.fp8 import RECIPES
from tests.ranks import RankPool
from tests.te import jobs

Ranks = Callable[..., RankPool]
BF16 = {"layers": "portable", "dtype": "bf16"}
# Mean difference of log-probabilities in nats, and of all gradients together, relative.
LOGPROBS, GRADIENTS = 0.05, 0.2
STORAGE = {
    "delayed": "Float8TensorStorage",
    "tensorwise": "Float8TensorStorage",
    "blockwise": "Float8BlockwiseQTensorStorage",
    "mxfp8": "MXFP8TensorStorage",
}


def fp8(recipe: str, recompute: str = "none", first_last: bool = False, **more: Any) -> dict[str, Any]:
    kind = "hybrid" if recipe in ("delayed", "tensorwise") else "e4m3"
    chosen = {"format": kind, "recipe": recipe, "first_last_layers_bf16": first_last}
    return {"layers": "te", "dtype": "bf16", "recompute": recompute, "fp8": chosen, **more}


@pytest.fixture(scope="module")
def blackwell() -> Iterator[RankPool]:
    """One rank whose device is played as the generation that has MXFP8."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MEGARL_TE_CAPABILITY", "10.0")
        pool = RankPool(1, 1, 1, forked=False)
    yield pool
    pool.close()


def differences(found: list[dict[str, Any]], name: str, reference: str = "bf16") -> tuple[float, float]:
    """(mean of log-probabilities, relative of gradients), the largest of all ranks."""
    logprobs = max(
        float((rank[name]["logprobs"] - rank[reference]["logprobs"]).abs().mean()) for rank in found
    )
    difference = (
        torch.cat([rank[name]["gradients"] - rank[reference]["gradients"] for rank in found]).double().norm()
    )
    norm = torch.cat([rank[reference]["gradients"] for rank in found]).double().norm()
    return logprobs, float(difference / norm)


def check(found: list[dict[str, Any]], name: str, recipe: str) -> None:
    logprobs, gradients = differences(found, name)
    print(f"{name}: log-probs {logprobs:.1e} of {LOGPROBS}, gradients {gradients:.1e} of {GRADIENTS}")
    assert 1e-3 < logprobs <= LOGPROBS, name  # below that there would have been no FP8
    assert 1e-2 < gradients <= GRADIENTS, name
    for layout in ("TN", "NN", "NT"):
        products = [key for key in found[0][name]["calls"] if key.startswith(f"gemm {layout}")]
        assert any(key.endswith(STORAGE[recipe]) for key in products), (name, layout, products)


@pytest.mark.shows("FP8", family=["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1)], ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format)
def test_recipes_are_near_bf16(layout: tuple[int, int, int], ranks: Ranks, tmp_path: Path) -> None:
    """With packs that have to be filled up; at TP 2 with sequence parallelism, where each rank quantises its
    share of them."""
    # Pipeline stages exchange hidden states in bf16, whatever the recipe.
    recipes = ["tensorwise"] if layout == (1, 2, 1) else [recipe for recipe in RECIPES if recipe != "mxfp8"]
    models = {"bf16": BF16, "te": {"layers": "te", "dtype": "bf16"}} | {name: fp8(name) for name in recipes}
    if layout == (1, 1, 1):
        models |= {"recomputed": fp8("tensorwise", "full"), "experts": fp8("tensorwise", mixture=True)}
        models |= {"experts in bf16": {**BF16, "mixture": True}}
        models |= {"mlps recomputed": fp8("tensorwise", "selective", recompute_modules=["mlp"])}
    found = ranks(*layout).run(jobs.measure, folder=tmp_path, models=models)
    for recipe in recipes:
        check(found, recipe, recipe)
    logprobs, gradients = differences(found, "te")
    assert logprobs <= 4e-3 and gradients <= 2e-2
    if layout == (1, 1, 1):
        for name in ("recomputed", "mlps recomputed"):
            for what in ("logprobs", "gradients"):
                assert torch.equal(found[0][name][what], found[0]["tensorwise"][what]), (name, what)
        logprobs, gradients = differences(found, "experts", "experts in bf16")
        assert 1e-3 < logprobs <= LOGPROBS and 1e-2 < gradients <= GRADIENTS


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1)], ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format)
def test_adapters_beside_weights_in_fp8(layout: tuple[int, int, int], ranks: Ranks, tmp_path: Path) -> None:
    """Which have no gradients: their products in FP8 are those of the forward pass and of the input's
    gradient."""
    lora = {"rank": 8, "alpha": 16.0}
    kinds = {"fp8": fp8("tensorwise", lora=lora), "blocks": fp8("blockwise", "full", lora=lora)}
    if layout == (1, 1, 1):
        kinds |= {"experts": fp8("tensorwise", mixture=True, lora=lora)}
        kinds |= {"experts in bf16": {**BF16, "mixture": True, "lora": lora}}
    models = {"bf16": {**BF16, "lora": lora}, **kinds}
    found = ranks(*layout).run(jobs.measure, folder=tmp_path, models=models)
    for name in kinds if layout == (2, 1, 1) else ("fp8", "blocks", "experts"):
        reference = "experts in bf16" if name == "experts" else "bf16"
        logprobs, gradients = differences(found, name, reference)
        print(f"{name}: log-probs {logprobs:.1e} of {LOGPROBS}, gradients {gradients:.1e} of {GRADIENTS}")
        assert 1e-3 < logprobs <= LOGPROBS and 1e-2 < gradients <= GRADIENTS, name
        calls = found[0][name]["calls"]
        assert any(key.startswith("gemm NN") for key in calls), (name, "the input's gradient", calls)
        assert not any(key.startswith("gemm NT") for key in calls), (name, "the weights' gradient", calls)


def test_mxfp8_is_near_bf16(blackwell: RankPool, tmp_path: Path) -> None:
    """And a recipe with one scale for a tensor, on a device whose products take operands in either
    orientation."""
    recipes = ("mxfp8", "tensorwise")
    found = blackwell.run(
        jobs.measure, folder=tmp_path, models={"bf16": BF16} | {name: fp8(name) for name in recipes}
    )
    for recipe in recipes:
        check(found, recipe, recipe)


def test_fp8_copies_on_blackwell_are_as_large_as_planned(blackwell: RankPool, tmp_path: Path) -> None:
    """Rows and columns with the scales of their blocks; with one scale, rows alone."""
    found = {
        recipe: blackwell.run(jobs.copies, folder=tmp_path / recipe, model=fp8(recipe), transposes=False)[0]
        for recipe in ("mxfp8", "tensorwise")
    }
    for updated, passed, planned in found.values():
        assert updated == passed == pytest.approx(planned, rel=0.01)
    assert found["mxfp8"][2] == pytest.approx(2.0625 * found["tensorwise"][2])


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_first_and_last_layer_stay_in_bf16(recipe: str, ranks: Ranks, tmp_path: Path) -> None:
    """Of four layers two: half of the products are of bf16 operands, and the result is nearer to bf16's."""
    models = {"bf16": BF16, "all": fp8(recipe), "inner": fp8(recipe, first_last=True)}
    found = ranks(1, 1, 1).run(jobs.measure, folder=tmp_path, models=models)

    def products(name: str, operand: str) -> int:
        return sum(
            n
            for key, n in found[0][name]["calls"].items()
            if key.startswith("gemm TN") and key.endswith(operand)
        )

    assert products("all", " Tensor") == 0
    assert (
        products("inner", " Tensor")
        == products("inner", STORAGE[recipe])
        == products("all", STORAGE[recipe]) // 2
        > 0
    )
    assert differences(found, "inner")[0] < differences(found, "all")[0]
    check(found, "inner", recipe)


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1)], ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format)
def test_delayed_scalings_history_is_part_of_a_checkpoint(
    layout: tuple[int, int, int], ranks: Ranks, tmp_path: Path
) -> None:
    """Loaded, it gives the update that the undisturbed learner makes, bit for bit; without its history it
    does not."""
    model = fp8("delayed")
    for rank in ranks(*layout).run(
        jobs.through_a_checkpoint, folder=tmp_path / "kept", written=model, read=model
    ):
        written, read = rank["scales"]
        assert written.keys() == read.keys() and len(written) == 4 * 16
        assert all(torch.equal(written[name], read[name]) for name in written)
        assert any(bool((value != 1).any()) for name, value in written.items() if name.endswith("scale"))
        assert rank["norms"][0] == rank["norms"][1] > 0
        assert torch.equal(*rank["logprobs"])
    if layout == (1, 1, 1):
        (lost,) = ranks(1, 1, 1).run(
            jobs.through_a_checkpoint, folder=tmp_path / "lost", written=model, read=model, forget=True
        )
        assert lost["norms"][0] != lost["norms"][1]


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1)], ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format)
def test_delayed_scaling_of_one_model_leaves_anothers_alone(
    layout: tuple[int, int, int], ranks: Ranks, tmp_path: Path
) -> None:
    """Transformer Engine has one buffer of maxima for all models of a recipe, actor and critic, and makes
    scales of all of them after each pass: what had no pass keeps its own."""
    arguments = {"folder": tmp_path, "model": fp8("delayed")}
    pool = ranks(*layout)
    alone, beside = (pool.run(jobs.beside_another, **arguments, other=other) for other in (False, True))
    for (norms, kept), (others_norms, others_kept) in zip(alone, beside, strict=True):
        assert norms == others_norms and len(set(norms)) == 3
        assert any(bool((value != 1).any()) for name, value in kept.items() if name.endswith("scale"))
        assert all(torch.equal(kept[name], others_kept[name]) for name in kept)
