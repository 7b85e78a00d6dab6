"""Draft models of SGLang's speculative decoding, as `rollout.engine_options` name them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema import Config, RolloutConfig

PREFIX = "speculative_"
ALGORITHM, FOLDER = "speculative_algorithm", "speculative_draft_model_path"
ALGORITHMS = ("STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
STEPS = 3  # SGLang's for a chain
# Options that would verify a draft otherwise than by megarl's sampler, or change the draft during a run.
_FOREIGN = (
    "speculative_use_rejection_sampling",
    "speculative_use_block_verification",
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
    "speculative_adaptive",
)


def has_draft(rollout: RolloutConfig) -> bool:
    return ALGORITHM in rollout.engine_options


def count_steps(rollout: RolloutConfig) -> int:
    """Return the tokens of a draft."""
    steps = rollout.engine_options.get("speculative_num_steps", STEPS)
    assert isinstance(steps, int)  # draft_problems has checked it
    return steps


def draft_problems(c: Config) -> Iterator[str]:
    """Yield what megarl's verification of drafts does not allow, or has not been examined with it."""
    options, key = c.rollout.engine_options, "rollout.engine_options"
    if not has_draft(c.rollout):
        if names := sorted(name for name in options if name.startswith(PREFIX)):
            yield f"{key}: {names[0]}: has no effect without {ALGORITHM} (set it, or leave this out)"
        return
    algorithm = options[ALGORITHM]
    if c.rollout.engine == "transformers":
        yield f"{key}: {ALGORITHM}: has no effect with rollout.engine transformers (leave it out)"
        return
    if algorithm not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        yield f"{key}: {ALGORITHM}: {algorithm} is not one of {known} (use one, or leave it out)"
    if FOLDER not in options:
        yield f"{key}: {FOLDER}: {algorithm} needs a draft model (name its folder)"
    for name in _FOREIGN:
        if name in options:
            yield f"{key}: {name}: megarl's sampler verifies drafts (leave it out)"
    steps = options.get("speculative_num_steps", STEPS)
    if type(steps) is not int or steps < 1:
        yield f"{key}: speculative_num_steps: must be a whole number from 1 (got {steps!r})"
        return
    expected: dict[str, tuple[Any, str]] = {
        "speculative_eagle_topk": (1, "drafts are chains"),
        "speculative_num_draft_tokens": (steps + 1, "a chain has one token more than steps"),
        "speculative_draft_load_format": ("auto", "weight transfers leave the draft alone"),
        "enable_draft_weights_cpu_backup": (True, "else the draft is lost when the engine sleeps"),
        "enable_deterministic_inference": (
            False,
            "a verification's logits differ by rounding from a token's",
        ),
    }
    for name, (value, reason) in expected.items():
        if options.get(name, value) != value:
            yield f"{key}: {name}: must be {json.dumps(value)} with a draft model: {reason} (leave it out)"
    for name, is_used, other in (
        ("rollout.routing_replay", c.rollout.routing_replay, "false"),
        ("rollout.weights_dtype", c.rollout.weights_dtype != "model", "model"),
        ("schedule.in_flight", c.schedule.in_flight in ("keep", "retract"), "none or abort"),
    ):
        if is_used:
            yield f"{name}: is not examined with a draft model (set it to {other}, or remove {ALGORITHM})"


def check_draft(rollout: RolloutConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the draft's folder fits the model. hf_config: the model's config.json"""
    folder, key = Path(str(rollout.engine_options[FOLDER])), f"rollout.engine_options: {FOLDER}"
    draft = _read_draft(folder)
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"{key}: {folder} has no weights (*.safetensors)")
    # The heads of EAGLE and of multi-token prediction read the model's hidden states.
    is_standalone = rollout.engine_options[ALGORITHM] == "STANDALONE"
    name = "vocab_size" if is_standalone else "hidden_size"
    size = draft.get("target_hidden_size", draft.get(name)) if not is_standalone else draft.get(name)
    if size != hf_config[name]:
        problem = f"{name} {size} differs from the model's {hf_config[name]} (choose a draft of this model)"
        raise ConfigError(f"{key}: {folder}: {problem}")


def _read_draft(folder: Path, *required: str) -> dict[str, Any]:
    """Return a draft's config.json. Raises ConfigError, also without a required key."""
    key = f"rollout.engine_options: {FOLDER}"
    try:
        draft = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {folder} has no config.json that can be read ({error})") from None
    if not isinstance(draft, dict) or not draft.keys() >= set(required):
        raise ConfigError(f"{key}: {folder}: config.json describes no model (choose another folder)")
    return draft


def draft_bytes(rollout: RolloutConfig) -> tuple[int, int]:
    """Return the bytes of a draft's weights, and of its KV cache for a token; 0 if its folder is not here."""
    folder = Path(str(rollout.engine_options.get(FOLDER, "")))
    if not has_draft(rollout) or not (folder / "config.json").is_file():
        return 0, 0
    config = _read_draft(folder, "num_attention_heads", "num_hidden_layers", "hidden_size")
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    width = 2 * config.get("num_key_value_heads", heads) * head_size
    layers = config.get("num_nextn_predict_layers") or config["num_hidden_layers"]
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")), 2 * layers * width
