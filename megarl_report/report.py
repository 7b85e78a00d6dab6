"""Data of templates/report.html.j2, a self-contained page about one or several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from megarl.config.errors import ConfigError, DataError
from megarl.config.files import describe_error, write_atomic
from megarl.config.schema import EVALUATION, PRETRAINING, SUPERVISED, TRAIN
from megarl.config.text import printable
from megarl.observe.run_log import OBSERVED, SampleRecord, shorten
from megarl.observe.runs import RecordedRun, format_layout, load_run
from megarl.observe.terminal import MISSING, format_duration, format_number, list_evaluated_sources
from megarl_report.figures import SECTIONS, draw_figure, group_families
from megarl_report.plots import COLOURS, run_colour

MAIN_VERSIONS = ("megarl", "torch", "megatron-core", "transformers", "sglang", "transformer-engine")
LEVELS = 4  # of colour on either side of 0
# Columns of the table of data sources: metric -> format.
EVALUATED = {
    "problems": ".0f",
    "avg": ".3f",
    "pass": ".3f",
    "majority": ".3f",
    "score": ".3f",
    "length_mean": ".0f",
}
TRAINED = {"responses": ".0f", "accuracy": ".3f", "score": ".3f", "length": ".0f"}
# Folded steps of the sample browser, and characters shown of each response.
MORE_STEPS, MORE_CHARACTERS = 6, 1500
UNFOLDED = 3  # episodes with more turns show only the last one unfolded


def _printable(value: Any) -> Any:
    """Escape control characters of texts, not of rendered HTML."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


_templates = Environment(
    loader=PackageLoader("megarl_report"),
    autoescape=True,
    finalize=_printable,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_templates.globals |= {"COLOURS": COLOURS, "LEVELS": LEVELS}
# Macros: document, section, figure, table and legend.
page: Any = _templates.get_template("page.html.j2").module


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write a report to `out`, a file or folder, and return the file's path.

    Raises DataError for missing or damaged files, ConfigError if `out` cannot be written."""
    if not run_dirs:
        raise DataError("report: no run folder given (name at least one)")
    html = render([load_run(run_dir) for run_dir in run_dirs])
    target = out / "report.html" if out.is_dir() else out
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, html)
    except OSError as error:
        reason = (
            f"cannot be written: {describe_error(error)} (make room, or choose another place for the report)"
        )
        raise ConfigError(f"{target}: {reason}") from error
    return target


def render(runs: Sequence[RecordedRun]) -> str:
    legend = []
    for index, family in enumerate(group_families(runs) if len(runs) > 1 else ()):
        names = ", ".join(run.name for run in family)
        text = names if len(family) == 1 else f"{names}: {len(family)} seeds, mean and range"
        legend.append((run_colour(index), text))
    sections = [
        (title, [(spec, draw_figure(spec, runs)) for spec in specs]) for title, specs in SECTIONS.items()
    ]
    return _templates.get_template("report.html.j2").render(
        title=" and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs",
        named=len(runs) > 1,
        legend=legend,
        heads=[describe_run(run) for run in runs],
        sections=[
            (title, [(spec, drawing) for spec, drawing in figures if drawing]) for title, figures in sections
        ],
        missing=[spec.title for _, figures in sections for spec, drawing in figures if not drawing],
        browsers=[choose_shown_samples(run) for run in runs],
        spans=colour_spans,
        turns=split_turns,
        shorten=shorten,
        alarms=list_alarms(runs),
        sources=[tabulate_sources(run) for run in runs],
        tables=[
            tabulate_differences("Configuration", "keys", runs, [flatten(run.config) for run in runs]),
            tabulate_differences("Versions", "packages", runs, [flatten(run.versions) for run in runs]),
        ],
    )


def make_headline(run: RecordedRun) -> tuple[str, str, str]:
    """Return (title, first -> last value, remark) of evaluation accuracy, else of another metric."""
    for stage, key, title in (
        (EVALUATION, "eval/avg", "Evaluation accuracy"),
        (TRAIN, "reward/accuracy", "Training accuracy"),
        (PRETRAINING, "value/explained_variance", "Explained variance"),
        (SUPERVISED, "policy/nll_loss", "Supervised loss"),
    ):
        points = run.points(stage, key)
        if not points:
            continue
        first_step, last_step = min(points), max(points)
        change, remark = f"{points[last_step]:.3f}", f"at step {last_step}"
        if last_step > first_step:
            change, remark = f"{points[first_step]:.3f} → {change}", f"step {first_step} to {last_step}"
        if stage == EVALUATION:
            record = run.by_stage[EVALUATION][last_step]
            k = record.get("eval/k") or 1
            remark += f", avg@{k}" if "eval/k" in record else ", avg"
            if "eval/problems" in record:
                remark += f" over {record['eval/problems']} problems"
            intervals = [
                _format_interval(run.by_stage[EVALUATION][step]) for step in sorted({first_step, last_step})
            ]
            if all(intervals):
                remark += f"; 95 % confidence: {' → '.join(intervals)}"
            for name in ("pass", "majority"):
                if k > 1 and isinstance(record.get(f"eval/{name}"), int | float):
                    remark += f"; {name}@{k} {record[f'eval/{name}']:.3f} at the end"
        return title, change, remark
    return "Nothing recorded", "", ""


def _format_interval(record: Mapping[str, Any]) -> str:
    """Format the interval; empty unless k is 1."""
    from megarl.algorithms.scores import binary_interval

    problems, accuracy = record.get("eval/problems"), record.get("eval/avg")
    if record.get("eval/k") != 1 or not isinstance(problems, int) or not isinstance(accuracy, float):
        return ""
    if not (problems and 0 <= accuracy <= 1):
        return ""
    low, high = binary_interval(accuracy, problems)
    return f"{low:.3f} to {high:.3f}"


def describe_run(run: RecordedRun) -> dict[str, Any]:
    title, change, remark = make_headline(run)
    steps = max((step for stage in (TRAIN, SUPERVISED) for step in run.by_stage.get(stage, {})), default=0)
    planned_steps, parallel = run.setting("steps"), run.setting("parallel")
    prompts = run.setting("rollout", "prompts")
    group_size = None if run.setting("recipe") == SUPERVISED else run.setting("rollout", "group_size")
    versions = [f"{name} {run.versions[name]}" for name in MAIN_VERSIONS if name in run.versions]
    facts = {
        "Recipe": run.setting("recipe"),
        "Model": run.setting("model", "path"),
        "Precision": run.setting("model", "dtype"),
        "Layout": format_layout(parallel) if isinstance(parallel, Mapping) else None,
        "Device": run.setting("parallel", "device"),
        "Seed": run.setting("seed"),
        "Steps": f"{steps} of {planned_steps}" if planned_steps else steps,
        "Responses a step": f"{prompts} prompts x {group_size}" if prompts and group_size else None,
        "Time in recorded steps": format_duration(run.seconds) if run.seconds else None,
        "Main versions": ", ".join(versions),
    }
    known_facts = [(name, str(value)) for name, value in facts.items() if value not in (None, "")]
    return {"name": run.name, "what": title, "course": change, "remark": remark, "facts": known_facts}


def tabulate_sources(run: RecordedRun) -> dict[str, Any]:
    """Return a table of evaluation sets (first and last) and data sources (last tenth of the steps)."""
    steps = run.by_stage.get(TRAIN, {})
    last_records = [steps[step] for step in sorted(steps)[-max(1, len(steps) // 10) :]]
    trained_sources = {
        key.split("/")[1] for record in last_records for key in record if key.startswith("source/")
    }
    evaluations = run.by_stage.get(EVALUATION, {}).values()
    evaluated_sources = {name for record in evaluations for name in list_evaluated_sources(record)}

    def format_change(key: str, form: str) -> str:
        points = run.points(EVALUATION, key)
        texts = (
            [format_number(points[step], form) for step in (min(points), max(points))]
            if points
            else [MISSING]
        )
        return " to ".join(dict.fromkeys(texts))

    def trained_on(name: str, what: str, form: str) -> str:
        values = [record[key] for record in last_records if (key := f"source/{name}/{what}") in record]
        return format_number(sum(values) / len(values), form) if values else MISSING

    rows = [
        [
            name,
            *(format_change(f"eval/{name}/{what}", form) for what, form in EVALUATED.items()),
            *(trained_on(name, what, form) for what, form in TRAINED.items()),
        ]
        for name in sorted(evaluated_sources | trained_sources)
    ]
    heads = ["source", *EVALUATED, *(f"trained: {what}" for what in TRAINED)]
    return {
        "name": run.name,
        "heads": [head.replace("_", " ") for head in heads],
        "rows": [(row, False) for row in rows],
    }


def list_alarms(runs: Sequence[RecordedRun]) -> list[tuple[tuple[str, str], bool]]:
    """List alarms and events as rows ((place, text), is_highlighted)."""
    rows = []
    for run in runs:
        alarms = []
        for event in run.events:
            time = datetime.fromtimestamp(event["time"], UTC)
            alarms.append((f"{time:%Y-%m-%d %H:%M} UTC", event["event"], True))
        for record in run.records:
            where = f"{record['stage'].replace('_', ' ')} step {record['step']}"
            alarms += [(where, f"not finite: {text}", True) for text in record.get("alarms", ())]
            alarms += [(where, str(text), False) for text in record.get("events", ())]
        if run.unreadable:
            skipped = f"{run.unreadable} cut or foreign lines in its .jsonl files were skipped"
            alarms.append(("files", skipped, True))
        name = f"{run.name}: " if len(runs) > 1 else ""
        rows += [((f"{name}{where}", message), is_highlighted) for where, message, is_highlighted in alarms]
    return rows


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = "" if value is None else str(value)
    return flat


def tabulate_differences(
    title: str, what: str, runs: Sequence[RecordedRun], flats: Sequence[dict[str, str]]
) -> dict[str, Any]:
    """Return a table with a column per run, and its rows that differ."""
    rows = []
    for name in dict.fromkeys(name for flat in flats for name in flat):
        differs = len({flat.get(name) for flat in flats}) > 1
        rows.append(([name, *(flat.get(name, "-") for flat in flats)], differs))
    heads = [what.removesuffix("s"), *(run.name if len(runs) > 1 else "value" for run in runs)]
    differing_rows = [(cells, False) for cells, differs in rows if differs]
    return {"title": title, "what": what, "heads": heads, "rows": rows, "differing": differing_rows}


def pick_steps(steps: Sequence[int]) -> dict[str, int]:
    """Return the first, middle and last of ascending steps by name, without repeating a step."""
    step_by_name: dict[str, int] = {}
    for name, index in (("Early", 0), ("Middle", len(steps) // 2), ("Late", -1)):
        if steps and steps[index] not in step_by_name.values():
            step_by_name[name] = steps[index]
    return step_by_name


def choose_shown_samples(run: RecordedRun) -> dict[str, Any]:
    """Return the shown samples by step and prompt, preferably training steps with tokens.

    scales: "advantage" or "value" -> absolute value of the strongest colour; 2 % of the tokens exceed it"""
    groups_by_step: dict[int, dict[str, list[SampleRecord]]] = {}
    for sample in [s for s in run.samples if s.stage == TRAIN] or run.samples:
        groups_by_step.setdefault(sample.step, {}).setdefault(sample.prompt, []).append(sample)
    samples_by_step = {
        step: [s for group in groups.values() for s in group] for step, groups in groups_by_step.items()
    }
    steps = sorted(
        step for step in samples_by_step if any(s.tokens for s in samples_by_step[step])
    ) or sorted(samples_by_step)
    picked_steps = pick_steps(steps)
    scales: dict[str, float] = {}
    for name in ("advantage", "value"):
        columns = (
            _token_column(sample, name) for step in picked_steps.values() for sample in samples_by_step[step]
        )
        sizes = sorted(abs(x) for numbers in columns for x in numbers if x is not None)
        if sizes and sizes[-1] > 0:
            scales[name] = sizes[int(0.98 * (len(sizes) - 1))] or sizes[-1]
    other_steps = [step for step in steps if step not in picked_steps.values()]
    more_steps = (
        [other_steps[i * len(other_steps) // MORE_STEPS] for i in range(MORE_STEPS)]
        if len(other_steps) > MORE_STEPS
        else other_steps
    )
    return {
        "name": run.name,
        "scales": scales,
        "picked": {name: (step, groups_by_step[step]) for name, step in picked_steps.items()},
        "more": {step: groups_by_step[step] for step in more_steps},
    }


def _token_column(sample: SampleRecord, name: str) -> Sequence[float | None]:
    return (sample.advantages if name == "advantage" else sample.values) or ()


class TurnShown(NamedTuple):
    """A turn of the policy and the observation after it."""

    pieces: list[tuple[str, str, str]]  # from `colour_spans`
    observed: str
    brief: str  # the turn's first line
    unfolded: bool


def split_turns(sample: SampleRecord, scales: Mapping[str, float] | None) -> list[TurnShown]:
    """Return the turns of an episode; [] for a response of one turn."""
    parts: list[tuple[bool, str, list[tuple[str, str, str]]]] = []  # observed, text, spans
    tokens = sample.tokens or []
    if scales is not None and sample.observed:
        flags = sample.observed
        boundaries = [i for i in range(1, len(tokens)) if flags[i] != flags[i - 1]]
        for begin, end in pairwise([0, *boundaries, len(tokens)]):
            parts.append((flags[begin], "".join(tokens[begin:end]), colour_spans(sample, scales, begin, end)))
    elif sample.turns:
        max_characters = MORE_CHARACTERS if scales is None else None
        for role, text in sample.turns:
            text = shorten(text, max_characters // len(sample.turns)) if max_characters else text
            parts.append((role == OBSERVED, text, [("", "", text)]))
    if not parts:
        return []
    if parts[0][0]:  # an observation before the first turn
        parts.insert(0, (False, "", []))
    policy_turns = parts[::2]
    observations = [text for _, text, _ in parts[1::2]] + [""]
    turns = []
    for i, (_, text, pieces) in enumerate(policy_turns):
        is_unfolded = len(policy_turns) <= UNFOLDED or i == len(policy_turns) - 1
        first_line = shorten((text.strip().splitlines() or [""])[0], 60).replace("\n", " ")
        turns.append(
            TurnShown(pieces, observations[i] if i < len(observations) else "", first_line, is_unfolded)
        )
    return turns


def colour_spans(
    sample: SampleRecord, scales: Mapping[str, float] | None, begin: int = 0, end: int | None = None
) -> list[tuple[str, str, str]]:
    """Return a response, or its tokens `begin` to `end`, as (CSS classes, title, text).

    Neighbouring tokens of equal advantage and value share a span. Without scales the text is shortened."""
    if scales is None:
        return [("", "", shorten(sample.response, MORE_CHARACTERS))]
    if not sample.tokens:
        return [("", "", sample.response)]
    columns = {name: _token_column(sample, name) for name in scales}
    spans = []
    numbers_by_token = []
    for i in range(len(sample.tokens))[begin:end]:
        entries = ((name, column[i]) for name, column in columns.items() if i < len(column))
        numbers_by_token.append({name: x for name, x in entries if x is not None})
    for token_numbers, tokens in groupby(
        zip(numbers_by_token, sample.tokens[begin:end], strict=True), key=itemgetter(0)
    ):
        levels = {name: colour_level(x, scales[name]) for name, x in token_numbers.items()}
        classes = " ".join(
            f"{name[0]}{'p' if level > 0 else 'n'}{abs(level)}" for name, level in levels.items() if level
        )
        title = ", ".join(f"{name} {x:+.3g}" for name, x in token_numbers.items())
        text = "".join(token for _, token in tokens)
        # A line end has no width to colour.
        spans.append((classes, title, text.replace("\n", "↵\n") if token_numbers else text))
    return spans


def colour_level(number: float, scale: float) -> int:
    return max(-LEVELS, min(LEVELS, round(LEVELS * number / scale)))
