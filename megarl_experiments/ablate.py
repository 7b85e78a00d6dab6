"""The command line of `megarl ablate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from megarl.cli.arguments import key_values
from megarl.cli.ranks import checks_packages


@checks_packages
def ablate(
    name: Annotated[
        str,
        Argument(
            metavar="TABLE",
            help="vapo, dapo, vapo.protocol, or the path of a .table.yaml or .protocol.yaml file",
        ),
    ],
    overrides: Annotated[
        list[str],
        key_values("steps=30 (right after TABLE or ROW); for the rows, not for the warm start"),
    ],
    *,
    base: Annotated[
        Path | None, Option(metavar="CONFIG", help="configuration below the rows; default: the table's")
    ] = None,
    seeds: Annotated[
        list[int] | None,
        Option(
            metavar="N [N ...]",
            help="default: 0 1 2 3 4, or the protocol's; with a protocol only for tuning, below 100",
        ),
    ] = None,
    rows: Annotated[
        list[str] | None,
        Option(metavar="ROW [ROW ...]", help="the rows to run, e.g. vapo without_clip_higher; default: all"),
    ] = None,
    folder: Annotated[Path, Option(metavar="FOLDER", help="folder for all output")] = Path("runs/ablations"),
    jobs: Annotated[int, Option(metavar="N", help="number of runs at the same time")] = 1,
    limit: Annotated[float, Option(metavar="SECONDS", help="time limit of one run")] = 1800.0,
    hours: Annotated[
        float | None, Option(metavar="H", help="start no run after H hours; default: no limit")
    ] = None,
    most: Annotated[
        int | None,
        Option(
            metavar="N",
            help="start at most N runs; 0 with a protocol: print missing runs; default: all",
        ),
    ] = None,
    fresh: Annotated[bool, Option("--fresh", help="delete and repeat runs that have other settings")] = False,
    into: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Markdown file with a place for the table; write it there too",
        ),
    ] = None,
) -> int:
    """Run a paper's ablation table at demo scale, each row with several seeds.

    The exit code is 75 if --hours or --most left runs."""
    from megarl_experiments import command
    from megarl_experiments.tables import Options

    options = Options(folder, seeds or (), rows or [], jobs, limit, fresh, overrides, hours, most)
    return command.ablate(name, base, into, options)
