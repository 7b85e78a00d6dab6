"""Writing a Hugging Face folder from the shards of all ranks, one file at a time: no rank ever holds the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.errors import CheckpointError
from megarl.config.files import fsync
from megarl.parallel.layout import Layout
from megarl.weights.families import family_of
from megarl.weights.hf_io import INDEX, SINGLE, read_config
from megarl.weights.layout import hf_shards, megatron_layout
from megarl.weights.planner import make_plan
from megarl.weights.publish import Team, aside, carry_along, write_json
from megarl.weights.stored import dtype_name
from megarl.weights.transfer import Transfer


def export_hf(
    out: Path,
    source: Path,
    layout: Layout,
    rank: int,
    tensors: Mapping[str, Tensor],
    *,
    critic: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 << 30,
    bucket_bytes: int = 256 << 20,
    group: dist.ProcessGroup | None = None,
    control: dist.ProcessGroup | None = None,
) -> None:
    """Writes the model that all ranks of `layout` hold together into the folder `out`; every rank calls this.

    `tensors`: this rank's parameters by the table's names; they are written as `dtype`, by default that of the first of them.
    `source`: the Hugging Face folder that the run started from; its config, tokenizer, chat template and generation config are carried
    along. A critic becomes a one-label token classifier. Rank 0 needs memory for one file of at most `max_shard_bytes` (or one tensor,
    if that is larger) and one bucket; its file is staged where the tensors are. `group` carries tensors, `control` (gloo, if the
    default group is NCCL) carries one line of text per file.

    The folder appears under its name only when it is complete and on disk. CheckpointError on every rank if `out` exists or rank 0
    cannot write; nothing is left behind then.
    """
    team, config = Team(control), read_config(source)
    shards = hf_shards(config, critic=critic)
    sources = megatron_layout(config, layout, critic=critic)
    first = next(iter(tensors.values()))
    kind: torch.dtype = first.dtype if dtype is None else dtype
    sizes = {name: prod(shard.shape) * kind.itemsize for name, shard in shards.items()}
    with aside(out, sum(sizes.values()), team) as folder:
        files: dict[str, list[str]] = {}
        for file, names in named_files(sizes, max_shard_bytes).items():
            part = {name: shards[name] for name in names}
            plan = make_plan(sources, [(0, part)])
            plan.verify()
            target = {name: torch.empty(shard.shape, dtype=kind, device=first.device) for name, shard in part.items()} if rank == 0 else {}
            Transfer(plan, rank, tensors, target, bucket_bytes, dtype=kind, group=group).run()
            if critic and "score.weight" in part:
                names = [*names, "score.bias"]
                if rank == 0:
                    target["score.bias"] = torch.zeros(1, dtype=kind)  # transformers' token classifier has one
            files[file] = names
            team.first(partial(_write_tensors, folder / file, target))
            del target

        def finish() -> None:
            write_index(folder, files, sum(sizes.values()) + (kind.itemsize if critic else 0))
            carry_along(source, folder, exported_config(config, critic, kind))

        team.first(finish)


def named_files(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Output file -> names of its tensors, in the model's order, as many as fit into `limit` bytes. `sizes`: their bytes."""
    parts = list(_parts(sizes, limit))
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, start=1)}


def _parts(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor_size in sizes.items():
        if names and size + tensor_size > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor_size
    yield names


def write_index(folder: Path, files: Mapping[str, Iterable[str]], size: int) -> None:
    """The index of several files; one file needs none. `files`: names of the tensors in each; `size`: bytes of all tensors."""
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error
    fsync(path)


def exported_config(config: Mapping[str, Any], critic: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    """The source's config.json, with the head and the dtype that were written (None: of several)."""
    suffix = "ForTokenClassification" if critic else "ForCausalLM"
    exported = {**config, "architectures": [family_of(config).prefix + suffix]}
    if dtype is not None:
        exported["dtype" if "dtype" in config else "torch_dtype"] = dtype_name(dtype)
    if critic:
        exported |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "classifier_dropout": 0.0}
    return exported
