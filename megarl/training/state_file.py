"""What a checkpoint holds besides tensors: JSON, its long lists of numbers (tokens, log-probs, generators) as safetensors beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config.errors import CheckpointError
from megarl.config.files import read_json

STATE, NUMBERS = "state.json", "state.safetensors"
LONG = 32  # numbers, from which a list is stored as a tensor
MARK = "$numbers"  # {MARK: name of the tensor}


def write_state(folder: Path, state: Mapping[str, Any]) -> list[Path]:
    """Writes dicts, lists, numbers and texts into `folder`, exactly; gives the files. Raises OSError.

    A prompt's extra columns may be of types that JSON does not know; they are carried along as texts, nothing depends on them."""
    tensors: dict[str, Tensor] = {}
    tree = _split(state, tensors)
    (folder / STATE).write_text(json.dumps(tree, default=str), encoding="utf-8")
    save_file(tensors, folder / NUMBERS)
    return [folder / STATE, folder / NUMBERS]


def read_state(folder: Path) -> dict[str, Any]:
    """Undoes `write_state`. CheckpointError where a file is missing or damaged."""
    tree = read_json(folder / STATE)
    try:
        tensors = load_file(folder / NUMBERS)
        state: dict[str, Any] = _join(tree, tensors)
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / NUMBERS}: cannot be read: {error}") from None
    return state


def _split(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Mapping):
        return {key: _split(item, tensors) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        return value
    kinds = {type(item) for item in value} if len(value) >= LONG else set()
    if kinds not in ({int}, {float}):
        return [_split(item, tensors) for item in value]
    name = str(len(tensors))
    tensors[name] = _smallest(torch.tensor(value, dtype=torch.int64 if kinds == {int} else torch.float64))
    return {MARK: name}


def _smallest(numbers: Tensor) -> Tensor:
    """As 32-bit numbers where that loses nothing."""
    narrow = numbers.to(torch.float32 if numbers.dtype == torch.float64 else torch.int32)
    return narrow if torch.equal(narrow.to(numbers.dtype), numbers) else numbers


def _join(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        return tensors[tree[MARK]].tolist() if MARK in tree else {key: _join(item, tensors) for key, item in tree.items()}
    return [_join(item, tensors) for item in tree] if isinstance(tree, list) else tree
