"""Read the tests of a program in the formats of public data sets, and compare results with them."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.rewards.verdict import UnusableError

_TOLERANCE = 1e-6  # of numbers with a point, relative above 1
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")  # in linear time
_LANGUAGES = {"python", "python3", "py"}
MAX_TESTS = 1000


@dataclass(frozen=True)
class Script:
    """Cases of standard input, and of the output that a script must write."""

    inputs: Sequence[str]
    outputs: Sequence[str]


@dataclass(frozen=True)
class Calls:
    """Arguments of a function, and the values that it must return."""

    name: str
    arguments: Sequence[list[Any]]
    results: Sequence[Any]


@dataclass(frozen=True)
class Assertions:
    """Code that raises where an answer is wrong.

    before     code that runs first
    candidate  the answer's function that the tests call `candidate`"""

    before: str
    tests: Sequence[str]
    candidate: str | None = None


Tests = Script | Calls | Assertions


def last_program(text: str) -> str | None:
    """Return the content of the last closed ```python block, or None."""
    program, lines, language = None, list[str](), None
    for line in text.splitlines():
        fence = line.strip()
        if language is None:
            if fence.startswith("```"):
                language, lines = fence[3:].strip().lower(), []
        elif fence == "```":
            if language in _LANGUAGES:
                program = "\n".join(lines) + "\n"
            language = None
        else:
            lines.append(line)
    return program


def read_tests(reference: str) -> Tests:
    """Return the tests of a reference answer. Raises UnusableError."""
    try:
        tests = _read(json.loads(reference))
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise UnusableError(f"the reference holds no tests of a program ({reason})") from None
    match tests:
        case Script(first, second) | Calls(_, first, second):
            if len(first) != len(second):
                raise UnusableError(f"the reference has {len(first)} inputs and {len(second)} outputs")
        case Assertions(_, first):
            pass
    if not 0 < len(first) <= MAX_TESTS:
        raise UnusableError(f"the reference has {len(first)} tests (1 to {MAX_TESTS} are allowed)")
    return tests


def _read(value: Any) -> Tests:
    match value:
        case str():  # JSON in JSON
            return _read_code(value, None) if _is_code(value) else _read(json.loads(value))
        case [str(), *_]:
            return _read_assertions(value, "")
        case [{"input": _, "output": _, **first}, *_]:  # LiveCodeBench, DeepCoder
            metadata = first.get("metadata") or {}
            name: Any = first.get("fn_name")
            if name is None and isinstance(metadata, dict):
                name = metadata.get("func_name")
            return _read_cases(
                [case["input"] for case in value], [case["output"] for case in value], name, True
            )
        case {"inputs": inputs, "outputs": outputs}:
            is_json = all(isinstance(case, str) for case in inputs)  # PRIME; not APPS, TACO
            return _read_cases(inputs, outputs, value.get("fn_name"), is_json)
        case {"test": str(code)}:  # HumanEval, KodCode
            return _read_code(code, value.get("entry_point"))
        case {"test_list": tests}:  # MBPP
            before = [value.get("test_setup_code") or "", *(value.get("test_imports") or ())]
            return _read_assertions(tests, "\n".join(before))
    raise ValueError("unknown format")


def _is_code(text: str) -> bool:
    return text.lstrip()[:1] not in ("{", "[", '"')


def _read_cases(inputs: Sequence[Any], outputs: Sequence[Any], name: str | None, is_json: bool) -> Tests:
    """is_json: outputs of a function that are texts are JSON"""
    if name is None:
        return Script(*([_as_text(value) for value in values] for values in (inputs, outputs)))
    arguments = [_parse_lines(value) if isinstance(value, str) else list(value) for value in inputs]
    has_json = [is_json and isinstance(value, str) and value != "" for value in outputs]
    results = [json.loads(value) if has else value for value, has in zip(outputs, has_json, strict=True)]
    return Calls(name, arguments, results)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _parse_lines(text: str) -> list[Any]:
    """Return the arguments of a case that has one as JSON in each line (LiveCodeBench)."""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _read_assertions(codes: Sequence[str], before: str) -> Assertions:
    """Texts without an assertion, such as imports, prepare the others."""
    trees = [(code, ast.parse(code)) for code in codes]
    tests, more = list[str](), [before]
    for code, tree in trees:
        (tests if any(map(_asserts, tree.body)) else more).append(code)
    return Assertions("\n".join(more), tests)


def _asserts(statement: ast.stmt) -> bool:
    """Return whether a statement runs an assertion. Definitions, and blocks for `__main__`, run none."""
    if isinstance(statement, _DEFINITIONS):
        return False
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    has_assertion = any(isinstance(node, ast.Assert) for node in ast.walk(statement))
    return has_assertion and not (isinstance(statement, ast.If) and "__name__" in names)


def _read_code(code: str, entry_point: str | None) -> Assertions:
    """A function `check(candidate)` is one test; else each function `test_...`; else each assertion."""
    body = ast.parse(code).body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    if "check" in functions and entry_point:
        return Assertions(code, ["check(candidate)"], entry_point)
    if tests := [f"{name}()" for name in functions if name.startswith("test_")]:
        return Assertions(code, tests)
    before, pending, tests = list[str](), list[str](), list[str]()
    for node in body:  # other statements run before the next assertion
        (before if isinstance(node, (*_DEFINITIONS, ast.Import, ast.ImportFrom)) else pending).append(
            ast.unparse(node)
        )
        if _asserts(node):
            tests.append("\n".join(pending))
            pending = []
    return Assertions("\n".join(before), tests)


def same_output(output: str, expected: str) -> bool:
    """Compare what a script wrote with the expected output.

    Spaces at the ends of lines and empty lines at both ends do not count, nor how many spaces separate two
    words. A number with a point may differ by 1e-6, relative above 1."""
    lines, expected_lines = (text.strip().splitlines() for text in (output, expected))
    return len(lines) == len(expected_lines) and all(
        len(words) == len(expected_words) and all(map(_same_word, words, expected_words))
        for words, expected_words in zip(map(str.split, lines), map(str.split, expected_lines), strict=True)
    )


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not (set(".eE") & set(expected) and _NUMBER.fullmatch(expected) and _NUMBER.fullmatch(word)):
        return False
    numbers = float(word), float(expected)
    return all(map(math.isfinite, numbers)) and same_value(*numbers)


def same_value(value: Any, expected: Any) -> bool:
    """Compare what a function returned with an expected value from JSON.

    A tuple equals a list, keys of objects are texts, and floats may differ by 1e-6, relative above 1."""
    match value, expected:
        case (list() | tuple(), list()):
            return len(value) == len(expected) and all(map(same_value, value, expected))
        case (Mapping(), dict()):
            texts = {_key(key): item for key, item in value.items()}
            return texts.keys() == expected.keys() and all(
                same_value(item, expected[key]) for key, item in texts.items()
            )
        case (bool(), _) | (_, bool()):
            return value is expected
        case (int(), int()):
            return value == expected
        case (int() | float(), int() | float()):
            relative = _TOLERANCE if isinstance(expected, float) else 0.0  # a whole number is exact
            try:
                return math.isclose(value, expected, rel_tol=relative, abs_tol=_TOLERANCE)
            except OverflowError:  # a whole number beyond any float
                return False
    return type(value) is type(expected) and bool(value == expected)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(key, default=str)


def same_result(value: Any, expected: Any) -> bool:
    """Compare as `same_value`, and accept the only item of a list: APPS and TACO wrap results so."""
    if same_value(value, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and same_value(value, expected[0])
