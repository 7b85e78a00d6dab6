"""Section `guard`."""

from __future__ import annotations

from typing import Literal

from megarl.config.schema.section import Section, field


class GuardConfig(Section):
    """Non-finite numbers end a step before its weights change.

    Metrics beyond the limits, and steps without a verdict, become events."""

    skipped_steps: int = field(
        3, "non-finite steps in a row skipped, their batches kept, before the run stops", "steps", ge=0
    )
    unverified_steps: int = field(3, "steps in a row without any verdict that stop the run", "steps", ge=1)
    entropy_low: float | None = field(None, "alarm where policy/entropy is below; null: none", "nats")
    entropy_collapse: float | None = field(
        0.1,
        "alarm where policy/entropy / the highest of the run falls below; null: none",
        source="our choice; DAPO section 3.1, figure 2b, shows a collapse",
        gt=0,
        lt=1,
    )
    length_collapse: float | None = field(
        0.5,
        "alarm where mean response length / the longest of the run is below, by more than noise; null: none",
        gt=0,
        lt=1,
    )
    length_growth: float | None = field(
        2.0,
        "alarm where mean response length / the last steps' is above, by more than noise; null: none",
        gt=1,
    )
    clip_fraction: float | None = field(
        0.3, "alarm where the share of clipped tokens is above; null: none", gt=0, le=1
    )
    parity: float | Literal["auto", "none"] = field(
        "auto",
        "largest mean difference of the engine's and the trainer's log-probs of the same tokens; beyond it "
        "the run ends before its first update; auto: 0.001 in fp32, 0.15 in bf16, 0.4 with FP8",
        "nats",
        source="our choice, from what was measured with and without faults (docs/reliability.md)",
    )
    parity_layers: bool = field(
        False,
        "if guard.parity ends the run, compare hidden states layer by layer with transformers on the same "
        "weights and name the first layer that differs",
    )
