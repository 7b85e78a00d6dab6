"""Names of a run's stages."""

from __future__ import annotations

# TRAIN: RL steps. SUPERVISED: steps of recipe `sft`. PRETRAINING: critic steps before the first TRAIN step.
TRAIN, SUPERVISED, PRETRAINING, EVALUATION = "train", "sft", "value_pretraining", "eval"


def main_stage(recipe: str) -> str:
    """Return the stage of steps after value pretraining."""
    return SUPERVISED if recipe == SUPERVISED else TRAIN
