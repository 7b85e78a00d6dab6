"""Section `algorithm`."""

from __future__ import annotations

from operator import attrgetter
from typing import Literal

from megarl.config.methods import (
    ADVANTAGES,
    POLICY_LOSSES,
    Advantage,
    AdvantageName,
    PolicyLoss,
    PolicyLossName,
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

    ratio_cap: float = field(20.0, "largest ratio that weights a token", "", "arXiv 2602.04879", gt=0)
    top_k: int = field(
        0,
        "top tokens of pi_old that the divergence keeps separate, in addition to the sampled one; 0: the "
        "sampled token against all others",
        "tokens",
        "arXiv 2602.04879, DPPO-TopK: 20",
        ge=0,
    )


class SapoConfig(Section):
    """Slopes of SAPO's gate."""

    tau_positive: float = field(1.0, "slope for tokens of positive advantage", source="SAPO", gt=0)
    tau_negative: float = field(
        1.05, "slope for the other tokens, whose gradient falls off faster", source="SAPO", gt=0
    )


class CovarianceConfig(Section):
    """Token selection of Clip-Cov and KL-Cov by (advantage - mean) * (log-prob - mean)."""

    share: float = field(
        2e-4,
        "share of tokens that is selected, at least one; KL-Cov of 7B: 2e-3",
        "",
        "arXiv 2505.22617",
        gt=0,
        le=1,
    )
    low: float = field(1.0, "clip_cov: selected covariances are above this", source="arXiv 2505.22617")
    high: float = field(5.0, "clip_cov: selected covariances are below this", source="arXiv 2505.22617")
    kl_weight: float = field(1.0, "kl_cov: of |log ratio|", "", "arXiv 2505.22617", ge=0)


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


class FipoConfig(Section):
    """Factors of FIPO's advantages."""

    half_life: float = field(
        32.0, "distance at which a later token counts half", "tokens", "FIPO's script", gt=0
    )
    low: float = field(1.0, "smallest factor; FIPO of 7B: 0.8", "", "FIPO's script", gt=0)
    high: float = field(1.2, "largest factor", "", "FIPO's script", gt=0)
    limit: float = field(10.0, "tokens of a larger ratio are left out of the sum", "", "FIPO's script", gt=1)


class AlgorithmConfig(Section):
    """Advantages, policy loss and regularization."""

    advantage: AdvantageName = field(
        "group",
        "gae: by a critic; group: (reward - the group's mean) / the group's standard deviation; group_mean: "
        "without that division; leave_one_out: reward minus the mean of the group's other responses; "
        "return: the return alone; "
        "per_reward: group for each part of the reward, their sum divided by the batch's standard deviation; "
        "tracked: reward minus the prompt's running success rate, normalised over the batch; "
        "prompt_value: reward minus the value that a critic predicts from the prompt alone; "
        "optimal_token: rewards to go minus the group's baseline of least variance at the token's position",
        source="DAPO eq. 9; Dr. GRPO; RLOO; REINFORCE++; VAPO eq. 3; GDPO; SPO; SPPO; OTB",
    )
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
    surrogate: PolicyLossName = field(
        "ppo",
        "ppo: clipped; gspo: with one ratio a sequence; cispo: clipped ratio times log-prob, no gradient "
        "through it; masked: tokens outside the interval have no gradient, on both sides; dppo_tv, dppo_kl: "
        "bounded by how far probabilities moved; sapo: a smooth gate; clip_cov, kl_cov: tokens of high "
        "covariance left out or held back; fipo: ppo, advantages by how the rest of the response moved",
        source="DAPO eq. 8, VAPO eq. 8; GSPO eq. 5; CISPO eq. 4; SAO; DPPO; SAPO; arXiv 2505.22617; FIPO",
    )
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
    sapo: SapoConfig = section(SapoConfig)
    covariance: CovarianceConfig = section(CovarianceConfig)
    fipo: FipoConfig = section(FipoConfig)
    agreement: AgreementConfig = section(AgreementConfig)

    @property
    def compares(self) -> bool:
        """Return whether an advantage depends on the group's other responses."""
        return self.advantage_method.compares_group

    @property
    def advantage_method(self) -> Advantage:
        return ADVANTAGES[self.advantage]

    @property
    def policy_loss(self) -> PolicyLoss:
        return POLICY_LOSSES[self.surrogate]

    @property
    def policy_loss_options(self) -> dict[str, float]:
        return {key.rpartition(".")[2]: attrgetter(key)(self) for key in self.policy_loss.options}

    @property
    def has_reference(self) -> bool:
        """Return whether a KL term compares the policy with the initial one."""
        return bool(self.kl_weight or self.kl_reward)

    @property
    def old_column(self) -> str:
        return "engine_logprobs" if self.old_logprobs == "engine" else "old_logprobs"
