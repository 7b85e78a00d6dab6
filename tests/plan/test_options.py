"""Megatron's options in the plan, before and after.

`python tests/plan/test_options.py` prints the table of docs/evidence/planning.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.config.errors import ConfigError
from megarl.parallel.layout import Layout
from megarl.parallel.runtime import Runtime
from megarl.plan import memory
from megarl.plan.inputs import PlanInputs
from megarl.plan.memory import gpu_needs, phase_buffers
from megarl.plan.search import ROOM, replace_keys
from megarl.plan.sizes import GIB
from megarl.plan.tensors import count_bucket_params, gradient_sum_bytes, group_bytes
from megarl.plan.text import COLUMNS, clock
from megarl.plan.times import MATMUL, default_lengths, estimate
from tests.plan.jobs import batches, learner_of, storages
from tests.plan.test_memory import ROOT
from tests.plan.test_search import plan_for
from tests.ranks import RankPool

NAMES = ("vapo_32b", "dapo_30b_a3b", "dapo_72b", "vapo_7b")
HALVED = {"parallel__grad_dtype": "bf16"}
MLP = {
    "model__recompute": "selective",
    "model__recompute_modules": ("mlp",),
    "model__recompute_layers": None,
}


def fullest(plan: PlanInputs) -> float:
    """Return the largest need of any update on the fullest stage."""
    return max(need.total for need in gpu_needs(plan, phases=[p for p in plan.phases if p.updates_weights]))


def keeps_what_it_sent(layout: Layout, begun: float, last: bool) -> float:
    """Return megarl's count before `deallocate_pipeline_outputs`, for plans without virtual stages."""
    assert layout.vpp == 1
    return begun - last


def fewest_layers(plan: PlanInputs) -> PlanInputs:
    """Recompute as few layers as leave the room that `megarl plan` leaves."""
    layers = plan.actor.sizes.layers // plan.layout.pp
    none = replace_keys(plan, model__recompute="none", model__recompute_layers=None)
    tried = [none, *(replace_keys(plan, model__recompute_layers=count) for count in range(1, layers + 1))]
    return next(made for made in tried if fullest(made) <= (1 - ROOM) * plan.device.memory)


def shown(plan: PlanInputs, more: str = "") -> str:
    return f"{fullest(plan) / GIB:.1f} GiB{more}, {clock(estimate(plan, default_lengths(plan)).total)}"


def rows() -> Iterator[list[str]]:
    plans = [plan_for(name) for name in NAMES]
    with mock.patch.object(memory, "count_kept_outputs", keeps_what_it_sent):
        yield ["before: what a stage sent is kept", *map(shown, plans)]
    yield ["as it is", *map(shown, plans)]
    mixtures = [
        shown(replace_keys(p, model__router_dtype="model")) if p.actor.sizes.experts else "-" for p in plans
    ]
    yield ["`model.router_dtype=model`", *mixtures]
    halved = [replace_keys(plan, **HALVED) for plan in plans]
    yield ["`parallel.grad_dtype=bf16`", *map(shown, halved)]
    fewer = [fewest_layers(plan) for plan in halved]
    layers = [f" ({plan.config.model.recompute_layers or 0} layers)" for plan in fewer]
    yield ["the same, fewest layers recomputed", *map(shown, fewer, layers)]
    alone = [shown(replace_keys(p, **MLP)) if not p.actor.sizes.experts else "-" for p in plans]
    yield ["`model.recompute=selective`, `recompute_modules=mlp`", *alone]


def table() -> Iterator[str]:
    yield "| | " + " | ".join(f"`{name}`" for name in NAMES) + " |"
    yield "|---" * (len(NAMES) + 1) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows())


def test_the_page_shows_the_table() -> None:
    page = (ROOT / "docs/evidence/planning.md").read_text().splitlines()
    for row in table():
        assert row in page, "python tests/plan/test_options.py prints the table anew"


@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_bf16_are_half(name: str) -> None:
    """bf16 gradients need half of the memory and a shorter update.

    The reduction's scratch memory comes after activations are freed; with overlap, the first stage also
    needs it next to them."""
    plan = plan_for(name)
    halved = replace_keys(plan, **HALVED)
    for stage in plan.stages:
        assert (
            group_bytes(halved, "actor.gradients", stage) == group_bytes(plan, "actor.gradients", stage) / 2
        )
        during, behind = gradient_sum_bytes(halved, "actor", stage)
        bucket = 2 * count_bucket_params(plan, "actor", stage)
        assert behind > bucket
        if stage == 0 and plan.overlaps:
            assert bucket < during < 2 * bucket
        else:
            assert during == 0.0
        assert gradient_sum_bytes(plan, "actor", stage) == (0.0, 0.0)
    assert fullest(halved) < fullest(plan)
    before, after = (estimate(p, default_lengths(p)).parts["actor_update"] for p in (plan, halved))
    assert 0.9 * before < after < before
    # A rank with almost no activations still needs memory for the reduction.
    [phase] = [p for p in plan.phases if p.name == "actor_update"]
    last = plan.layout.pp - 1
    nothing = phase_buffers(halved, phase, last, 1)
    assert sum(nothing.values()) >= gradient_sum_bytes(halved, "actor", last)[1]


def gradient_bytes(runtime: Runtime, grad_dtype: str) -> tuple[int, int]:
    """Return the bytes of the gradient buffers, and the peak of other memory during the reduction."""
    import torch

    from tests.parallel.memory import LiveMemory
    from tests.parallel.test_options import apart

    with apart():
        _, learner = learner_of(
            runtime,
            "qwen2",
            "bf16",
            critic=False,
            parallel={"grad_dtype": grad_dtype, "overlap_grad_reduce": False},
        )
        learner.compute_gradients(batches(learner, 1, 64), lambda output, _: (output[0].sum(), {}))
        with LiveMemory() as alive:
            for chunk in learner.chunks:
                chunk.start_grad_sync()
                chunk.finish_grad_sync()
        size = sum(storages(buffer.grad_data for buffer in learner.buffers).values())
        assert torch.isfinite(learner.buffers[0].grad_data.sum())
        return size, alive.peak


def test_they_are_so_in_a_real_model(ranks: Callable[..., RankPool]) -> None:
    from dataclasses import replace

    from tests.plan.jobs import plan_for as plan_of_job

    plan = plan_of_job((1, 1, 2, 1), "qwen2", "bf16")
    parallel: dict[str, Any] = {"grad_dtype": "bf16", "overlap_grad_reduce": False}
    changed = plan.config.parallel.model_copy(update=parallel)
    plan = replace(plan, config=plan.config.model_copy(update={"parallel": changed}))
    for size, alive in ranks(1, 1, 2).run(gradient_bytes, grad_dtype="bf16"):
        assert size == pytest.approx(group_bytes(plan, "actor.gradients", 0), rel=0.01)
        # The shards received from the replicas, and this rank's float32 sum of them.
        assert alive == pytest.approx(gradient_sum_bytes(plan, "actor", 0)[1], rel=0.05)


def test_a_mixtures_experts_are_not_planned_to_be_recomputed_alone() -> None:
    with pytest.raises(ConfigError, match=r"^model\.recompute_modules: mlp is for dense models"):
        plan_for(
            "dapo_30b_a3b",
            "model.recompute=selective",
            "model.recompute_modules=mlp",
            "model.recompute_layers=null",
        )


if __name__ == "__main__":
    print(*table(), sep="\n")


def test_muons_iterations_take_time() -> None:
    """Muon adds the operations that torch counts for Newton-Schulz on Qwen2.5-32B's matrices.

    Each update has one replica's share of them."""
    adam = plan_for("dapo_32b")
    muon = replace_keys(adam, actor__optimizer="muon")
    with torch.device("meta"):  # rows and columns from the paper's table, in Megatron's joined form
        matrices = [
            torch.empty(size)
            for size in ((5120 + 2 * 1024, 5120), (5120, 5120), (2 * 27648, 5120), (5120, 27648))
        ]
    with FlopCounterMode(display=False) as counted:
        for x in (x if x.shape[0] <= x.shape[1] else x.T for x in matrices):
            a = x @ x.T
            _ = (a @ a) @ x
    layers, dp, updates = (
        64 // adam.layout.pp,
        adam.layout.dp,
        adam.config.responses // adam.config.mini_batch,
    )
    operations = counted.get_total_flops() * layers * muon.config.actor.muon.steps / dp * updates
    before, after = (estimate(plan, default_lengths(plan)).parts["actor_update"] for plan in (adam, muon))
    assert after - before == pytest.approx(operations / (adam.device.tflops * 1e12 * MATMUL), rel=1e-6)


def test_every_part_of_memory_has_a_column() -> None:
    """This includes Muon's matrices if a rank has too few tokens for them to fit in its activations."""
    muon = replace_keys(plan_for("dapo_32b"), actor__optimizer="muon", update__tokens_per_micro_batch=1024)
    muon = replace_keys(muon, rollout__max_response_tokens=512, data__max_prompt_tokens=512)
    plans = [muon, *(plan_for(name) for name in NAMES)]
    parts = {part for plan in plans for need in gpu_needs(plan) for part in need.parts}
    assert "Muon's matrices" in parts
    assert parts <= {name for _, names in COLUMNS for name in names}
