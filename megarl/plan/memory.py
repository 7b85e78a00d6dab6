"""What a run needs of each GPU in each phase, of each node's memory, and of the disk: from configuration and model sizes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.phases import Phase, never_offloaded, training_phases
from megarl.config.schema import Config
from megarl.parallel.layout import Layout, padded_vocab
from megarl.plan.sizes import GIB, Activations, Device, Held, Shape, activations, device_of
from megarl.weights.layout import check_layout

# Of every rank's GPU, all phases: the CUDA contexts of the rank and of its engine, the communicators' buffers. Our estimate.
OVERHEAD = 4 * GIB
FRAGMENTATION = 1.05  # what torch's allocator takes for each byte of activations. Our estimate
HOST_PROCESS = (
    4 * GIB
)  # a rank with torch, Megatron and its engine's processes, without tensors. Our estimate
FLOAT = 4


@dataclass(frozen=True)
class Need:
    """The memory that one phase needs on the fullest GPU of the job: part -> bytes, and that GPU's pipeline stage."""

    phase: str
    parts: dict[str, float]
    stage: int

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Plan:
    """One layout of a run. config: with the layout in it; actor, critic: their sizes; device: the GPU."""

    config: Config
    actor: Shape
    critic: Shape
    device: Device
    layers: str = "te"

    @cached_property
    def keep(self) -> frozenset[str]:
        """The tensor groups that never leave the GPU."""
        there = frozenset[str]().union(*(phase.on_gpu for phase in self.phases))
        return there & never_offloaded(self.config, gpu=True)

    @cached_property
    def phases(self) -> list[Phase]:
        """The phases of a step that need something on the GPU, in order. Value pretraining needs nothing more."""
        return [phase for phase in training_phases(self.config) if phase.on_gpu]

    @property
    def models(self) -> tuple[str, ...]:
        """actor, critic, reference: those that the run has."""
        critic, reference = self.config.has_critic, bool(self.config.algorithm.kl_weight)
        return ("actor", *(["critic"] if critic else []), *(["reference"] if reference else []))

    @cached_property
    def layout(self) -> Layout:
        sizes = self.config.parallel
        return Layout(tp=sizes.tp, pp=sizes.pp, dp=sizes.dp or 1, ep=sizes.ep)

    @property
    def nodes(self) -> int:
        return -(-self.layout.world // self.config.cluster.gpus_per_node)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, which is never cut."""
        return self.config.data.max_prompt_tokens + self.config.rollout.max_response_tokens

    @property
    def pack(self) -> int:
        """Tokens of the largest micro-batch: a sequence beyond the budget has one of its own."""
        return max(self.longest, self.config.update.tokens_per_micro_batch)

    def shape(self, model: str) -> Shape:
        return self.critic if model == "critic" else self.actor

    def held(self, model: str, stage: int) -> Held:
        return self.shape(model).held(self.layout, stage, critic=model == "critic")

    def weights(self, model: str, stage: int) -> float:
        held = self.held(model, stage)
        return (held.shared + held.experts) * self.shape(model).itemsize + held.single * FLOAT

    def gradients(self, model: str, stage: int) -> float:
        """Summed in float32, whole on every rank."""
        return self.held(model, stage).all * FLOAT

    def optimizer(self, model: str, stage: int) -> float:
        """This rank's part of Adam's two moments, and of the float32 weights where the model's own are bf16. Megatron's distributed
        optimizer divides them over the data-parallel replicas, an expert's over the ranks that hold the same one."""
        held, layout = self.held(model, stage), self.layout
        replicas = layout.tp * layout.dp // layout.ep
        divided = held.shared / layout.dp + held.experts / replicas
        single = held.single / layout.dp
        return (divided + single) * 2 * FLOAT + (
            divided * FLOAT if self.shape(model).itemsize < FLOAT else 0.0
        )

    @cached_property
    def engine_weights(self) -> float:
        rollout = self.config.rollout
        return self.actor.engine_bytes(
            rollout.engine_tp, rollout.weights_dtype, rollout.engine == "transformers"
        )

    @cached_property
    def cache(self) -> float:
        """Bytes of an engine's KV cache on one rank: SGLang takes what its share of the memory leaves, transformers what a batch fills."""
        rollout = self.config.rollout
        if rollout.engine == "transformers":
            return rollout.max_batch * self.longest * self.actor.cache_bytes(1)
        return max(0.0, rollout.engine_memory * self.device.memory - self.engine_weights)

    @property
    def cache_tokens(self) -> float:
        """Tokens that one engine's KV cache holds."""
        tp = 1 if self.config.rollout.engine == "transformers" else self.config.rollout.engine_tp
        return self.cache / self.actor.cache_bytes(tp)

    @cached_property
    def transfer_memory(self) -> float:
        """Bytes on a GPU while weights go to the engine: staging for messages and, for SGLang, what its ranks copy from, which holds at
        least the largest tensor."""
        rollout = self.config.rollout
        bucket = rollout.transfer_bucket * 2**20
        if rollout.engine == "transformers":
            return bucket
        return bucket + min(
            self.engine_weights,
            max(bucket, self.actor.engine_tensor(rollout.engine_tp, rollout.weights_dtype)),
        )

    def group(self, name: str, stage: int) -> float:
        """Return the bytes of a tensor group on a rank of this stage."""
        owner, _, part = name.partition(".")
        if owner == "engine":
            return self.engine_weights if part == "weights" else self.cache
        return float(
            {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}[part](
                owner, stage
            )
        )

    def activations(self, model: str) -> Activations:
        config, tp = self.config, self.layout.tp
        shape = self.shape(model)
        return activations(
            shape,
            tp,
            recompute=config.model.recompute,
            chunk=config.update.logprob_chunk,
            layers=self.layers,
            sequence_parallel=tp > 1 and config.parallel.sequence_parallel is not False,
            critic=model == "critic",
            vocab_shard_size=padded_vocab(shape.sizes.vocab, tp) // tp,
        )

    def work(self, phase: str, stage: int, tokens: float | None = None) -> dict[str, float]:
        """Return the bytes that a phase allocates besides its tensor groups. tokens: of a micro-batch; None: `pack`."""
        layout, tokens = self.layout, self.pack if tokens is None else tokens
        last = stage == layout.pp - 1
        if phase == "weight_transfer":
            return {"transfer buckets": self.transfer_memory}
        model = {"values": "critic", "critic_update": "critic", "reference_logprobs": "reference"}.get(
            phase, "actor"
        )
        if phase in ("old_logprobs", "reference_logprobs", "values"):
            return {"activations": self.activations(model).forward_only(tokens, last) * FRAGMENTATION}
        if phase in ("actor_update", "critic_update", "supervised_update"):
            found = self.activations(model)
            layers = self.shape(model).sizes.layers // layout.pp
            whole = found.training(tokens, layers, layout.pp - stage, last)
            without_head = found.training(tokens, layers, layout.pp - stage, False)
            return {
                "activations": without_head * FRAGMENTATION,
                "head": (whole - without_head) * FRAGMENTATION,
            }
        return {}

    def need(self, phase: Phase, stage: int, tokens: float | None = None) -> Need:
        parts = {name: self.group(name, stage) for name in sorted(phase.on_gpu | self.keep)}
        return Need(
            phase.name, {**parts, **self.work(phase.name, stage, tokens), "contexts": OVERHEAD}, stage
        )

    def needs(self, tokens: float | None = None) -> Iterator[Need]:
        """Each phase's need on the fullest stage."""
        for phase in self.phases:
            yield max(
                (self.need(phase, stage, tokens) for stage in range(self.layout.pp)),
                key=lambda need: need.total,
            )

    def budget(self) -> int:
        """The largest update.tokens_per_micro_batch that fits, in steps of 1,024; 0 where not even the longest sequence does."""
        fits = lambda tokens: all(need.total <= self.device.memory for need in self.needs(tokens))  # noqa: E731
        if not fits(self.longest):
            return 0
        low, high = self.longest // 1024, 2**14
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle * 1024) else (low, middle - 1)
        return max(low * 1024, self.longest)

    def host(self) -> dict[str, float]:
        """Bytes of a node's memory: what is off the device at any one time, the step's whole batch on every rank, a checkpoint on its way
        to the disk, and the processes."""
        config, per_node = self.config, min(self.config.cluster.gpus_per_node, self.layout.world)
        away = 0.0
        groups = frozenset[str]().union(*(phase.on_gpu for phase in self.phases))
        for phase in self.phases:
            # Gradients come back as zeros, engines' weights from the actor.
            gone = [
                name
                for name in groups - phase.on_gpu - self.keep
                if not name.startswith("engine.") and not name.endswith(".gradients")
            ]
            away = max(
                away, max(sum(self.group(name, stage) for name in gone) for stage in range(self.layout.pp))
            )
        tokens = self.step_tokens(self.longest)
        columns = len(
            frozenset[str]().union(*(phase.writes for phase in training_phases(config))) - {"tokens"}
        )
        return {
            "pinned buffers": away * per_node,
            "rollouts": tokens * (8 + 1 + FLOAT * columns) * per_node,
            "checkpoint staging": self.checkpoint() / self.nodes if config.checkpoint.every else 0.0,
            "gathered optimizer": self.gathered_optimizer() * per_node if config.checkpoint.every else 0.0,
            "processes": HOST_PROCESS * per_node,
            "verifiers": config.reward.workers * 0.3 * GIB * per_node if config.recipe != "sft" else 0.0,
        }

    def step_tokens(self, length: float) -> float:
        """Tokens of a step's batch whose sequences have this length."""
        return (
            self.config.supervised.batch if self.config.recipe == "sft" else self.config.responses
        ) * length

    def gathered_optimizer(self) -> float:
        """Bytes of a rank's host memory while a model is saved or loaded: each replica gathers the whole optimizer of its
        shard, in float32."""
        trained = [model for model in self.models if model != "reference"]
        return max(
            self.group(f"{model}.gradients", stage) * 3
            for model in trained
            for stage in range(self.layout.pp)
        )

    def checkpoint(self) -> float:
        """Bytes of one checkpoint: weights, the optimizer's own float32 weights, Adam's moments; without padding."""
        total = 0.0
        for model in self.models:
            shape = self.shape(model)
            elements = shape.held(Layout(), 0, critic=model == "critic").all
            total += elements * (shape.itemsize + 3 * FLOAT) if model != "reference" else 0
        return total

    def problem(self) -> str | None:
        """Why the run does not fit, in one line that says what to change; None where it does. In the order of a step."""
        rollout, memory = self.config.rollout, self.device.memory
        for need in self.needs():
            if need.total > memory:
                parts = sorted(need.parts.items(), key=lambda pair: -pair[1])[:4]
                listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
                return (
                    f"phase {need.phase} needs {need.total / GIB:.1f} GiB of the {memory / GIB:.1f} of each {self.device.name} "
                    f"(stage {need.stage}: {listed}); {self._advice(need)}"
                )
        if self.config.recipe != "sft" and self.cache_tokens < self.longest:
            return (
                f"the KV cache of an engine holds {self.cache_tokens:,.0f} tokens, one sequence has up to {self.longest:,} "
                f"(raise rollout.engine_tp or rollout.engine_memory {rollout.engine_memory:g}, or lower rollout.max_response_tokens)"
            )
        host, there = sum(self.host().values()), self.config.cluster.host_memory * GIB
        if host > there:
            has = f"and has {there / GIB:.0f}"
            return f"a node needs {host / GIB:.0f} GiB of memory {has} (cluster.host_memory; lower rollout.prompts, or use more nodes)"
        return None

    def _advice(self, need: Need) -> str:
        if self.config.residency.offload is False:
            return "set residency.offload=true"
        if self.keep & set(need.parts):
            return f"take {', '.join(sorted(self.keep))} out of residency.keep"
        if need.phase == "rollout":
            return "lower rollout.engine_memory"
        if need.phase == "weight_transfer":
            return "raise parallel.tp, parallel.pp or rollout.engine_tp"
        config, budget = self.config, self.budget()
        if budget >= self.longest and budget < config.update.tokens_per_micro_batch:
            return f"lower update.tokens_per_micro_batch to {budget}"
        if config.model.recompute != "full":
            return "set model.recompute=full"
        return "raise parallel.tp or parallel.pp, or lower rollout.max_response_tokens"


def make_plan(config: Config, actor: Shape, critic: Shape, device: Device) -> Plan:
    """A plan of `config`. ConfigError where its sizes contradict each other."""
    try:
        plan = Plan(
            config, actor, critic, device, layers="portable" if config.model.layers == "portable" else "te"
        )
        _ = plan.layout
    except ValueError as error:
        raise ConfigError(f"parallel: {error}") from None
    return plan


def with_layout(plan: Plan, tp: int, pp: int, dp: int, engine_tp: int) -> Plan:
    """The same run laid out otherwise."""
    config = plan.config
    parallel = config.parallel.model_copy(update={"tp": tp, "pp": pp, "dp": dp})
    rollout = config.rollout.model_copy(update={"engine_tp": engine_tp})
    return replace(plan, config=config.model_copy(update={"parallel": parallel, "rollout": rollout}))


def plan_of(
    config: Config,
    actor: Mapping[str, Any],
    critic: Mapping[str, Any] | None = None,
    *,
    memory: float | None = None,
) -> Plan:
    """The plan of a configuration whose models have these config.json. memory: bytes of a GPU that is there. ConfigError where the model
    cannot be divided as `parallel` says."""
    parallel = config.parallel
    for described in (actor, critic or actor):
        check_layout(described, parallel.tp, parallel.pp, parallel.ep)
    dtype = config.model.dtype
    return make_plan(
        config, Shape(actor, dtype), Shape(critic or actor, dtype), device_of(config.cluster, memory)
    )


def check_fits(
    config: Config,
    where: str,
    actor: Mapping[str, Any],
    critic: Mapping[str, Any] | None,
    world: int,
    memory: float,
) -> None:
    """ConfigError where the plan of this run on `world` GPUs of so many bytes says that it does not fit."""
    parallel = config.parallel
    dp = world // (parallel.tp * parallel.pp)
    config = config.model_copy(update={"parallel": parallel.model_copy(update={"dp": dp})})
    problem = plan_of(config, actor, critic, memory=memory).problem()
    if problem:
        raise ConfigError(f"{where}: {problem}")
