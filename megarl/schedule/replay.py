"""One step of a run, done again from its checkpoint and its rollout, and compared with what was recorded.
Nothing is drawn: there is no engine, whatever the run had.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch

from megarl.config.errors import CheckpointError, ConfigError, DataError
from megarl.config.phases import ROLLOUT, replay_phases
from megarl.config.schema import PRETRAINING, Config
from megarl.observe.run_log import plain
from megarl.observe.runs import read_metrics
from megarl.parallel.comm import max_over_ranks
from megarl.parallel.runtime import Runtime
from megarl.schedule.phases import FUNCTIONS
from megarl.schedule.preflight import versions
from megarl.schedule.rollouts import manifest_path, rollout_files, rollouts_folder
from megarl.schedule.run import Run, Step, build_run
from megarl.schedule.source import RecordedRollouts
from megarl.training.checkpoint import (
    FOLDER,
    Checkpoint,
    damage_of,
    find_checkpoint,
    folder_name,
    open_checkpoint,
)
from megarl.training.sharded import load_checkpoint

# Of the clock, of the engine, and of the run as a whole: no part of the step's arithmetic.
LEFT_OUT = ("time/", "inside/", "throughput/", "transfer/", "guard/", "memory")
# Where the layout is another: relative, and absolute as most metrics are about 1.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


@dataclass(frozen=True)
class Outcome:
    """What a replay found.

    exact    every number must be the same; else within `tolerance`
    numbers  name -> (recorded, replayed)
    weights  largest difference of any from those of the step's own checkpoint, None where there is none"""

    exact: bool
    tolerance: float
    numbers: dict[str, tuple[float, float]]
    weights: float | None
    remarks: tuple[str, ...]

    @property
    def different(self) -> list[str]:
        """Return the names of the numbers that differ, and `weights`."""
        limit = 0.0 if self.exact else self.tolerance
        names = [
            name
            for name, (a, b) in self.numbers.items()
            if not math.isclose(a, b, rel_tol=limit, abs_tol=limit)
        ]
        return names + (["weights"] if self.exact and self.weights else [])


def replay(config: Config, number: int, runtime: Runtime, tolerance: float | None = None) -> Outcome:
    """Do step `number` of the run in config.run_dir again; every rank calls this. The numbers must be the
    same to the last recorded digit, and the weights to the bit, where layout and versions are those that
    wrote the checkpoint.

    Raises CheckpointError or DataError where its checkpoint, its rollout or its record is missing or
    damaged."""
    recorded = recorded_numbers(config, number)
    run = build_run(config, runtime, RecordedRollouts(config, runtime) if config.has_engine else None)
    try:
        checkpoint = before(config, number)
        remarks = []
        if checkpoint is not None:
            if damaged := damage_of(checkpoint, runtime):
                raise CheckpointError(damaged[0])
            state = load_checkpoint(checkpoint, run.models, run.residency.onload_for_checkpoint)
            run.source.load_state_dict(state["samplers"])
            for name, method_state in run.method_states.items():
                method_state.load_state_dict(state[name])
            layout = asdict(runtime.layout)
            wrote = {"cp": 1, "vpp": 1, **checkpoint.manifest["layout"]}  # older checkpoints have neither
            if wrote != layout:
                remarks.append(f"the layout is another: {layout}, not {wrote}")
            if checkpoint.manifest["versions"] != versions():
                remarks.append("versions have changed since (manifest.json)")
        if runtime.device.type == "cuda":
            remarks.append("attention's backward pass on CUDA does not give the same bits twice")
        exact = not remarks
        for critic in run.critics if number == 1 else ():
            critic.start_schedule(config.steps)
        step = Step(config.main_stage, number)
        for phase in replay_phases(config):
            if phase.on_gpu:
                run.residency.onload(phase.name, phase.on_gpu)
            if phase.name == ROLLOUT:  # whose function also asks the engines what has failed
                step.take(run.source.rollout(step.stage, number))
            else:
                FUNCTIONS[phase.name](run, step)
        found = {name: plain(value, name, []) for name, value in step.metrics.items()}
        if missing := sorted(recorded.keys() - found.keys()):
            remarks.append(f"recorded but not replayed: {', '.join(missing)}")
        numbers = {name: (recorded[name], found[name]) for name in sorted(recorded.keys() & found.keys())}
        own = None
        with suppress(CheckpointError):  # the checkpoint that was written after the step may be gone
            own = open_checkpoint(config.run_dir / FOLDER / folder_name(config.main_stage, number))
        weights = None if own is None else _differ(run, own, runtime)
        return Outcome(exact, tolerance or TOLERANCE[config.model.dtype], numbers, weights, tuple(remarks))
    finally:
        run.close()


def recorded_numbers(config: Config, number: int) -> dict[str, float]:
    """Return what metrics.jsonl holds of the step. Raises DataError where it holds nothing."""
    for record in read_metrics(config.run_dir).records:
        if record["stage"] == config.main_stage and record["step"] == number:
            if record.get("guard/skipped"):
                skipped = f"step {number} was skipped, as a number was not finite"
                raise DataError(f"{config.run_dir}: {skipped} (its batch is in failed/)")
            return {
                name: value
                for name, value in record.items()
                if isinstance(value, int | float) and name != "step" and not name.startswith(LEFT_OUT)
            }
    missing = f"no step {number} of stage {config.main_stage}"
    raise DataError(f"{config.run_dir}/metrics.jsonl: {missing} (choose another --step)")


def before(config: Config, number: int) -> Checkpoint | None:
    """Return the checkpoint from which the step began, None where that was the models' folders. Raises
    CheckpointError where it is gone."""
    if number > 1:
        return open_checkpoint(config.run_dir / FOLDER / folder_name(config.main_stage, number - 1))
    if not (config.has_critic and config.value_pretraining.steps):
        return None
    later = list((config.run_dir / FOLDER).glob("step-*"))
    checkpoint, _ = find_checkpoint(config.run_dir, later)
    if (
        checkpoint is None
        or checkpoint.stage != PRETRAINING
        or not checkpoint.state()["value_pretraining"]["done"]
    ):
        missing = "no checkpoint of the end of value pretraining"
        raise CheckpointError(f"{config.run_dir / FOLDER}: {missing} (keep more: checkpoint.keep)")
    return checkpoint


def _differ(run: Run, checkpoint: Checkpoint, runtime: Runtime) -> float:
    """Load the checkpoint into the models; return the largest difference of a weight from before."""

    def weights(name: str) -> list[torch.Tensor]:
        run.residency.onload_for_checkpoint(name)
        return [parameter.detach().to("cpu", copy=True) for parameter in run.models[name].model.parameters()]

    ours = {name: weights(name) for name in run.models}
    load_checkpoint(checkpoint, run.models, run.residency.onload_for_checkpoint)
    largest = 0.0
    for name in run.models:
        for mine, theirs in zip(ours[name], weights(name), strict=True):
            if not torch.equal(mine, theirs):
                largest = max(largest, float((mine.float() - theirs.float()).abs().max()))
    return max_over_ranks(runtime, largest)


def check_replay(config: Config, number: int) -> None:
    """Check, before a rank is started, that record, checkpoint and rollout of the step are there."""
    if number < 1:
        raise ConfigError(f"--step: must be >= 1 (got {number})")
    recorded_numbers(config, number)
    before(config, number)
    if config.has_engine:
        rollout_files(manifest_path(rollouts_folder(config), number))


def lines(outcome: Outcome) -> list[str]:
    """Return lines for people: what differs, and the verdict."""
    different = outcome.different
    chosen = {name: outcome.numbers[name] for name in different if name in outcome.numbers}
    shown = [f"{name}: recorded {a:.9g}, replayed {b:.9g}" for name, (a, b) in chosen.items()]
    rule = "to the last recorded digit" if outcome.exact else f"within {outcome.tolerance:g}"
    verdict = f"{len(outcome.numbers) - len(shown)} of {len(outcome.numbers)} numbers equal {rule}"
    if outcome.weights is not None:
        verdict += f"; largest difference of a weight after the step: {outcome.weights:.3g}"
    return [
        *outcome.remarks,
        *shown,
        verdict,
        *([f"{len(different)} differ"] if different else []),
    ]
