"""Symbolic equivalence by math-verify: `\\frac{1}{2}` equals `0.5`, `x^2+2x+1` equals `(x+1)^2`.

To be run in a VerifierPool: neither parsing nor comparison has a limit of its own here, and sympy can hang on hostile input.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, Expr

from megarl.rewards.answer import MAX_ANSWER, find_answer, last_boxed, normalise
from megarl.rewards.verdict import Verdict

# math-verify warns once per process that its own limits are off; that is on purpose (they need SIGALRM, which the pool uses).
logging.getLogger("math_verify").setLevel(logging.ERROR)

_TARGETS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_TAIL = 1000
# The longest answer in MATH has 159 characters.
_MAX_FORMULA = 300
_MAX_DEPTH = 16
_POINT = 0.7310585786300049
_SUPERSCRIPTS = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
_SUPERSCRIPT = re.compile("[" + "".join(map(chr, _SUPERSCRIPTS)) + "]+")
_SYMBOLS = {
    "\u221e": "\\infty ",
    "\u222a": "\\cup ",
    "\u2229": "\\cap ",
    "\u2205": "\\emptyset ",
    "\u00d7": "\\times ",
    "\u00f7": "\\div ",
    "\u2264": "\\le ",
    "\u2265": "\\ge ",
    "\u00b1": "\\pm ",
}
_ROOT = re.compile("\u221a\\s?([0-9]{1,30}|[A-Za-z]|(?=[({]))")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z0-9.])([0-9]{1,30}(?:\.[0-9]{1,30})?)[eE]([+-]?[0-9]{1,3})(?![A-Za-z0-9.])")
_RATIONAL = re.compile(r"-?[0-9]+(?:/0*[1-9][0-9]*)?")


def verify_math(response: str, answer: str) -> Verdict:
    r"""Whether the final answer of `response` is mathematically equal to `answer`.

    The final answer is the last `Answer:` line, else the last `\boxed{}`, else what math-verify finds in the last 1,000
    characters. Answers that no person writes (over 300 characters, brackets 16 deep) are compared as text."""
    line = find_answer(response)
    found = last_boxed(line or response) or line
    answer, found = _plain(answer), found if found is None else _plain(found)
    if found is None:
        candidates = _parse(response[-_TAIL:])
        extracted = _canonical(candidates)
    else:
        extracted, reference = normalise(found), normalise(answer)
        if extracted and extracted == reference:
            return Verdict(True, extracted)
        if _RATIONAL.fullmatch(extracted) and _RATIONAL.fullmatch(reference) and "%" not in found + answer:
            # Most answers are numbers like these, and sympy would take a hundred times as long over them.
            return Verdict(Fraction(extracted) == Fraction(reference), str(Fraction(extracted)))
        candidates = _parse_formula(found) if _is_plausible(found) else []
        extracted = _canonical(candidates) or extracted or None
    if not candidates or not _is_plausible(answer):
        return Verdict(False, extracted)
    gold = _parse_formula(answer)
    if "%" not in (found or response) and _differ_plainly(gold, candidates):
        return Verdict(False, extracted)
    return Verdict(bool(verify(gold, candidates, timeout_seconds=None)), extracted)


def _plain(text: str) -> str:
    """Characters and notations that the parser does not know, as LaTeX: other digits, superscripts, vulgar fractions, 1.5e3."""
    text = text[:MAX_ANSWER]
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda run: f"^{{{run[0].translate(_SUPERSCRIPTS)}}}", text)
        text = _ROOT.sub(lambda root: f"\\sqrt{{{root[1]}}}" if root[1] else "\\sqrt", "".join(map(_ascii, text)))
    return _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", text)


def _ascii(character: str) -> str:
    if character in _SYMBOLS or unicodedata.category(character) == "Cf":  # Cf: joiners, direction marks, the zero-width space
        return _SYMBOLS.get(character, "")
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    above, slash, below = unicodedata.normalize("NFKC", character).partition("\u2044")
    return f"\\frac{{{above}}}{{{below}}}" if slash else character


def _is_plausible(text: str) -> bool:
    """Whether parsing `text` can be afforded: 300 open brackets cost the parser seconds."""
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
def _parse_formula(text: str) -> list:
    """What `text` says, read as one formula; as prose with formulas in it where it has dollar signs of its own.

    Remembered, because all responses of a group have the same reference, and many of them the same answer. The caller must not change
    the list."""
    text = text.replace("**", "^")
    return _parse(text if "$" in text or "\\[" in text or "\\(" in text else f"\\boxed{{{text}}}")


def _differ_plainly(gold: list, candidates: list) -> bool:
    """Whether evaluation, in a tenth of the time that simplifying takes, proves that a number and another expression differ.

    Symbols are given a value: expressions that are equal are so everywhere. Where both have symbols math-verify decides,
    which takes some symbols that are written differently for the same."""
    pair = [parsed[0] for parsed in (gold, candidates) if parsed and isinstance(parsed[0], Expr)]
    if len(pair) < 2 or not any(one.is_number for one in pair):
        return False
    try:
        a, b = (complex(one.subs(dict.fromkeys(one.free_symbols, _POINT)).evalf(15)) for one in pair)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):  # not a number after all
        return False
    # An infinite or undefined value compares as not greater, and is left to math-verify as well.
    return abs(a - b) > 1e-3 * max(1.0, abs(a), abs(b))


def _canonical(parsed: list) -> str | None:
    """One text for votes: sympy prints equal forms alike more often than responses write them alike."""
    if not parsed:
        return None
    first = parsed[0]
    return normalise(str(first)) if isinstance(first, Basic) else normalise(str(parsed[-1]))
