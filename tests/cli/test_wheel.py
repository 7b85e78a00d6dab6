"""megarl from a wheel, in a folder without a checkout: its configurations are part of the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config import load_config
from megarl.config.load import config_file

ROOT = Path(__file__).resolve().parents[2]
SHORT = (
    "steps=1",
    "rollout.prompts=8",
    "update.mini_batch=64",
    "evaluation.max_problems=16",
    "parallel.tp=1",
)


def test_a_file_that_is_here_comes_before_megarls_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are relative to the current folder on the command line, and to the file in `base:`."""
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: configs/demos/dapo.yaml\nsteps: 7\n")
    assert load_config("configs/demos/dapo.yaml") == load_config(ROOT / "configs/demos/dapo.yaml")
    assert load_config(mine) == load_config(ROOT / "configs/demos/dapo.yaml", ["steps=7"])
    (tmp_path / "configs/demos").mkdir(parents=True)
    (tmp_path / "configs/demos/dapo.yaml").write_text(
        "recipe: grpo\nrun_dir: here\nsteps: 3\nmodel: {path: x}\ndata: {train: [y]}\n"
    )
    assert load_config("configs/demos/dapo.yaml").recipe == load_config(mine).recipe == "grpo"
    assert config_file("configs/none.yaml") == Path("configs/none.yaml"), (
        "the message names what was asked for"
    )
    assert (
        not config_file("/nowhere/configs/demos/vapo.yaml").exists()
        and not config_file("demos/vapo.yaml").exists()
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_and_configurations_of_a_wheel(tmp_path: Path) -> None:
    source, wheels, site, empty = (tmp_path / name for name in ("source", "wheels", "site", "empty"))
    packages = ("megarl", "megarl_experiments", "megarl_report", "megarl_tasks", "megarl_verifier")
    for name in (*packages, "configs"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    empty.mkdir()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(
        tmp_path,
        *pip,
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        str(wheels),
        str(source),
    )
    [wheel] = wheels.iterdir()
    run(tmp_path, *pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    installed = {
        path.relative_to(site / "megarl/configs") for path in (site / "megarl/configs").rglob("*.yaml")
    }
    assert installed == {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    assert all((site / name / "py.typed").is_file() for name in packages)

    def megarl(*arguments: str, code: int = 0) -> str:
        return run(empty, sys.executable, "-m", "megarl", *arguments, code=code, PYTHONPATH=str(site))

    where = "import megarl; print(megarl.__file__)"
    assert run(empty, sys.executable, "-c", where, PYTHONPATH=str(site)).strip() == str(
        site / "megarl/__init__.py"
    )
    tables = "critic, critic_free, dapo, tppo, vapo"
    assert f"no such table (one of {tables}, or" in megarl("ablate", "nosuch", code=2)
    assert f"{site}/megarl/configs/ablations/" in megarl("ablate", "vapo", "rollout.group_size=7", code=2)
    assert "configs/vapo_32b.yaml: the configuration is valid" in megarl(
        "config", "check", "configs/vapo_32b.yaml"
    )
    assert "no such file" in megarl("config", "check", "configs/demos/vap.yaml", code=2)
    # A user's file that extends megarl's warm start and makes it shorter.
    (empty / "configs/demos").mkdir(parents=True)
    (empty / "configs/demos/sft.yaml").write_text("base: configs/demos/sft.yaml\nsteps: 8\n")
    said = megarl("demo", "--recipe", "dapo", *SHORT)
    assert "on 16 held-out problems" in said and (empty / "runs/demo/dapo/hf/model.safetensors").is_file()
    said = megarl(
        "eval",
        "configs/demos/dapo.yaml",
        "--checkpoint",
        "runs/demo/dapo/hf",
        "evaluation.max_problems=16",
        "parallel.tp=1",
    )
    assert "16 problems" in said


def run(folder: Path, *command: str, code: int = 0, **environment: str) -> str:
    """Run a command in a folder and return its output."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        command, cwd=folder, env=settings, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr
