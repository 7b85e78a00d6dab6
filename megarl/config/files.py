"""Files as checkpoints and model folders need them: JSON that is an object or a CheckpointError, and bytes that are on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megarl.config.errors import CheckpointError


def read_json(path: Path, absent: str = "is missing") -> dict[str, Any]:
    """A JSON object from a file; CheckpointError names the file if it is missing (`absent` says what that means) or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: {absent}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a JSON object is expected, not a {type(content).__name__}")
    return content


def fsync(path: Path) -> None:
    """Waits until a file or a folder's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
