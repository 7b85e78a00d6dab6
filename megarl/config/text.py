"""Text from data files, models and policies, made safe to print."""

from __future__ import annotations

import re

# C0 but tab and newline, DEL, C1, bidirectional controls, line and paragraph separators, lone surrogates.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Return `text` with control characters as escapes such as `\x1b`; tabs and newlines stay.

    A terminal obeys control characters: they can hide text, forge lines, or set the window's title."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
