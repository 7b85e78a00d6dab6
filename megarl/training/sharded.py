"""Save and load weights, optimizer and schedule in Megatron's checkpoint format, for any layout."""

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
from megarl.training.self_teacher import AverageWeights
from megarl.weights.families import get_table_name
from megarl.weights.index import check_trainable, read_history

# State tensors have their parameter's shape, so any layout can read them. Saving gathers bucket by bucket
# on the GPU (`checkpoint_need` in plan/memory.py). The variant
# distrib_optim_fully_reshardable_mem_efficient gathers over gloo to one replica, which writes everything.
OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}
EXTRA = "_extra_state"
EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
FAILURES = (CheckpointException, CheckpointingException, OSError, RuntimeError)


def megatron_state(model: TrainableModel, is_loading: bool) -> dict[str, Any]:
    """Return Megatron's sharded state of weights, optimizers and schedule. Collective."""
    with quiet_warnings(), on_cpu():
        weights = trained_weights = model_state(model.model)
        if model.config.frozen_layers:
            # A tensor of all layers would have holes.
            trained_weights = model_state(model.model, metadata={"non_homogeneous_layers": True})
        for optimizer in filter(_is_adam, model.optimizers):
            _fix_saved_names(optimizer)
            allocate_moments(optimizer.optimizer)
        if model.config.freezes:
            _lend_steps(model)
        optimizers = {
            str(i): _adam_state(optimizer, trained_weights, is_loading)
            if _is_adam(optimizer)
            else _muon_state(optimizer, weights)
            for i, optimizer in enumerate(model.optimizers)
        }
        state = {"model": weights, "optimizer": optimizers, "schedule_steps": model.schedule.num_steps}
        if model.average is not None:
            state["average"] = _average_state(model.model, model.average, weights)
    return state


def _adam_state(optimizer: Any, weights: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """Return the sharded state of a distributed Adam. Collective."""
    if is_loading:
        # Megatron would load the existing state into itself; Transformer Engine's Adam would then hold its
        # moments twice.
        optimizer.load_state_dict = lambda _: None
    options = {"is_loading": is_loading, "metadata": OPTIMIZER_FORMAT}
    state: dict[str, Any] = optimizer.sharded_state_dict(weights, **options)
    vars(optimizer).pop("load_state_dict", None)
    return state


def _average_state(model: ModelChunks, average: AverageWeights, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the sharded state of a model's average weights, by the parameters' order on this rank."""
    shards = get_param_id_to_sharded_param_map(weights, model.parameters())
    copies = enumerate(average.weights.values())
    return {str(i): make_sharded_optimizer_tensor(shards[i], copy, "average") for i, copy in copies}


def load_checkpoint(
    checkpoint: Checkpoint, models: Mapping[str, TrainableModel], prepare: Callable[[str], None]
) -> dict[str, Any]:
    """Load a checkpoint and return its `state`. Collective. Raises CheckpointError.

    prepare: called with each model's name first"""
    for name, model in models.items():
        if not (checkpoint.pretraining and name == "actor"):
            prepare(name)
            load_trainable(model, checkpoint.path / name)
    return checkpoint.state()


def load_trainable(model: TrainableModel, folder: Path) -> None:
    """Load model, optimizer and schedule. Collective. Raises CheckpointError."""
    sharded_state = megatron_state(model, is_loading=True)
    loaded = _load(sharded_state, folder, model.model, "remove it to continue from an older one")
    with quiet_warnings(), on_cpu():
        for i, optimizer in enumerate(model.optimizers):
            saved_state = loaded["optimizer"][str(i)]
            if _is_adam(optimizer):
                _load_optimizer(optimizer, saved_state)
                continue
            for matrix_index, (_, tensors) in enumerate(_list_muon_tensors(optimizer)):
                for key, tensor in tensors.items():
                    tensor.detach().copy_(saved_state[str(matrix_index)][key])
    model.schedule.num_steps = loaded["schedule_steps"]
    if model.average is not None:
        for i, copy in enumerate(model.average.weights.values()):
            copy.copy_(loaded["average"][str(i)])


def load_model(model: ModelChunks, folder: Path) -> None:
    """Collective. Raises CheckpointError."""
    with quiet_warnings(), on_cpu():
        sharded_state = {"model": model_state(model)}
    _load(sharded_state, folder, model, "choose another checkpoint")


def _load(wanted: dict[str, Any], folder: Path, model: ModelChunks, remedy: str) -> dict[str, Any]:
    """Load a sharded state, put its weights into the model, and return the rest. Raises CheckpointError."""
    history_keys = {
        chunk_index: _remove_fp8_histories(chunk) for chunk_index, chunk in wanted["model"].items()
    }
    try:
        index = check_trainable(folder)
        with quiet_warnings(), on_cpu():
            loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
        for chunk_index, keys_by_name in history_keys.items():
            for name, key in keys_by_name.items():
                history = read_history(folder, index, key)
                loaded["model"][chunk_index][name] = _pickle_fp8_history(history, model.config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    except FAILURES as error:
        raise CheckpointError(f"{folder}: cannot be read: {reason(error)} ({remedy})") from error
    only_adapters = _has_adapters(model)
    for chunk_index, chunk in enumerate(model.chunks):
        missing, unexpected = chunk.load_state_dict(loaded["model"][str(chunk_index)], strict=False)
        for name in (*missing, *unexpected):
            if not (name.endswith(EXTRA) or (only_adapters and not _is_adapter_or_value_head(name))):
                what = f"does not fit the model: {name} (remove it to continue from an older one)"
                raise CheckpointError(f"{folder}: {what}")
    return loaded


def _remove_fp8_histories(chunk: dict[str, Any]) -> dict[str, str]:
    """Remove FP8's delayed-scaling histories, which Megatron would unpickle; return their keys."""
    names = [name for name, value in chunk.items() if isinstance(value, ShardedObject)]
    return {name: chunk.pop(name).unique_key for name in names}


def _pickle_fp8_history(history: dict[str, Any] | None, config: Any) -> Tensor | None:
    """Return the extra state that Transformer Engine unpickles, of a history read without unpickling."""
    if history is None:
        return None
    extra_state = {**history, "recipe": get_fp8_recipe(config)}
    return torch.frombuffer(bytearray(pickle.dumps(extra_state)), dtype=torch.uint8)


@contextmanager
def quiet_warnings() -> Iterator[None]:
    """Silence Megatron's warnings about deprecations, and 0.19's about common.pt."""
    logger = logging.getLogger("megatron.core.dist_checkpointing.strategies.common")

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)  # setLevel would clear the caches of all loggers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.removeFilter(is_error)


def model_state(model: ModelChunks, **options: Any) -> dict[str, Any]:
    """Return the sharded state of each chunk's weights, by its index on this rank.

    Portable and Transformer Engine layers have equal names, except FP8's extra state with recipe delayed.
    With LoRA: only adapters and a critic's head."""
    if _has_adapters(model):
        return {str(chunk_index): _adapter_state(chunk) for chunk_index, chunk in enumerate(model.chunks)}
    keeps_extra_state = model.config.fp8 and model.config.fp8_recipe == "delayed"
    states = {}
    for chunk_index, chunk in enumerate(model.chunks):
        is_critic = isinstance(chunk, Critic)
        method = MegatronModule.sharded_state_dict if is_critic else type(chunk).sharded_state_dict
        states[str(chunk_index)] = {
            name: value
            for name, value in method(chunk, **options).items()
            if keeps_extra_state or f".{EXTRA}" not in name
        }
    return states


def _has_adapters(model: ModelChunks) -> bool:
    return any(isinstance(module, Adapters) for module in model.modules())


def _is_adapter_or_value_head(name: str) -> bool:
    return ".lora." in name or name.startswith("value_head.")


def _adapter_state(chunk: Any) -> dict[str, ShardedTensor]:
    """Return the sharded state of a chunk's LoRA adapters and value head, by parameter name."""
    state: dict[str, ShardedTensor] = {}
    local_experts = (chunk.config.num_moe_experts or 0) // chunk.config.expert_model_parallel_size
    first_expert = parallel_state.get_expert_model_parallel_rank() * local_experts
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    dp_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    for name, parameter in chunk.named_parameters():
        if not _is_adapter_or_value_head(name):
            continue
        table_name = get_table_name(name)
        key = LAYER.sub(lambda match: str(chunk.decoder.layers[int(match[0])].layer_number - 1), table_name)
        if ".experts." in name:
            key = EXPERT.sub(lambda match: str(int(match[0]) + first_expert), key)
            replica_id = 0, 0, parallel_state.get_expert_data_parallel_rank()
            state[name] = ShardedTensor.from_rank_offsets(key, parameter, replica_id=replica_id)
        elif getattr(parameter, "tensor_model_parallel", False):
            rank_offset, replica_id = (parameter.partition_dim, tp_rank, tp), (0, 0, dp_rank)
            state[name] = ShardedTensor.from_rank_offsets(key, parameter, rank_offset, replica_id=replica_id)
            if name.endswith("gate_up_proj_b"):
                state[name] = apply_swiglu_sharded_factory(state[name], ())
        else:
            replica_id = 0, tp_rank, dp_rank
            state[name] = ShardedTensor.from_rank_offsets(key, parameter, replica_id=replica_id)
    return state


def _is_adam(optimizer: Any) -> bool:
    return isinstance(optimizer, DistributedOptimizer)


def _list_muon_tensors(muon: Any) -> list[tuple[Any, dict[str, Tensor]]]:
    """Return each matrix, with the tensors that Muon keeps of it by name: float32 copy, momentum."""
    muon.init_state_fn(muon.optimizer, muon.config)  # the first step may have been skipped
    groups = zip(muon.float16_groups, muon.fp32_from_float16_groups, strict=True)
    matrices = [
        (parameter, {"fp32_param": copy}, copy)
        for pair in groups
        for parameter, copy in zip(*pair, strict=True)
    ]
    matrices += [(parameter, {}, parameter) for group in muon.fp32_from_fp32_groups for parameter in group]
    return [(parameter, copies | muon.optimizer.state[main]) for parameter, copies, main in matrices]


def _muon_state(muon: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Return Muon's sharded state. weights: the model's, whose shards its tensors have"""
    matrices, state = _list_muon_tensors(muon), dict[str, Any]()
    shards = get_param_id_to_sharded_param_map(weights, (parameter for parameter, _ in matrices))
    for matrix_index, (_, tensors) in enumerate(matrices):
        # Other replicas must not count as copies: only this data-parallel rank has the state.
        shard = replace(shards[matrix_index], replica_id=int(any(shards[matrix_index].replica_id[:2])))
        state[str(matrix_index)] = {
            key: make_sharded_optimizer_tensor(shard, tensor, f"optimizer.state.{key}")
            for key, tensor in tensors.items()
        }
    return state


def _fix_saved_names(optimizer: Any) -> None:
    """Work around two places where megatron-core 0.16 saves a parameter's state under another name.

    1. Gathering skips the padding between buckets, but splitting counts it; declare padding as content.
    2. Loading expects parameters in their group's order, but saving puts float32 ones (a bfloat16 critic's
    head) first."""
    for buffer in optimizer.buffers:
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = buffer.numel
    groups = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for group_index, (fp32_parameters, float16_parameters) in enumerate(groups):
        for index, parameter in enumerate([*fp32_parameters, *float16_parameters]):
            optimizer.model_param_group_index_map[parameter] = (group_index, index)


def allocate_moments(adam: Any) -> None:
    """Create Adam's initial state for Megatron's checkpoints."""
    if adam.state:
        return
    for p in (p for group in adam.param_groups for p in group["params"]):
        if hasattr(adam, "initialize_state"):
            adam.initialize_state(p, False)
        else:  # torch or apex; apex counts steps in its groups
            step = {"step": torch.zeros(())} if isinstance(adam, torch.optim.Adam) else {}
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            adam.state[p] = {**step, **moments}


def _lend_steps(model: TrainableModel) -> None:
    """Give a fully frozen stage's Adam the other ranks' number of steps: Megatron saves rank 0's."""

    def list_steps(adam: Any) -> list[float]:
        if isinstance(adam, torch.optim.Adam):
            return [float(state["step"]) for state in adam.state.values()]
        return [float(group.get("step", 0)) for group in adam.param_groups if group["params"]]

    adams = [optimizer.optimizer for optimizer in model.optimizers]
    own_steps = [max(list_steps(adam), default=0.0) for adam in adams]
    steps_by_rank = gather_objects(model.runtime, own_steps, list[float])
    for adam, counts in zip(adams, zip(*steps_by_rank, strict=True), strict=True):
        if any(group["params"] for group in adam.param_groups):
            continue
        if isinstance(adam, torch.optim.Adam):
            state: dict[Any, Any] = adam.state
            state["no parameter"] = {"step": torch.tensor(max(counts))}
        else:
            for group in adam.param_groups:
                group["step"] = int(max(counts))


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Load settings, steps, float32 weights and moments, whichever implementation of Adam wrote them.

    DistributedOptimizer.load_state_dict needs the implementation that wrote them. It also adds settings that
    this one lacks, shares torch's step tensor, and holds Transformer Engine's moments twice."""
    adam = optimizer.optimizer
    saved_groups = {_group_key(group): group for group in state["optimizer"]["param_groups"]}
    for group in adam.param_groups:
        saved_group = saved_groups[_group_key(group)]
        group.update({key: value for key, value in saved_group.items() if key in group})
    old_steps = [state.pop("step") for state in adam.state.values() if "step" in state]
    optimizer.load_parameter_state_from_fully_reshardable(state.pop("param_state", {}))
    steps = max(int(group.get("step", 0)) for group in saved_groups.values())
    if old_steps:
        for parameter_state in adam.state.values():
            parameter_state["step"] = torch.tensor(float(steps))
    else:
        for group in adam.param_groups:
            group["step"] = steps


def _group_key(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group[key] for key in ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"))


def reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return first_line(error)
