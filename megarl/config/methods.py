"""Registry of policy losses and advantages, which checks and planner read without torch.

docs/extending.md shows how to add one."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

PolicyLossName = Literal[
    "ppo", "gspo", "cispo", "masked", "dppo_tv", "dppo_kl", "sapo", "clip_cov", "kl_cov", "fipo"
]  # fmt: skip

AdvantageName = Literal[
    "group",
    "group_mean",
    "leave_one_out",
    "per_reward",
    "tracked",
    "return",
    "gae",
    "prompt_value",
    "optimal_token",
]


@dataclass(frozen=True)
class PolicyLoss:
    """One value of `algorithm.surrogate`.

    function       module:function of its `Surrogate` (algorithms/losses.py)
    options        keys of `algorithm` that are further arguments, named by their last part
    selector       module:function that selects tokens of a mini-batch, for `Tokens.selected`
    has_dual_clip  whether `algorithm.dual_clip` applies"""

    function: str
    options: tuple[str, ...] = ()
    selector: str = ""
    has_dual_clip: bool = False


POLICY_LOSSES: dict[PolicyLossName, PolicyLoss] = {
    "ppo": PolicyLoss("megarl.algorithms.losses:ppo", has_dual_clip=True),
    "gspo": PolicyLoss("megarl.algorithms.methods.gspo:gspo", has_dual_clip=True),
    "cispo": PolicyLoss("megarl.algorithms.methods.cispo:cispo"),
    "masked": PolicyLoss("megarl.algorithms.methods.sao:masked"),
    "dppo_tv": PolicyLoss("megarl.algorithms.methods.dppo:dppo_tv", options=("dppo.ratio_cap",)),
    "dppo_kl": PolicyLoss("megarl.algorithms.methods.dppo:dppo_kl", options=("dppo.ratio_cap",)),
    "sapo": PolicyLoss(
        "megarl.algorithms.methods.sapo:sapo", options=("sapo.tau_positive", "sapo.tau_negative")
    ),
    "clip_cov": PolicyLoss(
        "megarl.algorithms.methods.covariance:clip_cov",
        selector="megarl.training.methods.covariance:select_clip_cov",
    ),
    "kl_cov": PolicyLoss(
        "megarl.algorithms.methods.covariance:kl_cov",
        options=("covariance.kl_weight",),
        selector="megarl.training.methods.covariance:select_kl_cov",
    ),
    "fipo": PolicyLoss(
        "megarl.algorithms.methods.fipo:fipo",
        options=("fipo.half_life", "fipo.low", "fipo.high", "fipo.limit"),
        has_dual_clip=True,
    ),
}


@dataclass(frozen=True)
class Advantage:
    """One value of `algorithm.advantage`.

    phase           phase that computes it (config/phases.py)
    function        module:function that the phase calls. For group_advantages it maps `Responses`
                    (algorithms/advantages.py) to one advantage a response
    compares_group  whether an advantage depends on the group's other responses
    critic          input of the critic; "": no critic
    columns         further rollout columns that it reads
    squared_probs   whether it reads the old policy's sum of squared probabilities, column squared_probs
    returns         module:function of targets in value pretraining; "": Monte-Carlo returns
    states          state between steps: (name in a checkpoint, module:function that makes it from
                    `algorithm`)"""

    phase: str = "group_advantages"
    function: str = ""
    compares_group: bool = False
    critic: Literal["", "responses", "prompts"] = ""
    columns: tuple[str, ...] = ()
    squared_probs: bool = False
    returns: str = ""
    states: tuple[tuple[str, str], ...] = ()


ADVANTAGES: dict[AdvantageName, Advantage] = {
    "group": Advantage(function="megarl.algorithms.advantages:group_advantages", compares_group=True),
    "group_mean": Advantage(function="megarl.algorithms.methods.dr_grpo:group_mean", compares_group=True),
    "leave_one_out": Advantage(function="megarl.algorithms.methods.rloo:leave_one_out", compares_group=True),
    "per_reward": Advantage(
        function="megarl.algorithms.methods.gdpo:per_reward_advantages",
        compares_group=True,
        columns=("reward_parts",),
    ),
    "tracked": Advantage(
        "tracked_advantages",
        "megarl.training.methods.spo:add_tracked_advantages",
        columns=("prompt_uids",),
        states=(("tracker", "megarl.training.methods.spo:make_tracker"),),
    ),
    "return": Advantage("return_advantages"),
    "gae": Advantage("gae_advantages", critic="responses"),
    "prompt_value": Advantage(
        "prompt_advantages",
        "megarl.training.methods.sppo:add_prompt_advantages",
        critic="prompts",
        returns="megarl.training.methods.sppo:add_prompt_returns",
    ),
    "optimal_token": Advantage(
        "optimal_token_advantages",
        "megarl.training.methods.otb:add_optimal_token_advantages",
        compares_group=True,
        squared_probs=True,
    ),
}

# Functions of phase gae_advantages, without and with `rollout.window`.
GAE = "megarl.training.columns:add_gae"
WINDOW_GAE = "megarl.training.methods.tppo:add_window_gae"
# Function of phase critic_agreement.
CRITIC_AGREEMENT = "megarl.training.methods.asyppo:add_agreement"


def load_function(path: str) -> Any:
    """Import a module:function."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
