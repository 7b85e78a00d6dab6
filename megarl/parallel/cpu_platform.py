"""Redirect the CUDA calls of megatron-core 0.16-0.19 to the CPU.

A `TorchFunctionMode` intercepts torch calls only in construction and optimizer steps (`on_cpu`). Elsewhere
plain functions replace Megatron's.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as distributed
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed = False


def _to_cpu(device: Any) -> Any:
    is_index = isinstance(device, int) and not isinstance(device, bool)
    is_name = isinstance(device, str) and device.startswith("cuda")
    is_cuda = isinstance(device, torch.device) and device.type == "cuda"
    return _CPU if is_index or is_name or is_cuda else device


class _CudaToCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _to_cpu(kwargs["device"])}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # clip_grad_by_total_norm_fp32 and the distributed optimizer expect 'torch.cuda.FloatTensor'.
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], *[_to_cpu(a) if isinstance(a, (str, torch.device)) else a for a in args[1:]])
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Redirect torch calls in the block, if `install` was called."""
    with _CudaToCpu() if _installed else contextlib.nullcontext():
        yield


class _InOrder:
    """Replaces CUDA streams and events."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _InOrder:
        return self

    def __exit__(self, *args: Any) -> None: ...

    def synchronize(self, *args: Any) -> None: ...

    wait_stream = wait_event = wait = record = synchronize

    def record_event(self, event: Any = None) -> _InOrder:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _TorchWithoutCuda(types.ModuleType):
    """Replaces `torch` inside one Megatron module."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch, name)
        if name not in ("zeros", "tensor", "empty", "ones"):
            return attribute

        def call_factory(*args: Any, **kwargs: Any) -> torch.Tensor:
            if "device" in kwargs:
                kwargs["device"] = _to_cpu(kwargs["device"])
            return attribute(*args, **kwargs)

        return call_factory


def _as_counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _sum_gradients(part: torch.Tensor, whole: torch.Tensor, op: Any, group: Any, async_op: bool) -> Any:
    """All-reduce `whole`, of which `part` is a view: gloo's reduce_scatter copies all gradients."""
    if async_op:  # Megatron's coalescing needs its handle
        return distributed.reduce_scatter_tensor(part, whole, op=op, group=group, async_op=True)
    options = distributed.AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([whole], options).wait()


def _gather_weights(whole: torch.Tensor, part: torch.Tensor, group: Any, async_op: bool) -> Any:
    """All-reduce `whole`, of which `part` is a view: gloo's all_gather copies all weights.

    A sum of integers, where other ranks have zeros, is bitwise equal."""
    if async_op:
        return distributed.all_gather_into_tensor(whole, part, group=group, async_op=True)
    if group.size() == 1:
        return None
    if part.nbytes % 4:  # an odd number of 16-bit weights
        return distributed.all_gather_into_tensor(whole, part, group=group)
    bits = whole.view(torch.int32)
    rank_bits = bits.chunk(group.size())[group.rank()]
    offset = rank_bits.storage_offset() - bits.storage_offset()
    bits[:offset].zero_()
    bits[offset + len(rank_bits) :].zero_()
    return group.allreduce([bits]).wait()


LARGE = 64  # maximum ranks of a group on the shared device


def _share_gloo_devices() -> None:
    """Let gloo groups share a device: a listening socket and a polling thread.

    A device per group wakes a hundred times a second, and Megatron has twenty groups. Groups of more than
    LARGE ranks connect lazily, which gloo supports for only one group per device."""
    gloo_class: Any = distributed.ProcessGroupGloo
    shared_devices: list[Any] = []

    class OnSharedDevice(gloo_class):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **more: bool) -> None:
            options = gloo_class._Options()
            options._timeout = timeout
            for name, value in more.items():  # torch 2.14 has enable_reconfigure
                setattr(options, name, value)
            if size <= LARGE and not shared_devices:
                shared_devices.append(gloo_class.create_default_device(lazy_init=False))
            options._devices = (
                shared_devices if size <= LARGE else [gloo_class.create_default_device(lazy_init=True)]
            )
            super().__init__(store, rank, size, options)

    vars(distributed)["ProcessGroupGloo"] = OnSharedDevice  # where new_group finds it


def install() -> None:
    """Replace CUDA by the CPU, once, before the first Megatron call."""
    global _installed
    if _installed:
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda device=None: None
    cuda.current_stream = lambda device=None: _InOrder()
    cuda.default_stream = lambda device=None: _InOrder()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream = _InOrder
    cuda.Event = _InOrder
    cuda.empty_cache = lambda: None
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.nvtx.range_push = lambda message: None
    cuda.nvtx.range_pop = lambda: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    _share_gloo_devices()

    import megatron.core.distributed.param_and_grad_buffer as gradients
    import megatron.core.pipeline_parallel.schedules as schedules
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.core.transformer.multi_latent_attention as latent_attention

    # start_grad_sync: shard_buffer(bucket.grad_data, ...)
    gradients.dist_reduce_scatter_func = _sum_gradients
    # start_param_sync: shard_buffer(bucket.param_data, ...)
    gradients.dist_all_gather_func = _gather_weights
    # total_num_tokens = torch.zeros([], device="cuda"), once per schedule.
    schedules.torch = _TorchWithoutCuda("torch")
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    if not hasattr(moe_utils, "te_general_gemm"):
        # RouterGatingLinearFunction reads it, but it exists only with Transformer Engine.
        moe_utils.te_general_gemm = None
    if not isinstance(latent_attention.TELinear, type):
        # Without Transformer Engine it is a MagicMock, which 0.16 passes to isinstance.
        latent_attention.HAVE_TE = False
    # Megatron's function ignores as_numpy for a tensor on the CPU.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_counts
    _installed = True
