"""What a verifier says about one response, verifiers by name, and the length penalty that is added to their
reward."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from megarl.config.errors import ConfigError


@dataclass(frozen=True)
class Verdict:
    """The judgement of one response.

    correct    whether the response answers the problem: what accuracy, pass@k, group filtering and the
               positive-example loss count
    extracted  the normalised final answer, for majority voting; None where the response gives none
    error      why no judgement was reached (the answer then counts as wrong), else None
    score      of a verifier that grades, any finite number: 1 earns what a right answer earns, 0 what a wrong
               one does; None: what `correct` says"""

    correct: bool
    extracted: str | None = None
    error: str | None = None
    score: float | None = None

    def reward(self, correct: float, incorrect: float) -> float:
        """Return (1 - score) incorrect + score correct: exactly one of the two at 0 and at 1, which
        `incorrect + score (correct - incorrect)` is not in floating point."""
        score = float(self.correct) if self.score is None else self.score
        return (1.0 - score) * incorrect + score * correct


# (response, reference answer) -> judgement. A plain bool will do; a number is a score, and right from 1 on; a
# Verdict can carry the extracted answer, and a score of which it says itself whether it is right.
Verifier = Callable[[str, str], bool | float | Verdict]

_BUILT_IN = {"dapo": "megarl.rewards.answer:verify_dapo", "math": "megarl.rewards.symbolic:verify_math"}


def get_verifier(name: str) -> Verifier:
    """Return the function that `reward.verifier` names, `dapo`, `math` or `module:function` of the user:
    `f(response, reference answer) -> bool | float | Verdict`.

    Raises ConfigError if it cannot be imported or is not callable."""
    module_name, colon, function = _BUILT_IN.get(name, name).partition(":")
    if not colon or not module_name or not function:
        raise ConfigError(
            f"reward.verifier: unknown verifier {name!r} "
            f"(use {', '.join(_BUILT_IN)} or package.module:function)"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module of the user may raise anything while it is imported
        first_line = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"reward.verifier: {module_name} cannot be imported: {type(error).__name__}: {first_line} "
            f"(it must lie on PYTHONPATH or in the current folder)"
        ) from error
    verifier = getattr(module, function, None)
    if not callable(verifier):
        raise ConfigError(f"reward.verifier: {module_name} has no function {function}")
    return verifier


def soft_overlong_punishment(length: int, max_tokens: int, buffer: int) -> float:
    """Return DAPO eq. 13, in [-1, 0], for a response of `length` tokens, with L_max = `max_tokens` and
    L_cache = `buffer` (0 < buffer <= max_tokens, else ValueError).

    0 for |y| <= L_max - L_cache; ((L_max - L_cache) - |y|) / L_cache up to L_max; -1 beyond."""
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer must be in (0, max_tokens = {max_tokens}] (got {buffer})")
    return max(-1.0, min(0.0, (max_tokens - buffer - length) / buffer))
