"""A single-turn run works without megarl.agents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.processes import environment

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from pathlib import Path
from megarl.cli.train import train
from megarl.config.load import set_key
from megarl_tasks.arithmetic import write_demo

folder = Path(sys.argv[2])
write_demo(folder, seed=0)
paths = {"data.train": [folder / "train.jsonl"], "model.path": folder / "model", "run_dir": folder / "run"}
given = ["steps=1", "value_pretraining.steps=1", "rollout.prompts=8", "rollout.max_response_tokens=10",
         "reward.overlong.buffer=2", "data.eval=[]", "evaluation.every=0", "checkpoint.every=0",
         "log.report=false", "parallel.tp=1", "parallel.pp=1", "parallel.dp=1"]
train(Path(sys.argv[1]), [*given, *(set_key(key, path) for key, path in paths.items())])
assert "megarl.rollout.worker" in sys.modules
print("imported:", [name for name in sys.modules if name.startswith("megarl.agents")])
"""


@pytest.mark.slow
def test_the_vapo_demo_never_imports_agents(tmp_path: Path) -> None:
    """Checks before the run, rollouts, training and export all work without it."""
    command = [sys.executable, "-c", RUN, ROOT / "configs/demos/vapo.yaml", tmp_path]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "imported: []"
