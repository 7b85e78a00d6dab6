"""Simulate a rank's CUDA device with fake tensors, without a GPU.

Tensors on the device have shape, type and device, but no values; tensors on the CPU are real. An operation
raises if it mixes devices in a way that CUDA refuses. Live storages on the device are counted.

Forward and backward passes work: guard.cpp, which needs a C++ compiler, gives torch's CPU build a device and
a stream."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.parallel.cpu_platform import _InOrder
from tests.rehearsal.fakecuda import TOTAL, pretend

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
ROUNDED = 512  # bytes to which torch's allocator rounds up (c10/cuda/CUDACachingAllocator.h: kMinBlockSize)
LARGE = 64 << 20  # larger tensors on the host, in bytes, are fake too
UNREAD = 8 << 20  # larger copies of device tensors, in bytes, have no values: nothing reads them
HOST_FACTORIES = (aten.empty.memory_format, aten.zeros.default)
SOURCES = ("/megarl/", "/megatron/", "/transformer_engine/")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++ builds tests/rehearsal/guard.cpp"
)


_GENERATOR = SimpleNamespace(
    get_state=lambda: torch.zeros(16, dtype=torch.uint8), set_state=lambda state: None
)


class Memory:
    """Bytes of the live storages on the device.

    now, peak  bytes at this moment, and the maximum since `reset`
    at_peak    bytes at the peak (within 1 %), by the line of code that allocated them
    pinned     bytes of pinned host memory"""

    def __init__(self) -> None:
        self.now = self.peak = self.pinned = 0
        self.at_peak: Counter[str] = Counter()
        self.paused = False
        self._live: dict[int, tuple[weakref.ref[UntypedStorage], int, str]] = {}
        self._sites: Counter[str] = Counter()
        self._listed = 0

    def reset(self) -> None:
        self.peak, self._listed = self.now, 0
        self._note_peak()

    def see(self, tensor: Tensor, operation: Any, *, pinned: bool = False) -> None:
        """Count the tensor's storage, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live and self._live[key][0]() is storage:
            return

        def forget(reference: Any) -> None:
            if key in self._live and self._live[key][0] is reference:
                _, size, site = self._live.pop(key)
                self._add(-size, site)

        site = "pinned" if pinned else f"{_asked_by()} [{operation}]"
        self._live[key] = weakref.ref(storage, forget), _rounded(storage), site
        self._add(_rounded(storage), site)

    def resized(self, storage: UntypedStorage) -> None:
        if storage._cdata in self._live:
            reference, before, site = self._live[storage._cdata]
            self._live[storage._cdata] = reference, _rounded(storage), site
            self._add(_rounded(storage) - before, site)

    def _add(self, size: int, site: str) -> None:
        if site == "pinned":
            self.pinned += size
            return
        self.now += size
        self._sites[site] += size
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self.now)
        if self.now == self.peak and self.now > 1.01 * self._listed:
            self._listed, self.at_peak = self.now, +self._sites


def _rounded(storage: UntypedStorage) -> int:
    return -(-storage.nbytes() // ROUNDED) * ROUNDED


def _asked_by() -> str:
    """Return the innermost running line of megarl, Megatron or Transformer Engine, and its caller.

    In a backward pass without Python code the result is "autograd"."""
    frame, found = sys._getframe(2), list[str]()
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        if source := next((part for part in SOURCES if part in name), None):
            found.append(f"{name.rpartition(source)[2]}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "autograd"


class _OnFakeCuda(TorchDispatchMode):
    """Run operations that have or create a fake tensor in a FakeTensorMode, and all others unchanged.

    Fake are tensors on CUDA, in pinned memory, or larger than LARGE."""

    def __init__(self, selected: float, memory: Memory) -> None:
        super().__init__()
        self.selected, self.memory = selected, memory
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        asked = None if device is None else torch.device(device).type
        pinned = bool(kwargs.get("pin_memory")) and asked != "cuda"
        large = func in HOST_FACTORIES and asked in (None, "cpu") and prod(args[0]) * 4 > LARGE
        if asked == "cuda":  # with or without a device index
            kwargs = {**kwargs, "device": CUDA}
        elif not (pinned or large or any(isinstance(tensor, FakeTensor) for tensor in tensors)):
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._sent(func, args)
        first = args[0] if args else None
        # Copies to the host have the value 0, or True if they are masks.
        if func is aten._local_scalar_dense.default:
            return _on_host((), first.dtype).item()
        if func is aten._to_copy.default and asked == "cpu":
            dtype = kwargs.get("dtype") or first.dtype
            if first.numel() * dtype.itemsize <= UNREAD:
                return _on_host(first.shape, dtype)
        elif isinstance(first, Tensor) and not isinstance(first, FakeTensor):
            if func is aten.copy_.default:
                # Memory that is not written is not allocated.
                return first if first.nbytes > UNREAD else first.fill_(first.dtype == torch.bool)
            # FakeTensorMode accepts any index. On CUDA, a host tensor must have its index on the host.
            if func in (aten.index.Tensor, aten.index_put_.default) and asked is None:
                raise RuntimeError(f"{func}: a tensor on the CPU and an index on {CUDA}")
        try:
            with self.fake:
                if func is aten.masked_select.default:
                    out = first.new_empty(round(first.numel() * self.selected))
                else:
                    out = func(*args, **kwargs)
        except RuntimeError as error:  # torch's subclass cannot be pickled
            raise RuntimeError(f"{func}: {error}") from None
        if not self.memory.paused:
            for made in tree_leaves(out):
                if isinstance(made, FakeTensor) and (pinned or made.device.type == "cuda"):
                    self.memory.see(made, func, pinned=pinned)
        return out

    def _sent(self, func: Any, args: Any) -> Any:
        """Return a collective's result: the tensors unchanged, and finished work.

        If it has a list of inputs or outputs, NCCL temporarily allocates one flat tensor for it
        (ProcessGroupNCCL.cpp: newLikeFlat)."""
        from torch._C._distributed_c10d import FakeWork
        from torch.distributed._tools.fake_collectives import CollectiveOp

        if func in (torch.ops.c10d.allgather_.default, torch.ops.c10d.reduce_scatter_.default):
            several = max(args[:2], key=lambda tensors: len(tree_leaves(tensors)))
            size = sum(t.nbytes for t in tree_leaves(several) if t.device.type == "cuda")
            with self.fake:
                flat = torch.empty(size, dtype=torch.uint8, device=CUDA)
            self.memory.see(flat, "newLikeFlat")
            del flat
        work = FakeWork().boxed()
        return work if func in CollectiveOp.WK or "_coalesced_" in str(func) else (args[0], work)


def _on_host(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, dtype == torch.bool, dtype=dtype)


def _install_guard() -> None:
    """Build guard.cpp, once for each torch and modification time, and install its device in this process."""
    torch_folder, source = Path(torch.__file__).parent, Path(__file__).with_name("guard.cpp")
    kind = f"{torch.__version__}-{source.stat().st_mtime_ns:x}-{sys.implementation.cache_tag}"
    library = Path(__file__).parents[2] / "build" / f"guard-{kind}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        made = library.with_name(f".{library.name}.{os.getpid()}")
        flags = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include"]
        libraries = [f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"]
        subprocess.run(["g++", *flags, str(source), *libraries, "-o", str(made)], check=True, timeout=120)
        made.replace(library)
    ctypes.CDLL(str(library)).install()


def _apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
    """Replace `Module._apply`: make new parameters with the attributes of the old ones.

    torch keeps the parameter objects when it moves them, which it cannot do if one of the tensors is fake."""
    for child in module.children() if recurse else ():
        _apply(child, function)
    for name, old in module._parameters.items():
        with torch.no_grad():
            moved = None if old is None else function(old)
        if old is not None and moved is not old and (moved.device, moved.dtype) != (old.device, old.dtype):
            module._parameters[name] = made = torch.nn.Parameter(moved, old.requires_grad)
            vars(made).update({key: value for key, value in vars(old).items() if key not in vars(made)})
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


def _evenly(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Give each expert the same number of tokens, from each rank.

    Megatron reads these counts from the device, which has no values here."""
    if point == dispatcher.cuda_dtoh_point:
        ep, local, sent = dispatcher.ep_size, dispatcher.num_local_experts, dispatcher.num_out_tokens
        experts = ep * local
        each = torch.tensor([sent // experts + (i < sent % experts) for i in range(experts)])
        here = each[:local].expand(dispatcher.tp_size * ep, local)
        tokens_per_expert = here.sum(0)
        if local > 1:
            dispatcher.num_global_tokens_per_local_expert = here
        if ep > 1 or dispatcher.tp_size > 1:
            dispatcher.input_splits = each.reshape(ep, local).sum(1).numpy()
            dispatcher.output_splits = here.reshape(ep, -1, local).sum(2)[:, 0].numpy()
            dispatcher.output_splits_tp = here.sum().expand(dispatcher.tp_size) // dispatcher.tp_size
    return tokens_per_expert


def _attention(plain: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **options: Any) -> Tensor:
    """Select the attention kernel as torch does on a device: FlashAttention in 16 bits without a mask."""
    if q.device.type != "cuda":
        return plain(q, k, v, attn_mask, **options)
    if k.device != q.device or v.device != q.device:
        raise RuntimeError(f"attention of tensors on {q.device}, {k.device} and {v.device}")
    causal, scale = options.get("is_causal", False), options.get("scale")
    if attn_mask is None and q.dtype in (torch.bfloat16, torch.float16):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[0]
    if attn_mask is not None and not options.get("enable_gqa"):
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, True, 0.0, causal, scale=scale
        )[0]
    return plain(q, k, v, attn_mask, **options)


def _numbers(data: Any) -> Any:
    """Replace fake scalar tensors in nested lists by numbers.

    torch.tensor would read them in C++, where dispatch modes are off."""
    if isinstance(data, list | tuple):
        return [_numbers(value) for value in data]
    return data.item() if isinstance(data, FakeTensor) and data.dim() == 0 else data


@contextmanager
def fake_cuda(selected: float = 0.5, memory: Memory | None = None) -> Iterator[torch.device]:
    """Simulate a node of 8 H100 with fake tensors, and yield this rank's device.

    Enter it only in a process whose Megatron was not redirected to the CPU (parallel/cpu_platform.py). The
    process must end afterwards, because torch keeps the guard.

    selected: the true share of a mask; of a router's mask it is experts per token / experts"""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    memory = memory or Memory()
    _install_guard()
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        cuda: dict[str, Any] = {
            "_lazy_init": lambda: None,
            "current_stream": lambda device=None: _InOrder(),
            "default_stream": lambda device=None: _InOrder(),
            "set_stream": lambda stream: None,
            "stream": lambda stream: nullcontext(),
            "device": lambda device=None: nullcontext(),
            "Stream": _InOrder,
            "Event": _InOrder,
            "is_current_stream_capturing": lambda: False,
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
            "default_generators": (_GENERATOR,),
            "memory_allocated": lambda device=None: memory.now,
            "max_memory_allocated": lambda device=None: memory.peak,
            "memory_reserved": lambda device=None: memory.peak,
            "max_memory_reserved": lambda device=None: memory.peak,
            "reset_peak_memory_stats": lambda device=None: memory.reset(),
            "mem_get_info": lambda device=None: (TOTAL - memory.now, TOTAL),
        }
        for name, answer in cuda.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch.cuda.nvtx, "range_push", lambda message: None)
        patch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
        for name in ("get_rng_state", "set_rng_state"):
            patch.setattr(torch.cuda.random, name, getattr(torch.cuda, name))
        patch.setattr(torch.nn.Module, "_apply", _apply)
        patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
        made, resize, plain = torch.tensor, UntypedStorage.resize_, F.scaled_dot_product_attention
        patch.setattr(torch, "tensor", lambda data, **options: made(_numbers(data), **options))

        def resize_(storage: UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            memory.resized(storage)
            return out

        patch.setattr(UntypedStorage, "resize_", resize_)
        patch.setattr(
            F, "scaled_dot_product_attention", lambda *args, **options: _attention(plain, *args, **options)
        )
        patch.setattr(token_dispatcher.MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _evenly)
        # Without Transformer Engine megatron-core 0.16 compares this name with None and does not define it.
        if not hasattr(moe_utils, "te_general_gemm"):
            patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        patch.setattr(FakeTensorMode, "avoid_device_init", True)
        patch.setattr(fake_tensor, "init_gpu_context", lambda device: None)
        # torch's CPU build has no CUDA kernel, and decomposes an operation that is one kernel on CUDA. With
        # this registration it dispatches one operation; the fake mode intercepts it before the kernel.
        kernels = torch.library.Library("aten", "IMPL")
        kernels.impl("silu_backward", lambda grad, x: torch.empty_like(x), "CUDA")
        # torch.tensor(..., device="cuda") then makes a CPU tensor and moves it.
        torch._C._set_only_lift_cpu_tensors(True)
        with _OnFakeCuda(selected, memory):
            yield CUDA
