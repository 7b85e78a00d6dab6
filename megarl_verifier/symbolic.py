r"""Symbolic equivalence: `\frac{1}{2}` equals `0.5`, `x^2+2x+1` equals `(x+1)^2`.

math-verify compares right sides, or solves both relations, so it would accept the question as an answer. This
module compares the relations themselves. It has no time limit, so run it in a VerifierPool."""

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
    final_answer = _final_answer(response, answer, is_relation=gold is not None)
    if final_answer is None:
        return Judgement(False)
    if choice := _CHOICE.fullmatch(answer.strip(" $*")):
        label = _find_label(final_answer)
        if label is not None:
            return Judgement(label == choice[1], label)
    final_answer = plain(final_answer)
    prediction = read_relations(final_answer) if is_plausible(final_answer) else None
    if prediction is not None and _contradicts_itself(prediction):
        return Judgement(text_form(answer) == text_form(final_answer) != "", _vote_text(final_answer))
    if gold is not None and prediction is not None:
        correct = _same_answer(gold, prediction) or (
            prediction.value is not None and not gold.values and _matches_values(gold, prediction.value)
        )
    elif gold is not None:
        correct = _matches_values(gold, final_answer)
    else:
        correct = _equal(answer, (prediction.last if prediction else None) or final_answer)
    value = (prediction.value if gold else prediction.last) if prediction else None
    return Judgement(
        correct or text_form(answer) == text_form(final_answer) != "", _vote_text(value or final_answer)
    )


def _contradicts_itself(answer: ParsedAnswer) -> bool:
    """Return whether a chain has different values: `x = 5 = 4`."""
    for first_side, *other_sides in filter(None, answer.constants):
        for side in other_sides:
            if _is_readable(first_side) and _is_readable(side) and not _equal(first_side, side):
                return True
    return False


def _is_readable(text: str) -> bool:
    formula = read_notation(text).formula
    return formula != "" and _parse(formula) is not None


def _final_answer(response: str, answer: str, *, is_relation: bool) -> str | None:
    """Return None if it is absent or cut off."""
    text = final_part(response)
    _, tag, tag_content = text.rpartition("<answer>")
    tag_content, end_tag, text_after = tag_content.partition("</answer>")
    if tag and not end_tag:
        return None
    if tag and find_answer(text_after) is None:
        text = tag_content
    if line := find_answer(text):
        if ends_in_open_box(line):
            return None
        return all_boxed(line) or _without_exclamation(line, answer)
    if ends_in_open_box(text):
        return None
    if (boxed := last_boxed(text)) is not None:
        return boxed
    if tag and text is tag_content:
        return tag_content.strip()
    # If the reference is a relation, a number could be one of its sides, so only formulas count.
    patterns = (_FORMULAS,) if is_relation else (_FORMULAS, _NUMBERS)
    tail = text[-_TAIL:].replace("\\$", "")
    return next(
        (last_match for pattern in patterns for last_match in [pattern.findall(tail)[-1:]] if last_match),
        [None],
    )[0]


def _find_label(found: str) -> str | None:
    text = plain(found)
    for macro in ("\\textbf", "\\text", "\\mathrm", "\\mathbf"):
        text = text.replace(macro, "")
    text = re.sub(r"\\[ ,;]|\\q?quad|~|[{}$*_`]", " ", text)
    labelled = _LABELLED.fullmatch(re.sub(r"\s+(?=[).:])", "", text).strip())
    return None if labelled is None or _OTHER_LABEL.match(labelled[3]) else labelled[1] or labelled[2]


def _without_exclamation(line: str, answer: str) -> str:
    text, is_exclaimed = line.rstrip("!. "), line.rstrip(". ").endswith("!")
    return (
        text if is_exclaimed and _EXCLAIMED.fullmatch(text) and text_form(line) != text_form(answer) else line
    )


def _vote_text(found: str) -> str | None:
    if number := simple_number(found):
        return str(number[0])
    formula = read_notation(without_prose(found)).formula
    parsed = _parse(formula) if formula else None
    return (None if parsed is None else _canonical_text(parsed)) or text_form(found) or None


def _canonical_text(parsed: Basic | MatrixBase) -> str | None:
    """Format the value for votes."""
    rational_value = attempt(rational, parsed)
    text = attempt(str, parsed if rational_value is None else rational_value)
    return None if text is None else normalise(text)


def _equal(answer: str, found: str) -> bool:
    numbers = simple_number(answer), simple_number(found)
    if numbers[0] and numbers[1]:
        # The parser is much slower.
        return equal_numbers(*numbers[0], *numbers[1])
    gold, prediction = read_notation(answer), read_notation(without_prose(found))
    if prediction.text != "" and gold.text in (prediction.text, text_form(found)):
        return True
    if (
        not gold.formula
        or not prediction.formula
        or gold.has_other_words(prediction)
        or (gold.is_word and prediction.is_word)
    ):
        return False
    if _equal_formulas(gold.formula, prediction.formula):
        return True
    # 50% is 50, and it is 0.5.
    formulas = [
        f"\\frac{{{notation.formula}}}{{100}}"
        if notation.percent and not other_notation.percent
        else notation.formula
        for notation, other_notation in ((gold, prediction), (prediction, gold))
    ]
    return gold.percent != prediction.percent and _equal_formulas(*formulas)


def _equal_formulas(gold: str, mine: str) -> bool:
    values = _parse(gold), _parse(mine)
    if values[0] is None or values[1] is None:
        return False
    for formula, value, other_value in ((gold, *values), (mine, *values[::-1])):
        # The parser reads `1, 2` as a set, and pairs as open intervals.
        is_set = isinstance(value, sympy.FiniteSet) and formula.startswith(("\\{", "{", "\\lbrace"))
        if is_set and isinstance(other_value, sympy.Tuple | sympy.Interval):
            return False
    return bool(attempt(equal, *values))


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
        inequalities = all(relation.operator in ("<", "<=", ">", ">=") for relation in gold.relations)
        return inequalities and not gold.values and _equal(gold.text, found)
    if gold.value is not None:
        return _equal(gold.value, found)
    rows = gold.rows
    if len(rows) > 1:  # p = 5, q = 2; p = 7, q = 2
        return _equal(format_tuples(rows), found)
    found = found.replace("\\left", "").replace("\\right", "").strip("$ ")
    is_bracketed = found.startswith("(") and found.endswith(")") and found.count("(") == 1
    values = split(found[1:-1] if is_bracketed else found, _COMMA)
    return bool(rows) and len(values) == len(rows[0]) and all(map(_equal, rows[0], values))


def _same_answer(gold: ParsedAnswer, mine: ParsedAnswer) -> bool:
    # Words such as Area match any name. The name "=" stands for none, as in `2 + 2 = 4`.
    names_may_differ = gold.words | mine.words or "=" in (*gold.values, *mine.values)
    if gold.value is not None and mine.value is not None and names_may_differ:
        return _equal(gold.value, mine.value)
    gold_relations, predicted_relations = list(gold.relations), list(mine.relations)
    if len(gold.rows) > 1 and len(gold.values) > 1:
        columns = ([one.values.get(name, ()) for name in gold.values] for one in (gold, mine))
        rows = [format_tuples(zip(*answer_columns, strict=False)) for answer_columns in columns]
        if len(mine.values) != len(gold.values) or len(mine.rows) != len(gold.rows) or not _equal(*rows):
            return False
    for name in dict.fromkeys((*gold.values, *mine.values)):
        gold_values, predicted_values = gold.values.get(name, ()), mine.values.get(name, ())
        if not (
            gold_values and predicted_values and _equal(", ".join(gold_values), ", ".join(predicted_values))
        ):
            gold_relations += [Relation(name, "=", value) for value in gold_values]
            predicted_relations += [Relation(name, "=", value) for value in predicted_values]
    if len(gold_relations) != len(predicted_relations):
        return False
    for relation in gold_relations:
        match = next((one for one in predicted_relations if _same_relation(relation, one)), None)
        if match is None:
            return False
        predicted_relations.remove(match)
    return True


def _same_relation(gold: Relation, mine: Relation) -> bool:
    """Compare left minus right, up to a constant factor. A negative factor mirrors the operator.

    An unsolved answer to a solved reference is wrong, as it could be the question."""
    if gold.solved and not mine.solved:
        return False
    ratio = attempt(_find_ratio, gold, mine)
    if ratio is None:
        forms = [
            (relation.operator, text_form(relation.left), text_form(relation.right))
            for relation in (gold, mine)
        ]
        return forms[0] == forms[1]
    return mine.operator == (_MIRRORED.get(gold.operator) if ratio < 0 else gold.operator)


@lru_cache(maxsize=1024)
def _subtract_sides(relation: Relation) -> Expr | None:
    """Return left minus right, with symbols for f(x) and derivatives; of an equation, only the numerator.

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
    rng = random.Random(0)
    fold_case = symbol_case(a, b)
    names = sorted({fold_case(symbol.name) for expression in (a, b) for symbol in expression.free_symbols})
    first_ratio = None
    points = [near_point(names, rng, _DIGITS) for _ in range(_POINTS)]
    for point in [*points, *(far_points(names, rng, _DIGITS, (a, b)) if names else ())]:
        denominator, numerator = (
            expression.evalf(
                _DIGITS, subs={symbol: point[fold_case(symbol.name)] for symbol in expression.free_symbols}
            )
            for expression in (a, b)
        )
        if (
            not (denominator.is_number and numerator.is_number)
            or abs(denominator) < 1e-20
            or abs(numerator) < 1e-20
        ):
            return None
        ratio = numerator / denominator
        first_ratio = ratio if first_ratio is None else first_ratio
        if not abs(ratio / first_ratio - 1) < 10.0 ** (15 - _DIGITS):
            return None
    return first_ratio if first_ratio is not None and first_ratio.is_real else None
