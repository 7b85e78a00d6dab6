"""Reading a model's folder, above all Hugging Face's: checked from its headers alone, then slice by slice, so that a rank touches only
its own part."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megarl.config.errors import CheckpointError
from megarl.config.files import read_json
from megarl.weights.families import EMBEDDING, OUTPUT, Shape, is_tied
from megarl.weights.families import read_config as read_config
from megarl.weights.layout import Box, Shards, full_box, hf_shapes
from megarl.weights.stored import Made, Piece, Stored, as_bytes, made

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# In a folder, these belong to no parameter of ours and do no harm: old files' rotary tables, and the heads of another use of the body.
HARMLESS = re.compile(r".*rotary_emb\.inv_freq|lm_head\.weight|score\.(weight|bias)")


class ModelFolder(ABC):
    """A model's weights in files, seen as Hugging Face tensors: checked when it is opened, then read slice by slice.

    `config`: config.json. `shapes`: the tensors that the model has. `missing`: those that the folder lacks and may lack (a critic's
    `score.weight`).
    """

    path: Path
    config: dict[str, Any]
    shapes: dict[str, Shape]
    missing: tuple[str, ...]

    @abstractmethod
    def tensor(self, name: str) -> Made:
        """Where a tensor lies. CheckpointError if that is not in the file."""

    def read(self, name: str, box: Box) -> Tensor:
        """`tensor[box]` on the CPU, in the file's dtype; only these bytes are read."""
        return self.tensor(name).read(box)

    def _check_tied(self) -> None:
        """CheckpointError where the folder has an output layer of its own, and config.json ties it to an embedding that is another.

        Compares block by block. transformers ties without a word, and so gives another model than the one that the tensors are of."""
        embedding, output = self.tensor(EMBEDDING.hf[0][0]), self.tensor(OUTPUT.hf[0][0])
        if output.dtype != embedding.dtype or any(as_bytes(output.read(b)) != as_bytes(embedding.read(b)) for b in embedding.blocks()):
            raise CheckpointError(
                f"{output.pieces[0].stored.path}: {output.name}: differs from {embedding.name}, and {self.path}/config.json says "
                "tie_word_embeddings: true (set it to false to use this tensor, or take the tensor out of the files)"
            )


class HFFolder(ModelFolder):
    """A Hugging Face folder (config.json, `*.safetensors`) whose headers agree with its config.

    `extra`: tensors of the folder that the model does not have (a head that is not used, rotary tables). Anything else that is missing,
    superfluous, truncated, or of another shape or dtype is a CheckpointError naming file and tensor.
    """

    def __init__(self, path: Path, *, critic: bool = False) -> None:
        self.path = Path(path)
        self.config = read_config(self.path)
        self.shapes = hf_shapes(self.config, critic=critic)
        self._files = self._open()
        self._offsets: dict[Path, dict[str, int]] = {}
        self._check(critic)
        self.missing = tuple(name for name in self.shapes if name not in self._files)
        self.extra = tuple(name for name in self._files if name not in self.shapes)

    def tensor(self, name: str) -> Made:
        """Where a tensor of the folder lies."""
        path, handle = self._files[name]
        if path not in self._offsets:
            self._offsets[path] = _offsets(path)
        stored = handle.get_slice(name)
        shape = tuple(stored.get_shape())
        in_file = Stored(path, self._offsets[path][name], shape, DTYPES[stored.get_dtype()])
        return made(name, shape, [Piece(in_file, full_box(shape), full_box(shape))])

    def _open(self) -> dict[str, tuple[Path, Any]]:
        """Tensor name -> (file, open handle). Opening reads the header and checks it against the file's length."""
        index = self.path / INDEX
        if not index.exists():
            if not (self.path / SINGLE).exists():
                raise CheckpointError(f"{self.path}: neither {SINGLE} nor {INDEX} is there (only safetensors folders are read)")
            path, handle = _open_file(self.path / SINGLE)
            return dict.fromkeys(handle.keys(), (path, handle))
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index}: weight_map is missing or empty, or does not name files")
        handles = {file: _open_file(self.path / file) for file in sorted(set(weight_map.values()))}
        present = {file: set(handle.keys()) for file, (_, handle) in handles.items()}
        for name, file in weight_map.items():
            if name not in present[file]:
                raise CheckpointError(f"{index}: {name}: is said to be in {file}, which does not have it")
        known = {*weight_map, *self.shapes}
        unlisted = {name: handles[file] for file, names in present.items() for name in names if name not in known}
        return unlisted | {name: handles[file] for name, file in weight_map.items()}

    def _check(self, critic: bool) -> None:
        shapes, output = dict(self.shapes), OUTPUT.hf[0][0]
        tied = is_tied(self.config) and not critic and output in self._files
        if tied:
            shapes[output] = shapes[EMBEDDING.hf[0][0]]
        for name, shape in shapes.items():
            if name not in self._files:
                if critic and name == "score.weight":
                    continue
                raise CheckpointError(f"{self.path}: {name}: no file has this tensor (config.json asks for it)")
            path, handle = self._files[name]
            stored = handle.get_slice(name)
            if tuple(stored.get_shape()) != shape:
                raise CheckpointError(f"{path}: {name}: shape {tuple(stored.get_shape())}, but config.json asks for {shape}")
            if stored.get_dtype() not in DTYPES:
                raise CheckpointError(f"{path}: {name}: dtype {stored.get_dtype()} is not supported (only {', '.join(DTYPES)})")
        for name, (path, _) in self._files.items():
            if name not in self.shapes and not HARMLESS.fullmatch(name):
                raise CheckpointError(f"{path}: {name}: a {self.config['model_type']} model has no such tensor")
        if tied:
            self._check_tied()
        if critic and "score.bias" in self._files and self.read("score.bias", ((0, 1),)).count_nonzero():
            path = self._files["score.bias"][0]
            raise CheckpointError(f"{path}: score.bias: is not zero, but the value head has no bias that could take it")


def _open_file(path: Path) -> tuple[Path, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file (an index names it)")
    try:
        path.open("rb").close()  # safetensors takes a file that may not be read for one that is not there
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        return path, safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or not a safetensors file ({error})") from error


def _offsets(path: Path) -> dict[str, int]:
    """Where each tensor of a safetensors file begins, in bytes. The header, checked at opening, is a length and so many bytes of JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


@torch.no_grad()
def load_into(tensors: Mapping[str, Tensor], shards: Shards, folder: ModelFolder) -> list[str]:
    """Fills one rank's tensors (local names, see `table_names`) with its slices, cast to each tensor's dtype; padding becomes zero.

    Returns the names that the folder has nothing for (a critic's `value_head.weight`), which are left as they are.
    ValueError if tensors and shards do not agree, CheckpointError naming file and tensor for a number that is not finite.
    """
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
                raise _not_finite(folder.tensor(region.hf_name))
            view(tensor, region.local_box).copy_(values)
        for box in shard.padding:
            view(tensor, box).zero_()
    return missing


def _is_finite(values: Tensor) -> bool:
    """In one pass and without memory of its own: NaN is a tensor's smallest and largest number, where there is one."""
    return values.numel() == 0 or all(bool(extreme.isfinite()) for extreme in values.aminmax())


def _not_finite(tensor: Made) -> CheckpointError:
    """Names the file, of those that hold parts of the tensor, that has the number."""
    piece = next((piece for piece in tensor.pieces if not _is_finite(tensor.read(piece.dst))), tensor.pieces[0])
    numbers = "numbers that are NaN or infinite (the file is damaged, or what wrote it had diverged: take another)"
    return CheckpointError(f"{piece.stored.path}: {tensor.name}: holds {numbers}")


def view(tensor: Tensor, box: Box) -> Tensor:
    """`tensor[box]`, sharing its memory."""
    return tensor.detach()[tuple(slice(start, stop) for start, stop in box)]
