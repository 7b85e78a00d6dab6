"""The plan of a run on a machine without a GPU: it matches a real run's memory or is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl.cli.main import main
from megarl.config import load_config
from megarl.config.errors import ConfigError
from megarl.parallel.machine import measure_usable_memory
from megarl.plan.fit import find_cpu_problem, find_cpu_warning
from megarl.plan.host import cpu_bytes, cpu_bytes_by_phase
from megarl.plan.inputs import PlanInputs, make_plan_inputs
from megarl.schedule.preflight import check_fits
from megarl.weights.families import read_config
from megarl.weights.known_models import KNOWN_MODELS, planning_config
from tests.plan.test_memory import GIB, ROOT

HALF_B = KNOWN_MODELS["Qwen2.5-0.5B"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        ({"proc/self/cgroup": "0::/\n"}, 8 * GIB),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 8 * GIB),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ({"proc/self/cgroup": "0::/not/seen\n", "sys/fs/cgroup/memory.max": f"{3 * GIB}\n"}, 3 * GIB),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n2:memory:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
            },
            GIB,
        ),
        (  # version 1 writes "no limit" as a number larger than any machine's memory
            {
                "proc/self/cgroup": "2:memory:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
            },
            8 * GIB,
        ),
    ],
)
def test_the_limits_of_control_groups_count(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in {"proc/meminfo": f"MemTotal:  {8 * 2**20} kB\nMemFree: 1 kB\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert measure_usable_memory(tmp_path) == expected


def test_this_machine_has_what_it_says() -> None:
    assert 0 < measure_usable_memory() <= psutil.virtual_memory().total


def half_b(*changes: str) -> PlanInputs:
    overrides = ["model.layers=portable", "checkpoint.every=5", "parallel.tp=2", "model.dtype=fp32", *changes]
    return make_plan_inputs(load_config(ROOT / "configs/demos/vapo.yaml", overrides), HALF_B)


def test_a_run_that_the_kernel_ended_is_refused() -> None:
    """VAPO with 0.5 B parameters on two ranks and 24 GB is refused, or without checkpoints warned about.

    The kernel killed such a run in its first checkpoint, and without checkpoints in step 2."""
    plan, memory = half_b(), 24e9
    problem = find_cpu_problem(plan, memory)
    assert problem is not None and re.search(
        r"^2 ranks on this machine's CPU need [\d.]+ GiB of its 22.4 \(.*a checkpoint [\d.]+\); "
        "set checkpoint.every=0, or start fewer ranks, each of which has a whole engine, use a smaller model",
        problem,
    ), problem
    without = half_b("checkpoint.every=0")
    warning = find_cpu_warning(without, memory)
    assert find_cpu_problem(without, memory) is None, "that it is surely too much cannot be said"
    assert warning and re.search(r"may need up to [\d.]+ GiB .* the kernel ends what takes too much", warning)
    assert find_cpu_problem(half_b(), 100e9) is None and find_cpu_warning(half_b(), 100e9) is None
    with pytest.raises(ConfigError, match=r"^x.yaml: 2 ranks on this machine's CPU need"):
        check_fits(make_plan_inputs(plan.config, HALF_B, world=2, cpu=True), "x.yaml", memory)
    for changes in (["rollout.prompts=1000000000000"], ["rollout.prompts=20000000", "rollout.group_size=16"]):
        batch = find_cpu_problem(half_b(*changes, "checkpoint.every=0"), 100e9)
        assert batch and re.search(
            r"^[\d,]+ responses a step need at least [\d,.]+ GiB .*rollout.prompts", batch
        )
    assert find_cpu_warning(half_b(), 100e9, free=90e9) is None
    busy = find_cpu_warning(half_b(), 100e9, free=9 * GIB)
    assert busy and re.search(
        r"may need up to [\d.]+ GiB .* and 9.0 of this machine's 93.1 are free now", busy
    )
    # By hand: two Adam moments, a weight and a gradient of four bytes for each parameter of both models.
    trained = sum(
        shape.count_params(plan.layout, 0, critic=critic).all * 2
        for shape, critic in ((plan.actor, False), (plan.critic, True))
    )
    held = sum(cpu_bytes(plan)[name] for name in ("weights", "gradients", "optimizer"))
    assert held == pytest.approx(16 * trained, rel=1e-3)
    assert cpu_bytes(plan)["engines' weights"] == pytest.approx(2 * 4 * plan.actor.parameters)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the demo's task, and a model of 25 million parameters with its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from megarl_tasks.arithmetic import write_demo

    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder, 0)
    config = AutoConfig.from_pretrained(folder / "model")
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
    for key, value in {**sizes, "num_attention_heads": 8, "num_key_value_heads": 4}.items():
        setattr(config, key, value)
    config.layer_types = ["full_attention"] * 8
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return folder


def settings(folder: Path) -> list[str]:
    data = [f"data.train=[{folder / 'train.jsonl'}]", f"data.eval=[{folder / 'eval.jsonl'}]"]
    paths = [f"model.path={folder / 'model'}", f"run_dir={folder / 'run'}", "log.report=false"]
    run = ["steps=1", "rollout.prompts=8", "rollout.group_size=4", "update.mini_batch=16"]
    more = ["value_pretraining.steps=0", "evaluation.max_problems=2", "checkpoint.every=1"]
    return [*data, *paths, *run, *more, "parallel.tp=2"]


@pytest.mark.slow
def test_a_real_run_takes_what_was_planned(folder: Path) -> None:
    """The peak of launcher and ranks together, counting shared pages once, is within a factor of 1.5."""
    command = [sys.executable, "-m", "megarl", "train", "configs/demos/vapo.yaml", *settings(folder)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    most, limit = 0, time.monotonic() + 400
    while run.poll() is None and time.monotonic() < limit:
        used = 0
        try:
            for process in (psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)):
                used += process.memory_full_info().pss
        except psutil.Error:  # a process has just ended
            continue
        most = max(most, used)
        time.sleep(0.5)
    assert run.wait(timeout=10) == 0, run.communicate()[1][-2000:]
    config = load_config(ROOT / "configs/demos/vapo.yaml", [*settings(folder), "model.layers=portable"])
    plan = make_plan_inputs(config, planning_config(config.model.path)[1])
    held = sum(cpu_bytes(plan).values())
    at_most = max(sum(parts.values()) for parts in cpu_bytes_by_phase(plan).values())
    print(f"measured {most / GIB:.2f} GiB, held {held / GIB:.2f}, at most {(held + at_most) / GIB:.2f}")
    assert held <= 1.1 * most, "what surely is there is refused"
    assert 1 / 1.5 < (held + at_most) / most < 1.5


def test_the_refusal_is_the_last_line_of_a_pipe() -> None:
    """It follows the full plan and an empty line, although a pipe buffers the plan and not the refusal."""
    too_large = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=128"]
    done = subprocess.run(
        [sys.executable, "-m", "megarl", "plan", "configs/vapo_32b.yaml", *too_large],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        text=True,
        timeout=120,
        check=False,
    )
    *plan, empty, refusal = done.stdout.splitlines()
    assert done.returncode == 2
    assert plan[0].startswith("model ") and plan[-1].endswith("(--all)") and empty == ""
    assert refusal.startswith("megarl: configs/vapo_32b.yaml: phase ")


def test_train_and_plan_refuse_in_the_same_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both refuse in one line, before ranks start or the run's folder is created."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("megarl.schedule.preflight.measure_usable_memory", lambda: GIB // 2)
    monkeypatch.setattr("megarl.parallel.machine.measure_usable_memory", lambda: GIB // 2)
    given = [*settings(folder), f"run_dir={folder / 'refused'}"]
    assert main(["train", "configs/demos/vapo.yaml", *given]) == 2
    refused = capsys.readouterr().err
    assert re.fullmatch(r"megarl: configs/demos/vapo.yaml: 2 ranks on this machine's CPU need .*\n", refused)
    assert not (folder / "refused").exists()
    assert main(["plan", "configs/demos/vapo.yaml", *given]) == 2
    printed = capsys.readouterr()
    assert printed.err == refused and "2 ranks on this machine's CPU" in printed.out
    assert read_config(folder / "model")["hidden_size"] == 512
