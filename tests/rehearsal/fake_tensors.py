"""A rank on a CUDA device that is not there: its tensors have shapes, types and devices, and no numbers;
tensors on the CPU are real. Where the two are mixed as a device would not have it, the operation raises.
Forward passes only: to go backward, torch's CPU build asks for a device's streams."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.parallel.cpu_platform import _InOrder
from tests.rehearsal.fakecuda import pretend

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
CUDA_TYPE, META_TYPE = 1, 14  # c10/core/DeviceType.h


class _OnFakeCuda(TorchDispatchMode):
    """Operations on a CUDA tensor, or that ask for one, in a FakeTensorMode; all others as they are."""

    def __init__(self, selected: float) -> None:
        super().__init__()
        self.selected = selected
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        asked = None if device is None else torch.device(device).type
        if asked in ("cuda", "meta"):  # of "cuda" without a number the guard below makes its own kind
            kwargs = {**kwargs, "device": CUDA}
        elif not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        # What comes to the host has zeros in the place of numbers.
        if func is aten._local_scalar_dense.default:
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is aten._to_copy.default and asked == "cpu":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if not isinstance(args[0], FakeTensor) and isinstance(args[0], Tensor):
            if func is aten.copy_.default:
                return args[0].zero_()
            # FakeTensorMode takes an index for what a device takes: one on the host for any tensor.
            if func in (aten.index.Tensor, aten.index_put_.default) and asked is None:
                raise RuntimeError(f"{func}: a tensor on the CPU and an index on {CUDA}")
        try:
            with self.fake:
                if func is aten.masked_select.default:
                    return args[0].new_empty(round(args[0].numel() * self.selected))
                return func(*args, **kwargs)
        except RuntimeError as error:  # theirs cannot be sent from one process to another
            raise RuntimeError(f"{func}: {error}") from None


def _no_guard() -> None:
    """Have torch's C++ select no device where it meets a CUDA tensor: the guard of tensors without data,
    which does nothing, is CUDA's too."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    slots = ctypes.c_void_p * (META_TYPE + 1)
    guards = slots.in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[CUDA_TYPE] = guards[META_TYPE]


def _apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
    """Do what `Module.to` and its like do, by new parameters with the old ones' attributes: torch keeps the
    objects where a tensor becomes another device's, and cannot where one of them is fake."""
    for child in module.children() if recurse else ():
        _apply(child, function)
    for name, old in module._parameters.items():
        with torch.no_grad():
            moved = None if old is None else function(old)
        if old is not None and moved is not old:
            module._parameters[name] = made = torch.nn.Parameter(moved, old.requires_grad)
            vars(made).update({key: value for key, value in vars(old).items() if key not in vars(made)})
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


def _to_the_first_expert(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Say how many of a rank's tokens go to each expert where Megatron asks the device, which has no
    numbers; for one expert-parallel rank."""
    if point == dispatcher.cuda_dtoh_point:
        tokens_per_expert = torch.zeros(dispatcher.num_local_experts, dtype=torch.int64)
        tokens_per_expert[0] = dispatcher.num_out_tokens
        dispatcher.num_global_tokens_per_local_expert = tokens_per_expert[None]
    return tokens_per_expert


@contextmanager
def fake_cuda(selected: float = 0.5) -> Iterator[torch.device]:
    """Pretend a node of H100 with fake tensors, and give this rank's device. To be entered in a process whose
    Megatron was not led to the CPU (parallel/cpu_platform.py).

    selected: the share of a mask that is true, as of a router's the experts of a token are of all."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        patch.setattr(torch.cuda, "current_device", lambda: CUDA)  # its number means nothing to torch here
        for name in ("Stream", "Event"):
            patch.setattr(torch.cuda, name, _InOrder)
        for name in ("current_stream", "default_stream"):
            patch.setattr(torch.cuda, name, lambda device=None: _InOrder())
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.cuda.nvtx, "range_push", lambda message: None)
        patch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
        patch.setattr(torch.nn.Module, "_apply", _apply)
        patch.setattr(
            token_dispatcher.MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _to_the_first_expert
        )
        # Without Transformer Engine megatron-core 0.16 compares this name with None and does not define it.
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        patch.setattr(FakeTensorMode, "avoid_device_init", True)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is one moved there
        _no_guard()
        with _OnFakeCuda(selected):
            yield CUDA
