"""Prompts and supervised pairs from data files: found, checked, put into the template, tokenized; what is left out is listed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.errors import ConfigError, DataError
from megarl.config.schema import DataConfig
from megarl.data.files import BadRow, rows
from megarl.data.prompts import Prompt, prompt_uid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, str]]
Pair = tuple[tuple[int, ...], tuple[int, ...]]

# Columns that are tried where the configured one is absent.
_OTHER_PROMPT, _OTHER_ANSWER = "question", "answer"
_SOURCE, _EXTRA = "data_source", "extra_info"
_TOKENIZED_AT_ONCE = 1024


@dataclass(frozen=True)
class RejectedRow:
    """A row that cannot be used. `row` counts from 1; `detail` says more than the `reason` by which rows are counted."""

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
    rejected    rows that cannot be used, in the order of the files"""

    rows: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    duplicates: int = 0
    rejected: list[RejectedRow] = field(default_factory=list)

    def reasons(self) -> Counter[str]:
        """How many rows were rejected for each reason."""
        return Counter(row.reason for row in self.rejected)

    def lines(self, shown: int = 3) -> list[str]:
        """The report for people: one line of sums, and one per reason with its first `shown` rows."""
        total = sum(self.rows.values())
        found = [f"data: {self.kept:,} of {total:,} rows used, {self.duplicates:,} duplicates, {len(self.rejected):,} unusable"]
        for reason, count in self.reasons().most_common():
            examples = [row for row in self.rejected if row.reason == reason][:shown]
            places = ", ".join(f"{row.file}:{row.row}" + (f" ({row.detail})" if row.detail else "") for row in examples)
            found.append(f"data: {count:,} rows: {reason}: {places}{', ...' if count > shown else ''}")
        return found


class _Unusable(Exception):
    """The reason, and more about it, why a row is left out."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class _Problem:
    """A usable row before the template: a text, or messages. `target` is the answer, or the response of a pair."""

    file: str
    row: int
    prompt: str | Messages
    target: str
    source: str
    extra: dict[str, object]

    @property
    def text(self) -> str:
        """What identifies the prompt, whatever template it goes through."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1 and self.prompt[0]["role"] == "user":
            return self.prompt[0]["content"]
        return json.dumps([[message["role"], message["content"]] for message in self.prompt], ensure_ascii=False)


def read_prompts(paths: Sequence[Path], data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Prompt], ReadReport]:
    """The problems of all files, in their order, each prompt with the same answer once.

    Rows without prompt or answer, of a wrong type, malformed or too long are left out and listed in the report. Raises DataError
    for a missing or malformed file and for one without a usable row, ConfigError for a template that the tokenizer has not."""
    _check_template(data, tokenizer)
    report = ReadReport()
    seen: set[int] = set()
    problems: list[tuple[int, _Problem]] = []
    for problem in _problems(paths, data, report):
        uid = prompt_uid(problem.text, problem.target)
        if uid in seen:
            report.duplicates += 1
            continue
        seen.add(uid)
        problems.append((uid, problem))
    prompts = []
    for at in range(0, len(problems), _TOKENIZED_AT_ONCE):
        part = problems[at : at + _TOKENIZED_AT_ONCE]
        for (uid, problem), made in zip(part, _tokenized([p for _, p in part], data, tokenizer), strict=True):
            if isinstance(made, _Unusable):
                report.rejected.append(RejectedRow(problem.file, problem.row, made.reason, made.detail))
            else:
                prompts.append(Prompt(uid, made[0], made[1], problem.target, problem.source, problem.extra))
    _finish(paths, report, len(prompts))
    return prompts, report


def read_pairs(
    paths: Sequence[Path],
    data: DataConfig,
    response_key: str,
    tokenizer: PreTrainedTokenizerBase,
    report: ReadReport | None = None,
) -> list[Pair]:
    """(prompt tokens, response tokens with the end-of-sequence token) of all files, in their order, repeated rows included.

    `report`, if given, is filled with what was left out. Errors as in read_prompts."""
    _check_template(data, tokenizer)
    if not isinstance(tokenizer.eos_token_id, int):
        raise ConfigError("model.path: the tokenizer has no end-of-sequence token, so that no response could end (set eos_token)")
    report = ReadReport() if report is None else report
    problems = list(_problems(paths, data, report, response_key))
    pairs: list[Pair] = []
    for at in range(0, len(problems), _TOKENIZED_AT_ONCE):
        part = problems[at : at + _TOKENIZED_AT_ONCE]
        responses = tokenizer([problem.target for problem in part], add_special_tokens=False)["input_ids"]
        for problem, made, response in zip(part, _tokenized(part, data, tokenizer), responses, strict=True):
            if isinstance(made, _Unusable):
                report.rejected.append(RejectedRow(problem.file, problem.row, made.reason, made.detail))
            else:
                pairs.append((made[1], (*response, tokenizer.eos_token_id)))
    _finish(paths, report, len(pairs))
    return pairs


def validate_files(data: DataConfig, response_key: str | None = None, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """Before ranks are started: every file of `data` can be read and holds a row that can be used, as far as that shows
    without the tokenizer, where none is given. `response_key` stands for recipe sft, whose training rows need a response, not an answer.

    Reads no further than to the first such row of a file. Returns the reference answer (or response) of the first one.
    Raises DataError naming the file, or ConfigError."""
    _check_format(data)
    first = ""
    for paths, target_key in ((data.train, response_key), (data.eval, None)):
        for path in paths:
            report = ReadReport()
            problems = _problems([path], data, report, target_key)
            problem = next(problems, None) if tokenizer is None else _first_usable(problems, data, tokenizer, report)
            if problem is None:
                raise _nothing_usable([path], report)
            first = first or problem.target
    return first


def _first_usable(
    problems: Iterator[_Problem], data: DataConfig, tokenizer: PreTrainedTokenizerBase, report: ReadReport
) -> _Problem | None:
    """Find the first row that can also be tokenized; mostly that is the first of all, and no other is looked at."""
    at_once = 1
    while part := list(islice(problems, at_once)):
        for problem, made in zip(part, _tokenized(part, data, tokenizer), strict=True):
            if not isinstance(made, _Unusable):
                return problem
            report.rejected.append(RejectedRow(problem.file, problem.row, made.reason, made.detail))
        at_once = _TOKENIZED_AT_ONCE
    return None


def _check_format(data: DataConfig) -> None:
    if "{prompt}" not in data.prompt_format:
        raise ConfigError("data.prompt_format: must contain {prompt}, which is replaced by the prompt")


def _check_template(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    _check_format(data)
    if data.template == "chat" and not getattr(tokenizer, "chat_template", None):
        raise ConfigError("data.template: the tokenizer has no chat template (set data.template=raw, or add one to the model's folder)")


def _finish(paths: Sequence[Path], report: ReadReport, kept: int) -> None:
    report.kept = kept
    order = {file: at for at, file in enumerate(report.rows)}
    report.rejected.sort(key=lambda row: (order[row.file], row.row))
    if not kept:
        raise _nothing_usable(paths, report)


def _nothing_usable(paths: Sequence[Path], report: ReadReport) -> DataError:
    if not paths:
        return DataError("data.train: names no file")
    files = ", ".join(str(path) for path in paths)
    reasons = "; ".join(f"{count} x {reason}" for reason, count in report.reasons().most_common(4))
    return DataError(f"{files}: no row can be used: {reasons} (see data.prompt_key, data.answer_key, data.max_prompt_tokens)")


def _problems(paths: Sequence[Path], data: DataConfig, report: ReadReport, response_key: str | None = None) -> Iterator[_Problem]:
    """The usable rows; the others go into `report`. Raises DataError after a file that has none."""
    prompt_keys = (data.prompt_key, _OTHER_PROMPT)
    target_keys = (response_key,) if response_key else (data.answer_key, _OTHER_ANSWER)
    needed = list(dict.fromkeys(name for key in (*prompt_keys, *target_keys) for name in (key.split(".")[0], key)))
    for path in dict.fromkeys(paths):
        file, usable = str(path), 0
        report.rows[file] = 0
        for number, row in rows(path, [*needed, _SOURCE, _EXTRA]):
            report.rows[file] += 1
            try:
                problem = _problem(file, number, row, prompt_keys, target_keys, is_pair=response_key is not None)
            except _Unusable as reason:
                report.rejected.append(RejectedRow(file, number, reason.reason, reason.detail))
                continue
            usable += 1
            yield problem
        if not usable:
            only_this = [row for row in report.rejected if row.file == file]
            raise _nothing_usable([path], ReadReport(rejected=only_this))


def _problem(
    file: str, number: int, row: dict[str, Any] | BadRow, prompt_keys: Sequence[str], target_keys: Sequence[str], is_pair: bool
) -> _Problem:
    if isinstance(row, BadRow):
        raise _Unusable(row.reason)
    prompt = _prompt(_first_of(row, prompt_keys), " or ".join(prompt_keys))
    target = _first_of(row, target_keys)
    target = _response(target, target_keys[0]) if is_pair else _answer(target, " or ".join(target_keys))
    source, extra = row.get(_SOURCE), row.get(_EXTRA)
    problem = _Problem(file, number, prompt, target, source if isinstance(source, str) else "", extra if isinstance(extra, dict) else {})
    try:
        (problem.text + target).encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no tokenizer takes
        raise _Unusable("text is not Unicode") from error
    return problem


def _first_of(row: Mapping[str, Any], keys: Sequence[str]) -> Any:
    for key in keys:
        value = row.get(key)
        if value is None:
            value = row
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def _prompt(value: Any, key: str) -> str | Messages:
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise _Unusable(f"no prompt in {key}")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise _Unusable("prompt is neither a text nor a list of {role, content}", type(value).__name__)
    messages = [{"role": message.get("role"), "content": message.get("content")} for message in value]
    if not all(isinstance(text, str) for message in messages for text in message.values()):
        raise _Unusable("prompt is neither a text nor a list of {role, content}", "role or content is not a text")
    if not any(message["content"].strip() for message in messages):
        raise _Unusable(f"no prompt in {key}")
    return messages


def _answer(value: Any, key: str) -> str:
    """The reference answer as text; of a worked solution in GSM8K's form what follows `####`."""
    if value is None:
        raise _Unusable(f"no answer in {key}")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise _Unusable("answer is neither a text nor a number", type(value).__name__)
    text = str(value)
    if "####" in text:
        text = text.rpartition("####")[2].replace(",", "")
    if not text.strip():
        raise _Unusable(f"no answer in {key}")
    return text.strip()


def _response(value: Any, key: str) -> str:
    if value is None or value == "":
        raise _Unusable(f"no response in {key}")
    if not isinstance(value, str):
        raise _Unusable("response is not a text", type(value).__name__)
    return value


def _tokenized(
    problems: Sequence[_Problem], data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, tuple[int, ...]] | _Unusable]:
    """(text as the model reads it, its tokens) of each problem."""
    chat = data.template == "chat"
    made: list[str | _Unusable] = [_templated(problem.prompt, data, tokenizer) for problem in problems]
    texts = [text for text in made if isinstance(text, str)]
    # A chat template writes the special tokens itself; a raw prompt gets those that the model was trained with.
    tokens = iter(tokenizer(texts, add_special_tokens=not chat)["input_ids"] if texts else ())
    found: list[tuple[str, tuple[int, ...]] | _Unusable] = []
    for text in made:
        if isinstance(text, _Unusable):
            found.append(text)
            continue
        ids = tuple(next(tokens))
        if len(ids) > data.max_prompt_tokens:
            found.append(_Unusable(f"longer than data.max_prompt_tokens {data.max_prompt_tokens}", f"{len(ids)} tokens"))
        else:
            found.append((text, ids) if ids else _Unusable("no tokens in the prompt"))
    return found


def _templated(prompt: str | Messages, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str | _Unusable:
    if isinstance(prompt, str):
        prompt = data.prompt_format.replace("{prompt}", prompt)
        if data.template == "raw":
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    elif data.template == "raw":
        return "\n".join(message["content"] for message in prompt)
    try:
        return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # noqa: BLE001 (its own errors, and whatever Python raises for what it computes)
        return _Unusable("refused by the chat template", (str(error).splitlines() or [type(error).__name__])[0])
