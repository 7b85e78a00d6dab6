"""Runs looked at from their folders: `megarl watch` and `megarl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def watch(
    run: Annotated[Path, Argument(metavar="RUN", help="run folder")],
    *,
    once: Annotated[bool, Option("--once", help="show how it stands and leave")] = False,
) -> int:
    """Show a run that another process trains, from its folder, until it ends; after Ctrl-C it goes on."""
    from megarl.observe.terminal import watch as show

    try:
        show(run, once=once)
    except KeyboardInterrupt:
        return 0
    return 0


def report(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="run folders")],
    *,
    out: Annotated[
        Path | None,
        Option(metavar="FILE", help="file to write; default: report.html in the first run's folder"),
    ] = None,
) -> int:
    """Write report.html of one run, or of several laid over each other."""
    from megarl.observe.report import write_report

    print(write_report(runs, out or runs[0]))
    return 0
