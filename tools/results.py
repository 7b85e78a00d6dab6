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

A run that was interrupted goes on from its checkpoint. A finished one is written to docs/results/MODEL as one
JSON file: command, versions, processor, every evaluation with its 95 % intervals, every step's figures. The
rows of the tables are in configs/results/MODEL.table.yaml.
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
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from megarl.algorithms.scores import interval
from megarl.config import load_config
from megarl.config.errors import ConfigError, MegarlError
from megarl.config.load import read_yaml
from megarl.observe.run_log import ANSWERS_FILE
from megarl.observe.runs import read_jsonl, read_metrics
from megarl.parallel.machine import cores, matrix_rates
from megarl.schedule.preflight import versions
from megarl_experiments.result import Comparison, compare, corrected, score_text
from megarl_report import plots

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("smollm2",)
SEEDS = (1, 2, 3)
RATES = (5e-6, 1e-5, 2e-5)  # learning rates of the actor that --tune tries, on a seed that no table counts
TUNING = ("checkpoint.every=0", "checkpoint.export_hf=false")
STEP = (  # figures of a step that are kept
    *("reward/accuracy", "reward/score", "response/length_mean", "policy/entropy", "policy/grad_norm"),
    *("policy/clip_fraction_low", "policy/clip_fraction_high", "value/explained_variance"),
    *("rollout/tokens", "time/step"),
)
SPENT = ("rollout/tokens", "time/step")
FIGURES = {  # file -> the set of problems, title
    "held_out": ("all", "Right answers, held-out problems of the tasks that are trained on"),
    "transfer": ("basic_arithmetic", "Right answers, basic_arithmetic, which is never trained on"),
}


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
        "evaluations": list(evaluations(run_dir)),
        "value_pretraining": value_pretraining(run_dir),
        "steps": list(steps(run_dir)),
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


def evaluations(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield, for each evaluation and set of problems, how many are right, with a 95 % interval; for each task
    of the set too."""
    found: dict[tuple[int, str], list[float]] = {}
    for answer in read_jsonl(run_dir / ANSWERS_FILE, lambda record: "step" in record).records:
        for name in {answer.get("set") or "all", answer.get("data_source") or "all"}:
            found.setdefault((answer["step"], name), []).append(float(answer["correct"]))
    for (step, name), right in sorted(found.items()):
        low, high = interval(right, 1)
        of = {"step": step, "of": name, "problems": len(right)}
        yield {**of, "right": fmean(right), "low": low, "high": high}


def steps(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield what is kept of each step of training."""
    for record in read_metrics(run_dir).records:
        if record["stage"] == "train":
            yield {"step": record["step"], **{name: record[name] for name in STEP if name in record}}


def value_pretraining(run_dir: Path) -> dict[str, float]:
    """Return what a critic's pretraining has drawn and how long it took."""
    records = [r for r in read_metrics(run_dir).records if r["stage"] == "value_pretraining"]
    return {what: sum(record[what] for record in records) for what in SPENT}


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


def tune(
    rows: Mapping[str, Sequence[str]], steps: int, runs: Path, found: Path, dtype: str, end: float
) -> None:
    """Try RATES with each row, for as many steps as the table has, and write to `found` what decides, the
    accuracy of the evaluations after the start, with the median of the seconds of a step and those of value
    pretraining. end: of time.time(), after which no run begins."""
    tried = json.loads(found.read_text("utf-8")) if found.is_file() else {}
    for row, given in rows.items():
        for rate in RATES:
            if f"{rate:g}" in tried.get(row, {}):
                continue
            if time.time() > end:
                print(f"{row} at {rate:g} and what follows is left: --hours have passed")
                return
            print(f"\n{row}, learning rate {rate:g}", flush=True)
            run_dir = runs / "tuning" / f"{row}-{rate:g}"
            shutil.rmtree(run_dir, ignore_errors=True)  # without checkpoints a run is whole or begins anew
            curve = train(row, [*given, f"steps={steps}", f"actor.lr={rate:g}", *TUNING], 0, run_dir, dtype)
            right = [each["right"] for each in curve["evaluations"] if each["of"] == "all" and each["step"]]
            tried.setdefault(row, {})[f"{rate:g}"] = {"right": right, **seconds(curve)}
            found.write_text(json.dumps(tried, indent=1) + "\n", encoding="utf-8")
            shutil.rmtree(run_dir / "critic_pretrained", ignore_errors=True)


def best_rate(tried: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the learning rate with the highest accuracy; of equals the lowest."""
    return max(sorted(map(float, tried)), key=lambda rate: fmean(tried[f"{rate:g}"]["right"]))


def seconds(curve: Mapping[str, Any]) -> dict[str, float]:
    """Return the median of the seconds of a run's steps, and those of its value pretraining."""
    return {
        "step_seconds": median(step["time/step"] for step in curve["steps"]),
        "value_pretraining_seconds": curve["value_pretraining"]["time/step"],
    }


def quickest(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the least `seconds` of a row's runs: of that with the least work beside it."""
    return {what: min(run[what] for run in runs) for what in ("step_seconds", "value_pretraining_seconds")}


def first_steps(curve: Mapping[str, Any], last: int) -> dict[str, Any]:
    """Return a run's curve up to step `last`."""
    return {
        **curve,
        **{kept: [e for e in curve[kept] if e["step"] <= last] for kept in ("evaluations", "steps")},
    }


def until(curve: Mapping[str, Any], what: str) -> tuple[list[float], list[float]]:
    """Return what a run had spent at each of its evaluations, in total, and its accuracy there.
    what: one of SPENT."""
    points = [each for each in curve["evaluations"] if each["of"] == "all"]
    before = curve["value_pretraining"][what]
    steps = [[s[what] for s in curve["steps"] if s["step"] <= each["step"]] for each in points]
    spent = [before * (each["step"] > 0) + sum(some) for each, some in zip(points, steps, strict=True)]
    return spent, [each["right"] for each in points]


def timed(curve: Mapping[str, Any], took: Mapping[str, float]) -> dict[str, Any]:
    """Return a curve whose steps took as long as those of the `quickest` of its row: a run's own seconds tell
    what else ran beside it."""
    pretraining = {**curve["value_pretraining"], "time/step": took["value_pretraining_seconds"]}
    steps = [{**step, "time/step": took["step_seconds"]} for step in curve["steps"]]
    return {**curve, "value_pretraining": pretraining, "steps": steps}


def at_equal(
    curves: Mapping[str, Sequence[dict[str, Any]]], what: str
) -> tuple[float, dict[str, dict[int, float]]]:
    """Return the least that a run has spent, and row -> seed -> accuracy where it had spent that, between
    evaluations on a straight line. what: one of SPENT. Curves of 2026-11-24 do not say what they spent, and
    are left out."""
    full = {row: [curve for curve in runs if "value_pretraining" in curve] for row, runs in curves.items()}
    spent = {row: {run["seed"]: until(run, what) for run in runs} for row, runs in full.items()}
    least = min((points[-1] for runs in spent.values() for points, _ in runs.values()), default=0.0)
    return least, {
        row: {seed: float(np.interp(least, *points)) for seed, points in runs.items()}
        for row, runs in spent.items()
    }


def at_the_end(runs: Sequence[dict[str, Any]], of: str = "all") -> dict[int, float]:
    """Return seed -> accuracy of a row's runs in their last evaluation."""
    return {
        run["seed"]: [each["right"] for each in run["evaluations"] if each["of"] == of][-1] for run in runs
    }


def judged(
    curves: Mapping[str, Sequence[dict[str, Any]]], equal: str
) -> tuple[str, dict[str, dict[int, float]]]:
    """Return where rows are compared, in words, and row -> seed -> accuracy there.
    equal: "tokens", or "steps" for the last step, whatever was drawn until then."""
    if equal == "steps":
        return "after the last step", {row: at_the_end(runs) for row, runs in curves.items()}
    tokens, found = at_equal(curves, "rollout/tokens")
    return f"at {tokens / 1000:.1f}k tokens", found


def differences(scores: Mapping[str, Mapping[int, float]]) -> dict[str, Comparison]:
    """Return row -> its difference to the first row, paired by seed, corrected after Holm over the rows."""
    first, *others = scores
    compared = {row: compare(scores[row], scores[first], first) for row in others}
    known = {row: found for row, found in compared.items() if found is not None}
    return dict(zip(known, corrected([*known.values()]), strict=True))


def table(
    curves: Mapping[str, Sequence[dict[str, Any]]], *, minutes: bool = False, equal: str = "tokens"
) -> str:
    """Return a Markdown table of rows, each with its runs: accuracy at the end, where all have drawn as many
    tokens, and (`minutes`) where all have taken as long; and the difference to the first row where they are
    judged (`equal`), with the 95 % interval of the paired t-test over seeds."""
    tokens, at_tokens = at_equal(curves, "rollout/tokens")
    seconds, at_seconds = at_equal(curves, "time/step")
    where, scores = judged(curves, equal)
    found = differences(scores)
    heads = [
        "",
        "after the last step",
        f"at {tokens / 1000:.1f}k tokens",
        *([f"at {seconds / 60:.1f} minutes"] if minutes else ()),
        f"difference to {next(iter(curves))} {where}",
        "verdict",
        "held-out family",
    ]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row, runs in curves.items():
        one = found.get(row)
        interval = "" if one is None or one.low is None else f" [{one.low:+.3f}, {one.high:+.3f}]"
        cells = [
            row.replace("_", " "),
            score_text(at_the_end(runs)),
            score_text(at_tokens[row]),
            *([score_text(at_seconds[row])] if minutes else ()),
            "" if one is None else f"{one.mean:+.3f}{interval}",
            "" if one is None else one.verdict,
            score_text(at_the_end(runs, "basic_arithmetic")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_table(curves: Mapping[str, Sequence[dict[str, Any]]], path: Path, equal: str = "tokens") -> None:
    """Draw each row's accuracy over the tokens drawn, mean of its seeds; beside it each seed where rows are
    judged (`equal`), and the difference to the first row there with its 95 % interval."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    over, each, apart = figure.subplots(1, 3, width_ratios=(3, 2, 2))
    where, scores = judged(curves, equal)
    compared = differences(scores)
    names = [row.replace("_", " ") for row in curves]
    for number, (row, runs) in enumerate(curves.items()):
        full = [until(curve, "rollout/tokens") for curve in runs if curve["seed"] in scores[row]]
        if not full:
            continue
        spent, right = np.mean(full, axis=0)
        style = {"color": plots.COLOURS[number % len(plots.COLOURS)], "linewidth": 1.5}
        dashes = "-" if number < len(plots.COLOURS) else "--"
        over.plot(spent / 1000, right, dashes, label=f"{names[number]} ({len(full)})", **style)
        own = [*scores[row].values()]
        each.plot(own, [number] * len(own), "o", color=style["color"], alpha=0.5, markersize=4)
        each.plot(fmean(own), number, "|", color=style["color"], markersize=16)
    for number, row in enumerate(curves):
        if (found := compared.get(row)) and found.low is not None and found.high is not None:
            reach = [[found.mean - found.low], [found.high - found.mean]]
            apart.errorbar(found.mean, number, xerr=reach, fmt="o", color=plots.INK, markersize=4, capsize=3)
    over.set(xlabel="thousand tokens drawn", ylabel="right answers, held-out problems", ylim=(0, None))
    over.legend(fontsize=7)
    each.set(xlabel=f"each seed and the mean, {where}")
    apart.set(xlabel=f"difference to {names[0]}, 95 % interval")
    apart.axvline(0, color=plots.MUTED, linewidth=0.8)
    for axes, labels in ((each, names), (apart, [""] * len(names))):
        axes.set(ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)), yticklabels=labels)
    for axes in (over, each, apart):
        axes.grid(color=plots.GRID)
    figure.savefig(path, dpi=150)
    print(path)


def draw(curves: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draw the held-out curves of FIGURES: of each recipe the mean of its seeds, and each seed thin."""
    for name, (of, title) in FIGURES.items():
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for recipe, colour in zip(dict.fromkeys(c["recipe"] for c in curves), plots.COLOURS, strict=False):
            seeds = [
                {each["step"]: each["right"] for each in curve["evaluations"] if each["of"] == of}
                for curve in curves
                if curve["recipe"] == recipe
            ]
            if not seeds:
                continue
            for points in seeds:
                axes.plot(list(points), list(points.values()), color=colour, linewidth=0.7, alpha=0.5)
            shared = sorted(set.intersection(*map(set, seeds)))
            mean = [fmean(points[step] for points in seeds) for step in shared]
            axes.plot(shared, mean, color=colour, linewidth=2, label=f"{recipe.upper()}, {len(seeds)} seeds")
        axes.set(title=title, xlabel="rollout steps", ylim=(0, None))
        axes.grid(color=plots.GRID)
        axes.legend()
        figure.savefig(folder / f"{name}.png", dpi=150)
        print(folder / f"{name}.png")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--table", choices=("recipes", "methods", "vapo"), default="recipes")
    parser.add_argument("--rows", nargs="*", help="some of the table's; default: all")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument(
        "--tune", action="store_true", help="look for the rows' learning rates, and run no more"
    )
    parser.add_argument("--hours", type=float, help="begin no run after so many")
    parser.add_argument("--check", metavar="ROW-SEED", help="do one that is committed again")
    parser.add_argument("--gsm8k", metavar="FILE", type=Path, help="answer its problems before and after")
    parser.add_argument("--figures", action="store_true", help="draw what is there, and run nothing")
    given = parser.parse_args()
    configs = ROOT / "configs" / "results"
    committed, runs = ROOT / "docs" / "results" / given.model, ROOT / "runs" / "results" / given.model
    committed.mkdir(parents=True, exist_ok=True)
    kept, equal = committed, "tokens"
    tuned = committed / "tuned.json"
    end = math.inf if given.hours is None else time.time() + 3600 * given.hours
    tried: dict[str, Any] = {}
    try:
        listed = read_yaml(configs / f"{given.model}.table.yaml")
        asked = listed["tables"][given.table]
        names, last, equal, over = asked["rows"], asked["steps"], asked["equal"], asked.get("settings", [])
        if over:  # its runs are not those of the other tables
            runs, kept = runs / given.table, committed / given.table
            kept.mkdir(exist_ok=True)
        if unknown := {*(given.rows or ())} - {*names}:
            raise ConfigError(f"--rows: {min(unknown)}: no such row (one of {', '.join(names)})")
        rows = {
            row: [f"configs/results/{listed['rows'][row][0]}", *over, *listed["rows"][row][1:]]
            for row in given.rows or names
        }
        if not given.figures:
            megarl("demo", "--model", given.model, "--data-only")
            dtype = precision(kept)
        if given.tune:
            tune(rows, last, runs, tuned, dtype, end)
            return 0
        files = {(row, seed): kept / f"{row}-{seed}.json" for seed in given.seeds for row in rows}
        longer = {} if over else listed["tables"]["recipes"]
        shared = {f"{row}-{seed}" for row in longer.get("rows", ()) for seed in given.seeds}
        if given.table == "methods":
            tried = json.loads(tuned.read_text(encoding="utf-8")) if tuned.is_file() else {}
            for row, settings in rows.items():
                if len(tried.get(row, ())) < len(RATES):
                    raise ConfigError(f"{row}: its learning rate is not known ({tuned}: run --tune first)")
                rate = best_rate(tried[row])
                if rate != load_config(ROOT / settings[0], settings[1:]).actor.lr:
                    rows[row] = [*settings, f"actor.lr={rate:g}"]
                    files |= {(row, s): kept / f"{row}-{rate:g}-{s}.json" for s in given.seeds}
        if given.check:
            path = kept / f"{given.check}.json"
            if not path.is_file():
                raise ConfigError(f"--check: {path} is not there (one of ROW-SEED that is)")
            old = json.loads(path.read_text(encoding="utf-8"))
            shutil.rmtree(runs / "check", ignore_errors=True)
            settings = [*rows[old["recipe"]], f"steps={len(old['steps'])}"]
            again = train(old["recipe"], settings, old["seed"], runs / "check", dtype)
            print(f"{given.check}: {check(old, again)}")
            return 0
        for (row, seed), path in files.items() if not given.figures else ():
            if path.is_file():
                continue
            if time.time() > end:
                print(f"{path.stem} and what follows is left: --hours have passed")
                break
            print(f"\n{row}, seed {seed}", flush=True)
            run_dir = runs / path.stem
            length = longer["steps"] if path.stem in shared else last
            curve = train(row, [*rows[row], f"steps={length}"], seed, run_dir, dtype)
            if given.gsm8k:
                weights = {"before": ROOT / "runs" / given.model / "model", "after": run_dir / "hf"}
                outs = {"before": runs / "gsm8k", "after": run_dir / "gsm8k"}
                curve["gsm8k"] = {
                    when: gsm8k(given.model, given.gsm8k, weights[when], outs[when], dtype)
                    for when in weights
                }
            path.write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")
            shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    except MegarlError as error:
        print(f"results: {error}", file=sys.stderr)
        return error.code
    found: dict[str, list[dict[str, Any]]] = {}
    for (row, _), path in files.items():
        if path.is_file():
            curve = first_steps(json.loads(path.read_text(encoding="utf-8")), last)
            found.setdefault(row, []).append(curve)
    for row in tried.keys() & found.keys():
        took = quickest([*tried[row].values(), *map(seconds, found[row])])
        found[row] = [timed(curve, took) for curve in found[row]]
    if not found:
        return 0
    if given.table == "recipes":
        draw([curve for curves in found.values() for curve in curves], committed)
    else:
        draw_table(found, committed / f"{given.table}.png", equal)
    written = table(found, minutes=bool(tried), equal=equal)
    (committed / f"{given.table}.md").write_text(written, encoding="utf-8")
    print(f"\n{written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
