"""Figures of the report; figures.yaml lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import cycle
from typing import Any, NamedTuple

from megarl.config.load import parse_yaml
from megarl.config.schema import EVALUATION, PRETRAINING, TRAIN
from megarl.observe.run_log import Record
from megarl.observe.runs import Points, RecordedRun, compute_group_shares
from megarl.observe.timeline import WAIT
from megarl_report import plots
from megarl_report.plots import COLOURS, Drawing, Interval, Limits, Line, Stairs, run_colour

COLOUR = dict(zip(("blue", "orange", "green", "purple", "gold", "pink"), COLOURS, strict=False))
BLUE, ORANGE, GREEN = COLOURS[:3]
EARLY, LATE = COLOURS[9], COLOURS[1]
# Phases with the same colour in every report.
PHASES = (
    *("rollout", "old_logprobs", "values", "gae_advantages"),
    *("critic_update", "actor_update", "weight_transfer", "reward_model"),
)
Runs = Sequence[RecordedRun]


def group_families(runs: Sequence[RecordedRun]) -> list[list[RecordedRun]]:
    """Group runs whose configurations differ only in seed and folder."""
    groups: dict[str, list[RecordedRun]] = {}
    for number, run in enumerate(runs):
        settings = {key: value for key, value in run.config.items() if key not in ("seed", "run_dir")}
        # A run without a configuration is a separate group.
        key = json.dumps(settings, sort_keys=True, default=str) if settings else str(number)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def average_curves(courses: Sequence[Points]) -> tuple[Points, dict[int, tuple[float, float]]]:
    """Return step -> mean and step -> (min, max) where all curves have values; no range of one curve."""
    if len(courses) < 2:
        return (courses[0] if courses else {}), {}
    steps = sorted(set(courses[0]).intersection(*courses[1:]))
    values = {step: [curve[step] for curve in courses] for step in steps}
    means = {step: sum(v) / len(v) for step, v in values.items()}
    return means, {step: (min(v), max(v)) for step, v in values.items()}


@dataclass(frozen=True)
class Spec:
    """A figure of figures.yaml, which documents the fields."""

    title: str
    look: str
    curves: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    stage: str = TRAIN
    draw: str = ""
    limits: Limits = (None, None)
    noisy: bool = True
    nonzero: bool = False
    unit: str = ""
    xlabel: str = "step"
    log: bool = False


def draw_figure(spec: Spec, runs: Runs) -> Drawing | None:
    """Plot a figure; None if no run has its data."""
    return draw_curves(spec, runs) if spec.curves else DRAW[spec.draw](runs)


def draw_curves(spec: Spec, runs: Runs) -> Drawing | None:
    """Plot one run with a colour per curve, several with a style per curve.

    Seeds of a run share a curve: their mean, with a band of their range."""

    def read_points(run: RecordedRun, key: str) -> Points:
        # With one sample, pass and majority equal the average.
        is_single_sample = max(run.points(EVALUATION, "eval/k").values(), default=1) <= 1
        return (
            {} if is_single_sample and key in ("eval/pass", "eval/majority") else run.points(spec.stage, key)
        )

    if spec.nonzero and not any(any(read_points(run, key).values()) for run in runs for key in spec.curves):
        return None
    families = group_families(runs)
    overlay = len(families) > 1
    line_by_curve: dict[tuple[int, int], Line] = {}  # by family and curve
    for family_index, family in enumerate(families):
        for curve_index, (key, (label, colour)) in enumerate(spec.curves.items()):
            mean, band = average_curves([curve for run in family if (curve := read_points(run, key))])
            markers = spec.stage == EVALUATION or len(mean) <= 12
            shade = run_colour(family_index) if overlay else COLOUR[colour]
            if mean:
                line_by_curve[family_index, curve_index] = Line(
                    mean, shade, label, curve_index if overlay else 0, markers, spec.noisy, band
                )
    lines = list(line_by_curve.values())
    if len({curve_index for _, curve_index in line_by_curve}) == 1:
        lines = [replace(line, label="", style=0) for line in lines]
    return Drawing(plots.draw_lines(lines, spec.xlabel, spec.limits, spec.log)) if lines else None


def draw_rewards(runs: Runs) -> Drawing | None:
    """Plot the verifier's score, the reward terms and the reward model's score."""
    records = [record for run in runs for record in run.by_stage.get(TRAIN, {}).values()]
    labels = {"reward/score": "verifier's score", "reward/model_mean": "reward model"}
    keys = {key for record in records for key in record if key in labels or key.startswith("reward/term_")}
    label_by_key = {key: labels.get(key) or _words(key.removeprefix("reward/term_")) for key in sorted(keys)}
    curves = dict(zip(label_by_key, zip(label_by_key.values(), cycle(COLOUR), strict=False), strict=False))
    return draw_curves(Spec("", "", curves), runs) if curves else None


def draw_groups(runs: Runs) -> Drawing | None:
    """Plot shares of groups: kept, all right, and for one run all wrong."""

    def read_shares(run: RecordedRun, name: str) -> Points:
        steps = run.by_stage.get(TRAIN, {}).items()
        return {step: shares[name] for step, record in steps if (shares := compute_group_shares(record))}

    if not any(read_shares(run, "kept") for run in runs):
        return None
    if len(runs) > 1:
        lines = []
        for family_index, family in enumerate(group_families(runs)):
            for style, name in enumerate(("kept", "all_right")):
                mean, band = average_curves([curve for run in family if (curve := read_shares(run, name))])
                label = _words(name)
                lines += [Line(mean, run_colour(family_index), label, style, band=band)] if mean else []
        return Drawing(plots.draw_lines(lines, "step", (0, 1)))
    layers = [
        Line(read_shares(runs[0], "kept"), BLUE, "kept: right and wrong answers"),
        Line(read_shares(runs[0], "all_wrong"), ORANGE, "all wrong"),
        Line(read_shares(runs[0], "all_right"), GREEN, "all right"),
    ]
    return Drawing(plots.draw_stack(layers, (0, 1)), tuple((layer.colour, layer.label) for layer in layers))


def _phases(runs: Runs, prefix: str, nonzero: bool = False) -> dict[str, str]:
    """Return phase -> colour of phases with a metric `prefix`<phase>, those of PHASES first."""
    records = [record for run in runs for record in run.by_stage.get(run.main_stage, {}).values()]
    keys = {key for record in records for key, value in record.items() if value or not nonzero}
    names = {key.removeprefix(prefix) for key in keys if key.startswith(prefix)} - {"step"}
    other_phases, free_colours = sorted(names - set(PHASES)), COLOURS[len(PHASES) :]
    colour_by_phase = {phase: COLOURS[i] for i, phase in enumerate(PHASES) if phase in names}
    return colour_by_phase | {
        phase: free_colours[i % len(free_colours)] for i, phase in enumerate(other_phases)
    }


def _words(name: str) -> str:
    return name.replace("_", " ")


def draw_times(runs: Runs) -> Drawing | None:
    """Plot the seconds of each phase and of the rest; for several runs bars of means."""
    phases = _phases(runs, "time/")
    remainder = "other" if phases else "whole step"
    colours = {**phases, remainder: COLOURS[-1] if phases else BLUE}
    curves_by_run, means = [], []  # per run: phase -> step -> seconds, phase -> mean seconds
    for run in runs:
        curves = {phase: run.points(run.main_stage, f"time/{phase}") for phase in phases}
        step_seconds = run.points(run.main_stage, "time/step")
        phase_seconds = {step: sum(c.get(step, 0.0) for c in curves.values()) for step in step_seconds}
        curves[remainder] = {
            step: max(0.0, seconds - phase_seconds[step]) for step, seconds in step_seconds.items()
        }
        steps = max(1, len(run.by_stage.get(run.main_stage, ())))
        curves_by_run.append(curves)
        means.append({phase: sum(c.values()) / steps for phase, c in curves.items()})
    shown_phases = [phase for phase in colours if any(mean[phase] for mean in means)]
    if not shown_phases:
        return None
    if len(runs) > 1:
        pieces = [[(mean[p], colours[p]) for p in shown_phases] for mean in means]
        bars = dict(zip((run.name for run in runs), pieces, strict=True))
        return Drawing(plots.draw_bars(bars, "s"), tuple((colours[p], _words(p)) for p in shown_phases))
    mean, mean_total = means[0], sum(means[0].values())
    texts = {
        p: f"{_words(p)} {plots.format_value(mean[p])} s, {mean[p] / mean_total:.0%}" for p in shown_phases
    }
    layers = [Line(curves_by_run[0][p], colours[p]) for p in shown_phases]
    return Drawing(plots.draw_stack(layers), tuple((colours[p], texts[p]) for p in shown_phases))


def draw_timeline(runs: Runs) -> Drawing | None:
    """Plot each rank's phases in a few steps, with waiting times."""
    if len(runs) != 1 or not runs[0].timeline:
        return None
    run = runs[0]
    steps = _choose_timeline_steps(run)
    if not steps:
        return None
    names = {phase["phase"] for phases in run.timeline.values() for phase in phases}
    fixed_colours = {phase: COLOURS[i] for i, phase in enumerate(PHASES)}
    free_colours = cycle(
        (*(c for p, c in fixed_colours.items() if p not in names), *COLOURS[len(PHASES) : -1])
    )
    colours = {name: fixed_colours.get(name) or next(free_colours) for name in sorted(names)}
    colours |= {name: COLOURS[-1] for name in names if name.startswith(WAIT)}
    panels, seconds_by_phase = [], dict.fromkeys(names, 0.0)
    for title, begin, end in steps:
        rows: dict[str, list[Interval]] = {}
        for rank, phases in run.timeline.items():
            row = rows[f"rank {rank}"] = []
            for phase in phases:
                if phase["end"] <= begin or phase["begin"] >= end:
                    continue
                visible_begin, visible_end = max(phase["begin"], begin), min(phase["end"], end)
                waited = max(0.0, phase["waited"] - (phase["end"] - visible_end))
                row.append(
                    Interval(visible_begin - begin, visible_end - begin, waited, colours[phase["phase"]])
                )
                seconds_by_phase[phase["phase"]] += visible_end - visible_begin
        panels.append((f"{title}: {plots.format_value(end - begin)} s", rows))
    min_seconds = 0.01 * sum(seconds_by_phase.values())
    legend = tuple(
        (colours[n], _words(n))
        for n in sorted(names, key=lambda n: -seconds_by_phase[n])
        if seconds_by_phase[n] > min_seconds
    )
    return Drawing(plots.draw_timeline(panels), legend, _tabulate_waits(run, sorted(names)))


def _choose_timeline_steps(run: RecordedRun) -> list[tuple[str, float, float]]:
    """Return (title, begin, end) of the second, median, slowest and last step, in seconds since 1970.

    The first step warms up."""
    rank_0 = run.timeline[min(run.timeline)]
    begins: dict[int, float] = {}
    for phase in rank_0:
        if phase["stage"] == run.main_stage and phase["step"] in run.by_stage.get(run.main_stage, {}):
            begins.setdefault(phase["step"], phase["begin"])
    ends = {step: begins.get(step + 1) for step in begins}
    phase_ends = ((phase["step"], phase["end"]) for phase in rank_0 if phase["stage"] == run.main_stage)
    spans = {step: (begins[step], ends[step] or end) for step, end in phase_ends if step in begins}
    if not spans:
        return []
    seconds_by_step = {step: end - begin for step, (begin, end) in spans.items()}
    steps = sorted(seconds_by_step)[1:] or list(seconds_by_step)
    steps_by_duration = sorted(steps, key=seconds_by_step.__getitem__)
    names: dict[int, list[str]] = {}
    for name, step in (
        ("after warm-up", steps[0]),
        ("median", steps_by_duration[len(steps_by_duration) // 2]),
        ("slowest", steps_by_duration[-1]),
        ("last", steps[-1]),
    ):
        names.setdefault(step, []).append(name)
    return [(f"step {step}, {', '.join(titles)}", *spans[step]) for step, titles in sorted(names.items())]


def _tabulate_waits(run: RecordedRun, names: Sequence[str]) -> tuple[list[str], list[tuple[list[str], bool]]]:
    """Return heads and rows: shares of each rank's time spent waiting, by phase."""
    waits: dict[str, dict[str, float]] = {}  # rank -> phase -> share
    for rank, phases in run.timeline.items():
        total = sum(phase["end"] - phase["begin"] for phase in phases) or 1.0
        shares = waits[f"rank {rank}"] = {}
        for phase in phases:
            shares[phase["phase"]] = shares.get(phase["phase"], 0.0) + phase["waited"] / total
    columns = [n for n in names if any(shares.get(n, 0.0) >= 0.0005 for shares in waits.values())]
    mean_shares = {n: sum(shares.get(n, 0.0) for shares in waits.values()) / len(waits) for n in columns}
    mean_label = f"{len(waits)} of {run.ranks} ranks" if len(waits) < run.ranks else "all ranks"
    rows = []
    for name, shares in {mean_label: mean_shares, **waits}.items():
        numbers = sum(shares.values()), *(shares.get(n, 0.0) for n in columns)
        rows.append(([name, *(f"{number:.1%}" for number in numbers)], name == mean_label))
    return ["share of the time that it waited", "all phases", *map(_words, columns)], rows


def draw_memory(runs: Runs) -> Drawing | None:
    """Plot the peak of each phase's memory/<phase> in GiB; of several runs only the highest."""
    bars: dict[str, list[tuple[float, str]]] = {}
    for run in runs:
        colours = _phases([run], "memory/", nonzero=True)
        peaks = {p: max(run.points(run.main_stage, f"memory/{p}").values()) / 2**30 for p in colours}
        if peaks and len(runs) > 1:
            peak_phase = max(peaks, key=peaks.__getitem__)
            bars[f"{run.name}: {_words(peak_phase)}"] = [(peaks[peak_phase], colours[peak_phase])]
        elif peaks:
            bars = {_words(phase): [(peak, colours[phase])] for phase, peak in peaks.items()}
    return Drawing(plots.draw_bars(bars, "GiB")) if bars else None


# Figures of distributions.jsonl: early and late steps of one family, or late steps of several.

Table = dict[str, list[float]]  # row -> sum per bin
DISTRIBUTED = (TRAIN, PRETRAINING)  # stages with distributions


class Third(NamedTuple):
    """Sums over consecutive steps."""

    first: int
    last: int
    table: Table


def add_tables(tables: Sequence[Mapping[str, Any]]) -> Table:
    """Add tables bin by bin, without those of another shape than the last one's."""
    shapes = [{row: len(sums) for row, sums in table.items()} for table in tables]
    matching_tables = [table for table, shape in zip(tables, shapes, strict=True) if shape == shapes[-1]]
    bins = {
        row: zip(*([x or 0.0 for x in table[row]] for table in matching_tables), strict=True)
        for row in shapes[-1]
    }
    return {row: [sum(column) for column in columns] for row, columns in bins.items()}


def sum_thirds(records: Sequence[Record], name: str, stage: str) -> list[Third]:
    """Sum table `name` over the first and last third of a stage's steps; over all if fewer than 3."""
    stage_records = (record for record in records if record["stage"] == stage)
    tables = {record["step"]: record[name] for record in stage_records if isinstance(record.get(name), dict)}
    all_steps = sorted(tables)
    size = -(-len(all_steps) // 3)
    thirds = [all_steps[:size], all_steps[-size:]] if len(all_steps) > 2 else [all_steps] if all_steps else []
    return [Third(steps[0], steps[-1], add_tables([tables[step] for step in steps])) for steps in thirds]


def collect_tables(runs: Runs, name: str) -> list[tuple[str, str, Table]]:
    """Return (colour, legend, sums of table `name`) of each curve, the latest steps last."""
    families = group_families(runs)
    tables: list[tuple[str, str, Table]] = []
    for number, family in enumerate(families):
        stages = ([sum_thirds(run.distributions, name, stage) for stage in DISTRIBUTED] for run in family)
        thirds_by_run = [train or pretraining for train, pretraining in stages if train or pretraining]
        if thirds_by_run and len(families) > 1:
            tables.append(
                (run_colour(number), "", add_tables([thirds[-1].table for thirds in thirds_by_run]))
            )
        elif thirds_by_run:
            has_early_steps = all(len(thirds) > 1 for thirds in thirds_by_run)
            for colour, i in ((EARLY, 0), (LATE, -1)) if has_early_steps else ((LATE, -1),):
                first, last, _ = thirds_by_run[0][i]
                legend = f"steps {first} to {last}" if last > first else f"step {first}"
                tables.append((colour, legend, add_tables([thirds[i].table for thirds in thirds_by_run])))
    return tables


def _legend(tables: Sequence[tuple[str, str, Table]]) -> tuple[tuple[str, str], ...]:
    return tuple((colour, text) for colour, text, _ in tables if text)


def _shares(counts: Sequence[float]) -> list[float]:
    return [count / max(sum(counts), 1.0) for count in counts]


def draw_lambda(runs: Runs) -> Drawing | None:
    """Plot the shares of responses, and the mean lambda, by length."""
    tables = collect_tables(runs, "lambda")
    if not tables:
        return None
    max_tokens = max(
        (run.setting("rollout", "max_response_tokens", default=0) or 0 for run in runs), default=0
    )
    stairs, lines = [], []
    for colour, _, table in tables:
        counts, sums = table["responses"], table["lambda"]
        width = (max_tokens or len(counts)) / len(counts)
        edges = [i * width for i in range(len(counts) + 1)]
        stairs.append(Stairs(edges, _shares(counts), colour, filled=True))
        filled_bins = [i for i, n in enumerate(counts) if n]
        lines.append(
            ([(i + 0.5) * width for i in filled_bins], [sums[i] / counts[i] for i in filled_bins], colour)
        )
    return Drawing(plots.draw_stairs(stairs, "response length, tokens", lines=lines), _legend(tables))


def means_by_position(table: Table, row: str) -> Points:
    """Return per cent of the response -> token mean of `row`."""
    counts = table["tokens"]
    return {round((i + 0.5) * 100 / len(counts)): table[row][i] / n for i, n in enumerate(counts) if n}


def draw_entropy(runs: Runs) -> Drawing | None:
    """Plot the mean entropy by position in the response."""
    tables = collect_tables(runs, "entropy")
    means = [(means_by_position(table, "entropy"), colour) for colour, _, table in tables]
    lines = [Line(points, colour, noisy=False) for points, colour in means if points]
    if not lines:
        return None
    return Drawing(plots.draw_lines(lines, "part of the response, %", (0, None)), _legend(tables))


def draw_value_error(runs: Runs) -> Drawing | None:
    """Plot the mean |V - R|, and for one family's last steps V - R, by position."""
    tables = collect_tables(runs, "value_error")
    is_one_family = all(text for _, text, _ in tables)
    lines = []
    for number, (colour, _, table) in enumerate(tables):
        is_last = number == len(tables) - 1 and is_one_family
        for row, label, style in (("absolute", "|V-R|", 0), ("error", "V-R", 2)):
            means = means_by_position(table, row)
            if means and (row == "absolute" or is_last):
                lines.append(Line(means, colour, label if is_last else "", style, noisy=False))
    if not lines:
        return None
    return Drawing(plots.draw_lines(lines, "part of the response, %", (0, None)), _legend(tables))


def draw_mismatch(runs: Runs) -> Drawing | None:
    """Plot the shares of tokens by difference of log-probs."""
    tables = [entry for entry in collect_tables(runs, "mismatch") if sum(entry[2]["tokens"])]
    if not tables:
        return None
    bins = len(tables[0][2]["tokens"])
    middle = bins // 2
    ticks = {middle + 0.5: "0"}
    for decade in (-5, -3, -1, 1):
        # Edges are half decades from 1e-6 (algorithms/mismatch.py), on both sides of the middle bin.
        edge = 1 + 2 * (decade + 6)
        text = f"{10.0**decade:g}" if decade > -3 else f"1e{decade}"
        ticks |= {middle + edge: text, middle + 1 - edge: f"-{text}"}
    stairs = []
    for colour, text, table in tables:
        if len(table["tokens"]) == bins:
            is_filled = table is tables[-1][2] and bool(text)
            stairs.append(Stairs(range(bins + 1), _shares(table["tokens"]), colour, is_filled))
    return Drawing(plots.draw_stairs(stairs, "difference, nats", ticks=ticks, log=True), _legend(tables))


DRAW = {
    "rewards": draw_rewards,
    "groups": draw_groups,
    "times": draw_times,
    "timeline": draw_timeline,
    "memory": draw_memory,
    "entropy": draw_entropy,
    "lambda": draw_lambda,
    "value_error": draw_value_error,
    "mismatch": draw_mismatch,
}
_TEXT = files("megarl_report").joinpath("figures.yaml").read_text(encoding="utf-8")
_LISTED = parse_yaml(_TEXT, "figures.yaml")
SECTIONS = {section: [Spec(**entry) for entry in entries] for section, entries in _LISTED.items()}
