"""TensorBoard and Weights & Biases, imported only when a run asks for them (extra `track`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from megarl.config.errors import ConfigError


class Tracker(Protocol):
    """Somewhere else that the numbers of a step go."""

    def log(self, step: int, stage: str, scalars: Mapping[str, float]) -> None:
        """Records the scalars of one step."""

    def continue_from(self, step: int) -> None:
        """The run continues after `step`: what was logged later is to be hidden, where the tracker can do that."""

    def close(self) -> None:
        """Everything is written when this returns."""


def tag(name: str, stage: str) -> str:
    """Warm start and value pretraining count their own steps, so their curves get names of their own."""
    return name if stage in ("train", "eval") else f"{stage}/{name}"


class TensorBoardTracker:
    """Event files in run_dir/tensorboard. Raises ConfigError if TensorBoard is not installed."""

    def __init__(self, run_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("log.tensorboard: TensorBoard is not installed (pip install 'megarl[track]', or set it to false)") from error
        self._open = SummaryWriter
        self._folder = str(run_dir / "tensorboard")
        self._writer = SummaryWriter(self._folder)

    def log(self, step: int, stage: str, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(tag(name, stage), value, step)
        self._writer.flush()

    def continue_from(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(self._folder, purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """One W&B run per run folder, its id kept in run_dir/wandb_id so that a resumed run continues the same curves.

    Raises ConfigError if wandb is not installed."""

    def __init__(self, run_dir: Path, append: bool) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("log.wandb: wandb is not installed (pip install 'megarl[track]', or set it to false)") from error
        known = run_dir / "wandb_id"
        run_dir.mkdir(parents=True, exist_ok=True)
        identity = known.read_text().strip() if append and known.exists() else None
        self._run = wandb.init(project="megarl", name=run_dir.name, dir=str(run_dir), id=identity, resume="allow")
        # W&B's own step must never fall, ours starts again with each stage: it is a metric of its own and the x axis.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        known.write_text(f"{self._run.id}\n")

    def log(self, step: int, stage: str, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{tag(name, stage): value for name, value in scalars.items()}})

    def continue_from(self, step: int) -> None:
        """W&B cannot take back what was sent: steps that are done again show twice."""

    def close(self) -> None:
        self._run.finish()
