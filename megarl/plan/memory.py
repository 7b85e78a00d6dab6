"""What a run needs of each GPU in each phase, of each node's memory, and of the disk.

All of it comes from the configuration and the models' sizes alone.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from operator import mul
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.recipes import (
    ROLLOUT,
    WEIGHT_TRANSFER,
    Phase,
    never_offloaded,
    replay_phases,
    training_phases,
)
from megarl.config.schema import Config, LoraConfig, OptimizerConfig
from megarl.parallel.layout import OVERLAP_ABOVE, Layout
from megarl.plan.sizes import (
    BYTES,
    GIB,
    SINGLE,
    Activations,
    Device,
    Held,
    Passes,
    Shape,
    activations,
    device_of,
    fullest,
    in_flight,
    passed_on,
    quantised_bytes,
)
from megarl.weights.families import OUTPUT, TIED_OUTPUT, family_of, is_frozen, is_tied, read_config
from megarl.weights.shards import check_frozen, check_layout, check_linear, check_lora, check_recomputed

# Our estimates:
OVERHEAD = 4 * GIB  # of each GPU: CUDA contexts of the rank and its engine, buffers of communicators
FRAGMENTATION = 1.05  # what torch's allocator takes for each byte of activations
HOST_PROCESS = 4 * GIB  # a rank with torch, Megatron and its engine's processes, without tensors
# Of a run on a CPU, found in runs of up to 128 ranks: the launcher with what it has imported, and what a rank
# that is forked from it owns besides tensors.
LAUNCHER, FORKED = 0.5 * GIB, 0.15 * GIB
FACTS = 256  # bytes that any response takes of the process that shares them out, however short it is
# Bytes of a response on every rank: lengths, owner, reward and the like of a StepBatch (docs/scale.md).
KNOWN = 80
# Bytes of a token on the rank that drew it: token and log-prob of a Body (rollout/responses.py), and packed
# in StepBatch.own (data/experience.py) token, mask and log-prob.
DRAWN = 4 + 4 + 8 + 1 + 4
# Bytes of each of a policy's or teacher's likeliest tokens, where they are looked for (56, found with the
# tests' LiveMemory) and in an update (60).
SEVERAL = 60
NEAR = 0.9  # share of a machine's memory from which on a plan warns

SCALAR = ("critic", "reward")  # models whose head gives one number


@dataclass(frozen=True)
class Need:
    """The memory that one phase needs on the fullest GPU of the job: part -> bytes, and the GPU's stage."""

    phase: str
    parts: dict[str, float]
    stage: int

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPlan:
    """One layout of a run. config: with the layout in it; actor, critic: their sizes; device: the GPU;
    reward, teachers: sizes of these models, none: the actor's; replay: a step is done again from its rollout
    on disk, without engines, and no checkpoint is written."""

    config: Config
    actor: Shape
    critic: Shape
    device: Device
    reward: Shape | None = None
    teachers: tuple[Shape, ...] = ()
    replay: bool = False

    @cached_property
    def phases(self) -> list[Phase]:
        """Return the phases of a step that need something on the GPU; value pretraining needs no more."""
        phases = (replay_phases if self.replay else training_phases)(self.config)
        return [phase for phase in phases if phase.on_gpu]

    @cached_property
    def residents(self) -> list[frozenset[str]]:
        """Return the tensor groups that each phase wants on a trainer's GPU, phase after phase. With ranks
        that only generate the engines' are elsewhere, and a phase that needs no others moves none."""
        apart = self.config.parallel.rollout_ranks
        wanted = [phase.on_gpu for phase in self.phases]
        own = [frozenset(n for n in names if not (apart and n.startswith("engine."))) for names in wanted]
        return [names for names in own if names]

    @cached_property
    def groups(self) -> frozenset[str]:
        """Return the tensor groups that are on the GPU in any phase."""
        return frozenset[str]().union(*(phase.on_gpu for phase in self.phases))

    @cached_property
    def keep(self) -> frozenset[str]:
        """Return the tensor groups that never leave the GPU."""
        return self.groups & never_offloaded(self.config, gpu=True)

    @cached_property
    def layout(self) -> Layout:
        sizes = self.config.parallel
        return Layout(sizes.tp, sizes.pp, sizes.dp or 1, sizes.ep, sizes.cp, sizes.vpp)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Return the pipeline stages one of which is the fullest: the first has the embedding and the most
        micro-batches in flight, the last a head; between them all layers may be in FP8. Frozen layers, which
        are the lowest, empty the first."""
        last = self.layout.pp - 1
        if self.config.actor.frozen_layers or self.config.critic.frozen_layers:
            return tuple(range(last + 1))
        between = (1,) if last > 1 and self.config.model.fp8.format != "none" else ()
        return (0, *between, last) if last else (0,)

    @property
    def recomputed_share(self) -> float:
        """Return the share of the layers that model.recompute full computes again."""
        model, chunks = self.config.model, self.layout.pp * self.layout.vpp
        layers = max(1, self.actor.sizes.layers // chunks)
        return min(1.0, (model.recompute_layers or layers) / layers) if model.recompute == "full" else 0.0

    @property
    def nodes(self) -> int:
        """Return the nodes of all ranks, those that only generate among them."""
        ranks = self.layout.world + self.config.parallel.rollout_ranks
        return -(-ranks // self.config.cluster.gpus_per_node)

    @property
    def layers(self) -> str:
        """Return the kind of layers that the run has on a GPU: portable or te."""
        return "portable" if self.config.model.layers == "portable" else "te"

    @cached_property
    def longest(self) -> int:
        """Return the tokens of the longest sequence, which is never cut."""
        return self.config.data.max_prompt_tokens + self.config.rollout.max_extent

    @property
    def pack(self) -> int:
        """Return the tokens of the largest micro-batch: a sequence beyond the budget has one of its own."""
        return max(self.longest, self.config.update.tokens_per_micro_batch)

    def shape(self, model: str) -> Shape:
        """Return a model's sizes; of several teachers, which take turns, those of the largest."""
        if model == "teacher" and self.teachers:
            return max(self.teachers, key=lambda shape: shape.parameters)
        return {"critic": self.critic, "reward": self.reward}.get(model) or self.actor

    def held(self, model: str, stage: int, shape: Shape | None = None) -> Held:
        """Count the parameters of a rank of this stage; shape: of one of several teachers."""
        own = (shape or self.shape(model)).held(self.layout, stage, critic=model in SCALAR)
        if model not in ("actor", "critic") or self.lora(model).rank is None:
            return own
        beside = self.trained_of(model, self.layout, stage)
        return Held(own.shared + beside.shared, own.experts + beside.experts, own.single)

    def lora(self, model: str) -> LoraConfig:
        """Return the LoRA adapters of the actor or the critic."""
        return self.optimizer(model).lora

    def optimizer(self, model: str) -> OptimizerConfig:
        """Return the optimizer of the actor or the critic."""
        return self.config.critic if model == "critic" else self.config.actor

    def trained_of(self, model: str, layout: Layout, stage: int) -> Held:
        """Count the parameters of a rank of this layout and stage that have gradients and optimizer state."""
        optimizer = self.optimizer(model)
        return self.shape(model).held(layout, stage, critic=model == "critic", optimizer=optimizer)

    @property
    def engine_tp(self) -> int:
        """Return the tensor-parallel size of an engine."""
        rollout = self.config.rollout
        return rollout.engine_tp if rollout.capabilities.sharded else 1

    def engines(self, ranks: int) -> int:
        """Return how many engines there are on so many ranks, or at URLs."""
        rollout = self.config.rollout
        return len(rollout.urls) if rollout.capabilities.remote else ranks // self.engine_tp

    @cached_property
    def engine_weights(self) -> float:
        """Return the bytes of an engine's weights on one of its ranks, or of a server at a URL, on its own
        GPU."""
        if not self.config.rollout.capabilities.sharded:
            return self.actor.parameters * self.actor.itemsize
        return int(sum(self.actor.engine_tensors(self.engine_tp, self.config.rollout.weights_dtype)))

    @property
    def transferred(self) -> float:
        """Return the bytes that a weight sync writes to one rank of an engine. Frozen weights come with the
        first only, unless the engine loses its weights in between."""
        if "engine.weights" not in self.keep:
            return self.engine_weights
        changing = self.trained_of("actor", Layout(), 0).all
        if self.lora("actor").rank is not None:
            changing, _ = self.actor.adapted(self.lora("actor"), 1)
        return self.engine_weights * changing / self.actor.parameters

    @cached_property
    def cache(self) -> float:
        """Return the bytes of an engine's KV cache on one rank."""
        rollout = self.config.rollout
        if not rollout.capabilities.continuous_batching:
            # A full batch of the longest responses; other engines take what their share of memory leaves.
            return rollout.max_batch * (self.longest * self.actor.cache_bytes(1) + self.actor.state_bytes(1))
        left = rollout.engine_memory * self.device.memory - self.engine_weights
        # A server has as much room as it has, which check_servers looks at: at least that of its weights.
        return max(self.engine_weights if rollout.capabilities.remote else 0.0, left)

    @property
    def cache_tokens(self) -> float:
        """Return the tokens that one engine's KV cache holds, beside the states of responses of the greatest
        length."""
        tp = self.engine_tp
        return self.cache / (self.actor.cache_bytes(tp) + self.actor.state_bytes(tp) / self.longest)

    @cached_property
    def transfer_memory(self) -> float:
        """Return the bytes on a GPU that a weight sync needs for messages and the engine's buckets."""
        rollout = self.config.rollout
        bucket = float(rollout.transfer_bucket * 2**20)
        if self.lora("actor").rank is not None:  # a weight is merged with its adapters when it is sent
            bucket += self.actor.adapted(self.lora("actor"), self.layout.tp)[1] * self.actor.itemsize
        if not rollout.capabilities.continuous_batching:
            return bucket
        # What SGLang's ranks copy from, or servers are sent, holds at least the largest tensor.
        largest = max(self.actor.engine_tensors(self.engine_tp, rollout.weights_dtype))
        return bucket + min(self.engine_weights, max(bucket, largest))

    def group(self, name: str, stage: int, *, every: bool = False) -> float:
        """Return the bytes of a tensor group, such as actor.weights, on a rank of this stage. Of several
        teachers or critics one is there at a time, the largest at most; `every`, and where they never leave:
        all."""
        owner, _, part = name.partition(".")
        if owner == "engine":
            if self.config.rollout.capabilities.remote:
                return 0.0  # its servers have GPUs of their own
            return self.engine_weights if part == "weights" else self.cache
        itemsize, layout = self.shape(owner).itemsize, self.layout
        alike = self.config.critic.count if owner == "critic" and (every or name in self.keep) else 1
        if part == "weights":
            shapes = self.teachers if owner == "teacher" and self.teachers else (self.shape(owner),) * alike
            alone = [self.held(owner, stage, shape) for shape in shapes]
            filled = self.whole_matrices(owner, stage)[1] * itemsize
            sizes = [float((h.shared + h.experts) * itemsize + h.single * SINGLE) + filled for h in alone]
            return sum(sizes) if every or name in self.keep else max(sizes)
        held = self.trained_of(owner, layout, stage)
        turned, filled, of_muon = self.whole_matrices(owner, stage)
        if part == "gradients":  # whole on every rank
            size = (held.shared + held.experts + filled) * self.gradient_size + held.single * SINGLE
            return float(alike * size)
        # Adam's two moments, or Muon's momentum, and float32 weights where the model's own are bf16, sharded
        # by Megatron over data- and context-parallel ranks, an expert's over the ranks that hold the same.
        replicas = layout.dp * layout.cp
        sharded = (held.shared - turned[0]) / replicas
        sharded += (held.experts - turned[1]) / (layout.stage // layout.ep)
        single = held.single / replicas
        states = (sharded + single) * 2 * SINGLE + of_muon * SINGLE
        return alike * (states + ((sharded + of_muon) * SINGLE if itemsize < SINGLE else 0.0))

    @cached_property
    def of_muon(self) -> frozenset[str]:
        """Return the models whose matrices Muon turns."""
        return frozenset(model for model in self.trained if self.optimizer(model).optimizer == "muon")

    @cached_property
    def _whole_matrices(self) -> dict[tuple[str, int], tuple[tuple[int, int], int, int]]:
        return {}  # as `_activations`

    def whole_matrices(self, model: str, stage: int) -> tuple[tuple[int, int], int, int]:
        """Count, on a rank of this stage, the elements of the matrices that Muon turns, of those that all
        replicas share and of experts; what fills Megatron's buffers up, in which each is whole in the share
        of one replica; and those of the fullest replica's share. Zeros with Adam. (Buffers of several
        buckets, which overlapped messages have, are counted as one.)"""
        if model not in self.of_muon:
            return (0, 0), 0, 0
        if (model, stage) not in self._whole_matrices:
            layout, both = self.layout, self.shape(model).matrices(self.layout, stage)
            ranks = layout.dp * layout.cp, layout.stage // layout.ep
            shares = [fullest(sizes, replicas) for sizes, replicas in zip(both, ranks, strict=True)]
            turned = sum(both[0]), sum(both[1])
            filled = sum(map(mul, shares, ranks)) - sum(turned)
            self._whole_matrices[model, stage] = turned, filled, sum(shares)
        return self._whole_matrices[model, stage]

    def turning(self, model: str) -> float:
        """Return the bytes that Muon needs on a rank to turn the largest matrix: its tensor-parallel shards
        and what they make together, in float32; normalised; and two of its iterates in the model's type."""
        if model not in self.of_muon:
            return 0.0
        shape = self.shape(model)
        largest = max(max(sizes, default=0) for sizes in shape.matrices(Layout(), 0))
        return largest * (2 * SINGLE * (self.layout.tp > 1) + SINGLE + 2 * shape.itemsize)

    @property
    def gradient_size(self) -> int:
        """Return the bytes in which a weight's gradient is summed and sent to other replicas."""
        return BYTES[self.config.parallel.grad_dtype]

    def exchange(self, model: str, stage: int) -> tuple[float, float]:
        """Return the bytes that a rank of this stage needs of its own to add gradients up over replicas:
        during the backward pass, and after it. In bf16 it gets every replica's part of a bucket, adds them up
        in float32 and rounds; the optimizer's step takes its share of all sums in float32."""
        if self.gradient_size == SINGLE:
            return 0.0, 0.0
        held, replicas = self.trained_of(model, self.layout, stage), self.layout.dp * self.layout.cp
        of_expert = self.layout.stage // self.layout.ep  # ranks that hold the same one
        fewest = of_expert if held.experts else replicas
        received = self.bucket(model, stage) * (self.gradient_size + SINGLE / fewest)
        share = held.shared / replicas + held.experts / of_expert
        # Buckets of chunks, and of the first stage, are complete while others still go back.
        early = self.overlaps and (stage == 0 or self.layout.vpp > 1)
        return received if early else 0.0, max(received, share * SINGLE)

    @property
    def overlaps(self) -> bool:
        """Return whether gradients or weights travel beside computation, for which Megatron cuts buckets."""
        parallel, usual = self.config.parallel, self.layout.dp * self.layout.cp > OVERLAP_ABOVE
        wanted = (parallel.overlap_grad_reduce, parallel.overlap_param_gather)
        return any(usual if value is None else value for value in wanted)

    @property
    def in_fp8(self) -> bool:
        """Return whether layers multiply in FP8."""
        return self.config.model.fp8.format != "none" and self.layers == "te"

    def quantised(self, model: str, stage: int, *, forward_only: bool = False) -> float:
        """Return the bytes of the FP8 copies that Transformer Engine keeps of a model's weights on a rank of
        this stage. They are made in the first pass after an update, or after the weights have come to the
        GPU, and leave it with them. forward_only: of rows alone, which is all that a pass without gradients
        makes."""
        fp8 = self.config.model.fp8
        if not self.in_fp8:
            return 0.0
        elements = self.shape(model).quantised(self.layout, stage, fp8.first_last_layers_bf16)
        both = quantised_bytes(fp8.recipe, self.device)
        return elements * (max(1.0, both / 2) if forward_only else both)

    @cached_property
    def _activations(self) -> dict[str, Activations]:
        return {}  # by model: every phase and stage asks

    def activations(self, model: str) -> Activations:
        if model in self._activations:
            return self._activations[model]
        config, tp, tied = self.config, self.layout.tp, is_tied(self.actor.config)
        passes = Passes(
            tp=tp,
            cp=self.layout.cp,
            recompute=config.model.recompute,
            chunk=config.update.logprob_chunk,
            layers=self.layers,
            sequence_parallel=tp > 1 and config.parallel.sequence_parallel is not False,
            recomputed=(config.model.recompute_layers or 0) * self.layout.vpp or None,
            modules=config.model.recompute_modules,
            router="fp32" if config.model.router_dtype == "fp32" else config.model.dtype,
            fp8=self.in_fp8,
            trains_head=not is_frozen(TIED_OUTPUT if tied else OUTPUT, 0, config.actor),
        )
        found = activations(self.shape(model), passes, critic=model in SCALAR)
        return self._activations.setdefault(model, found)

    def work(self, phase: Phase, stage: int, tokens: float) -> dict[str, float]:
        """Return the bytes that a phase allocates besides its tensor groups. tokens: of a micro-batch."""
        if phase.name == WEIGHT_TRANSFER.name:
            return {"transfer buckets": self.transfer_memory}
        pp = self.layout.pp
        last = stage == pp - 1
        if phase.model is None:
            return {}
        found = self.activations(phase.model)
        tokens /= self.layout.cp  # of each sequence a rank has its part
        sizes = self.shape(phase.model).sizes
        layers = sizes.layers // pp
        own = self.layout.layers(sizes.layers, stage)[:layers] if found.dense else ()
        dense = sum(layer < sizes.dense for layer in own)
        # What the head makes of likeliest tokens.
        of_old, of_teacher = self.config.algorithm.dppo.top_k, self.config.teacher.top_k or 0
        ks = {"old_top_k": of_old, "teacher_top_k": of_teacher, "actor_update": of_old + of_teacher}
        several = SEVERAL * tokens * ks.get(phase.name, 0) * last * FRAGMENTATION
        if not phase.updates_weights:
            return {"activations": found.forward_only(tokens, last, dense) * FRAGMENTATION + several}
        begun = in_flight(self.layout, stage)
        outputs = passed_on(self.layout, begun, last)
        whole, without_head = (
            found.training(tokens, layers, begun, head, outputs, dense) for head in (last, False)
        )
        head = (whole - without_head) * FRAGMENTATION + several
        parts = {"activations": without_head * FRAGMENTATION, "head": head}
        during, behind = self.exchange(phase.model, stage)
        if summed := max(during, behind - sum(parts.values())):  # activations make room for what comes then
            parts["summed gradients"] = summed
        if beyond := max(0.0, self.turning(phase.model) + behind - sum(parts.values())):
            parts["turned matrix"] = beyond
        return parts

    def needs(self, tokens: float | None = None, phases: Sequence[Phase] | None = None) -> Iterator[Need]:
        """Yield each phase's need on the fullest stage. tokens: of a micro-batch; None: `pack`; phases: None:
        all."""
        for phase in self.phases if phases is None else phases:
            needs = (self.need(phase, stage, tokens) for stage in self.stages)
            yield max(needs, key=lambda need: need.total)
        if phases is None:
            yield from self._beside_steps

    @cached_property
    def _beside_steps(self) -> tuple[Need, ...]:
        """Return the needs of construction and of a checkpoint, on the fullest stage."""
        needs = [[self.built(model, stage) for model in self.trained for stage in self.stages]]
        if self.config.checkpoint.every:
            needs.append(
                [
                    self.saved(model, stage, read=read)
                    for model in self.trained
                    for stage in self.stages
                    for read in ((True,) if self.replay else (False, True))
                ]
            )
        return tuple(max(of_one, key=lambda need: need.total) for of_one in needs)

    def need(self, phase: Phase, stage: int, tokens: float | None = None) -> Need:
        """Return a phase's need on a rank of this stage. tokens: of a micro-batch; None: `pack`."""
        groups = phase.on_gpu | self.keep
        if self.config.parallel.rollout_ranks:  # whose phases are these alone; others have no engine
            of_engine = frozenset(name for name in groups if name.startswith("engine."))
            groups = of_engine if phase.name == ROLLOUT.name else groups - of_engine
        work = self.work(phase, stage, self.pack if tokens is None else tokens)
        # FP8 copies of an update, whose work has a head, are still there when the weights are transferred.
        only = not (phase.name == WEIGHT_TRANSFER.name or "head" in work)
        present = self._present(groups, stage, forward_only=only)
        return Need(phase.name, present | work | {"contexts": OVERHEAD}, stage)

    def built(self, model: str, stage: int) -> Need:
        """Return what the construction of a trained model needs on a rank of this stage, before any engine
        starts: DistributedDataParallel allocates its buffers of parameters and gradients while the weights
        that it copies are there; then the optimizer makes float32 weights."""
        earlier = {name for name in self.keep if model == "critic" and name.startswith("actor.")}
        parts = {name: self.group(name, stage) for name in sorted(earlier)}
        for part in ("weights", "gradients"):
            parts[f"{model}.{part}"] = self.group(f"{model}.{part}", stage)
        trained = self.trained_of(model, self.layout, stage)
        copied = float((trained.shared + trained.experts) * self.shape(model).itemsize)
        # Its moments come with the first step: of Adam's three numbers two, of Muon's two one.
        _, _, of_muon = self.whole_matrices(model, stage)
        singles = (self.group(f"{model}.optimizer", stage) - 2 * SINGLE * of_muon) / 3 + SINGLE * of_muon
        singles *= self.shape(model).itemsize < SINGLE
        parts["copied weights"] = max(copied, singles)
        return Need("construction", {**parts, "contexts": OVERHEAD}, stage)

    def saved(self, model: str, stage: int, *, read: bool = False) -> Need:
        """Return what a checkpoint of a model needs on a rank of this stage. To write it every replica
        gathers one of the three float32 numbers of a bucket's parameters at a time, and NCCL receives into a
        flat copy. read: when it is read, Megatron joins the gate and up projections of all layers, which are
        apart in the file, before the model takes them."""
        groups = frozenset({f"{model}.weights", f"{model}.optimizer"}) | self.keep
        if self.config.parallel.rollout_ranks:
            groups = frozenset(name for name in groups if not name.startswith("engine."))
        gathered = self.bucket(model, stage) * SINGLE * (2 + 1 / (self.layout.dp * self.layout.cp))
        joined = float(self.shape(model).joined(self.layout, stage) * self.shape(model).itemsize)
        joined *= self.lora(model).rank is None
        work = {"joined weights": joined} if read else {"gathered bucket": gathered}
        present = self._present(groups, stage)
        if (read or model == "critic") and f"{model}.weights" not in self.keep:
            present.pop(f"{model}.fp8_copies", None)  # no pass has made any since the weights came
        return Need("checkpoint", {**present, **work, "contexts": OVERHEAD}, stage)

    def bucket(self, model: str, stage: int) -> float:
        """Return the parameters of the largest bucket of Megatron's gradient buffers on a rank of this stage.
        It cuts a buffer on the first pipeline stage alone, and only where messages overlap with work."""
        parallel, layout = self.config.parallel, self.layout
        held, tensor = self.trained_of(model, layout, stage), self.shape(model).largest_tensor(layout.tp)
        # Of each virtual stage; one of them has the embedding or the output layer besides.
        whole = max(held.shared / layout.vpp + tensor * (1 - 1 / layout.vpp), held.experts / layout.vpp)
        if stage or not self.overlaps:
            return whole
        full = parallel.overlap_bucket or max(40_000_000, 1_000_000 * layout.dp)
        return min(whole, full + tensor)  # it ends with the tensor that fills it

    def _present(self, groups: frozenset[str], stage: int, *, forward_only: bool = False) -> dict[str, float]:
        """Return the bytes of tensor groups on a rank of this stage, and of the FP8 copies that come with a
        model's weights. forward_only: in a phase that makes passes without gradients alone."""
        parts = {name: self.group(name, stage) for name in sorted(groups)}
        for owner in sorted(name.removesuffix(".weights") for name in groups if name.endswith(".weights")):
            only = forward_only and f"{owner}.weights" not in self.keep
            if owner != "engine" and (copies := self.quantised(owner, stage, forward_only=only)):
                parts[f"{owner}.fp8_copies"] = copies
        return parts

    def budget(self) -> int:
        """Return the largest update.tokens_per_micro_batch that fits, in steps of 1,024; 0 if none does."""

        def is_too_large(tokens: int) -> bool:
            return any(need.total > self.device.memory for need in self.needs(tokens))

        if is_too_large(self.longest):
            return 0
        larger = range(self.longest // 1024 * 1024 + 1024, 2**24 + 1, 1024)
        fitting = bisect(larger, False, key=is_too_large)
        return larger[fitting - 1] if fitting else self.longest

    def host(self) -> dict[str, float]:
        """Return the bytes that a node needs of its memory, by what takes them. It is the first node: it has
        trainers, and where they do not fill it, ranks that only generate."""
        config, world = self.config, self.layout.world
        gpus, apart = config.cluster.gpus_per_node, config.parallel.rollout_ranks
        trainers, apart_here = min(gpus, world), min(max(0, gpus - world), apart)
        saves, verifies = config.checkpoint.every and not self.replay, config.has_engine and not self.replay
        # What is off the GPU at any one time; gradients come back as zeros, engines' weights from the actor.
        returning = {n for n in self.groups if not n.startswith("engine.") and not n.endswith(".gradients")}
        away = max(
            sum(self.group(name, stage, every=True) for name in sorted(returning - resident - self.keep))
            for resident in self.residents
            for stage in self.stages
        )
        written = trainers / world  # of a checkpoint, of which each rank writes as much
        drawn = self.drawn * apart_here / apart if apart else 0.0
        verifiers = config.reward.workers * (apart_here if apart else trainers)
        return {
            "pinned buffers": away * trainers,
            "rollouts": self.batch() * trainers + drawn,
            "checkpoint staging": self.checkpoint() * written if saves else 0.0,
            "gathered optimizer": self.gathered_optimizer() * trainers if config.checkpoint.every else 0.0,
            "processes": HOST_PROCESS * (trainers + apart_here),
            "verifiers": verifiers * 0.3 * GIB if verifies else 0.0,
        }

    @property
    def routed(self) -> int:
        """Return the bytes of what is recorded of a token's experts (`rollout.routing_replay`)."""
        sizes = self.actor.sizes
        if not (self.config.rollout.routing_replay and sizes.experts):
            return 0
        return (
            sizes.layers * int(self.actor.config["num_experts_per_tok"]) * (1 if sizes.experts < 256 else 2)
        )

    @property
    def drawn(self) -> float:
        """Return the bytes that a step's responses take where they were drawn, of all engines together, until
        they are delivered: as bodies, and packed."""
        return self.step_tokens(self.longest) * (DRAWN + 2 * self.routed)

    def batch(self) -> float:
        """Return the bytes of host memory that a step's batch takes of a rank, at most: its replica's share
        of the tokens, with their columns; an even part of what the engines drew, or of its files; and the
        facts of all responses. Without an engine all ranks have read the whole batch."""
        config, tokens = self.config, self.step_tokens(self.longest)
        # Columns of responses are counted as if they were of tokens: micro-batches have indices of 16 bytes.
        columns = frozenset[str]().union(*(phase.writes for phase in training_phases(config))) - {"tokens"}
        each = 8 + 1 + SINGLE * len(columns)
        if not config.has_engine:
            return tokens * each
        # Likeliest tokens and their log-probs, and while they are put together twice more; the engine's
        # choice of experts, once more in the micro-batches.
        likeliest = (config.teacher.top_k or 0) + config.algorithm.dppo.top_k
        each += 3 * 2 * SINGLE * likeliest + 2 * self.routed
        shared = tokens / self.layout.dp * each + self.drawn / self.layout.world
        return shared + config.responses * KNOWN

    @cached_property
    def on_cpu(self) -> dict[str, float]:
        """Return the bytes that a run on this machine's CPU holds all the time, on all ranks together, by
        what takes them. Nothing is offloaded."""
        apart, ranks = self.config.parallel.rollout_ranks, self.layout.stage
        held = dict.fromkeys(("weights", "gradients", "optimizer"), 0.0)
        held["engines' weights"] = 0.0
        for name in sorted(self.groups - {"engine.kv_cache"}):
            owner, _, part = name.partition(".")
            if owner == "engine":
                held["engines' weights"] = self.group(name, 0) * (apart or self.layout.world)
            else:
                stages = range(self.layout.pp)
                held[part] += ranks * sum(self.group(name, stage, every=True) for stage in stages)
        return held | {"processes": LAUNCHER + FORKED * (self.layout.world + apart)}

    @cached_property
    def cpu_pack(self) -> int:
        """Return the tokens of a rank's largest micro-batch in a run on CPUs, whose mini-batches are often
        smaller than the budget."""
        config = self.config
        together = max(config.mini_batch, config.critic.mini_batch or 0)
        sequences = -(-together // self.layout.dp)
        tokens = sequences * self.longest
        if config.update.share_prompts:
            prompts = -(-sequences // config.rollout.group_size)
            responses = sequences * config.rollout.max_extent
            tokens = prompts * config.data.max_prompt_tokens + responses
        return min(self.pack, tokens)

    @cached_property
    def on_cpu_by_phase(self) -> dict[str, dict[str, float]]:
        """Return the bytes that such a run needs in each phase besides, on all ranks together, by what takes
        them: once it has made a step, as freed activations stay with a process (glibc gives back few blocks
        below 32 MiB). A checkpoint is another "phase", and comes with the copy that is being written."""
        config, world = self.config, self.layout.world
        pairs = [(phase, stage) for phase in self.phases for stage in range(self.layout.pp)]
        most = max(sum(self.work(*pair, self.cpu_pack).values()) for pair in pairs) * world
        batch = self.batch() * world + (self.drawn if config.parallel.rollout_ranks else 0.0)
        found: dict[str, dict[str, float]] = {}
        for phase in self.phases:
            parts = {"activations": most, "batch": batch}
            if phase.updates_weights and self.overlaps:
                # Beside the computation gloo sums a copy of Megatron's buffer of gradients.
                stages = range(self.layout.pp)
                sums = max(self.group(f"{phase.model}.gradients", stage) for stage in stages)
                parts["summed gradients"] = sums * world
            if phase.name == ROLLOUT.name and not config.rollout.capabilities.continuous_batching:
                engines = config.parallel.rollout_ranks or world
                decoded = min(config.rollout.max_batch, -(-config.responses // engines))
                each = self.longest * self.actor.cache_bytes(1) + self.actor.state_bytes(1)
                parts["KV cache"] = decoded * each * engines
            found[phase.name] = parts
        if config.checkpoint.every:
            # What is saved is written from a copy while the run goes on.
            for parts in found.values() if config.checkpoint.background and not self.replay else ():
                parts["copy of a checkpoint"] = self.checkpoint()
            found["checkpoint"] = {"gathered optimizer": self.gathered_optimizer() * world}
        return found

    def problem_on_cpu(self, memory: float) -> str | None:
        """Return why a run on the CPUs of a machine of so many bytes surely does not fit, in one line that
        says what to change; None where it may."""
        held = sum(self.on_cpu.values())
        # Of what a save takes, the three numbers of each parameter are surely there.
        saved = sum(self.on_cpu_by_phase.get("checkpoint", {}).values()) * 3 / 5
        if (facts := self.config.responses * FACTS) + held + saved > memory >= held + saved:
            return (
                f"{self.config.responses:,} responses a step need at least {facts / GIB:,.1f} GiB of this "
                f"machine's {memory / GIB:.1f} (lower "
                f"{'rollout.prompts' if self.config.has_engine else 'supervised.batch'})"
            )
        if held + saved <= memory:
            return None
        parts = [*self.on_cpu.items(), *([("a checkpoint", saved)] if saved else [])]
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
        remedy = "use a smaller model, or a machine with more memory"
        if self.engine_tp == 1 and self.layout.world > 1 and self.on_cpu["engines' weights"]:
            remedy = f"start fewer ranks, each of which has a whole engine, {remedy}"
        if held <= memory:
            remedy = f"set checkpoint.every=0, or {remedy}"
        return (
            f"{self.layout.world} ranks on this machine's CPU need {(held + saved) / GIB:.1f} GiB of its "
            f"{memory / GIB:.1f} ({listed}); {remedy}"
        )

    def warning_on_cpu(self, memory: float, free: float | None = None) -> str | None:
        """Return that such a run comes near to the machine's memory, or to what is `free` of it now; None
        where it does not."""
        phase, parts = max(self.on_cpu_by_phase.items(), key=lambda pair: sum(pair[1].values()))
        total = sum(self.on_cpu.values()) + sum(parts.values())
        if free is not None and free < total <= NEAR * memory:
            there = f"{free / GIB:.1f} of this machine's {memory / GIB:.1f} are free now"
            return (
                f"the run may need up to {total / GIB:.1f} GiB in phase {phase}, and {there}: "
                "the kernel ends what takes too much (end other programs first)"
            )
        if total <= NEAR * memory:
            return None
        part = max(parts, key=parts.__getitem__)
        what = f"up to {total / GIB:.1f} GiB of this machine's {memory / GIB:.1f} in phase {phase}"
        change = {
            "activations": "lower update.tokens_per_micro_batch or rollout.max_response_tokens",
            "batch": "lower rollout.prompts or rollout.max_response_tokens",
            "summed gradients": "start fewer ranks",
            "KV cache": "lower rollout.max_batch",
            "copy of a checkpoint": "set checkpoint.background=false or checkpoint.every=0",
            "gathered optimizer": "set checkpoint.every=0",
        }
        return (
            f"the run may need {what}, {parts[part] / GIB:.1f} of it {part}: the kernel ends what takes too "
            f"much ({change[part]})"
        )

    def step_tokens(self, length: float) -> float:
        """Return the tokens of a step's batch whose sequences have this length."""
        return self.config.responses * length

    @property
    def trained(self) -> tuple[str, ...]:
        return ("actor", "critic") if self.config.has_critic else ("actor",)

    def gathered_optimizer(self) -> float:
        """Return the bytes of a rank's host memory while a model is saved or loaded: each replica gathers the
        whole optimizer of its shard, three float32 numbers a parameter. On the way Megatron has two more
        copies of one of them, and the rank's own part of all three."""
        held = [
            self.trained_of(model, self.layout, stage).all - sum(self.whole_matrices(model, stage)[0])
            for model in self.trained
            for stage in self.stages
        ]
        return max(held) * SINGLE * (3 + 2 + 3 / (self.layout.dp * self.layout.cp))

    def checkpoint(self, *, pretraining: bool = False) -> float:
        """Return the bytes of one checkpoint, without padding. pretraining: of value pretraining, which has
        no actor."""
        total = 0.0  # of weights, the optimizer's own float32 weights, Adam's moments
        models = (*self.trained, *["critic"] * (self.config.critic.count - 1))
        for model in models[1:] if pretraining else models:
            shape, trained = self.shape(model), self.trained_of(model, Layout(), 0).all
            whole = shape.held(Layout(), 0, critic=model == "critic").all
            total += (whole if self.lora(model).rank is None else trained) * shape.itemsize
            total += trained * 3 * SINGLE
            if model in self.of_muon:  # a momentum, and a float32 copy of what is bfloat16
                matrices = sum(map(sum, shape.matrices(Layout(), 0)))
                total -= matrices * (1 if shape.itemsize < SINGLE else 2) * SINGLE
        return total

    @property
    def checkpoints(self) -> tuple[int, int]:
        """Return the most checkpoints that a run has on disk at once, and those of value pretraining beside
        them: the `checkpoint.keep` newest, one that is written before the oldest goes, and those of every
        `keep_every`-th step (`prune` in training/checkpoint.py); with keep 0 all. Not those that a run writes
        when it is told to leave."""
        config, settings = self.config, self.config.checkpoint
        if not settings.every:
            return 0, 0
        pretrained = config.value_pretraining.steps if config.has_critic else 0
        written, before = -(-config.steps // settings.every), -(-pretrained // settings.every)
        if not settings.keep:
            return written, before
        newest = settings.keep + 1
        kept = min(written, newest)
        if settings.keep_every:
            kept += (written - kept) * settings.every // lcm(settings.every, settings.keep_every)
        return kept, min(before, newest - min(written, newest))

    @property
    def disk(self) -> float:
        """Return the bytes of the most checkpoints that a run has on disk at once."""
        written, before = self.checkpoints
        return written * self.checkpoint() + before * self.checkpoint(pretraining=True)

    def problem(self, room: float = 0.0) -> str | None:
        """Return why the run does not fit, in one line that says what to change; None where it does.
        room: bytes of each GPU that must stay free."""
        rollout, memory = self.config.rollout, self.device.memory
        for need in self.needs():
            if need.total + room > memory:
                parts = sorted(need.parts.items(), key=lambda pair: -pair[1])[:4]
                listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
                return (
                    f"phase {need.phase} needs {need.total / GIB:.1f} GiB of the {memory / GIB:.1f} of each "
                    f"{self.device.name} (stage {need.stage}: {listed}); {self._advice(need)}"
                )
        too_small = self.cache_tokens < self.longest and not rollout.capabilities.remote
        if self.config.has_engine and not self.replay and too_small:
            return (
                f"the KV cache of an engine holds {self.cache_tokens:,.0f} tokens, one sequence has up to "
                f"{self.longest:,} (raise rollout.engine_tp or rollout.engine_memory "
                f"{rollout.engine_memory:g}, or lower rollout.max_response_tokens)"
            )
        host, there = sum(self.host().values()), self.config.cluster.host_memory * GIB
        if host > there:
            return (
                f"a node needs {host / GIB:.0f} GiB of memory and has {there / GIB:.0f} "
                "(cluster.host_memory; lower rollout.prompts, or use more nodes)"
            )
        return None

    def _advice(self, need: Need) -> str:
        if self.config.residency.offload is False:
            return "set residency.offload=true"
        if self.keep & set(need.parts):
            return f"take {', '.join(sorted(self.keep))} out of residency.keep"
        if need.phase == "rollout":
            key = "engine_memory" if self.config.rollout.capabilities.continuous_batching else "max_batch"
            return f"lower rollout.{key}"
        if need.phase == "construction":
            return "raise parallel.tp or parallel.pp"
        if need.phase == "checkpoint":
            return "raise parallel.tp or parallel.pp, or set checkpoint.every=0"
        if need.phase == "weight_transfer":
            return "raise parallel.tp, parallel.pp or rollout.engine_tp"
        budget = self.budget()
        if self.longest <= budget < self.config.update.tokens_per_micro_batch:
            return f"lower update.tokens_per_micro_batch to {budget}"
        if self.config.model.recompute != "full":
            return "set model.recompute=full"
        if self.config.model.recompute_layers:
            model = self.config.model.model_copy(update={"recompute_layers": None})
            all_layers = replace(self, config=self.config.model_copy(update={"model": model}))
            if max(need.total for need in all_layers.needs()) <= self.device.memory:
                return f"raise model.recompute_layers {self.config.model.recompute_layers}, or set it to null"
        return "raise parallel.tp or parallel.pp, or lower rollout.max_response_tokens"


def plan_of(
    config: Config,
    actor: Mapping[str, Any],
    *,
    world: int | None = None,
    cpu: bool = False,
    memory: float | None = None,
    replay: bool = False,
) -> MemoryPlan:
    """Return the plan of a configuration whose actor has this config.json; a critic with a folder of its own,
    a reward model and teachers have theirs, or are as large as the actor where they are not on this machine.

    world   ranks of the job, which decide parallel.dp
    cpu     the ranks are on CPUs, with portable layers
    memory  bytes of a GPU that is there
    replay  see MemoryPlan

    Raises ConfigError where the model or the ranks cannot be divided as `parallel` says."""
    if world is not None:
        sizes = config.parallel
        dp = (world - sizes.rollout_ranks) // (sizes.tp * sizes.pp * sizes.cp)
        config = config.model_copy(update={"parallel": sizes.model_copy(update={"dp": dp})})
    if cpu or family_of(actor).is_linear:
        config = config.model_copy(update={"model": config.model.model_copy(update={"layers": "portable"})})
    parallel, dtype = config.parallel, config.model.dtype
    of_critic = config.critic.path if config.has_critic else None
    critic, reward, *teachers = (
        read_config(path) if path and (path / "config.json").is_file() else actor
        for path in (of_critic, config.reward.model.path, *config.teacher.folders.values())
    )
    for described in (actor, critic, reward, *teachers):
        check_layout(described, parallel.tp, parallel.pp, parallel.ep, parallel.vpp)
        check_recomputed(described, config.model)
        check_linear(described, config)
    check_frozen(actor, config.actor, "actor")
    check_frozen(critic, config.critic, "critic")
    check_lora(actor, config.actor.lora, "actor")
    check_lora(critic, config.critic.lora, "critic")
    shapes = Shape(actor, dtype), Shape(critic, dtype)
    device = device_of(config.cluster, memory)
    of_teachers = tuple(Shape(teacher, dtype) for teacher in teachers)
    plan = MemoryPlan(config, *shapes, device, Shape(reward, dtype), of_teachers, replay)
    try:
        _ = plan.layout
    except ValueError as error:
        raise ConfigError(f"parallel: {error}") from None
    return plan
