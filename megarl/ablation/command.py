"""`megarl ablate`: rows x seeds as runs of `megarl train`, then one table and one figure; of a protocol, one
verdict for each row.

A seed's task and warm start are made once and shared by all rows of all tables. What is finished is not run
again; what was interrupted starts anew; what was run with other settings is refused, or repeated with
--fresh.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.ablation import protocol as protocols
from megarl.ablation import runs
from megarl.ablation.jobs import locked, run_jobs
from megarl.ablation.protocol import FRESH, Outcome, Protocol, ProtocolRow, is_protocol, load_protocol
from megarl.ablation.result import Result, RowResult, markdown
from megarl.ablation.runs import AblationTable, Planned, Settings, write_json
from megarl.config import check_config
from megarl.config.errors import ConfigError, Interrupted
from megarl.config.load import config_file
from megarl.observe.runs import read_metrics


@dataclass
class Piece:
    """What one command may still begin of the runs that are missing."""

    most: float  # runs
    end: float  # of time.monotonic()
    longest: float = 0.0  # seconds of the longest run so far
    left: int = 0  # runs that were not begun

    @classmethod
    def of(cls, settings: Settings) -> Piece:
        hours = math.inf if settings.hours is None else settings.hours
        return cls(math.inf if settings.most is None else settings.most, time.monotonic() + 3600 * hours)

    def begin(self, waiting: Sequence[Planned]) -> Iterator[Planned]:
        """Yield the runs that may begin, in their order; count the others."""
        for count, run in enumerate(waiting):
            if self.most < 1 or time.monotonic() + self.longest > self.end:
                self.left += len(waiting) - count
                return
            self.most -= 1
            yield run

    def code(self, codes: Sequence[int]) -> int:
        """Say what is left; return the command's exit code: 75 where only the piece has ended."""
        if self.left:
            print(f"{self.left} runs are left or wait for one that is: the same command goes on", flush=True)
        return max(codes, default=Interrupted.code if self.left else 0)


def ablate(name: str, base: Path | None, into: Path | None, seeds: Sequence[int] | None, **given: Any) -> int:
    """Run what is missing of a table or protocol and write it; return 0, 75 where --hours or --most left
    runs, or the exit code of a failed run. given: the other fields of `Settings`."""
    if is_protocol(name):
        return _ablate_protocol(name, base, into, seeds, given)
    settings = Settings(seeds=range(5) if seeds is None else seeds, **given)
    table = runs.load_table(name, base and config_file(base))
    _check(table, settings, into)
    piece = Piece.of(settings)
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
        codes = _complete(warm, settings, lambda run: None, piece)
        begun = {run.seed for run in warm if run.seconds() is not None}
        planned = [run for run in planned if run.seed in begun]
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

        codes += _complete(chosen, settings, finish, piece)
        result = write_table()
        from megarl.ablation.figures import write_page, write_png

        write_png(result, out / "accuracy.png")
        write_page(result, out / "report.html")
        if into is not None:
            _write_into(into, table.name, out, "accuracy.png", "accuracy by step of each row")
    took = _duration(time.monotonic() - started)
    print(f"\n{markdown(result)}\ntable and figures: {out}\ntook {took}")
    return piece.code(codes)


def _check(table: AblationTable, settings: Settings, into: Path | None) -> None:
    """Refuse what the command line can get wrong, before anything is made."""
    _check_settings(settings, [row.slug for row in table.rows])
    if into is not None:
        _place(into, table.name)
    runs.task_writer(table.task)


def _check_settings(settings: Settings, slugs: Sequence[str]) -> None:
    """Refuse seeds, rows, limits and overrides that make no sense."""
    if unknown := set(settings.rows) - {*slugs}:
        raise ConfigError(f"--rows: {min(unknown)}: no such row (one of {', '.join(slugs)})")
    if len(set(settings.seeds)) < len(settings.seeds) or min(settings.seeds) < 0:
        raise ConfigError("--seeds: must be different whole numbers from 0")
    if settings.jobs < 1 or settings.limit <= 0:
        raise ConfigError("--jobs and --limit: must be greater than 0")
    if (settings.most or 0) < 0 or (settings.hours is not None and settings.hours <= 0):
        raise ConfigError("--hours and --most: must be greater than 0, or --most 0 to begin nothing")
    for override in settings.overrides:
        if override.partition("=")[0].strip() in runs.SET_HERE:
            what = "each run has its own, which megarl ablate sets (see --seeds and --folder)"
            raise ConfigError(f"command line: {override}: {what}")


def _complete(
    planned: Sequence[Planned], settings: Settings, finish: Callable[[Planned], None], piece: Piece
) -> list[int]:
    """Run what is not finished and fits into the piece, call `finish` with each run that is; return the exit
    codes of those that failed."""
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
    jobs = (run.job() for run in piece.begin(waiting))
    with closing(run_jobs(jobs, settings.jobs, settings.limit)) as ended:
        for count, one in enumerate(ended, start=1):
            run, spent = by_name[one.job.name], spent + one.seconds
            piece.longest = max(piece.longest, one.seconds)
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


def _write_into(into: Path, name: str, out: Path, picture: str, what: str) -> None:
    """Write the table between its marks, its figure in images/ beside the file."""
    before, after = _place(into, name)
    figure = into.parent / "images" / f"ablations_{name.replace('.', '_')}.png"
    figure.parent.mkdir(exist_ok=True)
    shutil.copyfile(out / picture, figure)
    table = (out / "table.md").read_text(encoding="utf-8")
    shown = f"![{what}](images/{figure.name})"
    into.write_text(f"{before}\n{table}\n{shown}\n\n{after}", encoding="utf-8")


def _ablate_protocol(
    name: str, base: Path | None, into: Path | None, seeds: Sequence[int] | None, given: Mapping[str, Any]
) -> int:
    """Run what is missing of a protocol's final seeds, or of the tuning seeds that were given, and judge
    it."""
    protocol = load_protocol(name)
    tuning = seeds is not None
    settings = Settings(seeds=seeds if seeds is not None else protocol.fresh_seeds, **given)
    tables = protocol.tables()
    by_name = {row.name: row for table in tables.values() for row in table.rows}  # names, points and slugs
    wanted = {by_name[row.row].slug: None for row in protocol.rows}
    _check_settings(settings, [*wanted])
    if base is not None or (settings.overrides and not tuning):
        what = "a protocol's final run has its settings only (--seeds below 100 to tune)"
        raise ConfigError(f"{'--base' if base else settings.overrides[0]}: {what}")
    if tuning and max(settings.seeds) >= FRESH:
        what = f"of a protocol, only tuning seeds, below {FRESH} (leave it out for the final run)"
        raise ConfigError(f"--seeds: {what}")
    if into is not None:
        _place(into, protocol.name)
    planned: dict[tuple[str, str, int], Planned] = {}
    piece = Piece.of(settings)

    def on(task: str, run: Planned) -> Planned:
        return replace(run, name=f"{run.name} on {task}")

    for seed in settings.seeds:  # seed by seed, so that every prefix is paired
        for row in protocol.rows:
            rows = {one.name: one for one in tables[row.task].rows}
            for arm in (row.row, row.against):
                if (row.task, arm, seed) not in planned:  # rows may share an arm
                    run = on(row.task, runs.row_run(tables[row.task], settings, rows[arm], seed))
                    check_config(run.config, f"{protocol.name}, task {row.task}, row {arm}")
                    planned[row.task, arm, seed] = run
    chosen = [row for row in protocol.rows if not settings.rows or by_name[row.row].slug in settings.rows]
    arms = {(row.task, arm) for row in chosen for arm in (row.row, row.against)}
    place = settings.folder / protocol.name
    out = place / "tuning" if tuning else place
    with locked(settings.folder, "megarl ablate"):
        started = time.monotonic()
        plan = protocols.plan_power(protocol, _spread(place / "tuning.json", protocol))
        if not tuning:
            plan = _frozen(place, protocol, plan, keep=settings.most != 0)
        what = f"tuning seeds {', '.join(map(str, settings.seeds))}" if tuning else f"{protocol.seeds} seeds"
        print(f"{protocol.title}: {len(protocol.rows)} rows, {what}, in {out}", flush=True)
        _tell_power(protocol, plan)
        missing = {
            key: run
            for key, run in planned.items()
            if key[:2] in arms
            and (
                run.seconds() is None or (settings.fresh and run.config.model.path.exists() and run.changed())
            )
        }
        warm = {
            (task, seed): on(task, runs.warm_start(tables[task], settings, seed))
            for task, _, seed in (missing if not settings.fresh else planned)
        }
        cold = {key: run for key, run in warm.items() if run.seconds() is None}
        _tell_costs(protocol, chosen, missing, cold, settings.jobs)
        if settings.most == 0:
            return 0
        entries = []
        for row in chosen if tuning else ():
            new = [
                str(s) for s in settings.seeds for a in (row.row, row.against) if (row.task, a, s) in missing
            ]
            setting = {**protocol.setting(row.task), "command": [*settings.overrides]}
            if new:
                entries.append({"row": row.key, "setting": setting, "seeds": dict.fromkeys(new)})
        if tuning:
            protocols.note_tried(protocol.folder / protocol.tried, entries)
        for task, seed in warm:
            runs.make_task(tables[task], settings, seed)
        codes = _complete([*warm.values()], settings, lambda run: None, piece)
        ready = {key for key, run in warm.items() if run.seconds() is not None}
        waiting = [
            run
            for key, run in planned.items()
            if key[:2] in arms and ((key[0], key[2]) in ready or (key[0], key[2]) not in warm)
        ]
        piece.left += len(missing) - sum(run in waiting for run in missing.values())
        try:
            codes += _complete(waiting, settings, lambda run: None, piece)
        finally:
            finished = {
                key: run
                for key, run in planned.items()
                if run.seconds() is not None and run.config.model.path.exists() and not run.changed()
            }
            papers = {row.name: row.paper for row in by_name.values()}
            curves = {key: run.curve() for key, run in finished.items()}
            outcomes = measure(protocol, curves, papers)
            if tuning:
                _keep_spread(place / "tuning.json", protocol, outcomes, settings.overrides)
                for entry, one in ((e, o) for e in entries for o in outcomes if o.row.key == e["row"]):
                    entry["seeds"] = {s: one.differences.get(int(s)) for s in entry["seeds"]}
                protocols.note_tried(protocol.folder / protocol.tried, entries)
        _write_protocol(protocol, outcomes, plan, [*finished.values()], curves, papers, out)
        if into is not None and not tuning:
            _write_into(into, protocol.name, out, "forest.png", "difference and interval of each row")
    print(f"\n{protocols.terminal(outcomes)}\n\ntable and figures: {out}")
    print(f"took {_duration(time.monotonic() - started)}")
    return piece.code(codes)


def _write_protocol(
    protocol: Protocol,
    outcomes: Sequence[Outcome],
    plan: Sequence[Mapping[str, Any]],
    finished: Sequence[Planned],
    curves: Mapping[tuple[str, str, int], Mapping[int, float]],
    papers: Mapping[str, float | None],
    out: Path,
) -> None:
    """Write table.md, table.json, forest.png and report.html."""
    tried = protocols.read_tried(protocol.folder / protocol.tried)
    code = ", ".join(sorted({run.mark()["code"] for run in finished})) or "-"
    spent = _duration(sum(run.seconds() or 0.0 for run in finished))
    said = [f"{len(finished)} runs, {spent} of one core; code: {code} (checksum of megarl's files)."]
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(protocols.markdown(protocol, outcomes, plan, tried, said), encoding="utf-8")
    rows = [{**vars(o), "row": o.row.model_dump(), "mean": o.mean, "verdict": o.verdict} for o in outcomes]
    content = {"protocol": protocol.model_dump(mode="json", exclude={"folder"}), "power": plan, "rows": rows}
    write_json(out / "table.json", {**content, "said": said, "tried": tried})
    from megarl.ablation.figures import write_forest

    def arm(task: str, name: str) -> RowResult:
        own = {seed: curve for (on, row, seed), curve in curves.items() if (on, row) == (task, name)}
        return RowResult(name, papers[name], own)

    cards = [(arm(row.task, row.row), arm(row.task, row.against)) for row in protocol.rows]
    write_forest(protocol, outcomes, cards, [*said, *protocols.rules(protocol, outcomes)], out)


def measure(
    protocol: Protocol,
    curves: Mapping[tuple[str, str, int], Mapping[int, float]],
    papers: Mapping[str, float | None],
) -> list[Outcome]:
    """Judge a protocol's rows from its finished runs. curves: (task, row of the table, seed) -> curve;
    papers: points of the table's rows."""
    other = "curve" if protocol.statistic == "last" else "last"
    outcomes = []
    for row in protocol.rows:
        differences, others = {}, []
        for seed in sorted({seed for _, _, seed in curves}):
            own, its = curves.get((row.task, row.row, seed)), curves.get((row.task, row.against, seed))
            if own and its:
                differences[seed] = protocol.score(own) - protocol.score(its)
                others.append(protocol.score(own, other) - protocol.score(its, other))
        points, beside = papers[row.row], papers[row.against]
        paper = None if points is None or beside is None else points - beside
        mean = statistics.fmean(others) if others else None
        outcomes.append(Outcome(row, protocol.seeds, protocol.alpha, paper, differences, mean))
    return protocols.judge(outcomes, protocol.level, protocol.power)


def _frozen(place: Path, protocol: Protocol, plan: list[dict[str, Any]], keep: bool) -> list[dict[str, Any]]:
    """Return the power as it was known at the first run with fresh seeds; keep it and the protocol then, if
    `keep`. Raises ConfigError where the protocol was changed since."""
    path = place / "protocol.json"
    content = protocol.model_dump(mode="json", exclude={"folder", "title", "tried"})
    seeds = (int(folder.name.removeprefix("seed-")) for folder in place.glob("*/*/seed-*[0-9]"))
    if not path.is_file() or not any(seed >= FRESH for seed in seeds):
        if keep:
            place.mkdir(parents=True, exist_ok=True)
            write_json(path, {"protocol": content, "power": plan})
        return plan
    kept = json.loads(path.read_text(encoding="utf-8"))
    if changed := [key for key in content if content[key] != kept["protocol"].get(key)]:
        what = f"{', '.join(changed)}: changed since its first run with fresh seeds"
        how = "another protocol needs another first_seed and --folder"
        raise ConfigError(f"{protocol.folder / protocol.name}.yaml: {what} ({how})")
    power: list[dict[str, Any]] = kept["power"]
    return power


def _made_by(protocol: Protocol, row: ProtocolRow, overrides: Sequence[str]) -> dict[str, Any]:
    """Return what the differences of a row depend on beside the seeds."""
    score = [protocol.statistic, protocol.last]
    return {"setting": {**protocol.setting(row.task), "command": [*overrides]}, "score": score}


def _spread(path: Path, protocol: Protocol) -> dict[str, list[float]]:
    """Return the differences of tuning seeds that a command has kept, by the row's key; only those of the
    protocol's own settings."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {
        row.key: [*one["differences"].values()]
        for row in protocol.rows
        if (one := kept.get(row.key)) and one["made_by"] == _made_by(protocol, row, ())
    }


def _keep_spread(
    path: Path, protocol: Protocol, outcomes: Iterable[Outcome], overrides: Sequence[str]
) -> None:
    """Write the differences of tuning seeds; those of rows that were not run now are kept."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for one in outcomes:
        if one.differences:
            made_by = _made_by(protocol, one.row, overrides)
            kept[one.row.key] = {"made_by": made_by, "differences": one.differences}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, kept)


def _tell_power(protocol: Protocol, plan: Sequence[Mapping[str, Any]]) -> None:
    """Print what the protocol's seeds can find, before they are run."""
    for one in plan:
        if one["deviation"] is None:
            print(
                f"power of {one['row']}: not known, no tuning seeds with these settings (--seeds 0 1 2 3 4)"
            )
            continue
        needed = [str(one[key] or "more than 2000") for key in ("for_difference", "for_equivalence")]
        finds = "nothing" if one["finds"] is None else f"{one['finds']:.3f}"
        print(
            f"power of {one['row']}: standard deviation {one['deviation']:.3f} over {one['tuning_seeds']} "
            f"tuning seeds; for {one['bound']:g}, {needed[0]} seeds find it, {needed[1]} show equivalence; "
            f"{protocol.seeds} seeds find {finds}"
        )


def _tell_costs(
    protocol: Protocol,
    chosen: Sequence[ProtocolRow],
    missing: Mapping[tuple[str, str, int], Planned],
    cold: Mapping[tuple[str, int], Planned],
    jobs: int,
) -> None:
    """Print what is still to be run of each row and, from the seconds of earlier runs, how long that
    takes."""

    def cost(planned: Sequence[Planned]) -> str:
        seconds = [run.usual_seconds() for run in planned]
        known = [s for s in seconds if s is not None]
        if len(known) < len(seconds) or not known:
            return f"{len(planned)} runs" + (", no earlier ones to tell their time by" if planned else "")
        mean = sum(known) / len(known)
        return f"{len(planned)} runs x {_duration(mean)} = {_duration(sum(known))} of one core"

    for row in chosen:
        own = [run for key, run in missing.items() if key[0] == row.task and key[1] in (row.row, row.against)]
        print(f"cost of {row.key}: {cost(own)}")
    print(f"cost of all, arms that rows share once: {cost([*missing.values()])}; warm starts: ", end="")
    print(f"{cost([*cold.values()])}; {jobs} at a time", flush=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
