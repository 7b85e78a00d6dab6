"""A run that another process trains, seen from its folder: metrics.jsonl is followed as it grows and shown by the same view."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from megarl.config.errors import DataError
from megarl.config.files import read_json
from megarl.observe.jsonl import Record, is_step, parse
from megarl.observe.metrics import METRICS_FILE
from megarl.observe.runs import layout_text, mapping
from megarl.observe.terminal import RunFacts, TerminalView

PERIOD = 0.5  # seconds between looks


class Follower:
    """The records of a file that grows; of one that shrinks, as when a run goes back to a checkpoint, all of them anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._inode = 0

    def look(self) -> tuple[bool, list[Record]]:
        """(whether the file was begun anew, the whole lines that have come since the last look)."""
        try:
            with open(self.path, "rb") as file:
                status = self.path.stat()
                anew = self._read > 0 and (status.st_size < self._read or status.st_ino != self._inode)
                if anew:
                    self._read = 0
                self._inode = status.st_ino
                file.seek(self._read)
                content = file.read()
        except FileNotFoundError:
            return False, []
        end = content.rfind(b"\n") + 1
        self._read += end
        records = (parse(line) for line in content[:end].split(b"\n") if line.strip())
        return anew, [record for record in records if record is not None and is_step(record)]

    def rewind(self) -> None:
        """The next look is the first."""
        self._read = 0


class _Clock:
    """The run's own time while its past is read, real time from then on."""

    def __init__(self) -> None:
        self._past = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        return self._past + (0.0 if self._since is None else time.monotonic() - self._since)

    def past(self, seconds: float) -> None:
        if self._since is None:
            self._past += seconds

    def present(self) -> None:
        if self._since is None:
            self._since = time.monotonic()


def watch(run_dir: Path, *, once: bool = False, console: Console | None = None, wait: Callable[[float], None] = time.sleep) -> None:
    """Shows the run until it is done, or once. Raises DataError where the folder is not a run's."""
    if not (run_dir / "config.yaml").is_file():
        raise DataError(f"{run_dir}: no config.yaml (is this the folder of a run?)")
    settings = mapping(run_dir / "config.yaml", yaml.safe_load, yaml.YAMLError)
    follower = Follower(run_dir / METRICS_FILE)
    again = True
    while again:
        again = _show(follower, settings, facts_of(run_dir, settings), once, console, wait)


def facts_of(run_dir: Path, settings: dict[str, Any]) -> RunFacts:
    """The header, from the run's own configuration."""
    model = settings.get("model", {})
    described = Path(str(model.get("path"))) / "config.json"
    name = described.parent.name
    if described.is_file():
        sizes = read_json(described)
        name = f"{sizes.get('model_type')} {sizes.get('num_hidden_layers')} layers x {sizes.get('hidden_size')}"
    critic = settings.get("algorithm", {}).get("advantage") == "gae"
    return RunFacts(
        name=run_dir.resolve().name,
        recipe=str(settings.get("recipe")),
        model=name,
        layout=layout_text(settings.get("parallel", {})),
        device=str(settings.get("parallel", {}).get("device", "auto")),
        steps=int(settings.get("steps", 0)),
        value_pretraining_steps=int(settings.get("value_pretraining", {}).get("steps", 0)) if critic else 0,
    )


def _show(
    follower: Follower, settings: dict[str, Any], facts: RunFacts, once: bool, console: Console | None, wait: Callable[[float], None]
) -> bool:
    """One view, until the run is done; True where its file was begun anew, and so must the view be."""
    clock = _Clock()
    expected = _last(settings, facts)
    with TerminalView("auto", facts, console, clock=clock) as view:
        for anew, records in _looks(follower, wait):
            if anew:
                view.event("the run went back to a checkpoint")
                follower.rewind()
                return True
            for record in records:
                clock.past(float(record.get("time/step") or record.get("time/evaluation") or 0.0))
                for event in record.get("events", ()):
                    view.event(str(event))
                view.step(record)
                expected.discard((record["stage"], record["step"]))
            if records:
                last = records[-1]
                view.phase(f"after {last['stage'].replace('_', ' ')} step {last['step']}")
            clock.present()
            if once or not expected:
                return False
    return False


def _looks(follower: Follower, wait: Callable[[float], None]) -> Iterator[tuple[bool, list[Record]]]:
    while True:
        yield follower.look()
        wait(PERIOD)


def _last(settings: dict[str, Any], facts: RunFacts) -> set[tuple[str, int]]:
    """What has been recorded once a run is done."""
    if facts.recipe == "sft":
        return {("sft", facts.steps)}
    evaluated = [("eval", facts.steps)] if settings.get("data", {}).get("eval") else []
    return {("train", facts.steps), *evaluated}
