"""Megatron's distributed checkpoints of a model (torch_dist): which chunk of which key holds which box of which Hugging Face tensor.

A key is a parameter over all layers, and over all experts; a chunk is what one rank has of it in one layer. The keys and shapes depend
on the model alone, so any layout reads what any other one wrote; the layout decides how the chunks are cut.
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from megarl.config.errors import CheckpointError
from megarl.parallel.layout import Layout, padded_vocab
from megarl.weights.families import TE_ALIASES, TIED_OUTPUT, VALUE_HEAD, Pair, Shape, Sizes, family_of
from megarl.weights.hf_io import HFFolder, check_body, read_config
from megarl.weights.layout import Box, Region, Shard, full_box, hf_shapes, pair_shard, parameters
from megarl.weights.plan import intersect, volume
from megarl.weights.stored import HashedFile, Made, Piece, Stored, as_bytes, made

METADATA, COMMON, CONFIG, EXTRA = ".metadata", "common.pt", "metadata.json", "extra_state.distcp"
# What dist_checkpointing asks of a folder before it loads: which format, and the state that is not sharded (here: none).
FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
SMALL = 64 << 10  # bytes of a chunk that torch.save may as well write itself
MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "value_head.")  # other keys of a checkpoint are of optimizers and schedules


class Chunk(NamedTuple):
    """Part of the tensor `key`, whose whole size is `size`: at `offsets`, of extents (1, ..., *shape), made of `regions` (whose local
    boxes are within `shape`). `hf_name` is a tensor that gives the dtype."""

    key: str
    size: Shape
    offsets: Shape
    shape: Shape
    regions: tuple[Region, ...]
    hf_name: str

    @property
    def extents(self) -> Shape:
        return (1,) * (len(self.size) - len(self.shape)) + self.shape


class Record(NamedTuple):
    """A chunk that was written: its place in the checkpoint, its dtype, and `length` bytes at `at` of `file`."""

    key: str
    size: Shape
    offsets: Shape
    extents: Shape
    dtype: torch.dtype
    file: str
    at: int
    length: int


def keys_of(pair: Pair) -> tuple[str, ...]:
    """The checkpoint's names of a parameter, the usual one first. Megatron-core's layer specs have two names for a norm that
    Transformer Engine would fuse into the linear after it."""
    name = pair.megatron.replace("{l}.", "").replace("local_experts.{e}", "experts")
    for alias, ours in TE_ALIASES.items():
        if name.endswith("." + ours):
            return name.removesuffix(ours) + alias, name
    return (name,)


def rank_chunks(hf_config: Mapping[str, Any], layout: Layout, rank: int, *, critic: bool = False) -> Iterator[Chunk]:
    """The chunks of one rank. Replicated parameters are in those of all their ranks, tied embeddings in the first stage's only."""
    sizes, place, ep_rank = Sizes.of(hf_config), layout.coords(rank), layout.ep_rank(rank)
    for _, pair, layer, expert in parameters(hf_config, layout, pp_rank=place.pp, ep_rank=ep_rank, critic=critic):
        if pair is TIED_OUTPUT:
            continue
        tp, tp_rank = (1, 0) if pair.per_expert else (layout.tp, place.tp)
        lead = ((layer, sizes.layers),) * ("{l}" in pair.megatron) + ((expert, sizes.experts),) * pair.per_expert
        shard = pair_shard(pair, layer, expert, sizes, tp, tp_rank)
        whole = _whole(pair, sizes, tp)
        for offsets, shape, regions in _cut(pair, shard, sizes, tp_rank):
            yield Chunk(
                keys_of(pair)[0],
                (*(size for _, size in lead), *whole),
                (*(index for index, _ in lead), *offsets),
                shape,
                regions,
                pair.hf[0][0].format(l=layer, e=expert),
            )


def _whole(pair: Pair, sizes: Sizes, tp: int) -> Shape:
    """Shape of a parameter over all tensor-parallel ranks."""
    rows, *rest = sizes.shape(pair.hf[0][1])
    if pair.operation == "vocabulary":
        return (padded_vocab(rows, tp), *rest)
    return (sum(sizes.shape(dims)[0] for _, dims in pair.hf), *rest)


def _cut(pair: Pair, shard: Shard, sizes: Sizes, tp_rank: int) -> Iterator[tuple[Shape, Shape, tuple[Region, ...]]]:
    """(offsets in the whole parameter, shape, regions) of the chunks of a rank's shard."""
    zeros = (0,) * (len(shard.shape) - 1)
    match pair.operation:
        case "column":  # Megatron keeps the ranks' gates together, and then their ups
            first = 0
            for region, (_, dims) in zip(shard.regions, pair.hf, strict=True):
                (start, stop), *rest = region.local_box
                shape = (stop - start, *shard.shape[1:])
                yield (first + tp_rank * shape[0], *zeros), shape, (region._replace(local_box=((0, shape[0]), *rest)),)
                first += sizes.shape(dims)[0]
        case "row":
            yield (*zeros, tp_rank * shard.shape[1]), shard.shape, shard.regions
        case "qkv" | "vocabulary":
            yield (tp_rank * shard.shape[0], *zeros), shard.shape, shard.regions
        case "replicated":
            yield (0, *zeros), shard.shape, shard.regions


def chunk_of(chunk: Chunk, folder: HFFolder) -> Made:
    """How a chunk is made of the folder's tensors; zeros in float32 for a value head that the folder does not have."""
    if chunk.hf_name in folder.missing:
        return Made(chunk.key, chunk.shape, torch.float32, ())
    stored = [(folder.tensor(region.hf_name).pieces[0].stored, region) for region in chunk.regions]
    pieces = tuple(Piece(tensor, region.hf_box, region.local_box) for tensor, region in stored)
    if not pieces:  # a share of the vocabulary that is all padding
        return Made(chunk.key, chunk.shape, folder.tensor(chunk.hf_name).dtype, ())
    return made(stored[0][1].hf_name, chunk.shape, pieces)


class _Framed:
    """What torch.save writes to: passes everything on to a file but the numbers, for which it puts those of `source`, block by block.

    So the format is torch's own, and no chunk is ever in memory: the tensor that torch.save is given has memory that nobody touches."""

    def __init__(self, file: HashedFile, source: Made, advance: Callable[[int], None]) -> None:
        self.file, self.source, self.advance = file, source, advance
        self.filled = 0

    def write(self, data: bytes | memoryview) -> int:
        # Nothing else that torch.save writes is of this size: the other records are of some hundred bytes, this one is larger.
        if len(data) != self.source.nbytes:
            return self.file.write(data)
        self.filled += 1
        for box in self.source.blocks():
            block = self.source.read(box)
            self.file.write_kept(as_bytes(block))
            self.advance(block.nbytes)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


def write_chunks(path: Path, chunks: Sequence[Chunk], folder: HFFolder, advance: Callable[[int], None]) -> tuple[list[Record], str]:
    """Writes one file of chunks, block by block; gives where they are, and the file's SHA-256. OSError where it cannot."""
    checked = torch.serialization.get_crc32_options()
    # The zip's own checksum takes longer than everything else together, and nobody looks at it; the file has a better one.
    torch.serialization.set_crc32_options(False)
    try:
        with HashedFile(path) as file:
            try:
                records = [_write_chunk(file, path.name, chunk, folder, advance) for chunk in chunks]
            except RuntimeError as error:  # torch.save's own words for an OSError below it
                raise file.error or error from None
            return records, file.close()
    finally:
        torch.serialization.set_crc32_options(checked)


def _write_chunk(file: HashedFile, name: str, chunk: Chunk, folder: HFFolder, advance: Callable[[int], None]) -> Record:
    source = chunk_of(chunk, folder)
    at = file.tell()
    if source.nbytes < SMALL:
        torch.save(source.read(full_box(chunk.shape)).view(chunk.extents), cast(IO[bytes], file))
        advance(source.nbytes)
    else:
        framed = _Framed(file, source, advance)
        torch.save(torch.empty(chunk.extents, dtype=source.dtype), cast(IO[bytes], framed))
        assert framed.filled == 1, "torch.save did not write a tensor as one record"
    return Record(chunk.key, chunk.size, chunk.offsets, chunk.extents, source.dtype, name, at, file.tell() - at)


def write_index(folder: Path, records: Sequence[Record], hf_config: Mapping[str, Any]) -> None:
    """The files that make a folder of chunks a checkpoint: .metadata, common.pt and metadata.json."""
    tensors: dict[str, TensorStorageMetadata] = {}
    results = []
    aliases = {keys_of(pair)[0]: keys_of(pair) for pair in family_of(hf_config).layer if _has_two_names(pair, hf_config)}
    for record in records:
        storage = _StorageInfo(record.file, record.at, record.length)
        for key in aliases.get(record.key, (record.key,)):  # two names, one place
            if key not in tensors:
                tensors[key] = TensorStorageMetadata(TensorProperties(record.dtype), torch.Size(record.size), [])
            tensors[key].chunks.append(ChunkStorageMetadata(torch.Size(record.offsets), torch.Size(record.extents)))
            results.append(WriteResult(MetadataIndex(key, torch.Size(record.offsets)), record.length, storage))
    extra = [MetadataIndex(key) for key in _extra_states(hf_config)]
    torch.save([None], folder / EXTRA)
    nothing = _StorageInfo(EXTRA, 0, (folder / EXTRA).stat().st_size)
    results += [WriteResult(index, nothing.length, nothing) for index in extra]
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {**tensors, **{index.fqn: BytesStorageMetadata() for index in extra}}
    FileSystemWriter(folder).finish(Metadata(entries), [results])
    torch.save({}, folder / COMMON)
    (folder / CONFIG).write_text(json.dumps(FORMAT) + "\n", encoding="utf-8")


def _extra_states(hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Keys of what modules may keep beside their parameters (Transformer Engine: scales of FP8). Megatron's loading insists on them."""
    sizes = Sizes.of(hf_config)
    for _, pair, layer, expert in parameters(hf_config, Layout(), pp_rank=0):
        lead = ((layer, sizes.layers),) * ("{l}" in pair.megatron) + ((expert, sizes.experts),) * pair.per_expert
        place = "_".join(".".join(map(str, numbers)) for numbers in zip(*lead, strict=True))
        module, kind = keys_of(pair)[0].rsplit(".", 1)
        if kind == "weight" and module.rsplit(".", 1)[-1].startswith("linear_"):
            yield f"{module}._extra_state/shard_{place}"
        if module.endswith("linear_proj"):
            yield f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_{place}"


def _has_two_names(pair: Pair, hf_config: Mapping[str, Any]) -> bool:
    """The norm before a mixture of experts stands alone in Transformer Engine's layer spec and is called so; the local spec calls it
    by the name that it has in dense models."""
    return family_of(hf_config).is_moe and pair.megatron.endswith("pre_mlp_layernorm.weight")


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a distributed checkpoint."""
    return (path / METADATA).is_file()


class MegatronFolder:
    """A distributed checkpoint of a model, seen as the Hugging Face tensors that are in it; used as an HFFolder is.

    source: the folder with config.json and tokenizer, by default the checkpoint's own (the converters put them there).
    critic: whether a value head is wanted; by default whether there is one. Opening reads the index and checks that the chunks cover
    every tensor of the model; whatever does not fit is a CheckpointError naming file and tensor. As Megatron's own loading, it
    unpickles the index: open only what you trust.
    """

    def __init__(self, path: Path, *, source: Path | None = None, critic: bool | None = None) -> None:
        self.path = Path(path)
        self.config = read_config(source or self.path)
        metadata = _read_metadata(self.path)
        self._tensors = {key: entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
        self._storage = metadata.storage_data
        self._stored: dict[MetadataIndex, Stored] = {}
        self.critic = VALUE_HEAD.megatron in self._tensors if critic is None else critic
        self.shapes = hf_shapes(self.config, critic=self.critic)
        self._parts = self._find()
        self.missing = tuple(name for name in self.shapes if name not in self._parts)
        self.extra: tuple[str, ...] = ()

    def check_body(self, hf_config: Mapping[str, Any]) -> None:
        """As HFFolder's."""
        check_body(self.path, self.config, hf_config)

    def tensor(self, name: str) -> Made:
        """Where a Hugging Face tensor of the model lies. CheckpointError if a chunk of it is not where the index says."""
        pieces = []
        for index, src, dst in self._parts[name]:
            lead = len(src) - len(dst)
            pieces.append(Piece(_within(self._chunk(index, name), [start for start, _ in src[:lead]]), src[lead:], dst))
        return made(name, self.shapes[name], pieces)

    def read(self, name: str, box: Box) -> Tensor:
        """`tensor[box]` on the CPU, in the checkpoint's dtype; only these bytes are read."""
        return self.tensor(name).read(box)

    def _find(self) -> dict[str, list[tuple[MetadataIndex, Box, Box]]]:
        """Hugging Face name -> (chunk, box in it, box in the tensor)."""
        parts: dict[str, list[tuple[MetadataIndex, Box, Box]]] = defaultdict(list)
        sizes = Sizes.of(self.config)
        known: set[str] = set()
        by_lead: dict[str, dict[Shape, list[ChunkStorageMetadata]]] = {}
        for _, pair, layer, expert in parameters(self.config, Layout(), pp_rank=0, critic=self.critic):
            key = next((key for key in keys_of(pair) if key in self._tensors), None)
            if key is None and pair is VALUE_HEAD:
                continue
            if key is None:
                raise CheckpointError(f"{self.path / METADATA}: {keys_of(pair)[0]}: is not in the checkpoint (config.json asks for it)")
            known.update(keys_of(pair))
            lead = (layer,) * ("{l}" in pair.megatron) + (expert,) * pair.per_expert
            if key not in by_lead:
                self._check_size(key, pair, sizes)
                by_lead[key] = _by_lead(self._tensors[key].chunks, len(lead))
            for region in pair_shard(pair, layer, expert, sizes, 1, 0).regions:
                self._cover(key, lead, region, by_lead[key].get(lead, []), parts[region.hf_name])
        for key in self._tensors:
            if key.startswith(MODEL_KEYS) and key not in known:
                raise CheckpointError(f"{self.path / METADATA}: {key}: a {self.config['model_type']} model has no such tensor")
        return parts

    def _check_size(self, key: str, pair: Pair, sizes: Sizes) -> None:
        lead = (sizes.layers,) * ("{l}" in pair.megatron) + (sizes.experts,) * pair.per_expert
        wanted, found = (*lead, *_whole(pair, sizes, 1)), tuple(self._tensors[key].size)
        # Any tensor-parallel size pads the vocabulary in its own way.
        fits = len(found) == 2 and found[0] >= wanted[0] and found[1:] == wanted[1:] if pair.operation == "vocabulary" else found == wanted
        if not fits:
            raise CheckpointError(f"{self.path / METADATA}: {key}: shape {found}, but config.json asks for {wanted}")

    def _cover(
        self, key: str, lead: Shape, region: Region, chunks: list[ChunkStorageMetadata], parts: list[tuple[MetadataIndex, Box, Box]]
    ) -> None:
        """Adds the parts of the chunks that lie in a region of the whole parameter. CheckpointError unless they are all of it."""
        wanted = (*((index, index + 1) for index in lead), *region.local_box)
        covered = 0
        for chunk in chunks:
            box = tuple((at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            common = intersect(box, wanted)
            if common is not None:
                src = tuple((a - at, b - at) for (a, b), at in zip(common, chunk.offsets, strict=True))
                corner = zip(common[len(lead) :], region.local_box, region.hf_box, strict=True)
                dst = tuple((a - o + h, b - o + h) for (a, b), (o, _), (h, _) in corner)
                parts.append((MetadataIndex(key, chunk.offsets), src, dst))
                covered += volume(dst)
        whole = volume(region.hf_box)
        if covered != whole:
            raise CheckpointError(f"{self.path / METADATA}: {key}: the chunks hold {covered} of the {whole} numbers of {region.hf_name}")

    def _chunk(self, index: MetadataIndex, name: str) -> Stored:
        """Where a chunk's numbers begin within the file: behind the header that torch.save wrote."""
        if index not in self._stored:
            info = self._storage[index]
            path = self.path / info.relative_path
            try:
                with path.open("rb") as file:
                    view = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
                    tensor = torch.load(view, map_location="meta", weights_only=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise CheckpointError(f"{path}: {name}: missing, truncated or not a chunk ({_first_line(error)})") from error
            start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
            if start is None or not tensor.is_contiguous():
                raise CheckpointError(f"{path}: {name}: the chunk at byte {info.offset} is not stored row by row")
            at = info.offset + start + tensor.storage_offset() * tensor.itemsize
            if at + tensor.nbytes > path.stat().st_size:
                raise CheckpointError(f"{path}: {name}: the file ends before the tensor does")
            self._stored[index] = Stored(path, at, tuple(tensor.shape), tensor.dtype)
        return self._stored[index]


def _within(chunk: Stored, lead: Sequence[int]) -> Stored:
    """`chunk[lead]`: one layer (and expert) of it."""
    rest = chunk.shape[len(lead) :]
    place = 0
    for index, size in zip(lead, chunk.shape, strict=False):
        place = place * size + index
    return chunk._replace(offset=chunk.offset + place * prod(rest) * chunk.dtype.itemsize, shape=rest)


def _by_lead(chunks: Sequence[ChunkStorageMetadata], dims: int) -> dict[Shape, list[ChunkStorageMetadata]]:
    """The chunks that reach into each layer (and expert)."""
    found: dict[Shape, list[ChunkStorageMetadata]] = defaultdict(list)
    for chunk in chunks:
        reach = zip(chunk.offsets[:dims], chunk.sizes[:dims], strict=True)
        for lead in product(*(range(at, at + size) for at, size in reach)):
            found[lead].append(chunk)
    return found


def _read_metadata(path: Path) -> Metadata:
    if not is_checkpoint(path):
        raise CheckpointError(f"{path}: no {METADATA} (the folder of a Megatron distributed checkpoint in torch_dist format is expected)")
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # unpickling a damaged file raises whatever its bytes happen to call
        raise CheckpointError(f"{path / METADATA}: not a readable index ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
