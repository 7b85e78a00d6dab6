"""The runs behind docs/real_model.md: what is kept of one, what counts as the same curve, what is drawn."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.load import read_yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results() -> ModuleType:
    path = ROOT / "tools" / "results.py"
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
    records = [
        {"step": 2, "stage": "value_pretraining", "rollout/tokens": 400, "time/step": 4.0},
        *(
            {"step": n, "stage": "train", "rollout/tokens": 100, "time/step": 9.0, "x": 1}
            for n in range(1, 6)
        ),
        {"step": 0, "stage": "eval"},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    return {
        "recipe": "vapo",
        "seed": seed,
        "processor": "P",
        "dtype": "fp32",
        "versions": {"torch": "1"},
        "evaluations": list(results.evaluations(run_dir)),
        "value_pretraining": results.value_pretraining(run_dir),
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
    assert kept["steps"] == [{"step": n, "rollout/tokens": 100, "time/step": 9.0} for n in range(1, 6)]
    assert kept["value_pretraining"] == {"rollout/tokens": 400, "time/step": 4.0}


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


def test_a_table_compares_at_equal_cost(results: ModuleType, tmp_path: Path) -> None:
    """Whoever draws more has its accuracy read off earlier, between two evaluations."""
    vapo = [curve(results, tmp_path / f"v{seed}", right=20 + seed, seed=seed) for seed in (1, 2, 3)]
    dapo = [curve(results, tmp_path / f"d{seed}", right=30 + 2 * seed, seed=seed) for seed in (1, 2, 3)]
    for run in dapo:  # without a critic, and with 1,800 tokens: twice as many
        run["value_pretraining"] = {"rollout/tokens": 0, "time/step": 0}
        run["steps"] = [{**step, "rollout/tokens": 360} for step in run["steps"]]
    assert results.until(vapo[0], "rollout/tokens") == ([0, 900], [0.05, 21 / 40])
    *_, first, second = results.table({"vapo": vapo, "dapo": dapo}, minutes=False).splitlines()
    assert "| vapo | 0.550 ± 0.025 (n = 3) | 0.550 ± 0.025 (n = 3) |" in first
    halves = [(0.05 + (30 + 2 * seed) / 40) / 2 for seed in (1, 2, 3)]
    mean = sum(halves) / 3
    assert f"| dapo | 0.850 ± 0.050 (n = 3) | {mean:.3f} ± 0.025 (n = 3) |" in second
    assert f"| {mean - 0.55:+.3f}" in second
    results.draw_table({"vapo": vapo, "dapo": dapo}, tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_compares_after_equal_steps(results: ModuleType, tmp_path: Path) -> None:
    """Whatever a row's value pretraining has drawn."""
    vapo = [curve(results, tmp_path / f"v{seed}", right=20 + seed, seed=seed) for seed in (1, 2, 3)]
    other = [curve(results, tmp_path / f"o{seed}", right=22 + 2 * seed, seed=seed) for seed in (1, 2, 3)]
    for run in other:
        run["value_pretraining"] = {"rollout/tokens": 0, "time/step": 0}
    heads, _, _, second = results.table({"vapo": vapo, "other": other}, equal="steps").splitlines()
    assert "| difference to vapo after the last step |" in heads
    # Half of what vapo has spent, and at its end all the same.
    assert "| 0.650 ± 0.050 (n = 3) | 0.650 ± 0.050 (n = 3) | +0.100 [" in second
    results.draw_table({"vapo": vapo, "other": other}, tmp_path / "table.png", "steps")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_minutes_are_those_of_the_quickest_run(results: ModuleType, tmp_path: Path) -> None:
    """Not what a step took beside other work."""
    slow, fast = (
        [curve(results, tmp_path / f"{row}{seed}", right=20, seed=seed) for seed in (1, 2, 3)] for row in "sf"
    )
    took = {"step_seconds": 6.0, "value_pretraining_seconds": 30.0}
    slow = [results.timed(run, took) for run in slow]  # 60 seconds
    fast = [results.timed(run, {**took, "value_pretraining_seconds": 0.0}) for run in fast]  # 30
    table = results.table({"slow": slow, "fast": fast}, minutes=True).splitlines()
    assert "at 0.5 minutes" in table[0]
    assert "| slow | 0.500 ± 0.000 (n = 3) | 0.500 ± 0.000 (n = 3) | 0.275 ± 0.000 (n = 3) |" in table[2]
    assert "| fast | 0.500 ± 0.000 (n = 3) | 0.500 ± 0.000 (n = 3) | 0.500 ± 0.000 (n = 3) |" in table[3]


def test_what_ran_beside_a_run_does_not_count(results: ModuleType, tmp_path: Path) -> None:
    tuning = {"step_seconds": 12.0, "value_pretraining_seconds": 3.0}
    own = results.seconds(curve(results, tmp_path / "run", right=20))
    assert own == {"step_seconds": 9.0, "value_pretraining_seconds": 4.0}
    assert results.quickest([tuning, own]) == {"step_seconds": 9.0, "value_pretraining_seconds": 3.0}


def test_a_longer_run_counts_up_to_the_tables_last_step(results: ModuleType, tmp_path: Path) -> None:
    whole = curve(results, tmp_path / "run", right=30)
    cut = results.first_steps(whole, 4)
    assert [step["step"] for step in cut["steps"]] == [1, 2, 3, 4]
    assert {each["step"] for each in cut["evaluations"]} == {0}
    assert results.first_steps(whole, 5) == whole


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
    results.tune({"vapo": ["x.yaml"]}, 20, tmp_path, tmp_path / "tuned.json", "fp32", end=0.0)
    assert capsys.readouterr().out == "vapo at 5e-06 and what follows is left: --hours have passed\n"
    assert not (tmp_path / "tuned.json").exists()


def test_the_best_learning_rate(results: ModuleType) -> None:
    def tried(right: dict[str, list[float]]) -> dict[str, Any]:
        return {rate: {"right": found} for rate, found in right.items()}

    assert results.best_rate(tried({"5e-06": [0.3, 0.3], "1e-05": [0.2, 0.5], "2e-05": [0.4, 0.0]})) == 1e-5
    assert results.best_rate(tried({"2e-05": [0.4], "5e-06": [0.3], "1e-05": [0.4]})) == 1e-5


@pytest.mark.parametrize("table", ["recipes", "methods", "vapo"])
def test_every_row_is_a_configuration(table: str) -> None:
    listed = read_yaml(ROOT / "configs/results/smollm2.table.yaml")
    configs = {}
    over = listed["tables"][table].get("settings", [])
    for row in listed["tables"][table]["rows"]:
        path, *settings = listed["rows"][row]
        configs[row] = load_config(ROOT / "configs/results" / path, [*over, *settings])
        check_config(configs[row], row)
    assert {c.rollout.prompts * c.rollout.group_size for c in configs.values()} <= {64}
    assert len({str(c.model_copy(update={"run_dir": None})) for c in configs.values()}) == len(configs)
