"""Inputs of a plan: configuration, models and GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.phases import Phase, find_phases, never_offloaded, replay_phases
from megarl.config.schema import Config, LoraConfig, OptimizerConfig
from megarl.parallel.layout import OVERLAP_ABOVE, Layout
from megarl.plan.sizes import BYTES, Device, Passes, Shape, find_device
from megarl.weights.families import OUTPUT, TIED_OUTPUT, get_family, is_frozen, is_tied, read_config
from megarl.weights.shards import check_frozen, check_layout, check_linear, check_lora, check_recomputed


@dataclass(frozen=True)
class PlanInputs:
    """One run to plan.

    reward    None: the actor's
    teachers  empty: the actor's
    replay    repeats a stored step: no engines, no saved checkpoint"""

    config: Config
    actor: Shape
    critic: Shape
    device: Device
    reward: Shape | None = None
    teachers: tuple[Shape, ...] = ()
    replay: bool = False

    @cached_property
    def phases(self) -> list[Phase]:
        """Return a step's phases on the GPU, without columns. Value pretraining needs no more."""
        config = self.config
        phases = replay_phases(config) if self.replay else find_phases(config, config.main_stage)
        return [phase for phase in phases if phase.on_gpu]

    @cached_property
    def residents(self) -> list[frozenset[str]]:
        """Return each phase's tensor groups on a trainer's GPU, if any."""
        disaggregated = self.config.parallel.rollout_ranks
        groups_by_phase = [phase.on_gpu for phase in self.phases]
        trainer_groups = [
            frozenset(name for name in names if not (disaggregated and name.startswith("engine.")))
            for names in groups_by_phase
        ]
        return [names for names in trainer_groups if names]

    @cached_property
    def groups(self) -> frozenset[str]:
        return frozenset[str]().union(*(phase.on_gpu for phase in self.phases))

    @cached_property
    def keep(self) -> frozenset[str]:
        return self.groups & never_offloaded(self.config, gpu=True)

    @cached_property
    def layout(self) -> Layout:
        sizes = self.config.parallel
        return Layout(sizes.tp, sizes.pp, sizes.dp or 1, sizes.ep, sizes.cp, sizes.vpp)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Return the pipeline stages that may need the most memory.

        The first has the embedding and most micro-batches in flight, the last a head. Only those between may
        have all layers in FP8. With frozen layers, any stage may."""
        last_stage = self.layout.pp - 1
        if self.config.actor.frozen_layers or self.config.critic.frozen_layers:
            return tuple(range(last_stage + 1))
        middle_stages = (1,) if last_stage > 1 and self.config.model.fp8.format != "none" else ()
        return (0, *middle_stages, last_stage) if last_stage else (0,)

    @property
    def recomputed_share(self) -> float:
        model, chunks = self.config.model, self.layout.pp * self.layout.vpp
        layers = max(1, self.actor.sizes.layers // chunks)
        return min(1.0, (model.recompute_layers or layers) / layers) if model.recompute == "full" else 0.0

    @property
    def layers(self) -> str:
        return "portable" if self.config.model.layers == "portable" else "te"

    @property
    def in_fp8(self) -> bool:
        return self.config.model.fp8.format != "none" and self.layers == "te"

    @cached_property
    def passes(self) -> Passes:
        config, tp = self.config, self.layout.tp
        output = TIED_OUTPUT if is_tied(self.actor.config) else OUTPUT
        return Passes(
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
            trains_head=not is_frozen(output, 0, config.actor),
        )

    @cached_property
    def longest(self) -> int:
        """Return the longest sequence's tokens. Sequences are never split."""
        return self.config.data.max_prompt_tokens + self.config.rollout.max_extent

    @property
    def pack(self) -> int:
        return max(self.longest, self.config.update.tokens_per_micro_batch)

    @property
    def trained(self) -> tuple[str, ...]:
        return ("actor", "critic") if self.config.has_critic else ("actor",)

    @cached_property
    def muon_models(self) -> frozenset[str]:
        return frozenset(model for model in self.trained if self.optimizer(model).optimizer == "muon")

    def shape(self, model: str) -> Shape:
        """Return a model's shape: of several teachers the largest."""
        if model == "teacher" and self.teachers:
            return max(self.teachers, key=lambda shape: shape.parameters)
        return {"critic": self.critic, "reward": self.reward}.get(model) or self.actor

    def optimizer(self, model: str) -> OptimizerConfig:
        return self.config.critic if model == "critic" else self.config.actor

    def lora(self, model: str) -> LoraConfig:
        return self.optimizer(model).lora

    @property
    def gradient_size(self) -> int:
        return BYTES[self.config.parallel.grad_dtype]

    @property
    def overlaps(self) -> bool:
        """Return whether communication overlaps. Only then are there buckets."""
        parallel, default = self.config.parallel, self.layout.dp * self.layout.cp > OVERLAP_ABOVE
        settings = (parallel.overlap_grad_reduce, parallel.overlap_param_gather)
        return any(default if value is None else value for value in settings)

    @property
    def in_flight(self) -> bool:
        """Return whether weights change while responses run."""
        return self.config.schedule.in_flight != "none"

    @property
    def engine_tp(self) -> int:
        rollout = self.config.rollout
        return rollout.engine_tp if rollout.capabilities.sharded else 1

    def engines(self, ranks: int) -> int:
        rollout = self.config.rollout
        return len(rollout.urls) if rollout.capabilities.remote else ranks // self.engine_tp

    def step_tokens(self, length: float) -> float:
        return self.config.responses * length


def make_plan_inputs(
    config: Config,
    actor: Mapping[str, Any],
    *,
    world: int | None = None,
    cpu: bool = False,
    memory: float | None = None,
    replay: bool = False,
) -> PlanInputs:
    """Collect a plan's inputs. Models without a config.json get the actor's sizes.

    Raises ConfigError if `parallel` cannot divide models or ranks.

    world: the job's ranks, which decide parallel.dp
    memory: bytes of a real GPU; None: its data sheet's"""
    if world is not None:
        sizes = config.parallel
        dp = (world - sizes.rollout_ranks) // (sizes.tp * sizes.pp * sizes.cp)
        config = config.model_copy(update={"parallel": sizes.model_copy(update={"dp": dp})})
    if cpu or get_family(actor).is_linear:
        config = config.model_copy(update={"model": config.model.model_copy(update={"layers": "portable"})})
    critic_path = config.critic.path if config.has_critic else None
    critic, reward, *teachers = (
        read_config(path) if path and (path / "config.json").is_file() else actor
        for path in (critic_path, config.reward.model.path, *config.teacher.folders.values())
    )
    parallel = config.parallel
    for hf_config in (actor, critic, reward, *teachers):
        check_layout(hf_config, parallel.tp, parallel.pp, parallel.ep, parallel.vpp)
        check_recomputed(hf_config, config.model)
        check_linear(hf_config, config)
    check_frozen(actor, config.actor, "actor")
    check_frozen(critic, config.critic, "critic")
    check_lora(actor, config.actor.lora, "actor")
    check_lora(critic, config.critic.lora, "critic")
    actor_shape, critic_shape, reward_shape, *teacher_shapes = (
        Shape(hf_config, config.model.dtype) for hf_config in (actor, critic, reward, *teachers)
    )
    device = find_device(config.cluster, memory)
    inputs = PlanInputs(
        config, actor_shape, critic_shape, device, reward_shape, tuple(teacher_shapes), replay
    )
    try:
        _ = inputs.layout
    except ValueError as error:
        raise ConfigError(f"parallel: {error}") from None
    return inputs
