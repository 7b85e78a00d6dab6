"""Read the pickles of a distributed checkpoint without running their code.

Checkpoints are untrusted. torch would unpickle the index (`.metadata`), and entries that it declares objects,
unchecked. Allowlists restrict both here."""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import torch
from torch._utils import _rebuild_tensor_v2
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from megarl.config.errors import CheckpointError, first_line
from megarl.config.files import is_inside, open_regular, read_json

METADATA, COMMON, CONFIG = ".metadata", "common.pt", "metadata.json"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
EXTRA_STATE = "_extra_state"
DTYPE = re.compile(r"Size|b?float\d\w*|u?int\d+|bool|complex\d+")
RECIPE = ("DelayedScaling", "Format", "_FormatHelper")
PARTS = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
IN_AN_INDEX = {
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(("torch.distributed.checkpoint.metadata", name) for name in PARTS),
}


class _Allowlist(pickle.Unpickler):
    """Unpickle allowed classes only, and undo changes to them."""

    def __init__(self, file: IO[bytes], allowed: Collection[tuple[str, str]]) -> None:
        super().__init__(file)
        self._allowed = allowed
        self._classes: dict[type, dict[str, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed and not (module == "torch" and DTYPE.fullmatch(name)):
            raise pickle.UnpicklingError(f"{module}.{name} has no business there")
        obj = super().find_class(module, name)
        if isinstance(obj, type):
            self._classes.setdefault(obj, dict(vars(obj)))
        return obj

    def load(self) -> Any:
        """Unpickle. Raises UnpicklingError if the pickle sets an attribute of a class.

        Setting `PosixPath._str`, say, would change every path."""
        try:
            return super().load()
        finally:
            changes = [_restore(cls, attributes) for cls, attributes in self._classes.items()]
            if any(changes):
                raise pickle.UnpicklingError("it changes a class")


def _restore(found: type, before: dict[str, Any]) -> bool:
    attributes = dict(vars(found))
    changed_names = [
        name for name in {*attributes, *before} if attributes.get(name, found) is not before.get(name, found)
    ]
    for name in changed_names:
        if name in before:
            setattr(found, name, before[name])
        else:
            delattr(found, name)
    return bool(changed_names)


class _Recipe:
    """Placeholder for a history's unused recipe."""

    def __new__(cls, *_arguments: object) -> _Recipe:
        return super().__new__(cls)


class _History(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed: dict[str, Any] = {
            "collections.OrderedDict": OrderedDict,
            "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
            "torch.storage._load_from_bytes": lambda data: torch.load(BytesIO(data), weights_only=True),
            "megatron.core.extensions.transformer_engine.TEDelayedScaling": _Recipe,
            **{f"transformer_engine.common.recipe.{part}": _Recipe for part in RECIPE},
        }
        if f"{module}.{name}" not in allowed:
            raise pickle.UnpicklingError(f"{module}.{name} has no business there")
        return allowed[f"{module}.{name}"]


@contextmanager
def _convert_errors(path: Path, problem: str) -> Iterator[None]:
    """Raise any error as a CheckpointError: damaged pickles raise all kinds."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing") from None
    except Exception as error:  # noqa: BLE001 (the kind depends on the damage)
        raise CheckpointError(f"{path}: {problem} ({first_line(error)})") from None


def read_index(folder: Path) -> Metadata:
    """Read a distributed checkpoint's index.

    Raises CheckpointError if it is damaged, has a forbidden class, or names a file outside the folder."""
    path = folder / METADATA
    with _convert_errors(path, "not a readable index of a checkpoint"):
        with open_regular(path) as file:
            index = _Allowlist(file, IN_AN_INDEX).load()
        if not _is_index(index):
            raise ValueError("its parts have other types")
        for name in {info.relative_path for info in index.storage_data.values()}:
            relative_path = PurePosixPath(name)
            if (
                relative_path.is_absolute()
                or ".." in relative_path.parts
                or not is_inside(folder / name, folder)
            ):
                raise CheckpointError(f"{path}: names {name!r}, which lies outside the folder")
    return cast(Metadata, index)


def _is_index(found: Any) -> bool:
    """Check the types within an index: unpickling checks only classes."""
    return (
        isinstance(found, Metadata)
        and isinstance(found.state_dict_metadata, dict)
        and isinstance(found.storage_data, dict)
        and all(isinstance(key, str) and _is_entry(e) for key, e in found.state_dict_metadata.items())
        and all(
            isinstance(key, MetadataIndex)
            and isinstance(key.fqn, str)
            and isinstance(info, _StorageInfo)
            and isinstance(info.relative_path, str)
            and "\0" not in info.relative_path
            and all(isinstance(size, int) and size >= 0 for size in (info.offset, info.length))
            and not getattr(info, "transform_descriptors", None)
            for key, info in found.storage_data.items()
        )
    )


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, BytesStorageMetadata):
        return True
    return (
        isinstance(entry, TensorStorageMetadata)
        and isinstance(entry.properties, TensorProperties)
        and isinstance(entry.size, torch.Size)
        and isinstance(entry.chunks, list)
        and all(
            isinstance(chunk, ChunkStorageMetadata)
            and isinstance(chunk.offsets, torch.Size)
            and isinstance(chunk.sizes, torch.Size)
            and len(chunk.offsets) == len(chunk.sizes) == len(entry.size)
            for chunk in entry.chunks
        )
    )


def check_trainable(folder: Path) -> Metadata:
    """Check a run's checkpoint before Megatron reads it, and return its index.

    Raises CheckpointError if reading could run code: torch unpickles weights that the index declares
    objects, and metadata.json selects Megatron's reader."""
    index = read_index(folder)
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata) and EXTRA_STATE not in key:
            raise CheckpointError(f"{folder / METADATA}: {key}: is stored as an object, not as a tensor")
    if read_json(folder / CONFIG) != FORMAT:
        raise CheckpointError(f"{folder / CONFIG}: names another format than torch_dist with common.pt")
    with _convert_errors(folder / COMMON, "cannot be read"), open_regular(folder / COMMON) as file:
        torch.load(file, map_location="cpu", weights_only=True)
    return index


def read_history(folder: Path, index: Metadata, key: str) -> dict[str, Any] | None:
    """Read a weight's history of delayed scaling (FP8), or None.

    Raises CheckpointError for anything else."""
    info = (index.storage_data or {}).get(MetadataIndex(key))
    if info is None or not isinstance(index.state_dict_metadata.get(key), BytesStorageMetadata):
        raise CheckpointError(f"{folder / METADATA}: {key}: is not in the checkpoint")
    path = folder / info.relative_path
    with _convert_errors(path, f"{key}: not a history of delayed scaling"), open_regular(path) as file:
        state_file = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
        (state,) = torch.load(state_file, map_location="cpu", weights_only=True)
        if state is None or state.numel() == 0:
            return None
        history = _History(BytesIO(state.numpy().tobytes())).load()
        variables = history["extra_fp8_variables"].items()
        return {
            **{name: value for name, value in history.items() if isinstance(value, torch.Tensor)},
            "extra_fp8_variables": {
                name: value
                for name, value in variables
                if isinstance(value, int | float | str | tuple | list)
            },
        }
