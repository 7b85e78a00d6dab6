"""The compiled half of Transformer Engine 2.20.2 in plain torch: its real Python half then computes on a CPU.
For tests only.

Each kernel names the C++ or CUDA source that it restates, relative to Transformer Engine's
`transformer_engine/`, and raises where that source refuses. What is kept of the device is what the Python
half depends on: which buffers a quantised tensor has, which of them a matrix product reads (one that was not
filled is an error), where scales stand and how they are padded, and the rounding of scales and of casts.
Products multiply dequantised operands in float32. A function that is not here raises with its name.

MEGARL_TE_CAPABILITY is the device that is played: 9.0 (Hopper, where FP8 operands carry transposes) or 10.0
(Blackwell, for MXFP8).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor

VERSION = "2.20.2"
device_types = ("cpu",)  # where these kernels run; megarl asks (parallel/machine.py)
CAPABILITY = tuple(int(part) for part in os.environ.get("MEGARL_TE_CAPABILITY", "9.0").split("."))
# From Blackwell on, per-tensor FP8 products take operands in either orientation (pytorch/utils.py,
# is_non_tn_fp8_gemm_supported).
NEEDS_TRANSPOSES = CAPABILITY < (10, 0)
FLOAT32_MAX = torch.finfo(torch.float32).max

KERNELS: dict[str, str] = {}  # name -> source
CALLS: Counter[str] = Counter()  # how often each was called; products also by layout and kinds of operands


def kernel(source: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a function that restates `source`: it is counted, and autograd does not look into it, as into a
    real kernel."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        KERNELS[function.__name__] = source

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            CALLS[function.__name__] += 1
            with torch.no_grad():
                return function(*args, **kwargs)

        return called

    return mark


def __getattr__(name: str) -> Any:
    """What is not emulated: a type where the name is a type's, else a function that raises when it is
    called."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        return type(name, (), {})

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name} is not emulated")

    return missing


# Not emulated either, but imported by name, or by `from transformer_engine_torch import *`, when the Python
# half is imported.
for _name in (
    "layernorm_fwd",
    "layernorm_bwd",
    "multi_tensor_unscale_l2norm",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_sgd",
    "multi_tensor_compute_scale_and_scale_inv",
):
    globals()[_name] = __getattr__(_name)


# Enumerations: pytorch/csrc/extensions/pybind.cpp, common/util/pybind_helper.h.


def _enum(name: str, members: str) -> Any:
    """`A B C` from zero on, or `A=5 B=7`."""
    pairs = [member.partition("=") for member in members.split()]
    return IntEnum(name, {key: int(value) if value else place for place, (key, _, value) in enumerate(pairs)})


DType = _enum(
    "DType", "kByte=0 kInt32=2 kFloat32=4 kFloat16=5 kBFloat16=6 kFloat8E4M3=7 kFloat8E5M2=8 kFloat4E2M1=10"
)
NVTE_Bias_Type = _enum("NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI")
NVTE_Mask_Type = _enum(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK"
    " NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
NVTE_Softmax_Type = _enum(
    "NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX"
)
NVTE_QKV_Format = _enum(
    "NVTE_QKV_Format",
    "NVTE_BSHD NVTE_SBHD NVTE_THD NVTE_SBHD_2BSHD NVTE_BSHD_2SBHD NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD "
    "NVTE_QKV_Format_NOT_SET",
)
NVTE_QKV_Layout = _enum(
    "NVTE_QKV_Layout",
    "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD NVTE_BSH3D"
    " NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D"
    " NVTE_THD_THD_THD NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD"
    " NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD"
    " NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD "
    "NVTE_BHSD_BHSD_BHSD"
    " NVTE_QKV_Layout_NOT_SET",
)
NVTE_Fused_Attn_Backend = _enum(
    "NVTE_Fused_Attn_Backend", "NVTE_F16_arbitrary_seqlen NVTE_FP8 NVTE_No_Backend"
)
NVTEScalingMode = _enum(
    "NVTEScalingMode",
    "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D NVTE_BLOCK_SCALING_2D"
    " NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING",
)
Float8BlockScaleTensorFormat = _enum("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID")
CommOverlapType = _enum("CommOverlapType", "RS AG")
CommOverlapAlgo = _enum(
    "CommOverlapAlgo",
    "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P"
    " ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
)
NVTERoutingMapFormat = _enum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
NVTEQBHistogramMode = _enum("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC")
FP8FwdTensors = _enum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT "
    "GEMM3_OUTPUT",
)
FP8BwdTensors = _enum(
    "FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3"
)


def get_cublasLt_version() -> int:
    return 130100  # CUDA 13.1's


def get_cudnn_version(*_: Any) -> int:
    return 92400  # 9.24


def get_num_cublas_streams() -> int:
    return 4


@functools.cache
def _te() -> Any:
    """Transformer Engine's own classes, which its Python half has when the first kernel is called."""
    from transformer_engine.pytorch import tensor
    from transformer_engine.pytorch.constants import TE_DType_To_Torch
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.storage import float8_blockwise_tensor_storage as blockwise
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    return types.SimpleNamespace(
        dtypes=TE_DType_To_Torch,
        Delayed=tensor.Float8Quantizer,
        Current=tensor.Float8CurrentScalingQuantizer,
        Block=Float8BlockQuantizer,
        MX=tensor.MXFP8Quantizer,
        Float8Tensor=tensor.Float8Tensor,
        PerTensorStorage=Float8TensorStorage,
        BlockStorage=blockwise.Float8BlockwiseQTensorStorage,
        MXStorage=MXFP8TensorStorage,
    )


def _dtype(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else _te().dtypes[dtype]


def _rows(t: Tensor) -> Tensor:
    """Any tensor as the matrix that kernels see: [everything but the last dimension, the last]."""
    return t.reshape(-1, t.shape[-1])


# Quantisation.


def scale_of(amax: Tensor, fp8: torch.dtype, x: torch.dtype, eps: float, power_of_2: bool) -> Tensor:
    """Gives the factor that brings `amax` to the format's end (common/recipe/recipe_common.cuh,
    compute_scale_from_amax).

    x: the dtype of what is quantised; its largest number stands for a factor that overflows."""
    amax = torch.where(amax < eps, eps, amax)
    scale = torch.full_like(amax, torch.finfo(fp8).max) / amax  # a number / a tensor is rounded twice
    scale = torch.where(scale.isinf(), torch.finfo(x).max, scale)
    if power_of_2:
        scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)  # the mantissa cut off
    return torch.where(amax.isfinite() & (amax != 0), scale, 1.0)


def _cast(x: Tensor, fp8: torch.dtype) -> Tensor:
    """Saturates as the device's conversion does; torch's gives NaN beyond the format's end. The bytes,
    uint8."""
    end = torch.finfo(fp8).max
    return x.clamp(-end, end).to(fp8).view(torch.uint8)


def _tiles(x: Tensor, height: int, width: int) -> Tensor:
    """[m, n] -> [ceil(m / height), ceil(n / width), height, width], filled up with zeros."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % width, 0, -x.shape[0] % height))
    return x.reshape(x.shape[0] // height, height, x.shape[1] // width, width).transpose(1, 2)


def _spread(scales: Tensor, height: int, width: int, shape: torch.Size) -> Tensor:
    """One scale per tile -> one per element; the padding of `scales` falls off."""
    return scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[: shape[0], : shape[1]]


@kernel("pytorch/csrc/quantizer.cpp: create_tensor of each quantizer")
def create_empty_quantized_tensor(
    quantizer: Any, shape: Any, dtype: torch.dtype, device: Any = "cpu", pin_memory: bool = False
) -> Any:
    te, shape = _te(), tuple(shape)
    if not isinstance(quantizer, te.Delayed):  # the others' layout is known to the Python half
        context = quantizer.create_metadata(shape, dtype=dtype)
        buffers = quantizer.alloc_tensors(shape, device="cpu")
        return context["cls"].__tensor_unflatten__(buffers, context, shape, None)
    columns = quantizer.columnwise_usage and NEEDS_TRANSPOSES
    rows = quantizer.rowwise_usage or not NEEDS_TRANSPOSES
    buffers = {
        "data": torch.empty(shape, dtype=torch.uint8) if rows else None,
        "data_transpose": torch.empty(shape[-1:] + shape[:-1], dtype=torch.uint8) if columns else None,
        "fp8_scale_inv": quantizer.scale.reciprocal().reshape(1),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return te.PerTensorStorage(**buffers, fake_dtype=dtype)
    return te.Float8Tensor(shape=shape, dtype=dtype, device=torch.device("cpu"), **buffers)


@kernel("pytorch/csrc/extensions/cast.cpp: quantize")
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    if output is None:
        output = create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype)
    elif noop is not None and noop.item() != 0:
        return output
    te = _te()
    fill = {
        te.Delayed: _fill_per_tensor,
        te.Current: _fill_per_tensor,
        te.Block: _fill_blocks,
        te.MX: _fill_mx,
    }
    if type(quantizer) not in fill:
        raise NotImplementedError(
            f"transformer_engine_torch.quantize with {type(quantizer).__name__} is not emulated"
        )
    fill[type(quantizer)](output, quantizer, tensor.detach(), _dtype(quantizer.dtype))
    return output


def _fill_per_tensor(output: Any, quantizer: Any, tensor: Tensor, fp8: torch.dtype) -> None:
    """One factor for the whole tensor: delayed scaling has it from before, current scaling takes it from the
    values.

    pytorch/csrc/quantizer.cpp: Float8Quantizer and Float8CurrentScalingQuantizer, convert_and_update_tensor
    and quantize."""
    x = _rows(tensor).float()
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    if isinstance(quantizer, _te().Delayed):
        scale = quantizer.scale.reshape(())
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
    else:
        if quantizer.with_amax_reduction:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group())
        scale = scale_of(amax, fp8, tensor.dtype, quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    if NEEDS_TRANSPOSES and not quantizer.rowwise_usage:
        raise NotImplementedError("Columnwise-only per-tensor FP8 quantization is not implemented")
    data = _cast(x * scale, fp8)
    # The buffers of a tensor that was there already follow the quantizer's usage of today.
    if output._data is None:
        output._data = torch.empty(tensor.shape, dtype=torch.uint8)
    output._data.copy_(data.reshape(output._data.shape))
    if NEEDS_TRANSPOSES and quantizer.columnwise_usage:
        if output._transpose is None:
            output._transpose = torch.empty((tensor.shape[-1], *tensor.shape[:-1]), dtype=torch.uint8)
        output._transpose.copy_(data.t().reshape(output._transpose.shape))
    else:
        output._transpose = None
    output._transpose_invalid = output._transpose is None
    output._scale_inv.copy_(scale.reciprocal().reshape(output._scale_inv.shape))


def _fill_blocks(output: Any, quantizer: Any, tensor: Tensor, fp8: torch.dtype) -> None:
    """A factor for 128 values of a row, or for 128 x 128; the columnwise copy is the rowwise one of the
    transpose.

    common/transpose/quantize_transpose_vector_blockwise.cu and quantize_transpose_square_blockwise.cu."""
    x = _rows(tensor).float()
    height = 128 if quantizer.block_scaling_dim == 2 else 1
    for y, data, scale_inv in (
        (x, output._rowwise_data, output._rowwise_scale_inv),
        (x.t(), output._columnwise_data, output._columnwise_scale_inv),
    ):
        if data is None:
            continue
        amax = _tiles(y, height, 128).abs().amax((2, 3))
        scale = scale_of(amax, fp8, tensor.dtype, quantizer.amax_epsilon, quantizer.force_pow_2_scales)
        data.copy_(_cast(y * _spread(scale, height, 128, y.shape), fp8).reshape(data.shape))
        inverse = scale.reciprocal() if height == 128 else scale.reciprocal().t()
        scale_inv.zero_()[: inverse.shape[0], : inverse.shape[1]] = inverse


def _fill_mx(output: Any, quantizer: Any, tensor: Tensor, fp8: torch.dtype) -> None:
    """A power of two, kept as a biased exponent, for 32 values of a row (rowwise copy) or of a column
    (columnwise copy).

    common/cast/mxfp8/quantize_mxfp8.cuh; the exponent is rounded up (float_to_e8m0 in
    common/util/ptx_arch_spec.cuh)."""
    x = _rows(tensor).float()
    for data, scale_inv, (height, width) in (
        (output._rowwise_data, output._rowwise_scale_inv, (1, 32)),
        (output._columnwise_data, output._columnwise_scale_inv, (32, 1)),
    ):
        if data is None:
            continue
        bits = (_tiles(x, height, width).abs().amax((2, 3)) / torch.finfo(fp8).max).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & ((1 << 23) - 1)
        tiny = (exponent == 0) & (mantissa <= 1 << 22)
        exponent = exponent + ((mantissa > 0) & (exponent != 254) & ~tiny)
        scale = torch.exp2(127.0 - exponent)
        data.copy_(_cast(x * _spread(scale, height, width, x.shape), fp8).reshape(data.shape))
        scale_inv.zero_()[: exponent.shape[0], : exponent.shape[1]] = exponent.to(torch.uint8)


def operand(t: Any, columnwise: bool) -> Tensor:
    """Gives what a product reads of `t`: the rowwise copy or the columnwise one, dequantised. float32 [rows,
    columns] of the tensor.

    common/gemm/cublaslt_gemm.cu, CanonicalizeGemmInput. RuntimeError where the copy was not made, or was
    given up."""
    te = _te()
    if isinstance(t, te.PerTensorStorage):
        fp8 = _dtype(t._fp8_dtype)
        if columnwise and NEEDS_TRANSPOSES:
            if t._transpose is None or t._transpose_invalid:
                raise RuntimeError("FP8 operand without a valid transpose")
            data = t._transpose.reshape(t._transpose.shape[0], -1).t().contiguous()
        elif t._data is None:
            raise RuntimeError("FP8 operand without rowwise data")
        else:
            data = _rows(t._data)
        return data.view(fp8).float() * t._scale_inv
    if not isinstance(t, te.BlockStorage | te.MXStorage):
        return _rows(t.detach()).float()
    side = "columnwise" if columnwise else "rowwise"
    data, scale_inv = getattr(t, f"_{side}_data"), getattr(t, f"_{side}_scale_inv")
    if data is None:
        raise RuntimeError(f"{type(t).__name__} without {side} data")
    if isinstance(t, te.MXStorage):
        values = _rows(data).view(_dtype(t._fp8_dtype)).float()
        tile = (32, 1) if columnwise else (1, 32)
        return values * _spread(torch.exp2(scale_inv.float() - 127), *tile, values.shape)
    # The columnwise copy of a block-scaled tensor is a transpose: its first dimension is the tensor's last.
    values = (
        (data.reshape(data.shape[0], -1) if columnwise else _rows(data)).view(_dtype(t._fp8_dtype)).float()
    )
    if t._is_2D_scaled:
        values = values * _spread(scale_inv, 128, 128, values.shape)
    else:
        values = values * _spread(scale_inv.t(), 1, 128, values.shape)
    return values.t() if columnwise else values


@kernel("pytorch/csrc/extensions/cast.cpp: dequantize")
def dequantize(tensor: Any, otype: Any) -> Tensor:
    data = tensor._data if isinstance(tensor, _te().PerTensorStorage) else tensor._rowwise_data
    return operand(tensor, columnwise=data is None).reshape(tuple(tensor.size())).to(_dtype(otype))


@kernel("pytorch/csrc/extensions/transpose.cpp: fp8_transpose")
def fp8_transpose(data: Tensor, dtype: Any = None, *, out: Tensor | None = None) -> Tensor:
    moved = _rows(data).t().reshape(data.shape[-1], *data.shape[:-1])
    return moved.contiguous() if out is None else out.copy_(moved)


@kernel("pytorch/csrc/extensions/transpose.cpp: swap_first_dims")
def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    moved = tensor.transpose(0, 1)
    return moved.contiguous() if out is None else out.copy_(moved)


@kernel("pytorch/csrc/extensions/bias.cpp: bgrad_quantize")
def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return _rows(grad).float().sum(0).to(grad.dtype), quantize(grad, quantizer)


@kernel("common/recipe/delayed_scaling.cu: amax_and_scale_update_impl, kernel_bulk")
def fused_amax_and_scale_update_after_reduction(
    reduced: Tensor, histories: list[Tensor], scales: list[Tensor], algorithm: str, dtype: Any, margin: float
) -> None:
    """Rolls each history [length, tensors] by one, writes the newest maxima at its end, zeros into row 0 for
    the pass to come, and takes new scales from it. A tensor that was not used (maximum 0) keeps history and
    scale."""
    start = 0
    for history, scale in zip(histories, scales, strict=True):
        newest = reduced[start : start + scale.numel()].reshape(scale.shape)
        start += scale.numel()
        newest = torch.where(newest != 0, newest, history[0])
        rolled = torch.cat([history[1:], newest[None]])
        amax = newest if algorithm == "most_recent" else rolled.amax(0)
        rolled[0] = 0
        used = newest != 0
        history.copy_(torch.where(used, rolled, history))
        end = torch.full_like(amax, torch.finfo(_dtype(dtype)).max / 2.0**margin)
        new = (end / amax).clamp(max=FLOAT32_MAX)
        scale.copy_(torch.where(used & amax.isfinite(), new, scale))


# Products, norms, rotations.


@kernel("pytorch/csrc/extensions/gemm.cpp: gemm; common/gemm/cublaslt_gemm.cu")
def generic_gemm(
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
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, Tensor | None, None, Any]:
    """D = alpha op(B) op(A) + beta D, both row by row: TN is input x weight^T, NN gradient x weight, NT
    gradient^T x input.

    Gives (D, gradient of the bias where `grad`, None, extra_output)."""
    if gelu or comm_overlap is not None:
        raise NotImplementedError(
            "transformer_engine_torch.generic_gemm with gelu or overlapped communication is not emulated"
        )
    te = _te()
    a, b = operand(A, columnwise=not transA), operand(B, columnwise=transB)
    if isinstance(A, te.PerTensorStorage | te.BlockStorage | te.MXStorage):
        multiple = 32 if isinstance(A, te.MXStorage) else 16
        if any(size % multiple for size in (*a.shape, *b.shape)):
            sizes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise RuntimeError(f"cuBLAS: FP8 operands {sizes} need sizes that are multiples of {multiple}")
    layout = f"{'T' if transA else 'N'}{'T' if transB else 'N'}"
    CALLS[f"gemm {layout} {type(A).__name__} {type(B).__name__}"] += 1
    a, b = (a.t() if transA else a), (b.t() if transB else b)
    if a.shape[0] != b.shape[1]:
        raise RuntimeError(f"Invalid matrix dimensions for GEMM (A {tuple(a.shape)}, B {tuple(b.shape)})")
    product = alpha * (b @ a)
    dtype = _dtype(output_dtype) if output_dtype is not None else (A.dtype if D is None else D.dtype)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = operand(B, columnwise=transB).sum(0).to(dtype)
    elif bias is not None:
        product = product + bias.detach().float()
    if D is None:
        outer = (b.shape[0],) if transB else tuple(B.size())[:-1]
        made = product.reshape(*outer, a.shape[1]).to(dtype)
        return (made if quantizer is None else quantize(made, quantizer)), bias_grad, None, extra_output
    if _rows(D).shape != product.shape or D.dtype != dtype:
        raise RuntimeError(
            f"GEMM output has invalid dims or dtype (expected {tuple(product.shape)} {dtype}, got "
            f"{tuple(D.shape)} {D.dtype})"
        )
    added = D.detach().float() * (1.0 if beta is None else beta) if accumulate else 0.0
    D.detach().copy_(product.reshape(D.shape) + added)
    return D, bias_grad, None, extra_output


@kernel("pytorch/csrc/extensions/gemm.cpp: te_general_grouped_gemm")
def te_general_grouped_gemm(
    A: list[Any],
    transa: bool,
    B: list[Any],
    transb: bool,
    D: list[Tensor],
    D_type: Any,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[Tensor]:
    """One product per pair of A and B, into D or, with single_output, one under the other into D[0]. Of
    nothing comes zero, or what was there. Gives the biases, which are empty here."""
    if any(tensor.numel() for tensor in (*bias, *pre_gelu_out)):
        raise NotImplementedError("te_general_grouped_gemm with a bias or gelu is not emulated")
    outputs = D[0].split(m_splits) if single_output else D
    for a, b, out in zip(A, B, outputs, strict=True):
        if a.numel() and b.numel():
            generic_gemm(
                *(a, transa, b, transb, out, None, D_type, None, bias_type, False, None, grad),
                *(workspace[0], workspace_size, accumulate, use_split_accumulator),
            )
        elif not accumulate:
            out.zero_()
    return bias


@kernel(
    "pytorch/csrc/extensions/normalization.cpp: rmsnorm_fwd; "
    "common/normalization/rmsnorm/rmsnorm_fwd_kernels.cuh"
)
def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, Tensor]:
    """Gives (normed, None, reciprocal of the root mean square: float32 [rows])."""
    x, gamma = input.detach().float(), weight.detach().float() + float(zero_centered_gamma)
    reciprocal = torch.rsqrt(x.square().mean(-1) + eps)
    normed = (x * reciprocal.unsqueeze(-1) * gamma).to(_dtype(otype))
    if quantizer is not None:
        normed = quantize(normed, quantizer, ln_out)
    elif ln_out is not None:
        normed = ln_out.copy_(normed)
    return normed, None, reciprocal.reshape(-1)


@kernel(
    "pytorch/csrc/extensions/normalization.cpp: rmsnorm_bwd; "
    "common/normalization/rmsnorm/rmsnorm_bwd_kernels.cuh"
)
def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Gives the gradients of the input and of gamma."""
    weight, reciprocal = gamma.detach().float() + float(zero_centered_gamma), rsigma.reshape(*x.shape[:-1], 1)
    normed = x.detach().float() * reciprocal
    scaled = dz.float() * weight
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * reciprocal
    return dx.to(x.dtype), _rows(dz.float() * normed).sum(0).to(gamma.dtype)


def _rotate(
    t: Tensor, freqs: Tensor, cu_seqlens: Tensor | None, options: tuple[Any, ...], direction: float
) -> Tensor:
    """t: [tokens, heads, width], packed sequences, each of whose tokens count from zero; freqs: [longest, 1,
    1, rotated width]."""
    start_positions, _, interleaved, cp_size = options
    if interleaved or cp_size > 1 or start_positions is not None or cu_seqlens is None:
        raise NotImplementedError(
            "fused_rope is emulated for packed sequences of one context-parallel rank, rotated by halves"
        )
    positions = torch.cat([torch.arange(length) for length in cu_seqlens.diff().tolist()])
    angle = freqs[positions, 0]  # IndexError where a sequence is longer than was said
    width = freqs.shape[-1]
    turned, kept = t[..., :width].float(), t[..., width:]
    half = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)
    rotated = turned * angle.cos() + direction * half * angle.sin()
    return torch.cat((rotated.to(t.dtype), kept), -1)


@kernel("pytorch/csrc/extensions/apply_rope.cpp: fused_rope_forward; common/fused_rope/fused_rope.cu")
def fused_rope_forward(
    t: Tensor,
    freqs: Tensor,
    start: Any,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Any,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    return _rotate(t.detach(), freqs, cu_seqlens, (start, qkv_format, interleaved, cp_size), 1.0)


@kernel("pytorch/csrc/extensions/apply_rope.cpp: fused_rope_backward; common/fused_rope/fused_rope.cu")
def fused_rope_backward(
    t: Tensor,
    freqs: Tensor,
    start: Any,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Any,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    return _rotate(t.detach(), freqs, cu_seqlens, (start, qkv_format, interleaved, cp_size), -1.0)


# Attention.


@kernel("common/fused_attn/fused_attn.cpp: nvte_get_fused_attn_backend")
def get_fused_attn_backend(parameters: Any) -> tuple[Any, str]:
    """cuDNN's for 16-bit types; float32 goes to Transformer Engine's own unfused attention."""
    if int(parameters.qkv_dtype) in (DType.kFloat16, DType.kBFloat16):
        return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "16-bit types only"


def _causal(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Causal attention within each packed sequence; zeros after the last. q: [tokens, heads, width]."""
    out = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
    ]
    return torch.cat([*out, q.new_zeros(q.shape[0] - int(cu_seqlens[-1]), q.shape[1], v.shape[2])])


@kernel("pytorch/csrc/extensions/attention.cpp: fused_attn_fwd")
def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    scale: float,
    dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    qkv_scale_inv_format: Any,
    bias_type: Any,
    mask: Any,
    softmax: Any,
    window: Any,
    bottom_right: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
) -> list[Tensor]:
    """Gives [output, softmax statistics, random state]; the latter two are empty here: the backward pass
    computes anew."""
    if "THD" not in qkv_layout.name or "CAUSAL" not in mask.name or dropout or bias_type or softmax:
        raise NotImplementedError(
            f"fused_attn_fwd with {qkv_layout.name}, {mask.name}, dropout {dropout} is not emulated"
        )
    if int(cu_seqlens_q.diff().max()) > max_seqlen_q:
        raise RuntimeError("a sequence is longer than max_seqlen_q")
    return [
        _causal(q.detach(), k.detach(), v.detach(), cu_seqlens_q, scale),
        torch.zeros(1),
        torch.zeros(2, dtype=torch.int64),
    ]


@kernel("pytorch/csrc/extensions/attention.cpp: fused_attn_bwd")
def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    scale: float,
    dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    qkv_scale_inv_format: Any,
    do_scale_inv_format: Any,
    bias_type: Any,
    mask: Any,
    softmax: Any,
    window: Any,
    bottom_right: bool,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grad: Tensor,
    *rest: Any,
) -> list[Tensor | None]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        again = _causal(*leaves, cu_seqlens_q, scale)
    return [*torch.autograd.grad(again, leaves, grad), None, None]


@kernel("pytorch/csrc/extensions/attention.cpp: convert_thd_to_bshd")
def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, batch: int, longest: int) -> Tensor:
    out = tensor.new_zeros(batch, longest, *tensor.shape[1:])
    for row, (start, end) in enumerate(
        zip(cu_seqlens[:batch].tolist(), cu_seqlens[1:].tolist(), strict=False)
    ):
        out[row, : end - start] = tensor[start:end]
    return out


@kernel("pytorch/csrc/extensions/attention.cpp: convert_bshd_to_thd")
def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    out = tensor.new_zeros(tokens, *tensor.shape[2:])
    for row, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        out[start:end] = tensor[row, : end - start]
    return out


# Lists of tensors: gradient norm, optimizer.


@kernel("common/multi_tensor/l2norm.cu")
def multi_tensor_l2norm(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    each = torch.stack([t.float().norm() for t in lists[0]])
    return each.norm().reshape(1), each if per_tensor else each[:0]


@kernel("common/multi_tensor/scale.cu")
def multi_tensor_scale(chunk: int, noop: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


@kernel("common/multi_tensor/scale.cu: multi_tensor_scale_tensor_cuda")
def multi_tensor_scale_tensor(chunk: int, noop: Tensor, lists: list[list[Tensor]], scale: Tensor) -> None:
    """As multi_tensor_scale, by a factor on the device (megatron-core 0.19)."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


@kernel("common/multi_tensor/adam.cu: AdamFunctor, AdamFunctorMaster")
def multi_tensor_adam(
    chunk: int,
    noop: Tensor,
    lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """lists: gradients, parameters, first and second moments and, for parameters in 16 bits, their float32
    masters. mode 1: AdamW."""
    if not isinstance(step, int):
        raise TypeError("multi_tensor_adam: incompatible function arguments: step is no int")
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, first, second, *master in zip(*lists, strict=True):
        p, g = (master[0] if master else parameter).float(), gradient.float()
        if mode == 0:
            g = g + decay * p
        first.copy_(beta1 * first + (1 - beta1) * g)
        second.copy_(beta2 * second + (1 - beta2) * g * g)
        update = first / correction1 / ((second / correction2).sqrt() + epsilon)
        p = p - lr * (update + decay * p if mode == 1 else update)
        parameter.copy_(p)
        if master:
            master[0].copy_(p)


# The Python half on a CPU.


def _led(function: Callable[..., Any]) -> Callable[..., Any]:
    """`device="cuda"` and `map_location="cuda"` mean the CPU.

    Not by a TorchFunctionMode: those are off within Tensor.backward, where activation recompute runs forward
    passes."""

    @functools.wraps(function)
    def led(*args: Any, **kwargs: Any) -> Any:
        for key in ("device", "map_location"):
            if kwargs.get(key) is not None and torch.device(kwargs[key]).type == "cuda":
                kwargs[key] = "cpu"
        return function(*args, **kwargs)

    return led


class _Names(types.ModuleType):
    """A module as Transformer Engine's files see it: some names are ours, the others the real ones."""

    def __init__(self, real: Any, **ours: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(ours, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _properties(device: Any = None) -> Any:
    major, minor = CAPABILITY
    sizes = {
        "total_memory": 80 << 30,
        "multi_processor_count": 132,
        "warp_size": 32,
        "L2_cache_size": 50 << 20,
    }
    return types.SimpleNamespace(name="emulated", major=major, minor=minor, is_integrated=0, **sizes)


def _give_names() -> None:
    """Puts a `torch` into each of Transformer Engine's files whose CUDA is the CPU."""
    cuda = _Names(
        torch.cuda,
        is_available=lambda: True,
        is_current_stream_capturing=lambda: False,
        device=lambda device=None: contextlib.nullcontext(),
    )
    factories = (
        "empty",
        "zeros",
        "ones",
        "full",
        "tensor",
        "arange",
        "empty_like",
        "zeros_like",
        "ones_like",
        "load",
    )
    names = _Names(torch, cuda=cuda, **{name: _led(getattr(torch, name)) for name in factories})
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "transformer_engine" and getattr(module, "torch", None) is torch:
            module.torch = names  # type: ignore[attr-defined]


@contextlib.contextmanager
def _absent_packages() -> Iterator[None]:
    """Packages that the Python half names and that nothing here calls; for its import only, so that torch
    finds no triton later."""
    from torch.utils._triton import has_triton_package

    has_triton_package()  # which remembers its answer
    wanted = ("triton", "triton.language", "triton.language.standard", "onnx", "onnxscript", "einops")
    made = [name for name in wanted if importlib.util.find_spec(name.partition(".")[0]) is None]
    for name in made:
        spec = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = MagicMock(__version__="3.0.0", __spec__=spec, __path__=[])
    if "triton" in made:  # a kernel that is launched after all: kernel[grid](...)
        for launched in (
            sys.modules["triton"].jit.return_value,
            sys.modules["triton"].autotune.return_value.return_value,
        ):
            launched.__getitem__.side_effect = NotImplementedError("a triton kernel is not emulated")
    yield
    for name in made:
        del sys.modules[name]


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Around the import of transformer_engine: what it and Megatron ask of CUDA is answered, what it loads is
    this module."""
    from importlib.metadata import version

    if version("transformer_engine") != VERSION:
        raise ImportError(
            f"{__file__}: written for Transformer Engine {VERSION}, this is {version('transformer_engine')}"
        )
    os.environ.setdefault("NVTE_PROJECT_BUILDING", "1")  # no library of CUDA is looked for
    # fused activations would be compiled for the CPU, for minutes
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda device=None: CAPABILITY
    cuda.get_device_properties = _properties
    torch.version.cuda = "13.0"  # block scaling asks for 12.9
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment,method-assign]  # inputs are checked for it
    torch.Tensor.to = _led(torch.Tensor.to)  # type: ignore[method-assign]
    # Gloo cannot gather data and scales in one operation; one after the other they are the same.
    done = types.SimpleNamespace(wait=lambda: None)
    dist._coalescing_manager = lambda *args, **kwargs: contextlib.nullcontext(done)  # type: ignore[assignment]
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    with _absent_packages():
        yield
    import transformer_engine.pytorch.distributed as distributed

    # Its activation recompute, FP8's, keeps the state of CUDA's random generator.
    distributed._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    distributed._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    _give_names()
