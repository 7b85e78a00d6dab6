"""`megarl ablate`: rows x seeds as runs of `megarl train`, then one table and one figure.

A seed's task and warm start are made once and shared by all rows of all tables. What is finished is not run
again; what was interrupted starts anew; what was run with other settings is refused, or repeated with
--fresh.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from megarl.ablation import runs
from megarl.ablation.jobs import locked, run_jobs
from megarl.ablation.result import Result, RowResult, markdown
from megarl.ablation.runs import AblationTable, Planned, Settings, write_json
from megarl.config import check_config
from megarl.config.errors import ConfigError
from megarl.config.load import config_file
from megarl.observe.runs import read_metrics


def ablate(name: str, base: Path | None, into: Path | None, **given: Any) -> int:
    """Run what is missing of a table and write it; return 0, or the exit code of a failed run. given: the
    fields of `Settings`."""
    settings = Settings(**given)
    table = runs.load_table(name, base and config_file(base))
    _check(table, settings, into)
    warm = [runs.warm_start(table, settings, seed) for seed in settings.seeds]
    # Seed by seed, so that every prefix is paired.
    planned = [runs.row_run(table, settings, row, seed) for seed in settings.seeds for row in table.rows]
    for run in planned:  # a mistake in the overrides is found now, not after the warm starts
        check_config(run.config, f"{table.folder / table.base}, row {run.row}")
    out = settings.folder / table.name
    with locked(settings.folder, "megarl ablate"):
        print(f"{table.title}: {len(table.rows)} rows x {len(settings.seeds)} seeds in {out}", flush=True)
        started = time.monotonic()
        for seed in settings.seeds:
            runs.make_task(table, settings, seed)
        codes = _complete(warm, settings, lambda run: None)
        seeds = {run.seed for run in warm if run.seconds() is not None}
        planned = [run for run in planned if run.seed in seeds]
        chosen = [run for run in planned if not settings.rows or run.row in settings.rows]
        others = (run for run in planned if run not in chosen)
        finished = {run.name: run for run in others if run.seconds() is not None and not run.changed()}

        def write_table() -> Result:
            result = _result(table, settings, [*finished.values()])
            out.mkdir(parents=True, exist_ok=True)
            (out / "table.md").write_text(markdown(result), encoding="utf-8")
            write_json(out / "table.json", result.record())
            return result

        def finish(run: Planned) -> None:
            finished[run.name] = run
            write_table()

        codes += _complete(chosen, settings, finish)
        result = write_table()
        from megarl.ablation.figures import write_page, write_png

        write_png(result, out / "accuracy.png")
        write_page(result, out / "report.html")
        if into is not None:
            _write_into(into, table.name, out)
    took = _duration(time.monotonic() - started)
    print(f"\n{markdown(result)}\ntable and figures: {out}\ntook {took}")
    return max(codes, default=0)


def _check(table: AblationTable, settings: Settings, into: Path | None) -> None:
    """Refuse what the command line can get wrong, before anything is made."""
    slugs = [row.slug for row in table.rows]
    if unknown := set(settings.rows) - {*slugs}:
        raise ConfigError(f"--rows: {min(unknown)}: no such row (one of {', '.join(slugs)})")
    if len(set(settings.seeds)) < len(settings.seeds) or min(settings.seeds) < 0:
        raise ConfigError("--seeds: must be different whole numbers from 0")
    if settings.jobs < 1 or settings.limit <= 0:
        raise ConfigError("--jobs and --limit: must be greater than 0")
    for override in settings.overrides:
        if override.partition("=")[0].strip() in runs.SET_HERE:
            what = "each run has its own, which megarl ablate sets (see --seeds and --folder)"
            raise ConfigError(f"command line: {override}: {what}")
    if into is not None:
        _place(into, table.name)
    runs.task_writer(table.task)


def _complete(planned: Sequence[Planned], settings: Settings, finish: Callable[[Planned], None]) -> list[int]:
    """Run what is not finished, call `finish` with each run that is; return the exit codes of those that
    failed."""
    waiting = []
    for run in planned:
        if run.seconds() is None:
            waiting.append(run)
        elif not (changed := run.changed()):
            finish(run)
        elif settings.fresh:
            waiting.append(run)
        else:
            what = f"was run with other settings: {changed}"
            raise ConfigError(f"{run.folder}: {what} (give --fresh to repeat such runs, or another --folder)")
    if len(waiting) < len(planned):
        print(f"{len(planned) - len(waiting)} of {len(planned)} are finished already", flush=True)
    codes, spent = [], 0.0
    by_name = {run.name: run for run in waiting}
    with closing(run_jobs((run.job() for run in waiting), settings.jobs, settings.limit)) as ended:
        for count, one in enumerate(ended, start=1):
            run, spent = by_name[one.job.name], spent + one.seconds
            left = spent / count * (len(waiting) - count) / settings.jobs
            curve = run.curve() if not one.problem and run.row else {}
            facts = [
                one.problem and f"FAILED: {one.problem}",
                f"accuracy {curve[max(curve)]:.3f} at step {max(curve)}" if curve else "",
                _duration(one.seconds),
                f"{_duration(left)} left" if left else "",
            ]
            print(f"[{count}/{len(waiting)}] {run.name}: {', '.join(filter(None, facts))}", flush=True)
            if one.problem:
                codes.append(one.code if one.code in (1, 2) else 1)  # 1 for a run that was ended or killed
            else:
                write_json(run.folder / runs.MARK, {**run.mark(), "seconds": round(one.seconds, 1)})
                finish(run)
    return codes


def _result(table: AblationTable, settings: Settings, finished: Sequence[Planned]) -> Result:
    rows = []
    for row in table.rows:
        own = sorted((run for run in finished if run.row == row.slug), key=lambda run: run.seed)
        seconds = {run.seed: run.seconds() or 0.0 for run in own}
        rows.append(RowResult(row.name, row.paper, {run.seed: run.curve() for run in own}, seconds))
    config = table.config(next(row for row in table.rows if row.name == table.full), settings.overrides)
    records = read_metrics(finished[0].folder).records if finished else ()
    problems = {record["eval/problems"] for record in records if "eval/problems" in record}
    code = ", ".join(sorted({run.mark()["code"] for run in finished})) or "-"
    said = (
        f"Base at this scale: {table.base.name}, task {table.task}, warm start {table.warm_start.name}; "
        f"{config.steps} steps of {config.rollout.prompts} x {config.rollout.group_size} responses; "
        f"evaluation on {next(iter(problems), 'no')} held-out problems, "
        f"{config.evaluation.samples} answer(s) each, every {config.evaluation.every} steps; "
        f"seeds {', '.join(map(str, settings.seeds))}.",
        f"Code: {code} (checksum of megarl's files).",
        *([f"Overrides: {' '.join(settings.overrides)}."] if settings.overrides else []),
    )
    return Result(table.title, table.full, table.against, table.last, tuple(rows), {"said": said})


def _place(into: Path, name: str) -> tuple[str, str]:
    """Return what stands before and after the table's place in a Markdown file, its marks included."""
    begin, end = f"<!-- megarl ablate {name}: begin -->\n", f"<!-- megarl ablate {name}: end -->"
    try:
        text = into.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--into: {into}: cannot be read: {error.strerror}") from None
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        what = f"has no place for the table: the lines `{begin.strip()}` and `{end}`"
        raise ConfigError(f"--into: {into}: {what}")
    return before + begin, end + after


def _write_into(into: Path, name: str, out: Path) -> None:
    """Write the table between its marks, its figure in images/ beside the file."""
    before, after = _place(into, name)
    figure = into.parent / "images" / f"ablations_{name}.png"
    figure.parent.mkdir(exist_ok=True)
    shutil.copyfile(out / "accuracy.png", figure)
    table = (out / "table.md").read_text(encoding="utf-8")
    picture = f"![accuracy by step of each row](images/{figure.name})"
    into.write_text(f"{before}\n{table}\n{picture}\n\n{after}", encoding="utf-8")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
