"""Writing a Hugging Face folder from the shards of all ranks, one file at a time: no rank ever holds the whole model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
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
from megarl.weights.layout import Shards, hf_shards, megatron_layout
from megarl.weights.planner import make_plan
from megarl.weights.transfer import Transfer

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Files of the source folder that belong to the exported model as well; weights and config.json are written anew.
CARRIED = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*.model",
    "*.tiktoken",
)


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
    config = read_config(source)
    shards = hf_shards(config, critic=critic)
    sources = megatron_layout(config, layout, critic=critic)
    aside = out.with_name(f".{out.name}.partial")
    first = next(iter(tensors.values()))
    kind: torch.dtype = first.dtype if dtype is None else dtype
    files = list(split_files({name: prod(shard.shape) * kind.itemsize for name, shard in shards.items()}, max_shard_bytes))

    def on_rank_0(action: Callable[[], None]) -> None:
        _on_rank_0(action, out, aside, rank, layout.world, control)

    on_rank_0(partial(_start, out, aside))
    for number, names in enumerate(files, start=1):
        part = {name: shards[name] for name in names}
        plan = make_plan(sources, [(0, part)])
        plan.verify()
        target = {name: torch.empty(shard.shape, dtype=kind, device=first.device) for name, shard in part.items()} if rank == 0 else {}
        Transfer(plan, rank, tensors, target, bucket_bytes, dtype=kind, group=group).run()
        if critic and "score.weight" in part and rank == 0:
            target["score.bias"] = torch.zeros(1, dtype=kind)  # transformers' token classifier has one
        on_rank_0(partial(_write_tensors, aside / file_name(number, len(files)), target))
        del target
    index = _index(files, shards, kind.itemsize, critic)
    on_rank_0(partial(_finish, out, aside, source, exported_config(config, critic, kind), index))


def split_files(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names of the tensors of each output file, in the model's order, as many as fit into `limit` bytes. `sizes`: their bytes."""
    names: list[str] = []
    size = 0
    for name, tensor_size in sizes.items():
        if names and size + tensor_size > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor_size
    yield names


def file_name(number: int, files: int) -> str:
    """Of one of `files` weight files, counted from 1."""
    return SINGLE if files == 1 else f"model-{number:05d}-of-{files:05d}.safetensors"


def _on_rank_0(action: Callable[[], None], out: Path, aside: Path, rank: int, world: int, control: dist.ProcessGroup | None) -> None:
    """Runs `action` on rank 0 while the others wait; a failure there is a CheckpointError everywhere, and removes what was written."""
    failure: list[str | None] = [None]
    if rank == 0:
        try:
            action()
        except CheckpointError as error:
            failure = [str(error)]
        except (OSError, SafetensorError) as error:
            failure = [f"{out}: the model cannot be written ({error})"]
            shutil.rmtree(aside, ignore_errors=True)
    if world > 1:
        dist.broadcast_object_list(failure, src=0, group=control)
    if failure[0] is not None:
        raise CheckpointError(failure[0])


def _start(out: Path, aside: Path) -> None:
    if out.exists():
        raise CheckpointError(f"{out}: already exists (choose another folder, or remove it)")
    if aside.exists():  # an export that was interrupted
        shutil.rmtree(aside)
    aside.mkdir(parents=True)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    fsync(path)


def _index(files: list[list[str]], shards: Shards, itemsize: int, critic: bool) -> dict[str, Any] | None:
    """The index of several files; None where one file needs none."""
    if len(files) == 1:
        return None
    weight_map = {name: file_name(number, len(files)) for number, names in enumerate(files, start=1) for name in names}
    elements = sum(prod(shard.shape) for shard in shards.values())
    if critic:
        weight_map["score.bias"] = weight_map["score.weight"]
        elements += 1
    return {"metadata": {"total_size": elements * itemsize}, "weight_map": weight_map}


def _finish(out: Path, aside: Path, source: Path, config: dict[str, Any], index: dict[str, Any] | None) -> None:
    """Adds everything that is not weights, makes it durable, and gives the folder its name."""
    write_json(aside / "config.json", config)
    if index is not None:
        write_json(aside / INDEX, index)
    carried = {path for pattern in CARRIED for path in source.glob(pattern) if path.is_file()}
    for path in sorted(carried):
        shutil.copyfile(path, aside / path.name)
        fsync(aside / path.name)
    fsync(aside)
    aside.rename(out)
    fsync(out.parent)


def exported_config(config: Mapping[str, Any], critic: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    """The source's config.json, with the head and the dtype that were written (None: of several)."""
    suffix = "ForTokenClassification" if critic else "ForCausalLM"
    exported = {**config, "architectures": [family_of(config).prefix + suffix]}
    if dtype is not None:
        exported["dtype" if "dtype" in config else "torch_dtype"] = DTYPE_NAMES[dtype]
    if critic:
        exported |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "classifier_dropout": 0.0}
    return exported


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented, and on disk."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    fsync(path)
