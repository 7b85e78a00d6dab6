"""Section `value_pretraining`."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema.section import Section, field


class ValuePretrainingConfig(Section):
    """Fit the critic to Monte-Carlo returns of the initial policy first (VAPO section 4.1)."""

    steps: int = field(
        0, "rollouts of the frozen policy; 0: no pretraining", "rollout steps", "VAPO section 5.1: 50", ge=0
    )
    epochs: int = field(1, "passes over each of these rollouts", "epochs", ge=1)
    lr: float | None = field(None, "constant learning rate of value pretraining; null: critic.lr", gt=0)
    explained_variance: float = field(
        1.0, "end early once a new rollout's explained variance is at least this; 1: never", le=1
    )
    rollouts: Path | None = field(
        None,
        "folder of these rollouts, which are kept, and reused where it holds them already; "
        "null: value_pretraining/ in run_dir",
        source="VAPO section 4.1, step 3, keeps the critic; keeping its data costs about 13 bytes a token",
    )
