"""Stored value-pretraining rollouts: another critic trains on them bitwise equal, without sampling.

A rollout of other sampling settings is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megarl.cli.main import main
from megarl.config import dump_config
from megarl.config.errors import ConfigError, DataError
from megarl.config.schema import Config
from megarl.data.batch import RolloutBatch, TrainBatch, read_batch, write_batch
from megarl.parallel.runtime import Runtime
from megarl.schedule.rollouts import (
    RolloutStore,
    check_pretraining_rollouts,
    read_rollout,
    sampling_settings,
)
from megarl.schedule.run import build_run
from megarl.schedule.trainer import Trainer
from tests.ranks import RankPool
from tests.schedule.test_resume import (
    assert_same_export,
    assert_same_tensors,
    make_config,
    records,
    write_task,
)
from tests.tiny_models import make_tiny_model

Ranks = Callable[[int, int, int], RankPool]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_task(tmp_path_factory.mktemp("kept"))
    make_tiny_model(
        folder / "critic", "llama", layers=1, hidden=48, heads=6, kv_heads=2, ffn=64, classification="token"
    )
    return folder


def config_of(folder: Path, name: str, **keys: Any) -> Config:
    """Return a VAPO run with dynamic sampling.

    The surplus of value pretraining's last rollout is used in the first step.
    """
    base: dict[str, Any] = {
        "recipe": "vapo",
        "steps": 1,
        "algorithm": {
            "advantage": "gae",
            "lambda_policy": "length_adaptive",
            "alpha": 0.5,
            "nll_weight": 0.1,
        },
        "critic": {"lr": 1e-2},
        "value_pretraining": {"steps": 3},
        "checkpoint": {"every": 0},
    }
    for key, value in keys.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return make_config(folder, folder / name, **base)


def execute(runtime: Runtime, config: Config) -> int:
    """Run `config` and return how often this rank's engine was asked for responses."""
    config.run_dir.mkdir(exist_ok=True)
    run = build_run(config, runtime)
    assert run.engine is not None
    asked, generate = [0], run.engine.generate

    def counted(*arguments: Any, **keywords: Any) -> Any:
        asked[0] += 1
        return generate(*arguments, **keywords)

    run.engine.generate = counted  # type: ignore[method-assign]
    try:
        Trainer(run).train()
    finally:
        run.close()
    return asked[0]


def refusal(runtime: Runtime, config: Config) -> str:
    try:
        execute(runtime, config)
    except ConfigError as error:
        return str(error)
    return ""


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "rollout/reused"} for record in records(run_dir)]


def reused(run_dir: Path) -> list[float]:
    return [record["rollout/reused"] for record in records(run_dir) if record["stage"] == "value_pretraining"]


@pytest.fixture(scope="module")
def first(folder: Path, ranks: Ranks) -> Path:
    """Run with two replicas and keep its three rollouts."""
    ranks(1, 1, 2).run(execute, config=config_of(folder, "first"))
    assert reused(folder / "first") == [0, 0, 0]
    return folder / "first" / "value_pretraining"


@pytest.mark.slow
def test_reused_rollouts_give_the_same_bits(folder: Path, first: Path, ranks: Ranks) -> None:
    config = config_of(folder, "again", value_pretraining={"rollouts": first})
    main_steps = ranks(1, 1, 2).run(execute, config=config_of(folder, "none", value_pretraining={"steps": 0}))
    asked = ranks(1, 1, 2).run(execute, config=config)
    assert reused(folder / "again") == [1, 1, 1]
    assert max(asked) <= max(main_steps), "value pretraining asked the engine"
    assert numbers(folder / "again") == numbers(folder / "first")
    for name in ("samples.jsonl", "distributions.jsonl"):
        text = (folder / "again" / name).read_text()
        assert text == (folder / "first" / name).read_text() and text.count('"value_pretraining"') >= 3
    for what in ("hf", "critic_pretrained"):
        assert_same_export(folder / "again" / what, folder / "first" / what)
    assert not (folder / "again" / "value_pretraining").exists()


@pytest.mark.slow
def test_another_critic_takes_them(folder: Path, first: Path, ranks: Ranks) -> None:
    """A critic with other settings and fewer rollouts gives the same numbers as without reuse.

    Its size, family, learning rate, epochs, lambda and mini-batch differ.
    """
    other = {
        "critic": {"lr": 3e-3, "path": folder / "critic", "epochs": 2, "mini_batch": 6},
        "algorithm": {"lambda_critic": 0.9, "value_clip": 0.2},
    }
    fewer = {"steps": 2, "epochs": 3, "lr": 5e-3}
    ranks(1, 1, 2).run(execute, config=config_of(folder, "other_new", value_pretraining=fewer, **other))
    ranks(1, 1, 2).run(
        execute,
        config=config_of(folder, "other_kept", value_pretraining={**fewer, "rollouts": first}, **other),
    )
    assert (reused(folder / "other_new"), reused(folder / "other_kept")) == ([0, 0], [1, 1])
    assert numbers(folder / "other_kept") == numbers(folder / "other_new")
    for what in ("hf", "critic_pretrained"):
        assert_same_export(folder / "other_kept" / what, folder / "other_new" / what)


@pytest.mark.slow
def test_a_critic_of_another_size_and_family_at_any_layout(folder: Path, first: Path, ranks: Ranks) -> None:
    """This critic is larger than the actor; on the same rollouts its numbers equal those of one rank.

    The layout has TP and PP above 1; the rollouts come from two replicas."""
    large = make_tiny_model(
        folder / "large_critic", "qwen2", layers=4, hidden=64, heads=8, kv_heads=4, ffn=96
    )
    critic = {"path": large, "lr": 1e-3, "mini_batch": 24}
    found = {}
    for name, sizes in (("one", (1, 1, 1)), ("many", (2, 2, 1))):
        run_dir = f"large_{name}"
        ranks(*sizes).run(
            execute, config=config_of(folder, run_dir, critic=critic, value_pretraining={"rollouts": first})
        )
        found[name] = [
            record for record in records(folder / run_dir) if record["stage"] == "value_pretraining"
        ]
        exported = load_file(folder / run_dir / "critic_pretrained" / "model.safetensors")
        assert exported["model.layers.3.mlp.down_proj.weight"].shape == (64, 96) and exported[
            "score.weight"
        ].shape == (1, 64)
    for one, other in zip(found["one"], found["many"], strict=True):
        for key in ("value/loss", "value/grad_norm", "value/explained_variance"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


@pytest.mark.slow
def test_a_damaged_file_is_named_and_sampled_again_and_more_rollouts_follow(
    folder: Path, first: Path, ranks: Ranks
) -> None:
    """A replacement has the same responses."""
    kept = shutil.copytree(first, folder / "damaged")
    with open(kept / "step-000002/rank-00001.safetensors", "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(100))
    config = config_of(folder, "mended", value_pretraining={"rollouts": kept, "steps": 4})
    ranks(1, 1, 2).run(execute, config=config)
    assert reused(folder / "mended") == [1, 0, 1, 0]
    events = [
        record.get("events")
        for record in records(folder / "mended")
        if record["stage"] == "value_pretraining"
    ]
    assert events == [
        None,
        [
            f"{kept}/step-000002/rank-00001.safetensors: is damaged (its checksum differs); "
            "it is sampled again"
        ],
        None,
        None,
    ]
    mended, whole = (ranks(1, 1, 1).run(read_whole, folder=path, number=2)[0][0] for path in (kept, first))
    assert_same_tensors(mended, whole)
    assert sorted(path.name for path in kept.iterdir()) == [f"step-{n:06d}" for n in range(1, 5)]
    ranks(1, 1, 1).run(execute, config=config_of(folder, "one_rank", value_pretraining={"steps": 4}))
    for number in range(1, 5):
        of_two, of_one = (
            ranks(1, 1, 1).run(read_whole, folder=path, number=number)[0]
            for path in (kept, folder / "one_rank/value_pretraining")
        )
        assert torch.equal(of_two[0]["tokens"], of_one[0]["tokens"])
        assert of_two[1]["stats"] == of_one[1]["stats"]


@pytest.mark.slow
def test_rollouts_of_something_else_are_refused(
    folder: Path, first: Path, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1+1=?", "answer": "2"}\n' * 30)
    kept = {"rollouts": first}
    cases = {
        "rollout.temperature 1.0, this run has 0.5": {"rollout": {"temperature": 0.5}},
        "seed 1, this run has 4": {"seed": 4},
        "other model.path": {"model": {"path": folder / "other_model"}},
        "other data.train": {"data": {"train": [tmp_path / "train.jsonl"]}},
    }
    make_tiny_model(folder / "other_model", "qwen3", tied=True, seed=1)
    capsys.readouterr()
    for number, (expected, keys) in enumerate(cases.items()):
        config = config_of(folder, f"refused{number}", value_pretraining=kept, **keys)
        file = f"value_pretraining.rollouts: {first}/step-000001/manifest.json"
        message = f"{file}: was sampled with {expected} (set it back, or choose another"
        found = ranks(1, 1, 2).run(refusal, config=config)
        assert len(set(found)) == 1 and found[0].startswith(message), found
        if not expected.startswith("other"):
            (tmp_path / "config.yaml").write_text(
                dump_config(config.model_copy(update={"run_dir": tmp_path / "run"}))
            )
            assert main(["train", str(tmp_path / "config.yaml")]) == 2
            assert capsys.readouterr().err.startswith(f"megarl: {message}")
    assert len(list(first.iterdir())) == 3


def test_the_judge_of_stored_rollouts(folder: Path, tmp_path: Path) -> None:
    """Older versions have not stored `reward.judge`."""
    judge = {"url": "http://127.0.0.1:9/v1", "model": "one"}
    no_judge, with_judge = ({"judge": keys} for keys in ({}, judge))
    elsewhere, other = ({"judge": judge | keys} for keys in ({"url": "http://x/v1"}, {"model": "two"}))
    manifest = tmp_path / "step-000001" / "manifest.json"
    manifest.parent.mkdir()

    def find_problem(stored: dict[str, Any], now: dict[str, Any], *, is_old: bool = False) -> str:
        made_from = sampling_settings(config_of(folder, "judge", reward=stored))
        if is_old:
            made_from = {key: v for key, v in made_from.items() if not key.startswith("reward.judge")}
        text = json.dumps({"made_from": made_from, "files": {}, "state": {}})
        manifest.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")
        kept = {"value_pretraining": {"rollouts": tmp_path}}
        try:
            check_pretraining_rollouts(config_of(folder, "judge", reward=now, **kept))
        except ConfigError as error:
            return str(error).partition("was sampled with ")[2].partition(" (")[0]
        return ""

    assert find_problem(no_judge, no_judge, is_old=True) == ""
    assert find_problem(no_judge, with_judge, is_old=True) == "reward.judge.model '', this run has 'one'"
    assert find_problem(no_judge, with_judge) == "reward.judge.model '', this run has 'one'"
    assert find_problem(with_judge, no_judge) == "reward.judge.model 'one', this run has ''"
    assert find_problem(with_judge, other) == "reward.judge.model 'one', this run has 'two'"
    assert find_problem(with_judge, with_judge) == find_problem(with_judge, elsewhere) == ""


def read_whole(runtime: Runtime, folder: Path, number: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tokens and columns of a rollout, read on one rank, and its state."""
    batch, state = read_rollout(folder, number, runtime)
    assert len(batch.rows) == batch.num_sequences
    return {"tokens": batch.local.tokens, **batch.local.columns, **batch.columns}, state


def batch_of_turns(rank: int) -> RolloutBatch:
    """Return one of two ranks' part of five responses to a prompt of two tokens.

    Observations stand at their start and between; the third response is empty, as if it were ungraded.
    """
    g, observed = torch.Generator().manual_seed(3), ((), (1, 2), (), (0, 3), (4,))
    sizes = [3, 5, 0, 6, 7]
    whole = TrainBatch.build([[1, 2]] * 5, [torch.randint(3, 99, (n,), generator=g).tolist() for n in sizes])
    for start, places in zip(whole.cu_seqlens.tolist(), observed, strict=False):
        whole.response_mask[[start + 2 + place for place in places]] = False
    for name in ("engine_logprobs", "turn_rewards"):
        whole[name] = torch.where(whole.response_mask, torch.randn(whole.num_tokens, generator=g), 0.0)
    rows = torch.arange(5)[rank::2]
    return RolloutBatch(
        lengths=whole.lengths,
        response_lengths=whole.response_lengths,
        prompt_lengths=torch.full((5,), 2),
        owners=torch.arange(5) % 2,
        columns={"rewards": torch.randn(5, generator=g)},
        rows=rows,
        local=whole.select(rows),
    )


def keep_and_read(runtime: Runtime, folder: Path) -> bool:
    """Assert that a multi-turn batch is read as it was written; return whether it has observations."""
    written = batch_of_turns(runtime.rank)
    RolloutStore(folder, runtime, "key", "remedy").write(4, written, {"stats": {"a": 1.5}})
    found, state = read_rollout(folder, 4, runtime)
    assert state == {"stats": {"a": 1.5}} and found.columns.keys() == {"rewards"}
    for name in ("lengths", "response_lengths", "prompt_lengths", "owners", "rows"):
        assert torch.equal(getattr(found, name), getattr(written, name)), name
    assert torch.equal(found["rewards"], written["rewards"])
    assert found.local.columns.keys() == written.local.columns.keys()
    for name in ("tokens", "cu_seqlens", "response_mask", *written.local.columns):
        one, other = (getattr(e, name) if name not in e else e[name] for e in (found.local, written.local))
        assert one.dtype == other.dtype and torch.equal(one, other), name
    # A column of version 0.2 has its present name after reading.
    old = replace(written, columns=written.columns | {"begun": torch.arange(5)})
    RolloutStore(folder, runtime, "key", "remedy").write(5, old, {"stats": {}})
    renamed, _ = read_rollout(folder, 5, runtime)
    assert renamed.columns.keys() == {"rewards", "prefix_tokens"}
    assert torch.equal(renamed["prefix_tokens"], torch.arange(5))
    return found.has_observations


def test_responses_of_several_turns_are_kept(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1, 1, 2).run(keep_and_read, folder=tmp_path) == [True, True]


def make_experience() -> TrainBatch:
    experience = TrainBatch.build([[1, 2], [3]], [[4], [5, 6]])
    experience["rewards"] = torch.tensor([1.0, -1.0])
    experience["correct"] = torch.tensor([True, False])
    experience["engine_logprobs"] = torch.randn(experience.num_tokens)
    return experience


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    path, experience = tmp_path / "new" / "x.safetensors", make_experience()
    write_batch(path, experience)
    found = read_batch(path)
    assert found.columns.keys() == experience.columns.keys()
    for one, other in zip(
        (found.tokens, found.cu_seqlens, found.response_mask, *found.columns.values()),
        (
            experience.tokens,
            experience.cu_seqlens,
            experience.response_mask,
            *(experience[name] for name in found.columns),
        ),
        strict=True,
    ):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert [entry.name for entry in path.parent.iterdir()] == ["x.safetensors"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_is_found_wherever_it_is(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """After a flipped bit or a truncation, reading fails in one line with the file's name, or is correct."""
    path, experience = tmp_path_factory.mktemp("damage") / "x.safetensors", make_experience()
    write_batch(path, experience)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
    else:
        os.truncate(path, at)
    try:
        found = read_batch(path)
    except DataError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return
    assert torch.equal(found.tokens, experience.tokens) and found.columns.keys() == experience.columns.keys()
