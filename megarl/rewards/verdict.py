"""What a verifier says about one response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """correct: whether the response answers the problem. extracted: the normalised final answer, for majority voting; None where
    the response gives none. error: why no judgement was reached (the answer then counts as wrong), else None."""

    correct: bool
    extracted: str | None = None
    error: str | None = None


# (response, reference answer) -> judgement. A plain bool will do; a Verdict can carry the extracted answer as well.
Verifier = Callable[[str, str], bool | Verdict]
