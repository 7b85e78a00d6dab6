"""Section `reward`."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema.judge import JUDGE, JudgeConfig
from megarl.config.schema.rollout import Sandbox
from megarl.config.schema.section import Section, field, section


class OverlongConfig(Section):
    """Responses near or at the length limit (DAPO section 3.4)."""

    filter: bool = field(
        False, "mask truncated responses out of the loss", source="DAPO section 3.4, overlong filtering"
    )
    soft_punishment: bool = field(False, "a length penalty is added to the reward", source="DAPO eq. 13")
    buffer: int = field(4096, "L_cache: width of the punished interval", "tokens", "DAPO section 4.1", ge=1)


class RewardTerm(Section):
    """A function of a response whose value is added to the reward."""

    function: str = field(
        ...,
        "`module:function`, called as f(response, **arguments) with a `megarl.rewards.GradedResponse`; "
        "returns a finite number (megarl/rewards/shaping.py has some)",
    )
    weight: float = field(1.0, "factor of its value; 0: only measured")
    arguments: dict[str, bool | int | float | str] = field({}, "further arguments, by name")


class RewardModelConfig(Section):
    """A reward model on the same ranks, whose score is added to the reward."""

    path: Path | None = field(
        None,
        "Hugging Face folder of a sequence classifier of one label, with the actor's tokenizer; null: none",
    )
    weight: float = field(1.0, "factor of its score; 0: only measured")


class RewardConfig(Section):
    """Weighted sum of the verifier's reward, terms, reward model's score and `overlong` penalty."""

    verifier: str = field(
        "dapo",
        "dapo (last `Answer:` line, normalised), math (symbolic), "
        "code or code_all (runs Python on tests: the share that pass, or all), judge (reward.judge), "
        "or a dotted path `module:function` of your own",
        source="DAPO eq. 7",
    )
    correct: float = field(1.0, "reward of a right answer", source="DAPO eq. 7")
    incorrect: float = field(-1.0, "reward of a wrong answer", source="DAPO eq. 7; VAPO speaks of 0 and 1")
    weight: float = field(1.0, "factor of the verifier's reward; 0: it only says right or wrong", ge=0)
    terms: dict[str, RewardTerm] = field(
        {}, "name -> {function, weight, arguments}: added to the reward; reward/term_<name> is its mean"
    )
    model: RewardModelConfig = section(RewardModelConfig)
    judge: JudgeConfig = section(JudgeConfig)
    timeout: float = field(
        10.0, "longest time for one answer, which is then wrong and recorded", "seconds", gt=0
    )
    workers: int = field(1, "verifier processes per rank", "processes", ge=1)
    memory: int = field(
        2048, "data memory of a verifier; an answer that takes more is wrong and recorded", "MiB", ge=128
    )
    sandbox: Sandbox = field(
        "strict",
        "permissions of your own verifiers and terms, as in rollout.turns.sandbox; megarl's own can only "
        "calculate (docs/verifiers.md)",
    )
    max_ungraded: float = field(
        0.1,
        "largest share of a step's responses without a verdict, because the verifier's process, function or "
        "service failed; such responses are left out; the run ends above this share",
        ge=0,
        le=1,
    )
    overlong: OverlongConfig = section(OverlongConfig)

    @property
    def judge_is_term(self) -> bool:
        return self.judge.url is not None and self.verifier != JUDGE

    @property
    def term_weights(self) -> dict[str, float]:
        """Return name -> weight of the terms, the judge's last."""
        weights = {name: term.weight for name, term in self.terms.items()}
        return weights | ({JUDGE: self.judge.weight} if self.judge_is_term else {})

    @property
    def parts(self) -> dict[str, float]:
        """Return key -> weight of the reward's parts; the reward model's is last."""
        parts = {"verifier": self.weight, "overlong": float(self.overlong.soft_punishment)}
        parts |= {f"terms.{name}": weight for name, weight in self.term_weights.items()}
        parts["model"] = self.model.weight if self.model.path else 0.0
        return {name: weight for name, weight in parts.items() if weight}
