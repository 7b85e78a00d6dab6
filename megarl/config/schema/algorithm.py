"""Section `algorithm`."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Literal, TypeVar

from pydantic import create_model

from megarl.config.methods import (
    ADVANTAGES,
    POLICY_LOSSES,
    Advantage,
    AdvantageName,
    Option,
    PolicyLoss,
    PolicyLossName,
    method_options,
)
from megarl.config.schema.section import Section, field, section


class MismatchConfig(Section):
    """Corrections for the difference between the engine's and the trainer's probabilities.

    The ratio trainer / engine scales token weights of policy loss and KL term, not denominators."""

    weight: Literal["none", "token", "sequence"] = field(
        "none",
        "truncated importance sampling: each token by min(ratio, cap), "
        "with the ratio of the token, or the product over its response",
        source="truncated importance sampling (Ionides 2008); none in DAPO and VAPO",
    )
    cap: float = field(2.0, "largest importance weight", gt=0)
    mask: Literal["none", "token", "sequence"] = field(
        "none",
        "leave out tokens with a ratio outside [mask_low, mask_high], or responses with a "
        "geometric mean of ratios outside",
        source="none in DAPO and VAPO",
    )
    mask_low: float = field(0.5, "smallest ratio that is kept", ge=0)
    mask_high: float = field(2.0, "largest ratio that is kept; a geometric mean wants about 1.01", gt=0)

    @property
    def enabled(self) -> bool:
        return self.weight != "none" or self.mask != "none"


class DppoConfig(Section):
    """DPPO; clip_low and clip_high limit probabilities (dppo_tv) or divergence (dppo_kl)."""

    top_k: int = field(
        0,
        "top tokens of pi_old that the divergence keeps separate, in addition to the sampled one; 0: the "
        "sampled token against all others",
        "tokens",
        "arXiv 2602.04879, DPPO-TopK: 20",
        ge=0,
    )


class AgreementConfig(Section):
    """Effects of critics' agreement, as shares of a step's tokens."""

    mask: float = field(
        0.0,
        "share of tokens with the closest values, whose advantage is 0",
        "",
        "AsyPPO, arXiv 2510.01656; 0.1 in a reimplementation",
        ge=0,
        lt=1,
    )
    filter: float = field(
        0.0,
        "share of tokens with the most different values, which the entropy term leaves out",
        "",
        "AsyPPO; 0.2 in a reimplementation",
        ge=0,
        lt=1,
    )


T = TypeVar("T", bound=Section)


def with_method_options(algorithm: type[T]) -> type[T]:
    """Add a section for the options of each method, or add them to the section of that name."""
    options_by_section: dict[str, dict[str, Any]] = {}
    for option, _, _ in method_options():
        name, _, key = option.key.partition(".")
        declared = field(option.default, option.meaning, option.unit, option.source, **option.bounds)
        options_by_section.setdefault(name, {})[key] = (type(option.default), declared)
    sections: dict[str, Any] = {}
    for name, options in options_by_section.items():
        known = algorithm.model_fields.get(name)
        base = Section if known is None else type(known.default)
        kind = create_model(
            f"{name.title().replace('_', '')}Config",
            __base__=base,
            __module__=__name__,
            __doc__=base.__doc__ if known else f"Options of the methods {name}.",
            **options,
        )
        globals()[kind.__name__] = kind  # pickle finds a class by its module and name
        sections[name] = (kind, section(kind))
    return create_model(
        algorithm.__name__, __base__=algorithm, __module__=__name__, __doc__=algorithm.__doc__, **sections
    )


def declare_switch(table: dict[str, PolicyLoss] | dict[str, Advantage], default: str) -> Any:
    """Declare a key that selects a row of a table."""
    names_by_meaning: dict[str, list[str]] = {}
    for name, row in table.items():
        names_by_meaning.setdefault(row.meaning, []).append(name)
    meanings = (f"{', '.join(names)}: {meaning}" for meaning, names in names_by_meaning.items())
    sources = dict.fromkeys(row.source for row in table.values())
    return field(default, "; ".join(meanings), source="; ".join(sources))


@with_method_options
class AlgorithmConfig(Section):
    """Advantages, policy loss and regularization."""

    advantage: AdvantageName = declare_switch(ADVANTAGES, "group")
    tracker_rho: float = field(
        0.875,
        "advantage tracked: factor of a prompt's earlier results when it is answered again",
        source="SPO: 0.875 to 0.96, by how far the policy has moved",
        gt=0,
        le=1,
    )
    gamma: float = field(1.0, "discount", source="VAPO section 2", gt=0, le=1)
    lambda_critic: float = field(
        1.0,
        "lambda of value targets; 1: Monte-Carlo returns",
        "",
        "VAPO section 4.1, decoupled GAE",
        ge=0,
        le=1,
    )
    lambda_policy: float | Literal["length_adaptive"] = field(
        0.95,
        "lambda of the policy's advantages, or length_adaptive: 1 - 1 / (alpha * length), clamped to [0, 1]",
        source="VC-PPO 0.95; VAPO eq. 5",
    )
    alpha: float = field(0.05, "alpha of the length-adaptive lambda", source="VAPO eq. 5; SAO: 1.5", gt=0)
    lambda_floor: float = field(
        0.0, "lowest length-adaptive lambda", "", "T-PPO, arXiv 2506.15050: 0.95", ge=0, le=1
    )
    window_tail: int = field(
        0,
        "last tokens of an unfinished window (rollout.window) whose advantage is 0, as little is known of "
        "the tokens that follow",
        "tokens",
        "T-PPO's implementation: 8",
        ge=0,
    )
    whiten: bool = field(
        False, "whiten advantages over the tokens of the step that count in the loss", source="REINFORCE++"
    )
    surrogate: PolicyLossName = declare_switch(POLICY_LOSSES, "ppo")
    old_logprobs: Literal["trainer", "engine"] = field(
        "trainer",
        "pi_old of the ratio: the trainer computes it before the updates, or the engine's log-probs of the "
        "sampling are used, which saves that pass",
        source="engine: SAO",
    )
    clip_low: float = field(0.2, "epsilon_low; 1: none", source="DAPO eq. 10, VAPO eq. 8", gt=0, le=1)
    clip_high: float = field(0.2, "epsilon_high; clip-higher: 0.28", "", "DAPO eq. 10, VAPO eq. 8", gt=0)
    dual_clip: float = field(
        0.0, "c: a negative advantage's loss is at most c |A|; 0: off", "", "arXiv 1912.09729: 3", ge=0
    )
    aggregation: Literal["token", "sample", "constant"] = field(
        "token",
        "mean over the mini-batch's tokens, over responses' means, "
        "or over responses' sums / rollout.max_response_tokens",
        source="VAPO eq. 7 and 6; Dr. GRPO",
    )
    nll_weight: float = field(0.0, "mu, of the positive-example LM loss", source="VAPO eq. 10: 0.1", ge=0)
    kl_weight: float = field(
        0.0, "beta, of the KL to the initial policy in the loss", "", "GRPO; 0 in DAPO and VAPO", ge=0
    )
    kl_estimator: Literal["k2", "k3"] = field(
        "k3",
        "estimate of that KL by the sampled token, d = log pi - log pi_ref; k3: exp(-d) - 1 + d, "
        "k2: d^2 / 2, whose gradient is on average that of KL(pi || pi_ref)",
        source="k3: GRPO; k2: REINFORCE++ with baseline, as in OpenRLHF",
    )
    kl_reward: float = field(
        0.0,
        "beta, of the KL to the initial policy in each token's reward",
        "",
        "VAPO eq. 1, whose beta is 0",
        ge=0,
    )
    entropy_weight: float = field(
        0.0, "factor of the policy's entropy, which is maximised", "", "none in DAPO and VAPO", ge=0
    )
    value_clip: float = field(0.0, "largest move of a value before its loss is clipped; 0: off", ge=0)
    mismatch: MismatchConfig = section(MismatchConfig)
    dppo: DppoConfig = section(DppoConfig)
    agreement: AgreementConfig = section(AgreementConfig)

    @property
    def advantage_method(self) -> Advantage:
        return ADVANTAGES[self.advantage]

    @property
    def policy_loss(self) -> PolicyLoss:
        return POLICY_LOSSES[self.surrogate]

    def arguments(self, options: Iterable[Option]) -> dict[str, float]:
        """Return the values of options, by the names of a method's arguments."""
        return {option.key.rpartition(".")[2]: attrgetter(option.key)(self) for option in options}

    @property
    def has_reference(self) -> bool:
        """Return whether a KL term compares the policy with the initial one."""
        return bool(self.kl_weight or self.kl_reward)

    @property
    def old_column(self) -> str:
        return "engine_logprobs" if self.old_logprobs == "engine" else "old_logprobs"
