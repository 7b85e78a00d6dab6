r"""Symbolic equivalence: `\frac{1}{2}` equals `0.5`, `x^2+2x+1` equals `(x+1)^2`.

Compares relations itself: math-verify compares right sides or solves both, so the question would be its own
answer. Run it in a VerifierPool, as it has no time limit."""

from __future__ import annotations

import logging
import random
import re
from functools import lru_cache

import sympy
from sympy import Basic, Derivative, Expr, Float, MatrixBase, Rational, Symbol
from sympy.core.function import AppliedUndef

from megarl_verifier.answer import (
    Judgement,
    all_boxed,
    ends_in_open_box,
    final_part,
    find_answer,
    last_boxed,
    normalise,
    text_form,
)
from megarl_verifier.notation import (
    is_plausible,
    plain,
    read_notation,
    simple_number,
    without_prose,
)
from megarl_verifier.relations import ParsedAnswer, Relation, format_tuples, read_relations, split
from megarl_verifier.values import (
    Unreadable,
    attempt,
    equal,
    equal_numbers,
    far_points,
    is_undone,
    near_point,
    parse,
    rational,
    symbol_case,
)

# It warns about disabled time limits, which need SIGALRM.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_TAIL = 1000
_FORMULA = r"(?:\$\$?[^$]+\$\$?|\\\([^\n]{1,300}?\\\)|\\\[.{1,300}?\\\])"
_NUMBER = r"(?:(?<![^\s=(])[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+|/[0-9]+)?%?(?![0-9A-Za-z/^_]))"
_JOINED = r"(?:\s*(?:,?\s*(?:and|or)\s|,)\s*)"
_FORMULAS = re.compile(f"{_FORMULA}(?:{_JOINED}{_FORMULA})*", re.DOTALL)
_NUMBERS = re.compile(f"{_NUMBER}(?:{_JOINED}{_NUMBER})*")
# A reference of one letter is a choice.
_CHOICE = re.compile(r"\(?([A-Z])\)?\.?")
_LABELLED = re.compile(
    r"(?i:(?:the\s+)?(?:option|choice|answer)\s+(?:is\s+)?)?(?:\(([A-Z])\)|([A-Z])(?=[).:]|$))[).:]*(?=\s|$)(.*)",
    re.DOTALL,
)
_OTHER_LABEL = re.compile(
    r"\s*(?:[,/&+]|(?i:and|or)\b|\([A-Z]\)|[A-Z]\W*$|.*\s\([A-Z]\)"
    r"|.*(?<![A-Za-z])[A-Z][).:](?:\s|$))",
    re.DOTALL,
)

# After numbers, words and delimited formulas `!` is no factorial.
_EXCLAIMED = re.compile(
    r"(?:.*(?<![\\A-Za-z])[A-Za-z]{2,}\s.*|.*(?<![\\A-Za-z])[A-Za-z]{2,}|(?:.*=)?[-+\s]*[0-9.,/]+\s*%?"
    r"|\([^()]*,[^()]*\)|-?\\[dt]?frac\s*\{\d+\}\s*\{\d+\}|.*\\text\s*\{[^{}]*\}|.*[^A-Za-z0-9)}\]])"
)
_COMMA = re.compile(r",(?!(?<=[0-9],)[0-9]{3}(?![0-9]))|;")
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_POINTS = 5
_DIGITS = 40


def verify_math(response: str, answer: str) -> Judgement:
    """Compare final answers by the rules of docs/verifiers.md."""
    answer = plain(all_boxed(answer) or answer)
    gold = read_relations(answer) if is_plausible(answer) else None
    found = _final_answer(response, answer, is_relation=gold is not None)
    if found is None:
        return Judgement(False)
    if choice := _CHOICE.fullmatch(answer.strip(" $*")):
        label = _find_label(found)
        if label is not None:
            return Judgement(label == choice[1], label)
    found = plain(found)
    mine = read_relations(found) if is_plausible(found) else None
    if mine is not None and _contradicts_itself(mine):
        return Judgement(text_form(answer) == text_form(found) != "", _vote_text(found))
    if gold is not None and mine is not None:
        correct = _same_answer(gold, mine) or (
            mine.value is not None and not gold.values and _matches_values(gold, mine.value)
        )
    elif gold is not None:
        correct = _matches_values(gold, found)
    else:
        correct = _equal(answer, (mine.last if mine else None) or found)
    value = (mine.value if gold else mine.last) if mine else None
    return Judgement(correct or text_form(answer) == text_form(found) != "", _vote_text(value or found))


def _contradicts_itself(answer: ParsedAnswer) -> bool:
    """Return whether a chain has different values: `x = 5 = 4`."""
    for first, *others in filter(None, answer.constants):
        for other in others:
            if _is_readable(first) and _is_readable(other) and not _equal(first, other):
                return True
    return False


def _is_readable(text: str) -> bool:
    formula = read_notation(text).formula
    return formula != "" and _parse(formula) is not None


def _final_answer(response: str, answer: str, *, is_relation: bool) -> str | None:
    """Return None if it is absent or cut off."""
    text = final_part(response)
    _, tag, tagged = text.rpartition("<answer>")
    tagged, end, after = tagged.partition("</answer>")
    if tag and not end:
        return None
    if tag and find_answer(after) is None:
        text = tagged
    if line := find_answer(text):
        if ends_in_open_box(line):
            return None
        return all_boxed(line) or _without_exclamation(line, answer)
    if ends_in_open_box(text):
        return None
    if (boxed := last_boxed(text)) is not None:
        return boxed
    if tag and text is tagged:
        return tagged.strip()
    # Of a relation, a number could be one side.
    patterns = (_FORMULAS,) if is_relation else (_FORMULAS, _NUMBERS)
    tail = text[-_TAIL:].replace("\\$", "")
    return next((last for one in patterns for last in [one.findall(tail)[-1:]] if last), [None])[0]


def _find_label(found: str) -> str | None:
    text = plain(found)
    for macro in ("\\textbf", "\\text", "\\mathrm", "\\mathbf"):
        text = text.replace(macro, "")
    text = re.sub(r"\\[ ,;]|\\q?quad|~|[{}$*_`]", " ", text)
    labelled = _LABELLED.fullmatch(re.sub(r"\s+(?=[).:])", "", text).strip())
    return None if labelled is None or _OTHER_LABEL.match(labelled[3]) else labelled[1] or labelled[2]


def _without_exclamation(line: str, answer: str) -> str:
    text, ends = line.rstrip("!. "), line.rstrip(". ").endswith("!")
    return text if ends and _EXCLAIMED.fullmatch(text) and text_form(line) != text_form(answer) else line


def _vote_text(found: str) -> str | None:
    if number := simple_number(found):
        return str(number[0])
    formula = read_notation(without_prose(found)).formula
    parsed = _parse(formula) if formula else None
    return (None if parsed is None else _canonical_text(parsed)) or text_form(found) or None


def _canonical_text(parsed: Basic | MatrixBase) -> str | None:
    """Format the value for votes."""
    exact = attempt(rational, parsed)
    text = attempt(str, parsed if exact is None else exact)
    return None if text is None else normalise(text)


def _equal(answer: str, found: str) -> bool:
    numbers = simple_number(answer), simple_number(found)
    if numbers[0] and numbers[1]:
        # The parser is much slower.
        return equal_numbers(*numbers[0], *numbers[1])
    gold, mine = read_notation(answer), read_notation(without_prose(found))
    if mine.text != "" and gold.text in (mine.text, text_form(found)):
        return True
    if not gold.formula or not mine.formula or gold.has_other_words(mine) or (gold.is_word and mine.is_word):
        return False
    if _equal_formulas(gold.formula, mine.formula):
        return True
    # 50% is 50, and it is 0.5.
    pair = [
        f"\\frac{{{one.formula}}}{{100}}" if one.percent and not other.percent else one.formula
        for one, other in ((gold, mine), (mine, gold))
    ]
    return gold.percent != mine.percent and _equal_formulas(*pair)


def _equal_formulas(gold: str, mine: str) -> bool:
    pair = _parse(gold), _parse(mine)
    if pair[0] is None or pair[1] is None:
        return False
    for text, value, other in ((gold, *pair), (mine, *pair[::-1])):
        # The parser reads `1, 2` as a set, and pairs as open intervals.
        is_set = isinstance(value, sympy.FiniteSet) and text.startswith(("\\{", "{", "\\lbrace"))
        if is_set and isinstance(other, sympy.Tuple | sympy.Interval):
            return False
    return bool(attempt(equal, *pair))


@lru_cache(maxsize=1024)
def _parse(formula: str) -> Basic | MatrixBase | None:
    """Parse; None if a part is unreadable. Callers must not change the cached value."""
    try:
        return parse(formula)
    except Unreadable:
        return None


def _matches_values(gold: ParsedAnswer, found: str) -> bool:
    """Return whether `found` is the reference's values, in order and without names."""
    if gold.relations:
        # An interval can answer an inequality; a side cannot answer an equation.
        inequalities = all(one.operator in ("<", "<=", ">", ">=") for one in gold.relations)
        return inequalities and not gold.values and _equal(gold.text, found)
    if gold.value is not None:
        return _equal(gold.value, found)
    rows = gold.rows
    if len(rows) > 1:  # p = 5, q = 2; p = 7, q = 2
        return _equal(format_tuples(rows), found)
    found = found.replace("\\left", "").replace("\\right", "").strip("$ ")
    bracketed = found.startswith("(") and found.endswith(")") and found.count("(") == 1
    mine = split(found[1:-1] if bracketed else found, _COMMA)
    return bool(rows) and len(mine) == len(rows[0]) and all(map(_equal, rows[0], mine))


def _same_answer(gold: ParsedAnswer, mine: ParsedAnswer) -> bool:
    named_otherwise = gold.words | mine.words or "=" in (*gold.values, *mine.values)
    if gold.value is not None and mine.value is not None and named_otherwise:
        return _equal(gold.value, mine.value)
    theirs, ours = list(gold.relations), list(mine.relations)
    if len(gold.rows) > 1 and len(gold.values) > 1:
        columns = ([one.values.get(name, ()) for name in gold.values] for one in (gold, mine))
        rows = [format_tuples(zip(*columns_of_one, strict=False)) for columns_of_one in columns]
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
    """Compare left minus right, up to a constant; a negative one mirrors the operator.

    An unsolved answer to a solved reference is wrong, as it could be the question."""
    if gold.solved and not mine.solved:
        return False
    ratio = attempt(_find_ratio, gold, mine)
    if ratio is None:
        forms = [(one.operator, text_form(one.left), text_form(one.right)) for one in (gold, mine)]
        return forms[0] == forms[1]
    return mine.operator == (_MIRRORED.get(gold.operator) if ratio < 0 else gold.operator)


@lru_cache(maxsize=1024)
def _subtract_sides(relation: Relation) -> Expr | None:
    """Return left minus right (of an equation, the numerator), f(x) and derivatives as symbols.

    None for matrices, integrals, sums, products, limits and unreadable sides."""
    sides = []
    for text in (relation.left, relation.right):
        formula = read_notation(text, inside=True).formula
        parsed = _parse(formula) if formula else None
        if not isinstance(parsed, Expr) or parsed.has(sympy.MatrixBase, sympy.MatrixExpr):
            return None
        sides.append(parsed)
    expression = sides[0] - sides[1]
    for atom in expression.atoms(AppliedUndef, Derivative):
        expression = expression.xreplace({atom: Symbol(str(atom))})
    if is_undone(expression):
        return None
    expression = expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)})
    return sympy.fraction(sympy.together(expression))[0] if relation.operator in ("=", "!=") else expression


def _find_ratio(gold: Relation, mine: Relation) -> Expr | None:
    """Return the ratio of the differences if it is real, not 0, and equal at random points."""
    a, b = _subtract_sides(gold), _subtract_sides(mine)
    if a is None or b is None:
        return None
    draw = random.Random(0)
    case = symbol_case(a, b)
    names = sorted({case(symbol.name) for one in (a, b) for symbol in one.free_symbols})
    first = None
    points = [near_point(names, draw, _DIGITS) for _ in range(_POINTS)]
    for point in [*points, *(far_points(names, draw, _DIGITS, (a, b)) if names else ())]:
        below, above = (
            one.evalf(_DIGITS, subs={symbol: point[case(symbol.name)] for symbol in one.free_symbols})
            for one in (a, b)
        )
        if not (below.is_number and above.is_number) or abs(below) < 1e-20 or abs(above) < 1e-20:
            return None
        ratio = above / below
        first = ratio if first is None else first
        if not abs(ratio / first - 1) < 10.0 ** (15 - _DIGITS):
            return None
    return first if first is not None and first.is_real else None
