"""Build and export models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PretrainedConfig

from megarl.config.schema import Config
from megarl.model.builder import DTYPES, ModelChunks, build_actor, build_critic
from megarl.model.hf_config import read_hf_config
from megarl.parallel.offload_group import HostPool
from megarl.parallel.runtime import Runtime
from megarl.schedule.offload import OffloadManager
from megarl.sync.export import export_hf, export_peft
from megarl.training.model import InferenceModel, TrainableModel
from megarl.training.tensor_groups import tensor_groups
from megarl.weights.families import model_weights, read_config
from megarl.weights.hf import ModelFolder, load_into
from megarl.weights.lora import merged
from megarl.weights.megatron import open_model
from megarl.weights.shards import megatron_layout
from megarl.weights.tensor_files import Processes


def load_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_weights(
    model: torch.nn.Module, folder: ModelFolder, runtime: Runtime, *, critic: bool = False
) -> None:
    """Load this rank's slices. Raises CheckpointError on every rank."""
    shards = megatron_layout(folder.config, runtime.layout, critic=critic)[runtime.rank][1]
    Processes(runtime.cpu_group).run(
        lambda: load_into(model_weights(dict(model.named_parameters())), shards, folder)
    )


@dataclass(frozen=True)
class ModelBuilder:
    config: Config
    runtime: Runtime
    folder: ModelFolder
    hf: PretrainedConfig
    offload: OffloadManager
    host: HostPool

    def build_actor(self) -> TrainableModel:
        config = self.config
        with self.offload.explain_out_of_memory("start"):
            module = self._build_module(config)
            model = TrainableModel("actor", module, config.actor, config.steps, self.runtime, config.parallel)
        model.replays_routing = config.rollout.routing_replay
        model.replays_sampling = config.rollout.sampling_replay
        self._register(model)
        return model

    def build_critic(self) -> TrainableModel:
        config, path = self.config, self.config.critic.path
        with self.offload.explain_out_of_memory("start"):
            module = self._build_module(config, path, scalar=True)
            model = TrainableModel(
                "critic", module, config.critic, config.steps, self.runtime, config.parallel
            )
        self._register(model)
        return model

    def build_frozen(self, name: str, path: Path | None = None) -> InferenceModel:
        with self.offload.explain_out_of_memory("start"):
            module = self._build_module(self.config.without_adapters(), path, scalar=name == "reward")
            model = InferenceModel(name, module.requires_grad_(False), self.runtime)
        # The loss compares its log-probs with the actor's. A reward model has scores.
        model.replays_sampling = self.config.rollout.sampling_replay and name != "reward"
        self._register(model)
        return model

    def _build_module(self, config: Config, path: Path | None = None, *, scalar: bool = False) -> ModelChunks:
        folder, hf = self.folder, self.hf
        if scalar or path is not None:
            folder = open_model(path or config.model.path, critic=scalar)
            hf = read_hf_config(folder.path)
        module = (build_critic if scalar else build_actor)(config, hf, self.runtime)
        load_weights(module, folder, self.runtime, critic=scalar)
        return module

    def _register(self, model: InferenceModel) -> None:
        self.offload.register(tensor_groups(model, self.host))
        self.offload.onload("start", ())


def export_model(
    model: TrainableModel, config: Config, runtime: Runtime, out: Path, *, adapters: bool = False
) -> None:
    """Write a Hugging Face folder, or a PEFT folder of the adapters. Collective."""
    is_critic, control_group = model.name == "critic", runtime.cpu_group
    source = config.critic.path if is_critic and config.critic.path else config.model.path
    lora, layout_and_rank = model.config.lora, (runtime.layout, runtime.rank)
    parameters = dict(model.model.named_parameters())
    if adapters:
        export_peft(out, source, *layout_and_rank, parameters, lora, control=control_group)
        return
    weights = merged(parameters, read_config(source), *layout_and_rank, lora, critic=is_critic)
    dtype = DTYPES[config.model.dtype]
    export_hf(out, source, *layout_and_rank, weights, critic=is_critic, dtype=dtype, control=control_group)
