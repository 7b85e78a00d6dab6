"""How long a step takes, by its parts: data-sheet figures, with efficiencies that are our estimates.

For comparing layouts, and for knowing minutes from hours; not measured on a GPU.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import NamedTuple

from megarl.config.errors import MegarlError
from megarl.parallel.layout import Layout
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
    """Response lengths: log-normal, cut at the limit.
    mean: of what is sampled, cut ones included; longest: the limit; spread: sigma of the logarithm."""

    mean: float
    longest: int
    spread: float = 0.6

    def quantiles(self) -> list[float]:
        """Return the lengths at the middle of QUANTILES equal shares, shortest first."""
        normal = NormalDist()
        shape = [math.exp(self.spread * normal.inv_cdf((i + 0.5) / QUANTILES)) for i in range(QUANTILES)]
        low, high = 0.0, float(self.longest) * 100
        for _ in range(60):  # the scale at which the cut ones have the wanted mean
            middle = (low + high) / 2
            short = fmean(min(middle * s, self.longest) for s in shape) < self.mean
            low, high = (middle, high) if short else (low, middle)
        return [min(high * s, self.longest) for s in shape]


@dataclass(frozen=True)
class Estimate:
    """Seconds of each part of a step, and its tokens."""

    parts: dict[str, float]
    tokens: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def default_lengths(plan: Plan) -> Lengths:
    """Return lengths of a third of the limit on average."""
    longest = plan.config.rollout.max_response_tokens
    return Lengths(longest / 3, longest)


def estimate(plan: Plan, lengths: Lengths) -> Estimate:
    """Estimate a step's time on this layout."""
    config, device, layout, cluster = plan.config, plan.device, plan.layout, plan.config.cluster
    prompt = config.data.max_prompt_tokens / 4
    quantiles = lengths.quantiles()
    tokens = plan.step_tokens(prompt + fmean(quantiles))
    parts: dict[str, float] = {}
    if config.recipe != "sft":
        parts["rollout"] = _rollout(plan, prompt, quantiles)
    # Each optimizer step begins and ends a pipeline of its own.
    updates = 1 if config.recipe == "sft" else max(1, config.responses // config.update.mini_batch)
    packs = max(1.0, tokens / config.update.tokens_per_micro_batch / layout.dp)
    bubble = 1 + (layout.pp - 1) / (max(packs / updates, 1.0) * layout.vpp)
    speed = device.tflops * 1e12 * TRAINING * layout.world
    square = fmean(length + prompt for length in quantiles)
    # One pass through a stage: each layer gathers and scatters the hidden states twice, within a node.
    tp, sizes, itemsize = layout.tp, plan.actor.sizes, plan.actor.itemsize
    volume = 4 * sizes.layers / layout.pp * sizes.hidden * itemsize * (tp - 1) / tp
    talk_per_token = volume / (cluster.node_speed * 1e9 * LINKS)
    # One update: float32 gradients between replicas, and weights back. Nothing of it is hidden.
    replicas = cluster.node_speed if layout.tp * layout.dp <= cluster.gpus_per_node else cluster.network_speed
    for phase in plan.phases:
        if phase.model is None:
            continue
        model, passes = plan.shape(phase.model), 1.0
        if phase.updates_weights:
            # Forward, gradients of activations, and of the weights that are not frozen; forward again.
            trained = plan.trained_of(phase.model, Layout(), 0).all
            passes = 2 + trained / model.held(Layout(), 0, critic=phase.model == "critic").all
            passes += config.model.recompute == "full"
        # Two FLOPs a parameter and token in a forward pass, and causal attention over half of the square.
        flops = tokens * (2 * model.active + 2 * square * model.sizes.layers * model.sizes.q)
        talk = passes * tokens / layout.dp * talk_per_token
        epochs = {"critic_update": config.critic.epochs, "actor_update": config.update.epochs}.get(
            phase.name, 1
        )
        parts[phase.name] = epochs * (passes * flops / speed + talk) * bubble
        if phase.updates_weights:
            stages = range(layout.pp)
            held = max(plan.trained_of(phase.model, layout, stage).all for stage in stages)
            exchanged = held * (4 + itemsize) * (layout.dp - 1) / layout.dp
            parts[phase.name] += epochs * updates * (exchanged / (replicas * 1e9 * LINKS))
    if config.recipe != "sft":
        # Every GPU gets its engine's shard: from its own node where that holds all of the model.
        within = layout.tp * layout.pp <= cluster.gpus_per_node
        link = cluster.node_speed if within else cluster.network_speed
        parts["weight_transfer"] = plan.transferred / (link * 1e9 * LINKS)
    # Bytes that a GPU's tensor groups travel in a step, both ways; gradients and engines come back empty.
    moved = 0.0
    sets = [phase.on_gpu | plan.keep for phase in plan.phases]
    for before, after in zip([sets[-1], *sets[:-1]], sets, strict=True):
        for name in sorted(before ^ after):
            if not name.startswith("engine.") and not name.endswith(".gradients"):
                moved += max(plan.group(name, stage) for stage in range(layout.pp))
    if moved:
        parts["on and off the device"] = moved / (device.host_speed * 1e9 * LINKS)
    return Estimate(parts, tokens)


def _rollout(plan: Plan, prompt: float, quantiles: list[float]) -> float:
    """Return the seconds in which all engines are done. Each takes the next response when one is done; a
    decoding step of all of them reads the weights once, and each one's keys and values."""
    config, device, shape, tp = plan.config, plan.device, plan.actor, plan.engine_tp
    engines = plan.layout.world // tp
    sampled = config.responses / (GROUPS_KEPT if config.rollout.dynamic_sampling.enabled else 1.0)
    each = max(1, round(sampled / engines))
    mean = fmean(quantiles) / 2 + prompt
    limit = config.rollout.max_batch if config.rollout.engine == "transformers" else each
    at_once = max(1, min(int(plan.cache_tokens / mean), limit))
    # The step of a quantile's length comes as often as its share; the longest are spread over the others.
    waiting = [quantiles[(i * 37) % len(quantiles)] for i in range(each)]
    running: list[float] = []
    now = seconds = 0.0  # in decoding steps, and on the clock
    memory, flops = device.memory_speed * 1e9 * DECODING, device.tflops * 1e12 * PREFILL * tp
    messages = 2 * shape.sizes.layers * MESSAGE * (tp > 1)
    while waiting or running:
        while waiting and len(running) < at_once:
            heapq.heappush(running, now + waiting.pop())
        until = heapq.heappop(running)
        count = len(running) + 1
        read = plan.engine_weights + count * mean * shape.cache_bytes(tp)
        step = max(read / memory, count * 2 * shape.active / flops) + messages
        seconds += (until - now) * step
        now = until
    return seconds + each * prompt * 2 * shape.active / flops


class Found(NamedTuple):
    """A layout that was tried: its estimate if it fits, else why not."""

    plan: Plan
    estimate: Estimate | None
    problem: str | None


def search(plan: Plan, lengths: Lengths) -> list[Found]:
    """Try every TP x PP x DP x engine TP of as many GPUs as the plan has. Those that fit come first, the
    quickest first; of the others those with the least parallelism first."""
    world, node = plan.layout.world, min(plan.config.cluster.gpus_per_node, plan.layout.world)
    powers = [2**i for i in range(node.bit_length()) if 2**i <= node]
    engines = [n for n in powers if world % n == 0]
    if plan.config.rollout.engine == "transformers":
        engines = [1]
    found = []
    for tp in powers:
        for pp in range(1, world // tp + 1):
            if world % (tp * pp) == 0 and plan.actor.sizes.layers % pp == 0:
                layouts = [with_layout(plan, tp, pp, world // (tp * pp), engine_tp) for engine_tp in engines]
                found += [_judge(layout, lengths) for layout in layouts]

    def order(one: Found) -> tuple[bool, float, int, int, int]:
        layout, seconds = one.plan.layout, one.estimate.total if one.estimate else 0.0
        parallelism = (layout.tp * layout.pp, layout.tp, one.plan.engine_tp)
        return one.estimate is None, seconds, *parallelism

    return sorted(found, key=order)


def _judge(plan: Plan, lengths: Lengths) -> Found:
    try:
        for shape in (plan.actor, plan.critic, plan.shape("reward")):
            check_layout(shape.config, plan.layout.tp, plan.layout.pp, plan.layout.ep, plan.layout.vpp)
        problem = plan.problem()
    except (MegarlError, ValueError) as error:
        problem = str(error)
    return Found(plan, None if problem else estimate(plan, lengths), problem)
