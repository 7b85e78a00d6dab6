#!/usr/bin/env python
"""Held-out curves of a pretrained model under several recipes, with several seeds each: the runs, one after
the other, their figures, and tables that compare them.

    make results MODEL=smollm2                        # VAPO, DAPO, GRPO, PPO: all that is missing
    make results MODEL=smollm2 TABLE=vapo             # VAPO without one of its techniques at a time
    make results MODEL=smollm2 TABLE=methods ARGS=--tune    # look for the learning rates of nine methods
    make results MODEL=smollm2 TABLE=methods          # the nine methods, each with its own
    make results MODEL=smollm2 ARGS='--hours 2'       # begin no run after two hours; the same command goes on
    make results MODEL=smollm2 ARGS='--check vapo-1'  # a run again, beside the curve that is committed
    make results MODEL=smollm2 ARGS='--figures'       # the figures alone, of the curves that are there
    make results MODEL=smollm2 ARGS='--gsm8k FILE'    # GSM8K's problems too, before and after each run

An interrupted run continues from its checkpoint. A finished run is written to docs/evidence/results/MODEL as
one JSON file; a table with settings of its own has a folder there. The file has the command, versions, the
processor, every evaluation with its 95 % intervals and the figures of every step. The rows of the tables are
in configs/results/MODEL.table.yaml.
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
RATES = (5e-6, 1e-5, 2e-5)  # learning rates of the actor that --tune tries, on a seed that no table counts
TUNING = ("checkpoint.every=0", "checkpoint.export_hf=false")


@dataclass(frozen=True)
class Run:
    """A run of a table: its row and seed, its configuration with what is set over it, its own folder, and the
    file in which its curve is committed."""

    row: str
    seed: int
    settings: Sequence[str]
    folder: Path
    file: Path


@dataclass(frozen=True)
class Table:
    """A table of configs/results/MODEL.table.yaml: its rows, with their settings; how many steps count, and
    where rows are judged; where curves are committed, and where runs are made."""

    name: str
    rows: Mapping[str, Sequence[str]]
    steps: int
    equal: str
    kept: Path
    folder: Path
    longer: Mapping[str, int]  # rows of which a longer run is shared with another table -> its steps

    def runs(self, seeds: Sequence[int], rates: Mapping[str, float]) -> Iterator[Run]:
        """Yield the runs, seed by seed. rates: learning rates that were found for rows; a row whose
        configuration has another has runs of its own."""
        for seed in seeds:
            for row, settings in self.rows.items():
                name, more = f"{row}-{seed}", [f"steps={self.longer.get(row, self.steps)}"]
                rate = rates.get(row)
                if rate is not None and rate != load_config(ROOT / settings[0], settings[1:]).actor.lr:
                    name, more = f"{row}-{rate:g}-{seed}", [f"steps={self.steps}", f"actor.lr={rate:g}"]
                yield Run(row, seed, [*settings, *more], self.folder / name, self.kept / f"{name}.json")


def read_table(model: str, name: str, only: Sequence[str]) -> Table:
    """Read a table. only: rows that are asked for; none: all. Raises ConfigError where one is none of it."""
    listed = read_yaml(ROOT / "configs" / "results" / f"{model}.table.yaml")
    table, whole = listed["tables"][name], listed["tables"]["recipes"]
    if unknown := {*only} - {*table["rows"]}:
        raise ConfigError(f"--rows: {min(unknown)}: no such row (one of {', '.join(table['rows'])})")
    over = table.get("settings", [])  # with some, its runs are not those of the other tables
    rows = {}
    for row in only or table["rows"]:
        path, *settings = listed["rows"][row]
        rows[row] = [f"configs/results/{path}", *over, *settings]
    kept, folder = ROOT / "docs" / "evidence" / "results" / model, ROOT / "runs" / "results" / model
    own = name if over else ""
    longer = {} if over else dict.fromkeys(whole["rows"], whole["steps"])
    return Table(name, rows, table["steps"], table["equal"], kept / own, folder / own, longer)


def processor() -> str:
    """Return the processor's name: bits depend on it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine()
    )


def precision(committed: Path) -> str:
    """Return the precision of the committed runs, which the runs of a table share; where there is none yet,
    bf16 on a processor that multiplies it more than twice as fast as fp32, else fp32. A processor that is
    slow in it is named."""
    rates = matrix_rates(min(2, cores()))
    for path in sorted(committed.glob("*-*.json")):
        shared = str(json.loads(path.read_text(encoding="utf-8"))["dtype"])
        if rates[shared] < max(rates.values()) / 4:
            said = ", ".join(f"{rate:.0f} GFLOP/s a core in {dtype}" for dtype, rate in rates.items())
            print(f"the committed runs are {shared}, in which this processor is slow ({said}): take another")
        return shared
    return "bf16" if rates["bf16"] > 2 * rates["fp32"] else "fp32"


def megarl(*arguments: str | Path) -> list[str]:
    """Run a command of megarl in the repository's root, its output to this terminal; return the command.
    Raises ConfigError where it fails."""
    command = [sys.executable, "-m", "megarl", *map(str, arguments)]
    if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise ConfigError(f"{' '.join(command[2:])}: ended with exit code {code} (what it said is above)")
    return command[2:]


def train(row: str, given: Sequence[str], seed: int, run_dir: Path, dtype: str) -> dict[str, Any]:
    """Run, or go on with, one run; return its curve. given: a configuration and what is set over it."""
    own = [f"seed={seed}", f"run_dir={run_dir.relative_to(ROOT)}", f"model.dtype={dtype}"]
    command = megarl("train", *given, *own)
    return {
        "recipe": row,
        "seed": seed,
        "command": " ".join(command),
        "processor": processor(),
        "dtype": dtype,
        "versions": versions(),
        "evaluations": list(held_out.evaluations(run_dir)),
        "value_pretraining": held_out.value_pretraining(run_dir),
        "steps": list(held_out.steps(run_dir)),
    }


def gsm8k(model: str, problems: Path, weights: Path, out: Path, dtype: str) -> dict[str, Any]:
    """Answer GSM8K's problems, once; return how many are right, with a 95 % interval."""
    config = f"configs/results/{model}_gsm8k.yaml"
    if not (out / "scores.json").is_file():
        where = [f"data.eval=[{problems.resolve()}]", f"model.dtype={dtype}"]
        megarl("eval", config, *where, "--checkpoint", weights, "--out", out)
    found = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    score = found["scores"]["avg@1"]
    right = {"right": score["mean"], "low": score["low"], "high": score["high"]}
    return {"problems": found["problems"], **right}


def check(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return how a run that was done again stands to a committed curve. Raises ConfigError where it is
    another."""
    alike = old["processor"] == new["processor"] and old["dtype"] == new["dtype"]
    if alike and old["versions"] == new["versions"]:
        if old["evaluations"] != new["evaluations"]:
            raise ConfigError(f"{old['recipe']}-{old['seed']}: another curve on the same kind of processor")
        return "equal to the last digit"
    for theirs, ours in zip(old["evaluations"], new["evaluations"], strict=True):
        if ours["low"] > theirs["high"] or ours["high"] < theirs["low"]:
            where = f"step {ours['step']}, {ours['of']}: {ours['right']:.3f} beside {theirs['right']:.3f}"
            raise ConfigError(f"{old['recipe']}-{old['seed']}: {where}: the intervals do not meet")
    return f"within its intervals ({new['processor']}, {new['dtype']}; committed: {old['processor']})"


def tune(table: Table, found: Path, dtype: str, end: float) -> None:
    """Try RATES with each row, for as many steps as the table has, and write to `found` what decides, the
    accuracy of the evaluations after the start, with the median of the seconds of a step and those of value
    pretraining. end: of time.time(), after which no run begins."""
    tried = json.loads(found.read_text("utf-8")) if found.is_file() else {}
    for row, given in table.rows.items():
        for rate in RATES:
            if f"{rate:g}" in tried.get(row, {}):
                continue
            if time.time() > end:
                print(f"{row} at {rate:g} and what follows is left: --hours have passed")
                return
            print(f"\n{row}, learning rate {rate:g}", flush=True)
            folder = table.folder / "tuning" / f"{row}-{rate:g}"
            shutil.rmtree(folder, ignore_errors=True)  # without checkpoints a run is whole or begins anew
            settings = [*given, f"steps={table.steps}", f"actor.lr={rate:g}", *TUNING]
            curve = train(row, settings, 0, folder, dtype)
            right = [each["right"] for each in curve["evaluations"] if each["of"] == "all" and each["step"]]
            tried.setdefault(row, {})[f"{rate:g}"] = {"right": right, **held_out.seconds(curve)}
            found.write_text(json.dumps(tried, indent=1) + "\n", encoding="utf-8")
            shutil.rmtree(folder / "critic_pretrained", ignore_errors=True)


def best_rate(tried: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the learning rate with the highest accuracy; of equals the lowest."""
    return max(sorted(map(float, tried)), key=lambda rate: fmean(tried[f"{rate:g}"]["right"]))


def make(run: Run, model: str, dtype: str, problems: Path | None) -> None:
    """Make a run, or go on with it, and write its curve. problems: GSM8K's, answered before and after too."""
    print(f"\n{run.row}, seed {run.seed}", flush=True)
    curve = train(run.row, run.settings, run.seed, run.folder, dtype)
    if problems:
        before, after = ROOT / "runs" / model / "model", run.folder / "hf"
        curve["gsm8k"] = {
            "before": gsm8k(model, problems, before, run.folder.parent / "gsm8k", dtype),
            "after": gsm8k(model, problems, after, run.folder / "gsm8k", dtype),
        }
    run.file.write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)


def check_again(runs: Sequence[Run], name: str, dtype: str) -> None:
    """Do a committed run again, as long as it was, and print how the curves stand to each other."""
    run = next((run for run in runs if run.file.stem == name and run.file.is_file()), None)
    if run is None:
        raise ConfigError(f"--check: {name}: no committed run of this table (one of ROW-SEED that is)")
    old = json.loads(run.file.read_text(encoding="utf-8"))
    folder = run.folder.parent / "check"
    shutil.rmtree(folder, ignore_errors=True)
    again = train(run.row, [*run.settings, f"steps={len(old['steps'])}"], run.seed, folder, dtype)
    print(f"{name}: {check(old, again)}")


def write_up(table: Table, runs: Sequence[Run], tried: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Draw and write the table of the curves that are there. tried: see `tune`."""
    rows: dict[str, list[Curve]] = {}
    for run in runs:
        if run.file.is_file():
            curve = json.loads(run.file.read_text(encoding="utf-8"))
            rows.setdefault(run.row, []).append(held_out.first_steps(curve, table.steps))
    for row in tried.keys() & rows.keys():
        took = held_out.quickest([*tried[row].values(), *map(held_out.seconds, rows[row])])
        rows[row] = [held_out.timed(curve, took) for curve in rows[row]]
    if not rows:
        return
    if table.name == "recipes":
        held_out.draw_curves([curve for curves in rows.values() for curve in curves], out)
    else:
        held_out.draw_table(rows, out / f"{table.name}.png", table.equal)
    written = held_out.table(rows, minutes=bool(tried), equal=table.equal)
    (out / f"{table.name}.md").write_text(written, encoding="utf-8")
    print(f"\n{written}\nwritten, with its pictures, to {out}")


def arguments() -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--table", choices=("recipes", "methods", "vapo"), default="recipes")
    parser.add_argument("--rows", nargs="*", default=(), help="some of the table's; default: all")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument(
        "--tune", action="store_true", help="look for the rows' learning rates, and run no more"
    )
    parser.add_argument("--hours", type=float, help="begin no run after so many")
    parser.add_argument("--check", metavar="ROW-SEED", help="do one that is committed again")
    parser.add_argument("--gsm8k", metavar="FILE", type=Path, help="answer its problems before and after")
    parser.add_argument("--figures", action="store_true", help="draw what is there, and run nothing")
    return parser.parse_args()


def results(given: argparse.Namespace) -> None:
    """Look for learning rates, do one run again, or make what is missing of a table and write it up."""
    end = math.inf if given.hours is None else time.time() + 3600 * given.hours
    out = ROOT / "docs" / "evidence" / "results" / given.model
    table, tuned = read_table(given.model, given.table, given.rows), out / "tuned.json"
    table.kept.mkdir(parents=True, exist_ok=True)
    if not given.figures:
        megarl("demo", "--model", given.model, "--data-only")
        dtype = precision(table.kept)
    if given.tune:
        return tune(table, tuned, dtype, end)
    tried: dict[str, Any] = {}
    if given.table == "methods":
        tried = json.loads(tuned.read_text(encoding="utf-8")) if tuned.is_file() else {}
        if missing := [row for row in table.rows if len(tried.get(row, ())) < len(RATES)]:
            raise ConfigError(f"{missing[0]}: its learning rate is not known ({tuned}: run --tune first)")
    runs = [*table.runs(given.seeds, {row: best_rate(rates) for row, rates in tried.items()})]
    if given.check:
        return check_again(runs, given.check, dtype)
    for run in () if given.figures else runs:
        if run.file.is_file():
            continue
        if time.time() > end:
            print(f"{run.file.stem} and what follows is left: --hours have passed")
            break
        make(run, given.model, dtype, given.gsm8k)
    write_up(table, runs, tried, out)


def main() -> int:
    try:
        results(arguments())
    except MegarlError as error:
        print(f"results: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
