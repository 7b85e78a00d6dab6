"""Held-out curves of finished runs, as data that is committed: what is kept of a run, and rows of such runs
compared at equal cost, in a table and in pictures.

A curve is a dictionary, as JSON has it: recipe, seed, `evaluations` (step, of which problems, how many, right
and the 95 % interval), `value_pretraining` and `steps` with what each of them spent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from megarl.algorithms.scores import interval
from megarl.observe.run_log import ANSWERS_FILE
from megarl.observe.runs import read_jsonl, read_metrics
from megarl_experiments.result import Comparison, compare, corrected, score_text
from megarl_report import plots

Curve = Mapping[str, Any]
Rows = Mapping[str, Sequence[Curve]]  # name of a row -> its runs, one for each seed
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


def seconds(curve: Curve) -> dict[str, float]:
    """Return the median of the seconds of a run's steps, and those of its value pretraining."""
    return {
        "step_seconds": median(step["time/step"] for step in curve["steps"]),
        "value_pretraining_seconds": curve["value_pretraining"]["time/step"],
    }


def quickest(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the least `seconds` of a row's runs: of that with the least work beside it."""
    return {what: min(run[what] for run in runs) for what in ("step_seconds", "value_pretraining_seconds")}


def first_steps(curve: Curve, last: int) -> dict[str, Any]:
    """Return a run's curve up to step `last`."""
    return {
        **curve,
        **{kept: [e for e in curve[kept] if e["step"] <= last] for kept in ("evaluations", "steps")},
    }


def until(curve: Curve, what: str) -> tuple[list[float], list[float]]:
    """Return what a run had spent at each of its evaluations, in total, and its accuracy there.
    what: one of SPENT."""
    points = [each for each in curve["evaluations"] if each["of"] == "all"]
    before = curve["value_pretraining"][what]
    steps = [[s[what] for s in curve["steps"] if s["step"] <= each["step"]] for each in points]
    spent = [before * (each["step"] > 0) + sum(some) for each, some in zip(points, steps, strict=True)]
    return spent, [each["right"] for each in points]


def timed(curve: Curve, took: Mapping[str, float]) -> dict[str, Any]:
    """Return a curve whose steps took as long as those of the `quickest` of its row: a run's own seconds tell
    what else ran beside it."""
    pretraining = {**curve["value_pretraining"], "time/step": took["value_pretraining_seconds"]}
    steps = [{**step, "time/step": took["step_seconds"]} for step in curve["steps"]]
    return {**curve, "value_pretraining": pretraining, "steps": steps}


def at_equal(rows: Rows, what: str) -> tuple[float, dict[str, dict[int, float]]]:
    """Return the least that a run has spent, and row -> seed -> accuracy where it had spent that, between
    evaluations on a straight line. what: one of SPENT. Curves of 2026-11-24 do not say what they spent, and
    are left out."""
    full = {row: [run for run in runs if "value_pretraining" in run] for row, runs in rows.items()}
    spent = {row: {run["seed"]: until(run, what) for run in runs} for row, runs in full.items()}
    least = min((points[-1] for runs in spent.values() for points, _ in runs.values()), default=0.0)
    return least, {
        row: {seed: float(np.interp(least, *points)) for seed, points in runs.items()}
        for row, runs in spent.items()
    }


def at_the_end(runs: Sequence[Curve], of: str = "all") -> dict[int, float]:
    """Return seed -> accuracy of a row's runs in their last evaluation."""
    return {
        run["seed"]: [each["right"] for each in run["evaluations"] if each["of"] == of][-1] for run in runs
    }


def judged(rows: Rows, equal: str) -> tuple[str, dict[str, dict[int, float]]]:
    """Return where rows are compared, in words, and row -> seed -> accuracy there.
    equal: "tokens", or "steps" for the last step, whatever was drawn until then."""
    if equal == "steps":
        return "after the last step", {row: at_the_end(runs) for row, runs in rows.items()}
    tokens, found = at_equal(rows, "rollout/tokens")
    return f"at {tokens / 1000:.1f}k tokens", found


def differences(scores: Mapping[str, Mapping[int, float]]) -> dict[str, Comparison]:
    """Return row -> its difference to the first row, paired by seed, corrected after Holm over the rows."""
    first, *others = scores
    compared = {row: compare(scores[row], scores[first], first) for row in others}
    known = {row: found for row, found in compared.items() if found is not None}
    return dict(zip(known, corrected([*known.values()]), strict=True))


def table(rows: Rows, *, minutes: bool = False, equal: str = "tokens") -> str:
    """Return a Markdown table of rows, each with its runs: accuracy at the end, where all have drawn as many
    tokens, and (`minutes`) where all have taken as long; and the difference to the first row where they are
    judged (`equal`), with the 95 % interval of the paired t-test over seeds."""
    tokens, at_tokens = at_equal(rows, "rollout/tokens")
    seconds, at_seconds = at_equal(rows, "time/step")
    where, scores = judged(rows, equal)
    found = differences(scores)
    heads = [
        "",
        "after the last step",
        f"at {tokens / 1000:.1f}k tokens",
        *([f"at {seconds / 60:.1f} minutes"] if minutes else ()),
        f"difference to {next(iter(rows))} {where}",
        "verdict",
        "held-out family",
    ]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row, runs in rows.items():
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


def draw_table(rows: Rows, path: Path, equal: str = "tokens") -> None:
    """Draw each row's accuracy over the tokens drawn, mean of its seeds; beside it each seed where rows are
    judged (`equal`), and the difference to the first row there with its 95 % interval."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    over, each, apart = figure.subplots(1, 3, width_ratios=(3, 2, 2))
    where, scores = judged(rows, equal)
    compared = differences(scores)
    names = [row.replace("_", " ") for row in rows]
    for number, (row, runs) in enumerate(rows.items()):
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
    for number, row in enumerate(rows):
        if (found := compared.get(row)) and found.low is not None and found.high is not None:
            reach = [[found.mean - found.low], [found.high - found.mean]]
            apart.errorbar(found.mean, number, xerr=reach, fmt="o", color=plots.INK, markersize=4, capsize=3)
    over.set(xlabel="thousand tokens drawn", ylabel="right answers, held-out problems", ylim=(0, None))
    over.legend(fontsize=7)
    each.set(xlabel=f"each seed and the mean,\n{where}")
    apart.set(xlabel=f"difference to {names[0]},\n95 % interval")
    apart.axvline(0, color=plots.MUTED, linewidth=0.8)
    for axes, labels in ((each, names), (apart, [""] * len(names))):
        axes.set(ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)), yticklabels=labels)
    for axes in (over, each, apart):
        axes.grid(color=plots.GRID)
    figure.savefig(path, dpi=150)


def draw_curves(curves: Sequence[Curve], folder: Path) -> None:
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
