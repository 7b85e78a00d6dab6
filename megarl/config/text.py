"""Make text from data files, models and policies safe to print."""

from __future__ import annotations

import re

# C0 without tab and newline, DEL, C1, bidirectional controls, line and paragraph separators, surrogates.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Escape control characters, such as `\x1b`; keep tabs and newlines.

    Control characters can hide text, forge lines, or set a terminal's title."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
