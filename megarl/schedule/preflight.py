"""Checks before a process group or a GPU is taken: each raises one line that names the key or the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from megarl.config.check import check_config, evaluation_problems
from megarl.config.engines import ENGINES
from megarl.config.errors import CheckpointError, ConfigError, MegarlError, first_line
from megarl.config.files import essential, read_json, write_whole
from megarl.config.schema import Config, RewardConfig
from megarl.data.chat_template import render_chat
from megarl.data.generated import own_verifiers
from megarl.data.limits import memory_limit
from megarl.data.prompts import absent_sources, validate_files
from megarl.model.fp8 import check_sizes
from megarl.parallel.launch import ranks_here, without_tokenizer_threads
from megarl.parallel.machine import (
    attention_problem,
    broken_transformer_engine,
    cudnn_problem,
    memory_here,
    muon_problem,
    transformer_engine_problem,
    version_of,
)
from megarl.parallel.runtime import choose_device, is_launched, launched_world, layout_for
from megarl.plan.fit import find_cpu_problem, find_cpu_warning, find_problem
from megarl.plan.inputs import PlanInputs, make_plan_inputs
from megarl.rewards import VerifierPool
from megarl.rewards.pool import Item
from megarl.rewards.sandbox import probe
from megarl.rewards.verdict import Reference, get_term, get_verifier
from megarl.rollout.engines.base import load_engine_class
from megarl.rollout.episode import load_prompt_options, load_runner
from megarl.schedule.rollouts import check_pretraining_rollouts
from megarl.sync.plan import engine_targets
from megarl.training.checkpoint import check_continues, find_checkpoint, has_finished, settings_of
from megarl.weights.families import family_of, read_config
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

# JSON files of a tokenizer, and one for engines, which an export contains too.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "generation_config.json",
)
# In run_dir: the settings that decide the result, written before the first checkpoint.
SETTINGS = "settings.json"
# The packages that the result depends on.
PACKAGES = (
    *("megarl", "torch", "megatron-core", "transformers", "transformer-engine", "sglang"),
    *("numpy", "math-verify", "reasoning-gym"),
)


class Described(NamedTuple):
    """A folder that describes a model whose weights are elsewhere. config: its config.json."""

    path: Path
    config: dict[str, Any]


def preflight(config: Config, where: str, world: int | None = None, *, replay: bool = False) -> list[str]:
    """Check everything that a training run needs except its folder (`claim_run_dir`). Return lines that a
    user should see.

    where: names the configuration in errors; world: ranks of the job; None: those that were launched, or
    would be launched here; replay: a step is done again from its rollout on disk, which needs nothing of what
    draws responses: no engine, tools, verifier or prompts. Raises ConfigError, CheckpointError and
    DataError."""
    check_config(config, where)
    device = choose_device(config.parallel.device)
    _check_machine(config, device.type, world, replay=replay)
    alone = world is None and not is_launched()  # all ranks will be on this machine
    world = world or (launched_world() if is_launched() else ranks_here(config.parallel))
    layout = layout_for(config.parallel, world)
    folder = check_model(config.model.path, "model.path", config)
    tokenizer = check_tokenizer(config, folder)
    critic = None
    if config.critic.path and config.has_critic:
        critic = check_model(config.critic.path, "critic.path", config, critic=True)
        _check_vocabulary(critic, "critic.path", tokenizer)
        _check_positions(config, where, critic)
    if config.has_reward_model and config.reward.model.path is not None:
        key = "reward.model.path"
        scorer = check_model(config.reward.model.path, key, config, critic=True)
        if scorer.missing:
            wanted = "a reward model is a sequence classifier of one label"
            raise CheckpointError(f"{key}: {scorer.path}: has no {', '.join(scorer.missing)} ({wanted})")
        _check_vocabulary(scorer, key, tokenizer)
        _check_same_tokenizer(scorer.path, key, tokenizer)
        _check_positions(config, where, scorer)
    for key, path in config.teacher.folders.items():
        teacher = check_model(path, key, config)
        _check_vocabulary(teacher, key, tokenizer)
        _check_same_tokenizer(teacher.path, key, tokenizer)
        _check_positions(config, where, teacher)
    of_top_k = {"teacher.top_k": config.teacher.top_k, "algorithm.dppo.top_k": config.algorithm.dppo.top_k}
    for key, k in of_top_k.items():
        if k and k > len(tokenizer):
            what = f"{k} is more than the {len(tokenizer)} tokens that there are (lower it)"
            raise ConfigError(f"{where}: {key}: {what}")
    of_mixtures = {
        "rollout.routing_replay": config.rollout.routing_replay,
        "model.grouped_experts": config.model.grouped_experts,
        "model.permute_fusion": config.model.permute_fusion,
    }
    for name in (name for name, on in of_mixtures.items() if on and not family_of(folder.config).is_moe):
        kind = f"a {folder.config.get('model_type')} model has no experts"
        raise ConfigError(f"{name}: {kind} (set it to false)")
    check_recomputed(folder.config, config.model)
    check_frozen(folder.config, config.actor, "actor")
    check_lora(folder.config, config.actor.lora, "actor")
    check_muon(folder.config, config.actor, layout, "actor")
    if config.has_critic:
        check_frozen((critic or folder).config, config.critic, "critic")
        check_lora((critic or folder).config, config.critic.lora, "critic")
        check_muon((critic or folder).config, config.critic, layout, "critic")
    if config.has_engine:
        _check_positions(config, where, folder)
    if config.has_engine and not replay:
        _check_engine_layout(config, folder.config, device, world)
        get_verifier(config.reward.verifier)
        load_runner(config, tokenizer)
        for name, term in config.reward.terms.items():
            get_term(name, term.function, term.arguments)
    near = None
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        check_fits(make_plan_inputs(config, folder.config, world=world, memory=memory, replay=replay), where)
    elif alone:
        free = psutil.virtual_memory().available
        plan = make_plan_inputs(config, folder.config, world=world, cpu=True, replay=replay)
        near = check_fits(plan, where, memory_here(), free)
    if config.has_engine and replay:  # all below concerns what draws
        return [near] if near else []
    response_key = config.supervised.response_key if not config.has_engine else None
    with without_tokenizer_threads():
        tools = load_prompt_options(config, tokenizer)["tools"]
        references = validate_files(config.data, response_key, tokenizer, tools)
    for source in absent_sources(config.data, config.teacher.by_source):
        what = "no row of data.train has this data_source, whose teacher would judge nothing"
        raise ConfigError(f"{where}: teacher.by_source.{source}: {what} (mend its name, or leave it out)")
    sandbox = None
    if config.has_engine:
        check_verifier(config.reward, references, own_verifiers(config.data))
        sandbox = sandbox_warning()
    check_pretraining_rollouts(config)
    engine = load_engine_class(config).machine_note(device.type) if config.has_engine else None
    return [line for line in (near, engine, sandbox) if line]


def sandbox_warning() -> str | None:
    """Return a line where this machine cannot confine verifiers and tools as they are to be."""
    _, held = probe()
    if all(held.values()):
        return None
    reached = ", ".join(name for name, holds in held.items() if not holds)
    return f"the sandbox of verifiers and tools is weak here: they may reach {reached} (megarl doctor)"


def check_fits(
    plan: PlanInputs, where: str, memory: float | None = None, free: float | None = None
) -> str | None:
    """Raise ConfigError where a run does not fit on its GPUs, or surely not on the CPU of a machine with
    `memory` bytes. Return a warning where it comes near to them, or to those that are `free`."""
    problem = find_problem(plan) if memory is None else find_cpu_problem(plan, memory)
    if problem:
        raise ConfigError(f"{where}: {problem}")
    return None if memory is None else find_cpu_warning(plan, memory, free)


def preflight_evaluation(
    config: Config, where: str, key: str = "model.path", *, weights: bool = True
) -> None:
    """Check what `megarl eval` needs: no training data, no critic. Raises as `preflight`.

    key: the key or option that named the model's folder; weights: whether the weights are in it."""
    if not config.data.eval:
        raise ConfigError(f"{where}: data.eval: must name at least one file to evaluate on")
    for problem in evaluation_problems(config):
        raise ConfigError(f"{where}: {problem}")
    device = choose_device(config.parallel.device)
    _check_machine(config, device.type)
    folder: ModelFolder | Described
    if weights:
        folder = _open_folder(config.model.path, key)
    else:
        folder = Described(config.model.path, read_config(config.model.path))
    sizes = config.parallel
    check_layout(folder.config, sizes.tp, sizes.pp, sizes.ep, sizes.vpp)
    check_linear(folder.config, config)
    _check_buildable(folder.path, key)
    tokenizer = check_tokenizer(config, folder, key)
    _check_positions(config, where, folder)
    _check_engine_layout(config, folder.config, device)
    get_verifier(config.reward.verifier)
    load_runner(config, tokenizer)
    with without_tokenizer_threads():
        held_out = config.data.model_copy(update={"train": ()})
        tools = load_prompt_options(config, tokenizer)["tools"]
        references = validate_files(held_out, tokenizer=tokenizer, tools=tools)
    check_verifier(config.reward.model_copy(update={"terms": {}}), references, own_verifiers(held_out))


def check_model(path: Path, key: str, config: Config, *, critic: bool = False) -> ModelFolder:
    """Read a folder's headers, check its sizes against the parallel layout, and return it."""
    folder = _open_folder(path, key, critic=critic)
    with _named(key):
        carried_files(path)  # an export of the run copies them
    sizes = config.parallel
    check_layout(folder.config, sizes.tp, sizes.pp, sizes.ep, sizes.vpp)
    check_sizes(config, folder.config, key)
    check_linear(folder.config, config)
    _check_buildable(folder.path, key)
    return folder


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Put the key in front of what is wrong with its folder."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from None


def _open_folder(path: Path, key: str, *, critic: bool = False) -> ModelFolder:
    if not path.is_dir():
        what = "not a folder" if path.exists() else "no such folder"
        wanted = "it must be a Hugging Face folder: config.json, *.safetensors, tokenizer.json"
        raise CheckpointError(f"{key}: {path}: {what} ({wanted})")
    with _named(key):
        return open_model(path, critic=critic)


def _check_buildable(path: Path, key: str) -> None:
    from megarl.model.hf_config import check_buildable  # transformers, which takes seconds to import

    with _named(key):
        check_buildable(path)


def check_tokenizer(config: Config, folder: ModelFolder | Described, key: str = "model.path") -> Any:
    """Return the tokenizer of the model's folder, after checking that it can encode prompts and responses.
    Raises CheckpointError that names the file at fault, as far as that can be told."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    path = folder.path
    file, template = path / "tokenizer.json", path / "chat_template.jinja"
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CheckpointError(
            f"{key}: {path}: no tokenizer.json (the model's folder must hold its tokenizer)"
        )
    for name in TOKENIZER_FILES:
        with _named(key):
            auto_map = (path / name).is_file() and read_json(path / name).get("auto_map")
        if auto_map:
            what = "auto_map: asks for code that lies in the folder, which is never run (remove the key)"
            raise CheckpointError(f"{key}: {path / name}: {what}")
    tokenizer, problem = _tried(
        lambda: AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    )
    if problem:
        of_file = _tried(lambda: Tokenizer.from_file(str(file)))[1] if file.is_file() else ""
        of_template = _tried(lambda: template.read_text(encoding="utf-8"))[1] if template.is_file() else ""
        blamed = file if of_file else template if of_template else path / "tokenizer_config.json"
        blamed = blamed if blamed.is_file() else path
        raise CheckpointError(f"{key}: {blamed}: its tokenizer cannot be loaded: {of_file or problem}")
    if not isinstance(tokenizer.eos_token_id, int):
        lacks = "its tokenizer has no end-of-sequence token (set eos_token in tokenizer_config.json)"
        raise CheckpointError(f"{key}: {path}: {lacks}")
    if config.data.template == "chat":
        if not tokenizer.chat_template:
            none = "the tokenizer has no chat template"
            raise ConfigError(
                f"data.template: {none} (set data.template=raw, or add one to the model's folder)"
            )
        try:
            example = [{"role": "user", "content": "1 + 1 = ?"}]
            with memory_limit():
                render_chat(tokenizer, example, variables=config.data.chat_template_kwargs)
        except MegarlError:
            raise
        except Exception as error:  # noqa: BLE001 (jinja's errors, and whatever its expressions raise)
            fails = f"the tokenizer's chat template fails: {type(error).__name__}: {error}"
            raise ConfigError(f"data.template: {fails} (mend it, or set data.template=raw)") from None
    _check_vocabulary(folder, key, tokenizer)
    return tokenizer


def _tried(load: Callable[[], Any]) -> tuple[Any, str]:
    """Return (what `load` returns, first line of the error if it fails)."""
    try:
        return load(), ""
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 (tokenizers raises bare Exceptions, and panics)
        return None, first_line(error)


def check_verifier(
    reward: RewardConfig, references: Sequence[str | Reference], own: Sequence[str] = ()
) -> None:
    """Have the verifier judge one made-up response to each of these references of the data (a file's first
    answer, a problem of each task of reasoning-gym), and the terms of the reward look at it, in a process
    with the run's limits.

    What they raise or return wrongly would otherwise be recorded with every answer of the run. For `math` it
    also shows that its libraries fit together; `dapo` needs none. own: as VerifierPool's. Raises
    ConfigError."""
    if not reward.terms and reward.verifier == "dapo":
        references = [one for one in references if isinstance(one, Reference)]
    if not references:
        return
    items: list[Item] = []
    for one in references:
        answer = one if isinstance(one, str) else one.answer
        text = f"It is \\boxed{{{answer}}}.\n\nAnswer: {answer}\n\n<answer>{answer}</answer>"
        items.append((text, one, len(text), 2 * len(text), False))
    limits = 1, reward.timeout, reward.memory
    with VerifierPool(reward.verifier, *limits, reward.terms, own, reward.sandbox) as pool:
        verdicts = pool.verify(items)
    for reference, verdict in zip(references, verdicts, strict=True):
        is_own = isinstance(reference, Reference)
        wrong = not verdict.correct and reward.verifier == "math" and not is_own
        problem = verdict.error or ("it is found wrong" if wrong else None)
        if not problem:
            continue
        answer = reference.answer if isinstance(reference, Reference) else reference
        made_up = f"a made-up response that gives the reference answer {answer[:60]!r}"
        if problem.startswith("reward.terms."):
            key, _, what = problem.partition(": ")
            called = "it is called with a megarl.rewards.Judged and its arguments, and must return a number"
            raise ConfigError(f"{key}: fails on {made_up}: {what} ({called})")
        if isinstance(reference, Reference):
            task = json.loads(reference.entry)["task"]
            raise ConfigError(f"data: reasoning-gym's scorer of {task} fails on {made_up}: {problem}")
        raise ConfigError(
            f"reward.verifier: {reward.verifier} fails on {made_up}: {problem} "
            "(it is called with the response and the reference answer, "
            "and must return a bool, a number or a Verdict)"
        )


def _check_machine(config: Config, device: str, world: int | None = None, *, replay: bool = False) -> None:
    """Check that what the configuration asks for is installed and plugged in. replay: without its engine
    and logs."""
    if world or is_launched():
        layout_for(config.parallel, world or launched_world())
    if broken := broken_transformer_engine():
        raise ConfigError(broken)
    if not replay:  # after Transformer Engine, which an engine's file may import
        _check_engine(config, device)
    if device == "cuda" and config.model.layers != "portable" and (problem := cudnn_problem()):
        raise ConfigError(problem)
    if config.model.layers == "te" and (problem := transformer_engine_problem(device)):
        raise ConfigError(f"model.layers: te {problem} (make install-gpu, or use auto or portable)")
    if problem := attention_problem(config.model.attention):
        raise ConfigError(problem)
    if config.model.grouped_experts and (problem := transformer_engine_problem(device)):
        raise ConfigError(f"model.grouped_experts: {problem} (make install-gpu, or set it to false)")
    if config.model.fp8.format != "none" and (problem := transformer_engine_problem(device)):
        raise ConfigError(f"model.fp8.format: {problem} (make install-gpu, or set it to none)")
    muon = [key for key, of in (("actor", config.actor), ("critic", config.critic)) if of.optimizer == "muon"]
    if muon and (problem := muon_problem()):
        remedy = "pip install 'megarl[muon]' on Python 3.12, or set it to adam"
        raise ConfigError(f"{muon[0]}.optimizer: muon {problem} ({remedy})")
    for package, wanted in (("tensorboard", config.log.tensorboard), ("wandb", config.log.wandb)):
        if wanted and not replay and not find_spec(package):
            install = "pip install 'megarl[track]', or set it to false"
            raise ConfigError(f"log.{package}: {package} is not installed ({install})")
    ranks = ranks_here(config.parallel)
    if device == "cuda" and not world and not is_launched() and ranks > torch.cuda.device_count():
        sizes = config.parallel
        raise ConfigError(
            f"parallel: tp {sizes.tp} x pp {sizes.pp} x dp {sizes.dp or 1}"
            f"{f' x cp {sizes.cp}' if sizes.cp > 1 else ''} = {ranks} devices, "
            f"but there are {torch.cuda.device_count()} here "
            "(lower one of them, or start megarl with torchrun on several machines)"
        )


def _check_engine(config: Config, device: str) -> None:
    """Check that the engine is installed, and that this machine can run it."""
    entry = ENGINES[config.rollout.engine]
    if entry.package and not find_spec(entry.package):
        remedy = f"{entry.install}, or use transformers"
        raise ConfigError(f"rollout.engine: {config.rollout.engine} is not installed ({remedy})")
    load_engine_class(config).check_machine(config, device)


def _check_engine_layout(
    config: Config, hf_config: Mapping[str, Any], device: torch.device, world: int | None = None
) -> None:
    """Check that the engines divide the ranks and the model, and that each lies within a node."""
    tp, cpu, remote = config.rollout.engine_tp, device.type == "cpu", config.rollout.capabilities.remote
    if not cpu and not remote and torch.cuda.device_count() % tp:
        devices = f"the {torch.cuda.device_count()} devices of this node"
        raise ConfigError(
            f"rollout.engine_tp: {tp} does not divide {devices} (an engine lies within one node)"
        )
    world = world or (launched_world() if is_launched() else ranks_here(config.parallel))
    apart = config.parallel.rollout_ranks
    engine_targets(config, hf_config, world - apart, cpu=cpu)
    load_engine_class(config).check_engines(config, hf_config, device, (apart or world) // tp)


def _check_vocabulary(folder: ModelFolder | Described, key: str, tokenizer: Any) -> None:
    vocabulary = folder.config["vocab_size"]
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= vocabulary >= len(tokenizer):
        where = f"{key}: {folder.path}/tokenizer.json"
        raise CheckpointError(
            f"{where}: has a token of id {highest}, but config.json's vocab_size is {vocabulary}"
        )
    if len(tokenizer) > vocabulary:
        tokens = f"the {len(tokenizer)} tokens of the actor's tokenizer"
        raise CheckpointError(
            f"{key}: {folder.path}: its vocabulary of {vocabulary} does not hold {tokens} "
            "(they belong to different models)"
        )


def _check_same_tokenizer(path: Path, key: str, tokenizer: Any) -> None:
    """Check that the model in `path` was made for the actor's tokens: each has the same id there, and text is
    cut in the same way. It may have more of them, such as one for padding."""
    from transformers import AutoTokenizer

    theirs, problem = _tried(
        lambda: AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    )
    if problem:
        raise CheckpointError(f"{key}: {path}: its tokenizer cannot be loaded: {problem}")
    own, other, different = tokenizer.get_vocab(), theirs.get_vocab(), []
    for token, number in sorted(own.items(), key=itemgetter(1)):
        if other.get(token) != number:
            there = f"number {other[token]}" if token in other else "missing"
            different.append(f"{token!r}, token {number} of the actor, is {there} there")
            break
    else:
        pair = [json.loads(one.backend_tokenizer.to_str()) for one in (tokenizer, theirs)]
        special = [{t["content"] for t in one["added_tokens"] if t["special"]} & own.keys() for one in pair]
        parts = {
            "merges differ": [one["model"].get("merges") for one in pair],
            "special tokens differ": special,
            "normalisation differs": [one["normalizer"] for one in pair],
            "pre-tokenisation differs": [one["pre_tokenizer"] for one in pair],
        }
        different += [f"their {what}" for what, (mine, its) in parts.items() if mine != its]
    if different:
        remedy = "it is given the actor's tokens: choose one that was trained from the same family"
        raise CheckpointError(f"{key}: {path}: its tokenizer is not the actor's: {different[0]} ({remedy})")


def _check_positions(config: Config, where: str, folder: ModelFolder | Described) -> None:
    positions = config.model.max_positions or folder.config.get("max_position_embeddings")
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_extent
    if isinstance(positions, int) and prompt + response > positions:
        raise ConfigError(
            f"{where}: rollout.max_response_tokens: data.max_prompt_tokens {prompt} + {response} tokens "
            f"exceed the {positions} positions of {folder.path} (lower one of them)"
        )


def claim_run_dir(config: Config, *, fresh: bool = False) -> None:
    """Create the run's folder, private to the user. One with a complete checkpoint is continued; one whose
    run was ended before its first checkpoint is begun again.

    Raises ConfigError where it cannot be written, where it holds a run that can neither be continued nor
    begun again or one with other settings, and, with `fresh`, where it holds any run."""
    run_dir = config.run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = run_dir / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"run_dir: {run_dir}: cannot be written: {error.strerror} (choose another folder)"
        ) from None
    checkpoint, skipped = find_checkpoint(run_dir)
    begun = (run_dir / "metrics.jsonl").exists()
    if fresh and (begun or checkpoint is not None):
        holds = "already holds a run, which --fresh never overwrites"
        raise ConfigError(f"run_dir: {run_dir}: {holds} (choose another folder, or delete it)")
    if checkpoint is not None:
        check_continues(config, checkpoint)
    elif begun:
        # What was recorded is written again, the same, and no more than what lies between two checkpoints.
        if has_finished(run_dir) or not config.checkpoint.every or not (run_dir / SETTINGS).is_file():
            holds = "already holds a run, and no complete checkpoint to continue it from"
            details = "".join(f"; {line}" for line in skipped)
            raise ConfigError(
                f"run_dir: {run_dir}: {holds} (choose another folder, or delete this one){details}"
            )
        then = read_json(run_dir / SETTINGS)
        for key, value in settings_of(config).items():
            if key in then and then[key] != value:
                differs = f"is {value!r}, the run in {run_dir} has {then[key]!r}"
                raise ConfigError(f"{key}: {differs} (set it back, or choose another run_dir)")
    with essential(run_dir / SETTINGS):  # whole or not at all: what is half there could not be begun again
        write_whole(run_dir / SETTINGS, json.dumps(settings_of(config), indent=1) + "\n")


def versions() -> dict[str, str]:
    """Return name and version of the packages that the result depends on."""
    return {name: version for name in PACKAGES if (version := version_of(name))}
