"""What ranks do in the tests: transfers and exports between real processes, Megatron's loading and saving."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megarl.config.errors import CheckpointError, TransferError
from megarl.parallel.cpu_platform import on_cpu
from megarl.parallel.layout import Layout
from megarl.parallel.runtime import Runtime
from megarl.sync.export import export_hf
from megarl.sync.plan import build_rounds, fp8_block, make_plan
from megarl.sync.transfer import FORMAT_DTYPES, Staging, Transfer
from megarl.weights.hf import HFFolder, load_into
from megarl.weights.shards import Shards, hf_shapes, hf_shards, megatron_layout, sglang_shards
from tests.parallel.jobs import load, make_config
from tests.weights.folders import sliced


def read(shards: Shards, folder: HFFolder, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {name: torch.full(shard.shape, torch.nan, dtype=dtype) for name, shard in shards.items()}
    load_into(tensors, shards, folder)
    return tensors


def transfer(
    runtime: Runtime,
    folder: Path,
    layouts: list[tuple[Layout, Layout | None]],
    bucket: int,
    dtype: torch.dtype,
) -> list[str]:
    """Send fp32 weights of the first layout of each pair to the second one (None: all of them) as `dtype`.

    They are changed, moved in memory, and sent again, through staging memory that all share. Returns what was
    found wrong on this rank.
    """
    hf = HFFolder(folder)
    wrong = []
    staging = Staging(runtime.device)
    for layout, target_layout in layouts:
        sources = megatron_layout(hf.config, layout)
        whole = [(rank, hf_shards(hf.config)) for rank in range(runtime.world)]
        targets = whole if target_layout is None else megatron_layout(hf.config, target_layout)
        plan = make_plan(sources, targets)
        plan.verify()
        held = read(plan.sources.get(runtime.rank, {}), hf, torch.float32)
        mine = plan.targets.get(runtime.rank, {})
        written = {name: torch.full(shard.shape, torch.nan, dtype=dtype) for name, shard in mine.items()}
        moving = Transfer(plan, runtime.rank, held, written, bucket, dtype=dtype, staging=staging)
        expected = read(mine, hf, torch.float32)
        for factor in (1.0, -3.0):
            for tensor in held.values():
                tensor.data = tensor.data * factor  # a new place in memory, as after offloading
            stats = moving.run()
            largest = max(
                (round_.size for round_ in build_rounds(plan, runtime.rank, dtype.itemsize, bucket)),
                default=0,
            )
            if not largest <= staging.nbytes <= bucket:
                wrong.append(f"{layout}: {staging.nbytes} bytes of staging are there for {largest}")
            staging.release()
            if staging.nbytes:
                wrong.append(f"{layout}: staging was not given back")
            for name, tensor in written.items():
                if not torch.equal(tensor, (expected[name] * factor).to(dtype)):
                    wrong.append(f"{layout} -> {target_layout}: {name} after factor {factor}")
            traffic = plan.summary(dtype.itemsize).get(runtime.rank)
            if traffic and (stats.bytes_sent, stats.bytes_received, stats.bytes_local) != tuple(traffic):
                wrong.append(f"{layout}: {stats} is not the plan's {traffic}")
    return wrong


def export(
    runtime: Runtime, folder: Path, out: Path, layout: Layout, critic: bool, max_shard_bytes: int
) -> str:
    """Load and export in one layout; return the message of a CheckpointError, or nothing."""
    hf = HFFolder(folder, critic=critic)
    shards = megatron_layout(hf.config, layout, critic=critic)[runtime.rank][1]
    tensors = read(shards, hf, torch.float32)
    try:
        export_hf(
            out,
            folder,
            layout,
            runtime.rank,
            tensors,
            critic=critic,
            max_shard_bytes=max_shard_bytes,
            bucket_bytes=3000,
        )
    except CheckpointError as error:
        return str(error)
    return ""


def whole_model(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return Hugging Face tensors, normal, with outliers and one block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in hf_shapes(config).items():
        tensors[name] = torch.randn(shape, generator=generator) * torch.rand((), generator=generator) * 0.1
        tensors[name].view(-1)[::997] *= 30
        if "down_proj" in name:
            tensors[name][:128, :128] = 0
    return tensors


def into_engines(
    runtime: Runtime,
    config: dict[str, Any],
    layout: Layout,
    tps: list[tuple[int, int]],
    fp8: bool,
    bucket: int,
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], str, list[str], int]:
    """Transfer twice, with other weights, to engines: rank r is rank tps[r][1] of one of tp tps[r][0].

    Two ranks are a node. Returns this rank's tensors, what the check says after one bit of a tensor of rank 1
    was turned, what it said before, and how many copies are passed on within a node.
    """
    sources = megatron_layout(config, layout)
    shards = {place: sglang_shards(config, *place) for place in tps}
    targets = [(rank, shards[place]) for rank, place in enumerate(tps)]
    formats: dict[str, str] = {}
    if fp8:
        sources, targets, formats = fp8_block(sources, targets, hf_shapes(config))
    plan = make_plan(sources, targets, formats=formats, gpus_per_node=2)
    plan.verify()
    held = {n: s for n, s in plan.sources[runtime.rank].items() if not n.endswith("_scale_inv")}
    weights = sliced(held, whole_model(config, 1))
    mine = plan.targets[runtime.rank]
    out = {
        n: torch.zeros(s.shape, dtype=FORMAT_DTYPES[formats[n]] if n in formats else dtype)
        for n, s in mine.items()
    }
    transfer = Transfer(plan, runtime.rank, weights, out, bucket, dtype=dtype)
    failed = []
    for seed in (1, 2):
        for name, tensor in sliced(held, whole_model(config, seed)).items():
            weights[name].copy_(tensor)
        transfer.run()
        try:
            transfer.check()
        except TransferError as error:
            failed.append(str(error))
    result = {name: tensor.clone() for name, tensor in out.items()}
    if runtime.rank == 1:
        name = next(name for name in out if "norm" in name)
        out[name].view(torch.int16 if dtype.itemsize == 2 else torch.int32)[3] ^= 1
    try:
        transfer.check()
        said = ""
    except TransferError as error:
        said = str(error)
    return result, said, failed, len(plan.relays)


def build(folder: Path, runtime: Runtime, critic: bool) -> Any:
    from megarl.model.builder import build_actor, build_critic
    from megarl.model.hf_config import read_hf_config

    return (build_critic if critic else build_actor)(make_config(folder), read_hf_config(folder), runtime)


def load_checkpoint(
    runtime: Runtime, folder: Path, checkpoint: Path, critic: bool, sequences: list[list[int]]
) -> tuple[list[str], Any]:
    """Load a converted checkpoint into Megatron.

    Returns the names of this rank's parameters that differ from the Hugging Face folder's, and logits or
    values of each sequence, where there is one pipeline stage.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.module import MegatronModule

    made, expected = (build(folder, runtime, critic) for _ in range(2))
    [model] = made.chunks
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
    return different, None if runtime.layout.pp > 1 else [
        _outputs(model, tokens, critic) for tokens in sequences
    ]


@torch.no_grad()
def _outputs(model: Any, sequence: list[int], critic: bool) -> torch.Tensor:
    """Return logits [tokens, vocabulary] or values [tokens, 1] of a sequence of a multiple of tp tokens."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
    )

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
    """Write a model's checkpoint as a run does."""
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
    """Return a checkpoint's keys and their shapes (None: an object), but for the optimizer's."""
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    # Any tensor-parallel size pads the vocabulary in its own way; here both are of the same size.
    return {
        key: getattr(entry, "size", None) for key, entry in entries.items() if not key.startswith("optimizer")
    }
