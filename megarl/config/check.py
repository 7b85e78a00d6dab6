"""Contradictions between keys, found before a process group or a GPU is taken. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema import Config, Section

# What only a run with a critic has, and what only a run that samples has: keys and whole sections.
CRITICS = ("critic", "value_pretraining", "algorithm.whiten", "algorithm.value_clip")
SAMPLED = (
    *CRITICS,
    "rollout.dynamic_sampling",
    "reward.overlong",
    "algorithm.kl_weight",
    "algorithm.mismatch",
    "evaluation.every",
)


# Folders that a run makes in its run_dir, and may replace (metrics, reports and the like are files).
RUN_WRITES = ("checkpoints", "critic_pretrained", "eval", "failed", "heartbeat", "hf", "rollouts", "value_pretraining")


def check_config(config: Config, where: str) -> None:
    """Raises ConfigError `where: key: what is wrong (what to do)` for the first contradiction."""
    for problem in _problems(config):
        raise ConfigError(f"{where}: {problem}")


def _problems(c: Config) -> Iterator[str]:
    a, r = c.algorithm, c.rollout
    if not c.data.train:
        yield "data.train: must name at least one file"
    for key, optimizer in (("actor", c.actor), ("critic", c.critic)):
        if not all(0 <= beta < 1 for beta in optimizer.betas):
            yield f"{key}.betas: both must be in [0, 1) (got {list(optimizer.betas)})"
    yield from _folder_problems(c)
    yield from _fp8_problems(c)
    if c.residency.keep and c.residency.offload is False:
        yield "residency.keep: has no effect with residency.offload false, with which everything stays (leave one of them out)"
    for group in c.residency.keep:
        if not c.has_group(group):
            yield f"residency.keep: {group}: this run has none (leave it out)"
    if c.recipe == "sft":
        if a.nll_weight <= 0:
            yield "algorithm.nll_weight: must be > 0 for recipe sft, which has no other loss"
        yield from (f"{key}: recipe sft learns from given responses and has none of it (leave it out)" for key in _changed(c, SAMPLED))
        return
    if a.advantage == "group" and r.group_size < 2:
        yield f"rollout.group_size: must be >= 2 for group-normalised advantages (got {r.group_size}; or set algorithm.advantage=gae)"
    if r.dynamic_sampling.enabled and r.group_size < 2:
        yield f"rollout.dynamic_sampling.enabled: needs rollout.group_size >= 2 (got {r.group_size}): one response is never mixed"
    if a.lambda_policy == "length_adaptive" and a.advantage != "gae":
        yield "algorithm.lambda_policy: length_adaptive needs a critic (set algorithm.advantage=gae)"
    if c.value_pretraining.steps and a.advantage != "gae":
        yield "value_pretraining.steps: there is no critic to pretrain (set algorithm.advantage=gae, or steps to 0)"
    if a.advantage != "gae":
        yield from (f"{key}: there is no critic (leave it out, or set algorithm.advantage=gae)" for key in _changed(c, CRITICS))
    if isinstance(a.lambda_policy, float) and not 0 <= a.lambda_policy <= 1:
        yield f"algorithm.lambda_policy: must be in [0, 1] or length_adaptive (got {a.lambda_policy})"
    if c.responses % c.update.mini_batch:
        yield (
            f"update.mini_batch: must divide the {c.responses} responses of a step, "
            f"rollout.prompts * rollout.group_size (got {c.update.mini_batch})"
        )
    critic_mini_batch = c.critic.mini_batch or c.update.mini_batch
    if c.responses % critic_mini_batch or max(critic_mini_batch, c.update.mini_batch) % min(critic_mini_batch, c.update.mini_batch):
        yield (
            f"critic.mini_batch: must divide the {c.responses} responses of a step, and divide update.mini_batch {c.update.mini_batch} "
            f"or be a multiple of it (got {critic_mini_batch})"
        )
    if a.mismatch.mask_low >= a.mismatch.mask_high:
        yield f"algorithm.mismatch.mask_low: must be less than mask_high {a.mismatch.mask_high} (got {a.mismatch.mask_low})"
    for switch, keys in (("weight", ("cap",)), ("mask", ("mask_low", "mask_high"))):
        if getattr(a.mismatch, switch) == "none":
            unused = _changed(c, tuple(f"algorithm.mismatch.{key}" for key in keys))
            yield from (f"{key}: has no effect while algorithm.mismatch.{switch} is none (set it to token or sequence)" for key in unused)
    yield from _engine_problems(c)
    if c.reward.overlong.soft_punishment and c.reward.overlong.buffer > r.max_response_tokens:
        yield f"reward.overlong.buffer: must be <= rollout.max_response_tokens {r.max_response_tokens} (got {c.reward.overlong.buffer})"
    if c.reward.correct <= c.reward.incorrect:
        yield f"reward.correct: must be greater than reward.incorrect {c.reward.incorrect} (got {c.reward.correct})"
    if c.evaluation.every and not c.data.eval:
        yield "evaluation.every: needs data.eval files"
    positions = c.model.max_positions
    if positions and c.data.max_prompt_tokens + r.max_response_tokens > positions:
        yield (
            f"rollout.max_response_tokens: data.max_prompt_tokens {c.data.max_prompt_tokens} + {r.max_response_tokens} tokens exceed "
            f"the model's {positions} positions (lower one of them)"
        )


def _folder_problems(c: Config) -> Iterator[str]:
    """A run never writes into the folder of a model that it reads."""
    written = {"run_dir": c.run_dir, "value_pretraining.rollouts": c.value_pretraining.rollouts}
    for key, model in (("model.path", c.model.path), ("critic.path", c.critic.path)):
        if model is None:
            continue
        folder, run = real(model), real(c.run_dir)
        for other, path in written.items():
            if path is not None and real(path).is_relative_to(folder):
                yield f"{other}: {path} is in {key} {model}, where nothing is to be written (choose another folder)"
        if folder != run and folder.is_relative_to(run) and folder.relative_to(run).parts[0] in RUN_WRITES:
            yield f"{key}: {model} is one of the folders that the run writes in run_dir {c.run_dir} (choose another run_dir)"


def real(path: Path) -> Path:
    """Where a path leads, links followed as far as they lead anywhere."""
    return Path(os.path.realpath(path))


def _engine_problems(c: Config) -> Iterator[str]:
    r = c.rollout
    if r.engine == "sglang" and r.engine_timeout >= c.parallel.timeout:
        yield f"rollout.engine_timeout: must be < parallel.timeout {c.parallel.timeout:g}, as other ranks wait (got {r.engine_timeout:g})"
    if r.engine == "transformers" and r.engine_tp > 1:
        yield f"rollout.engine_tp: must be 1 for rollout.engine transformers, which is not sharded (got {r.engine_tp})"
    if r.engine == "transformers" and r.weights_dtype != "model":
        yield f"rollout.weights_dtype: must be model for rollout.engine transformers (got {r.weights_dtype})"
    if "trust_remote_code" in r.engine_options:
        yield "rollout.engine_options: trust_remote_code: code that lies in a model's folder is never run (leave it out)"
    if "" in r.stop:
        yield "rollout.stop: must not hold an empty text, which would end every response at once"


def _fp8_problems(c: Config) -> Iterator[str]:
    fp8 = c.model.fp8
    if fp8.format == "none":
        unused = _changed(c, ("model.fp8.recipe", "model.fp8.first_last_layers_bf16"))
        yield from (f"{key}: has no effect while model.fp8.format is none (set it to hybrid or e4m3)" for key in unused)
        return
    if c.model.dtype != "bf16":
        yield f"model.fp8.format: {fp8.format} needs model.dtype bf16 (got {c.model.dtype})"
    if c.model.layers == "portable":
        yield f"model.fp8.format: {fp8.format} needs Transformer Engine's layers (set model.layers to te or auto)"
    if c.parallel.device == "cpu":
        yield f"model.fp8.format: {fp8.format} needs a GPU, and parallel.device is cpu (set model.fp8.format to none)"
    if fp8.recipe == "delayed" and fp8.first_last_layers_bf16:
        yield "model.fp8.first_last_layers_bf16: recipe delayed scales all layers or none (choose tensorwise, or set it to false)"


def _changed(config: Config, keys: tuple[str, ...]) -> Iterator[str]:
    """Those of `keys`, or of the keys in these sections, that are not at their default. A resolved configuration sets every key, so
    that whether one was set says nothing."""
    for dotted in keys:
        section: Any = config
        *parents, name = dotted.split(".")
        for parent in parents:
            section = getattr(section, parent)
        value, default = getattr(section, name), type(section).model_fields[name].default
        if isinstance(value, Section):
            yield from _changed(config, tuple(f"{dotted}.{key}" for key in type(value).model_fields))
        elif value != default:
            yield dotted
