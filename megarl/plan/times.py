"""How long a step takes, by its parts: arithmetic on data-sheet figures with efficiencies that are our estimates. For comparing
layouts, and for knowing minutes from hours; not measured on a GPU.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import NamedTuple

from megarl.config.errors import MegarlError
from megarl.plan.memory import Plan, with_layout
from megarl.weights.layout import check_layout

TRAINING = 0.50  # of peak FLOP/s, communication not counted
DECODING = 0.60  # of the memory's speed
PREFILL = 0.40
MESSAGE = 10e-6  # seconds of a small all-reduce within a node, of which a layer has two
LINKS = 0.7  # of a link's speed
GROUPS_KEPT = 0.5  # share of groups that dynamic sampling keeps
QUANTILES = 64


@dataclass(frozen=True)
class Lengths:
    """Response lengths: log-normal, cut at the limit. mean: of what is sampled, cut ones included; spread: sigma of the logarithm."""

    mean: float
    longest: int
    spread: float = 0.6

    def quantiles(self, count: int = QUANTILES) -> list[float]:
        """Lengths at the middle of `count` equal shares, shortest first."""
        normal = NormalDist()
        shape = [math.exp(self.spread * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
        low, high = 0.0, float(self.longest) * 100
        for _ in range(60):  # the scale at which the cut ones have the wanted mean
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if fmean(min(middle * s, self.longest) for s in shape) < self.mean
                else (low, middle)
            )
        return [min(high * s, self.longest) for s in shape]


@dataclass(frozen=True)
class Estimate:
    """Seconds of each part of a step, and what they stand on."""

    parts: dict[str, float]
    concurrency: float  # responses that an engine decodes at once, on average while it is full
    tokens: float  # of a step

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def default_lengths(plan: Plan) -> Lengths:
    """A third of the limit on average."""
    longest = plan.config.rollout.max_response_tokens
    return Lengths(longest / 3, longest)


def estimate(plan: Plan, lengths: Lengths) -> Estimate:
    """A step's time on this layout."""
    config, device, layout = plan.config, plan.device, plan.layout
    prompt = config.data.max_prompt_tokens / 4
    quantiles = lengths.quantiles()
    tokens = plan.step_tokens(prompt + fmean(quantiles))
    parts: dict[str, float] = {}
    concurrency = 0.0
    if config.recipe != "sft":
        parts["rollout"], concurrency = _rollout(plan, prompt, quantiles)
    packs = max(1.0, tokens / config.update.tokens_per_micro_batch / layout.dp)
    bubble = 1 + (layout.pp - 1) / max(packs / _updates(plan), 1.0)
    speed = device.tflops * 1e12 * TRAINING * layout.world
    square = fmean(length + prompt for length in quantiles)
    for phase in plan.phases:
        passes = {
            "old_logprobs": 1,
            "reference_logprobs": 1,
            "values": 1,
            "critic_update": 3,
            "actor_update": 3,
            "supervised_update": 3,
        }
        if phase.name not in passes:
            continue
        count = passes[phase.name] + (
            1 if config.model.recompute == "full" and passes[phase.name] == 3 else 0
        )
        model = plan.shape("critic" if "critic" in phase.name or phase.name == "values" else "actor")
        epochs = {"critic_update": config.critic.epochs, "actor_update": config.update.epochs}.get(
            phase.name, 1
        )
        again = count if passes[phase.name] == 3 else 1
        # Two FLOPs a parameter and token in a forward pass, and causal attention over half of the square.
        flops = tokens * (2 * model.active + 2 * square * model.sizes.layers * model.sizes.q)
        talk = again * tokens / layout.dp * _tensor_parallel(plan)
        parts[phase.name] = epochs * (count * flops / speed + talk) * bubble
        if passes[phase.name] == 3:
            name = "critic" if "critic" in phase.name else "actor"
            parts[phase.name] += epochs * _updates(plan) * _data_parallel(plan, name)
    if config.recipe != "sft":
        parts["weight_transfer"] = _transfer(plan)
    moved = _moved(plan)
    if moved:
        parts["on and off the device"] = moved / (device.host_speed * 1e9 * LINKS)
    return Estimate(parts, concurrency, tokens)


def _updates(plan: Plan) -> int:
    """Optimizer steps of a rollout: each begins and ends a pipeline of its own."""
    config = plan.config
    return 1 if config.recipe == "sft" else max(1, config.responses // config.update.mini_batch)


def _tensor_parallel(plan: Plan) -> float:
    """Seconds a token of one pass through a stage: each layer gathers and scatters the hidden states twice, within a node."""
    tp, sizes = plan.layout.tp, plan.actor.sizes
    volume = 4 * sizes.layers / plan.layout.pp * sizes.hidden * plan.actor.itemsize * (tp - 1) / tp
    return volume / (plan.config.cluster.node_speed * 1e9 * LINKS)


def _data_parallel(plan: Plan, model: str) -> float:
    """Seconds of one update's exchange between replicas: float32 gradients out, weights in. Nothing of it is hidden."""
    layout, cluster = plan.layout, plan.config.cluster
    held = max(plan.held(model, stage).all for stage in range(layout.pp))
    speed = cluster.node_speed if layout.tp * layout.dp <= cluster.gpus_per_node else cluster.network_speed
    return held * (4 + plan.actor.itemsize) * (layout.dp - 1) / layout.dp / (speed * 1e9 * LINKS)


def _transfer(plan: Plan) -> float:
    """Every GPU gets its engine's shard: from its own node where that holds all of the model, else between nodes."""
    cluster, layout = plan.config.cluster, plan.layout
    within = layout.tp * layout.pp <= cluster.gpus_per_node
    return plan.engine_weights / ((cluster.node_speed if within else cluster.network_speed) * 1e9 * LINKS)


def _moved(plan: Plan) -> float:
    """Bytes that a GPU's tensor groups travel in a step, both ways; gradients and engines come back empty."""
    sets = [phase.on_gpu | plan.keep for phase in plan.phases]
    total = 0.0
    for before, after in zip([sets[-1], *sets[:-1]], sets, strict=True):
        for name in before ^ after:
            if not name.startswith("engine.") and not name.endswith(".gradients"):
                total += max(plan.group(name, stage) for stage in range(plan.layout.pp))
    return total


def _rollout(plan: Plan, prompt: float, quantiles: list[float]) -> tuple[float, float]:
    """(seconds, responses decoded at once while there are enough). Each engine takes the next response when one is done; a step of all
    of them reads the weights once and each one's keys and values."""
    config, device, shape = plan.config, plan.device, plan.actor
    whole = config.rollout.engine == "transformers"
    tp = 1 if whole else config.rollout.engine_tp
    engines = plan.layout.world // tp
    sampled = config.responses / (GROUPS_KEPT if config.rollout.dynamic_sampling.enabled else 1.0)
    each = max(1, round(sampled / engines))
    mean = fmean(quantiles) / 2 + prompt
    at_once = max(1, min(int(plan.cache_tokens / mean), config.rollout.max_batch if whole else each))
    # The step of a quantile's length comes as often as its share; the longest are spread over the others.
    waiting = [quantiles[(i * 37) % len(quantiles)] for i in range(each)]
    running: list[float] = []
    now = seconds = 0.0  # in decoding steps, and on the clock
    memory, flops = device.memory_speed * 1e9 * DECODING, device.tflops * 1e12 * PREFILL * tp
    while waiting or running:
        while waiting and len(running) < at_once:
            heapq.heappush(running, now + waiting.pop())
        until = heapq.heappop(running)
        count = len(running) + 1
        read = plan.engine_weights + count * mean * shape.cache_bytes(tp)
        step = max(read / memory, count * 2 * shape.active / flops) + 2 * shape.sizes.layers * MESSAGE * (
            tp > 1
        )
        seconds += (until - now) * step
        now = until
    return seconds + each * prompt * 2 * shape.active / flops, float(at_once)


class Found(NamedTuple):
    """A layout that was tried: its estimate if it fits, else why not."""

    plan: Plan
    estimate: Estimate | None
    problem: str | None


def search(plan: Plan, lengths: Lengths) -> list[Found]:
    """Every TP x PP x DP x engine TP of as many GPUs as the plan has. Those that fit come first, the quickest first; of the others those
    with the least parallelism first."""
    found = [_judge(candidate, lengths) for candidate in _candidates(plan)]
    found.sort(
        key=lambda one: (one.estimate is None, one.estimate.total if one.estimate else 0.0, _order(one.plan))
    )
    return found


def _candidates(plan: Plan) -> Iterator[Plan]:
    world, node = plan.layout.world, min(plan.config.cluster.gpus_per_node, plan.layout.world)
    engines = (
        [1] if plan.config.rollout.engine == "transformers" else [n for n in _powers(node) if world % n == 0]
    )
    for tp in _powers(node):
        for pp in (
            n for n in range(1, world // tp + 1) if world % (tp * n) == 0 and plan.actor.sizes.layers % n == 0
        ):
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
