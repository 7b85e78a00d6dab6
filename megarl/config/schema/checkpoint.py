"""Section `checkpoint`."""

from __future__ import annotations

from megarl.config.schema.section import Section, field


class CheckpointConfig(Section):
    every: int = field(
        0, "steps between checkpoints, and one at the end; 0: none, no resuming", "rollout steps", ge=0
    )
    keep: int = field(2, "newest checkpoints kept; 0: all", "checkpoints", ge=0)
    keep_every: int = field(0, "also keep every multiple of this step; 0: none", "rollout steps", ge=0)
    background: bool = field(True, "write while the next step runs; false: the run waits for the disk")
    timeout: float = field(
        300.0, "longest wait for a checkpoint, at most 0.8 of parallel.timeout", "seconds", gt=0
    )
    time_limit: float | None = field(
        None, "save and leave before this has passed; null: SLURM_JOB_END_TIME, if set", "seconds", gt=0
    )
    time_margin: float = field(120.0, "reserve on top of the longest step and save", "seconds", ge=0)
    grace: float = field(
        300.0, "longest from SIGTERM or SIGUSR1 to a saved end; then ranks are ended", "seconds", gt=0
    )
    rollouts: bool = field(
        False, "keep every step's rollout in rollouts/, for `megarl replay`", source="about 13 bytes a token"
    )
    export_hf: bool = field(True, "write the final actor as a Hugging Face folder")
