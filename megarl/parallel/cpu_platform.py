"""Megatron-core on a CPU: its CUDA calls are redirected to the CPU. The only module of megarl that patches
anything.

megatron-core 0.16-0.19 names CUDA in few places. Those on the hot path of a forward and backward pass are
replaced once, by plain functions; those in construction and in the optimizer step by a `TorchFunctionMode`
that is entered only around these two (`on_cpu`), so that no torch call of a forward or backward pass is
intercepted."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as distributed
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed = False


def _to_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device, however it is written; anything else as it is."""
    is_index = isinstance(device, int) and not isinstance(device, bool)
    is_name = isinstance(device, str) and device.startswith("cuda")
    is_cuda = isinstance(device, torch.device) and device.type == "cuda"
    return _CPU if is_index or is_name or is_cuda else device


class _CudaToCpu(TorchFunctionMode):
    """Redirects `device="cuda"` arguments to the CPU, and gives tensors the type name that the optimizer
    compares with."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _to_cpu(kwargs["device"])}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # clip_grad_by_total_norm_fp32 and the distributed optimizer compare with
            # 'torch.cuda.FloatTensor'.
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], *[_to_cpu(a) if isinstance(a, (str, torch.device)) else a for a in args[1:]])
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Redirect torch calls in Megatron's model construction and optimizer steps; does nothing where `install`
    was not called."""
    with _CudaToCpu() if _installed else contextlib.nullcontext():
        yield


class _Stream:
    """Stands for a CUDA stream: on a CPU everything is in order already (p2p_communication,
    param_and_grad_buffer)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return _Event()


class _Event:
    """Stands for a CUDA event (checkpointing, timers)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _TorchWithoutCuda(types.ModuleType):
    """Stands for `torch` inside one Megatron module: its factory functions take `device="cuda"` as the
    CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in ("zeros", "tensor", "empty", "ones"):
            setattr(self, name, self._wrapped(getattr(torch, name)))

    @staticmethod
    def _wrapped(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            if "device" in kwargs:
                kwargs["device"] = _to_cpu(kwargs["device"])
            return factory(*args, **kwargs)

        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _as_counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return numbers of tokens that are on the host already: all_to_all_single takes an array, not a
    tensor."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


LARGE = 64  # ranks of a group


def _share_gloo_devices() -> None:
    """Make the gloo groups of this process share a device, that is a listening socket and a thread that
    polls.

    torch makes a device for every group (ProcessGroupGloo's constructor that takes a time limit), and each
    device's thread wakes a hundred times a second: with Megatron's twenty groups, 128 idle ranks would keep
    two cores busy. Groups of more than LARGE ranks have one of their own, which connects two ranks when the
    first message goes between them, not each rank with all others at start; gloo can do that for one group of
    a device only."""
    original: Any = distributed.ProcessGroupGloo
    shared: list[Any] = []

    class OnSharedDevice(original):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = original._Options()
            options._timeout = timeout
            if size <= LARGE and not shared:
                shared.append(original.create_default_device(lazy_init=False))
            options._devices = shared if size <= LARGE else [original.create_default_device(lazy_init=True)]
            super().__init__(store, rank, size, options)

    vars(distributed)["ProcessGroupGloo"] = OnSharedDevice  # where new_group finds it


def install() -> None:
    """Put the CPU in the place of CUDA, once per process, before the first Megatron call."""
    global _installed
    if _installed:
        return
    cuda: Any = torch.cuda
    # model_parallel_config, RotaryEmbedding, p2p_communication: tensors on `torch.cuda.current_device()`.
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda device=None: None
    cuda.current_stream = lambda device=None: _Stream()
    cuda.default_stream = lambda device=None: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.empty_cache = lambda: None
    # tensor_parallel.random keeps a state per model-parallel region.
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    # nvtx ranges around attention and the schedules.
    cuda.nvtx.range_push = lambda message: None
    cuda.nvtx.range_pop = lambda: None
    # `tensor.cuda()`: embedding initialisation, data broadcasts.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    _share_gloo_devices()

    import megatron.core.pipeline_parallel.schedules as schedules
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    schedules.torch = (
        _TorchWithoutCuda()
    )  # total_num_tokens = torch.zeros([], device="cuda"), once a schedule
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    if not hasattr(moe_utils, "te_general_gemm"):
        # RouterGatingLinearFunction compares it with None, but it is only there with Transformer Engine.
        moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = (
        _as_counts  # theirs leaves a tensor that is on the CPU as it is
    )
    _installed = True
