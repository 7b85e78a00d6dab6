"""Search for the quickest split into trainers and engines, by simulation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from megarl.config.check import check_config
from megarl.config.errors import MegarlError
from megarl.config.schema.schedule import ScheduleConfig
from megarl.parallel.layout import Layout
from megarl.plan.fit import find_problem
from megarl.plan.in_flight import simulate_in_flight, simulate_split
from megarl.plan.inputs import PlanInputs
from megarl.plan.search import replace_keys
from megarl.plan.simulate import RolloutWork, Split, Timeline, make_costs, simulate_rollout
from megarl.plan.times import Estimate, Lengths, estimate
from megarl.sync.plan import engine_ranks

TRUSTED = 1.05  # simulated / estimated seconds
SCALES = tuple(2**n for n in range(3, 11))  # GPUs


def _list_splits(plan: PlanInputs, world: int) -> Iterator[PlanInputs]:
    """Yield the valid splits that fit into memory."""
    layout = plan.layout
    unit = layout.tp * layout.pp * layout.cp
    for trainers in range(unit, world, unit):
        keys = {"parallel__dp": trainers // unit, "parallel__rollout_ranks": world - trainers}
        candidate = replace_keys(plan, **keys)
        try:
            if trainers // layout.pp % layout.ep or find_problem(candidate):
                continue
            check_config(candidate.config, "plan")
            engine_ranks(candidate.config, trainers)
        except MegarlError:
            continue
        yield candidate


def _set_schedule(plan: PlanInputs, ahead: int, *, in_flight: bool = False) -> PlanInputs:
    mode = plan.config.schedule.in_flight if plan.in_flight else "retract"
    schedule = ScheduleConfig(ahead=ahead)  # type: ignore[arg-type]
    if in_flight:
        schedule = ScheduleConfig(in_flight=mode, max_staleness=plan.config.schedule.max_staleness)
    return replace(plan, config=plan.config.model_copy(update={"schedule": schedule}))


def find_best_split(
    plan: PlanInputs, work: RolloutWork, lengths: Lengths, world: int, *, in_flight: bool = False
) -> PlanInputs | None:
    """Find the quickest split of `world` ranks, if any fits: at ahead = 1 or with weights in flight.

    The search walks from the best split by plan/times.py to quicker neighbours."""
    splits = _list_splits(_set_schedule(plan, 0 if in_flight else 1, in_flight=in_flight), world)
    candidates: list[tuple[PlanInputs, Estimate]] = [(split, estimate(split, lengths)) for split in splits]
    if not candidates:
        return None

    @cache
    def compute_seconds(index: int) -> float:
        candidate, times = candidates[index]
        costs, split = make_costs(candidate, lengths), Split.from_plan(candidate, 1)
        if in_flight:
            return simulate_in_flight(work, costs, split).step
        return max(times.training, simulate_rollout(work, costs, split.engines, random.Random(0)).seconds)

    index = min(range(len(candidates)), key=lambda i: candidates[i][1].total)
    # Dropped groups are not in the estimate, so then the search starts with long strides.
    is_close = not in_flight or compute_seconds(index) < TRUSTED * candidates[index][1].total
    stride = 1 if is_close else max(1, len(candidates) // 8)
    while stride:
        neighbours = [i for i in (index - stride, index + stride) if 0 <= i < len(candidates)]
        quickest = min([index, *neighbours], key=compute_seconds)
        stride = stride // 2 if quickest == index else stride
        index = quickest
    return candidates[index][0]


class SimulatedSplit(NamedTuple):
    """A simulated split. `ahead` replaces the plan's."""

    plan: PlanInputs
    ahead: int
    timeline: Timeline

    @property
    def rollout_ranks(self) -> int:
        return self.plan.config.parallel.rollout_ranks

    @property
    def name(self) -> str:
        trainers, ranks, schedule = self.plan.layout.world, self.rollout_ranks, self.plan.config.schedule
        if not ranks:
            return f"{trainers} ranks in turn"
        mode = f"ahead {self.ahead}"
        if self.plan.in_flight:
            mode = f"in flight, staleness <= {schedule.max_staleness}"
        return f"{trainers} train, {ranks} generate, {mode}"

    @property
    def keys(self) -> str:
        """Return the overrides that choose this split."""
        schedule, keys = self.plan.config.schedule, f"schedule.ahead={self.ahead}"
        if self.plan.in_flight:
            keys = f"schedule.in_flight={schedule.in_flight} schedule.max_staleness={schedule.max_staleness}"
        return f"parallel.dp={self.plan.layout.dp} parallel.rollout_ranks={self.rollout_ranks} {keys}"

    @property
    def order(self) -> float:
        """Return seconds, with a malus for older weights."""
        return self.timeline.step * (1 + 0.01 * (2 if self.plan.in_flight else self.ahead))


def compare_splits(plan: PlanInputs, work: RolloutWork, lengths: Lengths) -> list[SimulatedSplit]:
    """Simulate the configuration, shared ranks, and the best splits at ahead 1 and 2 and in flight."""
    world = plan.layout.world + plan.config.parallel.rollout_ranks
    candidates = [(plan, plan.config.schedule.ahead)]
    if plan.config.parallel.rollout_ranks and (shared := _share_ranks(plan, world)):
        candidates.append((shared, 0))
    if best := find_best_split(plan, work, lengths, world):
        candidates += [(best, 1), (best, 2)]
    if not work.window and (best := find_best_split(plan, work, lengths, world, in_flight=True)):
        candidates.append((best, 0))
    distinct: dict[tuple[Layout, int, bool], PlanInputs] = {}
    for candidate, ahead in candidates:
        distinct.setdefault((candidate.layout, ahead, candidate.in_flight), candidate)
    return [_simulate(candidate, ahead, work, lengths) for (_, ahead, _), candidate in distinct.items()]


def _share_ranks(plan: PlanInputs, world: int) -> PlanInputs | None:
    unit = plan.layout.tp * plan.layout.pp * plan.layout.cp
    if world % unit or world % plan.engine_tp:
        return None
    keys = {"parallel__dp": world // unit, "parallel__rollout_ranks": 0}
    return replace_keys(_set_schedule(plan, 0), **keys)


def _simulate(plan: PlanInputs, ahead: int, work: RolloutWork, lengths: Lengths) -> SimulatedSplit:
    timeline = simulate_split(work, make_costs(plan, lengths), Split.from_plan(plan, ahead))
    return SimulatedSplit(plan, ahead, timeline)


class Scale(NamedTuple):
    """Best splits of a number of GPUs. None: nothing fits."""

    gpus: int
    in_turn: SimulatedSplit | None
    ahead: SimulatedSplit | None
    in_flight: SimulatedSplit | None


def compare_scales(plan: PlanInputs, work: RolloutWork, lengths: Lengths) -> Iterator[Scale]:
    """Simulate the same batch and parallel.tp, pp, cp and ep on other numbers of GPUs."""
    for gpus in SCALES:
        shared = _share_ranks(plan, gpus)
        if shared and (shared.layout.world // shared.layout.pp % shared.layout.ep or find_problem(shared)):
            shared = None
        ahead = find_best_split(plan, work, lengths, gpus)
        in_flight = find_best_split(plan, work, lengths, gpus, in_flight=True)
        found = [
            _simulate(split, steps, work, lengths) if split else None
            for split, steps in ((shared, 0), (ahead, 1), (in_flight, 0))
        ]
        yield Scale(gpus, *found)
