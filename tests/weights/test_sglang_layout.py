"""SGLang's fused shards against whole tensors cut and joined head by head, from random actor layouts, experts
and copied heads included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from megarl.config.errors import ConfigError
from megarl.config.schema import Config
from megarl.parallel.layout import Layout
from megarl.sync.plan import engine_plan, make_plan
from megarl.weights.shards import megatron_layout, sglang_shards
from tests.weights.folders import PREFIX, described, execute, hf_configs, numbered, sliced

EXPERTS = {"moe_intermediate_size": 4, "num_experts": 4, "num_experts_per_tok": 2}
MOE = described("qwen3_moe", 2, 8, 4, 2, 8, 11, head_dim=3, tie_word_embeddings=False, **EXPERTS)
UNEVEN = {**MOE, "model_type": "glm4_moe", "first_k_dense_replace": 1, "n_shared_experts": 1}


def expected(
    config: dict[str, Any], hf: dict[str, Tensor], tp: int, rank: int, cpu: bool
) -> dict[str, Tensor]:
    """One rank's tensors, by torch's cat, pad and chunk; heads one by one."""
    heads, kv_heads = (
        config["num_attention_heads"],
        config.get("num_key_value_heads", config["num_attention_heads"]),
    )
    dim = config.get("head_dim") or config["hidden_size"] // heads
    group = heads // kv_heads
    if cpu and (heads % tp or kv_heads % tp):
        kv_heads = -(-kv_heads // tp) * tp
        heads = kv_heads * group
    mine = range(rank * heads // tp, (rank + 1) * heads // tp)
    kv_mine = sorted({head // group for head in mine})  # a key/value head is where its queries are

    def take(tensor: Tensor, wanted: Any, axis: int = 0) -> Tensor:
        # zeros for heads that do not exist
        whole = pad(tensor.movedim(axis, -1), (0, (max(wanted) + 1) * dim))
        return torch.cat([whole[..., head * dim : (head + 1) * dim] for head in wanted], -1).movedim(-1, axis)

    def chunk(tensor: Tensor, axis: int, multiple: int) -> Tensor:
        size = tensor.shape[axis]
        padded = -(-size // multiple) * multiple
        whole = pad(tensor.movedim(axis, -1), (0, padded - size)).movedim(-1, axis)
        return whole.chunk(tp, axis)[rank]

    multiple = 32 * tp if cpu else tp
    out = {}
    for name, tensor in hf.items():
        if "q_proj" in name:
            k, v = (hf[name.replace("q_proj", part)] for part in ("k_proj", "v_proj"))
            out[name.replace("q_proj", "qkv_proj")] = torch.cat(
                [take(tensor, mine), take(k, kv_mine), take(v, kv_mine)]
            )
        elif "o_proj" in name:
            out[name] = take(tensor, mine, 1)
        elif "gate_up_proj" in name:
            out[name] = torch.cat([chunk(part, 0, multiple) for part in tensor.chunk(2)])
        elif "gate_proj" in name:
            fused = torch.cat(
                [chunk(part, 0, multiple) for part in (tensor, hf[name.replace("gate_proj", "up_proj")])]
            )
            expert = name.partition(".experts.")[2].partition(".")[0]
            moe = name.partition(".experts.")[0] + f".experts.w13_weight.{expert}"
            out[moe if expert else name.replace("gate_proj", "gate_up_proj")] = fused
        elif "down_proj" in name:
            expert = name.partition(".experts.")[2].partition(".")[0]
            moe = name.partition(".experts.")[0] + f".experts.w2_weight.{expert}"
            out[moe if expert else name] = chunk(tensor, 1, multiple)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = -(-tensor.shape[0] // 64) * 64
            out[name] = chunk(tensor, 0, 64 if rows % tp == 0 else 64 * tp)
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            out[name] = tensor
    return out


def check(config: dict[str, Any], layout: Layout, tp: int, engines: int, cpu: bool, node: int) -> None:
    hf = numbered(config)
    sources = megatron_layout(config, layout)
    shards = [sglang_shards(config, tp, rank, cpu=cpu) for rank in range(tp)]
    plan = make_plan(sources, [(rank, shards[rank % tp]) for rank in range(engines * tp)], gpus_per_node=node)
    plan.verify()
    held = {rank: sliced(shards, hf) for rank, shards in sources}
    for rank, tensors in execute(plan, held).items():
        wanted = expected(config, hf, tp, rank % tp, cpu)
        assert tensors.keys() == wanted.keys()
        for name, tensor in wanted.items():
            padding = torch.zeros(tensor.shape, dtype=torch.bool)
            for box in plan.targets[rank][name].padding:
                padding[tuple(slice(*ends) for ends in box)] = True
            assert torch.equal(tensors[name].isnan(), padding), name  # the transfer zeroes it
            assert torch.equal(tensors[name].nan_to_num(0.0), tensor), name


@pytest.mark.shows("SGLang's names", family=list(PREFIX))
@settings(max_examples=30, deadline=None)
@given(
    hf_configs(),
    st.sampled_from((1, 2, 4, 8)),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from((1, 2, 4, 8)),
)
def test_shards_are_those_of_whole_tensors(drawn: Any, tp: int, engines: int, cpu: bool, node: int) -> None:
    config, (layout, _) = drawn
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if not cpu:
        assume(
            heads % tp == 0
            and max(kv_heads, tp) % min(kv_heads, tp) == 0
            and config["intermediate_size"] % tp == 0
        )
    check(config, layout, tp, engines, cpu, node)


@pytest.mark.shows("SGLang's names", family="qwen3_moe")
@pytest.mark.parametrize(
    "layout", [Layout(ep=1), Layout(dp=4, ep=4), Layout(tp=2, dp=2, ep=2), Layout(tp=2, pp=2, dp=2, ep=4)]
)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_experts(layout: Layout, tp: int) -> None:
    check(MOE, layout, tp, 2, False, 2)


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize(("layout", "tp"), [(Layout(tp=2, dp=2, ep=4), 1), (Layout(dp=2, ep=2), 4)])
def test_dense_layers_before_mixtures(layout: Layout, tp: int, cpu: bool) -> None:
    check(UNEVEN, layout, tp, 2, cpu, 2)


@pytest.mark.shows("SGLang's names", family="glm4_moe")
def test_glm_parameters_are_those_of_sglangs_model() -> None:
    """By hand from its source (srt/models/glm4_moe.py, 0.5.23), on the second of two ranks: names and shapes,
    and what it has in float32 (Glm4MoeGate)."""
    parts = {
        "0.mlp.gate_up_proj.weight": (8, 8),
        "0.mlp.down_proj.weight": (8, 4),
        "1.mlp.gate.weight": (4, 8),
        "1.mlp.gate.e_score_correction_bias": (4,),
        **{f"1.mlp.experts.w13_weight.{expert}": (4, 8) for expert in range(4)},
        **{f"1.mlp.experts.w2_weight.{expert}": (8, 2) for expert in range(4)},
        "1.mlp.shared_experts.gate_up_proj.weight": (4, 8),
        "1.mlp.shared_experts.down_proj.weight": (8, 2),
    }
    for layer in (0, 1):
        of_all = {
            "input_layernorm.weight": (8,),
            "post_attention_layernorm.weight": (8,),
            "self_attn.qkv_proj.weight": (12, 8),
            "self_attn.qkv_proj.bias": (12,),
            "self_attn.o_proj.weight": (8, 6),
            "self_attn.q_norm.weight": (3,),
            "self_attn.k_norm.weight": (3,),
        }
        parts |= {f"{layer}.{name}": shape for name, shape in of_all.items()}
    wanted = {f"model.layers.{name}": shape for name, shape in parts.items()}
    wanted |= {"model.norm.weight": (8,), "model.embed_tokens.weight": (32, 8), "lm_head.weight": (32, 8)}
    assert {name: shard.shape for name, shard in sglang_shards(UNEVEN, 2, 1).items()} == wanted
    tied = sglang_shards({**UNEVEN, "tie_word_embeddings": True}, 2, 1)
    assert {name: shard.shape for name, shard in tied.items()} == wanted, "it ties nothing"
    assert tied["lm_head.weight"] == tied["model.embed_tokens.weight"]
    for engine, single in (
        ("sglang", ("weight", "e_score_correction_bias")),
        ("transformers", ("e_score_correction_bias",)),
    ):
        config = Config(
            recipe="dapo", run_dir="run", steps=1, model={"path": "model"}, rollout={"engine": engine}
        )
        plan = engine_plan(config, UNEVEN, Layout())
        plan.verify()
        assert plan.formats == {f"model.layers.1.mlp.gate.{name}": "float32" for name in single}


@pytest.mark.shows("SGLang's names", family="deepseek_v3")
@pytest.mark.parametrize("q_rank", [None, 6])
def test_deepseek_parameters_are_those_of_sglangs_model(q_rank: int | None) -> None:
    """By hand from its source (srt/models/deepseek_v2.py, 0.5.23), on the second of two ranks: names and
    shapes of attention, what stands where, and what it has in float32 (MoEGate)."""
    config = {**UNEVEN, "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": q_rank}
    config |= {"kv_lora_rank": 10, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}
    of_queries = {"q_proj": (10, 8), "kv_a_proj_with_mqa": (12, 8)}
    if q_rank:
        of_queries = {"fused_qkv_a_proj_with_mqa": (18, 8), "q_a_layernorm": (6,), "q_b_proj": (10, 6)}
    parts = {**of_queries, "kv_a_layernorm": (10,), "kv_b_proj": (14, 10), "o_proj": (8, 8)}
    shards = sglang_shards(config, 2, 1)
    stem = "model.layers.1.self_attn."
    found = {name.removeprefix(stem): shard.shape for name, shard in shards.items() if stem in name}
    assert found == {f"{name}.weight": shape for name, shape in parts.items()}
    hf = numbered(config)
    expected = {"kv_b_proj.weight": hf[f"{stem}kv_b_proj.weight"].chunk(2)[1]}
    expected["o_proj.weight"] = hf[f"{stem}o_proj.weight"].chunk(2, 1)[1]
    if q_rank:
        latents = [hf[f"{stem}{part}.weight"] for part in ("q_a_proj", "kv_a_proj_with_mqa")]
        expected["fused_qkv_a_proj_with_mqa.weight"] = torch.cat(latents)
    for layout in (Layout(tp=2, dp=2, ep=4), Layout(dp=2, ep=2)):
        plan = make_plan(megatron_layout(config, layout), [(0, shards)])
        plan.verify()
        local = execute(plan, {rank: sliced(part, hf) for rank, part in plan.sources.items()})[0]
        for name, tensor in expected.items():
            assert torch.equal(local[stem + name], tensor), name
    settings: dict[str, Any] = {"recipe": "dapo", "run_dir": "run", "steps": 1, "model": {"path": "model"}}
    plan = engine_plan(Config(**settings, rollout={"engine": "sglang"}), config, Layout())
    assert plan.formats == {"model.layers.1.mlp.gate.e_score_correction_bias": "float32"}
    quantised = Config(**settings, rollout={"engine": "sglang", "weights_dtype": "fp8_block"})
    with pytest.raises(
        ConfigError, match="weights_dtype: fp8_block is not supported for a deepseek_v3 model"
    ):
        engine_plan(quantised, config, Layout())


def test_heads_that_are_copied() -> None:
    """Two key/value heads on eight ranks: ranks 0 to 3 have the first, 4 to 7 the second."""
    config = {**MOE, "model_type": "llama", "num_attention_heads": 8}
    rows = []
    for rank in range(8):
        shard = sglang_shards(config, 8, rank)["model.layers.0.self_attn.qkv_proj.weight"]
        assert shard.shape == (3 * 3, 8)
        rows.append([region.hf_box[0] for region in shard.regions])
    assert [row[0] for row in rows] == [(3 * rank, 3 * rank + 3) for rank in range(8)]
    assert [row[1] for row in rows] == [row[2] for row in rows] == [(0, 3)] * 4 + [(3, 6)] * 4


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"num_attention_heads": 6}, 4, "does not divide the model's 6 attention heads"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            4,
            "neither a divisor nor a multiple of the model's 6 key/value heads",
        ),
        ({"intermediate_size": 6}, 4, "does not divide the model's 6 feed-forward columns"),
    ],
)
def test_what_cannot_be_divided(changes: dict[str, int], tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout.engine_tp: {tp}.*{message}"):
        sglang_shards({**MOE, "model_type": "llama", **changes}, tp, 0)


LINEAR: dict[str, Any] = {
    "head_dim": 6,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 2,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
QWEN3_5 = described("qwen3_5_text", 2, 8, 4, 2, 8, 11, tie_word_embeddings=False, **LINEAR)
WITH_EXPERTS = {**QWEN3_5, **EXPERTS, "shared_expert_intermediate_size": 6}


PARTS, FUSED = ("gate", "up", "down"), ("qkvz", "ba")


def of_sglangs_rank(hf: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Qwen3.5's tensors of one of two ranks by hand, from SGLang's source (srt/models/qwen3_5.py and, of
    experts, qwen2_moe.py, 0.5.23): its MergedColumnParallelLinear cuts each part by itself, and a query's
    gate is a head behind it. Qwen3-Next's fused projections, which are by key head, are cut as they are
    (qwen3_next.py, _make_packed_weight_loader)."""

    def half(tensor: Tensor, axis: int = 0) -> Tensor:
        return tensor.chunk(2, axis)[rank]

    out = {"model.norm.weight": hf["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        out[name] = half(pad(hf[name], (0, 0, 0, 64 - 11)))
    for layer in (0, 1):
        place = f"model.layers.{layer}."
        own = {name.removeprefix(place): tensor for name, tensor in hf.items() if name.startswith(place)}
        made = {name: own[name] for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
        mixture = "mlp.gate.weight" in own
        mlp = "mlp.shared_expert" if mixture else "mlp"
        gate_up = [half(own[f"{mlp}.{part}_proj.weight"]) for part in ("gate", "up")]
        made |= {f"{mlp}.gate_up_proj.weight": torch.cat(gate_up)}
        made |= {f"{mlp}.down_proj.weight": half(own[f"{mlp}.down_proj.weight"], 1)}
        for expert in range(4 if mixture else 0):
            parts = {p: half(own[f"mlp.experts.{expert}.{p}_proj.weight"], int(p == "down")) for p in PARTS}
            made[f"mlp.experts.w13_weight.{expert}"] = torch.cat([parts["gate"], parts["up"]])
            made[f"mlp.experts.w2_weight.{expert}"] = parts["down"]
        if mixture:
            made |= {name: own[name] for name in ("mlp.gate.weight", "mlp.shared_expert_gate.weight")}
        if layer == 0:
            linear = {name.removeprefix("linear_attn."): tensor for name, tensor in own.items()}
            if "in_proj_qkvz.weight" in linear:
                projections = {f"in_proj_{part}.weight": linear[f"in_proj_{part}.weight"] for part in FUSED}
                projections = {name: half(tensor) for name, tensor in projections.items()}
            else:
                mixed = [half(part) for part in linear["in_proj_qkv.weight"].split([12, 12, 16])]
                beta_alpha = [half(linear[f"in_proj_{part}.weight"]) for part in "ba"]
                projections = {
                    "in_proj_qkvz.weight": torch.cat([*mixed, half(linear["in_proj_z.weight"])]),
                    "in_proj_ba.weight": torch.cat(beta_alpha),
                }
            channels = [half(part) for part in linear["conv1d.weight"].split([12, 12, 16])]
            of_linear = {
                **projections,
                "conv1d.weight": torch.cat(channels),
                "A_log": half(linear["A_log"]),
                "dt_bias": half(linear["dt_bias"]),
                "norm.weight": linear["norm.weight"],
                "out_proj.weight": half(linear["out_proj.weight"], 1),
            }
            made |= {f"linear_attn.{name}": tensor for name, tensor in of_linear.items()}
        else:
            qkv = [half(own[f"self_attn.{part}_proj.weight"]) for part in "qkv"]
            made |= {
                "qkv_proj.weight": torch.cat(qkv),
                "o_proj.weight": half(own["self_attn.o_proj.weight"], 1),
            }
            made |= {f"{part}_norm.weight": own[f"self_attn.{part}_norm.weight"] for part in "qk"}
        out |= {place + name: tensor for name, tensor in made.items()}
    return out


@pytest.mark.shows("SGLang's names")
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2), Layout(tp=2, dp=2)], ids=str)
def test_layers_of_linear_attention(layout: Layout, family: str) -> None:
    model = QWEN3_5 if family == "qwen3_5_text" else {**WITH_EXPERTS, "model_type": family}
    layout = layout if model is QWEN3_5 else replace(layout, ep=layout.dp * layout.tp)
    hf = numbered(model)
    plan = make_plan(
        megatron_layout(model, layout), [(rank, sglang_shards(model, 2, rank)) for rank in range(2)]
    )
    plan.verify()
    written = execute(plan, {rank: sliced(shards, hf) for rank, shards in plan.sources.items()})
    for rank in range(2):
        wanted = of_sglangs_rank(hf, rank)
        assert written[rank].keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(written[rank][name].nan_to_num(0.0), tensor), name
    config = Config(
        recipe="dapo", run_dir="run", steps=1, model={"path": "model"}, rollout={"engine": "sglang"}
    )
    formats = engine_plan(config, model, Layout()).formats
    assert formats == {"model.layers.0.linear_attn.A_log": "float32"}


def test_a_shared_expert_of_its_own_width_is_padded_by_itself_on_a_cpu() -> None:
    """To 32 for each of two ranks, of which the first has all of its 20 columns."""
    model = {**WITH_EXPERTS, "model_type": "qwen3_next", "shared_expert_intermediate_size": 20}
    down = "model.layers.0.mlp.shared_expert.down_proj.weight"
    for rank, columns in enumerate([(0, 20), (20, 20)]):
        shard = sglang_shards(model, 2, rank, cpu=True)[down]
        assert shard.shape[1] == 32
        assert [region.hf_box[1] for region in shard.regions] == [c for c in [columns] if c[0] < c[1]]
