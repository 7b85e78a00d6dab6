"""Logs of a run: JSON lines, and optionally TensorBoard and W&B.

A killed run leaves a cut line, which readers skip and writers remove."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO, FileIO
from itertools import zip_longest
from numbers import Integral
from pathlib import Path
from socket import gethostname
from typing import Any, Self, cast

from megarl.config.errors import ConfigError, StorageError
from megarl.config.files import OptionalFiles, append_atomic, describe_error, mark_required, write_atomic
from megarl.config.schema import EVALUATION, PRETRAINING, SUPERVISED, TRAIN
from megarl.observe.prometheus import Exporter

METRICS_FILE, SAMPLES_FILE = "metrics.jsonl", "samples.jsonl"
DISTRIBUTIONS_FILE, EVENTS_FILE, ANSWERS_FILE = "distributions.jsonl", "events.jsonl", "evaluations.jsonl"
STAGES = (SUPERVISED, PRETRAINING, TRAIN, EVALUATION)  # in the order of a run
DIGITS = 9  # significant
SAMPLE_CHARACTERS = 20_000  # of a prompt or response
POLICY, OBSERVED = "policy", "observed"  # author of a turn

Record = dict[str, Any]
Tables = Mapping[str, Mapping[str, Sequence[float]]]


def parse_record(line: bytes) -> Record | None:
    """Parse a JSON object; None if that fails."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def is_step(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("step"), Integral) and record.get("stage") in STAGES


def precedes(record: Mapping[str, Any], step: int, stage: str) -> bool:
    """Return whether a record was written by the end of `step` of `stage`.

    Each stage counts its steps. An evaluation has the main stage's, 0 during value pretraining."""
    if not is_step(record):
        return False
    if record["stage"] == EVALUATION:
        return bool(record["step"] <= (0 if stage == PRETRAINING else step))
    return (STAGES.index(record["stage"]), record["step"]) <= (STAGES.index(stage), step)


def plain(value: Any, name: str, alarms: list[str]) -> Any:
    """Convert to JSON types, with rounded floats; non-finite numbers become None and go to `alarms`."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{name}.{key}", alarms) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{i}]", alarms) for i, item in enumerate(value)]
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    if not math.isfinite(number):
        alarms.append(f"{name}: {number}")
        return None
    return float(f"{number:.{DIGITS}g}")


@dataclass(frozen=True)
class SampleRecord:
    """One response of a step, for people. None: not recorded.

    prompt       the model's input; question: the user's text in it
    reward       penalties included
    group_right  correct responses among `group_size`
    turns        [POLICY or OBSERVED, text]; joined, the response
    observed     whether each token is an observation"""

    step: int
    prompt: str
    response: str
    reward: float | None
    correct: bool
    truncated: bool
    length: int
    answer: str = ""
    stage: str = TRAIN
    advantage_mean: float | None = None
    advantage_min: float | None = None
    advantage_max: float | None = None
    group_size: int | None = None
    group_right: int | None = None
    tokens: list[str] | None = None
    advantages: list[float | None] | None = None
    values: list[float | None] | None = None
    question: str = ""
    turns: list[list[str]] | None = None
    observed: list[bool] | None = None


def choose_samples(samples: Sequence[SampleRecord], limit: int) -> list[SampleRecord]:
    """Return at most `limit` samples: whole groups, and right and wrong responses of the last alternately."""
    groups: dict[str, list[SampleRecord]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    chosen: list[SampleRecord] = []
    for group in groups.values():
        right, wrong = ([s for s in group if s.correct is flag] for flag in (True, False))
        alternating = [s for pair in zip_longest(right, wrong) for s in pair if s is not None]
        chosen_ids = {id(s) for s in alternating[: limit - len(chosen)]}
        chosen += [s for s in group if id(s) in chosen_ids]
    return chosen


def shorten(text: str, limit: int) -> str:
    """Cut out the middle, as the answer is at the end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


class JsonlWriter:
    """Appends records to a file. When `write` returns, the operating system has the whole record.

    append: continue the file, without unreadable lines. dispensable: receives an optional file's errors;
    else raises ConfigError (opening) or StorageError (writing)."""

    def __init__(self, path: Path, append: bool, dispensable: OptionalFiles | None = None) -> None:
        self.path = path
        self._careful = mark_required if dispensable is None else dispensable.file
        self._file: FileIO | None = None
        # Applied to the file's lines before the next append.
        self._filters: list[Callable[[Record], bool]] = [lambda record: append]
        try:
            with self._careful(path):
                self._settle()
        except StorageError as error:
            cause = describe_error(cast(OSError, error.__cause__))
            reason = f"cannot be written: {cause} (choose another run_dir)"
            raise ConfigError(f"run_dir: {path}: {reason}") from error

    def write(self, record: Mapping[str, Any], ascii_only: bool = True) -> None:
        """Append a record. Raises ValueError for non-finite numbers."""
        line = json.dumps(record, allow_nan=False, ensure_ascii=ascii_only).encode() + b"\n"
        with self._careful(self.path):
            self._settle()
            file = cast(FileIO, self._file)
            old_size = os.fstat(file.fileno()).st_size
            try:
                append_atomic(file, line)
            except OSError:
                # Remove a partial line before the next.
                if os.fstat(file.fileno()).st_size != old_size:
                    self._filters.append(lambda record: True)
                raise

    def keep(self, wanted: Callable[[Record], bool]) -> int:
        """Drop, atomically, unreadable and unwanted lines; return their number."""
        self._filters.append(wanted)
        dropped = 0
        with self._careful(self.path):
            dropped = self._settle()
        return dropped

    def _settle(self) -> int:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self.path, "ab")
        if not self._filters:
            return 0
        content = self.path.read_bytes()
        lines = [line for line in content.split(b"\n") if line.strip()]
        kept_lines = [
            line
            for line in lines
            if (record := parse_record(line)) is not None and all(keeps(record) for keeps in self._filters)
        ]
        kept_content = b"".join(line + b"\n" for line in kept_lines)
        if content != kept_content and content.startswith(kept_content):
            os.ftruncate(self._file.fileno(), len(kept_content))  # works on a full disk
            os.fsync(self._file.fileno())
        elif content != kept_content:
            write_atomic(self.path, kept_content)
            old_file, self._file = self._file, None
            old_file.close()
            self._file = FileIO(self.path, "ab")
        self._filters = []
        return len(lines) - len(kept_lines)

    def close(self) -> None:
        with self._careful(self.path):
            if self._file is not None:
                self._file.close()


class RunLog:
    """Writes a run's logs; a context manager.

    samples: maximum per step. dispensable: receives errors, except those of metrics and answers. Raises
    ConfigError if the folder is not writable or a tracker is absent."""

    def __init__(
        self,
        run_dir: Path,
        append: bool = False,
        samples: int = 0,
        tensorboard: bool = False,
        wandb: bool = False,
        exporter: Exporter | None = None,
        dispensable: OptionalFiles | None = None,
    ) -> None:
        self.samples_per_step, self._exporter = samples, exporter
        optional_files = OptionalFiles() if dispensable is None else dispensable
        self._trackers: list[_TensorBoard | _Wandb] = (
            [_TensorBoard(run_dir, optional_files)] if tensorboard else []
        )
        self._trackers += [_Wandb(run_dir, append, optional_files)] if wandb else []
        self._files = {name: JsonlWriter(run_dir / name, append) for name in (METRICS_FILE, ANSWERS_FILE)}
        for name in (SAMPLES_FILE, DISTRIBUTIONS_FILE, EVENTS_FILE):
            self._files[name] = JsonlWriter(run_dir / name, append, optional_files)

    def write_metrics(self, record: Mapping[str, Any]) -> Record:
        """Write the metrics of a step or an evaluation; return them as written.

        Values are texts, numbers, 0-dimensional tensors, or lists and mappings of these. Non-finite numbers
        become null, and add to the texts in "alarms". Raises ValueError without "step" and "stage"."""
        if not is_step(record):
            actual = f"{record.get('step')}, {record.get('stage')}"
            raise ValueError(f"a metrics record needs an int `step` and a `stage` of {STAGES} (got {actual})")
        alarms = [str(text) for text in record.get("alarms", ())]
        written_record = {
            name: plain(value, name, alarms) for name, value in record.items() if name != "alarms"
        }
        if alarms:
            written_record["alarms"] = alarms
        self._files[METRICS_FILE].write(written_record)
        # Earlier stages restart steps: name their curves differently.
        prefix = "" if written_record["stage"] in (TRAIN, EVALUATION) else f"{written_record['stage']}/"
        numbers = {
            name: v for name, v in written_record.items() if isinstance(v, int | float) and name != "step"
        }
        for tracker in self._trackers:
            tracker.log(written_record["step"], {f"{prefix}{name}": float(v) for name, v in numbers.items()})
        if self._exporter is not None:
            self._exporter.update(written_record["stage"], numbers | {"step": written_record["step"]})
        return written_record

    def write_samples(self, samples: Iterable[SampleRecord]) -> None:
        for sample in choose_samples(list(samples), self.samples_per_step):
            record = {k: v if isinstance(v, list) else plain(v, k, []) for k, v in vars(sample).items()}
            record["prompt"] = shorten(sample.prompt, SAMPLE_CHARACTERS)
            record["question"] = shorten(sample.question, SAMPLE_CHARACTERS)
            record["response"] = shorten(sample.response, SAMPLE_CHARACTERS)
            if sample.turns is not None:
                max_characters = SAMPLE_CHARACTERS // max(1, len(sample.turns))
                record["turns"] = [[author, shorten(text, max_characters)] for author, text in sample.turns]
            self._files[SAMPLES_FILE].write(record)

    def write_distributions(self, step: int, stage: str, tables: Tables) -> None:
        """Write a step's tables: name -> row -> one sum per bin."""
        self._files[DISTRIBUTIONS_FILE].write({"step": step, "stage": stage, **plain(tables, "", [])})

    def write_event(self, text: str) -> None:
        self._files[EVENTS_FILE].write({"time": round(time.time(), 1), "event": text})

    def write_answers(self, step: int, answers: Iterable[Record]) -> None:
        for answer in answers:
            self._files[ANSWERS_FILE].write({"step": step, **answer}, ascii_only=False)

    def truncate_after(self, step: int, stage: str = TRAIN) -> int:
        """Drop later records except events; return their number."""
        for tracker in self._trackers:
            tracker.continue_from(step)
        stepwise_files = [self._files[name] for name in (METRICS_FILE, SAMPLES_FILE, DISTRIBUTIONS_FILE)]
        dropped = sum(file.keep(lambda record: precedes(record, step, stage)) for file in stepwise_files)
        answers = self._files[ANSWERS_FILE]
        return dropped + answers.keep(lambda record: precedes({**record, "stage": EVALUATION}, step, stage))

    def close(self) -> None:
        exporters = [self._exporter] if self._exporter is not None else []
        for output in (*self._files.values(), *self._trackers, *exporters):
            output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tracker(option: str, name: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        remedy = "pip install 'megarl[track]', or set it to false"
        raise ConfigError(f"log.{option}: {name} is not installed ({remedy})") from error


class _TensorBoard:
    """Writes event files into run_dir/tensorboard.

    On a full disk torch's writer leaves a traceback and a partial record."""

    def __init__(self, run_dir: Path, dispensable: OptionalFiles) -> None:
        _tracker("tensorboard", "TensorBoard", "tensorboard")
        self._proto, self._summary, self._records = (
            import_module(f"tensorboard.{name}")
            for name in ("compat.proto.event_pb2", "compat.proto.summary_pb2", "summary.writer.record_writer")
        )
        self._folder, self._spare, self._files = run_dir / "tensorboard", dispensable, 0
        self._file: FileIO | None = None
        self._path = self._start_file(None)

    def _start_file(self, first_step: int | None) -> Path:
        """Return the next file's path. first_step: TensorBoard hides earlier files from there on."""
        proto, self._files = self._proto, self._files + 1
        name = f"events.out.tfevents.{time.time():010.0f}.{gethostname()}.{os.getpid()}.{self._files}"
        self._header = [proto.Event(wall_time=time.time(), step=first_step, file_version="brain.Event:2")]
        if first_step is not None:
            start = proto.SessionLog(status=proto.SessionLog.START)
            self._header.append(proto.Event(wall_time=time.time(), step=first_step, session_log=start))
        return self._folder / name

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self._summary.Summary.Value(tag=name, simple_value=n) for name, n in numbers.items()]
        summary = self._summary.Summary(value=values)
        event = self._proto.Event(wall_time=time.time(), step=step, summary=summary)
        buffer = BytesIO()
        for message in (*self._header, event):
            self._records.RecordWriter(buffer).write(message.SerializeToString())
        with self._spare.file(self._folder):
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = FileIO(self._path, "ab")
            append_atomic(self._file, buffer.getvalue())
            self._header = []

    def continue_from(self, step: int) -> None:
        self.close()
        self._path = self._start_file(step + 1)

    def close(self) -> None:
        file, self._file = self._file, None
        with self._spare.file(self._folder):
            if file is not None:
                file.close()


class _Wandb:
    """One W&B run per run folder, which resumes by run_dir/wandb_id."""

    def __init__(self, run_dir: Path, append: bool, dispensable: OptionalFiles) -> None:
        wandb = _tracker("wandb", "wandb", "wandb")
        id_path = run_dir / "wandb_id"
        run_dir.mkdir(parents=True, exist_ok=True)
        run_id = id_path.read_text().strip() if append and id_path.exists() else None
        self._run = wandb.init(
            project="megarl", id=run_id, resume="allow", name=run_dir.name, dir=str(run_dir)
        )
        # W&B's step must not decrease, but ours restarts with each stage.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        with dispensable.file(id_path):
            write_atomic(id_path, f"{self._run.id}\n")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def continue_from(self, step: int) -> None:
        """Do nothing: W&B cannot delete records, so repeated steps show twice."""

    def close(self) -> None:
        self._run.finish()
