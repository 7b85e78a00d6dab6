"""Section `critic`."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema.actor import OptimizerConfig
from megarl.config.schema.section import field


class CriticConfig(OptimizerConfig):
    """The value model of `algorithm.advantage` `gae` or `prompt_value`."""

    lr: float = field(2e-6, "peak learning rate", source="VAPO section 5.1: critic 2e-6", gt=0)
    path: Path | None = field(
        None,
        "Hugging Face folder of the critic's body, or of a one-label reward model, "
        "or of a critic that megarl saved; null: the actor's",
        source="VAPO section 4.1 starts it from a reward model",
    )
    head_std: float = field(
        0.0, "standard deviation of a new value head (a folder without score.weight); 0: zeros", ge=0
    )
    count: int = field(
        1,
        "number of critics; each learns from its own share of every group's responses, and the mean of "
        "their values is used",
        "critics",
        "AsyPPO, arXiv 2510.01656: 2",
        ge=1,
        le=2,
    )
    epochs: int = field(1, "passes over each rollout", "epochs", ge=1)
    mini_batch: int | None = field(
        None, "responses per update; null: update.mini_batch; one must divide the other", "responses", ge=1
    )
