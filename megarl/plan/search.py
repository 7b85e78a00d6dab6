"""Choose the layout of a run: the quickest by the estimate of those that fit.

Memory first, as it is the quicker question: of each layout the recomputation and the token budget, the
engines, and what stays on the GPU are chosen one after the other, each the quickest that leaves room.
"""

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

# Keys that are chosen, in the order in which they are printed.
CHOSEN = (
    *(f"parallel.{name}" for name in ("tp", "pp", "vpp", "cp", "ep", "dp")),
    *("rollout.engine_tp", "model.recompute", "model.recompute_layers", "model.recompute_modules"),
    *("update.tokens_per_micro_batch", "residency.keep"),
)
# Groups that may stay on the GPU, those that travel furthest first; the engine's make room for all others.
KEPT = tuple(
    f"{model}.{part}"
    for part in ("optimizer", "weights")
    for model in ("critic", "actor", "reference", "reward", "teacher")
)
VIRTUAL = (1, 2, 4)  # stages of a pipeline rank that are tried
# Of a GPU's memory that a choice leaves free, as some of the plan is estimated (docs/planning.md).
ROOM = 0.06
LOOKED_AT = 8  # best layouts for which residency.keep is tried


class Found(NamedTuple):
    """A layout that was tried, with the best of the other choices: its estimate if it fits, else why not."""

    plan: PlanInputs
    estimate: Estimate | None
    problem: str | None

    @property
    def free(self) -> float:
        """Return the bytes of each GPU that no phase needs."""
        return self.plan.device.memory - max(need.total for need in gpu_needs(self.plan))


def replace_keys(plan: PlanInputs, **keys: Any) -> PlanInputs:
    """Return the plan of the same run with other values of these keys; __ stands for the dot. Values are not
    checked."""
    config, sections = plan.config, dict[str, dict[str, Any]]()
    for dotted, value in keys.items():
        section, _, key = dotted.partition("__")
        sections.setdefault(section, {})[key] = value
    changed = {name: getattr(config, name).model_copy(update=own) for name, own in sections.items()}
    return replace(plan, config=config.model_copy(update=changed))


def search(plan: PlanInputs, lengths: Lengths) -> list[Found]:
    """Try every layout of as many GPUs as the plan has. Those that fit come first, the quickest first; of the
    others those with the least parallelism first."""
    config, world = plan.config, plan.layout.world
    node = min(config.cluster.gpus_per_node, world)
    engines = _powers(node)
    if not config.rollout.capabilities.sharded or not config.has_engine:
        engines = [config.rollout.engine_tp]
    asleep = [replace_keys(plan, rollout__engine_tp=tp) for tp in engines]
    if config.has_engine:  # the quickest engine first; it is not the layout's to say how quick it is
        asleep = sorted(
            (p for p in asleep if _possible(p)),
            key=lambda p: rollout_seconds(p, lengths),
        )
    engines = [p.config.rollout.engine_tp for p in asleep] or engines
    found = [_judge(made, engines, lengths) for made in _layouts(plan, node)]

    def order(one: Found) -> tuple[bool, float, int, int]:
        layout, seconds = one.plan.layout, one.estimate.total if one.estimate else 0.0
        return one.estimate is None, seconds, layout.world // layout.dp, layout.tp

    found.sort(key=order)
    # What stays on the GPU saves the way to the host and back: worth looking at for the best alone.
    best = [_kept(one, lengths) for one in found[:LOOKED_AT]]
    return sorted(best, key=order) + found[LOOKED_AT:]


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _allowed(key: str, sizes: list[int] | tuple[int, ...]) -> list[int]:
    """Return those of `sizes` that the schema allows."""

    def fits(size: int) -> bool:
        try:
            ParallelConfig.model_validate({key: size})
        except ValidationError:
            return False
        return True

    return [size for size in sizes if fits(size)]


def _layouts(plan: PlanInputs, node: int) -> Iterator[PlanInputs]:
    world, sizes = plan.layout.world, plan.actor.sizes
    experts = [n for n in _powers(world) if sizes.experts % n == 0] if sizes.experts else [1]
    for tp in _powers(node):
        for cp in _allowed("cp", _powers(node)):
            for pp in range(1, world // tp + 1):
                if world % (tp * pp * cp) or sizes.layers % pp:
                    continue
                stage = world // pp
                for vpp in _allowed("vpp", VIRTUAL) if pp > 1 else [1]:
                    for ep in experts:
                        if sizes.layers % (pp * vpp) == 0 and stage % ep == 0:
                            layout = {"tp": tp, "pp": pp, "cp": cp, "vpp": vpp, "ep": ep}
                            layout["dp"] = stage // tp // cp
                            yield replace_keys(plan, **{f"parallel__{k}": v for k, v in layout.items()})


def _possible(plan: PlanInputs) -> bool:
    """Return whether `megarl train` takes the engine: it divides the ranks, the model and a node's GPUs."""
    try:
        engine_ranks(plan.config, plan.layout.world)
        _ = engine_weight_bytes(plan)
    except MegarlError:
        return False
    return plan.config.cluster.gpus_per_node % plan.engine_tp == 0


def _judge(plan: PlanInputs, engines: list[int], lengths: Lengths) -> Found:
    """Return a layout with the quickest of the other choices that fit."""
    layout = plan.layout
    try:
        for shape in (plan.actor, plan.critic, plan.shape("reward"), *plan.teachers):
            check_layout(shape.config, layout.tp, layout.pp, layout.ep, layout.vpp)
        check_config(plan.config, "plan")
    except MegarlError as error:
        return Found(plan, None, str(error).removeprefix("plan: "))
    quickest: Found | None = None
    for choice in _choices(plan):
        made = estimate(choice, lengths)
        if quickest is None or quickest.estimate is None or made.total < quickest.estimate.total:
            quickest = Found(choice, made, None)
    if quickest is None:
        frugal: dict[str, Any] = {"model__recompute": "full", "model__recompute_layers": None}
        frugal |= {"model__recompute_modules": ("attention",), "residency__keep": ()}
        least = replace_keys(plan, **frugal, update__tokens_per_micro_batch=plan.longest)
        return Found(
            least, None, find_problem(least) or f"fits, but leaves less than {ROOM:.0%} of each GPU free"
        )
    tried = [replace_keys(quickest.plan, rollout__engine_tp=tp) for tp in engines]
    fitting = next((made for made in tried if find_problem(made) is None), None)
    if fitting is None:
        return Found(tried[0], None, find_problem(tried[0]))
    return Found(fitting, estimate(fitting, lengths), None)


def _choices(plan: PlanInputs) -> Iterator[PlanInputs]:
    """Yield the plan with each budget, and the recomputation that costs least of those with which all phases
    of training fit."""
    plan = replace_keys(plan, residency__keep=())
    phases = [phase for phase in plan.phases if phase.model is not None]
    layers = plan.actor.sizes.layers // (plan.layout.pp * plan.layout.vpp)

    def fits(made: PlanInputs) -> bool:
        return all(need.total <= plan.device.memory * (1 - ROOM) for need in gpu_needs(made, phases=phases))

    longest = -(-plan.longest // 1024) * 1024
    frugal = {"model__recompute": "full", "model__recompute_layers": None}
    if not fits(replace_keys(plan, **frugal, update__tokens_per_micro_batch=longest)):
        return
    for budget in (longest, 2 * longest):
        given: dict[str, Any] = {"update__tokens_per_micro_batch": budget, "model__recompute_layers": None}
        given["model__recompute_modules"] = ("attention",)
        made = replace_keys(plan, **given, model__recompute="none")
        if fits(made):
            yield made  # any other takes longer
        else:
            for modules in [("attention",), *([] if plan.actor.sizes.experts else [("mlp",)])]:
                again = {"model__recompute": "selective", "model__recompute_modules": modules}
                if fits(made := replace_keys(plan, **{**given, **again})):
                    yield made
            given["model__recompute"] = "full"

            def of(count: int, given: dict[str, Any] = given) -> PlanInputs:
                return replace_keys(
                    plan, **{**given, "model__recompute_layers": None if count == layers else count}
                )

            fewest = 1 + bisect_left(range(1, layers + 1), True, key=lambda count: fits(of(count)))
            if fewest <= layers:
                yield of(fewest)


def _kept(found: Found, lengths: Lengths) -> Found:
    """Return the layout with those groups left on the GPU that have room and save time."""
    if found.estimate is None or found.plan.config.residency.offload is False:
        return found
    for group in (name for name in KEPT if name in found.plan.groups):
        keep = (*found.plan.config.residency.keep, group)
        made = replace_keys(found.plan, residency__keep=keep)
        if find_problem(made, ROOM * made.device.memory) is None:
            seconds = estimate(made, lengths)
            if found.estimate is None or seconds.total < found.estimate.total:
                found = Found(made, seconds, None)
    return found


def overrides(best: PlanInputs, now: PlanInputs) -> dict[str, Any]:
    """Return the keys of `best` that are not at their defaults or not as the configuration has them."""
    chosen = {}
    for dotted in CHOSEN:
        section, key = dotted.split(".")
        value, before = (getattr(getattr(p.config, section), key) for p in (best, now))
        default = type(getattr(best.config, section)).model_fields[key].default
        if value != default or value != before:
            chosen[dotted] = list(value) if isinstance(value, tuple) else value
    return chosen


def proven(found: list[Found], config: ParallelConfig) -> list[Found]:
    """Leave out the layouts with context parallelism or virtual stages, which have not run under megarl on a
    GPU yet, unless the configuration has them."""
    return [
        one
        for one in found
        if one.plan.layout.cp in (1, config.cp) and one.plan.layout.vpp in (1, config.vpp)
    ]


def best_of(found: list[Found]) -> Found:
    """Return the first. Raises ConfigError that names the nearest where none fits."""
    if found and found[0].estimate is not None:
        return found[0]
    device, world = found[0].plan.device, found[0].plan.layout.world
    divisible = [one for one in found if one.problem and not one.problem.startswith("parallel.")]
    if not divisible:
        raise ConfigError(f"parallel: no layout of {world} {device.name} fits: {found[0].problem}")
    nearest = max(divisible, key=lambda one: one.free)
    problem = nearest.problem
    if nearest.free < 0:
        change = "use more GPUs, some with more memory (cluster.gpu), or lower rollout.max_response_tokens"
        problem = f"lacks {-nearest.free / GIB:.1f} GiB on each GPU ({change})"
    name = name_of(nearest.plan.layout)
    raise ConfigError(f"parallel: no layout of {world} {device.name} fits; the nearest, {name}: {problem}")


def name_of(layout: Layout) -> str:
    """Return a layout in words: tp 4, pp 2, dp 16; others where they are not 1."""
    shown = ("tp", "pp", *(name for name in ("vpp", "cp", "ep") if getattr(layout, name) > 1), "dp")
    return ", ".join(f"{name} {getattr(layout, name)}" for name in shown)
