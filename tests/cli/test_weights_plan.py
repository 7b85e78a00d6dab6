"""`megarl weights plan` as a user calls it, and the page that shows its output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.cli.main import main

ROOT = Path(__file__).parents[2]
CONFIG = "configs/vapo_32b.yaml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a folder without models, so that the known sizes are used."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "weights.md").read_text()
    (command,) = re.findall(r"^megarl (weights plan .*)$", page, flags=re.M)
    assert main(command.split()) == 0
    printed = re.sub(r"\d+\.\d s", "_ s", capsys.readouterr().out)
    shown = next(
        block
        for block in re.findall(r"^```text\n(.*?)^```$", page, flags=re.M | re.S)
        if block.startswith("model ")
    )
    assert printed == re.sub(r"\d+\.\d s", "_ s", shown)


def test_every_rank_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "--model",
        "Qwen2.5-0.5B",
        "parallel.tp=2",
        "parallel.pp=2",
        "parallel.dp=2",
        "rollout.engine_tp=2",
    ]
    assert main(["weights", "plan", CONFIG, "--ranks", *small]) == 0
    rows = capsys.readouterr().out.split("\n  rank")[1].splitlines()[1:]
    assert [int(row.split()[0]) for row in rows] == list(range(8))
    assert len({len(row.split()) for row in rows}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "Qwen9"], "--model: 'Qwen9' is not a known model"),
        (["model.path=models/mine"], "model.path: models/mine: no config.json there"),
        (["rollout.engine_tp=3"], "rollout.engine_tp: 3 does not divide the 128 devices"),
        (["rollout.engine_tp=16"], "rollout.engine_tp: 16 does not divide the model's 40 attention heads"),
        (["parallel.pp=3"], "parallel.pp: 3 does not divide the model's 64 layers"),
        (["parallel.ep=3"], "configs/vapo_32b.yaml: parallel: ep=3 must divide"),
        (
            ["--model", "Qwen2.5-72B", "rollout.weights_dtype=fp8_block"],
            "rollout.weights_dtype: fp8_block: model.layers.0.mlp",
        ),
    ],
)
def test_what_cannot_be_planned(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weights", "plan", CONFIG, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
