"""Rows of parquet and jsonl files, one at a time, with their numbers; a line that is no row is a reason instead."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.errors import DataError

Row = dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """Why a line holds no row."""

    reason: str


def rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Row | BadRow]]:
    """The rows of one file, numbered from 1 (lines, in jsonl); of a parquet file those of `columns` that it has.

    Raises DataError for a missing, unreadable, empty or foreign file."""
    if not path.is_file():
        raise DataError(f"{path}: no such file" if not path.exists() else f"{path}: not a file (name the .parquet or .jsonl files)")
    if path.suffix not in (".parquet", ".jsonl"):
        raise DataError(f"{path}: unknown kind of file {path.suffix!r} (use .parquet or .jsonl)")
    count = 0
    try:
        for count, row in _parquet(path, columns) if path.suffix == ".parquet" else _jsonl(path):
            yield count, row
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {(str(error).splitlines() or [type(error).__name__])[0]}") from error
    if not count:
        raise DataError(f"{path}: holds no row")


def _jsonl(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
                yield number, BadRow("malformed JSON")
                continue
            yield number, row if isinstance(row, dict) else BadRow("not a JSON object")


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Row]]:
    with pq.ParquetFile(path) as file:
        present = [name for name in file.schema_arrow.names if name in columns]
        if not present:
            raise DataError(f"{path}: none of the columns {', '.join(columns)} (it has: {', '.join(file.schema_arrow.names)})")
        number = 0
        for batch in file.iter_batches(batch_size=4096, columns=present):
            for row in batch.to_pylist():
                number += 1
                yield number, row
