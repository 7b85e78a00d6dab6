"""The demo's training with a real SGLang engine: `megarl train` as a user runs it."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import pytest

from tests.in_flight import find_problems
from tests.schedule import demo
from tests.schedule.demo import make_warm_model, train


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "apart",
    [
        (),
        ("parallel.rollout_ranks=1", "schedule.ahead=1"),
        ("parallel.rollout_ranks=1", "schedule.in_flight=retract", "schedule.max_staleness=2"),
    ],
    ids=["in turn", "one step ahead on a rank of its own", "in flight"],
)
def test_the_demo_learns_on_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: tuple[str, ...]
) -> None:
    """DAPO with filtering, so that prompts are added while others run, and surplus responses are aborted."""
    monkeypatch.setattr(demo, "LIMIT", 900)  # seconds; SGLang's imports are slow on a busy machine
    warm = make_warm_model(tmp_path / "demo", steps=60)
    before = {process.pid for process in psutil.process_iter()}
    said, megarl = [], demo.megarl
    monkeypatch.setattr(demo, "megarl", lambda *words, **how: said.append(megarl(*words, **how)))
    records = train(
        warm,
        "dapo",
        tmp_path / "run",
        "steps=3",
        "rollout.engine=sglang",
        "parallel.tp=1",
        "rollout.fingerprint=true",
        "rollout.continue_partial=true",
        "rollout.dynamic_sampling.max_batches=3",
        "checkpoint.every=1",
        "checkpoint.keep=0",
        "checkpoint.rollouts=true",
        *apart,
    )
    steps = [r for r in records if r["stage"] == "train"]
    evaluations = [r for r in records if r["stage"] == "eval"]
    assert [r["step"] for r in steps] == [1, 2, 3]
    assert [r["step"] for r in evaluations] == [0, 3]
    for record in records:
        assert all(math.isfinite(value) for value in record.values() if isinstance(value, float))
    if apart:
        assert [record["staleness/mean"] > 0 for record in steps] == [False, True, True]
    for record in steps:
        assert 0 <= record["reward/accuracy"] <= 1
        if not (apart and record["step"] > 1):  # later the trainer is one step ahead of the engine's weights
            assert record["mismatch/logprob_abs_max"] <= 1e-4  # trainer against engine, in nats
        assert record["policy/grad_norm"] > 0
        assert record["rollout/prompts"] >= 8
    left = [  # read with `attrs`: a zombie of a concurrent test suite has no command line
        process.info
        for process in psutil.process_iter(["pid", "name", "cmdline"])
        if process.pid not in before
        and ("sglang" in process.info["name"] or "sglang" in " ".join(process.info["cmdline"] or ()))
    ]
    assert left == []
    if "schedule.in_flight=retract" in apart:
        assert find_problems(tmp_path / "run") == []
    # Nothing follows a run's last line: triton's bindings would list leaked objects when Python exits.
    (done,) = said
    assert "leaked" not in done.stderr and done.stdout.rstrip().endswith(
        f"actor written to {tmp_path}/run/hf"
    )
