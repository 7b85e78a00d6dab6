"""`log.profile`: which steps are traced, and what a rank's trace contains."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.cli.main import main
from megarl.config.schema import RolloutConfig
from megarl.schedule.profiler import Profiler
from tests.chaos.harness import make_config, prepare
from tests.ranks import RankPool, in_a_fork
from tests.schedule.jobs import train


def events(path: Path) -> list[dict[str, Any]]:
    """Return a trace's events with a duration (Perfetto's `X`), and those that name processes (`M`)."""
    with gzip.open(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event["ph"] in "XM"]


def process_names(found: list[dict[str, Any]]) -> list[str]:
    return [event["args"]["name"] for event in found if event["name"] == "process_name"]


@pytest.mark.slow
def test_a_run_traces_the_steps_after_its_first(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    prepare(tmp_path)
    keys: dict[str, Any] = {"recipe": "dapo", "algorithm": {"advantage": "group", "lambda_policy": 1.0}}
    config = make_config(
        tmp_path,
        "run",
        **keys,
        steps=2,
        value_pretraining={"steps": 0},
        evaluation={"every": 0},
        log={"profile": 1},
    )
    ranks(2, 1, 1).run(train, config=config)
    folder = config.run_dir / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"train-000002-rank-0000{rank}.json.gz" for rank in range(2)
    ]
    for rank in range(2):
        found = events(folder / f"train-000002-rank-0000{rank}.json.gz")
        assert f"rank {rank}" in process_names(found)
        by_name = {event["name"]: event for event in found if event["ph"] == "X"}
        assert {"rollout", "old_logprobs", "actor_update", "weight_transfer"} <= by_name.keys()
        step, update = by_name["train step 2"], by_name["actor_update"]
        assert step["ts"] <= update["ts"] <= update["ts"] + update["dur"] <= step["ts"] + step["dur"]
        inside = [
            event
            for event in found
            if event["name"] == "aten::mm" and update["ts"] <= event["ts"] <= update["ts"] + update["dur"]
        ]
        assert len(inside) > 20  # forward and backward of several micro-batches


def traced(folder: Path, longest: int) -> tuple[Counter[str], list[str]]:
    """Run three steps of two phases with one matrix product each, and trace the second step.

    Returns: how often each name occurs in the trace, and the files.
    """
    config: Any = SimpleNamespace(
        run_dir=folder,
        log=SimpleNamespace(profile=1),
        rollout=RolloutConfig(max_response_tokens=longest),
    )
    runtime: Any = SimpleNamespace(rank=7, device=torch.device("cpu"))
    profiler = Profiler(config, runtime, layers=64)
    for number in (4, 5, 6):
        with profiler.step("train", number):
            for phase in ("rollout", "actor_update"):
                with profiler.phase(phase):
                    torch.ones(2, 2) @ torch.ones(2, 2)
    files = sorted(path.name for path in (folder / "profile").iterdir())
    return Counter(event["name"] for event in events(folder / "profile" / files[0])), files


@pytest.mark.parametrize(("longest", "products"), [(80, 2), (20_000, 1)])
def test_operators_of_a_long_decoding_are_left_out(tmp_path: Path, longest: int, products: int) -> None:
    count, files = in_a_fork(traced, tmp_path, longest)
    assert files == ["train-000005-rank-00007.json.gz"]
    assert count["aten::mm"] == products
    assert count["rollout"] == count["actor_update"] == count["train step 5"] == 1


def test_a_trace_that_cannot_be_written_ends_no_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").write_text("in the way")
    with pytest.raises(NotADirectoryError):  # from this test, which lists the folder
        traced(tmp_path, 80)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"megarl: {tmp_path / 'profile'}: cannot be written: ") and "continues" in line


def test_a_negative_number_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "configs/demos/dapo.yaml", "--profile", "-1", f"run_dir={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "log.profile" in line and "greater than or equal to 0" in line
