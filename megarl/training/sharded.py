"""Weights, optimizer and learning-rate schedule of a model in megatron-core's distributed checkpoint format.

Each rank writes and reads its own part; a checkpoint can be read at another tensor-, pipeline- and
data-parallel layout.
"""

from __future__ import annotations

import logging
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from megarl.config.errors import CheckpointError, first_line
from megarl.model.builder import LAYER, Critic, ModelChunks
from megarl.model.lora import Adapters
from megarl.parallel.comm import gather_objects
from megarl.parallel.cpu_platform import on_cpu
from megarl.training.checkpoint import Checkpoint
from megarl.training.model import TrainableModel
from megarl.weights.families import table_name
from megarl.weights.index import check_trainable, read_history

# Every state tensor has its parameter's shape in the file, so that any layout can read it.
# Not Megatron's variant that spares the GPU (distrib_optim_fully_reshardable_mem_efficient): it gathers over
# gloo to the first replica, which then writes the whole shard alone. Over NCCL each replica has all of it and
# writes its part. The plan counts a bucket's memory on the GPU (`checkpoint_need` in plan/memory.py).
OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}
EXTRA = "_extra_state"
EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
FAILURES = (CheckpointException, CheckpointingException, OSError, RuntimeError)


def megatron_state(model: TrainableModel, is_loading: bool) -> dict[str, Any]:
    """Return Megatron's sharded state of weights, optimizers and schedule; every rank calls this."""
    with quiet_warnings(), on_cpu():
        weights = trained = model_state(model.model)
        if model.config.frozen_layers:
            # One tensor of all layers would have holes in it: here each has one of its own.
            trained = model_state(model.model, metadata={"non_homogeneous_layers": True})
        optimizers = {}
        for optimizer in filter(_is_adam, model.optimizers):
            _mend(optimizer)
            allocate_moments(optimizer.optimizer)  # the first step may have been skipped
        if model.config.freezes:
            _lend_steps(model)
        for i, optimizer in enumerate(model.optimizers):
            if not _is_adam(optimizer):
                optimizers[str(i)] = _matrices(optimizer, weights)
                continue
            if is_loading:
                # It would load its own state into itself, so that there is one; there is. And Transformer
                # Engine's Adam makes new moments for that while it holds the old ones.
                optimizer.load_state_dict = lambda _: None
            optimizers[str(i)] = optimizer.sharded_state_dict(
                trained, is_loading=is_loading, metadata=OPTIMIZER_FORMAT
            )
            vars(optimizer).pop("load_state_dict", None)
    return {"model": weights, "optimizer": optimizers, "schedule_steps": model.schedule.num_steps}


def load_checkpoint(
    checkpoint: Checkpoint, models: Mapping[str, TrainableModel], prepare: Callable[[str], None]
) -> dict[str, Any]:
    """Fill the models that the checkpoint holds, whatever layout wrote it, and return its `state`; every rank
    calls this. `prepare` is called with a model's name before its weights and optimizer are needed. Raises
    CheckpointError where the checkpoint is damaged."""
    for name, model in models.items():
        if not (checkpoint.pretraining and name == "actor"):
            prepare(name)
            load_trainable(model, checkpoint.path / name)
    return checkpoint.state()


def load_trainable(model: TrainableModel, folder: Path) -> None:
    """Fill a model, its optimizer and its schedule with exactly the values of `folder`; every rank calls
    this. Raises CheckpointError where they cannot be read."""
    wanted = megatron_state(model, is_loading=True)
    loaded = _load(wanted, folder, model.model, "remove it to continue from an older one")
    with quiet_warnings(), on_cpu():
        for i, optimizer in enumerate(model.optimizers):
            of_file = loaded["optimizer"][str(i)]
            if _is_adam(optimizer):
                _load_optimizer(optimizer, of_file)
                continue
            for number, (_, parts) in enumerate(_of_matrices(optimizer)):
                for key, tensor in parts.items():
                    tensor.detach().copy_(of_file[str(number)][key])
    model.schedule.num_steps = loaded["schedule_steps"]


def load_model(model: ModelChunks, folder: Path) -> None:
    """Fill a model alone with the weights of a checkpoint's folder; every rank calls this. Raises
    CheckpointError where they cannot be read."""
    with quiet_warnings(), on_cpu():
        wanted = {"model": model_state(model)}
    _load(wanted, folder, model, "choose another checkpoint")


def _load(wanted: dict[str, Any], folder: Path, model: ModelChunks, remedy: str) -> dict[str, Any]:
    """Read the state `wanted`, fill the model with its part of it, and return all of it."""
    objects = {number: _take_objects(chunk) for number, chunk in wanted["model"].items()}
    try:
        index = check_trainable(folder)
        with quiet_warnings(), on_cpu():
            loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
        for number, own in objects.items():
            for name, key in own.items():
                history = read_history(folder, index, key)
                loaded["model"][number][name] = _for_transformer_engine(history, model.config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    except FAILURES as error:
        raise CheckpointError(f"{folder}: cannot be read: {reason(error)} ({remedy})") from error
    keys = [
        name
        for number, chunk in enumerate(model.chunks)
        for names in chunk.load_state_dict(loaded["model"][str(number)], strict=False)
        for name in names
    ]
    alone = _has_adapters(model)
    if wrong := [name for name in keys if not (name.endswith(EXTRA) or (alone and not _is_beside(name)))]:
        raise CheckpointError(
            f"{folder}: does not fit the model: {wrong[0]} (remove it to continue from an older one)"
        )
    return loaded


def _take_objects(chunk: dict[str, Any]) -> dict[str, str]:
    """Remove FP8's histories of delayed scaling from a chunk's sharded state; return their keys in the file.

    They are its only objects, which Megatron would unpickle from the file."""
    names = [name for name, value in chunk.items() if isinstance(value, ShardedObject)]
    return {name: chunk.pop(name).unique_key for name in names}


def _for_transformer_engine(history: dict[str, Any] | None, config: Any) -> Tensor | None:
    """Return a history as the bytes of a pickle, which Transformer Engine takes; the recipe is this run's."""
    if history is None:
        return None
    whole = {**history, "recipe": get_fp8_recipe(config)}
    return torch.frombuffer(bytearray(pickle.dumps(whole)), dtype=torch.uint8)


@contextmanager
def quiet_warnings() -> Iterator[None]:
    """Silence megatron-core's checkpointing, which stands on deprecated parts of torch. From 0.19 on it also
    logs on each rank, at each reading, that a later version will not read common.pt: megarl does not run with
    such a version."""
    common = logging.getLogger("megatron.core.dist_checkpointing.strategies.common")

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    common.addFilter(is_error)  # not setLevel, which makes every logger of the process forget what it knows
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        common.removeFilter(is_error)


def model_state(model: ModelChunks, **options: Any) -> dict[str, Any]:
    """Return Megatron's sharded state of the weights of each chunk, by its number on this rank; options: of
    its method. In the file layers go by their numbers in the whole model. A critic has a value head in the
    place of the output layer, on which GPTModel's own method insists. Names are the same for both kinds of
    layers, but for the extra state of FP8, which matters with recipe delayed alone: there it is what the
    scales were made from. Of a model with LoRA adapters it is these, and a critic's head."""
    if _has_adapters(model):
        return {str(number): _adapters(chunk) for number, chunk in enumerate(model.chunks)}
    matters = model.config.fp8 and model.config.fp8_recipe == "delayed"
    # Grouped experts have several in one module: `_extra_state`, `_extra_state1` and so on.
    states = {}
    for number, chunk in enumerate(model.chunks):
        state = (
            MegatronModule.sharded_state_dict(chunk, **options)
            if isinstance(chunk, Critic)
            else chunk.sharded_state_dict(**options)
        )
        kept = {name: value for name, value in state.items() if matters or f".{EXTRA}" not in name}
        states[str(number)] = kept
    return states


def _has_adapters(model: ModelChunks) -> bool:
    return any(isinstance(module, Adapters) for module in model.modules())


def _is_beside(name: str) -> bool:
    """Return whether a parameter stands beside a model that is frozen."""
    return ".lora." in name or name.startswith("value_head.")


def _adapters(chunk: Any) -> dict[str, ShardedTensor]:
    """Return the sharded state of what stands beside a frozen model. In the file each has its whole shape and
    the name that it has in the whole model."""
    experts, state = chunk.config.num_moe_experts or 0, dict[str, ShardedTensor]()
    first = (
        parallel_state.get_expert_model_parallel_rank() * experts // chunk.config.expert_model_parallel_size
    )
    tp = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    for name, parameter in chunk.named_parameters():
        if not _is_beside(name):
            continue
        in_layer = table_name(name)
        key = LAYER.sub(lambda match: str(chunk.decoder.layers[int(match[0])].layer_number - 1), in_layer)
        if ".experts." in name:
            key = EXPERT.sub(lambda match: str(int(match[0]) + first), key)
            number = 0, 0, parallel_state.get_expert_data_parallel_rank()
            state[name] = ShardedTensor.from_rank_offsets(key, parameter, replica_id=number)
        elif getattr(parameter, "tensor_model_parallel", False):
            cut = (parameter.partition_dim, *tp)
            state[name] = ShardedTensor.from_rank_offsets(key, parameter, cut, replica_id=(0, 0, replica))
            if name.endswith("gate_up_proj_b"):  # either half is cut for itself
                state[name] = apply_swiglu_sharded_factory(state[name], ())
        else:
            number = 0, tp[0], replica
            state[name] = ShardedTensor.from_rank_offsets(key, parameter, replica_id=number)
    return state


def _is_adam(optimizer: Any) -> bool:
    """Return whether it is a distributed optimizer, which cuts parameters; Muon's has whole ones."""
    return isinstance(optimizer, DistributedOptimizer)


def _of_matrices(muon: Any) -> list[tuple[Any, dict[str, Tensor]]]:
    """Return each matrix of this rank with what Muon keeps of it: its momentum, and a float32 copy where the
    model's own weight is bfloat16."""
    muon.init_state_fn(muon.optimizer, muon.config)  # the first step may have been skipped
    groups = zip(muon.float16_groups, muon.fp32_from_float16_groups, strict=True)
    kept = [(own, {"fp32_param": copy}, copy) for pair in groups for own, copy in zip(*pair, strict=True)]
    kept += [(own, {}, own) for group in muon.fp32_from_fp32_groups for own in group]
    return [(own, copies | muon.optimizer.state[main]) for own, copies, main in kept]


def _matrices(muon: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the sharded state of `_of_matrices`, by the matrix's place among them: in the file it has its
    matrix's name and shape. weights: of the model, sharded."""
    kept, state = _of_matrices(muon), dict[str, Any]()
    shards = get_param_id_to_sharded_param_map(weights, (own for own, _ in kept))
    for number, (_, parts) in enumerate(kept):
        # Of data-parallel replicas this one alone has it; 0: of tensor-parallel ones this one writes it.
        shard = replace(shards[number], replica_id=int(any(shards[number].replica_id[:2])))
        state[str(number)] = {
            key: make_sharded_optimizer_tensor(shard, tensor, f"optimizer.state.{key}")
            for key, tensor in parts.items()
        }
    return state


def _mend(optimizer: Any) -> None:
    """Correct two places where megatron-core 0.16 would save a parameter's state under another one's name.

    Where it gathers the state it leaves out the padding between the buckets of a buffer, and where it cuts
    the state into parameters it counts it (and warns of `data corruption`); there are several buckets where
    tied embeddings meet pipeline stages. Told that padding is content, it is consistent. And it takes a
    group's parameters to stand in their own order, but has put those in float32 before those in bfloat16; a
    bfloat16 critic has a float32 value head."""
    for buffer in optimizer.buffers:
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = buffer.numel
    groups = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for number, (single, half) in enumerate(groups):
        for place, parameter in enumerate([*single, *half]):
            optimizer.model_param_group_index_map[parameter] = (number, place)


def allocate_moments(adam: Any) -> None:
    """Give Adam the state that it has before its first step, which Megatron's saving and loading need."""
    if adam.state:
        return
    for p in (p for group in adam.param_groups for p in group["params"]):
        if hasattr(adam, "initialize_state"):  # Transformer Engine's FusedAdam
            adam.initialize_state(p, False)
        else:  # torch's, or apex's, which counts steps elsewhere
            step = {"step": torch.zeros(())} if isinstance(adam, torch.optim.Adam) else {}
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            adam.state[p] = {**step, **moments}


def _lend_steps(model: TrainableModel) -> None:
    """Give an Adam without parameters, as a pipeline stage has that is frozen whole, the number of steps that
    the others have taken: Megatron asks every rank's for it, and keeps in the file what rank 0 says."""

    def steps(adam: Any) -> list[float]:
        if isinstance(adam, torch.optim.Adam):
            return [float(state["step"]) for state in adam.state.values()]
        return [float(group.get("step", 0)) for group in adam.param_groups if group["params"]]

    adams = [optimizer.optimizer for optimizer in model.optimizers]
    ranks = gather_objects(model.runtime, [max(steps(adam), default=0.0) for adam in adams], list[float])
    for adam, counts in zip(adams, zip(*ranks, strict=True), strict=True):
        if any(group["params"] for group in adam.param_groups):
            continue
        if isinstance(adam, torch.optim.Adam):
            state: dict[Any, Any] = adam.state
            state["no parameter"] = {"step": torch.tensor(max(counts))}
        else:
            for group in adam.param_groups:
                group["step"] = int(max(counts))


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Fill an optimizer with what a file holds, whichever Adam has written it: the groups' settings, the
    number of steps, float32 weights and moments.

    DistributedOptimizer.load_state_dict does so for the Adam that has written the file alone: it takes the
    file's groups as they are, and Transformer Engine's has a setting that torch's has not (bias_correction),
    and counts steps in whole numbers. Of torch's it looks for a `step` among the tensors of the file, where
    there is none, and gives all parameters one and the same, which each of them would then count up; of
    Transformer Engine's it holds both moments twice."""
    adam = optimizer.optimizer
    written = {_group_key(group): group for group in state["optimizer"]["param_groups"]}
    for group in adam.param_groups:
        found = written[_group_key(group)]
        group.update({key: value for key, value in found.items() if key in group})
    counts = [own.pop("step") for own in adam.state.values() if "step" in own]
    # No tensors where the whole stage is frozen.
    optimizer.load_parameter_state_from_fully_reshardable(state.pop("param_state", {}))
    steps = max(int(group.get("step", 0)) for group in written.values())
    if counts:  # torch's Adam counts the steps of each parameter
        for own in adam.state.values():
            own["step"] = torch.tensor(float(steps))
    else:
        for group in adam.param_groups:
            group["step"] = steps


def _group_key(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return by what the group of a file is found again among an optimizer's."""
    return tuple(group[key] for key in ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"))


def reason(error: BaseException) -> str:
    """Return the innermost cause of an error, on one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return first_line(error)
