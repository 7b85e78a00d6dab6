"""What ranks do in the tests of checkpoints: load at one layout, write again, and run steps."""

from __future__ import annotations

import random
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.cli.ranks import spared_output
from megarl.config.errors import CheckpointError, NumericalError, StorageError
from megarl.config.schema import Config
from megarl.parallel.runtime import Runtime
from megarl.schedule.replay import Outcome, replay
from megarl.schedule.run import Run
from megarl.schedule.trainer import Trainer
from megarl.training.batch import MicroBatch
from megarl.training.checkpoint import find_checkpoint
from megarl.training.model import Loss
from megarl.training.sharded import load_checkpoint
from tests.checkpoints import save_checkpoint, save_model


def write_again(runtime: Runtime, config: Config, source: Path, full: Path) -> str:
    """Loads the newest checkpoint of the run `source`, exports the actor to config.run_dir/hf, writes a
    checkpoint of its own there, and then one into the folder `full`, which has no room for the first rank's
    part. Gives the message of the error that this ends with."""
    run = Run(config, runtime)
    checkpoint, _ = find_checkpoint(source)
    assert checkpoint is not None
    state = load_checkpoint(checkpoint, run.models, run.onload_for_checkpoint)
    run.load_state_dict(state["samplers"])
    run.export("actor", config.run_dir / "hf")
    written = {**state, "samplers": run.snapshot()()()}
    save_checkpoint(runtime, config, checkpoint.step, run.models, written, checkpoint.manifest["versions"])
    try:
        save_model(run.actor, full)
    except CheckpointError as error:
        return str(error)
    finally:
        run.close()
    return ""


def train(runtime: Runtime, config: Config) -> None:
    """Runs `config`."""
    run = Run(config, runtime)
    Trainer(run).train()
    run.close()


def train_without_room(runtime: Runtime, config: Config, rank: int, size: int) -> str:
    """Runs `config`, in which no file of one rank can grow beyond `size` bytes, and gives the message of the
    error that this ends with."""
    run, before = Run(config, runtime), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if runtime.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        with spared_output():  # as in a command: the test's own output may be longer
            Trainer(run).train()
    except StorageError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        run.close()
    return ""


def generators_moved(runtime: Runtime, config: Config) -> list[str]:
    """Runs `config` and gives the global random generators that it has drawn from or seeded."""
    run = Run(config, runtime)
    before = _generators()
    Trainer(run).train()
    run.close()
    return [name for name, state in _generators().items() if state != before[name]]


def _generators() -> dict[str, bytes]:
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": repr(random.getstate()).encode(),
        "numpy": repr(np.random.get_state()).encode(),
    }


def train_and_replay(runtime: Runtime, config: Config, numbers: tuple[int, ...]) -> list[Outcome]:
    """Runs `config`, unless it has been run, and replays steps of it."""
    if not (config.run_dir / "hf").exists():
        run = Run(config, runtime)
        Trainer(run).train()
        run.close()
    return [replay(config, number, runtime) for number in numbers]


def train_with_bad_losses(runtime: Runtime, config: Config, bad: tuple[int, ...]) -> tuple[str, list[bool]]:
    """Runs `config`, in whose steps `bad` one rank's policy loss is not a number. Gives the message with
    which it ends, if any, and whether the actor's weights have changed since the step before, at the
    beginning of each step's updates."""
    run = Run(config, runtime)
    actor, weights, changed = run.actor, [], []
    begin, gradients = actor.begin_step, actor.compute_gradients

    def begin_step() -> None:
        now = [parameter.detach().clone() for parameter in actor.model.parameters()]
        changed.append(
            bool(weights) and not all(torch.equal(a, b) for a, b in zip(now, weights[-1], strict=True))
        )
        weights.append(now)
        begin()

    def compute_gradients(micro_batches: Sequence[MicroBatch], loss: Loss) -> dict[str, float]:
        def spoiled(output: Any, batch: MicroBatch) -> Any:
            value, sums = loss(output, batch)
            return value * float("nan"), sums

        here = len(weights) in bad and runtime.rank == runtime.world - 1
        return gradients(micro_batches, spoiled if here else loss)

    actor.begin_step, actor.compute_gradients = begin_step, compute_gradients  # type: ignore[method-assign]
    try:
        Trainer(run).train()
    except NumericalError as error:
        return str(error), changed
    finally:
        run.close()
    return "", changed
