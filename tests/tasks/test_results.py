"""The runs behind docs/real_model.md: what is kept of one, what counts as the same curve, what is drawn."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megarl.config.errors import ConfigError


@pytest.fixture(scope="module")
def results() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "results.py"
    spec = importlib.util.spec_from_file_location("results", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def curve(results: ModuleType, run_dir: Path, right: int, seed: int = 1, of: int = 40) -> dict[str, Any]:
    """The curve of a run that had so many right after its last step, and two of 40 before."""
    run_dir.mkdir()
    answers = [
        {"step": step, "uid": i, "correct": i < count, "data_source": "lcm" if i % 2 else "gcd"}
        for step, count in ((0, 2), (5, right))
        for i in range(of)
    ]
    other = [
        {**answer, "set": "basic_arithmetic", "data_source": "basic_arithmetic"} for answer in answers[:9]
    ]
    (run_dir / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers + other))
    records = [{"step": 1, "stage": "train", "reward/score": 0.5, "x": 1}, {"step": 0, "stage": "eval"}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    return {
        "recipe": "vapo",
        "seed": seed,
        "processor": "P",
        "dtype": "fp32",
        "versions": {"torch": "1"},
        "evaluations": list(results.evaluations(run_dir)),
        "steps": list(results.steps(run_dir)),
    }


def test_what_is_kept_of_a_run(results: ModuleType, tmp_path: Path) -> None:
    kept = curve(results, tmp_path / "run", right=30)
    found = {(e["step"], e["of"]): (e["problems"], e["right"]) for e in kept["evaluations"]}
    assert found == {
        (0, "all"): (40, 0.05),
        (0, "gcd"): (20, 0.05),
        (0, "lcm"): (20, 0.05),
        (0, "basic_arithmetic"): (9, 2 / 9),
        (5, "all"): (40, 0.75),
        (5, "gcd"): (20, 0.75),
        (5, "lcm"): (20, 0.75),
    }
    assert all(e["low"] <= e["right"] <= e["high"] for e in kept["evaluations"])
    assert kept["steps"] == [{"step": 1, "reward/score": 0.5}]


def test_the_same_curve(results: ModuleType, tmp_path: Path) -> None:
    """To the last digit on the same processor, within the intervals on another."""
    one, near, far = (curve(results, tmp_path / str(n), right=n) for n in (30, 29, 4))
    assert results.check(one, one) == "equal to the last digit"
    with pytest.raises(ConfigError, match="vapo-1: another curve on the same kind of processor"):
        results.check(one, near)
    elsewhere = {"processor": "Q"}
    assert results.check(one, near | elsewhere).startswith("within its intervals (Q, fp32")
    with pytest.raises(ConfigError, match=r"vapo-1: step 5, all: 0.100 beside 0.750: the intervals do not"):
        results.check(one, far | elsewhere)


def test_figures(results: ModuleType, tmp_path: Path) -> None:
    curves = [curve(results, tmp_path / str(seed), right=20 + seed, seed=seed) for seed in (1, 2)]
    results.draw(curves, tmp_path)
    for name in results.FIGURES:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
