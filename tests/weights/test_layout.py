"""The tables and layouts: against real Megatron and transformers models, and against plain loops."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.errors import CheckpointError, ConfigError
from megarl.config.schema import OptimizerConfig
from megarl.parallel.layout import Layout, padded_vocab
from megarl.weights.families import Pair, Sizes, get_family, get_table_name, is_frozen, rename_to_table
from megarl.weights.hf import HFFolder
from megarl.weights.shards import check_layout, hf_shapes, megatron_layout, parameters, whole_model
from tests.families import ROWS
from tests.ranks import in_a_fork
from tests.tiny_models import EXPERT_BIAS, HYBRID, make_tiny_model
from tests.weights.folders import PREFIX, described, hf_configs, loaded, numbered, write_folder

CONFIG = described("qwen2", 6, 32, 8, 4, 24, 31, architectures=["Qwen2ForCausalLM"])


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
def test_ranks_are_numbered_as_megatron_does(tp: int, pp: int, dp: int, cp: int) -> None:
    layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp)
    order = [(t, c, d, p) for p in range(pp) for d in range(dp) for c in range(cp) for t in range(tp)]
    assert [tuple(layout.coords(rank)) for rank in range(layout.world)] == order
    assert [layout.rank(tp=t, cp=c, dp=d, pp=p) for t, c, d, p in order] == list(range(layout.world))
    with pytest.raises(IndexError):
        layout.coords(layout.world)
    with pytest.raises(IndexError):
        layout.rank(tp=tp, pp=0, dp=0)


@pytest.mark.parametrize("family", PREFIX)
@pytest.mark.parametrize("tied", [False, True])
def test_tables_have_the_tensors_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    for kind, critic in ((None, False), ("token", True), ("sequence", True)):
        folder = HFFolder(
            make_tiny_model(tmp_path / str(kind), family, tied=tied, classification=kind), critic=critic
        )
        assert folder.missing == ()
        assert folder.extra == (("score.bias",) if kind == "token" else ())


def built_by_megatron(cases: list[dict[str, Any]]) -> list[Any]:
    """Build one rank's model of each case under torch's fake process group.

    Returns its place, its parameters' names and shapes.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megarl.parallel import cpu_platform

    cpu_platform.install()
    found = []
    for case in cases:
        tp, pp, cp, rank, c = case["tp"], case["pp"], case["cp"], case["rank"], case["config"]
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp * pp * cp * case["dp"])
        ps.initialize_model_parallel(tp, pp, context_parallel_size=cp, create_gloo_process_groups=False)
        places = [
            ps.get_tensor_model_parallel_rank(),
            ps.get_context_parallel_rank(),
            ps.get_data_parallel_rank(),
            ps.get_pipeline_model_parallel_rank(),
        ]
        config = TransformerConfig(
            num_layers=c["num_hidden_layers"],
            hidden_size=c["hidden_size"],
            num_attention_heads=c["num_attention_heads"],
            num_query_groups=c["num_key_value_heads"],
            kv_channels=c["head_dim"],
            ffn_hidden_size=c["intermediate_size"],
            use_cpu_initialization=True,
            perform_initialization=False,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            add_qkv_bias=c["model_type"] == "qwen2",
            qk_layernorm=c["model_type"] == "qwen3",
            params_dtype=torch.float32,
            pipeline_dtype=torch.float32,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=c["model_type"] == "qwen3"),
            vocab_size=case["vocab"],
            max_sequence_length=64,
            pre_process=ps.is_pipeline_first_stage(),
            post_process=ps.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=c["tie_word_embeddings"],
        )
        found.append([places, {name: list(p.shape) for name, p in model.named_parameters()}])
        ps.destroy_model_parallel()
        dist.destroy_process_group()
    return found


def test_names_and_shapes_are_those_of_megatron() -> None:
    cases: list[dict[str, Any]] = []
    for family, tied in (("qwen2", False), ("qwen3", True), ("llama", True)):
        kind = {"model_type": family, "architectures": [PREFIX[family] + "ForCausalLM"]}
        config = {**CONFIG, **kind, "tie_word_embeddings": tied, "head_dim": 6}
        twelve = Layout(tp=2, pp=3, dp=2)
        places = (
            (Layout(), 0),
            (twelve, 2),
            (twelve, 5),
            (Layout(tp=4, pp=2), 7),
            (Layout(2, 2, 2, cp=2), 11),
        )
        for layout, rank in places:
            vocab = padded_vocab(config["vocab_size"], layout.tp)
            cases.append({**asdict(layout), "rank": rank, "config": config, "vocab": vocab})
    for case, (places, shapes) in zip(cases, in_a_fork(built_by_megatron, cases), strict=True):
        layout = Layout(tp=case["tp"], pp=case["pp"], dp=case["dp"], cp=case["cp"])
        assert tuple(places) == tuple(layout.coords(case["rank"]))
        shards = dict(megatron_layout(case["config"], layout))[case["rank"]]
        assert {name: list(shard.shape) for name, shard in shards.items()} == shapes


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(hf_configs())
def test_shards_equal_explicit_loops(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[dict[str, Any], list[Layout]]
) -> None:
    config, (layout, _) = drawn
    hf = numbered(config)
    folder = HFFolder(write_folder(tmp_path_factory.mktemp("hf"), config, hf))
    sizes = Sizes.from_config(config)
    d, queries = sizes.head_dim, sizes.heads // sizes.kv_heads
    for rank, local in loaded(megatron_layout(config, layout), folder).items():
        place = layout.coords(rank)
        per_stage = sizes.layers // layout.pp
        for layer in range(per_stage):
            mine, theirs = f"decoder.layers.{layer}.", f"model.layers.{place.pp * per_stage + layer}."
            biased = f"{theirs}self_attn.q_proj.bias" in hf
            for kind in ("weight", "bias") if biased else ("weight",):
                q, k, v = (hf[theirs + f"self_attn.{which}_proj.{kind}"] for which in "qkv")
                rows = []
                for group in range(sizes.kv_heads):
                    if group // (sizes.kv_heads // layout.tp) == place.tp:
                        for head in range(group * queries, (group + 1) * queries):
                            rows += [q[head * d + i] for i in range(d)]
                        rows += [k[group * d + i] for i in range(d)]
                        rows += [v[group * d + i] for i in range(d)]
                assert torch.equal(local[mine + f"self_attention.linear_qkv.{kind}"], torch.stack(rows))
            if f"{theirs}mlp.gate_up_proj.weight" in hf:
                gate, up = hf[f"{theirs}mlp.gate_up_proj.weight"].chunk(2)
            else:
                gate, up = (hf[f"{theirs}mlp.{which}_proj.weight"] for which in ("gate", "up"))
            of_rank = [half.chunk(layout.tp)[place.tp] for half in (gate, up)]
            assert torch.equal(local[mine + "mlp.linear_fc1.weight"], torch.cat(of_rank))
            for ours, name in (
                ("mlp.linear_fc2", "mlp.down_proj"),
                ("self_attention.linear_proj", "self_attn.o_proj"),
            ):
                assert torch.equal(
                    local[mine + ours + ".weight"],
                    hf[theirs + name + ".weight"].chunk(layout.tp, 1)[place.tp],
                )
            assert torch.equal(
                local[mine + "pre_mlp_layernorm.weight"], hf[theirs + "post_attention_layernorm.weight"]
            )
        table = {"embedding.word_embeddings.weight": "model.embed_tokens.weight"}
        table["output_layer.weight"] = (
            "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
        )
        for ours in table.keys() & local.keys():
            padded = torch.zeros(-(-sizes.vocab // layout.tp) * layout.tp, sizes.hidden)
            padded[: sizes.vocab] = hf[table[ours]]
            assert torch.equal(local[ours], padded.chunk(layout.tp)[place.tp])


def test_critic_has_a_value_head_on_the_last_stage_and_no_output_layer() -> None:
    for tied in (False, True):
        config = {**CONFIG, "tie_word_embeddings": tied}
        ranks = dict(megatron_layout(config, Layout(tp=2, pp=2), critic=True))
        first, last = ranks[1], ranks[3]
        assert last["value_head.weight"].shape == (1, 32)
        assert not {"value_head.weight", "output_layer.weight"} & first.keys()
        assert "output_layer.weight" not in last
        assert "lm_head.weight" not in hf_shapes(config, critic=True)


def test_stages_take_the_layers_in_order() -> None:
    for rank, shards in megatron_layout(CONFIG, Layout(pp=3)):
        norms = [
            shards[f"decoder.layers.{local}.input_layernorm.weight"].regions[0].hf_name for local in (0, 1)
        ]
        assert norms == [f"model.layers.{layer}.input_layernorm.weight" for layer in (2 * rank, 2 * rank + 1)]
        assert "decoder.layers.2.input_layernorm.weight" not in shards


def offsets_of_megatron(pp: int, vpp: int, layers: int) -> list[list[int]]:
    """The first layer of each chunk of each stage."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_dtype=torch.float32,
    )
    return [[get_transformer_layer_offset(config, chunk, rank) for chunk in range(vpp)] for rank in range(pp)]


@pytest.mark.parametrize(("pp", "vpp", "size"), [(2, 2, 1), (2, 3, 2), (4, 2, 3)])
def test_virtual_stages_take_the_layers_that_megatron_gives_them(pp: int, vpp: int, size: int) -> None:
    """And a stage's names number them through, in that order."""
    layout, config = Layout(pp=pp, vpp=vpp), {**CONFIG, "num_hidden_layers": pp * vpp * size}
    for stage, firsts in enumerate(in_a_fork(offsets_of_megatron, pp, vpp, pp * vpp * size)):
        expected = [first + i for first in firsts for i in range(size)]
        assert layout.layers(pp * vpp * size, stage) == expected
        for name, pair, layer, _ in parameters(config, layout, stage, 0):
            if "{l}" in pair.megatron:
                assert f".layers.{expected.index(layer)}." in name


@pytest.mark.parametrize(("vpp", "possible"), [(2, "1, 3"), (4, "1, 3")])
def test_virtual_stages_that_do_not_divide_a_stage_are_refused(vpp: int, possible: str) -> None:
    problem = f"parallel.vpp: {vpp} does not divide the model's 3 layers of a pipeline stage"
    with pytest.raises(ConfigError, match=re.escape(f"{problem} (possible: {possible})")):
        check_layout(CONFIG, 1, 2, 1, vpp)


def test_transformer_engine_names_are_the_tables_names() -> None:
    qkv_norm = "module.module.decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"
    names = {
        qkv_norm: "decoder.layers.3.input_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": "decoder.layers.0.pre_mlp_layernorm.weight",
        "module.decoder.layers.0.mlp.linear_fc1.weight": "decoder.layers.0.mlp.linear_fc1.weight",
        "output_layer.weight": "output_layer.weight",
    }
    assert {name: get_table_name(name) for name in names} == names
    assert rename_to_table({name: index for index, name in enumerate(names)}) == {
        ours: index for index, ours in enumerate(names.values())
    }


@pytest.mark.parametrize(
    ("sizes", "tp", "pp", "message"),
    [
        ({}, 8, 1, "parallel.tp: 8 does not divide the model's 4 key/value heads (possible: 1, 2, 4)"),
        (
            {"num_attention_heads": 12},
            8,
            1,
            "parallel.tp: 8 does not divide the model's 12 attention heads (possible: 1, 2, 4)",
        ),
        (
            {"intermediate_size": 22},
            4,
            1,
            "parallel.tp: 4 does not divide the model's 22 feed-forward columns (possible: 1, 2)",
        ),
        ({}, 2, 4, "parallel.pp: 4 does not divide the model's 6 layers (possible: 1, 2, 3, 6)"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(sizes: dict[str, int], tp: int, pp: int, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_layout({**CONFIG, **sizes}, tp, pp)
    assert str(refused.value) == message


NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
LINEAR = [f"{name}.weight" for name in ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")]
LINEAR += ["A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight"]
LINEAR = [f"linear_attn.{name}" for name in LINEAR]
FUSED = ["linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight", *LINEAR[4:]]
BIASES = [f"self_attn.{part}_proj.bias" for part in "qkv"]
OF_LATENTS = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
LATENT = [f"self_attn.{part}.weight" for part in OF_LATENTS]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2", BIASES),
        ("qwen3", NORMS),
        ("qwen3_moe", NORMS),
        ("llama", []),
        ("mistral", []),
        ("glm4", [*BIASES, "post_self_attn_layernorm.weight"]),
        ("glm4_moe", [*NORMS, *BIASES]),
        ("deepseek_v3", LATENT),
        ("qwen3_5_text", [*NORMS, *LINEAR]),
        ("qwen3_5_moe_text", [*NORMS, *LINEAR]),
        ("qwen3_next", [*NORMS, *FUSED]),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_frozen_in_each_family(family: str, more: list[str], tied: bool) -> None:
    """Every other tensor learns, but for a router's bias."""
    row = ROWS[family]
    config = row.config(num_hidden_layers=3, tie_word_embeddings=tied, **row.switches).to_dict()
    everything = {n for pair, la, e in whole_model(config) for n in hf_names(pair, la, e)}

    def frozen(**keys: Any) -> set[str]:
        optimizer = OptimizerConfig(**keys)
        return {
            name
            for pair, layer, expert in whole_model(config)
            if is_frozen(pair, layer, optimizer)
            for name in hf_names(pair, layer, expert)
        }

    parts = "o" if family == "deepseek_v3" else "qkvo"
    projections = [f"self_attn.{part}_proj.weight" for part in parts]
    attention = {
        f"model.layers.{layer}.{name}"
        for layer in range(3)
        for name in ["input_layernorm.weight", *projections, *more]
        if f"model.layers.{layer}.{name}" in everything or family not in HYBRID
    }
    biases = {name for name in everything if name.endswith(EXPERT_BIAS)}
    assert frozen() == biases and bool(biases) is (family in ("glm4_moe", "deepseek_v3"))
    attention |= biases
    assert frozen(frozen="attention") == attention
    assert frozen(frozen="embeddings") == {"model.embed_tokens.weight", *biases}
    lowest = {name for name in everything if name.startswith(("model.layers.0.", "model.layers.1."))}
    assert frozen(frozen_layers=2) == lowest | biases and len(lowest) > 12
    both = {"model.embed_tokens.weight", *attention, *lowest}
    assert frozen(frozen=["embeddings", "attention"], frozen_layers=2) == both
    assert ("lm_head.weight" in everything) is not tied


def hf_names(pair: Pair, layer: int, expert: int) -> list[str]:
    return [name.format(l=layer, e=expert) for name, _ in pair.hf]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model_type": "gpt2"}, "model_type: 'gpt2'"),
        ({"architectures": ["Qwen2AudioEncoder"]}, "architectures: 'Qwen2AudioEncoder'"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": True}, "mlp_bias: True"),
        ({"hidden_size": "32"}, "hidden_size: must be a positive integer (got '32')"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
    ],
)
def test_configs_that_no_table_describes_are_refused(change: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: ") as refused:
        get_family({**CONFIG, **change})
        Sizes.from_config({**CONFIG, **change})
    assert key in str(refused.value)
