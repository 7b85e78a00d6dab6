"""DAPO's verifier: compare the last `Answer:` line, normalised, with the reference as text.

The normalisation is Minerva's (Lewkowycz et al. 2022, appendix G)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import AnyStr, NamedTuple

MAX_ANSWER = 1000  # characters; bounds the time of regular expressions

_LABEL = re.compile(r"(?:answer|\u7b54\u6848)[ \t*_`]{0,8}[:\uff1a][ \t*_`]{0,8}", re.IGNORECASE)
# Around an answer. Lines of only markup are skipped.
_MARKUP = " \t\r\f\v*_`"
_MARKUP_LINE = re.compile(r"(?:[\s*_`$:]|\\\[|\\\()*")
_LINES_AFTER_LABEL = 4
_BOX = re.compile(r"\\boxed\s{0,8}\{")
_BOXES = 16  # tried, from the end

FULLWIDTH = 0xFEE0  # from ASCII
# ASCII for fullwidth signs, dashes, CJK and Arabic punctuation.
PLAIN_CHARACTERS = {
    **{i + FULLWIDTH: chr(i) for i in range(ord("!"), ord("~") + 1) if not chr(i).isalnum()},
    **dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63"), "-"),
    **dict.fromkeys(map(ord, "\u3002\uff61\u066b"), "."),
    **dict.fromkeys(map(ord, "\u3001\uff64\u060c\u066c"), ","),
    0x061B: ";",
    0x066A: "%",
    0x2236: ":",
    0x3000: " ",
}
_SPACES = re.compile(r"\\[,;:! ]|\\quad|\\qquad|~|[\u00a0\u2009\u202f]")
_DELIMITERS = re.compile(r"\\[()\[\]]|\\(?:left|right|displaystyle|textstyle|limits)(?![A-Za-z])|\\?\$")
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|fbox|boxed|underline)\s*\{([^{}]*)\}"
)
_SHORT_UNIT = re.compile(r"\\(?:text|mathrm)\s*\{\s*(?:m|s|th)?\s*\.?\s*\}(?:\s*\^\s*(?:[23]|\{[23]\}))?")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\u00b0|\\degree")
_UNIT_NAMES = (
    "square|sq|ways|integers|dollars|cents|percent|mph|inch|inches|foot|feet|km|cm|mm|meters?|metres?|kg|gm|"
    "pounds|hours?|minutes?|seconds|degrees?|units?|points|digits|meals|edges|students|childrentickets|"
    "multiples"
)
_UNITS = re.compile(
    rf"(?<![A-Za-z\\])(?:{_UNIT_NAMES})(?![A-Za-z])(?:\s*\^\s*(?:[23]|\{{[23]\}}))?", re.IGNORECASE
)
_ARTICLE = re.compile(r"(?<![A-Za-z])(?:an?|the)\s+(?=[0-9A-Za-z\\])", re.IGNORECASE)
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)(?!\d)")
# Without a neighbour: 1\frac{1}{2} is not 11/2.
_FRACTION = re.compile(
    r"([0-9A-Za-z)}\]^_]\s{0,8})?(\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\})"
    r"(?!\s{0,8}[0-9A-Za-z({\\^])"
)
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:[, ][0-9]{3})+(?:\.0*)?")
_INTEGER = re.compile(r"([+-]?)([0-9]+)(?:\.0*)?")
_PAIR = re.compile(r"(?<=[0-9]),(?:\s|~|\\[,;: ]|\\q?quad)+|(?<=[0-9]),(?![0-9]{3}(?![0-9]))")
# `12 34` is not one number.
_SPACE_NOT_IN_NUMBER = re.compile(r"(?<![0-9\s])\s+|\s+(?![0-9\s])")
_BRACKETED = re.compile(r"\([^()]*\)")
_SEVERAL = re.compile(r",(?![0-9]{3})|;|\band\b|\bor\b")


class Judgement(NamedTuple):
    """Correctness, and the normalised final answer for votes."""

    correct: bool
    extracted: str | None = None


def final_part(response: str) -> str:
    """Return the text after the last `</think>`, "" in an unfinished thought."""
    final_text = response.rpartition("</think>")[2]
    return "" if "<think>" in final_text else final_text


def find_answer(response: str) -> str | None:
    """Return the rest of the last `Answer:` line, or the next non-empty line, after the thoughts.

    None without label, or if nothing or more than MAX_ANSWER characters follow. Linear time."""
    response = final_part(response)
    # One byte a character, to keep positions.
    lowered = response.encode("ascii", "replace").lower()
    labels = (_last_label(response, lowered, b"answer"), _last_label(response, response, "\u7b54\u6848"))
    end = max((label.end() for label in labels if label), default=None)
    return None if end is None else _first_line(response, end)


def _last_label(response: str, searched: AnyStr, word: AnyStr) -> re.Match[str] | None:
    position = searched.rfind(word)
    while position >= 0:
        if label := _LABEL.match(response, position):
            return label
        position = searched.rfind(word, 0, position)
    return None


def _first_line(response: str, start: int) -> str | None:
    for _ in range(_LINES_AFTER_LABEL):
        end = response.find("\n", start)
        end = len(response) if end < 0 else end
        if end - start > MAX_ANSWER:
            return None
        line = response[start:end]
        if not _MARKUP_LINE.fullmatch(line):
            return line.strip(_MARKUP)
        start = end + 1
        if start >= len(response):
            break
    return None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last balanced `\boxed{...}`, or None."""
    return next(_boxes(text), None)


def all_boxed(text: str) -> str | None:
    r"""Join boxes: `1, 2` for `\boxed{1} and \boxed{2}`; None without boxes."""
    return ", ".join(dict.fromkeys([*_boxes(text)][::-1])) or None


def _boxes(text: str) -> Iterator[str]:
    """Yield contents from the end, of nested boxes the innermost."""
    box_start = inner_start = len(text)
    for _ in range(_BOXES):
        box_start = text.rfind("\\boxed", 0, box_start)
        if box_start < 0:
            return
        if opening := _BOX.match(text, box_start):
            end = _closing_brace(text, opening.end())
            if end is not None and end <= inner_start:
                inner_start = box_start
                yield text[opening.end() : end]


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for i in range(start, min(len(text), start + MAX_ANSWER)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return None


def ends_in_open_box(text: str) -> bool:
    r"""Return whether the last `\boxed{` is not closed."""
    box_start = text.rfind("\\boxed")
    opening = _BOX.match(text, box_start) if box_start >= 0 else None
    return opening is not None and _closing_brace(text, opening.end()) is None


def normalise(answer: str) -> str:
    r"""Return the canonical form: `1,234`, `$\boxed{1234}$`, `+1234.0` become `1234`."""
    text = _plain(answer)
    boxed = last_boxed(text)
    text = _last_side(_only_formula(text) if boxed is None else boxed)
    text = text.replace("{,}", ",").replace("\\%", "").replace("%", "")
    text = _unwrap(_SHORT_UNIT.sub("", _without_layout(_DEGREES.sub("", text))))
    text = _ARTICLE.sub("", _UNITS.sub("", text)).replace('"', "")
    return _canonical_number(_without_shorthand(text).rstrip(".,;:!"))


def text_form(answer: str) -> str:
    """Return the form in which `math` compares texts, ignoring case and spaces."""
    text = _plain(answer)
    boxed = last_boxed(text)
    text = (text if boxed is None else boxed).replace("\\!", "")
    text = _PAIR.sub(";", text).replace("{,}", ",").replace("\\%", "%")
    text = _without_shorthand(_unwrap(_without_layout(text)))
    text = text.rstrip(".,;:")
    is_quoted = len(text) > 2 and text[0] + text[-1] in ('""', "\u201c\u201d")
    return _canonical_number(text[1:-1] if is_quoted else text).casefold()


def _plain(answer: str) -> str:
    return answer[:MAX_ANSWER].translate(PLAIN_CHARACTERS).strip(_MARKUP)


def _without_layout(text: str) -> str:
    return _DELIMITERS.sub("", _SPACES.sub(" ", text))


def _unwrap(text: str) -> str:
    for _ in range(4):  # wrappers inside wrappers
        text, unwrapped = _WRAPPER.subn(r" \1 ", text)
        if not unwrapped:
            break
    return text


def _without_shorthand(text: str) -> str:
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", _FRACTION.sub(_slash, _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return _SPACE_NOT_IN_NUMBER.sub("", text.strip(_MARKUP))


def _slash(found: re.Match[str]) -> str:
    return found[0] if found[1] else f"{found[3]}/{found[4]}"


def _only_formula(text: str) -> str:
    """Return `5` of `the answer is $5$ dollars`; else, without exactly one formula, the text."""
    pieces = text.replace("$$", "$").replace("\\$", "").split("$")
    return pieces[1] if len(pieces) == 3 and pieces[1].strip() else text


def _last_side(text: str) -> str:
    """Return `7` of `m + n = 3 + 4 = 7`; keep `a = 3, b = 4`."""
    head, equals, tail = text.rpartition("=")
    if (
        not equals
        or head.rstrip().endswith(("<", ">", "\\", "!", ":"))
        or _SEVERAL.search(_BRACKETED.sub("", head))
    ):
        return text
    return tail


def _canonical_number(text: str) -> str:
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    if match := _INTEGER.fullmatch(text):
        digits = match[2].lstrip("0") or "0"
        return digits if match[1] != "-" or digits == "0" else "-" + digits
    return text


def verify_dapo(response: str, answer: str) -> Judgement:
    """Verify by DAPO eq. 7."""
    answer_line = find_answer(response)
    if answer_line is None:
        return Judgement(False)
    extracted = normalise(answer_line)
    return Judgement(extracted != "" and extracted == normalise(answer), extracted or None)
