"""The commands `megarl data gym` and `megarl data integers`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from megarl.config.errors import ConfigError, DataError
from megarl.config.load import dump_yaml
from megarl.config.schema import DataConfig
from megarl.config.text import printable
from megarl_tasks.gym import INSTALL

DEFAULTS = DataConfig()


def gym(
    tasks: Annotated[
        list[str],
        Argument(
            default_factory=list, show_default=False, metavar="TASK", help="a task's name; none: all names"
        ),
    ],
) -> int:
    """List the tasks that reasoning-gym generates, or parameters and a problem of some."""
    if find_spec("reasoning_gym") is None:
        raise ConfigError(f"reasoning-gym is not installed ({INSTALL})")
    from megarl_tasks.gym_scorer import get_parameters, known_answer, make_task, tasks_by_kind

    if not tasks:
        for kind, names in tasks_by_kind().items():
            print(f"{kind}: {', '.join(names)}")
    for name in tasks:
        task = make_task(name, {}, seed=0, size=1)
        entry = task[0]
        print(f"{name}\n{dump_yaml(get_parameters(name)) or '    (no parameters)'}")
        print(f"--- a problem\n{entry['question']}\n--- {known_answer(task, entry) or '(no known answer)'}\n")
    return 0


def integers(
    source: Annotated[Path, Argument(metavar="DATA", help="file with LaTeX answers, .jsonl or .parquet")],
    out: Annotated[
        Path,
        Argument(
            metavar="OUT", help="file to write, of the same kind: every row has an integer as its answer"
        ),
    ],
    *,
    refused: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="file for the rows that cannot be turned, each with the reason; default: OUT's name with "
            ".refused",
        ),
    ] = None,
    prompt_key: Annotated[
        str, Option(metavar="NAME", help="as data.prompt_key; else question, problem or messages")
    ] = DEFAULTS.prompt_key,
    answer_key: Annotated[
        str, Option(metavar="NAME", help="as data.answer_key; else answer, or what solution ends in")
    ] = DEFAULTS.answer_key,
    workers: Annotated[int, Option(metavar="N", help="processes that verify")] = 2,
) -> int:
    r"""Turn answers into integers: for 11 - 2\sqrt{6} the question asks for k + m + n of k - m\sqrt{n}.

    Writes rows with integer answers, given or converted; others to a second file."""
    if not source.is_file():
        raise DataError(f"{source}: no such file")
    refused = refused or out.with_name(f"{out.stem}.refused{out.suffix}")
    for path in (out, refused):
        if path.suffix != source.suffix:
            raise DataError(f"{path}: must end in {source.suffix}, as {source} does")
        if path.exists():
            raise DataError(f"{path}: is there already (delete it, or name another file)")
        if not path.parent.is_dir():
            raise DataError(f"{path}: its folder does not exist (make it first)")
    if out == refused:
        raise DataError(f"{out}: cannot take the refused rows as well (name two files)")
    if workers < 1:
        raise ConfigError(f"--workers: must be >= 1 (got {workers})")
    from megarl_tasks.integer_files import convert, write_rows  # sympy, which takes a second to import

    result = convert(source, DataConfig(prompt_key=prompt_key, answer_key=answer_key), workers)
    write_rows(out, result.kept)
    if result.refused:
        write_rows(refused, result.refused)
    print("\n".join(result.report.lines()))
    print(f"{printable(str(out))}: {len(result.kept):,} rows, {result.turned:,} of them turned into integers")
    if result.refused:
        print(f"{printable(str(refused))}: {len(result.refused):,} rows as they were, with the reason")
    return 0
