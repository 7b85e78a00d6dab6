"""Checks before a process group or a GPU is used."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from megarl.config.check import check_config, evaluation_problems, judge_budget_problems
from megarl.config.engines import ENGINES
from megarl.config.errors import CheckpointError, ConfigError
from megarl.config.files import mark_required, read_json, write_atomic
from megarl.config.schema import JUDGE, Config, JudgeConfig, RewardConfig
from megarl.data.generated import list_entry_verifiers
from megarl.data.prompts import absent_sources, validate_files
from megarl.model.fp8 import check_sizes
from megarl.parallel.launch import count_local_ranks, without_tokenizer_threads
from megarl.parallel.layout import Layout
from megarl.parallel.machine import (
    attention_problem,
    broken_transformer_engine,
    cudnn_problem,
    get_version,
    measure_usable_memory,
    muon_problem,
    transformer_engine_problem,
)
from megarl.parallel.runtime import choose_device, is_launched, launched_world, layout_for, shares_gpus
from megarl.plan.fit import find_cpu_problem, find_cpu_warning, find_problem
from megarl.plan.inputs import PlanInputs, make_plan_inputs
from megarl.rewards import VerifierPool
from megarl.rewards.judge import check_judge
from megarl.rewards.pool import Item
from megarl.rewards.sandbox import probe
from megarl.rewards.verdict import Reference, Verdict, get_term, get_verifier, reference_to_verdict
from megarl.rollout.engines.base import load_engine_class
from megarl.rollout.episode import load_prompt_options, load_runner
from megarl.schedule.rollouts import check_pretraining_rollouts
from megarl.schedule.tokenizer_checks import (
    ModelDescription,
    check_same_tokenizer,
    check_tokenizer,
    check_vocabulary,
    prefix_errors,
)
from megarl.sync.plan import engine_targets
from megarl.training.checkpoint import check_continues, find_checkpoint, has_finished, list_fixed_settings
from megarl.weights.families import get_family, read_config
from megarl.weights.hf import ModelFolder
from megarl.weights.megatron import open_model
from megarl.weights.shards import (
    check_frozen,
    check_layout,
    check_linear,
    check_lora,
    check_muon,
    check_recomputed,
)
from megarl.weights.tensor_files import carried_files

SETTINGS = "settings.json"
PACKAGES = (
    *("megarl", "torch", "megatron-core", "transformers", "transformer-engine", "sglang"),
    *("numpy", "math-verify", "reasoning-gym"),
)


def preflight(config: Config, where: str, world: int | None = None, *, replay: bool = False) -> list[str]:
    """Check all that a training run needs except its folder (`claim_run_dir`); return warnings.

    world: number of ranks; None: as launched, or to be launched here. replay: without engine and prompts.
    Raises ConfigError, CheckpointError and DataError."""
    check_config(config, where)
    device = choose_device(config.parallel.device)
    _check_machine(config, device.type, world, replay=replay)
    layout = layout_for(config.parallel, _count_ranks(config, world))
    folder = check_model(config.model.path, "model.path", config)
    tokenizer = check_tokenizer(config, folder)
    critic = _check_other_models(config, where, tokenizer)
    _check_training(config, where, layout, tokenizer, folder, critic or folder)
    if config.has_engine:
        _check_positions(config, where, folder)
        _check_self_teacher(config, where, folder)
    if config.has_engine and not replay:
        _check_engine_layout(config, folder.config, device, world)
        engines = (config.parallel.rollout_ranks or _count_ranks(config, world)) // config.rollout.engine_tp
        for problem in judge_budget_problems(config, engines):
            raise ConfigError(f"{where}: {problem}")
        get_verifier(config.reward.verifier)
        load_runner(config, tokenizer)
        for name, term in config.reward.terms.items():
            get_term(name, term.function, term.arguments)
    memory_warning = _check_memory(config, where, folder, device, world, replay=replay)
    if config.has_engine and replay:
        return [memory_warning] if memory_warning else []
    response_key = config.supervised.response_key if not config.has_engine else None
    with without_tokenizer_threads():
        tools = load_prompt_options(config, tokenizer)["tools"]
        references = validate_files(config.data, response_key, tokenizer, tools)
    for source in absent_sources(config.data, config.teacher.by_source):
        problem = "no row of data.train has this data_source, whose teacher would not be used"
        raise ConfigError(f"{where}: teacher.by_source.{source}: {problem} (correct the name, or remove it)")
    sandbox_warning = None
    if config.has_engine:
        if config.reward.judge.url is not None:
            check_judge_answers(config.reward.judge, references)
        check_verifier(config.reward, references, list_entry_verifiers(config.data))
        sandbox_warning = _sandbox_warning()
    check_pretraining_rollouts(config)
    engine_note = load_engine_class(config).machine_note(device.type) if config.has_engine else None
    return [line for line in (memory_warning, engine_note, sandbox_warning) if line]


def _check_other_models(config: Config, where: str, tokenizer: Any) -> ModelFolder | None:
    """Check all models but the actor; return the critic's folder."""
    critic = None
    if config.critic.path and config.has_critic:
        critic = check_model(config.critic.path, "critic.path", config, critic=True)
        check_vocabulary(critic, "critic.path", tokenizer)
        _check_positions(config, where, critic)
    folders = {key: check_model(path, key, config) for key, path in config.teacher.folders.items()}
    if config.has_reward_model and config.reward.model.path is not None:
        key = "reward.model.path"
        scorer = check_model(config.reward.model.path, key, config, critic=True)
        if scorer.missing:
            requirement = "a reward model is a sequence classifier with one label"
            raise CheckpointError(f"{key}: {scorer.path}: has no {', '.join(scorer.missing)} ({requirement})")
        folders = {key: scorer, **folders}
    for key, folder in folders.items():
        check_vocabulary(folder, key, tokenizer)
        check_same_tokenizer(folder.path, key, tokenizer)
        _check_positions(config, where, folder)
    return critic


def _check_training(
    config: Config, where: str, layout: Layout, tokenizer: Any, folder: ModelFolder, critic: ModelFolder
) -> None:
    top_k = {"teacher.top_k": config.teacher.top_k, "algorithm.dppo.top_k": config.algorithm.dppo.top_k}
    for key, k in top_k.items():
        if k and k > len(tokenizer):
            what = f"{k} is more than the {len(tokenizer)} tokens that there are (lower it)"
            raise ConfigError(f"{where}: {key}: {what}")
    expert_options = {
        "rollout.routing_replay": config.rollout.routing_replay,
        "model.grouped_experts": config.model.grouped_experts,
        "model.permute_fusion": config.model.permute_fusion,
    }
    for key, enabled in expert_options.items():
        if enabled and not get_family(folder.config).is_moe:
            problem = f"a {folder.config.get('model_type')} model has no experts"
            raise ConfigError(f"{key}: {problem} (set it to false)")
    check_recomputed(folder.config, config.model)
    models = [("actor", folder.config, config.actor)]
    models += [("critic", critic.config, config.critic)] if config.has_critic else []
    for name, hf_config, optimizer in models:
        check_frozen(hf_config, optimizer, name)
        check_lora(hf_config, optimizer.lora, name)
        check_muon(hf_config, optimizer, layout, name)


def _check_memory(
    config: Config, where: str, folder: ModelFolder, device: torch.device, world: int | None, *, replay: bool
) -> str | None:
    num_ranks = _count_ranks(config, world)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        plan = make_plan_inputs(config, folder.config, world=num_ranks, memory=memory, replay=replay)
        check_fits(plan, where)
        return None
    if world is not None or is_launched():
        return None
    plan = make_plan_inputs(config, folder.config, world=num_ranks, cpu=True, replay=replay)
    return check_fits(plan, where, measure_usable_memory(), psutil.virtual_memory().available)


def _count_ranks(config: Config, world: int | None) -> int:
    return world or (launched_world() if is_launched() else count_local_ranks(config.parallel))


def _sandbox_warning() -> str | None:
    _, protection = probe()
    targets = ", ".join(name for name, is_enforced in protection.items() if not is_enforced)
    if not targets:
        return None
    return f"the sandbox of verifiers and tools is weak here: they may reach {targets} (megarl doctor)"


def check_fits(
    plan: PlanInputs, where: str, memory: float | None = None, free: float | None = None
) -> str | None:
    """Return a warning if memory is scarce. Raises ConfigError if it does not suffice."""
    problem = find_problem(plan) if memory is None else find_cpu_problem(plan, memory)
    if problem:
        raise ConfigError(f"{where}: {problem}")
    return None if memory is None else find_cpu_warning(plan, memory, free)


def preflight_evaluation(
    config: Config, where: str, key: str = "model.path", *, weights: bool = True
) -> None:
    """Check the inputs of `megarl eval`. weights: model.path must have them."""
    if not config.data.eval:
        raise ConfigError(f"{where}: data.eval: must name at least one file to evaluate on")
    for problem in evaluation_problems(config):
        raise ConfigError(f"{where}: {problem}")
    device = choose_device(config.parallel.device)
    _check_machine(config, device.type)
    folder: ModelFolder | ModelDescription
    if weights:
        folder = _open_folder(config.model.path, key)
    else:
        folder = ModelDescription(config.model.path, read_config(config.model.path))
    _check_layout(config, folder, key)
    tokenizer = check_tokenizer(config, folder, key)
    _check_positions(config, where, folder)
    _check_engine_layout(config, folder.config, device)
    get_verifier(config.reward.verifier)
    load_runner(config, tokenizer)
    with without_tokenizer_threads():
        eval_data = config.data.model_copy(update={"train": ()})
        tools = load_prompt_options(config, tokenizer)["tools"]
        references = validate_files(eval_data, tokenizer=tokenizer, tools=tools)
    if config.reward.verifier == JUDGE:
        check_judge_answers(config.reward.judge, references)
    check_verifier(
        config.reward.model_copy(update={"terms": {}}), references, list_entry_verifiers(eval_data)
    )


def check_model(path: Path, key: str, config: Config, *, critic: bool = False) -> ModelFolder:
    """Read a folder's headers and check its sizes against the layout."""
    folder = _open_folder(path, key, critic=critic)
    with prefix_errors(key):
        carried_files(path)  # exports copy them
    _check_layout(config, folder, key)
    check_sizes(config, folder.config, key)
    return folder


def _open_folder(path: Path, key: str, *, critic: bool = False) -> ModelFolder:
    if not path.is_dir():
        what = "not a folder" if path.exists() else "no such folder"
        requirement = "it must be a Hugging Face folder: config.json, *.safetensors, tokenizer.json"
        raise CheckpointError(f"{key}: {path}: {what} ({requirement})")
    with prefix_errors(key):
        return open_model(path, critic=critic)


def _check_layout(config: Config, folder: ModelFolder | ModelDescription, key: str) -> None:
    from megarl.model.hf_config import check_buildable  # imports transformers, which takes seconds

    sizes = config.parallel
    check_layout(folder.config, sizes.tp, sizes.pp, sizes.ep, sizes.vpp)
    check_linear(folder.config, config)
    with prefix_errors(key):
        check_buildable(folder.path)


def check_judge_answers(judge: JudgeConfig, references: Sequence[str | Reference]) -> None:
    """Ask the judge about a made-up response. Raises ConfigError."""
    answers = [reference if isinstance(reference, str) else reference.answer for reference in references[:1]]
    check_judge(judge, [("What is the answer?", answer, f"The answer is {answer}.") for answer in answers])


def check_verifier(
    reward: RewardConfig, references: Sequence[str | Reference], entry_verifiers: Sequence[str] = ()
) -> None:
    """Test verifier and reward terms on a made-up response per reference (one per data file or task)."""
    if reward.verifier == JUDGE:  # terms get a verdict as a run's do
        verdict = Verdict(True, score=1.0)
        references = [r if isinstance(r, Reference) else reference_to_verdict(r, verdict) for r in references]
    if not reward.terms and reward.verifier in ("dapo", JUDGE):
        references = [reference for reference in references if isinstance(reference, Reference)]
    if not references:
        return
    answers = [reference if isinstance(reference, str) else reference.answer for reference in references]
    items: list[Item] = []
    for reference, answer in zip(references, answers, strict=True):
        response = f"It is \\boxed{{{answer}}}.\n\nAnswer: {answer}\n\n<answer>{answer}</answer>"
        items.append((response, reference, len(response), 2 * len(response), False))
    limits = 1, reward.timeout, reward.memory
    with VerifierPool(reward.verifier, *limits, reward.terms, entry_verifiers, reward.sandbox) as pool:
        verdicts = pool.verify(items)
    for reference, answer, verdict in zip(references, answers, verdicts, strict=True):
        is_wrong = not verdict.correct and reward.verifier == "math" and isinstance(reference, str)
        problem = verdict.error or ("it is found wrong" if is_wrong else None)
        if not problem:
            continue
        example = f"a made-up response that gives the reference answer {answer[:60]!r}"
        if problem.startswith("reward.terms."):
            key, _, what = problem.partition(": ")
            requirement = (
                "called with a megarl.rewards.GradedResponse and its arguments, it must return a number"
            )
            raise ConfigError(f"{key}: fails on {example}: {what} ({requirement})")
        if isinstance(reference, Reference):
            task = json.loads(reference.entry)["task"]
            raise ConfigError(f"data: reasoning-gym's scorer of {task} fails on {example}: {problem}")
        raise ConfigError(
            f"reward.verifier: {reward.verifier} fails on {example}: {problem} "
            "(it is called with the response and the reference answer, "
            "and must return a bool, a number or a Verdict)"
        )


def _check_machine(config: Config, device: str, world: int | None = None, *, replay: bool = False) -> None:
    if world or is_launched():
        layout_for(config.parallel, world or launched_world())
    if broken := broken_transformer_engine():
        raise ConfigError(broken)
    if not replay:  # after Transformer Engine, which an engine's file may import
        entry = ENGINES[config.rollout.engine]
        if entry.package and not find_spec(entry.package):
            remedy = f"{entry.install}, or use transformers"
            raise ConfigError(f"rollout.engine: {config.rollout.engine} is not installed ({remedy})")
        load_engine_class(config).check_machine(config, device)
    if device == "cuda" and config.model.layers != "portable" and (problem := cudnn_problem()):
        raise ConfigError(problem)
    if problem := attention_problem(config.model.attention):
        raise ConfigError(problem)
    for key, enabled, remedy in (
        ("model.layers: te", config.model.layers == "te", "use auto or portable"),
        ("model.grouped_experts:", config.model.grouped_experts, "set it to false"),
        ("model.fp8.format:", config.model.fp8.format != "none", "set it to none"),
    ):
        if enabled and (problem := transformer_engine_problem(device)):
            raise ConfigError(f"{key} {problem} (make install-gpu, or {remedy})")
    muon_models = [key for key in ("actor", "critic") if getattr(config, key).optimizer == "muon"]
    if muon_models and (problem := muon_problem()):
        remedy = "pip install 'megarl[muon]' on Python 3.12, or set it to adam"
        raise ConfigError(f"{muon_models[0]}.optimizer: muon {problem} ({remedy})")
    for package, is_used in (("tensorboard", config.log.tensorboard), ("wandb", config.log.wandb)):
        if is_used and not replay and not find_spec(package):
            install = "pip install 'megarl[track]', or set it to false"
            raise ConfigError(f"log.{package}: {package} is not installed ({install})")
    num_ranks = count_local_ranks(config.parallel)
    launches = not world and not is_launched() and not shares_gpus()
    if device == "cuda" and launches and num_ranks > torch.cuda.device_count():
        sizes = config.parallel
        raise ConfigError(
            f"parallel: tp {sizes.tp} x pp {sizes.pp} x dp {sizes.dp or 1}"
            f"{f' x cp {sizes.cp}' if sizes.cp > 1 else ''} = {num_ranks} devices, "
            f"but there are {torch.cuda.device_count()} here "
            "(lower one of them, or start megarl with torchrun on several machines)"
        )


def _check_engine_layout(
    config: Config, hf_config: Mapping[str, Any], device: torch.device, world: int | None = None
) -> None:
    tp, is_cpu, is_remote = config.rollout.engine_tp, device.type == "cpu", config.rollout.capabilities.remote
    if not is_cpu and not is_remote and torch.cuda.device_count() % tp:
        devices = f"the {torch.cuda.device_count()} devices of this node"
        raise ConfigError(
            f"rollout.engine_tp: {tp} does not divide {devices} (an engine lies within one node)"
        )
    world, rollout_ranks = _count_ranks(config, world), config.parallel.rollout_ranks
    engine_targets(config, hf_config, world - rollout_ranks, cpu=is_cpu)
    load_engine_class(config).check_engines(config, hf_config, device, (rollout_ranks or world) // tp)


def _check_self_teacher(config: Config, where: str, folder: ModelFolder) -> None:
    """Check that the longest context with a response fits: the actor reads it as its own teacher."""
    positions = config.model.max_positions or folder.config.get("max_position_embeddings")
    context, response = config.teacher.max_context_tokens, config.rollout.max_extent
    if config.has_self_teacher and isinstance(positions, int) and context + response > positions:
        what = f"{context} + {response} tokens exceed the {positions} positions of {folder.path} (lower it)"
        raise ConfigError(f"{where}: teacher.max_context_tokens: {what}")


def _check_positions(config: Config, where: str, folder: ModelFolder | ModelDescription) -> None:
    positions = config.model.max_positions or folder.config.get("max_position_embeddings")
    prompt_tokens, response_tokens = config.data.max_prompt_tokens, config.rollout.max_extent
    if isinstance(positions, int) and prompt_tokens + response_tokens > positions:
        raise ConfigError(
            f"{where}: rollout.max_response_tokens: "
            f"data.max_prompt_tokens {prompt_tokens} + {response_tokens} tokens "
            f"exceed the {positions} positions of {folder.path} (lower one of them)"
        )


def claim_run_dir(config: Config, *, fresh: bool = False) -> None:
    """Create the run's private folder, or check that its run can continue or restart.

    A run killed before its first checkpoint restarts. Raises ConfigError."""
    run_dir = config.run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe_file = run_dir / f".writable-{os.getpid()}"
        probe_file.touch()
        probe_file.unlink()
    except OSError as error:
        raise ConfigError(
            f"run_dir: {run_dir}: cannot be written: {error.strerror} (choose another folder)"
        ) from None
    checkpoint, skipped = find_checkpoint(run_dir)
    has_records = (run_dir / "metrics.jsonl").exists()
    if fresh and (has_records or checkpoint is not None):
        problem = "already holds a run, which --fresh never overwrites"
        raise ConfigError(f"run_dir: {run_dir}: {problem} (choose another folder, or delete it)")
    if checkpoint is not None:
        check_continues(config, checkpoint)
    elif has_records:
        # A restart overwrites equal records.
        if has_finished(run_dir) or not config.checkpoint.every or not (run_dir / SETTINGS).is_file():
            problem = "already holds a run, and no complete checkpoint to continue it from"
            details = "".join(f"; {line}" for line in skipped)
            raise ConfigError(
                f"run_dir: {run_dir}: {problem} (choose another folder, or delete this one){details}"
            )
        recorded_settings = read_json(run_dir / SETTINGS)
        for key, value in list_fixed_settings(config).items():
            if key in recorded_settings and recorded_settings[key] != value:
                difference = f"is {value!r}, the run in {run_dir} has {recorded_settings[key]!r}"
                raise ConfigError(f"{key}: {difference} (set it back, or choose another run_dir)")
    with mark_required(run_dir / SETTINGS):  # atomic: a partial file would prevent a restart
        write_atomic(run_dir / SETTINGS, json.dumps(list_fixed_settings(config), indent=1) + "\n")


def versions() -> dict[str, str]:
    return {name: version for name in PACKAGES if (version := get_version(name))}
