"""Compare held-out curves of finished runs at equal cost.

A curve is a JSON object: recipe, seed, `evaluations` (step, problem set, accuracy, 95 % interval),
`value_pretraining` and `steps` (tokens and seconds)."""

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
from megarl_experiments.result import Comparison, compare, correct_by_holm, score_text
from megarl_report import plots

Curve = Mapping[str, Any]
Rows = Mapping[str, Sequence[Curve]]  # row name -> a curve per seed
STEP = (  # a curve's metrics of a step
    *("reward/accuracy", "reward/score", "response/length_mean", "policy/entropy", "policy/grad_norm"),
    *("policy/clip_fraction_low", "policy/clip_fraction_high", "value/explained_variance"),
    *("rollout/tokens", "time/step"),
)
SPENT = ("rollout/tokens", "time/step")
FIGURES = {  # file -> problem set, title
    "held_out": ("all", "Right answers, held-out problems of the tasks that are trained on"),
    "transfer": ("basic_arithmetic", "Right answers, basic_arithmetic, which is never trained on"),
}


def read_evaluations(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the accuracy and 95 % interval of each evaluation, problem set and task."""
    answers: dict[tuple[int, str], list[float]] = {}
    for answer in read_jsonl(run_dir / ANSWERS_FILE, lambda record: "step" in record).records:
        for name in {answer.get("set") or "all", answer.get("data_source") or "all"}:
            answers.setdefault((answer["step"], name), []).append(float(answer["correct"]))
    for (step, name), right in sorted(answers.items()):
        low, high = interval(right, 1)
        of = {"step": step, "of": name, "problems": len(right)}
        yield {**of, "right": fmean(right), "low": low, "high": high}


def read_steps(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the STEP metrics of each training step."""
    for record in read_metrics(run_dir).records:
        if record["stage"] == "train":
            yield {"step": record["step"], **{name: record[name] for name in STEP if name in record}}


def read_value_pretraining(run_dir: Path) -> dict[str, float]:
    """Return the tokens and seconds of value pretraining."""
    records = [r for r in read_metrics(run_dir).records if r["stage"] == "value_pretraining"]
    return {metric: sum(record[metric] for record in records) for metric in SPENT}


def measure_seconds(curve: Curve) -> dict[str, float]:
    """Return the median seconds of a step, and those of value pretraining."""
    return {
        "step_seconds": median(step["time/step"] for step in curve["steps"]),
        "value_pretraining_seconds": curve["value_pretraining"]["time/step"],
    }


def take_minimum(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the smallest seconds of a row's runs, which other load disturbed least."""
    return {name: min(run[name] for run in seconds) for name in ("step_seconds", "value_pretraining_seconds")}


def truncate(curve: Curve, last: int) -> dict[str, Any]:
    """Return a curve up to step `last`."""
    return {
        **curve,
        **{part: [e for e in curve[part] if e["step"] <= last] for part in ("evaluations", "steps")},
    }


def accumulate(curve: Curve, metric: str) -> tuple[list[float], list[float]]:
    """Return the total of `metric` up to each evaluation, and the accuracy there."""
    points = [each for each in curve["evaluations"] if each["of"] == "all"]
    before = curve["value_pretraining"][metric]
    steps = [[s[metric] for s in curve["steps"] if s["step"] <= each["step"]] for each in points]
    spent = [before * (each["step"] > 0) + sum(some) for each, some in zip(points, steps, strict=True)]
    return spent, [each["right"] for each in points]


def replace_seconds(curve: Curve, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return a curve with the `take_minimum` seconds of its row."""
    pretraining = {**curve["value_pretraining"], "time/step": seconds["value_pretraining_seconds"]}
    steps = [{**step, "time/step": seconds["step_seconds"]} for step in curve["steps"]]
    return {**curve, "value_pretraining": pretraining, "steps": steps}


def score_at_equal_cost(rows: Rows, metric: str) -> tuple[float, dict[str, dict[int, float]]]:
    """Return the smallest final total of `metric` over runs, and row -> seed -> accuracy there.

    The accuracy is interpolated linearly. Old curves without costs are left out."""
    full = {row: [run for run in runs if "value_pretraining" in run] for row, runs in rows.items()}
    spent = {row: {run["seed"]: accumulate(run, metric) for run in runs} for row, runs in full.items()}
    least = min((points[-1] for runs in spent.values() for points, _ in runs.values()), default=0.0)
    return least, {
        row: {seed: float(np.interp(least, *points)) for seed, points in runs.items()}
        for row, runs in spent.items()
    }


def score_at_end(runs: Sequence[Curve], of: str = "all") -> dict[int, float]:
    """Return seed -> accuracy of the last evaluation on set `of`."""
    return {
        run["seed"]: [each["right"] for each in run["evaluations"] if each["of"] == of][-1] for run in runs
    }


def score_rows(rows: Rows, equal: str) -> tuple[str, dict[str, dict[int, float]]]:
    """Return where rows are compared, in words, and row -> seed -> accuracy there.

    equal: "tokens", or "steps" for the last step"""
    if equal == "steps":
        return "after the last step", {row: score_at_end(runs) for row, runs in rows.items()}
    tokens, scores = score_at_equal_cost(rows, "rollout/tokens")
    return f"at {tokens / 1000:.1f}k tokens", scores


def compare_rows(scores: Mapping[str, Mapping[int, float]]) -> dict[str, Comparison]:
    """Compare rows with the first one, corrected by Holm."""
    first, *others = scores
    compared = {row: compare(scores[row], scores[first], first) for row in others}
    comparisons = {row: one for row, one in compared.items() if one is not None}
    return dict(zip(comparisons, correct_by_holm([*comparisons.values()]), strict=True))


def format_table(rows: Rows, *, minutes: bool = False, equal: str = "tokens") -> str:
    """Return a Markdown table: each row's accuracy, and its difference to the first row.

    equal: see `score_rows`"""
    tokens, at_tokens = score_at_equal_cost(rows, "rollout/tokens")
    seconds, at_seconds = score_at_equal_cost(rows, "time/step")
    where, scores = score_rows(rows, equal)
    compared = compare_rows(scores)
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
        one = compared.get(row)
        interval = "" if one is None or one.low is None else f" [{one.low:+.3f}, {one.high:+.3f}]"
        cells = [
            row.replace("_", " "),
            score_text(score_at_end(runs)),
            score_text(at_tokens[row]),
            *([score_text(at_seconds[row])] if minutes else ()),
            "" if one is None else f"{one.mean:+.3f}{interval}",
            "" if one is None else one.verdict,
            score_text(score_at_end(runs, "basic_arithmetic")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_table(rows: Rows, path: Path, equal: str = "tokens") -> None:
    """Plot accuracy by tokens, each seed's score, and the differences."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    over, each, difference = figure.subplots(1, 3, width_ratios=(3, 2, 2))
    where, scores = score_rows(rows, equal)
    compared = compare_rows(scores)
    names = [row.replace("_", " ") for row in rows]
    for number, (row, runs) in enumerate(rows.items()):
        full = [accumulate(curve, "rollout/tokens") for curve in runs if curve["seed"] in scores[row]]
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
        if (one := compared.get(row)) and one.low is not None and one.high is not None:
            errors = [[one.mean - one.low], [one.high - one.mean]]
            style = {"fmt": "o", "color": plots.INK, "markersize": 4, "capsize": 3}
            difference.errorbar(one.mean, number, xerr=errors, **style)
    over.set(xlabel="thousand tokens sampled", ylabel="right answers, held-out problems", ylim=(0, None))
    over.legend(fontsize=7)
    each.set(xlabel=f"each seed and the mean,\n{where}")
    difference.set(xlabel=f"difference to {names[0]},\n95 % interval")
    difference.axvline(0, color=plots.MUTED, linewidth=0.8)
    for axes, labels in ((each, names), (difference, [""] * len(names))):
        axes.set(ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)), yticklabels=labels)
    for axes in (over, each, difference):
        axes.grid(color=plots.GRID)
    figure.savefig(path, dpi=150)


def draw_curves(curves: Sequence[Curve], folder: Path) -> None:
    """Plot FIGURES: each recipe's mean, and each seed as a thin line."""
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
