"""What the phases of a run work with on one rank (`Run`), and the step that they fill (`Step`)."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.advantages import SuccessTracker
from megarl.config.files import Dispensable
from megarl.config.recipes import never_offloaded
from megarl.config.schema import PRETRAINING, Config
from megarl.data.experience import Experience, StepBatch
from megarl.model.builder import DTYPES, build_actor, build_critic, read_hf_config
from megarl.observe.run_log import Sample
from megarl.parallel.movable import HostPool
from megarl.parallel.runtime import Runtime
from megarl.rollout.engines.engine import RolloutEngine
from megarl.schedule.ahead import GenerationApart
from megarl.schedule.generation import Generation, load_tokenizer
from megarl.schedule.offload import EngineMemory, OffloadManager
from megarl.schedule.source import BatchSource, Rollout, SupervisedPairs
from megarl.sync.export import export_hf, export_peft
from megarl.sync.weight_sync import Failures, make_weight_sync
from megarl.training.batch import LocalBatch
from megarl.training.columns import Tables
from megarl.training.model import InferenceModel, TrainableModel, tensor_groups
from megarl.weights.families import model_weights, read_config
from megarl.weights.hf import ModelFolder, load_into
from megarl.weights.lora import merged
from megarl.weights.megatron import open_model
from megarl.weights.shards import megatron_layout
from megarl.weights.tensor_files import Processes


def load_weights(
    model: torch.nn.Module, folder: ModelFolder, runtime: Runtime, *, critic: bool = False
) -> None:
    """Load this rank's slices of a model's folder into its part of the model. Raises CheckpointError on every
    rank if one cannot use its slices."""
    shards = megatron_layout(folder.config, runtime.layout, critic=critic)[runtime.rank][1]
    Processes(runtime.cpu_group).run(
        lambda: load_into(model_weights(dict(model.named_parameters())), shards, folder)
    )


class Run:
    """What lives for the whole run on a rank that trains: models with their optimizers, the source of the
    batches, and what brings weights to the engines.

    source       of the batches; where none is given: what the configuration asks for, with its engines
    engine       of this rank; None where there is none, or on ranks of its own
    apart        the source where engines are on ranks of their own; else None
    weight_sync  to the engines; only where there are any"""

    def __init__(self, config: Config, runtime: Runtime, source: BatchSource | None = None) -> None:
        self.config, self.runtime, self.dispensable = config, runtime, Dispensable()
        self.tokenizer = load_tokenizer(config.model.path)
        self.folder = open_model(config.model.path)
        self.hf = read_hf_config(config.model.path)
        stays = never_offloaded(config, gpu=runtime.device.type == "cuda")
        self.offload, self.host = OffloadManager(runtime.device, stays), HostPool(runtime.device)
        # One after the other, each offloaded before the next is made.
        self.actor: TrainableModel = self._settled("actor")
        wanted = config.critic.count if config.has_critic else 0
        of_critic = "critic", config.critic.path
        self.critics: list[TrainableModel] = [self._settled(*of_critic) for _ in range(wanted)]
        self.reference: InferenceModel | None = None
        if config.algorithm.has_reference and config.actor.lora.rank is None:
            self.reference = self._settled("reference")
        elif config.algorithm.has_reference:
            self.reference = InferenceModel("reference", self.actor.model, runtime, adapters=False)
        self.reward_model: InferenceModel | None = None
        if config.has_reward_model:
            self.reward_model = self._settled("reward", config.reward.model.path)
        folders = config.teacher.folders.values() if config.has_teacher else ()
        self.teachers: list[InferenceModel] = [self._settled("teacher", path) for path in folders]
        # The same on every rank.
        tracks, rho = config.algorithm.advantage == "tracked", config.algorithm.tracker_rho
        self.tracker = SuccessTracker(rho) if tracks else None
        self.engine: RolloutEngine | None = None
        self.apart: GenerationApart | None = None
        self.source = self._source() if source is None else source
        self.data_reports = self.source.reports

    def _source(self) -> BatchSource:
        """Make what gives the batches, and what brings the engines that draw them the actor's weights."""
        config, runtime = self.config, self.runtime
        if not config.has_engine:
            return SupervisedPairs(config, self.tokenizer)
        to_engines = config, runtime, self.folder.config, self.actor.model
        if runtime.rollout_ranks:
            self.weight_sync = make_weight_sync(*to_engines, None)
            self.apart = GenerationApart(config, runtime, self.weight_sync)
            return self.apart
        generation = Generation(config, runtime, self.tokenizer, self._recover)
        self.engine = generation.engine
        self.weight_sync = make_weight_sync(*to_engines, self.engine)
        held = 0 if config.rollout.capabilities.remote else self.weight_sync.nbytes
        for tag, size in (("weights", held), ("kv_cache", 0)):
            memory = EngineMemory(self.weight_sync, tag, runtime.device, size)
            self.offload.register({f"engine.{tag}": memory})
        return generation

    def _settled(self, name: str, path: Path | None = None) -> Any:
        """Build the actor, critic, reference, reward model or a teacher with its weights, and offload it.
        path: its folder where that is not the actor's."""
        config, runtime, folder, hf = self.config, self.runtime, self.folder, self.hf
        with self.offload.explained("start"):
            scalar = name in ("critic", "reward")  # the head gives one number
            if scalar or path is not None:
                folder = open_model(path or config.model.path, critic=scalar)
                hf = read_hf_config(folder.path)
            of = config if name in ("actor", "critic") else config.without_adapters()
            built = (build_critic if scalar else build_actor)(of, hf, runtime)
            load_weights(built, folder, runtime, critic=scalar)
            if name in ("reference", "reward", "teacher"):
                model = InferenceModel(name, built.requires_grad_(False), runtime)
            else:
                settings = config.critic if name == "critic" else config.actor
                model = TrainableModel(name, built, settings, config.steps, runtime, config.parallel)
        model.replays_routing = name == "actor" and config.rollout.routing_replay
        self.offload.register(tensor_groups(model, self.host))
        self.offload.onload("start", ())
        return model

    def _recover(self, failures: Failures) -> None:
        with self.offload.also("rollout", {"actor.weights"}):
            self.weight_sync.recover(failures)

    def publish(self, version: int) -> dict[str, float]:
        """Have the engines take the actor's present weights as `version`; return the transfer's metrics. Both
        must be on the device."""
        if self.apart is not None:
            return self.apart.publish(version)
        return self.weight_sync.sync(version).metrics()

    def meet(self, *, wait: bool) -> dict[str, float]:
        """Transfer the pending weights if the engines on ranks of their own are free now, or with `wait` as
        soon as they are; return the transfer's metrics."""
        if self.apart is None or not self.apart.due(wait=wait):
            return {}
        self.onload("weight_transfer", {"actor.weights"})
        return self.apart.transfer()

    def onload(self, phase: str, groups: Collection[str]) -> None:
        """Have the tensor groups on the device, and nothing else. An engine whose weights were lost gets the
        actor's again, unless the phase has both on the device: then it syncs them itself."""
        if self.engine is None:
            # A phase that needs an engine's alone, elsewhere, moves none.
            if own := {name for name in groups if not name.startswith("engine.")}:
                self.offload.onload(phase, own)
            return
        needs_engine = "engine.weights" in groups and "actor.weights" not in groups
        if needs_engine and not self.weight_sync.complete:
            self.offload.onload(phase, {"actor.weights", "engine.weights"})
            self.weight_sync.sync(self.weight_sync.version)
        self.offload.onload(phase, groups)
        if needs_engine and not self.weight_sync.complete:  # an engine failed when it was to wake up
            with self.offload.also(phase, {"actor.weights"}):
                self.weight_sync.sync(self.weight_sync.version)

    def onload_model(self, phase: str, name: str, *parts: str) -> None:
        """Have these parts of a model of `models` on the device: weights, gradients, optimizer."""
        model = self.models[name]
        groups = {f"{model.name}.{part}" for part in parts}
        self.onload(phase, groups)
        for group in sorted(groups) if model in self.critics else ():
            self.offload.turn(phase, group, self.critics.index(model))

    def onload_for_checkpoint(self, name: str) -> None:
        """Have a model and its optimizer on the device, to be saved or loaded."""
        self.onload_model("checkpoint", name, "weights", "optimizer")

    @property
    def models(self) -> dict[str, TrainableModel]:
        """Return the models whose weights and optimizers a checkpoint holds: actor, critic, critic_2."""
        return {"actor": self.actor, **dict(zip(("critic", "critic_2"), self.critics, strict=False))}

    @property
    def critic_names(self) -> tuple[str, ...]:
        """Return the critics' names in `models`."""
        return tuple(name for name in self.models if name != "actor")

    def megatron_seconds(self) -> float:
        """Return this rank's seconds in Megatron's forward and backward passes and optimizers so far."""
        models = (self.actor, *self.critics, self.reference, self.reward_model, *self.teachers)
        return sum(model.megatron_seconds for model in models if model is not None)

    def export(self, which: str, out: Path, *, adapters: bool = False) -> None:
        """Write a model of `models` as a Hugging Face folder, or its adapters as a folder of PEFT's; every
        rank takes part."""
        config, critic, control = self.config, which != "actor", self.runtime.cpu_group
        source = config.critic.path if critic and config.critic.path else config.model.path
        lora, place = self.models[which].config.lora, (self.runtime.layout, self.runtime.rank)
        named = dict(self.models[which].model.named_parameters())
        if adapters:
            export_peft(out, source, *place, named, lora, control=control)
        else:
            weights = merged(named, read_config(source), *place, lora, critic=critic)
            dtype = DTYPES[config.model.dtype]
            export_hf(out, source, *place, weights, critic=critic, dtype=dtype, control=control)

    def close(self) -> None:
        """End the engine and the verifiers."""
        self.source.close()


@dataclass
class Step:
    """One step: what its phases read and write.

    stage            that of the run's main steps (Config.main_stage), or "value_pretraining"
    events           lines to be shown
    verifier_errors  error -> how often a verifier failed with it
    samples          on rank 0, responses to be shown to people, by their row of the batch
    distributions    tables for distributions.jsonl
    batch            what every rank knows of the whole step; the pairs of a supervised step, whole
    local            this replica's share of it
    """

    stage: str
    number: int
    metrics: dict[str, float] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    verifier_errors: dict[str, int] = field(default_factory=dict)
    samples: dict[int, Sample] = field(default_factory=dict)
    distributions: Tables = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    batch: Experience | StepBatch = field(init=False, repr=False)
    local: LocalBatch = field(init=False, repr=False)

    @property
    def index(self) -> int:
        """Return what seeds derive from: 1, 2, ... in the main stage, -1, -2, ... in value pretraining."""
        return -self.number if self.stage == PRETRAINING else self.number

    def take(self, found: Rollout) -> None:
        """Take what a source gives for this step."""
        self.batch, self.verifier_errors, self.samples = found.batch, found.errors, found.samples
        self.metrics |= found.metrics
        self.events += found.events

    def add(self, metrics: Mapping[str, float], distributions: Tables) -> None:
        """Record what a phase has measured."""
        self.metrics |= metrics
        self.distributions |= distributions

    def count_tokens(self, passes: int, lengths: Tensor | None = None) -> None:
        """Add a phase's tokens to train/tokens: those of the batch as often as they go through a model.
        lengths: of its sequences, where that does not read all of them."""
        tokens = self.batch.num_tokens if lengths is None else int(lengths.sum())
        self.metrics["train/tokens"] = self.metrics.get("train/tokens", 0.0) + passes * tokens
