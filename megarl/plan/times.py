"""How long a step takes, by its parts: figures of data sheets, and the shares of them that are reached.

What is counted: matrix products, narrower ones slower; attention; every message of tensor, pipeline, context,
expert and data parallelism; decoding by what it reads from memory; moves between GPU and host. The constants
below were fitted to some published step times and held against others (docs/planning.md).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist, fmean
from typing import NamedTuple

from megarl.parallel.layout import Layout
from megarl.plan.engines import engine_weight_bytes, kv_cache_tokens, transferred_bytes
from megarl.plan.inputs import PlanInputs
from megarl.plan.tensors import count_trained, group_bytes, model_activations

# Fitted to the rows that docs/planning.md marks:
PRODUCTS = 0.65  # of peak FLOP/s, of a product of wide matrices
NARROW = 512  # columns or rows on a rank with which half of that is reached
ITERATION = 4e-3  # seconds of a decoding step on the host: scheduling, launching
SEQUENCE = 80e-6  # seconds of the host for each sequence of that step: sampling, tokens back to text
LAYER = 60e-6  # seconds of a layer in a decoding step that are no reading: starts of its kernels
DISPATCH = 2e-3  # seconds in which a mixture's layer waits for the host to count each expert's tokens
# Speed of a layer's products in FP8, casts included, to that in bf16: from one step on an H100
# (docs/planning.md). A recipe that was not measured takes bf16's time.
FP8 = {"tensorwise": 1.55, "delayed": 1.55}
# Our estimates:
READING = 0.75  # of the memory's speed
PREFILL = 0.40  # of peak FLOP/s
LINKS = 0.7  # of a link's speed
MESSAGE = 15e-6  # seconds of a small message to all ranks of a node, besides its bytes
GROUPS_KEPT = 0.5  # share of groups that dynamic sampling keeps
QUANTILES = 64


class Window(NamedTuple):
    """What a step draws of a response: tokens that earlier steps drew, tokens of this one, and whether it
    ends."""

    begun: float
    drawn: float
    ends: bool

    @property
    def length(self) -> float:
        """Return the tokens that there are then."""
        return self.begun + self.drawn


def windows_of(length: float, window: int) -> list[Window]:
    """Return the windows of a response, at most `window` tokens each; 0: it is one."""
    size = window or length
    count = max(1, math.ceil(length / size))
    return [Window(i * size, min(size, length - i * size), i == count - 1) for i in range(count)]


@dataclass(frozen=True)
class Lengths:
    """Response lengths: log-normal, cut at the limit.
    mean: of what is sampled, cut ones included; longest: the limit; spread: sigma of the logarithm; prompt:
    mean tokens of a prompt.
    turns: of a response, which share its tokens evenly; observed: tokens that the policy is shown between two
    of them; idle: seconds from the end of a turn to that, in which a tool or an environment works.
    window: tokens of a response that one step draws; 0: all."""

    mean: float
    longest: int
    prompt: float
    spread: float = 0.6
    turns: int = 1
    observed: float = 0.0
    idle: float = 0.0
    window: int = 0

    @property
    def shown(self) -> float:
        """Return the tokens that a response is shown in all."""
        return (self.turns - 1) * self.observed

    def prefilled(self, *, cached: bool) -> float:
        """Return the tokens that an engine prefills for a response of mean length. cached: it keeps the keys
        and values of earlier turns, and prefills what is new; else each turn begins with all that stands
        before it."""
        if cached:
            return self.prompt + self.shown
        written = self.mean / self.turns + self.observed
        return sum(self.prompt + turn * written for turn in range(self.turns))

    @lru_cache(maxsize=8)  # noqa: B019 (a search asks for the same ones over and over)
    def quantiles(self) -> tuple[float, ...]:
        """Return the lengths at the middle of QUANTILES equal shares, shortest first."""
        normal = NormalDist()
        shape = [math.exp(self.spread * normal.inv_cdf((i + 0.5) / QUANTILES)) for i in range(QUANTILES)]
        low, high = 0.0, float(self.longest) * 100
        for _ in range(60):  # the scale at which the cut ones have the wanted mean
            middle = (low + high) / 2
            short = fmean(min(middle * s, self.longest) for s in shape) < self.mean
            low, high = (middle, high) if short else (low, middle)
        return tuple(min(high * s, self.longest) for s in shape)

    @lru_cache(maxsize=8)  # noqa: B019 (as for quantiles)
    def windows(self) -> tuple[Window, ...]:
        """Return what a step has of responses, as often each, once as many end as begin: with `window` a
        response has a place in as many steps as it has windows."""
        return tuple(one for length in self.quantiles() for one in windows_of(length, self.window))

    @cached_property
    def sequences(self) -> tuple[list[float], list[float]]:
        """Return the tokens of a step's sequences, and of those whose responses end, as often each."""
        beside = self.prompt + self.shown
        each = [(window.length + beside, window.ends) for window in self.windows()]
        return [length for length, _ in each], [length for length, ends in each if ends]

    @cached_property
    def begun(self) -> float:
        """Return the tokens of a response that earlier steps drew, on average."""
        return fmean(window.begun for window in self.windows())

    @cached_property
    def half_way(self) -> float:
        """Return the tokens of a response half way through its window, on average."""
        return fmean(window.begun + window.drawn / 2 for window in self.windows())

    @property
    def median(self) -> float:
        """Return the length that half of the responses do not reach."""
        found = self.quantiles()
        return (found[QUANTILES // 2 - 1] * found[QUANTILES // 2]) ** 0.5


@dataclass(frozen=True)
class Estimate:
    """Seconds of each part of a step, and its tokens. beside: whether rollouts run beside all other parts but
    the weight transfer, for which both sides wait."""

    parts: dict[str, float]
    tokens: float
    beside: bool = False

    @property
    def training(self) -> float:
        """Return the seconds of what the trainers do between a batch and the transfer."""
        return sum(s for name, s in self.parts.items() if name not in ("rollout", "weight_transfer"))

    @property
    def total(self) -> float:
        """Return the seconds of a step; where rollouts run beside training the longer of the two counts."""
        if self.beside:
            return max(self.parts["rollout"], self.training) + self.parts["weight_transfer"]
        return sum(self.parts.values())


def default_lengths(plan: PlanInputs) -> Lengths:
    """Return lengths of a third of the limit on average, and a quarter of it for prompts; of episodes a
    quarter of the turns that they may have, a third of the room for what they are shown, and a second for
    each call."""
    rollout, prompt = plan.config.rollout, plan.config.data.max_prompt_tokens / 4
    longest = rollout.max_response_tokens
    lengths = Lengths(longest / 3, longest, prompt, window=rollout.window or 0)
    if not rollout.acts:
        return lengths
    turns = max(2, rollout.turns.max // 4)
    observed = (rollout.max_extent - longest) / 3 / (turns - 1)
    return replace(lengths, turns=turns, observed=observed, idle=1.0)


def with_deviation(lengths: Lengths, deviation: float) -> Lengths:
    """Return lengths with this standard deviation before they are cut at the limit, about the same mean."""
    return replace(lengths, spread=math.sqrt(math.log(1 + (deviation / lengths.mean) ** 2)))


def estimate(plan: PlanInputs, lengths: Lengths) -> Estimate:
    """Estimate a step's time on this layout."""
    config, layout, cluster = plan.config, plan.layout, plan.config.cluster
    apart = config.parallel.rollout_ranks
    of_all, of_ended = lengths.sequences
    tokens = plan.step_tokens(fmean(of_all))
    parts: dict[str, float] = {}
    if config.has_engine:
        parts["rollout"] = rollout_seconds(plan, lengths)
    for phase in plan.phases:
        if phase.model is None:
            continue
        model, epochs = plan.shape(phase.model), 1
        updates, whole, own = 1, of_all, tokens
        if phase.updates_weights:
            settings, size = (
                (config.critic, config.critic.mini_batch or config.update.mini_batch)
                if phase.model == "critic"
                else (config.update, config.mini_batch)
            )
            if phase.model == "critic":  # learns from what has ended
                whole, own = of_ended, tokens * sum(of_ended) / sum(of_all)
            epochs = settings.epochs if config.has_engine else 1
            updates = max(1, config.responses // size)
        read, passed = whole, own
        if phase.model == "critic" and config.values_prompts:
            read, passed = [lengths.prompt + 1], plan.step_tokens(lengths.prompt + 1)
        critics = config.critic.count if phase.model == "critic" else 1  # one after the other
        if phase.updates_weights:  # each learns from its own part
            passed /= critics
        # Each optimizer step begins and ends a pipeline of its own, and waits for the replica whose longest
        # sequence is more than an even share.
        share = passed / updates / layout.dp
        uneven = max(1.0, max(read) / share)
        # The largest micro-batches keep all stages waiting.
        budget = config.update.tokens_per_micro_batch
        packs = max(1.0, share * uneven / budget)
        largest = min(1.0, max(budget, max(read)) / (share * uneven))
        bubble = 1 + (layout.pp - 1) / layout.vpp * largest
        seconds = share * uneven * _token_seconds(plan, phase.model, phase.updates_weights, read)
        seconds += packs * _pack_seconds(plan, phase.model, phase.updates_weights)
        if phase.model == "actor" and phase.updates_weights and config.algorithm.policy_loss.selector:
            # A forward pass before each update.
            seconds += share * uneven * _token_seconds(plan, phase.model, False, whole)
            seconds += packs * _pack_seconds(plan, phase.model, False)
        parts[phase.name] = critics * epochs * updates * seconds * bubble
        if phase.updates_weights:
            # Gradients between replicas, and weights back. Nothing of it is hidden.
            replicas = layout.dp * layout.cp
            link = cluster.node_speed if layout.stage <= cluster.gpus_per_node else cluster.network_speed
            held = max(count_trained(plan, phase.model, layout, stage).all for stage in plan.stages)
            exchanged = held * (plan.gradient_size + model.itemsize) * (replicas - 1) / replicas
            parts[phase.name] += critics * epochs * updates * exchanged / (link * 1e9 * LINKS)
            if phase.model in plan.muon_models:  # shared out over replicas, the same on all of their ranks
                turning = max(model.turning(layout, stage) for stage in plan.stages) / replicas
                turning *= plan.optimizer(phase.model).muon.steps
                parts[phase.name] += (
                    critics * epochs * updates * turning / (plan.device.tflops * 1e12 * PRODUCTS)
                )
    if config.has_engine:
        # Every GPU gets its engine's shard: from its own node where that holds all of the model; on ranks of
        # its own mostly from another one, and a trainer may have several to send.
        within = (layout.world + apart if apart else layout.tp * layout.pp) <= cluster.gpus_per_node
        link = cluster.node_speed if within else cluster.network_speed
        parts["weight_transfer"] = (
            transferred_bytes(plan) * max(1.0, apart / layout.world) / (link * 1e9 * LINKS)
        )
    # Bytes that a GPU's tensor groups travel in a step, both ways; gradients and engines come back empty.
    moved = 0.0
    sets = [resident | plan.keep for resident in plan.residents]
    for before, after in zip([sets[-1], *sets[:-1]], sets, strict=True):
        for name in sorted(before ^ after):
            if not name.startswith("engine.") and not name.endswith(".gradients"):
                moved += max(group_bytes(plan, name, stage, every=True) for stage in plan.stages)
        # Of several critics the last is there at the end of a phase, and the first again in the next.
        for name in sorted((before & after) - plan.keep) if config.critic.count > 1 else ():
            if name.startswith("critic."):
                moved += 2 * max(group_bytes(plan, name, stage, every=True) for stage in plan.stages)
    if moved:
        parts["on and off the device"] = moved / (plan.device.host_speed * 1e9 * LINKS)
    return Estimate(parts, tokens, beside=bool(apart and config.schedule.ahead))


def _token_seconds(plan: PlanInputs, name: str, update: bool, whole: list[float]) -> float:
    """Return the seconds that a token of a replica's share takes a rank of the fullest stage. whole: lengths
    of sequences. An update goes forward, and back for activations and for the weights that are not frozen,
    and forward again through what is recomputed."""
    config, layout, cluster, shape = plan.config, plan.layout, plan.config.cluster, plan.shape(name)
    sizes, tp, cp, b = shape.sizes, layout.tp, layout.cp, shape.itemsize
    layers = sizes.layers / layout.pp
    peak = plan.device.tflops * 1e12 * PRODUCTS
    fp8 = config.model.fp8
    in_fp8 = plan.in_fp8 * (1 - 2 * fp8.first_last_layers_bf16 / sizes.layers)  # share of the layers
    of_layers = peak / (1 - in_fp8 + in_fp8 / FP8.get(fp8.recipe, 1.0))  # of their products, on average

    def products(*shapes: tuple[float, float], speed: float = of_layers) -> float:
        return sum(2 * m * n * (1 + NARROW / min(m, n)) for m, n in shapes) / speed

    h = sizes.hidden
    # A matrix is cut over tensor-parallel ranks on its longer side, or (to latents) its tokens are.
    layer, mlp = products(*((m / tp, n) if n == h else (m, n / tp) for m, n in shape.attention_matrices)), 0.0
    share = len(sizes.linear) / sizes.layers
    if share:
        projected = (sizes.mixed + sizes.value + 2 * sizes.value_heads) / tp
        layer = (1 - share) * layer + share * products((h, projected), (sizes.value / tp, h))
    dense = sizes.dense / sizes.layers if sizes.experts else 1.0  # share of the layers
    if sizes.experts:
        # Whole experts, to which the tensor-parallel ranks of a token's replica send their parts of it.
        chosen = shape.config["num_experts_per_tok"]
        routed = chosen / tp * products((h, 2 * sizes.expert_ffn), (sizes.expert_ffn, h))
        shared = sizes.shared_ffn / tp
        layer += (1 - dense) * (routed + (products((h, 2 * shared), (shared, h)) if shared else 0.0))
    if dense:
        mlp = dense * products((h, 2 * sizes.ffn / tp), (sizes.ffn / tp, h))
        layer += mlp
    # Causal attention: a token looks at half of its sequence, which is a longer one the more tokens it has.
    square = fmean(length**2 for length in whole) / fmean(whole)
    attention = (1 - share) * square * (sizes.q + sizes.out) / tp / peak  # scores, and sums of values
    head = products((h, sizes.vocab / tp), speed=peak) if name in ("actor", "reference", "teacher") else 0.0

    node, network = cluster.node_speed * 1e9 * LINKS, cluster.network_speed * 1e9 * LINKS

    def link(ranks: int) -> float:
        """Return the bytes a second between neighbours of so many ranks."""
        return node if ranks <= cluster.gpus_per_node else network

    # A layer gathers and scatters the hidden states twice.
    talk = around = 4 * h * b * (tp - 1) / tp / link(tp)
    # Keys and values of the other ranks' parts.
    talk += (cp - 1) * 2 * sizes.kv / tp * b / link(cp * tp)
    if sizes.experts and layout.ep > 1:
        # Each copy of a token to its expert and back; those to other nodes by the network.
        copies = 2 * chosen * h * b / tp
        inside = min(layout.ep, cluster.gpus_per_node)
        talk += copies * ((inside - 1) / node + (layout.ep - inside) / network) / layout.ep
    between = layout.vpp * h * b / tp / link(2 * layout.stage) if layout.pp > 1 else 0.0
    passes, again, selected = 1.0, 0.0, 0.0
    kept = model_activations(plan, name)
    read = 2 / (plan.device.memory_speed * 1e9 * READING)
    if update:
        trained = count_trained(plan, name, Layout(), 0).all
        passes = 2 + trained / shape.held(Layout(), 0, critic=name == "critic").all
        again = plan.recomputed_share
        if config.model.recompute == "selective":
            modules = config.model.recompute_modules
            selected = attention * ("attention" in modules)
            # Half of what a layer says to its neighbours is around its MLP.
            selected += (mlp + around / 2 + read * kept.selected) * ("mlp" in modules)
        head *= 4 / 3  # backward computes the logits again
    # Norms, rotations and activation functions write what a layer keeps, and it is read again.
    moved = kept.moved if kept.dense is None else (1 - dense) * kept.moved + dense * kept.dense.moved
    body = (passes + again) * (layer + attention + talk + read * moved) + selected
    return (layers * body + passes * (head + between)) / cp


def _pack_seconds(plan: PlanInputs, name: str, update: bool) -> float:
    """Return the seconds that each micro-batch takes a rank however small it is: weights are read, their
    gradients read and written, and tensor-parallel ranks wait for each other."""
    shape, layout = plan.shape(name), plan.layout
    held = shape.held(layout, 0, critic=name == "critic").all
    passes = 3 if update else 1
    moved = held * (passes * shape.itemsize + 2 * plan.gradient_size * update)
    waits = (
        passes
        * shape.sizes.layers
        / layout.pp
        * (4 * MESSAGE * (layout.tp > 1) + DISPATCH * bool(shape.sizes.experts))
    )
    return moved / (plan.device.memory_speed * 1e9 * READING) + waits


@dataclass(frozen=True)
class Decoding:
    """What a decoding step of one engine costs. fixed: seconds of each; row: of each response in it; read,
    chosen_weights, cached: seconds in which the memory gives the weights that every token needs, the experts
    if all are chosen, and the keys and values of a token; operations: seconds of a token's products; chosen:
    the share of the experts that a token does not choose; prefill: seconds of a prompt's token."""

    fixed: float
    row: float
    read: float
    chosen_weights: float
    cached: float
    operations: float
    chosen: float
    prefill: float

    def step(self, count: float, tokens: float) -> float:
        """Return the seconds of a step of `count` responses with so many tokens in the cache. It reads the
        weights once, of experts those that any response chose, and each one's keys and values."""
        read = self.read + self.chosen_weights * (1 - self.chosen**count) + tokens * self.cached
        return max(read, count * self.operations) + self.fixed + count * self.row


def decoding(plan: PlanInputs) -> Decoding:
    """Return what a decoding step of one of the plan's engines costs."""
    cluster, tp, shape, device = plan.config.cluster, plan.engine_tp, plan.actor, plan.device
    link = (cluster.node_speed if tp <= cluster.gpus_per_node else cluster.network_speed) * 1e9 * LINKS
    sizes, memory = shape.sizes, device.memory_speed * 1e9 * READING
    products = 2 * shape.active / (device.tflops * 1e12 * PREFILL * tp)
    sent = 2 * sizes.layers * 2 * sizes.hidden * shape.itemsize * (tp - 1) / tp / link
    return Decoding(
        fixed=2 * sizes.layers * MESSAGE * (tp > 1) + ITERATION + sizes.layers * LAYER,
        row=sent + SEQUENCE,
        read=engine_weight_bytes(plan) * (1 - shape.expert_share) / memory,
        chosen_weights=engine_weight_bytes(plan) * shape.expert_share / memory,
        cached=shape.cache_bytes(tp) / memory,
        operations=products,
        chosen=1 - shape.chosen_share,
        prefill=products,
    )


def decoded_at_once(plan: PlanInputs, lengths: Lengths) -> int:
    """Return how many responses an engine decodes at once: as many as its cache holds of mean length, and
    rollout.max_batch at most. One that waits for a tool is not among them: its keys and values go where there
    is no room."""
    return max(1, min(int(kv_cache_tokens(plan) / cached_tokens(lengths)), plan.config.rollout.max_batch))


def cached_tokens(lengths: Lengths) -> float:
    """Return the tokens in an engine's cache of a response that it decodes, on average."""
    return lengths.half_way + lengths.shown / 2 + lengths.prompt


def rollout_seconds(plan: PlanInputs, lengths: Lengths) -> float:
    """Return the seconds in which all engines are done."""
    config, ranks = plan.config, plan.config.parallel.rollout_ranks or plan.layout.world
    sampled = config.responses / (GROUPS_KEPT if config.rollout.dynamic_sampling.enabled else 1.0)
    each = max(1, round(sampled / max(1, plan.engines(ranks))))
    at_once = min(decoded_at_once(plan, lengths), each)
    costs, cached = decoding(plan), config.rollout.capabilities.continuous_batching
    # The weights are new: what was drawn before is read again.
    prefilled = lengths.prefilled(cached=cached) + lengths.begun
    return _decode(costs, each, at_once, lengths) + each * prefilled * costs.prefill


@lru_cache(maxsize=256)
def _decode(costs: Decoding, each: int, at_once: int, lengths: Lengths) -> float:
    """Return the seconds in which an engine has decoded `each` responses, `at_once` of them at a time: it
    takes the next one when one is done, or waits for a tool. What comes back from a tool goes first."""
    drawn, turns = sorted(window.drawn for window in lengths.windows()), lengths.turns
    mean = cached_tokens(lengths)
    # A stride that has no factor in common with their number: each length comes as often as its share, and
    # the longest are spread over the others.
    stride = next(n for n in range(37, 37 + len(drawn)) if math.gcd(n, len(drawn)) == 1)
    waiting = [(drawn[(i * stride) % len(drawn)] / turns, turns) for i in range(each)]
    running: list[tuple[float, float, int]] = []  # when a turn ends, its tokens, turns with it that are left
    called: list[tuple[float, float, int]] = []  # when a tool is done, on the clock, and the same
    now = seconds = 0.0  # in decoding steps, and on the clock
    while waiting or running or called:
        while called and called[0][0] <= seconds:
            waiting.append(heapq.heappop(called)[1:])
        while waiting and len(running) < at_once:
            tokens, left = waiting.pop()
            heapq.heappush(running, (now + tokens, tokens, left))
        pace = costs.step(len(running), len(running) * mean) if running else math.inf
        ends = seconds + (running[0][0] - now) * pace if running else math.inf
        if called and called[0][0] < ends:
            now += (called[0][0] - seconds) / pace
            seconds = called[0][0]
            continue
        now, tokens, left = heapq.heappop(running)
        seconds = ends
        if left > 1:
            heapq.heappush(called, (seconds + lengths.idle, tokens, left - 1))
    return seconds
