"""`megarl eval`: checkpoint, run and export are the same policy at every layout; scores, refusals."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.cli.main import main
from megarl.config import load_config
from megarl.config.errors import CheckpointError
from megarl.schedule.evaluation import find_policy
from megarl.schedule.preflight import preflight
from tests.cli.jobs import evaluate_policy, start_training, write_perturbed
from tests.cli.processes import megarl
from tests.cli.scene import Scene
from tests.ranks import RankPool

Ranks = Callable[..., RankPool]


@pytest.fixture(scope="module")
def run(shared_scene: Scene, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run's folder with a checkpoint of two tensor-parallel ranks and its export.

    Its weights differ from model.path.
    """
    folder = tmp_path_factory.mktemp("perturbed") / "run"
    config = load_config(shared_scene.config, [f"run_dir={folder}", "data.eval=[]"])
    ranks(2, 1, 1).run(write_perturbed, config=config)
    return folder


@pytest.mark.parametrize(
    "layout",
    [(1, 1, 1), *(pytest.param(other, marks=pytest.mark.slow) for other in ((1, 2, 1), (1, 1, 2)))],
    ids=str,
)
def test_a_checkpoint_is_evaluated_at_any_layout(
    shared_scene: Scene, ranks: Ranks, run: Path, layout: tuple[int, int, int]
) -> None:
    tp, pp, _ = layout
    config = load_config(
        shared_scene.config, [f"parallel.tp={tp}", f"parallel.pp={pp}", "evaluation.samples=3"]
    )
    expected = load_file(run / "hf" / "model.safetensors")
    found = [ranks(*layout).run(evaluate_policy, config=config, given=given) for given in (run, run / "hf")]
    for weights, _ in found[0]:
        assert weights.keys() == expected.keys() and all(
            torch.equal(weights[name], expected[name]) for name in weights
        )
    start = load_file(shared_scene.folder / "model" / "model.safetensors")
    assert not torch.equal(start["model.norm.weight"], expected["model.norm.weight"]), (
        "the checkpoint is not where it began"
    )
    one, other = (policy[0][1] for policy in found)  # rank 0 has the responses
    assert len(one) == 9 * 3 and other == one


def test_which_folders_are_a_policy(shared_scene: Scene, run: Path, tmp_path: Path) -> None:
    config = load_config(shared_scene.config)
    newest = run / "checkpoints" / "step-000003"
    assert find_policy(config, None) == (config, None)
    assert (
        find_policy(config, run / "hf")[0].model.path == run / "hf"
        and find_policy(config, run / "hf")[1] is None
    )
    for given in (run, newest):
        assert find_policy(config, given) == (config, newest / "actor")


def test_a_converted_checkpoint_brings_its_own_description(
    shared_scene: Scene, ranks: Ranks, run: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "converted"
    assert main(["convert", "to-megatron", str(run / "hf"), str(whole)]) == 0
    config = load_config(shared_scene.config, ["parallel.tp=1", "evaluation.samples=2"])
    elsewhere, weights = find_policy(config, whole)
    assert elsewhere.model.path == whole and weights is None
    [(found, answers)] = ranks(1, 1, 1).run(evaluate_policy, config=config, given=whole)
    [(expected, same)] = ranks(1, 1, 1).run(evaluate_policy, config=config, given=run / "hf")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert answers == same


def test_training_starts_from_converted_checkpoints(
    shared_scene: Scene, ranks: Ranks, run: Path, tmp_path: Path
) -> None:
    """model.path and critic.path load the same weights as the Hugging Face folder.

    A damaged checkpoint is refused before ranks start.
    """
    whole, critic = tmp_path / "converted", tmp_path / "critic"
    assert main(["convert", "to-megatron", str(run / "hf"), str(whole), "--pp", "2"]) == 0
    assert main(["convert", "to-megatron", str(run / "hf"), str(critic), "--critic"]) == 0
    begun = []
    for actor, value in ((run / "hf", run / "hf"), (whole, critic), (whole, whole)):
        overrides = ["recipe=vapo", f"run_dir={tmp_path}/run", f"model.path={actor}", f"critic.path={value}"]
        config = load_config(shared_scene.config, overrides)
        preflight(config, "x.yaml")
        begun.append(ranks(2, 1, 1).run(start_training, config=config))
    for others in begun[1:]:
        for found, expected in zip(others, begun[0], strict=True):
            assert len(found) == len(expected) > 40 and all(map(torch.equal, found, expected))
    (whole / "__1_0.distcp").unlink()
    with pytest.raises(
        CheckpointError, match=rf"^model\.path: {whole}/__1_0\.distcp: model\..*: no such file"
    ):
        preflight(load_config(shared_scene.config, [f"model.path={whole}"]), "x.yaml")


def test_folders_that_are_refused(shared_scene: Scene, run: Path, tmp_path: Path, model_copy: Path) -> None:
    config = load_config(shared_scene.config)

    def refused(given: Path, *overrides: str) -> str:
        with pytest.raises(CheckpointError) as caught:
            find_policy(load_config(shared_scene.config, overrides), given)
        return str(caught.value)

    assert refused(tmp_path / "no") == f"--checkpoint: {tmp_path}/no: no such folder"
    assert refused(shared_scene.config) == f"--checkpoint: {shared_scene.config}: not a folder"
    assert refused(tmp_path).startswith(f"--checkpoint: {tmp_path}: neither a Hugging Face folder")
    damaged = tmp_path / "run"
    shutil.copytree(run, damaged)
    file = next((damaged / "checkpoints" / "step-000003" / "actor").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    line = refused(damaged)
    assert "the run has no complete checkpoint (its exported model is in" in line and f"{file}: has " in line
    assert refused(damaged / "checkpoints" / "step-000003").startswith(f"{file}: has ")
    (damaged / "checkpoints" / ".step-000004.partial").mkdir()
    assert "its writing was interrupted" in refused(damaged / "checkpoints" / ".step-000004.partial")
    description = json.loads((model_copy / "config.json").read_text())
    (model_copy / "config.json").write_text(json.dumps({**description, "rms_norm_eps": 1e-3}))
    assert "was written with another model than model.path describes" in refused(
        run, f"model.path={model_copy}"
    )
    assert "no such file" in refused(run, "model.path=/no/model")
    assert find_policy(config, None)[1] is None


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_an_evaluation_that_nobody_judges_says_so(shared_scene: Scene, tmp_path: Path) -> None:
    """With two data sources: no score, no error, and every response counted as ungraded."""
    rows = [
        {"question": f"What is {a} + 1?", "answer": str(a + 1), "data_source": "ab"[a % 2]} for a in range(4)
    ]
    file = tmp_path / "sources.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ("reward.verifier=tests.cli.verifiers:only_labelled", "parallel.tp=1", f"data.eval=[{file}]")
    done = megarl("eval", str(shared_scene.config), *keys, "--out", "out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert (summary["scores"], summary["length_mean"]) == ({}, None)
    answers = summary["answers"]
    assert answers["ungraded"] == answers["all"] and list(summary["sources"]) == ["a", "b"]
    assert "answers, ungraded" in done.stdout


@pytest.mark.slow
def test_answers_that_find_no_room(shared_scene: Scene, tmp_path: Path) -> None:
    """The scores are still printed, and no file is incomplete."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "answers.jsonl").symlink_to("/dev/full")
    done = megarl(
        "eval", str(shared_scene.config), "parallel.tp=1", "--out", str(tmp_path / "out"), cwd=tmp_path
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "out/answers.jsonl: cannot be written: No space left on device" in line
    assert "95 % confidence" in done.stdout and "answers and scores" not in done.stdout
    files = ["answers.jsonl", "data.json", "problems.jsonl", "scores.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files


@pytest.mark.slow
def test_sets_with_names(shared_scene: Scene, tmp_path: Path) -> None:
    """All sets are evaluated; the headline excludes a set that has `every`."""
    file = shared_scene.folder / "train.jsonl"
    sets = f"{{path: {file}, name: hard, samples: 4}}, {{path: {file}, name: rare, every: 5, samples: 1}}"
    keys = (f"data.eval=[{file}, {sets}]", "evaluation.samples=2", "parallel.tp=1")
    easy = "reward.verifier=tests.cli.verifiers:even_length"
    done = megarl("eval", str(shared_scene.config), *keys, easy, "--out", "out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert (summary["problems"], summary["samples"], summary["answers"]["all"]) == (18, None, 54)
    facts = {name: (one["problems"], one["samples"]) for name, one in summary["sources"].items()}
    assert facts == {"hard": (9, 4), "rare": (9, 1), "unnamed": (9, 2)}
    means = {name: one["scores"][f"avg@{one['samples']}"]["mean"] for name, one in summary["sources"].items()}
    assert summary["scores"]["avg"]["mean"] == pytest.approx((means["hard"] + means["unnamed"]) / 2)
    answers = lines(tmp_path / "out" / "answers.jsonl")
    assert Counter(answer["set"] for answer in answers) == {None: 18, "hard": 36, "rare": 9}
    assert len(lines(tmp_path / "out" / "problems.jsonl")) == 27
    assert set(json.loads((tmp_path / "out" / "data.json").read_text())) == {"eval", "eval hard", "eval rare"}
    assert (
        "hard 9 problems x 4 answers by" in done.stdout
        and "18 problems, without sets with `every`" in done.stdout
    )


@pytest.mark.slow
def test_the_command_on_two_ranks(shared_scene: Scene, run: Path, tmp_path: Path) -> None:
    """A Megatron checkpoint under the launcher at dp 2 and its export in one process give equal responses.

    The scores equal a count in this test.
    """
    easy = "reward.verifier=tests.cli.verifiers:even_length"
    common = (easy, "evaluation.samples=4", "rollout.max_response_tokens=6", "evaluation.top_p=1.0")

    def evaluated(given: Path, out: str, dp: int) -> str:
        sizes = ("parallel.tp=1", f"parallel.dp={dp}")
        done = megarl(
            "eval",
            str(shared_scene.config),
            "--checkpoint",
            str(given),
            "--out",
            out,
            *sizes,
            *common,
            cwd=tmp_path,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    printed = evaluated(run, "two", dp=2)
    evaluated(run / "hf", "one", dp=1)
    answers = lines(tmp_path / "two" / "answers.jsonl")
    assert answers == lines(tmp_path / "one" / "answers.jsonl") and len(answers) == 36
    assert f"9 problems x 4 answers by {run / 'checkpoints' / 'step-000003' / 'actor'}\n" in printed
    right: dict[Any, list[bool]] = {}
    for answer in answers:
        right.setdefault(answer["uid"], []).append(answer["correct"])
    scores = json.loads((tmp_path / "two" / "scores.json").read_text())
    assert (scores["problems"], scores["samples"], scores["answers"]["all"]) == (9, 4, 36)
    assert scores["answers"]["right"] == sum(map(sum, right.values()))
    assert 0 < scores["answers"]["right"] < 36, "a test of scores needs both kinds"
    for k in (1, 2, 4):
        pairs = [any(chosen) for own in right.values() for chosen in itertools.combinations(own, k)]
        assert scores["scores"][f"pass@{k}"]["mean"] == pytest.approx(sum(pairs) / len(pairs))
    assert scores["scores"]["avg@4"] == scores["scores"]["pass@1"]
    assert set(scores["scores"]) == {"avg@4", "pass@1", "pass@2", "pass@4", "majority@4"}
    for score in scores["scores"].values():
        assert 0 <= score["low"] <= score["mean"] <= score["high"] <= 1 and score["low"] < score["high"]
        assert f"{score['low']:.4f} to {score['high']:.4f}" in printed
    table = lines(tmp_path / "two" / "problems.jsonl")
    assert [(row["uid"], row["right"]) for row in table] == [(uid, sum(own)) for uid, own in right.items()]
    assert "all problems, hardest first" in printed
    shown = [
        line.split("│")[3].strip() for line in printed.splitlines() if line.startswith("│") and "/4" in line
    ]
    assert shown == sorted(shown) and Counter(shown) == Counter(f"{row['right']}/4" for row in table)
