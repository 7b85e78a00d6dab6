#!/usr/bin/env python
"""Held-out curves of a pretrained model under VAPO, DAPO, GRPO and PPO, several seeds each: the runs, one
after the other, and their figures.

    make results MODEL=smollm2                        # all that is missing
    make results MODEL=smollm2 ARGS='--hours 2'       # begin no run after two hours; the same command goes on
    make results MODEL=smollm2 ARGS='--check vapo-1'  # a run again, beside the curve that is committed
    make results MODEL=smollm2 ARGS='--figures'       # the figures alone, of the curves that are there
    make results MODEL=smollm2 ARGS='--gsm8k FILE'    # GSM8K's problems too, before and after each run

A run that was interrupted goes on from its checkpoint. A finished one is written to docs/results/MODEL as one
JSON file: command, versions, processor, every evaluation with its 95 % intervals, every step's figures.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from megarl.algorithms.evaluation import interval
from megarl.config.errors import ConfigError, MegarlError
from megarl.observe.run_log import ANSWERS_FILE
from megarl.observe.runs import read_jsonl, read_metrics
from megarl.parallel.machine import cores, matrix_rates
from megarl.schedule.preflight import versions
from megarl_report import plots

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("smollm2",)
RECIPES, SEEDS = ("vapo", "dapo", "grpo", "ppo"), (1, 2, 3)
STEP = (  # figures of a step that are kept
    *("reward/accuracy", "reward/score", "response/length_mean", "policy/entropy", "policy/grad_norm"),
    *("policy/clip_fraction_low", "policy/clip_fraction_high", "value/explained_variance", "time/step"),
)
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


def megarl(*arguments: str | Path) -> list[str]:
    """Run a command of megarl in the repository's root, its output to this terminal; return the command.
    Raises ConfigError where it fails."""
    command = [sys.executable, "-m", "megarl", *map(str, arguments)]
    if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise ConfigError(f"{' '.join(command[2:])}: ended with exit code {code} (what it said is above)")
    return command[2:]


def train(model: str, recipe: str, seed: int, run_dir: Path, dtype: str) -> dict[str, Any]:
    """Run, or go on with, one run; return its curve."""
    arguments = [
        f"configs/results/{model}_{recipe}.yaml",
        f"seed={seed}",
        f"run_dir={run_dir.relative_to(ROOT)}",
    ]
    command = megarl("train", *arguments, f"model.dtype={dtype}")
    return {
        "recipe": recipe,
        "seed": seed,
        "command": " ".join(command),
        "processor": processor(),
        "dtype": dtype,
        "versions": versions(),
        "evaluations": list(evaluations(run_dir)),
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


def draw(curves: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draw the held-out curves of FIGURES: of each recipe the mean of its seeds, and each seed thin."""
    for name, (of, title) in FIGURES.items():
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for recipe, colour in zip(RECIPES, plots.COLOURS, strict=False):
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
        axes.set(title=title, xlabel="rollout steps", ylim=(0, 1))
        axes.grid(color=plots.GRID)
        axes.legend()
        figure.savefig(folder / f"{name}.png", dpi=150)
        print(folder / f"{name}.png")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=RECIPES)
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--hours", type=float, help="begin no run after so many")
    parser.add_argument("--check", metavar="RECIPE-SEED", help="do one that is committed again")
    parser.add_argument("--gsm8k", metavar="FILE", type=Path, help="answer its problems before and after")
    parser.add_argument("--figures", action="store_true", help="draw what is there, and run nothing")
    given = parser.parse_args()
    committed, runs = ROOT / "docs" / "results" / given.model, ROOT / "runs" / "results" / given.model
    committed.mkdir(parents=True, exist_ok=True)
    files = {(r, s): committed / f"{r}-{s}.json" for s in given.seeds for r in given.recipes}
    try:
        if not given.figures:
            megarl("demo", "--model", given.model, "--data-only")
            rates = matrix_rates(min(2, cores()))
            dtype = "bf16" if rates["bf16"] > 2 * rates["fp32"] else "fp32"
        if given.check:
            recipe, _, seed = given.check.partition("-")
            path = committed / f"{given.check}.json"
            if not path.is_file():
                raise ConfigError(f"--check: {path} is not there (one of RECIPE-SEED that is)")
            shutil.rmtree(runs / "check", ignore_errors=True)
            again = train(given.model, recipe, int(seed), runs / "check", dtype)
            print(f"{given.check}: {check(json.loads(path.read_text(encoding='utf-8')), again)}")
            return 0
        begun = time.time()
        for (recipe, seed), path in files.items() if not given.figures else ():
            if path.is_file():
                continue
            if given.hours is not None and time.time() - begun > 3600 * given.hours:
                print(f"{recipe}-{seed} and what follows is left: --hours {given.hours:g} have passed")
                break
            print(f"\n{recipe}, seed {seed}", flush=True)
            run_dir = runs / f"{recipe}-{seed}"
            curve = train(given.model, recipe, seed, run_dir, dtype)
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
    curves = [json.loads(path.read_text(encoding="utf-8")) for path in files.values() if path.is_file()]
    if curves:
        draw(curves, committed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
