"""Names of a run's stages, as its records have them."""

from __future__ import annotations

# Stages of a run, as its records name them: its steps, those of the recipe that learns from pairs, those of
# value pretraining before them, and what is between two.
TRAIN, SUPERVISED, PRETRAINING, EVALUATION = "train", "sft", "value_pretraining", "eval"


def main_stage(recipe: str) -> str:
    """Return the stage of a run's steps in its records, but for those of value pretraining."""
    return SUPERVISED if recipe == SUPERVISED else TRAIN
