"""Read and write Hugging Face folders by slices: no rank needs the whole model."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megarl.config.errors import CheckpointError
from megarl.config.files import open_regular, read_json
from megarl.weights.boxes import Box, full_box, pack, view
from megarl.weights.families import EMBEDDING, OUTPUT, Shape, get_family, is_tied, read_config
from megarl.weights.shards import Shards, hf_shapes
from megarl.weights.tensor_files import FileTensor, as_bytes, blocks, tensor_error, write_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HARMLESS = re.compile(r".*rotary_emb\.inv_freq|lm_head\.weight|score\.(weight|bias)")
LAYER = re.compile(r"model\.layers\.(\d+)\.")
STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
SCORE_BIAS = "score.bias"  # of transformers' token classifier; always zero here
EMBEDDING_NAME, OUTPUT_NAME = EMBEDDING.hf[0][0], OUTPUT.hf[0][0]


class ModelFolder(ABC):
    """Hugging Face tensors in a model's files, checked on opening."""

    path: Path
    config: dict[str, Any]
    shapes: dict[str, Shape]
    missing: tuple[str, ...]  # tensors that may be absent (a critic's `score.weight`)

    @abstractmethod
    def read(self, name: str, box: Box) -> Tensor:
        """Return `tensor[box]` on the CPU, in the file's dtype, and read only these bytes.

        Raises CheckpointError if the file no longer has them."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype."""

    @abstractmethod
    def files(self, name: str) -> list[tuple[Path, Box]]:
        """Return a tensor's files, each with its box."""

    def read_as(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Convert `tensor[box]` to `dtype`. Raises CheckpointError beyond its range."""
        block = self.read(name, box)
        converted = block.to(dtype)
        if dtype == torch.float16 and bool((block.isfinite() & ~converted.isfinite()).any()):
            problem = "has numbers beyond the range of float16 (choose bf16 or fp32)"
            raise tensor_error(self.files(name)[0][0], name, problem)
        return converted

    def _check_tied(self) -> None:
        """Raise CheckpointError if a tied output layer differs from the embedding.

        transformers would silently ignore it."""
        shape, dtype = self.shapes[EMBEDDING_NAME], self.dtype(EMBEDDING_NAME)
        if dtype != self.dtype(OUTPUT_NAME) or any(
            as_bytes(self.read(OUTPUT_NAME, box)) != as_bytes(self.read(EMBEDDING_NAME, box))
            for box in blocks(shape, dtype.itemsize)
        ):
            problem = (
                f"differs from {EMBEDDING_NAME}, and {self.path}/config.json says tie_word_embeddings: true "
                "(set it to false to use this tensor, or take the tensor out of the files)"
            )
            raise tensor_error(self.files(OUTPUT_NAME)[0][0], OUTPUT_NAME, problem)


class _Entry(NamedTuple):
    path: Path
    offset: int
    shape: Shape
    dtype: str


class HFFolder(ModelFolder):
    """A Hugging Face folder whose safetensors headers agree with its config.json.

    Raises CheckpointError for a tensor that is missing, superfluous, truncated, or of another shape or dtype.

    extra: ignored tensors (unused head, rotary tables, multi-token prediction)"""

    def __init__(self, path: Path, *, critic: bool = False) -> None:
        self.path = Path(path)
        self.config = read_config(self.path)
        self.shapes = hf_shapes(self.config, critic=critic)
        self._entries = _unstack(self._open())
        self._check(critic)
        self.missing = tuple(name for name in self.shapes if name not in self._entries)
        self.extra = tuple(name for name in self._entries if name not in self.shapes)

    def read(self, name: str, box: Box, out: Tensor | None = None) -> Tensor:
        entry = self._entries[name]
        return FileTensor(entry.path, entry.offset, entry.shape, DTYPES[entry.dtype]).read(box, name, out)

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._entries[name].dtype]

    def files(self, name: str) -> list[tuple[Path, Box]]:
        entry = self._entries[name]
        return [(entry.path, full_box(entry.shape))]

    def _open(self) -> dict[str, _Entry]:
        index = self.path / INDEX
        if not index.exists():
            if not (self.path / SINGLE).exists():
                problem = f"neither {SINGLE} nor {INDEX} is there (only safetensors folders are read)"
                raise CheckpointError(f"{self.path}: {problem}")
            return _read_header(self.path / SINGLE)
        weight_map: Any = read_json(index).get("weight_map", {})
        file_names = weight_map.values() if isinstance(weight_map, dict) else ()
        if not file_names or not all(isinstance(file, str) for file in file_names):
            raise CheckpointError(f"{index}: weight_map is missing or empty, or does not name files")
        for file in file_names:
            if Path(file).is_absolute() or ".." in Path(file).parts or "\0" in file:
                raise CheckpointError(f"{index}: names {file!r}, which lies outside the folder")
        headers = {file: _read_header(self.path / file) for file in sorted(set(file_names))}
        for name, file in weight_map.items():
            if name not in headers[file]:
                raise tensor_error(index, name, f"is in {file} by the index, but that file does not have it")
        listed_names = {*weight_map, *self.shapes}
        unlisted_entries = {
            name: entry
            for header in headers.values()
            for name, entry in header.items()
            if name not in listed_names
        }
        return unlisted_entries | {name: headers[file][name] for name, file in weight_map.items()}

    def _check(self, critic: bool) -> None:
        shapes = dict(self.shapes)
        stores_tied_output = is_tied(self.config) and not critic and OUTPUT_NAME in self._entries
        if stores_tied_output:
            shapes[OUTPUT_NAME] = shapes[EMBEDDING_NAME]
        for name, shape in shapes.items():
            entry = self._entries.get(name)
            if entry is None:
                if critic and name == "score.weight":
                    continue
                problem = "no file has this tensor (config.json asks for it)"
                if name == OUTPUT_NAME:
                    remedy = "set tie_word_embeddings to true there, if the embedding is the output layer too"
                    problem = f"no file has this tensor, and config.json does not tie it ({remedy})"
                raise tensor_error(self.path, name, problem)
            if entry.shape != shape:
                raise tensor_error(entry.path, name, f"shape {entry.shape}, but config.json asks for {shape}")
            if entry.dtype not in DTYPES:
                problem = f"dtype {entry.dtype} is not supported (only {', '.join(DTYPES)})"
                raise tensor_error(entry.path, name, problem)
        for name, entry in self._entries.items():
            if name not in self.shapes and not (HARMLESS.fullmatch(name) or self._is_extra_layer(name)):
                problem = f"a {self.config['model_type']} model has no such tensor"
                raise tensor_error(entry.path, name, problem)
        if stores_tied_output:
            self._check_tied()
        if critic and SCORE_BIAS in self._entries and self.read(SCORE_BIAS, ((0, 1),)).count_nonzero():
            problem = "is not zero, but the value head has no bias that could take it"
            raise tensor_error(self._entries[SCORE_BIAS].path, SCORE_BIAS, problem)

    def _is_extra_layer(self, name: str) -> bool:
        """Return whether a layer is for multi-token prediction, which is ignored."""
        if name.startswith("mtp.") and get_family(self.config).is_linear:
            return True
        layers, layer_match = int(self.config["num_hidden_layers"]), LAYER.match(name)
        extra_layers = self.config.get("num_nextn_predict_layers") or 0
        return layer_match is not None and layers <= int(layer_match[1]) < layers + extra_layers


def _unstack(entries: Mapping[str, _Entry]) -> dict[str, _Entry]:
    """Split tensors [experts, rows, columns] into experts, gate and up.

    Qwen3.5, and transformers 5 without `save_original_format`, stack mixtures."""
    unstacked: dict[str, _Entry] = {}
    for name, entry in entries.items():
        stack_match = STACKED.fullmatch(name)
        parts = (
            ("gate_proj", "up_proj") if stack_match and stack_match[2] == "gate_up_proj" else ("down_proj",)
        )
        if stack_match is None or len(entry.shape) != 3 or entry.shape[1] % len(parts):
            unstacked[name] = entry
            continue
        experts, rows, columns = entry.shape[0], entry.shape[1] // len(parts), entry.shape[2]
        size = rows * columns * DTYPES.get(entry.dtype, torch.float32).itemsize
        for slice_index, (expert, part) in enumerate(product(range(experts), parts)):
            offset = entry.offset + slice_index * size
            part_entry = entry._replace(offset=offset, shape=(rows, columns))
            unstacked[f"{stack_match[1]}.{expert}.{part}.weight"] = part_entry
    return unstacked


def _read_header(path: Path) -> dict[str, _Entry]:
    """Read a header that safetensors accepts."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file (an index names it)")
    try:
        file = open_regular(path)  # safetensors would call an unreadable file missing
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    with file:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or not a safetensors file ({error})") from error
        # Header length, JSON header, data at data_offsets.
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    return {
        name: _Entry(path, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


@torch.no_grad()
def load_into(tensors: Mapping[str, Tensor], shards: Shards, folder: ModelFolder) -> list[str]:
    """Fill a rank's tensors (by the table's names), with zeros for padding.

    Returns the names of unchanged tensors, which the folder lacks (a critic's `value_head.weight`). Raises
    ValueError if tensors and shards differ, and CheckpointError for numbers that are not finite."""
    if tensors.keys() != shards.keys():
        raise ValueError(f"tensors and layout differ in {sorted(tensors.keys() ^ shards.keys())}")
    missing = []
    for name, shard in shards.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shard.shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, the layout says {shard.shape}")
        if any(region.hf_name in folder.missing for region in shard.regions):
            missing.append(name)
            continue
        for region in shard.regions:
            values = folder.read(region.hf_name, region.hf_box)
            if not _is_finite(values):
                files = folder.files(region.hf_name)
                damaged_files = (
                    path for path, box in files if not _is_finite(folder.read(region.hf_name, box))
                )
                remedy = "the file is damaged, or what wrote it had diverged: take another"
                problem = f"holds numbers that are NaN or infinite ({remedy})"
                raise tensor_error(next(damaged_files, files[0][0]), region.hf_name, problem)
            view(tensor, region.local_box).copy_(values)
        for box in shard.padding:
            view(tensor, box).zero_()
    return missing


def _is_finite(values: Tensor) -> bool:
    # One pass, no extra memory. NaN is minimum and maximum.
    return values.numel() == 0 or all(bool(extreme.isfinite()) for extreme in values.aminmax())


def divide_into_files(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Return tensor names by file. sizes: bytes by tensor; limit: of a file."""
    parts = pack(sizes, limit)
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{n:05d}-of-{len(parts):05d}.safetensors": part for n, part in enumerate(parts, start=1)}


def write_index(folder: Path, files: Mapping[str, Iterable[str]], size: int) -> None:
    """Write the index of several files. size: bytes of all tensors."""
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def export_config(config: Mapping[str, Any], critic: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return config.json with the exported head and dtype (None: mixed)."""
    suffix = "ForTokenClassification" if critic else "ForCausalLM"
    exported = {**config, "architectures": [get_family(config).prefix + suffix]}
    if config.get("num_nextn_predict_layers"):
        exported["num_nextn_predict_layers"] = 0  # their weights are ignored
    if dtype is not None:
        exported["dtype" if "dtype" in config else "torch_dtype"] = dtype_name(dtype)
    if critic:
        exported |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "classifier_dropout": 0.0}
    return exported


def dtype_name(dtype: torch.dtype) -> str:
    """Return a name such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
