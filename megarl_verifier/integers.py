"""Turn answers into integers, as in DAPO's appendix, so that a plain rule can verify them.

For 11 - 2 sqrt 6 the question asks for k + m + n of the form k - m sqrt n. Callers check the form by the
symbolic verifier, which has another parser."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import sympy
from sympy import E, Expr, I, Integer, Rational, pi

from megarl_verifier.answer import last_boxed
from megarl_verifier.relations import find_formulas

SEVERAL = "several values"
RELATION = "an equation or inequality"
LETTERS = "letters in it"
TEXT = "a text"
MATRIX = "a matrix or vector"
UNDEFINED = "undefined or infinite"
FUNCTION = "a function of numbers"
ROUNDED = "a decimal that may be rounded"
LARGE = "an integer of more than 15 digits"
NOTHING = "no integer in its form"
AMBIGUOUS = "an ambiguous notation"
UNREAD = "not read as a number"

_LIMIT = 10**15
_BITS, _ROOT_BITS = 4096, 100  # of an intermediate number, of a radicand
_DEGREE = 20  # of a root
_TERMS = 256  # of an intermediate sum
_MAX_LENGTH = 300  # as in the verifier
_MAX_DEPTH = 16  # nested brackets
_PLACES = 6  # longer decimals count as rounded

_UNICODE = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013", "-"),
        "\u00d7": "\\times ",
        "\u00b7": "\\cdot ",
        "\u03c0": "\\pi ",
        "\u00b0": "^\\circ",
        "\u00b1": "\\pm ",
        "\u221e": "\\infty ",
    }
)
_ROOT = re.compile(r"(?:\u221a|\\?sqrt)\s?\(([^()]*)\)|\u221a\s?([0-9]+)")
_PLAIN_NAME = re.compile(r"(?<![A-Za-z\\])(?=(?:sqrt|pi)(?![A-Za-z]))")
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|textstyle)(?![A-Za-z])|\\[()\[\]!,]|(?<!\\)\$")
_SPACE = re.compile(r"\\[;: ]|\\q?quad(?![A-Za-z])|~")
_GROUPED = re.compile(r"(?<![0-9(\[.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_INTEGER = re.compile(r"[+-]?\s?[0-9]+(?:\.0*)?")
_NAME = re.compile(r"[A-Za-z]\s*=\s*")
_CURRENCY = re.compile("(-?)\\s*((?:\\\\\\$|[\u20ac\u00a3])\\s*)")
_UNIT = re.compile(
    r"\s*(?:\\?%|\^\s*(?:\\circ|\{\s*\\circ\s*\})(?:\s*\\(?:text|mathrm)\s*\{[^{}]*\})?"
    r"|\\(?:text|textrm|mathrm|mbox)\s*\{(?P<text>[^{}]*)\}(?:\s*\^\s*(?:[23]|\{[23]\}))?"
    r"|(?<=[0-9)}])\s+(?P<words>(?!or |and )(?:[A-Za-z]{3,}|[cmk]m|kg|ft|in|mi)(?:\s[A-Za-z]{2,})*))\s*\Z"
)
_NO_UNIT = re.compile(
    r"\b(?:to|base|mod|if|for|when|where|at|less|more|than|[ap]m)\b|[ap]\.\s?m|clock|[0-9,;:=(]"
)
_FUNCTIONS = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|lg|exp|max|min|gcd|lcm|det|[lr](?:floor|ceil)|l?vert"
_GREEK = r"alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|varphi|omega|ell"
_REFUSED = [
    (re.compile(pattern), reason)
    for pattern, reason in (
        (r".*\\(?:begin|vec|mathbf|hat|overrightarrow)(?![A-Za-z])", MATRIX),
        (r"\\(?:text|textbf|mathrm|mbox)\s*\{[^{}]*\}[\s.]*$|[A-Z]?[a-z]+(?: [a-z]+)+$|[A-Z][a-z]+$", TEXT),
        (r".*(?:\\approx|\.\.\.|\\[lc]?dots|[0-9.]\s*\\(?:overline|bar|dot))", ROUNDED),
        (r".*(?:[=<>]|\\(?:[lg]eq?|leqslant|geqslant|neq?|equiv|in|to|sim)(?![A-Za-z]))", RELATION),
        (r".*\\(?:pm|mp|cup|cap|emptyset|varnothing|setminus|mid|\{)(?![A-Za-z])", SEVERAL),
        (r".*(?:(?<![a-z])(?:or|and)(?![a-z])|[,;]|(?<!\\sqrt)\[)", SEVERAL),
        (r".*\\infty", UNDEFINED),
        (rf".*(?:\\(?:{_FUNCTIONS})(?![A-Za-z])|\||!!)", FUNCTION),
        (r".*(?:[:_]|\\[pb]?mod(?![A-Za-z])|\\(?:text|mathrm|mbox)(?![A-Za-z]))", AMBIGUOUS),
        (rf".*(?:\\(?:{_GREEK})(?![A-Za-z])|(?<![A-Za-z\\])[A-Za-df-hj-z])", LETTERS),
    )
]  # fmt: skip
_TOKEN = re.compile(r"\s*([0-9]*\.[0-9]+|[0-9]+\.?|\\[A-Za-z]+|[^\sA-Za-z]|[A-Za-z]+)")
_DECIMAL = re.compile(r"\.([0-9]*[1-9])")
_THIRDS = re.compile(r"[0-9]*(?:33|67)")  # 16.67 is rounded, unless a price
_ROUNDING = re.compile(
    r"\bround|\bestimat|approximat|decimal place|to the nearest|significant", re.IGNORECASE
)
_POWER = re.compile(r"\s*([0-9]+)\s*\^\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*")
_COMMAND = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}|\\[A-Za-z]+")
_LETTER = re.compile(r"(?<![A-Za-z'\\])[A-Za-z](?![A-Za-z'])")
_POOL = "nmkpqrstuvwabchjdfgl"  # of letters for the form


class Refused(Exception):
    """`reason` is for counting, `detail` for this answer."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class IntegerAnswer:
    """An answer turned into an integer.

    asked   text to append to the question, or ""
    back    the form with its integers, LaTeX
    number  the answer without name and unit; `back` must equal it"""

    value: int
    asked: str
    back: str
    number: str


@dataclass(frozen=True)
class _Number:
    """An integer of a form. role: such as radicand; degree: of its root."""

    value: int
    role: str
    degree: int = 0


def integer_answer(question: str, answer: str) -> IntegerAnswer:
    """Return the integer for `answer`, and the question's extension. Raises Refused.

    The form is a sum of terms c sqrt[q](n) pi^k e^l i^j over a denominator, in lowest terms, radicands free
    of q-th powers. Such terms are linearly independent over the rationals (for roots: Besicovitch 1940), so
    the integers are unique."""
    text = answer if len(answer) <= _MAX_LENGTH else ""
    if not text or max(text.count(bracket) for bracket in "({[") > _MAX_DEPTH:
        raise Refused(UNREAD)
    text = (last_boxed(text) or text).translate(_UNICODE)
    text = _ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", text)
    text = _PLAIN_NAME.sub(r"\\", _SPACE.sub(" ", _LAYOUT.sub("", text)).replace("{,}", ","))
    text = _GROUPED.sub(lambda match: match[0].replace(",", ""), " ".join(text.split()))
    text = text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text
    if _INTEGER.fullmatch(text):
        value = int(text.partition(".")[0].replace(" ", ""))
        return IntegerAnswer(value, "", str(value), text)

    body, prefix, unit = _split_name_and_unit(text)
    reason = next((reason for pattern, reason in _REFUSED if pattern.match(body)), "")
    if reason:
        raise Refused(RELATION if "=" in prefix and reason == LETTERS else reason)  # y = 2x + 1
    decimals = _DECIMAL.findall(body)
    has_thirds = not prefix and any(map(_THIRDS.fullmatch, decimals))
    if decimals and (has_thirds or max(map(len, decimals)) > _PLACES or _ROUNDING.search(question)):
        raise Refused(ROUNDED)
    try:
        sign, pieces = _build_form(_AnswerParser(body).read())
    except Refused as refused:
        # 2^2016
        if refused.reason != LARGE or not (match := _POWER.fullmatch(body)):
            raise
        base, exponent = int(match[1]), int(match[2] or match[3])
        root, root_exponent = sympy.perfect_power(base) or (base, 1)
        power = _Number(exponent * int(root_exponent), "exponent")
        sign, pieces = "", [_Number(int(root), "base"), "^{", power, "}"]
    numbers = [piece for piece in pieces if isinstance(piece, _Number)]
    if not numbers:
        raise Refused(NOTHING)
    if any(abs(number.value) >= _LIMIT for number in numbers):
        raise Refused(LARGE)
    letters = _choose_letters(f"{question} {prefix}", len(numbers))
    pairs = list(zip(letters, numbers, strict=True))
    names, values = iter(letters), (str(number.value) for number in numbers)
    form, back = (
        sign + "".join(next(replacements) if isinstance(part, _Number) else part for part in pieces)
        for replacements in (names, values)
    )
    if numbers[0].role == "whole" and not prefix + unit:
        asked = "The answer is an integer. Please give it in decimal digits."
        return IntegerAnswer(numbers[0].value, asked, back, body)
    asked = (
        f"The original answer is in the form ${prefix}{form}{unit}$, where {_describe_conditions(pairs)}. "
        f"Please find the value of ${' + '.join(letters)}$."
    )
    return IntegerAnswer(sum(number.value for number in numbers), asked, back, body)


def _split_name_and_unit(text: str) -> tuple[str, str, str]:
    """Return the number, its prefix (`x =`, currency) and its unit."""
    prefix = unit = ""
    if name_match := _NAME.match(text):
        prefix, text = name_match[0], text[name_match.end() :]
    if currency_match := _CURRENCY.match(text):
        prefix, text = prefix + currency_match[2], currency_match[1] + text[currency_match.end() :]
    if (unit_match := _UNIT.search(text)) and unit_match.start() > 0:
        words = unit_match["text"] or unit_match["words"] or ""
        if re.search(r"\b(?:or|and)\b", words):
            raise Refused(SEVERAL)
        if _NO_UNIT.search(words):
            raise Refused(AMBIGUOUS)
        unit, text = unit_match[0].rstrip(), text[: unit_match.start()]
        if unit_match["words"]:
            unit = f"\\text{{ {unit_match['words']}}}"
        unit = "\\%" if unit.strip() == "%" else unit
    return text, prefix, unit


class _AnswerParser:
    r"""Parses LaTeX of one number, but not 1/2\pi, 2^10, 2\frac{5}{3}."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        position = 0
        while position < len(text) and (match := _TOKEN.match(text, position)):
            self.tokens.append(match[1])
            position = match.end()
        self.at = 0

    def read(self) -> Expr:
        value = self._sum()
        if self.at < len(self.tokens):
            raise Refused(UNREAD, self.tokens[self.at])
        return value

    def _next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _accept(self, *tokens: str) -> str:
        token = self._next()
        self.at += token in tokens and token != ""
        return token if token in tokens else ""

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            raise Refused(UNREAD, self._next())

    def _sum(self) -> Expr:
        value = -self._product() if self._accept("+", "-") == "-" else None
        value = self._product() if value is None else value
        while sign := self._accept("+", "-"):
            term = self._product()
            value = value + term if sign == "+" else value - term
        return value

    def _product(self) -> Expr:
        value, is_divided = self._factor(), False
        while True:
            if self._accept("*", "\\cdot", "\\times"):
                value, is_divided = self._times(value, self._factor()), False
            elif self._accept("/", "\\div"):
                value, is_divided = self._over(value, self._factor()), True
            elif (token := self._next()) and (token in "({" or token[0].isalnum() or token[0] in "\\."):
                starts_with_digit = token[0].isdigit() or token[0] == "."
                if is_divided or (starts_with_digit and self.tokens[self.at - 1] != "!"):  # 2!5!
                    raise Refused(AMBIGUOUS)
                value = self._times(value, self._factor())
            else:
                return value

    def _factor(self) -> Expr:
        if self._accept("-"):  # 3 \cdot -2
            return -self._factor()
        start = self.at
        value = self._atom()
        is_integer = self.at == start + 1 and isinstance(value, Integer)
        if is_integer and self._next() in ("\\frac", "\\dfrac", "\\tfrac"):  # a mixed number
            self.at += 1
            numerator, denominator = self._argument(), self._argument(last=True)
            if not (
                isinstance(numerator, Integer)
                and isinstance(denominator, Integer)
                and 0 < numerator < denominator
            ):
                raise Refused(AMBIGUOUS)
            return value + numerator / denominator
        while self._accept("!"):
            if not (isinstance(value, Integer) and 0 <= value <= 200):
                raise Refused(LARGE if isinstance(value, Integer) and value > 0 else UNREAD)
            value = sympy.factorial(value)
        if self._accept("^"):
            value = self._power(value, self._argument(last=True))
        return value

    def _atom(self) -> Expr:
        token = self._next()
        self.at += 1
        if token[:1].isdigit() or token[:1] == ".":
            return Rational(token.rstrip("."))
        if token in ("(", "{"):
            value = self._sum()
            self._expect(")" if token == "(" else "}")
            return value
        if token in ("\\frac", "\\dfrac", "\\tfrac", "\\cfrac"):
            above = self._argument()
            return self._over(above, self._argument(last=True))
        if token in ("\\binom", "\\dbinom", "\\tbinom"):
            above, below = self._argument(), self._argument(last=True)
            are_integers = isinstance(above, Integer) and isinstance(below, Integer)
            if not are_integers or not 0 <= below <= above <= 1000:
                raise Refused(UNREAD, token)
            return sympy.binomial(above, below)
        if token == "\\sqrt":
            degree: Expr = Integer(2)
            if self._accept("["):
                degree = self._sum()
                self._expect("]")
            radicand = self._argument(last=True)
            if not (isinstance(degree, Integer) and 2 <= degree <= _DEGREE):
                raise Refused(UNREAD, token)
            if degree == 2 and isinstance(radicand, Rational) and radicand < 0:
                return I * self._power(-radicand, Rational(1, 2))
            return self._power(radicand, 1 / degree)
        if token == "\\ln":
            argument = self._factor()
            if not (isinstance(argument, Integer) and 2 <= argument < _LIMIT):
                raise Refused(FUNCTION)
            return sympy.log(argument)  # `expand` turns ln 4 into 2 ln 2
        constants = {"\\pi": pi, "e": E, "i": I}
        if token not in constants:
            raise Refused(LETTERS if token.isalpha() else UNREAD, token)
        return constants[token]

    def _argument(self, *, last: bool = False) -> Expr:
        r"""Parse brackets or one character, as in \frac34.

        last: more digits are ambiguous, as 2^10 is 20 in LaTeX."""
        token = self._next()
        if token.isdigit() and len(token) > 1:
            if last:
                raise Refused(AMBIGUOUS)
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        if self._accept("-"):  # 2^-3
            raise Refused(AMBIGUOUS)
        return self._atom()

    @staticmethod
    def _times(left: Expr, right: Expr) -> Expr:
        if len(left.args) * len(right.args) > _TERMS:
            raise Refused(UNREAD)
        return sympy.expand(left * right)

    @staticmethod
    def _over(above: Expr, below: Expr) -> Expr:
        if below.is_zero:
            raise Refused(UNDEFINED)
        return above / below

    @staticmethod
    def _power(base: Expr, exponent: Expr) -> Expr:
        if not isinstance(exponent, Rational) or (base.is_zero and exponent <= 0):
            raise Refused(UNREAD)
        if base.is_negative and exponent.q > 1:
            raise Refused(AMBIGUOUS)
        if isinstance(base, Rational):
            bits = max(abs(base.p), base.q).bit_length()
            if abs(exponent) * bits > _BITS or (exponent.q > 1 and bits > _ROOT_BITS):
                raise Refused(LARGE)
            return base**exponent
        has_nested_root = any(
            power.exp.q > 1 and power.base.is_Add for power in base.atoms(sympy.Pow) if power.exp.is_Rational
        )
        if len(sympy.Add.make_args(base)) ** abs(exponent) > _TERMS or (has_nested_root and exponent.q > 1):
            raise Refused(UNREAD)
        return sympy.sqrtdenest(base**exponent)


def _build_form(value: Expr) -> tuple[str, list[str | _Number]]:
    value = sympy.expand(sympy.radsimp(value))
    if isinstance(value, Rational) and value.q == 1:
        if abs(value) >= _LIMIT:
            raise Refused(LARGE)
        return "", [_Number(int(value), "whole")]
    terms = _collect_terms(value)
    if terms is not None:
        return _format_sum(terms)
    # Try the form of its square.
    terms = _collect_terms(sympy.expand(sympy.radsimp(sympy.expand(value**2)))) if value.is_real else None
    if terms is None:
        raise Refused(UNREAD)
    inner_sign, pieces = _format_sum(terms)
    return "-" if value.is_negative else "", [f"\\sqrt{{{inner_sign}", *pieces, "}"]


@dataclass
class _Term:
    """coefficient * radicand^(1/degree) * e^power * i * pi^power * ln argument"""

    coefficient: Rational
    radicand: int = 1
    degree: int = 2
    e: int = 0
    i: bool = False
    pi: int = 0
    ln: int = 0


def _collect_terms(value: Expr) -> list[_Term] | None:
    """Return an expanded sum's terms, or None if a factor fits no form."""
    terms = []
    for summand in sympy.Add.make_args(value):
        coefficient, symbolic_part = summand.as_coeff_Mul()
        if not isinstance(coefficient, Rational):
            return None
        term, roots = _Term(coefficient), []
        for factor in sympy.Mul.make_args(symbolic_part):
            base, exponent = factor.as_base_exp()
            if factor == 1:
                continue
            if factor == I:
                term.i = True
            elif base in (pi, E) and isinstance(exponent, Integer):
                setattr(term, "pi" if base == pi else "e", int(exponent))
            elif isinstance(factor, sympy.log) and isinstance(factor.args[0], Integer) and not term.ln:
                term.ln = int(factor.args[0])
            elif isinstance(base, Integer) and isinstance(exponent, Rational) and base > 0 < exponent < 1:
                roots.append((int(base), exponent))
            else:
                return None
        if roots:
            term.degree = lcm(*(exponent.q for _, exponent in roots))
            if term.degree > _DEGREE:
                return None
            for base, exponent in roots:
                term.radicand *= base ** int(exponent * term.degree)
            if term.radicand >= _LIMIT:
                raise Refused(LARGE)
            # sympy extracts only small primes.
            if any(power >= term.degree for power in sympy.factorint(term.radicand).values()):
                raise Refused(LARGE)
        terms.append(term)
    if len({term.ln for term in terms} - {0}) > 1:  # ln 2 + ln 3 is ln 6
        raise Refused(AMBIGUOUS)
    return terms


def _format_sum(terms: Sequence[_Term]) -> tuple[str, list[str | _Number]]:
    """Return sign and pieces of a sum over a denominator, sorted by sign and symbols."""
    e_exponent, pi_exponent = (
        -min(0, *powers) for powers in zip(*((term.e, term.pi) for term in terms), strict=True)
    )
    denominator = lcm(*(int(term.coefficient.q) for term in terms))
    sign = "-" if all(term.coefficient < 0 for term in terms) and (len(terms) == 1 or denominator > 1) else ""

    def sort_key(term: _Term) -> Any:
        symbol_key = (term.i, term.ln, term.e, term.pi, term.degree, term.radicand)
        return (term.coefficient < 0) != bool(sign), symbol_key

    def powers(e: int, pi: int, between: str = "") -> list[str]:
        factors = [
            f"{base}^{{{power}}}" if power > 1 else base * power for base, power in (("e", e), ("\\pi", pi))
        ]
        return [part for part in (factors[0], between, factors[1]) if part]

    pieces: list[str | _Number] = []
    for term in sorted(terms, key=sort_key):
        is_negative = (term.coefficient < 0) != bool(sign)
        pieces += ([" - "] if pieces else ["-"]) if is_negative else [" + "] if pieces else []
        number = abs(int(term.coefficient * denominator))
        symbols: list[str | _Number] = []
        if term.radicand > 1:
            index = f"[{term.degree}]" if term.degree > 2 else ""
            symbols += [f"\\sqrt{index}{{", _Number(term.radicand, "radicand", term.degree), "}"]
        symbols += powers(term.e + e_exponent, term.pi + pi_exponent, "i" * term.i)
        symbols += ["\\ln ", _Number(term.ln, "argument")] if term.ln else []
        pieces += [_Number(number, "coefficient")] if number != 1 or not symbols else []
        pieces += symbols
    if denominator > 1 or e_exponent or pi_exponent:
        # Omitted coefficients of 1 imply lowest terms.
        has_implied_coefficient = sum(
            isinstance(piece, _Number) and piece.role == "coefficient" for piece in pieces
        ) < len(terms)
        role = "any denominator" if has_implied_coefficient else "denominator"
        denominator_pieces: list[str | _Number] = [_Number(denominator, role)] if denominator > 1 else []
        denominator_pieces += powers(e_exponent, pi_exponent)
        pieces = ["\\frac{", *pieces, "}{", *denominator_pieces, "}"]
    return sign, pieces


def _choose_letters(question: str, count: int) -> list[str]:
    used_letters = set(_COMMAND.sub(" ", " ".join(find_formulas(question)))) | set(_LETTER.findall(question))
    free_letters = [letter for letter in _POOL if letter not in used_letters]
    if len(free_letters) < count:
        raise Refused(UNREAD, "the question uses every letter")
    return sorted(free_letters[:count])


def _describe_conditions(named: Sequence[tuple[str, _Number]]) -> str:
    def join_with_and(items: Sequence[str]) -> str:
        return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)

    named = [(f"${letter}$", number) for letter, number in named]
    letters = [letter for letter, _ in named]
    if named[0][1].role == "whole":
        return f"{join_with_and(letters)} is an integer"
    conditions = []
    fraction_letters = [letter for letter, number in named if number.role in ("coefficient", "denominator")]
    has_denominator = any(number.role == "denominator" for _, number in named)
    description = "positive integers" if len(letters) > 1 else "a positive integer"
    if has_denominator and len(fraction_letters) == len(letters) == 2:
        description = f"relatively prime {description}"
    elif has_denominator and len(fraction_letters) > 1:
        conditions.append(f"the greatest common divisor of {join_with_and(fraction_letters)} is 1")
    for degree in sorted({number.degree for _, number in named} - {0}):
        radicand_letters = [letter for letter, number in named if number.degree == degree]
        power = {2: "square", 3: "cube"}.get(degree, f"{degree}th power")
        verb = "are" if len(radicand_letters) > 1 else "is"
        conditions.append(
            f"{join_with_and(radicand_letters)} {verb} not divisible by the {power} of any prime"
        )
    for letter, number in named:
        if number.role == "argument":
            conditions.append(f"{letter} is not a perfect power")
        if number.role == "base":
            conditions.append(f"{letter} is as small as possible")
    verb = "are" if len(letters) > 1 else "is"
    return join_with_and([f"{join_with_and(letters)} {verb} {description}", *conditions])
