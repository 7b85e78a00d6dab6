"""Compare held-out curves of finished runs at equal cost.

A curve is a JSON object:

recipe, seed
evaluations        step, `of` (problem set or task), `problems` (number of answers), `right` (accuracy),
                   `low` and `high` (95 % interval)
value_pretraining  total of each SPENT metric (tokens, seconds)
steps              step, and its STEP metrics"""

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
# metrics of cost
SPENT = ("rollout/tokens", "time/step")
FIGURES = {  # file -> problem set, title
    "held_out": ("all", "Right answers, held-out problems of the tasks that are trained on"),
    "transfer": ("basic_arithmetic", "Right answers, basic_arithmetic, which is never trained on"),
}


def read_evaluations(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the accuracy and 95 % interval of each evaluation, problem set and task."""
    correct_by_set: dict[tuple[int, str], list[float]] = {}
    for answer in read_jsonl(run_dir / ANSWERS_FILE, lambda record: "step" in record).records:
        for name in {answer.get("set") or "all", answer.get("data_source") or "all"}:
            correct_by_set.setdefault((answer["step"], name), []).append(float(answer["correct"]))
    for (step, name), correct in sorted(correct_by_set.items()):
        low, high = interval(correct, 1)
        labels = {"step": step, "of": name, "problems": len(correct)}
        yield {**labels, "right": fmean(correct), "low": low, "high": high}


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
    """Return the smallest step and pretraining times of a row's runs.

    Other load on the machine disturbed the fastest run least."""
    return {name: min(run[name] for run in seconds) for name in ("step_seconds", "value_pretraining_seconds")}


def truncate(curve: Curve, last: int) -> dict[str, Any]:
    """Return a curve up to step `last`."""
    return {
        **curve,
        **{part: [e for e in curve[part] if e["step"] <= last] for part in ("evaluations", "steps")},
    }


def accumulate(curve: Curve, metric: str) -> tuple[list[float], list[float]]:
    """Return the total of `metric` up to each evaluation, and the accuracy there."""
    points = [point for point in curve["evaluations"] if point["of"] == "all"]
    pretraining_cost = curve["value_pretraining"][metric]
    step_costs = [[s[metric] for s in curve["steps"] if s["step"] <= point["step"]] for point in points]
    total_costs = [
        pretraining_cost * (point["step"] > 0) + sum(costs)
        for point, costs in zip(points, step_costs, strict=True)
    ]
    return total_costs, [point["right"] for point in points]


def replace_seconds(curve: Curve, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return a curve with the `take_minimum` seconds of its row."""
    pretraining = {**curve["value_pretraining"], "time/step": seconds["value_pretraining_seconds"]}
    steps = [{**step, "time/step": seconds["step_seconds"]} for step in curve["steps"]]
    return {**curve, "value_pretraining": pretraining, "steps": steps}


def score_at_equal_cost(rows: Rows, metric: str) -> tuple[float, dict[str, dict[int, float]]]:
    """Return the smallest final total of `metric` over runs, and row -> seed -> accuracy there.

    The accuracy is interpolated linearly. Left out are old curves without costs, and runs without an
    evaluation on `all`."""
    points_by_row = {
        row: {
            run["seed"]: points
            for run in runs
            if "value_pretraining" in run and (points := accumulate(run, metric))[0]
        }
        for row, runs in rows.items()
    }
    least_cost = min(
        (points[-1] for runs in points_by_row.values() for points, _ in runs.values()), default=0.0
    )
    return least_cost, {
        row: {seed: float(np.interp(least_cost, *points)) for seed, points in runs.items()}
        for row, runs in points_by_row.items()
    }


def score_at_end(runs: Sequence[Curve], of: str = "all") -> dict[int, float]:
    """Return seed -> accuracy of the last evaluation. Runs that were not evaluated on it are left out.

    of: problem set or task"""
    return {
        run["seed"]: evaluation["right"]  # evaluations are in order: the last one stays
        for run in runs
        for evaluation in run["evaluations"]
        if evaluation["of"] == of
    }


def score_rows(rows: Rows, equal: str) -> tuple[str, dict[str, dict[int, float]]]:
    """Return where rows are compared, in words, and row -> seed -> accuracy there.

    equal: what compared rows have in common: "tokens" (the same number), or "steps" (the last step)"""
    if equal == "steps":
        return "after the last step", {row: score_at_end(runs) for row, runs in rows.items()}
    tokens, scores = score_at_equal_cost(rows, "rollout/tokens")
    return f"at {tokens / 1000:.1f}k tokens", scores


def compare_rows(scores: Mapping[str, Mapping[int, float]]) -> dict[str, Comparison]:
    """Compare rows with the first one, corrected by Holm."""
    baseline, *other_rows = scores
    results = {row: compare(scores[row], scores[baseline], baseline) for row in other_rows}
    comparisons = {row: comparison for row, comparison in results.items() if comparison is not None}
    return dict(zip(comparisons, correct_by_holm([*comparisons.values()]), strict=True))


def format_table(rows: Rows, *, minutes: bool = False, equal: str = "tokens") -> str:
    """Return a Markdown table: each row's accuracy, and its difference to the first row.

    equal: see `score_rows`"""
    tokens, at_tokens = score_at_equal_cost(rows, "rollout/tokens")
    seconds, at_seconds = score_at_equal_cost(rows, "time/step")
    where, scores = score_rows(rows, equal)
    comparisons = compare_rows(scores)
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
        comparison = comparisons.get(row)
        interval_text = (
            ""
            if comparison is None or comparison.low is None
            else f" [{comparison.low:+.3f}, {comparison.high:+.3f}]"
        )
        cells = [
            row.replace("_", " "),
            score_text(score_at_end(runs)),
            score_text(at_tokens[row]),
            *([score_text(at_seconds[row])] if minutes else ()),
            "" if comparison is None else f"{comparison.mean:+.3f}{interval_text}",
            "" if comparison is None else comparison.verdict,
            score_text(score_at_end(runs, "basic_arithmetic")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_table(rows: Rows, path: Path, equal: str = "tokens") -> None:
    """Plot accuracy by tokens, each seed's score, and the differences."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curve_axes, seed_axes, difference_axes = figure.subplots(1, 3, width_ratios=(3, 2, 2))
    where, scores = score_rows(rows, equal)
    comparisons = compare_rows(scores)
    names = [row.replace("_", " ") for row in rows]
    for position, (row, runs) in enumerate(rows.items()):
        points = [accumulate(curve, "rollout/tokens") for curve in runs if curve["seed"] in scores[row]]
        if not points:
            continue
        tokens, accuracy = np.mean(points, axis=0)
        style = {"color": plots.COLOURS[position % len(plots.COLOURS)], "linewidth": 1.5}
        line_style = "-" if position < len(plots.COLOURS) else "--"
        curve_axes.plot(
            tokens / 1000, accuracy, line_style, label=f"{names[position]} ({len(points)})", **style
        )
        seed_scores = [*scores[row].values()]
        seed_axes.plot(
            seed_scores, [position] * len(seed_scores), "o", color=style["color"], alpha=0.5, markersize=4
        )
        seed_axes.plot(fmean(seed_scores), position, "|", color=style["color"], markersize=16)
    for position, row in enumerate(rows):
        if (
            (comparison := comparisons.get(row))
            and comparison.low is not None
            and comparison.high is not None
        ):
            errors = [[comparison.mean - comparison.low], [comparison.high - comparison.mean]]
            style = {"fmt": "o", "color": plots.INK, "markersize": 4, "capsize": 3}
            difference_axes.errorbar(comparison.mean, position, xerr=errors, **style)
    curve_axes.set(
        xlabel="thousand tokens sampled", ylabel="right answers, held-out problems", ylim=(0, None)
    )
    curve_axes.legend(fontsize=7)
    seed_axes.set(xlabel=f"each seed and the mean,\n{where}")
    difference_axes.set(xlabel=f"difference to {names[0]},\n95 % interval")
    difference_axes.axvline(0, color=plots.MUTED, linewidth=0.8)
    for axes, labels in ((seed_axes, names), (difference_axes, [""] * len(names))):
        axes.set(ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)), yticklabels=labels)
    for axes in (curve_axes, seed_axes, difference_axes):
        axes.grid(color=plots.GRID)
    figure.savefig(path, dpi=150)


def draw_curves(curves: Sequence[Curve], folder: Path) -> None:
    """Plot FIGURES: each recipe's mean, and each seed as a thin line."""
    for name, (problem_set, title) in FIGURES.items():
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for recipe, colour in zip(dict.fromkeys(c["recipe"] for c in curves), plots.COLOURS, strict=False):
            seed_curves = [
                {
                    evaluation["step"]: evaluation["right"]
                    for evaluation in curve["evaluations"]
                    if evaluation["of"] == problem_set
                }
                for curve in curves
                if curve["recipe"] == recipe
            ]
            if not seed_curves:
                continue
            for points in seed_curves:
                axes.plot(list(points), list(points.values()), color=colour, linewidth=0.7, alpha=0.5)
            common_steps = sorted(set.intersection(*map(set, seed_curves)))
            mean = [fmean(points[step] for points in seed_curves) for step in common_steps]
            axes.plot(
                common_steps,
                mean,
                color=colour,
                linewidth=2,
                label=f"{recipe.upper()}, {len(seed_curves)} seeds",
            )
        axes.set(title=title, xlabel="rollout steps", ylim=(0, None))
        axes.grid(color=plots.GRID)
        axes.legend()
        figure.savefig(folder / f"{name}.png", dpi=150)
