"""The figures of an ablation: accuracy by step, mean and spread over seeds, each row beside the full system; as one page and one PNG."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from html import escape
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megarl.observe.ablations import Result, RowResult, protocol, score_text, table_cells
from megarl.observe.figures import BLUE
from megarl.observe.plots import COLOURS, GRID, INK, MUTED, figure, finish, svg
from megarl.observe.report import page
from megarl.observe.runs import Points

GREY = COLOURS[-1]
COLUMNS = 3


def band(curves: Mapping[int, Points]) -> tuple[list[int], list[float], list[float]]:
    """Steps that every run of a row has, with the mean and the standard deviation (0 for one seed) of the accuracy there."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves.values()))) if curves else []
    values = [[curve[step] for curve in curves.values()] for step in steps]
    return steps, [statistics.fmean(v) for v in values], [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]


def draw_row(axes: Axes, row: RowResult, full: RowResult) -> bool:
    """The row in blue over the full system in grey; False where the row itself has nothing to show."""
    for shown, colour in ((row, GREY),) if row is full else ((full, GREY), (row, BLUE)):
        steps, means, deviations = band(shown.curves)
        if not steps:
            continue
        low, high = ([m + sign * d for m, d in zip(means, deviations, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(steps, means, color=colour, linewidth=1.9, marker="o", markersize=3)
    return bool(band(row.curves)[0])


def points_text(row: RowResult, full: RowResult) -> str:
    """The paper's points beside those of its full system."""
    return "" if row.paper is None else f"paper {row.paper:g}" + ("" if row is full or full.paper is None else f" of {full.paper:g}")


def _limits(result: Result) -> tuple[float, float]:
    """The same vertical axis for all rows: from 0, as far as the highest band."""
    tops = [m + d for row in result.rows for m, d in zip(*band(row.curves)[1:], strict=True)]
    return 0.0, min(1.0, max(tops, default=1.0) * 1.05)


def _full(result: Result) -> RowResult:
    return next(row for row in result.rows if row.name == result.full)


def write_page(result: Result, path: Path) -> None:
    """One self-contained HTML file: table, protocol, a figure for each row."""
    full, limits = _full(result), _limits(result)
    cards = []
    for row in result.rows:
        fig, axes = figure()
        if draw_row(axes, row, full):
            finish(axes, "step", limits, False, _span(result))
            look = score_text(row.scores(result.last)) + ("" if row is full else f"; grey: {result.full}")
            cards.append(page.figure(row.name, points_text(row, full), svg(fig), (), look))
    heads, rows = table_cells(result)
    marked = [(cells, any(cell in ("worse", "better") for cell in cells)) for cells in rows]
    notes = "".join(f"<li>{escape(line)}</li>" for line in protocol(result))
    body = [
        f"<h1>{escape(result.title)}</h1>",
        page.section("Table", page.table(heads, marked), f'<ul class="look">{notes}</ul>'),
        page.section(
            "Held-out accuracy by step: mean and standard deviation over seeds",
            f'<div class="grid">{"".join(cards)}</div>' if cards else "",
        ),
    ]
    path.write_text(page.document(result.title, body), encoding="utf-8")


def write_png(result: Result, path: Path) -> None:
    """All rows as small figures with the same axes, for a page that takes no HTML."""
    full, limits = _full(result), _limits(result)
    lines = -(-len(result.rows) // COLUMNS)
    fig = Figure(figsize=(3.4 * COLUMNS, 2.25 * lines + 0.4), layout="constrained")
    fig.suptitle(
        f"{result.title}: held-out accuracy by step, mean ± standard deviation over seeds; grey: {result.full}", fontsize=10, color=INK
    )
    grid = fig.subplots(lines, COLUMNS, squeeze=False)
    for axes, row in zip(grid.flat, result.rows, strict=False):
        draw_row(axes, row, full)
        axes.set(title=row.name, ylim=limits, xlim=_span(result))
        axes.title.set(fontsize=9, color=INK)
        axes.text(0.97, 0.05, points_text(row, full), transform=axes.transAxes, ha="right", fontsize=8, color=MUTED)
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        axes.tick_params(labelsize=8, colors=MUTED)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    for axes in list(grid.flat)[len(result.rows) :]:
        axes.set_axis_off()
    fig.savefig(path, dpi=110, metadata={"Software": None})


def _span(result: Result) -> tuple[float, float]:
    steps = [step for row in result.rows for curve in row.curves.values() for step in curve]
    return (min(steps), max(max(steps), min(steps) + 1)) if steps else (0, 1)
