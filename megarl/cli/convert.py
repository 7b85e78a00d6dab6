"""`megarl convert`."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option, Typer

from megarl.config.errors import ConfigError, MegarlError
from megarl.config.hub import local_folder, pinned
from megarl.config.text import printable

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from megarl.weights.megatron import Advance, Conversion

Dtype = Literal["bf16", "fp16", "fp32"]
Out = Annotated[Path, Argument(metavar="OUT", help="folder to create, once it is complete")]
Verify = Annotated[bool, Option("--verify", help="read the result from disk and compare all bits")]
MaxShard = Annotated[float, Option(metavar="GB", help="largest *.safetensors file")]
CUT = "-parallel size of the files; runs of any size can load them"
LIMIT = datetime.timedelta(hours=6)  # for the slowest process

app = Typer(
    help="Convert a model's folder to Megatron's format and back, or from GGUF.", rich_markup_mode=None
)


@app.command()
def to_megatron(
    source: Annotated[Path, Argument(metavar="HF_DIR", help="folder with config.json and *.safetensors")],
    out: Out,
    *,
    tp: Annotated[int, Option(metavar="N", help=f"tensor{CUT}")] = 1,
    pp: Annotated[int, Option(metavar="N", help=f"pipeline{CUT}")] = 1,
    ep: Annotated[int, Option(metavar="N", help=f"expert{CUT}")] = 1,
    critic: Annotated[
        bool,
        Option("--critic", help="replace the output layer by a classifier's value head, or by zeros"),
    ] = False,
    verify: Verify = False,
) -> int:
    """Write a Hugging Face folder as a Megatron distributed checkpoint."""
    from megarl.weights.megatron import conversion_layout, hf_to_megatron

    if min(tp, pp, ep) < 1:
        raise ConfigError(f"--tp, --pp and --ep must be at least 1 (got {tp}, {pp}, {ep})")
    layout = conversion_layout(tp, pp, ep)

    def job(source: Path | None) -> Conversion:
        assert source is not None
        return hf_to_megatron(source, out, layout, critic=critic, verify=verify, watch=_progress)

    return _convert(job, out, verify, source, "HF_DIR")


@app.command()
def to_hf(
    checkpoint: Annotated[
        Path, Argument(metavar="CKPT", help="folder with .metadata and *.distcp, of a run or converted")
    ],
    out: Out,
    *,
    source: Annotated[
        Path | None,
        Option(metavar="HF_DIR", help="folder with config.json and tokenizer; default: CKPT"),
    ] = None,
    dtype: Annotated[Dtype | None, Option(help="dtype of all tensors; default: unchanged")] = None,
    max_shard_gb: MaxShard = 4.0,
    verify: Verify = False,
) -> int:
    """Write a Megatron distributed checkpoint as a Hugging Face folder."""
    from megarl.weights.megatron import megatron_to_hf

    def job(source: Path | None) -> Conversion:
        return megatron_to_hf(
            checkpoint,
            out,
            source=source,
            dtype=_torch_dtype(dtype) if dtype else None,
            max_shard_bytes=int(max_shard_gb * 1e9),
            verify=verify,
            watch=_progress,
        )

    return _convert(job, out, verify, source, "--source")


@app.command()
def from_gguf(
    source: Annotated[
        Path,
        Argument(metavar="FILE.gguf", help="file of a Llama, Mistral, Qwen2, Qwen3 or Qwen3-MoE model"),
    ],
    out: Out,
    *,
    dtype: Annotated[Dtype, Option(help="dtype of all tensors")] = "bf16",
    max_shard_gb: MaxShard = 4.0,
    verify: Verify = False,
) -> int:
    """Write a GGUF file (llama.cpp's format) as a Hugging Face folder, dequantised."""
    from megarl.weights.gguf import gguf_to_hf

    def job(_: Path | None) -> Conversion:
        size = int(max_shard_gb * 1e9)
        return gguf_to_hf(
            source, out, dtype=_torch_dtype(dtype), max_shard_bytes=size, verify=verify, watch=_progress
        )

    return _convert(job, out, verify)


def _torch_dtype(name: Dtype) -> torch.dtype:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def _local_source(source: Path, key: str, store: Store | None) -> Path:
    """Return the folder of a model. Rank 0 finds the commit of a name for all."""
    from megarl.parallel.runtime import launched_rank

    if store is None:
        return local_folder(source, key)
    if launched_rank() == 0:
        folder = local_folder(source, key)
        store.set("source", str(pinned(folder)) if folder != source else str(source))
        return folder
    return local_folder(Path(store.get("source").decode()), key)


def _convert(
    convert: Callable[[Path | None], Conversion],
    out: Path,
    verify: bool,
    source: Path | None = None,
    key: str = "",
) -> int:
    """Run a conversion, alone or under torchrun, and print the result once.

    source: argument of `convert`, downloaded if it is a name of the hub. key: its name in errors"""
    import torch.distributed as dist

    from megarl.parallel.machine import check_launcher
    from megarl.parallel.runtime import join_store, launched_rank, launched_world, remove_secret
    from megarl.weights.tensor_files import readable

    check_launcher()
    store = None
    if (world := launched_world()) > 1:
        secret = out.with_name(f".{out.name}.secret")
        store = join_store(secret, LIMIT.total_seconds())
        dist.init_process_group("gloo", store=store, rank=launched_rank(), world_size=world, timeout=LIMIT)
        dist.barrier()
        remove_secret(secret)
    try:
        done = convert(source and _local_source(source, key, store))
    except MegarlError:
        if launched_rank() == 0:
            raise
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if launched_rank() == 0:
        speed = f"{readable(done.size)} in {done.seconds:.1f} s ({done.size / 1e9 / done.seconds:.2f} GB/s)"
        remark = ", compared with the source" if verify else ""
        print(f"{printable(str(out))}: {speed}, on disk in {done.files} weight files with SHA256SUMS{remark}")
        if done.left_out:
            names = ", ".join(done.left_out[:8]) + (" ..." if done.left_out[8:] else "")
            print(f"left out, as the model has no such parameter: {printable(names)}")
    return 0


@contextmanager
def _progress(what: str, size: int) -> Iterator[Advance]:
    """Show the first process's progress."""
    from rich import progress
    from rich.console import Console
    from rich.markup import escape

    from megarl.parallel.runtime import launched_rank, launched_world

    if launched_rank() != 0:
        yield lambda _: None
        return
    process_note = f" (process 1 of {launched_world()})" if launched_world() > 1 else ""
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(escape(printable(f"{what}{process_note}")), total=size)
        yield lambda num_bytes: bar.advance(task, num_bytes)
