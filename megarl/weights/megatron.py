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
    for alias, ours in TE_ALIASES.items():
        if name.endswith("." + ours) and not pair.unfused:
            return name.removesuffix(ours) + alias, name
    return (name,)


def _get_key_layer(sizes: Sizes, layer: int) -> int | None:
    """Return a key's layer; None if keys have all layers."""
    return None if sizes.is_uniform else layer


def _select_leading(pair: Pair, sizes: Sizes, layer: int, expert: int) -> Shape:
    return (layer,) * ("{l}" in pair.megatron and sizes.is_uniform) + (expert,) * pair.per_expert


def _compute_key_shape(pair: Pair, sizes: Sizes, tp: int) -> Shape:
    rows, *rest = sizes.shape(pair.hf[0][1])
    if pair.operation == "vocabulary":
        rows = padded_vocab(rows, tp)
    else:
        rows = sum(sizes.shape(dims)[0] for _, dims in pair.hf)
    return (*_select_leading(pair, sizes, sizes.layers, sizes.experts), rows, *rest)


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
        metadata, kind = read_index(self.path), dcp.TensorStorageMetadata
        self._keys = {key: e for key, e in metadata.state_dict_metadata.items() if isinstance(e, kind)}
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

    def _pairs(self) -> dict[str, tuple[Pair, int | None]]:
        """Return parameter and layer by key. Raises CheckpointError if keys do not fit."""
        sizes, where = Sizes.from_config(self.config), self.path / METADATA
        pairs: dict[str, tuple[Pair, int | None]] = {}
        known = {OUTPUT.megatron, VALUE_HEAD.megatron}  # may be unused
        whole = whole_model(self.config, critic=self.critic)
        wanted = dict.fromkeys((pair, _get_key_layer(sizes, layer)) for pair, layer, _ in whole)
        if is_tied(self.config) and not self.critic and OUTPUT.megatron in self._keys:
            wanted[OUTPUT, None] = None  # for `_check_tied`
        for pair, layer in wanted:
            names = list_keys(pair, layer)
            key = next((name for name in names if name in self._keys), None)
            if key is None and pair is VALUE_HEAD:
                continue
            if key is None and any(".lora." in key for key in self._keys):
                remedy = "the run's folder hf has the model with them"
                raise CheckpointError(f"{self.path}: has LoRA adapters alone, and no model ({remedy})")
            if key is None:
                problem = "is not in the checkpoint (config.json asks for it)"
                raise tensor_error(where, names[0], problem)
            known.update(names)
            pairs[key] = pair, layer
            shape, found = _compute_key_shape(pair, sizes, 1), tuple(self._keys[key].size)
            fits = found == shape
            if pair.operation == "vocabulary":  # padding depends on tp
                fits = len(found) == 2 and found[0] >= shape[0] and found[1:] == shape[1:]
            if not fits:
                raise tensor_error(where, key, f"shape {found}, but config.json asks for {shape}")
        for key in self._keys:
            if key.startswith(MODEL_KEYS) and key not in known:
                raise tensor_error(where, key, f"a {self.config['model_type']} model has no such tensor")
        return pairs

    def _add_pieces(self, key: str, pair: Pair, own: int | None) -> None:
        """Add a key's pieces. own: by `_get_key_layer`."""
        sizes = Sizes.from_config(self.config)
        lead = _select_leading(pair, sizes, sizes.layers, sizes.experts)
        by_place: dict[Shape, list[Box]] = defaultdict(list)
        for chunk in self._keys[key].chunks:
            box = tuple((at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            for place in product(*(range(*ends) for ends in box[: len(lead)])):
                by_place[place].append(box)
        for place in product(*map(range, lead)):
            layer = own if own is not None else place[0] if "{l}" in pair.megatron else 0
            expert = place[-1] if pair.per_expert else 0
            for region in pair_shard(sizes, pair, layer, expert, 1, 0).regions:
                wanted = (*((index, index + 1) for index in place), *region.local_box)
                covered, whole = 0, volume(region.hf_box)
                for box in by_place[place]:
                    common = intersect(box, wanted)
                    if common is not None:
                        index = dcp.MetadataIndex(key, tuple(start for start, _ in box))
                        src = shift(common, box, ((0, 0),) * len(box))
                        dst = shift(common[len(place) :], region.local_box, region.hf_box)
                        self._pieces[region.hf_name].append(_Piece(index, src, dst))
                        covered += volume(dst)
                if covered != whole:
                    problem = f"the chunks hold {covered} of the {whole} numbers of {region.hf_name}"
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
                    stored = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
                    tensor = torch.load(stored, map_location="meta", weights_only=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                problem = f"not a chunk that torch.save wrote ({first_line(error)})"
                raise tensor_error(path, name, problem) from error
            start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
            if start is None or not tensor.is_contiguous():
                raise tensor_error(path, name, f"the chunk at byte {info.offset} is not stored row by row")
            offset = info.offset + start + tensor.storage_offset() * tensor.itemsize
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
        inside = [(region, common) for region in regions if (common := intersect(region.local_box, box))]
        if sum(volume(common) for _, common in inside) < volume(box):
            tensor.zero_()
        for (hf_name, hf_box, local_box), common in inside:
            check_dtype(folder.dtype(hf_name), tensor.dtype, folder.files(hf_name)[0][0], self.hf_name)
            rows = view(tensor, shift(common, box, full_box(extents)))  # contiguous for whole rows
            folder.read(hf_name, shift(common, local_box, hf_box), rows)
        return tensor


Records = list[tuple[Chunk, _StorageInfo]]


def list_chunks(
    hf_config: Mapping[str, Any], layout: Layout, rank: int, *, critic: bool = False
) -> Iterator[Chunk]:
    """Yield a rank's chunks. Only the first stage has tied embeddings."""
    sizes, place, ep_rank = Sizes.from_config(hf_config), layout.coords(rank), layout.ep_rank(rank)
    for _, pair, layer, expert in parameters(hf_config, layout, place.pp, ep_rank, critic=critic):
        if pair is TIED_OUTPUT:
            continue
        tp, tp_rank = (1, 0) if pair.per_expert else (layout.tp, place.tp)
        key = list_keys(pair, _get_key_layer(sizes, layer))[0]
        size, lead = _compute_key_shape(pair, sizes, tp), _select_leading(pair, sizes, layer, expert)
        shard = pair_shard(sizes, pair, layer, expert, tp, tp_rank)
        parts, first = [(shard.shape, shard.regions, pair.hf[0][0].format(l=layer, e=expert))], 0
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
                offsets[axis] = first + tp_rank * shape[axis]
            yield Chunk(key, size, (*lead, *offsets), shape, regions, hf_name)
            first += tp * shape[0]


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
    """Write a file of chunks by blocks. Return their places and its SHA-256."""
    checked = torch.serialization.get_crc32_options()
    # CRC would dominate the time; SHA-256 is stronger.
    torch.serialization.set_crc32_options(False)
    records: Records = []
    try:
        with HashedFile(path) as file:
            for chunk in chunks:
                kind, nbytes = chunk.dtype(folder), chunk.nbytes(folder)
                offset, file.writing = file.tell(), chunk.hf_name
                if nbytes <= SMALL:  # _StreamedTensorFile needs chunks larger than other records
                    target: Any = file
                    tensor = chunk.read(folder, full_box(chunk.shape)).view(chunk.extents)
                    advance(nbytes)
                else:
                    boxes = blocks(chunk.shape, kind.itemsize)
                    data = (as_bytes(chunk.read(folder, box)) for box in boxes)
                    target = _StreamedTensorFile(file, nbytes, data, advance)
                    tensor = torch.empty(chunk.extents, dtype=kind)
                try:
                    torch.save(tensor, target)
                except RuntimeError as error:
                    raise file.error or error from None
                assert target is file or target.filled, "torch.save did not write a tensor as one record"
                records.append((chunk, _StorageInfo(path.name, offset, file.tell() - offset)))
            return records, file.finish()
    finally:
        torch.serialization.set_crc32_options(checked)


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
        mixtures = dict.fromkeys(_get_key_layer(sizes, layer) for layer in range(sizes.dense, sizes.layers))
        keys = [list_keys(pair, layer) for pair in get_family(model.config).layer for layer in mixtures]
        aliases = {names[0]: names for names in keys if names[-1].endswith("pre_mlp_layernorm.weight")}
    entries: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    results = []
    for chunk, storage in records:
        for key in aliases.get(chunk.key, (chunk.key,)):
            if key not in entries:
                kind = dcp.TensorProperties(chunk.dtype(model))
                entries[key] = dcp.TensorStorageMetadata(kind, torch.Size(chunk.size), [])
            part = dcp.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.extents))
            cast(dcp.TensorStorageMetadata, entries[key]).chunks.append(part)
            results.append(WriteResult(dcp.MetadataIndex(key, part.offsets), storage.length, storage))
    save([None], folder / EXTRA)
    nothing = _StorageInfo(EXTRA, 0, (folder / EXTRA).stat().st_size)
    for key in _list_extra_states(model.config):
        entries[key] = dcp.BytesStorageMetadata()
        results.append(WriteResult(dcp.MetadataIndex(key), nothing.length, nothing))
    FileSystemWriter(folder).finish(dcp.Metadata(entries), [results])
    save({}, folder / COMMON)
    (folder / CONFIG).write_text(json.dumps(FORMAT) + "\n", encoding="utf-8")


def _list_extra_states(hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys of extra states (FP8 scales), which Megatron requires."""
    sizes = Sizes.from_config(hf_config)
    for pair, layer, expert in whole_model(hf_config):
        lead = [_select_leading(pair, sizes, *at) for at in ((layer, expert), (sizes.layers, sizes.experts))]
        place = "_".join(".".join(map(str, numbers)) for numbers in lead if numbers) or "0_1"
        module, kind = list_keys(pair, _get_key_layer(sizes, layer))[0].rsplit(".", 1)
        last = module.rsplit(".", 1)[-1]
        if kind == "weight" and (last.startswith("linear_") or last in ("in_proj", "out_proj")):
            yield f"{module}._extra_state/shard_{place}"
        if module.endswith("linear_proj"):
            yield f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_{place}"


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
    began, processes = time.perf_counter(), Processes()
    model = processes.run(lambda: HFFolder(source, critic=critic))
    files: dict[str, list[Chunk]] = {}  # a file for every process
    planned: set[tuple[str, Shape]] = set()
    for rank in range(layout.world):
        chunks = []
        for chunk in list_chunks(model.config, layout, rank, critic=critic):
            if (chunk.key, chunk.offsets) not in planned:
                planned.add((chunk.key, chunk.offsets))
                chunks.append(chunk)
        step = max(1, -(-len(chunks) // -(-processes.world // layout.world)))
        for part, first in enumerate(range(0, len(chunks), step)):
            files[f"__{rank}_{part}.distcp"] = chunks[first : first + step]
    sizes = {name: sum(chunk.nbytes(model) for chunk in chunks) for name, chunks in files.items()}

    mine = list(files)[processes.rank :: processes.world]

    def finish() -> None:
        write_metadata(folder, [record for records, _ in written.values() for record in records], model)
        _finish(folder, source, {name: digest for name, (_, digest) in written.items()})

    with new_folder(out, sum(sizes.values()), processes) as folder:
        with watch("writing", sum(sizes[name] for name in mine)) as advance:
            own = processes.run(
                lambda: {name: write_chunks(folder / name, files[name], model, advance) for name in mine}
            )
        gathered = processes.gather(own, dict[str, tuple[Records, str]])
        written = {name: done for part in gathered for name, done in part.items()}
        processes.first(finish)
        if verify:
            kinds = {name: model.dtype(name) for name in model.shapes if name not in model.missing}
            _verify(model, kinds, lambda: MegatronFolder(folder, critic=critic), folder, watch, processes)
    # megatron_to_hf writes a zero SCORE_BIAS again.
    left_out = tuple(name for name in model.extra if name != SCORE_BIAS)
    return Conversion(sum(sizes.values()), len(files), time.perf_counter() - began, left_out)


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
    kinds = {name: model.dtype(name) if dtype is None else dtype for name in model.shapes}
    found = {kind for name, kind in kinds.items() if name not in float32_names}
    kinds |= {name: model.dtype(name) for name in float32_names}
    config = export_config(model.config, model.critic, found.pop() if len(found) == 1 else None)
    architectures = model.config.get("architectures", [""])
    if model.critic and architectures[0].endswith("Classification"):
        config = {**model.config, **{key: config[key] for key in ("dtype", "torch_dtype") if key in config}}
    carried = source or checkpoint
    return write_hf(model, out, kinds, config, carried, max_shard_bytes, verify, watch)


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
    began, processes = time.perf_counter(), Processes()
    shapes, kinds, critic = dict(model.shapes), dict(kinds), "score.weight" in model.shapes
    if critic and config["architectures"][0].endswith("ForTokenClassification"):
        shapes[SCORE_BIAS], kinds[SCORE_BIAS] = (1,), kinds["score.weight"]
    sizes = {name: prod(shape) * kinds[name].itemsize for name, shape in shapes.items()}
    files = divide_into_files(sizes, max_shard_bytes)
    mine = list(files)[processes.rank :: processes.world]

    def write(path: Path, advance: Advance) -> str:
        """Write blocks: the safetensors library would need whole tensors."""
        # Wide elements first, for alignment.
        names = sorted(files[path.name], key=lambda name: -kinds[name].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            start, end = end, end + sizes[name]
            kind = SAFETENSORS[kinds[name]]
            header[name] = {"dtype": kind, "shape": shapes[name], "data_offsets": [start, end]}
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

    def finish() -> None:
        write_index(folder, files, sum(sizes.values()))
        _finish(folder, carried, digests, None if config == model.config else config)

    with new_folder(out, sum(sizes.values()), processes) as folder:
        with watch("writing", sum(sizes[name] for file in mine for name in files[file])) as advance:
            own = processes.run(lambda: {file: write(folder / file, advance) for file in mine})
        gathered = processes.gather(own, dict[str, str])
        digests = {file: digest for part in gathered for file, digest in part.items()}
        processes.first(finish)
        if verify:
            kinds.pop(SCORE_BIAS, None)  # opening checks that it is zero
            _verify(model, kinds, lambda: HFFolder(folder, critic=critic), folder, watch, processes)
    return Conversion(sum(sizes.values()), len(files), time.perf_counter() - began, ())


def _finish(
    folder: Path, source: Path, digests: Mapping[str, str], config: Mapping[str, Any] | None = None
) -> None:
    """Add other files and checksums. config: replaces the source's config.json."""
    carry_along(source, folder, config)
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    others = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in found.items()
        if name not in digests
    }
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
    """Compare the folder with its checksums and the source."""
    mine = list(kinds)[processes.rank :: processes.world]

    def compare() -> None:
        for number, line in enumerate((folder / SUMS).read_text(encoding="utf-8").splitlines()):
            digest, name = line.split("  ")
            with (folder / name).open("rb") as file:
                # The page cache would hide disk faults.
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
        processes.run(compare)
