r"""Symbolic equivalence by math-verify: `\frac{1}{2}` equals `0.5`, `x^2+2x+1` equals `(x+1)^2`.

Equations and inequalities are compared here: math-verify compares right sides, or solves both, and then the
question would be an answer to itself. docs/verifiers.md has the rules. To be run in a VerifierPool: neither
parsing nor comparison has a limit of its own here, and sympy can hang on hostile input."""

from __future__ import annotations

import logging
import random
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any, TypeVar

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, Derivative, Expr, Float, Mul, Number, Pow, Rational, Symbol
from sympy.core.function import AppliedUndef

from megarl_verifier.answer import MAX_ANSWER, Judgement, all_boxed, find_answer, last_boxed, normalise
from megarl_verifier.relations import ParsedAnswer, Relation, formulas, read, split, tuples

# math-verify warns once per process that its own limits are off; that is on purpose (they need SIGALRM, which
# the pool uses).
logging.getLogger("math_verify").setLevel(logging.ERROR)

T = TypeVar("T")

_TARGETS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_TAIL = 1000
# The longest answer in MATH has 159 characters.
_MAX_FORMULA = 300
_MAX_DEPTH = 16
_MAX_EXPONENT = 999
_POINT = 0.7310585786300049
_SUPERSCRIPTS = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-"
)
_SUPERSCRIPT = re.compile("[" + "".join(map(chr, _SUPERSCRIPTS)) + "]+")
_COMMANDS = (r"\infty", r"\cup", r"\cap", r"\emptyset", r"\times", r"\div", r"\le", r"\ge", r"\pm")
_SYMBOLS = dict(zip("\u221e\u222a\u2229\u2205\u00d7\u00f7\u2264\u2265\u00b1", _COMMANDS, strict=True))
_ROOT = re.compile("\u221a\\s?([0-9]{1,30}|[A-Za-z]|(?=[({]))")
_SCIENTIFIC = re.compile(
    r"(?<![A-Za-z0-9.])([0-9]{1,30}(?:\.[0-9]{1,30})?)[eE]([+-]?[0-9]{1,3})(?![A-Za-z0-9.])"
)
_RATIONAL = re.compile(r"-?[0-9]+(?:/0*[1-9][0-9]*)?")

# A number, a word, a formula in delimiters: the exclamation mark after it ends a sentence. After another
# formula it is a factorial.
_EXCLAIMED = re.compile(
    r"(?:.*(?<![\\A-Za-z])[A-Za-z]{2,}\s.*|.*(?<![\\A-Za-z])[A-Za-z]{2,}|(?:.*=)?[-+\s]*[0-9.,/]+\s*%?"
    r"|\([^()]*,[^()]*\)|-?\\[dt]?frac\s*\{\d+\}\s*\{\d+\}|.*\\text\s*\{[^{}]*\}|.*[^A-Za-z0-9)}\]])"
)
_SUMMAND = re.compile(r"(?<=[-+*/(])\s+(?=[A-Za-z])")  # in `2 + t` math-verify finds a unit, and leaves `2 +`
_COMMA = re.compile(r",(?!(?<=[0-9],)[0-9]{3}(?![0-9]))|;")
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_UNDONE = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, Derivative)
_POINTS = 5
_DIGITS = 40


def verify_math(response: str, answer: str) -> Judgement:
    r"""Judge whether the final answer of `response` is mathematically equal to `answer`.

    The final answer is the last `Answer:` line, or the boxes in it, else the last `\boxed{}`, else what
    math-verify finds in the last 1,000 characters. Answers that no person writes (over 300 characters,
    brackets 16 deep) are compared as text."""
    line, tail = find_answer(response), response[-_TAIL:].replace("\\$", "")
    answer = _plain(all_boxed(answer) or answer)
    found = (all_boxed(line) or _without_exclamation(line, answer)) if line else last_boxed(response)
    gold = read(answer) if _is_plausible(answer) else None
    if found is None and gold is not None:  # math-verify would find a side of it only
        found = next(iter([*formulas(tail)][::-1]), None)
    if found is None:
        candidates, value = _parse(tail), gold.value if gold else answer
        correct = False
        if value is not None and _is_plausible(value):
            correct = _verify(_parse_formula(value), candidates, "%" in tail)
        return Judgement(correct, _canonical(candidates))
    found = _plain(found)
    mine = read(found) if _is_plausible(found) else None
    if gold is not None and mine is not None:
        correct = _same_answer(gold, mine) or (
            mine.value is not None and not gold.values and _is_value_of(gold, mine.value)
        )
    elif gold is not None:
        correct = _is_value_of(gold, found)
    else:
        correct = _equal(answer, (mine.last if mine else None) or found)
    value = (mine.value if gold else mine.last) if mine else None
    return Judgement(correct or _form(answer) == _form(found) != "", _vote(value or found))


def _without_exclamation(line: str, answer: str) -> str:
    """Return the answer without an exclamation mark that ends a sentence."""
    text, ends = line.rstrip("!. "), line.rstrip(". ").endswith("!")
    return text if ends and _EXCLAIMED.fullmatch(text) and _form(line) != _form(answer) else line


def _form(text: str) -> str:
    return normalise(text, value=True)


def _vote(found: str) -> str | None:
    """Return the text that answers are counted by."""
    form = _form(found)
    if _RATIONAL.fullmatch(form):
        return str(Fraction(form))
    return (_canonical(_parse_formula(found, prose=True)) if _is_plausible(found) else None) or form or None


def _equal(answer: str, found: str) -> bool:
    """Return whether two values are equal: as text, as fractions, else as math-verify finds."""
    extracted, reference = _form(found), _form(answer)
    if extracted and extracted == reference:
        return True
    percent = "%" in found + answer
    if _RATIONAL.fullmatch(extracted) and _RATIONAL.fullmatch(reference) and not percent:
        # Most answers are numbers like these, and sympy would take a hundred times as long over them.
        return Fraction(extracted) == Fraction(reference)
    if not _is_plausible(found) or not _is_plausible(answer):
        return False
    return _verify(_parse_formula(answer), _parse_formula(found, prose=True), percent)


def _verify(gold: list, candidates: list, percent: bool) -> bool:
    """Return whether math-verify finds one of the candidates equal to the reference.

    The question is no answer to itself: an integral is none where its value is the reference."""
    undone = [any(isinstance(x, Basic) and x.has(*_UNDONE) for x in parsed) for parsed in (candidates, gold)]
    if not candidates or undone == [True, False]:
        return False
    plainly = None if percent else _attempt(_equal_plainly, gold, candidates)
    return bool(verify(gold, candidates, timeout_seconds=None)) if plainly is None else plainly


def _is_value_of(gold: ParsedAnswer, found: str) -> bool:
    """Return whether `found`, which names nothing, is the value of the reference's name, or the values of its
    names in their order."""
    if gold.relations:
        # An interval is an answer to an inequality; the right side of an equation is none to the equation.
        inequalities = all(one.operator in ("<", "<=", ">", ">=") for one in gold.relations)
        return inequalities and not gold.values and _equal(gold.text, found)
    if gold.value is not None:
        return _equal(gold.value, found)
    rows = gold.rows
    if len(rows) > 1:  # p = 5, q = 2; p = 7, q = 2
        return _equal(tuples(rows), found)
    found = found.replace("\\left", "").replace("\\right", "").strip("$ ")
    bracketed = found.startswith("(") and found.endswith(")") and found.count("(") == 1
    mine = split(found[1:-1] if bracketed else found, _COMMA)
    return bool(rows) and len(mine) == len(rows[0]) and all(map(_equal, rows[0], mine))


def _same_answer(gold: ParsedAnswer, mine: ParsedAnswer) -> bool:
    """Return whether names have equal values and the other relations of both have the same solutions, one by
    one."""
    named_otherwise = gold.words | mine.words or "=" in (*gold.values, *mine.values)
    if gold.value is not None and mine.value is not None and named_otherwise:
        return _equal(gold.value, mine.value)
    theirs, ours = list(gold.relations), list(mine.relations)
    if len(gold.rows) > 1 and len(gold.values) > 1:  # which value of one name goes with which of another
        columns = ([said.values.get(name, ()) for name in gold.values] for said in (gold, mine))
        rows = [tuples(zip(*columns_of_one, strict=False)) for columns_of_one in columns]
        if len(mine.values) != len(gold.values) or len(mine.rows) != len(gold.rows) or not _equal(*rows):
            return False
    for name in dict.fromkeys((*gold.values, *mine.values)):
        wanted, given = gold.values.get(name, ()), mine.values.get(name, ())
        if not (wanted and given and _equal(", ".join(wanted), ", ".join(given))):
            theirs += [Relation(name, "=", value) for value in wanted]
            ours += [Relation(name, "=", value) for value in given]
    if len(theirs) != len(ours):
        return False
    for relation in theirs:
        match = next((one for one in ours if _same_relation(relation, one)), None)
        if match is None:
            return False
        ours.remove(match)
    return True


def _same_relation(gold: Relation, mine: Relation) -> bool:
    """Return whether left minus right of one is a multiple of the other's, by a positive factor unless the
    relation is to be turned.

    Where the reference is solved, an answer that is not is wrong: it may be the question itself."""
    if gold.solved and not mine.solved:
        return False
    ratio = _attempt(_ratio, gold, mine)
    if ratio is None:
        forms = [(one.operator, _form(one.left), _form(one.right)) for one in (gold, mine)]
        return forms[0] == forms[1]
    return mine.operator == (_MIRRORED.get(gold.operator) if ratio < 0 else gold.operator)


@lru_cache(maxsize=1024)
def _difference(relation: Relation) -> Expr | None:
    """Return left minus right, of an equation the numerator; None if a side is no number. Decimals become
    exact; f(x) and derivatives become symbols."""
    sides = []
    for text in (relation.left, relation.right):
        # Without brackets math-verify takes the c of \sqrt{2}c for a unit.
        parsed = _parse_formula(f"({text})")
        if not parsed or not isinstance(parsed[0], Expr) or parsed[0].has(sympy.MatrixBase, sympy.MatrixExpr):
            return None
        sides.append(parsed[0])
    expression = sides[0] - sides[1]
    for atom in expression.atoms(AppliedUndef, Derivative):
        expression = expression.xreplace({atom: Symbol(str(atom))})
    expression = expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)})
    return sympy.fraction(sympy.together(expression))[0] if relation.operator in ("=", "!=") else expression


def _ratio(gold: Relation, mine: Relation) -> Expr | None:
    """Return the difference of `mine` over that of `gold` where it is the same nonzero real number at random
    points, else None. (A polynomial that is zero at random points is zero.)"""
    a, b = _difference(gold), _difference(mine)
    if a is None or b is None:
        return None
    draw = random.Random(0)
    names = sorted({symbol.name for one in (a, b) for symbol in one.free_symbols})
    first = None
    for _ in range(_POINTS):
        # Of both signs, so that |x| is not x.
        point = {name: Float(draw.uniform(0.2, 3.0) * draw.choice((-1, 1)), _DIGITS) for name in names}
        below, above = (
            one.evalf(_DIGITS, subs={symbol: point[symbol.name] for symbol in one.free_symbols})
            for one in (a, b)
        )
        if not (below.is_number and above.is_number) or abs(below) < 1e-20 or abs(above) < 1e-20:
            return None
        ratio = above / below
        first = ratio if first is None else first
        if not abs(ratio / first - 1) < 10.0 ** (15 - _DIGITS):
            return None
    return first if first is not None and first.is_real else None


def _plain(text: str) -> str:
    """Write characters and notations that the parser does not know as LaTeX: other digits, superscripts,
    vulgar fractions, 1.5e3."""
    text = text[:MAX_ANSWER].replace("\\$", "")
    text = text.replace("$", "") if text.count("$") == 1 else text  # a price
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda run: f"^{{{run[0].translate(_SUPERSCRIPTS)}}}", text)
        text = _ROOT.sub(
            lambda root: f"\\sqrt{{{root[1]}}}" if root[1] else "\\sqrt", "".join(map(_ascii, text))
        )
    return _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", text)


def _ascii(character: str) -> str:
    category = unicodedata.category(character)
    if character in _SYMBOLS or category == "Cf":  # joiners, direction marks, the zero-width space
        return f"{_SYMBOLS[character]} " if character in _SYMBOLS else ""
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    above, slash, below = unicodedata.normalize("NFKC", character).partition("\u2044")
    return f"\\frac{{{above}}}{{{below}}}" if slash else character


def _is_plausible(text: str) -> bool:
    """Return whether parsing `text` can be afforded: 300 open brackets cost the parser seconds."""
    if len(text) > _MAX_FORMULA:
        return False
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest <= _MAX_DEPTH


def _parse(text: str) -> list:
    return parse(text, _TARGETS, parsing_timeout=None)


@lru_cache(maxsize=1024)
def _parse_formula(text: str, *, prose: bool = False) -> list:
    r"""Parse `text` as one formula, or as prose with formulas in it where it has dollar signs of its own.

    prose: of a text that is no formula take any number in it (3 of `\{x | x > 3\}`).
    Cached, as a group has one reference and often one answer: the caller must not change the list."""
    text = _SUMMAND.sub("", text.replace("**", "^"))
    if "$" in text or "\\[" in text or "\\(" in text:
        return _parse(text)
    return parse(f"\\boxed{{{text}}}", _TARGETS if prose else _TARGETS[:1], parsing_timeout=None)


def _equal_plainly(gold: list, candidates: list) -> bool | None:
    r"""Return what evaluation proves, in a tenth of the time of simplification; None where it proves nothing.

    Numbers such as 27/500 and `5.4 \times 10^{-2}` are equal or differ in their first three digits, however
    small they are: math-verify rounds to six decimals. A number and another expression differ if they do so
    for any value of their symbols. Where both have symbols math-verify decides, which takes some symbols that
    are written differently for the same."""
    pair = [parsed[0] for parsed in (gold, candidates) if parsed and isinstance(parsed[0], Expr)]
    if len(pair) < 2 or not any(one.is_number for one in pair):
        return None
    p, q = map(_rational, pair)
    if p is not None and q is not None:
        if p == q:
            return True
        return False if abs(p - q) > max(abs(p), abs(q)) / 1000 else None
    a, b = (complex(one.subs(dict.fromkeys(one.free_symbols, _POINT)).evalf(15)) for one in pair)
    # An infinite or undefined value compares as not greater, and is left to math-verify as well.
    return False if abs(a - b) > 1e-3 * max(1.0, abs(a), abs(b)) else None


def _rational(number: Basic) -> Rational | None:
    """Return the value of a number, a fraction or a number in scientific notation, its decimals exact."""
    if isinstance(number, Pow) and number.exp.is_Integer and abs(number.exp) <= _MAX_EXPONENT:
        base = _rational(number.base) if isinstance(number.base, Number) else None
        return None if base is None else base**number.exp
    if isinstance(number, Mul):
        factors = [value for factor in number.args if (value := _rational(factor)) is not None]
        return prod(factors, start=Rational(1)) if len(factors) == len(number.args) else None
    return Rational(str(number)) if isinstance(number, Float | Rational) else None


def _canonical(parsed: list) -> str | None:
    """Return one text for votes: sympy prints equal forms alike more often than responses write them
    alike."""
    if not parsed:
        return None
    first, exact = parsed[0], _attempt(_rational, parsed[0])
    text = _attempt(str, exact if exact is not None else first if isinstance(first, Basic) else parsed[-1])
    return None if text is None else normalise(text)


def _attempt(function: Callable[..., T], *arguments: Any) -> T | None:
    """Return what `function` gives, or None where sympy fails in it: with RecursionError for a number and a
    matrix, ValueError for long integers, NotImplementedError, AttributeError."""
    try:
        return function(*arguments)
    except MemoryError:  # the pool's limit: recorded as such
        raise
    except Exception:  # noqa: BLE001
        return None
