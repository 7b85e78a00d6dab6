"""distributions.jsonl: what a mean cannot say of a step, as sums over fixed bins that can be added up over steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.observe.jsonl import JsonlWriter, Record, is_step, precedes, read_jsonl
from megarl.observe.metrics import plain

DISTRIBUTIONS_FILE = "distributions.jsonl"
Table = dict[str, list[float]]


class DistributionLog:
    """Writes one line a step. append=True continues the file of an earlier run. Raises ConfigError if the folder cannot be written."""

    def __init__(self, run_dir: Path, append: bool = False) -> None:
        self._writer = JsonlWriter(run_dir / DISTRIBUTIONS_FILE, append)

    def write(self, step: int, stage: str, tables: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """tables: name -> row -> one sum per bin."""
        self._writer.write({"step": step, "stage": stage, **plain(tables, "", [])})

    def truncate_after(self, step: int, stage: str = "train") -> int:
        """Drops what was written after `step` of `stage`, from where the run continues; returns the number of lines dropped."""
        return self._writer.keep(lambda record: precedes(record, step, stage))

    def close(self) -> None:
        self._writer.close()


def read_distributions(run_dir: Path) -> tuple[list[Record], int]:
    """The records of a run and the number of lines that could not be read. A run without the file has none."""
    path = Path(run_dir) / DISTRIBUTIONS_FILE
    if not path.exists():
        return [], 0
    lines = read_jsonl(path, is_step)
    return lines.records, len(lines.unreadable)


@dataclass(frozen=True)
class Part:
    """The sums of some steps in a row."""

    first: int
    last: int
    table: Table


def added(tables: Iterable[Mapping[str, Any]]) -> Table:
    """Bin by bin; those whose rows or bins are not those of the last one (another version, another limit) are left out."""
    found = list(tables)
    shape = {row: len(sums) for row, sums in found[-1].items()}
    alike = [table for table in found if {row: len(sums) for row, sums in table.items()} == shape]
    return {row: [sum(column) for column in zip(*([x or 0.0 for x in table[row]] for table in alike), strict=True)] for row in shape}


def thirds(records: Sequence[Record], name: str, stage: str) -> list[Part]:
    """Table `name` of the first and of the last third of a stage's steps; of fewer than three steps once, of none not at all."""
    steps = {record["step"]: record[name] for record in records if record["stage"] == stage and isinstance(record.get(name), dict)}
    order = sorted(steps)
    if not order:
        return []
    size = -(-len(order) // 3)
    chosen = [order] if len(order) < 3 else [order[:size], order[-size:]]
    return [Part(part[0], part[-1], added(steps[step] for step in part)) for part in chosen]
