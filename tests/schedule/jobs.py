"""Functions that the tests of checkpoints run on ranks: load at one layout, save again, and run steps."""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.cli.ranks import spared_output
from megarl.config.errors import CheckpointError, MegarlError, NumericalError, StorageError
from megarl.config.schema import Config
from megarl.data.batch import MicroBatch, TrainBatch
from megarl.parallel.runtime import Runtime
from megarl.rewards.pool import VerifierPool
from megarl.rollout.engines.sglang import SGLangEngine
from megarl.rollout.engines.sglang_servers import SGLangServers
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.schedule import parity
from megarl.schedule.models import export_model
from megarl.schedule.replay import Outcome, replay
from megarl.schedule.run import Step, build_run
from megarl.schedule.trainer import Trainer
from megarl.sync import weight_sync
from megarl.sync.plan import Copy, Plan
from megarl.sync.weight_sync import WeightSync
from megarl.training.checkpoint import find_checkpoint
from megarl.training.model import Loss
from megarl.training.sharded import load_checkpoint
from tests.checkpoints import save_checkpoint, save_model


def write_again(runtime: Runtime, config: Config, source: Path, full: Path) -> str:
    """Load the newest checkpoint of the run `source`, then export and save it again.

    The actor is exported to config.run_dir/hf and a checkpoint is written to config.run_dir. A last write
    goes to the folder `full`, which has no space for the first rank's part.

    Returns: the message of that last error.
    """
    run = build_run(config, runtime)
    checkpoint, _ = find_checkpoint(source)
    assert checkpoint is not None
    state = load_checkpoint(checkpoint, run.models, run.residency.onload_for_checkpoint)
    run.source.load_state_dict(state["samplers"])
    export_model(run.actor, config, runtime, config.run_dir / "hf")
    written = {**state, "samplers": run.source.snapshot()}
    save_checkpoint(run, checkpoint.step, written, checkpoint.manifest["versions"])
    try:
        save_model(run.actor, full)
    except CheckpointError as error:
        return str(error)
    finally:
        run.close()
    return ""


def train(runtime: Runtime, config: Config) -> None:
    """Run `config`."""
    run = build_run(config, runtime)
    Trainer(run).train()
    run.close()


def train_without_room(runtime: Runtime, config: Config, rank: int, size: int) -> str:
    """Run `config` while no file of one rank can grow beyond `size` bytes.

    Returns: the message of the resulting error.
    """
    run, before = build_run(config, runtime), resource.getrlimit(resource.RLIMIT_FSIZE)
    sys.dont_write_bytecode = True  # Python 3.11 would truncate bytecode files and trust them
    try:
        if runtime.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        with spared_output():  # as in a command: the test's output may exceed the limit
            Trainer(run).train()
    except StorageError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = False
        run.close()
    return ""


def generators_moved(runtime: Runtime, config: Config) -> list[str]:
    """Run `config` and return the global random generators that it used or seeded."""
    run = build_run(config, runtime)
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
    """Run `config` unless it has run, then replay some of its steps.

    The replays fail if they build an engine, a verifier pool or a weight synchroniser.
    """
    if not (config.run_dir / "hf").exists():
        run = build_run(config, runtime)
        Trainer(run).train()
        run.close()

    def refuse(self: Any, *arguments: Any, **options: Any) -> None:
        raise AssertionError(f"a replay makes a {type(self).__name__}")

    with pytest.MonkeyPatch.context() as patch:
        for kind in (TransformersEngine, SGLangEngine, SGLangServers, VerifierPool, WeightSync):
            patch.setattr(kind, "__init__", refuse)
        return [replay(config, number, runtime) for number in numbers]


def train_with_bad_losses(runtime: Runtime, config: Config, bad: tuple[int, ...]) -> tuple[str, list[bool]]:
    """Run `config`; in the steps `bad` the policy loss of the last rank is NaN.

    Returns: the message of the final error, if any. Also, for the start of each step's updates, whether the
        actor's weights have changed since the step before.
    """
    run = build_run(config, runtime)
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


def train_with_swapped(runtime: Runtime, config: Config, swapped: tuple[str, ...]) -> tuple[str, list[str]]:
    """Run `config` with an engine in which two tensors have swapped weights.

    Where both names are equal, the tensor's two heads are swapped.

    Returns: the final error, if any, and the models that were updated.
    """
    plan_of = weight_sync.engine_plan

    def plan(*arguments: Any, **options: Any) -> Plan:
        made = plan_of(*arguments, **options)
        if not swapped:
            return made
        first, second = swapped

        def moved(copy: Copy) -> Copy:
            if first != second:
                other = {first: second, second: first}.get(copy.dst_name, copy.dst_name)
                return copy._replace(dst_name=other)
            if copy.dst_name == first:
                (start, stop), *rest = copy.dst_box
                assert stop - start == 8  # one of two heads
                return copy._replace(dst_box=((8 - start, 16 - start), *rest))
            return copy

        return replace(made, copies=tuple(map(moved, made.copies)))

    weight_sync.engine_plan = plan
    try:
        run = build_run(config, runtime)
    finally:
        weight_sync.engine_plan = plan_of
    error, updated = "", list[str]()
    for name, model in run.models.items():

        def noted(*arguments: Any, name: str = name, update: Any = model.update, **options: Any) -> Any:
            updated.append(name)
            return update(*arguments, **options)

        model.update = noted  # type: ignore[method-assign]
    try:
        Trainer(run).train()
    except MegarlError as ended:
        error = f"{type(ended).__name__} {ended.code}: {ended}"
    finally:
        run.close()
    return error, sorted(set(updated))


def layers_from_folder(runtime: Runtime, config: Config) -> tuple[str, str, str]:
    """Compare layers with an engine that returns only log-probs.

    Returns: three messages: for the folder's weights, for an actor with one changed tensor, and for the
        same actor one step later. In the last case the change counts as learned.
    """
    config.run_dir.mkdir(exist_ok=True)
    run = build_run(config, runtime)
    run.engine = None
    step = Step("train", 1)
    step.batch = TrainBatch.build([[5, 6, 7]], [[*range(8, 40)]])
    right = parity.compare_layers(run, step, 0)
    for name, parameter in run.actor.model.named_parameters():
        if name.endswith("layers.2.mlp.linear_fc1.weight"):
            parameter.data.copy_(parameter.data.roll(1, 0))
    found = right, parity.compare_layers(run, step, 0), parity.compare_layers(run, step, 1)
    run.close()
    return found
