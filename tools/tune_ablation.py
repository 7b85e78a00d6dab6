"""One comparison of configs/ablations/regimes.yaml with a few seeds, to find its settings.

    python tools/tune_ablation.py                                  # what there is, and what a run costs
    python tools/tune_ablation.py explore clip_higher --seeds 1,2,3
    python tools/tune_ablation.py explore clip_higher --knobs 'ways=[[0.9,0.5],[0.1,0.02]]' --set steps=20

Prints both curves and the paired difference, and adds a line to configs/ablations/tried.jsonl: whatever was
tried is told. Seeds from 100 on are for the table itself. Runs that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megarl.ablation import runs
from megarl.ablation.jobs import locked, run_jobs
from megarl.ablation.regimes import Compared, Regime, cost, load_regimes
from megarl.ablation.result import Curve, compare
from megarl.ablation.runs import AblationTable, Planned, Settings, write_json
from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError, MegarlError

FRESH = 100  # seeds below are for tuning
TRIED = Path(__file__).resolve().parents[1] / "configs" / "ablations" / "tried.jsonl"


def show(regimes: dict[str, Regime]) -> None:
    """Print every comparison and what a seed costs."""
    total = 0.0
    for name, regime in regimes.items():
        tables = {paper: regime.table(name, paper) for paper in regime.parts}
        one = next(iter(tables.values()))
        warm = cost(load_config(one.folder / one.warm_start), regime.knobs).seconds
        print(f"{name}: limit {regime.max_response_tokens} tokens, warm start about {warm:.0f} s a seed")
        total += warm
        for table in tables.values():
            for row in table.rows:
                each = cost(table.config(row, ()), regime.knobs)
                total += each.seconds
                tokens = (
                    f"{each.sampled:,} tokens sampled, {each.evaluated:,} evaluated, {each.trained:,} trained"
                )
                print(
                    f"  {row.slug} ({row.name}): {tokens}, {each.updates} updates, about {each.seconds:.0f} s"
                )
    print(f"all of it: about {total:.0f} s of one core a seed, {total * 20 / 3600:.1f} hours for 20 seeds")


def complete(planned: Sequence[Planned], settings: Settings) -> None:
    """Run what is missing, or was made with other settings. Raises ConfigError for a run that failed."""
    waiting = {run.name: run for run in planned if run.seconds() is None or run.changed()}
    with closing(run_jobs((r.job() for r in waiting.values()), settings.jobs, settings.limit)) as ended:
        for one in ended:
            if one.problem:
                raise ConfigError(f"{one.job.name}: {one.problem}")
            run = waiting[one.job.name]
            write_json(run.folder / runs.MARK, {**run.mark(), "seconds": round(one.seconds, 1)})
            print(f"{run.name}: {one.seconds:.0f} s", flush=True)


def tune(given: argparse.Namespace) -> None:
    """Run one comparison, print it and log it."""
    regimes = load_regimes()
    if not given.regime:
        return show(regimes)
    if given.regime not in regimes:
        raise ConfigError(f"{given.regime}: no such regime (one of {', '.join(regimes)})")
    content = regimes[given.regime].model_dump(exclude_unset=True)
    for text in given.knobs:
        key, _, value = text.partition("=")
        content["knobs"][key] = yaml.safe_load(value)
    if given.limit is not None:
        content["limit"] = given.limit
    try:
        regime = Regime.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"--knobs: {error.errors(include_url=False)[0]['msg']}") from None
    tables = {paper: regime.table(given.regime, paper) for paper in regime.parts}
    slugs = {row.name: row.slug for table in tables.values() for row in table.rows}
    found = [
        (p, one) for p, part in regime.parts.items() for one in part.compared if slugs[one.row] == given.row
    ]
    if not found:
        known = ", ".join(slugs[one.row] for part in regime.parts.values() for one in part.compared)
        raise ConfigError(f"{given.row}: {given.regime} compares no such row (one of {known})")
    paper, compared = found[0]
    if len(set(given.seeds)) < len(given.seeds) or not all(0 <= seed < FRESH for seed in given.seeds):
        raise ConfigError(f"--seeds: must be different and below {FRESH}: later ones are kept for the table")
    table: AblationTable = tables[paper]
    rows = sorted((r for r in table.rows if r.name in compared.names), key=lambda r: r.name == compared.row)

    # Other knobs are another task with another warm start: a folder of their own.
    knobs = regime.knobs.model_dump(mode="json")
    mark = hashlib.sha256(json.dumps(knobs, sort_keys=True).encode()).hexdigest()[:8]
    folder = given.folder / f"{given.regime}-{mark}"
    settings = Settings(folder, given.seeds, (), given.jobs, given.time_limit, True, given.overrides)
    warm = [runs.warm_start(table, settings, seed) for seed in given.seeds]
    planned = {row.name: [runs.row_run(table, settings, row, seed) for seed in given.seeds] for row in rows}
    seconds = sum(cost(run.config, regime.knobs).seconds for own in (warm, *planned.values()) for run in own)
    for name, own in planned.items():
        check_config(own[0].config, f"{given.regime}, {name}")
    print(f"{compared.row} against {compared.against}: {compared.why}")
    print(
        f"at most {seconds / given.jobs / 60:.0f} minutes for {len(given.seeds)} seeds, in {folder}",
        flush=True,
    )
    with locked(folder, "tune_ablation.py"):
        for seed in given.seeds:
            runs.make_task(table, settings, seed)
        complete(warm, settings)
        complete([run for pair in zip(*planned.values(), strict=True) for run in pair], settings)

    report(
        compared,
        {name: {run.seed: run.curve() for run in own} for name, own in planned.items()},
        given.log,
        {
            "regime": given.regime,
            "knobs": knobs,
            "settings": [*rows[-1].overrides, *given.overrides],
            "seconds": {name: [run.seconds() for run in own] for name, own in planned.items()},
            "code": runs.code_checksum(),
        },
    )


def report(
    compared: Compared, curves: Mapping[str, Mapping[int, Curve]], log: Path, facts: Mapping[str, Any]
) -> None:
    """Print both rows' curves (row -> seed -> step -> accuracy) and the paired difference at the last step,
    and append all of it to the log."""
    row, other = curves[compared.row], curves[compared.against]
    print(f"\nstep  {compared.against}  |  {compared.row}  |  differences, seeds {' '.join(map(str, row))}")
    for step in sorted(set.intersection(*(set(curve) for own in (row, other) for curve in own.values()))):
        means = [statistics.fmean(curve[step] for curve in own.values()) for own in (other, row)]
        apart = " ".join(f"{row[seed][step] - other[seed][step]:+.3f}" for seed in row)
        print(f"{step:4}  {means[0]:.3f}  {means[1]:.3f}  {apart}")
    last, before = ({seed: curve[max(curve)] for seed, curve in own.items()} for own in (row, other))
    differences = {seed: last[seed] - before[seed] for seed in row}
    result = compare(last, before, compared.against)
    test = (
        f" [{result.low:+.3f}, {result.high:+.3f}], p = {result.p:.3f}"
        if result and result.p is not None
        else ""
    )
    mean = statistics.fmean(differences.values())
    print(f"at the last step {mean:+.3f}{test}; the paper: {compared.expect}")
    said = {"row": compared.row, "against": compared.against, "expect": compared.expect}
    found = {"seeds": [*row], "differences": differences, "mean": mean, "curves": curves}
    line = {"date": datetime.date.today().isoformat(), **said, **found, **facts}
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 2 for what its user got wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("regime", nargs="?", help="of regimes.yaml; without it: list them with their costs")
    parser.add_argument("row", nargs="?", help="e.g. clip_higher")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[1, 2, 3])
    parser.add_argument(
        "--knobs", nargs="+", default=[], metavar="KEY=VALUE", help="of the task, e.g. bare=0.1"
    )
    parser.add_argument("--limit", type=float, help="instead of the regime's")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds of a run (default: 600)")
    parser.add_argument("--folder", type=Path, default=Path("runs/tuning"), help="default: runs/tuning")
    parser.add_argument("--log", type=Path, default=TRIED, help=argparse.SUPPRESS)
    parser.add_argument(
        "--set", nargs="+", default=[], dest="overrides", metavar="KEY=VALUE", help="e.g. steps=20"
    )
    try:
        tune(parser.parse_args(arguments))
    except MegarlError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
