"""The objects of a run (`Run`), and one step's data (`Step`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from megarl.config.files import OptionalFiles
from megarl.config.methods import load_function
from megarl.config.phases import never_offloaded
from megarl.config.schema import PRETRAINING, Config
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.model.hf_config import read_hf_config
from megarl.observe.run_log import SampleRecord
from megarl.parallel.offload_group import HostPool
from megarl.parallel.runtime import Runtime
from megarl.rollout.engines.base import RolloutEngine
from megarl.schedule.ahead import RemoteGeneration
from megarl.schedule.in_flight import InFlightGeneration
from megarl.schedule.models import ModelBuilder, load_tokenizer
from megarl.schedule.offload import EngineMemory, OffloadManager, Residency
from megarl.schedule.source import BatchSource, Generation, SupervisedPairs
from megarl.sync.weight_sync import Failures, WeightSync, make_weight_sync
from megarl.training.columns import Tables
from megarl.training.model import InferenceModel, TrainableModel
from megarl.training.self_teacher import AverageWeights
from megarl.weights.hf import ModelFolder
from megarl.weights.megatron import open_model


@dataclass(eq=False)
class Run:
    """The objects that live for the whole run on a training rank.

    folder         the actor's original one; hf: its config.json
    host           pinned memory of offloaded tensor groups
    method_states  the advantage method's state, by name in a checkpoint, equal on every rank
    engine         None without engines on this rank
    dispensable    writes files whose failures do not end the run"""

    config: Config
    runtime: Runtime
    tokenizer: Any
    folder: ModelFolder
    hf: PretrainedConfig
    offload: OffloadManager
    host: HostPool
    actor: TrainableModel
    critics: list[TrainableModel]
    reference: InferenceModel | None
    reward_model: InferenceModel | None
    teachers: list[InferenceModel]
    method_states: dict[str, Any]
    source: BatchSource
    engine: RolloutEngine | None = None
    remote: RemoteGeneration | None = None
    weight_sync: WeightSync | None = None
    dispensable: OptionalFiles = field(default_factory=OptionalFiles)

    @cached_property
    def models(self) -> dict[str, TrainableModel]:
        """Return the trained models by name in a checkpoint."""
        return {"actor": self.actor, **dict(zip(("critic", "critic_2"), self.critics, strict=False))}

    @property
    def critic_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.models if name != "actor")

    @cached_property
    def residency(self) -> Residency:
        return Residency(self.offload, self.models, self.weight_sync if self.engine is not None else None)

    def publish(self, version: int) -> dict[str, float]:
        """Transfer the actor's weights, to remote engines perhaps later; return metrics."""
        if self.remote is not None:
            return self.remote.publish(version)
        assert self.weight_sync is not None
        return self.weight_sync.sync(version).metrics()

    def transfer_pending(self, *, wait: bool) -> dict[str, float]:
        if self.remote is None or not self.remote.can_transfer(wait=wait):
            return {}
        self.residency.onload("weight_transfer", {"actor.weights"})
        return self.remote.transfer()

    def close(self) -> None:
        self.source.close()


def build_run(config: Config, runtime: Runtime, source: BatchSource | None = None) -> Run:
    """Build models, batch source and weight sync. source: replaces the configured one, without engines."""
    tokenizer = load_tokenizer(config.model.path)
    folder, hf = open_model(config.model.path), read_hf_config(config.model.path)
    resident_groups = never_offloaded(config, gpu=runtime.device.type == "cuda")
    offload, host = OffloadManager(runtime.device, resident_groups), HostPool(runtime.device)

    builder = ModelBuilder(config, runtime, folder, hf, offload, host)
    actor = builder.build_actor()
    critics = [builder.build_critic() for _ in range(config.critic.count if config.has_critic else 0)]
    reference = build_reference(builder, actor)
    reward_path = config.reward.model.path
    reward_model = builder.build_frozen("reward", reward_path) if config.has_reward_model else None
    teachers = build_teachers(builder, actor)
    states = config.algorithm.advantage_method.states
    method_states = {name: load_function(constructor)(config.algorithm) for name, constructor in states}

    engine, remote, weight_sync = None, None, None
    if source is None:
        if not config.has_engine:
            source = SupervisedPairs(config, tokenizer)
        elif runtime.rollout_ranks:
            weight_sync = make_weight_sync(config, runtime, folder.config, actor.model, None)
            in_flight = config.schedule.in_flight != "none"
            remote_class = InFlightGeneration if in_flight else RemoteGeneration
            source = remote = remote_class(config, runtime, weight_sync)
        else:
            source, weight_sync = build_generation(config, runtime, tokenizer, folder, actor, offload)
            engine = source.engine
    return Run(
        config=config,
        runtime=runtime,
        tokenizer=tokenizer,
        folder=folder,
        hf=hf,
        offload=offload,
        host=host,
        actor=actor,
        critics=critics,
        reference=reference,
        reward_model=reward_model,
        teachers=teachers,
        method_states=method_states,
        source=source,
        engine=engine,
        remote=remote,
        weight_sync=weight_sync,
    )


def build_reference(builder: ModelBuilder, actor: TrainableModel) -> InferenceModel | None:
    """Build a KL term's reference model: with LoRA the actor without adapters."""
    if not builder.config.algorithm.has_reference:
        return None
    if builder.config.actor.lora.rank is None:
        return builder.build_frozen("reference")
    reference = InferenceModel("reference", actor.model, builder.runtime, adapters=False)
    reference.replays_sampling = actor.replays_sampling
    return reference


def build_teachers(builder: ModelBuilder, actor: TrainableModel) -> list[InferenceModel]:
    """Build the teachers, or of self-distillation the actor's initial, current or average weights."""
    config = builder.config
    if not config.has_self_teacher:
        paths = config.teacher.folders.values() if config.has_teacher else ()
        return [builder.build_frozen("teacher", path) for path in paths]
    if config.teacher.weights == "current":
        return [InferenceModel("teacher", actor.model, builder.runtime)]
    teacher = builder.build_frozen("teacher")
    if config.teacher.weights == "average":
        actor.average = AverageWeights(teacher.model, config.teacher.average_rate)
    return [teacher]


def build_generation(
    config: Config,
    runtime: Runtime,
    tokenizer: Any,
    folder: ModelFolder,
    actor: TrainableModel,
    offload: OffloadManager,
) -> tuple[Generation, WeightSync]:
    def recover(failures: Failures) -> None:
        with offload.with_extra("rollout", {"actor.weights"}):
            weight_sync.recover(failures)

    generation = Generation(config, runtime, tokenizer, recover)
    weight_sync = make_weight_sync(config, runtime, folder.config, actor.model, generation.engine)
    nbytes = 0 if config.rollout.capabilities.remote else weight_sync.nbytes
    for tag, size in (("weights", nbytes), ("kv_cache", 0)):
        offload.register({f"engine.{tag}": EngineMemory(weight_sync, tag, runtime.device, size)})
    return generation, weight_sync


@dataclass
class Step:
    """The data of one step.

    stage          Config.main_stage or "value_pretraining"
    samples        responses to show, by row of the batch, on rank 0
    distributions  tables for distributions.jsonl
    rollout        all sequences; batch: those that this replica trains on"""

    stage: str
    number: int
    metrics: dict[str, float] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    verifier_errors: dict[str, int] = field(default_factory=dict)
    samples: dict[int, SampleRecord] = field(default_factory=dict)
    distributions: Tables = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    rollout: RolloutBatch = field(init=False, repr=False)
    batch: TrainBatch = field(init=False, repr=False)

    @property
    def index(self) -> int:
        """Return the number, negative in value pretraining."""
        return -self.number if self.stage == PRETRAINING else self.number

    def set_rollout(self, rollout: RolloutBatch) -> None:
        self.rollout, self.verifier_errors, self.samples = rollout, rollout.errors, rollout.records
        self.metrics |= rollout.metrics
        self.events += rollout.events

    def add_metrics(self, metrics: Mapping[str, float], distributions: Tables) -> None:
        self.metrics |= metrics
        self.distributions |= distributions

    def count_tokens(self, passes: int, lengths: Tensor | None = None) -> None:
        tokens = self.rollout.num_tokens if lengths is None else int(lengths.sum())
        self.metrics["train/tokens"] = self.metrics.get("train/tokens", 0.0) + passes * tokens
