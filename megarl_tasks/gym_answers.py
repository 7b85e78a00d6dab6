"""Grammars for tasks of reasoning-gym whose scorers run answers as code or accept wrong ones.

A scorer gets the correct answer unchanged, any other answer as its grammar returns it, or UNREADABLE."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

UNREADABLE = ""  # neither Python, formula nor number; falsy
_MAX_DIGITS = 500  # of an expression's value
_HIGHEST_POWER = 100
_TOLERANCE = 1e-4  # of the scorer of probabilities, absolute
_FUNCTIONS: tuple[str, ...] = ("exp", "log", "ln", "sqrt", "Abs", "sin", "cos", "tan", "sec", "csc", "cot")
_FUNCTIONS += ("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh")
_CONSTANTS = ("E", "pi")
_NUMBER = re.compile(r"[+-]?\d{1,50}(\.\d{0,50})?([eE][+-]?\d{1,3})?|[+-]?\d{1,50}/\d{1,50}", re.ASCII)
_ORDINARY = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.BoolOp, ast.boolop, ast.Compare),
    *(ast.cmpop, ast.Constant, ast.Name, ast.expr_context, ast.List, ast.Tuple, ast.Set, ast.Dict),
)


class Refused(Exception):
    """The answer does not match its task's grammar."""


def restrict_answer(task: str, answer: str, entry: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the scorer's input, and the kind of code in the answer, if any."""
    if task not in GRAMMARS or answer == entry["answer"]:
        return answer, None
    if len(answer) > 4 * len(str(entry["answer"])) + 1000:
        return UNREADABLE, None
    try:
        return GRAMMARS[task](answer, entry), None
    except (Refused, SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
        return UNREADABLE, _find_code(answer)


def _find_code(answer: str) -> str | None:
    """Return the first Python construct beyond arithmetic and lists."""
    try:
        tree = ast.parse(answer, mode="eval")
        code_node = next((node for node in ast.walk(tree) if not isinstance(node, _ORDINARY)), None)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return None if code_node is None else type(code_node).__name__


def _plain_list(answer: str, entry: Mapping[str, Any]) -> str:
    """Accept nested lists of integers and strings, and correct answers verbatim."""
    if answer in entry["metadata"].get("valid_answers", [entry["answer"].strip()]):
        return answer

    def is_plain(value: Any) -> bool:
        return type(value) in (int, str) or (type(value) in (list, tuple) and all(map(is_plain, value)))

    value = ast.literal_eval(answer)
    if not is_plain(value):
        raise Refused
    return repr(value)


def _expression(answer: str, entry: Mapping[str, Any]) -> str:
    """Accept sums, products and powers of numbers, symbols and elementary functions.

    Numbers are bounded, and symbols must not be names in Python or sympy."""
    import sympy

    def is_symbol(name: str) -> bool:
        is_variable = name == entry["metadata"].get("variable") or name == "C"
        return is_variable or name in _CONSTANTS or not (hasattr(sympy, name) or hasattr(builtins, name))

    def count_digits(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as value) if type(value) is not bool:
                if value - value != 0:
                    raise Refused
                return len(repr(value))
            case ast.Name(id=name) if name.isascii() and not name.startswith("_") and is_symbol(name):
                return 1
            case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
                return count_digits(operand)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
                return check_bound(count_digits(left) + count_digits(right))
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return check_bound(count_digits(left) * max(1, bound_exponent(right)))
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
                return check_bound(count_digits(argument) + 1)
            case ast.Call(func=ast.Name(id="log"), args=[argument, base], keywords=[]):
                return check_bound(count_digits(argument) + count_digits(base))
        raise Refused

    def check_bound(value: float) -> float:
        if value > _MAX_DIGITS:
            raise Refused
        return value

    def bound_exponent(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as value) if type(value) is not bool:
                exponent = abs(Fraction(value)) if value - value == 0 else Fraction(_HIGHEST_POWER + 1)
            case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
                return bound_exponent(operand)
            case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int() as value)) if value:
                exponent = Fraction(bound_exponent(left)) / value
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                exponent = Fraction(bound_exponent(left) + bound_exponent(right))
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                exponent = Fraction(bound_exponent(left) * bound_exponent(right))
            case ast.Name(id=name) if name.isascii() and not name.startswith("_") and is_symbol(name):
                exponent = Fraction(1)
            case _:
                raise Refused
        if exponent > _HIGHEST_POWER:
            raise Refused
        return float(exponent)

    if not answer.isascii():
        raise Refused
    tree = ast.parse(answer, mode="eval")
    count_digits(tree.body)
    return ast.unparse(tree)


def _arithmetic(answer: str, entry: Mapping[str, Any]) -> str:
    """Accept arithmetic on integers only.

    Symbols are refused, because y - y would be a 0 made without any given number."""

    def check(node: ast.AST) -> None:
        match node:
            case ast.Constant(value=int() as value) if type(value) is not bool:
                return
            case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
                return check(operand)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
                check(left)
                return check(right)
        raise Refused

    check(ast.parse(answer.strip(), mode="eval").body)
    return _expression(answer, entry)


def _puzzle24(answer: str, entry: Mapping[str, Any]) -> str:
    """Accept arithmetic that uses each given number once. The scorer checks only their count and range."""
    text = _arithmetic(answer, entry)
    if sorted(map(int, re.findall(r"\d+", text))) != sorted(entry["metadata"]["numbers"]):
        raise Refused
    return text


def _probability(answer: str, entry: Mapping[str, Any]) -> str:
    """Accept a decimal number or fraction, ignoring commas.

    The scorer accepts a prefix of the correct number, such as 0: refuse wrong answers that are shorter. It
    also accepts 0 for values below its tolerance: refuse answers that are wrong by more than 1 %."""
    if not _NUMBER.fullmatch(number_text := answer.replace(",", "")):
        raise Refused
    value, correct_value = float(Fraction(number_text)), float(Fraction(entry["answer"].replace(",", "")))
    error = abs(value - correct_value)
    if error > _TOLERANCE and len(f"{value:.10g}") < len(f"{correct_value:.10g}"):
        raise Refused
    if error > correct_value / 100 and error <= _TOLERANCE:
        raise Refused
    return answer


def _finite(answer: str, entry: Mapping[str, Any]) -> str:
    """Refuse NaN and infinity: a distance of NaN passes the scorer's comparisons."""
    if re.search("nan|inf", answer, re.IGNORECASE):
        raise Refused
    return answer


def _same_word(answer: str, entry: Mapping[str, Any]) -> str:
    """Accept only the correct word; the scorer accepts any."""
    if answer.strip().lower() != entry["answer"].strip().lower():
        raise Refused
    return str(entry["answer"])


# For reasoning-gym 0.1.25. tests/security/test_policy_text.py fails if a scorer is missing here.
GRAMMARS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "binary_matrix": _plain_list,
    "n_queens": _plain_list,
    "spiral_matrix": _plain_list,
    "string_insertion": _plain_list,
    "countdown": _arithmetic,
    "puzzle24": _puzzle24,
    "polynomial_multiplication": _expression,
    "simple_integration": _expression,
    "intermediate_integration": _expression,
    "coin_flip": _probability,
    "complex_arithmetic": _finite,
    "number_sorting": _finite,
    "game_of_life_halting": _same_word,
}
