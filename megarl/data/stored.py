"""An Experience as a file: safetensors with a checksum, renamed into place when it is on disk, so that it is whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.errors import DataError
from megarl.config.files import fsync
from megarl.data.experience import Experience

PARTS = ("tokens", "cu_seqlens", "response_mask")
STATE = "state"  # JSON as bytes: a header, where texts would go, may have 100 MB at most


def write_experience(path: Path, experience: Experience, state: Mapping[str, Any], made_from: Mapping[str, Any]) -> None:
    """Writes `experience` with `state` and `made_from`, which must hold JSON. Raises OSError."""
    text = json.dumps(state, default=str)  # a prompt's extra columns may be of types that JSON does not know
    tensors = {name: getattr(experience, name) for name in PARTS} | {f"column.{name}": c for name, c in experience.columns.items()}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    tensors[STATE] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    aside = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    save_file(tensors, aside, {"made_from": json.dumps(made_from), "sha256": _checksum(tensors)})
    fsync(aside)
    os.replace(aside, path)
    fsync(path.parent)


def read_made_from(path: Path) -> dict[str, Any]:
    """The `made_from` of a file, from its header alone. DataError names a file that is damaged."""
    try:
        with safe_open(path, "pt") as file:
            return dict(json.loads(file.metadata()["made_from"]))
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: is damaged ({error})") from None


def read_experience(path: Path) -> tuple[Experience, dict[str, Any]]:
    """The experience and the state of a file. DataError names one that is damaged."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            checksum = file.metadata()["sha256"]
        if _checksum(tensors) != checksum:
            raise DataError(f"{path}: is damaged (its checksum is another)")
        columns = {name.removeprefix("column."): tensor for name, tensor in tensors.items() if name.startswith("column.")}
        tokens, cu_seqlens, mask = (tensors[name] for name in PARTS)
        return Experience(tokens, cu_seqlens, mask, columns), json.loads(tensors[STATE].numpy().tobytes())
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: is damaged ({error})") from None


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].view(torch.uint8).numpy().data)
    return digest.hexdigest()
