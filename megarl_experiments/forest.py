"""A protocol's verdicts and forest plot, as text, PNG and HTML."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megarl_experiments.curves import GREY, band, draw_row
from megarl_experiments.protocol import FRESH, POWER, VERDICTS, Arm, Power, Protocol, RowOutcome, read_tried
from megarl_experiments.result import LEVEL, Curve, RowResult
from megarl_experiments.tables import write_json
from megarl_report.plots import COLOURS, FONT, INK, MUTED, NICE, figure, finish, svg
from megarl_report.report import page

SHADES = {"holds": COLOURS[2], "opposite": COLOURS[5], "equivalent": COLOURS[0], "undecided": COLOURS[4]}
LAST, CURVE = "the mean of the last {} evaluations", "the mean of all evaluations after step 0"


def write(
    protocol: Protocol,
    outcomes: Sequence[RowOutcome],
    curves: Mapping[Arm, Curve],
    powers: Sequence[Power],
    note: str,
    folder: Path,
) -> None:
    """Write table.md, table.json, forest.png and report.html. note: a sentence about the runs."""
    folder.mkdir(parents=True, exist_ok=True)
    tried = read_tried(protocol.tried)
    text = markdown(protocol, outcomes, powers, tried, note)
    (folder / "table.md").write_text(text, encoding="utf-8")
    rows = [
        {**vars(one), "row": one.row.row, "seeds": [*one.seeds], "verdict": one.verdict} for one in outcomes
    ]
    content = {"protocol": protocol.model_dump(mode="json", exclude={"folder"}), "note": note, "rows": rows}
    content["power"] = [{**vars(one), "row": one.row.row} for one in powers]
    write_json(folder / "table.json", {**content, "tried": tried})
    draw(outcomes).savefig(folder / "forest.png", dpi=200, metadata={"Software": None})
    write_page(protocol, outcomes, curves, note, folder / "report.html")


def markdown(
    protocol: Protocol,
    outcomes: Sequence[RowOutcome],
    powers: Sequence[Power],
    tried: Sequence[Mapping[str, Any]],
    note: str,
) -> str:
    """Return verdicts, rules, tasks, power and tried settings as Markdown."""

    def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows))

    def number(value: float | None) -> str:
        return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"

    tasks = [
        f"Task {name}: {task.what.strip()} Knobs: `{json.dumps(task.given)}`, others at their defaults; "
        f"at most {task.max_response_tokens} tokens; "
        f"warm start {(task.warm_start or protocol.warm_start).name}; "
        f"settings: `{' '.join(task.overrides) or 'the base'}`."
        for name, task in protocol.tasks.items()
    ]
    powers_heads = ["row", "bound", "tuning seeds", "standard deviation of the differences"]
    powers_heads += ["seeds to detect it", "seeds to show equivalence", f"{protocol.seeds} seeds detect"]
    known = []
    for one in powers:
        figures = (one.tuned, one.deviation, one.for_difference, one.for_equivalence, one.detectable)
        known.append([one.row.row, f"{one.row.bound:g}", *map(number, figures)])
    own = {row.row: json.loads(json.dumps(protocol.setting(row))) for row in protocol.rows}
    settings = []
    for entry in tried:
        now, then = own.get(entry["row"], {}), entry["setting"]
        other = (key for key in {**then, **now} if then.get(key) != now.get(key))
        old = (f"{key}: {json.dumps(then[key]) if key in then else 'default'}" for key in other)
        text = "; ".join(old).replace("|", "\\|")
        values = entry["differences"]
        mean = f"{statistics.fmean(values.values()):+.3f}"
        settings.append([entry["when"][:10], entry["row"], text or "as now", ", ".join(values), mean])
    parts = [
        grid(*cells(protocol, outcomes)),
        "\n".join(f"- {line}" for line in (note, *rules(protocol, outcomes), *tasks)),
        "Power, from tuning seeds:",
        grid(powers_heads, known),
        f"Settings tried on seeds below {FRESH}: {len(settings) or 'none yet'}.",
    ]
    if settings:
        parts.append(grid(["last run", "row", "other than now", "seeds", "mean difference"], settings))
    return "\n\n".join(parts) + "\n"


def cells(protocol: Protocol, outcomes: Sequence[RowOutcome]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the verdicts as text."""
    other = "all evaluations" if protocol.statistic == "last" else "the last evaluations"
    heads = ["row", "task", "paper: points, claim", "difference", "p, Holm", "bound", "p of equivalence"]
    heads += [f"difference over {other}", "seeds", "verdict"]

    def number(value: float | None) -> str:
        return "" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"

    rows = []
    for one in outcomes:
        claim = f"{'-' if one.paper is None else f'{one.paper:+g}'}, {one.row.claims}"
        interval = f" [{one.low:+.3f}, {one.high:+.3f}]" if one.low is not None else ""
        difference = "" if one.mean is None else f"{one.mean:+.3f}{interval}"
        line = [f"{one.row.row} - {one.row.against}", one.row.task, claim, difference, number(one.holm)]
        line += [f"{one.row.bound:g}", number(one.equivalence)]
        line += ["" if one.other is None else f"{one.other:+.3f}", str(len(one.differences))]
        line.append(one.qualified_verdict)
        rows.append(line)
    return heads, rows


def rules(protocol: Protocol, outcomes: Sequence[RowOutcome]) -> list[str]:
    """Return the rules of the verdicts."""
    counts = {verdict: sum(one.verdict == verdict for one in outcomes) for verdict in VERDICTS}
    decided = sum(count for verdict, count in counts.items() if verdict != "undecided")
    listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    last = LAST.format(protocol.last)
    decides, other = (last, CURVE) if protocol.statistic == "last" else (CURVE, last)
    seeds = protocol.fresh_seeds
    return [
        f"{decided} of {len(outcomes)} rows are decided ({listed}).",
        f"Score of a run: {decides}, as the protocol states. {other} is shown too, and decides nothing.",
        f"Seeds {seeds[0]} to {seeds[-1]}, in pairs: both runs share task, warm start and order of prompts. "
        f"Interval: {1 - LEVEL:.0%} of the paired t-test, uncorrected.",
        "holds, opposite: a difference in the paper's direction, or in the other, by a two-sided sign-flip "
        f"test with p < {LEVEL:g} after Holm's correction over the {len(outcomes)} rows.",
        "equivalent: no such difference, and the interval lies within the protocol's bound. p of "
        "equivalence: two one-sided t-tests, uncorrected.",
        "undecided: neither. Detectable: the difference that these seeds, with their measured spread, detect "
        f"with probability {POWER:.0%} at p < {protocol.level:.4f}, the strictest of Holm's levels.",
    ]


def terminal(outcomes: Sequence[RowOutcome], width: int = 41) -> str:
    """Return the forest plot as text: o the difference, = its interval, | no difference, ( ) the bound."""
    scale = _axis_limit(outcomes)

    def place(value: float) -> int:
        return round((value / scale + 1) / 2 * (width - 1))

    wide = max(len(one.row.row) for one in outcomes)
    lines = []
    for one in outcomes:
        line = [" "] * width
        if one.low is not None and one.high is not None:
            for i in range(place(one.low), place(one.high) + 1):
                line[i] = "="
        line[place(-one.row.bound)], line[place(one.row.bound)], line[place(0)] = "(", ")", "|"
        if one.mean is not None:
            line[place(one.mean)] = "o"
        difference = "" if one.mean is None else f"{one.mean:+.3f}"
        paper = "" if one.paper is None else f"paper {one.paper:+g}"
        plot = f"{one.row.row:{wide}} {''.join(line)} {difference:6}"
        lines.append(f"{plot}  {paper:9}  {one.qualified_verdict}".rstrip())
    return "\n".join([*lines, f"{'':{wide}} {-scale:<+{width // 2}.3f}{scale:>+{width - width // 2}.3f}"])


def draw(outcomes: Sequence[RowOutcome]) -> Figure:
    """Plot each row's difference, interval, shaded bound, paper's points and verdict."""
    heads = 34  # points a row
    fig, axes = figure(right=62, left=8, height=58 + heads * len(outcomes))
    axes.grid(False)
    axes.axvline(0, color=MUTED, linewidth=0.9)
    text: dict[str, Any] = {"textcoords": "offset points", "fontsize": FONT - 1, "annotation_clip": False}
    text["xycoords"] = ("axes fraction", "data")
    points: dict[str, Any] = {**text, "xytext": (56, 0), "ha": "right", "va": "center", "color": MUTED}
    for at, one in enumerate(outcomes):
        colour = SHADES.get(one.verdict, GREY)
        axes.barh(at, 2 * one.row.bound, left=-one.row.bound, height=0.3, color=GREY, alpha=0.22, linewidth=0)
        if one.low is not None and one.high is not None:
            axes.plot([one.low, one.high], [at, at], color=colour, linewidth=2.2, solid_capstyle="butt")
        if one.mean is not None:
            axes.plot([one.mean], [at], color=colour, marker="o", markersize=5.5)
        above: dict[str, Any] = {**text, "va": "bottom"}
        axes.annotate(one.row.row, (0, at - 0.2), xytext=(0, 2), color=INK, **above)
        word = {**above, "ha": "right", "color": colour, "fontweight": "bold"}
        axes.annotate(one.verdict, (1, at - 0.2), xytext=(56, 2), **word)
        axes.annotate("-" if one.paper is None else f"{one.paper:+g}", (1, at), **points)
    axes.annotate("paper's points", (1, -1.0), **points)
    limit = _axis_limit(outcomes)
    axes.set(xlim=(-limit, limit), ylim=(len(outcomes) - 0.55, -1.2), yticks=[])
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=NICE))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
    axes.set_xlabel("difference of accuracy; shaded: the bound", color=MUTED, fontsize=FONT, labelpad=2)
    return fig


def write_page(
    protocol: Protocol, outcomes: Sequence[RowOutcome], curves: Mapping[Arm, Curve], note: str, path: Path
) -> None:
    """Write one self-contained HTML file."""
    heads, rows = cells(protocol, outcomes)
    marked = [(line, one.verdict in ("holds", "opposite")) for line, one in zip(rows, outcomes, strict=True)]
    look = "Each line: mean difference and interval of the row minus its neighbour."
    forest = page.figure("Differences", "accuracy", svg(draw(outcomes)), (), look)
    cards = []
    for row in protocol.rows:
        own, its = row.arms(curves)
        if steps := band(own)[0]:
            fig, axes = figure()
            draw_row(axes, RowResult(row.row, None, own), RowResult(row.against, None, its))
            finish(axes, "step", (0, 1), False, (steps[0], steps[-1]))
            text = f"{row.why} Grey: {row.against}."
            cards.append(page.figure(row.row, f"on {row.task}", svg(fig), (), text))
    notes = "".join(f"<li>{escape(line)}</li>" for line in (note, *rules(protocol, outcomes)))
    body = [
        f"<h1>{escape(protocol.title)}</h1>",
        page.section("Verdicts", forest, page.table(heads, marked), f'<ul class="look">{notes}</ul>'),
        page.section("Accuracy by step", f'<div class="grid">{"".join(cards)}</div>' if cards else ""),
    ]
    path.write_text(page.document(protocol.title, body), encoding="utf-8")


def _axis_limit(outcomes: Sequence[RowOutcome]) -> float:
    ends = [(one.low, one.high, one.mean, one.row.bound) for one in outcomes]
    return 1.1 * max(abs(end) for row in ends for end in row if end is not None)
