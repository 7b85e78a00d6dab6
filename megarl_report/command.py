"""`megarl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from megarl.config.text import printable


def report(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="run folders")],
    *,
    out: Annotated[
        Path | None,
        Option(metavar="FILE", help="file to write; default: report.html in the first run's folder"),
    ] = None,
) -> int:
    """Write report.html of one run, or of several in the same figures."""
    from megarl_report.report import write_report

    print(printable(str(write_report(runs, out or runs[0]))))
    return 0
