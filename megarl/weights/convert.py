"""Conversion of a model's folder: Hugging Face safetensors to a Megatron checkpoint and back, bit for bit.

By one process or many. A few blocks of a tensor are in memory. The folder appears under its name only when it
is whole, on disk, and (if asked) compared with its source.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import gcd, prod
from pathlib import Path
from typing import Any

import torch

from megarl.config.errors import CheckpointError
from megarl.config.files import fsync
from megarl.parallel.layout import Layout
from megarl.weights.files import HashedFile, Processes, as_bytes, blocks, carry_along, new_folder
from megarl.weights.hf import (
    DTYPES,
    SCORE_BIAS,
    HFFolder,
    ModelFolder,
    exported_config,
    named_files,
    write_index,
)
from megarl.weights.layout import Shape
from megarl.weights.megatron import Chunk, MegatronFolder, rank_chunks, write_chunks, write_metadata

Advance = Callable[[int], None]  # told of bytes that are done
# (What is done now, how many bytes this process has to do) -> a context in which bytes are told of.
Watch = Callable[[str, int], AbstractContextManager[Advance]]
SUMS = "SHA256SUMS"
SAFETENSORS = {dtype: name for name, dtype in DTYPES.items()}


@contextmanager
def unwatched(_what: str, _size: int) -> Iterator[Advance]:
    """Show nothing."""
    yield lambda _: None


@dataclass(frozen=True)
class Conversion:
    """What was done: bytes of tensors, files, seconds until they were on disk.

    `left_out`: tensors of the source that are no parameters of the model (an unused head, rotary tables).
    """

    size: int
    files: int
    seconds: float
    left_out: tuple[str, ...]


def conversion_layout(tp: int, pp: int, ep: int) -> Layout:
    """Return the smallest job of these sizes: with just as many replicas as expert parallelism needs."""
    return Layout(tp=tp, pp=pp, dp=ep // gcd(tp, ep), ep=ep)


def hf_to_megatron(
    source: Path,
    out: Path,
    layout: Layout,
    *,
    critic: bool = False,
    verify: bool = False,
    watch: Watch = unwatched,
) -> Conversion:
    """Write the model of a Hugging Face folder as a distributed checkpoint, cut as ranks of `layout` hold it.

    Any layout can load it. critic: with the value head of a classifier of one label, or one of zeros, in
    place of the output layer. verify: read back and compare. Every process of the default process group calls
    this. Raises CheckpointError where the source is damaged or `out` exists or cannot be written.
    """
    began, processes = time.perf_counter(), Processes()
    model = processes.run(lambda: HFFolder(source, critic=critic))
    files = _chunk_files(model, layout, processes.world, critic)
    sizes = {name: sum(chunk.nbytes(model) for chunk in chunks) for name, chunks in files.items()}
    mine = list(files)[processes.rank :: processes.world]
    with new_folder(out, sum(sizes.values()), processes) as folder:
        with watch("writing", sum(sizes[name] for name in mine)) as advance:
            write = partial(write_chunks, folder=model, advance=advance)
            written = processes.run(lambda: {name: write(folder / name, files[name]) for name in mine})
        everything = {name: done for part in processes.gather(written) for name, done in part.items()}

        def finish() -> None:
            records = [record for records, _ in everything.values() for record in records]
            write_metadata(folder, records, model.config)
            _finish(folder, source, {name: digest for name, (_, digest) in everything.items()})

        processes.first(finish)
        if verify:
            kinds = {name: model.dtype(name) for name in model.shapes if name not in model.missing}
            _verify(model, kinds, lambda: MegatronFolder(folder, critic=critic), folder, watch, processes)
    # The bias is zero, and written anew on the way back.
    left_out = tuple(name for name in model.extra if name != SCORE_BIAS)
    return Conversion(sum(sizes.values()), len(files), time.perf_counter() - began, left_out)


def _chunk_files(model: HFFolder, layout: Layout, processes: int, critic: bool) -> dict[str, list[Chunk]]:
    """Return file name -> its chunks: one or more files a rank, so that every process has one to write."""
    seen: set[tuple[str, Shape]] = set()
    files = {}
    parts = -(-processes // layout.world)
    for rank in range(layout.world):
        chunks = []
        for chunk in rank_chunks(model.config, layout, rank, critic=critic):
            if (chunk.key, chunk.offsets) not in seen:  # else another rank holds the same and has written it
                seen.add((chunk.key, chunk.offsets))
                chunks.append(chunk)
        step = max(1, -(-len(chunks) // parts))
        for part, first in enumerate(range(0, len(chunks), step)):
            files[f"__{rank}_{part}.distcp"] = chunks[first : first + step]
    return files


def megatron_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    source: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 << 30,
    verify: bool = False,
    watch: Watch = unwatched,
) -> Conversion:
    """Write the model of a distributed checkpoint as a Hugging Face folder.

    source: the folder with config.json and tokenizer, where the checkpoint has none (one of a training run).
    dtype: of every tensor; by default each keeps its own. A value head makes it a classifier. Else as
    `hf_to_megatron`.
    """
    began, processes = time.perf_counter(), Processes()
    model = processes.run(lambda: MegatronFolder(checkpoint, source=source))
    kinds = {name: model.dtype(name) if dtype is None else dtype for name in model.shapes}
    found = {*kinds.values()}
    config = exported_config(model.config, model.critic, found.pop() if len(found) == 1 else None)
    heads = model.config.get("architectures", [""])
    if model.critic and heads[0].endswith("Classification"):  # which stays what it is
        config = {**model.config, **{key: config[key] for key in ("dtype", "torch_dtype") if key in config}}
    shapes = dict(model.shapes)
    if model.critic and config["architectures"][0].endswith("ForTokenClassification"):
        shapes[SCORE_BIAS], kinds[SCORE_BIAS] = (1,), kinds["score.weight"]
    sizes = {name: prod(shape) * kinds[name].itemsize for name, shape in shapes.items()}
    files = named_files(sizes, max_shard_bytes)
    mine = list(files)[processes.rank :: processes.world]
    with new_folder(out, sum(sizes.values()), processes) as folder:
        with watch("writing", sum(sizes[name] for file in mine for name in files[file])) as advance:
            write = partial(_write_file, model=model, shapes=shapes, kinds=kinds, advance=advance)
            written = processes.run(lambda: {file: write(folder / file, files[file]) for file in mine})
        digests = {file: digest for part in processes.gather(written) for file, digest in part.items()}

        def finish() -> None:
            write_index(folder, files, sum(sizes.values()))
            _finish(folder, source or checkpoint, digests, None if config == model.config else config)

        processes.first(finish)
        if verify:
            kinds.pop(SCORE_BIAS, None)  # that it is zero is checked when the folder is opened
            _verify(model, kinds, lambda: HFFolder(folder, critic=model.critic), folder, watch, processes)
    return Conversion(sum(sizes.values()), len(files), time.perf_counter() - began, ())


def _write_file(
    path: Path,
    names: Sequence[str],
    *,
    model: ModelFolder,
    shapes: Mapping[str, Shape],
    kinds: Mapping[str, torch.dtype],
    advance: Advance,
) -> str:
    """Write a safetensors file, block by block (the library wants whole tensors); return its SHA-256."""
    # Wide elements first, so that each tensor begins at a multiple of its element's size.
    names = sorted(names, key=lambda name: -kinds[name].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        kind, shape = kinds[name], shapes[name]
        start, end = end, end + prod(shape) * kind.itemsize
        header[name] = {"dtype": SAFETENSORS[kind], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.writing = name
            for box in blocks(shapes[name], kinds[name].itemsize):
                if name in model.shapes:
                    block = model.read_as(name, box, kinds[name])
                else:
                    block = torch.zeros(shapes[name], dtype=kinds[name])
                advance(file.write(as_bytes(block)))
        return file.finish()


def _finish(
    folder: Path, source: Path, digests: Mapping[str, str], config: Mapping[str, Any] | None = None
) -> None:
    """Add what is not weights, and the checksums of all files. `config`: config.json, if it changes."""
    carry_along(source, folder, config)
    paths = [path for path in folder.iterdir() if path.name not in digests]
    others = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    lines = [f"{digest}  {name}\n" for name, digest in sorted({**digests, **others}.items())]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    for name in (*others, SUMS):
        fsync(folder / name)


def _verify(
    source: ModelFolder,
    kinds: Mapping[str, torch.dtype],
    reopen: Callable[[], ModelFolder],
    folder: Path,
    watch: Watch,
    processes: Processes,
) -> None:
    """Read the written folder from disk: each file's checksum, and each tensor's bits beside the source's.

    kinds: names of the tensors and their dtypes. Raises CheckpointError naming file and tensor.
    """
    mine = list(kinds)[processes.rank :: processes.world]

    def compare(advance: Advance) -> None:
        for number, line in enumerate((folder / SUMS).read_text(encoding="utf-8").splitlines()):
            digest, name = line.split("  ")
            with (folder / name).open("rb") as file:
                # What is still in the page cache proves nothing.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if number % processes.world != processes.rank:
                    continue
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    problem = "is not what was written there (a fault of disk or memory?)"
                    raise CheckpointError(f"{name}: {problem}")
        written = reopen()
        for name in mine:
            same = written.dtype(name) == kinds[name]
            for box in blocks(source.shapes[name], kinds[name].itemsize):
                expected = source.read_as(name, box, kinds[name])
                if not same or as_bytes(written.read(name, box)) != as_bytes(expected):
                    path = written.files(name)[0][0]
                    raise CheckpointError(f"{path.name}: {name}: is not what the source has")
                advance(expected.nbytes)

    size = sum(prod(source.shapes[name]) * kinds[name].itemsize for name in mine)
    with watch("comparing", size) as advance:
        processes.run(partial(compare, advance))
