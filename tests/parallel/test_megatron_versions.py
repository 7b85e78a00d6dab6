"""A checkpoint of one megatron-core version continues under another one (`make test-megatron`)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
LIMIT = 300.0  # seconds for one process
JOB = """
import sys, torch
from pathlib import Path
from megarl.config.schema import ParallelConfig
from megarl.parallel import runtime
from tests.parallel.jobs import around_a_checkpoint
folder, checkpoint, read, out = sys.argv[1:]
there = runtime.start(ParallelConfig(device="cpu"), seed=0)
torch.save(around_a_checkpoint(there, Path(folder), Path(checkpoint), bool(int(read))), out)
"""


def test_no_private_name_of_megatron_is_imported() -> None:
    """Private names change between versions: one that 0.17 removed kept megarl from starting."""
    private = []
    sources = {file: file.read_text() for file in sorted((ROOT / "megarl").rglob("*.py"))}
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)) if "megatron." in source else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
                names = [*node.module.split("."), *(alias.name for alias in node.names)]
                private += [f"{file.name}: {name}" for name in names if name.startswith("_")]
    assert not private
    # Checkpoints may use the state descriptions and reading. Planners, writers and strategies change with
    # each version.
    used = {
        node.module
        for file in (ROOT / "megarl/training").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("megatron.core.dist_checkpointing")
    }
    package, parts = "megatron.core.dist_checkpointing", ("core", "dict_utils", "mapping", "optimizer")
    assert used <= {package, *(f"{package}.{part}" for part in parts)}


def run(python: str, folder: Path, checkpoint: Path, read: bool) -> dict[str, Any]:
    """Run `around_a_checkpoint` in a process of this Python's environment."""
    out = checkpoint.with_suffix(f".{int(read)}.pt")
    command = [python, "-c", JOB, str(folder), str(checkpoint), str(int(read)), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return torch.load(out)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("back", [False, True], ids=["forth", "back"])
def test_a_checkpoint_is_continued_by_another_version(family: str, back: bool, tmp_path: Path) -> None:
    """Weights and optimizer state are bitwise equal, and those after the next update within 1e-6."""
    if "OTHER_PYTHON" not in os.environ:
        pytest.skip("OTHER_PYTHON names no environment with another megatron-core (make test-megatron does)")
    writer, reader = (sys.executable, os.environ["OTHER_PYTHON"])[:: -1 if back else 1]
    make_tiny_model(tmp_path / "model", family)
    (tmp_path / "checkpoint").mkdir()
    written, read = (
        run(python, tmp_path / "model", tmp_path / "checkpoint", python is reader)
        for python in (writer, reader)
    )
    assert written["version"] != read["version"]
    for when, tolerance in (("between", 0.0), ("after", 1e-6)):
        assert written[when].keys() == read[when].keys()
        for name, tensor in written[when].items():
            torch.testing.assert_close(
                read[when][name],
                tensor,
                rtol=0,
                atol=tolerance,
                msg=lambda text, name=name: f"{name}: {text}",
            )
