"""Transfers between processes are bitwise, need no more staging memory than allowed, and cannot lock up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.parallel.layout import Layout
from megarl.sync.plan import Copy, Plan, build_rounds, make_plan, split
from megarl.sync.transfer import Staging, Transfer
from megarl.weights.boxes import full_box, volume
from megarl.weights.hf import HFFolder
from megarl.weights.shards import Region, Shard, hf_shards, megatron_layout
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model
from tests.weights import jobs
from tests.weights.folders import hf_configs, loaded, numbered, write_folder

LAYOUTS = [
    (Layout(tp=2, pp=2), None),
    (Layout(tp=4), Layout(tp=2, dp=2)),
    (Layout(pp=2, dp=2), Layout(tp=4)),
    (Layout(tp=2), Layout(pp=4)),
    (Layout(), None),
    (Layout(tp=2, pp=2), Layout(tp=2, pp=2)),
]


@pytest.mark.parametrize(
    ("bucket", "dtype"),
    [(4000, torch.bfloat16), pytest.param(1 << 20, torch.float32, marks=pytest.mark.slow)],
)
def test_four_ranks(ranks: Callable[..., RankPool], tmp_path: Path, bucket: int, dtype: torch.dtype) -> None:
    folder = make_tiny_model(
        tmp_path / "model", "qwen2", tied=True, layers=4, heads=28, kv_heads=4, hidden=56, vocab=61
    )
    found = ranks(2, 2, 1).run(jobs.transfer, folder=folder, layouts=LAYOUTS, bucket=bucket, dtype=dtype)
    assert found == [[], [], [], []]


boxes = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=3)


@given(boxes, st.integers(1, 60), st.integers(0, 5))
def test_pieces_tile_the_copy(extents: list[tuple[int, int]], limit: int, shift: int) -> None:
    box = tuple((start, start + size) for start, size in extents)
    copy = Copy(0, "a", tuple((start + shift, stop + shift) for start, stop in box), 1, "b", box)
    counted = torch.zeros([start + size for start, size in extents])
    for piece in split(copy, limit):
        assert piece.size == volume(piece.src_box) <= limit
        assert piece.src_box == tuple((start + shift, stop + shift) for start, stop in piece.dst_box)
        counted[tuple(slice(*ends) for ends in piece.dst_box)] += 1
    assert counted.sum() == copy.size
    assert (counted[tuple(slice(*ends) for ends in box)] == 1).all()


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(hf_configs(), st.integers(120, 12000), st.sampled_from((1, 2, 4)))
def test_rounds_of_all_ranks_fit_together(
    drawn: tuple[dict[str, Any], list[Layout]], limit: int, node: int
) -> None:
    """Both ends have the same messages in the same order, staging is bounded, and working off the rounds
    comes to an end; what is passed on has come before."""
    config, (layout, other) = drawn
    plan = make_plan(megatron_layout(config, layout), megatron_layout(config, other), gpus_per_node=node)
    world = range(max(layout.world, other.world))
    rounds = {rank: build_rounds(plan, rank, 4, limit) for rank in world}
    assert all(round_.size <= limit for mine in rounds.values() for round_ in mine)
    sent = {
        (src, dst): [pieces for r in rounds[src] for p, pieces in r.sends.items() if p == dst]
        for src in world
        for dst in world
    }
    received = {
        (src, dst): [pieces for r in rounds[dst] for p, pieces in r.receives.items() if p == src]
        for src in world
        for dst in world
    }
    assert sent == received
    moved = sum(copy.size for copy in (*plan.copies, *plan.relays) if copy.src_rank != copy.dst_rank)
    assert sum(piece.size for messages in sent.values() for pieces in messages for piece in pieces) == moved

    for mine in rounds.values():
        assert [round_.relays for round_ in mine] == sorted(round_.relays for round_ in mine)

    # A rank posts all messages of a round, and goes on when each of them has met its other end.
    posted: Counter[tuple[str, int, int]] = Counter()
    place, entered, moving = dict.fromkeys(world, 0), dict.fromkeys(world, -1), True
    while moving:
        moving = False
        for rank in (rank for rank in world if place[rank] < len(rounds[rank])):
            round_ = rounds[rank][place[rank]]
            if entered[rank] < place[rank]:
                entered[rank], moving = place[rank], True
                posted.update(("send", rank, peer) for peer in round_.sends)
                posted.update(("receive", peer, rank) for peer in round_.receives)
            met = all(posted["receive", rank, peer] >= posted["send", rank, peer] for peer in round_.sends)
            if met and all(
                posted["send", peer, rank] >= posted["receive", peer, rank] for peer in round_.receives
            ):
                place[rank] += 1
                moving = True
    assert place == {rank: len(rounds[rank]) for rank in world}, "ranks wait for each other for ever"


@settings(max_examples=20, deadline=None)
@given(hf_configs(tps=(1,), pps=(1,)))
def test_one_rank_needs_no_process_group(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[dict[str, Any], list[Layout]]
) -> None:
    config, _ = drawn
    hf = numbered(config)
    layout = megatron_layout(config, Layout())
    held = loaded(layout, HFFolder(write_folder(tmp_path_factory.mktemp("hf"), config, hf)))[0]
    targets = {name: torch.full_like(tensor, torch.nan) for name, tensor in hf.items()}
    plan = make_plan(layout, [(0, hf_shards(config))])
    stats = Transfer(plan, 0, held, targets, 1, dtype=torch.float32).run()
    assert all(torch.equal(targets[name], hf[name]) for name in hf)
    size = sum(tensor.nbytes for tensor in hf.values())
    assert (stats.bytes_sent, stats.bytes_received, stats.bytes_local) == (0, 0, size)


def one_tensor(padding: bool = False) -> Plan:
    box = full_box((4, 3))
    whole = Shard((4, 3), (Region("x", box, box),))
    target = Shard((6, 3), whole.regions, (((4, 6), (0, 3)),)) if padding else whole
    return make_plan([(0, {"a": whole})], [(0, {"b": target})])


def test_padding_of_a_target_becomes_zero() -> None:
    plan, target = one_tensor(padding=True), torch.full((6, 3), torch.nan)
    plan.verify()
    Transfer(plan, 0, {"a": torch.ones(4, 3)}, {"b": target}, 100, dtype=torch.float32).run()
    assert torch.equal(target, torch.tensor([1.0] * 4 + [0.0] * 2)[:, None].expand(6, 3))


def test_tensors_that_are_not_the_plans_are_refused_before_anything_is_sent() -> None:
    good, plan = torch.ones(4, 3), one_tensor()
    for source, target, message in (
        ({"z": good}, {"b": good}, "source tensor a: .* there is nothing"),
        (
            {"a": good},
            {"b": torch.ones(3, 4)},
            r"target tensor b: the plan expects \(4, 3\), there is \(3, 4\)",
        ),
        ({"a": good}, {}, "target tensor b: .* there is nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            Transfer(plan, 0, source, target, 100, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"target tensor b is torch.float32, not torch.bfloat16"):
        Transfer(plan, 0, {"a": good}, {"b": good.clone()}, 100, dtype=torch.bfloat16)


def test_memory_that_is_given_back_is_taken_again() -> None:
    source, target = torch.ones(4, 3), torch.zeros(4, 3)
    staging = Staging(source.device)
    tensors = {"a": source}, {"b": target}
    moving = Transfer(one_tensor(), 0, *tensors, 100, dtype=torch.float32, staging=staging)
    moving.run()
    staging.release()
    source.fill_(5.0)
    moving.run()
    assert torch.equal(target, source)


def test_the_demos_transfer_takes_a_few_milliseconds(tmp_path: Path) -> None:
    folder = HFFolder(
        make_tiny_model(tmp_path / "m", "qwen3", tied=True, vocab=41, hidden=64, ffn=192, head_dim=16)
    )
    layout = megatron_layout(folder.config, Layout())
    shards = hf_shards(folder.config)
    targets = {name: torch.zeros(shard.shape) for name, shard in shards.items()}
    plan, held = make_plan(layout, [(0, shards)]), loaded(layout, folder)[0]
    moving = Transfer(plan, 0, held, targets, 1 << 20, dtype=torch.float32)
    best = min(moving.run().seconds for _ in range(20))
    started = time.process_time()
    moving.run()
    assert best < 0.02
    assert time.process_time() - started < 0.02
