"""Registry of policy losses and advantages, which schema, checks and planner read without torch.

A row declares everything that megarl knows of a method outside its file: names, options, requirements.
docs/extending.md shows how to add one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias


@dataclass(frozen=True)
class Option:
    """One key of a method, from which the schema builds a section of `algorithm`.

    key         section.name; the name is the argument of the method's function
    default     its type is the key's
    meaning     for `megarl config docs`, as source and unit
    gt, ge, le  range of valid values"""

    key: str
    default: float
    meaning: str
    source: str = "our choice"
    unit: str = ""
    gt: float | None = None
    ge: float | None = None
    le: float | None = None

    @property
    def bounds(self) -> dict[str, float]:
        limits = {name: getattr(self, name) for name in ("gt", "ge", "le")}
        return {name: limit for name, limit in limits.items() if limit is not None}


# From a `Config` to the error `key: what is wrong (what to do)`; "" if the method can run with it.
Requirement = Callable[[Any], str]


def has_ordered_bounds(section: str) -> Requirement:
    """Require low < high of a section of `algorithm`."""

    def problem(c: Any) -> str:
        bounds = getattr(c.algorithm, section)
        what = f"must be less than high {bounds.high:g} (got {bounds.low:g})"
        return "" if bounds.low < bounds.high else f"algorithm.{section}.low: {what}"

    return problem


def has_several_updates(c: Any) -> str:
    """Require an update after the first one, which has a ratio of 1."""
    a = c.algorithm
    if a.old_logprobs == "engine" or c.update.epochs > 1 or c.update.mini_batch < c.responses:
        return ""
    what = f"{a.surrogate} has no effect in the first update of a rollout, and there is only one"
    return f"algorithm.surrogate: {what} (lower update.mini_batch)"


def has_no_penalties(c: Any) -> str:
    """Require rewards that are not negative."""
    a, r = c.algorithm, c.reward
    what = f"must be >= 0 for algorithm.advantage {a.advantage}, which divides by the mean reward"
    if r.incorrect < 0:
        return f"reward.incorrect: {what} (got {r.incorrect:g}; set it to 0)"
    for key, value in (
        ("reward.overlong.soft_punishment", r.overlong.soft_punishment),
        ("reward.model.weight", r.parts.get("model")),
        ("algorithm.kl_reward", a.kl_reward),
        *((f"reward.terms.{name}.weight", term.weight) for name, term in r.terms.items()),
        ("reward.judge.weight", r.judge_is_term and r.judge.weight < 0),
    ):
        if value:
            what = f"may make rewards negative, and algorithm.advantage {a.advantage} divides by their mean"
            return f"{key}: {what} (set it to {'false' if value is True else 0})"
    return ""


def has_engine_ratio(c: Any) -> str:
    """Require that the ratio is to the policy that sampled."""
    a = c.algorithm
    what = f"must be engine for algorithm.surrogate {a.surrogate}, whose ratio is to the policy that sampled"
    fits = a.old_logprobs == "engine"
    return "" if fits else f"algorithm.old_logprobs: {what} (got {a.old_logprobs})"


def has_trainer_logprobs(c: Any) -> str:
    """Require the trainer's pass over the old policy."""
    a = c.algorithm
    what = f"{a.advantage}: no engine returns the sum of squared probabilities"
    fits = a.old_logprobs == "trainer"
    return "" if fits else f"algorithm.advantage: {what} (set algorithm.old_logprobs=trainer)"


def has_advantages_of_responses(c: Any) -> str:
    """Require one advantage for all tokens of a response."""
    a = c.algorithm
    if a.advantage in ("gae", "return", "otb"):
        what = f"must give each response one advantage for algorithm.surrogate {a.surrogate}"
        return f"algorithm.advantage: {what} (got {a.advantage}; set it to group)"
    if c.has_teacher and c.teacher.effect == "advantages":
        what = (
            f"a teacher's advantages differ by token, which algorithm.surrogate {a.surrogate} does not allow"
        )
        return f"teacher.top_k: {what} (set it, so that the teacher is a term of the loss)"
    return ""


def has_only_right_or_wrong(c: Any) -> str:
    """Require rewards of 1 and 0, and subsets that fit into a group."""
    a, r, name = c.algorithm, c.reward, c.algorithm.advantage
    for key, value, wanted in (
        ("reward.correct", r.correct, 1),
        ("reward.incorrect", r.incorrect, 0),
        ("algorithm.kl_reward", a.kl_reward, 0),
    ):
        if value != wanted:
            what = f"must be {wanted} for algorithm.advantage {name}, which counts right responses"
            return f"{key}: {what} (got {value:g})"
    if r.parts != {"verifier": 1}:
        what = f"{name} counts right responses, so the verifier's reward must be the only one, of weight 1"
        parts = ", ".join(f"{part} {weight:g}" for part, weight in r.parts.items())
        return f"algorithm.advantage: {what} (got {parts or 'none'})"
    if r.verifier == "judge":
        what = f"gives scores between 0 and 1, but {name} counts right responses (use a rule)"
        return f"reward.verifier: judge {what}"
    if c.rollout.environment is not None:
        what = f"{name} counts right responses and reads no rewards of turns (choose another advantage)"
        return f"algorithm.advantage: {what}"
    if a.pass_at_k.k >= c.rollout.group_size:
        what = f"must be < rollout.group_size {c.rollout.group_size}, as subsets would not differ"
        return f"algorithm.pass_at_k.k: {what} (got {a.pass_at_k.k})"
    return ""


def has_trust_region(c: Any) -> str:
    """Require a bound."""
    bounds = c.algorithm.trust_region
    what = "must be > 0 if mean_kl is 0, as otherwise there is no trust region"
    return "" if bounds.max_kl or bounds.mean_kl else f"algorithm.trust_region.max_kl: {what} (got 0)"


@dataclass(frozen=True)
class PolicyLoss:
    """One value of `algorithm.surrogate`.

    function          module:function of its `Surrogate` (algorithms/losses.py)
    meaning, source   for `megarl config docs`; rows of equal meaning are listed together
    options           further arguments of the function
    selector          module:function that selects tokens of a mini-batch, for `Tokens.selected`
    selector_options  further arguments of the selector
    requirements      what other keys must be
    has_dual_clip     whether `algorithm.dual_clip` applies"""

    function: str
    meaning: str
    source: str
    options: tuple[Option, ...] = ()
    selector: str = ""
    selector_options: tuple[Option, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    has_dual_clip: bool = False


RATIO_CAP = Option("dppo.ratio_cap", 20.0, "largest ratio that weights a token", "arXiv 2602.04879", gt=0)
SHARE = Option(
    "covariance.share",
    2e-4,
    "share of tokens that is selected, at least one; KL-Cov of 7B: 2e-3",
    "arXiv 2505.22617",
    gt=0,
    le=1,
)

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(
        "megarl.algorithms.losses:ppo", "clipped", "DAPO eq. 8, VAPO eq. 8", has_dual_clip=True
    ),
    "gspo": PolicyLoss(
        "megarl.algorithms.methods.gspo:gspo", "with one ratio a sequence", "GSPO eq. 5", has_dual_clip=True
    ),
    "cispo": PolicyLoss(
        "megarl.algorithms.methods.cispo:cispo",
        "clipped ratio times log-prob, no gradient through it",
        "CISPO eq. 4",
    ),
    "masked": PolicyLoss(
        "megarl.algorithms.methods.sao:masked",
        "tokens outside the interval have no gradient, on both sides",
        "SAO",
    ),
    "dppo_tv": PolicyLoss(
        "megarl.algorithms.methods.dppo:dppo_tv",
        "bounded by how far probabilities moved",
        "DPPO",
        options=(RATIO_CAP,),
    ),
    "dppo_kl": PolicyLoss(
        "megarl.algorithms.methods.dppo:dppo_kl",
        "bounded by how far probabilities moved",
        "DPPO",
        options=(RATIO_CAP,),
    ),
    "sapo": PolicyLoss(
        "megarl.algorithms.methods.sapo:sapo",
        "a smooth gate",
        "SAPO",
        options=(
            Option("sapo.tau_positive", 1.0, "slope for tokens of positive advantage", "SAPO", gt=0),
            Option(
                "sapo.tau_negative",
                1.05,
                "slope for the other tokens, whose gradient falls off faster",
                "SAPO",
                gt=0,
            ),
        ),
    ),
    "clip_cov": PolicyLoss(
        "megarl.algorithms.methods.covariance:clip_cov",
        "tokens of high covariance left out or held back",
        "arXiv 2505.22617",
        selector="megarl.training.methods.covariance:select_clip_cov",
        selector_options=(
            SHARE,
            Option(
                "covariance.low", 1.0, "clip_cov: selected covariances are above this", "arXiv 2505.22617"
            ),
            Option(
                "covariance.high", 5.0, "clip_cov: selected covariances are below this", "arXiv 2505.22617"
            ),
        ),
        requirements=(has_ordered_bounds("covariance"),),
    ),
    "kl_cov": PolicyLoss(
        "megarl.algorithms.methods.covariance:kl_cov",
        "tokens of high covariance left out or held back",
        "arXiv 2505.22617",
        options=(Option("covariance.kl_weight", 1.0, "kl_cov: of |log ratio|", "arXiv 2505.22617", ge=0),),
        selector="megarl.training.methods.covariance:select_kl_cov",
        selector_options=(SHARE,),
        requirements=(has_several_updates,),
    ),
    "fipo": PolicyLoss(
        "megarl.algorithms.methods.fipo:fipo",
        "ppo, advantages by how the rest of the response moved",
        "FIPO",
        options=(
            Option(
                "fipo.half_life",
                32.0,
                "distance at which a later token counts half",
                "FIPO's script",
                unit="tokens",
                gt=0,
            ),
            Option("fipo.low", 1.0, "smallest factor; FIPO of 7B: 0.8", "FIPO's script", gt=0),
            Option("fipo.high", 1.2, "largest factor", "FIPO's script", gt=0),
            Option(
                "fipo.limit", 10.0, "tokens of a larger ratio are left out of the sum", "FIPO's script", gt=1
            ),
        ),
        requirements=(has_ordered_bounds("fipo"), has_several_updates),
        has_dual_clip=True,
    ),
    "vespo": PolicyLoss(
        "megarl.algorithms.methods.vespo:vespo",
        "log-prob times a smooth function of the response's ratio",
        "VESPO",
        options=(
            Option("vespo.c1_positive", 2.0, "power of the ratio, advantage >= 0", "VESPO section 4.1", ge=0),
            Option(
                "vespo.c2_positive", 3.0, "decay with the ratio, advantage >= 0", "VESPO section 4.1", ge=0
            ),
            Option("vespo.c1_negative", 3.0, "power of the ratio, advantage < 0", "VESPO section 4.1", ge=0),
            Option(
                "vespo.c2_negative", 2.0, "decay with the ratio, advantage < 0", "VESPO section 4.1", ge=0
            ),
        ),
        requirements=(has_engine_ratio,),
    ),
    "m2po": PolicyLoss(
        "megarl.algorithms.methods.m2po:m2po",
        "tokens with the largest log-ratios left out, until a second moment is small",
        "M2PO",
        selector="megarl.training.methods.m2po:select_m2po",
        selector_options=(
            Option(
                "m2po.threshold",
                0.04,
                "largest mean of (log ratio)^2 over tokens that moved in their advantage's direction",
                "arXiv 2510.01161",
                gt=0,
            ),
        ),
        requirements=(has_engine_ratio,),
    ),
    "gmpo": PolicyLoss(
        "megarl.algorithms.methods.gmpo:gmpo",
        "geometric mean of a response's ratios, each clipped; clip_low and clip_high are logarithms",
        "GMPO",
        requirements=(has_advantages_of_responses,),
    ),
    "trust_region": PolicyLoss(
        "megarl.algorithms.methods.trust_region:trust_region",
        "responses left out whose KL to the policy that sampled is too large",
        "arXiv 2512.23075",
        options=(
            Option(
                "trust_region.max_kl",
                0.05,
                "largest KL of a token, estimated by (log ratio)^2 / 2; 0: no bound",
                "arXiv 2512.23075",
                ge=0,
            ),
            Option(
                "trust_region.mean_kl",
                0.0,
                "largest mean KL of a response, estimated by ratio - 1 - log ratio; 0: no bound",
                "arXiv 2512.23075: 0.001 without max_kl",
                ge=0,
            ),
        ),
        requirements=(has_engine_ratio, has_trust_region),
    ),
}


@dataclass(frozen=True)
class Advantage:
    """One value of `algorithm.advantage`.

    function         module:function that the phase calls. For group_advantages it maps `Responses`
                     (algorithms/advantages.py) to one advantage a response
    meaning, source  for `megarl config docs`
    options          further arguments of a function of group_advantages
    requirements     what other keys must be
    phase            phase that computes it (config/phases.py)
    compares_group   whether an advantage depends on the group's other responses
    critic           input of the critic; "": no critic
    columns          further rollout columns that it reads
    squared_probs    whether it reads the old policy's sum of squared probabilities, column squared_probs
    returns          module:function of targets in value pretraining; "": Monte-Carlo returns
    states           state between steps: (name in a checkpoint, module:function that makes it from
                     `algorithm`)"""

    function: str
    meaning: str
    source: str
    options: tuple[Option, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    phase: str = "group_advantages"
    compares_group: bool = False
    critic: Literal["", "responses", "prompts"] = ""
    columns: tuple[str, ...] = ()
    squared_probs: bool = False
    returns: str = ""
    states: tuple[tuple[str, str], ...] = ()


ADVANTAGES: dict[str, Advantage] = {
    "group": Advantage(
        "megarl.algorithms.advantages:group_advantages",
        "(reward - the group's mean) / the group's standard deviation",
        "DAPO eq. 9",
        compares_group=True,
    ),
    "group_mean": Advantage(
        "megarl.algorithms.methods.dr_grpo:group_mean",
        "without that division",
        "Dr. GRPO",
        compares_group=True,
    ),
    "leave_one_out": Advantage(
        "megarl.algorithms.methods.rloo:leave_one_out",
        "reward minus the mean of the group's other responses",
        "RLOO",
        compares_group=True,
    ),
    "per_reward": Advantage(
        "megarl.algorithms.methods.gdpo:per_reward_advantages",
        "group for each part of the reward, their sum divided by the batch's standard deviation",
        "GDPO",
        compares_group=True,
        columns=("reward_parts",),
    ),
    "tracked": Advantage(
        "megarl.training.methods.spo:add_tracked_advantages",
        "reward minus the prompt's running success rate, normalised over the batch",
        "SPO",
        phase="tracked_advantages",
        columns=("prompt_uids",),
        states=(("tracker", "megarl.training.methods.spo:make_tracker"),),
    ),
    "return": Advantage("", "the return alone", "REINFORCE++", phase="return_advantages"),
    "gae": Advantage("", "by a critic", "VAPO eq. 3", phase="gae_advantages", critic="responses"),
    "prompt_value": Advantage(
        "megarl.training.methods.sppo:add_prompt_advantages",
        "reward minus the value that a critic predicts from the prompt alone",
        "SPPO",
        phase="prompt_advantages",
        critic="prompts",
        returns="megarl.training.methods.sppo:add_prompt_returns",
    ),
    "otb": Advantage(
        "megarl.training.methods.otb:add_optimal_token_advantages",
        "rewards to go minus the group's baseline of least variance at the token's position",
        "OTB",
        requirements=(has_trainer_logprobs,),
        phase="optimal_token_advantages",
        compares_group=True,
        squared_probs=True,
    ),
    "maxrl": Advantage(
        "megarl.algorithms.methods.maxrl:relative_rewards",
        "(reward - the group's mean) / the group's mean",
        "MaxRL",
        requirements=(has_no_penalties,),
        compares_group=True,
    ),
    "pass_at_k": Advantage(
        "megarl.algorithms.methods.pass_at_k:pass_at_k",
        "of a response in random subsets of its group, whose reward is 1 if any response is right",
        "pass@k training",
        options=(
            Option(
                "pass_at_k.k",
                8,
                "responses of a subset",
                "arXiv 2508.10751; 8: our choice",
                unit="responses",
                ge=1,
            ),
        ),
        requirements=(has_only_right_or_wrong,),
        compares_group=True,
    ),
}

# Switch of `algorithm` -> its table.
METHODS: dict[str, dict[str, PolicyLoss] | dict[str, Advantage]] = {
    "surrogate": POLICY_LOSSES,
    "advantage": ADVANTAGES,
}

if TYPE_CHECKING:
    PolicyLossName: TypeAlias = str
    AdvantageName: TypeAlias = str
else:
    PolicyLossName, AdvantageName = Literal[*POLICY_LOSSES], Literal[*ADVANTAGES]


def method_options() -> Iterator[tuple[Option, str, list[str]]]:
    """Yield each option once, with the switch and those of its values that read the option."""
    for switch, table in METHODS.items():
        readers: dict[Option, list[str]] = {}
        for name, row in table.items():
            for option in (*row.options, *(row.selector_options if isinstance(row, PolicyLoss) else ())):
                readers.setdefault(option, []).append(name)
        yield from ((option, switch, names) for option, names in readers.items())


# Functions of phase gae_advantages, without and with `rollout.window`.
GAE = "megarl.training.columns:add_gae"
WINDOW_GAE = "megarl.training.methods.tppo:add_window_gae"
# Function of phase critic_agreement.
CRITIC_AGREEMENT = "megarl.training.methods.asyppo:add_agreement"


def load_function(path: str) -> Any:
    """Import a module:function."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
