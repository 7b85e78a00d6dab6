"""Converting a model's folder: Hugging Face safetensors to a Megatron distributed checkpoint and back, bit for bit, by one process or many.

Both directions read boxes of stored tensors and write files from front to back; a few blocks of a tensor are in memory. The
folder appears under its name only when it is whole, on disk, and (if asked) compared with its source.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import gcd, prod
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from megarl.config.errors import CheckpointError, MegarlError
from megarl.config.files import fsync
from megarl.parallel.layout import Layout
from megarl.weights.export import CARRIED, exported_config, file_name, split_files, write_json
from megarl.weights.hf_io import INDEX, HFFolder
from megarl.weights.layout import Shape
from megarl.weights.megatron_io import Chunk, MegatronFolder, chunk_of, rank_chunks, write_chunks, write_index
from megarl.weights.stored import HashedFile, Made, as_bytes

T = TypeVar("T")
Advance = Callable[[int], None]  # told of bytes that are done
Watch = Callable[[str, int], AbstractContextManager[Advance]]  # (what is done now, how many bytes this process has to do)
SUMS = "SHA256SUMS"
SAFETENSORS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


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


class Team:
    """The processes that convert together: this one alone, or those of the default process group (gloo)."""

    def __init__(self) -> None:
        together = dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)

    def run(self, action: Callable[[], T]) -> T:
        """This process's result of `action`. CheckpointError on every process if it failed on one of them."""
        problem, result = None, None
        try:
            result = action()
        except MegarlError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{error.filename or 'the output'}: cannot be written ({error.strerror})"
        problems = [text for text in self.gather(problem) if text is not None]
        if problems:
            raise CheckpointError(problems[0])
        return cast(T, result)

    def first(self, action: Callable[[], None]) -> None:
        """Runs `action` on the first process while the others wait."""
        self.run(action if self.rank == 0 else lambda: None)

    def gather(self, value: T) -> list[T]:
        """Every process's `value`, by rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values


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
    folder = team.run(partial(HFFolder, source, critic=critic))
    files = _chunk_files(folder, layout, team.world, critic)
    sizes = {name: sum(chunk_of(chunk, folder).nbytes for chunk in chunks) for name, chunks in files.items()}
    mine = dict(list(files.items())[team.rank :: team.world])

    def write(aside: Path, advance: Advance) -> list[tuple[list[Any], str, str]]:
        return [(*write_chunks(aside / name, chunks, folder, advance), name) for name, chunks in mine.items()]

    def finish(aside: Path, written: Sequence[tuple[list[Any], str, str]]) -> None:
        write_index(aside, [record for records, _, _ in written for record in records], folder.config)
        _finish(aside, source, {name: digest for _, digest, name in written}, None)

    with _aside(out, sum(sizes.values()), team) as aside:
        with watch("writing", sum(sizes[name] for name in mine)) as advance:
            written = [file for part in team.gather(team.run(partial(write, aside, advance))) for file in part]
        team.first(partial(finish, aside, written))
        if verify:
            present = {name: folder.tensor(name) for name in folder.shapes if name not in folder.missing}
            _verify(present, lambda: MegatronFolder(aside, critic=critic).tensor, {}, aside, watch, team)
    left_out = tuple(name for name in folder.extra if name != "score.bias")  # zero, and written anew on the way back
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
    folder = team.run(partial(MegatronFolder, checkpoint, source=source))
    config = _hf_config(folder, dtype)
    tensors = {name: folder.tensor(name) for name in folder.shapes}
    if folder.critic and config["architectures"][0].endswith("ForTokenClassification"):
        tensors["score.bias"] = Made("score.bias", (1,), tensors["score.weight"].dtype, ())  # transformers' token classifier has one
    kinds = {name: tensor.dtype if dtype is None else dtype for name, tensor in tensors.items()}
    sizes = {name: prod(tensor.shape) * kinds[name].itemsize for name, tensor in tensors.items()}
    names = list(split_files(sizes, max_shard_bytes))
    files = {file_name(number, len(names)): part for number, part in enumerate(names, start=1)}
    mine = dict(list(files.items())[team.rank :: team.world])

    def write(aside: Path, advance: Advance) -> dict[str, str]:
        return {file: _write_safetensors(aside / file, {n: tensors[n] for n in part}, kinds, advance) for file, part in mine.items()}

    def finish(aside: Path, written: Sequence[Mapping[str, str]]) -> None:
        if len(files) > 1:
            weight_map = {name: file for file, part in files.items() for name in part}
            write_json(aside / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
        digests = {file: digest for part in written for file, digest in part.items()}
        _finish(aside, source or checkpoint, digests, None if config == folder.config else config)

    with _aside(out, sum(sizes.values()), team) as aside:
        with watch("writing", sum(sizes[name] for part in mine.values() for name in part)) as advance:
            written = team.gather(team.run(partial(write, aside, advance)))
        team.first(partial(finish, aside, written))
        if verify:
            _verify(tensors, lambda: HFFolder(aside, critic=folder.critic).tensor, kinds, aside, watch, team)
    return Conversion(sum(sizes.values()), len(files), time.perf_counter() - began, ())


def _chunk_files(folder: HFFolder, layout: Layout, processes: int, critic: bool) -> dict[str, list[Chunk]]:
    """File name -> its chunks: a file for each rank of the layout, or several, so that every process has one to write."""
    seen: set[tuple[str, Shape]] = set()
    files = {}
    parts = -(-processes // layout.world)
    for rank in range(layout.world):
        chunks = []
        for chunk in rank_chunks(folder.config, layout, rank, critic=critic):
            if (chunk.key, chunk.offsets) not in seen:  # else another rank holds the same and has written it
                seen.add((chunk.key, chunk.offsets))
                chunks.append(chunk)
        step = max(1, -(-len(chunks) // parts))
        for part, first in enumerate(range(0, len(chunks), step)):
            files[f"__{rank}_{part}.distcp"] = chunks[first : first + step]
    return files


@contextmanager
def _aside(out: Path, size: int, team: Team) -> Iterator[Path]:
    """A folder beside `out` that takes its name at the end, when it is on disk; whatever happens before leaves nothing behind."""
    aside = out.with_name(f".{out.name}.partial")

    def start() -> None:
        if out.exists() or out.is_symlink():
            raise CheckpointError(f"{out}: already exists (choose another folder, or remove it)")
        if aside.exists():  # a conversion that was killed
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
        free = shutil.disk_usage(aside).free
        if free < size:
            raise CheckpointError(f"{out}: {size / 1e9:.2f} GB are to be written, but {free / 1e9:.2f} GB are free there")

    def publish() -> None:
        fsync(aside)
        aside.rename(out)
        fsync(out.parent)

    try:
        team.first(start)
        yield aside
        team.first(publish)
    except BaseException:
        if team.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _finish(aside: Path, source: Path, digests: Mapping[str, str], config: Mapping[str, Any] | None) -> None:
    """Adds everything that is not weights, and the checksums of all files; makes them durable. `config`: config.json, if it changes."""
    for path in sorted({path for pattern in ("config.json", *CARRIED) for path in source.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, aside / path.name)
    if config is not None:
        write_json(aside / "config.json", dict(config))
    others = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in aside.iterdir() if path.name not in digests}
    lines = [f"{digest}  {name}\n" for name, digest in sorted({**digests, **others}.items())]
    (aside / SUMS).write_text("".join(lines), encoding="utf-8")
    for name in (*others, SUMS):
        fsync(aside / name)


def _hf_config(folder: MegatronFolder, dtype: torch.dtype | None) -> dict[str, Any]:
    """config.json of the exported model: as it is, but for the dtype, and for a head that is not the source's."""
    dtypes = {folder.tensor(name).dtype for name in folder.shapes} if dtype is None else {dtype}
    exported = exported_config(folder.config, folder.critic, dtypes.pop() if len(dtypes) == 1 else None)
    if folder.critic and folder.config.get("architectures", [""])[0].endswith("Classification"):
        return {**folder.config, **{key: exported[key] for key in ("dtype", "torch_dtype") if key in exported}}
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
            for box in tensors[name].blocks():
                block = _as_kind(tensors[name], box, kinds[name])
                file.write_kept(as_bytes(block))
                advance(block.nbytes)
        return file.close()


def _as_kind(tensor: Made, box: Any, kind: torch.dtype) -> torch.Tensor:
    """A block of a tensor as another dtype; CheckpointError if numbers are beyond its range."""
    block = tensor.read(box)
    converted = block.to(kind)
    if kind == torch.float16 and bool((block.isfinite() & ~converted.isfinite()).any()):
        raise CheckpointError(f"{tensor.name}: has numbers beyond the range of float16 (choose bf16 or fp32)")
    return converted


def _verify(
    tensors: Mapping[str, Made],
    reopen: Callable[[], Callable[[str], Made]],
    kinds: Mapping[str, torch.dtype],
    aside: Path,
    watch: Watch,
    team: Team,
) -> None:
    """Reads the written folder from disk: each file's checksum, and every bit of each tensor beside the source's. CheckpointError names
    file and tensor."""
    mine = list(tensors)[team.rank :: team.world]

    def compare(advance: Advance) -> None:
        for number, line in enumerate((aside / SUMS).read_text(encoding="utf-8").splitlines()):
            digest, name = line.split("  ")
            with (aside / name).open("rb") as file:
                # What is still in the page cache proves nothing.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if number % team.world == team.rank and hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise CheckpointError(f"{name}: is not what was written there (a fault of disk or memory?)")
        written = reopen()
        for name in mine:
            found = written(name)
            for box in tensors[name].blocks():
                expected = _as_kind(tensors[name], box, kinds.get(name, tensors[name].dtype))
                if expected.dtype != found.dtype or as_bytes(found.read(box)) != as_bytes(expected):
                    where = found.pieces[0].stored.path.name
                    raise CheckpointError(f"{where}: {name}: is not what the source has")
                advance(expected.nbytes)

    with watch("comparing", sum(tensors[name].nbytes for name in mine)) as advance:
        team.run(partial(compare, advance))
