"""One rank with actor, optimizer, engine and offloading, for the GPU suite and benchmarks/gpu.py.

The model is random with given sizes, or loaded. CI tests it on a CPU with tiny sizes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megarl.config.schema import Config
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.data.sample import TokenData
from megarl.model.builder import build_actor
from megarl.model.hf_config import read_hf_config
from megarl.parallel.offload_group import HostPool
from megarl.parallel.runtime import Runtime
from megarl.rollout.engines.base import GenerationRequest, RolloutEngine, load_engine_class
from megarl.rollout.sampling import SamplingParams
from megarl.schedule.models import load_weights
from megarl.schedule.offload import EngineMemory, OffloadManager
from megarl.schedule.source import start_engine
from megarl.sync.weight_sync import WeightSync, make_weight_sync
from megarl.training.batch import make_train_batch
from megarl.training.micro_batch import make_micro_batches
from megarl.training.model import TrainableModel, UpdateResult
from megarl.training.objectives import supervised_loss
from megarl.training.tensor_groups import tensor_groups
from megarl.weights.families import read_config, rename_to_table
from megarl.weights.known_models import KNOWN_MODELS
from megarl.weights.megatron import open_model

EOS = 1
WEIGHTS, UPDATE = ("actor.weights",), ("actor.weights", "actor.gradients", "actor.optimizer")
ENGINE, TRANSFER = ("engine.weights", "engine.kv_cache"), ("actor.weights", "engine.weights")
TINY = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 307,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def get_sizes(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a published model, or of `tiny`."""
    known = (
        TINY
        if name == "tiny"
        else {**TINY, **KNOWN_MODELS[name], "max_position_embeddings": 32768, "rope_theta": 1e6}
    )
    return {**known, **changes}


def fill(model: torch.nn.Module) -> None:
    """Fill norms with ones, and other parameters with random values that depend only on name and shape.

    Portable and Transformer Engine layers thus get the same weights."""
    with torch.no_grad():
        for name, parameter in rename_to_table(dict(model.named_parameters())).items():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
                drawn = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                parameter.copy_(0.02 * drawn)


def round_products(model: torch.nn.Module) -> None:
    """Round weights and input activations of the layers' matrix products to e4m3, one scale per tensor.

    This simulates FP8's forward pass in plain torch, and so bounds FP8's error without its kernels."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        scale = 448 / tensor.abs().amax().float()
        return ((tensor.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(tensor.dtype)

    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if ".layers." in f".{name}" and weight is not None and weight.dim() == 2:
            weight.data.copy_(rounded(weight.data))
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:]))


class Scene:
    """One rank's actor, optimizer, engine and offloading.

    sizes: a config.json's values, or a Hugging Face folder with weights
    overrides: sections of the configuration"""

    def __init__(
        self, runtime: Runtime, folder: Path, sizes: Mapping[str, Any] | Path, **overrides: Any
    ) -> None:
        folder = folder / f"rank{runtime.rank}"  # separate: no rank reads a file that another one is writing
        folder.mkdir(parents=True, exist_ok=True)
        source = folder
        if isinstance(sizes, Path):
            source, sizes = sizes, read_config(sizes)
        else:
            (folder / "config.json").write_text(json.dumps(sizes))
        model = {"path": source, "dtype": "bf16", **overrides.pop("model", {})}
        settings = {
            "data": {"max_prompt_tokens": 64},
            "update": {"mini_batch": 8, "tokens_per_micro_batch": 8192},
            "actor": {"lr": 1e-3},
            "rollout": {"max_response_tokens": 128, "max_batch": 64, "engine_memory": 0.3},
        }
        for key, value in overrides.items():
            settings[key] = {**settings.get(key, {}), **value}
        self.runtime, self.sizes = runtime, dict(sizes)
        self.config = Config(recipe="dapo", run_dir=folder, steps=10, model=model, **settings)
        self.host, self.offload = HostPool(runtime.device), OffloadManager(runtime.device, keep=())
        built = build_actor(self.config, read_hf_config(source), runtime)
        if source == folder:
            fill(built)
        else:
            load_weights(built, open_model(source), runtime)
        config = self.config
        self.actor = TrainableModel("actor", built, config.actor, config.steps, runtime, config.parallel)
        self.offload.register(tensor_groups(self.actor, self.host))

    def make_batch(self, responses: int, tokens: int, seed: int = 3) -> TrainBatch:
        """Make prompts of 4 tokens and correct random responses of `tokens` tokens."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(
            2, self.sizes["vocab_size"], (responses, tokens + 4), generator=generator
        ).tolist()
        batch = TrainBatch.build([row[:4] for row in drawn], [row[4:] for row in drawn])
        batch["correct"] = torch.ones(responses, dtype=torch.bool)
        batch["truncated"] = torch.zeros(responses, dtype=torch.bool)
        return batch

    def share(self, batch: TrainBatch) -> TrainBatch:
        """Return this replica's share of a batch, as one mini-batch."""
        rollout = RolloutBatch.from_train_batch(batch)
        return make_train_batch(
            rollout, self.config, batch.num_sequences, 3, [self.actor.model], self.runtime
        )

    def local(self, responses: int, tokens: int, seed: int = 3) -> TrainBatch:
        return self.share(self.make_batch(responses, tokens, seed))

    def compute_all_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Compute the log-probs of the response tokens of a whole batch, on every replica."""
        self.offload.onload("old_logprobs", WEIGHTS)
        budget, model = self.config.update.tokens_per_micro_batch, self.actor.model
        micro_batches = make_micro_batches(batch, range(batch.num_sequences), budget, model)
        return self.actor.logprob_columns(batch, micro_batches)["logprobs"][batch.response_mask]

    def logprobs(self, local: TrainBatch) -> torch.Tensor:
        """Compute the log-probs of the response tokens, in order."""
        self.offload.onload("old_logprobs", WEIGHTS)
        columns = self.actor.logprob_columns(local, local.micro_batches)
        return columns["logprobs"][local.response_mask]

    def gradients(self, local: TrainBatch) -> dict[str, torch.Tensor]:
        """Compute gradients of the supervised loss, float32 on the host, by the weight table's names."""
        self.offload.onload("actor_update", UPDATE)
        self.actor.compute_gradients(local.mini_batches[0], supervised_loss(local))
        named = rename_to_table(dict(self.actor.model.named_parameters()))
        # Copy: these are views of a buffer that is freed when it is offloaded.
        return {
            name: parameter.main_grad.to("cpu", torch.float32, copy=True)
            for name, parameter in named.items()
            if parameter.requires_grad
        }

    def update(self, local: TrainBatch) -> UpdateResult:
        """Make one optimizer step."""
        self.offload.onload("actor_update", UPDATE)
        self.actor.begin_step()
        return self.actor.update(local.mini_batches[0], supervised_loss(local))

    @cached_property
    def engine(self) -> RolloutEngine:
        """The configured engine, not started."""
        tokenizer = SimpleNamespace(eos_token_id=EOS, name_or_path="")
        return load_engine_class(self.config).build(self.config, tokenizer, self.runtime)

    @cached_property
    def weight_sync(self) -> WeightSync:
        """The sync of the actor's weights. First use offloads everything and starts the engine."""
        self.offload.onload("start", ())
        start_engine(self.engine, self.runtime)
        made = make_weight_sync(self.config, self.runtime, self.sizes, self.actor.model, self.engine)
        tags = {"weights": made.nbytes, "kv_cache": 0}
        self.offload.register(
            {
                f"engine.{tag}": EngineMemory(made, tag, self.runtime.device, size)
                for tag, size in tags.items()
            }
        )
        return made

    def transfer(self, version: int) -> float:
        """Transfer the actor's weights to the engine, and return GB/s of the bytes that arrive.

        Most of them are copied within the device."""
        weight_sync = self.weight_sync
        self.offload.onload("weight_transfer", TRANSFER)
        stats = weight_sync.sync(version)
        return (stats.bytes_local + stats.bytes_received) / stats.seconds / 1e9

    def generate(self, prompts: list[list[int]], tokens: int, temperature: float = 1.0) -> list[TokenData]:
        """Generate with the engine, whose weights must have been transferred."""
        self.offload.onload("rollout", ENGINE)
        requests = [GenerationRequest(tuple(prompt), seed) for seed, prompt in enumerate(prompts)]
        return self.engine.generate(requests, SamplingParams(tokens, temperature))

    def trainers_logprobs(self, prompts: list[list[int]], completions: list[TokenData]) -> torch.Tensor:
        """Compute the actor's log-probs of the tokens that the engine sampled."""
        experience = TrainBatch.build(prompts, [completion.tokens.tolist() for completion in completions])
        experience["correct"] = torch.ones(len(prompts), dtype=torch.bool)
        experience["truncated"] = torch.zeros(len(prompts), dtype=torch.bool)
        return self.logprobs(self.share(experience))


def colocated(scene: Scene) -> dict[str, Any]:
    """Run two rounds of transfer, generation and an update, in which engine and trainer share the device.

    Returns:
        present      tensor groups on the device, after each generation and update
        answers      generated tokens, by round
        differences  |log-prob of trainer - log-prob of engine| of each token, by round
        host         bytes of host memory"""
    prompts = [[3 + i, 9, 4, 5] for i in range(8)]
    local = scene.local(8, 32)
    found: dict[str, Any] = {"present": [], "differences": [], "answers": []}
    for version in range(2):
        scene.transfer(version)
        completions = scene.generate(prompts, 16, temperature=1.0)
        found["present"].append(set(scene.offload.present))
        found["answers"].append([completion.tokens.tolist() for completion in completions])
        drawn = torch.tensor([logprob for made in completions for logprob in made.logprobs.tolist()])
        found["differences"].append((scene.trainers_logprobs(prompts, completions) - drawn).abs())
        scene.update(local)
        found["present"].append(set(scene.offload.present))
    found["host"] = scene.host.nbytes
    return found
