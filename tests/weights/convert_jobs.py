"""What ranks do in the tests of the converters: Megatron's own loading and saving."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megarl.parallel.cpu_platform import on_cpu
from megarl.parallel.runtime import Runtime
from tests.parallel.jobs import load, make_config


def build(folder: Path, runtime: Runtime, critic: bool) -> Any:
    from megarl.model.builder import build_actor, build_critic, read_hf_config

    return (build_critic if critic else build_actor)(make_config(folder), read_hf_config(folder), runtime)


def load_checkpoint(runtime: Runtime, folder: Path, checkpoint: Path, critic: bool, sequences: list[list[int]]) -> tuple[list[str], Any]:
    """A converted checkpoint in Megatron: (names of this rank's parameters that differ from the Hugging Face folder's, logits or values of
    each sequence, where there is one pipeline stage)."""
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.module import MegatronModule

    model, expected = (build(folder, runtime, critic) for _ in range(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    with warnings.catch_warnings(), on_cpu():
        warnings.simplefilter("ignore")
        state = MegatronModule.sharded_state_dict(model) if critic else model.sharded_state_dict()
        model.load_state_dict(dist_checkpointing.load({"model": state}, str(checkpoint))["model"])
    load(expected, folder, runtime, critic)
    pairs = zip(model.named_parameters(), expected.parameters(), strict=True)
    different = [name for (name, found), wanted in pairs if not torch.equal(found, wanted)]
    return different, None if runtime.layout.pp > 1 else [_outputs(model, tokens, critic) for tokens in sequences]


@torch.no_grad()
def _outputs(model: Any, sequence: list[int], critic: bool) -> torch.Tensor:
    """Logits [tokens, vocabulary] or values [tokens, 1] of one sequence, whose length tensor-parallel ranks can share evenly."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region, gather_from_tensor_model_parallel_region

    tokens, at = torch.tensor([sequence]), torch.arange(len(sequence))
    packed = model.pack(torch.tensor([0, len(sequence)]))
    with on_cpu():
        if critic:
            return model(tokens, at[None], packed, at, at)[:, None]
        hidden = GPTModel.forward(model, tokens, at[None], None, packed_seq_params=packed)
        if model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        tied = model.share_embeddings_and_output_weights
        logits = hidden @ (model.shared_embedding_or_output_weight() if tied else model.output_layer.weight).T
        return gather_from_tensor_model_parallel_region(logits)[:, 0]


def save_checkpoint(runtime: Runtime, folder: Path, out: Path, critic: bool) -> None:
    """A learner's checkpoint as a run writes it."""
    from megarl.training.model import TrainableModel
    from megarl.training.sharded import allocate_moments
    from tests.checkpoints import save_model

    model = build(folder, runtime, critic)
    load(model, folder, runtime, critic)
    config = make_config(folder)
    learner = TrainableModel("critic" if critic else "actor", model, config.critic, config.steps, runtime)
    for part in learner.optimizers:
        allocate_moments(part.optimizer)  # as after a first step, without which it cannot be saved
    save_model(learner, out)


def keys(checkpoint: Path) -> dict[str, Any]:
    """The model's keys of a checkpoint and their shapes (None: an object); optimizer state left out."""
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    # Any tensor-parallel size pads the vocabulary in its own way; here both are of the same size.
    return {key: getattr(entry, "size", None) for key, entry in entries.items() if not key.startswith("optimizer")}
