"""Settings that a run must share with the run that it continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config.errors import ConfigError
from megarl.config.schema import Config
from megarl.training.checkpoint import Checkpoint, check_continues, list_fixed_settings, moved_schedule


def test_one_term_more_or_less_is_another_reward(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def config(**terms: Any) -> Config:
        named = {name: {"function": "m:f", "weight": weight} for name, weight in terms.items()}
        run: dict[str, Any] = {"recipe": "grpo", "run_dir": "runs/x", "steps": 3}
        return Config(**run, model={"path": tmp_path}, reward={"terms": named, "workers": len(terms) + 1})

    def checkpoint(settings: dict[str, Any]) -> Checkpoint:
        manifest = {"settings": settings, "step": 1, "stage": "train"}
        return Checkpoint(tmp_path, json.loads(json.dumps(manifest)))  # as it comes back from a file

    one, two = config(a=0.5), config(a=0.5, b=1.0)
    check_continues(one, checkpoint(list_fixed_settings(one)))
    for now, then in ((one, two), (two, one), (config(), one), (one, config()), (config(a=0.25), one)):
        with pytest.raises(ConfigError, match=r"^reward\.terms: is .*, the run there has "):
            check_continues(now, checkpoint(list_fixed_settings(then)))
    # A version that had no terms.
    older = {key: value for key, value in list_fixed_settings(one).items() if key != "reward.terms"}
    check_continues(one, checkpoint(older))


def test_a_run_without_a_teacher_does_not_go_on_with_one(tmp_path: Path) -> None:
    """Nor does a checkpoint of a version without teachers, or with a single teacher only."""
    (tmp_path / "config.json").write_text("{}")
    run: dict[str, Any] = {"recipe": "grpo", "run_dir": "runs/x", "steps": 3, "model": {"path": tmp_path}}
    without, taught = Config(**run), Config(**run, teacher={"path": tmp_path})
    older = {
        key: value for key, value in list_fixed_settings(without).items() if not key.startswith("teacher.")
    }
    for settings in (list_fixed_settings(without), json.loads(json.dumps(older))):
        checkpoint = Checkpoint(tmp_path, {"settings": settings, "step": 1, "stage": "train"})
        check_continues(without, checkpoint)
        with pytest.raises(ConfigError, match=r"^teacher\.path: is .*, the run there has None"):
            check_continues(taught, checkpoint)
    older = {key: list_fixed_settings(taught)[key] for key in ("teacher.path", "teacher.weight")}
    checkpoint = Checkpoint(tmp_path, {"settings": older, "step": 1, "stage": "train"})
    for more in ({"by_source": {"a": tmp_path}}, {"top_k": 4}):
        with pytest.raises(ConfigError, match=rf"^teacher\.{next(iter(more))}: is .*, the run there has"):
            check_continues(Config(**run, teacher={"path": tmp_path, **more}), checkpoint)


def test_other_steps_are_told_where_they_move_a_learning_rate(tmp_path: Path) -> None:
    def config(actor: str, critic: str, advantage: str = "gae", steps: int = 6) -> Config:
        run: dict[str, Any] = {
            "recipe": "vapo",
            "run_dir": tmp_path,
            "steps": steps,
            "model": {"path": tmp_path},
        }
        models = {"actor": {"schedule": actor}, "critic": {"schedule": critic}}
        return Config(**run, **models, algorithm={"advantage": advantage})

    three = Checkpoint(tmp_path, {"steps": 3})
    assert moved_schedule(config("constant", "constant"), three) is None
    assert moved_schedule(config("linear", "cosine", steps=3), three) is None
    assert moved_schedule(config("linear", "cosine"), Checkpoint(tmp_path, {})) is None, "an older one"
    assert moved_schedule(config("constant", "cosine", "group"), three) is None, "there is no critic"
    line = moved_schedule(config("linear", "cosine"), three)
    assert (
        line
        == "steps: 6, no longer 3: the learning rate jumps (actor.schedule linear, critic.schedule cosine)"
    )
