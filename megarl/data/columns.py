"""Find a row's prompt, reference answer and response in common columns."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from megarl.config.errors import DataError
from megarl.config.plugins import plugin
from megarl.config.schema import DataConfig

Messages = list[dict[str, str]]

# Tried, ignoring case, if the configured column is absent (GSM8K, MATH, AIME).
_OTHER_PROMPTS, _OTHER_ANSWER, _SOLUTION = ("question", "problem"), "answer", "solution"
# TRL: a conversation, and the text after a prompt.
_MESSAGES, _COMPLETION = "messages", "completion"
WORKED = (_SOLUTION, _COMPLETION, _MESSAGES)  # solutions that contain the answer
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_DIGIT_GROUPS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)")
_TURNS_PROMPT, _TURNS_ANSWER = "0.value", "1.ground_truth.value"  # Open-Reasoner-Zero: a row is two turns
MAX_RESPONSE = 1 << 22


class UnusableRow(Exception):
    """Reports group by `reason`; `detail` is about this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def columns_to_read(data: DataConfig, response_key: str | None) -> list[str]:
    """Return the columns that a row may use, and the first part of each dotted key."""
    columns = [
        name
        for key in (data.prompt_key, response_key or data.answer_key)
        for name in (key.split(".")[0], key)
    ]
    answers = () if response_key else (_OTHER_ANSWER, _SOLUTION)
    columns += [*_OTHER_PROMPTS, *answers, _COMPLETION, _MESSAGES, _TURNS_PROMPT[0], _TURNS_ANSWER[0]]
    return [*dict.fromkeys(columns), "data_source", "extra_info"]


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of column `key`, else at the dotted path `key`."""
    value = row.get(key)
    if value is None:
        value = row
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _find_column(
    row: Mapping[str, Any], key: str, setting: str, path: Path, *others: Sequence[str]
) -> tuple[str, Any]:
    """Return (column, value) of `key`, else of the first of the groups `others`, else (key, None).

    Raises DataError if two columns of a group differ."""
    if (value := value_at(row, key)) is not None:
        return key, value
    for group in others:
        candidates = {name: row[name] for name in row if name.lower() in group and row[name] is not None}
        if len(set(map(repr, candidates.values()))) > 1:
            names = " and ".join(candidates)
            raise DataError(f"{path}: columns {names} differ, and either may be meant (set {setting} to one)")
        if candidates:
            return next(iter(candidates.items()))
    return key, None


def find_prompt(row: Mapping[str, Any], data: DataConfig, path: Path) -> tuple[str, str | Messages]:
    """Return (column, prompt). Raises UnusableRow, and DataError for ambiguous columns."""
    key, setting = data.prompt_key, "data.prompt_key"
    column, value = _find_column(row, key, setting, path, _OTHER_PROMPTS, (_MESSAGES,))
    if value is None:
        value = value_at(row, _TURNS_PROMPT)
    no_prompt_error = UnusableRow(f"no prompt in {' or '.join((key, *_OTHER_PROMPTS, _MESSAGES))}")
    if column.lower() == _MESSAGES:
        value, _ = _split_reply(value)
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise no_prompt_error
    if isinstance(value, str):
        value = _parse_messages(value) or value
    if isinstance(value, str):
        return column, value
    reason = "prompt is neither a text nor a list of {role, content}"
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UnusableRow(reason, type(value).__name__)
    messages = [
        {"role": message.get("role"), "content": _join_parts(message.get("content"))} for message in value
    ]
    if not all(isinstance(text, str) for message in messages for text in message.values()):
        raise UnusableRow(reason, "role or content is not a text")
    if not any(message["content"].strip() for message in messages):
        raise no_prompt_error
    return column, messages


def _parse_messages(text: str) -> Messages | None:
    if not text.lstrip().startswith("["):
        return None
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_valid = messages and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    )
    return messages if is_valid else None


def _join_parts(content: Any) -> Any:
    if isinstance(content, list) and content:
        texts = [
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        if len(texts) == len(content):
            return "".join(texts)
    return content


def _split_reply(messages: Any) -> tuple[Any, str | None]:
    last_message = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last_message, dict) or last_message.get("role") != "assistant":
        return messages, None
    text = _join_parts(last_message.get("content"))
    return messages[:-1], text if isinstance(text, str) else None


def _find_reply(row: Mapping[str, Any], setting: str, path: Path) -> tuple[str, Any]:
    column, value = _find_column(row, _COMPLETION, setting, path, (_COMPLETION,))
    if value is None:
        column, value = _find_column(row, _MESSAGES, setting, path, (_MESSAGES,))
    return column, _split_reply(value)[1] if isinstance(value, list) else value


def last_question(prompt: str | Messages) -> str:
    """Return the last user message, or a text prompt."""
    if isinstance(prompt, str):
        return prompt
    questions = [message["content"] for message in prompt if message["role"] == "user"]
    return questions[-1] if questions else prompt[-1]["content"]


def find_response(row: Mapping[str, Any], key: str, path: Path) -> str:
    """Return a supervised pair's response, unchanged. Raises UnusableRow."""
    value = value_at(row, key)
    if value is None:
        _, value = _find_reply(row, "supervised.response_key", path)
    if value is None or value == "":
        raise UnusableRow(f"no response in {' or '.join((key, _COMPLETION, _MESSAGES))}")
    if not isinstance(value, str):
        raise UnusableRow("response is not a text", type(value).__name__)
    if len(value) > MAX_RESPONSE:
        raise UnusableRow(f"response is longer than {MAX_RESPONSE:,} characters", f"{len(value):,}")
    return value


def _after_marker(text: str) -> str:
    answer = text.rpartition("####")[2]
    return _DIGIT_GROUPS.sub(lambda match: match[0].replace(",", ""), answer)


def final_answer(solution: str) -> str | None:
    r"""Return the answer in a worked solution, or None.

    It is the last `\boxed{}`, else the text after `####` (GSM8K), else the text if it is one formula or word
    (TRL)."""
    text = solution.strip()
    if (boxed := plugin("megarl.answers", "boxed")(text)) is not None:
        return boxed
    if "####" in text:
        return _after_marker(text)
    if formula := _FORMULA.fullmatch(text):
        return next(part for part in formula.groups() if part is not None)
    return text if text and not re.search(r"\s", text) else None


def _are_tests(value: Any) -> bool:
    """Detect the tests of a program (docs/verifiers.md): an object, or a list of objects or assertions."""
    if isinstance(value, list) and value:
        return all(isinstance(test, dict) or (isinstance(test, str) and "assert" in test) for test in value)
    return isinstance(value, dict) and bool(value)


def _is_json(text: str) -> bool:
    """Detect a JSON object or list, which is not a worked solution."""
    if text.lstrip()[:1] not in ("{", "["):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def find_answer(row: Mapping[str, Any], data: DataConfig, path: Path) -> tuple[str, str]:
    """Return (column, text) of the reference answer.

    Columns of WORKED, `solution` first, give their `final_answer`, others the text after any `####` (GSM8K).
    Tests of a program that are an object or list become JSON.
    Raises UnusableRow, and DataError for ambiguous columns."""
    key, setting = data.answer_key, "data.answer_key"
    column, value = _find_column(row, key, setting, path, (_OTHER_ANSWER,), (_SOLUTION,))
    no_answer_error = UnusableRow(f"no answer in {' or '.join((key, _OTHER_ANSWER, *WORKED))}")
    if value is None:
        column, value = _find_reply(row, setting, path)
    if value is None:
        value = value_at(row, _TURNS_ANSWER)
    if isinstance(value, str) and column.lower() in WORKED:
        value = final_answer(value)
    if value is None:
        raise no_answer_error
    if _are_tests(value):
        return column, json.dumps(value, default=str)
    reason = "answer is neither a text nor a number"
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise UnusableRow(reason, type(value).__name__)
    if not isinstance(value, str) and not math.isfinite(value):
        raise UnusableRow(reason, str(value))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = f"{value:f}" if isinstance(value, Decimal) else str(value)
    if "####" in text and not _is_json(text):
        text = _after_marker(text)
    if not text.strip():
        raise no_answer_error
    return column, text.strip()
