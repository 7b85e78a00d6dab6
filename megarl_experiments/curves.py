"""Plot each row's accuracy by step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from html import escape
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megarl_experiments.result import Curve, Result, RowResult, score_text
from megarl_report.plots import COLOURS, GRID, INK, MUTED, figure, finish, svg
from megarl_report.report import page

BLUE, GREY = COLOURS[0], COLOURS[-1]
COLUMNS = 3


def write_page(result: Result, path: Path) -> None:
    """Write one self-contained HTML file."""
    limits, steps = _axes_limits(result)
    cards = []
    for row in result.rows:
        fig, axes = figure()
        draw_row(axes, row, result.full_row)
        if band(row.curves)[0]:
            finish(axes, "step", limits, False, steps)
            grey_text = "" if row is result.full_row else f"; grey: {result.full}"
            text = score_text(row.scores(result.last)) + grey_text
            cards.append(page.figure(row.name, points_text(row, result.full_row), svg(fig), (), text))
    heads, rows = result.table()
    table_rows = [(cells, any(cell in ("worse", "better") for cell in cells)) for cells in rows]
    notes = "".join(f"<li>{escape(line)}</li>" for line in result.protocol())
    what = "Held-out accuracy by step: mean and standard deviation over seeds"
    body = [
        f"<h1>{escape(result.title)}</h1>",
        page.section("Table", page.table(heads, table_rows), f'<ul class="look">{notes}</ul>'),
        page.section(what, f'<div class="grid">{"".join(cards)}</div>' if cards else ""),
    ]
    path.write_text(page.document(result.title, body), encoding="utf-8")


def write_png(result: Result, path: Path) -> None:
    """Write all rows as small figures with the same axes."""
    limits, steps = _axes_limits(result)
    num_rows = -(-len(result.rows) // COLUMNS)
    fig = Figure(figsize=(3.4 * COLUMNS, 2.25 * num_rows + 0.4), layout="constrained")
    what = "held-out accuracy by step, mean ± standard deviation over seeds"
    fig.suptitle(f"{result.title}: {what}; grey: {result.full}", fontsize=10, color=INK)
    grid = list(fig.subplots(num_rows, COLUMNS, squeeze=False).flat)
    for axes, row in zip(grid, result.rows, strict=False):
        draw_row(axes, row, result.full_row)
        axes.set(title=row.name, ylim=limits, xlim=steps)
        axes.title.set(fontsize=9, color=INK)
        points = points_text(row, result.full_row)
        axes.text(0.97, 0.05, points, transform=axes.transAxes, ha="right", fontsize=8, color=MUTED)
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        axes.tick_params(labelsize=8, colors=MUTED)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    for axes in grid[len(result.rows) :]:
        axes.set_axis_off()
    fig.savefig(path, dpi=110, metadata={"Software": None})


def draw_row(axes: Axes, row: RowResult, full: RowResult) -> None:
    """Plot the row in blue over the full system in grey."""
    for shown_row, colour in ((row, GREY),) if row is full else ((full, GREY), (row, BLUE)):
        steps, means, deviations = band(shown_row.curves)
        if not steps:
            continue
        low, high = ([m + sign * d for m, d in zip(means, deviations, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(steps, means, color=colour, linewidth=1.9, marker="o", markersize=3)


def band(curves: Mapping[int, Curve]) -> tuple[list[int], list[float], list[float]]:
    """Return common steps, means and standard deviations (0 for one seed)."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves.values()))) if curves else []
    values = [[curve[step] for curve in curves.values()] for step in steps]
    means = [statistics.fmean(v) for v in values]
    return steps, means, [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]


def points_text(row: RowResult, full: RowResult) -> str:
    """Return the paper's points of row and full system."""
    if row.paper is None:
        return ""
    return f"paper {row.paper:g}" + ("" if row is full or full.paper is None else f" of {full.paper:g}")


def _axes_limits(result: Result) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return limits of accuracy and steps that fit all rows."""
    tops = [m + d for row in result.rows for m, d in zip(*band(row.curves)[1:], strict=True)]
    steps = [step for row in result.rows for curve in row.curves.values() for step in curve]
    span = (min(steps), max(max(steps), min(steps) + 1)) if steps else (0, 1)
    return (0.0, min(1.0, max(tops, default=1.0) * 1.05)), span
