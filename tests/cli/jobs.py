"""Functions that the tests of `megarl eval` run on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.config.schema import Config
from megarl.parallel.runtime import Runtime
from megarl.schedule.evaluation import Evaluation, find_policy
from megarl.schedule.models import export_model
from megarl.schedule.run import build_run
from megarl.training.sharded import allocate_moments
from tests.checkpoints import save_checkpoint


def write_perturbed(runtime: Runtime, config: Config) -> None:
    """Write a checkpoint of step 3 and an export into config.run_dir, with weights other than model.path."""
    run = build_run(config, runtime)
    with torch.no_grad():
        for parameter in run.actor.model.parameters():
            parameter.mul_(1.25)  # equal on every rank, so that replicated weights stay equal
    for part in run.actor.optimizers:
        allocate_moments(part.optimizer)  # as the optimizer's first step would
    run.actor.optimizer.reload_model_params()
    save_checkpoint(run, 3, {"samplers": run.source.snapshot()}, {})
    export_model(run.actor, config, runtime, config.run_dir / "hf")
    run.close()


def evaluate_policy(
    runtime: Runtime, config: Config, given: Path
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Return the engine's weights and, on rank 0, all responses."""
    evaluation = Evaluation(*find_policy(config, given), runtime)
    weights = {name: tensor.clone() for name, tensor in evaluation.engine.parameters().items()}
    found = evaluation.answer()
    answers = list(found.answers(evaluation.tokenizer)) if runtime.rank == 0 else []
    evaluation.close()
    return weights, answers


def start_training(runtime: Runtime, config: Config) -> list[torch.Tensor]:
    """Return a run's initial weights on this rank: actor, critic, and the engine after a transfer."""
    run = build_run(config, runtime)
    assert run.engine is not None and run.weight_sync is not None
    run.weight_sync.sync(0)
    weights = [
        *run.actor.model.parameters(),
        *run.critics[0].model.parameters(),
        *run.engine.parameters().values(),
    ]
    run.close()
    return [tensor.detach().clone() for tensor in weights]
