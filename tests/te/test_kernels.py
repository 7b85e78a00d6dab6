"""The kernels in plain torch against Transformer Engine's own Python references, and where it has none
against torch or a loop."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.schema import ModelConfig
from megarl.model.builder import warn_unfused_attention
from megarl.parallel import cpu_platform

tex = pytest.importorskip(
    "transformer_engine_torch", reason="needs tests/te/compiled on PYTHONPATH: make test-te"
)
pytest.importorskip("transformer_engine", reason="needs Transformer Engine's Python half: make test-te")
cpu_platform.install()

import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common.recipe import DelayedScaling, Format  # noqa: E402
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb  # noqa: E402
from transformer_engine.pytorch.constants import DType  # noqa: E402
from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef  # noqa: E402
from transformer_engine.pytorch.optimizers import FusedAdam  # noqa: E402
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer, MXFP8Quantizer  # noqa: E402
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer  # noqa: E402

FORMATS = {torch.float8_e4m3fn: DType.kFloat8E4M3, torch.float8_e5m2: DType.kFloat8E5M2}
ROOT = Path(__file__).parents[2]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers over six orders of magnitude by row, with a row of zeros and an outlier."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator) * 10.0 ** torch.linspace(-4, 2, shape[0]).unsqueeze(-1)
    drawn[1], drawn[0, 0] = 0.0, 200.0
    return drawn.to(dtype)


def close(found: Tensor, expected: Tensor, relative: float) -> None:
    assert found.shape == expected.shape
    assert expected.double().norm() > 0, "the test would compare nothing"
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    assert difference <= relative, difference


def test_every_kernel_is_one_that_the_python_half_or_megatron_names() -> None:
    import megatron.core
    import transformer_engine

    folders = [Path(transformer_engine.__file__).parent, Path(megatron.core.__file__).parent]
    text = "".join(file.read_text() for folder in folders for file in sorted(folder.rglob("*.py")))
    named = set(re.findall(r"\b\w+\b", text))
    newer = {"multi_tensor_scale_tensor"}  # megatron-core 0.19's
    assert set(tex.KERNELS) - newer <= named
    assert all(
        re.match(r"(pytorch/csrc|common)/\S+\.(cpp|cuh?)\b", source) for source in tex.KERNELS.values()
    )


def test_what_is_not_emulated_says_its_name() -> None:
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.swiglu is not emulated"):
        tex.swiglu(torch.ones(2))


@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1e-38, 0.0])
def test_current_scaling_is_transformer_engines_reference(
    x: torch.dtype, fp8: torch.dtype, power_of_2: bool, factor: float
) -> None:
    """Bytes, scale and transpose, bit for bit; also where everything is tiny or zero."""
    tensor = (numbers(48, 64) * factor).to(x)
    reference = CurrentScalingQuantizerRef(
        dtype=fp8, rowwise=True, columnwise=True, pow_2_scales=power_of_2
    ).quantize(tensor)
    made = Float8CurrentScalingQuantizer(FORMATS[fp8], "cpu", force_pow_2_scales=power_of_2)(tensor)
    assert torch.equal(made._data, reference.data.view(torch.uint8))
    assert torch.equal(made._transpose, reference.data_t.view(torch.uint8))
    assert torch.equal(made._scale_inv.reshape(()), reference.scale.reshape(()))
    assert torch.equal(made.dequantize().float(), (reference.data.float() * reference.scale).to(x).float())


@pytest.mark.parametrize("kind", ["blocks of 128", "blocks of 128 x 128", "MX"])
def test_block_scales(kind: str) -> None:
    """Of both copies, by a loop: the scale is the largest power of two at which the block does not overflow,
    and every value comes back within half a unit in the last place of e4m3 (3 bits of mantissa), or of its
    smallest step."""
    tensor = numbers(160, 256)
    if kind == "MX":
        made = MXFP8Quantizer(DType.kFloat8E4M3)(tensor)
        tiles = {False: (1, 32), True: (32, 1)}
    else:
        dim = 2 if "x" in kind else 1
        made = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)(
            tensor
        )
        tiles = {False: (128 if dim == 2 else 1, 128), True: (128, 128 if dim == 2 else 1)}
    for columnwise, (height, width) in tiles.items():
        back = tex.operand(made, columnwise)
        assert back.shape == tensor.shape
        for top in range(0, tensor.shape[0], height):
            for left in range(0, tensor.shape[1], width):
                block = tensor[top : top + height, left : left + width].double()
                returned = back[top : top + height, left : left + width].double()
                amax = float(block.abs().max())
                if amax == 0:
                    assert not returned.any()
                    continue
                exponent = 0
                while amax * 2.0**exponent > 448:
                    exponent -= 1
                while amax * 2.0 ** (exponent + 1) <= 448:
                    exponent += 1
                step = 2.0**-9 / 2.0**exponent  # the smallest of e4m3's steps
                assert bool(((returned - block).abs() <= (block.abs() / 16).clamp(min=step / 2)).all()), (
                    top,
                    left,
                )


def test_delayed_scaling_remembers() -> None:
    """A linear layer's passes: the newest maximum at the end of the history, scales from its largest; zero
    for the pass to come."""
    linear = te.Linear(64, 32, bias=False, device="cpu", params_dtype=torch.bfloat16)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4, amax_compute_algo="max")
    seen: list[float] = []
    for number, factor in enumerate((3.0, 1.0, 2.0, 0.5, 0.25, 0.125)):
        x = (
            (factor * torch.randn(16, 64, generator=torch.Generator().manual_seed(number)))
            .bfloat16()
            .requires_grad_()
        )
        with te.autocast(enabled=True, recipe=recipe):
            y = linear(x)
        y.sum().backward()
        seen.append(float(x.detach().abs().max()))
        history = linear.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist()
        # Scales are made at the end of a backward pass, of the three newest maxima: the fourth row is the
        # next pass's.
        assert history == [0.0, *[0.0] * (3 - len(seen[-3:])), *seen[-3:]]
        kept = seen[-4:]
        assert float(linear.fp8_meta["scaling_fwd"].scale[0]) == pytest.approx(448 / max(kept), rel=1e-6)
    assert float(linear.fp8_meta["scaling_bwd"].scale[0]) == pytest.approx(57344 / 1.0, rel=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_equals_torchs(bias: bool) -> None:
    """The three layouts of products, the bias and its gradient."""
    linear = te.Linear(24, 40, bias=bias, device="cpu", params_dtype=torch.float32)
    x = torch.randn(3, 5, 24, requires_grad=True)
    grad = torch.randn(3, 5, 40)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.normal_()
    y = linear(x)
    y.backward(grad)
    parameters = [p.detach().double().requires_grad_() for p in linear.parameters()]
    exact = x.detach().double().requires_grad_()
    expected = torch.nn.functional.linear(exact, *parameters)
    expected.backward(grad.double())
    close(y, expected, 1e-6)
    close(x.grad, exact.grad, 1e-6)
    for mine, theirs in zip(linear.parameters(), parameters, strict=True):
        close(mine.grad, theirs.grad, 1e-6)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rmsnorm_equals_torchs(zero_centered: bool) -> None:
    norm = te.RMSNorm(
        48, eps=1e-5, zero_centered_gamma=zero_centered, device="cpu", params_dtype=torch.float32
    )
    x, grad = torch.randn(7, 2, 48, requires_grad=True), torch.randn(7, 2, 48)
    with torch.no_grad():
        norm.weight.normal_()
    y = norm(x)
    y.backward(grad)
    exact, gamma = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = torch.nn.functional.rms_norm(exact, (48,), gamma + float(zero_centered), 1e-5)
    expected.backward(grad.double())
    for found, wanted in ((y, expected), (x.grad, exact.grad), (norm.weight.grad, gamma.grad)):
        close(found, wanted, 1e-6)


def test_rotation_is_transformer_engines_unfused_one() -> None:
    cu_seqlens = torch.tensor([0, 5, 6, 17], dtype=torch.int32)
    freqs = RotaryPositionEmbedding(16)(11)
    leaves = [
        torch.randn(17, 2, 24, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)
    ]
    fused, unfused = (
        apply_rotary_pos_emb(leaf, freqs, tensor_format="thd", cu_seqlens=cu_seqlens, fused=fused)
        for leaf, fused in zip(leaves, (True, False), strict=True)
    )
    close(fused, unfused, 1e-6)
    grad = torch.randn(17, 2, 24)
    fused.backward(grad)
    unfused.backward(grad)
    close(leaves[0].grad, leaves[1].grad, 1e-6)
    with pytest.raises(IndexError):
        apply_rotary_pos_emb(leaves[0], freqs[:8], tensor_format="thd", cu_seqlens=cu_seqlens, fused=True)


@pytest.mark.parametrize(
    ("dtype", "fused", "bound"), [(torch.float32, False, 1e-6), (torch.bfloat16, True, 1e-2)]
)
def test_packed_attention_is_a_loop_over_sequences(dtype: torch.dtype, fused: bool, bound: float) -> None:
    """Through DotProductAttention, which takes its own unfused attention for float32, and cuDNN's place for
    16 bits."""
    attention = te.DotProductAttention(
        4, 16, num_gqa_groups=2, qkv_format="thd", attn_mask_type="padding_causal"
    )
    cu_seqlens = torch.tensor([0, 9, 10, 24], dtype=torch.int32)
    q, k, v = (torch.randn(24, heads, 16).to(dtype).requires_grad_() for heads in (4, 2, 2))
    grad = torch.randn(24, 64).to(dtype)
    tex.CALLS.clear()
    out = attention(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=14, max_seqlen_kv=14
    )
    out.backward(grad)
    assert bool(tex.CALLS["fused_attn_fwd"]) == bool(tex.CALLS["fused_attn_bwd"]) == fused
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.zeros(24, 4, 16, dtype=torch.float64)
    for start, end in ((0, 9), (9, 10), (10, 24)):
        for head in range(4):
            mine, keys, values = (
                exact[0][start:end, head],
                exact[1][start:end, head // 2],
                exact[2][start:end, head // 2],
            )
            scores = (mine @ keys.T / 4.0).masked_fill(
                torch.ones(end - start, end - start).triu(1).bool(), -torch.inf
            )
            expected[start:end, head] = scores.softmax(-1) @ values
    expected.flatten(1).backward(grad.double())
    close(out, expected.flatten(1), bound)
    for found, wanted in zip((q, k, v), exact, strict=True):
        close(found.grad, wanted.grad, bound)


@pytest.mark.parametrize("allowed", ["1", "0"])
def test_flash_attention_4_is_not_taken(allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SGLang has brought it and cuDNN has no kernel, Transformer Engine takes it unless the variable
    says no, as it does in a rank on CUDA (runtime.start)."""
    from packaging.version import Version
    from transformer_engine.pytorch.attention.dot_product_attention import backends, utils
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as chooser

    taken = []

    def flash_attn_varlen_func(query: Tensor, *_: Tensor, **options: Any) -> Tensor:
        taken.append(options["window_size"])
        return query

    none = tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend, "this shape is not supported"
    monkeypatch.setattr(tex, "get_fused_attn_backend", lambda parameters: none)
    monkeypatch.setattr(backends, "flash_attn_varlen_func_v4", flash_attn_varlen_func, raising=False)
    monkeypatch.setattr(utils.FlashAttentionUtils, "v4_is_installed", True)
    monkeypatch.setattr(utils.FlashAttentionUtils, "fa4_version", Version("4.0.0b36"))
    monkeypatch.setattr(utils.FlashAttentionUtils, "v4_validate_head_dims", lambda *sizes: None)
    monkeypatch.setenv("NVTE_FLASH_ATTN_V4", allowed)
    anew = {**chooser._attention_backends, "attention_params": None}  # what was chosen last is remembered
    monkeypatch.setattr(chooser, "_attention_backends", anew)
    attention = te.DotProductAttention(
        4, 16, num_gqa_groups=2, qkv_format="thd", attn_mask_type="padding_causal"
    )
    cu_seqlens = torch.tensor([0, 9, 24], dtype=torch.int32)
    q, k, v = (torch.randn(24, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    out = attention(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=15, max_seqlen_kv=15
    )
    assert taken == ([(-1, 0)] if allowed == "1" else [])
    told = warn_unfused_attention(ModelConfig(path=Path("x")))
    assert told.startswith("attention is unfused") == (allowed == "0")
    for own in ({"attention": "unfused"}, {"dtype": "fp32"}):  # as was asked for, or as always
        assert not warn_unfused_attention(ModelConfig(path=Path("x"), **own))
    assert out.flatten(1)[0].equal(v[0].repeat_interleave(2, 0).flatten()) == (allowed == "0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_is_torchs(dtype: torch.dtype) -> None:
    start = [torch.randn(n) for n in (100, 7)]
    parameters = [torch.nn.Parameter(x.to(dtype)) for x in start]
    exact = [torch.nn.Parameter(x.detach().float()) for x in parameters]
    keys: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    mine = FusedAdam(parameters, adam_w_mode=True, master_weights=dtype == torch.bfloat16, **keys)
    theirs = torch.optim.AdamW(exact, **keys)
    for _ in range(5):
        for parameter, other in zip(parameters, exact, strict=True):
            parameter.grad = torch.randn_like(parameter)
            other.grad = parameter.grad.float()
        mine.step()
        theirs.step()
    for parameter, other in zip(parameters, exact, strict=True):
        close(parameter, other.to(dtype), 1e-6 if dtype == torch.float32 else 4e-3)


def test_lists_of_tensors() -> None:
    tensors, noop = [torch.randn(5, 3), torch.randn(4)], torch.zeros(1, dtype=torch.int)
    norm, each = tex.multi_tensor_l2norm(65536, noop, [tensors], True)
    assert float(norm) == pytest.approx(float(torch.cat([t.flatten() for t in tensors]).norm()), rel=1e-6)
    assert each.tolist() == pytest.approx([float(t.norm()) for t in tensors], rel=1e-6)
    for scale, factor in (
        (tex.multi_tensor_scale, 0.25),
        (tex.multi_tensor_scale_tensor, torch.tensor([0.25])),
    ):
        targets = [torch.zeros_like(t) for t in tensors]
        scale(65536, noop, [tensors, targets], factor)
        assert all(torch.equal(target, t * 0.25) for target, t in zip(targets, tensors, strict=True))


def test_products_refuse_what_the_device_refuses() -> None:
    """A copy that was not made, sizes that cuBLAS does not take, an output of another shape."""
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, "cpu")
    whole = quantizer(torch.randn(16, 32))
    quantizer.set_usage(columnwise=False)
    rows_alone = quantizer(torch.randn(16, 32))
    with pytest.raises(RuntimeError, match="without a valid transpose"):
        tex.operand(rows_alone, columnwise=True)
    workspace = torch.empty(1, dtype=torch.uint8)

    def product(a: Any, b: Any, out: Tensor | None = None) -> Any:
        dtype = DType.kFloat32
        return tex.generic_gemm(
            a, True, b, False, out, None, dtype, None, None, False, None, False, workspace, 1, False, False
        )[0]

    close(product(whole, whole), whole.dequantize() @ whole.dequantize().T, 1e-6)
    with pytest.raises(RuntimeError, match="multiples of 16"):
        product(quantizer(torch.randn(16, 24)), quantizer(torch.randn(16, 24)))
    with pytest.raises(RuntimeError, match="invalid dims"):
        product(whole, whole, torch.empty(16, 8))
