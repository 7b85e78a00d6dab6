#!/usr/bin/env python
"""Train a pretrained model with several recipes and seeds, and compare the held-out curves.

    make results MODEL=smollm2                              # VAPO, DAPO, GRPO, PPO: all missing runs
    make results MODEL=smollm2 TABLE=vapo                   # VAPO without one of its techniques
    make results MODEL=smollm2 TABLE=methods ARGS=--tune    # find the learning rates of nine methods
    make results MODEL=smollm2 TABLE=methods                # the nine methods with these rates
    make results MODEL=smollm2 ARGS='--hours 2'             # start no run after two hours
    make results MODEL=smollm2 ARGS='--check vapo-1'        # repeat a run and compare with its curve
    make results MODEL=smollm2 ARGS='--figures'             # plot the existing curves
    make results MODEL=smollm2 ARGS='--gsm8k FILE'          # answer GSM8K before and after each run

The same command continues an interrupted run from its checkpoint. The curve of a finished run is written to
docs/evidence/results/MODEL. configs/results/MODEL.table.yaml lists tables and rows.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.config import load_config
from megarl.config.errors import ConfigError, MegarlError
from megarl.config.load import read_yaml
from megarl.parallel.machine import cores, matrix_rates
from megarl.schedule.preflight import versions
from megarl_experiments import held_out
from megarl_experiments.held_out import Curve

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("smollm2",)
SEEDS = (1, 2, 3)
RATES = (5e-6, 1e-5, 2e-5)  # learning rates that --tune tries, with a seed outside SEEDS
TUNING = ("checkpoint.every=0", "checkpoint.export_hf=false")


@dataclass(frozen=True)
class Run:
    """A run of a table."""

    row: str
    seed: int
    settings: Sequence[str]  # a configuration file, then overrides
    folder: Path
    file: Path  # of its curve


@dataclass(frozen=True)
class Table:
    """A table of configs/results/MODEL.table.yaml."""

    name: str
    rows: Mapping[str, Sequence[str]]  # row -> configuration file, then overrides
    steps: int  # that the comparison uses
    equal: str  # rows are compared at equal "steps" or "tokens"
    curves: Path  # folder
    folder: Path  # of the runs
    longer: Mapping[str, int]  # row -> steps of a longer run, shared with table recipes

    def runs(self, seeds: Sequence[int], rates: Mapping[str, float]) -> Iterator[Run]:
        """Yield the runs, seed by seed.

        rates: row -> learning rate. Runs with another rate than the configuration's are not shared."""
        for seed in seeds:
            for row, settings in self.rows.items():
                name, overrides = f"{row}-{seed}", [f"steps={self.longer.get(row, self.steps)}"]
                rate = rates.get(row)
                if rate is not None and rate != load_config(ROOT / settings[0], settings[1:]).actor.lr:
                    name, overrides = f"{row}-{rate:g}-{seed}", [f"steps={self.steps}", f"actor.lr={rate:g}"]
                yield Run(
                    row, seed, [*settings, *overrides], self.folder / name, self.curves / f"{name}.json"
                )


def read_table(model: str, name: str, only: Sequence[str]) -> Table:
    """Read a table, or only some rows. Raises ConfigError for an unknown row."""
    contents = read_yaml(ROOT / "configs" / "results" / f"{model}.table.yaml")
    table, recipes_table = contents["tables"][name], contents["tables"]["recipes"]
    if unknown := {*only} - {*table["rows"]}:
        raise ConfigError(f"--rows: {min(unknown)}: no such row (one of {', '.join(table['rows'])})")
    table_settings = table.get("settings", [])  # a table with settings shares no runs
    rows = {}
    for row in only or table["rows"]:
        path, *settings = contents["rows"][row]
        rows[row] = [f"configs/results/{path}", *table_settings, *settings]
    curves, folder = ROOT / "docs" / "evidence" / "results" / model, ROOT / "runs" / "results" / model
    subfolder = name if table_settings else ""
    longer = {} if table_settings else dict.fromkeys(recipes_table["rows"], recipes_table["steps"])
    return Table(name, rows, table["steps"], table["equal"], curves / subfolder, folder / subfolder, longer)


def processor() -> str:
    """Return the processor's name; runs are bitwise equal only on the same kind."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine()
    )


def precision(committed: Path) -> str:
    """Return the committed runs' precision, and warn if this processor is slow in it.

    Without committed runs: bf16 if its matrix products are more than twice as fast as fp32's."""
    rates = matrix_rates(min(2, cores()))
    for path in sorted(committed.glob("*-*.json")):
        run_dtype = str(json.loads(path.read_text(encoding="utf-8"))["dtype"])
        if rates[run_dtype] < max(rates.values()) / 4:
            speeds = ", ".join(f"{rate:.0f} GFLOP/s a core in {dtype}" for dtype, rate in rates.items())
            print(
                f"the committed runs are {run_dtype}; this processor is slow in it ({speeds}). Use another."
            )
        return run_dtype
    return "bf16" if rates["bf16"] > 2 * rates["fp32"] else "fp32"


def megarl(*arguments: str | Path) -> list[str]:
    """Run a megarl command and return its words. Raises ConfigError if it fails."""
    command = [sys.executable, "-m", "megarl", *map(str, arguments)]
    if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise ConfigError(f"{' '.join(command[2:])}: exit code {code} (see its output above)")
    return command[2:]


def train(row: str, given: Sequence[str], seed: int, run_dir: Path, dtype: str) -> dict[str, Any]:
    """Start or continue a run and return its curve."""
    overrides = [f"seed={seed}", f"run_dir={run_dir.relative_to(ROOT)}", f"model.dtype={dtype}"]
    command = megarl("train", *given, *overrides)
    return {
        "recipe": row,
        "seed": seed,
        "command": " ".join(command),
        "processor": processor(),
        "dtype": dtype,
        "versions": versions(),
        "evaluations": list(held_out.read_evaluations(run_dir)),
        "value_pretraining": held_out.read_value_pretraining(run_dir),
        "steps": list(held_out.read_steps(run_dir)),
    }


def gsm8k(model: str, problems: Path, weights: Path, out: Path, dtype: str) -> dict[str, Any]:
    """Answer GSM8K's problems, unless done, and return the accuracy with its 95 % interval."""
    config = f"configs/results/{model}_gsm8k.yaml"
    if not (out / "scores.json").is_file():
        overrides = [f"data.eval=[{problems.resolve()}]", f"model.dtype={dtype}"]
        megarl("eval", config, *overrides, "--checkpoint", weights, "--out", out)
    results = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    score = results["scores"]["avg@1"]
    accuracy = {"right": score["mean"], "low": score["low"], "high": score["high"]}
    return {"problems": results["problems"], **accuracy}


def check(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Compare a repeated run with its committed curve. Raises ConfigError if they differ.

    With equal processor, precision and versions evaluations must be equal, else intervals must overlap."""
    same_machine = old["processor"] == new["processor"] and old["dtype"] == new["dtype"]
    if same_machine and old["versions"] == new["versions"]:
        if old["evaluations"] != new["evaluations"]:
            raise ConfigError(
                f"{old['recipe']}-{old['seed']}: a different curve on the same kind of processor"
            )
        return "equal to the last digit"
    for record, repeat in zip(old["evaluations"], new["evaluations"], strict=True):
        if repeat["low"] > record["high"] or repeat["high"] < record["low"]:
            where = f"step {repeat['step']}, {repeat['of']}: {repeat['right']:.3f} and {record['right']:.3f}"
            raise ConfigError(f"{old['recipe']}-{old['seed']}: {where}: the intervals do not overlap")
    return f"within its intervals ({new['processor']}, {new['dtype']}; committed: {old['processor']})"


def tune(table: Table, found: Path, dtype: str, end: float) -> None:
    """Train each row with each of RATES until time `end`, and write the results to the file `found`."""
    results_by_row = json.loads(found.read_text("utf-8")) if found.is_file() else {}
    for row, row_settings in table.rows.items():
        for rate in RATES:
            if f"{rate:g}" in results_by_row.get(row, {}):
                continue
            if time.time() > end:
                print(f"{row} at {rate:g} and later runs are left: --hours have passed")
                return
            print(f"\n{row}, learning rate {rate:g}", flush=True)
            folder = table.folder / "tuning" / f"{row}-{rate:g}"
            shutil.rmtree(folder, ignore_errors=True)  # without checkpoints no run can continue
            settings = [*row_settings, f"steps={table.steps}", f"actor.lr={rate:g}", *TUNING]
            curve = train(row, settings, 0, folder, dtype)
            accuracies = [
                evaluation["right"]
                for evaluation in curve["evaluations"]
                if evaluation["of"] == "all" and evaluation["step"]
            ]
            results_by_row.setdefault(row, {})[f"{rate:g}"] = {
                "right": accuracies,
                **held_out.measure_seconds(curve),
            }
            found.write_text(json.dumps(results_by_row, indent=1) + "\n", encoding="utf-8")
            shutil.rmtree(folder / "critic_pretrained", ignore_errors=True)


def best_rate(tried: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the learning rate with the highest accuracy; of equals the lowest."""
    return max(sorted(map(float, tried)), key=lambda rate: fmean(tried[f"{rate:g}"]["right"]))


def make(run: Run, model: str, dtype: str, problems: Path | None) -> None:
    """Start or continue a run, answer GSM8K (`problems`) before and after it, and write its curve."""
    print(f"\n{run.row}, seed {run.seed}", flush=True)
    curve = train(run.row, run.settings, run.seed, run.folder, dtype)
    if problems:
        initial_model, trained_model = ROOT / "runs" / model / "model", run.folder / "hf"
        curve["gsm8k"] = {
            "before": gsm8k(model, problems, initial_model, run.folder.parent / "gsm8k", dtype),
            "after": gsm8k(model, problems, trained_model, run.folder / "gsm8k", dtype),
        }
    run.file.write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)


def check_again(runs: Sequence[Run], name: str, dtype: str) -> None:
    """Repeat a committed run and print the comparison of the curves."""
    run = next((run for run in runs if run.file.stem == name and run.file.is_file()), None)
    if run is None:
        raise ConfigError(f"--check: {name}: no committed run of this table (one of ROW-SEED that is)")
    old = json.loads(run.file.read_text(encoding="utf-8"))
    folder = run.folder.parent / "check"
    shutil.rmtree(folder, ignore_errors=True)
    new = train(run.row, [*run.settings, f"steps={len(old['steps'])}"], run.seed, folder, dtype)
    print(f"{name}: {check(old, new)}")


def write_up(table: Table, runs: Sequence[Run], tried: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Plot and tabulate the existing curves. tried: from `tune`."""
    rows: dict[str, list[Curve]] = {}
    for run in runs:
        if run.file.is_file():
            curve = json.loads(run.file.read_text(encoding="utf-8"))
            rows.setdefault(run.row, []).append(held_out.truncate(curve, table.steps))
    for row in tried.keys() & rows.keys():
        seconds = held_out.take_minimum([*tried[row].values(), *map(held_out.measure_seconds, rows[row])])
        rows[row] = [held_out.replace_seconds(curve, seconds) for curve in rows[row]]
    if not rows:
        return
    if table.name == "recipes":
        held_out.draw_curves([curve for curves in rows.values() for curve in curves], out)
    else:
        held_out.draw_table(rows, out / f"{table.name}.png", table.equal)
    table_text = held_out.format_table(rows, minutes=bool(tried), equal=table.equal)
    (out / f"{table.name}.md").write_text(table_text, encoding="utf-8")
    print(f"\n{table_text}\nwritten, with its pictures, to {out}")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--table", choices=("recipes", "methods", "vapo"), default="recipes")
    parser.add_argument("--rows", nargs="*", default=(), help="rows of the table; default: all")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--tune", action="store_true", help="find the rows' learning rates, and stop")
    parser.add_argument("--hours", type=float, help="start no run after so many hours")
    parser.add_argument("--check", metavar="ROW-SEED", help="repeat a committed run and compare")
    parser.add_argument("--gsm8k", metavar="FILE", type=Path, help="answer it before and after each run")
    parser.add_argument("--figures", action="store_true", help="plot the existing curves, and run nothing")
    return parser.parse_args()


def results(given: argparse.Namespace) -> None:
    """Tune, check one run, or make a table's missing runs and its figures."""
    end = math.inf if given.hours is None else time.time() + 3600 * given.hours
    out = ROOT / "docs" / "evidence" / "results" / given.model
    table, tuned_file = read_table(given.model, given.table, given.rows), out / "tuned.json"
    table.curves.mkdir(parents=True, exist_ok=True)
    if not given.figures:
        megarl("demo", "--model", given.model, "--data-only")
        dtype = precision(table.curves)
    if given.tune:
        return tune(table, tuned_file, dtype, end)
    results_by_row: dict[str, Any] = {}
    if given.table == "methods":
        results_by_row = json.loads(tuned_file.read_text(encoding="utf-8")) if tuned_file.is_file() else {}
        if missing := [row for row in table.rows if len(results_by_row.get(row, ())) < len(RATES)]:
            raise ConfigError(
                f"{missing[0]}: its learning rate is not tuned. Run --tune first ({tuned_file})."
            )
    runs = [*table.runs(given.seeds, {row: best_rate(rates) for row, rates in results_by_row.items()})]
    if given.check:
        return check_again(runs, given.check, dtype)
    for run in () if given.figures else runs:
        if run.file.is_file():
            continue
        if time.time() > end:
            print(f"{run.file.stem} and later runs are left: --hours have passed")
            break
        make(run, given.model, dtype, given.gsm8k)
    write_up(table, runs, results_by_row, out)


def main() -> int:
    try:
        results(arguments())
    except MegarlError as error:
        print(f"results: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
