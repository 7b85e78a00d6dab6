"""Doctor and preflight report in one line a Transformer Engine that cannot be imported.

Megatron's own import would fail on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cli.doctor import abilities
from megarl.config.errors import ConfigError
from megarl.config.schema import Config
from megarl.parallel.machine import broken_transformer_engine
from megarl.schedule.preflight import preflight
from tests.cli.test_doctor import LAPTOP
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
# The real package does this if its compiled half was never built.
WITHOUT_COMPILED_HALF = (
    'raise FileNotFoundError("Could not find shared object file for Transformer Engine torch lib.")\n'
)


@pytest.fixture(params=["a package without its compiled half", "a folder that was left"])
def broken(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Put a broken package on the import path; yield the expected message."""
    package = tmp_path / "site" / "transformer_engine"
    package.mkdir(parents=True)
    for name in _imported():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(package.parent)
    if "folder" in request.param:
        yield f"{package}: a folder without a package in the place of Transformer Engine (remove it)"
    else:
        (package / "__init__.py").write_text("__version__ = '2.20.2'\n")
        (package / "pytorch.py").write_text(WITHOUT_COMPILED_HALF)
        # "None" since pip has no record of this package
        lacks = "transformer-engine None lacks its compiled half, transformer-engine-torch"
        yield f"{package}: {lacks} (make install-gpu, or uninstall it)"
    for name in _imported():
        del sys.modules[name]


def _imported() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]


def test_one_line(broken: str, tmp_path: Path) -> None:
    """The error does not depend on the requested layers, since Megatron imports the package anyway."""
    assert broken_transformer_engine() == broken
    found = {ability.name: ability for ability in abilities(replace(LAPTOP, broken=broken))}
    assert found["Transformer Engine layers"].note == broken
    assert not found["the demo on CPUs"].ready and not found["FP8 layers"].ready
    model = {"path": tmp_path / "model", "layers": "portable"}
    with pytest.raises(ConfigError) as raised:
        preflight(
            Config(recipe="dapo", run_dir=tmp_path / "run", steps=1, model=model, data={"train": [tmp_path]}),
            "x.yaml",
        )
    assert str(raised.value) == broken


@pytest.mark.slow
def test_before_ranks_are_started(broken: str, tmp_path: Path) -> None:
    """`megarl train` in a separate process, where every import finds the package."""
    folder = make_tiny_model(tmp_path / "model", "qwen2")
    paths = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    command = [sys.executable, "-W", "ignore", "-m", "megarl", "train", "configs/demos/dapo.yaml"]
    command += [f"model.path={folder}", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (2, f"megarl: {broken}\n"), done.stderr[-2000:]
    assert not (tmp_path / "run").exists()
