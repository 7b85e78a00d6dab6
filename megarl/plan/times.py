"""Estimate a step's seconds from data sheets and the shares that runs reach."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist, fmean
from typing import NamedTuple

from megarl.config.phases import Phase
from megarl.parallel.layout import Layout
from megarl.plan.engines import engine_weight_bytes, kv_cache_tokens, transferred_bytes
from megarl.plan.inputs import PlanInputs
from megarl.plan.tensors import count_trained, group_bytes, model_activations

# Fitted to published step times (docs/planning.md):
MATMUL = 0.65  # of peak FLOP/s, wide matrices
NARROW = 512  # columns or rows that reach half of it
DECODE_STEP = 4e-3  # host seconds of a decoding step
DECODE_SEQUENCE = 80e-6  # host seconds per sequence
DECODE_LAYER = 60e-6  # seconds of a layer's kernel launches
DISPATCH = 2e-3  # seconds until the host has experts' token counts
# Measured against bf16, casts included (docs/planning.md). Other recipes count as bf16.
FP8_SPEEDUP = {"tensorwise": 1.55, "delayed": 1.55}
# Our estimates:
READING = 0.75  # of the memory's speed
PREFILL = 0.40  # of peak FLOP/s
LINKS = 0.7  # of a link's speed
MESSAGE = 15e-6  # seconds of latency of a collective in a node
KEPT_GROUPS = 0.5  # share of groups that dynamic sampling keeps
QUANTILES = 64
# Parts of a step that are not training.
ENGINE_PARTS = ("rollout", "prefill_again", "weight_transfer")


class Window(NamedTuple):
    """A part of a response that one step generates."""

    prefix_tokens: float
    new_tokens: float
    is_last: bool

    @property
    def length(self) -> float:
        return self.prefix_tokens + self.new_tokens


def split_into_windows(length: float, window: int) -> list[Window]:
    size = window or length
    count = max(1, math.ceil(length / size))
    return [Window(i * size, min(size, length - i * size), i == count - 1) for i in range(count)]


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens: log-normal, cut at the limit.

    mean      of sampled tokens, after the cut
    longest   the limit
    prompt    mean of a prompt
    spread    sigma of the logarithm
    turns     equal parts of a response
    observed  tokens of a tool or environment between turns
    idle      seconds between turns
    window    most tokens of a response in a step; 0: all"""

    mean: float
    longest: int
    prompt: float
    spread: float = 0.6
    turns: int = 1
    observed: float = 0.0
    idle: float = 0.0
    window: int = 0

    @property
    def all_observed(self) -> float:
        return (self.turns - 1) * self.observed

    def count_prefilled(self, *, cached: bool) -> float:
        """Count the prefilled tokens of a mean response. cached: the KV cache outlives a turn."""
        if cached:
            return self.prompt + self.all_observed
        added = self.mean / self.turns + self.observed
        return sum(self.prompt + turn * added for turn in range(self.turns))

    @cached_property
    def quantiles(self) -> tuple[float, ...]:
        """Return QUANTILES equally frequent lengths, shortest first."""
        normal = NormalDist()
        relative_lengths = [
            math.exp(self.spread * normal.inv_cdf((i + 0.5) / QUANTILES)) for i in range(QUANTILES)
        ]
        low, high = 0.0, float(self.longest) * 100
        for _ in range(60):  # bisect the scale for the mean after the cut
            scale = (low + high) / 2
            is_too_short = fmean(min(scale * s, self.longest) for s in relative_lengths) < self.mean
            low, high = (scale, high) if is_too_short else (low, scale)
        return tuple(min(high * s, self.longest) for s in relative_lengths)

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """Return a long run's windows, equally frequent in a step."""
        return tuple(w for length in self.quantiles for w in split_into_windows(length, self.window))

    @cached_property
    def sequences(self) -> tuple[list[float], list[float]]:
        """Return lengths of all sequences, and of those that finish."""
        context = self.prompt + self.all_observed
        lengths = [(window.length + context, window.is_last) for window in self.windows]
        return [length for length, _ in lengths], [length for length, is_last in lengths if is_last]

    @cached_property
    def mean_prefix(self) -> float:
        return fmean(window.prefix_tokens for window in self.windows)

    @cached_property
    def mean_running(self) -> float:
        return fmean(window.prefix_tokens + window.new_tokens / 2 for window in self.windows)

    @cached_property
    def mean_in_flight(self) -> float:
        """Return the mean tokens of a response at any time: long ones run longer."""
        return fmean(length**2 for length in self.quantiles) / (2 * fmean(self.quantiles))

    @property
    def median(self) -> float:
        return (self.quantiles[QUANTILES // 2 - 1] * self.quantiles[QUANTILES // 2]) ** 0.5


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step by part. asynchronous: rollout and prefill_again overlap training."""

    parts: dict[str, float]
    tokens: float
    asynchronous: bool = False

    @property
    def training(self) -> float:
        return sum(s for name, s in self.parts.items() if name not in ENGINE_PARTS)

    @property
    def total(self) -> float:
        if self.asynchronous:
            generation = self.parts["rollout"] + self.parts.get("prefill_again", 0.0)
            return max(generation, self.training) + self.parts["weight_transfer"]
        return sum(self.parts.values())


def default_lengths(plan: PlanInputs) -> Lengths:
    """Assume a third of the limit for responses, a quarter for prompts.

    Episodes have a quarter of their turns, a third of observations' room, a second per tool call."""
    rollout, prompt = plan.config.rollout, plan.config.data.max_prompt_tokens / 4
    longest = rollout.max_response_tokens
    lengths = Lengths(longest / 3, longest, prompt, window=rollout.window or 0)
    if not rollout.is_multi_turn:
        return lengths
    turns = max(2, rollout.turns.max // 4)
    observed = (rollout.max_extent - longest) / 3 / (turns - 1)
    return replace(lengths, turns=turns, observed=observed, idle=1.0)


def replace_deviation(lengths: Lengths, deviation: float) -> Lengths:
    """Set the standard deviation before the cut."""
    return replace(lengths, spread=math.sqrt(math.log(1 + (deviation / lengths.mean) ** 2)))


def estimate(plan: PlanInputs, lengths: Lengths) -> Estimate:
    parts: dict[str, float] = {}
    if plan.config.has_engine:
        parts["rollout"] = rollout_seconds(plan, lengths)
    for phase in plan.phases:
        if phase.model is not None:
            parts[phase.name] = _phase_seconds(plan, lengths, phase, phase.model)
    if plan.config.has_engine:
        parts["weight_transfer"] = _transfer_seconds(plan)
        if plan.config.schedule.in_flight in ("retract", "abort"):
            running, context = _count_in_flight(plan, lengths), mean_cached_tokens(lengths, in_flight=True)
            parts["prefill_again"] = running * context * make_decode_cost(plan).prefill
    if offloaded_bytes := _offloaded_bytes(plan):
        parts["on and off the device"] = offloaded_bytes / (plan.device.host_speed * 1e9 * LINKS)
    asynchronous = bool(plan.config.parallel.rollout_ranks and (plan.config.schedule.ahead or plan.in_flight))
    return Estimate(parts, plan.step_tokens(fmean(lengths.sequences[0])), asynchronous)


def _phase_seconds(plan: PlanInputs, lengths: Lengths, phase: Phase, model: str) -> float:
    config, layout, is_update, is_critic = plan.config, plan.layout, phase.updates_weights, model == "critic"
    sequences, finished_sequences = lengths.sequences
    tokens = plan.step_tokens(fmean(sequences))
    if is_critic and config.has_prompt_critic:
        sequences, tokens = [lengths.prompt + 1], plan.step_tokens(lengths.prompt + 1)
    elif is_critic and is_update:
        sequences, tokens = finished_sequences, tokens * sum(finished_sequences) / sum(sequences)
    critics = config.critic.count if is_critic else 1  # one after the other
    epochs = optimizer_steps = 1
    if is_update:
        tokens /= critics  # each learns from its part
        settings = config.critic if is_critic else config.update
        mini_batch = (
            (config.critic.mini_batch or config.update.mini_batch) if is_critic else config.mini_batch
        )
        epochs = settings.epochs if config.has_engine else 1
        optimizer_steps = max(1, config.responses // mini_batch)
    # Each optimizer step drains the pipeline, and waits for the replica with the longest sequence.
    replica_tokens = tokens / optimizer_steps / layout.dp
    imbalance = max(1.0, max(sequences) / replica_tokens)
    # All stages wait for the largest micro-batch.
    budget = config.update.tokens_per_micro_batch
    micro_batches = max(1.0, replica_tokens * imbalance / budget)
    largest_share = min(1.0, max(budget, max(sequences)) / (replica_tokens * imbalance))
    bubble = 1 + (layout.pp - 1) / layout.vpp * largest_share
    seconds = replica_tokens * imbalance * _token_seconds(plan, model, is_update, sequences)
    seconds += micro_batches * _micro_batch_seconds(plan, model, is_update)
    if model == "actor" and is_update and config.algorithm.policy_loss.selector:
        seconds += replica_tokens * imbalance * _token_seconds(plan, model, False, sequences)
        seconds += micro_batches * _micro_batch_seconds(plan, model, False)
    count = critics * epochs * optimizer_steps
    total = count * seconds * bubble
    return _add_optimizer_seconds(plan, model, count, total) if is_update else total


def _link_speed(plan: PlanInputs, ranks: int) -> float:
    """Return bytes/s between `ranks` neighbouring ranks."""
    cluster = plan.config.cluster
    speed = cluster.node_speed if ranks <= cluster.gpus_per_node else cluster.network_speed
    return speed * 1e9 * LINKS


def _add_optimizer_seconds(plan: PlanInputs, model: str, count: int, total: float) -> float:
    """Add optimizer steps' messages, which do not overlap, and Muon's products."""
    layout, shape = plan.layout, plan.shape(model)
    replicas = layout.dp * layout.cp
    params = max(count_trained(plan, model, layout, stage).all for stage in plan.stages)
    sent = params * (plan.gradient_size + shape.itemsize) * (replicas - 1) / replicas
    total += count * sent / _link_speed(plan, layout.stage)
    if model in plan.muon_models:  # tensor-parallel ranks repeat the work
        flops = max(shape.muon_flops(layout, stage) for stage in plan.stages) / replicas
        flops *= plan.optimizer(model).muon.steps
        total += count * flops / (plan.device.tflops * 1e12 * MATMUL)
    return total


def _transfer_seconds(plan: PlanInputs) -> float:
    """Estimate a weight transfer. It stays in a node that has the model, or (disaggregated) all ranks."""
    layout, rollout_ranks = plan.layout, plan.config.parallel.rollout_ranks
    ranks = layout.world + rollout_ranks if rollout_ranks else layout.tp * layout.pp
    return transferred_bytes(plan) * max(1.0, rollout_ranks / layout.world) / _link_speed(plan, ranks)


def _offloaded_bytes(plan: PlanInputs) -> float:
    """Count a GPU's copied bytes in a step. Engines and gradients return empty."""
    copied_bytes = 0.0
    groups_by_phase = [resident | plan.keep for resident in plan.residents]
    for previous_groups, groups in zip(
        [groups_by_phase[-1], *groups_by_phase[:-1]], groups_by_phase, strict=True
    ):
        for name in sorted(previous_groups ^ groups):
            if not name.startswith("engine.") and not name.endswith(".gradients"):
                copied_bytes += max(group_bytes(plan, name, stage, every=True) for stage in plan.stages)
        # A phase ends with the last critic on the GPU, the next starts with the first.
        for name in sorted((previous_groups & groups) - plan.keep) if plan.config.critic.count > 1 else ():
            if name.startswith("critic."):
                copied_bytes += 2 * max(group_bytes(plan, name, stage, every=True) for stage in plan.stages)
    return copied_bytes


def _matmul_seconds(*shapes: tuple[float, float], speed: float) -> float:
    return sum(2 * m * n * (1 + NARROW / min(m, n)) for m, n in shapes) / speed


def _layer_seconds(plan: PlanInputs, model: str, sequences: list[float]) -> tuple[float, float, float]:
    """Return a token's forward seconds in a mean layer: products, dense MLPs', attention scores."""
    shape, tp = plan.shape(model), plan.layout.tp
    sizes, h, fp8 = shape.sizes, shape.sizes.hidden, plan.config.model.fp8
    peak = plan.device.tflops * 1e12 * MATMUL
    in_fp8 = plan.in_fp8 * (1 - 2 * fp8.first_last_layers_bf16 / sizes.layers)
    speed = peak / (1 - in_fp8 + in_fp8 / FP8_SPEEDUP.get(fp8.recipe, 1.0))
    # Tensor parallelism divides the side other than h, or tokens of products to latents.
    matrices = ((m / tp, n) if n == h else (m, n / tp) for m, n in shape.attention_matrices)
    matmul, mlp = _matmul_seconds(*matrices, speed=speed), 0.0
    linear_share = len(sizes.linear) / sizes.layers
    if linear_share:
        projected = (sizes.mixed + sizes.value + 2 * sizes.value_heads) / tp
        linear_seconds = _matmul_seconds((h, projected), (sizes.value / tp, h), speed=speed)
        matmul = (1 - linear_share) * matmul + linear_share * linear_seconds
    dense_share = sizes.dense / sizes.layers if sizes.experts else 1.0
    if sizes.experts:
        # Experts are whole: tensor parallelism divides their tokens.
        top_k, shared_ffn = shape.config["num_experts_per_tok"], sizes.shared_ffn / tp
        experts = top_k / tp * _matmul_seconds((h, 2 * sizes.expert_ffn), (sizes.expert_ffn, h), speed=speed)
        if shared_ffn:
            experts += _matmul_seconds((h, 2 * shared_ffn), (shared_ffn, h), speed=speed)
        matmul += (1 - dense_share) * experts
    if dense_share:
        mlp = dense_share * _matmul_seconds((h, 2 * sizes.ffn / tp), (sizes.ffn / tp, h), speed=speed)
        matmul += mlp
    # Causal attention sees half of a sequence. Long ones have more tokens.
    context = fmean(length**2 for length in sequences) / fmean(sequences)
    attention = (1 - linear_share) * context * (sizes.q + sizes.out) / tp / peak
    return matmul, mlp, attention


def _message_seconds(plan: PlanInputs, model: str) -> tuple[float, float, float]:
    """Return a token's message seconds: in a layer, of its tensor parallelism, between stages."""
    shape, layout, node_size = plan.shape(model), plan.layout, plan.config.cluster.gpus_per_node
    sizes, h, b, tp, cp = shape.sizes, shape.sizes.hidden, shape.itemsize, layout.tp, layout.cp
    # Hidden states are gathered and scattered twice.
    layer_messages = tensor_messages = 4 * h * b * (tp - 1) / tp / _link_speed(plan, tp)
    # Other context-parallel ranks' keys and values.
    layer_messages += (cp - 1) * 2 * sizes.kv / tp * b / _link_speed(plan, cp * tp)
    if sizes.experts and layout.ep > 1:
        # Copies to experts and back, by network to other nodes.
        copies = 2 * shape.config["num_experts_per_tok"] * h * b / tp
        node_ranks = min(layout.ep, node_size)
        node_seconds = (node_ranks - 1) / _link_speed(plan, node_size)
        network_seconds = (layout.ep - node_ranks) / _link_speed(plan, node_size + 1)
        layer_messages += copies * (node_seconds + network_seconds) / layout.ep
    stage_messages = 0.0
    if layout.pp > 1:
        stage_messages = layout.vpp * h * b / tp / _link_speed(plan, 2 * layout.stage)
    return layer_messages, tensor_messages, stage_messages


def _token_seconds(plan: PlanInputs, model: str, update: bool, sequences: list[float]) -> float:
    """Return a rank's seconds per token of its replica."""
    config, layout, shape = plan.config, plan.layout, plan.shape(model)
    sizes = shape.sizes
    matmul, mlp, attention = _layer_seconds(plan, model, sequences)
    layer_messages, tensor_messages, stage_messages = _message_seconds(plan, model)
    head, activations = 0.0, model_activations(plan, model)
    if model in ("actor", "reference", "teacher"):
        peak = plan.device.tflops * 1e12 * MATMUL
        head = _matmul_seconds((sizes.hidden, sizes.vocab / layout.tp), speed=peak)
    passes, recomputed_share, selective_seconds = 1.0, 0.0, 0.0
    seconds_per_byte = 2 / (plan.device.memory_speed * 1e9 * READING)
    if update:
        trained_params = count_trained(plan, model, Layout(), 0).all
        passes = 2 + trained_params / shape.count_params(Layout(), 0, critic=model == "critic").all
        recomputed_share = plan.recomputed_share
        if config.model.recompute == "selective":
            modules = config.model.recompute_modules
            selective_seconds = attention * ("attention" in modules)
            # Half of the tensor-parallel messages are the MLP's.
            selective_seconds += (mlp + tensor_messages / 2 + seconds_per_byte * activations.selected) * (
                "mlp" in modules
            )
        head *= 4 / 3  # backward recomputes the logits
    # `moved` bytes are written and read.
    dense_share = sizes.dense / sizes.layers if sizes.experts else 1.0
    moved_bytes = activations.moved
    if activations.dense is not None:
        moved_bytes = (1 - dense_share) * activations.moved + dense_share * activations.dense.moved
    layer_seconds = (passes + recomputed_share) * (
        matmul + attention + layer_messages + seconds_per_byte * moved_bytes
    ) + selective_seconds
    return (sizes.layers / layout.pp * layer_seconds + passes * (head + stage_messages)) / layout.cp


def _micro_batch_seconds(plan: PlanInputs, model: str, update: bool) -> float:
    """Return a micro-batch's fixed seconds: weights, gradients, waits."""
    shape, layout = plan.shape(model), plan.layout
    params = shape.count_params(layout, 0, critic=model == "critic").all
    passes = 3 if update else 1
    moved_bytes = params * (passes * shape.itemsize + 2 * plan.gradient_size * update)
    waits = 4 * MESSAGE * (layout.tp > 1) + DISPATCH * bool(shape.sizes.experts)
    seconds = moved_bytes / (plan.device.memory_speed * 1e9 * READING)
    return seconds + passes * shape.sizes.layers / layout.pp * waits


@dataclass(frozen=True)
class DecodeCost:
    """Seconds of an engine's decoding step.

    fixed        of each step
    sequence     of each response
    weights      to read what every token needs
    experts      to read all experts
    cached       to read a token's keys and values
    compute      of a token's products
    unrouted     share of experts that a token skips
    prefill      of a prompt token"""

    fixed: float
    sequence: float
    weights: float
    experts: float
    cached: float
    compute: float
    unrouted: float
    prefill: float

    def step(self, count: float, tokens: float) -> float:
        """Return a step's seconds. Experts are read once."""
        read_seconds = self.weights + self.experts * (1 - self.unrouted**count) + tokens * self.cached
        return max(read_seconds, count * self.compute) + self.fixed + count * self.sequence


def make_decode_cost(plan: PlanInputs) -> DecodeCost:
    tp, shape, device = plan.engine_tp, plan.actor, plan.device
    sizes, memory_speed = shape.sizes, device.memory_speed * 1e9 * READING
    compute = 2 * shape.active / (device.tflops * 1e12 * PREFILL * tp)
    message_bytes = 2 * sizes.layers * 2 * sizes.hidden * shape.itemsize * (tp - 1) / tp
    return DecodeCost(
        fixed=2 * sizes.layers * MESSAGE * (tp > 1) + DECODE_STEP + sizes.layers * DECODE_LAYER,
        sequence=message_bytes / _link_speed(plan, tp) + DECODE_SEQUENCE,
        weights=engine_weight_bytes(plan) * (1 - shape.expert_share) / memory_speed,
        experts=engine_weight_bytes(plan) * shape.expert_share / memory_speed,
        cached=shape.cache_bytes(tp) / memory_speed,
        compute=compute,
        unrouted=1 - shape.routed_share,
        prefill=compute,
    )


def decode_batch_size(plan: PlanInputs, lengths: Lengths) -> int:
    """Count mean responses decoded at once, without those that wait for a tool."""
    cache_limit = int(kv_cache_tokens(plan) / mean_cached_tokens(lengths, in_flight=plan.in_flight))
    return max(1, min(cache_limit, plan.config.rollout.max_batch))


def mean_cached_tokens(lengths: Lengths, *, in_flight: bool = False) -> float:
    mean_running = lengths.mean_in_flight if in_flight else lengths.mean_running
    return mean_running + lengths.all_observed / 2 + lengths.prompt


def rollout_seconds(plan: PlanInputs, lengths: Lengths) -> float:
    config, ranks = plan.config, plan.config.parallel.rollout_ranks or plan.layout.world
    kept_share = KEPT_GROUPS if config.rollout.dynamic_sampling.enabled else 1.0
    responses_per_engine = max(1, round(config.responses / kept_share / max(1, plan.engines(ranks))))
    at_once = min(decode_batch_size(plan, lengths), responses_per_engine)
    cost, keeps_cache = make_decode_cost(plan), config.rollout.capabilities.continuous_batching
    # With new weights, prefixes are prefilled again.
    prefilled_tokens = lengths.count_prefilled(cached=keeps_cache) + lengths.mean_prefix
    if plan.in_flight:  # engines never drain
        running, context = _count_in_flight(plan, lengths), mean_cached_tokens(lengths, in_flight=True)
        decode_seconds = lengths.mean / running * cost.step(running, running * context)
        return responses_per_engine * (decode_seconds + prefilled_tokens * cost.prefill)
    decode_seconds = _decode_seconds(cost, responses_per_engine, at_once, lengths)
    return decode_seconds + responses_per_engine * prefilled_tokens * cost.prefill


def _count_in_flight(plan: PlanInputs, lengths: Lengths) -> float:
    """Return an engine's running responses with weights in flight."""
    ranks = plan.config.parallel.rollout_ranks or plan.layout.world
    batches = 1 + plan.config.schedule.lead
    started = batches * plan.config.responses / max(1, plan.engines(ranks))
    return min(decode_batch_size(plan, lengths), started)


@lru_cache(maxsize=256)
def _decode_seconds(cost: DecodeCost, each: int, at_once: int, lengths: Lengths) -> float:
    """Simulate `each` responses, `at_once` at a time. Those back from a tool go first."""
    new_tokens, turns = sorted(window.new_tokens for window in lengths.windows), lengths.turns
    cached_tokens = mean_cached_tokens(lengths)
    # A coprime stride keeps lengths equally frequent, and spreads the longest.
    stride = next(n for n in range(37, 37 + len(new_tokens)) if math.gcd(n, len(new_tokens)) == 1)
    waiting = [(new_tokens[(i * stride) % len(new_tokens)] / turns, turns) for i in range(each)]
    running: list[tuple[float, float, int]] = []  # a turn's last step and tokens, turns left
    tool_calls: list[tuple[float, float, int]] = []  # end of a tool call, tokens, turns left
    step = seconds = 0.0
    while waiting or running or tool_calls:
        while tool_calls and tool_calls[0][0] <= seconds:
            waiting.append(heapq.heappop(tool_calls)[1:])
        while waiting and len(running) < at_once:
            tokens, turns_left = waiting.pop()
            heapq.heappush(running, (step + tokens, tokens, turns_left))
        step_seconds = cost.step(len(running), len(running) * cached_tokens) if running else math.inf
        turn_end = seconds + (running[0][0] - step) * step_seconds if running else math.inf
        if tool_calls and tool_calls[0][0] < turn_end:
            step += (tool_calls[0][0] - seconds) / step_seconds
            seconds = tool_calls[0][0]
            continue
        step, tokens, turns_left = heapq.heappop(running)
        seconds = turn_end
        if turns_left > 1:
            heapq.heappush(tool_calls, (seconds + lengths.idle, tokens, turns_left - 1))
    return seconds
