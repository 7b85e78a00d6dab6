"""`megarl watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def watch(
    run: Annotated[Path, Argument(metavar="RUN", help="run folder")],
    *,
    once: Annotated[bool, Option("--once", help="show the current state and exit")] = False,
) -> int:
    """Show a run of another process, from its folder, until it ends. Ctrl-C does not stop the run."""
    from megarl.observe.terminal import watch as show

    try:
        show(run, once=once)
    except KeyboardInterrupt:
        return 0
    return 0
