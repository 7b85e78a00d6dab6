"""Compare the planned memory of shipped runs with the peak measured on fake CUDA tensors.

Models have the real widths but few layers. `make rehearse-memory` measures whole models."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import load_config
from megarl.plan.sizes import GIB
from tests.cli.test_hour import on_h100
from tests.ranks import in_a_fork
from tests.rehearsal.fake_tensors import needs_compiler
from tests.rehearsal.peaks import Rows, measured, sizes
from tests.rehearsal.te_shapes import PYTHON_HALF

ROOT = Path(__file__).parents[2]
VAPO, DAPO, MIXTURE = (ROOT / f"configs/{name}.yaml" for name in ("vapo_32b", "dapo_32b", "dapo_30b_a3b"))
PORTABLE = ("model.layers=portable", "model.fp8.format=none")
needs_te = pytest.mark.skipif(
    not PYTHON_HALF.is_dir() and find_spec("transformer_engine") is None,
    reason="needs Transformer Engine's Python half: make rehearse",
)
pytestmark = needs_compiler
SLOW = pytest.mark.slow  # run by `make rehearse`
LIMIT = 500.0  # seconds; a measurement takes 15 s on an idle machine


def portable(config: Path, layers: int, stage: int, *overrides: str) -> Rows:
    """Measure a rank with portable layers."""
    from tests.rehearsal.lonely import complete, measure

    loaded = load_config(config, [*PORTABLE, *overrides])
    return measure(loaded, complete(sizes(loaded, layers)), stage, 1)


def forked(*arguments: Any) -> Rows:
    rows: Rows = in_a_fork(portable, *arguments, limit=LIMIT)
    return rows


def without(what: str, *arguments: Any) -> Any:
    """Measure the same with an earlier defect; return the error's message if it raises RuntimeError."""
    from megarl.model import builder
    from megarl.training import model

    with pytest.MonkeyPatch.context() as patch:
        if what == "counters on the device":
            watch = builder.watch_routers
            patch.setattr(builder, "watch_routers", lambda m, device: watch(m, torch.device("cpu")))
        if what == "a loss on the device":
            on_host = type("Torch", (), {"__getattr__": lambda self, name: getattr(torch, name)})()
            on_host.zeros = lambda *shape, device=None, **options: torch.zeros(*shape, **options)
            patch.setattr(model, "torch", on_host)
        try:
            return portable(*arguments)
        except RuntimeError as error:
            return str(error)


def near(rows: Rows, least: float = 0.9, most: float = 1.1) -> None:
    """Check that every phase's plan is within a tenth of the measured peak, -0.5 GiB or +0.2 GiB.

    The GiB are for buffers that do not grow with the layers, of which there are few here."""
    found = {row["phase"]: (row["planned"] / GIB, row["measured"] / GIB) for row in rows if row["planned"]}
    assert found
    for planned, seen in found.values():
        assert least * seen - 0.5 < planned < most * seen + 0.2, found


@SLOW
@pytest.mark.parametrize("stage", [1, 0, 2])
def test_stages_of_a_dense_run(stage: int) -> None:
    more = [] if stage == 2 else ["value_pretraining.steps=0"]
    rows = forked(VAPO, 6, stage, "parallel.pp=3", "parallel.dp=2", "model.recompute_layers=1", *more)
    near(rows)
    phases = {row["phase"] for row in rows}
    assert {"construction: critic", "critic_update", "rollout", "weight_transfer"} < phases
    assert {"checkpoint: actor", "continuation: critic"} < phases
    assert ("value_pretraining: critic_update" in phases) == (stage == 2)
    # Tensors that stay while the engine is awake: the plan gives all other memory to the engine.
    assert all(row["stays"] < 0.6 * GIB for row in rows if row["phase"].endswith("rollout"))


@SLOW
@pytest.mark.parametrize("recompute", ["full", "none"])
def test_a_mixture(recompute: str) -> None:
    """The plan contains the copies of tokens that are dispatched to experts and combined.

    Without them it was 5 GiB too low for 30B-A3B on 32 H100."""
    same = ("parallel.dp=8", "model.recompute_layers=null", f"model.recompute={recompute}")
    near(forked(MIXTURE, 2, 0, *same))


@needs_te
@SLOW
@pytest.mark.parametrize("recipe", ["none", "tensorwise", "blockwise"])
def test_transformer_engines_layers(recipe: str) -> None:
    """The plan contains tensors that the modules save for the backward pass, and FP8 copies of weights.

    Without them the shipped 32B, 30B-A3B and 72B would run out of memory."""
    fp8 = f"model.fp8.format={'none' if recipe == 'none' else 'e4m3'}"
    fp8 += "" if recipe == "none" else f" model.fp8.recipe={recipe}"
    rows = measured(
        DAPO, [*fp8.split(), "parallel.pp=3", "parallel.dp=2", "model.recompute_layers=1"], 1, layers=6
    )
    near(rows)
    [transferred] = [row for row in rows if row["phase"] == "weight_transfer"]
    copies = sum(size for name, size in transferred["parts"].items() if name.endswith(".fp8_copies"))
    assert (copies > 0) == (recipe != "none")
    if copies:
        assert transferred["planned"] - copies < 0.7 * transferred["measured"]


@needs_te
@SLOW
@pytest.mark.parametrize("name", ["qwen_vapo", "qwen_fp8", "qwen_blockwise", "qwen_dapo", "qwen_large"])
def test_runs_of_make_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All phases of the whole runs on GSM8K, with the overrides that `make gpu` gives them on an H100.

    `qwen_ppo` is left out: measure() has no reference model."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    hour, configs = (importlib.import_module(module) for module in ("hour", "hour_configs"))
    given = on_h100(hour, tmp_path, 1)
    rows = measured(ROOT / configs.get_config(name, given), configs.get_overrides(name, given), 0)
    near(rows)
    assert {"rollout", "actor_update", "weight_transfer"} < {row["phase"] for row in rows}


@SLOW
@pytest.mark.parametrize(
    ("defect", "found"),
    [("counters on the device", "cpu"), ("a loss on the device", "cpu")],
)
def test_defects_of_mixtures_would_have_been_found(defect: str, found: str) -> None:
    """Two defects that fail the first pass on a device, but no run on a CPU, raise on fake tensors."""
    problem = in_a_fork(without, defect, MIXTURE, 2, 0, "parallel.dp=8", limit=LIMIT)
    assert isinstance(problem, str) and "device" in problem and found in problem


@SLOW
def test_a_checkpoint_gathers_a_bucket() -> None:
    """A checkpoint gathers two float32 copies of all trained parameters of a stage other than the first.

    Before the plan contained them, 72B at tp 4, pp 2 would have run out of memory at its first checkpoint."""
    rows = forked(DAPO, 4, 1, "parallel.pp=2", "parallel.dp=2", "model.recompute_layers=1")
    [saved] = [row for row in rows if row["phase"] == "checkpoint: actor"]
    assert saved["measured"] > 2 * (saved["planned"] - saved["parts"]["gathered bucket"])
    near([saved], least=0.95, most=1.05)
