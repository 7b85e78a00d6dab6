"""A learner's weights, optimizer and learning-rate schedule in megatron-core's distributed checkpoint format.

Each rank writes and reads its own part; a checkpoint can be read at another tensor-, pipeline- and data-parallel layout.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint import CheckpointException

from megarl.config.errors import CheckpointError
from megarl.config.files import check_index
from megarl.model.builder import Actor, Critic
from megarl.parallel.comm import gather_objects
from megarl.parallel.cpu_platform import on_cpu
from megarl.training.learner import Learner
from megarl.training.staging import Staged, Stager

# Every state tensor has its parameter's shape in the file, so that it can be read at another layout, data parallelism included.
OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}
EXTRA = "_extra_state"
FAILURES = (CheckpointException, CheckpointingException, OSError, RuntimeError)


def stage_learner(learner: Learner, stager: Stager) -> Staged:
    """Host copies of what this rank writes of the learner; every rank calls this. CheckpointError on every rank where it is not whole."""
    # megatron-core collects garbage in the midst of it, which takes seconds in a process with so many objects, unless they are set aside.
    # In a forked rank what it was forked with is aside for good: to take it back would copy the memory that ranks share.
    whole = gc.get_freeze_count() == 0
    if whole:
        gc.freeze()
    try:
        with _megatron():
            state = _state(learner, is_loading=False)
        with _quiet():  # the rest asks for no device
            return stager.stage(state)
    except FAILURES as error:
        raise CheckpointError(f"cannot be put together: {_reason(error)} (a defect: please report it)") from error
    finally:
        if whole:
            gc.unfreeze()


def save_learner(learner: Learner, folder: Path) -> None:
    """Writes into the empty `folder`; every rank calls this. CheckpointError on every rank where one of them cannot write."""
    staged = stage_learner(learner, Stager(learner.runtime))
    failure = None
    try:
        staged.write(folder)
    except FAILURES as error:
        failure = _reason(error)
    failures, results = zip(*gather_objects(learner.runtime, (failure, staged.results)), strict=True)
    if learner.runtime.rank == 0 and not any(failures):
        try:
            staged.finish(folder, list(results))
        except FAILURES as error:
            failure = _reason(error)
    failures = (*failures, *gather_objects(learner.runtime, failure))
    if any(failures):
        raise CheckpointError(cannot_be_written(next(text for text in failures if text)))


def cannot_be_written(reason: str) -> str:
    """What is said of a disk that is full, or gone."""
    return f"cannot be written: {reason} (make room, or set checkpoint.every to 0)"


def load_learner(learner: Learner, folder: Path) -> None:
    """Fills the learner with exactly the values of `folder`; every rank calls this. CheckpointError where they cannot be read."""
    check_index(folder / ".metadata")
    parts = _optimizers(learner)
    for part in parts.values():
        _allocate(part.optimizer)
    with _megatron():
        wanted = _state(learner, is_loading=True)
    try:
        with _megatron():
            loaded = dist_checkpointing.load(wanted, str(folder))
    except FAILURES as error:
        raise CheckpointError(f"cannot be read: {_reason(error)} (remove it to continue from an older one)") from error
    _fill(learner.model, loaded["model"])
    with _megatron():
        for name, part in parts.items():
            _load_optimizer(part, loaded["optimizer"][name])
    learner.schedule.num_steps = loaded["schedule_steps"]


def load_model(model: Actor | Critic, folder: Path) -> None:
    """Fills a model alone with the weights that `save_learner` wrote; every rank calls this. CheckpointError where they cannot be read."""
    check_index(folder / ".metadata")
    try:
        with _megatron():
            loaded = dist_checkpointing.load({"model": _model_state(model)}, str(folder))
    except FAILURES as error:
        raise CheckpointError(f"cannot be read: {_reason(error)} (choose another checkpoint)") from error
    _fill(model, loaded["model"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Around megatron-core's checkpointing, which stands on parts of torch that warn of their end. From 0.19 on each rank is also told,
    at each reading, that a later version will not read common.pt; versions that do not are none that megarl runs with."""
    common = logging.getLogger("megatron.core.dist_checkpointing.strategies.common")
    before = common.level
    common.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        common.setLevel(before)


@contextmanager
def _megatron() -> Iterator[None]:
    """The same, where it asks for the device."""
    with _quiet(), on_cpu():
        yield


def _optimizers(learner: Learner) -> dict[str, Any]:
    """Megatron's distributed optimizers by number."""
    return {str(i): part for i, part in enumerate(learner.parts)}


def _state(learner: Learner, is_loading: bool) -> dict[str, Any]:
    model = _model_state(learner.model)
    for part in _optimizers(learner).values():
        _mend(part)
    optimizers = {
        name: part.sharded_state_dict(model, is_loading=is_loading, metadata=OPTIMIZER_FORMAT)
        for name, part in _optimizers(learner).items()
    }
    return {"model": model, "optimizer": optimizers, "schedule_steps": learner.schedule.num_steps}


def _model_state(model: Actor | Critic) -> dict[str, Any]:
    """A critic has a value head in the place of the output layer, on which GPTModel's own method insists. Names are the same for both
    kinds of layers, but for the extra state of FP8, which says something with recipe delayed alone: what the scales were made from."""
    state = MegatronModule.sharded_state_dict(model) if isinstance(model, Critic) else model.sharded_state_dict()
    matters = model.config.fp8 and model.config.fp8_recipe == "delayed"
    return {name: value for name, value in state.items() if matters or not name.endswith(EXTRA)}


def _fill(model: Actor | Critic, state: dict[str, Any]) -> None:
    """The weights that were loaded for `_model_state` into the model."""
    wrong = [name for names in model.load_state_dict(state, strict=False) for name in names if not name.endswith(EXTRA)]
    if wrong:
        raise CheckpointError(f"does not fit the model: {wrong[0]} (remove it to continue from an older one)")


def _mend(optimizer: Any) -> None:
    """Two places where megatron-core 0.16 would save a parameter's state under another one's name.

    It leaves out the padding between the buckets of a buffer when it gathers the state, and counts it when it cuts the state into
    parameters (it warns of `data corruption`); there are several buckets where tied embeddings meet pipeline stages. Told that padding
    is content, it is consistent. And it takes a group's parameters to stand in their own order, but has put those in float32 before
    those in bfloat16; a critic in bfloat16 has a value head in float32."""
    for buffer in optimizer.buffers:
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = buffer.numel
    groups = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for number, (single, half) in enumerate(groups):
        for place, parameter in enumerate([*single, *half]):
            optimizer.model_param_group_index_map[parameter] = (number, place)


def _allocate(adam: torch.optim.Optimizer) -> None:
    """torch's Adam has no state before its first step, which Megatron's loading needs (of Transformer Engine's it knows)."""
    if not isinstance(adam, torch.optim.Adam) or adam.state:
        return
    for group in adam.param_groups:
        for p in group["params"]:
            adam.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """As DistributedOptimizer.load_state_dict, which with torch's Adam looks for a `step` among the tensors of the file, where
    there is none, and gives all parameters one and the same `step`, which each of them would then count up."""
    tensors = state.pop("param_state")
    optimizer.load_state_dict(state)  # the groups' settings and their step
    inner = optimizer.optimizer.state
    steps = {p: own.pop("step") for p, own in inner.items() if "step" in own}
    optimizer.load_parameter_state_from_fully_reshardable(tensors)
    for p, step in steps.items():
        inner[p]["step"] = step.clone()


def _reason(error: BaseException) -> str:
    """The innermost cause, on one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
