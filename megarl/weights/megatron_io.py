"""Writing Megatron's distributed checkpoints of a model (torch_dist): which chunk of which key holds which part of which parameter.

A key is a parameter over all layers, and over all experts; a chunk is what one rank has of it in one layer. The keys and shapes depend
on the model alone, so any layout reads what any other one wrote; the layout decides how the chunks are cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megarl.parallel.layout import Layout, padded_vocab
from megarl.weights.families import TE_ALIASES, TIED_OUTPUT, Pair, Shape, Sizes, family_of
from megarl.weights.hf_io import HFFolder
from megarl.weights.layout import Region, Shard, full_box, pair_shard, parameters, whole_model
from megarl.weights.stored import HashedFile, Made, Piece, made

METADATA, COMMON, CONFIG, EXTRA = ".metadata", "common.pt", "metadata.json", "extra_state.distcp"
# What dist_checkpointing asks of a folder before it loads: which format, and the state that is not sharded (here: none).
FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
SMALL = 64 << 10  # bytes of a chunk that torch.save may as well write itself


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
        lead = lead_of(pair, layer, expert, sizes)
        shard = pair_shard(pair, layer, expert, sizes, tp, tp_rank)
        whole = whole_shape(pair, sizes, tp)
        for offsets, shape, regions in _cut(pair, shard, sizes, tp_rank):
            yield Chunk(
                keys_of(pair)[0],
                (*(size for _, size in lead), *whole),
                (*(index for index, _ in lead), *offsets),
                shape,
                regions,
                pair.hf[0][0].format(l=layer, e=expert),
            )


def lead_of(pair: Pair, layer: int, expert: int, sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """(Index, size) of the dimensions that a checkpoint's tensor has before the parameter's own: of its layer, of its expert."""
    return ((layer, sizes.layers),) * ("{l}" in pair.megatron) + ((expert, sizes.experts),) * pair.per_expert


def whole_shape(pair: Pair, sizes: Sizes, tp: int) -> Shape:
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
        self.file.write_tensor(self.source, self.source.dtype, self.advance)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


def write_chunks(path: Path, chunks: Sequence[Chunk], folder: HFFolder, advance: Callable[[int], None]) -> tuple[list[Record], str]:
    """Writes one file of chunks, block by block; gives where they are, and the file's SHA-256."""
    checked = torch.serialization.get_crc32_options()
    # The zip's own checksum takes longer than everything else together, and nobody looks at it; the file has a better one.
    torch.serialization.set_crc32_options(False)
    try:
        with HashedFile(path) as file:
            try:
                records = [_write_chunk(file, chunk, folder, advance) for chunk in chunks]
            except RuntimeError as error:  # torch.save's own words for an error below it
                raise file.error or error from None
            return records, file.close()
    finally:
        torch.serialization.set_crc32_options(checked)


def _write_chunk(file: HashedFile, chunk: Chunk, folder: HFFolder, advance: Callable[[int], None]) -> Record:
    source = chunk_of(chunk, folder)
    at, file.writing = file.tell(), source.name
    if source.nbytes < SMALL:
        torch.save(source.read(full_box(chunk.shape)).view(chunk.extents), cast(IO[bytes], file))
        file.flush()
        advance(source.nbytes)
    else:
        framed = _Framed(file, source, advance)
        torch.save(torch.empty(chunk.extents, dtype=source.dtype), cast(IO[bytes], framed))
        assert framed.filled == 1, "torch.save did not write a tensor as one record"
    return Record(chunk.key, chunk.size, chunk.offsets, chunk.extents, source.dtype, file.path.name, at, file.tell() - at)


def write_metadata(folder: Path, records: Sequence[Record], hf_config: Mapping[str, Any]) -> None:
    """The files that make a folder of chunks a checkpoint: .metadata, common.pt and metadata.json. OSError where they cannot be written."""
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
    _save([None], folder / EXTRA)
    nothing = _StorageInfo(EXTRA, 0, (folder / EXTRA).stat().st_size)
    results += [WriteResult(index, nothing.length, nothing) for index in extra]
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {**tensors, **{index.fqn: BytesStorageMetadata() for index in extra}}
    FileSystemWriter(folder).finish(Metadata(entries), [results])
    _save({}, folder / COMMON)
    (folder / CONFIG).write_text(json.dumps(FORMAT) + "\n", encoding="utf-8")


def _save(content: Any, path: Path) -> None:
    """As torch.save, which makes RuntimeErrors of a disk's errors."""
    buffer = BytesIO()
    torch.save(content, buffer)
    path.write_bytes(buffer.getbuffer())


def _extra_states(hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Keys of what modules may keep beside their parameters (Transformer Engine: scales of FP8). Megatron's loading insists on them."""
    sizes = Sizes.of(hf_config)
    for pair, layer, expert in whole_model(hf_config):
        lead = lead_of(pair, layer, expert, sizes)
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
