"""What the tests of launchers share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that name the demo's data and untrained model."""
    from megarl_tasks.arithmetic import write_demo

    folder = tmp_path_factory.mktemp("data")
    write_demo(folder, 0)
    return [
        f"model.path={folder}/model",
        f"data.train=[{folder}/train.jsonl]",
        f"data.eval=[{folder}/eval.jsonl]",
    ]
