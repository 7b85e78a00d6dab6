"""This process's device, rank and process groups."""

from __future__ import annotations

import datetime
import importlib
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed

from megarl.config.errors import ConfigError
from megarl.config.schema import ParallelConfig
from megarl.parallel import cpu_platform
from megarl.parallel.layout import Layout
from megarl.parallel.machine import unseen_gpu
from megarl.parallel.secret import SECRET_FILE, SIZE, SignedStore, agree_on_secret, open_store, sign, verify

LAUNCHED_BY = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # variables of torchrun
STORE_FILE = "MEGARL_STORE_FILE"  # path of a store for one machine


class Ranks(Protocol):
    """All or some of the job's ranks, which communicate over `cpu_group` (gloo)."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def cpu_group(self) -> dist.ProcessGroup: ...


@dataclass(frozen=True)
class Team:
    """Some of the job's ranks."""

    rank: int
    world: int
    cpu_group: dist.ProcessGroup


@dataclass(frozen=True)
class Runtime:
    """A rank's place in the job.

    Trainers come first, then `rollout_ranks` engine-only ranks; without these, trainers have engines.

    rank            in the whole job
    timeout         of collectives, seconds
    cpu_group       gloo: all trainers, or all engine-only ranks
    job_group       gloo: all ranks
    transfer_group  for weight transfers; None: the default group
    store           only with engine-only ranks"""

    layout: Layout
    rank: int
    device: torch.device
    timeout: float
    cpu_group: dist.ProcessGroup
    rollout_ranks: int = 0
    job_group: dist.ProcessGroup | None = None
    transfer_group: dist.ProcessGroup | None = None
    store: SignedStore | None = None

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def trains(self) -> bool:
        return self.rank < self.world

    @property
    def job(self) -> Ranks:
        if self.job_group is None:
            return self
        return Team(self.rank, self.world + self.rollout_ranks, self.job_group)

    @property
    def first_engine(self) -> int:
        return self.world if self.rollout_ranks else 0

    @property
    def engines(self) -> Ranks:
        if not self.rollout_ranks:
            return self
        assert not self.trains
        return Team(self.rank - self.world, self.rollout_ranks, self.cpu_group)

    @property
    def tp_rank(self) -> int:
        return self.layout.coords(self.rank).tp

    @property
    def cp_rank(self) -> int:
        return self.layout.coords(self.rank).cp

    @property
    def dp_rank(self) -> int:
        return self.layout.coords(self.rank).dp

    @property
    def pp_rank(self) -> int:
        return self.layout.coords(self.rank).pp

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.layout.pp - 1

    @property
    def is_replica_leader(self) -> bool:
        """Return whether this rank reports for its replica: first TP and CP rank of the last stage."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.is_last_stage


def choose_device(wanted: str) -> torch.device:
    """Return the device for `parallel.device`; `auto` is CUDA if available.

    Raises ConfigError for `cuda` without a device, and for `auto` if torch cannot use a loaded driver."""
    # CUDA reads this at its first call, below. Megatron's column-parallel layers need it to order
    # communication and compute (tensor_parallel/layers.py).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if wanted == "cpu":  # no call to CUDA: this process may fork ranks
        return torch.device("cpu")
    if torch.cuda.is_available():
        index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if index >= count and not shares_gpus():
            what = f"{index}, but this node has {count} GPUs"
            raise ConfigError(f"LOCAL_RANK: {what} (start one rank for each)")
        return torch.device("cuda", index % count)
    if wanted == "cuda":
        problem = "cuda was asked for, but torch sees no CUDA device"
        raise ConfigError(f"parallel.device: {problem} (use auto or cpu)")
    if why := unseen_gpu(os.environ):
        problem = f"auto finds a GPU driver, but torch sees no GPU: {why}"
        raise ConfigError(f"parallel.device: {problem} (repair it, or set parallel.device=cpu)")
    return torch.device("cpu")


def shares_gpus() -> bool:
    """Return whether NCCL (2.30) may share a GPU between ranks."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def is_launched() -> bool:
    return all(name in os.environ for name in LAUNCHED_BY)


def launched_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def launched_world() -> int:
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def layout_for(config: ParallelConfig, world: int) -> Layout:
    """Return the trainers' layout. Raises ConfigError if the sizes do not fit `world`."""
    rollout_ranks, world = config.rollout_ranks, world - config.rollout_ranks
    if world < 1:
        problem = f"{rollout_ranks} of {world + rollout_ranks} launched processes leave no trainer"
        raise ConfigError(f"parallel.rollout_ranks: {problem} (lower it, or start more)")
    model_parallel = config.tp * config.pp * config.cp
    sizes = f"tp {config.tp} x pp {config.pp}" + (f" x cp {config.cp}" if config.cp > 1 else "")
    processes = f"{world} launched processes" + (
        f" that train ({rollout_ranks} only generate)" if rollout_ranks else ""
    )
    if world % model_parallel:
        raise ConfigError(f"parallel: {sizes} does not divide the {processes}")
    dp = world // model_parallel
    if config.dp is not None and config.dp != dp:
        raise ConfigError(f"parallel.dp: is {config.dp}, but {processes} / ({sizes}) give {dp}")
    stage = config.tp * config.cp * dp
    if stage % config.ep:
        ranks = f"the {stage} processes of a pipeline stage (tp x cp x dp)"
        raise ConfigError(f"parallel.ep: {config.ep} does not divide {ranks}")
    return Layout(tp=config.tp, pp=config.pp, dp=dp, ep=config.ep, cp=config.cp, vpp=config.vpp)


def join_store(secret: Path | None, seconds: float) -> dist.Store:
    """Agree on the job's secret, and return the store. Each wait is at most `seconds`.

    Anybody may connect to torchrun's port, so ranks decode only signed objects."""
    agree_on_secret(secret, seconds, first=launched_rank() == 0)
    sign_pickles()
    if path := os.environ.get(STORE_FILE):
        store: dist.Store = dist.FileStore(path)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=seconds)))
    else:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = open_store(host, port, launched_world(), seconds, first=launched_rank() == 0)
    store.set_timeout(datetime.timedelta(seconds=seconds))
    return store


def remove_secret(secret: Path | None) -> None:
    """Remove the secret's file on rank 0, if megarl created it. All ranks must have read it."""
    if launched_rank() == 0:
        if os.environ.get(STORE_FILE):
            secret = Path(os.environ[SECRET_FILE])
        elif secret is None or SECRET_FILE in os.environ:
            return
        secret.unlink(missing_ok=True)


def start(config: ParallelConfig, seed: int, *, mixture: bool = False, secret: Path | None = None) -> Runtime:
    """Join the job: create process groups and Megatron's parallel state; set seeds.

    mixture  the model has experts
    secret   file of the secret under torchrun; None: MEGARL_SECRET_FILE names it

    Engine-only ranks have another default group, because for Megatron it is that of all trainers."""
    device = choose_device(config.device)
    # Otherwise Transformer Engine (2.20) refuses the pickle with delayed scaling's history, which megarl
    # makes itself (weights/index.py).
    os.environ.setdefault("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    # gloo then reads all addresses in one request.
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    if device.type == "cpu":
        torch.set_num_threads(config.threads)
        cpu_platform.install()
    else:
        torch.cuda.set_device(device)
        # torch's cuDNN attention builds a graph for each shape, and decoding has a new one with each token.
        # Transformer Engine and SGLang do without it.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Where cuDNN refuses, Transformer Engine (2.20) passes an unbounded window to FlashAttention 4 as -1.
        # From 4.0.0b30 on it has no keys: attention is silently 0 (NVIDIA/TransformerEngine#3528).
        os.environ.setdefault("NVTE_FLASH_ATTN_V4", "0")
        # Each rank would start up to 32 processes to compile Megatron's few small kernels.
        if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
            inductor: Any = importlib.import_module("torch._inductor.config")
            inductor.compile_threads = 1
    layout, rank, rollout_ranks = layout_for(config, launched_world()), launched_rank(), config.rollout_ranks
    limit = datetime.timedelta(seconds=config.timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    trains = rank < layout.world
    store = join_store(secret, config.timeout) if launched_world() > 1 else dist.HashStore()
    group_name, first_rank, group_size = (
        ("trainers", 0, layout.world) if trains else ("engines", layout.world, rollout_ranks)
    )
    group_store = dist.PrefixStore(group_name, store)
    dist.init_process_group(
        backend, store=group_store, rank=rank - first_rank, world_size=group_size, timeout=limit
    )
    if trains:
        _start_megatron(config)
    cpu_group = dist.new_group(backend="gloo", timeout=limit) if backend == "nccl" else dist.group.WORLD
    assert cpu_group is not None
    job_group = transfer_group = None
    if rollout_ranks:
        job_place = rank, layout.world + rollout_ranks
        job_group = transfer_group = _group_beside("job", "gloo", store, *job_place, limit)
        if backend == "nccl":
            transfer_group = _group_beside("transfer", backend, store, *job_place, limit)
    _connect(device, trains, transfer_group, mixture)
    if launched_world() > 1:
        remove_secret(secret)
    random.seed(seed)
    torch.manual_seed(seed)
    if trains:
        from megatron.core import tensor_parallel

        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    signed_store = SignedStore(store) if rollout_ranks else None
    return Runtime(
        layout,
        rank,
        device,
        config.timeout,
        cpu_group,
        rollout_ranks,
        job_group,
        transfer_group,
        signed_store,
    )


def sign_pickles() -> None:
    """Sign the objects of torch's collectives, and verify them before unpickling."""
    pack, unpack = distributed._object_to_tensor, distributed._tensor_to_object
    if getattr(pack, "signs", False):
        return

    def pack_signed(value: Any, device: Any, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        data, _ = pack(value, device, group)
        signature = sign("pickle", data.cpu().numpy().tobytes())
        data = torch.cat([torch.frombuffer(bytearray(signature), dtype=torch.uint8).to(data.device), data])
        return data, torch.tensor([data.numel()], device=data.device)

    def unpack_verified(tensor: torch.Tensor, size: int, group: Any, *rest: Any, **options: Any) -> Any:
        data = tensor.cpu().numpy().tobytes()[: int(size)]
        verify(data[:SIZE], "an object of another rank", "pickle", data[SIZE:])
        return unpack(tensor[SIZE:], int(size) - SIZE, group, *rest, **options)

    pack_signed.signs = True  # type: ignore[attr-defined]
    collectives: Any = distributed
    collectives._object_to_tensor, collectives._tensor_to_object = pack_signed, unpack_verified


def _start_megatron(config: ParallelConfig) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp if config.vpp > 1 else None,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=1,  # no rank has a part of an expert
        distributed_timeout_minutes=max(1, round(config.timeout / 60)),
    )


def _group_beside(
    name: str, backend: str, store: dist.Store, rank: int, world: int, limit: datetime.timedelta
) -> dist.ProcessGroup:
    """Create a group larger than the default group. `torch.distributed.get_rank` is wrong for it."""
    group, _ = distributed._new_process_group_helper(
        world, rank, [], backend, store, group_name=distributed.GroupName(name), timeout=limit
    )
    distributed._world.pg_group_ranks[group] = {number: number for number in range(world)}
    return group


def _connect(
    device: torch.device,
    trains: bool = True,
    transfer: dist.ProcessGroup | None = None,
    mixture: bool = False,
) -> None:
    """Use each group once, in the same order on all ranks.

    NCCL creates a group's communicator at its first use, which all members must join: a transfer in which
    some send nothing would hang. Its buffers must exist before the engine measures free memory.

    init_process_group's `device_id` is no replacement: for a new gloo group, only ranks outside it split the
    NCCL communicator, which hangs."""
    from megatron.core import parallel_state as groups

    megatron_groups = (
        []
        if not trains
        else [
            groups.get_tensor_model_parallel_group(),
            groups.get_context_parallel_group(),
            groups.get_pipeline_model_parallel_group(),
            groups.get_data_parallel_group(with_context_parallel=True),
            groups.get_intra_distributed_optimizer_instance_group(),
            groups.get_embedding_group(check_initialized=False)
            if groups.is_rank_in_embedding_group()
            else None,
        ]
    )
    if trains and mixture:
        megatron_groups += [
            groups.get_expert_model_parallel_group(),
            groups.get_expert_tensor_and_model_parallel_group(),
            groups.get_expert_data_parallel_group(),
        ]
    for group in (dist.group.WORLD, *megatron_groups, transfer):
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(torch.ones(1, device=device), group=group)
    if trains and groups.get_virtual_pipeline_model_parallel_world_size() is not None:
        # The interleaved schedule has a communicator per pair of ranks. Use its order and groups (Megatron's
        # p2p_communication.py).
        stage_group = groups.get_pipeline_model_parallel_group()
        other_group = dist.group.WORLD if stage_group.size() == 2 else stage_group
        is_even = stage_group.rank() % 2 == 0
        send_group, receive_group = (stage_group, other_group) if is_even else (other_group, stage_group)
        previous_rank, next_rank = (
            dist.get_global_rank(stage_group, (stage_group.rank() + step) % stage_group.size())
            for step in (-1, 1)
        )
        messages: list[Any] = []
        for target, source in ((next_rank, previous_rank), (previous_rank, next_rank)):
            operations = [
                partial(dist.isend, torch.ones(1, device=device), target, send_group),
                partial(dist.irecv, torch.ones(1, device=device), source, receive_group),
            ]
            messages += [message() for message in (operations if is_even else reversed(operations))]
        for message in messages:
            message.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def generator_states() -> dict[str, Any]:
    from megatron.core import tensor_parallel

    megatron_states = tensor_parallel.get_cuda_rng_tracker().get_states()
    bit_generator, keys, *position = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [bit_generator, np.asarray(keys).tolist(), *position],
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None,
        "megatron": {name: state.tolist() for name, state in megatron_states.items()},
    }


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Restore `generator_states`, except those of another device type."""
    from megatron.core import tensor_parallel

    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    bit_generator, words, *position = states["numpy"]
    np.random.set_state((bit_generator, np.array(words, dtype=np.uint32), *position))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if (states["cuda"] is not None) != torch.cuda.is_initialized():
        return
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))
    megatron_states = {
        name: torch.tensor(state, dtype=torch.uint8) for name, state in states["megatron"].items()
    }
    tensor_parallel.get_cuda_rng_tracker().set_states(megatron_states)


def stop(*, failed: bool = False) -> bool:
    """Leave the job, also if `start` failed. Returns whether no process group is left.

    failed: keep NCCL groups, because destroying one waits for its other ranks"""
    if dist.is_initialized():
        if failed and dist.get_backend() == "nccl":
            return False
        from megatron.core import parallel_state

        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return True
