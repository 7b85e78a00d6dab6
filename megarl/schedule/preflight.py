"""What can be known before a process group or a GPU is taken: every check raises one line that names the key or the file."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.config.check import check_config
from megarl.config.errors import CheckpointError, ConfigError
from megarl.config.files import read_json
from megarl.config.schema import Config
from megarl.data.reader import validate_files
from megarl.model.fp8 import check_sizes
from megarl.parallel.launch import ranks_here
from megarl.parallel.machine import broken_transformer_engine, transformer_engine_problem, unmet
from megarl.parallel.runtime import choose_device, is_launched, launched_world, layout_for
from megarl.plan.checks import check_fits
from megarl.rewards.registry import get_verifier
from megarl.schedule.kept_rollouts import check_kept
from megarl.training.checkpoint import check_continues, find_checkpoint, has_finished, settings_of
from megarl.weights.engine_plan import engine_targets
from megarl.weights.hf_io import ModelFolder, read_config
from megarl.weights.layout import check_layout
from megarl.weights.megatron_folder import open_model

SETTINGS = "settings.json"  # in run_dir: what decides the result, from before the first checkpoint


class Described(NamedTuple):
    """The folder of a model whose weights are elsewhere. config: its config.json."""

    path: Path
    config: dict[str, Any]


def preflight(config: Config, where: str, world: int | None = None) -> None:
    """Everything that a training run needs but its folder, which only `claim_run_dir` touches. world: ranks that the job is to have;
    null: those that were launched, or would be launched here."""
    check_config(config, where)
    device = choose_device(config.parallel.device)
    _check_machine(config, device.type, world)
    folder = check_model(config.model.path, "model.path", config)
    tokenizer = check_tokenizer(config, folder)
    critic = None
    if config.critic.path and config.has_critic:
        critic = check_model(config.critic.path, "critic.path", config, critic=True)
        _check_vocabulary(critic, "critic.path", tokenizer)
        _check_positions(config, where, critic)
    if config.recipe != "sft":
        _check_positions(config, where, folder)
        _check_engine_layout(config, folder.config, device, world)
        get_verifier(config.reward.verifier)
    if device.type == "cuda":
        there = world or (launched_world() if is_launched() else ranks_here(config.parallel))
        memory = torch.cuda.get_device_properties(device).total_memory
        check_fits(config, where, folder.config, critic.config if critic else None, there, memory)
    validate_files(config.data, config.supervised.response_key if config.recipe == "sft" else None)
    check_kept(config)


def preflight_evaluation(config: Config, where: str, key: str = "model.path", *, weights: bool = True) -> None:
    """What `megarl eval` needs, which is less: no training data, no critic. `key`: what named the model's folder; weights: whether
    the model's weights are to be in it, and not in a checkpoint."""
    if not config.data.eval:
        raise ConfigError(f"{where}: data.eval: must name at least one file to evaluate on")
    _check_machine(config, choose_device(config.parallel.device).type)
    folder = _open_folder(config.model.path, key) if weights else Described(config.model.path, read_config(config.model.path))
    check_layout(folder.config, config.parallel.tp, config.parallel.pp, config.parallel.ep)
    check_tokenizer(config, folder, key)
    _check_positions(config, where, folder)
    _check_engine_layout(config, folder.config, choose_device(config.parallel.device))
    get_verifier(config.reward.verifier)
    validate_files(config.data.model_copy(update={"train": ()}))


def check_model(path: Path, key: str, config: Config, *, critic: bool = False) -> ModelFolder:
    """The folder's headers are read and its sizes checked against the parallel layout."""
    folder = _open_folder(path, key, critic=critic)
    check_layout(folder.config, config.parallel.tp, config.parallel.pp, config.parallel.ep)
    check_sizes(config, folder.config, key)
    return folder


def check_tokenizer(config: Config, folder: ModelFolder | Described, key: str = "model.path") -> Any:
    """The tokenizer of the model's folder, found to be one that prompts and responses can go through."""
    if not any((folder.path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CheckpointError(f"{key}: {folder.path}: no tokenizer.json (the model's folder must hold its tokenizer)")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder.path, local_files_only=True)
    except Exception as error:  # noqa: BLE001 (the tokenizers library raises bare Exceptions for damaged files)
        problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{key}: {folder.path}: its tokenizer cannot be loaded: {problem}") from None
    if not isinstance(tokenizer.eos_token_id, int):
        raise CheckpointError(f"{key}: {folder.path}: its tokenizer has no end-of-sequence token (set eos_token in tokenizer_config.json)")
    if config.data.template == "chat":
        _check_template(tokenizer)
    _check_vocabulary(folder, key, tokenizer)
    return tokenizer


def _check_template(tokenizer: Any) -> None:
    from jinja2 import TemplateError  # a dependency of chat templates only

    if not tokenizer.chat_template:
        raise ConfigError("data.template: the tokenizer has no chat template (set data.template=raw, or add one to the model's folder)")
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1 = ?"}], add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise ConfigError(f"data.template: the tokenizer's chat template fails: {error} (mend it, or set data.template=raw)") from None


def _check_machine(config: Config, device: str, world: int | None = None) -> None:
    """What must be installed or plugged in for the keys that ask for it."""
    _check_engine(config, device)
    if world or is_launched():
        layout_for(config.parallel, world or launched_world())
    if broken := broken_transformer_engine():
        raise ConfigError(broken)
    if config.model.layers == "te" and (problem := transformer_engine_problem(device)):
        raise ConfigError(f"model.layers: te {problem} (make install-gpu, or use auto or portable)")
    if config.model.fp8.format != "none" and (problem := transformer_engine_problem(device)):
        raise ConfigError(f"model.fp8.format: {problem} (make install-gpu, or set it to none)")
    for key, wanted, package in (("tensorboard", config.log.tensorboard, "tensorboard"), ("wandb", config.log.wandb, "wandb")):
        if wanted and not find_spec(package):
            raise ConfigError(f"log.{key}: {package} is not installed (pip install 'megarl[track]', or set it to false)")
    ranks = ranks_here(config.parallel)
    if device == "cuda" and not world and not is_launched() and ranks > torch.cuda.device_count():
        raise ConfigError(
            f"parallel: tp {config.parallel.tp} x pp {config.parallel.pp} x dp {config.parallel.dp or 1} = {ranks} devices, but there are "
            f"{torch.cuda.device_count()} here (lower one of them, or start megarl with torchrun on several machines)"
        )


def _check_engine(config: Config, device: str) -> None:
    if config.rollout.engine != "sglang":
        return
    if not find_spec("sglang"):
        raise ConfigError("rollout.engine: sglang is not installed (make install-gpu, or use transformers)")
    for line in unmet("sglang") if device == "cuda" else ():  # on a CPU it does without most of what it asks for
        raise ConfigError(f"rollout.engine: {line}")


def _check_engine_layout(config: Config, hf_config: Mapping[str, Any], device: torch.device, world: int | None = None) -> None:
    """Whether the engines divide the ranks and the model, and each lies within a node."""
    tp, cpu = config.rollout.engine_tp, device.type == "cpu"
    if not cpu and torch.cuda.device_count() % tp:
        raise ConfigError(
            f"rollout.engine_tp: {tp} does not divide the {torch.cuda.device_count()} devices of this node (an engine lies within one node)"
        )
    world = world or (launched_world() if is_launched() else ranks_here(config.parallel))
    engine_targets(config, hf_config, world, cpu=cpu)


def _open_folder(path: Path, key: str, *, critic: bool = False) -> ModelFolder:
    if not path.is_dir():
        what = "not a folder" if path.exists() else "no such folder"
        raise CheckpointError(f"{key}: {path}: {what} (it must be a Hugging Face folder: config.json, *.safetensors, tokenizer.json)")
    try:
        return open_model(path, critic=critic)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from None


def _check_vocabulary(folder: ModelFolder | Described, key: str, tokenizer: Any) -> None:
    vocabulary = folder.config["vocab_size"]
    if len(tokenizer) > vocabulary:
        raise CheckpointError(
            f"{key}: {folder.path}: its vocabulary of {vocabulary} does not hold the {len(tokenizer)} tokens of the actor's tokenizer "
            "(they belong to different models)"
        )


def _check_positions(config: Config, where: str, folder: ModelFolder | Described) -> None:
    positions = config.model.max_positions or folder.config.get("max_position_embeddings")
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if isinstance(positions, int) and prompt + response > positions:
        raise ConfigError(
            f"{where}: rollout.max_response_tokens: data.max_prompt_tokens {prompt} + {response} tokens exceed the {positions} positions "
            f"of {folder.path} (lower one of them)"
        )


def claim_run_dir(config: Config, *, fresh: bool = False) -> None:
    """Creates the run's folder, private to the user; a folder with a complete checkpoint is one to continue in, one of a run that was
    ended before its first checkpoint is one to begin again in. Raises ConfigError where it cannot be written, holds a run without a
    complete checkpoint that cannot be begun again, or one that was started with other settings; with `fresh`, where it holds any."""
    run_dir = config.run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = run_dir / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"run_dir: {run_dir}: cannot be written: {error.strerror} (choose another folder)") from None
    checkpoint, skipped = find_checkpoint(run_dir)
    begun = (run_dir / "metrics.jsonl").exists()
    if fresh and (begun or checkpoint is not None):
        raise ConfigError(f"run_dir: {run_dir}: already holds a run, which --fresh never overwrites (choose another folder, or delete it)")
    if checkpoint is not None:
        check_continues(config, checkpoint)
    elif begun:
        _check_begins_again(config, skipped)
    (run_dir / SETTINGS).write_text(json.dumps(settings_of(config), indent=1) + "\n", encoding="utf-8")


def _check_begins_again(config: Config, skipped: Sequence[str]) -> None:
    """Whether what a run without a complete checkpoint has recorded may be written anew: it would be the same, and no more than what
    lies between two checkpoints, as none was ever finished."""
    run_dir = config.run_dir
    refused = f"run_dir: {run_dir}: already holds a run, and no complete checkpoint to continue it from "
    if has_finished(run_dir) or not config.checkpoint.every or not (run_dir / SETTINGS).is_file():
        raise ConfigError(f"{refused}(choose another folder, or delete this one){''.join(f'; {line}' for line in skipped)}")
    then = read_json(run_dir / SETTINGS)
    for key, value in settings_of(config).items():
        if key in then and then[key] != value:
            raise ConfigError(f"{key}: is {value!r}, the run in {run_dir} has {then[key]!r} (set it back, or choose another run_dir)")


def versions() -> dict[str, str]:
    """Name and version of what the result depends on."""
    names = ("megarl", "torch", "megatron-core", "transformers", "transformer-engine", "sglang", "numpy", "math-verify")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_versions(path: Path) -> None:
    """`versions` as a JSON file."""
    path.write_text(json.dumps(versions(), indent=1) + "\n", encoding="utf-8")
