"""What surrounds Transformer Engine's layers in training: gradient buffers, offloading, checkpoints, whole
runs of DAPO and VAPO."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import Family
from tests.parallel import jobs as jobs_of_layouts
from tests.parallel.jobs import updates_with_moves
from tests.parallel.test_offload import bits
from tests.ranks import RankPool
from tests.schedule import test_resume
from tests.te import jobs
from tests.te.test_fp8 import fp8
from tests.tiny_models import make_tiny_model

Ranks = Callable[..., RankPool]


def test_weight_gradients_are_added_up_in_float32(ranks: Ranks, tmp_path: Path) -> None:
    """Within the product, without apex: in float32 the very same bits as one after the other; in bf16 no
    product is rounded, but where gradients are to be in bf16."""
    (exact,) = ranks(1, 1, 1).run(jobs.accumulate, folder=tmp_path / "fp32", dtype="fp32")
    assert exact["equal"] and exact["fused"] <= 1e-6
    (half,) = ranks(1, 1, 1).run(jobs.accumulate, folder=tmp_path / "bf16", dtype="bf16")
    assert half["fused"] <= 1e-6 < 1e-3 < half["apart"]
    rounded = {"dtype": "bf16", "grad_dtype": "bf16"}
    (less,) = ranks(1, 1, 1).run(jobs.accumulate, folder=tmp_path / "gradients", **rounded)
    assert 1e-4 < less["fused"] < 0.01


@pytest.mark.parametrize(("layout", "dtype"), [((2, 1, 1), "bf16"), ((1, 1, 2), "fp32")])
def test_a_learner_that_was_away_learns_the_same_bits(
    layout: tuple, dtype: str, ranks: Ranks, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=61, tied=True)
    for which in ("actor", "critic"):
        arguments = {"folder": folder, "which": which, "dtype": dtype, "model": {"layers": "te"}}
        stayed, moved = (
            ranks(*layout).run(updates_with_moves, **arguments, moves=moves) for moves in (False, True)
        )
        for here, there in zip(stayed, moved, strict=True):
            assert here["norms"] == there["norms"] and all(norm > 0 for norm in here["norms"])
            assert here["tensors"].keys() == there["tensors"].keys()
            assert all(
                bits(tensor) == bits(there["tensors"][name]) for name, tensor in here["tensors"].items()
            )
            assert there["away"] == 0


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_fp8_copies_of_weights_go_with_them(recipe: str, ranks: Ranks, tmp_path: Path) -> None:
    """And are made anew, of the weights that have come back."""
    arguments = {"folder": tmp_path, "model": fp8(recipe)}
    stays, leaves = (ranks(1, 1, 1).run(jobs.updates, **arguments, moves=moves)[0] for moves in (False, True))
    assert stays["norms"] == leaves["norms"] and len(set(stays["norms"])) == 3
    assert torch.equal(stays["logprobs"], leaves["logprobs"])
    assert leaves["copies"] == 0


@pytest.mark.parametrize("model", [{"layers": "te", "dtype": "bf16"}, fp8("tensorwise")], ids=["bf16", "fp8"])
def test_stand_ins_of_gradients_go_with_them(model: dict[str, Any], ranks: Ranks, tmp_path: Path) -> None:
    """Of each shape of a weight there is one, as large as the weight, which Transformer Engine would keep
    beside the engine."""
    stays, leaves = (
        ranks(1, 1, 1).run(jobs.updates, folder=tmp_path, model=model, moves=moves)[0]
        for moves in (False, True)
    )
    assert stays["norms"] == leaves["norms"] and torch.equal(stays["logprobs"], leaves["logprobs"])
    here, away = leaves["stand_ins"][::2], leaves["stand_ins"][1::2]
    assert stays["stand_ins"] == here and min(here) > 0
    assert away == [0, 0, 0]


@pytest.mark.parametrize(("family", "grouped"), [("qwen3", False), ("qwen3_moe", False), ("qwen3_moe", True)])
def test_nothing_of_an_update_stays_on_the_device(
    family: Family, grouped: bool, ranks: Ranks, tmp_path: Path
) -> None:
    """But for workspaces of matrix products, 32 MiB each, which are among the plan's contexts."""
    folder = make_tiny_model(tmp_path / "model", family, vocab=61)
    model = {"layers": "te", "grouped_experts": grouped}
    (left,) = ranks(1, 1, 1).run(jobs_of_layouts.left_behind, folder=folder, model=model)
    assert [found for found in left if 64 < found[0] < 2**25] == []


COPIES = {"tensorwise": {"first_last": True}, "delayed": {}, "blockwise": {}, "mixture": {"mixture": True}}


@pytest.mark.parametrize("kind", COPIES)
def test_fp8_copies_of_weights_are_as_large_as_planned(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    """After an update of several micro-batches and after the pass without gradients that follows."""
    recipe = kind if kind != "mixture" else "tensorwise"
    arguments = {"folder": tmp_path, "model": fp8(recipe, "full", **COPIES[kind]), "transposes": True}
    for layout in [(1, 1, 1), (2, 1, 1), (1, 2, 1)] if kind == "tensorwise" else [(1, 1, 1)]:
        for updated, passed, planned in ranks(*layout).run(jobs.copies, **arguments):
            assert updated == passed == pytest.approx(planned, rel=0.01) and planned > 0


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1)], ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format)
def test_a_checkpoint_is_for_both_kinds_of_layers(
    layout: tuple[int, int, int], ranks: Ranks, tmp_path: Path
) -> None:
    """Weights are equal, and the next update is, which needs the optimizer's state; and no moment is held
    twice while it is read."""
    kinds = {name: {"layers": name, "dtype": "fp32"} for name in ("te", "portable")}
    for written, read in (("te", "portable"), ("portable", "te")):
        keys = {"written": kinds[written], "read": kinds[read]}
        for rank in ranks(*layout).run(jobs.through_a_checkpoint, folder=tmp_path / written, **keys):
            first, second = rank["weights"]
            assert first.keys() == second.keys() and rank["filled_in_place"]
            assert all(torch.equal(first[name], second[name]) for name in first)
            assert rank["norms"][0] == pytest.approx(rank["norms"][1], rel=1e-5)
            assert (rank["logprobs"][0] - rank["logprobs"][1]).abs().max() <= 1e-5


@pytest.fixture(scope="module")
def without() -> Iterator[RankPool]:
    """One rank that has no Transformer Engine, where Megatron takes torch's Adam."""
    path = [place for place in sys.path if not holds_transformer_engine(place)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", path)
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        pool = RankPool(1, 1, 1, forked=False)
    yield pool
    pool.close()


def holds_transformer_engine(place: str) -> bool:
    """Whether a folder of sys.path holds Transformer Engine, or the half that is emulated."""
    return any(Path(place, name).exists() for name in ("transformer_engine", "transformer_engine_torch.py"))


def around_a_checkpoint(runtime: Any, **arguments: Any) -> dict[str, Any]:
    """The job of that name, and the module of the Adam that it ran on."""
    from megatron.core.optimizer import Adam

    return {**jobs_of_layouts.around_a_checkpoint(runtime, **arguments), "adam": Adam.__module__}


@pytest.mark.parametrize("written_by", ["torch", "transformer_engine"])
def test_a_checkpoint_continues_under_the_other_adam(
    written_by: str, without: RankPool, ranks: Ranks, tmp_path: Path
) -> None:
    """To the bit what was written, and then the next step, whose corrections depend on the number of
    steps."""
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=61, tied=True)
    (tmp_path / "checkpoint").mkdir()
    pools = {"torch": without, "transformer_engine": ranks(1, 1, 1)}
    found = {}
    for name in sorted(pools, key=lambda name: name != written_by):
        arguments = {"folder": folder, "checkpoint": tmp_path / "checkpoint", "read": name != written_by}
        [found[name]] = pools[name].run(around_a_checkpoint, **arguments)
        assert found[name]["adam"].startswith(name)
    ours, theirs = found["torch"], found["transformer_engine"]
    for moment, exact in (("between", True), ("after", False)):
        names = [name for name in ours[moment] if not name.endswith(" step")]
        assert names == list(theirs[moment]) and any(name.endswith("exp_avg_sq") for name in names)
        for name in names:
            mine, other = ours[moment][name], theirs[moment][name]
            same = torch.equal(mine, other) if exact else torch.allclose(mine, other, rtol=1e-5, atol=1e-7)
            assert same, (moment, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose sides FP8 takes, and problems."""
    folder = tmp_path_factory.mktemp("runs")
    make_tiny_model(folder / "model", "qwen3", vocab=307, hidden=64, ffn=96, head_dim=16, tied=True)
    rows = [{"question": f"{a}+{b}=?", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


VAPO: dict[str, Any] = {
    "recipe": "vapo",
    "algorithm": {"advantage": "gae", "lambda_policy": "length_adaptive", "alpha": 0.5, "nll_weight": 0.1},
    "value_pretraining": {"steps": 2},
    "critic": {"lr": 1e-2},
}
BF16 = {"layers": "te", "dtype": "bf16"}


@pytest.mark.parametrize("recipe", ["dapo", "vapo"])
def test_runs_equal_those_of_portable_layers(recipe: str, ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    """Two steps at TP 2 in float32, groups moving, checkpoints written: the same responses, the same
    statistics."""
    records = []
    for layers in ("portable", "te"):
        keys = VAPO if recipe == "vapo" else {}
        model = {"path": folder / "model", "dtype": "fp32", "layers": layers}
        shared = {
            "steps": 2,
            "model": model,
            "parallel": {"tp": 2, "device": "auto"},
            "residency": {"offload": True},
        }
        config = test_resume.make_config(folder, tmp_path / layers, **shared, **keys)
        config.run_dir.mkdir()
        ranks(2, 1, 1).run(jobs.train, config=config)
        records.append(
            [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
        )
    portable, found = records
    stages = [record["stage"] for record in found]
    assert stages.count("train") == 2 and stages.count("value_pretraining") == (2 if recipe == "vapo" else 0)
    for mine, theirs in zip(found, portable, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            if name.startswith(("time/", "inside/", "throughput/", "memory", "transfer/")) or not isinstance(
                value, float
            ):
                continue
            assert value == pytest.approx(theirs[name], rel=2e-3, abs=2e-5), (
                mine["stage"],
                mine["step"],
                name,
            )
    last = found[-1]
    assert last["mismatch/logprob_abs_max"] <= 1e-4 and last["policy/grad_norm"] > 0


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_vapo_in_fp8(recipe: str, ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    """Actor and critic in FP8 against an engine in bf16: trained, pretrained, within what FP8 differs by."""
    model = {"path": folder / "model", **fp8(recipe, recompute="full")}
    shared = {
        "steps": 2,
        "model": model,
        "parallel": {"tp": 1, "device": "auto"},
        "residency": {"offload": True},
    }
    config = test_resume.make_config(folder, tmp_path / "run", **shared, **VAPO)
    config.run_dir.mkdir()
    ranks(1, 1, 1).run(jobs.train, config=config)
    records = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["stage"] for record in records].count("train") == 2
    for record in records:
        if record["stage"] == "train":
            assert 1e-3 < record["mismatch/logprob_abs_mean"] <= 0.2
            assert record["policy/grad_norm"] > 0 and record["value/loss"] > 0


def test_plain_attention_is_told_of(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    """Once after each start, where cuDNN has no kernel."""
    shared = {"steps": 1, "parallel": {"tp": 1, "device": "auto"}, **VAPO, "value_pretraining": {"steps": 1}}
    told = {}
    for name, job in (("taken", jobs.train), ("refused", jobs.train_without_cudnn)):
        model = {"path": folder / "model", "layers": "te", "dtype": "bf16"}
        config = test_resume.make_config(folder, tmp_path / name, model=model, **shared)
        config.run_dir.mkdir()
        ranks(1, 1, 1).run(job, config=config)
        told[name] = (config.run_dir / "metrics.jsonl").read_text().count("attention is unfused")
    assert told == {"taken": 0, "refused": 1}
