"""Files of checkpoints and model folders: JSON objects, indices that run no code, bytes that are on disk."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

from megarl.config.errors import CheckpointError

PARTS = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
HARMLESS = {
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(("torch.distributed.checkpoint.metadata", name) for name in PARTS),
}


def read_json(path: Path, absent: str = "is missing") -> dict[str, Any]:
    """Read a JSON object from a file. Raises CheckpointError naming the file if it is missing (`absent` says
    what that means) or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: {absent}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a JSON object is expected, not a {type(content).__name__}")
    return content


class _Harmless(pickle.Unpickler):
    """Unpickles what torch writes into the index of a distributed checkpoint, and nothing that can do
    anything."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and re.fullmatch(r"Size|b?float\w*|u?int\d+|bool|complex\d+", name)
        if dtype or (module, name) in HARMLESS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no business there")


def check_index(path: Path) -> None:
    """Check the index of a distributed checkpoint, a pickle that torch reads without a question.

    Raises CheckpointError where it is damaged, or names anything but what torch itself writes: reading it
    could run foreign code."""
    try:
        with open(path, "rb") as file:
            _Harmless(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing") from None
    except Exception as error:  # noqa: BLE001 (a damaged pickle raises anything)
        raise CheckpointError(f"{path}: not a readable index of a checkpoint ({error})") from None


def fsync(path: Path) -> None:
    """Wait until a file or a folder's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
