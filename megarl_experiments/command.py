"""Run all rows and seeds of a table or protocol; write table and figure.

Rows share a seed's task and warm start. Interrupted runs start anew. Finished ones with other settings are
refused, or repeated with --fresh."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config import check_config
from megarl.config.errors import ConfigError, Interrupted
from megarl.config.load import config_file
from megarl.observe.runs import read_metrics
from megarl.parallel.lease import hold_lease
from megarl_experiments.jobs import run_jobs
from megarl_experiments.protocol import (
    FRESH,
    Arm,
    Power,
    Protocol,
    RowOutcome,
    decide_rows,
    estimate_power,
    is_protocol,
    load_protocol,
    log_tried,
    read_tried,
)
from megarl_experiments.result import Curve, Result, RowResult, markdown
from megarl_experiments.tables import (
    MARK,
    SET_HERE,
    AblationTable,
    Options,
    Planned,
    checksum_code,
    load_table,
    make_task,
    row_run,
    task_writer,
    warm_start,
    write_json,
)


@dataclass
class Budget:
    """The runs and time that --most and --hours leave."""

    most: float  # runs
    end: float  # time.monotonic()
    is_spent: bool = False

    @classmethod
    def from_options(cls, settings: Options) -> Budget:
        hours = math.inf if settings.hours is None else settings.hours
        return cls(math.inf if settings.most is None else settings.most, time.monotonic() + 3600 * hours)

    def take_run(self) -> bool:
        """Return whether one more run may start, and count it."""
        self.is_spent |= self.most < 1 or time.monotonic() >= self.end
        self.most -= 1
        return not self.is_spent

    def exit_code(self, codes: Sequence[int]) -> int:
        """Return the largest of `codes`. If there is none, return 75 if runs are left to do, else 0."""
        if self.is_spent:
            print("--hours or --most reached; run the same command to continue", flush=True)
        return max(codes, default=Interrupted.code if self.is_spent else 0)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a folder: two commands would delete each other's runs."""
    remedy = "wait for it, or choose another --folder"
    with hold_lease(folder, "megarl ablate", remedy=remedy) as lease, lease.kept():
        yield


def ablate(name: str, base: Path | None, into: Path | None, given: Options) -> int:
    """Complete a table's or protocol's runs and write results; return `Budget.exit_code`.

    Empty `given.seeds`: the default seeds."""
    settings_after_rows = [row for row in given.rows if "=" in row]  # `--rows a b steps=30`
    rows = [row for row in given.rows if "=" not in row]
    given = replace(given, rows=rows, overrides=[*given.overrides, *settings_after_rows])
    if is_protocol(name):
        return _ablate_protocol(load_protocol(name), base, into, given)
    settings = replace(given, seeds=given.seeds or range(5))
    table = load_table(name, base and config_file(base))
    _check_settings(settings, [row.slug for row in table.rows])
    if into is not None:
        _split_at_table(into, table.name)
    task_writer(table.task)
    # Seed by seed: an interruption leaves all rows nearly the same seeds.
    planned_runs = [row_run(table, settings, row, seed) for seed in settings.seeds for row in table.rows]
    for run in planned_runs:  # reports a wrong override before the warm starts
        check_config(run.config, f"{table.folder / table.base}, row {run.row}")
    out, budget = settings.folder / table.name, Budget.from_options(settings)
    with _lock(settings.folder):
        print(f"{table.title}: {len(table.rows)} rows x {len(settings.seeds)} seeds in {out}", flush=True)
        started = time.monotonic()
        exit_codes, planned_runs = _warm_up(
            _warm_starts(planned_runs, settings), planned_runs, settings, budget
        )
        selected_runs = [run for run in planned_runs if not settings.rows or run.row in settings.rows]
        unselected_runs = (run for run in planned_runs if run not in selected_runs)
        finished_runs = {
            run.name: run for run in unselected_runs if run.seconds() is not None and not run.changed()
        }

        def write_table() -> Result:
            result = _result(table, settings, [*finished_runs.values()])
            out.mkdir(parents=True, exist_ok=True)
            (out / "table.md").write_text(markdown(result), encoding="utf-8")
            write_json(out / "table.json", result.record())
            return result

        def finish(run: Planned) -> None:
            finished_runs[run.name] = run
            write_table()

        exit_codes += _complete(selected_runs, settings, budget, finish)
        result = write_table()
        from megarl_experiments.curves import write_page, write_png

        write_png(result, out / "accuracy.png")
        write_page(result, out / "report.html")
        if into is not None:
            _write_into(into, table.name, out, "accuracy.png", "accuracy by step of each row")
    duration = _format_duration(time.monotonic() - started)
    print(f"\n{markdown(result)}\ntable and figures: {out}\ntook {duration}")
    return budget.exit_code(exit_codes)


def _ablate_protocol(
    protocol: Protocol,
    base: Path | None,
    into: Path | None,
    given: Options,
) -> int:
    """Run missing seeds and decide rows. With tuning seeds, log the settings and their results."""
    tuning = bool(given.seeds)
    settings = replace(given, seeds=given.seeds or protocol.fresh_seeds)
    tables = protocol.tables()
    rows_by_name = {row.name: row for row in next(iter(tables.values())).rows}
    _check_settings(settings, [rows_by_name[row.row].slug for row in protocol.rows])
    if tuning and max(settings.seeds) >= FRESH:
        problem = f"a protocol takes only tuning seeds, below {FRESH}. Leave --seeds out for the final run."
        raise ConfigError(f"--seeds: {problem}")
    if base is not None or (settings.overrides and not tuning):
        problem = f"a protocol's final run has fixed settings. Give --seeds below {FRESH} to tune."
        raise ConfigError(f"{'--base' if base else settings.overrides[0]}: {problem}")
    if into is not None:
        _split_at_table(into, protocol.name)
    selected_rows = [
        row for row in protocol.rows if not settings.rows or rows_by_name[row.row].slug in settings.rows
    ]
    if tuning:
        protocol = protocol.model_copy(update={"rows": tuple(selected_rows)})
    planned_runs: dict[Arm, Planned] = {}
    for seed in settings.seeds:
        for row in protocol.rows:
            task_rows = {one.name: one for one in tables[row.task].rows}
            for arm in (row.against, row.row):
                if (row.task, arm, seed) not in planned_runs:  # rows share arms
                    run = row_run(tables[row.task], settings, task_rows[arm], seed)
                    check_config(run.config, f"{protocol.path}, task {row.task}, row {run.row}")
                    planned_runs[row.task, arm, seed] = run
    arms = {(row.task, arm) for row in selected_rows for arm in (row.row, row.against)}
    selected_runs = {key: run for key, run in planned_runs.items() if key[:2] in arms}
    out = settings.folder / protocol.name / ("tuning" if tuning else "")
    with _lock(settings.folder):
        what = f"tuning seeds {', '.join(map(str, settings.seeds))}" if tuning else f"{protocol.seeds} seeds"
        print(f"{protocol.title}: {len(selected_rows)} rows, {what}, in {out}", flush=True)
        powers = estimate_power(protocol, read_tried(protocol.tried))
        warm_starts = _warm_starts(selected_runs.values(), settings)
        _print_costs(
            [one for one in powers if one.row in selected_rows],
            selected_runs,
            warm_starts.values(),
            settings.fresh,
        )
        if settings.most == 0:
            return 0
        started, budget = time.monotonic(), Budget.from_options(settings)
        exit_codes, ready_runs = _warm_up(warm_starts, selected_runs.values(), settings, budget)
        finished_runs = {
            key: run for key, run in planned_runs.items() if key not in selected_runs and _usable(run)
        }
        key_by_folder = {run.folder: key for key, run in selected_runs.items()}

        def decide() -> tuple[dict[Arm, Curve], list[RowOutcome]]:
            curves: dict[Arm, Curve] = {key: run.curve() for key, run in finished_runs.items()}
            return curves, decide_rows(
                protocol, curves, {name: row.paper for name, row in rows_by_name.items()}
            )

        def finish(run: Planned) -> None:
            finished_runs[key_by_folder[run.folder]] = run
            if tuning:
                log_tried(protocol, decide()[1], settings.overrides, checksum_code())

        exit_codes += _complete(ready_runs, settings, budget, finish)
        from megarl_experiments import forest
        from megarl_experiments.curves import band

        curves, outcomes = decide()
        code_checksums = ", ".join(sorted({run.mark()["code"] for run in finished_runs.values()})) or "-"
        core_time = _format_duration(sum(run.seconds() or 0.0 for run in finished_runs.values()))
        note = (
            f"{len(finished_runs)} runs, {core_time} of one core; "
            f"code: {code_checksums} (checksum of megarl's files)."
        )
        forest.write(protocol, outcomes, curves, powers, note, out)
        if into is not None and not tuning:
            _write_into(into, protocol.name, out, "forest.png", "difference and interval of each row")
    for row in protocol.rows if tuning else ():
        for arm, curves_by_seed in zip((row.row, row.against), row.arms(curves), strict=True):
            steps = zip(*band(curves_by_seed), strict=True)
            print(f"{arm} on {row.task}: {', '.join(f'{mean:.3f} at {step}' for step, mean, _ in steps)}")
    print(f"\n{forest.terminal(outcomes)}\n\ntable and figures: {out}")
    print(f"took {_format_duration(time.monotonic() - started)}")
    return budget.exit_code(exit_codes)


def _print_costs(
    powers: Sequence[Power], own: Mapping[Arm, Planned], warm: Iterable[Planned], fresh: bool
) -> None:
    """Print each row's missing runs, their time, and its power."""

    def cost(missing: Sequence[Planned]) -> str:
        usual_seconds = {run.folder.parent: run.usual_seconds() for run in missing}
        seconds = [s for run in missing if (s := usual_seconds[run.folder.parent]) is not None]
        text = f"{len(missing)} runs" + (f", {_format_duration(sum(seconds))} of one core" if seconds else "")
        num_unknown = len(missing) - len(seconds)
        return text + (f" ({num_unknown} of unknown length)" if num_unknown else "")

    missing = {key: run for key, run in own.items() if run.seconds() is None or (fresh and not _usable(run))}
    for power in powers:
        row = power.row
        arms = [(row.task, row.row), (row.task, row.against)]
        missing_runs = [run for key, run in missing.items() if key[:2] in arms]
        print(f"{row.row} - {row.against} on {row.task}: {cost(missing_runs)}")
        if power.deviation is None:
            print("  power: unknown, no differences of tuning seeds with these settings")
            continue
        seeds_to_detect, seeds_to_show = (
            n or "more than 2000" for n in (power.for_difference, power.for_equivalence)
        )
        detectable = "nothing" if power.detectable is None else f"{power.detectable:.3f}"
        print(
            f"  power: standard deviation {power.deviation:.3f} over {power.tuned} tuning seeds; "
            f"{seeds_to_detect} seeds detect {row.bound:g}, {seeds_to_show} show equivalence; "
            f"the protocol's seeds detect {detectable}"
        )
    missing_warm_starts = [run for run in warm if run.seconds() is None or (fresh and run.changed())]
    print(f"total, shared arms once: {cost([*missing.values()])}; warm starts: {cost(missing_warm_starts)}")
    print("  (estimated from earlier runs in this folder, else from the protocol's file)", flush=True)


def _warm_starts(planned: Iterable[Planned], settings: Options) -> dict[Path, Planned]:
    """Return model path -> warm start."""
    run_by_model = {run.config.model.path: run for run in planned}
    return {path: warm_start(run.table, settings, run.seed) for path, run in run_by_model.items()}


def _warm_up(
    warm: Mapping[Path, Planned], planned: Iterable[Planned], settings: Options, budget: Budget
) -> tuple[list[int], list[Planned]]:
    """Make tasks and warm starts; return exit codes of failed ones, and the ready runs."""
    code_checksum = checksum_code()
    for run in warm.values():
        # Comparing tasks is slow. The same code and knobs (part of the folder's name) make the same task.
        if not (run.table.start and run.seconds() is not None and run.mark()["code"] == code_checksum):
            make_task(run.table, settings, run.seed)
    exit_codes = _complete([*warm.values()], settings, budget, lambda run: None)
    return exit_codes, [run for run in planned if warm[run.config.model.path].seconds() is not None]


def _usable(run: Planned) -> bool:
    """Return whether a run is finished and up to date."""
    return run.seconds() is not None and run.config.model.path.is_dir() and not run.changed()


def _check_settings(settings: Options, slugs: Sequence[str]) -> None:
    """Raise ConfigError for impossible options."""
    if unknown := set(settings.rows) - {*slugs}:
        raise ConfigError(f"--rows: {min(unknown)}: no such row (one of {', '.join(slugs)})")
    if len(set(settings.seeds)) < len(settings.seeds) or min(settings.seeds) < 0:
        raise ConfigError("--seeds: must be different whole numbers from 0")
    if settings.jobs < 1 or settings.limit <= 0:
        raise ConfigError("--jobs and --limit: must be greater than 0")
    if (settings.most or 0) < 0 or (settings.hours is not None and settings.hours <= 0):
        raise ConfigError("--hours and --most: must be greater than 0, or --most 0 to begin nothing")
    for override in settings.overrides:
        if override.partition("=")[0].strip() in SET_HERE:
            problem = "megarl ablate sets it for each run. Use --seeds and --folder."
            raise ConfigError(f"command line: {override}: {problem}")


def _complete(
    planned: Sequence[Planned], settings: Options, budget: Budget, finish: Callable[[Planned], None]
) -> list[int]:
    """Complete runs within the budget and `finish` each; return exit codes of failed ones."""
    pending_runs = []
    for run in planned:
        if run.seconds() is None:
            pending_runs.append(run)
        elif not (changes := run.changed()):
            finish(run)
        elif settings.fresh:
            pending_runs.append(run)
        else:
            problem = f"was run with other settings: {changes}"
            raise ConfigError(f"{run.folder}: {problem} (give --fresh to repeat it, or another --folder)")
    if len(pending_runs) < len(planned):
        print(f"{len(planned) - len(pending_runs)} of {len(planned)} are finished already", flush=True)
    exit_codes, spent_seconds = [], 0.0
    run_by_name = {run.name: run for run in pending_runs}
    jobs = (run.job() for run in pending_runs if budget.take_run())
    with closing(run_jobs(jobs, settings.jobs, settings.limit)) as results:
        for count, result in enumerate(results, start=1):
            run, spent_seconds = run_by_name[result.job.name], spent_seconds + result.seconds
            remaining_seconds = spent_seconds / count * (len(pending_runs) - count) / settings.jobs
            curve = run.curve() if not result.problem and run.row else {}
            parts = [
                result.problem and f"FAILED: {result.problem}",
                f"accuracy {curve[max(curve)]:.3f} at step {max(curve)}" if curve else "",
                _format_duration(result.seconds),
                f"{_format_duration(remaining_seconds)} left" if remaining_seconds else "",
            ]
            print(f"[{count}/{len(pending_runs)}] {run.name}: {', '.join(filter(None, parts))}", flush=True)
            if result.problem:
                exit_codes.append(result.code if result.code in (1, 2) else 1)  # 1 after a signal
            else:
                write_json(run.folder / MARK, {**run.mark(), "seconds": round(result.seconds, 1)})
                finish(run)
    return exit_codes


def _result(table: AblationTable, settings: Options, finished: Sequence[Planned]) -> Result:
    rows = []
    for row in table.rows:
        row_runs = sorted((run for run in finished if run.row == row.slug), key=lambda run: run.seed)
        seconds = {run.seed: run.seconds() or 0.0 for run in row_runs}
        rows.append(RowResult(row.name, row.paper, {run.seed: run.curve() for run in row_runs}, seconds))
    config = table.config(next(row for row in table.rows if row.name == table.full), settings.overrides)
    records = read_metrics(finished[0].folder).records if finished else ()
    problem_counts = {record["eval/problems"] for record in records if "eval/problems" in record}
    code_checksums = ", ".join(sorted({run.mark()["code"] for run in finished})) or "-"
    notes = (
        f"Base at this scale: {table.base.name}, task {table.task}, warm start {table.warm_start.name}; "
        f"{config.steps} steps of {config.rollout.prompts} x {config.rollout.group_size} responses; "
        f"evaluation on {next(iter(problem_counts), 'no')} held-out problems, "
        f"{config.evaluation.samples} answer(s) each, every {config.evaluation.every} steps; "
        f"seeds {', '.join(map(str, settings.seeds))}.",
        f"Code: {code_checksums} (checksum of megarl's files).",
        *([f"Overrides: {' '.join(settings.overrides)}."] if settings.overrides else []),
    )
    return Result(table.title, table.full, table.against, table.last, tuple(rows), {"notes": notes})


def _split_at_table(into: Path, name: str) -> tuple[str, str]:
    """Return the text before and after the table, marks included."""
    begin_mark, end_mark = f"<!-- megarl ablate {name}: begin -->\n", f"<!-- megarl ablate {name}: end -->"
    try:
        text = into.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--into: {into}: cannot be read: {error.strerror}") from None
    text_before, begin_match, remainder = text.partition(begin_mark)
    _, end_match, text_after = remainder.partition(end_mark)
    if not begin_match or not end_match:
        problem = f"has no place for the table. Add the lines `{begin_mark.strip()}` and `{end_mark}`."
        raise ConfigError(f"--into: {into}: {problem}")
    return text_before + begin_mark, end_mark + text_after


def _write_into(into: Path, name: str, out: Path, picture: str, what: str) -> None:
    """Write the table between its marks, and its figure to images/."""
    text_before, text_after = _split_at_table(into, name)
    figure = into.parent / "images" / f"ablations_{name.replace('.', '_')}.png"
    figure.parent.mkdir(exist_ok=True)
    shutil.copyfile(out / picture, figure)
    table = (out / "table.md").read_text(encoding="utf-8")
    image = f"![{what}](images/{figure.name})"
    into.write_text(f"{text_before}\n{table}\n{image}\n\n{text_after}", encoding="utf-8")


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
