"""The registry of methods: for each policy loss its function, its options and what else it needs.

Checks and planner read it without torch. A new policy loss is a file in algorithms/methods, its name in
`PolicyLossName` and a row here.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

PolicyLossName = Literal[
    "ppo", "gspo", "cispo", "masked", "dppo_tv", "dppo_kl", "sapo", "clip_cov", "kl_cov", "fipo"
]  # fmt: skip


@dataclass(frozen=True)
class PolicyLoss:
    """One value of `algorithm.surrogate`.

    function       its `Surrogate` (algorithms/losses.py), as module:function
    options        keys of `algorithm` that the function also takes, as arguments named by the keys' last part
    selector       selects tokens of the whole mini-batch before each update, as module:function; the loss
                   reads them as `Tokens.selected`
    has_dual_clip  whether `algorithm.dual_clip` applies to it
    """

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


def load_function(path: str) -> Any:
    """Import and return the function at `path`, a row's module:function."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
