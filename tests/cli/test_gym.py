"""A run on reasoning-gym's problems and a file: shown, trained, stopped, continued and evaluated."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.processes import megarl
from tests.cli.scene import Scene

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("reasoning_gym") is None,
        reason="reasoning-gym is not installed (pip install 'megarl[gym]')",
    ),
]
SUMS = "gym: {tasks: {chain_sum: {max_terms: 2, max_digits: 1}, count_bits: {}}, system: null, size: %d}"


def test_a_run_and_its_continuation(shared_scene: Scene, tmp_path: Path) -> None:
    """A run stopped after its first step and continued has the same weights; scores are reported by task."""
    keys = (
        "recipe=grpo",
        f"data.train=[{{{SUMS % 40}}}, {shared_scene.folder}/train.jsonl]",
        f"data.eval=[{{{SUMS % 6}, name: held_out, samples: 2}}]",
        "data.max_prompt_tokens=220",
        "rollout.max_response_tokens=16",
        "parallel.tp=1",
        "reward.terms={any: {function: 'tests.cli.verifiers:checksum'}}",  # a random model earns no other
        "checkpoint.every=1",
        "log.report=false",
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, steps in ((whole, 2), (parts, 1), (parts, 2)):
        run = (f"run_dir={folder}", f"steps={steps}")
        done = megarl("train", str(shared_scene.config), *keys, *run, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found = [load_file(folder / "hf" / "model.safetensors") for folder in (whole, parts)]
    start = load_file(shared_scene.folder / "model" / "model.safetensors")
    assert all(torch.equal(found[0][name], found[1][name]) for name in start)
    assert not all(torch.equal(found[0][name], start[name]) for name in start)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    sources = {key.split("/")[1] for row in rows for key in row if key.startswith("source/")}
    assert sources and sources <= {"chain_sum", "count_bits", "unnamed"}
    assert any("eval/held_out/score" in row for row in rows)

    shown = megarl("data", "show", str(shared_scene.config), *keys, "--rows=1", cwd=tmp_path)
    report = json.loads((whole / "data.json").read_text())["train"]
    assert f"data: {report['kept']} of 49 rows used" in shown.stdout and shown.returncode == 0
    out = megarl("eval", str(shared_scene.config), *keys, "--out", "scores", cwd=tmp_path)
    summary = json.loads((tmp_path / "scores" / "scores.json").read_text())
    assert (out.returncode, summary["answers"]["all"], summary["answers"]["ungraded"]) == (0, 12, 0)


def test_a_task_that_does_not_exist(shared_scene: Scene, tmp_path: Path) -> None:
    """It is reported before a run, whether the model exists or not, and the existing tasks are listed."""
    for model in ((), ("model.path=/nowhere",)):
        entry = "data.train=[{gym: {tasks: [chain_summ], size: 4}}]"
        done = megarl("config", "check", str(shared_scene.config), entry, *model, cwd=tmp_path)
        line = "megarl: data.train[0].gym.tasks.chain_summ: reasoning-gym has no such task (did you mean"
        assert done.returncode == 2 and done.stderr.startswith(line), done.stderr
    assert "chain_sum, count_bits," in megarl("data", "gym", cwd=tmp_path).stdout
    described = megarl("data", "gym", "chain_sum", cwd=tmp_path).stdout
    assert "min_terms: 2\n" in described and "State the final answer" in described
