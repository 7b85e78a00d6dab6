r"""Parse relations, as text in linear time (docs/verifiers.md).

`x = 1 \text{ or } 2` gives a name two values; `2x + y = 3` is an equation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

_OPERATORS = {
    **dict.fromkeys(("=", "==", ":=", "\\in"), "="),
    **{one: one for one in ("\\equiv", "\\cong", "\\sim", "\\parallel", "\\perp", "\u2261")},
    **dict.fromkeys(("\\approx", "\\simeq", "\u2248"), "~"),
    **dict.fromkeys(("!=", "\\ne", "\\neq", "\u2260"), "!="),
    **dict.fromkeys(("<", "\\lt"), "<"),
    **dict.fromkeys((">", "\\gt"), ">"),
    **dict.fromkeys(("<=", "\\le", "\\leq", "\\leqslant"), "<="),
    **dict.fromkeys((">=", "\\ge", "\\geq", "\\geqslant"), ">="),
}
_LONGEST_FIRST = sorted(_OPERATORS, key=len, reverse=True)
_OPERATOR = re.compile("|".join(re.escape(x) + "(?![A-Za-z])" * (x[0] == "\\") for x in _LONGEST_FIRST))
_DELIMITED = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]", re.DOTALL)
_PROSE = re.compile(r".*(?<![A-Za-z\\])(?:is|are|be)(?![A-Za-z])\s{0,8}:?", re.DOTALL)
_IMPLIES = re.compile(
    r"\\(?:Rightarrow|Longrightarrow|implies|iff|Leftrightarrow|therefore)(?![A-Za-z])|[\u21d2\u21d4]|=>"
)
_NOT = re.compile(r"\\not\s?=")
_OTHER_NOT = re.compile(r"\\(?:not|neg|lnot)(?![A-Za-z])")
NEGATION = re.compile(
    r"(?<![A-Za-z\\])(?:not|cannot|never|no|nor|neither|wrong|false|incorrect|untrue|[a-z]+n['\u2019]t)(?![A-Za-z])",
    re.IGNORECASE,
)
_LAYOUT = re.compile(
    r"\\left\s?\\\{\s?(?=\\begin)|\\right\s?\.|\\(?:left|right|displaystyle|textstyle|big|Big)(?![A-Za-z])"
    r"|\\(?:begin|end)\s?\{(?:cases|align|aligned|gathered)\*?\}"
    r"|(?<!\\)\\[!,;: ]|~|&(?=\s?[=<>])|(?<=[=<>])&"
)
_DOMAIN = re.compile(
    r"[,;]?\s{0,8}(?:where|for|with)?\s{0,8}[A-Za-z]\s{0,8}\\in\s{0,8}\\mathbb\s?\{?[A-Z]\}?(?:\^[+*])?"
)
_AND = re.compile(
    r"\\text\s?\{[ ,]{0,8}(?:and|or)[ ,]{0,8}\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
    r"|\\(?:lor|land|vee|wedge|q?quad)(?![A-Za-z])"
)
_BUILT = re.compile(
    r"\\?\{\s?[A-Za-z]\s?(?:\\in\s?\\mathbb\s?\{?[A-Z]\}?\s?)?(?:\||:|\\mid(?![A-Za-z]))(.*?)\\?\}", re.DOTALL
)
_COMMA = re.compile(r",")
_SEPARATOR = re.compile(r",(?!(?<=[0-9],)[0-9]{3}(?![0-9]))|;|\\\\")

_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|rho|sigma|tau"
    r"|(?:var)?phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega|ell)(?![A-Za-z])"
)
_LETTER = rf"(?:{_GREEK}|[A-Za-z])"
_INDEX = r"(?:\s?(?:_\s?(?:\{[^{}]*\}|[A-Za-z0-9])|'|\^\s?(?:\\prime|\{(?:\\prime)+\}|\*)))*"
_ITEMS = rf"(?:{_LETTER}|[0-9]+)(?:\s?,\s?(?:{_LETTER}|[0-9]+))*"
# Word, angle, segment, f(x), (x, y) or letter. `xy` is a product.
_NAME = re.compile(
    r"(?P<word>\\(?:text|mathrm|operatorname)\s?\{[^{}]*\}|[A-Za-z]{4,}(?: [A-Za-z]{2,})*)"
    r"|\|[A-Z]{2,4}\||\\frac\s?\{[A-Z]{2,4}\}\s?\{[A-Z]{2,4}\}"
    rf"|{_LETTER}{_INDEX}(?:\s?:\s?{_LETTER}{_INDEX})+"
    rf"|m?\s?\\(?:angle|triangle)\s?(?:[A-Za-z]{{1,4}}|\{{[A-Za-z]{{1,4}}\}}|{_GREEK})"
    r"|[A-Z]{2,4}|[A-Z]\^\s?\{-1\}"
    rf"|(?:[fghFGH](?:\^\s?\{{-1\}})?{_INDEX}|P|E|\\Pr)\s?\([^()]*\)"
    rf"|(?P<tuple>\(\s?{_LETTER}{_INDEX}(?:\s?,\s?{_LETTER}{_INDEX})+\s?\))"
    rf"|(?:{_LETTER}|\\(?:vec|hat|bar|overline|overrightarrow|mathbf|mathcal)\s?(?:\{{[^{{}}]*\}}|[A-Za-z]))"
    rf"{_INDEX}(?:\s?\({_ITEMS}\))?"
)
_FACTORS = rf"(?:{_LETTER}{_INDEX}(?:\s?\\cdot\s?|\s?))+"
_SUM = re.compile(rf"\s?{_FACTORS}(?:\+\s?{_FACTORS})*")
_DERIVATIVE = re.compile(rf"\\[dt]?frac\s?\{{d\s?{_LETTER}\}}\s?\{{d\s?{_LETTER}\}}")
_NOT_IN_NAMES = re.compile(r"[\s{}]|\\(?:text|mathrm|operatorname|mathbf|mathcal)(?![A-Za-z])")
_NO_SYMBOLS = re.compile(rf"\\(?:text|mathrm|operatorname)\s?\{{[^{{}}]*\}}|(?!{_GREEK})\\[A-Za-z]+")
_SYMBOL = re.compile(_LETTER)
_UNIT = re.compile(r"\\(?:text|mathrm|circ)(?![A-Za-z])|\u00b0")


@dataclass(frozen=True)
class Relation:
    """`left operator right`. Operators other than = != < <= > >= are texts; '' is no relation."""

    left: str
    operator: str
    right: str

    @property
    def solved(self) -> bool:
        """True if it compares one name with a constant."""
        sides = (self.left, self.right)
        return any(
            _read_name(side.lstrip("- ")) and is_constant(other_side)
            for side, other_side in (sides, sides[::-1])
        )


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer with relations.

    values     name -> values in order
    relations  those that give no name a value
    words      names such as Area, which match any other
    constants  of each chain the sides without letters and units, which must be equal"""

    text: str
    values: dict[str, tuple[str, ...]]
    relations: tuple[Relation, ...]
    words: frozenset[str]
    constants: tuple[tuple[str, ...], ...] = ()

    @property
    def value(self) -> str | None:
        has_one_name = len(self.values) == 1 and not self.relations
        return ", ".join(next(iter(self.values.values()))) if has_one_name else None

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Values of all names by row; [] if their numbers differ."""
        columns = list(self.values.values())
        return list(zip(*columns, strict=True)) if len({len(column) for column in columns}) == 1 else []

    @property
    def last(self) -> str | None:
        """Values, or the right side of `m + n = 7`; None for `2x = 4`, perhaps the question."""
        if not self.relations:
            if len(self.rows) > 1 and len(self.values) > 1:
                return format_tuples(self.rows)
            return ", ".join(value for values in self.values.values() for value in values)
        if len(self.relations) != 1 or self.values:
            return None
        relation = self.relations[0]
        if _DERIVATIVE.fullmatch(relation.left):
            is_result = True
        elif _NAME.fullmatch(relation.left):  # S_n = n(n + 1)/2
            is_result = not _find_symbols(relation.left.partition("_")[0]) & _find_symbols(relation.right)
        else:
            is_result = _SUM.fullmatch(relation.left) is not None and is_constant(relation.right)
        return relation.right if relation.operator == "=" and is_result else None


def format_tuples(rows: Iterable[tuple[str, ...]]) -> str:
    return ", ".join(f"({', '.join(row)})" for row in rows)


@lru_cache(maxsize=1024)
def read_relations(text: str) -> ParsedAnswer | None:
    """Parse relations outside of brackets; None if there are none."""
    if not _OPERATOR.search(text):
        return None
    if NEGATION.search(text):  # it is false that $x = 5$
        return ParsedAnswer(text, {}, (Relation(text, "", ""),), frozenset())
    formulas = list(find_formulas(text))
    if not any(_OPERATOR.search(formula) for formula in formulas):
        formulas = [_PROSE.sub("", text.replace("$", ""))]
    text = _NOT.sub(r"\\ne ", _IMPLIES.split(", ".join(formulas))[-1].strip())
    if _OTHER_NOT.search(text):
        return ParsedAnswer(text, {}, (Relation(text, "", ""),), frozenset())
    text = set_match[1] if (set_match := _BUILT.fullmatch(text)) else text  # {x | x > 3}
    text = _AND.sub(",", _LAYOUT.sub("", _DOMAIN.sub("", text.replace("{,}", ","))))
    values: dict[str, tuple[str, ...]] = {}
    relations: list[Relation] = []
    constants = []
    words = set()
    name = ""
    has_operators = False
    for part in split(text, _SEPARATOR):
        chain_pieces = list(pieces(part, _OPERATOR))
        sides = [part[start:end].strip() for start, end, _ in chain_pieces]
        operators = [_OPERATORS[mark] for _, _, mark in chain_pieces[:-1]]
        has_operators |= bool(operators)
        if set(operators) == {"="}:
            constants.append(tuple(side for side in sides if is_constant(side) and not _UNIT.search(side)))
        named_values, part_relations = (
            _split_chain(sides, operators) if operators else ([(name, part)] if name else [], [])
        )
        if not operators and not name:
            part_relations = [Relation(part, "", "")]
        relations += part_relations
        for name, value in named_values:
            values[name] = (*values.get(name, ()), value)
            if (match := _NAME.fullmatch(sides[0])) and match["word"]:
                words.add(name)
    for key in [key for key in values if key[0] == "("]:  # (x, y) = (1, 2)
        names = split(key[1:-1], _COMMA)
        rows = [split(value[1:-1], _COMMA) for value in values[key] if value[0] == "("]
        if len(rows) == len(values[key]) and all(len(row) == len(names) for row in rows):
            del values[key]
            values |= {name: tuple(row[i] for row in rows) for i, name in enumerate(names)}
    if not has_operators:
        return None
    return ParsedAnswer(text, values, tuple(relations), frozenset(words), tuple(constants))


def _split_chain(sides: list[str], operators: list[str]) -> tuple[list[tuple[str, str]], list[Relation]]:
    """Split a chain into named values and other relations."""
    if "~" in operators:  # 1/3 = x ~ 0.33
        index = operators.index("~")
        if index == 0 and is_constant(sides[0]):  # \sqrt{5} ~ 2.236
            return [("=", sides[0])], []
        index = max(1, index)
        sides, operators = sides[: index + 1], ["=" if one == "~" else one for one in operators[:index]]
    relations = [Relation(*one) for one in zip(sides, operators, sides[1:], strict=False)]
    if set(operators) != {"="}:
        return [], relations
    first_side, last_side = sides[0], sides[-1]
    name, ends_in_constant = _read_name(first_side), is_constant(last_side)
    if ends_in_constant and len(sides) > 2 and all(map(_read_name, sides[:-1])):  # x = y = 3
        return [(_read_name(side), last_side) for side in sides[:-1]], []
    # y = 2(x + 1) = 2x + 2 is one value; x = y/2 = z/3 is a line.
    has_one_value = (
        len(sides) == 2
        or ends_in_constant
        or all(_find_symbols(side) == _find_symbols(last_side) for side in sides[1:-1])
    )
    name_symbols = _find_symbols(first_side if first_side[:1] == "(" else first_side.partition("(")[0])
    if name and has_one_value and not name_symbols & _find_symbols(last_side):
        return [(name, last_side)], []
    if len(sides) == 2 and is_constant(first_side) and _read_name(last_side):
        return [(_read_name(last_side), first_side)], []
    if all(map(is_constant, sides)):  # 2 + 2 = 4
        return [("=", last_side)], []
    if all(map(is_constant, sides[1:])):  # m + n = 3 + 4 = 7
        return [], [Relation(first_side, "=", last_side)]
    return [], relations


def _read_name(side: str) -> str:
    return _NOT_IN_NAMES.sub("", side).lower() if _NAME.fullmatch(side) else ""


def _find_symbols(side: str) -> set[str]:
    return set(_SYMBOL.findall(_NO_SYMBOLS.sub(" ", side)))


def is_constant(side: str) -> bool:
    """Return whether there are no symbols but e and i."""
    return bool(side) and _find_symbols(side) <= {"e", "i"}


def find_formulas(text: str) -> Iterator[str]:
    return (next(filter(None, match.groups())) for match in _DELIMITED.finditer(text))


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split outside of brackets and environments; drop empty parts."""
    marks = " \t\n,;:*_`"
    parts = (text[start:end].lstrip(marks).rstrip(marks + ".") for start, end, _ in pieces(text, separator))
    return [part for part in parts if part]


def pieces(text: str, separator: re.Pattern[str]) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and following separator of each piece."""
    depth = start = position = 0
    while position < len(text):
        if depth <= 0 and (match := separator.match(text, position)):
            yield start, position, match[0]
            start = position = match.end()
            continue
        depth += text[position] in "([{" or text.startswith("\\begin{", position)
        depth -= text[position] in ")]}" or text.startswith("\\end{", position)
        position += 2 if text.startswith("\\\\", position) else 1
    yield start, len(text), ""
