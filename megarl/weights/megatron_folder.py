"""Reading a Megatron distributed checkpoint of a model as the Hugging Face tensors that are in it, whatever layout wrote it."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import IO, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megarl.config.errors import CheckpointError
from megarl.config.files import check_index
from megarl.weights.families import EMBEDDING, OUTPUT, VALUE_HEAD, Pair, Shape, Sizes, is_tied
from megarl.weights.hf_io import HFFolder, ModelFolder, read_config
from megarl.weights.layout import Box, Region, hf_shapes, pair_shard, whole_model
from megarl.weights.megatron_io import METADATA, keys_of, lead_of, whole_shape
from megarl.weights.plan import intersect, volume
from megarl.weights.stored import Made, Piece, Stored, made

MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "value_head.")  # other keys of a checkpoint are of optimizers and schedules
HEADS = (OUTPUT.megatron, VALUE_HEAD.megatron)


def open_model(path: Path, *, critic: bool = False) -> ModelFolder:
    """A folder that training can start from: Hugging Face's, or a distributed checkpoint with config.json beside it. CheckpointError,
    naming file and tensor, for anything else."""
    return MegatronFolder(path, critic=critic) if is_checkpoint(path) else HFFolder(path, critic=critic)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a distributed checkpoint."""
    return (path / METADATA).is_file()


class MegatronFolder(ModelFolder):
    """A distributed checkpoint of a model.

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
        self._check_files()
        if OUTPUT.hf[0][0] in self._parts and OUTPUT.hf[0][0] not in self.shapes:
            self._check_tied()

    def tensor(self, name: str) -> Made:
        """Where a Hugging Face tensor of the model lies. CheckpointError if a chunk of it is not where the index says."""
        pieces = []
        for index, src, dst in self._parts[name]:
            lead = len(src) - len(dst)
            pieces.append(Piece(_within(self._chunk(index, name), [start for start, _ in src[:lead]]), src[lead:], dst))
        return made(name, self.shapes.get(name, self.shapes[EMBEDDING.hf[0][0]]), pieces)

    def _find(self) -> dict[str, list[tuple[MetadataIndex, Box, Box]]]:
        """Hugging Face name -> (chunk, box in it, box in the tensor)."""
        parts: dict[str, list[tuple[MetadataIndex, Box, Box]]] = defaultdict(list)
        sizes = Sizes.of(self.config)
        known: set[str] = {*HEADS}  # those of another use of the body do no harm
        by_lead: dict[str, dict[Shape, list[ChunkStorageMetadata]]] = {}
        places = whole_model(self.config, critic=self.critic)
        if is_tied(self.config) and not self.critic and OUTPUT.megatron in self._tensors:
            places.append((OUTPUT, 0, 0))  # only to be compared with the embedding
        for pair, layer, expert in places:
            key = next((key for key in keys_of(pair) if key in self._tensors), None)
            if key is None and pair is VALUE_HEAD:
                continue
            if key is None:
                raise CheckpointError(f"{self.path / METADATA}: {keys_of(pair)[0]}: is not in the checkpoint (config.json asks for it)")
            known.update(keys_of(pair))
            lead = tuple(index for index, _ in lead_of(pair, layer, expert, sizes))
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
        lead = (size for _, size in lead_of(pair, 0, 0, sizes))
        wanted, found = (*lead, *whole_shape(pair, sizes, 1)), tuple(self._tensors[key].size)
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

    def _check_files(self) -> None:
        """CheckpointError, naming file and tensor, unless every file is as long as the index says."""
        sizes: dict[Path, int] = {}
        for name, parts in self._parts.items():
            for index, _, _ in parts:
                info = self._storage.get(index)
                if info is None:
                    raise CheckpointError(f"{self.path / METADATA}: {name}: the index does not say where it lies")
                path = self.path / info.relative_path
                if path not in sizes:
                    sizes[path] = path.stat().st_size if path.is_file() else 0
                if sizes[path] < info.offset + info.length:
                    raise CheckpointError(f"{path}: {name}: {'truncated' if sizes[path] else 'no such file (the index names it)'}")

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
                raise CheckpointError(f"{path}: {name}: not a chunk that torch.save wrote ({_first_line(error)})") from error
            start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
            if start is None or not tensor.is_contiguous():
                raise CheckpointError(f"{path}: {name}: the chunk at byte {info.offset} is not stored row by row")
            at = info.offset + start + tensor.storage_offset() * tensor.itemsize
            if at + tensor.nbytes > info.offset + info.length:
                raise CheckpointError(f"{path}: {name}: the chunk at byte {info.offset} ends before the tensor does")
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
    check_index(path / METADATA)
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # unpickling a damaged file raises whatever its bytes happen to call
        raise CheckpointError(f"{path / METADATA}: not a readable index ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
