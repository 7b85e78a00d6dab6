"""The runner of `make gpu`: a stage that fails, hangs or is interrupted stops none, what is done is not done
again, and the report says so. One of its real stages runs with a tiny model."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.config import check_config, load_config
from megarl.weights.cost import KNOWN_MODELS
from tests.cli.processes import environment, wait_for

ROOT = Path(__file__).resolve().parents[2]
MACHINE = dict.fromkeys(("device", "code", "driver", "packages", "host"), "-") | {"has": [], "count": 0}
# SmolLM2-135M's config.json, beside what it shares with other models of its family.
SMOLLM2 = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
SMOLLM2 |= {"intermediate_size": 1536, "vocab_size": 49152, "head_dim": 64}
# Counts its calls in a file, and says what it has found where the runner looks for it.
COUNTS = """
import json, pathlib, sys
out, name = pathlib.Path(sys.argv[1]), sys.argv[2]
with open(out / f"{name}.calls", "a") as calls:
    calls.write("x")
row = {"mark": sys.argv[3], "what": "speed", "figure": "3 GB/s", "target": "at least 2 GB/s"}
table = {"title": "Curves", "columns": ["step", "loss"], "rows": [[1, 10.5], [2, None]]}
found = {"checks": [row], "figures": {"gb": 3.0}, "tables": [table], "notes": ["a | b"], "why": ""}
(out / f"{name}.partial.json").write_text(json.dumps(found))
"""
FAILS = COUNTS + "print('what was wrong')\nraise SystemExit(3)\n"
# A child in a session of its own, as ranks have them, that nobody ends; neither minds SIGTERM.
HANGS = (
    COUNTS
    + """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(out / "child").write_text(str(child.pid))
print("still at it", flush=True)
time.sleep(600)
"""
)


@pytest.fixture
def hour(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found: Any = importlib.import_module("hour")
    monkeypatch.setattr(found, "GRACE", 0.5)
    yield found


def stage(hour: Any, out: Path, name: str, code: str, mark: str = "met", **options: Any) -> Any:
    command = (sys.executable, "-c", code, str(out), name, mark)
    return hour.Stage(name, f"title of {name}", **{"limit": 60, "least": 0, **options}, command=command)


def calls(out: Path, name: str) -> int:
    return len((out / f"{name}.calls").read_text()) if (out / f"{name}.calls").exists() else 0


def statuses(out: Path) -> dict[str, str]:
    return {one["stage"]: one["status"] for one in json.loads((out / "report.json").read_text())["stages"]}


def is_gone(out: Path) -> bool:
    """Whether the child of HANGS has ended."""
    pid = int((out / "child").read_text())
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_stages_that_fail_or_hang_stop_none_and_the_next_call_goes_on(
    hour: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stages(repaired: bool) -> list[Any]:
        return [
            stage(hour, tmp_path, "fails", COUNTS if repaired else FAILS),
            stage(hour, tmp_path, "hangs", COUNTS if repaired else HANGS, limit=6),
            stage(hour, tmp_path, "misses", COUNTS, "not met"),
            stage(hour, tmp_path, "needs", COUNTS, needs=("CUDA", "SGLang")),
            stage(hour, tmp_path, "passes", COUNTS),
        ]

    def call(repaired: bool, has: tuple[str, ...] = ("SGLang",)) -> int:
        chosen = stages(repaired)
        code: int = hour.run(chosen, chosen, tmp_path, 10, MACHINE, has)
        return code

    assert call(repaired=False) == 1
    expected = {"fails": "failed", "hangs": "over its limit", "misses": "missed"}
    assert statuses(tmp_path) == expected | {"needs": "skipped", "passes": "passed"}
    assert is_gone(tmp_path), "it would keep the GPU"
    failed, hung = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("fails", "hangs"))
    assert failed["tail"] == ["what was wrong"] and failed["why"] == "exit code 3"
    assert hung["tail"] == ["still at it"] and hung["figures"] == {"gb": 3.0}, "what it had found is kept"
    page = (tmp_path / "report.md").read_text()
    assert "| title of needs | skipped: needs CUDA |" in page
    assert "| step | loss |" in page and "| 2 | - |" in page and "what was wrong" in page
    pasted = page.split("```markdown")[1]
    assert "| speed | `benchmarks/hour.py --only misses` | at least 2 GB/s | 3 GB/s (not met) |" in pasted
    assert "over its limit" in pasted and "title of needs" not in pasted

    capsys.readouterr()
    assert call(repaired=True, has=("CUDA", "SGLang")) == 0
    assert statuses(tmp_path) == dict.fromkeys(expected | {"needs": "", "passes": ""}, "passed") | {
        "misses": "missed"
    }
    counted = {name: calls(tmp_path, name) for name in ("fails", "hangs", "misses", "needs", "passes")}
    assert counted == {"fails": 2, "hangs": 2, "misses": 1, "needs": 1, "passes": 1}
    # What was never tried comes first.
    begun = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "(at most" in line]
    assert begun == ["needs", "fails", "hangs"]


def test_what_the_hour_has_no_room_for_is_said_and_not_begun(hour: Any, tmp_path: Path) -> None:
    stages = [
        stage(hour, tmp_path, "long", COUNTS, least=600),
        stage(hour, tmp_path, "short", COUNTS, least=0),
    ]
    assert hour.run(stages, stages, tmp_path, 5, MACHINE, ()) == 0
    assert statuses(tmp_path) == {"long": "no time left", "short": "passed"}
    assert calls(tmp_path, "long") == 0
    assert hour.run(stages, stages, tmp_path, 60, MACHINE, ()) == 0
    assert statuses(tmp_path) == {"long": "passed", "short": "passed"}


@pytest.mark.parametrize(
    ("gpus", "name", "with_7b"),
    [
        *((1, name, True) for name in ("vapo_bf16", "vapo_fp8", "seven_vapo")),
        *((8, name, with_7b) for name, with_7b in (("resume", False), ("vapo_20", False), ("vapo_20", True))),
    ],
)
def test_the_runs_of_a_gpu_machine_are_valid_and_fit(
    hour: Any, gpus: int, name: str, with_7b: bool, tmp_path: Path
) -> None:
    """Each configuration holds, and `megarl plan` finds room on H100s: for 7B on one of them with a host of
    200 GiB as well, part of the model frozen."""
    runs, shared = importlib.import_module("hour_runs"), importlib.import_module("hour_found")
    sizes = {
        "small/model": KNOWN_MODELS["Llama-3.2-1B"] | SMOLLM2,
        "Qwen2.5-7B": KNOWN_MODELS["Qwen2.5-7B"],
    }
    for folder, described in sizes.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text(json.dumps(described))
    machine = {"has": [hour.CUDA, hour.TE, hour.SGLANG, "FP8", hour.NODE], "name": "NVIDIA H100 80GB HBM3"}
    machine |= {
        "count": gpus,
        "memory": int(79.2 * 2**30),
        "host_memory": (200 if gpus == 1 else 1800) * 2**30,
    }
    given = shared.Given(tmp_path, False, tmp_path / "Qwen2.5-7B" if with_7b else None, None, machine)
    more = ["steps=3"] if name == "resume" else []
    if name == "seven_vapo":
        settings = runs.given_frozen(given)
        assert 0 < settings["frozen_layers"] < 26, "the optimizer of all of it has no room on one GPU"
        more = runs.of_both_models(settings)
    overrides = [*runs.overrides_of(name, given), *more]
    check_config(load_config(ROOT / runs.config_of(name, given), overrides), name)
    plan = runs.plan_of_run(given, name, overrides)
    assert plan.problem() is None
    assert plan.layout.world == gpus
    assert plan.config.rollout.engine == "sglang" and plan.layers == "te"
    assert (plan.config.model.fp8.format != "none") == (name == "vapo_fp8" or (with_7b and gpus == 8))


RUNNER = """
import sys
sys.path.insert(0, sys.argv[1])
import hour
from pathlib import Path
from tests.cli.test_hour import COUNTS, HANGS, MACHINE, stage
out = Path(sys.argv[2])
stages = [stage(hour, out, "passes", COUNTS), stage(hour, out, "hangs", HANGS, limit=300)]
hour.GRACE = 0.5
hour.run(stages, stages, out, 60, MACHINE, ())
"""


def test_ended_from_outside_it_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUNNER, str(ROOT / "benchmarks"), str(tmp_path)]
    runner = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_for(
            "the stage that hangs", lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text()
        )
        runner.send_signal(signal.SIGTERM)
        assert runner.wait(60) == 128 + signal.SIGTERM
    finally:
        runner.kill()
    assert is_gone(tmp_path)
    assert statuses(tmp_path) == {"passes": "passed", "hangs": "not begun"}


@pytest.mark.slow
def test_real_stages_with_a_tiny_model(tmp_path: Path) -> None:
    """By the command of `make gpu`: numbers beside Hugging Face, a run beside the plan, ranks beside one;
    stages of a GPU say what they lack; the second call does nothing again."""
    names = {"1": ["model", "parity", "vapo_bf16", "engine"], "8": ["model", "nccl", "layouts"]}
    for suite, chosen in names.items():
        command = [sys.executable, str(ROOT / "benchmarks" / "hour.py"), "--tiny", "--gpus", suite]
        command += ["--out", str(tmp_path / suite), "--only", *chosen]
        for _ in range(2):
            done = subprocess.run(
                command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=550
            )
            told = (tmp_path / suite / "report.md").read_text() + done.stdout + done.stderr
            assert done.returncode == 0, told
        found = statuses(tmp_path / suite)
        assert all(found[name] == "passed" for name in chosen if name != "engine"), told
        assert done.stdout.count("not done again") == len(chosen) - ("engine" in chosen)
    assert found["transfer_between"] == "not begun"
    page = (tmp_path / "1" / "report.md").read_text()
    assert "skipped: needs CUDA" in page
    assert "portable fp32: largest difference from Hugging Face" in page
    assert "Phases beside megarl plan" in page and "| actor_update |" in page
    record = json.loads((tmp_path / "1" / "vapo_bf16.json").read_text())
    assert len(record["figures"]["curves"]["reward"]) == 2
    assert "portable fp32, tp 2 pp 1: log-probs" in (tmp_path / "8" / "report.md").read_text()
