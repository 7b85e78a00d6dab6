"""The layouts of a run that fit, best first, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megarl.config.errors import MegarlError
from megarl.plan.memory import Plan, with_layout
from megarl.plan.times import Estimate, Lengths, estimate
from megarl.weights.layout import check_layout


class Found(NamedTuple):
    """A layout that was tried: its estimate if it fits, else why not."""

    plan: Plan
    estimate: Estimate | None
    problem: str | None


def search(plan: Plan, lengths: Lengths) -> list[Found]:
    """Every TP x PP x DP x engine TP of as many GPUs as the plan has. Those that fit come first, the quickest first; of the others those
    with the least parallelism first."""
    found = [_judge(candidate, lengths) for candidate in _candidates(plan)]
    found.sort(key=lambda one: (one.estimate is None, one.estimate.total if one.estimate else 0.0, _order(one.plan)))
    return found


def _candidates(plan: Plan) -> Iterator[Plan]:
    world, node = plan.layout.world, min(plan.config.cluster.gpus_per_node, plan.layout.world)
    engines = [1] if plan.config.rollout.engine == "transformers" else [n for n in _powers(node) if world % n == 0]
    for tp in _powers(node):
        for pp in (n for n in range(1, world // tp + 1) if world % (tp * n) == 0 and plan.actor.sizes.layers % n == 0):
            for engine_tp in engines:
                yield with_layout(plan, tp, pp, world // (tp * pp), engine_tp)


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]


def _judge(plan: Plan, lengths: Lengths) -> Found:
    try:
        for shape in (plan.actor, plan.critic):
            check_layout(shape.config, plan.layout.tp, plan.layout.pp, plan.layout.ep)
        problem = plan.problem()
    except (MegarlError, ValueError) as error:
        return Found(plan, None, str(error))
    if problem:
        return Found(plan, None, problem)
    return Found(plan, estimate(plan, lengths), None)


def _order(plan: Plan) -> tuple[int, int, int]:
    layout = plan.layout
    return layout.tp * layout.pp, layout.tp, plan.config.rollout.engine_tp
