"""Names of a run's stages, as its records have them."""

from __future__ import annotations

# TRAIN: reinforcement-learning steps. SUPERVISED: steps of recipe `sft`. PRETRAINING: steps that fit the
# critic before the first TRAIN step. EVALUATION: evaluations between steps.
TRAIN, SUPERVISED, PRETRAINING, EVALUATION = "train", "sft", "value_pretraining", "eval"


def main_stage(recipe: str) -> str:
    """Return the stage of a run's steps in its records, value pretraining excepted."""
    return SUPERVISED if recipe == SUPERVISED else TRAIN
