"""A replayed step reproduces every recorded number to its last digit, and the weights.

At another layout they are nearly equal.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import dump_config
from megarl.config.errors import CheckpointError, DataError
from megarl.schedule.replay import check_replay, lines
from tests.chaos.harness import make_config, prepare
from tests.ranks import RankPool
from tests.schedule.demo import megarl
from tests.schedule.jobs import train_and_replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    prepare(folder)
    return folder


@pytest.mark.slow
def test_steps_are_replayed(folder: Path, ranks: Callable[[int, int, int], RankPool]) -> None:
    keys = {
        "steps": 3,
        "evaluation": {"every": 0},
        "checkpoint": {"keep": 0, "rollouts": True},
        "value_pretraining": {"steps": 1},
    }
    config = make_config(folder, "run", **keys)
    for outcome in ranks(2, 1, 1).run(train_and_replay, config=config, numbers=(1, 2))[0]:
        assert outcome.exact and outcome.different == [] and outcome.weights == 0.0 and outcome.remarks == ()
        assert {
            "policy/loss",
            "policy/grad_norm",
            "value/loss",
            "reward/mean",
            "mismatch/kl",
        } <= outcome.numbers.keys()
    # Another layout sums in another order: the numbers are nearly equal, and the replay reports why.
    single = make_config(folder, "run", **keys, parallel={"tp": 1})
    (outcome,) = ranks(1, 1, 1).run(train_and_replay, config=single, numbers=(2,))[0]
    assert not outcome.exact and outcome.different == [] and "the layout differs" in outcome.remarks[0]
    assert any(a != b for a, b in outcome.numbers.values())
    # Change a record, to show that the replay compares anything.
    metrics = config.run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    (record,) = (r for r in records if (r["stage"], r["step"]) == ("train", 2))
    record["policy/loss"] *= 1.0 + 1e-6
    metrics.write_text("".join(json.dumps(r) + "\n" for r in records))
    (outcome,) = ranks(2, 1, 1).run(train_and_replay, config=config, numbers=(2,))[0]
    assert outcome.different == ["policy/loss"] and lines(outcome)[-1] == "1 differ"
    with pytest.raises(DataError, match="no step 4 of stage train"):
        check_replay(config, 4)
    (config.run_dir / "rollouts/step-000002/rank-00001.safetensors").unlink()
    with pytest.raises(DataError, match=r"step-000002/rank-00001.safetensors: no such file"):
        check_replay(config, 2)
    (config.run_dir / "checkpoints/step-000001/state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state.json: is missing"):
        check_replay(config, 2)
    shutil.rmtree(config.run_dir / "rollouts/step-000003")
    with pytest.raises(DataError, match=r"step-000003/.*: no such file .*checkpoint.rollouts: true"):
        check_replay(config, 3)
    shutil.rmtree(config.run_dir / "checkpoints/step-000002")
    missing = r"step 3 needs the checkpoint step-000002; the newest there: .*step-000001, step-000003"
    with pytest.raises(CheckpointError, match=missing):
        check_replay(config, 3)


@pytest.mark.slow
def test_what_an_update_draws_is_drawn_again(
    folder: Path, ranks: Callable[[int, int, int], RankPool]
) -> None:
    """Clip-Cov's random tokens are selected again, in two epochs over the mini-batches."""
    keys = {
        "steps": 2,
        "evaluation": {"every": 0},
        "checkpoint": {"keep": 0, "rollouts": True},
        "value_pretraining": {"steps": 0},
        "algorithm": {"surrogate": "clip_cov", "covariance": {"share": 0.1, "low": 0.0}},
        "update": {"epochs": 2},
    }
    config = make_config(folder, "drawn", **keys)
    (outcome,) = ranks(2, 1, 1).run(train_and_replay, config=config, numbers=(2,))[0]
    assert outcome.exact and outcome.different == [] and outcome.weights == 0.0
    assert outcome.numbers["policy/selected"][0] > 0


@pytest.mark.slow
def test_the_command_asks_nothing_of_what_drew_the_step(folder: Path) -> None:
    """A replay needs no SGLang, servers, verifiers or data.

    The transformers engine sampled the step; then the stored settings are edited to name another engine.
    """
    keys: dict[str, Any] = {
        "steps": 2,
        "parallel": {"tp": 1},
        "evaluation": {"every": 0},
        "checkpoint": {"keep": 0, "rollouts": True},
        "value_pretraining": {"steps": 1},
    }
    config = make_config(folder, "elsewhere", **keys)
    (folder / "elsewhere.yaml").write_text(dump_config(config))
    megarl("train", folder / "elsewhere.yaml")
    pretraining = config.run_dir / "value_pretraining/step-000001/manifest.json"
    nowhere = {"urls": ["http://127.0.0.1:9"], "router": "http://127.0.0.1:10"}
    for engine in ({"engine": "sglang"}, {"engine": "sglang_url", **nowhere}):
        content = json.loads(pretraining.read_text().splitlines()[1])
        content["made_from"]["rollout.engine"] = engine["engine"]
        text = json.dumps(content)
        pretraining.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")
        other = make_config(folder, "elsewhere", **keys, rollout={**engine, "engine_timeout": 60})
        text = dump_config(other)
        for there, gone in (("train.jsonl", "gone.jsonl"), ("tests.chaos.verifiers:", "gone:")):
            assert there in text
            text = text.replace(there, gone)
        (config.run_dir / "config.yaml").write_text(text)
        done = megarl("replay", config.run_dir, "--step", 2)
        equal = r"(\d+) of \1 numbers equal to the last recorded digit; largest difference of a weight "
        assert re.search(f"{equal}after the step: 0$", done.stdout.rstrip()), done.stdout
