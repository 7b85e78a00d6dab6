"""Prompts and supervised pairs: read, template and tokenize rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.errors import ConfigError, DataError, MegarlError, first_line
from megarl.config.schema import DataConfig, DataEntry, EvaluationConfig
from megarl.config.text import printable
from megarl.data.chat_template import render_chat, require_template
from megarl.data.columns import (
    Messages,
    UnusableRow,
    columns_to_read,
    find_answer,
    find_prompt,
    find_response,
    last_question,
)
from megarl.data.generated import GeneratedRow, first_rows, generate, gym_entries, reference_to
from megarl.data.limits import memory_limit
from megarl.data.readers import file_rows
from megarl.rewards.verdict import Reference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pair = tuple[tuple[int, ...], tuple[int, ...]]
Tools = Sequence[Mapping[str, Any]]

_TOKENIZED_AT_ONCE = 1024
_CHARACTERS_AT_ONCE = 1 << 22

CHARACTERS_PER_TOKEN = 100  # per data.max_prompt_tokens; longer prompts are not tokenized


@dataclass(frozen=True)
class Prompt:
    """One problem.

    uid       `prompt_uid`, the same in every run; seeds derive from it
    text      templated prompt
    question  last user message, or untemplated prompt
    source    data_source, or task of reasoning-gym
    answer    reference; "" if reasoning-gym has none
    entry     for reasoning-gym's scorer; "": reward.verifier grades"""

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
        return reference_to(self.answer, self.entry) if self.entry else self.answer

    @property
    def source_name(self) -> str:
        """The source in metrics."""
        return re.sub(r"[^\w.+-]+", "_", self.source).strip("_") or "unnamed"


@dataclass(frozen=True)
class ProblemSet:
    """Problems that are evaluated together.

    name       prefix of scores; "": scores by data_source
    every      steps between evaluations; None: evaluation.every, and the scores count in the headline
    questions  of all problems, also of those beyond evaluation.max_problems"""

    problems: Sequence[Prompt]
    samples: int
    name: str = ""
    every: int | None = None
    questions: frozenset[str] = frozenset()


def prompt_uid(text: str, answer: str) -> int:
    """Return a 63-bit hash of an untemplated text and its answer."""
    digest = blake2b(f"{len(text)}:{text}{answer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def checksum_prompts(prompts: Iterable[Prompt]) -> str:
    """Return the SHA-256 of uids, tokens and answers."""
    digest = sha256()
    for prompt in prompts:
        digest.update(repr((prompt.uid, prompt.tokens, prompt.answer)).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class RejectedRow:
    """`row` counts from 1. Reports group by `reason`."""

    file: str
    row: int
    reason: str
    detail: str = ""


@dataclass
class ReadReport:
    """Counts of rows: kept + duplicates + rejected = the sum of `rows` over files.

    duplicates  rows with the prompt and answer of an earlier row
    warned      rows that look wrong"""

    rows: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    duplicates: int = 0
    rejected: list[RejectedRow] = field(default_factory=list)
    warned: list[RejectedRow] = field(default_factory=list)

    def lines(self, shown: int = 3) -> list[str]:
        """Return the total counts, then each reason with up to `shown` examples."""
        report_lines = [
            f"data: {self.kept:,} of {sum(self.rows.values()):,} rows used, "
            f"{self.duplicates:,} duplicates, {len(self.rejected):,} unusable"
        ]
        for prefix, rows in (("", self.rejected), ("warning: ", self.warned)):
            for reason, count in Counter(row.reason for row in rows).most_common():
                examples = [row for row in rows if row.reason == reason][:shown]
                locations = ", ".join(
                    f"{row.file}:{row.row}" + (f" ({row.detail})" if row.detail else "") for row in examples
                )
                ellipsis = ", ..." if count > shown else ""
                report_lines.append(f"data: {prefix}{count:,} rows: {reason}: {locations}{ellipsis}")
        return list(map(printable, report_lines))

    def reject(self, file: str, number: int, problem: UnusableRow) -> None:
        self.rejected.append(RejectedRow(file, number, problem.reason, problem.detail))

    def warn(self, row: _Row, what: str) -> None:
        self.warned.append(RejectedRow(row.file, row.number, what))

    def finish(self, kept: int) -> None:
        """Complete the counts. Raises DataError if no row was kept."""
        self.kept = kept
        position_by_file = {file: position for position, file in enumerate(self.rows)}
        self.rejected.sort(key=lambda row: (position_by_file[row.file], row.row))
        if not kept:
            raise _nothing_usable(self.rows, self.rejected)


@dataclass(frozen=True)
class _Row:
    """A row before templating. `target`: the answer, or a pair's response."""

    file: str
    number: int
    uid: int
    prompt: str | Messages
    target: str
    source: str
    extra: dict[str, object]
    entry: str = ""


_Source = Path | Iterable[GeneratedRow]
_Sources = Mapping[str, _Source]


def _open_sources(entries: Sequence[DataEntry | Path], key: str) -> list[tuple[str, _Source]]:
    """Return name and source of the entries `key[0]`, `key[1]`, ..."""
    entries_by_key = {f"{key}[{i}].gym": DataEntry.model_validate(entry) for i, entry in enumerate(entries)}
    gym_configs = {name: entry.gym for name, entry in entries_by_key.items() if entry.gym}
    rows_by_key: dict[str, list[GeneratedRow]] = {name: [] for name in gym_configs}
    for row in generate(gym_configs):
        rows_by_key[row.key].append(row)
    return [(str(entry.path or k), entry.path or rows_by_key[k]) for k, entry in entries_by_key.items()]


def read_prompts(
    entries: Sequence[DataEntry | Path],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[ProblemSet] = (),
    key: str = "data.train",
    tools: Tools = (),
    opening: tuple[int, ...] = (),
) -> tuple[list[Prompt], ReadReport]:
    """Read the problems of all entries in order, without duplicates of prompt and answer.

    Args:
        held_out: generated rows with questions of these sets are rejected
        opening: replaces each prompt's tokens, unless empty

    Raises:
        DataError: a file is missing, malformed or without a usable row (unusable rows are only reported)
        ConfigError: no chat template, or no {prompt} in data.prompt_format; also the errors of `generate`"""
    questions = frozenset[str]().union(*(problem_set.questions for problem_set in held_out))
    return _read(dict(_open_sources(entries, key)), data, tokenizer, questions, tools, opening)


def _read(
    sources: _Sources,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    held_out: frozenset[str],
    tools: Tools,
    opening: tuple[int, ...],
) -> tuple[list[Prompt], ReadReport]:
    report = ReadReport()
    known_uids: set[int] = set()

    def unique_rows() -> Iterator[_Row]:
        for row in _usable_rows(sources, data, report, held_out=held_out):
            if row.uid in known_uids:
                report.duplicates += 1
            else:
                known_uids.add(row.uid)
                yield row

    prompts: list[Prompt] = []
    for row, text, tokens in chain.from_iterable(_tokenize(unique_rows(), data, tokenizer, report, tools)):
        question = last_question(row.prompt)
        columns = row.target, row.source, row.extra, question, row.entry
        prompts.append(Prompt(row.uid, text, opening or tokens, *columns))
    report.finish(len(prompts))
    return prompts, report


def read_problem_sets(
    data: DataConfig,
    evaluation: EvaluationConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools = (),
    opening: tuple[int, ...] = (),
) -> tuple[list[ProblemSet], dict[str, ReadReport]]:
    """Read data.eval: one set per (name, samples, every).

    Returns the sets in the order of their first entries, and reports by name. Raises as `read_prompts`, and
    ConfigError if a name is an unnamed entry's data_source: their metrics would collide."""
    named_sources = _open_sources(data.eval, "data.eval")
    sources_by_set: dict[tuple[str, int, int | None], dict[str, _Source]] = {}
    for entry, (source_name, source) in zip(data.eval, named_sources, strict=True):
        set_id = entry.name or "", entry.samples or evaluation.samples, entry.every
        sources_by_set.setdefault(set_id, {})[source_name] = source
    sets, reports = [], {}
    for (name, samples, every), sources in sources_by_set.items():
        problems, report = _read(sources, data, tokenizer, frozenset(), tools, opening)
        questions = frozenset(problem.question for problem in problems)
        sets.append(ProblemSet(problems[: evaluation.max_problems or None], samples, name, every, questions))
        suffix = f" ({samples} samples)" if samples != evaluation.samples else ""
        reports[f"eval {name}" if name else f"eval{suffix}"] = report
    unnamed_sources = {problem.source_name for one in sets if not one.name for problem in one.problems}
    for i, entry in enumerate(data.eval):
        if entry.name in unnamed_sources:
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
    """Read (prompt tokens, response tokens with end-of-sequence) of all files in order, with duplicates.

    Fills `report`. Raises as `read_prompts`."""
    eos_id = tokenizer.eos_token_id
    if not isinstance(eos_id, int):
        raise ConfigError(
            "model.path: the tokenizer has no end-of-sequence token, "
            "so that no response could end (set eos_token)"
        )
    pairs: list[Pair] = []
    paths = {str(path): path for entry in entries if (path := DataEntry.model_validate(entry).path)}
    for batch in _tokenize(_usable_rows(paths, data, report, response_key), data, tokenizer, report):
        responses = tokenizer([row.target for row, _, _ in batch], add_special_tokens=False)["input_ids"]
        pairs += [(tokens, (*ids, eos_id)) for (_, _, tokens), ids in zip(batch, responses, strict=True)]
    report.finish(len(pairs))
    return pairs


def validate_files(
    data: DataConfig,
    response_key: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tools: Tools = (),
) -> list[str | Reference]:
    """Check, before ranks start, that every entry of `data` has a usable row.

    Reads files up to that row, and tokenizes only with a `tokenizer`. Recipe sft has a `response_key`, for
    training rows with a response instead of an answer.

    Returns references to try the verifier on: the first file's, and one per task of reasoning-gym.
    Raises DataError or ConfigError."""
    references: list[str | Reference] = []

    def read_first_target(sources: _Sources, target_key: str | None = None) -> str:
        report = ReadReport()
        rows = _usable_rows(sources, data, report, target_key)
        if tokenizer is not None:
            rows = (batch[0][0] for batch in _tokenize(rows, data, tokenizer, report, tools))
        row = next(rows, None)
        if row is None:
            raise _nothing_usable(sources, report.rejected)
        return row.target

    for entries, target_key in ((data.train, response_key), (data.eval, None)):
        for path in (entry.path for entry in entries if entry.path):
            answer = read_first_target({str(path): path}, target_key)
            references = references or [answer]
    rows_by_key: dict[str, list[GeneratedRow]] = {}
    for row in first_rows(gym_entries(data), rounds=1):
        rows_by_key.setdefault(row.key, []).append(row)
    for key, rows in rows_by_key.items():
        references += [reference_to(row.answer, row.entry) for row in rows if row.entry]
        try:
            read_first_target({key: rows})
        except DataError:  # later rows may fit
            read_first_target({key: first_rows({key: gym_entries(data)[key]}, rounds=16)})
    return references


def absent_sources(data: DataConfig, names: Iterable[str]) -> list[str]:
    """Return the `names` that are the data_source or generated task of no row of data.train.

    Requires `validate_files`."""
    absent_names: dict[Any, None] = dict.fromkeys(names)
    for entry in data.train:
        for task in entry.gym.tasks if entry.gym else ():
            absent_names.pop(task, None)
        with suppress(DataError):  # a parquet file may lack the column
            for _, row in file_rows(entry.path, ["data_source"]) if entry.path and absent_names else ():
                source_name = row.get("data_source") if isinstance(row, dict) else None
                if isinstance(source_name, str):
                    absent_names.pop(source_name, None)
                if not absent_names:
                    break
    return [*absent_names]


def _nothing_usable(names: Collection[str], rejected: Sequence[RejectedRow]) -> DataError:
    if not names:
        return DataError("data.train: names no file")
    counts = Counter(row.reason for row in rejected).most_common(4)
    return DataError(
        f"{', '.join(names)}: no row can be used: "
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
    """Yield usable rows, report the others. Raises DataError after a source without a usable row."""
    if "{prompt}" not in data.prompt_format:
        raise ConfigError("data.prompt_format: must contain {prompt}, which is replaced by the prompt")
    columns = columns_to_read(data, response_key)
    for name, source in sources.items():
        has_usable_row = False
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
            has_usable_row = True
            yield row
        if not has_usable_row:
            raise _nothing_usable([name], [row for row in report.rejected if row.file == name])


def _file_row(
    content: dict[str, Any], number: int, path: Path, data: DataConfig, response_key: str | None
) -> _Row:
    _, prompt = find_prompt(content, data, path)
    target = (
        find_response(content, response_key, path) if response_key else find_answer(content, data, path)[1]
    )
    source, extra = content.get("data_source"), content.get("extra_info")
    source, extra = source if isinstance(source, str) else "", extra if isinstance(extra, dict) else {}
    return _Row(str(path), number, _uid(prompt, target), prompt, target, source, extra)


def _generated_row(row: GeneratedRow, number: int, held_out: frozenset[str]) -> _Row:
    if row.problem is not None:
        raise UnusableRow(*row.problem)
    if row.question in held_out:
        raise UnusableRow("is a question of data.eval", row.task)
    # Not from `entry`, which contains the row's number: duplicates would differ.
    uid = prompt_uid(row.question, f"{row.task}: {row.answer}")
    extra: dict[str, object] = {"index": row.index}
    return _Row(row.key, number, uid, row.prompt, row.answer, row.task, extra, row.entry)


def _uid(prompt: str | Messages, target: str) -> int:
    if not isinstance(prompt, str):
        if len(prompt) == 1 and prompt[0]["role"] == "user":
            prompt = prompt[0]["content"]
        else:
            messages = [[message["role"], message["content"]] for message in prompt]
            prompt = json.dumps(messages, ensure_ascii=False)
    return prompt_uid(prompt, target)


def _tokenize(
    rows: Iterator[_Row],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    report: ReadReport,
    tools: Tools = (),
) -> Iterator[list[tuple[_Row, str, tuple[int, ...]]]]:
    """Yield batches of (row, templated text, tokens), the first of one row; report unusable rows."""
    if data.template == "chat":
        require_template(tokenizer)
    # Chat templates write special tokens. A raw prompt gets only the tokenizer's leading ones: trailing ones
    # would separate prompt and response.
    leading_tokens = () if data.template == "chat" else _leading_special_tokens(tokenizer)
    max_characters = data.max_prompt_tokens * CHARACTERS_PER_TOKEN
    reason = f"longer than data.max_prompt_tokens {data.max_prompt_tokens}"
    max_rows = 1
    while chunk := _take(rows, max_rows):
        max_rows = _TOKENIZED_AT_ONCE
        templated_rows: list[tuple[_Row, str]] = []
        for row in chunk:
            try:
                text = _apply_template(row, data, tokenizer, tools, report)
                if len(text) > max_characters:
                    raise UnusableRow(reason, f"{len(text):,} characters")
                templated_rows.append((row, text))
            except UnusableRow as problem:
                report.reject(row.file, row.number, problem)
        texts = [text for _, text in templated_rows]
        input_ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        batch = []
        for (row, text), row_ids in zip(templated_rows, input_ids, strict=True):
            ids = tuple(row_ids)
            if leading_tokens and ids[: len(leading_tokens)] == leading_tokens:
                what = f"the prompt begins with {tokenizer.decode(leading_tokens)} already, and gets no other"
                report.warn(row, what)
            else:
                ids = (*leading_tokens, *ids)
            if len(ids) > data.max_prompt_tokens:
                report.reject(row.file, row.number, UnusableRow(reason, f"{len(ids)} tokens"))
            elif not ids:
                report.reject(row.file, row.number, UnusableRow("no tokens in the prompt"))
            else:
                batch.append((row, text, ids))
        if batch:
            yield batch


def _take(rows: Iterator[_Row], most: int) -> list[_Row]:
    chunk, characters = list[_Row](), 0
    while len(chunk) < most and characters < _CHARACTERS_AT_ONCE and (row := next(rows, None)) is not None:
        chunk.append(row)
        messages = [{"content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        characters += sum(len(message["content"]) for message in messages) + len(row.target)
    return chunk


def _leading_special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    probe = tokenizer("0", return_special_tokens_mask=True)
    pairs = zip(probe["input_ids"], probe["special_tokens_mask"], strict=True)
    return tuple(token for token, _ in takewhile(lambda pair: pair[1], pairs))


def _apply_template(
    row: _Row, data: DataConfig, tokenizer: PreTrainedTokenizerBase, tools: Tools, report: ReadReport
) -> str:
    """Return the model's input. Raises UnusableRow if the template fails."""
    prompt = row.prompt
    if isinstance(prompt, str):
        prompt = data.prompt_format.replace("{prompt}", prompt)
        if data.template == "raw":
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    elif data.template == "raw":
        return "\n".join(message["content"] for message in prompt)
    first_text = prompt[0]["content"].lstrip()
    special_tokens = (token for token in tokenizer.all_special_tokens if first_text.startswith(token))
    if special_token := next(special_tokens, None):
        what = f"the prompt begins with {special_token}: a chat template has rendered it already"
        report.warn(row, f"{what} (set data.template=raw)")
        if special_token == tokenizer.bos_token:  # the chat template writes it again
            prompt = [{**prompt[0], "content": first_text.removeprefix(special_token)}, *prompt[1:]]
    try:
        with memory_limit():
            return render_chat(tokenizer, prompt, tools=tools, variables=data.chat_template_kwargs)
    except MegarlError:
        raise
    except Exception as error:
        raise UnusableRow("refused by the chat template", first_line(error)) from error
