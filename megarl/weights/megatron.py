"""Read Megatron's distributed checkpoints (torch_dist) as Hugging Face tensors, and convert them.

A key is a parameter of all layers and experts, or of one layer if layers differ. A chunk is a rank's part
of it in one layer. Only chunks depend on the layout, so every layout can read every checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from math import gcd, prod
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from megarl.config.errors import CheckpointError, first_line
from megarl.config.files import fsync
from megarl.parallel.layout import Layout, padded_vocab
from megarl.weights.boxes import Box, full_box, intersect, shift, view, volume
from megarl.weights.families import (
    OUTPUT,
    TE_ALIASES,
    TIED_OUTPUT,
    VALUE_HEAD,
    Pair,
    Shape,
    Sizes,
    get_family,
    is_tied,
    read_config,
)
from megarl.weights.hf import (
    DTYPES,
    OUTPUT_NAME,
    SCORE_BIAS,
    HFFolder,
    ModelFolder,
    divide_into_files,
    dtype_name,
    export_config,
    write_index,
)
from megarl.weights.index import COMMON, CONFIG, FORMAT, METADATA, read_index
from megarl.weights.shards import Region, float32_tensors, hf_shapes, pair_shard, parameters, whole_model
from megarl.weights.tensor_files import (
    SMALL,
    FileTensor,
    HashedFile,
    Processes,
    as_bytes,
    blocks,
    carry_along,
    new_folder,
    tensor_error,
)

EXTRA = "extra_state.distcp"
MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "value_head.")


def list_keys(pair: Pair, layer: int | None = None) -> tuple[str, ...]:
    """Return a parameter's possible keys, the usual first. layer: by `_get_key_layer`.

    Layer specs have two names for norms that Transformer Engine may fuse."""
    name = pair.megatron.replace("{l}.", "" if layer is None else f"{layer}.")
    name = name.replace("local_experts.{e}", "experts")
    for alias, table_suffix in TE_ALIASES.items():
        if name.endswith("." + table_suffix) and not pair.unfused:
            return name.removesuffix(table_suffix) + alias, name
    return (name,)


def _get_key_layer(sizes: Sizes, layer: int) -> int | None:
    """Return a key's layer; None if keys have all layers."""
    return None if sizes.is_uniform else layer


def _select_leading(pair: Pair, sizes: Sizes, layer: int, expert: int) -> Shape:
    return (layer,) * ("{l}" in pair.megatron and sizes.is_uniform) + (expert,) * pair.per_expert


def _compute_key_shape(pair: Pair, sizes: Sizes, tp: int) -> Shape:
    rows, *trailing_dims = sizes.shape(pair.hf[0][1])
    if pair.operation == "vocabulary":
        rows = padded_vocab(rows, tp)
    else:
        rows = sum(sizes.shape(dims)[0] for _, dims in pair.hf)
    return (*_select_leading(pair, sizes, sizes.layers, sizes.experts), rows, *trailing_dims)


# Reading


def open_model(path: Path, *, critic: bool = False) -> ModelFolder:
    """Open a Hugging Face folder, or a checkpoint with config.json."""
    is_checkpoint = (path / METADATA).is_file()
    return MegatronFolder(path, critic=critic) if is_checkpoint else HFFolder(path, critic=critic)


class _Piece(NamedTuple):
    chunk: dcp.MetadataIndex
    src: Box  # with leading dimensions (layer, expert)
    dst: Box


class MegatronFolder(ModelFolder):
    def __init__(self, path: Path, *, source: Path | None = None, critic: bool | None = None) -> None:
        """Check that chunks cover every tensor. Raises CheckpointError.

        source: folder with config.json. Default: the checkpoint
        critic: with a value head. Default: if the checkpoint has one"""
        self.path = Path(path)
        self.config = read_config(source or self.path)
        if not (self.path / METADATA).is_file():
            expected = "the folder of a Megatron distributed checkpoint in torch_dist format is expected"
            raise CheckpointError(f"{self.path}: no {METADATA} ({expected})")
        metadata, tensor_type = read_index(self.path), dcp.TensorStorageMetadata
        self._keys = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, tensor_type)
        }
        self._storage: dict[dcp.MetadataIndex, _StorageInfo] = metadata.storage_data or {}
        self._chunks: dict[dcp.MetadataIndex, FileTensor] = {}
        self.critic = VALUE_HEAD.megatron in self._keys if critic is None else critic
        self.shapes = hf_shapes(self.config, critic=self.critic)
        self._pieces: dict[str, list[_Piece]] = defaultdict(list)
        for key, (pair, layer) in self._pairs().items():
            self._add_pieces(key, pair, layer)
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
        for chunk_index, src, dst in self._pieces[name]:
            overlap = intersect(dst, box)
            if overlap is None:
                continue
            chunk = self._chunk(chunk_index, name)
            check_dtype(chunk.dtype, dtype, chunk.path, name)
            num_leading = len(src) - len(dst)
            chunk_box = (*src[:num_leading], *shift(overlap, dst, src[num_leading:]))
            out_view = view(out, shift(overlap, box, full_box(tuple(out.shape))))
            if out_view.is_contiguous():
                chunk.read(chunk_box, name, out_view)
            else:
                out_view.copy_(chunk.read(chunk_box, name).view(out_view.shape))
        return out

    def _pairs(self) -> dict[str, tuple[Pair, int | None]]:
        """Return parameter and layer by key. Raises CheckpointError if keys do not fit."""
        sizes, pairs = Sizes.from_config(self.config), dict[str, tuple[Pair, int | None]]()
        known_keys = {OUTPUT.megatron, VALUE_HEAD.megatron}  # may be unused
        for pair, layer in self._list_pairs(sizes):
            possible_keys = list_keys(pair, layer)
            key = next((name for name in possible_keys if name in self._keys), None)
            if key is None and pair is VALUE_HEAD:
                continue
            if key is None:
                raise self._missing_key(possible_keys[0])
            known_keys.update(possible_keys)
            pairs[key] = pair, layer
            self._check_shape(key, pair, sizes)
        for key in self._keys:
            if key.startswith(MODEL_KEYS) and key not in known_keys:
                problem = f"a {self.config['model_type']} model has no such tensor"
                raise tensor_error(self.path / METADATA, key, problem)
        return pairs

    def _list_pairs(self, sizes: Sizes) -> list[tuple[Pair, int | None]]:
        """Return the model's parameters, each with its layer if layers have separate keys."""
        parameters = whole_model(self.config, critic=self.critic)
        pairs = dict.fromkeys((pair, _get_key_layer(sizes, layer)) for pair, layer, _ in parameters)
        if is_tied(self.config) and not self.critic and OUTPUT.megatron in self._keys:
            pairs[OUTPUT, None] = None  # for `_check_tied`
        return [*pairs]

    def _missing_key(self, key: str) -> CheckpointError:
        if any(".lora." in name for name in self._keys):
            remedy = "the run's folder hf has the model with them"
            return CheckpointError(f"{self.path}: has LoRA adapters alone, and no model ({remedy})")
        problem = "is not in the checkpoint (config.json asks for it)"
        return tensor_error(self.path / METADATA, key, problem)

    def _check_shape(self, key: str, pair: Pair, sizes: Sizes) -> None:
        shape, stored_shape = _compute_key_shape(pair, sizes, 1), tuple(self._keys[key].size)
        is_valid = stored_shape == shape
        if pair.operation == "vocabulary":  # padding depends on tp
            is_valid = stored_shape[:1] >= shape[:1] and stored_shape[1:] == shape[1:]
        if not is_valid:
            problem = f"shape {stored_shape}, but config.json asks for {shape}"
            raise tensor_error(self.path / METADATA, key, problem)

    def _add_pieces(self, key: str, pair: Pair, key_layer: int | None) -> None:
        """Add a key's pieces. key_layer: by `_get_key_layer`."""
        sizes = Sizes.from_config(self.config)
        leading_shape = _select_leading(pair, sizes, sizes.layers, sizes.experts)
        boxes_by_position: dict[Shape, list[Box]] = defaultdict(list)
        for chunk in self._keys[key].chunks:
            starts_and_sizes = zip(chunk.offsets, chunk.sizes, strict=True)
            box = tuple((start, start + size) for start, size in starts_and_sizes)
            for position in product(*(range(*bounds) for bounds in box[: len(leading_shape)])):
                boxes_by_position[position].append(box)
        for position in product(*map(range, leading_shape)):
            layer = key_layer if key_layer is not None else position[0] if "{l}" in pair.megatron else 0
            expert = position[-1] if pair.per_expert else 0
            for region in pair_shard(sizes, pair, layer, expert, 1, 0).regions:
                region_box = (*((index, index + 1) for index in position), *region.local_box)
                covered_size, region_size = 0, volume(region.hf_box)
                for box in boxes_by_position[position]:
                    overlap = intersect(box, region_box)
                    if overlap is not None:
                        index = dcp.MetadataIndex(key, tuple(start for start, _ in box))
                        src = shift(overlap, box, ((0, 0),) * len(box))
                        dst = shift(overlap[len(position) :], region.local_box, region.hf_box)
                        self._pieces[region.hf_name].append(_Piece(index, src, dst))
                        covered_size += volume(dst)
                if covered_size != region_size:
                    share = f"{covered_size} of the {region_size} numbers"
                    problem = f"the chunks hold {share} of {region.hf_name}"
                    raise tensor_error(self.path / METADATA, key, problem)

    def _check_files(self) -> None:
        """Raise CheckpointError if a file is missing or truncated."""
        sizes: dict[Path, int] = {}
        for name, pieces in self._pieces.items():
            for index, _, _ in pieces:
                if index not in self._storage:
                    raise tensor_error(self.path / METADATA, name, "the index does not say where it lies")
                path, info = self._place(index)
                if path not in sizes:
                    sizes[path] = path.stat().st_size if path.is_file() else 0
                if sizes[path] < info.offset + info.length:
                    problem = "truncated" if sizes[path] else "no such file (the index names it)"
                    raise tensor_error(path, name, problem)

    def _place(self, index: dcp.MetadataIndex) -> tuple[Path, _StorageInfo]:
        info = self._storage[index]
        return self.path / info.relative_path, info

    def _chunk(self, index: dcp.MetadataIndex, name: str) -> FileTensor:
        if index not in self._chunks:
            path, info = self._place(index)
            try:
                with path.open("rb") as file:
                    chunk_file = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
                    tensor = torch.load(chunk_file, map_location="meta", weights_only=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                problem = f"not a chunk that torch.save wrote ({first_line(error)})"
                raise tensor_error(path, name, problem) from error
            storage_start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
            if storage_start is None or not tensor.is_contiguous():
                raise tensor_error(path, name, f"the chunk at byte {info.offset} is not stored row by row")
            offset = info.offset + storage_start + tensor.storage_offset() * tensor.itemsize
            if offset + tensor.nbytes > info.offset + info.length:
                raise tensor_error(path, name, f"the chunk at byte {info.offset} ends before the tensor does")
            self._chunks[index] = FileTensor(path, offset, tuple(tensor.shape), tensor.dtype)
        return self._chunks[index]


def check_dtype(dtype: torch.dtype, first: torch.dtype, path: Path, name: str) -> None:
    """Raise CheckpointError if two parts of a tensor differ in dtype."""
    if dtype != first:
        raise tensor_error(path, name, f"one part is {dtype_name(dtype)}, another is {dtype_name(first)}")


# Writing


class Chunk(NamedTuple):
    """Part of a key's tensor, at `offsets`, of extents (1, ..., *shape)."""

    key: str
    size: Shape
    offsets: Shape
    shape: Shape
    regions: tuple[Region, ...]  # local boxes: within `shape`
    hf_name: str  # determines the dtype

    @property
    def extents(self) -> Shape:
        return (1,) * (len(self.size) - len(self.shape)) + self.shape

    def dtype(self, folder: HFFolder) -> torch.dtype:
        return torch.float32 if self.hf_name in folder.missing else folder.dtype(self.hf_name)

    def nbytes(self, folder: HFFolder) -> int:
        return prod(self.shape) * self.dtype(folder).itemsize

    def read(self, folder: HFFolder, box: Box) -> Tensor:
        """Read a box. Padding and missing value heads are zero."""
        extents = tuple(stop - start for start, stop in box)
        tensor = torch.empty(extents, dtype=self.dtype(folder))
        regions = [] if self.hf_name in folder.missing else self.regions
        region_overlaps = [
            (region, overlap) for region in regions if (overlap := intersect(region.local_box, box))
        ]
        if sum(volume(overlap) for _, overlap in region_overlaps) < volume(box):
            tensor.zero_()
        for (hf_name, hf_box, local_box), overlap in region_overlaps:
            check_dtype(folder.dtype(hf_name), tensor.dtype, folder.files(hf_name)[0][0], self.hf_name)
            rows = view(tensor, shift(overlap, box, full_box(extents)))  # contiguous for whole rows
            folder.read(hf_name, shift(overlap, local_box, hf_box), rows)
        return tensor


Records = list[tuple[Chunk, _StorageInfo]]


def list_chunks(
    hf_config: Mapping[str, Any], layout: Layout, rank: int, *, critic: bool = False
) -> Iterator[Chunk]:
    """Yield a rank's chunks. Only the first stage has tied embeddings."""
    sizes, coords, ep_rank = Sizes.from_config(hf_config), layout.coords(rank), layout.ep_rank(rank)
    for _, pair, layer, expert in parameters(hf_config, layout, coords.pp, ep_rank, critic=critic):
        if pair is TIED_OUTPUT:
            continue
        tp, tp_rank = (1, 0) if pair.per_expert else (layout.tp, coords.tp)
        key = list_keys(pair, _get_key_layer(sizes, layer))[0]
        size, leading_index = _compute_key_shape(pair, sizes, tp), _select_leading(pair, sizes, layer, expert)
        shard = pair_shard(sizes, pair, layer, expert, tp, tp_rank)
        parts, first_row = [(shard.shape, shard.regions, pair.hf[0][0].format(l=layer, e=expert))], 0
        if pair.operation in ("column", "halves"):
            # Megatron stores all ranks' gates, then all up projections.
            parts = []
            for region in shard.regions:
                shape = tuple(stop - start for start, stop in region.local_box)
                parts.append((shape, (region._replace(local_box=full_box(shape)),), region.hf_name))
        for shape, regions, hf_name in parts:
            offsets = [0] * len(shape)
            if pair.operation != "replicated":
                axis = 1 if pair.operation == "row" else 0
                offsets[axis] = first_row + tp_rank * shape[axis]
            yield Chunk(key, size, (*leading_index, *offsets), shape, regions, hf_name)
            first_row += tp * shape[0]


class _StreamedTensorFile:
    """A file that makes torch.save write `data`, not its tensor, to save memory."""

    def __init__(
        self, file: HashedFile, nbytes: int, data: Iterator[memoryview], advance: Callable[[int], None]
    ) -> None:
        self.file, self.nbytes, self.data, self.advance = file, nbytes, data, advance
        self.filled = False
        self.flush = file.flush

    def write(self, record: bytes | memoryview) -> int:
        if len(record) != self.nbytes:
            return self.file.write(record)
        assert not self.filled
        self.filled = True
        try:
            for block in self.data:
                self.advance(self.file.write(block))
        except CheckpointError as error:
            self.file.error = error
            raise
        return len(record)


def write_chunks(
    path: Path, chunks: Sequence[Chunk], folder: HFFolder, advance: Callable[[int], None]
) -> tuple[Records, str]:
    """Write a file of chunks by blocks. Return the chunks' storage and the file's SHA-256."""
    crc_enabled = torch.serialization.get_crc32_options()
    # CRC would dominate the time; SHA-256 is stronger.
    torch.serialization.set_crc32_options(False)
    records: Records = []
    try:
        with HashedFile(path) as file:
            for chunk in chunks:
                dtype, nbytes = chunk.dtype(folder), chunk.nbytes(folder)
                offset, file.writing = file.tell(), chunk.hf_name
                if nbytes <= SMALL:  # _StreamedTensorFile needs chunks larger than other records
                    target: Any = file
                    tensor = chunk.read(folder, full_box(chunk.shape)).view(chunk.extents)
                    advance(nbytes)
                else:
                    boxes = blocks(chunk.shape, dtype.itemsize)
                    data = (as_bytes(chunk.read(folder, box)) for box in boxes)
                    target = _StreamedTensorFile(file, nbytes, data, advance)
                    tensor = torch.empty(chunk.extents, dtype=dtype)
                try:
                    torch.save(tensor, target)
                except RuntimeError as error:  # torch.save hides the file's error
                    raise file.error or error from None
                assert target is file or target.filled, "torch.save did not write a tensor as one record"
                records.append((chunk, _StorageInfo(path.name, offset, file.tell() - offset)))
            return records, file.finish()
    finally:
        torch.serialization.set_crc32_options(crc_enabled)


def write_metadata(folder: Path, records: Records, model: HFFolder) -> None:
    """Write .metadata, common.pt, metadata.json and empty states."""

    def save(content: Any, path: Path) -> None:
        buffer = BytesIO()  # torch.save turns a file's OSError into a RuntimeError
        torch.save(content, buffer)
        path.write_bytes(buffer.getbuffer())

    # Index both names of the norm before a mixture.
    aliases: dict[str, tuple[str, ...]] = {}
    sizes = Sizes.from_config(model.config)
    if sizes.experts:
        layers = dict.fromkeys(_get_key_layer(sizes, layer) for layer in range(sizes.dense, sizes.layers))
        keys = [list_keys(pair, layer) for pair in get_family(model.config).layer for layer in layers]
        aliases = {names[0]: names for names in keys if names[-1].endswith("pre_mlp_layernorm.weight")}
    entries: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    results = []
    for chunk, storage in records:
        for key in aliases.get(chunk.key, (chunk.key,)):
            if key not in entries:
                properties = dcp.TensorProperties(chunk.dtype(model))
                entries[key] = dcp.TensorStorageMetadata(properties, torch.Size(chunk.size), [])
            chunk_metadata = dcp.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.extents))
            cast(dcp.TensorStorageMetadata, entries[key]).chunks.append(chunk_metadata)
            index = dcp.MetadataIndex(key, chunk_metadata.offsets)
            results.append(WriteResult(index, storage.length, storage))
    save([None], folder / EXTRA)
    empty_state = _StorageInfo(EXTRA, 0, (folder / EXTRA).stat().st_size)
    for key in _list_extra_states(model.config):
        entries[key] = dcp.BytesStorageMetadata()
        results.append(WriteResult(dcp.MetadataIndex(key), empty_state.length, empty_state))
    FileSystemWriter(folder).finish(dcp.Metadata(entries), [results])
    save({}, folder / COMMON)
    (folder / CONFIG).write_text(json.dumps(FORMAT) + "\n", encoding="utf-8")


def _list_extra_states(hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys of extra states (FP8 scales), which Megatron requires."""
    sizes = Sizes.from_config(hf_config)
    for pair, layer, expert in whole_model(hf_config):
        leading_dims = [
            _select_leading(pair, sizes, *indices)
            for indices in ((layer, expert), (sizes.layers, sizes.experts))
        ]
        shard_name = "_".join(".".join(map(str, numbers)) for numbers in leading_dims if numbers) or "0_1"
        module, suffix = list_keys(pair, _get_key_layer(sizes, layer))[0].rsplit(".", 1)
        module_name = module.rsplit(".", 1)[-1]
        if suffix == "weight" and (
            module_name.startswith("linear_") or module_name in ("in_proj", "out_proj")
        ):
            yield f"{module}._extra_state/shard_{shard_name}"
        if module.endswith("linear_proj"):
            yield f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_{shard_name}"


# Converting

Advance = Callable[[int], None]
# (activity, this process's bytes) -> context that shows progress
Watch = Callable[[str, int], AbstractContextManager[Advance]]
SUMS = "SHA256SUMS"
SAFETENSORS = {dtype: name for name, dtype in DTYPES.items()}


@contextmanager
def ignore_progress(_what: str, _size: int) -> Iterator[Advance]:
    yield lambda _: None


@dataclass(frozen=True)
class Conversion:
    size: int
    files: int
    seconds: float  # until on disk
    left_out: tuple[str, ...]  # see HFFolder.extra


def conversion_layout(tp: int, pp: int, ep: int) -> Layout:
    return Layout(tp=tp, pp=pp, dp=ep // gcd(tp, ep), ep=ep)


def hf_to_megatron(
    source: Path,
    out: Path,
    layout: Layout,
    *,
    critic: bool = False,
    verify: bool = False,
    watch: Watch = ignore_progress,
) -> Conversion:
    """Convert a Hugging Face folder to a distributed checkpoint, in the chunks of `layout`.

    All processes of the default group call this. `out` appears when complete and on disk. Raises
    CheckpointError if the source is damaged, or `out` exists or cannot be written.

    critic: replace the output layer by a one-label classifier's value head, or zeros
    verify: compare with the source"""
    start_time, processes = time.perf_counter(), Processes()
    model = processes.run(lambda: HFFolder(source, critic=critic))
    files: dict[str, list[Chunk]] = {}  # a file for every process
    planned_chunks: set[tuple[str, Shape]] = set()
    for rank in range(layout.world):
        chunks = []
        for chunk in list_chunks(model.config, layout, rank, critic=critic):
            if (chunk.key, chunk.offsets) not in planned_chunks:
                planned_chunks.add((chunk.key, chunk.offsets))
                chunks.append(chunk)
        chunks_per_file = max(1, -(-len(chunks) // -(-processes.world // layout.world)))
        for part, first_chunk in enumerate(range(0, len(chunks), chunks_per_file)):
            files[f"__{rank}_{part}.distcp"] = chunks[first_chunk : first_chunk + chunks_per_file]
    sizes = {name: sum(chunk.nbytes(model) for chunk in chunks) for name, chunks in files.items()}

    local_files = list(files)[processes.rank :: processes.world]

    def finish() -> None:
        write_metadata(
            folder, [record for records, _ in results_by_file.values() for record in records], model
        )
        _finish(folder, source, {name: digest for name, (_, digest) in results_by_file.items()})

    with new_folder(out, sum(sizes.values()), processes) as folder:
        with watch("writing", sum(sizes[name] for name in local_files)) as advance:
            local_results = processes.run(
                lambda: {
                    name: write_chunks(folder / name, files[name], model, advance) for name in local_files
                }
            )
        results_by_rank = processes.gather(local_results, dict[str, tuple[Records, str]])
        results_by_file = {name: result for part in results_by_rank for name, result in part.items()}
        processes.first(finish)
        if verify:
            dtypes = {name: model.dtype(name) for name in model.shapes if name not in model.missing}
            _verify(model, dtypes, lambda: MegatronFolder(folder, critic=critic), folder, watch, processes)
    # megatron_to_hf writes a zero SCORE_BIAS again.
    left_out = tuple(name for name in model.extra if name != SCORE_BIAS)
    return Conversion(sum(sizes.values()), len(files), time.perf_counter() - start_time, left_out)


def megatron_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    source: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 << 30,
    verify: bool = False,
    watch: Watch = ignore_progress,
) -> Conversion:
    """Convert a distributed checkpoint to a Hugging Face folder, see `hf_to_megatron`.

    source: folder with config.json and tokenizer, which a run's checkpoint lacks
    dtype: of all tensors except router biases. Default: unchanged"""
    processes = Processes()
    model = processes.run(lambda: MegatronFolder(checkpoint, source=source))
    float32_names = float32_tensors(model.config)
    dtypes = {name: model.dtype(name) if dtype is None else dtype for name in model.shapes}
    distinct_dtypes = {tensor_dtype for name, tensor_dtype in dtypes.items() if name not in float32_names}
    dtypes |= {name: model.dtype(name) for name in float32_names}
    common_dtype = distinct_dtypes.pop() if len(distinct_dtypes) == 1 else None
    config = export_config(model.config, model.critic, common_dtype)
    architectures = model.config.get("architectures", [""])
    if model.critic and architectures[0].endswith("Classification"):
        config = {**model.config, **{key: config[key] for key in ("dtype", "torch_dtype") if key in config}}
    carried_folder = source or checkpoint
    return write_hf(model, out, dtypes, config, carried_folder, max_shard_bytes, verify, watch)


def write_hf(
    model: ModelFolder,
    out: Path,
    kinds: Mapping[str, torch.dtype],
    config: Mapping[str, Any],
    carried: Path,
    max_shard_bytes: int,
    verify: bool,
    watch: Watch,
) -> Conversion:
    """Write a Hugging Face folder, like `megatron_to_hf`. kinds: dtypes."""
    start_time, processes = time.perf_counter(), Processes()
    shapes, kinds, critic = dict(model.shapes), dict(kinds), "score.weight" in model.shapes
    if critic and config["architectures"][0].endswith("ForTokenClassification"):
        shapes[SCORE_BIAS], kinds[SCORE_BIAS] = (1,), kinds["score.weight"]
    sizes = {name: prod(shape) * kinds[name].itemsize for name, shape in shapes.items()}
    files = divide_into_files(sizes, max_shard_bytes)
    local_files = list(files)[processes.rank :: processes.world]

    def write(path: Path, advance: Advance) -> str:
        """Write blocks: the safetensors library would need whole tensors."""
        # Wide elements first, for alignment.
        names = sorted(files[path.name], key=lambda name: -kinds[name].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            start, end = end, end + sizes[name]
            safetensors_dtype = SAFETENSORS[kinds[name]]
            header[name] = {"dtype": safetensors_dtype, "shape": shapes[name], "data_offsets": [start, end]}
        header_bytes = json.dumps(header, separators=(",", ":")).encode()
        header_bytes += b" " * (-len(header_bytes) % 8)
        with HashedFile(path) as file:
            file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
            for name in names:
                file.writing = name
                for box in blocks(shapes[name], kinds[name].itemsize):
                    if name in model.shapes:
                        block = model.read_as(name, box, kinds[name])
                    else:
                        block = torch.zeros(shapes[name], dtype=kinds[name])
                    advance(file.write(as_bytes(block)))
            return file.finish()

    def finish() -> None:
        write_index(folder, files, sum(sizes.values()))
        _finish(folder, carried, digests, None if config == model.config else config)

    with new_folder(out, sum(sizes.values()), processes) as folder:
        with watch("writing", sum(sizes[name] for file in local_files for name in files[file])) as advance:
            local_digests = processes.run(
                lambda: {file: write(folder / file, advance) for file in local_files}
            )
        digests_by_rank = processes.gather(local_digests, dict[str, str])
        digests = {file: digest for rank_digests in digests_by_rank for file, digest in rank_digests.items()}
        processes.first(finish)
        if verify:
            kinds.pop(SCORE_BIAS, None)  # opening checks that it is zero
            _verify(model, kinds, lambda: HFFolder(folder, critic=critic), folder, watch, processes)
    return Conversion(sum(sizes.values()), len(files), time.perf_counter() - start_time, ())


def _finish(
    folder: Path, source: Path, digests: Mapping[str, str], config: Mapping[str, Any] | None = None
) -> None:
    """Add other files and checksums. config: replaces the source's config.json."""
    carry_along(source, folder, config)
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    other_digests = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in paths.items()
        if name not in digests
    }
    lines = [f"{digest}  {name}\n" for name, digest in sorted({**digests, **other_digests}.items())]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    for name in (*other_digests, SUMS):
        fsync(folder / name)


def _verify(
    source: ModelFolder,
    kinds: Mapping[str, torch.dtype],
    reopen: Callable[[], ModelFolder],
    folder: Path,
    watch: Watch,
    processes: Processes,
) -> None:
    local_names = list(kinds)[processes.rank :: processes.world]

    def compare() -> None:
        for line_index, line in enumerate((folder / SUMS).read_text(encoding="utf-8").splitlines()):
            digest, name = line.split("  ")
            with (folder / name).open("rb") as file:
                # The page cache would hide disk faults.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if line_index % processes.world != processes.rank:
                    continue
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    problem = "is not what was written there (a fault of disk or memory?)"
                    raise CheckpointError(f"{name}: {problem}")
        copy = reopen()
        for name in local_names:
            has_dtype = copy.dtype(name) == kinds[name]
            for box in blocks(source.shapes[name], kinds[name].itemsize):
                expected = source.read_as(name, box, kinds[name])
                if not has_dtype or as_bytes(copy.read(name, box)) != as_bytes(expected):
                    path = copy.files(name)[0][0]
                    raise CheckpointError(f"{path.name}: {name}: is not what the source has")
                advance(expected.nbytes)

    size = sum(prod(source.shapes[name]) * kinds[name].itemsize for name in local_names)
    with watch("comparing", size) as advance:
        processes.run(compare)
