"""Recipes: the order of the phases. What a technique changes inside a phase is a switch of the configuration."""

from __future__ import annotations

from dataclasses import replace

from megarl.config.schema import Config
from megarl.schedule import phases as p
from megarl.schedule.phases import Phase

# GRPO and DAPO: advantages from the group, no critic.
GROUP_POLICY = (p.rollout, p.group_advantages, p.divide, p.old_logprobs, p.actor_update, p.weight_transfer)

# GRPO's KL to the initial policy.
ACTOR_UPDATE_WITH_KL = replace(p.actor_update, reads=p.actor_update.reads | {"ref_logprobs"})
GROUP_POLICY_WITH_KL = (
    p.rollout,
    p.group_advantages,
    p.divide,
    p.old_logprobs,
    p.reference_logprobs,
    ACTOR_UPDATE_WITH_KL,
    p.weight_transfer,
)

# PPO and VAPO: advantages from a critic, which is updated first.
ACTOR_CRITIC = (
    p.rollout,
    p.divide,
    p.old_logprobs,
    p.values,
    p.gae_advantages,
    p.critic_update,
    p.actor_update,
    p.weight_transfer,
)
ACTOR_CRITIC_WITH_KL = (*ACTOR_CRITIC[:3], p.reference_logprobs, *ACTOR_CRITIC[3:-2], ACTOR_UPDATE_WITH_KL, p.weight_transfer)

# VAPO section 4.1: the policy stands still, the critic is fitted to Monte-Carlo returns.
VALUE_PRETRAINING = (p.frozen_rollout, p.divide, p.values, p.monte_carlo_returns, p.critic_update)

# Warm start on given responses.
SUPERVISED = (p.read_pairs, p.divide, p.supervised_update)


def training_phases(config: Config) -> tuple[Phase, ...]:
    """The phases of one step of the run's main stage."""
    if config.recipe == "sft":
        return SUPERVISED
    if config.has_critic:
        return ACTOR_CRITIC_WITH_KL if config.algorithm.kl_weight else ACTOR_CRITIC
    return GROUP_POLICY_WITH_KL if config.algorithm.kl_weight else GROUP_POLICY


def check_columns(phases: tuple[Phase, ...]) -> None:
    """Raises ValueError naming the phase and the column that it reads before any phase has written it."""
    written: set[str] = set()
    for phase in phases:
        missing = phase.reads - written
        if missing:
            raise ValueError(f"phase {phase.name} reads {', '.join(sorted(missing))}, which no earlier phase writes")
        written |= phase.writes
