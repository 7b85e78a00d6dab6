"""The user's folder, created once for all tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.scene import Scene


@pytest.fixture(scope="package")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene.make(tmp_path_factory.mktemp("scene"))


@pytest.fixture
def scene(shared_scene: Scene, capsys: pytest.CaptureFixture[str]) -> Iterator[Scene]:
    """Tests leave the shared folder unchanged and put modified copies into their tmp_path."""
    scene = Scene(shared_scene.folder, capsys)
    yield scene
    scene.clear()


@pytest.fixture
def model_copy(shared_scene: Scene, tmp_path: Path) -> Path:
    """Return a copy of the model's folder to damage."""
    target = tmp_path / "model"
    target.mkdir()
    for file in (shared_scene.folder / "model").iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target
