"""Readers of data files, by suffix, with limits against memory exhaustion."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.errors import DataError, first_line
from megarl.data.limits import MEMORY, memory_limit

MAX_LINE = 16 << 20  # bytes of a line of jsonl
_BATCH, _BATCH_BYTES = 4096, 64 << 20  # rows and declared bytes of a parquet batch
# Limit of a decoded parquet file: EXPANSION times its size, plus _EXPANSION_FREE bytes. A billion rows may
# share one stored value.
EXPANSION, _EXPANSION_FREE = 1000, 64 << 20
_ROW_BYTES = 100  # least memory of a reported row


def file_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield (number, row) of a file; an invalid row is a string, the reason.

    Numbers count from 1, in jsonl by line. Of parquet only `columns` are read, ignoring case.
    Raises DataError for a missing, unreadable or empty file."""
    if not path.is_file():
        problem = "no such file" if not path.exists() else "not a file (name the .parquet or .jsonl files)"
        raise DataError(f"{path}: {problem}")
    if path.suffix not in READERS:
        suffixes = " or ".join(READERS)
        raise DataError(f"{path}: unknown kind of file {path.suffix!r} (use {suffixes})")
    count = 0
    try:
        for count, row in READERS[path.suffix](path, columns):
            yield count, row
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {first_line(error)}") from error
    if not count:
        raise DataError(f"{path}: holds no row")


def _jsonl(path: Path, _: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with open(path, "rb") as file:
        for number, line in enumerate(_lines(file), 1):
            if line is None:
                yield number, f"line is longer than {MAX_LINE >> 20} MiB"
                continue
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if b"\\u" in line:  # perhaps half a surrogate pair, which no tokenizer accepts
                    json.dumps(row, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                yield number, "text is not Unicode"
            except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
                yield number, "malformed JSON"
            else:
                yield number, row if isinstance(row, dict) else "not a JSON object"


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield None for a line over MAX_LINE, without holding it in memory."""
    while line := file.readline(MAX_LINE + 1):
        if len(line) <= MAX_LINE or line.endswith(b"\n"):
            yield line
            continue
        while (chunk := file.readline(1 << 20)) and not chunk.endswith(b"\n"):
            pass
        yield None


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        present_columns = [
            name for name in names if columns is None or name in columns or name.lower() in columns
        ]
        if columns and not present_columns:
            raise DataError(f"{path}: none of the columns {', '.join(columns)} (it has: {', '.join(names)})")
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        row_bytes = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
        batch_size = min(_BATCH, max(1, _BATCH_BYTES // max(row_bytes, 1)))
        # A failed allocation in Arrow's threads would end the process.
        batches = file.iter_batches(batch_size=batch_size, columns=present_columns, use_threads=False)
        rows_read, decoded_bytes, disk_bytes = 0, 0, path.stat().st_size
        while True:
            try:
                with memory_limit(MEMORY):
                    batch = next(batches, None)
                    rows = [] if batch is None else _rows(batch)
            except MemoryError:
                last_row = min(rows_read + batch_size, file.metadata.num_rows)
                what = f"rows {rows_read + 1:,} to {last_row:,} take more than {MEMORY >> 20} MiB decoded"
                raise DataError(f"{path}: {what} (write shorter rows)") from None
            if batch is None:
                return
            decoded_bytes += batch.nbytes + _ROW_BYTES * batch.num_rows
            if decoded_bytes > EXPANSION * disk_bytes + _EXPANSION_FREE:
                what = (
                    f"{disk_bytes:,} bytes become {decoded_bytes:,} up to row {rows_read + batch.num_rows:,}"
                )
                raise DataError(f"{path}: {what}: its rows repeat (write each once)")
            yield from enumerate(rows, rows_read + 1)
            rows_read += batch.num_rows


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any] | str]:
    """Convert; a row that is not UTF-8 becomes the reason."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return ["text is not Unicode"]
        return [row for i in range(batch.num_rows) for row in _rows(batch.slice(i, 1))]


# (path, columns) -> as `file_rows`
Reader = Callable[[Path, Sequence[str] | None], Iterator[tuple[int, dict[str, Any] | str]]]
READERS: dict[str, Reader] = {".parquet": _parquet, ".jsonl": _jsonl}
