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
        {**vars(entry), "row": entry.row.row, "seeds": [*entry.seeds], "verdict": entry.verdict}
        for entry in outcomes
    ]
    content = {"protocol": protocol.model_dump(mode="json", exclude={"folder"}), "note": note, "rows": rows}
    content["power"] = [{**vars(entry), "row": entry.row.row} for entry in powers]
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
    power_rows = []
    for power in powers:
        estimates = (
            power.tuned,
            power.deviation,
            power.for_difference,
            power.for_equivalence,
            power.detectable,
        )
        power_rows.append([power.row.row, f"{power.row.bound:g}", *map(number, estimates)])
    setting_by_row = {row.row: json.loads(json.dumps(protocol.setting(row))) for row in protocol.rows}
    tried_rows = []
    for entry in tried:
        current_setting, tried_setting = setting_by_row.get(entry["row"], {}), entry["setting"]
        changed_keys = (
            key
            for key in {**tried_setting, **current_setting}
            if tried_setting.get(key) != current_setting.get(key)
        )
        changes = (
            f"{key}: {json.dumps(tried_setting[key]) if key in tried_setting else 'default'}"
            for key in changed_keys
        )
        text = "; ".join(changes).replace("|", "\\|")
        values = entry["differences"]
        mean = f"{statistics.fmean(values.values()):+.3f}"
        tried_rows.append([entry["when"][:10], entry["row"], text or "as now", ", ".join(values), mean])
    parts = [
        grid(*cells(protocol, outcomes)),
        "\n".join(f"- {line}" for line in (note, *rules(protocol, outcomes), *tasks)),
        "Power, from tuning seeds:",
        grid(powers_heads, power_rows),
        f"Settings tried on seeds below {FRESH}: {len(tried_rows) or 'none yet'}.",
    ]
    if tried_rows:
        parts.append(grid(["last run", "row", "other than now", "seeds", "mean difference"], tried_rows))
    return "\n\n".join(parts) + "\n"


def cells(protocol: Protocol, outcomes: Sequence[RowOutcome]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the verdicts as text."""
    other_score = "all evaluations" if protocol.statistic == "last" else "the last evaluations"
    heads = ["row", "task", "paper: points, claim", "difference", "p, Holm", "bound", "p of equivalence"]
    heads += [f"difference over {other_score}", "seeds", "verdict"]

    def number(value: float | None) -> str:
        return "" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"

    rows = []
    for outcome in outcomes:
        claim = f"{'-' if outcome.paper is None else f'{outcome.paper:+g}'}, {outcome.row.claims}"
        interval = f" [{outcome.low:+.3f}, {outcome.high:+.3f}]" if outcome.low is not None else ""
        difference = "" if outcome.mean is None else f"{outcome.mean:+.3f}{interval}"
        line = [
            f"{outcome.row.row} - {outcome.row.against}",
            outcome.row.task,
            claim,
            difference,
            number(outcome.holm),
        ]
        line += [f"{outcome.row.bound:g}", number(outcome.equivalence)]
        line += ["" if outcome.other is None else f"{outcome.other:+.3f}", str(len(outcome.differences))]
        line.append(outcome.qualified_verdict)
        rows.append(line)
    return heads, rows


def rules(protocol: Protocol, outcomes: Sequence[RowOutcome]) -> list[str]:
    """Return the rules of the verdicts."""
    counts = {verdict: sum(outcome.verdict == verdict for outcome in outcomes) for verdict in VERDICTS}
    num_decided = sum(count for verdict, count in counts.items() if verdict != "undecided")
    counts_text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    last_score = LAST.format(protocol.last)
    main_score, other_score = (last_score, CURVE) if protocol.statistic == "last" else (CURVE, last_score)
    seeds = protocol.fresh_seeds
    return [
        f"{num_decided} of {len(outcomes)} rows are decided ({counts_text}).",
        f"Score of a run: {main_score}, as the protocol states. "
        f"{other_score} is shown too, and decides nothing.",
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

    def get_column(value: float) -> int:
        return round((value / scale + 1) / 2 * (width - 1))

    name_width = max(len(outcome.row.row) for outcome in outcomes)
    lines = []
    for outcome in outcomes:
        line = [" "] * width
        if outcome.low is not None and outcome.high is not None:
            for i in range(get_column(outcome.low), get_column(outcome.high) + 1):
                line[i] = "="
        line[get_column(-outcome.row.bound)], line[get_column(outcome.row.bound)], line[get_column(0)] = (
            "(",
            ")",
            "|",
        )
        if outcome.mean is not None:
            line[get_column(outcome.mean)] = "o"
        difference = "" if outcome.mean is None else f"{outcome.mean:+.3f}"
        paper = "" if outcome.paper is None else f"paper {outcome.paper:+g}"
        plot = f"{outcome.row.row:{name_width}} {''.join(line)} {difference:6}"
        lines.append(f"{plot}  {paper:9}  {outcome.qualified_verdict}".rstrip())
    return "\n".join(
        [*lines, f"{'':{name_width}} {-scale:<+{width // 2}.3f}{scale:>+{width - width // 2}.3f}"]
    )


def draw(outcomes: Sequence[RowOutcome]) -> Figure:
    """Plot each row's difference, interval, shaded bound, paper's points and verdict."""
    row_height = 34  # points a row
    fig, axes = figure(right=62, left=8, height=58 + row_height * len(outcomes))
    axes.grid(False)
    axes.axvline(0, color=MUTED, linewidth=0.9)
    text_style: dict[str, Any] = {
        "textcoords": "offset points",
        "fontsize": FONT - 1,
        "annotation_clip": False,
    }
    text_style["xycoords"] = ("axes fraction", "data")
    points_style: dict[str, Any] = {
        **text_style,
        "xytext": (56, 0),
        "ha": "right",
        "va": "center",
        "color": MUTED,
    }
    for y, outcome in enumerate(outcomes):
        colour = SHADES.get(outcome.verdict, GREY)
        axes.barh(
            y, 2 * outcome.row.bound, left=-outcome.row.bound, height=0.3, color=GREY, alpha=0.22, linewidth=0
        )
        if outcome.low is not None and outcome.high is not None:
            axes.plot([outcome.low, outcome.high], [y, y], color=colour, linewidth=2.2, solid_capstyle="butt")
        if outcome.mean is not None:
            axes.plot([outcome.mean], [y], color=colour, marker="o", markersize=5.5)
        above_style: dict[str, Any] = {**text_style, "va": "bottom"}
        axes.annotate(outcome.row.row, (0, y - 0.2), xytext=(0, 2), color=INK, **above_style)
        verdict_style = {**above_style, "ha": "right", "color": colour, "fontweight": "bold"}
        axes.annotate(outcome.verdict, (1, y - 0.2), xytext=(56, 2), **verdict_style)
        axes.annotate("-" if outcome.paper is None else f"{outcome.paper:+g}", (1, y), **points_style)
    axes.annotate("paper's points", (1, -1.0), **points_style)
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
    table_rows = [
        (line, outcome.verdict in ("holds", "opposite")) for line, outcome in zip(rows, outcomes, strict=True)
    ]
    caption = "Each line: mean difference and interval of the row minus its neighbour."
    forest = page.figure("Differences", "accuracy", svg(draw(outcomes)), (), caption)
    cards = []
    for row in protocol.rows:
        row_curves, against_curves = row.arms(curves)
        if steps := band(row_curves)[0]:
            fig, axes = figure()
            draw_row(axes, RowResult(row.row, None, row_curves), RowResult(row.against, None, against_curves))
            finish(axes, "step", (0, 1), False, (steps[0], steps[-1]))
            text = f"{row.why} Grey: {row.against}."
            cards.append(page.figure(row.row, f"on {row.task}", svg(fig), (), text))
    notes = "".join(f"<li>{escape(line)}</li>" for line in (note, *rules(protocol, outcomes)))
    body = [
        f"<h1>{escape(protocol.title)}</h1>",
        page.section("Verdicts", forest, page.table(heads, table_rows), f'<ul class="look">{notes}</ul>'),
        page.section("Accuracy by step", f'<div class="grid">{"".join(cards)}</div>' if cards else ""),
    ]
    path.write_text(page.document(protocol.title, body), encoding="utf-8")


def _axis_limit(outcomes: Sequence[RowOutcome]) -> float:
    ends = [(outcome.low, outcome.high, outcome.mean, outcome.row.bound) for outcome in outcomes]
    return 1.1 * max(abs(end) for row in ends for end in row if end is not None)
