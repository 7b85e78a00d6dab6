"""How numbers, columns and sparklines of the terminal view are written; pure functions of a step's metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megarl.observe.runs import kept_share

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.:-=+*#"
MISSING = "-"


@dataclass(frozen=True)
class Column:
    """A quantity of a step: its short name in plain lines, its long one in the live table, the metrics that it shows
    (several are joined by a slash), how each is formatted, and the width of one of them in a plain line."""

    short: str
    long: str
    keys: tuple[str, ...]
    form: str
    width: int


COLUMNS = (
    Column("acc", "accuracy", ("reward/accuracy",), ".3f", 5),
    Column("reward", "reward", ("reward/mean",), "+.3f", 6),
    Column("nll", "NLL loss", ("policy/nll_loss",), ".4f", 6),
    Column("len", "response length", ("response/length_mean",), "tokens", 6),
    Column("cut", "truncated", ("reward/truncated",), ".3f", 5),
    Column("ent", "entropy", ("policy/entropy",), ".3f", 5),
    Column("clip", "clipped low / high", ("policy/clip_fraction_low", "policy/clip_fraction_high"), ".4f", 6),
    Column("vloss", "value loss", ("value/loss",), ".4f", 7),
    Column("ev", "explained variance", ("value/explained_variance",), "+.2f", 5),
    Column("lr", "learning rate", ("policy/lr",), ".1e", 7),
    Column("gnorm", "gradient norm", ("policy/grad_norm",), ".3g", 6),
    Column("kept", "groups kept", ("groups_kept",), ".2f", 4),
    Column("tok/s", "tokens/s rollout / train", ("throughput/rollout_tokens", "throughput/train_tokens"), "count", 5),
    Column("step", "time of the step", ("time/step",), "seconds", 6),
)
# What a plain line leaves out in a stage: quantities that say nothing there.
PLAIN_LEAVES_OUT = {"train": {"nll", "vloss", "cut"}, "value_pretraining": {"nll", "cut"}, "sft": set[str]()}


def compact(value: float) -> str:
    """1234567 -> 1.23M, in at most 5 characters up to 999T."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            return f"{value:.0f}{unit}" if unit == "" or abs(value) >= 99.95 else f"{value:.3g}{unit}"
        value /= 1000
    raise AssertionError("unreachable: T is the last unit")


def duration(seconds: float) -> str:
    """0.82 -> 0.82s, 75 -> 1:15, 3700 -> 1:01:40, 90000 -> 1d 1:00."""
    if seconds < 59.95:
        return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    return f"{hours // 24}d {hours % 24}:{minutes:02}"


def number(value: Any, form: str) -> str:
    """A metric as text, MISSING where it was not recorded or was not finite."""
    if not isinstance(value, int | float):
        return MISSING
    if form == "count":
        return compact(value)
    if form == "tokens":
        return f"{value:.1f}" if value < 9999.5 else f"{value:.0f}"
    if form == "seconds":
        return duration(value)
    return format(value, form)


def values(column: Column, record: Mapping[str, Any]) -> list[str]:
    """The column's numbers in this record, formatted."""
    shares = kept_share(record) or {}
    found = {**record, "groups_kept": shares.get("kept")}
    return [number(found.get(key), column.form) for key in column.keys]


def present(record: Mapping[str, Any]) -> list[Column]:
    """The columns of which this record has at least one number."""
    return [column for column in COLUMNS if any(text != MISSING for text in values(column, record))]


def plain_line(record: Mapping[str, Any], columns: Sequence[Column], total: int, left: str) -> str:
    """One aligned line for a log file; `total` steps in this stage (0: unknown), `left` the time left, or empty."""
    stage = {"value_pretraining": "value"}.get(record["stage"], record["stage"])
    digits = len(str(total)) if total else 1
    step = f"{record['step']:>{digits}}" + (f"/{total}" if total else "")
    parts = [f"{stage:<5} {step}"]
    parts += [f"{c.short} " + "/".join(text.rjust(c.width) for text in values(c, record)) for c in columns]
    return "  ".join([*parts, f"left {left}"] if left else parts)


def evaluation_text(record: Mapping[str, Any]) -> str:
    """`0.621 avg  0.700 pass  0.650 majority  (k 4, 512 problems)`; pass and majority only where k > 1 makes them differ."""
    k = record.get("eval/k") or 1
    names = ("avg", "pass", "majority") if k > 1 else ("avg",)
    text = "  ".join(f"{number(record.get(f'eval/{name}'), '.3f')} {name}" for name in names)
    return f"{text}  (k {k}, {record['eval/problems']} problems)" if "eval/problems" in record else text


def resample(points: Sequence[float], width: int) -> list[float]:
    """At most `width` means of neighbouring points, so that a whole run fits."""
    if len(points) <= width:
        return list(points)
    edges = [len(points) * i // width for i in range(width + 1)]
    return [sum(points[a:b]) / (b - a) for a, b in pairwise(edges)]


def sparkline(points: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """The course of `points`, lowest to highest over the height of a character; a constant is drawn at the bottom."""
    shown = resample(points, width)
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((p - low) * scale)] for p in shown)
