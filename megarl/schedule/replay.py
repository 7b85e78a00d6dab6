"""`megarl replay`: repeat a step from checkpoint and rollout, without an engine."""

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
from megarl.schedule.rollouts import list_rollout_files, manifest_path, rollouts_folder
from megarl.schedule.run import Run, Step, build_run
from megarl.schedule.source import RecordedRollouts
from megarl.training.checkpoint import (
    FOLDER,
    Checkpoint,
    find_checkpoint,
    find_damage,
    folder_name,
    open_checkpoint,
)
from megarl.training.sharded import load_checkpoint

IGNORED = ("time/", "inside/", "throughput/", "transfer/", "guard/", "memory")
# Of metrics with another layout: relative and also absolute, as most metrics are about 1.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


@dataclass(frozen=True)
class Outcome:
    """exact    numbers must be equal, else within `tolerance`
    numbers  name -> (recorded, replayed)
    weights  largest difference from the step's checkpoint; None without it"""

    exact: bool
    tolerance: float
    numbers: dict[str, tuple[float, float]]
    weights: float | None
    remarks: tuple[str, ...]

    @property
    def different(self) -> list[str]:
        limit = 0.0 if self.exact else self.tolerance
        names = [
            name
            for name, (a, b) in self.numbers.items()
            if not math.isclose(a, b, rel_tol=limit, abs_tol=limit)
        ]
        return names + (["weights"] if self.exact and self.weights else [])


def replay(config: Config, number: int, runtime: Runtime, tolerance: float | None = None) -> Outcome:
    """Repeat step `number`; collective.

    On a CPU with the checkpoint's layout and versions, results must be equal."""
    recorded = recorded_numbers(config, number)
    run = build_run(config, runtime, RecordedRollouts(config, runtime) if config.has_engine else None)
    try:
        checkpoint = find_start(config, number)
        remarks = [] if checkpoint is None else _load(run, checkpoint)
        if runtime.device.type == "cuda":
            remarks.append("attention's backward pass on CUDA is not deterministic")
        exact = not remarks
        for critic in run.critics if number == 1 else ():
            critic.start_schedule(config.steps)
        step = Step(config.main_stage, number)
        for phase in replay_phases(config):
            if phase.on_gpu:
                run.residency.onload(phase.name, phase.on_gpu)
            if phase.name == ROLLOUT:  # its function also needs the weight sync
                step.set_rollout(run.source.rollout(step.stage, number))
            else:
                FUNCTIONS[phase.name](run, step)
        replayed = {name: plain(value, name, []) for name, value in step.metrics.items()}
        if missing := sorted(recorded.keys() - replayed.keys()):
            remarks.append(f"recorded but not replayed: {', '.join(missing)}")
        names = sorted(recorded.keys() & replayed.keys())
        numbers = {name: (recorded[name], replayed[name]) for name in names}
        final_checkpoint = None
        with suppress(CheckpointError):  # it may have been removed
            final_checkpoint = open_checkpoint(
                config.run_dir / FOLDER / folder_name(config.main_stage, number)
            )
        weights = None if final_checkpoint is None else _compare_weights(run, final_checkpoint, runtime)
        return Outcome(exact, tolerance or TOLERANCE[config.model.dtype], numbers, weights, tuple(remarks))
    finally:
        run.close()


def _load(run: Run, checkpoint: Checkpoint) -> list[str]:
    if damaged := find_damage(checkpoint, run.runtime):
        raise CheckpointError(damaged[0])
    state = load_checkpoint(checkpoint, run.models, run.residency.onload_for_checkpoint)
    run.source.load_state_dict(state["samplers"])
    for name, method_state in run.method_states.items():
        method_state.load_state_dict(state[name])
    layout, remarks = asdict(run.runtime.layout), []
    recorded = {"cp": 1, "vpp": 1, **checkpoint.manifest["layout"]}  # missing in old checkpoints
    if recorded != layout:
        remarks.append(f"the layout differs: {layout}, not {recorded}")
    if checkpoint.manifest["versions"] != versions():
        remarks.append("package versions differ from the checkpoint's (manifest.json)")
    return remarks


def recorded_numbers(config: Config, number: int) -> dict[str, float]:
    for record in read_metrics(config.run_dir).records:
        if record["stage"] == config.main_stage and record["step"] == number:
            if record.get("guard/skipped"):
                problem = f"step {number} was skipped because of a non-finite number"
                raise DataError(f"{config.run_dir}: {problem} (its batch is in failed/)")
            return {
                name: value
                for name, value in record.items()
                if isinstance(value, int | float) and name != "step" and not name.startswith(IGNORED)
            }
    missing = f"no step {number} of stage {config.main_stage}"
    raise DataError(f"{config.run_dir}/metrics.jsonl: {missing} (choose another --step)")


def find_start(config: Config, number: int) -> Checkpoint | None:
    """Return the checkpoint before the step, None at the start. Raises CheckpointError if removed."""
    if number > 1:
        path = config.run_dir / FOLDER / folder_name(config.main_stage, number - 1)
        if not path.exists():
            newest = ", ".join(sorted(one.name for one in path.parent.glob("*-*"))[-5:]) or "none"
            missing = f"step {number} needs the checkpoint {path.name}; the newest there: {newest}"
            raise CheckpointError(f"{path.parent}: {missing} (choose a step after one of them)")
        return open_checkpoint(path)
    if not (config.has_critic and config.value_pretraining.steps):
        return None
    step_folders = list((config.run_dir / FOLDER).glob("step-*"))
    checkpoint, _ = find_checkpoint(config.run_dir, step_folders)
    if (
        checkpoint is None
        or checkpoint.stage != PRETRAINING
        or not checkpoint.state()["value_pretraining"]["done"]
    ):
        missing = "no checkpoint of the end of value pretraining"
        raise CheckpointError(f"{config.run_dir / FOLDER}: {missing} (keep more: checkpoint.keep)")
    return checkpoint


def _compare_weights(run: Run, checkpoint: Checkpoint, runtime: Runtime) -> float:

    def copy_weights(name: str) -> list[torch.Tensor]:
        run.residency.onload_for_checkpoint(name)
        return [parameter.detach().to("cpu", copy=True) for parameter in run.models[name].model.parameters()]

    replayed_weights = {name: copy_weights(name) for name in run.models}
    load_checkpoint(checkpoint, run.models, run.residency.onload_for_checkpoint)
    largest = 0.0
    for name in run.models:
        for replayed_weight, recorded_weight in zip(replayed_weights[name], copy_weights(name), strict=True):
            if not torch.equal(replayed_weight, recorded_weight):
                largest = max(largest, float((replayed_weight.float() - recorded_weight.float()).abs().max()))
    return max_over_ranks(runtime, largest)


def check_replay(config: Config, number: int) -> None:
    if number < 1:
        raise ConfigError(f"--step: must be >= 1 (got {number})")
    recorded_numbers(config, number)
    find_start(config, number)
    if config.has_engine:
        path = manifest_path(rollouts_folder(config), number)
        if not path.exists():
            raise DataError(f"{path}: no such file (only checkpoint.rollouts: true keeps rollouts)")
        list_rollout_files(path)


def lines(outcome: Outcome) -> list[str]:
    details = []
    for name in outcome.different:
        if name in outcome.numbers:
            recorded, replayed = outcome.numbers[name]
            details.append(f"{name}: recorded {recorded:.9g}, replayed {replayed:.9g}")
    rule = "to the last recorded digit" if outcome.exact else f"within {outcome.tolerance:g}"
    verdict = f"{len(outcome.numbers) - len(details)} of {len(outcome.numbers)} numbers equal {rule}"
    if outcome.weights is not None:
        verdict += f"; largest difference of a weight after the step: {outcome.weights:.3g}"
    count = [f"{len(outcome.different)} differ"] if outcome.different else []
    return [*outcome.remarks, *details, verdict, *count]
