"""Block FP8 from shards, however they are cut, against the whole Hugging Face tensor quantised by a loop in
float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.errors import ConfigError
from megarl.config.schema import LoraConfig
from megarl.parallel.layout import Layout
from megarl.sync.plan import Plan, fp8_block, make_plan
from megarl.sync.transfer import FORMAT_DTYPES, Transfer
from megarl.weights.lora import Source, merged
from megarl.weights.shards import Shards, hf_shapes, hf_shards, megatron_layout, sglang_shards
from tests.ranks import RankPool
from tests.weights.folders import described, sliced
from tests.weights.jobs import into_engines, whole_model

# 4 tensor-parallel ranks cut blocks in two (q and k: 192 rows, ffn: 96), 3 do not.
CONFIG = described("llama", 2, 200, 12, 12, 384, 67, head_dim=64, tie_word_embeddings=False)
# Every number that float8_e4m3fn has, from its definition: 3 bits of mantissa, exponents -6 to 8, subnormals
# below, 480 left out.
MAGNITUDES = [m * 2.0**-9 for m in range(8)] + [
    (8 + m) * 2.0 ** (e - 3) for m in range(8) for e in range(-6, 9)
]
E4M3 = sorted({sign * magnitude for sign in (1, -1) for magnitude in MAGNITUDES if magnitude < 480})


def quantised(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(float64 values that float8 has, float32 scales) of a whole tensor, block by block; ties go to the even
    mantissa."""
    codes = torch.tensor(E4M3, dtype=torch.float64)
    even = torch.tensor(
        [torch.tensor(code).to(torch.float8_e4m3fn).view(torch.uint8).item() % 2 == 0 for code in E4M3]
    )
    values = torch.empty(tensor.shape, dtype=torch.float64)
    scales = torch.empty([-(-size // 128) for size in tensor.shape], dtype=torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = max(tensor[here].abs().max().float() / 448.0, torch.tensor(2.0**-126))
            wanted = (tensor[here].float() / scales[i, j]).double()
            above = torch.searchsorted(codes, wanted.contiguous()).clamp(1, len(codes) - 1)
            low, high = codes[above - 1], codes[above]
            up = (high - wanted < wanted - low) | ((high - wanted == wanted - low) & even[above])
            values[here] = torch.where(up, high, low)
    return values, scales


@cache
def reference(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors, scales) of the whole model, the linear layers quantised."""
    wanted, scales = whole_model(CONFIG, seed), dict[str, Tensor]()
    for name, tensor in wanted.items():
        if name.endswith("_proj.weight"):
            wanted[name], scales[name] = quantised(tensor)
    return wanted, scales


def check(
    tensors: dict[str, Tensor], seed: int, config: dict[str, Any], tp: int, rank: int, dtype: torch.dtype
) -> None:
    """One engine rank's tensors: the linear layers in float8 with scales, the others in the model's dtype."""
    wanted, scales = reference(seed)
    shards = sglang_shards(config, tp, rank)
    assert tensors.keys() == shards.keys() | {f"{name}_scale_inv" for name in shards if "_proj" in name}
    for name, shard in shards.items():
        assert tensors[name].dtype == (torch.float8_e4m3fn if "_proj" in name else dtype)
        for region in shard.regions:
            there, here = (tuple(slice(*ends) for ends in box) for box in (region.local_box, region.hf_box))
            found, expected = tensors[name][there], wanted[region.hf_name][here]
            if "_proj" not in name:
                assert torch.equal(found, expected.to(dtype)), name
                continue
            assert torch.equal(found.double(), expected), name
            blocks = tuple(slice(ends.start // 128, -(-ends.stop // 128)) for ends in there)
            from_ = tuple(slice(ends.start // 128, -(-ends.stop // 128)) for ends in here)
            assert torch.equal(tensors[f"{name}_scale_inv"][blocks], scales[region.hf_name][from_]), name


@pytest.mark.parametrize(
    ("layout", "bucket", "tps"),
    [(Layout(tp=4), 40_000, [(3, 0), (3, 1), (3, 2), (1, 0)]), (Layout(tp=2, pp=2), 1 << 20, [(1, 0)] * 4)],
    ids=["one-of-three-and-one-of-one", "four-of-one"],
)
def test_four_ranks(
    ranks: Callable[..., RankPool], layout: Layout, bucket: int, tps: list[tuple[int, int]]
) -> None:
    """Blocks that two sources share; what comes to a node once and is passed on there."""
    found = ranks(2, 2, 1).run(
        into_engines, config=CONFIG, layout=layout, tps=tps, fp8=True, bucket=bucket, dtype=torch.bfloat16
    )
    for (tensors, said, failed, relays), (tp, rank) in zip(found, tps, strict=True):
        assert (relays > 0) == (len(set(tps)) == 1)
        check(tensors, 2, CONFIG, tp, rank, torch.bfloat16)
        assert failed == []
        assert (
            said == "weight transfer: fingerprints of 1 engine tensors are not the actor's: "
            "model.layers.0.input_layernorm.weight of rank 1"
        )


def test_bf16_weights_and_published_names() -> None:
    """In the Hugging Face layout the result is a block-FP8 checkpoint; bf16 sources are quantised from what
    they hold."""
    hf = {name: tensor.bfloat16() for name, tensor in whole_model(CONFIG).items()}
    sources, targets, formats = fp8_block(
        megatron_layout(CONFIG, Layout()), [(0, hf_shards(CONFIG))], hf_shapes(CONFIG)
    )
    plan = make_plan(sources, targets, formats=formats)
    plan.verify()
    weights = sliced(megatron_layout(CONFIG, Layout())[0][1], hf)
    dtypes = {"float8_e4m3fn": torch.float8_e4m3fn, "float32": torch.float32}
    out = {
        n: torch.zeros(s.shape, dtype=dtypes[formats[n]] if n in formats else torch.bfloat16)
        for n, s in plan.targets[0].items()
    }
    transfer = Transfer(plan, 0, weights, out, 1, dtype=torch.bfloat16)
    stats = transfer.run()
    transfer.check()
    assert stats.bytes_local == sum(tensor.nbytes for tensor in out.values())
    for name, tensor in hf.items():
        if "_proj" in name:
            values, scale = quantised(tensor)
            assert torch.equal(out[name].double(), values), name
            assert torch.equal(out[f"{name}_scale_inv"], scale), name
            back = (
                out[name].float()
                * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[
                    : tensor.shape[0], : tensor.shape[1]
                ]
            )
            largest = tensor.float().abs().max()
            assert (
                back - tensor.float()
            ).abs().max() <= largest / 16  # half a unit of three bits of mantissa
        else:
            assert torch.equal(out[name], tensor), name
    assert {name for name in out if name.endswith("_scale_inv")} == {
        f"{name}_scale_inv" for name in hf if "_proj" in name
    }


def test_shards_that_cut_a_block_are_refused() -> None:
    shapes = hf_shapes(CONFIG)
    with pytest.raises(
        ConfigError,
        match=r"rollout.weights_dtype: .*gate_up_proj.weight .* 0 to 192 of 384 of .*gate_proj.weight",
    ):
        fp8_block([], [(0, sglang_shards(CONFIG, 2, 0))], shapes)
    padded = {**CONFIG, "intermediate_size": 128 * 3 - 1}
    with pytest.raises(ConfigError, match=r"the engine pads .*gate_up_proj"):
        fp8_block([], [(0, sglang_shards(padded, 1, 0, cpu=True))], hf_shapes(padded))


def test_scales_of_experts_are_rows_of_a_parameter_of_their_own() -> None:
    """SGLang's names (Fp8MoEMethod.create_weights): `w13_weight_scale_inv` [experts, 2 * blocks of ffn,
    blocks of hidden] beside `w13_weight` [experts, ...]."""
    experts = described("qwen3_moe", 2, 256, 2, 2, 512, 307, head_dim=128)
    experts |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    shards, formats = sglang_shards(experts, 2, 1), {}
    _, [(_, found)], formats = fp8_block([], [(1, shards)], hf_shapes(experts))
    layer = "model.layers.1.mlp.experts."
    shapes = {
        name.removeprefix(layer): shard.shape for name, shard in found.items() if name.startswith(layer)
    }
    assert shapes == {
        name: shape
        for e in range(3)
        for name, shape in {
            f"w13_weight.{e}": (256, 256),
            f"w13_weight_scale_inv.{e}": (2, 2),
            f"w2_weight.{e}": (256, 128),
            f"w2_weight_scale_inv.{e}": (2, 1),
        }.items()
    }
    assert formats[f"{layer}w2_weight_scale_inv.2"] == "float32"
    assert formats[f"{layer}w2_weight.2"] == "float8_e4m3fn"
    gate, up = found[f"{layer}w13_weight_scale_inv.0"].regions
    assert (gate.hf_name, up.hf_name) == tuple(
        f"{layer}0.{part}_proj.weight_scale_inv" for part in ("gate", "up")
    )
    assert (gate.local_box, up.local_box) == (((0, 1), (0, 2)), ((1, 2), (0, 2)))


def test_merged_weights_are_those_of_their_products() -> None:
    """With LoRA adapters a source is computed where it is taken: the same, in bf16 and quantised, as if it
    had been there. Of numbers whose sums are exact, so that their order does not matter."""
    lora = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "o_proj", "up_proj"))
    generator = torch.Generator().manual_seed(1)

    def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        numbers = (torch.randint(-8, 9, shape, generator=generator) for shape in shapes.values())
        return dict(zip(shapes, (number.bfloat16() / 8 for number in numbers), strict=True))

    hf, halves = drawn(hf_shapes(CONFIG)), drawn(hf_shapes(CONFIG, lora=lora))
    whole = dict(hf)
    for name in halves:
        if name.endswith("lora_A.weight"):
            stem = name.removesuffix("lora_A.weight")
            product = halves[f"{stem}lora_B.weight"].double() @ halves[name].double()
            whole[f"{stem}weight"] = (hf[f"{stem}weight"].double() + 2.0 * product).bfloat16()
    assert sum(not torch.equal(hf[name], whole[name]) for name in hf) == 2 * 3

    def moved(plan: Plan, sources: Mapping[str, Source]) -> dict[str, Tensor]:
        dtypes = {name: FORMAT_DTYPES[kind] for name, kind in plan.formats.items()}
        shapes = {name: shard.shape for name, shard in plan.targets[0].items()}
        out = {n: torch.zeros(shape, dtype=dtypes.get(n, torch.bfloat16)) for n, shape in shapes.items()}
        transfer = Transfer(plan, 0, sources, out, 1, dtype=torch.bfloat16)
        transfer.run()
        transfer.check()
        return out

    def sources_of(layout: Layout, rank: int) -> tuple[Shards, Mapping[str, Source]]:
        own, beside = (megatron_layout(CONFIG, layout, lora=one)[rank][1] for one in (None, lora))
        return own, merged(sliced(own, hf) | sliced(beside, halves), CONFIG, layout, rank, lora)

    for rank in range(2):
        own, sources = sources_of(Layout(tp=2), rank)
        found = moved(make_plan([(0, own)], [(0, own)]), sources)
        assert all(torch.equal(found[name], tensor) for name, tensor in sliced(own, whole).items())
    own, sources = sources_of(Layout(), 0)
    quantising = fp8_block([(0, own)], [(0, hf_shards(CONFIG))], hf_shapes(CONFIG))
    plan = make_plan(*quantising[:2], formats=quantising[2])
    found, expected = moved(plan, sources), moved(plan, sliced(own, whole))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), expected[name].float()), name
