"""Plans: every target byte comes from the right place, exactly once; a plan for which that is false is
found out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.config.schema import ClusterConfig
from megarl.parallel.layout import Layout
from megarl.sync.cost import direct_cost
from megarl.sync.plan import Copy, Plan, PlanError, make_plan
from megarl.weights.boxes import full_box
from megarl.weights.hf import HFFolder
from megarl.weights.known_models import KNOWN_MODELS
from megarl.weights.shards import Region, Shard, Shards, hf_shapes, hf_shards, megatron_layout, sglang_shards
from tests.weights.folders import described, execute, hf_configs, loaded, numbered, write_folder

Drawn = tuple[dict[str, Any], list[Layout]]


def fused_engine(config: dict[str, Any], tp: int, tp_rank: int) -> Shards:
    """A layout of the kind that SGLang has, from torch's own cat and chunk over tensors of element numbers:
    [q; k; v] and [gate; up] of the rank as one tensor each, the output projection's columns, the vocabulary
    padded to a multiple of 8 rows per rank."""
    shapes = hf_shapes(config)

    def rows(name: str) -> list[tuple[str, int, int]]:
        """The rank's rows of a tensor; of one that holds gate and up, those of either half."""
        halves = 2 if "gate_up" in name else 1
        size = shapes[name][0] // halves // tp
        starts = [half * size * tp + tp_rank * size for half in range(halves)]
        return [(name, start, start + size) for start in starts]

    shards: Shards = {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        one = f"{prefix}mlp.gate_up_proj.weight" in shapes
        for fused, parts in (
            ("self_attn.qkv", ("self_attn.q", "self_attn.k", "self_attn.v")),
            ("mlp.gate_up", ("mlp.gate_up",) if one else ("mlp.gate", "mlp.up")),
        ):
            regions, offset = [], 0
            hidden = (0, config["hidden_size"])
            for name, start, stop in (row for part in parts for row in rows(f"{prefix}{part}_proj.weight")):
                regions.append(
                    Region(name, ((start, stop), hidden), ((offset, offset + stop - start), hidden))
                )
                offset += stop - start
            shards[f"{prefix}{fused}_proj.weight"] = Shard((offset, hidden[1]), tuple(regions))
        name = prefix + "self_attn.o_proj.weight"
        height, width = shapes[name][0], shapes[name][1] // tp
        box = ((0, height), (tp_rank * width, (tp_rank + 1) * width))
        shards[name] = Shard((height, width), (Region(name, box, full_box((height, width))),))
    name, (vocab, hidden_size) = "model.embed_tokens.weight", shapes["model.embed_tokens.weight"]
    per_rank = -(-vocab // (8 * tp)) * 8
    start, stop = min(tp_rank * per_rank, vocab), min((tp_rank + 1) * per_rank, vocab)
    real = stop - start
    regions = [Region(name, ((start, stop), (0, hidden_size)), ((0, real), (0, hidden_size)))] if real else []
    padding = (((real, per_rank), (0, hidden_size)),) if real < per_rank else ()
    shards[name] = Shard((per_rank, hidden_size), tuple(regions), padding)
    return shards


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(hf_configs())
def test_into_shards_and_back_is_bitwise(tmp_path_factory: pytest.TempPathFactory, drawn: Drawn) -> None:
    config, (layout, other) = drawn
    hf = numbered(config)
    folder = HFFolder(write_folder(tmp_path_factory.mktemp("hf"), config, hf))
    sources = megatron_layout(config, layout)
    held = loaded(sources, folder)

    back = make_plan(sources, [(0, hf_shards(config)), (layout.world + 1, hf_shards(config))])
    back.verify()
    for tensors in execute(back, held).values():
        assert tensors.keys() == hf.keys()
        assert all(torch.equal(tensors[name], hf[name]) for name in hf)

    targets = megatron_layout(config, other)
    reshard = make_plan(sources, targets)
    reshard.verify()
    moved, expected = execute(reshard, held), loaded(targets, folder)
    for rank, tensors in expected.items():
        for name, tensor in tensors.items():
            # padding is not the plan's to write
            assert torch.equal(moved[rank][name].nan_to_num(0.0), tensor), name


@settings(max_examples=15, deadline=None)
@given(hf_configs(), st.sampled_from((1, 2, 4)))
def test_into_an_engines_fused_shards(
    tmp_path_factory: pytest.TempPathFactory, drawn: Drawn, tp: int
) -> None:
    config, (layout, _) = drawn
    assume(config["num_key_value_heads"] % tp == 0 and config["intermediate_size"] % tp == 0)
    hf = numbered(config)
    sources = megatron_layout(config, layout)
    held = loaded(sources, HFFolder(write_folder(tmp_path_factory.mktemp("hf"), config, hf)))
    plan = make_plan(sources, [(rank, fused_engine(config, tp, rank % tp)) for rank in range(2 * tp)])
    plan.verify()
    for rank, tensors in execute(plan, held).items():
        mine = [rank % tp]
        for layer in range(config["num_hidden_layers"]):
            whole = [hf[f"model.layers.{layer}.self_attn.{p}_proj.weight"] for p in "qkv"]
            mlp = f"model.layers.{layer}.mlp."
            if f"{mlp}gate_up_proj.weight" in hf:
                whole += hf[f"{mlp}gate_up_proj.weight"].chunk(2)
            else:
                whole += [hf[f"{mlp}{p}_proj.weight"] for p in ("gate", "up")]
            q, k, v, gate, up = (part.chunk(tp)[mine[0]] for part in whole)
            assert torch.equal(
                tensors[f"model.layers.{layer}.self_attn.qkv_proj.weight"], torch.cat([q, k, v])
            )
            assert torch.equal(
                tensors[f"model.layers.{layer}.mlp.gate_up_proj.weight"], torch.cat([gate, up])
            )
            o_proj = f"model.layers.{layer}.self_attn.o_proj.weight"
            assert torch.equal(tensors[o_proj], hf[o_proj].chunk(tp, 1)[mine[0]])


def mutations(copy: Copy, others: tuple[Copy, ...]) -> list[tuple[Copy, ...]]:
    """What could be wrong with one copy: it is lacking, done twice, reads the wrong rows, rank or tensor, or
    writes the wrong place."""
    (start, stop), *rest = copy.src_box
    (first, last), *rest_of_target = copy.dst_box
    wrong: list[tuple[Copy, ...]] = [(), (copy, copy)]
    wrong.append((copy._replace(src_box=((start + 1, stop + 1), *rest)),))
    wrong.append((copy._replace(src_box=((start, stop + 1), *rest)),))
    wrong.append((copy._replace(dst_box=((first + 1, last + 1), *rest_of_target)),))
    wrong.append(
        (copy._replace(src_box=((start, stop - 1), *rest), dst_box=((first, last - 1), *rest_of_target)),)
    )
    wrong.append((copy._replace(src_rank=1000),))
    same_bytes = {"embedding.word_embeddings.weight", "output_layer.weight"}  # where embeddings are tied
    for other in others:
        if other.dst_name != copy.dst_name and {copy.dst_name, other.dst_name} != same_bytes:
            wrong.append((copy._replace(src_name=other.src_name, src_rank=other.src_rank),))
            wrong.append((copy._replace(dst_name=other.dst_name),))
    return wrong


@settings(max_examples=20, deadline=None)
@given(hf_configs(), st.sampled_from((1, 2, 8)), st.booleans(), st.data())
def test_a_wrong_plan_is_found_out(drawn: Drawn, node: int, fused: bool, data: st.DataObject) -> None:
    config, (layout, other) = drawn
    if fused:
        shards = [sglang_shards(config, other.tp, rank, cpu=True) for rank in range(other.tp)]
        targets = [(rank, shards[rank % other.tp]) for rank in range(2 * other.tp)]
    else:
        targets = megatron_layout(config, other)
    plan = make_plan(megatron_layout(config, layout), targets, gpus_per_node=node)
    plan.verify()
    for kind in ("copies", "relays") if plan.relays else ("copies",):
        right = getattr(plan, kind)
        index = data.draw(st.integers(0, len(right) - 1))
        others = data.draw(st.lists(st.sampled_from(right), max_size=2))
        for wrong in mutations(right[index], tuple(others)):
            mutated = replace(plan, **{kind: (*right[:index], *wrong, *right[index + 1 :])})
            with pytest.raises(PlanError):
                mutated.verify()


def test_the_proof_names_the_tensor() -> None:
    config = described("llama", 1, 4, 2, 2, 4, 5)
    plan = make_plan(megatron_layout(config, Layout()), [(0, hf_shards(config))])
    last = plan.copies[-1]
    with pytest.raises(PlanError, match=rf"rank 0, {last.dst_name}: \d+ elements would never be written"):
        replace(plan, copies=plan.copies[:-1]).verify()
    with pytest.raises(PlanError, match=f"rank 0, {last.dst_name}: .* written twice"):
        replace(plan, copies=(*plan.copies, last)).verify()


def test_sources_that_lack_something_are_refused() -> None:
    whole = {"a": Shard((4,), (Region("x", ((0, 4),), ((0, 4),)),))}
    half = {"a": Shard((2,), (Region("x", ((0, 2),), ((0, 2),)),))}
    with pytest.raises(PlanError, match="x: the sources do not hold"):
        make_plan([(0, half)], [(0, whole)])
    with pytest.raises(PlanError, match="x: the sources do not hold"):
        make_plan([(0, half), (1, whole)], [(0, whole)])  # overlapping regions would be written twice
    make_plan([(0, whole)], [(0, half)]).verify()


def test_the_targets_own_rank_comes_first_and_replicas_share_the_rest() -> None:
    config = described("qwen2", 4, 64, 8, 4, 128, 64)
    layout = Layout(tp=2, pp=2, dp=4)
    sources = megatron_layout(config, layout)
    same = make_plan(sources, sources)
    assert all(copy.src_rank == copy.dst_rank for copy in same.copies)

    plan = make_plan(sources, [(100 + engine, hf_shards(config)) for engine in range(4)])
    traffic = plan.summary(itemsize=2)
    model = 2 * sum(prod(shape) for shape in hf_shapes(config).values())
    assert all(traffic[100 + engine].received == model for engine in range(4))
    assert all(traffic[rank].received == traffic[rank].local == 0 for rank in range(layout.world))
    assert sum(traffic[rank].sent for rank in range(layout.world)) == 4 * model
    for tp in range(2):
        for pp in range(2):
            sent = [traffic[layout.rank(tp=tp, pp=pp, dp=dp)].sent for dp in range(4)]
            assert max(sent) < 1.1 * min(sent)


@settings(max_examples=20, deadline=None)
@given(hf_configs())
def test_summary_counts_every_byte(drawn: Drawn) -> None:
    config, (layout, other) = drawn
    plan = make_plan(megatron_layout(config, layout), megatron_layout(config, other))
    traffic = plan.summary(itemsize=4)
    wanted: Counter[int] = Counter()
    for rank, shards in plan.targets.items():
        for shard in shards.values():
            padding = sum((b[0][1] - b[0][0]) * (b[1][1] - b[1][0]) for b in shard.padding)
            wanted[rank] += 4 * (prod(shard.shape) - padding)
    assert {rank: t.received + t.local for rank, t in traffic.items() if rank in plan.targets} == dict(wanted)
    assert sum(t.sent for t in traffic.values()) == sum(t.received for t in traffic.values())


def test_the_order_of_a_plan_does_not_depend_on_who_makes_it() -> None:
    config = described("llama", 2, 8, 4, 4, 8, 7)

    def plan() -> Plan:
        return make_plan(
            megatron_layout(config, Layout(tp=4, pp=2, dp=2)), megatron_layout(config, Layout(tp=2, dp=3))
        )

    assert plan().copies == plan().copies


def test_the_node_comes_before_the_rest_and_nothing_comes_to_a_node_twice() -> None:
    """8 ranks, 2 on a node, actor tp 2 pp 2 dp 2: each of 8 engines of one rank gets its node's stage from
    there, the other stage once."""
    config = described("llama", 4, 64, 4, 4, 128, 64)
    sources = megatron_layout(config, Layout(tp=2, pp=2, dp=2))
    whole = hf_shards(config)
    plan = make_plan(sources, [(rank, whole) for rank in range(8)], gpus_per_node=2)
    plan.verify()
    model = sum(prod(shape) for shape in hf_shapes(config).values())
    cost = direct_cost(plan, 1, 1 << 20, ClusterConfig())
    stage = {rank: sum(shard_size(rank + other, sources) for other in (0, 1)) for rank in (0, 2, 4, 6)}
    norms = {
        rank: sum(shard.shape[0] for shard in sources[rank][1].values() if len(shard.shape) == 1)
        for rank in (0, 2, 4, 6)
    }
    for first in (0, 2, 4, 6):
        here = stage[first] - norms[first]  # both ranks of a stage hold its norms
        pair = [cost[first], cost[first + 1]]
        assert sum(c.network_received for c in pair) == model - here
        assert sum(c.local for c in pair) == stage[first]
        assert sum(c.node_received for c in pair) == 2 * model - (model - here) - stage[first]
        assert abs(pair[0].network_received - pair[1].network_received) < 0.1 * model
    sent = [c.network_sent for c in cost.values()]
    assert max(sent) < 1.2 * min(sent)


def shard_size(rank: int, layout: list[tuple[int, Shards]]) -> int:
    return sum(prod(shard.shape) for shard in layout[rank][1].values())


def test_engines_are_served_at_the_same_time() -> None:
    """At full size no link waits long for another one: rounds and seconds are near what the bytes alone would
    take."""
    config = KNOWN_MODELS["Qwen2.5-32B"]
    shards = [sglang_shards(config, 8, rank) for rank in range(8)]
    plan = make_plan(
        megatron_layout(config, Layout(tp=8, pp=4, dp=4)), [(rank, shards[rank % 8]) for rank in range(128)]
    )
    cost = direct_cost(plan, 2, 256 << 20, ClusterConfig())
    per_rank = sum(prod(shape) for shape in hf_shapes(config).values()) * 2 / 8
    assert max(c.received for c in cost.values()) <= 1.02 * per_rank
    assert all(c.node_received == 0 and c.staging <= 256 << 20 for c in cost.values())
    received = max(c.received for c in cost.values())
    assert max(c.rounds for c in cost.values()) <= 1.3 * received / (128 << 20)
    alone = max(max(c.received, c.sent) / 50e9 + c.local / 1675e9 for c in cost.values())
    assert max(c.seconds for c in cost.values()) <= 1.15 * alone


def test_a_relay_of_what_does_not_come_is_found_out() -> None:
    whole = {"a": Shard((4,), (Region("x", ((0, 4),), ((0, 4),)),))}
    plan = make_plan([(0, whole)], [(8, whole), (9, whole)])
    assert len(plan.copies) == len(plan.relays) == 1
    plan.verify()
    with pytest.raises(PlanError, match="rank 9, a: rank 10 relays bytes that it does not receive"):
        replace(plan, relays=(plan.relays[0]._replace(src_rank=10),)).verify()
