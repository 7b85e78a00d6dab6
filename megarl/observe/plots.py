"""How a figure of the report is drawn: a small SVG whose colours are CSS variables, so that one picture serves light and dark.

Every figure is laid out for the width of a phone and is never shown much wider, so that its text stays readable.
"""

from __future__ import annotations

import io
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from megarl.observe.terminal_format import compact

WIDTH, HEIGHT = 352, 216  # points, about the pixels that a phone gives a figure
FONT = 10.5
INK, MUTED, GRID = "#1d2530", "#6a7686", "#e2e6eb"
# Series colours in their order of use; the page gives each a darker-background twin (page.py).
COLOURS = ("#2b6cd4", "#d2612a", "#15936a", "#9b4fc0", "#b58209", "#cf3f6f", "#0d8ba3", "#6b7a3a", "#7d5a45", "#52617a")
STYLES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)), (0, (5, 1.5, 1.2, 1.5)))
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", **{c: f"--s{i}" for i, c in enumerate(COLOURS)}}
NICE = [1, 2, 2.5, 5, 10]
MAX_POINTS = 400
SMOOTH_FROM = 30

Points = Mapping[int, float]


@dataclass(frozen=True)
class Line:
    """One curve. label stands beside its end, with the value there; "" writes the value alone. style: an index into STYLES.

    markers: points are drawn at the values. noisy: a course of 30 steps or more is drawn thin under its moving average. band: least and
    most at each step, shaded."""

    points: Points
    colour: str
    label: str = ""
    style: int = 0
    markers: bool = False
    noisy: bool = True
    band: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def course(self) -> tuple[list[float], list[float], list[float]]:
        """Steps, values, and the values that the eye is to follow."""
        xs, ys = thin(self.points)
        return xs, ys, moving_average(ys) if self.noisy and len(ys) >= SMOOTH_FROM and not self.markers else ys


@dataclass(frozen=True)
class Band:
    """One layer of a stack."""

    points: Points
    colour: str
    label: str


@dataclass(frozen=True)
class Stairs:
    """Shares between neighbouring edges, drawn as an outline, or as an area."""

    edges: Sequence[float]
    shares: Sequence[float]
    colour: str
    filled: bool = False


@dataclass(frozen=True)
class Drawing:
    """A finished figure: its SVG and the legend under it, (colour, text) each."""

    svg: str
    legend: tuple[tuple[str, str], ...] = ()


def run_colour(index: int) -> str:
    """The colour of one of several runs."""
    return COLOURS[index % len(COLOURS)]


def thin(points: Points) -> tuple[list[float], list[float]]:
    """Steps and values, neighbours averaged so that no more than MAX_POINTS remain."""
    xs, ys = [float(step) for step in points], list(points.values())
    size = math.ceil(len(xs) / MAX_POINTS)
    if size <= 1:
        return xs, ys
    chunks = range(0, len(xs), size)
    return [sum(c) / len(c) for i in chunks if (c := xs[i : i + size])], [sum(c) / len(c) for i in chunks if (c := ys[i : i + size])]


def moving_average(ys: Sequence[float]) -> list[float]:
    """Centred mean over an eighth of a short course, a twentieth of a long one.

    At its ends, where the window is no longer centred, a line fitted to the window takes the place of the mean, so that a steep
    beginning is not bent; it stays within the window's values."""
    half = max(min(len(ys) // 16, 10), len(ys) // 40)
    smooth = []
    for i in range(len(ys)):
        start = max(0, min(i - half, len(ys) - 2 * half - 1))
        window = ys[start : start + 2 * half + 1]
        offsets = [j - (len(window) - 1) / 2 for j in range(len(window))]
        slope = sum(o * y for o, y in zip(offsets, window, strict=True)) / max(1.0, sum(o * o for o in offsets))
        fitted = sum(window) / len(window) + slope * (offsets[0] + i - start)
        smooth.append(min(max(fitted, min(window)), max(window)))
    return smooth


def value_text(value: float) -> str:
    """A value as it stands beside its curve, at most three significant digits."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return compact(value)
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.3g}"


def figure(right: float = 0.0, left: float = 42.0, height: float = HEIGHT) -> tuple[Figure, Axes]:
    """Empty axes; `left` and `right` points are left free beside them for labels."""
    fig = Figure(figsize=(WIDTH / 72, height / 72))
    bottom, top = 34, 8
    box = (left / WIDTH, bottom / height, (WIDTH - left - right - 6) / WIDTH, (height - bottom - top) / height)
    axes = fig.add_axes(box)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(color=MUTED, linewidth=0.7)
    axes.tick_params(axis="y", length=0, colors=MUTED, labelsize=FONT, pad=6)
    axes.tick_params(axis="x", length=3, width=0.7, colors=MUTED, labelsize=FONT)
    return fig, axes


def finish(axes: Axes, xlabel: str, limits: tuple[float | None, float | None], log: bool, span: tuple[float, float]) -> None:
    """Limits, ticks and the x label, once everything is drawn."""
    least, most = float(axes.dataLim.y0), float(axes.dataLim.y1)
    if log:
        axes.set_yscale("log")
        bottom = 10.0 ** math.floor(math.log10(least))
        axes.set_ylim(bottom, max(10.0 ** math.ceil(math.log10(most)), 10 * bottom))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        low, high = axes.get_ylim()
        shown = max(abs(low), abs(high)) * 0.02
        if high - low < shown:  # a constant: no noise blown up to a mountain
            low, high = low - shown, high + shown
        # A limit is where the axis ends, unless the data goes beyond it.
        low = limits[0] if limits[0] is not None and least >= limits[0] else low
        high = limits[1] if limits[1] is not None and most <= limits[1] else high
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=NICE))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: value_text(value)))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=NICE, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    axes.set_xlim(span[0], span[1] if span[1] > span[0] else span[0] + 1)
    axes.set_xlabel(xlabel, color=MUTED, fontsize=FONT, labelpad=2)


def draw_lines(lines: Sequence[Line], xlabel: str, limits: tuple[float | None, float | None] = (None, None), log: bool = False) -> str:
    """Curves over steps, each labelled at its end. log: a logarithmic scale, on which values of 0 and below cannot be drawn."""
    if log:
        positive = [replace(line, points={step: y for step, y in line.points.items() if y > 0}) for line in lines]
        lines, log = [line for line in positive if line.points] or lines, any(line.points for line in positive)
    courses = [line.course() for line in lines]
    texts = [f"{line.label} {value_text(main[-1])}".strip() for line, (_, _, main) in zip(lines, courses, strict=True)]
    fig, axes = figure(right=8 + 5.6 * max(map(len, texts)))
    for line, (xs, ys, main) in zip(lines, courses, strict=True):
        if line.band:
            steps = sorted(line.band)
            lows, highs = zip(*(line.band[step] for step in steps), strict=True)
            axes.fill_between(steps, lows, highs, color=line.colour, alpha=0.18, linewidth=0)
        if main is not ys:
            axes.plot(xs, ys, color=line.colour, linewidth=0.7, alpha=0.35)
        marker: dict[str, Any] = {"marker": "o", "markersize": 4} if line.markers or len(xs) == 1 else {}
        axes.plot(xs, main, color=line.colour, linestyle=STYLES[line.style % len(STYLES)], linewidth=1.9, clip_on=False, **marker)
    steps = [step for line in lines for step in line.points]
    finish(axes, xlabel, limits, log, (min(steps), max(steps)))
    _label_ends(axes, [main[-1] for _, _, main in courses], texts, [line.colour for line in lines])
    return svg(fig)


def _label_ends(axes: Axes, values: Sequence[float], texts: Sequence[str], colours: Sequence[str]) -> None:
    """Writes each text at the height of its value right of the axes, moved apart where they would touch."""
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [float(to_axes.transform((0, value))[1]) for value in values]
    gap = min((FONT + 1.5) / (axes.get_position().height * HEIGHT), 1 / len(values))
    for i, height in zip(sorted(range(len(heights)), key=heights.__getitem__), spread(sorted(heights), gap), strict=True):
        axes.annotate(
            texts[i], (1.0, height), xycoords="axes fraction", xytext=(7, 0), textcoords="offset points",
            color=colours[i], fontsize=FONT, va="center", annotation_clip=False,
        )  # fmt: skip


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved as little as a single pass up and one down can, so that neighbours are `gap` apart within [0, 1]."""
    up: list[float] = []
    for height in heights:
        up.append(max(height, up[-1] + gap if up else 0.0))
    limit, placed = 1.0, []
    for height in reversed(up):
        placed.append(min(height, limit))
        limit = placed[-1] - gap
    return placed[::-1]


def draw_stack(bands: Sequence[Band], xlabel: str, limits: tuple[float | None, float | None] = (0, None)) -> str:
    """Layers over steps, the first at the bottom. Steps that a layer lacks count as 0; the page's legend names the colours."""
    steps = sorted({step for band in bands for step in band.points})
    fig, axes = figure()
    series = [thin({step: band.points.get(step, 0.0) for step in steps}) for band in bands]
    axes.stackplot(series[0][0], [ys for _, ys in series], colors=[band.colour for band in bands], linewidth=0, alpha=0.88)
    axes.margins(x=0)
    finish(axes, xlabel, limits, False, (steps[0], steps[-1]))
    return svg(fig)


def draw_stairs(
    stairs: Sequence[Stairs],
    xlabel: str,
    lines: Sequence[tuple[Sequence[float], Sequence[float], str]] = (),
    ticks: Mapping[float, str] | None = None,
    log: bool = False,
) -> str:
    """Histograms over each other; `lines` are (x, y, colour) within them. ticks: what stands below which x. log: of the shares."""
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


def draw_bars(rows: Mapping[str, Sequence[tuple[str, float, str]]], unit: str) -> str:
    """One horizontal bar a row, made of (label, length, colour) pieces; the row's sum stands at its end."""
    fig, axes = figure(right=52, left=6, height=max(HEIGHT, 46 + 38 * len(rows)))
    axes.grid(False)
    for at, (name, pieces) in enumerate(rows.items()):
        start = 0.0
        for _, length, colour in pieces:
            axes.barh(at, length, left=start, height=0.45, color=colour, alpha=0.88, linewidth=0)
            start += length
        end: dict[str, Any] = {"textcoords": "offset points", "color": INK, "fontsize": FONT}
        axes.annotate(f"{value_text(start)} {unit}", (start, at), xytext=(6, 0), va="center", **end)
        axes.annotate(name if len(name) <= 40 else f"{name[:38]}..", (0, at - 0.225), xytext=(0, 2), va="bottom", **end)
    axes.set_ylim(len(rows) - 0.6, -0.7)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=NICE))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: value_text(value)))
    axes.set_xlabel(unit, color=MUTED, fontsize=FONT, labelpad=2)
    return svg(fig)


def svg(fig: Figure) -> str:
    """The figure as an <svg> element for a page: no ids but those it refers to, no foreign addresses, colours as CSS variables."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megarl", "font.size": FONT}):
        fig.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r"<svg [^>]*>", f'<svg viewBox="0 0 {WIDTH} {fig.get_figheight() * 72:.0f}" role="img">', text, count=1)
    text = text.replace("xlink:href", "href")
    # Several figures stand on one page: what one of them defines must not be mistaken for another's.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>f{zlib.crc32(text.encode()):08x}", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text
