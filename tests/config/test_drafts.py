"""Draft models: contradictions are one line before a run, and a folder must fit the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config import check_config, load_config
from megarl.config.drafts import check_draft, draft_bytes
from megarl.config.errors import ConfigError

ROOT = Path(__file__).parents[2]
DRAFT = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "draft"}


def load(options: dict[str, Any], *overrides: str) -> Any:
    given = f"rollout.engine_options={json.dumps(options)}"
    return load_config(ROOT / "configs/vapo_32b.yaml", [given, *overrides])


@pytest.mark.parametrize(
    ("options", "overrides", "problem"),
    [
        (
            {"speculative_num_steps": 2},
            [],
            "speculative_num_steps: has no effect without speculative_algorithm",
        ),
        (
            {**DRAFT, "speculative_algorithm": "NGRAM"},
            [],
            "NGRAM is not one of STANDALONE, EAGLE, EAGLE3, NEXTN",
        ),
        ({"speculative_algorithm": "EAGLE"}, [], "EAGLE needs a draft model"),
        ({**DRAFT, "speculative_num_steps": "many"}, [], "must be a whole number from 1"),
        ({**DRAFT, "speculative_eagle_topk": 4}, [], "speculative_eagle_topk: must be 1 with a draft model"),
        ({**DRAFT, "speculative_num_draft_tokens": 9}, [], "speculative_num_draft_tokens: must be 4"),
        ({**DRAFT, "speculative_draft_load_format": "dummy"}, [], "weight transfers leave the draft alone"),
        ({**DRAFT, "enable_draft_weights_cpu_backup": False}, [], "the draft is lost when the engine sleeps"),
        (
            {**DRAFT, "enable_deterministic_inference": True},
            [],
            "enable_deterministic_inference: must be false",
        ),
        (
            {**DRAFT, "speculative_adaptive": True},
            [],
            "speculative_adaptive: megarl's sampler verifies drafts",
        ),
        ({**DRAFT, "speculative_use_rejection_sampling": True}, [], "megarl's sampler verifies drafts"),
        (
            DRAFT,
            ["rollout.weights_dtype=fp8_block"],
            "rollout.weights_dtype: is not examined with a draft model",
        ),
        (
            DRAFT,
            ["schedule.in_flight=keep", "parallel.rollout_ranks=8"],
            "schedule.in_flight: is not examined with a draft model (set it to none or abort",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_change_a_draft_or_its_verification_is_refused(
    options: dict[str, Any], overrides: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(load(options, *overrides), "x.yaml")
    assert problem in str(caught.value)


def test_a_draft_is_accepted() -> None:
    check_config(load({**DRAFT, "speculative_num_steps": 5, "speculative_num_draft_tokens": 6}), "x.yaml")


def test_a_drafts_folder_fits_the_model(tmp_path: Path) -> None:
    model = {"vocab_size": 100, "hidden_size": 64}

    def check(algorithm: str, **draft: Any) -> None:
        if draft:
            (tmp_path / "config.json").write_text(json.dumps(draft))
        options = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(tmp_path)}
        check_draft(load(options).rollout, model)

    with pytest.raises(ConfigError, match=r"has no config\.json that can be read"):
        check("STANDALONE")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"describes no model"):
        check("STANDALONE")
    with pytest.raises(ConfigError, match=r"has no weights"):
        check("STANDALONE", vocab_size=100, hidden_size=32)
    (tmp_path / "model.safetensors").write_bytes(b"")
    check("STANDALONE", vocab_size=100, hidden_size=32)
    with pytest.raises(ConfigError, match=r"vocab_size 99 differs from the model's 100"):
        check("STANDALONE", vocab_size=99)
    with pytest.raises(ConfigError, match=r"hidden_size 32 differs from the model's 64"):
        check("EAGLE", vocab_size=100, hidden_size=32)
    check("EAGLE3", vocab_size=10, hidden_size=32, target_hidden_size=64)


def test_a_drafts_bytes(tmp_path: Path) -> None:
    """Weights are its files. A token's cache: two bytes for keys and values of 2 heads of 16 in 3 layers."""
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    rollout = load({**DRAFT, "speculative_draft_model_path": str(tmp_path)}).rollout
    assert draft_bytes(rollout) == (1000, 2 * 3 * 2 * 2 * 16)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"describes no model"):
        draft_bytes(rollout)
    assert draft_bytes(load({}).rollout) == draft_bytes(load(DRAFT).rollout) == (0, 0)
