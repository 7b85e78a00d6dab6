"""Held-out curves of finished runs: how they are reduced, compared between rows, and plotted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl_experiments import held_out


def curve(run_dir: Path, right: int, seed: int = 1, of: int = 40) -> dict[str, Any]:
    """Return the curve of a run with `right` correct responses after its last step and two of 40 before."""
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
        "evaluations": list(held_out.read_evaluations(run_dir)),
        "value_pretraining": held_out.read_value_pretraining(run_dir),
        "steps": list(held_out.read_steps(run_dir)),
    }


def test_what_is_kept_of_a_run(tmp_path: Path) -> None:
    kept = curve(tmp_path / "run", right=30)
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


def test_figures(tmp_path: Path) -> None:
    curves = [curve(tmp_path / str(seed), right=20 + seed, seed=seed) for seed in (1, 2)]
    held_out.draw_curves(curves, tmp_path)
    for name in held_out.FIGURES:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_compares_at_equal_cost(tmp_path: Path) -> None:
    """The accuracy of a row that samples more tokens is read at an earlier step, between two evaluations."""
    vapo = [curve(tmp_path / f"v{seed}", right=20 + seed, seed=seed) for seed in (1, 2, 3)]
    dapo = [curve(tmp_path / f"d{seed}", right=30 + 2 * seed, seed=seed) for seed in (1, 2, 3)]
    for run in dapo:  # without a critic, and with 1,800 tokens: twice vapo's
        run["value_pretraining"] = {"rollout/tokens": 0, "time/step": 0}
        run["steps"] = [{**step, "rollout/tokens": 360} for step in run["steps"]]
    assert held_out.accumulate(vapo[0], "rollout/tokens") == ([0, 900], [0.05, 21 / 40])
    *_, first, second = held_out.format_table({"vapo": vapo, "dapo": dapo}, minutes=False).splitlines()
    assert "| vapo | 0.550 ± 0.025 (n = 3) | 0.550 ± 0.025 (n = 3) |" in first
    halves = [(0.05 + (30 + 2 * seed) / 40) / 2 for seed in (1, 2, 3)]
    mean = sum(halves) / 3
    assert f"| dapo | 0.850 ± 0.050 (n = 3) | {mean:.3f} ± 0.025 (n = 3) |" in second
    assert f"| {mean - 0.55:+.3f}" in second
    held_out.draw_table({"vapo": vapo, "dapo": dapo}, tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_compares_after_equal_steps(tmp_path: Path) -> None:
    """The tokens sampled in a row's value pretraining do not count."""
    vapo = [curve(tmp_path / f"v{seed}", right=20 + seed, seed=seed) for seed in (1, 2, 3)]
    other = [curve(tmp_path / f"o{seed}", right=22 + 2 * seed, seed=seed) for seed in (1, 2, 3)]
    for run in other:
        run["value_pretraining"] = {"rollout/tokens": 0, "time/step": 0}
    heads, _, _, second = held_out.format_table({"vapo": vapo, "other": other}, equal="steps").splitlines()
    assert "| difference to vapo after the last step |" in heads
    # The same at half of vapo's cost and at its end.
    assert "| 0.650 ± 0.050 (n = 3) | 0.650 ± 0.050 (n = 3) | +0.100 [" in second
    held_out.draw_table({"vapo": vapo, "other": other}, tmp_path / "table.png", "steps")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_minutes_are_those_of_the_quickest_run(tmp_path: Path) -> None:
    """A step's time is the minimum over runs, so other work on the machine does not count."""
    slow, fast = (
        [curve(tmp_path / f"{row}{seed}", right=20, seed=seed) for seed in (1, 2, 3)] for row in "sf"
    )
    took = {"step_seconds": 6.0, "value_pretraining_seconds": 30.0}
    slow = [held_out.replace_seconds(run, took) for run in slow]  # 60 seconds
    fast = [held_out.replace_seconds(run, {**took, "value_pretraining_seconds": 0.0}) for run in fast]  # 30
    table = held_out.format_table({"slow": slow, "fast": fast}, minutes=True).splitlines()
    assert "at 0.5 minutes" in table[0]
    assert "| slow | 0.500 ± 0.000 (n = 3) | 0.500 ± 0.000 (n = 3) | 0.275 ± 0.000 (n = 3) |" in table[2]
    assert "| fast | 0.500 ± 0.000 (n = 3) | 0.500 ± 0.000 (n = 3) | 0.500 ± 0.000 (n = 3) |" in table[3]


def test_what_ran_beside_a_run_does_not_count(tmp_path: Path) -> None:
    tuning = {"step_seconds": 12.0, "value_pretraining_seconds": 3.0}
    own = held_out.measure_seconds(curve(tmp_path / "run", right=20))
    assert own == {"step_seconds": 9.0, "value_pretraining_seconds": 4.0}
    assert held_out.take_minimum([tuning, own]) == {"step_seconds": 9.0, "value_pretraining_seconds": 3.0}


def test_a_longer_run_counts_up_to_the_tables_last_step(tmp_path: Path) -> None:
    whole = curve(tmp_path / "run", right=30)
    cut = held_out.truncate(whole, 4)
    assert [step["step"] for step in cut["steps"]] == [1, 2, 3, 4]
    assert {each["step"] for each in cut["evaluations"]} == {0}
    assert held_out.truncate(whole, 5) == whole


def test_a_run_without_an_evaluation_of_the_set_is_left_out(tmp_path: Path) -> None:
    """A run may have been stopped before its first evaluation, or have no transfer set."""
    whole, other, stopped = (curve(tmp_path / str(seed), right=20 + seed, seed=seed) for seed in (1, 2, 3))
    other["evaluations"] = [e for e in other["evaluations"] if e["of"] != "basic_arithmetic"]
    stopped["evaluations"] = []
    runs = [whole, other, stopped]
    assert held_out.score_at_end(runs) == {1: 21 / 40, 2: 22 / 40}
    assert held_out.score_at_end(runs, "basic_arithmetic") == {1: 2 / 9}
    assert held_out.score_at_equal_cost({"row": runs}, "rollout/tokens")[1] == {
        "row": {1: 21 / 40, 2: 22 / 40}
    }
    *_, line = held_out.format_table({"row": runs}, minutes=True).splitlines()
    assert line.startswith("| row | 0.538 ± 0.018 (n = 2) |") and line.endswith("| 0.222 (n = 1) |")
    *_, line = held_out.format_table({"row": [stopped]}, minutes=True).splitlines()
    assert line == "| row | - | - | - |  |  | - |"
    held_out.draw_table({"row": runs, "stopped": [stopped]}, tmp_path / "table.png")
