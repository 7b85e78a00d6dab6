"""`megarl watch`: a run that another process trains, looked at from its folder."""

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
