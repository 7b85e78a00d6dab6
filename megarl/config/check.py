"""Find contradictions between keys, without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megarl.config.drafts import draft_problems
from megarl.config.errors import ConfigError
from megarl.config.methods import METHODS, POLICY_LOSSES, method_options
from megarl.config.phases import WATCHED
from megarl.config.schema import JUDGE, Config, OptimizerConfig, RewardConfig, RolloutConfig
from megarl.config.schema.judge import CODE
from megarl.config.schema.section import Section
from megarl.config.schema.teacher import EXTRA

# Keys and sections that only runs with a critic, or with rollouts, use.
CRITICS = ("critic", "value_pretraining", "algorithm.value_clip")
SAMPLED = (
    *CRITICS,
    "rollout.dynamic_sampling",
    "rollout.window",
    "rollout.routing_replay",
    "rollout.routing_compare",
    "rollout.sampling_replay",
    "reward.overlong",
    "reward.model",
    "reward.judge",
    "reward.terms",
    "reward.weight",
    "teacher",
    *(f"algorithm.{key}" for key in ("surrogate", "old_logprobs", "dual_clip", "whiten")),
    *(f"algorithm.{key}" for key in ("kl_weight", "kl_estimator", "kl_reward", "entropy_weight")),
    *(f"algorithm.{key}" for key in ("mismatch", "dppo.top_k", "agreement")),
    *(f"algorithm.{option.key}" for option, _, _ in method_options()),
    "update.share_prompts",
    "guard.parity",
    "guard.parity_layers",
    "evaluation.every",
    "parallel.rollout_ranks",
    "schedule",
)

# Keys and sections that are read only with some values of a switch: (switch, values).
READ_WITH = {
    "algorithm.tracker_rho": ("advantage", ("tracked",)),
    "algorithm.gamma": ("advantage", ("gae", "return")),
    "algorithm.dppo.top_k": ("surrogate", ("dppo_tv", "dppo_kl")),
    **{f"algorithm.{option.key}": (switch, names) for option, switch, names in method_options()},
}

# Fields of a request to a judge that megarl sets.
RESERVED = {
    *("model", "messages", "temperature", "seed", "max_completion_tokens", "max_tokens"),
    *("n", "stream", "response_format"),
}

# SGLang's --sampling-mask-max-tokens.
MAX_SAMPLING_SET = 4096

# Folders of run_dir that a run may replace.
RUN_WRITES = (
    *("checkpoints", "critic_pretrained", "critic_2_pretrained", "eval", "failed"),
    *("heartbeat", "hf", "judge", "lora", "parity", "profile", "rollouts", "timeline", "value_pretraining"),
)


def check_config(config: Config, where: str) -> None:
    """Raise ConfigError `where: key: what is wrong (what to do)` for the first contradiction."""
    for problem in _problems(config):
        raise ConfigError(f"{where}: {problem}")


def real(path: Path) -> Path:
    """Resolve links as far as they exist."""
    return Path(os.path.realpath(path))


def _problems(c: Config) -> Iterator[str]:
    yield from _data_problems(c)
    for name, optimizer in (("actor", c.actor), ("critic", c.critic)):
        yield from _optimizer_problems(c, name, optimizer)
    for name in c.watchdog.limits.keys() - set(WATCHED):
        yield f"watchdog.limits: {name} is not part of a run (use one of {', '.join(WATCHED)})"
    yield from _folder_problems(c)
    yield from _parallel_problems(c)
    yield from _recompute_problems(c)
    yield from _precision_problems(c)
    yield from _layers_problems(c)
    yield from _residency_problems(c)
    yield from _guard_problems(c)
    if not c.has_engine:
        yield from _supervised_problems(c)
        return
    yield from _advantage_problems(c)
    yield from _critic_problems(c)
    yield from _policy_loss_problems(c)
    yield from _mini_batch_problems(c)
    yield from _engine_problems(c)
    yield from _episode_problems(c)
    yield from _window_problems(c)
    yield from _in_flight_problems(c)
    yield from _reward_problems(c)
    yield from _teacher_problems(c)
    if c.evaluation.every and not c.data.eval:
        yield "evaluation.every: needs data.eval files"
    yield from evaluation_problems(c)


def _unused(c: Config, reason: str, *keys: str) -> Iterator[str]:
    """Yield a problem for each of these keys or sections that is not at its default.

    In a resolved configuration only the value shows that a key was set."""
    for dotted in keys:
        section: Any = c
        *parents, name = dotted.split(".")
        for parent in parents:
            section = getattr(section, parent)
        value, default = getattr(section, name), type(section).model_fields[name].default
        if isinstance(value, Section):
            yield from _unused(c, reason, *(f"{dotted}.{key}" for key in type(value).model_fields))
        elif value != default:
            yield f"{dotted}: {reason}"


def _data_problems(c: Config) -> Iterator[str]:
    if not c.data.train:
        yield "data.train: must name at least one file"
    for i, entry in enumerate(c.data.train):
        if entry.gym and not c.has_engine:
            what = "recipe sft learns from given responses, and gym has none"
            yield f"data.train[{i}].gym: {what} (name a file)"


def _optimizer_problems(c: Config, name: str, optimizer: OptimizerConfig) -> Iterator[str]:
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield f"{name}.betas: both must be in [0, 1) (got {list(optimizer.betas)})"
    if optimizer.optimizer == "adam":
        what = f"has no effect while {name}.optimizer is adam (set it to muon, or leave this out)"
        yield from _unused(c, what, f"{name}.muon")
    elif optimizer.freezes:
        key = "lora.rank" if optimizer.lora.rank else "frozen" if optimizer.frozen else "frozen_layers"
        what = f"muon trains whole models, but {name}.{key} freezes a part"
        yield f"{name}.optimizer: {what} (set it to adam, or leave {key} out)"
    if optimizer.lora.rank is None:
        what = f"has no effect while {name}.lora.rank is null (set it, or leave this out)"
        keys = (f"{name}.lora.{key}" for key in ("alpha", "rank_stabilized", "targets"))
        yield from _unused(c, what, *keys)
    elif optimizer.frozen or optimizer.frozen_layers:
        key, default = ("frozen", "[]") if optimizer.frozen else ("frozen_layers", "0")
        yield f"{name}.{key}: LoRA freezes the whole model already (set it to {default})"
    elif c.model.fp8.format != "none" and c.model.fp8.recipe == "delayed":
        what = "adapter checkpoints lack the scaling histories of model.fp8.recipe delayed"
        yield f"{name}.lora.rank: {what} (choose another recipe, or set rank to null)"


def _folder_problems(c: Config) -> Iterator[str]:
    output_folders = {"run_dir": c.run_dir, "value_pretraining.rollouts": c.value_pretraining.rollouts}
    for key, model in c.model_folders.items():
        model_folder, run_folder = real(model), real(c.run_dir)
        for output_key, path in output_folders.items():
            if path is not None and real(path).is_relative_to(model_folder):
                what = f"{path} is inside {key} {model}, which must not change"
                yield f"{output_key}: {what} (choose another folder)"
        if (
            model_folder != run_folder
            and model_folder.is_relative_to(run_folder)
            and model_folder.relative_to(run_folder).parts[0] in RUN_WRITES
        ):
            what = f"{model} is one of the folders that the run writes in run_dir {c.run_dir}"
            yield f"{key}: {what} (choose another run_dir)"


def _parallel_problems(c: Config) -> Iterator[str]:
    if c.schedule.ahead and not c.parallel.rollout_ranks:
        what = f"{c.schedule.ahead} needs ranks that generate while others train"
        yield f"schedule.ahead: {what} (set parallel.rollout_ranks, or ahead to 0)"
    if c.parallel.rollout_ranks % c.rollout.engine_tp:
        what = f"{c.parallel.rollout_ranks} is not a multiple of rollout.engine_tp {c.rollout.engine_tp}"
        yield f"parallel.rollout_ranks: {what} (raise or lower it)"
    if c.parallel.vpp > 1 and c.parallel.pp == 1:
        what = f"{c.parallel.vpp} virtual stages need a pipeline of several ranks"
        yield f"parallel.vpp: {what} (set it to 1, or raise parallel.pp)"
    if c.parallel.vpp == 1 and c.parallel.overlap_warmup_flush:
        yield "parallel.overlap_warmup_flush: has no effect while parallel.vpp is 1 (leave it out)"
    max_length, chunks = c.data.max_prompt_tokens + c.rollout.max_extent, 2 * c.parallel.cp
    if chunks > max(max_length, 2):
        what = f"{c.parallel.cp} ranks cut each sequence into {chunks} chunks, and none has over {max_length}"
        yield f"parallel.cp: {what} tokens (lower it)"


def _recompute_problems(c: Config) -> Iterator[str]:
    if c.model.recompute_layers is not None and c.model.recompute != "full":
        what = f"has no effect with model.recompute {c.model.recompute}"
        yield f"model.recompute_layers: {what} (set model.recompute=full, or leave it out)"
    if c.model.recompute != "selective":
        what = f"has no effect with model.recompute {c.model.recompute}"
        what += " (set model.recompute=selective, or leave it out)"
        yield from _unused(c, what, "model.recompute_modules")
    elif not c.model.recompute_modules:
        what = "must name the modules that model.recompute selective recomputes"
        yield f"model.recompute_modules: {what} (attention or mlp)"


def _precision_problems(c: Config) -> Iterator[str]:
    if c.parallel.grad_dtype == "bf16" and c.model.dtype != "bf16":
        yield f"parallel.grad_dtype: bf16 needs model.dtype bf16 (got {c.model.dtype})"

    fp8, requirement = c.model.fp8, f"model.fp8.format: {c.model.fp8.format} needs"
    if fp8.format == "none":
        what = "has no effect while model.fp8.format is none (set it to hybrid or e4m3)"
        yield from _unused(c, what, "model.fp8.recipe", "model.fp8.first_last_layers_bf16")
    else:
        if c.model.dtype != "bf16":
            yield f"{requirement} model.dtype bf16 (got {c.model.dtype})"
        if c.model.layers == "portable":
            yield f"{requirement} Transformer Engine's layers (set model.layers to te or auto)"
        if c.parallel.device == "cpu":
            yield f"{requirement} a GPU, and parallel.device is cpu (set model.fp8.format to none)"
        if fp8.recipe == "delayed" and fp8.first_last_layers_bf16:
            what = "recipe delayed scales all layers or none"
            yield f"model.fp8.first_last_layers_bf16: {what} (choose tensorwise, or set it to false)"


def _layers_problems(c: Config) -> Iterator[str]:
    fp8 = c.model.fp8.format != "none"
    if c.model.grouped_experts and (c.model.layers == "portable" or fp8):
        what = "needs Transformer Engine's layers, without FP8"
        yield f"model.grouped_experts: {what} (set it to false)"
    if c.model.attention != "auto" and c.model.layers == "portable":
        yield "model.attention: needs Transformer Engine's layers (set it to auto)"
    if c.model.permute_fusion and (c.model.layers == "portable" or c.parallel.device == "cpu"):
        yield "model.permute_fusion: needs Transformer Engine's kernels, on a GPU (set it to false)"
    if c.update.share_prompts and (c.model.layers == "te" or fp8 or c.parallel.cp > 1):
        what = "needs portable layers, without FP8 and context parallelism"
        yield f"update.share_prompts: {what} (set it to false)"


def _residency_problems(c: Config) -> Iterator[str]:
    if c.residency.keep and c.residency.offload is False:
        yield "residency.keep: has no effect with residency.offload false (leave one of them out)"
    for group in c.residency.keep:
        if not c.has_group(group):
            yield f"residency.keep: {group}: this run has none (leave it out)"


def _guard_problems(c: Config) -> Iterator[str]:
    if isinstance(c.guard.parity, float) and c.guard.parity < 0:
        yield f"guard.parity: must be >= 0, auto or none (got {c.guard.parity:g})"
    if c.guard.parity == "none" and c.guard.parity_layers:
        yield "guard.parity_layers: has no effect with guard.parity none (set one of the two otherwise)"
    if not c.checkpoint.every:
        what = "has no effect while checkpoint.every is 0 (set checkpoint.every)"
        yield from _unused(c, what, "checkpoint.time_limit", "checkpoint.keep_every")


def _supervised_problems(c: Config) -> Iterator[str]:
    if c.algorithm.nll_weight != 1:
        what = f"must be 1 for recipe sft, which has no other loss (got {c.algorithm.nll_weight:g})"
        yield f"algorithm.nll_weight: {what}"
    yield from _unused(c, "recipe sft learns from given responses and ignores it (leave it out)", *SAMPLED)


def _advantage_problems(c: Config) -> Iterator[str]:
    a, group = c.algorithm, c.rollout.group_size
    if a.advantage_method.compares_group and group < 2:
        what = f"must be >= 2 for algorithm.advantage {a.advantage}, which compares a group's responses"
        yield f"rollout.group_size: {what} (got {group}; or set algorithm.advantage=gae)"
    # Turns of an episode may have separate rewards.
    if a.advantage == "per_reward" and len(c.reward.parts) < 2 and not c.rollout.is_multi_turn:
        what = f"per_reward needs several rewards, and there is one ({', '.join(c.reward.parts)})"
        yield f"algorithm.advantage: {what} (give others a weight, or set it to group)"
    if a.advantage == "tracked" and c.rollout.dynamic_sampling.enabled:
        what = "drops groups that are all right or all wrong, which algorithm.advantage tracked needs"
        yield f"rollout.dynamic_sampling.enabled: {what} (set it to false)"
    if a.advantage == "prompt_value":
        if c.rollout.is_multi_turn:
            what = "prompt_value treats a response as one action, but episodes have several"
            yield f"algorithm.advantage: {what} (set it to gae)"
        if a.value_clip:
            what = "prompt_value fits the critic by cross-entropy, which is not clipped"
            yield f"algorithm.value_clip: {what} (set it to 0)"
    if a.advantage in ("tracked", "prompt_value") and not c.reward.weight:
        what = f"must be > 0 for algorithm.advantage {a.advantage}, which expects the verifier's reward"
        yield f"reward.weight: {what}"
    if a.kl_reward and a.advantage in ("per_reward", "tracked", "prompt_value"):
        what = f"cannot be combined with algorithm.advantage {a.advantage}"
        yield f"algorithm.kl_reward: {what} (set it to 0; kl_weight puts the KL into the loss)"
    if not a.kl_weight:
        what = "has no effect while algorithm.kl_weight is 0 (set that, or leave it out)"
        yield from _unused(c, what, "algorithm.kl_estimator")
    if c.recipe == "sao" and group > 1:
        yield f"rollout.group_size: recipe sao takes one response a prompt (got {group}; set it to 1)"
    if c.rollout.dynamic_sampling.enabled and group < 2:
        what = f"needs rollout.group_size >= 2 (got {group}): one response is never mixed"
        yield f"rollout.dynamic_sampling.enabled: {what}"


def _critic_problems(c: Config) -> Iterator[str]:
    a, group = c.algorithm, c.rollout.group_size
    if a.advantage != "gae" and a.lambda_policy == "length_adaptive":
        what = "length_adaptive needs a critic of all tokens"
        yield f"algorithm.lambda_policy: {what} (set algorithm.advantage=gae)"
    if not c.has_critic:
        if c.value_pretraining.steps:
            remedy = "set algorithm.advantage=gae, or steps to 0"
            yield f"value_pretraining.steps: there is no critic to pretrain ({remedy})"
        what = "there is no critic (leave it out, or set algorithm.advantage=gae)"
        yield from _unused(c, what, *CRITICS)
    elif c.critic.count > max(1, group * (a.advantage == "gae")):
        what = "several critics need algorithm.advantage gae, and a response each in every group"
        value_text = f"got {c.critic.count} with groups of {group} and {a.advantage}"
        yield f"critic.count: {what} ({value_text}; set it to 1)"
    if not c.has_critic or c.critic.count == 1:
        what = "has no effect with fewer than two critics (set critic.count=2, or it to 0)"
        yield from _unused(c, what, "algorithm.agreement")
    if a.agreement.filter and not a.entropy_weight:
        what = "has no effect without an entropy term"
        yield f"algorithm.agreement.filter: {what} (set algorithm.entropy_weight, or it to 0)"
    if isinstance(a.lambda_policy, float) and not 0 <= a.lambda_policy <= 1:
        yield f"algorithm.lambda_policy: must be in [0, 1] or length_adaptive (got {a.lambda_policy})"
    if a.lambda_floor and a.lambda_policy != "length_adaptive":
        what = "has no effect unless algorithm.lambda_policy is length_adaptive"
        yield f"algorithm.lambda_floor: {what} (set it to 0)"


def _policy_loss_problems(c: Config) -> Iterator[str]:
    a = c.algorithm
    if a.dual_clip and (a.dual_clip <= 1 or not a.policy_loss.has_dual_clip):
        *names, last = (name for name, loss in POLICY_LOSSES.items() if loss.has_dual_clip)
        what = f"must be 0, or > 1 with algorithm.surrogate {', '.join(names)} or {last}"
        yield f"algorithm.dual_clip: {what} (got {a.dual_clip:g} with {a.surrogate})"
    for name, (switch, readers) in READ_WITH.items():
        if getattr(a, switch) not in readers:
            what = f"has no effect with algorithm.{switch} {getattr(a, switch)}"
            yield from _unused(c, f"{what} (leave it out, or set that to {' or '.join(readers)})", name)
    for switch, table in METHODS.items():
        for requirement in table[getattr(a, switch)].requirements:
            if problem := requirement(c):
                yield problem
    if a.old_logprobs == "engine" and a.dppo.top_k:
        what = "no engine returns the log-probs of its top-k tokens"
        yield f"algorithm.dppo.top_k: {what} (set algorithm.old_logprobs=trainer, or it to 0)"
    if a.old_logprobs == "engine" and a.mismatch.enabled:
        what = "has nothing to correct with algorithm.old_logprobs engine, whose ratio holds the difference"
        yield f"algorithm.mismatch: {what} (set weight and mask to none)"
    m, name = a.mismatch, "algorithm.mismatch"
    if m.mask_low >= m.mask_high:
        yield f"{name}.mask_low: must be less than mask_high {m.mask_high} (got {m.mask_low})"
    for switch, level, keys in (("weight", m.weight, ["cap"]), ("mask", m.mask, ["mask_low", "mask_high"])):
        if level == "none":
            what = f"has no effect while {name}.{switch} is none (set it to token or sequence)"
            yield from _unused(c, what, *(f"{name}.{key}" for key in keys))


def _mini_batch_problems(c: Config) -> Iterator[str]:
    actor_size = c.update.mini_batch
    critic_size = c.critic.mini_batch or actor_size
    requirement = f"must divide the {c.responses} responses of a step"
    if c.responses % actor_size:
        yield f"update.mini_batch: {requirement}, rollout.prompts * rollout.group_size (got {actor_size})"
    if c.responses % critic_size or max(critic_size, actor_size) % min(critic_size, actor_size):
        alternative = f"divide update.mini_batch {actor_size} or be a multiple of it"
        yield f"critic.mini_batch: {requirement}, and {alternative} (got {critic_size})"


def _engine_problems(c: Config) -> Iterator[str]:
    r, rank_timeout = c.rollout, c.parallel.timeout
    capabilities = r.capabilities
    if capabilities.continuous_batching and r.engine_timeout >= rank_timeout:
        what = f"must be < parallel.timeout {rank_timeout:g}, as other ranks wait"
        yield f"rollout.engine_timeout: {what} (got {r.engine_timeout:g})"
    if not (capabilities.sharded or capabilities.remote) and r.engine_tp > 1:
        what = f"must be 1 for rollout.engine {r.engine}, which is not sharded"
        yield f"rollout.engine_tp: {what} (got {r.engine_tp})"
    if not capabilities.sharded and r.weights_dtype != "model":
        yield f"rollout.weights_dtype: must be model for rollout.engine {r.engine} (got {r.weights_dtype})"
    yield from _server_problems(r)
    if r.weights.backend not in (None, *capabilities.weight_backends):
        remedy = f"use {' or '.join(capabilities.weight_backends)}, or leave it out"
        yield f"rollout.weights.backend: {r.weights.backend} is not for rollout.engine {r.engine} ({remedy})"
    if r.routing_compare and not (r.routing_replay and c.algorithm.old_logprobs == "trainer"):
        what = "needs rollout.routing_replay true and algorithm.old_logprobs trainer"
        yield f"rollout.routing_compare: {what} (set it to false)"
    if r.sampling_replay:
        yield from _sampling_replay_problems(c)
    if "trust_remote_code" in r.engine_options:
        what = "code in a model's folder is never run"
        yield f"rollout.engine_options: trust_remote_code: {what} (leave it out)"
    runner = r.engine_options.get("moe_runner_backend", "triton")
    if runner != "triton":
        what = f"moe_runner_backend: {runner} needs another order of expert weights"
        yield f"rollout.engine_options: {what} (leave it out: megarl sets triton)"
    yield from draft_problems(c)


def _sampling_replay_problems(c: Config) -> Iterator[str]:
    r, key = c.rollout, "rollout.sampling_replay"
    if not 1 < r.top_k <= MAX_SAMPLING_SET:
        what = f"needs 1 < rollout.top_k <= {MAX_SAMPLING_SET}, as top_p alone limits no set"
        yield f"{key}: {what} (got {r.top_k}; set top_k, or it to false)"
    if not r.capabilities.returns_sampling_sets:
        yield f"{key}: rollout.engine {r.engine} returns no sampling sets (set it to false)"
    if r.engine_options.get("speculative_algorithm"):
        what = "SGLang's speculative decoding returns no sampling sets"
        yield f"rollout.engine_options: speculative_algorithm: {what} (leave it out, or {key} false)"
    if c.teacher.weights is not None:
        what = "its prompts have other positions than rollout.sampling_replay's sets"
        yield f"teacher.weights: {what} (leave one of them out)"
    for name, top_k in (("algorithm.dppo.top_k", c.algorithm.dppo.top_k), ("teacher.top_k", c.teacher.top_k)):
        if top_k:
            what = "compares the whole distribution, not rollout.sampling_replay's sets"
            yield f"{name}: {what} (leave one of them out)"


def _episode_problems(c: Config) -> Iterator[str]:
    r = c.rollout
    if not all(word.strip() for word in c.log.reflection_words):
        yield "log.reflection_words: must not hold an empty text, which every response contains (remove it)"
    if "" in r.stop:
        yield "rollout.stop: must not hold an empty text, which would end every response at once"
    keys = [f"rollout.{key}" for key in ("episode", "tools", "environment", "agent") if getattr(r, key)]
    if len(keys) > 1:
        yield f"{keys[1]}: cannot be combined with {keys[0]}: each defines the episode (leave one out)"
    if r.environment_arguments and not r.environment:
        yield "rollout.environment_arguments: has no effect without an environment (set rollout.environment)"
    addresses = [
        address.removeprefix("mcp:") for address in (*r.tools, *map(str, r.environment_arguments.values()))
    ]
    if r.turns.sandbox == "strict" and (
        url := next((address for address in addresses if "://" in address[:8]), None)
    ):
        what = f"strict has no network, which {url} needs"
        yield f"rollout.turns.sandbox: {what} (set it to network)"
    for key in ("tools", "agent"):
        if getattr(r, key) and c.data.template != "chat":
            yield f"rollout.{key}: needs a chat template (set data.template=chat)"
    if c.update.share_prompts and r.group_size == 1:
        yield "update.share_prompts: has no effect with rollout.group_size 1 (set it to false)"
    if r.agent and c.update.share_prompts:
        what = "an agent's messages differ within a group"
        yield f"update.share_prompts: has no effect with rollout.agent: {what} (set it to false)"
    if not r.is_multi_turn:
        remedy = "set rollout.episode, tools, environment or agent"
        yield from _unused(c, f"has no effect on responses of one turn ({remedy})", "rollout.turns")
    if (max_tokens := r.turns.max_tokens) is not None and max_tokens < r.max_response_tokens:
        what = f"must be >= rollout.max_response_tokens {r.max_response_tokens}, which it includes"
        yield f"rollout.turns.max_tokens: {what} (got {max_tokens})"
    prompt, positions = c.data.max_prompt_tokens, c.model.max_positions
    if positions and prompt + r.max_extent > positions:
        length_text = f"data.max_prompt_tokens {prompt} + {r.max_extent} tokens"
        key = "max_response_tokens" if r.max_extent == r.max_response_tokens else "turns.max_tokens"
        yield f"rollout.{key}: {length_text} exceed the model's {positions} positions (lower one of them)"


def _reward_problems(c: Config) -> Iterator[str]:
    reward, max_tokens, sampling = c.reward, c.rollout.max_response_tokens, c.rollout.dynamic_sampling
    if reward.overlong.soft_punishment and reward.overlong.buffer > max_tokens:
        what = f"must be <= rollout.max_response_tokens {max_tokens}"
        yield f"reward.overlong.buffer: {what} (got {reward.overlong.buffer})"
    if reward.correct <= reward.incorrect:
        what = f"must be greater than reward.incorrect {reward.incorrect}"
        yield f"reward.correct: {what} (got {reward.correct})"
    has_model = reward.model.path is not None
    term_weights = [*reward.term_weights.values()]
    if not any((reward.weight, *term_weights, has_model and reward.model.weight)):
        what = "0, and neither a term of reward.terms nor a judge or reward model has a weight"
        yield f"reward.weight: {what} (give one of them a weight)"
    if sampling.enabled and sampling.by == "score" and not (reward.weight or any(term_weights)):
        what = "score: only the reward model rewards, and groups are filtered before it scores them"
        remedy = "set it to accuracy, or give the verifier or a term a weight"
        yield f"rollout.dynamic_sampling.by: {what} ({remedy})"
    if not has_model:
        what = "has no effect without a reward model (set reward.model.path)"
        yield from _unused(c, what, "reward.model.weight")
    for name in reward.terms:
        if not re.fullmatch("[A-Za-z0-9_]+", name):
            what = "a name must be of letters, digits and _, as its metric is reward/term_<name>"
            yield f"reward.terms: {what} (got {name!r})"
    if reward.judge_is_term and JUDGE in reward.terms:
        yield f"reward.terms.{JUDGE}: is the name of the score of reward.judge (choose another name)"


def _teacher_problems(c: Config) -> Iterator[str]:
    teacher = c.teacher
    if not teacher.folders and teacher.weights is None:
        what = "has no effect without a teacher (set teacher.path)"
        keys = ("weight", "top_k", "ratio_cap", "alpha", "alone")
        yield from _unused(c, what, *(f"teacher.{key}" for key in keys))
    elif teacher.top_k is None:
        yield from _unused(c, "has no effect without teacher.top_k (set it)", "teacher.alpha")
    if teacher.weights is None:
        what = "has no effect on a separate teacher (set teacher.weights)"
        own_keys = ("average_rate", "demonstration", "template", "max_context_tokens")
        yield from _unused(c, what, *(f"teacher.{key}" for key in own_keys))
        return
    yield from _self_teacher_problems(c)


def _self_teacher_problems(c: Config) -> Iterator[str]:
    """Yield the problems of a teacher that is the actor with a demonstration."""
    teacher = c.teacher
    if teacher.folders:
        yield f"teacher.weights: {teacher.weights} and {next(iter(teacher.folders))}: choose one of them"
    if teacher.weights != "average":
        yield from _unused(c, "has no effect without teacher.weights average", "teacher.average_rate")
    elif c.actor.lora.rank is not None:
        what = "average: the average of adapters is not kept"
        yield f"teacher.weights: {what} (choose initial or current, or set actor.lora.rank to null)"
    name = teacher.demonstration
    if name not in ("sibling", "answer") and not name.startswith(EXTRA):
        yield f"teacher.demonstration: must be sibling, answer or extra_info.KEY (got {name!r})"
    if name == "sibling" and c.rollout.group_size < 2:
        what = "sibling: a group has one response"
        yield f"teacher.demonstration: {what} (raise rollout.group_size, or choose answer or extra_info.KEY)"
    if "{demonstration}" not in teacher.template:
        yield "teacher.template: must have {demonstration}, and usually {question}"
    if c.rollout.is_multi_turn or c.rollout.window is not None:
        what = "responses of several turns" if c.rollout.is_multi_turn else "rollout.window"
        yield f"teacher.weights: {teacher.weights}: does not read {what} (set it to null)"
    longest = teacher.max_context_tokens + c.rollout.max_response_tokens
    text = f"{teacher.max_context_tokens} + rollout.max_response_tokens {c.rollout.max_response_tokens}"
    for limit, key in (
        (c.update.tokens_per_micro_batch, "update.tokens_per_micro_batch"),
        (c.model.max_positions, "model.max_positions"),
    ):
        if limit and longest > limit:
            yield f"teacher.max_context_tokens: {text} exceed {key} {limit} (lower it)"


def _window_problems(c: Config) -> Iterator[str]:
    r, window = c.rollout, c.rollout.window
    if window is None:
        if c.algorithm.window_tail:
            yield "algorithm.window_tail: has no effect without rollout.window (set it to 0)"
        return
    if c.algorithm.advantage != "gae":
        what = "an unfinished response has no reward, so its value must come from a critic"
        yield f"rollout.window: {what} (set algorithm.advantage=gae, or leave it out)"
    if window >= r.max_response_tokens:
        what = f"{window} must be less than rollout.max_response_tokens {r.max_response_tokens}"
        yield f"rollout.window: {what} (lower it, or leave it out)"
    if c.algorithm.surrogate in ("fipo", "vespo", "trust_region"):
        what = f"{c.algorithm.surrogate} needs whole responses, which rollout.window cuts"
        yield f"algorithm.surrogate: {what} (choose another, or leave the window out)"
    if c.algorithm.window_tail >= window:
        what = f"must be less than rollout.window {window}"
        yield f"algorithm.window_tail: {what} (got {c.algorithm.window_tail})"
    for key, is_enabled in (
        ("rollout.dynamic_sampling.enabled", r.dynamic_sampling.enabled),
        ("reward.overlong.filter", c.reward.overlong.filter),
    ):
        if is_enabled:
            what = "rollout.window trains on a response before it and its group are finished"
            yield f"{key}: {what} (set it to false)"
    if r.continue_partial:
        what = "has no effect with rollout.window, which always continues unfinished responses"
        yield f"rollout.continue_partial: {what} (set it to false)"
    if r.is_multi_turn:
        yield "rollout.window: works with responses of one turn only (leave it out, or the episode)"
    if c.reward.model.path is not None:
        what = "scores whole responses, and with rollout.window a batch holds parts"
        yield f"reward.model.path: {what} (leave one of them out)"


def _in_flight_problems(c: Config) -> Iterator[str]:
    r, mode = c.rollout, c.schedule.in_flight
    if mode == "none":
        what = "has no effect while schedule.in_flight is none (set it to retract, or leave this out)"
        yield from _unused(c, what, "schedule.max_staleness")
        return
    if not c.parallel.rollout_ranks:
        what = f"{mode} needs ranks that generate while others train"
        yield f"schedule.in_flight: {what} (set parallel.rollout_ranks, or it to none)"
    if c.schedule.ahead:
        what = "schedule.in_flight sets how far rollouts are ahead, by max_staleness"
        yield f"schedule.ahead: {what} (set it to 0)"
    if r.window is not None:
        what = "ends responses at a step's end, and with schedule.in_flight none ends there"
        yield f"rollout.window: {what} (leave one of them out)"
    if r.routing_replay:
        what = "records the routing of one version of the weights, and in-flight responses have several"
        yield f"rollout.routing_replay: {what} (set it to false)"


def _server_problems(r: RolloutConfig) -> Iterator[str]:
    urls_by_key = {"rollout.urls": r.urls, "rollout.router": (r.router,) if r.router else ()}
    for key, urls in urls_by_key.items():
        if urls and not r.capabilities.remote:
            what = f"has no effect with rollout.engine {r.engine}"
            yield f"{key}: {what} (leave it out, or set rollout.engine=sglang_url)"
        for url in urls:
            if not re.fullmatch(r"https?://[^/?#@\s]+", url):
                yield f"{key}: must be http://host:port, without a path (got {url!r})"
    if not r.capabilities.remote:
        return
    if not r.urls:
        yield "rollout.urls: rollout.engine sglang_url needs the servers' URLs, the router's servers too"
    for url in dict.fromkeys(url for url in r.urls if (*r.urls, r.router).count(url) > 1):
        yield f"rollout.urls: {url}: is named twice, or is the router's (name each server once)"
    for key in ("routing_replay", "engine_options"):
        if getattr(r, key):
            yield f"rollout.{key}: is not for rollout.engine sglang_url (leave it out)"


def _judge_problems(reward: RewardConfig) -> Iterator[str]:
    judge, key = reward.judge, "reward.judge"
    try:
        parts = urlsplit(judge.url or "")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an IPv6 address, or a wrong port
        is_address = False
    if not is_address and "@" not in (judge.url or ""):
        yield f"{key}.url: is no http or https address (e.g. http://127.0.0.1:30000/v1)"
    elif not is_address or "@" in parts.netloc or parts.query or parts.fragment:
        what = "must hold no user, password or query, because it is logged"
        yield f"{key}.url: {what} (name the key's variable in {key}.key_variable)"
    if not judge.model:
        yield f"{key}.model: must name the model of the endpoint"
    if "{response}" not in judge.template:
        yield f"{key}.template: has no {{response}}, so the judge would see no response (add it)"
    try:
        has_group = re.compile(judge.pattern.replace(CODE, "0")).groups > 0
    except re.error as error:
        yield f"{key}.pattern: is no regular expression: {error}"
    else:
        if not has_group:
            yield f"{key}.pattern: has no group around the score (write e.g. Score: (\\d+))"
    if judge.lowest >= judge.highest:
        yield f"{key}.lowest: must be below {key}.highest {judge.highest:g} (got {judge.lowest:g})"
    if judge.votes > 1 and not judge.temperature:
        what = f"{judge.votes} votes at temperature 0 are one answer"
        yield f"{key}.votes: {what} (raise {key}.temperature, or set votes to 1)"
    if reserved := judge.options.keys() & RESERVED:
        yield f"{key}.options: {min(reserved)} is set by megarl (leave it out)"
    if reward.verifier == JUDGE and judge.weight != type(judge)().weight:
        what = "has no effect with reward.verifier judge"
        yield f"{key}.weight: {what} (set reward.weight, or choose a rule as the verifier)"


def judge_budget_problems(c: Config, engines: int) -> Iterator[str]:
    """Yield budgets of a step, of which some engine would have no part."""
    for name, budget in (("calls", c.reward.judge.max_calls), ("tokens", c.reward.judge.max_tokens)):
        if budget is not None and budget < engines:
            what = f"{budget} leaves some of the {engines} engines without {name} (raise it)"
            yield f"reward.judge.max_{name}: {what}"


def evaluation_problems(c: Config) -> Iterator[str]:
    """Yield problems of the entries of data.eval, and of a judge."""
    if c.reward.judge.url is not None:
        yield from _judge_problems(c.reward)
        yield from judge_budget_problems(c, c.parallel.rollout_ranks // c.rollout.engine_tp)
    elif c.reward.verifier == JUDGE:
        yield "reward.verifier: judge needs an endpoint (set reward.judge.url and reward.judge.model)"
    else:
        what = "has no effect without a judge (set reward.judge.url)"
        yield from _unused(c, what, "reward.judge")
    index_by_name: dict[str, int] = {}
    for i, entry in enumerate(c.data.eval):
        key = f"data.eval[{i}].name"
        if entry.name is None:
            if entry.every is not None:
                what = "must be given with `every`, as the scores have no other name"
                yield f"{key}: {what} (name the entry, or leave every out)"
        elif not re.fullmatch("[A-Za-z0-9_.+-]+", entry.name):
            what = "must be of letters, digits and _ . + -, as its metrics are eval/<name>/..."
            yield f"{key}: {what} (got {entry.name!r})"
        elif index_by_name.setdefault(entry.name, i) != i:
            what = f"data.eval[{index_by_name[entry.name]}] has the name {entry.name} already"
            yield f"{key}: {what} (choose another name)"
