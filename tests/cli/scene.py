"""A user's folder: a tiny model, data files and a configuration of two ranks; and the command in it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.cli.main import main
from tests.tiny_models import make_tiny_model

QUESTIONS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(3) for b in range(3)]
# Two ranks: a mistake that the checks miss becomes visible by their launch.
CONFIG = """\
recipe: dapo
run_dir: {folder}/run
steps: 1
model: {{path: {folder}/model, dtype: fp32}}
parallel: {{tp: 2, device: cpu}}
data:
  train: [{folder}/train.jsonl]
  eval: [{folder}/train.jsonl]
  max_prompt_tokens: 128
rollout: {{prompts: 4, group_size: 2, max_response_tokens: 16}}
reward: {{overlong: {{buffer: 8}}}}
update: {{mini_batch: 8}}
"""


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass
class Scene:
    """folder: contains model/, train.jsonl and x.yaml; a run would write run/."""

    folder: Path
    capsys: pytest.CaptureFixture[str] | None = None

    @staticmethod
    def make(folder: Path) -> Scene:
        make_tiny_model(folder / "model", "qwen2", max_positions=256)
        write_jsonl(folder / "train.jsonl", QUESTIONS)
        (folder / "x.yaml").write_text(CONFIG.format(folder=folder))
        return Scene(folder)

    @property
    def config(self) -> Path:
        return self.folder / "x.yaml"

    def refused(self, *arguments: str) -> str:
        """Return the one line on standard error of a command that must end with code 2 and no output."""
        assert self.capsys is not None
        self.capsys.readouterr()
        code = main(arguments)
        out, err = self.capsys.readouterr()
        assert (code, out) == (2, ""), err
        assert err.startswith("megarl") and err.endswith("\n") and err.count("\n") == 1, err
        return err.rstrip("\n").removeprefix("megarl: ")

    def train_refused(self, *overrides: str) -> str:
        """Do as `refused` for `megarl train`, which must not touch the run's folder either."""
        line = self.refused("train", str(self.config), *overrides)
        assert not (self.folder / "run").exists(), "the run's folder was claimed: ranks would have been next"
        return line

    def clear(self) -> None:
        """Remove the run's folder, so that one test's failure does not affect later tests."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
