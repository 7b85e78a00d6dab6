"""What each rank did when: run_dir/timeline/rank-00003.jsonl, a line for each phase, written as it ends.

    {"stage": "train", "step": 7, "phase": "rollout", "begin": 1763.1, "end": 1765.9, "waited": 0.8}

begin and end are seconds since 1970 by the rank's own clock, so that ranks can be laid side by side; waited
is how much of the phase the rank is known to have had nothing to do. A rank writes its own file alone, with
no collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megarl.config.files import Dispensable
from megarl.config.schema import TRAIN
from megarl.observe.run_log import JsonlWriter, Record, is_step, precedes

FOLDER, NAME = "timeline", "rank-{:05d}.jsonl"
WAIT = "wait for "  # a phase whose name begins so is nothing but waiting


class Timeline:
    """Records this rank's phases, one after the other: a phase ends where the next one begins.

    It continues the file of a run that goes on. Where that cannot be written, the run goes on without."""

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        dispensable: Dispensable | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        path = run_dir / FOLDER / NAME.format(rank)
        self._file = JsonlWriter(path, True, Dispensable() if dispensable is None else dispensable)
        self._clock, self._phase, self._begin, self._waited = clock, "", 0.0, 0.0
        self._place: Record = {"stage": TRAIN, "step": 0}  # what comes before the first step

    def step(self, stage: str, number: int) -> None:
        """Note that the phases from now on belong to this step, those between it and the next one as well."""
        self.leave()
        self._place = {"stage": stage, "step": number}

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.leave()
        self._phase, self._begin, self._waited = phase, self._clock(), 0.0

    def waited(self, seconds: float) -> None:
        """Note that for so long in this phase the rank has had nothing to do."""
        self._waited += seconds

    def leave(self) -> None:
        """End the phase, if there is one, and write it."""
        if self._phase:
            end = max(self._begin, self._clock())  # a clock may be set back
            waited = (
                end - self._begin if self._phase.startswith(WAIT) else min(self._waited, end - self._begin)
            )
            times = {"begin": round(self._begin, 4), "end": round(end, 4), "waited": round(waited, 4)}
            self._file.write({**self._place, "phase": self._phase, **times})
        self._phase = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record a phase for as long as the `with` block lasts."""
        self.enter(name)
        yield
        self.leave()

    def clear(self) -> None:
        """Drop what was recorded, where the run begins anew."""
        self._file.keep(lambda record: False)

    def truncate_after(self, step: int, stage: str) -> None:
        """Drop what was recorded after `step` of `stage`, where the run continues."""
        self._file.keep(lambda record: precedes(record, step, stage))

    def close(self) -> None:
        self.leave()
        self._file.close()


def is_phase(record: Record) -> bool:
    """Return whether a record is a phase's."""
    times = all(isinstance(record.get(key), int | float) for key in ("begin", "end", "waited"))
    return is_step(record) and isinstance(record.get("phase"), str) and times


def timeline_ranks(run_dir: Path) -> list[int]:
    """Return the ranks that have written a timeline; none of a run of before there were any."""
    found = (run_dir / FOLDER).glob(NAME.replace("{:05d}", "*"))
    numbers = (path.stem.removeprefix("rank-") for path in found)
    return sorted(int(number) for number in numbers if number.isdecimal())


def chosen_ranks(ranks: Sequence[int], most: int) -> list[int]:
    """Return at most so many of the ranks, spread evenly, the first and the last among them."""
    if len(ranks) <= most:
        return list(ranks)
    return [ranks[round(i * (len(ranks) - 1) / (most - 1))] for i in range(most)]
