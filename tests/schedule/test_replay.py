"""A step done again from what is on disk gives every recorded number to its last digit, and the same weights;
elsewhere nearly so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.errors import CheckpointError, DataError
from megarl.schedule.replay import check_replay, lines
from tests.chaos.harness import make_config, prepare
from tests.ranks import RankPool
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
    # Another layout adds up in another order: nearly the same, and said to be so.
    single = make_config(folder, "run", **keys, parallel={"tp": 1})
    (outcome,) = ranks(1, 1, 1).run(train_and_replay, config=single, numbers=(2,))[0]
    assert not outcome.exact and outcome.different == [] and "the layout is another" in outcome.remarks[0]
    assert any(a != b for a, b in outcome.numbers.values())
    # A replay that compared nothing would not see this.
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


@pytest.mark.slow
def test_what_an_update_draws_is_drawn_again(
    folder: Path, ranks: Callable[[int, int, int], RankPool]
) -> None:
    """Clip-Cov's tokens, in two passes over the mini-batches."""
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
