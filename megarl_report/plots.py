"""SVG figures with a phone's width, and CSS variables as colours."""

from __future__ import annotations

import io
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from megarl.observe.terminal import format_count

WIDTH, HEIGHT = 352, 216  # points
FONT = 10.5
INK, MUTED, GRID = "#1d2530", "#6a7686", "#e2e6eb"
# Series colours; templates/style.css.j2 has those for a dark background.
COLOURS = (
    *("#2b6cd4", "#d2612a", "#15936a", "#9b4fc0", "#b58209"),
    *("#cf3f6f", "#0d8ba3", "#6b7a3a", "#7d5a45", "#52617a"),
)
STYLES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)), (0, (5, 1.5, 1.2, 1.5)))
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", **{c: f"--s{i}" for i, c in enumerate(COLOURS)}}
NICE = [1, 2, 2.5, 5, 10]
MAX_POINTS = 400
SMOOTH_FROM = 30

Points = Mapping[int, float]
Limits = tuple[float | None, float | None]


@dataclass(frozen=True)
class Line:
    """One curve, or one layer of a stack.

    label    shown at its end, with the last value
    style    index into STYLES
    noisy    with 30 steps or more, plot a thin line under the moving average
    band     step -> (min, max), shaded"""

    points: Points
    colour: str
    label: str = ""
    style: int = 0
    markers: bool = False
    noisy: bool = True
    band: Mapping[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stairs:
    """A histogram: shares between edges."""

    edges: Sequence[float]
    shares: Sequence[float]
    colour: str
    filled: bool = False


class Interval(NamedTuple):
    """A phase, in seconds from the panel's start; the last `waited` seconds are pale."""

    begin: float
    end: float
    waited: float
    colour: str


@dataclass(frozen=True)
class Drawing:
    """A figure, legend of (colour, text), and a table's heads and rows (cells, is_highlighted)."""

    svg: str
    legend: tuple[tuple[str, str], ...] = ()
    table: tuple[Sequence[str], Sequence[tuple[Sequence[str], bool]]] | None = None


def run_colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def average_neighbours(points: Points) -> tuple[list[float], list[float]]:
    """Return at most MAX_POINTS steps and values, averages of neighbours."""
    size = max(1, math.ceil(len(points) / MAX_POINTS))

    def average(numbers: list[float]) -> list[float]:
        chunks = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        return [sum(chunk) / len(chunk) for chunk in chunks]

    return average([float(step) for step in points]), average(list(points.values()))


def moving_average(ys: Sequence[float]) -> list[float]:
    """Return the centred mean over an eighth of a short curve, a twentieth of a long one.

    At the ends a fitted line's value, since a mean would flatten a steep start."""
    half_width = max(min(len(ys) // 16, 10), len(ys) // 40)
    averages = []
    for i in range(len(ys)):
        start = max(0, min(i - half_width, len(ys) - 2 * half_width - 1))
        window = ys[start : start + 2 * half_width + 1]
        offsets = [j - half_width for j in range(len(window))]
        products = (o * y for o, y in zip(offsets, window, strict=True))
        slope = sum(products) / max(1, sum(o * o for o in offsets))
        fit = sum(window) / len(window) + slope * (offsets[0] + i - start)
        averages.append(min(max(fit, min(window)), max(window)))
    return averages


def format_value(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return format_count(value)
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.3g}"


def figure(right: float = 0.0, left: float = 42.0, height: float = HEIGHT) -> tuple[Figure, Axes]:
    """Return a figure with empty axes; `left` and `right` are margins in points."""
    fig = Figure(figsize=(WIDTH / 72, height / 72))
    bottom, top = 34, 8
    corner = (left / WIDTH, bottom / height)
    axes = fig.add_axes((*corner, (WIDTH - left - right - 6) / WIDTH, (height - bottom - top) / height))
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(color=MUTED, linewidth=0.7)
    axes.tick_params(axis="y", length=0, colors=MUTED, labelsize=FONT, pad=6)
    axes.tick_params(axis="x", length=3, width=0.7, colors=MUTED, labelsize=FONT)
    return fig, axes


def finish(axes: Axes, xlabel: str, limits: Limits, log: bool, span: tuple[float, float]) -> None:
    """Set limits, ticks and the x label, after plotting."""
    data_min, data_max = float(axes.dataLim.y0), float(axes.dataLim.y1)
    if log:
        axes.set_yscale("log")
        bottom = 10.0 ** math.floor(math.log10(data_min))
        axes.set_ylim(bottom, max(10.0 ** math.ceil(math.log10(data_max)), 10 * bottom))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        low, high = axes.get_ylim()
        min_span = max(abs(low), abs(high)) * 0.02
        if high - low < min_span:  # do not magnify the noise of a constant
            low, high = low - min_span, high + min_span
        # Data beyond a limit extends the axis.
        low = limits[0] if limits[0] is not None and data_min >= limits[0] else low
        high = limits[1] if limits[1] is not None and data_max <= limits[1] else high
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=NICE))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=NICE, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.set_xlim(span[0], span[1] if span[1] > span[0] else span[0] + 1)
    axes.set_xlabel(xlabel, color=MUTED, fontsize=FONT, labelpad=2)


def draw_lines(lines: Sequence[Line], xlabel: str, limits: Limits = (None, None), log: bool = False) -> str:
    """Plot curves over steps; with `log` only their positive values."""
    if log:
        positive_lines = [
            replace(
                line,
                points={x: y for x, y in line.points.items() if y > 0},
                band={x: (low, high) for x, (low, high) in line.band.items() if low > 0},
            )
            for line in lines
        ]
        nonempty_lines = [line for line in positive_lines if line.points]
        lines, log = nonempty_lines or lines, bool(nonempty_lines)
    curves = []  # per line: steps, values, smoothed values
    for line in lines:
        xs, ys = average_neighbours(line.points)
        is_smoothed = line.noisy and len(ys) >= SMOOTH_FROM and not line.markers
        curves.append((xs, ys, moving_average(ys) if is_smoothed else ys))
    last_values = [smoothed[-1] for _, _, smoothed in curves]
    texts = [
        f"{line.label} {format_value(last_value)}".strip()
        for line, last_value in zip(lines, last_values, strict=True)
    ]
    fig, axes = figure(right=8 + 5.6 * max(map(len, texts)))
    for line, (xs, ys, smoothed) in zip(lines, curves, strict=True):
        if line.band:
            steps = sorted(line.band)
            lows, highs = zip(*(line.band[step] for step in steps), strict=True)
            axes.fill_between(steps, lows, highs, color=line.colour, alpha=0.18, linewidth=0)
        if smoothed is not ys:
            axes.plot(xs, ys, color=line.colour, linewidth=0.7, alpha=0.35)
        style: dict[str, Any] = {"marker": "o", "markersize": 4} if line.markers or len(xs) == 1 else {}
        style |= {"color": line.colour, "linestyle": STYLES[line.style % len(STYLES)], "linewidth": 1.9}
        axes.plot(xs, smoothed, clip_on=False, **style)
    steps = [step for line in lines for step in line.points]
    finish(axes, xlabel, limits, log, (min(steps), max(steps)))

    # Shift labels that would touch each other.
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [float(to_axes.transform((0, last_value))[1]) for last_value in last_values]
    gap = min((FONT + 1.5) / (axes.get_position().height * HEIGHT), 1 / len(last_values))
    order = sorted(range(len(last_values)), key=heights.__getitem__)
    for i, height in zip(order, spread_heights(sorted(heights), gap), strict=True):
        offset: dict[str, Any] = {
            "xycoords": "axes fraction",
            "xytext": (7, 0),
            "textcoords": "offset points",
        }
        style = {"color": lines[i].colour, "fontsize": FONT, "va": "center", "annotation_clip": False}
        axes.annotate(texts[i], (1.0, height), **offset, **style)
    return svg(fig)


def spread_heights(heights: Sequence[float], gap: float) -> list[float]:
    """Move ascending heights within [0, 1] to keep neighbours `gap` away."""
    raised_heights: list[float] = []
    for height in heights:
        raised_heights.append(max(height, raised_heights[-1] + gap if raised_heights else 0.0))
    limit, final_heights = 1.0, []
    for height in reversed(raised_heights):
        final_heights.append(min(height, limit))
        limit = final_heights[-1] - gap
    return final_heights[::-1]


def draw_stack(layers: Sequence[Line], limits: Limits = (0, None)) -> str:
    """Plot layers over steps, the first at the bottom; missing values are 0."""
    steps = sorted({step for layer in layers for step in layer.points})
    fig, axes = figure()
    series = [average_neighbours({step: layer.points.get(step, 0.0) for step in steps}) for layer in layers]
    colours = [layer.colour for layer in layers]
    axes.stackplot(series[0][0], [ys for _, ys in series], colors=colours, linewidth=0, alpha=0.88)
    axes.margins(x=0)
    finish(axes, "step", limits, False, (steps[0], steps[-1]))
    return svg(fig)


def draw_stairs(
    stairs: Sequence[Stairs],
    xlabel: str,
    lines: Sequence[tuple[Sequence[float], Sequence[float], str]] = (),
    ticks: Mapping[float, str] | None = None,
    log: bool = False,
) -> str:
    """Plot histograms, and `lines` (x, y, colour). ticks: x -> text."""
    fig, axes = figure()
    shares = [share for s in stairs for share in s.shares if share > 0]
    floor = 10.0 ** math.floor(math.log10(min(shares, default=1.0)) - 0.1) if log else 0.0
    for s in stairs:
        heights = [max(share, floor) for share in s.shares]
        if s.filled:
            axes.stairs(heights, s.edges, baseline=floor, fill=True, color=s.colour, alpha=0.25, linewidth=0)
        axes.stairs(heights, s.edges, baseline=floor, color=s.colour, linewidth=1.4)
    for xs, ys, colour in lines:
        axes.plot(xs, ys, color=colour, linewidth=1.9, marker="o", markersize=4, clip_on=False)
    finish(axes, xlabel, (floor, 1), log, (stairs[0].edges[0], stairs[0].edges[-1]))
    if ticks is not None:
        axes.set_xticks(list(ticks), list(ticks.values()))
    return svg(fig)


def draw_bars(rows: Mapping[str, Sequence[tuple[float, str]]], unit: str) -> str:
    """Plot a horizontal bar per row from (length, colour) pieces, with their sum."""
    fig, axes = figure(right=52, left=6, height=max(HEIGHT, 46 + 38 * len(rows)))
    axes.grid(False)
    for y, (name, pieces) in enumerate(rows.items()):
        start = 0.0
        for length, colour in pieces:
            axes.barh(y, length, left=start, height=0.45, color=colour, alpha=0.88, linewidth=0)
            start += length
        text_style: dict[str, Any] = {"textcoords": "offset points", "color": INK, "fontsize": FONT}
        axes.annotate(f"{format_value(start)} {unit}", (start, y), xytext=(6, 0), va="center", **text_style)
        label = name if len(name) <= 40 else f"{name[:38]}.."
        axes.annotate(label, (0, y - 0.225), xytext=(0, 2), va="bottom", **text_style)
    axes.set_ylim(len(rows) - 0.6, -0.7)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=NICE))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))
    axes.set_xlabel(unit, color=MUTED, fontsize=FONT, labelpad=2)
    return svg(fig)


def draw_timeline(panels: Sequence[tuple[str, Mapping[str, Sequence[Interval]]]]) -> str:
    """Plot panels (heading, row -> phases) on one scale of seconds."""
    row_height = 13 if max(len(rows) for _, rows in panels) <= 4 else 9
    heading_height, gap = 15, 5
    height = 46 + sum(heading_height + gap + row_height * len(rows) for _, rows in panels)
    fig, axes = figure(left=42, height=height)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    y, ticks = 0.0, {}
    heading_style: dict[str, Any] = {"textcoords": "offset points", "color": INK, "fontsize": FONT - 1}
    for heading, rows in panels:
        y += heading_height
        axes.annotate(heading, (0, y), xytext=(0, 2), va="bottom", **heading_style)
        for name, pieces in rows.items():
            for piece in pieces:
                work_end = max(piece.begin, piece.end - piece.waited)
                bar_style: dict[str, Any] = {"height": row_height - 2, "color": piece.colour, "linewidth": 0}
                axes.barh(
                    y + row_height / 2, work_end - piece.begin, left=piece.begin, alpha=0.88, **bar_style
                )
                axes.barh(y + row_height / 2, piece.end - work_end, left=work_end, alpha=0.22, **bar_style)
            ticks[y + row_height / 2] = name
            y += row_height
        y += gap
    axes.set_ylim(y, 0)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=FONT - 2 if row_height > 10 else FONT - 3.5)
    axes.set_xlim(0, max(piece.end for _, rows in panels for pieces in rows.values() for piece in pieces))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=NICE))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))
    axes.set_xlabel("s", color=MUTED, fontsize=FONT, labelpad=2)
    return svg(fig)


def svg(fig: Figure) -> str:
    """Return an <svg> element with colours as variables, without URLs of namespaces and unused ids."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megarl", "font.size": FONT}):
        fig.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    view_box = f'viewBox="0 0 {WIDTH} {fig.get_figheight() * 72:.0f}"'
    text = re.sub(r"<svg [^>]*>", f'<svg {view_box} role="img">', text, count=1)
    text = text.replace("xlink:href", "href")
    # Ids must be unique on a page.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>f{zlib.crc32(text.encode()):08x}", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text
