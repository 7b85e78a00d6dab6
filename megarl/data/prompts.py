"""Prompts and supervised pairs: read from parquet and jsonl files, put into the template, tokenized, and
handed out epoch after epoch. Rows that cannot be used are listed with their reasons."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import blake2b, sha256
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.errors import CheckpointError, ConfigError, DataError, MegarlError, first_line
from megarl.config.plugins import plugin
from megarl.config.schema import DataConfig, DataEntry, EvaluationConfig
from megarl.config.text import printable
from megarl.data.chat_template import render_chat
from megarl.data.generated import GeneratedRow, first_rows, generate, gym_entries, reference_to
from megarl.data.limits import MEMORY, memory_limit
from megarl.rewards.verdict import Reference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, str]]
Pair = tuple[tuple[int, ...], tuple[int, ...]]
Tools = Sequence[Mapping[str, Any]]  # what the chat template tells of functions, as transformers makes it

# Columns, in any case, that are tried where the configured one is absent: GSM8K's, MATH's and AIME's. Of a
# worked `solution` the last box is the answer.
_OTHER_PROMPTS, _OTHER_ANSWER, _SOLUTION = ("question", "problem"), "answer", "solution"
# TRL's: a whole conversation, whose last message is the assistant's, and what follows a prompt.
_MESSAGES, _COMPLETION = "messages", "completion"
WORKED = (_SOLUTION, _COMPLETION, _MESSAGES)  # columns that hold the way to an answer, and the answer in it
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_DIGIT_GROUPS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)")
_TOKENIZED_AT_ONCE = 1024  # rows
_CHARACTERS_AT_ONCE = 1 << 22  # of the rows that are tokenized together

# Limits against files that are made to take all memory.
MAX_LINE = 16 << 20  # bytes of a line of jsonl
MAX_RESPONSE = 1 << 22  # characters of a supervised response
CHARACTERS_PER_TOKEN = 100  # longer prompts than data.max_prompt_tokens * 100 are not tokenized
_BATCH, _BATCH_BYTES = 4096, 64 << 20  # rows of such a batch, and their bytes by the file's own account
# A decoded parquet file may have EXPANSION times its size on disk, and 64 MiB: a value that is stored once
# can stand in a billion rows.
EXPANSION, _EXPANSION_FREE = 1000, 64 << 20
_ROW_BYTES = 100  # that a row takes in a report, however little it holds


@dataclass(frozen=True)
class Prompt:
    """One problem. `uid` is a hash of its text, the same in every run: seeds are derived from it.

    text      as the model reads it, template and all
    question  what the user asked, for people: the last user message, or the prompt before its template
    source    the row's data_source
    answer    the reference, for people; "" where a task of reasoning-gym tells none
    entry     what the scorer of reasoning-gym needs of its problem; "": reward.verifier judges"""

    uid: int
    text: str
    tokens: tuple[int, ...]
    answer: str
    source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    question: str = ""
    entry: str = ""

    @property
    def reference(self) -> str | Reference:
        """Return what responses are judged by."""
        return reference_to(self.answer, self.entry) if self.entry else self.answer

    @property
    def source_name(self) -> str:
        """Return the data_source as metrics name it."""
        return re.sub(r"[^\w.+-]+", "_", self.source).strip("_") or "unnamed"


@dataclass(frozen=True)
class ProblemSet:
    """Held-out problems that are read and evaluated together.

    name       of their scores; "": they are shown by data_source
    every      steps between their evaluations; None: evaluation.every, and they are in the headline
    samples    answers to each
    questions  of all their rows, those beyond evaluation.max_problems too"""

    problems: Sequence[Prompt]
    samples: int
    name: str = ""
    every: int | None = None
    questions: frozenset[str] = frozenset()


def prompt_uid(text: str, answer: str) -> int:
    """Return 63 bits that identify a problem: a hash of its text, before any template, and its answer."""
    digest = blake2b(f"{len(text)}:{text}{answer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def epoch_order(num_prompts: int, seed: int, epoch: int) -> list[int]:
    """Return a permutation of range(num_prompts) that depends on the three numbers alone."""

    def key(index: int) -> bytes:
        return blake2b(b"%d:%d:%d" % (seed, epoch, index), digest_size=16).digest()

    return sorted(range(num_prompts), key=key)


def content_of(prompts: Iterable[Prompt]) -> str:
    """Return the SHA-256 of problems in their order: what is asked, as tokens, and the answer."""
    digest = sha256()
    for prompt in prompts:
        digest.update(repr((prompt.uid, prompt.tokens, prompt.answer)).encode())
    return digest.hexdigest()


class PromptSampler:
    """Hands out the indices 0 .. num_prompts - 1, each once an epoch; without `shuffle` in their own order.

    content: a checksum of what the indices lead to, which a run must still have when it continues. Raises
    ValueError if there is no prompt."""

    def __init__(self, num_prompts: int, seed: int = 0, shuffle: bool = True, content: str = "") -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts must be >= 1 (got {num_prompts})")
        self.num_prompts, self.seed, self.shuffle, self.content = num_prompts, seed, shuffle, content
        self._start_epoch(0)

    def _start_epoch(self, epoch: int, position: int = 0) -> None:
        self.epoch, self.position = epoch, position
        self._order = list(range(self.num_prompts))
        if self.shuffle:
            self._order = epoch_order(self.num_prompts, self.seed, epoch)

    def take(self, n: int) -> list[int]:
        """Return the next `n` indices. `n` may be larger than an epoch; an index then comes again."""
        taken: list[int] = []
        while len(taken) < n:
            if self.position == self.num_prompts:
                self._start_epoch(self.epoch + 1)
            part = self._order[self.position : self.position + n - len(taken)]
            self.position += len(part)
            taken += part
        return taken

    def state(self) -> dict[str, Any]:
        """Return the state that `load_state` continues from, as JSON holds it."""
        names = ("num_prompts", "seed", "shuffle", "content", "epoch", "position")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where the sampler of `state` stood. Raises CheckpointError if that one drew from other
        prompts or with another seed."""
        for name, key in (("num_prompts", "data.train"), ("seed", "seed"), ("shuffle", "data.shuffle")):
            if state.get(name) != getattr(self, name):
                raise CheckpointError(
                    f"{key}: the checkpoint's prompts were drawn with {name} {state.get(name)}, "
                    f"this run has {getattr(self, name)} (resume with the same data and seed)"
                )
        if state.get("content", self.content) != self.content:  # older checkpoints have none
            what = "its usable rows, or their order, are not those that the checkpoint's were drawn from"
            why = "put the files back; rows of reasoning-gym depend on its version and on data.eval too"
            raise CheckpointError(f"data.train: {what} ({why})")
        epoch, position = state.get("epoch"), state.get("position")
        if (
            isinstance(epoch, int)
            and isinstance(position, int)
            and epoch >= 0 <= position <= self.num_prompts
        ):
            self._start_epoch(epoch, position)
        else:
            stands = f"epoch {epoch}, position {position}, which cannot be"
            raise CheckpointError(f"data.train: the checkpoint's sampler stands at {stands}")


@dataclass(frozen=True)
class RejectedRow:
    """A row that cannot be used. `row` counts from 1; rows are counted by `reason`, not by `detail`."""

    file: str
    row: int
    reason: str
    detail: str = ""


@dataclass
class ReadReport:
    """What became of every row: kept + duplicates + rejected = the sum of `rows`.

    rows        rows per file
    kept        prompts or pairs that are used
    duplicates  rows with the prompt and answer of an earlier one
    rejected    rows that cannot be used, in the order of the files
    warned      rows that are used, and are probably not meant as they are"""

    rows: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    duplicates: int = 0
    rejected: list[RejectedRow] = field(default_factory=list)
    warned: list[RejectedRow] = field(default_factory=list)

    def lines(self, shown: int = 3) -> list[str]:
        """Return printable lines for people: the sums, and each reason with its first `shown` rows."""
        found = [
            f"data: {self.kept:,} of {sum(self.rows.values()):,} rows used, "
            f"{self.duplicates:,} duplicates, {len(self.rejected):,} unusable"
        ]
        for lead, rows in (("", self.rejected), ("warning: ", self.warned)):
            for reason, count in Counter(row.reason for row in rows).most_common():
                examples = [row for row in rows if row.reason == reason][:shown]
                places = ", ".join(
                    f"{row.file}:{row.row}" + (f" ({row.detail})" if row.detail else "") for row in examples
                )
                more = ", ..." if count > shown else ""
                found.append(f"data: {lead}{count:,} rows: {reason}: {places}{more}")
        return list(map(printable, found))

    def reject(self, file: str, number: int, problem: UnusableRow) -> None:
        """List a row as unusable."""
        self.rejected.append(RejectedRow(file, number, problem.reason, problem.detail))

    def warn(self, row: _Row, what: str) -> None:
        """List a row that is used as one to look at."""
        self.warned.append(RejectedRow(row.file, row.number, what))

    def finish(self, names: Sequence[object], kept: int) -> None:
        """Count what was kept; put the rejected rows in order. Raises DataError where nothing was kept."""
        self.kept = kept
        order = {file: position for position, file in enumerate(self.rows)}
        self.rejected.sort(key=lambda row: (order[row.file], row.row))
        if not kept:
            raise _nothing_usable(names, self.rejected)


class UnusableRow(Exception):
    """Why a row is left out: the reason by which rows are counted, and details of this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class _Row:
    """A usable row before the template. `target` is the answer, or the response of a pair."""

    file: str
    number: int
    uid: int
    prompt: str | Messages
    target: str
    source: str
    extra: dict[str, object]
    entry: str = ""


# What rows are read from, by the name that a report has for it: a file, or rows that were generated.
_Sources = Mapping[str, Path | Iterable[GeneratedRow]]


def _files(paths: Iterable[Path]) -> _Sources:
    return {str(path): path for path in paths}


def _sources(entries: Sequence[DataEntry | Path], keys: Sequence[str]) -> _Sources:
    """Return what the entries with these keys (`data.eval[1]`) are read from. Raises as
    megarl.data.generated.generate."""
    found = list(zip(keys, map(DataEntry.model_validate, entries), strict=True))
    generated: dict[str, list[GeneratedRow]] = {f"{key}.gym": [] for key, entry in found if entry.gym}
    for row in generate({f"{key}.gym": entry.gym for key, entry in found if entry.gym}):
        generated[row.key].append(row)
    sources: dict[str, Path | Iterable[GeneratedRow]] = {}
    for key, entry in found:
        sources |= _files([entry.path]) if entry.path else {f"{key}.gym": generated[f"{key}.gym"]}
    return sources


def read_prompts(
    entries: Sequence[DataEntry | Path],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[ProblemSet] = (),
    key: str = "data.train",
    tools: Tools = (),
    opening: tuple[int, ...] = (),
) -> tuple[list[Prompt], ReadReport]:
    """Read the problems of the entries of data.train, or of `key`, in their order, each prompt with the same
    answer once. The chat template tells of `tools`; `opening`, if given, takes the place of each prompt's
    tokens.

    Rows without prompt or answer, of a wrong type, malformed or too long are left out and listed in the
    report, and of what is generated the questions that are in `held_out`. Raises DataError for a missing or
    malformed file and for one without a usable row, ConfigError for a template that the tokenizer does not
    have, and as megarl.data.generated.generate."""
    keys = [f"{key}[{i}]" for i in range(len(entries))]
    questions = frozenset[str]().union(*(one.questions for one in held_out))
    _check_template(data, tokenizer)
    return _read(_sources(entries, keys), data, tokenizer, questions, tools, opening)


def _read(
    sources: _Sources,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    held_out: frozenset[str],
    tools: Tools,
    opening: tuple[int, ...],
) -> tuple[list[Prompt], ReadReport]:
    report = ReadReport()
    seen: set[int] = set()

    def unique() -> Iterator[_Row]:
        for row in _usable_rows(sources, data, report, held_out=held_out):
            if row.uid in seen:
                report.duplicates += 1
            else:
                seen.add(row.uid)
                yield row

    prompts = [
        Prompt(row.uid, text, ids, row.target, row.source, row.extra, _question(row.prompt), row.entry)
        for batch in _tokenized(unique(), data, tokenizer, report, tools)
        for row, text, tokens in batch
        for ids in [opening or tokens]
    ]
    report.finish(list(sources), len(prompts))
    return prompts, report


def read_problem_sets(
    data: DataConfig,
    evaluation: EvaluationConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools = (),
    opening: tuple[int, ...] = (),
) -> tuple[list[ProblemSet], dict[str, ReadReport]]:
    """Read data.eval: one set of each name, and of the entries without one that have the same `samples`, in
    the order in which they come first. Return them with the report of each, `eval` and the set's name.
    `tools` and `opening` are those of read_prompts.

    Raises the errors of read_prompts, and ConfigError where a name is also the data_source of a problem
    without one, whose scores would have the same place."""
    together: dict[tuple[str, int, int | None], list[str]] = {}
    for i, entry in enumerate(data.eval):
        own = entry.name or "", entry.samples or evaluation.samples, entry.every
        together.setdefault(own, []).append(str(entry.path) if entry.path else f"data.eval[{i}].gym")
    _check_template(data, tokenizer)
    all_sources = _sources(data.eval, [f"data.eval[{i}]" for i in range(len(data.eval))])
    sets, reports = [], {}
    for (name, samples, every), names in together.items():
        problems, report = _read(
            {one: all_sources[one] for one in names}, data, tokenizer, frozenset(), tools, opening
        )
        questions = frozenset(problem.question for problem in problems)
        sets.append(ProblemSet(problems[: evaluation.max_problems or None], samples, name, every, questions))
        other = f" ({samples} samples)" if samples != evaluation.samples else ""
        reports[f"eval {name}" if name else f"eval{other}"] = report
    unnamed = {problem.source_name for one in sets if not one.name for problem in one.problems}
    for i, entry in enumerate(data.eval):
        if entry.name in unnamed:
            what = f"{entry.name} is also a data_source of entries without a name"
            raise ConfigError(f"data.eval[{i}].name: {what} (choose another name)")
    return sets, reports


def read_pairs(
    entries: Sequence[DataEntry | Path],
    data: DataConfig,
    response_key: str,
    tokenizer: PreTrainedTokenizerBase,
    report: ReadReport,
) -> list[Pair]:
    """Read (prompt tokens, response tokens with the end-of-sequence token) of all files, in their order,
    repeated rows included. `report` is filled with what was left out. Raises the errors of read_prompts."""
    _check_template(data, tokenizer)
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ConfigError(
            "model.path: the tokenizer has no end-of-sequence token, "
            "so that no response could end (set eos_token)"
        )
    pairs: list[Pair] = []
    paths = [entry.path for entry in map(DataEntry.model_validate, entries) if entry.path]
    for batch in _tokenized(_usable_rows(_files(paths), data, report, response_key), data, tokenizer, report):
        responses = tokenizer([row.target for row, _, _ in batch], add_special_tokens=False)["input_ids"]
        pairs += [(tokens, (*ids, end)) for (_, _, tokens), ids in zip(batch, responses, strict=True)]
    report.finish(paths, len(pairs))
    return pairs


def validate_files(
    data: DataConfig,
    response_key: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tools: Tools = (),
) -> list[str | Reference]:
    """Check before ranks are started that every entry of `data` holds a usable row; return what a verifier is
    to be tried on: the reference answer (or response) of the first file's first one, and of every task of
    reasoning-gym one.

    Reads each file up to its first usable row. Without `tokenizer` only what shows without one is checked.
    `response_key` stands for recipe sft, whose training rows need a response, not an answer. Raises DataError
    naming the file, or ConfigError."""
    _check_template(data, None)  # of the tokenizer, that its template refuses rows shows with the rows
    found: list[str | Reference] = []

    def first(sources: _Sources, target_key: str | None = None) -> str:
        report = ReadReport()
        rows = _usable_rows(sources, data, report, target_key)
        if tokenizer is not None:
            rows = (batch[0][0] for batch in _tokenized(rows, data, tokenizer, report, tools))
        row = next(rows, None)
        if row is None:
            raise _nothing_usable(list(sources), report.rejected)
        return row.target

    held_out = [entry.path for entry in data.eval if entry.path]
    for paths, target_key in (
        ([entry.path for entry in data.train if entry.path], response_key),
        (held_out, None),
    ):
        for path in paths:
            answer = first(_files([path]), target_key)
            found = found or [answer]
    generated: dict[str, list[GeneratedRow]] = {}
    for row in first_rows(gym_entries(data), rounds=1):
        generated.setdefault(row.key, []).append(row)
    for key, rows in generated.items():
        found += [reference_to(row.answer, row.entry) for row in rows if row.entry]
        try:
            first({key: rows})
        except DataError:  # all too long, perhaps: later ones may not be
            first({key: first_rows({key: gym_entries(data)[key]}, rounds=16)})
    return found


def absent_sources(data: DataConfig, names: Iterable[str]) -> list[str]:
    """Return which of these data_sources no row of data.train has, in their order. Reads files that
    `validate_files` has found to be sound, until all have been seen; a task of reasoning-gym is the
    data_source of its rows."""
    absent: dict[Any, None] = dict.fromkeys(names)
    for entry in data.train:
        for task in entry.gym.tasks if entry.gym else ():
            absent.pop(task, None)
        with suppress(DataError):  # of a parquet file without the column
            for _, row in file_rows(entry.path, ["data_source"]) if entry.path and absent else ():
                named = row.get("data_source") if isinstance(row, dict) else None
                if isinstance(named, str):
                    absent.pop(named, None)
                if not absent:
                    break
    return [*absent]


def _check_template(data: DataConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if "{prompt}" not in data.prompt_format:
        raise ConfigError("data.prompt_format: must contain {prompt}, which is replaced by the prompt")
    if tokenizer and data.template == "chat" and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "data.template: the tokenizer has no chat template "
            "(set data.template=raw, or add one to the model's folder)"
        )


def _nothing_usable(names: Sequence[object], rejected: Sequence[RejectedRow]) -> DataError:
    if not names:
        return DataError("data.train: names no file")
    counts = Counter(row.reason for row in rejected).most_common(4)
    return DataError(
        f"{', '.join(map(str, names))}: no row can be used: "
        f"{'; '.join(f'{count} x {reason}' for reason, count in counts)} "
        "(see data.prompt_key, data.answer_key, data.max_prompt_tokens)"
    )


def _usable_rows(
    sources: _Sources,
    data: DataConfig,
    report: ReadReport,
    response_key: str | None = None,
    held_out: frozenset[str] = frozenset(),
) -> Iterator[_Row]:
    """Yield the usable rows and put the others into `report`. Raises DataError after a source that has none.

    held_out: questions that no generated row may have"""
    configured = [data.prompt_key, response_key or data.answer_key]
    columns = [name for key in configured for name in (key.split(".")[0], key)]
    columns += [
        *_OTHER_PROMPTS,
        *(() if response_key else (_OTHER_ANSWER, _SOLUTION)),
        _COMPLETION,
        _MESSAGES,
    ]
    columns = [*dict.fromkeys(columns), "data_source", "extra_info"]
    for name, source in sources.items():
        usable = False
        report.rows[name] = 0
        rows: Iterable[tuple[int, dict[str, Any] | str | GeneratedRow]]
        rows = file_rows(source, columns) if isinstance(source, Path) else enumerate(source, 1)
        for number, content in rows:
            report.rows[name] += 1
            try:
                if isinstance(content, str):
                    raise UnusableRow(content)
                if isinstance(content, dict):
                    assert isinstance(source, Path)
                    row = _file_row(content, number, source, data, response_key)
                else:
                    row = _generated_row(content, number, held_out)
            except UnusableRow as problem:
                report.reject(name, number, problem)
                continue
            usable = True
            yield row
        if not usable:
            raise _nothing_usable([name], [row for row in report.rejected if row.file == name])


def _file_row(
    content: dict[str, Any], number: int, path: Path, data: DataConfig, response_key: str | None
) -> _Row:
    _, prompt = prompt_of(content, data, path)
    target = _response(content, response_key, path) if response_key else answer_of(content, data, path)[1]
    source, extra = content.get("data_source"), content.get("extra_info")
    source, extra = source if isinstance(source, str) else "", extra if isinstance(extra, dict) else {}
    return _Row(str(path), number, _uid(prompt, target), prompt, target, source, extra)


def _generated_row(row: GeneratedRow, number: int, held_out: frozenset[str]) -> _Row:
    if row.problem is not None:
        raise UnusableRow(*row.problem)
    if row.question in held_out:
        raise UnusableRow("is a question of data.eval", row.task)
    # Not by `entry`: it numbers the rows. Without an answer the question is the whole problem.
    uid = prompt_uid(row.question, f"{row.task}: {row.answer}")
    extra: dict[str, object] = {"index": row.index}
    return _Row(row.key, number, uid, row.prompt, row.answer, row.task, extra, row.entry)


def file_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield the rows of one file with their numbers from 1 (lines, in jsonl); of a parquet file those of
    `columns`, in any case, that it has. A line that is no row is a text instead: the reason.

    Raises DataError for a missing, unreadable, empty or foreign file."""
    if not path.is_file():
        missing = "no such file" if not path.exists() else "not a file (name the .parquet or .jsonl files)"
        raise DataError(f"{path}: {missing}")
    if path.suffix not in READERS:
        known = " or ".join(READERS)
        raise DataError(f"{path}: unknown kind of file {path.suffix!r} (use {known})")
    count = 0
    try:
        for count, row in READERS[path.suffix](path, columns):
            yield count, row
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {first_line(error)}") from error
    if not count:
        raise DataError(f"{path}: holds no row")


def _jsonl(path: Path, _: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with open(path, "rb") as file:
        for number, line in enumerate(_lines(file), 1):
            if line is None:
                yield number, f"line is longer than {MAX_LINE >> 20} MiB"
                continue
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if b"\\u" in line:  # JSON can spell half a surrogate pair, which no tokenizer takes
                    json.dumps(row, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                yield number, "text is not Unicode"
            except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
                yield number, "malformed JSON"
            else:
                yield number, row if isinstance(row, dict) else "not a JSON object"


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines of a file; None in place of one that is longer than MAX_LINE, which is never held."""
    while line := file.readline(MAX_LINE + 1):
        if len(line) <= MAX_LINE or line.endswith(b"\n"):
            yield line
            continue
        while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
            pass
        yield None


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        present = [name for name in names if columns is None or name in columns or name.lower() in columns]
        if columns and not present:
            raise DataError(f"{path}: none of the columns {', '.join(columns)} (it has: {', '.join(names)})")
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        row_bytes = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
        size = min(_BATCH, max(1, _BATCH_BYTES // max(row_bytes, 1)))
        # In one thread: where memory ends, another one would end the process.
        batches = file.iter_batches(batch_size=size, columns=present, use_threads=False)
        number, decoded, size_on_disk = 0, 0, path.stat().st_size
        while True:
            try:
                with memory_limit(MEMORY):
                    batch = next(batches, None)
                    rows = [] if batch is None else _rows(batch)
            except MemoryError:
                last = min(number + size, file.metadata.num_rows)
                what = f"rows {number + 1:,} to {last:,} take more than {MEMORY >> 20} MiB decoded"
                raise DataError(f"{path}: {what} (write shorter rows)") from None
            if batch is None:
                return
            decoded += batch.nbytes + _ROW_BYTES * batch.num_rows
            if decoded > EXPANSION * size_on_disk + _EXPANSION_FREE:
                what = f"{size_on_disk:,} bytes become {decoded:,} up to row {number + batch.num_rows:,}"
                raise DataError(f"{path}: {what}: its rows repeat (write each once)")
            yield from enumerate(rows, number + 1)
            number += batch.num_rows


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any] | str]:
    """Return the rows of a batch; for one with text that is not UTF-8, the reason why it is none."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return ["text is not Unicode"]
        return [row for i in range(batch.num_rows) for row in _rows(batch.slice(i, 1))]


# What reads a file, by its suffix: (path, columns that are wanted) -> rows as `file_rows` has them.
Reader = Callable[[Path, Sequence[str] | None], Iterator[tuple[int, dict[str, Any] | str]]]
READERS: dict[str, Reader] = {".parquet": _parquet, ".jsonl": _jsonl}


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """Return what the column `key` holds, else what its dots lead to, else None."""
    value = row.get(key)
    if value is None:
        value = row
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _column(
    row: Mapping[str, Any], key: str, others: Sequence[str], setting: str, path: Path
) -> tuple[str, Any]:
    """Return the column that holds a prompt or an answer, and what it holds: `key`, else one of `others` in
    any case; (key, None) where none does. Raises DataError where two of the others differ."""
    if (value := value_at(row, key)) is not None:
        return key, value
    found = {name: row[name] for name in row if name.lower() in others and row[name] is not None}
    if len(set(map(repr, found.values()))) > 1:
        names = " and ".join(found)
        raise DataError(f"{path}: columns {names} differ, and either may be meant (set {setting} to one)")
    return next(iter(found.items()), (key, None))


def prompt_of(row: Mapping[str, Any], data: DataConfig, path: Path) -> tuple[str, str | Messages]:
    """Return the column of a row's prompt, and the prompt. Raises UnusableRow; DataError if columns are
    ambiguous."""
    column, value = _column(row, data.prompt_key, _OTHER_PROMPTS, "data.prompt_key", path)
    if value is None:
        column, value = _column(row, data.prompt_key, (_MESSAGES,), "data.prompt_key", path)
    nothing = UnusableRow(f"no prompt in {' or '.join((data.prompt_key, *_OTHER_PROMPTS, _MESSAGES))}")
    if column.lower() == _MESSAGES:
        value, _ = _without_reply(value)
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise nothing
    if isinstance(value, str):
        value = _messages_in(value) or value
    if isinstance(value, str):
        return column, value
    wrong = "prompt is neither a text nor a list of {role, content}"
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UnusableRow(wrong, type(value).__name__)
    messages = [
        {"role": message.get("role"), "content": _joined(message.get("content"))} for message in value
    ]
    if not all(isinstance(text, str) for message in messages for text in message.values()):
        raise UnusableRow(wrong, "role or content is not a text")
    if not any(message["content"].strip() for message in messages):
        raise nothing
    return column, messages


def _messages_in(text: str) -> Messages | None:
    """Return the messages that a text is the JSON of; None where it is none."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    holds = found and all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in found)
    return found if holds else None


def _joined(content: Any) -> Any:
    """Return content in parts, `[{"type": "text", "text": ...}]`, as one text where all parts are texts."""
    if isinstance(content, list) and content:
        texts = [
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        if len(texts) == len(content):
            return "".join(texts)
    return content


def _without_reply(messages: Any) -> tuple[Any, str | None]:
    """Return a conversation up to its last message, where that is the assistant's, and the text of that."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return messages, None
    text = _joined(last.get("content"))
    return messages[:-1], text if isinstance(text, str) else None


def _reply(row: Mapping[str, Any], setting: str, path: Path) -> tuple[str, Any]:
    """Return the column with what an assistant has said, and that: of `completion`, a text or messages, or of
    `messages` the last one."""
    column, value = _column(row, _COMPLETION, (_COMPLETION,), setting, path)
    if value is None:
        column, value = _column(row, _MESSAGES, (_MESSAGES,), setting, path)
    return column, _without_reply(value)[1] if isinstance(value, list) else value


def _question(prompt: str | Messages) -> str:
    """Return what was asked last, whatever examples and system texts stand before it."""
    if isinstance(prompt, str):
        return prompt
    asked = [message["content"] for message in prompt if message["role"] == "user"]
    return asked[-1] if asked else prompt[-1]["content"]


def _uid(prompt: str | Messages, target: str) -> int:
    """Return the identity of a row, whatever template its prompt goes through."""
    if not isinstance(prompt, str):
        if len(prompt) == 1 and prompt[0]["role"] == "user":
            prompt = prompt[0]["content"]
        else:
            messages = [[message["role"], message["content"]] for message in prompt]
            prompt = json.dumps(messages, ensure_ascii=False)
    return prompt_uid(prompt, target)


def _response(row: Mapping[str, Any], key: str, path: Path) -> str:
    """Return a pair's response as it is."""
    value = value_at(row, key)
    if value is None:
        _, value = _reply(row, "supervised.response_key", path)
    if value is None or value == "":
        raise UnusableRow(f"no response in {' or '.join((key, _COMPLETION, _MESSAGES))}")
    if not isinstance(value, str):
        raise UnusableRow("response is not a text", type(value).__name__)
    if len(value) > MAX_RESPONSE:
        raise UnusableRow(f"response is longer than {MAX_RESPONSE:,} characters", f"{len(value):,}")
    return value


def _after_marker(text: str) -> str:
    """Return what follows the last `####` of GSM8K's, without the commas between groups of digits."""
    answer = text.rpartition("####")[2]
    return _DIGIT_GROUPS.sub(lambda number: number[0].replace(",", ""), answer)


def final_answer(solution: str) -> str | None:
    r"""Return the answer that a worked solution holds: its last `\boxed{}`, else what follows GSM8K's `####`,
    else all of it where it is one formula or one word (TRL's `$\frac{1}{2}$` and `True`); None where it says
    none."""
    text = solution.strip()
    if (boxed := plugin("megarl.answers", "boxed")(text)) is not None:
        return boxed
    if "####" in text:
        return _after_marker(text)
    if formula := _FORMULA.fullmatch(text):
        return next(part for part in formula.groups() if part is not None)
    return text if text and not re.search(r"\s", text) else None


def answer_of(row: Mapping[str, Any], data: DataConfig, path: Path) -> tuple[str, str]:
    """Return the column of a problem's reference answer, and the answer as text: of a worked solution (the
    columns WORKED, of which `solution` comes first; data.answer_key may name one) what `final_answer` finds,
    of another column in GSM8K's form the part after `####`. Raises UnusableRow; DataError if columns are
    ambiguous."""
    column, value = _column(row, data.answer_key, (_OTHER_ANSWER,), "data.answer_key", path)
    nothing = UnusableRow(f"no answer in {' or '.join((data.answer_key, _OTHER_ANSWER, *WORKED))}")
    if value is None:
        column, value = _column(row, data.answer_key, (_SOLUTION,), "data.answer_key", path)
    if value is None:
        column, value = _reply(row, "data.answer_key", path)
    if isinstance(value, str) and column.lower() in WORKED:
        value = final_answer(value)
    if value is None:
        raise nothing
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise UnusableRow("answer is neither a text nor a number", type(value).__name__)
    if not isinstance(value, str) and not math.isfinite(value):
        raise UnusableRow("answer is neither a text nor a number", str(value))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = f"{value:f}" if isinstance(value, Decimal) else str(value)
    if "####" in text:
        text = _after_marker(text)
    if not text.strip():
        raise nothing
    return column, text.strip()


def _tokenized(
    rows: Iterator[_Row],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    report: ReadReport,
    tools: Tools = (),
) -> Iterator[list[tuple[_Row, str, tuple[int, ...]]]]:
    """Yield batches of (row, its text as the model reads it, its tokens), none of them empty; rows that
    cannot be used go into `report`. The first batch is of one row: a caller who needs only one pays for no
    other."""
    # A chat template writes the special tokens itself. A raw prompt gets those that the tokenizer puts before
    # a text, but none of those behind it: they would separate prompt and response.
    begin = () if data.template == "chat" else _begin_tokens(tokenizer)
    longest = data.max_prompt_tokens * CHARACTERS_PER_TOKEN
    limit = f"longer than data.max_prompt_tokens {data.max_prompt_tokens}"
    at_once = 1
    while part := _take(rows, at_once):
        at_once = _TOKENIZED_AT_ONCE
        texts: list[str | UnusableRow] = []
        for row in part:
            text = _templated(row, data, tokenizer, tools, report)
            if isinstance(text, str) and len(text) > longest:
                text = UnusableRow(limit, f"{len(text):,} characters")
            texts.append(text)
        good = [text for text in texts if isinstance(text, str)]
        tokens = iter(tokenizer(good, add_special_tokens=False)["input_ids"] if good else ())
        batch = []
        for row, text in zip(part, texts, strict=True):
            ids = tuple(next(tokens)) if isinstance(text, str) else ()
            if begin and isinstance(text, str):
                if ids[: len(begin)] == begin:
                    what = f"the prompt begins with {tokenizer.decode(begin)} already, and gets no other"
                    report.warn(row, what)
                else:
                    ids = (*begin, *ids)
            if isinstance(text, UnusableRow):
                problem = text
            elif len(ids) > data.max_prompt_tokens:
                problem = UnusableRow(limit, f"{len(ids)} tokens")
            elif not ids:
                problem = UnusableRow("no tokens in the prompt")
            else:
                batch.append((row, text, ids))
                continue
            report.reject(row.file, row.number, problem)
        if batch:
            yield batch


def _take(rows: Iterator[_Row], most: int) -> list[_Row]:
    """Return the next rows: at most `most`, fewer where they reach _CHARACTERS_AT_ONCE."""
    part, characters = list[_Row](), 0
    while len(part) < most and characters < _CHARACTERS_AT_ONCE and (row := next(rows, None)) is not None:
        part.append(row)
        contents = [row.prompt] if isinstance(row.prompt, str) else [one["content"] for one in row.prompt]
        characters += sum(map(len, contents)) + len(row.target)
    return part


def _begin_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer writes before a text."""
    probe = tokenizer("0", return_special_tokens_mask=True)
    pairs = zip(probe["input_ids"], probe["special_tokens_mask"], strict=True)
    return tuple(token for token, _ in takewhile(lambda pair: pair[1], pairs))


def _templated(
    row: _Row, data: DataConfig, tokenizer: PreTrainedTokenizerBase, tools: Tools, report: ReadReport
) -> str | UnusableRow:
    """Return a row's prompt as the model reads it, or why it cannot be rendered."""
    prompt = row.prompt
    if isinstance(prompt, str):
        prompt = data.prompt_format.replace("{prompt}", prompt)
        if data.template == "raw":
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    elif data.template == "raw":
        return "\n".join(message["content"] for message in prompt)
    first = prompt[0]["content"].lstrip()
    if special := next((one for one in tokenizer.all_special_tokens if first.startswith(one)), None):
        what = f"the prompt begins with {special}: a chat template has rendered it already"
        report.warn(row, f"{what} (set data.template=raw)")
        if special == tokenizer.bos_token:  # which the chat template writes itself
            prompt = [{**prompt[0], "content": first.removeprefix(special)}, *prompt[1:]]
    try:
        with memory_limit():
            return render_chat(tokenizer, prompt, tools=tools, variables=data.chat_template_kwargs)
    except MegarlError:
        raise
    except Exception as error:  # noqa: BLE001 (its own errors, and whatever Python raises in a template)
        return UnusableRow("refused by the chat template", first_line(error))
