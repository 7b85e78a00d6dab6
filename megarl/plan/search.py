"""Search for the layout that fits into memory with the quickest estimated step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import ValidationError

from megarl.config.check import check_config
from megarl.config.errors import ConfigError, MegarlError
from megarl.config.schema import ParallelConfig
from megarl.parallel.layout import Layout
from megarl.plan.engines import engine_weight_bytes
from megarl.plan.fit import find_problem
from megarl.plan.inputs import PlanInputs
from megarl.plan.memory import gpu_needs
from megarl.plan.sizes import GIB
from megarl.plan.times import Estimate, Lengths, estimate, rollout_seconds
from megarl.sync.plan import engine_ranks
from megarl.weights.shards import check_layout

# In printed order.
CHOSEN = (
    *(f"parallel.{name}" for name in ("tp", "pp", "vpp", "cp", "ep", "dp")),
    *("rollout.engine_tp", "model.recompute", "model.recompute_layers", "model.recompute_modules"),
    *("update.tokens_per_micro_batch", "residency.keep"),
)
# In order of trial. Engines' groups always make room.
KEPT = tuple(
    f"{model}.{part}"
    for part in ("optimizer", "weights")
    for model in ("critic", "actor", "reference", "reward", "teacher")
)
VIRTUAL = (1, 2, 4)
ROOM = 0.06  # share of a GPU's memory for the plan's errors (docs/planning.md)
LOOKED_AT = 8  # best layouts, for a search of residency.keep


class Candidate(NamedTuple):
    """A layout with an estimate if it fits, else with a problem."""

    plan: PlanInputs
    estimate: Estimate | None
    problem: str | None

    @property
    def free(self) -> float:
        return self.plan.device.memory - max(need.total for need in gpu_needs(self.plan))


def replace_keys(plan: PlanInputs, **keys: Any) -> PlanInputs:
    """Replace keys without checks. __ stands for the dot."""
    config, sections = plan.config, dict[str, dict[str, Any]]()
    for dotted, value in keys.items():
        section, _, key = dotted.partition("__")
        sections.setdefault(section, {})[key] = value
    changed_sections = {
        name: getattr(config, name).model_copy(update=values) for name, values in sections.items()
    }
    return replace(plan, config=config.model_copy(update=changed_sections))


def search(plan: PlanInputs, lengths: Lengths) -> list[Candidate]:
    """Try all layouts. Those that fit come first, by speed, then others by parallelism."""
    config, world = plan.config, plan.layout.world
    node = min(config.cluster.gpus_per_node, world)
    engine_sizes = _list_powers(node)
    if not config.rollout.capabilities.sharded or not config.has_engine:
        engine_sizes = [config.rollout.engine_tp]
    plans = [replace_keys(plan, rollout__engine_tp=tp) for tp in engine_sizes]
    if config.has_engine:  # quickest first, at any layout
        plans = sorted(filter(_is_valid_engine, plans), key=lambda p: rollout_seconds(p, lengths))
    engine_sizes = [p.config.rollout.engine_tp for p in plans] or engine_sizes
    candidates = [
        _choose_for_layout(layout_plan, engine_sizes, lengths) for layout_plan in _list_layouts(plan, node)
    ]

    def order(one: Candidate) -> tuple[bool, float, int, int]:
        layout, seconds = one.plan.layout, one.estimate.total if one.estimate else 0.0
        return one.estimate is None, seconds, layout.world // layout.dp, layout.tp

    candidates.sort(key=order)
    # Kept groups save copies. This search is slow, so only for the best.
    best = [_keep_groups(one, lengths) for one in candidates[:LOOKED_AT]]
    return sorted(best, key=order) + candidates[LOOKED_AT:]


def _list_powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _filter_allowed(key: str, sizes: list[int] | tuple[int, ...]) -> list[int]:
    def fits(size: int) -> bool:
        try:
            ParallelConfig.model_validate({key: size})
        except ValidationError:
            return False
        return True

    return [size for size in sizes if fits(size)]


def _list_layouts(plan: PlanInputs, node: int) -> Iterator[PlanInputs]:
    world, sizes = plan.layout.world, plan.actor.sizes
    experts = [n for n in _list_powers(world) if sizes.experts % n == 0] if sizes.experts else [1]
    for tp in _list_powers(node):
        for cp in _filter_allowed("cp", _list_powers(node)):
            for pp in range(1, world // tp + 1):
                if world % (tp * pp * cp) or sizes.layers % pp:
                    continue
                stage = world // pp
                for vpp in _filter_allowed("vpp", VIRTUAL) if pp > 1 else [1]:
                    for ep in experts:
                        if sizes.layers % (pp * vpp) == 0 and stage % ep == 0:
                            layout = {"tp": tp, "pp": pp, "cp": cp, "vpp": vpp, "ep": ep}
                            layout["dp"] = stage // tp // cp
                            yield replace_keys(plan, **{f"parallel__{k}": v for k, v in layout.items()})


def _is_valid_engine(plan: PlanInputs) -> bool:
    try:
        engine_ranks(plan.config, plan.layout.world)
        _ = engine_weight_bytes(plan)
    except MegarlError:
        return False
    return plan.config.cluster.gpus_per_node % plan.engine_tp == 0


def _choose_for_layout(plan: PlanInputs, engines: list[int], lengths: Lengths) -> Candidate:
    layout = plan.layout
    try:
        for shape in (plan.actor, plan.critic, plan.shape("reward"), *plan.teachers):
            check_layout(shape.config, layout.tp, layout.pp, layout.ep, layout.vpp)
        check_config(plan.config, "plan")
    except MegarlError as error:
        return Candidate(plan, None, str(error).removeprefix("plan: "))
    quickest: Candidate | None = None
    for choice in _list_choices(plan):
        made = estimate(choice, lengths)
        if quickest is None or quickest.estimate is None or made.total < quickest.estimate.total:
            quickest = Candidate(choice, made, None)
    if quickest is None:
        frugal_keys: dict[str, Any] = {"model__recompute": "full", "model__recompute_layers": None}
        frugal_keys |= {"model__recompute_modules": ("attention",), "residency__keep": ()}
        frugal_plan = replace_keys(plan, **frugal_keys, update__tokens_per_micro_batch=plan.longest)
        problem = find_problem(frugal_plan) or f"fits, but leaves less than {ROOM:.0%} of each GPU free"
        return Candidate(frugal_plan, None, problem)
    engine_plans = [replace_keys(quickest.plan, rollout__engine_tp=tp) for tp in engines]
    fitting_plan = next((made for made in engine_plans if find_problem(made) is None), None)
    if fitting_plan is None:
        return Candidate(engine_plans[0], None, find_problem(engine_plans[0]))
    return Candidate(fitting_plan, estimate(fitting_plan, lengths), None)


def _list_choices(plan: PlanInputs) -> Iterator[PlanInputs]:
    """Yield plans: each token budget with the quickest recomputation that fits."""
    plan = replace_keys(plan, residency__keep=())
    phases = [phase for phase in plan.phases if phase.model is not None]
    layers = plan.actor.sizes.layers // (plan.layout.pp * plan.layout.vpp)

    def fits(made: PlanInputs) -> bool:
        return all(need.total <= plan.device.memory * (1 - ROOM) for need in gpu_needs(made, phases=phases))

    longest = -(-plan.longest // 1024) * 1024
    frugal_keys = {"model__recompute": "full", "model__recompute_layers": None}
    if not fits(replace_keys(plan, **frugal_keys, update__tokens_per_micro_batch=longest)):
        return
    for budget in (longest, 2 * longest):
        given: dict[str, Any] = {"update__tokens_per_micro_batch": budget, "model__recompute_layers": None}
        given["model__recompute_modules"] = ("attention",)
        made = replace_keys(plan, **given, model__recompute="none")
        if fits(made):
            yield made  # recomputation takes longer
        else:
            for modules in [("attention",), *([] if plan.actor.sizes.experts else [("mlp",)])]:
                selective_keys = {"model__recompute": "selective", "model__recompute_modules": modules}
                if fits(made := replace_keys(plan, **{**given, **selective_keys})):
                    yield made
            given["model__recompute"] = "full"

            def make_plan(count: int, given: dict[str, Any] = given) -> PlanInputs:
                recomputed_layers = None if count == layers else count
                return replace_keys(plan, **{**given, "model__recompute_layers": recomputed_layers})

            counts = range(1, layers + 1)
            fewest_layers = 1 + bisect_left(counts, True, key=lambda count: fits(make_plan(count)))
            if fewest_layers <= layers:
                yield make_plan(fewest_layers)


def _keep_groups(found: Candidate, lengths: Lengths) -> Candidate:
    if found.estimate is None or found.plan.config.residency.offload is False:
        return found
    for group in (name for name in KEPT if name in found.plan.groups):
        keep = (*found.plan.config.residency.keep, group)
        plan = replace_keys(found.plan, residency__keep=keep)
        if find_problem(plan, ROOM * plan.device.memory) is None:
            step_estimate = estimate(plan, lengths)
            if found.estimate is None or step_estimate.total < found.estimate.total:
                found = Candidate(plan, step_estimate, None)
    return found


def list_overrides(best: PlanInputs, now: PlanInputs) -> dict[str, Any]:
    """Return the chosen keys that differ from defaults or `now`."""
    overrides = {}
    for dotted in CHOSEN:
        section, key = dotted.split(".")
        value, current_value = (getattr(getattr(p.config, section), key) for p in (best, now))
        default = type(getattr(best.config, section)).model_fields[key].default
        if value != default or value != current_value:
            overrides[dotted] = list(value) if isinstance(value, tuple) else value
    return overrides


def drop_unproven(found: list[Candidate], config: ParallelConfig) -> list[Candidate]:
    """Drop context parallelism and virtual stages, unproven here, unless configured."""
    return [
        candidate
        for candidate in found
        if candidate.plan.layout.cp in (1, config.cp) and candidate.plan.layout.vpp in (1, config.vpp)
    ]


def pick_best(found: list[Candidate]) -> Candidate:
    """Return the first layout. Raises ConfigError with the nearest if none fits."""
    if found and found[0].estimate is not None:
        return found[0]
    device, world = found[0].plan.device, found[0].plan.layout.world
    divisible_candidates = [
        candidate
        for candidate in found
        if candidate.problem and not candidate.problem.startswith("parallel.")
    ]
    if not divisible_candidates:
        raise ConfigError(f"parallel: no layout of {world} {device.name} fits: {found[0].problem}")
    nearest = max(divisible_candidates, key=lambda candidate: candidate.free)
    problem = nearest.problem
    if nearest.free < 0:
        change = "use more GPUs, some with more memory (cluster.gpu), or lower rollout.max_response_tokens"
        problem = f"lacks {-nearest.free / GIB:.1f} GiB on each GPU ({change})"
    name = describe_layout(nearest.plan.layout)
    raise ConfigError(f"parallel: no layout of {world} {device.name} fits; the nearest, {name}: {problem}")


def describe_layout(layout: Layout) -> str:
    keys = ("tp", "pp", *(name for name in ("vpp", "cp", "ep") if getattr(layout, name) > 1), "dp")
    return ", ".join(f"{name} {getattr(layout, name)}" for name in keys)
