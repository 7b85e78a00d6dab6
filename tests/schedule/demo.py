"""The demo's task for other tests: a briefly warm-started model, and runs of `megarl train` on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.commands import run_command

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240  # seconds for one run


def megarl(*arguments: object, code: int = 0, forked: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `megarl ARGUMENTS` in the repository's root and assert its exit code.

    Args:
        forked: see tests/commands.py.
    """
    words, environment = [str(one) for one in arguments], os.environ | {"OMP_NUM_THREADS": "1"}
    if forked:
        done = run_command(words, cwd=ROOT, env=environment, timeout=LIMIT)
    else:
        command = [sys.executable, "-m", "megarl", *words]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
    assert done.returncode == code, (
        f"{arguments}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return done


def make_warm_model(folder: Path, steps: int = 120) -> Path:
    """Write the demo's task and model, and warm-start it briefly.

    The model is not good yet, but it ends its responses.
    """
    from megarl_tasks.arithmetic import write_demo

    write_demo(folder, 0)
    where = (
        f"data.train=[{folder / 'sft.jsonl'}]",
        f"model.path={folder / 'model'}",
        f"run_dir={folder / 'sft'}",
    )
    megarl("train", "configs/demos/sft.yaml", f"steps={steps}", "log.report=false", *where)
    return folder


def train(
    folder: Path, recipe: str, run_dir: Path, *overrides: str, forked: bool = True
) -> list[dict[str, Any]]:
    """Run a recipe briefly with 8 prompts x 4 responses and return its metrics."""
    known = {"ppo": "vapo", "vapo": "vapo", "sao": "vapo", "tppo": "tppo"}
    config = f"configs/demos/{known.get(recipe, 'dapo')}.yaml"
    settings = (
        f"recipe={recipe}",
        "steps=2",
        "rollout.prompts=8",
        "rollout.group_size=4",
        "update.mini_batch=16",
        "evaluation.max_problems=16",
        "evaluation.every=0",
        f"model.path={folder / 'sft' / 'hf'}",
        f"data.train=[{folder / 'train.jsonl'}]",
        f"data.eval=[{folder / 'eval.jsonl'}]",
        f"run_dir={run_dir}",
        "log.report=false",
    )
    megarl("train", config, *settings, *overrides, forked=forked)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
