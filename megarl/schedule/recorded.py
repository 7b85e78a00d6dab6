"""A step's rollout on disk, so that the step can be done again without its engine: run_dir/rollouts/step-000012.safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.data.experience import Experience, read_experience, write_experience
from megarl.parallel.comm import from_rank_0
from megarl.schedule.run import Step

FOLDER = "rollouts"


def rollout_path(run_dir: Path, number: int) -> Path:
    """Of step `number` of the main stage."""
    return run_dir / FOLDER / f"step-{number:06d}.safetensors"


def record_rollout(step: Step) -> None:
    """Keeps the batch and the rollout's statistics; every rank calls this. ConfigError on every rank where there is no room."""
    assert step.rollout is not None
    runtime, failure = step.run.runtime, None
    path = rollout_path(step.run.config.run_dir, step.number)
    if runtime.rank == 0:
        try:
            write_experience(path, step.batch, {"stats": step.rollout.stats}, {"step": step.number})
        except OSError as error:
            failure = f"checkpoint.rollouts: {path}: cannot be written: {error} (make room, or set it to false)"
    failure = from_rank_0(runtime, failure)
    if failure is not None:
        raise ConfigError(failure)


def read_rollout(run_dir: Path, number: int) -> tuple[Experience, dict[str, Any]]:
    """The batch and the statistics of a step. DataError where the file is missing or damaged."""
    batch, state = read_experience(rollout_path(run_dir, number))
    return batch, state["stats"]
