"""Section `teacher`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megarl.config.schema.section import Section, field

# Key of a prompt's row that holds its demonstration, as `teacher.demonstration`.
EXTRA = "extra_info."


class TeacherConfig(Section):
    """On-policy distillation from a teacher on the same ranks.

    Adds the teacher's log-ratio of a token to its advantage, or a term to the loss (`top_k`, `ratio_cap`).

    With `weights` the teacher is the actor itself, with a demonstration in its prompt (self-distillation)."""

    path: Path | None = field(
        None,
        "Hugging Face folder of a causal model of any size, with the actor's tokenizer; null: none",
    )
    by_source: dict[str, Path] = field(
        {},
        "teachers by the rows' data_source, e.g. {openai/gsm8k: models/a}, one on the device at a time; "
        "other rows have that of `path`, or none",
        source="verl's distillation.teacher_models with teacher_key data_source",
    )
    weight: float = field(
        1.0,
        "c: c (log pi_teacher - log pi_old) is added to each token's advantage, after any whitening; "
        "with top_k the factor of the loss term",
        source="Thinking Machines, On-Policy Distillation: the reverse KL of each token, undiscounted",
        gt=0,
    )
    top_k: int | None = field(
        None,
        "k: the KL from a teacher to the policy over the teacher's top k tokens at each position is a term "
        "of the loss, and advantages do not change; null: the sampled token's log-ratio is added",
        "tokens",
        "verl's forward_kl_topk, which has 32",
        ge=1,
    )

    ratio_cap: float | None = field(
        None,
        "the term's tokens weigh min(pi / pi_old, cap), without gradient. Without top_k the term is the "
        "sampled token's log-ratio, and advantages do not change; null: off",
        source="SDPO's is_clip, 2 (arXiv 2601.20802)",
        gt=0,
    )
    alpha: float = field(
        0.0,
        "divergence of the top_k term: 0 KL(teacher || policy), 1 KL(policy || teacher), between them the "
        "Jensen-Shannon divergence to the mixture alpha teacher + (1 - alpha) policy",
        source="SDPO's alpha, 0.5; OPSD has 0, SDFT 1",
        ge=0,
        le=1,
    )
    alone: bool = field(
        False, "true: the teacher alone trains: advantages of rewards are 0", source="SDPO, OPSD and SDFT"
    )
    weights: Literal["initial", "current", "average"] | None = field(
        None,
        "the teacher is the actor with these weights, and sees `template`; average: their exponential "
        "moving average; null: the models of path and by_source",
        source="OPSD (arXiv 2601.18734) initial; SDPO and SDFT (arXiv 2601.19897) average",
    )
    average_rate: float = field(
        0.05, "average <- (1 - rate) average + rate actor, after each step", source="SDPO", gt=0, le=1
    )
    demonstration: str = field(
        "sibling",
        "what weights' teacher sees: sibling (another correct response of the group), answer (the reference "
        "answer) or extra_info.KEY (that value of the prompt's row); responses without any are not taught",
        source="SDPO sibling; OPSD and SDFT a solution of the data",
    )
    template: str = field(
        "{question}\n\nCorrect solution:\n\n{demonstration}\n\nCorrectly solve the original question.",
        "last user message of weights' teacher",
        source="our wording after SDPO's",
    )
    max_context_tokens: int = field(
        4096, "a longer prompt of weights' teacher is left out, and its response not taught", "tokens", ge=1
    )

    @property
    def effect(self) -> Literal["advantages", "logprobs", "top_k"]:
        """Return what the teacher changes: advantages, or the loss by sampled or top-k tokens."""
        if self.top_k is not None:
            return "top_k"
        return "advantages" if self.ratio_cap is None else "logprobs"

    @property
    def folders(self) -> dict[str, Path]:
        """Return key -> folder of each teacher."""
        folders: dict[str, Path] = {}
        by_source = {f"teacher.by_source.{source}": path for source, path in self.by_source.items()}
        for key, path in {"teacher.path": self.path, **by_source}.items():
            if path is not None and path not in folders.values():
                folders[key] = path
        return folders

    def number(self, source: str) -> int:
        """Return the index in `folders` of a data_source's teacher, or -1."""
        path = self.by_source.get(source, self.path)
        return -1 if path is None else [*self.folders.values()].index(path)
