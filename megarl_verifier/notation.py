"""Read the notation of an answer: a formula or a text (docs/verifiers.md).

A formula may have only known commands, as the parser drops others, which would make wrong answers right."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from megarl_verifier.answer import FULLWIDTH, MAX_ANSWER, PLAIN_CHARACTERS, text_form
from megarl_verifier.relations import NEGATION, pieces, split

# The parser needs seconds for 300 open brackets.
_MAX_FORMULA, _MAX_DEPTH = 300, 16

_SUPERSCRIPTS = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-"
)
_SUPERSCRIPT = re.compile("\u207b?[" + "".join(map(chr, _SUPERSCRIPTS))[:-1] + "]+")
_COMMANDS = (r"\infty", r"\cup", r"\cap", r"\emptyset", r"\times", r"\div", r"\le", r"\ge", r"\pm", r"\cdot")
_SYMBOLS = dict(zip("\u221e\u222a\u2229\u2205\u00d7\u00f7\u2264\u2265\u00b1\u00b7", _COMMANDS, strict=True))
_GREEK = dict(zip("\u03b1\u03b2\u03b3\u03b4\u03b8\u03bb\u03bc\u03c0\u03c1\u03c3\u03c4\u03c6\u03c9", (
    "alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "pi", "rho", "sigma", "tau", "phi", "omega"
), strict=True))  # fmt: skip
_ROOT = re.compile("\u221a\\s?([0-9]{1,30}|[A-Za-z]|(?=[({]))")
_SCIENTIFIC = re.compile(
    r"(?<![A-Za-z0-9.])([0-9]{1,30}(?:\.[0-9]{1,30})?)[eE]([+-]?[0-9]{1,3})(?![A-Za-z0-9.])"
)

# Words before an answer, and the end of Minerva's prompt.
_PROSE = re.compile(
    r"(?:[^0-9\\]|\\[()])*(?:(?<![A-Za-z])(?:is|are|be|equals|[Aa]nswer)\s{0,8}:?\s|[A-Za-z]{3}\s?:\s)\s{0,8}"
)
_HOPE = re.compile(r"\.?\s+I hope it is correct.*", re.DOTALL)
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]|\$")
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|[bB]igg?[lr]?)(?![A-Za-z])|\\[!]|(?<=[0-9]),\\!"
)
_SPACES = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~|\s+")
_AND = re.compile(
    r",?\s*(?:\\(?:text|mbox|textrm|textnormal)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*"
)
_STYLE = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|operatorname|mbox|rm)\s*\{\s*([^{}]*?)\s*\}"
)
_FUNCTION = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|max|min|gcd|lcm"
_FUNCTION_NAME = re.compile(_FUNCTION)
_PLAIN_FUNCTION = re.compile(
    rf"(?<![A-Za-z\\])(?:(pi)(?![A-Za-z])|({_FUNCTION})(?=\s?[(^_])|(sin|cos|tan|log|ln)(?=\s[0-9A-Za-z\\]))"
)
_ROOT_CALL = re.compile(r"(?<![A-Za-z])\\?sqrt\s?\(((?:[^()]|\([^()]*\))*)\)")
_WORD = re.compile(r"[A-Za-z]{2,}")
_DEGREE = re.compile(
    r"\s*(?:\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\(?:text)?degree(?![A-Za-z])|\u00b0)"
    r"(?:\s*(?:\\(?:text|mathrm)\s*\{\s*[CFK]\s*\}|[CFK](?![A-Za-z])))?"
)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_ANGLE = re.compile(rf"([0-9]+(?:\.[0-9]+)?)(?:{_DEGREE.pattern})")

# Not compared.
_UNITS = frozenset(
    """
    cm mm km dm nm um ft foot feet in inch inche yd yard mile mi meter metre centimeter centimetre
    millimeter millimetre kilometer kilometre decimeter decimetre light sec second min minute hr hour
    day week month year yr ms gm kg mg gram kilogram milligram lb pound oz ounce ton tonne ml liter
    litre milliliter millilitre cup gallon gal quart pint newton joule kj watt kw kwh volt amp ampere
    ohm hz pa pascal celsius fahrenheit kelvin mol mole rad radian deg degree circ mph kmh kmph kph rpm
    bpm acre hectare ha sq square cubic cu cc unit point pt digit way time dollar cent usd eur euro
    rupee rs yen yuan rmb pence penny buck per of the th st nd rd m s g h t l L N J W V A C F K
    """.split()  # noqa: SIM905
)
# These change a value.
_MEANINGFUL = frozenset(
    """
    am pm a p o clock noon midnight bc ad bce ce north south east west up down left right above below
    more less than least most over under profit loss gain increase decrease not no or and if when where
    for mod modulo base to at plus minus times negative squared cubed factorial half halve third quarter
    dozen hundred thousand million billion trillion percent is are only first last
    rest infinity undefined pi sqrt root halves ten lakh lac crore score gross myriad googol mil mn bn tn
    grand fold permille permil ppm ppb bp bps nano micro milli kilo mega giga tera cannot never nor neither
    wrong false incorrect untrue but except without
    """.split()  # noqa: SIM905
)
_ORDINAL = re.compile(
    r"(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]+teen|[a-z]+tie|hundred|thousand|[a-z]+illion)th"
)
_MACRO = r"\\(?:text|mbox|textrm|textnormal|textit|textbf|mathrm|operatorname|rm)\s*\{(?:[^{}]|\{[^{}]*\})*\}"
_MACRO_TAIL = re.compile(
    rf"(?<=[0-9A-Za-z)}}\]!.'])\s*((?:{_MACRO})(?:\s*(?:{_MACRO}|/|\\cdot|\^\s*(?:-?[1-3]|\{{-?[1-3]\}})))*)$"
)
_WORD_TAIL = re.compile(
    r"((?<=[0-9)}\]!.])(?:\s*[A-Za-z]{2,}|\s+[A-Za-z])|(?<=\\pi)\s+(?:[ckdm]m(?![A-Za-z])|[A-Za-z]{4,}))"
    r"((?:[ .-]+[A-Za-z]+|\s*\^\s*(?:[23]|\{[23]\}))*)\.?$"
)
_LITERAL = re.compile(r"-?[0-9.,/ ]+")
_LETTER = re.compile(r"[A-Za-z]")
_MACRO_NAME = re.compile(r"\\[A-Za-z]+")
_PERCENT = re.compile(
    r"(?<=[0-9)}])\s*(?:\\?%|(?:\\(?:text|mathrm)\s*\{\s*)?percent(?:\s*\})?)(?=\s*(?:$|[-+,)\]}]))"
)

_RUN = re.compile(r"[A-Za-z\s.,;'\"()&-]*[A-Za-z][A-Za-z\s.,;'\"()&-]*")
_LONGEST_PRODUCT = 3  # letters; longer runs are words
_SEPARATOR = re.compile(r",(?!(?<=[0-9],)[0-9]{3}(?![0-9]))|;")
_DATE = re.compile(r"[0-9]{1,4}([-/.])[0-9]{1,2}\1[0-9]{1,4}")
_COLON = re.compile(":")
_TIME = re.compile(r"[0-9]{1,2}:[0-5][0-9](?::[0-5][0-9])?")

_HALF_DAY = re.compile(r"(?<=[0-9])([ap])\.m(?![a-z])")  # 5:30p.m

_BASED = re.compile(
    r"(?<![A-Za-z0-9_.\\^}])(?:([0-9A-F]*[0-9][0-9A-F]*)|\(([0-9]+)\))\s?_\s?(?:([0-9])(?![0-9])|\{\s*([0-9]{1,2})\s*\})"
)
_ARGUMENT = r"(\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]+|[0-9A-Za-z])"
_SHORT_FRACTION = re.compile(rf"\\[dtc]?frac\s*{_ARGUMENT}\s*{_ARGUMENT}")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\\[A-Za-z]+|[0-9A-Za-z])")
_SHORT_BASE = re.compile(r"\\log\s?_\s?([0-9])")
_POWER = re.compile(r"\^\s?\(([^()]*)\)")
_INDEXED_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|exp|ln|max|min|gcd|lcm|det)h?\s?_")
_COMMAND = r"\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp)(?![A-Za-z])"
_OPEN_ARGUMENT = re.compile(
    rf"{_COMMAND}(?:\s?[_^]\s?{_ARGUMENT})*+\s*+(?P<argument>(?![(\[])-?\s*(?:{_COMMAND}|\|[^|]*\|)?)"
)
_ARGUMENT_END = re.compile(
    rf"[-+/*=<>:,;&)}}\]|]|\\\\|{_COMMAND}|\\(?:max|min|gcd|lcm|cdot|times|div|pm|mp|cup|cap|setminus|mod|to"
    r"|int|sum|prod|lim|in|[lg]eq?|ne|neq|end)(?![A-Za-z])"
)
_QUOTIENT = re.compile(r"(?:(?<=\\pi)|(?<=\\pi\s))/|/\s?\d")  # perhaps in a sine's argument
_FRACTION = r"\\[dtc]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}"
_MIXED = re.compile(
    rf"(?<![0-9.,^_}}A-Za-z])([0-9]+)(?:\s*{_FRACTION}|\s+([0-9]+)\s?/\s?([0-9]+))(?!\s?[0-9(\\{{^!])"
)
_COEFFICIENT = re.compile(  # 3/4 \pi
    r"(?<![0-9A-Za-z.,^_/}])(?<![0-9]\s)([0-9]+)\s?/\s?([0-9]+)(?=\s?(?:\\(?:pi|sqrt)(?![A-Za-z])|[A-Za-z(]))"
)
_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
_TRANSPOSED = re.compile(
    r"(?<!\\end\{pmatrix\})(?<!\\end\{bmatrix\})\^\s*(?:T(?![A-Za-z])|\{\s*(?:T|\\top)\s*\}|\\top)"
)
_PRIMED = re.compile(r"(?<![A-Za-z\\])([A-Za-z])\s?((?:'|\^\s?\{?(?:\\prime\s?)+\}?)+)")
_ARRAY = re.compile(r"[\[(]\s*\\begin\s?\{array\}\s?\{[clr| ]*\}(.*?)\\end\s?\{array\}\s*[\])]", re.DOTALL)
_D = re.compile(r"(\\[A-Za-z]+)|d(?=\s*[A-Za-z\\])")  # else the parser reads dx as one letter
_QUOTE = re.compile(r"'|\\prime")
_SUBSCRIPT = re.compile(r"_\s?(?:[A-Za-z0-9]|\{[^{}]*\}|\\[A-Za-z]+)")
_NAMES = re.compile(  # brackets and letters
    r"\\(?:begin|end)\s?\{[bpv]?matrix\}"
    r"|\\(?:mathbb|mathcal|overline|bar|vec|hat|overrightarrow)\s?\{[A-Za-z]+\}"
)
_UNREADABLE = re.compile(
    r"(?<![A-Za-z\\])[A-Za-z]+\s?[0-9]|[0-9]\s+[0-9.]|[0-9.]\s?\\(?:overline|bar|dot|hat|vec)|['\"`@#?~%]|!\s?!"
    r"|\.\s?\.|_\s?\{[^{}]*\\(?:text|mathrm)|[0-9.][eE][+-]?[0-9]|[^\x00-\x7f]"
)  # fmt: skip
_KNOWN = frozenset(
    """
    frac dfrac tfrac cfrac sqrt cdot times div pm mp infty pi cup cap setminus emptyset varnothing sin
    cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp max min gcd lcm binom dbinom
    tbinom int sum prod lim to partial lfloor rfloor lceil rceil lvert rvert vert mod det begin end
    overline bar vec hat tilde widetilde overrightarrow mathbb mathcal mathbf boldsymbol bm ell hbar
    nabla alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi
    rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi
    Omega lbrace rbrace le leq ge geq lt gt ne neq in notin equiv leqslant geqslant subseteq supseteq
    """.split()  # noqa: SIM905
)
# Limits where the parser's time is exponential.
_MAX_FORMULA_DEPTH = 8
_SLOW = {
    re.compile(r"\\(?:int|sum|prod|lim)(?![A-Za-z])"): 2,
    re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|exp|max|min|gcd|lcm)"): 10,
    re.compile(r"\||\\[lr]?vert"): 12,
    re.compile(r"([\^_])\s?[A-Za-z0-9]\s?\1"): 0,  # x^y^z is invalid LaTeX
}
_SIMPLE = re.compile(
    r"([-+]?)\s?(?:([1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+|(?=\.))(\.[0-9]+)?"
    r"|\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}|([0-9]+)/([0-9]+))"
)


@dataclass(frozen=True)
class Notation:
    """An answer as written.

    formula  LaTeX that the parser reads completely, without unit and percent sign; "" for a text
    text     normalised, with unit
    words    after the number, no unit"""

    formula: str
    text: str
    words: tuple[str, ...] = ()
    percent: bool = False
    is_word: bool = False

    @property
    def meaningful(self) -> bool:
        return any(
            word != word.lower()
            or len(word) == 1
            or word in _MEANINGFUL
            or (singular := word.removesuffix("s")) in _MEANINGFUL
            or _ORDINAL.fullmatch(singular)
            for word in self.words
        )

    def has_other_words(self, other: Notation) -> bool:
        words, other_words = (
            [word.lower().removesuffix("s") for word in notation.words] for notation in (self, other)
        )
        return words != other_words and bool((words and other_words) or self.meaningful or other.meaningful)


def plain(text: str) -> str:
    """Write Unicode and 1.5e3 as LaTeX; remove currency signs."""
    text = text[:MAX_ANSWER].replace("\\$", "")
    text = text.replace("$", "") if text.count("$") == 1 else text  # a price
    if not text.isascii():
        text = text.translate(PLAIN_CHARACTERS)
        text = _SUPERSCRIPT.sub(lambda run: f"^{{{run[0].translate(_SUPERSCRIPTS)}}}", text)
        text = _ROOT.sub(
            lambda root: f"\\sqrt{{{root[1]}}}" if root[1] else "\\sqrt", "".join(map(_to_latex, text))
        )
    return _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", text)


def _to_latex(character: str) -> str:
    category = unicodedata.category(character)
    if character in _SYMBOLS:
        return f"{_SYMBOLS[character]} "
    if character in _GREEK:
        return f"\\{_GREEK[character]} "
    if (category == "Sc" and character != "$") or category == "Cf":
        return ""  # also for the zero-width space
    if "A" <= (letter := chr(max(ord(character) - FULLWIDTH, 0))) <= "z":
        return letter
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    numerator, slash, denominator = unicodedata.normalize("NFKC", character).partition("\u2044")
    return f"\\frac{{{numerator}}}{{{denominator}}}" if slash else character


def is_plausible(text: str, deepest_allowed: int = _MAX_DEPTH) -> bool:
    """Return whether it is short, with shallow brackets."""
    if len(text) > _MAX_FORMULA:
        return False
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest <= deepest_allowed


def simple_number(text: str) -> tuple[Fraction, bool] | None:
    if not (match := _SIMPLE.fullmatch(text.strip(" $").rstrip(". "))):
        return None
    sign, integer_part, decimal_places, numerator, denominator, slash_numerator, slash_denominator = (
        match.groups()
    )
    if integer_part or decimal_places:
        value = Fraction((integer_part or "0").replace(",", "") + (decimal_places or ""))
    else:
        numerator, denominator = int(numerator or slash_numerator), int(denominator or slash_denominator)
        if not denominator:
            return None
        value = Fraction(numerator, denominator)
    return (-value if sign == "-" else value), bool(decimal_places)


@lru_cache(maxsize=2048)
def read_notation(text: str, *, inside: bool = False) -> Notation:
    """Read an answer; inside: a side of an equation, where adjacent letters are a product."""
    form = _HALF_DAY.sub(r"\1m", text_form(text))
    if not is_plausible(text):
        return Notation("", form)
    body = _SPACES.sub(" ", _LAYOUT.sub("", _DELIMITERS.sub("", text))).replace("{,}", ",")
    body = _AND.sub(", ", body.strip(" *_`,;:")).rstrip(" .,;:")
    number, _ = _split_unit(body)
    if _DATE.fullmatch(number) or _TIME.fullmatch(number):
        return Notation("", form)
    unstyled_body = _PLAIN_FUNCTION.sub(_format_function, _STYLE.sub(_remove_style, body))
    if _RUN.fullmatch(unstyled_body) and _WORD.search(unstyled_body.replace(" ", "")) and not inside:
        is_product = unstyled_body.isalpha() and len(unstyled_body) <= _LONGEST_PRODUCT
        return Notation(unstyled_body if is_product else "", form, is_word=True)
    if _TRIGONOMETRIC.search(unstyled_body):
        body = _ANGLE.sub(r"(\1\\cdot\\frac{\\pi}{180})", body)
    body = _DEGREE.sub(r"\\text{deg}", body)
    parts, words, percents = [], [], 0
    for part in split(body, _SEPARATOR) if _SEPARATOR.search(body) else [body]:
        part, percent = _PERCENT.subn("", part)
        part, unit_words = (part, []) if inside else _split_unit(part)
        parts.append(part)
        words += unit_words
        percents += percent
    if len(parts) > 1 and words:
        return Notation("", form)
    return Notation(_to_formula(", ".join(parts)), form, tuple(words), bool(percents))


def _format_function(found: re.Match[str]) -> str:
    return f"\\{found[0]} "


def without_prose(text: str) -> str:
    """Return `$5$` of `The final answer is $5$. I hope it is correct.`; keep a negation."""
    start = _PROSE.match(text) if is_plausible(text) else None
    if start is not None and not NEGATION.search(start[0]):
        text = text[start.end() :]
    return _HOPE.sub("", text)


def _remove_style(found: re.Match[str]) -> str:
    r"""Return the content unless it is a word: `\text{A}`, `\mathrm{e}`."""
    content = found[1]
    if _FUNCTION_NAME.fullmatch(content):
        return f"\\{content} "
    return found[0] if _WORD.search(content) or not content else content


def _split_unit(text: str) -> tuple[str, list[str]]:
    """Return a formula, and the words after it if one is no unit."""
    tail = _MACRO_TAIL.search(text) or _WORD_TAIL.search(text)
    if tail is None:
        return text, []
    number = text[: tail.start()].rstrip()
    names = re.findall(r"[A-Za-z]+", _MACRO_NAME.sub("", tail[0]))
    is_unit = all(map(_is_unit, names))
    in_macro, is_letter = "{" in tail[1], len("".join(names)) == 1
    # May be a product: `2xy`, `5 x`, `n + 3 m`, `\frac{1}{2} a`.
    has_letters = _LETTER.search(_MACRO_NAME.sub("", number)) is not None
    if in_macro:
        is_product = is_letter and (has_letters or not is_unit)
    elif is_letter:
        is_product = not (tail[0][0] == " " and names[0] in "msgh" and _LITERAL.fullmatch(number))
    else:
        is_product = has_letters or not (is_unit or tail[0][0] == " ")
    return (text, []) if is_product else (number, [] if is_unit else names)


def _is_unit(word: str) -> bool:
    word = word.lower() if len(word) > 1 else word
    return word in _UNITS or (len(word) > 2 and word.endswith("s") and word[:-1] in _UNITS)


def _to_formula(text: str) -> str:
    """Return "" if the parser would not read all."""
    text = _STYLE.sub(_remove_style, text).replace("**", "^")
    for _ in range(4):  # roots in roots
        text = _ROOT_CALL.sub(r"\\sqrt{\1}", text)
    text = _PLAIN_FUNCTION.sub(_format_function, text)
    if "\\int" not in text and "{d" not in text:
        text = _D.sub(lambda match: match[1] or "{d}", text)
    for _ in range(4):  # fractions in fractions
        text = _SHORT_FRACTION.sub(_format_fraction, text)
    text = _SHORT_BASE.sub(r"\\log_{\1}", _SHORT_ROOT.sub(r"\\sqrt{\1}", text))
    text = _POWER.sub(r"^{(\1)}", text)
    text = _ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text)
    text = _BASED.sub(_convert_base, text)
    text = _MIXED.sub(_expand_mixed, text)
    text = _GROUPED.sub(lambda match: match[0].replace(" ", ""), text)
    text = _PRIMED.sub(lambda match: f"{match[1]}_{{{'p' * len(re.findall(_QUOTE, match[2]))}}}", text)
    text = text.replace("\\varnothing", "\\emptyset")
    text = _bracket_arguments(_TRANSPOSED.sub("^{(T)}", text))
    text = _COEFFICIENT.sub(r"\\frac{\1}{\2}", text)
    ratio = split(text, _COLON)
    if len(ratio) > 2:  # 1:2:3
        text = ", ".join(f"\\frac{{{term}}}{{{ratio[0]}}}" for term in ratio[1:])
        text = f"({text})"
    unindexed_text = _SUBSCRIPT.sub("", text)
    commands = _MACRO_NAME.findall(unindexed_text)
    letters = _NAMES.sub("", unindexed_text)
    letters = _MACRO_NAME.sub(" ", letters)
    if any(command[1:] not in _KNOWN for command in commands) or _UNREADABLE.search(unindexed_text):
        return ""
    if _INDEXED_FUNCTION.search(text):
        return ""
    if any(len(word) > _LONGEST_PRODUCT for word in _WORD.findall(letters)):
        return ""
    if not is_plausible(text, _MAX_FORMULA_DEPTH) or any(
        len(pattern.findall(text)) > max_count for pattern, max_count in _SLOW.items()
    ):
        return ""
    return text.strip()


def _bracket_arguments(text: str) -> str:
    r"""Put arguments in brackets, as the parser reads `\ln 8/\ln 2` as `\ln(8/\ln 2)`.

    Returns "" if the argument may be a quotient: `\sin \pi/6`."""
    for match in reversed(list(_OPEN_ARGUMENT.finditer(text))):  # inner first: `\ln\sin x`
        start = match.start("argument")
        _, length, _ = next(pieces(text[match.end() :], _ARGUMENT_END))
        end = match.end() + length
        argument = text[start:end].strip()
        if _TRIGONOMETRIC.match(match[0]) and _QUOTIENT.match(text, end):
            return ""
        text = f"{text[:start]}({argument}){text[end:]}"
    return text


def _format_fraction(found: re.Match[str]) -> str:
    numerator, denominator = (
        argument[1:-1] if argument[0] == "{" else argument for argument in found.groups()
    )
    return f"\\frac{{{numerator}}}{{{denominator}}}"


def _convert_base(found: re.Match[str]) -> str:
    """Return the value of 4343_6, else the text."""
    digits, base = found[1] or found[2], int(found[3] or found[4])
    try:
        return str(int(digits, base)) if 2 <= base <= 36 and len(digits) < 100 else found[0]
    except ValueError:  # 9_6
        return found[0]


def _expand_mixed(found: re.Match[str]) -> str:
    numerator, denominator = found[2] or found[4], found[3] or found[5]
    is_proper = 0 < int(numerator) < int(denominator)
    return f"({found[1]}+\\frac{{{numerator}}}{{{denominator}}})" if is_proper else found[0]
