"""The runner of `make gpu`: failed, hanging and interrupted stages do not stop the others.

Finished stages are not repeated, and the report states it. `make gpu DEVICE=cpu` runs the real stages in CI.
"""

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
from megarl.plan.fit import find_problem
from megarl.plan.memory import gpu_needs
from megarl.weights.known_models import KNOWN_MODELS
from tests.cli.processes import LIMIT, environment, wait_for
from tests.rehearsal.fakecuda import pretend

ROOT, GIB = Path(__file__).resolve().parents[2], 2**30
HANGING = 77.0  # this limit counts as exceeded once the stage hangs, however slow the machine is
MACHINE = dict.fromkeys(("device", "code", "driver", "packages", "host"), "-") | {"has": [], "count": 0}
# SmolLM2-135M's config.json, except for the keys that it shares with other models of its family.
SMOLLM2 = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
SMOLLM2 |= {"intermediate_size": 1536, "vocab_size": 49152, "head_dim": 64}
MIXTURE = {"num_hidden_layers": 8, "hidden_size": 512, "num_experts": 8, "vocab_size": 307}
LISTED = ("qwen_vapo", "qwen_fp8", "qwen_blockwise", "qwen_dapo", "qwen_ppo", "qwen_trl", "qwen_large")
LISTED += ("qwen_large_kept", "restart", "mixture", "endurance")
# Counts its calls in a file, and writes its results where the runner reads them.
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
# A child in a separate session, as ranks have it, that is never ended; both ignore SIGTERM.
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


def await_its_end(out: Path) -> None:
    """Wait until the child of HANGS has ended; it would otherwise occupy the GPU."""
    pid = int((out / "child").read_text())

    def is_gone() -> bool:
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    wait_for("the end of the stage's child", is_gone)


class UntilItHangs(subprocess.Popen[bytes]):
    """A stage that exceeds its limit HANGING once its log contains "still at it"."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout != HANGING:
            return super().wait(timeout)
        log = Path(str(self.args[3]), f"{self.args[4]}.log")  # type: ignore[index]
        wait_for("its hanging", lambda: self.poll() is not None or "still at it" in log.read_text())
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


@pytest.mark.slow
def test_stages_that_fail_or_hang_stop_none_and_the_next_call_goes_on(
    hour: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", UntilItHangs)

    def stages(repaired: bool) -> list[Any]:
        return [
            stage(hour, tmp_path, "fails", COUNTS if repaired else FAILS),
            stage(hour, tmp_path, "hangs", COUNTS if repaired else HANGS, limit=HANGING),
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
    await_its_end(tmp_path)
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
    # Stages that were never tried come first.
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
    last = [stage(hour, tmp_path, "last", "import time; time.sleep(600)")]
    assert hour.run(last, last, tmp_path, 0.02, MACHINE, ()) == 0
    assert statuses(tmp_path) == {"last": "cut short"}, "that its limit is not over is no fault of its own"


def on_h100(hour: Any, folder: Path, gpus: int, with_7b: bool = False) -> Any:
    """Return the arguments of stages on a machine with all packages, and 200 or 1,800 GiB of host memory.

    Of the models only config.json exists; the planner needs no more.
    """
    sizes = {
        "small/model": KNOWN_MODELS["Llama-3.2-1B"] | SMOLLM2,
        "Qwen2.5-7B": KNOWN_MODELS["Qwen2.5-7B"],
        "models/qwen0.5b": KNOWN_MODELS["Qwen2.5-0.5B"],
        "models/qwen1.5b": KNOWN_MODELS["Qwen2.5-1.5B"],
        "models/random": KNOWN_MODELS["Qwen2.5-0.5B"],
        "models/mixture": KNOWN_MODELS["Qwen3-30B-A3B"] | MIXTURE,
    }
    for name, described in sizes.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(described))
    machine = {"has": [hour.CUDA, hour.TE, hour.SGLANG, "FP8", hour.NODE], "name": "NVIDIA H100 80GB HBM3"}
    machine |= {"count": gpus, "memory": int(79.2 * GIB), "host_memory": (200 if gpus == 1 else 1800) * GIB}
    seven = folder / "Qwen2.5-7B" if with_7b else None
    return importlib.import_module("hour_found").Given(folder, False, seven, None, machine)


@pytest.mark.parametrize(
    ("gpus", "name", "with_7b"),
    [
        *((1, name, True) for name in ("vapo_bf16", "vapo_fp8", "seven_vapo", *LISTED)),
        *((8, name, with_7b) for name, with_7b in (("resume", False), ("vapo_20", False), ("vapo_20", True))),
    ],
)
def test_the_runs_of_a_gpu_machine_are_valid_and_fit(
    hour: Any, gpus: int, name: str, with_7b: bool, tmp_path: Path
) -> None:
    """Each configuration is valid and fits by `megarl plan`; for 7B on one GPU, partly frozen."""
    runs, given = importlib.import_module("hour_configs"), on_h100(hour, tmp_path, gpus, with_7b)
    if name == "qwen_large_kept":
        given.machine.update(name="NVIDIA H200", memory=int(139.8 * GIB))
    more = ["steps=3"] if name == "resume" else []
    if name == "seven_vapo":
        settings = runs.given_frozen(given)
        assert 0 < settings["frozen_layers"] < 26, "the optimizer of all of it has no room on one GPU"
        more = runs.set_both_models(settings)
    overrides = [*runs.get_overrides(name, given), *more]
    check_config(load_config(ROOT / runs.get_config(name, given), overrides), name)
    plan = runs.plan_run(given, name, overrides)
    assert find_problem(plan) is None
    assert plan.layout.world == gpus
    assert plan.config.rollout.engine == "sglang" and plan.layers == "te"
    in_fp8 = name in ("vapo_fp8", "qwen_fp8", "qwen_blockwise") or (with_7b and gpus == 8)
    assert (plan.config.model.fp8.format != "none") == in_fp8


def test_a_runs_phases_stand_beside_the_plan_and_the_peak(hour: Any, tmp_path: Path) -> None:
    """Fractions of the peak equal a hand count.

    512 responses of 20 tokens to prompts of 80, and an update of 0.4 s that used 3 GiB.
    """
    runs, given = importlib.import_module("hour_runs"), on_h100(hour, tmp_path, 1)
    (tmp_path / "kernels.json").write_text(json.dumps({"figures": {"matmul_tflops": 600.0}}))
    seconds = {"rollout": 2.0, "old_logprobs": 0.1, "values": 0.1, "critic_update": 0.3, "actor_update": 0.4}
    record: dict[str, Any] = {f"time/{phase}": took for phase, took in seconds.items()}
    record |= {
        "stage": "train",
        "time/step": 3.0,
        "rollout/tokens": 512 * 20.0,
        "train/tokens": 4 * 512 * 100.0,
    }
    record |= {"memory/actor_update": 3.0 * GIB, "memory_device/actor_update": 40.0 * GIB}
    record |= {"mismatch/logprob_abs_mean": 0.2, "reward/mean": -1.0, "throughput/rollout_tokens": 5120.0}
    slow = record | {"time/actor_update": 9.0, "time/step": 12.0}  # the first step includes warm-up
    found = importlib.import_module("hour_found").Found(tmp_path / "vapo_bf16.partial.json")
    plan = runs.plan_run(given, "vapo_bf16", runs.get_overrides("vapo_bf16", given))
    runs.summarise(
        given, found, "vapo_bf16", plan, [slow | {"step": 1}, record | {"step": 2}, record | {"step": 3}]
    )

    curves, phases = found.tables
    assert curves["columns"] == ["step", "reward", "trainer - engine"]
    assert curves["rows"] == [[1, -1.0, 0.2], [2, -1.0, 0.2], [3, -1.0, 0.2]]
    rows = {row[0]: dict(zip(phases["columns"][1:7], row[1:7], strict=True)) for row in phases["rows"]}
    layers = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    flops = 3 * 2 * (layers * 512 * 100 + 576 * 49152 * 512 * 20)
    update = rows["actor_update"]
    assert update["s"] == 0.4 and update["peak, GiB"] == 3.0
    assert update["of the data sheet"] == pytest.approx(flops / 0.4 / 989e12)
    assert update["share of bf16 products as measured"] == pytest.approx(flops / 0.4 / 600e12)
    need = next(need for need in gpu_needs(plan) if need.phase == "actor_update")
    ours = sum(
        size for part, size in need.parts.items() if part.startswith(("actor.", "activations", "head"))
    )
    assert update["planned"] == pytest.approx(ours / GIB)
    marks = {row["what"]: row["mark"] for row in found.rows}
    assert marks["vapo_bf16, actor_update: peak of this process / megarl plan's"] in ("met", "not met")
    assert marks["vapo_bf16: log-probs of engine and trainer, mean difference"] == "not met"
    figures = json.loads(found.path.read_text())["figures"]["runs"]["vapo_bf16"]
    assert figures["curves"]["reward"] == [-1.0] * 3


def test_a_run_is_compared_with_the_plans_seconds_and_the_peak(hour: Any, tmp_path: Path) -> None:
    """512 responses of 200 tokens in a step of 10 s, of which 9 s generate or compute."""
    listed, given = importlib.import_module("hour_list"), on_h100(hour, tmp_path, 1)
    found = importlib.import_module("hour_found").Found(tmp_path / "qwen_vapo.partial.json")
    seconds = {"rollout": 5.0, "old_logprobs": 0.5, "values": 0.5, "critic_update": 1.0, "actor_update": 2.0}
    record: dict[str, Any] = {f"time/{phase}": took for phase, took in seconds.items()}
    record |= {"time/weight_transfer": 0.3, "time/step": 10.0, "stage": "train"}
    record |= {"rollout/tokens": 512 * 200.0, "train/tokens": 4 * 512 * 320.0}
    runs, configs = importlib.import_module("hour_runs"), importlib.import_module("hour_configs")
    plan = configs.plan_run(given, "qwen_vapo", configs.get_overrides("qwen_vapo", given))
    records = [record | {"step": 1, "time/step": 90.0}, record | {"step": 2}, record | {"step": 3}]
    runs.summarise(given, found, "qwen_vapo", plan, records)
    listed.check_speed(given, found, "qwen_vapo", records, 0.25, 0.1)
    rows = {row["what"]: row for row in found.rows}
    assert rows["what neither generates nor computes / a step"]["figure"] == "0.1"
    assert rows["what neither generates nor computes / a step"]["mark"] == "not met"
    assert rows["weight transfer"]["figure"] == "0.3 s" and rows["weight transfer"]["mark"] == "not met"
    [phases] = [table for table in found.tables if table["title"].startswith("Phases")]
    planned = sum(row[2] for row in phases["rows"] if row[2] and row[0] != "step")
    planned += found.figures["runs"]["qwen_vapo"]["planned"]["residency"]  # no row: it took no time
    assert float(rows["a step's seconds / megarl plan's"]["figure"]) == pytest.approx(10 / planned, rel=1e-3)
    sheet = min(row[4] for row in phases["rows"] if row[0] in ("critic_update", "actor_update"))
    assert float(rows["updates: share of the card's bf16 peak"]["figure"]) == pytest.approx(sheet, rel=1e-3)


def test_intervals_of_held_out_accuracy(hour: Any) -> None:
    """Wilson's interval of 128 of 512, by another library's figures; records of training are left out."""
    listed = importlib.import_module("hour_list")
    records = [{"stage": "train", "step": 1}]
    records += [{"stage": "eval", "step": 0, "eval/avg": 0.25, "eval/problems": 512}]  # type: ignore[dict-item]
    [(step, mean, low, high)] = listed.intervals(records)
    assert (step, mean) == (0, 0.25)
    expected = proportion_interval(128, 512)
    assert (low, high) == pytest.approx(expected, abs=2e-4)


def proportion_interval(right: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval from scipy."""
    from scipy.stats import binomtest

    found = binomtest(right, count).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


@pytest.mark.parametrize("failing", ["", "rank_nccl", "pp"])
def test_what_fails_on_a_shared_gpu_is_a_finding(
    hour: Any, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout that hangs stops no other. If two ranks cannot exchange messages, nothing else is tried."""
    listed, runs = importlib.import_module("hour_list"), importlib.import_module("hour_runs")
    commands: list[tuple[int, str, str]] = []

    def torchrun(_: Any, ranks: int, name: str, *, environment: Any, sizes: Any = None, **more: Any) -> Any:
        commands.append((ranks, f"{name} {sizes or ''}", environment["NCCL_MULTI_RANK_GPU_ENABLE"]))
        if failing and (failing == name or failing in (sizes or {})):
            raise SystemExit(f"{name}: not done within 90 s")
        return {"before": [-1.0, -2.0], "norms": [1.0, 1.0, 1.0], "after": [-1.0, -2.0]}

    def run(_: Any, found: Any, name: str, *keys: str, fresh: bool = True, **more: Any) -> Any:
        if failing and "parallel.cp=2" in keys:
            raise SystemExit("megarl train: exit code 1")
        return [{"stage": "train", "step": step} for step in ((1,) if fresh else (1, 2))]

    for module in (listed, runs):
        monkeypatch.setattr(module, "torchrun", torchrun)
    monkeypatch.setattr(listed, "run", run)
    found = importlib.import_module("hour_found").Found(tmp_path / "shared_gpu.partial.json")
    listed.shared_gpu(on_h100(hour, tmp_path, 1), found)
    resumed = "a step, a weight transfer, a checkpoint and a resume"
    marks = {row["what"]: row["mark"] for row in found.rows}
    assert {switch for _, _, switch in commands} == {"1"}
    if failing == "rank_nccl":
        assert marks == {"two ranks exchange messages": "WRONG"} and len(commands) == 1
        return
    wrong = {what for what, mark in marks.items() if mark != "met"}
    layouts = ["tp 2", "dp 2", "cp 2", "ep 2"]
    if failing:
        hanging = {"portable fp32, pp 2: ends", "portable fp32, tp 2 pp 2: ends"}
        assert wrong == {*hanging, f"cp 2: {resumed}"}
        assert any("te bf16, tp 2 pp 2: not tried" in note for note in found.notes)
    else:
        assert not wrong
        layouts += ["pp 2", "tp 2 pp 2"]
    assert {what.partition(":")[0] for what in marks if resumed in what} == set(layouts)
    assert (4, "rank_layout {'tp': 2, 'pp': 2}", "1") in commands
    assert (2, "rank_layout {'dp': 2, 'ep': 2}", "1") in commands
    ring = [command for command in commands if "cp" in command[1]]
    assert len(ring) == 1, "on CUDA only with Transformer Engine's layers"


def test_the_first_difference_of_two_runs_is_named(hour: Any) -> None:
    listed = importlib.import_module("hour_list")
    first = [{"stage": "train", "step": step, "policy/loss": 0.5, "time/step": 1.0} for step in (1, 2, 3)]
    second = [record | {"time/step": 2.0} for record in first]
    assert listed.first_difference(first, second) == "no figure differs"
    second[1] |= {"policy/loss": 0.25}
    assert listed.first_difference(first, second) == "train 2 differs in policy/loss"


def test_weights_that_were_not_exported_equal_nothing(hour: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no exported weights"):
        importlib.import_module("hour_list").hash_weights(tmp_path)


def test_a_command_over_its_limit_leaves_no_process(hour: Any, tmp_path: Path) -> None:
    runs = importlib.import_module("hour_runs")
    with pytest.raises(SystemExit, match="not done within"):
        runs.run_limited([sys.executable, "-c", HANGS, str(tmp_path), "hangs", "met"], 5.0)
    await_its_end(tmp_path)


def test_curves_of_both_precisions_stand_side_by_side(
    hour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, given = importlib.import_module("hour_runs"), on_h100(hour, tmp_path, 1)
    drawn = {
        "vapo_bf16": {"reward": [-1.0, -0.5], "value loss": [2.0, 1.0], "entropy": [0.5, 0.5]},
        "vapo_fp8": {"reward": [-1.1, 0.5], "value loss": [2.0, None], "entropy": [0.5, 0.4]},
    }
    monkeypatch.setattr(
        runs, "run", lambda _, found, name: found.figures.update(runs={name: {"curves": drawn[name]}})
    )
    for name, fp8 in (("vapo_bf16", False), ("vapo_fp8", True)):
        found = importlib.import_module("hour_found").Found(tmp_path / f"{name}.json")
        runs.vapo(given, found, fp8=fp8)
        found.save()
    [table] = found.tables
    assert table["columns"][:3] == ["step", "reward, bf16", "reward, FP8"]
    assert table["rows"] == [[1, -1.0, -1.1, 2.0, 2.0, 0.5, 0.5], [2, -0.5, 0.5, 1.0, None, 0.5, 0.4]]
    apart = {row["what"].partition(",")[0]: (row["figure"], row["mark"]) for row in found.rows}
    at_work = {"FP8 is at work: its curves are others": ("yes", "met")}
    assert apart == at_work | {"reward": ("0.55", "not met"), "entropy": ("0.05", "met")}


def test_a_node_of_gpus_is_seen(hour: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = importlib.import_module("hour_stages")
    pretend(monkeypatch)
    machine = stages.look(tiny=False)
    assert {hour.CUDA, hour.NODE} <= set(machine["has"])
    assert machine["device"] == "8 x NVIDIA H100 80GB HBM3 (79.2 GiB)" and machine["capability"] == (9, 0)
    assert "torch for CUDA 13.0" in machine["driver"]
    assert set(MACHINE) <= set(machine), "what the report names"


def test_a_stage_without_a_test_that_ran_is_no_pass(hour: Any, tmp_path: Path) -> None:
    """A stage is skipped if all its tests are, and the next call repeats it."""
    stages, found_types = importlib.import_module("hour_stages"), importlib.import_module("hour_found")
    xml, passed, skipped = tmp_path / "te.xml", '<testcase name="a"/>', '<skipped message="no GPU"/>'
    skipped = f'<testcase name="b">{skipped}</testcase>'

    def read(*cases: str) -> tuple[int, Any]:
        xml.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
        found = found_types.Found(tmp_path / "te.partial.json")
        return stages.read_tests(xml, found), found

    count, found = read(passed, skipped)
    assert count == 2 and [row["mark"] for row in found.rows] == ["met"] and "no GPU" in found.notes[0]
    assert read()[0] == 0  # pytest has found none: `tests` fails
    with pytest.raises(found_types.SkipStage, match="all 2 tests are skipped: no GPU"):
        read(skipped, skipped)


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
        assert runner.wait(LIMIT) == 128 + signal.SIGTERM
    finally:
        runner.kill()
    await_its_end(tmp_path)
    assert statuses(tmp_path) == {"passes": "passed", "hangs": "not begun"}


def call(out: Path, *arguments: str) -> str:
    """Return the output of `make gpu ARGS=--tiny` and its report."""
    command = [sys.executable, str(ROOT / "benchmarks" / "hour.py"), "--tiny", "--out", str(out), *arguments]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    told = done.stdout + done.stderr + (out / "report.md").read_text()
    assert done.returncode == 0, told
    return told


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_ranks_of_a_node_with_a_tiny_model(tmp_path: Path) -> None:
    told = call(tmp_path, "--gpus", "8", "--only", "layouts")
    assert statuses(tmp_path)["layouts"] == "passed", told
    assert (
        "portable fp32, tp 2 pp 1: log-probs" in told and "portable fp32, tp 1 pp 2: gradient norms" in told
    )
