"""`megarl config phases` prints the order in which a run executes its phases."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.main import main
from megarl.config import load_config
from megarl.config.phases import PARITY, PHASES
from megarl.config.schema import PRETRAINING, SUPERVISED
from megarl.observe.timeline import FOLDER, NAME
from tests.chaos.harness import prepare
from tests.ranks import RankPool
from tests.schedule.jobs import train

NAMES = {phase.name for phase in PHASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phases")
    prepare(folder)
    pairs = [{"prompt": f"{a}+1=?", "response": str(a + 1)} for a in range(16)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def read_phases(run_dir: Path) -> dict[tuple[str, int], list[str]]:
    """Return the phases of each step in the order in which rank 0 recorded them."""
    lines = (run_dir / FOLDER / NAME.format(0)).read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["phase"] in NAMES]
    steps = groupby(records, key=lambda record: (record["stage"], record["step"]))
    return {step: [record["phase"] for record in group] for step, group in steps}


def parse_phases(printed: str) -> dict[str, list[str]]:
    """Return the phases of each stage in the order in which the command printed them."""
    found = {}
    for table in printed.split("\n\n"):
        title, _, *lines = table.splitlines()
        found[title.split()[1].rstrip(",")] = [line.split()[0] for line in lines if line.startswith("  ")]
    return found


def write_config(folder: Path, own: Path, recipe: str, keys: dict[str, Any]) -> Path:
    """Write the configuration of two steps on one rank into the folder `own`."""
    settings: dict[str, Any] = {
        "recipe": recipe,
        "run_dir": str(own / "run"),
        "steps": 2,
        "model": {"path": str(folder / "model"), "dtype": "fp32", "layers": "portable"},
        "parallel": {"device": "cpu"},
        "data": {"train": [str(folder / "train.jsonl")], "template": "raw", "max_prompt_tokens": 16},
        "rollout": {"prompts": 6, "group_size": 4, "max_response_tokens": 16},
        "reward": {"overlong": {"buffer": 4}},
        "update": {"mini_batch": 12},
        "checkpoint": {"every": 0, "export_hf": False},
        "evaluation": {"every": 0},
        "log": {"terminal": "quiet", "report": False},
    }
    for key, value in keys.items():
        settings[key] = {**settings.get(key, {}), **value}
    if recipe == SUPERVISED:
        settings = {key: value for key, value in settings.items() if key not in SAMPLING}
        settings["data"]["train"] = [str(folder / "pairs.jsonl")]
        settings["supervised"] = {"batch": 4}
    path = own / "config.yaml"
    path.write_text(json.dumps(settings))
    return path


SAMPLING = ("rollout", "reward", "update", "evaluation")
TWO = {"value_pretraining": {"steps": 2}}
UNFILTERED = {"rollout": {"dynamic_sampling": {"enabled": False}}}


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ("vapo", {**TWO, "residency": {"offload": True}}),
        pytest.param("dapo", {**UNFILTERED, "algorithm": {"kl_weight": 0.01}}, marks=pytest.mark.slow),
        pytest.param("tppo", {**TWO, "rollout": {"window": 12}}, marks=pytest.mark.slow),
        pytest.param("sao", {**TWO, "rollout": {"prompts": 24, "group_size": 1}}, marks=pytest.mark.slow),
        pytest.param("dapo", {**UNFILTERED, "teacher": {"path": "{folder}/model"}}, marks=pytest.mark.slow),
        ("sft", {}),
    ],
)
def test_a_run_takes_the_order_that_is_printed(
    recipe: str,
    keys: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    ranks: Callable[..., RankPool],
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = json.loads(json.dumps(keys).replace("{folder}", str(folder)))
    file = write_config(folder, tmp_path, recipe, keys)
    capsys.readouterr()
    assert main(["config", "phases", str(file)]) == 0
    printed = parse_phases(capsys.readouterr().out)
    config = load_config(file)
    assert list(printed) == [*([PRETRAINING] if config.has_critic else []), config.main_stage]

    ranks(1, 1, 1).run(train, config=config)

    found = read_phases(config.run_dir)
    assert list(found) == [(stage, step) for stage in printed for step in (1, 2)]
    for (stage, step), phases in found.items():
        later = [phase for phase in printed[stage] if phase != PARITY]
        assert phases == (printed[stage] if step == 1 else later)
        assert (PARITY in printed[stage]) == (stage != SUPERVISED)
