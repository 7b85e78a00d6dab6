"""What a person sees while a run goes on: a live view on a terminal, or aligned lines for a log file."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.observe.terminal_format import (
    ASCII_BLOCKS,
    BLOCKS,
    PLAIN_LEAVES_OUT,
    Column,
    duration,
    evaluation_text,
    number,
    plain_line,
    present,
    sparkline,
    values,
)

SPARKS = {"accuracy": ("reward/accuracy", ".3f"), "length": ("response/length_mean", "tokens"), "entropy": ("policy/entropy", ".3f")}
EVENTS_SHOWN = 4
STEPS_TIMED = 10


@dataclass(frozen=True)
class RunFacts:
    """The header. steps: of training (or of warm start); value_pretraining_steps: at most so many before them."""

    name: str
    recipe: str
    model: str
    layout: str
    device: str
    steps: int
    value_pretraining_steps: int = 0

    def total(self, stage: str) -> int:
        """Steps that `stage` has."""
        return self.value_pretraining_steps if stage == "value_pretraining" else self.steps


class TerminalView:
    """Shows the course of a run; used as a context manager.

    mode "live": a view that is redrawn in place (on something that is no terminal only its last state is printed);
    "plain": a line every `every` steps, for evaluations and for events; "quiet": nothing; "auto": live on a terminal, else plain."""

    def __init__(
        self,
        mode: Literal["auto", "live", "plain", "quiet"],
        facts: RunFacts,
        console: Console | None = None,
        every: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self.mode = ("live" if self.console.is_terminal else "plain") if mode == "auto" else mode
        self.facts, self.every, self.clock = facts, every, clock
        self._ascii = self.console.options.ascii_only
        self._lock = threading.RLock()  # rich redraws from a thread of its own
        self._phase, self._phase_since = "starting", clock()
        self._record: dict[str, Any] = {}
        self._evaluation: dict[str, Any] = {}
        self._history: dict[str, list[float]] = {name: [] for name in SPARKS}
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._columns: dict[str, list[Column]] = {}
        self._finished: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=STEPS_TIMED + 1)
        self._live = Live(self, console=self.console, refresh_per_second=4) if self.mode == "live" else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        elif self.mode == "plain":
            self._print(self._printable(f"megarl {self.facts.name} | {self._header(' | ')}"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def phase(self, name: str) -> None:
        """A phase of the step begins; its time is counted from now on."""
        with self._lock:
            self._phase, self._phase_since = name, self.clock()

    def step(self, record: Mapping[str, Any]) -> None:
        """Shows a record of metrics.jsonl: a step of any stage, or an evaluation."""
        with self._lock:
            if record["stage"] == "eval":
                self._evaluation = dict(record)
            else:
                self._advance(record)
        if self.mode == "plain":
            self._print_step(record)
        for alarm in record.get("alarms", ()):
            self.event(f"{record['stage']} step {record['step']}: not finite: {alarm}")

    def event(self, text: str) -> None:
        """Something worth a line of its own: a checkpoint, a warning, a limit that was reached."""
        line = self._printable(text)
        with self._lock:
            self._events.append(line)
        if self.mode == "plain":
            self._print(f"      {line}")

    def close(self) -> None:
        """Ends the view and leaves its last state on the screen; may be called more than once."""
        if self._live:
            self._live.stop()

    def _advance(self, record: Mapping[str, Any]) -> None:
        if record["stage"] != self._record.get("stage") and self._record:
            self._finished = deque([(self._finished[-1][0], 0)], maxlen=STEPS_TIMED + 1)
        elif not self._record:
            # A resumed run does not begin at step 0: its first step here took the time since the start.
            self._finished[0] = (self._finished[0][0], record["step"] - 1)
        self._record = dict(record)
        self._finished.append((self.clock(), record["step"]))
        for name, (key, _) in SPARKS.items():
            if isinstance(record.get(key), int | float):
                self._history[name].append(record[key])

    def _left(self) -> str:
        """Time left in this stage at the pace of the last steps, with what happened between them; empty where unknown."""
        (began, first), (now, last) = self._finished[0], self._finished[-1]
        total = self.facts.total(self._record.get("stage", ""))
        if last <= first or not total:
            return ""
        return duration((now - began) / (last - first) * max(0, total - last))

    def _header(self, separator: str) -> str:
        facts = self.facts
        return separator.join((facts.recipe, facts.model, facts.layout, facts.device, f"{facts.steps} steps"))

    def _printable(self, text: str) -> str:
        """`text` on one line, in what the console's encoding can hold."""
        line = " ".join(text.split())
        return line.encode("ascii", "replace").decode() if self._ascii else line

    def _print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _print_step(self, record: Mapping[str, Any]) -> None:
        stage, step = record["stage"], record["step"]
        if stage == "eval":
            return self._print(f"eval  {step:>{len(str(self.facts.steps))}}/{self.facts.steps}  {evaluation_text(record)}")
        total = self.facts.total(stage)
        # The first record of a stage decides on its columns, so that they stay aligned.
        if stage not in self._columns:
            self._columns[stage] = [c for c in present(record) if c.short not in PLAIN_LEAVES_OUT[stage]]
        elif step % self.every and step != total:
            return None
        return self._print(plain_line(record, self._columns[stage], total, self._left()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            yield self._panel(options.max_width)

    def _panel(self, width: int) -> Panel:
        facts = Text(self._printable(self._header("  ")), style="dim", overflow="ellipsis", no_wrap=True)
        parts: list[Any] = [facts, self._progress(), self._phase_line(), Text(), self._table(width)]
        sparks = self._sparks(width)
        if sparks.row_count:
            parts += [Text(), sparks]
        if self._events:
            parts += [Text(), *(Text(event, style="dim", overflow="ellipsis", no_wrap=True) for event in self._events)]
        return Panel(Group(*parts), title=Text(f"megarl {self._printable(self.facts.name)}", style="bold"), title_align="left")

    def _progress(self) -> Table:
        stage, step = self._record.get("stage", "train"), self._record.get("step", 0)
        total = self.facts.total(stage)
        left = self._left()
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        title = Text(f"{stage.replace('_', ' ')} {step}/{total}", style="bold")
        row.add_row(title, ProgressBar(total=max(total, 1), completed=step), Text(f"{left} left" if left else ""))
        return row

    def _phase_line(self) -> Text:
        elapsed = duration(self.clock() - self._phase_since)
        line = Text.assemble((self._printable(self._phase), "cyan"), f" {elapsed}", overflow="ellipsis", no_wrap=True)
        if self._evaluation:
            line.append(f"\nevaluation at step {self._evaluation['step']}  ", "dim").append(evaluation_text(self._evaluation))
        return line

    def _table(self, width: int) -> Table:
        pairs = max(1, min(3, (width - 4) // 36))
        columns = present(self._record)
        rows = -(-len(columns) // pairs)
        table = Table.grid(padding=(0, 1), expand=True)
        for _ in range(pairs):
            table.add_column(style="dim", no_wrap=True, overflow="ellipsis")
            table.add_column(justify="right", no_wrap=True)
            table.add_column(ratio=1)
        for i in range(rows):
            cells: list[str] = []
            for column in columns[i::rows]:
                cells += [column.long, " / ".join(values(column, self._record)), ""]
            table.add_row(*cells)
        return table

    def _sparks(self, width: int) -> Table:
        table = Table.grid(padding=(0, 1))
        for name, (_, form) in SPARKS.items():
            course = self._history[name]
            if course:
                line = sparkline(course, max(8, width - 40), ASCII_BLOCKS if self._ascii else BLOCKS)
                ends = f"{number(course[0], form)} to {number(course[-1], form)}"
                table.add_row(Text(name, "dim"), Text(line, "green"), ends)
        return table
