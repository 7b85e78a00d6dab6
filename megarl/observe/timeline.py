"""Phases of each rank: a line per finished phase in run_dir/timeline/rank-00003.jsonl.

{"stage": "train", "step": 7, "phase": "rollout", "begin": 1763.1, "end": 1765.9, "waited": 0.8}

In seconds, begin and end since 1970; waited is idle time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megarl.config.files import OptionalFiles
from megarl.config.schema import TRAIN
from megarl.observe.run_log import JsonlWriter, Record, is_step, precedes

FOLDER, NAME = "timeline", "rank-{:05d}.jsonl"
WAIT = "wait for "  # phases that only wait


class Timeline:
    """Records this rank's phases: each ends when the next starts. Write errors do not stop the run."""

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        dispensable: OptionalFiles | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        path = run_dir / FOLDER / NAME.format(rank)
        self._file = JsonlWriter(path, True, OptionalFiles() if dispensable is None else dispensable)
        self._clock, self._phase, self._begin, self._waited = clock, "", 0.0, 0.0
        self._place: Record = {"stage": TRAIN, "step": 0}

    def step(self, stage: str, number: int) -> None:
        """Assign following phases to this step."""
        self.leave()
        self._place = {"stage": stage, "step": number}

    def enter(self, phase: str) -> None:
        self.leave()
        self._phase, self._begin, self._waited = phase, self._clock(), 0.0

    def add_wait(self, seconds: float) -> None:
        self._waited += seconds

    def leave(self) -> None:
        if self._phase:
            end = max(self._begin, self._clock())  # a clock may be set back
            elapsed = end - self._begin
            waited = elapsed if self._phase.startswith(WAIT) else min(self._waited, elapsed)
            times = {"begin": round(self._begin, 4), "end": round(end, 4), "waited": round(waited, 4)}
            self._file.write({**self._place, "phase": self._phase, **times})
        self._phase = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.enter(name)
        yield
        self.leave()

    def clear(self) -> None:
        self._file.keep(lambda record: False)

    def truncate_after(self, step: int, stage: str) -> None:
        self._file.keep(lambda record: precedes(record, step, stage))

    def close(self) -> None:
        self.leave()
        self._file.close()


def is_phase(record: Record) -> bool:
    has_times = all(isinstance(record.get(key), int | float) for key in ("begin", "end", "waited"))
    return is_step(record) and isinstance(record.get("phase"), str) and has_times


def timeline_ranks(run_dir: Path) -> list[int]:
    paths = (run_dir / FOLDER).glob(NAME.replace("{:05d}", "*"))
    numbers = (path.stem.removeprefix("rank-") for path in paths)
    return sorted(int(number) for number in numbers if number.isdecimal())


def choose_ranks(ranks: Sequence[int], most: int) -> list[int]:
    """Return at most `most` ranks, evenly spread from first to last."""
    if len(ranks) <= most:
        return list(ranks)
    return [ranks[round(i * (len(ranks) - 1) / (most - 1))] for i in range(most)]
