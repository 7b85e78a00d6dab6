"""Replace Transformer Engine's kernels by functions that only allocate tensors of the right shapes.

Its Python half then runs on fake CUDA tensors: it saves, caches and returns the same tensors as on a device.

The functions of tests/te/compiled compute on a CPU and name their C++ sources. Each function here allocates
the result of that source, and workspaces that are more than a few rows.

Megatron's fused activations are replaced, too: torch compiles them on a device, and as separate operations
they would need several times the memory."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

ROOT = Path(__file__).parents[2]
PYTHON_HALF = ROOT / ".te-cpu"


def install() -> None:
    """Import Transformer Engine with these kernels.

    Call it in a separate process, before Megatron is imported."""
    assert not any(name.startswith("megatron.core") for name in sys.modules), "Megatron has looked for it"
    if importlib.util.find_spec("transformer_engine") is None:
        sys.path.append(str(PYTHON_HALF))
    os.environ.setdefault("NVTE_PROJECT_BUILDING", "1")  # do not search for CUDA libraries
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    source = ROOT / "tests/te/compiled/transformer_engine_torch.py"
    spec = importlib.util.spec_from_file_location("transformer_engine_torch", source)
    assert spec is not None and spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine_torch"] = kernels
    spec.loader.exec_module(kernels)
    _Shapes(kernels).replace()
    torch.cuda.get_device_capability = lambda device=None: kernels.CAPABILITY  # type: ignore[assignment]
    torch.cuda.get_device_properties = kernels._properties  # type: ignore[assignment]
    torch.version.cuda = "13.0"
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    with kernels._absent_packages():
        importlib.import_module("transformer_engine.pytorch")
        importlib.import_module("transformer_engine.pytorch.optimizers")
    attention: Any = importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention.utils"
    )
    choose = attention.get_attention_backend

    def choose_for_tensors(parameters: Any) -> Any:
        """Report fake tensors as plain ones: FusedAttention accepts only Tensor and its own classes."""
        if issubclass(parameters.qkv_type, FakeTensor):
            parameters = replace(parameters, qkv_type=Tensor)
        return choose(parameters)

    attention.get_attention_backend = choose_for_tensors
    _fuse_activations()


def _fuse_activations() -> None:
    """Make each activation allocate only its result, like one kernel (fusions/fused_bias_swiglu.py)."""
    fused: Any = importlib.import_module("megatron.core.fusions.fused_bias_swiglu")

    def half(y: Tensor, *_: Any) -> Tensor:
        return y.new_empty(*y.shape[:-1], y.shape[-1] // 2)

    fused.swiglu = fused.bias_swiglu = fused.weighted_swiglu = half
    fused.swiglu_back = fused.bias_swiglu_back = lambda g, y, *_: torch.empty_like(y)
    fused.weighted_swiglu_back = lambda g, y, weights: (torch.empty_like(y), torch.empty_like(weights))


class _Shapes:
    """Shape-only kernels.

    kernels: the module tests/te/compiled/transformer_engine_torch.py, whose functions these replace"""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def replace(self) -> None:
        for name in dir(self):
            if not name.startswith("_") and name != "replace":
                setattr(self.kernels, name, torch.no_grad()(getattr(self, name)))
        self.kernels.device_types = ("cuda",)

    def _dtype(self, dtype: Any) -> torch.dtype:
        return self.kernels._dtype(dtype)

    @property
    def _te(self) -> Any:
        return self.kernels._te()

    def _parts(self, t: Any, columnwise: bool) -> None:
        """Raise if an operand lacks the copy that the product reads."""
        te, data = self._te, t
        if isinstance(t, te.PerTensorStorage):
            transposed = columnwise and self.kernels.NEEDS_TRANSPOSES
            data = (
                t._transpose if transposed and not t._transpose_invalid else None if transposed else t._data
            )
        elif isinstance(t, te.BlockStorage | te.MXStorage):
            data = t._columnwise_data if columnwise else t._rowwise_data
        if data is None:
            raise RuntimeError(f"{type(t).__name__} without the data that a product reads")

    # Quantisation.

    def create_empty_quantized_tensor(
        self, quantizer: Any, shape: Any, dtype: torch.dtype, device: Any = "cuda", pin_memory: bool = False
    ) -> Any:
        te, shape = self._te, tuple(shape)
        if not isinstance(quantizer, te.Delayed):
            context = quantizer.create_metadata(shape, dtype=dtype)
            buffers = quantizer.alloc_tensors(shape, device=device)
            return context["cls"].__tensor_unflatten__(buffers, context, shape, None)
        needs = self.kernels.NEEDS_TRANSPOSES
        make = {"dtype": torch.uint8, "device": device}
        columns, rows = quantizer.columnwise_usage and needs, quantizer.rowwise_usage or not needs
        buffers = {
            "data": torch.empty(shape, **make) if rows else None,
            "data_transpose": torch.empty(shape[-1:] + shape[:-1], **make) if columns else None,
            "fp8_scale_inv": torch.empty(1, device=device),
            "fp8_dtype": quantizer.dtype,
            "quantizer": quantizer,
        }
        if quantizer.internal:
            return te.PerTensorStorage(**buffers, fake_dtype=dtype)
        return te.Float8Tensor(shape=shape, dtype=dtype, device=torch.device(device), **buffers)

    def quantize(self, tensor: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
        if output is None:
            output = self.create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype, tensor.device)
        if isinstance(output, self._te.PerTensorStorage):
            make = {"dtype": torch.uint8, "device": tensor.device}
            if output._data is None:
                output._data = torch.empty(tensor.shape, **make)
            if not (self.kernels.NEEDS_TRANSPOSES and quantizer.columnwise_usage):
                output._transpose = None
            elif output._transpose is None:
                output._transpose = torch.empty((tensor.shape[-1], *tensor.shape[:-1]), **make)
            output._transpose_invalid = output._transpose is None
        return output

    def dequantize(self, tensor: Any, otype: Any) -> Tensor:
        data = tensor._data if isinstance(tensor, self._te.PerTensorStorage) else tensor._rowwise_data
        return torch.empty(tuple(tensor.size()), dtype=self._dtype(otype), device=data.device)

    def fp8_transpose(self, data: Tensor, dtype: Any = None, *, out: Tensor | None = None) -> Tensor:
        return data.new_empty(data.shape[-1], *data.shape[:-1]) if out is None else out

    def swap_first_dims(self, tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
        moved = (tensor.shape[1], tensor.shape[0], *tensor.shape[2:])
        return tensor.new_empty(moved) if out is None else out

    def bgrad_quantize(self, grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
        return grad.new_empty(grad.shape[-1]), self.quantize(grad, quantizer)

    def fused_amax_and_scale_update_after_reduction(self, *_: Any) -> None: ...

    # Products, norms, rotations.

    def generic_gemm(
        self,
        A: Any,
        transA: bool,
        B: Any,
        transB: bool,
        D: Tensor | None,
        quantizer: Any,
        output_dtype: Any,
        bias: Tensor | None,
        bias_type: Any,
        gelu: bool,
        gelu_in: Any,
        grad: bool,
        *rest: Any,
        extra_output: Any = None,
        **_: Any,
    ) -> tuple[Any, Tensor | None, None, Any]:
        self._parts(A, columnwise=not transA)
        self._parts(B, columnwise=transB)
        (rows_a, a), (rows_b, b) = ((prod(tuple(t.size())[:-1]), tuple(t.size())[-1]) for t in (A, B))
        inner, columns = (a, rows_a) if transA else (rows_a, a)
        if inner != (rows_b if transB else b):
            raise RuntimeError(f"Invalid matrix dimensions for GEMM: {tuple(A.size())}, {tuple(B.size())}")
        dtype = self._dtype(output_dtype) if output_dtype is not None else (A.dtype if D is None else D.dtype)
        device = next(t for t in (B, *_buffers(B)) if isinstance(t, Tensor)).device
        bias_grad = torch.empty(b, dtype=dtype, device=device) if bias is not None and grad else None
        if D is None:
            outer = (b,) if transB else tuple(B.size())[:-1]
            if quantizer is not None:
                D = self.create_empty_quantized_tensor(quantizer, (*outer, columns), dtype, device)
            else:
                D = torch.empty((*outer, columns), dtype=dtype, device=device)
        elif D.numel() != columns * (b if transB else rows_b):
            raise RuntimeError(f"GEMM output has invalid dims {tuple(D.shape)}")
        return D, bias_grad, None, extra_output

    def te_general_grouped_gemm(
        self, A: list[Any], transa: bool, B: list[Any], transb: bool, D: list[Tensor], *rest: Any
    ) -> Any:
        for a, b in zip(A, B, strict=True):
            if prod(tuple(a.size())) and prod(tuple(b.size())):
                self._parts(a, columnwise=not transa)
                self._parts(b, columnwise=transb)
        return rest[2]  # the biases

    def rmsnorm_fwd(
        self, input: Tensor, weight: Tensor, eps: float, ln_out: Any, quantizer: Any, otype: Any, *_: Any
    ) -> tuple[Any, None, Tensor]:
        rows = input.new_empty(prod(input.shape[:-1]), dtype=torch.float32)
        if quantizer is None:
            made = torch.empty_like(input, dtype=self._dtype(otype)) if ln_out is None else ln_out
            return made, None, rows
        te = self._te
        # Delayed and MX scaling are fused into the norm's kernel; other recipes need its unquantized output.
        fused = isinstance(quantizer, te.Delayed | te.MX)
        whole = input if fused else torch.empty_like(input, dtype=self._dtype(otype))
        return self.quantize(whole, quantizer, ln_out), None, rows

    def rmsnorm_bwd(self, dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, *_: Any) -> Any:
        return torch.empty_like(x), torch.empty_like(gamma)

    def fused_rope_forward(self, t: Tensor, *_: Any) -> Tensor:
        return t.new_empty(t.shape)

    fused_rope_backward = fused_rope_forward

    # Attention: cuDNN's.

    def fused_attn_fwd(self, *arguments: Any) -> list[Tensor]:
        q, _, v = arguments[16:19]
        made = q.new_empty(*q.shape[:-1], v.shape[-1])
        statistics = q.new_empty(*q.shape[:-1], 1, dtype=torch.float32)
        return [made, statistics, q.new_empty(2, dtype=torch.int64)]

    def fused_attn_bwd(self, *arguments: Any) -> list[Tensor | None]:
        q, k, v = arguments[19:22]
        # cuDNN's workspace: query gradients accumulated in float32, and one number per query and head.
        workspace = [
            q.new_empty(q.shape, dtype=torch.float32),
            q.new_empty(q.shape[:-1], dtype=torch.float32),
        ]
        made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
        del workspace
        return [*made, None, None]

    # Lists of tensors: gradient norm, optimizer.

    def multi_tensor_l2norm(
        self, chunk: int, noop: Tensor, lists: list[list[Tensor]], per_tensor: bool = False
    ) -> tuple[Tensor, Tensor]:
        single = {"dtype": torch.float32, "device": noop.device}
        return torch.empty(1, **single), torch.empty(len(lists[0]) if per_tensor else 0, **single)

    def multi_tensor_scale(self, *_: Any) -> None: ...

    multi_tensor_scale_tensor = multi_tensor_scale

    def multi_tensor_adam(self, *_: Any) -> None: ...


def _buffers(t: Any) -> Iterator[Any]:
    for name in ("_data", "_transpose", "_rowwise_data", "_columnwise_data"):
        yield getattr(t, name, None)
