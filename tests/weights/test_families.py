"""Families against transformers on the same weights, and one added as docs/families.md says.

Transformer Engine's layers beside portable ones: other names of parameters, derived from megatron-core's own
map between its two layer specs, one table, one checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import SeedOssConfig

from megarl.config.errors import CheckpointError, ConfigError
from megarl.config.schema import Config
from megarl.model.hf_config import check_buildable
from megarl.parallel.layout import Layout
from megarl.parallel.runtime import Runtime
from megarl.weights.families import FAMILIES, TE_ALIASES, Sizes, get_family, read_config, rename_to_table
from megarl.weights.megatron import conversion_layout, hf_to_megatron, megatron_to_hf
from megarl.weights.shards import check_layout, check_linear, megatron_layout
from tests.families import ROWS, Row
from tests.parallel import jobs
from tests.parallel.test_invariance import VOCAB, make_batch, relative_difference
from tests.parallel.test_parity import hf_logprobs, sequences
from tests.ranks import RankPool, in_a_fork
from tests.tiny_models import HYBRID, make_tiny_model
from tests.weights.folders import described, folder_tensors, same_bits

Ranks = Callable[..., RankPool]
LAYOUTS = [(1, 1, 1, 1), (2, 1, 1, 1), (2, 1, 1, 2), (1, 1, 2, 2), (1, 2, 1, 1)]


@pytest.mark.slow
def test_gradients_of_experts_do_not_depend_on_the_layout(ranks: Ranks, tmp_path: Path) -> None:
    """Ragged sequences of which a replica may have one micro-batch and another three: all of them must reach
    the experts."""
    folder = make_tiny_model(tmp_path / "model", "qwen3_moe", vocab=VOCAB, layers=2)
    arguments = {"folder": folder, "batch": make_batch(), "which": "actor"}
    options = {"clip_high": 0.28, "nll_weight": 0.1}
    expected = ranks(1, 1, 1).run(jobs.gradients, **arguments, options={**options, "budget": 10_000})[0]
    router = expected["gradients"]["model.layers.1.mlp.gate.weight"]
    assert router.isfinite().all() and router.norm() > 0
    for layout in LAYOUTS[1:]:
        found = ranks(*layout).run(jobs.gradients, **arguments, options={**options, "budget": 34})[0]
        assert relative_difference(found["gradients"], expected["gradients"]) <= 1e-5, layout
        exact = torch.cat([x.flatten() for x in found["gradients"].values()]).double().norm()
        assert found["norm"] == pytest.approx(float(exact), rel=1e-5), layout


def places_of_megatron(layouts: list[tuple[int, int, int, int]]) -> list[Any]:
    """Each rank's place among the experts, under a process group that only pretends."""
    import torch.distributed as dist
    from megatron.core import parallel_state as ps
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megarl.parallel import cpu_platform

    cpu_platform.install()
    found = []
    for tp, pp, dp, ep in layouts:
        for rank in range(tp * pp * dp):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp * pp * dp)
            ps.initialize_model_parallel(
                tp,
                pp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=1,
                create_gloo_process_groups=False,
            )
            found.append(
                [
                    ps.get_expert_model_parallel_rank(),
                    ps.get_tensor_model_parallel_rank(),
                    ps.get_pipeline_model_parallel_rank(),
                ]
            )
            ps.destroy_model_parallel()
            dist.destroy_process_group()
    return found


def test_experts_are_where_megatron_has_them() -> None:
    layouts = [(2, 2, 2, 4), (1, 2, 4, 2), (4, 1, 2, 2), (2, 1, 3, 3), (2, 1, 2, 1)]
    expected = []
    for tp, pp, dp, ep in layouts:
        layout = Layout(tp=tp, pp=pp, dp=dp, ep=ep)
        expected += [
            [layout.ep_rank(rank), layout.coords(rank).tp, layout.coords(rank).pp]
            for rank in range(layout.world)
        ]
    assert in_a_fork(places_of_megatron, layouts) == expected


EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 5, "num_experts": 6}
MOE = described("qwen3_moe", 2, 16, 4, 2, 7, 11, **EXPERTS)


def test_each_expert_is_whole_and_held_once_in_each_group() -> None:
    for layout in (Layout(tp=2, pp=2, dp=3, ep=3), Layout(tp=2, ep=2), Layout(dp=2, ep=2)):
        ranks = megatron_layout(MOE, layout)
        names = {"gate_proj": (5, 16), "up_proj": (5, 16), "down_proj": (16, 5)}
        held = [(rank, r) for rank, shards in ranks for shard in shards.values() for r in shard.regions]
        for layer in range(2):
            for expert in range(6):
                for name, (rows, columns) in names.items():
                    full = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                    holders = [
                        rank
                        for rank, region in held
                        if region.hf_name == full and region.hf_box == ((0, rows), (0, columns))
                    ]
                    assert len(holders) == layout.tp * layout.dp // layout.ep
                    assert {layout.ep_rank(rank) for rank in holders} == {expert // (6 // layout.ep)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_only_layers": [1]}, r"mlp_only_layers: \[1\] is not supported for qwen3_moe"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: 2 is not supported for qwen3_moe"),
        ({"num_experts": 0}, "num_experts: must be a positive integer"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size: must be a positive integer"),
    ],
)
def test_mixtures_that_the_table_does_not_describe(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        get_family({**MOE, **change})
        check_layout({**MOE, **change}, 1, 1)


def test_layouts_that_the_experts_do_not_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"parallel.ep: 4 does not divide the model's 6 experts \(possible: 1, 2, 3, 6\)"
    ):
        check_layout(MOE, 1, 1, 4)
    with pytest.raises(ConfigError, match=r"parallel.ep: 2, but a qwen2 model has no experts"):
        check_layout({**MOE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, 1, 1, 2)
    check_layout({**MOE, "mlp_only_layers": None, "intermediate_size": 7}, 2, 1, 6)
    with pytest.raises(ValueError, match="ep=4 must divide tp"):
        Layout(tp=2, ep=4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (4096, "sliding_window: 4096 is not supported for mistral (only None is)"),
        (..., "sliding_window: is missing, and transformers takes 4096, not null (add it)"),
    ],
)
def test_a_switch_that_is_left_out_is_read_as_transformers_reads_it(
    value: Any, message: str, tmp_path: Path
) -> None:
    """Mistral's first models have windows, and transformers takes a config.json that says nothing for one."""
    folder = make_tiny_model(tmp_path, "mistral", vocab=101)
    check_buildable(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("sliding_window") is None
    config |= {} if value is ... else {"sliding_window": value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        check_buildable(folder)
    assert str(refused.value) == f"{folder}/config.json: {message}"


YARN = {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16}
GLM: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 5}
GLM |= {"first_k_dense_replace": 1, "n_shared_experts": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_k_dense_replace": 2}, "first_k_dense_replace: must be an integer from 0 up to 1 (got 2)"),
        ({"n_shared_experts": 0}, "n_shared_experts: must be a positive integer (got 0)"),
        ({"norm_topk_prob": False}, "norm_topk_prob: False is not supported for glm4_moe (only True is)"),
        ({"n_group": 3}, "n_group: must divide the 8 experts (got 3)"),
        ({"n_group": 2, "topk_group": 3}, "topk_group: must be 1 to 2, the groups (got 3)"),
        (
            {"n_group": 4, "topk_group": 3},
            "topk_group: with 4 groups num_experts_per_tok must be 2 for each that is chosen, and a group "
            "have 2 experts (got 3 and 4)",
        ),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor: must be a number > 0 (got 0)"),
    ],
)
def test_glm_mixtures_that_cannot_be_built(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = described("glm4_moe", 2, 16, 4, 2, 7, 11, **{**GLM, **change})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        read_config(tmp_path)
    assert str(refused.value) == f"{tmp_path}/config.json: {message}"


LATENT: dict[str, Any] = {**GLM, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2}
LATENT |= {"v_head_dim": 4, "q_lora_rank": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_lora_rank": 0}, "q_lora_rank: must be a positive integer (got 0)"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim: must be even for rotary embeddings (got 3)"),
        (
            {"head_dim": 6},
            "head_dim: must be qk_rope_head_dim = 2, by which transformers rotates, or be left out (got 6)",
        ),
        ({"v_head_dim": 7}, "v_head_dim: must be at most 6, the width of a key (got 7)"),
        (
            {"num_key_value_heads": 2},
            "num_key_value_heads: must be num_attention_heads = 4, as each has keys of its own (got 2)",
        ),
        (
            {"rope_interleave": False},
            "rope_interleave: False is not supported for deepseek_v3 (only True is)",
        ),
        (
            {"topk_method": "greedy"},
            "topk_method: 'greedy' is not supported for deepseek_v3 (only 'noaux_tc' is)",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "quantization_config: a quantised folder ('fp8') is not read (convert its weights to bf16, and "
            "remove the key)",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": "one"}},
            "rope_scaling.mscale_all_dim: must be a number > 0 (got 'one')",
        ),
    ],
)
def test_latent_attention_that_cannot_be_built(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = described("deepseek_v3", 2, 16, 4, 4, 7, 11, **{**LATENT, **change})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        read_config(tmp_path)
    assert str(refused.value) == f"{tmp_path}/config.json: {message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q_lora_rank": ...},
            "q_lora_rank: must be a positive integer (got None)",
        ),
        (
            {"rope_scaling": {**YARN, "mscale": 0.7}},
            "rope_type: 'yarn' scales attention by 0.9191",
        ),
    ],
)
def test_latent_attention_as_transformers_reads_it(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, "deepseek_v3", vocab=101)
    check_buildable(folder)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in {**config, **change}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=re.escape(f"{folder}/config.json: {message}")):
        check_buildable(folder)


def test_each_stage_has_a_mixture() -> None:
    config = described("glm4_moe", 4, 16, 4, 2, 8, 11, **{**GLM, "moe_intermediate_size": 6})
    check_layout(config, 2, 2, 4)
    check_layout({**config, "first_k_dense_replace": 2}, 2, 2, vpp=2)
    problem = (
        "parallel.pp: 2 gives the first stage none of the mixtures that follow 2 dense layers (lower it)"
    )
    with pytest.raises(ConfigError, match=re.escape(problem)):
        check_layout({**config, "first_k_dense_replace": 2}, 2, 2)
    with pytest.raises(
        ConfigError, match=r"parallel.tp: 4 does not divide the model's 6 columns of shared exp"
    ):
        check_layout({**config, "num_key_value_heads": 4}, 4, 1)


def test_a_glm_switch_that_is_left_out(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "glm4_moe", vocab=101)
    check_buildable(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["use_qk_norm"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        check_buildable(folder)
    problem = "is missing, and transformers takes false, not true (add it)"
    assert str(refused.value) == f"{folder}/config.json: use_qk_norm: {problem}"


@pytest.mark.parametrize("share", [0.3, 0.9, 2.0, 0, -0.5, "half"])
@pytest.mark.parametrize("place", ["", "rope_parameters."])
def test_shares_of_a_head_that_cannot_be_rotated(share: Any, place: str, tmp_path: Path) -> None:
    config: dict[str, Any] = described("glm4", 2, 32, 4, 2, 8, 11, head_dim=8)
    (config.setdefault("rope_parameters", {}) if place else config)["partial_rotary_factor"] = share
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        read_config(tmp_path)
    problem = f"must leave an even number of a head's 8 to be rotated (got {share!r})"
    assert str(refused.value) == f"{tmp_path}/config.json: {place}partial_rotary_factor: {problem}"


def with_table(runtime: Runtime, table: str, **arguments: Any) -> Any:
    """Adds a family on a rank, and gives the log-probabilities of a model of it."""
    family = run_block(table)
    FAMILIES[family.model_type] = family
    return jobs.logprobs(runtime, **arguments)


def run_block(table: str) -> Any:
    names: dict[str, Any] = {}
    exec(table, names)
    return names["SEED_OSS"]


def test_a_family_is_added_as_the_docs_say(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    [table] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.setitem(ROWS, "seed_oss", Row(SeedOssConfig))
    folder = make_tiny_model(tmp_path / "model", "seed_oss", vocab=101, head_dim=12)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="'seed_oss' is not a known family"):
        hf_to_megatron(folder, tmp_path / "checkpoint", Layout())
    monkeypatch.setitem(FAMILIES, "seed_oss", run_block(table))
    hf_to_megatron(folder, tmp_path / "checkpoint", conversion_layout(2, 2, 1))
    megatron_to_hf(tmp_path / "checkpoint", tmp_path / "back")
    assert same_bits(folder_tensors(folder), folder_tensors(tmp_path / "back"))
    prompts, responses = sequences(101)
    expected, _ = hf_logprobs(folder, prompts, responses, 1.0)
    for tp in (1, 2):
        for found, _ in ranks(tp, 1, 1).run(
            with_table, table=table, folder=folder, prompts=prompts, responses=responses
        ):
            assert (found - expected).abs().max() <= 1e-5


def names(runtime: Runtime, folder: Path, critic: bool) -> dict[str, Any]:
    """Of the portable model's parameters, of what its checkpoint holds, and Megatron's map from the former to
    Transformer Engine's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megarl.model.builder import build_actor, build_critic
    from megarl.model.hf_config import read_hf_config
    from megarl.training.sharded import model_state

    model = (build_critic if critic else build_actor)(
        jobs.make_config(folder), read_hf_config(folder), runtime
    )
    fused = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.sharded_state_dict_keys_map
    return {
        "portable": [name for name, _ in model.named_parameters()],
        "checkpoint": {value.key for value in model_state(model)["0"].values()},
        "fused": dict(fused),
    }


@pytest.mark.parametrize(
    ("family", "critic"),
    [
        *(("qwen2", False), ("qwen3", True), ("llama", False), ("qwen3_moe", False), ("glm4", False)),
        ("glm4_moe", False),
        ("deepseek_v3", False),
        ("qwen3_5_text", False),
        ("qwen3_5_moe_text", False),
        ("qwen3_next", True),
    ],
)
def test_one_table_and_one_checkpoint_for_both(
    family: Any, critic: bool, ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    kind = "token" if critic else None
    folder = make_tiny_model(tmp_path, family, classification=kind)
    [found] = ranks(1, 1, 1).run(names, folder=folder, critic=critic)
    every = dict.fromkeys(("qwen3_moe", "qwen3_5_moe_text", "qwen3_next"), (0, 1))
    mixtures = {**every, "glm4_moe": (1,), "deepseek_v3": (1,)}.get(family, ())
    fused = found["fused"]
    assert {f"{long}weight": f"{short}weight" for short, long in fused.items()} == TE_ALIASES
    if family == "deepseek_v3":  # Megatron has the norm before multi-latent attention apart
        del fused["input_layernorm."]

    def in_te(name: str) -> str:
        for short, long in fused.items():
            if not (short == "pre_mlp_layernorm." and any(f".{layer}." in name for layer in mixtures)):
                name = name.replace(f".{short}", f".{long}")
        return name

    theirs = [in_te(name) for name in found["portable"]]
    changed = sum(name != mine for name, mine in zip(theirs, found["portable"], strict=True))
    assert changed == 2 * len(fused) - len(mixtures), "one or two norms of two layers"
    for wrapped in (theirs, [f"module.module.{name}" for name in theirs]):
        mapped = rename_to_table(dict(zip(wrapped, found["portable"], strict=True)))
        assert mapped == {name: name for name in found["portable"]}
    assert set(mapped) == set(megatron_layout(read_config(folder), Layout(), critic=critic)[0][1])
    # else each layer has keys of its own
    alike = family not in ("glm4_moe", "deepseek_v3", *HYBRID)
    collapsed = {
        name.replace("layers.0.", "layers.").replace("layers.1.", "layers.") if alike else name
        for name in theirs
        if "experts" not in name
    }
    assert {key for key in found["checkpoint"] if "experts" not in key} == collapsed


LINEAR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_conv_kernel_dim": 4}
LINEAR |= {"linear_key_head_dim": 3, "linear_value_head_dim": 2}
KINDS = "each of them full_attention or linear_attention"
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
MIXTURE |= {"shared_expert_intermediate_size": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 6}, "linear_num_key_heads: 4 does not divide linear_num_value_heads = 6"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim: must be a positive integer (got 0)"),
        (
            {"layer_types": ["full_attention"]},
            f"layer_types: must be a list of 2, {KINDS} (got ['full_attention'])",
        ),
        ({"layer_types": ["sliding_attention"] * 2}, f"layer_types: must be a list of 2, {KINDS} (got "),
        (
            {"attn_output_gate": False},
            "attn_output_gate: False is not supported for qwen3_5_text (only True is)",
        ),
        ({"model_type": "qwen3_5"}, "model_type: 'qwen3_5' is a model of images and text (save its language"),
        *(
            ({"model_type": family, **MIXTURE, **change}, message.format(family))
            for family, change, message in (
                ("qwen3_5_moe", {}, "model_type: '{}' is a model of images and text (save its"),
                (
                    "qwen3_5_moe_text",
                    {"shared_expert_intermediate_size": None},
                    "shared_expert_intermediate_size: must be a positive integer (got None)",
                ),
                (
                    "qwen3_5_moe_text",
                    {"norm_topk_prob": False},
                    "norm_topk_prob: False is not supported for {} (only True is)",
                ),
                (
                    "qwen3_next",
                    {"mlp_only_layers": [1]},
                    "mlp_only_layers: [1] is not supported for {} (only [] is)",
                ),
            )
        ),
    ],
)
def test_linear_attention_that_cannot_be_built(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = described("qwen3_5_text", 2, 16, 4, 2, 8, 11, **LINEAR)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Sizes.from_config(read_config(tmp_path)).linear == {0, 1}, (
        "the fourth would be the first of full attention"
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError) as refused:
        read_config(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path}/config.json: {message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"parallel": {"cp": 4, "tp": 2}},
            "parallel.cp: 4 does not divide the 2 key heads of linear attention",
        ),
        ({"model": {"path": "m", "layers": "te"}}, "model.layers: te: is not supported for linear attention"),
        ({"update": {"share_prompts": True}}, "update.share_prompts: is not supported for linear attention"),
        (
            {"model": {"path": "m", "grouped_experts": True}},
            "model.grouped_experts: is not supported for linear attention",
        ),
    ],
)
def test_what_linear_attention_is_not_there_with(change: dict[str, Any], message: str) -> None:
    linear = described("qwen3_5_text", 2, 16, 4, 2, 8, 11, **LINEAR)
    given: dict[str, Any] = {"recipe": "dapo", "run_dir": "run", "steps": 1, "model": {"path": "m"}}
    check_linear(linear, Config(**given))
    changed = Config(**{**given, **change})
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_linear(linear, changed)
    other = {**linear, "layer_types": ["full_attention", "linear_attention"]}
    sglang = Config(**given, rollout={"engine": "sglang"})
    check_linear(linear, sglang)
    check_linear(other, Config(**given))
    with pytest.raises(ConfigError, match=r"rollout\.engine: SGLang has full attention in every n-th layer"):
        check_linear(other, sglang)
    uneven = {**linear, "linear_num_key_heads": 3, "linear_num_value_heads": 3}
    with pytest.raises(
        ConfigError, match=r"parallel\.tp: 2 does not divide the model's 3 key heads of linear"
    ):
        check_layout(uneven, 2, 1)
