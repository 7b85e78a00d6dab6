"""Section `residency`: tensors on the GPU between phases."""

from __future__ import annotations

from typing import Literal

from megarl.config.schema.section import Section, field

TensorGroup = Literal[
    "actor.weights", "actor.gradients", "actor.optimizer",
    "critic.weights", "critic.gradients", "critic.optimizer",
    "reference.weights", "reward.weights", "teacher.weights",
    "engine.weights", "engine.kv_cache",
]  # fmt: skip


class ResidencyConfig(Section):
    offload: bool | None = field(None, "move what a phase does not need to pinned host memory; null: on CUDA")
    keep: tuple[TensorGroup, ...] = field(
        (),
        "groups that never offload, e.g. [actor.optimizer]: faster steps, less room for engine.kv_cache",
    )
