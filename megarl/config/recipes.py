"""Each recipe: the settings it presets, and the phases of its step in order. Each phase: what it reads and
writes, and what it needs on the GPU.

The code of a phase is the function of the same name in megarl/schedule/phases.py. The trainer enforces the
declarations while it runs a phase, the planner computes memory and time from them, `megarl replay` follows
the same lists without the engine. To add a phase: declare it here, put it in its place in `training_phases`
(or `pretraining_phases`), and write its function there. docs/extending.md has an example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

from megarl.config.schema import Config
from megarl.config.schema.residency import TensorGroup

GROUPS: tuple[str, ...] = get_args(TensorGroup)

# Published algorithms as settings of the same switches, each one column of the papers' comparison. A config
# or an override changes any of them. `config/schema/algorithm.py` names the equation of each switch.
PRESETS: dict[str, dict[str, Any]] = {
    # Supervised warm start: the positive-example LM loss (VAPO eq. 9) alone, on given responses.
    "sft": {"algorithm": {"nll_weight": 1.0}},
    # DAPO's first row, "naive GRPO": sample-level loss, symmetric clip, KL to the reference left out as in
    # DAPO section 2.3.
    "grpo": {"algorithm": {"advantage": "group", "aggregation": "sample", "clip_high": 0.2}},
    # DAPO eq. 8, 11, 13.
    "dapo": {
        "algorithm": {"advantage": "group", "aggregation": "token", "clip_high": 0.28},
        "rollout": {"dynamic_sampling": {"enabled": True}},
        "reward": {"overlong": {"soft_punishment": True}},
        "actor": {"warmup_steps": 20},
    },
    # VAPO's base, "vanilla PPO": one response a prompt, one lambda, sample-level loss, no value pretraining.
    "ppo": {
        "algorithm": {
            "advantage": "gae",
            "lambda_critic": 0.95,
            "lambda_policy": 0.95,
            "aggregation": "sample",
            "clip_high": 0.2,
        },
        "rollout": {"prompts": 8192, "group_size": 1},
    },
    # VAPO section 4, all seven techniques of its Table 1. Overlong punishment as in DAPO is our choice: VAPO
    # does not say.
    "vapo": {
        "algorithm": {
            "advantage": "gae",
            "lambda_critic": 1.0,
            "lambda_policy": "length_adaptive",
            "alpha": 0.05,
            "aggregation": "token",
            "clip_high": 0.28,
            "nll_weight": 0.1,
        },
        "reward": {"overlong": {"soft_punishment": True}},
        "value_pretraining": {"steps": 50},
    },
    # T-PPO, arXiv 2506.15050: VAPO on windows of responses. Numbers are those of its authors' implementation
    # (verl pull request 3728); overlong punishment is our choice, as for VAPO.
    "tppo": {
        "algorithm": {
            "advantage": "gae",
            "lambda_critic": 1.0,
            "lambda_policy": "length_adaptive",
            "alpha": 0.05,
            "lambda_floor": 0.95,
            "window_tail": 8,
            "whiten": True,
            "aggregation": "token",
            "clip_high": 0.28,
            "dual_clip": 10.0,
            "nll_weight": 0.1,
        },
        "rollout": {"window": 8192},
        "reward": {"overlong": {"soft_punishment": True}},
        "actor": {"lr": 8e-7, "weight_decay": 0.1},
        "critic": {"weight_decay": 0.1},
        "value_pretraining": {"steps": 10},
    },
    # The baselines that the papers and surveys name: docs/algorithms.md, "Other methods".
    # arXiv 2510.01656; of the paper the abstract and a summary could be read. Shares, entropy and lambdas are
    # those of a reimplementation for slime.
    "asyppo": {
        "algorithm": {
            "advantage": "gae",
            "lambda_critic": 1.0,
            "lambda_policy": 1.0,
            "clip_high": 0.28,
            "entropy_weight": 0.001,
            "agreement": {"mask": 0.1, "filter": 0.2},
        },
        "critic": {"count": 2},
    },
    "vc_ppo": {  # arXiv 2503.01491: PPO with value pretraining and decoupled GAE
        "algorithm": {
            "advantage": "gae",
            "lambda_critic": 1.0,
            "lambda_policy": 0.95,
            "aggregation": "sample",
        },
        "rollout": {"prompts": 8192, "group_size": 1},
        "value_pretraining": {"steps": 50},
    },
    "orz": {  # Open-Reasoner-Zero, arXiv 2503.24290: PPO, both lambdas 1, no KL
        "algorithm": {"advantage": "gae", "lambda_critic": 1.0, "lambda_policy": 1.0, "whiten": True},
        "rollout": {"prompts": 128, "group_size": 64},
    },
    "r1_zero": {  # DeepSeek-R1-Zero, arXiv 2501.12948: GRPO with a KL in the loss
        "algorithm": {"advantage": "group", "aggregation": "sample", "kl_weight": 0.001},
    },
    "dr_grpo": {  # arXiv 2503.20783
        "algorithm": {"advantage": "group_mean", "aggregation": "constant"},
    },
    "rloo": {  # arXiv 2402.14740; the sum over a response's tokens, up to one constant factor
        "algorithm": {"advantage": "leave_one_out", "aggregation": "constant"},
    },
    "reinforce_pp": {  # arXiv 2501.03262
        "algorithm": {"advantage": "return", "whiten": True, "kl_reward": 0.001},
    },
    "gspo": {  # arXiv 2507.18071, section 5.1: four mini-batches a rollout, here of 8,192 responses
        "algorithm": {
            "advantage": "group",
            "surrogate": "gspo",
            "aggregation": "sample",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
        },
        "update": {"mini_batch": 2048},
    },
    "cispo": {  # MiniMax-M1, arXiv 2506.13585: no lower bound; with DAPO's sampling and length penalty
        "algorithm": {"advantage": "group", "surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        "rollout": {"dynamic_sampling": {"enabled": True}},
        "reward": {"overlong": {"soft_punishment": True}},
    },
    "dppo": {  # arXiv 2602.04879, anchored at the rollout; advantage and denominator of its authors' example
        "algorithm": {
            "advantage": "group_mean",
            "aggregation": "constant",
            "surrogate": "dppo_tv",
            "old_logprobs": "engine",
            "clip_low": 0.15,
            "clip_high": 0.15,
        },
    },
    "sapo": {  # arXiv 2511.20347
        "algorithm": {"advantage": "group", "surrogate": "sapo", "aggregation": "sample"},
    },
    "clip_cov": {  # arXiv 2505.22617 and its authors' scripts: PPO's clip as good as open
        "algorithm": {"advantage": "group", "surrogate": "clip_cov", "clip_low": 1.0, "clip_high": 1.0},
        "rollout": {"dynamic_sampling": {"enabled": True}},
    },
    "kl_cov": {  # the same
        "algorithm": {"advantage": "group", "surrogate": "kl_cov"},
        "rollout": {"dynamic_sampling": {"enabled": True}},
    },
    "fipo": {  # arXiv 2603.19835: DAPO's loss with other advantages
        "algorithm": {"advantage": "group", "surrogate": "fipo", "clip_high": 0.28, "dual_clip": 10.0},
        "rollout": {"dynamic_sampling": {"enabled": True}},
        "reward": {"overlong": {"soft_punishment": True}},
    },
    # arXiv 2601.05242: GRPO, each reward normalised by itself; of two, right answers and lengths.
    "gdpo": {
        "algorithm": {"advantage": "per_reward", "aggregation": "sample"},
        "reward": {"overlong": {"soft_punishment": True}},
    },
    # Single-stream Policy Optimization, arXiv 2509.13232, with the numbers of its script (verl-recipe
    # spo/train.sh): eight updates a rollout, here of 8,192 responses. Token-level is our choice.
    "spo": {
        "algorithm": {"advantage": "tracked", "aggregation": "token", "clip_high": 0.28, "dual_clip": 10.0},
        "rollout": {"prompts": 8192, "group_size": 1},
        "update": {"mini_batch": 1024},
    },
    # arXiv 2604.08865 and its 7B script (sustech-nlp/SPPO), which leaves verl's dual clip and the critic's
    # weight decay at their defaults: a critic of the prompt alone.
    "sppo": {
        "algorithm": {"advantage": "prompt_value", "aggregation": "token", "dual_clip": 3.0},
        "rollout": {"prompts": 8192, "group_size": 1},
        "actor": {"weight_decay": 0.1},
        "critic": {"lr": 1e-5, "weight_decay": 0.01},
    },
    # arXiv 2607.07508, section 4.1 for mathematics, as others quote it: VAPO's critic without groups, one
    # policy update a rollout. Code has clips of 0.8 and 3.0.
    "sao": {
        "algorithm": {
            "advantage": "gae",
            "lambda_critic": 1.0,
            "lambda_policy": "length_adaptive",
            "alpha": 1.5,
            "old_logprobs": "engine",
            "surrogate": "masked",
            "clip_low": 0.3,
            "clip_high": 5.0,
        },
        "rollout": {"prompts": 128, "group_size": 1},
        "update": {"mini_batch": 128},
        "critic": {"lr": 5e-6, "epochs": 2, "frozen": ["attention"]},
        "value_pretraining": {"steps": 10},
    },
}

# With `schedule.ahead`: the trainer's log-probs are those of newer weights than drew the responses, which
# truncated importance sampling corrects for. Not where the ratio is taken to the engine's own log-probs.
AHEAD_PRESET: dict[str, Any] = {"algorithm": {"mismatch": {"weight": "token"}}}


@dataclass(frozen=True)
class Phase:
    """One phase of a step."""

    name: str  # as in the metric time/<name>
    reads: frozenset[str] = frozenset()  # columns of the batch that must have been written before
    writes: frozenset[str] = frozenset()  # columns that it adds or changes
    on_gpu: frozenset[str] = frozenset()  # tensor groups; others are offloaded before. Empty: nothing moves
    may_write: frozenset[str] = frozenset()  # columns that it adds in some runs

    @cached_property
    def model(self) -> str | None:
        """The model that runs in this phase (actor, critic, reference, reward or teacher); None where none
        does."""
        owners = {group.partition(".")[0] for group in self.on_gpu}
        return None if "engine" in owners else next(iter(owners), None)

    def updates(self, model: str) -> bool:
        """Return whether the model learns; a phase with a model is a forward pass or an update."""
        return f"{model}.gradients" in self.on_gpu

    @cached_property
    def updates_weights(self) -> bool:
        """Return whether any model learns."""
        return any(group.endswith(".gradients") for group in self.on_gpu)


PHASES: dict[str, Phase] = {}


def declare(name: str, *, reads: str = "", writes: str = "", on_gpu: str = "", may_write: str = "") -> Phase:
    """Declare a phase; the names are separated by spaces. Its function has the same name."""
    PHASES[name] = Phase(name, *(frozenset(names.split()) for names in (reads, writes, on_gpu, may_write)))
    return PHASES[name]


ROLLOUT = declare(
    "rollout",
    writes="tokens engine_logprobs policy_version rewards correct truncated group_ids response_index",
    # Where responses were continued under newer weights; where turns have rewards of their own; where the
    # engine's choice of experts was recorded; windows of responses.
    may_write="token_versions turn_rewards routing begun unfinished",
    on_gpu="engine.weights engine.kv_cache",
)
DISTRIBUTE = declare(
    "distribute",
    reads="tokens correct truncated",
    writes="policy_loss_weights nll_loss_weights value_loss_weights",
)
OLD_LOGPROBS = declare(
    "old_logprobs",
    reads="tokens engine_logprobs policy_version policy_loss_weights",
    writes="old_logprobs entropy policy_loss_weights",
    on_gpu="actor.weights",
)
OLD_TOP_K = declare(
    "old_top_k", reads="tokens", writes="old_top_logprobs old_top_tokens", on_gpu="actor.weights"
)
# In no list: the trainer puts it into the first step of each start (`with_parity`).
PARITY = declare(
    "parity",
    reads="tokens engine_logprobs policy_version token_versions old_logprobs",
    on_gpu="actor.weights",
)
REFERENCE_LOGPROBS = declare(
    "reference_logprobs", reads="tokens", writes="ref_logprobs", on_gpu="reference.weights"
)
TEACHER_ADVANTAGES = declare(
    "teacher_advantages", reads="tokens advantages", writes="advantages", on_gpu="teacher.weights"
)
TEACHER_TOP_K = declare(
    "teacher_top_k", reads="tokens", writes="teacher_logprobs teacher_tokens", on_gpu="teacher.weights"
)
REWARD_MODEL = declare("reward_model", reads="tokens rewards", writes="rewards", on_gpu="reward.weights")
VALUES = declare("values", reads="tokens", writes="values", on_gpu="critic.weights")
GROUP_ADVANTAGES = declare("group_advantages", reads="rewards turn_rewards group_ids", writes="advantages")
TRACKED_ADVANTAGES = declare("tracked_advantages", reads="rewards correct", writes="advantages")
RETURN_ADVANTAGES = declare("return_advantages", reads="rewards turn_rewards", writes="advantages")
GAE_ADVANTAGES = declare("gae_advantages", reads="rewards turn_rewards values", writes="advantages returns")
PROMPT_ADVANTAGES = declare("prompt_advantages", reads="rewards correct values", writes="advantages returns")
MONTE_CARLO_RETURNS = declare("monte_carlo_returns", reads="rewards turn_rewards values", writes="returns")
CRITIC_UPDATE = declare(
    "critic_update",
    reads="tokens values returns value_loss_weights",
    on_gpu="critic.weights critic.gradients critic.optimizer",
)
ACTOR_UPDATE = declare(
    "actor_update",
    reads="tokens advantages policy_loss_weights nll_loss_weights",
    on_gpu="actor.weights actor.gradients actor.optimizer",
)
WEIGHT_TRANSFER = declare("weight_transfer", on_gpu="actor.weights engine.weights")
READ_PAIRS = declare("read_pairs", writes="tokens correct truncated")
SUPERVISED_UPDATE = declare(
    "supervised_update",
    reads="tokens nll_loss_weights",
    on_gpu="actor.weights actor.gradients actor.optimizer",
)


# What `watchdog.limits` can limit: phases, and what a run does between them.
WATCHED = (
    *("start", "choose a checkpoint", "resume", *PHASES),
    *("residency", "evaluation", "checkpoint", "export actor", "export critic", "export critic_2"),
)

# Columns that a rollout has for these advantages alone.
OF_ADVANTAGES = {"per_reward": frozenset({"reward_parts"}), "tracked": frozenset({"prompt_uids"})}


def _distribution(config: Config) -> Phase:
    more = {"group_ids"} if config.update.share_prompts else set[str]()
    more |= {"response_index"} if config.critic.count > 1 else set()  # which critic learns from it
    return replace(DISTRIBUTE, reads=DISTRIBUTE.reads | more)


def _of_critics(phase: Phase, config: Config) -> Phase:
    """Return a phase of the critics, with the values of each where there are several."""
    own = frozenset({"critic_values"} if config.critic.count > 1 else ())
    if phase.name == VALUES.name:
        return replace(phase, writes=phase.writes | own)
    return replace(phase, reads=phase.reads | own)


def pretraining_phases(config: Config) -> tuple[Phase, ...]:
    """Return the phases of one step of value pretraining, in order: the policy stands still, the critic is
    fitted to Monte-Carlo returns (VAPO section 4.1)."""
    scored = (REWARD_MODEL,) if config.has_reward_model else ()
    targets = MONTE_CARLO_RETURNS
    if config.values_prompts:
        targets = replace(targets, reads=frozenset({"correct", "values"}))
    values, critic_update = _of_critics(VALUES, config), _of_critics(CRITIC_UPDATE, config)
    return (ROLLOUT, _distribution(config), *scored, values, targets, critic_update)


def training_phases(config: Config) -> tuple[Phase, ...]:
    """Return the phases of one step of the run's main stage, in order."""
    if not config.has_engine:
        return (READ_PAIRS, DISTRIBUTE, SUPERVISED_UPDATE)
    a = config.algorithm
    of_entropy = frozenset({"entropy_weights"} if a.agreement.filter else ())
    uncorrected = frozenset({"uncorrected_weights"} if a.mismatch.enabled else ())
    before: list[Phase] = [ROLLOUT, _distribution(config)]
    more = OF_ADVANTAGES.get(a.advantage, frozenset())
    sources = frozenset({"teachers"} if config.teacher.by_source else ())  # which teacher a response has
    if more or sources:
        before[0] = replace(ROLLOUT, writes=ROLLOUT.writes | more | sources)
    if a.old_logprobs == "trainer":  # else the ratio is taken to the engine's own (SAO)
        before.append(replace(OLD_LOGPROBS, writes=OLD_LOGPROBS.writes | uncorrected))
    if a.dppo.top_k:
        before.append(OLD_TOP_K)
    if a.has_reference:  # the KL to the initial policy: GRPO, REINFORCE++
        shared = config.actor.lora.rank is not None  # it is the actor without its adapters
        on_gpu = OLD_LOGPROBS.on_gpu if shared else REFERENCE_LOGPROBS.on_gpu
        before.append(replace(REFERENCE_LOGPROBS, on_gpu=on_gpu))
    if config.has_reward_model:
        parts = OF_ADVANTAGES["per_reward"] & more  # one of which is its score
        scored = replace(REWARD_MODEL, reads=REWARD_MODEL.reads | parts, writes=REWARD_MODEL.writes | parts)
        before.append(scored)
    kl_columns = {a.old_column, "ref_logprobs"} if a.kl_reward else set()
    whitened = frozenset({"policy_loss_weights"} if a.whiten else ())  # over the tokens that count
    if sources and config.update.share_prompts:
        sources |= {"group_ids"}
    judged = replace(TEACHER_ADVANTAGES, reads=TEACHER_ADVANTAGES.reads | {a.old_column} | sources)
    if config.teacher.top_k:
        judged = replace(TEACHER_TOP_K, reads=TEACHER_TOP_K.reads | sources)
    taught = [judged] if config.has_teacher else []
    if a.advantage == "prompt_value":  # SPPO: from a critic of the prompt
        advantages = replace(PROMPT_ADVANTAGES, reads=PROMPT_ADVANTAGES.reads | whitened)
        before += [VALUES, advantages, *taught, CRITIC_UPDATE]
    elif config.has_critic:  # PPO and VAPO: advantages from a critic, which is updated first
        gae_advantages = replace(GAE_ADVANTAGES, reads=GAE_ADVANTAGES.reads | kl_columns | whitened)
        gae_advantages = _of_critics(gae_advantages, config)
        if config.critic.count > 1:
            reads = gae_advantages.reads | {"policy_loss_weights"} | uncorrected
            gae_advantages = replace(gae_advantages, reads=reads, writes=gae_advantages.writes | of_entropy)
        values, critic_update = _of_critics(VALUES, config), _of_critics(CRITIC_UPDATE, config)
        before += [values, gae_advantages, *taught, critic_update]
    else:  # GRPO and DAPO: advantages within the group; REINFORCE++: none; SPO: by the prompt's history
        of_kind = {"return": RETURN_ADVANTAGES, "tracked": TRACKED_ADVANTAGES}
        advantages = of_kind.get(a.advantage, GROUP_ADVANTAGES)
        normalised = whitened | ({"truncated"} if more and config.reward.overlong.filter else set())
        reads = advantages.reads | kl_columns | more | normalised
        before += [replace(advantages, reads=reads), *taught]
    if config.rollout.window is not None:
        # They see which tokens a step has drawn, and which responses go on in the next one.
        seeing = (DISTRIBUTE, OLD_LOGPROBS, GAE_ADVANTAGES, TEACHER_ADVANTAGES, CRITIC_UPDATE)
        windowed = {phase.name for phase in seeing}
        seen = frozenset({"begun", "unfinished"})
        before = [replace(one, reads=one.reads | seen) if one.name in windowed else one for one in before]
    loss_columns = {a.old_column} | of_entropy | uncorrected | ({"ref_logprobs"} if a.kl_weight else set())
    if a.selects_tokens:  # by numbers that are drawn for each response
        loss_columns |= {"group_ids", "response_index"}
    if a.dppo.top_k:
        loss_columns |= OLD_TOP_K.writes
    if config.teacher.top_k:
        loss_columns |= TEACHER_TOP_K.writes
    actor_update = replace(ACTOR_UPDATE, reads=ACTOR_UPDATE.reads | loss_columns)
    return (*before, actor_update, WEIGHT_TRANSFER)


def replay_phases(config: Config) -> tuple[Phase, ...]:
    """Return the phases of one step of the main stage that is done again, in order: its rollout is read from
    disk, no engine draws it, and none takes the weights."""
    of_step = (phase for phase in training_phases(config) if phase.name != WEIGHT_TRANSFER.name)
    nothing = frozenset[str]()
    return tuple(replace(one, on_gpu=nothing) if one.name == ROLLOUT.name else one for one in of_step)


def with_parity(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Return the phases of a step that samples with PARITY in its place, before any update: behind the
    trainer's log-probs where a phase computes them."""
    before = DISTRIBUTE.name, OLD_LOGPROBS.name
    place = max(i for i, phase in enumerate(phases) if phase.name in before)
    return (*phases[: place + 1], PARITY, *phases[place + 1 :])


def check_phases(phases: Sequence[Phase]) -> None:
    """Raise ValueError for an order that cannot work: a column read that no earlier phase writes or may
    write, an unknown tensor group, or a phase that needs the KV cache and an optimizer on the GPU
    together."""
    written: set[str] = set()
    for phase in phases:
        if missing := phase.reads - written:
            columns = ", ".join(sorted(missing))
            raise ValueError(f"phase {phase.name} reads {columns}, which no earlier phase writes")
        written |= phase.writes | phase.may_write
        if unknown := ", ".join(sorted(phase.on_gpu - frozenset(GROUPS))):
            raise ValueError(f"phase {phase.name} needs {unknown}, which is no tensor group")
        if "engine.kv_cache" in phase.on_gpu and any(name.endswith(".optimizer") for name in phase.on_gpu):
            both = "engine.kv_cache and an optimizer on the device together"
            raise ValueError(f"phase {phase.name} needs {both}")


def never_offloaded(config: Config, *, gpu: bool) -> frozenset[str]:
    """Return the tensor groups that stay on the device for the whole run: all where nothing is offloaded."""
    offloads = gpu if config.residency.offload is None else config.residency.offload
    return frozenset(config.residency.keep if offloads else GROUPS)
