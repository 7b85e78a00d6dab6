"""Phases of a step: order, conditions, tensor groups on the GPU, batch columns.

megarl/schedule/phases.py has a function of each phase's name. docs/extending.md shows how to add one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from megarl.config.schema import PRETRAINING, SUPERVISED, TRAIN, Config
from megarl.config.schema.residency import TensorGroup

GROUPS: tuple[str, ...] = get_args(TensorGroup)

Condition = Callable[[Config], bool]


@dataclass(frozen=True)
class Phase:
    """One phase of a step.

    name             its function, and the metric time/<name>
    stages           stages that have it
    on_gpu           tensor groups it needs; others are offloaded before it. Empty: nothing moves
    when             condition on the configuration
    first_step_only  runs only in the first step after each start of the program

    `select_phases` fills the others, column names, from COLUMNS:
    reads            written by an earlier phase
    writes           added or changed
    may_write        added in some runs"""

    name: str
    stages: tuple[str, ...] = ()
    on_gpu: frozenset[str] = frozenset()
    when: Condition = lambda config: True
    first_step_only: bool = False
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    may_write: frozenset[str] = frozenset()

    @cached_property
    def model(self) -> str | None:
        """The model that runs; None in phases of the engine or without a model."""
        owners = {group.partition(".")[0] for group in self.on_gpu}
        return None if "engine" in owners else next(iter(owners), None)

    def updates(self, model: str) -> bool:
        return f"{model}.gradients" in self.on_gpu

    @cached_property
    def updates_weights(self) -> bool:
        return any(group.endswith(".gradients") for group in self.on_gpu)


# Phases that other modules treat specially.
ROLLOUT, PARITY, WEIGHT_TRANSFER = "rollout", "parity", "weight_transfer"

# Values of `stages`.
SFT, PRETRAIN, RL = (SUPERVISED,), (PRETRAINING,), (TRAIN,)
SAMPLED = PRETRAIN + RL
ALL = SFT + SAMPLED

# Values of `on_gpu`.
NOTHING = frozenset[str]()
ENGINE = frozenset({"engine.weights", "engine.kv_cache"})
ACTOR = frozenset({"actor.weights"})
CRITIC = frozenset({"critic.weights"})
REFERENCE = frozenset({"reference.weights"})
REWARD = frozenset({"reward.weights"})
TEACHER = frozenset({"teacher.weights"})
ACTOR_TRAINING = ACTOR | {"actor.gradients", "actor.optimizer"}
CRITIC_TRAINING = CRITIC | {"critic.gradients", "critic.optimizer"}
TRANSFER = ACTOR | {"engine.weights"}


# Values of `when`.
def has_critics(config: Config) -> bool:
    """Return whether there are several value models (AsyPPO)."""
    return config.critic.count > 1 and config.has_critic


def computes_advantages(phase: str) -> Condition:
    return lambda config: config.algorithm.advantage_method.phase == phase


def has_reward_parts(config: Config) -> bool:
    """Return whether parts of the reward are normalised separately (GDPO)."""
    return "reward_parts" in config.algorithm.advantage_method.columns


def uses_old_logprobs(config: Config) -> bool:
    return config.algorithm.old_logprobs == "trainer"


def uses_engine_logprobs(config: Config) -> bool:
    return config.algorithm.old_logprobs == "engine"


def compares_engine(config: Config) -> bool:
    return config.guard.parity != "none"


def has_reference_in_actor(config: Config) -> bool:
    """Return whether the reference is the actor without its LoRA adapters."""
    return config.algorithm.has_reference and config.actor.lora.rank is not None


def teaches(effect: str, *, as_actor: bool | None = None) -> Condition:
    """Return the condition of a teacher with this effect.

    as_actor: whether it has the actor's current weights, which need no other tensor group; None: any"""
    return lambda c: (
        c.has_teacher and c.teacher.effect == effect and as_actor in (None, c.teacher.weights == "current")
    )


def has_teacher_by_source(config: Config) -> bool:
    """Return whether a prompt's source selects its teacher."""
    return bool(config.teacher.by_source) and config.has_teacher


def corrects_mismatch(config: Config) -> bool:
    """Return whether trainer / engine ratios weight the policy loss."""
    return config.algorithm.mismatch.enabled


def filters_entropy(config: Config) -> bool:
    """Return whether tokens on which critics disagree have no entropy term (AsyPPO)."""
    return bool(config.algorithm.agreement.filter)


# fmt: off
PHASES: tuple[Phase, ...] = (
    #     name                  stages    on the GPU       when
    Phase("read_pairs",          SFT),
    Phase("rollout",             SAMPLED,  ENGINE),
    Phase("distribute",          ALL),
    Phase("old_logprobs",        RL,       ACTOR,           uses_old_logprobs),
    Phase("parity",              SAMPLED,  ACTOR,           compares_engine, first_step_only=True),
    Phase("old_top_k",           RL,       ACTOR,           lambda c: c.algorithm.dppo.top_k > 0),
    Phase("reference_logprobs",  RL,       REFERENCE,       lambda c: c.has_group("reference.weights")),
    Phase("reference_logprobs",  RL,       ACTOR,           has_reference_in_actor),
    Phase("reward_model",        SAMPLED,  REWARD,          lambda c: c.has_reward_model),
    Phase("values",              SAMPLED,  CRITIC,          lambda c: c.has_critic),
    Phase("monte_carlo_returns", PRETRAIN),
    Phase("group_advantages",    RL,       NOTHING,         computes_advantages("group_advantages")),
    Phase("tracked_advantages",  RL,       NOTHING,         computes_advantages("tracked_advantages")),
    Phase("return_advantages",   RL,       NOTHING,         computes_advantages("return_advantages")),
    Phase("gae_advantages",      RL,       NOTHING,         computes_advantages("gae_advantages")),
    Phase("optimal_token_advantages", RL,  NOTHING,         computes_advantages("optimal_token_advantages")),
    Phase("prompt_advantages",   RL,       NOTHING,         computes_advantages("prompt_advantages")),
    Phase("critic_agreement",    RL,       NOTHING,         has_critics),
    Phase("teacher_advantages",  RL,       TEACHER,         teaches("advantages", as_actor=False)),
    Phase("teacher_advantages",  RL,       ACTOR,           teaches("advantages", as_actor=True)),
    Phase("teacher_logprobs",    RL,       TEACHER,         teaches("logprobs", as_actor=False)),
    Phase("teacher_logprobs",    RL,       ACTOR,           teaches("logprobs", as_actor=True)),
    Phase("teacher_top_k",       RL,       TEACHER,         teaches("top_k", as_actor=False)),
    Phase("teacher_top_k",       RL,       ACTOR,           teaches("top_k", as_actor=True)),
    Phase("critic_update",       SAMPLED,  CRITIC_TRAINING, lambda c: c.has_critic),
    Phase("actor_update",        RL,       ACTOR_TRAINING),
    Phase("supervised_update",   SFT,      ACTOR_TRAINING),
    Phase("weight_transfer",     RL,       TRANSFER),
)
# fmt: on

# Keys of `watchdog.limits`.
WATCHED = (
    *("start", "choose a checkpoint", "resume", *dict.fromkeys(phase.name for phase in PHASES)),
    *("residency", "evaluation", "checkpoint", "export actor", "export critic", "export critic_2"),
)


@dataclass(frozen=True)
class Columns:
    """Columns of the batch that phases read or write, if condition and stages apply.

    Names are separated by spaces. A phase may have several rows."""

    phases: str
    reads: str = ""
    writes: str = ""
    may_write: str = ""
    when: Condition = lambda config: True
    stages: tuple[str, ...] = ALL


WITH_KL_REWARD = "group_advantages return_advantages gae_advantages optimal_token_advantages"
TEACHERS = "teacher_advantages teacher_logprobs teacher_top_k"
ADVANTAGES = f"{WITH_KL_REWARD} tracked_advantages prompt_advantages"

COLUMNS: tuple[Columns, ...] = (
    Columns("read_pairs", writes="tokens correct truncated"),
    Columns(
        "rollout",
        writes="tokens engine_logprobs policy_version rewards correct truncated group_ids response_index",
        # continued responses, turn rewards, recorded experts, windows, sampling sets
        may_write="token_versions turn_rewards routing prefix_tokens unfinished sampling_sets",
    ),
    Columns("rollout", writes="reward_parts", when=has_reward_parts),
    Columns(
        "rollout", writes="prompt_uids", when=lambda c: "prompt_uids" in c.algorithm.advantage_method.columns
    ),
    Columns("rollout", writes="teachers", when=has_teacher_by_source, stages=RL),
    Columns("rollout", writes="teacher_prompts", when=lambda c: c.has_self_teacher, stages=RL),
    Columns(
        "distribute",
        reads="tokens correct truncated",
        writes="policy_loss_weights nll_loss_weights value_loss_weights",
    ),
    Columns("distribute", reads="group_ids", when=lambda c: c.update.share_prompts, stages=SAMPLED),
    Columns("distribute", reads="response_index", when=has_critics),  # selects the critic that it trains
    Columns(
        "old_logprobs",
        reads="tokens engine_logprobs policy_version policy_loss_weights",
        writes="old_logprobs entropy policy_loss_weights",
    ),
    Columns("old_logprobs", writes="uncorrected_weights", when=corrects_mismatch),
    Columns(
        "old_logprobs", writes="squared_probs", when=lambda c: c.algorithm.advantage_method.squared_probs
    ),
    Columns("parity", reads="tokens engine_logprobs policy_version token_versions"),
    Columns("parity", reads="old_logprobs", when=uses_old_logprobs, stages=RL),
    Columns("old_top_k", reads="tokens", writes="old_top_logprobs old_top_tokens"),
    Columns("reference_logprobs", reads="tokens", writes="ref_logprobs"),
    Columns("reward_model", reads="tokens rewards", writes="rewards"),
    Columns("reward_model", reads="reward_parts", writes="reward_parts", when=has_reward_parts),
    Columns("values", reads="tokens", writes="values"),
    Columns("values", writes="critic_values", when=has_critics),
    Columns("monte_carlo_returns", reads="values", writes="returns"),
    Columns("monte_carlo_returns", reads="correct", when=lambda c: c.has_prompt_critic),
    Columns("monte_carlo_returns", reads="rewards turn_rewards", when=lambda c: not c.has_prompt_critic),
    Columns("group_advantages", reads="rewards turn_rewards group_ids", writes="advantages"),
    Columns("group_advantages", reads="reward_parts", when=has_reward_parts),
    Columns("tracked_advantages", reads="rewards correct prompt_uids", writes="advantages"),
    Columns(
        "group_advantages tracked_advantages",
        reads="truncated",
        when=lambda c: c.reward.overlong.filter,
    ),
    Columns("return_advantages", reads="rewards turn_rewards", writes="advantages"),
    Columns("gae_advantages", reads="rewards turn_rewards values", writes="advantages returns"),
    Columns(
        "optimal_token_advantages",
        reads="rewards turn_rewards group_ids old_logprobs squared_probs",
        writes="advantages",
    ),
    Columns("critic_agreement", reads="advantages critic_values policy_loss_weights", writes="advantages"),
    Columns("critic_agreement", reads="uncorrected_weights", when=corrects_mismatch),
    Columns("critic_agreement", writes="entropy_weights", when=filters_entropy),
    Columns("prompt_advantages", reads="rewards correct values", writes="advantages returns"),
    Columns(ADVANTAGES, reads="policy_loss_weights", when=lambda c: c.algorithm.whiten),
    Columns(
        WITH_KL_REWARD,
        reads="old_logprobs ref_logprobs",
        when=lambda c: c.algorithm.kl_reward > 0 and uses_old_logprobs(c),
    ),
    Columns(
        WITH_KL_REWARD,
        reads="engine_logprobs ref_logprobs",
        when=lambda c: c.algorithm.kl_reward > 0 and uses_engine_logprobs(c),
    ),
    Columns("teacher_advantages", reads="tokens advantages", writes="advantages"),
    Columns("teacher_top_k", reads="tokens", writes="teacher_logprobs teacher_tokens"),
    Columns("teacher_logprobs", reads="tokens", writes="teacher_logprobs"),
    Columns(
        "teacher_logprobs teacher_top_k",
        reads="advantages",
        writes="advantages",
        when=lambda c: c.teacher.alone,
    ),
    Columns(TEACHERS, reads="teachers", when=has_teacher_by_source),
    Columns(TEACHERS, reads="teacher_prompts correct group_ids", when=lambda c: c.has_self_teacher),
    Columns(
        TEACHERS,
        reads="sampling_sets",
        when=lambda c: has_teacher_by_source(c) and c.rollout.sampling_replay,
    ),
    Columns(
        TEACHERS,
        reads="group_ids",
        when=lambda c: has_teacher_by_source(c) and c.update.share_prompts,
    ),
    Columns("critic_update", reads="tokens values returns value_loss_weights"),
    Columns("critic_update", reads="critic_values", when=has_critics),
    Columns("actor_update", reads="tokens advantages policy_loss_weights nll_loss_weights"),
    Columns("actor_update", reads="uncorrected_weights", when=corrects_mismatch),
    Columns("actor_update", reads="entropy_weights", when=filters_entropy),
    Columns("actor_update", reads="ref_logprobs", when=lambda c: c.algorithm.kl_weight > 0),
    # seeds of a random choice
    Columns(
        "actor_update",
        reads="group_ids response_index",
        when=lambda c: bool(c.algorithm.policy_loss.selector),
    ),
    Columns(
        "actor_update", reads="old_top_logprobs old_top_tokens", when=lambda c: c.algorithm.dppo.top_k > 0
    ),
    Columns("actor_update", reads="teacher_logprobs teacher_tokens", when=teaches("top_k")),
    Columns("actor_update", reads="teacher_logprobs", when=teaches("logprobs")),
    Columns("teacher_advantages actor_update", reads="old_logprobs", when=uses_old_logprobs),
    Columns("teacher_advantages actor_update", reads="engine_logprobs", when=uses_engine_logprobs),
    Columns("supervised_update", reads="tokens nll_loss_weights"),
    Columns(
        "distribute old_logprobs gae_advantages teacher_advantages critic_update",
        reads="prefix_tokens unfinished",
        when=lambda c: c.rollout.window is not None,
        stages=RL,
    ),
)


COLUMNS_BY_PHASE = {
    phase.name: [row for row in COLUMNS if phase.name in row.phases.split()] for phase in PHASES
}


def select_stages(config: Config) -> tuple[str, ...]:
    pretrains = config.has_critic and config.value_pretraining.steps > 0
    return (PRETRAINING, config.main_stage) if pretrains else (config.main_stage,)


def select_phases(config: Config, stage: str | None = None, *, first_step: bool = False) -> tuple[Phase, ...]:
    """Return the phases of a step in order, with their columns. Default: a later step of the main stage."""
    stage = config.main_stage if stage is None else stage
    return tuple([add_columns(phase, config, stage) for phase in find_phases(config, stage, first_step)])


def find_phases(config: Config, stage: str, first_step: bool = False) -> list[Phase]:
    """Return the phases of a step in order, without their columns."""
    if stage == PRETRAINING and not config.has_critic:
        return []
    phases = [
        phase for phase in PHASES if stage in phase.stages and (first_step or not phase.first_step_only)
    ]
    return [phase for phase in phases if phase.when(config)]


def add_columns(phase: Phase, config: Config, stage: str) -> Phase:
    rows = [row for row in COLUMNS_BY_PHASE[phase.name] if stage in row.stages and row.when(config)]
    reads, writes, may_write = (
        frozenset(name for row in rows for name in getattr(row, kind).split())
        for kind in ("reads", "writes", "may_write")
    )
    return replace(phase, reads=reads, writes=writes, may_write=may_write)


def replay_phases(config: Config) -> tuple[Phase, ...]:
    """Return the phases of `megarl replay`, which reads the rollout from disk and has no engine."""
    return tuple(
        replace(phase, on_gpu=NOTHING) if phase.name == ROLLOUT else phase
        for phase in select_phases(config)
        if phase.name != WEIGHT_TRANSFER
    )


def check_phases(phases: Sequence[Phase]) -> None:
    """Check that phases can run in this order.

    Raises ValueError if a phase reads a column that no earlier phase writes. Also if it needs an unknown
    tensor group, or the KV cache and an optimizer together."""
    columns: set[str] = set()
    for phase in phases:
        if missing_columns := ", ".join(sorted(phase.reads - columns)):
            raise ValueError(f"phase {phase.name} reads {missing_columns}, which no earlier phase writes")
        columns |= phase.writes | phase.may_write
        if unknown_groups := ", ".join(sorted(phase.on_gpu - frozenset(GROUPS))):
            raise ValueError(f"phase {phase.name} needs {unknown_groups}, which is no tensor group")
        if "engine.kv_cache" in phase.on_gpu and any(name.endswith(".optimizer") for name in phase.on_gpu):
            conflict = "engine.kv_cache and an optimizer on the device together"
            raise ValueError(f"phase {phase.name} needs {conflict}")


def resident_groups(config: Config, phases: Sequence[Phase]) -> list[frozenset[str]]:
    """Return the tensor groups on a trainer's GPU in each phase, for steps after the first."""
    trainer_groups = frozenset(group for group in get_args(TensorGroup) if config.has_group(group))
    remote_groups = ENGINE if config.parallel.rollout_ranks else NOTHING
    if remote_groups or config.rollout.capabilities.remote:
        trainer_groups -= ENGINE
    fixed_groups = trainer_groups & never_offloaded(config, gpu=config.parallel.device != "cpu")
    resident, groups_by_phase = fixed_groups, list[frozenset[str]]()
    for phase in (*phases, *phases):  # a second step starts with the first one's last groups
        if needed_groups := phase.on_gpu - remote_groups:
            resident = fixed_groups | (needed_groups & trainer_groups)
        groups_by_phase.append(resident)
    return groups_by_phase[len(phases) :]


def never_offloaded(config: Config, *, gpu: bool) -> frozenset[str]:
    """Return the tensor groups that always stay on the GPU."""
    offloads = gpu if config.residency.offload is None else config.residency.offload
    return frozenset(config.residency.keep if offloads else GROUPS)
