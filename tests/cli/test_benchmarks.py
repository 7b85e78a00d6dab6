"""What the benchmarks print of what they have measured."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


def test_a_phase_that_did_not_run_has_no_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    step = importlib.import_module("step")
    times = {"time/rollout": 0.5, "time/actor_update": 0.25, "time/checkpoint": 0.0, "time/step": 1.0}
    record = {
        **times,
        "rollout/tokens": 1000,
        "train/tokens": 2000,
        "inside/generate": 0.5,
        "inside/megatron": 0.25,
    }
    step.print_phases("megarl", [record], importlib.import_module("measure").Verdicts())
    lines = {
        line.split()[0]: line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  ")
    }
    assert lines["rollout"][1:] == ["0.5000", "s", "50.0", "%", "2,000", "tokens/s"]
    assert lines["actor_update"][1:] == ["0.2500", "s", "25.0", "%", "8,000", "tokens/s"]
    assert lines["checkpoint"][1:] == ["0.0000", "s", "0.0", "%", "did", "not", "run"]
