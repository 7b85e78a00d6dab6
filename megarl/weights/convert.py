"""Converting a model's folder: Hugging Face safetensors to a Megatron distributed checkpoint and back, bit for bit, by one process or many.

Both directions read boxes of stored tensors and write files from front to back; a few blocks of a tensor are in memory. The
folder appears under its name only when it is whole, on disk, and (if asked) compared with its source.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
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
from megarl.weights.export import exported_config, named_files, write_index
from megarl.weights.hf_io import DTYPES, HFFolder
from megarl.weights.layout import Shape
from megarl.weights.megatron_folder import MegatronFolder
from megarl.weights.megatron_io import Chunk, chunk_of, rank_chunks, write_chunks, write_metadata
from megarl.weights.publish import Team, aside, carry_along
from megarl.weights.stored import HashedFile, Made, as_bytes

Advance = Callable[[int], None]  # told of bytes that are done
Watch = Callable[[str, int], AbstractContextManager[Advance]]  # (what is done now, how many bytes this process has to do)
SUMS = "SHA256SUMS"
SAFETENSORS = {dtype: name for name, dtype in DTYPES.items()}


@contextmanager
def unwatched(_what: str, _size: int) -> Iterator[Advance]:
    """Shows nothing."""
    yield lambda _: None


@dataclass(frozen=True)
class Conversion:
    """What was done: bytes of tensors, files, seconds until they were on disk; `left_out`: tensors of the source that are no
    parameters of the model (a head that is not used, rotary tables)."""

    size: int
    files: int
    seconds: float
    left_out: tuple[str, ...]


def conversion_layout(tp: int, pp: int, ep: int) -> Layout:
    """The smallest job of these sizes: with just as many replicas as expert parallelism needs."""
    return Layout(tp=tp, pp=pp, dp=ep // gcd(tp, ep), ep=ep)


def hf_to_megatron(
    source: Path,
    out: Path,
    layout: Layout,
    *,
    critic: bool = False,
    verify: bool = False,
    watch: Watch = unwatched,
    team: Team | None = None,
) -> Conversion:
    """Writes the model of a Hugging Face folder as a distributed checkpoint, cut as ranks of `layout` hold it; any layout can load it.

    critic: with the value head of a classifier of one label, or one of zeros, in place of the output layer. verify: read back and
    compare. Every process of the team calls this. CheckpointError where the source is damaged or `out` exists or cannot be written.
    """
    began, team = time.perf_counter(), team or Team()
    model = team.run(lambda: HFFolder(source, critic=critic))
    files = _chunk_files(model, layout, team.world, critic)
    sizes = {name: sum(chunk_of(chunk, model).nbytes for chunk in chunks) for name, chunks in files.items()}
    mine = list(files)[team.rank :: team.world]
    with aside(out, sum(sizes.values()), team) as folder:
        with watch("writing", sum(sizes[name] for name in mine)) as advance:
            written = team.run(lambda: {name: write_chunks(folder / name, files[name], model, advance) for name in mine})
        everything = {name: done for part in team.gather(written) for name, done in part.items()}

        def finish() -> None:
            write_metadata(folder, [record for records, _ in everything.values() for record in records], model.config)
            _finish(folder, source, {name: digest for name, (_, digest) in everything.items()})

        team.first(finish)
        if verify:
            present = {name: model.tensor(name) for name in model.shapes if name not in model.missing}
            _verify(present, lambda: MegatronFolder(folder, critic=critic).tensor, {}, folder, watch, team)
    left_out = tuple(name for name in model.extra if name != "score.bias")  # zero, and written anew on the way back
    return Conversion(sum(sizes.values()), len(files), time.perf_counter() - began, left_out)


def megatron_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    source: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 << 30,
    verify: bool = False,
    watch: Watch = unwatched,
    team: Team | None = None,
) -> Conversion:
    """Writes the model of a distributed checkpoint as a Hugging Face folder.

    source: the folder with config.json and tokenizer, where the checkpoint has none (one of a training run). dtype: of every tensor;
    by default each keeps its own. A value head makes it a classifier. Else as `hf_to_megatron`.
    """
    began, team = time.perf_counter(), team or Team()
    model = team.run(lambda: MegatronFolder(checkpoint, source=source))
    config = _hf_config(model, dtype)
    tensors = {name: model.tensor(name) for name in model.shapes}
    if model.critic and config["architectures"][0].endswith("ForTokenClassification"):
        tensors["score.bias"] = Made("score.bias", (1,), tensors["score.weight"].dtype, ())  # transformers' token classifier has one
    kinds = {name: tensor.dtype if dtype is None else dtype for name, tensor in tensors.items()}
    sizes = {name: prod(tensor.shape) * kinds[name].itemsize for name, tensor in tensors.items()}
    files = named_files(sizes, max_shard_bytes)
    mine = list(files)[team.rank :: team.world]
    with aside(out, sum(sizes.values()), team) as folder:
        with watch("writing", sum(sizes[name] for file in mine for name in files[file])) as advance:
            written = team.run(
                lambda: {file: _write_safetensors(folder / file, {n: tensors[n] for n in files[file]}, kinds, advance) for file in mine}
            )
        digests = {file: digest for part in team.gather(written) for file, digest in part.items()}

        def finish() -> None:
            write_index(folder, files, sum(sizes.values()))
            _finish(folder, source or checkpoint, digests, None if config == model.config else config)

        team.first(finish)
        if verify:
            _verify(tensors, lambda: HFFolder(folder, critic=model.critic).tensor, kinds, folder, watch, team)
    return Conversion(sum(sizes.values()), len(files), time.perf_counter() - began, ())


def _chunk_files(model: HFFolder, layout: Layout, processes: int, critic: bool) -> dict[str, list[Chunk]]:
    """File name -> its chunks: a file for each rank of the layout, or several, so that every process has one to write."""
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


def _finish(folder: Path, source: Path, digests: Mapping[str, str], config: Mapping[str, Any] | None = None) -> None:
    """Adds everything that is not weights, and the checksums of all files. `config`: config.json, if it changes."""
    carry_along(source, folder, config)
    others = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.name not in digests}
    lines = [f"{digest}  {name}\n" for name, digest in sorted({**digests, **others}.items())]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    for name in (*others, SUMS):
        fsync(folder / name)


def _hf_config(model: MegatronFolder, dtype: torch.dtype | None) -> dict[str, Any]:
    """config.json of the exported model: as it is, but for the dtype, and for a head that is not the source's."""
    dtypes = {model.tensor(name).dtype for name in model.shapes} if dtype is None else {dtype}
    exported = exported_config(model.config, model.critic, dtypes.pop() if len(dtypes) == 1 else None)
    if model.critic and model.config.get("architectures", [""])[0].endswith("Classification"):
        return {**model.config, **{key: exported[key] for key in ("dtype", "torch_dtype") if key in exported}}
    return exported


def _write_safetensors(path: Path, tensors: Mapping[str, Made], kinds: Mapping[str, torch.dtype], advance: Advance) -> str:
    """One safetensors file, block by block (its library wants all tensors of a file at once); gives its SHA-256."""
    # Wide elements first, so that each tensor begins at a multiple of its element's size.
    order = sorted(tensors, key=lambda name: -kinds[name].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + prod(tensors[name].shape) * kinds[name].itemsize
        header[name] = {"dtype": SAFETENSORS[kinds[name]], "shape": tensors[name].shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.writing = name
            file.write_tensor(tensors[name], kinds[name], advance)
        return file.close()


def _verify(
    tensors: Mapping[str, Made],
    reopen: Callable[[], Callable[[str], Made]],
    kinds: Mapping[str, torch.dtype],
    folder: Path,
    watch: Watch,
    team: Team,
) -> None:
    """Reads the written folder from disk: each file's checksum, and every bit of each tensor beside the source's. CheckpointError names
    file and tensor."""
    mine = list(tensors)[team.rank :: team.world]

    def compare(advance: Advance) -> None:
        for number, line in enumerate((folder / SUMS).read_text(encoding="utf-8").splitlines()):
            digest, name = line.split("  ")
            with (folder / name).open("rb") as file:
                # What is still in the page cache proves nothing.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if number % team.world == team.rank and hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise CheckpointError(f"{name}: is not what was written there (a fault of disk or memory?)")
        written = reopen()
        for name in mine:
            found = written(name)
            for box in tensors[name].blocks():
                expected = tensors[name].read_as(box, kinds.get(name, tensors[name].dtype))
                if expected.dtype != found.dtype or as_bytes(found.read(box)) != as_bytes(expected):
                    where = found.pieces[0].stored.path.name
                    raise CheckpointError(f"{where}: {name}: is not what the source has")
                advance(expected.nbytes)

    with watch("comparing", sum(tensors[name].nbytes for name in mine)) as advance:
        team.run(partial(compare, advance))
