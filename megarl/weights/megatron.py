"""Megatron's distributed checkpoints (torch_dist), read as Hugging Face tensors and written from them.

A key is a parameter over all layers, and over all experts; a chunk is what one rank has of it in one layer.
Keys and shapes depend on the model alone, so any layout reads what any other one wrote; the layout decides
how chunks are cut.
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import product
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from megarl.config.errors import CheckpointError
from megarl.config.files import check_index
from megarl.parallel.layout import Layout, padded_vocab
from megarl.weights.families import (
    OUTPUT,
    TE_ALIASES,
    TIED_OUTPUT,
    VALUE_HEAD,
    Pair,
    Shape,
    Sizes,
    family_of,
    is_tied,
    read_config,
)
from megarl.weights.files import SMALL, FileTensor, HashedFile, as_bytes, blocks, damaged
from megarl.weights.hf import OUTPUT_NAME, HFFolder, ModelFolder, dtype_name
from megarl.weights.layout import Box, Region, full_box, hf_shapes, pair_shard, parameters, whole_model
from megarl.weights.plan import intersect, shift, volume
from megarl.weights.transfer import view

METADATA, COMMON, CONFIG, EXTRA = ".metadata", "common.pt", "metadata.json", "extra_state.distcp"
# What dist_checkpointing asks of a folder before it loads; common.pt, which is not sharded, is empty here.
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "value_head.")  # others: of optimizers and schedules


def keys_of(pair: Pair) -> tuple[str, ...]:
    """Return the checkpoint's names of a parameter, the usual one first.

    Megatron-core's layer specs have two names for a norm that Transformer Engine would fuse into the linear
    after it.
    """
    name = pair.megatron.replace("{l}.", "").replace("local_experts.{e}", "experts")
    for alias, ours in TE_ALIASES.items():
        if name.endswith("." + ours):
            return name.removesuffix(ours) + alias, name
    return (name,)


def _lead(pair: Pair, layer: int, expert: int) -> Shape:
    """Return the dimensions of a key before the parameter's own: (layer, expert), where it has them."""
    return (layer,) * ("{l}" in pair.megatron) + (expert,) * pair.per_expert


def _key_shape(pair: Pair, sizes: Sizes, tp: int) -> Shape:
    """Return the shape of a key's tensor over all layers, experts and tensor-parallel ranks."""
    rows, *rest = sizes.shape(pair.hf[0][1])
    if pair.operation == "vocabulary":
        rows = padded_vocab(rows, tp)
    else:
        rows = sum(sizes.shape(dims)[0] for _, dims in pair.hf)
    return (*_lead(pair, sizes.layers, sizes.experts), rows, *rest)


# Reading


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a distributed checkpoint."""
    return (path / METADATA).is_file()


def open_model(path: Path, *, critic: bool = False) -> ModelFolder:
    """Open a folder to start training from: Hugging Face's, or a distributed checkpoint with config.json.

    Raises CheckpointError, naming file and tensor, for anything else.
    """
    return MegatronFolder(path, critic=critic) if is_checkpoint(path) else HFFolder(path, critic=critic)


class _Piece(NamedTuple):
    """A box of a chunk, beginning with one layer (and expert), and where it lies in a Hugging Face tensor."""

    chunk: dcp.MetadataIndex
    src: Box
    dst: Box


class MegatronFolder(ModelFolder):
    """A distributed checkpoint of a model.

    source: the folder with config.json and tokenizer, by default the checkpoint's own (the converters put
    them there). critic: whether a value head is wanted; by default whether there is one. Opening reads the
    index and checks that the chunks cover every tensor of the model; whatever does not fit is a
    CheckpointError naming file and tensor. As Megatron's own loading, it unpickles the index: open only what
    you trust.
    """

    def __init__(self, path: Path, *, source: Path | None = None, critic: bool | None = None) -> None:
        self.path = Path(path)
        self.config = read_config(source or self.path)
        metadata, kind = _read_metadata(self.path), dcp.TensorStorageMetadata
        self._keys = {key: e for key, e in metadata.state_dict_metadata.items() if isinstance(e, kind)}
        self._storage = metadata.storage_data
        self._chunks: dict[dcp.MetadataIndex, FileTensor] = {}
        self.critic = VALUE_HEAD.megatron in self._keys if critic is None else critic
        self.shapes = hf_shapes(self.config, critic=self.critic)
        self._pieces = self._find()
        self.missing = tuple(name for name in self.shapes if name not in self._pieces)
        self._check_files()
        if OUTPUT_NAME in self._pieces and OUTPUT_NAME not in self.shapes:
            self._check_tied()

    def dtype(self, name: str) -> torch.dtype:
        return self._chunk(self._pieces[name][0].chunk, name).dtype

    def files(self, name: str) -> list[tuple[Path, Box]]:
        return [(self._place(piece.chunk)[0], piece.dst) for piece in self._pieces[name]]

    def read(self, name: str, box: Box) -> Tensor:
        dtype = self.dtype(name)
        out = torch.empty([stop - start for start, stop in box], dtype=dtype)
        for index, src, dst in self._pieces[name]:
            common = intersect(dst, box)
            if common is None:
                continue
            chunk = self._chunk(index, name)
            check_dtype(chunk.dtype, dtype, chunk.path, name)
            lead = len(src) - len(dst)
            part = (*src[:lead], *shift(common, dst, src[lead:]))
            target = view(out, shift(common, box, full_box(tuple(out.shape))))
            if target.is_contiguous():
                chunk.read(part, name, target)
            else:
                target.copy_(chunk.read(part, name).view(target.shape))
        return out

    def _find(self) -> dict[str, list[_Piece]]:
        """Return the pieces of every Hugging Face tensor; CheckpointError unless they are all of it."""
        sizes, where = Sizes.of(self.config), self.path / METADATA
        pairs: dict[str, Pair] = {}  # the checkpoint's key -> what it holds
        known = {OUTPUT.megatron, VALUE_HEAD.megatron}  # heads of another use of the body do no harm
        wanted = dict.fromkeys(pair for pair, _, _ in whole_model(self.config, critic=self.critic))
        if is_tied(self.config) and not self.critic and OUTPUT.megatron in self._keys:
            wanted[OUTPUT] = None  # only to be compared with the embedding
        for pair in wanted:
            key = next((key for key in keys_of(pair) if key in self._keys), None)
            if key is None and pair is VALUE_HEAD:
                continue
            if key is None:
                raise damaged(where, keys_of(pair)[0], "is not in the checkpoint (config.json asks for it)")
            known.update(keys_of(pair))
            pairs[key] = pair
            shape, found = _key_shape(pair, sizes, 1), tuple(self._keys[key].size)
            fits = found == shape
            if pair.operation == "vocabulary":  # any tensor-parallel size pads it in its own way
                fits = len(found) == 2 and found[0] >= shape[0] and found[1:] == shape[1:]
            if not fits:
                raise damaged(where, key, f"shape {found}, but config.json asks for {shape}")
        for key in self._keys:
            if key.startswith(MODEL_KEYS) and key not in known:
                raise damaged(where, key, f"a {self.config['model_type']} model has no such tensor")
        pieces: dict[str, list[_Piece]] = defaultdict(list)
        for key, pair in pairs.items():
            self._find_in(key, pair, sizes, pieces)
        return pieces

    def _find_in(self, key: str, pair: Pair, sizes: Sizes, pieces: dict[str, list[_Piece]]) -> None:
        """Add the pieces of one key's chunks, layer by layer (and expert by expert)."""
        lead = _lead(pair, sizes.layers, sizes.experts)
        by_lead: dict[Shape, list[dcp.ChunkStorageMetadata]] = defaultdict(list)
        for chunk in self._keys[key].chunks:
            reach = zip(chunk.offsets[: len(lead)], chunk.sizes[: len(lead)], strict=True)
            for place in product(*(range(first, first + size) for first, size in reach)):
                by_lead[place].append(chunk)
        for place in product(*map(range, lead)):
            layer = place[0] if "{l}" in pair.megatron else 0
            expert = place[-1] if pair.per_expert else 0
            for region in pair_shard(pair, layer, expert, sizes, 1, 0).regions:
                box = (*((index, index + 1) for index in place), *region.local_box)
                covered = 0
                for chunk in by_lead[place]:
                    origin = tuple(
                        (at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True)
                    )
                    common = intersect(origin, box)
                    if common is not None:
                        src = shift(common, origin, full_box(tuple(chunk.sizes)))
                        dst = shift(common[len(place) :], region.local_box, region.hf_box)
                        pieces[region.hf_name].append(_Piece(dcp.MetadataIndex(key, chunk.offsets), src, dst))
                        covered += volume(dst)
                whole = volume(region.hf_box)
                if covered != whole:
                    problem = f"the chunks hold {covered} of the {whole} numbers of {region.hf_name}"
                    raise damaged(self.path / METADATA, key, problem)

    def _check_files(self) -> None:
        """Raise CheckpointError, naming file and tensor, unless every file is as long as the index says."""
        sizes: dict[Path, int] = {}
        for name, pieces in self._pieces.items():
            for index, _, _ in pieces:
                if index not in self._storage:
                    raise damaged(self.path / METADATA, name, "the index does not say where it lies")
                path, info = self._place(index)
                if path not in sizes:
                    sizes[path] = path.stat().st_size if path.is_file() else 0
                if sizes[path] < info.offset + info.length:
                    raise damaged(
                        path, name, "truncated" if sizes[path] else "no such file (the index names it)"
                    )

    def _place(self, index: dcp.MetadataIndex) -> tuple[Path, _StorageInfo]:
        info = self._storage[index]
        return self.path / info.relative_path, info

    def _chunk(self, index: dcp.MetadataIndex, name: str) -> FileTensor:
        """Return where a chunk's numbers lie within the file: behind the header that torch.save wrote."""
        if index not in self._chunks:
            path, info = self._place(index)
            try:
                with path.open("rb") as file:
                    stored = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
                    tensor = torch.load(stored, map_location="meta", weights_only=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise damaged(
                    path, name, f"not a chunk that torch.save wrote ({_first_line(error)})"
                ) from error
            start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
            if start is None or not tensor.is_contiguous():
                raise damaged(path, name, f"the chunk at byte {info.offset} is not stored row by row")
            offset = info.offset + start + tensor.storage_offset() * tensor.itemsize
            if offset + tensor.nbytes > info.offset + info.length:
                raise damaged(path, name, f"the chunk at byte {info.offset} ends before the tensor does")
            self._chunks[index] = FileTensor(path, offset, tuple(tensor.shape), tensor.dtype)
        return self._chunks[index]


def check_dtype(dtype: torch.dtype, first: torch.dtype, path: Path, name: str) -> None:
    """Raise CheckpointError naming file and tensor if a part has not the dtype of the first part."""
    if dtype != first:
        raise damaged(path, name, f"one part is {dtype_name(dtype)}, another is {dtype_name(first)}")


def _read_metadata(path: Path) -> dcp.Metadata:
    if not is_checkpoint(path):
        expected = "the folder of a Megatron distributed checkpoint in torch_dist format is expected"
        raise CheckpointError(f"{path}: no {METADATA} ({expected})")
    check_index(path / METADATA)
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # unpickling a damaged file raises whatever its bytes happen to call
        raise CheckpointError(f"{path / METADATA}: not a readable index ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# Writing


class Chunk(NamedTuple):
    """Part of the tensor `key`, whose whole shape is `size`: at `offsets`, of extents (1, ..., *shape).

    It is made of `regions`, whose local boxes are within `shape`; the tensor `hf_name` gives the dtype.
    """

    key: str
    size: Shape
    offsets: Shape
    shape: Shape
    regions: tuple[Region, ...]
    hf_name: str

    @property
    def extents(self) -> Shape:
        return (1,) * (len(self.size) - len(self.shape)) + self.shape

    def dtype(self, folder: HFFolder) -> torch.dtype:
        """Return the dtype that it has from the folder: float32 for a value head that is not there."""
        return torch.float32 if self.hf_name in folder.missing else folder.dtype(self.hf_name)

    def nbytes(self, folder: HFFolder) -> int:
        return prod(self.shape) * self.dtype(folder).itemsize

    def read(self, folder: HFFolder, box: Box) -> Tensor:
        """Return a box of it from the folder's tensors; padding and a missing value head are zero."""
        extents = tuple(stop - start for start, stop in box)
        tensor = torch.empty(extents, dtype=self.dtype(folder))
        regions = [] if self.hf_name in folder.missing else self.regions
        inside = [(region, common) for region in regions if (common := intersect(region.local_box, box))]
        if sum(volume(common) for _, common in inside) < volume(box):
            tensor.zero_()
        for (hf_name, hf_box, local_box), common in inside:
            check_dtype(folder.dtype(hf_name), tensor.dtype, folder.files(hf_name)[0][0], self.hf_name)
            rows = view(tensor, shift(common, box, full_box(extents)))  # whole ones, so contiguous
            folder.read(hf_name, shift(common, local_box, hf_box), rows)
        return tensor


class Record(NamedTuple):
    """A chunk that was written: `length` bytes at `offset` of `file`."""

    chunk: Chunk
    dtype: torch.dtype
    file: str
    offset: int
    length: int


def rank_chunks(
    hf_config: Mapping[str, Any], layout: Layout, rank: int, *, critic: bool = False
) -> Iterator[Chunk]:
    """Yield the chunks of one rank; tied embeddings are in the first stage's only."""
    sizes, place, ep_rank = Sizes.of(hf_config), layout.coords(rank), layout.ep_rank(rank)
    named = parameters(hf_config, layout, pp_rank=place.pp, ep_rank=ep_rank, critic=critic)
    for _, pair, layer, expert in named:
        if pair is TIED_OUTPUT:
            continue
        tp, tp_rank = (1, 0) if pair.per_expert else (layout.tp, place.tp)
        key, size, lead = keys_of(pair)[0], _key_shape(pair, sizes, tp), _lead(pair, layer, expert)
        parts, first = [pair], 0
        if pair.operation == "column":  # Megatron keeps the ranks' gates together, and then their ups
            parts = [replace(pair, hf=(tensor,)) for tensor in pair.hf]
        for part in parts:
            shard = pair_shard(part, layer, expert, sizes, tp, tp_rank)
            offsets = [0] * len(shard.shape)
            if pair.operation != "replicated":
                axis = 1 if pair.operation == "row" else 0
                offsets[axis] = first + tp_rank * shard.shape[axis]
            hf_name = part.hf[0][0].format(l=layer, e=expert)
            yield Chunk(key, size, (*lead, *offsets), shard.shape, shard.regions, hf_name)
            first += tp * shard.shape[0]


class _Framed:
    """What torch.save writes a chunk to: passes on everything but the numbers, which `fill` writes instead.

    So the format is torch's own, and no chunk is ever in memory: torch.save gets memory that nobody touches.
    """

    def __init__(self, file: HashedFile, nbytes: int, fill: Callable[[], None]) -> None:
        self.file, self.nbytes, self.fill = file, nbytes, fill
        self.filled = 0

    def write(self, data: bytes | memoryview) -> int:
        if len(data) != self.nbytes:
            return self.file.write(data)
        self.filled += 1
        try:
            self.fill()
        except CheckpointError as error:
            self.file.error = error
            raise
        return len(data)

    def flush(self) -> None:
        """Do nothing, for nothing is held back."""


def write_chunks(
    path: Path, chunks: Sequence[Chunk], folder: HFFolder, advance: Callable[[int], None]
) -> tuple[list[Record], str]:
    """Write one file of chunks, block by block; return where they are, and the file's SHA-256."""
    checked = torch.serialization.get_crc32_options()
    # The zip's own checksum takes longer than everything else together; the file has a better one.
    torch.serialization.set_crc32_options(False)
    records = []

    def write(chunk: Chunk, file: HashedFile) -> None:
        kind, nbytes = chunk.dtype(folder), chunk.nbytes(folder)
        if nbytes <= SMALL:  # the other records that torch.save writes are of some hundred bytes
            tensor = chunk.read(folder, full_box(chunk.shape)).view(chunk.extents)
            torch.save(tensor, cast(IO[bytes], file))
            advance(nbytes)
            return

        def fill() -> None:
            for box in blocks(chunk.shape, kind.itemsize):
                advance(file.write(as_bytes(chunk.read(folder, box))))

        framed = _Framed(file, nbytes, fill)
        torch.save(torch.empty(chunk.extents, dtype=kind), cast(IO[bytes], framed))
        assert framed.filled == 1, "torch.save did not write a tensor as one record"

    try:
        with HashedFile(path) as file:
            for chunk in chunks:
                offset, file.writing = file.tell(), chunk.hf_name
                try:
                    write(chunk, file)
                except RuntimeError as error:  # torch.save's own words for an error below it
                    raise file.error or error from None
                length = file.tell() - offset
                records.append(Record(chunk, chunk.dtype(folder), path.name, offset, length))
            return records, file.finish()
    finally:
        torch.serialization.set_crc32_options(checked)


def write_metadata(folder: Path, records: Sequence[Record], hf_config: Mapping[str, Any]) -> None:
    """Write the files that make a folder of chunks a checkpoint: .metadata, common.pt and metadata.json.

    Raises OSError where they cannot be written.
    """

    def save(content: Any, path: Path) -> None:
        buffer = BytesIO()  # torch.save to a file makes RuntimeErrors of a disk's errors
        torch.save(content, buffer)
        path.write_bytes(buffer.getbuffer())

    # The norm before a mixture of experts stands alone in Transformer Engine's layer spec and is called so;
    # the local spec calls it by the name that it has in dense models. Two names, one place.
    aliases: dict[str, tuple[str, ...]] = {}
    if family_of(hf_config).is_moe:
        keys = [keys_of(pair) for pair in family_of(hf_config).layer]
        aliases = {names[0]: names for names in keys if names[-1].endswith("pre_mlp_layernorm.weight")}
    entries: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    results = []
    for chunk, dtype, file, offset, length in records:
        storage = _StorageInfo(file, offset, length)
        for key in aliases.get(chunk.key, (chunk.key,)):
            if key not in entries:
                kind = dcp.TensorProperties(dtype)
                entries[key] = dcp.TensorStorageMetadata(kind, torch.Size(chunk.size), [])
            part = dcp.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.extents))
            cast(dcp.TensorStorageMetadata, entries[key]).chunks.append(part)
            results.append(WriteResult(dcp.MetadataIndex(key, part.offsets), length, storage))
    save([None], folder / EXTRA)
    nothing = _StorageInfo(EXTRA, 0, (folder / EXTRA).stat().st_size)
    for key in _extra_states(hf_config):
        entries[key] = dcp.BytesStorageMetadata()
        results.append(WriteResult(dcp.MetadataIndex(key), nothing.length, nothing))
    FileSystemWriter(folder).finish(dcp.Metadata(entries), [results])
    save({}, folder / COMMON)
    (folder / CONFIG).write_text(json.dumps(FORMAT) + "\n", encoding="utf-8")


def _extra_states(hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys of what modules may keep beside their parameters (Transformer Engine: scales of FP8).

    Megatron's loading insists on them; they are empty.
    """
    sizes = Sizes.of(hf_config)
    for pair, layer, expert in whole_model(hf_config):
        lead = (_lead(pair, layer, expert), _lead(pair, sizes.layers, sizes.experts))
        place = "_".join(".".join(map(str, numbers)) for numbers in lead)
        module, kind = keys_of(pair)[0].rsplit(".", 1)
        if kind == "weight" and module.rsplit(".", 1)[-1].startswith("linear_"):
            yield f"{module}._extra_state/shard_{place}"
        if module.endswith("linear_proj"):
            yield f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_{place}"
