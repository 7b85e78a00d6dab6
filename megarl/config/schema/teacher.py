"""Section `teacher`."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema.section import Section, field


class TeacherConfig(Section):
    """On-policy distillation from a teacher on the same ranks.

    Adds the teacher's log-ratio of a token to its advantage, or with `top_k` a KL term to the loss."""

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
