"""`megarl convert`: a model's folder from Hugging Face's format to Megatron's and back, and from a GGUF file
to Hugging Face's, with a progress bar."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich import progress
from rich.console import Console

from megarl.config.errors import ConfigError, MegarlError
from megarl.parallel.machine import check_launcher
from megarl.parallel.runtime import is_launched, launched_rank, launched_world
from megarl.weights.files import readable
from megarl.weights.gguf import gguf_to_hf
from megarl.weights.megatron import Advance, Conversion, conversion_layout, hf_to_megatron, megatron_to_hf

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIMIT = datetime.timedelta(hours=6)  # of a wait for the slowest process


def to_megatron(source: Path, out: Path, tp: int, pp: int, ep: int, critic: bool, verify: bool) -> int:
    """Write a Hugging Face folder as a distributed checkpoint."""
    if min(tp, pp, ep) < 1:
        raise ConfigError(f"--tp, --pp and --ep must be at least 1 (got {tp}, {pp}, {ep})")
    layout = conversion_layout(tp, pp, ep)
    job = partial(hf_to_megatron, source, out, layout, critic=critic, verify=verify, watch=_progress)
    return _convert(job, out, verify)


def to_hf(
    checkpoint: Path, out: Path, source: Path | None, dtype: str | None, max_shard_gb: float, verify: bool
) -> int:
    """Write a distributed checkpoint as a Hugging Face folder."""
    job = partial(
        megatron_to_hf,
        checkpoint,
        out,
        source=source,
        dtype=DTYPES[dtype] if dtype else None,
        max_shard_bytes=int(max_shard_gb * 1e9),
        verify=verify,
        watch=_progress,
    )
    return _convert(job, out, verify)


def from_gguf(source: Path, out: Path, dtype: str, max_shard_gb: float, verify: bool) -> int:
    """Write the model of a GGUF file as a Hugging Face folder."""
    job = partial(
        gguf_to_hf,
        source,
        out,
        dtype=DTYPES[dtype],
        max_shard_bytes=int(max_shard_gb * 1e9),
        verify=verify,
        watch=_progress,
    )
    return _convert(job, out, verify)


def _convert(convert: Callable[[], Conversion], out: Path, verify: bool) -> int:
    """Run a conversion in this process, or as one of those that torchrun started; the first one prints."""
    check_launcher()
    if is_launched():
        dist.init_process_group("gloo", timeout=LIMIT)
    try:
        done = convert()
    except MegarlError:
        if launched_rank() == 0:
            raise
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if launched_rank() == 0:
        speed = f"{readable(done.size)} in {done.seconds:.1f} s ({done.size / 1e9 / done.seconds:.2f} GB/s)"
        compared = ", compared with the source" if verify else ""
        print(f"{out}: {speed}, on disk in {done.files} weight files with SHA256SUMS{compared}")
        if done.left_out:
            names = ", ".join(done.left_out[:8]) + (" ..." if done.left_out[8:] else "")
            print(f"left out, for the model has no such parameter: {names}")
    return 0


@contextmanager
def _progress(what: str, size: int) -> Iterator[Advance]:
    """Show a bar with GB/s and the time left on the first process's terminal, of its own share of the
    work."""
    if launched_rank() != 0:
        yield lambda _: None
        return
    of_all = f" (process 1 of {launched_world()})" if launched_world() > 1 else ""
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
        task = bar.add_task(f"{what}{of_all}", total=size)
        yield lambda done: bar.advance(task, done)
