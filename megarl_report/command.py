"""`megarl report`: the page of one run, or of several laid over each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl_report.report import write_report


def report(runs: Sequence[Path], out: Path | None) -> int:
    """Write report.html and print where it is."""
    print(write_report(runs, out or runs[0]))
    return 0
