"""Soft overlong punishment, and functions for `reward.terms`."""

from __future__ import annotations

import math
import re

from megarl.config.plugins import plugin
from megarl.rewards.verdict import GradedResponse

THINK_ANSWER = r"\A\s*<think>.*?</think>\s*<answer>.*?</answer>\s*\Z"


def soft_overlong_punishment(length: int, max_tokens: int, buffer: int) -> float:
    """Return DAPO eq. 13, in [-1, 0], for |y| = `length` tokens.

    With L_max = `max_tokens` and L_cache = `buffer`: 0 for |y| <= L_max - L_cache; ((L_max - L_cache) -
    |y|) / L_cache up to L_max; -1 beyond. Raises ValueError unless 0 < buffer <= max_tokens."""
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer must be in (0, max_tokens = {max_tokens}] (got {buffer})")
    return max(-1.0, min(0.0, (max_tokens - buffer - length) / buffer))


def cosine_length(
    response: GradedResponse,
    correct_short: float = 2.0,
    correct_long: float = 1.0,
    wrong_short: float = -10.0,
    wrong_long: float = 0.0,
    truncated: float = -10.0,
) -> float:
    """Return the cosine reward (Yeo et al. 2025, arXiv 2502.03373) for l of at most L tokens.

    It is r_L + (r_0 - r_L) (1 + cos(pi l / L)) / 2 with r_0 = `*_short` and r_L = `*_long`, or `truncated`.
    The paper uses no other reward (`reward.weight` 0)."""
    if response.truncated:
        return truncated
    short, long = (correct_short, correct_long) if response.verdict.correct else (wrong_short, wrong_long)
    return long + (short - long) * (1 + math.cos(math.pi * response.length / response.longest)) / 2


def matches(response: GradedResponse, pattern: str = THINK_ANSWER) -> float:
    """Return 1 if the pattern is found, else 0; `.` also matches line ends.

    Default: DeepSeek-R1's format reward (arXiv 2501.12948, section 2.2.2)."""
    return float(re.search(pattern, response.text, re.DOTALL) is not None)


def boxed_or_answer_line(response: GradedResponse) -> float:
    r"""Return 1 if there is an `Answer: ...` or `\boxed{...}`, else 0."""
    answers = (plugin("megarl.answers", plugin_name)(response.text) for plugin_name in ("line", "boxed"))
    return float(any(answer is not None for answer in answers))
