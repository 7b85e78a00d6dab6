"""samples.jsonl: a few responses of each step with what became of them, for people to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Self

from megarl.observe.jsonl import JsonlWriter, precedes, read_jsonl
from megarl.observe.metrics import plain

SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """One response. length: response tokens; reward: as it entered the advantages, penalties included.

    group_size, group_right: responses to the same prompt, and how many of them are right. tokens: their texts, with what each was worth
    (None: not known); advantage_mean, _min and _max are over all tokens of the response. None where nothing was recorded."""

    step: int
    prompt: str
    response: str
    reward: float | None
    correct: bool
    truncated: bool
    length: int
    answer: str = ""
    stage: str = "train"
    advantage_mean: float | None = None
    advantage_min: float | None = None
    advantage_max: float | None = None
    group_size: int | None = None
    group_right: int | None = None
    tokens: list[str] | None = None
    advantages: list[float | None] | None = None
    values: list[float | None] | None = None


def choose(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """At most `limit` of one step's samples: whole groups from the first on, and of a group that does not fit, right and
    wrong responses by turns, so that both are seen. The order stays."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    chosen: list[Sample] = []
    for group in groups.values():
        right, wrong = ([s for s in group if s.correct is flag] for flag in (True, False))
        turns = [s for pair in zip_longest(right, wrong) for s in pair if s is not None]
        wanted = {id(s) for s in turns[: limit - len(chosen)]}
        chosen += [s for s in group if id(s) in wanted]
    return chosen


def shorten(text: str, limit: int) -> str:
    """`text`, its middle left out where it has more than `limit` characters: the answer stands at the end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


class SampleLog:
    """Writes at most `per_step` samples a step, each text shortened to `max_chars` characters (at least 2).

    append=True continues the file of an earlier run. Raises ConfigError if the folder cannot be written."""

    def __init__(self, run_dir: Path, per_step: int, append: bool = False, max_chars: int = 20_000) -> None:
        self.per_step, self.max_chars = per_step, max_chars
        self._writer = JsonlWriter(run_dir / SAMPLES_FILE, append)

    def write(self, samples: Iterable[Sample]) -> int:
        """Writes the samples of one step (see `choose`); returns how many were written."""
        chosen = choose(list(samples), self.per_step)
        for sample in chosen:
            record = {k: v if isinstance(v, list) else plain(v, k, []) for k, v in vars(sample).items()}  # tokens' numbers are short
            record |= {"prompt": shorten(sample.prompt, self.max_chars), "response": shorten(sample.response, self.max_chars)}
            self._writer.write(record)
        return len(chosen)

    def truncate_after(self, step: int, stage: str = "train") -> int:
        """Drops what was written after `step` of `stage`, from where the run continues; returns the number of lines dropped."""
        return self._writer.keep(lambda record: precedes(record, step, stage))

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_samples(run_dir: Path) -> tuple[list[Sample], int]:
    """The samples of a run and the number of lines that could not be read (cut, or without a field that is needed).

    A run without samples.jsonl has none."""
    path = Path(run_dir) / SAMPLES_FILE
    if not path.exists():
        return [], 0
    fields = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(Sample)}
    needed = {name for name, required in fields.items() if required}
    lines = read_jsonl(path, lambda record: needed <= record.keys())
    return [Sample(**{k: v for k, v in r.items() if k in fields}) for r in lines.records], len(lines.unreadable)
