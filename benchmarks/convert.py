"""Compare the conversion of a model folder with `cp` of the same bytes, and measure its memory.

    python benchmarks/convert.py [--folder DIR] [--layers 24] [--tp 1] [--rounds 3] [--cold]

The model has random weights in the shapes of Qwen2.5-0.5B (1 GB with 24 layers). Each round alternates copies
and conversions in both directions, so that all use the disk in the same state. Every time includes fsync of
all written files: for `cp`, one fsync per file afterwards. By default the source is in the page cache, which
favours `cp`; --cold drops it from the cache before each run.

Memory is the peak of the converting process minus that of a process that only imports the converter. Its
bound depends on the largest tensor. User and system CPU seconds distinguish a busy machine from slow code.

Before each timed run the same number of bytes is written and removed, so that free memory is backed by the
host. A virtual machine returns free memory to its host within seconds, the time that torch takes to start.
A fault on such a page costs several times as much as copying it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import NamedTuple

from measure import Verdicts, machine

QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


class Run(NamedTuple):
    """Wall and CPU seconds, and peak memory in bytes (0: not measured)."""

    seconds: float
    cpu: float
    peak: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured"
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        return measure(Path(scratch), given)


def measure(scratch: Path, given: argparse.Namespace) -> int:
    source, copy, megatron, back = (scratch / name for name in ("source", "copy", "megatron", "back"))
    size, largest = make_model(source, given.layers)
    ways: dict[str, tuple[Path, Path, Callable[[], Run]]] = {
        "cp": (source, copy, lambda: copy_folder(source, copy, size)),
        "hf -> megatron": (
            source,
            megatron,
            lambda: converting("hf -> megatron", size, source, megatron, given.tp),
        ),
        "cp of that": (megatron, copy, lambda: copy_folder(megatron, copy, size)),
        "megatron -> hf": (megatron, back, lambda: converting("megatron -> hf", size, megatron, back)),
    }
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(given.rounds):
        for path in (copy, megatron, back):
            shutil.rmtree(path, ignore_errors=True)
        for name, (read, written, run) in ways.items():
            visit(read, os.POSIX_FADV_DONTNEED if given.cold else os.POSIX_FADV_WILLNEED)
            runs[name].append(run())
            if name.startswith("cp"):
                shutil.rmtree(written)
    bare = converting("nothing", 0).peak
    where = "cold" if given.cold else "in the page cache"
    print(
        f"{machine()}\n{size / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB, tp {given.tp}, source "
        f"{where}, {given.rounds} rounds"
    )
    print(f"{'':16s}{'GB/s median':>12s}{'worst':>8s}{'CPU s':>8s}")
    seconds = {name: statistics.median(run.seconds for run in done) for name, done in runs.items()}
    for name, done in runs.items():
        worst, cpu = max(run.seconds for run in done), statistics.median(run.cpu for run in done)
        print(f"{name:16s}{size / 1e9 / seconds[name]:12.2f}{size / 1e9 / worst:8.2f}{cpu:8.2f}")
    verdicts = Verdicts()
    for name, plain in (("hf -> megatron", "cp"), ("megatron -> hf", "cp of that")):
        verdicts.at_least(f"{name}: speed of cp", seconds[plain] / seconds[name], 0.5, " x")
        peak = max(run.peak for run in runs[name]) - bare
        verdicts.at_most(
            f"{name}: memory over the bare import",
            peak / 1e6,
            (1.5 * largest + (512 << 20)) / 1e6,
            " MB",
            must=True,
        )
    return verdicts.exit_code


def make_model(folder: Path, layers: int) -> tuple[int, int]:
    """Write a model folder with random bytes; return its bytes and those of its largest tensor."""
    import torch
    from safetensors.torch import save_file

    from megarl.weights.shards import hf_shapes

    config = {**QWEN, "num_hidden_layers": layers}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: torch.frombuffer(bytearray(os.urandom(2 * prod(shape))), dtype=torch.bfloat16).view(shape)
        for name, shape in hf_shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = [tensor.nbytes for tensor in tensors.values()]
    return sum(sizes), max(sizes)


def warm(size: int, beside: Path) -> None:
    """Write a file of `size` bytes in the same folder as `beside`, and remove it."""
    block = bytes(1 << 20)
    with tempfile.TemporaryFile(dir=beside.parent, buffering=0) as file:
        for _ in range(size >> 20):
            file.write(block)


def copy_folder(source: Path, out: Path, size: int) -> Run:
    """Copy a folder by `cp`, then one fsync per file."""
    warm(size, out)
    began, cpu = time.perf_counter(), cpu_of_all()
    subprocess.run(["cp", "-r", source, out], check=True)
    for path in out.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return Run(time.perf_counter() - began, cpu_of_all() - cpu, 0)


def cpu_of_all() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return sum(times[:4])


def visit(folder: Path, advice: int) -> None:
    """Load every file of a folder into the page cache, or drop it, according to `advice`."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, advice)
        if advice == os.POSIX_FADV_WILLNEED:
            while os.read(descriptor, 1 << 24):
                pass
        os.close(descriptor)


# Convert in a separate process: print wall and CPU seconds without the start of Python and torch, and peak
# memory in bytes.
CHILD = """
import json, sys, time
from pathlib import Path
from megarl.cli.ranks import quiet_libraries
quiet_libraries()
from megarl.weights.megatron import conversion_layout, hf_to_megatron, megatron_to_hf
from convert import warm
what, size, *arguments = sys.argv[1:]
if int(size):
    warm(int(size), Path(arguments[1]))
began, cpu = time.perf_counter(), time.process_time()
if what == "hf -> megatron":
    hf_to_megatron(Path(arguments[0]), Path(arguments[1]), conversion_layout(int(arguments[2]), 1, 1))
elif what == "megatron -> hf":
    megatron_to_hf(Path(arguments[0]), Path(arguments[1]))
seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([seconds, cpu, peak * 1024]))
"""


def converting(what: str, size: int, *arguments: object) -> Run:
    """Run a conversion of `size` bytes, or a process that only imports the converter."""
    command = [sys.executable, "-c", CHILD, what, str(size), *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent)
    return Run(*json.loads(done.stdout))


if __name__ == "__main__":
    raise SystemExit(main())
