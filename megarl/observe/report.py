"""report.html: one self-contained page about one run, or about several laid over each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError, DataError
from megarl.observe import page
from megarl.observe.figures import SECTIONS, draw
from megarl.observe.plots import run_colour
from megarl.observe.runs import Run, families, layout_text, load_run
from megarl.observe.sample_browser import browser
from megarl.observe.terminal_format import duration

READING = (
    '<p class="note muted">The number beside a curve is its value at the end. '
    "A noisy curve is drawn thin under its moving average, and the number is the average's.</p>"
)
ALARMS_SHOWN = 200


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Writes the report of these runs to `out` (a folder stands for report.html in it) and returns the file's path.

    Raises DataError if a folder has no metrics or a damaged file, ConfigError if `out` cannot be written."""
    if not run_dirs:
        raise DataError("report: no run folder given (name at least one)")
    runs = [load_run(Path(run_dir)) for run_dir in run_dirs]
    out = Path(out)
    target = out / "report.html" if out.is_dir() else out
    html = render(runs)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror} (choose another place for the report)") from error
    return target


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    related = families(runs)
    colours = [(run_colour(i), _family_name(family)) for i, family in enumerate(related)] if len(runs) > 1 else []
    body = [
        f'<header>\n<p class="muted">megarl report</p>\n<h1>{escape(title)}</h1>\n</header>',
        page.legend(colours, "legend runs"),
        *(_head(run, len(runs) > 1) for run in runs),
        *_figures(runs),
        *(browser(run, number, len(runs) > 1) for number, run in enumerate(runs)),
        _alarms(runs),
        _configuration(runs),
        _versions(runs),
    ]
    return page.document(f"megarl: {title}", body)


def _family_name(family: Sequence[Run]) -> str:
    """Of runs that differ in their seed only: what the band is."""
    names = ", ".join(run.name for run in family)
    return names if len(family) == 1 else f"{names}: {len(family)} seeds, mean and range"


def headline(run: Run) -> tuple[str, str, str]:
    """(what, from -> to, remark): evaluation accuracy; without evaluations training accuracy; else the supervised loss."""
    for stage, key, what in (
        ("eval", "eval/avg", "Evaluation accuracy"),
        ("train", "reward/accuracy", "Training accuracy"),
        ("value_pretraining", "value/explained_variance", "Explained variance"),
        ("sft", "policy/nll_loss", "Supervised loss"),
    ):
        points = run.points(stage, key)
        if points:
            first, last = min(points), max(points)
            course = f"{points[first]:.3f} → {points[last]:.3f}" if last > first else f"{points[last]:.3f}"
            remark = f"step {first} to {last}" if last > first else f"at step {last}"
            return what, course, remark + (_evaluation_remark(run, last) if stage == "eval" else "")
    return "Nothing recorded", "", ""


def _evaluation_remark(run: Run, step: int) -> str:
    record = run.by_stage["eval"][step]
    k = record.get("eval/k") or 1
    text = f", avg@{k}"
    if "eval/problems" in record:
        text += f" over {record['eval/problems']} problems"
    for name in ("pass", "majority"):
        if k > 1 and isinstance(record.get(f"eval/{name}"), int | float):
            text += f"; {name}@{k} {record[f'eval/{name}']:.3f} at the end"
    return text


def _head(run: Run, named: bool) -> str:
    what, course, remark = headline(run)
    steps = max((step for stage in ("train", "sft") for step in run.by_stage.get(stage, {})), default=0)
    of = run.setting("steps")
    pairs = [
        ("Recipe", run.setting("recipe")),
        ("Model", run.setting("model", "path")),
        ("Precision", run.setting("model", "dtype")),
        ("Layout", layout_text(run.setting("parallel")) if isinstance(run.setting("parallel"), Mapping) else None),
        ("Device", run.setting("parallel", "device")),
        ("Seed", run.setting("seed")),
        ("Steps", f"{steps} of {of}" if of else steps),
        ("Responses a step", _batch(run)),
        ("Time in recorded steps", duration(run.seconds) if run.seconds else None),
        ("Main versions", ", ".join(f"{name} {run.versions[name]}" for name in MAIN_VERSIONS if name in run.versions)),
    ]
    name = f" · {escape(run.name)}" if named else ""
    return (
        f'<div class="head">\n<div class="card headline"><h3>{escape(what)}{name}</h3><p class="big">{escape(course)}</p>'
        f'<p class="muted">{escape(remark)}</p></div>\n<div class="card facts">{page.facts(pairs)}</div>\n</div>'
    )


MAIN_VERSIONS = ("megarl", "torch", "megatron-core", "transformers", "sglang", "transformer-engine")


def _batch(run: Run) -> str | None:
    if run.setting("recipe") == "sft":
        return None
    prompts, size = run.setting("rollout", "prompts"), run.setting("rollout", "group_size")
    return f"{prompts} prompts x {size}" if prompts and size else None


def _figures(runs: Sequence[Run]) -> list[str]:
    """The sections of figures, and a note that lists the figures whose data no run has."""
    sections, missing = [], []
    for title, specs in SECTIONS:
        cards = []
        for spec in specs:
            drawing = draw(spec, runs)
            if drawing is None:
                missing.append(spec.title)
            else:
                cards.append(page.figure(spec.title, spec.unit, drawing.svg, drawing.legend, spec.look))
        sections.append(page.section(title, '<div class="grid">\n' + "\n".join(cards) + "\n</div>" if cards else ""))
    if len(missing) < sum(len(specs) for _, specs in SECTIONS):
        sections.append(READING)
    if missing:
        sections.append(f'<p class="note muted">Left out, because there is nothing to draw: {escape(", ".join(missing))}.</p>')
    return sections


def _alarms(runs: Sequence[Run]) -> str:
    """Alarms and events of all runs by step, and what could not be read."""
    rows = []
    for run in runs:
        name = f"{run.name}: " if len(runs) > 1 else ""
        rows += [((f"{name}{datetime.fromtimestamp(event['time'], UTC):%Y-%m-%d %H:%M} UTC", event["event"]), True) for event in run.events]
        for record in run.records:
            where = f"{name}{record['stage'].replace('_', ' ')} step {record['step']}"
            rows += [((where, f"not finite: {text}"), True) for text in record.get("alarms", ())]
            rows += [((where, str(text)), False) for text in record.get("events", ())]
        if run.unreadable:
            rows.append(((f"{name}files", f"{run.unreadable} cut or foreign lines in its .jsonl files were skipped"), True))
    rest = len(rows) - ALARMS_SHOWN
    more = f'<p class="note muted">and {rest} more in metrics.jsonl and events.jsonl</p>' if rest > 0 else ""
    return page.section("Alarms and events", page.table(("where", "what"), rows[:ALARMS_SHOWN]) + more) if rows else ""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted keys with their values as text."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = "" if value is None else str(value)
    return flat


def _configuration(runs: Sequence[Run]) -> str:
    return _compared("Configuration", "keys", [flatten(run.config) for run in runs], runs)


def _versions(runs: Sequence[Run]) -> str:
    return _compared("Versions", "packages", [flatten(run.versions) for run in runs], runs)


def _compared(title: str, what: str, flats: Sequence[dict[str, str]], runs: Sequence[Run]) -> str:
    """A folded table with a column per run; keys in which the runs differ stand out and are shown before the fold."""
    names = list(dict.fromkeys(name for flat in flats for name in flat))
    if not names:
        return ""
    rows = [([name, *(flat.get(name, "-") for flat in flats)], len({flat.get(name) for flat in flats}) > 1) for name in names]
    heads = (what.removesuffix("s"), *(run.name if len(runs) > 1 else "value" for run in runs))
    differing = [(cells, False) for cells, differs in rows if differs]
    above = page.table(heads, differing) if differing else ""
    return page.section(title, above, f"<details><summary>all {len(rows)} {what}</summary>{page.table(heads, rows)}</details>")
