"""The runs behind docs/real_model.md: which a table has, in which precision; what is the same curve."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megarl.algorithms.scores import interval
from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results() -> ModuleType:
    path = ROOT / "tools" / "results.py"
    spec = importlib.util.spec_from_file_location("results", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["results"] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def curve(right: int) -> dict[str, Any]:
    """The curve of a run that had 2 of 40 right before, and so many after its last step."""
    evaluations = []
    for step, count in ((0, 2), (5, right)):
        low, high = interval([1.0] * count + [0.0] * (40 - count), 1)
        evaluations.append({"step": step, "of": "all", "right": count / 40, "low": low, "high": high})
    own = {"recipe": "vapo", "seed": 1, "processor": "P", "dtype": "fp32", "versions": {"torch": "1"}}
    return {**own, "evaluations": evaluations}


def test_the_same_curve(results: ModuleType) -> None:
    """To the last digit on the same processor, within the intervals on another."""
    one, near, far = map(curve, (30, 29, 4))
    assert results.check(one, one) == "equal to the last digit"
    with pytest.raises(ConfigError, match="vapo-1: a different curve on the same kind of processor"):
        results.check(one, near)
    elsewhere = {"processor": "Q"}
    assert results.check(one, near | elsewhere).startswith("within its intervals (Q, fp32")
    with pytest.raises(ConfigError, match=r"vapo-1: step 5, all: 0.100 and 0.750: the intervals do not"):
        results.check(one, far | elsewhere)


def test_a_run_is_done_again_with_its_own_learning_rate(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And as many steps as it had."""
    old, asked = {**curve(30), "steps": [{}, {}, {}]}, []
    monkeypatch.setattr(results, "train", lambda *given: asked.append(given) or old)
    methods = results.read_table("smollm2", "methods", ["vapo"])
    (run,) = methods.runs([1], {"vapo": 2e-5})
    run = replace(run, file=tmp_path / run.file.name)
    with pytest.raises(ConfigError, match="--check: vapo-2e-05-1: no committed run of this table"):
        results.check_again([run], "vapo-2e-05-1", "fp32")
    run.file.write_text(json.dumps(old))
    results.check_again([run], "vapo-2e-05-1", "fp32")
    ((row, settings, seed, folder, dtype),) = asked
    assert (row, seed, folder.name, dtype) == ("vapo", 1, "check", "fp32")
    config = load_config(ROOT / settings[0], settings[1:])
    assert (config.actor.lr, config.steps) == (2e-5, 3)
    assert capsys.readouterr().out == "vapo-2e-05-1: equal to the last digit\n"


def test_precision_is_that_of_the_committed_runs(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a table could mix two, on processors that multiply bf16 about twice as fast as fp32."""
    monkeypatch.setattr(results, "matrix_rates", lambda _: {"fp32": 100.0, "bf16": 201.0})
    (tmp_path / "tuned.json").write_text("{}")
    assert results.precision(tmp_path) == "bf16"
    (tmp_path / "vapo-1.json").write_text(json.dumps({"dtype": "fp32"}))
    assert results.precision(tmp_path) == "fp32"
    assert capsys.readouterr().out == ""
    (tmp_path / "vapo-1.json").write_text(json.dumps({"dtype": "bf16"}))
    monkeypatch.setattr(results, "matrix_rates", lambda _: {"fp32": 29.0, "bf16": 1.0})
    assert results.precision(tmp_path) == "bf16"
    assert "1 GFLOP/s a core in bf16" in capsys.readouterr().out


def test_no_learning_rate_is_tried_when_time_is_up(
    results: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = results.read_table("smollm2", "methods", ["vapo"])
    results.tune(table, tmp_path / "tuned.json", "fp32", end=0.0)
    assert capsys.readouterr().out == "vapo at 5e-06 and later runs are left: --hours have passed\n"
    assert not (tmp_path / "tuned.json").exists()


def test_the_best_learning_rate(results: ModuleType) -> None:
    def tried(right: dict[str, list[float]]) -> dict[str, Any]:
        return {rate: {"right": found} for rate, found in right.items()}

    assert results.best_rate(tried({"5e-06": [0.3, 0.3], "1e-05": [0.2, 0.5], "2e-05": [0.4, 0.0]})) == 1e-5
    assert results.best_rate(tried({"2e-05": [0.4], "5e-06": [0.3], "1e-05": [0.4]})) == 1e-5


def test_which_runs_a_table_has(results: ModuleType) -> None:
    """A longer run of `recipes` counts where the learning rate is the same; a table with settings of its own
    has runs of its own."""
    methods = results.read_table("smollm2", "methods", ["vapo", "rloo"])
    found = {run.file.name: run for run in methods.runs([1], {"vapo": 1e-5, "rloo": 2e-5})}
    assert found.keys() == {"vapo-1.json", "rloo-2e-05-1.json"}
    assert found["vapo-1.json"].settings[-1] == "steps=40"
    assert found["rloo-2e-05-1.json"].settings[-2:] == ["steps=20", "actor.lr=2e-05"]
    assert found["vapo-1.json"].file.parent.name == "smollm2"
    whole, first, *_ = results.read_table("smollm2", "vapo", []).runs([2, 3], {})
    assert (whole.row, whole.seed, first.row, first.seed) == ("vapo", 2, "without_value_pretraining", 2)
    assert whole.settings[-1] == "steps=10" and first.settings[-2] == "value_pretraining.steps=0"
    assert whole.file.parent.name == whole.folder.parent.name == "vapo"
    with pytest.raises(ConfigError, match="--rows: sao: no such row"):
        results.read_table("smollm2", "vapo", ["sao"])


@pytest.mark.parametrize("table", ["recipes", "methods", "vapo"])
def test_every_row_is_a_configuration(results: ModuleType, table: str) -> None:
    configs = {}
    for row, (path, *settings) in results.read_table("smollm2", table, []).rows.items():
        configs[row] = load_config(ROOT / path, settings)
        check_config(configs[row], row)
    assert {c.rollout.prompts * c.rollout.group_size for c in configs.values()} <= {64}
    assert len({str(c.model_copy(update={"run_dir": None})) for c in configs.values()}) == len(configs)
