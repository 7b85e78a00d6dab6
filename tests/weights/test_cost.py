"""Costs: what a plan moves counted one byte at a time, the full gather counted from sets of elements, and
known models' sizes."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.errors import ConfigError
from megarl.config.schema import ClusterConfig
from megarl.parallel.layout import Layout
from megarl.sync.cost import direct_cost, gather_cost
from megarl.sync.plan import make_plan
from megarl.weights.families import get_family
from megarl.weights.known_models import KNOWN_MODELS, planning_config
from megarl.weights.shards import Region, Shard, check_layout, hf_shapes, megatron_layout, sglang_shards
from tests.weights.folders import hf_configs

# Billions of parameters, as published with the models.
PUBLISHED = {
    "Qwen2.5-0.5B": 0.49,
    "Qwen2.5-1.5B": 1.54,
    "Qwen2.5-Coder-0.5B": 0.49,
    "Qwen2.5-Coder-1.5B": 1.54,
    "Qwen2.5-3B": 3.09,
    "Qwen2.5-7B": 7.61,
    "Qwen2.5-14B": 14.77,
    "Qwen2.5-32B": 32.76,
    "Qwen2.5-72B": 72.71,
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.72,
    "Qwen3-4B": 4.02,
    "Qwen3-8B": 8.19,
    "Qwen3-14B": 14.77,
    "Qwen3-32B": 32.76,
    "Qwen3-30B-A3B": 30.53,
    "Qwen3-235B-A22B": 235.09,
    "Llama-3.2-1B": 1.24,
    "Llama-3.2-3B": 3.21,
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.55,
    "Mistral-7B": 7.25,
    "Mistral-Nemo": 12.25,
    "Mistral-Small-24B": 23.57,
    "Magistral-Small": 23.57,
    "GLM-4-9B": 9.40,
    "GLM-Z1-9B": 9.40,
    "GLM-4-32B": 32.57,
    "GLM-Z1-32B": 32.57,
    # Published with the layer that predicts a token more, as 106 and 355; these are transformers' own counts.
    "GLM-4.5-Air": 106.852,
    "GLM-4.5": 352.798,
    "GLM-4.6": 352.798,
    # Transformers' own counts; DeepSeek-V3 is published as 671, without the layer that predicts further.
    "Moonlight-16B-A3B": 15.960,
    "DeepSeek-V3": 671.026,
    "DeepSeek-R1": 671.026,
    # transformers' own counts of Qwen3_5ForCausalLM.
    "Qwen3.5-9B": 8.954,
    "Qwen3.5-27B": 26.896,
    # transformers' own counts, without parts for images and layers that predict further.
    "Qwen3.5-35B-A3B": 34.661,
    "Qwen3.5-122B-A10B": 122.112,
    "Qwen3.5-397B-A17B": 396.347,
    "Qwen3-Next-80B-A3B": 79.674,
}


@settings(max_examples=25, deadline=None)
@given(hf_configs(), st.sampled_from((1, 2, 4)), st.integers(100, 5000))
def test_bytes_of_each_link(drawn: tuple[dict[str, Any], list[Layout]], node: int, bucket: int) -> None:
    config, (layout, other) = drawn
    shards = [sglang_shards(config, other.tp, rank, cpu=True) for rank in range(other.tp)]
    plan = make_plan(
        megatron_layout(config, layout),
        [(r, shards[r % other.tp]) for r in range(2 * other.tp)],
        gpus_per_node=node,
    )
    counted: Counter[tuple[int, str]] = Counter()
    for copy in (*plan.copies, *plan.relays):
        size = 2
        for start, stop in copy.dst_box:
            size *= stop - start
        if copy.src_rank == copy.dst_rank:
            counted[copy.dst_rank, "local"] += size
        else:
            link = "node" if copy.src_rank // node == copy.dst_rank // node else "network"
            counted[copy.src_rank, f"{link}_sent"] += size
            counted[copy.dst_rank, f"{link}_received"] += size
    traffic = plan.summary(2)
    for rank, cost in direct_cost(plan, 2, bucket, ClusterConfig()).items():
        for kind in ("local", "node_sent", "node_received", "network_sent", "network_received"):
            assert getattr(cost, kind) == counted[rank, kind]
        assert (cost.sent, cost.received, cost.local) == tuple(traffic[rank])
        assert cost.staging <= max(bucket, 32)
        speeds = ((cost.local, 1675e9), (cost.node_received, 450e9), (cost.network_received, 50e9))
        assert cost.seconds >= sum(size / speed for size, speed in speeds) * (1 - 1e-9)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(hf_configs(), st.sampled_from((1, 2, 4)))
def test_a_full_gather_gives_everything_to_everyone(
    drawn: tuple[dict[str, Any], list[Layout]], node: int
) -> None:
    config, (layout, _) = drawn
    plan = make_plan(megatron_layout(config, layout), [], gpus_per_node=node)
    held: dict[int, set[tuple[str, int, int]]] = {}
    for rank, shards in plan.sources.items():
        held[rank] = set()
        for region in (region for shard in shards.values() for region in shard.regions):
            (rows, columns) = region.hf_box if len(region.hf_box) == 2 else (region.hf_box[0], (0, 1))
            held[rank] |= {(region.hf_name, i, j) for i in range(*rows) for j in range(*columns)}
    everything = set().union(*held.values())
    for rank, cost in gather_cost(plan, hf_shapes(config), 2, 1000, ClusterConfig()).items():
        assert cost.local == 2 * len(held[rank])
        assert cost.local + cost.received == 2 * len(everything)
        neighbours = [r for r in held if r // node == rank // node]
        there = set().union(*(held[r] for r in neighbours))
        assert cost.network_received == 2 * (len(everything) - len(there)) // len(neighbours)
        assert (cost.node_sent, cost.network_sent) == (cost.node_received, cost.network_received)


def test_a_wait_for_another_rank_counts() -> None:
    """Rank 2's bytes come from rank 1, which is busy with rank 0's until then: 8 GB each at 4 and 2 GB/s, two
    buckets."""
    box = ((0, 8 * 10**9),)
    shard = {"a": Shard((8 * 10**9,), (Region("x", box, box),))}
    plan = make_plan([(1, shard)], [(0, dict(shard)), (2, dict(shard))], gpus_per_node=2)
    cluster = ClusterConfig(gpus_per_node=2, copy_speed=1, node_speed=4, network_speed=2)
    cost = direct_cost(plan, 1, 32 * 10**9, cluster)
    assert [cost[rank].seconds for rank in (0, 1, 2)] == [2.0, 6.0, 4.0]
    one_by_one = direct_cost(plan, 1, 16 * 10**9, cluster)
    assert [one_by_one[rank].seconds for rank in (0, 1, 2)] == [2.0, 6.0, 6.0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.shows("planner", family=config["model_type"]))
        for name, config in KNOWN_MODELS.items()
    ],
)
def test_known_models_have_their_published_sizes(name: str) -> None:
    config = KNOWN_MODELS[name]
    get_family(config)
    check_layout(config, 2, 2 if config["num_hidden_layers"] % 2 == 0 else 1)
    parameters = sum(map(prod, hf_shapes(config).values()))
    assert abs(parameters / 1e9 - PUBLISHED[name]) <= 0.006


def test_which_model_is_planned_for(tmp_path: Path) -> None:
    assert planning_config(Path("models/Qwen2.5-7B-Instruct"))[1] is KNOWN_MODELS["Qwen2.5-7B"]
    assert planning_config(Path("models/mine"), "qwen3-30b-a3b")[1] is KNOWN_MODELS["Qwen3-30B-A3B"]
    own = {**KNOWN_MODELS["Qwen2.5-0.5B"], "vocab_size": 77}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert planning_config(tmp_path)[1] == own
    with pytest.raises(
        ConfigError,
        match=r"model.path: models/mine: no config.json there, and 'mine' is not a known model "
        r"\(known: Qwen2.5-0.5B",
    ):
        planning_config(Path("models/mine"))
    with pytest.raises(ConfigError, match=r"--model: 'Qwen9' is not a known model"):
        planning_config(tmp_path, "Qwen9")
