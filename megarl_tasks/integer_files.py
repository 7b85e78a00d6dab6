"""`megarl data integers`: convert answers to integers, checked by the symbolic verifier."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.errors import DataError
from megarl.config.files import atomic_file
from megarl.config.schema import DataConfig
from megarl.data.columns import WORKED, UnusableRow, find_answer, find_prompt, value_at
from megarl.data.prompts import ReadReport
from megarl.data.readers import file_rows
from megarl.rewards import VerifierPool
from megarl_verifier.integers import IntegerAnswer, Refused, integer_answer


@dataclass
class ConvertedFile:
    """The converted rows of a file.

    kept     rows with integer answers
    refused  unchanged rows with reason and number (`refused`, `refused_row`)
    turned   kept rows whose answer was no integer"""

    kept: list[dict[str, Any]]
    refused: list[dict[str, Any]]
    turned: int
    report: ReadReport


def convert(source: Path, data: DataConfig, workers: int = 1) -> ConvertedFile:
    """Convert the answers of a file to integers. Raises DataError.

    The integer, as text, replaces the answer, and the question asks for it. A worked solution stays, with the
    integer in a new column `answer`, which has precedence. `original_answer`, if new, has the old answer."""
    report = ReadReport(rows={str(source): 0})
    result = ConvertedFile([], [], 0, report)
    converted_rows: list[tuple[int, dict[str, Any], IntegerAnswer]] = []
    rows: dict[int, dict[str, Any]] = {}

    def refuse(number: int, problem: UnusableRow) -> None:
        report.reject(str(source), number, problem)
        result.refused.append({**rows.get(number, {}), "refused": problem.reason, "refused_row": number})

    for number, row in file_rows(source):
        report.rows[str(source)] += 1
        try:
            if isinstance(row, str):
                raise UnusableRow(row)
            rows[number] = row
            _, prompt = find_prompt(row, data, source)
            question = prompt if isinstance(prompt, str) else "\n".join(part["content"] for part in prompt)
            converted_rows.append((number, row, integer_answer(question, find_answer(row, data, source)[1])))
        except UnusableRow as problem:
            refuse(number, problem)
        except Refused as problem:
            refuse(number, UnusableRow(problem.reason, problem.detail))

    reworded_answers = [answer for _, _, answer in converted_rows if answer.asked]
    with VerifierPool("math", workers) as pool:
        verdicts = iter(
            pool.verify([(f"\\boxed{{{answer.back}}}", answer.number) for answer in reworded_answers])
        )
    for number, row, answer in converted_rows:
        verdict = next(verdicts) if answer.asked else None
        if verdict and not verdict.correct:
            what = verdict.error or f"{answer.back} and {answer.number}"
            refuse(number, UnusableRow("not equal to its form by the symbolic verifier", what))
            continue
        result.turned += verdict is not None
        result.kept.append(_extend_row(row, data, source, answer))
    result.refused.sort(key=lambda row: row["refused_row"])
    report.finish(len(result.kept))
    return result


def _extend_row(row: dict[str, Any], data: DataConfig, source: Path, found: IntegerAnswer) -> dict[str, Any]:
    row = copy.deepcopy(row)
    column, prompt = find_prompt(row, data, source)
    if found.asked and isinstance(prompt, str):
        _put(row, column, f"{prompt.rstrip()} {found.asked}")
    elif found.asked:
        messages: list[dict[str, Any]] = value_at(row, column)
        last_message = next(
            (message for message in reversed(messages) if message["role"] == "user"), messages[-1]
        )
        last_message["content"] = f"{last_message['content'].rstrip()} {found.asked}"
    column, answer = find_answer(row, data, source)
    if column.lower() in WORKED:
        column = "answer"
    else:
        answer = str(value_at(row, column))
    _put(row, column, str(found.value))
    row.setdefault("original_answer", answer)
    return row


def _put(row: dict[str, Any], column: str, value: Any) -> None:
    *parts, last_part = [column] if row.get(column) is not None or "." not in column else column.split(".")
    for part in parts:
        row = row[part]
    row[last_part] = value


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    try:
        with atomic_file(path) as file:
            if path.suffix == ".parquet":
                names = dict.fromkeys(name for row in rows for name in row)
                table = pa.table({name: [row.get(name) for row in rows] for name in names})
                pq.write_table(table, file)
            else:
                file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be written: {error}") from error
