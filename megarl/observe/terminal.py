"""Terminal view of a run: a live panel, or aligned lines for a log file."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, Self

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.config.errors import DataError
from megarl.config.files import read_json
from megarl.config.schema import EVALUATION, PRETRAINING, SUPERVISED, TRAIN
from megarl.config.schema.stages import main_stage
from megarl.config.text import printable
from megarl.observe.run_log import METRICS_FILE, Record, is_step, parse_record
from megarl.observe.runs import compute_group_shares, format_layout, read_mapping

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.:-=+*#"
MISSING = "-"
EVENTS_SHOWN = 4
STEPS_TIMED = 10
WATCH_PERIOD = 0.5  # seconds between reads


@dataclass(frozen=True)
class Column:
    """One metric of a step, or several joined by a slash.

    short, long: name in lines and in the panel; width: characters of a number in lines"""

    short: str
    long: str
    keys: tuple[str, ...]
    form: str
    width: int


_LENGTHS = ("response/length_right", "response/length_wrong")
_TOKENS_A_SECOND = ("throughput/rollout_tokens", "throughput/train_tokens")
COLUMNS = (
    Column("acc", "accuracy", ("reward/accuracy",), ".3f", 5),
    Column("reward", "reward", ("reward/mean",), "+.3f", 6),
    Column("nll", "NLL loss", ("policy/nll_loss",), ".4f", 6),
    Column("len", "response length", ("response/length_mean",), "tokens", 6),
    Column("calls", "turns / calls", ("episode/turns_mean", "episode/calls_mean"), ".2f", 4),
    Column("r/w", "length right / wrong", _LENGTHS, "tokens", 6),
    Column("refl", "reflecting / right", ("reflection/share", "reflection/accuracy"), ".3f", 5),
    Column("cut", "truncated", ("reward/truncated",), ".3f", 5),
    Column("ent", "entropy", ("policy/entropy",), ".3f", 5),
    Column("clip", "clipped low / high", ("policy/clip_fraction_low", "policy/clip_fraction_high"), ".4f", 6),
    Column("prob", "prob / up-clipped", ("policy/mean_prob", "policy/clip_prob_high"), ".3f", 5),
    Column("vloss", "value loss", ("value/loss",), ".4f", 7),
    Column("ev", "explained variance", ("value/explained_variance",), "+.2f", 5),
    Column("lr", "learning rate", ("policy/lr",), ".1e", 7),
    Column("gnorm", "gradient norm", ("policy/grad_norm",), ".3g", 6),
    Column("kept", "groups kept", ("groups_kept",), ".2f", 4),
    Column("all", "all right / all wrong", ("rollout/share_all_right", "rollout/share_all_wrong"), ".2f", 4),
    Column("tok/s", "tokens/s rollout / train", _TOKENS_A_SECOND, "count", 5),
    Column("step", "time of the step", ("time/step",), "seconds", 6),
)
# Uninformative, or too wide for plain lines.
_DETAILS = {"nll", "cut", "r/w", "refl", "prob", "all"}
PLAIN_LEAVES_OUT = {TRAIN: {*_DETAILS, "vloss"}, PRETRAINING: _DETAILS, SUPERVISED: set[str]()}
SPARKS = {
    "accuracy": ("reward/accuracy", ".3f"),
    "length": ("response/length_mean", "tokens"),
    "entropy": ("policy/entropy", ".3f"),
}


def format_count(value: float) -> str:
    """Format in at most 5 characters up to 999T: 1234567 -> 1.23M."""
    units = iter(("", "k", "M", "G", "T"))
    unit = next(units)
    while abs(value) >= 999.5 and unit != "T":
        value, unit = value / 1000, next(units)
    return f"{value:.0f}{unit}" if unit == "" or abs(value) >= 99.95 else f"{value:.3g}{unit}"


def format_duration(seconds: float) -> str:
    """Format as 0.82s, 1:15, 1:01:40 or 1d 1:00."""
    if seconds < 59.95:
        return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"
    return f"{hours // 24}d {hours % 24}:{minutes:02}"


def format_number(value: Any, form: str) -> str:
    """Format a number, or MISSING if there is none."""
    if not isinstance(value, int | float):
        return MISSING
    if form == "count":
        return format_count(value)
    if form == "tokens":
        return f"{value:.1f}" if value < 9999.5 else f"{value:.0f}"
    if form == "seconds":
        return format_duration(value)
    return format(value, form)


def format_values(column: Column, record: Mapping[str, Any]) -> list[str]:
    values = {**record, "groups_kept": (compute_group_shares(record) or {}).get("kept")}
    return [format_number(values.get(key), column.form) for key in column.keys]


def select_columns(record: Mapping[str, Any]) -> list[Column]:
    return [column for column in COLUMNS if any(text != MISSING for text in format_values(column, record))]


def format_evaluation(record: Mapping[str, Any]) -> str:
    """Format an evaluation: `0.621 avg  0.700 pass  0.650 majority  (k 4, 512 problems)`.

    Only avg if k is 1 or differs between sets. Sets and sources have a line each, after any overall one."""
    common_k = record.get("eval/k")

    def format_line(prefix: str) -> str:
        k = record.get(f"{prefix}/k", common_k)
        names = ("avg", "pass", "majority") if (k or 1) > 1 else ("avg",)
        remark = f"k {k}, " if k and (prefix == "eval" or k != common_k) else ""
        text = "  ".join(f"{format_number(record.get(f'{prefix}/{name}'), '.3f')} {name}" for name in names)
        problems = record.get(f"{prefix}/problems")
        num_ungraded = record.get(f"{prefix}/ungraded")
        ungraded_text = f", {num_ungraded} ungraded" if num_ungraded else ""
        return f"{text}  ({remark}{problems} problems{ungraded_text})" if problems is not None else text

    sources = list_evaluated_sources(record)
    width = max(map(len, sources), default=0)
    lines = [f"{name:<{width}}  {format_line(f'eval/{name}')}" for name in sources]
    if "eval/avg" in record or "eval/problems" in record or not lines:
        lines.insert(0, format_line("eval"))
    return "\n      ".join(lines)


def list_evaluated_sources(record: Mapping[str, Any]) -> list[str]:
    names = [key.removeprefix("eval/").removesuffix("/avg") for key in record if key.endswith("/avg")]
    return sorted(name for name in names if f"eval/{name}/avg" in record)


def resample(points: Sequence[float], width: int) -> list[float]:
    if len(points) <= width:
        return list(points)
    edges = [len(points) * i // width for i in range(width + 1)]
    return [sum(points[a:b]) / (b - a) for a, b in pairwise(edges)]


def sparkline(points: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Plot `points` as block characters."""
    values = resample(points, width)
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(blocks[round((p - low) / span * (len(blocks) - 1))] for p in values)


@dataclass(frozen=True)
class RunHeader:
    """A run's facts. value_pretraining_steps: maximum, before the `steps`."""

    name: str
    recipe: str
    model: str
    layout: str
    device: str
    steps: int
    value_pretraining_steps: int = 0

    def total(self, stage: str) -> int:
        return self.value_pretraining_steps if stage == PRETRAINING else self.steps

    def header(self, separator: str) -> str:
        return separator.join((self.recipe, self.model, self.layout, self.device, f"{self.steps} steps"))


class TerminalView:
    """Shows a run; a context manager.

    `live` redraws in place (without a terminal it prints the last state). `plain` prints a line per `every`
    steps, evaluation and event. `auto` is live on a terminal, else plain."""

    def __init__(
        self,
        mode: Literal["auto", "live", "plain", "quiet"],
        facts: RunHeader,
        console: Console | None = None,
        every: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self.mode = ("live" if self.console.is_terminal else "plain") if mode == "auto" else mode
        self.facts, self.every, self.clock = facts, every, clock
        self._ascii = self.console.options.ascii_only
        self._lock = threading.RLock()  # rich redraws in another thread
        self._phase, self._phase_since = "starting", clock()
        self._record: Record = {}
        self._evaluation: Record = {}
        self._history: dict[str, list[float]] = {name: [] for name in SPARKS}
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._columns: dict[str, list[Column]] = {}
        self._finished: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=STEPS_TIMED + 1)
        self._live = Live(self, console=self.console, refresh_per_second=4) if self.mode == "live" else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        self._print(self._printable(f"megarl {self.facts.name} | {self.facts.header(' | ')}"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def phase(self, name: str) -> None:
        with self._lock:
            self._phase, self._phase_since = name, self.clock()

    def event(self, text: str) -> None:
        line = self._printable(text)
        with self._lock:
            self._events.append(line)
        self._print(f"      {line}")

    def step(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            if record["stage"] == EVALUATION:
                self._evaluation = dict(record)
            else:
                if not self._record:
                    # A resumed run's first step took the time since its start.
                    self._finished[0] = (self._finished[0][0], record["step"] - 1)
                elif record["stage"] != self._record["stage"]:
                    self._finished = deque([(self._finished[-1][0], 0)], maxlen=STEPS_TIMED + 1)
                self._record = dict(record)
                self._finished.append((self.clock(), record["step"]))
                for name, (key, _) in SPARKS.items():
                    if isinstance(record.get(key), int | float):
                        self._history[name].append(record[key])
        if self.mode == "plain":
            self._print_step(record)
        for alarm in record.get("alarms", ()):
            self.event(f"{record['stage']} step {record['step']}: not finite: {alarm}")

    def _left(self) -> str:
        """Estimate the stage's remaining time; "" if unknown."""
        (first_time, first_step), (last_time, last_step) = self._finished[0], self._finished[-1]
        total = self.facts.total(self._record.get("stage", ""))
        if last_step <= first_step or not total:
            return ""
        seconds_per_step = (last_time - first_time) / (last_step - first_step)
        return format_duration(seconds_per_step * max(0, total - last_step))

    def _printable(self, text: str) -> str:
        line = printable(" ".join(text.split()))
        return line.encode("ascii", "replace").decode() if self._ascii else line

    def _print(self, text: str) -> None:
        if self.mode == "plain":
            self.console.print(Text(printable(text)), soft_wrap=True)

    def _print_step(self, record: Mapping[str, Any]) -> None:
        stage, step = record["stage"], record["step"]
        total = self.facts.total(stage)
        position = f"{step:>{len(str(total))}}/{total}" if total else f"{step}"
        if stage == EVALUATION:
            self._print(f"eval  {position}  {format_evaluation(record)}")
            return
        # A stage's first record determines columns, to align lines.
        if stage not in self._columns:
            left_out = PLAIN_LEAVES_OUT[stage]
            self._columns[stage] = [c for c in select_columns(record) if c.short not in left_out]
        elif step % self.every and step != total:
            return
        parts = [f"{'value' if stage == 'value_pretraining' else stage:<5} {position}"]
        for column in self._columns[stage]:
            texts = [text.rjust(column.width) for text in format_values(column, record)]
            parts.append(f"{column.short} {'/'.join(texts)}")
        if remaining_time := self._left():
            parts.append(f"left {remaining_time}")
        self._print("  ".join(parts))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            yield self._panel(options.max_width)

    def _panel(self, width: int) -> Panel:
        one_line: dict[str, Any] = {"overflow": "ellipsis", "no_wrap": True}
        header_text = Text(self._printable(self.facts.header("  ")), style="dim", **one_line)

        stage, step = self._record.get("stage", TRAIN), self._record.get("step", 0)
        total, remaining_time = self.facts.total(stage), self._left()
        progress = Table.grid(padding=(0, 1), expand=True)
        progress.add_column(no_wrap=True)
        progress.add_column(ratio=1)
        progress.add_column(no_wrap=True)
        title = Text(f"{stage.replace('_', ' ')} {step}/{total}", style="bold")
        bar = ProgressBar(total=max(total, 1), completed=step)
        progress.add_row(title, bar, Text(f"{remaining_time} left" if remaining_time else ""))

        elapsed = format_duration(self.clock() - self._phase_since)
        phase = Text.assemble((self._printable(self._phase), "cyan"), f" {elapsed}", **one_line)
        if self._evaluation:
            phase.append(f"\nevaluation at step {self._evaluation['step']}  ", "dim")
            phase.append(printable(format_evaluation(self._evaluation)))

        sparks = Table.grid(padding=(0, 1))
        for name, (_, form) in SPARKS.items():
            if history := self._history[name]:
                line = sparkline(history, max(8, width - 40), ASCII_BLOCKS if self._ascii else BLOCKS)
                range_text = f"{format_number(history[0], form)} to {format_number(history[-1], form)}"
                sparks.add_row(Text(name, "dim"), Text(line, "green"), range_text)

        parts: list[Any] = [header_text, progress, phase, Text(), self._numbers(width)]
        if sparks.row_count:
            parts += [Text(), sparks]
        if self._events:
            parts += [Text(), *(Text(event, style="dim", **one_line) for event in self._events)]
        heading = Text(f"megarl {self._printable(self.facts.name)}", style="bold")
        return Panel(Group(*parts), title=heading, title_align="left")

    def _numbers(self, width: int) -> Table:
        """Lay out numbers in one to three columns."""
        pairs = max(1, min(3, (width - 4) // 36))
        columns = select_columns(self._record)
        rows = -(-len(columns) // pairs)
        cells = [(c.long, " / ".join(format_values(c, self._record)), "") for c in columns]
        table = Table.grid(padding=(0, 1), expand=True)
        for first_row in range(0, pairs * rows, rows):
            # Cut names, not numbers.
            widest = max((len(texts) for _, texts, _ in cells[first_row : first_row + rows]), default=0)
            room = (width - 4) // pairs - widest - 3
            table.add_column(style="dim", no_wrap=True, overflow="ellipsis", max_width=max(room, 1))
            table.add_column(justify="right", no_wrap=True)
            table.add_column(ratio=1)
        for i in range(rows):
            table.add_row(*chain.from_iterable(cells[i::rows]))
        return table


class Follower:
    """Reads a growing metrics.jsonl, which may be replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = self._inode = 0

    def read_new(self) -> tuple[bool, list[Record]]:
        """Return whether the file was replaced, and the new records."""
        try:
            with open(self.path, "rb") as file:
                status = self.path.stat()
                is_replaced = self._read > 0 and (status.st_size < self._read or status.st_ino != self._inode)
                self._read, self._inode = 0 if is_replaced else self._read, status.st_ino
                file.seek(self._read)
                content = file.read()
        except FileNotFoundError:
            return False, []
        end = content.rfind(b"\n") + 1
        self._read += end
        records = (parse_record(line) for line in content[:end].split(b"\n"))
        return is_replaced, [record for record in records if record is not None and is_step(record)]


class _Clock:
    """`past` while old records are read, then time since `since`."""

    past, since = 0.0, 0.0

    def __call__(self) -> float:
        return self.past + (time.monotonic() - self.since if self.since else 0.0)


def watch(
    run_dir: Path,
    *,
    once: bool = False,
    console: Console | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Show a run, once or until it is done. Raises DataError if there is none."""
    if not (run_dir / "config.yaml").is_file():
        raise DataError(f"{run_dir}: no config.yaml (is this the folder of a run?)")
    settings = read_mapping(run_dir / "config.yaml")
    header = read_facts(run_dir, settings)
    stage = main_stage(header.recipe)
    final_steps = {(stage, header.steps)}  # last records of a finished run
    if stage == TRAIN and settings.get("data", {}).get("eval"):
        final_steps.add((EVALUATION, header.steps))
    follower = Follower(run_dir / METRICS_FILE)
    is_replaced, records = follower.read_new()
    while True:
        missing_steps, clock = set(final_steps), _Clock()
        with TerminalView("auto", header, console, clock=clock) as view:
            while True:
                for record in records:
                    if not clock.since:
                        clock.past += float(record.get("time/step") or record.get("time/evaluation") or 0.0)
                    for event in record.get("events", ()):
                        view.event(str(event))
                    view.step(record)
                    view.phase(f"after {record['stage'].replace('_', ' ')} step {record['step']}")
                    missing_steps.discard((record["stage"], record["step"]))
                clock.since = clock.since or time.monotonic()
                if once or not missing_steps:
                    return
                wait(WATCH_PERIOD)
                is_replaced, records = follower.read_new()
                if is_replaced:
                    view.event("the run went back to a checkpoint")
                    break


def read_facts(run_dir: Path, settings: Mapping[str, Any]) -> RunHeader:
    path = Path(str(settings.get("model", {}).get("path")))
    model = path.name
    if (path / "config.json").is_file():
        sizes = read_json(path / "config.json")
        layers, width = sizes.get("num_hidden_layers"), sizes.get("hidden_size")
        model = f"{sizes.get('model_type')} {layers} layers x {width}"
    has_critic = settings.get("algorithm", {}).get("advantage") in ("gae", "prompt_value")
    pretraining_steps = settings.get("value_pretraining", {}).get("steps", 0) if has_critic else 0
    return RunHeader(
        name=run_dir.resolve().name,
        recipe=str(settings.get("recipe")),
        model=model,
        layout=format_layout(settings.get("parallel", {})),
        device=str(settings.get("parallel", {}).get("device", "auto")),
        steps=int(settings.get("steps", 0)),
        value_pretraining_steps=int(pretraining_steps),
    )
